"""Reference values of masked diffusion: every case of every file, in NumPy, JAX under jit and
compiled PyTorch.

What a test compiles is one program for all of its cases, as compiling takes nearly all of the time.
"""

import math

import numpy as np
import pytest
from conftest import special_ids

import diffusion

pytestmark = pytest.mark.golden


@pytest.fixture
def load(golden_dir):
    return lambda name: np.load(golden_dir("mdlm") / f"{name}.npz")


@pytest.fixture
def mask_id(golden_dir):
    return special_ids(golden_dir("mdlm"))[0]


@pytest.fixture
def pad_id(golden_dir):
    return special_ids(golden_dir("mdlm"))[1]


def schedules(arrays):
    names = {name.split(".")[0] for name in arrays.files}
    found = sorted(names & diffusion.SCHEDULES.keys())
    assert found
    return found


def subs_log_probs(logits_BLV, xt_BL, mask_id):
    """log p(x0 | xt) by substitution: MASK has probability 0, what is not masked keeps its token
    for sure.
    """
    xp = diffusion._namespace(logits_BLV)
    kept_BLV = xp.where(diffusion._ids(logits_BLV) == xt_BL[..., None], 0.0, -math.inf)
    masked_BLV = diffusion.log_softmax(diffusion.ban(logits_BLV, [mask_id]))
    return xp.where((xt_BL == mask_id)[..., None], masked_BLV, kept_BLV)


def posterior(logits_BLV, xt_BL, t_B, s_B, schedule, mask_id):
    """q(x_s | x_t): a masked token stays MASK with keep_prob, else is drawn from p(x0 | xt). Ref:
    MDLM, eq. 6.
    """
    xp = diffusion._namespace(logits_BLV)
    prob_BLV = xp.exp(subs_log_probs(logits_BLV, xt_BL, mask_id))
    keep_B11 = diffusion.keep_prob(t_B, s_B, schedule)[:, None, None]
    masked_BLV = xp.where(diffusion._ids(prob_BLV) == mask_id, keep_B11, prob_BLV * (1 - keep_B11))
    return xp.where((xt_BL == mask_id)[..., None], masked_BLV, prob_BLV)


def test_schedules(load, library):
    golden = load("schedules")
    assert schedules(golden) == sorted(diffusion.SCHEDULES)

    def all_of_them(t, t_positive):
        results = []
        for s in schedules(golden):
            slope, weight = diffusion.SCHEDULES[s].slope(t), diffusion.nelbo_weight(t_positive, s)
            results.append((diffusion.mask_rate(t, s), slope, weight))
        return tuple(results)

    got = library(all_of_them, golden["t"], golden["t_positive"])
    names = ("mask_rate", "slope", "weight")
    for s, values in zip(schedules(golden), got, strict=True):
        for value, name in zip(values, names, strict=True):
            library.close(value, golden[f"{s}.{name}"])
    assert library(lambda t: diffusion.mask_rate(t, "cosine"), np.ones(1)) == 1


def test_antithetic_times(load, library):
    golden = load("times")
    names = [name for name in golden.files if name[0] == "u"]
    arrays = (golden[name] for name in names)
    got = library(lambda *u: tuple(map(diffusion.antithetic_times, u)), *arrays)
    for name, t in zip(names, got, strict=True):
        library.close(t, golden[f"t{name[1:]}"])


def test_q_sample(load, library, mask_id, pad_id):
    golden = load("q_sample")
    x0, t, u, frozen = (golden[name] for name in ("x0", "t", "u", "frozen"))

    def all_of_them(x0, t, u, frozen):
        return tuple(
            diffusion.q_sample(x0, t, u, s, mask_id, pad_id)
            + diffusion.q_sample(x0, t, u, s, mask_id, pad_id, frozen)
            for s in schedules(golden)
        )

    for s, got in zip(schedules(golden), library(all_of_them, x0, t, u, frozen), strict=True):
        for value, name in zip(got, ("xt", "mask", "xt_frozen", "mask_frozen"), strict=True):
            np.testing.assert_array_equal(value, golden[f"{s}.{name}"])


def test_subs(load, library, mask_id):
    golden = load("subs")
    got = library(lambda *a: subs_log_probs(*a, mask_id), golden["logits"], golden["xt"])
    finite = np.isfinite(golden["log_prob"])
    library.close(got[finite], golden["log_prob"][finite])
    assert (got[~finite] < -1e4).all()
    library.close(np.exp(got), golden["prob"])


def test_losses(load, library, mask_id, pad_id):
    golden = load("nelbo")
    logits, x0, mask, t = (golden[name] for name in ("logits", "x0", "mask", "t"))

    def all_of_them(logits, x0, mask, t, counted):
        nll = diffusion.masked_nll(logits, x0, mask, mask_id)
        bounds = []
        for s in schedules(golden):
            weight = diffusion.nelbo_weight(t, s)
            bound = diffusion.nelbo_per_token(nll, t, counted, s)
            bounds.append((weight * nll.sum(-1), bound, weight))
        accuracy = diffusion.masked_accuracy(logits, x0, mask, mask_id)
        return nll, nll.sum() / mask.sum(), accuracy, tuple(bounds)

    nll, masked_ce, accuracy, bounds = library(all_of_them, logits, x0, mask, t, x0 != pad_id)
    library.close(nll, golden["ce"])
    library.close(masked_ce, golden["masked_ce"])
    library.close(accuracy, golden["masked_accuracy"], atol=1e-7)
    for s, got in zip(schedules(golden), bounds, strict=True):
        for value, name in zip(got, ("nelbo_seq", "nelbo_token", "weight"), strict=True):
            library.close(value, golden[f"{s}.{name}"])
    assert mask.sum() / (x0 != pad_id).sum() == pytest.approx(golden["realised_mask_rate"])


def test_masking_exactly_m_tokens_makes_the_bound_tight(load, library, mask_id):
    golden = load("any_order")
    masks, weight = golden["masks"], golden["mask_weight"]
    x0, all_masks = np.broadcast_arrays(golden["x0"][:, None], masks)
    got = library(lambda *a: diffusion.masked_nll(*a, mask_id), golden["logits"], x0, all_masks)
    for nll, ce_sum, want in zip(got, golden["ce_sum"], golden["nll"], strict=True):
        library.close(nll.sum(-1), ce_sum)
        library.close(nll.sum(-1) @ weight, want)


def test_masking_exactly_m_tokens_estimates_the_likelihoods(load, library):
    golden, rng, draws = load("any_order"), np.random.default_rng(0), 40_000
    counted = np.ones((draws, golden["masks"].shape[1]), bool)
    u_B = diffusion.antithetic_times(rng.random(draws), eps=0)
    mask, weight = library(diffusion.mask_exactly, counted, u_B, rng.random(counted.shape))
    place = {tuple(m): i for i, m in enumerate(golden["masks"])}
    index = np.array([place[tuple(m)] for m in mask])
    held = golden["masks"].sum(1)
    chance = golden["mask_weight"] * held / counted.shape[1]  # of each mask
    for ce_sum, nll in zip(golden["ce_sum"], golden["nll"], strict=True):
        deviation = (chance @ (ce_sum * counted.shape[1] / held - nll) ** 2) ** 0.5
        error = 5 * deviation / draws**0.5
        np.testing.assert_allclose((ce_sum[index] * weight).mean(), nll, rtol=0, atol=error)


def test_reverse_process(load, library, mask_id):
    golden = load("reverse")
    times = (np.full(len(golden["xt"]), golden[name]) for name in ("post_t", "post_s"))
    grids = [name for name in golden.files if ".keep_grid." in name]
    ends = [1 - np.arange(len(golden[name]) + 1) / len(golden[name]) for name in grids]

    def all_of_them(t, before, logits, xt, post_t, post_s, *ends):
        keep = tuple(diffusion.keep_prob(t, before, s) for s in schedules(golden))
        after = tuple(posterior(logits, xt, post_t, post_s, s, mask_id) for s in schedules(golden))
        on_grids = []
        for end, name in zip(ends, grids, strict=True):
            on_grids.append(diffusion.keep_prob(end[:-1], end[1:], name.split(".")[0]))
        return keep, after, tuple(on_grids)

    inputs = (golden[name] for name in ("t", "s", "logits", "xt"))
    got = library(all_of_them, *inputs, *times, *ends)
    for s, keep, after in zip(schedules(golden), *got[:2], strict=True):
        library.close(keep, golden[f"{s}.keep_prob"])
        library.close(after, golden[f"{s}.posterior"])
    for name, keep in zip(grids, got[2], strict=True):
        library.close(keep, golden[name])


def test_step_counts(load):
    golden = load("counts")
    for name in golden.files:
        rule, masks, steps = name.split(".")
        got = diffusion.step_counts(int(masks), int(steps), rule)
        np.testing.assert_array_equal(got, golden[name], err_msg=name)
        both = diffusion.step_counts(np.array([int(masks), 7]), int(steps), rule)
        np.testing.assert_array_equal(both[:, 0], golden[name], err_msg=name)


def test_confidence_and_unmasking_the_surest(load, library, mask_id):
    golden = load("confidence")
    logits, xt, k = (golden[name] for name in ("logits", "xt", "k"))
    names = sorted({name.split(".")[0] for name in golden.files if name.endswith(".score")})

    def all_of_them(logits, xt, k):
        kinds = [{"low_confidence": "max_prob"}.get(name, name) for name in names]
        scores = [diffusion.confidence(diffusion.softmax(logits), kind) for kind in kinds]
        best = logits.argmax(-1)
        return tuple((x, diffusion.unmask_top(xt, best, x, k, mask_id)) for x in scores)

    for name, (score, after) in zip(names, library(all_of_them, logits, xt, k), strict=True):
        masked = xt == mask_id
        library.close(score[masked], golden[f"{name}.score"][masked], atol=1e-8)
        np.testing.assert_array_equal(after, golden[f"{name}.x_next"])


def test_filters(load, library):
    golden = load("filter")
    names = [name for name in golden.files if name != "logits"]
    rules = [[float(part[1:]) for part in name.split("_")] for name in names]

    def all_of_them(logits):
        filtered = [diffusion.filter_logits(logits, t, int(k), p) for t, k, p in rules]
        return tuple(map(diffusion.softmax, filtered))

    for name, got in zip(names, library(all_of_them, golden["logits"]), strict=True):
        library.close(got, golden[name])


def test_sampling_with_given_noise(load, library, mask_id):
    golden = load("sample")
    names = [name for name in golden.files if name.startswith("token.t")]
    times = (np.full(len(golden["xt"]), golden[name]) for name in ("t", "s"))

    def all_of_them(xt, logits, u, u_keep, t, time):
        token = diffusion.sample_tokens(diffusion.ban(logits, [mask_id]), u)
        keeps = [diffusion.keep_prob(t, time, s) for s in schedules(golden)]
        temperatures = [float(name.removeprefix("token.t")) for name in names]
        tokens = tuple(diffusion.sample_tokens(logits, u, each) for each in temperatures)
        after = [diffusion.ancestral_step(xt, token, u_keep, keep, mask_id) for keep in keeps]
        return tokens, tuple(after)

    inputs = (golden[name] for name in ("xt", "logits", "u_token", "u_keep"))
    tokens, after = library(all_of_them, *inputs, *times)
    for name, got in zip(names, tokens, strict=True):
        np.testing.assert_array_equal(got, golden[name])
    for s, got in zip(schedules(golden), after, strict=True):
        np.testing.assert_array_equal(got, golden[f"{s}.x_next"])
