"""The mathematics of masked diffusion: schedules, losses, reverse steps, unmasking. Pure.

Every function takes NumPy, JAX or PyTorch arrays and gives back the same kind; all trace under
jax.jit and compile under torch.compile(fullgraph=True). Random numbers are arguments (u: uniform in
[0, 1)), token ids too: nothing here draws, configures or knows a model. Half precision is computed
in float32; float64 stays float64.

Time t runs from 0 (text) to 1 (all MASK). rate(t) = P(a token is MASK at t) = 1 - alpha(t).

Letters: B batch, L length, V vocabulary, N denoising steps.
Refs: MDLM, arXiv:2406.07524; LLaDA, arXiv:2502.09992; Dream, arXiv:2508.15487; DiffuCoder,
arXiv:2506.20639.
"""

import math
import sys
import typing

import numpy as np

CONFIDENCES = ("max_prob", "margin", "entropy")
# Added to a temperature: it changes none from 1e-14 on, and logits / 1e-30 do not overflow float32.
COLDEST = 1e-30

# ---- three array libraries -----------------------------------------------------------------------


def _namespace(x):
    """The library of an array, as a module: numpy (also for numbers), jax.numpy or torch."""
    if isinstance(x, (np.ndarray, np.generic, float, int)):
        return np
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return sys.modules["torch"]


def _float(x):
    """x in float32 if it is narrower than that."""
    if x.dtype.itemsize >= 4:
        return x
    if hasattr(x, "float"):
        return x.float()
    return x.astype("float32")


def _take(x, index):
    if hasattr(x, "gather"):
        return x.gather(-1, index.long())
    return _namespace(x).take_along_axis(x, index, -1)


def _ids(x_BLV):
    """0 .. V - 1, on x's device."""
    xp = _namespace(x_BLV)
    if hasattr(xp, "gather"):
        return xp.arange(x_BLV.shape[-1], device=x_BLV.device)
    return xp.arange(x_BLV.shape[-1])


def _column(t_B, x_BL):
    """[B] as [B, 1, ...], to broadcast against x."""
    return t_B.reshape(t_B.shape + (1,) * (x_BL.ndim - t_B.ndim))


def _rank(score_BL):
    """Rank of each element in its row, 0 for the largest; of equals the lower index first."""
    xp = _namespace(score_BL)
    stable = {"kind": "stable"} if xp is np else {"stable": True}  # NumPy 1 has only the first
    return xp.argsort(xp.argsort(-score_BL, **stable), **stable)


def log_softmax(logits_BLV):
    """The logarithm of softmax over the last axis, in float32 at least; -inf stays -inf."""
    xp = _namespace(logits_BLV)
    logits_BLV = _float(logits_BLV)
    if hasattr(xp, "log_softmax"):  # torch: one pass instead of five
        return xp.log_softmax(logits_BLV, -1)
    shifted_BLV = logits_BLV - xp.amax(logits_BLV, -1, keepdims=True)
    return shifted_BLV - xp.log(xp.exp(shifted_BLV).sum(-1, keepdims=True))


def softmax(logits_BLV):
    """exp(log_softmax)."""
    xp = _namespace(logits_BLV)
    if hasattr(xp, "softmax"):
        return xp.softmax(_float(logits_BLV), -1)
    return xp.exp(log_softmax(logits_BLV))


# ---- schedules -----------------------------------------------------------------------------------


class Schedule(typing.NamedTuple):
    """A noise schedule: rate(t) = P(masked at time t), and its derivative slope(t).

    rate rises from 0 at 0 to exactly 1 at 1. The functions take arrays of any library, or numbers.
    """

    rate: typing.Callable
    slope: typing.Callable


def _cosine(t):
    """1 - cos(pi t / 2), written so that it is exact at both ends."""
    xp = _namespace(t)
    return xp.where(t < 0.5, 2 * xp.sin(math.pi / 4 * t) ** 2, 1 - xp.sin(math.pi / 2 * (1 - t)))


# A new entry here is a schedule for the samplers of MDLM; both trainers' bounds are linear.
# `cosine` is that of MDLM; MaskGIT's, sin(pi t / 2), is another function.
SCHEDULES = {
    "linear": Schedule(rate=lambda t: t, slope=lambda t: 0 * t + 1),
    "cosine": Schedule(
        rate=_cosine,
        slope=lambda t: math.pi / 2 * _namespace(t).sin(math.pi / 2 * t),
    ),
    "cosine_sq": Schedule(
        rate=lambda t: _namespace(t).sin(math.pi / 2 * t) ** 2,
        slope=lambda t: math.pi / 2 * _namespace(t).sin(math.pi * t),
    ),
}


def mask_rate(t, schedule):
    """P(masked) at t in [0, 1]: linear t; cosine 1 - cos(pi t / 2); cosine_sq sin(pi t / 2)^2."""
    return SCHEDULES[schedule].rate(t)


def nelbo_weight(t, schedule):
    """slope / rate, for t > 0; linear 1 / t."""
    return SCHEDULES[schedule].slope(t) / mask_rate(t, schedule)


def antithetic_times(u_B, eps=1e-3):
    """One time in each of B equal strata: t_i = (1 - eps) ((u_i + i) / B mod 1) + eps.

    The mean of w(t) varies far less than over B independent times. Ref: MDLM, section 3.4, code.
    """
    B = u_B.shape[0]
    stratum_B = _ids(u_B) + 0 * u_B  # in u's precision: torch divides integers in float32
    return (1 - eps) * ((u_B / B + stratum_B / B) % 1) + eps


# ---- forward process and losses ------------------------------------------------------------------


def q_sample(x0_BL, t_B, u_BL, schedule, mask_id, pad_id, frozen_BL=None):
    """(xt_BL, mask_BL): x0 with MASK where u < rate(t), except at PAD and at frozen positions."""
    mask_BL = (u_BL < _column(mask_rate(t_B, schedule), u_BL)) & (x0_BL != pad_id)
    if frozen_BL is not None:
        mask_BL = mask_BL & ~frozen_BL
    return _namespace(x0_BL).where(mask_BL, mask_id, x0_BL), mask_BL


def mask_exactly(counted_BL, u_B, u_BL):
    """Mask m of each row's n counted tokens, m uniform in 1 .. n, chosen by u_B: (mask_BL, n / m
    [B]).

    n / m sum_L nll estimates the same bound as w(t) sum_L nll, with less variance: the number of
    masks is not random. Ref: LLaDA, arXiv:2502.09992, eq. 6.
    """
    xp = _namespace(u_B)
    n_B = counted_BL.sum(-1).clip(1)
    m_B = xp.ceil(u_B * n_B).clip(1)
    rank_BL = _rank(xp.where(counted_BL, u_BL, -1.0))
    return counted_BL & (rank_BL < _column(m_B, u_BL)), n_B / m_B


def masked_nll(logits_BLV, x0_BL, mask_BL, mask_id):
    """-log p(x0 | xt) [B, L] in nats where mask_BL, 0 elsewhere; all losses are sums of it.

    MASK has probability 0, as it is no token, and unmasked tokens cost nothing. Ref: MDLM, section
    3.2.3.
    """
    xp = _namespace(logits_BLV)
    logp_BLV = log_softmax(ban(logits_BLV, [mask_id]))
    index_BL = xp.where(mask_BL, x0_BL, 0)  # elsewhere x0 may be MASK: -inf, and a NaN gradient
    return xp.where(mask_BL, -_take(logp_BLV, index_BL[..., None])[..., 0], 0.0)


def nelbo_per_token(nll_BL, t_B, counted_BL, schedule):
    """Sum of w(t) sum_L nll over the batch / number of tokens that can be masked (not of those that
    are), in nats.

    w(t) sum_L nll is an unbiased estimate of a bound on -log p(x0). Ref: MDLM, eq. 10. For a
    micro-batch counted_BL, instead of the mask, may be the count of the whole batch: the losses
    then add up.
    """
    return (nelbo_weight(t_B, schedule) * nll_BL.sum(-1)).sum() / counted_BL.sum().clip(1)


def masked_accuracy(logits_BLV, x0_BL, mask_BL, mask_id):
    """Share of masked tokens whose likeliest id, MASK excluded, is right."""
    best_BL = sample_tokens(ban(logits_BLV, [mask_id]), None, 0)
    return (mask_BL & (best_BL == x0_BL)).sum() / mask_BL.sum().clip(1)


# ---- blocks --------------------------------------------------------------------------------------


class Place(typing.NamedTuple):
    """Positions of tokens, arrays [B, L], from which `sees` makes an attention mask.

    document: its number, 0 for padding. block: number of the token's block in its document; None:
    no blocks. noisy: True in the noised copy of a row, False in the clean one; None: a single copy.
    seen [B or 1, L, M], of queries only: False masks a key in addition; None: masks nothing.
    """

    document: typing.Any
    block: typing.Any = None
    noisy: typing.Any = None
    seen: typing.Any = None


def sees(query, key):
    """The attention mask [B, L, M] of queries and keys, given as Places: True where a query attends
    to a key.

    A query attends to its own document; with blocks, to its own and earlier blocks of it. With a
    noised copy, a noised query attends to its own block noised and to earlier blocks clean, a clean
    query to clean keys alone. With blocks padding attends to nothing. Ref: BD3-LM,
    arXiv:2503.09573, M_BD, M_OBC and M_BC.
    """
    document_BL1 = query.document[..., :, None]
    same_BLM = document_BL1 == key.document[..., None, :]
    if query.seen is not None:
        same_BLM = same_BLM & query.seen
    if query.block is None:
        return same_BLM

    same_BLM = same_BLM & (document_BL1 > 0)
    block_BL1 = query.block[..., :, None]
    block_B1M = key.block[..., None, :]
    if query.noisy is None:
        return same_BLM & (block_B1M <= block_BL1)

    noisy_BL1 = query.noisy[..., :, None]
    noisy_B1M = key.noisy[..., None, :]
    own_BLM = block_B1M == block_BL1
    clean_BLM = (block_B1M < block_BL1) | (own_BLM & ~noisy_BL1)
    return same_BLM & ((noisy_B1M & noisy_BL1 & own_BLM) | (~noisy_B1M & clean_BLM))


def annealed(u_LL, ratio):
    """Attention mask [L, L] between causal (ratio 0) and bidirectional (1): later keys are visible
    where u < ratio.

    Ref: DiffuLLaMA, arXiv:2410.17891, section 3.
    """
    slot_L = _ids(u_LL)
    return (slot_L <= slot_L[:, None]) | (u_LL < ratio)


def block_noise(u, least=0.0, eps=1e-3):
    """(t, 1 / t) of blocks: the mask rate t = eps + (1 - eps) u, or at least `least`, and the
    weight of the loss. Only least = 0 gives a bound; 1 / block has less variance. Ref: BD3-LM,
    section 5.2.
    """
    t = eps + (1 - eps) * u
    t = _namespace(u).where(t < least, least, t)
    return t, 1 / t


def subset_mask(subset, counted_BL, position_BL, block):
    """(mask_BL, weight_BL): in each block the r-th counted token is masked if bit r of the number
    `subset` is 1.

    Summed over subset = 1 .. 2^block - 1, weight nll is the bound of the linear schedule without
    sampling: k masks of n counted tokens weigh 1 / (k C(n, k)), the integral of t^(k - 1) (1 -
    t)^(n - k). block is a Python int.
    """
    xp = _namespace(position_BL)
    L = position_BL.shape[-1]
    slot_L = _ids(position_BL)
    place_BL = position_BL % block
    rank_BL = 0 * position_BL
    count_BL = 0 * position_BL
    for j in range(block):  # the j-th token of the same block, if there is one
        at_BL = slot_L - place_BL + j
        near_BL = xp.where(at_BL < L, at_BL, L - 1)
        same_BL = _take(position_BL, near_BL) == position_BL - place_BL + j
        there_BL = _take(counted_BL, near_BL) & same_BL & (at_BL < L)
        count_BL = count_BL + there_BL
        rank_BL = rank_BL + (there_BL & (at_BL < slot_L))
    k = sum((subset >> j) & 1 for j in range(block))
    weight_NN = [[0.0] * (block + 1) for _ in range(block + 1)]
    for n in range(1, block + 1):
        for masks in range(1, n + 1):
            weight_NN[n][masks] = 1 / (masks * math.comb(n, masks))
    weight_BL = xp.asarray(weight_NN)[count_BL, k]
    mask_BL = counted_BL & ((subset >> rank_BL) % 2 == 1)
    return mask_BL, xp.where(mask_BL & ((subset >> count_BL) == 0), weight_BL, 0.0)


# ---- reverse process -----------------------------------------------------------------------------


def keep_prob(t, s, schedule):
    """P(still masked at s | masked at t) = rate(s) / rate(t), for s < t. Ref: MDLM, eq. 6."""
    return mask_rate(s, schedule) / mask_rate(t, schedule)


def ancestral_step(xt_BL, token_BL, u_BL, keep_B, mask_id):
    """Each masked position takes its token unless u < keep; what is not MASK stays."""
    xp = _namespace(xt_BL)
    return xp.where((xt_BL == mask_id) & (u_BL >= _column(keep_B, u_BL)), token_BL, xt_BL)


def dream_shares(steps, eps=1e-3):
    """The share of the masked tokens that each of Dream's steps unmasks, float32 [steps]: 1 - s/t,
    in the last step 1.

    (t, s) are neighbours on linspace(1, eps, steps + 1), in float32 as in the reference: other
    roundings give other counts where a product is nearly whole. Ref: Dream's generation code.
    """
    eps = np.float32(eps)
    step = (eps - 1) / np.float32(steps)
    i = np.arange(steps + 1)
    # torch.linspace counts from both ends, and rounds each product with its sum: here in float64
    t = np.where(2 * i < steps, 1 + step * i, eps - step * (steps - i)).astype(np.float32)
    t[-1] = 0
    return 1 - t[1:] / t[:-1]


def block_shares(steps):
    """The share 1 / (N - i) of the masked tokens that step i of a block unmasks, float64 [steps].

    With the roundings of dllm, where alpha = 1 - t is float32: they decide which halves round up.
    """
    t = np.float32(np.arange(steps, -1, -1) / steps)
    t = 1 - (1 - t)
    return 1 - np.float64(t[1:] / t[:-1])


def step_counts(masks, steps, rule, eps=1e-3):
    """Tokens to unmask at each of `steps` steps, `masks` in all: int64 [steps, ...]. NumPy, on the
    host.

    masks is a number, or an array with one per row. rule is a schedule: left_i = floor(masks rate(1
    - i/N) + 1e-6); "even": masks / steps, one more in the first masks % steps steps (LLaDA);
    "dream": floor(left dream_shares_i); or "block": left block_shares_i, rounded half to even.
    """
    masks = np.asarray(masks)
    if rule in ("dream", "block"):
        shares = dream_shares(steps, eps)
        rounded = np.floor
        if rule == "block":
            shares = block_shares(steps)
            rounded = np.rint
        left = masks.astype(np.int64)
        counts = []
        for share in shares:
            counts.append(rounded(left.astype(share.dtype) * share).astype(np.int64))
            left = left - counts[-1]
        return np.stack(counts)
    step = np.arange(steps + 1).reshape(-1, *[1] * masks.ndim)
    if rule == "even":
        return (masks // steps + (step[:-1] < masks % steps)).astype(np.int64)
    left = np.floor(masks * mask_rate(1 - step / steps, rule) + 1e-6).astype(np.int64)
    return left[:-1] - left[1:]


# ---- sampling ------------------------------------------------------------------------------------


def ban(logits_BLV, ids):
    """Logits with the given ids, such as MASK and PAD, at -inf: they are never drawn."""
    id_V = _ids(logits_BLV)
    banned_V = id_V < 0
    for i in ids:
        banned_V = banned_V | (id_V == i)
    return _namespace(logits_BLV).where(banned_V, -math.inf, _float(logits_BLV))


def filter_logits(logits_BLV, temperature=1.0, top_k=0, top_p=1.0, rule="mdlm", width=1):
    """Logits / temperature (0: not divided), with all but the top k and the top p at -inf; k 0 and
    p 1 are off.

    rule "mdlm": top-k, then top-p of the rest, which drops a token if those before it have
    probability p or more. "dream": top-p first, which drops a token if those before it have more
    than p; then top-k. Of equal probabilities the lower id comes first in top-p, and top-k keeps
    all that equal the k-th. temperature and p may be arrays, above 0; p above 1 is off. A tiny
    temperature, too, leaves the argmax. width, the bits that a pass settles, changes the speed
    alone: 1 on a CPU, else 3.
    """
    assert rule in ("mdlm", "dream"), rule
    xp = _namespace(logits_BLV)
    logits_BLV = _float(logits_BLV)
    if getattr(temperature, "ndim", 0) or temperature > 0:
        logits_BLV = logits_BLV / (temperature + COLDEST)
    if rule == "dream":
        return _top_k(_top_p(logits_BLV, top_p, xp.less_equal, width), top_k, width)
    return _top_p(_top_k(logits_BLV, top_k, width), top_p, xp.less, width)


def _descending(x_BLV):
    values = _namespace(x_BLV).sort(-x_BLV)
    if isinstance(values, tuple):  # torch adds the indices
        values = values[0]
    return -values


def _top_k(logits_BLV, k, width):
    if not 0 < k < logits_BLV.shape[-1]:
        return logits_BLV
    # JAX's sort takes 15 times as long as the bisection; NumPy's and torch's do not
    if hasattr(logits_BLV, "at"):
        kth_BL1 = _kth_largest(logits_BLV, k, width)
    else:
        kth_BL1 = _descending(logits_BLV)[..., k - 1 : k]
    return _namespace(logits_BLV).where(logits_BLV < kth_BL1, -math.inf, logits_BLV)


def _kth_largest(x_BLV, k, width):
    """The k-th largest [..., 1] of a JAX array, by bisection over the bits of floats."""
    xp = _namespace(x_BLV)
    limits = xp.iinfo(xp.int32 if x_BLV.dtype.itemsize == 4 else xp.int64)

    def turned(bits):  # to integers of the same order, and back: negative floats count down
        return xp.where(bits < 0, bits ^ limits.max, bits)

    number_BLV = turned(x_BLV.view(limits.dtype))
    zero_BL1 = 0 * number_BLV[..., :1]

    def enough(number_BL1):
        return (number_BLV >= number_BL1).sum(-1, keepdims=True) >= k

    # the least number with the sign of the k-th largest
    first_BL1 = xp.where(enough(zero_BL1), zero_BL1, limits.min)

    def enough_above(number_BL1):
        return enough(first_BL1 + number_BL1)

    rest_BL1 = _largest(zero_BL1, limits.bits - 1, width, enough_above)
    return turned(first_BL1 + rest_BL1).view(x_BLV.dtype)


def _largest(zero_BL1, bits, width, holds):
    """The largest integer of `bits` bits for which `holds`, true up to it and false above; `width`
    bits at a time.
    """
    # a loop, as a CPU's compiler takes 1.4 s for the 42 steps of top-p
    if width == 1 and hasattr(zero_BL1, "at"):

        def step(i, number_BL1):
            return number_BL1 + (holds(number_BL1 + (1 << bits - 1 - i)) << bits - 1 - i)

        return sys.modules["jax"].lax.fori_loop(0, bits, step, zero_BL1)
    number_BL1 = zero_BL1
    for shift in reversed(range(0, bits, width)):
        digits = [digit << shift for digit in range(1, 1 << min(width, bits - shift))]
        number_BL1 = number_BL1 + (1 << shift) * sum(
            zero_BL1 + holds(number_BL1 + digit) for digit in digits
        )
    return number_BL1


def _top_p(logits_BLV, p, stays, width):
    """By bisection: a sort takes a CPU ten times as long, and a TPU's compiler a minute.

    Tokens are ordered by probability, then by id. Two searches, of a few passes over the vocabulary
    each, find the last token that stays: its probability, whose bits as an integer have the same
    order, as it is not negative; then its id.
    """
    if not getattr(p, "ndim", 0):
        if p >= 1:
            return logits_BLV
        p = max(p, 1e-9)  # the likeliest stays
    xp = _namespace(logits_BLV)
    prob_BLV = softmax(logits_BLV)
    bits = 8 * prob_BLV.dtype.itemsize
    zero_BL1 = 0 * prob_BLV[..., :1].view(xp.int32 if bits == 32 else xp.int64)

    def stay(before_BLV):
        """Whether a token with these before it stays."""
        mass_BL1 = xp.where(before_BLV, prob_BLV, 0.0).sum(-1, keepdims=True)
        return stays(mass_BL1, p)

    def no_more_stay(number_BL1):
        return ~stay(prob_BLV >= number_BL1.view(prob_BLV.dtype))

    # 1.0 has 30 bits of 32
    last_BL1 = _largest(zero_BL1, bits - 2, width, no_more_stay).view(prob_BLV.dtype)
    more_BLV = prob_BLV > last_BL1
    equal_BLV = prob_BLV == last_BL1
    id_V = _ids(logits_BLV)

    def id_stays(number_BL1):
        return stay(more_BLV | (equal_BLV & (id_V < number_BL1)))

    last_id_BL1 = _largest(zero_BL1, logits_BLV.shape[-1].bit_length(), width, id_stays)
    return xp.where(more_BLV | (equal_BLV & (id_V <= last_id_BL1)), logits_BLV, -math.inf)


def sample_tokens(logits_BLV, u_BLV, temperature=1.0):
    """argmax(logits / temperature - log(-log u)): a draw from softmax(logits / temperature), or the
    argmax at 0.

    u is uniform in (0, 1). JAX's float32 uniforms end at 1 - 1.2e-7, which cuts the Gumbel tail at
    15.9.
    """
    xp = _namespace(logits_BLV)
    logits_BLV = _float(logits_BLV)
    if temperature:
        logits_BLV = logits_BLV / (temperature + COLDEST) - xp.log(-xp.log(u_BLV))
    # XLA's argmax takes a CPU eight times as long
    best_BLV = logits_BLV == xp.amax(logits_BLV, -1)[..., None]
    return xp.amin(xp.where(best_BLV, _ids(logits_BLV), logits_BLV.shape[-1] - 1), -1)


def confidence(prob_BLV, kind):
    """The confidence of a distribution [B, L]: max_prob p1; margin p1 - p2; entropy sum p log p
    (negative entropy).

    Ref: Dream's maskgit_plus, topk_margin and entropy.
    """
    assert kind in CONFIDENCES, kind
    xp = _namespace(prob_BLV)
    prob_BLV = _float(prob_BLV)
    if kind == "max_prob":
        return xp.amax(prob_BLV, -1)
    if kind == "margin":
        first_BLV = _ids(prob_BLV) == sample_tokens(prob_BLV, None, 0)[..., None]
        return xp.amax(prob_BLV, -1) - xp.amax(xp.where(first_BLV, -1.0, prob_BLV), -1)
    # the outer where keeps XLA from a CPU kernel that takes 15 times as long
    possible_BLV = prob_BLV > 0
    log_BLV = xp.log(xp.where(possible_BLV, prob_BLV, 1.0))
    return xp.where(possible_BLV, prob_BLV * log_BLV, 0.0).sum(-1)


def unmask_top(xt_BL, token_BL, score_BL, count_B, mask_id):
    """xt with the tokens of the `surest` masked positions; others never change."""
    return _namespace(xt_BL).where(surest(score_BL, xt_BL == mask_id, count_B), token_BL, xt_BL)


def surest(score_BL, masked_BL, count_B):
    """The count_B[b] masked positions of row b with the largest scores; of equals the first."""
    rank_BL = _rank(_namespace(score_BL).where(masked_BL, _float(score_BL), -math.inf))
    return masked_BL & (rank_BL < _column(count_B, rank_BL))


def entropy_bound(entropy_BL, masked_BL, bound):
    """The masked positions in order of entropy, lowest first, while the entropies before sum to at
    most `bound`.

    Their joint distribution then differs from the product of the marginals by at most `bound` nats.
    Ref: EB-Sampler, arXiv:2505.24857.
    """
    xp = _namespace(entropy_BL)
    # no entropy is so large, and inf - inf is NaN
    entropy_BL = xp.where(masked_BL, _float(entropy_BL), 1e9)
    ordered_BL = -_descending(-entropy_BL)
    before_BL = xp.cumsum(ordered_BL, -1) - ordered_BL
    return masked_BL & (_take(before_BL, _rank(-entropy_BL)) <= bound)


def coupled_masks(completion_BL, u_BL, ratio):
    """Two masks that together cover every completion token once: u < ratio, and the rest. For
    Coupled-GRPO.

    Ref: DiffuCoder, section 4; its code drops a token with u == ratio from both.
    """
    ratio = _namespace(u_BL).asarray(ratio, dtype=u_BL.dtype)
    return completion_BL & (u_BL < ratio), completion_BL & (u_BL >= ratio)


if __name__ == "__main__":
    sys.stdout.write(
        "a library of functions; its check: python -m pytest -q tests/test_diffusion.py\n"
    )
