"""extra/protocols.py: every protocol against its harness, byte for byte; LiveCodeBench by its rules.

The names are those of the golden files.
"""

import dataclasses
import gzip
import itertools
import json
import random
import re
import shutil

import protocols
import pytest
from conftest import ROOT
from test_benchmarks import config, dream, refused, results, texts_of, write  # noqa: F401
from test_problems import FILES, needs_tasks
from test_sandbox import layers  # noqa: F401  a fixture

import benchmarks
import problems as tasks
import sandbox


def record_of(name):
    """The record of a name of the golden files: equal versions of a harness share one."""
    if name not in protocols.PROTOCOLS:
        name = re.sub(r"_0\.4\.8|_0\.4\.9\.2|_head|_mbpp(?=/)", "", name)
    return protocols.PROTOCOLS[name]


# the problems 2, 3, 4 of the full MBPP, which is not among our data
SHOTS = [json.loads(line) for line in (ROOT / "tests/programs/shots.jsonl").open()]
SHOTS = tuple(tasks.Problem(text=t, tests=tuple(a), reference=code) for t, a, code in SHOTS)


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
    answers = out["out"]["bigcode/mbpp"].items()
    known = [(numbers[case], text) for case, text in answers if isinstance(text, str)]
    known += prompts["bigcode/mbpp"]["prompts"].items()
    docstring = re.compile(r'"""\n(.*?)\n(assert.*?)\n"""\n', re.DOTALL)
    parts = {key: match for key, text in known if (match := docstring.match(text))}
    texts = {key: match[1] for key, match in parts.items()}
    tests = {key: [match[2]] for key, match in parts.items()}
    asserts = prompts["bigcode/mbpp"]["target"].items()
    tests |= {key: re.split(r"\n(?=assert)", text) for key, text in asserts}
    austin = re.compile(r"(?s).*here is your task: (.*?) Your code should pass these tests:")
    asked = prompts["lm_eval_head/mbpp"]["prompts"].items()
    said = {key: austin.match(text)[1] for key, text in asked}
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
        protocol = record_of(name)
        data = "mbpp from Austin's" if name == "bigcode/mbpp" else protocol.data[0]
        for key, text in golden["prompts"].items():
            assert protocols.prompt(protocol, questions[data][key]) == text, (name, key)
        for key, text in golden.get("target", {}).items():
            assert protocols.target(protocol, questions[data][key]) == text, (name, key)
        arguments = golden.get("generation_kwargs", {})
        assert list(protocol.stops) == golden.get("stop", arguments.get("until", [])), name
        assert protocol.shots == golden.get("num_fewshot", protocol.shots), name
        assert protocol.max_new == golden.get("max_new", protocol.max_new), name
        counts = [count for key in protocol.data for count in protocols.DATA[key][1]]
        assert golden["of"] in counts, name


@pytest.mark.golden
@needs_tasks
def test_every_candidate(golden_dir, questions):
    golden = read(golden_dir, "postprocess")
    cases = {case["id"]: case for case in golden["cases"]}
    for name, out in golden["out"].items():
        protocol = record_of(name)
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
        protocol = record_of(name)
        question = next(iter(questions[protocol.data[0]].values()))
        kept = protocols.prompt(protocol, question, trim_prefix=False)
        lines = 2 if "{prompt}" in protocol.prefix else 1
        assert kept == protocols.prompt(protocol, question) + "\n" * lines, name


# One launcher runs many programs, each as a test with an input of its own; it has run to its end if
# it prints this.
RUNS_ITS_INPUT = """import sys
exec(sys.stdin.read(), {'__name__': 'program'})
sys.__stdout__.write('\\nit is through')"""


@pytest.mark.golden
@needs_tasks
def test_which_right_answers_survive(golden_dir, questions):
    cases = {case["id"]: case for case in read(golden_dir, "postprocess")["cases"]}
    rows = []
    for name, golden in read(golden_dir, "survives").items():
        protocol = record_of(name)
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
    results = sandbox.run_tests([RUNS_ITS_INPUT] * launchers, shares)
    for share, result in zip(shares, results, strict=True):
        assert result.rate is not None, result.error
        for test, verdict, value in zip(share, result.verdicts, result.values, strict=True):
            passed[test.text] = None if verdict == "timeout" else value.endswith("it is through")
    return passed


# ---- rules of harnesses


def test_the_first_line_of_a_body_is_cut_as_evalplus_cuts_it(monkeypatch):
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
    # "@a" again and again is no Python up to its end; to parse that as often takes seconds
    monkeypatch.setattr(protocols, "first_error", len)
    with pytest.raises(ValueError, match="takes too long"):
        protocols.evalplus_sanitize("@a\n" * 2000, tasks.Problem(entry="f"))


@pytest.mark.slow
def test_a_text_that_takes_too_long_to_cut_is_refused_after_seconds():
    with pytest.raises(ValueError, match="takes too long"):
        protocols.evalplus_sanitize("@a\n" * 400, tasks.Problem(entry="f"))


def test_the_longest_program_is_that_of_all_runs_of_lines():
    """As the code of Dream and EvalPlus finds it: every run of lines is parsed; the first with most
    lines is kept.
    """

    def of_all_runs(lines, least):
        best, most = "", 0
        for first, end in itertools.combinations(range(len(lines) + 1), 2):
            run = "\n".join(lines[first:end])
            count = sum(bool(line.strip()) for line in lines[first:end])
            if end - first >= least and count > most and protocols.parsed(run) is not None:
                best, most = run, count
        return best

    parts = "Here it is:|def f(x):|    return x|x = (|)|'''|else:|try:|  y = [1,|]|@dec|\tz = 1||\\|x = \\|if x:|1 = x"
    rng = random.Random(0)
    drawn = [rng.choices(parts.split("|"), k=rng.randint(1, 9)) for _ in range(400)]
    for lines in (["\\", "", ""], *drawn):
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
    assert results(cfg.out)[0]["protocol"] == "evalplus_instruct/humaneval"
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

    def evaluate(cfg, problems, protocol, scorer):
        found.extend((cfg, protocol))

    monkeypatch.setattr(benchmarks, "evaluate", evaluate)
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
    settings = {"model": "dream", "ckpt": str(dream), "threshold": 0.5}
    settings |= {"problems": 2, "batch_size": 2}
    plain = config("humaneval", tmp_path, timeout_s=None, **settings)
    cfg = of_protocol(plain, "dream_base", tmp_path / "out", max_new=8, top_p=None)
    row = protocols.main(cfg)["settings"]
    name = "dream_base/humaneval"
    assert (row["protocol"], row["temperature"], row["top_p"]) == (name, 0.2, 0.95)
    problems = tasks.read_problems(cfg)
    for line in texts_of(cfg.out):
        problem = problems[tasks.key_of(line["task_id"])]
        found = protocols.candidate(protocols.PROTOCOLS[name], line["written"], problem)
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
    # what the prompt holds of an answer belongs to it: such a text may never end to think
    template = {"chat_template": "User: {{ messages[0].content }}\nAssistant: <think>\n"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    out = tmp_path / "thinks"
    protocols.main(dataclasses.replace(chat, ckpt=str(folder), out=str(out)))
    (sample,) = map(json.loads, (out / "samples.jsonl").read_text().splitlines())
    assert sample["written"].startswith("<think>")
    assert sample["completion"] == ""


@needs_tasks
def test_an_import_from_the_future_may_follow_the_prompt_of_qwen_base():
    problem = next(iter(tasks.parse_problems("mbpp", FILES["mbpp"].read_bytes()).values()))
    code = f"from __future__ import annotations\n{problem.reference}"
    record = protocols.PROTOCOLS["qwen_base/mbpp"]
    found = protocols.program(record, protocols.candidate(record, code, problem), problem)
    (result,) = sandbox.run_tests([found], [[problem.test]])
    assert result.verdicts == ["pass"]
