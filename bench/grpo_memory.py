"""Memory of Coupled-GRPO's scoring head at Dream 7B's shape, beside the plain form; compiled for a TPU, not run.

    python bench/grpo_memory.py                     # ten compilations, some minutes; needs libtpu, no TPU
    python bench/grpo_memory.py --weights=float32   # parameters as full fine-tuning holds them

Five completions of 256 tokens behind prompts of 200, three versions of each, bfloat16 hidden states, float32 logits.
"reference" computes the logits of all positions, as the PyTorch reference does; "plain" of the completions' alone, in
one piece; "ours" is coupled_grpo.merge_views: two versions, in chunks that the backward pass makes again. The gradient
is that of the hidden states and of the head, "frozen" of the hidden states alone, as with LoRA. Writes tpu_aot.json.
"""

import dataclasses
import sys
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import tyro
from record import record

import coupled_grpo
import hlo_cost
import model_dream as dream


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "7b"
    topology: str = "v6e:1x1"
    weights: typing.Literal["bfloat16", "float32"] = "bfloat16"  # of the head; the computation is in bfloat16
    rows: int = 5
    prompt: int = 200
    completion: int = 256
    chunk: int = 1024  # tokens whose logits exist at a time
    only: typing.Literal["", "forward", "gradient", "frozen"] = ""


def forms(cfg):
    """{name: scores(hidden_BKLD, head_VD, token_BC, mask_BC, weight_B1) -> [B, C]}"""
    last = slice(cfg.prompt - 1, cfg.prompt + cfg.completion - 1)

    def logits_of(head_VD, hidden):
        return dream.linear(hidden, head_VD, dtype=jnp.float32)

    def ours(hidden_BKLD, head_VD, token_BC, mask_BC, weight_B1):
        weights, head = (1 / weight_B1, 1 / (1 - weight_B1)), lambda h: logits_of(head_VD, h)
        return coupled_grpo.merge_views(head, hidden_BKLD[:, :, last], token_BC, mask_BC, weights, cfg.chunk)[0]

    def merged(logits_BKCV, token_BC, mask_BC, weight_B1):
        logp_BKCV = jax.nn.log_softmax(logits_BKCV, -1)
        logp_BKC = jnp.take_along_axis(logp_BKCV, token_BC[:, None, :, None], -1)[..., 0]
        return (logp_BKC[:, 0] + jnp.where(mask_BC, logp_BKC[:, 1] / weight_B1, logp_BKC[:, 2] / (1 - weight_B1))) / 2

    def plain(hidden_BKLD, head_VD, *rest):
        return merged(logits_of(head_VD, hidden_BKLD[:, :, last]), *rest)

    def reference(hidden_BKLD, head_VD, *rest):
        return merged(logits_of(head_VD, hidden_BKLD)[:, :, last], *rest)

    return {"ours": ours, "plain": plain, "reference": reference}


def main(cfg):
    jax.config.update("jax_platforms", "cpu")
    (device,) = hlo_cost.topology_devices(cfg.topology)
    at = jax.sharding.SingleDeviceSharding(device)
    model, B, C = dream.CONFIGS[cfg.model], cfg.rows, cfg.completion

    def like(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at)

    hidden = like(jnp.bfloat16, B, 3, cfg.prompt + C, model.width)
    head = like(jnp.dtype(cfg.weights), model.vocab, model.width)
    rest = like(jnp.int32, B, C), like(bool, B, C), like(jnp.float32, B, 1)
    for what in ("forward", "gradient", "frozen"):
        if cfg.only not in ("", what):
            continue
        found, started = {}, time.perf_counter()
        for name, scores in forms(cfg).items():

            def total(hidden, head, out_BC, *rest, scores=scores):
                return (scores(hidden, head, *rest) * out_BC).sum()

            out = like(jnp.float32, B, C)
            program = {"forward": total, "gradient": jax.grad(total, (0, 1)), "frozen": jax.grad(total)}[what]
            _, cost, memory = hlo_cost.compile_and_cost(jax.jit(program).lower(hidden, head, out, *rest))
            found[name] = memory["temporaries"] / 2**30, 1e3 * cost.seconds(cfg.topology)
            print(f"{what} {name}: {found[name][0]:.3f} GiB, {found[name][1]:.1f} ms", flush=True)
        gib = {name: temporaries for name, (temporaries, _) in found.items()}
        record(
            "tpu_aot",
            f"coupled-grpo scoring head {cfg.model}, {cfg.weights} weights, {what}",
            gib["ours"],
            "GiB of temporaries",
            device=f"TPU {cfg.topology}, compiled for, not run on",
            plain_gib=gib["plain"],
            reference_gib=gib["reference"],
            share_of_plain=gib["ours"] / gib["plain"],
            share_of_reference=gib["ours"] / gib["reference"],
            estimated_ms={name: ms for name, (_, ms) in found.items()},
            rows=B,
            prompt=cfg.prompt,
            completion=C,
            chunk=cfg.chunk,
            compile_s=time.perf_counter() - started,
        )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
