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

Letters: B rows of a step, L row length, N masked positions, padded to a multiple of 64.
"""

import contextlib
import copy
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
import typing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import tyro
from torch import nn

import data_prep
import diffusion
import model_mdlm as mdlm


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""  # folder written by data_prep.py with --rows=padded; "" prepares the Python standard library
    out: str = "out/train_gpu"  # run folder
    resume: str = ""  # run folder to go on from, with its settings; "" starts anew
    model: str = "tiny"  # key of CONFIGS in model_mdlm.py
    tie: bool = False  # the head is the embedding
    time: bool = True  # the model is told the noise level
    seq_len: int = 0  # tokens per row; 0: the data's
    batch_size: int = 64  # rows per optimizer step, all devices together
    micro_batch: int = 0  # rows per device at a time; 0: 16 on a CPU, else all
    steps: int = 20_000  # optimizer steps
    lr: float = 3e-4  # peak learning rate
    warmup: int = 1000  # steps of linear warm-up, at most a tenth of the run; then a cosine to a tenth of the peak
    weight_decay: float = 0.1  # on matrices and embeddings only
    clip: float = 1.0  # global gradient norm
    dropout: float = 0.0
    schedule: typing.Literal["linear", "cosine", "cosine_sq"] = "linear"  # noise schedule, see diffusion.py
    loss: typing.Literal["nelbo", "masked_ce"] = "nelbo"  # the bound | the plain mean over masked tokens
    crop_rate: float = 0.25  # share of rows cut to a random length, so that short canvases are known
    ema: float = 0.999  # decay of the averaged weights, less in the beginning; 0: they are the last ones
    dtype: typing.Literal["", "bfloat16", "float16", "float32"] = ""  # of matmuls; weights are float32
    compile: bool = True  # torch.compile; False runs op by op, for debugging
    fsdp: bool = False  # split weights over the devices (FSDP2) instead of copying them (DDP)
    eval_every: int = 0  # steps between evaluations with a sample; 0: ten times a run
    eval_rows: int = 512  # held-out rows at most
    save_every: int = 0  # steps between checkpoints; 0: as eval_every
    keep: int = 2  # newest checkpoints to keep
    log_every: int = 10
    prompt: str = ""  # text that the samples while training begin with
    wandb: str = ""  # project name; "" logs to files alone
    seed: int = 0  # initial weights, row order, crops, noise


# dense bfloat16 FLOP/s of the SXM data sheets; other devices report no MFU
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


# ---- data ----------------------------------------------------------------------------------------------------------


class Rows:
    """Padded rows of one split of a data_prep.py folder; row order is a function of (seed, epoch)."""

    def __init__(self, folder, split):
        self.folder = Path(folder)
        try:
            self.meta = json.loads((self.folder / "meta.json").read_text())
            self.shards = self.meta["splits"][split]["shards"]
            self.first = np.cumsum([0] + [shard["rows"] for shard in self.shards])
        except (OSError, ValueError, KeyError, TypeError):
            sys.exit(f"{folder}/meta.json is damaged; delete the folder and write it again with data_prep.py")
        self.total = int(self.first[-1])
        self.order = functools.lru_cache(2)(self.order)
        self.shard = functools.lru_cache(3)(self.shard)

    def order(self, seed, epoch):
        """All row numbers in the order of this epoch: shards are permuted, then the rows of each."""
        rng = np.random.default_rng([seed, epoch])
        shards = rng.permutation(len(self.shards))
        return np.concatenate([self.first[i] + rng.permutation(self.shards[i]["rows"]) for i in shards])

    def shard(self, i):
        """Tokens of shard i, uint16 [R, L]. Exits when its bytes are not those written."""
        path = self.folder / self.shards[i]["file"]
        try:
            data = path.read_bytes()
        except OSError as error:
            sys.exit(f"{path} cannot be read ({error.strerror}); write it again with data_prep.py")
        if hashlib.sha256(data).hexdigest() != self.shards[i]["sha256"]:
            sys.exit(f"{path} is corrupted: its SHA-256 is not the one in meta.json; run data_prep.py again")
        column = pq.read_table(pa.BufferReader(data), columns=["input_ids"])["input_ids"].combine_chunks()
        return column.values.to_numpy().reshape(len(column), -1).astype(np.uint16)

    def read(self, row_ids):
        """int64 [B, L] of an array of row numbers."""
        shards = np.searchsorted(self.first, row_ids, side="right") - 1
        out = np.zeros((len(row_ids), self.meta["seq_len"]), np.int64)
        for i in np.unique(shards):
            mine = shards == i
            out[mine] = self.shard(int(i))[row_ids[mine] - self.first[i]]
        return out

    def batch(self, seed, step, size):
        """The rows of optimizer step 0, 1, ..."""
        ids, epoch = np.zeros(0, int), step * size // self.total
        start = step * size - epoch * self.total
        while len(ids) < size:  # a step may run over the end of an epoch
            ids = np.concatenate([ids, self.order(seed, epoch)[start:]])
            epoch, start = epoch + 1, 0
        return self.read(ids[:size])


def crop(token_BL, rate, rng):
    """Cut a share `rate` of the rows to a random window of 32 to L tokens, half of these from the row's beginning.

    What follows is PAD, which nobody sees, so the model meets canvases that a text fills to the last token: without
    them it has never seen a story on a canvas shorter than itself.
    """
    B, L = token_BL.shape
    chosen_B, from_start_B = rng.random(B) < rate, rng.random(B) < 0.5
    size_B = rng.integers(min(32, L), L + 1, B)
    text_B = (token_BL != mdlm.PAD).sum(1)
    start_B = np.where(from_start_B, 0, (rng.random(B) * (np.maximum(text_B - size_B, 0) + 1)).astype(int))
    place_BL = np.arange(L) + start_B[:, None]
    moved_BL = np.take_along_axis(token_BL, np.minimum(place_BL, L - 1), 1)
    moved_BL = np.where((np.arange(L) < size_B[:, None]) & (place_BL < L), moved_BL, mdlm.PAD)
    return np.where(chosen_B[:, None], moved_BL, token_BL)


def noise(token_BL, cfg, rng):
    """Noise a batch: dictionary of xt_BL, rate_B = P(masked), counted_BL, and weight_BL of each masked position's nll.

    PAD and BOS are never masked and not counted. Antithetic times, one in each of B strata, in random order.
    """
    time_B = rng.permutation(diffusion.antithetic_times(rng.random(len(token_BL))))
    counted_BL = (token_BL != mdlm.PAD) & (token_BL != mdlm.BOS)
    u_BL = rng.random(token_BL.shape)
    xt_BL, mask_BL = diffusion.q_sample(token_BL, time_B, u_BL, cfg.schedule, mdlm.MASK, mdlm.PAD, ~counted_BL)
    weight_B, count = diffusion.nelbo_weight(time_B, cfg.schedule) / max(counted_BL.sum(), 1), max(mask_BL.sum(), 1)
    weight_B = weight_B if cfg.loss == "nelbo" else np.full(len(time_B), 1 / count)
    rate_B = diffusion.mask_rate(time_B, cfg.schedule)
    return {"xt": xt_BL, "rate": rate_B, "counted": counted_BL, "weight": np.where(mask_BL, weight_B[:, None], 0)}


def masked_places(weight_BL, token_BL):
    """Where the loss is, flat: index_N, token_N, weight_N. Filled up with weight 0 to a multiple of 64, at least 64."""
    index_N = np.flatnonzero(weight_BL)
    fill = -len(index_N) % 64 or 64 * (len(index_N) == 0)
    index_N = np.concatenate([index_N, np.zeros(fill, int)])
    weight_N = weight_BL.ravel()[index_N]
    weight_N[len(index_N) - fill :] = 0
    return index_N, token_BL.ravel()[index_N], weight_N


# ---- loss and update -----------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """Weighted sum of -log p(token) at the masked positions; logits are made there and nowhere else."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, xt_BL, rate_B, index_N, token_N, weight_N):
        hidden_BLD = self.model.hidden(xt_BL, rate_B, xt_BL != mdlm.PAD)
        logits_NV = self.model.logits(hidden_BLD.flatten(0, 1)[index_N])
        masked_N = weight_N > 0
        nll_N = diffusion.masked_nll(logits_NV, token_N, masked_N, mdlm.MASK)
        hits = (masked_N & (logits_NV.detach().argmax(-1) == token_N)).sum()
        return (weight_N * nll_N).sum(), torch.stack([nll_N.detach().sum(), hits, masked_N.sum()])


def learning_rate(step, cfg):
    """Of update `step` = 0, 1, ...: linear warm-up to cfg.lr, then half a cosine down to a tenth of it."""
    warmup = max(1, min(cfg.warmup, cfg.steps // 10))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    x = (step - warmup) / max(1, cfg.steps - warmup)
    return cfg.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2)


def make_optimizer(model, cfg, device):
    """AdamW with decay on matrices and embeddings, none on biases and norms."""
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), eps=1e-8, fused=device.type in ("cuda", "cpu"))


def local(tensor):
    """This process's part of a tensor that FSDP split."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def average(ema, model, decay, updates):
    """ema += (1 - d) (model - ema), d = min(decay, (1 + n) / (10 + n)): the beginning is soon forgotten."""
    d = min(decay, (1 + updates) / (10 + updates))
    pairs = zip(ema.parameters(), model.parameters(), strict=True)
    ours, theirs = zip(*((local(a), local(b)) for a, b in pairs), strict=True)
    torch._foreach_lerp_(ours, theirs, 1 - d)


# ---- checkpoints and logs ------------------------------------------------------------------------------------------


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trainer_tensors(model, ema, optimizer):
    """All that an update depends on, by name: weights, averaged weights, moments and their step counts."""
    tensors = {f"model.{name}": p for name, p in model.named_parameters()}
    tensors |= {f"ema.{name}": p for name, p in ema.named_parameters()}
    for name, p in model.named_parameters():
        tensors |= {f"{key}.{name}": value for key, value in optimizer.state.get(p, {}).items()}
    return tensors


def save(out, step, model, ema, optimizer, meta, tokenizer_json, keep):
    """Gather the tensors from all processes; the first one writes them, the others wait."""
    tensors = {name: full(t.detach()).cpu().contiguous() for name, t in trainer_tensors(model, ema, optimizer).items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        write(out, step, tensors, meta, tokenizer_json, keep)
    if dist.is_initialized():
        dist.barrier()  # torchrun kills all when one leaves


def write(out, step, tensors, meta, tokenizer_json, keep):
    """Write step_<n>/ under a temporary name, then rename it: it is whole or not there. Keeps the newest `keep`."""
    folder, temporary = out / f"step_{step}", out / f"step_{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    weights = {name.removeprefix("ema."): t for name, t in tensors.items() if name.startswith("ema.")}
    config = {"model_type": "mdlm", **meta["model"]}
    files = {
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "tokenizer.json": tokenizer_json,
        "trainer.json": json.dumps(meta | {"step": step}, indent=2).encode(),
        "model.safetensors": safetensors.torch.save(weights),
        "trainer.safetensors": safetensors.torch.save(tensors),
    }
    for name, data in files.items():
        with open(temporary / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    for old in checkpoints(out)[: -max(1, keep)]:
        shutil.rmtree(out / f"step_{old}")


def checkpoints(out):
    """Steps of the finished checkpoints of a run folder, in order."""
    return sorted(int(p.name[5:]) for p in Path(out).glob("step_*") if p.name[5:].isdigit())


def restore(folder, model, ema, optimizer, meta):
    """Load a checkpoint into model, averaged weights and optimizer; returns its trainer.json. Exits if it is unfit."""
    try:
        saved = json.loads((folder / "trainer.json").read_text())
        theirs, ours = saved["model"], meta["model"]
        changed = [f"{k} {theirs.get(k)} there, {ours[k]} here" for k in ours if theirs.get(k) != ours[k]]
        if changed:
            sys.exit(f"{folder} is of another model: {'; '.join(changed)}")
        tensors = safetensors.torch.load_file(folder / "trainer.safetensors")
        if saved["data"] != meta["data"]:
            sys.exit(f"{folder} was trained on other data; pass its --data, or start anew with another --out")
        for p in model.parameters():  # makes the optimizer's state, to be overwritten
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        want = trainer_tensors(model, ema, optimizer)
        mdlm.check(want, tensors, folder)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        sys.exit(f"{folder} cannot be read ({str(error).splitlines()[0][:300]}); delete it to use the one before")
    with torch.no_grad():
        for name, tensor in want.items():
            if hasattr(tensor, "full_tensor"):
                source = torch.distributed.tensor.distribute_tensor(
                    tensors[name].to(tensor.device), tensor.device_mesh, tensor.placements
                )
                tensor.to_local().copy_(source.to_local())
            else:
                tensor.copy_(tensors[name])
    return saved


def log(out, row, tracker=None):
    """Print one row of metrics and append it to <out>/log.jsonl, the source of every plot and table."""
    print(" | ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items()), flush=True)
    with open(Path(out) / "log.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    if tracker:
        tracker.log(row, step=row["step"])


def truncate_log(out, step):
    """Drop the rows that a killed run wrote after its last checkpoint; they will be written again."""
    path = Path(out) / "log.jsonl"
    if path.exists():
        rows = [row for row in path.read_text().splitlines(keepends=True) if row.endswith("}\n")]
        path.with_suffix(".tmp").write_text("".join(row for row in rows if json.loads(row)["step"] <= step))
        os.replace(path.with_suffix(".tmp"), path)


# ---- evaluation ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, rows, tokenizer, cfg, device, autocast):
    """Bound of the held-out rows by one draw that masks exactly m tokens, the same at every call."""
    n, size = min(rows.total, cfg.eval_rows), cfg.micro_batch
    token_RL, rng = rows.read(np.arange(n)), np.random.default_rng([cfg.seed, 2**31])
    counted_RL = (token_RL != mdlm.PAD) & (token_RL != mdlm.BOS)
    u_R = rng.permutation(diffusion.antithetic_times(rng.random(n), eps=0))
    mask_RL, weight_R = diffusion.mask_exactly(counted_RL, u_R, rng.random(token_RL.shape))
    noised = {"xt": np.where(mask_RL, mdlm.MASK, token_RL), "rate": 1 / weight_R}
    noised["weight"] = np.where(mask_RL, weight_R[:, None] / counted_RL.sum(), 0)
    sums = np.zeros(4)
    for i in range(0, n, size):
        part = slice(i, i + size)
        inputs = to_device(token_RL[part], {k: v[part] for k, v in noised.items()}, device)
        with autocast:
            loss, counts = model(*inputs)
        sums += [float(loss), *counts.tolist()]
    nats, ce, hits, masked = sums
    # a token of a byte-level tokenizer is written with a letter a byte
    text_bytes = sum(len(tokenizer.id_to_token(i)) for i in token_RL[token_RL > mdlm.UNK].tolist())
    return {
        "heldout_nats": nats,
        "perplexity": math.exp(nats),
        "bits_per_byte": nats * int(counted_RL.sum()) / math.log(2) / text_bytes,
        "masked_ce": ce / max(masked, 1),
        "masked_accuracy": hits / max(masked, 1),
    }


def to_device(token_BL, noised, device):
    """Inputs of Loss, cut to the longest row. Length and number of masks differ; torch.compile is told so."""
    longest = int((token_BL != mdlm.PAD).sum(1).max(initial=1))
    keep = slice(0, -(-longest // 32) * 32)
    token_BL, xt_BL, weight_BL = (np.ascontiguousarray(x[:, keep]) for x in (token_BL, noised["xt"], noised["weight"]))
    index_N, token_N, weight_N = masked_places(weight_BL, token_BL)
    arrays = xt_BL, noised["rate"].astype(np.float32), index_N, token_N, weight_N.astype(np.float32)
    inputs = [torch.from_numpy(x).to(device, non_blocking=True) for x in arrays]
    torch._dynamo.mark_dynamic(inputs[0], 1)
    for x in inputs[2:]:
        torch._dynamo.mark_dynamic(x, 0)
    return inputs


def sample_text(model, tokenizer, cfg, seq_len, device):
    """A text of up to 128 tokens, the same in all processes."""
    ids = [mdlm.BOS, *tokenizer.encode(cfg.prompt, add_special_tokens=False).ids][:seq_len]
    canvas = torch.full((1, min(seq_len, max(128, len(ids)))), mdlm.MASK, device=device)
    canvas[0, : len(ids)] = torch.tensor(ids)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    token_L = mdlm.sample(model, canvas, mdlm.Sampling(vocab=tokenizer.get_vocab_size()), generator)[0].tolist()
    token_L = token_L[: token_L.index(mdlm.EOS)] if mdlm.EOS in token_L else token_L
    return tokenizer.decode(token_L)


# ---- the run -------------------------------------------------------------------------------------------------------


def find_data(cfg, positions):
    """Train and held-out rows and the tokenizer, prepared first if they are the embedded default."""
    folder = Path(cfg.data or "data/python-padded")
    if not cfg.data and not (folder / "meta.json").exists():
        if dist.is_initialized():
            sys.exit("several processes need the same data: write it with data_prep.py --rows=padded and pass --data")
        print(f"no --data: preparing the Python standard library in {folder}")
        data_prep.main(data_prep.Config(rows="padded", out=str(folder)))
    if not (folder / "meta.json").exists():
        sys.exit(f"{folder} holds no finished data; write it with: python data_prep.py --rows=padded --out={folder}")
    train, heldout = Rows(folder, "train"), Rows(folder, "heldout")
    meta = train.meta
    ids = [meta.get(f"{name}_id") for name in ("pad", "bos", "eos", "mask", "unk")]
    if ids != [mdlm.PAD, mdlm.BOS, mdlm.EOS, mdlm.MASK, mdlm.UNK]:
        sys.exit(f"{folder} is not for a masked diffusion model; prepare it with: python data_prep.py --rows=padded")
    if (cfg.seq_len or meta["seq_len"]) != meta["seq_len"]:
        sys.exit(f"{folder} has rows of {meta['seq_len']} tokens, not {cfg.seq_len}; prepare it again with --seq_len")
    if meta["seq_len"] > positions:
        sys.exit(f"{folder} has rows of {meta['seq_len']} tokens, the model {positions} positions; prepare it again")
    tokenizer = (folder / "tokenizer.json").read_bytes()
    if hashlib.sha256(tokenizer).hexdigest() != meta["tokenizer_sha256"]:
        sys.exit(f"{folder}/tokenizer.json is not the one that made the shards; prepare the data again")
    if not heldout.total:
        sys.exit(f"{folder} holds no held-out rows; prepare it again with --heldout above 0")
    return train, heldout, tokenizer


def main(cfg):
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if rank:
        sys.stdout = open(os.devnull, "w")
    try:
        train(cfg, device, rank, world)
    finally:
        if world > 1:
            dist.destroy_process_group()
    if world > 1:  # DTensor's caches keep gloo's threads alive, and one that wants a closing interpreter aborts it
        os._exit(0)


def train(cfg, device, rank, world):
    if cfg.model not in mdlm.CONFIGS:
        sys.exit(f"--model={cfg.model}: not one of {', '.join(mdlm.CONFIGS)}")
    for name in ("batch_size", "steps", "log_every", "eval_rows", "keep"):
        if getattr(cfg, name) < 1:
            sys.exit(f"--{name}={getattr(cfg, name)}: at least 1")
    rows, heldout, tokenizer_json = find_data(cfg, mdlm.CONFIGS[cfg.model].positions)
    ours = {"vocab": rows.meta["vocab_padded"], "tie": cfg.tie, "time": cfg.time, "dropout": cfg.dropout}
    preset = dataclasses.replace(mdlm.CONFIGS[cfg.model], **ours)
    tokenizer, seq_len = tokenizers.Tokenizer.from_str(tokenizer_json.decode()), rows.meta["seq_len"]
    if cfg.batch_size % world:
        sys.exit(f"--batch_size={cfg.batch_size} does not divide over {world} devices")
    share = cfg.batch_size // world
    micro = cfg.micro_batch or (share if device.type == "cuda" else math.gcd(share, 16))
    if micro < 1 or share % micro:
        sys.exit(f"--micro_batch={micro} does not divide the {share} rows of a device; try a divisor of {share}")
    half = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float16"
    dtype = cfg.dtype or (half if device.type == "cuda" else "float32")
    eval_every = cfg.eval_every or max(1, cfg.steps // 10)
    cfg = dataclasses.replace(cfg, micro_batch=micro, eval_every=eval_every, save_every=cfg.save_every or eval_every)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{world} x {name}, {dtype} matmuls on float32 weights{', compiled' if cfg.compile else ''}")
    seen = cfg.steps * cfg.batch_size
    counts = mdlm.count_params(preset)
    print(", ".join(f"{part} {n:,}" for part, n in counts.items()) + " parameters")
    print(
        f"{cfg.steps:,} steps of {cfg.batch_size} rows of {seq_len} = {seen / rows.total:.2f} epochs of {rows.total:,} "
        f"rows; {share // micro} x {micro} rows a device"
    )

    out = Path(cfg.out)
    if checkpoints(out) and not cfg.resume:
        sys.exit(f"{out} already holds a run: --resume={out} goes on with it, another --out starts anew")
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / f".lock{rank}", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another trainer is writing to {out}; wait for it or choose another --out")

    torch.manual_seed(cfg.seed)
    model = mdlm.MDLM(preset).to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    wrapped = Loss(model)
    fsdp = cfg.fsdp and world > 1
    if fsdp:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for each in (model, ema):
            for block in each.blocks:
                if cfg.compile and each is model:
                    block.forward = torch.compile(block.forward)  # FSDP's hooks stay outside
                fully_shard(block)
            fully_shard(each, reshard_after_forward=True)  # the default leaves the root whole after evaluation
            for method in ("hidden", "logits"):  # called from outside, not through forward
                register_fsdp_forward_method(each, method)
    elif world > 1:
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    optimizer = make_optimizer(model, cfg, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    meta = {"model": dataclasses.asdict(preset), "train": dataclasses.asdict(cfg), "data": rows.meta["fingerprint"]}
    first, skipped, source = 0, 0, Path(cfg.resume)
    if cfg.resume and checkpoints(source):
        saved = restore(source / f"step_{checkpoints(source)[-1]}", model, ema, optimizer, meta)
        first, skipped = saved["step"], saved["skipped"]
        if saved.get("scaler"):
            scaler.load_state_dict(saved["scaler"])
        print(f"resuming {source} after step {first}")
    elif cfg.resume:
        print(f"{source} stopped before its first checkpoint: starting at step 0 with its settings")
    tracker = None
    if rank == 0:
        truncate_log(out, first)
        settings = {"train": meta["train"], "model": meta["model"], "data": str(rows.folder)}
        (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (out / "tokenizer.json").write_bytes(tokenizer_json)
        if cfg.wandb:
            try:
                import wandb
            except ImportError:
                sys.exit("--wandb needs the package wandb: pip install wandb")
            tracker = wandb.init(project=cfg.wandb, config=meta, dir=str(out), id=out.name, resume="allow")

    autocast = contextlib.nullcontext()
    if dtype != "float32":
        autocast = torch.autocast(device.type, getattr(torch, dtype))
    step_loss = torch.compile(wrapped) if cfg.compile and not fsdp else wrapped
    eval_loss = Loss(ema)
    peak = next((flops for kind, flops in PEAK_FLOPS.items() if kind in name), None)
    if cfg.compile:
        print("compiling with the first step, about a minute", flush=True)

    stop = []
    handlers = {s: signal.signal(s, lambda number, _: stop.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    started, since, bad = time.perf_counter(), first, 0
    tokens, flops = 0, 0  # since then; of what is not PAD, and of the head where there are masks
    try:
        for step in range(first, cfg.steps):
            rng = np.random.default_rng([cfg.seed, step])
            token_BL = crop(rows.batch(cfg.seed, step, cfg.batch_size), cfg.crop_rate, rng)
            # micro-batches of like length, so that little of them is PAD
            token_BL = token_BL[np.argsort((token_BL != mdlm.PAD).sum(1), kind="stable")]
            noised = noise(token_BL, cfg, rng)
            length_B, masks = (token_BL != mdlm.PAD).sum(1), (noised["xt"] == mdlm.MASK).sum()
            tokens += int(length_B.sum())
            flops += 6 * int(counts["blocks"] * length_B.sum() + preset.vocab * preset.width * masks)
            flops += 12 * preset.layers * preset.width * int((length_B**2).sum())
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, cfg)
            torch.manual_seed(cfg.seed + step)  # dropout
            loss = torch.zeros((), device=device)
            for i in range(0, cfg.batch_size, micro * world):
                part = slice(i + rank, i + micro * world, world)
                inputs = to_device(token_BL[part], {k: v[part] for k, v in noised.items()}, device)
                last = i + micro * world == cfg.batch_size or world == 1 or fsdp
                with autocast, contextlib.nullcontext() if last else wrapped.no_sync():
                    part_loss, _ = step_loss(*inputs)
                    scaler.scale(part_loss * world).backward()  # several devices average their gradients
                loss += part_loss.detach()
            agreed = torch.stack([loss, torch.full_like(loss, bool(stop))])  # all processes leave after the same step
            if world > 1:
                dist.all_reduce(agreed)
            scaler.unscale_(optimizer)
            norm = float(full(nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)))
            loss, leave = agreed.tolist()
            done, fine = step + 1, math.isfinite(loss) and math.isfinite(norm)
            if fine:
                scaler.step(optimizer)
                average(ema, model, cfg.ema, step)
            elif dtype != "float16":
                print(f"step {done}: loss {loss}, gradient norm {norm}; the update is left out", flush=True)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            bad = 0 if fine else bad + 1
            skipped += not fine
            if bad >= (20 if dtype == "float16" else 5):
                sys.exit(
                    f"no finite loss in {bad} steps, the last {done}; resume from {checkpoints(out)} with a lower --lr"
                )
            if done % cfg.log_every == 0 or done == cfg.steps:
                seconds, steps = time.perf_counter() - started, done - since
                row = {"step": done, "loss": loss, "lr": learning_rate(step, cfg), "grad_norm": norm}
                row |= {"step_ms": 1e3 * seconds / steps, "tok_per_s": tokens / seconds}
                row |= {"mfu": flops / seconds / peak / world} if peak else {}
                row |= {"eta_min": (cfg.steps - done) * seconds / steps / 60}
                if rank == 0:
                    log(out, row | {"skipped": skipped}, tracker)
                started, since, tokens, flops = time.perf_counter(), done, 0, 0
            if done % cfg.eval_every == 0 or done == cfg.steps:
                scores = evaluate(eval_loss, heldout, tokenizer, cfg, device, autocast)
                if rank == 0:
                    log(out, {"step": done, **scores}, tracker)
                sample = sample_text(ema, tokenizer, cfg, seq_len, device)  # by all: FSDP gathers weights for it
                if rank == 0:
                    with open(out / "samples.txt", "a") as file:
                        file.write(f"---- step {done}\n{sample}\n")
            if done % cfg.save_every == 0 or done == cfg.steps or leave:
                state = {"skipped": skipped, "scaler": scaler.state_dict()}
                save(out, done, model, ema, optimizer, meta | state, tokenizer_json, cfg.keep)
            if done % cfg.eval_every == 0 or done % cfg.save_every == 0:  # their time is no step's
                started, since, tokens, flops = time.perf_counter(), done, 0, 0
            if leave:
                why = signal.Signals(stop[0]).name if stop else "another process was asked to stop"
                sys.exit(f"{why}: saved step {done}; go on with --resume={out}")
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)
    if tracker:
        tracker.finish()
    print(f"done: {out}; write with: python generate.py --model=mdlm --ckpt={out}", flush=True)


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
    return Config(**{k: v for k, v in saved.items() if k in known} | {"out": folder})


if __name__ == "__main__":
    try:
        main(
            tyro.cli(Config, default=saved_config(sys.argv), description=__doc__, config=(tyro.conf.FlagConversionOff,))
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"{error}; make room or mend the path, then --resume the run")
