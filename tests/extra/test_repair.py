"""Repair: which spans are masked, by which examples a text is judged, and that the best text stays.
With weights/dream.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import repair
from conftest import ROOT, refused_by
from flax import nnx

import checkpoints
import generate_dream
import infill
import model_dream
import runs
import sample_dream

DREAM = ROOT / "weights" / "dream"
PROMPT = 'def total(xs):\n    """Return the sum of xs.\n\n    >>> total([1, 2])\n    3\n    """\n'
TESTS = ["assert total([1, 2]) == 3", "assert total([2, 2]) == 4", "assert total([]) == 0"]
LOOP = "    result = 0\n    for x in xs:\n        result += x\n    return result\n"


@pytest.fixture(scope="module")
def read():
    return infill.Reader(checkpoints.load(model_dream, DREAM)[0], runs.read_tokenizer(DREAM))


def draft_of(body, tests=TESTS[:1], suffix=""):
    draft = repair.Draft(PROMPT, body, suffix, tests)
    draft.judge()
    return draft


def filler(read):
    cfg, vocab = read.model.cfg, read.tokenizer.get_vocab_size()
    rule = sample_dream.Sampling(threshold=0.9, vocab=vocab, eos_ids=(cfg.eos_id,))
    return repair.filler(read, rule, jax.random.key(0), 64, 8)


def with_cfg(read, **changes):
    """The model with other numbers in its architecture."""
    cfg = dataclasses.replace(read.model.cfg, **changes)
    graph = model_dream.graph_of(cfg, read.model.compute)
    return infill.Reader(nnx.merge(graph, nnx.state(read.model)), read.tokenizer)


def test_spans_are_ordered_by_what_the_model_prefers(read):
    """Against the logits of the whole text, one text at a time."""
    tokenizer, model = read.tokenizer, read.model
    drafts = [
        repair.Draft(PROMPT, "    return max(xs)\n", "", []),
        repair.Draft(PROMPT, LOOP, "\n\nx = 1\n", []),
    ]
    for draft, found in zip(drafts, repair.spans(drafts, read), strict=True):
        texts = (draft.prompt, draft.body, draft.suffix)
        prompt, body, behind = (tokenizer.encode(text).ids for text in texts)
        logits_LV = model.logits(model.hidden(jnp.array([prompt + body + behind]))[0])[0]
        logits_LV = logits_LV.at[:, model.cfg.mask_id].set(-jnp.inf)
        logits_LV = logits_LV[:, : tokenizer.get_vocab_size()]
        logp_CV = np.asarray(jax.nn.log_softmax(logits_LV))[len(prompt) - 1 :][: len(body)]
        margins = {}  # by offset in the body
        for i, token in enumerate(body):
            others = logp_CV[i].copy()
            others[[token, model.cfg.eos_id]] = -np.inf
            other = tokenizer.decode([others.argmax()])
            margins[len(tokenizer.decode(body[:i]))] = logp_CV[i, token] - others.max(), other
        want = {(offset, other) for offset, (_, other) in margins.items()}
        assert {(start, other) for start, _, other in found} == want
        # other shapes, other rounding
        assert np.all(np.diff([margins[start][0] for start, *_ in found]) > -0.02)
        for start, end, _ in found:  # the rest of a line
            assert "\n" not in draft.body[start:end]
            assert draft.body[end:].startswith("\n")
    # the wrong word is found, and the right one known
    start, end, other = repair.spans(drafts[:1], read)[0][0]
    assert (drafts[0].body[start:end], other) == (" max(xs)", " sum")


def test_the_best_text_stays_and_no_span_is_masked_twice(read, monkeypatch):
    places = [(0, 13, ""), (4, 13, ""), (11, 13, "")]
    monkeypatch.setattr(repair, "spans", lambda drafts, read: [places] * len(drafts))
    texts = iter(["    return 1\n", "return 3\n", "    return 4\n", "return 5\n", "6\n"])
    draft = draft_of("    return 2\n", TESTS)
    right = draft_of("    return sum(xs)\n", TESTS)
    repair.repair([draft, right], 7, read, lambda holes: [next(texts) for _ in holes])
    # the second text passes an example, and is masked at the same places anew
    assert (draft.body, draft.passed) == ("    return 3\n", 1)
    assert [tried["passed"] for tried in draft.rounds] == [0, 1, 1, 0, 0]
    old = ["    return 2\n", "return 2\n", "    return 3\n", "return 3\n", "3\n"]
    assert [tried["old"] for tried in draft.rounds] == old
    assert (right.rounds, right.passed) == ([], 3)  # one that passes is left alone


def test_a_planted_bug_is_found_and_mended(read):
    draft = draft_of("    return max(xs)\n")
    repair.repair([draft], 4, read, filler(read))
    assert draft.body == "    return sum(xs)\n"
    assert [(tried["old"], tried["new"]) for tried in draft.rounds] == [(" max(xs)", " sum(xs)")]


@pytest.mark.parametrize("changes", [{"expand_id": 1100}, {"positions": 64}])
def test_a_hole_ends_with_an_end_token_and_fits_into_all_positions(read, changes):
    before = "    n += 1\n" * 40 + "    return" if "positions" in changes else "    return"
    draft = repair.Draft(PROMPT, before + " max(xs)\n", "", [])
    (text,) = filler(with_cfg(read, **changes))([(draft, (len(before), len(before) + 8, ""))])
    assert "max" not in text
    if "positions" not in changes:
        assert text.rstrip("\n") == " sum(xs)"


def test_a_function_that_passes_before_the_text_was_cut_off_is_left_alone():
    """As --check, which runs the definitions that are whole."""
    body = "    return sum(xs)\n\n\ndef triple(n):\n    return ("
    row = {"prompt": PROMPT, "completion": body, "suffix": ""}
    assert repair.draft_of(row, PROMPT + body, TESTS).body == "    return sum(xs)\n"
    broken = body.replace("sum", "max")
    row["completion"] = broken
    assert repair.draft_of(row, PROMPT + broken, TESTS).body == broken


def test_the_command_repairs_what_was_generated_and_refuses_what_it_cannot(
    tmp_path, capsys, monkeypatch
):
    body = "    return max(xs)\n"
    wrong = PROMPT.replace("    3\n", "    'no'\n")
    completions = []
    for prompt in (PROMPT, wrong):
        row = {"prompt": prompt, "completion": body, "suffix": "", "text": prompt + body}
        completions.append((row, prompt + body))
    monkeypatch.setattr(generate_dream.Dream, "complete", lambda dream, requests: completions)
    lines = [json.dumps({"prompt": prompt}) for prompt in (PROMPT, wrong)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    settings = {"file": str(tmp_path / "prompts.jsonl"), "json": True, "rounds": 2}
    settings |= {"temperature": 0.0, "threshold": 0.9, "compile_cache": "", "devices": 1}
    with pytest.raises(ValueError, match="no completion passes all examples of 1 of 2 prompts"):
        repair.main(repair.Config(ckpt=str(DREAM), **settings))
    out, err = capsys.readouterr()
    right, failed = [json.loads(line) for line in out.splitlines()]
    assert (right["passed"], right["completion"]) == (True, "    return sum(xs)\n")
    assert len(failed["repair"]) == 2
    assert "repair 1: 'max(xs)' -> 'sum(xs)': 1 of 1 examples pass" in err
    assert "give --prompt or --file" in refused_by(repair)
    assert "what is repaired is plain text" in refused_by(repair, "--prompt=x", "--chat=on")
    assert "no >>> examples" in refused_by(repair, "--prompt=x", f"--ckpt={DREAM}")
