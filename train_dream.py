"""Train Dream: masked diffusion over text, in blocks or whole, from scratch, from a converted
model, or with LoRA.

    python train_dream.py --steps=50 --seq_len=512 --out=out/try      # CPU: the tiny preset, to see it work
    python train_dream.py --resume=out/try              # continues a stopped run with its own settings
    python train_dream.py --objective=ar --out=out/ar   # the same layers as an autoregressive model
    python train_dream.py --init=out/ar --block_length=4 --block_warmup=200     # which then learns to fill blocks
    python train_dream.py --init=out/diffucoder --data=data/chat                # fine-tunes a converted Dream
    python train_dream.py --init=out/diffucoder --data=data/chat --lora_rank=16 --base_bits=4 --remat=full
    python train_dream.py --eval_only=out/diffucoder --data=data/chat           # held-out bits per byte, a bound

Reads a folder of packed rows, or of pairs, from data_prep.py; without --data it first prepares the
standard library of the running Python. Writes --out: config.json, tokenizer.json, log.jsonl,
samples.txt, checkpoints/<step>/, and with --lora_rank at the end adapter_model.safetensors with
adapter_config.json, for peft, and merged/, a whole model.

With --block_length it learns block diffusion (BD3-LM, arXiv:2503.09573): a masked token attends to
its own block and to the clean text before it, so each row passes the layers twice. Blocks of one
token are an autoregressive model, at whose loss --block_warmup (blocks of 1, 2, 4, ..) begins. Row
order, noise and learning rate are functions of (seed, step).

Letters: A micro-batches of a step, B rows of a micro-batch, L length, V vocabulary.
"""

import dataclasses
import functools
import hashlib
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

import checkpoints
import diffusion
import model_dream as md
import runs
import sample_block
import sample_dream
from rows import held_out, open_data, prefetch, token_bytes
from runs import Count, Natural, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of rows from data_prep.py; default: the Python standard library, prepared under data/
    data: str = ""
    out: str = "out/train_dream"  # folder of the run
    # folder of a run to continue, with its settings, not those of devices (--fsdp, --hosts, ..)
    resume: str = ""
    eval_only: str = ""  # folder of a model to score on held-out rows, instead of training
    model: str = ""  # preset, see CONFIGS in model_dream.py; default: tiny, or the model of --init
    init: str = ""  # folder of a Dream to start from, converted or trained here
    # with --init: train adapters of this rank beside the layers' matrices; 0: train all weights
    lora_rank: Natural = 0
    # with --lora_rank: bits of the frozen matrices; 0: those of --dtype
    base_bits: typing.Literal[0, 8, 4] = 0
    # with --lora_rank: folder of adapters to start from, in peft's form; default: new ones
    init_adapters: str = ""
    # predict masked tokens | each next token
    objective: typing.Literal["diffusion", "ar"] = "diffusion"
    # noise schedule, see diffusion.py
    schedule: typing.Literal[tuple(diffusion.SCHEDULES)] = "linear"
    # steps in which the attention mask goes from causal to bidirectional, without blocks
    anneal_steps: Natural = 0
    # block size: a token attends to its own and earlier blocks; 0: that of --init, else none
    block_length: Natural = 0
    block_warmup: Natural = 0  # steps in which the block size grows 1, 2, 4, .. to --block_length
    # tokens per row; 0: that of the data, else the model's positions, at most 2048
    seq_len: Natural = 0
    # rows of a step, all devices; 0: 8,192 to 131,072 tokens by the data, 4,096 on a CPU
    batch_size: Natural = 0
    epochs: Positive = 4.0  # passes over the training rows; sets --steps
    steps: Natural = 0  # optimizer steps; 0: from --epochs
    # peak; 0: 3e-4 sqrt(1.5e9 / parameters), at most 3e-3; a tenth with --init, unless LoRA
    lr: NonNegative = 0.0
    warmup: Natural = 0  # steps of linear warm-up; 0: 2000, or a tenth of a shorter run
    # default: muon below 100 M parameters without --init
    optimizer: typing.Literal["", "adamw", "muon"] = ""
    weight_decay: NonNegative = 0.1  # of matrices; with adamw of embeddings, too
    clip: Positive = 1.0  # maximum global gradient norm
    # of the computation; parameters are float32
    dtype: typing.Literal["", "bfloat16", "float32"] = ""
    remat: typing.Literal["none", "qkvo", "full"] = "qkvo"  # what the backward pass recomputes
    micro_batch: Natural = 0  # rows per device and forward pass; 0: by model
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
    # folder of compiled programs, for later runs; "" keeps none
    compile_cache: str = "~/.cache/unmask"
    seed: Natural = 0  # initial weights, row order, noise


# Settings that may differ between hosts, and those that --resume does not take from the run.
OF_A_HOST = ("hosts", "data", "out", "resume", "wandb", "compile_cache")
MACHINE = ("device", "hosts", "fsdp", "tensor")
# of a batch, the last of pairs alone
COLUMNS = "token_ABL", "segment_ABL", "position_ABL", "fixed_ABL"
# of a step, in the order of the log; jit returns them sorted
METRICS = "loss", "lr", "grad_norm", "ok"
AR_WEIGHT = 3.3  # of the autoregressive loss of a model with a causal context: Nemotron's 1 / 0.3
MOVED = {  # flags that are gone
    "context": "--objective=ar trains a model that generates token by token better than drafts did",
    "ar_weight": "see --context in bench/LOG.md",
}
MASKS = "<|mask|>", "<mask>"  # what tokenizers call MASK
MICRO_BATCH = {"tiny": 2, "500m": 4}  # rows per device at a time, 1 of any other preset


# ---- choices for the device, and data ------------------------------------------------------------------------------


def pick_model(cfg):
    """(name of the preset, architecture): --model, or that of --init, with the block size that the
    flags ask for.
    """
    if cfg.init:
        if cfg.model not in ("", "init"):
            raise ValueError(
                f"--init={cfg.init} says what the model is; leave --model={cfg.model} out"
            )
        return "init", with_blocks(cfg, md.read_config(cfg.resume or cfg.init))
    name = cfg.model or "tiny"
    if name not in md.CONFIGS:
        raise ValueError(
            f"--model={name}: not one of {', '.join(md.CONFIGS)}; train_tpu.py trains PythonCoder"
        )
    return name, with_blocks(cfg, md.CONFIGS[name])


def with_blocks(cfg, model):
    """The architecture with the block size of the flags. An autoregressive model is one with blocks
    of one token.
    """
    ar = cfg.objective == "ar"
    if ar and (cfg.block_length or cfg.block_warmup or not model.shift):
        raise ValueError(
            "--objective=ar is for a model with the shift, and has no settings of blocks"
        )
    size = 1 if ar else cfg.block_length or (0 if cfg.anneal_steps else model.block_length)
    if cfg.block_warmup and not size:
        raise ValueError("--block_warmup needs --block_length")
    if size and (cfg.schedule != "linear" or cfg.anneal_steps):
        raise ValueError("blocks go with the linear --schedule, and without --anneal_steps")
    return dataclasses.replace(model, block_length=size, causal=model.causal and size > 0)


def row_length(cfg, model, data=None):
    """Tokens of a row: --seq_len, or that of the data, or what suits the model."""
    seq_len = cfg.seq_len or (data["seq_len"] if data else min(model.positions, 2048))
    if seq_len > model.positions:
        advice = f"prepare them with data_prep.py --seq_len={model.positions} at most"
        raise ValueError(
            f"rows of {seq_len} tokens do not fit the {model.positions} positions of the model; {advice}"
        )
    return seq_len


def pick_batch(cfg, seq_len, copies, on_cpu, data=None):
    """(rows of a step, rows per device at a time); `copies` devices hold different rows."""
    # Short runs take smaller steps: two thousand of them rather than sixty.
    seen = cfg.epochs * data["splits"]["train"]["tokens"] if data else math.inf
    tokens = 4096 if on_cpu else 2 ** int(math.log2(np.clip(seen / 2000, 8192, 131_072)))
    batch = cfg.batch_size or max(1, tokens // seq_len // copies) * copies
    micro = cfg.micro_batch or max(
        m for m in range(1, 1 + MICRO_BATCH.get(cfg.model, 1)) if batch // copies % m == 0
    )
    if batch % (copies * micro):
        raise ValueError(
            f"--batch_size={batch} does not divide over {copies} devices times --micro_batch={micro}"
        )
    return batch, micro


def resolve(cfg, devices, data=None, memory=None):
    """(cfg with its defaults filled in, architecture, md.Compute, mesh), by the devices and the data;
    printed.

    data is the meta.json of the rows, None for endless data; memory a device's GiB, where JAX
    cannot ask it.
    """
    device = devices[0]
    memory = memory or checkpoints.device_memory_gib(device)
    on_cpu = memory is None
    name, model = pick_model(cfg)
    cfg = dataclasses.replace(cfg, model=name)
    seq_len = row_length(cfg, model, data)
    batch, micro = pick_batch(cfg, seq_len, max(1, len(devices) // cfg.tensor), on_cpu, data)
    mesh = checkpoints.training_mesh(cfg, model, devices)
    dtype = cfg.dtype or ("float32" if on_cpu else "bfloat16")
    if dtype == "float32":  # else a TPU multiplies in bfloat16, a GPU in TF32
        jax.config.update("jax_default_matmul_precision", "highest")
    # see with_mask
    known = (
        dataclasses.replace(model, vocab=data["vocab_padded"]) if data and not cfg.init else model
    )
    optimizer = cfg.optimizer or (
        "adamw" if cfg.init or md.count_params(known)["total"] >= 1e8 else "muon"
    )
    chosen = {
        "seq_len": seq_len,
        "batch_size": batch,
        "micro_batch": micro,
        "optimizer": optimizer,
        "dtype": dtype,
    }
    cfg = dataclasses.replace(cfg, **chosen)
    # queries of attention at a time: scores that stay in a CPU's caches
    block = 64 if on_cpu else 128
    run = md.Compute(
        platform=md.platform_of(device), dtype=jnp.dtype(dtype), remat=cfg.remat, block=block
    )

    where = "CPU" if on_cpu else f"{memory:.1f} GiB each"
    accumulated = batch * cfg.tensor // mesh.size // micro
    base = f"int{cfg.base_bits}" if cfg.base_bits else dtype
    weights = (
        f"frozen {base} weights and LoRA of rank {cfg.lora_rank}"
        if cfg.lora_rank
        else "float32 weights"
    )
    print(f"{len(devices)} x {device.device_kind} ({where}), mesh {dict(mesh.shape)}")
    print(f"model {name}, {dtype} compute on {weights}, remat {cfg.remat}")
    print(
        f"a step is {batch} rows of {seq_len} = {batch * seq_len:,} tokens, {accumulated} x {micro} rows a device"
    )
    return cfg, model, run, mesh


def plan(cfg, model, rows):
    """(cfg with steps, lr, warmup, eval_every; the larger of an epoch's steps and eval_every).
    Prints the plan.
    """
    counts = md.count_params(model)
    per_epoch = rows.total // cfg.batch_size
    steps = cfg.steps or max(1, round(cfg.epochs * per_epoch))
    # Small models bear larger steps; a trained model goes on with a tenth, new LoRA adapters with
    # all: a guess.
    peak = float(np.clip(3e-4 * math.sqrt(1.5e9 / counts["total"]), 1e-4, 3e-3))
    lr = cfg.lr or (peak / 10 if cfg.init and not cfg.lora_rank else peak)
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
    halves = 2 if model.block_length > 1 else 1  # each row noised and clean, side by side
    length = halves * cfg.seq_len
    # gradients of frozen matrices
    passes, unused = (2, md.flops_per_token(model, 0) / 3) if cfg.lora_rank else (3, 0)
    # logits of clean tokens
    unused += passes * model.vocab * model.width if halves == 2 and not model.causal else 0
    return halves * (md.flops_per_token(model, length) - unused) * cfg.batch_size * cfg.seq_len


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
    _, model = pick_model(cfg)
    seq_len, vocab = row_length(cfg, model), min(model.vocab, 32_768)
    name, flags = vocab, [f"--vocab_size={vocab}"]
    if cfg.init:  # a model that is trained already has a tokenizer, and an EOS
        path = runs.as_path(cfg.init) / "tokenizer.json"
        eos = sample_dream.load_tokenizer(cfg.init, model).id_to_token(model.eos_id)
        name = hashlib.sha256(path.read_bytes() + eos.encode()).hexdigest()[:8]
        flags = [f"--tokenizer={path}", f"--eos={eos}"]
    folder = Path(f"data/python-{seq_len}-{name}")
    if not (folder / "meta.json").exists():
        print(f"no --data: preparing the Python standard library in {folder}", flush=True)
        runs.script("data_prep.py", "python", f"--out={folder}", f"--seq_len={seq_len}", *flags)
    return open_data(folder, seq_len)


def with_mask(model, meta, tokenizer_json):
    """(model, tokenizer.json) of a Dream from scratch: a preset with the ids of the data and of
    MASK.

    MASK is <|mask|> or <mask> of the data's tokenizer, else a token that is added to the run's copy
    of it.
    """
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    mask_id = next((i for i in map(tokenizer.token_to_id, MASKS) if i is not None), None)
    if mask_id is None:
        tokenizer.add_special_tokens([MASKS[0]])
        mask_id, tokenizer_json = tokenizer.token_to_id(MASKS[0]), tokenizer.to_str().encode()
    used = max(meta["vocab_size"], mask_id + 1)
    ids = {name: meta.get(name, meta["eos_id"]) for name in ("pad_id", "bos_id", "eos_id")}
    return dataclasses.replace(
        model, vocab=-(-used // 128) * 128, mask_id=mask_id, **ids
    ), tokenizer_json


def known_ids(folder, model, meta, tokenizer_json):
    """tokenizer.json of the Dream in `folder`. ValueError if it has other ids than that of the
    data.
    """
    path, tokenizer = (
        runs.as_path(folder) / "tokenizer.json",
        sample_dream.load_tokenizer(folder, model),
    )
    theirs, ours = (
        tokenizer.get_vocab(),
        tokenizers.Tokenizer.from_str(tokenizer_json.decode()).get_vocab(),
    )
    if (
        ours.items() <= theirs.items()
        and max(ours.values()) < model.vocab
        and meta["eos_id"] == model.eos_id
    ):
        return path.read_bytes()
    wrong, eos = (
        f"tokens of the data or its EOS have other ids than in {folder}",
        tokenizer.id_to_token(model.eos_id),
    )
    raise ValueError(f"{wrong}; prepare the data with --tokenizer={path} --eos='{eos}'")


# ---- the compiled step, and scores ---------------------------------------------------------------------------------


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
    """Weight decay mask, by name: matrices and embeddings, no norms, biases or adapters."""
    names = *md.MATRICES, "embed_tokens", "lm_head"
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, tree)


def make_optimizer(clip, weight_decay, mu_dtype=None, mask=decays, muon=False):
    """Clip, then AdamW at learning rate 1: its updates are multiplied by the schedule of the step.

    muon: Muon for the layers' matrices, with updates of AdamW's size (arXiv:2502.16982); all else
    Adam without decay.
    """
    clipping, settings = (
        optax.clip_by_global_norm(clip),
        {"weight_decay": weight_decay, "mu_dtype": mu_dtype},
    )
    if not muon:
        return optax.chain(clipping, optax.adamw(1.0, 0.9, 0.95, 1e-8, mask=mask, **settings))
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)

    def dimensions(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: axes if path[-1].key in md.MATRICES else None, tree
        )

    settings |= {"consistent_rms": 0.2, "adam_b2": 0.95}
    return optax.chain(
        clipping, optax.contrib.muon(1.0, muon_weight_dimension_numbers=dimensions, **settings)
    )


def accumulate(loss_fn, params, batches):
    """Sum of gradients and of losses of loss_fn(params, batch) over the leading axis of batches."""

    def body(carry, batch):
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_fn)(params, batch)), None

    (loss, grads), _ = jax.lax.scan(
        body, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), batches
    )
    return grads, loss


def loss_of_step(cfg, graph, batch, key, step, base):
    """loss_fn(params, micro): the NELBO in nats per token that can be masked; with --objective=ar
    the likelihood.
    """
    rows = math.prod(batch["token_ABL"].shape[:2])
    tokens = jnp.maximum(md.counted(batch["segment_ABL"], batch.get("fixed_ABL")).sum(), 1)

    def loss_fn(params, micro):
        model = nnx.merge(graph, md.assemble(base, params))
        inputs = micro["token_ABL"], micro["segment_ABL"], micro["position_ABL"]
        if model.cfg.block_length:
            counted_BL = md.counted(inputs[1], micro.get("fixed_ABL"))
            noise = functools.partial(md.noise, key, rows, micro["row_AB"])
            # where a block may begin, as drafts do
            places = model.cfg.block_length if model.cfg.causal else 1
            offset_R1 = jax.random.randint(jax.random.fold_in(key, rows), (rows, 1), 0, places)
            return (
                block_nats(cfg, model, step, *inputs, counted_BL, noise, offset_R1[micro["row_AB"]])
                / tokens
            )
        noise, attention_1LL = md.noise(key, rows, micro["row_AB"], micro["segment_ABL"]), None
        if cfg.anneal_steps:  # one draw for all rows and layers
            u_LL = jax.random.uniform(jax.random.fold_in(key, rows), (inputs[0].shape[1],) * 2)
            attention_1LL = diffusion.annealed(u_LL, jnp.minimum(1, (step + 1) / cfg.anneal_steps))[
                None
            ]
        return (
            model.nelbo(*inputs, *noise, micro.get("fixed_ABL"), cfg.schedule, attention_1LL)
            / tokens
        )

    return loss_fn


def block_nats(cfg, model, step, token_BL, segment_BL, position_BL, counted_BL, noise, offset_B1=0):
    """The loss of a micro-batch with blocks, or of --objective=ar, in nats; noise(parts) is
    md.noise of its rows.

    The blocks of a row begin offset_B1 to the left. Of a causal model the same pass gives the
    autoregressive loss, too.
    """
    block = longest = model.cfg.block_length
    if longest == 1 and model.cfg.shift:  # --objective=ar
        return model.ar_nll(token_BL, counted_BL, segment_BL, position_BL).sum()
    # The block size doubles in equal numbers of steps. It is an array, so that all sizes are one
    # program.
    if cfg.block_warmup:
        doublings = math.ceil(math.log2(longest))
        block = jnp.minimum(
            2 ** jnp.minimum(step * doublings // cfg.block_warmup, doublings), longest
        )
    # A mask rate for each block; u decides for each token. A block of one token is always masked:
    # any other rate would only add noise to the same expectation.
    row = segment_BL, position_BL + offset_B1
    place_BL = jnp.minimum(row[1] % block, position_BL)  # of a token in its block
    u_BL = noise(md.parts(segment_BL, place_BL, block), eps=0.0)
    t_BL, weight_BL = diffusion.block_noise(u_BL[0], least=block == 1)
    mask_BL = counted_BL & (u_BL[1] < t_BL)
    hidden_BLD, before_BLD = model.readings(
        jnp.where(mask_BL, model.cfg.mask_id, token_BL), token_BL, *row, block
    )
    nats = (weight_BL * model.token_nll(hidden_BLD, token_BL, mask_BL)).sum()
    if model.cfg.causal:  # the first token of a document has none before it
        later_BL = counted_BL & ~md.first_of_document(segment_BL)
        nats += AR_WEIGHT * model.token_nll(before_BLD, token_BL, later_BL).sum()
    return nats


def make_step(cfg, graph, optimizer):
    """train_step(state, batch, step) -> (state, metrics), to be compiled once with the state
    donated.
    """

    def train_step(state, batch, step):
        key = jax.random.fold_in(jax.random.key(cfg.seed), step)
        loss_fn = loss_of_step(cfg, graph, batch, key, step, state.get("base", {}))
        A, B, _ = batch["token_ABL"].shape
        grads, loss = accumulate(
            loss_fn, state["params"], batch | {"row_AB": jnp.arange(A * B).reshape(A, B)}
        )

        # The update, which a gradient that is not finite leaves out.
        lr, norm = wsd(step, cfg.lr, cfg.steps, cfg.warmup), optax.tree.norm(grads)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params, ok = (
            jax.tree.map(lambda p, u: p + lr * u, state["params"], updates),
            jnp.isfinite(norm),
        )
        new = {"params": params, "opt": opt}
        state = state | jax.tree.map(
            lambda new, old: jnp.where(ok, new, old), new, {name: state[name] for name in new}
        )
        return state, {"loss": loss, "lr": lr, "grad_norm": norm, "ok": ok}

    return train_step


def lower_step(cfg, graph, optimizer, shapes, mesh, columns=3):
    """The train step, traced for a mesh that need not be here; .compile() makes the program."""
    rows = cfg.micro_batch * mesh.size // cfg.tensor  # of a micro-batch, on all devices together
    shape = (cfg.batch_size // rows, rows, cfg.seq_len)
    row = jax.ShapeDtypeStruct(
        shape, jnp.int32, sharding=jax.NamedSharding(mesh, md.PS(None, md.BATCH))
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.NamedSharding(mesh, md.PS()))
    layout = jax.tree.map(lambda s: s.sharding, shapes)
    train_step = jax.jit(
        make_step(cfg, graph, optimizer), donate_argnums=0, out_shardings=(layout, None)
    )
    with jax.set_mesh(mesh):
        return train_step.lower(shapes, dict.fromkeys(COLUMNS[:columns], row), step)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def sums_of(graph, schedule, rows, draws, params, batch, row_B, bytes_V):
    """(nats of each draw, tokens, their bytes) of a batch of the `rows` held-out rows, the same
    draws each time.

    The nats are a bound, the NELBO at one noise level per document and draw; up to md.EXACT_BLOCK
    tokens a block exact.
    """
    model, batch = nnx.merge(graph, params), {name: x[0] for name, x in batch.items()}
    token_BL, segment_BL, fixed_BL = (
        batch["token_ABL"],
        batch["segment_ABL"],
        batch.get("fixed_ABL"),
    )
    row, block = (segment_BL, batch["position_ABL"]), model.cfg.block_length

    def bound(draw):
        # each draw moves rows to other levels
        order_R = jax.random.permutation(jax.random.key(draws + draw), rows)
        noise = md.noise(jax.random.key(draw), rows, order_R[row_B], md.parts(*row, block or None))
        return model.nelbo(token_BL, *row, *noise, fixed_BL, schedule=schedule)

    mask_BL, exact = md.counted(segment_BL, fixed_BL), 0 < block <= md.EXACT_BLOCK
    nats_N = (
        model.exact_nll(token_BL, *row, fixed_BL).sum()[None]
        if exact
        else jax.lax.map(bound, jnp.arange(draws))
    )
    return nats_N, mask_BL.sum(), (mask_BL * bytes_V[token_BL]).sum()


def score(cfg, graph, params, heldout, size, mesh, tokenizer, draws=4):
    """{"heldout_nats", "bits_per_byte", "standard_error"} over --eval_rows held-out rows, `size`
    rows at a time.

    Nats are per token that can be masked; the standard error, in bits per byte, is that of `draws`
    draws of the noise.
    """
    if not (count := min(cfg.eval_rows, heldout.total)):
        return {}
    sums, rows_at = [], jax.NamedSharding(mesh, md.PS(None, md.BATCH))
    bytes_V = jnp.asarray(token_bytes(tokenizer, nnx.merge(graph, params).cfg.vocab))
    with jax.set_mesh(mesh):
        for i, ids in enumerate(heldout.padded(count, size)):
            batch = dict(zip(COLUMNS, checkpoints.on_mesh(heldout, ids, rows_at), strict=False))
            sums.append(
                sums_of(
                    graph,
                    cfg.schedule,
                    count,
                    draws,
                    params,
                    batch,
                    size * i + np.arange(size),
                    bytes_V,
                )
            )
    nats_N, tokens, text_bytes = (
        sum(np.asarray(x, float) for x in column) for column in zip(*sums, strict=True)
    )
    bits_N = nats_N / math.log(2) / text_bytes
    error = bits_N.std(ddof=1) / math.sqrt(len(bits_N)) if len(bits_N) > 1 else 0.0
    return {
        "heldout_nats": nats_N.mean() / tokens,
        "bits_per_byte": bits_N.mean(),
        "standard_error": error,
    }


def evaluate(cfg):
    """--eval_only: print the bound of a model, trained here or converted, on held-out rows."""
    folder = checkpoints.absolute(cfg.eval_only)
    heldout, tokenizer = held_out(folder, cfg.data)
    rows = min(cfg.eval_rows, heldout.total)
    mesh = checkpoints.inference_mesh(
        md.read_config(folder, checkpoints.find_weights(folder)[1]), jax.devices(), 0
    )
    size = -(-min(16, rows) // mesh.shape["data"]) * mesh.shape["data"]  # at a time
    dtype = cfg.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)
    print(
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}, {dtype}",
        file=sys.stderr,
    )
    model, step = checkpoints.load(md, folder, dtype=dtype, mesh=mesh)
    scores = {"step": step, "rows": rows} | score(
        cfg, *nnx.split(model), heldout, size, mesh, tokenizer, draws=8
    )
    print(" | ".join(f"{name} {value:,.4g}" for name, value in scores.items()))
    return scores


# ---- the run -------------------------------------------------------------------------------------------------------


class Trainer:
    """A run in memory, with the defaults that data and devices suggest. Only `state` changes with
    the steps.
    """

    def __init__(self, cfg):
        fits = (
            cfg.lora_rank
            and cfg.init
            and not cfg.hosts
            and "://" not in cfg.out
            and cfg.optimizer != "muon"
        )
        if (cfg.lora_rank or cfg.init_adapters or cfg.base_bits) and not fits:
            what = "--base_bits and --init_adapters go with --lora_rank, which goes with --init and adamw"
            raise ValueError(f"{what}, on one host, and with --out on its own disk")
        self.train, self.heldout, tokenizer_json = find_data(cfg)
        data = self.train.meta
        cfg, model, self.compute, self.mesh = resolve(cfg, jax.devices(), data)
        if self.train.total < cfg.batch_size:
            has = f"{self.train.folder} has {self.train.total} training rows"
            raise ValueError(
                f"{has}, a step takes {cfg.batch_size}; lower --batch_size or add data"
            )
        if cfg.init:
            tokenizer_json = known_ids(cfg.resume or cfg.init, model, data, tokenizer_json)
        else:
            model, tokenizer_json = with_mask(model, data, tokenizer_json)
        self.cfg, self.cycle = plan(cfg, model, self.train)
        self.model, self.tokenizer = model, tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        # The chat template, its tokens and the model's own code: those of --init, else of the data.
        found = (
            checkpoints.companions(folder) for folder in (cfg.init, self.train.folder) if folder
        )
        self.files = next((x for x in found if x.keys() - {"tokenizer.json"}), {}) | {
            "tokenizer.json": tokenizer_json
        }
        # Moments: bfloat16 mu saves 2 GiB of 23 at 1.08 B and costs nothing measurable; nu stays
        # float32.
        self.optimizer = make_optimizer(
            cfg.clip, cfg.weight_decay, self.compute.dtype, muon=cfg.optimizer == "muon"
        )
        # The state and its bytes on a device, with gradients as large as what is trained; beside it
        # what takes less.
        forms = {"": (cfg.lora_rank, cfg.base_bits)} | (
            checkpoints.smaller_forms(cfg) if cfg.init else {}
        )
        own = self.optimizer, self.mesh, self.compute.dtype
        shapes = {
            flags: checkpoints.state_shapes(md, model, *own, *form) for flags, form in forms.items()
        }
        needed = {
            flags: checkpoints.bytes_on_a_device((s, s["params"])) for flags, s in shapes.items()
        }
        checkpoints.check_memory(self.mesh, needed.pop(""), needed)
        self.shapes = shapes[""]
        # its name in a checkpoint: adapters are no model
        self.trained = "adapters" if cfg.lora_rank else "params"
        # what adapters belong to
        found = checkpoints.find_weights(runs.as_path(cfg.init)) if cfg.lora_rank else None
        self.base, self.base_step = ({"base": found[1]["sums"]}, found[2]) if found else ({}, 0)
        self.rows_at = jax.NamedSharding(self.mesh, md.PS(None, md.BATCH))
        self.micro_rows = cfg.micro_batch * self.mesh.size // cfg.tensor  # on all devices together
        # {"params", "opt"}, with LoRA {"params": adapters, "opt", "base": frozen weights}
        self.state = None

    def meta(self, step, skipped):
        """What a checkpoint says of itself."""
        settings = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.cfg)}
        return (
            settings
            | {"data": self.train.meta["fingerprint"], "step": step, "skipped": skipped}
            | self.base
        )

    def begin(self, store):
        """Fill the state: newest checkpoint of --resume, weights of --init, or new ones. Returns
        (step, skipped).
        """
        cfg, layout = self.cfg, jax.tree.map(lambda s: s.sharding, self.shapes)
        base = {"base": self.read_init(self.compute.dtype, cfg.base_bits)} if cfg.lora_rank else {}
        if cfg.resume and (
            found := store.resume(cfg.resume, self.meta(0, 0), self.saved(self.shapes))
        ):
            state, saved = found
            self.state = {"params": state[self.trained], "opt": state["opt"]} | base
            return saved["step"], saved["skipped"]
        if cfg.lora_rank:
            key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 20)
            new = functools.partial(
                md.new_adapters, key, md.param_shapes(self.model), cfg.lora_rank
            )
            params = jax.jit(new, out_shardings=layout["params"])()
            if cfg.init_adapters:
                params = jax.device_put(
                    sample_dream.load_adapters(cfg.init_adapters, params), layout["params"]
                )
        elif cfg.init:
            params = self.read_init(jnp.float32)
        else:  # born split over the mesh: no device ever holds all of them
            params = jax.jit(
                lambda: md.new_params(self.model, cfg.seed), out_shardings=layout["params"]
            )()
        opt = jax.jit(self.optimizer.init, out_shardings=layout["opt"])(params)
        self.state = {"params": params, "opt": opt} | base
        return 0, 0

    def read_init(self, dtype, bits=0):
        """The weights of --init."""
        model, _ = checkpoints.load(md, self.cfg.init, self.base_step, dtype, self.mesh, bits)
        return nnx.to_pure_dict(nnx.state(model))

    def weights(self):
        """The parameters of the model as it is now."""
        return md.assemble(self.state.get("base", {}), self.state["params"])

    def saved(self, state):
        """What a checkpoint holds of a state."""
        return {self.trained: state["params"], "opt": state["opt"]}

    def batch(self, step):
        """The rows of a step on the mesh: those of its place in the epoch's order, cut into
        micro-batches.
        """
        size = self.cfg.batch_size
        epoch, i = divmod(step, self.train.total // size)
        ids = self.train.order(self.cfg.seed, epoch)[i * size : (i + 1) * size]
        columns = checkpoints.on_mesh(self.train, ids.reshape(-1, self.micro_rows), self.rows_at)
        return dict(zip(COLUMNS, columns, strict=False))

    def score(self):
        """Scores over --eval_rows held-out rows, from all parts of them."""
        graph = md.graph_of(self.model, dataclasses.replace(self.compute, remat="none"))
        return score(
            self.cfg,
            graph,
            self.weights(),
            self.heldout,
            self.micro_rows,
            self.mesh,
            self.tokenizer,
        )

    def sample(self, folder, step):
        """Continue --prompt and append the text to samples.txt; returns the row's tokens per
        forward pass.
        """
        if jax.process_count() > 1:  # one host does not hold the whole model
            return {}
        lm = nnx.merge(md.graph_of(self.model, md.Compute(self.compute.dtype)), self.weights())
        prompt, meta = (
            self.tokenizer.encode(self.cfg.prompt, add_special_tokens=False).ids,
            self.train.meta,
        )
        new = min(64, self.model.positions - len(prompt))
        sampler = sample_block if self.model.block_length else sample_dream
        rule = sampler.Sampling(vocab=meta["vocab_size"], eos_ids=(meta["eos_id"],))
        (row,), stats = sampler.generate(lm, [prompt], new, rule, jax.random.key(0))
        folder.append(
            "samples.txt",
            f"---- step {step}\n{self.cfg.prompt}{self.tokenizer.decode(row[-new:])}\n",
        )
        return {"tokens_per_forward": new / stats["forwards"]}


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
        if cfg.init:  # the name by which generate.py knows a chat model
            config["source"] = runs.read_json(
                runs.as_path(cfg.resume or cfg.init) / "config.json"
            ).get("source", "")
        folder.begin(first, config, trainer.files)
        if first < cfg.steps:
            train(folder, store, trainer, first, skipped)
        else:
            print(
                f"{cfg.out} has all of its {cfg.steps:,} steps; raise --steps, or --epochs with --steps=0"
            )
        store.close()
        out = cfg.out
        if cfg.lora_rank:
            adapters, family = trainer.state.pop("params"), trainer.model.family
            sample_dream.save_adapters(
                folder.out, adapters, cfg.lora_rank, config["source"], family
            )
            out, files = folder.out / "merged", [folder.out / name for name in trainer.files]
            # memory for the whole model
            base, trainer.state = (cfg.init, trainer.base_step, trainer.compute.dtype), None
            checkpoints.save_merged(
                md, trainer.model, out, *base, adapters, files, config["source"]
            )
    print(f"done: {out}; generate code with: python generate_dream.py --ckpt={out}")


def train(folder, store, trainer, first, skipped):
    """The steps after `first`."""
    cfg, started, graph = (
        trainer.cfg,
        time.perf_counter(),
        md.graph_of(trainer.model, trainer.compute),
    )
    print("compiling the train step", flush=True)
    lowered = lower_step(
        cfg, graph, trainer.optimizer, trainer.shapes, trainer.mesh, len(trainer.train.columns)
    )
    train_step = lowered.compile()
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
            store.save(
                done,
                trainer.saved(trainer.state),
                trainer.meta(done, meter.skipped),
                scores or None,
            )
            meter.restart(done)  # none of this is the steps' time
            saved = time.monotonic()
        if stops:
            store.close()
            jax.distributed.shutdown()  # waits for the other hosts, until all have saved
            folder.leave(done)


if __name__ == "__main__":
    runs.command(main, Config, __doc__, MACHINE, MOVED)
