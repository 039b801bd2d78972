"""Dream with matrices in 8 bits: error of the logits, bytes, time of a pass, and what the sampling loop needs on a TPU.

    python bench/dream_int8.py                            # about two minutes; keep the machine idle
    python bench/dream_int8.py --topology=v5e:1x1         # also compiles 7b for it; needs libtpu, no TPU

The model is a preset with new weights, so the error is that of the arithmetic, not of a trained model's outliers;
--ckpt takes a real one. Errors are against float32, over all logits of random tokens: the largest in units of the
largest logit, and the root mean square in units of that of the logits. Writes dream_int8.json.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from record import record

import hlo_cost
import model_dream as dream


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "100m"  # key of CONFIGS
    ckpt: str = ""  # folder of a Dream in the Hub's layout or ours, in place of new weights
    length: int = 64  # tokens of a pass
    rows: int = 4  # random rows for the error
    repeats: int = 9  # timed passes
    topology: str = ""  # TPU to compile the 7b sampling loop for, in processes of their own
    compile_only: str = ""  # used by --topology: int8 or bfloat16


# which matrices are in 8 bits, activations in what
FORMS = {
    "bfloat16": (lambda name: False, jnp.bfloat16),
    "int8, bfloat16": (lambda name: True, jnp.bfloat16),
    "int8, float32": (lambda name: True, jnp.float32),
    "int8 but for the embedding, float32": (lambda name: name != "embed_tokens", jnp.float32),
    "int8 but for the head, float32": (lambda name: name != "lm_head", jnp.float32),
}


def form(params, which, dtype):
    def one(path, x):
        return dream.quantise(x) if x.ndim == 2 and which(path[-1].key) else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def size_of(params):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def compile_for(topology, int8, new=256, length=512):
    """Bytes of the compiled sampling loop of 7b with one row, as the compiler counts them."""
    at = jax.sharding.SingleDeviceSharding(hlo_cost.topology_devices(topology)[0])
    cfg, calls, dream.on_cpu = dream.CONFIGS["7b"], [], lambda: False
    params = jax.eval_shape(lambda params: form(params, lambda name: int8, jnp.bfloat16), dream.param_shapes(cfg))
    token_BL = np.where(np.arange(length) < length - new, 5, cfg.mask_id)[None]
    real, dream._fill = dream._fill, lambda *args, **kwargs: calls.append((args, kwargs)) or args[1]
    model = nnx.merge(dream.graph_of(cfg, dream.Run(dtype=jnp.bfloat16)), params)
    dream.fill(model, token_BL, None, dream.Sampling(temperature=0.2, top_p=0.95), jax.random.key(0))
    (args, kwargs) = calls[0]
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=at), args)
    memory = real.lower(*args, **kwargs).compile().memory_analysis()
    return {"arguments": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes}


def main(cfg):
    if cfg.compile_only:
        print(json.dumps(compile_for(cfg.topology, cfg.compile_only == "int8")))
        return
    if cfg.ckpt:
        model = (dream.load if (Path(cfg.ckpt) / "meta.json").exists() else dream.from_hf)(cfg.ckpt, jnp.float32)
        config, params = model.cfg, nnx.to_pure_dict(nnx.state(model))
    else:
        config = dream.CONFIGS[cfg.model]
        params = jax.jit(lambda: dream.new_params(config, 0))()
    apply = jax.jit(lambda model, token_BL: model(token_BL))
    token_BL = jnp.asarray(np.random.default_rng(0).integers(8, config.vocab // 2, (cfg.rows, cfg.length)), jnp.int32)
    results, want = {}, None
    for name, (which, dtype) in {"float32": (lambda name: False, jnp.float32), **FORMS}.items():
        weights = form(params, which, dtype)
        model = nnx.merge(dream.graph_of(config, dream.Run(dtype=dtype)), weights)
        got = np.asarray(apply(model, token_BL), np.float64)
        want = got if want is None else want
        seconds = []
        for _ in range(cfg.repeats):
            started = time.perf_counter()
            apply(model, token_BL[:1]).block_until_ready()
            seconds.append(time.perf_counter() - started)
        results[name] = {
            "largest_error": np.abs(got - want).max() / np.abs(want).max(),
            "rms_error": np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)),
            "same_best": np.mean(got.argmax(-1) == want.argmax(-1)),
            "bytes": size_of(weights),
            "pass_s": np.median(seconds[1:]),
        }
        print(name, {key: f"{value:.4g}" for key, value in results[name].items()}, flush=True)
    shapes = dream.param_shapes(dream.CONFIGS["7b"])
    size_7b = {
        name: size_of(jax.eval_shape(lambda params, a=arguments: form(params, *a), shapes))
        for name, arguments in FORMS.items()
        if name.endswith("bfloat16")
    }
    compiled = {}
    for kind in ("int8", "bfloat16") if cfg.topology else ():
        command = [sys.executable, __file__, f"--topology={cfg.topology}", f"--compile_only={kind}"]
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        last = (result.stdout if not result.returncode else result.stderr).strip().splitlines()[-1]
        compiled[kind] = last[:300] if result.returncode else json.loads(last)
        print(cfg.topology, kind, compiled[kind], flush=True)
    record(
        "dream_int8",
        f"dream {'checkpoint' if cfg.ckpt else cfg.model}: logits with int8 weights, float32 activations",
        results["int8, float32"]["rms_error"],
        "rms error / rms of the logits",
        forms=jax.tree.map(float, results),
        bytes_7b=size_7b,
        compiled_7b={cfg.topology: compiled} if compiled else None,
        load=os.getloadavg()[0],
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
