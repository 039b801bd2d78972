"""JAX: a model for inference. Which folder, which devices, and the first type that fits their
memory.

model, step, mesh = load_for_inference(model_dream, default_folder("out/train_dream", "dream"),
bits=8) with mesh_context(mesh):
    ...                                        # programs are compiled for the mesh; None is a single device
"""

import contextlib
import functools
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import checkpoints
import runs

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
    devices, idle = jax.devices(), checkpoints.idle_accelerator()
    return f"{len(devices)} x {devices[0].device_kind}" + (f"; {idle}" if idle else "")


def bits_of(flags):
    """Bits per weight of a matrix, by the flags --int8 and --int4; 0: not quantised."""
    if flags.int8 and flags.int4:
        raise ValueError("--int8 or --int4, not both")
    return 8 if flags.int8 else 4 if flags.int4 else 0


def load_for_inference(
    family, folder, step=0, dtype="", bits=0, devices=0, rows=1, compile_cache=""
):
    """checkpoints.load() on `devices` devices (0: all) for `rows` texts at a time: (model, step,
    mesh).

    The mesh is None for one device. dtype "" is bfloat16; on a CPU float32, which is faster there,
    if memory holds it. compile_cache is the folder of compiled programs. ValueError for a
    checkpoint that is too large, before it is read.
    """
    checkpoints.keep_compiled(compile_cache)
    path, meta, _ = checkpoints.find_weights(checkpoints.absolute(folder), step)
    if step and path == checkpoints.absolute(folder):
        raise ValueError(f"{folder} was converted and has no steps; leave --step={step} out")
    if devices > jax.device_count():
        raise ValueError(f"--devices={devices}: there are {device_line()}")
    model = family.read_config(path, meta)
    mesh = checkpoints.inference_mesh(model, jax.devices()[: devices or None], rows)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(device_line() + (f"; mesh {axes}" if mesh.size > 1 else ""), file=sys.stderr)

    # The first type that fits; else what to do.
    needed = functools.partial(bytes_needed, family, model, mesh, meta.get("dtype", "float32"))
    on_cpu = jax.default_backend() == "cpu"
    free = checkpoints.free_bytes(mesh)
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
        checkpoints.fits(size, free, f"{folder} takes {size / 1e9:.3g} GB in {kind}", smaller)
    mesh = mesh if mesh.size > 1 else None
    model, step = checkpoints.load(family, folder, step, dtype, mesh=mesh, bits=bits)
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
    shapes, layout = checkpoints.flatten(tree), checkpoints.flatten(family.shardings(mesh, tree))
    for _, names in itertools.groupby(shapes, lambda name: name.rpartition(".")[0]):
        parts = {
            name: jax.ShapeDtypeStruct(layout[name].shard_shape(shapes[name].shape), dtype)
            for name in names
        }
        unread = jnp.dtype(stored).itemsize * sum(part.size for part in parts.values())
        stored_parts = checkpoints.stored_shapes(family, parts, dtype, bits)
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
