"""Build the kernels of csrc/ for the GPU that is here, and as host code. Reads the disk.

    python setup_kernels.py build_ext --inplace    # half a minute; a C++17 compiler, pybind11
    KERNEL_ARCH="87;90" python setup_kernels.py build_ext --inplace    # by compute capability

Writes csrc/_kernels (only where nvcc is: $CUDA_HOME/bin, /usr/local/cuda/bin or the PATH) and
csrc/_kernels_emu, which the tests run on any CPU. Without a GPU it builds for 87, an Orin.
Everything is built anew each time. It runs no kernel.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
    from setuptools import setup
except ImportError as error:
    sys.exit(f"{error}; the build needs: pip install pybind11 setuptools")

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
ROOT = Path(__file__).resolve().parent
KERNELS = ("attention", "pointwise", "sampler")


def find_nvcc():
    """nvcc's path, or None."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")


def source_digest():
    """What a build is of; ops.py asks a built module for it, and has the same function."""
    digest = hashlib.sha256()
    for path in sorted(
        p for p in (ROOT / "csrc").iterdir() if p.suffix in (".cu", ".cuh", ".cpp", ".h")
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compute_capabilities():
    """["87"] and the like, asked of the driver itself: nvidia-smi is missing on an Orin and says
    N/A on a Thor.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, value, found = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for i in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), i)
        arch = ""
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            arch += str(value.value)
        found.append(arch)
    return found


def architectures():
    """["87"] and the like: KERNEL_ARCH, or those of the GPUs that are here, or an Orin's."""
    asked = os.environ.get("KERNEL_ARCH", "") or " ".join(compute_capabilities()) or "87"
    found = sorted(set(re.split(r"[;, ]+", asked.replace(".", "").replace("sm_", "").strip())))
    if not all(re.fullmatch(r"[89]\d|1\d\d", arch) for arch in found):
        advice = 'the kernels need 8.0 or newer, such as KERNEL_ARCH="87" or "87;90"'
        sys.exit(f"compute capability {asked}: {advice}")
    return found


class Build(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.force = True  # else a change of a .cu or of KERNEL_ARCH would go unseen

    def build_extension(self, extension):
        if extension.name == "csrc._kernels":
            folder = Path(self.build_temp)
            folder.mkdir(parents=True, exist_ok=True)
            # one object file per kernel, with code for each architecture
            codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures()]
            flags = ["-O3", "-std=c++17", "-Xcompiler=-fPIC", *codes]
            for name in KERNELS:
                target = folder / f"{name}.o"
                if subprocess.run(
                    [find_nvcc(), *flags, "-c", ROOT / f"csrc/{name}.cu", "-o", target]
                ).returncode:
                    problem = f"nvcc could not compile csrc/{name}.cu for {architectures()}"
                    sys.exit(f"{problem}; its messages are above")
                extension.extra_objects.append(str(target))
            # the CUDA runtime, linked statically, from where this nvcc has it
            dry = subprocess.run(
                [find_nvcc(), "--dryrun", "x.cu"], capture_output=True, text=True
            ).stderr
            libraries = next(line for line in dry.splitlines() if "LIBRARIES=" in line)
            extension.library_dirs += re.findall(r'"-L([^"]+)"', libraries)
            extension.libraries += ["cudart_static", "rt", "dl", "pthread"]
        super().build_extension(extension)


def make_extension(name, sources, **macros):
    """The module csrc.<name>, which knows by SOURCE what it was built of, and by ARCH for which
    GPUs.
    """
    macros |= {"MODULE": name, "SOURCE": f'"{source_digest()}"'}
    extension = Pybind11Extension(
        f"csrc.{name}", sources, cxx_std=17, define_macros=list(macros.items())
    )
    # fortified longjmp takes the emulation's jumps between stacks for errors
    extension.extra_compile_args += ["-O1", "-g0", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"]
    return extension


if __name__ == "__main__":
    os.chdir(ROOT)
    extensions = [
        make_extension(
            "_kernels_emu", ["csrc/bind.cpp", "csrc/emulation.cpp"], EMULATE="1", ARCH='"host"'
        )
    ]
    if find_nvcc():
        extensions.append(
            make_extension("_kernels", ["csrc/bind.cpp"], ARCH=f'"{";".join(architectures())}"')
        )
    else:
        print("nvcc not found, see CUDA_HOME: the host emulation alone is built, for tests")
    setup(name="kernels", ext_modules=extensions, cmdclass={"build_ext": Build})
    for extension in extensions:
        print(f"built {extension.name} ({dict(extension.define_macros)['ARCH']})")
