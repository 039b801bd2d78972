"""Coupled-GRPO: reinforcement learning of a Dream model on code rewards, in JAX, on a TPU, GPUs or a CPU.

    python coupled_grpo.py                                        # a small model learns small tasks; five minutes, CPU
    python coupled_grpo.py --resume=out/grpo                      # goes on where the run stopped
    python rl_tasks.py --difficulty=hard --tokenizer=out/diffucoder/tokenizer.json --out=data/acecode
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode                  # full fine-tuning
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode --lora_rank=16   # on one TPU chip

Reads a Dream (a folder of convert_weights.py or a run of train_tpu.py) and tasks (see rl_tasks.py); without --ckpt it
makes both. Writes --out: config.json, log.jsonl, rounds.jsonl (each completion with its rewards), checkpoints/<round>/,
the tokenizer; with LoRA at the end also merged/, a whole model. One host.

A round: --group completions of each of --tasks tasks, their rewards from sandbox.py, and --iterations updates, each
over all of them under fresh masks. Everything drawn is a function of (seed, round), so a run that was killed goes on
as if it had not been.

A completion is scored on three versions of its canvas: all of it MASK, a random mask m, and the complement of m. Each
token is MASK in the first and in exactly one of the other two, so its score always counts, with the text around it
half known. Rewards of the completions of a task are compared with each other: no value model is needed.

--preset=7b holds the reference's settings, but for these. Its completions come from 256 passes, which are most of all
work; ours from cached blocks, all sure tokens at once. Its masks repeat after about a hundred draws, and with two
micro-batches each sees the same mask twice; ours never. It cuts long prompts on the left, we leave them out. It rewards
text behind <|im_end|>, and counts a failed sandbox as a wrong answer. Groups of equal rewards teach nothing; it
computes them, we skip them.

Letters: B sequences, N completions of a prompt, L columns of a canvas, C of them its completion, T tokens in a chunk,
K versions of a canvas, I iterations, D width, R rank (or rows of a micro-batch), V vocabulary, F reward functions.
Refs: DiffuCoder, arXiv:2506.20639; GRPO, arXiv:2402.03300; leave-one-out baseline, arXiv:2402.14740.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import random
import shutil
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import data_prep
import diffusion
import model_dream as md
import rl_tasks
import runs
import sample_dream
import sandbox
import train_tpu

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are written, those that are evaluated too."""

    temperature: float = 1.0  # of the distribution that completions are drawn from
    top_p: float | None = None  # draw from the likeliest tokens that have this probability together
    block_length: int | None = None  # write block by block of so many tokens; 0: the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = "dual"  # keys and values kept while a block is filled; "" none
    threshold: float = 0.9  # all tokens of at least this probability are filled at once; 0 fills one a pass


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """Where the programs of completions run, see sandbox.py."""

    runner: typing.Literal["local", "e2b"] = "local"  # on this machine, or in E2B's cloud
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    timeout_s: float = 3.0  # seconds that one test may take
    allow_unsafe: bool = False  # run programs where the machine offers no safe sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    preset: typing.Literal["demo", "7b"] = "demo"  # sets the flags whose default is None
    ckpt: str = ""  # base model; "" trains a small one under --out, with tasks of its own
    prompts: str = ""  # folder of rl_tasks.py, or a JSONL file of tasks
    heldout: str = ""  # JSONL file of tasks to evaluate on; "" is heldout.jsonl of the folder --prompts
    out: str = "out/grpo"  # folder of the run
    resume: str = ""  # folder of a run to go on with, with its settings; "" starts anew
    rounds: int | None = None  # rounds of the whole run
    tasks: int | None = None  # different tasks in a round
    group: int | None = None  # completions of each task, which are compared with each other
    iterations: int | None = None  # updates of a round
    micro_batch: int | None = None  # completions that are differentiated at a time, all devices together
    generation_batch: int | None = None  # canvases that are filled at a time, all devices together
    max_prompt: int | None = None  # tokens of a prompt; longer ones are left out
    max_new: int | None = None  # tokens of a completion
    lr: float | None = None  # peak learning rate; a cosine falls to a tenth of it
    warmup: int = 1  # updates until the peak; the first has rate 0, as in the reference
    weight_decay: float | None = None  # AdamW's, on matrices alone
    clip: float | None = None  # largest global norm of a gradient
    beta: float = 0.01  # weight of the KL divergence from the reference model; 0: no reference model
    epsilon: float = 0.5  # the ratio of new to old probability is clipped below 1 - epsilon
    epsilon_high: float = 0.5  # the ratio of new to old probability is clipped above 1 + epsilon_high
    scale_rewards: bool = False  # divide advantages by the standard deviation of their group
    sync_every: int = 64  # updates after which the reference model moves towards the policy; 0: never
    mixup: float = 0.6  # how far the reference model moves: 1 makes it the policy, as LoRA always does
    rewards: tuple[str, ...] | None = None  # names in sandbox.py, or your own as file.py:function
    reward_weights: tuple[float, ...] | None = None  # weight of each of --rewards in their sum
    lora_rank: int = 0  # train a difference of this rank to each matrix instead of all weights; 0 trains all
    lora_targets: tuple[str, ...] = MATRICES  # matrices of each layer that LoRA changes
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # of the computation; "" float32 on a CPU, else bfloat16
    remat: typing.Literal["", "none", "qkvo", "full"] = ""  # what the backward pass recomputes; "" none on a CPU
    chunk: int = 1024  # tokens whose logits exist at a time
    tensor: int = 1  # devices that share each layer's heads, feed-forward and vocabulary; the others share weights
    eval_every: int | None = None  # rounds between evaluations on held-out tasks
    eval_tasks: int = 96  # held-out tasks at most
    eval_samples: int = 2  # completions of each held-out task
    save_every: int | None = None  # rounds between checkpoints
    keep: int = 2  # newest checkpoints to keep
    demo_steps: int = 300  # optimiser steps of the demo's own pre-training
    show: bool = False  # print the best and the worst completion of each round
    wandb: str = ""  # project name; "" logs to files alone
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    seed: int = 0  # of tasks, completions and masks
    sampling: Sampling = Sampling()
    sandbox: Sandbox = Sandbox()


PRESETS = {
    "demo": {
        "rounds": 40, "tasks": 16, "group": 8, "iterations": 2, "micro_batch": 64, "generation_batch": 128,
        "max_prompt": 40, "max_new": 16, "lr": 3e-4, "weight_decay": 0.0, "clip": 1.0, "rewards": ("code",),
        "reward_weights": (1.0,), "eval_every": 5, "save_every": 10,
        "sampling": Sampling(top_p=1.0, block_length=16),
    },
    "7b": {
        "rounds": 2000, "tasks": 8, "group": 10, "iterations": 2, "micro_batch": 5, "generation_batch": 10,
        "max_prompt": 200, "max_new": 256, "lr": 1e-6, "weight_decay": 0.1, "clip": 0.2,
        "rewards": ("code", "code_format"), "reward_weights": (2.0, 0.5), "eval_every": 50, "save_every": 50,
        "sampling": Sampling(top_p=0.95, block_length=32),
    },
}  # fmt: skip


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
    def of_chunk(inputs):
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

    outs = jax.lax.map(of_chunk, (split(hidden_BLD), split(token_BL)))
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


def add_gradients(loss_fn, params, batch, total):
    """(total + the gradients of one micro-batch, metrics) for loss_fn(params, batch) -> (loss, metrics).

    An update divides the total by the number of micro-batches. Each of them has been divided by its own number of
    tokens, as in the reference: this is no mean over the tokens of all.
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


def sync_reference(ref, params, mixup=0.6):
    """The reference model moved towards the policy: (1 - mixup) ref + mixup params, in the dtype of ref (float32)."""
    return jax.tree.map(lambda r, p: ((1 - mixup) * r + mixup * p).astype(r.dtype), ref, params)


# ---- the model and its programs ------------------------------------------------------------------------------------


def assemble(base, trained):
    """The policy's parameters: those trained, or with LoRA the base's with the trained {"a", "b"} beside a matrix."""
    if not isinstance(base, dict):
        return md.Lora(base, trained["a"], trained["b"]) if trained else base
    return {name: assemble(part, trained.get(name, {})) for name, part in base.items()} if base else trained


def new_adapters(key, base, rank, targets):
    """Float32 adapters of all layers' matrices with these names: A of size 1 / sqrt(D), B zero, so nothing changes yet.

    {"layers": {"0": {"q_proj": {"a" [R, D], "b" [F, R]}}}}. B A is not scaled: alpha = rank, in others' terms.
    """
    layers = {}
    for i, layer in base["layers"].items():
        unknown = set(targets) - {name for name, weight in layer.items() if weight.ndim == 2}
        if unknown:
            raise ValueError(f"--lora_targets: no matrix of a layer is called {', '.join(sorted(unknown))}")
        for j, name in enumerate(targets):
            F, D = layer[name].shape
            key_a = jax.random.fold_in(jax.random.fold_in(key, int(i)), j)
            a_RD = D**-0.5 * jax.random.normal(key_a, (rank, D), jnp.float32)
            layers.setdefault(i, {})[name] = {"a": a_RD, "b": jnp.zeros((F, rank), jnp.float32)}
    return {"layers": layers}


def make_programs(cfg, graph, optimizer, mask_id, layout=None, opt_layout=None):
    """(scores, gradients, update), compiled once each; base is {} for full fine-tuning.

    layout and opt_layout are the shardings of what is trained and of the optimizer's state, which stay as they are.

    scores(base, trained, batch) -> [B, C]; gradients(trained, base, total, batch) -> (total + those of the batch,
    metrics); update(trained, opt, total, micro-batches) -> (trained, opt, norm). Without a finite gradient nothing is
    updated, and norm says so.
    """

    def policy(base, trained):
        return nnx.merge(graph, assemble(base, trained))

    @jax.jit
    def scores(base, trained, batch):
        inputs = (batch[name] for name in ("token_BL", "see_BL", "u_BC", "ratio_B"))
        return coupled_scores(policy(base, trained), *inputs, mask_id, cfg.chunk, batch.get("other_BC"))[0]

    @functools.partial(jax.jit, donate_argnums=2, out_shardings=(layout, None))
    def gradients(trained, base, total, batch):
        def loss(trained, batch):
            model = policy(base, trained)
            return micro_loss(model, batch, mask_id, cfg.epsilon, cfg.epsilon_high, cfg.beta, cfg.chunk)

        return add_gradients(loss, trained, batch, total)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(layout, opt_layout, None))
    def update(trained, opt, total, count):
        grads = jax.tree.map(lambda g: g / count, total)
        norm = optax.tree.norm(grads)
        updates, new_opt = optimizer.update(grads, opt, trained)
        new = optax.apply_updates(trained, updates), new_opt
        keep = functools.partial(jnp.where, jnp.isfinite(norm))
        return *jax.tree.map(keep, new, (trained, opt)), norm

    return scores, gradients, update


class Setup(typing.NamedTuple):
    """What stays as it is from round to round."""

    cfg: Config
    prompts: rl_tasks.Prompts
    heldout: rl_tasks.Prompts | None
    rewards: list  # functions, as in sandbox.py
    rule: sample_dream.Sampling  # how completions are written; its first end token ends one
    graph: typing.Any  # the model's structure, to write with
    base: dict  # with LoRA the weights beside the adapters; {} where all weights are trained
    scores: typing.Callable  # the compiled programs, see make_programs
    gradients: typing.Callable
    update: typing.Callable
    sync: typing.Callable
    row_sharding: jax.NamedSharding  # the rows of a batch over the devices


@dataclasses.dataclass
class State:
    """What a round changes."""

    trained: dict  # all weights, or with LoRA the adapters
    ref: dict  # the same of the reference model; {} without one
    opt: typing.Any  # the optimizer's state
    updates: int = 0  # so far
    bad: int = 0  # the last updates without a finite gradient

    def arrays(self, setup):
        """What a checkpoint holds."""
        return {"adapters" if setup.base else "params": self.trained, "ref": self.ref, "opt": self.opt}


def set_up(cfg, rewards, mesh):
    """(Setup, State, architecture) before the first round: the model of --ckpt, its tasks, the compiled programs."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.dtype(cfg.dtype or ("float32" if on_cpu else "bfloat16"))  # of the computation and of a frozen base
    model, _ = runs.load(md, cfg.ckpt, dtype=dtype if cfg.lora_rank else jnp.float32, mesh=mesh)
    model_cfg, trained, base = model.cfg, nnx.to_pure_dict(nnx.state(model)), {}
    del model  # or the weights could not be replaced by those that were learnt
    tokenizer, wrap = sample_dream.load_tokenizer(cfg.ckpt, model_cfg), sample_dream.chat_template(cfg.ckpt)
    how = tokenizer, wrap, model_cfg, cfg.max_prompt, cfg.max_new
    prompts = rl_tasks.Prompts(cfg.prompts, *how)
    heldout = rl_tasks.Prompts(cfg.heldout, *how) if cfg.heldout else None

    # A text ends with the first of these; a chat model ends its turn with <|im_end|>.
    chat = "question" in prompts.tasks[0]
    ends = [tokenizer.token_to_id("<|im_end|>")] * chat + [model_cfg.eos_id, tokenizer.token_to_id("<|dlm_pad|>")]
    ends = tuple(dict.fromkeys(token for token in ends if token is not None))
    sampling = dataclasses.asdict(cfg.sampling)
    if not cfg.sampling.block_length:
        sampling["cache"] = ""  # it is kept while a block is filled
    rule = sample_dream.Sampling("entropy", **sampling, vocab=tokenizer.get_vocab_size(), eos_ids=ends)

    # The backward pass of a large model recomputes its layers; nothing is differentiated while completions are written.
    run = md.Run(dtype, 64 if on_cpu else 256, remat=cfg.remat or ("none" if on_cpu else "full"))
    graph, writing_graph = (md.graph_of(model_cfg, dataclasses.replace(run, remat=r)) for r in (run.remat, "none"))
    if cfg.lora_rank:
        key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 20)
        base, trained = trained, new_adapters(key, trained, cfg.lora_rank, cfg.lora_targets)
        trained = jax.device_put(trained, md.shardings(mesh, trained))
    rate = functools.partial(learning_rate, peak=cfg.lr, steps=cfg.rounds * cfg.iterations, warmup=cfg.warmup)
    optimizer = make_optimizer(rate, cfg.weight_decay, cfg.clip)
    layout = md.shardings(mesh, trained)
    opt_layout = md.shardings(mesh, jax.eval_shape(optimizer.init, trained))
    programs = make_programs(cfg, graph, optimizer, model_cfg.mask_id, layout, opt_layout)
    sync = functools.partial(sync_reference, mixup=1.0 if cfg.lora_rank else cfg.mixup)
    programs = *programs, jax.jit(sync, donate_argnums=0)
    rows_at = jax.NamedSharding(mesh, md.PS(md.BATCH))
    setup = Setup(cfg, prompts, heldout, rewards, rule, writing_graph, base, *programs, rows_at)
    opt = jax.jit(optimizer.init, out_shardings=opt_layout)(trained)
    ref = jax.tree.map(jnp.copy, trained) if cfg.beta else {}
    return setup, State(trained, ref, opt), model_cfg


# ---- the steps of a round ------------------------------------------------------------------------------------------


class Batch(typing.NamedTuple):
    """The completions of a round."""

    token_BL: np.ndarray  # filled canvases
    see_BL: np.ndarray  # False at padding
    counted_BC: np.ndarray  # True up to and including the end of a completion
    texts: list  # for the reward functions
    rows: list  # the tasks, with "written", "tokens" and, once rewarded, "verdicts"
    passes: float  # passes over a canvas that writing took, on average


def choices(seed, round, count, tasks):
    """Numbers of the tasks of a round: every task once an epoch, in an order that depends on (seed, epoch) alone."""
    slots = range(round * count, (round + 1) * count)
    return np.array([np.random.default_rng([seed, slot // tasks]).permutation(tasks)[slot % tasks] for slot in slots])


def draw_round(key, iterations, rows, columns):
    """The masks of each iteration of a round, as arguments of coupled_scores: [{"ratio_B", "u_BC"}]."""
    drawn = (draw_masks(key, 1, i, rows, columns) for i in range(iterations))
    return [{"ratio_B": np.asarray(ratio_B), "u_BC": np.asarray(u_BC)} for ratio_B, u_BC in drawn]


def micro_batches(row_R, size):
    """The rows in as few batches of `size` as hold them, of even lengths; -1 fills each up."""
    parts = np.array_split(row_R, -(-len(row_R) // size)) if len(row_R) else []
    return [np.pad(part, (0, size - len(part)), constant_values=-1) for part in parts]


def take(setup, batch, iteration, row_R, **more):
    """These rows of a batch on the devices, with what belongs to an iteration; row -1 is to count for nothing."""
    arrays = {"token_BL": batch.token_BL, "see_BL": batch.see_BL, "counted_BC": batch.counted_BC} | iteration | more
    return {name: jax.device_put(x[row_R], setup.row_sharding) for name, x in arrays.items()}


def rollout(setup, state, prompts, task_B, key):
    """Completions of the tasks with these numbers, by the policy as it is: a Batch."""
    cfg = setup.cfg
    policy = nnx.merge(setup.graph, assemble(setup.base, state.trained))
    canvas_BL, see_BL = prompts.canvas(task_B)
    size, filled, passes = cfg.generation_batch, [], []
    for i in range(0, len(task_B), size):
        # All batches have one shape, for one compiled program: rows of the last one are there twice.
        inputs = [np.resize(x[i : i + size], (size, x.shape[1])) for x in (canvas_BL, see_BL)]
        token_BL, stats = sample_dream.fill(policy, *inputs, setup.rule, jax.random.fold_in(key, i))
        filled.append(token_BL[: len(task_B) - i])
        passes.append(sum(stats["windows"]) / canvas_BL.shape[1])
    token_BL = np.concatenate(filled)
    counted_BC = completion_mask(token_BL[:, -cfg.max_new :], setup.rule.eos_ids[0])
    return Batch(token_BL, see_BL, counted_BC, *prompts.completions(task_B, token_BL, counted_BC), np.mean(passes))


def reward(setup, batch):
    """reward_BF of completions: a column per reward function, nan where it has none. Equal ones are run once.

    Leaves the tests' verdicts in the rows, where a function gives them. RuntimeError names a function that fails.
    """
    cfg, texts, rows = setup.cfg, batch.texts, batch.rows
    kinds, kind_B = {}, []  # (text, task, length) -> its number, in order of appearance
    for text, row in zip(texts, rows, strict=True):
        kind_B.append(kinds.setdefault((text, id(row["test_cases"]), row["tokens"]), len(kinds)))
    first = [kind_B.index(kind) for kind in range(len(kinds))]  # the first completion of each kind
    options = dataclasses.asdict(cfg.sandbox) | {"max_tokens": cfg.max_new}
    columns = []
    for name, function in zip(cfg.rewards, setup.rewards, strict=True):
        advice = f"mend it, then --resume={cfg.out}"
        try:
            values = function([texts[i] for i in first], [rows[i] for i in first], **options)
            columns.append([math.nan if x is None else float(x) for x in values])
        except Exception as error:  # whatever a user's function raises
            raise RuntimeError(f"the reward {name} raised {type(error).__name__}: {error}; {advice}") from error
        if len(columns[-1]) != len(first):
            raise RuntimeError(f"the reward {name} gave {len(values)} values for {len(first)} completions; {advice}")
    for row, kind in zip(rows, kind_B, strict=True):
        row["verdicts"] = rows[first[kind]].get("verdicts", [])
    return np.array(columns).T[kind_B]


def score(setup, state, batch, masks):
    """[{"old_BC", "ref_BC"}]: scores by the policy and the reference model, under the masks of each iteration."""
    known = []
    for i, iteration in enumerate(masks):
        old_BC, ref_BC = np.zeros((2, *batch.counted_BC.shape), np.float32)
        for row_R in micro_batches(np.arange(len(old_BC)), setup.cfg.micro_batch):
            inputs, real_R = take(setup, batch, iteration, row_R), row_R >= 0
            if i:  # before the first update the new score is the old one, see micro_loss
                old_BC[row_R[real_R]] = np.asarray(setup.scores(setup.base, state.trained, inputs))[real_R]
            if setup.cfg.beta:
                ref_BC[row_R[real_R]] = np.asarray(setup.scores(setup.base, state.ref, inputs))[real_R]
        known.append({"old_BC": old_BC, "ref_BC": ref_BC})
    return known


def learn(setup, state, batch, iterations, advantages):
    """The updates of a round: (metrics of each micro-batch, gradient norm of each update). Changes the state.

    iterations holds the masks and the old and reference scores of each.
    """
    cfg, advantage_B = setup.cfg, advantages.advantage_B.astype(np.float32)
    # A group of equal rewards has no gradient, nor has a completion whose reward is not known.
    batches = micro_batches(np.flatnonzero(advantages.counted_B & ~advantages.constant_B), cfg.micro_batch)
    measured, norms, total = [], [], None
    for j, i, complete in round_plan(len(batches), cfg.iterations):
        inputs = take(setup, batch, iterations[i], batches[j], advantage_B=advantage_B)
        inputs["counted_BC"] &= jnp.asarray(batches[j] >= 0)[:, None]
        inputs["first"] = jnp.asarray(i == 0)
        if j == 0:  # the first micro-batch of an update
            total = jax.tree.map(jnp.zeros_like, state.trained)
        total, metrics = setup.gradients(state.trained, setup.base, total, inputs)
        measured.append(metrics)
        if not complete:
            continue
        state.trained, state.opt, norm = setup.update(state.trained, state.opt, total, len(batches))
        total = None  # its memory is free before the next update begins
        norms.append(float(norm))
        state.updates += 1
        state.bad = 0 if math.isfinite(norms[-1]) else state.bad + 1
        if state.bad >= 5:
            raise RuntimeError(f"no finite gradient in five updates; lower --lr, then --resume={cfg.out}")
        if cfg.beta and cfg.sync_every and state.updates % cfg.sync_every == 0:
            state.ref = setup.sync(state.ref, state.trained)
    return measured, norms


def evaluate(setup, state):
    """Mean reward of the first function on held-out tasks, and the share that has all of it."""
    cfg = setup.cfg
    task_B = np.repeat(np.arange(min(cfg.eval_tasks, len(setup.heldout.tasks))), cfg.eval_samples)
    key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 21)  # the same at each evaluation
    reward_B = reward(setup, rollout(setup, state, setup.heldout, task_B, key))[:, 0]
    return {"heldout_reward": float(np.nanmean(reward_B)), "heldout_pass": float(np.mean(reward_B == 1))}


# ---- what is written down ------------------------------------------------------------------------------------------


def summary(setup, batch, reward_BF, advantages, measured, norms):
    """What a round's rewards, completions and micro-batches say, as numbers for the log."""
    cfg, eos_id = setup.cfg, setup.rule.eos_ids[0]
    counted_B = advantages.counted_B
    row = {"reward": float(advantages.reward_B[counted_B].mean()) if counted_B.any() else math.nan}
    for name, reward_B in zip(cfg.rewards, reward_BF.T, strict=True):
        known_B = reward_B[~np.isnan(reward_B)]
        row |= {f"{name}_{f.__name__}": float(f(known_B)) for f in (np.mean, np.std) if len(known_B)}
    row |= {"constant_groups": float(advantages.constant_B.mean()), "no_reward": int((~counted_B).sum())}
    row["timeouts"] = sum(task["verdicts"].count("timeout") for task in batch.rows)
    combine = {"ratio_max": max, "tokens": sum}
    for name in measured[0] if measured else ():
        row[name] = float(combine.get(name, np.mean)([float(metrics[name]) for metrics in measured]))
    row["ended"] = float((batch.token_BL[:, -cfg.max_new :] == eos_id).any(-1).mean())
    row |= {"length": float(batch.counted_BC.sum(-1).mean()), "passes": float(batch.passes)}
    return row | ({"grad_norm": max(norms)} if norms else {})


def completion_rows(cfg, batch, reward_BF, advantages, done):
    """Each completion with its rewards, for rounds.jsonl; None where a reward is not known."""
    rows = []
    for i, task in enumerate(batch.rows):
        row = {"round": done, "id": task.get("id"), "prompt": task.get("prompt", task.get("question"))}
        row |= {"completion": task["written"], "tokens": task["tokens"], "verdicts": task["verdicts"]}
        values = [None if math.isnan(x) else x for x in reward_BF[i].tolist()]
        row["rewards"] = dict(zip(cfg.rewards, values, strict=True))
        for name, value_B in (("reward", advantages.reward_B), ("advantage", advantages.advantage_B)):
            row[name] = float(value_B[i]) if advantages.counted_B[i] else None
        rows.append(row)
    return rows


def show_round(rows):
    """Print the best and the worst completion."""
    rows = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"])
    for name, row in (("worst", rows[0]), ("best", rows[-1])) if rows else ():
        print(f"---- {name}, reward {row['reward']:.3g}, advantage {row['advantage']:.3g}")
        print(f"{row['prompt']}{row['completion']}")


# ---- the run -------------------------------------------------------------------------------------------------------


def main(cfg, draw=draw_round):
    """Train, or go on training. draw replaces draw_round, for a comparison with other masks."""
    cfg, started = resolve(cfg), time.perf_counter()
    with runs.Run(cfg, unit="round") as run:
        settings = dataclasses.asdict(cfg)  # the demo's model and tasks are no settings: it finds them again
        rewards = [sandbox.find_reward(name) for name in cfg.rewards]
        try_sandbox(cfg)
        if not cfg.ckpt:
            cfg = make_demo(cfg)
        if cfg.compile_cache:
            jax.config.update("jax_compilation_cache_dir", str(Path(cfg.compile_cache).expanduser()))
        mesh = make_mesh(cfg)
        setup, state, model_cfg = set_up(cfg, rewards, mesh)
        describe(setup, state)

        checkpoints = runs.Checkpoints(run.out, cfg.keep)
        meta = {"model": dataclasses.asdict(model_cfg), "train": {"model": "dream"} | settings}
        first = restore(setup, state, checkpoints, meta) if cfg.resume else 0
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        files = {name: (Path(cfg.ckpt) / name).read_bytes() for name in names if (Path(cfg.ckpt) / name).exists()}
        run.begin(first or -1, meta, files, ("log.jsonl", "rounds.jsonl"))  # -1: cut round 0, an evaluation, too
        with jax.set_mesh(mesh):
            train(run, checkpoints, meta, setup, state, first, draw)
        checkpoints.close()
        folder = merge(run.out, setup, state) if cfg.lora_rank else run.out
    print(f"done in {(time.perf_counter() - started) / 60:.1f} min; python generate.py --model=dream --ckpt={folder}")


def train(run, checkpoints, meta, setup, state, first, draw):
    """The rounds after `first`."""
    cfg, pool = setup.cfg, concurrent.futures.ThreadPoolExecutor(1)
    if setup.heldout and not first:
        run.log({"round": 0} | evaluate(setup, state))
    for r in range(first, cfg.rounds):
        done, key = r + 1, jax.random.fold_in(jax.random.key(cfg.seed), r)
        clock = [time.perf_counter()]

        # A group of completions of each task. What is drawn depends on the seed and the round alone.
        task_B = np.repeat(choices(cfg.seed, r, cfg.tasks, len(setup.prompts.tasks)), cfg.group)
        batch = rollout(setup, state, setup.prompts, task_B, key)
        clock.append(time.perf_counter())

        # Their programs run in the sandbox, on the CPU, while the devices score them. Scores are taken under the same
        # masks as the updates, so that new and old ones differ by what was learnt and nothing else.
        rewarding = pool.submit(reward, setup, batch)
        masks = draw(key, cfg.iterations, len(task_B), cfg.max_new)
        known = score(setup, state, batch, masks)
        clock.append(time.perf_counter())
        reward_BF = rewarding.result()
        clock.append(time.perf_counter())

        # A completion that does better than the others of its task becomes likelier, one that does worse less likely.
        advantages = group_advantages(reward_BF, cfg.reward_weights, cfg.group, cfg.scale_rewards)
        iterations = [mask | scores for mask, scores in zip(masks, known, strict=True)]
        measured, norms = learn(setup, state, batch, iterations, advantages)
        clock.append(time.perf_counter())

        row = {"round": done} | summary(setup, batch, reward_BF, advantages, measured, norms)
        if setup.heldout and (done % cfg.eval_every == 0 or done == cfg.rounds):
            row |= evaluate(setup, state)
        completions = completion_rows(cfg, batch, reward_BF, advantages, done)
        run.append("rounds.jsonl", completions)
        seconds = np.diff(clock).tolist()
        run.log(row | dict(zip(("generate_s", "score_s", "reward_s", "update_s"), seconds, strict=True)))
        if cfg.show:
            show_round(completions)

        # Saving goes on in the background. A signal asks for one more checkpoint, of a whole round.
        if done % cfg.save_every == 0 or done == cfg.rounds or run.signal:
            checkpoints.save(done, state.arrays(setup), meta | {"round": done, "updates": state.updates})
        if run.signal:
            checkpoints.wait()
            run.leave(done)


def resolve(cfg):
    """The config with the preset's values where it says None. ValueError or FileNotFoundError for what cannot be."""
    preset = PRESETS[cfg.preset] | ({"lr": 2e-5} if cfg.preset == "7b" and cfg.lora_rank else {})
    sampling = unset_from(cfg.sampling, dataclasses.asdict(preset["sampling"]))
    cfg = dataclasses.replace(unset_from(cfg, preset), sampling=sampling)
    for name in ("rounds", "tasks", "iterations", "micro_batch", "generation_batch", "eval_every", "save_every"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name}={getattr(cfg, name)}: at least 1")
    if cfg.group < 2:
        raise ValueError(f"--group={cfg.group}: a completion is compared with the others of its task; at least 2")
    if not cfg.sampling.temperature:
        raise ValueError("--temperature=0 writes the same completion again and again; nothing could be compared")
    if len(cfg.rewards) != len(cfg.reward_weights):
        raise ValueError(f"{len(cfg.rewards)} --rewards need as many --reward_weights, not {len(cfg.reward_weights)}")
    if bool(cfg.ckpt) != bool(cfg.prompts) or (cfg.preset == "7b" and not cfg.ckpt):
        raise ValueError("--ckpt and --prompts belong together; without both --preset=demo makes its own")
    if cfg.resume and Path(cfg.resume).resolve() != Path(cfg.out).resolve():
        raise ValueError(f"--resume={cfg.resume} goes on in its own folder; leave --out={cfg.out} out")
    if cfg.prompts and Path(cfg.prompts).is_dir():
        train, heldout = (Path(cfg.prompts) / f"{split}.jsonl" for split in ("train", "heldout"))
        there = heldout.is_file() and heldout.stat().st_size  # rl_tasks.py --heldout=0 leaves it empty
        cfg = dataclasses.replace(cfg, prompts=str(train), heldout=cfg.heldout or (str(heldout) if there else ""))
    for path in filter(None, (cfg.prompts, cfg.heldout)):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist; write tasks with: python rl_tasks.py --out=data/acecode")
    return cfg


def unset_from(cfg, values):
    """A dataclass whose fields are set from `values` where they are None."""
    return dataclasses.replace(cfg, **{name: value for name, value in values.items() if getattr(cfg, name) is None})


def try_sandbox(cfg):
    """Run one right and one wrong program. RuntimeError with the reason if that does not give 1 and 0."""
    tests = [["assert f() == 1"], ["assert f() == 2"]]
    results = sandbox.run_tests(["def f():\n    return 1"] * 2, tests, **dataclasses.asdict(cfg.sandbox))
    if [result.rate for result in results] != [1, 0]:
        why = next((result.error for result in results if result.error), "a right program fails, or a wrong one passes")
        raise RuntimeError(f"the sandbox cannot be used: {why}")


def make_demo(cfg):
    """The config with prompts and a base model of its own: pairs, of which three in ten are right, and train_tpu.py."""
    base, rng = Path(cfg.out) / "base", random.Random(cfg.seed)
    tasks = rl_tasks.make_tasks(0)
    heldout, train = tasks[:96], tasks[96:]
    if not (base / "done").exists():
        print("no --ckpt: training a small Dream on tasks of its own, with three in ten answers right", flush=True)
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        pairs = []
        for task in train * 20:
            answer = task["right" if rng.random() < 0.3 else "wrong"]
            pairs.append({"prompt": task["prompt"], "response": answer + "\n"})
        for name, rows in (("pairs", pairs), ("train", train), ("heldout", heldout)):
            (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source, rows = str(base / "pairs.jsonl"), str(base / "rows")
        data_prep.main(data_prep.Pairs(source=source, out=rows, seq_len=128, eos_to=16, vocab_size=512, seed=cfg.seed))
        train_tpu.main(
            train_tpu.Config(
                model="dream_tiny", data=rows, out=str(base / "run"), seq_len=128, batch_size=16, micro_batch=16,
                remat="none", steps=cfg.demo_steps, eval_every=cfg.demo_steps, log_every=100, seed=cfg.seed,
                prompt=heldout[0]["prompt"],
            )
        )  # fmt: skip
        (base / "done").touch()
    names = {"ckpt": base / "run", "prompts": base / "train.jsonl", "heldout": base / "heldout.jsonl"}
    return dataclasses.replace(cfg, **{name: str(path) for name, path in names.items()})


def make_mesh(cfg):
    """All devices: --tensor of them share each layer, the others share rows and weights."""
    devices = np.asarray(jax.devices())
    if devices.size % cfg.tensor or cfg.micro_batch % (devices.size // cfg.tensor):
        raise ValueError(f"--tensor={cfg.tensor} has to divide {devices.size} devices, and what is left --micro_batch")
    names = ("data", "fsdp", "tensor")
    return jax.sharding.Mesh(devices.reshape(1, -1, cfg.tensor), names, axis_types=(AxisType.Auto,) * 3)


def describe(setup, state):
    """Print what is trained, on what."""
    cfg, tasks, dropped = setup.cfg, setup.prompts.tasks, setup.prompts.dropped
    count, frozen = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.trained, setup.base))
    what = f"rank {cfg.lora_rank}: {count:,} of {count + frozen:,}" if frozen else f"{count:,}"
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}; training {what} parameters of {cfg.ckpt}")
    left_out = f"; {dropped} tasks of more than {cfg.max_prompt} tokens left out" * bool(dropped)
    print(f"{len(tasks):,} tasks; a round is {cfg.tasks} x {cfg.group}{left_out}", flush=True)


def restore(setup, state, checkpoints, meta):
    """Set the state to that of the newest checkpoint, and return its round; 0 without one."""
    if checkpoints.newest() is None:
        return 0
    saved = checkpoints.meta()
    described = []  # what decides which arrays there are
    for model, train in ((saved["model"], saved["train"]), (meta["model"], meta["train"])):
        lora = {"--lora_rank": train["lora_rank"], "--lora_targets": list(train["lora_targets"])}
        described.append(model | lora | {"--beta above 0": train["beta"] > 0})
    runs.check_same(*described, checkpoints.folder)
    arrays = checkpoints.restore(state.arrays(setup))
    state.trained, state.ref, state.opt = (arrays[name] for name in state.arrays(setup))
    state.updates = saved["updates"]
    print(f"resuming {checkpoints.folder} after round {saved['round']}", flush=True)
    return saved["round"]


def merge(out, setup, state):
    """Write the whole model that LoRA has trained as the folder merged/, and return its path."""
    folder = out / "merged"
    shutil.rmtree(folder, ignore_errors=True)
    for i, adapters in state.trained["layers"].items():  # a layer at a time: there is no room for two models
        layer = assemble(setup.base["layers"][i], adapters)
        setup.base["layers"][i] = jax.tree.map(md.merged, layer, is_leaf=lambda x: isinstance(x, md.Lora))
    extra = [*out.glob("tokenizer*.json"), *out.glob("chat_template.jinja")]
    md.save(folder, nnx.merge(setup.graph, setup.base), extra)
    return folder


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
