"""Dream with matrices in 8 bits: error of the logits, bytes, time of a pass, and what the sampling loop needs on a TPU.

    python bench/dream_int8.py                            # about two minutes; keep the machine idle
    python bench/dream_int8.py --topology=v5e:1x1         # also compiles 7b for it; needs libtpu, no TPU

The model is a preset with new weights, so the error is that of the arithmetic, not of a trained model's outliers;
--ckpt takes a real one. Errors are against float32, over all logits of random tokens: the largest in units of the
largest logit, and the root mean square in units of that of the logits. Writes dream_int8.json.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from aot import compile_rows
from flax import nnx
from record import record

import convert_weights
import model_dream as dream
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "100m"  # key of CONFIGS
    ckpt: str = ""  # folder of a Dream in the Hub's layout or ours, in place of new weights
    length: int = 64  # tokens of a pass
    rows: int = 4  # random rows for the error
    repeats: int = 9  # timed passes
    topology: str = ""  # TPU to compile 7b's denoising step for; "" compiles nothing


# which matrices are in 8 bits, activations in what
FORMS = {
    "bfloat16": (lambda name: False, jnp.bfloat16),
    "int8, bfloat16": (lambda name: True, jnp.bfloat16),
    "int8, float32": (lambda name: True, jnp.float32),
    "int8 but for the embedding, float32": (lambda name: name != "embed_tokens", jnp.float32),
    "int8 but for the head, float32": (lambda name: name != "lm_head", jnp.float32),
}


def form(params, which, dtype):
    """The parameters with the matrices that `which` names in 8 bits, all else in dtype."""

    def convert(path, x):
        return dream.quantise(x) if x.ndim == 2 and which(path[-1].key) else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(convert, params)


def size_of(params):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def main(cfg):
    if cfg.ckpt:
        ours = (Path(cfg.ckpt) / "meta.json").exists() or runs.checkpoints(Path(cfg.ckpt))
        model = (
            runs.load(dream, cfg.ckpt, dtype=jnp.float32)[0] if ours else convert_weights.from_hf(cfg.ckpt, jnp.float32)
        )
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
    for kind in ("--int8", "--no-int8") if cfg.topology else ():
        flags = f"sample --topology={cfg.topology} --length=512 {kind}"
        try:
            rows, _ = compile_rows(f"{flags} --block_length=0")
            compiled[kind] = {key: rows[0][key] for key in ("hbm_gib", "temporaries_gib", "usable_gib")}
        except RuntimeError as error:  # it does not fit
            compiled[kind] = str(error)[:300]
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
    runs.command(main, Config, __doc__)
