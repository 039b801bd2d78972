"""Scores: the unbiased pass@k. Whole runs are scored in the tests of the trainers."""

import json

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
