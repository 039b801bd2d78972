"""Properties of masked diffusion that need no reference values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import diffusion

PAD, MASK, V = 0, 3, 12
RULES = (*diffusion.SCHEDULES, "even", "dream", "block")


def test_rate_times_weight_is_the_slope_which_integrates_to_one():
    t = (np.arange(10_000) + 0.5) / 10_000
    for s, schedule in diffusion.SCHEDULES.items():
        rate = diffusion.mask_rate(t, s)
        np.testing.assert_allclose(rate * diffusion.nelbo_weight(t, s), schedule.slope(t))
        assert schedule.slope(t).mean() == pytest.approx(1, abs=1e-6)
        assert diffusion.mask_rate(0.0, s) == 0
        assert diffusion.mask_rate(1.0, s) == 1


def test_strata_of_float64_times_are_float64_in_every_library():
    u = np.random.default_rng(0).random(3)
    got = diffusion.antithetic_times(torch.from_numpy(u))
    np.testing.assert_allclose(got, diffusion.antithetic_times(u), rtol=1e-15)


@pytest.mark.parametrize("schedule", diffusion.SCHEDULES)
def test_a_uniform_prediction_costs_log_of_the_real_ids_whatever_the_schedule(schedule):
    rng = np.random.default_rng(0)
    B, L = 4096, 16
    x0 = rng.integers(4, V, (B, L))
    x0[:, 12:] = np.where(rng.random((B, 1)) < 0.5, PAD, x0[:, 12:])
    t = diffusion.antithetic_times(rng.random(B))
    _, mask = diffusion.q_sample(x0, t, rng.random((B, L)), schedule, MASK, PAD)
    nll = diffusion.masked_nll(np.zeros((B, L, V)), x0, mask, MASK)
    got = diffusion.nelbo_per_token(nll, t, x0 != PAD, schedule)
    assert got == pytest.approx(math.log(V - 1), rel=0.03)
    assert nll.sum() / mask.sum() == pytest.approx(math.log(V - 1))


def test_counts_sum_to_the_masks_and_are_never_negative():
    for rule in RULES:
        for steps in (1, 2, 7, 25, 300):
            counts = diffusion.step_counts(np.array([0, 1, 6, 64, 255]), steps, rule)
            assert counts.shape == (steps, 5)
            assert (counts >= 0).all()
            np.testing.assert_array_equal(counts.sum(0), [0, 1, 6, 64, 255])


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 0.3])
def test_dream_unmasks_by_the_grid_of_torch(eps):
    for steps in (*range(1, 65), 100, 128, 256, 511, 768):
        t = torch.linspace(1, eps, steps + 1)
        share = (1 - t[1:] / t[:-1]).numpy()
        share[-1] = 1
        np.testing.assert_array_equal(diffusion.dream_shares(steps, eps), share)
        masks = np.arange(0, 769, 31)
        left = torch.from_numpy(masks)
        for i, count in enumerate(diffusion.step_counts(masks, steps, "dream", eps)):
            want = (left * (1 - t[i + 1] / t[i])).int() if i < steps - 1 else left
            assert count.tolist() == want.tolist(), (steps, i)
            left = left - want


def test_blocks_unmask_by_the_float32_shares_of_dllm():
    for steps in range(1, 65):
        left = torch.arange(65)
        for i, count in enumerate(diffusion.step_counts(left.numpy(), steps, "block")):
            # alpha = 1 - t in float32, as dllm's LinearAlphaScheduler has it
            alpha_s = 1 - torch.tensor((steps - i - 1) / steps)
            alpha_t = 1 - torch.tensor((steps - i) / steps)
            share = 1 - ((1 - alpha_s) / (1 - alpha_t)).item()
            want = torch.round(left.double() * share).long()
            assert count.tolist() == want.tolist(), (steps, i)
            left = left - want


@pytest.mark.parametrize("temperature", [1e-10, 1e-30, 1e-37, 1e-39, 1e-45, 1e-60, 1e-320])
@pytest.mark.parametrize("namespace", [np, jnp, torch], ids=["numpy", "jax", "torch"])
def test_a_tiny_temperature_takes_the_argmax(namespace, temperature):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 30, (64, 9)).astype(np.float32)
    logits[:32] = -np.abs(logits[:32])
    logits[:, 4] = -math.inf
    u = namespace.asarray(rng.random(logits.shape, np.float32))
    one_each = namespace.asarray(np.full((64, 1), temperature, np.float32))  # that of a row
    for each in (temperature, one_each):
        for rule in ("mdlm", "dream"):
            how = {"top_k": 5, "top_p": 0.9, "rule": rule}
            kept = diffusion.filter_logits(namespace.asarray(logits), each, **how)
            assert diffusion.sample_tokens(kept, u).tolist() == logits.argmax(-1).tolist()
    got = diffusion.sample_tokens(namespace.asarray(logits), u, temperature)
    assert got.tolist() == logits.argmax(-1).tolist()


def test_pad_and_frozen_positions_survive_full_noise():
    x0 = np.array([[1, 5, 6, PAD], [1, 7, PAD, PAD]])
    frozen = x0 == 1
    u = np.full((2, 4), 0.999)
    xt, mask = diffusion.q_sample(x0, np.ones(2), u, "cosine", MASK, PAD, frozen)
    assert xt.tolist() == [[1, MASK, MASK, PAD], [1, MASK, PAD, PAD]]
    assert mask.sum() == 3


def test_unmasking_takes_the_lower_index_of_equals_and_never_more_than_there_is():
    xt = np.array([[MASK, 9, MASK, MASK], [9, 9, MASK, 9], [MASK] * 4])
    token = np.arange(12).reshape(3, 4) + 20
    got = diffusion.unmask_top(xt, token, np.ones((3, 4)), np.array([2, 3, 0]), MASK)
    assert got.tolist() == [[20, 9, 22, MASK], [9, 9, 26, 9], [MASK] * 4]


def test_masking_exactly_m_tokens_leaves_what_is_not_counted():
    rng = np.random.default_rng(0)
    counted = rng.random((200, 16)) < 0.5
    counted[0] = False
    mask, weight = diffusion.mask_exactly(counted, rng.random(200), rng.random((200, 16)))
    assert not (mask & ~counted).any()
    assert mask[counted.any(1)].any(1).all()
    np.testing.assert_allclose((weight * mask.sum(1))[1:], counted.sum(1)[1:])
    assert np.isfinite(weight).all()


def documents_in_blocks():
    """(counted_BL, position_BL, number of each token's block in its row) of two rows with blocks of
    three.
    """
    position_BL = np.array([[*range(7), *range(4), 0, 0], range(13)])
    counted_BL = np.ones(position_BL.shape, bool)
    counted_BL[0, 11:] = counted_BL[1, :4] = counted_BL[1, 9] = False  # padding, a prompt, a hole
    return counted_BL, position_BL, np.cumsum(position_BL % 3 == 0, 1)


def test_subsets_of_a_block_weigh_what_the_integral_over_time_does(library):
    counted, position, number = documents_in_blocks()
    subset = functools.partial(diffusion.subset_mask, block=3)
    all_of_them = lambda counted, position: tuple(subset(s, counted, position) for s in range(1, 8))  # noqa: E731
    masks, weights = zip(*library(all_of_them, counted, position), strict=True)
    # of the subsets that hold a token: 1 together
    library.close(np.sum(weights, 0), counted.astype(float))
    t = (np.arange(2000) + 0.5) / 2000
    for b, n in {(row, n) for row in range(2) for n in number[row]}:
        here = (number[b] == n) & counted[b]
        seen = set()
        for mask, weight in zip(masks, weights, strict=True):
            k = int((weight[b] * here > 0).sum())
            if k:
                assert ((weight[b] > 0) & here == mask[b] & here).all()
                seen.add(tuple(np.flatnonzero(mask[b] & here)))
                want = np.mean(t ** (k - 1) * (1 - t) ** (here.sum() - k))
                np.testing.assert_allclose(weight[b][mask[b] & here], want, rtol=1e-3)
        assert len(seen) == 2 ** here.sum() - 1


def test_the_two_rules_of_top_p_differ_where_the_sum_is_met_exactly():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]]))

    def kept(rule, **settings):
        return np.isfinite(diffusion.filter_logits(logits, rule=rule, **settings)).tolist()

    one, two = [[True, False, False, False]], [[True, True, False, False]]
    assert (kept("mdlm", top_p=0.5), kept("dream", top_p=0.5)) == (one, two)
    # 0.5 of the two is already 0.67
    assert (kept("mdlm", top_k=2, top_p=0.6), kept("dream", top_k=2, top_p=0.6)) == (one, two)
    assert kept("mdlm", top_p=1e-9) == one


@pytest.mark.parametrize("rule", ["mdlm", "dream"])
def test_top_p_by_bisection_keeps_what_a_loop_over_the_sorted_tokens_keeps(rule):
    rng = np.random.default_rng(0)
    wide = rng.normal(size=37) * 3
    logits = np.stack([wide, rng.integers(0, 4, 37), np.zeros(37), rng.normal(size=37) * 40])
    logits[0, rng.integers(0, 37, 9)] = -np.inf
    for p in (0.0, 1e-6, 0.1, 0.5, 0.9, 0.999):
        kept = np.zeros(logits.shape, bool)
        for row, prob in zip(kept, diffusion.softmax(logits), strict=True):
            before = 0.0
            for i in np.argsort(-prob, kind="stable"):  # of equals the lower id first
                # the likeliest always stays
                row[i] = before <= p if rule == "dream" else before < p or before == 0
                before += prob[i]
        for width in (1, 2, 3):
            got = np.isfinite(diffusion.filter_logits(logits, top_p=p, rule=rule, width=width))
            np.testing.assert_array_equal(got, kept & np.isfinite(logits), err_msg=f"{p} {width}")


@pytest.mark.parametrize("width", [1, 3])
def test_top_k_in_jax_sorts_nothing_and_keeps_what_a_sort_keeps(width):
    rng = np.random.default_rng(0)
    wide = rng.normal(size=37) * 3
    logits = np.float32([wide, rng.integers(-2, 2, 37), np.zeros(37), rng.normal(size=37) - 9])
    logits[0, rng.integers(0, 37, 9)], logits[1, :3] = -np.inf, -0.0
    for k in (1, 4, 36):
        top_k = jax.jit(lambda logits, k=k: diffusion.filter_logits(logits, top_k=k, width=width))
        assert "sort" not in top_k.lower(logits).as_text()
        np.testing.assert_array_equal(top_k(logits), diffusion.filter_logits(logits, top_k=k))


def test_losses_have_finite_gradients_where_ids_are_banned_or_masked():
    logits, x0 = np.zeros((2, 3, V)), np.array([[5, MASK, 6], [PAD, 7, 8]])
    logits[..., 1] = -np.inf
    mask = np.array([[True, False, True], [False, True, False]])

    def loss(x, x0, mask):
        return diffusion.masked_nll(x, x0, mask, MASK).sum()

    grad = jax.grad(loss)(jnp.asarray(logits), jnp.asarray(x0), jnp.asarray(mask))
    x = torch.tensor(logits, requires_grad=True)
    loss(x, torch.tensor(x0), torch.tensor(mask)).backward()
    want = np.where(mask[..., None], 1 / (V - 2), 0) * np.ones(V)
    want[..., [1, MASK]] = 0
    want[mask, x0[mask]] -= 1
    np.testing.assert_allclose(grad, want, atol=1e-6)
    np.testing.assert_allclose(x.grad, want, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32(dtype):
    logits = np.random.default_rng(0).normal(size=(2, 3, V)).astype(np.float32)
    x0, mask = np.full((2, 3), 5), np.ones((2, 3), bool)
    for half, ids, where in (
        (torch.tensor(logits).to(getattr(torch, dtype)), torch.tensor(x0), torch.tensor(mask)),
        (jnp.asarray(logits, dtype), jnp.asarray(x0), jnp.asarray(mask)),
    ):
        got = diffusion.masked_nll(half, ids, where, MASK)
        assert "float32" in str(got.dtype)
        full = np.asarray(half.float() if hasattr(half, "float") else half.astype(jnp.float32))
        np.testing.assert_allclose(got, diffusion.masked_nll(full, x0, mask, MASK), rtol=1e-5)


def test_coupled_masks_cover_every_completion_token_once():
    u = np.random.default_rng(0).random((3, 8)).astype(np.float32)
    u[0, 5] = np.float32(0.3)
    completion = np.arange(8) >= np.array([[2], [3], [4]])
    one, two = diffusion.coupled_masks(completion, u, 0.3)
    assert (one ^ two == completion).all()
    assert two[0, 5]  # u equals the ratio: the reference's code would leave it out of both


def test_sampled_tokens_follow_the_distribution():
    rng = np.random.default_rng(0)
    prob = np.array([0.5, 0.3, 0.15, 0.05])
    u = rng.random((40_000, 4))
    token = diffusion.sample_tokens(np.broadcast_to(np.log(prob), u.shape), u)
    np.testing.assert_allclose(np.bincount(token, minlength=4) / 40_000, prob, atol=0.01)


@pytest.mark.slow
def test_the_loss_compiles_with_inductor_and_equals_numpy():
    rng = np.random.default_rng(0)
    logits, x0 = rng.normal(size=(4, 6, V)).astype(np.float32), rng.integers(4, V, (4, 6))
    u = rng.random((4, 6))
    t = diffusion.antithetic_times(rng.random(4))

    def loss(logits, x0, t, u):
        _, mask = diffusion.q_sample(x0, t, u, "cosine", MASK, PAD)
        nll = diffusion.masked_nll(logits, x0, mask, MASK)
        return diffusion.nelbo_per_token(nll, t, x0 != PAD, "cosine")

    got = torch.compile(loss, fullgraph=True)(*map(torch.from_numpy, (logits, x0, t, u)))
    assert float(got) == pytest.approx(float(loss(logits, x0, t, u)), rel=1e-5)
