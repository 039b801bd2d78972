"""What the contests of bench/ compute themselves: the exact search of least.py, the planted bugs of
mending.py.
"""

import random
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import least
import mending
import record


@pytest.mark.parametrize(
    ("right", "passes"),
    [
        ({}, 0),  # nothing is ever predicted right
        ({(): "012"}, 1),
        ({(): "0", (0,): "1", (0, 1): "2"}, 3),  # a chain
        ({(): "01", (0, 1): "", (0,): "12"}, 2),  # to write all that is right is a dead end
        ({(): "01", (0, 1): "2", (1,): "0"}, 2),
        ({(): "02", (0,): "2", (2,): "0", (0, 2): "", (0, 1): "2"}, 0),
    ],
)
def test_the_exact_search_finds_the_fewest_passes(right, passes):
    def right_of(states):
        found = (right.get(tuple(i for i in range(3) if state >> i & 1), "") for state in states)
        return [sum(1 << int(unit) for unit in units) for units in found]

    assert least.fewest(right_of, 3) == passes


def test_the_granted_error_gives_up_the_texts_with_most_passes():
    assert least.granted([1, 2, 3, 10], 0) == 4
    assert least.granted([10, 1, 3, 2], 0.25) == 7 / 4
    assert least.granted([10, 1, 3, 2], 0.24) == 4


def test_a_folder_of_results_takes_no_others(tmp_path):
    record.claim(tmp_path / "out", {"seeds": (0, 1), "steps": 3})
    record.claim(tmp_path / "out", {"seeds": (0, 1), "steps": 3})
    with pytest.raises(ValueError, match=r"holds results of steps=3; choose another folder"):
        record.claim(tmp_path / "out", {"seeds": (0, 1), "steps": 4})


def test_a_planted_bug_is_one_change_that_parses():
    prompt, body = "def f(xs):\n", "    n = 3\n    return [x for x in xs if len(x) > n]\n"
    found = mending.bugs(prompt, body, random.Random(0))
    assert {*found} == {*mending.KINDS}
    assert found["comparison"] == body.replace(" > ", " >= ")
    assert found["constant"] in [body.replace("3", other) for other in "245"]
    assert found["method"] == body.replace("len", "sum")
    assert found["missing line"] in body.splitlines(keepends=True)
    changed = [
        (a, b) for a, b in zip(body.split(), found["variable"].split(), strict=True) if a != b
    ]
    assert len(changed) == 1
