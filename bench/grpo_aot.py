"""Memory and the compiler's time estimate of Coupled-GRPO's micro-step on Dream 7B, compiled ahead of time for TPUs.

    python bench/grpo_aot.py                        # LoRA on one chip, all weights on 8 and 16; needs libtpu, no TPU
    python bench/grpo_aot.py --only=v6e:1x1

The program is coupled_grpo.make_programs' `gradients`: loss and gradients of five completions a chip (one where all
weights are trained), 200 + 256 tokens, three versions each, added to those so far. What lies in memory beside it is
counted too: Adam's moments, the reference model. Predictions of the compiler, not measurements. Writes tpu_aot.json.
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
from jax.sharding import AxisType
from record import record

import coupled_grpo as grpo
import hlo_cost
import model_dream as dream


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "7b"
    layers: int = 0  # fewer, for a look at how long it takes; 0: the model's
    only: str = ""  # compile for this topology alone


CASES = {"v6e:1x1": {"lora_rank": 16, "micro_batch": 5}, "v6e:2x4": {"micro_batch": 8}, "v6e:4x4": {"micro_batch": 16}}


def size_of(tree):
    """Bytes of a tree on one device."""
    return sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def lowered(model, topology, settings):
    """(the traced program, bytes a chip of what lies beside it)."""
    cfg = dataclasses.replace(grpo.Config(), **grpo.PRESETS["7b"] | settings)
    devices = np.asarray(hlo_cost.topology_devices(topology)).reshape(1, -1, 1)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def on_mesh(tree):
        return jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), tree, dream.shardings(mesh, tree)
        )

    def in_dtype(tree, dtype):
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), tree)

    shapes, base = dream.param_shapes(model), {}
    if cfg.lora_rank:
        base = on_mesh(in_dtype(shapes, jnp.bfloat16))
        adapters = lambda: grpo.new_adapters(jax.random.key(0), base, cfg.lora_rank, cfg.lora_targets)  # noqa: E731
        shapes = jax.eval_shape(adapters)
    trained = on_mesh(in_dtype(shapes, jnp.float32))
    optimizer = grpo.make_optimizer(1e-6)
    beside = size_of(on_mesh(jax.eval_shape(optimizer.init, trained))) + size_of(trained)  # moments, reference
    rows_at = jax.NamedSharding(mesh, dream.PS(dream.BATCH))
    B, P, C = cfg.micro_batch, cfg.max_prompt, cfg.max_new

    def row(dtype, *shape):
        return jax.ShapeDtypeStruct((B, *shape), dtype, sharding=rows_at)

    batch = {"token_BL": row(jnp.int32, P + C), "see_BL": row(bool, P + C), "ratio_B": row(jnp.float32)}
    batch |= {name: row(jnp.float32, C) for name in ("u_BC", "old_BC", "ref_BC")}
    batch |= {"advantage_B": row(jnp.float32), "counted_BC": row(bool, C)}
    batch["first"] = jax.ShapeDtypeStruct((), bool, sharding=jax.NamedSharding(mesh, dream.PS()))
    run = dream.Run(jnp.dtype("bfloat16"), remat="full")
    _, gradients, _ = grpo.make_programs(cfg, dream.graph_of(model, run), optimizer, model.mask_id)
    with jax.set_mesh(mesh):
        return gradients.lower(trained, base, trained, batch), beside, cfg


def main(cfg):
    jax.config.update("jax_platforms", "cpu")
    dream.on_cpu = lambda: False
    model = dream.CONFIGS[cfg.model]
    model = dataclasses.replace(model, layers=cfg.layers or model.layers)
    for topology, settings in CASES.items():
        if cfg.only not in ("", topology):
            continue
        started = time.perf_counter()
        program, beside, run = lowered(model, topology, settings)
        _, cost, memory = hlo_cost.compile_and_cost(program)
        what = f"LoRA of rank {run.lora_rank}" if run.lora_rank else "all weights"
        layers = f", {cfg.layers} layers" if cfg.layers else ""
        record(
            "tpu_aot",
            f"dream {cfg.model}{layers} coupled-grpo micro-step, {what}, {run.micro_batch} completions, {topology}",
            cost.seconds(topology),
            "s, estimate",
            device=f"TPU {topology}, compiled for, not run on",
            step_gib=memory["total_gib"],
            beside_gib=beside / 2**30,
            total_gib=memory["total_gib"] + beside / 2**30,
            usable_gib=memory["usable_gib"],
            flops=cost.flops,
            hbm_bytes=cost.bytes,
            collective_gb={name: size / 1e9 for name, size in cost.collectives.items()},
            without_estimate=cost.custom_calls,
            compile_s=time.perf_counter() - started,
        )
        for path, cycles in sorted(cost.ops.items(), key=lambda item: -item[1])[:8]:
            print(f"  {cycles / cost.cycles:6.1%}  {path}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
