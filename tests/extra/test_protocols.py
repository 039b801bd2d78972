"""extra/protocols.py: every protocol against its harness, byte for byte; LiveCodeBench by its rules.

The names are those of the golden files.
"""

import base64
import dataclasses
import gzip
import itertools
import json
import pickle
import random
import re
import shutil
import zlib

import protocols
import pytest
from test_benchmarks import config, dream, refused, score, texts_of, write  # noqa: F401
from test_problems import FILES, needs_tasks
from test_sandbox import layers  # noqa: F401  a fixture

import benchmarks
import problems as tasks
import sandbox

ALIASES = {  # name in the golden files: the equal record
    "dream_base_mbpp/mbpp": "dream_base/mbpp",
    "lm_eval_0.4.8/humaneval": "lm_eval/humaneval",
    "lm_eval_0.4.8/mbpp": "lm_eval/mbpp",
    "lm_eval_0.4.9.2/humaneval": "lm_eval/humaneval",
    "lm_eval_0.4.9.2/mbpp": "lm_eval/mbpp",
    "lm_eval_0.4.9.2/humaneval_instruct": "lm_eval/humaneval_instruct",
    "lm_eval_head/humaneval": "lm_eval/humaneval",
    "lm_eval_head/mbpp": "lm_eval/mbpp",
    "lm_eval_head/humaneval_instruct": "lm_eval/humaneval_instruct",
    "evalplus_head_base/humaneval": "evalplus_base/humaneval",
    "evalplus_head_base/mbpp": "evalplus_base/mbpp",
    "evalplus_head_instruct/humaneval": "evalplus_instruct/humaneval",
    "evalplus_head_instruct/mbpp": "evalplus_instruct/mbpp",
}
HARNESSES = protocols.PROTOCOLS | {
    alias: protocols.PROTOCOLS[name] for alias, name in ALIASES.items()
}

SHOTS = (  # the problems 2, 3, 4 of the full MBPP, which is not among our data
    tasks.Problem(
        text="Write a function to find the similar elements from the given two tuple lists.",
        tests=(
            "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
            "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)",
            "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)",
        ),
        reference="def similar_elements(test_tup1, test_tup2):\r\n  res = tuple(set(test_tup1) & set(test_tup2))\r\n"
        "  return (res) ",
    ),
    tasks.Problem(
        text="Write a python function to identify non-prime numbers.",
        tests=(
            "assert is_not_prime(2) == False",
            "assert is_not_prime(10) == True",
            "assert is_not_prime(35) == True",
        ),
        reference="import math\r\ndef is_not_prime(n):\r\n    result = False\r\n"
        "    for i in range(2,int(math.sqrt(n)) + 1):\r\n        if n % i == 0:\r\n            result = True\r\n"
        "    return result",
    ),
    tasks.Problem(
        text="Write a function to find the largest integers from a given list of numbers using heap queue algorithm.",
        tests=(
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]",
        ),
        reference="import heapq as hq\r\ndef heap_queue_largest(nums,n):\r\n  largest_nums = hq.nlargest(n, nums)\r\n"
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
    humaneval = {tasks.key_of(row["task_id"]): humaneval_question(row) for row in rows}
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


def humaneval_question(row):
    tests = row["test"], f"check({row['entry_point']})"
    return tasks.Problem("", row["entry_point"], row["prompt"], tests=tests)


def mbpp_question(text, tests):
    docstring = f'"""\n{text}\n{tests[0]}\n"""\n'
    entry = tasks.called(tests)
    return tasks.Problem("", entry, docstring, text=text, tests=tuple(tests), shots=SHOTS)


@pytest.mark.golden
@needs_tasks
def test_every_prompt_and_what_comes_after_it(golden_dir, questions):
    for name, golden in read(golden_dir, "prompts").items():
        protocol = HARNESSES[name]
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


@pytest.mark.golden
@needs_tasks
def test_every_candidate(golden_dir, questions):
    golden = read(golden_dir, "postprocess")
    cases = {case["id"]: case for case in golden["cases"]}
    for name, out in golden["out"].items():
        protocol = HARNESSES[name]
        for case, text in out.items():
            question = questions[protocol.data[0]][str(cases[case]["key"])]
            try:
                found = protocols.candidate(protocol, cases[case]["raw"], question)
            except (SyntaxError, ValueError, RecursionError) as error:
                found = {"raises": type(error).__name__}
            assert found == text, (name, case)


@pytest.mark.golden
@needs_tasks
def test_newer_transformers_keep_the_end_of_a_prefix(questions):
    for name in ("dream_instruct/humaneval_instruct", "lm_eval_head/mbpp_instruct"):
        protocol = HARNESSES[name]
        question = next(iter(questions[protocol.data[0]].values()))
        kept = protocols.prompt(protocol, question, trim_prefix=False)
        assert kept == protocols.prompt(protocol, question) + "\n" * (
            2 if "{prompt}" in protocol.prefix else 1
        ), name


# One launcher runs many programs, each as a test with an input of its own; it has run to its end if
# it prints this.
RUNS_ITS_INPUT = "import sys\nexec(sys.stdin.read(), {'__name__': 'program'})\nsys.__stdout__.write('\\nit is through')"


@pytest.mark.golden
@needs_tasks
def test_which_right_answers_survive(golden_dir, questions):
    cases = {case["id"]: case for case in read(golden_dir, "postprocess")["cases"]}
    rows = []
    for name, golden in read(golden_dir, "survives").items():
        protocol = HARNESSES[name]
        for case, survives in golden.items():
            question = questions[protocol.data[0]][str(cases[case]["key"])]
            code = protocols.candidate(protocol, cases[case]["raw"], question)
            # whichever tests a harness has, it was the original ones that ran
            original = questions["mbpp" if question.text else "humaneval"][str(cases[case]["key"])]
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


# ---- rules of harnesses


def test_the_first_line_of_a_body_is_cut_as_evalplus_cuts_it():
    record = protocols.PROTOCOLS["dreamcoder_instruct/mbpp"]
    for text, kept in [
        ("  import math\n  return math.sqrt(x)\n", "import math"),
        ("\timport math  # for the root\n", "import math"),
        ("  import math; add = math.fsum\n  return add\n", "import math\nadd = math.fsum"),
        ("  add = lambda a, b: a + b\n", "add = lambda a, b: a + b"),
        ("  def add(a, b): return a + b\n", "def add(a, b): return a + b"),
        ("  x = 1\n  return x\n", "  x = 1"),
        ("  return a + b\n", "  return a + b"),
    ]:  # by evalplus 0.3.1's own sanitize()
        assert protocols.candidate(record, text, tasks.Problem(entry="add")) == kept
    with pytest.raises(ValueError, match="takes too long"):
        protocols.evalplus_sanitize("@a\n" * 400, tasks.Problem(entry="f"))


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


def test_a_harness_does_not_define_the_helpers_of_a_prompt_again(tmp_path):
    """As in HumanEval/50 the test calls a function of the prompt, which dream_base's rules drop
    from the program.
    """
    prompt = 'def code(x):\n    return x + 1\n\n\ndef back(x):\n    """Undo code."""\n'
    row = {"task_id": "HumanEval/50", "prompt": prompt, "entry_point": "back"}
    row["test"] = "def check(candidate):\n    assert candidate(code(3)) == 3"
    problem = tasks.humaneval_problem(row)
    for name, passes in (("evalplus_base", True), ("dream_base", False), ("openai", False)):
        key, record = protocols.named(name, "humaneval")
        record = record._replace(prompt_first=False)
        (tmp_path / name).mkdir()
        samples = [{"task_id": row["task_id"], "solution": "def back(x):\n    return x - 1\n"}]
        cfg = benchmarks.settle(config("humaneval", tmp_path / name, samples))
        cfg = protocols.Config(**vars(cfg), protocol=name)
        protocol = protocols.Harness(cfg, key, record)
        report = benchmarks.evaluate(cfg, {"50": problem}, protocol, protocols.HarnessScorer)
        assert report["pass@1"][0] == passes, name


# ---- the command

F = "`" * 3
ADD = "HumanEval/53", "    return x + y\n"
BLOCK = f"{F}python\ndef add(x: int, y: int):\n    return x + y\n{F}"


def of_protocol(cfg, name, out, **settings):
    return protocols.Config(**vars(cfg) | {"protocol": name, "out": str(out)} | settings)


@needs_tasks
def test_protocols_do_not_mix_and_set_what_no_flag_does(tmp_path, monkeypatch):
    plain = config("humaneval", tmp_path, [(ADD[0], BLOCK)], timeout_s=None)
    plain = dataclasses.replace(plain, top_p=None)
    cfg = of_protocol(plain, "evalplus_instruct", tmp_path / "out")
    row = protocols.main(cfg)
    # a whole function in a block: evalplus takes it, lm_eval cuts it away
    assert row["pass@1"][0] == 1
    assert row["settings"]["protocol"] == "evalplus_instruct/humaneval"
    assert row["settings"]["timeout_s"] == 4
    other = dataclasses.replace(cfg, protocol="lm_eval")
    refused(other, "holds results with", "protocol='evalplus_instruct/", script=protocols)
    other = dataclasses.replace(other, out=str(tmp_path / "other"))
    assert protocols.main(other)["pass@1"][0] == 0
    # a candidate of one protocol is no text for another; what was written is
    line = {"task_id": ADD[0], "completion": "", "protocol": "dream_base/humaneval"}
    mixed = write(tmp_path / "mixed.jsonl", [line])
    mixed = dataclasses.replace(other, out=str(tmp_path / "mixed"), samples=mixed)
    of_another = "holds samples of --protocol=dream_base/humaneval, and this is lm_eval/humaneval"
    refused(mixed, of_another, script=protocols)
    write(tmp_path / "mixed.jsonl", [line | {"written": ADD[1]}])
    assert protocols.main(mixed)["pass@1"][0] == 1
    # half of the problems are another benchmark
    (tmp_path / "half.jsonl").write_bytes(b"".join(gzip.open(FILES["humaneval"]).readlines()[:82]))
    half = dataclasses.replace(mixed, tasks_file=str(tmp_path / "half.jsonl"))
    refused(half, "82 problems; --protocol=lm_eval/humaneval is of 164", script=protocols)
    full = of_protocol(config("mbpp", tmp_path, [(11, "x")]), "lm_eval", tmp_path / "full")
    asks = "asks for mbpp.jsonl, the full MBPP, ids 11-510, and this is sanitized-mbpp.json"
    refused(full, asks, script=protocols)
    unknown = dataclasses.replace(cfg, protocol="bigcodes")
    refused(unknown, "'bigcodes' is no protocol of humaneval; there are ours,", script=protocols)
    found = []
    monkeypatch.setattr(
        benchmarks,
        "evaluate",
        lambda cfg, problems, protocol, scorer: found.extend((cfg, protocol)),
    )
    protocols.main(dataclasses.replace(cfg, protocol="dream_instruct", max_new=64))
    cfg, protocol = found
    assert protocol.name == "dream_instruct/humaneval_instruct"
    assert (cfg.temperature, cfg.top_p, cfg.max_new, cfg.sandbox.timeout_s) == (0.1, 0.9, 64, 3)
    # only the provider of Dream-Coder's EvalPlus names no top_k; the others name None, which keeps
    # all tokens
    kept = {name for name, record in protocols.PROTOCOLS.items() if record.top_k}
    assert kept == {"dreamcoder_instruct/humaneval", "dreamcoder_instruct/mbpp"}


@needs_tasks
def test_a_dream_writes_under_a_protocol_and_through_its_chat_template(
    dream,  # noqa: F811
    tmp_path,
):
    settings = {
        "model": "dream",
        "ckpt": str(dream),
        "threshold": 0.5,
        "problems": 2,
        "batch_size": 2,
    }
    plain = config("humaneval", tmp_path, timeout_s=None, **settings)
    cfg = of_protocol(plain, "dream_base", tmp_path / "out", max_new=8, top_p=None)
    row = protocols.main(cfg)["settings"]
    assert (row["protocol"], row["temperature"], row["top_p"]) == (
        "dream_base/humaneval",
        0.2,
        0.95,
    )
    problems = tasks.read_problems(cfg)
    for line in texts_of(cfg.out):
        problem = problems[tasks.key_of(line["task_id"])]
        found = protocols.candidate(
            protocols.PROTOCOLS["dream_base/humaneval"], line["written"], problem
        )
        assert line["completion"] == line["solution"] == found
    chat = of_protocol(cfg, "dream_instruct", tmp_path / "chat")
    refused(chat, "needs a chat template, and the tokenizer has no <|im_start|>", script=protocols)
    chat = of_protocol(cfg, "ours_chat", tmp_path / "own", problems=1)
    refused(chat, "holds no chat template", script=protocols)
    folder = shutil.copytree(dream, tmp_path / "model")
    template = {"chat_template": "User: {{ messages[0].content }}\nAssistant:"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    row = protocols.main(dataclasses.replace(chat, ckpt=str(folder)))
    assert (row["samples"], row["settings"]["protocol"]) == (1, "ours_chat/humaneval")


@needs_tasks
def test_an_import_from_the_future_may_follow_the_prompt_of_qwen_base():
    problem = next(iter(tasks.parse_problems("mbpp", FILES["mbpp"].read_bytes()).values()))
    code = f"from __future__ import annotations\n{problem.reference}"
    record = protocols.PROTOCOLS["qwen_base/mbpp"]
    found = protocols.program(record, protocols.candidate(record, code, problem), problem)
    (result,) = sandbox.run_tests([found], [[problem.test]])
    assert result.verdicts == ["pass"]


# ---- LiveCodeBench


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
    row, found = score(tmp_path, "livecodebench", [SUM, PLUS_N], samples, protocols, timeout_s=1.0)
    assert [result["result"] for result in found] == [result for _, _, result in LIVE]
    assert found[2]["wrong"] == ["test", 1]
    assert row["results"] == {"fail": 8, "passed": 8, "timeout": 1}
    answer = f"So:\n{F}python\nprint(1)\n{F}\nNo, rather:\n{F}python\n{LIVE[0][1]}\n{F}\n"
    code = {"task_id": "abc301_a", "completion": LIVE[0][1]}
    out = str(tmp_path / "fenced")
    report, _ = score(tmp_path, "livecodebench", [SUM], [code], protocols, out=out)
    assert report["results"] == {"passed": 1}
    assert protocols.last_block(answer, None) == LIVE[0][1]
    assert protocols.last_block("print(1)", None) == "print(1)"
    assert protocols.last_block(f"{F}python\nprint(1)", None) == ""


def test_problems_of_livecodebench_are_those_of_the_days(tmp_path, capsys):
    later = SUM | {"question_id": "later", "contest_date": "2025-04-01T10:00:00"}
    folder = tmp_path / "tests"
    folder.mkdir()
    write(folder / "test.jsonl", [SUM, PLUS_N])
    write(folder / "test2.jsonl", [later])
    cfg = protocols.Config("livecodebench", tasks_file=str(folder), out=str(tmp_path / "out"))
    for since, until, ids in (("", "", ["abc301_a", "3606", "later"]),
                              ("2024-12-01", "2025-03-01", ["abc301_a", "3606"]),
                              ("2024-12-02", "", ["3606", "later"]), ("", "2024-12-01", ["abc301_a"]),
                              ("2025-04-01", "", ["later"]), ("2025-03-01", "2025-04-01", ["3606"])):  # fmt: skip
        chosen = dataclasses.replace(cfg, since=since, until=until)
        assert [*protocols.live_problems(chosen)] == ids
    problems = protocols.live_problems(cfg)
    asked = "### Question:\nAdd.\n\n### Format: Read the inputs from stdin"
    assert problems["abc301_a"].prompt.startswith(asked)
    starter = f"{F}python\n{PLUS_N['starter_code']}\n{F}\n\n### Answer: (use the"
    assert starter in problems["3606"].prompt
    samples = [{"task_id": i, "solution": ""} for i in ("abc301_a", "3606")]
    samples = write(tmp_path / "given.jsonl", samples)
    chosen = dataclasses.replace(cfg, since="2025-01-01", samples=samples)
    assert protocols.main(chosen)["samples"] == 1
    assert "1 samples, such as abc301_a, are skipped" in capsys.readouterr().err
    for settings, part in (({"since": "2030-01-01"}, "no problem of LiveCodeBench"),
                           ({"since": "2024-1-1"}, "--since and --until are days"),
                           ({"tasks_file": ""}, "livecodebench/code_generation_lite"),
                           ({"tasks_file": samples}, "line 1 is not a JSON object with question"),
                           ({"task": "mbpp", "since": "2024-01-01"}, "days of LiveCodeBench")):  # fmt: skip
        refused(dataclasses.replace(chosen, **settings), part, script=protocols)


class Evil:
    def __reduce__(self):
        return (print, ("this was run",))


def test_pickled_tests_are_read_and_never_loaded(capsys):
    tests = [{"input": "é" * 300, "output": "\\", "testtype": "stdin"}]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert (
            json.loads(protocols.text_of_pickle(pickle.dumps(json.dumps(tests), protocol))) == tests
        )
    others = [pickle.dumps(value) for value in (Evil(), ["a"], ("a", "b"), 3)]
    for evil in (*others, b"", b"cos\nsystem\n"):
        with pytest.raises(ValueError, match=r"."):
            protocols.text_of_pickle(evil)
    assert "this was run" not in capsys.readouterr().out


def test_damaged_tests_of_one_problem_do_not_end_the_run():
    for private in ("AAAA", "[", "[1]", '[{"input": "1"}]'):
        problem = tasks.Problem(cases=protocols.Live("[]", private))
        assert protocols.live_cases(problem).startswith("its tests cannot be read: ")


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
    assert [protocols.same_lines(*pair) for pair in same] == [True] * len(same)
    assert [protocols.same_lines(*pair) for pair in other] == [False] * len(other)
