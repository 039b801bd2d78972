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

        def quantities(logits, t=t, k=k, p=p):  # all in one program: top-p takes long to compile
            logits = diffusion.filter_logits(logits, t, k, p, rule="dream")
            prob = diffusion.softmax(logits)
            sure = (diffusion.confidence(prob, kind) for kind in ("margin", "entropy", "max_prob"))
            return prob, *sure, diffusion.sample_tokens(logits, None, 0)

        *got, greedy = library(quantities, arrays["logits"])
        wanted = ("probs", "margin", "neg_entropy", "max_prob") if t == 0 else ("probs", "margin", "neg_entropy")
        for what, values in zip(wanted, got, strict=False):  # the file has the largest only at temperature 0
            library.close(values, arrays[f"{name}.{what}"], atol=5e-6)
        if t == 0:
            np.testing.assert_array_equal(greedy, arrays[f"{name}.x0"])
