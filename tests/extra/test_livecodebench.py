"""extra/livecodebench.py: verdicts by its rules, problems of some days, pickles that are not loaded."""

import base64
import dataclasses
import json
import pickle
import zlib

import livecodebench
import pytest
from conftest import ROOT
from test_benchmarks import config, refused, results, score, write
from test_sandbox import layers  # noqa: F401  a fixture

import problems as tasks

F = "`" * 3


def packed(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def live_row(number, day, pairs, function="", pack=packed):
    kind = "functional" if function else "stdin"
    tests = [{"input": i, "output": o, "testtype": kind} for i, o in pairs]
    row = {"question_content": "Add.", "question_id": number, "contest_date": f"{day}T00:00:00"}
    row |= {"starter_code": "", "metadata": "{}", "platform": "x"}
    if function:
        method = f"    def {function}(self, xs: List[int], n: int) -> List[int]:"
        row["starter_code"] = f"class Solution:\n{method}\n        "
        row["metadata"] = json.dumps({"func_name": function})
    return row | {"public_test_cases": json.dumps(tests[:1]), "private_test_cases": pack(tests[1:])}


SUM = live_row("abc301_a", "2024-12-01", [("1 2\n", "3\n"), ("0.5 6\n", "6.50\nend\n")])
PLUS_N = live_row(
    "3606", "2025-03-01", [("[1, 2]\n3", "[4, 5]"), ("[]\n1", "[]")], "plus", json.dumps
)
METHOD = "class Solution:\n    def plus(self, xs: List[int], n: int) -> List[int]:\n        "
# problem, answer, result
LIVE = [json.loads(line) for line in (ROOT / "tests/programs/livecodebench.jsonl").open()]


def test_verdicts_by_the_rules_of_livecodebench(tmp_path):
    samples = [(number, program) for number, program, _ in LIVE]
    row, found = score(
        tmp_path, "livecodebench", [SUM, PLUS_N], samples, livecodebench, timeout_s=1.0
    )
    assert [result["result"] for result in found] == [result for _, _, result in LIVE]
    assert found[2]["wrong"] == ["test", 1]
    assert row["results"] == {"fail": 8, "passed": 8, "timeout": 1}
    answer = f"So:\n{F}python\nprint(1)\n{F}\nNo, rather:\n{F}python\n{LIVE[0][1]}\n{F}\n"
    code = {"task_id": "abc301_a", "completion": LIVE[0][1]}
    out = str(tmp_path / "fenced")
    report, _ = score(tmp_path, "livecodebench", [SUM], [code], livecodebench, out=out)
    assert report["results"] == {"passed": 1}
    assert livecodebench.last_block(answer) == LIVE[0][1]
    assert livecodebench.last_block("print(1)") == "print(1)"
    assert livecodebench.last_block(f"{F}python\nprint(1)") == ""


SUMS = "a, b = input().split()\nprint(3 if a == '1' else f'{float(a) + float(b):.2f}\\nend')\n"
ADDS = f"{METHOD}return [x + n for x in xs]\n"


def block(code, language="python"):
    return f"{F}{language}\n{code}\n{F}\n"


# answers, whether our rule finds a right program, whether LiveCodeBench's does
ANSWERS = [
    ("abc301_a", block(SUMS), True, True),
    ("abc301_a", block(SUMS) + "It prints\n" + block("3", ""), True, False),
    ("abc301_a", block(SUMS) + "Run\n" + block("echo 1 2 | python sum.py", "bash"), True, False),
    ("abc301_a", block(SUMS) + "It reads by\n" + block("a, b = input().split()"), True, False),
    ("abc301_a", block("print(input())") + "No:\n" + block(SUMS), True, True),
    ("abc301_a", block(SUMS) + "Better:\n" + block("print(len(input()))"), False, False),
    ("abc301_a", block(SUMS).replace(F, "~~~"), True, False),
    ("abc301_a", f"<think>\n{block('print(input())')}</think>\n{SUMS}", True, False),
    ("abc301_a", f"<think>\n{block(SUMS)}</think>\n{block('print(input())')}", False, False),
    ("abc301_a", f"<think>\n{block(SUMS)}", False, True),
    ("3606", block(ADDS) + "It returns\n" + block("[4, 5]"), True, False),
    ("3606", block(ADDS) + "Use:\n" + block("print(Solution().plus([1, 2], 3))"), True, False),
    ("3606", block(f"{ADDS}assert Solution().plus([1], 1) == [1]"), True, False),
    ("3606", block("BY = 1") + block(ADDS.replace("+ n", "+ n * BY")), True, False),
    ("3606", block(ADDS) + "No:\n" + block(ADDS.replace("+", "-")), False, False),
]


@pytest.mark.parametrize(("protocol", "column"), [("ours", 2), ("livecodebench", 3)])
def test_the_last_block_that_is_a_program_counts(tmp_path, protocol, column):
    samples = [{"task_id": number, "completion": text} for number, text, *_ in ANSWERS]
    wanted = [answer[column] for answer in ANSWERS]
    settings = {"out": str(tmp_path / "out"), "timeout_s": 4.0}
    cfg = config("livecodebench", tmp_path, samples, **settings)
    cfg = dataclasses.replace(cfg, tasks_file=write(tmp_path / "tasks.jsonl", [SUM, PLUS_N]))
    row = livecodebench.main(livecodebench.Config(**vars(cfg), protocol=protocol))
    assert row["settings"]["protocol"] == f"{protocol}/livecodebench"
    found = {(r["task_id"], r["sample"]): r["passed"] for r in results(cfg.out)}
    counts = dict.fromkeys(("abc301_a", "3606"), 0)
    for (number, text, *_), want in zip(ANSWERS, wanted, strict=True):
        assert found[number, counts[number]] == want, text
        counts[number] += 1


def test_problems_of_livecodebench_are_those_of_the_days(tmp_path, capsys):
    later = SUM | {"question_id": "later", "contest_date": "2025-04-01T10:00:00"}
    folder = tmp_path / "tests"
    folder.mkdir()
    write(folder / "test.jsonl", [SUM, PLUS_N])
    write(folder / "test2.jsonl", [later])
    cfg = livecodebench.Config(tasks_file=str(folder), out=str(tmp_path / "out"))
    for since, until, ids in (("", "", ["abc301_a", "3606", "later"]),
                              ("2024-12-01", "2025-03-01", ["abc301_a", "3606"]),
                              ("2024-12-02", "", ["3606", "later"]), ("", "2024-12-01", ["abc301_a"]),
                              ("2025-04-01", "", ["later"]), ("2025-03-01", "2025-04-01", ["3606"])):  # fmt: skip
        chosen = dataclasses.replace(cfg, since=since, until=until)
        assert [*livecodebench.read_problems(chosen)] == ids
    problems = livecodebench.read_problems(cfg)
    asked = "### Question:\nAdd.\n\n### Format: Read the inputs from stdin"
    assert problems["abc301_a"].prompt.startswith(asked)
    starter = f"{F}python\n{PLUS_N['starter_code']}\n{F}\n\n### Answer: (use the"
    assert starter in problems["3606"].prompt
    samples = [{"task_id": i, "solution": ""} for i in ("abc301_a", "3606")]
    samples = write(tmp_path / "given.jsonl", samples)
    chosen = dataclasses.replace(cfg, since="2025-01-01", samples=samples)
    assert livecodebench.main(chosen)["samples"] == 1
    assert "1 samples, such as abc301_a, are skipped" in capsys.readouterr().err
    for settings, part in (({"since": "2030-01-01"}, "no problem of LiveCodeBench"),
                           ({"since": "2024-1-1"}, "--since and --until are days"),
                           ({"tasks_file": ""}, "livecodebench/code_generation_lite"),
                           ({"tasks_file": samples}, "line 1 is not a JSON object with question"),):  # fmt: skip
        refused(dataclasses.replace(chosen, **settings), part, script=livecodebench)


class Evil:
    def __reduce__(self):
        return (print, ("this was run",))


def test_pickled_tests_are_read_and_never_loaded(capsys):
    tests = [{"input": "é" * 300, "output": "\\", "testtype": "stdin"}]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert (
            json.loads(livecodebench.text_of_pickle(pickle.dumps(json.dumps(tests), protocol)))
            == tests
        )
    others = [pickle.dumps(value) for value in (Evil(), ["a"], ("a", "b"), 3)]
    for evil in (*others, b"", b"cos\nsystem\n"):
        with pytest.raises(ValueError, match=r"."):
            livecodebench.text_of_pickle(evil)
    assert "this was run" not in capsys.readouterr().out


def test_damaged_tests_of_one_problem_do_not_end_the_run():
    for private in ("AAAA", "[", "[1]", '[{"input": "1"}]'):
        problem = tasks.Problem(cases=livecodebench.Live("[]", private))
        assert livecodebench.cases_of(problem).startswith("its tests cannot be read: ")


def test_lines_are_compared_as_livecodebench_compares_them():
    same = [("3\n", "3"), (" 3 \n4", "3\n4\n\n"), ("1.0 2", "1 2.00"), ("1e3", "1000")]
    same += [("a  b", "a  b"), ("", "\n")]
    other = [("3", "4"), ("3\n\n4", "3\n4"), ("a b", "a  b"), ("YES", "Yes"), ("1.0001", "1")]
    other += [("", "0"), ("nan", "1"), ("3 4", "34"), ("sNaN", "1"), ("1", "one")]
    assert [livecodebench.same_lines(*pair) for pair in same] == [True] * len(same)
    assert [livecodebench.same_lines(*pair) for pair in other] == [False] * len(other)
