"""JAX: checkpoints in Orbax, models in folders, meshes, several hosts, and what fits the memory.

    store = Checkpoints("out/run", keep=2)                 # <folder>/checkpoints/<step>/, asynchronous and atomic
    store.save(step, {"params": ..., "opt": ...}, meta)
    state = store.restore(like)                            # on any number of devices; every checksum is compared
    model, step = load(model_dream, "out/run", mesh=mesh)

A model family is a module, model_dream or model_pythoncoder, with read_config, param_shapes,
shardings and graph_of.

    model, step, mesh = load_for_inference(model_dream, default_folder("out/train_dream", "dream"))
    with mesh_context(mesh):    # programs are compiled for the mesh; None is a single device
        ...
"""

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import logging
import math
import operator
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
import safetensors.numpy
from flax import nnx, traverse_util
from jax.experimental import multihost_utils

import runs

# ---- trees of arrays -----------------------------------------------------------------------------------------------


def flatten(tree):
    """Any tree of arrays -> {"layers.0.q_proj": array}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(flat):
    """{"layers.0.q_proj": array} -> nested dictionaries."""
    return traverse_util.unflatten_dict(flat, sep=".")


def on_host(x):
    """A small array as NumPy's, which compiles nothing; a large one, or one of several hosts, as it
    is.
    """
    return np.asarray(x) if x.size < 1 << 24 and getattr(x, "is_fully_addressable", True) else x


def bit_sum(x):
    return x.view(f"uint{8 * x.dtype.itemsize}").sum(dtype=np.uint32)


def bit_sums(tree):
    """{name: checksum} of a tree: the sum of each array's words modulo 2^32, the same however the
    array is split.
    """
    # One array at a time: a CPU copies the words, and reductions over devices that run side by side
    # can deadlock.
    arrays = {name: on_host(x) for name, x in flatten(tree).items()}
    return {
        name: int((bit_sum if isinstance(x, np.ndarray) else jax.jit(bit_sum))(x))
        for name, x in arrays.items()
    }


# ---- several hosts -------------------------------------------------------------------------------------------------


def join_hosts(hosts):
    """Initialise jax.distributed: "auto" on TPU pods, SLURM and MPI, or ADDRESS:PORT,COUNT,INDEX;
    "" is one host.
    """
    if hosts:
        address, *numbers = hosts.split(",")
        try:
            where = [] if hosts == "auto" else [address, *map(int, numbers)]
            # all end when one is killed
            jax.distributed.initialize(*where, heartbeat_timeout_seconds=30)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"--hosts={hosts} ({error}): ADDRESS:PORT,COUNT,INDEX; auto: TPU, SLURM, MPI"
            ) from None


def host_0_says(value):
    """The truth of a value on host 0: what depends on a clock has to be decided once."""
    return bool(multihost_utils.broadcast_one_to_all(value)) if jax.process_count() > 1 else value


def check_hosts(folder, settings):
    """The same ValueError on all hosts if one has other settings than host 0, or does not see its
    files.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()
    mine = np.frombuffer(digest[:4] + os.urandom(4), np.int32)
    first = multihost_utils.broadcast_one_to_all(mine)
    marker = folder / f".hosts{first[1]}"
    if jax.process_index() == 0:
        runs.write(marker, b"")
    multihost_utils.sync_global_devices("marker written")
    for _ in range(20):  # a network disk can take seconds to show a new file
        if not marker.exists():
            time.sleep(0.5)
    equal_H, sees_H = multihost_utils.process_allgather(
        np.array([mine[0] == first[0], marker.exists()])
    ).T
    if jax.process_index() == 0:
        marker.unlink()
    unseen = f"do not see what host 0 wrote to {folder}; --out is a disk that all share, or a bucket (gs://...)"
    for right_H, problem in (equal_H, "have other settings or data than host 0"), (sees_H, unseen):
        if not right_H.all():
            raise ValueError(f"hosts {np.flatnonzero(~right_H).tolist()} {problem}")


# ---- checkpoints of a run ------------------------------------------------------------------------------------------


class Checkpoints:
    """Orbax checkpoints <folder>/checkpoints/<step>/: the newest `keep`, and the one whose metric
    `best` is lowest.
    """

    def __init__(self, folder, keep=2, best="heldout_nats", own=True):
        ocp, self.folder, metric = orbax(), absolute(folder), operator.itemgetter(best)
        if any(self.folder.glob("step_*")):
            raise ValueError(f"{folder} holds a run of train_gpu.py; choose another folder")
        kept, self.args = ocp.checkpoint_managers, ocp.args
        lowest = kept.BestN(
            get_metric_fn=metric, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        how = {"preservation_policy": kept.AnyPreservationPolicy([kept.LatestN(keep), lowest])}
        # without it Orbax stores no metric, and a resumed run forgets the best step
        how["best_fn"] = metric
        # of a killed save; in the folder of another run one may be going on
        how["cleanup_tmp_directories"] = own
        how["async_options"] = ocp.AsyncOptions(
            post_finalization_callback=(self.folder / runs.SAVED).touch
        )
        self.manager = ocp.CheckpointManager(
            self.folder / "checkpoints", options=ocp.CheckpointManagerOptions(**how)
        )
        self.newest = self.manager.latest_step  # newest() is the newest step, None without any

    @contextlib.contextmanager
    def writing(self):
        """One line for what goes wrong while a checkpoint is written."""
        try:
            yield
        except (OSError, ValueError) as error:
            steps = sorted(self.manager.all_steps(read=True)) or "no checkpoint"
            why = f"a checkpoint was not written ({runs.first_line(error)})"
            raise OSError(f"{why}; go on with --resume={self.folder} from {steps}") from None

    def save(self, step, state, meta, metrics=None):
        """Start to save a dictionary of trees, with what meta holds as JSON; waits for the save
        before it.
        """
        # The checksums are of what is in memory now: restore() compares them with what the disk
        # gives back.
        items = {name: self.args.StandardSave(tree) for name, tree in state.items() if tree}
        items["meta"] = self.args.JsonSave(meta | {"sums": bit_sums(state)})
        with self.writing():
            self.manager.save(step, args=self.args.Composite(**items), metrics=metrics, force=True)

    def meta(self):
        """The JSON of the newest checkpoint."""
        return runs.read_json(
            self.folder / f"checkpoints/{self.newest()}/meta/metadata", "model", "sums"
        )

    def restore(self, like):
        """The newest checkpoint, laid out as the arrays or ShapeDtypeStructs of `like`; ValueError
        if a bit differs.
        """
        step, sums = self.newest(), self.meta()["sums"]
        items = {name: self.args.StandardRestore(tree) for name, tree in like.items() if tree}
        try:
            state = {**like, **self.manager.restore(step, args=self.args.Composite(**items))}
            wrong = [name for name, value in bit_sums(state).items() if value != sums.get(name)]
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            wrong = [runs.first_line(error)]
        if wrong:
            advice = "if it is damaged, delete its folder to use the one before"
            raise ValueError(
                f"{self.folder}/checkpoints/{step} cannot be read ({', '.join(wrong)}); {advice}"
            )
        return state

    def resume(self, folder, meta, like):
        """(state, its meta) of the newest checkpoint of the run in `folder`, saved here, too; None
        without one.

        ValueError if its model, rows, optimizer, dtype, LoRA rank or base weights are not those in
        meta.
        """
        store = (
            self
            if absolute(folder).resolve() == self.folder.resolve()
            else Checkpoints(folder, own=False)
        )
        if store.newest() is None:
            print(
                f"{folder} stopped before its first checkpoint: starting at step 0 with its settings"
            )
            return None
        saved, where = store.meta(), f"{folder}/checkpoints/{store.newest()}"
        runs.check_resumed(saved, meta, where, fixed=("lora_rank", "optimizer", "dtype"))
        if saved.get("base") != meta.get("base"):
            raise ValueError(
                f"{meta['train']['init']} holds other weights than {folder} began with; pass its --init"
            )
        print(f"resuming {folder} after step {saved['step']}")
        state = store.restore(like)
        if store is not self:  # from here on this folder goes on alone
            self.save(
                saved["step"], state, meta | {name: saved[name] for name in ("step", "skipped")}
            )
        return state, saved

    def close(self):
        """Wait for the save under way."""
        with self.writing():
            self.manager.close()


def absolute(folder):
    """The folder as an absolute path, which Orbax asks for; a bucket's as it is."""
    path = runs.as_path(folder)
    return path.absolute() if isinstance(path, Path) else path


def orbax():
    """The library orbax.checkpoint, whose import takes half a second. It raises errors here and
    logs none of them.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    threading.excepthook = sys.unraisablehook = lambda _: None
    return importlib.import_module("orbax.checkpoint")


def state_shapes(family, model, optimizer, mesh, dtype=jnp.bfloat16, lora_rank=0, bits=0):
    """{"params", "opt"} of a trainer as ShapeDtypeStructs, each with its layout on the mesh.

    With LoRA params are the adapters, and beside them lie "base", the weights in `dtype`, with
    matrices in `bits`.
    """
    params, base = family.param_shapes(model), {}
    if lora_rank:
        base = {"base": stored_shapes(family, params, dtype, bits)}
        params = jax.eval_shape(lambda: family.new_adapters(jax.random.key(0), params, lora_rank))
    shapes = {"params": params, "opt": jax.eval_shape(optimizer.init, params)} | base
    layout = family.shardings(mesh, shapes)
    return jax.tree.map(
        lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, layout
    )


def stored_shapes(family, params, dtype, bits=0):
    """The shapes of parameters in `dtype`, with matrices in `bits`, as load() gives them."""

    def stored(path, s):
        s, name = jax.ShapeDtypeStruct(s.shape, dtype), path[-1].key.split(".")[-1]
        return (
            jax.eval_shape(lambda x: family.quantise(x, bits, name), s)
            if bits and len(s.shape) == 2
            else s
        )

    return jax.tree_util.tree_map_with_path(stored, params)


# ---- models in folders ---------------------------------------------------------------------------------------------


def companions(folder):
    """{name: bytes} of what lies beside a model's weights: tokenizer, chat template, code that
    transformers runs.
    """
    names = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
    ]
    names += ["merges.txt", "chat_template.jinja", "generation_config.json"]
    paths = [*map(runs.as_path(folder).joinpath, names), *sorted(runs.as_path(folder).glob("*.py"))]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def find_weights(folder, step=0):
    """(path, meta, step) of the weights in a folder: a run's step, 0 the newest, or what
    convert_weights.py wrote.

    Orbax, or safetensors of a PythonCoder. The step is that of the run, 0 for a model of the Hub.
    """
    if (folder / "meta.json").is_file():  # written by convert_weights.py
        meta = runs.read_json(folder / "meta.json", "sums")
        return folder, meta, meta.get("step", 0)
    keys = runs.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if (folder / "model.safetensors").is_file() and keys.get("model_type") == "pythoncoder":
        about = {
            name: keys.pop(name, None) for name in ("model_type", "source", "step", "torch_dtype")
        }
        meta = {
            "model": keys,
            "dtype": about["torch_dtype"] or "float32",
            "step": about["step"] or 0,
        }
        return folder, meta, meta["step"]
    if any(folder.glob("model*.safetensors")):  # a run with LoRA holds adapter_model.safetensors
        raise ValueError(
            f"{folder} is in the Hub's form: python convert_weights.py --source={folder} --out=DIR"
        )
    step, path = runs.newest(folder, step)
    if (path / "adapters").is_dir():
        raise ValueError(
            f"{path} holds what LoRA learnt; the whole model is in {folder}/merged when the run has ended"
        )
    return path, runs.read_json(path / "meta" / "metadata", "model", "sums"), step


def load(family, folder, step=0, dtype=None, mesh=None, bits=0):
    """(model, step) in the folder of a run, or of convert_weights.py. dtype None is the stored one;
    step 0 the newest.

    With a mesh each device reads its own part of every parameter. With bits (Dream), 8 or 4,
    matrices are quantised as they are read, and dtype is that of the rest. Raises ValueError or
    FileNotFoundError.
    """
    folder = absolute(folder)
    path, meta, step = find_weights(folder, step)
    cfg = family.read_config(folder, meta)
    stored = jnp.dtype(meta.get("dtype", "float32"))
    dtype = jnp.dtype(dtype or stored)

    # Shape, type and place of every parameter, before any is read.
    shapes = family.param_shapes(cfg)
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = (
        family.shardings(mesh, shapes) if mesh else jax.tree.map(lambda _: first_device, shapes)
    )
    like = flatten(
        jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, stored, sharding=at), shapes, layout
        )
    )

    def convert(name, x):
        # Of a large array the largest and the smallest show a NaN, without a copy.
        values = on_host(x)
        ends = values if isinstance(values, np.ndarray) else x.max(initial=0) + x.min(initial=0)
        if not (jnp.issubdtype(x.dtype, jnp.floating) and np.isfinite(ends).all()):
            raise ValueError(
                f"{path} is damaged: {name} ({x.dtype}) holds NaN, infinity or integers"
            )
        if bits and x.ndim == 2:
            return family.quantise(x, bits, name.split(".")[-1])
        return x if x.dtype == dtype else jax.device_put(values.astype(dtype), x.sharding)

    if "sums" in meta:
        params = read_orbax(path, like, meta["sums"], convert)
    else:
        try:
            with safetensors.safe_open(path / "model.safetensors", "numpy") as file:
                sums = json.loads((file.metadata() or {}).get("sums", "{}"))
                found = {name: file.get_tensor(name) for name in file.keys()}
        except (safetensors.SafetensorError, ValueError) as error:
            raise ValueError(f"{path}/model.safetensors cannot be read: {error}") from None
        runs.check_tensors(
            *({name: x.shape for name, x in tensors.items()} for tensors in (found, like)), path
        )
        if wrong := [
            name for name, total in bit_sums(found).items() if total != sums.get(name, total)
        ]:
            raise ValueError(
                f"{path}/model.safetensors is damaged: {', '.join(wrong)} differ from what was saved"
            )
        params = {
            name: convert(name, jax.device_put(found[name], want.sharding))
            for name, want in like.items()
        }
    return nnx.merge(family.graph_of(cfg, family.Compute(dtype=dtype)), unflatten(params)), step


def read_orbax(path, like, sums, convert):
    """{name: convert(name, array)} of the parameters {name: ShapeDtypeStruct}, each on the devices
    of its sharding.
    """
    ocp, params = orbax(), {}
    # A layer at a time: the stored model is never whole in memory beside another form of it.
    for _, names in itertools.groupby(like, lambda name: name.rpartition(".")[0]):
        item = unflatten({name: like[name] for name in names})
        how = {
            "restore_args": ocp.checkpoint_utils.construct_restore_args(item),
            "partial_restore": True,
        }
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                layer = flatten(
                    checkpointer.restore(path / "params", args=ocp.args.PyTreeRestore(item, **how))
                )
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            raise ValueError(
                f"checkpoint {path} cannot be read: {runs.first_line(error)}; copy it again"
            ) from None
        if wrong := [
            k for k, v in bit_sums(layer).items() if v not in (sums.get(k), sums.get(f"params.{k}"))
        ]:
            raise ValueError(
                f"{path} cannot be read: {', '.join(wrong)} differ from what was saved; copy it again"
            )
        params |= {name: convert(name, layer.pop(name)) for name in list(layer)}
    return params


def save(family, folder, model, files=(), source=""):
    """Write a Dream as an Orbax folder, whole or not at all: config.json, params/, meta.json, and
    copies of `files`.
    """
    folder = Path(folder).absolute()
    params = nnx.to_pure_dict(nnx.state(model))
    leaves = jax.tree.leaves(params)
    (dtype,) = {x.dtype.name for x in leaves}  # a checkpoint has one
    meta = {"dtype": dtype, "parameters": sum(x.size for x in leaves), "sums": bit_sums(params)}
    with runs.new_folder(folder) as partial:
        with orbax().StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "params", params)
        keys = family.config_to_hf(model.cfg, dtype) | ({"source": source} if source else {})
        runs.write(partial / "config.json", keys)
        runs.write(partial / "meta.json", meta)
        for path in files:
            shutil.copy(path, partial)


def save_merged(family, cfg, folder, given, step, dtype, adapters, files=(), source=""):
    """save() the model in the folder `given`, of this step, in dtype, with LoRA's adapters added to
    its matrices.
    """
    # On the CPU, unless JAX_PLATFORMS leaves it out: devices that hold the model in few bits may
    # have no room for more.
    host = mesh_of(
        jax.devices("cpu" if "cpu" in (jax.config.jax_platforms or "cpu") else None)[:1], (1, 1, 1)
    )
    base = nnx.to_pure_dict(nnx.state(load(family, given, step, dtype, host)[0]))
    merged = family.merge_adapters(base, jax.device_put(adapters, host.devices.item()))
    save(family, folder, nnx.merge(family.graph_of(cfg, family.Compute()), merged), files, source)


# ---- devices, and what fits their memory ---------------------------------------------------------------------------

ROOT = Path("/")  # of the file system; tests replace it
PEAK_FLOPS = {  # of dense bfloat16 products, by the data sheets
    "TPU v6": 918e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v4": 275e12,
    "NVIDIA H200 NVL": 835e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12, "NVIDIA GeForce RTX 4090": 165e12,
}  # fmt: skip


def connect(cfg):
    """Join the other hosts, use the compile cache. ValueError if an accelerator would stay idle."""
    join_hosts(cfg.hosts)
    keep_compiled(cfg.compile_cache)
    if cfg.device:
        jax.config.update("jax_platforms", cfg.device)
    elif idle := idle_accelerator():
        raise ValueError(f"{idle}; or train on the CPU with --device=cpu")


def keep_compiled(folder):
    """Keep compiled programs in a folder, where a later process finds them; "" compiles anew."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        # JAX keeps none below a second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def idle_accelerator():
    """Which accelerator JAX leaves idle, and what to install; "" for none, or where the user asked
    for the CPU.
    """
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return ""
    # in Windows
    nvidia = any(ROOT.glob("dev/nvidia[0-9]*")) or any(ROOT.glob("usr/lib/wsl/lib/libcuda.so.1"))
    if nvidia and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        return "an NVIDIA GPU is here, JAX has no CUDA: pip install -r requirements-cuda.txt"
    # Newer TPUs are behind vfio, as graphics cards of virtual machines are; 0x1ae0 is Google. NPUs
    # are in /dev/accel/.
    google = any(
        path.read_text().strip() == "0x1ae0" for path in ROOT.glob("sys/bus/pci/devices/*/vendor")
    )
    tpu = any(ROOT.glob("dev/accel[0-9]*")) or (google and any(ROOT.glob("dev/vfio/[0-9]*")))
    return (
        "a TPU is here, JAX does not see it: is it in use? pip install -r requirements-tpu.txt"
        if tpu
        else ""
    )


def peak_flops(device):
    """FLOP/s of a device's dense bfloat16 products; NaN where the data sheet is not in
    PEAK_FLOPS.
    """
    return next(
        (peak for kind, peak in PEAK_FLOPS.items() if device.device_kind.startswith(kind)), math.nan
    )


def device_memory_gib(device):
    """GiB that JAX may use on its first local accelerator, 15.75 if it does not say; None for a
    CPU.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 15.75 * 2**30)
    return None if device.platform == "cpu" else limit / 2**30


def free_bytes(mesh):
    """Bytes that are free on each device of a mesh, infinite if unknown; nine tenths of what a CPU
    has.
    """
    device = mesh.local_devices[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    if not Path("/proc/meminfo").exists():
        return math.inf
    free = 1024 * int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])
    for path in map(
        Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    ):
        # a container may have less than the machine
        if path.exists() and path.read_text().strip().isdigit():
            now = "".join(x.read_text() for x in path.parent.glob("memory.stat"))  # gVisor has none
            free = min(
                free,
                int(path.read_text())
                - sum(map(int, re.findall(r"^(?:anon|total_rss) (\d+)", now, re.M))),
            )
    return 0.9 * free / len(mesh.local_devices)


AXES = {"axis_names": ("data", "fsdp", "tensor"), "axis_types": (jax.sharding.AxisType.Auto,) * 3}


def training_mesh(cfg, model, devices):
    """The devices as a mesh (data, fsdp, tensor). ValueError if they do not divide, or do not
    divide the model.
    """
    tensor, fsdp = cfg.tensor, cfg.fsdp or max(1, len(devices) // cfg.tensor)
    if len(devices) % (tensor * fsdp):
        raise ValueError(
            f"{len(devices)} devices are no multiple of --fsdp={fsdp} times --tensor={tensor}; lower them"
        )
    heads = model.kv_heads // getattr(model, "maps", 1)
    if heads % tensor or model.ffn % tensor or model.vocab % (tensor * fsdp) or model.width % fsdp:
        sizes = f"{heads} key/value heads, {model.ffn} feed-forward width, {model.vocab} ids, {model.width} width"
        raise ValueError(
            f"--fsdp={fsdp} --tensor={tensor} do not divide the model ({sizes}); lower them"
        )
    return mesh_of(devices, (-1, fsdp, tensor))


def mesh_of(devices, shape):
    """The devices in their order as a mesh (data, fsdp, tensor)."""
    return jax.sharding.Mesh(np.reshape(devices, shape), **AXES)


def inference_mesh(model, devices, rows):
    """A mesh (data, fsdp, tensor) of the devices that divide evenly: tensor over key/value heads,
    data over `rows`.
    """
    heads = model.kv_heads // getattr(model, "maps", 1)
    tensor = math.gcd(len(devices), heads, model.ffn, model.vocab)
    data = math.gcd(len(devices) // tensor, rows)  # rows 0: all devices
    return jax.make_mesh((data, 1, tensor), **AXES, devices=devices[: data * tensor])


def on_mesh(rows, row_ids, sharding):
    """A tuple of arrays [A, B, L], one per column of rows.Rows, of the rows [A, B]. A host reads
    only its own.
    """
    read = functools.lru_cache(None)(lambda a, b: rows.read(row_ids[slice(*a), slice(*b)]))

    def column(c, index):
        return read(*((s.start, s.stop) for s in index[:2]))[c]

    shape, columns = (*row_ids.shape, rows.meta["seq_len"]), range(len(rows.columns))
    return tuple(
        jax.make_array_from_callback(shape, sharding, functools.partial(column, c)) for c in columns
    )


def bytes_on_a_device(tree):
    """Bytes on a device of a tree of arrays, or of ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def smaller_forms(cfg):
    """{flags: (LoRA's rank, bits of the frozen matrices)} of what takes less memory than cfg."""
    flag, rank = ("", cfg.lora_rank) if cfg.lora_rank else ("--lora_rank=16", 16)
    widths = {
        f"{flag} --base_bits={bits}".strip(): (rank, bits)
        for bits in (8, 4)
        if bits < (cfg.base_bits or 16)
    }
    smaller = widths if cfg.lora_rank else {flag: (rank, 0)} | widths
    # adapters train on one host, to its own disk
    return {} if cfg.hosts or "://" in cfg.out else smaller


def fits(needed, free, what, smaller):
    """Raise ValueError if fewer bytes are free than needed; smaller is {flag: bytes} of what takes
    less.
    """
    if needed > free:
        advice = " or ".join(
            f"{flag} takes {size / 1e9:.3g}" for flag, size in smaller.items() if size <= free
        )
        advice = advice or "use a smaller model, more devices or more memory"
        raise ValueError(f"{what} on each device, where {free / 1e9:.3g} are free; {advice}")


def check_memory(mesh, needed, smaller):
    """Print how many bytes a device needs to train; ValueError if fewer are free. smaller is {flag:
    bytes}.
    """
    free, what = free_bytes(mesh), f"weights, moments and gradients take {needed / 1e9:.3g} GB"
    print(f"{what} on each device, {free / 1e9:.3g} are free; activations come on top", flush=True)
    fits(needed, free, what, smaller)


# ---- a model for inference ---------------------------------------------------------------------

WEIGHTS = Path(__file__).parent / "weights"  # small trained models, a folder for each family


def default_folder(run, family):
    """The folder of a model where none is named: `run` if it holds one, else that in WEIGHTS, if
    there is one.
    """
    converted = any((Path(run) / name).is_file() for name in ("meta.json", "model.safetensors"))
    if converted or runs.saved_steps(Path(run)) or not (WEIGHTS / family).is_dir():
        return run
    print(
        f"no model in {run}: using weights/{family}, a small one that comes with Unmask",
        file=sys.stderr,
    )
    return str(WEIGHTS / family)


def device_line():
    """The devices of JAX, and the accelerator that it leaves idle."""
    devices, idle = jax.devices(), idle_accelerator()
    return f"{len(devices)} x {devices[0].device_kind}" + (f"; {idle}" if idle else "")


def bits_of(flags):
    """Bits per weight of a matrix, by the flags --int8 and --int4; 0: not quantised."""
    if flags.int8 and flags.int4:
        raise ValueError("--int8 or --int4, not both")
    return 8 if flags.int8 else 4 if flags.int4 else 0


def load_for_inference(
    family, folder, step=0, dtype="", bits=0, devices=0, rows=1, compile_cache=""
):
    """load() on `devices` devices (0: all) for `rows` texts at a time: (model, step,
    mesh).

    The mesh is None for one device. dtype "" is bfloat16; on a CPU float32, which is faster there,
    if memory holds it. compile_cache is the folder of compiled programs. ValueError for a
    checkpoint that is too large, before it is read.
    """
    keep_compiled(compile_cache)
    path, meta, _ = find_weights(absolute(folder), step)
    if step and path == absolute(folder):
        raise ValueError(f"{folder} was converted and has no steps; leave --step={step} out")
    if devices > jax.device_count():
        raise ValueError(f"--devices={devices}: there are {device_line()}")
    model = family.read_config(path, meta)
    mesh = inference_mesh(model, jax.devices()[: devices or None], rows)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(device_line() + (f"; mesh {axes}" if mesh.size > 1 else ""), file=sys.stderr)

    # The first type that fits; else what to do.
    needed = functools.partial(bytes_needed, family, model, mesh, meta.get("dtype", "float32"))
    on_cpu = jax.default_backend() == "cpu"
    free = free_bytes(mesh)
    if not dtype:
        wide = needed("float32", bits)
        dtype = "float32" if on_cpu and wide <= free else "bfloat16"
        if on_cpu and wide > free:
            print(
                f"bfloat16: float32 takes {wide / 1e9:.3g} GB, {free / 1e9:.3g} are free",
                file=sys.stderr,
            )
    if (size := needed(dtype, bits)) > free:
        smaller = {"--dtype=bfloat16": needed("bfloat16", bits)}
        if hasattr(family, "quantise"):
            smaller |= {"--int8": needed("bfloat16", 8), "--int4": needed("bfloat16", 4)}
        kind = f"int{bits} and {dtype}" if bits else dtype
        fits(size, free, f"{folder} takes {size / 1e9:.3g} GB in {kind}", smaller)
    mesh = mesh if mesh.size > 1 else None
    model, step = load(family, folder, step, dtype, mesh=mesh, bits=bits)
    if not mesh and hasattr(family, "join"):
        family.join(model)
    return model, step, mesh


def bytes_needed(family, model, mesh, stored, dtype, bits):
    """Bytes that a device needs while a checkpoint is read and joined: more than its share of the
    weights.

    A layer is read as it is stored; then its arrays are converted one by one, and their stored
    forms freed. join() holds gate and up of a layer beside the two as one.
    """
    held, peak, tree = 0, 0, family.param_shapes(model)
    shapes, layout = flatten(tree), flatten(family.shardings(mesh, tree))
    for _, names in itertools.groupby(shapes, lambda name: name.rpartition(".")[0]):
        parts = {
            name: jax.ShapeDtypeStruct(layout[name].shard_shape(shapes[name].shape), dtype)
            for name in names
        }
        unread = jnp.dtype(stored).itemsize * sum(part.size for part in parts.values())
        stored_parts = stored_shapes(family, parts, dtype, bits)
        for name, part in parts.items():
            size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored_parts[name]))
            held, peak = held + size, max(peak, held + size + unread)
            unread -= jnp.dtype(stored).itemsize * part.size
            if name.endswith("gate_proj"):
                joined = 2 * size
    return max(peak, held + joined) if mesh.size == 1 and hasattr(family, "join") else peak


def mesh_context(mesh):
    """A context in which programs are compiled for a mesh; None is a single device."""
    return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()
