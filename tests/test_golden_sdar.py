"""Reference values of SDAR and TraDo (tests/golden/sdar/README.md): every case of every list."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import counting_mask, from_hf
from safetensors.numpy import load_file

import diffusion
import sample_block

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls")]


@pytest.fixture(scope="module")
def folder(golden_dir):
    return golden_dir("sdar")


@pytest.fixture(scope="module")
def model(folder):
    return from_hf(folder, "float32")


@pytest.fixture(scope="module")
def golden(folder):
    return json.loads((folder / "sdar.json").read_text())


def tensors(path, name):
    return {
        key[len(name) + 1 :]: x for key, x in load_file(path).items() if key.startswith(f"{name}.")
    }


def close(got, want, name=""):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)


def test_the_config_is_read_as_the_code_reads_it(model, folder):
    keys = json.loads((folder / "config.json").read_text())
    cfg = model.cfg
    assert (cfg.family, cfg.shift, cfg.bias, cfg.qk_norm, cfg.causal) == (
        "sdar",
        False,
        False,
        True,
        False,
    )
    assert (cfg.heads, cfg.head_size) == (keys["num_attention_heads"], keys["head_dim"])
    assert cfg.block_length == keys.get("block_size", 4)
    added = json.loads((folder / "added_tokens.json").read_text())
    assert cfg.mask_id == keys.get("mask_token_id", added["<|MASK|>"])


@pytest.mark.slow
def test_logits_and_hidden_states_of_every_forward_case(model, golden, folder):
    logits = jax.jit(lambda model, *args, **at: model.logits(model.hidden(*args, **at)[0]))
    assert golden["forward"]
    for case in golden["forward"]:
        name, arrays = case["name"], tensors(folder / "forward.safetensors", case["name"])
        token_BL, position_BL, place = arrays["input_ids"], arrays["position_ids"], None
        if case["mask"] == "block_causal":
            place = diffusion.Place(np.ones_like(token_BL), position_BL // case["block_length"])
        close(logits(model, token_BL, position_BL, place=place), arrays["logits"], name)
        if f"hidden.{model.cfg.layers}" in arrays:
            close(model.lookup(token_BL), arrays["hidden.0"], name)
            close(
                model.hidden(token_BL, position_BL, place=place)[0],
                arrays[f"hidden.{model.cfg.layers}"],
                name,
            )


def test_every_loss_token_for_token(model, golden, folder):
    """Ours leaves MASK out of the softmax, the published loss has it in: both are compared."""
    predicting = jax.jit(lambda model, *args: model.logits(model.readings(*args)[0]))
    nll = jax.jit(lambda model, *args: model.nll(*args))
    assert golden["losses"]
    for case in golden["losses"]:
        name, arrays = case["name"], tensors(folder / "loss.safetensors", case["name"])
        token_BL, position_BL, segment_BL = (
            arrays[f"{key}_BL"] for key in ("token", "position", "segment")
        )
        mask_BL = (arrays["u_BL"] < arrays["p_BL"]) & (arrays["label_BL"] != -100)
        np.testing.assert_array_equal(mask_BL, arrays["mask_BL"] == 1, err_msg=name)
        assert (arrays["label_BL"] != -100).sum() == case["counted"]
        noised_BL, where = (
            np.where(mask_BL, model.cfg.mask_id, token_BL),
            (segment_BL, position_BL, case["block"]),
        )
        got_BLV = np.asarray(predicting(model, noised_BL, token_BL, *where))
        real_BL, want_BLV = segment_BL > 0, arrays["noisy_logits_BLV"]
        close(got_BLV[real_BL], want_BLV[real_BL], name)
        logp_BL = np.take_along_axis(diffusion.log_softmax(got_BLV), token_BL[..., None], -1)[
            ..., 0
        ]
        np.testing.assert_allclose(
            np.where(mask_BL, -logp_BL, 0), arrays["nll_BL"], atol=2e-4, rtol=0, err_msg=name
        )
        loss = (np.where(mask_BL, -logp_BL, 0) / arrays["p_BL"]).sum(where=mask_BL) / case[
            "counted"
        ]
        assert loss == pytest.approx(case["loss"], rel=2e-5), name
        got_BL = np.asarray(nll(model, token_BL, mask_BL, *where))
        want_BL = diffusion.masked_nll(want_BLV, token_BL, mask_BL, model.cfg.mask_id)
        np.testing.assert_allclose(got_BL, want_BL, atol=2e-4, rtol=0, err_msg=name)


@dataclasses.dataclass(frozen=True)
class FromTheLeft(sample_block.Sampler):
    """Our Sampler with SDAR's "sequential": the first masked positions, however unsure."""

    def choose(self, masked_BN, prob_BN, entropy_BN, given, masks_B, i):
        return super().choose(masked_BN, 0 * prob_BN, entropy_BN, given, masks_B, i)


def sample(model, settings, prompts, widths=(), eos_ids=(), counting=False):
    """(texts up to whole blocks, statistics) of prompts under a case's settings."""
    N, dynamic = (
        settings["block_length"],
        settings["remasking_strategy"] == "low_confidence_dynamic",
    )
    threshold = settings["confidence_threshold"] if dynamic else 0.0
    rule = sample_block.Sampling(
        N, steps=settings["denoising_steps"], schedule="sdar", threshold=threshold, eos_ids=eos_ids
    )
    lengths = [-(-(len(prompt) + settings["gen_length"]) // N) * N for prompt in prompts]
    canvases = [
        prompt + [model.cfg.mask_id] * (n - len(prompt))
        for prompt, n in zip(prompts, lengths, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        if counting:
            patch.setattr(sample_block, "prepare", counting_mask(sample_block.prepare))
        if settings["remasking_strategy"] == "sequential":
            patch.setattr(sample_block, "Sampler", FromTheLeft)
        return sample_block.generate(model, canvases, 0, rule, widths=widths)


def cut(text, stop):
    ends = [i for i, token in enumerate(text) if token in stop]
    return text[: ends[0] + 1] if ends else text


def compare(model, case, sequence, steps, width):
    name, settings, prompt = case["name"], case["settings"], case["prompt"]
    N, mask = settings["block_length"], model.cfg.mask_id
    (row,), stats = sample(model, settings, [prompt], (width,), counting=not settings["stop"])
    filled = sequence.index(mask) if mask in sequence else len(sequence)
    assert row[:filled] == sequence[:filled], name
    first = len(prompt) // N
    for i, begun in enumerate(stats["begun"][: len(steps)]):
        of_block = stats["when"][0][(first + i) * N :][:N] - begun
        assert of_block.max() == steps[i], (name, i)
    return row, stats


@pytest.mark.slow
def test_every_text_token_for_token_with_its_steps(model, golden):
    cases = golden["generate"]
    assert cases
    width = max(len(case["sequence"]) + case["settings"]["block_length"] for case in cases)
    for case in cases:
        row, stats = compare(model, case, case["sequence"], case["steps"], width)
        stop, new = case["settings"]["stop"] or [], case["settings"]["gen_length"]
        assert cut(row[len(case["prompt"]) :][:new], stop) == case["text"], case["name"]
        # one pass commits a block and begins the next, and the last block is not committed
        if not stop:
            assert (
                stats["forwards"]
                == sum(case["steps"])
                == case["forwards"] - case["commits"] - (case["prefill"] > 0)
            )
        for block in case["history"]:
            when_N = stats["when"][0][block["start"] :][: case["settings"]["block_length"]]
            begun = stats["begun"][(block["start"] - case["history"][0]["start"]) // len(when_N)]
            for step, before in enumerate(block["before"]):
                got = [t if w == 0 or w - begun <= step else model.cfg.mask_id
                       for t, w in zip(row[block["start"] :], when_N, strict=False)]  # fmt: skip
                assert got == before, (case["name"], block["start"], step)


@pytest.mark.slow
def test_a_text_ends_at_its_first_stop_id_and_a_batch_gives_what_each_row_gives(model, golden):
    cases = [case for case in golden["generate"] if case["settings"]["stop"]]
    assert cases
    for case in cases:
        stop = case["settings"]["stop"]
        (row,), _ = sample(model, case["settings"], [case["prompt"]], eos_ids=tuple(stop))
        assert cut(row[len(case["prompt"]) :], stop)[: len(case["text"])] == case["text"], case[
            "name"
        ]
    by_settings = {}
    for case in golden["generate"]:
        by_settings.setdefault(json.dumps(case["settings"]), []).append(case)
    alike = max(by_settings.values(), key=len)
    prompts = [case["prompt"] for case in alike] + [alike[0]["prompt"][:1]]
    rows, _ = sample(model, alike[0]["settings"], prompts)
    for case, row in zip(alike, rows, strict=False):
        assert row[: len(case["text"]) + len(case["prompt"])] == case["prompt"] + case["text"], (
            case["name"]
        )


@pytest.mark.slow
def test_what_the_published_loop_gets_wrong_is_right_here(model, golden):
    cases = [
        case
        for case in golden["documented"]
        if case["settings"]["remasking_strategy"] != "entropy_bounded"
    ]
    assert cases
    for case in cases:
        assert case["published_sequence"] != case["meant_sequence"]
        compare(model, case, case["meant_sequence"], case["meant_steps"], 0)
