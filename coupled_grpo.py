"""Coupled-GRPO: reinforcement learning of a Dream model on code rewards, in JAX, on a TPU, GPUs or a CPU.

    python coupled_grpo.py                                        # a small model learns small tasks; five minutes, CPU
    python coupled_grpo.py --resume=out/grpo                      # goes on where the run stopped
    python rl_tasks.py --difficulty=hard --tokenizer=out/diffucoder/tokenizer.json --out=data/acecode
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode                  # on eight TPUs
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode --lora_rank=16   # on one TPU

Reads a Dream (a folder of convert_weights.py or a run of train_tpu.py) and tasks (see rl_tasks.py); without --ckpt it
makes both. Writes --out: config.json, log.jsonl, rounds.jsonl (each completion with its rewards), checkpoints/<round>/,
the tokenizer, with --plot curve.png; with LoRA at the end also merged/, a whole model. One host.

A round: --group completions of each of --tasks tasks, their rewards from sandbox.py, and --iterations updates, each
over all of them under fresh masks. Everything drawn is a function of (seed, round), so a run that was killed goes on
as if it had not been.

A completion is scored on three versions of its canvas: all of it MASK, a random mask m, and the complement of m. Each
token is MASK in the first and in exactly one of the other two, so its score always counts, with the text around it
half known. Rewards of the completions of a task are compared with each other: no value model is needed.

A Dream of blocks writes them behind its exact cache and is scored as it writes, at twice the work: a token sees its
block under the mask and the blocks before it as they are.

--estimator=trajectory scores each token where it was drawn: on the canvas that the sampler saw in that step. With
--replay=0 --top_p=1 the sum is the exact log-probability of the completion's path. What the sampler's cache and the
model without one say of the same step is compared in every round: see "drift" in log.jsonl.

--preset=7b holds the reference's settings, but for these. Its completions come from 256 passes, which are most of all
work (--threshold=0 --block_length=0); ours from cached blocks, all sure tokens at once. Its masks repeat after about a
hundred draws; ours never. It cuts long prompts on the left, we leave them out. It rewards text behind <|im_end|>, and
counts a failed sandbox as a wrong answer. It has no LoRA; the rate that ours has is a guess.

The demo's tasks are split by constant. "heldout" are tasks whose constants were in pre-training and are never rewarded,
"unseen" ones with a constant that neither stage has shown.

Letters: B sequences, N completions of a prompt, L columns of a canvas, C of them its completion, T tokens in a chunk,
K versions of a canvas, I iterations, D width, R rank (or rows of a micro-batch), V vocabulary, F reward functions.
Refs: DiffuCoder, arXiv:2506.20639; GRPO, arXiv:2402.03300; leave-one-out baseline, arXiv:2402.14740.
"""

import concurrent.futures
import dataclasses
import functools
import math
import shutil
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import data_prep
import diffusion
import model_dream as md
import rl_tasks
import runs
import sample_block
import sample_dream
import sandbox
import train_tpu

# Settings that may differ between hosts: where things are, and the sandbox, which host 0 alone needs.
OF_A_HOST = ("sandbox", "hosts", "ckpt", "prompts", "heldout", "humaneval", "out", "resume", "wandb", "compile_cache")
VIEWS = 3  # canvases of a completion that are scored at a time, whatever the estimator


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are written, those that are evaluated too."""

    temperature: float = 1.0  # of the distribution that completions are drawn from
    top_p: float | None = None  # draw from the likeliest tokens that have this probability together
    # write block by block of so many tokens; 0: the whole canvas at once. A model trained in blocks has its own
    block_length: int | None = None
    # keys and values kept while a block is filled; "" none. If not given dual; a model trained in blocks has its own
    cache: typing.Literal["", "prefix", "dual"] | None = None
    threshold: float = 0.9  # all positions of at least this probability are filled at once; 0 fills one a pass
    # what --threshold looks at: the likeliest token's probability, or as in Fast-dLLM that of the token that was drawn,
    # which makes the policy sharper than its distributions
    score: typing.Literal["distribution", "drawn"] = "distribution"


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """Where the programs of completions run, see sandbox.py."""

    runner: typing.Literal["local", "e2b"] = "local"  # on this machine, or in E2B's cloud
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    timeout_s: float = 5.0  # processor seconds of one test; on the clock three times as many
    allow_unsafe: bool = False  # run programs where the machine offers no safe sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    preset: typing.Literal["demo", "7b"] = "demo"  # sets the flags whose default is None
    ckpt: str = ""  # base model; "" trains a small one under --out, with tasks of its own
    prompts: str = ""  # folder of rl_tasks.py, or a JSONL file of tasks
    heldout: str = ""  # JSONL file of tasks to evaluate on; "" is heldout.jsonl of the folder --prompts
    humaneval: str = ""  # a second such file, of rl_tasks.py --humaneval; "" is humaneval.jsonl of the folder --prompts
    out: str = "out/grpo"  # folder of the run
    resume: str = ""  # folder of a run to go on with, with its settings; "" starts anew
    rounds: int | None = None  # rounds of the whole run; 0: every task once
    tasks: int | None = None  # different tasks in a round
    group: int | None = None  # completions of each task, which are compared with each other
    iterations: int | None = None  # updates of a round
    micro_batch: int | None = None  # completions that are differentiated at a time, on all devices; 7b: 5 on each
    generation_batch: int | None = None  # canvases that are filled at a time, on all devices; 7b: 10 on each
    max_prompt: int | None = None  # tokens of a prompt; longer ones are left out
    max_new: int | None = None  # tokens of a completion
    lr: float | None = None  # peak learning rate; a cosine falls to a tenth of it. 7b: 1e-6, with LoRA 2e-5, a guess
    warmup: int = 1  # updates until the peak; the first has rate 0, as in the reference
    weight_decay: float | None = None  # AdamW's, on matrices alone
    clip: float | None = None  # largest global norm of a gradient
    beta: float = 0.01  # weight of the KL divergence from the reference model; 0: no reference model
    epsilon: float = 0.5  # the ratio of new to old probability is clipped below 1 - epsilon
    epsilon_high: float = 0.5  # the ratio of new to old probability is clipped above 1 + epsilon_high
    delta: float = 0.0  # largest ratio where an advantage is negative, above 1 + epsilon_high; 0: none
    # of a token, as in the reference, or of a completion: the geometric mean over its tokens (GSPO)
    ratio: typing.Literal["token", "sequence"] = "token"
    # terms are divided by the tokens of their micro-batch, as in the reference, by those of the update, by those that
    # all completions could have (Dr. GRPO), or by those of their completion (GRPO)
    loss: typing.Literal["bnpo", "dapo", "dr_grpo", "grpo"] = "bnpo"
    mask_truncated: bool = False  # completions without an end take no part in updates
    scale_rewards: bool = False  # divide advantages by the standard deviation of their group
    skip_constant: bool | None = None  # leave out groups of equal rewards, which the reference computes for their KL
    refill: int = 0  # times that groups of equal rewards are written anew, for other tasks; as DAPO, 0 keeps them
    # of a token's score: the reference's, whose weights sum to 1.5; for the same passes one whose mean is the ELBO; or
    # the probability with which the token was drawn, replayed
    estimator: typing.Literal["coupled", "coupled_elbo", "trajectory"] = "coupled"
    replay: int = 3  # steps of each completion that are replayed each round, drawn at random; 0: all of them
    # weights for what the cache makes different between sampler and learner: the ratio of their probabilities of a
    # token or a completion, at most --importance_max, or 0 beyond it; "" none
    importance: typing.Literal["", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = ""
    importance_max: float = 3.0  # largest weight of --importance
    drift_bound: float = 0.0  # drift_k3 of a round above which the cache is opened twice as often; 0: never
    # completions that have the same share of their tokens masked: those of a task, as on a process of the reference,
    # each by itself, or all of a round
    ratio_per: typing.Literal["task", "completion", "round"] = "task"
    sync_every: int = 64  # updates after which the reference model moves towards the policy; 0: never
    mixup: float = 0.6  # how far the reference model moves: 1 makes it the policy, as LoRA always does
    rewards: tuple[str, ...] | None = None  # names in sandbox.py, or your own as file.py:function
    reward_weights: tuple[float, ...] | None = None  # weight of each of --rewards in their sum
    lora_rank: int = 0  # train a difference of this rank to each matrix instead of all weights; 0 trains all
    lora_targets: tuple[str, ...] = md.MATRICES  # matrices of each layer that LoRA changes
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
    plot: bool = False  # draw the rewards of the rounds in the terminal, and at the end curve.png
    wandb: str = ""  # project name; "" logs to files alone
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    hosts: str = ""  # "" one host; "auto" on TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX of this process
    seed: int = 0  # of tasks, completions and masks
    sampling: Sampling = Sampling()
    sandbox: Sandbox = Sandbox()


PRESETS = {  # micro_batch and generation_batch are for one device
    "demo": {
        "rounds": 40, "tasks": 16, "group": 8, "iterations": 2, "micro_batch": 64, "generation_batch": 128,
        "max_prompt": 40, "max_new": 16, "lr": 3e-4, "weight_decay": 0.0, "clip": 1.0, "rewards": ("code",),
        "reward_weights": (1.0,), "skip_constant": True, "eval_every": 5, "save_every": 10,
        "sampling": Sampling(top_p=1.0, block_length=16, cache="dual"),
    },
    "7b": {
        "rounds": 0, "tasks": 8, "group": 10, "iterations": 2, "micro_batch": 5, "generation_batch": 10,
        "max_prompt": 200, "max_new": 256, "lr": 1e-6, "weight_decay": 0.1, "clip": 0.2,
        "rewards": ("code", "code_format"), "reward_weights": (2.0, 0.5), "skip_constant": False, "eval_every": 50,
        "save_every": 50, "sampling": Sampling(top_p=0.95, block_length=32, cache="dual"),
    },
}  # fmt: skip


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
    model, batch, mask_id, low=0.5, high=0.5, beta=0.01, chunk=1024, elbo=False, temperature=1.0, vocab=0, **form
):
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


# ---- the model and its programs ------------------------------------------------------------------------------------


def graphs_of(cfg, model_cfg, dtype, on_cpu=False, platform=""):
    """The model without its parameters, twice: as it is trained, and as it writes, which recomputes nothing."""
    run = md.Run(dtype, 64 if on_cpu else 256, remat=cfg.remat or ("none" if on_cpu else "full"), platform=platform)
    return md.graph_of(model_cfg, run), md.graph_of(model_cfg, dataclasses.replace(run, remat="none"))


def mesh_of(devices, shape):
    """The devices in their order as a mesh (data, fsdp, tensor)."""
    return jax.sharding.Mesh(np.reshape(devices, shape), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def to_write(params, mesh, dtype):
    """The weights on a mesh of (data, 1, tensor), matrices in dtype. A matrix that all devices share goes there by two
    exchanges, between the groups of devices and within each; in one step XLA would make it whole on every device.
    """

    def move(x, last):
        x = x.astype(dtype) if x.ndim > 1 else x
        for axes in (("data", "tensor"), "tensor") if "fsdp" in last.spec else ():
            spec = md.PS(*(axes if axis == "fsdp" else None for axis in last.spec))
            x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, md.fit(spec, x.shape, mesh)))
        return jax.lax.with_sharding_constraint(x, last)

    return jax.tree.map(move, params, md.shardings(mesh, params))


def rule_of(sampling, vocab, ends):
    """How rollouts are written, for sample_dream; the first of `ends` fills up what follows the end of a text."""
    sampling = dataclasses.asdict(sampling) | {"filtered": True}  # a threshold is after top-p; in blocks before
    if not sampling["block_length"]:
        sampling["cache"] = ""  # it is kept while a block is filled
    return sample_dream.Sampling("entropy", **sampling, vocab=vocab, eos_ids=ends, record=True)


def make_programs(cfg, graph, optimizer, mask_id, layout=None, opt_layout=None, vocab=0):
    """(scores, gradients, update), compiled once each; base is {} for full fine-tuning.

    scores(trained, base, batch) -> [B, C]; gradients(trained, base, total, batch) -> (total + those of the batch,
    metrics); update(trained, opt, total, micro-batches) -> (trained, opt, norm), unchanged where the norm is not
    finite. layout and opt_layout are the shardings of what is trained and of the optimizer's state. vocab: ids from
    here on are never drawn.
    """

    scoring = cfg.chunk, cfg.estimator == "coupled_elbo", cfg.sampling.temperature, vocab
    limits = cfg.epsilon, cfg.epsilon_high, cfg.beta

    def policy(trained, base):
        return nnx.merge(graph, md.assemble(base, trained))

    @jax.jit
    def scores(trained, base, batch):
        return scores_of(policy(trained, base), batch, mask_id, *scoring)[0]

    @functools.partial(jax.jit, donate_argnums=2, out_shardings=(layout, None))
    def gradients(trained, base, total, batch):
        def loss(trained, batch):
            form = {"delta": cfg.delta, "ratio": cfg.ratio, "loss": cfg.loss}
            return micro_loss(policy(trained, base), batch, mask_id, *limits, *scoring, **form)

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


# ---- the steps of a round ------------------------------------------------------------------------------------------


class Batch(typing.NamedTuple):
    """The completions of a round."""

    token_BL: np.ndarray  # filled canvases
    see_BL: np.ndarray  # False at padding
    counted_BC: np.ndarray  # True up to and including the end of a completion
    rows: list  # the tasks, with "text", "written", "tokens" and, once rewarded, "verdicts"
    passes: float  # passes over a canvas that writing took, on average
    record: sample_dream.Record  # when each token was drawn

    def replaced(self, row_R, new):
        """A Batch with those of `new` in these rows."""

        def put(old, new):
            merged = old.copy()
            merged[row_R] = new
            return merged

        rows = list(self.rows)
        for row, one in zip(row_R.tolist(), new.rows, strict=True):
            rows[row] = one
        arrays = map(put, (*self[:3], *self.record), (*new[:3], *new.record))
        token_BL, see_BL, counted_BC, *record = arrays
        passes = self.passes + new.passes * len(row_R) / len(rows)
        return Batch(token_BL, see_BL, counted_BC, rows, passes, sample_dream.Record(*record))


class Replay(typing.NamedTuple):
    """What the model without a cache says of steps of a rollout."""

    views: dict  # arrays for trajectory_scores, with the scores of policy and reference model
    log_BC: np.ndarray  # log(learner's p / sampler's p)
    seen_BC: np.ndarray  # of these tokens: drawn in a step that was replayed


def micro_batches(row_R, size, devices=1):
    """The rows in as few batches of `size` as hold them, of even lengths; -1 fills each up, for equal shares."""
    parts = np.array_split(row_R, -(-len(row_R) // size)) if len(row_R) else []
    width = round_up(size, devices)
    return [np.pad(part, (0, width - len(part)), constant_values=-1) for part in parts]


def on_host(x):
    """A device array as NumPy, also one whose parts lie on several hosts."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True) if jax.process_count() > 1 else x)


def by_host_0(make, shape):
    """make(), an array of this shape, of host 0, on all hosts: the others need no sandbox. Errors are on all, too."""
    if jax.process_count() == 1:
        return make()
    error, values = None, np.zeros(shape)
    if jax.process_index() == 0:
        try:
            values = make()
        except Exception as problem:  # whatever a user's reward raises; the other hosts would wait for ever
            error = problem
    if multihost_utils.broadcast_one_to_all(np.array(error is not None)):
        raise error or RuntimeError("host 0 could not run the programs; it says why")
    return np.asarray(multihost_utils.broadcast_one_to_all(values), np.float64)


def round_up(count, multiple):
    return -(-count // multiple) * multiple


class Trainer:
    """A Dream in training, its tasks and its rewards, {name: function as in sandbox.py}."""

    def __init__(self, cfg, rewards, mesh):
        self.cfg, self.rewards = cfg, rewards
        on_cpu = jax.default_backend() == "cpu"
        dtype = jnp.dtype(cfg.dtype or ("float32" if on_cpu else "bfloat16"))  # of the computation and a frozen base
        self.check_memory(mesh, dtype)
        model, _ = runs.load(md, cfg.ckpt, dtype=dtype if cfg.lora_rank else jnp.float32, mesh=mesh)
        self.model_cfg = model_cfg = model.cfg

        # Trained are all weights, or with LoRA adapters beside a base that stays as it is.
        self.base, self.trained = {}, nnx.to_pure_dict(nnx.state(model))
        del model  # or the weights could not be replaced by those that were learnt
        if cfg.lora_rank:
            key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 20)
            self.base, adapters = self.trained, md.new_adapters(key, self.trained, cfg.lora_rank, cfg.lora_targets)
            self.trained = jax.device_put(adapters, md.shardings(mesh, adapters))
        self.ref = jax.tree.map(jnp.copy, self.trained) if cfg.beta else {}  # the same of the reference model

        # The tasks, and what ends a text, first of all: a chat model ends its turn with <|im_end|>.
        tokenizer, wrap = sample_dream.load_tokenizer(cfg.ckpt, model_cfg), sample_dream.chat_template(cfg.ckpt)
        canvas = tokenizer, wrap, model_cfg, cfg.max_prompt, cfg.max_new
        self.prompts = rl_tasks.Prompts(cfg.prompts, *canvas)
        self.heldout = [rl_tasks.Prompts(path, *canvas) for path in (cfg.heldout, cfg.humaneval) if path]
        if not cfg.rounds:
            rounds = max(1, len(self.prompts.tasks) // cfg.tasks)
            self.cfg = cfg = dataclasses.replace(cfg, rounds=rounds)
        chat = "question" in self.prompts.tasks[0]
        ends = [tokenizer.token_to_id("<|im_end|>")] * chat + [model_cfg.eos_id, tokenizer.token_to_id("<|dlm_pad|>")]
        ends = tuple(dict.fromkeys(token for token in ends if token is not None))
        self.rule, self.fill = rule_of(cfg.sampling, tokenizer.get_vocab_size(), ends), sample_dream.fill
        if model_cfg.block_length:
            self.rule, self.fill = sample_block.settings_of(self.rule), sample_block.fill

        # The backward pass of a large model recomputes its layers.
        graph, self.writing_graph = graphs_of(cfg, model_cfg, dtype, on_cpu)
        rate = functools.partial(learning_rate, peak=cfg.lr, steps=cfg.rounds * cfg.iterations, warmup=cfg.warmup)
        optimizer = make_optimizer(rate, cfg.weight_decay, cfg.clip)
        layout = md.shardings(mesh, self.trained)
        opt_layout = md.shardings(mesh, jax.eval_shape(optimizer.init, self.trained))
        programs = make_programs(cfg, graph, optimizer, model_cfg.mask_id, layout, opt_layout, self.rule.vocab)
        self.scores, self.gradients, self.update = programs
        self.opt = jax.jit(optimizer.init, out_shardings=opt_layout)(self.trained)
        self.row_sharding = jax.NamedSharding(mesh, md.PS(md.BATCH))  # rows of a batch over the devices
        self.row_devices = mesh.size // cfg.tensor  # among which rows are shared out

        # Weights that are spread over all devices would meet anew in every pass of a rollout: a narrow copy does not.
        self.writing_mesh = mesh_of(jax.devices(), runs.inference_mesh(model_cfg, jax.devices(), 0).devices.shape)
        self.to_write = jax.jit(functools.partial(to_write, mesh=self.writing_mesh, dtype=dtype))

        self.updates, self.bad = 0, 0  # so far; the last of them without a finite gradient
        self.refresh, self.calm = 0, 0  # see next_refresh

    def check_memory(self, mesh, dtype):
        """ValueError, before any weight is read, if a device has less memory than it has to hold."""
        cfg, (path, meta, _) = self.cfg, runs.find_weights(runs.absolute(self.cfg.ckpt))
        model_cfg, optimizer = md.read_config(path, meta), make_optimizer(cfg.lr)

        def needed(lora_rank):  # what is trained, its moments and gradients, the reference model; with LoRA the base
            shapes = train_tpu.state_shapes(md, model_cfg, optimizer, mesh, lora_rank, dtype)
            return runs.bytes_on_a_device(shapes) + (1 + bool(cfg.beta)) * runs.bytes_on_a_device(shapes["params"])

        runs.check_memory(mesh, needed(cfg.lora_rank), {} if cfg.lora_rank else {"--lora_rank=16": needed(16)})

    def describe(self):
        """Print what is trained, on what."""
        if jax.process_index():
            return
        cfg, dropped = self.cfg, self.prompts.dropped
        count, frozen = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (self.trained, self.base))
        what = f"rank {cfg.lora_rank}: {count:,} of {count + frozen:,}" if frozen else f"{count:,}"
        print(f"{jax.device_count()} x {jax.devices()[0].device_kind}; training {what} parameters of {cfg.ckpt}")
        left_out = f"; {dropped} tasks of more than {cfg.max_prompt} tokens left out" * bool(dropped)
        rounds = f"{cfg.rounds:,} rounds of {cfg.tasks} x {cfg.group}"
        print(f"{len(self.prompts.tasks):,} tasks; {rounds}{left_out}", flush=True)
        for prompts in self.heldout:
            used, all_of = min(cfg.eval_tasks, len(prompts.tasks)), len(prompts.tasks) + prompts.dropped
            long = f", without {prompts.dropped} of over --max_prompt={cfg.max_prompt} tokens" * bool(prompts.dropped)
            print(f"evaluated on {used} of {all_of} tasks of {prompts.path}{long}", flush=True)

    def same_on_hosts(self, settings):
        """What is the same on all hosts: settings, tasks, architecture."""
        same = {name: value for name, value in settings.items() if name not in OF_A_HOST}
        tasks = [prompts.ids for prompts in (self.prompts, *self.heldout)]
        return same | {"model": dataclasses.asdict(self.model_cfg), "tasks": tasks}

    def arrays(self):
        """What a checkpoint holds."""
        return {"adapters" if self.base else "params": self.trained, "ref": self.ref, "opt": self.opt}

    def restore(self, checkpoints, train):
        """Go on from the newest checkpoint, and return its round; 0 without one. ValueError for other settings."""
        if checkpoints.newest() is None:
            return 0

        def described(model, train):  # what decides which arrays there are
            lora = {"--lora_rank": train["lora_rank"], "--lora_targets": list(train["lora_targets"])}
            return model | lora | {"--beta above 0": train["beta"] > 0}

        saved, model = checkpoints.meta(), dataclasses.asdict(self.model_cfg)
        runs.check_same(described(saved["model"], saved["train"]), described(model, train), checkpoints.folder)
        if saved["train"]["estimator"] != train["estimator"]:
            went = f"was trained with --estimator={saved['train']['estimator']}"
            raise ValueError(f"{checkpoints.folder} {went}; leave --estimator out, or start anew with another --out")
        arrays = checkpoints.restore(self.arrays())
        self.trained, self.ref, self.opt = (arrays[name] for name in self.arrays())
        self.updates, self.refresh, self.calm = (saved.get(name, 0) for name in ("updates", "refresh", "calm"))
        print(f"resuming {checkpoints.folder} after round {saved['round']}", flush=True)
        return saved["round"]

    def take(self, batch, iteration, row_R, **more):
        """These rows of a batch on the devices, with what belongs to an iteration; row -1 counts for nothing."""
        arrays = {"token_BL": batch.token_BL, "see_BL": batch.see_BL, "counted_BC": batch.counted_BC} | iteration | more
        arrays = {name: x[row_R] for name, x in arrays.items()}
        arrays["counted_BC"] &= (row_R >= 0)[:, None]
        return jax.device_put(arrays, self.row_sharding)

    def policy(self):
        """The model as it is, to write with: on several devices a copy, which lies there as generate.py has it."""
        params = md.assemble(self.base, self.trained)
        return nnx.merge(self.writing_graph, self.to_write(params) if self.writing_mesh.size > 1 else params)

    def rollout(self, prompts, task_B, key):
        """Completions of the tasks with these numbers, by the policy as it is: a Batch."""
        policy, key = self.policy(), np.asarray(jax.random.key_data(key))  # which is on no device
        canvas_BL, see_BL = prompts.canvas(task_B)
        size, filled, passes, records = self.cfg.generation_batch, [], [], []
        rule = dataclasses.replace(self.rule, refresh=self.refresh) if self.refresh else self.rule
        # or no device would have a share, and each would do all the work
        rows = round_up(size, self.writing_mesh.shape["data"])
        for i in range(0, len(task_B), size):
            # All batches have one shape, for one compiled program: some rows may be there twice.
            inputs = [np.resize(x[i : i + size], (rows, x.shape[1])) for x in (canvas_BL, see_BL)]
            with jax.set_mesh(self.writing_mesh):
                own = jax.random.fold_in(jax.random.wrap_key_data(key), i)
                token_BL, stats = self.fill(policy, *inputs, rule, own)
            real = min(size, len(task_B) - i)
            filled.append(token_BL[:real])
            records.append([x[:real] for x in stats["record"]])
            passes.append(sum(stats["windows"]) / canvas_BL.shape[1])
        token_BL = np.concatenate(filled)
        counted_BC = completion_mask(token_BL[:, -self.cfg.max_new :], self.rule.eos_ids[0])
        record = sample_dream.Record(*map(np.concatenate, zip(*records, strict=True)))
        rows = prompts.completions(task_B, token_BL, counted_BC)
        return Batch(token_BL, see_BL, counted_BC, rows, np.mean(passes), record)

    def refill(self, batch, rng, key):
        """(batch, reward_BF, groups written anew): those of equal rewards make room for other tasks', --refill times at
        most. Ref: dynamic sampling, DAPO, arXiv:2503.14476.
        """
        cfg, anew, reward_BF = self.cfg, 0, self.rewarded(batch.rows)
        for attempt in range(cfg.refill):
            advantages = group_advantages(reward_BF, cfg.reward_weights, cfg.group, cfg.scale_rewards)
            row_R = np.flatnonzero(advantages.constant_B)
            if not len(row_R):
                break
            others = np.resize(rng.permutation(len(self.prompts.tasks)), len(row_R) // cfg.group)
            new = self.rollout(self.prompts, np.repeat(others, cfg.group), jax.random.fold_in(key, (1 << 20) + attempt))
            batch, reward_BF = batch.replaced(row_R, new), reward_BF.copy()
            reward_BF[row_R] = self.rewarded(new.rows)
            anew += len(others)
        return batch, reward_BF, anew

    def rewarded(self, rows):
        """reward_BF of completions, found on host 0, see reward."""
        return by_host_0(lambda: self.reward(rows), (len(rows), len(self.rewards)))

    def reward(self, rows):
        """reward_BF of completions: a column per reward function, nan where it has none. Equal ones are run once.

        Leaves the tests' verdicts in the rows, where a function gives them. RuntimeError names a function that fails.
        """
        columns, numbers = [], {}  # of the different completions, in order of appearance
        kind_B = [numbers.setdefault((row["text"], id(row["test_cases"]), row["tokens"]), len(numbers)) for row in rows]
        first = [rows[kind_B.index(kind)] for kind in range(len(numbers))]  # of each kind
        texts = [row["text"] for row in first]
        options = dataclasses.asdict(self.cfg.sandbox) | {"max_tokens": self.cfg.max_new}
        for name, function in self.rewards.items():
            try:
                values = [math.nan if x is None else float(x) for x in function(texts, first, **options)]
                if len(values) != len(first):
                    raise ValueError(f"it gave {len(values)} values for {len(first)} completions")
            except Exception as error:  # whatever a user's function raises
                what = f"raised {type(error).__name__}: {error}; mend it, then --resume={self.cfg.out}"
                raise RuntimeError(f"the reward {name} {what}") from error
            columns.append(values)
        for row, kind in zip(rows, kind_B, strict=True):
            row["verdicts"] = first[kind].get("verdicts", [])
        return np.array(columns).T[kind_B]

    def scores_by(self, trained, batch, views):
        """Scores of all completions by a model, on the canvases of an iteration: [B, C]."""
        score_BC = np.zeros(batch.counted_BC.shape, np.float32)
        for row_R in micro_batches(np.arange(len(score_BC)), self.cfg.micro_batch, self.row_devices):
            real_R = row_R >= 0
            for part in in_parts(views):
                inputs = self.take(batch, part, row_R)
                score_BC[row_R[real_R]] += on_host(self.scores(trained, self.base, inputs))[real_R]
        return score_BC

    def replay(self, batch, rng):
        """Steps of a rollout once more, by the model as it is but without a cache: a Replay."""
        record, C = batch.record, self.cfg.max_new
        step_BC, token_BC, logp_BC = (x_BL[:, -C:] for x_BL in record)
        at_BJ, scale_B = steps_to_replay(step_BC, self.cfg.replay, rng)
        drawn_BC = token_BC != self.model_cfg.mask_id
        views = {"token_BL": record.token_BL, "counted_BC": drawn_BC}
        views |= {"step_BC": step_BC, "at_BJ": at_BJ, "scale_B": scale_B}
        old_BC = self.scores_by(self.trained, batch, views)
        seen_BC = drawn_BC & (step_BC[:, None] == at_BJ[..., None]).any(1)
        return Replay(views | {"old_BC": old_BC}, old_BC - logp_BC, seen_BC)

    def score(self, batch, masks, replay):
        """What each iteration learns from: the masks, or without any the replay, and the scores of policy and reference
        model under them, "old_BC" and "ref_BC"; with --importance the tokens' weights.
        """
        cfg, weights = self.cfg, {}
        if cfg.importance:
            weight_BC = importance_weights(replay.log_BC, replay.seen_BC, cfg.importance, cfg.importance_max)
            weights = {"weight_BC": weight_BC.astype(np.float32)}
        if not masks:
            ref = {"ref_BC": self.scores_by(self.ref, batch, replay.views)} if cfg.beta else {}
            return [replay.views | ref | weights] * cfg.iterations
        known = []
        for i, mask in enumerate(jax.device_get(masks)):
            old_BC, ref_BC = np.zeros((2, *batch.counted_BC.shape), np.float32)
            if i:  # before the first update the new score is the old one, see micro_loss
                old_BC = self.scores_by(self.trained, batch, mask)
            if cfg.beta:
                ref_BC = self.scores_by(self.ref, batch, mask)
            known.append(mask | {"old_BC": old_BC, "ref_BC": ref_BC} | weights)
        return known

    def learn(self, batch, iterations, advantages):
        """The updates of a round: (metrics of each part of each micro-batch, gradient norm of each update)."""
        cfg, measured, norms = self.cfg, [], []
        advantage_B = advantages.advantage_B.astype(np.float32)
        # A completion whose reward is not known has no gradient, a group of equal rewards that of its KL divergence.
        left_out_B = ~advantages.counted_B | (advantages.constant_B & cfg.skip_constant)
        if cfg.mask_truncated:
            left_out_B |= (batch.token_BL[:, -cfg.max_new :] != self.rule.eos_ids[0]).all(1)
        batches = micro_batches(np.flatnonzero(~left_out_B), cfg.micro_batch, self.row_devices)
        # of a micro-batch on average: the update is the mean of their gradients
        counted_BC = iterations[0].get("counted_BC", batch.counted_BC) if batches else batch.counted_BC
        tokens = jnp.float32(counted_BC[~left_out_B].sum() / max(1, len(batches)))
        for j, i, complete in round_plan(len(batches), cfg.iterations):
            whole = {"first": jnp.asarray(i == 0), "update_tokens": tokens}
            if j == 0:  # the first micro-batch of an update
                total = jax.tree.map(jnp.zeros_like, self.trained)
            measured.append([])
            for part in in_parts(iterations[i]):
                inputs = self.take(batch, part, batches[j], advantage_B=advantage_B)
                total, metrics = self.gradients(self.trained, self.base, total, inputs | whole)
                measured[-1].append(metrics)
            if not complete:
                continue
            self.trained, self.opt, norm = self.update(self.trained, self.opt, total, len(batches))
            total = None  # its memory is free before the next update begins
            norms.append(float(norm))
            self.updates += 1
            self.bad = 0 if math.isfinite(norms[-1]) else self.bad + 1
            if self.bad >= 5:
                raise RuntimeError(f"no finite gradient in five updates; lower --lr, then --resume={cfg.out}")
            if cfg.beta and cfg.sync_every and self.updates % cfg.sync_every == 0:
                self.ref = sync_reference(self.ref, self.trained, 1.0 if cfg.lora_rank else cfg.mixup)
        return measured, norms

    def evaluate(self):
        """Mean reward of the first function on held-out tasks, and the share that has all of it; of each "split"."""
        cfg, rows, reward_B = self.cfg, [], []
        key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 21)  # the same at each evaluation
        for prompts in self.heldout:
            task_B = np.repeat(np.arange(min(cfg.eval_tasks, len(prompts.tasks))), cfg.eval_samples)
            written = self.rollout(prompts, task_B, key).rows
            rows += written
            reward_B = np.append(reward_B, self.rewarded(written)[:, 0])
        figures, split_B = {}, np.array([row.get("split", "heldout") for row in rows])
        for split in dict.fromkeys(split_B.tolist()):
            mine_B = reward_B[split_B == split]
            figures |= {f"{split}_reward": float(np.nanmean(mine_B)), f"{split}_pass": float(np.mean(mine_B == 1))}
        return figures


# ---- what is written down ------------------------------------------------------------------------------------------


def rollout_figures(batch, group, mask_id):
    """What tells that a policy collapses: "duplicates", the share of completions that repeat one of their group;
    "answer_entropy", the mean of -log p of the tokens as they were drawn; "tokens_per_step".
    """
    B, C = batch.counted_BC.shape
    step_BC, drawn_BC, logp_BC = (x_BL[:, -C:] for x_BL in batch.record)
    written = [ids[counted].tobytes() for ids, counted in zip(batch.token_BL[:, -C:], batch.counted_BC, strict=True)]
    different = sum(len(set(written[i : i + group])) for i in range(0, B, group))
    tokens, steps = (drawn_BC != mask_id).sum(), sum(len(set(step_C)) for step_C in step_BC.tolist())
    return {
        "duplicates": 1 - different / B,
        "answer_entropy": float(-logp_BC.sum() / tokens),
        "tokens_per_step": float(tokens / steps),
    }


def summary(trainer, batch, replay, reward_BF, advantages, measured, norms):
    """What a round's rewards, completions and micro-batches say, as numbers for the log."""
    counted_B = advantages.counted_B
    row = {"reward": float(advantages.reward_B[counted_B].mean()) if counted_B.any() else math.nan}
    for name, reward_B in zip(trainer.rewards, reward_BF.T, strict=True):
        known_B = reward_B[~np.isnan(reward_B)]
        row |= {f"{name}_{f.__name__}": float(f(known_B)) for f in (np.mean, np.std) if len(known_B)}
    row |= {"constant_groups": float(advantages.constant_B.mean()), "no_reward": int((~counted_B).sum())}
    row["timeouts"] = sum(task.get("verdicts", []).count("timeout") for task in batch.rows)

    # over the micro-batches: the mean, but the largest ratio and the sum of the tokens; over their parts: the sum
    combine = {"ratio_max": (max, max), "tokens": (sum, sum)}
    for name in measured[0][0] if measured else ():
        of_parts, of_batches = combine.get(name, (sum, np.mean))
        row[name] = float(of_batches([of_parts([float(metrics[name]) for metrics in parts]) for parts in measured]))
    ended_BC = batch.token_BL[:, -trainer.cfg.max_new :] == trainer.rule.eos_ids[0]
    row |= {"ended": float(ended_BC.any(-1).mean()), "length": float(batch.counted_BC.sum(-1).mean())}
    row |= rollout_figures(batch, trainer.cfg.group, trainer.model_cfg.mask_id) | drift(replay.log_BC, replay.seen_BC)
    row |= {"refresh": trainer.refresh} if trainer.cfg.drift_bound else {}
    return row | {"passes": float(batch.passes)} | ({"grad_norm": max(norms)} if norms else {})


def completion_rows(done, cfg, batch, reward_BF, advantages):
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


def main(cfg, draw=draw_masks):
    """Train, or go on training. draw replaces draw_masks, for a comparison with other masks."""
    if cfg.hosts and (cfg.lora_rank or not cfg.ckpt):
        raise ValueError("--hosts goes with --ckpt and --prompts, and without --lora_rank, which one host can train")
    runs.join_hosts(cfg.hosts)
    cfg, started, hosts = resolve(cfg), time.perf_counter(), {"rank": jax.process_index(), "hosts": jax.process_count()}
    with runs.Run(cfg, unit="round", curves=("reward", "heldout_reward"), **hosts) as run:
        settings = dataclasses.asdict(cfg)  # the demo's model and tasks are no settings: it finds them again
        rewards = {name: sandbox.find_reward(name) for name in cfg.rewards}

        by_host_0(lambda: check_sandbox(cfg), ())  # before the model is read
        if not cfg.ckpt:
            if not cfg.resume:  # so that --resume finds a run that was stopped before its first round
                runs.write(run.out / "config.json", {"train": {"model": "dream"} | settings})
            cfg = make_demo(cfg)
        runs.keep_compiled(cfg.compile_cache)

        # All devices: --tensor of them share each layer, the others share rows and weights.
        mesh = mesh_of(jax.devices(), (1, jax.device_count() // cfg.tensor, cfg.tensor))
        trainer = Trainer(cfg, rewards, mesh)
        runs.check_hosts(run.out, trainer.same_on_hosts(settings))
        trainer.describe()

        checkpoints = runs.Checkpoints(run.out, cfg.keep)
        meta = {"model": dataclasses.asdict(trainer.model_cfg), "train": {"model": "dream"} | settings}
        # The name by which generate.py knows a chat model, the tokenizer and the chat template.
        meta["source"] = source = runs.read_json(runs.as_path(cfg.ckpt) / "config.json").get("source", "")
        files = runs.companions(cfg.ckpt)
        first = trainer.restore(checkpoints, settings) if cfg.resume else 0
        run.begin(first or -1, meta, files, ("log.jsonl", "rounds.jsonl"))  # -1: cut round 0, an evaluation, too
        with jax.set_mesh(mesh):
            train(run, checkpoints, meta, trainer, first, draw)
        checkpoints.close()
        folder = run.out
        if cfg.lora_rank:
            folder = md.save_merged(run.out, trainer.writing_graph, trainer.base, trainer.trained, files, source)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} min; python generate.py --model=dream --ckpt={folder}")


def check_sandbox(cfg):
    """RuntimeError if a right program fails, or a wrong one passes; else 1."""
    tests = [["assert f() == 1"], ["assert f() == 2"]]
    results = sandbox.run_tests(["def f():\n    return 1"] * 2, tests, **dataclasses.asdict(cfg.sandbox))
    if [result.rate for result in results] != [1, 0]:
        why = results[0].error or results[1].error or "a right program fails, or a wrong one passes"
        raise RuntimeError(f"the sandbox cannot be used: {why}")
    return 1


def train(run, checkpoints, meta, trainer, first, draw):
    """The rounds after `first`."""
    cfg, count, pool = trainer.cfg, len(trainer.prompts.tasks), concurrent.futures.ThreadPoolExecutor(1)
    share = {"task": cfg.group, "completion": 1, "round": cfg.tasks * cfg.group}[cfg.ratio_per]
    if trainer.heldout and not first:
        run.log({"round": 0} | trainer.evaluate())
    for r in range(first, cfg.rounds):
        done, key = r + 1, jax.random.fold_in(jax.random.key(cfg.seed), r)
        clock = [time.perf_counter()]

        # A group of completions of each task. Every task comes once an epoch, in an order that is the epoch's own.
        slots = range(r * cfg.tasks, done * cfg.tasks)
        chosen = [np.random.default_rng([cfg.seed, slot // count]).permutation(count)[slot % count] for slot in slots]
        batch, anew = trainer.rollout(trainer.prompts, np.repeat(chosen, cfg.group), key), 0
        if cfg.refill:
            batch, reward_BF, anew = trainer.refill(batch, np.random.default_rng([cfg.seed, r, 2]), key)
        clock.append(time.perf_counter())

        # Their programs run in the sandbox, on the CPU, while the devices score them. Scores are taken under the same
        # masks as the updates, so that new and old ones differ by what was learnt and nothing else.
        if not (cfg.refill or run.rank):
            rewarding = pool.submit(trainer.reward, batch.rows)
        replay = trainer.replay(batch, np.random.default_rng([cfg.seed, r, 1]))
        drawn = len(batch.rows), cfg.max_new, share, cfg.estimator == "coupled_elbo"
        masked = cfg.iterations if cfg.estimator != "trajectory" else 0
        iterations = trainer.score(batch, [draw(key, 1, i, *drawn) for i in range(masked)], replay)
        clock.append(time.perf_counter())
        if not cfg.refill:
            reward_BF = by_host_0(lambda: rewarding.result(), (len(batch.rows), len(trainer.rewards)))  # noqa: B023
        clock.append(time.perf_counter())

        # A completion that does better than the others of its task becomes likelier, one that does worse less likely.
        advantages = group_advantages(reward_BF, cfg.reward_weights, cfg.group, cfg.scale_rewards)
        measured, norms = trainer.learn(batch, iterations, advantages)
        clock.append(time.perf_counter())

        # log.jsonl has a row a round, rounds.jsonl a row a completion.
        row = {"round": done} | summary(trainer, batch, replay, reward_BF, advantages, measured, norms)
        if cfg.drift_bound:
            now = trainer.refresh, trainer.calm, cfg.sampling.block_length
            trainer.refresh, trainer.calm = next_refresh(*now, row["drift_k3"], cfg.drift_bound)
        row |= {"refilled": anew} if cfg.refill else {}
        if trainer.heldout and (done % cfg.eval_every == 0 or done == cfg.rounds):
            row |= trainer.evaluate()
        if not run.rank:
            completions = completion_rows(done, cfg, batch, reward_BF, advantages)
            run.append("rounds.jsonl", completions)
            if cfg.show:
                show_round(completions)
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        run.log(row | dict(zip(phases, np.diff(clock).tolist(), strict=True)))

        # Saving goes on in the background. A signal, to any host, asks for one more checkpoint, of a whole round.
        stops = run.signal or checkpoints.preempted(done)
        if done % cfg.save_every == 0 or done == cfg.rounds or stops:
            counters = {"round": done, "updates": trainer.updates, "refresh": trainer.refresh, "calm": trainer.calm}
            checkpoints.save(done, trainer.arrays(), meta | counters)
        if stops:
            checkpoints.close()
            if run.hosts > 1:
                jax.distributed.shutdown()  # waits for the other hosts, until all have saved
            run.leave(done)


def resolve(cfg):
    """The config with the preset's values where it says None. ValueError or FileNotFoundError for what cannot be."""
    preset = PRESETS[cfg.preset] | ({"lr": 2e-5} if cfg.preset == "7b" and cfg.lora_rank else {})
    blocks = blocks_of(cfg.ckpt)
    own = {"block_length": blocks, "cache": ""} if blocks else {}
    sampling = unset_from(cfg.sampling, dataclasses.asdict(preset["sampling"]) | own)
    rows = batch_sizes(unset_from(cfg, preset), max(1, jax.device_count() // cfg.tensor))
    cfg = dataclasses.replace(unset_from(cfg, preset | rows), sampling=sampling)
    counts = ("tasks", "iterations", "micro_batch", "generation_batch", "eval_every", "save_every")
    wrong = [f"--{name}={getattr(cfg, name)}: at least 1" for name in counts if getattr(cfg, name) < 1]
    if cfg.refill < 0:
        wrong.append(f"--refill={cfg.refill}: at least 0, which keeps groups of equal rewards")
    if cfg.rounds < 0:
        wrong.append(f"--rounds={cfg.rounds}: at least 0, which is every task once")
    if jax.device_count() % cfg.tensor:
        wrong.append(f"--tensor={cfg.tensor} does not divide {jax.device_count()} devices")
    if cfg.group < 2:
        wrong.append(f"--group={cfg.group}: a completion is compared with the others of its task; at least 2")
    if cfg.delta and cfg.delta <= 1 + cfg.epsilon_high:
        wrong.append(f"--delta={cfg.delta}: above 1 + --epsilon_high, which is {1 + cfg.epsilon_high}, or 0 for none")
    if not cfg.sampling.temperature:
        wrong.append("--temperature=0 writes the same completion again and again; nothing could be compared")
    if len(cfg.rewards) != len(cfg.reward_weights):
        wrong.append(f"{len(cfg.rewards)} --rewards need as many --reward_weights, not {len(cfg.reward_weights)}")
    twice = sorted({name for name in cfg.rewards if cfg.rewards.count(name) > 1})
    if twice:
        wrong.append(f"--rewards names {', '.join(twice)} more than once; give it once, with a larger --reward_weights")
    if bool(cfg.ckpt) != bool(cfg.prompts) or (cfg.preset == "7b" and not cfg.ckpt):
        wrong.append("--ckpt and --prompts belong together; without both --preset=demo makes its own")
    wrong += wrong_estimator(cfg, blocks)
    if cfg.resume and Path(cfg.resume).resolve() != Path(cfg.out).resolve():
        wrong.append(f"--resume={cfg.resume} goes on in its own folder; leave --out={cfg.out} out")
    if wrong:
        raise ValueError("; ".join(wrong))

    # A folder of rl_tasks.py holds the files; --heldout=0 leaves the second empty.
    if cfg.prompts and Path(cfg.prompts).is_dir():
        train, *others = (Path(cfg.prompts) / f"{split}.jsonl" for split in ("train", "heldout", "humaneval"))
        there = [str(path) if path.is_file() and path.stat().st_size else "" for path in others]
        cfg = dataclasses.replace(
            cfg, prompts=str(train), heldout=cfg.heldout or there[0], humaneval=cfg.humaneval or there[1]
        )
    for path in filter(None, (cfg.prompts, cfg.heldout, cfg.humaneval)):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist; write tasks with: python rl_tasks.py --out=data/acecode")
    return cfg


def blocks_of(folder):
    """How many tokens the blocks of a checkpoint's model have; 0: it has none, or is not there."""
    is_there = folder and (runs.as_path(folder) / "config.json").is_file()
    return md.read_config(folder).block_length if is_there else 0


def wrong_estimator(cfg, blocks):
    """What does not fit together of estimator, replay, sampling and the model's blocks."""
    sampling, trajectory = cfg.sampling, cfg.estimator == "trajectory"
    by_draw = sampling.score == "drawn" and sampling.threshold
    cached = sampling.cache and sampling.block_length and sampling.threshold
    if not 0 <= cfg.replay <= cfg.max_new:
        yield f"--replay={cfg.replay}: a completion of {cfg.max_new} tokens has no more steps; 0 replays all"
    if cfg.estimator == "coupled_elbo" and cfg.max_new < 2:
        yield "--estimator=coupled_elbo masks one token and another: --max_new is at least 2"
    if trajectory and by_draw:
        yield "--estimator=trajectory replays what --score=distribution chose; with drawn a step has more to it"
    if trajectory and cfg.ratio == "sequence":
        yield "--estimator=trajectory scores a completion in parts, --ratio=sequence needs it whole; take token"
    if cfg.importance.startswith("token") and not trajectory:
        yield f"--importance={cfg.importance} weighs tokens as they were drawn: it needs --estimator=trajectory"
    if cfg.importance.startswith("sequence") and cfg.replay:
        yield f"--importance={cfg.importance} needs every step of a completion: --replay=0"
    if blocks and (sampling.cache or sampling.block_length != blocks or cfg.drift_bound):
        flags = "leave --cache, --block_length and --drift_bound out"
        yield f"{cfg.ckpt} was trained in blocks of {blocks}, and its cache is exact: {flags}"
    elif cfg.drift_bound and not cached:
        yield f"--drift_bound={cfg.drift_bound} opens a cache more often: it needs --cache, --block_length, --threshold"


def batch_sizes(cfg, devices):
    """Those of the preset, {"micro_batch", "generation_batch"}: they grow with the devices among which rows are shared
    out, up to a whole round.
    """
    names = "micro_batch", "generation_batch"
    return {name: min(PRESETS[cfg.preset][name] * devices, cfg.tasks * cfg.group) for name in names}


def unset_from(cfg, values):
    """A dataclass whose fields are set from `values` where they are None."""
    return dataclasses.replace(cfg, **{name: value for name, value in values.items() if getattr(cfg, name) is None})


def make_demo(cfg):
    """The config with tasks and a base model of its own, trained on answers of which three in ten are right."""
    base = Path(cfg.out) / "base"
    if not (base / "done").exists():
        print("no --ckpt: training a small Dream on tasks of its own, with three in ten answers right", flush=True)
        rows, run = str(base / "rows"), str(base / "run")
        resume = run if cfg.resume and runs.checkpoints(base / "run") else ""
        if not resume:
            shutil.rmtree(base, ignore_errors=True)
            rl_tasks.write_demo(base, cfg.seed)
            pairs = {"source": str(base / "pairs.jsonl"), "out": rows, "seed": cfg.seed}
            data_prep.main(data_prep.Pairs(**pairs, seq_len=128, eos_to=16, vocab_size=512))
        try:
            train_tpu.main(
                train_tpu.Config(
                    model="dream_tiny", data=rows, out=run, resume=resume, seq_len=128, batch_size=16,
                    micro_batch=max(1, 16 // jax.device_count()), remat="none", steps=cfg.demo_steps,
                    eval_every=cfg.demo_steps, log_every=100, seed=cfg.seed,
                    prompt=rl_tasks.read_tasks(base / "heldout.jsonl")[0]["prompt"],
                )
            )  # fmt: skip
        except InterruptedError as error:  # it names its own folder
            raise InterruptedError(f"{str(error).partition(';')[0]} of pre-training; --resume={cfg.out}") from None
        (base / "done").touch()
    prompts, heldout = (str(base / f"{split}.jsonl") for split in ("train", "heldout"))
    return dataclasses.replace(cfg, ckpt=str(base / "run"), prompts=prompts, heldout=heldout)


if __name__ == "__main__":
    runs.command(main, Config, __doc__, ("hosts",))
