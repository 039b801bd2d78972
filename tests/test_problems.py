"""problems.py: official files, prompts, the code in an answer, and the rules of EvalPlus."""

import ast
import contextlib
import copy
import gzip
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import benchmarks
import problems as tasks
import sandbox
from jail import evalplus

DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
FILES = {"humaneval": DATA / "HumanEval.jsonl.gz", "mbpp": DATA / "sanitized-mbpp.json"}
needs_tasks = pytest.mark.skipif(
    not all(path.is_file() for path in FILES.values()),
    reason=f"no HumanEval and MBPP in {DATA}; set SHARED_DATA",
)


def official(task):
    """[(task_id, the official solution)] of the official file."""
    if task == "mbpp":
        return [(row["task_id"], row["code"]) for row in json.loads(FILES[task].read_text())]
    rows = map(json.loads, gzip.open(FILES[task], "rt"))
    return [(row["task_id"], row["canonical_solution"]) for row in rows]


def read(task, split="all"):
    return tasks.parse_problems(task, FILES[task].read_bytes(), split)


# ---- the code in an answer

F = "`" * 3
BODY = "    return a + b\n"
FULL = "def add(a, b):\n    return a + b\n"
# task, answer, the code in it
ANSWERS = [json.loads(line) for line in (ROOT / "tests/programs/answers.jsonl").open()]


def test_code_is_taken_out_of_what_a_model_wrote():
    for task, text, code in ANSWERS:
        assert tasks.extract(text, "add", tasks.STOPS[task])[0] == code, text
    assert tasks.extract("```" + " " * 20_000 + "`\n", "f", ())  # cubic time, once
    # a text that repeats itself, in linear time: none needs a tenth of this
    began_s = time.process_time()
    for text in ("</think>\n", "def f():\nNo.\n", "def f():\n    return 1\n</think>\n"):
        tasks.extract(text * 2000, "f", ())
    assert time.process_time() - began_s < 10


def test_writing_ends_when_nothing_could_change_the_code():
    for text, ended in (
        (BODY, False), (BODY + "\ndef", False), (BODY + "\ndef f(x)", True), (f"{F}python\n", False),
        (f"{F}python\n{FULL}", False), (f"{F}python\n{FULL}{F}", True), ("Sure", False), (f"{BODY}{F}", True),
        (f"{FULL}\nThis adds ", True), (f"{FULL}<|im_end|>", True), ("\treturn a", False), (f"Sure:\n{FULL}", False),
        (f"<think>\n{FULL}\n#", False), (f"{F}\n{FULL.replace('a +', 'c +')}{F}", False), (f"~~~\n{FULL}~~~", True),
    ):  # fmt: skip
        assert tasks.extract(text, "add", tasks.STOPS["humaneval"])[1] == ended, text


TRIPLE = tasks.Problem(
    "HumanEval/0",
    "triple",
    'def triple(values):\n    """Three times each value."""\n',
    test="assert triple([1, 2]) == [3, 6] and triple([]) == []",
)
HEAD = "def triple(values):\n"
TIMES_3 = "    return [3 * v for v in values]\n"
USES = f"{HEAD}    return [times(v) for v in values]"
BLOCK = f"{F}python\n{TRIPLE.prompt}{TIMES_3}{F}\n"
DRAFT = f"{HEAD}    return [2 * v for v in values]\n"
WRONG_BLOCK = f"{F}python\n{DRAFT}{F}\n"


def blocks(*codes):
    return "and\n".join(f"{F}python\n{code}\n{F}\n" for code in codes)


THOUGHT = {  # answers that follow thinking, or stand between tags; all are right
    "draft in a block": f"<think>\n{WRONG_BLOCK}No.\n</think>\n\n{BLOCK}",
    "bare draft": f"<think>\n{DRAFT}\nNo, that doubles.\n</think>\n\n{HEAD}{TIMES_3}",
    "signature quoted": f"<think>\nIt is\n{HEAD}which returns a list.\n</think>\n{BLOCK}",
    "no opening tag": f"Try:\n{WRONG_BLOCK}No.\n</think>\n{BLOCK}",
    "no opening tag, bare": f"{DRAFT}</think>\n{HEAD}{TIMES_3}",
    "draft that nothing closes": f"<think>\n{F}python\n{DRAFT}</think>\n{BLOCK}",
    "draft that nothing closes, of no language": f"<think>\n{F}\n{DRAFT}</think>\n{F}\n{HEAD}{TIMES_3}{F}",
    "two parts": f"<think>\n{WRONG_BLOCK}</think>\nHm.\n<think>\nNo.\n</think>\n{BLOCK}",
    "an answer, then a better one": f"<think>a</think>\n{WRONG_BLOCK}<think>\nNo.\n</think>\n{BLOCK}",
    "thinks once more, without an end": f"<think>a</think>\n{BLOCK}<think>\nIs it?\n{WRONG_BLOCK}",
    "body": f"<think>\nTimes 3.\n</think>\n{TIMES_3}",
    "on the tag's line": f"<think>Times 3.</think> so it is:\n{BLOCK}",
    "body on the tag's line": f"<think>Times 3.</think>{TIMES_3}",
    "[DONE] in the thinking": f"<think>\nIt ends with [DONE]\n</think>\n[BEGIN]\n{HEAD}{TIMES_3}[DONE]",
    "next turn": f"<think>a</think>\n{BLOCK}<|im_end|>\n<think>\n{WRONG_BLOCK}</think>",
    "answer tags": f"<think>\n{WRONG_BLOCK}</think>\n<answer>\n{BLOCK}</answer>",
    "answer tags, bare": f"<answer>\n{HEAD}{TIMES_3}</answer> It triples.",
    "answer tags, body": f"<think>a</think>\n<answer>\n{TIMES_3}</answer>",
    "answer tags on the fence's lines": f"<answer>{BLOCK.rstrip()}</answer>",
    "answer tag that nothing opens": f"{HEAD}{TIMES_3}</answer>",
    "two answers": f"<answer>{DRAFT}</answer>\nNo.\n<answer>\n{HEAD}{TIMES_3}</answer>",
    "tag in a string": blocks(f"{HEAD}{TIMES_3}TAGS = '</think>', 'a <answer>'"),
    "tag in a docstring": f'{HEAD}    """What follows\n    a </think>.\n    """\n{TIMES_3}',
    "tag in a body's comment": f"    # after </think> and <answer>\n{TIMES_3}",
    "tags in thinking and program": f"<think>a\n{WRONG_BLOCK}</think>\n"
    + blocks(f"{HEAD}    s = 'a</think>b'\n    t = 'a</think>b'\n{TIMES_3}"),
    "tags in the draft's strings": f"<think>\n{blocks('s = 1 # a</think>b')}</think>\n{BLOCK}",
    "prose of tags": f"I use no <think> here.\n{BLOCK}It prints no `</think>`.",
    "code in an <answer>": f"The code in <answer> tags:\n{BLOCK}",
}
OTHER_FORMS = {
    "tildes": BLOCK.replace(F, "~~~"),
    "tildes around a body": f"~~~\n{TIMES_3}~~~",
    "body before tildes": f"{TIMES_3}~~~\nIt triples.",
    "quoted signature": f"The function is\n{HEAD}which returns a list.\n\n{BLOCK}",
    "quoted signature, bare": f"The function is\n{HEAD}which returns.\n\n{HEAD}{TIMES_3}",
    "prompt quoted": f"You gave\n{blocks(TRIPLE.prompt, f'{HEAD}    pass')}So:\n{BLOCK}",
    "lambda behind a shell's block": f"{F}bash\npip install x\n{F}\n"
    + blocks("triple = lambda values: [3 * v for v in values]"),
    "assert fails": blocks(f"{HEAD}{TIMES_3}assert triple([1]) == [1]"),
    "assert fails behind a body": blocks(f"{TIMES_3}\nassert triple([1]) == [1]"),
    "call fails": blocks(f"{HEAD}{TIMES_3}result = triple(None)\nprint(result)"),
    "loop of tests fails": blocks(f"{HEAD}{TIMES_3}for x in [1]:\n    assert triple([x]) == x"),
    "test function fails": blocks(f"{HEAD}{TIMES_3}def test():\n    assert triple(1)\ntest()"),
    "exits": blocks(f"import sys\n{HEAD}{TIMES_3}sys.exit(1)"),
    "reads input": blocks(f"{HEAD}{TIMES_3}print(triple([int(input())]))"),
    "import in another block": blocks("import math as m", f"{HEAD}    return [m.prod((3, v)) for v in values]"),
    "all of a module": blocks("from math import *", f"{HEAD}    return [prod((3, v)) for v in values]"),
    "helper of a helper": blocks("def times(v):\n    return BY * v", "BY = 3", USES),
    "helper behind": blocks(USES, "def times(v):\n    return 3 * v\nassert 0"),
    "table that a loop fills": blocks("T = {}\nfor i in range(9):\n    T[i] = 3 * i", USES.replace("times(v)", "T[v]")),
    "decorator": blocks(f"@same\n{HEAD}{TIMES_3}", "def same(f):\n    return f"),
    "import for a body": blocks("import math", "    return [math.prod((3, v)) for v in values]"),
}  # fmt: skip
NO_ANSWERS = {  # a right draft beside a wrong answer, or none
    "wrong answer": f"<think>\n{BLOCK}</think>\n{WRONG_BLOCK}",
    "wrong bare answer": f"<think>\n{HEAD}{TIMES_3}</think>\n{DRAFT}",
    "wrong, no opening tag": f"{BLOCK}\nNo.\n</think>\n{WRONG_BLOCK}",
    "wrong, between tags": f"{BLOCK}<answer>\n{WRONG_BLOCK}</answer>",
    "no answer": f"<think>\n{BLOCK}</think>\nI am done.",
    "empty answer": f"{BLOCK}<answer>\n</answer>",
    "answer in the thinking alone": f"<think><answer>{HEAD}{TIMES_3}</answer></think>\nSo.",
    "no end": f"<think>\n{BLOCK}Wait",
    "no end, bare": f" <think>\n{HEAD}{TIMES_3}\nWait",
    "no second end": f"<think>a</think>\nLet me see.\n<think>\n{BLOCK}Hm",
    "wrong helper": blocks(USES, "def times(v):\n    return 2 * v"),
    "overwritten": blocks(f"{HEAD}{TIMES_3}triple = None"),
    "deleted": blocks(f"{HEAD}{TIMES_3}assert triple\ndel triple"),
    "first of two blocks is wrong": f"{WRONG_BLOCK}{blocks('import math')}",
}  # fmt: skip


@pytest.mark.parametrize("cut", [False, True])
def test_an_answer_is_found_in_all_forms_and_a_draft_is_none(cut):
    forms = THOUGHT | OTHER_FORMS | NO_ANSWERS
    ours = tasks.Ours(benchmarks.Config())
    programs = []
    for text in forms.values():
        programs.append(ours.program(ours.candidate(text, TRIPLE, cut), TRIPLE))
    results = sandbox.run_tests(programs, [[TRIPLE.test]] * len(programs), main_block=False)
    passed = {form for form, result in zip(forms, results, strict=True) if result.rate == 1}
    assert passed == THOUGHT.keys() | OTHER_FORMS.keys()


@pytest.mark.golden
def test_function_bodies_are_cut_as_in_every_golden_case(golden_dir):
    golden = json.loads((golden_dir("pythoncoder") / "truncate.json").read_text())
    assert golden["cases"]
    for case in golden["cases"]:
        assert tasks.extract(case["text"], "f", tuple(golden["stops"]))[0] == case["kept"], case


# answers in a class, quoted, coloured or without their first indent, and those that are wrong or
# none
LOST = {
    "class_wrapped", "begin_quoted_done", "ansi_escape", "two_fences_wrong_then_right", "lambda_no_return",
    "no_return_statement", "body_first_line_unindented", "only_prose", "whitespace", "only_eos", "empty",
}  # fmt: skip


@needs_tasks
@pytest.mark.golden
def test_right_answers_in_all_forms_but_a_few_keep_their_code(golden_dir):
    golden = json.loads((golden_dir("protocols") / "postprocess.json").read_text())
    problems = read("humaneval")
    asked = {id_ for name, out in golden["out"].items() if "/humaneval" in name for id_ in out}
    cases = [case for case in golden["cases"] if case["id"] in asked]
    assert cases
    programs, tests = [], []
    for case in cases:
        problem = problems[str(case["key"])]
        code, _ = tasks.extract(case["raw"], problem.entry, tasks.STOPS["humaneval"])
        programs.append(problem.prompt + tasks.without_future(code))
        tests.append([problem.test])
    results = sandbox.run_tests(programs, tests)
    lost = {case["form"] for case, result in zip(cases, results, strict=True) if result.rate != 1}
    assert lost <= LOST


# ---- files and prompts


@needs_tasks
def test_prompts_are_the_standard_ones():
    problem = read("humaneval")["0"]
    assert problem.prompt == tasks.ask(problem) + "\n"
    problems = read("mbpp", "test")
    assert len(problems) == 257
    *shots, asked = tasks.ask(problems["11"]).split(f"{tasks.EXPERT} ")[1:]
    assert len(shots) == 3
    for shot, (_, code) in zip(shots, official("mbpp"), strict=False):
        assert shot.endswith(f"\n[BEGIN]\n{code.strip()}\n[DONE]\n\n")
    assert asked == (
        "Write a python function to remove first and last occurrence of a given character from the "
        "string. Your code should pass these tests:\n\n"
        'assert remove_Occ("hello","l") == "heo"\nassert remove_Occ("abcda","a") == "bcd"\n'
        'assert remove_Occ("PHP","P") == "H"\n[BEGIN]\n'
    )


def test_an_example_may_be_followed_by_a_comma():
    prompt = 'def f(a):\n    """f(1) returns 3, f(2) == (1, 2), and f(3) -> (1,)"""\n'
    asserts = ["assert f(1) == 3", "assert f(2) == (1, 2)", "assert f(3) == (1,)"]
    assert tasks.docstring_examples(prompt, "f")[0] == asserts


WRONG = {47, 116, 130, 148}  # problems with docstrings that contradict their own tests


@needs_tasks
def test_official_solutions_pass_the_examples_found_in_docstrings():
    problems = read("humaneval")
    assert sum(bool(problem.public) for problem in problems.values()) >= 135
    assert sum(bool(problem.probes) for problem in problems.values()) >= 140
    chosen = [int(key) for key in problems if problems[key].public and int(key) % 5 == 0]
    chosen = [problems[str(number)] for number in sorted({*chosen, *WRONG})]
    results = sandbox.run_tests([p.reference for p in chosen], [p.public for p in chosen])
    for problem, result in zip(chosen, results, strict=True):
        assert (result.rate == 1) != (int(tasks.key_of(problem.id)) in WRONG), problem.id


@pytest.mark.parametrize("task", ["humaneval", "mbpp"])
def test_official_files_are_read_in_any_form(task):
    row = {"prompt": 'def f():\n    """Go\u2028\x85."""\n', "entry_point": "f", "test": "x = 1"}
    if task == "mbpp":
        row = {"text": "Go\u2028\x85.", "code": "x = 1", "test_list": ["assert f(1) == 2"]}
    rows = [{"task_id": 11 + i} | row for i in range(2)]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    forms = [lines, b"\xef\xbb\xbf" + lines + b"\r\n\n", json.dumps(rows).encode()]
    forms += [b"\xef\xbb\xbf\n" + json.dumps(rows, indent=1).encode(), gzip.compress(lines)]
    want = tasks.parse_problems(task, lines)
    assert [*want] == ["11", "12"]
    assert "\u2028" in want["11"].text + want["11"].prompt
    for data in forms:
        assert tasks.parse_problems(task, data) == want
    for data in (lines + b"\n{", json.dumps(rows, indent=1).encode()[:-1]):
        with pytest.raises(ValueError, match=r"line \d+ is not a JSON object with task_id"):
            tasks.parse_problems(task, data)


def test_problems_of_one_number_are_refused():
    row = {"prompt": 'def f():\n    """Go."""\n', "entry_point": "f", "test": "def check(f): pass"}
    lines = "\n".join(json.dumps(row | {"task_id": f"{split}/0"}) for split in ("easy", "hard"))
    with pytest.raises(ValueError, match="hard/0 and easy/0 have one number"):
        tasks.parse_problems("humaneval", lines.encode())


# ---- EvalPlus


def plus_row(number, entry, solution, base, plus, name="HumanEval", **more):
    prompt = f'"""\nDo {entry}.\n"""\n'
    if name == "HumanEval":
        prompt = f'def {entry}(x, y=0):\n    """ Does it. """\n'
    row = {"task_id": f"{name}/{number}", "prompt": prompt, "entry_point": entry}
    row |= {"canonical_solution": solution, "base_input": base, "plus_input": plus, "atol": 0}
    return row | more


def test_arguments_of_mbpp_get_back_what_json_cannot_hold():
    rows = {2: ([[1], [2]], [(1,), (2,)]), 63: ([[[1], [2]]], [[(1,), (2,)]]), 75: ([[[1]], 3], [[(1,)], 3]),
            106: ([[1], [2]], [[1], (2,)]), 115: ([[[1, 1], [], 3]], [[{1}, {}, {}]]), 124: (["1", "2j"], [1.0, 2j]),
            250: ([[1], 2], [(1,), 2]), 252: (["1+2j"], [1 + 2j]), 259: ([[[1]], [[2]]], [((1,),), ((2,),)]),
            278: ([[1, [2]]], [(1, (2,))]), 307: ([[1], 2, 3], [(1,), 2, 3]), 580: ([[1, [2, [3]]]], [(1, (2, (3,)))]),
            722: ([{"a": [1]}, 2], [{"a": (1,)}, 2]), 3: ([[1], 2], [[1], 2])}  # fmt: skip
    for number, (stored, wanted) in rows.items():
        row = plus_row(number, "f", "def f(*x): return x\n", [stored], [], "Mbpp")
        assert repr(tasks.plus_problem(row).cases.base) == repr([wanted]), number
    lists = "TUPLES LISTS_OF_TUPLES FIRST_LIST_OF_TUPLES FIRST_TUPLE TUPLES_OF_TUPLES NESTED_TUPLES"
    assert sum(len(getattr(tasks, name)) for name in lists.split()) == 55


HALVES = [0.5, 1.5]
# entry point, arguments, the result of the reference, results that pass, results that do not
SPECIAL = [
    ("similar_elements", [], (1, 2), [{1, 2}, [2, 1, 1], (2, 1)], [[1], 3, [[1], [2]], range(10**12)]),
    ("check_str", [], "a match", ["another", 3, True], [None, False]),
    ("check_str", [], None, [None, False], ["a match", True]),
    ("are_equivalent", [1, 2], False, [False, True, None], []),
    ("sum_div", [8], 7, [7, 0], [1, None]),
    ("surface_Area", [3, 4], 33, [33, 35], [34, None]),
    ("digit_distance_nums", [123, 56], 3, [3, 7], [8, None]),
    ("plain", [], HALVES, [HALVES, [0.5 + 1e-7, 1.5]], [(0.5, 1.5), [0.5], [0.5, 1.5, 2], "x", np.zeros(2)]),
    ("plain", [], [0.5], [[0.5]], [[range(10**12)], [[range(10**12)]]]),
    ("plain", [], 2, [2, 2.0, np.int64(2)], [2 + 1e-9, "2", [2]]),
    ("plain", [], [1, 0.5], [[1, 0.5]], [[1, 0.5 + 1e-9]]),
    ("plain", [], float("inf"), [float("inf")], [float("nan"), 1e308]),
]  # fmt: skip


def right_ones(monkeypatch, entry, values, wanted, inputs=()):
    """Which of some values are right, up to the first that is not."""
    for name, value in {"entry": entry, "mbpp": True, "atol": 0, "data": wanted}.items():
        monkeypatch.setattr(evalplus, name, value)
    found = []
    for i, value in enumerate(values):
        right = False
        with contextlib.suppress(Exception):
            right = evalplus.right(i, inputs, value)
        found.append(right)
        if not right:
            break
    return found


def test_results_that_mbpp_compares_in_a_way_of_its_own(monkeypatch):
    for entry, args, want, good, bad in SPECIAL:
        found = [right_ones(monkeypatch, entry, [value], [want], args) for value in [*good, *bad]]
        assert found == [[True]] * len(good) + [[False]] * len(bad), (entry, want)
    # from the first number with a fraction on, whole ones have the tolerance too
    assert right_ones(monkeypatch, "f", [0.5, [3 + 1e-9]], [0.5, [3]]) == [True, True]
    assert right_ones(monkeypatch, "f", [[3 + 1e-9], 0.5], [[3], 0.5]) == [False]


# ---- verdicts of the official executors

OURS = {  # we limit processor time, not the clock, and take no function of os away
    "sleeps_1.6s_a_call", "top_level_getcwd",
}  # fmt: skip
# executors of the tests in the official files
ORIGINAL = {"openai", "hf_code_eval", "bigcode", "opencompass"}
# where EvalPlus' and they agree, the inputs in these tests tell a mutant as well as EvalPlus' own
SAME_INPUTS = {"evalplus_0.3.1", "evalplus_head", "hf_code_eval_humaneval_plus"}


def plus_of(problem):
    """A problem in EvalPlus' form, with the inputs of its asserts, and what its reference solution
    returns for them.
    """
    inputs = []
    for node in ast.walk(ast.parse("\n".join(problem.tests))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "candidate",
            problem.entry,
        ):
            with contextlib.suppress(ValueError):
                inputs.append([ast.literal_eval(arg) for arg in node.args])
    known = {}
    exec(problem.reference, known)
    wanted = [known[problem.entry](*copy.deepcopy(args)) for args in inputs]
    name = "Mbpp" if problem.text else "HumanEval"
    cases = tasks.Plus(inputs, [], 0.0)
    problem = problem._replace(id=f"{name}/{tasks.key_of(problem.id)}", cases=cases)
    known = tasks.Expected(wanted, [1.0] * len(inputs), 1 << 20)
    return problem, [known, tasks.Expected([], [], 1 << 20)]


@pytest.mark.slow
@needs_tasks
@pytest.mark.golden
def test_verdicts_of_mutants_are_those_of_the_official_executors(golden_dir):
    mutants = json.loads((golden_dir("protocols") / "scoring.json").read_text())
    problems = {task: read(task) for task in FILES}
    found = [problems[m["bench"]][tasks.key_of(m["task_id"])] for m in mutants]
    plus = [plus_of(problem) for problem in found]
    tests = [
        [problem.test, tasks.plus_tests(of_plus, known)[0]]
        for problem, (of_plus, known) in zip(found, plus, strict=True)
    ]
    results = sandbox.run_tests([m["code"] for m in mutants], tests, timeout_s=1, main_block=False)
    differ = set()
    for mutant, problem, (of_plus, _), result in zip(mutants, found, plus, results, strict=True):
        by_test, by_inputs = result.verdicts
        by_inputs = result._replace(verdicts=[by_inputs, "pass"], values=[result.values[1], []])
        by_inputs = tasks.hidden_verdict(of_plus, by_inputs)["passed"]
        for executor, passed in mutant["passed"].items():
            # that version cannot pass it
            never = (executor, problem.id) == ("evalplus_0.3.1", "HumanEval/32")
            agreed = passed == mutant["passed"]["hf_code_eval"] and executor in SAME_INPUTS
            if executor in ORIGINAL and (by_test == "pass") != passed:
                differ.add((mutant["kind"], executor, problem.id))
            if (never and passed) or (agreed and not never and by_inputs != passed):
                differ.add((mutant["kind"], executor, problem.id))
        assert mutant["passed"].keys() <= ORIGINAL | SAME_INPUTS
    assert {row for row in differ if row[0] not in OURS} == set()
