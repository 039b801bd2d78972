"""When does a small model learn to copy? Numbers of the docstring in the body, by variants of
PythonCoder.

    python bench/copying.py                    # three seeds, about three hours (estimated); goes on where it stopped
    python bench/copying.py --only=plain       # variants whose name has a match of this regular expression
    python bench/copying.py --seeds 0 --steps=40 --every=20 --out=out/try_copying --file=try_copying    # a look

Each variant changes one thing of `train_tpu.py --model=tiny` on TinyPython. Measured in
checkpoints: of the numbers in the solutions of the split `constants` that stand in their docstring,
the share that is the likeliest token after the right text before it. A run is appended to
results/copying.jsonl, from which copying.md and copying.png are written. Once the data are there,
two commands may run at once whose --only or --seeds have nothing in common.
"""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from record import RESULTS, claim, cpu_name
from tinypython_page import read_lines, spent

import checkpoints
import model_pythoncoder as pc
import runs

VARIANTS = {  # settings of train_tpu.py, and what differs from the preset tiny
    "floored (the default)": ({}, {}),
    "as published": ({"diff": "paper"}, {}),
    "DIFF V2": ({"diff": "v2"}, {}),
    "plain attention": ({"diff": "none"}, {}),
    "eight layers, about as many parameters": ({}, {"layers": 8, "width": 96, "ffn": 256}),
    "rotary base 10,000": ({}, {"theta": 10_000.0}),
    "learning rate doubled": ({"lr": 6e-3}, {}),
    "learning rate halved": ({"lr": 1.5e-3}, {}),
    "AdamW": ({"optimizer": "adamw"}, {}),
    "levels 1 and 2 alone": ({"data": "easy"}, {}),
}
LEARNT = 0.5, 0.9
PARTS = "prompt", "canonical_solution"
HEAD = """# When a small model learns to copy

A number of the docstring is copied if it is the argmax at its place in the reference solution. Training has the same
combinations of operations (levels 1 and 2 alone: not those of level 3), but these constants at most in another order.
"""


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)
    only: str = ""  # only variants whose name has a match of this regular expression
    steps: runs.Count = 1000  # of a run, 4,096 tokens each
    every: runs.Count = 50  # steps between two measurements
    out: str = "out/copying"  # folder of data and runs
    file: str = "copying"  # bench/results/<file>.jsonl, .md and .png


def prepare(out):
    """Rows of all levels, rows of the easy ones, and tasks."""
    easy, tokens = ("--levels", "1", "2"), f"--tokenizer={out / 'all/rows/tokenizer.json'}"
    for name, levels, vocabulary in (("all", (), "--vocab_size=1024"), ("easy", easy, tokens)):
        if not (out / name / "rows/meta.json").exists():
            runs.script(
                "tinypython.py", "--n=100000", f"--out={out / name}", "--splits=constants", *levels
            )
            source = (
                "python",
                "--roots",
                str(out / name / "train.jsonl"),
                "--column=content",
                "--seq_len=512",
            )
            runs.script("data_prep.py", *source, f"--out={out / name / 'rows'}", vocabulary)
    return read_lines(out / "all/constants.jsonl")


def numbers_of(tokenizer, tasks):
    """(token_NL, where_NL): texts, and the tokens of solutions that are numbers of the
    docstring.
    """
    cut = [
        [tokenizer.encode(task[k], add_special_tokens=False).ids for k in PARTS] for task in tasks
    ]
    longest = max(len(prompt) + len(solution) for prompt, solution in cut)
    token_NL, where_NL = (
        np.zeros((len(cut), longest), np.int32),
        np.zeros((len(cut), longest), bool),
    )
    for row, where, (prompt, solution) in zip(token_NL, where_NL, cut, strict=True):
        end = len(prompt) + len(solution)
        row[:end] = prompt + solution
        where[len(prompt) : end] = [
            id in prompt and tokenizer.decode([id]).strip().isdigit() for id in solution
        ]
    return token_NL, where_NL


@jax.jit
def likeliest(model, token_BL):
    return model.logits(model.hidden(model.lookup(token_BL))).argmax(-1)


def copied(folder, step, token_NL, where_NL, size=50):
    model, _ = checkpoints.load(pc, folder, step)
    guess_NL = np.concatenate(
        [likeliest(model, token_NL[i : i + size]) for i in range(0, len(token_NL), size)]
    )
    return float((guess_NL[:, :-1] == token_NL[:, 1:])[where_NL[:, 1:]].mean())


def measured(cfg, out, tasks, name, seed):
    """A row: the share of numbers that are copied, by steps."""
    settings, shape = VARIANTS[name]
    folder = out / f"{re.sub('[^a-zA-Z0-9]+', '_', name)}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    data = out / settings.get("data", "all") / "rows"
    shared = {
        "model": "tiny",
        "steps": cfg.steps,
        "eval_every": cfg.every,
        "keep": cfg.steps,
        "eval_rows": 16,
    }
    shared |= {"compile_cache": "", "log_every": 100}
    settings = shared | settings | {"data": str(data), "out": str(folder), "seed": seed}
    seconds = spent("pythoncoder", shape, settings)
    texts = numbers_of(runs.read_tokenizer(folder), tasks)
    share = {step: copied(folder, step, *texts) for step in runs.saved_steps(folder)}
    return {
        "variant": name,
        "seed": seed,
        "share": share,
        "processor_s": seconds,
        "cpu": cpu_name(),
    }


def reached(share, level):
    """The first step with this share, as text; between two checkpoints it is taken to rise
    evenly.
    """
    step_N, share_N = np.array([0, *map(int, share)]), np.array([0.0, *share.values()])
    if share_N.max() < level:
        return "-"
    i = int((share_N >= level).argmax())
    return f"{np.interp(level, share_N[i - 1 : i + 1], step_N[i - 1 : i + 1]):.0f}"


def table(found):
    steps = (f"{100 * level:.0f} % after steps" for level in LEARNT)
    yield f"| variant | {' | '.join(steps)} | at the end, % | processor s |"
    yield "|---" * (len(LEARNT) + 3) + "|"
    for name in VARIANTS:
        if mine := [row for row in found if row["variant"] == name]:
            cells = [", ".join(reached(row["share"], level) for row in mine) for level in LEARNT]
            cells.append(", ".join(f"{100 * [*row['share'].values()][-1]:.1f}" for row in mine))
            yield f"| {name} | {' | '.join(cells)} | {np.mean([row['processor_s'] for row in mine]):,.0f} |"


def plot(found, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5))
    for number, name in enumerate(VARIANTS):
        for i, row in enumerate(row for row in found if row["variant"] == name):
            steps, shares = [*map(int, row["share"])], [*row["share"].values()]
            axis.plot(steps, shares, color=f"C{number}", lw=1, label=name if i == 0 else None)
    axis.set(
        xlabel="steps of 4,096 tokens",
        ylabel="numbers of the docstring that are copied",
        ylim=(0, 1),
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(cfg):
    out, path = Path(cfg.out), RESULTS / f"{cfg.file}.jsonl"
    claim(out, {"steps": cfg.steps, "every": cfg.every})
    if any(max(map(int, row["share"])) != cfg.steps for row in read_lines(path)):
        raise ValueError(f"{path} has rows of other --steps: say those, or another --file")
    tasks = prepare(out)
    for seed in cfg.seeds:
        for name in VARIANTS:
            known = any((row["variant"], row["seed"]) == (name, seed) for row in read_lines(path))
            if not known and re.search(cfg.only, name):
                row = measured(cfg, out, tasks, name, seed)
                print(name, seed, row["share"], flush=True)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    found = sorted(read_lines(path), key=lambda row: row["seed"])
    if not found:
        raise ValueError(f"{path} has no rows; measure some with --only and --seeds")
    cpus = ", ".join(dict.fromkeys(row["cpu"] for row in found))
    about = f"Seeds side by side; -: not within {cfg.steps:,} steps; {cpus}."
    lines = [HEAD, *table(found), "", about, "", f"![curves]({cfg.file}.png)"]
    lines += ["", f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
    (RESULTS / f"{cfg.file}.md").write_text("\n".join(lines) + "\n")
    plot(found, RESULTS / f"{cfg.file}.png")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
