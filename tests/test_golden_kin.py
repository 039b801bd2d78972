"""Reference values of Dream's kin (tests/golden/kin/README.md): Fast-dLLM v2, Open-dCoder, DreamOn.

Not covered, as no sampler of ours does it: Fast-dLLM v2's cache of sub-blocks, which is
approximate.
"""

import itertools
import json
import types

import jax
import numpy as np
import pytest
from conftest import counting_mask, from_hf
from safetensors.numpy import load_file

import diffusion
import infill
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
def test_texts_of_fast_dllm_v2_alone_and_in_their_batch(golden_dir, monkeypatch):
    """With its numbers of passes, where MASK counts in the softmax as it does there."""
    model, golden = open_kin(golden_dir, "fast_dllm_v2")

    monkeypatch.setattr(sample_block, "prepare", counting_mask(sample_block.prepare))
    cases = [case for case in golden["fast_dllm_v2"] if not case["approximate"]]
    assert cases
    for case in cases:
        given, N = case["settings"], case["settings"]["block"]
        rule = sample_block.Sampling(N, given["small_block"], threshold=given["threshold"])
        # whole blocks, and the first token behind them
        lengths = [
            len(p) + len(text) for p, text in zip(case["prompts"], case["texts"], strict=True)
        ]
        lengths = [n + (1 - n) % N for n in lengths]
        canvases = [
            p + [model.cfg.mask_id] * (n - len(p))
            for p, n in zip(case["prompts"], lengths, strict=True)
        ]
        rows, _ = sample_block.generate(model, canvases, 0, rule, widths=(128,), rows=4)
        for i, (prompt, row, want) in enumerate(
            zip(case["prompts"], rows, case["texts"], strict=True)
        ):
            assert row[len(prompt) :][: len(want)] == want, case["name"]
            (alone,), stats = sample_block.generate(
                model, canvases[i : i + 1], 0, rule, widths=(128,), rows=4
            )
            assert alone == row, case["name"]
            # a prompt that ends in a block is fed in the first step of this block
            if given["stop"] not in want:
                fused = len(prompt) > N and len(prompt) % N > 0
                assert stats["forwards"] == case["forwards_alone"][i] - fused, case["name"]


@pytest.mark.slow
def test_texts_of_open_dcoder_token_for_token_step_by_step(golden_dir):
    """Among them those of p2, its own rule, which masks again what has become unlikely."""
    model, golden = open_kin(golden_dir, "open_dcoder")
    assert {case["settings"]["alg"] for case in golden["open_dcoder"]} >= {"p2", "entropy"}
    for case in golden["open_dcoder"]:
        given, rows = case["settings"], []
        token_BL = np.array(
            [case["prompt"] + [model.cfg.mask_id] * given["max_new_tokens"]], np.int32
        )

        def watch(state, rows=rows):
            jax.debug.callback(
                lambda token_L: rows.append(token_L.tolist()), state.token_BL[0], ordered=True
            )

        rule = sample_dream.Sampling(given["alg"], steps=given["steps"])
        got_BL, stats = sample_dream.fill(model, token_BL, rule=rule, watch=watch)
        jax.effects_barrier()
        assert got_BL[0].tolist() == case["sequence"], case["name"]
        changed = [
            row
            for before, row in itertools.pairwise([token_BL[0].tolist(), *rows])
            if row != before
        ]
        want = [
            row
            for before, row in itertools.pairwise([token_BL[0].tolist(), *case["history"]])
            if row != before
        ]
        assert changed == want, case["name"]
        assert stats["forwards"] <= case["forwards"], case["name"]


@pytest.mark.slow
def test_texts_of_dreamon_pass_by_pass_by_its_own_loop_over_our_logits(golden_dir):
    """Two cases have what infill.grow has not: two tokens a step, and EOS as a token of the
    hole.
    """
    model, golden = open_kin(golden_dir, "dreamon")
    mask, expand, eos = model.cfg.mask_id, model.cfg.expand_id, model.cfg.eos_id
    logits_of = jax.jit(lambda model, *args: model(*args))
    width = max(case["longest"] for case in golden["dreamon"])
    for case in golden["dreamon"]:
        given, row, longest, history, passes = (
            case["settings"],
            case["prompt"],
            case["longest"],
            [],
            0,
        )
        hub, first = given["sampler"] == "hub", row.index(mask)
        budget = given.get("expand_budget", None if hub else given["max_gen_len"])
        budget = 2 * (longest - first) if budget is None else budget
        steps = 2 * (longest - first) + 2 * budget if hub else given["steps"]
        while mask in row and passes < steps:
            # The first row predicts itself, all others the next position.
            canvas_BL = np.pad([row], ((0, 0), (0, width - len(row))), constant_values=eos)
            logits_LV = np.asarray(
                logits_of(model, canvas_BL, None, np.arange(width)[None] < len(row))[0]
            )
            masked = [i for i, token in enumerate(row) if token == mask]
            logits_MV = logits_LV[np.maximum(np.array(masked) - 1, 0)]
            if len(row) == longest or budget == 0:
                logits_MV[:, expand] = -1e9
            kind = {"maskgit_plus": "max_prob", "topk_margin": "margin"}.get(
                given["alg"], given["alg"]
            )
            sure_M, passes = diffusion.confidence(diffusion.softmax(logits_MV), kind), passes + 1
            for i in np.argsort(-sure_M, kind="stable")[: given["number_transfer_tokens"]]:
                row = [*row[: masked[i]], int(logits_MV[i].argmax()), *row[masked[i] + 1 :]]
            history.append(row)
            if given["pad_delete_to_right"] and eos in row:
                row = [
                    eos if i in masked and i >= row.index(eos) else token
                    for i, token in enumerate(row)
                ]
            gone = [i for i in masked if row[i] == eos and given.get("delete", True)]
            row = [token for i, token in enumerate(row) if i not in gone]
            history += [row] if gone else []
            budget -= row.count(expand)
            if expand in row:
                row = [
                    new for token in row for new in ([mask, mask] if token == expand else [token])
                ]
                history.append(row)
        assert row == case["window"], case["name"]
        assert passes == case["forwards"], case["name"]
        assert history == case["history"], case["name"]


@pytest.mark.slow
def test_texts_and_passes_of_dreamon_by_infill_grow(golden_dir):
    model, golden = open_kin(golden_dir, "dreamon")
    read, done = (
        infill.Reader(model, types.SimpleNamespace(get_vocab_size=lambda: model.cfg.vocab)),
        0,
    )
    for case in golden["dreamon"]:
        given, prompt, longest = case["settings"], case["prompt"], case["longest"]
        if given["number_transfer_tokens"] > 1 or not given.get("delete", True):
            continue
        first, size = prompt.index(model.cfg.mask_id), prompt.count(model.cfg.mask_id)
        budget = given.get("expand_budget", given.get("max_gen_len"))
        how = {
            "size": size,
            "most": longest - len(prompt) + size,
            "to_right": given["pad_delete_to_right"],
        }
        how["regrow"] = 2 * (longest - first) if budget is None else budget
        read.passes, around = 0, (prompt[:first], prompt[first + size :])
        assert (
            infill.grow(read, *around, sample_dream.Sampling(given["alg"]), **how) == case["middle"]
        ), case["name"]
        assert read.passes == case["forwards"], case["name"]
        done += 1
    assert done
