"""What models of 1, 2 and 4 M parameters reach on TinyPython after 5, 20 and 60 core minutes: a
table, a plot, samples.

    python bench/tinypython_page.py --only="1m, 5" --file=mine    # twenty minutes: both families
    python bench/tinypython_page.py --file=mine                   # nine core hours; goes on where it stopped
    python bench/tinypython_page.py --only=none                   # writes the page from what is there

A cell is a training from scratch with a learning rate that falls within its own time, and greedy
pass@1 on the 1,000 tasks of the split `composed`, with a 95 % interval (Wilson). A Dream learns
from left to right for a fifth of its time, then to fill masks. Processor seconds count, of training
and what it compiles; scoring does not. Each cell is appended to results/<file>.jsonl, from which
<file>.md and <file>.png are written. Samples are of the models in weights/.
"""

import dataclasses
import functools
import json
import multiprocessing
import re
import resource
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from record import RESULTS, cpu_name

import runs

MINUTES = 5, 20, 60
SHAPES = {  # what differs from the preset tiny
    "1m": {},
    "2m": {"width": 192, "heads": 6, "kv_heads": 2, "ffn": 512},
    "4m": {"width": 256, "heads": 8, "kv_heads": 4, "ffn": 768},
}
PAIRS = "--vocab_size=1024", "--seq_len=256", "--eos_to=64"
ROWS = "--vocab_size=1024", "--seq_len=512", "--column=content"
PROBE = 60  # steps from which the pace is known


@dataclasses.dataclass(frozen=True)
class Config:
    # only cells whose "family, size, minutes" has a match of this regular expression; none: no cell
    only: str = ""
    out: str = "out/tinypython_page"  # folder of the world, its rows and the runs
    file: str = "tinypython"  # bench/results/<file>.jsonl, .md, .png
    samples: int = 5  # right answers, and wrong ones, of each model in weights/


def prepare(out):
    """The world and its rows for both families."""
    world = out / "world"
    runs.script("tinypython.py", "--n=200000", f"--out={world}")
    runs.script(
        "data_prep.py", "pairs", str(world / "pairs.jsonl"), f"--out={out / 'dream'}", *PAIRS
    )
    runs.script(
        "data_prep.py",
        "python",
        "--roots",
        str(world / "train.jsonl"),
        f"--out={out / 'pythoncoder'}",
        *ROWS,
    )


def train(family, shape, settings):
    """Train in a process of its own, whose preset tiny has another shape."""
    import model_dream
    import model_pythoncoder
    import train_dream
    import train_tpu

    model, trainer = {
        "dream": (model_dream, train_dream),
        "pythoncoder": (model_pythoncoder, train_tpu),
    }[family]
    model.CONFIGS["tiny"] = dataclasses.replace(model.CONFIGS["tiny"], **shape)
    trainer.main(trainer.Config(**settings))


def spent(family, shape, settings):
    """Processor seconds of a training; shape is what differs from the preset tiny."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = multiprocessing.get_context("spawn").Process(
        target=train, args=(family, shape, settings)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the run {settings['out']} failed; what it printed says why")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def settings_of(family, data, out, steps):
    shared = {
        "model": "tiny",
        "data": str(data),
        "steps": steps,
        "warmup": min(200, steps // 5),
        "eval_rows": 64,
    }
    shared |= {"out": str(out), "eval_every": steps, "log_every": 100, "compile_cache": ""}
    return shared | ({"micro_batch": 4, "remat": "none"} if family == "dream" else {})


@functools.cache
def pace_of(out, family, shape):
    """(processor seconds of a step, of the start of a training), by two short trainings."""
    folder, seconds = out / f"{family}-{shape}-probe", []
    for steps in (PROBE, 2 * PROBE):
        shutil.rmtree(folder, ignore_errors=True)
        seconds.append(
            spent(family, SHAPES[shape], settings_of(family, out / family, folder, steps))
        )
    first, second = seconds
    return (second - first) / PROBE, max(0, 2 * first - second)


def cell(out, family, shape, minutes, known):
    """A row of the table; its steps are chosen by the longest of the `known` rows of this model and
    CPU.
    """
    import benchmarks

    folder, data, differs = out / f"{family}-{shape}-{minutes}", out / family, SHAPES[shape]
    shutil.rmtree(folder, ignore_errors=True)
    like = [
        row
        for row in known
        if (row["family"], row["size"], row["cpu"]) == (family, shape, cpu_name())
    ]
    longest = max(like, key=lambda row: row["minutes"], default={"minutes": 0})
    enough = longest["minutes"] > MINUTES[0]  # a start is a large part of five minutes
    pace, start = (
        (longest["processor_s"] / longest["steps"], 0) if enough else pace_of(out, family, shape)
    )
    starts = 2 if family == "dream" else 1  # each training compiles
    steps = int((60 * minutes - starts * start) / pace)
    run, causal = folder / "run", steps // 5
    if family == "dream":
        seconds = spent(
            family,
            differs,
            settings_of(family, data, folder / "causal", causal) | {"objective": "ar"},
        )
        flags = {
            "model": "",
            "init": str(folder / "causal"),
            "anneal_steps": steps // 16,
            "optimizer": "muon",
            "lr": 1.2e-3,
        }
        seconds += spent(family, differs, settings_of(family, data, run, steps - causal) | flags)
    else:
        seconds = spent(family, differs, settings_of(family, data, run, steps))
    scored = {"model": family, "ckpt": str(run), "out": str(folder / "composed"), "batch_size": 100}
    tasks = {"task": "humaneval", "tasks_file": str(out / "world/composed.jsonl"), "max_new": 64}
    row = {
        "family": family,
        "size": shape,
        "minutes": minutes,
        "steps": steps,
        "processor_s": seconds,
    }
    return row | {
        "pass@1": benchmarks.main(benchmarks.Config(**tasks, **scored))["pass@1"],
        "cpu": cpu_name(),
    }


def samples(out, family, count):
    """The first functions of the split in its order that pass, and that fail, of the model in
    weights/.
    """
    import benchmarks

    folder = out / f"{family}-weights"
    tasks = {
        "task": "humaneval",
        "tasks_file": str(out / "world/composed.jsonl"),
        "max_new": 64,
        "problems": 200,
    }
    scored = {
        "model": family,
        "ckpt": str(ROOT / "weights" / family),
        "out": str(folder),
        "batch_size": 100,
    }
    benchmarks.main(benchmarks.Config(**tasks, **scored))
    prompts = {row["task_id"]: row["prompt"] for row in read_lines(out / "world/composed.jsonl")}
    texts = {row["task_id"]: row["completion"] for row in read_lines(folder / "samples.jsonl")}
    verdicts = {row["task_id"]: row["passed"] for row in read_lines(folder / "results.jsonl")}
    for passed in (True, False):
        ids = [name for name in prompts if verdicts.get(name) is passed][:count]
        yield passed, [prompts[name] + texts[name].rstrip() for name in ids]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


HEAD = """# TinyPython, and what small models make of it

`tinypython.py` draws typed operations from a grammar (`tinypython.txt` has its words), writes the function and a
docstring that says what it does, half of them with an example; its tests come from running it and three to ten mutants.
No docstring describes two functions that differ. The split *composed* has combinations of operations of which no
training function is made (one of more operations may contain them). 200,000 functions are 14 M tokens of a vocabulary
of 1,024, 22 M with the EOS that a Dream's texts are filled with.

| family | parameters | core minutes | steps | processor s | pass@1 on *composed* |
|---|---|---|---|---|---|"""
TAIL = """Greedy, 1,000 tasks, 95 % intervals; one seed each. A Dream learns from left to right for a fifth of its time.
Steps are chosen beforehand, by the pace of a shorter run: processor s is what the cell took, and the axis of the plot.
{cpu}; processor seconds are summed over the hyperthreads. `python bench/{command}`

![pass@1]({file}.png)"""


def page(out, rows, count, file):
    """<file>.md, with <file>.png."""
    lines = [HEAD]
    for row in rows:
        score = "{:.1f} % ({:.1f} to {:.1f})".format(*(100 * rate for rate in row["pass@1"]))
        cells = (
            row["family"],
            f"{row['size'][0]} M",
            row["minutes"],
            f"{row['steps']:,}",
            f"{row['processor_s']:,.0f}",
        )
        lines.append("| " + " | ".join(map(str, (*cells, score))) + " |")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    cpus = ", ".join(dict.fromkeys(row["cpu"] for row in rows))
    lines += [
        "",
        f"{len(rows)} of 18 cells. " * (len(rows) < 18)
        + TAIL.format(cpu=cpus, file=file, command=command),
    ]
    for family in ("pythoncoder", "dream"):
        for passed, texts in samples(out, family, count):
            which = "that pass their tests" if passed else "that do not"
            lines += ["", f"## weights/{family}: the first {len(texts)} of the split {which}", ""]
            lines += [f"```\n{text}\n```" for text in texts]
    (RESULTS / f"{file}.md").write_text("\n".join(lines) + "\n")
    plot(rows, RESULTS / f"{file}.png")


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5))
    for i, shape in enumerate(SHAPES):
        for family, line in (("pythoncoder", "-"), ("dream", "--")):
            mine = sorted(
                (r["processor_s"] / 60, *r["pass@1"])
                for r in rows
                if (r["family"], r["size"]) == (family, shape)
            )
            if mine:
                x, mean, low, high = zip(*mine, strict=True)
                mean, low, high = (np.array(rates) for rates in (mean, low, high))
                # at 0 the interval begins a rounding above
                error = np.maximum((mean - low, high - mean), 0)
                axis.errorbar(
                    x,
                    mean,
                    error,
                    fmt="o" + line,
                    color=f"C{i}",
                    capsize=3,
                    label=f"{family}, {shape[0]} M",
                )
    axis.set(
        xscale="log",
        xlabel="core minutes of training",
        ylabel="pass@1 on composed, greedy",
        ylim=(0, 1),
    )
    axis.set_xticks(MINUTES, MINUTES)
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(cfg):
    out, path = Path(cfg.out), RESULTS / f"{cfg.file}.jsonl"
    prepare(out)
    cells = [
        (family, shape, minutes)
        for minutes in MINUTES
        for shape in SHAPES
        for family in ("pythoncoder", "dream")
    ]
    for key in cells:
        known = any((row["family"], row["size"], row["minutes"]) == key for row in read_lines(path))
        if not known and re.search(cfg.only, "{}, {}, {}".format(*key)):
            row = cell(out, *key, read_lines(path))
            print(row, flush=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if rows := read_lines(path):
        page(
            out,
            sorted(rows, key=lambda row: (row["family"], row["size"], row["minutes"])),
            cfg.samples,
            cfg.file,
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
