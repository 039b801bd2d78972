"""Train PythonCoder on Python source, on whatever JAX finds: a TPU chip, a pod, GPUs or a CPU.

    python train_tpu.py --steps=50 --out=out/try        # CPU: the tiny preset for two minutes, to see it work
    python train_tpu.py                                 # four epochs over the standard library: the tiny preset
    python train_tpu.py --resume=out/train_tpu          # continues a stopped run with its own settings
    python train_tpu.py --data=data/mine --model=300m   # rows that data_prep.py wrote
    python train_tpu.py --eval_only=out/train_tpu       # held-out bits per byte beside xz -9, accepted draft tokens

Reads a folder of packed rows from data_prep.py; without --data it first prepares the standard
library of the running Python. Writes --out: config.json, tokenizer.json, log.jsonl, samples.txt,
checkpoints/<step>/. Whether a model fits a TPU that is not here: bench/compile_for.py.
train_dream.py trains Dream.

One optimizer step is one compiled program: a scan over micro-batches, each a scan over layers. The
gradient is that of (sum of token losses) / (all valid tokens of the step), whatever the
micro-batches. Row order, dropout and learning rate are functions of (seed, step), so a checkpoint
holds parameters, moments and the step alone.

Letters: A micro-batches of a step, B rows of a micro-batch, L length, V vocabulary.
"""

import dataclasses
import functools
import lzma
import math
import sys
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as PS

import checkpoints
import model_pythoncoder as pc
import runs
from rows import held_out, open_data, prefetch, token_bytes
from runs import Count, Natural, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of rows from data_prep.py; default: the Python standard library, prepared under data/
    data: str = ""
    out: str = "out/train_tpu"  # folder of the run
    # folder of a run to continue, with its settings, not those of devices (--fsdp, --hosts, ..)
    resume: str = ""
    eval_only: str = ""  # folder of a model to score on held-out rows, instead of training
    # preset, see CONFIGS in model_pythoncoder.py; default: the largest that memory and data allow
    model: str = ""
    # floored | as published | DIFF V2 | plain attention
    diff: typing.Literal["seed", "paper", "v2", "none"] = "seed"
    # of new matrices: by fan-in | 0.02; default: the preset's
    init_std: typing.Literal["", "fan_in", "paper"] = ""
    # of attention output, feed-forward hidden and output; default: 0.1, small models 0
    dropout: typing.Annotated[float, (0, 0.99)] | None = None
    # weight of the multi-token-prediction loss (the token after the next)
    mtp_weight: NonNegative = 0.1
    # tokens per row; 0: that of the data, else the model's positions, at most 2048
    seq_len: Natural = 0
    # rows of a step, all devices; 0: 8,192 to 131,072 tokens by the data, 4,096 on a CPU
    batch_size: Natural = 0
    epochs: Positive = 4.0  # passes over the training rows; sets --steps
    steps: Natural = 0  # optimizer steps; 0: from --epochs
    lr: NonNegative = 0.0  # peak learning rate; 0: 3e-4 sqrt(1.5e9 / parameters), at most 3e-3
    warmup: Natural = 0  # steps of linear warm-up; 0: 2000, or a tenth of a shorter run
    optimizer: typing.Literal["", "adamw", "muon"] = ""  # default: muon below 100 M parameters
    weight_decay: NonNegative = 0.1  # of matrices; with adamw of embeddings, too
    clip: Positive = 1.0  # maximum global gradient norm
    # of the computation; parameters are float32
    dtype: typing.Literal["", "bfloat16", "float32"] = ""
    micro_batch: Natural = 0  # rows per device and forward pass; 0: by model and memory
    fsdp: Natural = 0  # devices that share one copy of the weights; 0: all devices / --tensor
    tensor: Count = 1  # devices that share each layer's heads, feed-forward and vocabulary
    # "cpu": train on the CPU even if the machine has an accelerator
    device: typing.Literal["", "cpu"] = ""
    # "auto" on TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX of this process; default: one host
    hosts: str = ""
    log_every: Count = 10  # steps between rows of the log
    # steps between evaluations, each with a sample and checkpoint; 0: steps / 10, 50 to 1000
    eval_every: Natural = 0
    eval_rows: Count = 512  # held-out rows per evaluation, at most
    # minutes between checkpoints, checked when it logs; 0: only at evaluations
    save_minutes: NonNegative = 30.0
    keep: Count = 2  # newest checkpoints to keep, besides the best
    prompt: str = "def read_lines(path):\n"  # prefix of the samples drawn in training
    wandb: str = ""  # project name at Weights & Biases; default: log to files only
    compile_cache: str = "~/.cache/unmask"  # folder of compiled programs; "" compiles anew
    seed: Natural = 0  # initial weights, row order, dropout


# Settings that may differ between hosts, and those that --resume does not take from the run.
OF_A_HOST = ("hosts", "data", "out", "resume", "wandb", "compile_cache")
MACHINE = ("device", "hosts", "fsdp", "tensor")
COLUMNS = "token_ABL", "segment_ABL", "position_ABL"  # of a batch
# of a step, in the order of the log; jit returns them sorted
METRICS = "loss", "main", "mtp", "lr", "grad_norm", "ok"


# ---- choices for the device, and data ------------------------------------------------------------------------------

# Rows per device at a time. Few: on a v6e four keep the activations in VMEM, on a CPU (tiny, small)
# in its caches.
MICRO_BATCH = {"tiny": 2, "small": 4, "300m": 8, "1b": 4}
# GiB of a step by preset and rows per device at a time: the most of the devices that
# bench/compile_for.py compiled it for, see bench/results/by_hardware.json. That of small on a GPU
# is a TPU's.
STEP_GIB = {
    "tpu": {"small": {4: 1.0}, "300m": {8: 8.4}, "1b": {4: 22.6}},
    "gpu": {"small": {4: 1.0}, "300m": {8: 9.4}, "1b": {1: 17.8, 4: 19.1}},
}
# A preset is picked if its step fits a device and the run feeds it: with fewer tokens a smaller
# model ends better.
TOKENS_PER_PARAMETER = 4


def fused_kernel(device, dtype):
    """Whose fused attention trains on a device: "tpu", "gpu" or "" (none).

    cuDNN has it in 16 bits from compute capability 8.0 on; an older GPU has no bfloat16.
    """
    if device.platform != "gpu" or dtype != "bfloat16":
        return "tpu" if device.platform == "tpu" else ""
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]  # 8.9; of AMD's a name
    return "gpu" if major in ("8", "9", "10", "12") else ""


def most_rows(name, devices, memory):
    """Rows at a time that fit the memory in GiB of each of `devices`, which share the weights;
    infinite: unknown.
    """
    recorded = STEP_GIB.get(devices[0].platform, {}).get(name)
    if not recorded:
        return math.inf
    params = pc.count_params(pc.CONFIGS[name])["total"]
    # weights, moments and gradients on other devices
    shared_gib = 14 * params / 2**30 * (1 - 1 / len(devices))
    return max((rows for rows, gib in recorded.items() if gib - shared_gib <= memory), default=0)


def pick_model(cfg, devices, data=None, memory=None):
    """(name of the preset, architecture): --model, or the largest preset that memory and data
    allow.

    It has the data's number of ids if the preset has fewer, or twice as many, and positions for a
    row.
    """
    name, memory = cfg.model or "tiny", memory or checkpoints.device_memory_gib(devices[0]) or 0
    for larger in STEP_GIB.get(devices[0].platform, ()) if not cfg.model else ():
        params = pc.count_params(pc.CONFIGS[larger])["total"]
        fed = (
            not data
            or cfg.epochs * data["splits"]["train"]["tokens"] >= TOKENS_PER_PARAMETER * params
        )
        if fed and most_rows(larger, devices[: cfg.fsdp * cfg.tensor or None], memory):
            name = larger
    if name not in pc.CONFIGS:
        raise ValueError(
            f"--model={name}: not one of {', '.join(pc.CONFIGS)}; train_dream.py trains Dream"
        )
    model = pc.CONFIGS[name]
    if cfg.diff == "v2" and model.heads // model.kv_heads % 2:
        raise ValueError(
            f"--diff=v2 needs an even number of heads per key head, not {name}'s: choose another --model"
        )
    fits = not data or data["vocab_size"] <= model.vocab < 2 * data["vocab_padded"]
    ids = model.vocab if fits else data["vocab_padded"]
    positions = data["seq_len"] if data else cfg.seq_len or model.positions
    differs = {
        "diff": cfg.diff,
        "init_std": cfg.init_std or model.init_std,
        "mtp": model.mtp and cfg.mtp_weight > 0,
    }
    return name, dataclasses.replace(model, vocab=ids, positions=positions, **differs)


def row_length(cfg, model, data=None):
    """Tokens of a row: --seq_len, or that of the data, or what suits the model."""
    return cfg.seq_len or (data["seq_len"] if data else min(model.positions, 2048))


def pick_batch(cfg, seq_len, copies, on_cpu, data=None, fitting=math.inf):
    """(rows of a step, rows per device at a time); `copies` devices hold different rows."""
    # Short runs take smaller steps: two thousand of them rather than sixty.
    seen = cfg.epochs * data["splits"]["train"]["tokens"] if data else math.inf
    tokens = 4096 if on_cpu else 2 ** int(math.log2(np.clip(seen / 2000, 8192, 131_072)))
    batch = cfg.batch_size or max(1, tokens // seq_len // copies) * copies
    rows = batch // copies
    # the tables count rows of the preset's length
    length = min(1, pc.CONFIGS[cfg.model].positions / seq_len)
    most = min(rows, max(1, int(length * min(MICRO_BATCH.get(cfg.model, 1), fitting))))
    micro = cfg.micro_batch or max((m for m in range(1, most + 1) if rows % m == 0), default=1)
    if batch % (copies * micro):
        raise ValueError(
            f"--batch_size={batch} does not divide over {copies} devices times --micro_batch={micro}"
        )
    return batch, micro


def resolve(cfg, devices, data=None, memory=None):
    """(cfg with its defaults filled in, architecture, pc.Compute, mesh), by the devices and the data;
    printed.

    data is the meta.json of the rows; None stands for endless data. memory is that of a device in
    GiB, where JAX cannot ask it.
    """
    device = devices[0]
    memory = memory or checkpoints.device_memory_gib(device)
    on_cpu = memory is None
    name, model = pick_model(cfg, devices, data, memory)
    cfg = dataclasses.replace(cfg, model=name)
    fitting = most_rows(name, devices[: cfg.fsdp * cfg.tensor or None], memory)
    seq_len = row_length(cfg, model, data)
    batch, micro = pick_batch(
        cfg, seq_len, max(1, len(devices) // cfg.tensor), on_cpu, data, fitting
    )
    mesh = checkpoints.training_mesh(cfg, model, devices)
    dtype = cfg.dtype or ("float32" if on_cpu else "bfloat16")
    # Else a TPU would multiply float32 in bfloat16, a GPU in TF32.
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)

    # Small models have seen too little to need dropout.
    params = pc.count_params(model)["total"]
    small = params < 1e8
    dropout = cfg.dropout if cfg.dropout is not None else 0.0 if small else 0.1
    optimizer = cfg.optimizer or ("muon" if small else "adamw")
    resolved = {"dropout": dropout, "optimizer": optimizer, "dtype": dtype}
    cfg = dataclasses.replace(cfg, seq_len=seq_len, batch_size=batch, micro_batch=micro, **resolved)
    # queries of attention at a time: scores that stay in a CPU's caches
    block = 64 if on_cpu else 128
    kernel, tpu = fused_kernel(device, dtype), device.platform == "tpu"
    run = pc.Compute(
        jnp.dtype(dtype), remat="qkvo", block=block, kernel=kernel, tpu=tpu, dropout=dropout
    )

    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    where = "CPU" if on_cpu else f"{memory:.1f} GiB each"
    accumulated = batch * cfg.tensor // mesh.size // micro
    attention = f", attention by the {kernel} kernel" if kernel else ""
    print(f"{len(devices)} x {device.device_kind} ({where}): mesh {axes}")
    print(f"model {name}, {dtype} compute on float32 weights{attention}")
    print(
        f"a step is {batch} rows of {seq_len} = {batch * seq_len:,} tokens, {accumulated} x {micro} rows a device"
    )
    return cfg, model, run, mesh


def plan(cfg, model, rows):
    """(cfg with steps, lr, warmup, eval_every; the larger of an epoch's steps and eval_every).
    Prints the plan.
    """
    counts = pc.count_params(model)
    # Length: whole epochs, unless --steps says otherwise.
    per_epoch = rows.total // cfg.batch_size
    steps = cfg.steps or max(1, round(cfg.epochs * per_epoch))
    # Small models bear larger steps.
    lr = cfg.lr or float(np.clip(3e-4 * math.sqrt(1.5e9 / counts["total"]), 1e-4, 3e-3))
    warmup = cfg.warmup or min(2000, max(1, steps // 10))
    # Evaluations divide an epoch evenly, so that its end is one of them.
    evals = max(1, round(per_epoch / min(1000, max(50, steps // 10))))  # in an epoch
    eval_every = cfg.eval_every or math.ceil(per_epoch / evals)
    cfg = dataclasses.replace(cfg, steps=steps, lr=lr, warmup=warmup, eval_every=eval_every)
    data, seen = rows.meta["splits"]["train"]["tokens"], steps * cfg.batch_size * cfg.seq_len
    print(", ".join(f"{part} {n:,}" for part, n in counts.items()) + " parameters")
    print(
        f"{steps:,} steps of {seen // steps:,} tokens = {steps / per_epoch:.2f} epochs of {data:,} tokens"
    )
    print(
        f"{seen / counts['total']:.1f} tokens per parameter; {cfg.optimizer}, peak learning rate {lr:.3g}"
    )
    return cfg, max(per_epoch, eval_every)


def step_flops(cfg, model):
    """Training FLOPs of a step, of all devices together, without what remat computes again."""
    return pc.flops_per_token(model, cfg.seq_len) * cfg.batch_size * cfg.seq_len


def find_data(cfg):
    """(training rows, held-out rows, tokenizer.json); without --data those of the standard library,
    prepared first.
    """
    if cfg.data:
        return open_data(cfg.data, cfg.seq_len)
    if cfg.hosts:
        raise ValueError(
            "several hosts need the same data: write it with data_prep.py and pass --data"
        )
    _, model = pick_model(cfg, jax.devices())
    seq_len, vocab = row_length(cfg, model), min(model.vocab, 32_768)
    folder = Path(f"data/python-{seq_len}-{vocab}")
    if not (folder / "meta.json").exists():
        print(f"no --data: preparing the Python standard library in {folder}", flush=True)
        runs.script(
            "data_prep.py",
            "python",
            f"--out={folder}",
            f"--seq_len={seq_len}",
            f"--vocab_size={vocab}",
        )
    return open_data(folder, seq_len)


# ---- the compiled step ---------------------------------------------------------------------------------------------


def wsd(step, peak, steps, warmup=2000, stable=0.9, start=0.01, final=0.1):
    """Warmup-stable-decay learning rate of update `step` (0, 1, ...), float32.

    peak (start + (1 - start) s / warmup) while s < warmup; peak while s < D = int(stable steps);
    then with x = min(s - D, steps - D) / (steps - D): peak (final + (1 - final) (1 + cos(pi x)) /
    2), so final * peak after the end.
    """
    step, decay = jnp.asarray(step, jnp.float32), int(stable * steps)
    rising = start + (1 - start) * step / max(warmup, 1)
    x = jnp.clip((step - decay) / max(steps - decay, 1), 0, 1)
    falling = final + (1 - final) * (1 + jnp.cos(jnp.pi * x)) / 2
    return peak * jnp.where(step < warmup, rising, jnp.where(step < decay, 1.0, falling))


def decays(tree):
    """Weight decay mask, by name, as stacked norms have two axes: matrices and embeddings, no
    norms, no lambda_*.
    """
    names = {*pc.SHARDING, "w_lambda"}
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, tree)


def make_optimizer(clip, weight_decay, mu_dtype=None, mask=decays, muon=False):
    """Clip, then AdamW at learning rate 1: its updates are multiplied by the schedule of the step.

    muon: Muon for the layers' matrices, with updates of AdamW's size (arXiv:2502.16982); Adam
    without decay for embeddings, heads, norms and vectors.
    """
    clipping, settings = (
        optax.clip_by_global_norm(clip),
        {"weight_decay": weight_decay, "mu_dtype": mu_dtype},
    )
    if not muon:
        return optax.chain(clipping, optax.adamw(1.0, 0.9, 0.95, 1e-8, mask=mask, **settings))
    # The matrices of all layers are stacked, and each of a stack is orthogonalised by itself.
    matrices, axes = {*pc.SHARDING} - {"embed", "head"}, optax.contrib.MuonDimensionNumbers(-2, -1)

    def dimensions(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: axes if path[-1].key in matrices else None, tree
        )

    settings |= {"consistent_rms": 0.2, "adam_b2": 0.95}
    return optax.chain(
        clipping, optax.contrib.muon(1.0, muon_weight_dimension_numbers=dimensions, **settings)
    )


def accumulate(loss_fn, params, batches):
    """Sum of gradients and of outputs of loss_fn(params, batch, sums) -> (loss, aux) over the
    leading axis of batches.

    `sums` are the gradients of the layers so far. The model's backward pass adds to them, and
    returns the new sums as the gradient of `sums`; all other gradients are added here.
    """
    layers, rest = (
        params["layers"],
        {name: value for name, value in params.items() if name != "layers"},
    )

    def loss_of(rest, sums, batch):
        return loss_fn(rest | {"layers": layers}, batch, sums)

    def body(carry, batch):
        outs, rest_sums, sums = carry
        new, (grads, sums) = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(rest, sums, batch)
        return (
            jax.tree.map(jnp.add, outs, new),
            jax.tree.map(jnp.add, rest_sums, grads),
            sums,
        ), None

    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(loss_of, rest, layers, first), rest, layers
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (outs, rest_sums, sums), _ = jax.lax.scan(body, zeros, batches)
    return rest_sums | {"layers": sums}, outs


def accumulate_apart(loss_fn, params, batches):
    """accumulate() with one reduction over devices a step, not one a micro-batch.

    Each device sums the gradients of its own rows, so it holds whole float32 weights and gradients.
    """
    own = set(pc.BATCH)

    def of_own_rows(params, batches):
        grads, outs = accumulate(loss_fn, params, batches)
        return jax.tree.map(lambda g: g[None], grads), jax.lax.psum(outs, tuple(own))

    rows = PS(None, pc.BATCH)
    specs = {
        "in_specs": (PS(), rows),
        "out_specs": (PS(pc.BATCH), PS()),
        "axis_names": own,
        "check_vma": False,
    }
    grads, outs = jax.shard_map(of_own_rows, **specs)(params, batches)
    # laid out as the parameters: scattered, not copied
    return jax.tree.map(lambda g: g.sum(0), grads), outs


def make_step(cfg, graph, optimizer, apart=False):
    """train_step(state, batch, step) -> (state, metrics), to be compiled once with the state
    donated. apart: gradients by accumulate_apart, where several devices hold rows.
    """

    def train_step(state, batch, step):
        key = jax.random.fold_in(jax.random.key(cfg.seed), step) if cfg.dropout else None
        main_tokens, mtp_tokens = (
            jnp.maximum(mask.sum(), 1) for mask in pc.target_masks(batch["segment_ABL"])
        )

        def loss_fn(params, micro, sums):  # in nats per target of the whole step
            inputs = (
                micro["token_ABL"],
                micro["segment_ABL"],
                micro["position_ABL"],
                key,
                micro["row_AB"],
            )
            main, mtp = nnx.merge(graph, params).losses(*inputs, mtp=cfg.mtp_weight > 0, sums=sums)
            main, mtp = main / main_tokens, mtp / mtp_tokens
            return main + cfg.mtp_weight * mtp, {"main": main, "mtp": mtp}

        A, B, _ = batch["token_ABL"].shape
        micros = batch | {"row_AB": jnp.arange(A * B).reshape(A, B)}
        mesh = jax.sharding.get_abstract_mesh()
        # rows over devices
        split = not mesh.empty and math.prod(mesh.shape[axis] for axis in pc.BATCH) > 1
        gradients = accumulate_apart if split and A > 1 and apart else accumulate
        grads, (loss, parts) = gradients(loss_fn, state["params"], micros)

        # The update, which a gradient that is not finite leaves out.
        lr, norm = wsd(step, cfg.lr, cfg.steps, cfg.warmup), optax.tree.norm(grads)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params, ok = (
            jax.tree.map(lambda p, u: p + lr * u, state["params"], updates),
            jnp.isfinite(norm),
        )
        state = jax.tree.map(
            lambda old, new: jnp.where(ok, new, old), state, {"params": params, "opt": opt}
        )
        return state, {"loss": loss, **parts, "lr": lr, "grad_norm": norm, "ok": ok}

    return train_step


def lower_step(cfg, graph, optimizer, shapes, mesh, memory=None):
    """The train step, traced for a mesh that need not be here; .compile() makes the program.

    Gradients are summed over devices once a step where a third of a device's memory, in GiB, holds
    whole float32 weights and gradients.
    """
    memory = memory or checkpoints.device_memory_gib(mesh.devices.flat[0]) or math.inf
    whole = 8 * sum(x.size for x in jax.tree.leaves(shapes["params"]))
    apart = whole / 2**30 <= memory / 3
    rows = cfg.micro_batch * mesh.size // cfg.tensor  # of a micro-batch, on all devices together
    shape = (cfg.batch_size // rows, rows, cfg.seq_len)
    row = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PS(None, pc.BATCH)))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PS()))
    layout = jax.tree.map(lambda s: s.sharding, shapes)
    train_step = jax.jit(
        make_step(cfg, graph, optimizer, apart), donate_argnums=0, out_shardings=(layout, None)
    )
    with jax.set_mesh(mesh):
        return train_step.lower(shapes, dict.fromkeys(COLUMNS, row), step)


# ---- scores --------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def sums_of(graph, params, token_ABL, segment_ABL, position_ABL, bytes_V):
    """[nats, predicted tokens, their bytes], summed over the rows of a batch."""
    token_BL, segment_BL, position_BL = token_ABL[0], segment_ABL[0], position_ABL[0]
    nats, _ = nnx.merge(graph, params).losses(token_BL, segment_BL, position_BL, mtp=False)
    mask_BL, _ = pc.target_masks(segment_BL)
    return jnp.stack([nats, mask_BL.sum(), (mask_BL * bytes_V[jnp.roll(token_BL, -1, 1)]).sum()])


def score(graph, params, heldout, count, size, mesh, bytes_V):
    """{"heldout_nats", "bits_per_byte"}: mean nats per token of `count` held-out rows, `size` rows
    at a time.
    """
    if not min(count, heldout.total):
        return {}
    rows_at = NamedSharding(mesh, PS(None, pc.BATCH))
    with jax.set_mesh(mesh):
        batches = (
            checkpoints.on_mesh(heldout, ids, rows_at) for ids in heldout.padded(count, size)
        )
        # pairs have a fourth column
        sums = [sums_of(graph, params, *columns[:3], bytes_V) for columns in batches]
    nats, tokens, text_bytes = sum(np.asarray(x, np.float64) for x in sums)
    return {"heldout_nats": nats / tokens, "bits_per_byte": nats / math.log(2) / text_bytes}


def evaluate(cfg):
    """--eval_only: print the scores of a model on held-out rows, beside `xz -9` on the same
    text.
    """
    folder = checkpoints.absolute(cfg.eval_only)
    heldout, tokenizer = held_out(folder, cfg.data)
    ids = heldout.spread(cfg.eval_rows)
    mesh = checkpoints.inference_mesh(
        pc.read_config(folder, checkpoints.find_weights(folder)[1]), jax.devices(), 0
    )
    size = -(-min(16, len(ids)) // mesh.shape["data"]) * mesh.shape["data"]  # rows at a time
    dtype = cfg.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)
    print(
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}, {dtype}",
        file=sys.stderr,
    )
    model, step = checkpoints.load(pc, folder, dtype=dtype, mesh=mesh)
    graph, params = nnx.split(model)
    bytes_V = jnp.asarray(token_bytes(tokenizer, model.cfg.vocab))
    scores = {
        "step": step,
        "rows": len(ids),
        **score(graph, params, heldout, len(ids), size, mesh, bytes_V),
    }

    token_RL, segment_RL = heldout.read(ids)[:2]
    text = tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode()
    scores["xz_bits_per_byte"] = 8 * len(lzma.compress(text, preset=9)) / len(text)
    # greedy draft tokens that are accepted, after up to 64 tokens
    if model.cfg.mtp and jax.process_count() == 1:
        half = min(64, token_RL.shape[1] // 2)
        prompts = np.resize(token_RL[:, :half], (size, half)).tolist()
        rule = pc.Sampling(vocab=tokenizer.get_vocab_size())
        with jax.set_mesh(mesh):
            _, stats = pc.generate(model, prompts, half, rule, jax.random.key(0), chunk=half)
        # the pass over the prompt has no draft to check
        scores["drafts_accepted"] = stats["accepted"] / (stats["forwards"] - len(prompts))
    print(" | ".join(f"{name} {value:,.4g}" for name, value in scores.items()))
    return scores


# ---- the run -------------------------------------------------------------------------------------------------------


class Trainer:
    """A run in memory, with the defaults that data and devices suggest. Only `state` changes with
    the steps.
    """

    def __init__(self, cfg):
        # the library feeds no more
        cfg = cfg if cfg.data else dataclasses.replace(cfg, model=cfg.model or "tiny")
        self.train, self.heldout, tokenizer_json = find_data(cfg)
        cfg, self.model, self.compute, self.mesh = resolve(cfg, jax.devices(), self.train.meta)
        folder, total = self.train.folder, self.train.total
        if total < cfg.batch_size:
            advice = "lower --batch_size or add data"
            raise ValueError(
                f"{folder} has {total} training rows, a step takes {cfg.batch_size}; {advice}"
            )
        if len(self.train.columns) > 3:
            raise ValueError(
                f"{folder} holds pairs, for train_dream.py: PythonCoder would learn prompts too"
            )
        self.cfg, self.cycle = plan(cfg, self.model, self.train)
        self.tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        # see canvas.end_of_text
        ends = {"generation_config.json": {"eos_token_id": self.train.meta["eos_id"]}}
        self.files = (
            checkpoints.companions(self.train.folder) | {"tokenizer.json": tokenizer_json} | ends
        )
        # Moments: bfloat16 mu saves 2 GiB of 23 at 1.08 B and costs nothing measurable; nu stays
        # float32.
        self.optimizer = make_optimizer(
            cfg.clip, cfg.weight_decay, self.compute.dtype, muon=cfg.optimizer == "muon"
        )
        self.shapes = checkpoints.state_shapes(pc, self.model, self.optimizer, self.mesh)
        with_gradients = self.shapes, self.shapes["params"]
        checkpoints.check_memory(self.mesh, checkpoints.bytes_on_a_device(with_gradients), {})
        self.rows_at = NamedSharding(self.mesh, PS(None, pc.BATCH))
        self.micro_rows = cfg.micro_batch * self.mesh.size // cfg.tensor  # on all devices together
        self.bytes_V = jnp.asarray(token_bytes(self.tokenizer, self.model.vocab))
        self.state = None  # {"params", "opt"}

    def meta(self, step, skipped):
        """What a checkpoint says of itself."""
        settings = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.cfg)}
        return settings | {"data": self.train.meta["fingerprint"], "step": step, "skipped": skipped}

    def begin(self, store):
        """Fill the state: the newest checkpoint of --resume, or new weights. Returns (step,
        skipped).
        """
        if self.cfg.resume and (
            found := store.resume(self.cfg.resume, self.meta(0, 0), self.shapes)
        ):
            self.state, saved = found
            return saved["step"], saved["skipped"]
        layout = jax.tree.map(lambda s: s.sharding, self.shapes)
        # Born split over the mesh: no device ever holds all of them.
        params = jax.jit(
            lambda: pc.new_params(self.model, self.cfg.seed), out_shardings=layout["params"]
        )()
        self.state = {
            "params": params,
            "opt": jax.jit(self.optimizer.init, out_shardings=layout["opt"])(params),
        }
        return 0, 0

    def batch(self, step):
        """The rows of a step on the mesh: those of its place in the epoch's order, cut into
        micro-batches.
        """
        size = self.cfg.batch_size
        epoch, i = divmod(step, self.train.total // size)
        ids = self.train.order(self.cfg.seed, epoch)[i * size : (i + 1) * size]
        columns = checkpoints.on_mesh(self.train, ids.reshape(-1, self.micro_rows), self.rows_at)
        return dict(zip(COLUMNS, columns, strict=True))

    def score(self):
        """Scores over --eval_rows held-out rows, from all parts of them."""
        graph = pc.graph_of(
            self.model, dataclasses.replace(self.compute, remat="none", dropout=0.0)
        )
        cfg, params = self.cfg, self.state["params"]
        return score(
            graph, params, self.heldout, cfg.eval_rows, self.micro_rows, self.mesh, self.bytes_V
        )

    def sample(self, folder, step):
        """Continue --prompt and append the text to samples.txt; returns the row's tokens per
        forward pass.
        """
        if jax.process_count() > 1:  # one host does not hold the whole model
            return {}
        lm = nnx.merge(
            pc.graph_of(self.model, pc.Compute(self.compute.dtype)), self.state["params"]
        )
        prompt, meta = (
            self.tokenizer.encode(self.cfg.prompt, add_special_tokens=False).ids,
            self.train.meta,
        )
        rule = pc.Sampling(vocab=meta["vocab_size"], eos=meta["eos_id"], speculate=self.model.mtp)
        new = min(64, int(self.model.positions * self.model.yarn_factor) - len(prompt))
        (text,), stats = pc.generate(lm, [prompt or [meta["eos_id"]]], new, rule, jax.random.key(0))
        folder.append(
            "samples.txt", f"---- step {step}\n{self.cfg.prompt}{self.tokenizer.decode(text)}\n"
        )
        return {"tokens_per_forward": stats["tokens"] / stats["forwards"]}


class Meter:
    """Speed between two rows of the log, and steps without a finite gradient."""

    def __init__(self, cfg, model, run, mesh, step, skipped):
        self.cfg, self.skipped, self.in_a_row = cfg, skipped, 0
        self.flops = step_flops(cfg, model) / mesh.size  # per device
        self.peak = (
            checkpoints.peak_flops(jax.devices()[0]) if run.dtype == jnp.bfloat16 else math.nan
        )
        self.restart(step)

    def restart(self, step):
        self.step, self.started, self.waited_s = step, time.perf_counter(), 0.0

    def count(self, ok, waited_s):
        self.in_a_row = 0 if ok else self.in_a_row + 1
        self.skipped += not ok
        self.waited_s += waited_s

    def row(self, step):
        """Tokens per second, share of the device's peak (MFU), share of the time without a batch,
        minutes to go.
        """
        elapsed = time.perf_counter() - self.started
        rate = (step - self.step) / elapsed
        mfu = {"mfu": rate * self.flops / self.peak} if math.isfinite(self.peak) else {}
        row = {"tok_per_s": rate * self.cfg.batch_size * self.cfg.seq_len} | mfu
        row |= {"wait": self.waited_s / elapsed, "eta_min": (self.cfg.steps - step) / rate / 60}
        self.restart(step)
        return row | {"skipped": self.skipped}


def main(cfg):
    checkpoints.connect(cfg)
    if cfg.eval_only:
        return evaluate(cfg)
    trainer = Trainer(cfg)
    # a resumed run may have others
    given, cfg = {"steps": cfg.steps, "micro_batch": cfg.micro_batch}, trainer.cfg
    with runs.Folder(cfg, rank=jax.process_index(), hosts=jax.process_count()) as folder:
        model, settings = dataclasses.asdict(trainer.model), dataclasses.asdict(cfg)
        same = {name: value for name, value in settings.items() if name not in OF_A_HOST}
        checkpoints.check_hosts(
            folder.out, {"model": model, "train": same, "data": trainer.train.meta["fingerprint"]}
        )
        store = checkpoints.Checkpoints(folder.out, cfg.keep)
        first, skipped = trainer.begin(store)
        config = {"train": settings | given, "model": model, "data": str(trainer.train.folder)}
        folder.begin(first, config, trainer.files)
        if first < cfg.steps:
            train(folder, store, trainer, first, skipped)
        else:
            print(
                f"{cfg.out} has all of its {cfg.steps:,} steps; raise --steps, or --epochs with --steps=0"
            )
        store.close()
    print(f"done: {cfg.out}; generate code with: python generate.py --ckpt={cfg.out}")


def train(folder, store, trainer, first, skipped):
    """The steps after `first`."""
    cfg, started, graph = (
        trainer.cfg,
        time.perf_counter(),
        pc.graph_of(trainer.model, trainer.compute),
    )
    print("compiling the train step", flush=True)
    train_step = lower_step(cfg, graph, trainer.optimizer, trainer.shapes, trainer.mesh).compile()
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    meter, saved = (
        Meter(cfg, trainer.model, trainer.compute, trainer.mesh, first, skipped),
        time.monotonic(),
    )
    for step, batch, waited_s in prefetch(trainer.batch, first, cfg.steps):
        # One program: gradients of all micro-batches, clipping, update. The new state takes the old
        # one's memory.
        trainer.state, metrics = train_step(trainer.state, batch, jnp.int32(step))
        metrics = {name: float(metrics[name]) for name in METRICS}  # waits for the step
        done = step + 1

        # A gradient that is not finite leaves the state as it was: one may be bad luck, five are a
        # bad setting.
        meter.count(metrics.pop("ok"), waited_s)
        if meter.in_a_row == 5:
            store.close()  # with a checkpoint that is being written
            raise RuntimeError(
                f"no finite gradient in five steps up to {done}; lower --lr, then --resume={cfg.out}"
            )
        late = False
        if done % cfg.log_every == 0 or done == cfg.steps or meter.in_a_row:
            folder.log({"step": done, **metrics, **meter.row(done)})
            late = checkpoints.host_0_says(0 < 60 * cfg.save_minutes < time.monotonic() - saved)

        # Held-out rows and a sample, logged before the checkpoint: --resume cuts the log to the
        # newest one.
        evaluates = done % trainer.cycle % cfg.eval_every == 0 or done == cfg.steps
        scores = trainer.score() if evaluates else {}
        if evaluates:
            folder.log({"step": done, **scores, **trainer.sample(folder, done)})
        # The checkpoint is written while the next steps run.
        # SIGTERM or Ctrl-C, to any host
        stops = folder.signal or store.manager.reached_preemption(done)
        if evaluates or late or stops:
            store.save(done, trainer.state, trainer.meta(done, meter.skipped), scores or None)
            meter.restart(done)  # none of this is the steps' time
            saved = time.monotonic()
        if stops:
            store.close()
            jax.distributed.shutdown()  # waits for the other hosts, until all have saved
            folder.leave(done)


if __name__ == "__main__":
    runs.command(main, Config, __doc__, MACHINE)
