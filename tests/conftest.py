"""What tests share: scripts run from the shell, eight fake CPU devices for JAX, reference values,
emulated kernels.

JAX and PyTorch are imported where a test needs them. On a Jetson there is no JAX, and only its own
tests are collected.

These tests compile more than they compute, so JAX leaves most optimisations out, and XLA, before
jaxlib 0.11, fuses in its older way: half the time. Scripts that run from the shell are compiled as
for a user, and so are all tests, before a release, with JAX_DISABLE_MOST_OPTIMIZATIONS=0
XLA_FLAGS=--xla_cpu_use_fusion_emitters=true (without, from 0.11 on) \\
    pytest -n 2 --dist=loadfile -m "slow or not slow"
"""

import contextlib
import dataclasses
import fcntl
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

# tensors are small, and pytest -n 2 keeps both cores busy
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
FLAGS = ["--xla_force_host_platform_device_count=8"]
if (
    importlib.util.find_spec("jaxlib")
    and int(importlib.metadata.version("jaxlib").split(".")[1]) < 11
):
    # from 0.11 on there is no such flag, which would end the process
    FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "extra")]
ON_A_JETSON = "export_jetson", "inference_jetson", "kernels", "golden_kernels", "model_mdlm"
if not importlib.util.find_spec("jax"):
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.stem[5:] not in ON_A_JETSON
    ]


def pytest_configure(config):
    """A worker of pytest-xdist that dies ends the tests and names its own: a new one may hang."""
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"  # github.com/pytest-dev/pytest-xdist/issues/1378


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """In CI a case of the default run fails that takes over 10 processor seconds: mark it slow."""
    before = sum(os.times()[:4])  # with finished child processes
    result = yield
    seconds = sum(os.times()[:4]) - before
    if os.environ.get("CI") and seconds > 10 and not item.get_closest_marker("slow"):
        pytest.fail(f"took {seconds:.1f} processor seconds: shorten it, or mark it slow")
    return result


# ---- scripts, as a user runs them ----------------------------------------------------------------

AS_A_USER = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}


def command(script, *flags):
    """The command line of one of our scripts."""
    return [sys.executable, str(ROOT / script), *map(str, flags)]


def run(script, *flags, devices=1, stdin=None, **options):
    """The finished process of a script on so many fake JAX devices of a CPU; its output is text."""
    fake = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    env = os.environ | AS_A_USER | fake | {"OMP_NUM_THREADS": "1"}
    options = {
        "capture_output": True,
        "text": True,
        "env": env,
        "timeout": 300,
        "input": stdin,
    } | options
    return subprocess.run(command(script, *flags), **options)


def says(result, *parts):
    """A failed process said one clear line on standard error, and the parts are in it."""
    assert result.returncode not in (0, None), result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    line = result.stderr.strip().splitlines()[-1]
    for part in parts:
        assert part in line, line


def refused_by(script, *flags):
    """The line with which a script, in this process, refuses a command line."""
    import tyro

    import runs

    cfg = tyro.cli(script.Config, args=[*map(str, flags)], config=(tyro.conf.OmitArgPrefixes,))
    with pytest.raises((ValueError, OSError)) as error:
        script.main(runs.check(cfg))
    assert "\n" not in str(error.value)
    return str(error.value)


def losses(out):
    """{step: (loss, gradient norm)} that a trainer logged."""
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def scored_rows(out):
    """The rows of the log that hold scores, in their order, and the samples."""
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "bits_per_byte" in row], (Path(out) / "samples.txt").read_bytes()


def kill_and_resume(first, resume, kills=20, seed=0, lines=4):
    """Run the command `first`, kill -9 it at a random line of its log, go on with `resume` until
    one is not killed.

    Each process lives for 1 to `lines` lines. Asserts that it was killed `kills` times. Returns the
    first step or round that each of the processes logged.
    """
    rng, killed, line_number, first_steps = random.Random(seed), 0, 0, []
    env = os.environ | AS_A_USER | {"XLA_FLAGS": ""}
    while True:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env}
        with subprocess.Popen(resume if killed else first, **pipes) as process:
            die_after = rng.randint(1, lines) if killed < kills else None  # lines of the log
            for line in process.stdout:
                if not line.startswith((b"step ", b"round ")):
                    continue
                line_number += 1
                if line_number == 1:
                    first_steps.append(int(line.split()[1].split(b"/")[0].replace(b",", b"")))
                if die_after and line_number >= die_after:
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.read()
            error = process.stderr.read().decode()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error
        killed, line_number = killed + 1, 0
    assert killed == kills
    return first_steps


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def two_hosts(*lines):
    """Two processes of JAX that train together, on two devices each: their scripts and flags."""
    address = f"localhost:{free_port()}"
    env = os.environ | AS_A_USER | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pipes = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(command(*line, f"--hosts={address},2,{i}"), **pipes)
        for i, line in enumerate(lines)
    ]


def wait_for_step(process, step):
    for line in process.stdout:
        if line.startswith(f"step {step:,}/"):
            return
    raise AssertionError(process.stderr.read())


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_file():
    """What a file has compiled is forgotten at its end, and where it kept it: all files together
    take gigabytes.
    """
    yield
    if "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1)
        compilation_cache.reset_cache()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def broken_pipes_raise():
    """A test that leaves SIGPIPE at its default lets the broken pipe of a later one end pytest
    without a word.
    """
    yield
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN


@pytest.fixture
def no_compile_cache(monkeypatch):
    """What tests compile stays out of the user's folder of compiled programs."""
    import checkpoints

    monkeypatch.setattr(checkpoints, "keep_compiled", lambda folder: None)


# ---- trainers, in this process -------------------------------------------------------------------


@pytest.fixture(scope="session")
def code_rows(tmp_path_factory):
    """A folder of data_prep.py: rows of 64 tokens of a few standard modules; 600 ids."""
    import data_prep

    folder, library = tmp_path_factory.mktemp("code"), Path(sysconfig.get_paths()["stdlib"])
    names = "ast calendar configparser csv dataclasses difflib enum fractions functools shutil string tokenize"
    settings = {
        "vocab_size": 600,
        "seq_len": 64,
        "heldout": 0.1,
        "workers": 1,
        "shard_bytes": 60_000,
    }
    roots = tuple(str(library / f"{name}.py") for name in names.split())
    data_prep.main(data_prep.Python(roots=roots, out=str(folder / "rows"), **settings))
    return folder / "rows"


def use_one_device(monkeypatch, trainer, presets, name, model):
    """main() of a trainer in this process: one device, a preset `name` that compiles in seconds."""
    import jax

    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setitem(presets, name, model)
    monkeypatch.setitem(trainer.MICRO_BATCH, name, 4)


def resumed(trainer, out, **changes):
    """The settings with which a trainer goes on with a run."""
    import runs

    saved = runs.resumed(trainer.Config, out, trainer.MACHINE)
    return dataclasses.replace(saved, resume=str(out), **changes)


def refusal(trainer, cfg):
    """The one line with which a trainer refuses."""
    import runs

    with pytest.raises((ValueError, OSError)) as error:
        trainer.main(runs.check(cfg))
    assert "\n" not in str(error.value)
    return str(error.value)


def as_on_the_hub(folder, copy):
    """A copy of a folder of reference values, which may be read-only; the tokenizer's files have
    the id of MASK.
    """
    import model_dream

    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    if (copy / "stable_diffcoder.json").exists():
        mask_id = json.loads((copy / "stable_diffcoder.json").read_text())["mask_token_id"]
        mask = {model_dream.FAMILIES["stable_diffcoder"].mask: mask_id}
        (copy / "added_tokens.json").write_text(json.dumps(mask))
    keys = json.loads((copy / "config.json").read_text())
    if "rope_parameters" in keys:  # Nemotron's loops go beyond what its config says
        (copy / "config.json").write_text(json.dumps(keys | {"max_position_embeddings": 1 << 17}))
    return copy


def counting_mask(prepare):
    """sample_block.prepare without banned ids: MASK has its share of the softmax, as in the
    authors' code.

    For prompts of reference values alone, where it is never the argmax: a block would never be
    full.
    """

    def unbanned(*args):
        state, given, width = prepare(*args)
        return state, given._replace(banned_V=np.zeros_like(given.banned_V)), width

    return unbanned


def with_other_tokenizer(folder, copy):
    """A copy of a folder of rows whose tokenizer has other ids for the same tokens."""
    import tokenizers

    shutil.copytree(folder, copy)
    known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved = json.loads(known.to_str())
    vocab = saved["model"]["vocab"]
    vocab["e"], vocab["a"] = vocab["a"], vocab["e"]
    (copy / "tokenizer.json").write_text(json.dumps(saved))
    meta = json.loads((copy / "meta.json").read_text())
    meta["tokenizer_sha256"] = hashlib.sha256((copy / "tokenizer.json").read_bytes()).hexdigest()
    (copy / "meta.json").write_text(json.dumps(meta))
    return copy


# ---- array libraries and reference values --------------------------------------------------------


class Library:
    """Runs functions of diffusion.py in one library and precision, on NumPy's arrays."""

    def __init__(self, name, dtype):
        self.name, self.dtype = name, dtype
        self.rtol, self.atol = (1e-10, 1e-12) if dtype == "float64" else (1e-5, 1e-5)

    def __call__(self, function, *arrays):
        arrays = [np.asarray(a) for a in arrays]
        arrays = [a.astype(self.dtype) if a.dtype.kind == "f" else a for a in arrays]
        if self.name == "jax":
            import jax

            with jax.enable_x64(self.dtype == "float64"):
                # without fusion, which takes XLA most of the time to compile the bisections
                compiled = jax.jit(function, compiler_options={"xla_disable_hlo_passes": "fusion"})
                return as_numpy(compiled(*map(jax.numpy.asarray, arrays)))
        if self.name == "torch":
            import torch

            torch.compiler.reset()
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            return as_numpy(compiled(*map(torch.from_numpy, arrays)))
        return as_numpy(function(*arrays))

    def close(self, got, want, rtol=None, atol=None):
        want = np.asarray(want)
        np.testing.assert_allclose(
            got, want, rtol=max(rtol or 0, self.rtol), atol=max(atol or 0, self.atol)
        )


def as_numpy(result):
    return tuple(map(as_numpy, result)) if isinstance(result, tuple) else np.asarray(result)


@pytest.fixture(
    params=[
        ("numpy", "float64"),
        ("jax", "float32"),
        ("torch", "float32"),
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in (("numpy", "float32"), ("jax", "float64"), ("torch", "float64"))
        ),
    ],
    ids="-".join,
)
def library(request):
    """numpy, jax under jit, torch under compile(fullgraph=True); each in float64 and float32."""
    pytest.importorskip(request.param[0])
    return Library(*request.param)


@pytest.fixture(scope="module")
def exact_matmuls():
    """No product in fewer bits than its inputs have."""
    import jax

    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def shallow():
    """The Dream of most tests, with one layer; canvases of 2 x 32 share its programs."""
    from test_model_dream import SHALLOW, build

    return build(SHALLOW)


def from_hf(folder, dtype=None, run=None):
    """A Dream in the Hub's form, in `dtype`, or as it is stored."""
    import jax
    from flax import nnx

    import checkpoints
    import convert_weights
    import model_dream

    checkpoint = convert_weights.find(Path(folder))
    arrays, stored = convert_weights.open_safetensors(checkpoint, dtype)
    dtype = jax.numpy.dtype(dtype or stored)
    params = {name: jax.numpy.array(array, dtype) for name, array in arrays.items()}
    graph = model_dream.graph_of(checkpoint.cfg, run or model_dream.Compute(dtype=dtype))
    return nnx.merge(graph, checkpoints.unflatten(params))


@pytest.fixture(scope="session")
def golden_dir():
    """golden_dir("pythoncoder") is the folder of that area's reference values, under GOLDEN_DIR or
    tests/golden.
    """
    top = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parent / "golden"))

    def find(area):
        assert (top / area).is_dir(), f"no reference values in {top / area}"
        return top / area

    return find


def cases_of(path, split=str.rpartition):
    """{case: {array: value}} of a golden .npz file; the case stands before the last dot of a name,
    or the first.
    """
    arrays, cases = np.load(path), {}
    for key in arrays.files:
        case, _, name = split(key, ".")
        cases.setdefault(case, {})[name] = arrays[key]
    assert cases
    return cases


def special_ids(folder):
    """(MASK, PAD) of the reference values of masked diffusion: what q_sample.npz writes, and what
    it never masks.
    """
    golden = np.load(folder / "q_sample.npz")
    masked_BL = golden["linear.mask"]
    kept = np.unique(golden["x0"][(golden["u"] < golden["t"][:, None]) & ~masked_BL])
    (mask_id,) = np.unique(golden["linear.xt"][masked_BL])
    return int(mask_id), int(kept[0]) if len(kept) else 0


# ---- a bucket ------------------------------------------------------------------------------------

# The emulated storage does not say which generation of an object it hands out, which TensorStore
# asks for.
BUCKET = """
import sys
from gcp_storage_emulator.handlers import objects
def download(request, response, storage, *rest, plain=objects.download, **options):
    plain(request, response, storage, *rest, **options)
    if response.status < 300:
        where = request.params["bucket_name"], request.params["object_id"]
        response["x-goog-generation"] = storage.get_file_obj(*where)["generation"]
objects.download = download
from gcp_storage_emulator.server import create_server
create_server("localhost", int(sys.argv[1]), in_memory=True, default_bucket="bucket").run()
"""


@pytest.fixture
def bucket():
    """The environment of a process that finds an emulated Google Cloud Storage with gs://bucket."""
    for package in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(package)
    port = free_port()
    url = f"http://localhost:{port}"
    with subprocess.Popen(
        [sys.executable, "-c", BUCKET, str(port)], stdout=-3, stderr=-3
    ) as process:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
                break
            time.sleep(0.1)
        else:
            raise TimeoutError("the emulated storage did not begin to listen")
        yield {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "NO_GCE_CHECK": "true",
        }
        process.kill()


def copy_in_bucket(bucket, direction, here, there):
    """Copy a folder to ("put") or from ("get") the emulated storage."""
    code = f"import gcsfs; gcsfs.GCSFileSystem().{direction}({str(here)!r}, {str(there)!r}, recursive=True)"
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | AS_A_USER | bucket, check=True, timeout=100
    )


# ---- CUDA kernels, emulated on a CPU -------------------------------------------------------------


@pytest.fixture(scope="session")
def host_build(tmp_path_factory):
    """A copy of csrc/ built on a machine without nvcc: (folder that holds csrc, what the build
    printed).
    """
    if not shutil.which("g++") and not shutil.which("c++"):
        pytest.skip("no C++ compiler: the kernels cannot be emulated")
    # workers of pytest-xdist have folders of their own in one of the session: the first one builds
    # for all
    top = tmp_path_factory.getbasetemp()
    folder = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / "kernels"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "said").exists():
            shutil.copytree(
                ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("*.so", "__pycache__")
            )
            shutil.copy(ROOT / "setup_kernels.py", folder)
            env = os.environ | {"CUDA_HOME": str(folder), "PATH": "/usr/bin:/bin"}
            build = [sys.executable, "setup_kernels.py", "-q", "build_ext", "--inplace"]
            built = subprocess.run(
                build, cwd=folder, env=env, capture_output=True, text=True, timeout=300
            )
            assert built.returncode == 0, built.stderr
            (folder / "said").write_text(built.stdout)
    return folder, (folder / "said").read_text()


@pytest.fixture
def kernels(host_build):
    """csrc's kernels over the host emulation, copies landing late."""
    from csrc import ops

    path = next((host_build[0] / "csrc").glob("_kernels_emu.*so"))
    spec = importlib.util.spec_from_file_location("_kernels_emu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.set_eager_copies(False)
    return ops.Kernels(module, "cpu")


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def runs(request):
    """The kernels on the emulator, or on the GPU that is here."""
    if request.param == "emulated":
        return request.getfixturevalue("kernels")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from csrc import ops

    return ops.Kernels(ops.load(), "cuda")
