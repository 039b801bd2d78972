"""Does a program fit a TPU that is not here, and what does it cost? The TPU's compiler, libtpu, answers on any machine.

    python compile_for.py train --model=1b --topology=v6e:1x1      # a step of train_tpu.py; three minutes on two cores
    python compile_for.py train --model=1b --topology=v6e:4x4 --batch_size=128 --micro_batch=8
    python compile_for.py sample --model=7b                        # Dream's denoising steps; --int8 with small weights
    python compile_for.py grpo --lora_rank=16                      # the gradient of coupled_grpo.py on Dream 7B
    python compile_for.py head                                     # the memory of its scoring head beside plain forms
    python compile_for.py dump module_0000.jit_step.after_codegen.txt     # adds up a program that XLA dumped

Needs pip install -r requirements-tpu.txt. Prints for each program memory, FLOPs, HBM traffic, collectives and seconds,
per chip. They are the compiler's estimates, not measurements. In a script:

    devices = topology_devices("v6e:2x2")
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
    weights = jax.ShapeDtypeStruct((V, D), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):                                    # Pallas kernels learn the chip from the mesh
        compiled, cost, memory = compile_and_cost(jax.jit(step, donate_argnums=0).lower(weights))
    print(cost.flops, cost.seconds("v6e"), memory["total_gib"], memory["usable_gib"])

XLA's cost_analysis() counts the body of a loop once, so a model that scans over 24 layers looks 24 times too cheap, and
its optimal_seconds came out negative for our train steps. Here the bodies are multiplied by their trip counts, and the
time is the sum of the cycles that the compiler itself estimated for each operation. It is a lower bound: kernels,
scatters, sorts, SparseCore programs, collectives and copies beside the computation carry no estimate; they are listed.
"""

import collections
import dataclasses
import functools
import importlib.util
import math
import os
import re
import tempfile
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as PS

import coupled_grpo
import generate
import model_dream as md
import runs
import sample_dream
import train_tpu

# ---- the target: chips that are not here, and their compiler. Another compiler needs its own three of these ---------


class Chip(typing.NamedTuple):
    kind: str  # device_kind in JAX
    flops_per_s: float  # bfloat16 peak
    clock_hz: float  # peak / (2 * matrix units * rows * columns)
    hbm_bytes_per_s: float
    usable_gib: float  # what the compiler lets one program use, from its own out-of-memory message


CHIPS = {
    "v5e": Chip("TPU v5 lite", 197e12, 197e12 / (2 * 4 * 128 * 128), 819e9, 15.75),
    "v6e": Chip("TPU v6 lite", 918e12, 918e12 / (2 * 4 * 256 * 256), 1640e9, 31.24),
}


def topology_devices(name):
    """Devices of a TPU topology to shard and lower for: v6e:1x1, v5e:2x4, v6e:16x16 ...; there need be no TPU.

    Up to eight chips are one host, more are hosts of 2 x 2. Sets libtpu's environment variables where they are unset:
    call it in a process that only compiles, with JAX itself on the CPU (JAX_PLATFORMS=cpu).
    """
    chip, _, grid = name.partition(":")
    if chip not in CHIPS or not re.fullmatch(r"[1-9]\d*x[1-9]\d*", grid):
        raise ValueError(f"unknown topology {name!r}; write <chip>:<rows>x<columns>, chips {list(CHIPS)}: v6e:2x2")
    rows, columns = map(int, grid.split("x"))
    one_host = rows * columns <= 8
    if not one_host and (rows % 2 or columns % 2):
        raise ValueError(f"topology {name!r}: beyond eight chips hosts are 2 x 2, so rows and columns must be even")
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ImportError(f"compiling for {name} needs the TPU compiler: pip install -r requirements-tpu.txt")
    # without these libtpu looks for the machine's TPU, and only one process at a time may load it
    for variable in ("TPU_SKIP_MDS_QUERY=1", "TPU_WORKER_HOSTNAMES=localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD=1"):
        os.environ.setdefault(*variable.split("="))
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-1")
    from jax.experimental import topologies  # here, since it loads libtpu

    host = (rows, columns, 1) if one_host else (2, 2, 1)
    return topologies.get_topology_desc(name, "tpu", chips_per_host_bounds=host, num_slices=1).devices


def compile_and_cost(lowered, compiler_options=None):
    """Compile jax.jit(f).lower(...) for the topology of its arguments; returns (compiled, Cost, memory).

    memory is per chip, in bytes: arguments, temporaries, outputs, aliased (outputs in donated arguments) and code; then
    total_gib = arguments + temporaries + outputs - aliased + code, and usable_gib of the chip. A program that does not
    fit raises jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED, with the memory that it would need.
    """
    # The cycles are only in the text that the compiler dumps when it has placed and scheduled everything.
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} | (compiler_options or {})
        compiled = lowered.compile(compiler_options=options)
        dumps = list(Path(folder).glob("*after_codegen.txt"))
        if len(dumps) != 1:
            raise ValueError(f"{len(dumps)} dumps *after_codegen.txt, expected 1: not lowered for topology_devices()?")
        cost = cost_of(dumps[0].read_text())
    stats = compiled.memory_analysis()
    names = "arguments", "temporaries", "outputs", "aliased", "code"
    kinds = "argument", "temp", "output", "alias", "generated_code"
    memory = {name: getattr(stats, f"{kind}_size_in_bytes") for name, kind in zip(names, kinds, strict=True)}
    memory["total_gib"] = (sum(memory.values()) - 2 * memory["aliased"]) / 2**30
    (device, *_) = jax.tree.leaves(compiled.output_shardings)[0].device_set
    memory["usable_gib"] = next(chip.usable_gib for chip in CHIPS.values() if chip.kind == device.device_kind)
    return compiled, cost, memory


# ---- reading HLO text ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cost:
    """What one run of a program costs on one chip. Sizes are those of the arrays, without their padding to tiles."""

    flops: int = 0  # of matrix products and convolutions, those inside Pallas kernels left out
    cycles: int = 0  # sum of the compiler's estimates
    bytes: int = 0  # read from and written to HBM; of a slice only the slice, between arrays in VMEM nothing
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
    )  # Pallas kernels, all else without estimate -> times
    unknown_loops: int = 0  # loops whose trip count is not a constant; counted as one round

    def add(self, other, times=1):
        for name, value in vars(other).items():
            if isinstance(value, dict):
                getattr(self, name).update({key: times * count for key, count in value.items()})
            else:
                setattr(self, name, getattr(self, name) + times * value)

    def seconds(self, chip="v6e"):
        """Estimated seconds = cycles / clock; chip is a key of CHIPS or a topology name such as v6e:4x4."""
        return self.cycles / CHIPS[chip.split(":")[0]].clock_hz


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
        return [self.block[name] for name in re.findall(r"%([\w.\-]+)", self.inside) if name in self.block]

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
        return int(self.inside) if self.op == "constant" and re.fullmatch(r"-?\d+", self.inside) else None


def parse(hlo_text):
    """The entry computation of an HLO module."""
    computations, entry, block = {}, None, None
    for line in re.sub(r"/\*.*?\*/", "", hlo_text).splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith("HloModule"):
            block = computations[header.group(2)] = {}
            entry = block if header.group(1) else entry
        # the type ends before a word with an opening parenthesis that follows a closing bracket and a space
        found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?[\])}]) ([a-z][\w\-]*)\((.*)", line)
        if found and block is not None:
            root, name, type_, op, rest = found.groups()
            depth, end = 1, 0
            while depth:
                depth += {"(": 1, ")": -1}.get(rest[end], 0)
                end += 1
            block[name] = Instruction(name, type_, op, rest[: end - 1], rest[end:], bool(root), block, computations)
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return entry


def shapes(type_):
    """All arrays of a type, tuples flattened: [(dims, bytes, whether in HBM)]."""
    out = []
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", type_):
        dims = [int(d) for d in dims.split(",") if d]
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or [0])[0])  # bf16 16, f8e4m3fn 8, token 0
        out.append((dims, math.prod(dims) * bits // 8, not re.search(r"S\([1-9]", layout)))
    return out


def size(ins, hbm_only=False):
    return sum(count for _, count, in_hbm in shapes(ins.type) if in_hbm or not hbm_only)


def root_of(block):
    return next(ins for ins in block.values() if ins.is_root)


# ---- the cost of one instruction -----------------------------------------------------------------------------------


def matmul_flops(ins):
    """2 x multiply-adds of a dot or a convolution; the TPU compiler turns nearly all dots into convolutions.

    There a batch dimension of a dot becomes a spatial one, with a window as wide as the batch, dilated or padded so
    that one tap per output meets data. Therefore a tap counts only where it falls on an element of the input.
    """
    left, right, out = (shapes(i.type)[0][0] for i in (*ins.operands[:2], ins))
    if ins.op == "dot":
        contracted = ins.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
        return 2 * math.prod(out) * math.prod(left[int(d)] for d in contracted.split(",") if d)
    left_label, right_label, out_label = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", ins.tail).groups()
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
        flops *= int(np.sum((position_OW >= 0) & (position_OW <= last) & (position_OW % at("lhs_dilate") == 0)))
    return flops


def trip_count(ins):
    """Rounds of a while loop; None where they depend on data. A loop that may stop early (i < n and ...) counts n.

    TPU dumps do not say it, so: the condition compares an element of the loop's tuple with a constant, the body adds a
    constant to that element, and the operand says where it starts (else 0: JAX counts from 0).
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
    """What a fused computation writes to make its result ins: the part that changes in place, or all."""
    if ins.op == "bitcast":
        return written_bytes(ins.operands[0])
    if ins.op == "fusion":
        return written_bytes(root_of(ins.called("calls")[0]))
    return size(ins.operands[UPDATES[ins.op]] if ins.op in UPDATES else ins)


def hbm_bytes(ins):
    """Bytes that an instruction moves from and to HBM."""
    if ins.op == "copy-start":  # its type is (destination, source, flag)
        return sum(count for _, count, in_hbm in shapes(ins.type)[:2] if in_hbm)
    if ins.op in SLICES:
        return size(ins) * (size(ins.operands[0], hbm_only=True) > 0) + size(ins, hbm_only=True)
    if ins.op in UPDATES:
        update = ins.operands[UPDATES[ins.op]]
        return size(update, hbm_only=True) + size(update) * (size(ins, hbm_only=True) > 0)
    if ins.op != "fusion":
        return size(ins, hbm_only=True) + sum(size(i, hbm_only=True) for i in set(ins.operands))
    body = ins.called("calls")[0]
    results = root_of(body).operands if root_of(body).op == "tuple" else [root_of(body)]
    read = [read_bytes(i) for i in body.values() if i.op == "parameter" and size(ins.operands[int(i.inside)], True)]
    return sum(read) + sum(written_bytes(i) for i, out in zip(results, shapes(ins.type), strict=False) if out[2])


# ---- the cost of a program -----------------------------------------------------------------------------------------

COLLECTIVES = "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute".split()
FREE_OPS = "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id".split()
FREE_CALLS = "AllocateBuffer ConcatBitcast AssumeGatherIndicesInBound Sharding".split()


def cost_of(hlo_text):
    """The Cost of one run of an HLO module, given the text of its dump *after_codegen.txt.

    The body of a while loop counts as often as it runs, of a conditional the dearest branch. What runs asynchronously
    counts once, at its start, without cycles since it runs beside the rest. Raises ValueError if the text is not HLO.
    """
    done = {}  # computations that have been added up, by identity

    def total(block, fused=False):
        """Cost of a computation. Inside a fusion only FLOPs and collectives; it has cycles and bytes as a whole."""
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
            return cost.add(max(branches, key=lambda branch: (branch.cycles, branch.flops, branch.bytes)))
        if op == "call" or ins.called("called_computations"):
            return cost.add(total((ins.called("to_apply") or ins.called("called_computations"))[0], fused))
        if op == "async":  # beside the rest: it adds no time
            return cost.add(dataclasses.replace(total(ins.called("calls")[0], fused), cycles=0, ops={}))
        # FLOPs and collectives
        if op in ("dot", "convolution"):
            cost.flops += matmul_flops(ins)
        elif op == "fusion":
            cost.add(total(ins.called("calls")[0], fused=True))
        elif op in COLLECTIVES:
            taken, given = sum(size(i) for i in ins.operands), size(ins)
            if op != ins.op and op != "all-reduce":  # the result of a start is (input, output, flags)
                given = sum(count for dims, count, _ in shapes(ins.type) if dims) - taken
            if fused and root_of(ins.block).op == "dynamic-slice":  # how the TPU writes a reduce-scatter
                op = "reduce-scatter"
            cost.collectives[op] += max(taken, given)
            cost.collective_counts[op] += 1
        # traffic and time; what has no estimate is listed by name
        if fused or ins.attribute(r'custom_call_target="([^"]*)"') in FREE_CALLS:
            return
        cost.bytes += hbm_bytes(ins)
        cycles = int(ins.attribute(r'"estimated_cycles":"(\d+)"', 0))
        if 0 < cycles < 2**62:  # SparseCore programs say 2**63 - 1
            cost.cycles += cycles
            cost.ops[ins.attribute(r'op_name="([^"]*)"', ins.op)] += cycles
        elif op in ("custom-call", "scatter", "gather", "sort") or (op == "fusion" and "calls=%all-" not in ins.tail):
            name = re.sub(r"(\.\d+|\.cloned?)*$", "", ins.name)  # a Pallas kernel appears under its own name
            name = "libtpu's own kernel" if name == "name" else name  # it puts one in place of softmax attention
            cost.custom_calls[name] += 1

    return total(parse(hlo_text))


# ---- our programs --------------------------------------------------------------------------------------------------


def on_chip(topology):
    """array(dtype, *shape) on the one chip of a topology."""
    (device,) = topology_devices(topology)
    at = jax.sharding.SingleDeviceSharding(device)
    return lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=at)


def report(name, lowered, topology, **facts):
    """Compile a traced program, print what the compiler says of it, and return that as a row."""
    print(f"{name}: compiling for {topology}", flush=True)
    try:
        _, cost, memory = compile_and_cost(lowered)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"{name} does not fit {topology}: {runs.first_line(error)}") from None
    row = {"program": name, "topology": topology, **facts}
    row |= {
        "hbm_gib": memory["total_gib"],
        "temporaries_gib": memory["temporaries"] / 2**30,
        "usable_gib": memory["usable_gib"],
        "step_s": cost.seconds(topology),
        "flops_per_chip": cost.flops,
        "hbm_bytes_per_chip": cost.bytes,
        "collective_gb": {op: round(size / 1e9, 3) for op, size in cost.collectives.items()},
        "collective_counts": dict(cost.collective_counts),
        "without_estimate": dict(cost.custom_calls),
        "loops_counted_once": cost.unknown_loops,
    }
    for key, value in row.items():
        print(f"  {key:22} {value:.4g}" if isinstance(value, float) else f"  {key:22} {value}")
    for path, cycles in cost.ops.most_common(12):
        print(f"  {cycles / cost.cycles:6.1%}  {path}", flush=True)
    return row


@dataclasses.dataclass(frozen=True)
class Train:
    """A step of train_tpu.py, with its flags; their defaults are those of the chip."""

    topology: str = "v6e:1x1"  # <chip>:<rows>x<columns>, of v5e or v6e
    settings: train_tpu.Config = dataclasses.field(default_factory=train_tpu.Config)

    def rows(self):
        devices = topology_devices(self.topology)
        settings = dataclasses.replace(self.settings, lr=3e-4, steps=1000, warmup=100)  # change no figure
        cfg, model, run, mesh = train_tpu.resolve(settings, devices)
        family = train_tpu.family_of(cfg)
        optimizer = train_tpu.make_optimizer(cfg.clip, cfg.weight_decay, run.dtype, muon=cfg.optimizer == "muon")
        shapes = train_tpu.state_shapes(family, model, optimizer, mesh)
        step = train_tpu.lower_step(cfg, family.graph_of(model, run), optimizer, shapes, mesh)
        tokens = cfg.batch_size * cfg.seq_len
        flops = tokens * family.flops_per_token(model, cfg.seq_len)
        row = report(f"{cfg.model} train step", step, self.topology, tokens=tokens, model_flops=flops)
        chip = CHIPS[self.topology.partition(":")[0]]
        row["tok_per_s"] = tokens / row["step_s"]
        row["mfu"] = flops / len(devices) / row["step_s"] / chip.flops_per_s
        print(f"  {row['tok_per_s']:,.0f} tokens per second, {row['mfu']:.1%} of the peak")
        return [row]


STEPS = "a step over the whole canvas", "the pass that opens a block", "a cached step over a block"


@dataclasses.dataclass(frozen=True)
class Sample:
    """The denoising steps of generate.py on one chip, one row: by default, and with blocks, a cache and a threshold.

    One round of each loop counts: a step, with the logits of a block, or of as many positions as Run.head_positions in
    model_dream.py; a step of a canvas with more masks than that takes a little longer.
    """

    topology: str = "v6e:1x1"  # chip to compile for
    model: str = "7b"  # key of CONFIGS in model_dream.py
    int8: bool = False  # matrices in 8 bits, the rest in bfloat16
    length: int = 768  # tokens of the canvas
    block_length: int = 32  # tokens of a block; 0: without blocks, the first of the three steps alone
    only: typing.Literal[("", *STEPS)] = ""  # one of the three; "" all

    def program(self, array, cached):
        """Arguments of sample_dream.fill_block, as generate.py has them: (positional, by name)."""
        model = md.CONFIGS[self.model]
        # the settings of the command line, and the weights as runs.load gives them
        settings = {name: generate.DEFAULTS["dream"][name] for name in ("temperature", "top_p")}
        blocks = {"block_length": self.block_length, "cache": "dual", "threshold": 0.9} if cached else {}
        rule = sample_dream.Sampling(**settings, **blocks, eos_ids=(model.eos_id,))
        graph = md.graph_of(model, md.Run(jnp.dtype("bfloat16"), platform="tpu"))
        params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), md.param_shapes(model))
        if self.int8:
            params = jax.tree.map(lambda s: jax.eval_shape(md.quantise, s) if len(s.shape) == 2 else s, params)
        # a canvas of masks behind one token
        token_BL = np.full((1, self.length), model.mask_id)
        token_BL[0, 0] = model.bos_id
        see_BL, masked_BL = np.ones(token_BL.shape, bool), token_BL == model.mask_id
        state, given, _ = sample_dream.prepare(model, rule, token_BL, see_BL, masked_BL)
        _, width = sample_dream.window(rule, self.length, 1, 1, given.size) if cached else (0, self.length)
        inputs = jax.tree.map(lambda s: array(s.dtype, *s.shape), (params, jax.eval_shape(lambda: (state, given))))
        sampler = sample_dream.sampler_of(graph, model, rule)
        return (inputs[0], *inputs[1]), {"sampler": sampler, "width": width}

    def lowered(self, name):
        """One of STEPS, traced. The last two are parts of one program."""
        array, model = on_chip(self.topology), md.CONFIGS[self.model]
        inputs, static = self.program(array, cached=name != STEPS[0])
        if name == STEPS[0]:
            return sample_dream.fill_block.lower(*inputs, **static)
        if name == STEPS[1]:
            return sample_dream.open_block.lower(*inputs, sampler=static["sampler"])
        layer = (array(jnp.bfloat16, 1, self.length, model.kv_heads, model.head_size),) * 2  # keys and values
        return sample_dream.denoise.lower(*inputs, [layer] * model.layers, **static)

    def rows(self):
        # no step is faster than its FLOPs at the peak, nor than one pass over the weights
        chip, size = CHIPS[self.topology.partition(":")[0]], 1 if self.int8 else 2
        weights = size * md.count_params(md.CONFIGS[self.model])["total"]  # bytes that a step reads
        kind, found = "int8" if self.int8 else "bfloat16", []
        for name in [self.only] if self.only else STEPS if self.block_length else STEPS[:1]:
            row = report(f"dream {self.model} {kind}, {name}", self.lowered(name), self.topology)
            ideal_s = max(row["flops_per_chip"] / chip.flops_per_s, weights / chip.hbm_bytes_per_s)
            found.append(row | {"ideal_ms": 1e3 * ideal_s})
        return found


@dataclasses.dataclass(frozen=True)
class Grpo:
    """Loss and gradients of coupled_grpo.py's micro-step, and what lies in memory beside it: moments, reference."""

    topology: str = "v6e:1x1"  # chips to compile for
    model: str = "7b"  # key of CONFIGS in model_dream.py
    layers: int = 0  # fewer layers, for a look at how long it takes; 0: the model's
    lora_rank: int = 0  # train a difference of this rank to each matrix; 0 trains all weights
    micro_batch: int = 0  # completions of 256 tokens on all chips together; 0: as many as coupled_grpo.py takes

    def rows(self):
        # the run: Dream with the 7B preset's settings, its weights split over all chips
        model = md.CONFIGS[self.model]
        model = dataclasses.replace(model, layers=self.layers or model.layers)
        devices = np.asarray(topology_devices(self.topology)).reshape(1, -1, 1)
        mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
        cfg = coupled_grpo.Config(preset="7b", lora_rank=self.lora_rank, **coupled_grpo.PRESETS["7b"])
        rows = self.micro_batch or coupled_grpo.batch_sizes(cfg, mesh.size)["micro_batch"]
        cfg = dataclasses.replace(cfg, micro_batch=rows)

        def on_mesh(tree, dtype=None):
            def place(s, at):
                return jax.ShapeDtypeStruct(s.shape, dtype or s.dtype, sharding=at)

            return jax.tree.map(place, tree, md.shardings(mesh, tree))

        # what is trained: all weights in float32, or with LoRA adapters beside weights in bfloat16
        shapes, base = md.param_shapes(model), {}
        if cfg.lora_rank:
            base = on_mesh(shapes, dtype=jnp.bfloat16)
            adapters = functools.partial(md.new_adapters, rank=cfg.lora_rank, targets=cfg.lora_targets)
            shapes = jax.eval_shape(lambda: adapters(jax.random.key(0), base))
        trained = on_mesh(shapes, dtype=jnp.float32)
        optimizer = coupled_grpo.make_optimizer(1e-6)
        # beside the program lie the moments and the reference, a copy of what is trained
        others = jax.tree.leaves((on_mesh(jax.eval_shape(optimizer.init, trained)), trained))
        beside = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in others)

        # a micro-batch as coupled_grpo.score leaves it: B prompts of P tokens with completions of C
        rows_at, everywhere = (jax.NamedSharding(mesh, spec) for spec in (PS(md.BATCH), PS()))
        B, P, C = cfg.micro_batch, cfg.max_prompt, cfg.max_new

        def row(dtype, *shape):
            return jax.ShapeDtypeStruct((B, *shape), dtype, sharding=rows_at)

        batch = {"token_BL": row(jnp.int32, P + C), "see_BL": row(bool, P + C), "ratio_B": row(jnp.float32)}
        batch |= {name: row(jnp.float32, C) for name in ("u_BC", "old_BC", "ref_BC")}
        batch |= {"advantage_B": row(jnp.float32), "counted_BC": row(bool, C)}
        batch["first"] = jax.ShapeDtypeStruct((), bool, sharding=everywhere)
        graph = md.graph_of(model, md.Run(jnp.dtype("bfloat16"), remat="full", platform="tpu"))
        _, gradients, _ = coupled_grpo.make_programs(cfg, graph, optimizer, model.mask_id)
        with jax.set_mesh(mesh):
            lowered = gradients.lower(trained, base, trained, batch)
        what = f"LoRA of rank {cfg.lora_rank}" if cfg.lora_rank else "all weights"
        layers = f", {self.layers} layers" if self.layers else ""
        name = f"dream {self.model}{layers} coupled-grpo micro-step, {what}, {B} completions"
        found = report(name, lowered, self.topology)
        found |= {"beside_gib": beside / 2**30, "total_gib": found["hbm_gib"] + beside / 2**30}
        print(f"  {found['total_gib']:.4g} GiB with optimizer moments and reference model")
        return [found]


@dataclasses.dataclass(frozen=True)
class Head:
    """The scoring head of coupled_grpo.py at Dream 7B's shape, bfloat16 hidden states, beside plain forms of it.

    "reference" computes the logits of all positions, as the PyTorch reference does; "plain" of the completions' alone,
    in one piece; "ours" is coupled_grpo.merge_views: two versions, in chunks that the backward pass makes again. The
    gradient is that of the hidden states and of the head, "frozen" of the hidden states alone, as with LoRA.
    """

    topology: str = "v6e:1x1"  # chip to compile for
    model: str = "7b"  # key of CONFIGS in model_dream.py
    weights: typing.Literal["bfloat16", "float32"] = "bfloat16"  # of the head; the computation is in bfloat16
    completions: int = 5  # three versions of each
    prompt: int = 200  # tokens of a prompt
    completion: int = 256  # tokens of a completion
    chunk: int = 1024  # tokens whose logits exist at a time
    only: typing.Literal["", "forward", "gradient", "frozen"] = ""  # one of the three; "" all

    def scores(self, form, hidden_BKLD, head_VD, token_BC, mask_BC, weight_B1):
        """Scores [B, C] of the completions, as one of the three forms computes them."""
        last = slice(self.prompt - 1, self.prompt + self.completion - 1)
        logits_of = functools.partial(md.linear, weight=head_VD, dtype=jnp.float32)
        if form == "ours":
            inputs = hidden_BKLD[:, :, last], token_BC, mask_BC, (1 / weight_B1, 1 / (1 - weight_B1)), self.chunk
            return coupled_grpo.merge_views(logits_of, *inputs)[0]
        everywhere = form == "reference"
        logits_BKCV = logits_of(hidden_BKLD)[:, :, last] if everywhere else logits_of(hidden_BKLD[:, :, last])
        # the versions: all masked, some masked, the others masked; each token is masked in one of the last two
        logp_BKCV = jax.nn.log_softmax(logits_BKCV, -1)
        logp_BKC = jnp.take_along_axis(logp_BKCV, token_BC[:, None, :, None], -1)[..., 0]
        seen_BC = jnp.where(mask_BC, logp_BKC[:, 1] / weight_B1, logp_BKC[:, 2] / (1 - weight_B1))
        return (logp_BKC[:, 0] + seen_BC) / 2

    def rows(self):
        array, model = on_chip(self.topology), md.CONFIGS[self.model]
        B, C = self.completions, self.completion
        hidden = array(jnp.bfloat16, B, 3, self.prompt + C, model.width)
        head = array(jnp.dtype(self.weights), model.vocab, model.width)
        given = array(jnp.float32, B, C), array(jnp.int32, B, C), array(bool, B, C), array(jnp.float32, B, 1)
        found = []
        for what in [self.only] if self.only else ("forward", "gradient", "frozen"):
            for form in ("ours", "plain", "reference"):

                def total(hidden, head, out_BC, *rest, form=form):
                    return (self.scores(form, hidden, head, *rest) * out_BC).sum()

                program = {"forward": total, "gradient": jax.grad(total, (0, 1)), "frozen": jax.grad(total)}[what]
                lowered = jax.jit(program).lower(hidden, head, *given)
                found.append(report(f"scoring head, {what}, {form}", lowered, self.topology, what=what, form=form))
        return found


@dataclasses.dataclass(frozen=True)
class Dump:
    """The totals of a program that XLA dumped, and its most expensive operations."""

    file: tyro.conf.Positional[str]  # *after_codegen.txt that XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text" left
    chip: typing.Literal["v5e", "v6e"] = "v6e"  # whose clock and bandwidth turn cycles and bytes into seconds
    top: int = 30  # operations to list

    def rows(self):
        cost, chip = cost_of(Path(self.file).read_text()), CHIPS[self.chip]
        print(f"FLOPs      {cost.flops:12.4g}   {cost.flops / chip.flops_per_s:.4g} s at the peak of {self.chip}")
        print(f"HBM bytes  {cost.bytes:12.4g}   {cost.bytes / chip.hbm_bytes_per_s:.4g} s at its bandwidth")
        print(f"cycles     {cost.cycles:12.4g}   {cost.seconds(self.chip):.4g} s estimated, without the following")
        for op, count in cost.collectives.items():
            print(f"  {op}: {cost.collective_counts[op]} x, {count / 1e9:.4g} GB")
        for name, count in sorted(cost.custom_calls.items()):
            print(f"  {name}: {count} x, no estimate")
        if cost.unknown_loops:
            print(f"  {cost.unknown_loops} loops of unknown length, each counted as one round")
        for name, cycles in cost.ops.most_common(self.top):
            print(f"{cycles:14,} {cycles / cost.cycles:6.1%}  {name}")
        return [vars(cost)]


@dataclasses.dataclass(frozen=True)
class Config:
    program: tyro.conf.OmitSubcommandPrefixes[Train | Sample | Grpo | Head | Dump] = Train()  # what is compiled
    json: str = ""  # file to write the figures to; "" only prints them


def main(cfg):
    """Print the figures of the programs, and return them: a list of dictionaries."""
    jax.config.update("jax_platforms", "cpu")  # the chips are not here
    rows = cfg.program.rows()
    if cfg.json:
        runs.write(cfg.json, rows)
    return rows


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
