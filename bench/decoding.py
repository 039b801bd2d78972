"""Decoding contest: programs that pass against passes of the model, by every rule, on small Python tasks.

    python bench/decoding.py    # half an hour of an idle core; goes on where it stopped
    python bench/decoding.py --steps 9 5 9 --tasks=4 --draws=1 --out=out/try --file=try    # a first look, minutes

The tasks are those of coupled_grpo.py's demo, a function's head and docstring and three tests. An answer is written in
one of --ways: `return` alone, or with a name for the result, one of five, that stands in two places. So tokens depend
on each other, and a rule that fills too many at once mixes two answers. In one way only (--ways=1) they do not, and a
threshold fills most canvases in one pass.

Trains a tiny Dream, one of blocks and a PythonCoder on right answers for about as many processor seconds, and
completes heads that are not among them, one prompt at a time, at the temperature and top-p of generate.py's Dream. Work
is counted twice: passes of the model, and slots that go through it, in canvases. The rules of one model are compared on
the same tasks: a difference and its two standard errors are over tasks. Dream's schedule writes no token in its first
pass and two in its last, "1 a pass" too (diffusion.step_counts). Writes decoding.md, decoding.png and an entry of
cpu.json under bench/results/.
"""

import dataclasses
import json
import random
import resource
import shlex
import shutil
import sys
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from record import RESULTS, record

import checkpoints
import data_prep
import generate
import model_dream
import model_pythoncoder
import rl_tasks
import runs
import sample_block
import sample_dream
import sandbox
import train_dream
import train_tpu

NAMES = "result", "value", "out", "answer", "found"  # of what is returned, in the second way and those after it


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/decoding"  # folder of data, runs and verdicts; what is in there is not done again
    models: tuple[typing.Literal["dream", "blocks", "coder"], ...] = ("dream", "blocks", "coder")  # whose rules
    # optimizer steps of the Dream, that of blocks and PythonCoder, of 16 rows of 128 tokens; each model for about as
    # many processor seconds, which are recorded
    steps: tuple[int, int, int] = (700, 350, 600)
    ways: int = 6  # ways in which answers are written, up to 6
    canvas: int = 24  # tokens to fill: an answer has 6 to 19, EOS stands behind it
    block_length: int = 8  # of the Dream of blocks, and of the rules with blocks
    tasks: int = 192  # held-out tasks
    draws: int = 2  # completions of each task by each rule
    margin: float = 0.05  # a rule is as good as the threshold 0.9 if it is shown to pass less by no more than this
    file: str = "cpu"  # bench/results/<file>.json; decoding.md and .png belong to "cpu", else <file>.md and .png
    seed: int = 0  # of training and draws


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
    found |= {f"exact block cache, entropy bound {h}": ("blocks", {"entropy_bound": h}) for h in (0.1, 0.3, 1.0)}
    found["PythonCoder"] = "coder", {"speculate": False}
    return found | {"PythonCoder, its own drafts": ("coder", {"speculate": True})}


# ---- three models --------------------------------------------------------------------------------------------------


def prepare(cfg, out, tasks):
    """The answers as pairs, and as texts for PythonCoder, which takes no pairs and learns the heads too."""
    out.mkdir(parents=True, exist_ok=True)
    rng, pairs = random.Random(cfg.seed), []
    for task in tasks * 20:
        way = rng.randrange(cfg.ways)
        answer = f"return {task['right']}"
        if way:
            answer = f"{NAMES[way - 1]} = {task['right']}\n    return {NAMES[way - 1]}"
        pairs.append({"prompt": head_of(task), "response": f"    {answer}\n"})
    (out / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (out / "texts.txt").write_text("<|endoftext|>".join(pair["prompt"] + pair["response"] for pair in pairs))
    here = {"seq_len": 128, "workers": 1}
    source, rows = str(out / "pairs.jsonl"), str(out / "pairs")
    data_prep.main(data_prep.Pairs(source=source, out=rows, eos_to=cfg.canvas, vocab_size=512, **here))
    tokenizer = str(out / "pairs/tokenizer.json")
    source, rows = str(out / "texts.txt"), str(out / "texts")
    data_prep.main(data_prep.Text(source=source, out=rows, tokenizer=tokenizer, rows="packed", **here))


def train(cfg, out, tasks):
    """Train the models: the processor seconds of each training, compiling included."""
    blocks = train_dream.Blocks(block_length=cfg.block_length)
    settings = {"dream": (train_dream, "pairs", {}), "blocks": (train_dream, "pairs", {"blocks": blocks})}
    settings |= {"coder": (train_tpu, "texts", {})}
    seconds = {}
    for (name, (trainer, data, flags)), steps in zip(settings.items(), cfg.steps, strict=True):
        if name not in cfg.models:
            continue
        done = out / name / "seconds"
        if done.exists():
            seconds[name] = float(done.read_text())
            continue
        shutil.rmtree(out / name, ignore_errors=True)
        before = resource.getrusage(resource.RUSAGE_SELF)
        trainer.main(
            trainer.Config(
                model="tiny", data=str(out / data), out=str(out / name), seq_len=128, batch_size=16, micro_batch=16,
                remat="none", steps=steps, eval_every=steps, log_every=50, prompt=head_of(tasks[0]), seed=cfg.seed,
                **flags,
            )
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds[name] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        done.write_text(str(seconds[name]))
    return seconds


def head_of(task):
    """A task's prompt up to the line behind its docstring: no token reaches over that."""
    return task["prompt"].removesuffix("    return ")


# ---- the rules -----------------------------------------------------------------------------------------------------


def decode(cfg, kind, model, rule, ids, width, key):
    """Complete a prompt: (ids, passes, slots that went through the model)."""
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
    """{rule: {"pass", "passes", "slots"}}, arrays [task, draw]."""
    tokenizer, verdicts, path = runs.read_tokenizer(out / "pairs"), {}, out / "measured.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    families = {"dream": model_dream, "blocks": model_dream, "coder": model_pythoncoder}
    models = {name: checkpoints.load(families[name], out / name)[0] for name in cfg.models}
    make = {"dream": sample_dream.Sampling, "blocks": sample_block.Sampling, "coder": model_pythoncoder.Sampling}
    common = {name: generate.DEFAULTS["dream"][name] for name in ("temperature", "top_p")}
    end, prompts = tokenizer.token_to_id("<|endoftext|>"), [tokenizer.encode(head_of(task)).ids for task in tasks]
    width = sample_dream.canvas_width(max(map(len, prompts)) + cfg.canvas, 1 << 30)
    for name, (kind, settings) in rules(cfg).items():
        if kind not in cfg.models:
            continue
        special = {"vocab": tokenizer.get_vocab_size(), "eos": end} if kind == "coder" else {"eos_ids": (end,)}
        special |= {} if kind == "coder" else {"vocab": tokenizer.token_to_id("<|mask|>")}
        rule, one = make[kind](**common | special | settings), found.setdefault(name, [])
        for draw in range(len(one), cfg.draws):
            results, programs = [], []
            for number, ids in enumerate(prompts):
                key = jax.random.fold_in(jax.random.key(cfg.seed), draw * len(tasks) + number)
                new, passes, slots = decode(cfg, kind, models[kind], rule, ids, width, key)
                results.append({"passes": passes, "slots": slots / width})
                programs.append((head_of(tasks[number]) + tokenizer.decode(new), tuple(tasks[number]["test_cases"])))
            # Rules often write the same: a program runs once.
            fresh = [program for program in dict.fromkeys(programs) if program not in verdicts]
            ran = sandbox.run_tests([text for text, _ in fresh], [list(tests) for _, tests in fresh])
            verdicts |= {program: result.rate == 1 for program, result in zip(fresh, ran, strict=True)}
            passed = [result | {"pass": verdicts[text]} for result, text in zip(results, programs, strict=True)]
            one.append({key: [result[key] for result in passed] for key in ("pass", "passes", "slots")})
            path.write_text(json.dumps(found))
        means = (np.mean([draw[key] for draw in one]) for key in ("pass", "passes"))
        print("{:40} pass@1 {:.3f} | {:.2f} passes".format(name, *means), flush=True)
    of_rule = lambda draws, key: np.array([draw[key] for draw in draws]).T  # noqa: E731
    return {name: {key: of_rule(one, key) for key in one[0]} for name, one in found.items()}


# ---- what came out -------------------------------------------------------------------------------------------------


def mean_2se(x_N):
    """Mean, and two standard errors of it."""
    return float(np.mean(x_N)), float(2 * np.std(x_N, ddof=1) / len(x_N) ** 0.5)


def compare(found, base):
    """{rule: its numbers}, against those of the rule `base` on the same tasks."""
    rows = {}
    for name, one in found.items():
        row = dict(zip(("pass", "pass_2se"), mean_2se(one["pass"].mean(-1)), strict=True))
        row |= {"passes": float(one["passes"].mean()), "slots": float(one["slots"].mean())}
        row["p10_p90"] = np.quantile(one["passes"], [0.1, 0.9]).tolist()
        row["fewer"] = float(found[base]["passes"].mean() / one["passes"].mean())
        less = one["pass"].mean(-1) - found[base]["pass"].mean(-1)
        row |= dict(zip(("difference", "difference_2se"), mean_2se(less), strict=True))
        rows[name] = row
    return rows


def table(rows):
    yield "| rule | pass@1 | passes (p10, p90) | canvases fed | times fewer than threshold 0.9 | pass@1 less its |"
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
    kinds = "schedule", "threshold", "entropy bound", "dual cache", "exact block cache", "PythonCoder"
    for number, kind in enumerate(kinds):
        mine = sorted(
            (one["passes"], one["pass"], one["pass_2se"]) for name, one in rows.items() if name.startswith(kind)
        )
        style = {"marker": "o", "ms": 4, "lw": 1, "capsize": 2, "elinewidth": 0.6, "color": f"C{number}"}
        if mine:
            axis.errorbar(*zip(*mine, strict=True), label=kind, **style)
    axis.set(xscale="log", xlabel="passes of the model for a text", ylabel="pass@1, two standard errors over tasks")
    axis.set_xticks(ticks := [1, 2, 3, 5, 10, 20, 30], ticks)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(cfg):
    if not 1 <= cfg.ways <= 1 + len(NAMES) or cfg.tasks < 2 or cfg.draws < 1 or "dream" not in cfg.models:
        raise ValueError(f"--ways is 1 to {1 + len(NAMES)}, --tasks at least 2, --draws at least 1, --models has dream")
    checkpoints.keep_compiled("~/.cache/unmask")
    out, everything = Path(cfg.out), rl_tasks.make_tasks(0)
    if not (out / "texts/meta.json").exists():
        prepare(cfg, out, everything[cfg.tasks :])
    seconds = train(cfg, out, everything[cfg.tasks :])
    found, base = measure(cfg, out, everything[: cfg.tasks]), "threshold 0.9"
    rows = compare(found, base)

    # The fewest passes of a Dream's rule that is shown to be as good, two standard errors below the difference too.
    equal = {name: row for name, row in rows.items() if row["difference"] - row["difference_2se"] >= -cfg.margin}
    best = max((name for name in equal if "PythonCoder" not in name), key=lambda name: equal[name]["fewer"])
    rng, n = np.random.default_rng(0), cfg.tasks
    draws = [rng.integers(0, n, n) for _ in range(1000)]
    ratios = [found[base]["passes"][i].mean() / found[best]["passes"][i].mean() for i in draws]
    name = "decoding" if cfg.file == "cpu" else cfg.file
    plot(rows, RESULTS / f"{name}.png")
    where = "temperature {temperature}, top-p {top_p}".format(**generate.DEFAULTS["dream"])
    spent = ", ".join(f"{key} {value:.0f}" for key, value in seconds.items())
    lines = [*table(rows), ""]
    lines.append(f"{cfg.tasks} held-out tasks, {cfg.draws} draws of each, {where}; ± two standard errors over tasks.")
    lines.append(f"Processor seconds of the trainings, compiling included: {spent}, in {cfg.steps} steps.")
    lines += ["", f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
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
        draws=cfg.draws,
        margin=cfg.margin,
        ways=cfg.ways,
        train={"steps": cfg.steps, "processor_seconds": seconds},
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
