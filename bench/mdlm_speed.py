"""Training and sampling speed of MDLM: train_gpu.py against a plain PyTorch trainer, sample()
against its model.

    python bench/mdlm_speed.py --data=data/stories        # ten minutes on two cores; keep the machine idle

The plain trainer is what one writes first: eager, softmax attention in the open (and, as a second
baseline, PyTorch's fused attention), logits of every position, the same weights, rows, noise, loss,
AdamW, clipping and average. Its losses must equal ours. Writes bench/results/cpu.json, or
<GPU>.json.
"""

import copy
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from record import record
from torch import nn
from torch.nn import functional as F

import diffusion
import model_mdlm as mdlm
import runs
import train_gpu


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""  # folder of padded rows; "" is train_gpu.py's embedded default
    model: str = "small"  # key of CONFIGS in model_mdlm.py
    steps: int = 8  # timed steps of each baseline, and of ours before and after them
    warmup: int = 3  # steps before the clock starts
    batch_size: int = 64  # rows per optimizer step
    micro_batches: tuple[int, ...] = (16, 64)  # those of the baselines to try; the fastest counts
    dtype: str = ""  # type of matmuls of both; "" is what train_gpu.py takes on this device
    lengths: tuple[int, ...] = (64, 128, 256)  # canvases to sample
    sample_steps: tuple[int, ...] = (10, 25, 64)  # numbers of steps in which they are filled


# ---- the plain trainer ---------------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self, cfg, fused):
        super().__init__()
        D = cfg.width
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, cfg.ffn), nn.Linear(cfg.ffn, D)
        self.heads, self.fused = cfg.heads, fused

    def forward(self, h, see):
        B, L, D = h.shape
        q, k, v = self.qkv(self.norm1(h)).chunk(3, -1)
        q, k, v = (x.view(B, L, self.heads, -1).transpose(1, 2) for x in (q, k, v))
        if self.fused:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=see[:, None, None])
        else:
            score = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            o = score.masked_fill(~see[:, None, None], -math.inf).softmax(-1) @ v
        h = h + self.out(o.transpose(1, 2).reshape(B, L, D))
        return h + self.fc2(F.gelu(self.fc1(self.norm2(h))))


class Plain(nn.Module):
    """MDLM with the parameter names of model_mdlm.py."""

    def __init__(self, cfg, fused):
        super().__init__()
        D = cfg.width
        self.embed, self.position = nn.Embedding(cfg.vocab, D), nn.Embedding(cfg.positions, D)
        self.time = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
        self.blocks = nn.ModuleList(PlainBlock(cfg, fused) for _ in range(cfg.layers))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, cfg.vocab, bias=False)

    def forward(self, token, rate):
        half = self.embed.weight.shape[1] // 2
        freq = 10_000 ** (-torch.arange(half, device=token.device) / half)
        angle = 1000 * rate[:, None] * freq
        h = self.embed(token) + self.position.weight[: token.shape[1]]
        h = h + self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, None]
        for block in self.blocks:
            h = block(h, token != mdlm.PAD)
        return self.head(self.norm(h))


def architecture_of(cfg, rows):
    preset = mdlm.CONFIGS[cfg.model]
    positions = max(preset.positions, rows.meta["seq_len"])
    return dataclasses.replace(preset, vocab=rows.meta["vocab_padded"], positions=positions)


def plain_steps(cfg, settings, rows, device, micro, fused):
    """Seconds and losses of cfg.warmup + cfg.steps steps of the plain trainer."""
    # our initial weights, which the seed gives
    architecture = architecture_of(cfg, rows)
    model = Plain(architecture, fused)
    torch.manual_seed(settings.seed)
    model.load_state_dict(mdlm.MDLM(architecture).state_dict())
    model.to(device)
    ema = copy.deepcopy(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8)
    # the type of our matmuls, and as there a scale against the underflow of float16
    autocast = torch.autocast(
        device.type, getattr(torch, cfg.dtype), enabled=cfg.dtype != "float32"
    )
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.dtype == "float16")
    seconds, losses = [], []
    for step in range(cfg.warmup + cfg.steps):
        # our rows and noise, and the weight of each masked token in the loss
        started = time.perf_counter()
        noised = train_gpu.training_batch(rows, settings, step)
        rate_B = diffusion.mask_rate(noised.time_B, settings.schedule)
        counted = train_gpu.is_text(noised.token_BL).sum()
        weight_B = diffusion.nelbo_weight(noised.time_B, settings.schedule) / counted
        weight_BL = np.where(noised.mask_BL, weight_B[:, None], 0)
        x0, xt, rate, weight = map(
            torch.from_numpy, (noised.token_BL, noised.xt_BL, rate_B, weight_BL)
        )
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * train_gpu.learning_rate(step, settings)
        # gradients over micro-batches: logits of every position
        total = 0.0
        for i in range(0, cfg.batch_size, micro):
            part = [x[i : i + micro].to(device) for x in (x0, xt, rate.float(), weight.float())]
            with autocast:
                logits = model(part[1], part[2]).float()
                logits[..., mdlm.MASK] = -math.inf
                nll = -logits.log_softmax(-1).gather(-1, part[0][..., None])[..., 0]
                loss = torch.where(part[3] > 0, part[3] * nll, 0).sum()
            scaler.scale(loss).backward()
            total += loss.item()
        # update of weights and averaged weights
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 1 - min(settings.ema, (1 + step) / (10 + step)))
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(total)
    return seconds[cfg.warmup :], losses


# dense bfloat16 FLOP/s of the data sheets, the longest name first; other devices, and float32,
# report no MFU
PEAK_FLOPS = {
    "H200_NVL": 835e12, "H100_NVL": 835e12, "H100_PCIe": 756e12, "H200": 989e12, "H100": 989e12, "A100": 312e12,
}  # fmt: skip


def flops(noised, architecture):
    """Of a step: 6 per weight and token; the head runs at the masks only, attention on pairs of a
    row's tokens.
    """
    length_B = (noised.token_BL != mdlm.PAD).sum(1)
    weights = mdlm.count_params(architecture)["blocks"] * length_B.sum()
    weights += architecture.vocab * architecture.width * noised.mask_BL.sum()
    return 6 * int(weights) + 12 * architecture.layers * architecture.width * int(
        (length_B**2).sum()
    )


def our_steps(cfg, data):
    """Seconds and losses of the same steps by train_gpu.py, from its own log."""
    with tempfile.TemporaryDirectory() as folder:
        steps = cfg.warmup + cfg.steps
        flags = f"--data={data} --out={folder}/run --model={cfg.model} --steps={steps} --batch_size={cfg.batch_size}"
        flags += " --optimizer=adamw --no-rope"  # as the plain trainer
        command = [
            sys.executable,
            str(ROOT / "train_gpu.py"),
            *flags.split(),
            "--log_every=1",
            f"--dtype={cfg.dtype}",
        ]
        subprocess.run(
            [*command, "--eval_rows=16", "--eval_every=1000"], check=True, stdout=subprocess.DEVNULL
        )
        log = [
            json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()
        ]
    rows = [row for row in log if "loss" in row]
    return [row["step_ms"] / 1e3 for row in rows][cfg.warmup :], [row["loss"] for row in rows]


def bench_training(cfg, file, device):
    data = cfg.data or "data/python-padded"
    asked = {"data": cfg.data, "model": cfg.model, "batch_size": cfg.batch_size, "dtype": cfg.dtype}
    settings = train_gpu.Config(**asked, optimizer="adamw", steps=cfg.warmup + cfg.steps)
    rows, _, _ = train_gpu.find_data(settings)
    ours, losses = our_steps(cfg, data)
    plain = {}
    for fused in (False, True):
        for micro in cfg.micro_batches:
            seconds, plain_losses = plain_steps(cfg, settings, rows, device, micro, fused)
            np.testing.assert_allclose(
                plain_losses, losses, rtol=1e-3 if cfg.dtype == "float32" else 0.05
            )
            plain[fused, micro] = seconds
    half = "" if cfg.dtype == "float32" else f", {cfg.dtype}"
    again, _ = our_steps(cfg, data)  # the machine's speed drifts
    peak = next((flops_s for kind, flops_s in PEAK_FLOPS.items() if kind in file and half), 0)
    architecture = architecture_of(cfg, rows)
    steps = range(cfg.warmup, settings.steps)
    batches = (train_gpu.training_batch(rows, settings, step).token_BL for step in steps)
    tokens = float(np.mean([(token_BL != mdlm.PAD).sum() for token_BL in batches]))
    mean_flops = np.mean(
        [flops(train_gpu.training_batch(rows, settings, step), architecture) for step in steps]
    )
    median, low, high = np.quantile(ours + again, [0.5, 0.1, 0.9]).tolist()
    for fused in (False, True):
        best = min((seconds for key, seconds in plain.items() if key[0] == fused), key=np.median)
        theirs, their_low, their_high = np.quantile(best, [0.5, 0.1, 0.9]).tolist()
        name = "fused attention, else eager" if fused else "eager"
        record(
            file,
            f"mdlm {cfg.model} training: plain PyTorch ({name}) step / our step{half}",
            theirs / median,
            "ratio",
            spread=[their_low / high, their_high / low],
            ours={"step_s": median, "p10": low, "p90": high, "tok_per_s": tokens / median},
            baseline={
                "step_s": theirs,
                "p10": their_low,
                "p90": their_high,
                "tok_per_s": tokens / theirs,
            },
            baseline_micro_batches={
                key[1]: float(np.median(s)) for key, s in plain.items() if key[0] == fused
            },
            mfu=mean_flops / median / peak if peak else None,
        )


# ---- sampling ------------------------------------------------------------------------------------------------------


def bench_sampling(cfg, file, device):
    """Share of sample()'s time that is not the model's. Untrained weights: the time does not depend
    on them.
    """
    torch.manual_seed(0)
    model = mdlm.MDLM(mdlm.CONFIGS[cfg.model]).to(device).eval()
    spent_s = []  # of each call of the model

    def clocked(function):
        def call(*args):
            started = time.perf_counter()
            result = function(*args)
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent_s.append(time.perf_counter() - started)
            return result

        return call

    model.hidden, model.logits = clocked(model.hidden), clocked(model.logits)
    for sampler in ("ancestral", "max_prob"):
        table = []
        for length in cfg.lengths:
            for steps in cfg.sample_steps:
                canvas = torch.full((1, length), mdlm.MASK, device=device)
                canvas[0, 0] = mdlm.BOS
                shares, passes_s = [], []
                for seed in range(6):  # the first one is not counted
                    passes, started = [], time.perf_counter()
                    spent_s.clear()
                    rule, generator = (
                        mdlm.Sampling(sampler, steps=steps),
                        torch.Generator(device).manual_seed(seed),
                    )
                    mdlm.sample(
                        model, canvas, rule, generator, lambda i, x, done=passes: done.append(i)
                    ).tolist()
                    seconds = time.perf_counter() - started
                    shares.append(1 - sum(spent_s) / seconds)
                    passes_s.append(seconds / len(passes))
                row = {"length": length, "steps": steps, "passes": len(passes)}
                row |= {
                    "overhead": float(np.median(shares[1:])),
                    "pass_ms": 1e3 * float(np.median(passes_s[1:])),
                }
                table.append(row)
        worst = max(table, key=lambda row: row["overhead"])
        name = f"mdlm {cfg.model} sampling, {sampler}, top-p 0.95: share of the time outside the model, worst case"
        record(file, name, worst["overhead"], "share", table=table)


def one_dtype(cfg, device):
    """The same settings with the type of matmuls that train_gpu.py takes here, for both
    trainers.
    """
    settings = train_gpu.Config(model=cfg.model, batch_size=cfg.batch_size, dtype=cfg.dtype)
    return dataclasses.replace(cfg, dtype=train_gpu.resolve(settings, train_gpu.Devices(device))[1])


def main(cfg):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cfg = one_dtype(cfg, device)
    file = torch.cuda.get_device_name().replace(" ", "_") if device.type == "cuda" else "cpu"
    bench_sampling(cfg, file, device)
    bench_training(cfg, file, device)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
