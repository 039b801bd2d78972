"""Train MDLM, a masked diffusion language model, on one GPU, several, or a CPU. Prints.

    python train_gpu.py --steps=50 --out=out/try             # tiny, on a CPU, a few minutes
    python train_gpu.py --data=data/stories --model=small    # rows that data_prep.py wrote
    python train_gpu.py --resume=out/train_gpu               # continues with the run's settings
    python train_gpu.py --eval_only=out/train_gpu            # held-out bits per byte
    torchrun --nproc_per_node=4 train_gpu.py --data=data/stories --model=large

Reads a folder of padded rows from data_prep.py (one document per row); without --data it first
prepares the standard library of the running Python. Writes --out: config.json, log.jsonl,
samples.txt, step_<n>/ with model.safetensors (the EMA weights, for inference) and
trainer.safetensors (for --resume). It does not export; export_jetson.py does.

The loss is the NELBO: w(t) * cross-entropy at the masked positions, over all tokens that could be
masked; with --loss=uniform the mean cross-entropy at the masked positions. Training draws mask
rates from 0.1 on, an evaluation draws all (bench/LOG.md compares both, and both losses). Rows and
noise are functions of (seed, step), so they do not depend on micro-batches, devices or
interruptions. The host waits for the device only to log, to evaluate and to save.

A line shows the loss, in nats, the learning rate, the updates that were skipped as not finite, the
gradient's norm before clipping, and the mask rate of its rows. An evaluation is a line of its own.

Letters: B rows of a step, L row length, R held-out rows, N masked positions, padded to a multiple
of 64, V vocabulary, T = 10 tenths of the mask rate.
"""

import copy
import dataclasses
import hashlib
import math
import os
import shutil
import sys
import time
import typing
from pathlib import Path

import numpy as np
import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
from torch import nn

import diffusion
import model_mdlm as mdlm
import runs
from rows import held_out, open_data, prefetch, standard_library, token_bytes
from runs import Count, Natural, NonNegative, Positive, Share


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of padded rows; default: that of --eval_only, else the standard library
    data: str = ""
    out: str = "out/train_gpu"  # folder of the run
    resume: str = ""  # folder of a run to continue, with its settings
    model: typing.Literal[tuple(mdlm.CONFIGS)] = "tiny"  # preset, see CONFIGS in model_mdlm.py
    steps: Count = 20_000  # optimizer steps
    batch_size: Count = 64  # rows per optimizer step, all devices together
    # ---- the model
    seq_len: Natural = 0  # tokens per row; 0: that of the data
    tie: bool = False  # share the embedding with the head, for fewer parameters
    rope: bool = True  # rotary positions (RoPE); off: learned embeddings
    dropout: Share = 0.0  # on the output of each residual branch
    # ---- training
    optimizer: typing.Literal["muon", "adamw"] = "muon"  # of the blocks' matrices; the rest: AdamW
    lr: Positive = 1e-3  # peak learning rate of AdamW
    muon_lr: Positive = 0.02  # peak learning rate of Muon
    # steps of linear warm-up, at most a tenth of the run; then a cosine to a tenth of the peak
    warmup: Natural = 1000
    # nelbo: a bound on the likelihood; uniform: every masked token counts alike
    loss: typing.Literal["nelbo", "uniform"] = "nelbo"
    weight_decay: NonNegative = 0.1  # of matrices and embeddings; biases and norms have none
    clip: Positive = 1.0  # maximum global gradient norm
    ema: Share = 0.999  # EMA decay, warmed up; 0 disables averaging
    # number type of matmuls; default: the fastest on the device
    dtype: typing.Literal["", "bfloat16", "float16", "float32"] = ""
    compile: bool = True  # use torch.compile; off runs op by op, for debugging
    # rows per device and forward pass; 0: all of a GPU's, up to 16 on a CPU
    micro_batch: Natural = 0
    seed: Natural = 0  # initial weights, row order, noise
    # ---- evaluation and logs
    eval_rows: Count = 512  # held-out rows per evaluation, at most
    eval_only: str = ""  # folder of a run or a model to score on held-out rows, instead of training
    eval_every: Natural = 0  # steps between evaluations, each with sample, checkpoint; 0: ten a run
    eval_draws: Count = 8  # with --eval_only: noise draws, each a pass over the held-out rows
    # steps between rows of the log; torchrun's processes see signals only then, and have 30 s
    log_every: Count = 10
    wandb: str = ""  # project name at Weights & Biases; default: log to files only


LOOK = 30  # step of a first evaluation and sample: after about a minute on a CPU
SMALLEST_TIME = 0.1  # lowest mask rate t in training: the NELBO's weights grow like 1 / t
KEEP = 2  # newest checkpoints


class Devices(typing.NamedTuple):
    device: torch.device  # of this process
    dtype: str = "float32"  # the fastest one of its matmuls
    rank: int = 0
    world: int = 1  # number of processes


def settle(cfg, devices):
    """The settings with what flags leave open: micro_batch, dtype, eval_every."""
    # A GPU gets all its rows at once; a CPU is fastest with what its caches hold.
    rows = cfg.batch_size // devices.world
    micro_batch = cfg.micro_batch
    if not micro_batch:
        micro_batch = rows if devices.device.type == "cuda" else math.gcd(rows, 16)
    if cfg.batch_size % devices.world or not micro_batch or rows % micro_batch:
        raise ValueError(
            f"--batch_size={cfg.batch_size} is no multiple of "
            f"{devices.world} devices times --micro_batch={micro_batch}"
        )
    return dataclasses.replace(
        cfg,
        micro_batch=micro_batch,
        dtype=cfg.dtype or devices.dtype,
        eval_every=cfg.eval_every or max(1, cfg.steps // 10),
    )


def train(cfg, devices):
    # What is prepared: rows, the model's shape, what checkpoints say of the run.
    runs.check_out(cfg)
    given = cfg
    cfg = settle(cfg, devices)
    rows, heldout, tokenizer_json = find_data(cfg)
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    heldout_RL, bits = read_heldout(heldout, tokenizer, cfg.eval_rows)
    preset = mdlm.CONFIGS[cfg.model]
    architecture = dataclasses.replace(
        preset,
        tie=cfg.tie,
        rope=cfg.rope,
        dropout=cfg.dropout,
        vocab=rows.meta["vocab_padded"],
        positions=max(preset.positions, rows.meta["seq_len"]),
    )
    meta = {"model": dataclasses.asdict(architecture), "data": rows.meta["fingerprint"]}
    # A resumed run may have other devices: it chooses micro_batch and dtype anew.
    meta["train"] = dataclasses.asdict(given) | {"eval_every": cfg.eval_every}
    announce(cfg, architecture, rows, devices)

    with runs.Folder(cfg, rank=devices.rank) as run:
        state = make_state(cfg, architecture, devices)
        first = 0
        if cfg.resume and runs.saved_steps(Path(cfg.resume)):
            first = restore(runs.newest(cfg.resume)[1], state, meta)
            print(f"resuming {cfg.resume} after step {first}")
        run.begin(first, meta | {"data": str(rows.folder)}, {"tokenizer.json": tokenizer_json})
        if first and Path(cfg.resume).resolve() != Path(cfg.out).resolve():
            save(state, first, cfg, meta, tokenizer_json, devices)  # this folder stands alone now

        batches = prefetch(lambda step: step_batches(rows, cfg, devices, step), first, cfg.steps)
        began = time.perf_counter()
        tokens = []  # of each step since then
        for step, (noised, micro_batches), _ in batches:
            done = step + 1
            last = done == cfg.steps

            # Dropout, too, is a function of (seed, step), and of the process: a resumed run draws
            # the same.
            torch.manual_seed((cfg.seed + step) * devices.world + devices.rank)
            loss = gradients(state, micro_batches, cfg, devices)
            norm = update(state, step, cfg)
            tokens.append(int((noised.token_BL != mdlm.PAD).sum()))

            # The host has not waited for the device so far. Several processes agree to stop where
            # they communicate anyway.
            stop = run.signal if devices.world == 1 else ""
            logs = step == first or last or done % cfg.log_every == 0
            if logs:
                row, stop = metrics(state, loss, norm, run.signal, step, cfg, devices)
                step_s = (time.perf_counter() - began) / len(tokens)
                if step > first:  # that one compiles
                    row["tok_per_s"] = np.mean(tokens) / step_s
                    row["eta_min"] = (cfg.steps - done) * step_s / 60
                row["mask_rate"] = mask_rate(noised)
                row["step_ms"] = 1e3 * step_s
                run.log(row)

            # The same noise each time, of a step that no run reaches. All processes evaluate: the
            # others would only wait for one.
            evaluates = last or done % cfg.eval_every == 0 or done == LOOK < cfg.eval_every
            if evaluates:
                rng = np.random.default_rng([cfg.seed, 2**31])
                sums_T4 = evaluate(state.ema, heldout_RL, rng, cfg)
                run.log({"step": done} | scores(sums_T4, bits))
                text = sample_text(state.ema, tokenizer, cfg, rows.meta["seq_len"])
                print(text)
                run.append("samples.txt", f"---- step {done}\n{text}\n")
            if evaluates or stop:
                save(state, done, cfg, meta, tokenizer_json, devices)
            if stop:
                run.leave(done)

            # The next rates leave out the time of evaluating and saving.
            if evaluates or logs:
                began = time.perf_counter()
                tokens.clear()
    print(f"done: {cfg.out}; generate text with: python inference_jetson.py --bundle={cfg.out}")


def announce(cfg, architecture, rows, devices):
    """Print what was settled."""
    name = "CPU"
    if devices.device.type == "cuda":
        name = torch.cuda.get_device_name(devices.device)
    print(f"{devices.world} x {name}, {cfg.dtype} matmuls on float32 weights")
    if cfg.dtype != devices.dtype == "float32":
        print("float32 is faster on this CPU")
    counts = [f"{part} {n:,}" for part, n in mdlm.count_params(architecture).items()]
    print(", ".join(counts) + " parameters")
    print(f"{cfg.steps:,} steps of {cfg.batch_size} rows, {cfg.micro_batch} a device at a time")
    print(f"{cfg.steps * cfg.batch_size / rows.total:.2f} epochs of {rows.total:,} rows")
    if cfg.compile:
        print("compiling: the first step takes about a minute more", flush=True)


# ---- rows and noise, in NumPy on the host -------------------------------------------------


def find_data(cfg):
    """Training rows, held-out rows and tokenizer.json. The default data is prepared first."""
    if cfg.data:
        train, heldout, tokenizer_json = open_data(cfg.data, cfg.seq_len)
    else:
        train, heldout, tokenizer_json = standard_library(
            int(os.environ.get("WORLD_SIZE", 1)) > 1, cfg.seq_len or 256, "padded", "--rows=padded"
        )
    ids = [train.meta.get(f"{name}_id") for name in ("pad", "bos", "eos", "mask", "unk")]
    if ids != [mdlm.PAD, mdlm.BOS, mdlm.EOS, mdlm.MASK, mdlm.UNK]:  # packed rows have none
        raise ValueError(
            f"{train.folder} holds rows for train_tpu.py and train_dream.py (special tokens at {ids}); "
            "prepare it with --rows=padded"
        )
    if not heldout.total:
        raise ValueError(
            f"{train.folder} holds no held-out rows; prepare it again with --heldout above 0"
        )
    return train, heldout, tokenizer_json


def step_batches(rows, cfg, devices, step):
    """The noised rows of a step, and the Batch of each micro-batch of this process."""
    noised = training_batch(rows, cfg, step)
    size = cfg.micro_batch * devices.world
    micro_batches = []
    for i in range(0, cfg.batch_size, size):
        # Rows are sorted by length: with every world-th row the devices get similar lengths.
        row_ids = slice(i + devices.rank, i + size, devices.world)
        micro_batches.append(make_batch(noised, row_ids, devices.device, cfg.loss))
    return noised, micro_batches


def training_batch(rows, cfg, step):
    """The noised rows of step 0, 1, ..., sorted by length: micro-batches hold little PAD."""
    rng = np.random.default_rng([cfg.seed, step])
    token_BL = rows.batch(cfg.seed, step, cfg.batch_size)[0].astype(np.int64)
    order_B = np.argsort((token_BL != mdlm.PAD).sum(1), kind="stable")
    return noise(token_BL[order_B], rng)


def is_text(token_BL):
    """True for the tokens that are masked and counted: neither PAD nor BOS."""
    return (token_BL != mdlm.PAD) & (token_BL != mdlm.BOS)


class Noised(typing.NamedTuple):
    token_BL: np.ndarray
    xt_BL: np.ndarray  # token_BL with MASK where mask_BL
    mask_BL: np.ndarray
    time_B: np.ndarray  # noise times in (0, 1]


def noise(token_BL, rng):
    """Noise rows at antithetic times, one in each of B strata, in random order."""
    u_B = rng.random(len(token_BL))
    time_B = diffusion.antithetic_times(u_B, SMALLEST_TIME)
    rng.shuffle(time_B)
    xt_BL, mask_BL = diffusion.q_sample(
        token_BL,
        time_B,
        rng.random(token_BL.shape),
        "linear",
        mdlm.MASK,
        mdlm.PAD,
        ~is_text(token_BL),
    )
    return Noised(token_BL, xt_BL, mask_BL, time_B)


def mask_rate(noised):
    """Masked share of the tokens of text in a step, 1 token at least."""
    return max(1, noised.mask_BL.sum()) / is_text(noised.token_BL).sum()


class Batch(typing.NamedTuple):
    """A micro-batch on the device: the input of Loss."""

    xt_BL: torch.Tensor  # noised tokens
    index_N: torch.Tensor  # masked positions in the flattened rows: only they need logits
    token_N: torch.Tensor  # their tokens before masking
    time_N: torch.Tensor  # times t of their weights 1 / t
    masked_N: torch.Tensor  # False for the padding of the four [N]
    time_B: torch.Tensor  # noise times of the rows
    counted: torch.Tensor  # tokens of text in the whole step: the losses of micro-batches add up


def make_batch(noised, row_ids, device, loss="nelbo"):
    """The Batch of these rows (a slice or indices), trimmed to the longest of them.

    A masked token weighs 1 / t, t being the noise time of its row, or with the loss "uniform" the
    share of masks in the whole step, so that the sum is the mean over masked tokens.
    """
    token_BL, xt_BL, mask_BL, time_B = (x[row_ids] for x in noised)
    longest = (token_BL != mdlm.PAD).sum(1).max()
    L = -(-longest // 32) * 32
    token_BL = token_BL[:, :L]

    # The masked positions of the flattened rows, and 1 to 64 more, up to a multiple of 64.
    index_N = np.flatnonzero(mask_BL[:, :L])
    masks = len(index_N)
    index_N = np.pad(index_N, (0, 64 - masks % 64))
    masked_N = np.arange(len(index_N)) < masks
    token_N = token_BL.reshape(-1)[index_N]
    time_B = time_B.astype(np.float32)
    time_N = time_B[index_N // token_BL.shape[1]]
    counted = np.asarray(is_text(noised.token_BL).sum())
    if loss == "uniform":
        time_N[:] = mask_rate(noised)
    arrays = [
        xt_BL[:, :L].copy(),
        index_N,
        token_N,
        time_N,
        masked_N,
        time_B,
        counted,
    ]

    tensors = [torch.from_numpy(x) for x in arrays]
    if device.type == "cuda":  # copies from pinned memory do not block
        tensors = [x.pin_memory().to(device, non_blocking=True) for x in tensors]
    # Sizes that change with every batch: torch.compile must not specialise.
    for x in tensors[:5]:
        torch._dynamo.mark_dynamic(x, x.ndim - 1)
    return Batch(*tensors)


# ---- loss and update -----------------------------------------------------------------------------


class Loss(nn.Module):
    """A Batch's share of the step's loss: the NELBO in nats per token, or what its times say.

    In evaluation mode [4]: the same, and of the masked tokens the nats, the correct ones and their
    number.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        # Hidden states of all positions, logits [N, V] of the masked ones: [B, L, V] is never made.
        see_BL = batch.xt_BL != mdlm.PAD
        hidden_BLD = self.model.hidden(batch.xt_BL, batch.time_B, see_BL)
        logits_NV = self.model.logits(hidden_BLD.flatten(0, 1)[batch.index_N])
        nll_N = diffusion.masked_nll(logits_NV, batch.token_N, batch.masked_N, mdlm.MASK)
        # Each masked token counts as a sequence of its own.
        loss = diffusion.nelbo_per_token(nll_N[:, None], batch.time_N, batch.counted, "linear")
        if self.training:
            return loss
        masks = batch.masked_N.sum()
        accuracy = diffusion.masked_accuracy(logits_NV, batch.token_N, batch.masked_N, mdlm.MASK)
        return torch.stack([loss, nll_N.sum(), masks * accuracy, masks])


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with a choice of dtype; a step where found_inf is 1 changes nothing.

    PyTorch's bfloat16 takes a CPU without units for it 20 times as long. Ref:
    https://kellerjordan.github.io/posts/muon
    """

    def __init__(self, params, lr, weight_decay, dtype):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.found_inf = torch.zeros(())

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"]
                momentum = buffer.lerp(p.grad, 0.05)

                # Newton-Schulz: five steps towards the nearest matrix with singular values of 1.
                x = p.grad.lerp(momentum, 0.95).to(self.dtype)
                tall = x.shape[0] > x.shape[1]
                if tall:
                    x = x.T
                x = x / x.norm().clamp(min=1e-7)  # its largest singular value is at most 1
                for _ in range(5):
                    gram = x @ x.T
                    square = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
                    x = torch.addmm(x, square, x, beta=3.4445)
                if tall:
                    x = x.T

                lr = group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5
                decay = group["lr"] * group["weight_decay"]
                weight = (p * (1 - decay)).add_(x, alpha=-lr)
                torch.where(self.found_inf > 0, p, weight, out=p)
                torch.where(self.found_inf > 0, buffer, momentum, out=buffer)


def make_optimizers(model, cfg):
    """Muon for the matrices of the blocks, AdamW for the rest; weight decay of matrices and
    embeddings only.
    """
    vectors = []
    matrices = []
    matrices_of_blocks = []
    for name, p in model.named_parameters():
        if p.ndim == 1:
            vectors.append(p)
        elif cfg.optimizer == "muon" and name.startswith("blocks."):
            matrices_of_blocks.append(p)
        else:
            matrices.append(p)
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors}],
        cfg.lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=True,
    )
    if cfg.optimizer == "adamw":
        return [adamw]
    return [adamw, Muon(matrices_of_blocks, cfg.muon_lr, cfg.weight_decay, cfg.dtype)]


@dataclasses.dataclass
class State:
    model: mdlm.MDLM
    ema: mdlm.MDLM  # EMA weights, for evaluation and inference
    loss: nn.Module  # Loss of the model, compiled, under DDP if there are several processes
    optimizers: list  # AdamW, and Muon
    scaler: torch.amp.GradScaler  # of float16; does nothing for other types
    # updates skipped for a gradient that is not finite: in all, and in a row up to now
    skipped_2: torch.Tensor


def make_state(cfg, architecture, devices):
    """A new model, the same in all processes, which DDP keeps so."""
    torch.manual_seed(cfg.seed)
    model = mdlm.MDLM(architecture).to(devices.device)
    loss = Loss(model)
    if devices.world > 1:
        loss = nn.parallel.DistributedDataParallel(loss)
    if cfg.compile:
        loss = torch.compile(loss)
    return State(
        model=model,
        ema=copy.deepcopy(model).eval().requires_grad_(False),
        loss=loss,
        optimizers=make_optimizers(model, cfg),
        scaler=torch.amp.GradScaler(devices.device.type, enabled=cfg.dtype == "float16"),
        skipped_2=torch.zeros(2, device=devices.device),
    )


def autocast(device, cfg):
    """The context in which PyTorch multiplies in --dtype; weights stay float32."""
    return torch.autocast(device.type, getattr(torch, cfg.dtype), enabled=cfg.dtype != "float32")


def gradients(state, micro_batches, cfg, devices):
    """Accumulate the gradients of a step; returns this process's share of the loss."""
    loss = torch.zeros((), device=devices.device)
    for batch in micro_batches:
        # DDP reduces gradients in the backward pass: once a step, with the last micro-batch.
        state.loss.require_backward_grad_sync = batch is micro_batches[-1]
        with autocast(devices.device, cfg):
            batch_loss = state.loss(batch)
        # Gradients are averaged over devices.
        state.scaler.scale(batch_loss * devices.world).backward()
        loss += batch_loss.detach()
    return loss


def learning_rate(step, cfg):
    """Share of the peak at update 0, 1, ...: linear warm-up, then half a cosine to a tenth."""
    warmup = max(1, min(cfg.warmup, cfg.steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, cfg.steps - warmup)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2


def update(state, step, cfg):
    """Update the weights, if the gradient is finite (the device decides), and the EMA: the norm."""
    for optimizer, peak in zip(state.optimizers, (cfg.lr, cfg.muon_lr), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * learning_rate(step, cfg)
        state.scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(state.model.parameters(), cfg.clip)
    skip = (~norm.isfinite()).float()
    for optimizer in state.optimizers:
        optimizer.found_inf = skip
        optimizer.step()
    average(state.ema, state.model, cfg.ema, step)
    state.skipped_2.add_(skip)[1].mul_(skip)  # a finite one ends the row
    state.scaler.update()
    state.model.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def average(ema, model, decay, updates):
    """ema += (1 - d) (model - ema) with d = min(decay, (1 + updates) / (10 + updates))."""
    decay = min(decay, (1 + updates) / (10 + updates))
    torch._foreach_lerp_([*ema.parameters()], [*model.parameters()], 1 - decay)


def metrics(state, loss, norm, stop, step, cfg, devices):
    """(a row of the log, whether to stop): the host waits. ValueError if too many were skipped."""
    sums_2 = torch.stack([loss, torch.full_like(loss, bool(stop))])
    if devices.world > 1:
        dist.all_reduce(sums_2)
    loss, stop, norm, skipped, in_a_row = torch.cat([sums_2, norm[None], state.skipped_2]).tolist()
    most = 20 if state.scaler.is_enabled() else 5  # float16 overflows now and then
    if in_a_row >= most:
        raise ValueError(
            f"no finite gradient in {in_a_row:.0f} steps, the last {step + 1}; "
            f"--resume={cfg.out} with a lower --lr"
        )
    row = {
        "step": step + 1,
        "loss": loss,
        "lr": cfg.lr * learning_rate(step, cfg),
        "skipped": int(skipped),
        "grad_norm": norm,
    }
    return row, stop > 0


# ---- checkpoints ---------------------------------------------------------------------------------


def trainer_tensors(state):
    """All that an update depends on, by name: weights, EMA, moments and their step counts."""
    tensors = {f"model.{name}": p for name, p in state.model.named_parameters()}
    tensors |= {f"ema.{name}": p for name, p in state.ema.named_parameters()}
    for name, p in state.model.named_parameters():
        for optimizer in state.optimizers:
            tensors |= {f"{key}.{name}": value for key, value in optimizer.state.get(p, {}).items()}
    return tensors


def save(state, step, cfg, meta, tokenizer_json, devices):
    """Write step_<n>/ atomically, and delete all but the newest two. One process writes."""
    if devices.rank == 0:
        tensors = {}
        for name, tensor in trainer_tensors(state).items():
            tensors[name] = tensor.detach().cpu().contiguous()
        data = safetensors.torch.save(tensors)
        trainer = {
            "step": step,
            "skipped": int(state.skipped_2[0]),
            "scaler": state.scaler.state_dict(),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        with runs.new_folder(Path(cfg.out, f"step_{step}")) as folder:
            mdlm.save(state.ema, folder, tokenizer_json)
            runs.write(folder / "trainer.json", meta | trainer)
            runs.write(folder / "trainer.safetensors", data)
        Path(cfg.out, runs.SAVED).touch()
        for old in list(runs.saved_steps(Path(cfg.out)).values())[:-KEEP]:
            shutil.rmtree(old)
    if devices.world > 1:
        dist.barrier()  # torchrun kills all processes once one ends


@torch.no_grad()
def restore(folder, state, meta):
    """Load a checkpoint into the state; returns its step. Raises ValueError if it does not fit."""
    advice = "delete it to use the one before"
    if not folder.name.startswith("step_"):  # of train_tpu.py or train_dream.py
        advice = "go on with the trainer that wrote it"
    try:
        keys = "model", "train", "data", "step", "skipped", "scaler", "sha256"
        trainer = runs.read_json(folder / "trainer.json", *keys)
        data = (folder / "trainer.safetensors").read_bytes()
        if trainer["sha256"] != hashlib.sha256(data).hexdigest():
            raise ValueError("trainer.safetensors is not what was saved")
        saved = safetensors.torch.load(data)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} cannot be read ({runs.first_line(error)}); {advice}") from None
    runs.check_resumed(trainer, meta, folder, fixed=("optimizer",))

    # The first update makes the moments: a dummy one, overwritten below.
    for p in state.model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in state.optimizers:
        optimizer.step()
    state.model.zero_grad(set_to_none=True)
    tensors = trainer_tensors(state)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    found = {name: tensor.shape for name, tensor in saved.items()}
    runs.check_tensors(found, shapes, f"{folder} ({advice})")
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    if trainer["scaler"]:
        state.scaler.load_state_dict(trainer["scaler"])
    state.skipped_2[0] = trainer["skipped"]
    return trainer["step"]


# ---- evaluation ----------------------------------------------------------------------------------


def read_heldout(heldout, tokenizer, rows):
    """(held-out rows [R, L], spread over the split; bits per byte of a nat per token)."""
    token_RL = heldout.read(heldout.spread(rows))[0].astype(np.int64)
    bytes_V = token_bytes(tokenizer, heldout.meta["vocab_padded"])
    bits = is_text(token_RL).sum() / math.log(2)
    return token_RL, bits / bytes_V[token_RL].sum(dtype=float)


@torch.no_grad()
def evaluate(model, token_RL, rng, cfg):
    """What Loss gives in evaluation mode, summed over held-out rows, by tenths of the mask rate:
    float64 [T, 4].

    One draw of noise, which masks exactly m of a row's n tokens. The row's weight n / m is that of
    the linear schedule at t = m / n, so the first column sums to the bound. Ref: LLaDA,
    arXiv:2502.09992, eq. 6.
    """
    device = model.embed.weight.device
    u_R = rng.permutation(diffusion.antithetic_times(rng.random(len(token_RL)), eps=0))
    counted_RL = is_text(token_RL)
    mask_RL, weight_R = diffusion.mask_exactly(counted_RL, u_R, rng.random(token_RL.shape))
    xt_RL = np.where(mask_RL, mdlm.MASK, token_RL)
    noised = Noised(token_RL, xt_RL, mask_RL, 1 / weight_R)
    # A batch holds rows of one tenth, and of similar length, so that there is little PAD.
    tenth_R = np.minimum(10 / weight_R, 9).astype(int)
    length_R = (token_RL != mdlm.PAD).sum(1)
    order_R = np.lexsort([length_R, tenth_R])
    loss = Loss(model).eval()
    sums_T4 = torch.zeros(10, 4, dtype=torch.float64, device=device)
    for tenth in range(10):
        row_M = order_R[tenth_R[order_R] == tenth]
        for i in range(0, len(row_M), cfg.micro_batch):
            batch = make_batch(noised, row_M[i : i + cfg.micro_batch], device)
            with autocast(device, cfg):
                sums_T4[tenth] += loss(batch)
    return sums_T4.cpu().numpy()


def scores(sums_T4, bits):
    """Scores for the log, of the sums of evaluate(); a nat per token is `bits` bits per byte."""
    nats, masked_nats, correct, masks = sums_T4.sum(0).tolist()
    return {
        "heldout_nats": nats,
        "perplexity": math.exp(min(nats, 700)),
        "bits_per_byte": bits * nats,
        "masked_ce": masked_nats / masks,
        "masked_accuracy": correct / masks,
    }


def eval_only(cfg, devices):
    """Print and return the bound of a checkpoint over draws of noise, and scores by mask rate."""
    cfg = settle(cfg, devices)
    folder = Path(cfg.eval_only)
    heldout, tokenizer = held_out(folder, cfg.data)
    step = 0
    if runs.saved_steps(folder):
        step, folder = runs.newest(folder)
    model = mdlm.load(folder, devices.device)
    token_RL, bits = read_heldout(heldout, tokenizer, cfg.eval_rows)
    rng = np.random.default_rng(cfg.seed)
    sums_NT4 = np.stack([evaluate(model, token_RL, rng, cfg) for _ in range(cfg.eval_draws)])
    row = {"step": step} | scores(sums_NT4.mean(0), bits)
    nats_N = sums_NT4[..., 0].sum(1)
    error = 0.0
    if len(nats_N) > 1:
        error = nats_N.std(ddof=1) / math.sqrt(len(nats_N))
    row["standard_error"] = error
    print(f"step {step}, {len(token_RL):,} of {heldout.total:,} held-out rows")
    print(f"at most {row['bits_per_byte']:.4f} bits per byte")
    print(f"{row['heldout_nats']:.4f} +- {error:.4f} nats per token")
    print(f"perplexity {row['perplexity']:.3f}")
    print("masked | nats per masked token | accuracy")
    row["by_noise"] = []
    for tenth, (_, nats, correct, masks) in enumerate(sums_NT4.sum(0).tolist()):
        if masks:
            rate = (tenth + 0.5) / 10
            ce = nats / masks
            accuracy = correct / masks
            row["by_noise"].append({"mask_rate": rate, "masked_ce": ce, "accuracy": accuracy})
            print(f"{rate:6.0%} | {ce:21.3f} | {accuracy:8.1%}")
    return row


def sample_text(model, tokenizer, cfg, seq_len):
    """A sample of up to 128 tokens, the same in all processes."""
    device = model.embed.weight.device
    canvas_BL = torch.full((1, min(seq_len, 128)), mdlm.MASK, device=device)
    canvas_BL[0, 0] = mdlm.BOS
    generator = torch.Generator(device).manual_seed(cfg.seed)
    rule = mdlm.Sampling(vocab=tokenizer.get_vocab_size())
    token_L = mdlm.sample(model, canvas_BL, rule, generator)[0].tolist()
    if mdlm.EOS in token_L:
        token_L = token_L[: token_L.index(mdlm.EOS)]
    return tokenizer.decode(token_L)


# ---- processes -----------------------------------------------------------------------------------


def find_devices():
    """The Devices of this process, as torchrun started it or alone."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        # Turing only emulates bfloat16, and Inductor cannot compile that.
        ampere = torch.cuda.get_device_capability(device) >= (8,)
        return Devices(device, "bfloat16" if ampere else "float16", rank, world)
    # A CPU without units for bfloat16 is slower with it.
    dtype = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    return Devices(torch.device("cpu"), dtype, rank, world)


@runs.enough_memory("a smaller --micro_batch or --model, or data of a smaller --seq_len")
def main(cfg):
    """Train, or with --eval_only return the scores."""
    devices = find_devices()
    if devices.world > 1:
        dist.init_process_group("nccl" if devices.device.type == "cuda" else "gloo")
    if devices.rank:
        sys.stdout = open(os.devnull, "w")
    try:
        if cfg.eval_only:
            return eval_only(cfg, devices)
        return train(cfg, devices)
    finally:
        if devices.world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
