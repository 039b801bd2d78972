"""Holes of unknown length, and text that stays Python: what infill.py makes of held-out functions.

    python bench/holes.py                                       # three hours of one core
    python bench/holes.py --steps 60 60 --holes=8 --out=out/try --file=try    # a first look

Trains a tiny Dream on this Python's standard library from left to right, and then to fill holes in its functions, and
to say how long they are: pairs of prompt and response with a suffix, --edit_rate=0.5. Then it fills holes in functions
of held-out files. One statement of a line, or two lines and more of one block, make room for masks: as many as they
had, 4, 16 or 64; as many as the model finds likeliest; or as many as become of 4, 16 or 64 that grow and shrink, which
are then filled anew. Each hole is filled by sample_dream.py, without and with --valid=python, at temperature 0. No EOS
is written where the length is right or found; of 4, 16 and 64 masks it ends the hole. Counted are holes that are filled
with what was there, how similar they are to it (2 x what matches / both lengths, of characters, by difflib), functions
that parse, passes of the model over a canvas, and seconds, compiling in none. Writes holes.md under bench/results/.
"""

import ast
import dataclasses
import difflib
import json
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from record import RESULTS, cpu_name

import checkpoints
import infill
import model_dream
import runs
import sample_dream
from rows import Rows


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/holes"  # folder of data, runs and what was measured; what is in there is not done again
    steps: tuple[int, int] = (2400, 8000)  # optimizer steps from left to right, and then on holes
    draws: int = 16  # holes of each training function
    holes: int = 200  # held-out holes, half of them statements, half of them blocks
    context: int = 216  # tokens of a function at most; the model was trained on 256
    longest: int = 48  # tokens of a hole at most
    file: str = "holes"  # bench/results/<file>.md
    seed: int = 0  # of training and of what makes room


def prepare(cfg):
    """Data and the trained model, in folders of cfg.out."""
    out = Path(cfg.out)

    def script(name, *flags):
        subprocess.run([sys.executable, str(ROOT / name), *map(str, flags)], check=True)

    if not (out / "data/meta.json").exists():
        flags = "--vocab_size=2048", "--seq_len=256", "--heldout=0.04"
        script("data_prep.py", "python", f"--out={out / 'data'}", *flags)
    if not (out / "holes/meta.json").exists():
        holes = draw_holes(cfg, "train", cfg.draws)
        lines = [json.dumps(dict(zip(("prompt", "response", "suffix"), texts, strict=True))) for _, *texts in holes]
        (out / "holes.jsonl").write_text("\n".join(lines))
        flags = f"--tokenizer={out / 'data/tokenizer.json'}", "--seq_len=256", "--heldout=0.02", "--edit_rate=0.5"
        script("data_prep.py", "pairs", out / "holes.jsonl", f"--out={out / 'holes'}", *flags)
    common = "--seq_len=256", "--batch_size=16", "--micro_batch=4", f"--seed={cfg.seed}"
    causal, fill = cfg.steps
    parts = {"causal": (causal, f"--data={out / 'data'}", "--objective=ar")}
    parts["fill"] = fill, f"--data={out / 'holes'}", f"--init={out / 'causal'}", f"--anneal_steps={fill // 8}"
    parts["fill"] += ("--lr=1e-3",)
    for name, (steps, *flags) in parts.items():
        if not (out / name / "done").exists():
            subprocess.run(["rm", "-rf", str(out / name)], check=True)
            flags += ["--optimizer=muon", f"--steps={steps}", f"--eval_every={steps}"]
            script("train_dream.py", f"--out={out / name}", *common, *flags)
            (out / name / "done").touch()


# ---- holes -----------------------------------------------------------------------------------------------------------


def functions(text):
    """Complete functions in a piece of a file, methods too, from the left margin on."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not line.lstrip().startswith("def "):
            continue
        margin = len(line) - len(line.lstrip())
        inside = lambda line, margin=margin: not line.strip() or line.startswith(" " * (margin + 1))  # noqa: E731
        end = next((j for j in range(i + 1, len(lines)) if not inside(lines[j])), None)
        if end:  # else the piece may end within
            found = textwrap.dedent("\n".join(lines[i:end]).rstrip() + "\n")
            if infill.parses(found):
                yield found


def spans(function):
    """(kind, first character, one past the last) of what may make room in a function: "statement" or "block"."""
    starts = [0, *np.cumsum([len(line) for line in function.splitlines(keepends=True)])]
    for node in ast.walk(ast.parse(function).body[0]):
        for body in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            for i, first in enumerate(body if isinstance(body, list) else []):
                begin = starts[first.lineno - 1] + first.col_offset
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    continue  # a docstring
                for last in body[i:]:
                    lines = last.end_lineno - first.lineno + 1
                    if lines <= 4:
                        end = starts[last.end_lineno - 1] + last.end_col_offset
                        yield "statement" if lines == 1 else "block", begin, end


def draw_holes(cfg, split, draws):
    """[(kind, text before, hole, text behind)] of a split: that many of each function, of both kinds in turn."""
    rows, tokenizer = Rows(f"{cfg.out}/data", split), runs.read_tokenizer(Path(cfg.out) / "data")
    rng, found = np.random.default_rng(cfg.seed), {"statement": [], "block": []}
    ids_BL, segment_BL = rows.read(np.arange(rows.total))[:2]
    pieces = [ids_L[segment_L == s] for ids_L, segment_L in zip(ids_BL, segment_BL, strict=True) for s in {*segment_L}]
    texts = [tokenizer.decode(piece.tolist()) for piece in pieces]
    for function in dict.fromkeys(function for text in texts for function in functions(text)):
        everywhere = [*spans(function)] if function.isascii() else []  # ast counts bytes
        for _ in range(draws):
            kind = min(found, key=lambda kind: len(found[kind]))
            places = [place for place in everywhere if place[0] == kind]
            if places:
                _, begin, end = places[rng.integers(len(places))]
                begin -= function[begin - 1] == " "  # words bring their own, as in generate.py
                texts = function[:begin], function[begin:end], function[end:]
                sizes = [len(tokenizer.encode(text).ids) for text in texts]
                if sizes[1] <= cfg.longest and sum(sizes) <= cfg.context:
                    found[kind].append((kind, *texts))
    return found["statement"] + found["block"]


def find_holes(cfg):
    """[(kind, ids before, ids of the hole, ids behind)] that are measured: one of a held-out function at most."""
    tokenizer = runs.read_tokenizer(Path(cfg.out) / "data")
    found = [(kind, *(tokenizer.encode(text).ids for text in texts)) for kind, *texts in draw_holes(cfg, "heldout", 1)]
    parts = [[hole for hole in found if hole[0] == kind] for kind in ("statement", "block")]
    if min(map(len, parts)) < cfg.holes // 2:
        raise ValueError(f"the held-out files have {' and '.join(str(len(part)) for part in parts)} holes of a kind")
    return [hole for part in parts for hole in part[: cfg.holes // 2]]


# ---- what fills them -------------------------------------------------------------------------------------------------


def fill_holes(cfg, masks, valid):
    """[{"kind", "exact", "similar", "parses", "passes", "masks", "filling", "mending", "length"}]; -ing in seconds."""
    model, _ = checkpoints.load(model_dream, Path(cfg.out) / "fill")
    tokenizer, clock = runs.read_tokenizer(Path(cfg.out) / "fill"), {"compile": 0.0}

    def on_event(name, seconds, **_):
        clock["compile"] += seconds if name.startswith("/jax/core/compile/") else 0

    jax.monitoring.register_event_duration_secs_listener(on_event)
    rule = sample_dream.Sampling(vocab=tokenizer.get_vocab_size())
    passes, mask, rows = 0, model.cfg.mask_id, []
    never = mask, model.cfg.expand_id, model.cfg.eos_id
    now = lambda: time.perf_counter() - clock["compile"]  # noqa: E731

    def write(canvases):
        nonlocal passes
        # In a hole whose length is known no text ends; in another one it may, and what follows is left out.
        known = masks not in (4, 16, 64)
        settings = canvases, 0, dataclasses.replace(rule, ban_ids=never) if known else rule, jax.random.key(0)
        filled, stats = sample_dream.generate(model, *settings, rows=min(8, len(canvases)))
        passes += int(np.sum(stats["passes"]))
        return filled

    for kind, before, hole, behind in find_holes(cfg):
        read, passes, started = infill.Reader(model, tokenizer), 0, now()
        n = {"as many": len(hole)}.get(masks, masks)
        if masks == "likeliest":
            n = infill.hole_length(read, before, behind, write, valid)
        elif "from" in str(masks):
            by_probability = dataclasses.replace(rule, alg="maskgit_plus")
            n = len(infill.grow(read, before, behind, by_probability, size=int(masks[5:])))
        canvas = [*before, *[mask] * n, *behind]
        (ids,) = write([canvas])
        filled = now()
        if valid:
            ids, _ = infill.mend(read, canvas, ids)
        seconds = {"filling": filled - started, "mending": now() - filled}
        first, text, last = (tokenizer.decode(part) for part in (before, ids[len(before) : len(before) + n], behind))
        right = infill.parses(first + text + last) and not infill.swallows(first, text, last)
        text, wanted = text.strip(), tokenizer.decode(hole).strip()
        similar = difflib.SequenceMatcher(None, text, wanted, autojunk=False).ratio()
        row = {"kind": kind, "exact": text == wanted, "similar": similar, "parses": right, "masks": n}
        rows.append(row | seconds | {"length": len(hole), "passes": passes + read.passes})
    return rows


def main(cfg):
    if cfg.holes < 4 or min(cfg.steps) < 3:
        raise ValueError("--holes is at least 4, --steps at least 3 each")
    prepare(cfg)
    head = "| masks | --valid | exact, statements | blocks | similar | tokens | parse | passes | seconds |"
    head += " of them mending | median |"
    lines = [head, "|---" * 11 + "|"]
    for masks in ("as many", 4, 16, 64, "likeliest", "from 4", "from 16", "from 64"):
        for valid in (False, True):
            path = Path(cfg.out) / f"{masks}-{valid}-{cfg.holes}.json"
            if not path.exists():
                path.write_text(json.dumps(fill_holes(cfg, masks, valid)))
            rows = json.loads(path.read_text())
            mean = lambda key, kind="", rows=rows: np.mean([row[key] for row in rows if kind in row["kind"]])  # noqa: E731
            exact = f"{100 * mean('exact', 'statement'):.1f} % | {100 * mean('exact', 'block'):.1f} %"
            seconds = mean("filling") + mean("mending")
            exact += f" | {100 * mean('similar'):.1f} % | {mean('masks'):.1f}"
            rest = f"{100 * mean('parses'):.1f} % | {mean('passes'):.1f} | {seconds:.3f} | {mean('mending'):.3f}"
            rest += f" | {np.median([row['mending'] for row in rows]):.3f}"
            lines.append(f"| {masks} | {'python' if valid else ''} | {exact} | {rest} |")
            print(lines[-1], flush=True)
    log = [json.loads(line) for line in (Path(cfg.out) / "fill/log.jsonl").read_text().splitlines()]
    bits = [row["bits_per_byte"] for row in log if "bits_per_byte" in row][-1]
    lines += ["", f"{cfg.holes} holes; {bits:.2f} bits per held-out byte. {cpu_name()}; compiling is in no second.", ""]
    lines += [f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
    (RESULTS / f"{cfg.file}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
