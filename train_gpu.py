"""Train MDLM, a masked diffusion language model, on one GPU or several, or on the CPU for a first
try.

    python train_gpu.py --steps=50 --out=out/try            # tiny, on a CPU, a few minutes: is everything there?
    python train_gpu.py --data=data/stories --model=small   # rows that data_prep.py wrote
    python train_gpu.py --resume=out/train_gpu              # continues a stopped run with its own settings
    python train_gpu.py --eval_only=out/train_gpu           # held-out bits per byte, accuracy by noise level
    torchrun --nproc_per_node=4 train_gpu.py --data=data/stories --model=large

Reads a folder of padded rows from data_prep.py (one document per row); without --data it first
prepares the standard library of the running Python. Writes --out: config.json, log.jsonl,
samples.txt, step_<n>/ with model.safetensors (the EMA weights, for inference) and
trainer.safetensors (for --resume).

The loss is the NELBO: w(t) * cross-entropy at the masked positions, over all tokens that could be
masked. Rows, crops and noise are functions of (seed, step), so they do not depend on micro-batches,
devices or interruptions.

A GPU with flash attention (Ampere or newer, PyTorch 2.10) gets packed texts without PAD and
attention mask; other devices get padded rows. The host waits for the device only to log, to
evaluate and to save.

Letters: B rows of a step, L row length, R held-out rows, N masked positions, padded to a multiple
of 64, V vocabulary, S tokens of a packed batch, T = 10 tenths of the mask rate.
"""

import copy
import dataclasses
import hashlib
import math
import os
import re
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
from rows import held_out, open_data, prefetch, token_bytes
from runs import Count, Natural, NonNegative, Positive, Share


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of padded rows from data_prep.py; default: that of --eval_only, else the standard
    # library
    data: str = ""
    out: str = "out/train_gpu"  # folder of the run
    resume: str = ""  # folder of a run to continue, with its settings
    eval_only: str = ""  # folder of a run or a model to score on held-out rows, instead of training
    model: typing.Literal[tuple(mdlm.CONFIGS)] = "tiny"  # preset, see CONFIGS in model_mdlm.py
    tie: bool = False  # share the embedding with the head, for fewer parameters
    rope: bool = True  # rotary positions (RoPE); off: learned embeddings
    seq_len: Natural = 0  # tokens per row; 0: that of the data
    batch_size: Count = 64  # rows per optimizer step, all devices together
    # rows per device and forward pass; 0: all of a GPU's, up to 16 on a CPU
    micro_batch: Natural = 0
    steps: Count = 20_000  # optimizer steps
    # of the blocks' matrices; the rest has AdamW
    optimizer: typing.Literal["muon", "adamw"] = "muon"
    lr: Positive = 1e-3  # peak learning rate of AdamW
    muon_lr: Positive = 0.02  # peak learning rate of Muon
    # steps of linear warm-up, at most a tenth of the run; then a cosine to a tenth of the peak
    warmup: Natural = 1000
    weight_decay: NonNegative = 0.1  # of matrices and embeddings; biases and norms have none
    clip: Positive = 1.0  # maximum global gradient norm
    dropout: Share = 0.0  # on the output of each residual branch
    # noise schedule, see diffusion.py
    schedule: typing.Literal[tuple(diffusion.SCHEDULES)] = "linear"
    crop_rate: Share = 0.25  # share of rows cropped to a random length, to train short canvases
    ema: Share = 0.999  # EMA decay, warmed up; 0 disables averaging
    # of matmuls; default: the fastest on the device
    dtype: typing.Literal["", "bfloat16", "float16", "float32"] = ""
    compile: bool = True  # use torch.compile; off runs op by op, for debugging
    eval_every: Natural = 0  # steps between evaluations, each with a sample; 0: ten per run
    eval_rows: Count = 512  # held-out rows per evaluation, at most
    eval_draws: Count = 8  # with --eval_only: noise draws, each a pass over the held-out rows
    save_every: Natural = 0  # steps between checkpoints; 0: eval_every
    keep: Count = 2  # newest checkpoints to keep
    # steps between rows of the log; several processes see signals only then: at most 30 s apart
    log_every: Count = 10
    prompt: str = ""  # prefix of the samples drawn in training
    wandb: str = ""  # project name at Weights & Biases; default: log to files only
    seed: Natural = 0  # initial weights, row order, crops, noise


# lowest mask rate in training, for any schedule: the NELBO's weights grow like 1 / rate
SMALLEST_RATE = 1e-3


class Devices(typing.NamedTuple):
    device: torch.device  # of this process
    rank: int = 0
    world: int = 1  # number of processes


# ---- batches: crops and noise, in NumPy on the host ----------------------------------------------------------------


def find_data(cfg):
    """Training rows, held-out rows and tokenizer.json. The default data is prepared first."""
    folder = cfg.data or "data/python-padded" + (f"-{cfg.seq_len}" if cfg.seq_len else "")
    if not cfg.data and not Path(folder, "meta.json").exists():
        if dist.is_available() and dist.is_initialized():  # NVIDIA's wheels for a Jetson have none
            raise ValueError(
                "several processes need --data: first python data_prep.py python --rows=padded"
            )
        print(f"no --data: preparing the Python standard library in {folder}")
        runs.script(
            "data_prep.py", "python", "--rows=padded", f"--seq_len={cfg.seq_len}", f"--out={folder}"
        )
    train, heldout, tokenizer_json = open_data(folder, cfg.seq_len)
    ids = [train.meta.get(f"{name}_id") for name in ("pad", "bos", "eos", "mask", "unk")]
    if ids != [mdlm.PAD, mdlm.BOS, mdlm.EOS, mdlm.MASK, mdlm.UNK]:
        raise ValueError(
            f"{folder} has its special tokens at {ids}, not at 0 to 4; prepare it with --rows=padded"
        )
    if not heldout.total:
        raise ValueError(
            f"{folder} holds no held-out rows; prepare it again with --heldout above 0"
        )
    return train, heldout, tokenizer_json


def crop(token_BL, rate, rng):
    """Crop a share `rate` of the rows to a random window of 32 to L tokens, half of them from the
    row's start.

    The rest of the row is PAD. Without crops the model never sees a canvas that is shorter than its
    text.
    """
    B, L = token_BL.shape
    chosen_B, from_start_B = rng.random(B) < rate, rng.random(B) < 0.5
    # a window lies within the text, or starts with it if the text is shorter
    size_B = rng.integers(min(32, L), L + 1, B)
    text_B = (token_BL != mdlm.PAD).sum(1)
    start_B = np.where(
        from_start_B, 0, (rng.random(B) * (np.maximum(text_B - size_B, 0) + 1)).astype(int)
    )
    cropped_BL = token_BL.copy()
    for row in np.flatnonzero(chosen_B):
        window_M = token_BL[row, start_B[row] :][: size_B[row]]
        cropped_BL[row] = np.pad(window_M, (0, L - len(window_M)), constant_values=mdlm.PAD)
    return cropped_BL


def is_text(token_BL):
    """True for the tokens that are masked and counted: neither PAD nor BOS."""
    return (token_BL != mdlm.PAD) & (token_BL != mdlm.BOS)


class Noised(typing.NamedTuple):
    token_BL: np.ndarray
    xt_BL: np.ndarray  # token_BL with MASK where mask_BL
    mask_BL: np.ndarray
    time_B: np.ndarray  # noise times in (0, 1]


def noise(token_BL, schedule, rng):
    """Noise rows at antithetic times, one in each of B strata, in random order."""
    smallest_time = diffusion.time_of_rate(SMALLEST_RATE, schedule)
    time_B = rng.permutation(diffusion.antithetic_times(rng.random(len(token_BL)), smallest_time))
    u_BL = rng.random(token_BL.shape)
    xt_BL, mask_BL = diffusion.q_sample(
        token_BL, time_B, u_BL, schedule, mdlm.MASK, mdlm.PAD, ~is_text(token_BL)
    )
    return Noised(token_BL, xt_BL, mask_BL, time_B)


def training_batch(rows, cfg, step):
    """The noised rows of step 0, 1, ..., sorted by length, so that micro-batches hold little
    PAD.
    """
    rng = np.random.default_rng([cfg.seed, step])
    token_BL = crop(
        rows.batch(cfg.seed, step, cfg.batch_size)[0].astype(np.int64), cfg.crop_rate, rng
    )
    return noise(
        token_BL[np.argsort((token_BL != mdlm.PAD).sum(1), kind="stable")], cfg.schedule, rng
    )


class Batch(typing.NamedTuple):
    """A micro-batch on the device: the input of Loss."""

    xt_BL: torch.Tensor  # noised tokens; [1, S] if packed
    index_N: torch.Tensor  # masked positions in the flattened rows: only they need logits
    token_N: torch.Tensor  # their tokens before masking
    time_N: torch.Tensor  # noise times of their rows
    masked_N: torch.Tensor  # False for the padding of the four [N]
    time_B: torch.Tensor  # noise times of the rows, or of the packed texts
    # tokens of the text in the whole step, so that the losses of micro-batches add up
    counted: torch.Tensor
    packed: mdlm.Packed | None = None


def make_batch(noised, row_ids, device, packed=False):
    """The Batch of these rows (a slice or indices): trimmed to the longest of them, or packed
    without PAD.
    """
    token_BL, xt_BL, mask_BL, time_B = (x[row_ids] for x in noised)
    L = token_BL.shape[1]
    length_B = (token_BL != mdlm.PAD).sum(1)
    if packed:
        # a last text of PAD makes the total a multiple of 32
        # PAD is 0
        token_BL, xt_BL, mask_BL = (np.pad(x, ((0, 1), (0, 0))) for x in (token_BL, xt_BL, mask_BL))
        time_B = np.append(time_B, 1.0)
        length_B = np.append(length_B, -length_B.sum() % 32)
    else:
        length_B[:] = -(-length_B.max() // 32) * 32
    inside_BL = np.arange(L) < length_B[:, None]
    text_S, position_S = np.nonzero(inside_BL)
    layout = (
        [text_S, position_S, np.append(0, inside_BL.sum(1).cumsum()).astype(np.int32)]
        if packed
        else []
    )
    xt_BL = xt_BL[inside_BL].reshape(1 if packed else len(xt_BL), -1)
    masks = len(index_N := np.flatnonzero(mask_BL[inside_BL]))
    index_N = np.pad(index_N, (0, -masks % 64 if masks else 64))
    masked_N = np.arange(len(index_N)) < masks
    time_B = time_B.astype(np.float32)
    token_N, time_N = token_BL[inside_BL][index_N], time_B[text_S[index_N]]
    counted = np.asarray(is_text(noised.token_BL).sum())
    tensors = [
        torch.from_numpy(x)
        for x in (xt_BL, index_N, token_N, time_N, masked_N, time_B, counted, *layout)
    ]
    if device.type == "cuda":  # copies from pinned memory do not block
        tensors = [x.pin_memory().to(device, non_blocking=True) for x in tensors]
    # sizes that change with every batch: torch.compile must not specialise
    for x in (*tensors[:5], *tensors[7:9]):
        torch._dynamo.mark_dynamic(x, x.ndim - 1)
    return Batch(*tensors[:7], mdlm.Packed(*tensors[7:], longest=L) if packed else None)


def step_batches(rows, cfg, devices, packed, step):
    """The noised rows of a step, and the Batch of each micro-batch of this process."""
    noised = training_batch(rows, cfg, step)
    size = cfg.micro_batch * devices.world
    # rows are sorted by length: with every world-th row the devices get similar lengths
    slices = [
        slice(i + devices.rank, i + size, devices.world) for i in range(0, cfg.batch_size, size)
    ]
    return noised, [make_batch(noised, row_ids, devices.device, packed) for row_ids in slices]


# ---- loss and update -----------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A Batch's share of the step's loss: the NELBO in nats per token.

    In evaluation mode [4]: the NELBO, and of the masked tokens the nats, the correct ones and their
    number.
    """

    def __init__(self, model, schedule):
        super().__init__()
        self.model, self.schedule = model, schedule
        # Times are drawn from a part of [0, 1]. With this factor a uniform prediction costs log V
        # under any schedule.
        self.span = (1 - diffusion.time_of_rate(SMALLEST_RATE, schedule)) / (1 - SMALLEST_RATE)

    def forward(self, batch):
        # hidden states of all positions, logits [N, V] of the masked ones: [B, L, V] is never made
        see_BL = None if batch.packed else batch.xt_BL != mdlm.PAD
        rate_B = diffusion.mask_rate(batch.time_B, self.schedule)
        hidden_BLD = self.model.hidden(batch.xt_BL, rate_B, see_BL, batch.packed)
        logits_NV = self.model.logits(hidden_BLD.flatten(0, 1)[batch.index_N])
        nll_N = diffusion.masked_nll(logits_NV, batch.token_N, batch.masked_N, mdlm.MASK)
        # each masked token counts as a sequence of its own, at its row's time
        nelbo = self.span * diffusion.nelbo_per_token(
            nll_N[:, None], batch.time_N, batch.counted, self.schedule
        )
        if self.training:
            return nelbo
        masks = batch.masked_N.sum()
        correct = masks * diffusion.masked_accuracy(
            logits_NV, batch.token_N, batch.masked_N, mdlm.MASK
        )
        return torch.stack([nelbo, nll_N.sum(), correct, masks])


def learning_rate(step, cfg):
    """Share of the peak at update `step` = 0, 1, ...: linear warm-up, then half a cosine down to a
    tenth.
    """
    warmup = max(1, min(cfg.warmup, cfg.steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warmup) / max(1, cfg.steps - warmup))) / 2


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with a choice of dtype; a step where found_inf is 1 changes nothing.

    PyTorch's bfloat16 takes a CPU without units for it 20 times as long. Ref:
    https://kellerjordan.github.io/posts/muon
    """

    def __init__(self, params, lr, weight_decay, dtype):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype, self.found_inf = (
            torch.bfloat16 if dtype == "bfloat16" else torch.float32,
            torch.zeros(()),
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"]
                momentum = buffer.lerp(p.grad, 0.05)
                x = p.grad.lerp(momentum, 0.95).to(self.dtype)
                x = x.T if x.shape[0] > x.shape[1] else x
                x = x / x.norm().clamp(min=1e-7)  # its largest singular value is at most 1
                for _ in range(5):
                    gram = x @ x.T
                    x = torch.addmm(
                        x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445
                    )
                x = x.T if p.shape[0] > p.shape[1] else x
                lr = group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5
                weight = (p * (1 - group["lr"] * group["weight_decay"])).add_(x, alpha=-lr)
                for old, new in ((p, weight), (buffer, momentum)):
                    torch.where(self.found_inf > 0, old, new, out=old)


def make_optimizers(model, cfg, dtype="float32"):
    """Muon for the matrices of the blocks, AdamW for the rest; weight decay on matrices and
    embeddings only.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    vectors = [p for p in model.parameters() if p.ndim == 1]
    muon = [
        matrices.pop(name)
        for name in list(matrices)
        if cfg.optimizer == "muon" and name.startswith("blocks.")
    ]
    groups = [
        {"params": [*matrices.values()], "weight_decay": cfg.weight_decay},
        {"params": vectors},
    ]
    adamw = torch.optim.AdamW(groups, cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [adamw, Muon(muon, cfg.muon_lr, cfg.weight_decay, dtype)] if muon else [adamw]


@torch.no_grad()
def average(ema, model, decay, updates):
    """ema += (1 - d) (model - ema) with d = min(decay, (1 + updates) / (10 + updates)), the warm-up
    of the decay.
    """
    torch._foreach_lerp_(
        [*ema.parameters()], [*model.parameters()], 1 - min(decay, (1 + updates) / (10 + updates))
    )


@dataclasses.dataclass
class State:
    model: mdlm.MDLM
    ema: mdlm.MDLM  # EMA weights, for evaluation and inference
    loss: nn.Module  # Loss of the model, compiled, under DDP if there are several processes
    optimizers: list  # AdamW, and Muon
    scaler: torch.amp.GradScaler  # of float16; does nothing for other types
    # updates skipped for a gradient that is not finite: in all, and in a row up to now
    skipped_2: torch.Tensor


def make_state(cfg, architecture, dtype, devices):
    """A new model, the same in all processes, which DDP keeps so."""
    torch.manual_seed(cfg.seed)
    model = mdlm.MDLM(architecture).to(devices.device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    loss = Loss(model, cfg.schedule)
    if devices.world > 1:
        loss = nn.parallel.DistributedDataParallel(loss)
    if cfg.compile:
        loss = torch.compile(loss)
    scaler = torch.amp.GradScaler(devices.device.type, enabled=dtype == "float16")
    return State(
        model,
        ema,
        loss,
        make_optimizers(model, cfg, dtype),
        scaler,
        torch.zeros(2, device=devices.device),
    )


def packs(device, dtype):
    """True where texts are packed without PAD: flash attention needs an Ampere GPU, 16 bits and
    PyTorch 2.10.
    """
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return ampere and dtype != "float32" and mdlm.varlen_attn is not None


def gradients(state, micro_batches, dtype, devices):
    """Accumulate the gradients of a step over its micro-batches; returns this process's share of
    the loss.
    """
    loss = torch.zeros((), device=devices.device)
    for batch in micro_batches:
        # DDP reduces gradients in the backward pass: once a step, with the last micro-batch
        state.loss.require_backward_grad_sync = batch is micro_batches[-1]
        with torch.autocast(devices.device.type, getattr(torch, dtype), enabled=dtype != "float32"):
            batch_loss = state.loss(batch)
        # gradients are averaged over devices
        state.scaler.scale(batch_loss * devices.world).backward()
        loss += batch_loss.detach()
    return loss


def update(state, step, cfg):
    """Update the weights, where the gradient norm is finite (the device decides), and their EMA;
    returns the norm.
    """
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


def metrics(state, loss, norm, stop, step, cfg, devices):
    """(loss, gradient norm, skipped updates, whether to stop): the host waits. ValueError if too
    many were skipped.
    """
    sums_2 = torch.stack([loss, torch.full_like(loss, bool(stop))])
    if devices.world > 1:
        dist.all_reduce(sums_2)
    loss, stop, norm, skipped, in_a_row = torch.cat([sums_2, norm[None], state.skipped_2]).tolist()
    # float16 overflows now and then; then its scale falls
    if in_a_row >= (20 if state.scaler.is_enabled() else 5):
        advice = f"--resume={cfg.out} with a lower --lr, from {[*runs.saved_steps(Path(cfg.out))] or 'the start'}"
        raise ValueError(
            f"no finite gradient in {in_a_row:.0f} steps, the last {step + 1}; {advice}"
        )
    return loss, norm, int(skipped), stop > 0


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def trainer_tensors(state):
    """All that an update depends on, by name: weights, EMA weights, moments and their step
    counts.
    """
    tensors = {f"model.{name}": p for name, p in state.model.named_parameters()}
    tensors |= {f"ema.{name}": p for name, p in state.ema.named_parameters()}
    for name, p in state.model.named_parameters():
        for optimizer in state.optimizers:
            tensors |= {f"{key}.{name}": value for key, value in optimizer.state.get(p, {}).items()}
    return tensors


def save(state, step, cfg, meta, tokenizer_json, devices):
    """Write step_<n>/ atomically, and delete all but the newest cfg.keep. One process writes, the
    others wait.
    """
    if devices.rank == 0:
        tensors = {
            name: t.detach().cpu().contiguous() for name, t in trainer_tensors(state).items()
        }
        averaged = {
            name.removeprefix("ema."): t for name, t in tensors.items() if name.startswith("ema.")
        }
        trainer = meta | {
            "step": step,
            "skipped": int(state.skipped_2[0]),
            "scaler": state.scaler.state_dict(),
        }
        data = safetensors.torch.save(tensors)
        with runs.new_folder(Path(cfg.out, f"step_{step}")) as folder:
            mdlm.save(state.ema, folder, tokenizer_json, averaged)
            runs.write(
                folder / "trainer.json", trainer | {"sha256": hashlib.sha256(data).hexdigest()}
            )
            runs.write(folder / "trainer.safetensors", data)
        Path(cfg.out, runs.SAVED).touch()
        for old in list(runs.saved_steps(Path(cfg.out)).values())[: -cfg.keep]:
            shutil.rmtree(old)
    if devices.world > 1:
        dist.barrier()  # torchrun kills all processes once one ends


@torch.no_grad()
def restore(folder, state, meta):
    """Load a checkpoint into the state; returns its step. Raises ValueError if it does not fit."""
    other = not folder.name.startswith("step_")  # of train_tpu.py or train_dream.py
    advice = "go on with the trainer that wrote it" if other else "delete it to use the one before"
    try:
        trainer = runs.read_json(
            folder / "trainer.json", "model", "train", "data", "step", "skipped", "scaler"
        )
        data = (folder / "trainer.safetensors").read_bytes()
        if trainer.get("sha256") not in (None, hashlib.sha256(data).hexdigest()):
            raise ValueError("trainer.safetensors is not what was saved")
        saved = safetensors.torch.load(data)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} cannot be read ({runs.first_line(error)}); {advice}") from None
    runs.check_resumed(trainer, meta, folder, fixed=("optimizer",))
    # moments are made by the first update: a dummy one, overwritten below
    for p in state.model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in state.optimizers:
        optimizer.step()
    state.model.zero_grad(set_to_none=True)
    tensors = trainer_tensors(state)
    runs.check_tensors(
        *({name: t.shape for name, t in x.items()} for x in (saved, tensors)),
        f"{folder} ({advice})",
    )
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    if trainer["scaler"]:
        state.scaler.load_state_dict(trainer["scaler"])
    state.skipped_2[0] = trainer["skipped"]
    return trainer["step"]


# ---- evaluation ----------------------------------------------------------------------------------------------------


def read_heldout(heldout, tokenizer, rows):
    """Held-out rows [R, L], spread over the split, and how many bits per byte of text a nat per
    token is.
    """
    token_RL = heldout.read(heldout.spread(rows))[0].astype(np.int64)
    text_bytes = token_bytes(tokenizer, heldout.meta["vocab_padded"])[token_RL].sum(dtype=float)
    return token_RL, is_text(token_RL).sum() / math.log(2) / text_bytes


@torch.no_grad()
def evaluate(model, token_RL, rng, micro_batch, dtype):
    """What Loss gives in evaluation mode, summed over held-out rows, by tenths of the mask rate:
    float64 [T, 4].

    One draw of noise, which masks exactly m of a row's n tokens. The row's weight n / m is that of
    the linear schedule at t = m / n, so the first column sums to the bound. Ref: LLaDA,
    arXiv:2502.09992, eq. 6.
    """
    device = model.embed.weight.device
    u_R = rng.permutation(diffusion.antithetic_times(rng.random(len(token_RL)), eps=0))
    mask_RL, weight_R = diffusion.mask_exactly(is_text(token_RL), u_R, rng.random(token_RL.shape))
    noised = Noised(token_RL, np.where(mask_RL, mdlm.MASK, token_RL), mask_RL, 1 / weight_R)
    # a batch holds rows of one tenth, and of similar length, so that there is little PAD
    tenth_R = np.minimum(10 / weight_R, 9).astype(int)
    order_R = np.lexsort([(token_RL != mdlm.PAD).sum(1), tenth_R])
    loss = Loss(model, "linear").eval()
    sums_T4 = torch.zeros(10, 4, dtype=torch.float64, device=device)
    for tenth in range(10):
        row_M = order_R[tenth_R[order_R] == tenth]
        for i in range(0, len(row_M), micro_batch):
            batch = make_batch(noised, row_M[i : i + micro_batch], device, packs(device, dtype))
            with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
                sums_T4[tenth] += loss(batch)
    return sums_T4.cpu().numpy()


def scores(sums_T4, bits):
    """Scores for the log, of the sums of `evaluate`; a nat per token is `bits` bits per byte."""
    nats, masked_nats, correct, masks = sums_T4.sum(0).tolist()
    row = {
        "heldout_nats": nats,
        "perplexity": math.exp(min(nats, 700)),
        "bits_per_byte": bits * nats,
    }
    return row | {"masked_ce": masked_nats / masks, "masked_accuracy": correct / masks}


def eval_only(cfg, devices):
    """Score a checkpoint with several draws of the noise: print and return the bound, and scores by
    mask rate.
    """
    cfg, dtype = resolve(cfg, devices)
    folder = Path(cfg.eval_only)
    heldout, tokenizer = held_out(folder, cfg.data)
    step, folder = runs.newest(folder) if runs.saved_steps(folder) else (0, folder)
    model = mdlm.load(folder, devices.device)
    token_RL, bits = read_heldout(heldout, tokenizer, cfg.eval_rows)
    rng = np.random.default_rng(cfg.seed)
    sums_NT4 = np.stack(
        [evaluate(model, token_RL, rng, cfg.micro_batch, dtype) for _ in range(cfg.eval_draws)]
    )
    row = {"step": step} | scores(sums_NT4.mean(0), bits)
    nats_N = sums_NT4[..., 0].sum(1)
    row["standard_error"] = (
        float(nats_N.std(ddof=1) / math.sqrt(len(nats_N))) if len(nats_N) > 1 else 0.0
    )
    print(f"step {step}: at most {row['bits_per_byte']:.4f} bits per byte, {row['heldout_nats']:.4f} +- "
          f"{row['standard_error']:.4f} nats per token, perplexity {row['perplexity']:.3f}")  # fmt: skip
    print(
        f"{len(token_RL):,} of {heldout.total:,} held-out rows\nmasked | nats per masked token | accuracy"
    )
    row["by_noise"] = []
    for tenth, (_, nats, correct, masks) in enumerate(sums_NT4.sum(0).tolist()):
        if masks:
            level = {
                "mask_rate": (tenth + 0.5) / 10,
                "masked_ce": nats / masks,
                "accuracy": correct / masks,
            }
            row["by_noise"].append(level)
            print(
                f"{level['mask_rate']:6.0%} | {level['masked_ce']:21.3f} | {level['accuracy']:8.1%}"
            )
    return row


def sample_text(model, tokenizer, cfg, seq_len, device):
    """A sample of up to 128 tokens, the same in all processes."""
    ids = [mdlm.BOS, *tokenizer.encode(cfg.prompt, add_special_tokens=False).ids][:seq_len]
    canvas = torch.full((1, min(seq_len, max(128, len(ids)))), mdlm.MASK, device=device)
    canvas[0, : len(ids)] = torch.tensor(ids)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    token_L = mdlm.sample(
        model, canvas, mdlm.Sampling(vocab=tokenizer.get_vocab_size()), generator
    )[0].tolist()
    return tokenizer.decode(token_L[: [*token_L, mdlm.EOS].index(mdlm.EOS)])


# ---- the run -------------------------------------------------------------------------------------------------------


def resolve(cfg, devices):
    """The settings with defaults for micro_batch, eval_every and save_every; and the dtype of
    matmuls.
    """
    # a GPU gets all its rows at once; a CPU is fastest with what its caches hold
    cuda, world, share = (
        devices.device.type == "cuda",
        devices.world,
        cfg.batch_size // devices.world,
    )
    micro = cfg.micro_batch or (share if cuda else math.gcd(share, 16))
    if cfg.batch_size % world or micro < 1 or share % micro:
        raise ValueError(
            f"--batch_size={cfg.batch_size} is no multiple of {world} devices times --micro_batch={micro}"
        )
    # Turing only emulates bfloat16, and Inductor cannot compile that; a CPU without units for it is
    # slower
    bfloat16 = (
        torch.cuda.get_device_capability(devices.device) >= (8,)
        if cuda
        else torch.cpu._is_amx_tile_supported()
    )
    dtype = "bfloat16" if bfloat16 else "float16" if cuda else "float32"
    eval_every = cfg.eval_every or max(1, cfg.steps // 10)
    resolved = {
        "micro_batch": micro,
        "eval_every": eval_every,
        "save_every": cfg.save_every or eval_every,
    }
    return dataclasses.replace(cfg, **resolved), cfg.dtype or dtype


def train(cfg, devices):
    given, (cfg, dtype) = {"micro_batch": cfg.micro_batch}, resolve(cfg, devices)
    rows, heldout, tokenizer_json = find_data(cfg)
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    heldout_RL, bits = read_heldout(heldout, tokenizer, cfg.eval_rows)
    own = {name: getattr(cfg, name) for name in ("tie", "rope", "dropout")} | {
        "vocab": rows.meta["vocab_padded"]
    }
    own["positions"] = max(mdlm.CONFIGS[cfg.model].positions, rows.meta["seq_len"])
    architecture = dataclasses.replace(mdlm.CONFIGS[cfg.model], **own)
    meta = {"model": dataclasses.asdict(architecture), "data": rows.meta["fingerprint"]}
    # as it was given: a resumed run may have other devices
    meta["train"] = dataclasses.asdict(cfg) | given
    packed = packs(devices.device, dtype)
    name = torch.cuda.get_device_name(devices.device) if devices.device.type == "cuda" else "CPU"
    print(
        f"{devices.world} x {name}, {dtype} matmuls on float32 weights, {'packed' if packed else 'padded'} rows"
    )
    print(
        ", ".join(f"{part} {n:,}" for part, n in mdlm.count_params(architecture).items())
        + " parameters"
    )
    epochs = f"{cfg.steps * cfg.batch_size / rows.total:.2f} epochs of {rows.total:,} rows"
    print(
        f"{cfg.steps:,} steps of {cfg.batch_size} rows, {cfg.micro_batch} a device at a time = {epochs}",
        flush=True,
    )
    if cfg.compile:
        print("compiling: the first step takes about a minute more", flush=True)

    with runs.Folder(cfg, rank=devices.rank) as run:
        state, first = make_state(cfg, architecture, dtype, devices), 0
        if cfg.resume and runs.saved_steps(Path(cfg.resume)):
            first = restore(runs.newest(cfg.resume)[1], state, meta)
            print(f"resuming {cfg.resume} after step {first}")
        run.begin(first, meta | {"data": str(rows.folder)}, {"tokenizer.json": tokenizer_json})
        # from here on this folder goes on alone
        if first and Path(cfg.resume).resolve() != Path(cfg.out).resolve():
            save(state, first, cfg, meta, tokenizer_json, devices)
        batches = prefetch(
            lambda step: step_batches(rows, cfg, devices, packed, step), first, cfg.steps
        )
        began, tokens = time.perf_counter(), []  # tokens of each step since then, PAD not counted
        for step, (noised, micro_batches), _ in batches:
            # Rows and noise are functions of (seed, step), dropout also of the process: a resumed
            # run has the same.
            torch.manual_seed((cfg.seed + step) * devices.world + devices.rank)
            loss = gradients(state, micro_batches, dtype, devices)
            norm = update(state, step, cfg)
            tokens.append(int((noised.token_BL != mdlm.PAD).sum()))
            done, ends = step + 1, step + 1 == cfg.steps
            logs, evaluates, saves = (
                ends or done % n == 0 for n in (cfg.log_every, cfg.eval_every, cfg.save_every)
            )

            # several processes stop together, at a step where they communicate
            stop = run.signal if devices.world == 1 else ""
            if logs:
                loss, norm, skipped, stop = metrics(
                    state, loss, norm, run.signal, step, cfg, devices
                )
                step_s = (time.perf_counter() - began) / len(tokens)
                row = {
                    "step": done,
                    "loss": loss,
                    "lr": cfg.lr * learning_rate(step, cfg),
                    "grad_norm": norm,
                }
                row |= {"step_ms": 1e3 * step_s, "tok_per_s": sum(tokens) / len(tokens) / step_s}
                run.log(row | {"eta_min": (cfg.steps - done) * step_s / 60, "skipped": skipped})
            # all processes do, though one would be enough: the others would only wait
            if evaluates:
                # the same noise each time; no step has this number
                rng = np.random.default_rng([cfg.seed, 2**31])
                sums_T4 = evaluate(state.ema, heldout_RL, rng, cfg.micro_batch, dtype)
                run.log({"step": done} | scores(sums_T4, bits))
                text = sample_text(state.ema, tokenizer, cfg, rows.meta["seq_len"], devices.device)
                run.append("samples.txt", f"---- step {done}\n{text}\n")
            if saves or stop:
                save(state, done, cfg, meta, tokenizer_json, devices)
            if stop:
                run.leave(done)
            if logs or evaluates or saves:
                # leaves out the time of evaluating and saving
                began, tokens = time.perf_counter(), []
    print(
        f"done: {cfg.out}; generate text with: python inference_jetson.py --bundle={cfg.out}",
        flush=True,
    )


def main(cfg):
    """Train, or with --eval_only return the scores; in the processes that torchrun started, or
    alone.
    """
    device, world = torch.device("cpu"), int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    devices = Devices(device, int(os.environ.get("RANK", 0)), world)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if devices.rank:
        sys.stdout = open(os.devnull, "w")
    try:
        return eval_only(cfg, devices) if cfg.eval_only else train(cfg, devices)
    except RuntimeError as error:
        if found := re.search(
            r"ImportError: (\S+)/\w+/\w+\.main\.so: (?:file too short|invalid ELF)", str(error)
        ):
            raise RuntimeError(
                f"a run that was killed while it compiled damaged a file; delete {found[1]}"
            ) from None
        raise
    finally:
        if world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
