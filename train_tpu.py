"""Train PythonCoder on Python source. Prints.

    python train_tpu.py --steps=50 --out=out/try    # CPU: the tiny preset for two minutes
    python train_tpu.py    # four epochs over the standard library: the tiny preset
    python train_tpu.py --resume=out/train_tpu    # continues a stopped run with its settings
    python train_tpu.py --data=data/mine --model=300m    # rows that data_prep.py wrote
    python train_tpu.py --eval_only=out/train_tpu    # held-out bits per byte, beside xz -9

Runs on whatever JAX finds: a TPU chip, a pod, GPUs or a CPU. Reads a folder of packed rows from
data_prep.py; without --data it first prepares the standard library of the running Python. Writes
--out: config.json, tokenizer.json, log.jsonl, samples.txt, checkpoints/<step>/. It does not train
Dream (train_dream.py), and does not know whether a model fits a device that is not here
(bench/compile_for.py).

One optimizer step is one compiled program: a scan over micro-batches, each a scan over layers. The
gradient is that of (sum of token losses) / (all valid tokens of the step), whatever the
micro-batches. Row order, dropout and learning rate are functions of (seed, step), so a checkpoint
holds parameters, moments and the step alone.

A line shows the loss, in nats a token, and of it main (the next token) and mtp (those after it);
the learning rate, the gradient's norm before clipping, mfu (the share of the device's peak) and
wait (the share of the time without a batch). An evaluation is a line of its own.

Letters: A micro-batches of a step, B rows of a micro-batch, L length, V vocabulary.
"""

import dataclasses
import functools
import lzma
import math
import time
import typing
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from jax import NamedSharding, P

import checkpoints
import model_pythoncoder as pc
import runs
from rows import held_out, open_data, prefetch, standard_library, token_bytes
from runs import Count, Natural, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of rows from data_prep.py; default: the Python standard library, prepared under data/
    data: str = ""
    out: str = "out/train_tpu"  # folder of the run
    # folder of a run to continue, with its settings, not those of devices (--fsdp, --hosts, ..)
    resume: str = ""
    # preset, see CONFIGS in model_pythoncoder.py; default: the largest that memory and data allow
    model: str = ""
    steps: Natural = 0  # optimizer steps; 0: from --epochs
    # rows of a step, all devices; 0: 8,192 to 131,072 tokens by the data, 4,096 on a CPU
    batch_size: Natural = 0
    # ---- the model
    seq_len: Natural = 0  # tokens per row; 0: that of the data, else the model's, at most 2048
    # differential attention: floored | as published | DIFF V2 | none, plain attention
    diff: Literal["seed", "paper", "v2", "none"] = "seed"
    # standard deviation of new matrices: by fan-in | 0.02; default: the preset's
    init_std: Literal["", "fan_in", "paper"] = ""
    # dropout rate of attention output, feed-forward hidden and output; default: 0.1, small models 0
    dropout: typing.Annotated[float, (0, 0.99)] | None = None
    # weight of the multi-token-prediction loss (the token after the next)
    mtp_weight: NonNegative = 0.1
    # ---- training
    epochs: Positive = 4.0  # passes over the training rows; sets --steps
    lr: NonNegative = 0.0  # peak learning rate; 0: 3e-4 sqrt(1.5e9 / parameters), at most 3e-3
    warmup: Natural = 0  # steps of linear warm-up; 0: 2000, or a tenth of a shorter run
    optimizer: Literal["", "adamw", "muon"] = ""  # default: muon below 100 M parameters
    # number type of the computation; parameters are float32
    dtype: Literal["", "bfloat16", "float32"] = ""
    seed: Natural = 0  # initial weights, row order, dropout
    # ---- the machine
    micro_batch: Natural = 0  # rows per device and forward pass; 0: by model and memory
    fsdp: Natural = 0  # devices that share one copy of the weights; 0: all devices / --tensor
    tensor: Count = 1  # devices that share each layer's heads, feed-forward and vocabulary
    # "cpu": train on the CPU even if the machine has an accelerator
    device: Literal["", "cpu"] = ""
    # "auto" on TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX of this process; default: one host
    hosts: str = ""
    compile_cache: str = "~/.cache/unmask"  # folder of compiled programs; "" compiles anew
    # ---- evaluation and logs
    eval_rows: Count = 512  # held-out rows per evaluation, at most
    eval_only: str = ""  # folder of a model to score on held-out rows, instead of training
    # steps between evaluations, each with a sample and checkpoint; 0: steps / 10, 50 to 1000
    eval_every: Natural = 0
    log_every: Count = 10  # steps between rows of the log
    wandb: str = ""  # project name at Weights & Biases; default: log to files only


CLIP = 1.0  # maximum global gradient norm
WEIGHT_DECAY = 0.1  # of matrices; with adamw of embeddings, too
LOOK = 50  # step of a first evaluation and sample: after about a minute on a CPU
SAVE_SECONDS = 1800  # between checkpoints, checked when it logs
KEEP = 2  # newest checkpoints to keep, besides the best
PROMPT = "def read_lines(path):\n"  # prefix of the samples drawn in training

# Settings that may differ between hosts, and those that --resume does not take from the run.
OF_A_HOST = ("hosts", "data", "out", "resume", "wandb", "compile_cache")
MACHINE = ("device", "hosts", "fsdp", "tensor")
COLUMNS = ("token_ABL", "segment_ABL", "position_ABL")  # of a batch
# of a step, in the order of the log; jit returns them sorted
METRICS = ("loss", "lr", "main", "mtp", "grad_norm", "ok")


def settle(cfg, devices, data=None, memory=None):
    """(cfg without a default left, architecture, pc.Compute, mesh), by the devices and the data.

    data are the training rows; None stands for endless data. memory is that of a device in GiB,
    where JAX cannot ask it. Prints nothing, and configures nothing.
    """
    device = devices[0]
    memory = memory or checkpoints.device_memory_gib(device)
    on_cpu = memory is None
    sharing = devices[: cfg.fsdp * cfg.tensor or None]  # one copy of the weights
    seen = cfg.epochs * data.tokens if data else math.inf
    name = cfg.model or largest_model(sharing, memory, seen)
    cfg = dataclasses.replace(cfg, model=name)
    model = architecture(cfg, data)
    params = pc.count_params(model)
    small = params < 1e8
    copies = max(1, len(devices) // cfg.tensor)
    tokens = 4096
    if not on_cpu:  # short runs take smaller steps: two thousand of them rather than sixty
        tokens = 2 ** int(math.log2(np.clip(seen / 2000, 8192, 131_072)))
    most = rows_at_a_time(name, model.positions, most_rows(name, sharing, memory))
    batch, micro = batch_sizes(cfg, tokens // model.positions, copies, most)

    # Length: whole epochs, unless --steps says otherwise. Evaluations divide an epoch evenly, so
    # that its end is one of them.
    steps = cfg.steps
    eval_every = cfg.eval_every
    if data:
        if len(data.columns) > 3:
            raise ValueError(
                f"{data.folder} holds pairs, "
                "for train_dream.py: PythonCoder would learn prompts too"
            )
        epoch = data.total // batch
        if not epoch:
            raise ValueError(
                f"{data.folder} has {data.total} training rows, a step takes {batch}; "
                "lower --batch_size or add data"
            )
        steps = steps or max(1, round(cfg.epochs * epoch))
        evaluations = max(1, round(epoch / min(1000, max(50, steps // 10))))
        eval_every = eval_every or math.ceil(epoch / evaluations)

    # A CPU is fastest in float32. Small models have seen too little to need dropout.
    dtype = cfg.dtype or ("float32" if on_cpu else "bfloat16")
    dropout = cfg.dropout
    if dropout is None:
        dropout = 0.0 if small else 0.1
    cfg = dataclasses.replace(
        cfg,
        seq_len=model.positions,
        batch_size=batch,
        micro_batch=micro,
        steps=steps,
        eval_every=eval_every,
        lr=cfg.lr or float(np.clip(3e-4 * math.sqrt(1.5e9 / params), 1e-4, 3e-3)),
        warmup=cfg.warmup or min(2000, max(1, steps // 10)),
        optimizer=cfg.optimizer or ("muon" if small else "adamw"),
        dtype=dtype,
        dropout=dropout,
    )
    compute = pc.Compute(
        jnp.dtype(dtype),
        remat="qkvo",
        block=64 if on_cpu else 128,  # queries at a time: scores that stay in a CPU's caches
        kernel=fused_kernel(device, dtype),
        tpu=device.platform == "tpu",
        dropout=dropout,
    )
    return cfg, model, compute, checkpoints.training_mesh(cfg, model, devices)


# ---- the run -----------------------------------------------------------------------------------


@runs.enough_memory("a smaller --micro_batch or --model, or data of a smaller --seq_len")
def main(flags):
    checkpoints.connect(flags)
    if flags.eval_only:
        return evaluate(flags)
    data, heldout, tokenizer_json = find_data(flags)
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    cfg, model, compute, mesh = settle(flags, jax.devices(), data)
    exact_products(cfg.dtype)
    describe(cfg, model, mesh, data)
    optimizer = make_optimizer(compute.dtype, muon=cfg.optimizer == "muon")
    shapes = checkpoints.state_shapes(pc, model, optimizer, mesh)
    needed = checkpoints.bytes_on_a_device((shapes, shapes["params"]))  # with gradients
    checkpoints.check_memory(mesh, needed, {})
    with runs.Folder(cfg, rank=jax.process_index(), hosts=jax.process_count()) as folder:
        store, about, state, first, skipped = begin(
            folder, cfg, flags, model, data, optimizer, shapes
        )
        if first < cfg.steps:
            print("compiling the train step", flush=True)
            graph = pc.graph_of(model, compute)
            train_step = lower_step(cfg, graph, optimizer, shapes, mesh).compile()
        plain = pc.graph_of(model, dataclasses.replace(compute, remat="none", dropout=0.0))
        epoch = max(data.total // cfg.batch_size, cfg.eval_every)
        meter = Meter(cfg, model, mesh, first)
        saved_at = time.monotonic()
        in_a_row = 0  # steps without a finite gradient
        load = functools.partial(load_batch, data, cfg, mesh)
        for step, batch, waited_s in prefetch(load, first, cfg.steps):
            # One program: all gradients, clipping, update. The state takes the old one's memory.
            state, metrics = train_step(state, batch, jnp.int32(step))
            metrics = {name: float(metrics[name]) for name in METRICS}  # waits for the step
            meter.waited_s += waited_s
            done = step + 1
            last = done == cfg.steps

            # A gradient that is not finite leaves the state as it was. Five are a bad setting.
            in_a_row += 1
            if metrics.pop("ok"):
                in_a_row = 0
            else:
                skipped += 1
            if in_a_row == 5:
                store.close()  # with a checkpoint that is being written
                raise RuntimeError(
                    f"no finite gradient in five steps up to {done}; "
                    f"lower --lr, then --resume={cfg.out}"
                )

            late = False  # by the clock of host 0: all have to save the same step
            if step == first or last or done % cfg.log_every == 0 or in_a_row:
                folder.log({"step": done, **metrics, **meter.row(done), "skipped": skipped})
                late = checkpoints.host_0_says(time.monotonic() - saved_at > SAVE_SECONDS)

            # Logged before the checkpoint, since --resume cuts the log to the newest one. An epoch
            # ends with an evaluation.
            scores = {}
            evaluates = last or done % epoch % cfg.eval_every == 0 or done == LOOK < cfg.eval_every
            if evaluates:
                lm = nnx.merge(plain, state["params"])
                scores = score(lm, heldout, cfg.eval_rows, micro_rows(cfg, mesh), mesh, tokenizer)
                drawn = sample(lm, tokenizer, data.meta, folder, done)
                folder.log({"step": done, **scores, **drawn})

            # SIGTERM or Ctrl-C, to any host. The checkpoint is written while the next steps run.
            stops = folder.signal or store.manager.reached_preemption(done)
            if evaluates or late or stops:
                meta = about | {"step": done, "skipped": skipped}
                store.save(done, state, meta, scores or None)
                meter.restart(done)  # none of this is the steps' time
                saved_at = time.monotonic()
            if stops:
                store.close()
                jax.distributed.shutdown()  # waits for the other hosts, until all have saved
                folder.leave(done)
        store.close()
    print(f"done: {cfg.out}; generate code with: python generate.py --ckpt={cfg.out}")


# ---- what fits the device and the data ---------------------------------------------------------

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
    if device.platform == "tpu":
        return "tpu"
    if device.platform == "gpu" and dtype == "bfloat16":
        version = str(getattr(device, "compute_capability", ""))  # 8.9; of AMD's a name
        if version.partition(".")[0] in ("8", "9", "10", "12"):
            return "gpu"
    return ""


def most_rows(name, devices, memory):
    """Rows at a time that fit the memory in GiB of each of `devices`, which share the weights;
    infinite: unknown.
    """
    recorded = STEP_GIB.get(devices[0].platform, {}).get(name)
    if not recorded:
        return math.inf
    params = pc.count_params(pc.CONFIGS[name])
    # weights, moments and gradients on other devices
    shared_gib = 14 * params / 2**30 * (1 - 1 / len(devices))
    fitting = [rows for rows, gib in recorded.items() if gib - shared_gib <= memory]
    return max(fitting, default=0)


def largest_model(devices, memory, seen):
    """The name of the largest preset that memory allows, and a run that sees so many tokens."""
    name = "tiny"
    for larger in STEP_GIB.get(devices[0].platform, ()):
        wanted = TOKENS_PER_PARAMETER * pc.count_params(pc.CONFIGS[larger])
        if seen >= wanted and most_rows(larger, devices, memory):
            name = larger
    return name


def architecture(cfg, data=None):
    """The preset --model, with positions for a row. It has the data's number of ids if the preset
    has fewer, or twice as many.
    """
    name = cfg.model or "tiny"
    if name not in pc.CONFIGS:
        raise ValueError(
            f"--model={name}: not one of {', '.join(pc.CONFIGS)}; train_dream.py trains Dream"
        )
    model = pc.CONFIGS[name]
    if cfg.diff == "v2" and model.heads // model.kv_heads % 2:
        raise ValueError(
            f"--diff=v2 needs an even number of heads per key head, not {name}'s: "
            "choose another --model"
        )
    ids = model.vocab
    positions = cfg.seq_len or model.positions
    if data:
        positions = data.meta["seq_len"]
        padded = data.meta["vocab_padded"]
        if not data.meta["vocab_size"] <= ids < 2 * padded:
            ids = padded
    return dataclasses.replace(
        model,
        vocab=ids,
        positions=positions,
        diff=cfg.diff,
        init_std=cfg.init_std or model.init_std,
        mtp=model.mtp and cfg.mtp_weight > 0,
    )


def rows_at_a_time(name, length, fitting):
    """The most rows of so many tokens per device at a time, where so many of the preset's fit."""
    share = min(1, pc.CONFIGS[name].positions / length)
    return max(1, int(share * min(MICRO_BATCH.get(name, 1), fitting)))


def batch_sizes(cfg, rows, copies, most):
    """(rows of a step, about `rows`; of each of `copies` devices at a time, at most `most`)."""
    batch = cfg.batch_size or max(1, rows // copies) * copies
    micro = cfg.micro_batch
    if not micro:
        micro = max(m for m in range(1, most + 1) if batch // copies % m == 0)
    if batch % (copies * micro):
        raise ValueError(
            f"--batch_size={batch} does not divide over "
            f"{copies} devices times --micro_batch={micro}"
        )
    return batch, micro


# ---- data and state ----------------------------------------------------------------------------


def find_data(cfg):
    """(training rows, held-out rows, tokenizer.json): --data, or the standard library."""
    runs.check_out(cfg)
    if cfg.data:
        return open_data(cfg.data, cfg.seq_len, packed=True)
    model = architecture(cfg)
    vocab = min(model.vocab, 32_768)
    return standard_library(cfg.hosts, model.positions, vocab, f"--vocab_size={vocab}")


def exact_products(dtype):
    """Products of float32 in float32: else a TPU multiplies in bfloat16, a GPU in TF32."""
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)


def describe(cfg, model, mesh, data):
    """Print what was settled."""
    kind = jax.devices()[0].device_kind
    params = pc.count_params(model)
    tokens = cfg.batch_size * cfg.seq_len
    seen = cfg.steps * tokens
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(f"{mesh.size} x {kind}, mesh {axes}, {cfg.dtype} compute")
    print(f"model {cfg.model} of {params:,} parameters: {seen / params:.1f} tokens for each")
    print(f"{cfg.steps:,} steps of {tokens:,} tokens = {seen / data.tokens:.2f} epochs")
    print(f"{model.vocab:,} token ids, {cfg.optimizer}, peak learning rate {cfg.lr:.3g}")


def begin(folder, cfg, flags, model, data, optimizer, shapes):
    """(store, what a checkpoint says of itself, state, its step, steps that were skipped so far).

    The state is that of the newest checkpoint of --resume, or new. Writes the files of the folder.
    ValueError on all hosts if one of them has other settings.
    """
    settings = dataclasses.asdict(cfg)
    about = {
        "model": dataclasses.asdict(model),
        "data": data.meta["fingerprint"],
    }
    same = {name: value for name, value in settings.items() if name not in OF_A_HOST}
    checkpoints.check_hosts(folder.out, about | {"train": same})
    about["train"] = settings
    store = checkpoints.Checkpoints(folder.out, KEEP)
    found = None
    if cfg.resume:
        found = store.resume(cfg.resume, about, shapes)
    if found:
        state, saved = found
        if saved["step"] >= cfg.steps:
            print(
                f"{cfg.out} has all of its {cfg.steps:,} steps; "
                "raise --steps, or --epochs with --steps=0"
            )
    else:
        state = new_state(cfg, model, optimizer, shapes)
        saved = {"step": 0, "skipped": 0}
    files = checkpoints.companions(data.folder)
    files["generation_config.json"] = {"eos_token_id": data.meta["eos_id"]}
    own = {"steps": flags.steps, "micro_batch": flags.micro_batch}  # settled anew by --resume
    config = about | {"train": settings | own, "data": str(data.folder)}
    folder.begin(saved["step"], config, files)
    return store, about, state, saved["step"], saved["skipped"]


def new_state(cfg, model, optimizer, shapes):
    """The state before the first step. It is born split over the mesh: no device ever holds all."""

    def make():
        params = pc.new_params(model, cfg.seed)
        return {"params": params, "opt": optimizer.init(params)}

    layout = jax.tree.map(lambda s: s.sharding, shapes)
    return jax.jit(make, out_shardings=layout)()


def micro_rows(cfg, mesh):
    """Rows of a micro-batch, on all devices together."""
    return cfg.micro_batch * mesh.size // cfg.tensor


def load_batch(data, cfg, mesh, step):
    """The rows of a step on the mesh: those of its place in the epoch's order, cut into
    micro-batches.
    """
    epoch, i = divmod(step, data.total // cfg.batch_size)
    ids = data.order(cfg.seed, epoch)[i * cfg.batch_size :][: cfg.batch_size]
    ids = ids.reshape(-1, micro_rows(cfg, mesh))
    on_rows = NamedSharding(mesh, P(None, pc.BATCH))
    columns = checkpoints.on_mesh(data, ids, on_rows)
    return dict(zip(COLUMNS, columns, strict=False))


class Meter:
    """Speed between two rows of the log."""

    def __init__(self, cfg, model, mesh, step):
        self.cfg = cfg
        self.flops = step_flops(cfg, model) / mesh.size  # of a device
        self.restart(step)

    def restart(self, step):
        self.step = step
        self.started = time.perf_counter()
        self.waited_s = 0.0

    def row(self, step):
        """Tokens per second, share of the device's peak (MFU), share of the time without a batch,
        minutes to go.
        """
        cfg = self.cfg
        elapsed = time.perf_counter() - self.started
        rate = (step - self.step) / elapsed
        row = {"tok_per_s": rate * cfg.batch_size * cfg.seq_len}
        row["eta_min"] = (cfg.steps - step) / rate / 60
        peak = checkpoints.peak_flops(jax.devices()[0])
        if cfg.dtype == "bfloat16" and math.isfinite(peak):
            row["mfu"] = rate * self.flops / peak
        row["wait"] = self.waited_s / elapsed
        self.restart(step)
        return row


def step_flops(cfg, model):
    """Training FLOPs of a step, of all devices together, without what remat computes again."""
    return pc.flops_per_token(model, cfg.seq_len) * cfg.batch_size * cfg.seq_len


# ---- the compiled step -------------------------------------------------------------------------


def wsd(step, peak, steps, warmup=2000, stable=0.9, start=0.01, final=0.1):
    """Warmup-stable-decay learning rate of update `step` (0, 1, ...), float32.

    A line from start * peak until `warmup`, peak until int(stable * steps), then half a cosine to
    final * peak.
    """
    step = jnp.asarray(step, jnp.float32)
    decay = int(stable * steps)
    rising = start + (1 - start) * step / max(warmup, 1)
    x = (step - decay) / max(steps - decay, 1)
    x = jnp.clip(x, 0, 1)
    falling = final + (1 - final) * (1 + jnp.cos(jnp.pi * x)) / 2
    factor = jnp.where(step < decay, 1.0, falling)
    factor = jnp.where(step < warmup, rising, factor)
    return peak * factor


def decays(tree):
    """Weight decay mask, by name, as stacked norms have two axes: matrices and embeddings, no
    norms, no lambda_*.
    """

    def is_decayed(path, _):
        return path[-1].key in (*pc.SHARDING, "w_lambda")

    return jax.tree_util.tree_map_with_path(is_decayed, tree)


def make_optimizer(mu_dtype, muon=False):
    """Clip, then AdamW at learning rate 1: its updates are multiplied by the schedule of the step.

    mu_dtype is that of the first moments: bfloat16 saves 2 GiB of 23 at 1.08 B and costs nothing
    measurable.

    muon: Muon for the layers' matrices, with updates of AdamW's size (arXiv:2502.16982); Adam
    without decay for embeddings, heads, norms and vectors.
    """
    clipping = optax.clip_by_global_norm(CLIP)
    if not muon:
        adamw = optax.adamw(
            1.0,
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            mu_dtype=mu_dtype,
            weight_decay=WEIGHT_DECAY,
            mask=decays,
        )
        return optax.chain(clipping, adamw)
    # The matrices of all layers are stacked, and each of a stack is orthogonalised by itself.
    matrices = {*pc.SHARDING} - {"embed", "head"}
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)

    def axes_of(path, _):
        return axes if path[-1].key in matrices else None

    def dimensions(tree):
        return jax.tree_util.tree_map_with_path(axes_of, tree)

    muon = optax.contrib.muon(
        1.0,
        weight_decay=WEIGHT_DECAY,
        mu_dtype=mu_dtype,
        adam_b2=0.95,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,
    )
    return optax.chain(clipping, muon)


def accumulate(loss_fn, params, batches):
    """Sum of gradients and of outputs of loss_fn(params, batch, sums) -> (loss, aux) over the
    leading axis of batches.

    `sums` are the gradients of the layers so far. The model's backward pass adds to them, and
    returns the new sums as the gradient of `sums`; all other gradients are added here.
    """
    layers = params["layers"]
    rest = params | {"layers": {}}

    def loss_of(rest, sums, batch):
        return loss_fn(rest | {"layers": layers}, batch, sums)

    def body(carry, batch):
        outs, rest_sums, sums = carry
        gradients_of = jax.value_and_grad(loss_of, (0, 1), has_aux=True)
        new, (grads, sums) = gradients_of(rest, sums, batch)
        outs = jax.tree.map(jnp.add, outs, new)
        rest_sums = jax.tree.map(jnp.add, rest_sums, grads)
        return (outs, rest_sums, sums), None

    first = jax.tree.map(lambda x: x[0], batches)
    outs = jax.eval_shape(loss_of, rest, layers, first)
    zeros = optax.tree.zeros_like((outs, rest, layers))
    (outs, rest_sums, sums), _ = jax.lax.scan(body, zeros, batches)
    return rest_sums | {"layers": sums}, outs


def accumulate_apart(loss_fn, params, batches):
    """accumulate() with one reduction over devices a step, not one a micro-batch.

    Each device sums the gradients of its own rows, so it holds whole float32 weights and gradients.
    """

    def of_own_rows(params, batches):
        grads, outs = accumulate(loss_fn, params, batches)
        return jax.tree.map(lambda g: g[None], grads), jax.lax.psum(outs, pc.BATCH)

    apart = jax.shard_map(
        of_own_rows,
        in_specs=(P(), P(None, pc.BATCH)),
        out_specs=(P(pc.BATCH), P()),
        axis_names=set(pc.BATCH),
        check_vma=False,
    )
    grads, outs = apart(params, batches)
    # laid out as the parameters: scattered, not copied
    return jax.tree.map(lambda g: g.sum(0), grads), outs


def make_step(cfg, graph, optimizer, apart=False):
    """train_step(state, batch, step) -> (state, metrics), to be compiled once with the state
    donated. apart: gradients by accumulate_apart, where several devices hold rows.
    """

    def train_step(state, batch, step):
        key = None
        if cfg.dropout:
            key = jax.random.fold_in(jax.random.key(cfg.seed), step)
        main_BL, mtp_BL = pc.target_masks(batch["segment_ABL"])
        main_tokens = jnp.maximum(main_BL.sum(), 1)
        mtp_tokens = jnp.maximum(mtp_BL.sum(), 1)

        def loss_fn(params, micro, sums):  # in nats per target of the whole step
            main, mtp = nnx.merge(graph, params).losses(
                micro["token_ABL"],
                micro["segment_ABL"],
                micro["position_ABL"],
                key,
                micro["row_AB"],
                mtp=cfg.mtp_weight > 0,
                sums=sums,
            )
            main = main / main_tokens
            mtp = mtp / mtp_tokens
            return main + cfg.mtp_weight * mtp, {"main": main, "mtp": mtp}

        A, B, _ = batch["token_ABL"].shape
        micros = batch | {"row_AB": jnp.arange(A * B).reshape(A, B)}
        mesh = jax.sharding.get_abstract_mesh()
        holders = math.prod(mesh.shape.get(axis, 1) for axis in pc.BATCH)  # of different rows
        gradients = accumulate_apart if apart and A > 1 and holders > 1 else accumulate
        grads, (loss, parts) = gradients(loss_fn, state["params"], micros)

        # The update, which a gradient that is not finite leaves out.
        lr = wsd(step, cfg.lr, cfg.steps, cfg.warmup)
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(norm)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = jax.tree.map(lambda p, u: p + lr * u, state["params"], updates)
        new = {"params": params, "opt": opt}
        state = jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, state)
        return state, {
            "loss": loss,
            **parts,
            "lr": lr,
            "grad_norm": norm,
            "ok": ok,
        }

    return train_step


def lower_step(cfg, graph, optimizer, shapes, mesh, memory=None):
    """The train step, traced for a mesh that need not be here; .compile() makes the program.

    Gradients are summed over devices once a step where a third of a device's memory, in GiB, holds
    whole float32 weights and gradients.
    """
    memory = memory or checkpoints.device_memory_gib(mesh.devices.flat[0]) or math.inf
    whole = 8 * sum(x.size for x in jax.tree.leaves(shapes["params"]))
    apart = whole / 2**30 <= memory / 3
    size = micro_rows(cfg, mesh)
    shape = (cfg.batch_size // size, size, cfg.seq_len)
    on_rows = NamedSharding(mesh, P(None, pc.BATCH))
    everywhere = NamedSharding(mesh, P())
    row = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=on_rows)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    layout = jax.tree.map(lambda s: s.sharding, shapes)
    train_step = jax.jit(
        make_step(cfg, graph, optimizer, apart),
        donate_argnums=0,
        out_shardings=(layout, None),
    )
    with jax.set_mesh(mesh):
        return train_step.lower(shapes, dict.fromkeys(COLUMNS, row), step)


# ---- scores ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def sums_of(graph, params, token_ABL, segment_ABL, position_ABL, bytes_V):
    """[nats, predicted tokens, their bytes], summed over the rows of a batch."""
    token_BL = token_ABL[0]
    segment_BL = segment_ABL[0]
    model = nnx.merge(graph, params)
    nats, _ = model.losses(token_BL, segment_BL, position_ABL[0], mtp=False)
    mask_BL, _ = pc.target_masks(segment_BL)
    bytes_BL = mask_BL * bytes_V[jnp.roll(token_BL, -1, 1)]
    return jnp.stack([nats, mask_BL.sum(), bytes_BL.sum()])


def score(model, heldout, count, size, mesh, tokenizer):
    """{"heldout_nats", "bits_per_byte"}: mean nats per token of `count` held-out rows, `size` rows
    at a time.
    """
    if not heldout.total:
        return {}
    on_rows = NamedSharding(mesh, P(None, pc.BATCH))
    graph, params = nnx.split(model)
    bytes_V = jnp.asarray(token_bytes(tokenizer, model.cfg.vocab))
    sums = []
    with jax.set_mesh(mesh):
        for ids in heldout.padded(count, size):
            columns = checkpoints.on_mesh(heldout, ids, on_rows)
            sums.append(sums_of(graph, params, *columns[:3], bytes_V))  # pairs have a fourth
    nats, tokens, text_bytes = np.sum(np.asarray(sums, np.float64), 0)
    return {
        "heldout_nats": nats / tokens,
        "bits_per_byte": nats / math.log(2) / text_bytes,
    }


def sample(model, tokenizer, meta, folder, step):
    """Continue PROMPT, print the text and append it to samples.txt: its tokens per forward pass."""
    if jax.process_count() > 1:  # one host does not hold the whole model
        return {}
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    rule = pc.Sampling(
        vocab=meta["vocab_size"],
        eos_ids=(meta["eos_id"],),
        speculate=model.cfg.mtp,
    )
    new = min(64, int(model.cfg.positions * model.cfg.yarn_factor) - len(prompt))
    (ids,), stats = pc.generate(model, [prompt], new, rule, jax.random.key(0))
    text = f"---- step {step}\n{PROMPT}{tokenizer.decode(ids)}\n"
    print(text)
    folder.append("samples.txt", text)
    return {"tokens_per_forward": stats["tokens"] / stats["forwards"]}


def evaluate(cfg):
    """--eval_only: print the scores of a model on held-out rows, beside `xz -9` on the same
    text.
    """
    heldout, tokenizer = held_out(cfg.eval_only, cfg.data)
    model, step, mesh = checkpoints.load_for_inference(pc, cfg.eval_only, 0, cfg.dtype, rows=0)
    exact_products(model.compute.dtype)
    mesh = mesh or checkpoints.mesh_of(jax.devices()[:1], (1, 1, 1))
    ids = heldout.spread(cfg.eval_rows)
    devices = mesh.shape["data"]
    size = math.ceil(min(16, len(ids)) / devices) * devices  # rows at a time
    scores = {"step": step, "rows": len(ids)}
    scores |= score(model, heldout, len(ids), size, mesh, tokenizer)

    token_RL, segment_RL = heldout.read(ids)[:2]
    text = tokenizer.decode(token_RL[segment_RL > 0].tolist())
    raw = text.encode()
    packed = lzma.compress(raw, preset=9)
    scores["xz_bits_per_byte"] = 8 * len(packed) / len(raw)
    print(" | ".join(f"{name} {value:,.4g}" for name, value in scores.items()))
    return scores


if __name__ == "__main__":
    runs.command(main, Config, __doc__, MACHINE)
