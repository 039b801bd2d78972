"""One set of weights, two modes: what the masked loss costs autoregressive decoding, and what
drafts save.

    python bench/readings.py                       # two hours of an idle machine; goes on where it stopped
    python bench/readings.py --seeds 0 --start=40 --steps=20 --tasks=8 --out=out/try_readings --file=try_readings
    python bench/readings.py --arms=               # measures nothing: the page of what is on file

Each seed trains a Dream from left to right on TinyPython, then goes on from there in several ways
of the same processor
time: from left to right, or in blocks with a causal context, whose masked loss comes with
--ar_weight times the autoregressive one. Measured on each: bits per byte of held-out responses,
read from left to right; and on the first tasks of the split `composed`, greedily, one prompt at a
time: pass@1, forward passes of a text, and tokens that a step of drafts writes. A run is appended
to results/readings.jsonl, from which readings.md and readings.png are written.
"""

import dataclasses
import json
import math
import resource
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from record import RESULTS, claim, cpu_name, judged

import checkpoints
import model_dream as md
import model_pythoncoder
import rows
import runs
import sample_block
import sample_draft

CANVAS = 64  # new tokens of a text, at most
BLOCK = 16
PACKING = "--vocab_size=1024", "--seq_len=256", f"--eos_to={BLOCK}", "--heldout=0.01"
PACE = "--micro_batch=4", "--remat=none", "--optimizer=muon"
BLOCKS = f"--block_length={BLOCK}", "--context=causal", "--block_warmup=100"
ARMS = {  # how training goes on after the start; "ar" gets the processor time of those with blocks
    "start": (),
    "ar": ("--objective=ar",),
    "ar weight 0.3": (*BLOCKS, "--ar_weight=0.3"),
    "ar weight 3.33": (*BLOCKS, "--ar_weight=3.33"),
}
CODER = "weights/pythoncoder"
BY_TOKEN = "token by token"
ABOUT = """\
A Dream learns from left to right (*start*), then goes on for the same processor time: from left to right (*ar*), or
with the masked loss, in blocks of 16 with a causal context, beside *ar weight* times the autoregressive loss. Drafts
give the token-by-token text, so that pass@1 is equal; "passes 0": the pass that verifies also makes the next
drafts; "passes 2" are of an earlier version.

![pass@1 over passes of all rules]({}.png)"""


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)
    arms: str = ", ".join(ARMS)  # ways to go on that are trained, with commas between them
    start: runs.Count = 1500  # steps from left to right
    steps: runs.Count = 330  # of a way with blocks
    tasks: runs.Count = 200  # of the split composed
    out: str = "out/readings"  # folder of data and runs
    file: str = "readings"  # bench/results/<file>.jsonl, .md and .png


def rules(arm):
    """{name: (sampler, settings)}"""
    found = {BY_TOKEN: (sample_draft, {})}
    if arm in ("start", "ar"):
        return found
    for n in (2, 4, 8, 16):
        found |= {
            f"drafts of {n}, passes {s}": (sample_draft, {"draft": n, "draft_steps": s})
            for s in (0, 1)
        }
    found |= {f"blocks, threshold {p}": (sample_block, {"threshold": p}) for p in (0.7, 0.9)}
    return found | {
        f"blocks, entropy bound {h}": (sample_block, {"entropy_bound": h}) for h in (0.1, 0.3, 1.0)
    }


# ---- training ------------------------------------------------------------------------------------------------------


def train(folder, *flags):
    """Train unless it is done; the processor seconds that it took."""
    taken = folder / "seconds"
    if not taken.exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        runs.script("train_dream.py", f"--out={folder}", *flags)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.write_text(str(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return float(taken.read_text())


def trained(cfg, out, seed, arm):
    """(folder, processor seconds after the start, those of the start) of a seed's way to go on."""
    start, folder = out / f"start{seed}", out / f"{arm.replace(' ', '_')}{seed}"
    data, ends = f"--data={out / 'rows'}", "--eval_rows=16"
    first = train(
        start,
        "--model=tiny",
        data,
        ends,
        *PACE,
        "--objective=ar",
        f"--steps={cfg.start}",
        f"--seed={seed}",
    )
    if arm == "start":
        return start, 0.0, first
    steps = cfg.steps
    if arm == "ar":
        names = (arm.replace(" ", "_") for arm in ARMS if arm.startswith("ar weight"))
        paths = [path for name in names if (path := out / f"{name}{seed}/seconds").exists()]
        if not paths:
            raise ValueError(
                "the arm ar takes as long as those with blocks: train one of them first, --arms"
            )
        blocks = [float(path.read_text()) for path in paths]
        steps = round(cfg.start * np.mean(blocks) / first)
    # another seed: other rows
    go_on = f"--init={start}", "--lr=7e-4", f"--steps={steps}", f"--seed={seed + 100}"
    return folder, train(folder, data, ends, *PACE, *go_on, *ARMS[arm]), first


# ---- measuring -----------------------------------------------------------------------------------------------------


@jax.jit
def nats(model, token_BL, segment_BL, position_BL, fixed_BL, bytes_V):
    """(nats, bytes) of the tokens that are no prompt, read from left to right."""
    mask_BL = md.counted(segment_BL, fixed_BL)
    return model.ar_nll(token_BL, mask_BL, segment_BL, position_BL).sum(), (
        mask_BL * bytes_V[token_BL]
    ).sum()


def bits_per_byte(model, folder, count=512):
    """Of the first `count` held-out rows."""
    heldout, tokenizer = rows.held_out(folder)
    bytes_V, sums = rows.token_bytes(tokenizer, model.cfg.vocab), []
    for ids in heldout.padded(min(count, heldout.total), 16):
        sums.append(nats(model, *map(np.asarray, heldout.read(ids[0])), bytes_V))
    total, size = np.sum(sums, 0)
    return float(total / math.log(2) / size)


def decode(sampler, model, rule, prompt, width):
    """(new ids, forward passes, steps)"""
    key = jax.random.key(0)  # draws nothing at temperature 0
    if sampler is model_pythoncoder:
        (new,), stats = sampler.generate(model, [prompt], CANVAS, rule, key)
        return new, stats["forwards"], stats["forwards"]
    (row,), stats = sampler.generate(model, [prompt], CANVAS, rule, key, widths=(width,))
    return row[len(prompt) :], stats["forwards"], stats["steps"]


def measure(model, tokenizer, tasks, chosen):
    """{rule: {"passed", "passes", "passes_2se", "step", "step_2se"}}: a step is the tokens that it
    writes.
    """
    prompts = [tokenizer.encode(task["prompt"], add_special_tokens=False).ids for task in tasks]
    width, found, end = max(map(len, prompts)) + CANVAS, {}, tokenizer.token_to_id("<|endoftext|>")
    special = {"vocab": tokenizer.get_vocab_size()}
    special |= {"eos": end} if chosen[BY_TOKEN][0] is model_pythoncoder else {"eos_ids": (end,)}
    for name, (sampler, settings) in chosen.items():
        rule = sampler.Sampling(**{"temperature": 0.0} | special | settings)
        found_by = [decode(sampler, model, rule, prompt, width) for prompt in prompts]
        texts, passes, steps = zip(*found_by, strict=True)
        texts = [text[: [*text, end].index(end)] for text in texts]
        programs = [
            task["prompt"] + tokenizer.decode(text) for task, text in zip(tasks, texts, strict=True)
        ]
        passed = [
            result.rate == 1 for result in judged(programs, [task["test_cases"] for task in tasks])
        ]
        # after the first token, which comes with the prompt; the end counts as one
        step = [
            min(len(text), CANVAS - 1) / max(n - 1, 1) for text, n in zip(texts, steps, strict=True)
        ]
        found[name] = {"passed": int(sum(passed))}
        for key, x_N in (("passes", passes), ("step", step)):
            found[name] |= {
                key: float(np.mean(x_N)),
                f"{key}_2se": float(2 * np.std(x_N, ddof=1) / len(x_N) ** 0.5),
            }
        print(
            f"{name:30} {sum(passed)} of {len(passed)} pass | {np.mean(passes):.2f} passes",
            flush=True,
        )
    return found


# ---- what came out -------------------------------------------------------------------------------------------------


def table(found, tasks):
    """Lines of Markdown: the seeds side by side in each cell."""

    def side_by_side(some, form):
        return ", ".join(format(x, form) for x in some)

    yield "| way | processor s after the start | bits per byte, from left to right | pass@1, token by token |"
    yield "|---" * 4 + "|"
    by_arm = {
        arm: [row for row in found if row["arm"] == arm]
        for arm in dict.fromkeys(row["arm"] for row in found)
    }
    for arm, mine in by_arm.items():
        cells = (
            # its card says
            side_by_side((row["processor_s"] for row in mine if row["arm"] != CODER), ",.0f"),
            side_by_side((row["bits_per_byte"] for row in mine if row["bits_per_byte"]), ".4f"),
        )
        rates = side_by_side(
            (100 * row["rules"][BY_TOKEN]["passed"] / tasks for row in mine), ".1f"
        )
        yield f"| {arm} | {cells[0]} | {cells[1] or 'not compared'} | {rates} |"
    for arm, mine in by_arm.items():
        yield from (
            "",
            f"**{arm}**",
            "",
            "| rule | pass@1 | passes of a text | tokens a step |",
            "|---" * 4 + "|",
        )
        for name in mine[0]["rules"]:
            # earlier rows have more of them
            of_rule = [row["rules"][name] for row in mine if name in row["rules"]]
            rates = side_by_side((100 * x["passed"] / tasks for x in of_rule), ".1f")
            cells = [side_by_side((x[key] for x in of_rule), ".2f") for key in ("passes", "step")]
            yield f"| {name} | {rates} | {cells[0]} | {cells[1] if 'blocks' not in name else ''} |"


def plot(found, tasks, path):
    """pass@1 over passes: a mark for each rule, and a colour for each way."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5))
    marks = {
        "token by token": "o",
        "drafts": "D",
        "blocks, threshold": "^",
        "blocks, entropy bound": "s",
        "its drafts": "D",
    }
    for number, arm in enumerate(dict.fromkeys(row["arm"] for row in found)):
        mine = [row["rules"] for row in found if row["arm"] == arm]
        for kind, mark in marks.items():
            names = [
                name
                for name in mine[0]
                if name.startswith(kind) and all(name in rules for rules in mine)
            ]
            x = [np.mean([rules[name]["passes"] for rules in mine]) for name in names]
            y_NS = np.array([[rules[name]["passed"] / tasks for rules in mine] for name in names])
            if names:
                style = {
                    "fmt": mark,
                    "ms": 6,
                    "color": f"C{number}",
                    "capsize": 2,
                    "elinewidth": 0.6,
                    "alpha": 0.8,
                }
                spread = [y_NS.mean(1) - y_NS.min(1), y_NS.max(1) - y_NS.mean(1)]
                axis.errorbar(x, y_NS.mean(1), spread, label=f"{arm}: {kind}", **style)
    axis.set(
        xlabel="forward passes of a text, mean",
        ylabel="pass@1, mean and range of the seeds",
        xlim=(10, None),
    )
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(cfg):
    checkpoints.keep_compiled("~/.cache/unmask")
    out, path = Path(cfg.out), RESULTS / f"{cfg.file}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    arms = [arm.strip() for arm in cfg.arms.split(",") if arm.strip()]
    if unknown := set(arms) - set(ARMS):
        raise ValueError(f"--arms: {', '.join(sorted(unknown))} is none of {', '.join(ARMS)}")

    def known(seed, arm):
        return any((row["seed"], row["arm"]) == (seed, arm) for row in found)

    def add(row, rules):
        found.append(row | made | {"rules": rules, "cpu": cpu_name()})
        path.write_text("".join(json.dumps(row) + "\n" for row in found))

    claim(out, {"start": cfg.start, "steps": cfg.steps})
    arms.sort(key=lambda arm: arm == "ar")
    made = {"tasks": cfg.tasks, "start": cfg.start, "steps": cfg.steps}
    for row in found:  # the rows on file are older than two of these
        if {name: row.get(name, getattr(Config, name)) for name in made} != made:
            raise ValueError(
                f"{path} has rows of other --tasks, --start or --steps: say those, or another --file"
            )
    todo = [(seed, arm) for seed in cfg.seeds for arm in arms if not known(seed, arm)]
    if not todo:
        print(f"nothing to measure: all of it is in {path}; another --out and --file measure anew")
    else:
        runs.script("tinypython.py", "--n=200000", f"--out={out / 'world'}")
        if not (out / "rows/meta.json").exists():
            runs.script(
                "data_prep.py",
                "pairs",
                str(out / "world/pairs.jsonl"),
                f"--out={out / 'rows'}",
                *PACKING,
            )
        tasks = [
            json.loads(line) for line in (out / "world/composed.jsonl").read_text().splitlines()
        ][: cfg.tasks]
    for seed, arm in todo:
        folder, seconds, first = trained(cfg, out, seed, arm)
        model, _ = checkpoints.load(md, folder, dtype="float32")
        row = {"seed": seed, "arm": arm, "start_s": first, "processor_s": seconds}
        row["bits_per_byte"] = bits_per_byte(model, folder)
        print(row, flush=True)
        add(row, measure(model, runs.read_tokenizer(folder), tasks, rules(arm)))
    if todo and not known(0, CODER):
        model, _ = checkpoints.load(model_pythoncoder, ROOT / CODER, dtype="float32")
        chosen = {
            BY_TOKEN: (model_pythoncoder, {"speculate": False}),
            "its drafts": (model_pythoncoder, {}),
        }
        row = {"seed": 0, "arm": CODER, "start_s": 0, "processor_s": None, "bits_per_byte": None}
        add(row, measure(model, runs.read_tokenizer(ROOT / CODER), tasks, chosen))

    if not found:
        raise ValueError(f"{path} has no rows; measure some with --seeds and --arms")
    found.sort(key=lambda row: ([*ARMS, CODER].index(row["arm"]), row["seed"]))
    plot(found, cfg.tasks, RESULTS / f"{cfg.file}.png")
    about = ABOUT.format(cfg.file).splitlines()
    lines = ["# One set of weights, two modes", "", *about, "", *table(found, cfg.tasks), ""]
    lines += [
        f"The seeds side by side; {cfg.tasks} tasks of the split composed, at most {CANVAS} tokens, greedy."
    ]
    cpus = ", ".join(dict.fromkeys(row["cpu"] for row in found))
    lines += [f"{cpus}. `python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
    (RESULTS / f"{cfg.file}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
