"""Reference values of LLaDA (tests/golden/llada/README.md): every case of what our scripts
compute.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import from_hf
from safetensors.numpy import load_file

import diffusion
import model_dream as md
import prompts
import sample_dream as sd

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls")]


@pytest.fixture(scope="module")
def folder(golden_dir):
    return golden_dir("llada")


@pytest.fixture(scope="module")
def model(folder):
    return from_hf(folder, "float32")


@pytest.fixture(scope="module")
def golden(folder):
    return json.loads((folder / "generate.json").read_text())


@pytest.fixture(scope="module")
def forward(folder):
    return load_file(folder / "forward.safetensors")


logits_of = jax.jit(lambda model, *args: model(*args))
hidden_of = jax.jit(lambda model, *args: model.hidden(*args))


def close(got, want, name="", see_BL=None):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if see_BL is not None:
        got, want = got[see_BL], want[see_BL]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)


# ---- the model -----------------------------------------------------------------------------------------------------


def test_the_config_is_read_as_the_code_reads_it(model, folder):
    keys = json.loads((folder / "config.json").read_text())
    cfg = model.cfg
    assert (cfg.family, cfg.shift, cfg.bias, cfg.qk_norm, cfg.causal) == (
        "llada",
        False,
        False,
        False,
        False,
    )
    assert cfg.kv_heads == (keys["n_kv_heads"] or keys["n_heads"])
    assert cfg.vocab == (keys["embedding_size"] or keys["vocab_size"])
    assert cfg.bos_id == json.loads((folder / "generation_config.json").read_text())["bos_token_id"]


def test_logits_of_every_forward_case(model, forward):
    names = {name.split(".")[0] for name in forward if name.endswith(".logits")} - {"cfg", "cache"}
    assert names
    for name in names:
        token_BL, want = forward[f"{name}.input_ids"], forward[f"{name}.logits"]
        see_BL = forward.get(f"{name}.attention_mask")
        see_BL = None if see_BL is None else see_BL == 1
        n = want.shape[1]
        got = logits_of(model, token_BL, None, see_BL)[:, -n:]
        close(got, want, name, None if see_BL is None else see_BL[:, -n:])


def test_hidden_states_after_every_layer(model, forward):
    cases = {name.split(".hidden.")[0] for name in forward if ".hidden." in name}
    assert cases
    for case in cases:
        token_BL = forward[f"{case}.input_ids"]
        rope = md.rope_of(
            model.cfg, jnp.broadcast_to(jnp.arange(token_BL.shape[1]), token_BL.shape)
        )
        x_BLD = model.lookup(token_BL)
        for i in range(model.cfg.layers):
            close(x_BLD, forward[f"{case}.hidden.{i}"], f"{case} {i}")
            x_BLD, _ = model.layers[str(i)](x_BLD, rope, None, model.compute)
        close(hidden_of(model, token_BL)[0], forward[f"{case}.hidden.{model.cfg.layers}"], case)


def test_rope_frequencies_of_this_model_and_of_8b(model, forward):
    sizes = {"inv_freq": (model.cfg.head_size, model.cfg.theta), "inv_freq_8b": (128, 5e5)}
    names = [name for name in forward if name.startswith("inv_freq")]
    assert names
    for name in names:
        size, theta = sizes[name]
        # Theirs are from float64, PyTorch's and ours from float32, where i / K is exact for powers
        # of two alone.
        rtol = 2e-7 if size & (size - 1) == 0 else 5e-7
        np.testing.assert_allclose(md.rope_frequencies(size, theta), forward[name], rtol=rtol)


def test_guided_logits(model, forward):
    token_BL, index_L = forward["cfg.input_ids"], forward["cfg.prompt_index"] == 1
    plain = np.asarray(logits_of(model, token_BL))
    without = np.asarray(logits_of(model, np.where(index_L, model.cfg.mask_id, token_BL)))
    close(without + (forward["cfg.scale"] + 1) * (plain - without), forward["cfg.logits"])


def test_logits_of_a_window_over_a_cache(model, forward):
    S, E = map(int, forward["cache.start_end"])
    _, cache = hidden_of(model, forward["cache.x0.input_ids"])
    changed_BL = forward["cache.x1.input_ids"]
    close(logits_of(model, changed_BL), forward["cache.exact.logits"])
    for mode, end in (("prefix", changed_BL.shape[1]), ("dual", E)):
        window_BWD, _ = hidden_of(model, changed_BL[:, S:end], None, None, cache, S)
        close(model.logits(window_BWD), forward[f"cache.{mode}.logits"], mode)


# ---- generation ----------------------------------------------------------------------------------------------------


def rule_of(case, cfg):
    """A case's settings as ours: blocks, and a threshold. One that no probability reaches fills a
    token in each step. LLaDA's own steps, and Fast-dLLM's windows: tests/extra/test_demos.py.
    """
    given = case["settings"]
    how = {"block_length": given["block_length"], "threshold": given.get("threshold") or 2.0}
    return sd.Sampling(**how, history=True, ban_ids=(cfg.mask_id,))


def house_cases(golden):
    """The cases whose rule is one of ours."""
    for case in golden["cases"]:
        given = case["settings"]
        plain = not (case.get("cache") or case.get("edge") or given.get("factor"))
        extras = ("cfg_scale", "logits_eos_inf", "confidence_eos_eot_inf")
        plain = plain and not any(given.get(name) for name in extras)
        if plain and (given.get("threshold") or given["steps"] == given["gen_length"]):
            yield case


def fill(model, case, **changes):
    """(sequences, statistics) of a case by our sampler."""
    prompt_BL, new = np.array(case["prompt_ids"], np.int32), case["settings"]["gen_length"]
    token_BL = np.pad(prompt_BL, ((0, 0), (0, new)), constant_values=model.cfg.mask_id)
    see_BL = np.ones(token_BL.shape, bool)
    if case.get("attention_mask") is not None:
        see_BL[:, : prompt_BL.shape[1]] = np.array(case["attention_mask"]) == 1
    return sd.fill(
        model, token_BL, see_BL, dataclasses.replace(rule_of(case, model.cfg), **changes)
    )


@pytest.mark.slow
def test_texts_of_blocks_and_a_threshold_with_their_steps_alone_and_in_a_batch(model, golden):
    done = set()
    for case in house_cases(golden):
        name, new = case["name"], case["settings"]["gen_length"]
        got_BL, stats = fill(model, case)
        np.testing.assert_array_equal(got_BL, case["sequences"], err_msg=name)
        assert stats["forwards"] == case["num_forwards"], name
        if "step" in case:
            for when, step in zip(stats["when"], case["step"], strict=True):
                order = np.unique(when, return_inverse=True)[1]
                np.testing.assert_array_equal(order, np.unique(step, return_inverse=True)[1])
        done.add((case["sampler"], len(case["prompt_ids"]) > 1))
        if len(case["prompt_ids"]) > 1:
            mask_BL = np.array(case["attention_mask"]) == 1
            rows = zip(case["prompt_ids"], mask_BL, case["sequences"], strict=True)
            for prompt_L, mask_L, want_L in rows:
                prompt = np.array(prompt_L)[mask_L].tolist()
                (row,), _ = sd.generate(model, [prompt], new, rule_of(case, model.cfg))
                assert row == prompt + want_L[-new:], name
    assert done >= {("llada", False), ("llada", True), ("fast", False)}


def test_masks_in_a_prompt_and_predicted_masks_are_filled_where_the_published_loop_leaves_some(
    model, golden
):
    edges = [case for case in golden["cases"] if case.get("edge")]
    assert edges
    for case in edges:
        got_BL, _ = fill(model, case, block_length=0)
        assert not (got_BL == model.cfg.mask_id).any(), case["name"]
        published = np.array(case["sequences"])
        assert (published == model.cfg.mask_id).any() or case["edge"] == "prompt_has_mask"


def test_every_draw_with_fixed_noise(golden, folder):
    rules = load_file(folder / "rules.safetensors")
    cases = [case for case in golden["gumbel"] if "steps" not in case]
    assert cases
    logits = jnp.asarray(rules["gumbel.logits"])
    for case in cases:
        name = case["name"]
        u = jnp.asarray(rules[f"{name}.u"]) if f"{name}.u" in rules else None
        x0 = np.asarray(diffusion.sample_tokens(logits, u, case["temperature"]))
        np.testing.assert_array_equal(x0, rules[f"{name}.x0"], err_msg=name)
        got = np.take_along_axis(np.asarray(diffusion.softmax(logits)), x0[:, None], -1)[:, 0]
        np.testing.assert_allclose(
            got, rules[f"{name}.confidence"], atol=5e-6, rtol=0, err_msg=name
        )


# ---- losses --------------------------------------------------------------------------------------------------------


def test_every_loss_token_for_token(model, golden, folder):
    arrays = load_file(folder / "loss.safetensors")
    cases = [case for case in golden["losses"] if case["kind"] in ("pretrain", "sft")]
    assert cases
    nll = jax.jit(lambda model, *args: model.nll(*args))
    for case in cases:
        name = case["name"]
        token_BL, u_BL, u_B = (arrays[f"{name}.{key}"] for key in ("token_BL", "u_BL", "u_B"))
        (B, L), p_B = token_BL.shape, (1 - case["eps"]) * u_B + case["eps"]
        prompt_B = arrays.get(f"{name}.prompt_length_B", np.zeros(B, int))
        mask_BL = (u_BL < p_B[:, None]) & (np.arange(L) >= prompt_B[:, None])
        np.testing.assert_array_equal(mask_BL, arrays[f"{name}.mask_BL"] == 1, err_msg=name)
        segment_BL = np.ones_like(token_BL)
        position_BL = np.broadcast_to(np.arange(L), (B, L))
        got_BL = np.asarray(nll(model, token_BL, mask_BL, segment_BL, position_BL))
        np.testing.assert_allclose(
            got_BL, arrays[f"{name}.nll_no_mask_BL"], atol=2e-4, rtol=0, err_msg=name
        )
        loss = (got_BL / p_B[:, None]).sum(1) / (L - prompt_B)
        assert loss.mean() == pytest.approx(case["loss_no_mask"], rel=2e-5), name


def test_the_likelihood_on_the_published_masks(model, golden, folder):
    arrays = load_file(folder / "loss.safetensors")
    cases = [case for case in golden["losses"] if case["kind"] == "likelihood"]
    assert cases
    for case in cases:
        name, prompt, answer = case["name"], case["prompt_ids"], case["answer_ids"]
        noised_NBL, count_NB = arrays[f"{name}.perturbed_NBL"], arrays[f"{name}.count_NB"]
        index_L = np.arange(len(prompt + answer)) < len(prompt)
        total = 0
        for noised_BL, count_B in zip(noised_NBL, count_NB, strict=True):
            logits_BLV = np.asarray(logits_of(model, noised_BL), np.float64)
            if w := case["cfg_scale"]:
                unguided = np.asarray(
                    logits_of(model, np.where(index_L, model.cfg.mask_id, noised_BL)), np.float64
                )
                logits_BLV = unguided + (w + 1) * (logits_BLV - unguided)
            logp_BLV = diffusion.log_softmax(logits_BLV)
            logp_BL = np.take_along_axis(logp_BLV, np.array([prompt + answer])[..., None], -1)[
                ..., 0
            ]
            total += (
                ((noised_BL == model.cfg.mask_id) * logp_BL).sum(1)
                @ (len(answer) / count_B)
                / len(count_B)
            )
        assert total / len(noised_NBL) == pytest.approx(case["log_likelihood"], rel=2e-5), name


# ---- chat, and the way there and back --------------------------------------------------------------------------------


def test_the_chat_template_renders_every_conversation(folder, tmp_path):
    if not (folder / "chat.json").exists():
        pytest.skip("this set has no chat.json")
    chat = json.loads((folder / "chat.json").read_text())
    keys = {name: chat[name] for name in ("chat_template", "bos_token", "eos_token", "pad_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(keys))
    wrap = prompts.chat_template(tmp_path)
    # as generate.py asks
    cases = [case for case in chat["cases"] if case["messages"][-1]["role"] == "user"]
    assert cases
    for case in cases:
        turns = [turn["content"] for turn in case["messages"]]
        system = turns.pop(0) if case["messages"][0]["role"] == "system" else None
        pairs = list(zip(turns[:-1:2], turns[1::2], strict=True))
        assert wrap(turns[-1], system, pairs) == case["text"]
