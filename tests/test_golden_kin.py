"""Reference values of Dream's kin (tests/golden/kin/README.md): the models, and Open-dCoder's texts
by Dream's orders. The loops of their own demos: tests/extra/test_demos.py.
"""

import itertools
import json

import jax
import numpy as np
import pytest
from conftest import from_hf
from safetensors.numpy import load_file

import diffusion
import sample_dream

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls")]


def open_kin(golden_dir, name):
    """(model, kin.json) of a family."""
    folder = golden_dir("kin") / name
    return from_hf(folder, "float32"), json.loads((folder / "kin.json").read_text())


@pytest.mark.parametrize("name", ["dreamon", "fast_dllm_v2", "open_dcoder"])
def test_each_family_is_told_from_the_others_and_has_its_own_mask(golden_dir, name):
    model, golden = open_kin(golden_dir, name)
    assert model.cfg.mask_id == golden["mask_token_id"]
    assert model.cfg.shift
    assert model.cfg.bias
    keys = json.loads((golden_dir("kin") / name / "config.json").read_text())
    assert (model.cfg.block_length, model.cfg.expand_id) == (
        keys.get("bd_size", 0),
        keys.get("expand_token_id", -1),
    )
    assert model.cfg.family == {"dreamon": "dream"}.get(name, name)


def test_logits_of_fast_dllm_v2(golden_dir):
    model, _ = open_kin(golden_dir, "fast_dllm_v2")
    arrays = load_file(golden_dir("kin") / "fast_dllm_v2" / "forward.safetensors")
    logits = jax.jit(
        lambda model, token_BL, place: model.logits(model.hidden(token_BL, place=place)[0])
    )
    names = [name.removesuffix(".logits") for name in arrays if name.endswith(".logits")]
    assert names
    for name in names:
        token_BL, want = arrays[f"{name}.input_ids"][None], arrays[f"{name}.logits"]
        place = diffusion.Place(
            np.ones_like(token_BL),
            np.arange(token_BL.shape[1])[None] // int(arrays[f"{name}.block"].item()),
        )
        got = logits(model, token_BL, place)[0]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)


@pytest.mark.slow
def test_texts_of_open_dcoder_token_for_token_step_by_step(golden_dir):
    model, golden = open_kin(golden_dir, "open_dcoder")
    cases = [case for case in golden["open_dcoder"] if case["settings"]["alg"] != "p2"]
    assert {case["settings"]["alg"] for case in cases} == {"entropy", "maskgit_plus", "topk_margin"}
    for case in cases:
        given, prompt = case["settings"], case["prompt"]
        rule = sample_dream.Sampling(given["alg"], steps=given["steps"])
        *shown, last = sample_dream.steps(model, [prompt], given["max_new_tokens"], rule)
        assert last.rows == [case["sequence"]], case["name"]
        assert last.forwards <= case["forwards"], case["name"]
        begin = prompt + [model.cfg.mask_id] * given["max_new_tokens"]
        rows = [step.rows[0] for step in shown]
        changed = [row for before, row in itertools.pairwise([begin, *rows]) if row != before]
        want = [begin, *case["history"]]
        want = [row for before, row in itertools.pairwise(want) if row != before]
        assert changed == want, case["name"]
