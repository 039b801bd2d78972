"""Every protocol against its harness: prompts, tests and candidates byte for byte, and which right
answers survive.

The names are those of the golden files; bench/explain.py has a record for each.
"""

import gzip
import json
import re
import sys

import pytest
from conftest import ROOT
from test_benchmarks import FILES, needs_tasks

sys.path.insert(0, str(ROOT / "bench"))
import explain

import problems as tasks
import protocols
import sandbox

pytestmark = [pytest.mark.golden, needs_tasks]

SHOTS = (  # the problems 2, 3, 4 of the full MBPP, which is not among our data
    protocols.Question(
        text="Write a function to find the similar elements from the given two tuple lists.",
        tests=(
            "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
            "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)",
            "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)",
        ),
        code="def similar_elements(test_tup1, test_tup2):\r\n  res = tuple(set(test_tup1) & set(test_tup2))\r\n"
        "  return (res) ",
    ),
    protocols.Question(
        text="Write a python function to identify non-prime numbers.",
        tests=(
            "assert is_not_prime(2) == False",
            "assert is_not_prime(10) == True",
            "assert is_not_prime(35) == True",
        ),
        code="import math\r\ndef is_not_prime(n):\r\n    result = False\r\n"
        "    for i in range(2,int(math.sqrt(n)) + 1):\r\n        if n % i == 0:\r\n            result = True\r\n"
        "    return result",
    ),
    protocols.Question(
        text="Write a function to find the largest integers from a given list of numbers using heap queue algorithm.",
        tests=(
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]",
        ),
        code="import heapq as hq\r\ndef heap_queue_largest(nums,n):\r\n  largest_nums = hq.nlargest(n, nums)\r\n"
        "  return largest_nums",
    ),
)


def read(golden_dir, name):
    return json.loads((golden_dir("protocols") / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def questions(golden_dir):
    """{key of the data: {number of the problem: Question}}.

    The full MBPP is not among our data. Its texts stand in the prompts of two harnesses: "mbpp"
    takes them from BigCode's and "mbpp from Austin's" from lm_eval's, so that no prompt is compared
    with itself.
    """
    rows = [json.loads(line) for line in gzip.open(FILES["humaneval"], "rt")]
    humaneval = {
        tasks.key_of(row["task_id"]): protocols.Question(
            row["entry_point"], row["prompt"], row["test"]
        )
        for row in rows
    }
    sanitized = {
        str(row["task_id"]): mbpp_question(row["prompt"], row["test_list"])
        for row in json.loads(FILES["mbpp"].read_text())
    }
    prompts, out = (read(golden_dir, name) for name in ("prompts", "postprocess"))
    numbers = {case["id"]: str(case["key"]) for case in out["cases"]}
    known = [
        (numbers[case], text)
        for case, text in out["out"]["bigcode/mbpp"].items()
        if isinstance(text, str)
    ]
    known += prompts["bigcode/mbpp"]["prompts"].items()
    docstring = re.compile(r'"""\n(.*?)\n(assert.*?)\n"""\n', re.DOTALL)
    parts = {key: match for key, text in known if (match := docstring.match(text))}
    texts = {key: match[1] for key, match in parts.items()}
    tests = {key: [match[2]] for key, match in parts.items()}
    tests |= {
        key: re.split(r"\n(?=assert)", text)
        for key, text in prompts["bigcode/mbpp"]["target"].items()
    }
    austin = re.compile(
        r".*and here is your task: (.*?) Your code should pass these tests:", re.DOTALL
    )
    said = {
        key: austin.match(text)[1] for key, text in prompts["lm_eval_head/mbpp"]["prompts"].items()
    }
    return {
        "humaneval": humaneval,
        "sanitized": sanitized,
        "mbppplus": sanitized,  # EvalPlus makes its prompts of these texts and asserts
        "mbpp": {key: mbpp_question(text, tests[key]) for key, text in texts.items()},
        "mbpp from Austin's": {key: mbpp_question(text, tests[key]) for key, text in said.items()},
    }


def mbpp_question(text, tests):
    docstring = f'"""\n{text}\n{tests[0]}\n"""\n'
    return protocols.Question(
        tasks.called(tests), docstring, text=text, tests=tuple(tests), shots=SHOTS
    )


def test_every_prompt_and_what_comes_after_it(golden_dir, questions):
    for name, golden in read(golden_dir, "prompts").items():
        protocol = explain.HARNESSES[name]
        data = "mbpp from Austin's" if name == "bigcode/mbpp" else protocol.data[0]
        for key, text in golden["prompts"].items():
            assert protocols.prompt(protocol, questions[data][key]) == text, (name, key)
        for key, text in golden.get("target", {}).items():
            assert protocols.target(protocol, questions[data][key]) == text, (name, key)
        arguments = golden.get("generation_kwargs", {})
        assert list(protocol.stops) == golden.get("stop", arguments.get("until", [])), name
        assert protocol.shots == golden.get("num_fewshot", protocol.shots), name
        assert protocol.max_new == golden.get("max_new", protocol.max_new), name
        assert golden["of"] in [
            count for key in protocol.data for count in protocols.DATA[key][1]
        ], name


def test_every_candidate(golden_dir, questions):
    golden = read(golden_dir, "postprocess")
    cases = {case["id"]: case for case in golden["cases"]}
    for name, out in golden["out"].items():
        protocol = explain.HARNESSES[name]
        for case, text in out.items():
            question = questions[protocol.data[0]][str(cases[case]["key"])]
            try:
                found = protocols.candidate(protocol, cases[case]["raw"], question)
            except (SyntaxError, ValueError, RecursionError) as error:
                found = {"raises": type(error).__name__}
            assert found == text, (name, case)


def test_newer_transformers_keep_the_end_of_a_prefix(questions):
    for name in ("dream_instruct/humaneval_instruct", "lm_eval_head/mbpp_instruct"):
        protocol = explain.HARNESSES[name]
        question = next(iter(questions[protocol.data[0]].values()))
        kept = protocols.prompt(protocol, question, trim_prefix=False)
        assert kept == protocols.prompt(protocol, question) + "\n" * (
            2 if "{prompt}" in protocol.prefix else 1
        ), name


# One launcher runs many programs, each as a test with an input of its own; it has run to its end if
# it prints this.
RUNS_ITS_INPUT = "import sys\nexec(sys.stdin.read(), {'__name__': 'program'})\nsys.__stdout__.write('\\nit is through')"


def test_which_right_answers_survive(golden_dir, questions):
    cases = {case["id"]: case for case in read(golden_dir, "postprocess")["cases"]}
    rows = []
    for name, golden in read(golden_dir, "survives").items():
        protocol = explain.HARNESSES[name]
        for case, survives in golden.items():
            question = questions[protocol.data[0]][str(cases[case]["key"])]
            code = protocols.candidate(protocol, cases[case]["raw"], question)
            # whichever tests a harness has, it was the original ones that ran
            original = questions["mbpp" if question.tests else "humaneval"][str(cases[case]["key"])]
            program = f"{protocols.program(protocol, code, question)}\n{protocols.target(protocol, original)}"
            rows.append((program, survives, (name, case)))
    tests = [sandbox.Stdin(program) for program in dict.fromkeys(program for program, _, _ in rows)]
    passed = run_in(8, tests)
    # after one that hangs no other is run
    late = [test for test in tests if passed[test.text] is None]
    passed |= run_in(len(late), late)
    assert [where for program, survives, where in rows if bool(passed[program]) != survives] == []


def run_in(launchers, tests):
    """{program: whether it ran to its end, None if it is late}."""
    shares, passed = [tests[i::launchers] for i in range(launchers)], {}
    for share, result in zip(
        shares, sandbox.run_tests([RUNS_ITS_INPUT] * launchers, shares), strict=True
    ):
        assert result.rate is not None, result.error
        for test, verdict, value in zip(share, result.verdicts, result.values, strict=True):
            passed[test.text] = None if verdict == "timeout" else value.endswith("it is through")
    return passed
