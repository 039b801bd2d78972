"""Train PythonCoder or Dream on Python source, on whatever JAX finds: a TPU chip, a pod, GPUs or a CPU.

    python train_tpu.py --steps=50                      # CPU: the tiny preset for two minutes, to see it work
    python train_tpu.py                                 # four epochs over the standard library; 1.08 B on a TPU v6e
    python train_tpu.py --resume=out/train_tpu          # goes on where the run stopped, with the run's own settings
    python train_tpu.py --data=data/mine --model=300m   # tokens that data_prep.py wrote
    python train_tpu.py --model=dream_tiny --seq_len=512    # masked diffusion: a Dream from scratch
    python train_tpu.py --init=out/diffucoder --data=data/pairs    # goes on with a converted Dream: fine-tuning
    python train_tpu.py --compile_only=True --topology=v6e:1x1 --model=1b   # does it fit? needs libtpu, not a TPU

Reads the folder of packed rows that data_prep.py writes, for Dream also pairs of prompt and response; without --data it
first prepares the standard library of the running Python. Writes --out: config.json, tokenizer.json, log.jsonl,
samples.txt, checkpoints/<step>/.

One optimizer step is one compiled program: a scan over micro-batches, each a scan over layers. The gradient is that of
(sum of token losses) / (all valid tokens of the step), however the tokens fall into micro-batches. Row order, dropout
and learning rate are functions of (seed, step), so a checkpoint needs no more than parameters, moments and the step.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import tyro
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as PS
from orbax.checkpoint import checkpoint_managers as keep

import data_prep
import hlo_cost
import model_dream as md
import model_pythoncoder as pc


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""  # folder written by data_prep.py; "" prepares the Python standard library under data/
    out: str = "out/train_tpu"  # run folder
    resume: str = ""  # run folder to go on from, with its settings; "" starts anew
    model: str = ""  # key of CONFIGS in model_pythoncoder.py, or dream_ and one in model_dream.py; "" by memory
    init: str = ""  # folder of a Dream to start from, converted or trained here; sets --model
    diff: typing.Literal["seed", "paper", "v2", "none"] = "seed"  # floored | as published | DIFF V2 | plain attention
    seq_len: int = 0  # tokens per row; 0: the model's positions, at most 2048
    batch_size: int = 0  # rows per optimizer step, all devices together; 0: about 131,072 tokens, 8,192 on a CPU
    micro_batch: int = 0  # rows per device at a time; 0: by model and memory
    epochs: float = 4.0  # passes over the training rows; sets --steps
    steps: int = 0  # optimizer steps; 0: from --epochs
    lr: float = 0.0  # peak learning rate; 0: 3e-4 sqrt(1.5e9 / parameters), at most 3e-3; a tenth with --init
    warmup: int = 0  # steps of linear warm-up; 0: 2000, or a tenth of a shorter run
    weight_decay: float = 0.1  # on matrices and embeddings only
    clip: float = 1.0  # global gradient norm
    dropout: float = 0.1  # attention output, feed-forward hidden and output; PythonCoder, as diff and the next two
    mtp_weight: float = 0.1  # of the MTP head's loss
    z_loss: float = 0.0  # weight of logsumexp^2
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # of the computation; parameters are float32
    remat: typing.Literal["", "none", "qkvo", "full"] = ""  # what the backward pass recomputes
    fsdp: int = 0  # devices that share one copy of the weights; 0: all that data and tensor leave
    tensor: int = 1  # devices that share each layer's heads, feed-forward and vocabulary
    hosts: str = ""  # "" one host; "auto" on TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX of this process
    eval_every: int = 0  # steps between evaluations, each saves a checkpoint; 0: about ten times a run
    eval_rows: int = 512  # held-out rows at most
    log_every: int = 10
    keep: int = 2  # newest checkpoints to keep, besides the best and the last of each epoch
    prompt: str = "def read_lines(path):\n"  # continued at every evaluation
    wandb: str = ""  # project name; "" logs to files alone
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    compile_only: bool = False  # compile for --topology and print memory, FLOPs and the time estimate
    topology: str = "v6e:1x1"  # TPU to compile for: v6e:1x1, v6e:4x4, v5e:1x1, ...
    seed: int = 0  # initial weights, row order, dropout, noise


PRESETS = pc.CONFIGS | {f"dream_{name}": preset for name, preset in md.CONFIGS.items()}


def family_of(cfg):
    """The module of the model: what is called of it below has the same name in both."""
    return md if cfg.model.startswith("dream") else pc


# ---- choices for the device ----------------------------------------------------------------------------------------

# Rows per device at a time. Few: on a v6e four keep the activations in VMEM, on a CPU (tiny, small) in its caches.
MICRO_BATCH = {"tiny": 2, "small": 4, "100m": 8, "300m": 8, "500m": 4, "1b": 4}
TPU_FLOPS = {"TPU v6": 918e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v4": 275e12}  # bf16


def device_memory_gib(device):
    """What one accelerator can hold; None on a CPU."""
    if device.platform == "cpu":
        return None
    if device.platform == "tpu" and "v6" in device.device_kind:
        return 31.24  # also for a compile-only device, which cannot be asked
    try:
        return device.memory_stats()["bytes_limit"] / 2**30
    except (TypeError, KeyError, jax.errors.JaxRuntimeError):
        return 15.75


def resolve(cfg, devices):
    """Fill every automatic setting that needs the device alone, and say what was picked and why."""
    device, memory = devices[0], device_memory_gib(devices[0])
    if cfg.init and cfg.model not in ("", "dream"):
        sys.exit(f"--init={cfg.init} says what the model is; leave --model={cfg.model} out")
    if cfg.init:
        cfg = dataclasses.replace(cfg, model="dream")
    if not cfg.model:
        cfg = dataclasses.replace(cfg, model="tiny" if memory is None else "small")
        for name in ("300m", "1b") if memory else ():
            state = 18 * pc.count_params(pc.CONFIGS[name])["total"]  # weights, moments, gradients, their sum, in bytes
            if state / 2**30 / len(devices) + 8 <= memory:
                cfg = dataclasses.replace(cfg, model=name)
    if cfg.model not in PRESETS and not cfg.init:
        sys.exit(f"--model={cfg.model}: not one of {', '.join(PRESETS)}")
    for name in ("log_every", "eval_rows", "keep", "steps", "batch_size", "micro_batch"):
        least = int(name in ("log_every", "eval_rows", "keep"))
        if getattr(cfg, name) < least:
            sys.exit(f"--{name}={getattr(cfg, name)}: at least {least}")
    family = family_of(cfg)
    try:
        model = md.read_config(cfg.resume or cfg.init) if cfg.init else PRESETS[cfg.model]
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    model = dataclasses.replace(model, diff=cfg.diff) if family is pc else model
    seq_len = cfg.seq_len or min(model.positions, 2048)
    if seq_len > model.positions:
        sys.exit(f"--seq_len={seq_len} is longer than the {model.positions} positions of {cfg.model}")
    tensor, fsdp = cfg.tensor, cfg.fsdp or max(1, len(devices) // cfg.tensor)
    if len(devices) % (tensor * fsdp):
        sys.exit(f"{len(devices)} devices do not divide into fsdp {fsdp} x tensor {tensor}; choose --fsdp and --tensor")
    copies = len(devices) // tensor  # devices that hold different rows
    batch = cfg.batch_size or max(copies, (8192 if memory is None else 131_072) // seq_len)
    if batch % copies:
        sys.exit(f"--batch_size={batch} does not divide over {copies} devices; try {-(-batch // copies) * copies}")
    splits = {"kv_heads": model.kv_heads // getattr(model, "maps", 1), "ffn": model.ffn, "vocab": model.vocab}
    for name, size in splits.items():
        if size % tensor:
            sys.exit(f"--tensor={tensor} does not divide the model's {name} groups ({size})")
    if model.vocab % (tensor * fsdp) or model.width % fsdp:
        sizes = f"vocabulary {model.vocab} and width {model.width}"
        sys.exit(f"fsdp {fsdp} x tensor {tensor} does not divide {sizes}; try --fsdp=1")
    rows = batch // copies
    most = MICRO_BATCH.get(cfg.model.removeprefix("dream_"), 1)
    micro = cfg.micro_batch or next(m for m in range(min(rows, most), 0, -1) if rows % m == 0)
    if rows % micro:
        sys.exit(f"--micro_batch={micro} does not divide the {rows} rows of a device; try a divisor of {rows}")
    dtype = cfg.dtype or ("float32" if memory is None else "bfloat16")
    remat = cfg.remat or "qkvo"
    why = "CPU" if memory is None else f"{memory:.1f} GiB each"
    print(f"{len(devices)} x {device.device_kind} ({why}): mesh data {copies // fsdp}, fsdp {fsdp}, tensor {tensor}")
    print(
        f"model {cfg.model}, {dtype} compute on float32 weights, remat {remat}; a step is {batch} rows of {seq_len} = "
        f"{batch * seq_len:,} tokens, {batch // (copies * micro)} x {micro} rows a device"
    )
    block = 64 if memory is None else 128  # queries: scores that stay in a CPU's caches
    if family is md:
        run = md.Run(jnp.dtype(dtype), block, remat=remat)
    else:
        run = pc.Run(jnp.dtype(dtype), device.platform == "tpu", remat, cfg.dropout, block)
    # moments: bfloat16 mu saves 2 GiB of 23 at 1.08 B and costs nothing measurable; nu stays float32
    mu_dtype = jnp.dtype(dtype)
    mesh = jax.sharding.Mesh(
        np.asarray(devices).reshape(-1, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    cfg = dataclasses.replace(cfg, seq_len=seq_len, batch_size=batch)
    return cfg, model, run, mesh, micro, mu_dtype


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


def peak_lr(parameters):
    return float(np.clip(3e-4 * math.sqrt(1.5e9 / parameters), 1e-4, 3e-3))


# ---- data ----------------------------------------------------------------------------------------------------------


class Rows:
    """Packed rows of one split of a data_prep.py folder; row order is a function of (seed, epoch).

    Shards are permuted, then the rows of each: a step reads one or two shards, whatever the size of the data.
    """

    def __init__(self, folder, split):
        self.folder = Path(folder)
        try:
            self.meta = json.loads((self.folder / "meta.json").read_text())
            self.shards = self.meta["splits"][split]["shards"]
            self.first = np.cumsum([0] + [shard["rows"] for shard in self.shards])
        except (OSError, ValueError, KeyError, TypeError):
            sys.exit(f"{folder}/meta.json is damaged; delete the folder and write it again with data_prep.py")
        self.total = int(self.first[-1])
        self.columns = ["input_ids", "segments", "positions"] + ["fixed"] * (self.meta.get("source") == "pairs")
        self.order = functools.lru_cache(2)(self.order)
        self.shard = functools.lru_cache(3)(self.shard)

    def order(self, seed, epoch):
        """All row numbers in the order of this epoch."""
        rng = np.random.default_rng([seed, epoch])
        shards = rng.permutation(len(self.shards))
        return np.concatenate([self.first[i] + rng.permutation(self.shards[i]["rows"]) for i in shards])

    def shard(self, i):
        """Shard i as int32 [3, R, L]: tokens, segments, positions; pairs have a fourth, 1 where a token is a prompt's.

        Exits when its bytes are not those written.
        """
        path = self.folder / self.shards[i]["file"]
        try:
            data = path.read_bytes()
        except OSError as error:
            sys.exit(f"{path} cannot be read ({error.strerror}); write it again with data_prep.py")
        if hashlib.sha256(data).hexdigest() != self.shards[i]["sha256"]:
            sys.exit(
                f"{path} is corrupted: its SHA-256 is not the one in meta.json; delete it and run data_prep.py again"
            )
        table = pq.read_table(pa.BufferReader(data))
        columns = [table[name].combine_chunks() for name in self.columns]
        return np.stack([c.values.to_numpy().reshape(len(c), -1).astype(np.int32) for c in columns])

    def read(self, row_ids):
        """int32 [columns, ..., L] for an array of row numbers."""
        flat = row_ids.ravel()
        shards = np.searchsorted(self.first, flat, side="right") - 1
        out = np.zeros((len(self.columns), len(flat), self.meta["seq_len"]), np.int32)
        for i in np.unique(shards[flat >= 0]):
            mine = (shards == i) & (flat >= 0)  # row number -1 is an empty row
            out[:, mine] = self.shard(int(i))[:, flat[mine] - self.first[i]]
        return out.reshape(len(self.columns), *row_ids.shape, -1)


def to_devices(rows, row_ids, sharding):
    """Row numbers [A, B] -> {"token_ABL", "segment_ABL", "position_ABL", of pairs "fixed_ABL"} on the mesh.

    A host reads only its rows.
    """
    read = functools.lru_cache(None)(lambda a, b: rows.read(row_ids[slice(*a), slice(*b)]))
    shape = (*row_ids.shape, rows.meta["seq_len"])

    def column(c):
        def part(index):
            return read(*((s.start, s.stop) for s in index[:2]))[c]

        return jax.make_array_from_callback(shape, sharding, part)

    names = ("token_ABL", "segment_ABL", "position_ABL", "fixed_ABL")[: len(rows.columns)]
    return {name: column(c) for c, name in enumerate(names)}


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


EVAL_DRAWS = 4  # passes over each held-out row that bound Dream's likelihood


# ---- the compiled step ---------------------------------------------------------------------------------------------


def decays(tree):
    """Weight decay mask, by name: matrices and embeddings, no norms, biases or lambda vectors.

    By name, for stacked norms have two axes.
    """
    names = {*pc.SHARDING, "w_lambda", *md.SHARDING} - {"q_bias", "k_bias", "v_bias"}
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, tree)


def make_optimizer(clip, weight_decay, mu_dtype=None, mask=decays):
    """Clip, then AdamW at learning rate 1: its updates are multiplied by the schedule of the step."""
    adamw = optax.adamw(1.0, 0.9, 0.95, 1e-8, weight_decay=weight_decay, mask=mask, mu_dtype=mu_dtype)
    return optax.chain(optax.clip_by_global_norm(clip), adamw)


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


def apply_gradients(optimizer, state, grads, lr):
    """One update of {"params", "opt"}; the step is left out (and said so) if any gradient is not finite."""
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(norm)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = jax.tree.map(lambda p, u: p + lr * u, state["params"], updates)
    new = {"params": params, "opt": opt}
    return jax.tree.map(lambda old, new: jnp.where(ok, new, old), state, new), norm, ok


def coder_loss(cfg, graph, batch, key):
    """loss_fn(params, micro, sums) -> (loss, {"main", "mtp"}) of PythonCoder, in nats per target of the whole step."""
    main_tokens, mtp_tokens = (jnp.maximum(mask.sum(), 1) for mask in pc.target_masks(batch["segment_ABL"]))

    def loss_fn(params, micro, sums):
        model = nnx.merge(graph, params)
        inputs = micro["token_ABL"], micro["segment_ABL"], micro["position_ABL"]
        noise = key if cfg.dropout else None
        sums = sums["layers"]
        main, mtp = model.losses(*inputs, noise, micro["row_AB"], cfg.z_loss, cfg.mtp_weight > 0, sums=sums)
        main, mtp = main / main_tokens, mtp / mtp_tokens
        return main + cfg.mtp_weight * mtp, {"main": main, "mtp": mtp}

    return loss_fn


def dream_loss(cfg, graph, batch, key):
    """loss_fn(params, micro, sums) -> (loss, {}) of Dream: the NELBO in nats per token that can be masked."""
    rows = math.prod(batch["token_ABL"].shape[:2])
    tokens = jnp.maximum(md.counted(batch["segment_ABL"], batch.get("fixed_ABL")).sum(), 1)

    def loss_fn(params, micro, sums):
        token_BL, segment_BL, position_BL = (micro[k] for k in ("token_ABL", "segment_ABL", "position_ABL"))
        t_BL, u_BL = md.noise(key, rows, micro["row_AB"], segment_BL)
        model = nnx.merge(graph, params)
        return model.nelbo(token_BL, segment_BL, position_BL, t_BL, u_BL, micro.get("fixed_ABL")) / tokens, {}

    return loss_fn


def make_step(cfg, graph, optimizer, lr_peak, steps, warmup):
    """train_step(state, batch, step) -> (state, metrics), to be compiled once with the state donated."""
    dream = family_of(cfg) is md

    def train_step(state, batch, step):
        key = jax.random.fold_in(jax.random.key(cfg.seed), step)
        lr = wsd(step, lr_peak, steps, warmup)
        loss_fn = (dream_loss if dream else coder_loss)(cfg, graph, batch, key)
        A, B, _ = batch["token_ABL"].shape
        micros = batch | {"row_AB": jnp.arange(A * B).reshape(A, B)}
        grads, (loss, parts) = accumulate(loss_fn, state["params"], micros, () if dream else ("layers",))
        state, norm, ok = apply_gradients(optimizer, state, grads, lr)
        return state, {"loss": loss, **parts, "lr": lr, "grad_norm": norm, "ok": ok}

    return train_step


def state_shapes(family, model, optimizer):
    params = family.param_shapes(model)
    return {"params": params, "opt": jax.eval_shape(optimizer.init, params)}


def make_evaluate(cfg, graph, rows):
    """evaluate(params, batch, row_B, bytes_V) -> nats, predicted tokens and their bytes, summed over held-out rows.

    Of Dream the nats are a bound: the NELBO at EVAL_DRAWS noise levels a row, the same each time.
    """

    def coder(params, batch, row_B, bytes_V):
        token_BL, segment_BL, position_BL = (batch[k][0] for k in ("token_ABL", "segment_ABL", "position_ABL"))
        nats, _ = nnx.merge(graph, params).losses(token_BL, segment_BL, position_BL, mtp=False)
        mask_BL, _ = pc.target_masks(segment_BL)
        return nats, mask_BL.sum(), (mask_BL * bytes_V[jnp.roll(token_BL, -1, 1)]).sum()

    def dream(params, batch, row_B, bytes_V):
        batch = {name: x[0] for name, x in batch.items()}
        token_BL, segment_BL, fixed_BL = batch["token_ABL"], batch["segment_ABL"], batch.get("fixed_ABL")

        def once(draw):
            t_BL, u_BL = md.noise(jax.random.key(draw), rows, row_B, segment_BL)
            model = nnx.merge(graph, params)
            return model.nelbo(token_BL, segment_BL, batch["position_ABL"], t_BL, u_BL, fixed_BL)

        mask_BL = md.counted(segment_BL, fixed_BL)
        nats = jax.lax.map(once, jnp.arange(EVAL_DRAWS)).mean()
        return nats, mask_BL.sum(), (mask_BL * bytes_V[token_BL]).sum()

    return dream if family_of(cfg) is md else coder


def token_bytes(tokenizer, vocab):
    """UTF-8 bytes of each token of a byte-level BPE, whose characters stand for bytes; special tokens have none."""
    special = tokenizer.get_added_tokens_decoder()
    return np.array([0 if i in special else len(tokenizer.id_to_token(i) or "") for i in range(vocab)], np.float32)


# ---- checkpoints and logs ------------------------------------------------------------------------------------------


def open_checkpoints(folder, keep_newest, epoch_ends):
    """Orbax manager over <folder>/<step>/: asynchronous, atomic; keeps the newest, the best and every epoch's last."""
    policy = [keep.LatestN(keep_newest), keep.CustomSteps(epoch_ends)]
    policy.append(
        keep.BestN(get_metric_fn=lambda m: m["heldout_nats"], reverse=True, n=1, keep_checkpoints_without_metrics=False)
    )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=keep.AnyPreservationPolicy(policy), cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def save(manager, step, state, meta, metrics):
    """Start an asynchronous save. Raises OSError or ValueError if this one, or the one before, cannot be written."""
    items = {name: ocp.args.StandardSave(state[name]) for name in ("params", "opt")}
    items["meta"] = ocp.args.JsonSave(meta | {"step": step, "sums": pc.bit_sums(state)})
    manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)


def restore(manager, shapes, model, where):
    """Newest checkpoint of a manager as (state, laid out as `shapes` says, its meta); exits if it does not fit."""
    step = manager.latest_step()
    path = f"checkpoint {where}/checkpoints/{step}"
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            theirs, ours = meta["model"], dataclasses.asdict(model)
            names = [k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]
            if names:
                changed = "; ".join(f"{k} {theirs.get(k)} there, {ours.get(k)} here" for k in names)
                end(f"{path} is of another model: {changed}")
            items = {name: ocp.args.StandardRestore(shapes[name]) for name in ("params", "opt")}
            state = dict(manager.restore(step, args=ocp.args.Composite(**items)))
            pc.check_sums(state, meta["sums"], path)  # one and the same in both families
            return state, meta
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            end(f"{path} cannot be read ({str(error).splitlines()[0]}); delete its folder to use the one before")


def log(out, row, tracker=None):
    """Print one row of metrics and append it to <out>/log.jsonl, the source of every plot and table."""
    if jax.process_index() == 0:
        print(" | ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items()), flush=True)
        with open(Path(out) / "log.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    if tracker:
        tracker.log(row, step=row["step"])


def compile_only(cfg):
    """Compile the train step for a TPU that need not be there; print what the compiler knows of memory and time."""
    devices = hlo_cost.topology_devices(cfg.topology)
    md.on_cpu = lambda: False  # for the rest of the process
    cfg, model, run, mesh, micro, mu_dtype = resolve(cfg, devices)
    family, optimizer = family_of(cfg), make_optimizer(cfg.clip, cfg.weight_decay, mu_dtype)
    shapes = state_shapes(family, model, optimizer)
    layout = family.shardings(mesh, shapes)
    shapes = jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, layout)
    copies = len(devices) // cfg.tensor
    rows = jax.ShapeDtypeStruct(
        (cfg.batch_size // (micro * copies), micro * copies, cfg.seq_len),
        jnp.int32,
        sharding=NamedSharding(mesh, PS(None, family.BATCH)),
    )
    batch = dict.fromkeys(("token_ABL", "segment_ABL", "position_ABL"), rows)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PS()))
    train_step = make_step(cfg, family.graph_of(model, run), optimizer, 3e-4, 1000, 100)
    with jax.set_mesh(mesh):
        lowered = jax.jit(train_step, donate_argnums=0, out_shardings=(layout, None)).lower(shapes, batch, step)
        return hlo_cost.compile_and_cost(lowered), cfg, model, devices


def report_compile(cfg):
    try:
        (_, cost, memory), cfg, model, devices = compile_only(cfg)
    except (ValueError, ImportError) as error:
        sys.exit(f"--topology={cfg.topology}: {error}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sys.exit(f"does not fit: {str(error).splitlines()[0]}")
    chip = cfg.topology.partition(":")[0]
    tokens, chips = cfg.batch_size * cfg.seq_len, len(devices)
    flops = tokens * family_of(cfg).flops_per_token(model, cfg.seq_len)
    row = {
        "topology": cfg.topology,
        "model": cfg.model,
        "tokens": tokens,
        "hbm_gib": memory["total_gib"],
        "usable_gib": memory["usable_gib"],
        "step_s": cost.seconds(chip),
        "tok_per_s": tokens / cost.seconds(chip),
        "model_flops": flops,
        "hlo_flops_per_chip": cost.flops,
        "hbm_bytes_per_chip": cost.bytes,
        "mfu": flops / chips / cost.seconds(chip) / hlo_cost.CHIPS[chip].flops_per_s,
        "collective_gb": {k: round(v / 1e9, 3) for k, v in cost.collectives.items()},
        "collective_counts": cost.collective_counts,
        "kernels_without_estimate": cost.custom_calls,
    }
    print("estimates of the compiler, per chip; the kernels it has no estimate for come on top")
    for name, value in row.items():
        print(f"  {name:26} {value:.4g}" if isinstance(value, float) else f"  {name:26} {value}")
    for name, cycles in sorted(cost.ops.items(), key=lambda item: -item[1])[:12]:
        print(f"  {cycles / cost.cycles:6.1%}  {name}")
    return row


# ---- the run -------------------------------------------------------------------------------------------------------


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


def find_data(cfg, model):
    """(training rows, held-out rows, tokenizer.json of the run, model with its ids); exits if they do not fit.

    The embedded default is prepared first.
    """
    folder = Path(cfg.data or f"data/python-{cfg.seq_len}-{min(model.vocab, 32_768)}")
    if not cfg.data and not (folder / "meta.json").exists():
        if cfg.hosts:
            sys.exit("several hosts need the same data: write it with data_prep.py and pass --data")
        print(f"no --data: preparing the Python standard library in {folder}")
        data_prep.main(data_prep.Config(out=str(folder), seq_len=cfg.seq_len, vocab_size=min(model.vocab, 32_768)))
    if not (folder / "meta.json").exists():
        sys.exit(f"{folder} holds no finished data (no meta.json); write it with: python data_prep.py --out={folder}")
    train, heldout = Rows(folder, "train"), Rows(folder, "heldout")
    meta, advice = train.meta, f"prepare it again: python data_prep.py --out=OTHER --seq_len={cfg.seq_len}"
    if meta["seq_len"] != cfg.seq_len:
        sys.exit(f"{folder} has rows of {meta['seq_len']} tokens, the run wants {cfg.seq_len}; {advice}")
    coder = family_of(cfg) is pc
    if coder and len(train.columns) > 3:
        sys.exit(f"{folder} holds pairs, whose prompts PythonCoder would learn too; they are for --model=dream_...")
    if coder and meta["vocab_size"] > model.vocab:
        advice += f" --vocab_size={model.vocab}"
        sys.exit(f"{folder} has {meta['vocab_size']:,} token ids, the model {model.vocab:,}; {advice}")
    tokenizer = (folder / "tokenizer.json").read_bytes()
    if hashlib.sha256(tokenizer).hexdigest() != meta["tokenizer_sha256"]:
        sys.exit(f"{folder}/tokenizer.json is not the one that made the shards; {advice}")
    if train.total < cfg.batch_size:
        advice = "lower --batch_size or add data"
        sys.exit(f"{folder} has {train.total} training rows, a step takes {cfg.batch_size}; {advice}")
    if not coder:
        model, tokenizer = with_mask(cfg, model, meta, tokenizer)
    return train, heldout, tokenizer, model


def with_mask(cfg, model, meta, tokenizer_json):
    """(model, tokenizer.json) of a Dream run. Rows have no MASK: a preset gets the data's ids and one for MASK.

    That is <|mask|> or <mask> of the data's tokenizer, else a token added to the copy that the run keeps. With --init
    model and tokenizer stay what they are there, and the data's ids have to mean the same.
    """
    tokenizer, masks = tokenizers.Tokenizer.from_str(tokenizer_json.decode()), ("<|mask|>", "<mask>")
    if not cfg.init:
        mask_id = next((i for i in map(tokenizer.token_to_id, masks) if i is not None), None)
        if mask_id is None:
            tokenizer.add_special_tokens([masks[0]])
            mask_id, tokenizer_json = tokenizer.token_to_id(masks[0]), tokenizer.to_str().encode()
        vocab, eos = -(-max(meta["vocab_size"], mask_id + 1) // 128) * 128, meta["eos_id"]
        ids = {"mask_id": mask_id, "pad_id": meta["pad_id"], "bos_id": meta.get("bos_id", eos), "eos_id": eos}
        return dataclasses.replace(model, vocab=vocab, **ids), tokenizer_json
    path, wrong, known = Path(cfg.resume or cfg.init) / "tokenizer.json", "", tokenizer
    if path.is_file():
        tokenizer_json = path.read_bytes()
        try:
            known = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # tokenizers raises no narrower class
            sys.exit(f"{path} cannot be read: {str(error).splitlines()[0]}")
    theirs, ours = (t.get_vocab(with_added_tokens=True) for t in (known, tokenizer))
    changed = sum(theirs.get(token) != i for token, i in ours.items())
    if changed:
        wrong = f"{changed:,} of its tokens have other ids"
    elif max(ours.values()) >= model.vocab:
        wrong = f"its {meta['vocab_size']:,} ids are more than the model's {model.vocab:,}"
    elif meta["eos_id"] != model.eos_id:
        wrong = f"its documents end with id {meta['eos_id']}, the model's with {model.eos_id}"
    elif tokenizer.id_to_token(model.mask_id) not in (None, *masks):
        wrong = f"{tokenizer.id_to_token(model.mask_id)!r} is the model's MASK, {model.mask_id}"
    if wrong:
        sys.exit(f"the data's tokenizer is not that of {path.parent}: {wrong}; prepare it with --tokenizer={path}")
    return model, tokenizer_json


def main(cfg):
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    if cfg.compile_only:
        jax.config.update("jax_platforms", "cpu")
        return report_compile(cfg)
    if cfg.hosts:
        address, *rest = cfg.hosts.split(",")
        jax.distributed.initialize(*([] if cfg.hosts == "auto" else [address, *map(int, rest)]))
    if cfg.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(cfg.compile_cache).expanduser()))
    out, first_process = Path(cfg.out), jax.process_index() == 0
    cfg, model, run, mesh, micro, mu_dtype = resolve(cfg, jax.devices())
    family = family_of(cfg)
    train, heldout, tokenizer_json, model = find_data(cfg, model)
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())

    per_epoch = train.total // cfg.batch_size
    steps = cfg.steps or max(1, round(cfg.epochs * per_epoch))
    counts = family.count_params(model)
    lr = cfg.lr or peak_lr(counts["total"]) / (10 if cfg.init else 1)
    warmup = cfg.warmup or min(2000, max(1, steps // 10))
    target = min(1000, max(50, steps // 10))
    eval_every = cfg.eval_every or -(-per_epoch // max(1, round(per_epoch / target)))  # an even part of an epoch
    epoch_ends = [per_epoch * e for e in range(1, steps // per_epoch + 1)]
    cfg = dataclasses.replace(cfg, steps=steps, lr=lr, warmup=warmup, eval_every=eval_every)
    tokens, seen = train.meta["splits"]["train"]["tokens"], steps * cfg.batch_size * cfg.seq_len
    print(", ".join(f"{part} {n:,}" for part, n in counts.items()) + " parameters")
    print(
        f"{steps:,} steps of {seen // steps:,} tokens = {steps / per_epoch:.2f} epochs of {tokens:,} tokens, "
        f"{seen / counts['total']:.1f} tokens per parameter; peak learning rate {lr:.3g}, warm-up {warmup}"
    )

    if not cfg.resume and any(path.name.isdigit() for path in (out / "checkpoints").glob("*")):
        sys.exit(f"{out} already holds a run: --resume={out} goes on with it, another --out starts anew")
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / f".lock{jax.process_index()}", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another trainer is writing to {out}; wait for it or choose another --out")

    optimizer = make_optimizer(cfg.clip, cfg.weight_decay, mu_dtype)
    shapes = state_shapes(family, model, optimizer)
    layout = family.shardings(mesh, shapes)
    shapes = jax.tree.map(lambda s, l: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=l), shapes, layout)
    manager = open_checkpoints(out / "checkpoints", cfg.keep, epoch_ends)
    meta = {"model": dataclasses.asdict(model), "train": dataclasses.asdict(cfg), "data": train.meta["fingerprint"]}
    source, first, skipped = manager, 0, 0
    if cfg.resume and Path(cfg.resume).resolve() != out.resolve():
        source = open_checkpoints(Path(cfg.resume) / "checkpoints", None, [])
    if cfg.resume and source.latest_step() is not None:
        state, saved = restore(source, shapes, model, cfg.resume)
        if saved["data"] != meta["data"]:
            sys.exit(f"{cfg.resume} was trained on other data; pass its --data, or start anew with another --out")
        first, skipped = saved["step"], saved["skipped"]
        print(f"resuming {cfg.resume} after step {first}")
    else:
        if cfg.resume:
            print(f"{cfg.resume} stopped before its first checkpoint: starting at step 0 with its settings")
        if cfg.init:
            try:
                params = nnx.to_pure_dict(nnx.state(md.load(cfg.init, jnp.float32, mesh=mesh)))
            except (FileNotFoundError, ValueError) as error:
                end(error)
        else:
            params = jax.jit(lambda: family.new_params(model, cfg.seed), out_shardings=layout["params"])()
        opt = jax.jit(optimizer.init, out_shardings=layout["opt"])(params)
        state = {"params": params, "opt": opt}
    truncate_log(out, first)
    if first_process:
        (out / "config.json").write_text(
            json.dumps({"train": meta["train"], "model": meta["model"], "data": str(train.folder)}, indent=2) + "\n"
        )
        (out / "tokenizer.json").write_bytes(tokenizer_json)
    tracker = None
    if cfg.wandb and first_process:
        try:
            import wandb
        except ImportError:
            sys.exit("--wandb needs the package wandb: pip install wandb")
        tracker = wandb.init(project=cfg.wandb, config=meta, dir=str(out), id=out.name, resume="allow")

    # one compiled program for all steps; batches [A, B, L] lie on the mesh as they are made
    rows_at = NamedSharding(mesh, PS(None, family.BATCH))
    copies = mesh.size // cfg.tensor

    def batch_of(step):
        epoch, i = divmod(step, per_epoch)
        ids = train.order(cfg.seed, epoch)[i * cfg.batch_size : (i + 1) * cfg.batch_size]
        return to_devices(train, ids.reshape(-1, micro * copies), rows_at)

    started = time.perf_counter()
    print("compiling the train step", flush=True)
    graph = family.graph_of(model, run)
    train_step = jax.jit(
        make_step(cfg, graph, optimizer, lr, steps, warmup), donate_argnums=0, out_shardings=(layout, None)
    )
    with jax.set_mesh(mesh):
        train_step = train_step.lower(shapes, batch_of(first), jax.ShapeDtypeStruct((), jnp.int32)).compile()
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    plain = dataclasses.replace(run, remat="none", **({"dropout": 0.0} if family is pc else {}))
    scored = min(heldout.total, cfg.eval_rows)
    evaluate = jax.jit(make_evaluate(cfg, family.graph_of(model, plain), scored))
    bytes_V = jnp.asarray(token_bytes(tokenizer, model.vocab))
    peak, source = peak_flops(jax.devices()[0], run.dtype)
    flops = family.flops_per_token(model, cfg.seq_len) * cfg.batch_size * cfg.seq_len / mesh.size
    print(f"peak {peak / 1e12:.3g} TFLOP/s a device ({source}); a step is {flops / 1e12:.3g} TFLOP a device")

    def score():
        """Mean nats per held-out token and bits per byte, over whole batches of the first eval_rows rows."""
        ids = np.full(-(-scored // (micro * copies)) * micro * copies, -1)
        ids[:scored] = np.arange(scored)
        sums = np.zeros(3)
        for part in ids.reshape(-1, 1, micro * copies):
            with jax.set_mesh(mesh):
                parts = evaluate(state["params"], to_devices(heldout, part, rows_at), part[0], bytes_V)
            sums += [float(x) for x in parts]
        return {"heldout_nats": sums[0] / sums[1], "bits_per_byte": sums[0] / math.log(2) / sums[2]}

    def sample(step):
        if jax.process_count() > 1:
            return {}
        vocab, eos = train.meta["vocab_size"], train.meta["eos_id"]
        lm = nnx.merge(family.graph_of(model, family.Run(run.dtype)), state["params"])
        prompt = tokenizer.encode(cfg.prompt, add_special_tokens=False).ids
        inputs, key = ([prompt], min(64, model.positions - len(prompt))), jax.random.key(0)
        if family is md:
            (row,), stats = md.generate(lm, *inputs, md.Sampling(vocab=vocab, eos_ids=(eos,)), key)
            text, stats["tokens"] = row[len(prompt) :], inputs[1]
        else:
            (text,), stats = pc.generate(lm, *inputs, pc.Sampling(vocab=vocab, eos=eos, speculate=model.mtp), key)
        with open(out / "samples.txt", "a") as file:
            file.write(f"---- step {step}\n{cfg.prompt}{tokenizer.decode(text)}\n")
        return {"tokens_per_forward": stats["tokens"] / stats["forwards"]}

    def settle():
        """Wait for the save under way; exits if it could not be written."""
        try:
            manager.wait_until_finished()
        except (OSError, ValueError) as error:
            left = f"go on with --resume={out} from {steps_of(manager)}"
            end(f"a checkpoint was not written ({str(error).splitlines()[0]}); {left}")

    def checkpoint(step, metrics):
        settle()
        save(manager, step, state, meta | {"skipped": skipped}, metrics)

    stop = []
    handlers = {s: signal.signal(s, lambda number, _: stop.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    row_start, waited_s, bad, since = time.perf_counter(), 0.0, 0, first
    stderr, sys.stderr = sys.stderr, io.StringIO()  # the threads of a failed save print tracebacks; `end` prints a line
    try:
        for step, batch, wait_s in prefetch(batch_of, first, steps):
            state, metrics = train_step(state, batch, jnp.int32(step))
            waited_s += wait_s
            names = "loss", "main", "mtp", "lr", "grad_norm", "ok"  # jit returns them sorted
            metrics = {name: float(metrics[name]) for name in names if name in metrics}  # waits for the step
            bad = 0 if metrics.pop("ok") else bad + 1
            skipped += bad > 0
            done = step + 1
            if bad >= 5:
                left = steps_of(manager)
                sys.exit(f"no finite gradient in five steps, the last {done}; resume from {left} with a lower --lr")
            if done % cfg.log_every == 0 or done == steps or bad:
                elapsed = time.perf_counter() - row_start
                rate = (done - since) / elapsed
                row = {"step": done, **metrics, "tok_per_s": rate * seen / steps, "mfu": rate * flops / peak}
                row |= {"wait": waited_s / elapsed, "eta_min": (steps - done) / rate / 60, "skipped": skipped}
                log(out, row, tracker)
                row_start, waited_s, since = time.perf_counter(), 0.0, done
            if done % eval_every == 0 or done in epoch_ends or done == steps:
                scores = score()
                checkpoint(done, scores)
                row = {"step": done, **scores, **sample(done)}
                log(out, row, tracker)
                row_start, waited_s, since = time.perf_counter(), 0.0, done
            elif stop:
                checkpoint(done, None)
            if stop:
                settle()
                sys.exit(f"{signal.Signals(stop[0]).name}: saved step {done}; go on with --resume={out}")
        settle()
        manager.close()
    finally:
        sys.stderr = stderr
        for s, handler in handlers.items():
            signal.signal(s, handler)
    flags = f"--model=dream --ckpt={out}" if family_of(cfg) is md else f"--ckpt={out}"
    print(f"done: {out}; write code with: python generate.py {flags}")


def end(message):
    """Exit with one line, at once: threads of a failed Orbax read or write print tracebacks until the process ends."""
    print(message, file=sys.__stderr__, flush=True)
    os._exit(1)


def steps_of(manager):
    return f"steps {sorted(manager.all_steps(read=True))}" if manager.all_steps(read=True) else "no checkpoint"


def truncate_log(out, step):
    """Drop the rows that a killed run wrote after its last checkpoint; they will be written again."""
    path = Path(out) / "log.jsonl"
    if path.exists() and jax.process_index() == 0:
        rows = [row for row in path.read_text().splitlines(keepends=True) if row.endswith("}\n")]
        path.with_suffix(".tmp").write_text("".join(row for row in rows if json.loads(row)["step"] <= step))
        os.replace(path.with_suffix(".tmp"), path)


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
    known = {f.name for f in dataclasses.fields(Config)}
    saved = {k: v for k, v in saved.items() if k in known - {"hosts", "micro_batch", "fsdp", "tensor"}}
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
