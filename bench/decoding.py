"""Decoding contest: functions that pass their tests against forward passes, by every rule, on
TinyPython.

    python bench/decoding.py    # an hour of an idle core; goes on where it stopped
    python bench/decoding.py --tasks=8 --steps=20 --out=out/try_decoding --file=try_decoding    # a first look, minutes

The models are weights/dream, the same trained on in blocks, and weights/pythoncoder. The tasks are
those of the split `composed`: combinations of operations of which no training function is made.
Each rule completes each task once, at temperature 0, one prompt at a time. Work is counted twice:
forward passes, and slots that go through the model, in canvases. The rules are compared on the same
tasks: a difference and its two standard errors are over tasks. Dream's schedule writes no token in
its first pass and two in its last, "1 a pass" too (diffusion.step_counts). Writes decoding.md,
decoding.png and an entry of cpu.json under bench/results/.
"""

import dataclasses
import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from record import RESULTS, claim, judged, record

import checkpoints
import model_dream
import model_pythoncoder
import runs
import sample_block
import sample_dream


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of data, the run of blocks and verdicts; what is in there is not done again
    out: str = "out/decoding"
    dream: str = "weights/dream"  # a Dream that fills the whole canvas
    coder: str = "weights/pythoncoder"  # a PythonCoder
    steps: int = 1500  # optimizer steps in which the Dream learns blocks
    canvas: int = 64  # tokens to fill
    block_length: int = 8  # of the Dream of blocks, and of the rules with blocks
    tasks: int = 400  # held-out tasks
    # a rule is as good as the schedule if it is shown to pass less by no more than this
    margin: float = 0.05
    # bench/results/<file>.json; decoding.md and .png belong to "cpu", else <file>.md and .png
    file: str = "cpu"
    seed: int = 0  # of the training in blocks


def rules(cfg):
    """{name: (model, settings)}; a name begins with its kind."""
    block = {"block_length": cfg.block_length}
    found = {f"schedule, {n} a pass": ("dream", {"steps": -(-cfg.canvas // n)}) for n in (1, 2, 4)}
    found |= {f"threshold {p}": ("dream", {"threshold": p}) for p in (0.7, 0.8, 0.9, 0.95)}
    found |= {f"entropy bound {h}": ("dream", {"entropy_bound": h}) for h in (0.1, 0.3, 1.0, 2.0)}
    for accept in ({"threshold": 0.9}, {"entropy_bound": 0.3}):
        text = " ".join(f"{name} {value}" for name, value in accept.items()).replace("_", " ")
        found[f"dual cache, {text}"] = "dream", block | accept | {"cache": "dual"}
    found["exact block cache, 1 a pass"] = "blocks", {}
    found |= {f"exact block cache, threshold {p}": ("blocks", {"threshold": p}) for p in (0.7, 0.9)}
    found |= {
        f"exact block cache, entropy bound {h}": ("blocks", {"entropy_bound": h})
        for h in (0.1, 0.3, 1.0)
    }
    found["PythonCoder"] = "coder", {"speculate": False}
    return found | {"PythonCoder, its own drafts": ("coder", {"speculate": True})}


# ---- data and models -----------------------------------------------------------------------------------------------


def prepare(cfg, out):
    """The tasks; under `out` their world, and the Dream of blocks, trained from the other one."""
    world, rows, blocks = out / "world", out / "rows", out / "blocks"
    tasks = f"--tasks={cfg.tasks}"
    runs.script("extra/tinypython.py", "--splits=composed", tasks, f"--out={world}")
    packing = "--seq_len=256", f"--eos_to={cfg.canvas}", f"--tokenizer={cfg.dream}/tokenizer.json"
    if not (blocks / "done").exists():
        runs.script("data_prep.py", "pairs", str(world / "pairs.jsonl"), f"--out={rows}", *packing)
        shape = f"--block_length={cfg.block_length}", f"--steps={cfg.steps}", f"--seed={cfg.seed}"
        pace = ["--micro_batch=4", "--remat=none", "--optimizer=muon", "--lr=7e-4"]
        pace.append(f"--eval_every={cfg.steps}")
        resume = f"--resume={blocks if runs.saved_steps(blocks) else ''}"
        runs.script(
            "train_dream.py",
            f"--init={cfg.dream}",
            f"--data={rows}",
            f"--out={blocks}",
            resume,
            *shape,
            *pace,
        )
        (blocks / "done").touch()
    lines = (world / "composed.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ---- the rules -----------------------------------------------------------------------------------------------------


def decode(cfg, kind, model, rule, ids, width):
    """Complete a prompt: (ids, forward passes, slots that went through the model)."""
    key = jax.random.key(0)  # draws nothing at temperature 0
    if kind == "coder":
        (new,), stats = model_pythoncoder.generate(model, [ids], cfg.canvas, rule, key)
        first = 1 << max(5, (len(ids) - 1).bit_length())  # the slots of the pass over the prompt
        return new, stats["forwards"], first + (stats["forwards"] - 1) * (1 + rule.speculate)
    if kind == "blocks":
        (row,), stats = sample_block.generate(model, [ids], cfg.canvas, rule, key)
    else:
        (row,), stats = sample_dream.generate(model, [ids], cfg.canvas, rule, key, widths=(width,))
    return row[len(ids) :], stats["forwards"], sum(stats["windows"])


def measure(cfg, out, tasks):
    """{rule: {"pass", "passes", "slots"}}, an array over tasks each."""
    path = out / "measured.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    folders = {"dream": cfg.dream, "blocks": out / "blocks", "coder": cfg.coder}
    families = {"dream": model_dream, "blocks": model_dream, "coder": model_pythoncoder}
    make = {"dream": sample_dream.Sampling, "blocks": sample_block.Sampling}
    make["coder"] = model_pythoncoder.Sampling
    models = {name: checkpoints.load(families[name], folder)[0] for name, folder in folders.items()}
    tokenizers = {name: runs.read_tokenizer(folder) for name, folder in folders.items()}
    longest = max(len(tokenizers["dream"].encode(task["prompt"]).ids) for task in tasks)
    width = sample_dream.canvas_width(longest + cfg.canvas, 1 << 30)
    for name, (kind, settings) in rules(cfg).items():
        if name in found:
            continue
        tokenizer, results, programs = tokenizers[kind], [], []
        end = tokenizer.token_to_id("<|endoftext|>")
        special = {"eos_ids": (end,)}
        if kind == "coder":
            special = {"vocab": tokenizer.get_vocab_size(), "eos": end}
        special |= {} if kind == "coder" else {"vocab": tokenizer.token_to_id("<|mask|>")}
        rule = make[kind](**special | {"temperature": 0.0} | settings)
        for task in tasks:
            new, *work = decode(
                cfg, kind, models[kind], rule, tokenizer.encode(task["prompt"]).ids, width
            )
            results.append(work)
            programs.append(task["prompt"] + tokenizer.decode(new))
        verdicts = judged(programs, [task["test_cases"] for task in tasks])
        passes, slots = zip(*results, strict=True)
        passed = [result.rate == 1 for result in verdicts]
        found[name] = {"pass": passed, "passes": passes, "slots": [n / width for n in slots]}
        path.write_text(json.dumps(found))
        counts = f"{np.mean(passes):.2f} forward passes"
        print(f"{name:40} pass@1 {np.mean(passed):.3f} | {counts}", flush=True)
    return {name: {key: np.array(x) for key, x in found[name].items()} for name in rules(cfg)}


# ---- what came out -------------------------------------------------------------------------------------------------


def mean_2se(x_N):
    """Mean, and two standard errors of it."""
    return float(np.mean(x_N)), float(2 * np.std(x_N, ddof=1) / len(x_N) ** 0.5)


def compare(found, base):
    """{rule: its numbers}, against those of the rule `base` on the same tasks."""
    rows = {}
    for name, of_rule in found.items():
        row = dict(zip(("pass", "pass_2se"), mean_2se(of_rule["pass"]), strict=True))
        row |= {"passes": float(of_rule["passes"].mean()), "slots": float(of_rule["slots"].mean())}
        row["p10_p90"] = np.quantile(of_rule["passes"], [0.1, 0.9]).tolist()
        row["fewer"] = float(found[base]["passes"].mean() / of_rule["passes"].mean())
        less = of_rule["pass"].astype(float) - found[base]["pass"]
        row |= dict(zip(("difference", "difference_2se"), mean_2se(less), strict=True))
        rows[name] = row
    return rows


def table(rows):
    yield "| rule | pass@1 | passes (p10, p90) | canvases fed | speed-up on 1 a pass | pass@1 difference |"
    yield "|---" * 6 + "|"
    for name, row in rows.items():
        low, high = row["p10_p90"]
        yield (
            f"| {name} | {row['pass']:.3f} ± {row['pass_2se']:.3f} | {row['passes']:.2f} ({low:.0f}, {high:.0f})"
            f" | {row['slots']:.2f} | {row['fewer']:.2f} | {row['difference']:+.3f} ± {row['difference_2se']:.3f} |"
        )


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5))
    kinds = ["schedule", "threshold", "entropy bound", "dual cache"]
    kinds += ["exact block cache", "PythonCoder"]
    for number, kind in enumerate(kinds):
        mine = sorted(
            (row["passes"], row["pass"], row["pass_2se"])
            for name, row in rows.items()
            if name.startswith(kind)
        )
        style = {"marker": "o", "ms": 4, "lw": 1, "capsize": 2}
        style |= {"elinewidth": 0.6, "color": f"C{number}"}
        if mine:
            axis.errorbar(*zip(*mine, strict=True), label=kind, **style)
    axis.set(xscale="log", xlabel="passes of the model for a text")
    axis.set_ylabel("pass@1, two standard errors over tasks")
    axis.set_xticks(ticks := [1, 2, 5, 10, 20, 50], ticks)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(cfg):
    checkpoints.keep_compiled("~/.cache/unmask")
    out = Path(cfg.out)
    claim(
        out,
        {name: value for name, value in vars(cfg).items() if name not in ("out", "file", "margin")},
    )
    tasks = prepare(cfg, out)
    found, base = measure(cfg, out, tasks), "schedule, 1 a pass"
    rows = compare(found, base)

    # The fewest passes of a Dream's rule that is shown to be as good, two standard errors below the
    # difference too.
    equal = {
        name: row
        for name, row in rows.items()
        if row["difference"] - row["difference_2se"] >= -cfg.margin
    }
    best = max(
        (name for name in equal if "PythonCoder" not in name), key=lambda name: equal[name]["fewer"]
    )
    rng, n = np.random.default_rng(0), cfg.tasks
    draws = [rng.integers(0, n, n) for _ in range(1000)]
    ratios = [found[base]["passes"][i].mean() / found[best]["passes"][i].mean() for i in draws]
    name = "decoding" if cfg.file == "cpu" else cfg.file
    plot(rows, RESULTS / f"{name}.png")
    lines = ["# Forward passes per text", "", *table(rows), ""]
    lines.append(
        f"{cfg.tasks} tasks of TinyPython's split composed, temperature 0, at most {cfg.canvas} tokens;"
    )
    lines.append(
        "± two standard errors. The fewest passes of a Dream's rule whose pass@1, less two standard"
    )
    lines += [
        f"errors of the difference, is at most {cfg.margin} below the schedule's: {best}.",
        "",
    ]
    lines += [f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    record(
        cfg.file,
        f"decoding contest, dream tiny: passes of {base} / of the fastest rule as good",
        rows[best]["fewer"],
        "ratio",
        spread=np.quantile(ratios, [0.1, 0.9]).tolist(),
        rule=best,
        rules=rows,
        tasks=cfg.tasks,
        margin=cfg.margin,
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
