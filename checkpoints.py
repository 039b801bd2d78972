"""JAX: checkpoints in Orbax, loading a model for inference, several hosts, and what fits the memory that is here.

    checkpoints = Checkpoints("out/run", keep=2)             # <folder>/checkpoints/<step>/, asynchronous and atomic
    checkpoints.save(step, {"params": ..., "opt": ...}, meta)
    state = checkpoints.restore(like)                        # on any number of devices; every checksum is compared
    model, step, mesh = load_for_inference(model_dream, "out/run", bits=8)

A model family is a module, model_dream or model_pythoncoder, with read_config, param_shapes, shardings and graph_of.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from flax import nnx
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as kept

import runs

# ---- trees of arrays -----------------------------------------------------------------------------------------------


def flatten(tree):
    """Any tree of arrays -> {"layers.0.q_proj": array}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(flat):
    """{"layers.0.q_proj": array} -> nested dictionaries."""
    tree = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[leaf] = value
    return tree


@functools.cache
def _bit_sum():
    def bit_sum(x):
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32), dtype=jnp.uint32)

    return jax.jit(bit_sum)


def bit_sums(tree):
    """{name: checksum} of a tree: the sum of each array's words modulo 2^32, the same however the array is split.

    One array at a time, each waited for: a CPU makes a copy of the words, and reductions over devices that run side by
    side can wait for each other for ever.
    """
    return {name: int(_bit_sum()(x)) for name, x in flatten(tree).items()}


# ---- several hosts -------------------------------------------------------------------------------------------------


def join_hosts(hosts):
    """Make one machine of several: "auto" on TPU pods, SLURM and MPI, or ADDRESS:PORT,COUNT,INDEX; "" is one host."""
    if hosts:
        address, *numbers = hosts.split(",")
        where = [] if hosts == "auto" else [address, *map(int, numbers)]
        jax.distributed.initialize(*where, heartbeat_timeout_seconds=30)  # all end when one is killed


def check_hosts(folder, settings):
    """The same ValueError on all hosts if one has other settings than host 0, or does not see its files."""
    if jax.process_count() == 1:
        return
    marker, digest = folder / ".hosts", hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()
    mine = np.frombuffer(digest[:8] + os.urandom(4), np.int32)
    first = multihost_utils.broadcast_one_to_all(mine)
    if jax.process_index() == 0:
        runs.write(marker, {"run": int(mine[2])})
    multihost_utils.sync_global_devices("marker written")
    sees = False
    for _ in range(20):  # a network disk can take seconds to show a new file
        sees = sees or (marker.is_file() and runs.read_json(marker).get("run") == int(first[2]))
        time.sleep(0 if sees else 0.5)
    equal_H, sees_H = multihost_utils.process_allgather(np.array([(mine[:2] == first[:2]).all(), sees])).T
    if not equal_H.all():
        raise ValueError(f"hosts {np.flatnonzero(~equal_H).tolist()} have other settings or data than host 0")
    if not sees_H.all():
        advice = "--out has to be on a disk that all hosts share, or in a bucket (gs://...)"
        raise ValueError(f"hosts {np.flatnonzero(~sees_H).tolist()} do not see what host 0 wrote to {folder}: {advice}")


# ---- Orbax checkpoints ---------------------------------------------------------------------------------------------


class Checkpoints:
    """Orbax checkpoints <folder>/checkpoints/<step>/: asynchronous, atomic, sharded, with a checksum of every array.

    Keeps the newest `keep`, and the one whose metric `best` is lowest.
    """

    def __init__(self, folder, keep=2, best=""):
        quiet()
        # What is kept of old checkpoints: a step stays if any of these rules wants it.
        policy = [kept.LatestN(keep)]
        if best:
            lowest = {"get_metric_fn": lambda metrics: metrics[best], "reverse": True, "n": 1}
            policy.append(kept.BestN(**lowest, keep_checkpoints_without_metrics=False))
        policy = kept.AnyPreservationPolicy(policy)
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        self.folder, self.args = absolute(folder), ocp.args
        self.manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    def newest(self):
        """The newest step, None without any."""
        return self.manager.latest_step()

    def preempted(self, step):
        """Of several hosts one was asked to stop (SIGTERM), and this is the step at which all of them do."""
        return self.manager.reached_preemption(step)

    def save(self, step, state, meta, metrics=None):
        """Start to save a dictionary of trees, with what meta holds as JSON; waits for the save before it."""
        self.wait()
        # The checksums are of what is in memory now: restore() compares them with what the disk gives back.
        items = {name: self.args.StandardSave(tree) for name, tree in state.items() if tree}
        items["meta"] = self.args.JsonSave(meta | {"sums": bit_sums(state)})
        try:
            self.manager.save(step, args=self.args.Composite(**items), metrics=metrics, force=True)
        except (OSError, ValueError) as error:
            raise self.unwritten(error) from None

    def wait(self):
        """Wait for the save under way. OSError if it could not be written."""
        try:
            self.manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self.unwritten(error) from None

    def unwritten(self, error):
        left = sorted(self.manager.all_steps(read=True)) or "no checkpoint"
        return OSError(
            f"a checkpoint was not written ({runs.first_line(error)}); go on with --resume={self.folder} from {left}"
        )

    def meta(self):
        """The JSON of the newest checkpoint."""
        path = self.folder / "checkpoints" / str(self.newest())
        return runs.read_json(path / "meta" / "metadata", "model", "sums")

    def restore(self, like):
        """The state in the newest checkpoint, laid out as the arrays or ShapeDtypeStructs of `like` are.

        ValueError for one that is damaged, also where only a bit differs from what was saved.
        """
        step, sums = self.newest(), self.meta()["sums"]
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = {name: self.args.StandardRestore(tree) for name, tree in like.items() if tree}
        try:
            state = {**like, **self.manager.restore(step, args=self.args.Composite(**items))}
            wrong = [name for name, value in bit_sums(state).items() if value != sums.get(name)]
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            wrong = [runs.first_line(error)]
        if wrong:
            advice = "delete its folder to use the one before"
            raise ValueError(f"{self.folder}/checkpoints/{step} cannot be read ({', '.join(wrong)}); {advice}")
        return state

    def close(self):
        self.wait()
        self.manager.close()


def absolute(folder):
    """What Orbax asks for."""
    path = runs.as_path(folder)
    return path.absolute() if isinstance(path, Path) else path


def quiet():
    """Orbax raises an error here, and logs it as well, and so do its threads when they are ended."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    threading.excepthook = sys.unraisablehook = lambda _: None


WEIGHTS = Path(__file__).parent / "weights"  # small trained models, a folder for each family


def default_folder(run, family):
    """The folder of a model where none is named: `run` if it holds one, else that in WEIGHTS, if there is one."""
    converted = any((Path(run) / name).is_file() for name in ("meta.json", "model.safetensors"))
    if converted or runs.saved_steps(Path(run)) or not (WEIGHTS / family).is_dir():
        return run
    print(f"no model in {run}: using weights/{family}, a small one that comes with Unmask", file=sys.stderr)
    return str(WEIGHTS / family)


# What a config.json beside the safetensors of a PythonCoder says besides its architecture, see convert_weights.py.
NOT_ARCHITECTURE = "model_type", "torch_dtype", "source", "step"


# What lies beside the weights of a model, besides config.json: its tokenizer, and the code that transformers runs.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def companions(folder):
    """{name: bytes} of the files COMPANIONS and *.py that a model's folder holds."""
    folder = runs.as_path(folder)
    paths = [*map(folder.joinpath, COMPANIONS), *sorted(folder.glob("*.py"))]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def find_weights(folder, step=0):
    """(path, meta, step) of the weights in a folder: a run's newest step, or what convert_weights.py made of one.

    That is in Orbax, or as safetensors if it is a PythonCoder; its step is that of the run, 0 for what is of the Hub.
    """
    if (folder / "meta.json").is_file():  # written by convert_weights.py
        meta = runs.read_json(folder / "meta.json", "sums")
        return folder, meta, step or meta.get("step", 0)
    keys = runs.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if (folder / "model.safetensors").is_file() and keys.get("model_type") == "pythoncoder":
        model = {name: value for name, value in keys.items() if name not in NOT_ARCHITECTURE}
        meta = {"model": model, "dtype": keys.get("torch_dtype", "float32"), "step": keys.get("step", 0)}
        return folder, meta, step or meta["step"]
    if any(folder.glob("*.safetensors")):
        advice = f"convert it: python convert_weights.py --source={folder} --out=DIR"
        raise ValueError(f"{folder} is in the Hub's form; {advice}")
    step, path = runs.newest(folder, step)
    if (path / "adapters").is_dir():
        advice = f"the whole model is in {folder}/merged when the run has ended"
        raise ValueError(f"{path} holds what LoRA learnt; {advice}")
    return path, runs.read_json(path / "meta" / "metadata", "model", "sums"), step


def load(family, folder, step=0, dtype=None, run=None, mesh=None, bits=0):
    """(model, step) of a run of train_tpu.py, or of a folder of convert_weights.py.

    family is model_dream or model_pythoncoder. dtype None keeps the stored one; step 0 takes the newest. With a mesh
    each device reads its own part of every parameter. With bits (Dream), 8 or 4, matrices are quantised as they are
    read, and dtype is that of the rest. Raises ValueError or FileNotFoundError.
    """
    quiet()
    folder = absolute(folder)
    path, meta, step = find_weights(folder, step)
    cfg = family.read_config(folder, meta)
    stored = jax.numpy.dtype(meta.get("dtype", "float32"))
    dtype = jax.numpy.dtype(dtype or stored)

    # Shape, type and place of every parameter, before any is read.
    shapes = family.param_shapes(cfg)
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = family.shardings(mesh, shapes) if mesh else jax.tree.map(lambda _: first_device, shapes)
    like = flatten(jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, stored, sharding=at), shapes, layout))

    def convert(name, x):
        return family.quantise(x, bits, name.split(".")[-1]) if bits and x.ndim == 2 else x.astype(dtype)

    if "sums" not in meta:
        params = {name: convert(name, x) for name, x in read_safetensors(path, like).items()}
        return nnx.merge(family.graph_of(cfg, run or family.Run(dtype=dtype)), unflatten(params)), step

    # A layer at a time: the stored model is never whole in memory beside another form of it.
    sums = {name.removeprefix("params."): value for name, value in meta["sums"].items()}
    params, damaged = {}, []
    for _, names in itertools.groupby(like, lambda name: name.rpartition(".")[0]):
        layer = read_arrays(path, {name: like[name] for name in names})
        damaged += [name for name, value in bit_sums(unflatten(layer)).items() if value != sums.get(name)]
        params |= {name: convert(name, layer.pop(name)) for name in list(layer)}
    if damaged:
        raise ValueError(f"checkpoint {path} cannot be read: {', '.join(damaged)} differ from what was saved")
    return nnx.merge(family.graph_of(cfg, run or family.Run(dtype=dtype)), unflatten(params)), step


def save(family, folder, model, files=(), source=""):
    """Write a Dream as an Orbax folder: config.json (the Hub's keys, and the name of its source), params/, meta.json.

    Beside them copies of `files`, such as a tokenizer. The folder gets its name when it is complete. FileExistsError.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise FileExistsError(f"{folder} exists; delete it or choose another name")
    params = nnx.to_pure_dict(nnx.state(model))
    leaves = jax.tree.leaves(params)
    (dtype,) = {x.dtype.name for x in leaves}  # a checkpoint has one
    meta = {"dtype": dtype, "parameters": sum(x.size for x in leaves), "sums": bit_sums(params)}
    with runs.new_folder(folder) as partial:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "params", params)
        keys = family.config_to_hf(model.cfg, dtype) | ({"source": source} if source else {})
        runs.write(partial / "config.json", keys)
        runs.write(partial / "meta.json", meta)
        for path in files:
            shutil.copy(path, partial)


def read_safetensors(path, like):
    """The arrays {name: ShapeDtypeStruct} of model.safetensors in a folder, which may hold no others."""
    try:
        with safetensors.safe_open(path / "model.safetensors", "flax") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}/model.safetensors cannot be read: {error}") from None
    runs.check_tensors(*({name: x.shape for name, x in tensors.items()} for tensors in (found, like)), path)
    return {name: jax.device_put(found[name], want.sharding) for name, want in like.items()}


def read_arrays(path, like):
    """The arrays {name: ShapeDtypeStruct} of an Orbax checkpoint, each on the devices that its sharding names."""
    item = unflatten(like)
    how = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return flatten(checkpointer.restore(path / "params", args=how))
    except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
        raise ValueError(f"checkpoint {path} cannot be read: {runs.first_line(error)}") from None


# ---- the machine: what is here, and what fits (JAX) ------------------------------------------------------------------


def keep_compiled(folder):
    """Keep compiled programs in a folder, where a later process finds them; "" compiles anew."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))


MACHINE = Path("/")  # its devices are files


def connect(cfg):
    """Join the other hosts, use the compile cache. ValueError if an accelerator would stay idle."""
    join_hosts(cfg.hosts)
    keep_compiled(cfg.compile_cache)
    if cfg.device:
        jax.config.update("jax_platforms", cfg.device)
    elif idle := idle_accelerator():
        raise ValueError(f"{idle}; or train on the CPU with --device=cpu")


def host_0_says(value):
    """The value of host 0: what depends on a clock has to be decided once."""
    return bool(multihost_utils.broadcast_one_to_all(value)) if jax.process_count() > 1 else value


def device_memory_gib(device):
    """What an accelerator can hold, in GiB; None for a CPU."""
    if device.platform == "cpu":
        return None
    if device.platform == "tpu" and "v6" in device.device_kind:
        return 31.24  # also for a compile-only device, which cannot be asked
    try:
        return jax.local_devices()[0].memory_stats()["bytes_limit"] / 2**30  # another host's cannot be asked
    except (TypeError, KeyError, jax.errors.JaxRuntimeError):
        return 15.75


def training_mesh(cfg, model, devices):
    """The devices as a mesh (data, fsdp, tensor). ValueError if they do not divide, or do not divide the model."""
    tensor = cfg.tensor
    fsdp = cfg.fsdp or max(1, len(devices) // tensor)
    if len(devices) % (tensor * fsdp):
        raise ValueError(f"{len(devices)} devices do not divide by --fsdp={fsdp} times --tensor={tensor}")
    shared = {  # (size, devices that share it)
        "key/value groups": (model.kv_heads // getattr(model, "maps", 1), tensor),
        "feed-forward width": (model.ffn, tensor),
        "vocabulary": (model.vocab, tensor * fsdp),
        "width": (model.width, fsdp),
    }
    uneven = [f"{name} ({size})" for name, (size, count) in shared.items() if size % count]
    if uneven:
        raise ValueError(f"--fsdp={fsdp} --tensor={tensor} do not divide the model's {', '.join(uneven)}; try --fsdp=1")
    grid = np.asarray(devices).reshape(-1, fsdp, tensor)
    return jax.sharding.Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def idle_accelerator():
    """Which accelerator is here while JAX computes on the CPU, and what to install; "" for none.

    Whoever sets JAX_PLATFORMS, or an empty CUDA_VISIBLE_DEVICES, wants the CPU.
    """
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return ""

    def here(pattern):
        return any(MACHINE.glob(pattern))

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not hidden and (here("dev/nvidia[0-9]*") or here("usr/lib/wsl/lib/libcuda.so.1")):  # the latter in Windows
        return "an NVIDIA GPU is here, JAX has no CUDA: pip install -r requirements-cuda.txt"
    # Newer TPUs are behind vfio, as are graphics cards of virtual machines; 0x1ae0 is Google. A laptop's NPU is in
    # the folder /dev/accel.
    makers = (path.read_text().strip() for path in MACHINE.glob("sys/bus/pci/devices/*/vendor"))
    if here("dev/accel[0-9]*") or (here("dev/vfio/[0-9]*") and "0x1ae0" in makers):
        return "a TPU is here, JAX does not see it: pip install -r requirements-tpu.txt"
    return ""


def device_line():
    """What JAX computes on, and what it leaves idle."""
    devices, idle = jax.devices(), idle_accelerator()
    return f"{len(devices)} x {devices[0].device_kind}" + f"; {idle}" * bool(idle)


def free_bytes(device):
    """Bytes that are free on a device, infinite where nothing says. On a CPU nine tenths of what the machine has left:
    the system ends a process that takes too much without a word.
    """
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    if not Path("/proc/meminfo").exists():
        return math.inf
    free = 1024 * int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])
    for path in map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and path.read_text().strip().isdigit():  # a container may have less than the machine
            free = min(free, int(path.read_text()))
    return 0.9 * free


def state_shapes(family, model, optimizer, mesh, lora_rank=0, dtype=jnp.bfloat16):
    """{"params", "opt"} as ShapeDtypeStructs, each with its layout on the mesh.

    With LoRA params are the adapters, and beside them lie "base", the weights in `dtype`.
    """
    params, base = family.param_shapes(model), {}
    if lora_rank:
        base = {"base": jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), params)}
        params = jax.eval_shape(lambda: family.new_adapters(jax.random.key(0), params, lora_rank))
    shapes = {"params": params, "opt": jax.eval_shape(optimizer.init, params)} | base
    layout = family.shardings(mesh, shapes)
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, layout)


def bytes_on_a_device(tree):
    """Of a tree of arrays, or of ShapeDtypeStructs that say how they are laid out."""
    leaves = flatten(tree).values()
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def check_memory(mesh, needed, smaller):
    """Print how many bytes a device needs to train; ValueError if fewer are free. smaller is {flag: bytes}."""
    device = jax.local_devices()[0]
    free = free_bytes(device) / (mesh.size if device.platform == "cpu" else 1)  # a CPU's devices share its memory
    what = f"weights, moments and gradients take {needed / 1e9:.3g} GB on each device"
    print(f"{what}, {free / 1e9:.3g} are free; activations come on top", flush=True)
    if needed > free:
        advice = " or ".join(f"{flag} takes {size / 1e9:.3g}" for flag, size in smaller.items() if size <= free)
        advice = advice or "that takes a smaller model, or more devices"
        raise ValueError(f"{what}, where {free / 1e9:.3g} are free; {advice}")


def inference_mesh(model, devices, rows):
    """A mesh (data, fsdp, tensor) for inference: tensor up to the model's key/value heads, `rows` texts over data.

    Of the devices only those that this divides evenly; with rows 0 all of them.
    """
    heads = model.kv_heads // getattr(model, "maps", 1)
    tensor = math.gcd(len(devices), heads, model.ffn, model.vocab)
    data = math.gcd(len(devices) // tensor, rows)
    axes, auto = ("data", "fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh((data, 1, tensor), axes, auto, devices=devices[: data * tensor])


def bytes_needed(family, model, mesh, stored, dtype, bits):
    """Bytes of a device while a checkpoint is read: its part of the weights, and of the largest array as stored."""
    shapes = family.param_shapes(model)
    parts = jax.tree.map(
        lambda s, at: jax.ShapeDtypeStruct(at.shard_shape(s.shape), dtype), shapes, family.shardings(mesh, shapes)
    )

    def kept(path, part):
        narrow = bits and len(part.shape) == 2
        return jax.eval_shape(lambda x: family.quantise(x, bits, path[-1].key), part) if narrow else part

    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.tree_util.tree_map_with_path(kept, parts)))
    return size + jax.numpy.dtype(stored).itemsize * max(part.size for part in jax.tree.leaves(parts))


def bits_of(flags):
    """How many bits --int8 and --int4 leave of a matrix's elements; 0: all."""
    if flags.int8 and flags.int4:
        raise ValueError("--int8 or --int4, not both")
    return 8 if flags.int8 else 4 if flags.int4 else 0


def load_for_inference(family, folder, step=0, dtype="", bits=0, devices=0, rows=1):
    """(model, step, mesh) of load() on the machine's devices, or so many of them, for `rows` texts at a time.

    The mesh is None for one device. dtype "" is bfloat16; on a CPU float32, which is faster there, if memory holds it.
    Raises ValueError for a checkpoint that is too large, before it is read, and what load() raises.
    """
    # What the checkpoint holds, and how it would lie on the devices.
    path, meta, _ = find_weights(absolute(folder), step)
    if step and path == absolute(folder):
        raise ValueError(f"{folder} was converted and has no steps; leave --step={step} out")
    model, stored = family.read_config(path, meta), meta.get("dtype", "float32")
    if devices > jax.device_count():
        raise ValueError(f"--devices={devices}: there are {device_line()}")
    mesh = inference_mesh(model, jax.devices()[: devices or None], rows)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(device_line() + f"; mesh {axes}" * (mesh.size > 1), file=sys.stderr)
    on_cpu = jax.default_backend() == "cpu"
    free = free_bytes(mesh.devices.flat[0]) / (mesh.size if on_cpu else 1)  # a CPU's devices share its memory

    # The first type that fits; else what to do.
    def needed(dtype, bits=bits):
        return bytes_needed(family, model, mesh, stored, dtype, bits)

    choices = [dtype] if dtype else ["float32", "bfloat16"] if on_cpu else ["bfloat16"]
    fitting = [name for name in choices if needed(name) <= free]
    if not fitting:
        smaller = {"--dtype=bfloat16": needed("bfloat16")}
        if hasattr(family, "quantise"):
            smaller |= {f"--int{bits}": needed("bfloat16", bits) for bits in (8, 4)}
        advice = " or ".join(f"{flag} takes {size / 1e9:.3g}" for flag, size in smaller.items() if size <= free)
        takes = f"{needed(choices[-1]) / 1e9:.3g} GB in {f'int{bits} and ' * bool(bits)}{choices[-1]}"
        advice = advice or "that takes a machine with more memory, or more devices"
        raise ValueError(f"{folder} takes {takes} on each device, where {free / 1e9:.3g} are free; {advice}")
    if fitting != choices:
        print(f"bfloat16: float32 takes {needed('float32') / 1e9:.3g} GB, {free / 1e9:.3g} are free", file=sys.stderr)
    mesh = mesh if mesh.size > 1 else None
    model, step = load(family, folder, step, fitting[0], mesh=mesh, bits=bits)
    if not mesh and hasattr(family, "join"):
        family.join(model)
    return model, step, mesh


def mesh_context(mesh):
    """A context in which programs are compiled for a mesh; None is a single device."""
    return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()


@contextlib.contextmanager
def out_of_memory(advice):
    """Where memory runs out, one line that says what to do."""
    try:
        yield
    except Exception as error:  # JAX and PyTorch raise their own, and Orbax wraps them
        if not isinstance(error, MemoryError) and not re.search("RESOURCE_EXHAUSTED|out of memory", str(error)):
            raise
        raise ValueError(f"out of memory; try {advice}") from None
