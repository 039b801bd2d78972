"""JAX: Orbax checkpoints, models in folders, meshes, hosts, and what fits memory. Reads the disk.

    store = Checkpoints("out/run", keep=2)  # <folder>/checkpoints/<step>/, asynchronous and atomic
    store.save(step, {"params": ..., "opt": ...}, meta)
    state = store.restore(like)  # on any number of devices; every checksum is compared

    model, step = load(model_dream, "out/run", mesh=mesh)
    model, step, mesh = load_for_inference(model_dream, default_folder("out/run", "dream"))
    with mesh_context(mesh): ...  # programs are compiled for the mesh; None is a single device

A model family is a module, model_dream or model_pythoncoder, with read_config, param_shapes,
shardings and graph_of. This file reads our own forms; convert_weights.py reads those of the Hub.
"""

import contextlib
import functools
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
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx, traverse_util
from jax.experimental import multihost_utils

import runs

# ---- trees of arrays ---------------------------------------------------------------------------


def flatten(tree):
    """Any tree of arrays -> {"layers.0.q_proj": array}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(flat):
    """{"layers.0.q_proj": array} -> nested dictionaries."""
    return traverse_util.unflatten_dict(flat, sep=".")


def on_host(x):
    """A small array as NumPy's, which compiles nothing. A large one, or one of several hosts, stays
    as it is.
    """
    if x.size < 1 << 24 and getattr(x, "is_fully_addressable", True):
        return np.asarray(x)
    return x


def bit_sum(x):
    """The sum of an array's words modulo 2^32, the same however the array is split."""
    return x.view(f"uint{8 * x.dtype.itemsize}").sum(dtype=np.uint32)


def bit_sums(tree):
    """{name: bit_sum} of a tree of arrays."""
    sums = {}
    # One array at a time: a CPU copies the words, and reductions over devices that run side by side
    # can deadlock.
    for name, array in flatten(tree).items():
        array = on_host(array)
        add = bit_sum if isinstance(array, np.ndarray) else jax.jit(bit_sum)
        sums[name] = int(add(array))
    return sums


# ---- several hosts -----------------------------------------------------------------------------


def join_hosts(hosts):
    """Initialise jax.distributed: "auto" on TPU pods, SLURM and MPI, or ADDRESS:PORT,COUNT,INDEX;
    "" is one host.
    """
    if not hosts:
        return
    where = []
    try:
        if hosts != "auto":
            address, count, index = hosts.split(",")
            where = [address, int(count), int(index)]
        # all end when one is killed
        jax.distributed.initialize(*where, heartbeat_timeout_seconds=30)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"--hosts={hosts} ({error}): ADDRESS:PORT,COUNT,INDEX; auto: TPU, SLURM, MPI"
        ) from None


def host_0_says(value):
    """The truth of a value on host 0: what depends on a clock has to be decided once."""
    return bool(multihost_utils.broadcast_one_to_all(value))


def by_host_0(shape, make, *inputs):
    """make(*inputs) on host 0, as an array of this shape on all hosts. All raise its errors."""
    error = None
    values = np.zeros(shape)
    if jax.process_index() == 0:
        try:
            values = np.array(make(*inputs), np.float64)
        except Exception as problem:  # whatever a user's reward raises; others would wait for ever
            error = problem
    if host_0_says(error is not None):
        # waits for all hosts: the end of host 0 would end the others before they say why
        jax.distributed.shutdown()
        raise error or RuntimeError("host 0 failed, and says why")
    return np.asarray(multihost_utils.broadcast_one_to_all(values), np.float64)


def check_hosts(folder, settings):
    """The same ValueError on all hosts if their settings differ, or one sees no file of host 0."""
    if jax.process_count() == 1:
        return
    marker = folder / ".hosts"  # host 0 writes it, and all look for it
    if jax.process_index() == 0:
        marker.touch()
    multihost_utils.sync_global_devices("marker written")
    for _ in range(20):  # a network disk can take seconds to show a new file
        if not marker.exists():
            time.sleep(0.5)
    digest = zlib.crc32(json.dumps(settings, sort_keys=True).encode())
    mine = np.array([digest, marker.exists()], np.uint32)
    digest_H, sees_H = multihost_utils.process_allgather(mine).T
    if jax.process_index() == 0:
        marker.unlink()
    other = np.flatnonzero(digest_H != digest_H[0]).tolist()
    if other:
        raise ValueError(f"hosts {other} have other settings or data than host 0")
    blind = np.flatnonzero(sees_H == 0).tolist()
    if blind:
        raise ValueError(
            f"hosts {blind} do not see what host 0 wrote to {folder}; "
            "--out is a disk that all share, or a bucket (gs://...)"
        )


# ---- checkpoints of a run ----------------------------------------------------------------------


class Checkpoints:
    """Orbax checkpoints <folder>/checkpoints/<step>/: the newest `keep`, and the one whose metric
    `best` is lowest; NaN and infinity are no metric.
    """

    def __init__(self, folder, keep=2, best="heldout_nats", own=True):
        ocp = orbax()
        self.args = ocp.args
        self.folder = absolute(folder)
        if any(self.folder.glob("step_*")):
            raise ValueError(f"{folder} holds a run of train_gpu.py; choose another folder")
        self.best = best

        def metric(metrics):  # older checkpoints may hold NaN, which sorts anywhere
            return metrics[best] if math.isfinite(metrics[best]) else math.inf

        policies = ocp.checkpoint_managers
        lowest = policies.BestN(
            get_metric_fn=metric, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        mark = (self.folder / runs.SAVED).touch
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), lowest]),
            # without it Orbax stores no metric, and a resumed run forgets the best step
            best_fn=metric,
            # of a killed save; in the folder of another run one may be going on
            cleanup_tmp_directories=own,
            async_options=ocp.AsyncOptions(post_finalization_callback=mark),
        )
        self.manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)
        self.newest = self.manager.latest_step  # newest() is the newest step, None without any

    @contextlib.contextmanager
    def writing(self):
        """One line for what goes wrong while a checkpoint is written."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise OSError(
                f"a checkpoint was not written ({runs.first_line(error)}); "
                f"go on with --resume={self.folder}"
            ) from None

    def save(self, step, state, meta, metrics=None):
        """Start to save a dictionary of trees, with what meta holds as JSON; waits for the save
        before it.
        """
        # The checksums are of what is in memory now: restore() compares them with what the disk
        # gives back.
        items = {name: self.args.StandardSave(tree) for name, tree in state.items() if tree}
        items["meta"] = self.args.JsonSave(meta | {"sums": bit_sums(state)})
        if not metrics or not math.isfinite(metrics[self.best]):
            metrics = None  # never the best
        with self.writing():
            self.manager.save(step, args=self.args.Composite(**items), metrics=metrics, force=True)

    def meta(self):
        """The JSON of the newest checkpoint."""
        path = self.folder / f"checkpoints/{self.newest()}/meta/metadata"
        return runs.read_json(path, "model", "sums")

    def restore(self, like):
        """The newest checkpoint, laid out as the arrays or ShapeDtypeStructs of `like`. ValueError
        if a bit differs.
        """
        step = self.newest()
        sums = self.meta()["sums"]
        items = {name: self.args.StandardRestore(tree) for name, tree in like.items() if tree}
        try:
            state = {**like, **self.manager.restore(step, args=self.args.Composite(**items))}
            wrong = [name for name, value in bit_sums(state).items() if value != sums.get(name)]
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            wrong = [runs.first_line(error)]
        if wrong:
            raise ValueError(
                f"{self.folder}/checkpoints/{step} cannot be read ({', '.join(wrong)}); "
                "if it is damaged, delete its folder to use the one before"
            )
        return state

    def resume(self, folder, meta, like, unit="step"):
        """(state, its meta) of the newest checkpoint of the run in `folder`, saved here, too; None
        without one.

        ValueError if its model, rows, optimizer, dtype, LoRA rank or base weights are not those in
        meta.
        """
        store = self
        if absolute(folder).resolve() != self.folder.resolve():
            store = Checkpoints(folder, own=False)
        if store.newest() is None:
            print(f"{folder} stopped before its first checkpoint: starting at step 0")
            return None
        saved = store.meta()
        fixed = "lora_rank", "optimizer", "dtype", "beta"
        where = f"{folder}/checkpoints/{store.newest()}"
        runs.check_resumed(saved, meta, where, fixed, unit)
        if saved.get("base") != meta.get("base"):
            raise ValueError(f"{folder} began with other weights; pass its own --init or --ckpt")
        print(f"resuming {folder} after {unit} {saved[unit]}", flush=True)
        state = store.restore(like)
        if store is not self:  # from here on this folder goes on alone
            now = meta | {"step": saved["step"], "skipped": saved["skipped"]}
            self.save(saved["step"], state, now)
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
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threading.excepthook = sys.unraisablehook = lambda _: None
    import orbax.checkpoint

    return orbax.checkpoint


# ---- shapes ------------------------------------------------------------------------------------


def placed(shapes, layout, dtype=None):
    """A tree of shapes with their places on devices, in `dtype`, or each in its own."""

    def place(shape, sharding):
        return jax.ShapeDtypeStruct(shape.shape, dtype or shape.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, layout)


def state_shapes(family, model, optimizer, mesh, dtype=jnp.bfloat16, lora_rank=0, bits=0):
    """{"params", "opt"} of a trainer as ShapeDtypeStructs, each with its layout on the mesh.

    With LoRA params are the adapters, and beside them lie "base", the weights in `dtype`, with
    matrices in `bits`.
    """
    params = family.param_shapes(model)
    shapes = {}
    if lora_rank:
        shapes["base"] = stored_shapes(family, params, dtype, bits)
        params = jax.eval_shape(lambda: family.new_adapters(jax.random.key(0), params, lora_rank))
    shapes |= {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    return placed(shapes, family.shardings(mesh, shapes))


def stored_shapes(family, params, dtype, bits=0):
    """The shapes of parameters in `dtype`, with matrices in `bits`, as load() gives them."""

    def stored(path, shape):
        shape = jax.ShapeDtypeStruct(shape.shape, dtype)
        if not bits or shape.ndim != 2:
            return shape
        name = path[-1].key.split(".")[-1]
        return jax.eval_shape(lambda x: family.quantise(x, bits, name), shape)

    return jax.tree_util.tree_map_with_path(stored, params)


# ---- models in folders -------------------------------------------------------------------------


COMPANIONS = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
vocab.json merges.txt chat_template.jinja generation_config.json"""


def companions(folder):
    """{name: bytes} of what lies beside weights: tokenizer, chat template, transformers' code."""
    folder = runs.as_path(folder)
    paths = [folder / name for name in COMPANIONS.split()] + sorted(folder.glob("*.py"))
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def find_weights(folder, step=0):
    """(path, meta, step) of the weights in a folder: a run's step, 0 the newest, or what
    convert_weights.py wrote.

    Orbax, or safetensors of a PythonCoder. The step is that of the run, 0 for a model of the Hub.
    """
    if (folder / "meta.json").is_file():  # written by convert_weights.py
        meta = runs.read_json(folder / "meta.json", "sums")
        return folder, meta, meta.get("step", 0)
    keys = runs.read_about(folder, "config.json")
    if (folder / "model.safetensors").is_file() and keys.get("model_type") == "pythoncoder":
        meta = {
            "model": keys,
            "dtype": keys.pop("torch_dtype", "float32"),
            "step": keys.pop("step", 0),
        }
        for name in ("model_type", "source"):
            keys.pop(name, None)
        return folder, meta, meta["step"]
    if any(folder.glob("model*.safetensors")):  # a run with LoRA holds adapter_model.safetensors
        raise ValueError(
            f"{folder} is in the Hub's form: python convert_weights.py --source={folder} --out=DIR"
        )
    step, path = runs.newest(folder, step)
    if (path / "adapters").is_dir():
        raise ValueError(
            f"{path} holds what LoRA learnt; "
            f"the whole model is in {folder}/merged when the run has ended"
        )
    meta = path / "meta" / "metadata"
    if not meta.is_file():
        raise ValueError(
            f"{path} has no meta/metadata: copy the run again; "
            f"if another program wrote it, {runs.CONVERT}"
        )
    return path, runs.read_json(meta, "model", "sums"), step


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
    if mesh:
        layout = family.shardings(mesh, shapes)
    else:
        first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        layout = jax.tree.map(lambda _: first_device, shapes)
    like = flatten(placed(shapes, layout, stored))

    def convert(name, x):
        # Of a large array the largest and the smallest show a NaN, without a copy.
        values = on_host(x)
        ends = values
        if values is x:
            ends = x.max(initial=0) + x.min(initial=0)
        if not (jnp.issubdtype(x.dtype, jnp.floating) and np.isfinite(ends).all()):
            raise ValueError(
                f"{path} is damaged: {name} ({x.dtype}) holds NaN, infinity or integers"
            )
        if bits and x.ndim == 2:
            return family.quantise(x, bits, name.split(".")[-1])
        if x.dtype == dtype:
            return x
        return jax.device_put(values.astype(dtype), x.sharding)

    if "sums" in meta:
        params = read_orbax(path, like, meta["sums"], convert)
    else:
        params = read_safetensors(path / "model.safetensors", like, convert)
    graph = family.graph_of(cfg, family.Compute(dtype=dtype))
    return nnx.merge(graph, unflatten(params)), step


def read_safetensors(path, like, convert):
    """{name: convert(name, array)} of a file, as read_orbax."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            sums = json.loads((file.metadata() or {}).get("sums", "{}"))
            found = {name: file.get_tensor(name) for name in file.keys()}
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    want = {name: x.shape for name, x in like.items()}
    runs.check_tensors({name: x.shape for name, x in found.items()}, want, path.parent)
    for name, total in bit_sums(found).items():
        if total != sums.get(name, total):
            raise ValueError(f"{path} is damaged: {name} differs from what was saved")
    return {name: convert(name, jax.device_put(found[name], like[name].sharding)) for name in like}


def read_orbax(path, like, sums, convert):
    """{name: convert(name, array)} of the parameters {name: ShapeDtypeStruct}, each on the devices
    of its sharding.
    """
    ocp = orbax()
    params = {}
    # A layer at a time: the stored model is never whole in memory beside another form of it.
    for _, names in itertools.groupby(like, lambda name: name.rpartition(".")[0]):
        item = unflatten({name: like[name] for name in names})
        args = ocp.args.PyTreeRestore(
            item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                layer = flatten(checkpointer.restore(path / "params", args=args))
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            raise ValueError(
                f"checkpoint {path} cannot be read: {runs.first_line(error)}; copy it again"
            ) from None
        for name, total in bit_sums(layer).items():
            if total not in (sums.get(name), sums.get(f"params.{name}")):
                raise ValueError(
                    f"{path} cannot be read: {name} differs from what was saved; copy it again"
                )
        for name in list(layer):
            params[name] = convert(name, layer.pop(name))
    return params


def save(family, folder, model, files=(), source=""):
    """Write a Dream as an Orbax folder, whole or not at all: config.json, params/, meta.json, and
    copies of `files`.
    """
    params = nnx.to_pure_dict(nnx.state(model))
    leaves = jax.tree.leaves(params)
    (dtype,) = {x.dtype.name for x in leaves}  # a checkpoint has one
    keys = family.config_to_hf(model.cfg, dtype)
    if source:
        keys["source"] = source
    meta = {"dtype": dtype, "parameters": sum(x.size for x in leaves), "sums": bit_sums(params)}
    with runs.new_folder(folder) as partial:
        with orbax().StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "params", params)
        runs.write(partial / "config.json", keys)
        runs.write(partial / "meta.json", meta)
        for path in files:
            shutil.copy(path, partial)


def save_merged(family, cfg, out, given, step, dtype, adapters):
    """save() in out/merged, which is returned, the model in the folder `given`, of this step, in
    dtype, with LoRA's adapters added to its matrices, and with the companions of the run `out`.
    """
    # On the CPU, unless JAX_PLATFORMS leaves it out: devices that hold the model in few bits may
    # have no room for more.
    platform = "cpu" if "cpu" in (jax.config.jax_platforms or "cpu") else None
    device = jax.devices(platform)[0]
    model, _ = load(family, given, step, dtype, mesh_of([device], (1, 1, 1)))
    base = nnx.to_pure_dict(nnx.state(model))
    merged = family.merge_adapters(base, jax.device_put(adapters, device))
    model = nnx.merge(family.graph_of(cfg, family.Compute()), merged)
    files = [out / name for name in companions(out)]
    save(family, out / "merged", model, files, runs.read_json(out / "config.json")["source"])
    return out / "merged"


# ---- devices -----------------------------------------------------------------------------------

ROOT = Path("/")  # of the file system; tests replace it
PEAK_FLOPS = {  # of dense bfloat16 products, by the data sheets
    "TPU v6": 918e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v4": 275e12,
    "NVIDIA H200 NVL": 835e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}  # fmt: skip
AXES = {"axis_names": ("data", "fsdp", "tensor"), "axis_types": (jax.sharding.AxisType.Auto,) * 3}


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
        path = Path(folder).expanduser()
        runs.delete_damaged(path)
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # else from 1 s on


def idle_accelerator():
    """Which GPU JAX leaves idle, and what to install; "" for none, or where the user asked for the
    CPU. Of a TPU JAX itself warns.
    """
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return ""
    # The second is NVIDIA's in Windows.
    nvidia = [*ROOT.glob("dev/nvidia[0-9]*"), *ROOT.glob("usr/lib/wsl/lib/libcuda.so.1")]
    if nvidia and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        return "an NVIDIA GPU is here, JAX has no CUDA: pip install -r requirements-cuda.txt"
    return ""


def peak_flops(device):
    """FLOP/s of a device's dense bfloat16 products; NaN where PEAK_FLOPS lacks the device."""
    for kind, peak in PEAK_FLOPS.items():
        if device.device_kind.startswith(kind):
            return peak
    return math.nan


def device_line():
    """The devices of JAX, and the accelerator that it leaves idle."""
    line = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    idle = idle_accelerator()
    return f"{line}; {idle}" if idle else line


def mesh_of(devices, shape):
    """The devices in their order as a mesh (data, fsdp, tensor)."""
    return jax.sharding.Mesh(np.reshape(devices, shape), **AXES)


def training_mesh(cfg, model, devices):
    """The devices as a mesh (data, fsdp, tensor). ValueError if they do not divide, or do not
    divide the model.
    """
    tensor = cfg.tensor
    fsdp = cfg.fsdp or max(1, len(devices) // tensor)
    flags = f"--fsdp={fsdp} --tensor={tensor}"
    if len(devices) % (tensor * fsdp):
        raise ValueError(
            f"{len(devices)} devices are no multiple of {flags} multiplied; lower them"
        )
    heads = model.kv_heads // getattr(model, "maps", 1)
    if heads % tensor or model.ffn % tensor or model.vocab % (tensor * fsdp) or model.width % fsdp:
        raise ValueError(
            f"{flags} do not divide the model ({heads} key/value heads, {model.ffn} feed-forward "
            f"width, {model.vocab} ids, {model.width} width); lower them"
        )
    return mesh_of(devices, (-1, fsdp, tensor))


def inference_mesh(model, devices, rows):
    """A mesh (data, fsdp, tensor) of the devices that divide evenly: tensor over key/value heads,
    data over `rows`.
    """
    heads = model.kv_heads // getattr(model, "maps", 1)
    tensor = math.gcd(len(devices), heads, model.ffn, model.vocab)
    data = math.gcd(len(devices) // tensor, rows)  # rows 0: all devices
    return jax.make_mesh((data, 1, tensor), **AXES, devices=devices[: data * tensor])


def mesh_context(mesh):
    """A context in which programs are compiled for a mesh; None is a single device."""
    return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()


def on_mesh(rows, row_ids, sharding):
    """Arrays [A, B, L], one per column of rows.Rows, of the rows [A, B]. A host reads its own."""

    @functools.cache  # devices may hold the same rows, and every column asks for them
    def read(first_a, end_a, first_b, end_b):
        return rows.read(row_ids[first_a:end_a, first_b:end_b])

    shape = (*row_ids.shape, rows.meta["seq_len"])
    columns = []
    for c in range(len(rows.columns)):

        def column(index, c=c):
            a, b, _ = index
            return read(a.start, a.stop, b.start, b.stop)[c]

        columns.append(jax.make_array_from_callback(shape, sharding, column))
    return columns


# ---- what fits memory --------------------------------------------------------------------------


def device_memory_gib(device):
    """GiB that JAX may use on its first accelerator, 15.75 if it does not say; None for a CPU."""
    if device.platform == "cpu":
        return None
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 15.75 * 2**30) / 2**30


def free_bytes(mesh):
    """Bytes that are free on each device of a mesh, infinite if unknown; of a CPU nine tenths."""
    device = mesh.local_devices[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    free = 1024 * number_in(Path("/proc/meminfo"), "MemAvailable:", math.inf)
    # A container may have less than the machine. gVisor does not say what is in use.
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path(f"/sys/fs/cgroup/{name}")
        limit = number_in(path, "", math.inf)
        free = min(free, limit - number_in(path.parent / "memory.stat", "(?:anon|total_rss)", 0))
    return 0.9 * free / len(mesh.local_devices)


def number_in(path, name, otherwise):
    """The number after a name at the start of a line of a file of Linux."""
    text = path.read_text() if path.exists() else ""
    match = re.search(rf"^{name} *(\d+)", text, re.M)
    return int(match[1]) if match else otherwise


def bytes_on_a_device(tree):
    """Bytes on a device of a tree of arrays, or of ShapeDtypeStructs with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def bytes_needed(family, model, mesh, stored, dtype, bits):
    """Bytes that a device needs while a checkpoint is read and joined: more than its share of the
    weights.

    A layer is read as it is stored; then its arrays are converted one by one, and their stored
    forms freed. join() holds gate and up of a layer beside the two as one.
    """
    tree = family.param_shapes(model)
    shapes = flatten(tree)
    layout = flatten(family.shardings(mesh, tree))
    width = jnp.dtype(stored).itemsize
    held = 0
    peak = 0
    for _, names in itertools.groupby(shapes, lambda name: name.rpartition(".")[0]):
        layer = {}
        for name in names:
            part = layout[name].shard_shape(shapes[name].shape)
            layer[name] = jax.ShapeDtypeStruct(part, dtype)
        unread = width * sum(x.size for x in layer.values())
        for name, kept in stored_shapes(family, layer, dtype, bits).items():
            size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
            held += size
            peak = max(peak, held + unread)
            unread -= width * layer[name].size
            if name.endswith("gate_proj"):
                joined = 2 * size
    if mesh.size == 1 and hasattr(family, "join"):
        peak = max(peak, held + joined)
    return peak


def smaller_forms(cfg):
    """{flags: (LoRA's rank, bits of the frozen matrices)} of what takes less memory than cfg."""
    if cfg.hosts or "://" in cfg.out:  # adapters train on one host, to its own disk
        return {}
    rank = cfg.lora_rank or 16
    lora_flag = "" if cfg.lora_rank else "--lora_rank=16 "
    forms = {}
    if lora_flag:
        forms["--lora_rank=16"] = rank, 0
    for bits in (8, 4):
        if bits < (cfg.base_bits or 16):
            forms[f"{lora_flag}--base_bits={bits}"] = rank, bits
    return forms


def too_large(what, free, smaller):
    """The error of what does not fit; smaller is {flag: bytes} of what takes less."""
    fitting = [f"{flag} takes {size / 1e9:.3g}" for flag, size in smaller.items() if size <= free]
    advice = " or ".join(fitting) or "use a smaller model, more devices or more memory"
    return ValueError(f"{what} on each device, where {free / 1e9:.3g} are free; {advice}")


def check_memory(mesh, needed, smaller):
    """Print the bytes a device needs to train; ValueError if fewer are free. smaller: {flag: bytes}"""
    free = free_bytes(mesh)
    what = f"weights, moments and gradients take {needed / 1e9:.3g} GB"
    print(f"{what} on each device, {free / 1e9:.3g} are free; activations come on top", flush=True)
    if needed > free:
        raise too_large(what, free, smaller)


# ---- a model for inference ---------------------------------------------------------------------

WEIGHTS = Path(__file__).parent / "weights"  # small trained models, a folder for each family


def default_folder(run, family):
    """The folder of a model where none is named: `run` if it holds one, else that in WEIGHTS."""
    names = "meta.json", "model.safetensors"
    if runs.saved_steps(Path(run)) or any(Path(run, name).is_file() for name in names):
        return run
    print(f"no model in {run}: using weights/{family}, a small one of ours", file=sys.stderr)
    return str(WEIGHTS / family)


def bits_of(flags):
    """Bits per weight of a matrix, by the flags --int8 and --int4; 0: not quantised."""
    if flags.int8 and flags.int4:
        raise ValueError("--int8 or --int4, not both")
    return 8 * flags.int8 + 4 * flags.int4


def slow_in_bfloat16(family, model):
    """Whether a CPU is faster in float32: without avx512_bf16, with a small model, or token by token."""
    cpuinfo = Path("/proc/cpuinfo")
    units = cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text()
    small = family.count_params(model) < 5e6 or getattr(model, "block_length", 1) == 1
    return jax.default_backend() == "cpu" and (small or not units)


def load_for_inference(
    family, folder, step=0, dtype="", bits=0, devices=0, rows=1, compile_cache=""
):
    """load() on `devices` devices (0: all) for `rows` texts at a time: (model, step, mesh).

    The mesh is None for one device. dtype "" is bfloat16; on a CPU float32 if memory holds it and
    slow_in_bfloat16() says so. compile_cache is the folder of compiled programs. ValueError for a
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
    line = device_line()
    slow = slow_in_bfloat16(family, model)
    if mesh.size > 1:
        line += "; mesh " + ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    if slow and dtype == "bfloat16":
        line += "; float32 is faster here"
    print(line, file=sys.stderr)

    # The first type that fits; else what to do.
    needed = functools.partial(bytes_needed, family, model, mesh, meta.get("dtype", "float32"))
    free = free_bytes(mesh)
    if not dtype:
        dtype = "bfloat16"
        if slow and needed("float32", bits) <= free:
            dtype = "float32"
    size = needed(dtype, bits)
    if size > free:
        smaller = {"--dtype=bfloat16": needed("bfloat16", bits)}
        if hasattr(family, "quantise"):
            smaller["--int8"] = needed("bfloat16", 8)
            smaller["--int4"] = needed("bfloat16", 4)
        kind = f"int{bits} and {dtype}" if bits else dtype
        raise too_large(f"{folder} takes {size / 1e9:.3g} GB in {kind}", free, smaller)
    if mesh.size == 1:
        mesh = None
    model, step = load(family, folder, step, dtype, mesh, bits)
    if not mesh and hasattr(family, "join"):
        family.join(model)
    return model, step, mesh
