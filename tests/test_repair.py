"""Repair: where a draft is opened, by which examples it is judged, and that the best text stays.
With weights/dream.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx

import checkpoints
import generate_dream
import infill
import model_dream
import prompts
import repair
import runs
import sample_dream

DREAM = ROOT / "weights" / "dream"
PROMPT = 'def total(xs):\n    """Return the sum of xs.\n\n    >>> total([1, 2])\n    3\n    """\n'


@pytest.fixture(scope="module")
def read():
    return infill.Reader(checkpoints.load(model_dream, DREAM)[0], runs.read_tokenizer(DREAM))


@pytest.mark.parametrize(
    ("body", "examples", "passed", "line"),
    [
        ("    return sum(xs)\n", ["assert total([1, 2]) == 3"], 1, None),
        ("    return max(xs)\n", ["assert total([1, 2]) == 3", "assert total([5]) == 5"], 1, None),
        ("    x = 0\n    return y\n", ["assert total([1, 2]) == 3"], 0, 1),
        ("    x = 0\n    return total(1, 2, 3)\n", ["assert total([1, 2]) == 3"], 0, 1),
        # the innermost
        (
            "    def f():\n        return 1 / 0\n    return f()\n",
            ["assert total([1, 2]) == 3"],
            0,
            1,
        ),
        ("    x = 0\n    return x +\n", ["assert total([1, 2]) == 3"], 0, 1),
        ("    return [][0]\n", ["if 1:\n x = 1\n assert total([x, 2]) == 3"], 0, 0),
        # the example raises, not the program
        ("    return xs\n", ["assert total([1, 2].total) == 3"], 0, None),
        ("    return 1or 3\n", ["assert total([1, 2]) == 3"], 0, None),  # Python warns
        # too deep for Python's parser
        (f"    return {'-' * 50_000}3\n", ["assert total([1, 2]) == 3"], 0, None),
    ],
)
@pytest.mark.filterwarnings("error::SyntaxWarning")
def test_the_line_of_a_draft_is_where_its_first_failing_example_raises(
    body, examples, passed, line
):
    draft = repair.Draft(PROMPT, body, examples)
    repair.run_examples([draft], repair.judge)
    assert (draft.passed, draft.line) == (passed, line)


def test_suspects_are_ordered_by_what_the_model_prefers(read):
    """Against the logits of the whole text, one text at a time."""
    tokenizer, model = read.tokenizer, read.model
    bodies = (
        "    return max(xs)\n",
        "    result = 0\n    for x in xs:\n        result += x\n    return result\n",
    )
    drafts = [
        repair.Draft(PROMPT, body, [], suffix)
        for body, suffix in zip(bodies, ("", "\n\nx = 1\n"), strict=True)
    ]
    for draft, found in zip(drafts, repair.suspects(drafts, read), strict=True):
        prompt, body, behind = (
            tokenizer.encode(text).ids for text in (draft.prompt, draft.body, draft.suffix)
        )
        logits_LV = model.logits(model.hidden(jnp.array([prompt + body + behind]))[0])[0]
        logits_LV = logits_LV.at[:, model.cfg.mask_id].set(-jnp.inf)[
            :, : tokenizer.get_vocab_size()
        ]
        logp_CV = np.asarray(jax.nn.log_softmax(logits_LV))[len(prompt) - 1 :][: len(body)]
        margins = {}  # by offset in the body
        for i, token in enumerate(body):
            others = np.where(
                np.isin(np.arange(logp_CV.shape[1]), [token, model.cfg.eos_id]), -np.inf, logp_CV[i]
            )
            other = tokenizer.decode([others.argmax()])
            margins[len(tokenizer.decode(body[:i]))] = logp_CV[i, token] - others.max(), other
        assert {*found} == {(offset, other) for offset, (_, other) in margins.items()}
        # other shapes, other rounding
        assert np.all(np.diff([margins[offset][0] for offset, _ in found]) > -0.02)
    # the wrong word is found, and the right one known
    offset, other = repair.suspects(drafts[:1], read)[0][0]
    assert bodies[0][offset:].startswith(" max")
    assert other == " sum"


def test_a_draft_is_opened_behind_suspect_tokens_then_at_the_line_that_raises_and_at_theirs():
    draft = repair.Draft(PROMPT, "    x = 0\n    return x + xs", [])
    suspects = [(20, " -"), (6, "+=")]
    openings = [*repair.default_openings(draft, suspects)]
    assert openings == [(20, 27, " -"), (6, 9, "+="), (10, 27, ""), (0, 10, "")]
    # Python's parser counts two lines
    ended = dataclasses.replace(draft, body="    x = 0\r    return (x")
    repair.set_line(ended, PROMPT.count("\n") + 2)
    assert [*repair.default_openings(ended, [])] == []
    draft.line = 1
    assert [*repair.default_openings(draft, suspects[1:])] == [
        (6, 9, "+="),
        (10, 27, ""),
        (0, 10, ""),
    ]
    assert draft.opened(6, 9, "+=") == (PROMPT + "    x +=", "= 0", "\n    return x + xs", "+=")


def test_the_best_text_stays_and_no_place_is_opened_twice(read):
    texts = iter(["    return 1\n", "return 3\n", "    return 4\n", "return 5\n", "6\n"])

    def fill(holes):
        return [(next(texts), 2) for _ in holes]

    examples = ["assert total([1, 2]) == 3", "assert total([2, 2]) == 4", "assert total([]) == 0"]
    draft = repair.Draft(PROMPT, "    return 2\n", examples)
    places = [(0, 13, ""), (4, 13, ""), (11, 13, "")]
    repair.repair([draft], 7, read, fill, repair.judge, openings=lambda draft, suspects: places)
    # the second text passes an example, and is opened at the same places anew
    assert (draft.body, draft.passed) == ("    return 3\n", 1)
    assert [tried.passed for tried in draft.rounds] == [0, 1, 1, 0, 0]
    assert [tried.old for tried in draft.rounds] == [
        "    return 2\n",
        "return 2\n",
        "    return 3\n",
        "return 3\n",
        "3\n",
    ]
    # five holes in two passes each, and six passes that looked for a place
    assert draft.passes == 5 * 3 + 1
    # one that passes is left alone
    right = repair.Draft(PROMPT, "    return sum(xs)\n", examples)
    repair.repair([right], 7, read, fill, repair.judge)
    assert (right.rounds, right.passes, right.passed) == ([], 0, 3)


def test_a_planted_bug_is_found_and_mended(read):
    end = read.model.cfg.eos_id
    rule = sample_dream.Sampling(
        threshold=0.9, vocab=read.tokenizer.get_vocab_size(), eos_ids=(end,)
    )
    fill = repair.filler(read, rule, jax.random.key(0), 64, (end,))
    draft = repair.Draft(PROMPT, "    return max(xs)\n", ["assert total([1, 2]) == 3"])
    repair.repair([draft], 4, read, fill, repair.judge)
    assert draft.body == "    return sum(xs)\n"
    assert [(tried.old, tried.new) for tried in draft.rounds] == [(" max(xs)", " sum(xs)")]


def test_a_hole_ends_with_an_end_token_or_has_as_many_tokens_as_before(read):
    end = read.model.cfg.eos_id
    rule = sample_dream.Sampling(
        threshold=0.9, vocab=read.tokenizer.get_vocab_size(), eos_ids=(end,)
    )
    before, behind = (read.tokenizer.encode(text).ids for text in (PROMPT + "    return", "\n"))
    ((ids, passes),) = infill.fill_holes(
        read, [(before, 64, behind)], rule, jax.random.key(0), (end,)
    )
    assert read.tokenizer.decode(ids).rstrip("\n") == " sum(xs)"
    assert 1 <= passes <= 64
    fill = repair.filler(read, rule, jax.random.key(0), 0, (end,))
    ((text, _),) = fill([(PROMPT + "    return", " max(xs)", "\n", "")])
    assert len(read.tokenizer.encode(text).ids) == len(read.tokenizer.encode(" max(xs)").ids)
    # a first token that is given takes the place of one of them, or of all
    given = [(PROMPT + "    return sum", old, "\n", " sum") for old in (" max(xs)", " max")]
    counts = [
        len(read.tokenizer.encode(text).ids)
        for text in (" max(xs)", " max", *(x for x, _ in fill(given)))
    ]
    assert counts[2:] == [counts[0] - 1, 0]
    blocks = dataclasses.replace(rule, block_length=32, cache="dual", fast_dllm=True, steps=64)
    # holes are no multiple of a block
    fill = repair.filler(read, blocks, jax.random.key(0), 0, (end,))
    assert fill([(PROMPT + "    return", " max(xs)", "\n", "")])[0][0] == text


def test_a_function_that_passes_before_the_text_was_cut_off_is_left_alone(read):
    """As --check, which runs the definitions that are whole."""
    prompt = 'def double(n):\n    """Return n times 2.\n\n    >>> double(2)\n    4\n    """\n'
    row = {
        "prompt": prompt,
        "completion": "    return n * 2\n\n\ndef triple(n):\n    return (",
        "suffix": "",
    }
    rule = sample_dream.Sampling(threshold=0.9, vocab=read.tokenizer.get_vocab_size())
    about = {"hole": 64, "texts": types.SimpleNamespace(ends=()), "mesh": None}
    cfg = generate_dream.Config()
    dream = types.SimpleNamespace(cfg=cfg, read=read, rule=rule, key=jax.random.key(0), **about)
    completions = [(row, prompt + row["completion"])]
    assert repair.repaired(dream, [*completions], 2) == completions


def test_a_hole_that_grows_is_filled_token_by_token_whatever_the_rule(read):
    cfg = dataclasses.replace(read.model.cfg, expand_id=1100)
    grows = infill.Reader(
        nnx.merge(model_dream.graph_of(cfg, read.model.compute), nnx.state(read.model)),
        read.tokenizer,
    )
    ids = {"vocab": read.tokenizer.get_vocab_size(), "eos_ids": (cfg.eos_id,)}
    rule = sample_dream.Sampling(entropy_bound=0.1, eos_penalty=3.0, late_eos="confidence", **ids)
    fill = repair.filler(grows, rule, jax.random.key(0), 0, (cfg.eos_id,))
    ((text, passes),) = fill([(PROMPT + "    return", " max(xs)", "\n", "")])
    assert text
    assert passes >= 1


def test_a_hole_in_a_text_that_fills_all_positions_is_filled(read):
    cfg = dataclasses.replace(read.model.cfg, positions=64)
    short = infill.Reader(
        nnx.merge(model_dream.graph_of(cfg, read.model.compute), nnx.state(read.model)),
        read.tokenizer,
    )
    rule = sample_dream.Sampling(
        threshold=0.9, vocab=read.tokenizer.get_vocab_size(), eos_ids=(cfg.eos_id,)
    )
    fill = repair.filler(short, rule, jax.random.key(0), 64, (cfg.eos_id,))
    ((_, passes),) = fill(
        [("def f(n):\n" + "    n += 1\n" * 40 + "    return", " n", "\n", " n + 2")]
    )
    assert passes >= 1


def test_the_examples_are_those_of_canvas():
    (example,) = prompts.examples(PROMPT)
    assert repair.judge([PROMPT + "    return 2\n"], [[example[2]]]) == [[(False, "2")]]
