"""Repair functions that fail the >>> examples of their docstring. Asks a model.

    # lines {"prompt": "def f(xs):\\n    ..."}
    python extra/repair.py --file=prompts.jsonl
    python extra/repair.py --ckpt=out/diffucoder --int8 --n=4 --rounds=8 --file=prompts.jsonl --json

generate_dream.py generates, with its flags, and sandbox.py runs the examples. If no completion of a
prompt passes them, the best is repaired: each round masks one span, fills it anew, and keeps the
new text if more examples pass. It prints the best text, with the verdicts as comments.

A span is the rest of a line, from a token in whose place the model prefers another one most. One
forward pass without masks gives the probability of each token given all others. The hole begins
with the other token, lest it is filled as before.

It runs no hidden tests. It masks no whole lines: that repaired nothing more, see
bench/results/mending.md. It takes no Dream of blocks, which does not see the text after a hole.
Letters: C tokens of a body, N likeliest tokens.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checkpoints
import generate_dream
import infill
import prompts
import runs
import sample_dream

# The tokens of the bodies are padded to a multiple of this, so that few shapes are compiled.
SLOTS = 64


@dataclasses.dataclass(frozen=True)
class Config(generate_dream.Config):
    rounds: runs.Count = 4  # spans of a text that are masked and filled, one after the other


@dataclasses.dataclass
class Draft:
    """A text after a prompt, whose examples should pass."""

    prompt: str
    body: str  # what the model generated: the only part that is masked
    suffix: str
    tests: list  # asserts
    passed: int = 0  # tests that pass
    tried: set = dataclasses.field(default_factory=set)  # spans of this body that were masked
    rounds: list = dataclasses.field(default_factory=list)  # what was tried, for --json

    @property
    def text(self):
        return self.prompt + self.body + self.suffix

    def judge(self):
        """Count the tests that pass."""
        verdicts = [row["verdict"] for row in prompts.verdicts(self.text, self.tests)]
        self.passed = verdicts.count("pass")


def main(cfg):
    if not cfg.prompt and not cfg.file:
        raise ValueError("give --prompt or --file")
    if cfg.chat == "on":
        raise ValueError("--chat=on: what is repaired is plain text")
    cfg = generate_dream.prepare(dataclasses.replace(cfg, check=True))
    requests = [(cfg.prompt, cfg.suffix)]
    if cfg.file:
        requests = prompts.read_requests(cfg.file)
    if not cfg.raw:
        requests = [(prompts.on_new_line(prompt), suffix) for prompt, suffix in requests]
        if any("[MASK" in prompt for prompt, _ in requests):
            raise ValueError(
                "what follows a prompt is repaired, not its [MASK]; --raw takes it as text"
            )
    tests = [prompts.examples(prompt) for prompt, _ in requests]
    dream = generate_dream.Dream(cfg)
    if dream.model.cfg.block_length:
        raise ValueError(f"{cfg.ckpt} is a Dream of blocks; repair needs one without")
    completions = dream.complete(requests)
    repair_all(dream, completions, tests, cfg)
    for row, text in prompts.checked(completions, cfg.n, tests):
        generate_dream.show(cfg, row, text)


def repair_all(dream, completions, tests, cfg):
    """Repair, in the list of completions (row, text), the best of the cfg.n of each prompt."""
    best = {}  # number of a completion: its draft
    for i, of_prompt in enumerate(tests):
        drafts = {}
        for number in range(i * cfg.n, (i + 1) * cfg.n):
            row, text = completions[number]
            draft = draft_of(row, text, [test for *_, test in of_prompt])
            draft.judge()
            drafts[number] = draft
        number = max(drafts, key=lambda number: drafts[number].passed)
        best[number] = drafts[number]

    with checkpoints.mesh_context(dream.mesh):
        key = jax.random.fold_in(dream.key, 2)
        fill = filler(dream.read, dream.rule, key, dream.hole, cfg.batch_size)
        repair(list(best.values()), cfg.rounds, dream.read, fill)
    for number, draft in best.items():
        for i, tried in enumerate(draft.rounds, 1):
            print(
                f"repair {i}: {tried['old'].strip()!r} -> {tried['new'].strip()!r}: "
                f"{tried['passed']} of {len(draft.tests)} examples pass",
                file=sys.stderr,
            )
        if draft.rounds:
            row, _ = completions[number]
            new = {"completion": draft.body, "text": draft.text, "repair": draft.rounds}
            completions[number] = (row | new, draft.text)


def draft_of(row, text, tests):
    """The Draft of a completion. What --check would run of a text that was cut off is enough, if
    that passes.
    """
    draft = Draft(row["prompt"], row["completion"], row["suffix"], tests)
    if draft.suffix:
        return draft
    whole = prompts.definitions(draft.prompt, text)
    cut = dataclasses.replace(draft, body=whole[len(draft.prompt) :] + "\n")
    if infill.parses(text):
        return cut
    cut.judge()
    return cut if cut.passed == len(tests) else draft


def repair(drafts, rounds, read, fill):
    """Repair judged drafts in place. fill(holes) gives the new texts of (draft, span)."""
    for _ in range(rounds):
        failing = [d for d in drafts if d.passed < len(d.tests) and d.body.strip()]
        if not failing:
            return
        holes = []
        for draft, found in zip(failing, spans(failing, read), strict=True):
            untried = [span for span in found if span not in draft.tried]
            if untried:
                holes.append((draft, untried[0]))
        if not holes:
            return
        for (draft, span), new in zip(holes, fill(holes), strict=True):
            start, end, first = span
            after = draft.body[end:]
            if after.startswith("\n"):
                new = new.rstrip("\n")
            trial = dataclasses.replace(draft, body=draft.body[:start] + first + new + after)
            trial.judge()
            draft.tried.add(span)
            draft.rounds.append(
                {"old": draft.body[start:end], "new": first + new, "passed": trial.passed}
            )
            if trial.passed > draft.passed:
                draft.body = trial.body
                draft.passed = trial.passed
                draft.tried = set()


def spans(drafts, read):
    """[(start, end, text of the other token)] of what to mask in the body of each draft.

    In the order of log p(token) - log p(other), given all other tokens, by one forward pass: what
    the model would change comes first. A span goes to the end of its token's line.
    """
    parts = []
    for draft in drafts:
        parts.append(ids_of(read, draft.prompt, draft.body, draft.suffix))
    longest = max(len(body) for _, body, _ in parts)
    C = -(-longest // SLOTS) * SLOTS
    slots = [np.resize(np.arange(len(body)) + len(prompt), C) for prompt, body, _ in parts]
    targets = [np.resize(body, C) for _, body, _ in parts]
    canvases = [prompt + body + suffix for prompt, body, suffix in parts]
    rows = zip(*read(canvases, slots, targets), strict=True)

    found = []
    for draft, (_, body, _), (logp_C, likely_CN, id_CN) in zip(drafts, parts, rows, strict=True):
        pieces = prompts.pieces(read.tokenizer, body)
        starts = [0, *itertools.accumulate(map(len, pieces))]
        choices = []
        for i, token in enumerate(body):
            for other, logp in zip(id_CN[i].tolist(), likely_CN[i], strict=True):
                text = prompts.pieces(read.tokenizer, [*body[max(0, i - 1) : i], other])[-1]
                if other != token and text:  # an end token has no text
                    start = starts[i]
                    end = f"{draft.body}\n".index("\n", start)
                    choices.append((logp_C[i] - logp, (start, end, text)))
                    break
        found.append([span for _, span in sorted(choices)])
    return found


def parts_of(read, draft, span):
    """Ids before a span of a draft, of its old text, and after it."""
    start, end, first = span
    before = draft.prompt + draft.body[:start] + first
    return ids_of(read, before, draft.body[start:end], draft.body[end:] + draft.suffix)


def ids_of(read, *texts):
    return [prompts.ids_of(read.tokenizer, text) for text in texts]


def filler(read, rule, key, size, rows):
    """A function that fills the spans [(draft, span)] by a sampling rule: the new texts.

    A hole has `size` masks; an id of rule.eos_ids ends it. `rows` texts are filled together.
    """
    cfg = read.model.cfg
    rule = dataclasses.replace(rule, steps=0, block_length=0, cache="", history=False)
    calls = itertools.count()

    def fill(holes):
        canvases = []
        starts = []
        for draft, span in holes:
            before, old, after = parts_of(read, draft, span)
            before = before[-max(1, cfg.positions - len(after) - len(old)) :]
            masks = min(size, cfg.positions - len(before) - len(after))
            canvases.append(before + [cfg.mask_id] * masks + after)
            starts.append((len(before), masks))
        widths = (sample_dream.canvas_width(max(map(len, canvases)), cfg.positions),)
        key_of_call = jax.random.fold_in(key, next(calls))
        filled, _ = sample_dream.generate(
            read.model, canvases, 0, rule, key_of_call, widths, min(rows, len(canvases))
        )
        texts = []
        for ids, (first, masks) in zip(filled, starts, strict=True):
            hole = itertools.takewhile(lambda i: i not in rule.eos_ids, ids[first : first + masks])
            texts.append(read.tokenizer.decode(list(hole)))
        return texts

    return fill


def opened(model, prompt, text, number):
    """Ids of a text that fails the examples of its prompt, None for masks: its span `number`, for
    the page of serve.py, whose model is a batching.Dream.
    """
    prompt = prompts.on_new_line(prompt)
    body = text.removeprefix(prompt)
    if body == text or not body.strip():
        raise ValueError("there is no text after this prompt to repair; generate it again")
    read = infill.Reader(model.model, model.tokenizer)
    draft = Draft(prompt, body, "", [])
    with model.context():
        found = spans([draft], read)[0]
    before, _, after = parts_of(read, draft, found[number % len(found)])
    return [*before, *[None] * (read.model.cfg.hole_masks or 8), *after]


if __name__ == "__main__":
    runs.command(main, Config, __doc__, moved=generate_dream.MOVED)
