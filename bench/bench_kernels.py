"""The kernels of csrc/ against PyTorch's operators, on a GPU; without one, what the roofline predicts for a Jetson.

    python setup_kernels.py build_ext --inplace && python bench/bench_kernels.py      # with a GPU: a minute
    python bench/bench_kernels.py                                                     # without one: predictions only

With a GPU: errors against float64 first (at most twice those of the plain half operator), then device time and launches
per call from torch.profiler, ours and theirs in turn, median of --rounds. Theirs: scaled_dot_product_attention from the
packed projection with the copies that it takes, add and layer_norm, add and gelu, and the usual sampling chain. Writes
bench/results/<GPU>.json. Without a GPU it writes bench/results/jetson_predicted.json: bytes of each kernel over the
memory bandwidth of an Orin Nano, flops over half its tensor throughput. Nothing there is a measurement.
"""

import dataclasses
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from record import record
from torch.nn import functional as F

import model_mdlm as mdlm
import runs
from csrc import ops


@dataclasses.dataclass(frozen=True)
class Config:
    lengths: tuple[int, ...] = (64, 128, 256)  # canvases, in tokens
    model: str = "small"  # key of CONFIGS in model_mdlm.py: width, heads, vocabulary
    calls: int = 50  # calls under one profile
    rounds: int = 5  # profiles of each kernel, of which the median counts
    seed: int = 0  # of the random inputs


ORIN = {"Orin Nano, 15 W": (68.3e9, 10.2e12), "Orin Nano Super": (102.4e9, 16.7e12)}  # bytes/s, dense FP16 FLOP/s


# ---- predictions ---------------------------------------------------------------------------------------------------


def costs(L, cfg):
    """{kernel: (bytes, flops)} at batch 1; the formulas of the .cu files."""
    H, D, ffn, V = cfg.heads, cfg.width, cfg.ffn, cfg.vocab
    return {
        "attention": (8 * L * H * 64, 4 * H * L * L * 64),
        "add_norm": (8 * L * D, 8 * L * D),
        "bias_gelu": (4 * L * ffn, 10 * L * ffn),
        "sample_": (2 * V * L, 60 * V * L),  # at most: every row is filled in this step
    }


def predict(cfg, preset):
    print("PREDICTED microseconds: 80 % of the bandwidth, 50 % of the tensor throughput; launches come on top")
    rows = []
    for name, (bandwidth, flops_s) in ORIN.items():
        for L in cfg.lengths:
            for kernel, (moved, flops) in costs(L, preset).items():
                us = 1e6 * max(moved / (0.8 * bandwidth), flops / (0.5 * flops_s) if kernel == "attention" else 0)
                rows.append({"device": name, "length": L, "kernel": kernel, "bytes": moved, "flops": flops, "us": us})
                print(f"{name:16} length {L:4} {kernel:10} {moved / 1e6:7.3f} MB {flops / 1e6:8.1f} MFLOP {us:7.1f}")
    record(
        "jetson_predicted", "jetson_kernels_predicted", None, "us, PREDICTED by the roofline, not measured",
        device="none: a prediction for Orin Nano", model=cfg.model, rows=rows,
    )  # fmt: skip


# ---- measurements --------------------------------------------------------------------------------------------------


def profiled(function, calls):
    """(device microseconds, launches) of one call."""
    for _ in range(3):  # libraries choose kernels in the first calls
        function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    us = sum(getattr(e, "device_time", 0) or getattr(e, "cuda_time", 0) for e in on_device)
    return us / calls, len(on_device) / calls


def usual_chain(logits_RV, token_BL, ban, keep, temperature, top_k):
    """What most samplers do: float, divide, ban, top-k, softmax, draw, keep or fill."""
    logits_RV = logits_RV.float() / temperature
    logits_RV[:, ban.long()] = -torch.inf
    kth_R1 = logits_RV.topk(top_k).values[:, -1:]
    prob_RV = torch.where(logits_RV < kth_R1, -torch.inf, logits_RV).softmax(-1)
    drawn_BL = torch.multinomial(prob_RV, 1).view(token_BL.shape)
    fill_BL = (token_BL == mdlm.MASK) & (torch.rand(token_BL.shape, device=token_BL.device) >= keep)
    return torch.where(fill_BL, drawn_BL, token_BL)


def pairs(L, cfg, unmask=torch.ops.unmask, device="cuda"):
    """(kernel, ours, theirs, the same in float64 of the inputs or None) at batch 1, random inputs."""
    H, D, V = cfg.heads, cfg.width, cfg.vocab
    qkv, x, r = (torch.randn(*s, device=device).half() for s in ((1, L, 3, H, 64), (1, L, D), (1, L, D)))
    y, bias = (torch.randn(*s, device=device).half() for s in ((1, L, cfg.ffn), (cfg.ffn,)))
    gamma, beta = torch.ones_like(x[0, 0]), torch.zeros_like(x[0, 0])
    yield ("attention", lambda: unmask.attention(qkv), lambda: ops.attention_torch(qkv).contiguous(),
           ops.attention_torch(qkv.double()))  # fmt: skip
    yield ("add_norm", lambda: unmask.add_norm(x, r, gamma, beta, 1e-5)[1],
           lambda: F.layer_norm(x + r, (D,), gamma, beta), F.layer_norm(x.double() + r.double(), (D,)))  # fmt: skip
    yield ("bias_gelu", lambda: unmask.bias_gelu(y, bias), lambda: F.gelu(y + bias),
           F.gelu(y.double() + bias.double()))  # fmt: skip
    logits = 3 * torch.randn(L, V, device=device).half()
    token, state = torch.full((1, L), mdlm.MASK, device=device), torch.tensor([1, 0], device=device)
    ban = torch.tensor(mdlm.BANNED, dtype=torch.int32, device=device)
    for share in (0.0, 0.9):  # of the masked rows that stay so in this step
        keep = torch.tensor([share], device=device)

        def ours(keep=keep):
            token.fill_(mdlm.MASK)  # one more launch, ours to pay
            unmask.sample_(logits, token, state, keep, ban, mdlm.MASK, V, 0.9, 50, 1.0)
            return token

        yield f"sample_ keeping {share:.0%}", ours, lambda k=share: usual_chain(logits, token, ban, k, 0.9, 50), None


def compare(ours, theirs, exact):
    """([largest error of ours, of theirs], whether ours is at most twice theirs: then it may be timed)."""
    errors = [(run().double().flatten() - exact.flatten()).abs().max().item() for run in (ours, theirs)]
    return errors, errors[0] <= max(2 * errors[1], 1e-4)


def main(cfg):
    preset = mdlm.CONFIGS[cfg.model]
    if not torch.cuda.is_available():
        predict(cfg, preset)
        return
    device = torch.device("cuda")
    if reason := ops.why_not(device):
        raise RuntimeError(reason)
    name = torch.cuda.get_device_name()
    torch.manual_seed(cfg.seed)
    for L in cfg.lengths:
        for kernel, ours, theirs, exact in pairs(L, preset):
            # a kernel is timed when it is as exact as PyTorch's operator in the same type
            errors, as_exact = (None, True) if exact is None else compare(ours, theirs, exact)
            if not as_exact:
                raise RuntimeError(f"{kernel} at length {L}: errors of ours and PyTorch's {errors}; not timed")
            # theirs and ours in turn, as a device's clocks drift
            timed = [(profiled(theirs, cfg.calls), profiled(ours, cfg.calls)) for _ in range(cfg.rounds)]
            ratios = sorted(a[0] / b[0] for a, b in timed)
            record(
                name.replace(" ", "_"), f"kernel_{kernel.replace(' ', '_')}_{L}", statistics.median(ratios),
                "times faster than PyTorch, device time", [ratios[0], ratios[-1]], device=name, errors=errors,
                ours_us=statistics.median(b[0] for _, b in timed), ours_launches=timed[0][1][1],
                theirs_us=statistics.median(a[0] for a, _ in timed), theirs_launches=timed[0][0][1],
            )  # fmt: skip


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
