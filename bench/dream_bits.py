"""What --int8 and --int4 cost a trained Dream: its held-out bits per byte, its predictions, its
bytes, and those of 7b.

    python train_dream.py --seq_len=256 --steps=600 --out=out/dream     # a model; half an hour on a CPU
    python bench/dream_bits.py --ckpt=out/dream                        # two minutes

All forms see the same rows under the same noise, and compute in float32: only the weights differ.
"changed" is the mean KL divergence, in nats, of a masked token's distribution from that of the
float32 weights. Writes dream_bits.json.
"""

import dataclasses
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from record import record

import checkpoints
import model_dream as md
import runs
from rows import Rows, token_bytes


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/train_dream"  # run folder of train_dream.py
    data: str = ""  # folder of data_prep.py; "" is the one that the run was trained on
    rows: int = 128  # held-out rows, the first ones
    draws: int = 2  # noise draws per row
    batch_size: int = 16  # rows that are scored at a time


FORMS = {  # of a matrix of this name
    "bfloat16": lambda x, name: x.astype(jnp.bfloat16),
    "int8": lambda x, name: md.quantise(x, 8, name),
    "int4": lambda x, name: md.quantise(x, 4, name),
    "int4, the embedding and the head too": lambda x, name: md.to_int4(x),
}


def in_form(params, form):
    """The parameters with their matrices in a form, vectors as they are."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: form(x, path[-1].key) if x.ndim == 2 else x, params
    )


def dense(weight):
    """The matrix that a stored form stands for, in float32."""
    if isinstance(weight, md.Int8):
        return weight.q_FD * weight.scale_F1
    return (
        jnp.concatenate([*md.unpacked(weight, jnp.float32)], 1)
        if isinstance(weight, md.Int4)
        else weight * 1.0
    )


def size_of(params):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def main(cfg):
    model, step = checkpoints.load(md, Path(cfg.ckpt), dtype=jnp.float32)
    data = cfg.data or runs.read_json(Path(cfg.ckpt) / "config.json", "data")["data"]
    rows = Rows(data, "heldout")
    columns = rows.read(np.arange(min(cfg.rows, rows.total)))
    graph, params, count = nnx.split(model)[0], nnx.to_pure_dict(nnx.state(model)), columns.shape[1]
    bytes_V = token_bytes(runs.read_tokenizer(cfg.ckpt), rows.meta["vocab_size"])
    counted_RL = md.counted(columns[1], *columns[3:])
    # per byte, of a nat in all rows
    bits = 1 / math.log(2) / bytes_V[columns[0][counted_RL]].sum(dtype=np.float64)

    @jax.jit
    def bound(params, draw, first, batch):
        token_BL, segment_BL, position_BL, *fixed_BL = batch
        noise = md.noise(jax.random.key(draw), count, first + jnp.arange(len(token_BL)), segment_BL)
        return nnx.merge(graph, params).nelbo(token_BL, segment_BL, position_BL, *noise, *fixed_BL)

    @jax.jit
    def change(params, exact, batch):
        """Mean divergence of the predictions at every second position, which is masked."""
        token_BL = jnp.where(jnp.arange(batch.shape[2]) % 2, model.cfg.mask_id, batch[0])
        logp, want = (
            jax.nn.log_softmax(nnx.merge(graph, p)(token_BL)[:, :-1:2]) for p in (params, exact)
        )
        return (jnp.exp(want) * (want - logp)).sum(-1).mean()

    def bounds(params):  # bits per byte, of each draw
        nats_N = np.zeros(cfg.draws)
        for first in range(0, count, cfg.batch_size):
            batch = columns[:, first : first + cfg.batch_size]
            # empty rows cost nothing
            batch = np.pad(batch, ((0, 0), (0, cfg.batch_size - batch.shape[1]), (0, 0)))
            nats_N += [float(bound(params, n, first, batch)) for n in range(cfg.draws)]
        return bits * nats_N

    want, shapes, results = bounds(params), md.param_shapes(md.CONFIGS["7b"]), {}
    half = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), shapes)
    for name, form in FORMS.items():
        kept = in_form(params, form)
        same = jax.tree.map(dense, kept, is_leaf=lambda x: isinstance(x, md.Int8 | md.Int4))
        lost = bounds(same) - want
        results[name] = {
            "bits_per_byte_lost": float(lost.mean()),
            "of_each_draw": lost.tolist(),
            "changed": float(change(same, params, columns[:, : cfg.batch_size])),
            "bytes": size_of(kept),
            "bytes_7b": size_of(
                jax.eval_shape(lambda params, form=form: in_form(params, form), half)
            ),
        }
        print(
            name,
            {key: value for key, value in results[name].items() if key != "of_each_draw"},
            flush=True,
        )
    record(
        "dream_bits", "dream_int4_bits_per_byte_lost", results["int4"]["bits_per_byte_lost"],
        "bits per byte, --int4 less float32 weights", bits_per_byte=want.tolist(), forms=results, step=step,
        heldout_rows=count, group=md.GROUP, model=dataclasses.asdict(model.cfg),
    )  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    runs.command(main, Config, __doc__)
