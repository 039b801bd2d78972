"""HumanEval+, MBPP+ and LiveCodeBench: their files, their rules, samples in both forms, and what is
shown meanwhile.
"""

import ast
import base64
import dataclasses
import gzip
import json
import pickle
import re
import zlib

import numpy as np
import pytest
from test_benchmarks import FILES, needs_tasks, refused, results
from test_sandbox import layers  # noqa: F401  a fixture

import benchmarks
import problems as tasks
import protocols

pytestmark = pytest.mark.usefixtures("layers")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def score(tmp_path, task, rows, samples, **settings):
    """(the report, results in the order of the samples) of samples, pairs of an id and a program,
    or whole rows.
    """
    samples = [s if isinstance(s, dict) else {"task_id": s[0], "solution": s[1]} for s in samples]
    files = {
        "tasks_file": write(tmp_path / "tasks.jsonl", rows),
        "samples": write(tmp_path / "given.jsonl", samples),
    }
    flags = benchmarks.SandboxFlags(timeout_s=settings.pop("timeout_s", 4.0))
    cfg = benchmarks.Config(task, out=str(tmp_path / "out"), sandbox=flags, **files | settings)
    row, found = benchmarks.main(cfg), results(tmp_path / "out")
    texts = {(r["task_id"], r.get("solution", r.get("completion"))): r for r in found}
    return row, [texts[s["task_id"], s.get("solution", s.get("completion"))] for s in samples]


def plus_row(number, entry, solution, base, plus, name="HumanEval", **more):
    prompt = (
        f'def {entry}(x, y=0):\n    """ Does it. """\n'
        if name == "HumanEval"
        else f'"""\nDo {entry}.\n"""\n'
    )
    row = {
        "task_id": f"{name}/{number}",
        "prompt": prompt,
        "entry_point": entry,
        "canonical_solution": solution,
    }
    return row | {"base_input": base, "plus_input": plus, "atol": 0} | more


HALF = plus_row(0, "half", "    return x / 3\n", [[1], [2]], [[3], [10]])
CHANGE = plus_row(1, "grow", "    x.append(len(x))\n    return x\n", [[[1]]], [[[]], [[1, 2]]])
ROOT = plus_row(32, "find_zero", "    return -x[0] / x[1]\n", [[[1, 2]]], [[[-6, 3]]], atol=1e-4)
SPIN = "import time\ndef half(x):\n    while x == {} and time.process_time() < 60: pass\n    return x / 3\n"
# problem, program, what EvalPlus' executor says of the base and of the plus inputs, but for
# forgeries and HumanEval/32
PLUS = [
    (HALF, "def half(x): return x / 3", "pass", "pass"),
    (HALF, "def half(x): return x / 3 + 5e-7", "pass", "pass"),
    (HALF, "def half(x): return x / 3 + 5e-6", "fail", "fail"),
    (HALF, "def half(x): return int(x / 3) if x == 3 else x / 3", "pass", "pass"),  # 1 == 1.0
    (HALF, "import fractions\ndef half(x): return fractions.Fraction(x, 3)", "fail", "fail"),
    (HALF, "import numpy\ndef half(x): return numpy.float64(x / 3)", "pass", "pass"),
    # another type
    (HALF, "import numpy\ndef half(x): return numpy.float64(x / 3 + 5e-7)", "fail", "fail"),
    (HALF, "def half(x): return [x / 3]", "fail", "fail"),
    (HALF, "def half(x): return x / 3 if x != 10 else None", "pass", "fail"),
    (HALF, "def half(x): return x / 3 if x < 10 else 1 / 0", "pass", "fail"),
    (HALF, "class Any:\n    __eq__ = lambda *a: True\ndef half(x): return Any()", "fail", "fail"),
    (
        HALF,
        "class Any(float):\n    __eq__ = lambda *a: True\ndef half(x): return Any(0)",
        "fail",
        "fail",
    ),
    (
        HALF,
        "import numpy\nnumpy.allclose = lambda *a, **k: True\ndef half(x): return 0.5",
        "fail",
        "fail",
    ),
    (
        HALF,
        "def half(x): return x / 3\nif __name__ == '__main__':\n    half = None",
        "pass",
        "pass",
    ),
    (HALF, "half = 3", "fail", "fail"),
    (HALF, "def half(", "fail", "fail"),
    (CHANGE, "def grow(x): return [*x, len(x)]", "pass", "pass"),
    (CHANGE, "def grow(x): return (*x, len(x))", "fail", "fail"),
    (CHANGE, "def grow(x):\n    x.append(0)\n    return x", "fail", "fail"),
    (CHANGE, "def grow(x): return iter([*x, len(x)])", "fail", "fail"),
    (CHANGE, "import numpy\ndef grow(x): return numpy.array([*x, len(x)])", "fail", "fail"),
    (ROOT, "def find_zero(x): return -x[0] / x[1] + 1e-5", "pass", "pass"),
    (ROOT, "def find_zero(x): return -x[0] / x[1] + 1e-3", "fail", "fail"),
    (ROOT, "def find_zero(x):\n    x.clear()\n    return 7.0", "fail", "fail"),  # there it passes
]


def test_verdicts_by_the_rules_of_evalplus(tmp_path, capsys):
    samples = [(row["task_id"], program) for row, program, _, _ in PLUS]
    row, found = score(tmp_path, "humaneval+", [HALF, CHANGE, ROOT], samples)
    for (_, program, base, plus), result in zip(PLUS, found, strict=True):
        assert (result["base_status"], result["plus_status"]) == (base, plus), (program, result)
        assert result["passed"] == (base == plus == "pass")
    wrong = {
        program: result.get("wrong") for (_, program, _, _), result in zip(PLUS, found, strict=True)
    }
    assert wrong["def half(x): return x / 3 if x != 10 else None"] == ["plus", 1]
    assert row["base pass@1"][0] > row["pass@1"][0]
    assert "3 problems; v0.1.10, of which scores are published, has 164" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit_the_model_fails_the_base_tests_too():
    rows = [{"task_id": f"HumanEval/{i}", "sample": 0} for i in (0, 1)]
    rows[0] |= {"passed": False, "result": "does not fit"}
    rows[1] |= {"passed": False, "result": "fail", "base_status": "pass", "plus_status": "fail"}
    row = benchmarks.report(benchmarks.Config(task="humaneval+"), rows, rows)
    assert (row["pass@1"][0], row["base pass@1"][0]) == (0, 0.5)


def test_a_call_that_is_late_is_a_timeout_and_the_other_inputs_count(tmp_path):
    samples = [("HumanEval/0", SPIN.format(10)), ("HumanEval/0", SPIN.format(1))]
    _, found = score(tmp_path, "humaneval+", [HALF], samples, timeout_s=0.4)
    assert [(result["base_status"], result["plus_status"]) for result in found] == [
        ("pass", "timeout"), ("timeout", "pass")]  # fmt: skip
    assert found[0]["wrong"] == ["plus", 1]


def test_completions_and_solutions_are_both_read_and_written(tmp_path, capsys):
    samples = [
        {"task_id": "HumanEval/0", "completion": "    return x / 3\n"},
        ("HumanEval/0", "def half(x): return 1.0"),
    ]
    row, found = score(tmp_path, "humaneval+", [HALF, CHANGE], samples)
    assert [result["passed"] for result in found] == [True, False]
    assert [result.keys() >= {"completion"} for result in found] == [True, False]
    assert (row["problems"], row["of"], row["samples"]) == (1, 2, 2)
    assert "has no sample of 1 of 2 problems" in capsys.readouterr().err
    benchmarks.main(benchmarks.Config("humaneval+", **{k: str(tmp_path / f"{v}") for k, v in (
        ("tasks_file", "tasks.jsonl"), ("samples", "given.jsonl"), ("out", "out"))}))  # fmt: skip
    assert len(results(tmp_path / "out")) == 2  # nothing is run again
    cfg = benchmarks.Config(
        "humaneval+", tasks_file=str(tmp_path / "tasks.jsonl"), out=str(tmp_path / "new")
    )
    for sample, part in (({"task_id": "HumanEval/0"}, "is not a JSON object with task_id, completion or solution"),
                         ({"task_id": "HumanEval/0", "solution": 1}, "line 1"),
                         ({"task_id": "HumanEval/9", "solution": ""},
                          "'HumanEval/9' is not among the 2 problems of tasks.jsonl"),
                         ({"task_id": "Mbpp/0", "solution": ""}, "'Mbpp/0' is not among")):  # fmt: skip
        samples = write(tmp_path / "bad.jsonl", [sample])
        refused(dataclasses.replace(cfg, samples=samples), part)
    assert not (tmp_path / "new").exists()


def test_a_reference_that_fails_is_named_and_the_other_samples_count(tmp_path):
    tenth = plus_row(2, "tenth", "    return x / 10\n", [[1]], [[-1]])
    failing = plus_row(3, "none", "    return 1 / x\n", [[1]], [[0]])
    samples = [
        ("HumanEval/2", "def tenth(x): return x / 10"),
        ("HumanEval/3", "def none(x): return 1 / x"),
    ]
    with pytest.raises(
        RuntimeError,
        match=r"1 samples .* HumanEval/3 \(the file's own solution does not run here: pass",
    ):
        score(tmp_path, "humaneval+", [tenth, failing], samples)
    assert [result["passed"] for result in results(tmp_path / "out")] == [True]


def test_files_of_another_form_are_refused_in_one_line(tmp_path):
    samples = write(tmp_path / "given.jsonl", [{"task_id": "Mbpp/2", "solution": ""}])
    mbpp = plus_row(2, "f", "def f(x): return x\n", [[1]], [[2]], "Mbpp")
    for task, rows, part in (("humaneval+", [mbpp], "Mbpp/2 is none of its problems"),
                             ("mbpp+", [{**mbpp, "base_input": 3}], "problem 1 is of another form"),
                             ("mbpp+", [{k: v for k, v in mbpp.items() if k != "atol"}], "line 1 is not"),
                             ("livecodebench", [mbpp], "line 1 is not a JSON object with question")):  # fmt: skip
        files = {"tasks_file": write(tmp_path / "tasks.jsonl", rows), "samples": samples}
        refused(benchmarks.Config(task, out=str(tmp_path / "out"), **files), "tasks.jsonl", part)
    refused(
        benchmarks.Config("livecodebench", samples=samples),
        "livecodebench/code_generation_lite",
        "--tasks_file",
    )
    for settings in ({"since": "2024-1-1"}, {"until": "soon"}):
        refused(
            benchmarks.Config("livecodebench", samples=samples, **settings),
            "--since and --until are days",
        )
    refused(benchmarks.Config("mbpp", samples=samples, since="2024-01-01"), "days of LiveCodeBench")


def test_arguments_of_mbpp_get_back_what_json_cannot_hold():
    rows = {2: ([[1], [2]], [(1,), (2,)]), 63: ([[[1], [2]]], [[(1,), (2,)]]), 75: ([[[1]], 3], [[(1,)], 3]),
            106: ([[1], [2]], [[1], (2,)]), 115: ([[[1, 1], [], 3]], [[{1}, {}, {}]]), 124: (["1", "2j"], [1.0, 2j]),
            250: ([[1], 2], [(1,), 2]), 252: (["1+2j"], [1 + 2j]), 259: ([[[1]], [[2]]], [((1,),), ((2,),)]),
            278: ([[1, [2]]], [(1, (2,))]), 307: ([[1], 2, 3], [(1,), 2, 3]), 580: ([[1, [2, [3]]]], [(1, (2, (3,)))]),
            722: ([{"a": [1]}, 2], [{"a": (1,)}, 2]), 3: ([[1], 2], [[1], 2])}  # fmt: skip
    for number, (stored, wanted) in rows.items():
        row = plus_row(number, "f", "def f(*x): return x\n", [stored], [], "Mbpp")
        assert repr(tasks.plus_problem(row).cases.base) == repr([wanted]), number
    assert len(tasks.MBPP_ARGUMENTS) == 62


# entry point, arguments, the reference's result, results that pass, results that do not
SPECIAL = [
    (
        "similar_elements",
        [],
        (1, 2),
        [{1, 2}, [2, 1, 1], (2, 1)],
        [[1], 3, [[1], [2]], range(10**12)],
    ),
    ("check_str", [], "a match", ["another", 3, True], [None, False]),
    ("check_str", [], None, [None, False], ["a match", True]),
    ("are_equivalent", [1, 2], False, [False, True, None], []),
    ("sum_div", [8], 7, [7, 0], [1, None]),
    ("surface_Area", [3, 4], 33, [33, 35], [34, None]),
    ("digit_distance_nums", [123, 56], 3, [3, 7], [8, None]),
    (
        "plain",
        [],
        [0.5, 1.5],
        [[0.5, 1.5], [0.5 + 1e-7, 1.5]],
        [(0.5, 1.5), [0.5], [0.5, 1.5, 2], "x", np.zeros(2)],
    ),
    ("plain", [], [0.5], [[0.5]], [[range(10**12)], [[range(10**12)]]]),
    ("plain", [], 2, [2, 2.0, np.int64(2)], [2 + 1e-9, "2", [2]]),
    ("plain", [], [1, 0.5], [[1, 0.5]], [[1, 0.5 + 1e-9]]),
    ("plain", [], float("inf"), [float("inf")], [float("nan"), 1e308]),
]


def right_ones(entry, atol, values, wanted, args=()):
    """Which of some values are right, as the check of a sample decides, up to the first that is
    not.
    """
    found = []
    for value, want in zip(values, wanted, strict=True):
        try:
            right, atol = tasks.value_is_right(entry, True, atol, args, value, want)
        except Exception:
            right = False
        found.append(right)
        if not right:
            break
    return found


def test_results_that_mbpp_compares_in_a_way_of_its_own():
    for entry, args, want, good, bad in SPECIAL:
        found = [right_ones(entry, 0, [value], [want], args) for value in [*good, *bad]]
        assert found == [[True]] * len(good) + [[False]] * len(bad), (entry, want)
    # from the first number with a fraction on, whole ones have the tolerance too
    assert right_ones("f", 0, [0.5, [3 + 1e-9]], [0.5, [3]]) == [True, True]
    assert right_ones("f", 0, [[3 + 1e-9], 0.5], [[3], 0.5]) == [False]


def test_mbpp_runs_with_tuples_and_its_prompt_in_front(tmp_path):
    row = plus_row(2, "similar_elements", "\ndef similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
                   [[[1, 2], [2, 3]]], [[[], [1]]], "Mbpp")  # fmt: skip
    samples = [("Mbpp/2", "def similar_elements(a, b): return [x for x in a if x in b] + 0 * list((*a,))"),
               {"task_id": "Mbpp/2", "completion": "def similar_elements(a, b):\n    return a + b\n"}]  # fmt: skip
    _, found = score(tmp_path, "mbpp+", [row], samples)
    assert [result["passed"] for result in found] == [True, False]


@needs_tasks
@pytest.mark.slow
def test_all_reference_solutions_pass_on_the_inputs_of_their_own_asserts(tmp_path):
    rows, more = (
        [],
        {32: [[[1, 2]], [[-6, 11, -6, 1]]], 38: [["abc"], ["hello"]], 50: [["abc"], ["xyz"]]},
    )
    for row in map(json.loads, gzip.open(FILES["humaneval"], "rt")):
        inputs = list(more.get(int(row["task_id"].split("/")[1]), []))
        for node in ast.walk(ast.parse(row["test"])):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "candidate"
                and not inputs[2:]
            ):
                try:
                    inputs.append(
                        json.loads(json.dumps([ast.literal_eval(arg) for arg in node.args]))
                    )
                except (ValueError, TypeError):
                    continue
        kept = {key: row[key] for key in ("task_id", "prompt", "entry_point", "canonical_solution")}
        atol = 1e-4 * (row["entry_point"] == "find_zero")
        rows.append(kept | {"base_input": inputs[:1], "plus_input": inputs[1:], "atol": atol})
    samples = [{"task_id": row["task_id"], "completion": row["canonical_solution"]} for row in rows]
    report, _ = score(tmp_path, "humaneval+", rows, samples)
    assert report["results"] == {"passed": 164}


# ---- LiveCodeBench


def packed(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def live_row(number, day, pairs, function="", pack=packed):
    tests = [
        {"input": i, "output": o, "testtype": "functional" if function else "stdin"}
        for i, o in pairs
    ]
    starter = (
        f"class Solution:\n    def {function}(self, xs: List[int], n: int) -> List[int]:\n        "
        * bool(function)
    )
    row = {
        "question_content": "Add.",
        "question_id": number,
        "contest_date": f"{day}T00:00:00",
        "starter_code": starter,
    }
    row |= {"public_test_cases": json.dumps(tests[:1]), "private_test_cases": pack(tests[1:])}
    return row | {
        "metadata": json.dumps({"func_name": function} if function else {}),
        "platform": "x",
    }


SUM = live_row("abc301_a", "2024-12-01", [("1 2\n", "3\n"), ("0.5 6\n", "6.50\nend\n")])
PLUS_N = live_row(
    "3606", "2025-03-01", [("[1, 2]\n3", "[4, 5]"), ("[]\n1", "[]")], "plus", json.dumps
)
METHOD = "class Solution:\n    def plus(self, xs: List[int], n: int) -> List[int]:\n        "
LIVE = [  # problem, answer, result
    (SUM, "a, b = input().split()\nprint(float(a) + float(b))\nif a == '0.5': print(' end')", "passed"),
    (SUM, "import sys\nprint(sum(map(Decimal, sys.stdin.read().split())))", "fail"),
    (SUM, "print(3)\nif input() != '1 2': print(6.5, 'end')", "fail"),
    (SUM, "if input() == '1 2': print(3)\nelse: print('6.5\\nend'); 1 / 0", "fail"),
    (SUM, "if input() == '1 2': print(3)\nelse: print('6.5\\nend'); exit()", "passed"),
    (SUM, "def main():\n    print(3 if input() == '1 2' else '6.5\\nend')\nif __name__ == '__main__':main()", "passed"),
    (SUM, "import threading\nthreading.Thread(target=lambda: print(3 if input() == '1 2' else '6.5\\nend')).start()",
     "passed"),
    (SUM, "while input() == '1 2': pass", "fail"),
    (SUM, "while True: pass", "timeout"),
    (SUM, "a = 10**5000\nprint(len(str(a)) - 4998 if input() == '1 2' else '6.5\\nend')", "passed"),
    (PLUS_N, METHOD + "return [x + n for x in xs]", "passed"),
    (PLUS_N, METHOD + "return tuple(x + n for x in xs)", "passed"),
    (PLUS_N, METHOD + "return deque(x + n for x in xs)", "fail"),
    (PLUS_N, METHOD + "return [4, 5]", "fail"),
    (PLUS_N, METHOD + "return [x + n for x in xs] if xs else 1 / 0", "fail"),
    (PLUS_N, "def plus(xs, n): return [*accumulate(xs)] and [x + n for x in xs]", "passed"),
    (PLUS_N, "class Any:\n    __eq__ = lambda *a: True\ndef plus(xs, n): return Any()", "fail"),
]  # fmt: skip


def test_verdicts_by_the_rules_of_livecodebench(tmp_path):
    samples = [(row["question_id"], program) for row, program, _ in LIVE]
    row, found = score(tmp_path, "livecodebench", [SUM, PLUS_N], samples, timeout_s=1.0)
    assert [result["result"] for result in found] == [result for _, _, result in LIVE]
    assert found[2]["wrong"] == ["test", 1]
    assert row["results"] == {"fail": 8, "passed": 8, "timeout": 1}
    fence = "`" * 3
    answer = f"So:\n{fence}python\nprint(1)\n{fence}\nNo, rather:\n{fence}python\n{LIVE[0][1]}\n{fence}\n"
    code = {"task_id": "abc301_a", "completion": LIVE[0][1]}
    (tmp_path / "fenced").mkdir()
    report, _ = score(tmp_path / "fenced", "livecodebench", [SUM], [code])
    assert report["results"] == {"passed": 1}
    assert protocols.last_block(answer, None) == LIVE[0][1]
    assert protocols.last_block("print(1)", None) == "print(1)"
    assert protocols.last_block(f"{fence}python\nprint(1)", None) == ""


def test_problems_of_livecodebench_are_those_of_the_days(tmp_path, capsys):
    later = SUM | {"question_id": "later", "contest_date": "2025-04-01T10:00:00"}
    folder = tmp_path / "tests"
    folder.mkdir()
    write(folder / "test.jsonl", [SUM, PLUS_N])
    write(folder / "test2.jsonl", [later])
    cfg = benchmarks.Config("livecodebench", tasks_file=str(folder))
    for since, until, ids in (("", "", ["abc301_a", "3606", "later"]),
                              ("2024-12-01", "2025-03-01", ["abc301_a", "3606"]),
                              ("2024-12-02", "", ["3606", "later"]), ("", "2024-12-01", ["abc301_a"]),
                              ("2025-04-01", "", ["later"]), ("2025-03-01", "2025-04-01", ["3606"])):  # fmt: skip
        chosen = dataclasses.replace(cfg, since=since, until=until)
        assert [*tasks.read_problems(chosen)] == ids
    problems = tasks.read_problems(cfg)
    assert problems["abc301_a"].asked.prompt.startswith(
        "### Question:\nAdd.\n\n### Format: Read the inputs from stdin"
    )
    assert (
        f"```python\n{PLUS_N['starter_code']}\n```\n\n### Answer: (use the"
        in problems["3606"].asked.prompt
    )
    samples = write(
        tmp_path / "given.jsonl", [{"task_id": i, "solution": ""} for i in ("abc301_a", "3606")]
    )
    chosen = dataclasses.replace(cfg, since="2025-01-01", samples=samples)
    assert [*benchmarks.given_samples(chosen, tasks.read_problems(chosen))] == [("3606", 0)]
    assert "1 samples are of no problem from --since to --until" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no problem of LiveCodeBench"):
        tasks.read_problems(dataclasses.replace(cfg, since="2030-01-01"))


class Evil:
    def __reduce__(self):
        return (print, ("this was run",))


def test_pickled_tests_are_read_and_never_loaded(capsys):
    tests = [{"input": "é" * 300, "output": "\\", "testtype": "stdin"}]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert json.loads(tasks.text_of_pickle(pickle.dumps(json.dumps(tests), protocol))) == tests
    others = [pickle.dumps(value) for value in (Evil(), ["a"], ("a", "b"), 3)]
    for evil in (*others, b"", b"cos\nsystem\n"):
        with pytest.raises(ValueError, match=r"."):
            tasks.text_of_pickle(evil)
    assert "this was run" not in capsys.readouterr().out


def test_damaged_tests_of_one_problem_do_not_end_the_run():
    for private in ("AAAA", "[", "[1]", '[{"input": "1"}]'):
        problem = tasks.Problem(0, "", None, "", [], [], "", tasks.Live("[]", private))
        assert tasks.live_cases(problem).startswith("its tests cannot be read: ")


def test_lines_are_compared_as_livecodebench_compares_them():
    same = [
        ("3\n", "3"),
        (" 3 \n4", "3\n4\n\n"),
        ("1.0 2", "1 2.00"),
        ("1e3", "1000"),
        ("a  b", "a  b"),
        ("", "\n"),
    ]
    other = [
        ("3", "4"),
        ("3\n\n4", "3\n4"),
        ("a b", "a  b"),
        ("YES", "Yes"),
        ("1.0001", "1"),
        ("", "0"),
        ("nan", "1"),
    ]
    other += [("3 4", "34"), ("sNaN", "1"), ("1", "one")]
    assert [tasks.same_lines(*pair) for pair in same] == [True] * len(same)
    assert [tasks.same_lines(*pair) for pair in other] == [False] * len(other)


# ---- --watch


def test_watch_shows_the_score_so_far_the_speed_and_the_time_left(tmp_path, capsys):
    samples = [
        ("HumanEval/0", "def half(x): return x / 3"),
        ("HumanEval/1", "def grow(x): return x"),
    ]
    score(tmp_path, "humaneval+", [HALF, CHANGE], samples, watch=True)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(
        r"scoring: 100%.* 2/2 .*<00:00.* programs/s, pass@1 50.0 % \(9.5 to 90.5\)\]$", last
    )
