"""How far from the least: the fewest passes in which any order of parallel writes gives a Dream's
text, on TinyPython.

    python bench/least.py    # twenty minutes of an idle core; goes on where it stopped
    python bench/least.py --tasks=8 --out=out/try_least --file=try_least    # a first look

The text of a task is what weights/dream generates token by token, at temperature 0: one token a
pass, the most confident first. A pass may write any of the masks whose argmax is the text's token.
The search tries all subsets in all orders (breadth first over sets of written tokens), so that no
rule, whatever it knows, needs fewer passes. Tasks have one operation, and those are taken whose
text is short enough. EOS and what follows it count as one token, right if all of it is EOS.

A rule that does not know the text writes other texts: its error is the share of tasks whose text
differs. An error is granted to the search, too: the tasks that need most passes are given up, in
one pass. Writes least.md and least.png.
"""

import dataclasses
import functools
import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from record import RESULTS, claim, record

import checkpoints
import model_dream
import runs
import sample_dream


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/least"  # folder of tasks and passes; what is in there is not done again
    dream: str = "weights/dream"  # a Dream that fills the whole canvas
    masks: int = 64
    units: int = 11  # tokens of a text, EOS with it: 2,048 sets at most
    tasks: int = 150
    # bench/results/<file>.json; least.md and .png belong to "cpu", else <file>.md and .png
    file: str = "cpu"


BATCH = 64  # canvases of a pass of the search


def rules(masks):
    """{name: settings} of the samplers that are compared."""
    found = {f"threshold {p}": {"threshold": p} for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)}
    found |= {f"entropy bound {h}": {"entropy_bound": h} for h in (0.03, 0.1, 0.3, 1.0, 2.0)}
    return found | {
        f"schedule, {n} a pass": {"schedule": "even", "steps": -(-masks // n)}
        for n in (2, 4, 8, 16)
    }


@functools.partial(jax.jit, static_argnames=("graph", "masks"))
def likeliest(params, token_BL, see_BL, *, graph, masks):
    """The argmax of the last `masks` slots [B, C] of canvases; MASK is never one."""
    model = nnx.merge(graph, params)
    hidden_BLD, _ = model.hidden(token_BL, see_BM=see_BL)
    # the token at p comes from the hidden state at p - 1
    logits_BCV = model.logits(hidden_BLD[:, -masks - 1 : -1])
    return logits_BCV.at[..., model.cfg.mask_id].set(-jnp.inf).argmax(-1)


def fewest(right_of, units):
    """The fewest passes that write `units` tokens right, in any order, by breadth-first search over
    sets of them.

    right_of(sets that are written, as bits) gives for each the set that the next pass predicts
    right, of which any part may be written. What is written wrong stays wrong. 0 if no order writes
    all.
    """
    whole, frontier, seen = (1 << units) - 1, [0], {0}
    for passes in range(1, units + 1):
        following = set()
        for i in range(0, len(frontier), BATCH):
            part = frontier[i : i + BATCH]
            for state, right in zip(part, right_of(part), strict=True):
                if state | right == whole:
                    return passes
                free = subset = right & ~state
                while subset:
                    following.add(state | subset)
                    subset = (subset - 1) & free
        # those nearest to the end first
        frontier = sorted(following - seen, key=int.bit_count, reverse=True)
        seen |= following
    return 0


def measure(cfg, out, tasks):
    """{"least": passes of each task, "length": tokens, rule: {"passes", "same"}}"""
    path = out / "measured.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    model, _ = checkpoints.load(model_dream, cfg.dream)
    tokenizer, (graph, params), end = (
        runs.read_tokenizer(cfg.dream),
        nnx.split(model),
        model.cfg.eos_id,
    )
    prompts = [tokenizer.encode(task["prompt"]).ids for task in tasks]
    width = sample_dream.canvas_width(max(map(len, prompts)) + cfg.masks, 1 << 30)

    def texts(prompts, **settings):
        rule = sample_dream.Sampling(vocab=tokenizer.get_vocab_size(), eos_ids=(end,), **settings)
        how = {"key": jax.random.key(0), "widths": (width,), "rows": BATCH}
        rows, stats = sample_dream.generate(model, prompts, cfg.masks, rule, **how)
        rows = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        return [row[: [*row, end].index(end)] for row in rows], stats["passes"].tolist()

    if "chosen" not in found:
        new, _ = texts(prompts, schedule="even")
        chosen = [i for i, ids in enumerate(new) if len(ids) < cfg.units][: cfg.tasks]
        found = {"chosen": chosen, "texts": [new[i] for i in chosen], "least": []}
    prompts = [prompts[i] for i in found["chosen"]]

    for prompt, text in [*zip(prompts, found["texts"], strict=True)][len(found["least"]) :]:
        target, bits = np.array([*text, *[end] * (cfg.masks - len(text))]), np.arange(len(text) + 1)

        def right_of(states, prompt=prompt, target=target, bits=bits):
            written = (np.array(states)[:, None] >> bits & 1).astype(bool)
            written = np.concatenate(
                [written[:, :-1], np.repeat(written[:, -1:], cfg.masks - len(bits) + 1, 1)], 1
            )
            rows = [[*prompt, *row] for row in np.where(written, target, model.cfg.mask_id)]
            token_BL, see_BL = sample_dream.canvas(
                rows + rows[-1:] * (BATCH - len(rows)), 0, model.cfg, width
            )
            new_BC = np.asarray(likeliest(params, token_BL, see_BL, graph=graph, masks=cfg.masks))[
                : len(rows)
            ]
            right = new_BC == target
            right = np.concatenate(
                [right[:, : len(bits) - 1], right[:, len(bits) - 1 :].all(1, keepdims=True)], 1
            )
            return (right << bits).sum(1).tolist()

        found["least"].append(fewest(right_of, len(bits)))
        if len(found["least"]) % 10 == 0:
            print(
                f"{len(found['least'])} of {len(prompts)} texts: {np.mean(found['least']):.2f} passes",
                flush=True,
            )
            path.write_text(json.dumps(found))
    reached = [i for i, passes in enumerate(found["least"]) if passes]
    found |= {key: [found[key][i] for i in reached] for key in ("chosen", "texts", "least")}
    prompts = [prompts[i] for i in reached]
    for name, settings in rules(cfg.masks).items():
        new, passes = texts(prompts, **settings)
        same = [text == other for text, other in zip(new, found["texts"], strict=True)]
        found[name] = {"passes": passes, "same": same}
    path.write_text(json.dumps(found))
    return found


def granted(passes, error):
    """Mean passes if the share `error` of the texts, those with most passes, is given up in a
    single pass.
    """
    passes = np.sort(passes)
    kept = len(passes) - int(error * len(passes))
    return float(np.mean([*passes[:kept], *[1] * (len(passes) - kept)]))


def main(cfg):
    checkpoints.keep_compiled("~/.cache/unmask")
    out = Path(cfg.out)
    claim(out, {name: value for name, value in vars(cfg).items() if name not in ("out", "file")})
    settings = "--n=20000", f"--tasks={5 * cfg.tasks}", "--levels", "1", f"--out={out / 'world'}"
    runs.script("tinypython.py", *settings, "--splits=constants", "--formats=pairs")
    tasks = [json.loads(line) for line in (out / "world/constants.jsonl").read_text().splitlines()]
    found = measure(cfg, out, tasks)

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = [len(text) + 1 for text in found["texts"]]
    least, n = (
        {error: granted(found["least"], error) for error in (0, 0.01, 0.05, 0.1)},
        len(lengths),
    )
    lines = [
        "| weights/dream, one operation | passes | texts unlike token by token, % |",
        "|---|---|---|",
    ]
    lines.append(f"| token by token | {np.mean(lengths):.2f} | 0 |")
    lines += [
        f"| the least, by exact search | {passes:.2f} | {100 * error:.0f} |"
        for error, passes in least.items()
    ]
    figure, axis = plt.subplots(figsize=(8, 4.5))
    axis.plot([*least.values()], [*least], "k-o", ms=4, label="the least")
    for number, kind in enumerate(("threshold", "entropy bound", "schedule")):
        points = []
        for name in (name for name in rules(cfg.masks) if name.startswith(kind)):
            passes, error = np.mean(found[name]["passes"]), 1 - np.mean(found[name]["same"])
            points.append((passes, error))
            lines.append(f"| {name} | {passes:.2f} | {100 * error:.1f} |")
        axis.plot(*zip(*sorted(points), strict=True), "-o", ms=4, color=f"C{number}", label=kind)
    axis.set(
        xscale="log",
        xlabel="forward passes of a text",
        ylabel="share of texts that differ from token by token",
    )
    axis.set_xticks(ticks := [1, 2, 3, 5, 10, 20, 50], ticks)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    name = "least" if cfg.file == "cpu" else cfg.file
    figure.savefig(RESULTS / f"{name}.png", dpi=120)
    counts = ", ".join(
        f"{passes}: {found['least'].count(passes)}" for passes in sorted({*found["least"]})
    )
    about = f"{n} texts of {min(lengths)} to {max(lengths)} tokens with EOS, by fewest passes (passes: texts)"
    lines += ["", f"{about}: {counts}."]
    lines += ["", f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    exact = [rule for rule in rules(cfg.masks) if np.mean(found[rule]["same"]) >= 0.95]
    best = min(
        ((float(np.mean(found[rule]["passes"])), rule) for rule in exact), default=(0.0, "none")
    )
    what = "least passes: fastest rule with at most 5 % other texts / exact search with 5 %"
    more = {"rule": best[1], "least": least, "token_by_token": float(np.mean(lengths))}
    record(cfg.file, what, best[0] / least[0.05], "ratio", **more)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
