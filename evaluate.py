"""Score a trained model on text that it has not seen: how likely is it?

    python evaluate.py                                        # newest checkpoint of out/train_tpu on its held-out files
    python evaluate.py --model=mdlm --plot=noise.png          # newest checkpoint of out/train_gpu
    python evaluate.py --model=dream --data=data/mine         # a Dream: of train_tpu.py, or --ckpt=out/diffucoder
    python evaluate.py --ckpt=out/mine --all_steps            # every checkpoint that was kept

Prints nats per token and bits per byte. PythonCoder: beside `xz -9` on the same bytes, and the acceptance rate of the
MTP head's greedy draft tokens. MDLM, Dream: an upper bound with its standard error over draws of the noise; of MDLM
also the accuracy by noise level, and generation times. A Dream with blocks of 2 to 4 tokens has the bound without a
draw, with blocks of 1 the likelihood itself: "score" says which. Reads a run folder of train_tpu.py or train_gpu.py, or
for Dream a folder of convert_weights.py, and the data folder it was trained on. Programs that a model writes are run
and scored by benchmarks.py.

Letters: R rows, B rows at a time, M masked positions of a row, L row length, N draws, V vocabulary.
"""

import dataclasses
import hashlib
import json
import lzma
import math
import sys
import time
import typing
from pathlib import Path

import numpy as np

import checkpoints
import inference
import runs
from rows import Rows, token_bytes


@dataclasses.dataclass(frozen=True)
class PythonCoderFlags:
    """Flags of PythonCoder, --model=pythoncoder."""

    all_steps: bool = False  # score every checkpoint of the run
    drafts: int = 16  # held-out prompts that are continued to count accepted draft tokens; 0 leaves it out


@dataclasses.dataclass(frozen=True)
class MdlmFlags:
    """Flags of MDLM, --model=mdlm."""

    lengths: tuple[int, ...] = (64, 128, 256)  # canvases whose generation is timed
    steps: tuple[int, ...] = (10, 25, 50)  # numbers of steps in which they are filled
    plot: str = ""  # write a PNG of loss against noise level


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    int4: bool = False  # matrices of the layers in 4 bits, a third of the memory of bfloat16


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder", "mdlm", "dream"] = "pythoncoder"  # family of the checkpoint
    # run folder; "" is out/train_tpu, or out/train_gpu for MDLM; where that holds no model, weights/, with --data
    ckpt: str = ""
    data: str = ""  # folder of data_prep.py; "" is the one that the run was trained on
    step: int = 0  # which checkpoint; 0 takes the newest
    rows: int = 4096  # held-out rows to score, of all parts; 0 takes all
    batch_size: int = 16  # rows that are scored at a time; MDLM on a GPU takes 16 times as many
    draws: int = 8  # MDLM, Dream: noise draws of every row, two at least; a Dream with blocks of up to 4 needs none
    seed: int = 0  # MDLM, Dream: of the noise
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # of weights; "" is float32 on a CPU if it fits, else 16 bits
    devices: int = 0  # PythonCoder, Dream: use so many of the machine's devices; 0 takes all
    compile_cache: str = "~/.cache/unmask"  # PythonCoder, Dream: compiled programs of earlier runs; "" compiles anew
    json: bool = False  # print one JSON line per checkpoint instead of text
    pythoncoder: PythonCoderFlags = PythonCoderFlags()
    mdlm: MdlmFlags = MdlmFlags()
    dream: DreamFlags = DreamFlags()


def main(cfg):
    flags = cfg.mdlm
    least = min(cfg.batch_size, cfg.draws - 1, cfg.rows + 1, cfg.devices + 1, *flags.lengths, *flags.steps)
    if least < 1:
        raise ValueError("--rows and --devices are at least 0, --batch_size, --lengths and --steps 1, --draws 2")
    if cfg.dream != DreamFlags() and cfg.model != "dream":
        raise ValueError("--int8 and --int4 are for --model=dream")
    if flags.plot and not Path(flags.plot).parent.is_dir():
        raise FileNotFoundError(f"--plot={flags.plot}: there is no folder {Path(flags.plot).parent}")
    trainer = "train_gpu" if cfg.model == "mdlm" else "train_tpu"
    run = runs.as_path(cfg.ckpt or inference.default_folder(f"out/{trainer}", cfg.model))
    if not (run / "config.json").is_file():
        raise FileNotFoundError(f"{run} is no run folder (no config.json); train one with: python {trainer}.py")

    # the held-out rows, if their token ids are those of the model
    data = cfg.data or runs.read_json(run / "config.json").get("data")
    if not data:
        raise ValueError(f"{run} does not say what it was trained on; pass --data")
    rows, tokenizer = Rows(data, "heldout"), runs.read_tokenizer(run)
    same = rows.meta["tokenizer_sha256"] == hashlib.sha256((run / "tokenizer.json").read_bytes()).hexdigest()
    if cfg.model == "dream":  # whose tokenizer may have got a MASK
        same = same or runs.read_tokenizer(rows.folder).get_vocab().items() <= tokenizer.get_vocab().items()
    if not same:
        raise ValueError(f"{rows.folder} was written with another tokenizer than that of {run}; pass --data of its own")
    count = min(rows.total, cfg.rows or rows.total)
    if not count:
        raise ValueError(f"{rows.folder} holds no held-out rows; write it again with a larger --heldout")
    if count < rows.total:
        print(f"{count:,} of {rows.total:,} held-out rows, from all parts; --rows=0 takes all", file=sys.stderr)
    bytes_V = token_bytes(tokenizer, rows.meta["vocab_size"])
    if cfg.model != "mdlm":
        checkpoints.keep_compiled(cfg.compile_cache)
    score = {"pythoncoder": score_pythoncoder, "mdlm": score_mdlm, "dream": score_dream}[cfg.model]
    with inference.out_of_memory("--int8, --int4 or " * (cfg.model == "dream") + "a smaller --batch_size"):
        return score(cfg, run, rows.read(rows.spread(count)), tokenizer, bytes_V)


def batches(columns, size):
    """(number of the first row, `size` rows) in turn; empty rows fill up the last ones: one shape to compile."""
    for first in range(0, columns.shape[1], size):
        batch = columns[:, first : first + size]
        yield first, np.pad(batch, ((0, 0), (0, size - batch.shape[1]), (0, 0)))


def show(cfg, row):
    texts = (f"{k} {v if isinstance(v, str) else format(v, ',.4g')}" for k, v in row.items())
    print(json.dumps(row) if cfg.json else " | ".join(texts), flush=True)


# ---- PythonCoder ---------------------------------------------------------------------------------------------------


def score_pythoncoder(cfg, run, columns, tokenizer, bytes_V):
    """Print a row of scores for each checkpoint: the exact likelihood."""
    import jax
    import jax.numpy as jnp

    import model_pythoncoder as pc

    # what a general compressor makes of the same text
    token_RL, segment_RL = columns[:2]
    text = tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode()
    xz_bits_per_byte = 8 * len(lzma.compress(text, preset=9)) / len(text)
    bytes_V = jnp.asarray(bytes_V)

    @jax.jit  # sums over a batch: nats, predicted tokens, their bytes
    def score(model, token_BL, segment_BL, position_BL):
        nats, _ = model.losses(token_BL, segment_BL, position_BL, mtp=False)
        mask_BL, _ = pc.target_masks(segment_BL)
        return jnp.stack([nats, mask_BL.sum(), (mask_BL * bytes_V[jnp.roll(token_BL, -1, 1)]).sum()])

    results, drafts = [], min(cfg.pythoncoder.drafts, len(token_RL))
    rows = math.gcd(cfg.batch_size, drafts)  # that divide over devices, here and for the drafts
    for step in (cfg.pythoncoder.all_steps and runs.saved_steps(run)) or [cfg.step]:
        model, step, mesh = inference.load_for_inference(pc, run, step, cfg.dtype, devices=cfg.devices, rows=rows)
        with inference.mesh_context(mesh):
            sums = np.zeros(3)
            for _, batch in batches(columns[:3], cfg.batch_size):
                sums += np.asarray(score(model, *batch), np.float64)
            accepted = acceptance_rate(model, tokenizer, token_RL, drafts) if drafts and model.cfg.mtp else None
        del model  # before the next one is read
        nats, tokens, heldout_bytes = sums
        row = {"step": step, "heldout_tokens": int(tokens), "nats_per_token": nats / tokens}
        row |= {"bits_per_byte": nats / math.log(2) / heldout_bytes, "xz_bits_per_byte": xz_bits_per_byte}
        row |= {} if accepted is None else {"drafts_accepted": accepted}
        show(cfg, row)
        results.append(row)
    return results


def acceptance_rate(model, tokenizer, token_RL, count):
    """Share of the MTP head's greedy draft tokens that are accepted, on continuations of the first halves of rows."""
    import jax

    import model_pythoncoder as pc

    half = min(64, token_RL.shape[1] // 2)
    prompts = [row[:half].tolist() for row in token_RL[:: max(1, len(token_RL) // count)][:count]]
    rule = pc.Sampling(vocab=tokenizer.get_vocab_size())
    _, stats = pc.generate(model, prompts, half, rule, jax.random.key(0), chunk=half)
    return stats["accepted"] / (stats["forwards"] - len(prompts))  # the pass over the prompt has no draft to check


# ---- Dream ---------------------------------------------------------------------------------------------------------


def score_dream(cfg, run, columns, tokenizer, bytes_V):
    """Print the bound of one checkpoint, model_dream's NELBO of the linear schedule; of pairs that of the responses.

    The interval is two standard errors wide on each side, about 95 %: of the noise alone, for these rows. Times below
    0.001 are left out, as in training. Small blocks have neither draws nor an interval: see model_dream's exact_nll.
    """
    import jax

    import model_dream as md

    where = {"bits": inference.bits_of(cfg.dream), "devices": cfg.devices, "rows": cfg.batch_size}
    model, step, mesh = inference.load_for_inference(md, run, cfg.step, cfg.dtype, **where)
    count, block = columns.shape[1], model.cfg.block_length
    exact = 0 < block <= md.EXACT_BLOCK
    draws = 1 if exact else cfg.draws

    @jax.jit
    def bound(model, key, first, batch):
        token_BL, segment_BL, position_BL, *fixed_BL = batch
        if exact:
            return model.exact_nll(token_BL, segment_BL, position_BL, *fixed_BL).sum()
        part_BL = md.parts(segment_BL, position_BL, block or None)
        noise = md.noise(key, count, first + jax.numpy.arange(cfg.batch_size), part_BL)
        return model.nelbo(token_BL, segment_BL, position_BL, *noise, *fixed_BL)

    # every draw is a pass over all rows, whose times lie evenly
    nats_N = np.zeros(draws)
    with inference.mesh_context(mesh):
        for first, batch in batches(columns, cfg.batch_size):
            nats_N += [float(bound(model, jax.random.key(cfg.seed + n), first, batch)) for n in range(draws)]
    counted_RL = md.counted(columns[1], *columns[3:])
    tokens, heldout_bytes = int(counted_RL.sum()), float(bytes_V[columns[0][counted_RL]].sum(dtype=np.float64))
    nats, bits = nats_N.mean() / tokens, tokens / math.log(2) / heldout_bytes  # bits per byte of a nat per token
    kind = f"exact {'likelihood' if block == 1 else 'bound'}" if exact else f"bound of {draws} draws"
    row = {"step": step, "score": kind, "heldout_tokens": tokens, "nats_per_token": nats, "bits_per_byte": nats * bits}
    if not exact:
        error = nats_N.std(ddof=1) / math.sqrt(draws) / tokens
        row |= {"standard_error": error, "low": (nats - 2 * error) * bits, "high": (nats + 2 * error) * bits}
    show(cfg, row)
    return [row]


# ---- MDLM ----------------------------------------------------------------------------------------------------------


def score_mdlm(cfg, run, columns, tokenizer, bytes_V):
    """Print the bound, its parts by noise level, and generation times, of one checkpoint."""
    import torch

    import model_mdlm as mdlm

    step, folder = runs.newest(run, cfg.step) if cfg.step or runs.saved_steps(run) else (0, run)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = mdlm.load(folder, device, mdlm.torch_dtype(cfg.dtype))
    token_RL = columns[0].astype(np.int64)
    counted_RL = (token_RL != mdlm.PAD) & (token_RL != mdlm.BOS)
    # every draw is a pass over all rows, whose times lie evenly; they differ by the noise alone
    rng = np.random.default_rng(cfg.seed)
    size = cfg.batch_size * (16 if device == "cuda" else 1)
    draws = [bound_of_a_draw(model, token_RL, counted_RL, rng, size) for _ in range(cfg.draws)]
    nats, tokens = float(np.mean([bound for bound, _ in draws])), int(counted_RL.sum())
    row = {
        "step": step,
        "heldout_tokens": tokens,
        "nats_per_token": nats,
        "standard_error": float(np.std([bound for bound, _ in draws], ddof=1) / math.sqrt(len(draws))),
        "perplexity": math.exp(nats),
        "bits_per_byte": nats * tokens / math.log(2) / float(bytes_V[token_RL].sum(dtype=np.float64)),
        "by_noise": [
            {"mask_rate": (i + 0.5) / 10, "masked_ce": nll / masked, "accuracy": right / masked}
            for i, (nll, right, masked) in enumerate(sum(level for _, level in draws).tolist())
            if masked
        ],
        "latency": latency(model, cfg),
    }
    if cfg.mdlm.plot:
        plot(row, f"{run.name}, step {step}", cfg.mdlm.plot)
    print(json.dumps(row) if cfg.json else describe(row))
    return [row]


def bound_of_a_draw(model, token_RL, counted_RL, rng, batch_size):
    """(bound in nats per token, sums of [nats, right tokens, masked tokens] by tenths of the mask rate) of one noising.

    Row i's time is of the i-th stratum of [0, 1], in random order, and exactly m of its n tokens are masked. Then
    n / m sum nll estimates the bound: that of the linear schedule at time m / n.
    """
    import torch

    import diffusion
    import model_mdlm as mdlm

    # noise: rate_R are the shares m / n that are masked
    u_R = rng.permutation(diffusion.antithetic_times(rng.random(len(token_RL)), eps=0))
    mask_RL, weight_R = diffusion.mask_exactly(counted_RL, u_R, rng.random(token_RL.shape))
    rate_R, scores, rows = 1 / weight_R, [], []
    # the model sees the masked rows and their rates, rows of like lengths together, so that they hold little PAD
    device, length_R = model.embed.weight.device, (token_RL != mdlm.PAD).sum(1)
    order_R = np.argsort(length_R, kind="stable")
    for first in range(0, len(order_R), batch_size):
        row_B = order_R[first : first + batch_size]
        columns = slice(0, length_R[row_B].max())
        token_BL, mask_BL = (torch.from_numpy(x[row_B, columns]).to(device) for x in (token_RL, mask_RL))
        with torch.inference_mode():
            xt_BL = torch.where(mask_BL, mdlm.MASK, token_BL)
            rate_B = torch.from_numpy(rate_R[row_B]).float().to(device)
            hidden_BLD = model.hidden(xt_BL, rate_B, xt_BL != mdlm.PAD)
            # nats and hits at the masks alone, a few thousand logits [V] at a time; they are read at the end
            chunks = hidden_BLD[mask_BL].split(4096), token_BL[mask_BL].split(4096)
            for hidden_MD, token_M in zip(*chunks, strict=True):
                logits_MV = model.logits(hidden_MD)
                nll_M = diffusion.masked_nll(logits_MV, token_M, torch.ones_like(token_M, dtype=torch.bool), mdlm.MASK)
                right_M = diffusion.ban(logits_MV, [mdlm.MASK]).argmax(-1) == token_M
                scores.append(torch.stack([nll_M.float(), right_M.float(), torch.ones_like(nll_M).float()], 1))
        rows.append(row_B[np.nonzero(mask_RL[row_B, columns])[0]])
    score_M3, row_M = torch.cat(scores).double().cpu().numpy(), np.concatenate(rows)
    nll_R = np.bincount(row_M, score_M3[:, 0], len(token_RL))
    tenth_M = np.minimum(rate_R * 10, 9).astype(int)[row_M]
    level = np.stack([np.bincount(tenth_M, score_M, 10) for score_M in score_M3.T], 1)
    return float(diffusion.nelbo_per_token(nll_R[:, None], rate_R, counted_RL, "linear")), level


def latency(model, cfg):
    """Median milliseconds of three generations after a first one, for each length and number of steps."""
    import torch

    import model_mdlm as mdlm

    device, results = model.embed.weight.device, []
    for length in (n for n in cfg.mdlm.lengths if n <= model.cfg.positions):
        canvas = torch.full((1, length), mdlm.MASK, device=device)
        canvas[0, 0] = mdlm.BOS
        for steps in cfg.mdlm.steps:
            seconds = []
            for _ in range(4):
                started = time.perf_counter()
                generator = torch.Generator(device).manual_seed(cfg.seed)
                mdlm.sample(model, canvas, mdlm.Sampling(steps=steps), generator).tolist()
                seconds.append(time.perf_counter() - started)
            results.append({"length": length, "steps": steps, "ms": 1e3 * float(np.median(seconds[1:]))})
    return results


def plot(row, title, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axis = plt.subplots(figsize=(7, 4))
    axis.plot([r["mask_rate"] for r in row["by_noise"]], [r["masked_ce"] for r in row["by_noise"]], "o-")
    axis.set(xlabel="share of tokens masked", ylabel="nats per masked token", title=title)
    axis.grid(alpha=0.3)
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def describe(row):
    """MDLM's scores as tables."""
    bound = f"{row['nats_per_token']:.4f} +- {row['standard_error']:.4f} nats per token at most"
    lines = [
        f"step {row['step']}: {bound} over {row['heldout_tokens']:,} tokens, perplexity {row['perplexity']:.3f}, "
        f"{row['bits_per_byte']:.4f} bits per byte",
        "masked | nats per masked token | accuracy",
        *(f"{r['mask_rate']:6.0%} | {r['masked_ce']:21.3f} | {r['accuracy']:8.1%}" for r in row["by_noise"]),
        "length | steps | ms",
        *(f"{r['length']:6} | {r['steps']:5} | {r['ms']:.1f}" for r in row["latency"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
