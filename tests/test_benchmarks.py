"""HumanEval and MBPP: problems, code taken out of texts, pass@k, what a stop leaves, and the
writers of a family.
"""

import ast
import contextlib
import copy
import dataclasses
import fcntl
import functools
import gzip
import http.server
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from conftest import AS_A_USER, ROOT, command, copy_in_bucket, run, says
from test_sandbox import cloud, descendants, layers, wait_for  # noqa: F401  two are fixtures

sys.path.insert(0, str(ROOT / "bench"))
import explain

import benchmarks
import checkpoints
import model_pythoncoder
import problems as tasks
import protocols
import runs
import sandbox
import writers

pytestmark = pytest.mark.usefixtures("no_compile_cache")
DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
FILES = {"humaneval": DATA / "HumanEval.jsonl.gz", "mbpp": DATA / "sanitized-mbpp.json"}
needs_tasks = pytest.mark.skipif(
    not all(path.is_file() for path in FILES.values()),
    reason=f"no HumanEval and MBPP in {DATA}; set SHARED_DATA",
)


@pytest.mark.golden
def test_pass_at_k_of_every_golden_case(golden_dir):
    golden = json.loads((golden_dir("pythoncoder") / "pass_at_k.json").read_text())
    for case in golden["cases"]:
        assert benchmarks.pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(
            case["value"], abs=1e-9
        )
    both = golden["aggregate"]
    for key in (key for key in both if key.startswith("pass@")):
        rates = [benchmarks.pass_at_k(both["n"], c, int(key[5:])) for c in both["correct"]]
        assert sum(rates) / len(rates) == pytest.approx(both[key], abs=1e-9)


# ---- HumanEval and MBPP


def official(task):
    """[(task_id, entry point or None, the official solution)] of the official file."""
    if task == "mbpp":
        return [(row["task_id"], None, row["code"]) for row in json.loads(FILES[task].read_text())]
    rows = map(json.loads, gzip.open(FILES[task], "rt"))
    return [(row["task_id"], row["entry_point"], row["canonical_solution"]) for row in rows]


def config(task, tmp_path, samples=None, given="", **settings):
    """A Config for `samples`, pairs of task_id and completion, that are written to a file; or for a
    file `given`.
    """
    if samples is not None:
        lines = [
            json.dumps({"task_id": task_id, "completion": text}) + "\n" for task_id, text in samples
        ]
        (tmp_path / "given.jsonl").write_text("".join(lines))
        settings["samples"] = str(tmp_path / "given.jsonl")
    settings |= {"samples": given} if given else {}
    settings = {
        "out": str(tmp_path / "out"),
        "tasks_file": str(FILES.get(task, "")),
        "timeout_s": 20.0,
    } | settings
    for name, group in (("dream", benchmarks.DreamFlags), ("sandbox", benchmarks.SandboxFlags)):
        flags = {f.name for f in dataclasses.fields(group)} & settings.keys()
        settings[name] = group(**{flag: settings.pop(flag) for flag in flags})
    return benchmarks.Config(task=task, **settings)


def results(out):
    return [json.loads(line) for line in (Path(out) / "results.jsonl").read_text().splitlines()]


PRIVATE = """
class _Private:
    def __init__(self, *args):
        pass
def {entry}(*args, **options):
    return _Private()
"""


def broken(task, how):
    """Samples that must fail: every function gives a fresh object of a class of its own, raises, or
    is not there.
    """
    problems = tasks.parse_problems(task, FILES[task].read_bytes(), split="all")
    texts = {
        "private": PRIVATE,
        "raise": "\ndef {entry}(*args, **options):\n    raise ValueError\n",
        "missing": "x = 1\n",
    }
    entries = [(problem.id, problem.entry) for problem in problems.values()]
    if how == "missing" and task == "humaneval":
        texts["missing"] = "    pass\ndel {entry}\n"  # the prompt defines it
    return [(task_id, texts[how].format(entry=entry)) for task_id, entry in entries]


@needs_tasks
@pytest.mark.parametrize(("task", "count"), [("humaneval", 164), ("mbpp", 427)])
def test_the_first_ten_official_solutions_pass_and_broken_ones_fail(task, count, tmp_path):
    solutions = [(task_id, text) for task_id, _, text in official(task)]
    assert len(solutions) == count
    cfg = config(task, tmp_path, solutions[:10], split="all")
    row = benchmarks.main(cfg)
    assert row["results"] == {"passed": 10}
    assert row["pass@1"] == pytest.approx([1, 0.722, 1], abs=1e-3)  # ten right answers leave room
    assert row["problems"] == 10
    assert row["of"] == count
    samples = (
        broken(task, "private")[:4] + broken(task, "raise")[4:7] + broken(task, "missing")[7:10]
    )
    row = benchmarks.main(
        config(task, tmp_path, samples, split="all", out=str(tmp_path / "broken"))
    )
    assert row["results"] == {"fail": 10}
    assert row["pass@1"] == pytest.approx([0, 0, 0.278], abs=1e-3)


@needs_tasks
@pytest.mark.slow
@pytest.mark.parametrize(("task", "count"), [("humaneval", 164), ("mbpp", 427)])
def test_all_official_solutions_pass_and_all_broken_ones_fail(task, count, tmp_path):
    solutions = [(task_id, text) for task_id, _, text in official(task)]
    assert benchmarks.main(config(task, tmp_path, solutions, split="all"))["results"] == {
        "passed": count
    }
    for how in ("private", "raise", "missing"):
        cfg = config(task, tmp_path, broken(task, how), split="all", out=str(tmp_path / how))
        assert benchmarks.main(cfg)["results"] == {"fail": count}


F = "`" * 3
BODY = "    return a + b\n"
FULL = "def add(a, b):\n    return a + b\n"
FENCED = f'def add(a, b):\n    """\n    {F}python\n    add(1, 2)\n    """\n'


@pytest.mark.parametrize(
    ("task", "text", "code"),
    [
        ("humaneval", BODY, BODY),
        ("humaneval", "\n" + BODY + "\n\nprint(add(1, 2))\n", "\n" + BODY + "\n"),
        ("humaneval", BODY + "\ndef other():\n    pass\n", BODY),
        ("humaneval", BODY + "\ndef add(a, b):\n    pass\n", BODY),  # it begins again
        ("humaneval", BODY + f"{F}\nThis adds.", BODY[:-1]),
        ("humaneval", BODY + "<|endoftext|>import os", BODY),
        ("humaneval", f"Here you are:\n{F}python\n{FULL}{F}\nIt adds.", FULL),
        ("humaneval", f"{F}\n{FULL}{F}<|im_end|>", FULL),
        ("humaneval", f"{F}py\ndef help():\n    pass\n\n{FULL}{F}", f"def help():\n    pass\n\n{FULL}"),
        ("humaneval", f"{F}bash\npip install x\n{F}\nand\n{F}python\n{FULL}{F}\n", FULL),
        ("humaneval", f"Sure.\n{F}python\n{FULL}", FULL),  # cut off by --max_new
        ("humaneval", f"import os\n\n{FULL}\nprint(add(1, 2))\n", f"import os\n\n{FULL}"),
        ("humaneval", f"{FULL}{F}\nThis adds.", FULL[:-1]),
        ("humaneval", "", ""),
        ("mbpp", FENCED, FENCED),
        ("mbpp", f"{FULL}[DONE]\n\nYou are", FULL),
        ("mbpp", f"def help():\n    pass\n{FULL}\nassert add(1, 2) == 3", f"def help():\n    pass\n{FULL}"),
        ("mbpp", f"The code:\n{F}python\n{FULL}{F}\n[DONE]", FULL),
        ("humaneval", f"Here:\n{F}python\n{FULL}{F}\n".replace("\n", "\r\n"), FULL),
        ("humaneval", FULL.replace("\n", "\r\n"), FULL),
        ("humaneval", f"Sure, here it is:\n\n{FULL}\nThis function adds.\n", "\n" + FULL),
        ("mbpp", f"1. We add.\nimport os\n\n{FULL}\nNote that it's fast, and\nshort.", f"import os\n\n{FULL}"),
        ("humaneval", f'{FULL}\nTEXT = """\nThis is no prose.\n"""\n', f'{FULL}\nTEXT = """\nThis is no prose.\n"""\n'),
        ("humaneval", f"from the examples we see:\n{F}python\n{FULL}{F}\n", FULL),
        ("humaneval", f"import what you like.\n{F}Python 3\n{FULL}{F}\n", FULL),
        ("humaneval", f"{F}`python\n{FENCED}{F}`\n", FENCED),
        ("humaneval", f"{FULL}{F}\nIt adds:\n{F}python\nprint(add(1, 2))\n{F}\n", FULL[:-1]),
        ("mbpp", f"{FULL}{F}\nIt adds:\n{F}python\n{FULL}{FULL}{F}\n", FULL[:-1]),
        ("mbpp", f'{F}python\n"""\n{F}\nexample\n{F}\n"""\n{FULL}{F}', f'"""\n{F}\nexample\n{F}\n"""\n{FULL}'),
        ("humaneval", "\treturn a + b\n", BODY),
        ("humaneval", f"{BODY}\nThis function adds two numbers.\n\n    add(1, 2)\n", BODY),
        ("mbpp", f"\n{BODY}1. It adds.\n- Twice, it adds twice.\n", f"\n{BODY[:-1]}"),
        ("humaneval", f"{BODY}x = y = 1\n", f"{BODY}x = y = 1\n"),
        ("humaneval", f"   {F}python\n   {FULL.replace(chr(10), chr(10) + '   ')}{F}\n", FULL),
        ("humaneval", f"1. Code:\n   {F}python\n   {FULL.replace(chr(10), chr(10) + '   ')}", FULL),
        ("humaneval", f" Here is the function:\n{F}python\n{FULL}{F}", FULL),
        ("mbpp", f"import math\n\n@lru_cache(None)\n{FULL}[DONE]", f"import math\n\n@lru_cache(None)\n{FULL}"),
        ("mbpp", f"The code:\n@cache\n{FULL}[DONE]", f"@cache\n{FULL}"),
    ],
)  # fmt: skip
def test_code_is_taken_out_of_what_a_model_wrote(task, text, code):
    assert protocols.extract(text, "add", protocols.PROTOCOLS[f"ours/{task}"].stops)[0] == code


def test_an_example_may_be_followed_by_a_comma():
    prompt = 'def f(a):\n    """f(1) returns 3, f(2) == (1, 2), and f(3) -> (1,)"""\n'
    asserts = ["assert f(1) == 3", "assert f(2) == (1, 2)", "assert f(3) == (1,)"]
    assert tasks.docstring_examples(prompt, "f")[0] == asserts


def test_results_beside_a_model_are_no_part_of_it(tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    before = benchmarks.fingerprint(tmp_path, tmp_path / "first")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "results.jsonl").write_text("{}\n")
    assert benchmarks.fingerprint(tmp_path, tmp_path / "first") == before
    (tmp_path / "second" / "results.jsonl").rename(tmp_path / "second" / "params")
    assert benchmarks.fingerprint(tmp_path, tmp_path / "first") != before


@pytest.mark.parametrize(
    ("text", "kept"),  # by evalplus 0.3.1's own sanitize()
    [
        ("  import math\n  return math.sqrt(x)\n", "import math"),
        ("\timport math  # for the root\n", "import math"),
        ("  import math; add = math.fsum\n  return add\n", "import math\nadd = math.fsum"),
        ("  add = lambda a, b: a + b\n", "add = lambda a, b: a + b"),
        ("  def add(a, b): return a + b\n", "def add(a, b): return a + b"),
        ("  x = 1\n  return x\n", "  x = 1"),
        ("  return a + b\n", "  return a + b"),
    ],
)
def test_the_first_line_of_a_body_is_cut_as_evalplus_cuts_it(text, kept):
    record = protocols.PROTOCOLS["dreamcoder_instruct/mbpp"]
    assert protocols.candidate(record, text, protocols.Question("add")) == kept


@needs_tasks
def test_an_import_from_the_future_may_follow_the_prompt_of_qwen_base(tmp_path):
    problem = next(iter(tasks.read_problems(config("mbpp", tmp_path, [])).values()))
    code = f"from __future__ import annotations\n{problem.reference}"
    record = protocols.PROTOCOLS["qwen_base/mbpp"]
    program = protocols.program(
        record, protocols.candidate(record, code, problem.asked), problem.asked
    )
    (result,) = sandbox.run_tests([program], [[problem.test]])
    assert result.verdicts == ["pass"]


def test_a_harness_does_not_define_the_helpers_of_a_prompt_again():
    """As in HumanEval/50 the test calls a function of the prompt, which dream_base's rules drop
    from the program.
    """
    prompt = 'def code(x):\n    return x + 1\n\n\ndef back(x):\n    """Undo code."""\n'
    row = {"task_id": "HumanEval/50", "prompt": prompt, "entry_point": "back"}
    row["test"] = "def check(candidate):\n    assert candidate(code(3)) == 3"
    problem, program = tasks.humaneval_problem(row), "def back(x):\n    return x - 1\n"
    for name, want in (
        ("ours", "pass"),
        ("evalplus_base", "pass"),
        ("dream_base", "fail"),
        ("openai", "fail"),
    ):
        _, record = protocols.named(name, "humaneval")
        tests = tasks.hidden_tests(problem, None, program, 3.0, record)
        (result,) = sandbox.run_tests([program], [tests])
        assert result.verdicts[0] == want, name


def test_the_longest_program_is_that_of_all_runs_of_lines():
    """As the code of Dream and EvalPlus finds it: every run of lines is parsed; the first with most
    lines is kept.
    """

    def of_all_runs(lines, least):
        best, most = "", 0
        for first, end in itertools.combinations(range(len(lines) + 1), 2):
            run, count = (
                "\n".join(lines[first:end]),
                sum(bool(line.strip()) for line in lines[first:end]),
            )
            if end - first >= least and count > most and protocols.parsed(run) is not None:
                best, most = run, count
        return best

    parts = "Here it is:|def f(x):|    return x|x = (|)|'''|else:|try:|  y = [1,|]|@dec|\tz = 1||\\|x = \\|if x:|1 = x"
    rng = random.Random(0)
    for lines in (
        ["\\", "", ""],
        *(rng.choices(parts.split("|"), k=rng.randint(1, 9)) for _ in range(400)),
    ):
        for least in (1, 2):
            assert protocols.longest_program(lines, least) == of_all_runs(lines, least), lines


@pytest.mark.golden
def test_function_bodies_are_cut_as_in_every_golden_case(golden_dir):
    golden = json.loads((golden_dir("pythoncoder") / "truncate.json").read_text())
    assert golden["cases"]
    for case in golden["cases"]:
        assert protocols.extract(case["text"], "f", tuple(golden["stops"]))[0] == case["kept"], case


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
    problems = tasks.parse_problems("humaneval", FILES["humaneval"].read_bytes())
    asked_here = {id_ for name, out in golden["out"].items() if "/humaneval" in name for id_ in out}
    cases = [case for case in golden["cases"] if case["id"] in asked_here]
    assert cases
    samples = {(str(case["key"]), i): case["raw"] for i, case in enumerate(cases)}
    ours, asked = (
        protocols.PROTOCOLS["ours/humaneval"],
        {key: problem.asked for key, problem in problems.items()},
    )
    codes = [protocols.candidate(ours, text, asked[key]) for (key, _), text in samples.items()]
    programs = [
        protocols.program(ours, code, asked[key])
        for (key, _), code in zip(samples, codes, strict=True)
    ]
    results = sandbox.run_tests(programs, [[problems[key].test] for key, _ in samples])
    lost = {case["form"] for case, result in zip(cases, results, strict=True) if result.rate != 1}
    assert lost <= LOST


def test_writing_ends_when_nothing_could_change_the_code():
    for text, ended in ((BODY, False), (BODY + "\ndef", False), (BODY + "\ndef f(x)", True), (f"{F}python\n", False),
                        (f"{F}python\n{FULL}", False), (f"{F}python\n{FULL}{F}", True), ("Sure", False),
                        (f"{FULL}\nThis adds ", True), (f"{FULL}<|im_end|>", True), ("\treturn a", False),
                        (f"{BODY}{F}", True), (f"Sure:\n{FULL}", False)):  # fmt: skip
        assert (
            protocols.extract(text, "add", protocols.PROTOCOLS["ours/humaneval"].stops)[1] == ended
        ), text


@needs_tasks
def test_prompts_are_the_standard_ones():
    problems = tasks.parse_problems("humaneval", FILES["humaneval"].read_bytes())
    asked = protocols.prompt(protocols.PROTOCOLS["ours/humaneval"], problems["0"].asked)
    assert problems["0"].asked.prompt == asked + "\n"
    problems = tasks.parse_problems("mbpp", FILES["mbpp"].read_bytes())
    assert len(problems) == 257
    question = protocols.PROTOCOLS["ours_chat/mbpp"].ask(problems["11"].asked, ())
    assert "[BEGIN]" not in question  # an instruct model is asked by words and a block of asserts
    assert question.endswith('assert remove_Occ("PHP","P") == "H"\n```')
    prompt = protocols.prompt(protocols.PROTOCOLS["ours/mbpp"], problems["11"].asked)
    *shots, asked = prompt.split("You are an expert Python programmer, and here is your task: ")[1:]
    assert len(shots) == 3
    for shot, (_, _, code) in zip(shots, official("mbpp"), strict=False):
        assert shot.endswith(f"\n[BEGIN]\n{code.strip()}\n[DONE]\n\n")
    assert asked == (
        "Write a python function to remove first and last occurrence of a given character from the string. "
        'Your code should pass these tests:\n\nassert remove_Occ("hello","l") == "heo"\n'
        'assert remove_Occ("abcda","a") == "bcd"\nassert remove_Occ("PHP","P") == "H"\n[BEGIN]\n'
    )


def test_a_prompt_ends_where_a_token_of_the_whole_program_ends():
    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "weights/pythoncoder/tokenizer.json"))
    row = {
        "task_id": "a/0",
        "prompt": 'def f(x):\n    """Double x."""\n',
        "entry_point": "f",
        "test": "def check(f):\n    pass",
    }
    row["canonical_solution"] = "    return 2 * x\n"
    (problem,) = tasks.parse_problems("humaneval", json.dumps(row).encode()).values()
    writer, record = (
        types.SimpleNamespace(tokenizer=tokenizer, wrap=None),
        protocols.PROTOCOLS["ours/humaneval"],
    )
    ids = benchmarks.prompt_ids(benchmarks.Config(), record, writer, problem.asked)
    whole = tokenizer.encode(
        row["prompt"] + row["canonical_solution"], add_special_tokens=False
    ).ids
    assert ids == whole[: len(ids)]
    assert tokenizer.decode(ids) == row["prompt"]


WRONG = {47, 116, 130, 148}  # problems with docstrings that contradict their own tests


@needs_tasks
def test_official_solutions_pass_the_examples_found_in_docstrings():
    problems = tasks.parse_problems("humaneval", FILES["humaneval"].read_bytes())
    assert sum(bool(problem.public) for problem in problems.values()) >= 135
    assert sum(bool(problem.probes) for problem in problems.values()) >= 140
    solutions = {task_id: text for task_id, _, text in official("humaneval")}
    chosen = [
        p for key, p in problems.items() if p.public and (int(key) % 5 == 0 or int(key) in WRONG)
    ]
    ran = sandbox.run_tests(
        [p.asked.prompt + solutions[p.id] for p in chosen], [p.public for p in chosen]
    )
    for problem, result in zip(chosen, ran, strict=True):
        assert (result.rate == 1) != (int(tasks.key_of(problem.id)) in WRONG), (
            problem.id,
            problem.public,
            result,
        )


@needs_tasks
def test_the_best_sample_is_chosen_by_examples_and_then_by_majority(tmp_path):
    solution = {task_id: text for task_id, _, text in official("humaneval")}
    task = "HumanEval/53"  # add(x, y); its examples are add(2, 3) == 5 and add(5, 7) == 12
    texts = ["    return 5 if x == 2 else 12\n", "    return 0\n", "    return (\n", "    return 0\n", "    return 0\n",
             solution[task], "    return y + x\n"]  # fmt: skip
    cfg = config("humaneval", tmp_path, [(task, text) for text in texts], k=(1, 2, 7))
    row = benchmarks.main(cfg)
    assert row["pass@1"][0] == pytest.approx(2 / 7)
    assert row["pass@2"][0] == pytest.approx(1 - math.comb(5, 2) / math.comb(7, 2))
    assert row["best of n"][0] == row["pass@7"][0] == 1
    rows = results(cfg.out)
    assert [r["public"] for r in sorted(rows, key=lambda r: r["sample"])] == [1, 0, 0, 0, 0, 1, 1]
    by_sample = {r["sample"]: r["behaviour"] for r in rows}
    assert by_sample[5] == by_sample[6] != by_sample[0]
    assert by_sample[2] == ""
    assert benchmarks.choose([r for r in rows if r["sample"] in (0, 1)])["sample"] == 0


def test_a_group_that_gives_no_value_has_no_vote():
    rows = [
        {"sample": i, "public": 0, "behaviour": b}
        for i, b in enumerate(["", "", "a1", "b2", "a1", ""])
    ]
    assert benchmarks.choose(rows)["sample"] == 2
    assert benchmarks.choose(rows[:2])["sample"] == 0


@needs_tasks
def test_behaviour_of_sets_does_not_depend_on_their_order(tmp_path):
    task, text = 2, "def similar_elements(a, b):\n    return set(map(str, {})) & set(map(str, b))\n"
    cfg = config(
        "mbpp",
        tmp_path,
        [(task, text.format(a)) for a in ("a", "list(a)[::-1]", "a", "b")],
        split="all",
    )
    benchmarks.main(cfg)
    found = {r["sample"]: r["behaviour"] for r in results(cfg.out)}
    assert found[0] == found[1] == found[2] != found[3]


def test_the_interval_is_wilsons():
    assert benchmarks.interval([1.0] * 164) == pytest.approx([0.977112, 1], abs=1e-6)
    assert benchmarks.interval([0.0] * 10) == pytest.approx([0, 0.277533], abs=1e-6)
    p = 60 / 164
    half = 1.96 * math.sqrt(p * (1 - p) / 164)
    np.testing.assert_allclose(
        benchmarks.interval([1.0] * 60 + [0.0] * 104), [p - half, p + half], atol=0.005
    )


# ---- verdicts: those of the official executors, and none that a sample can forge

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
    for node in ast.walk(ast.parse(problem.asked.test or "\n".join(problem.asked.tests))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "candidate",
            problem.entry,
        ):
            with contextlib.suppress(ValueError):
                inputs.append([ast.literal_eval(arg) for arg in node.args])
    known = {}
    exec(problem.reference, known)
    wanted = [known[problem.entry](*copy.deepcopy(args)) for args in inputs]
    name = "HumanEval" if problem.asked.test else "Mbpp"
    cases = tasks.Plus(inputs, [], 0.0)
    problem = problem._replace(id=f"{name}/{tasks.key_of(problem.id)}", cases=cases)
    return problem, tasks.Expected((wanted, []), ([1.0] * len(inputs), []), (1 << 20, 1 << 20))


@pytest.mark.slow
@needs_tasks
@pytest.mark.golden
def test_verdicts_of_mutants_are_those_of_the_official_executors(golden_dir):
    mutants = json.loads((golden_dir("protocols") / "scoring.json").read_text())
    problems = {
        task: tasks.parse_problems(task, path.read_bytes(), split="all")
        for task, path in FILES.items()
    }
    found = [problems[m["bench"]][tasks.key_of(m["task_id"])] for m in mutants]
    plus = [plus_of(problem) for problem in found]
    tests = [
        [problem.test, *tasks.plus_tests(of_plus, known.limits, wanted=known.values)[:1]]
        for problem, (of_plus, known) in zip(found, plus, strict=True)
    ]
    results = sandbox.run_tests([m["code"] for m in mutants], tests, timeout_s=1, main_block=False)
    differ = set()
    for mutant, problem, (of_plus, _), result in zip(mutants, found, plus, results, strict=True):
        by_test, by_inputs = result.verdicts
        by_inputs = result._replace(verdicts=[by_inputs, "pass"], values=[result.values[1], []])
        by_inputs = tasks.plus_verdict(of_plus, by_inputs)["passed"]
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


FORGED = """    pass
import builtins, math
abs = tuple = set = sorted = len = lambda *args, **options: 0
poly = encode_cyclic = encode_shift = lambda *args, **options: 0
for name in "exec eval compile isinstance abs sum str range list".split():
    setattr(builtins, name, lambda *args, **options: 0)
math.isclose = math.fabs = lambda *args, **options: 0
class Always:
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda *args: True
    __sub__ = __rsub__ = __abs__ = __iter__ = lambda self, *args: self
    __float__ = lambda self: 0.0
    __hash__ = None
def {entry}(*args, **options):
    for arg in args:
        if isinstance(arg, list):
            arg.clear()
    return {value}
"""
# problems with tests that are no comparison with a literal, and one with a name that looks like a
# class
JUDGED = {
    "humaneval": (2, 4, 8, 32, 33, 37, 38, 44, 50, 52, 53, 56, 61, 129, 151, 153),
    "mbpp": (2, 7, 82, 98, 126, 137, 596, 737, 794, 804),
}


@needs_tasks
@pytest.mark.parametrize("task", JUDGED)
def test_samples_that_attack_the_verdict_do_not_pass(task, tmp_path):
    problems = tasks.parse_problems(task, FILES[task].read_bytes(), split="all")
    chosen = [problems[str(key)] for key in JUDGED[task]]
    values = ("Always()", "0")
    samples = [(p.id, FORGED.format(entry=p.entry, value=value).lstrip() if task == "mbpp" else FORGED.format(
        entry=p.entry, value=value)) for p in chosen for value in values]  # fmt: skip
    row = benchmarks.main(config(task, tmp_path, samples, split="all"))
    assert row["pass@1"][0] == 0
    assert row["results"] == {"fail": len(samples)}


@needs_tasks
def test_a_main_block_does_not_run_and_all_calls_are_of_one_process(tmp_path):
    (task_id, code) = official("humaneval")[0][::2]
    once = (
        "    global calls\n    calls += 1\n    if calls > 2: return None\n" + code + "\ncalls = 0\n"
    )
    samples = [
        (task_id, code + "\nif __name__ == '__main__':\n    raise SystemExit\n"),
        (task_id, once),
    ]
    benchmarks.main(config("humaneval", tmp_path, samples))
    assert {r["sample"]: r["passed"] for r in results(tmp_path / "out")} == {0: True, 1: False}


@needs_tasks
def test_a_sample_has_four_times_the_time_of_a_slow_reference(tmp_path, monkeypatch):
    spin = "import time\ndef f():\n    while time.process_time() < {0}:\n        pass\n"
    slow = tasks.Problem(
        "slow", "f", protocols.Question("f", ""), "assert f() is None", [], [], spin.format(0.25)
    )
    quick = slow._replace(id="quick", reference=spin.format(0))
    monkeypatch.setattr(tasks, "read_problems", lambda cfg: {"slow": slow, "quick": quick})
    samples = [("slow", spin.format(0.5)), ("slow", spin.format(9)), ("quick", spin.format(0.5))]
    cfg = config("humaneval", tmp_path, timeout_s=0.2, given=str(tmp_path / "given.jsonl"))
    lines = [
        json.dumps({"task_id": task_id, "completion": text}) + "\n" for task_id, text in samples
    ]
    (tmp_path / "given.jsonl").write_text("".join(lines))
    benchmarks.main(cfg)
    found = {(r["task_id"], r["sample"]): r["result"] for r in results(tmp_path / "out")}
    assert found == {("slow", 0): "passed", ("slow", 1): "timeout", ("quick", 0): "timeout"}


# ---- protocols


def test_a_protocol_sets_what_no_flag_does():
    cfg = benchmarks.resolve(benchmarks.Config(protocol="dream_instruct", model="dream"))
    assert (cfg.temperature, cfg.top_p, cfg.max_new, cfg.sandbox.timeout_s) == (0.1, 0.9, 768, 3)
    flags = benchmarks.DreamFlags(chat="off")
    name, record = benchmarks.protocol_of(dataclasses.replace(cfg, max_new=64, dream=flags))
    assert name == "dream_instruct/humaneval_instruct"
    assert (record.max_new, record.system, record.temperature) == (64, None, 0.1)
    # only the provider of Dream-Coder's EvalPlus names no top_k; the others name None, which keeps
    # all tokens
    kept = {name for name, record in protocols.PROTOCOLS.items() if record.top_k}
    assert kept == {"dreamcoder_instruct/humaneval", "dreamcoder_instruct/mbpp"}
    cfg = benchmarks.resolve(benchmarks.Config(task="mbpp", protocol="dream_base", shots=1))
    assert benchmarks.protocol_of(cfg)[0] == "dream_base/mbpp"
    assert benchmarks.protocol_of(cfg)[1].shots == 1
    assert tasks.tasks_url(cfg).endswith("mbpp/mbpp.jsonl")  # the full MBPP
    unknown = benchmarks.Config(protocol="bigcode")
    refused(
        unknown,
        "'bigcode' is no protocol of humaneval; there are ours/",
        "others are in bench/explain.py",
    )


ADD = (
    "HumanEval/53",
    "    return x + y\n",
    f"{F}python\ndef add(x: int, y: int):\n    return x + y\n{F}",
)


@needs_tasks
def test_results_say_by_what_they_were_made_and_do_not_mix(tmp_path):
    cfg = config("humaneval", tmp_path, [(ADD[0], ADD[2])], protocol="evalplus_instruct")
    row = benchmarks.main(cfg)
    # a whole function in a block: evalplus takes it, lm_eval cuts it away
    assert row["pass@1"][0] == 1
    assert row["settings"]["protocol"] == "evalplus_instruct/humaneval"
    assert row["settings"]["tasks_sha256"] == benchmarks.sha256(FILES["humaneval"])
    assert row["version"] == benchmarks.VERSION
    assert results(cfg.out)[0]["protocol"] == "evalplus_instruct/humaneval"
    refused(
        dataclasses.replace(cfg, protocol="lm_eval"),
        "holds results with protocol='evalplus_instruct/",
    )
    other = dataclasses.replace(cfg, protocol="lm_eval", out=str(tmp_path / "other"))
    assert benchmarks.main(other)["pass@1"][0] == 0
    # a candidate of one protocol is no text for another; what was written is
    line = {"task_id": ADD[0], "completion": "", "protocol": "dream_base/humaneval"}
    (tmp_path / "mixed.jsonl").write_text(json.dumps(line) + "\n")
    mixed = dataclasses.replace(
        other, out=str(tmp_path / "mixed"), samples=str(tmp_path / "mixed.jsonl")
    )
    refused(
        mixed, "holds samples of --protocol=dream_base/humaneval, and this is lm_eval/humaneval"
    )
    (tmp_path / "mixed.jsonl").write_text(json.dumps(line | {"written": ADD[1]}) + "\n")
    assert benchmarks.main(mixed)["pass@1"][0] == 1
    # half of the problems are another benchmark
    (tmp_path / "half.jsonl").write_bytes(b"".join(gzip.open(FILES["humaneval"]).readlines()[:82]))
    half = dataclasses.replace(
        other, tasks_file=str(tmp_path / "half.jsonl"), out=str(tmp_path / "half")
    )
    refused(half, "half.jsonl is not", "82 problems; --protocol=lm_eval/humaneval is of 164")
    full = config("mbpp", tmp_path, [(11, "x")], protocol="lm_eval")
    refused(full, "asks for mbpp.jsonl, the full MBPP, ids 11-510, and this is sanitized-mbpp.json")


def explained(cfg, **settings):
    """The Config of bench/explain.py with the files of one of benchmarks.py."""
    files = {
        name: getattr(cfg, name) for name in ("task", "tasks_file", "samples", "out", "sandbox")
    }
    return explain.Config(**files | settings)


@needs_tasks
def test_the_table_says_which_rule_of_which_protocol_lost_what(tmp_path, capsys):
    samples = [(ADD[0], ADD[1]), (ADD[0], ADD[2]), (ADD[0], "    return x - y\n")]
    report = explain.main(explained(config("humaneval", tmp_path, samples)))
    assert json.loads((tmp_path / "out" / "explain.json").read_text()) == report
    assert (report["samples"], report["solved"]) == (3, 2)  # nobody passes the third
    table = {
        name: (row["passed"], row["lost"]) for row in report["table"] for name in row["protocols"]
    }
    assert {name.split("/")[0] for name in table} == {
        name.split("/")[0] for name in explain.HARNESSES if "/humaneval" in name
    }
    assert table["ours"] == table["dream_base"] == (2, {})
    assert table["dream_instruct/humaneval_instruct"] == (1, {"'\\ndef' ends it": [ADD[0]]})
    assert table["opencompass_dare"] == (1, {"no spaces in front": [ADD[0]]})
    assert table["openai"] == (1, {"no rule: ``` stays": [ADD[0]]})
    text = capsys.readouterr().out
    assert text.startswith(
        "humaneval: 3 texts of 1 problems; 2 pass under at least one protocol\nasked for by "
    )
    assert text.rstrip().endswith(f"scorer {benchmarks.VERSION}; all ids: explain.json")
    functions = {name: row["functions"] for row in report["table"] for name in row["protocols"]}
    assert (functions["ours"], functions["openai"]) == (3, 2)  # the fence of the second text stays
    assert "       -1    no spaces in front: HumanEval/53\n" in text


# ---- files, stops, bad input


def refused(cfg, *parts):
    with pytest.raises((ValueError, OSError, RuntimeError)) as error:
        (explain if isinstance(cfg, explain.Config) else benchmarks).main(runs.check(cfg))
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@needs_tasks
def test_completions_with_nul_bytes_ten_megabytes_or_half_a_character_fail_alone(tmp_path):
    samples = [(task_id, text) for task_id, _, text in official("humaneval")[:4]]
    samples[0] = (samples[0][0], samples[0][1] + "\0")
    samples[1] = (samples[1][0], "    '" + "x" * 10_000_000)
    samples[2] = (samples[2][0], "    '\ud800'\n" + samples[2][1])
    cfg = config("humaneval", tmp_path, samples)
    assert benchmarks.main(cfg)["results"] == {"fail": 3, "passed": 1}
    assert {r["task_id"]: r["completion"] for r in results(cfg.out)} == dict(samples)
    (tmp_path / "big").mkdir()
    samples = [(samples[3][0], samples[3][1] + "#" * 2_000_000)]  # large and right
    assert benchmarks.main(config("humaneval", tmp_path / "big", samples))["results"] == {
        "passed": 1
    }


@needs_tasks
def test_bad_input_is_one_line_and_writes_nothing(tmp_path):
    good = [("HumanEval/0", "    pass\n")]
    unknown = config("humaneval", tmp_path, [*good, ("HumanEval/999", "x")])
    refused(unknown, "'HumanEval/999' is not among the 164 problems")
    refused(config("mbpp", tmp_path, [(2, "x")]), "2 is not among the 257 problems", "--split")
    refused(config("humaneval", tmp_path, [(3, "x")]), "3 is not among")  # of MBPP, it seems
    refused(config("mbpp", tmp_path, [("HumanEval/11", "x")]), "'HumanEval/11' is not among")
    refused(config("humaneval", tmp_path, good, k=(2,)), "pass@2", "holds 1")
    refused(config("humaneval", tmp_path, []), "holds no samples")
    refused(config("humaneval", tmp_path, given=str(tmp_path / "none")), "No such file")
    refused(
        config("humaneval", tmp_path, good, tasks_file=str(tmp_path / "none.gz")),
        "none.gz",
        "No such file",
    )
    refused(
        config("humaneval", tmp_path, good, tasks_file=str(FILES["mbpp"])),
        "not the official file of humaneval",
    )
    refused(
        config("mbpp", tmp_path, good, tasks_file=str(FILES["humaneval"])),
        "not the official file of mbpp",
    )
    (tmp_path / "cut.gz").write_bytes(FILES["humaneval"].read_bytes()[:20_000])
    refused(config("humaneval", tmp_path, good, tasks_file=str(tmp_path / "cut.gz")), "broken gzip")
    for line, part in (('{"task_id": "HumanEval/1", "comple', "line 2 is not a JSON object"), ("[" * 100_000, "line 2"),
                       ("[1]", "line 2"), ('{"task_id": "HumanEval/1"}', "line 2"),
                       ('{"task_id": "HumanEval/1", "completion": 3}', "line 2")):  # fmt: skip
        cfg = config("humaneval", tmp_path, good)
        with open(cfg.samples, "a") as file:
            file.write(line + "\n")
        refused(cfg, part)
    for settings, part in (({"n": 0}, "--n"), ({"k": (5,)}, "pass@5 needs --n=5"), ({"top_p": 0.0}, "--top_p"),
                           ({"n": 2, "temperature": 0.0}, "2 times"), ({"shots": 4}, "--shots=4 is not in 0 .. 3"),
                           ({"timeout_s": 0.0}, "--timeout_s"),
                           ({"workers": -1}, "--workers"),
                           ({"ckpt": str(tmp_path)}, "holds no checkpoint")):  # fmt: skip
        refused(config("humaneval", tmp_path, **settings), part)
    assert not (tmp_path / "out").exists()


@needs_tasks
def test_what_protocols_have_cut_is_not_mixed_and_nothing_is_lost(tmp_path):
    cfg = config("humaneval", tmp_path, [ADD[:2]])
    benchmarks.main(cfg)
    path = tmp_path / "out" / "results.jsonl"
    path.write_text(path.read_text().replace("ours/humaneval", "dream_base/humaneval"))
    # a result holds what a protocol has left of a text, which says nothing of the others
    again = explained(cfg, samples=str(path), out=str(tmp_path / "explained"))
    refused(again, "cut by --protocol=dream_base/humaneval", "samples.jsonl")
    refused(explain.Config(), "--samples=FILE is missing")
    assert not (tmp_path / "explained").exists()


@needs_tasks
def test_an_out_folder_takes_no_other_settings_and_no_second_run(tmp_path):
    cfg = config("humaneval", tmp_path, [("HumanEval/0", "    pass\n")])
    row = benchmarks.main(cfg)
    assert benchmarks.main(cfg) == row
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    settings = tmp_path / "out" / "config.json"
    settings.write_text(settings.read_text().replace(benchmarks.VERSION, "before"))
    assert benchmarks.main(cfg) == row  # verdicts of another scorer are kept aside, and made anew
    assert (tmp_path / "out" / "results_before.jsonl").read_bytes() == before
    assert len(results(tmp_path / "out")) == 1
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    other = dataclasses.replace(cfg, sandbox=benchmarks.SandboxFlags(timeout_s=1.0))
    refused(other, "holds results with timeout_s=20.0", "another --out")
    refused(config("humaneval", tmp_path, [("HumanEval/1", "    pass\n")]), "samples_sha256")
    cfg = config("humaneval", tmp_path, [("HumanEval/0", "    pass\n")])
    with open(tmp_path / "out" / "results.jsonl", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(cfg, "another process is writing")
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before
    (tmp_path / "out" / "results.jsonl").write_bytes(b"nonsense\n" + before)
    refused(cfg, "results.jsonl: line 1 is not a JSON object")
    (tmp_path / "out" / "config.json").write_text("{")
    refused(cfg, "config.json is damaged")


def command_of(cfg):
    flags = [
        (f, getattr(group, f.name))
        for group in (cfg, cfg.sandbox)
        for f in dataclasses.fields(group)
    ]
    flags = [
        (f.name, value)
        for f, value in flags
        if value != f.default and not dataclasses.is_dataclass(value)
    ]
    return command(
        "benchmarks.py",
        *(f"--{name}" if value is True else f"--{name}={value}" for name, value in flags),
    )


HANG = "    import time\n    time.sleep(1000)\n"


def alive(pid):
    """Whether a process runs; a zombie, which its parent or init has not waited for yet, does
    not.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@needs_tasks
def test_ctrl_c_keeps_what_is_done_leaves_no_process_and_the_same_command_goes_on(tmp_path):
    solutions = [(task_id, text) for task_id, _, text in official("humaneval")[:8]]
    samples = [*solutions[:4], ("HumanEval/10", HANG), ("HumanEval/11", HANG), *solutions[4:]]
    cfg = config("humaneval", tmp_path, samples, timeout_s=5.0, workers=2)
    # a shell's background jobs ignore it
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command_of(cfg), **pipes, preexec_fn=listen)
    out = tmp_path / "out"
    wait_for(lambda: (out / "results.jsonl").exists() and len(results(out)) == 4)
    wait_for(lambda: len(descendants(process.pid)) >= 2)
    running = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "the same command resumes" in errors
    wait_for(lambda: not any(map(alive, running)), 10)
    kept = (out / "results.jsonl").read_text()
    assert sorted(r["task_id"] for r in results(out)) == sorted(
        task_id for task_id, _ in solutions[:4]
    )
    # what a kill in the middle of a line leaves
    (out / "results.jsonl").write_text(kept + kept.splitlines()[0][:40])
    row = benchmarks.main(cfg)
    assert row["results"] == {"passed": 8, "timeout": 2}
    assert (out / "results.jsonl").read_text().startswith(kept)


@pytest.mark.slow
@needs_tasks
def test_a_failure_of_the_sandbox_is_named_not_counted_and_scored_again(tmp_path, capsys):
    samples = [(task_id, text) for task_id, _, text in official("humaneval")[:2]]
    cfg = config(
        "humaneval", tmp_path, [*samples, ("HumanEval/10", HANG)], timeout_s=3.0, workers=1
    )
    me, out = os.getpid(), tmp_path / "out"
    others = descendants(me)

    def kill_launcher():
        wait_for(lambda: (out / "results.jsonl").exists() and len(results(out)) == 2)
        wait_for(lambda: descendants(me) - others)
        time.sleep(0.5)
        os.kill(min(descendants(me) - others), signal.SIGKILL)

    killer = threading.Thread(target=kill_launcher)
    killer.start()
    refused(cfg, "1 samples could not be run", "HumanEval/10", "run the same command again")
    killer.join()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["results"] == {"passed": 2}
    assert summary["pass@1"][0] == 1
    assert benchmarks.main(cfg)["results"] == {"passed": 2, "timeout": 1}


@needs_tasks
def test_the_official_file_is_downloaded_once_and_only_whole(tmp_path, monkeypatch):
    data = FILES["humaneval"].read_bytes()
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if "gone" in self.path:
                return self.send_error(404)
            body = b"<html>sign in</html>" if "portal" in self.path else data
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:1000] if "cut" in self.path else body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    samples, downloads = [("HumanEval/0", "    pass\n")], str(tmp_path / "cache")
    cfg = config("humaneval", tmp_path, samples, tasks_file="", downloads=downloads)
    for kind, part in (("gone", "404"), ("cut", "IncompleteRead"), ("portal", "line 1")):
        monkeypatch.setitem(tasks.TASKS, "humaneval", f"{address}/{kind}/HumanEval.jsonl.gz")
        refused(cfg, "cannot be downloaded", part, "--tasks_file")
        assert not (tmp_path / "cache").exists()
    monkeypatch.setitem(tasks.TASKS, "humaneval", f"{address}/HumanEval.jsonl.gz")
    assert benchmarks.main(cfg)["results"] == {"fail": 1}
    assert (tmp_path / "cache" / "HumanEval.jsonl.gz").read_bytes() == data
    server.shutdown()
    server.server_close()
    assert len(asked) == 4
    assert benchmarks.main(cfg)["results"] == {"fail": 1}
    refused(dataclasses.replace(cfg, downloads=str(tmp_path / "other")), "Connection refused")


@needs_tasks
def test_programs_run_through_a_router_to_e2b(cloud, tmp_path):  # noqa: F811
    samples = [official("humaneval")[0][::2], ("HumanEval/1", "    return []\n")]
    state = cloud()
    cfg = config(
        "humaneval",
        tmp_path,
        samples,
        runner="e2b",
        e2b_router_url=state.url.removeprefix("http://"),
    )
    state.works = False
    refused(cfg, "2 samples could not be run", "no sandbox", "run the same command again")
    state.works = True
    assert benchmarks.main(cfg)["results"] == {"passed": 1, "fail": 1}
    assert len(state.scripts) == 4


# ---- models


LIBRARY = Path(sysconfig.get_paths()["stdlib"])
SOURCES = [LIBRARY / f"{name}.py" for name in ("ast", "calendar", "csv")]


def new_tokenizer(path, special):
    """Train a byte-level BPE of 400 tokens on a few modules and save it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=letters
    )
    tokenizer.train([str(source) for source in SOURCES], trainer)
    path.write_text(tokenizer.to_str())
    return path


@pytest.fixture(scope="module")
def pythoncoder(tmp_path_factory):
    """A run folder of train_tpu.py with a small PythonCoder that nobody trained."""
    import jax

    folder = tmp_path_factory.mktemp("pythoncoder")
    new_tokenizer(folder / "tokenizer.json", ["<|endoftext|>"])
    cfg = model_pythoncoder.Config(512, 32, 2, 4, 2, head_size=8, ffn=48, positions=512)
    store = checkpoints.Checkpoints(folder)
    params = model_pythoncoder.new_params(cfg, 0)
    store.save(4, {"params": params}, {"model": dataclasses.asdict(cfg), "step": 4})
    store.close()
    jax.clear_caches()
    return folder


@pytest.fixture(scope="module")
def dream(tmp_path_factory):
    """A small Dream that nobody trained, as convert_weights.py would write it, a tokenizer and a
    chat template.
    """
    import jax
    from flax import nnx

    import model_dream

    folder = tmp_path_factory.mktemp("dream")
    new_tokenizer(
        folder / "tokenizer.json", ["<pad>", "<bos>", "<|endoftext|>", "<unk>", "<|mask|>"]
    )
    cfg = model_dream.DreamConfig(
        512, 32, 1, 2, 1, 16, 64, positions=1024, mask_id=4, pad_id=0, bos_id=1, eos_id=2
    )
    template = "User: {{ messages[0].content }}\nAssistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    checkpoints.save(model_dream, folder / "model", model_dream.Dream(cfg, nnx.Rngs(0)), files)
    jax.clear_caches()
    return folder / "model"


def save_flat(dream, logits_V, folder, tokenizer):
    """A Dream with these logits everywhere: layers add nothing to an embedding of ones, and the
    head's rows sum up.
    """
    import jax.numpy as jnp

    import model_dream

    model, _ = checkpoints.load(model_dream, dream)
    for name in ("o_proj", "down_proj"):
        matrix = getattr(model.layers["0"], name)
        matrix.set_value(0 * matrix.get_value())
    model.embed_tokens.set_value(jnp.ones((512, 32)))
    model.lm_head.set_value(jnp.asarray(np.repeat(logits_V[:, None], 32, 1) / 32, jnp.float32))
    checkpoints.save(model_dream, folder, model, [tokenizer])


def test_an_end_token_of_any_name_stands_in_no_program(dream, tmp_path):
    tokenizer = new_tokenizer(
        tmp_path / "tokenizer.json", ["<pad>", "<bos>", "</s>", "<unk>", "<|mask|>"]
    )
    save_flat(dream, np.where(np.arange(512) == 2, 1.0, -99.0), tmp_path / "flat", tokenizer)
    settings = {"max_new": 8, "batch_size": 1, "dream": benchmarks.DreamFlags(steps=1)}
    cfg = benchmarks.resolve(
        benchmarks.Config(model="dream", ckpt=str(tmp_path / "flat"), **settings)
    )
    writer = writers.dream_writer(cfg, benchmarks.protocol_of(cfg)[1], tmp_path / "flat", None)
    assert writer.write([[7, 8]], 0, [10], None) == [[]]


@pytest.mark.parametrize(("top_k", "least", "most"), [(None, 1, 50), (0, 51, 60)])
def test_dreamcoders_protocol_draws_from_50_of_60_tokens_in_the_nucleus(
    top_k, least, most, dream, tmp_path
):
    logits_V = np.full(512, -99.0)
    logits_V[100:160] = -1e-4 * np.arange(60)  # no two are equal, and 0.95 of them are 57
    save_flat(dream, logits_V, tmp_path / "flat", dream / "tokenizer.json")
    flags = benchmarks.DreamFlags(top_k=top_k, steps=1)
    settings = {
        "protocol": "dreamcoder_instruct",
        "top_p": 1.0,
        "max_new": 500,
        "batch_size": 1,
        "dream": flags,
    }
    cfg = benchmarks.resolve(
        benchmarks.Config(model="dream", ckpt=str(tmp_path / "flat"), **settings)
    )
    _, record = benchmarks.protocol_of(cfg)
    writer = writers.dream_writer(cfg, record, tmp_path / "flat", None)
    (new,) = writer.write([[7, 8]], 0, [502], None)
    assert {*new} <= {*range(100, 160)}
    assert least <= len({*new}) <= most
    assert most == 60 or max(new) == 149  # the likeliest 50


@needs_tasks
@pytest.mark.parametrize("model", [pytest.param("pythoncoder", marks=pytest.mark.slow), "dream"])
def test_a_trained_model_writes_programs_and_resuming_equals_not_stopping(
    model, request, tmp_path, capsys
):
    settings = {
        "pythoncoder": {"task": "humaneval", "max_new": 16},
        # one problem: the canvases of two would be two programs to compile
        "dream": {
            "task": "humaneval",
            "max_new": 8,
            "threshold": 0.5,
            "chat": "on",
            "int4": True,
            "top_k": 50,
        }
        | {"problems": 1, "n": 6},
    }
    shared = {"model": model, "ckpt": str(request.getfixturevalue(model)), "batch_size": 2}
    cfg = config(tmp_path=tmp_path, **shared | {"problems": 2, "n": 3} | settings[model])
    row = benchmarks.main(cfg)
    assert row["n"] == cfg.n
    assert row["samples"] == 6
    assert row["problems"] == cfg.problems
    assert {"pass@1", f"pass@{cfg.n}", "best of n"} <= set(row)
    path = tmp_path / "out" / "samples.jsonl"
    uninterrupted = path.read_bytes()
    rows = [json.loads(line) for line in uninterrupted.splitlines()]
    assert len({r["completion"] + r.get("written", "") for r in rows}) >= 4
    assert all(r["fits"] for r in rows)
    scored = sorted(results(cfg.out), key=str)
    written = [
        [(r["task_id"], r["completion"], r["sample"]) for r in kind] for kind in (rows, scored)
    ]
    assert sorted(written[0]) == sorted(written[1])
    lines = uninterrupted.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:30])
    (tmp_path / "out" / "results.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in scored[:3]) + '{"task'
    )
    capsys.readouterr()
    assert benchmarks.main(cfg) == row
    # the first of three batches was there
    assert capsys.readouterr().err.count("of 6 samples\n") == 2
    assert path.read_bytes() == uninterrupted
    assert sorted(results(cfg.out), key=str) == scored
    refused(dataclasses.replace(cfg, temperature=0.5), "holds results with temperature=0.8")
    if model == "dream":
        # reaches the sampler, which wants blocks for it
        flags = benchmarks.DreamFlags(cache="dual")
        refused(
            dataclasses.replace(cfg, out=str(tmp_path / "cache"), dream=flags), "set block_length"
        )
        flags = dataclasses.replace(cfg.dream, fast_dllm=True)
        refused(dataclasses.replace(cfg, dream=flags), "holds results with fast_dllm=False")
        (Path(cfg.ckpt) / "tokenizer_config.json").unlink()
        refused(dataclasses.replace(cfg, out=str(tmp_path / "other")), "holds no chat template")
    else:
        refused(dataclasses.replace(cfg, step=99), "holds no checkpoint of step 99; it has [")
        refused(
            dataclasses.replace(cfg, dream=benchmarks.DreamFlags(chat="on")),
            "--chat",
            "for --model=dream",
        )


@pytest.mark.slow
@needs_tasks
def test_a_dream_of_blocks_writes_programs_behind_its_exact_cache(dream, tmp_path):
    shutil.copytree(dream, tmp_path / "blocks")
    path = tmp_path / "blocks" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bd_size": 4}))
    settings = {"max_new": 8, "threshold": 0.5, "chat": "off", "problems": 2, "batch_size": 2}
    cfg = config("humaneval", tmp_path, model="dream", ckpt=str(tmp_path / "blocks"), **settings)
    assert benchmarks.main(cfg)["samples"] == 2
    cfg = dataclasses.replace(
        cfg, out=str(tmp_path / "a"), dream=benchmarks.DreamFlags(alg="origin", chat="off")
    )
    refused(cfg, "a model of blocks is filled without order by origin")


@pytest.mark.slow
@needs_tasks
def test_dream_writes_under_a_protocol_and_its_texts_are_explained(dream, tmp_path):
    settings = {
        "protocol": "dream_base",
        "max_new": 8,
        "threshold": 0.5,
        "problems": 2,
        "batch_size": 2,
    }
    cfg = config("humaneval", tmp_path, model="dream", ckpt=str(dream), **settings)
    row = benchmarks.main(cfg)
    assert row["settings"]["protocol"] == "dream_base/humaneval"
    assert (
        row["settings"]["temperature"],
        row["settings"]["top_p"],
        row["settings"]["max_new"],
    ) == (0.2, 0.95, 8)
    assert row["settings"]["model_sha256"] == benchmarks.fingerprint(dream, "out")
    inside = shutil.copytree(dream, tmp_path / "dream")  # results may lie in the model's folder
    (inside / "humaneval").mkdir()
    (inside / "humaneval" / "config.json").write_text("{}")
    assert benchmarks.fingerprint(inside, inside / "humaneval") == benchmarks.fingerprint(
        dream, "out"
    )
    problems = tasks.read_problems(cfg)
    samples = tmp_path / "out" / "samples.jsonl"
    for line in map(json.loads, samples.read_text().splitlines()):
        asked = problems[tasks.key_of(line["task_id"])].asked
        record = protocols.PROTOCOLS["dream_base/humaneval"]
        assert (
            line["completion"]
            == line["solution"]
            == protocols.candidate(record, line["written"], asked)
        )
    again = explained(cfg, samples=str(samples), out=str(tmp_path / "explained"))
    assert explain.main(again)["samples"] == 2
    chat = dataclasses.replace(cfg, protocol="dream_instruct", out=str(tmp_path / "chat"))
    refused(chat, "needs a chat template, and the tokenizer has no <|im_start|>")


@pytest.mark.slow
@needs_tasks
def test_batches_of_dream_are_on_all_devices_and_few_programs(dream, tmp_path, capsys):
    import sample_dream

    cfg = benchmarks.resolve(
        config("humaneval", tmp_path, model="dream", ckpt=str(dream), max_new=2, batch_size=2)
    )
    problems = sorted(tasks.read_problems(cfg).values(), key=lambda p: len(p.asked.prompt))
    record = benchmarks.protocol_of(cfg)[1]
    writer = writers.dream_writer(cfg, record, dream, 0)
    assert "8 x cpu; mesh data 2" in capsys.readouterr().err
    ids = [benchmarks.prompt_ids(cfg, record, writer, problem.asked) for problem in problems]
    lengths = sorted(len(prompt) + 2 for prompt in ids)
    before, widths = sample_dream.fill_block._cache_size(), set()
    for first in range(0, len(problems), 20):
        prompts = ids[first : first + 2]
        widths.add(sample_dream.canvas_width(max(map(len, prompts)) + 2, 1024))
        assert all(map(len, writer.write(prompts, 0, lengths, None)))
    assert len(widths) > 5
    assert sample_dream.fill_block._cache_size() - before <= 3


# ---- holes, in the form of OpenAI's human-eval-infilling


def hole(task_id, prompt, solution, suffix, entry, asserts):
    test = "def check(candidate):\n" + "".join(f"    assert candidate{line}\n" for line in asserts)
    keys = "task_id", "prompt", "canonical_solution", "suffix", "entry_point", "test"
    return dict(zip(keys, (task_id, prompt, solution, suffix, entry, test), strict=True))


SUM = "def add(a, b):\n", "    return a + b\n", "\n", "add", ["(1, 2) == 3", "(-1, 1) == 0"]
LOOP = "    for i, x in enumerate(xs):\n        if x == want:\n            return i\n"
FIND = (
    "def find(xs, want):\n",
    LOOP,
    "    return -1\n",
    "find",
    ["([4, 5], 5) == 1", "([], 1) == -1"],
)
# a span of characters
HALF = "def half(n):\n    ret", "urn n /", "/ 2\n", "half", ["(5) == 2", "(4) == 2"]
HELP = (
    "def twice(n):\n",
    "    return double(n)\n",
    "\n\ndef double(n):\n    return 2 * n\n",
    "twice",
    ["(4) == 8"],
)
HOLES = {
    "single-line": [
        hole("SingleLineInfilling/HumanEval/0/L0", *SUM),
        hole("SingleLineInfilling/HumanEval/1/L0", *HELP),
    ],
    "multi-line": [hole("MultiLineInfilling/HumanEval/0/L0_L2", *FIND)],
    "random-span": [
        hole("RandomSpanInfilling/HumanEval/0/1", *HALF),
        hole("RandomSpanInfilling/HumanEval/0/2", *SUM),
    ],
}


def holes_config(split, tmp_path, samples=None, **settings):
    file = tmp_path / f"{split}.jsonl.gz"
    file.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in HOLES[split]).encode())
    )
    return config(
        "humaneval_infilling", tmp_path, samples, tasks_file=str(file), split=split, **settings
    )


def openai_verdict(row, completion):
    """As check_correctness of human-eval-infilling decides, whose program this is; the texts are
    ours.
    """
    program = (
        row["prompt"]
        + completion
        + row["suffix"]
        + "\n"
        + row["test"]
        + "\n"
        + f"check({row['entry_point']})"
    )
    with contextlib.suppress(BaseException):
        exec(program, {})
        return True
    return False


@pytest.mark.parametrize("split", HOLES)
def test_a_hole_is_filled_between_prompt_and_suffix_and_judged_as_openai_judges_it(split, tmp_path):
    texts = (
        "    return 0\n",
        "",
        "    pass\n",
        "```python\n    return a + b\n```",
        "urn (n) /",
        "  return a+b",
        "retur",
    )
    for number, text in enumerate((None, *texts)):
        samples = [
            (row["task_id"], row["canonical_solution"] if text is None else text)
            for row in HOLES[split]
        ]
        cfg = holes_config(split, tmp_path, samples, out=str(tmp_path / f"out{number}"))
        row = benchmarks.main(cfg)
        pairs = zip(HOLES[split], samples, strict=True)
        want = {hole["task_id"]: openai_verdict(hole, text) for hole, (_, text) in pairs}
        assert {found["task_id"]: found["passed"] for found in results(cfg.out)} == want
        assert row["split"] == split
        assert row["pass@1"][0] == (1.0 if text is None else np.mean([*want.values()]))
    refused(
        dataclasses.replace(cfg, split="all"),
        "--split=all: of humaneval_infilling there are single-line, multi",
    )
    refused(
        config("humaneval", tmp_path, samples, split="single-line"),
        "of humaneval there are test, all",
    )


@pytest.mark.parametrize("grows", [False, True])
def test_a_dream_fills_holes_of_unknown_length(dream, tmp_path, grows):
    import infill
    import model_dream
    import sample_dream

    if grows:  # with an id for a mask that becomes two
        folder = shutil.copytree(dream, tmp_path / "grows")
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | {"expand_token_id": 511}))
        dream = folder
    cfg = holes_config(
        "single-line", tmp_path, model="dream", ckpt=str(dream), batch_size=2, max_new=8
    )
    assert benchmarks.main(cfg)["samples"] == 2
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    ]
    given = {row["task_id"]: row for row in HOLES["single-line"]}
    for row in rows:
        problem = given[row["task_id"]]
        assert row["solution"] == problem["prompt"] + row["completion"] + problem["suffix"]
        assert row["completion"]
    # the same by hand
    record = benchmarks.protocol_of(benchmarks.resolve(cfg))[1]
    writer = writers.dream_writer(benchmarks.resolve(cfg), record, dream, 0)
    model, _ = checkpoints.load(model_dream, dream)
    read, problem = infill.Reader(model, writer.tokenizer), HOLES["single-line"][0]
    before, behind = (
        writer.tokenizer.encode(problem[key], add_special_tokens=False).ids
        for key in ("prompt", "suffix")
    )
    (new,) = writer.write([writer.hole(before, behind)], 0, [], None)
    (row,) = (row for row in rows if row["task_id"] == problem["task_id"])
    assert writer.tokenizer.decode(new, skip_special_tokens=False) == row["written"]
    if grows:
        assert new == infill.grow(read, before, behind, sample_dream.Sampling(), most=8)
    else:
        assert len(new) in infill.LENGTHS
    assert not {*new} & {model.cfg.mask_id, model.cfg.eos_id, model.cfg.expand_id}


def test_pythoncoder_gets_a_hole_in_its_fill_in_the_middle_form(pythoncoder, tmp_path):
    cfg = holes_config("single-line", tmp_path, ckpt=str(pythoncoder), batch_size=2, max_new=8)
    refused(cfg, "text after a hole needs <|fim_prefix|>, <|fim_suffix|>, <|fim_middle|>")
    folder = shutil.copytree(pythoncoder, tmp_path / "fim")
    names = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    new_tokenizer(folder / "tokenizer.json", names)
    cfg = dataclasses.replace(cfg, ckpt=str(folder), out=str(tmp_path / "fim_out"))
    assert benchmarks.main(cfg)["samples"] == 2
    resolved = benchmarks.resolve(cfg)
    record = benchmarks.protocol_of(resolved)[1]
    writer = writers.pythoncoder_writer(resolved, record, folder, 4)
    problem = tasks.read_problems(resolved)["SingleLineInfilling/HumanEval/0/L0"]
    ids = benchmarks.prompt_ids(resolved, record, writer, problem.asked)
    text = writer.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == f"<|fim_prefix|>{SUM[0]}<|fim_suffix|>{SUM[2]}<|fim_middle|>"


def test_no_text_takes_minutes_to_cut():
    assert protocols.extract("```" + " " * 20_000 + "`\n", "f", ())  # cubic time, once
    with pytest.raises(ValueError, match="takes too long"):
        protocols.evalplus_sanitize("@a\n" * 400, protocols.Question("f"))


def test_problems_of_one_number_are_refused():
    row = {
        "prompt": 'def f():\n    """Go."""\n',
        "entry_point": "f",
        "test": "def check(f):\n    pass\n",
    }
    row["canonical_solution"] = ""
    lines = "\n".join(json.dumps(row | {"task_id": f"{split}/0"}) for split in ("easy", "hard"))
    with pytest.raises(ValueError, match="hard/0 and easy/0 have one number"):
        tasks.parse_problems("humaneval", lines.encode())


@needs_tasks
def test_prompts_that_do_not_fit_the_model_fail_and_are_named(pythoncoder, tmp_path):
    cfg = config(
        "humaneval", tmp_path, ckpt=str(pythoncoder), problems=3, max_new=5000, batch_size=2
    )
    assert benchmarks.main(cfg)["results"] == {"does not fit": 3}
    assert benchmarks.main(cfg)["results"] == {"does not fit": 3}


@needs_tasks
def test_the_command_line_prints_text_and_json(tmp_path):
    cfg = config(
        "humaneval", tmp_path, [("HumanEval/0", "    return None\n"), official("humaneval")[0][::2]]
    )
    text = subprocess.run(command_of(cfg), capture_output=True, text=True, timeout=60)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("humaneval: 2 samples of 1 of 164 problems; ")
    assert (
        "pass@1: 50.0 % (5.5 to 94.5: 95 %, Wilson, over 1 problems)\npass@2: 100.0 %"
        in text.stdout
    )
    assert "best of n: 100.0 %" in text.stdout
    line = subprocess.run(
        command_of(dataclasses.replace(cfg, json=True)), capture_output=True, text=True, timeout=60
    )
    assert json.loads(line.stdout) == json.loads((tmp_path / "out" / "summary.json").read_text())


@pytest.mark.slow
def test_model_and_tasks_can_be_in_a_bucket(pythoncoder, bucket, tmp_path):
    env = os.environ | AS_A_USER | bucket
    row = {"task_id": "x/0", "prompt": 'def f(x):\n    """Return x."""\n', "entry_point": "f"}
    row |= {
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    copy_in_bucket(bucket, "put", f"{pythoncoder}/", "bucket/coder/")
    copy_in_bucket(bucket, "put", str(tmp_path / "tasks.jsonl"), "bucket/tasks.jsonl")
    flags = (
        "--ckpt=gs://bucket/coder",
        "--tasks_file=gs://bucket/tasks.jsonl",
        f"--out={tmp_path / 'out'}",
    )
    for _ in range(2):  # the second reads the model's files alone, to see that they are the same
        done = run("benchmarks.py", *flags, "--max_new=16", env=env)
        assert done.returncode == 0, done.stderr
        assert "1 samples of 1 of 1 problems" in done.stdout
    says(
        run("benchmarks.py", "--ckpt=gs://bucket/none", *flags[1:], env=env),
        "gs://bucket/none holds no checkpoint",
    )
