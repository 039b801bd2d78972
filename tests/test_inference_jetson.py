"""The Jetson script on a CPU: fused step against the model, emulated kernels in the loop, command line, bad bundles."""

import contextlib
import dataclasses
import io
import json
import math
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diffusion
import export_jetson
import inference_jetson as jetson
import model_mdlm as mdlm
from csrc import ops

ROOT = Path(__file__).resolve().parent.parent
SMALL = mdlm.Config(vocab=300, width=128, layers=2, heads=2, ffn=256, positions=48)


def tokenizer_json():
    """A byte-level tokenizer with the five special tokens and a few merges."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special = ["<pad>", "<bos>", "<eos>", "<mask>", "<unk>"]
    tokenizer.train_from_iterator(["once upon a time there was a dragon"] * 3, 290, 2, False, special)
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
    export_jetson.main(export_jetson.Config(ckpt=str(folder / "run"), out=str(folder / "jetson"), onnx=False))
    return folder / "jetson"


@pytest.fixture
def broken(bundle, tmp_path):
    """A copy of the bundle to break."""
    for path in bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def canvases(cfg, B=2, L=33):
    token_BL = torch.randint(5, cfg.vocab, (B, L), generator=torch.Generator().manual_seed(1))
    token_BL[:, 0], token_BL[:, 3:-3] = mdlm.BOS, mdlm.MASK
    token_BL[-1, -5:] = mdlm.PAD
    return token_BL


# ---- the fused step ------------------------------------------------------------------------------------------------


SHAPES = {}, {"time": False}, {"tie": True}, {"heads": 4}, {"rope": True}, {"rope": True, "time": False, "heads": 4}


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


@pytest.mark.parametrize("rope", [False, True])
@torch.inference_mode()
def test_fused_forward_on_kernels_is_as_exact_as_the_half_model(runs, rope):
    model, rate_N = make_model(rope=rope).to(runs.device), torch.linspace(1, 0.1, 5, device=runs.device)
    token_BL, step_1 = canvases(model.cfg).to(runs.device), torch.tensor([2], device=runs.device)
    see_BL, rate_B = token_BL != mdlm.PAD, rate_N[2].expand(2)
    exact = model.double()(token_BL, rate_B.double(), see_BL)[see_BL]
    half = model.half()
    plain = half(token_BL, rate_B, see_BL)[see_BL]
    kernels = runs if runs.device == "cpu" else torch.ops.unmask
    got = jetson.fused_forward(half, rate_N, kernels)(token_BL, see_BL, step_1)[see_BL]
    assert (got - exact).abs().max() < 2 * (plain - exact).abs().max()


def denoiser(model, kernels, sample_, token_BL, steps=2, **settings):
    cfg = jetson.Config(**{"temperature": 0.9, "top_p": 0.9, "schedule": "linear", **settings})
    rate_N, keep_N = jetson.step_tables(steps, cfg.schedule)
    with torch.inference_mode():
        forward = jetson.fused_forward(model, rate_N, kernels)
        made = jetson.Denoiser(forward, sample_, *token_BL.shape, keep_N, cfg, 290, torch.device("cpu"))
        return made, made(token_BL, 5)


def test_the_step_over_emulated_kernels_fills_canvases(kernels):
    model = make_model().half()
    token_BL = canvases(model.cfg)
    made, filled = denoiser(model, kernels, kernels.sample_, token_BL)
    masked_BL = token_BL == mdlm.MASK
    assert torch.equal(filled[~masked_BL], token_BL[~masked_BL])
    new = filled[masked_BL]
    assert not torch.isin(new, torch.tensor(mdlm.BANNED)).any()
    assert (new < 290).all()
    with torch.inference_mode():
        assert torch.equal(made(token_BL, 5), filled)
        assert not torch.equal(made(token_BL, 6), filled)
    _, same = denoiser(model, kernels, ops.sample_torch_, token_BL)  # the same noise, another sampler
    assert torch.equal(same, filled)


def test_the_step_over_registered_operators_fills_canvases():
    model = make_model()
    token_BL = canvases(model.cfg)
    for kernels in (torch.ops.unmask, jetson.PLAIN):
        for settings in ({}, {"temperature": 0.0}, {"top_k": 3}):
            _, filled = denoiser(model, kernels, kernels.sample_, token_BL, **settings)
            masked_BL = token_BL == mdlm.MASK
            assert torch.equal(filled[~masked_BL], token_BL[~masked_BL])
            assert not torch.isin(filled[masked_BL], torch.tensor(mdlm.BANNED)).any()


@pytest.mark.parametrize("schedule", [*diffusion.SCHEDULES, "square"])
def test_each_step_fills_its_share(schedule, monkeypatch):
    square = diffusion.Schedule(rate=lambda t: t**2, slope=lambda t: 2 * t, inverse=lambda rate: rate**0.5)
    monkeypatch.setitem(diffusion.SCHEDULES, "square", square)  # a new schedule is one entry
    N, L = 8, 4000
    rate_N, keep_N = jetson.step_tables(N, schedule)
    zeros = lambda token, see, step: torch.zeros(*token.shape, 8)  # noqa: E731
    for sample_ in (torch.ops.unmask.sample_, jetson.sample_sorted_):
        made = jetson.Denoiser(zeros, sample_, 1, L, keep_N, jetson.Config(), 8, torch.device("cpu"))
        left = []
        for _ in range(N):
            made.step()
            left.append((made.token_BL == mdlm.MASK).double().mean().item())
        np.testing.assert_allclose(left[:-1], rate_N[1:], atol=4 * math.sqrt(0.25 / L))
        assert left[-1] == 0


BAN = torch.tensor(mdlm.BANNED, dtype=torch.int32)


def test_the_sort_based_sampler_draws_from_the_filtered_softmax():
    logits, R = torch.tensor([2.0, 1.0, 0.0, 5.0, 5.0, 0.5, -1.0, 0.7]), 20_000
    token = torch.full((1, R), mdlm.MASK)
    rest = torch.tensor([0, 0]), torch.zeros(1), BAN, mdlm.MASK, 7, 0.8, 3, 0.9
    jetson.sample_sorted_(logits.repeat(R, 1), token, *rest)
    allowed = diffusion.ban(logits[:7], mdlm.BANNED)
    want = diffusion.softmax(diffusion.filter_logits(allowed, 0.8, 3, 0.9))
    share = torch.bincount(token[0], minlength=7)[:7] / R
    assert (share - want).abs().max() < 4 * math.sqrt(0.25 / R)
    assert torch.equal(share == 0, want == 0)


def test_the_sort_based_sampler_costs_a_tenth_of_the_bisection(monkeypatch):
    """At 64 x 8,192 logits top-p by bisection is 579 launches and 478 MB."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    from bench_jetson import Count

    logits, token = torch.randn(64, 8192).half(), torch.full((1, 64), mdlm.MASK)
    with Count() as count:
        jetson.sample_sorted_(logits, token, torch.tensor([0, 0]), torch.zeros(1), BAN, mdlm.MASK, 8192, 1.0, 50, 0.95)
    assert count.launches < 50
    assert count.bytes < 90e6


class OneDevice(TorchDispatchMode):
    """Meta tensors play the GPU: an operator on both devices is an error, as there; copies between them are counted."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in tensors if t.ndim}  # a number may stay on the CPU
        if name.startswith(("copy_", "_to_copy")) and len(devices | {str(kwargs.get("device", "cpu"))} - {"cpu"}) > 1:
            self.copies.append(name)
            return args[0] if name.startswith("copy_") else torch.empty_like(args[0], device=kwargs["device"])
        assert len(devices) < 2, f"{name} on {[(t.device.type, tuple(t.shape)) for t in tensors]}"
        return function(*args, **kwargs)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("sample_", [jetson.sample_sorted_, torch.ops.unmask.sample_])
def test_a_text_is_one_copy_to_the_device_and_one_back(sample_, rope):
    model, meta = make_model(rope=rope).to("meta"), torch.device("meta")
    rate_N, keep_N = (table_N.to("meta") for table_N in jetson.step_tables(3, "linear"))
    graph = lambda *inputs: export_jetson.Exported(model)(*inputs)  # noqa: E731
    with torch.inference_mode():
        for forward in (jetson.fused_forward(model, rate_N, torch.ops.unmask), jetson.graph_forward(graph, rate_N)):
            made = jetson.Denoiser(forward, sample_, 2, 33, keep_N, jetson.Config(), 290, meta)
            with OneDevice() as mode:
                assert made(canvases(SMALL), 5).shape == (2, 33)
            assert mode.copies == ["copy_.default"] * 2


# ---- what fails on a device ----------------------------------------------------------------------------------------


def test_every_backend_has_the_fused_sampler_where_it_is_built(bundle, monkeypatch):
    for backend in ("torch", "torchscript"):
        assert writer(bundle, backend=backend).sample_ is jetson.sample_sorted_
    monkeypatch.setattr(jetson, "why_no_sampler", lambda vocab, device: "")
    for backend in ("torch", "torchscript"):
        made = writer(bundle, backend=backend, graph=False)
        assert made.denoiser(1, 32, 3).sample_ is torch.ops.unmask.sample_
        assert not (made.fill_captured(canvases(SMALL), 3) == mdlm.MASK).any()


def test_a_graph_that_cannot_be_captured_is_said_and_the_step_runs_as_it_is(bundle, monkeypatch, capsys):
    class Fails(contextlib.nullcontext):
        def __exit__(self, *error):
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": object}
    for name, fake in (fakes | {"stream": contextlib.nullcontext, "graph": Fails}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    made = writer(bundle)
    assert not (made.fill_captured(canvases(SMALL), 3) == mdlm.MASK).any()
    said = capsys.readouterr().err.splitlines()
    assert said == ["CUDA graph: operation not permitted when stream is capturing; launching kernels one by one, "
                    "which is slower"]  # fmt: skip


def fake_tensorrt(monkeypatch, runs=True):
    """A module tensorrt whose engines do nothing."""
    context = types.SimpleNamespace(
        set_input_shape=lambda *_: True, set_tensor_address=lambda *_: True, execute_async_v3=lambda stream: runs
    )
    engine = types.SimpleNamespace(
        create_execution_context=lambda: context, get_tensor_shape=lambda name: (1, 64, 300), num_io_tensors=2,
        get_tensor_name=lambda i: ("token", "logits")[i],
    )  # fmt: skip
    runtime = types.SimpleNamespace(deserialize_cuda_engine=lambda data: engine)
    logger = type("Logger", (), {"ERROR": 0, "__init__": lambda self, level: None})
    module = types.SimpleNamespace(__version__="10.3", Logger=logger, Runtime=lambda logger: runtime)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Orin")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))


def test_an_engine_that_did_not_run_is_no_text(monkeypatch):
    built, given = {"version": "10.3", "gpu": "Orin", "length": 64}, (canvases(SMALL), None, None)
    fake_tensorrt(monkeypatch)
    assert jetson.run_tensorrt(b"", built)(*given).shape == (2, 33, 300)
    fake_tensorrt(monkeypatch, runs=False)
    with pytest.raises(ValueError, match=r"TensorRT did not run model.trt on \[2, 33\] tokens"):
        jetson.run_tensorrt(b"", built)(*given)


def test_onnx_runs_by_cuda_or_the_cpu_and_nothing_else(monkeypatch):
    asked, names = [], ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    session = types.SimpleNamespace(get_inputs=list)
    fake = types.SimpleNamespace(
        get_available_providers=lambda: names,
        InferenceSession=lambda data, providers: asked.append(providers) or session,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    jetson.run_onnx(b"")
    assert asked == [names[1:]]


def test_the_board_tells_its_memory():
    cuda, nano = torch.device("cuda"), "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    for board, mode, want in (
        (nano, "NV Power Mode: 15W", 68.3),
        (nano, "NV Power Mode: MAXN_SUPER", 102.4),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "NV Power Mode: 15W", 102.4),
        ("NVIDIA Jetson AGX Orin Developer Kit", "NV Power Mode: MAXN", 204.8),
        ("NVIDIA Jetson AGX Thor Developer Kit", "NV Power Mode: MAXN", 273.0),
    ):
        assert jetson.peak_gb_s(cuda, {"name": "Orin", "board": board, "power_mode": mode}) == want


def test_the_first_hour_skips_what_needs_a_gpu_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import first_hour

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(mdlm.CONFIGS, "tiny", SMALL)
    settings = {"model": "tiny", "out": str(tmp_path / "out.json")}
    names = [step.name for step in first_hour.make_steps(first_hour.Config(), tmp_path)]
    first_hour.main(first_hour.Config(**settings, only=tuple(set(names) - {"build", "export"})))
    assert capsys.readouterr().out.count("skipped: torch sees no GPU") == len(names) - 2
    ran = [(step["name"], step["status"]) for step in json.loads((tmp_path / "out.json").read_text())["steps"]]
    assert ran == [(name, "skipped: torch sees no GPU") for name in names if name not in ("build", "export")]


def test_a_step_of_the_first_hour_that_fails_or_hangs_is_a_row(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    from first_hour import Step, run

    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    row = run(Step("a", "-c raise(ValueError(7))", result=tmp_path / "log.jsonl"))
    assert row["status"] == "failed"
    assert "ValueError: 7" in row["tail"][-1]
    assert row["numbers"] == [{"step": 1}, {"step": 3}]
    assert run(Step("b", "-c import(time);time.sleep(60)"))["status"] == "failed"
    assert run(Step("c", "-c __import__('time').sleep(60)", seconds=1))["status"] == "failed: more than 1 s"
    assert run(Step("d", "-c print('{\"name\":','7}')"))["numbers"] == [{"name": 7}]


# ---- the command line ----------------------------------------------------------------------------------------------

ALONE = """
import sys
class Nothing:  # what a Jetson does not have
    def find_spec(self, name, *_):
        if name.split(".")[0] in {"tyro", "safetensors", "jax", "flax", "pyarrow", "triton", "flash_attn"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import inference_jetson
inference_jetson.main(inference_jetson.command_line())
"""


def test_it_writes_without_any_other_package(bundle):
    arguments = f"--bundle={bundle}", "--prompt=once upon", "--max_new", "9", "--steps=4"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALONE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("once upon")
    assert "9 tokens in" in result.stderr
    assert "4 steps, torch" in result.stderr


def run(bundle, *arguments):
    """The script with a command line, in this process and on the CPU."""
    jetson.main(jetson.command_line([f"--bundle={bundle}", "--device=cpu", *arguments]))


def test_interactive_prompts_and_infilling(bundle, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("once\nonce [MASK:4] dragon\n"))
    run(bundle, "--steps=3", "--max-new=5", "--n=2")
    out, err = capsys.readouterr()
    assert out.count("---- ") == 4
    assert out.count(" dragon\n") == 2
    assert err.count("10 tokens in") == 1
    assert err.count("8 tokens in") == 1


def writer(bundle, **settings):
    return jetson.Writer(jetson.Config(bundle=str(bundle), **settings))


def test_on_a_cpu_it_is_the_models_own_loop(bundle):
    model, token_BL = mdlm.load(bundle), canvases(SMALL)
    rule = mdlm.Sampling("ancestral", 5, "cosine", 0.9, 20, 0.9, vocab=writer(bundle).vocab)
    want = mdlm.sample(model, token_BL, rule, torch.Generator().manual_seed(3))
    got = writer(bundle, schedule="cosine", temperature=0.9, top_k=20, top_p=0.9, seed=3).fill(token_BL, 5)
    assert torch.equal(got, want)


def test_torchscript_writes_too(bundle):
    assert not (writer(bundle, backend="torchscript").fill(canvases(SMALL), 3) == mdlm.MASK).any()


@pytest.mark.slow
def test_onnx_writes_too(bundle, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    settings = {"ckpt": str(bundle.parent / "run"), "out": str(tmp_path / "b")}
    export_jetson.main(export_jetson.Config(**settings, torchscript=False))
    assert not (writer(tmp_path / "b", backend="onnx").fill(canvases(SMALL), 3) == mdlm.MASK).any()


def test_canvases_grow_to_few_shapes(bundle):
    """What a GPU does, without the capture: PAD up to a multiple of 32 changes nothing that is seen."""
    made = writer(bundle, graph=False)
    for L in (20, 30, 33, 48):
        token_BL = canvases(SMALL, L=L)
        filled = made.fill_captured(token_BL, 3)
        assert filled.shape == token_BL.shape
        assert not (filled == mdlm.MASK).any()
        assert torch.equal(filled == mdlm.PAD, token_BL == mdlm.PAD)
    assert {L for _, L, _ in made.denoisers} == {32, 48}
    made.length = 32
    with pytest.raises(ValueError, match="takes up to 32 tokens, not 48"):
        made.fill_captured(token_BL, 3)


def test_benchmark_writes_a_table_and_json(bundle, tmp_path, capsys):
    out, shapes = tmp_path / "b.json", "--lengths 16 32 --steps_list 3 --batches 1 2"
    run(bundle, "--benchmark", "--repeats=3", f"--out={out}", *shapes.split())
    report = json.loads(out.read_text())
    assert [(row["length"], row["batch"]) for row in report["rows"]] == [(16, 1), (16, 2), (32, 1), (32, 2)]
    for row in report["rows"]:
        tokens = row["batch"] * (row["length"] - 1)
        assert row["tok_per_s"] * row["ms_per_step"] == pytest.approx(1000 * tokens / row["steps"])
        assert row["spread"][0] <= row["tok_per_s"] <= row["spread"][1]
    assert report["backend"] == "torch"
    assert report["device"]["name"]
    assert len([line for line in capsys.readouterr().out.splitlines() if line.split()[:1] in (["16"], ["32"])]) == 4


def test_weights_are_counted_as_they_are():
    model = make_model()
    weights = sum(p.numel() for name, p in model.named_parameters() if name.startswith(("blocks", "norm", "head")))
    assert jetson.bytes_per_step(model, 2, 10, 2) == 2 * (weights + 2 * 20 * 300)


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--prompt=x --max_new=47", "49 tokens do not fit the model's 48 positions; lower --max_new"),
        ("--benchmark --lengths 49", "49 tokens do not fit the model's 48 positions"),
        ("--prompt=[MASK]", "[MASK:12]"),
        ("--backend=fast", "not one of auto, kernels"),
        ("--backend=kernels", "the kernels need a CUDA device"),
        ("--backend=onnx", "holds no model.onnx"),
        ("--backend=tensorrt", "needs a CUDA device"),
        ("--top_p=0 --prompt=x", "--top_p in (0, 1]"),
        ("--steps=0 --prompt=x", "--steps at least 1"),
        ("--schedule=even", "not one of linear, cosine, cosine_sq"),
        ("--device=tpu", "not one of cpu, cuda"),
        ("--prompt=x --max_new=9 --n=10000000000000", "lower --n or --max_new"),
        ("--benchmark --lengths 9 --batches 10000000000000", "lower --batches or --lengths"),
    ],
)
def test_bad_arguments_are_named(bundle, arguments, said):
    with pytest.raises((ValueError, OSError)) as stop:
        run(bundle, *arguments.split())
    assert said in str(stop.value)


def test_a_bad_command_line_ends_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["inference_jetson.py", f"--bundle={tmp_path / 'none'}"])
    with pytest.raises(SystemExit, match=r"is no bundle .*export_jetson.py") as stop:
        runpy.run_path(str(ROOT / "inference_jetson.py"), run_name="__main__")
    assert "\n" not in stop.value.code
    for argument, said in (
        ("--stepps=3", "unrecognized arguments: --stepps=3"),
        ("--steps=x", "invalid int value"),
        ("--graph=x", "ignored explicit argument"),
    ):
        with pytest.raises(SystemExit):
            jetson.command_line([argument])
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_bad_bundles_are_named(broken):
    def stops(*parts):
        with pytest.raises((ValueError, OSError)) as stop:
            writer(broken, backend="torchscript")
        assert all(part in str(stop.value) for part in parts), stop.value

    about = json.loads((broken / "bundle.json").read_text())
    (broken / "bundle.json").write_text(json.dumps(about | {"format": 2}))
    stops("format 2, this script reads 1")
    (broken / "bundle.json").write_text(json.dumps(about)[:100])
    stops("bundle.json cannot be used")
    (broken / "bundle.json").write_text("[1]")
    stops("bundle.json cannot be used")
    for key in ("format", "torch", "tensorrt", "files"):
        (broken / "bundle.json").write_text(json.dumps({name: about[name] for name in about if name != key}))
        stops(f"bundle.json has no '{key}': it is of another version; export again")
    for changed, key in (
        ({"files": {"model.trt": {"bytes": 3}}}, "sha256"),
        ({"tensorrt": {"gpu": "Orin"}}, "version"),
    ):
        (broken / "bundle.json").write_text(json.dumps(about | changed))
        stops(f"bundle.json has no '{key}'")
    (broken / "bundle.json").write_text(json.dumps(about))
    for name in ("model_jetson.pt", "model.safetensors", "tokenizer.json", "config.json"):
        data = (broken / name).read_bytes()
        (broken / name).write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
        stops(f"{name} is damaged")
        (broken / name).unlink()
        stops(f"{name} is missing")
        (broken / name).write_bytes(data)


def test_reasons_against_the_kernels():
    cuda = torch.device("cuda")
    assert "heads of 64" in jetson.why_no_kernels(dataclasses.replace(SMALL, heads=4), 300, cuda)
    assert "16,384 ids" in jetson.why_no_kernels(SMALL, 20_000, cuda)
    assert "CUDA device" in jetson.why_no_kernels(SMALL, 300, torch.device("cpu"))


def test_an_answer_that_is_not_finite_is_named(bundle, monkeypatch):
    made = writer(bundle)
    monkeypatch.setattr(made, "fill", lambda token_BL, steps: token_BL)  # all masks stay
    with pytest.raises(ValueError, match="not finite"):
        jetson.answer(made, "[MASK:4]")


# ---- with a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("backend", ["kernels", "torch", "torchscript"])
def test_a_captured_step_writes_what_its_launches_write(bundle, backend):
    token_BL = canvases(SMALL)
    filled = [
        writer(bundle, backend=backend, graph=graph, temperature=0.0).fill(token_BL, 6) for graph in (True, False)
    ]
    assert not (filled[0] == mdlm.MASK).any()
    if backend == "kernels":  # its noise is a function of seed and step; torch's generator moves on while capturing
        assert torch.equal(*filled)
    again = writer(bundle, backend=backend)
    assert not torch.equal(again.fill(token_BL, 6), again.fill(token_BL, 6))
