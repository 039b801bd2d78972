"""The exporter: every artefact is read back and compared, for all shapes of model, and says what
the machine lacks.
"""

import dataclasses
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run
from packaging.requirements import Requirement

import export_jetson
import inference_jetson
import model_mdlm as mdlm

SMALL = mdlm.Config(vocab=100, width=64, layers=2, heads=1, ffn=128, positions=40)


def checkpoint(folder, **changes):
    torch.manual_seed(0)
    model = mdlm.MDLM(dataclasses.replace(SMALL, **changes))
    mdlm.save(model, folder, b"{}")
    return model.eval()


def export(ckpt, out, **settings):
    export_jetson.main(export_jetson.Config(ckpt=str(ckpt), out=str(out), **settings))
    return json.loads((out / "bundle.json").read_text())


def export_weights(ckpt, out, **settings):
    return export(ckpt, out, onnx=False, torchscript=False, **settings)


def share_of_error(about, name):
    return about["files"][name]["max_error"] / about["files"][name]["largest_logit"]


@pytest.mark.parametrize("rope", [False, True])
def test_weights_and_torchscript_are_the_model(tmp_path, rope):
    model = checkpoint(tmp_path / "step_3", rope=rope)
    about = export(tmp_path, tmp_path / "out", onnx=False)
    assert about["format"] == inference_jetson.FORMAT
    written = {path.name for path in (tmp_path / "out").iterdir()} - {"bundle.json"}
    assert written == set(about["files"])
    assert written == {"config.json", "tokenizer.json", "model.safetensors", "model_jetson.pt"}
    for name in ("model.safetensors", "model_jetson.pt"):
        assert 0 < share_of_error(about, name) < 0.005
    same(model, torch.jit.load(str(tmp_path / "out/model_jetson.pt")))


def read_back(folder):
    return inference_jetson.read_model(folder, inference_jetson.read_bundle(folder))


def test_int8_halves_the_file_and_its_graphs_are_of_the_same_weights(tmp_path):
    model = checkpoint(tmp_path / "run", rope=True)
    small = export(tmp_path / "run", tmp_path / "small", onnx=False, int8=True)
    large = export_weights(tmp_path / "run", tmp_path / "large")
    sizes = [about["files"]["model.safetensors"]["bytes"] for about in (small, large)]
    assert sizes[0] < 0.6 * sizes[1]
    assert 0.001 < share_of_error(small, "model.safetensors") < 0.05
    read = read_back(tmp_path / "small")
    for name, weight in model.state_dict().items():
        error, largest = (read.state_dict()[name] - weight).abs(), weight.abs()
        if weight.ndim == 2:  # half a step of 1 / 127 of the row's largest
            assert (error <= 1.001 * largest.amax(1, keepdim=True) / 254).all(), name
            assert error.any() == weight.any(), name
        else:
            torch.testing.assert_close(error, torch.zeros_like(error), atol=1e-3, rtol=0)
    same(read, torch.jit.load(str(tmp_path / "small/model_jetson.pt")))


@torch.no_grad()
def same(model, run):
    """run(token, noise, see) in halves is the model, for other shapes than the exporter's."""
    for given in export_jetson.canvases(SMALL, [(1, 7), (4, 40)]):
        got, see_BL = run(*given), given[2]
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.float()[see_BL], model(*given)[see_BL], rtol=0, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"rope": True}, {"tie": True}], ids=str)
def test_onnx_is_the_model(tmp_path, changes):
    for package in ("onnxruntime", "onnx", *["onnxscript"] * export_jetson.by_torch_export()):
        pytest.importorskip(package)
    model = checkpoint(tmp_path / "run", **changes)
    about = export(tmp_path / "run", tmp_path / "out")
    assert 0 < share_of_error(about, "model.onnx") < 0.005
    same(model, inference_jetson.run_onnx((tmp_path / "out/model.onnx").read_bytes()))


def test_time_reaches_the_graph(tmp_path):
    checkpoint(tmp_path / "run")
    model = mdlm.load(tmp_path / "run")
    torch.nn.init.normal_(model.time[2].weight, 0, 0.5)
    exported = export_jetson.Exported(model)
    ((token, noise, see),) = export_jetson.canvases(SMALL, [(2, 20)])
    with torch.no_grad():
        for n in (noise, noise / 3):
            torch.testing.assert_close(exported(token, n, see), model(token, n, see))
        assert (exported(token, noise, see) - exported(token, noise / 3, see)).abs().max() > 0.1


def test_the_newest_step_is_taken_and_an_old_bundle_replaced(tmp_path):
    for step in (9, 10):
        checkpoint(tmp_path / f"run/step_{step}")
    for step, want in ((0, "step_10"), (9, "step_9")):
        about = export_weights(tmp_path / "run", tmp_path / "out", step=step)
        assert about["checkpoint"] == want
    assert not (tmp_path / "out.tmp").exists()


def test_an_artefact_that_is_not_the_model_is_refused(capsys):
    inputs = export_jetson.canvases(SMALL, [(2, 20)])
    want = [torch.randn(2, 20, 100)]
    close = lambda *_: (want[0] + 1e-3).half()  # noqa: E731
    assert export_jetson.compare("a", close, inputs, want)["max_error"] < 5e-3
    for broken in (want[0] + 1, want[0] * torch.nan, want[0][:, :, :50]):
        with pytest.raises(ValueError, match="not exported"):
            export_jetson.compare("a", lambda *_, broken=broken: broken, inputs, want)
    one = export_jetson.canvases(SMALL, [(1, 1)])  # BOS alone: no mask
    want = [torch.randn(1, 1, 100)]
    assert export_jetson.compare("a", lambda *_: want[0], one, want)["same_likeliest"] == 0


def stops(match, **settings):
    for name, value in settings.items():
        settings[name] = str(value) if isinstance(value, Path) else value
    with pytest.raises((ValueError, OSError), match=match):
        export_jetson.main(export_jetson.Config(**settings))


def test_bad_input_is_named_and_nothing_is_lost(tmp_path):
    run, out, mine = tmp_path / "run", tmp_path / "out", tmp_path / "mine"
    model = checkpoint(run)
    said = "holds no MDLM: it has no config.json; train_gpu.py trains one"
    stops(said, ckpt=tmp_path / "none", out=out)
    mine.mkdir()
    (mine / "thesis.tex").write_text("all")
    stops("holds other things", ckpt=run, out=mine)
    assert (mine / "thesis.tex").read_text() == "all"
    stops("pass both", ckpt=run, out=out, bundle="out/jetson")
    with torch.no_grad():
        model.blocks[1].fc1.weight[3, 4] = 1e5
    mdlm.save(model, tmp_path / "large", b"{}")
    said = "blocks.1.fc1.weight is beyond FP16's 65,504; train with a lower --lr"
    for int8 in (False, True):
        stops(said, ckpt=tmp_path / "large", out=out, int8=int8)
    assert not out.exists()


def test_a_full_disk_is_named_and_leaves_the_bundle_that_was_there(tmp_path):
    checkpoint(tmp_path / "run")
    about = export_weights(tmp_path / "run", tmp_path / "out")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond it fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
    try:
        stops("File too large", ckpt=tmp_path / "run", out=tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert inference_jetson.read_bundle(tmp_path / "out") == about
    assert not (tmp_path / "out.tmp").exists()


def test_without_onnx_one_line_says_so(tmp_path, monkeypatch, capsys):
    checkpoint(tmp_path / "run")
    monkeypatch.setattr(export_jetson, "lacks", lambda *names: [n for n in names if n == "onnx"])
    about = export(tmp_path / "run", tmp_path / "out", torchscript=False)
    assert "model.onnx" not in about["files"]
    assert "model.onnx: not written, for want of: pip install onnx\n" in capsys.readouterr().out


def test_a_graph_that_fails_costs_its_file_alone(tmp_path, monkeypatch, capsys):
    def fails(exported, example, path, **_):
        Path(path).write_text("half of it")
        raise RuntimeError("Constraints violated (batch)\nand 40 lines more")

    checkpoint(tmp_path / "run")
    monkeypatch.setattr(export_jetson, "lacks", lambda *packages: [])
    monkeypatch.setattr(torch.onnx, "export", fails)
    monkeypatch.setattr(torch.jit, "trace", lambda *_, **__: fails(*_, tmp_path / "trace"))
    about = export(tmp_path / "run", tmp_path / "out")
    assert set(about["files"]) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*about["files"], "bundle.json"}
    said = capsys.readouterr().out
    why = f"not written by torch {torch.__version__}: Constraints violated (batch)\n"
    for name in ("model_jetson.pt", "model.onnx"):
        assert f"{name}: {why}" in said


def test_what_an_exporter_prints_goes_nowhere(tmp_path, monkeypatch, capsys):
    """PyTorch 2.5 writes to sys.stdout itself, which redirect_stdout(None) does not stand."""
    asked = []

    def noisy(*_, **settings):
        asked.append(settings)
        sys.stdout.write("noise")

    monkeypatch.setattr(torch.onnx, "export", noisy)
    monkeypatch.setattr(export_jetson, "lacks", lambda *packages: packages)
    exported = export_jetson.Exported(mdlm.MDLM(SMALL))
    for version, by_torch_export in (("2.5.1+cu126", False), ("2.8.0a0", False), ("2.13.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert export_jetson.write_onnx(exported, (), tmp_path / "model.onnx") is None
        assert ("dynamo" in asked[-1]) == by_torch_export
    assert "noise" not in capsys.readouterr().out


def test_an_engine_is_added_to_a_bundle_from_elsewhere(tmp_path, monkeypatch):
    checkpoint(tmp_path / "run")
    model, out = mdlm.load(tmp_path / "run"), tmp_path / "out"
    engine = {"bundle": str(out), "tensorrt": True}
    about = export_weights(tmp_path / "run", out)
    stops("holds no model.onnx", **engine)
    about["files"]["model.onnx"] = export_jetson.about_file(b"graph", {})
    (out / "model.onnx").write_bytes(b"graph")
    (out / "bundle.json").write_text(json.dumps(about))
    stops("41 tokens do not fit the model's 40 positions", **engine, length=41)
    by_hand = "--shapes=token:1x20,noise:1,see:1x20 --saveEngine"
    stops(f"no Python module tensorrt .*{by_hand}", **engine, length=20)
    # what TensorRT would do, on a machine that has it
    built = {"version": "10.3", "gpu": "Orin", "length": 20}
    for module, name, fake in (
        (export_jetson, "lacks", lambda *packages: []),
        (export_jetson, "build_engine", lambda onnx, length: (b"plan of " + onnx, built)),
        (torch.cuda, "is_available", lambda: True),
        (torch.Tensor, "cuda", lambda tensor: tensor),
        (inference_jetson, "run_tensorrt", lambda plan, about: torch.no_grad()(model)),
    ):
        monkeypatch.setattr(module, name, fake)
    export_jetson.main(export_jetson.Config(**engine, length=20))
    about = inference_jetson.read_bundle(out)
    assert about["tensorrt"] == built
    assert inference_jetson.read_file(out, about, "model.trt") == b"plan of graph"
    assert about["files"]["model.trt"]["max_error"] < 0.01


def test_numpy_is_that_of_jetpacks_wheels():
    lines = (ROOT / "requirements-jetson.txt").read_text().splitlines()
    asked = [Requirement(line) for line in lines if line.startswith("numpy")]
    for python, numpy in (("3.10", "1.26.4"), ("3.12", "2.3.0")):
        here = {"python_version": python}
        held = [r for r in asked if r.marker is None or r.marker.evaluate(here)]
        assert [r.specifier.contains(numpy) for r in held] == [True]
        assert held[0].specifier.contains("2.3.0") == (python == "3.12")


@pytest.mark.slow
def test_from_training_to_text(tmp_path):
    """The README's path: train, export, write."""
    stories = [f"The {'small ' * (i % 3)}dog sees {i}." for i in range(300)]
    (tmp_path / "stories.txt").write_text("\n<|endoftext|>\n".join(stories))
    for command in (
        "data_prep.py text stories.txt --out=rows --vocab_size=300 --seq_len=64 --heldout=0.1",
        "train_gpu.py --data=rows --out=run --steps=30 --batch_size=8 --no-compile",
        "export_jetson.py --ckpt=run --out=bundle",
        "inference_jetson.py --bundle=bundle --prompt=The --max_new=20",
    ):
        ran = run(*command.split(), cwd=tmp_path, timeout=500)
        assert ran.returncode == 0, (command, ran.stderr)
    assert ran.stdout.startswith("The")
    assert len(ran.stdout.split()) > 1


@pytest.mark.slow
# JetPack 6's Python; each installs 5 GB
@pytest.mark.parametrize("version", ["2.4.1", "2.5.1", "2.8.0"])
def test_older_pytorch_on_python_310(version, tmp_path):
    """The shipped weights through README's commands, and the tests of what runs on a Jetson."""
    found = shutil.which("python3.10")
    if not found or subprocess.run([found, "-c", ""]).returncode:
        pytest.skip("there is no Python 3.10")
    environment, python = tmp_path / "venv", tmp_path / "venv" / "bin" / "python"
    try:
        subprocess.run([found, "-m", "venv", environment], check=True)
        packages = f"torch=={version} -r requirements-jetson.txt pytest packaging"
        packages = [*packages.split(), "onnx", "onnxruntime", "onnxscript"]

        def run(*command):
            return subprocess.run([python, *command], cwd=ROOT, capture_output=True, text=True)

        installed = run("-m", "pip", "install", "-q", *packages)
        if installed.returncode:
            pytest.skip(f"PyTorch {version} cannot be installed: {installed.stderr[-200:]}")
        bundle = tmp_path / "jetson"
        commands = [["export_jetson.py", "--ckpt=weights/mdlm", f"--out={bundle}"]]
        for kind in ("torch", "torchscript", "onnx"):
            command = "inference_jetson.py", f"--bundle={bundle}", f"--backend={kind}", "--steps=8"
            commands.append([*command, "--prompt=Once upon a time"])
        tests = "tests/test_export_jetson.py tests/test_inference_jetson.py"
        commands.append(f"-m pytest -q -p no:cacheprovider {tests}".split())
        for command in commands:
            done = run(*command)
            assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            if command[0] == "inference_jetson.py":
                assert done.stdout.startswith("Once upon a time"), done.stdout
    finally:
        shutil.rmtree(environment, ignore_errors=True)
