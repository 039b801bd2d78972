"""Reference values of Dream's kin (tests/golden/kin/README.md): Fast-dLLM v2, Open-dCoder, DreamOn.

Not covered, as no sampler of ours does it: DreamOn's loop with its settings, Open-dCoder's p2, which masks again,
and Fast-dLLM v2's cache of sub-blocks, which is approximate.
"""

import functools
import json

import jax
import numpy as np
import pytest
from conftest import from_hf
from safetensors.numpy import load_file
from test_golden_block import Published

import diffusion
import sample_block
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
    assert (model.cfg.block_length, model.cfg.expand_id) == (keys.get("bd_size", 0), keys.get("expand_token_id", -1))
    assert model.cfg.family == {"dreamon": "dream"}.get(name, name)


def test_logits_of_fast_dllm_v2(golden_dir):
    model, _ = open_kin(golden_dir, "fast_dllm_v2")
    arrays = load_file(golden_dir("kin") / "fast_dllm_v2" / "forward.safetensors")
    logits = jax.jit(lambda model, token_BL, place: model.logits(model.hidden(token_BL, place=place)[0]))
    names = [name.removesuffix(".logits") for name in arrays if name.endswith(".logits")]
    assert names
    for name in names:
        token_BL, want = arrays[f"{name}.input_ids"][None], arrays[f"{name}.logits"]
        place = diffusion.Place(
            np.ones_like(token_BL), np.arange(token_BL.shape[1])[None] // int(arrays[f"{name}.block"].item())
        )
        got = logits(model, token_BL, place)[0]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)


@pytest.mark.slow
def test_texts_of_fast_dllm_v2_alone_and_in_their_batch(golden_dir):
    """With its two habits: sub-blocks, and the first token of a block whatever its probability."""
    model, golden = open_kin(golden_dir, "fast_dllm_v2")
    cases = [case for case in golden["fast_dllm_v2"] if not case["approximate"]]
    assert cases
    for case in cases:
        given, N = case["settings"], case["settings"]["block"]
        rule = sample_block.Sampling(N, threshold=given["threshold"])
        new = max(map(len, case["texts"]))
        lengths = [-(-(len(prompt) + new) // N) * N for prompt in case["prompts"]]
        canvases = [p + [model.cfg.mask_id] * (n - len(p)) for p, n in zip(case["prompts"], lengths, strict=True)]
        with pytest.MonkeyPatch.context() as patch:
            habits = functools.partial(Published, first_argmax=True, sub_block=given["small_block"])
            patch.setattr(sample_block, "Sampler", habits)
            rows, _ = sample_block.generate(model, canvases, 0, rule, widths=(128,))
        for prompt, row, want in zip(case["prompts"], rows, case["texts"], strict=True):
            assert row[len(prompt) :][: len(want)] == want, case["name"]


@pytest.mark.slow
def test_texts_of_open_dcoder_token_for_token_step_by_step(golden_dir):
    model, golden = open_kin(golden_dir, "open_dcoder")
    cases = [case for case in golden["open_dcoder"] if case["settings"]["alg"] != "p2"]
    assert cases
    for case in cases:
        given, prompt = case["settings"], case["prompt"]
        token_BL = np.array([prompt + [model.cfg.mask_id] * given["max_new_tokens"]], np.int32)
        rule = sample_dream.Sampling(given["alg"], steps=given["steps"], history=True)
        got_BL, stats = sample_dream.fill(model, token_BL, rule=rule)
        assert got_BL[0].tolist() == case["sequence"], case["name"]
        for step, want in enumerate(case["history"], 1):
            written_L = (stats["when"][0] > 0) & (stats["when"][0] <= step)
            assert np.where(written_L, got_BL[0], token_BL[0]).tolist() == want, (case["name"], step)
        assert stats["forwards"] <= case["forwards"], case["name"]
