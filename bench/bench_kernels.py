"""The kernels of csrc/ against PyTorch's operators, on a GPU; without one, what the roofline
predicts for a Jetson.

    python setup_kernels.py build_ext --inplace && python bench/bench_kernels.py      # with a GPU: a minute
    python bench/bench_kernels.py                                                     # without one: predictions only
    python bench/bench_kernels.py --sass=sampler --arch=87                            # instructions between branches

With a GPU: errors against float64 first (at most twice those of the plain half operator), then
device time and launches per call from torch.profiler, ours and theirs in turn, median of --rounds.
Theirs: scaled_dot_product_attention from the packed projection with the copies that it takes, add
and layer_norm, add and gelu, and the usual sampling chain. Writes bench/results/<GPU>.json. A
Jetson with CUDA 12 or older lets only root profile: sudo -E env PATH=$PATH python ...

Without a GPU it writes bench/results/jetson_predicted.json, for each kernel and for a whole
denoising step of an Orin Nano: bytes over 80 % of the memory bandwidth or instructions at half an
instruction a cycle and scheduler, whichever takes longer, and the gaps between the nodes of a CUDA
graph. Nothing there is a measurement.

--sass needs nvcc, cuobjdump and nvdisasm; the latter two are on PyPI, too: nvidia-cuda-cuobjdump,
nvidia-cuda-nvdisasm.
"""

import dataclasses
import math
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from record import record
from torch.nn import functional as F

import model_mdlm as mdlm
import runs
import setup_kernels
from csrc import ops


@dataclasses.dataclass(frozen=True)
class Config:
    lengths: tuple[int, ...] = (64, 128, 256)  # canvases, in tokens
    model: str = "small"  # key of CONFIGS in model_mdlm.py: width, heads, vocabulary
    steps: int = 25  # denoising steps of a text, which share its masks in predictions
    calls: int = 50  # calls under one profile
    rounds: int = 5  # profiles of each kernel, of which the median counts
    seed: int = 0  # of the random inputs
    # attention, pointwise or sampler: print its instructions between branches, and nothing else
    sass: str = ""
    arch: str = "87"  # compute capability for which --sass compiles


# bytes/s, dense FP16 FLOP/s
ORIN = {"Orin Nano, 15 W": (68.3e9, 10.2e12), "Orin Nano Super": (102.4e9, 16.7e12)}
CLOCK = {"Orin Nano, 15 W": 625e6, "Orin Nano Super": 1020e6}
PROCESSORS, SCHEDULERS = 8, 4  # multiprocessors of an Orin Nano, schedulers of each
GAP_US = 1.5  # between two nodes of a CUDA graph, assumed


# ---- predictions ---------------------------------------------------------------------------------------------------


def costs(L, cfg, steps):
    """{kernel: (calls a step, bytes, blocks, warps a block, instructions of a warp)} at batch 1.

    Bytes are the formulas of the .cu files, instructions were counted by --sass for sm_87, without
    RoPE and padding.
    """
    # rows filled in a step
    H, D, ffn, V, rows = cfg.heads, cfg.width, cfg.ffn, cfg.vocab, math.ceil(L / steps)
    tiles = math.ceil(L / 64)
    return {
        "attention": (cfg.layers, 8 * L * H * 64, H * tiles, 4, 254 + 422 * tiles),
        "add_norm": (2 * cfg.layers + 1, 8 * L * D, math.ceil(L / 4), 4, 370 * D // 384),
        "bias_gelu": (cfg.layers, 4 * L * ffn, L * math.ceil(ffn / 512), 2, 60 + 139),
        # a race and a look at the likelier ids for top-p, 16 warps of 128 ids at a time
        "sample_": (1, 2 * V * rows, rows, 16, 400 + math.ceil(V / 2048) * (147 + 34)),
    }


def predict_step(L, device, preset, steps):
    """{part: microseconds of a step at batch 1}, and "nodes", the number of its graph's nodes."""
    bandwidth, flops_s = ORIN[device]
    parts = {}
    for kernel, (calls, moved, blocks, warps, instructions) in costs(L, preset, steps).items():
        # warps that share a scheduler
        turns = max(math.ceil(blocks / PROCESSORS) * warps / SCHEDULERS, 1)
        computed_s = turns * instructions / (0.5 * CLOCK[device])
        parts[kernel] = calls * 1e6 * max(moved / (0.8 * bandwidth), computed_s)
    D = preset.width
    weights = preset.layers * (4 * D * D + 2 * D * preset.ffn) + preset.vocab * D
    moved = 2 * (weights + L * preset.vocab)  # and logits are written
    parts["matrix products"] = 1e6 * max(
        moved / (0.8 * bandwidth), 2 * weights * L / (0.5 * flops_s)
    )
    # a block is four products, two norms, attention and GELU; before the first one stand embedding,
    # time, their sum and a norm, after the last one head, sampler and counter
    nodes = 8 * preset.layers + 7
    return parts | {"gaps": GAP_US * nodes}, nodes


def predict(cfg, preset):
    print(
        "PREDICTED microseconds of a step at batch 1, from bytes and instructions; nothing ran on a Jetson"
    )
    rows = []
    for device in ORIN:
        for L in cfg.lengths:
            parts, nodes = predict_step(L, device, preset, cfg.steps)
            ms = sum(parts.values()) / 1e3
            rate = (L - 1) / (cfg.steps * ms / 1e3)
            row = {
                "device": device,
                "length": L,
                "ms_per_step": round(ms, 3),
                "tok_per_s": round(rate),
                "nodes": nodes,
            }
            rows.append(row | {"us": {part: round(us, 1) for part, us in parts.items()}})
            us = ", ".join(f"{part} {us:.0f}" for part, us in parts.items())
            print(f"{device:16} length {L:4}: {ms:.2f} ms a step, {rate:,.0f} tokens/s ({us})")
    record(
        "jetson_predicted", "jetson_kernels_predicted", None, "us, PREDICTED from bytes and instructions, not measured",
        device="none: a prediction for Orin Nano", model=cfg.model, steps=cfg.steps, rows=rows,
    )  # fmt: skip


def print_sass(name, arch):
    """csrc/<name>.cu between branches: first address, number of instructions, how it ends."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = ROOT / f"csrc/{name}.cu", f"{folder}/kernel.cubin"
        flags = [f"-arch=sm_{arch}", "-std=c++17", "-O3", "-cubin", "-o", cubin]
        subprocess.run([setup_kernels.find_nvcc() or "nvcc", *flags, source], check=True)
        listing = subprocess.run(
            ["cuobjdump", "-sass", cubin], check=True, capture_output=True, text=True
        ).stdout
    for function in re.split(r"\n\s+Function : ", listing)[1:]:
        print(function.partition("\n")[0])
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", function)
        targets = set(re.findall(r"\b(?:BRA|BSSY|CALL)\S* .*?0x([0-9a-f]+)", function))
        begin = 0
        for i, (_, text) in enumerate(lines):
            branch = re.search(r"\b(BRA|EXIT|CALL|RET|BSYNC)\b", text)
            if branch or (i + 1 < len(lines) and lines[i + 1][0].lstrip("0") in targets):
                print(f"  {lines[begin][0]} {i + 1 - begin:5}  {text if branch else ''}")
                begin = i + 1


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
    if not on_device:
        raise RuntimeError(
            "the profiler saw no kernel; before CUDA 13 a Jetson lets only root profile, see --help"
        )
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
    """(kernel, ours, theirs, the same in float64 or None) at batch 1, random inputs."""
    H, D, V = cfg.heads, cfg.width, cfg.vocab
    qkv, x, r = (
        torch.randn(*s, device=device).half() for s in ((1, L, 3, H, 64), (1, L, D), (1, L, D))
    )
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

        yield (
            f"sample_ keeping {share:.0%}",
            ours,
            lambda k=share: usual_chain(logits, token, ban, k, 0.9, 50),
            None,
        )


def compare(ours, theirs, exact):
    """([largest error of ours, of theirs], whether ours is at most twice theirs)."""
    errors = [
        (run().double().flatten() - exact.flatten()).abs().max().item() for run in (ours, theirs)
    ]
    return errors, errors[0] <= max(2 * errors[1], 1e-4)


def main(cfg):
    preset = mdlm.CONFIGS[cfg.model]
    if cfg.sass:
        print_sass(cfg.sass, cfg.arch)
        return
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
                raise RuntimeError(
                    f"{kernel} at length {L}: errors of ours and PyTorch's {errors}; not timed"
                )
            # theirs and ours in turn, as a device's clocks drift
            timed = [
                (profiled(theirs, cfg.calls), profiled(ours, cfg.calls)) for _ in range(cfg.rounds)
            ]
            ratios = sorted(a[0] / b[0] for a, b in timed)
            record(
                name.replace(" ", "_"), f"kernel_{cfg.model}_{kernel.replace(' ', '_')}_{L}", statistics.median(ratios),
                "times faster than PyTorch, device time", [ratios[0], ratios[-1]], device=name, errors=errors,
                ours_us=statistics.median(b[0] for _, b in timed), ours_launches=timed[0][1][1],
                theirs_us=statistics.median(a[0] for a, _ in timed), theirs_launches=timed[0][0][1],
            )  # fmt: skip


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
