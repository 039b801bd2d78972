"""Scores: the unbiased pass@k, and masking exactly m tokens. Whole runs are scored in the tests of the trainers."""

import json

import numpy as np
import pytest

import evaluate


@pytest.mark.golden
def test_pass_at_k_of_every_golden_case(golden_dir):
    golden = json.loads((golden_dir("pythoncoder") / "pass_at_k.json").read_text())
    for case in golden["cases"]:
        assert evaluate.pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["value"], abs=1e-9)
    both = golden["aggregate"]
    for key in (key for key in both if key.startswith("pass@")):
        rates = [evaluate.pass_at_k(both["n"], c, int(key[5:])) for c in both["correct"]]
        assert sum(rates) / len(rates) == pytest.approx(both[key], abs=1e-9)


def test_pass_at_k_refuses_more_draws_than_samples():
    with pytest.raises(ValueError, match="pass@5"):
        evaluate.pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="5 right samples among 4"):
        evaluate.pass_at_k(4, 5, 1)


@pytest.mark.golden
def test_masking_exactly_m_tokens_estimates_the_golden_likelihoods(golden_dir):
    golden = np.load(golden_dir("mdlm") / "any_order.npz")
    masks, rng, draws = golden["masks"], np.random.default_rng(0), 40_000
    counted = np.ones((draws, masks.shape[1]), bool)
    u = (rng.random(draws) + np.arange(draws)) / draws
    mask, weight = evaluate.mask_exactly(counted, counted, u, rng.random(counted.shape))
    place = {tuple(m): i for i, m in enumerate(masks)}
    index = np.array([place[tuple(m)] for m in mask])
    for ce_sum, nll in zip(golden["ce_sum"], golden["nll"], strict=True):
        assert (ce_sum[index] * weight).mean() == pytest.approx(nll, rel=0.02)


def test_masking_exactly_m_tokens_leaves_what_is_not_counted():
    rng = np.random.default_rng(0)
    counted = rng.random((200, 16)) < 0.5
    mask, weight = evaluate.mask_exactly(counted, counted, rng.random(200), rng.random((200, 16)))
    assert not (mask & ~counted).any()
    full = counted.any(1)
    np.testing.assert_allclose(weight[full] * mask.sum(1)[full], counted.sum(1)[full])
