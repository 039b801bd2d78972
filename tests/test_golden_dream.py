"""Reference values of Dream's sampler: filters, confidences and transfer schedules, in three array
libraries.
"""

import contextlib
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


def eagerly(library):
    """A context in which a Library compiles nothing."""
    if library.name == "jax":
        return pytest.importorskip("jax").disable_jit()
    if library.name == "torch":
        return pytest.importorskip("torch").compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def test_filters_and_confidences(settings, golden_dir, library):
    arrays, cases = load_file(golden_dir("dream") / "filters.safetensors"), settings["filters"]
    fullest = max(
        cases, key=lambda case: sum(bool(case[name]) for name in ("temperature", "top_p", "top_k"))
    )
    for case in cases:
        name, t, p, k = (
            case["name"],
            case["temperature"] or 0,
            case["top_p"] or 1,
            case["top_k"] or 0,
        )

        def quantities(logits, t=t, k=k, p=p):
            logits = diffusion.filter_logits(logits, t, k, p, rule="dream")
            prob = diffusion.softmax(logits)
            confidences = (
                diffusion.confidence(prob, kind) for kind in ("margin", "entropy", "max_prob")
            )
            return prob, *confidences, diffusion.sample_tokens(logits, None, 0)

        # Top-p takes long to compile: the case with the most filters is, the others run as they
        # are.
        with contextlib.nullcontext() if case is fullest else eagerly(library):
            *got, greedy = library(quantities, arrays["logits"])
        wanted = (
            ("probs", "margin", "neg_entropy", "max_prob")
            if t == 0
            else ("probs", "margin", "neg_entropy")
        )
        # the file has the largest only at temperature 0
        for what, values in zip(wanted, got, strict=False):
            library.close(values, arrays[f"{name}.{what}"], atol=5e-6)
        if t == 0:
            np.testing.assert_array_equal(greedy, arrays[f"{name}.x0"])
