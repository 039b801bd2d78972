"""Train Dream: masked diffusion over text, in blocks or whole. Prints.

    python train_dream.py --steps=50 --seq_len=512 --out=out/try    # CPU: the tiny preset
    python train_dream.py --resume=out/try    # continues a stopped run with its own settings
    python train_dream.py --objective=ar --out=out/ar    # the same layers, autoregressive
    python train_dream.py --init=out/ar --block_length=4 --block_warmup=200    # then in blocks
    python train_dream.py --init=out/diffucoder --data=data/chat --lora_rank=16 --base_bits=4
    python train_dream.py --eval_only=out/diffucoder --data=data/chat    # held-out bits per byte
    python train_dream.py --eval_only=out/ar --block_length=4    # in other blocks than it has

Reads a folder of packed rows, or of pairs, from data_prep.py; without --data it first prepares the
standard library of the running Python. Writes --out: config.json, tokenizer.json, log.jsonl,
samples.txt, checkpoints/<step>/; with --lora_rank also adapters for peft, and merged/, a whole
model. It does not train PythonCoder (train_tpu.py), nor from rewards (coupled_grpo.py).

With --block_length it learns block diffusion (BD3-LM, arXiv:2503.09573): a masked token attends to
its own block and to the clean text before it, so each row passes the layers twice. Blocks of one
token are an autoregressive model. Row order, noise and learning rate are functions of (seed, step).

A line shows the loss, in nats, the learning rate, the gradient's norm, mfu (the share of the
device's peak) and wait (the share of the time without a batch). An evaluation is another line.

Letters: A micro-batches of a step, B rows of a micro-batch, L length, V vocabulary, N draws.
"""

import dataclasses
import functools
import hashlib
import math
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from jax import NamedSharding, P

import checkpoints
import diffusion
import model_dream as md
import runs
import sample_block
import sample_dream
from rows import held_out, open_data, prefetch, standard_library, token_bytes
from runs import Count, Natural, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""  # folder of rows from data_prep.py; default: the Python standard library
    out: str = "out/train_dream"  # folder of the run
    resume: str = ""  # folder of a run to continue, with its settings, not those of devices
    model: str = ""  # preset, see CONFIGS in model_dream.py; default: tiny, or the model of --init
    steps: Natural = 0  # optimizer steps; 0: from --epochs
    batch_size: Natural = 0  # rows of a step, all devices; 0: by the data, 4,096 tokens on a CPU
    # ---- the model
    init: str = ""  # folder of a Dream to start from, converted or trained here
    lora_rank: Natural = 0  # with --init: rank of LoRA's adapters; 0: train all weights
    base_bits: Literal[0, 8, 4] = 0  # with --lora_rank: bits of the frozen matrices; 0: --dtype
    objective: Literal["diffusion", "ar"] = "diffusion"  # predict masked tokens | each next token
    anneal_steps: Natural = 0  # steps from causal to bidirectional attention, without blocks
    block_length: Natural = 0  # tokens of a block, which sees those before it; 0: as --init
    block_warmup: Natural = 0  # steps in which the block size grows 1, 2, 4, .. to --block_length
    seq_len: Natural = 0  # tokens per row; 0: that of the data, else at most 2048
    # ---- training
    epochs: Positive = 4.0  # passes over the training rows; sets --steps
    # peak; 0: 3e-4 sqrt(1.5e9 / parameters), at most 3e-3; a tenth with --init without LoRA
    lr: NonNegative = 0.0
    warmup: Natural = 0  # steps of linear warm-up; 0: 2000, or a tenth of a shorter run
    optimizer: Literal["", "adamw", "muon"] = ""  # default: muon below 100 M without --init
    dtype: Literal["", "bfloat16", "float32"] = ""  # of the computation; parameters: float32
    remat: Literal["none", "qkvo", "full"] = "qkvo"  # what the backward pass recomputes
    seed: Natural = 0  # initial weights, row order, noise
    # ---- the machine
    micro_batch: Natural = 0  # rows per device and forward pass; 0: by model
    fsdp: Natural = 0  # devices that share one copy of the weights; 0: all devices / --tensor
    tensor: Count = 1  # devices that share each layer's heads, feed-forward and vocabulary
    device: Literal["", "cpu"] = ""  # "cpu": even if the machine has an accelerator
    hosts: str = ""  # "auto" on TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX of this process
    compile_cache: str = "~/.cache/unmask"  # folder of compiled programs; "" compiles anew
    # ---- evaluation and logs
    eval_rows: Count = 512  # held-out rows per evaluation, at most
    eval_only: str = ""  # folder of a model to score on held-out rows, instead of training
    eval_every: Natural = 0  # steps between scores, samples, checkpoints; 0: a tenth, 50 to 1000
    log_every: Count = 10  # steps between rows of the log
    wandb: str = ""  # project name at Weights & Biases; default: log to files only


CLIP = 1.0  # maximum global gradient norm
WEIGHT_DECAY = 0.1  # of matrices; with adamw of embeddings, too
LOOK = 50  # step of a first evaluation and sample: after about a minute on a CPU
SAVE_SECONDS = 1800  # between checkpoints, checked when it logs
KEEP = 2  # newest checkpoints to keep, besides the best
PROMPT = "def read_lines(path):\n"  # prefix of the samples drawn in training
AR_WEIGHT = 3.3  # of the autoregressive loss where the context is causal: Nemotron's 1 / 0.3
MICRO_BATCH = {"tiny": 2, "500m": 4}  # rows per device at a time, 1 of any other preset
MASKS = "<|mask|>", "<mask>"  # what tokenizers call MASK

OF_A_HOST = "hosts data out resume wandb compile_cache".split()  # may differ between hosts
MACHINE = "device hosts fsdp tensor".split()  # not taken from a run by --resume
COLUMNS = (
    "token_ABL",
    "segment_ABL",
    "position_ABL",
    "fixed_ABL",  # of pairs alone
)
METRICS = "loss lr grad_norm ok".split()  # in the order of the log; jit returns them sorted


def settle(cfg, devices, data=None, mask_id=None):
    """(cfg without a default left, architecture, md.Compute, mesh), by the devices and the data.

    data are the training rows, None endless data; mask_id is that of a Dream from scratch. Pure.
    """
    device = devices[0]
    on_cpu = device.platform == "cpu"
    model = architecture(cfg)
    mesh = checkpoints.training_mesh(cfg, model, devices)
    seq_len = data.meta["seq_len"] if data else cfg.seq_len or min(model.positions, 2048)
    if seq_len > model.positions:
        raise ValueError(
            f"rows of {seq_len} tokens do not fit the {model.positions} positions of the model; "
            f"prepare them with data_prep.py --seq_len={model.positions} at most"
        )
    if data and not cfg.init:  # the ids of the data, and MASK
        meta = data.meta
        ids = {name: meta.get(name, meta["eos_id"]) for name in ("pad_id", "bos_id", "eos_id")}
        vocab = math.ceil(max(meta["vocab_size"], mask_id + 1) / 128) * 128
        model = dataclasses.replace(model, vocab=vocab, mask_id=mask_id, **ids)
    params = md.count_params(model)
    small = params < 1e8 and not cfg.init
    copies = mesh.size // cfg.tensor
    tokens = 4096
    if not on_cpu:  # short runs take smaller steps: two thousand of them rather than sixty
        seen = cfg.epochs * data.tokens if data else math.inf
        tokens = 2 ** int(math.log2(np.clip(seen / 2000, 8192, 131_072)))
    name = "init" if cfg.init else cfg.model or "tiny"
    batch, micro = batch_sizes(cfg, tokens // seq_len, copies, MICRO_BATCH.get(name, 1))

    # Whole epochs, if --steps does not say; an epoch ends with an evaluation.
    steps = cfg.steps
    eval_every = cfg.eval_every
    if data:
        epoch = data.total // batch
        if not epoch:
            raise ValueError(
                f"{data.folder} has {data.total} training rows, a step takes {batch}; "
                "lower --batch_size or add data"
            )
        steps = steps or max(1, round(cfg.epochs * epoch))
        evaluations = max(1, round(epoch / min(1000, max(50, steps // 10))))
        eval_every = eval_every or math.ceil(epoch / evaluations)

    # Small models bear larger steps; a trained model goes on with a tenth, adapters with all.
    peak = float(np.clip(3e-4 * math.sqrt(1.5e9 / params), 1e-4, 3e-3))
    if cfg.init and not cfg.lora_rank:
        peak /= 10
    dtype = cfg.dtype or ("float32" if on_cpu else "bfloat16")
    cfg = dataclasses.replace(
        cfg,
        model=name,
        seq_len=seq_len,
        batch_size=batch,
        micro_batch=micro,
        steps=steps,
        eval_every=eval_every,
        lr=cfg.lr or peak,
        warmup=cfg.warmup or min(2000, max(1, steps // 10)),
        optimizer=cfg.optimizer or ("muon" if small else "adamw"),
        dtype=dtype,
    )
    compute = md.Compute(
        platform=md.platform_of(device),
        dtype=jnp.dtype(dtype),
        remat=cfg.remat,
        block=64 if on_cpu else 128,  # queries at a time: scores that stay in a CPU's caches
    )
    return cfg, model, compute, mesh


@runs.enough_memory("--remat=full, a smaller --micro_batch, or data of a smaller --seq_len")
def main(flags):
    checkpoints.connect(flags)
    if flags.eval_only:
        return evaluate(flags)
    check_lora(flags)
    data, heldout, tokenizer_json = find_data(flags)
    tokenizer, mask_id = with_mask(flags, data.meta, tokenizer_json)
    cfg, model, compute, mesh = settle(flags, jax.devices(), data, mask_id)
    exact_products(cfg.dtype)
    describe(cfg, model, mesh, data)
    optimizer = make_optimizer(compute.dtype, cfg.optimizer == "muon")
    shapes = shapes_that_fit(cfg, model, optimizer, mesh)
    with runs.Folder(cfg, rank=jax.process_index(), hosts=jax.process_count()) as folder:
        store, about, state, first, skipped = begin(
            folder, cfg, flags, model, data, tokenizer, optimizer, shapes, mesh
        )
        graph = md.graph_of(model, compute)
        if first < cfg.steps:
            print("compiling the train step", flush=True)
            lowered = lower_step(cfg, graph, optimizer, shapes, mesh, len(data.columns))
            train_step = lowered.compile()
        epoch = max(data.total // cfg.batch_size, cfg.eval_every)
        meter = Meter(cfg, model, mesh, first)
        saved_at = time.monotonic()
        in_a_row = 0  # steps without a finite gradient
        scores = {}  # of the last evaluation
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

            # Logged before the checkpoint, since --resume cuts the log to the newest one.
            evaluates = last or done % epoch % cfg.eval_every == 0 or done == LOOK < cfg.eval_every
            if evaluates:
                lm = nnx.merge(graph, weights(state))
                scores = score(lm, heldout, cfg.eval_rows, micro_rows(cfg, mesh), mesh, tokenizer)
                drawn = sample(lm, tokenizer, data, folder, done)
                folder.log({"step": done, **scores, **drawn})

            # SIGTERM or Ctrl-C, to any host. The checkpoint is written while the next steps run.
            stops = folder.signal or store.manager.reached_preemption(done)
            if evaluates or late or stops:
                meta = about | {"step": done, "skipped": skipped}
                store.save(done, kept(state), meta, scores if evaluates else None)
                meter.restart(done)  # none of this is the steps' time
                saved_at = time.monotonic()
            if stops:
                store.close()
                jax.distributed.shutdown()  # waits for the other hosts, until all have saved
                folder.leave(done)
        store.close()
        out = cfg.out
        if cfg.lora_rank:
            adapters = state["params"]
            state = lm = None  # memory for the whole model
            out = save_lora(folder, cfg, model, adapters, about["base_step"], scores)
    print(f"done: {out}; generate code with: python generate_dream.py --ckpt={out}")


def check_lora(cfg):
    """ValueError for settings of LoRA that do not go together."""
    fits = cfg.init and not cfg.hosts and "://" not in cfg.out and cfg.optimizer != "muon"
    if (cfg.lora_rank and not fits) or (cfg.base_bits and not cfg.lora_rank):
        raise ValueError(
            "--base_bits goes with --lora_rank, which goes with --init and adamw, "
            "on one host, and with --out on its own disk"
        )


def architecture(cfg):
    """The preset --model, or the model of --init, with the flags' blocks; autoregressive: of 1."""
    if cfg.init and cfg.model not in ("", "init"):
        raise ValueError(f"--init={cfg.init} says what it is; leave --model={cfg.model} out")
    name = cfg.model or "tiny"
    if cfg.init:
        model = md.read_config(cfg.resume or cfg.init)
    elif name in md.CONFIGS:
        model = md.CONFIGS[name]
    else:
        raise ValueError(
            f"--model={name}: not one of {', '.join(md.CONFIGS)}; train_tpu.py trains PythonCoder"
        )
    size = cfg.block_length
    if cfg.objective == "ar":
        if size or cfg.block_warmup or not model.shift:
            raise ValueError("--objective=ar needs the shift, and has no settings of blocks")
        size = 1
    elif not size and not cfg.anneal_steps:
        size = model.block_length
    if cfg.block_warmup and not size:
        raise ValueError("--block_warmup needs --block_length")
    if cfg.anneal_steps and size:
        raise ValueError("blocks go without --anneal_steps")
    return dataclasses.replace(model, block_length=size, causal=model.causal and size > 0)


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


def find_data(cfg):
    """(training rows, held-out rows, tokenizer.json): --data, or the standard library."""
    runs.check_out(cfg)
    if cfg.data:
        return open_data(cfg.data, cfg.seq_len, packed=True)
    model = architecture(cfg)
    seq_len = cfg.seq_len or min(model.positions, 2048)
    if not cfg.init:
        vocab = min(model.vocab, 32_768)
        return standard_library(cfg.hosts, seq_len, vocab, f"--vocab_size={vocab}")
    # A model that is trained already has a tokenizer, and an EOS.
    path = runs.as_path(cfg.init) / "tokenizer.json"
    eos = sample_dream.load_tokenizer(cfg.init, model).id_to_token(model.eos_id)
    name = hashlib.sha256(path.read_bytes() + eos.encode()).hexdigest()[:8]
    return standard_library(cfg.hosts, seq_len, name, f"--tokenizer={path}", f"--eos={eos}")


def with_mask(cfg, meta, tokenizer_json):
    """(tokenizer, id of MASK): of --init, whose ids the data has, else the data's with <|mask|>."""
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    vocab = tokenizer.get_vocab()
    if not cfg.init:
        for token in MASKS:
            if token in vocab:
                return tokenizer, vocab[token]
        tokenizer.add_special_tokens([MASKS[0]])
        return tokenizer, tokenizer.token_to_id(MASKS[0])
    folder = cfg.resume or cfg.init
    model = architecture(cfg)
    known = sample_dream.load_tokenizer(folder, model)
    if not vocab.items() <= known.get_vocab().items() or meta["eos_id"] != model.eos_id:
        raise ValueError(
            f"tokens of the data or its EOS have other ids than in {folder}; prepare the data with "
            f"--tokenizer={folder}/tokenizer.json --eos='{known.id_to_token(model.eos_id)}'"
        )
    return known, model.mask_id


def exact_products(dtype):
    """Products of float32 in float32: else a TPU multiplies in bfloat16, a GPU in TF32."""
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)


def describe(cfg, model, mesh, data):
    """Print what was settled."""
    params = md.count_params(model)
    seen = cfg.steps * cfg.batch_size * cfg.seq_len
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {axes}, {cfg.dtype} compute")
    print(f"model {cfg.model} of {params:,} parameters: {seen / params:.1f} tokens for each")
    print(f"{cfg.steps:,} steps of {seen // cfg.steps:,} tokens = {seen / data.tokens:.2f} epochs")
    print(f"{model.vocab:,} ids, {cfg.optimizer}, peak lr {cfg.lr:.3g}, LoRA rank {cfg.lora_rank}")


def begin(folder, cfg, flags, model, data, tokenizer, optimizer, shapes, mesh):
    """(store, what its checkpoints say, state, its step, skipped steps). Hosts have to agree."""
    settings = dataclasses.asdict(cfg)
    about = {
        "model": dataclasses.asdict(model),
        "data": data.meta["fingerprint"],
    }
    if cfg.lora_rank:  # what the adapters belong to
        _, base, step = checkpoints.find_weights(runs.as_path(cfg.init))
        about["base"] = base["sums"]
        about["base_step"] = step  # of a run that may train on
    same = {name: value for name, value in settings.items() if name not in OF_A_HOST}
    checkpoints.check_hosts(folder.out, about | {"train": same})
    about["train"] = settings
    store = checkpoints.Checkpoints(folder.out, KEEP)
    frozen = {}
    if cfg.lora_rank:
        frozen["base"] = init_weights(cfg, mesh, cfg.dtype, about["base_step"])
    found = store.resume(cfg.resume, about, kept(shapes)) if cfg.resume else None
    if found:
        state, counts = found
        state["params"] = state.pop("adapters", None) or state["params"]
        if counts["step"] >= cfg.steps:
            print(
                f"{cfg.out} has all of its {cfg.steps:,} steps; "
                "raise --steps, or --epochs with --steps=0"
            )
    else:
        state = new_state(cfg, model, optimizer, shapes, mesh)
        counts = {"step": 0, "skipped": 0}
    files = checkpoints.companions(data.folder)
    own = {"steps": flags.steps, "micro_batch": flags.micro_batch}  # settled anew by --resume
    config = about | {"train": settings | own, "data": str(data.folder)}
    if cfg.init:  # its chat template, code, and the name by which it is known as a chat model
        own = checkpoints.companions(cfg.init)
        if own.keys() - {"tokenizer.json"}:
            files = own
        config["source"] = runs.read_about(cfg.resume or cfg.init, "config.json").get("source", "")
    files["tokenizer.json"] = tokenizer.to_str().encode()
    folder.begin(counts["step"], config, files)
    return store, about, state | frozen, counts["step"], counts["skipped"]


def shapes_that_fit(cfg, model, optimizer, mesh):
    """The state's shapes. ValueError, with what takes less, if state and gradients do not fit."""
    forms = checkpoints.smaller_forms(cfg) if cfg.init else {}
    forms["as asked"] = cfg.lora_rank, cfg.base_bits
    needed = {}
    for flags, form in forms.items():
        shapes = checkpoints.state_shapes(md, model, optimizer, mesh, cfg.dtype, *form)
        needed[flags] = checkpoints.bytes_on_a_device((shapes, shapes["params"]))
    checkpoints.check_memory(mesh, needed.pop("as asked"), needed)
    return shapes


def kept(state):
    """What a checkpoint holds of a state. Adapters have a name of their own: they are no model."""
    name = "adapters" if "base" in state else "params"
    return {
        name: state["params"],
        "opt": state["opt"],
    }


def weights(state):
    """The parameters of the model as it is now. With LoRA "params" are adapters beside "base"."""
    return md.assemble(state.get("base", {}), state["params"])


def new_state(cfg, model, optimizer, shapes, mesh):
    """The state before the first step, from --init or new; no device ever holds all of it."""
    layout = jax.tree.map(lambda s: s.sharding, shapes)
    new = functools.partial(md.new_params, model, cfg.seed)
    if cfg.lora_rank:
        key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 20)
        new = functools.partial(md.new_adapters, key, md.param_shapes(model), cfg.lora_rank)
    if cfg.init and not cfg.lora_rank:
        params = init_weights(cfg, mesh, "float32")
    else:
        params = jax.jit(new, out_shardings=layout["params"])()
    opt = jax.jit(optimizer.init, out_shardings=layout["opt"])(params)
    return {"params": params, "opt": opt}


def init_weights(cfg, mesh, dtype, step=0):
    """The weights of --init; with --base_bits their matrices in so many bits."""
    model, _ = checkpoints.load(md, cfg.init, step, dtype, mesh, cfg.base_bits)
    return nnx.to_pure_dict(nnx.state(model))


def save_lora(folder, cfg, model, adapters, base_step, scores):
    """Write adapters for peft and merged/, returned, with its score: --base_bits does not round it."""
    config = runs.read_json(folder.out / "config.json")
    sample_dream.save_adapters(
        folder.out,
        adapters,
        cfg.lora_rank,
        config["source"],
        model.family,
    )
    out = checkpoints.save_merged(
        md,
        model,
        folder.out,
        cfg.init,
        base_step,
        cfg.dtype,
        adapters,
    )
    whole = dataclasses.replace(cfg, eval_only=out, data=config["data"])
    try:
        nats = evaluate(whole, 4)["heldout_nats"]
        folder.log({"step": cfg.steps, **scores, "merged_nats": nats})
    except ValueError as error:  # no rows are held out, or it is too large for the devices
        print(f"{out} is not scored: {error}")
    return out


def micro_rows(cfg, mesh):
    """Rows of a micro-batch, on all devices together."""
    return cfg.micro_batch * mesh.size // cfg.tensor


def load_batch(data, cfg, mesh, step):
    """The rows of a step, by its place in the epoch's order, in micro-batches on the mesh."""
    epoch, i = divmod(step, data.total // cfg.batch_size)
    ids = data.order(cfg.seed, epoch)[i * cfg.batch_size :][: cfg.batch_size]
    ids = ids.reshape(-1, micro_rows(cfg, mesh))
    on_rows = NamedSharding(mesh, P(None, md.BATCH))
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
        """Tokens per second, MFU, share of the time without a batch, minutes to go."""
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
    halves = 2 if model.block_length > 1 else 1  # each row noised and clean, side by side
    flops = md.flops_per_token(model, halves * cfg.seq_len)
    passes = 3
    if cfg.lora_rank:  # no gradients of frozen matrices
        flops -= md.flops_per_token(model, 0) / 3
        passes = 2
    if halves == 2 and not model.causal:  # no logits of clean tokens
        flops -= passes * model.vocab * model.width
    return halves * flops * cfg.batch_size * cfg.seq_len


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
    """Weight decay mask, by name: matrices and embeddings, no norms, biases or adapters."""

    def is_decayed(path, _):
        return path[-1].key in (*md.MATRICES, "embed_tokens", "lm_head")

    return jax.tree_util.tree_map_with_path(is_decayed, tree)


def make_optimizer(mu_dtype, muon=False):
    """Clip, then AdamW at learning rate 1: its updates are multiplied by the schedule of the step.

    mu_dtype is that of the first moments. muon: Muon for the layers' matrices, with updates of
    AdamW's size (arXiv:2502.16982); Adam without decay for all else.
    """

    def axes_of(path, _):
        return optax.contrib.MuonDimensionNumbers(-2, -1) if path[-1].key in md.MATRICES else None

    if muon:
        update = optax.contrib.muon(
            1.0,
            weight_decay=WEIGHT_DECAY,
            mu_dtype=mu_dtype,
            adam_b2=0.95,
            muon_weight_dimension_numbers=functools.partial(
                jax.tree_util.tree_map_with_path, axes_of
            ),
            consistent_rms=0.2,
        )
    else:
        update = optax.adamw(
            1.0,
            b1=0.9,
            b2=0.95,
            mu_dtype=mu_dtype,
            weight_decay=WEIGHT_DECAY,
            mask=decays,
        )
    return optax.chain(optax.clip_by_global_norm(CLIP), update)


def accumulate(loss_fn, params, batches):
    """Sum of gradients and of losses of loss_fn(params, batch) over the leading axis of batches."""

    def body(sums, batch):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, batch)), None

    zeros = jnp.zeros(()), optax.tree.zeros_like(params)
    (loss, grads), _ = jax.lax.scan(body, zeros, batches)
    return grads, loss


def nats_of(cfg, model, micro, key, rows, step):
    """The summed loss of a micro-batch in nats: the NELBO, with --objective=ar the likelihood."""
    row = micro["token_ABL"], micro["segment_ABL"], micro["position_ABL"]
    token_BL, segment_BL, position_BL = row
    fixed_BL = micro.get("fixed_ABL")
    noise = functools.partial(md.noise, key, rows, micro["row_AB"])
    block = longest = model.cfg.block_length
    if not longest:
        seen_1LL = None
        if cfg.anneal_steps:  # one draw for all rows and layers
            length = token_BL.shape[1]
            u_LL = jax.random.uniform(jax.random.fold_in(key, rows), (length, length))
            share = jnp.minimum(1, (step + 1) / cfg.anneal_steps)
            seen_1LL = diffusion.annealed(u_LL, share)[None]
        return model.nelbo(*row, *noise(segment_BL), fixed_BL, seen_1LL=seen_1LL)
    counted_BL = md.counted(segment_BL, fixed_BL)
    if longest == 1 and model.cfg.shift:  # --objective=ar
        return model.ar_nll(token_BL, counted_BL, segment_BL, position_BL).sum()
    # The block size doubles in equal numbers of steps, traced: all sizes are one program.
    if cfg.block_warmup:
        doublings = math.ceil(math.log2(longest))
        done = jnp.minimum(step * doublings // cfg.block_warmup, doublings)
        block = jnp.minimum(2**done, longest)
    # Where the context is causal a block may begin anywhere, as drafts do.
    shifted_BL = position_BL
    if model.cfg.causal:
        offset_R1 = jax.random.randint(jax.random.fold_in(key, rows), (rows, 1), 0, longest)
        shifted_BL = position_BL + offset_R1[micro["row_AB"]]
    place_BL = jnp.minimum(shifted_BL % block, position_BL)  # of a token in its block
    # A mask rate for each block; blocks of one are always masked: less noise, the same expectation.
    rate_BL, u_BL = noise(md.parts(segment_BL, place_BL, block), eps=0.0)
    t_BL, weight_BL = diffusion.block_noise(rate_BL, least=block == 1)
    mask_BL = counted_BL & (u_BL < t_BL)
    noised_BL = jnp.where(mask_BL, model.cfg.mask_id, token_BL)
    hidden_BLD, before_BLD = model.readings(noised_BL, token_BL, segment_BL, shifted_BL, block)
    nats = (weight_BL * model.token_nll(hidden_BLD, token_BL, mask_BL)).sum()
    if model.cfg.causal:  # the same pass gives the autoregressive loss
        later_BL = counted_BL & ~md.first_of_document(segment_BL)
        nats += AR_WEIGHT * model.token_nll(before_BLD, token_BL, later_BL).sum()
    return nats


def make_step(cfg, graph, optimizer):
    """train_step(state, batch, step) -> (state, metrics), to be compiled with a donated state."""

    def train_step(state, batch, step):
        key = jax.random.fold_in(jax.random.key(cfg.seed), step)
        A, B, _ = batch["token_ABL"].shape
        micros = batch | {"row_AB": jnp.arange(A * B).reshape(A, B)}
        counted_ABL = md.counted(batch["segment_ABL"], batch.get("fixed_ABL"))
        tokens = jnp.maximum(counted_ABL.sum(), 1)

        def loss_fn(params, micro):  # in nats per token of the whole step that can be masked
            model = nnx.merge(graph, weights(state | {"params": params}))
            return nats_of(cfg, model, micro, key, A * B, step) / tokens

        grads, loss = accumulate(loss_fn, state["params"], micros)
        lr = wsd(step, cfg.lr, cfg.steps, cfg.warmup)
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(norm)  # else nothing is updated
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = jax.tree.map(lambda p, u: jnp.where(ok, p + lr * u, p), state["params"], updates)
        opt = jax.tree.map(lambda new, old: jnp.where(ok, new, old), opt, state["opt"])
        state |= {
            "params": params,
            "opt": opt,
        }
        return state, {
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "ok": ok,
        }

    return train_step


def lower_step(cfg, graph, optimizer, shapes, mesh, columns=3):
    """The train step, traced for a mesh that need not be here; .compile() makes the program."""
    size = micro_rows(cfg, mesh)
    shape = (cfg.batch_size // size, size, cfg.seq_len)
    on_rows = NamedSharding(mesh, P(None, md.BATCH))
    row = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=on_rows)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    train_step = jax.jit(
        make_step(cfg, graph, optimizer),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda s: s.sharding, shapes), None),
    )
    with jax.set_mesh(mesh):
        return train_step.lower(shapes, dict.fromkeys(COLUMNS[:columns], row), step)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def sums_of(graph, rows, draws, params, batch, row_B, bytes_V):
    """[nats of each draw .., tokens, their bytes] of a batch of the `rows` held-out rows.

    The nats are the NELBO at one noise level per document and draw; in small blocks exact.
    """
    model = nnx.merge(graph, params)
    batch = {name: x_ABL[0] for name, x_ABL in batch.items()}
    token_BL = batch["token_ABL"]
    fixed_BL = batch.get("fixed_ABL")
    where = batch["segment_ABL"], batch["position_ABL"]
    block = model.cfg.block_length

    def bound(draw):
        order_R = jax.random.permutation(jax.random.key(draws + draw), rows)  # to other levels
        part_BL = md.parts(*where, block or None)
        noise = md.noise(jax.random.key(draw), rows, order_R[row_B], part_BL)
        return model.nelbo(token_BL, *where, *noise, fixed_BL)

    if 0 < block <= md.EXACT_BLOCK:
        nats_N = jnp.full(draws, model.exact_nll(token_BL, *where, fixed_BL).sum())
    else:
        nats_N = jax.lax.map(bound, jnp.arange(draws))
    counted_BL = md.counted(where[0], fixed_BL)
    bytes_BL = counted_BL * bytes_V[token_BL]
    return jnp.append(nats_N, jnp.array([counted_BL.sum(), bytes_BL.sum()]))


def score(model, heldout, count, size, mesh, tokenizer, draws=4):
    """(nats per maskable token, bits per byte, their standard error over `draws`), of `count` rows."""
    count = min(count, heldout.total)
    if not count:
        return {}
    on_rows = NamedSharding(mesh, P(None, md.BATCH))
    graph, params = nnx.split(model)
    bytes_V = jnp.asarray(token_bytes(tokenizer, model.cfg.vocab))
    sums = []
    with jax.set_mesh(mesh):
        for i, ids in enumerate(heldout.padded(count, size)):
            columns = checkpoints.on_mesh(heldout, ids, on_rows)
            batch = dict(zip(COLUMNS, columns, strict=False))
            row_B = size * i + np.arange(size)
            sums.append(sums_of(graph, count, draws, params, batch, row_B, bytes_V))
    *nats_N, tokens, text_bytes = np.sum(np.asarray(sums, np.float64), 0)
    bits_N = np.array(nats_N) / math.log(2) / text_bytes
    return {
        "heldout_nats": np.mean(nats_N) / tokens,
        "bits_per_byte": bits_N.mean(),
        "standard_error": bits_N.std(ddof=1) / math.sqrt(draws),
    }


def sample(model, tokenizer, data, folder, step):
    """Print a continuation of PROMPT, or of the data's first prompt: its tokens per forward pass."""
    if jax.process_count() > 1:  # one host does not hold the whole model
        return {}
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    if "fixed" in data.columns:
        token_L, *_, fixed_L = data.shard(0)[:, 0]
        prompt = token_L[: fixed_L.argmin()].tolist()
    new = min(64, model.cfg.positions - len(prompt))
    sampler = sample_block if model.cfg.block_length else sample_dream
    rule = sampler.Sampling(vocab=data.meta["vocab_size"], eos_ids=model.cfg.eos_ids)
    (row,), stats = sampler.generate(model, [prompt], new, rule, jax.random.key(0))
    text = f"---- step {step}\n{tokenizer.decode(row)}\n"
    print(text)
    folder.append("samples.txt", text)
    return {"tokens_per_forward": new / stats["forwards"]}


@runs.enough_memory("--dtype=bfloat16, or more devices")
def evaluate(cfg, draws=8):
    """--eval_only: print the bound of a model, trained here or converted, on held-out rows; in blocks
    of --block_length, whatever it was trained in.
    """
    heldout, tokenizer = held_out(cfg.eval_only, cfg.data)
    model, step, mesh = checkpoints.load_for_inference(md, cfg.eval_only, 0, cfg.dtype, rows=0)
    if cfg.block_length:
        model.cfg = dataclasses.replace(model.cfg, block_length=cfg.block_length)
    exact_products(model.compute.dtype)
    mesh = mesh or checkpoints.mesh_of(jax.devices()[:1], (1, 1, 1))
    count = min(cfg.eval_rows, heldout.total)
    devices = mesh.shape["data"]
    size = math.ceil(min(16, count) / devices) * devices  # rows at a time
    scores = {"step": step, "rows": count} | score(
        model, heldout, count, size, mesh, tokenizer, draws
    )
    print(" | ".join(f"{name} {value:,.4g}" for name, value in scores.items()))
    return scores


if __name__ == "__main__":
    runs.command(main, Config, __doc__, MACHINE)
