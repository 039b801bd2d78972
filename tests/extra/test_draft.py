"""extra/draft.py: the text that is drafted is the text token by token, in every batch and at every
temperature.
"""

import dataclasses
import json

import draft as drafts
import jax
import numpy as np
import pytest
from conftest import from_hf
from flax import nnx
from test_sample_block import model_of

import checkpoints
import convert_weights
import diffusion
import model_dream as md

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17], [8, 8]]


ALL = ((3, 0), (2, 1), (16, 1))  # drafts, and passes that make them
SLOW = [(True, 1.0, 0.9, ALL), (True, 0.0, 1.0, ALL), (True, 0.7, 1.0, ALL), (False, 1.0, 0.9, ALL)]


@pytest.mark.usefixtures("exact_matmuls")
@pytest.mark.parametrize(
    ("shift", "temperature", "top_p", "how"),
    [(True, 1.0, 0.9, ALL[1:2]), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_drafted_text_is_the_text_token_by_token(shift, temperature, top_p, how):
    model = model_of(shift)
    rule = drafts.Sampling(temperature=temperature, top_p=top_p, eos_ids=(2, 3))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), np.arange(len(PROMPTS)))
    key = jax.random.key_data(keys)
    want, stats = drafts.generate(model, PROMPTS, 40, rule, key)
    assert stats["forwards"] == stats["steps"] <= 40
    for draft, steps in how:
        drafted = dataclasses.replace(rule, draft=draft, draft_steps=steps)
        got, stats = drafts.generate(model, PROMPTS, 40, drafted, key)
        assert got == want, (draft, steps)
        assert stats["forwards"] == 1 + (stats["steps"] - 1) * (1 + steps)
    if how == ALL:
        (alone,), stats = drafts.generate(model, PROMPTS[2:3], 40, drafted, key[2:3])
        assert alone == want[2]
    if shift:  # the first draft is then the model's own next token
        assert stats["steps"] <= 1 + 20  # two tokens a step at least


@pytest.mark.usefixtures("exact_matmuls")
@pytest.mark.parametrize("shift", [True, False])
def test_a_single_pass_drafts_behind_each_number_of_drafts_that_may_stay(shift):
    model, N, agreed = model_of(shift), 3, 0
    rows, _ = drafts.generate(model, PROMPTS, 40)
    got, stats = drafts.generate(model, PROMPTS, 40, drafts.Sampling(draft=N, draft_steps=0))
    assert got == rows
    for prompt, row, when_L in zip(PROMPTS, rows, stats["when"], strict=True):
        # The drafts behind each slot, by a pass of its own over the text before: MASKs that see
        # each other stand from that slot on, whose token the pass does not know.
        first_R1, slot_L = np.arange(len(row))[:, None], np.arange(len(row) + N)
        mask_RL = slot_L >= first_R1
        one_RL = np.ones_like(mask_RL, int)
        reach_RL = np.where(mask_RL, first_R1 + N - shift, slot_L)
        token_RL = np.where(mask_RL, model.cfg.mask_id, np.pad(row, (0, N)))
        keys = diffusion.Place(one_RL, one_RL * slot_L)
        queries = diffusion.Place(one_RL, reach_RL)
        hidden_RLD, _ = model.hidden(token_RL, place=queries, key_place=keys)
        logits_RLV = model.logits(hidden_RLD).at[..., model.cfg.mask_id].set(-np.inf)
        token_RL = np.asarray(logits_RLV.argmax(-1))
        # the first pass writes a token, the second has no drafts yet
        want, last = [1, 2], len(prompt) + 1
        while last < len(row) - 1:
            guesses, following = token_RL[last, last + 1 - shift :][:N], row[last + 1 :]
            same = [a == b for a, b in zip(guesses, following, strict=False)]
            agree = [*same, False].index(False)
            want += [want[-1] + 1] * min(agree + 1, len(following))
            last, agreed = last + agree + 1, agreed + agree
        assert when_L[len(prompt) : len(row)].tolist() == want
    assert agreed


@pytest.mark.usefixtures("exact_matmuls")
def test_token_by_token_is_what_a_pass_over_the_whole_text_says():
    model = model_of(True)
    (row,), stats = drafts.generate(model, PROMPTS[:1], 20, drafts.Sampling(draft=4))
    token_BL, n = np.array([row]), len(PROMPTS[0])
    place = diffusion.Place(np.ones_like(token_BL), np.arange(len(row))[None])
    logits_BLV = np.array(model.logits(model.hidden(token_BL, place=place)[0]))
    logits_BLV[..., model.cfg.mask_id] = -np.inf
    assert logits_BLV[0, n - 1 : -1].argmax(-1).tolist() == row[n:]
    assert stats["when"][0, n] == 1
    assert (np.diff(stats["when"][0, n : len(row)]) >= 0).all()


def test_an_end_token_ends_a_text():
    model = model_of(True)
    rule = drafts.Sampling(draft=3, temperature=1.5)
    (long,), _ = drafts.generate(model, PROMPTS[:1], 60, rule)
    end = long[12]
    first = long.index(end, 3)
    (short,), _ = drafts.generate(model, PROMPTS[:1], 60, dataclasses.replace(rule, eos_ids=(end,)))
    assert short == long[:first] + [end] * (63 - first)


@pytest.mark.parametrize(
    ("change", "prompts", "rule", "message"),
    [
        ({"causal": False}, [[5]], {"draft": 4}, "finished tokens attend causally"),
        ({}, [[]], {}, "needs a prompt"),
        ({}, [[5] * 100], {}, "140 tokens do not fit"),
    ],
)
def test_what_cannot_be_written_is_refused(change, prompts, rule, message):
    model = model_of(True)
    graph = md.graph_of(dataclasses.replace(model.cfg, **change), md.Compute())
    model = nnx.merge(graph, nnx.state(model))
    with pytest.raises(ValueError, match=message):
        drafts.generate(model, prompts, 40, drafts.Sampling(**rule))


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.usefixtures("exact_matmuls")
def test_nemotron_s_autoregressive_and_self_speculated_texts_and_their_passes(golden_dir):
    """With a threshold its drafts take more passes than ours, which come in one; the text is the
    same.
    """
    folder, checked = golden_dir("nemotron"), set()
    model = from_hf(folder, "float32")
    # theirs asks for no number
    graph = md.graph_of(dataclasses.replace(model.cfg, positions=1 << 17), md.Compute())
    model = nnx.merge(graph, nnx.state(model))
    for case in json.loads((folder / "nemotron.json").read_text())["cases"]:
        settings = case["settings"]
        if case["mode"] == "diffusion" or "max_thinking" in settings:
            continue
        eos_ids = () if settings["eos_id"] is None else (settings["eos_id"],)
        rule = drafts.Sampling(draft=settings.get("block_length", 1) - 1, eos_ids=eos_ids)
        rows, stats = drafts.generate(model, case["prompts"], settings["max_new"], rule)
        for row, prompt, text in zip(rows, case["prompts"], case["text"], strict=True):
            new = row[len(prompt) :][: len(text)]
            assert new == text[: len(new)], case["name"]
            assert len(new) == min(len(text), settings["max_new"])
        if not settings.get("threshold"):
            assert stats["forwards"] == case["nfe"], case["name"]
        checked.add(case["mode"])
    assert checked == {"ar", "self_speculation"}


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.usefixtures("exact_matmuls")
def test_a_converted_qwen2_drafts_its_greedy_text(golden_dir, tmp_path):
    folder = golden_dir("block")
    cases = json.loads((folder / "block.json").read_text())["conversion"]["greedy"]
    out = str(tmp_path / "dream")
    convert_weights.main(convert_weights.Config(source=str(folder / "ar"), to="dream", out=out))
    model = checkpoints.load(md, tmp_path / "dream")[0]
    new = max(len(case["text"]) for case in cases)
    for draft in (0, 4):
        rule = drafts.Sampling(draft=draft)
        rows, _ = drafts.generate(model, [case["prompt"] for case in cases], new, rule)
        for row, case in zip(rows, cases, strict=True):
            assert row[len(case["prompt"]) :][: len(case["text"])] == case["text"], draft
