"""Reference values of LLaDA (tests/golden/llada/README.md): every case of what our scripts compute."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import from_hf
from safetensors.numpy import load_file

import canvas
import diffusion
import model_dream as md
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
    assert (cfg.family, cfg.shift, cfg.bias, cfg.qk_norm, cfg.causal) == ("llada", False, False, False, False)
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
        rope = md.rope_of(model.cfg, jnp.broadcast_to(jnp.arange(token_BL.shape[1]), token_BL.shape))
        x_BLD = model.lookup(token_BL)
        for i in range(model.cfg.layers):
            close(x_BLD, forward[f"{case}.hidden.{i}"], f"{case} {i}")
            x_BLD, _ = model.layers[str(i)](x_BLD, rope, None, model.run)
        close(hidden_of(model, token_BL)[0], forward[f"{case}.hidden.{model.cfg.layers}"], case)


def test_rope_frequencies_of_this_model_and_of_8b(model, forward):
    sizes = {"inv_freq": (model.cfg.head_size, model.cfg.theta), "inv_freq_8b": (128, 5e5)}
    for name in [name for name in forward if name.startswith("inv_freq")]:
        np.testing.assert_allclose(md.rope_frequencies(*sizes[name]), forward[name], rtol=2e-7)


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
