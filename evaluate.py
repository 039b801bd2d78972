"""Score a trained model on text that it has not seen.

    python evaluate.py                                        # newest checkpoint of out/train_tpu on its held-out files
    python evaluate.py --model=mdlm --plot=noise.png          # newest checkpoint of out/train_gpu
    python evaluate.py --ckpt=out/mine --all_steps=True      # every checkpoint that was kept

Prints nats per token and bits per byte. PythonCoder: beside `xz -9` on the same bytes, and how often the MTP head's
greedy draft is accepted. MDLM: the bound with its standard error, accuracy by noise level, and generation times. Reads
a run folder of train_tpu.py or train_gpu.py and the data folder it was trained on.

Letters: R rows, B rows at a time, L row length, V vocabulary.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import lzma
import math
import os
import sys
import time
import typing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import tokenizers
import tyro


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder", "mdlm"] = "pythoncoder"
    ckpt: str = ""  # run folder; "" is out/train_tpu, or out/train_gpu for MDLM
    data: str = ""  # folder of data_prep.py; "" is the one that the run was trained on
    step: int = 0  # which checkpoint; 0 takes the newest
    all_steps: bool = False  # PythonCoder: score every checkpoint of the run
    rows: int = 0  # held-out rows to score; 0 takes all
    batch_size: int = 16
    drafts: int = 16  # PythonCoder: held-out prompts continued to count accepted drafts; 0 leaves it out
    draws: int = 8  # MDLM: noise draws of every row; two at least, for the standard error
    lengths: tuple[int, ...] = (64, 128, 256)  # MDLM: canvases whose generation is timed
    steps: tuple[int, ...] = (10, 25, 50)  # MDLM: in so many steps
    plot: str = ""  # MDLM: write a PNG of loss against noise level
    seed: int = 0
    json: bool = False  # print one JSON line per checkpoint instead of text


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

    if not tables:
        sys.exit(f"{folder} holds no held-out rows; write it again with data_prep.py and a larger --heldout")

    def column(name):
        parts = [table[name].combine_chunks() for table in tables]
        return np.concatenate([part.values.to_numpy().reshape(len(part), -1) for part in parts]).astype(np.int32)

    return tuple(column(name)[: limit or None] for name in ("input_ids", "segments", "positions"))


def token_bytes(tokenizer, vocab):
    """Bytes that each id stands for, int64 [V]: 0 for special tokens. Byte-level tokens are written a letter a byte."""
    special = tokenizer.get_added_tokens_decoder()
    names = {i: name for name, i in tokenizer.get_vocab().items() if i not in special}
    return np.array([len(names.get(i, "")) for i in range(vocab)])


# ---- PythonCoder ---------------------------------------------------------------------------------------------------


def draft_rate(model, tokenizer, token_RL, cfg):
    """Share of the MTP head's greedy drafts that are accepted, on continuations of the first half of held-out rows."""
    import jax

    import model_pythoncoder as pc

    half = min(64, token_RL.shape[1] // 2)
    prompts = [row[:half].tolist() for row in token_RL[:: max(1, len(token_RL) // cfg.drafts)][: cfg.drafts]]
    rule = pc.Sampling(vocab=tokenizer.get_vocab_size())
    _, stats = pc.generate(model, prompts, half, rule, jax.random.key(0), chunk=half)
    return stats["accepted"] / (stats["forwards"] - len(prompts))  # the pass over the prompt has no draft to check


def score_pythoncoder(cfg, run, held_out, tokenizer, vocab):
    """One row of scores for each checkpoint."""
    import jax
    import jax.numpy as jnp

    import model_pythoncoder as pc

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    token_RL, segment_RL, _ = held_out
    text = tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode()
    xz_bits_per_byte = 8 * len(lzma.compress(text, preset=9)) / len(text)
    bytes_V = jnp.array(token_bytes(tokenizer, vocab), jnp.float32)

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


# ---- MDLM ----------------------------------------------------------------------------------------------------------


def score_mdlm(cfg, run, held_out, tokenizer, vocab):
    """The bound, its parts by noise level, and generation times, of one checkpoint."""
    import torch

    import diffusion
    import model_mdlm as mdlm

    steps = sorted(int(p.name[5:]) for p in run.glob("step_*") if p.name[5:].isdigit())
    step = cfg.step or (steps[-1] if steps else 0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = mdlm.load(run / f"step_{step}", device)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    token_RL, rng = held_out[0].astype(np.int64), np.random.default_rng(cfg.seed)
    if token_RL.shape[1] > model.cfg.positions:
        sys.exit(f"rows of {token_RL.shape[1]} tokens do not fit the model's {model.cfg.positions} positions")
    counted_RL = (token_RL != mdlm.PAD) & (token_RL != mdlm.BOS)
    totals, level = [], np.zeros((10, 3))  # by tenths of the mask rate: nats, right tokens, masked tokens
    for _ in range(cfg.draws):
        u_R = rng.permutation(diffusion.antithetic_times(rng.random(len(token_RL)), eps=0))
        mask_RL, weight_R = diffusion.mask_exactly(counted_RL, u_R, rng.random(token_RL.shape))
        nll_R = []
        for i in range(0, len(token_RL), cfg.batch_size):
            x0, mask = (torch.from_numpy(x[i : i + cfg.batch_size]).to(device) for x in (token_RL, mask_RL))
            rate = torch.from_numpy(1 / weight_R[i : i + cfg.batch_size]).float().to(device)
            with torch.inference_mode():
                xt = torch.where(mask, mdlm.MASK, x0)
                hidden_ND = model.hidden(xt, rate, xt != mdlm.PAD)[mask]
                sums = torch.zeros(len(x0), 2, dtype=torch.float64, device=device)
                parts = (x.split(1024) for x in (hidden_ND, x0[mask], mask.nonzero()[:, 0]))
                for hidden, token, owner in zip(*parts, strict=True):  # never the logits of all positions
                    logits = diffusion.ban(model.logits(hidden), [mdlm.MASK])
                    nll = diffusion.masked_nll(logits, token, torch.ones_like(token, dtype=torch.bool), mdlm.MASK)
                    right = logits.argmax(-1) == token
                    sums.index_add_(0, owner, torch.stack([nll, right], 1).double())
                nll, right = sums.T
            nll_R += nll.tolist()
            tenth = np.minimum((rate.cpu().numpy() * 10).astype(int), 9)
            np.add.at(level, tenth, torch.stack([nll, right, mask.sum(1)], 1).cpu().numpy())
        totals.append((np.array(nll_R) * weight_R).sum() / counted_RL.sum())
    nats, error = float(np.mean(totals)), float(np.std(totals, ddof=1) / math.sqrt(len(totals)))
    row = {"step": step, "heldout_tokens": int(counted_RL.sum()), "nats_per_token": nats, "standard_error": error}
    bits = nats * int(counted_RL.sum()) / math.log(2)
    row |= {"perplexity": math.exp(nats), "bits_per_byte": bits / int(token_bytes(tokenizer, vocab)[token_RL].sum())}
    row["by_noise"] = [
        {"mask_rate": (i + 0.5) / 10, "masked_ce": loss / n, "accuracy": hits / n}
        for i, (loss, hits, n) in enumerate(level.tolist())
        if n
    ]
    row["latency"] = []
    for length in (n for n in cfg.lengths if n <= model.cfg.positions):
        for n in cfg.steps:
            canvas = torch.full((1, length), mdlm.MASK, device=device)
            canvas[0, 0] = mdlm.BOS
            seconds = []
            for _ in range(4):
                started = time.perf_counter()
                generator = torch.Generator(device).manual_seed(cfg.seed)
                mdlm.sample(model, canvas, mdlm.Sampling(steps=n), generator).tolist()
                seconds.append(time.perf_counter() - started)
            row["latency"].append({"length": length, "steps": n, "ms": 1e3 * float(np.median(seconds[1:]))})
    if cfg.plot:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        _, axis = plt.subplots(figsize=(7, 4))
        axis.plot([r["mask_rate"] for r in row["by_noise"]], [r["masked_ce"] for r in row["by_noise"]], "o-")
        axis.set(xlabel="share of tokens masked", ylabel="nats per masked token", title=f"{run.name}, step {step}")
        axis.grid(alpha=0.3)
        plt.tight_layout()
        plt.savefig(cfg.plot, dpi=120)
    return row


def show_mdlm(row):
    """The scores as tables."""
    bound = f"{row['nats_per_token']:.4f} +- {row['standard_error']:.4f} nats per token at most"
    print(f"step {row['step']}: {bound} over {row['heldout_tokens']:,} tokens, ", end="")
    print(f"perplexity {row['perplexity']:.3f}, {row['bits_per_byte']:.4f} bits per byte")
    print("masked | nats per masked token | accuracy")
    for r in row["by_noise"]:
        print(f"{r['mask_rate']:6.0%} | {r['masked_ce']:21.3f} | {r['accuracy']:8.1%}")
    print("length | steps | ms")
    for r in row["latency"]:
        print(f"{r['length']:6} | {r['steps']:5} | {r['ms']:.1f}")


def main(cfg):
    trainer = {"pythoncoder": "train_tpu.py", "mdlm": "train_gpu.py"}[cfg.model]
    if cfg.batch_size < 1 or cfg.rows < 0 or cfg.draws < 2 or cfg.drafts < 0 or min(cfg.lengths + cfg.steps) < 1:
        sys.exit("--rows and --drafts are at least 0, --batch_size, --lengths and --steps 1, --draws 2")
    if cfg.plot and not Path(cfg.plot).parent.is_dir():
        sys.exit(f"--plot={cfg.plot}: there is no folder {Path(cfg.plot).parent}")
    run = Path(cfg.ckpt or f"out/{trainer.removesuffix('.py')}")
    try:
        config = json.loads((run / "config.json").read_text())
        folder, vocab = Path(cfg.data or config["data"]), config["model"]["vocab"]
        tokenizer_json = (run / "tokenizer.json").read_bytes()
    except (OSError, ValueError, KeyError):
        sys.exit(f"{run} is not a run folder of {trainer} (no config.json); train one with: python {trainer}")
    held_out = read_rows(folder, cfg.rows)
    if json.loads((folder / "meta.json").read_text())["tokenizer_sha256"] != hashlib.sha256(tokenizer_json).hexdigest():
        sys.exit(f"{folder} was written with another tokenizer than that of {run}; pass data of its tokenizer")
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    if cfg.model == "pythoncoder":
        return score_pythoncoder(cfg, run, held_out, tokenizer, vocab)
    row = score_mdlm(cfg, run, held_out, tokenizer, vocab)
    if cfg.json:
        print(json.dumps(row))
    else:
        show_mdlm(row)
    return [row]


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(str(error))
