"""The mathematics of Coupled-GRPO: scores of completions, advantages, loss, optimizer. Pure.

Coupled scores take three versions of a completion's canvas: all of it MASK, a random mask m, and
the complement of m. Each token is MASK in the first and in exactly one of the other two, so its
score always counts, with about half of the completion around it visible.

Path scores cut the sampler's steps into GROUPS groups. A token's score is its log-probability on
the canvas as it was before its group.

It generates no completion, rewards none, and keeps no state: coupled_grpo.py does.

Letters: B sequences, L columns of a canvas, C of them its completion, T tokens in a chunk, K
versions of a canvas, D width, R rows of all versions, V vocabulary, F reward functions, G groups of
N completions. Refs: DiffuCoder, arXiv:2506.20639; GRPO, arXiv:2402.03300; leave-one-out baseline,
arXiv:2402.14740.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import diffusion
import model_dream as md

GROUPS = 8  # versions of a canvas in a path score

# ---- scores --------------------------------------------------------------------------------------


def draw_masks(key, iteration, rows, columns, share=1):
    """{"ratio_B", "u_BC"} of one update: the mask rate of the second version, in [0.2, 0.8), and
    its uniforms.

    A function of the arguments alone: old, reference and new scores of an update see the same
    masks. A row's draws depend on its number alone; every `share` consecutive rows have one rate.
    """
    key = jax.random.fold_in(key, iteration)

    def uniform(key, number_B, *shape):
        def of_row(number):
            row_key = jax.random.fold_in(key, number)
            return jax.random.uniform(row_key, shape)

        return jax.vmap(of_row)(number_B)

    row_B = jnp.arange(rows)
    t_B = uniform(jax.random.fold_in(key, 0), row_B // share)
    return {"ratio_B": 0.2 + 0.6 * t_B, "u_BC": uniform(key, row_B + 1, columns)}


def coupled_views(token_BL, completion_BL, u_BL, ratio_B1, mask_id):
    """(the three versions of each canvas [B, K, L], mask_BL of the second).

    The completion is MASK in the first, where u < ratio in the second, and elsewhere in the third.
    The prompt is not masked; what follows EOS is (as in DiffuCoder's code).
    """
    mask_BL, other_BL = diffusion.coupled_masks(completion_BL, u_BL, ratio_B1)
    mask_BKL = jnp.stack([completion_BL, mask_BL, other_BL], 1)
    return jnp.where(mask_BKL, mask_id, token_BL[:, None]), mask_BL


def hidden_of_views(model, token_BL, see_BL, views_BKC):
    """Hidden states that predict each token of K versions of the completions: [B, K, C, D].

    All versions go through the model in one forward pass, after their prompt. In a Dream of blocks
    each version has the clean row beside it: see its `readings`.
    """
    cfg = model.cfg
    B, K, C = views_BKC.shape
    L = token_BL.shape[1]
    assert L > C, f"{L} columns hold no prompt before {C} tokens of completion"
    P = L - C  # columns of the prompt
    prompt_BKP = jnp.repeat(token_BL[:, None, :P], K, 1)
    views_BKL = jnp.concatenate([prompt_BKP, views_BKC], 2)
    views_RL = views_BKL.reshape(K * B, L)
    see_RL = jnp.repeat(see_BL, K, 0)
    if not cfg.block_length:
        hidden_RLD, _ = model.hidden(views_RL, see_BM=see_RL)
        hidden_BKLD = hidden_RLD.reshape(B, K, L, -1)
        return hidden_BKLD[:, :, P - cfg.shift : L - cfg.shift]

    see_RL = see_RL.astype(jnp.int32)
    position_RL = jnp.maximum(jnp.cumsum(see_RL, 1) - 1, 0)
    if cfg.causal:  # blocks begin after the prompt, as in sample_block.py
        prompt_R1 = see_RL[:, :P].sum(1, keepdims=True)
        position_RL += -prompt_R1 % cfg.block_length
    hidden_RLD, before_RLD = model.readings(
        views_RL,
        jnp.repeat(token_BL, K, 0),
        see_RL,
        position_RL,
        cfg.block_length,
    )
    if cfg.causal:  # the token before a block predicts its first one
        first_RL = position_RL % cfg.block_length == 0
        hidden_RLD = jnp.where(first_RL[..., None], before_RLD, hidden_RLD)
    return hidden_RLD.reshape(B, K, L, -1)[:, :, P:]


def token_logps(logits_of, hidden_BLD, token_BL, chunk=1024):
    """(log p, entropy) of each token's prediction, float32 [B, L] in nats; logits_of([B, T, D]) is
    float32 [B, T, V].

    The head runs over at most `chunk` tokens of a device at a time, and the backward pass computes
    their logits again: [B, L, V] never exists. The entropy, for the log, has no gradient.
    """
    B, L, _ = hidden_BLD.shape
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape.get(axis, 1) for axis in md.BATCH)
    rows = B // devices if B % devices == 0 else B
    T = max(1, min(L, chunk // rows))
    T = 1 << (T.bit_length() - 1)  # a power of 2: for 43 a TPU's compiler took over 100 s
    chunks = -(-L // T)

    @jax.checkpoint
    def of_chunk(inputs):
        hidden_BTD, token_BT = inputs
        logits_BTV = logits_of(hidden_BTD).astype(jnp.float32)
        logits_BTV -= jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))  # exp stays finite
        weight_BTV = jnp.exp(logits_BTV)
        total_BT = weight_BTV.sum(-1)
        drawn_BT = jnp.take_along_axis(logits_BTV, token_BT[..., None], -1)[..., 0]
        logp_BT = drawn_BT - jnp.log(total_BT)
        # entropy = log sum_v e^x_v - sum_v e^x_v x_v / sum_v e^x_v
        finite_BTV = jnp.where(weight_BTV > 0, logits_BTV, 0.0)  # a banned token's is -inf
        entropy_BT = jnp.log(total_BT) - (weight_BTV * finite_BTV).sum(-1) / total_BT
        return logp_BT, jax.lax.stop_gradient(entropy_BT)

    def split(x_BL):  # along the rows, so that they stay where they are on a mesh
        padding = [(0, 0)] * x_BL.ndim
        padding[1] = (0, chunks * T - L)
        x_BNT = jnp.pad(x_BL, padding).reshape(B, chunks, T, *x_BL.shape[2:])
        return x_BNT.swapaxes(0, 1)

    def joined(x_NBT):
        return x_NBT.swapaxes(0, 1).reshape(B, -1)[:, :L]

    logp_NBT, entropy_NBT = jax.lax.map(of_chunk, (split(hidden_BLD), split(token_BL)))
    return joined(logp_NBT), joined(entropy_NBT)


def merge_views(logits_of, hidden_BKCD, token_BC, mask_BC, weights, chunk=1024):
    """The score of each token, w_0 lp_0 + (w_1 lp_1 where the mask, else w_2 lp_2), and its
    entropy: float32 [B, C].

    hidden_BKCD holds what predicts the tokens in the three versions. Of the last two each position
    is scored in one alone, so they are merged before the head, which then has 2 C rows, not 3 C.
    weights are three numbers or [B, 1].
    """
    B, _, C, D = hidden_BKCD.shape
    merged_BCD = jnp.where(mask_BC[..., None], hidden_BKCD[:, 1], hidden_BKCD[:, 2])
    two_BCD = jnp.stack([hidden_BKCD[:, 0], merged_BCD], 1).reshape(2 * B, C, D)
    logp, entropy = token_logps(logits_of, two_BCD, jnp.repeat(token_BC, 2, 0), chunk)
    logp_B2C = logp.reshape(B, 2, C)
    merged_weight_BC = jnp.where(mask_BC, weights[1], weights[2])
    score_BC = weights[0] * logp_B2C[:, 0] + merged_weight_BC * logp_B2C[:, 1]
    return score_BC, entropy.reshape(B, 2, C).mean(1)


def coupled_scores(model, batch, mask_id, chunk=1024):
    """Scores of the completions and the entropy of their predictions, float32 [B, C].

    batch: token_BL, whose last C columns are the completion; see_BL, False at padding; u_BC and
    ratio_B of draw_masks. The weights are 1/2, 1 / (2 ratio) and 1 / (2 (1 - ratio)). An id that
    grows holes, which the sampler never draws, has no probability.
    Ref: DiffuCoder, arXiv:2506.20639, section 4.
    """
    C = batch["u_BC"].shape[1]
    token_BC = batch["token_BL"][:, -C:]
    ratio_B1 = jnp.reshape(batch["ratio_B"], (-1, 1))
    completion_BC = jnp.ones(token_BC.shape, bool)
    views_BKC, mask_BC = coupled_views(token_BC, completion_BC, batch["u_BC"], ratio_B1, mask_id)
    hidden_BKCD = hidden_of_views(model, batch["token_BL"], batch["see_BL"], views_BKC)
    weights = (0.5, 0.5 / ratio_B1, 0.5 / (1 - ratio_B1))
    logits_of = functools.partial(allowed_logits, model)
    return merge_views(logits_of, hidden_BKCD, token_BC, mask_BC, weights, chunk)


def allowed_logits(model, hidden_BTD):
    """Logits without the id that grows holes, which the sampler never draws."""
    logits_BTV = model.logits(hidden_BTD)
    if model.cfg.expand_id >= 0:
        logits_BTV = logits_BTV.at[..., model.cfg.expand_id].set(-jnp.inf)
    return logits_BTV


def path_of(record, token_BL, mask_id):
    """(token_BL, group_BL) of filled canvases: each token as it was drawn, even where an end
    replaced it, and its group of steps, 0 .. GROUPS - 1, equally many of its row's steps in each;
    GROUPS where none was drawn. NumPy's. record: a sample_dream.Record.
    """
    drawn_BL = (record.step_BL >= 0) & (record.token_BL != mask_id)
    group_BL = np.full(token_BL.shape, GROUPS)
    for group_L, step_L, drawn_L in zip(group_BL, record.step_BL, drawn_BL, strict=True):
        steps, rank_N = np.unique(step_L[drawn_L], return_inverse=True)
        group_L[drawn_L] = rank_N * GROUPS // max(GROUPS, len(steps))
    return np.where(drawn_BL, record.token_BL, token_BL), group_BL


def path_scores(model, batch, mask_id, chunk=1024):
    """Scores of completions as the sampler wrote them, log p of each token on the canvas before its
    group of steps, and the entropy of the prediction: float32 [B, C].

    batch: token_BL, whose last C columns are what was drawn, see_BL, and group_BC of path_of. With
    as many groups as steps the sum over a row is the log-probability of the path, at temperature 1
    and without top-p, if the canvas alone chooses the positions. Ref: TraceRL, arXiv:2509.06949.
    """
    group_BC = batch["group_BC"]
    token_BC = batch["token_BL"][:, -group_BC.shape[1] :]
    before_BKC = group_BC[:, None] < jnp.arange(GROUPS)[:, None]
    views_BKC = jnp.where(before_BKC, token_BC[:, None], mask_id)
    hidden_BKCD = hidden_of_views(model, batch["token_BL"], batch["see_BL"], views_BKC)
    own_B1C1 = jnp.minimum(group_BC, GROUPS - 1)[:, None, :, None]
    hidden_B1CD = jnp.take_along_axis(hidden_BKCD, own_B1C1, 1)
    logits_of = functools.partial(allowed_logits, model)
    return token_logps(logits_of, hidden_B1CD[:, 0], token_BC, chunk)


def scores_of(model, batch, mask_id, chunk=1024):
    """Path scores where the batch has groups of steps, else coupled ones: (scores, entropy)."""
    how = path_scores if "group_BC" in batch else coupled_scores
    return how(model, batch, mask_id, chunk)


def completion_mask(token_BC, end_ids):
    """True up to and including the first end token; all True where there is none."""
    ends_BC = np.isin(token_BC, end_ids)
    return ends_BC.cumsum(-1) - ends_BC == 0


# ---- advantages ----------------------------------------------------------------------------------


class Advantages(typing.NamedTuple):
    """One entry per completion, NumPy float64 or bool."""

    reward_B: np.ndarray  # weighted sum of the reward functions; an unknown one counts as 0
    advantage_B: np.ndarray
    counted_B: np.ndarray  # False: one of its rewards is not known
    constant_B: np.ndarray  # all known rewards of its group are equal: nothing to learn from it


def group_advantages(reward_BF, weight_F, group):
    """Each reward minus the mean of the others in its group of `group` consecutive rows; None or
    nan: not known.

    A = R - sum_others / (n - 1) = n / (n - 1) (R - mean), with n known rewards in the group. A
    completion that lacks a reward, as when the sandbox failed, has advantage 0 and is in no
    baseline; leave its tokens out of the loss (counted_B). Ref: RLOO, arXiv:2402.14740.
    """
    reward_BF = np.array(reward_BF, np.float64)
    counted_B = ~np.isnan(reward_BF).any(-1)
    known_BF = np.nan_to_num(reward_BF, nan=0.0)
    reward_B = (known_BF * np.asarray(weight_F, np.float64)).sum(-1)

    # A row is a group. Masked entries, the unknown rewards, are in none of its statistics.
    reward_GN = np.ma.array(reward_B, mask=~counted_B).reshape(-1, group)
    n_G1 = reward_GN.count(-1)[:, None]
    others_G1 = np.maximum(n_G1 - 1, 1)
    range_G = (reward_GN.max(-1) - reward_GN.min(-1)).filled(0)
    constant_G1 = (n_G1 < 2) | (range_G[:, None] == 0)
    difference_GN = (reward_GN - reward_GN.mean(-1, keepdims=True)).filled(0)
    # that from a rounded mean may not be 0
    difference_GN = np.where(constant_G1, 0.0, difference_GN)
    return Advantages(
        reward_B=reward_B,
        advantage_B=(difference_GN * n_G1 / others_G1).reshape(-1),
        counted_B=counted_B,
        constant_B=np.repeat(constant_G1, group),
    )


# ---- loss ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loss:
    """The numbers of the loss, see grpo_loss."""

    beta: float = 0.01  # weight of the KL divergence; 0 leaves it out
    low: float = 0.5  # the ratio is clipped to [1 - low, 1 + high]
    high: float = 0.5
    limit: float = 20.0  # both logarithms are clipped to +- limit, where their gradients end


def mean_of(counted_BC, x_BC):
    """The mean over the counted tokens; 0 where there is none."""
    total = jnp.where(counted_BC, x_BC, 0.0).sum()
    return total / jnp.maximum(counted_BC.sum(), 1)


def grpo_loss(score_BC, old_BC, ref_BC, advantage_B, counted_BC, form=Loss()):
    """(value, metrics): the mean of -min(r A, clip(r, 1 - low, 1 + high) A) + beta KL over the
    counted tokens of the batch ("bnpo" in TRL), float32.

    r = exp(score - old). KL = exp(d) - d - 1 with d = ref - score; ref None leaves it out. What is
    not counted may have any value. Without a counted token, value and metrics are 0. metrics: "kl",
    "clip_low" and "clip_high" (shares of tokens without gradient at either side), "ratio_max",
    "tokens".

    A score is no log-probability: it weighs those of its canvases by 3/2 in all on average, by 3
    for a token masked at the rate 0.2. exp amplifies that: "kl" and the norm of its gradient may
    become large (7.9 and 47 in a run of bench/LOG.md). "token_kl" of micro_loss is one per token.
    Refs: PPO, arXiv:1707.06347, eq. 7; k3, http://joschu.net/blog/kl-approx.html.
    """
    counted_BC = counted_BC.astype(bool)
    tokens = counted_BC.sum()

    mean = functools.partial(mean_of, counted_BC)

    def logarithm(x_BC):
        return jnp.clip(jnp.where(counted_BC, x_BC, 0.0), -form.limit, form.limit)

    # the clipped policy gradient
    score_BC = score_BC.astype(jnp.float32)
    advantage_B1 = jnp.asarray(advantage_B, jnp.float32)[:, None]
    ratio_BC = jnp.exp(logarithm(score_BC - jax.lax.stop_gradient(old_BC)))
    clipped_BC = jnp.clip(ratio_BC, 1 - form.low, 1 + form.high)
    loss_BC = -jnp.minimum(ratio_BC * advantage_B1, clipped_BC * advantage_B1)

    # the divergence from the reference model
    kl_BC = jnp.zeros_like(loss_BC)
    if form.beta and ref_BC is not None:
        log_BC = logarithm(ref_BC - score_BC)
        kl_BC = jnp.exp(log_BC) - log_BC - 1
        loss_BC += form.beta * kl_BC

    value = (jnp.where(counted_BC, loss_BC, 0.0) / jnp.maximum(tokens, 1)).sum()
    return value, {
        "kl": mean(kl_BC),
        "clip_low": mean((ratio_BC < 1 - form.low) & (advantage_B1 < 0)),
        "clip_high": mean((ratio_BC > 1 + form.high) & (advantage_B1 > 0)),
        "ratio_max": jnp.where(counted_BC, ratio_BC, 0.0).max(),
        "tokens": tokens,
    }


def micro_loss(model, batch, mask_id, form=Loss(), chunk=1024):
    """(value, metrics) of one micro-batch, to be differentiated: grpo_loss of scores_of, and as
    means of the counted tokens "entropy", "log_ratio" = |l - l_old| and "token_kl" = exp(d) - d
    - 1 with d = l_ref - l. l is a score divided by the sum of its weights: a log-probability.

    batch: what scores_of reads, advantage_B, counted_BC, old_BC, ref_BC if beta is not 0. With
    batch["first"] no update followed old_BC, so that the score itself replaces it.
    """
    counted_BC = batch["counted_BC"]
    score_BC, entropy_BC = scores_of(model, batch, mask_id, chunk)
    old_BC = jnp.where(batch["first"], score_BC, batch["old_BC"])
    value, metrics = grpo_loss(
        score_BC, old_BC, batch.get("ref_BC"), batch["advantage_B"], counted_BC, form
    )
    mean = functools.partial(mean_of, counted_BC)
    weight_BC = 1.0
    if "group_BC" not in batch:
        ratio_B1 = jnp.reshape(batch["ratio_B"], (-1, 1))
        masked_BC = jnp.where(batch["u_BC"] < ratio_B1, ratio_B1, 1 - ratio_B1)
        weight_BC = 0.5 + 0.5 / masked_BC
    metrics["entropy"] = mean(entropy_BC)
    metrics["log_ratio"] = mean(jnp.abs(score_BC - old_BC) / weight_BC)
    if form.beta:
        log_BC = (batch["ref_BC"] - score_BC) / weight_BC
        metrics["token_kl"] = mean(jnp.exp(log_BC) - log_BC - 1)
    return value, metrics


# ---- updates -------------------------------------------------------------------------------------


def graphs_of(model_cfg, dtype, on_cpu=False, **how):
    """The model without parameters, for training (it rematerialises, not on a CPU) and rollouts."""
    rollout = md.Compute(dtype, 128 if on_cpu else 256, **how)
    training = dataclasses.replace(rollout, remat="none" if on_cpu else "full")
    return md.graph_of(model_cfg, training), md.graph_of(model_cfg, rollout)


def micro_batches(row_R, size, devices):
    """Nearly equal batches of at most `size` rows; -1 pads each to a multiple of `devices`."""
    width = math.ceil(size / devices) * devices
    padded = []
    for batch in np.array_split(row_R, math.ceil(len(row_R) / size)):
        missing = width - len(batch)
        padded.append(np.pad(batch, (0, missing), constant_values=-1))
    return padded


def make_programs(graph, optimizer, mask_id, form=Loss(), layouts=(None, None)):
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
            return micro_loss(policy(trained, base), batch, mask_id, form)

        (value, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        return jax.tree.map(jnp.add, total, grads), {"loss": value} | metrics

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*layouts, None))
    def update(trained, opt, total, count):
        grads = jax.tree.map(lambda g: g / count, total)
        norm = optax.tree.norm(grads)
        updates, new_opt = optimizer.update(grads, opt, trained)
        new = optax.apply_updates(trained, updates)
        keep = functools.partial(jnp.where, jnp.isfinite(norm))
        return jax.tree.map(keep, new, trained), jax.tree.map(keep, new_opt, opt), norm

    return scores, gradients, update


def learning_rate(peak, steps, warmup=1, floor=0.1):
    """A function of the update: from 0 to peak over `warmup` of them, then a cosine that ends at
    floor peak at `steps`.

    So the first update has rate 0, as in the reference (cosine_with_min_lr of Transformers).
    """
    steps = max(steps, warmup + 1)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, floor * peak)


def make_optimizer(rate, weight_decay=0.1, clip=0.2):
    """Global-norm clip, then AdamW (0.9, 0.99, 1e-8); rate is a number or a function of the update.

    Only arrays of two or more axes decay: no norm and no bias. Keep the parameters in float32: at
    rate 1e-6 an update of bfloat16 weights is nearly always rounded away.
    """

    def decays(params):
        return jax.tree.map(lambda x: x.ndim >= 2, params)

    adamw = optax.adamw(rate, 0.9, 0.99, 1e-8, weight_decay=weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(clip), adamw)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="mixup")
def sync_reference(ref, params, mixup=0.6):
    """The reference model moved towards the policy: (1 - mixup) ref + mixup params; ref is given
    away.
    """
    return jax.tree.map(lambda r, p: ((1 - mixup) * r + mixup * p).astype(r.dtype), ref, params)


@functools.partial(jax.jit, static_argnames=("mesh", "dtype"))
def rollout_weights(params, mesh, dtype):
    """The weights on a mesh of (data, 1, tensor), matrices in dtype; None: as they are. A matrix
    that all devices share is gathered by two exchanges, between the groups of devices and within
    each; in one step XLA would make it whole on every device.
    """

    def move(x, last):
        if dtype and x.ndim > 1:
            x = x.astype(dtype)
        if "fsdp" in last.spec:
            for axes in (("data", "tensor"), "tensor"):
                spec = [None] * len(last.spec)
                spec[last.spec.index("fsdp")] = axes
                layout = jax.NamedSharding(mesh, md.fit(md.PS(*spec), x.shape, mesh))
                x = jax.lax.with_sharding_constraint(x, layout)
        return jax.lax.with_sharding_constraint(x, last)

    return jax.tree.map(move, params, md.shardings(mesh, params))


if __name__ == "__main__":
    raise SystemExit(__doc__)
