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

import numpy as np
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


@pytest.mark.parametrize("rope", [False, True])
def test_weights_and_torchscript_are_the_model(tmp_path, rope):
    model = checkpoint(tmp_path / "step_3", rope=rope)
    about = export(tmp_path, tmp_path / "out", onnx=False)
    assert about["format"] == inference_jetson.FORMAT
    written = {path.name for path in (tmp_path / "out").iterdir()} - {"bundle.json"}
    assert written == set(about["files"])
    assert written == {"config.json", "tokenizer.json", "model.safetensors", "model_jetson.pt"}
    for name in ("model.safetensors", "model_jetson.pt"):
        assert 0 < about["files"][name]["max_error"] < 0.005 * about["files"][name]["largest_logit"]
    same(model, torch.jit.load(str(tmp_path / "out/model_jetson.pt")))


def test_int8_halves_the_file_and_its_graphs_are_of_the_same_weights(tmp_path):
    model = checkpoint(tmp_path / "run", rope=True)
    small = export(tmp_path / "run", tmp_path / "small", onnx=False, int8=True)["files"]
    large = export(tmp_path / "run", tmp_path / "large", onnx=False, torchscript=False)["files"]
    assert small["model.safetensors"]["bytes"] < 0.6 * large["model.safetensors"]["bytes"]
    assert (
        0.001
        < small["model.safetensors"]["max_error"] / small["model.safetensors"]["largest_logit"]
        < 0.05
    )
    read = inference_jetson.read_model(
        tmp_path / "small", inference_jetson.read_bundle(tmp_path / "small")
    )
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
    assert (
        0
        < about["files"]["model.onnx"]["max_error"]
        < 0.005 * about["files"]["model.onnx"]["largest_logit"]
    )
    same(model, inference_jetson.run_onnx((tmp_path / "out/model.onnx").read_bytes()))


def test_time_reaches_the_graph(tmp_path):
    checkpoint(tmp_path / "run")
    model = mdlm.load(tmp_path / "run")
    torch.nn.init.normal_(model.time[2].weight, 0, 0.5)
    exported, (token, noise, see) = (
        export_jetson.Exported(model),
        export_jetson.canvases(SMALL, [(2, 20)])[0],
    )
    with torch.no_grad():
        for n in (noise, noise / 3):
            torch.testing.assert_close(exported(token, n, see), model(token, n, see))
        assert (exported(token, noise, see) - exported(token, noise / 3, see)).abs().max() > 0.1


def test_the_newest_step_is_taken_and_an_old_bundle_replaced(tmp_path):
    for step in (9, 10):
        checkpoint(tmp_path / f"run/step_{step}")
    for step, want in ((0, "step_10"), (9, "step_9")):
        about = export(tmp_path / "run", tmp_path / "out", step=step, onnx=False, torchscript=False)
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
    with pytest.raises((ValueError, OSError), match=match):
        export_jetson.main(export_jetson.Config(**{name: str(value) if isinstance(value, Path) else value
                                                   for name, value in settings.items()}))  # fmt: skip


def test_bad_input_is_named_and_nothing_is_lost(tmp_path, monkeypatch):
    model = checkpoint(tmp_path / "run")
    stops(
        "holds no config.json; copy it again, or train a model",
        ckpt=tmp_path / "none",
        out=tmp_path / "out",
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("all")
    stops("holds other things", ckpt=tmp_path / "run", out=tmp_path / "mine")
    assert (tmp_path / "mine/thesis.tex").read_text() == "all"
    stops("pass both", ckpt=tmp_path / "run", out=tmp_path / "out", bundle="out/jetson")
    with torch.no_grad():
        model.blocks[1].fc1.weight[3, 4] = 1e5
    mdlm.save(model, tmp_path / "large", b"{}")
    stops(
        "65,504 or not finite: blocks.1.fc1.weight", ckpt=tmp_path / "large", out=tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_and_leaves_the_bundle_that_was_there(tmp_path):
    checkpoint(tmp_path / "run")
    about = export(tmp_path / "run", tmp_path / "out", onnx=False, torchscript=False)
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
    monkeypatch.setattr(
        export_jetson, "lacks", lambda *packages: [p for p in packages if p == "onnx"]
    )
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
    for name in ("model_jetson.pt", "model.onnx"):
        assert (
            f"{name}: not written by torch {torch.__version__}: Constraints violated (batch)\n"
            in said
        )


def test_what_an_exporter_prints_goes_nowhere(tmp_path, monkeypatch, capsys):
    """PyTorch 2.5 writes to sys.stdout itself, which redirect_stdout(None) does not stand."""
    asked = []
    monkeypatch.setattr(
        torch.onnx,
        "export",
        lambda *_, **settings: asked.append(settings) or sys.stdout.write("noise"),
    )
    monkeypatch.setattr(export_jetson, "lacks", lambda *packages: packages)
    exported = export_jetson.Exported(mdlm.MDLM(SMALL))
    for version, by_torch_export in (("2.5.1+cu126", False), ("2.8.0a0", False), ("2.13.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert export_jetson.write_onnx(exported, (), tmp_path / "model.onnx") is None
        assert ("dynamo" in asked[-1]) == by_torch_export
    assert "noise" not in capsys.readouterr().out


def test_an_engine_is_added_to_a_bundle_from_elsewhere(tmp_path, monkeypatch, capsys):
    checkpoint(tmp_path / "run")
    model = mdlm.load(tmp_path / "run")
    about = export(tmp_path / "run", tmp_path / "out", onnx=False, torchscript=False)
    stops("holds no model.onnx", bundle=tmp_path / "out", tensorrt=True)
    about["files"]["model.onnx"] = export_jetson.about_file(b"graph", {})
    (tmp_path / "out/model.onnx").write_bytes(b"graph")
    (tmp_path / "out/bundle.json").write_text(json.dumps(about))
    stops(
        "41 tokens do not fit the model's 40 positions",
        bundle=tmp_path / "out",
        tensorrt=True,
        length=41,
    )
    by_hand = "--shapes=token:1x20,noise:1,see:1x20 --saveEngine"
    stops(
        f"no Python module tensorrt .*{by_hand}", bundle=tmp_path / "out", tensorrt=True, length=20
    )
    # what TensorRT would do, on a machine that has it
    built = {"version": "10.3", "gpu": "Orin", "length": 20}
    monkeypatch.setattr(export_jetson, "lacks", lambda *packages: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(
        export_jetson, "build_engine", lambda onnx, length: (b"plan of " + onnx, built)
    )
    monkeypatch.setattr(
        inference_jetson, "run_tensorrt", lambda plan, about: torch.no_grad()(model)
    )
    export_jetson.main(export_jetson.Config(bundle=str(tmp_path / "out"), tensorrt=True, length=20))
    about = inference_jetson.read_bundle(tmp_path / "out")
    assert about["tensorrt"] == built
    assert inference_jetson.read_file(tmp_path / "out", about, "model.trt") == b"plan of graph"
    assert about["files"]["model.trt"]["max_error"] < 0.01


def test_numpy_is_that_of_jetpacks_wheels():
    lines = (ROOT / "requirements-jetson.txt").read_text().splitlines()
    asked = [Requirement(line) for line in lines if line.startswith("numpy")]
    for python, numpy in (("3.10", "1.26.4"), ("3.12", "2.3.0")):
        held = [
            r for r in asked if r.marker is None or r.marker.evaluate({"python_version": python})
        ]
        assert [r.specifier.contains(numpy) for r in held] == [True]
        assert held[0].specifier.contains("2.3.0") == (python == "3.12")


@pytest.mark.slow
def test_from_training_to_text(tmp_path):
    """The README's path: train, export, write."""
    rng = np.random.default_rng(0)
    words = [
        words.split()
        for words in ("The A One", "small red old", "dog cat bird", "sees finds", "food. water.")
    ]
    stories = [
        " ".join(rng.choice(w) for _ in range(rng.integers(1, 5)) for w in words)
        for _ in range(300)
    ]
    (tmp_path / "stories.txt").write_text("\n<|endoftext|>\n".join(stories))
    for command in (
        "data_prep.py text stories.txt --out=rows --vocab_size=300 --seq_len=64 --heldout=0.1 --workers=1",
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
        packages = [
            f"torch=={version}",
            "-r",
            ROOT / "requirements-jetson.txt",
            "pytest",
            "packaging",
        ]
        packages += ["onnx", "onnxruntime", "onnxscript"]
        installed = subprocess.run(
            [python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True
        )
        if installed.returncode:
            pytest.skip(f"PyTorch {version} cannot be installed: {installed.stderr[-200:]}")
        bundle = f"--bundle={tmp_path / 'jetson'}"
        prompt = "--prompt=Once upon a time", "--steps=8"
        for command in (
            ["export_jetson.py", "--ckpt=weights/mdlm", f"--out={tmp_path / 'jetson'}"],
            *(
                ["inference_jetson.py", bundle, *prompt, f"--backend={kind}"]
                for kind in ("torch", "torchscript", "onnx")
            ),
            [
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "tests/test_export_jetson.py",
                "tests/test_inference_jetson.py",
            ],
        ):
            done = subprocess.run([python, *command], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            if command[0] == "inference_jetson.py":
                assert done.stdout.startswith("Once upon a time"), done.stdout
    finally:
        shutil.rmtree(environment, ignore_errors=True)
