"""Reference values of Nemotron-Labs-Diffusion and Stable-DiffCoder
(tests/golden/nemotron/README.md).

Not covered, as no sampler of ours does it: the thinking budget. The passes of self-speculation:
tests/extra/test_draft.py.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_on_the_hub, counting_mask, from_hf
from flax import nnx
from safetensors.numpy import load_file
from test_golden_block import built, prepare_behind_prompts

import diffusion
import model_dream as md
import sample_block

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls")]


@pytest.fixture(scope="module")
def folder(golden_dir):
    return golden_dir("nemotron")


@pytest.fixture(scope="module")
def model(folder):
    model = from_hf(folder, "float32")  # whose generate() asks for no number of positions
    return built((model.cfg, nnx.state(model)), positions=1 << 17)


@pytest.fixture(scope="module")
def golden(folder):
    return json.loads((folder / "nemotron.json").read_text())


def close(got, want, name=""):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)


def slots(token_BL, start=0):
    return np.broadcast_to(start + np.arange(token_BL.shape[1]), token_BL.shape)


hidden_of = jax.jit(lambda model, *args, **at: model.hidden(*args, **at))


# ---- the model -----------------------------------------------------------------------------------------------------


def test_the_config_is_read_as_the_code_reads_it(model, folder):
    keys = json.loads((folder / "config.json").read_text())
    cfg = model.cfg
    assert (cfg.family, cfg.shift, cfg.bias, cfg.qk_norm, cfg.causal) == (
        "nemotron",
        False,
        False,
        False,
        True,
    )
    assert (cfg.head_size, cfg.block_length) == (keys["head_dim"], keys["block_size"])
    assert cfg.theta == keys["rope_parameters"]["rope_theta"]
    assert cfg.mask_id == keys["mask_token_id"]


def test_logits_of_both_ways_to_attend(model, folder):
    arrays = load_file(folder / "forward.safetensors")
    for name in ("causal", "causal_long", "full", "full_long"):
        token_BL, want = arrays[f"{name}.input_ids"], arrays[f"{name}.logits"]
        place = (
            diffusion.Place(np.ones_like(token_BL), slots(token_BL))
            if name.startswith("causal")
            else None
        )
        hidden_BLD, _ = hidden_of(model, token_BL, place=place)
        close(model.logits(hidden_BLD)[:, -want.shape[1] :], want, name)
        last = f"{name}.hidden.{model.cfg.layers}"
        if last in arrays:
            close(hidden_BLD, arrays[last], name)


def test_logits_of_a_block_behind_a_cache(model, folder):
    """A causal or a two-way context; the block sees itself whole, or causally (verify)."""
    arrays = load_file(folder / "forward.safetensors")
    prefix_BP, cfg = arrays["block.prefix_ids"], model.cfg
    for name in ("block", "verify", "block_two_way_context"):
        block_BN = arrays.get(f"{name}.input_ids", arrays["block.input_ids"])
        (B, P), N = prefix_BP.shape, block_BN.shape[1]
        ones, slot_BM = np.ones((B, P + N), np.int32), slots(np.zeros((B, P + N)))
        number_BM = np.where(slot_BM < P, 0, 1) if name == "block_two_way_context" else slot_BM
        keys = diffusion.Place(ones, number_BM)
        cache = [
            (jnp.zeros((B, cfg.kv_heads, P + N, cfg.head_size)),) * 2 for _ in range(cfg.layers)
        ]
        place = diffusion.Place(ones[:, :P], number_BM[:, :P])
        _, cache = hidden_of(model, prefix_BP, None, None, cache, 0, place, keys)
        last_BN = number_BM[:, P:] if name == "verify" else number_BM[:, P:] * 0 + number_BM.max()
        place = diffusion.Place(ones[:, P:], last_BN)
        hidden_BND, _ = hidden_of(model, block_BN, None, None, cache, P, place, keys)
        close(model.logits(hidden_BND), arrays[f"{name}.logits"], name)


def test_yarn_and_the_query_scale(model, folder):
    arrays, cfg = load_file(folder / "forward.safetensors"), model.cfg
    np.testing.assert_allclose(
        md.rope_frequencies(cfg.head_size, cfg.theta, cfg.rope), arrays["inv_freq"], rtol=3e-7
    )
    real = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16384}
    for name, factor, theta in (("3b_8b", 16.0, 1e6), ("14b", 16.0, 1e9), ("3b_base", 0.25, 1e6)):
        rope = tuple((real | {"factor": factor}).items())
        np.testing.assert_allclose(
            md.rope_frequencies(128, theta, rope), arrays[f"inv_freq_{name}"], rtol=3e-7
        )
    position_L = arrays["query_scale.position"]
    *_, scale = md.rope_of(cfg, jnp.asarray(position_L)[None])
    np.testing.assert_allclose(np.ravel(scale), arrays["query_scale.scale"], rtol=1e-6)
    first = md.rope_of(cfg, jnp.zeros((1, 1), int))[0]
    np.testing.assert_allclose(first, np.full(first.shape, arrays["attention_factor"]), rtol=1e-6)


# ---- losses --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_loss_token_for_token(model, golden, folder):
    """Ours leaves MASK out of the softmax, the published losses have it in: from our logits both
    are made.
    """
    arrays = load_file(folder / "loss.safetensors")

    @jax.jit
    def predicting(model, noised_BL, token_BL, segment_BL, position_BL, block):
        if block is None:
            place = diffusion.Place(segment_BL)
            return model.logits(model.hidden(noised_BL, position_BL, place=place)[0])
        row = noised_BL, token_BL, segment_BL, position_BL
        return model.logits(model.readings(*row, block)[0])

    nll = jax.jit(lambda model, *args: model.nll(*args))
    ar_nll = jax.jit(lambda model, *args: model.ar_nll(*args))
    assert golden["losses"]
    for case in golden["losses"]:
        name = case["name"]
        token_BL, mask_BL = arrays[f"{name}.token_BL"], arrays[f"{name}.mask_BL"] == 1
        block = case.get("block")
        where = np.ones_like(token_BL), slots(token_BL), block
        got_BLV = predicting(
            model, np.where(mask_BL, model.cfg.mask_id, token_BL), token_BL, *where
        )
        logp_BLV = np.asarray(jax.nn.log_softmax(got_BLV))
        got_BL = np.where(
            mask_BL, -np.take_along_axis(logp_BLV, token_BL[..., None], -1)[..., 0], 0
        )
        if f"{name}.nll_BL" in arrays:
            np.testing.assert_allclose(
                got_BL, arrays[f"{name}.nll_BL"], atol=2e-4, rtol=0, err_msg=name
            )
        p_BL = np.broadcast_to(arrays[f"{name}.p_BL"].reshape(len(token_BL), -1), token_BL.shape)
        total = (got_BL / p_BL).sum()
        assert total == pytest.approx(case.get("diffusion_sum", case["published_sum"]), rel=2e-5), (
            name
        )
        # MASK's share of the softmax
        without_BL = np.log1p(-np.exp(logp_BLV[..., model.cfg.mask_id]))
        ours_BL = np.asarray(nll(model, token_BL, mask_BL, *where))
        np.testing.assert_allclose(
            ours_BL, np.where(mask_BL, got_BL + without_BL, 0), atol=2e-4, rtol=0, err_msg=name
        )
        if f"{name}.ar_nll_BL" in arrays:
            every_BL = np.ones(token_BL.shape, bool)
            got_BL = np.asarray(ar_nll(model, token_BL, every_BL, *where[:2]))[:, 1:]
            place = diffusion.Place(where[0], where[1])
            logits_BLV = model.logits(hidden_of(model, token_BL, place=place)[0])[:, :-1]
            with_BL = np.log1p(-np.asarray(jax.nn.softmax(logits_BLV))[..., model.cfg.mask_id])
            np.testing.assert_allclose(
                got_BL - with_BL, arrays[f"{name}.ar_nll_BL"], atol=2e-4, rtol=0, err_msg=name
            )
            assert (got_BL - with_BL).sum() == pytest.approx(case["ar_sum"], rel=2e-5), name


@pytest.mark.slow
def test_both_losses_come_out_of_one_pass(model, golden, folder):
    arrays = load_file(folder / "loss.safetensors")
    readings = jax.jit(
        lambda model, *args: [model.logits(x_BLD) for x_BLD in model.readings(*args)]
    )
    cases = [case for case in golden["losses"] if "ar_sum" in case]
    assert cases
    for case in cases:
        name = case["name"]
        token_BL, mask_BL = arrays[f"{name}.token_BL"], arrays[f"{name}.mask_BL"] == 1
        noised_BL = np.where(mask_BL, model.cfg.mask_id, token_BL)
        both = readings(
            model, noised_BL, token_BL, np.ones_like(token_BL), slots(token_BL), case["block"]
        )
        nll, ar = (
            -np.take_along_axis(np.array(jax.nn.log_softmax(x)), token_BL[..., None], -1)[..., 0]
            for x in both
        )
        p_BL = np.broadcast_to(arrays[f"{name}.p_BL"].reshape(len(token_BL), -1), token_BL.shape)
        assert (nll / p_BL)[mask_BL].sum() == pytest.approx(case["diffusion_sum"], rel=2e-5), name
        assert ar[:, 1:].sum() == pytest.approx(case["ar_sum"], rel=2e-5), name


# ---- texts ---------------------------------------------------------------------------------------------------------


def texts(model, case, width, block, threshold=0.0, counting=True):
    """(texts cut behind EOS, statistics) of a case's prompts."""
    prompts, settings = case["prompts"], case["settings"]
    eos_ids = () if settings["eos_id"] is None else (settings["eos_id"],)
    rule = sample_block.Sampling(block, threshold=threshold, eos_ids=eos_ids)
    with pytest.MonkeyPatch.context() as patch:
        if counting:
            patch.setattr(sample_block, "prepare", counting_mask(sample_block.prepare))
        rows, stats = sample_block.generate(
            model, prompts, settings["max_new"], rule, widths=(width,)
        )
    found = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    return [
        text[: text.index(eos_ids[0]) + 1] if {*eos_ids} & {*text} else text for text in found
    ], stats


def plain_cases(golden, mode):
    """The cases of a mode without a thinking budget, and the width that holds all of them."""
    cases = [
        case
        for case in golden["cases"]
        if case["mode"] == mode and "max_thinking" not in case["settings"]
    ]
    assert cases
    return cases, max(len(case["prompts"][0]) + case["settings"]["max_new"] for case in cases)


@pytest.mark.slow
def test_the_autoregressive_mode_is_blocks_of_one_and_self_speculation_its_text(model, golden):
    cases, width = plain_cases(golden, "ar")
    for case in cases:
        got, stats = texts(model, case, width, 1)
        assert got == case["text"], case["name"]
        assert stats["forwards"] == case["nfe"], case["name"]
    cases, width = plain_cases(golden, "self_speculation")
    for case in cases:
        (got,), _ = texts(model, case, width, 1)
        want = case["text"][0][: case["settings"]["max_new"]]  # theirs may be longer than asked for
        assert (len(got), got) == (len(want), want), case["name"]


@pytest.mark.slow
def test_every_text_of_the_diffusion_mode_token_for_token_with_its_passes(model, golden):
    cases, width = plain_cases(golden, "diffusion")
    params = model.cfg, nnx.to_pure_dict(nnx.state(model))
    for case in cases:
        name, settings = case["name"], case["settings"]
        with pytest.MonkeyPatch.context() as patch:
            if not settings["causal_context"]:
                patch.setattr(sample_block, "prepare", prepare_behind_prompts)
            two_way = model if settings["causal_context"] else built(params, causal=False)
            got, stats = texts(
                two_way, case, width, settings["block_length"], settings["threshold"] or 0.0
            )
        assert got == case["text"], name
        # our first pass is theirs of the prompt, which
        if settings["causal_context"] and settings["eos_id"] is None:
            # nfe leaves out; their last one, a commit, is not needed
            assert stats["forwards"] == case["nfe"], name


@pytest.mark.slow
def test_a_row_of_a_batch_is_what_it_is_alone(model, golden):
    cases = [case for case in plain_cases(golden, "diffusion")[0] if len(case["prompts"]) > 1]
    assert cases
    for case in cases:
        block, threshold = case["settings"]["block_length"], case["settings"]["threshold"] or 0.0
        # rows of several lengths
        shorter = [prompt[i:] for i, prompt in enumerate(case["prompts"])]
        together, _ = texts(model, case | {"prompts": shorter}, 0, block, threshold, counting=False)
        for prompt, text in zip(shorter, together, strict=True):
            alone, _ = texts(
                model, case | {"prompts": [prompt]}, 0, block, threshold, counting=False
            )
            assert alone == [text]


# ---- Stable-DiffCoder ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coder(folder, tmp_path_factory):
    """(model, list of samples); the id of MASK is in the tokenizer's files, as on the Hub."""
    golden = json.loads((folder / "stable_diffcoder" / "stable_diffcoder.json").read_text())
    copy = as_on_the_hub(folder / "stable_diffcoder", tmp_path_factory.mktemp("coder") / "hub")
    return from_hf(copy, "float32"), golden["samples"]


def test_logits_of_stable_diffcoder(coder, folder):
    arrays = load_file(folder / "stable_diffcoder" / "forward.safetensors")
    token_BL, block = arrays["block_causal.input_ids"], int(arrays["block_causal.block"])
    place = diffusion.Place(np.ones_like(token_BL), slots(token_BL) // block)
    close(
        coder[0].logits(hidden_of(coder[0], token_BL, place=place)[0]),
        arrays["block_causal.logits"],
    )
    cfg = coder[0].cfg
    assert (cfg.family, cfg.block_length, cfg.shift, cfg.bias) == (
        "stable_diffcoder",
        4,
        False,
        False,
    )


@pytest.mark.slow
def test_every_text_of_stable_diffcoder_with_its_passes(coder, monkeypatch):
    monkeypatch.setattr(sample_block, "prepare", counting_mask(sample_block.prepare))
    model, cases = coder
    assert cases
    for case in cases:
        name, settings, prompt = case["name"], case["settings"], case["prompt"]
        N, new, eos = settings["block_length"], settings["gen_length"], settings["eos_id"]
        steps = 0 if settings["threshold"] else settings["steps"] // (new // N)
        ends = {"eos_ids": () if eos is None else (eos,)}
        rule = sample_block.Sampling(
            N, steps=steps, schedule="even", threshold=settings["threshold"] or 0.0, **ends
        )
        (row,), stats = sample_block.generate(model, [prompt], new, rule, widths=(96,))
        text, want = row[len(prompt) :], case["text"]
        if eos is None:
            assert text == want, name
            blocks = -(-len(row) // N) - len(prompt) // N
            # ours commits in the first pass of the next block
            assert stats["forwards"] + blocks == case["nfe"], name
        else:
            assert text[: len(want)] == want, name
            # ours ends at EOS, theirs when its block is full
            assert stats["forwards"] <= case["nfe"], name
