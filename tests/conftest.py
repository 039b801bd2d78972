"""Eight fake CPU devices for JAX, the repository root on the path, reference values, and the emulated CUDA kernels."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Library:
    """Runs functions of diffusion.py in one library and precision; arrays in and out are NumPy's."""

    def __init__(self, name, dtype):
        self.name, self.dtype = name, dtype
        self.rtol, self.atol = (1e-10, 1e-12) if dtype == "float64" else (1e-5, 1e-5)

    def __call__(self, function, *arrays):
        arrays = [np.asarray(a) for a in arrays]
        arrays = [a.astype(self.dtype) if a.dtype.kind == "f" else a for a in arrays]
        if self.name == "numpy":
            return jax.tree.map(np.asarray, function(*arrays))
        if self.name == "jax":
            with jax.enable_x64(self.dtype == "float64"):
                return jax.tree.map(np.asarray, jax.jit(function)(*map(jnp.asarray, arrays)))
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        return jax.tree.map(lambda t: t.numpy(), compiled(*map(torch.from_numpy, arrays)))

    def close(self, got, want, rtol=None, atol=None):
        want = np.asarray(want)
        np.testing.assert_allclose(got, want, rtol=max(rtol or 0, self.rtol), atol=max(atol or 0, self.atol))


@pytest.fixture(params=["numpy", "jax", "torch"])
def library_name(request):
    return request.param


@pytest.fixture(params=["float64", "float32"])
def library(library_name, request):
    """numpy, jax under jit, torch under compile(fullgraph=True); each in float64 and float32."""
    return Library(library_name, request.param)


@pytest.fixture(scope="session")
def golden_dir():
    """golden_dir("pythoncoder") is the folder of that area's reference values, under GOLDEN_DIR or tests/golden."""
    top = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parent / "golden"))

    def find(area):
        assert (top / area).is_dir(), f"no reference values in {top / area}"
        return top / area

    return find


@pytest.fixture(scope="session")
def host_build(tmp_path_factory):
    """A copy of csrc/ built on a machine without nvcc: (folder that holds csrc, what the build printed)."""
    if not shutil.which("g++") and not shutil.which("c++"):
        pytest.skip("no C++ compiler: the kernels cannot be emulated")
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup_kernels.py", folder)
    env = os.environ | {"CUDA_HOME": str(folder), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "setup_kernels.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return folder, built.stdout


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
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from csrc import ops

    return ops.Kernels(ops.load(), "cuda")
