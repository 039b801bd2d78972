"""Memory, FLOPs and the compiler's time estimate of Dream 7B's sampling steps on a TPU, compiled ahead of time.

    python bench/dream_aot.py               # three compilations, some minutes; needs libtpu, no TPU

One row of 768 tokens in bfloat16, 256 of them to be filled. The programs are those that model_dream.fill runs; of their
loops one round is counted, which is a pass and the logits of as many positions as fit one chunk. These are predictions
of the compiler, not measurements: sorts and scatters carry no estimate and come on top. Writes tpu_aot.json.
"""

import dataclasses
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from record import record

import hlo_cost
import model_dream as dream


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "7b"
    topology: str = "v6e:1x1"
    length: int = 768
    masks: int = 256
    block_length: int = 32
    only: str = ""  # compile the programs whose name holds this text


def lowered(cfg, name):
    """The program `name` of model_dream.fill, traced for one device of the topology; nothing is computed."""
    model, B, L = dream.CONFIGS[cfg.model], 1, cfg.length
    (device,) = hlo_cost.topology_devices(cfg.topology)
    at = jax.sharding.SingleDeviceSharding(device)

    def like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

    cached = name != "a step over the whole canvas"
    rule = dream.Sampling(top_p=0.95, temperature=0.2, block_length=cfg.block_length * cached, cache="dual" * cached)
    run = dream.Run(jnp.dtype("bfloat16"), head_positions=cfg.block_length if cached else cfg.masks)
    sampler = dream.Sampler(dream.graph_of(model, run), model, dataclasses.replace(rule, eps=0.5))
    params = jax.tree.map(lambda s: like(s.shape, jnp.bfloat16), dream.param_shapes(model))
    count = like((), jnp.int32)
    state = {"token_BL": like((B, L), jnp.int32), "step": count, "forwards": count, "idle": count}
    most = cfg.block_length if cached else L
    given = {
        "see_BL": like((B, L), bool),
        "made_BL": like((B, L), bool),
        "place_BL": like((B, L), jnp.int32),
        "banned_V": like((model.vocab,), bool),
        "key_B": like((B,), jax.random.key(0).dtype),
        "table_SN": like((most, most + 1), jnp.int32),
        "steps": count,
    }
    if not cached:
        state["left_B"] = like((B,), jnp.int32)
        return dream._fill.lower(params, state, given, sampler=sampler)
    if name == "the pass that opens a block":
        return dream._open_block.lower(params, state, given, count, sampler=sampler)
    layer = (like((B, L, model.kv_heads, model.head_size), jnp.bfloat16),) * 2
    cache, width = [layer] * model.layers, cfg.block_length + 1
    return dream._fill_block.lower(params, state, given, cache, count, count, count, sampler=sampler, width=width)


def main(cfg):
    jax.config.update("jax_platforms", "cpu")
    dream.on_cpu = lambda: False
    for name in ("a step over the whole canvas", "the pass that opens a block", "a cached step over a block"):
        if cfg.only not in name:
            continue
        started = time.perf_counter()
        _, cost, memory = hlo_cost.compile_and_cost(lowered(cfg, name))
        seconds = cost.seconds(cfg.topology)
        chip = hlo_cost.CHIPS[cfg.topology.partition(":")[0]]
        weights = 2 * np.sum([np.prod(s.shape) for s in jax.tree.leaves(dream.param_shapes(dream.CONFIGS[cfg.model]))])
        ideal = max(cost.flops / chip.flops_per_s, float(weights) / chip.hbm_bytes_per_s)
        record(
            "tpu_aot",
            f"dream {cfg.model} bfloat16, {name}",
            1e3 * seconds,
            "ms, estimate",
            device=f"TPU {cfg.topology}, compiled for, not run on",
            ideal_ms=1e3 * ideal,
            flops=cost.flops,
            hbm_bytes=cost.bytes,
            hbm_gib=memory["total_gib"],
            usable_gib=memory["usable_gib"],
            without_estimate=cost.custom_calls,
            loops_counted_once=cost.unknown_loops,
            compile_s=time.perf_counter() - started,
        )
        for path, cycles in sorted(cost.ops.items(), key=lambda item: -item[1])[:8]:
            print(f"  {cycles / cost.cycles:6.1%}  {path}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
