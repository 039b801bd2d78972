"""Coupled-GRPO: reinforcement learning of a Dream model on code rewards, in JAX, on a TPU, GPUs or a CPU.

    python coupled_grpo.py                                        # a small model learns small tasks; five minutes, CPU
    python coupled_grpo.py --resume=out/grpo                      # goes on where the run stopped
    python data_prep.py --source=acecode --difficulty=hard --tokenizer=out/diffucoder/tokenizer.json --out=data/acecode
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode                  # full fine-tuning
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode --lora_rank=16   # on one TPU chip

Reads a Dream (a folder of convert_weights.py or a run of train_tpu.py) and tasks in JSON lines: {"question",
"test_cases"}, asked by the model's chat template, or {"prompt", "test_cases"}, the beginning of a program. Without
--ckpt it makes both. Writes --out: config.json, log.jsonl, rounds.jsonl (each completion with its rewards),
checkpoints/<round>/, the tokenizer; with LoRA at the end also merged/, a whole model. One host.

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
K versions of a canvas, D width, R rank, V vocabulary, F reward functions.
Refs: DiffuCoder, arXiv:2506.20639; GRPO, arXiv:2402.03300; leave-one-out baseline, arXiv:2402.14740.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import io
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax import nnx
from jax.sharding import AxisType

import data_prep
import diffusion
import model_dream as md
import sandbox
import train_tpu


@dataclasses.dataclass(frozen=True)
class Config:
    preset: typing.Literal["demo", "7b"] = "demo"  # sets what is None below
    ckpt: str = ""  # base model; "" trains a small one under --out, with tasks of its own
    prompts: str = ""  # folder of data_prep.py --source=acecode, or a JSONL file of tasks
    heldout: str = ""  # JSONL file of tasks to evaluate on; "" is heldout.jsonl of the folder --prompts
    out: str = "out/grpo"  # run folder
    resume: str = ""  # run folder to go on from, with its settings
    rounds: int | None = None
    tasks: int | None = None  # different tasks in a round
    group: int | None = None  # completions of each
    iterations: int | None = None  # updates of a round
    micro_batch: int | None = None  # completions that are differentiated at a time, all devices together
    generation_batch: int | None = None  # canvases that are filled at a time, all devices together
    max_prompt: int | None = None  # tokens; longer prompts are left out
    max_new: int | None = None  # tokens of a completion
    lr: float | None = None  # peak learning rate; a cosine falls to a tenth
    warmup: int = 1  # updates; the first has rate 0, as in the reference
    weight_decay: float | None = None  # on matrices
    clip: float | None = None  # global gradient norm
    beta: float = 0.01  # weight of the KL divergence from the reference model
    epsilon: float = 0.5  # the ratio is clipped below 1 - epsilon
    epsilon_high: float = 0.5  # and above 1 + epsilon_high
    scale_rewards: bool = False  # divide advantages by the standard deviation of their group
    sync_every: int = 64  # updates after which the reference model moves towards the policy; 0: never
    mixup: float = 0.6  # by this share; with LoRA all the way
    rewards: tuple[str, ...] | None = None  # names in sandbox.py, or your own as file.py:function
    reward_weights: tuple[float, ...] | None = None
    masks: typing.Literal["coupled", "independent"] = "coupled"  # the second for comparison
    temperature: float = 1.0  # of the completions, also of those evaluated
    top_p: float | None = None
    block_length: int | None = None  # completions are written block by block; 0: the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = "dual"  # keys and values kept while a block is filled
    threshold: float = 0.9  # all tokens that are so sure are filled at once; 0 fills one a pass
    lora_rank: int = 0  # train a difference of this rank to each matrix instead of all weights; 0 trains all
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # of the computation; what is trained is float32
    remat: typing.Literal["", "none", "qkvo", "full"] = ""  # what the backward pass recomputes; "" none on a CPU
    chunk: int = 1024  # tokens whose logits exist at a time
    tensor: int = 1  # devices that share each layer's heads, feed-forward and vocabulary; the others share weights
    eval_every: int | None = None  # rounds
    eval_tasks: int = 96  # held-out tasks at most
    eval_samples: int = 2  # completions of each
    save_every: int | None = None  # rounds
    keep: int = 2  # newest checkpoints to keep
    demo_steps: int = 300  # of the demo's own pre-training
    runner: typing.Literal["local", "e2b"] = "local"  # where programs run, see sandbox.py
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    timeout_s: float = 3.0  # of one test
    allow_unsafe: bool = False  # run programs where the machine offers no safe sandbox
    show: bool = False  # print the best and the worst completion of each round
    wandb: str = ""  # project name; "" logs to files alone
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    seed: int = 0


PRESETS = {
    "demo": {
        "rounds": 40, "tasks": 16, "group": 8, "iterations": 2, "micro_batch": 64, "generation_batch": 128,
        "max_prompt": 40, "max_new": 16, "lr": 3e-4, "weight_decay": 0.0, "clip": 1.0, "rewards": ("code",),
        "reward_weights": (1.0,), "top_p": 1.0, "block_length": 16, "eval_every": 5, "save_every": 10,
    },
    "7b": {
        "rounds": 2000, "tasks": 8, "group": 10, "iterations": 2, "micro_batch": 5, "generation_batch": 10,
        "max_prompt": 200, "max_new": 256, "lr": 1e-6, "weight_decay": 0.1, "clip": 0.2,
        "rewards": ("code", "code_format"), "reward_weights": (2.0, 0.5), "top_p": 0.95, "block_length": 32,
        "eval_every": 50, "save_every": 50,
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


# ---- prompts -------------------------------------------------------------------------------------------------------


def messages(row, system="You are a helpful assistant."):
    """The chat that asks for a row of AceCode: question and first test, but for questions that hold a code block."""
    question = row["question"]
    if "\n```\n" not in question:
        question += f"\nTest cases: {row['test_cases'][0]}"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


# ---- the demo's tasks ----------------------------------------------------------------------------------------------

NUMBERS = {  # what the docstring asks for: the right expression, and the mistake that most of the training data makes
    "{x} plus {k}": ("{x} + {k}", "{x} - {k}"),
    "{x} minus {k}": ("{x} - {k}", "{k} - {x}"),
    "{x} times {k}": ("{x} * {k}", "{x} + {k}"),
    "{x} to the power of {k}": ("{x} ** {k}", "{x} * {k}"),
    "{x} divided by {k}, rounded down": ("{x} // {k}", "{x} % {k}"),
    "the rest of {x} divided by {k}": ("{x} % {k}", "{x} // {k}"),
    "{x}, but at least {k}": ("max({x}, {k})", "min({x}, {k})"),
    "{x}, but at most {k}": ("min({x}, {k})", "max({x}, {k})"),
}
LISTS = {
    "the first {k} of {x}": ("{x}[:{k}]", "{x}[{k}:]"),
    "{x} without the first {k}": ("{x}[{k}:]", "{x}[:{k}]"),
    "the last {k} of {x}": ("{x}[-{k}:]", "{x}[:-{k}]"),
    "every item of {x} plus {k}": ("[i + {k} for i in {x}]", "[i - {k} for i in {x}]"),
    "the items of {x} above {k}": ("[i for i in {x} if i > {k}]", "[i for i in {x} if i < {k}]"),
    "how often {k} is in {x}": ("{x}.count({k})", "{x}.index({k})"),
    "the sum of {x} times {k}": ("sum({x}) * {k}", "sum({x}) + {k}"),
}


def make_tasks(seed):
    """[{"id", "prompt", "test_cases", "right", "wrong"}], shuffled: 480 functions of a line, each with three tests."""
    rng, tasks = random.Random(seed), []
    kinds = [(NUMBERS, "xnab", lambda: rng.randint(11, 40)), (LISTS, ("xs", "row", "s", "items"), None)]
    for kind, names, value in kinds:
        for words, (right, wrong) in kind.items():
            for k, x in itertools.product(range(2, 10), names):
                prompt = f'def f({x}):\n    """Return {words.format(x=x, k=k)}."""\n    return '
                tests = []
                while len(tests) < 3:
                    given = value() if value else [rng.randint(0, 19) for _ in range(12)] + [k]
                    want, mistake = (eval(text.format(x=x, k=k), {x: given}) for text in (right, wrong))
                    if want != mistake:
                        tests.append(f"assert f({given}) == {want}")
                expressions = {"right": right.format(x=x, k=k), "wrong": wrong.format(x=x, k=k)}
                tasks.append({"id": f"demo/{len(tasks)}", "prompt": prompt, "test_cases": tests} | expressions)
    rng.shuffle(tasks)
    return tasks


def make_demo(cfg):
    """The config with prompts and a base model of its own: pairs, of which three in ten are right, and train_tpu.py."""
    base, rng = Path(cfg.out) / "base", random.Random(cfg.seed)
    tasks = make_tasks(0)
    heldout, train = tasks[:96], tasks[96:]
    if not (base / "done").exists():
        print("no --ckpt: training a small Dream on tasks of its own, with three in ten answers right", flush=True)
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        pairs = [
            {"prompt": task["prompt"], "response": task["right" if rng.random() < 0.3 else "wrong"] + "\n"}
            for _ in range(20)
            for task in train
        ]
        for name, rows in (("pairs", pairs), ("train", train), ("heldout", heldout)):
            (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source, rows = str(base / "pairs.jsonl"), str(base / "rows")
        data_prep.main(data_prep.Config(source=source, out=rows, seq_len=128, eos_to=16, vocab_size=512, seed=cfg.seed))
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


# ---- tasks, completions, rewards -----------------------------------------------------------------------------------


def read_tasks(path):
    """The rows of a JSONL file of tasks; exits naming the line that is none."""
    tasks = []
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
            fine = isinstance(task.get("question", task.get("prompt")), str) and all(
                isinstance(test, str) for test in task["test_cases"]
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            fine = False
        if not fine:
            sys.exit(f'{path}, line {number} is no task: {{"question" or "prompt": text, "test_cases": [texts]}}')
        if not task["test_cases"]:
            sys.exit(f"{path}, line {number} has no tests, so nothing could be rewarded")
        tasks.append(task)
    if not tasks:
        sys.exit(f"{path} holds no tasks; write some with: python data_prep.py --source=acecode --out=data/acecode")
    return tasks


class Prompts:
    """Tasks as canvases: left-padded token ids of the prompts, columns of MASK behind them."""

    def __init__(self, path, cfg, model_cfg, tokenizer, wrap):
        self.tasks, self.ids, self.cfg, self.model_cfg, self.dropped = [], [], cfg, model_cfg, 0
        self.tokenizer = tokenizer
        for task in read_tasks(path):
            chat = "question" in task
            if chat and not wrap:
                sys.exit(f"{path} asks questions, and {cfg.ckpt} holds no chat template (tokenizer_config.json)")
            tokenizer.encode_special_tokens = not chat  # the names of special tokens in a program's text are text
            try:
                text = wrap(*(turn["content"] for turn in messages(task)[::-1])) if chat else task["prompt"]
            except ValueError as error:
                sys.exit(str(error))
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > cfg.max_prompt:
                self.dropped += 1
                continue
            self.tasks.append(task)
            self.ids.append(ids)
        if not self.tasks:
            sys.exit(f"all {self.dropped} prompts of {path} have more than --max_prompt={cfg.max_prompt} tokens")

    def canvas(self, which):
        """(token_BL, see_BL) of the tasks with these numbers."""
        P, C = self.cfg.max_prompt, self.cfg.max_new
        token_BL = np.full((len(which), P + C), self.model_cfg.mask_id, np.int32)
        token_BL[:, :P] = self.model_cfg.pad_id
        for row, i in zip(token_BL, which, strict=True):
            row[P - len(self.ids[i]) : P] = self.ids[i]
        lengths_B = np.array([len(self.ids[i]) for i in which])
        return token_BL, np.arange(P + C) >= P - lengths_B[:, None]

    def completions(self, which, token_BL, counted_BC):
        """(texts, rows) for the reward functions. Of a "prompt" the whole program is in the text, in a code block."""
        texts, rows = [], []
        for i, ids, counted_C in zip(which, token_BL[:, self.cfg.max_prompt :], counted_BC, strict=True):
            text, task = self.tokenizer.decode(ids[counted_C].tolist(), skip_special_tokens=True), self.tasks[i]
            texts.append(text if "question" in task else f"```python\n{task['prompt']}{text.rstrip()}\n```\n")
            rows.append(task | {"tokens": int(counted_C.sum()), "written": text})
        return texts, rows


def score(cfg, functions, texts, rows):
    """reward_BF of all completions: one column per reward function, nan where there is none. Equals are run once.

    Leaves the tests' verdicts in the rows, where a function gives them. Raises RuntimeError for a function that fails.
    """
    keys = [(text, id(row["test_cases"]), row["tokens"]) for text, row in zip(texts, rows, strict=True)]
    first = dict(zip(keys[::-1], range(len(keys) - 1, -1, -1), strict=True))  # the first row of each kind
    some = sorted(first.values())
    options = {"runner": cfg.runner, "e2b_router_url": cfg.e2b_router_url, "workers": cfg.workers}
    options |= {"timeout_s": cfg.timeout_s, "allow_unsafe": cfg.allow_unsafe, "max_tokens": cfg.max_new}
    columns = []
    for name, function in zip(cfg.rewards, functions, strict=True):
        try:
            column = function([texts[i] for i in some], [rows[i] for i in some], **options)
            column = [math.nan if x is None else float(x) for x in column]
        except Exception as error:  # whatever a user's function raises
            raise RuntimeError(f"the reward {name} raised {type(error).__name__}: {error}") from error
        if len(column) != len(some):
            raise RuntimeError(f"the reward {name} gave {len(column)} values for {len(some)} completions")
        columns.append(column)
    place = {i: j for j, i in enumerate(some)}
    for row, key in zip(rows, keys, strict=True):
        row["verdicts"] = rows[first[key]].get("verdicts", [])
    return np.array(columns).T[[place[first[key]] for key in keys]]


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

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2), out_shardings=(layout, opt_layout, None))
    def update(trained, opt, total, count):
        grads = jax.tree.map(lambda g: g / count, total)
        norm = optax.tree.norm(grads)
        updates, new_opt = optimizer.update(grads, opt, trained)
        new = optax.apply_updates(trained, updates), new_opt
        keep = functools.partial(jnp.where, jnp.isfinite(norm))
        return *jax.tree.map(keep, new, (trained, opt)), norm

    return scores, gradients, update


def choices(seed, round, count, tasks):
    """Numbers of the tasks of a round: every task once an epoch, in an order that depends on (seed, epoch) alone."""
    slots = range(round * count, (round + 1) * count)
    return np.array([np.random.default_rng([seed, slot // tasks]).permutation(tasks)[slot % tasks] for slot in slots])


def micro_batches(row_R, size):
    """The rows in as few batches of `size` as hold them, of even lengths; -1 fills each up."""
    parts = np.array_split(row_R, -(-len(row_R) // size)) if len(row_R) else []
    return [np.pad(part, (0, size - len(part)), constant_values=-1) for part in parts]


def generate(model, prompts, which, cfg, rule, key, work):
    """Canvases of the tasks `which`, filled: (token_BL, see_BL). Adds to work["passes"], in whole passes."""
    token_BL, see_BL = prompts.canvas(which)
    rows = cfg.generation_batch
    filled = []
    for i in range(0, len(which), rows):
        few = [np.resize(x[i : i + rows], (rows, x.shape[1])) for x in (token_BL, see_BL)]  # the last ones twice
        new_BL, stats = md.fill(model, *few, rule, jax.random.fold_in(key, i))
        filled.append(new_BL[: len(which) - i])
        work["passes"] += sum(stats["windows"]) / token_BL.shape[1]
        work["batches"] += 1
    return np.concatenate(filled), see_BL


# ---- the run -------------------------------------------------------------------------------------------------------


def resolve(cfg):
    """The config with the preset's values where it says None; exits with what cannot be."""
    preset = PRESETS[cfg.preset] | ({"lr": 2e-5} if cfg.preset == "7b" and cfg.lora_rank else {})
    cfg = dataclasses.replace(cfg, **{name: value for name, value in preset.items() if getattr(cfg, name) is None})
    if cfg.group < 2:
        sys.exit(f"--group={cfg.group}: a completion is compared with the others of its task; at least 2")
    least = dict.fromkeys(("rounds", "tasks", "iterations", "micro_batch", "generation_batch", "max_prompt"), 1)
    least |= dict.fromkeys(("max_new", "eval_every", "save_every", "keep", "eval_tasks", "eval_samples", "chunk"), 1)
    least |= dict.fromkeys(("lora_rank", "sync_every", "temperature", "threshold", "block_length", "warmup"), 0)
    for name, value in least.items():
        if getattr(cfg, name) < value:
            sys.exit(f"--{name}={getattr(cfg, name)}: at least {value}")
    if not cfg.temperature:
        sys.exit("--temperature=0 writes the same completion again and again; nothing could be compared")
    if len(cfg.rewards) != len(cfg.reward_weights):
        sys.exit(f"{len(cfg.rewards)} --rewards need as many --reward_weights, not {len(cfg.reward_weights)}")
    if cfg.block_length and cfg.max_new % cfg.block_length:
        sys.exit(f"--block_length={cfg.block_length} does not divide --max_new={cfg.max_new}")
    unknown = set(cfg.lora_targets) - {name for name in md.SHARDING if name.endswith("_proj")}
    if unknown:
        sys.exit(f"--lora_targets: no matrix of a layer is called {', '.join(sorted(unknown))}")
    if bool(cfg.ckpt) != bool(cfg.prompts):
        sys.exit("--ckpt and --prompts belong together; without both the demo makes its own")
    if cfg.preset == "7b" and not cfg.ckpt:
        sys.exit("--preset=7b needs --ckpt, a folder of convert_weights.py, and --prompts, one of data_prep.py")
    if cfg.prompts and Path(cfg.prompts).is_dir():
        train, heldout = (Path(cfg.prompts) / f"{split}.jsonl" for split in ("train", "heldout"))
        some = heldout.is_file() and heldout.stat().st_size  # --heldout=0 leaves it empty
        cfg = dataclasses.replace(cfg, prompts=str(train), heldout=cfg.heldout or (str(heldout) if some else ""))
    for path in filter(None, (cfg.prompts, cfg.heldout)):
        if not Path(path).is_file():
            sys.exit(
                f"{path} does not exist; write tasks with: python data_prep.py --source=acecode --out=data/acecode"
            )
    return cfg


def try_sandbox(cfg):
    """Run one right and one wrong program; exits with the reason if that does not give 1 and 0."""
    settings = {name: getattr(cfg, name) for name in ("runner", "e2b_router_url", "timeout_s", "allow_unsafe")}
    try:
        results = sandbox.run_tests(
            ["def f():\n    return 1"] * 2, [["assert f() == 1"], ["assert f() == 2"]], **settings
        )
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
    if [result.rate for result in results] != [1, 0]:
        why = next((result.error for result in results if result.error), "a right program fails, or a wrong one passes")
        sys.exit(f"the sandbox cannot be used: {why}")


def save(manager, round, state, meta):
    """Start an asynchronous save. Raises OSError or ValueError if this one, or the one before, cannot be written."""
    items = {name: ocp.args.StandardSave(tree) for name, tree in state.items() if tree}
    items["meta"] = ocp.args.JsonSave(meta | {"round": round, "sums": md.bit_sums(state)})
    manager.save(round, args=ocp.args.Composite(**items), force=True)


def restore(manager, state, out):
    """The newest checkpoint: (state, laid out as the given one, round, updates); exits if it cannot be read."""
    round = manager.latest_step()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            target = {
                name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
                for name, tree in state.items()
            }
            items = {name: ocp.args.StandardRestore(tree) for name, tree in target.items() if tree}
            new = manager.restore(round, args=ocp.args.Composite(meta=ocp.args.JsonRestore(), **items))
            new_state = {name: new[name] if tree else tree for name, tree in state.items()}
            if md.bit_sums(new_state) != new["meta"]["sums"]:
                raise ValueError("it differs from what was saved")
            return new_state, round, new["meta"]["updates"]
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            path = f"{out}/checkpoints/{round}"
            end(f"{path} cannot be read ({str(error).splitlines()[0]}); delete it to use the one before")


def end(message):
    """Exit with one line, at once: threads of a failed Orbax read or write print tracebacks until the process ends."""
    print(message, file=sys.__stderr__, flush=True)
    os._exit(1)


def log(out, row, tracker=None):
    """Print one row of metrics and append it to <out>/log.jsonl, the source of every plot and table."""
    print(" | ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items()), flush=True)
    with open(Path(out) / "log.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    if tracker:
        tracker.log(row, step=row["round"])


def truncate(path, round):
    """Drop the lines that a killed run wrote after its last checkpoint; they will be written again."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        path.with_suffix(".tmp").write_text("".join(line for line in lines if json.loads(line)["round"] <= round))
        os.replace(path.with_suffix(".tmp"), path)


def summary(cfg, reward_BF, result, rows, measured):
    """What a round's rewards, verdicts and micro-batches say, as numbers for the log."""
    row = {"reward": float(result.reward_B[result.counted_B].mean()) if result.counted_B.any() else math.nan}
    for name, reward_B in zip(cfg.rewards, reward_BF.T, strict=True):
        known_B = reward_B[~np.isnan(reward_B)]
        row |= {f"{name}_{f.__name__}": float(f(known_B)) for f in (np.mean, np.std) if len(known_B)}
    row |= {"constant_groups": float(result.constant_B.mean()), "no_reward": int((~result.counted_B).sum())}
    row["timeouts"] = sum(each["verdicts"].count("timeout") for each in rows)
    combine = {"ratio_max": max, "tokens": sum}
    for name in measured[0] if measured else ():
        row[name] = float(combine.get(name, np.mean)([float(metrics[name]) for metrics in measured]))
    return row


def told(cfg, reward_BF, result, rows):
    """Each completion with its rewards, for rounds.jsonl; None where there is none."""
    for i, row in enumerate(rows):
        rewards = [None if math.isnan(x) else x for x in reward_BF[i].tolist()]
        line = {"id": row.get("id"), "prompt": row.get("prompt", row.get("question")), "completion": row["written"]}
        line |= {"tokens": row["tokens"], "verdicts": row["verdicts"]}
        line["rewards"] = dict(zip(cfg.rewards, rewards, strict=True))
        counted = bool(result.counted_B[i])
        line["reward"], line["advantage"] = (
            (float(x[i]) if counted else None) for x in (result.reward_B, result.advantage_B)
        )
        yield line


def show_round(rows):
    """Print the best and the worst completion."""
    rows = sorted((row for row in rows if row["advantage"] is not None), key=lambda row: row["reward"])
    for name, row in (("worst", rows[0]), ("best", rows[-1])) if rows else ():
        print(f"---- {name}, reward {row['reward']:.3g}, advantage {row['advantage']:.3g}")
        print(f"{row['prompt']}{row['completion']}")


def main(cfg):
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    cfg = resolve(cfg)
    out, started = Path(cfg.out), time.perf_counter()
    if cfg.resume:
        if Path(cfg.resume).resolve() != out.resolve():
            sys.exit(f"--resume={cfg.resume} goes on in its own folder; leave --out={out} out")
        saved = saved_config(["--resume", cfg.resume])
        if (cfg.lora_rank, cfg.lora_targets, cfg.beta > 0) != (saved.lora_rank, saved.lora_targets, saved.beta > 0):
            sys.exit(f"{cfg.resume} holds other weights; leave --lora_rank, --lora_targets and --beta as they were")
    elif any(path.name.isdigit() for path in (out / "checkpoints").glob("*")):
        sys.exit(f"{out} already holds a run: --resume={out} goes on with it, another --out starts anew")
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another trainer is writing to {out}; wait for it or choose another --out")
    settings = dataclasses.asdict(cfg)
    try:
        functions = [sandbox.find_reward(name) for name in cfg.rewards]
    except Exception as error:  # whatever a user's file raises
        sys.exit(f"--rewards: {error}")
    try_sandbox(cfg)
    if not cfg.ckpt:
        cfg = make_demo(cfg)
    if cfg.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(cfg.compile_cache).expanduser()))

    # ---- the model
    devices = jax.devices()
    if len(devices) % cfg.tensor or cfg.micro_batch % (len(devices) // cfg.tensor):
        sys.exit(f"--tensor={cfg.tensor} has to divide {len(devices)} devices, and what is left --micro_batch")
    mesh = jax.sharding.Mesh(
        np.asarray(devices).reshape(1, -1, cfg.tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    on_cpu = devices[0].platform == "cpu"
    dtype = jnp.dtype(cfg.dtype or ("float32" if on_cpu else "bfloat16"))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            model = md.load(cfg.ckpt, dtype if cfg.lora_rank else jnp.float32, mesh=mesh)
            tokenizer, wrap = md.load_tokenizer(cfg.ckpt, model.cfg), md.chat_template(cfg.ckpt)
        except (OSError, ValueError) as error:
            end(error)
    model_cfg, params = model.cfg, nnx.to_pure_dict(nnx.state(model))
    if cfg.max_prompt + cfg.max_new > model_cfg.positions:
        sys.exit(f"--max_prompt + --max_new are more than the model's {model_cfg.positions} positions")
    train = Prompts(cfg.prompts, cfg, model_cfg, tokenizer, wrap)
    heldout = Prompts(cfg.heldout, cfg, model_cfg, tokenizer, wrap) if cfg.heldout else None
    chat = "question" in train.tasks[0]
    end_of_turn = tokenizer.token_to_id("<|im_end|>") if chat else None
    eos_id = model_cfg.eos_id if end_of_turn is None else end_of_turn
    padding = tokenizer.token_to_id("<|dlm_pad|>")
    ends = dict.fromkeys((eos_id, model_cfg.eos_id) if padding is None else (eos_id, model_cfg.eos_id, padding))
    same = {name: getattr(cfg, name) for name in ("temperature", "top_p", "threshold", "block_length")}
    cache, vocab = cfg.cache if cfg.block_length else "", tokenizer.get_vocab_size()
    try:
        rule = md.Sampling("entropy", **same, cache=cache, vocab=vocab, eos_ids=tuple(ends))
    except ValueError as error:
        sys.exit(str(error))
    run = md.Run(dtype, 64 if on_cpu else 256, remat=cfg.remat or ("none" if on_cpu else "full"))
    plain = md.graph_of(model_cfg, dataclasses.replace(run, remat="none"))
    key = jax.random.key(cfg.seed)
    base = {}
    if cfg.lora_rank:
        base, params = params, new_adapters(jax.random.fold_in(key, 1 << 20), params, cfg.lora_rank, cfg.lora_targets)
        params = jax.device_put(params, md.shardings(mesh, params))
    del model
    optimizer = make_optimizer(
        functools.partial(learning_rate, peak=cfg.lr, steps=cfg.rounds * cfg.iterations, warmup=cfg.warmup),
        cfg.weight_decay,
        cfg.clip,
    )
    layout = md.shardings(mesh, params)
    opt_layout = md.shardings(mesh, jax.eval_shape(optimizer.init, params))
    opt = jax.jit(optimizer.init, out_shardings=opt_layout)(params)
    ref = jax.tree.map(jnp.copy, params) if cfg.beta else {}
    name = "adapters" if cfg.lora_rank else "params"
    state = {name: params, "ref": ref, "opt": opt}
    graph = md.graph_of(model_cfg, run)
    scores, gradients, update = make_programs(cfg, graph, optimizer, model_cfg.mask_id, layout, opt_layout)
    sync = jax.jit(functools.partial(sync_reference, mixup=1.0 if cfg.lora_rank else cfg.mixup), donate_argnums=0)
    count = sum(x.size for x in jax.tree.leaves(params))
    whole = md.count_params(model_cfg)["total"] + count
    what = f"rank {cfg.lora_rank}: {count:,} of {whole:,}" if base else f"{count:,}"
    print(f"{len(devices)} x {devices[0].device_kind}, {dtype}; training {what} parameters of {cfg.ckpt}")
    left_out = f", {train.dropped} longer ones left out" * bool(train.dropped)
    print(
        f"{len(train.tasks):,} tasks of {cfg.max_prompt} tokens or less{left_out}; a round is {cfg.tasks} x {cfg.group}"
    )

    # ---- the folder
    options = ocp.CheckpointManagerOptions(max_to_keep=cfg.keep, cleanup_tmp_directories=True)
    manager = ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)
    meta = {"model": dataclasses.asdict(model_cfg), "train": {"model": "dream"} | settings}
    first = updates = bad = 0
    rows_at = jax.NamedSharding(mesh, md.PS(md.BATCH))
    if cfg.resume and manager.latest_step() is not None:
        state, first, updates = restore(manager, state, out)
        print(f"resuming {out} after round {first}")
    for path in (out / "log.jsonl", out / "rounds.jsonl"):
        truncate(path, first or -1)
    (out / "config.json").write_text(json.dumps(meta, indent=2) + "\n")
    for path in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(cfg.ckpt) / path).exists():
            shutil.copy(Path(cfg.ckpt) / path, out)
    tracker = None
    if cfg.wandb:
        try:
            import wandb
        except ImportError:
            sys.exit("--wandb needs the package wandb: pip install wandb")
        tracker = wandb.init(project=cfg.wandb, config=meta, dir=str(out), id=out.name, resume="allow")

    def settle():
        """Wait for the save under way; exits if it could not be written."""
        try:
            manager.wait_until_finished()
        except (OSError, ValueError) as error:
            end(f"a checkpoint was not written ({str(error).splitlines()[0]}); go on with --resume={out}")

    def evaluate():
        """Mean reward of the first function, on held-out tasks."""
        which = np.repeat(np.arange(min(cfg.eval_tasks, len(heldout.tasks))), cfg.eval_samples)
        policy, key_e = nnx.merge(plain, assemble(base, state[name])), jax.random.fold_in(key, 1 << 21)
        token_BL, _ = generate(policy, heldout, which, cfg, rule, key_e, collections.Counter())
        counted_BC = completion_mask(token_BL[:, cfg.max_prompt :], eos_id)
        reward_B = score(cfg, functions, *heldout.completions(which, token_BL, counted_BC))[:, 0]
        return {"heldout_reward": float(np.nanmean(reward_B)), "heldout_pass": float(np.mean(reward_B == 1))}

    def one_round(r):
        """Completions, rewards and updates of round r: (a row for the log, rows for rounds.jsonl)."""
        nonlocal updates, bad
        seconds, then, total = {}, time.perf_counter(), None

        def lap(phase):
            nonlocal then
            now = time.perf_counter()
            seconds[f"{phase}_s"], then = now - then, now

        key_r, work = jax.random.fold_in(key, r), collections.Counter()
        which = np.repeat(choices(cfg.seed, r, cfg.tasks, len(train.tasks)), cfg.group)
        B, C = len(which), cfg.max_new
        policy = nnx.merge(plain, assemble(base, state[name]))
        token_BL, see_BL = generate(policy, train, which, cfg, rule, key_r, work)
        counted_BC = completion_mask(token_BL[:, cfg.max_prompt :], eos_id)
        texts, rows = train.completions(which, token_BL, counted_BC)
        lap("generate")
        rewards = pool.submit(score, cfg, functions, texts, rows)  # in the sandbox, while others are scored here

        def rows_of(row_R, i, **more):
            """Batch of these rows under the masks of iteration i; row -1 counts for nothing."""
            batch = {"token_BL": token_BL, "see_BL": see_BL, "u_BC": u_NBC[i], "ratio_B": ratio_NB[i], **more}
            if cfg.masks == "independent":
                batch["other_BC"] = other_NBC[i]
            return {name: jax.device_put(x[row_R], rows_at) for name, x in batch.items()}

        n = cfg.iterations
        ratio_NB, u_NBC = (np.stack(x) for x in zip(*(draw_masks(key_r, 1, i, B, C) for i in range(n)), strict=True))
        if cfg.masks == "independent":
            other_NBC = np.stack([draw_masks(key_r, 2, i, B, C)[1] for i in range(n)])
        old_NBC, ref_NBC = np.zeros((2, n, B, C), np.float32)
        for i, row_R in itertools.product(range(n), micro_batches(np.arange(B), cfg.micro_batch)):
            real = row_R >= 0
            if i:  # before the first update the score itself is the old one
                old_NBC[i, row_R[real]] = np.asarray(scores(base, state[name], rows_of(row_R, i)))[real]
            if cfg.beta:
                ref_NBC[i, row_R[real]] = np.asarray(scores(base, state["ref"], rows_of(row_R, i)))[real]
        lap("score")
        reward_BF = rewards.result()
        lap("reward")
        result = group_advantages(reward_BF, cfg.reward_weights, cfg.group, cfg.scale_rewards)
        learns_B = result.counted_B & ~result.constant_B
        measured, norms = [], []
        batches = micro_batches(np.flatnonzero(learns_B), cfg.micro_batch)
        for j, i, last in round_plan(len(batches), n):
            more = {"old_BC": old_NBC[i], "advantage_B": result.advantage_B.astype(np.float32)}
            batch = rows_of(batches[j], i, counted_BC=counted_BC, ref_BC=ref_NBC[i], **more)
            batch["counted_BC"] &= jnp.asarray(batches[j] >= 0)[:, None]
            total = jax.tree.map(jnp.zeros_like, state[name]) if j == 0 else total
            total, metrics = gradients(state[name], base, total, batch | {"first": jnp.asarray(i == 0)})
            measured.append(metrics)
            if last:
                state[name], state["opt"], norm = update(state[name], state["opt"], total, len(batches))
                norms.append(float(norm))
                updates += 1
                bad = 0 if math.isfinite(norms[-1]) else bad + 1
                if bad >= 5:
                    raise RuntimeError("no finite gradient in five updates; lower --lr")
                if cfg.beta and cfg.sync_every and updates % cfg.sync_every == 0:
                    state["ref"] = sync(state["ref"], state[name])
        lap("update")
        row = {"round": r + 1} | summary(cfg, reward_BF, result, rows, measured)
        row |= {"ended": float((token_BL[:, cfg.max_prompt :] == eos_id).any(-1).mean())}
        row |= {"length": float(counted_BC.sum(-1).mean()), "passes": work["passes"] / work["batches"]}
        row |= {"grad_norm": max(norms)} if norms else {}
        lines = [{"round": r + 1} | line for line in told(cfg, reward_BF, result, rows)]
        return row | seconds, lines

    stop = []
    handlers = {s: signal.signal(s, lambda number, _: stop.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    stderr, sys.stderr = sys.stderr, io.StringIO()  # the threads of a failed save print tracebacks; `end` prints a line
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        with jax.set_mesh(mesh):
            if heldout and not first:
                log(out, {"round": 0} | evaluate(), tracker)
            for r in range(first, cfg.rounds):
                row, lines = one_round(r)
                done, last = r + 1, r + 1 == cfg.rounds
                if heldout and (done % cfg.eval_every == 0 or last):
                    row |= evaluate()
                with open(out / "rounds.jsonl", "a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
                log(out, row, tracker)
                if cfg.show:
                    show_round(lines)
                if done % cfg.save_every == 0 or last or stop:
                    settle()
                    save(manager, done, state, meta | {"updates": updates})
                if stop:
                    settle()
                    sys.exit(f"{signal.Signals(stop[0]).name}: saved round {done}; go on with --resume={out}")
        settle()
        manager.close()
    except RuntimeError as error:
        end(f"{str(error).splitlines()[0]}; mend it, then --resume={out}")
    finally:
        sys.stderr = stderr
        pool.shutdown(wait=False, cancel_futures=True)
        for s, handler in handlers.items():
            signal.signal(s, handler)
    folder = out
    if cfg.lora_rank:
        folder = out / "merged"
        shutil.rmtree(folder, ignore_errors=True)
        for i, layer in state[name]["layers"].items():  # a layer at a time: there is no room for two models
            layer = assemble(base["layers"][i], layer)
            base["layers"][i] = jax.tree.map(md.merged, layer, is_leaf=lambda x: isinstance(x, md.Lora))
        extra = list(out.glob("tokenizer*.json")) + list(out.glob("chat_template.jinja"))
        md.save(folder, nnx.merge(plain, base), extra)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} min; python generate.py --model=dream --ckpt={folder}")


def saved_config(argv):
    """Defaults of the command line: a resumed run's own settings, so that --resume=DIR alone goes on as it was."""
    flags = (a.split("=", 1) if "=" in a else (a, b) for a, b in itertools.zip_longest(argv, argv[1:], fillvalue=""))
    folder = next((value for flag, value in flags if flag == "--resume"), "")
    if not folder:
        return Config()
    try:
        saved = json.loads((Path(folder) / "config.json").read_text())["train"]
    except (OSError, ValueError, KeyError):
        sys.exit(f"{folder}/config.json cannot be read; --resume names the folder of an earlier run")
    fields = {field.name for field in dataclasses.fields(Config)}
    saved = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items() if name in fields}
    return Config(**saved | {"out": folder})


if __name__ == "__main__":
    try:
        main(
            tyro.cli(Config, default=saved_config(sys.argv), description=__doc__, config=(tyro.conf.FlagConversionOff,))
        )
    except KeyboardInterrupt:
        os._exit(130)
    except OSError as error:
        end(f"{error}; make room or mend the path, then --resume the run")
