"""Reference values of the Dream model and its generation (tests/golden/dream/README.md), every case of every file.

Filters and schedules are in test_golden_dream.py.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import model_dream as md

pytestmark = pytest.mark.golden


@pytest.fixture(autouse=True, scope="module")
def exact_matmuls():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model(golden_dir):
    return md.from_hf(golden_dir("dream"))


@pytest.fixture(scope="module")
def forward(golden_dir):
    return load_file(golden_dir("dream") / "forward.safetensors")


def cases(arrays, ending):
    return sorted(name.removesuffix(ending) for name in arrays if name.endswith(ending))


def inputs(arrays, case):
    """Ids, positions and key mask of a case; None for what it leaves out."""
    see = arrays.get(f"{case}.attention_mask")
    return arrays[f"{case}.input_ids"], arrays[f"{case}.position_ids"], None if see is None else jnp.asarray(see) == 1


def relative(got, want, see_BL=None):
    """max |got - want| / max |want| over the positions with see_BL."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if see_BL is not None:
        assert np.isfinite(got).all()
        got, want = got[np.asarray(see_BL)], want[np.asarray(see_BL)]
    return np.abs(got - want).max() / np.abs(want).max()


apply = jax.jit(lambda model, *args: model(*args))
hidden = jax.jit(lambda model, *args: model.hidden(*args))


def test_logits_of_every_forward_case(model, forward):
    names = [name for name in cases(forward, ".logits") if f"{name}.input_ids" in forward]
    assert names
    for name in names:
        token_BL, position_BL, see_BL = inputs(forward, name)
        want = forward[f"{name}.logits"]
        got = apply(model, token_BL, position_BL, see_BL)[:, -want.shape[1] :]
        assert relative(got, want, None if see_BL is None else see_BL[:, -want.shape[1] :]) <= 2e-5, name


def test_logits_are_made_only_where_they_are_asked_for(model, forward):
    token_BL, position_BL, see_BL = inputs(forward, "leftpad")
    B, L = token_BL.shape
    keep_BC = np.stack([np.random.default_rng(b).permutation(L)[:5] for b in range(B)])
    want = np.take_along_axis(forward["leftpad.logits"], keep_BC[..., None], 1)
    got = apply(model, token_BL, position_BL, see_BL, keep_BC)
    assert relative(got, want, np.take_along_axis(np.asarray(see_BL), keep_BC, 1)) <= 2e-5


def test_hidden_states_after_every_layer(model, forward):
    for case in {name.split(".hidden.")[0] for name in forward if ".hidden." in name}:
        token_BL, position_BL, see_BL = inputs(forward, case)
        rope = md.rope_table(jnp.asarray(position_BL), md.rope_frequencies(model.cfg.head_size, model.cfg.theta))
        x_BLD, states = model.lookup(token_BL), []
        for i in range(model.cfg.layers):
            states.append(x_BLD)
            x_BLD, _ = model.layers[str(i)](x_BLD, rope, see_BL, model.run)
        states.append(md.rms_norm(x_BLD, model.norm[...], model.cfg.eps))
        wanted = [name for name in forward if name.startswith(f"{case}.hidden.")]
        assert len(wanted) == len(states)
        for i, state in enumerate(states):
            assert relative(state, forward[f"{case}.hidden.{i}"]) <= 2e-5, (case, i)


def test_rope_frequencies_of_this_model_and_of_7b(model, forward):
    for name, cfg in (("inv_freq", model.cfg), ("inv_freq_7b", md.CONFIGS["7b"])):
        got = md.rope_frequencies(cfg.head_size, cfg.theta)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, forward[name], rtol=2e-7)


def test_logits_of_a_window_over_a_cache(model, forward):
    token_BL, position_BL, _ = inputs(forward, "cache.x0")
    S, E = (int(x) for x in forward["cache.start_end"])
    _, cache = hidden(model, token_BL, position_BL)
    changed_BL = forward["cache.x1.input_ids"]
    assert relative(apply(model, changed_BL, position_BL), forward["cache.exact.logits"]) <= 2e-5
    for mode, end in (("prefix", changed_BL.shape[1]), ("dual", E)):
        window = changed_BL[:, S:end], position_BL[:, S:end], None, cache, S
        got = model.logits(hidden(model, *window)[0])
        assert relative(got, forward[f"cache.{mode}.logits"]) <= 2e-5, mode


def test_bfloat16_is_as_near_to_float32_as_the_reference(golden_dir):
    folder = golden_dir("dream") / "bf16"
    model, arrays = md.from_hf(folder), load_file(folder / "forward.safetensors")
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(model))
    names = cases(arrays, ".logits_f32")
    assert names
    for name in names:
        token_BL, position_BL, see_BL = inputs(arrays, name)
        got = np.asarray(apply(model, token_BL, position_BL, see_BL))
        keep_BL = np.ones(token_BL.shape, bool) if see_BL is None else np.asarray(see_BL)
        for want in (arrays[f"{name}.logits_f32"], arrays[f"{name}.logits_bf16"].astype(np.float32)):
            assert np.abs(got - want)[keep_BL].mean() <= 0.13, name
