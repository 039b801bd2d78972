"""All that has to be seen once on a device that is new: ten minutes, one command, one JSON.

    python bench/first_hour.py                        # on a Jetson, a GPU box or a CPU
    python bench/first_hour.py --only build tests     # with the steps that write what these read; keeps other rows

Builds the kernels, tests them on the GPU, times kernels and whole generations, exports a bundle,
builds its TensorRT engine, writes with every backend, trains for two minutes, and tests the kernels
under compute-sanitizer. Each step is a process of its own, goes on where another failed, and says
why it cannot run here. The weights are random.

Needs requirements-jetson.txt, pytest, and for training pyarrow; on a desktop requirements-dev.txt.
After every step it writes bench/results/first_hour_<device>.json: status, seconds, numbers, and the
last lines of the output.
"""

import dataclasses
import grp
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tokenizers
import torch
from bench_jetson import device_state
from record import RESULTS, cpu_name

import export_jetson
import inference_jetson as jetson
import model_mdlm as mdlm
import runs
from csrc import ops


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "small"  # key of CONFIGS in model_mdlm.py
    train_s: int = 120  # seconds of training
    only: tuple[str, ...] = ()  # names of the steps to run; none: all
    out: str = ""  # JSON file; "" is bench/results/first_hour_<device>.json


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    command: str  # after python
    needs: tuple[str, ...] = ("GPU",)  # what `lacking` knows, or Python modules
    under: tuple[str, ...] = ()  # the command of a tool that runs it
    seconds: int = 240  # then it is asked to stop: it failed, unless it is endless
    endless: bool = False
    result: Path | None = None  # file of JSON, or of JSON lines, that it leaves


def sanitizer():
    """compute-sanitizer's path, or None."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("compute-sanitizer", path=f"{home}/bin") or shutil.which(
        "compute-sanitizer"
    )


def lacking(need):
    """Why a step that needs this cannot run here, or an empty string."""
    if need == "GPU":
        return "" if torch.cuda.is_available() else "torch sees no GPU"
    if need == "kernels":
        return ops.why_not(torch.device("cuda"))
    jetson_user = Path("/etc/nv_tegra_release").exists() and os.geteuid() != 0
    if need == "profiler":
        refused = jetson_user and int((torch.version.cuda or "13").split(".")[0]) < 13
        how = "sudo -E env PATH=$PATH python bench/bench_kernels.py"
        return f"before CUDA 13 a Jetson lets only root profile: {how}" if refused else ""
    if need == "compute-sanitizer" and not sanitizer():
        return "no compute-sanitizer in $CUDA_HOME/bin or on the PATH"
    if need == "compute-sanitizer":
        debugs = any(
            group.gr_name == "debug" and group.gr_gid in os.getgroups() for group in grp.getgrall()
        )
        how = "sudo usermod -a -G debug $USER, then log in again"
        return (
            "" if debugs or not jetson_user else f"compute-sanitizer needs the group debug: {how}"
        )
    return "" if importlib.util.find_spec(need) else f"the Python module {need} is not installed"


def make_steps(cfg, scratch):
    """All steps, in the order in which they tell most."""
    run, bundle, rows, trained = (scratch / name for name in ("run", "bundle", "rows", "trained"))
    on_gpu = "-m pytest -q -m gpu -p no:cacheprovider tests/test_golden_kernels.py"
    write = f"bench/bench_jetson.py --bundle={bundle} --lengths 64 --steps_list 25"
    # on a GPU torch.compile needs Triton
    train = f"train_gpu.py --model={cfg.model} --data={rows} --out={trained} --eval_every=100000"
    train += "" if importlib.util.find_spec("triton") else " --no-compile"
    tested = ("GPU", "kernels", "pytest")
    checked = (*tested, "compute-sanitizer")
    onnx = "onnx", *["onnxscript"] * export_jetson.by_torch_export()
    more_tests = "tests/test_kernels.py tests/test_inference_jetson.py tests/test_model_mdlm.py"
    steps = [
        Step("build", "setup_kernels.py build_ext --inplace", ()),
        Step("tests", f"{on_gpu} {more_tests}", tested),
        Step(
            "kernels", f"bench/bench_kernels.py --model={cfg.model}", ("GPU", "kernels", "profiler")
        ),
        Step("generation", f"bench/bench_jetson.py --model={cfg.model}", ("GPU", "kernels")),
        Step("export", f"export_jetson.py --ckpt={run} --out={bundle}", ()),
        Step(
            "engine", f"export_jetson.py --tensorrt --bundle={bundle}", ("GPU", "tensorrt", *onnx)
        ),
    ]
    more = {"kernels": ("GPU", "kernels"), "onnx": (*onnx, "onnxruntime")}
    more["tensorrt"] = ("GPU", "tensorrt", *onnx)
    for backend in jetson.BACKENDS[1:]:
        result = scratch / f"{backend}.json"
        command = f"{write} --backend={backend} --out={result}"
        steps.append(Step(f"write_{backend}", command, more.get(backend, ()), result=result))
    steps.append(Step("data", f"data_prep.py python --rows=padded --out={rows}", ("pyarrow",)))
    steps.append(
        Step(
            "train",
            train,
            ("pyarrow",),
            seconds=cfg.train_s,
            endless=True,
            result=trained / "log.jsonl",
        )
    )
    # the slowest tell least where all else passed
    for tool in ("memcheck", "racecheck"):
        steps.append(
            Step(tool, on_gpu, checked, under=(sanitizer(), f"--tool={tool}", "--error-exitcode=9"))
        )
    return steps


def numbers(step, output):
    """What a step measured: the entries that it printed, and its file; of a log both ends."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"name": ')]
    if step.result and step.result.exists():
        text = step.result.read_text()
        rows = list(
            map(json.loads, text.splitlines() if step.result.suffix == ".jsonl" else [text])
        )
        found += rows[:1] + rows[1:][-1:]
    return found


def run(step):
    """{"status", "seconds", "numbers", "tail"} of a step, in a process group of its own."""
    # without torch's cache of memory compute-sanitizer sees where each tensor ends
    env = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if step.under else {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes["start_new_session"] = True
    started, late = time.perf_counter(), False
    command = [*step.under, sys.executable, *step.command.split()]
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        try:
            output = process.communicate(timeout=step.seconds)[0]
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGTERM)  # the trainer then saves
            # what does not end in a minute is killed
            killer = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
            killer.start()
            output = process.communicate()[0]
            killer.cancel()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if step.endless:
        status = "passed" if late and "saved step" in output else "failed"
    else:
        status = "failed" if process.returncode else "passed"
        if late:
            status = f"failed: more than {step.seconds} s"
    row = {"status": status, "seconds": time.perf_counter() - started}
    row["numbers"] = numbers(step, output)
    return row | {"tail": output.splitlines()[-1 if status == "passed" else -12 :]}


def random_run(folder, preset):
    """A model as train_gpu.py leaves it, with random weights, the tokenizer one token an id."""
    vocab = {f"t{i}": i for i in range(preset.vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t4"))
    mdlm.save(mdlm.MDLM(preset), folder, tokenizer.to_str().encode())


def main(cfg):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))  # which also ends a step
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "CPU"
    out = Path(cfg.out or RESULTS / f"first_hour_{name.replace(' ', '_')}.json")
    device = device_state(torch.device("cuda" if cuda else "cpu"))
    device |= {"cpu": cpu_name(), "python": sys.version}
    done = runs.read_json(out)["steps"] if cfg.only and out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        random_run(Path(folder) / "run", mdlm.CONFIGS[cfg.model])
        steps = make_steps(cfg, Path(folder))
        if unknown := set(cfg.only) - {step.name for step in steps}:
            raise ValueError(
                f"--only: no step {unknown.pop()}; there are {', '.join(step.name for step in steps)}"
            )
        chosen = {*cfg.only} or {step.name for step in steps}
        chosen |= {"data"} if "train" in chosen else set()  # steps that read what others write
        chosen |= {"engine"} if "write_tensorrt" in chosen else set()
        chosen |= (
            {"export"} if any(name.startswith(("engine", "write_")) for name in chosen) else set()
        )
        done = [row for row in done if row["name"] not in chosen]
        for step in (step for step in steps if step.name in chosen):
            print(f"{step.name:18}", end="", flush=True)
            why = next(filter(None, map(lacking, step.needs)), "")
            row = {"status": f"skipped: {why}"} if why else run(step)
            done.append({"name": step.name, "command": f"python {step.command}"} | row)
            # what follows may take the machine with it
            runs.write(out, {"device": device, "steps": done})
            took = f", {row['seconds']:.0f} s" if "seconds" in row else ""
            print(row["status"] + took, flush=True)
            if "failed" in row["status"]:
                print("\n".join(f"    {line}" for line in row["tail"]), flush=True)
    print(f"wrote {out}")
    if failed := [
        row["name"] for row in done if row["name"] in chosen and "failed" in row["status"]
    ]:
        raise ValueError(f"failed: {', '.join(failed)}; their last lines are in {out}")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
