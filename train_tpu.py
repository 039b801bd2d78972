"""Train PythonCoder or Dream on Python source, on whatever JAX finds: a TPU chip, a pod, GPUs or a CPU.

    python train_tpu.py --steps=50                      # CPU: the tiny preset for two minutes, to see it work
    python train_tpu.py                                 # four epochs over the standard library; 1.08 B on a TPU v6e
    python train_tpu.py --resume=out/train_tpu          # goes on where the run stopped, with the run's own settings
    python train_tpu.py --data=data/mine --model=300m   # tokens that data_prep.py wrote
    python train_tpu.py --model=dream_tiny --seq_len=512    # masked diffusion: a Dream from scratch
    python train_tpu.py --model=dream_tiny --objective=ar --out=out/ar    # its layers as an autoregressive model
    python train_tpu.py --init=out/ar --block_length=4 --block_warmup=200    # which then learns to fill blocks
    python train_tpu.py --init=out/diffucoder --data=data/pairs    # goes on with a converted Dream: fine-tuning
    python train_tpu.py --init=out/diffucoder --data=data/pairs --lora_rank=16    # the same in a seventh of the memory

Reads the folder of packed rows that data_prep.py writes, for Dream also pairs of prompt and response; without --data it
first prepares the standard library of the running Python. Writes --out: config.json, tokenizer.json, log.jsonl,
samples.txt, checkpoints/<step>/, with --lora_rank at the end also merged/, a whole model. Whether a model fits a TPU
that is not here, says compile_for.py.

With --block_length a Dream learns block diffusion: a masked token sees its own block, noised, and the clean text before
it. Each row goes through the layers twice over for that, noised and clean. Blocks of one token are an autoregressive
model, so that --block_warmup, 1, 2, 4, .., begins at the loss of one. sample_block.py then writes block after block.
So any Qwen2.5 becomes a block diffusion model; Fast-dLLM v2 took about 1e9 tokens for it:

    python convert_weights.py --source=Qwen/Qwen2.5-Coder-0.5B --to=dream --out=out/start
    python data_prep.py python --tokenizer=out/start/tokenizer.json --out=data/qwen
    python train_tpu.py --init=out/start --data=data/qwen --block_length=32 --block_warmup=1500 --rate_warmup=500

Predicted, not measured, for rows of 2,048 tokens, 64 a step, and 1e9 tokens in all (compile_for.py train
--model=dream_500m --block_length=32 --micro_batch=1, --model=dream_1500m, --device=rtx4090; times of the RTX 4090 are
bounds from below):

                                    v6e                     RTX 4090, 24 GB
    0.5 B                           24 hours, 12.5 GiB      54 hours, 11.2 GiB
    1.5 B                           35 hours, 28.2 GiB      80 hours, 8.4 GiB, with --lora_rank=16

--complement takes twice as long.

One optimizer step is one compiled program: a scan over micro-batches, each a scan over layers. The gradient is that of
(sum of token losses) / (all valid tokens of the step), however the tokens fall into micro-batches. Row order, dropout
and learning rate are functions of (seed, step), so a checkpoint needs no more than parameters, moments and the step.

Letters: A micro-batches of a step, B rows of a micro-batch, L length, V vocabulary.
"""

import dataclasses
import functools
import hashlib
import math
import queue
import shutil
import threading
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as PS

import checkpoints
import diffusion
import model_dream as md
import model_pythoncoder as pc
import runs
import sample_block
import sample_dream
from rows import Rows, open_data, token_bytes


@dataclasses.dataclass(frozen=True)
class Coder:
    """PythonCoder alone."""

    diff: typing.Literal["seed", "paper", "v2", "none"] = "seed"  # floored | as published | DIFF V2 | plain attention
    init_std: typing.Literal["", "fan_in", "paper"] = ""  # of new matrices: by fan-in | 0.02; "": the preset's, fan_in
    dropout: float | None = None  # of attention output, feed-forward hidden and output; 0.1, below 100 M parameters 0
    mtp_weight: float = 0.1  # of the loss of the head that predicts the token after the next
    z_loss: float = 0.0  # weight of logsumexp^2, which keeps logits small
    einsums: bool = False  # attention as plain products also where the device has a fused kernel for it


@dataclasses.dataclass(frozen=True)
class Dream:
    """Dream alone."""

    init: str = ""  # folder of a Dream to start from, converted or trained here; sets --model
    lora_rank: int = 0  # with --init: train a difference of this rank to the layers' matrices; 0 trains all weights
    schedule: typing.Literal[tuple(diffusion.SCHEDULES)] = "linear"  # noise schedule, see diffusion.py
    objective: typing.Literal["diffusion", "ar"] = "diffusion"  # predict masked tokens | each next token
    anneal_steps: int = 0  # steps in which attention goes from causal to both ways, without blocks; 0: none
    block_length: int = 0  # blocks of so many tokens see themselves and what is left of them; 0: as --init's, or none
    block_warmup: int = 0  # steps in which blocks grow from 1 over 2, 4, .. to --block_length
    rate_warmup: int = 0  # steps in which the highest mask rate of a block rises to that of --rates, without weights
    rates: tuple[float, float] = (1e-3, 1.0)  # lowest and highest mask rate of a block; held-out rows have all rates
    least_one: bool = False  # each block has one masked token at least, and a mask rate of 1 / --block_length
    complement: bool = False  # each row twice in a step, its masks and the others; after --rate_warmup


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""  # folder written by data_prep.py; "" prepares the Python standard library under data/
    out: str = "out/train_tpu"  # folder of the run
    resume: str = ""  # folder of a run to go on with, with its settings; "" starts anew
    model: str = ""  # key of CONFIGS in model_pythoncoder.py, or dream_ and one in model_dream.py; "" by memory
    coder: Coder = Coder()
    dream: Dream = Dream()
    seq_len: int = 0  # tokens per row; 0: the model's positions, at most 2048
    batch_size: int = 0  # rows per optimizer step, all devices together; 0: about 131,072 tokens, 4,096 on a CPU
    epochs: float = 4.0  # passes over the training rows; sets --steps
    steps: int = 0  # optimizer steps; 0: from --epochs
    lr: float = 0.0  # peak; 0: 3e-4 sqrt(1.5e9 / parameters), at most 3e-3; a tenth with --init but for LoRA
    warmup: int = 0  # steps of linear warm-up; 0: 2000, or a tenth of a shorter run
    optimizer: typing.Literal["", "adamw", "muon"] = ""  # "": muon below 100 M parameters
    weight_decay: float = 0.1  # on matrices and embeddings only
    clip: float = 1.0  # largest norm of the gradient of all parameters
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # of the computation; parameters are float32
    reduce: typing.Literal["", "step", "micro"] = ""  # how often PythonCoder's devices sum gradients; "" by memory
    remat: typing.Literal["", "none", "qkvo", "full"] = ""  # what the backward pass recomputes; "" is qkvo
    micro_batch: int = 0  # rows per device at a time; 0: by model and memory
    fsdp: int = 0  # devices that share one copy of the weights; 0: all that data and tensor leave
    tensor: int = 1  # devices that share each layer's heads, feed-forward and vocabulary
    device: typing.Literal["", "cpu"] = ""  # "cpu" trains on the CPU although JAX leaves an accelerator idle
    hosts: str = ""  # "" one host; "auto" on TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX of this process
    log_every: int = 10  # steps between rows of the log
    eval_every: int = 0  # steps between evaluations, each saves a checkpoint; 0: about ten times a run
    eval_rows: int = 512  # held-out rows at most
    save_minutes: float = 30.0  # a checkpoint at least so often, also between evaluations; 0 leaves them to these
    keep: int = 2  # newest checkpoints to keep, besides the best
    prompt: str = "def read_lines(path):\n"  # continued at every evaluation
    plot: bool = False  # draw loss and bits per byte in the terminal, and at the end curve.png
    wandb: str = ""  # project name; "" logs to files alone
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    seed: int = 0  # initial weights, row order, dropout, noise


# Settings that may differ between hosts, and those that --resume does not take from the run.
OF_A_HOST = ("hosts", "data", "out", "resume", "wandb", "compile_cache")
MACHINE = ("device", "hosts", "micro_batch", "fsdp", "tensor", "reduce")
PRESETS = pc.CONFIGS | {f"dream_{name}": preset for name, preset in md.CONFIGS.items()}


def family_of(cfg):
    """The module of the model: what is called of it below has the same name in both."""
    return md if cfg.model.startswith("dream") else pc


# ---- choices for the device ----------------------------------------------------------------------------------------

# Rows per device at a time. Few: on a v6e four keep the activations in VMEM, on a CPU (tiny, small) in its caches.
MICRO_BATCH = {"tiny": 2, "small": 4, "100m": 8, "300m": 8, "500m": 4, "1b": 4}
# GiB of a step by rows per device at a time, the most of the devices that compile_for.py compiled it for; see
# bench/results/by_hardware.json. That of small is a TPU's on both.
STEP_GIB = {
    "tpu": {"small": {4: 1.0}, "300m": {8: 8.1}, "1b": {4: 20.9}},
    "gpu": {"small": {4: 1.0}, "300m": {8: 9.4}, "1b": {1: 17.8, 4: 19.1}},
}
# A preset is picked if its step fits a device, and if the run feeds it: with fewer tokens for each parameter a larger
# model ends worse than a smaller one.
TOKENS_PER_PARAMETER = 4
TPU_FLOPS = {"TPU v6": 918e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v4": 275e12}  # bf16


def device_memory_gib(device):
    """What one accelerator can hold; None on a CPU."""
    if device.platform == "cpu":
        return None
    if device.platform == "tpu" and "v6" in device.device_kind:
        return 31.24  # also for a compile-only device, which cannot be asked
    try:
        return jax.local_devices()[0].memory_stats()["bytes_limit"] / 2**30  # another host's cannot be asked
    except (TypeError, KeyError, jax.errors.JaxRuntimeError):
        return 15.75


def fused_kernel(device, dtype):
    """Whose kernel computes PythonCoder's attention: a TPU's, that for NVIDIA's Ampere or Hopper; "" where none does.

    An older GPU has no bfloat16, and too little shared memory for the tiles, as all have for float32.
    """
    if device.platform != "gpu" or dtype != "bfloat16":
        return "tpu" if device.platform == "tpu" else ""
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]  # 8.9; of AMD's a name
    return {"8": "ampere", "9": "hopper", "10": "ampere", "12": "ampere"}.get(major, "")


def most_rows(name, devices, memory):
    """Rows per device at a time that fit its memory in GiB, 0 if none do; infinite where no step was compiled."""
    recorded = STEP_GIB.get(devices[0].platform, {}).get(name)
    if not recorded:
        return math.inf
    params = pc.count_params(pc.CONFIGS[name])["total"]
    shared_gib = 14 * params / 2**30 * (1 - 1 / len(devices))  # weights, moments and gradients on other devices
    return max((rows for rows, gib in recorded.items() if gib - shared_gib <= memory), default=0)


def pick_model(cfg, devices, data=None, memory=None):
    """(name of the preset, architecture): --model, that of --init, or the largest preset that memory and data feed.

    A PythonCoder has as many ids and positions as the data, if the preset has fewer, or twice as many ids.
    """
    if cfg.dream.init:
        if cfg.model not in ("", "dream"):
            raise ValueError(f"--init={cfg.dream.init} says what the model is; leave --model={cfg.model} out")
        return "dream", with_blocks(cfg, md.read_config(cfg.resume or cfg.dream.init))
    name, memory = cfg.model or "tiny", memory or device_memory_gib(devices[0]) or 0
    for larger in STEP_GIB.get(devices[0].platform, ()) if not cfg.model else ():
        params = pc.count_params(pc.CONFIGS[larger])["total"]
        fed = not data or tokens_seen(cfg, data) >= TOKENS_PER_PARAMETER * params
        name = larger if fed and most_rows(larger, devices, memory) else name
    if name not in PRESETS:
        raise ValueError(f"--model={name}: not one of {', '.join(PRESETS)}")
    model = PRESETS[name]
    if isinstance(model, pc.Config):
        form, ids = cfg.coder.init_std or model.init_std, model.vocab
        if data and not data["vocab_size"] <= ids < 2 * data["vocab_padded"]:
            ids = data["vocab_padded"]
        if cfg.resume:  # the run's own; older ones do not say how they began
            saved = runs.read_json(runs.as_path(cfg.resume) / "config.json", "model")["model"]
            form, ids = cfg.coder.init_std or saved.get("init_std", "paper"), saved["vocab"]
            model = dataclasses.replace(model, positions=saved["positions"])
        positions = max(model.positions, data["seq_len"] if data else 0)
        model = dataclasses.replace(model, diff=cfg.coder.diff, init_std=form, vocab=ids, positions=positions)
    return name, with_blocks(cfg, model)


def with_blocks(cfg, model):
    """The architecture with the blocks that --block_length and --objective ask for, and ValueError if they cannot be.

    An autoregressive model is one with blocks of one token.
    """
    dream, ar = cfg.dream, cfg.dream.objective == "ar"
    of_blocks = ("block_length", "block_warmup", "rate_warmup", "rates", "least_one", "complement")
    changed = [f"--{name}" for name in of_blocks if getattr(dream, name) != getattr(Dream, name)]
    block = 1 if ar else dream.block_length or (0 if dream.anneal_steps else getattr(model, "block_length", 0))
    foreign = isinstance(model, pc.Config) and (ar or dream.anneal_steps or changed)
    lengths = dream.block_length, dream.block_warmup, dream.rate_warmup, dream.anneal_steps
    wrong = {
        "blocks, --anneal_steps and --objective=ar are of Dream, --model=dream_...": foreign,
        f"--objective=ar has no {', '.join(changed)}": ar and changed,
        f"{', '.join(changed)}: set --block_length": changed and not block,
        "--objective=ar is for a model with the shift": ar and not getattr(model, "shift", True),
        "blocks have the linear --schedule": block and dream.schedule != "linear",
        "--anneal_steps ends with attention both ways, so it goes without blocks": block and dream.anneal_steps,
        "a number of tokens or steps is below 0": min(lengths) < 0,
        "--rates are two numbers in (0, 1], the lower first": not 0 < dream.rates[0] < dream.rates[1] <= 1,
    }
    if any(wrong.values()):
        raise ValueError("; ".join(message for message, is_wrong in wrong.items() if is_wrong))
    return model if isinstance(model, pc.Config) else dataclasses.replace(model, block_length=block)


def tokens_seen(cfg, data):
    """Tokens that --epochs trains on, of the data with this meta.json."""
    return cfg.epochs * data["splits"]["train"]["tokens"]


def pick_mesh(cfg, model, devices):
    """The devices as a mesh (data, fsdp, tensor). ValueError if they do not divide, or do not divide the model."""
    tensor = cfg.tensor
    fsdp = cfg.fsdp or max(1, len(devices) // tensor)
    if len(devices) % (tensor * fsdp):
        raise ValueError(f"{len(devices)} devices do not divide by --fsdp={fsdp} times --tensor={tensor}")
    # (size, devices that share it) of what is split.
    parts = {
        "key/value groups": (model.kv_heads // getattr(model, "maps", 1), tensor),
        "feed-forward width": (model.ffn, tensor),
        "vocabulary": (model.vocab, tensor * fsdp),
        "width": (model.width, fsdp),
    }
    uneven = [f"{name} ({size})" for name, (size, count) in parts.items() if size % count]
    if uneven:
        raise ValueError(f"--fsdp={fsdp} --tensor={tensor} do not divide the model's {', '.join(uneven)}; try --fsdp=1")
    grid = np.asarray(devices).reshape(-1, fsdp, tensor)
    return jax.sharding.Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def row_length(cfg, model, data=None):
    """Tokens of a row: --seq_len, or that of the data, or what suits the model."""
    seq_len = cfg.seq_len or (data["seq_len"] if data else min(model.positions, 2048))
    if seq_len > model.positions:
        advice = f"prepare them with data_prep.py --seq_len={model.positions} at most"
        raise ValueError(f"rows of {seq_len} tokens do not fit the {model.positions} positions of the model; {advice}")
    return seq_len


def pick_batch(cfg, model, copies, on_cpu, data=None, fitting=math.inf):
    """(tokens of a row, rows of a step, rows per device at a time); `copies` devices hold different rows."""
    seq_len = row_length(cfg, model, data)
    # Short runs take smaller steps: two thousand of them rather than sixty.
    seen = tokens_seen(cfg, data) if data else math.inf
    tokens = 2 ** int(math.log2(np.clip(seen / 2000, 8192, 131_072)))
    rows = (4096 if on_cpu else tokens) // seq_len
    batch = cfg.batch_size or max(1, rows // copies) * copies
    if batch % copies:
        nearest = -(-batch // copies) * copies
        raise ValueError(f"--batch_size={batch} does not divide over {copies} devices; try {nearest}")
    rows = batch // copies
    most = min(rows, MICRO_BATCH.get(cfg.model.removeprefix("dream_"), 1), max(1, fitting))
    micro = cfg.micro_batch or max(m for m in range(1, most + 1) if rows % m == 0)
    if rows % micro:
        raise ValueError(f"--micro_batch={micro} does not divide the {rows} rows of a device; try a divisor of {rows}")
    return seq_len, batch, micro


def resolve(cfg, devices, data=None, memory=None):
    """(cfg, architecture, how to run it, mesh): what was left open is picked by devices and data, and printed.

    data is the meta.json of the rows; without it the choice is that for endless data. memory is what a device holds, in
    GiB, where it cannot be asked.
    """
    if min(cfg.log_every, cfg.eval_rows, cfg.keep) < 1:
        raise ValueError("--log_every, --eval_rows and --keep have to be 1 at least")
    device, memory = devices[0], memory or device_memory_gib(devices[0])
    name, model = pick_model(cfg, devices, data, memory)
    cfg = dataclasses.replace(cfg, model=name)
    fitting = most_rows(name, devices, memory)
    seq_len, batch, micro = pick_batch(cfg, model, len(devices) // cfg.tensor, memory is None, data, fitting)
    mesh = pick_mesh(cfg, model, devices)
    cfg = dataclasses.replace(cfg, seq_len=seq_len, batch_size=batch, micro_batch=micro)
    dtype, remat = cfg.dtype or ("float32" if memory is None else "bfloat16"), cfg.remat or "qkvo"
    if dtype == "float32":  # else a TPU multiplies in bfloat16, a GPU in TF32
        jax.config.update("jax_default_matmul_precision", "highest")
    block = 64 if memory is None else 128  # queries of attention at a time: scores that stay in a CPU's caches
    settings = {"dtype": jnp.dtype(dtype), "remat": remat, "block": block}
    # Whole float32 weights and gradients on each device, where a third of the memory holds them: see accumulate_apart.
    params = family_of(cfg).count_params(model)["total"]
    whole_gib = 8 * params / 2**30
    apart = family_of(cfg) is pc and whole_gib <= (memory or math.inf) / 3
    # What was trained with AdamW goes on with it. Small models have seen too little to need dropout.
    small = params < 1e8
    optimizer = cfg.optimizer or ("muon" if small and not cfg.dream.init else "adamw")
    dropout = cfg.coder.dropout if cfg.coder.dropout is not None else 0.0 if small else 0.1
    coder = dataclasses.replace(cfg.coder, dropout=dropout)
    reduce = cfg.reduce or ("step" if apart else "micro")
    cfg = dataclasses.replace(cfg, reduce=reduce, optimizer=optimizer, coder=coder)
    if family_of(cfg) is md:
        run = md.Run(platform=md.platform_of(device), **settings)
    else:
        kernel = "" if cfg.coder.einsums else fused_kernel(device, dtype)
        run = pc.Run(kernel=kernel, tpu=device.platform == "tpu", dropout=dropout, **settings)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    where = "CPU" if memory is None else f"{memory:.1f} GiB each"
    accumulated = batch * cfg.tensor // mesh.size // micro
    print(f"{len(devices)} x {device.device_kind} ({where}): mesh {axes}")
    frozen = f"frozen {dtype} weights and LoRA of rank {cfg.dream.lora_rank}"
    weights = frozen if cfg.dream.lora_rank else "float32 weights"
    attention = f", attention by the {run.kernel} kernel" if getattr(run, "kernel", "") else ""
    print(f"model {name}, {dtype} compute on {weights}, remat {remat}{attention}")
    print(f"a step is {batch} rows of {seq_len} = {batch * seq_len:,} tokens, {accumulated} x {micro} rows a device")
    return cfg, model, run, mesh


def plan(cfg, model, rows):
    """(cfg with the length of the run and its learning rate, steps of an epoch); prints them."""
    counts = family_of(cfg).count_params(model)
    # Length: whole epochs, unless --steps says otherwise.
    per_epoch = rows.total // cfg.batch_size
    steps = cfg.steps or max(1, round(cfg.epochs * per_epoch))
    # Small models bear larger steps; what goes on from a trained one takes a tenth. New adapters take all: a guess.
    tenth = cfg.dream.init and not cfg.dream.lora_rank
    peak = float(np.clip(3e-4 * math.sqrt(1.5e9 / counts["total"]), 1e-4, 3e-3)) / (10 if tenth else 1)
    lr = cfg.lr or peak
    warmup = cfg.warmup or min(2000, max(1, steps // 10))
    # Evaluations divide an epoch evenly, so that its end is one of them.
    evals = max(1, round(per_epoch / min(1000, max(50, steps // 10))))  # in an epoch
    eval_every = cfg.eval_every or -(-per_epoch // evals)
    cfg = dataclasses.replace(cfg, steps=steps, lr=lr, warmup=warmup, eval_every=eval_every)
    data, seen = rows.meta["splits"]["train"]["tokens"], steps * cfg.batch_size * cfg.seq_len
    print(", ".join(f"{part} {n:,}" for part, n in counts.items()) + " parameters")
    print(f"{steps:,} steps of {seen // steps:,} tokens = {steps / per_epoch:.2f} epochs of {data:,} tokens")
    print(f"{seen / counts['total']:.1f} tokens per parameter; {cfg.optimizer}, peak learning rate {lr:.3g}")
    return cfg, per_epoch


def step_flops(cfg, model):
    """Training FLOPs of a step, of all devices together, without what remat computes again."""
    length, copies = cfg.seq_len, 1
    if getattr(model, "block_length", 0) > 1:  # each row noised and clean, side by side
        length, copies = 2 * length, 2 * (1 + cfg.dream.complement)
    flops = family_of(cfg).flops_per_token(model, length)
    if cfg.dream.lora_rank:  # frozen matrices have no gradients: a third of what they cost
        flops -= md.flops_per_token(model, 0) / 3
    return copies * flops * cfg.batch_size * cfg.seq_len


def peak_flops(device, dtype):
    """FLOP/s of one device: the data sheet's for a TPU, elsewhere the best of five products of square matrices."""
    for kind, peak in TPU_FLOPS.items():
        if device.device_kind.startswith(kind):
            return peak, "data sheet"
    n = 1536 if device.platform == "cpu" else 8192
    a = jnp.ones((n, n), dtype)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * n**3 / min(seconds), f"measured, {n} x {n} {jnp.dtype(dtype)} matmul"


# ---- data ----------------------------------------------------------------------------------------------------------


def find_data(cfg):
    """(training rows, held-out rows, tokenizer.json); without --data those of the standard library, prepared first."""
    if cfg.data:
        return open_data(cfg.data, cfg.seq_len)
    if cfg.hosts:
        raise ValueError("several hosts need the same data: write it with data_prep.py and pass --data")
    # These few million tokens feed the tiny preset, whatever the device.
    _, model = pick_model(dataclasses.replace(cfg, model=cfg.model or "tiny" * (not cfg.dream.init)), jax.devices())
    seq_len, vocab = row_length(cfg, model), min(model.vocab, 32_768)
    # A Dream that is there already has a tokenizer.
    known = runs.as_path(cfg.dream.init) / "tokenizer.json" if cfg.dream.init else Path()
    name, tokens = vocab, f"--vocab_size={vocab}"
    if known.is_file():
        name, tokens = hashlib.sha256(known.read_bytes()).hexdigest()[:8], f"--tokenizer={known}"
    folder = Path(f"data/python-{seq_len}-{name}")
    if not (folder / "meta.json").exists():
        print(f"no --data: preparing the Python standard library in {folder}")
        runs.script("data_prep.py", "python", f"--out={folder}", f"--seq_len={seq_len}", tokens)
    return open_data(folder, seq_len)


def check_data(cfg, train):
    """ValueError if the rows are not for this model, or fewer than a step takes."""
    folder = train.folder
    if train.total < cfg.batch_size:
        advice = "lower --batch_size or add data"
        raise ValueError(f"{folder} has {train.total} training rows, a step takes {cfg.batch_size}; {advice}")
    if family_of(cfg) is pc and len(train.columns) > 3:
        raise ValueError(f"{folder} holds pairs, for --model=dream_...: their prompts PythonCoder would learn too")


MASKS = "<|mask|>", "<mask>"  # what tokenizers call MASK


def with_mask(model, meta, tokenizer_json):
    """(model, tokenizer.json) of a Dream from scratch: a preset with the data's ids, and one for MASK.

    Rows have no MASK. It is <|mask|> or <mask> of the data's tokenizer, else a token added to the copy that the run
    keeps.
    """
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    mask_id = next((i for i in map(tokenizer.token_to_id, MASKS) if i is not None), None)
    if mask_id is None:
        tokenizer.add_special_tokens([MASKS[0]])
        mask_id, tokenizer_json = tokenizer.token_to_id(MASKS[0]), tokenizer.to_str().encode()
    vocab = -(-max(meta["vocab_size"], mask_id + 1) // 128) * 128
    ids = {"mask_id": mask_id, "pad_id": meta["pad_id"], "eos_id": meta["eos_id"]}
    ids["bos_id"] = meta.get("bos_id", meta["eos_id"])
    return dataclasses.replace(model, vocab=vocab, **ids), tokenizer_json


def known_ids(folder, model, meta, tokenizer_json):
    """tokenizer.json of the Dream in `folder`, else of the data. ValueError if ids do not mean the same in both."""
    data = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    path, known, wrong = runs.as_path(folder) / "tokenizer.json", data, ""
    if path.is_file():
        known = runs.load_tokenizer(folder, model)
        tokenizer_json = path.read_bytes()
    theirs, ours = (t.get_vocab(with_added_tokens=True) for t in (known, data))
    changed = sum(theirs.get(token) != i for token, i in ours.items())
    if changed:
        wrong = f"{changed:,} of its tokens have other ids"
    elif max(ours.values()) >= model.vocab:
        wrong = f"its {meta['vocab_size']:,} ids are more than the model's {model.vocab:,}"
    elif meta["eos_id"] != model.eos_id:
        wrong = f"its documents end with id {meta['eos_id']}, the model's with {model.eos_id}"
    elif data.id_to_token(model.mask_id) not in (None, *MASKS):
        wrong = f"{data.id_to_token(model.mask_id)!r} is the model's MASK, {model.mask_id}"
    if wrong:
        raise ValueError(f"the data's tokenizer is not that of {folder}: {wrong}; prepare it with --tokenizer={path}")
    return tokenizer_json


def with_expand(cfg, model, tokenizer_json):
    """A Dream that learns holes of any length (data_prep.edit): with an id for the mask that becomes two."""
    if model.block_length or cfg.dream.lora_rank:
        what = "a Dream that sees the whole canvas, without --lora_rank; --anneal_steps makes an autoregressive one so"
        raise ValueError(f"{cfg.data} has holes that grow and shrink (--edit_rate), for {what}")
    if model.expand_id < 0:
        tokens = tokenizers.Tokenizer.from_str(tokenizer_json.decode()).get_vocab(with_added_tokens=True)
        free = max(model.mask_id, *tokens.values()) + 1
        if free >= model.vocab:
            raise ValueError(f"none of the model's {model.vocab:,} ids is free for masks that grow (--edit_rate)")
        model = dataclasses.replace(model, expand_id=free)
    return model


COLUMNS = "token_ABL", "segment_ABL", "position_ABL", "fixed_ABL"  # pairs alone have the last


def to_devices(rows, row_ids, sharding):
    """The rows of these numbers [A, B] on the mesh, {name of COLUMNS: array}. A host reads only its own."""
    read = functools.lru_cache(None)(lambda a, b: rows.read(row_ids[slice(*a), slice(*b)]))
    shape = (*row_ids.shape, rows.meta["seq_len"])

    def column(c):
        def part(index):
            return read(*((s.start, s.stop) for s in index[:2]))[c]

        return jax.make_array_from_callback(shape, sharding, part)

    return {name: column(c) for c, name in enumerate(COLUMNS[: len(rows.columns)])}


def prefetch(make, first, last):
    """Yield (step, make(step), seconds waited) with one batch made ahead by a thread."""
    ready = queue.Queue(2)

    def work():
        try:
            for step in range(first, last):
                ready.put(make(step))
        except BaseException as error:  # handed to the consumer, which raises it
            ready.put(error)

    threading.Thread(target=work, daemon=True).start()
    for step in range(first, last):
        started = time.perf_counter()
        batch = ready.get()
        if isinstance(batch, BaseException):
            raise batch
        yield step, batch, time.perf_counter() - started


# ---- the compiled step ---------------------------------------------------------------------------------------------


def wsd(step, peak, steps, warmup=2000, stable=0.9, start=0.01, final=0.1):
    """Warmup-stable-decay learning rate of update `step` (0, 1, ...), float32.

    peak (start + (1 - start) s / warmup) while s < warmup; peak while s < D = int(stable steps); then with x =
    min(s - D, steps - D) / (steps - D): peak (final + (1 - final) (1 + cos(pi x)) / 2), so final peak after the end.
    """
    step, decay = jnp.asarray(step, jnp.float32), int(stable * steps)
    rising = start + (1 - start) * step / max(warmup, 1)
    x = jnp.clip((step - decay) / max(steps - decay, 1), 0, 1)
    falling = final + (1 - final) * (1 + jnp.cos(jnp.pi * x)) / 2
    return peak * jnp.where(step < warmup, rising, jnp.where(step < decay, 1.0, falling))


def decays(tree):
    """Weight decay mask, by name: matrices and embeddings, no norms, biases, lambda vectors or LoRA's adapters.

    By name, for stacked norms have two axes.
    """
    names = {*pc.SHARDING, "w_lambda", *md.SHARDING} - {"q_bias", "k_bias", "v_bias"}
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, tree)


def make_optimizer(clip, weight_decay, mu_dtype=None, mask=decays, muon=False):
    """Clip, then AdamW at learning rate 1: its updates are multiplied by the schedule of the step.

    muon: the layers' matrices are Muon's, with updates of AdamW's size (arXiv:2502.16982); embeddings, heads, norms and
    vectors stay Adam's, without decay.
    """
    if not muon:
        optimizer = optax.adamw(1.0, 0.9, 0.95, 1e-8, weight_decay=weight_decay, mask=mask, mu_dtype=mu_dtype)
        return optax.chain(optax.clip_by_global_norm(clip), optimizer)
    # By name: PythonCoder's are stacked, and each of a stack is orthogonalised by itself.
    tables = {"embed", "head", "embed_tokens", "lm_head", "q_bias", "k_bias", "v_bias"}
    matrices, axes = {*pc.SHARDING, *md.SHARDING} - tables, optax.contrib.MuonDimensionNumbers(-2, -1)

    def dimensions(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: axes if path[-1].key in matrices else None, tree)

    settings = {"weight_decay": weight_decay, "mu_dtype": mu_dtype, "consistent_rms": 0.2, "adam_b2": 0.95}
    optimizer = optax.contrib.muon(1.0, muon_weight_dimension_numbers=dimensions, **settings)
    return optax.chain(optax.clip_by_global_norm(clip), optimizer)


def accumulate(loss_fn, params, batches, inside=("layers",)):
    """Sum of gradients and of outputs of loss_fn(params, batch, sums) -> (loss, aux) over the leading axis of batches.

    `sums` are the gradients so far of the parts named by `inside`. The model adds to them in its backward pass, and
    what comes out as the gradient of sums is the new sums; the gradients of all else are added here.
    """
    own = {name: params[name] for name in inside}
    rest = {name: value for name, value in params.items() if name not in inside}

    def loss_of(rest, sums, batch):
        return loss_fn(rest | own, batch, sums)

    def body(carry, batch):
        outs, (rest_sums, own_sums) = carry
        new, (rest_grads, own_sums) = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(rest, own_sums, batch)
        return (jax.tree.map(jnp.add, outs, new), (jax.tree.map(jnp.add, rest_sums, rest_grads), own_sums)), None

    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(loss_of, rest, own, first), (rest, own)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (outs, (rest_sums, own_sums)), _ = jax.lax.scan(body, zeros, batches)
    return rest_sums | own_sums, outs


def alone():
    """Whether one device, or those that share each layer, hold all rows."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or math.prod(mesh.shape[axis] for axis in pc.BATCH) == 1


def accumulate_apart(loss_fn, params, batches, inside=("layers",)):
    """accumulate() with one reduction at its end: each device sums the gradients of its own rows.

    It costs a device whole float32 weights and gradients, and saves the reductions of all micro-batches but one.
    """
    own = set(pc.BATCH)

    def of_own_rows(params, batches):
        grads, outs = accumulate(loss_fn, params, batches, inside)
        return jax.tree.map(lambda g: g[None], grads), jax.lax.psum(outs, tuple(own))

    rows = PS(None, pc.BATCH)
    specs = {"in_specs": (PS(), rows), "out_specs": (PS(pc.BATCH), PS()), "axis_names": own, "check_vma": False}
    grads, outs = jax.shard_map(of_own_rows, **specs)(params, batches)
    return jax.tree.map(lambda g: g.sum(0), grads), outs  # laid out as the parameters: scattered, not copied


def apply_gradients(optimizer, state, grads, lr):
    """One update of a state's "params" and "opt"; the step is left out (and said so) if any gradient is not finite."""
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(norm)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = jax.tree.map(lambda p, u: p + lr * u, state["params"], updates)
    new, old = {"params": params, "opt": opt}, {"params": state["params"], "opt": state["opt"]}
    return state | jax.tree.map(lambda old, new: jnp.where(ok, new, old), old, new), norm, ok


def coder_loss(cfg, graph, batch, key):
    """loss_fn(params, micro, sums) -> (loss, {"main", "mtp"}) of PythonCoder, in nats per target of the whole step."""
    main_tokens, mtp_tokens = (jnp.maximum(mask.sum(), 1) for mask in pc.target_masks(batch["segment_ABL"]))
    noise, weight = key if cfg.coder.dropout else None, cfg.coder.mtp_weight

    def loss_fn(params, micro, sums):
        model = nnx.merge(graph, params)
        inputs = micro["token_ABL"], micro["segment_ABL"], micro["position_ABL"]
        main, mtp = model.losses(*inputs, noise, micro["row_AB"], cfg.coder.z_loss, weight > 0, sums=sums["layers"])
        main, mtp = main / main_tokens, mtp / mtp_tokens
        return main + weight * mtp, {"main": main, "mtp": mtp}

    return loss_fn


def dream_loss(cfg, graph, batch, key, step, base):
    """loss_fn(params, micro, sums) -> (loss, {}) of Dream: the NELBO in nats per token that can be masked."""
    rows = math.prod(batch["token_ABL"].shape[:2])
    tokens = jnp.maximum(md.counted(batch["segment_ABL"], batch.get("fixed_ABL")).sum(), 1)

    def loss_fn(params, micro, sums):
        model = nnx.merge(graph, md.assemble(base, params))
        inputs = micro["token_ABL"], micro["segment_ABL"], micro["position_ABL"]
        if model.cfg.block_length:
            counted_BL = md.counted(inputs[1], micro.get("fixed_ABL"))
            noise = functools.partial(md.noise, key, rows, micro["row_AB"])
            return block_nats(cfg.dream, model, step, *inputs, counted_BL, noise) / tokens, {}
        noise, seen_1LL = md.noise(key, rows, micro["row_AB"], micro["segment_ABL"]), None
        if cfg.dream.anneal_steps:  # one draw for all rows and layers
            u_LL = jax.random.uniform(jax.random.fold_in(key, rows), (inputs[0].shape[1],) * 2)
            seen_1LL = diffusion.annealed(u_LL, jnp.minimum(1, (step + 1) / cfg.dream.anneal_steps))[None]
        nats = model.nelbo(*inputs, *noise, micro.get("fixed_ABL"), cfg.dream.schedule, seen_1LL)
        return nats / tokens, {}

    return loss_fn


def block_nats(dream, model, step, token_BL, segment_BL, position_BL, counted_BL, noise):
    """The nats of a micro-batch that a step of block diffusion, or of --objective=ar, makes smaller.

    noise is md.noise, that still needs the parts of a row which have a time of their own.
    """
    row, longest = (segment_BL, position_BL), model.cfg.block_length
    if longest == 1 and model.cfg.shift:  # --objective=ar
        return model.ar_nll(token_BL, counted_BL, *row).sum()
    # Blocks double in equal numbers of steps. Their length is an array, so that all lengths are one program.
    block = longest
    if dream.block_warmup:
        doublings = math.ceil(math.log2(longest))
        done = jnp.minimum(step * doublings // dream.block_warmup, doublings)
        block = jnp.minimum(2**done, longest)
    # A mask rate for each block; u decides for each token. A block of one token is masked: any other rate would only
    # add noise to the same expectation.
    u_BL, (low, high) = noise(md.parts(*row, block), eps=0.0), dream.rates
    if dream.rate_warmup:
        high = low + (high - low) * diffusion.highest_rate(step, dream.rate_warmup)
    least = jnp.maximum(1 / block if dream.least_one else 0.0, block == 1)
    t_BL, weight_BL = diffusion.block_noise(u_BL[0], low, high, least)
    mask_BL = counted_BL & (u_BL[1] < t_BL)
    if dream.least_one:
        mask_BL = diffusion.mask_one_at_least(mask_BL, counted_BL, u_BL[1], position_BL, block)
    weight_BL = jnp.where(step < dream.rate_warmup, 1.0, weight_BL)
    nats = (weight_BL * model.nll(token_BL, mask_BL, *row, block)).sum()
    if not dream.complement:
        return nats
    # High rates have no weights. Where t is 1 nothing is left to mask, and any weight will do.
    weight_BL = jnp.where(weight_BL == 1, 1.0, 1 / jnp.maximum(1 - t_BL, low))
    others = (weight_BL * model.nll(token_BL, counted_BL & ~mask_BL, *row, block)).sum()
    # Blocks of one token are all masked, and in the warm-up the others would be nearly all tokens.
    return jnp.where((block == 1) | (step < dream.rate_warmup), nats, (nats + others) / 2)


def make_step(cfg, graph, optimizer):
    """train_step(state, batch, step) -> (state, metrics), to be compiled once with the state donated."""
    dream = family_of(cfg) is md

    def train_step(state, batch, step):
        key = jax.random.fold_in(jax.random.key(cfg.seed), step)
        lr = wsd(step, cfg.lr, cfg.steps, cfg.warmup)
        loss_of = functools.partial(dream_loss, step=step, base=state.get("base", {})) if dream else coder_loss
        loss_fn = loss_of(cfg, graph, batch, key)
        A, B, _ = batch["token_ABL"].shape
        micros = batch | {"row_AB": jnp.arange(A * B).reshape(A, B)}
        gradients = accumulate if dream or A == 1 or cfg.reduce == "micro" or alone() else accumulate_apart
        grads, (loss, parts) = gradients(loss_fn, state["params"], micros, () if dream else ("layers",))
        state, norm, ok = apply_gradients(optimizer, state, grads, lr)
        return state, {"loss": loss, **parts, "lr": lr, "grad_norm": norm, "ok": ok}

    return train_step


METRICS = "loss", "main", "mtp", "lr", "grad_norm", "ok"  # in the order of the log; jit returns them sorted
EVAL_DRAWS = 4  # passes over each held-out row that bound Dream's likelihood


def make_evaluate(cfg, graph, rows):
    """evaluate(params, batch, row_B, bytes_V) -> nats, predicted tokens and their bytes, summed over held-out rows.

    Of Dream the nats are a bound: the NELBO at EVAL_DRAWS noise levels a row, the same each time; with blocks of at
    most md.EXACT_BLOCK tokens without a draw.
    """

    def coder(params, batch, row_B, bytes_V):
        token_BL, segment_BL, position_BL = (batch[k][0] for k in ("token_ABL", "segment_ABL", "position_ABL"))
        nats, _ = nnx.merge(graph, params).losses(token_BL, segment_BL, position_BL, mtp=False)
        mask_BL, _ = pc.target_masks(segment_BL)
        return nats, mask_BL.sum(), (mask_BL * bytes_V[jnp.roll(token_BL, -1, 1)]).sum()

    def dream(params, batch, row_B, bytes_V):
        model, batch = nnx.merge(graph, params), {name: x[0] for name, x in batch.items()}
        token_BL, segment_BL, fixed_BL = batch["token_ABL"], batch["segment_ABL"], batch.get("fixed_ABL")

        row, block = (segment_BL, batch["position_ABL"]), model.cfg.block_length

        def bound(draw):
            noise = md.noise(jax.random.key(draw), rows, row_B, md.parts(*row, block or None))
            return model.nelbo(token_BL, *row, *noise, fixed_BL, schedule=cfg.dream.schedule)

        mask_BL = md.counted(segment_BL, fixed_BL)
        if 0 < block <= md.EXACT_BLOCK:
            nats = model.exact_nll(token_BL, *row, fixed_BL).sum()
        else:
            nats = jax.lax.map(bound, jnp.arange(EVAL_DRAWS)).mean()
        return nats, mask_BL.sum(), (mask_BL * bytes_V[token_BL]).sum()

    return dream if family_of(cfg) is md else coder


def lower_step(cfg, graph, optimizer, shapes, mesh, columns=3):
    """The train step, traced for a mesh that need not be here; .compile() makes the program."""
    rows = cfg.micro_batch * mesh.size // cfg.tensor  # of a micro-batch, on all devices together
    shape = (cfg.batch_size // rows, rows, cfg.seq_len)
    row = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PS(None, ("data", "fsdp"))))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PS()))
    layout = jax.tree.map(lambda s: s.sharding, shapes)
    train_step = jax.jit(make_step(cfg, graph, optimizer), donate_argnums=0, out_shardings=(layout, None))
    with jax.set_mesh(mesh):
        return train_step.lower(shapes, dict.fromkeys(COLUMNS[:columns], row), step)


# ---- the run -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trainer:
    """A run in memory. Only `state` changes with the steps."""

    cfg: Config  # every setting filled in
    model: pc.Config | md.DreamConfig
    run: pc.Run | md.Run
    mesh: jax.sharding.Mesh
    train: Rows
    heldout: Rows
    tokenizer: tokenizers.Tokenizer
    state: dict | None = None  # {"params", "opt"}, with LoRA {"params": adapters, "opt", "base": what stays as it is}

    def __post_init__(self):
        self.family = family_of(self.cfg)
        # moments: bfloat16 mu saves 2 GiB of 23 at 1.08 B and costs nothing measurable; nu stays float32
        self.optimizer = make_optimizer(
            self.cfg.clip, self.cfg.weight_decay, self.run.dtype, muon=self.cfg.optimizer == "muon"
        )
        self.shapes = self.shapes_with(self.cfg.dream.lora_rank)
        if self.cfg.dream.lora_rank:  # which weights the adapters belong to
            self.base_sums = checkpoints.find_weights(checkpoints.absolute(self.cfg.dream.init))[1]["sums"]
        self.rows_at = NamedSharding(self.mesh, PS(None, self.family.BATCH))
        self.micro_rows = self.cfg.micro_batch * self.mesh.size // self.cfg.tensor  # on all devices together
        self.scored = min(self.heldout.total, self.cfg.eval_rows)
        plain = {"remat": "none"} | ({"dropout": 0.0} if self.family is pc else {})
        graph = self.family.graph_of(self.model, dataclasses.replace(self.run, **plain))
        self.evaluate = jax.jit(make_evaluate(self.cfg, graph, self.scored))
        self.bytes_V = jnp.asarray(token_bytes(self.tokenizer, self.model.vocab))

    def shapes_with(self, lora_rank):
        """The shapes of a state of this run, with LoRA or without."""
        return checkpoints.state_shapes(self.family, self.model, self.optimizer, self.mesh, lora_rank, self.run.dtype)

    def check_memory(self):
        """ValueError, before any weight is read, if a device has less memory than it has to hold."""

        def needed(lora_rank):  # what is trained, its moments and gradients; with LoRA the weights beside it
            shapes = self.shapes_with(lora_rank)
            return sum(map(checkpoints.bytes_on_a_device, (shapes, shapes["params"])))

        dream = self.cfg.dream
        smaller = {"--lora_rank=16": needed(16)} if dream.init and not dream.lora_rank else {}
        checkpoints.check_memory(self.mesh, needed(dream.lora_rank), smaller)

    def meta(self, step, skipped):
        """What a checkpoint says of itself."""
        settings = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.cfg)}
        settings |= {"data": self.train.meta["fingerprint"], "step": step, "skipped": skipped}
        return settings | ({"base": self.base_sums} if self.cfg.dream.lora_rank else {})

    def begin(self, store):
        """Fill the state: the newest checkpoint of --resume, the weights of --init, or new ones. (step, skipped)."""
        cfg = self.cfg
        if cfg.resume and checkpoints.absolute(cfg.resume) != store.folder:
            store = checkpoints.Checkpoints(cfg.resume)
        if cfg.resume and store.newest() is not None:
            saved, ours = store.meta(), self.meta(0, 0)
            path = f"{cfg.resume}/checkpoints/{store.newest()}"
            theirs = dataclasses.asdict(self.family.read_config(path, saved))  # a field that is new has its value
            rank = {"--lora_rank": saved["train"].get("dream", {}).get("lora_rank", 0)}
            runs.check_same(theirs | rank, ours["model"] | {"--lora_rank": cfg.dream.lora_rank}, path)
            if saved.get("base") != ours.get("base"):
                raise ValueError(f"{cfg.dream.init} holds other weights than those that {cfg.resume} began with")
            if saved["data"] != ours["data"]:
                advice = "pass its --data, or start anew with another --out"
                raise ValueError(f"{cfg.resume} was trained on other data; {advice}")
            base = {"base": self.read_init(self.run.dtype)} if cfg.dream.lora_rank else {}
            restored = store.restore(self.saved(self.shapes))
            opt, (params,) = restored.pop("opt"), restored.values()
            self.state = {"params": params, "opt": opt} | base
            print(f"resuming {cfg.resume} after step {saved['step']}")
            return saved["step"], saved["skipped"]
        if cfg.resume:
            print(f"{cfg.resume} stopped before its first checkpoint: starting at step 0 with its settings")
        layout = jax.tree.map(lambda s: s.sharding, self.shapes)
        base, key = {}, jax.random.fold_in(jax.random.key(cfg.seed), 1 << 20)
        if cfg.dream.lora_rank:
            base = {"base": self.read_init(self.run.dtype)}
            new = functools.partial(md.new_adapters, key, self.shapes["base"], cfg.dream.lora_rank)
            params = jax.jit(new, out_shardings=layout["params"])()
        elif cfg.dream.init:
            params = self.read_init(jnp.float32)
        else:  # born split over the mesh: no device ever holds all of them
            params = jax.jit(lambda: self.family.new_params(self.model, cfg.seed), out_shardings=layout["params"])()
        opt = jax.jit(self.optimizer.init, out_shardings=layout["opt"])(params)
        self.state = {"params": params, "opt": opt} | base
        return 0, 0

    def read_init(self, dtype):
        """The weights of --init."""
        return nnx.to_pure_dict(nnx.state(checkpoints.load(md, self.cfg.dream.init, dtype=dtype, mesh=self.mesh)[0]))

    def weights(self):
        """The parameters of the model as it is now."""
        return md.assemble(self.state.get("base", {}), self.state["params"])

    def saved(self, state):
        """Of a state what a checkpoint holds; adapters are no model, so checkpoints.load must not find "params"."""
        return {"adapters" if "base" in state else "params": state["params"], "opt": state["opt"]}

    def batch(self, step):
        """The rows of a step on the mesh: those of its place in the epoch's order, cut into micro-batches."""
        size = self.cfg.batch_size
        epoch, i = divmod(step, self.train.total // size)
        ids = self.train.order(self.cfg.seed, epoch)[i * size : (i + 1) * size]
        return to_devices(self.train, ids.reshape(-1, self.micro_rows), self.rows_at)

    def compile(self):
        """The program of a step."""
        started = time.perf_counter()
        print("compiling the train step", flush=True)
        graph = self.family.graph_of(self.model, self.run)
        columns = len(self.train.columns)
        step = lower_step(self.cfg, graph, self.optimizer, self.shapes, self.mesh, columns).compile()
        print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
        return step

    def score(self):
        """Mean nats per held-out token and bits per byte, over eval_rows rows, of all parts."""
        ids = np.full(-(-self.scored // self.micro_rows) * self.micro_rows, -1)  # -1 is an empty row: whole batches
        ids[: self.scored] = self.heldout.spread(self.scored)
        sums = np.zeros(3)
        for part in ids.reshape(-1, 1, self.micro_rows):
            with jax.set_mesh(self.mesh):
                batch = to_devices(self.heldout, part, self.rows_at)
                sums += [float(x) for x in self.evaluate(self.weights(), batch, part[0], self.bytes_V)]
        if not self.scored:
            return {}
        nats, tokens, size = sums
        return {"heldout_nats": nats / tokens, "bits_per_byte": nats / math.log(2) / size}

    def sample(self, folder, step):
        """Continue --prompt and append the text to samples.txt; returns the row's tokens per forward pass."""
        if jax.process_count() > 1:  # one host does not hold the whole model
            return {}
        vocab, eos = self.train.meta["vocab_size"], self.train.meta["eos_id"]
        lm = nnx.merge(self.family.graph_of(self.model, self.family.Run(self.run.dtype)), self.weights())
        prompt, key = self.tokenizer.encode(self.cfg.prompt, add_special_tokens=False).ids, jax.random.key(0)
        new = min(64, self.model.positions - len(prompt))
        if self.family is md:
            sampler = sample_block if self.model.block_length else sample_dream
            rule = sampler.Sampling(vocab=vocab, eos_ids=(eos,))
            (row,), stats = sampler.generate(lm, [prompt], new, rule, key)
            text, tokens = row[len(prompt) :], new
        else:
            rule = pc.Sampling(vocab=vocab, eos=eos, speculate=self.model.mtp)
            (text,), stats = pc.generate(lm, [prompt], new, rule, key)
            tokens = stats["tokens"]
        folder.append_text("samples.txt", f"---- step {step}\n{self.cfg.prompt}{self.tokenizer.decode(text)}\n")
        return {"tokens_per_forward": tokens / stats["forwards"]}


class Meter:
    """Speed between two rows of the log, and steps without a finite gradient."""

    def __init__(self, cfg, model, run, mesh, step, skipped):
        self.cfg, self.skipped, self.bad = cfg, skipped, 0  # bad: how many of them in a row
        self.tokens = cfg.batch_size * cfg.seq_len
        self.flops = step_flops(cfg, model) / mesh.size  # a device
        self.peak, source = peak_flops(jax.devices()[0], run.dtype)
        print(f"peak {self.peak / 1e12:.3g} TFLOP/s a device ({source}), a step is {self.flops / 1e12:.3g} TFLOP")
        self.restart(step)

    def restart(self, step):
        self.step, self.started, self.waited_s = step, time.perf_counter(), 0.0

    def count(self, ok, waited_s):
        self.bad = 0 if ok else self.bad + 1
        self.skipped += not ok
        self.waited_s += waited_s

    def row(self, step):
        """Tokens per second, share of the device's peak, share of the time without a batch, minutes to go."""
        elapsed = time.perf_counter() - self.started
        rate = (step - self.step) / elapsed
        row = {"tok_per_s": rate * self.tokens, "mfu": rate * self.flops / self.peak, "wait": self.waited_s / elapsed}
        self.restart(step)
        return row | {"eta_min": (self.cfg.steps - step) / rate / 60, "skipped": self.skipped}


def connect(cfg):
    """Join the other hosts, and find compiled programs of earlier runs."""
    checkpoints.join_hosts(cfg.hosts)
    if cfg.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(cfg.compile_cache).expanduser()))
    if cfg.device:
        jax.config.update("jax_platforms", cfg.device)
    elif checkpoints.idle_accelerator():
        raise ValueError(f"{checkpoints.idle_accelerator()}; or train on the CPU with --device=cpu")


def prepare(cfg):
    """(Trainer, files of the run's folder, steps of an epoch): what was left open is chosen by data and devices."""
    if cfg.dream.lora_rank and (cfg.dream.lora_rank < 0 or not cfg.dream.init or cfg.hosts or "://" in cfg.out):
        raise ValueError("--lora_rank is above 0, goes with --init, on one host, and with --out on its own disk")
    train, heldout, tokenizer_json = find_data(cfg)
    cfg, model, run, mesh = resolve(cfg, jax.devices(), train.meta)
    check_data(cfg, train)
    if cfg.dream.init:
        tokenizer_json = known_ids(cfg.resume or cfg.dream.init, model, train.meta, tokenizer_json)
    elif family_of(cfg) is md:
        model, tokenizer_json = with_mask(model, train.meta, tokenizer_json)
    if train.meta.get("settings", {}).get("edit_rate"):
        model = with_expand(cfg, model, tokenizer_json)
    cfg, per_epoch = plan(cfg, model, train)
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    # The chat template, its tokens and the model's own code: those of --init, else of the data.
    found = [checkpoints.companions(folder) for folder in (cfg.dream.init, train.folder) if folder]
    files = next((files for files in found if files.keys() - {"tokenizer.json"}), {})
    files |= {"tokenizer.json": tokenizer_json}
    trainer = Trainer(cfg, model, run, mesh, train, heldout, tokenizer)
    trainer.check_memory()
    return trainer, files, per_epoch


def host_0_says(value):
    """Whether it is so on host 0: what depends on a clock has to be decided once."""
    return bool(multihost_utils.broadcast_one_to_all(value)) if jax.process_count() > 1 else value


def main(cfg):
    connect(cfg)
    trainer, files, per_epoch = prepare(cfg)
    asked, cfg = cfg, trainer.cfg
    with runs.Run(cfg, rank=jax.process_index(), hosts=jax.process_count()) as folder:
        settings = trainer.meta(0, 0)
        settings["train"] = {name: value for name, value in settings["train"].items() if name not in OF_A_HOST}
        checkpoints.check_hosts(folder.out, settings)
        store = checkpoints.Checkpoints(folder.out, cfg.keep, best="heldout_nats" if trainer.scored else "")
        first, skipped = trainer.begin(store)
        # The length is written as it was asked for: a resumed run may be given more --epochs or --steps.
        settings = {"train": dataclasses.asdict(cfg) | {"steps": asked.steps}}
        settings |= {"model": dataclasses.asdict(trainer.model), "data": str(trainer.train.folder)}
        source = ""
        if cfg.dream.init:  # the name by which generate.py knows a chat model
            source = runs.read_json(runs.as_path(cfg.resume or cfg.dream.init) / "config.json").get("source", "")
            settings["source"] = source
        folder.begin(first, settings, files)
        if first < cfg.steps:
            train(folder, store, trainer, first, skipped, per_epoch)
        else:
            print(f"{cfg.out} has all of its {cfg.steps:,} steps; more with --epochs or --steps")
        store.close()
        model = cfg.out
        if cfg.dream.lora_rank:
            graph = md.graph_of(trainer.model, md.Run())
            params = md.merge_adapters(trainer.state["base"], trainer.state["params"])
            model = folder.out / "merged"
            shutil.rmtree(model, ignore_errors=True)  # of a run that goes on
            checkpoints.save(md, model, nnx.merge(graph, params), [folder.out / name for name in files], source)
    flags = f"--model=dream --ckpt={model}" if family_of(cfg) is md else f"--ckpt={model}"
    print(f"done: {model}; write code with: python generate.py {flags}")


def train(folder, store, trainer, first, skipped, per_epoch):
    """The steps after `first`."""
    cfg, train_step = trainer.cfg, trainer.compile()
    epoch_ends = range(per_epoch, cfg.steps + 1, per_epoch)
    meter, saved = Meter(cfg, trainer.model, trainer.run, trainer.mesh, first, skipped), time.monotonic()
    for step, batch, waited_s in prefetch(trainer.batch, first, cfg.steps):
        # One program: gradients of all micro-batches, clipping, AdamW. The new state takes the old one's memory.
        trainer.state, metrics = train_step(trainer.state, batch, jnp.int32(step))
        metrics = {name: float(metrics[name]) for name in METRICS if name in metrics}  # waits for the step
        done = step + 1

        # A gradient that is not finite leaves the state as it was: one may be bad luck, five are a bad setting.
        meter.count(metrics.pop("ok"), waited_s)
        if meter.bad == 5:
            left = f"step {store.newest() or 0}, with a lower --lr"
            raise RuntimeError(f"no finite gradient in five steps, the last {done}; go on from {left}")
        late = False
        if done % cfg.log_every == 0 or done == cfg.steps or meter.bad:
            folder.log({"step": done, **metrics, **meter.row(done)})
            late = host_0_says(0 < 60 * cfg.save_minutes < time.monotonic() - saved)

        # Held-out rows and a sample; the checkpoint is written while the next steps run.
        evaluates = done % cfg.eval_every == 0 or done in epoch_ends or done == cfg.steps
        stops = folder.signal or store.preempted(done)  # SIGTERM or Ctrl-C, to any host
        if evaluates or late or stops:
            scores = trainer.score() if evaluates else None
            store.save(done, trainer.saved(trainer.state), trainer.meta(done, meter.skipped), scores or None)
            saved = time.monotonic()
        if evaluates:
            folder.log({"step": done, **scores, **trainer.sample(folder, done)})
            meter.restart(done)  # their time is not the steps'
        if stops:
            store.close()
            jax.distributed.shutdown()  # waits for the other hosts, until all have saved
            folder.leave(done)


if __name__ == "__main__":
    runs.command(main, Config, __doc__, MACHINE)
