"""Reference values of the Dream model and its generation (tests/golden/dream/README.md), every case
of every file.

Filters and schedules are in test_golden_dream.py.
"""

import dataclasses
import json
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import from_hf
from safetensors.numpy import load_file

import model_dream as md
import sample_dream as sd

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls")]


@pytest.fixture(scope="module")
def model(golden_dir):
    return from_hf(golden_dir("dream"))


@pytest.fixture(scope="module")
def forward(golden_dir):
    return load_file(golden_dir("dream") / "forward.safetensors")


def cases(arrays, ending):
    return sorted(name.removesuffix(ending) for name in arrays if name.endswith(ending))


def inputs(arrays, case):
    """Ids, positions and key mask of a case; None for what it leaves out."""
    see = arrays.get(f"{case}.attention_mask")
    return (
        arrays[f"{case}.input_ids"],
        arrays[f"{case}.position_ids"],
        None if see is None else jnp.asarray(see) == 1,
    )


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
        assert (
            relative(got, want, None if see_BL is None else see_BL[:, -want.shape[1] :]) <= 2e-5
        ), name


def test_logits_are_made_only_where_they_are_asked_for(model, forward):
    padded = cases(forward, ".attention_mask")
    assert padded
    for name in padded:
        token_BL, position_BL, see_BL = inputs(forward, name)
        B, L = token_BL.shape
        shown = forward[f"{name}.logits"].shape[1]  # the last ones
        keep_BC = (
            L - 1 - np.stack([np.random.default_rng(b).permutation(shown)[:5] for b in range(B)])
        )
        want = np.take_along_axis(forward[f"{name}.logits"], keep_BC[..., None] - L + shown, 1)
        hidden_BLD, _ = hidden(model, token_BL, position_BL, see_BL)
        got = model.logits(jnp.take_along_axis(hidden_BLD, keep_BC[..., None], 1))
        assert relative(got, want, np.take_along_axis(np.asarray(see_BL), keep_BC, 1)) <= 2e-5, name


def test_hidden_states_after_every_layer(model, forward):
    # one program for all layers
    apply_layer = jax.jit(lambda layer, *inputs: layer(*inputs, model.compute)[0])
    cases = {name.split(".hidden.")[0] for name in forward if ".hidden." in name}
    assert cases
    for case in cases:
        token_BL, position_BL, see_BL = inputs(forward, case)
        rope = md.rope_of(model.cfg, jnp.asarray(position_BL))
        x_BLD, states = model.lookup(token_BL), []
        for i in range(model.cfg.layers):
            states.append(x_BLD)
            x_BLD = apply_layer(model.layers[str(i)], x_BLD, rope, see_BL)
        states.append(md.rms_norm(x_BLD, model.norm[...], model.cfg.eps))
        wanted = [name for name in forward if name.startswith(f"{case}.hidden.")]
        assert len(wanted) == len(states)
        for i, state in enumerate(states):
            assert relative(state, forward[f"{case}.hidden.{i}"], see_BL) <= 2e-5, (case, i)


def test_rope_frequencies_of_this_model_and_of_7b(model, forward):
    names = [name for name in forward if name.startswith("inv_freq")]
    assert names
    for name in names:
        size = name.removeprefix("inv_freq").removeprefix("_")
        cfg = md.CONFIGS[size] if size else model.cfg
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
    model, arrays = from_hf(folder), load_file(folder / "forward.safetensors")
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(model))
    names = cases(arrays, ".logits_f32")
    assert names
    for name in names:
        token_BL, position_BL, see_BL = inputs(arrays, name)
        got = np.asarray(apply(model, token_BL, position_BL, see_BL))
        keep_BL = np.ones(token_BL.shape, bool) if see_BL is None else np.asarray(see_BL)
        wanted = arrays[f"{name}.logits_f32"], arrays[f"{name}.logits_bf16"].astype(np.float32)
        own = np.abs(wanted[0] - wanted[1])[keep_BL].mean()  # the reference's error
        for want in wanted:
            assert np.abs(got - want)[keep_BL].mean() <= 1.95 * own, name


# ---- generation ----------------------------------------------------------------------------------------------------


def settings_of(case):
    """A golden case's settings as our Sampling."""
    given = case["settings"]
    fields = {k: given[k] or 0 for k in ("steps", "eps", "temperature", "top_k", "alg_temp")}
    fields["top_p"] = given["top_p"] or 1.0
    if given["alg"] != "confidence_threshold":
        fields["alg"] = given["alg"]
    else:
        fields |= {"threshold": given["threshold"], "filtered": True}
    return sd.Sampling(**fields, ban_ids=tuple(case.get("ban_ids", ())), history=True)


def canvas_of(case, mask_id, multiple, rows):
    """Canvas and key mask, padded on the left to a multiple of a length, rows repeated: few shapes,
    few programs.
    """
    prompt_BL = np.array(case["prompt_ids"], np.int32)
    new = case["settings"]["max_new_tokens"]
    token_BL = np.pad(prompt_BL, ((0, 0), (0, new)), constant_values=mask_id)
    see_BL = np.ones(token_BL.shape, bool)
    if case["attention_mask"] is not None:
        see_BL[:, : prompt_BL.shape[1]] = np.array(case["attention_mask"]) == 1
    left = ((0, 0), (-token_BL.shape[1] % multiple, 0))
    again = np.arange(max(rows, len(token_BL))) % len(token_BL)
    return np.pad(token_BL, left)[again], np.pad(see_BL, left)[again]


def uniforms(case, masked_BL):
    """The golden's draws, given for masked positions in row-major order, as an array over the
    canvas [S, B, L].
    """
    steps, eps = case["settings"]["steps"], case["settings"]["eps"]
    B, again = len(case["prompt_ids"]), np.arange(len(masked_BL)) % len(case["prompt_ids"])
    t, masked_BL = np.linspace(1, eps, steps + 1), masked_BL[:B].copy()
    u_SBL = np.ones((steps, *masked_BL.shape), np.float32)
    for step, draws in enumerate(case["draws"]):
        assert masked_BL.sum() == len(draws)
        u_SBL[step][masked_BL] = draws
        masked_BL &= u_SBL[step] >= (1 - t[step + 1] / t[step] if step < steps - 1 else 1)
    return u_SBL[:, again]


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn(sd.Sampler):
    """A Sampler for which the golden has drawn the uniform numbers of alg="origin"."""

    u_SBL: typing.Any = None
    __eq__, __hash__ = object.__eq__, object.__hash__  # each is a program of its own

    def uniform(self, given, tag, state, offset_BC, shape=()):
        return jnp.asarray(self.u_SBL)[state.step]


def check_case(model, case, mask_id, multiple=1, rows=1):
    """Run a case on a canvas padded to a multiple and compare everything that the golden file says
    of it.
    """
    name, (token_BL, see_BL) = case["name"], canvas_of(case, mask_id, multiple, rows)
    pad = token_BL.shape[1] - len(case["sequences"][0])
    # the reference writes these ids before the first step and after every step: they are given
    if "pin" in case:
        token_BL[:, np.array(case["pin"]["positions"]) + pad] = case["pin"]["ids"]
    with pytest.MonkeyPatch.context() as patch:
        if "draws" in case:
            drawn = {"u_SBL": uniforms(case, (token_BL == mask_id) & see_BL)}
            sampler_of = sd.sampler_of
            patch.setattr(sd, "sampler_of", lambda *args: Drawn(**vars(sampler_of(*args)), **drawn))
        got_BL, stats = sd.fill(model, token_BL, see_BL, settings_of(case), jax.random.key(0))
    B = len(case["prompt_ids"])
    for b, row_L in enumerate(got_BL):  # rows that are repeated are filled alike
        np.testing.assert_array_equal(row_L[pad:], case["sequences"][b % B], err_msg=name)

    # The canvas before the first step and after each: what was written by then, the other masks as
    # they were.
    got_BL, token_BL, see_BL, when_BL = (x[:B] for x in (got_BL, token_BL, see_BL, stats["when"]))
    steps = case["settings"]["steps"] if case["sampler"] == "diffusion" else stats["steps"]
    assert when_BL.max() <= steps, name
    written_SBL = (when_BL > 0) & (when_BL <= np.arange(steps + 1)[:, None, None])
    before_SBL = np.where(written_SBL, got_BL, token_BL)
    np.testing.assert_array_equal(before_SBL[-1], got_BL, err_msg=name)
    if "history" in case:
        np.testing.assert_array_equal(before_SBL[1:, :, pad:], case["history"], err_msg=name)
    if "masks_before_step" in case:
        masks_SB = ((before_SBL == mask_id) & see_BL).sum(-1)
        np.testing.assert_array_equal(masks_SB[:-1], case["masks_before_step"], err_msg=name)
        np.testing.assert_array_equal(masks_SB[-1], case["masks_at_end"], err_msg=name)
    if case["sampler"] == "diffusion":
        assert stats["forwards"] <= case["num_forwards"], name
    else:
        assert stats["forwards"] <= stats["steps"] == case["num_forwards"], name
    if "query_lengths" in case and stats["forwards"] == stats["steps"]:
        longest = max(case["query_lengths"])
        assert stats["windows"] == [n + pad * (n == longest) for n in case["query_lengths"]], name


KINDS = ("one row", "rows", "threshold")  # Fast-dLLM's windows: tests/extra/test_demos.py


def kind_of(case):
    if case["sampler"] == "block":
        return None
    if case["sampler"] == "threshold":
        return "threshold"
    return "one row" if len(case["prompt_ids"]) == 1 else "rows"


@pytest.mark.parametrize("kind", KINDS)
def test_every_generation_case_token_for_token(model, golden_dir, kind):
    golden = json.loads((golden_dir("dream") / "generate.json").read_text())
    assert model.cfg.mask_id == golden["mask_token_id"]
    assert golden["cases"]
    assert {kind_of(case) for case in golden["cases"]} <= {*KINDS, None}
    for case in golden["cases"]:
        if kind_of(case) == kind:
            rows = 3 if case["sampler"] == "diffusion" else 1
            check_case(model, case, golden["mask_token_id"], multiple=64, rows=rows)


@pytest.mark.slow
def test_a_case_of_each_kind_unpadded_in_small_chunks(golden_dir):
    """Logits made 3 positions at a time, attention in blocks of 4 queries, no padding but the
    case's own.
    """
    golden = json.loads((golden_dir("dream") / "generate.json").read_text())
    model, seen = from_hf(golden_dir("dream"), run=md.Compute(head_positions=3, block=4)), set()
    for case in golden["cases"]:
        kind = case["sampler"], case["settings"]["alg"]
        if kind not in seen and case["sampler"] != "block":
            check_case(model, case, golden["mask_token_id"])
        seen.add(kind)
    assert len(seen) > 1
