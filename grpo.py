"""The mathematics of coupled_grpo.py: scores of completions, advantages, loss, optimizer; and their
compiled programs.

A completion is scored on three versions of its canvas: all of it MASK, a random mask m, and the
complement of m. Each token is MASK in the first and in exactly one of the other two, so its score
always counts, with about half of the completion around it visible.

Letters: B sequences, L columns of a canvas, C of them its completion, T tokens in a chunk, K
versions of a canvas, D width, R rows of all versions, V vocabulary, F reward functions, G groups of
N completions. Refs: DiffuCoder, arXiv:2506.20639; GRPO, arXiv:2402.03300; leave-one-out baseline,
arXiv:2402.14740.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import diffusion
import model_dream as md

# ---- scores --------------------------------------------------------------------------------------------------------


def draw_masks(key, iteration, rows, columns, share=1):
    """{"ratio_B", "u_BC"} of one iteration: the mask rate of the second version, in [0.2, 0.8), and
    its uniforms.

    A function of the arguments alone: old, reference and new scores of an iteration see the same
    masks. A row's draws depend on its number alone; every `share` consecutive rows have one ratio.
    """
    key = jax.random.fold_in(key, iteration)

    def uniform(key, number_B, *shape):
        return jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number), shape))(
            number_B
        )

    row_B = jnp.arange(rows)
    t_B = uniform(jax.random.fold_in(key, 0), row_B // share)
    return {"ratio_B": 0.2 + 0.6 * t_B, "u_BC": uniform(key, row_B + 1, columns)}


def coupled_views(token_BL, completion_BL, u_BL, ratio_B, mask_id):
    """(the three versions of each canvas [B, K, L], mask_BL of the second).

    The completion is MASK in the first, where u < ratio in the second, and elsewhere in the third.
    The prompt is not masked; what follows EOS is (as in DiffuCoder's code).
    """
    masks = diffusion.coupled_masks(completion_BL, u_BL, jnp.reshape(ratio_B, (-1, 1)))
    views = [jnp.where(mask_BL, mask_id, token_BL) for mask_BL in (completion_BL, *masks)]
    return jnp.stack(views, 1), masks[0]


def hidden_of_views(model, token_BL, see_BL, views_BKC):
    """Hidden states that predict each token of K versions of the completions, the last C columns:
    [B, K, C, D].

    All versions go through the model in one forward pass, after their prompt. In a Dream of blocks
    each version has the clean row beside it: see its `readings`.
    """
    (B, K, C), L = views_BKC.shape, token_BL.shape[1]
    assert L > C, f"{L} columns hold no prompt before {C} tokens of completion"
    views_BKL = jnp.concatenate([jnp.repeat(token_BL[:, None, : L - C], K, 1), views_BKC], 2)
    views_RL, see_RL = (
        views_BKL.reshape(K * B, L),
        None if see_BL is None else jnp.repeat(see_BL, K, 0),
    )
    cfg = getattr(model, "cfg", md.DreamConfig)  # the defaults, of a model that has none
    if not cfg.block_length:
        hidden, _ = model.hidden(views_RL, see_BM=see_RL)
        return hidden.reshape(B, K, L, -1)[:, :, L - C - cfg.shift : L - cfg.shift]
    see_RL = jnp.ones_like(views_RL) if see_RL is None else see_RL.astype(jnp.int32)
    position_RL = jnp.maximum(jnp.cumsum(see_RL, 1) - 1, 0)
    if cfg.causal:  # blocks begin after the prompt, as in sample_block.py
        position_RL += -see_RL[:, : L - C].sum(1, keepdims=True) % cfg.block_length
    hidden_RLD, before_RLD = model.readings(
        views_RL, jnp.repeat(token_BL, K, 0), see_RL, position_RL, cfg.block_length
    )
    if cfg.causal:  # the token before a block predicts its first one
        hidden_RLD = jnp.where(
            (position_RL % cfg.block_length == 0)[..., None], before_RLD, hidden_RLD
        )
    return hidden_RLD.reshape(B, K, L, -1)[:, :, L - C :]


def token_logps(logits_of, hidden_BLD, token_BL, chunk=1024):
    """(log p, entropy) of each token's prediction, float32 [B, L] in nats; logits_of([B, T, D]) is
    float32 [B, T, V].

    The head runs over at most `chunk` tokens of a device at a time, and the backward pass computes
    their logits again: [B, L, V] never exists. The entropy, for the log, has no gradient.
    """
    (B, L, _), mesh = hidden_BLD.shape, jax.sharding.get_abstract_mesh()
    rows = (
        B // n
        if B % (n := int(np.prod([mesh.shape.get(axis, 1) for axis in md.BATCH]))) == 0
        else B
    )
    # a power of 2: for 43 a TPU's compiler took over 100 s
    T = 1 << (max(1, min(L, chunk // rows)).bit_length() - 1)
    chunks = -(-L // T)

    @jax.checkpoint
    def of_chunk(inputs):
        hidden_BTD, token_BT = inputs
        logits_BTV = logits_of(hidden_BTD).astype(jnp.float32)
        logits_BTV -= jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))  # exp stays finite
        weight_BTV = jnp.exp(logits_BTV)
        total_BT = weight_BTV.sum(-1)
        logp_BT = jnp.take_along_axis(logits_BTV, token_BT[..., None], -1)[..., 0] - jnp.log(
            total_BT
        )
        # entropy = log sum_v e^x_v - sum_v e^x_v x_v / sum_v e^x_v
        finite_BTV = jnp.where(weight_BTV > 0, logits_BTV, 0.0)  # a banned token's is -inf
        entropy_BT = jnp.log(total_BT) - (weight_BTV * finite_BTV).sum(-1) / total_BT
        return logp_BT, jax.lax.stop_gradient(entropy_BT)

    def split(x_BL):  # along the rows, so that they stay where they are on a mesh
        x_BL = jnp.pad(x_BL, ((0, 0), (0, chunks * T - L), *[(0, 0)] * (x_BL.ndim - 2)))
        return x_BL.reshape(B, chunks, T, *x_BL.shape[2:]).swapaxes(0, 1)

    outs = jax.lax.map(of_chunk, (split(hidden_BLD), split(token_BL)))
    return tuple(out.swapaxes(0, 1).reshape(B, -1)[:, :L] for out in outs)


def merge_views(logits_of, hidden_BKCD, token_BC, mask_BC, weights, chunk=1024):
    """The score of each token, w_0 lp_0 + (w_1 lp_1 where the mask, else w_2 lp_2), and its
    entropy: float32 [B, C].

    hidden_BKCD holds what predicts the tokens in the three versions: all masked, the mask, its
    complement. Of the last two each position is scored in one alone, so they are merged before the
    head, which then has 2 C rows, not 3 C. weights are three numbers or [B, 1]; they multiply
    log-probabilities, so a score is not one itself.
    """
    B, _, C, D = hidden_BKCD.shape
    merged_BCD = jnp.where(mask_BC[..., None], hidden_BKCD[:, 1], hidden_BKCD[:, 2])
    two_BCD = jnp.stack([hidden_BKCD[:, 0], merged_BCD], 1).reshape(2 * B, C, D)
    outs = token_logps(logits_of, two_BCD, jnp.repeat(token_BC, 2, 0), chunk)
    logp_B2C, entropy_B2C = (x.reshape(B, 2, C) for x in outs)
    score_BC = weights[0] * logp_B2C[:, 0] + jnp.where(mask_BC, *weights[1:]) * logp_B2C[:, 1]
    return score_BC, entropy_B2C.mean(1)


def coupled_scores(model, batch, mask_id, chunk=1024):
    """Scores of the completions and the entropy of their predictions, float32 [B, C].

    batch: token_BL, whose last C columns are the completion; see_BL, False at padding, or None;
    u_BC and ratio_B of draw_masks. The weights are 1/2, 1 / (2 ratio) and 1 / (2 (1 - ratio)).
    model.hidden(token_BL, see_BM=see_BL) are hidden states, those at p predict the token at p + 1;
    model.logits is the head. An id that grows holes, which the sampler never draws, has no
    probability. Ref: DiffuCoder, arXiv:2506.20639, section 4.
    """
    B, C = batch["u_BC"].shape
    token_BC, ratio_B1 = (
        batch["token_BL"][:, -C:],
        jnp.reshape(batch["ratio_B"], (-1, 1)).astype(jnp.float32),
    )
    views_BKC, mask_BC = coupled_views(
        token_BC, jnp.ones((B, C), bool), batch["u_BC"], batch["ratio_B"], mask_id
    )
    hidden_BKCD = hidden_of_views(model, batch["token_BL"], batch["see_BL"], views_BKC)
    weights = 0.5, 0.5 / ratio_B1, 0.5 / (1 - ratio_B1)
    expand = getattr(model, "cfg", md.DreamConfig).expand_id

    def logits_of(hidden_BTD):
        logits_BTV = model.logits(hidden_BTD)
        return logits_BTV if expand < 0 else logits_BTV.at[..., expand].set(-jnp.inf)

    return merge_views(logits_of, hidden_BKCD, token_BC, mask_BC, weights, chunk)


# ---- advantages ----------------------------------------------------------------------------------------------------


def completion_mask(token_BC, eos_id):
    """True up to and including the first EOS; all True where there is none. NumPy or JAX arrays."""
    ends_BC = token_BC == eos_id
    return ends_BC.cumsum(-1) - ends_BC == 0


class Advantages(typing.NamedTuple):
    """One entry per completion, NumPy float64 or bool."""

    reward_B: np.ndarray  # weighted sum of the reward functions; an unknown one counts as 0
    advantage_B: np.ndarray
    std_B: np.ndarray  # of its group, with N - 1
    counted_B: np.ndarray  # False: one of its rewards is not known
    # all known rewards of its group are equal, so there is nothing to learn from it
    constant_B: np.ndarray


def group_advantages(reward_BF, weight_F, group):
    """Each reward minus the mean of the others in its group of `group` consecutive rows; None or
    nan: not known.

    A = R - sum_others / (n - 1) = n / (n - 1) (R - mean), with n known rewards in the group. A
    completion that lacks a reward, as when the sandbox failed, has advantage 0 and is in no
    baseline; leave its tokens out of the loss (counted_B). Ref: RLOO, arXiv:2402.14740.
    """
    reward_BF = np.array(reward_BF, np.float64).reshape(len(reward_BF), -1)
    counted_B = ~np.isnan(reward_BF).any(-1)
    reward_B = (np.nan_to_num(reward_BF, nan=0.0) * np.asarray(weight_F, np.float64)).sum(-1)

    # A row is a group. Masked entries, the unknown rewards, are in none of its statistics.
    reward_GN = np.ma.array(reward_B, mask=~counted_B).reshape(-1, group)
    n_G1 = reward_GN.count(-1)[:, None]
    others_G1 = np.maximum(n_G1 - 1, 1)
    range_G1 = (reward_GN.max(-1) - reward_GN.min(-1)).filled(0)[:, None]
    constant_G1 = (n_G1 < 2) | (range_G1 == 0)
    difference_GN = (reward_GN - reward_GN.mean(-1, keepdims=True)).filled(0)
    # that from a rounded mean may not be 0
    difference_GN = np.where(constant_G1, 0.0, difference_GN)
    std_G1 = np.sqrt((difference_GN**2).sum(-1, keepdims=True) / others_G1)
    advantage_GN = difference_GN * n_G1 / others_G1
    std_B, constant_B = (np.repeat(x_G1, group) for x_G1 in (std_G1, constant_G1))
    return Advantages(reward_B, advantage_GN.reshape(-1), std_B, counted_B, constant_B)


# ---- loss ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loss:
    """The numbers of the loss, see grpo_loss."""

    beta: float = 0.01  # weight of the KL divergence; 0 leaves it out
    low: float = 0.5  # the ratio is clipped to [1 - low, 1 + high]
    high: float = 0.5
    limit: float = 20.0  # both logarithms are clipped to +- limit, where their gradients end


def grpo_loss(score_BC, old_BC, ref_BC, advantage_B, counted_BC, loss=Loss()):
    """(value, metrics): the mean of -min(r A, clip(r, 1 - low, 1 + high) A) + beta KL over the
    counted tokens, float32.

    r = exp(score - old); old None stands for the score itself, so r = 1. KL = exp(d) - d - 1 with
    d = ref - score; ref None leaves it out. What is not counted may have any value. Without a
    counted token, value and metrics are 0. metrics: "kl", "clip_low" and "clip_high" (shares of
    tokens without gradient at either side), "ratio_max", "tokens". The mean is over the tokens of
    the batch ("bnpo" in TRL).
    Refs: PPO, arXiv:1707.06347, eq. 7; k3, http://joschu.net/blog/kl-approx.html.
    """
    counted_BC = counted_BC.astype(bool)
    tokens = counted_BC.sum()

    def mean(x_BC):
        return jnp.where(counted_BC, x_BC, 0.0).sum() / jnp.maximum(tokens, 1)

    def logarithm(x_BC):
        return jnp.clip(jnp.where(counted_BC, x_BC, 0.0), -loss.limit, loss.limit)

    # the clipped policy gradient
    score_BC = score_BC.astype(jnp.float32)
    old_BC = jax.lax.stop_gradient(score_BC if old_BC is None else old_BC)
    advantage_B1 = jnp.asarray(advantage_B, jnp.float32)[:, None]
    ratio_BC = jnp.exp(logarithm(score_BC - old_BC))
    clipped_BC = jnp.clip(ratio_BC, 1 - loss.low, 1 + loss.high)
    loss_BC = -jnp.minimum(ratio_BC * advantage_B1, clipped_BC * advantage_B1)

    # the divergence from the reference model
    kl_BC = jnp.zeros_like(loss_BC)
    if loss.beta and ref_BC is not None:
        log_BC = logarithm(ref_BC - score_BC)
        kl_BC = jnp.exp(log_BC) - log_BC - 1
        loss_BC += loss.beta * kl_BC

    return (jnp.where(counted_BC, loss_BC, 0.0) / jnp.maximum(tokens, 1)).sum(), {
        "kl": mean(kl_BC),
        "clip_low": mean((ratio_BC < 1 - loss.low) & (advantage_B1 < 0)),
        "clip_high": mean((ratio_BC > 1 + loss.high) & (advantage_B1 > 0)),
        "ratio_max": jnp.where(counted_BC, ratio_BC, 0.0).max(),
        "tokens": tokens,
    }


def micro_loss(model, batch, mask_id, loss=Loss(), chunk=1024, scores_of=coupled_scores):
    """(value, metrics) of one micro-batch, to be differentiated: grpo_loss of scores_of, and the
    mean entropy.

    batch: what scores_of reads, advantage_B, counted_BC, old_BC, ref_BC if beta is not 0. With
    batch["first"] no update followed old_BC, so that the score itself replaces it.
    """
    score_BC, entropy_BC = scores_of(model, batch, mask_id, chunk)
    old_BC = jnp.where(batch["first"], jax.lax.stop_gradient(score_BC), batch["old_BC"])
    terms = old_BC, batch.get("ref_BC"), batch["advantage_B"], batch["counted_BC"]
    value, metrics = grpo_loss(score_BC, *terms, loss)
    entropy = jnp.where(batch["counted_BC"], entropy_BC, 0.0).sum() / jnp.maximum(
        metrics["tokens"], 1
    )
    return value, metrics | {"entropy": entropy}


# ---- updates -------------------------------------------------------------------------------------------------------


def make_programs(
    graph, optimizer, mask_id, loss=Loss(), layouts=(None, None), scores_of=coupled_scores
):
    """(scores, gradients, update), compiled once each; base is {} without LoRA.

    scores(trained, base, batch) -> [B, C]; gradients(trained, base, total, batch) -> (total + those
    of the batch, metrics); update(trained, opt, total, micro-batches) -> (trained, opt, norm) by
    their mean gradient, unchanged where the norm is not finite. layouts are the shardings of what
    is trained and of the optimizer's state.
    """

    def policy(trained, base):
        return nnx.merge(graph, md.assemble(base, trained))

    @jax.jit
    def scores(trained, base, batch):
        # whole on every device, so on every host
        return md.shard(scores_of(policy(trained, base), batch, mask_id)[0])

    @functools.partial(jax.jit, donate_argnums=2, out_shardings=(layouts[0], None))
    def gradients(trained, base, total, batch):
        def loss_of(trained):
            return micro_loss(policy(trained, base), batch, mask_id, loss, scores_of=scores_of)

        (value, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        return jax.tree.map(jnp.add, total, grads), {"loss": value} | metrics

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*layouts, None))
    def update(trained, opt, total, count):
        grads = jax.tree.map(lambda g: g / count, total)
        norm = optax.tree.norm(grads)
        updates, new_opt = optimizer.update(grads, opt, trained)
        new = optax.apply_updates(trained, updates), new_opt
        keep = functools.partial(jnp.where, jnp.isfinite(norm))
        return *jax.tree.map(keep, new, (trained, opt)), norm

    return scores, gradients, update


def learning_rate(peak, steps, warmup=1, floor=0.1):
    """A function of the update: from 0 to peak over `warmup` of them, then a cosine that ends at
    floor peak at `steps`.

    So the first update has rate 0, as in the reference (cosine_with_min_lr of Transformers).
    """
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, max(steps, warmup + 1), floor * peak
    )


def make_optimizer(rate, weight_decay=0.1, clip=0.2):
    """Global-norm clip, then AdamW (0.9, 0.99, 1e-8); rate is a number or a function of the update.

    Only arrays of two or more axes decay: no norm and no bias. Keep the parameters in float32: at
    rate 1e-6 an update of bfloat16 weights is nearly always rounded away.
    """
    decays = functools.partial(jax.tree.map, lambda x: x.ndim >= 2)
    adamw = optax.adamw(rate, 0.9, 0.99, 1e-8, weight_decay=weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(clip), adamw)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="mixup")
def sync_reference(ref, params, mixup=0.6):
    """The reference model moved towards the policy: (1 - mixup) ref + mixup params; ref is given
    away.
    """
    return jax.tree.map(lambda r, p: ((1 - mixup) * r + mixup * p).astype(r.dtype), ref, params)


# ---- several devices and hosts -------------------------------------------------------------------------------------


def rollout_weights(params, mesh, dtype):
    """The weights on a mesh of (data, 1, tensor), matrices in dtype; None: as they are. A matrix
    that all devices share is gathered by two exchanges, between the groups of devices and within
    each; in one step XLA would make it whole on every device.
    """

    def move(x, last):
        x = x.astype(dtype) if dtype and x.ndim > 1 else x
        for axes in (("data", "tensor"), "tensor") if "fsdp" in last.spec else ():
            spec = md.PS(*(axes if axis == "fsdp" else None for axis in last.spec))
            x = jax.lax.with_sharding_constraint(
                x, jax.NamedSharding(mesh, md.fit(spec, x.shape, mesh))
            )
        return jax.lax.with_sharding_constraint(x, last)

    return jax.tree.map(move, params, md.shardings(mesh, params))


def by_host_0(make, shape):
    """make() as an array of this shape, of host 0, on all hosts: the others need no sandbox. All
    raise its errors.
    """
    if not jax.distributed.is_initialized():
        return np.array(make(), np.float64)
    error, values = None, np.zeros(shape)
    if jax.process_index() == 0:
        try:
            values = np.array(make(), np.float64)
        except (
            Exception
        ) as problem:  # whatever a user's reward raises; the other hosts would wait for ever
            error = problem
    if multihost_utils.broadcast_one_to_all(np.array(error is not None)):
        # waits for all hosts: the end of host 0 would end the others before they say why
        jax.distributed.shutdown()
        raise error or RuntimeError("host 0 could not run the programs; it says why")
    return np.asarray(multihost_utils.broadcast_one_to_all(values), np.float64)
