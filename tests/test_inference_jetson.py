"""MDLM's runtime on a CPU: fused step against the model, emulated kernels in the loop, command
line, bad bundles.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diffusion
import export_jetson
import inference_jetson as jetson
import model_mdlm as mdlm
from csrc import ops

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SMALL = mdlm.Config(vocab=300, width=128, layers=2, heads=2, ffn=256, positions=48)


def tokenizer_json():
    """A byte-level tokenizer with the five special tokens and a few merges."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special = "<pad> <bos> <eos> <mask> <unk>".split()
    texts = ["once upon a time there was a dragon"] * 3
    tokenizer.train_from_iterator(texts, 290, 2, False, special)
    return tokenizer.to_str().encode()


def make_model(**changes):
    torch.manual_seed(0)
    model = mdlm.MDLM(dataclasses.replace(SMALL, **changes)).eval()
    for name, weight in model.named_parameters():
        if name == "time.2.weight" or name.endswith("bias"):
            torch.nn.init.normal_(weight, 0, 0.1)  # zeros would hide a mistake
    return model


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    mdlm.save(make_model(rope=True), folder / "run/step_7", tokenizer_json())
    settings = {"ckpt": str(folder / "run"), "out": str(folder / "jetson"), "onnx": False}
    export_jetson.main(export_jetson.Config(**settings))
    return folder / "jetson"


def writer(bundle, **settings):
    return jetson.Writer(jetson.Config(bundle=str(bundle), **settings))


def rule(made, steps=3, **settings):
    return dataclasses.replace(made.rule(made.cfg), steps=steps, **settings)


def stops(match, function, *arguments, **settings):
    """A refusal in one line; returns it."""
    with pytest.raises((ValueError, OSError), match=match) as stop:
        function(*arguments, **settings)
    assert "\n" not in str(stop.value)
    return str(stop.value)


def filled_where_masked(filled_BL, token_BL):
    """Masks are filled with ids that may be drawn, and nothing else has changed."""
    masked_BL = token_BL == mdlm.MASK
    assert torch.equal(filled_BL[~masked_BL], token_BL[~masked_BL])
    assert not torch.isin(filled_BL[masked_BL], torch.tensor(mdlm.BANNED)).any()
    assert (filled_BL < 290).all()


def canvases(cfg, B=2, L=33):
    token_BL = torch.randint(5, cfg.vocab, (B, L), generator=torch.Generator().manual_seed(1))
    token_BL[:, 0], token_BL[:, 3:-3] = mdlm.BOS, mdlm.MASK
    token_BL[-1, -5:] = mdlm.PAD
    return token_BL


# ---- the fused step ------------------------------------------------------------------------------


SHAPES = {}, {"tie": True}, {"heads": 4}, {"rope": True}, {"rope": True, "heads": 4}


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@torch.inference_mode()
def test_fused_forward_is_the_model(changes):
    model, rate_N = make_model(**changes), torch.linspace(1, 0.1, 5)
    token_BL = canvases(model.cfg)
    see_BL = token_BL != mdlm.PAD
    for kernels in (jetson.PLAIN, torch.ops.unmask):
        forward = jetson.fused_forward(model, rate_N, kernels)
        for step in (0, 3):
            got = forward(token_BL, see_BL, torch.tensor([step]))
            want = model(token_BL, rate_N[step].expand(2), see_BL)
            torch.testing.assert_close(got[see_BL], want[see_BL], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rope", [True, pytest.param(False, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_fused_forward_on_kernels_is_as_exact_as_the_half_model(runs, rope):
    model = make_model(rope=rope).to(runs.device)
    rate_N = torch.linspace(1, 0.1, 5, device=runs.device)
    token_BL, step_1 = canvases(model.cfg).to(runs.device), torch.tensor([2], device=runs.device)
    see_BL, rate_B = token_BL != mdlm.PAD, rate_N[2].expand(2)
    exact = model.double()(token_BL, rate_B.double(), see_BL)[see_BL]
    half = model.half()
    plain = half(token_BL, rate_B, see_BL)[see_BL]
    kernels = runs if runs.device == "cpu" else torch.ops.unmask
    got = jetson.fused_forward(half, rate_N, kernels)(token_BL, see_BL, step_1)[see_BL]
    assert (got - exact).abs().max() < 2 * (plain - exact).abs().max()


def by_rule(sample_):
    """A sampler of csrc/ops.py as a Denoiser calls it."""

    def sample_by_rule_(logits_RV, token_BL, state_2, keep_N, ban, rule):
        filters = rule.temperature, rule.top_k, rule.top_p
        sample_(logits_RV, token_BL, state_2, keep_N, ban, mdlm.MASK, rule.vocab, *filters)

    return sample_by_rule_


def denoiser(model, kernels, sample_, token_BL, steps=2, **settings):
    defaults = {"temperature": 0.9, "top_p": 0.9, "schedule": "linear", "vocab": 290}
    rule = mdlm.Sampling(**defaults | settings, steps=steps)
    rate_N, keep_N = mdlm.step_tables(steps, rule.schedule)
    with torch.inference_mode():
        forward = jetson.fused_forward(model, rate_N, kernels)
        made = jetson.Denoiser(forward, sample_, *token_BL.shape, keep_N, rule, CPU)
        return made, made(token_BL, 5)


def test_the_step_over_emulated_kernels_fills_canvases(kernels):
    model, token_BL = make_model().half(), canvases(SMALL)
    made, filled = denoiser(model, kernels, by_rule(kernels.sample_), token_BL)
    filled_where_masked(filled, token_BL)
    with torch.inference_mode():
        assert torch.equal(made(token_BL, 5), filled)
        assert not torch.equal(made(token_BL, 6), filled)
    # the same noise, another sampler
    _, same = denoiser(model, kernels, by_rule(ops.sample_torch_), token_BL)
    assert torch.equal(same, filled)


def test_the_step_over_registered_operators_fills_canvases():
    model, token_BL = make_model(), canvases(SMALL)
    for settings in ({}, {"temperature": 0.0}, {"top_k": 3}):
        for pair in (torch.ops.unmask, jetson.sample_fused_), (jetson.PLAIN, jetson.sample_sorted_):
            filled_where_masked(denoiser(model, *pair, token_BL, **settings)[1], token_BL)


@pytest.mark.parametrize("schedule", [*diffusion.SCHEDULES, "square"])
def test_each_step_fills_its_share(schedule, monkeypatch):
    square = diffusion.Schedule(rate=lambda t: t**2, slope=lambda t: 2 * t)
    monkeypatch.setitem(diffusion.SCHEDULES, "square", square)  # a new schedule is one entry
    N, L = 8, 4000
    rate_N, keep_N = mdlm.step_tables(N, schedule)
    zeros = lambda token, see, step: torch.zeros(*token.shape, 8)  # noqa: E731
    for sample_ in (jetson.sample_fused_, jetson.sample_sorted_):
        made, left = jetson.Denoiser(zeros, sample_, 1, L, keep_N, mdlm.Sampling(vocab=8), CPU), []
        for _ in range(N):
            made.step()
            left.append((made.token_BL == mdlm.MASK).double().mean().item())
        np.testing.assert_allclose(left[:-1], rate_N[1:], atol=4 * math.sqrt(0.25 / L))
        assert left[-1] == 0


def sort(logits, token, rule):
    ban = torch.tensor(mdlm.BANNED, dtype=torch.int32)
    jetson.sample_sorted_(logits, token, torch.tensor([0, 0]), torch.zeros(1), ban, rule)


def test_the_sort_based_sampler_draws_from_the_filtered_softmax():
    logits, R = torch.tensor([2.0, 1.0, 0.0, 5.0, 5.0, 0.5, -1.0, 0.7]), 20_000
    token = torch.full((1, R), mdlm.MASK)
    rule = mdlm.Sampling(vocab=7, temperature=0.8, top_k=3, top_p=0.9)
    sort(logits.repeat(R, 1), token, rule)
    allowed = diffusion.ban(logits[:7], mdlm.BANNED)
    want = diffusion.softmax(diffusion.filter_logits(allowed, 0.8, 3, 0.9))
    share = torch.bincount(token[0], minlength=7)[:7] / R
    assert (share - want).abs().max() < 4 * math.sqrt(0.25 / R)
    assert torch.equal(share == 0, want == 0)


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-60])
def test_a_tiny_temperature_takes_the_argmax(temperature):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 30
    allowed = diffusion.ban(logits[:, :290], mdlm.BANNED)
    for sample_ in (jetson.sample_sorted_, jetson.sample_fused_):
        token, ban = torch.full((1, 50), mdlm.MASK), torch.tensor(mdlm.BANNED, dtype=torch.int32)
        rule = mdlm.Sampling(vocab=290, temperature=temperature, top_k=9, top_p=0.9)
        sample_(logits, token, torch.tensor([0, 0]), torch.zeros(1), ban, rule)
        assert torch.equal(token[0], allowed.argmax(-1))
    model, token_BL = make_model(), canvases(SMALL)
    texts = []
    for t in (0, temperature):
        rule = mdlm.Sampling("entropy", 4, "even", temperature=t, vocab=290)
        texts.append(mdlm.sample(model, token_BL, rule, torch.Generator().manual_seed(0)))
    assert torch.equal(*texts)


def test_the_sort_based_sampler_costs_a_tenth_of_the_bisection(monkeypatch):
    """At 64 x 8,192 logits top-p by bisection is 579 launches and 478 MB."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    from bench_jetson import Count

    logits, token = torch.randn(64, 8192).half(), torch.full((1, 64), mdlm.MASK)
    with Count() as count:
        sort(logits, token, mdlm.Sampling(vocab=8192, top_k=50))
    assert count.launches < 50
    assert count.bytes < 90e6


@pytest.mark.parametrize(
    "sample_", [pytest.param(jetson.sample_sorted_, marks=pytest.mark.slow), jetson.sample_fused_]
)
def test_the_surest_are_those_of_the_models_own_loop(sample_):
    """At temperature 0 nothing is random: the same tokens at the same places after every step."""
    model, token_BL, want, got = make_model(rope=True), canvases(SMALL), [], []
    schedules = "cosine_sq", "even", "linear"
    for sampler, schedule in zip(diffusion.CONFIDENCES, schedules, strict=True):
        rule = mdlm.Sampling(sampler, 4, schedule, temperature=0.0, vocab=290)
        mdlm.sample(model, token_BL, rule, None, lambda i, token_BL: want.append(token_BL))
        settings = {"sampler": sampler, "schedule": schedule, "temperature": 0.0}
        made, _ = denoiser(model, torch.ops.unmask, sample_, token_BL, 4, **settings)
        made(token_BL, 5, lambda i, token_BL: got.append(token_BL))
    assert len(got) == len(want) == 12
    assert all(map(torch.equal, got, want))


class OneDevice(TorchDispatchMode):
    """Meta tensors play the GPU: an operator on both devices is an error, as there; copies between
    them are counted.
    """

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        devices = {t.device.type for t in tensors if t.ndim}  # a number may stay on the CPU
        to = {str(kwargs.get("device", "cpu"))} - {"cpu"}
        if name.startswith(("copy_", "_to_copy")) and len(devices | to) > 1:
            self.copies.append(name)
            if name.startswith("copy_"):
                return args[0]
            return torch.empty_like(args[0], device=kwargs["device"])
        assert len(devices) < 2, f"{name} on {[(t.device.type, tuple(t.shape)) for t in tensors]}"
        return function(*args, **kwargs)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("sampler", ["ancestral", "margin"])
@pytest.mark.parametrize("sample_", [jetson.sample_sorted_, jetson.sample_fused_])
def test_a_text_is_one_copy_to_the_device_and_one_back(sample_, sampler, rope):
    model, meta = make_model(rope=rope).to("meta"), torch.device("meta")
    rate_N, keep_N = (table_N.to("meta") for table_N in mdlm.step_tables(3, "linear"))
    graph = lambda *inputs: export_jetson.Exported(model)(*inputs)  # noqa: E731
    with torch.inference_mode():
        fused = jetson.fused_forward(model, rate_N, torch.ops.unmask)
        for forward in (fused, jetson.graph_forward(graph, rate_N)):
            rule = mdlm.Sampling(sampler, schedule="even", vocab=290)
            made = jetson.Denoiser(forward, sample_, 2, 33, keep_N, rule, meta)
            with OneDevice() as mode:
                assert made(canvases(SMALL), 5).shape == (2, 33)
            assert mode.copies == ["copy_.default"] * 2


# ---- what fails on a device ----------------------------------------------------------------------


def test_every_backend_has_the_fused_sampler_where_it_is_built(bundle, monkeypatch):
    for backend in ("torch", "torchscript"):
        assert writer(bundle, backend=backend).sample_ is jetson.sample_sorted_
    monkeypatch.setattr(jetson, "why_no_sampler", lambda vocab, device: "")
    for backend in ("torch", "torchscript"):
        made = writer(bundle, backend=backend, graph=False)
        assert made.denoiser(1, 32, mdlm.Sampling(steps=3)).sample_ is jetson.sample_fused_
        assert not (made.fill_captured(canvases(SMALL), rule(made)) == mdlm.MASK).any()


def test_a_graph_that_cannot_be_captured_is_one_line_that_says_what_to_do(bundle, monkeypatch):
    Recorded(monkeypatch, most=0, error="operation not permitted\nmore lines")
    made = writer(bundle)
    said = "^CUDA graph: operation not permitted; run with --no-graph, which is slower$"
    stops(said, made.fill_captured, canvases(SMALL), rule(made))


class Recorded:
    """torch.cuda.graph and CUDAGraph of a machine without a GPU: steps are noted, and taken at each
    replay.
    """

    def __init__(self, monkeypatch, most=1000, error="out of memory"):
        self.open, self.replays, take = None, [], jetson.Denoiser.step
        stream = types.SimpleNamespace(wait_stream=lambda other: None)

        class Graph(list):
            def replay(graph):
                self.replays.append(len(graph))
                for denoiser in graph:
                    take(denoiser)

        @contextlib.contextmanager
        def capturing(graph, stream):
            self.open = graph
            yield
            self.open = None
            if len(graph) > most:
                raise RuntimeError(error)

        def step(made):
            take(made) if self.open is None else self.open.append(made)

        monkeypatch.setattr(jetson.Denoiser, "step", step)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capturing)


@pytest.mark.parametrize("sampler", ["ancestral", pytest.param("entropy", marks=pytest.mark.slow)])
def test_a_graph_holds_all_steps_of_a_text(bundle, monkeypatch, capsys, sampler):
    token_BL = canvases(SMALL)
    plain = writer(bundle, graph=False, sampler=sampler)
    want = plain.fill_captured(token_BL, rule(plain, 5))
    recorded = Recorded(monkeypatch)
    made = writer(bundle, sampler=sampler)
    for _ in range(2):
        assert torch.equal(made.fill_captured(token_BL, rule(made, 5)), want)
    assert recorded.replays == [5, 5]
    # what is watched is taken step by step, and so is a text of many steps
    seen = []
    watched = made.fill_captured(token_BL, rule(made, 5), lambda i, token_BL: seen.append(i))
    assert torch.equal(watched, want)
    assert seen == [0, 1, 2, 3, 4]
    assert recorded.replays == [5, 5] + [1] * 5
    # what nobody asked otherwise is one launch
    assert jetson.Config().steps <= jetson.MOST_TOGETHER
    made.fill_captured(token_BL, rule(made, jetson.MOST_TOGETHER + 1))
    assert recorded.replays[7:] == [1] * (jetson.MOST_TOGETHER + 1)
    # where all of them do not fit, one does
    recorded = Recorded(monkeypatch, most=3)
    made = writer(bundle, sampler=sampler)
    assert torch.equal(made.fill_captured(token_BL, rule(made, 5)), want)
    assert recorded.replays == [1] * 5
    assert capsys.readouterr().err == ""


def fake_tensorrt(monkeypatch, runs=True):
    """A module tensorrt whose engines do nothing."""
    yes = lambda *_: True  # noqa: E731
    context = types.SimpleNamespace(set_input_shape=yes, set_tensor_address=yes)
    context.execute_async_v3 = lambda _: runs
    engine = types.SimpleNamespace(
        create_execution_context=lambda: context, get_tensor_shape=lambda name: (1, 64, 300),
        num_io_tensors=2, get_tensor_name=lambda i: ("token", "logits")[i],
    )  # fmt: skip
    runtime = types.SimpleNamespace(deserialize_cuda_engine=lambda data: engine)
    logger = type("Logger", (), {"ERROR": 0, "__init__": lambda self, level: None})
    names = {"__version__": "10.3", "Logger": logger, "Runtime": lambda logger: runtime}
    monkeypatch.setitem(sys.modules, "tensorrt", types.SimpleNamespace(**names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Orin")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))


def test_an_engine_that_did_not_run_is_no_text(monkeypatch):
    built, given = {"version": "10.3", "gpu": "Orin", "length": 64}, (canvases(SMALL), None, None)
    fake_tensorrt(monkeypatch)
    assert jetson.run_tensorrt(b"", built)(*given).shape == (2, 33, 300)
    fake_tensorrt(monkeypatch, runs=False)
    said = r"TensorRT did not run model.trt on \[2, 33\] tokens"
    stops(said, jetson.run_tensorrt(b"", built), *given)


def test_onnx_runs_by_cuda_or_the_cpu_and_nothing_else(monkeypatch):
    names, asked = [f"{name}ExecutionProvider" for name in ("Tensorrt", "CUDA", "CPU")], []
    session = lambda data, providers: asked.append(providers)  # noqa: E731
    fake = types.SimpleNamespace(get_available_providers=lambda: names, InferenceSession=session)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    jetson.run_onnx(b"")
    assert asked == [names[1:]]


def test_a_runtime_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    stops("--backend=onnx needs onnxruntime: pip install onnxruntime", jetson.run_onnx, b"")
    stops("needs JetPack's module: apt install python3", jetson.run_tensorrt, b"", {})


@pytest.fixture
def bench_jetson(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import bench_jetson

    return bench_jetson


def test_the_board_tells_its_memory(bench_jetson):
    reference = "Engineering Reference Developer Kit"
    for board, mode, want in (
        (f"Orin Nano {reference} Super", "15W", 68.3),
        (f"Orin Nano {reference} Super", "MAXN_SUPER", 102.4),
        (f"Orin NX {reference}", "15W", 102.4),
        ("AGX Orin Developer Kit", "MAXN", 204.8),
        ("AGX Thor Developer Kit", "MAXN", 273.0),
    ):
        about = {"name": "Orin", "board": f"NVIDIA Jetson {board}"}
        about["power_mode"] = f"NV Power Mode: {mode}"
        assert bench_jetson.peak_gb_s(torch.device("cuda"), about) == want


def test_power_is_read_from_tegrastats(bench_jetson, tmp_path, monkeypatch):
    lines = []  # of tegrastats on an Orin Nano: JetPack 6, 6 under load, 5; two numbers before it
    for row in (ROOT / "tests/tegrastats.txt").read_text().splitlines():
        module, gpu, line = row.split(" ", 2)
        assert bench_jetson.rail_mw(line) == {"VDD_IN": int(module), "VDD_CPU_GPU_CV": int(gpu)}
        lines.append(line)
    agx = "SOC1@40.468C VDD_GPU_SOC 2399mW/2399mW VDD_CPU_CV 400mW/400mW VIN_SYS_5V0 4032mW/4032mW"
    assert bench_jetson.rail_mw(agx) == {}
    with monkeypatch.context() as bare:
        bare.setenv("PATH", str(tmp_path))  # no tegrastats there
        with bench_jetson.mean_power() as none:
            pass
    assert none == {}
    # one that writes two lines and goes on for ever, as the real one
    two = "\n".join(lines[:2])
    script = f"#!/bin/sh\necho '{two}'\ntouch {tmp_path}/wrote\nexec sleep 600\n"
    (tmp_path / "tegrastats").write_text(script)
    (tmp_path / "tegrastats").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with bench_jetson.mean_power() as mean_mw:
        while not (tmp_path / "wrote").exists():
            time.sleep(0.01)
    assert mean_mw == {"VDD_IN": (4761 + 12479) / 2, "VDD_CPU_GPU_CV": (515 + 4667) / 2}


def alone(code, *arguments):
    """The finished process of Python code, where no GPU is seen."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=120)


WITHOUT_JAX = """
import sys
for name in ("jax", "flax", "optax", "orbax", "pyarrow", "huggingface_hub"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.mark.slow
def test_the_tests_of_a_gpu_are_found_without_jax():
    ran = alone(WITHOUT_JAX)
    assert ran.returncode == 0, ran.stdout[-2000:]
    for name in ("writes_what_its_launches_write[kernels]", "borders_of_tiles[gpu-1]"):
        assert name in ran.stdout


@pytest.mark.slow
def test_the_first_hour_skips_what_needs_a_gpu_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import first_hour

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # main() takes SIGTERM
    monkeypatch.setitem(mdlm.CONFIGS, "tiny", SMALL)
    settings = {"model": "tiny", "out": str(tmp_path / "out.json")}
    steps = first_hour.make_steps(first_hour.Config(), tmp_path)
    names = [step.name for step in steps if "GPU" in step.needs]
    anywhere = "build export write_torch write_torchscript write_onnx data train"
    assert {step.name for step in steps} - set(names) == {*anywhere.split()}
    first_hour.main(first_hour.Config(**settings, only=tuple(names)))
    assert capsys.readouterr().out.count("skipped: torch sees no GPU") == len(names)
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    ran = {step["name"]: step["status"] for step in steps}
    assert ran.pop("export") == "passed"  # the engine is made of what it writes
    assert ran == dict.fromkeys(names, "skipped: torch sees no GPU")
    first_hour.main(first_hour.Config(**settings, only=("kernels",)))  # beside what was there
    again = [step["name"] for step in json.loads((tmp_path / "out.json").read_text())["steps"]]
    assert sorted(again) == sorted([*names, "export"])


def test_a_step_of_the_first_hour_that_fails_or_hangs_is_a_row(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    from first_hour import Step, run

    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    row = run(Step("a", "-c raise(ValueError(7))", result=tmp_path / "log.jsonl"))
    assert row["status"] == "failed"
    assert "ValueError: 7" in row["tail"][-1]
    assert row["numbers"] == [{"step": 1}, {"step": 3}]
    assert run(Step("b", "-c import(time);time.sleep(60)"))["status"] == "failed"
    row = run(Step("c", "-c __import__('time').sleep(60)", seconds=1))
    assert row["status"] == "failed: more than 1 s"
    assert run(Step("d", "-c print('{\"name\":','7}')"))["numbers"] == [{"name": 7}]


# ---- the command line ----------------------------------------------------------------------------

ALONE = """
import sys
class Nothing:  # what a Jetson does not have
    def find_spec(self, name, *_):
        if name.split(".")[0] in "tyro safetensors jax flax pyarrow triton flash_attn".split():
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import inference_jetson
inference_jetson.main(inference_jetson.command_line())
"""


@pytest.mark.slow
def test_it_writes_without_any_other_package(bundle):
    arguments = f"--bundle={bundle}", "--prompt=once upon", "--max_new", "9", "--steps=4"
    result = alone(ALONE, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("once upon")
    assert "9 tokens in" in result.stderr
    assert "4 steps, torch" in result.stderr


def run(bundle, *arguments):
    """The script with a command line, in this process and on the CPU."""
    jetson.main(jetson.command_line([f"--bundle={bundle}", "--device=cpu", *arguments]))


def test_interactive_prompts_and_infilling(bundle, monkeypatch, capsys):
    typed = io.StringIO("once\nonce [MASK] dragon\nonce [MASK:4] dragon\n")
    monkeypatch.setattr(sys, "stdin", typed)
    run(bundle, "--steps=3", "--max-new=5", "--n=2")
    out, err = capsys.readouterr()
    assert "[MASK:12]" in err or "number of tokens" in err  # a prompt that is refused ends nothing
    assert out.count("---- ") == 4
    texts = re.split(r"---- [12]\n", out)[1:]
    assert [text.endswith(" dragon\n") for text in texts[2:]] == [True, True]
    assert err.count("10 tokens in") == 1
    assert err.count("8 tokens in") == 1


def test_piped_prompts_that_are_no_text_end_the_session(bundle, monkeypatch):
    half = io.BytesIO("once\nonc\u00e9".encode()[:-1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(half, "utf-8"))
    with pytest.raises(UnicodeDecodeError):
        run(bundle, "--steps=3", "--max-new=5")


def test_the_steps_are_shown_on_both_paths(bundle, capsys):
    run(bundle, "--steps=3", "--prompt=once [MASK:4] dragon", "--show_steps")
    # a text may hold line breaks
    *shown, last = re.split(r"step [123]: (?=once)", capsys.readouterr().out)[1:]
    left = [text.count("\u2591") for text in shown]
    assert left == sorted(left, reverse=True)
    text = last[: len(last) // 2]  # the last step shows the answer, which follows
    assert last == text * 2
    assert text.endswith(" dragon\n")
    made, token_BL, seen = writer(bundle, graph=False), canvases(SMALL), []
    filled = made.fill_captured(token_BL, rule(made), lambda *step: seen.append(step))
    assert [i for i, _ in seen] == [0, 1, 2]
    assert torch.equal(seen[-1][1][:, : filled.shape[1]], filled)  # of the padded canvas
    assert (seen[0][1] == mdlm.MASK).any()


def test_new_tokens_are_green_in_a_terminal(bundle, monkeypatch, capsys):
    made = writer(bundle)
    cfg = jetson.Config(prompt="once [MASK:4] dragon", steps=3, schedule="even")
    viewer = jetson.StepViewer(made, cfg)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    steps = []
    jetson.write(made, cfg, lambda i, ids: steps.append(ids) or viewer(i, ids))
    shown = capsys.readouterr().out.split("\x1b[2J\x1b[H")[1:]
    assert len(shown) == len(steps)
    assert all("\x1b[32m" in text for text in shown)
    assert "\u2591" not in shown[-1]


def test_an_eos_in_a_hole_leaves_the_text_after_it():
    ids = [mdlm.BOS, 9, mdlm.EOS, 8, mdlm.EOS]
    # whose special tokens are not decoded
    assert jetson.text_ids(ids, "once [MASK:1] dragon") == ids[1:]
    assert jetson.text_ids(ids, "once") == [9]


@pytest.mark.parametrize("max_new", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_a_text_that_is_longer_than_the_canvas_goes_on_from_its_last_tokens(
    bundle, monkeypatch, max_new
):
    made, canvases, filled = writer(bundle), [], []
    fill = made.fill

    def watched(token_BL, *arguments):
        canvases.append(token_BL)
        filled.append(fill(token_BL, *arguments))
        return filled[-1]

    monkeypatch.setattr(made, "fill", watched)
    shown, cfg = ([], jetson.Config(prompt="once upon a time", max_new=max_new, steps=2, n=2))
    ids, _ = jetson.canvas(made, cfg)
    texts, tokens = jetson.write(made, cfg, lambda i, ids: shown.append(ids))
    text_BL = torch.tensor([ids, ids])
    for canvas_BL, filled_BL in zip(canvases, filled, strict=True):
        L = canvas_BL.shape[1]
        new = int((canvas_BL[0] == mdlm.MASK).sum())
        assert new == min(24, max_new - text_BL.shape[1] + len(ids))
        assert L == min(48, text_BL.shape[1] + new)
        assert torch.equal(canvas_BL[:, : L - new], text_BL[:, new - L :] if L > new else text_BL)
        assert (canvas_BL[:, L - new :] == mdlm.MASK).all()
        text_BL = torch.cat([text_BL, filled_BL[:, L - new :]], 1)
    ended = (text_BL == mdlm.EOS).any(1).all()
    assert ended or text_BL.shape[1] == len(ids) + max_new
    assert tokens == 2 * (text_BL.shape[1] - len(ids))
    assert texts == [made.tokenizer.decode(jetson.text_ids(row)) for row in text_BL.tolist()]
    assert shown[-1] == text_BL[0].tolist()


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path, capsys):
    for step in (9, 10):
        model = make_model(rope=True, layers=step - 8)
        mdlm.save(model, tmp_path / f"step_{step}", tokenizer_json())
    (tmp_path / "step_11.tmp").mkdir()  # of a run that goes on
    (tmp_path / "config.json").write_text('{"train": {}}')
    run(tmp_path, "--prompt=once", "--max-new=4", "--steps=2")
    assert capsys.readouterr().out.startswith("once")
    for folder, layers in ((tmp_path, 2), (tmp_path / "step_9", 1)):
        assert writer(folder).model.cfg.layers == layers


def test_a_checkpoint_needs_no_export(tmp_path, monkeypatch, capsys):
    """The form of weights/mdlm: what mdlm.save writes, in 16 bits."""
    folder, model = tmp_path / "weights/mdlm", make_model(rope=True).bfloat16()
    mdlm.save(model, folder, tokenizer_json())
    monkeypatch.setattr(jetson, "SHIPPED", folder)
    monkeypatch.chdir(tmp_path)
    arguments = ["--prompt=once upon", "--max_new=5", "--steps=2", "--device=cpu"]
    jetson.main(jetson.command_line(arguments))
    out, err = capsys.readouterr()
    assert out.startswith("once upon")
    assert err.startswith("no out/jetson: using weights/mdlm, a small model\n")
    read = writer(folder).model.state_dict()
    for name, weight in model.state_dict().items():
        assert read[name].dtype == torch.float32
        assert torch.equal(read[name], weight.float())
    (tmp_path / "out/jetson").mkdir(parents=True)  # it is there, so it is meant
    cfg = jetson.command_line(arguments)
    stops("out/jetson holds no MDLM: it has no config.json; ", jetson.main, cfg)


def test_a_damaged_checkpoint_is_named(tmp_path):
    model = make_model(rope=True).bfloat16()
    mdlm.save(model, tmp_path, tokenizer_json())
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    data, keys = path.read_bytes(), json.loads(config.read_text())
    wrong = ("heads", 0, "0 heads"), ("width", 64, "problems: "), ("layers", 9, "problems: ")
    for key, value, part in wrong:
        config.write_text(json.dumps(keys | {key: value}))
        assert len(stops(part, writer, tmp_path)) < 700  # three tensors and a count
    del keys["sha256"]  # as from elsewhere
    config.write_text(json.dumps(keys))
    nan = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    path.write_bytes(safetensors.torch.save(nan))
    stops("tensors hold NaN or infinity", writer, tmp_path)
    path.write_bytes(data)
    tokenizer = json.loads(tokenizer_json())
    tokenizer["model"]["vocab"]["e"] = 90_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    stops(r"tokenizer\.json has ids up to 90000, the model has 300", writer, tmp_path)
    types = data.replace(b"BF16", b"BF61"), data.replace(b"BF16", b"I8  ")
    for damaged in (data[:1000], data[:-1], b"", *types):
        path.write_bytes(damaged)
        stops("holds no MDLM that this version reads: .*; copy it again", writer, tmp_path)


# ---- one process for many texts ------------------------------------------------------------------


def test_a_resident_process_keeps_few_captures(bundle):
    made = writer(bundle, graph=False)
    for k in range(12):
        last = made.denoiser(1, 32, rule(made, top_k=k))
    assert len(made.denoisers) == 8
    assert made.denoiser(1, 32, rule(made, top_k=11)) is last


def test_on_a_cpu_it_is_the_models_own_loop(bundle):
    model, token_BL = mdlm.load(bundle), canvases(SMALL)
    names = "sampler steps schedule temperature top_k top_p".split()
    for values in ("ancestral", 5, "cosine", 0.9, 20, 0.9), ("entropy", 5, "even", 1.0, 0, 1.0):
        made = writer(bundle, **dict(zip(names, values, strict=True)), seed=3)
        rule, generator = mdlm.Sampling(*values, made.vocab), torch.Generator().manual_seed(3)
        want = mdlm.sample(model, token_BL, rule, generator)
        assert torch.equal(made.fill(token_BL, made.rule(made.cfg)), want)


def test_torchscript_writes_too(bundle):
    made = writer(bundle, backend="torchscript")
    assert not (made.fill(canvases(SMALL), rule(made)) == mdlm.MASK).any()


@pytest.mark.slow
def test_onnx_writes_too(bundle, tmp_path):
    for package in ("onnxruntime", "onnx", *["onnxscript"] * export_jetson.by_torch_export()):
        pytest.importorskip(package)
    settings = {"ckpt": str(bundle.parent / "run"), "out": str(tmp_path / "b")}
    export_jetson.main(export_jetson.Config(**settings, torchscript=False))
    made = writer(tmp_path / "b", backend="onnx")
    assert not (made.fill(canvases(SMALL), rule(made)) == mdlm.MASK).any()


def test_canvases_grow_to_few_shapes(bundle):
    """What a GPU does, without the capture: PAD up to a multiple of 32 changes nothing seen."""
    made = writer(bundle, graph=False)
    for L in (20, 30, 33, 48):
        token_BL = canvases(SMALL, L=L)
        filled = made.fill_captured(token_BL, rule(made))
        assert filled.shape == token_BL.shape
        assert not (filled == mdlm.MASK).any()
        assert torch.equal(filled == mdlm.PAD, token_BL == mdlm.PAD)
    assert {L for _, L, *_ in made.denoisers} == {32, 48}
    made.length = made.longest = 32  # an engine's
    assert made.fill_captured(token_BL[:, :20], rule(made)).shape == (2, 20)
    stops("takes up to 32 tokens, not 48", made.fill, token_BL, rule(made))


def test_the_bench_times_a_bundle(bench_jetson, bundle, tmp_path, capsys):
    def bench(**settings):
        bench_jetson.main(bench_jetson.Config(bundle=str(bundle), device="cpu", **settings))

    out, shapes = tmp_path / "b.json", [(16, 1), (16, 2), (32, 1), (32, 2)]
    bench(out=str(out), lengths=(16, 32), steps_list=(3,), batches=(1, 2), repeats=3)
    report = json.loads(out.read_text())
    assert [(row["length"], row["batch"]) for row in report["rows"]] == shapes
    for row in report["rows"]:
        tokens = row["batch"] * (row["length"] - 1)
        assert row["tok_per_s"] * row["ms_per_step"] == pytest.approx(1000 * tokens / row["steps"])
        assert row["spread"][0] <= row["tok_per_s"] <= row["spread"][1]
    assert report["backend"] == "torch"
    assert report["device"]["name"]
    said = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    assert said.count(["16"]) + said.count(["32"]) == 4
    stops("49 tokens do not fit the model's 48 positions", bench, lengths=(49,))


def test_weights_are_counted_as_they_are(bench_jetson):
    model, parts = make_model(), ("blocks", "norm", "head")
    weights = sum(p.numel() for name, p in model.named_parameters() if name.startswith(parts))
    assert bench_jetson.bytes_per_step(model, 2, 10, 2) == 2 * (weights + 2 * 20 * 300)


# ---- bad input -----------------------------------------------------------------------------------

ARGUMENTS = r"""
--prompt=x[MASK:47] | 50 tokens do not fit the model's 48 positions
--prompt=[MASK] | \[MASK:12\]
--backend=kernels | the kernels need a CUDA device
--backend=onnx | holds no model.onnx
--backend=tensorrt | needs a CUDA device
--top_p=0 --prompt=x | --top_p=0.0: not in 1e-09 .. 1
--temperature=nan --prompt=x | --temperature=nan: not in 0 .. 100
--steps=0 --prompt=x | --steps=0: not in 1 .. 10,000
--prompt=x --n=10000000000000 | not in 1 .. 10,000
--prompt=x --top_k=2147483648 | not in 0 .. 2,147,483,647
"""


def test_bad_arguments_are_named(bundle):
    for line in ARGUMENTS.strip().splitlines():
        arguments, said = line.split(" | ")
        stops(said, run, bundle, *arguments.split())


def test_out_of_memory_is_one_line_and_other_errors_are_bugs(bundle, monkeypatch):
    def fails(why):
        def sample(*_):
            raise RuntimeError(why)

        monkeypatch.setattr(mdlm, "sample", sample)

    for why in (
        "CUDA out of memory. Tried to allocate",
        "DefaultCPUAllocator: can't allocate memory",
        "NvMapMemAlloc",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1131',  # a Jetson's
    ):
        fails(why)
        said = "out of memory at batch 1, length 6: lower --n or --max_new"
        stops(said, run, bundle, "--prompt=[MASK:4]")
    fails("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        run(bundle, "--prompt=[MASK:4]")


def test_a_torch_without_code_for_the_gpu_is_said(bundle, monkeypatch):
    """What PyTorch raises on an Orin under JetPack 7.2."""

    def raising(*shape, device=None):
        raise RuntimeError("CUDA error: no kernel image is available on the device\nCompile with")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", raising)
    stops("no kernel image .* on the device: see requirements-jetson", writer, bundle)


COMMAND_LINES = """
--stepps=3 | unrecognized arguments: --stepps=3
--step=3 | unrecognized arguments: --step=3
--steps=x | invalid int value
--graph=x | ignored explicit argument
--backend=fast | choose from 'auto', 'kernels'
--schedule=evenly | choose from 'linear', 'cosine', 'cosine_sq', 'even'
--sampler=surest | choose from 'ancestral', 'max_prob', 'margin', 'entropy'
--device=tpu | choose from 'cpu', 'cuda'
"""


def test_a_bad_command_line_ends_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["inference_jetson.py", f"--bundle={tmp_path / 'none'}"])
    before = signal.getsignal(signal.SIGPIPE)
    try:
        said = r"it has no config.json; export_jetson.py writes one"
        with pytest.raises(SystemExit, match=said) as stop:
            runpy.run_path(str(ROOT / "inference_jetson.py"), run_name="__main__")
    finally:
        signal.signal(signal.SIGPIPE, before)  # which a program sets to end silently
    assert "\n" not in stop.value.code
    for line in COMMAND_LINES.strip().splitlines():
        argument, said = line.split(" | ")
        with pytest.raises(SystemExit):
            jetson.command_line([argument])
        error = capsys.readouterr().err.splitlines()[-1]
        assert said in error or said.replace("'", "") in error  # Python 3.12 has no quotes


def test_bad_bundles_are_named(bundle, tmp_path):
    def refused(match):
        stops(match, writer, tmp_path, backend="torchscript")

    for path in bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    about = json.loads((tmp_path / "bundle.json").read_text())
    for text, said in (
        (json.dumps(about | {"format": 2}), "format 2, this script reads 1"),
        (json.dumps(about)[:100], "bundle.json cannot be used"),
        ("[1]", "bundle.json cannot be used"),
    ):
        (tmp_path / "bundle.json").write_text(text)
        refused(said)
    (tmp_path / "bundle.json").write_text(json.dumps(about))
    for name in ("model_jetson.pt", "model.safetensors", "tokenizer.json", "config.json"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
        refused(f"{name} is damaged")
        (tmp_path / name).unlink()
        refused(f"{name} is missing")
        (tmp_path / name).write_bytes(data)


def test_reasons_against_the_kernels():
    cuda = torch.device("cuda")
    assert "heads of 64" in jetson.why_no_kernels(dataclasses.replace(SMALL, heads=4), 300, cuda)
    assert "16,384 ids" in jetson.why_no_kernels(SMALL, 20_000, cuda)
    assert "CUDA device" in jetson.why_no_kernels(SMALL, 300, CPU)


def test_an_answer_that_is_not_finite_is_named(bundle, monkeypatch):
    made = writer(bundle)
    monkeypatch.setattr(made, "fill", lambda token_BL, *_: token_BL)  # all masks stay
    stops("not finite", jetson.answer, made, jetson.Config(prompt="[MASK:4]"))


# ---- with a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("backend", ["kernels", "torch", "torchscript"])
def test_a_captured_step_writes_what_its_launches_write(bundle, backend):
    token_BL = canvases(SMALL)
    for sampler in jetson.SAMPLERS:
        settings = {"backend": backend, "sampler": sampler}
        made = [writer(bundle, graph=graph, **settings) for graph in (True, False)]
        filled = [one.fill(token_BL, rule(one, 6)) for one in made]
        captured = [[bool(x.graph) for x in one.denoisers.values()] for one in made]
        assert captured == [[True], [False]]
        assert not (filled[0] == mdlm.MASK).any()
        assert torch.equal(*filled)
        assert not torch.equal(made[0].fill(token_BL, rule(made[0], 6)), filled[0])
