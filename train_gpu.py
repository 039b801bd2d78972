"""Train MDLM, a masked diffusion language model, on one GPU or several, or on the CPU for a first try.

    python train_gpu.py --steps=50                          # tiny, on a CPU, a few minutes: is everything there?
    python train_gpu.py --data=data/stories --model=small   # rows that data_prep.py wrote
    python train_gpu.py --resume=out/train_gpu              # goes on where the run stopped, with its own settings
    torchrun --nproc_per_node=4 train_gpu.py --data=data/stories --model=large

Reads a folder of padded rows from data_prep.py (one document a row); without --data it first prepares the standard
library of the running Python. Writes --out: config.json, log.jsonl, samples.txt, step_<n>/ with model.safetensors (the
averaged weights, for everybody) and trainer.safetensors (all that a resumed run needs).

The loss is the NELBO: w(t) * cross-entropy at the masked positions, over all tokens that could be masked. Rows, crops
and noise are functions of (seed, step), so they do not depend on micro-batches, devices or interruptions.

A GPU with flash attention (Ampere or newer, PyTorch 2.10) gets the texts one behind the other, without PAD and mask;
all else gets padded rows. A thread makes the next batch meanwhile. The host waits for the device where a row is logged.

Letters: B rows of a step, L row length, R held-out rows, N masked positions, padded to a multiple of 64, V vocabulary,
S tokens of a packed batch.
"""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
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
from torch.nn.parallel import DistributedDataParallel

import diffusion
import model_mdlm as mdlm
import runs
from rows import open_data, token_bytes


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""  # folder of padded rows that data_prep.py wrote; "" prepares the Python standard library
    out: str = "out/train_gpu"  # folder of the run
    resume: str = ""  # folder of a run to go on with, by its own settings; "" starts anew
    model: str = "tiny"  # key of CONFIGS in model_mdlm.py
    tie: bool = False  # use the embedding as the head too, for fewer parameters
    time: bool = True  # give the model the noise level as an input
    rope: bool = True  # positions turn queries and keys (RoPE); off: they are learned
    seq_len: int = 0  # tokens per row; 0 takes what the data has
    batch_size: int = 64  # rows per optimizer step, all devices together
    micro_batch: int = 0  # rows per device in one pass; 0 is 16 on a CPU, and the device's whole share on a GPU
    steps: int = 20_000  # optimizer steps
    optimizer: typing.Literal["muon", "adamw"] = "muon"  # of the blocks' matrices
    lr: float = 1e-3  # peak learning rate
    muon_lr: float = 0.02  # peak learning rate of Muon, which makes all directions of a matrix's update equally large
    warmup: int = 1000  # steps of linear warm-up, at most a tenth of the run; then a cosine to a tenth of the peak
    weight_decay: float = 0.1  # decay of matrices and embeddings; biases and norms have none
    clip: float = 1.0  # largest global gradient norm
    dropout: float = 0.0  # share of the residual branches' outputs that is dropped
    schedule: typing.Literal[tuple(diffusion.SCHEDULES)] = "linear"  # noise schedule, see diffusion.py
    loss: typing.Literal["nelbo", "masked_ce"] = "nelbo"  # the bound, or the plain mean over masked tokens
    crop_rate: float = 0.25  # share of rows cut to a random length, so that the model knows short canvases
    ema: float = 0.999  # decay of the averaged weights, less in the beginning; 0 makes them equal the last weights
    dtype: typing.Literal["", "bfloat16", "float16", "float32"] = (
        ""  # of matmuls; "": half where a device has units for it
    )
    compile: bool = True  # use torch.compile; off runs op by op, for debugging
    fsdp: bool = False  # split weights over the devices (FSDP2) instead of copying them (DDP)
    eval_every: int = 0  # steps between evaluations, each with a sample; 0 is ten times a run
    eval_rows: int = 512  # most held-out rows to evaluate
    save_every: int = 0  # steps between checkpoints; 0 is eval_every
    keep: int = 2  # newest checkpoints to keep
    log_every: int = 10  # steps between rows of the log
    prompt: str = ""  # text that the samples drawn while training begin with
    plot: bool = False  # draw loss and bits per byte in the terminal, and at the end curve.png
    wandb: str = ""  # project name at Weights & Biases; "" logs to files alone
    seed: int = 0  # initial weights, row order, crops, noise


# dense bfloat16 FLOP/s of the SXM data sheets; other devices report no MFU
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
SMALLEST_RATE = 1e-3  # of masked tokens in training, whatever the schedule: the NELBO's weights grow like 1 / rate


@dataclasses.dataclass(frozen=True)
class Devices:
    """This process's device, its number, and how many processes train together."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def name(self):
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"


# ---- batches: crops and noise, in NumPy on the host ----------------------------------------------------------------


def find_data(cfg, positions):
    """Training rows, held-out rows and tokenizer.json; the default data is prepared first."""
    folder = Path(cfg.data or "data/python-padded")
    if not cfg.data and not (folder / "meta.json").exists():
        if dist.is_initialized():
            raise ValueError("several processes need --data: first python data_prep.py python --rows=padded")
        print(f"no --data: preparing the Python standard library in {folder}")
        runs.script("data_prep.py", "python", "--rows=padded", f"--out={folder}")
    train, heldout, tokenizer_json = open_data(folder, cfg.seq_len)
    ids = [train.meta.get(f"{name}_id") for name in ("pad", "bos", "eos", "mask", "unk")]
    if ids != [mdlm.PAD, mdlm.BOS, mdlm.EOS, mdlm.MASK, mdlm.UNK]:
        raise ValueError(f"{folder} is not for a masked diffusion model; prepare it with --rows=padded")
    if train.meta["seq_len"] > positions:
        raise ValueError(f"{folder} has rows of {train.meta['seq_len']} tokens, the model {positions} positions")
    if not heldout.total:
        raise ValueError(f"{folder} holds no held-out rows; prepare it again with --heldout above 0")
    return train, heldout, tokenizer_json


def crop(token_BL, rate, rng):
    """Cut a share `rate` of the rows to a random window of 32 to L tokens, half of these from the row's beginning.

    What follows is PAD, which nobody sees, so the model meets canvases that a text fills to the last token: without
    them it has never seen a story on a canvas shorter than itself.
    """
    B, L = token_BL.shape
    chosen_B, from_start_B = rng.random(B) < rate, rng.random(B) < 0.5
    # a window lies within the text, or begins with it where the text is the shorter of the two
    size_B = rng.integers(min(32, L), L + 1, B)
    text_B = (token_BL != mdlm.PAD).sum(1)
    start_B = np.where(from_start_B, 0, (rng.random(B) * (np.maximum(text_B - size_B, 0) + 1)).astype(int))
    # move each window to the front of its row
    source_BL = np.arange(L) + start_B[:, None]
    moved_BL = np.take_along_axis(token_BL, np.minimum(source_BL, L - 1), 1)
    moved_BL = np.where((np.arange(L) < size_B[:, None]) & (source_BL < L), moved_BL, mdlm.PAD)
    return np.where(chosen_B[:, None], moved_BL, token_BL)


class Noised(typing.NamedTuple):
    """A batch and its noise. PAD and BOS are never masked, and do not count as tokens of the text."""

    token_BL: np.ndarray
    xt_BL: np.ndarray  # token_BL with MASK where mask_BL
    mask_BL: np.ndarray
    counted_BL: np.ndarray  # True for the tokens of the text
    time_B: np.ndarray  # noise times in (0, 1]


def noise(token_BL, schedule, rng):
    """Noise a batch at antithetic times, one in each of B strata, in random order."""
    smallest_time = diffusion.time_of_rate(SMALLEST_RATE, schedule)
    time_B = rng.permutation(diffusion.antithetic_times(rng.random(len(token_BL)), smallest_time))
    counted_BL = (token_BL != mdlm.PAD) & (token_BL != mdlm.BOS)
    u_BL = rng.random(token_BL.shape)
    xt_BL, mask_BL = diffusion.q_sample(token_BL, time_B, u_BL, schedule, mdlm.MASK, mdlm.PAD, ~counted_BL)
    return Noised(token_BL, xt_BL, mask_BL, counted_BL, time_B)


def training_batch(rows, cfg, step):
    """The noised rows of step 0, 1, ..., sorted by length, so that micro-batches hold little PAD."""
    rng = np.random.default_rng([cfg.seed, step])
    token_BL = crop(rows.batch(cfg.seed, step, cfg.batch_size)[0].astype(np.int64), cfg.crop_rate, rng)
    token_BL = token_BL[np.argsort((token_BL != mdlm.PAD).sum(1), kind="stable")]
    return noise(token_BL, cfg.schedule, rng)


def loss_inputs(noised, part, device, packed=False):
    """Arguments of Loss for the rows `part` of a batch: cut to the longest of them, or packed without PAD.

    Masked positions are listed, as logits are made there and nowhere else. Both the length of the rows and the number
    of masks are rounded up, so that they take few values: 32 tokens, or 64 in all, and 64 masks, filled up with
    position 0.
    """
    token_BL, xt_BL, mask_BL, _, time_B = (x[part] for x in noised)
    length_B = (token_BL != mdlm.PAD).sum(1)
    if packed:
        xt_BL, token_BL, mask_BL, *layout = pack(xt_BL, token_BL, mask_BL, length_B)
        # the time of each text, and of what fills up
        time_B = np.append(time_B, 1.0)
        row_N = layout[0][np.flatnonzero(mask_BL)]
    else:
        columns = slice(0, -(-int(length_B.max(initial=1)) // 32) * 32)
        token_BL, xt_BL, mask_BL = (np.ascontiguousarray(x[:, columns]) for x in (token_BL, xt_BL, mask_BL))
        layout, row_N = (), np.nonzero(mask_BL)[0]
    # where the masks are in the flattened rows; masked_N is False for what fills up
    index_N = np.flatnonzero(mask_BL)
    masks = len(index_N)
    index_N, row_N = (np.pad(x, (0, -masks % 64 if masks else 64)) for x in (index_N, row_N))
    masked_N = np.arange(len(index_N)) < masks
    # counts of the step, not of the part: the losses of micro-batches add up to that of the step
    counts = (np.asarray(x.sum()) for x in (noised.counted_BL, noised.mask_BL))
    time_B = time_B.astype(np.float32)
    arrays = xt_BL, time_B, index_N, token_BL.ravel()[index_N], time_B[row_N], masked_N, *counts, *layout
    inputs = [torch.from_numpy(x) for x in arrays]
    if device.type == "cuda":  # from pinned memory a copy waits for nobody
        inputs = [x.pin_memory().to(device, non_blocking=True) for x in inputs]
    # length and number of masks differ from call to call: torch.compile must not specialise on them
    torch._dynamo.mark_dynamic(inputs[0], 1)
    for x in (*inputs[2:6], *inputs[8:10]):
        torch._dynamo.mark_dynamic(x, 0)
    return *inputs[:8], mdlm.Packed(*inputs[8:], longest=noised.token_BL.shape[1]) if packed else None


def pack(xt_BL, token_BL, mask_BL, length_B):
    """The three in a row [1, S] without PAD, and text, place and start of mdlm.Packed. S is a multiple of 64.

    A text of PAD fills up, of up to 63 tokens.
    """
    B, filled = len(length_B), -int(length_B.sum()) % 64
    end_B = np.append(length_B, filled).cumsum()
    text_S = np.repeat(np.arange(B + 1), np.append(length_B, filled))
    start_U = np.append(0, end_B).astype(np.int32)
    place_S = np.arange(end_B[-1]) - start_U[text_S]
    seen_BL = np.arange(token_BL.shape[1]) < length_B[:, None]
    rows = (np.append(x[seen_BL], np.full(filled, fill, x.dtype))[None]
            for x, fill in ((xt_BL, mdlm.PAD), (token_BL, mdlm.PAD), (mask_BL, False)))  # fmt: skip
    return *rows, text_S, place_S, start_U


def batches(rows, cfg, first, devices, packed):
    """(step, noised rows, [arguments of Loss for each micro-batch of this process]) of all steps from `first` on.

    A thread makes those of the next step while this one is computed.
    """
    size = cfg.micro_batch * devices.world

    def make(step):
        noised = training_batch(rows, cfg, step)
        # every world-th row is ours: rows are sorted, so all devices get like lengths
        parts = (slice(i + devices.rank, i + size, devices.world) for i in range(0, cfg.batch_size, size))
        return noised, [loss_inputs(noised, part, devices.device, packed) for part in parts]

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(make, first)
        for step in range(first, cfg.steps):
            noised, inputs = ahead.result()
            if step + 1 < cfg.steps:
                ahead = thread.submit(make, step + 1)
            yield step, noised, inputs


# ---- loss and update -----------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """{"nelbo", "masked_ce"} of a part of a step's rows, and {"masked_accuracy"} in evaluation mode.

    counted and masks are the numbers of tokens of the whole step that can be masked, and that are.
    """

    def __init__(self, model, schedule):
        super().__init__()
        self.model, self.schedule = model, schedule
        # Times are drawn from a part of [0, 1]. With this factor a uniform prediction costs log V under any schedule.
        self.span = (1 - diffusion.time_of_rate(SMALLEST_RATE, schedule)) / (1 - SMALLEST_RATE)

    def forward(self, xt_BL, time_B, index_N, token_N, time_N, masked_N, counted, masks, packed=None):
        # states of all positions, logits [N, V] of the masked ones alone: [B, L, V] is never made
        see_BL = None if packed else xt_BL != mdlm.PAD
        hidden_BLD = self.model.hidden(xt_BL, diffusion.mask_rate(time_B, self.schedule), see_BL, packed)
        logits_NV = self.model.logits(hidden_BLD.flatten(0, 1)[index_N])
        nll_N = diffusion.masked_nll(logits_NV, token_N, masked_N, mdlm.MASK)
        # each masked token counts as a sequence of its own, at its row's time
        nelbo = diffusion.nelbo_per_token(nll_N[:, None], time_N, counted, self.schedule)
        scores = {"nelbo": self.span * nelbo, "masked_ce": diffusion.masked_cross_entropy(nll_N, masks)}
        if not self.training:
            accuracy = diffusion.masked_accuracy(logits_NV, token_N, masked_N, mdlm.MASK)
            scores["masked_accuracy"] = accuracy * masked_N.sum() / masks.clamp(min=1)
        return scores


def learning_rate(step, cfg):
    """Of update `step` = 0, 1, ..., as a share of its peak: linear warm-up, then half a cosine down to a tenth."""
    warmup = max(1, min(cfg.warmup, cfg.steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    x = (step - warmup) / max(1, cfg.steps - warmup)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2


def make_optimizers(model, cfg):
    """Muon for the matrices of the blocks, AdamW for all else; decay on matrices and embeddings, none on vectors."""
    muon = {p for p in model.blocks.parameters() if p.ndim == 2 and cfg.optimizer == "muon"}
    rest = [p for p in model.parameters() if p not in muon]
    decayed, vectors = ([p for p in rest if (p.ndim == 1) == vector] for vector in (False, True))
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = [torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)]
    if muon:
        matrices = [p for p in model.parameters() if p in muon]  # a set has no order
        optimizers.append(torch.optim.Muon(matrices, cfg.muon_lr, cfg.weight_decay))
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]  # the peak; the name is that of PyTorch's schedulers
    return optimizers


@torch.no_grad()
def average(ema, model, decay, updates):
    """ema += (1 - d) (model - ema), d = min(decay, (1 + n) / (10 + n)): the beginning is soon forgotten."""
    d = min(decay, (1 + updates) / (10 + updates))
    averages, weights = ([local(p) for p in each.parameters()] for each in (ema, model))
    torch._foreach_lerp_(averages, weights, 1 - d)  # one call for all of them


def local(tensor):
    """This process's part of a tensor that FSDP split."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    """All parts of it together, in every process."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclasses.dataclass
class State:
    """What a step changes, and what it runs."""

    model: mdlm.MDLM
    ema: mdlm.MDLM  # the averaged weights: what is evaluated, and what others load
    loss: nn.Module  # Loss of the model, under DDP where it is
    step_loss: typing.Callable  # the same, compiled
    optimizers: list  # AdamW, and Muon
    scaler: torch.amp.GradScaler  # of float16; does nothing for other types
    autocast: torch.autocast
    packed: bool  # texts stand one behind the other
    skipped_2: torch.Tensor  # updates left out, as the gradient was not finite: in all, and the last ones in a row


def make_state(cfg, architecture, dtype, devices):
    """A new model, the same in all processes, spread over them by DDP or FSDP2."""
    torch.manual_seed(cfg.seed)
    model = mdlm.MDLM(architecture).to(devices.device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    loss = Loss(model, cfg.schedule)
    fsdp = cfg.fsdp and devices.world > 1
    if fsdp:
        split(model, cfg.compile)  # compiles each block; the whole would break at FSDP's hooks
        split(ema, False)
    elif devices.world > 1:
        loss = DistributedDataParallel(loss)
    step_loss = torch.compile(loss) if cfg.compile and not fsdp else loss
    # weights and AdamW's moments are float32; only matmuls run in `dtype`
    scaler = torch.amp.GradScaler(devices.device.type, enabled=dtype == "float16")
    autocast = torch.autocast(devices.device.type, getattr(torch, dtype), enabled=dtype != "float32")
    packed, skipped_2 = not why_padded(devices.device, dtype), torch.zeros(2, device=devices.device)
    return State(model, ema, loss, step_loss, make_optimizers(model, cfg), scaler, autocast, packed, skipped_2)


def why_padded(device, dtype):
    """The reason why texts are not packed without PAD, or an empty string."""
    if device.type != "cuda":
        return "a CPU is faster with padded rows"
    if not mdlm.varlen_attn:
        return f"packed ones need PyTorch 2.10, this is {torch.__version__}"
    if dtype == "float32" or torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs 16 bits and an Ampere GPU or newer"
    return ""


def split(model, compiled):
    """FSDP2: each process holds a part of every weight; a block is whole only while it computes."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for block in model.blocks:
        if compiled:
            block.forward = torch.compile(block.forward)  # FSDP's hooks stay outside
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)  # the default leaves the root whole after evaluation
    for method in ("hidden", "logits"):  # called from outside, not through forward
        register_fsdp_forward_method(model, method)


def gradients(state, inputs, cfg, devices):
    """Accumulate the gradients of a step over its micro-batches; returns this process's part of the loss."""
    loss = torch.zeros((), device=devices.device)
    for i, part in enumerate(inputs, 1):
        # DDP adds up the devices' gradients in the backward pass: once a step, with the last micro-batch
        waits = isinstance(state.loss, DistributedDataParallel) and i < len(inputs)
        with state.autocast, state.loss.no_sync() if waits else contextlib.nullcontext():
            part_loss = state.step_loss(*part)[cfg.loss]
            state.scaler.scale(part_loss * devices.world).backward()  # several devices average their gradients
        loss += part_loss.detach()
    return loss


@torch.no_grad()
def step_or_not(optimizer, left_out):
    """A step that is undone where left_out is 1, on the device; Muon knows no found_inf, as fused AdamW does."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for p in weights:  # as its first step would
        optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        local(p.grad).nan_to_num_(0.0, 0.0, 0.0)
    tensors = [local(x) for p in weights for x in (p, optimizer.state[p]["momentum_buffer"])]
    before = torch._foreach_mul(tensors, 1.0)  # copies, in one launch
    optimizer.step()
    for x, old in zip(tensors, before, strict=True):
        x.lerp_(old, left_out)  # which is exact at 0 and 1


def update(state, step, cfg):
    """One update of weights and averaged weights; returns the gradient's norm.

    Where that is not finite the weights stay: the device sees to it, and the host need not know.
    """
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * learning_rate(step, cfg)
        state.scaler.unscale_(optimizer)
    norm = full(nn.utils.clip_grad_norm_(state.model.parameters(), cfg.clip))
    left_out = (~norm.isfinite()).float()
    adamw, *muon = state.optimizers
    adamw.found_inf = left_out
    adamw.step()
    for optimizer in muon:
        step_or_not(optimizer, left_out)
    average(state.ema, state.model, cfg.ema, step)
    state.skipped_2.add_(left_out)[1].mul_(left_out)  # a finite one ends a row of them
    state.scaler.update()
    state.model.zero_grad(set_to_none=True)
    return norm


def read(state, loss, norm, stop, step, cfg, devices):
    """(loss, gradient norm, updates left out so far, whether to stop) of all processes. Here the host waits.

    Raises ValueError where updates are left out for too long.
    """
    sums_2 = torch.stack([loss, torch.full_like(loss, bool(stop))])
    if devices.world > 1:
        dist.all_reduce(sums_2)
    loss, stop, norm, skipped, in_a_row = torch.cat([sums_2, norm[None], state.skipped_2]).tolist()
    scaled = state.scaler.is_enabled()  # float16 overflows now and then; its scale falls, and it goes on
    if in_a_row and not scaled:
        print(f"step {step + 1}: loss {loss}, gradient norm {norm}; the update is left out", flush=True)
    if in_a_row >= (20 if scaled else 5):
        saved = list(runs.saved_steps(Path(cfg.out))) or "the start"
        advice = f"--resume={cfg.out} with a lower --lr, from {saved}"
        raise ValueError(f"no finite loss in {in_a_row:.0f} steps, the last {step + 1}; {advice}")
    return loss, norm, int(skipped), stop > 0


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def trainer_tensors(state):
    """All that an update depends on, by name: weights, averaged weights, moments and their step counts."""
    tensors = {f"model.{name}": p for name, p in state.model.named_parameters()}
    tensors |= {f"ema.{name}": p for name, p in state.ema.named_parameters()}
    for name, p in state.model.named_parameters():
        for optimizer in state.optimizers:
            tensors |= {f"{key}.{name}": value for key, value in optimizer.state.get(p, {}).items()}
    return tensors


def save(state, step, cfg, meta, tokenizer_json, devices):
    """Write step_<n>/, whole or not at all, and delete all but the newest cfg.keep. One process writes, all gather."""
    tensors = {name: full(t.detach()).cpu().contiguous() for name, t in trainer_tensors(state).items()}
    if devices.rank == 0:
        averaged = {name.removeprefix("ema."): t for name, t in tensors.items() if name.startswith("ema.")}
        trainer = {"step": step, "skipped": int(state.skipped_2[0]), "scaler": state.scaler.state_dict()}
        try:
            with runs.new_folder(Path(cfg.out, f"step_{step}")) as folder:
                # for everybody: what mdlm.load reads
                runs.write(folder / "config.json", {"model_type": "mdlm", **meta["model"]})
                runs.write(folder / "tokenizer.json", tokenizer_json)
                runs.write(folder / "model.safetensors", safetensors.torch.save(averaged))
                # for --resume
                runs.write(folder / "trainer.json", meta | trainer)
                runs.write(folder / "trainer.safetensors", safetensors.torch.save(tensors))
        except OSError as error:
            raise OSError(f"step_{step} was not written ({error}); make room, then --resume={cfg.out}") from None
        for old in list(runs.saved_steps(Path(cfg.out)).values())[: -cfg.keep]:
            shutil.rmtree(old)
    if devices.world > 1:
        dist.barrier()  # torchrun kills all when one leaves


def restore(folder, state, meta):
    """Load a checkpoint into the state; returns its step. Raises ValueError with one line if it does not fit."""
    advice = "delete it to use the one before"
    try:
        trainer = runs.read_json(folder / "trainer.json", "model", "data", "step", "skipped", "scaler")
        tensors = safetensors.torch.load_file(folder / "trainer.safetensors")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} cannot be read ({runs.first_line(error)}); {advice}") from None
    # what the architecture could not be when an older run was saved has its default
    runs.check_same(dataclasses.asdict(mdlm.Config()) | trainer["model"], meta["model"], folder)
    if trainer["data"] != meta["data"]:
        raise ValueError(f"{folder} was trained on other data; pass its --data, or start anew with another --out")
    # moments are made at the first update: a dummy one, all of whose effect is overwritten below
    for p in state.model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in state.optimizers:
        optimizer.step()
    state.model.zero_grad(set_to_none=True)
    ours = trainer_tensors(state)
    shapes = ({name: t.shape for name, t in each.items()} for each in (tensors, ours))
    runs.check_tensors(*shapes, f"{folder} ({advice})")
    with torch.no_grad():
        for name, tensor in ours.items():
            source = tensors[name].to(tensor.device)
            if hasattr(tensor, "full_tensor"):  # each process takes its own part
                source = dist.tensor.distribute_tensor(source, tensor.device_mesh, tensor.placements)
            local(tensor).copy_(local(source))
    if trainer["scaler"]:
        state.scaler.load_state_dict(trainer["scaler"])
    state.skipped_2[0] = trainer["skipped"]
    return trainer["step"]


# ---- evaluation ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(state, heldout, tokenizer, cfg, devices):
    """Bound of the held-out rows by one draw that masks exactly m tokens of n, the same at every call.

    The weight n / m of such a row is that of the linear schedule at t = m / n.
    """
    token_RL = heldout.read(heldout.spread(cfg.eval_rows))[0].astype(np.int64)
    R = len(token_RL)
    rng = np.random.default_rng([cfg.seed, 2**31])  # no training step has this number
    counted_RL = (token_RL != mdlm.PAD) & (token_RL != mdlm.BOS)
    u_R = rng.permutation(diffusion.antithetic_times(rng.random(R), eps=0))
    mask_RL, weight_R = diffusion.mask_exactly(counted_RL, u_R, rng.random(token_RL.shape))
    noised = Noised(token_RL, np.where(mask_RL, mdlm.MASK, token_RL), mask_RL, counted_RL, 1 / weight_R)
    loss, sums = Loss(state.ema, "linear").eval(), collections.Counter()
    for i in range(0, R, cfg.micro_batch):
        with state.autocast:
            scores = loss(*loss_inputs(noised, slice(i, i + cfg.micro_batch), devices.device, state.packed))
        sums.update({name: float(score) for name, score in scores.items()})
    nats = sums.pop("nelbo")
    # bits of all rows over the bytes of their text: comparable between tokenizers
    text_bytes = token_bytes(tokenizer, state.ema.cfg.vocab)[token_RL].sum(dtype=float)
    bits_per_byte = nats * int(counted_RL.sum()) / math.log(2) / text_bytes
    return {"heldout_nats": nats, "perplexity": math.exp(nats), "bits_per_byte": bits_per_byte, **sums}


def sample_text(model, tokenizer, cfg, seq_len, device):
    """A text of up to 128 tokens, the same in all processes."""
    ids = [mdlm.BOS, *tokenizer.encode(cfg.prompt, add_special_tokens=False).ids][:seq_len]
    canvas = torch.full((1, min(seq_len, max(128, len(ids)))), mdlm.MASK, device=device)
    canvas[0, : len(ids)] = torch.tensor(ids)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    token_L = mdlm.sample(model, canvas, mdlm.Sampling(vocab=tokenizer.get_vocab_size()), generator)[0].tolist()
    token_L = token_L[: token_L.index(mdlm.EOS)] if mdlm.EOS in token_L else token_L
    return tokenizer.decode(token_L)


class Speed:
    """Tokens that are not PAD, model FLOPs and seconds of the steps since the last start()."""

    def __init__(self, architecture, devices):
        self.model, self.blocks = architecture, mdlm.count_params(architecture)["blocks"]
        self.peak = devices.world * next((flops for kind, flops in PEAK_FLOPS.items() if kind in devices.name), 0)
        self.start()

    def start(self):
        self.began, self.steps, self.tokens, self.flops = time.perf_counter(), 0, 0, 0

    def add(self, noised):
        """6 FLOPs per weight and token; the head works at the masks alone, attention on pairs of a row's tokens."""
        length_B, model = (noised.token_BL != mdlm.PAD).sum(1), self.model
        self.steps += 1
        self.tokens += int(length_B.sum())
        self.flops += 6 * int(self.blocks * length_B.sum() + model.vocab * model.width * noised.mask_BL.sum())
        self.flops += 12 * model.layers * model.width * int((length_B**2).sum())

    def row(self, steps_left):
        seconds = time.perf_counter() - self.began
        mfu = {"mfu": self.flops / seconds / self.peak} if self.peak else {}
        step_s = seconds / self.steps
        return {"step_ms": 1e3 * step_s, "tok_per_s": self.tokens / seconds, **mfu, "eta_min": steps_left * step_s / 60}


# ---- the run -------------------------------------------------------------------------------------------------------


def resolve(cfg, devices):
    """The settings with what they leave open: micro_batch, eval_every, save_every; and the type of matmuls."""
    if cfg.model not in mdlm.CONFIGS:
        raise ValueError(f"--model={cfg.model}: not one of {', '.join(mdlm.CONFIGS)}")
    for name in ("batch_size", "steps", "log_every", "eval_rows", "keep"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name}={getattr(cfg, name)}: at least 1")
    if cfg.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        advice = "upgrade it (pip install -r requirements-gpu.txt), or train with --optimizer=adamw"
        raise ValueError(f"PyTorch {torch.__version__} has no Muon, 2.9 has; {advice}")
    # on a GPU as many rows at a time as there are; a CPU is fastest with what its caches hold
    cuda, world = devices.device.type == "cuda", devices.world
    share = cfg.batch_size // world
    micro = cfg.micro_batch or (share if cuda else math.gcd(share, 16))
    if cfg.batch_size % world or micro < 1 or share % micro:
        raise ValueError(f"--batch_size={cfg.batch_size} is no multiple of {world} devices times --micro_batch={micro}")
    # a Turing card only emulates bfloat16, and Inductor cannot compile that; a CPU has units for it, or is slower
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else torch.cpu._is_amx_tile_supported()
    dtype = "bfloat16" if bfloat16 else "float16" if cuda else "float32"
    eval_every = cfg.eval_every or max(1, cfg.steps // 10)
    resolved = {"micro_batch": micro, "eval_every": eval_every, "save_every": cfg.save_every or eval_every}
    return dataclasses.replace(cfg, **resolved), cfg.dtype or dtype


def describe(cfg, dtype, architecture, rows, devices):
    compiled = ", compiled; the first step takes about a minute more" if cfg.compile else ""
    print(f"{devices.world} x {devices.name}, {dtype} matmuls on float32 weights{compiled}")
    print(", ".join(f"{part} {n:,}" for part, n in mdlm.count_params(architecture).items()) + " parameters")
    batch = f"{cfg.batch_size} rows of {rows.meta['seq_len']}, {cfg.micro_batch} at a time on a device"
    epochs = f"{cfg.steps * cfg.batch_size / rows.total:.2f} epochs of {rows.total:,} rows"
    print(f"{cfg.steps:,} steps of {batch} = {epochs}", flush=True)
    why = why_padded(devices.device, dtype)
    print(f"rows are padded, PAD is masked: {why}" if why else "texts are packed without PAD", flush=True)


def train(cfg, devices):
    cfg, dtype = resolve(cfg, devices)
    rows, heldout, tokenizer_json = find_data(cfg, mdlm.CONFIGS[cfg.model].positions)
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    asked = {name: getattr(cfg, name) for name in ("tie", "time", "rope", "dropout")}
    asked["vocab"] = rows.meta["vocab_padded"]
    architecture = dataclasses.replace(mdlm.CONFIGS[cfg.model], **asked)
    model_and_train = {"model": dataclasses.asdict(architecture), "train": dataclasses.asdict(cfg)}
    meta = model_and_train | {"data": rows.meta["fingerprint"]}
    describe(cfg, dtype, architecture, rows, devices)
    with runs.Run(cfg, rank=devices.rank) as run:
        state, first = make_state(cfg, architecture, dtype, devices), 0
        if cfg.resume and runs.saved_steps(Path(cfg.resume)):
            first = restore(runs.newest(cfg.resume)[1], state, meta)
        if cfg.resume:
            print(f"resuming {cfg.resume} after step {first}")
        run.begin(first, meta | {"data": str(rows.folder)}, {"tokenizer.json": tokenizer_json})
        speed = Speed(architecture, devices)
        for step, noised, inputs in batches(rows, cfg, first, devices, state.packed):
            # All randomness is a function of (seed, step): a resumed run meets the same rows, noise and dropout.
            torch.manual_seed(cfg.seed + step)
            loss = gradients(state, inputs, cfg, devices)
            norm = update(state, step, cfg)
            speed.add(noised)
            done = step + 1

            # several processes leave together, where they speak to each other
            stop = run.signal if devices.world == 1 else ""
            if done % cfg.log_every == 0 or done == cfg.steps:
                loss, norm, skipped, stop = read(state, loss, norm, run.signal, step, cfg, devices)
                row = {"step": done, "loss": loss, "lr": cfg.lr * learning_rate(step, cfg), "grad_norm": norm}
                run.log(row | speed.row(cfg.steps - done) | {"skipped": skipped})
                speed.start()
            # All processes evaluate and sample, though one would do: FSDP gathers the weights from all of them.
            if done % cfg.eval_every == 0 or done == cfg.steps:
                run.log({"step": done} | evaluate(state, heldout, tokenizer, cfg, devices))
                text = sample_text(state.ema, tokenizer, cfg, rows.meta["seq_len"], devices.device)
                if devices.rank == 0:
                    with open(run.out / "samples.txt", "a") as file:
                        file.write(f"---- step {done}\n{text}\n")
                speed.start()  # the time of an evaluation belongs to no step
            if done % cfg.save_every == 0 or done == cfg.steps or stop:
                save(state, done, cfg, meta, tokenizer_json, devices)
                speed.start()
            if stop:
                run.leave(done)
    print(f"done: {cfg.out}; write with: python generate.py --model=mdlm --ckpt={cfg.out}", flush=True)


def main(cfg):
    """Train with the processes that torchrun started, or alone."""
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
        train(cfg, devices)
    finally:
        if world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
