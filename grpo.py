"""The mathematics of coupled_grpo.py: scores of completions, drift of sampler and learner, advantages, loss, steps.

Functions of arrays and of a model with `hidden` and `logits`; no files, no tasks, no trainer.

A completion is scored on three versions of its canvas: all of it MASK, a random mask m, and the complement of m. Each
token is MASK in the first and in exactly one of the other two, so its score always counts, with the text around it
half known. A trajectory's score replays the canvases that the sampler saw.

Letters: B sequences, L columns of a canvas, C of them its completion, T tokens in a chunk, K versions of a canvas, D
width, R rows of all versions, V vocabulary, F reward functions, G groups of N completions.
Refs: DiffuCoder, arXiv:2506.20639; GRPO, arXiv:2402.03300; leave-one-out baseline, arXiv:2402.14740.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffusion
import model_dream as md

VIEWS = 3  # canvases of a completion that are scored at a time, whatever the estimator


def round_up(count, multiple):
    return -(-count // multiple) * multiple


# ---- scores --------------------------------------------------------------------------------------------------------


def draw_masks(key, round, iteration, rows, columns, share=1, elbo=False):
    """{"ratio_B", "u_BC"} of one iteration: the share of a completion that the first mask takes, and its uniforms.

    A function of the arguments alone, and a row's draws of its number alone: old, reference and new scores of an
    iteration see the same masks. Each `share` rows in succession have one ratio, in [0.2, 0.8). For the ELBO exactly m
    tokens are masked, m uniform in 1 .. C - 1: the uniforms are then evenly spaced, and ratio m / C lies between two.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, round), iteration)

    def uniform(key, number_B, *shape):
        return jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number), shape))(number_B)

    row_B = jnp.arange(rows)
    t_B, u_BC = uniform(jax.random.fold_in(key, 0), row_B // share), uniform(key, row_B + 1, columns)
    if not elbo:
        return {"ratio_B": 0.2 + 0.6 * t_B, "u_BC": u_BC}
    m_B, rank_BC = 1 + jnp.floor(t_B * (columns - 1)), u_BC.argsort(-1).argsort(-1)
    return {"ratio_B": m_B / columns, "u_BC": (rank_BC + 0.5) / columns}


def coupled_views(token_BL, completion_BL, u_BL, ratio_B, mask_id, other_BL=None):
    """(the three versions of each canvas [B, K, L], mask_BL and other_BL, what is MASK in the second and the third).

    All of the completion is MASK in the first; what has u < ratio in the second, the rest in the third. The prompt is
    never; what follows EOS is, as in the reference. other_BL, uniforms of its own, makes the third independent.
    """
    ratio_B1 = jnp.reshape(ratio_B, (-1, 1))
    one_BL, two_BL = diffusion.coupled_masks(completion_BL, u_BL, ratio_B1)
    if other_BL is not None:
        two_BL = diffusion.coupled_masks(completion_BL, other_BL, ratio_B1)[1]
    views = [jnp.where(mask_BL, mask_id, token_BL) for mask_BL in (completion_BL, one_BL, two_BL)]
    return jnp.stack(views, 1), one_BL, two_BL


def token_logps(logits_of, hidden_BLD, token_BL, chunk=1024):
    """(log p, entropy) of each token's prediction, float32 [B, L] in nats; logits_of([B, T, D]) is float32 [B, T, V].

    The head runs over at most `chunk` tokens at a time, of all devices together, and the backward pass makes their
    logits again: [B, L, V] never exists. The entropy, for the log, has no gradient.
    """
    B, L, _ = hidden_BLD.shape
    T = 1 << (max(1, min(L, chunk // B)).bit_length() - 1)  # with 43, the TPU's compiler was not done in 100 s
    chunks = -(-L // T)

    @jax.checkpoint
    def of_chunk(inputs):
        hidden_BTD, token_BT = inputs
        logits_BTV = logits_of(hidden_BTD).astype(jnp.float32)
        logits_BTV -= jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))  # exp stays finite
        weight_BTV = jnp.exp(logits_BTV)
        total_BT = weight_BTV.sum(-1)
        logp_BT = jnp.take_along_axis(logits_BTV, token_BT[..., None], -1)[..., 0] - jnp.log(total_BT)
        # entropy = log sum_v e^x_v - sum_v e^x_v x_v / sum_v e^x_v
        finite_BTV = jnp.where(weight_BTV > 0, logits_BTV, 0.0)  # a banned token's is -inf
        entropy_BT = jnp.log(total_BT) - (weight_BTV * finite_BTV).sum(-1) / total_BT
        return logp_BT, jax.lax.stop_gradient(entropy_BT)

    def split(x_BL):  # along the rows, so that they stay where they are on a mesh
        x_BL = jnp.pad(x_BL, ((0, 0), (0, chunks * T - L), *[(0, 0)] * (x_BL.ndim - 2)))
        return x_BL.reshape(B, chunks, T, *x_BL.shape[2:]).swapaxes(0, 1)

    outs = jax.lax.map(of_chunk, (split(hidden_BLD), split(token_BL)))
    return tuple(out.swapaxes(0, 1).reshape(B, -1)[:, :L] for out in outs)


def merge_views(logits_of, hidden_BKCD, token_BC, mask_BC, weights, chunk=1024, elbo=False):
    """The score of each token, (lp_0 + (w_1 lp_1 where the mask, else w_2 lp_2)) / 2, and its entropy: float32 [B, C].

    For the ELBO, with w_1 = C / m and w_2 = C / (C - m), it is (lp_0 + (C - 1) / 2 (w_1 lp_1 or w_2 lp_2)) / C.

    hidden_BKCD holds what predicts the tokens in the three versions: all masked, the mask, its complement. Of the last
    two each position is scored in one alone, so they are merged before the head, which then has 2 C rows, not 3 C.
    The weights (w_1, w_2) multiply log-probabilities, as in the reference: a score is not one itself.
    """
    B, _, C, D = hidden_BKCD.shape
    seen_BCD = jnp.where(mask_BC[..., None], hidden_BKCD[:, 1], hidden_BKCD[:, 2])
    two_BCD = jnp.stack([hidden_BKCD[:, 0], seen_BCD], 1).reshape(2 * B, C, D)
    logp, entropy = (x.reshape(B, 2, C) for x in token_logps(logits_of, two_BCD, jnp.repeat(token_BC, 2, 0), chunk))
    full, part = (1 / C, (C - 1) / 2 / C) if elbo else (0.5, 0.5)
    return full * logp[:, 0] + part * logp[:, 1] * jnp.where(mask_BC, *weights), entropy.mean(1)


def hidden_of_views(model, token_BL, see_BL, views_BKC):
    """What predicts each token of K versions of the completions, the last C columns of token_BL: [B, K, C, D].

    All versions go through the model in one pass, behind their prompt. Raises ValueError if there is none. In a Dream
    of blocks each has the clean row beside it: see its `predicting`.
    """
    (B, K, C), L = views_BKC.shape, token_BL.shape[1]
    if L <= C:
        raise ValueError(f"{L} columns hold no prompt before {C} tokens of completion")
    views_BKL = jnp.concatenate([jnp.repeat(token_BL[:, None, : L - C], K, 1), views_BKC], 2)
    views_RL, see_RL = views_BKL.reshape(K * B, L), None if see_BL is None else jnp.repeat(see_BL, K, 0)
    cfg = getattr(model, "cfg", md.DreamConfig)  # the defaults, of a model that has none
    if not cfg.block_length:
        hidden, _ = model.hidden(views_RL, see_BM=see_RL)
        return hidden.reshape(B, K, L, -1)[:, :, L - C - cfg.shift : L - cfg.shift]
    see_RL = jnp.ones_like(views_RL) if see_RL is None else see_RL.astype(jnp.int32)
    rows = views_RL, jnp.repeat(token_BL, K, 0), see_RL, jnp.maximum(jnp.cumsum(see_RL, 1) - 1, 0)
    return model.predicting(*rows, cfg.block_length).reshape(B, K, L, -1)[:, :, L - C :]


def coupled_scores(model, token_BL, see_BL, u_BC, ratio_B, mask_id, chunk=1024, other_BC=None, elbo=False):
    """Scores of the completions, the last C columns of token_BL, and the entropy of their predictions: float32 [B, C].

    model.hidden(token_BL, see_BM=see_BL) are hidden states, those at p predict the token at p + 1; model.logits is the
    head. see_BL is False at padding. The masks are those of coupled_views, the weights 1 / ratio and 1 / (1 - ratio).
    With other_BC, for comparison, a token is scored in none, one or both of the masked versions, which gives the same
    expectation. Raises ValueError if there is no prompt. Ref: DiffuCoder, arXiv:2506.20639, section 4.
    """
    B, C = u_BC.shape
    token_BC, ratio_B1 = token_BL[:, -C:], jnp.reshape(ratio_B, (-1, 1)).astype(jnp.float32)
    views_BKC, one_BC, two_BC = coupled_views(token_BC, jnp.ones((B, C), bool), u_BC, ratio_B, mask_id, other_BC)
    hidden_BKCD = hidden_of_views(model, token_BL, see_BL, views_BKC)
    if other_BC is None:
        weights = 1 / ratio_B1, 1 / (1 - ratio_B1)
        return merge_views(model.logits, hidden_BKCD, token_BC, one_BC, weights, chunk, elbo)

    # Independent masks: (lp_0 + m_1 lp_1 / ratio + m_2 lp_2 / (1 - ratio)) / 2.
    three = hidden_BKCD.reshape(3 * B, C, -1), jnp.repeat(token_BC, 3, 0)
    logp_BKC, entropy_BKC = (x.reshape(B, 3, C) for x in token_logps(model.logits, *three, chunk))
    weight_BKC = jnp.stack([jnp.ones((B, C)), one_BC / ratio_B1, two_BC / (1 - ratio_B1)], 1)
    return (logp_BKC * weight_BKC).sum(1) / 2, entropy_BKC.mean(1)


def trajectory_scores(model, token_BL, see_BL, step_BC, at_BK, mask_id, chunk=1024, temperature=1.0, vocab=0):
    """log p of each token that was drawn in the steps at_BK, 0 for the others, and its entropy: float32 [B, C].

    token_BL and step_BC are a sample_dream.Record's, step_BC of the completion's columns: before step s a canvas shows
    what has a smaller step. p is after the temperature, and without MASK and ids from `vocab` on, which are never
    drawn; what top-p leaves out is in it, as in the Record. If positions are chosen by the distribution, the sum over
    all steps is the log-probability of the path on which the completion was written.
    """
    C = step_BC.shape[1]
    token_BC = token_BL[:, -C:]
    views_BKC = jnp.where(step_BC[:, None] >= at_BK[..., None], mask_id, token_BC[:, None])
    hidden_BKCD = hidden_of_views(model, token_BL, see_BL, views_BKC)
    here_BKC = step_BC[:, None] == at_BK[..., None]
    hidden_BCD = jnp.take_along_axis(hidden_BKCD, here_BKC.argmax(1)[:, None, :, None], 1)[:, 0]

    def logits_of(hidden_BTD):
        logits_BTV = model.logits(hidden_BTD).astype(jnp.float32) / temperature
        id_V = jnp.arange(logits_BTV.shape[-1])
        return jnp.where((id_V == mask_id) | (id_V >= (vocab or len(id_V))), -jnp.inf, logits_BTV)

    logp_BC, entropy_BC = token_logps(logits_of, hidden_BCD, token_BC, chunk)
    return jnp.where(here_BKC.any(1), logp_BC, 0.0), entropy_BC


def steps_to_replay(step_BC, most, rng):
    """(at_BJ, scale_B): `most` steps of each completion at random, or with 0 all; and how many each of them stands for.

    scale_B times a sum over the chosen has the sum over all steps for its mean. -1 fills up to a multiple of VIEWS.
    """
    steps = [np.unique(step_C) for step_C in step_BC]
    chosen = [np.sort(rng.permutation(step)[: most or len(step)]) for step in steps]
    J = round_up(max(map(len, chosen)), VIEWS)
    at_BJ = np.stack([np.pad(step, (0, J - len(step)), constant_values=-1) for step in chosen])
    return at_BJ, np.array([len(a) / len(b) for a, b in zip(steps, chosen, strict=True)], np.float32)


def in_parts(views):
    """What says on which canvases completions are scored, as parts of VIEWS canvases each, whose scores are added."""
    if "at_BJ" not in views:  # coupled masks: three
        return [views]
    rest, at_BJ = {name: x for name, x in views.items() if name != "at_BJ"}, views["at_BJ"]
    return [rest | {"at_BK": at_BJ[:, j : j + VIEWS]} for j in range(0, at_BJ.shape[1], VIEWS)]


# ---- sampler and learner -------------------------------------------------------------------------------------------


def drift(log_BC, counted_BC):
    """How far apart sampler and learner are, of log(learner's p / sampler's p) of the counted tokens.

    "drift_k1" and "drift_k3" are means of -log w and w - 1 - log w, which estimate KL(sampler || learner), the second
    with less noise; "drift_ratio_max" is the largest w.
    """
    log_T = np.clip(np.asarray(log_BC, np.float64)[counted_BC], -20, 20)
    k1, k3, most = -log_T.mean(), (np.exp(log_T) - 1 - log_T).mean(), np.exp(log_T.max())
    return {"drift_k1": float(k1), "drift_k3": float(k3), "drift_ratio_max": float(most)}


def importance_weights(log_BC, counted_BC, form, most=3.0):
    """Weights of the tokens' losses, from log(learner's p / sampler's p): of a token, or the sum over its completion.

    A weight is exp of that, and beyond `most` it is `most` ("truncate") or 0 ("mask"). Ref: TRL's GRPOTrainer.
    """
    level, kind = form.split("_")
    log_BC = np.where(counted_BC, log_BC, 0.0)
    if level == "sequence":
        log_BC = np.broadcast_to(log_BC.sum(1, keepdims=True), log_BC.shape)
    weight_BC = np.exp(np.clip(log_BC, -20, 20))
    return np.minimum(weight_BC, most) if kind == "truncate" else np.where(weight_BC > most, 0.0, weight_BC)


def next_refresh(refresh, calm, longest, k3, bound):
    """(refresh, calm) of the next round: a cache is opened again after so many passes; 0 never, which is `longest`.

    Twice as often if the drift k3 is above the bound, at last in each pass, which leaves no drift but that of rounding.
    Half as often after five calm rounds in succession, in which it was below a fifth of the bound.
    """
    if k3 > bound:
        return max(1, (refresh or longest) // 2), 0
    calm = calm + 1 if k3 < bound / 5 else 0
    if calm < 5 or not refresh:
        return refresh, calm
    return (2 * refresh if 2 * refresh < longest else 0), 0


# ---- rewards and loss ----------------------------------------------------------------------------------------------


def completion_mask(token_BC, eos_id):
    """True up to and including the first EOS; all True where there is none. NumPy or JAX arrays."""
    ends_BC = token_BC == eos_id
    return ends_BC.cumsum(-1) - ends_BC == 0


class Advantages(typing.NamedTuple):
    """One entry per completion, NumPy float64 or bool."""

    reward_B: np.ndarray  # weighted sum of the reward functions, nan counting as 0
    advantage_B: np.ndarray
    std_B: np.ndarray  # of its group, with N - 1
    counted_B: np.ndarray  # False: its reward is not known
    constant_B: np.ndarray  # all known rewards of its group are equal, so nothing is learnt from it


def group_advantages(reward_BF, weight_F, group, scale=False, missing_is_zero=False):
    """Each reward minus the mean of the others in its group of `group` consecutive rows; None or nan: none known.

    A = R - sum_others / (n - 1) = n / (n - 1) (R - mean), with n known rewards in the group. A completion that lacks a
    reward, as when the sandbox failed, has advantage 0 and is in nobody's baseline; leave its tokens out of the loss
    (counted_B). missing_is_zero, the reference: it has a reward of 0. scale divides by the group's standard deviation +
    1e-4. Raises ValueError for groups of one, which have no baseline. Ref: RLOO, arXiv:2402.14740.
    """
    if group < 2:
        raise ValueError(f"groups of {group} have no baseline: at least 2 completions per prompt are needed")
    reward_BF = np.array(reward_BF, np.float64).reshape(len(reward_BF), -1)
    counted_B = ~np.isnan(reward_BF).any(-1) | missing_is_zero
    reward_B = (np.nan_to_num(reward_BF, nan=0.0) * np.asarray(weight_F, np.float64)).sum(-1)

    # A row is a group. Masked entries, the rewards that are not known, are in none of its statistics.
    reward_GN = np.ma.array(reward_B, mask=~counted_B).reshape(-1, group)
    n_G1 = reward_GN.count(-1)[:, None]
    others_G1 = np.maximum(n_G1 - 1, 1)
    range_G1 = (reward_GN.max(-1) - reward_GN.min(-1)).filled(0)[:, None]
    constant_G1 = (n_G1 < 2) | (range_G1 == 0)
    difference_GN = (reward_GN - reward_GN.mean(-1, keepdims=True)).filled(0)
    difference_GN = np.where(constant_G1, 0.0, difference_GN)  # that from a rounded mean may not be 0
    std_G1 = np.sqrt((difference_GN**2).sum(-1, keepdims=True) / others_G1)
    advantage_GN = difference_GN * n_G1 / others_G1
    if scale:
        advantage_GN /= std_G1 + 1e-4
    std_B, constant_B = (np.repeat(x_G1, group) for x_G1 in (std_G1, constant_G1))
    return Advantages(reward_B, advantage_GN.reshape(-1), std_B, counted_B, constant_B)


def grpo_loss(
    score_BC, old_BC, ref_BC, advantage_B, counted_BC,
    low=0.5, high=0.5, beta=0.01, most=20.0,
    delta=0.0, ratio="token", loss="bnpo", update_tokens=0, weight_BC=None, part_BC=None,
):  # fmt: skip
    """(loss, metrics): -min(r A, clip(r, 1 - low, 1 + high) A) + beta KL of the counted tokens, float32.

    r = exp(score - old), where ratio is "sequence" of the mean over a completion's tokens; old None stands for the
    score itself, so r = 1. With delta r is at most delta in the first term. KL = exp(d) - d - 1 with d = ref - score;
    ref None leaves it out. The sum over tokens is divided by their number ("bnpo"), by update_tokens ("dapo"), by B C
    ("dr_grpo"), or is a mean over the completions of the mean over each one's tokens ("grpo"). Both logarithms are
    clipped to +-`most`, where their gradients end, and what is not counted may be anything. Without a counted token
    loss and metrics are 0. weight_BC multiplies the terms but for their KL. part_BC multiplies what is summed, in loss
    and metrics, but not the divisors: 0 leaves a token to another call, whose result is added. metrics: "kl",
    "clip_low" and "clip_high" (shares of tokens without gradient at either side), "ratio_max", "tokens".
    Refs: PPO, arXiv:1707.06347, eq. 7; k3, http://joschu.net/blog/kl-approx.html; DAPO, arXiv:2503.14476; Dr. GRPO,
    arXiv:2503.20783; GSPO, arXiv:2507.18071; two-sided clip, arXiv:2505.07291.
    """
    counted_BC = counted_BC.astype(bool)
    tokens, tokens_B1 = counted_BC.sum(), jnp.maximum(counted_BC.sum(1, keepdims=True), 1)
    rows = jnp.maximum(counted_BC.any(1).sum(), 1)
    divisor = {
        "bnpo": lambda: jnp.maximum(tokens, 1),
        "dapo": lambda: update_tokens,
        "dr_grpo": lambda: rows * counted_BC.shape[1],
        "grpo": lambda: rows * tokens_B1,
    }[loss]()

    part_BC = jnp.ones(counted_BC.shape) if part_BC is None else part_BC

    def mean(x_BC):
        return jnp.where(counted_BC, x_BC * part_BC, 0.0).sum() / jnp.maximum(tokens, 1)

    def logarithm(x_BC):
        return jnp.clip(jnp.where(counted_BC, x_BC, 0.0), -most, most)

    # the clipped policy gradient
    score_BC = score_BC.astype(jnp.float32)
    old_BC = jax.lax.stop_gradient(score_BC if old_BC is None else old_BC)
    advantage_B1 = jnp.asarray(advantage_B, jnp.float32)[:, None]
    log_BC = logarithm(score_BC - old_BC)
    if ratio == "sequence":
        log_BC = jnp.broadcast_to(log_BC.sum(1, keepdims=True) / tokens_B1, log_BC.shape)
    ratio_BC = jnp.exp(log_BC)
    free_BC = jnp.minimum(ratio_BC, delta) if delta else ratio_BC
    bound_BC = jnp.clip(ratio_BC, 1 - low, 1 + high)
    loss_BC = -jnp.minimum(free_BC * advantage_B1, bound_BC * advantage_B1) * (1 if weight_BC is None else weight_BC)

    # the divergence from the reference model
    kl_BC = jnp.zeros_like(loss_BC)
    if beta and ref_BC is not None:
        log_BC = logarithm(ref_BC - score_BC)
        kl_BC = jnp.exp(log_BC) - log_BC - 1
        loss_BC += beta * kl_BC
    seen_BC = counted_BC & (part_BC > 0)
    return (jnp.where(counted_BC, loss_BC * part_BC, 0.0) / divisor).sum(), {
        "kl": mean(kl_BC),
        "clip_low": mean((ratio_BC < 1 - low) & (advantage_B1 < 0)),
        "clip_high": mean((ratio_BC > 1 + high) & (advantage_B1 > 0)),
        "ratio_max": jnp.where(seen_BC, ratio_BC, 0.0).max(),
        "tokens": seen_BC.sum(),
    }


def scores_of(model, batch, mask_id, chunk=1024, elbo=False, temperature=1.0, vocab=0):
    """(score_BC, entropy_BC, part_BC) of a micro-batch: coupled_scores, or trajectory_scores if it has steps at_BK.

    part_BC is None, or what a token stands for: 0 if it was drawn in none of those steps.
    """
    if "at_BK" not in batch:
        inputs = (batch[name] for name in ("token_BL", "see_BL", "u_BC", "ratio_B"))
        return *coupled_scores(model, *inputs, mask_id, chunk, batch.get("other_BC"), elbo), None
    inputs = (batch[name] for name in ("token_BL", "see_BL", "step_BC", "at_BK"))
    score_BC, entropy_BC = trajectory_scores(model, *inputs, mask_id, chunk, temperature, vocab)
    here_BC = (batch["step_BC"][:, None] == batch["at_BK"][..., None]).any(1)
    return score_BC, entropy_BC, here_BC * batch["scale_B"][:, None]


def micro_loss(
    model, batch, mask_id,
    low=0.5, high=0.5, beta=0.01, chunk=1024, elbo=False, temperature=1.0, vocab=0, scores_of=scores_of, **form,
):  # fmt: skip
    """(loss, metrics) of one micro-batch, to be differentiated: grpo_loss, in a form of it, of scores_of.

    batch: token_BL, see_BL, advantage_B, counted_BC, old_BC, ref_BC if beta is not 0, update_tokens if the loss is
    "dapo", weight_BC if terms have weights. For coupled scores u_BC, ratio_B, and other_BC if the masks are to be
    independent; for a trajectory's step_BC, at_BK and scale_B. Where batch["first"] is True nothing was learnt since
    old_BC: the score stands for it.
    """
    score_BC, entropy_BC, part_BC = scores_of(model, batch, mask_id, chunk, elbo, temperature, vocab)
    old_BC = jnp.where(batch["first"], jax.lax.stop_gradient(score_BC), batch["old_BC"])
    terms = old_BC, batch.get("ref_BC"), batch["advantage_B"], batch["counted_BC"]
    form |= {"update_tokens": batch.get("update_tokens", 0), "weight_BC": batch.get("weight_BC"), "part_BC": part_BC}
    loss, metrics = grpo_loss(score_BC, *terms, low, high, beta, **form)
    counted_BC = batch["counted_BC"].astype(bool)
    part_BC = counted_BC if part_BC is None else part_BC
    entropy = jnp.where(counted_BC, entropy_BC * part_BC, 0.0).sum() / jnp.maximum(counted_BC.sum(), 1)
    return loss, metrics | {"entropy": entropy}


# ---- updates -------------------------------------------------------------------------------------------------------


def add_gradients(loss_fn, params, batch, total):
    """(total + the gradients of one micro-batch, metrics) for loss_fn(params, batch) -> (loss, metrics).

    An update divides the total by the number of micro-batches. Each of them has been divided by its own number of
    tokens, on all devices (in the reference: a device's part by its own): this is no mean over the tokens of all.
    """
    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    return jax.tree.map(jnp.add, total, grads), {"loss": loss} | metrics


def round_plan(accumulate, iterations, reference_index=False):
    """[(micro-batch, iteration, whether an update follows)] of the micro-steps between two generations.

    All A micro-batches are gone through `iterations` times, each time under masks of its own. The reference takes
    (step + 1) mod iterations for the iteration, which with A = 2 shows a micro-batch the same masks every time.
    """
    return [
        (k % accumulate, (k + 1 if reference_index else k // accumulate) % iterations, (k + 1) % accumulate == 0)
        for k in range(accumulate * iterations)
    ]


def learning_rate(step, peak, steps, warmup=1, floor=0.1):
    """Of update `step` (0, 1, ...): peak step / warmup below warmup, then a cosine that ends at floor peak at `steps`.

    So the first update has rate 0, as in the reference (cosine_with_min_lr of Transformers).
    """
    step = jnp.asarray(step, jnp.float32)
    x = jnp.clip((step - warmup) / max(1, steps - warmup), 0.0, 1.0)
    falling = floor + (1 - floor) * (1 + jnp.cos(jnp.pi * x)) / 2
    return peak * jnp.where(step < warmup, step / max(1, warmup), falling)


def make_optimizer(rate, weight_decay=0.1, clip=0.2):
    """Global-norm clip, then AdamW (0.9, 0.99, 1e-8); rate is a number or a function of the update.

    Only arrays of two or more axes decay: no norm and no bias. Keep the parameters in float32: at rate 1e-6 an update
    of bfloat16 weights is nearly always rounded away.
    """
    decays = functools.partial(jax.tree.map, lambda x: x.ndim >= 2)
    adamw = optax.adamw(rate, 0.9, 0.99, 1e-8, weight_decay=weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(clip), adamw)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="mixup")
def sync_reference(ref, params, mixup=0.6):
    """The reference model moved towards the policy: (1 - mixup) ref + mixup params; ref is given away."""
    return jax.tree.map(lambda r, p: ((1 - mixup) * r + mixup * p).astype(r.dtype), ref, params)
