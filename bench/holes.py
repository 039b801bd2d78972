"""Holes of unknown length in TinyPython's functions: what infill.py makes of them, and whether the
tests pass.

    python bench/holes.py                                       # 42 minutes of a core; goes on where it stopped
    python bench/holes.py --holes=8 --out=out/try_holes --file=try_holes    # a first look

The model is weights/dream, the tasks are those of the split `composed`: combinations of operations
of which no training function is made. A task's hole is one line or two of its solution, or the rest
of a line. It holds as many masks as it had tokens; 4, 16 or 64; the likeliest number; or, for a
Dream of --edit_rate, 4, 16 or 64 that grow and shrink. Each is filled as generate.py fills it,
without and with --valid=python, at temperature 0. No EOS is written where the length is right or
found; of 4, 16 and 64 masks it ends the hole. Counted are holes filled with what was there,
functions that pass the task's tests, functions that parse, forward passes over a canvas, and
seconds, compiling in none. Writes holes.md under bench/results/ at the end.
"""

import dataclasses
import itertools
import json
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from record import RESULTS, claim, cpu_name, judged

import checkpoints
import infill
import model_dream
import runs
import sample_dream


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of the tasks and of what was measured; what is in there is not done again
    out: str = "out/holes"
    ckpt: str = "weights/dream"  # a Dream that learned holes (data_prep.py pairs, with a "suffix")
    holes: int = 400  # held-out holes
    file: str = "holes"  # bench/results/<file>.md


def fill_holes(cfg, tasks, masks, valid):
    """[{"exact", "passes_tests", "parses", "masks", "forwards", "filling", "mending"}]; -ing in
    seconds.
    """
    model, _ = checkpoints.load(model_dream, cfg.ckpt, dtype="float32")  # as generate.py on a CPU
    tokenizer, clock = runs.read_tokenizer(cfg.ckpt), {"compile": 0.0}

    def on_event(name, seconds, **_):
        clock["compile"] += seconds if name.startswith("/jax/core/compile/") else 0

    jax.monitoring.register_event_duration_secs_listener(on_event)
    mask, eos, rows, programs = model.cfg.mask_id, model.cfg.eos_id, [], []
    ends = {eos} if masks in (4, 16, 64) else set()  # in a hole whose length is known no text ends
    never = {mask, model.cfg.expand_id, eos} - ends
    rule = sample_dream.Sampling(vocab=tokenizer.get_vocab_size(), ban_ids=tuple(never))
    now = lambda: time.perf_counter() - clock["compile"]  # noqa: E731

    for task in tasks:
        start, end = task["hole"]
        solution = task["canonical_solution"]
        texts = task["prompt"] + solution[:start], solution[start:end], solution[end:]
        before, hole, behind = (tokenizer.encode(text).ids for text in texts)
        read, started = infill.Reader(model, tokenizer), now()
        n = {"as many": len(hole)}.get(masks, masks)
        if masks == "likeliest":
            n = infill.hole_length(read, before, behind, rule, jax.random.key(0), 8, valid)
        elif "from" in str(masks):
            by_probability = dataclasses.replace(rule, alg="maskgit_plus")
            grown = infill.grow(read, before, behind, by_probability, size=int(masks[5:]))
            n = len(grown)
        canvas = [*before, *[mask] * n, *behind]
        if "from" in str(masks):
            ids = [*before, *grown, *behind]
        else:
            (ids,), stats = sample_dream.generate(
                model, [canvas], 0, rule, jax.random.key(0), rows=1
            )
            read.passes += int(stats["passes"].sum())
        filled = now()
        if valid:
            ids, _ = infill.mend(read, canvas, ids, ends)
        seconds = {"filling": filled - started, "mending": now() - filled}
        hole = itertools.takewhile(
            lambda token: token not in ends, ids[len(before) : len(before) + n]
        )
        text = tokenizer.decode([*hole])
        programs.append(texts[0] + text + texts[2])
        right = infill.parses(programs[-1]) and not infill.swallows(texts[0], text, texts[2])
        row = {"exact": text == texts[1], "parses": right, "masks": n, "forwards": read.passes}
        rows.append(row | seconds)
    verdicts = judged(programs, [task["test_cases"] for task in tasks])
    return [
        row | {"passes_tests": verdict.rate == 1}
        for row, verdict in zip(rows, verdicts, strict=True)
    ]


def main(cfg):
    out = Path(cfg.out)
    split = "--splits=composed", "--formats=rows", f"--tasks={cfg.holes}"
    runs.script("tinypython.py", "--n=20000", *split, f"--out={out / 'world'}")
    tasks = [json.loads(line) for line in (out / "world/composed.jsonl").read_text().splitlines()]
    lines = ["# Holes of unknown length", ""]
    lines.append(
        "| masks | --valid | exact | pass | parse | mean masks | forward passes | s a hole | of it repair |"
    )
    lines.append("|---" * 9 + "|")
    error = 100 / cfg.holes**0.5  # two standard errors of a share of a half
    about = [
        "",
        f"{cfg.holes} holes of the split composed; two standard errors of a share are at most {error:.1f} %.",
    ]
    about += [f"{cpu_name()}; seconds exclude compiling.", ""]
    about += [f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
    grows = model_dream.read_config(cfg.ckpt).expand_id >= 0
    claim(out, {"ckpt": cfg.ckpt, "holes": cfg.holes})
    for masks in ("as many", 4, 16, 64, "likeliest", *(f"from {n}" for n in (4, 16, 64) if grows)):
        for valid in (False, True):
            path = out / f"{masks}-{valid}.json"
            if not path.exists():
                path.write_text(json.dumps(fill_holes(cfg, tasks, masks, valid)))
            rows = json.loads(path.read_text())
            mean = {key: np.mean([row[key] for row in rows]) for key in rows[0]}
            shares = " | ".join(
                f"{100 * mean[key]:.1f} %" for key in ("exact", "passes_tests", "parses")
            )
            spent = f"{mean['filling'] + mean['mending']:.3f} | {mean['mending']:.3f}"
            work = f"{mean['masks']:.1f} | {mean['forwards']:.1f} | {spent}"
            lines.append(f"| {masks} | {'python' if valid else ''} | {shares} | {work} |")
            print(lines[-1], flush=True)
    (RESULTS / f"{cfg.file}.md").write_text("\n".join(lines + about) + "\n")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
