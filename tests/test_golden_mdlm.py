"""Reference values of masked diffusion: every case of every file, in NumPy, JAX under jit and compiled PyTorch."""

import math

import numpy as np
import pytest

import diffusion

pytestmark = pytest.mark.golden
PAD, MASK = 0, 3


@pytest.fixture
def load(golden_dir):
    return lambda name: np.load(golden_dir("mdlm") / f"{name}.npz")


def schedules(arrays):
    return sorted({name.split(".")[0] for name in arrays.files if name.split(".")[0] in diffusion.SCHEDULES})


def subs_log_probs(logits_BLV, xt_BL):
    """log p(x0 | xt) by substitution: MASK has probability 0, what is not masked keeps its token for sure."""
    xp = diffusion._namespace(logits_BLV)
    kept_BLV = xp.where(diffusion._ids(logits_BLV) == xt_BL[..., None], 0.0, -math.inf)
    masked_BLV = diffusion.log_softmax(diffusion.ban(logits_BLV, [MASK]))
    return xp.where((xt_BL == MASK)[..., None], masked_BLV, kept_BLV)


def posterior(logits_BLV, xt_BL, t_B, s_B, schedule):
    """q(x_s | x_t): a masked token stays MASK with keep_prob, else is drawn from p(x0 | xt). Ref: MDLM, eq. 6."""
    xp = diffusion._namespace(logits_BLV)
    prob_BLV = xp.exp(subs_log_probs(logits_BLV, xt_BL))
    keep_B11 = diffusion.keep_prob(t_B, s_B, schedule)[:, None, None]
    masked_BLV = xp.where(diffusion._ids(prob_BLV) == MASK, keep_B11, prob_BLV * (1 - keep_B11))
    return xp.where((xt_BL == MASK)[..., None], masked_BLV, prob_BLV)


def test_schedules(load, library):
    golden = load("schedules")
    assert schedules(golden) == sorted(diffusion.SCHEDULES)

    def all_of_them(t, t_positive, rate):  # one program for all schedules: it is compiled once
        return tuple(
            (diffusion.mask_rate(t, s), diffusion.mask_slope(t, s), diffusion.nelbo_weight(t_positive, s),
             diffusion.time_of_rate(rate, s))
            for s in schedules(golden)
        )  # fmt: skip

    got = library(all_of_them, golden["t"], golden["t_positive"], golden["rate"])
    for s, values in zip(schedules(golden), got, strict=True):
        for value, name in zip(values, ("mask_rate", "slope", "weight", "time_of_rate"), strict=True):
            library.close(value, golden[f"{s}.{name}"])
    assert library(lambda t: diffusion.mask_rate(t, "cosine"), np.ones(1)) == 1


def test_antithetic_times(load, library):
    golden = load("times")
    for name in golden.files:
        if name[0] == "u":
            library.close(library(diffusion.antithetic_times, golden[name]), golden[f"t{name[1:]}"])


def test_q_sample(load, library):
    golden = load("q_sample")
    x0, t, u, frozen = (golden[name] for name in ("x0", "t", "u", "frozen"))

    def all_of_them(x0, t, u, frozen):
        return tuple(
            diffusion.q_sample(x0, t, u, s, MASK, PAD) + diffusion.q_sample(x0, t, u, s, MASK, PAD, frozen)
            for s in schedules(golden)
        )

    for s, got in zip(schedules(golden), library(all_of_them, x0, t, u, frozen), strict=True):
        for value, name in zip(got, ("xt", "mask", "xt_frozen", "mask_frozen"), strict=True):
            np.testing.assert_array_equal(value, golden[f"{s}.{name}"])


def test_subs(load, library):
    golden = load("subs")
    got = library(subs_log_probs, golden["logits"], golden["xt"])
    finite = np.isfinite(golden["log_prob"])
    library.close(got[finite], golden["log_prob"][finite])
    assert (got[~finite] < -1e4).all()
    library.close(np.exp(got), golden["prob"])


def test_losses(load, library):
    golden = load("nelbo")
    logits, x0, mask, t = (golden[name] for name in ("logits", "x0", "mask", "t"))
    nll = library(lambda *a: diffusion.masked_nll(*a, MASK), logits, x0, mask)
    library.close(nll, golden["ce"])

    def all_of_them(nll, t, counted):
        return tuple(
            (diffusion.nelbo_per_sequence(nll, t, s), diffusion.nelbo_per_token(nll, t, counted, s),
             diffusion.nelbo_weight(t, s))
            for s in schedules(golden)
        )  # fmt: skip

    for s, got in zip(schedules(golden), library(all_of_them, nll, t, x0 != PAD), strict=True):
        for value, name in zip(got, ("nelbo_seq", "nelbo_token", "weight"), strict=True):
            library.close(value, golden[f"{s}.{name}"])
    library.close(library(diffusion.masked_cross_entropy, nll, mask), golden["masked_ce"])
    accuracy = library(lambda *a: diffusion.masked_accuracy(*a, MASK), logits, x0, mask)
    library.close(accuracy, golden["masked_accuracy"], atol=1e-7)
    assert mask.sum() / (x0 != PAD).sum() == pytest.approx(golden["realised_mask_rate"])


def test_masking_exactly_m_tokens_makes_the_bound_tight(load, library):
    golden = load("any_order")
    masks, weight = golden["masks"], golden["mask_weight"]
    for x0, logits, ce_sum, want in zip(golden["x0"], golden["logits"], golden["ce_sum"], golden["nll"], strict=True):
        x0 = np.broadcast_to(x0, masks.shape)
        nll = library(lambda *a: diffusion.masked_nll(*a, MASK), logits, x0, masks)
        library.close(nll.sum(-1), ce_sum)
        library.close(nll.sum(-1) @ weight, want)


def test_masking_exactly_m_tokens_estimates_the_likelihoods(load, library):
    golden, rng, draws = load("any_order"), np.random.default_rng(0), 40_000
    counted = np.ones((draws, golden["masks"].shape[1]), bool)
    u_B = diffusion.antithetic_times(rng.random(draws), eps=0)
    mask, weight = library(diffusion.mask_exactly, counted, u_B, rng.random(counted.shape))
    place = {tuple(m): i for i, m in enumerate(golden["masks"])}
    index = np.array([place[tuple(m)] for m in mask])
    for ce_sum, nll in zip(golden["ce_sum"], golden["nll"], strict=True):
        np.testing.assert_allclose((ce_sum[index] * weight).mean(), nll, rtol=0.02)


def test_reverse_process(load, library):
    golden = load("reverse")
    times = (np.full(len(golden["xt"]), golden[name]) for name in ("post_t", "post_s"))

    def all_of_them(t, before, logits, xt, post_t, post_s):
        return tuple(
            (diffusion.keep_prob(t, before, s), posterior(logits, xt, post_t, post_s, s)) for s in schedules(golden)
        )

    got = library(all_of_them, *(golden[name] for name in ("t", "s", "logits", "xt")), *times)
    for s, (keep, after) in zip(schedules(golden), got, strict=True):
        library.close(keep, golden[f"{s}.keep_prob"])
        library.close(after, golden[f"{s}.posterior"])
        for name in (name for name in golden.files if name.startswith(f"{s}.keep_grid.")):
            grid = 1 - np.arange(len(golden[name]) + 1) / len(golden[name])
            library.close(library(lambda *a, s=s: diffusion.keep_prob(*a, s), grid[:-1], grid[1:]), golden[name])


def test_step_counts(load):
    golden = load("counts")
    for name in golden.files:
        rule, masks, steps = name.split(".")
        got = diffusion.step_counts(int(masks), int(steps), rule)
        np.testing.assert_array_equal(got, golden[name], err_msg=name)
        both = diffusion.step_counts(np.array([int(masks), 7]), int(steps), rule)
        np.testing.assert_array_equal(both[:, 0], golden[name], err_msg=name)


def test_confidence_and_unmasking_the_surest(load, library):
    golden = load("confidence")
    logits, xt, k = (golden[name] for name in ("logits", "xt", "k"))
    for name in {name.split(".")[0] for name in golden.files if name.endswith(".score")}:
        kind = {"low_confidence": "max_prob"}.get(name, name)
        score = library(lambda x, kind=kind: diffusion.confidence(diffusion.softmax(x), kind), logits)
        masked = xt == MASK
        library.close(score[masked], golden[f"{name}.score"][masked], atol=1e-8)
        got = library(lambda *a: diffusion.unmask_top(a[0], a[1].argmax(-1), a[2], a[3], MASK), xt, logits, score, k)
        np.testing.assert_array_equal(got, golden[f"{name}.x_next"])


def test_filters(load, library):
    golden = load("filter")
    names = [name for name in golden.files if name != "logits"]
    rules = [[float(part[1:]) for part in name.split("_")] for name in names]

    def all_of_them(logits):
        return tuple(diffusion.softmax(diffusion.filter_logits(logits, t, int(k), p)) for t, k, p in rules)

    for name, got in zip(names, library(all_of_them, golden["logits"]), strict=True):
        library.close(got, golden[name])


def test_sampling_with_given_noise(load, library):
    golden = load("sample")
    logits, xt, u = (golden[name] for name in ("logits", "xt", "u_token"))
    for name in (name for name in golden.files if name.startswith("token.t")):
        t = float(name.removeprefix("token.t"))
        got = library(lambda *a, t=t: diffusion.sample_tokens(*a, t), logits, u)
        np.testing.assert_array_equal(got, golden[name])
    for s in schedules(golden):

        def step(xt, logits, u, u_keep, t, time, s=s):
            token = diffusion.sample_tokens(diffusion.ban(logits, [MASK]), u)
            return diffusion.ancestral_step(xt, token, u_keep, diffusion.keep_prob(t, time, s), MASK)

        times = (np.full(len(xt), golden[name]) for name in ("t", "s"))
        got = library(step, xt, logits, u, golden["u_keep"], *times)
        np.testing.assert_array_equal(got, golden[f"{s}.x_next"])
