"""Reference values of block diffusion (tests/golden/block/README.md): every case of what our
scripts use.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import from_hf
from flax import nnx
from safetensors.numpy import load_file

import checkpoints
import convert_weights
import diffusion
import model_dream as md
import sample_block

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls")]


@pytest.fixture(scope="module")
def block(golden_dir):
    """The lists of cases."""
    return json.loads((golden_dir("block") / "block.json").read_text())


@pytest.fixture(scope="module")
def params(golden_dir):
    """(architecture, parameters) of the model."""
    model = from_hf(golden_dir("block"))
    return model.cfg, nnx.to_pure_dict(nnx.state(model))


def built(params, **changes):
    """The model with other settings of its architecture."""
    cfg, weights = params
    return nnx.merge(md.graph_of(dataclasses.replace(cfg, **changes), md.Compute()), weights)


def positions(segment_BL):
    """How far each token is from the first of its document, 0 in padding."""
    position_BL = np.zeros_like(segment_BL)
    for row, segment_L in zip(position_BL, segment_BL, strict=True):
        for i in range(1, len(row)):
            row[i] = (row[i - 1] + 1) * (segment_L[i] == segment_L[i - 1] > 0)
    return position_BL


def tensors(path, name):
    """The tensors of a case."""
    return {
        key[len(name) + 1 :]: x for key, x in load_file(path).items() if key.startswith(f"{name}.")
    }


# ---- who sees whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_every_mask_of_noised_and_clean_rows_and_of_sampling(block, golden_dir, library):
    namespace = pytest.importorskip("jax.numpy" if library == "jax" else library)
    sees = jax.jit(diffusion.sees) if library == "jax" else diffusion.sees
    assert block["masks"]
    for case in block["masks"]:
        name, arrays = (
            case["name"],
            tensors(golden_dir("block") / "masks.safetensors", case["name"]),
        )
        segment_L = arrays["segment_L"]
        block_L = positions(segment_L[None])[0] // case["block"]
        copies = np.repeat([True, False], len(segment_L))
        twice = [np.tile(x, 2) for x in (segment_L, block_L)]
        for want, place in (("train", (*twice, copies)), ("sample", (segment_L, block_L))):
            place = diffusion.Place(*map(namespace.asarray, place))
            got, real = np.asarray(sees(place, place)), np.asarray(place.document) > 0
            np.testing.assert_array_equal(
                got[real], arrays[want][real] == 1, err_msg=f"{name} {want}"
            )


@pytest.mark.slow
def test_the_rows_of_a_causal_model_attend_as_nbdiff_s(block, golden_dir, params):
    """Both readings are those of a pass over [noised; clean] under the explicit mask."""
    model, checked = built(params, causal=True, shift=False), 0
    readings = jax.jit(lambda model, *args: model.readings(*args))
    hidden = jax.jit(lambda model, *args, **at: model.hidden(*args, **at))
    for case in block["masks"]:
        arrays = tensors(golden_dir("block") / "masks.safetensors", case["name"])
        if "context_causal" not in arrays:
            continue
        segment_BL, L = arrays["segment_L"][None], case["length"]
        noised_BL, token_BL = np.random.default_rng(0).integers(0, model.cfg.vocab, (2, 1, L))
        position_BL = positions(segment_BL)
        got, before = readings(model, noised_BL, token_BL, segment_BL, position_BL, case["block"])
        place = diffusion.Place(np.ones((1, 2 * L), int), seen=arrays["context_causal"][None] == 1)
        row = np.concatenate((noised_BL, token_BL), 1), np.concatenate((position_BL,) * 2, 1)
        want, _ = hidden(model, *row, place=place)
        real = segment_BL[0] > 0
        np.testing.assert_allclose(got[0, real], want[0, :L][real], atol=2e-5, err_msg=case["name"])
        np.testing.assert_allclose(
            np.roll(before, -1, 1)[0, real], want[0, L:][real], atol=2e-5, err_msg=case["name"]
        )
        checked += 1
    assert checked


# ---- losses --------------------------------------------------------------------------------------------------------

nll = jax.jit(lambda model, *args: model.nll(*args))


@jax.jit
def noisy_nll(model, token_BL, mask_BL, segment_BL, position_BL, block):
    """nll with the first token of a block predicted from the noised row, as in Fast-dLLM v2's
    training.
    """
    noised_BL = jnp.where(mask_BL, model.cfg.mask_id, token_BL)
    unshifted = nnx.merge(
        md.graph_of(dataclasses.replace(model.cfg, shift=False), model.compute), nnx.state(model)
    )
    hidden_BLD = unshifted.readings(noised_BL, token_BL, segment_BL, position_BL, block)[0]
    before_BLD = jnp.roll(hidden_BLD, 1, 1)
    hidden_BLD = jnp.where(md.first_of_document(segment_BL)[..., None], hidden_BLD, before_BLD)
    return model.token_nll(hidden_BLD, token_BL, mask_BL)


bound = jax.jit(lambda model, *args: model.nelbo(*args))
exact = jax.jit(lambda model, *args: model.exact_nll(*args))
autoregressive = jax.jit(lambda model, *args: model.ar_nll(*args))


def test_every_loss_token_for_token(block, golden_dir, params):
    assert block["losses"]
    for case in block["losses"]:
        name, arrays = case["name"], tensors(golden_dir("block") / "loss.safetensors", case["name"])
        token_BL, segment_BL, fixed_BL, t_BL, u_BL = (
            arrays[f"{key}_BL"] for key in ("token", "segment", "fixed", "t", "u")
        )
        counted_BL = np.asarray(md.counted(segment_BL, fixed_BL))
        mask_BL = counted_BL & (u_BL < t_BL)
        np.testing.assert_array_equal(mask_BL, arrays["mask_BL"] == 1, err_msg=name)
        model = built(params, shift=case["shift"] != "none")
        noisy = case["shift"] == "noisy"
        where = segment_BL, positions(segment_BL), case["block"]
        got_BL = np.asarray((noisy_nll if noisy else nll)(model, token_BL, mask_BL, *where))
        np.testing.assert_allclose(got_BL, arrays["nll_BL"], atol=2e-4, rtol=0, err_msg=name)
        assert (got_BL / np.maximum(t_BL, 1e-9))[mask_BL].sum() == pytest.approx(
            case["nelbo"], rel=2e-5
        ), name
        assert counted_BL.sum() == case["counted"], name
        assert mask_BL.sum() == case["masked"], name
        assert got_BL[mask_BL].mean() == pytest.approx(case["cross_entropy"], rel=2e-5), name
        if not noisy:  # as the trainer's bound
            model = built(params, shift=case["shift"] != "none", block_length=case["block"])
            got = bound(model, token_BL, *where[:2], t_BL, u_BL, fixed_BL)
            assert float(got) == pytest.approx(case["nelbo"], rel=2e-5), name


def test_every_exact_bound_token_for_token(block, golden_dir, params):
    assert block["exact"]
    for case in block["exact"]:
        name, arrays = case["name"], tensors(golden_dir("block") / "loss.safetensors", case["name"])
        model = built(params, shift=case["shift"] != "none", block_length=case["block"])
        token_BL = arrays["token_BL"]
        segment_BL = np.ones_like(token_BL)
        got_L = np.asarray(exact(model, token_BL, segment_BL, positions(segment_BL)))[0]
        np.testing.assert_allclose(got_L, arrays["exact_nll_L"], atol=2e-4, rtol=0, err_msg=name)
        starts = range(0, case["length"], case["block"])
        np.testing.assert_allclose(
            np.add.reduceat(got_L, starts), case["block_nelbo"], rtol=2e-5, err_msg=name
        )
        assert got_L.sum() == pytest.approx(case["nelbo"], rel=2e-5), name


def test_autoregressive_nll_is_that_of_the_causal_model(block, golden_dir, params):
    files = [
        tensors(golden_dir("block") / "loss.safetensors", case["name"]) for case in block["losses"]
    ]
    cases = [arrays for arrays in files if "ar_nll_BL" in arrays]
    assert cases
    for arrays in cases:
        segment_BL, mask_BL = arrays["segment_BL"], arrays["mask_BL"] == 1
        got_BL = np.asarray(
            autoregressive(
                built(params), arrays["token_BL"], mask_BL, segment_BL, positions(segment_BL)
            )
        )
        np.testing.assert_allclose(got_BL, arrays["nll_BL"], atol=2e-4, rtol=0)
        later_BL = mask_BL & (positions(segment_BL) > 0)
        np.testing.assert_allclose(
            got_BL[later_BL], arrays["ar_nll_BL"][later_BL], atol=2e-4, rtol=0
        )


# ---- attention on its way from causal to both ways -----------------------------------------------------------------


def test_every_annealed_mask_and_the_logits_under_it(block, golden_dir, params):
    assert block["anneal"]
    model = built(params)
    logits = jax.jit(lambda model, *args, **at: model.logits(model.hidden(*args, **at)[0]))
    for case in block["anneal"]:
        arrays = tensors(golden_dir("block") / "rules.safetensors", case["name"])
        want = arrays["see_LL"] == 1
        for namespace in (np, jnp, torch):
            seen_LL = diffusion.annealed(
                namespace.asarray(arrays["u_LL"]), np.float32(case["ratio"])
            )
            np.testing.assert_array_equal(np.asarray(seen_LL), want, err_msg=case["name"])
        token_BL = arrays["token_L"][None]
        place = diffusion.Place(np.ones_like(token_BL), seen=want[None])
        want = arrays["logits_last4"]
        got = np.asarray(logits(model, token_BL, place=place))[0, -len(want) :]
        np.testing.assert_allclose(
            got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=case["name"]
        )


# ---- mask rates ----------------------------------------------------------------------------------------------------


def test_every_mask_rate_and_weight(block):
    # narrower ranges and warm-ups of the rate left with the training options
    whole = [case for case in block["clipped"] if case["high"] == 1 and case["low"] <= 0.5]
    for case in whole:
        t, weight = diffusion.block_noise(np.float64(case["u"]), eps=case["low"])
        assert t == pytest.approx(case["t"], rel=1e-6), case
        assert weight == pytest.approx(case["weight"], rel=1e-6), case
    for case in block["block_clipped"]:
        t, weight = diffusion.block_noise(np.float64(case["u"]), 1 / case["block"], eps=0.0)
        assert t == pytest.approx(case["rate"], rel=1e-6), case
        assert weight == pytest.approx(1 / case["rate"], rel=1e-6), case
    assert whole
    assert block["block_clipped"]


# ---- sampling ------------------------------------------------------------------------------------------------------


def test_every_schedule_of_tokens_per_step(block):
    names = {"dllm": "block", "sdar": "even"}
    assert block["schedules"]
    for case in block["schedules"]:
        counts = diffusion.step_counts(case["masks"], case["steps"], names[case["rule"]])
        assert [n for n in counts.tolist() if n or case["rule"] == "sdar"] == case["counts"], case


@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_every_entropy_bound(block, golden_dir, library):
    namespace = pytest.importorskip("jax.numpy" if library == "jax" else library)
    assert block["entropy_bound"]
    for case in block["entropy_bound"]:
        arrays = tensors(golden_dir("block") / "rules.safetensors", case["name"])
        masked = namespace.asarray(arrays["masked"] == 1)
        entropy = -diffusion.confidence(
            diffusion.softmax(namespace.asarray(arrays["logits"])), "entropy"
        )
        np.testing.assert_allclose(entropy, arrays["entropy"], atol=1e-5)
        for i, bound in enumerate(case["bounds"]):
            got = np.asarray(diffusion.entropy_bound(entropy, masked, bound))
            np.testing.assert_array_equal(
                got, arrays[f"entropy.{i}"] == 1, err_msg=f"{case['name']} {bound}"
            )


def rule_of(settings):
    """A golden case's settings as ours."""
    fields = {"threshold": {"threshold": settings.get("threshold")}}
    fields["entropy_bound"] = {"entropy_bound": settings.get("entropy_bound")}
    schedule = {"dllm": "block", "sdar": "even"}.get(settings.get("schedule"))
    fields["schedule"] = {"steps": settings["steps_per_block"], "schedule": schedule}
    eos_ids = () if settings["eos_id"] is None else (settings["eos_id"],)
    return sample_block.Sampling(settings["block"], eos_ids=eos_ids, **fields[settings["rule"]])


@dataclasses.dataclass(frozen=True)
class Published(sample_block.Sampler):
    """Our Sampler with what some published samplers do beside it.

    first_argmax: the first step of a block fills its first position alone. sub_block: of the
    positions only those of the first sub-block with a mask are open.
    """

    first_argmax: bool = False
    sub_block: int = 0

    def choose(self, masked_BN, prob_BN, entropy_BN, given, masks_B, i):
        slot_N = jnp.arange(masked_BN.shape[1])
        first_BN = masked_BN & (slot_N == 0)
        if self.sub_block:
            sub_N = slot_N // self.sub_block
            masked_BN &= sub_N == jnp.where(masked_BN, sub_N, len(slot_N)).min(-1, keepdims=True)
        chosen_BN = super().choose(
            masked_BN, prob_BN, entropy_BN, given, masks_B, i - self.first_argmax
        )
        return jnp.where(self.first_argmax & (i == 0), first_BN, chosen_BN)


def prepare_behind_prompts(*args, prepare=sample_block.prepare):
    """sample_block.prepare with each whole prompt as a block, and blocks of its length behind."""
    state, given, _ = prepare(*args)
    N, L = args[1].block_length, state.token_BL.shape[1]
    prompt_B = np.where(given.made_BL.any(-1), given.made_BL.argmax(-1), 0)
    block_BL = np.maximum((np.arange(L) - prompt_B[:, None] + N) // N, 0)
    return state, given._replace(block_BL=block_BL, first_B=prompt_B), L


def sample(model, settings, prompts, widths):
    """(rows, stats) of a golden case."""
    N, rule = settings["block"], rule_of(settings)
    lengths = [len(prompt) + settings["max_new"] for prompt in prompts]
    if settings["last_block"] == "full":  # more masks, and the text is cut
        starts = [len(prompt) * (settings["border"] == "prompt") for prompt in prompts]
        lengths = [start - (start - n) // N * N for start, n in zip(starts, lengths, strict=True)]
    mask = model.cfg.mask_id
    canvases = [
        prompt + [mask] * (n - len(prompt)) for prompt, n in zip(prompts, lengths, strict=True)
    ]
    published = {"first_argmax": settings["first"] == "argmax", "sub_block": settings["sub_block"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_block, "Sampler", functools.partial(Published, **published))
        if settings["border"] == "prompt":
            patch.setattr(sample_block, "prepare", prepare_behind_prompts)
        rows, stats = sample_block.generate(model, canvases, 0, rule, widths=widths, rows=3)
    return [
        row[: len(prompt) + settings["max_new"]] for row, prompt in zip(rows, prompts, strict=True)
    ], stats


@pytest.mark.parametrize("some", [slice(2), pytest.param(slice(None), marks=pytest.mark.slow)])
def test_every_text_token_for_token_with_the_steps_and_passes_of_the_oracle(block, params, some):
    cases = block["samples"][some]
    assert cases
    # In rows of one length most cases of a block length share their programs.
    sizes = [
        len(prompt) + case["settings"]["max_new"] for case in cases for prompt in case["prompts"]
    ]
    for case in cases:
        name, settings, prompts = case["name"], case["settings"], case["prompts"]
        # the oracle counts from behind that step
        N, earlier = settings["block"], settings["first"] == "argmax"
        rows, stats = sample(
            built(params, shift=settings["shift"]), settings, prompts, (max(sizes) + N,)
        )
        for b, prompt in enumerate(prompts):
            text = rows[b][len(prompt) :]
            if settings["eos_id"] in text:
                text = text[: text.index(settings["eos_id"]) + 1]
            assert text == case["text"][b], (name, b)
            # A row goes through its blocks side by side with the others: when a step was, counted
            # from its block.
            offset = 0 if settings["border"] == "absolute" else len(prompt)
            first = offset + (len(prompt) - offset) // N * N
            when, steps, passes = stats["when"][b], [], []
            for i, begun in enumerate(stats["begun"]):
                of_block = when[first + i * N :][:N] - begun - earlier
                passes.append(int(of_block.max(initial=0)))
                given = max(0, len(prompt) - first - i * N)
                steps += of_block.tolist()[given:]
            assert steps[: len(text)] == case["step"][b], (name, b)
            assert [n for n in passes if n > 0] == case["forwards"][b], (name, b)
            assert stats["begun"][0] == 0


# ---- a Qwen2 becomes a Dream ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(golden_dir, tmp_path_factory):
    """(folder of the Qwen2, folder of the Dream that convert_weights.py made of it)."""
    source, out = golden_dir("block") / "ar", tmp_path_factory.mktemp("ar") / "dream"
    convert_weights.main(convert_weights.Config(source=str(source), to="dream", out=str(out)))
    return source, out


def test_a_converted_qwen2_has_a_row_for_mask_and_every_other_byte(block, converted):
    source, out = converted
    model, _ = checkpoints.load(md, out)
    assert (model.cfg.mask_id, model.cfg.vocab) == tuple(
        block["conversion"][k] for k in ("mask_token_id", "vocab_size")
    )
    rows = {
        key[4:]: row
        for key, row in load_file(source / "expected.safetensors").items()
        if key.startswith("row.")
    }
    tensors, got = (
        load_file(source / "model.safetensors"),
        checkpoints.flatten(nnx.to_pure_dict(nnx.state(model))),
    )
    assert {convert_weights.hf_name(name) for name in got} == tensors.keys()
    for name, array in got.items():
        name, array = convert_weights.hf_name(name), np.asarray(array)
        if name in rows:
            np.testing.assert_allclose(
                array[model.cfg.mask_id], rows.pop(name), rtol=0, atol=1e-6, err_msg=name
            )
            array = np.delete(array, model.cfg.mask_id, 0)
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)
    assert not rows


def test_a_converted_qwen2_computes_what_it_did_and_looks_both_ways_if_asked(converted):
    source, out = converted
    model, arrays = checkpoints.load(md, out)[0], load_file(source / "expected.safetensors")

    @functools.partial(jax.jit, static_argnums=2)
    def logits(model, token_BL, causal):
        position_BL = jnp.broadcast_to(jnp.arange(token_BL.shape[1]), token_BL.shape)
        place = diffusion.Place(jnp.ones_like(token_BL), position_BL) if causal else None
        return model.logits(model.hidden(token_BL, place=place)[0])

    for case, causal in (("causal", True), ("both_ways", False)):
        want = arrays[f"{case}.logits"]
        got = logits(model, arrays[f"{case}.token_BL"], causal)[..., : want.shape[-1]]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=case)


def test_a_converted_qwen2_writes_its_greedy_text_in_blocks_of_one(block, converted):
    model, cases = checkpoints.load(md, converted[1])[0], block["conversion"]["greedy"]
    assert model.cfg.block_length == 1
    assert cases
    new = max(len(case["text"]) for case in cases)
    rows, _ = sample_block.generate(model, [case["prompt"] for case in cases], new)
    for row, case in zip(rows, cases, strict=True):
        assert row[len(case["prompt"]) :][: len(case["text"])] == case["text"]
