"""An autoregressive start for block diffusion: four ways to spend the same processor seconds, over
three seeds.

    python bench/a2d.py                                    # two hours of one core

The same layers (the preset tiny), data (this Python's standard library) and processor seconds of
training steps:

    A  autoregressive all the time
    B  block diffusion from scratch, blocks of --block_length tokens
    C  half the time A, then block diffusion that begins at blocks of one token: the same loss
    D  diffusion over the whole canvas

Steps are counted by the processor seconds that two short runs of each kind differ by: start,
compilation and evaluations, which cost the blocks as much again, are in none. Bits per byte of all
held-out files are exact for A, and for B and C up to blocks of 4; for D they are a bound, with two
standard errors of its noise. Passes and samples are of prompts from held-out files, 64 new tokens
at temperature 0, each token that has 0.9. Writes results/a2d.json, a2d.png and a2d.md. Runs that
are finished under --out are not run again.
"""

import dataclasses
import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from record import RESULTS, claim

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoints
import runs
from rows import Rows

ARMS = {
    "A": "autoregressive",
    "B": "blocks from scratch",
    "C": "half autoregressive, then blocks",
    "D": "whole canvas",
}


@dataclasses.dataclass(frozen=True)
class Config:
    budget_s: float = 400.0  # processor seconds of training steps, of each run
    seeds: tuple[int, ...] = (0, 1, 2)  # of weights, row order and noise
    block_length: int = 4  # tokens of a block; up to 4 the bound has no noise
    lr: float = 1e-3  # peak rate of C's second half; the others have the trainer's own
    prompts: int = 16  # held-out rows whose first 32 tokens are continued
    out: str = "out/a2d"  # folder of data and runs
    file: str = "a2d"  # bench/results/<file>.json, .png, .md


def script(name, *flags):
    subprocess.run([sys.executable, str(ROOT / name), *map(str, flags)], cwd=ROOT, check=True)


def flags_of(arm, cfg):
    """What train_dream.py needs for the whole of an arm, or for its last half."""
    block = f"--block_length={cfg.block_length}"
    return {"A": ["--objective=ar"], "B": [block], "C": [block, f"--lr={cfg.lr}"], "D": []}[arm]


def train(cfg, out, steps, *flags):
    """Train, if that is not done yet: the processor seconds that it took."""
    out = Path(cfg.out) / out
    if not (ROOT / out / "seconds").exists():
        subprocess.run(["rm", "-rf", str(ROOT / out)], check=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        common = [
            "--seq_len=256",
            "--batch_size=16",
            "--micro_batch=4",
            "--log_every=1",
            "--compile_cache=",
        ]
        common.append(f"--eval_every={max(1, steps // 8)}")
        script(
            "train_dream.py",
            f"--data={cfg.out}/data",
            f"--out={out}",
            f"--steps={steps}",
            *common,
            *flags,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (ROOT / out / "seconds").write_text(str(seconds))
    return float((ROOT / out / "seconds").read_text())


def seconds_of_a_step(cfg, arm):
    """By two short runs, so that start, compilation and the last evaluation are in neither."""
    ends = "--eval_every=1000", "--eval_rows=16"
    short, long = (train(cfg, f"pace/{arm}-{n}", n, *ends, *flags_of(arm, cfg)) for n in (30, 130))
    return (long - short) / 100


def run_arm(cfg, arm, seed, pace):
    """Train an arm: [(folder, steps, seconds of a step)] of its parts."""
    seed_flag = f"--seed={seed}"
    if arm != "C":
        steps = int(cfg.budget_s / pace[arm])
        train(cfg, f"{arm}-{seed}", steps, seed_flag, *flags_of(arm, cfg))
        return [(f"{arm}-{seed}", steps, pace[arm])]
    first, last = (int(cfg.budget_s / 2 / pace[kind]) for kind in "AB")
    train(cfg, f"half-{seed}", first, seed_flag, *flags_of("A", cfg))
    init = f"--init={cfg.out}/half-{seed}", f"--block_warmup={last // 4}", "--optimizer=muon"
    train(cfg, f"C-{seed}", last, seed_flag, *init, *flags_of("C", cfg))
    return [(f"half-{seed}", first, pace["A"]), (f"C-{seed}", last, pace["B"])]


def score(cfg, folder):
    """What --eval_only of train_dream.py says of all held-out rows."""
    import train_dream

    out = ROOT / cfg.out
    return train_dream.main(
        train_dream.Config(eval_only=str(out / folder), data=str(out / "data"), eval_rows=10**9)
    )


def write(cfg, folder):
    """(tokens per pass, [text]) of the continued prompts."""
    import jax

    import model_dream as md
    import sample_block
    import sample_dream

    model, _ = checkpoints.load(md, ROOT / cfg.out / folder)
    rows, tokenizer = (
        Rows(ROOT / cfg.out / "data", "heldout"),
        runs.read_tokenizer(ROOT / cfg.out / folder),
    )
    columns = rows.read(rows.spread(cfg.prompts))
    sampler = sample_block if model.cfg.block_length else sample_dream
    rule = sampler.Sampling(temperature=0.0, threshold=0.9, vocab=rows.meta["vocab_size"])
    passes, texts = 0, []
    for ids in columns[0][:, :32].tolist():
        (row,), stats = sampler.generate(model, [ids], 64, rule, jax.random.key(0))
        passes += stats["forwards"]
        texts.append((tokenizer.decode(ids), tokenizer.decode(row[32:])))
    return 64 * cfg.prompts / passes, texts


def curve(cfg, parts):
    """[(processor seconds of training steps, bits per byte)] of the evaluations on the way, at the
    run's own blocks.
    """
    points, before = [], 0.0
    for folder, steps, pace in parts:
        log = [
            json.loads(line)
            for line in (ROOT / cfg.out / folder / "log.jsonl").read_text().splitlines()
        ]
        points += [
            (before + row["step"] * pace, row["bits_per_byte"])
            for row in log
            if "bits_per_byte" in row
        ]
        before += steps * pace
    return points


def losses(cfg, folder, first):
    """Mean training loss of a run's first ten or last fifty steps, nats a token."""
    log = [
        json.loads(line)
        for line in (ROOT / cfg.out / folder / "log.jsonl").read_text().splitlines()
    ]
    rows = [row["loss"] for row in log if "loss" in row]
    return float(np.mean(rows[:10] if first else rows[-50:]))


def plot(found, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for color, arm in zip(("C0", "C1", "C2", "C3"), ARMS, strict=True):
        for row in (row for row in found if row["arm"] == arm):
            axis.plot(*zip(*row["curve"], strict=True), color=color, lw=0.7, alpha=0.7)
        bits = [row["bits_per_byte"] for row in found if row["arm"] == arm]
        end = max(x for row in found if row["arm"] == arm for x, _ in row["curve"])
        axis.errorbar(
            end,
            np.mean(bits),
            np.ptp(bits) / 2,
            fmt="o",
            color=color,
            capsize=4,
            label=f"{arm}: {ARMS[arm]}",
        )
    axis.set(
        xlabel="processor seconds of training steps",
        ylabel="bits per held-out byte, at the run's own blocks",
    )
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / f"{file}.png", dpi=120)


def main(cfg):
    if cfg.block_length < 2 or cfg.budget_s <= 0 or not cfg.seeds or cfg.prompts < 1:
        raise ValueError(
            "--block_length is at least 2; --budget_s, --seeds and --prompts at least one"
        )
    claim(ROOT / cfg.out, {name: getattr(cfg, name) for name in ("budget_s", "block_length", "lr")})
    if not (ROOT / cfg.out / "data/meta.json").exists():
        script(
            "data_prep.py", "python", f"--out={cfg.out}/data", "--vocab_size=2048", "--seq_len=256"
        )
    pace = {arm: seconds_of_a_step(cfg, arm) for arm in "ABD"}
    found = []
    for seed in cfg.seeds:
        for arm in ARMS:
            parts = run_arm(cfg, arm, seed, pace)
            folder = parts[-1][0]
            scored, (tokens_per_pass, texts) = score(cfg, folder), write(cfg, folder)
            row = {
                "arm": arm,
                "seed": seed,
                "steps": [steps for _, steps, _ in parts],
                "curve": curve(cfg, parts),
            }
            row |= {name: scored[name] for name in ("bits_per_byte", "standard_error")}
            exact = "exact likelihood" if arm == "A" else "exact bound"
            row["score"] = "bound of 8 draws" if scored["standard_error"] else exact
            row |= {"tokens_per_pass": tokens_per_pass, "texts": texts}
            if arm == "C":
                row["loss_at_conversion"] = [
                    losses(cfg, parts[0][0], False),
                    losses(cfg, parts[1][0], True),
                ]
            found.append(row)
    (RESULTS / f"{cfg.file}.json").write_text(
        json.dumps({"pace": pace, "runs": found}, indent=1) + "\n"
    )
    plot(found, cfg.file)

    lines = [
        "| arm | bits per held-out byte, each seed | score | tokens a pass | steps |",
        "|---" * 5 + "|",
    ]
    for arm, name in ARMS.items():
        mine = [row for row in found if row["arm"] == arm]
        bits = ", ".join(
            f"{row['bits_per_byte']:.3f}"
            + (f" ± {2 * row['standard_error']:.3f}" if row["standard_error"] else "")
            for row in mine
        )
        steps = " + ".join(f"{count:,}" for count in mine[0]["steps"])
        passes = np.mean([row["tokens_per_pass"] for row in mine])
        lines.append(f"| {arm}, {name} | {bits} | {mine[0]['score']} | {passes:.2f} | {steps} |")
    jumps = ", ".join(
        "{:.2f} -> {:.2f}".format(*row["loss_at_conversion"]) for row in found if row["arm"] == "C"
    )
    what = "Loss before and after the conversion of C, nats a token, its last fifty steps and first ten"
    lines += ["", f"{what}: {jumps}.", ""]
    for row in (row for row in found if row["seed"] == cfg.seeds[0]):
        prompt, text = row["texts"][0]
        lines += [f"**{row['arm']}**", "", "```", f"{prompt}⟶{text}", "```", ""]
    lines.append(f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`")
    (RESULTS / f"{cfg.file}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[: 2 + len(ARMS)]))


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
