"""Reference values of Dream's sampler: filters, confidences and transfer schedules, in three array libraries."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import diffusion

pytestmark = pytest.mark.golden


@pytest.fixture
def settings(golden_dir):
    return json.loads((golden_dir("dream") / "generate.json").read_text())


def test_transfer_schedules(settings):
    for case in settings["schedules"]:
        got = diffusion.step_counts(case["masks"], case["steps"], "dream", case["eps"])
        np.testing.assert_array_equal(got, case["counts"], err_msg=str(case))


def test_filters_and_confidences(settings, golden_dir, library):
    arrays = load_file(golden_dir("dream") / "filters.safetensors")
    for case in settings["filters"]:
        name, t, p, k = case["name"], case["temperature"] or 0, case["top_p"] or 1, case["top_k"] or 0

        def probabilities(logits, t=t, k=k, p=p):
            return diffusion.softmax(diffusion.filter_logits(logits, t, k, p, rule="dream"))

        def sure(logits, kind, probabilities=probabilities):
            return diffusion.confidence(probabilities(logits), kind)

        logits = arrays["logits"]
        library.close(library(probabilities, logits), arrays[f"{name}.probs"], atol=5e-6)
        library.close(library(lambda x: sure(x, "margin"), logits), arrays[f"{name}.margin"], atol=5e-6)
        library.close(library(lambda x: sure(x, "entropy"), logits), arrays[f"{name}.neg_entropy"], atol=5e-6)
        if t == 0:
            library.close(library(lambda x: sure(x, "max_prob"), logits), arrays[f"{name}.max_prob"], atol=5e-6)
            greedy = library(lambda x: diffusion.sample_tokens(x, None, 0), logits)
            np.testing.assert_array_equal(greedy, arrays[f"{name}.x0"])
