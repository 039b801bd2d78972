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

The mathematics is in grpo.py. Letters: B sequences, N completions of a prompt, L columns of a canvas, C of them its
completion, J steps that are replayed, K versions of a canvas, R rows of a micro-batch, F reward functions.
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

import checkpoints
import grpo
import model_dream as md
import rl_tasks
import runs
import sample_block
import sample_dream
import sandbox

# Settings that may differ between hosts: where things are, and the sandbox, which host 0 alone needs.
OF_A_HOST = ("sandbox", "hosts", "ckpt", "prompts", "heldout", "humaneval", "out", "resume", "wandb", "compile_cache")


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
        "max_prompt": 24, "max_new": 16, "lr": 3e-4, "weight_decay": 0.0, "clip": 1.0, "rewards": ("code",),
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


# ---- the model and its programs ------------------------------------------------------------------------------------


def graphs_of(cfg, model_cfg, dtype, on_cpu=False, platform=""):
    """The model without its parameters, twice: as it is trained, and as it writes, which recomputes nothing."""
    run = md.Run(dtype, 64 if on_cpu else 256, remat=cfg.remat or ("none" if on_cpu else "full"), platform=platform)
    return md.graph_of(model_cfg, run), md.graph_of(model_cfg, dataclasses.replace(run, remat="none"))


def mesh_of(devices, shape):
    """The devices in their order as a mesh (data, fsdp, tensor)."""
    return jax.sharding.Mesh(np.reshape(devices, shape), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def writing_mesh(model_cfg, devices):
    """All devices as generate.py shares them: up to as many as key/value heads share each layer, the others texts."""
    return mesh_of(devices, checkpoints.inference_mesh(model_cfg, devices, 0).devices.shape)


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


def make_programs(cfg, graph, optimizer, mask_id, layout=None, opt_layout=None, vocab=0, scores_of=grpo.scores_of):
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
            return grpo.micro_loss(policy(trained, base), batch, mask_id, *limits, *scoring, scores_of, **form)

        return grpo.add_gradients(loss, trained, batch, total)

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

    views: dict  # arrays for grpo.trajectory_scores, with the scores of policy and reference model
    log_BC: np.ndarray  # log(learner's p / sampler's p)
    seen_BC: np.ndarray  # of these tokens: drawn in a step that was replayed


def micro_batches(row_R, size, devices=1):
    """The rows in as few batches of `size` as hold them, of even lengths; -1 fills each up, for equal shares."""
    parts = np.array_split(row_R, -(-len(row_R) // size)) if len(row_R) else []
    width = grpo.round_up(size, devices)
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


class Trainer:
    """A Dream in training, its tasks and its rewards, {name: function as in sandbox.py}."""

    def __init__(self, cfg, rewards, mesh, scores_of=grpo.scores_of):
        self.cfg, self.rewards = cfg, rewards
        on_cpu = jax.default_backend() == "cpu"
        dtype = jnp.dtype(cfg.dtype or ("float32" if on_cpu else "bfloat16"))  # of the computation and a frozen base
        self.check_memory(mesh, dtype)
        model, _ = checkpoints.load(md, cfg.ckpt, dtype=dtype if cfg.lora_rank else jnp.float32, mesh=mesh)
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
        tokenizer, wrap = runs.load_tokenizer(cfg.ckpt, model_cfg), runs.chat_template(cfg.ckpt)
        canvas = tokenizer, wrap, model_cfg, cfg.max_prompt, cfg.max_new, runs_tests(rewards)
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
        rate = functools.partial(grpo.learning_rate, peak=cfg.lr, steps=cfg.rounds * cfg.iterations, warmup=cfg.warmup)
        optimizer = grpo.make_optimizer(rate, cfg.weight_decay, cfg.clip)
        layout = md.shardings(mesh, self.trained)
        opt_layout = md.shardings(mesh, jax.eval_shape(optimizer.init, self.trained))
        layouts = layout, opt_layout
        programs = make_programs(cfg, graph, optimizer, model_cfg.mask_id, *layouts, self.rule.vocab, scores_of)
        self.scores, self.gradients, self.update = programs
        self.opt = jax.jit(optimizer.init, out_shardings=opt_layout)(self.trained)
        self.row_sharding = jax.NamedSharding(mesh, md.PS(md.BATCH))  # rows of a batch over the devices
        self.row_devices = mesh.size // cfg.tensor  # among which rows are shared out

        # Weights that are spread over all devices would meet anew in every pass of a rollout: a narrow copy does not.
        self.writing_mesh = writing_mesh(model_cfg, jax.devices())
        self.to_write = jax.jit(functools.partial(to_write, mesh=self.writing_mesh, dtype=dtype))

        self.updates, self.bad = 0, 0  # so far; the last of them without a finite gradient
        self.refresh, self.calm = 0, 0  # see grpo.next_refresh

    def check_memory(self, mesh, dtype):
        """ValueError, before any weight is read, if a device has less memory than it has to hold."""
        cfg, (path, meta, _) = self.cfg, checkpoints.find_weights(checkpoints.absolute(self.cfg.ckpt))
        model_cfg, optimizer = md.read_config(path, meta), grpo.make_optimizer(cfg.lr)

        copy, writing, shapes = 0, writing_mesh(model_cfg, jax.devices()), md.param_shapes(model_cfg)
        if writing.size > 1:  # what rollouts are written with, while there are no gradients
            put = lambda s, at: jax.ShapeDtypeStruct(s.shape, dtype, sharding=at)  # noqa: E731
            copy = checkpoints.bytes_on_a_device(jax.tree.map(put, shapes, md.shardings(writing, shapes)))

        def needed(lora_rank):  # what is trained, its moments and gradients, the reference model; with LoRA the base
            shapes = checkpoints.state_shapes(md, model_cfg, optimizer, mesh, lora_rank, dtype)
            state, trained = checkpoints.bytes_on_a_device(shapes), checkpoints.bytes_on_a_device(shapes["params"])
            return state + bool(cfg.beta) * trained + max(trained, copy)

        checkpoints.check_memory(mesh, needed(cfg.lora_rank), {} if cfg.lora_rank else {"--lora_rank=16": needed(16)})

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

    def restore(self, store, train):
        """Go on from the newest checkpoint, and return its round; 0 without one. ValueError for other settings."""
        if store.newest() is None:
            return 0

        def described(model, train):  # what decides which arrays there are
            lora = {"--lora_rank": train["lora_rank"], "--lora_targets": list(train["lora_targets"])}
            return model | lora | {"--beta above 0": train["beta"] > 0}

        saved, model = store.meta(), dataclasses.asdict(self.model_cfg)
        runs.check_same(described(saved["model"], saved["train"]), described(model, train), store.folder)
        if saved["train"]["estimator"] != train["estimator"]:
            went = f"was trained with --estimator={saved['train']['estimator']}"
            raise ValueError(f"{store.folder} {went}; leave --estimator out, or start anew with another --out")
        arrays = store.restore(self.arrays())
        self.trained, self.ref, self.opt = (arrays[name] for name in self.arrays())
        self.updates, self.refresh, self.calm = (saved.get(name, 0) for name in ("updates", "refresh", "calm"))
        print(f"resuming {store.folder} after round {saved['round']}", flush=True)
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
        rows = grpo.round_up(size, self.writing_mesh.shape["data"])
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
        counted_BC = grpo.completion_mask(token_BL[:, -self.cfg.max_new :], self.rule.eos_ids[0])
        record = sample_dream.Record(*map(np.concatenate, zip(*records, strict=True)))
        rows = prompts.completions(task_B, token_BL, counted_BC)
        return Batch(token_BL, see_BL, counted_BC, rows, np.mean(passes), record)

    def refill(self, batch, rng, key):
        """(batch, reward_BF, groups written anew): those of equal rewards make room for other tasks', --refill times at
        most. Ref: dynamic sampling, DAPO, arXiv:2503.14476.
        """
        cfg, anew, reward_BF = self.cfg, 0, self.rewarded(batch.rows)
        for attempt in range(cfg.refill):
            advantages = grpo.group_advantages(reward_BF, cfg.reward_weights, cfg.group, cfg.scale_rewards)
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
            for part in grpo.in_parts(views):
                inputs = self.take(batch, part, row_R)
                score_BC[row_R[real_R]] += on_host(self.scores(trained, self.base, inputs))[real_R]
        return score_BC

    def replay(self, batch, rng):
        """Steps of a rollout once more, by the model as it is but without a cache: a Replay."""
        record, C = batch.record, self.cfg.max_new
        step_BC, token_BC, logp_BC = (x_BL[:, -C:] for x_BL in record)
        at_BJ, scale_B = grpo.steps_to_replay(step_BC, self.cfg.replay, rng)
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
            weight_BC = grpo.importance_weights(replay.log_BC, replay.seen_BC, cfg.importance, cfg.importance_max)
            weights = {"weight_BC": weight_BC.astype(np.float32)}
        if not masks:
            ref = {"ref_BC": self.scores_by(self.ref, batch, replay.views)} if cfg.beta else {}
            return [replay.views | ref | weights] * cfg.iterations
        known = []
        for i, mask in enumerate(jax.device_get(masks)):
            old_BC, ref_BC = np.zeros((2, *batch.counted_BC.shape), np.float32)
            if i:  # before the first update the new score is the old one, see grpo.micro_loss
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
        for j, i, complete in grpo.round_plan(len(batches), cfg.iterations):
            whole = {"first": jnp.asarray(i == 0), "update_tokens": tokens}
            if j == 0:  # the first micro-batch of an update
                total = jax.tree.map(jnp.zeros_like, self.trained)
            measured.append([])
            for part in grpo.in_parts(iterations[i]):
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
                self.ref = grpo.sync_reference(self.ref, self.trained, 1.0 if cfg.lora_rank else cfg.mixup)
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
    row |= rollout_figures(batch, trainer.cfg.group, trainer.model_cfg.mask_id) | grpo.drift(
        replay.log_BC, replay.seen_BC
    )
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


def main(cfg, draw=grpo.draw_masks, scores_of=grpo.scores_of):
    """Train, or go on training. draw and scores_of replace those of grpo.py, for a comparison of estimators."""
    if cfg.hosts and (cfg.lora_rank or not cfg.ckpt):
        raise ValueError("--hosts goes with --ckpt and --prompts, and without --lora_rank, which one host can train")
    checkpoints.join_hosts(cfg.hosts)
    cfg, started, hosts = resolve(cfg), time.perf_counter(), {"rank": jax.process_index(), "hosts": jax.process_count()}
    with runs.Run(cfg, unit="round", curves=("reward", "heldout_reward"), **hosts) as run:
        settings = dataclasses.asdict(cfg)  # the demo's model and tasks are no settings: it finds them again
        rewards = {name: sandbox.find_reward(name) for name in cfg.rewards}

        if runs_tests(rewards):
            by_host_0(lambda: check_sandbox(cfg), ())  # before the model is read
        if not cfg.ckpt:
            if not cfg.resume:  # so that --resume finds a run that was stopped before its first round
                runs.write(run.out / "config.json", {"train": {"model": "dream"} | settings})
            cfg = make_demo(cfg)
        checkpoints.keep_compiled(cfg.compile_cache)

        # All devices: --tensor of them share each layer, the others share rows and weights.
        mesh = mesh_of(jax.devices(), (1, jax.device_count() // cfg.tensor, cfg.tensor))
        trainer = Trainer(cfg, rewards, mesh, scores_of)
        checkpoints.check_hosts(run.out, trainer.same_on_hosts(settings))
        trainer.describe()

        store = checkpoints.Checkpoints(run.out, cfg.keep)
        meta = {"model": dataclasses.asdict(trainer.model_cfg), "train": {"model": "dream"} | settings}
        # The name by which generate.py knows a chat model, the tokenizer and the chat template.
        meta["source"] = source = runs.read_json(runs.as_path(cfg.ckpt) / "config.json").get("source", "")
        files = checkpoints.companions(cfg.ckpt)
        first = trainer.restore(store, settings) if cfg.resume else 0
        run.begin(first or -1, meta, files, ("log.jsonl", "rounds.jsonl"))  # -1: cut round 0, an evaluation, too
        with jax.set_mesh(mesh):
            train(run, store, meta, trainer, first, draw)
        store.close()
        folder = run.out
        if cfg.lora_rank:
            params = md.merge_adapters(trainer.base, trainer.trained)
            folder = run.out / "merged"
            shutil.rmtree(folder, ignore_errors=True)  # of a run that goes on
            model = nnx.merge(trainer.writing_graph, params)
            checkpoints.save(md, folder, model, [run.out / name for name in files], source)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} min; python generate.py --model=dream --ckpt={folder}")


def runs_tests(rewards):
    return any(function in sandbox.TESTED for function in rewards.values())


def check_sandbox(cfg):
    """RuntimeError if a right program fails, or a wrong one passes; else 1."""
    tests = [["assert f() == 1"], ["assert f() == 2"]]
    results = sandbox.run_tests(["def f():\n    return 1"] * 2, tests, **dataclasses.asdict(cfg.sandbox))
    if [result.rate for result in results] != [1, 0]:
        why = results[0].error or results[1].error or "a right program fails, or a wrong one passes"
        raise RuntimeError(f"the sandbox cannot be used: {why}")
    return 1


def train(run, store, meta, trainer, first, draw):
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
        advantages = grpo.group_advantages(reward_BF, cfg.reward_weights, cfg.group, cfg.scale_rewards)
        measured, norms = trainer.learn(batch, iterations, advantages)
        clock.append(time.perf_counter())

        # log.jsonl has a row a round, rounds.jsonl a row a completion.
        row = {"round": done} | summary(trainer, batch, replay, reward_BF, advantages, measured, norms)
        if cfg.drift_bound:
            now = trainer.refresh, trainer.calm, cfg.sampling.block_length
            trainer.refresh, trainer.calm = grpo.next_refresh(*now, row["drift_k3"], cfg.drift_bound)
        row |= {"refilled": anew} if cfg.refill else {}
        if trainer.heldout and (done % cfg.eval_every == 0 or done == cfg.rounds):
            row |= trainer.evaluate()
        if not run.rank:
            completions = completion_rows(done, cfg, batch, reward_BF, advantages)
            run.append("rounds.jsonl", completions)
            run.table("completions", completions)
            if cfg.show:
                show_round(completions)
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        run.log(row | dict(zip(phases, np.diff(clock).tolist(), strict=True)))

        # Saving goes on in the background. A signal, to any host, asks for one more checkpoint, of a whole round.
        stops = run.signal or store.preempted(done)
        if done % cfg.save_every == 0 or done == cfg.rounds or stops:
            counters = {"round": done, "updates": trainer.updates, "refresh": trainer.refresh, "calm": trainer.calm}
            store.save(done, trainer.arrays(), meta | counters)
        if stops:
            store.close()
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
        resume = run if cfg.resume and runs.saved_steps(base / "run") else ""
        if not resume:
            shutil.rmtree(base, ignore_errors=True)
            rl_tasks.write_demo(base, cfg.seed)
            pairs = ("pairs", str(base / "pairs.jsonl"), f"--out={rows}", f"--seed={cfg.seed}")
            runs.script("data_prep.py", *pairs, "--seq_len=128", "--eos_to=16", "--vocab_size=512")
        settings = {
            "model": "dream_tiny", "data": rows, "out": run, "resume": resume, "seq_len": 128, "batch_size": 16,
            "micro_batch": max(1, 16 // jax.device_count()), "remat": "none", "steps": cfg.demo_steps,
            "eval_every": cfg.demo_steps, "log_every": 100, "seed": cfg.seed,
            "prompt": rl_tasks.read_tasks(base / "heldout.jsonl")[0]["prompt"],
        }  # fmt: skip
        runs.script("train_tpu.py", *(f"--{name}={value}" for name, value in settings.items()))
        (base / "done").touch()
    prompts, heldout = (str(base / f"{split}.jsonl") for split in ("train", "heldout"))
    return dataclasses.replace(cfg, ckpt=str(base / "run"), prompts=prompts, heldout=heldout)


if __name__ == "__main__":
    runs.command(main, Config, __doc__, ("hosts",))
