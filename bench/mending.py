"""Repair contest: functions mended against forward passes, by where they are opened, on TinyPython.

    python bench/mending.py    # two and a half hours, beside other work; goes on where it stopped
    python bench/mending.py --functions=16 --rounds=4 --out=out/try_mending --file=try_mending    # a first look

Half of the functions are solutions with one planted bug: a wrong constant, comparison, method or
variable, or a missing line. The others are what weights/dream itself generates at temperature 0.
All fail the example in their docstring. An attempt may read that example alone; hidden tests decide
whether a function is mended, and count those that pass the example and fail the tests. Writes
mending.md, mending.png and an entry of cpu.json under bench/results/.

Every round opens one place and fills 64 masks, by an entropy bound of 0.1. Against it: whole
functions generated anew, by weights/dream at temperature 0.8, or from left to right by
weights/pythoncoder, the first at temperature 0.
"""

import ast
import dataclasses
import json
import random
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from record import RESULTS, claim, judged, record

import benchmarks
import canvas
import checkpoints
import infill
import model_dream
import model_pythoncoder
import repair
import runs
import sample_dream
import tinypython


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/mending"  # folder of tasks and verdicts; what is in there is not done again
    dream: str = "weights/dream"
    coder: str = "weights/pythoncoder"  # a PythonCoder
    functions: int = 1000  # with a planted bug; as many of the model's own failures, if it has them
    tasks: int = 2000  # of each split, of which half have an example
    rounds: int = 8  # of a repair, and texts generated anew
    masks: int = 64
    batch_size: int = 50
    # bench/results/<file>.json; mending.md and .png belong to "cpu", else <file>.md and .png
    file: str = "cpu"
    seed: int = 0


KINDS = "constant", "comparison", "method", "variable", "missing line"
METHODS = {
    "min",
    "max",
    "any",
    "all",
    "upper",
    "lower",
    "startswith",
    "endswith",
    "isupper",
    "islower",
    "sum",
    "len",
}
METHODS |= {"isdigit", "isalpha", "sorted"}


# ---- functions that fail ---------------------------------------------------------------------------------------------


def bugs(prompt, body, rng):
    """{kind: body with one bug} of a solution; all of them parse."""
    *_, function = ast.parse(prompt + body).body
    names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names |= {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    found = {kind: [] for kind in KINDS}
    for mark in re.finditer(r"[=!<>]+|\b\w+\b", body):
        word, (start, end) = mark[0], mark.span()
        others, kind = tinypython.SWAPS.get(word, []), "comparison"
        if word.isdigit():
            others, kind = [str(abs(int(word) + step)) for step in (-1, 1, 2)], "constant"
        elif word in names:
            others, kind = sorted(names - {word}), "variable"
        elif word in METHODS:
            kind = "method"
        elif word not in ("==", "!=", "<", "<=", ">", ">="):
            continue
        found[kind] += [body[:start] + other + body[end:] for other in others]
    lines = body.splitlines(keepends=True)
    if len(lines) > 1:
        found["missing line"] = ["".join(lines[:i] + lines[i + 1 :]) for i in range(len(lines))]
    found = {
        kind: [text for text in of if infill.parses(prompt + text)] for kind, of in found.items()
    }
    return {kind: rng.choice(of) for kind, of in found.items() if of}


def planted(cfg, tasks):
    """Functions with a bug that the example and a hidden test find, as rows, as many of each kind;
    and {kind: [bugs that a hidden test finds, those among them that the example finds]}.
    """
    rng, wanted = random.Random(cfg.seed), dict.fromkeys(KINDS, -(-cfg.functions // len(KINDS)))
    candidates = []
    for task in rng.sample(tasks, len(tasks)):
        found = bugs(task["prompt"], task["canonical_solution"], rng)
        candidates += [task | {"kind": kind, "body": body} for kind, body in found.items()]
    rows, seen = [], {kind: [0, 0] for kind in KINDS}
    for i in range(0, len(candidates), 500):
        part = candidates[i : i + 500]
        for row, (example, hidden) in zip(part, passing(part), strict=True):
            seen[row["kind"]][0] += not hidden
            seen[row["kind"]][1] += not hidden and not example
            fresh = row["task_id"] not in {other["task_id"] for other in rows}
            if not hidden and not example and fresh and wanted[row["kind"]]:
                wanted[row["kind"]] -= 1
                rows.append(row)
        if not any(wanted.values()):
            break
    return rows[: cfg.functions], seen


def own_failures(cfg, tasks, dream):
    """What the Dream itself generates at temperature 0, where the example finds it wrong."""
    rows = []
    for i in range(0, len(tasks), cfg.batch_size):
        part = tasks[i : i + cfg.batch_size]
        texts, _ = dream.anew(part, 0.0, 0)
        part = [
            task | {"kind": "its own", "body": text} for task, text in zip(part, texts, strict=True)
        ]
        rows += [row for row, (example, _) in zip(part, passing(part), strict=True) if not example]
        if len(rows) >= cfg.functions:
            break
    return rows[: cfg.functions]


def passing(rows):
    """[(whether the example of a row passes with its body, whether all hidden tests pass)]"""
    tests = [row["examples"] + row["test_cases"] for row in rows]
    results = judge([row["prompt"] + row["body"] for row in rows], tests)
    counts = [len(row["examples"]) for row in rows]
    passed = [[each for each, _ in result] for result in results]
    return [(all(each[:n]), all(each[n:])) for n, each in zip(counts, passed, strict=True)]


def judge(programs, tests):
    results = judged(programs, tests, timeout_s=1.0)
    return [
        [*zip(map("pass".__eq__, result.verdicts), result.values, strict=True)]
        for result in results
    ]


# ---- the models ------------------------------------------------------------------------------------------------------


class Dream:
    def __init__(self, cfg):
        self.cfg, (self.model, _) = cfg, checkpoints.load(model_dream, cfg.dream)
        self.tokenizer, self.end = runs.read_tokenizer(cfg.dream), self.model.cfg.eos_id
        self.rule = sample_dream.Sampling(
            entropy_bound=0.1, vocab=self.tokenizer.get_vocab_size(), eos_ids=(self.end,)
        )
        self.read = infill.Reader(self.model, self.tokenizer)

    def repaired(self, rows, openings):
        """[(passes, the text with most of the example)] of rows, opened as `openings` says."""
        fill = repair.filler(
            self.read,
            self.rule,
            jax.random.key(1),
            self.cfg.masks,
            (self.end,),
            self.cfg.batch_size,
        )
        drafts = [repair.Draft(row["prompt"], row["body"], row["examples"]) for row in rows]
        repair.repair(drafts, self.cfg.rounds, self.read, fill, judge, openings)
        return [(draft.passes, draft.body) for draft in drafts]

    def anew(self, rows, temperature, number):
        """([text], [forward passes]) of functions generated from their docstrings."""
        rule = dataclasses.replace(self.rule, temperature=temperature)
        prompts = [self.tokenizer.encode(row["prompt"]).ids for row in rows]
        how = {"rows": self.cfg.batch_size, "widths": (64, 128, 192, 256)}
        ids, stats = sample_dream.generate(
            self.model, prompts, self.cfg.masks, rule, jax.random.key(number), **how
        )
        new = [row[len(prompt) :] for row, prompt in zip(ids, prompts, strict=True)]
        new = [row[: row.index(self.end)] if self.end in row else row for row in new]
        return self.tokenizer.decode_batch(new), stats["passes"].tolist()


class Coder:
    def __init__(self, cfg):
        self.cfg, (self.model, _) = cfg, checkpoints.load(model_pythoncoder, cfg.coder)
        self.tokenizer = runs.read_tokenizer(cfg.coder, self.model.cfg.vocab)
        self.special = {
            "vocab": self.tokenizer.get_vocab_size(),
            "eos": self.tokenizer.token_to_id("<|endoftext|>"),
        }

    def anew(self, rows, temperature, number):
        rule = model_pythoncoder.Sampling(temperature, speculate=False, **self.special)
        prompts, new = [self.tokenizer.encode(row["prompt"]).ids for row in rows], []
        for i in range(0, len(prompts), self.cfg.batch_size):
            part = prompts[i : i + self.cfg.batch_size]
            part += [part[-1]] * (self.cfg.batch_size - len(part))  # so that one shape is compiled
            texts, _ = model_pythoncoder.generate(
                self.model, part, self.cfg.masks, rule, jax.random.key(number + i)
            )
            new += texts
        new = new[: len(prompts)]
        return self.tokenizer.decode_batch(new), [len(ids) for ids in new]  # the end is one of them


# ---- the attempts ----------------------------------------------------------------------------------------------------


def by_line(draft, suspects):
    lines = [found.span() for found in re.finditer(r".*\n|.+", draft.body)]
    return [] if draft.line is None else [(*lines[draft.line], "")]


def by_line_then_tokens(draft, suspects):
    return [*by_line(draft, suspects), *repair.default_openings(draft, suspects)]


def by_tokens(draft, suspects):
    return repair.default_openings(dataclasses.replace(draft, line=None), suspects)


def at_random(draft, suspects):
    return by_tokens(draft, random.Random(draft.body).sample(suspects, len(suspects)))


def attempts(cfg, dream, coder):
    """{name: function from rows to [(forward passes, text)]}"""

    def again(model, temperatures):
        def write(rows):
            passes, best = [0] * len(rows), [row["body"] for row in rows]
            left = [*range(len(rows))]
            for number, temperature in enumerate(temperatures):
                texts, counts = model.anew([rows[i] for i in left], temperature, number)
                trials = [rows[i] | {"body": text} for i, text in zip(left, texts, strict=True)]
                wrong = []
                for i, trial, count, (example, _) in zip(
                    left, trials, counts, passing(trials), strict=True
                ):
                    passes[i] += count
                    best[i] = trial["body"] if example else best[i]
                    wrong += [] if example else [i]
                left = wrong
                if not left:
                    break
            return [*zip(passes, best, strict=True)]

        return write

    found = {"repair: tokens, then line": lambda rows: dream.repaired(rows, None)}
    found["repair: line, then tokens"] = lambda rows: dream.repaired(rows, by_line_then_tokens)
    found["repair: tokens"] = lambda rows: dream.repaired(rows, by_tokens)
    found["repair: line alone"] = lambda rows: dream.repaired(rows, by_line)
    found["repair: at random"] = lambda rows: dream.repaired(rows, at_random)
    # its own failure is the greedy text
    greedy_first, drawn = [0.0] + [0.8] * (cfg.rounds - 1), [0.8] * cfg.rounds
    found["anew, Dream"] = lambda rows: again(
        dream, drawn if rows[0]["kind"] == "its own" else greedy_first
    )(rows)
    return found | {"anew, PythonCoder": again(coder, greedy_first)}


# ---- what came out ---------------------------------------------------------------------------------------------------

BUDGETS = 10, 20, 50, 100


def share(rows, passes):
    """Wilson's interval of the share that is right within so many forward passes, as text."""
    right = [row["hidden"] and row["passes"] <= passes for row in rows]
    low, high = benchmarks.interval(right)
    return f"{100 * np.mean(right):.0f} ({100 * low:.0f} to {100 * high:.0f})"


def table(found, kinds):
    """Shares in percent, by budget and by kind."""
    budgets = " | ".join(f"{n} passes" for n in BUDGETS)
    yield f"| attempt | {budgets} | all rounds | passes the example, fails the tests |"
    yield "|---" * (len(BUDGETS) + 3) + "|"
    for name, rows in found.items():
        gamed = np.mean([row["example"] and not row["hidden"] for row in rows])
        cells = [share(rows, n) for n in (*BUDGETS, 10**9)]
        yield f"| {name} | {' | '.join(cells)} | {100 * gamed:.1f} |"
    yield ""
    yield f"| within {BUDGETS[2]} passes | " + " | ".join(kinds) + " |"
    yield "|---" * (len(kinds) + 1) + "|"
    for name, rows in found.items():
        of_kind = [[row for row in rows if row["kind"] == kind] for kind in kinds]
        yield f"| {name} | " + " | ".join(share(group, BUDGETS[2]) for group in of_kind) + " |"


def plot(of, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    grid = np.arange(1, 201)
    for axis, (title, found) in zip(axes, of.items(), strict=True):
        for name, rows in found.items():
            passes = np.array([row["passes"] if row["hidden"] else 10**9 for row in rows])
            axis.plot(grid, [np.mean(passes <= n) for n in grid], label=name)
        axis.set(title=title, xlabel="forward passes of a function", xscale="log")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="share that passes all hidden tests")
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(cfg):
    checkpoints.keep_compiled("~/.cache/unmask")
    out, dream, coder = Path(cfg.out), Dream(cfg), Coder(cfg)
    claim(out, {name: value for name, value in vars(cfg).items() if name not in ("out", "file")})
    splits = "constants", "composed", "phrased"
    shape = "--n=20000", f"--tasks={cfg.tasks}", f"--out={out / 'world'}"
    runs.script("tinypython.py", *shape, "--formats", "pairs", "--splits", *splits)

    # functions that fail
    if not (out / "functions.json").exists():
        lines = [
            line
            for split in splits
            for line in (out / f"world/{split}.jsonl").read_text().splitlines()
        ]
        tasks = [task for task in map(json.loads, lines) if ">>>" in task["prompt"]]
        tasks = [
            task | {"examples": [test for *_, test in canvas.examples(task["prompt"])]}
            for task in tasks
        ]
        tasks = random.Random(cfg.seed).sample(tasks, len(tasks))
        rows, seen = planted(cfg, tasks)
        runs.write(
            out / "functions.json",
            {"planted": rows, "own": own_failures(cfg, tasks, dream), "seen": seen},
        )
    functions = runs.read_json(out / "functions.json")

    # every attempt on all of them
    measured = {}
    for name, attempt in attempts(cfg, dream, coder).items():
        for group in ("planted", "own"):
            path, rows = out / f"{re.sub('[^a-zA-Z]+', '_', name)}_{group}.json", functions[group]
            if not path.exists():
                done = attempt(rows)
                verdicts = passing(
                    [row | {"body": text} for row, (_, text) in zip(rows, done, strict=True)]
                )
                found = [
                    {"kind": row["kind"], "passes": passes, "example": example, "hidden": hidden}
                    for row, (passes, _), (example, hidden) in zip(
                        rows, done, verdicts, strict=True
                    )
                ]
                runs.write(path, found)
            measured.setdefault(group, {})[name] = json.loads(path.read_text())
            print(
                f"{name:30} {group:8} {share(measured[group][name], 50)} % within 50 passes",
                flush=True,
            )

    file = "mending" if cfg.file == "cpu" else cfg.file
    titles = {"planted": "a planted bug", "own": "the model's own failure"}
    plot({titles[group]: found for group, found in measured.items()}, RESULTS / f"{file}.png")
    lines = ["# Functions repaired by their own examples", ""]
    for group, found in measured.items():
        lines += [f"## {len(functions[group]):,} functions with {titles[group]}", ""]
        lines += [*table(found, KINDS if group == "planted" else ["its own"]), ""]
    unseen = ", ".join(f"{kind} {n} of {total}" for kind, (total, n) in functions["seen"].items())
    about = "Of the planted bugs that hidden tests find, the example finds"
    lines += [f"{about}: {unseen}. The others are never repaired."]
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    lines += ["Percent, with 95 % intervals (Wilson).", "", f"`python bench/{command}`"]
    (RESULTS / f"{file}.md").write_text("\n".join(lines) + "\n")
    best, anew = (
        measured["planted"][name] for name in ("repair: tokens, then line", "anew, Dream")
    )
    right = [
        np.mean([row["hidden"] and row["passes"] <= 50 for row in rows]) for rows in (best, anew)
    ]
    name = "repair contest: planted bugs mended within 50 passes / generated anew"
    record(cfg.file, name, right[0] / right[1], "ratio", shares=right)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
