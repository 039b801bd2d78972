"""Reference values of estimators on table models: the scores that coupled_grpo.py trains with, over all their draws."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cases_of

import coupled_grpo as grpo

pytestmark = pytest.mark.golden


def draws(n, elbo):
    """[(probability, ratio, the masked positions as bits)] of all masks, and for coupled scores of all ratios."""
    everything = (1 << n) - 1
    if elbo:
        sets = [(mask.bit_count(), mask) for mask in range(1, everything + (n == 1))]
        return [(1 / max(1, n - 1) / math.comb(n, m), m / n, mask) for m, mask in sets]
    node, weight = np.polynomial.legendre.leggauss(24)  # ratios are uniform in [0.2, 0.8]
    times = zip(0.5 + 0.3 * node, weight / 2, strict=True)
    return [
        (weight * t ** mask.bit_count() * (1 - t) ** (n - mask.bit_count()), t, mask)
        for (t, weight), mask in itertools.product(times, range(everything + 1))
    ]


@pytest.mark.parametrize("estimator", ["coupled", "coupled_elbo"])
def test_mean_and_covariance_of_the_scores(golden_dir, estimator):
    merge, elbo = jax.jit(grpo.merge_views, static_argnums=(0, 5, 6)), estimator == "coupled_elbo"
    for name, case in cases_of(golden_dir("ruler") / "estimators.npz", str.partition).items():
        N, n, _ = case["logits"].shape
        chance_B, ratio_B, set_B = (np.array(x) for x in zip(*draws(n, elbo), strict=True))
        hidden_BKCD = case["logits"][np.stack([np.full(len(set_B), N - 1), set_B, N - 1 - set_B], 1)]
        mask_BC, token_BC = (set_B[:, None] >> np.arange(n)) & 1 > 0, np.tile(case["answer"], (len(set_B), 1))
        weights = [1 / np.maximum(x, 1e-9)[:, None] for x in (ratio_B, 1 - ratio_B)]
        arrays = jnp.asarray(hidden_BKCD, jnp.float32), token_BC, mask_BC, [jnp.float32(x) for x in weights]
        score_BC = np.asarray(merge(identity, *arrays, 1024, elbo)[0], np.float64)
        mean_C = chance_B @ score_BC
        cov_CC = (score_BC - mean_C).T * chance_B @ (score_BC - mean_C)
        np.testing.assert_allclose(mean_C, case[f"{estimator}.mean_token"], rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(cov_CC, case[f"{estimator}.cov"], rtol=1e-4, atol=1e-4, err_msg=name)


def identity(x):
    return x
