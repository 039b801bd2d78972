"""Repair a function that fails the examples of its docstring: mask a suspect span, fill it, test
again.

    read = infill.Reader(model, tokenizer)
    fill, drafts = repair.filler(read, rule, key, size=64, ends=ends), [repair.Draft(prompt, body,
    examples)] repair.repair(drafts, 4, read, fill, judge)    # four rounds: .body is the best text, .rounds what was tried

generate.py and benchmarks.py do this with --repair=N, serve.py on its page. Each round masks one
span of each draft that fails, and keeps the new text if it passes more examples. Hidden tests are
never run.

A draft is suspect where the model prefers another token, and at the line where an example raises.
One forward pass without masks gives the probability of each token given all others, since a Dream
predicts it from the position before (models without this shift were not tried). A hole begins with
the likeliest other token, lest it is filled as before.
"""

import ast
import dataclasses
import itertools
import re
import sys
import typing
import warnings

import jax
import numpy as np

import checkpoints
import infill
import prompts

# the tokens of the bodies are padded to a multiple of this, so that few shapes are compiled
SLOTS = 64


class Round(typing.NamedTuple):
    before: str  # of the body
    old: str  # text that was opened
    new: str  # text that was generated in its place
    behind: str  # of the body
    passed: int = 0  # examples that pass with it


@dataclasses.dataclass
class Draft:
    """A text after a prompt, whose examples should pass."""

    prompt: str
    body: str  # what the model generated: the only part that is opened
    examples: list[str]  # asserts
    suffix: str = ""
    passed: int = 0  # examples that pass
    # of the body, from 0: where the first failing example raises; None: it does not raise
    line: int | None = None
    tried: set = dataclasses.field(default_factory=set)  # openings of this body
    rounds: list[Round] = dataclasses.field(default_factory=list)
    passes: int = 0  # forward passes until it was filled, and those that looked for suspects

    def opened(self, start, end, first):
        """The text before a hole, its old text, the text after, and `first`, for its first token;
        "" leaves it open.
        """
        return (
            self.prompt + self.body[:start] + first,
            self.body[start:end],
            self.body[end:] + self.suffix,
            first,
        )


def repair(drafts, rounds, read, fill, judge, openings=None):
    """Repair drafts in place, in `rounds` rounds at most.

    fill(holes) gives (new text, forward passes) of each Draft.opened(). judge(programs, tests) runs
    a list of asserts for each program and gives for each assert (whether it passes, what the call
    returned or raised, as text). openings(draft, suspects) yields what to open in turn.
    """
    run_examples(drafts, judge)
    for _ in range(rounds):
        failing = [
            draft for draft in drafts if draft.passed < len(draft.examples) and draft.body.strip()
        ]
        chosen = []  # (draft, opening)
        for draft, its_suspects in zip(
            failing, suspects(failing, read) if failing else [], strict=True
        ):
            draft.passes += 1
            found = (openings or default_openings)(draft, its_suspects)
            chosen += [(draft, opening) for opening in found if opening not in draft.tried][:1]
        if not chosen:
            break
        filled, trials = fill([draft.opened(*opening) for draft, opening in chosen]), []
        for (draft, (start, end, first)), (new, passes) in zip(chosen, filled, strict=True):
            draft.passes += passes
            draft.tried.add((start, end, first))
            before, old, behind = draft.body[:start], draft.body[start:end], draft.body[end:]
            new = new.rstrip("\n") if behind.startswith("\n") else new
            draft.rounds.append(Round(before, old, first + new, behind))
            trials.append(
                dataclasses.replace(draft, body=before + first + new + behind, tried=set())
            )
        run_examples(trials, judge)
        for (draft, _), trial in zip(chosen, trials, strict=True):
            draft.rounds[-1] = draft.rounds[-1]._replace(passed=trial.passed)
            if trial.passed > draft.passed:
                draft.body, draft.passed, draft.line, draft.tried = (
                    trial.body,
                    trial.passed,
                    trial.line,
                    trial.tried,
                )


# ---- the examples ----------------------------------------------------------------------------------------------------

TRACE = """
def _line_of(test):
    import traceback
    try:
        exec(test, globals())
    except BaseException as error:
        stack = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in stack[1:] if frame.filename == stack[0].filename]
        return lines[-1] if lines else None
"""


def run_examples(drafts, judge):
    """Set `passed` and `line` of drafts. A draft that is no Python has its syntax error's line."""
    programs = [draft.prompt + draft.body + draft.suffix for draft in drafts]
    raising = []  # (draft, program, the first example that raises)
    for draft, program, results in zip(
        drafts, programs, judge(programs, [d.examples for d in drafts]), strict=True
    ):
        draft.passed, draft.line = sum(passed for passed, _ in results), None
        failed = [
            (test, got)
            for test, (passed, got) in zip(draft.examples, results, strict=True)
            if not passed
        ]
        try:
            with warnings.catch_warnings(action="ignore"):
                ast.parse(program)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            set_line(draft, getattr(error, "lineno", None))
        else:
            raising += [
                (draft, program, test) for test, got in failed if re.match(r"[A-Z]\w*: ", got or "")
            ][:1]
    if raising:
        tests = [[f"assert _line_of({test!r}) == None"] for *_, test in raising]
        traced = judge([program + TRACE for _, program, _ in raising], tests)
        for (draft, *_), ((_, got),) in zip(raising, traced, strict=True):
            set_line(draft, int(got) if re.fullmatch(r"\d+", got or "") else None)


def set_line(draft, number):
    """Set draft.line by the number of a line of the program, from 1; None for a line that was not
    generated.
    """
    line = (number or 0) - 1 - draft.prompt.count("\n")
    draft.line = line if 0 <= line < len(re.findall(r".*\n|.+", draft.body)) else None


# ---- where a draft is opened -----------------------------------------------------------------------------------------


def suspects(drafts, read):
    """[(offset of a token in the body, text of the likeliest other token)] of each draft, by one
    forward pass.

    In the order of log p(token) - log p(other), given all other tokens: what the model would change
    comes first.
    """
    texts = [(draft.prompt, draft.body, draft.suffix) for draft in drafts]
    parts, found = [[prompts.encode(read.tokenizer, text, "") for text in of] for of in texts], []
    # tokens of a body; N are the likeliest others
    C = -(-max(len(body) for _, body, _ in parts) // SLOTS) * SLOTS
    slots = [np.resize(np.arange(len(body)) + len(prompt), C) for prompt, body, _ in parts]
    targets = [np.resize(body, C) for _, body, _ in parts]
    told = read([[*prompt, *body, *suffix] for prompt, body, suffix in parts], slots, targets)
    for (_, body, _), logp_C, likely_CN, id_CN in zip(parts, *told, strict=True):
        starts, choices = (
            [0, *itertools.accumulate(map(len, prompts.pieces(read.tokenizer, body)))],
            [],
        )
        for i, token in enumerate(body):
            for other, logp in zip(id_CN[i].tolist(), likely_CN[i].tolist(), strict=True):
                text = prompts.pieces(read.tokenizer, [*body[max(0, i - 1) : i], other])[-1]
                if other != token and text:  # an end token has no text
                    choices.append((logp_C[i] - logp, starts[i], text))
                    break
        found.append([choice[1:] for choice in sorted(choices)])
    return found


def default_openings(draft, suspects):
    """(start, end, text that the hole begins with) of the spans to mask, in the order of trial.

    Of three suspects the rest of each line, with its other token first; then the line that raises,
    and their lines.
    """
    lines = [found.span() for found in re.finditer(r".*\n|.+", draft.body)]
    raising = [] if draft.line is None else [lines[draft.line]]
    for i in range(0, len(suspects), 3):
        three = [
            (*suspect, *next(line for line in lines if suspect[0] < line[1]))
            for suspect in suspects[i : i + 3]
        ]
        for offset, other, start, end in three:
            yield offset, start + len(draft.body[start:end].rstrip("\n")), other
        yield from ((*line, "") for line in [*raising, *(suspect[2:] for suspect in three)])


# ---- how a hole is filled --------------------------------------------------------------------------------------------


def filler(read, rule, key, size, ends, rows=1):
    """A function that fills holes by a sampling rule: [Draft.opened()] -> [(new text, passes)].

    A Dream with cfg.expand_id finds the length of a hole, see infill.grow. Another fills `size`
    masks, and one of the ids `ends` ends the hole; with size 0 the hole has as many masks as the
    old text has tokens, less `first`.
    """
    cfg, calls = read.model.cfg, itertools.count()
    rule = dataclasses.replace(
        rule, **infill.ANY_SIZE, ban_ids=rule.ban_ids if size else tuple(ends)
    )
    by_token = type(rule)(
        **{name: getattr(rule, name) for name in "alg temperature top_p top_k ban_ids".split()}
    )

    def grow(before, old, behind, key):
        first = read.passes
        return infill.grow(
            read, before, behind, by_token, key, max(1, len(old))
        ), read.passes - first

    def fill(holes):
        key_of_call = jax.random.fold_in(key, next(calls))
        coded = [[prompts.encode(read.tokenizer, text, "") for text in hole] for hole in holes]
        parts = [
            (b[-max(1, cfg.positions - len(a) - len(old)) :], old[bool(first) :], a)
            for b, old, a, first in coded
        ]
        if cfg.expand_id >= 0:
            filled = [
                grow(*part, jax.random.fold_in(key_of_call, i)) for i, part in enumerate(parts)
            ]
        else:
            blanks = [
                (b, min(size or len(old), cfg.positions - len(b) - len(a)), a)
                for b, old, a in parts
            ]
            filled = infill.fill_holes(read, blanks, rule, key_of_call, ends if size else (), rows)
        return [(read.tokenizer.decode(ids), passes) for ids, passes in filled]

    return fill


# ---- for generate.py and serve.py ------------------------------------------------------------------------------------


def judge(programs, tests):
    """Run asserts by sandbox.py: of each (whether it passes, what the call returned or raised, as
    text).
    """
    results = []
    for program, asserts in zip(programs, tests, strict=True):
        rows = prompts.verdicts(program, asserts)
        results.append([(row["verdict"] == "pass", row["got"] or "") for row in rows])
    return results


def opened(model, prompt, text, number):
    """Ids of a text that fails the examples of its prompt, None for masks: opening `number`, for
    batching.Dream.
    """
    read = infill.Reader(model.model, model.tokenizer)
    if (
        not text.startswith(prompt := prompts.on_new_line(prompt))
        or not text[len(prompt) :].strip()
    ):
        raise ValueError("there is no text after this prompt to repair; generate it again")
    draft = Draft(prompt, text[len(prompt) :], [test for *_, test in prompts.examples(prompt)])
    run_examples([draft], judge)
    with model.context():
        found = [*dict.fromkeys(default_openings(draft, suspects([draft], read)[0]))]
    before, _, behind, _ = (
        prompts.encode(read.tokenizer, x, "") for x in draft.opened(*found[number % len(found)])
    )
    return [*before, *[None] * (read.model.cfg.hole_masks or infill.START), *behind]


def repaired(dream, completions, rounds):
    """The completions (row, text) of generate_dream.Dream; if none of a prompt passes its examples, the
    best is repaired.
    """
    cfg, read, drafts, green = (
        dream.cfg,
        dream.read,
        [],
        46 if sys.stdout.isatty() else 0,
    )
    for row, text in completions:
        body, examples = row["completion"], [test for *_, test in prompts.examples(row["prompt"])]
        if not row["suffix"]:
            cut = prompts.definitions(row["prompt"], text)  # what --check runs
            if infill.parses(text) or all(passed for passed, _ in judge([cut], [examples])[0]):
                body = cut[len(row["prompt"]) :] + "\n"
        drafts.append(Draft(row["prompt"], body, examples, row["suffix"]))
    run_examples(drafts if cfg.n > 1 else [], judge)
    best = [
        max(drafts[i : i + cfg.n], key=lambda draft: draft.passed)
        for i in range(0, len(drafts), cfg.n)
    ]
    key, rows = jax.random.fold_in(dream.key, 2), min(cfg.batch_size, len(best))
    fill = filler(read, dream.rule, key, dream.hole, tuple(dream.texts.ends), rows)
    with checkpoints.mesh_context(dream.mesh):
        repair(best, rounds, read, fill, judge)
    for i, draft in enumerate(drafts):
        for number, (before, old, new, behind, passed) in enumerate(draft.rounds, 1):
            said = f"{old.strip()!r} -> {new.strip()!r}: {passed} of {len(draft.examples)} examples pass"
            print(f"repair {number}: {said}", file=sys.stderr)
            if cfg.show_steps:
                print(
                    draft.prompt
                    + before
                    + (f"\x1b[38;5;{green}m{new}\x1b[39m" if green else new)
                    + behind
                )
        if draft.rounds:
            text, rounds = (
                draft.prompt + draft.body + draft.suffix,
                [each._asdict() for each in draft.rounds],
            )
            completions[i] = (
                completions[i][0] | {"completion": draft.body, "text": text, "repair": rounds},
                text,
            )
    return completions
