"""Score a trained model on text that it has not seen.

    python evaluate.py                                        # newest checkpoint of out/train_tpu on its held-out files
    python evaluate.py --ckpt=out/mine --all_steps=True      # every checkpoint that was kept

Prints nats per token, bits per byte beside `xz -9` on the same bytes, and how often the MTP head's greedy draft is
accepted. Reads a run folder of train_tpu.py and the data folder it was trained on.
"""

import contextlib
import dataclasses
import io
import json
import logging
import lzma
import math
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import tokenizers
import tyro

import model_pythoncoder as pc


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/train_tpu"  # run folder
    data: str = ""  # folder of data_prep.py; "" is the one that the run was trained on
    step: int = 0  # which checkpoint; 0 takes the newest
    all_steps: bool = False  # score every checkpoint of the run
    rows: int = 0  # held-out rows to score; 0 takes all
    batch_size: int = 16
    drafts: int = 16  # held-out prompts continued to count accepted drafts; 0 leaves it out
    json: bool = False  # print one JSON line per checkpoint


def pass_at_k(n, c, k):
    """Probability that at least one of k samples, drawn without replacement from n of which c are right, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    Ref: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right samples among {n}: need 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def read_rows(folder, limit):
    """Held-out rows of a data_prep.py folder: int32 tokens, segments, positions, each [R, L]."""
    try:
        shards = json.loads((folder / "meta.json").read_text())["splits"]["heldout"]["shards"]
        tables = [pq.read_table(folder / shard["file"]) for shard in shards]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"no held-out rows in {folder} ({str(error).splitlines()[0]}); write them with data_prep.py")

    def column(name):
        parts = [table[name].combine_chunks() for table in tables]
        return np.concatenate([part.values.to_numpy().reshape(len(part), -1) for part in parts]).astype(np.int32)

    return tuple(column(name)[: limit or None] for name in ("input_ids", "segments", "positions"))


def draft_rate(model, tokenizer, token_RL, cfg):
    """Share of the MTP head's greedy drafts that are accepted, on continuations of the first half of held-out rows."""
    half = min(64, token_RL.shape[1] // 2)
    prompts = [row[:half].tolist() for row in token_RL[:: max(1, len(token_RL) // cfg.drafts)][: cfg.drafts]]
    rule = pc.Sampling(vocab=tokenizer.get_vocab_size())
    _, stats = pc.generate(model, prompts, half, rule, jax.random.key(0), chunk=half)
    return stats["accepted"] / (stats["forwards"] - len(prompts))  # the pass over the prompt has no draft to check


def main(cfg):
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    run = Path(cfg.ckpt)
    try:
        config = json.loads((run / "config.json").read_text())
        folder, vocab = Path(cfg.data or config["data"]), config["model"]["vocab"]
    except (OSError, ValueError, KeyError):
        sys.exit(f"{run} is not a run folder of train_tpu.py (no config.json); train one with: python train_tpu.py")
    held_out = read_rows(folder, cfg.rows)
    token_RL, segment_RL, _ = held_out
    tokenizer = tokenizers.Tokenizer.from_file(str(run / "tokenizer.json"))
    text = tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode()
    xz_bits_per_byte = 8 * len(lzma.compress(text, preset=9)) / len(text)
    special = tokenizer.get_added_tokens_decoder()
    names = {i: name for name, i in tokenizer.get_vocab().items() if i not in special}
    bytes_V = jnp.array([len(names.get(i, "")) for i in range(vocab)], jnp.float32)

    @jax.jit
    def score(model, token_BL, segment_BL, position_BL):
        nats, _ = model.losses(token_BL, segment_BL, position_BL, mtp=False)
        mask_BL, _ = pc.target_masks(segment_BL)
        return jnp.stack([nats, mask_BL.sum(), (mask_BL * bytes_V[jnp.roll(token_BL, -1, 1)]).sum()])

    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    steps = sorted(int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit())
    rows_out = []
    for step in steps if cfg.all_steps else [cfg.step or None]:
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                model, _, step = pc.load(run, step, dtype)
            except (FileNotFoundError, ValueError) as error:
                print(error, file=sys.__stderr__, flush=True)
                os._exit(1)  # threads of a failed Orbax read print tracebacks until the process ends
        sums, B = np.zeros(3), cfg.batch_size
        for i in range(0, len(token_RL), B):  # the last batch is filled with empty rows
            batch = [np.pad(x[i : i + B], ((0, max(0, i + B - len(x))), (0, 0))) for x in held_out]
            sums += np.asarray(score(model, *batch), np.float64)
        row = {
            "step": step,
            "heldout_tokens": int(sums[1]),
            "nats_per_token": sums[0] / sums[1],
            "bits_per_byte": sums[0] / math.log(2) / sums[2],
            "xz_bits_per_byte": xz_bits_per_byte,
        }
        if cfg.drafts and model.cfg.mtp:
            row["drafts_accepted"] = draft_rate(model, tokenizer, token_RL, cfg)
        rows_out.append(row)
        print(json.dumps(row) if cfg.json else " | ".join(f"{k} {v:,.4g}" for k, v in row.items()), flush=True)
    return rows_out


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
