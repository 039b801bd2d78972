"""Coupled-GRPO: reinforcement learning of a Dream model on code rewards, in JAX, on TPU, GPU or CPU.

Letters: B sequences, N completions of a prompt, L columns of a canvas, C of them its completion, T tokens in a chunk,
K versions of a canvas, D width, V vocabulary, F reward functions, A micro-batches of an update.

A completion is scored on three versions of its canvas: all of it MASK, a random mask m, and the complement of m. Each
token is MASK in the first and in exactly one of the other two, so its score always counts, with the text around it
half known. Rewards of the N completions of a prompt are compared with each other: no value model is needed.
Refs: DiffuCoder, arXiv:2506.20639; GRPO, arXiv:2402.03300; leave-one-out baseline, arXiv:2402.14740.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffusion

# ---- scores --------------------------------------------------------------------------------------------------------


def draw_masks(key, round, iteration, rows, columns, ratios=(0.2, 0.8), per_row=False):
    """(ratio_B, u_BC) of one iteration: the share of the completion that the first mask takes, and its uniforms.

    A function of the arguments alone, and a row's u of its number alone: old, reference and new scores of an iteration
    see the same masks. The reference draws one ratio for all rows; per_row draws one in each of `rows` equal strata.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, round), iteration)
    key_B = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(1, rows + 1))
    place_B = jax.random.uniform(jax.random.fold_in(key, 0), (rows,))
    place_B = diffusion.antithetic_times(place_B, 0.0) if per_row else jnp.broadcast_to(place_B[0], (rows,))
    u_BC = jax.vmap(lambda key: jax.random.uniform(key, (columns,)))(key_B)
    return ratios[0] + (ratios[1] - ratios[0]) * place_B, u_BC


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
    def some(inputs):
        hidden_BTD, token_BT = inputs
        logits_BTV = logits_of(hidden_BTD).astype(jnp.float32)
        logits_BTV -= jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))
        weight_BTV = jnp.exp(logits_BTV)
        total_BT = weight_BTV.sum(-1)
        logp_BT = jnp.take_along_axis(logits_BTV, token_BT[..., None], -1)[..., 0] - jnp.log(total_BT)
        finite_BTV = jnp.where(weight_BTV > 0, logits_BTV, 0.0)  # a banned token's is -inf
        entropy_BT = jnp.log(total_BT) - (weight_BTV * finite_BTV).sum(-1) / total_BT
        return logp_BT, jax.lax.stop_gradient(entropy_BT)

    def split(x_BL):  # along the rows, so that they stay where they are on a mesh
        x_BL = jnp.pad(x_BL, ((0, 0), (0, chunks * T - L), *[(0, 0)] * (x_BL.ndim - 2)))
        return x_BL.reshape(B, chunks, T, *x_BL.shape[2:]).swapaxes(0, 1)

    outs = jax.lax.map(some, (split(hidden_BLD), split(token_BL)))
    return tuple(out.swapaxes(0, 1).reshape(B, -1)[:, :L] for out in outs)


def merge_views(logits_of, hidden_BKCD, token_BC, mask_BC, weights, chunk=1024):
    """The score of each token, (lp_0 + (w_1 lp_1 where the mask, else w_2 lp_2)) / 2, and its entropy: float32 [B, C].

    hidden_BKCD holds what predicts the tokens in the three versions: all masked, the mask, its complement. Of the last
    two each position is scored in one alone, so they are merged before the head, which then has 2 C rows, not 3 C.
    The weights (w_1, w_2) multiply log-probabilities, as in the reference: a score is not one itself.
    """
    B, _, C, D = hidden_BKCD.shape
    seen_BCD = jnp.where(mask_BC[..., None], hidden_BKCD[:, 1], hidden_BKCD[:, 2])
    two_BCD = jnp.stack([hidden_BKCD[:, 0], seen_BCD], 1).reshape(2 * B, C, D)
    logp, entropy = (x.reshape(B, 2, C) for x in token_logps(logits_of, two_BCD, jnp.repeat(token_BC, 2, 0), chunk))
    return (logp[:, 0] + logp[:, 1] * jnp.where(mask_BC, *weights)) / 2, entropy.mean(1)


def coupled_scores(model, token_BL, see_BL, u_BC, ratio_B, mask_id, chunk=1024, other_BC=None):
    """Scores of the completions, the last C columns of token_BL, and the entropy of their predictions: float32 [B, C].

    model.hidden(token_BL, see_BM=see_BL) are hidden states, those at p predict the token at p + 1; model.logits is the
    head. see_BL is False at padding. The masks are those of coupled_views, the weights 1 / ratio and 1 / (1 - ratio).
    With other_BC, for comparison, a token is scored in none, one or both of the masked versions, which gives the same
    expectation. Raises ValueError if there is no prompt. Ref: DiffuCoder, arXiv:2506.20639, section 4.
    """
    (B, C), L = u_BC.shape, token_BL.shape[1]
    if L <= C:
        raise ValueError(f"{L} columns hold no prompt before {C} tokens of completion")
    pad = lambda x_BC: None if x_BC is None else jnp.pad(x_BC.astype(jnp.float32), ((0, 0), (L - C, 0)))  # noqa: E731
    completion_BL = jnp.broadcast_to(jnp.arange(L) >= L - C, (B, L))
    views_BKL, *masks = coupled_views(token_BL, completion_BL, pad(u_BC), ratio_B, mask_id, pad(other_BC))
    hidden, _ = model.hidden(views_BKL.reshape(3 * B, L), see_BM=None if see_BL is None else jnp.repeat(see_BL, 3, 0))
    hidden_BKCD = hidden.reshape(B, 3, L, -1)[:, :, L - C - 1 : L - 1]
    token_BC, ratio_B1 = token_BL[:, L - C :], jnp.reshape(ratio_B, (-1, 1)).astype(jnp.float32)
    one_BC, two_BC = (mask_BL[:, L - C :] for mask_BL in masks)
    if other_BC is None:
        return merge_views(model.logits, hidden_BKCD, token_BC, one_BC, (1 / ratio_B1, 1 / (1 - ratio_B1)), chunk)
    three = hidden_BKCD.reshape(3 * B, C, -1), jnp.repeat(token_BC, 3, 0)
    logp_BKC, entropy_BKC = (x.reshape(B, 3, C) for x in token_logps(model.logits, *three, chunk))
    weight_BKC = jnp.stack([jnp.ones((B, C)), one_BC / ratio_B1, two_BC / (1 - ratio_B1)], 1)
    return (logp_BKC * weight_BKC).sum(1) / 2, entropy_BKC.mean(1)


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


def group_advantages(reward_BF, weight_F, group, scale=False, missing="exclude"):
    """Each reward minus the mean of the others in its group of `group` consecutive rows; None or nan: none known.

    A = R - sum_others / (n - 1) = n / (n - 1) (R - mean), with n known rewards in the group. "exclude": a completion
    that lacks a reward, as when the sandbox failed, has advantage 0 and is in nobody's baseline; leave its tokens out
    of the loss (counted_B). "zero", the reference: what is missing counts as a reward of 0. scale divides by the
    group's standard deviation + 1e-4. Raises ValueError for groups of one, which have no baseline.
    Ref: RLOO, arXiv:2402.14740.
    """
    reward_BF = np.array(reward_BF, np.float64).reshape(len(reward_BF), -1)
    if group < 2:
        raise ValueError(f"groups of {group} have no baseline: at least 2 completions per prompt are needed")
    if len(reward_BF) % group:
        raise ValueError(f"{len(reward_BF)} completions are no whole groups of {group}")
    if missing not in ("exclude", "zero"):
        raise ValueError(f"missing {missing!r} is neither exclude nor zero")
    reward_B = (np.nan_to_num(reward_BF, nan=0.0) * np.asarray(weight_F, np.float64)).sum(-1)
    reward_GN = reward_B.reshape(-1, group)
    counted_GN = ~np.isnan(reward_BF).any(-1).reshape(-1, group) | (missing == "zero")
    n_G1 = counted_GN.sum(-1, keepdims=True)
    difference_GN = counted_GN * (reward_GN - (reward_GN * counted_GN).sum(-1, keepdims=True) / np.maximum(n_G1, 1))
    highest_G1 = np.where(counted_GN, reward_GN, -np.inf).max(-1, keepdims=True)
    lowest_G1 = np.where(counted_GN, reward_GN, np.inf).min(-1, keepdims=True)
    constant_G1 = (n_G1 < 2) | (highest_G1 == lowest_G1)  # the difference from a rounded mean may not be 0
    difference_GN = np.where(constant_G1, 0.0, difference_GN)
    std_G1 = np.sqrt((difference_GN**2).sum(-1, keepdims=True) / np.maximum(n_G1 - 1, 1))
    advantage_GN = difference_GN * n_G1 / np.maximum(n_G1 - 1, 1)
    if scale:
        advantage_GN = advantage_GN / (std_G1 + 1e-4)
    wide = [np.broadcast_to(x, reward_GN.shape).reshape(-1) for x in (std_G1, counted_GN, constant_G1)]
    return Advantages(reward_B, advantage_GN.reshape(-1), *wide)


def grpo_loss(score_BC, old_BC, ref_BC, advantage_B, counted_BC, low=0.5, high=0.5, beta=0.01, most=20.0):
    """(loss, metrics): the mean over counted tokens of -min(r A, clip(r, 1 - low, 1 + high) A) + beta KL, float32.

    r = exp(score - old); old None stands for the score itself, so r = 1. KL = exp(d) - d - 1 with d = ref - score;
    ref None leaves it out. Both logarithms are clipped to +-`most`, where their gradients end, and what is not counted
    may be anything. Without a counted token loss and metrics are 0. metrics: "kl", "clip_low" and "clip_high" (shares
    of tokens without gradient at either side), "ratio_max", "tokens".
    Refs: PPO, arXiv:1707.06347, eq. 7; k3, http://joschu.net/blog/kl-approx.html.
    """
    counted_BC = counted_BC.astype(bool)
    tokens = counted_BC.sum()

    def mean(x_BC):
        return jnp.where(counted_BC, x_BC, 0.0).sum() / jnp.maximum(tokens, 1)

    def logarithm(x_BC):
        return jnp.clip(jnp.where(counted_BC, x_BC, 0.0), -most, most)

    score_BC = score_BC.astype(jnp.float32)
    old_BC = jax.lax.stop_gradient(score_BC if old_BC is None else old_BC)
    advantage_B1 = jnp.asarray(advantage_B, jnp.float32)[:, None]
    ratio_BC = jnp.exp(logarithm(score_BC - old_BC))
    loss_BC = -jnp.minimum(ratio_BC * advantage_B1, jnp.clip(ratio_BC, 1 - low, 1 + high) * advantage_B1)
    kl_BC = jnp.zeros_like(loss_BC)
    if beta and ref_BC is not None:
        log_BC = logarithm(ref_BC - score_BC)
        kl_BC = jnp.exp(log_BC) - log_BC - 1
        loss_BC += beta * kl_BC
    return mean(loss_BC), {
        "kl": mean(kl_BC),
        "clip_low": mean((ratio_BC < 1 - low) & (advantage_B1 < 0)),
        "clip_high": mean((ratio_BC > 1 + high) & (advantage_B1 > 0)),
        "ratio_max": jnp.where(counted_BC, ratio_BC, 0.0).max(),
        "tokens": tokens,
    }


def micro_loss(model, batch, mask_id, low=0.5, high=0.5, beta=0.01, chunk=1024):
    """(loss, metrics) of one micro-batch, to be differentiated: grpo_loss of coupled_scores.

    batch: token_BL, see_BL, u_BC, ratio_B, advantage_B, counted_BC, old_BC, ref_BC if beta is not 0, other_BC if the
    masks are to be independent. Where batch["first"] is True nothing was learnt since old_BC: the score stands for it.
    """
    inputs = (batch[name] for name in ("token_BL", "see_BL", "u_BC", "ratio_B"))
    score_BC, entropy_BC = coupled_scores(model, *inputs, mask_id, chunk, batch.get("other_BC"))
    old_BC = jnp.where(batch["first"], jax.lax.stop_gradient(score_BC), batch["old_BC"])
    counted_BC = batch["counted_BC"]
    terms = old_BC, batch.get("ref_BC"), batch["advantage_B"], counted_BC
    loss, metrics = grpo_loss(score_BC, *terms, low, high, beta)
    entropy = jnp.where(counted_BC, entropy_BC, 0.0).sum() / jnp.maximum(metrics["tokens"], 1)
    return loss, metrics | {"entropy": entropy}


# ---- updates -------------------------------------------------------------------------------------------------------


def mean_gradients(loss_fn, params, batches):
    """(gradients, loss, metrics) of loss_fn(params, batch) -> (loss, metrics), means over the leading axis of batches.

    Each micro-batch is divided by its own number of tokens, as in the reference: no mean over the tokens of all. Of the
    metrics "tokens" is summed, and "ratio_max" the largest. The sum of gradients is in the parameters' dtype.
    """

    def body(total, batch):
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return jax.tree.map(jnp.add, total, grads), (loss, metrics)

    A = len(jax.tree.leaves(batches)[0])
    total, (loss_A, metrics_A) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), batches)
    reduce = {"tokens": jnp.sum, "ratio_max": jnp.max}
    metrics = {name: reduce.get(name, jnp.mean)(value) for name, value in metrics_A.items()}
    return jax.tree.map(lambda g: g / A, total), loss_A.mean(), metrics


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


def sync_reference(ref, params, mixup=0.6):
    """The reference model moved towards the policy: (1 - mixup) ref + mixup params, in the dtype of ref (float32)."""
    return jax.tree.map(lambda r, p: ((1 - mixup) * r + mixup * p).astype(r.dtype), ref, params)


# ---- prompts -------------------------------------------------------------------------------------------------------


def messages(row, system="You are a helpful assistant."):
    """The chat that asks for a row of AceCode: question and first test, but for questions that hold a code block."""
    question = row["question"]
    if "\n```\n" not in question:
        question += f"\nTest cases: {row['test_cases'][0]}"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]
