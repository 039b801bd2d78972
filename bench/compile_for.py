"""Does a program fit a TPU or GPU that is not here, and what does it cost? Their compilers answer
on any machine.

    python bench/compile_for.py train --model=1b                    # a step of train_tpu.py on a TPU v6e; three minutes
    python bench/compile_for.py train --model=1b --device=v6e:4x4   # on a pod of sixteen chips; h100:8 are eight GPUs
    python bench/compile_for.py dream --model=500m --block_length=32 --micro_batch=1    # a step of train_dream.py
    python bench/compile_for.py --largest train --device=rtx4090    # the largest micro-batch that fits, by bisection
    python bench/compile_for.py generate --device=rtx4090 --int8    # Dream's denoising steps; --only=cached is one
    python bench/compile_for.py generate --only=blocks              # those of a Dream of blocks, with its exact cache
    python bench/compile_for.py generate --model=sdar_4b --int4 --device=rtx3060    # a kin of Dream's: see KIN
    python bench/compile_for.py dream --model=7b --lora_rank=16 --base_bits=4 --batch_size=1 --device=t4    # LoRA
    python bench/compile_for.py grpo --device=a100-80 --lora_rank=16    # the gradient of coupled_grpo.py on Dream 7B
    python bench/compile_for.py grpo --device=v6e:2x4 --phase=round     # and rollouts and scores: seconds of a round
    python bench/compile_for.py dump module_0000.jit_step.after_codegen.txt     # adds up a program that XLA dumped
    python bench/compile_for.py table       # ten programs on ten devices, three of KIN on five: results/by_hardware

Devices: v5e, v6e (pip install -r requirements-tpu.txt), t4, l4, rtx3060, rtx4090, a100-40, a100-80,
h100, h200 (pip install -r requirements-cuda.txt; no GPU, no driver). Prints for each program
memory, FLOPs, traffic, collectives and seconds, per chip: what compilers and data sheets say, no
measurements. In a script:

    devices = topology_devices("v6e:2x2")
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
    weights = jax.ShapeDtypeStruct((V, D), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):                                    # Pallas kernels learn the chip from the mesh
        compiled, cost, memory = compile_and_cost(jax.jit(step, donate_argnums=0).lower(weights),
        "v6e")
    print(cost.flops, cost.seconds("v6e"), memory["total_gib"], memory["usable_gib"])

roofline_s is a lower bound: every kernel computes at the chip's peak or moves its inputs and
outputs at the memory's bandwidth, whichever takes longer. For a TPU step_s is the sum of the cycles
that its compiler estimates. That is a lower bound too: Pallas kernels, scatters, sorts, SparseCore
programs, collectives and copies beside the computation carry no estimate; they are listed. For a
GPU there is none. On the GPU itself the compiler times several forms of a matrix product and takes
the fastest, so that a few MiB of temporaries can differ. Collectives are predicted apart: their
bytes at the rate of the links of the worst placed chip.

XLA's cost_analysis() counts the body of a loop once, so a model that scans over 24 layers looks 24
times too cheap, and its optimal_seconds came out negative for our train steps. Here the bodies are
multiplied by their trip counts.
"""

import collections
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.sharding import PartitionSpec as PS

sys.path.insert(0, str(Path(__file__).parents[1]))
import checkpoints
import coupled_grpo
import generate_dream
import grpo
import model_dream as md
import model_pythoncoder as pc
import runs
import sample_block
import sample_dream
import train_dream
import train_tpu

# ---- the target: chips that are not here, and their compilers --------------------------------------------------------


class Chip(typing.NamedTuple):
    kind: str  # device_kind in JAX
    flops_per_s: float  # dense bfloat16 peak
    bytes_per_s: float  # of its memory
    usable_gib: float  # what one program can use
    link_bytes_per_s: float  # one way: of one link between TPU chips; of NVLink or PCIe into a GPU
    clock_hz: float  # of a TPU: peak / (2 * matrix units * rows * columns)
    # of a GPU: compute capability, SMs, cores, KiB of shared memory and threads of an SM, MiB of L2
    cuda: tuple = ()


def gpu(kind, gib, tflops, gb_per_s, link_gb_per_s, ghz, *cuda):
    """A GPU with so much memory by its driver; scripts leave a tenth alone, see runs.command."""
    return Chip(
        kind, 1e12 * tflops, 1e9 * gb_per_s, 0.9 * gib, 1e9 * link_gb_per_s, 1e9 * ghz, cuda
    )


# TPUs: cloud.google.com/tpu/docs/v5e and v6e; the usable memory is from the compiler's own
# out-of-memory message. GPUs: NVIDIA's data sheets and architecture white papers, peaks without
# sparsity and with float32 sums; per SM by the table of compute capabilities in the CUDA
# programming guide. A T4 has no bfloat16: XLA computes in float32 there.
CHIPS = {
    "v5e": Chip("TPU v5 lite", 197e12, 819e9, 15.75, 50e9, 197e12 / (2 * 4 * 128 * 128)),
    "v6e": Chip("TPU v6 lite", 918e12, 1640e9, 31.24, 100e9, 918e12 / (2 * 4 * 256 * 256)),
    "t4": gpu("Tesla T4", 14.6, 8.1, 320, 16, 1.59, 7.5, 40, 64, 64, 1024, 4),
    "l4": gpu("NVIDIA L4", 22.0, 121, 300, 32, 2.04, 8.9, 58, 128, 100, 1536, 48),
    "rtx3060": gpu(
        "NVIDIA GeForce RTX 3060", 11.6, 25.5, 360, 32, 1.78, 8.6, 28, 128, 100, 1536, 2.25
    ),
    "rtx4090": gpu(
        "NVIDIA GeForce RTX 4090", 23.6, 165, 1008, 32, 2.52, 8.9, 128, 128, 100, 1536, 72
    ),
    "a100-40": gpu(
        "NVIDIA A100-SXM4-40GB", 39.4, 312, 1555, 300, 1.41, 8.0, 108, 64, 164, 2048, 40
    ),
    "a100-80": gpu(
        "NVIDIA A100-SXM4-80GB", 79.2, 312, 2039, 300, 1.41, 8.0, 108, 64, 164, 2048, 40
    ),
    "h100": gpu("NVIDIA H100 80GB HBM3", 79.1, 989, 3352, 450, 1.98, 9.0, 132, 128, 228, 2048, 50),
    "h200": gpu("NVIDIA H200", 139.8, 989, 4800, 450, 1.98, 9.0, 132, 128, 228, 2048, 50),
}


def description(chip):
    """What XLA's compiler asks of a GPU that is not here, as text (its GpuTargetConfigProto)."""
    capability, sms, cores, shared_kib, threads, l2_mib = chip.cuda
    major, minor = divmod(round(10 * capability), 10)
    extension = " feature_extension: ACCELERATED_FEATURES" * (major == 9)  # sm_90a
    info = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": threads,
        "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "core_count": sms, "fpus_per_core": cores, "clock_rate_ghz": chip.clock_hz / 1e9,
        "shared_memory_per_block": 49152, "shared_memory_per_core": 1024 * shared_kib,
        "shared_memory_per_block_optin": 1024 * (shared_kib - (major > 7)),
        "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
        "memory_bandwidth": int(chip.bytes_per_s), "l2_cache_size": int(2**20 * l2_mib),
        "device_memory_size": int(2**30 * chip.usable_gib / 0.9),
        "cuda_compute_capability": f"{{ major: {major} minor: {minor}{extension} }}",
    }  # fmt: skip
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    versions = (
        "dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 patch: 0 }"
    )
    return f'gpu_device_info {{ {fields} }} platform_name: "CUDA" {versions} device_description_str: "{chip.kind}"'


def place(name):
    """(its Chip, rows, columns) of a device: v6e, v5e:2x4, rtx4090, h100:8. Else ValueError."""
    chip, _, grid = name.partition(":")
    tpu = chip in CHIPS and not CHIPS[chip].cuda
    if chip not in CHIPS or (
        grid and not re.fullmatch(r"[1-9]\d*x[1-9]\d*" if tpu else r"[1-9]\d*", grid)
    ):
        raise ValueError(
            f"unknown device {name!r}; one of {', '.join(CHIPS)}, or several: v6e:2x2, h100:8"
        )
    rows, columns = map(int, (grid or "1x1").split("x")) if tpu else (1, int(grid or 1))
    if tpu and rows * columns > 8 and (rows % 2 or columns % 2):
        raise ValueError(
            f"device {name!r}: beyond eight chips hosts are 2 x 2, so rows and columns must be even"
        )
    return CHIPS[chip], rows, columns


def check_compiler(name):
    """ImportError if the compiler for a device is not installed."""
    if place(name)[0].cuda:
        missing = not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
    else:
        missing = not importlib.util.find_spec("libtpu") and "TPU_LIBRARY_PATH" not in os.environ
    if missing:
        file = f"requirements-{'cuda' if place(name)[0].cuda else 'tpu'}.txt"
        raise ImportError(
            f"compiling for {name} needs a compiler that is not installed: pip install -r {file}"
        )


def topology_devices(name):
    """Devices to shard and lower for: v6e, v5e:2x4, v6e:16x16, rtx4090, h100:8; there need be none
    of them.

    Up to eight TPU chips are one host, more are hosts of 2 x 2. Sets libtpu's environment variables
    where they are
    unset: call it in a process that only compiles, with JAX itself on the CPU (JAX_PLATFORMS=cpu).
    """
    check_compiler(name)
    chip, rows, columns = place(name)
    # without these libtpu looks for the machine's TPU, and only one process at a time may load it
    for variable in (
        "TPU_SKIP_MDS_QUERY=1",
        "TPU_WORKER_HOSTNAMES=localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD=1",
    ):
        os.environ.setdefault(*variable.split("="))
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-1")
    from jax.experimental import topologies  # here, since it loads libtpu

    if chip.cuda:
        jax.devices("cpu")  # JAX finds its plug-ins
        options = {"target_config": description(chip), "topology": f"1x1x{columns}"}
        return topologies.get_topology_desc("", "cuda", **options).devices
    host = (rows, columns, 1) if rows * columns <= 8 else (2, 2, 1)
    name = f"{name.partition(':')[0]}:{rows}x{columns}"
    return topologies.get_topology_desc(
        name, "tpu", chips_per_host_bounds=host, num_slices=1
    ).devices


def link_rate(name):
    """Bytes per second that the worst placed chip takes in from the others.

    TPU chips have a link to each neighbour. A side of 16 is a ring, a shorter one ends in corners.
    """
    chip, *sides = place(name)
    links = 1 if chip.cuda else sum(2 if side == 16 else 1 for side in sides if side > 1)
    return chip.link_bytes_per_s * links


def collective_seconds(cost, name):
    """Predicted seconds of the collectives if nothing hides them: bytes / link_rate(), all chips
    taking part in each.

    Of an array of n chips' parts a chip takes in all but its own, (n - 1) / n; an all-reduce is two
    such passes.
    """
    _, rows, columns = place(name)
    share = 1 - 1 / (rows * columns)
    parts = {op: share * (2 if op == "all-reduce" else 1) for op in COLLECTIVES} | {
        "collective-permute": 1
    }
    total = sum(parts[op] * size for op, size in cost.collectives.items())
    return total / link_rate(name) if total else 0.0


def compile_and_cost(lowered, device="v6e", compiler_options=None):
    """Compile jax.jit(f).lower(...) for the device of its arguments; returns (compiled, Cost,
    memory).

    memory is per chip, in bytes: arguments, temporaries, outputs, aliased (outputs in donated
    arguments) and code; then total_gib = arguments + temporaries + outputs - aliased + code, and
    usable_gib of the chip. If that is not enough, the TPU's compiler raises
    jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED, with the memory that it would need.
    """
    chip, *_ = place(device)
    # For a TPU the cycles are only in the text that the compiler dumps when it has placed and
    # scheduled everything.
    with tempfile.TemporaryDirectory() as folder:
        dump = {} if chip.cuda else {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=dump | (compiler_options or {}))
        texts = [compiled.as_text()] if chip.cuda else list(Path(folder).glob("*after_codegen.txt"))
        if len(texts) != 1:
            raise ValueError(
                f"{len(texts)} dumps *after_codegen.txt, expected 1: not lowered for topology_devices()?"
            )
        cost = cost_of(texts[0] if chip.cuda else texts[0].read_text(), chip)
    stats = compiled.memory_analysis()
    names = "arguments", "temporaries", "outputs", "aliased", "code"
    kinds = "argument", "temp", "output", "alias", "generated_code"
    pairs = zip(names, kinds, strict=True)
    memory = {name: getattr(stats, f"{kind}_size_in_bytes") for name, kind in pairs}
    memory["total_gib"] = (sum(memory.values()) - 2 * memory["aliased"]) / 2**30
    return compiled, cost, memory | {"usable_gib": chip.usable_gib}


# ---- reading HLO text ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cost:
    """What one run of a program costs on one chip. Arrays count without padding to tiles."""

    # of matrix products and convolutions, not of those inside Pallas kernels or of cuDNN
    flops: int = 0
    cycles: int = 0  # sum of the compiler's estimates, of a TPU's alone
    # read from and written to memory; of a slice only the slice, between arrays in VMEM nothing
    bytes: int = 0
    # sum over the kernels of FLOPs at the peak or bytes at the bandwidth: the longer
    roofline_s: float = 0.0
    collectives: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )  # operation -> bytes, the larger of input and output
    collective_counts: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )  # operation -> times it runs
    ops: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )  # op_name (the path in the JAX program) -> cycles
    custom_calls: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )  # what the compiler cannot look into, on a TPU all else without estimate -> times
    unknown_loops: int = 0  # loops whose trip count is not a constant; counted as one round

    def add(self, other, times=1):
        for name, value in vars(other).items():
            if isinstance(value, dict):
                getattr(self, name).update({key: times * count for key, count in value.items()})
            else:
                setattr(self, name, getattr(self, name) + times * value)

    def seconds(self, chip="v6e"):
        """Estimated seconds, cycles / clock; chip is in CHIPS, or as v6e:4x4. A GPU's are 0."""
        return self.cycles / place(chip)[0].clock_hz


@dataclasses.dataclass(eq=False)
class Instruction:
    name: str
    type: str  # "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}" or a tuple of such; S(1) is VMEM, no S is HBM
    op: str
    inside: str  # between its parentheses: the operands, or the literal of a constant or parameter
    tail: str  # attributes, metadata and backend_config
    is_root: bool
    block: dict  # the computation that it belongs to, {name: Instruction}
    computations: dict  # the whole module, {name: block}

    @functools.cached_property
    def operands(self):
        names = re.findall(r"%([\w.\-]+)", self.inside)
        return [self.block[name] for name in names if name in self.block]

    def attribute(self, pattern, default=""):
        found = re.search(pattern, self.tail)
        return found.group(1) if found else default

    def called(self, attribute):
        """The computations in attribute=%name or attribute={%name, %name}."""
        names = re.findall(r"[\w.\-]+", self.attribute(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)"))
        return [self.computations[name] for name in names]

    def constant(self):
        """Value of an integer constant, also behind a copy; None for anything else."""
        if self.op in ("copy", "bitcast", "convert"):
            return self.operands[0].constant()
        if self.op == "constant" and re.fullmatch(r"-?\d+", self.inside):
            return int(self.inside)
        return None


def parse(hlo_text):
    """The entry computation of an HLO module."""
    computations, entry, block = {}, None, None
    for line in re.sub(r"/\*.*?\*/", "", hlo_text).splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith("HloModule"):
            block = computations[header.group(2)] = {}
            entry = block if header.group(1) else entry
        # the type ends before a word with an opening parenthesis that follows a closing bracket and
        # a space
        found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?[\])}]) ([a-z][\w\-]*)\((.*)", line)
        if found and block is not None:
            root, name, type_, op, rest = found.groups()
            depth, end = 1, 0
            while depth:
                depth += {"(": 1, ")": -1}.get(rest[end], 0)
                end += 1
            block[name] = Instruction(
                name, type_, op, rest[: end - 1], rest[end:], bool(root), block, computations
            )
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return entry


def shapes(type_):
    """All arrays of a type, tuples flattened: [(dims, bytes, whether in HBM)]."""
    out = []
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", type_):
        dims = [int(d) for d in dims.split(",") if d]
        # bf16 16, f8e4m3fn 8, token 0
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or [0])[0])
        out.append((dims, math.prod(dims) * bits // 8, not re.search(r"S\([1-9]", layout)))
    return out


def size(ins, hbm_only=False):
    return sum(count for _, count, in_hbm in shapes(ins.type) if in_hbm or not hbm_only)


def root_of(block):
    return next(ins for ins in block.values() if ins.is_root)


# ---- the cost of one instruction -----------------------------------------------------------------------------------

# in the attributes of a call of cuBLAS: all products on a T4, elsewhere few
CUBLAS = '"gemm_backend_config"'


def matmul_flops(ins):
    """2 x multiply-adds of a dot, a call of cuBLAS or a convolution, into which a TPU's compiler
    turns nearly all dots.

    There a batch dimension of a dot becomes a spatial one, with a window as wide as the batch,
    dilated or padded so that one tap per output meets data. Therefore a tap counts only where it
    falls on an element of the input.
    """
    left, right, out = (shapes(i.type)[0][0] for i in (*ins.operands[:2], ins))
    if ins.op != "convolution":
        contracted = ins.attribute(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
        return 2 * math.prod(out) * math.prod(left[int(d)] for d in re.findall(r"\d+", contracted))
    left_label, right_label, out_label = re.search(
        r"dim_labels=(\w+)_(\w+)->(\w+)", ins.tail
    ).groups()
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", ins.attribute(r"window=\{([^}]*)\}")))
    features = [d for d, label in zip(out, out_label, strict=True) if not label.isdigit()]
    flops = 2 * math.prod(features) * right[right_label.index("i")]
    for axis in range(len(out) - 2):

        def at(key, default=1, axis=axis):  # window={size=2x4 stride=1x3 pad=0_0x0_0 ...}
            return int(window[key].split("x")[axis].split("_")[0]) if key in window else default

        tap_W = np.arange(at("size")) * at("rhs_dilate")
        start_O = np.arange(out[out_label.index(str(axis))]) * at("stride")
        position_OW = start_O[:, None] + tap_W - at("pad", 0)
        last = (left[left_label.index(str(axis))] - 1) * at("lhs_dilate")
        whole_OW = position_OW % at("lhs_dilate") == 0
        flops *= int(np.sum((position_OW >= 0) & (position_OW <= last) & whole_OW))
    return flops


def trip_count(ins):
    """Rounds of a while loop; None where they depend on data. A loop that may stop early (i < n and
    ...) counts n.

    TPU dumps do not say it, so: the condition compares an element of the loop's tuple with a
    constant, the body adds a constant to that element, and the operand says where it starts (else
    0: JAX counts from 0).
    """
    known = ins.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    start, update = ins.operands[0], root_of(ins.called("body")[0])
    for compare in [i for i in ins.called("condition")[0].values() if i.op == "compare"]:
        element, bound = compare.operands
        if element.constant() is not None:
            element, bound = bound, element
        if element.op != "get-tuple-element" or bound.constant() is None or update.op != "tuple":
            continue
        index = int(element.attribute(r"index=(\d+)"))
        new = update.operands[index]
        step = [i.constant() for i in new.operands if i.constant()]
        if new.op in ("add", "subtract") and step:
            first = start.operands[index].constant() or 0 if start.op == "tuple" else 0
            rounds = (bound.constant() - first) / (step[0] if new.op == "add" else -step[0])
            inclusive = compare.attribute(r"direction=(\w+)") in ("LE", "GE")
            return max(0, math.floor(rounds) + 1 if inclusive else math.ceil(rounds))
    return None


SLICES = "slice", "dynamic-slice", "gather"  # read as much as they return
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # write in place as much as this operand holds


def read_bytes(ins):
    """What a fused computation reads of its array ins: the slices that are taken, or all."""
    total = 0
    for user in [i for i in ins.block.values() if ins in i.operands]:
        if user.op in SLICES and user.operands[0] is ins:
            total += size(user)
        elif user.op == "bitcast":
            total += read_bytes(user)
        elif user.op == "fusion":
            inner = [i for i in user.called("calls")[0].values() if i.op == "parameter"]
            total += sum(read_bytes(i) for i in inner if user.operands[int(i.inside)] is ins)
        elif user.op not in UPDATES or user.operands[0] is not ins:
            return size(ins)
    return min(total, size(ins))


def written_bytes(ins):
    """What a fused computation writes for its result ins: the part changed in place, or all."""
    if ins.op == "bitcast":
        return written_bytes(ins.operands[0])
    if ins.op == "fusion":
        return written_bytes(root_of(ins.called("calls")[0]))
    return size(ins.operands[UPDATES[ins.op]] if ins.op in UPDATES else ins)


def hbm_bytes(ins):
    """Bytes that an instruction moves from and to HBM."""
    if ins.op == "copy-start":  # its type is (destination, source, flag)
        return sum(count for _, count, in_hbm in shapes(ins.type)[:2] if in_hbm)
    if ins.op == "custom-call" and CUBLAS in ins.tail:  # its type is (result, workspace)
        return shapes(ins.type)[0][1] + sum(map(size, set(ins.operands)))
    if ins.op in SLICES:
        return size(ins) * (size(ins.operands[0], hbm_only=True) > 0) + size(ins, hbm_only=True)
    if ins.op in UPDATES:
        update = ins.operands[UPDATES[ins.op]]
        return size(update, hbm_only=True) + size(update) * (size(ins, hbm_only=True) > 0)
    if ins.op != "fusion":
        return size(ins, hbm_only=True) + sum(size(i, hbm_only=True) for i in set(ins.operands))
    body = ins.called("calls")[0]
    results = root_of(body).operands if root_of(body).op == "tuple" else [root_of(body)]
    inputs = [i for i in body.values() if i.op == "parameter"]
    read = [read_bytes(i) for i in inputs if size(ins.operands[int(i.inside)], True)]
    return sum(read) + sum(
        written_bytes(i) for i, out in zip(results, shapes(ins.type), strict=False) if out[2]
    )


# ---- the cost of a program -----------------------------------------------------------------------------------------

COLLECTIVES = (
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute".split()
)
FREE_OPS = (
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id".split()
)
FREE_CALLS = "AllocateBuffer ConcatBitcast AssumeGatherIndicesInBound Sharding".split()


def cost_of(hlo_text, chip=CHIPS["v6e"]):
    """The Cost of one run of an HLO module on a chip, given a TPU's dump *after_codegen.txt, or
    as_text() for a GPU.

    The body of a while loop counts as often as it runs, of a conditional the dearest branch. What
    runs asynchronously counts once, at its start, without cycles since it runs beside the rest.
    Raises ValueError if the text is not HLO.
    """
    done = {}  # computations that have been added up, by identity

    def total(block, fused=False):
        """Cost of a computation; inside a fusion, which has cycles and bytes, only the rest."""
        if (id(block), fused) not in done:
            cost = done[id(block), fused] = Cost()
            for ins in block.values():
                add(cost, ins, ins.op.removesuffix("-start"), fused)
        return done[id(block), fused]

    def add(cost, ins, op, fused):
        if ins.op in FREE_OPS or ins.op.endswith(("-done", "-update")):
            return
        # what calls a computation costs what that does
        if op == "while":
            rounds = trip_count(ins)
            cost.unknown_loops += rounds is None
            return cost.add(total(ins.called("body")[0], fused), 1 if rounds is None else rounds)
        if op == "conditional":
            keys = "branch_computations", "true_computation", "false_computation"
            branches = [total(block, fused) for key in keys for block in ins.called(key)]
            return cost.add(
                max(branches, key=lambda branch: (branch.cycles, branch.flops, branch.bytes))
            )
        if op == "call" or ins.called("called_computations"):
            return cost.add(
                total((ins.called("to_apply") or ins.called("called_computations"))[0], fused)
            )
        if op == "async":  # beside the rest: it adds no time
            return cost.add(
                dataclasses.replace(
                    total(ins.called("calls")[0], fused), cycles=0, roofline_s=0, ops={}
                )
            )
        # FLOPs and collectives
        before = cost.flops
        if op in ("dot", "convolution") or CUBLAS in ins.tail:
            cost.flops += matmul_flops(ins)
        elif op == "fusion":
            cost.add(total(ins.called("calls")[0], fused=True))
        elif op in COLLECTIVES:
            taken, given = sum(size(i) for i in ins.operands), size(ins)
            # the result of a start is (input, output, flags)
            if op != ins.op and op != "all-reduce":
                given = sum(count for dims, count, _ in shapes(ins.type) if dims) - taken
            # how the TPU writes a reduce-scatter
            if fused and root_of(ins.block).op == "dynamic-slice":
                op = "reduce-scatter"
            cost.collectives[op] += max(taken, given)
            cost.collective_counts[op] += 1
        # traffic and time; what has no estimate is listed by name
        if fused or ins.attribute(r'custom_call_target="([^"]*)"') in FREE_CALLS:
            return
        moved = hbm_bytes(ins)
        cost.bytes += moved
        if op not in COLLECTIVES:
            cost.roofline_s += max(
                (cost.flops - before) / chip.flops_per_s, moved / chip.bytes_per_s
            )
        cycles = int(ins.attribute(r'"estimated_cycles":"(\d+)"', 0))
        if chip.cuda:
            cost.custom_calls.update(
                [ins.attribute(r'custom_call_target="([^"]*)"')] if op == "custom-call" else []
            )
        elif 0 < cycles < 2**62:  # SparseCore programs say 2**63 - 1
            cost.cycles += cycles
            cost.ops[ins.attribute(r'op_name="([^"]*)"', ins.op)] += cycles
        elif op in ("custom-call", "scatter", "gather", "sort") or (
            op == "fusion" and "calls=%all-" not in ins.tail
        ):
            # a Pallas kernel appears under its own name
            name = re.sub(r"(\.\d+|\.cloned?)*$", "", ins.name)
            # it puts one in place of softmax attention
            name = "libtpu's own kernel" if name == "name" else name
            cost.custom_calls[name] += 1

    return total(parse(hlo_text))


# ---- our programs --------------------------------------------------------------------------------------------------


def on_chip(name):
    """array(dtype, *shape) on the one chip of a device."""
    (device,) = topology_devices(name)
    at = jax.sharding.SingleDeviceSharding(device)
    return lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=at)


def platform(name):
    """model_dream.platform_of the devices of this name."""
    cuda = place(name)[0].cuda
    return f"gpu {cuda[0]}" if cuda else "tpu"


def report(name, lowered, device, beside_gib=0.0, **facts):
    """Compile a traced program, print what the compiler says of it, and return that as a row.

    beside_gib is what lies in memory beside the program. Where the TPU's compiler finds that a
    program does not fit, it says no more than the memory that is missing.
    """
    print(f"{name}: compiling for {device}", flush=True)
    chip, row = place(device)[0], {"program": name, "device": device, **facts}
    try:
        _, cost, memory = compile_and_cost(lowered, device)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"  does not fit: {runs.first_line(error)}")
        because = runs.first_line(error)
        return row | {"fits": False, "usable_gib": chip.usable_gib, "because": because}
    row |= {
        f"{part}_gib": size / 2**30 for part, size in memory.items() if not part.endswith("_gib")
    }
    total_gib = memory["total_gib"]
    row |= {"hbm_gib": total_gib, "beside_gib": beside_gib, "total_gib": total_gib + beside_gib}
    row |= {"usable_gib": chip.usable_gib, "fits": bool(row["total_gib"] <= chip.usable_gib)}
    row |= {"step_s": cost.seconds(device)} if cost.cycles else {}
    row |= {
        "roofline_s": cost.roofline_s,
        "collective_s": collective_seconds(cost, device),
        "flops_per_chip": cost.flops,
        "hbm_bytes_per_chip": cost.bytes,
        "collective_gb": {op: round(size / 1e9, 3) for op, size in cost.collectives.items()},
        "collective_counts": dict(cost.collective_counts),
        "without_estimate": dict(cost.custom_calls),
        "loops_counted_once": cost.unknown_loops,
    }
    row["predicted_s"] = row.get("step_s", row["roofline_s"]) + row["collective_s"]
    notes = {"step_s": "(compiler estimate)", "roofline_s": "(lower bound)"}
    notes["predicted_s"] = "(with collectives)"
    for key, value in row.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"  {key:22} {shown} {notes.get(key, '')}")
    for path, cycles in cost.ops.most_common(12):
        print(f"  {cycles / cost.cycles:6.1%}  {path}")
    verdict = "fits" if row["fits"] else "does not fit"
    print(f"  {verdict}: {row['total_gib']:.2f} of {chip.usable_gib:.2f} GiB", flush=True)
    return row


SIZES = 1, 2, 4, 8, 16, 32, 64  # micro-batches that --largest tries


def largest(program):
    """The row of the largest micro-batch of SIZES that fits, by bisection; of the smallest if none
    does.

    It also says what was compiled: {"largest": n, 0 if none fits, "tried": {n: GiB, or null where
    it is unknown}}.
    """
    fits, fails, found, tried = -1, len(SIZES), None, {}
    while fails - fits > 1:
        i = (fits + fails) // 2
        row = max(
            program.sized(SIZES[i]).rows(),
            key=lambda row: (not row["fits"], row.get("total_gib", math.inf)),
        )
        tried[SIZES[i]] = row.get("total_gib")
        fits, fails = (i, fails) if row["fits"] else (fits, i)
        found = row if row["fits"] or i == 0 else found
    print(f"the largest micro-batch that fits: {SIZES[fits] if fits >= 0 else 'none'}")
    return [found | {"largest": SIZES[fits] if fits >= 0 else 0, "tried": tried}]


Device = typing.Annotated[str, tyro.conf.arg(aliases=["--topology"])]


@dataclasses.dataclass(frozen=True)
class CoderSettings(train_tpu.Config):
    device: tyro.conf.Suppress[str] = ""  # where it would train


@dataclasses.dataclass(frozen=True)
class DreamSettings(train_dream.Config):
    device: tyro.conf.Suppress[str] = ""  # where it would train


def micro_batches(settings, device, rows):
    """The settings with micro-batches of `rows` on each device, and a batch that they divide."""
    _, height, width = place(device)
    step = rows * max(1, height * width // settings.tensor)
    batch = -(-(settings.batch_size or 64) // step) * step
    return dataclasses.replace(settings, micro_batch=rows, batch_size=batch)


@dataclasses.dataclass(frozen=True)
class Train:
    """A step of train_tpu.py, with its flags; their defaults are those of the device."""

    device: Device = "v6e"  # what to compile for: v6e, v5e:2x4, rtx4090, h100:8 ...
    settings: CoderSettings = dataclasses.field(default_factory=CoderSettings)

    def sized(self, rows):
        return dataclasses.replace(self, settings=micro_batches(self.settings, self.device, rows))

    def rows(self):
        return [train_step(train_tpu, pc, self.settings, self.device)]


@dataclasses.dataclass(frozen=True)
class TrainDream:
    """A step of train_dream.py, with its flags; their defaults are those of the device."""

    device: Device = "v6e"  # what to compile for: v6e, v5e:2x4, rtx4090, h100:8 ...
    settings: DreamSettings = dataclasses.field(default_factory=DreamSettings)

    def sized(self, rows):
        return dataclasses.replace(self, settings=micro_batches(self.settings, self.device, rows))

    def rows(self):
        return [train_step(train_dream, md, self.settings, self.device)]


def train_step(trainer, family, settings, device):
    """The figures of a step of a trainer, train_tpu or train_dream."""
    chip, devices = place(device)[0], topology_devices(device)
    settings = dataclasses.replace(settings, lr=3e-4, steps=1000, warmup=100)  # change no figure
    memory = {} if family is md else {"memory": chip.usable_gib}
    cfg, model, run, mesh = trainer.settle(settings, devices, **memory)
    trainer.exact_products(cfg.dtype)
    optimizer = trainer.make_optimizer(run.dtype, muon=cfg.optimizer == "muon")
    form = (cfg.lora_rank, cfg.base_bits) if family is md else ()
    shapes = checkpoints.state_shapes(family, model, optimizer, mesh, run.dtype, *form)
    step = trainer.lower_step(cfg, family.graph_of(model, run), optimizer, shapes, mesh, **memory)
    tokens = cfg.batch_size * cfg.seq_len
    flops = trainer.step_flops(cfg, model)
    facts = {"tokens": tokens, "micro_batch": cfg.micro_batch}
    facts |= {"seq_len": cfg.seq_len, "model_flops": flops}
    row = report(f"{cfg.model} train step", step, device, **facts)
    if "predicted_s" in row:
        row["tok_per_s"] = tokens / row["predicted_s"]
        row["mfu"] = flops / len(devices) / row["predicted_s"] / chip.flops_per_s
        print(
            f"  {row['tok_per_s']:,.0f} tokens per second, {row['mfu']:.1%} of the peak, predicted"
        )
    return row


QWEN3 = {"family": "sdar", "vocab": 151_936, "positions": 32_768, "mask_id": 151_669, **md.SDAR}
YARN = (
    ("factor", 16.0),
    ("original_max_position_embeddings", 16_384),
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
)
YARN = *YARN, ("mscale", 1.0), ("mscale_all_dim", 1.0), ("llama_4_scaling_beta", 0.1)
MINISTRAL3 = {
    "family": "nemotron", "vocab": 131_072, "heads": 32, "kv_heads": 8, "positions": 262_144, "eps": 1e-5, "rope": YARN,
    "mask_id": 100, "bos_id": 1, "pad_id": 11, "eos_id": 11, **md.NEMOTRON,
}  # fmt: skip
LLADA_IDS = {"mask_id": 126_336, "pad_id": 126_081, "bos_id": 126_080, "eos_id": 126_081}
# Dream's kin by their config.json on the Hub; that of SDAR-1.7B was not read, its sizes are
# Qwen3-1.7B's
KIN = {
    "llada_8b": md.DreamConfig(
        126_464,
        4096,
        32,
        32,
        32,
        128,
        12_288,
        5e5,
        4096,
        1e-5,
        family="llada",
        **LLADA_IDS,
        **md.PLAIN,
    ),
    "sdar_8b": md.DreamConfig(width=4096, layers=36, heads=32, kv_heads=8, ffn=12_288, **QWEN3),
    "sdar_4b": md.DreamConfig(width=2560, layers=36, heads=32, kv_heads=8, ffn=9728, **QWEN3),
    "sdar_1.7b": md.DreamConfig(
        width=2048, layers=28, heads=16, kv_heads=8, ffn=6144, tie=True, **QWEN3
    ),
    "nemotron_14b": md.DreamConfig(width=5120, layers=40, ffn=16_384, theta=1e9, **MINISTRAL3),
    "nemotron_8b": md.DreamConfig(width=4096, layers=34, ffn=14_336, **MINISTRAL3),
    "nemotron_3b": md.DreamConfig(width=3072, layers=26, ffn=9216, **MINISTRAL3),
}
md.CONFIGS |= KIN  # --model

STEPS = {
    "canvas": "a step over the whole canvas",
    "opens": "the pass that opens a block",
    "cached": "a cached step over a block",
}


def denoising(sampler, params, mesh, rows, length, begin):
    """(positional, by name) arguments of sample_dream.fill_block: masks after `begin` tokens."""
    model, rule = sampler.cfg, sampler.rule
    token_BL = np.full((rows, length), model.mask_id)
    token_BL[:, :begin] = model.bos_id
    state, given, ((_, _, width), *_) = sample_dream.prepare(
        model, rule, token_BL, np.ones(token_BL.shape, bool)
    )
    # weights as they lie on the mesh; all else whole on each chip
    inputs = params, *jax.eval_shape(lambda: (state, given))
    everywhere = jax.NamedSharding(mesh, PS())
    places = md.shardings(mesh, params), *jax.tree.map(lambda _: everywhere, inputs[1:])
    put = lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at)  # noqa: E731
    return jax.tree.map(put, inputs, places), {"sampler": sampler, "width": width}


def lowered_step(name, mesh, inputs, static):
    """One of STEPS, traced, of such arguments. The last two are parts of one program."""
    if name == "canvas":
        return sample_dream.fill_block.lower(*inputs, **static)
    sampler, width = static["sampler"], static["width"]
    model, (rows, length) = sampler.cfg, inputs[1].token_BL.shape

    def step(params, state, given, cache=None):
        return sampler.step(nnx.merge(sampler.graph, params), state, given, cache, width)

    step = jax.jit(step, donate_argnames="cache")
    if name == "opens":
        return step.lower(*inputs)
    at = jax.NamedSharding(mesh, PS(md.BATCH, "tensor"))
    shape = rows, model.kv_heads, length, model.head_size
    layer = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at),) * 2  # keys and values
    return step.lower(*inputs, [layer] * model.layers)


@dataclasses.dataclass(frozen=True)
class Generate:
    """The denoising steps of generate_dream.py: by default, and with blocks, a cache and a threshold.

    One round of each loop counts: a step, with the logits of a block, or of as many positions as
    Compute.head_positions in model_dream.py; a step of a canvas with more masks than that takes a
    little longer. Several chips share the heads of each layer, up to four, and then the texts of
    --batch_size.
    """

    device: Device = "v6e"  # what to compile for: v6e, v5e:2x4, rtx3060:2 ...
    model: str = "7b"  # key of CONFIGS in model_dream.py, or of KIN
    int8: bool = False  # matrices in 8 bits, the rest in bfloat16
    # matrices of the layers in 4 bits, embedding and head in 8, the rest in bfloat16
    int4: bool = False
    batch_size: int = 1  # texts that are filled together
    length: int = 768  # tokens of the canvas
    # tokens of a block; 0: without blocks, the first of the three steps alone
    block_length: int = 32
    # one of the three steps; blocks: the passes of a Dream trained in blocks, with its exact cache;
    # "" all three. A model with blocks of its own has the last two of them
    only: typing.Literal[("", *STEPS, "blocks")] = ""

    def sized(self, rows):
        whole = "" if md.CONFIGS[self.model].block_length else "canvas"
        return dataclasses.replace(self, batch_size=rows, only=self.only or whole)

    def mesh(self):
        """The mesh of the device's chips that generate_dream.py would take for this batch."""
        return checkpoints.inference_mesh(
            md.CONFIGS[self.model], topology_devices(self.device), self.batch_size
        )

    def program(self, mesh, cached):
        """Arguments of sample_dream.fill_block, as generate_dream.py has them: (positional, by name)."""
        model = md.CONFIGS[self.model]
        # the settings of the command line
        settings = {name: getattr(generate_dream.Config, name) for name in ("temperature", "top_p")}
        blocks = (
            {"block_length": self.block_length, "cache": "dual", "threshold": 0.9} if cached else {}
        )
        rule = sample_dream.Sampling(**settings, **blocks, eos_ids=(model.eos_id,))
        graph, params = self.weights(mesh)
        sampler = sample_dream.sampler_of(graph, model, rule)
        return denoising(sampler, params, mesh, self.batch_size, self.length, begin=1)

    def weights(self, mesh):
        """(model without parameters, their shapes), as checkpoints.load_for_inference has them."""
        model = md.CONFIGS[self.model]
        graph = md.graph_of(
            model, md.Compute(jnp.dtype("bfloat16"), platform=platform(self.device))
        )
        params = checkpoints.stored_shapes(
            md, md.param_shapes(model), jnp.bfloat16, checkpoints.bits_of(self)
        )
        if mesh.size == 1:
            params = jax.eval_shape(
                lambda tree: nnx.to_pure_dict(nnx.state(md.join(nnx.merge(graph, tree)))), params
            )
        return graph, params

    def lowered(self, name):
        """One of STEPS, or a pass over so many slots with the cache of sample_block.py, traced."""
        mesh = self.mesh()
        with checkpoints.mesh_context(mesh if mesh.size > 1 else None):
            if isinstance(name, tuple):
                return self.block_pass(mesh, *name)
            return lowered_step(name, mesh, *self.program(mesh, cached=name != "canvas"))

    def block_pass(self, mesh, width, seeds):
        """A denoising step of a Dream of blocks, traced: of sample_block.fill_block, which is a
        loop of them.

        seeds: the first of a causal model.
        """
        model = md.CONFIGS[self.model]
        size = model.block_length or self.block_length
        settings = {name: getattr(generate_dream.Config, name) for name in ("temperature", "top_p")}
        rule = sample_block.Sampling(size, threshold=0.9, **settings, eos_ids=(model.eos_id,))
        graph, params = self.weights(mesh)
        sampler = sample_block.sampler_of(graph, rule)
        prompts = [[model.bos_id] + [model.mask_id] * (self.length - 1)] * self.batch_size
        inputs = jax.eval_shape(
            lambda: sample_block.prepare(model, rule, prompts, dtype=jnp.bfloat16)[:2]
        )

        def step(params, state, given):
            model = nnx.merge(graph, params)
            masks_B = sampler.masked(model, state, given).sum(-1)
            return sampler.step(model, state, given, given.start_B, width, masks_B, 1, seeds)

        # the cache is split as it is in a pass, all else is whole on each chip
        at = lambda s: PS(md.BATCH, "tensor") if len(s.shape) == 4 else PS()  # noqa: E731
        of_inputs = jax.tree.map(lambda s: jax.NamedSharding(mesh, at(s)), inputs)
        places = (md.shardings(mesh, params), *of_inputs)
        put = lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at)  # noqa: E731
        return jax.jit(step, donate_argnums=1).lower(*jax.tree.map(put, (params, *inputs), places))

    def rows(self):
        # no step is faster than its FLOPs at the peak, nor than one pass over the weights
        chip, bits, mesh, model = (
            place(self.device)[0],
            checkpoints.bits_of(self),
            self.mesh(),
            md.CONFIGS[self.model],
        )
        shapes = checkpoints.stored_shapes(md, md.param_shapes(model), jnp.bfloat16, bits)
        # of an embedding that is no head only a few rows are read
        kept = {name: x for name, x in shapes.items() if model.tie or name != "embed_tokens"}
        weights = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)) / mesh.shape["tensor"]
        )
        kind = f"int{bits}" if bits else "bfloat16"
        found = []
        size = model.block_length or self.block_length
        names = [self.only] if self.only else STEPS if size else ["canvas"]
        if self.only == "canvas" and model.block_length:
            raise ValueError(f"--only=canvas: {self.model} is filled in blocks")
        if model.block_length or self.only == "blocks":
            # A block's first pass is over the block before it too, or is causal; the others are
            # over it and, with the shift, a token more.
            first = (size, True) if model.causal else (2 * size, False)
            passes = {"opens": first, "cached": (size + model.shift, False)}
            names = [passes[self.only]] if self.only in passes else [*passes.values()]
        for name in names:
            what = STEPS.get(name) or "blocks of {}, a {}pass over {} slots".format(
                size, "causal " * name[1], name[0]
            )
            row = report(f"dream {self.model} {kind}, {what}", self.lowered(name), self.device)
            if "flops_per_chip" in row:
                ideal_s = max(row["flops_per_chip"] / chip.flops_per_s, weights / chip.bytes_per_s)
                # a TPU's prefetches of weights run beside the kernels, whose sum leaves them out
                row |= {"ideal_ms": 1e3 * ideal_s, "roofline_s": max(ideal_s, row["roofline_s"])}
            found.append(row)
        return found


@dataclasses.dataclass(frozen=True)
class Grpo:
    """Loss and gradients of coupled_grpo.py's micro-step, beside moments and reference."""

    device: Device = "v6e"  # what to compile for: v6e:2x4, a100-80, h100:8 ...
    model: str = "7b"  # key of CONFIGS in model_dream.py
    layers: int = 0  # fewer layers, for a look at how long it takes; 0: the model's
    lora_rank: int = 0  # train a difference of this rank to each matrix; 0 trains all weights
    # with --lora_rank: bits of the frozen matrices; 0: bfloat16
    base_bits: typing.Literal[0, 8, 4] = 0
    # completions of 256 tokens on all chips together; 0: as many as coupled_grpo.py takes
    micro_batch: int = 0
    # learn: the micro-step; score: a micro-batch; opens, cached: passes of rollouts; round: all,
    # and its seconds
    phase: typing.Literal["learn", "score", "opens", "cached", "round"] = "learn"

    def sized(self, rows):
        return dataclasses.replace(self, micro_batch=rows, phase="learn")

    def rows(self):
        # the run: Dream with the 7B preset's settings, its weights split over all chips
        model = md.CONFIGS[self.model]
        model = dataclasses.replace(model, layers=self.layers or model.layers)
        devices = topology_devices(self.device)
        mesh = checkpoints.mesh_of(devices, (1, len(devices), 1))
        flags = coupled_grpo.Config(
            preset="7b",
            ckpt="",  # neither is read
            prompts="",
            lora_rank=self.lora_rank,
            micro_batch=self.micro_batch,
        )
        cfg = coupled_grpo.settle(flags, mesh.size)

        def on_mesh(tree, dtype=None):
            def place(s, at):
                return jax.ShapeDtypeStruct(s.shape, dtype or s.dtype, sharding=at)

            return jax.tree.map(place, tree, md.shardings(mesh, tree))

        # what is trained: all weights in float32, or with LoRA adapters beside weights in bfloat16
        shapes, base = md.param_shapes(model), {}
        if cfg.lora_rank:
            base = on_mesh(checkpoints.stored_shapes(md, shapes, jnp.bfloat16, self.base_bits))
            shapes = jax.eval_shape(
                lambda: md.new_adapters(jax.random.key(0), md.param_shapes(model), cfg.lora_rank)
            )
        trained = on_mesh(shapes, dtype=jnp.float32)
        optimizer = grpo.make_optimizer(1e-6)
        # beside the program lie the moments and the reference, a copy of what is trained
        beside = checkpoints.bytes_on_a_device(
            (on_mesh(jax.eval_shape(optimizer.init, trained)), trained)
        )

        # a micro-batch as coupled_grpo.score leaves it: B prompts of P tokens with completions of C
        rows_at, everywhere = (jax.NamedSharding(mesh, spec) for spec in (PS(md.BATCH), PS()))
        B, P, C = math.ceil(cfg.micro_batch / mesh.size) * mesh.size, cfg.max_prompt, cfg.max_new

        def row(dtype, *shape):
            return jax.ShapeDtypeStruct((B, *shape), dtype, sharding=rows_at)

        views = {"token_BL": row(jnp.int32, P + C), "see_BL": row(bool, P + C)}
        views["ratio_B"] = row(jnp.float32)
        views |= {"u_BC": row(jnp.float32, C), "counted_BC": row(bool, C)}
        batch = views | {name: row(jnp.float32, C) for name in ("old_BC", "ref_BC")}
        first = jax.ShapeDtypeStruct((), bool, sharding=everywhere)
        batch |= {"advantage_B": row(jnp.float32), "first": first}
        graphs = grpo.graphs_of(model, jnp.dtype("bfloat16"), platform=platform(self.device))
        loss = grpo.Loss(cfg.beta)
        scores, gradients, _ = grpo.make_programs(graphs[0], optimizer, model.mask_id, loss)
        beside_what = f" beside int{self.base_bits}" if self.base_bits else ""
        what = f"LoRA of rank {cfg.lora_rank}{beside_what}" if cfg.lora_rank else "all weights"
        name = (
            f"dream {self.model}" + f", {self.layers} layers" * bool(self.layers) + " coupled-grpo"
        )

        # rollouts: on several chips with a copy of the weights that lies as generate_dream.py has them
        writing = checkpoints.mesh_of(
            devices, checkpoints.inference_mesh(model, devices, 0).devices.shape
        )
        params, beside_copy = md.assemble(base, trained), 0
        if writing.size > 1:
            dtype = None if cfg.lora_rank else jnp.bfloat16
            copy = functools.partial(grpo.rollout_weights, mesh=writing, dtype=dtype)
            params = jax.eval_shape(copy, params)
            beside_copy = checkpoints.bytes_on_a_device((trained, base))
        rule = coupled_grpo.rule_of(cfg, model.vocab, (model.eos_id,))
        sampler = sample_dream.sampler_of(graphs[1], model, rule)
        share = writing.shape["data"]
        filled = math.ceil(cfg.generation_batch / share) * share
        inputs = denoising(sampler, params, writing, filled, P + C, begin=P)

        phases = {
            "learn": (B, mesh, beside, lambda: gradients.lower(trained, base, trained, batch)),
            "score": (B, mesh, beside, lambda: scores.lower(trained, base, views)),
            "opens": (
                filled,
                writing,
                beside + beside_copy,
                lambda: lowered_step("opens", writing, *inputs),
            ),
            "cached": (
                filled,
                writing,
                beside + beside_copy,
                lambda: lowered_step("cached", writing, *inputs),
            ),
        }
        found = {}
        for phase in phases if self.phase == "round" else [self.phase]:
            count, on, size, trace = phases[phase]
            step = {"learn": "micro-step", "score": "scores"}.get(phase) or STEPS[phase]
            with jax.set_mesh(on):
                lowered = trace()
            title = f"{name} {step}, {what}, {count} completions"
            found[phase] = report(title, lowered, self.device, size / 2**30, micro_batch=count)
        rows = [*found.values()]
        # what does not fit has no time
        if self.phase == "round" and all("predicted_s" in row for row in rows):
            rows.append(self.round_of(cfg, **found))
        return rows

    def round_of(self, cfg, learn, score, opens, cached):
        """Seconds of a round's phases, if a step fills 1, 2 or 4 tokens of a text on average."""
        everyone, size = cfg.tasks * cfg.group, cfg.block_length
        parts, batches = (
            -(-everyone // count) for count in (cfg.micro_batch, cfg.generation_batch)
        )
        blocks = cfg.max_new // size
        # the reference model's scores and, after the first update, the old policy's
        passes = 2 * cfg.iterations - 1
        seconds = {
            "score": parts * passes * score["predicted_s"],
            "learn": parts * cfg.iterations * learn["predicted_s"],
        }
        row = {
            "program": "a round",
            "device": self.device,
            "fits": all(r["fits"] for r in (learn, score, opens, cached)),
        }
        print(
            f"a round of {everyone} completions: scores {seconds['score']:.1f} s, updates {seconds['learn']:.1f} s"
        )
        for tokens in (1, 2, 4):
            later_s = (size / tokens - 1) * cached["predicted_s"]
            write = batches * blocks * (opens["predicted_s"] + later_s)
            share = write / (write + sum(seconds.values()))
            print(
                f"  {tokens} tokens a step: writing {write:.1f} s, {share:.0%} of {write + sum(seconds.values()):.0f} s"
            )
            row[f"write_{tokens}"] = write
        return row | seconds


@dataclasses.dataclass(frozen=True)
class Dump:
    """The totals of a program that XLA dumped, and its most expensive operations."""

    # *after_codegen.txt that XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text" left
    file: tyro.conf.Positional[str]
    # whose peak, clock and bandwidth turn counts into seconds
    chip: typing.Literal[tuple(CHIPS)] = "v6e"
    top: int = 30  # operations to list

    def rows(self):
        chip = CHIPS[self.chip]
        cost = cost_of(Path(self.file).read_text(), chip)
        print(
            f"FLOPs      {cost.flops:12.4g}   {cost.flops / chip.flops_per_s:.4g} s at the peak of {self.chip}"
        )
        print(
            f"HBM bytes  {cost.bytes:12.4g}   {cost.bytes / chip.bytes_per_s:.4g} s at its bandwidth"
        )
        print(
            f"cycles     {cost.cycles:12.4g}   {cost.seconds(self.chip):.4g} s estimated, without the following"
        )
        print(f"lower bound {cost.roofline_s:.4g} s, every kernel at the peak or at the bandwidth")
        for op, count in cost.collectives.items():
            print(f"  {op}: {cost.collective_counts[op]} x, {count / 1e9:.4g} GB")
        for name, count in sorted(cost.custom_calls.items()):
            print(f"  {name}: {count} x, no estimate")
        if cost.unknown_loops:
            print(f"  {cost.unknown_loops} loops of unknown length, each counted as one round")
        for name, cycles in cost.ops.most_common(self.top):
            print(f"{cycles:14,} {cycles / cost.cycles:6.1%}  {name}")
        return [vars(cost)]


# ---- the table by hardware -----------------------------------------------------------------------------------------

RESULTS = Path(__file__).parent / "results" / "by_hardware.json"
FINE_TUNE = "dream --model=7b --lora_rank=16 --seq_len=512 --batch_size=1 --remat=full"
HEAD = """# Memory and times of compiled programs (PREDICTED, nothing ran)

Each program was compiled for each device, which was not there. GiB: all that the program holds, of what is usable.
Rows: those of a micro-batch. Times: train, a step of 131,072 tokens; generate, a pass over 768 tokens or over a cached
block of 32; grpo, a micro-step; LoRA, a row of 512 tokens. Estimated: the TPU compiler's cycles, a lower bound, too. At
least: arithmetic at the peak, or bytes at the bandwidth of the data sheet. **no**: it does not fit. By libtpu 0.0.42
to 0.0.52, beside int4 by 0.0.42.1. Earlier compiles: training on rtx3060, a100-40 and h200.
Dream's rows on Ampere, Ada and Hopper were compiled at eec146f, with a Triton attention that has left: their
command begins with `git checkout eec146f &&`.
`python bench/compile_for.py table`

"""
CELLS = {  # columns of the table -> flags
    "train 300m": "train --model=300m",
    "train 1b": "train --model=1b",
    "generate 7b, whole canvas": "generate --only=canvas",
    "generate 7b, cached step": "generate --only=cached",
    "generate 7b int8, cached step": "generate --only=cached --int8",
    "grpo 7b, LoRA of rank 16": "grpo --lora_rank=16",
    "grpo 7b, LoRA beside int4": "grpo --lora_rank=16 --base_bits=4",
    "fine-tune 7b, LoRA": FINE_TUNE,
    "fine-tune 7b, LoRA beside int8": f"{FINE_TUNE} --base_bits=8",
    "fine-tune 7b, LoRA beside int4": f"{FINE_TUNE} --base_bits=4",
}
# Of each model of KIN the same programs, on these devices with matrices in so many bits.
KIN_ON = {"v5e": (0,), "v6e": (0,), "rtx3060": (8, 4), "rtx4090": (0,), "h100": (0,)}
KIN_STEPS = {"canvas": "whole canvas", "opens": "first pass of a block"}
KIN_STEPS |= {"cached": "cached step", "lora": "LoRA"}


def programs():
    """(cell, device, flags) of all that is in the tables."""
    yield from ((cell, device, flags) for cell, flags in CELLS.items() for device in CHIPS)
    for device, widths in KIN_ON.items():
        for model, step, bits in itertools.product(KIN, KIN_STEPS, widths):
            if step in ("lora", "cached") or (step == "opens") == (KIN[model].block_length > 0):
                flags = f"generate --model={model} --only={step}" + (
                    f" --int{bits}" if bits else ""
                )
                if step == "lora":
                    flags = FINE_TUNE.replace("7b", model) + (
                        f" --base_bits={bits}" if bits else ""
                    )
                in_bits = f", int{bits}" if bits else ""
                yield f"{model}, {KIN_STEPS[step]}{in_bits}", device, flags


def recorded():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def cell(entry):
    """One cell of the table: memory, micro-batch, seconds."""
    if entry is None or "not_compiled" in entry:
        return f"not compiled: {entry['not_compiled']}" if entry else "not compiled"
    if not entry["fits"] and "total_gib" not in entry:
        return f"**no**: more than {entry['usable_gib']:.1f} GiB"
    rows = f" ({entry['micro_batch']} rows)" if "micro_batch" in entry else ""
    if not entry["fits"]:
        return f"**no**: {entry['total_gib']:.1f} GiB{rows}"
    unit, scale = ("s", 1) if entry["roofline_s"] >= 0.1 else ("ms", 1e3)
    estimate = f"{scale * entry['step_s']:.3g} {unit} estimated, " if "step_s" in entry else ""
    return f"{entry['total_gib']:.1f} GiB{rows}, {estimate}at least {scale * entry['roofline_s']:.3g} {unit}"


def markdown(entries):
    """The tables of what was recorded: a row for each device, and a row for each program of KIN."""
    known = {(entry["cell"], entry["device"]): entry for entry in entries}
    lines = [["device, usable GiB", *CELLS], ["---"] * (1 + len(CELLS))]
    for device, chip in CHIPS.items():
        cells = [cell(known.get((name, device))) for name in CELLS]
        lines.append([f"{device}, {chip.usable_gib:.1f}", *cells])
    found = {}
    for name, device, _ in list(programs())[len(CELLS) * len(CHIPS) :]:
        program, _, bits = name.partition(", int")
        found.setdefault(program, {})[f"{device} int{bits}" if bits else device] = cell(
            known.get((name, device))
        )
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    kin = [["model, program", *columns], ["---"] * (1 + len(columns))]
    kin += [[program, *row.values()] for program, row in found.items()]
    return HEAD + "\n".join(
        "".join(f"| {' | '.join(line)} |\n" for line in table) for table in (lines, kin)
    )


@dataclasses.dataclass(frozen=True)
class Table:
    """CELLS on all devices and KIN on some, into bench/results/by_hardware.json and .md. Goes on
    where it stopped.

    Each is compiled in a process of its own, and recorded when it is done. A cell whose compiler is
    not installed is left as it was. On two idle cores a cell takes from twenty seconds (a denoising
    step for a GPU) to five minutes.
    """

    # compile the cells whose "<program> --device=<device>" has a match of this regular expression
    only: str = ""
    again: bool = False  # also what is recorded already

    def rows(self):
        for name, device, flags in programs():
            at, command = (name, device), f"{flags} --device={device}"
            done = any(
                (e["cell"], e["device"]) == at and "not_compiled" not in e for e in recorded()
            )
            if not re.search(self.only, command) or (done and not self.again):
                continue
            try:
                check_compiler(device)
            except ImportError as error:
                print(f"{command}: {error}")
                continue
            entry = {"cell": name, "compiled_by": f"python bench/compile_for.py {command}"}
            entry |= self.compiled(command)
            # also what another process added
            others = [e for e in recorded() if (e["cell"], e["device"]) != at]
            entries = [*others, {"device": device} | entry]
            entries.sort(key=lambda e: (e["cell"], e["device"]))
            runs.write(RESULTS, entries)
            RESULTS.with_suffix(".md").write_text(markdown(entries))
            print(f"{command}: {cell(entry)}", flush=True)
        return recorded()

    def compiled(self, command):
        """The first row of `compile_for.py command`, or {"not_compiled": what it said}."""
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.json"
            process = [sys.executable, __file__, f"--json={rows}", *command.split()]
            result = subprocess.run(
                process, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
            )
            if result.returncode:
                return {"not_compiled": (result.stderr.strip().splitlines() or ["no message"])[-1]}
            row = json.loads(rows.read_text())[0]
            row["compile_s"] = round(time.perf_counter() - started)
            names = ["jax"] + ["libtpu"] * ("TPU_LIBRARY_PATH" not in os.environ)  # which compiled
            for name in filter(importlib.util.find_spec, names):
                row[name] = importlib.metadata.version(name)
            return row


AsDream = typing.Annotated[TrainDream, tyro.conf.subcommand("dream")]
Program = tyro.conf.OmitSubcommandPrefixes[Train | AsDream | Generate | Grpo | Dump | Table]


@dataclasses.dataclass(frozen=True)
class Config:
    program: Program = Train()  # to compile
    # of train, dream, generate and grpo: the largest micro-batch that fits, by bisection
    largest: bool = False
    json: str = ""  # file to write the figures to; "" only prints them


def main(cfg):
    """Print the figures of the programs, and return them: a list of dictionaries."""
    if cfg.largest and not hasattr(cfg.program, "sized"):
        raise ValueError("--largest goes with train, dream, generate and grpo")
    jax.config.update("jax_platforms", "cpu")  # the chips are not here
    rows = largest(cfg.program) if cfg.largest else cfg.program.rows()
    if cfg.json:
        runs.write(cfg.json, rows)
    return rows


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
