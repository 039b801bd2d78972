"""Generation with inference_jetson.py: the speed of a bundle, or a contest with eager TorchScript
and a plain loop.

    python bench/bench_jetson.py --bundle=out/jetson --lengths 64 128 --steps_list 10 25    # this bundle on this device
    python bench/bench_jetson.py      # the contest, two minutes on two cores
    python bench/bench_jetson.py --model=tiny --rounds=3

--bundle times canvases of masks, all steps included, three samples of warm-up excluded: tokens/s,
memory bandwidth and peak memory, and on a Jetson millijoules a token by tegrastats. Writes --out,
by default benchmark.json in the bundle.

The contest runs on random weights of a preset, which cost what trained ones cost. With a GPU: ours
(kernels and CUDA graph), ours with the fused sampler alone, eager FP16 TorchScript and, if there is
Triton, torch.compile( mode="reduce-overhead") in the loop of model_mdlm.py; writes
bench/results/<GPU>.json. On a CPU: inference_jetson.py's fill and mdlm.sample of a model that
mdlm.load read, in turn; then the operators of a step that a GPU would launch and the bytes that
they touch, counted by running them, and from these times PREDICTED for an Orin Nano; writes
bench/results/cpu.json and jetson_predicted.json.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import tokenizers
import torch
from bench_kernels import ORIN, usual_chain
from record import cpu_name, record
from torch.utils._python_dispatch import TorchDispatchMode

import export_jetson
import inference_jetson as jetson
import model_mdlm as mdlm
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    bundle: str = ""  # bundle, run folder or checkpoint to time; default: the contest
    backend: str = "auto"  # of inference_jetson.py, for --bundle; so are device, sampler and graph
    device: str = ""  # cpu or cuda; default: cuda if there is one
    sampler: str = "ancestral"  # or max_prob, margin, entropy
    graph: bool = True  # capture the steps as a CUDA graph
    steps_list: tuple[int, ...] = (10, 25)  # denoising steps, for --bundle
    batches: tuple[int, ...] = (1,)  # batch sizes, for --bundle
    # timed samples of each size, at least; on a GPU three seconds of them; for --bundle
    repeats: int = 10
    out: str = ""  # JSON file, for --bundle; default: benchmark.json in the bundle
    lengths: tuple[int, ...] = (64, 128)  # canvases, in tokens
    model: str = "small"  # preset of the contest, see CONFIGS in model_mdlm.py
    rope: bool = False  # rotary positions instead of learned ones, in the contest
    steps: int = 25  # denoising steps, in the contest
    rounds: int = 7  # timed samples of each contestant, in turn
    # assumed for an eager operator on the Jetson's CPU; enters predictions alone
    dispatch_us: float = 25.0


# ---- the speed of a bundle -----------------------------------------------------------------------------------------


def first_line_of(*command):
    """First line of a command's output, or "" if there is no such command."""
    if not shutil.which(command[0]):
        return ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        line = process.stdout.readline().strip()
        process.kill()  # tegrastats goes on for ever
    return line


def rail_mw(line):
    """{rail: milliwatts now} of a line of tegrastats: "VDD_IN 4761mW/4778mW" is now/mean."""
    return {rail: int(mw) for rail, mw in re.findall(r"\b(VDD_IN|VDD_CPU_GPU_CV) (\d+)mW", line)}


@contextlib.contextmanager
def mean_power():
    """A dict, filled at the end: each rail's mean milliwatts by tegrastats; empty without it."""
    mean_mw = {}
    if not shutil.which("tegrastats"):
        yield mean_mw
        return
    # beyond what a pipe holds, half a minute, its lines are lost
    command = "tegrastats", "--interval", "200"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield mean_mw
        finally:
            process.terminate()
        lines = [rail_mw(line) for line in process.stdout]
    for rail in {rail for line in lines for rail in line}:
        mean_mw[rail] = statistics.mean(line[rail] for line in lines if rail in line)


def device_state(device):
    """Name, power mode and clocks, as far as this machine tells them."""
    named = first_line_of("grep", "-m1", "model name", "/proc/cpuinfo")
    cpu = named.split(": ")[-1] or platform.machine()
    state = {"name": cpu, "cores": os.cpu_count(), "torch": torch.__version__}
    state["board"] = first_line_of("cat", "/proc/device-tree/model").strip("\0")
    if device.type == "cuda":
        state["name"] = torch.cuda.get_device_name(device)
        query = "--query-gpu=clocks.sm,clocks.mem,power.limit"
        state["clocks"] = first_line_of("nvidia-smi", query, "--format=csv,noheader")
    state["power_mode"] = first_line_of("nvpmodel", "-q")
    state["tegrastats"] = first_line_of("tegrastats", "--interval", "500")
    return {name: value for name, value in state.items() if value}


# GB/s of the data sheets, by what /proc/device-tree/model says
BANDWIDTH = {"AGX Thor": 273.0, "AGX Orin": 204.8, "Orin NX": 102.4, "Orin Nano": 68.3}


def peak_gb_s(device, state):
    """Memory bandwidth of the data sheet, or of the driver's clock and bus width; 0 if unknown."""
    if device.type != "cuda":
        return 0.0
    for name, gb_s in BANDWIDTH.items():
        if name in state.get("board", ""):
            # the memory of an Orin Nano runs faster at 25 W and MAXN than at 15 W
            fast = name == "Orin Nano" and re.search("MAXN|25W", state.get("power_mode", ""))
            return 102.4 if fast else gb_s
    properties = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    return 2e-6 * clock_khz * bus_bits / 8


def bytes_per_step(model, B, L, size):
    """Least bytes of a step of `size` bytes a number: weights once, logits written and read."""
    weights = sum(
        p.numel() for name, p in model.named_parameters() if name.startswith(("blocks", "norm"))
    )
    return size * (weights + model.cfg.vocab * model.cfg.width + 2 * B * L * model.cfg.vocab)


def time_bundle(cfg):
    """Time all sizes of canvases. Prints a table and writes it as JSON; tokens are those filled."""
    if min((*cfg.steps_list, *cfg.batches, cfg.repeats)) < 1 or min(cfg.lengths) < 2:
        raise ValueError("--lengths at least 2; --steps_list, --batches and --repeats at least 1")
    names = "bundle", "backend", "device", "sampler", "graph"
    settings = jetson.check(jetson.Config(**{name: getattr(cfg, name) for name in names}))
    writer = jetson.Writer(settings)
    device, cuda = writer.device, writer.device.type == "cuda"
    state = device_state(device)
    peak, rows = peak_gb_s(device, state), []
    print(json.dumps(state))
    print("length  steps  batch    tokens/s   ms/step   GB/s  of peak  memory MB")
    for L, steps, B in itertools.product(cfg.lengths, cfg.steps_list, cfg.batches):
        token_BL = canvas(L).expand(B, -1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        # three samples of warm-up: the first captures the steps
        seconds, rule = [], dataclasses.replace(writer.rule(settings), steps=steps)
        for _ in range(3):
            writer.fill(token_BL, rule)
        with mean_power() as mean_mw:
            # tegrastats reports five times a second
            while len(seconds) < cfg.repeats or (cuda and sum(seconds) < 3):
                started = time.perf_counter()
                writer.fill(token_BL, rule)
                seconds.append(time.perf_counter() - started)
        graph = any(denoiser.graph for denoiser in writer.denoisers.values())
        writer.denoisers.clear()  # their buffers are not part of the next row's memory
        # speed, and the share of the memory's bandwidth that it needs at least
        median = statistics.median(seconds)
        rates = np.percentile([B * (L - 1) / s for s in seconds], [10, 90])
        moved = bytes_per_step(writer.model, B, L, 2 if cuda else 4) * steps / median / 1e9
        host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = torch.cuda.max_memory_allocated() if cuda else host_bytes
        row = {
            "length": L, "steps": steps, "batch": B, "tok_per_s": B * (L - 1) / median, "spread": rates.tolist(),
            "ms_per_step": 1e3 * median / steps, "gb_s": moved, "peak_gb_s": peak or None, "memory_mb": memory / 1e6,
            "graph": graph, "mj_per_token": {rail: mw * median / (B * (L - 1)) for rail, mw in mean_mw.items()},
        }  # fmt: skip
        rows.append(row)
        share = f"{moved / peak:8.0%}" if peak else "        "
        print(f"{L:6} {steps:6} {B:6} {row['tok_per_s']:11,.0f} {row['ms_per_step']:9.3f} {moved:6.1f} {share} "
              f"{row['memory_mb']:10,.0f}", flush=True)  # fmt: skip
        if row["mj_per_token"]:  # all that the board draws, idle power included
            spent = ", ".join(f"{r} {mj:.3g}" for r, mj in row["mj_per_token"].items())
            print("  millijoules a token:", spent)
    sampler = "sort" if writer.sample_ is jetson.sample_sorted_ else "fused"
    sampler = sampler if writer.captures else "loop of model_mdlm.py"
    about = {"backend": writer.backend, "sampler": sampler}
    # clocks fall when a board gets hot
    about |= {"device": state, "device_after": device_state(device), "rows": rows}
    out = Path(cfg.out or writer.folder / "benchmark.json")
    out.write_text(json.dumps(about, indent=2) + "\n")
    print(f"wrote {out}")


# ---- the contest ---------------------------------------------------------------------------------------------------


def make_bundle(folder, preset):
    """A bundle of random weights, the tokenizer one token an id."""
    torch.manual_seed(0)
    vocab = {f"t{i}": i for i in range(preset.vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t4"))
    mdlm.save(mdlm.MDLM(preset), folder / "run", tokenizer.to_str().encode())
    export_jetson.main(
        export_jetson.Config(ckpt=str(folder / "run"), out=str(folder / "bundle"), onnx=False)
    )
    return folder / "bundle"


def canvas(L):
    return torch.tensor([[mdlm.BOS] + [mdlm.MASK] * (L - 1)])


def contest(contestants, token_BL, rounds):
    """{name: [seconds of a sample]}, in turn, every other round backwards, after two that are not
    counted.

    On a CPU with one thread, and of the processor, so that other programs disturb little.
    """
    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time
    seconds = {name: [] for name in contestants}
    for i in range(rounds + 2):
        for name, fill in list(contestants.items())[:: 1 - 2 * (i % 2)]:
            if cuda:
                torch.cuda.synchronize()
            started = clock()
            fill(token_BL).cpu()
            if i >= 2:
                seconds[name].append(clock() - started)
    return seconds


def report(file, name, seconds, ours, L, device, **more):
    """One entry: the others' median over ours, with the spread of the rounds' ratios."""
    for other, times in seconds.items():
        if other != ours:
            ratios = sorted(a / b for a, b in zip(times, seconds[ours], strict=True))
            rates = {n: (L - 1) / statistics.median(t) for n, t in seconds.items()}
            record(file, f"{name}_{L}_{other}", statistics.median(ratios), f"times the time of {ours}",
                   [ratios[0], ratios[-1]], device=device, tok_per_s=rates, **more)  # fmt: skip


def own_loop(model, cfg, device):
    """fill(token_BL) by mdlm.sample, with the rule that inference_jetson.py has by default."""
    names = "sampler", "schedule", "temperature", "top_k", "top_p"
    default = {name: getattr(jetson.Config, name) for name in names}
    rule = mdlm.Sampling(steps=cfg.steps, vocab=mdlm.CONFIGS[cfg.model].vocab, **default)
    generator = torch.Generator(device).manual_seed(0)
    return lambda token_BL: mdlm.sample(model, token_BL.to(device), rule, generator)


# ---- operators of a step, counted ----------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Operators that launch a GPU kernel (no views or empty tensors), and the bytes they touch."""

    def __init__(self):
        super().__init__()
        self.launches, self.bytes = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        in_tree = torch.utils._pytree.tree_leaves
        leaves = [t for t in in_tree((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in in_tree(out) if isinstance(t, torch.Tensor)]
        # a view shares the storage of an argument and launches nothing
        shared = {t.untyped_storage().data_ptr() for t in leaves}
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in shared]
        writes = "(a!)" in str(function._schema)
        if (fresh or writes) and not function.__name__.startswith(
            ("empty", "new_empty", "lift", "detach")
        ):
            self.launches += 1
            # a lookup reads the rows that it returns, all else reads its arguments whole
            lookup = function.__name__.startswith(("embedding", "index_select", "gather"))
            read = sum(t.nbytes for t in fresh) if lookup else sum(t.nbytes for t in leaves)
            self.bytes += read + sum(t.nbytes for t in fresh)
        return out


@torch.inference_mode()
def count_steps(model, L, vocab):
    """{"usual": (launches, bytes), "ours": ...} of one step in the middle of the way, in halves."""
    model, token_BL = model.half(), canvas(L)
    ban, state = torch.tensor(mdlm.BANNED, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    see_BL, rate_N = token_BL != mdlm.PAD, torch.linspace(1, 0.04, 25)
    # the model as it stands, and what most samplers do
    with Count() as usual:
        logits_RV = model(token_BL, rate_N[12].expand(1), see_BL)[0]
        usual_chain(logits_RV, token_BL, ban, 0.9, 1.0, 50)
    # ours: fused operators, one sampling kernel, one step counter
    forward = jetson.fused_forward(model, rate_N, torch.ops.unmask)
    with Count() as ours:
        logits_RV = forward(token_BL, see_BL, state[1:]).flatten(0, 1)
        torch.ops.unmask.sample_(
            logits_RV, token_BL, state, rate_N, ban, mdlm.MASK, vocab, 1.0, 50, 1.0
        )
        state[1:].add_(1)
    return {"usual": (usual.launches, usual.bytes), "ours": (ours.launches, ours.bytes)}


def predict(cfg, model, preset):
    print(
        "COUNTED launches and bytes of one step at batch 1; times are PREDICTED, nothing ran on a Jetson"
    )
    weights = sum(
        p.numel() for name, p in model.named_parameters() if name.startswith(("blocks", "norm"))
    )
    weights += preset.vocab * preset.width
    rows = []
    for L in cfg.lengths:
        flops = 2 * weights * L + 4 * preset.layers * preset.width * L * L
        for way, (launches, moved) in count_steps(model, L, preset.vocab).items():
            for device, (bandwidth, flops_s) in ORIN.items():
                # 80 % of the bandwidth or 50 % of the throughput; eager operators also wait for the
                # CPU
                busy_ms = 1e3 * max(moved / (0.8 * bandwidth), flops / (0.5 * flops_s))
                step_ms = (
                    max(busy_ms, launches * cfg.dispatch_us / 1e3) if way == "usual" else busy_ms
                )
                row = {"length": L, "way": way, "device": device}
                row |= {"launches": launches, "mb": moved / 1e6}
                row |= {"gflop": flops / 1e9, "predicted_step_ms": step_ms}
                rows.append(row | {"predicted_tok_per_s": (L - 1) / (cfg.steps * step_ms / 1e3)})
                rate = rows[-1]["predicted_tok_per_s"]
                print(f"length {L:4} {way:5} {device:16} {launches:4} launches {moved / 1e6:7.1f} MB "
                      f"predicted {step_ms:6.2f} ms a step, {rate:8,.0f} tokens/s")  # fmt: skip
    record(
        "jetson_predicted", f"jetson_{cfg.model}_predicted", None, "ms, PREDICTED from counts, not measured",
        device="none: a prediction for Orin Nano", steps=cfg.steps, rows=rows, assumed_dispatch_us=cfg.dispatch_us,
    )  # fmt: skip


# ---- main ----------------------------------------------------------------------------------------------------------


def main(cfg):
    if cfg.bundle:
        time_bundle(cfg)
        return
    preset = dataclasses.replace(mdlm.CONFIGS[cfg.model], rope=cfg.rope)
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(Path(folder), preset)

        def writer(**settings):
            made = jetson.Writer(jetson.Config(bundle=str(bundle), **settings))
            return lambda token_BL: made.fill(
                token_BL, dataclasses.replace(made.rule(made.cfg), steps=cfg.steps)
            )

        dtype = torch.float16 if cuda else torch.float32
        model = mdlm.load(Path(folder) / "run", "cuda" if cuda else "cpu", dtype)
        if cuda:
            script = torch.jit.load(str(bundle / "model_jetson.pt"), map_location="cuda")
            contestants = {
                "kernels_graph": writer(backend="kernels"),
                "torch_graph": writer(backend="torch"),
                "eager_torchscript": own_loop(jetson.as_model(script), cfg, "cuda"),
            }
            if importlib.util.find_spec("triton"):
                compiled = torch.compile(export_jetson.Exported(model), mode="reduce-overhead")
                contestants["compiled"] = own_loop(jetson.as_model(compiled), cfg, "cuda")
            else:
                print(
                    "compiled: left out, as torch.compile needs Triton, which JetPack's wheels come without"
                )
            device = torch.cuda.get_device_name()
            file = device.replace(" ", "_")
        else:
            contestants = {"ours": writer(), "own_loop": own_loop(model, cfg, "cpu")}
            file, device = "cpu", f"{cpu_name()}, one thread, processor seconds"
        for L in cfg.lengths:
            seconds = contest(contestants, canvas(L), cfg.rounds)
            first = next(iter(contestants))
            report(file, f"jetson_{cfg.model}", seconds, first, L, device, steps=cfg.steps)
        if not cuda:
            predict(cfg, model, preset)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
