"""benchmarks.py: verdicts and pass@k, what a stop leaves, bad input, and the models that it asks."""

import ast
import contextlib
import dataclasses
import fcntl
import functools
import gzip
import http.server
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from conftest import AS_A_USER, ROOT, command, copy_in_bucket, run, says
from flax import nnx
from test_problems import FILES, needs_tasks, official, plus_row, read
from test_sandbox import alive, cloud, descendants, layers, wait_for  # noqa: F401  two are fixtures

import benchmarks
import checkpoints
import model_dream
import model_pythoncoder
import problems as tasks
import runs
import sample_dream

pytestmark = pytest.mark.usefixtures("no_compile_cache", "layers")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def as_rows(samples, name):
    """Rows as they are, and pairs of a task_id and a text of that name."""
    return [s if isinstance(s, dict) else {"task_id": s[0], name: s[1]} for s in samples]


def config(task, tmp_path, samples=None, **settings):
    """A Config for samples, rows or pairs of a task_id and a completion, that are written."""
    if samples is not None:
        rows = as_rows(samples, "completion")
        settings["samples"] = write(tmp_path / "given.jsonl", rows)
    defaults = {"out": str(tmp_path / "out"), "tasks_file": str(FILES.get(task, ""))}
    settings = defaults | {"timeout_s": 20.0} | settings
    for name, group in (("dream", benchmarks.DreamFlags), ("sandbox", benchmarks.SandboxFlags)):
        flags = {f.name for f in dataclasses.fields(group)} & settings.keys()
        settings[name] = group(**{flag: settings.pop(flag) for flag in flags})
    return benchmarks.Config(task=task, **settings)


def results(out):
    rows = [json.loads(line) for line in (Path(out) / "results.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row["sample"])


def refused(cfg, *parts, script=benchmarks):
    with pytest.raises((ValueError, OSError, RuntimeError)) as error:
        script.main(runs.check(cfg))
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# ---- scores


@pytest.mark.golden
def test_pass_at_k_of_every_golden_case(golden_dir):
    golden = json.loads((golden_dir("pythoncoder") / "pass_at_k.json").read_text())
    for case in golden["cases"]:
        value = benchmarks.pass_at_k(case["n"], case["c"], case["k"])
        assert value == pytest.approx(case["value"], abs=1e-9)
    both = golden["aggregate"]
    for key in (key for key in both if key.startswith("pass@")):
        rates = [benchmarks.pass_at_k(both["n"], c, int(key[5:])) for c in both["correct"]]
        assert sum(rates) / len(rates) == pytest.approx(both[key], abs=1e-9)


def test_the_interval_is_wilsons():
    assert benchmarks.interval([1.0] * 164) == pytest.approx([0.977112, 1], abs=1e-6)
    assert benchmarks.interval([0.0] * 10) == pytest.approx([0, 0.277533], abs=1e-6)
    p = 60 / 164
    half = 1.96 * math.sqrt(p * (1 - p) / 164)
    found = benchmarks.interval([1.0] * 60 + [0.0] * 104)
    np.testing.assert_allclose(found, [p - half, p + half], atol=0.005)


def test_a_group_that_gives_no_value_has_no_vote():
    behaviours = ["", "", "a1", "b2", "a1", ""]
    rows = [{"sample": i, "public": 0, "behaviour": b} for i, b in enumerate(behaviours)]
    assert benchmarks.choose(rows)["sample"] == 2
    assert benchmarks.choose(rows[:2])["sample"] == 0


@needs_tasks
def test_the_best_sample_is_chosen_by_examples_and_then_by_majority(tmp_path):
    task = "HumanEval/53"  # add(x, y); its examples are add(2, 3) == 5 and add(5, 7) == 12
    texts = ["    return 5 if x == 2 else 12\n", "    return 0\n", "    return (\n", "    return 0\n",
             "    return 0\n", dict(official("humaneval"))[task], "    return y + x\n"]  # fmt: skip
    cfg = config("humaneval", tmp_path, [(task, text) for text in texts], k=(1, 2, 7))
    row = benchmarks.main(cfg)
    assert row["pass@1"][0] == pytest.approx(2 / 7)
    assert row["pass@2"][0] == pytest.approx(1 - math.comb(5, 2) / math.comb(7, 2))
    assert row["best of n"][0] == row["pass@7"][0] == 1
    rows = results(cfg.out)
    assert [r["public"] for r in rows] == [1, 0, 0, 0, 0, 1, 1]
    behaviours = [r["behaviour"] for r in rows]
    assert behaviours[5] == behaviours[6] != behaviours[0]
    assert behaviours[2] == ""
    assert benchmarks.choose(rows[:2])["sample"] == 0
    # of sets it does not depend on their order
    text = "def similar_elements(a, b):\n    return set(map(str, {})) & set(map(str, b))\n"
    texts = [text.format(a) for a in ("a", "list(a)[::-1]", "a", "b")]
    out = str(tmp_path / "sets")
    benchmarks.main(config("mbpp", tmp_path, [(2, text) for text in texts], split="all", out=out))
    behaviours = [row["behaviour"] for row in results(out)]
    assert behaviours[0] == behaviours[1] == behaviours[2] != behaviours[3]


# ---- verdicts

PRIVATE = """
class _Private:
    def __init__(self, *args):
        pass
def {entry}(*args, **options):
    return _Private()
"""


def broken(task, how):
    """Samples that fail: a function gives an object of its own class, raises, or is not there."""
    texts = {
        "private": PRIVATE,
        "raise": "\ndef {entry}(*args, **options):\n    raise ValueError\n",
        "missing": "x = 1\n" if task == "mbpp" else "    pass\ndel {entry}\n",
    }
    return [(p.id, texts[how].format(entry=p.entry)) for p in read(task).values()]


@needs_tasks
@pytest.mark.parametrize(
    ("task", "count", "full"),
    [
        ("humaneval", 164, False),
        ("mbpp", 427, False),
        pytest.param("humaneval", 164, True, marks=pytest.mark.slow),
        pytest.param("mbpp", 427, True, marks=pytest.mark.slow),
    ],
)
def test_official_solutions_pass_and_broken_ones_fail(task, count, full, tmp_path):
    solutions = official(task)
    assert len(solutions) == count
    n = count if full else 10
    row = benchmarks.main(config(task, tmp_path, solutions[:n], split="all"))
    assert row["results"] == {"passed": n}
    assert (row["problems"], row["of"]) == (n, count)
    kinds = [broken(task, how) for how in ("private", "raise", "missing")]
    samples = [*itertools.chain(*kinds)] if full else kinds[0][:4] + kinds[1][4:7] + kinds[2][7:10]
    cfg = config(task, tmp_path, samples, split="all", out=str(tmp_path / "broken"))
    row = benchmarks.main(cfg)
    assert row["results"] == {"fail": len(samples)}
    if not full:  # ten wrong answers leave room
        assert row["pass@1"] == pytest.approx([0, 0, 0.278], abs=1e-3)


FORGED = (ROOT / "tests/programs/forged.txt").read_text()
# tests that are no comparison with a literal, and a name that looks like a class
JUDGED = {
    "humaneval": (2, 4, 8, 32, 33, 37, 38, 44, 50, 52, 53, 56, 61, 129, 151, 153),
    "mbpp": (2, 7, 82, 98, 126, 137, 596, 737, 794, 804),
}


@needs_tasks
@pytest.mark.parametrize("task", JUDGED)
def test_samples_that_attack_the_verdict_do_not_pass(task, tmp_path):
    problems = read(task)
    samples = []
    for key, value in itertools.product(JUDGED[task], ("Always()", "0")):
        problem = problems[str(key)]
        text = FORGED.format(entry=problem.entry, value=value)
        samples.append((problem.id, text.removeprefix("    pass\n") if task == "mbpp" else text))
    row = benchmarks.main(config(task, tmp_path, samples, split="all"))
    assert row["pass@1"][0] == 0
    assert row["results"] == {"fail": len(samples)}


@needs_tasks
def test_main_blocks_calls_of_one_process_and_texts_of_any_form(tmp_path):
    solutions = official("humaneval")
    (task, code), others = solutions[0], solutions[1:4]
    once = f"    global calls\n    calls += 1\n    if calls > 2: return None\n{code}\ncalls = 0\n"
    samples = [(task, code + "\nif __name__ == '__main__':\n    raise SystemExit\n"), (task, once)]
    samples += [(others[0][0], others[0][1] + "\0"), (others[1][0], "    '" + "x" * 10_000_000)]
    samples += [(others[1][0], "    '\ud800'\n" + others[1][1])]
    samples += [(others[2][0], others[2][1] + "#" * 2_000_000)]  # large and right
    benchmarks.main(cfg := config("humaneval", tmp_path, samples))
    found = {row["completion"]: row["passed"] for row in results(cfg.out)}
    assert [found[text] for _, text in samples] == [True, False, False, False, False, True]


@pytest.mark.slow
@needs_tasks
def test_a_sample_has_four_times_the_time_of_a_slow_reference(tmp_path):
    spin = "import time\ndef f():\n    while time.process_time() < {0}:\n        pass\n"
    slow = tasks.Problem("slow", "f", test="assert f() is None", reference=spin.format(0.25))
    problems = {"slow": slow, "quick": slow._replace(id="quick", reference=spin.format(0))}
    samples = [("slow", spin.format(0.5)), ("slow", spin.format(9)), ("quick", spin.format(0.5))]
    cfg = benchmarks.settle(config("humaneval", tmp_path, samples, timeout_s=0.2))
    benchmarks.evaluate(cfg, problems, tasks.Ours(cfg))
    found = {(r["task_id"], r["sample"]): r["result"] for r in results(cfg.out)}
    assert found == {("slow", 0): "passed", ("slow", 1): "timeout", ("quick", 0): "timeout"}


@pytest.mark.parametrize("right", [1, 2])
def test_a_line_says_that_most_samples_are_no_python(tmp_path, capsys, right):
    prompt = 'def half(x):\n    """Half of x."""\n'
    row = {"task_id": "HumanEval/0", "prompt": prompt, "entry_point": "half"}
    row["test"] = "def check(f):\n    assert f(4) == 2\n"
    texts = ["<think>\nI halve it.", "I cannot do that."] + ["    return x / 2\n"] * right
    samples = [("HumanEval/0", text) for text in texts]
    file = write(tmp_path / "tasks.jsonl", [row])
    cfg = config("humaneval", tmp_path, samples, tasks_file=file)
    assert benchmarks.main(cfg)["pass@1"][0] == pytest.approx(right / len(texts))
    said = capsys.readouterr().err
    assert ("2 of 3 samples are no Python; read them" in said) == (right == 1)


# ---- HumanEval+ and MBPP+

HALF = plus_row(0, "half", "    return x / 3\n", [[1], [2]], [[3], [10]])
CHANGE = plus_row(1, "grow", "    x.append(len(x))\n    return x\n", [[[1]]], [[[]], [[1, 2]]])
ROOT_OF = plus_row(32, "find_zero", "    return -x[0] / x[1]\n", [[[1, 2]]], [[[-6, 3]]], atol=1e-4)
SETS = plus_row(2, "similar_elements", "\ndef similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
                [[[1, 2], [2, 3]]], [[[], [1]]], "Mbpp")  # fmt: skip
SPIN = "import time\ndef half(x):\n    while x == {} and time.process_time() < 60: pass\n    return x / 3\n"
# problem, program, EvalPlus' verdict on the base and on the plus inputs, but for forgeries and 32
PLUS = [json.loads(line) for line in (ROOT / "tests/programs/evalplus.jsonl").open()]


def score(tmp_path, task, rows, samples, script=benchmarks, **settings):
    """(the report, results in the order of the samples) of pairs of an id and a whole program."""
    samples = as_rows(samples, "solution")
    file = write(tmp_path / "tasks.jsonl", rows)
    cfg = config(task, tmp_path, samples, tasks_file=file, **{"timeout_s": 4.0} | settings)
    if script is not benchmarks:
        cfg = script.Config(**vars(cfg))
    row = script.main(cfg)
    found = {(r["task_id"], r.get("solution", r.get("completion"))): r for r in results(cfg.out)}
    return row, [found[s["task_id"], s.get("solution", s.get("completion"))] for s in samples]


def test_verdicts_by_the_rules_of_evalplus(tmp_path, capsys):
    samples = [(f"HumanEval/{number}", program) for number, program, _, _ in PLUS]
    late = [("HumanEval/0", SPIN.format(10)), ("HumanEval/0", SPIN.format(1))]
    rows = [HALF, CHANGE, ROOT_OF]
    row, found = score(tmp_path, "humaneval+", rows, samples + late, timeout_s=0.4, watch=True)
    for (_, program, base, plus), result in zip(PLUS, found, strict=False):
        assert (result["base_status"], result["plus_status"]) == (base, plus), (program, result)
        assert result["passed"] == (base == plus == "pass")
    # a call that is late is a timeout, and the other inputs count
    statuses = [(result["base_status"], result["plus_status"]) for result in found[-2:]]
    assert statuses == [("pass", "timeout"), ("timeout", "pass")]
    assert found[8]["wrong"] == found[-2]["wrong"] == ["plus", 1]
    assert row["base pass@1"][0] > row["pass@1"][0]
    said = capsys.readouterr().err
    assert "3 problems; v0.1.10, of which scores are published, has 164" in said
    assert re.search(r"scoring: 100%.* 26/26 .*<00:00.* programs/s, pass@1 \d+\.\d % \(", said)


def test_completions_and_solutions_are_both_read_and_mbpp_has_tuples(tmp_path, capsys):
    samples = [{"task_id": "HumanEval/0", "completion": "    return x / 3\n"},
               {"task_id": "HumanEval/0", "solution": "def half(x): return 1.0"}]  # fmt: skip
    row, found = score(tmp_path, "humaneval+", [HALF, CHANGE], samples)
    assert [result["passed"] for result in found] == [True, False]
    assert [result.keys() >= {"completion"} for result in found] == [True, False]
    assert (row["problems"], row["of"], row["samples"]) == (1, 2, 2)
    assert "has no sample of 1 of 2 problems" in capsys.readouterr().err
    samples = [("Mbpp/2", "def similar_elements(a, b): return [x for x in a if x in b] + 0 * list((*a,))"),
               {"task_id": "Mbpp/2", "completion": "def similar_elements(a, b):\n    return a + b\n"}]  # fmt: skip
    _, found = score(tmp_path, "mbpp+", [SETS], samples, out=str(tmp_path / "mbpp"))
    assert [result["passed"] for result in found] == [True, False]


def test_a_reference_that_fails_is_named_and_the_other_samples_count(tmp_path):
    tenth = plus_row(2, "tenth", "    return x / 10\n", [[1]], [[-1]])
    failing = plus_row(3, "none", "    return 1 / x\n", [[1]], [[0]])
    samples = [("HumanEval/2", "def tenth(x): return x / 10"),
               ("HumanEval/3", "def none(x): return 1 / x")]  # fmt: skip
    why = r"1 samples .* HumanEval/3 \(the file's own solution does not run here: pass"
    with pytest.raises(RuntimeError, match=why):
        score(tmp_path, "humaneval+", [tenth, failing], samples)
    assert [result["passed"] for result in results(tmp_path / "out")] == [True]


@needs_tasks
@pytest.mark.slow
def test_all_reference_solutions_pass_on_the_inputs_of_their_own_asserts(tmp_path):
    more = {32: [[[1, 2]], [[-6, 11, -6, 1]]], 38: [["abc"], ["hello"]], 50: [["abc"], ["xyz"]]}
    rows = []
    for row in map(json.loads, gzip.open(FILES["humaneval"], "rt")):
        inputs = more.get(int(row["task_id"].split("/")[1]), [])[:]
        for node in ast.walk(ast.parse(row["test"])):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "candidate"
            if called and not inputs[2:]:
                with contextlib.suppress(ValueError, TypeError):
                    arguments = [ast.literal_eval(argument) for argument in node.args]
                    inputs.append(json.loads(json.dumps(arguments)))
        atol = 1e-4 * (row["entry_point"] == "find_zero")
        rows.append(row | {"base_input": inputs[:1], "plus_input": inputs[1:], "atol": atol})
    samples = [{"task_id": row["task_id"], "completion": row["canonical_solution"]} for row in rows]
    report, _ = score(tmp_path, "humaneval+", rows, samples)
    assert report["results"] == {"passed": 164}


def test_a_prompt_that_does_not_fit_the_model_fails_the_base_tests_too():
    rows = [{"task_id": f"HumanEval/{i}", "sample": 0} for i in (0, 1)]
    rows[0] |= {"passed": False, "result": "does not fit"}
    rows[1] |= {"passed": False, "result": "fail", "base_status": "pass", "plus_status": "fail"}
    row = benchmarks.report(benchmarks.Config(task="humaneval+"), rows, rows)
    assert (row["pass@1"][0], row["base pass@1"][0]) == (0, 0.5)


# ---- files, stops, bad input


@needs_tasks
def test_bad_input_is_one_line_and_writes_nothing(tmp_path):
    good = [("HumanEval/0", "    pass\n")]
    cut = tmp_path / "cut.gz"
    cut.write_bytes(FILES["humaneval"].read_bytes()[:20_000])
    row = plus_row(2, "f", "def f(x): pass\n", [[1]], [[2]], "Mbpp")
    plus = write(tmp_path / "plus.jsonl", [row])
    half = write(tmp_path / "half.jsonl", [HALF, CHANGE])
    bare = {key: value for key, value in HALF.items() if key != "atol"}
    bare = write(tmp_path / "bare.jsonl", [CHANGE, bare])
    form = write(tmp_path / "form.jsonl", [{"task_id": "HumanEval/0"}])
    for task, samples, settings, *parts in (
        ("humaneval", [*good, ("HumanEval/999", "x")], {}, "'HumanEval/999' is not among the 164"),
        ("mbpp", [(2, "x")], {}, "2 is not among the 257 problems", "--split"),
        ("humaneval", [(3, "x")], {}, "3 is not among"),  # of MBPP, it seems
        ("mbpp", [("HumanEval/11", "x")], {}, "'HumanEval/11' is not among"),
        ("humaneval+", [("Mbpp/0", "")], {"tasks_file": half}, "'Mbpp/0' is not among the 2"),
        ("humaneval", good, {"k": (2,)}, "pass@2", "holds 1"),
        ("humaneval", [], {}, "holds no samples"),
        ("humaneval", good, {"tasks_file": str(tmp_path / "none.gz")}, "none.gz", "No such file"),
        ("humaneval", good, {"tasks_file": str(FILES["mbpp"])}, "not the official file of humaneval"),
        ("mbpp", good, {"tasks_file": str(FILES["humaneval"])}, "not the official file of mbpp"),
        ("humaneval+", good, {"tasks_file": plus}, "Mbpp/2 is none of its problems"),
        ("humaneval+", good, {"tasks_file": bare}, "problem 2 is of another form: KeyError('atol')"),
        ("humaneval", good, {"tasks_file": form}, "problem 1 is of another form: KeyError("),
        ("humaneval", good, {"tasks_file": str(cut)}, "broken gzip"),
        ("humaneval", None, {"n": 0}, "--n"),
        ("humaneval", None, {"k": (5,)}, "pass@5 needs --n=5"),
        ("humaneval", None, {"top_p": 0.0}, "--top_p"),
        ("humaneval", None, {"n": 2, "temperature": 0.0}, "2 times"),
        ("humaneval", None, {"timeout_s": 0.0}, "--timeout_s"),
        ("humaneval", None, {"workers": -1}, "--workers"),
        ("humaneval", None, {"ckpt": str(tmp_path)}, "holds no checkpoint"),
        ("humaneval", None, {"threshold": 0.5}, "--threshold", "for --model=dream"),
        ("humaneval", None, {"split": "single-line"}, "of humaneval there are test, all"),
        ("humaneval_infilling", None, {"split": "all"}, "there are single-line, multi"),
    ):  # fmt: skip
        refused(config(task, tmp_path, samples, **settings), *parts)
    for line in ('{"task_id": "HumanEval/1", "comple', "[" * 100_000, "[1]",
                 '{"task_id": "HumanEval/1"}', '{"task_id": "HumanEval/1", "completion": 3}'):  # fmt: skip
        cfg = config("humaneval", tmp_path, good)
        with open(cfg.samples, "a") as file:
            file.write(line + "\n")
        refused(cfg, "line 2 is not a JSON object with task_id, and as a text completion or")
    refused(dataclasses.replace(cfg, samples=str(tmp_path / "none")), "No such file")
    assert not (tmp_path / "out").exists()


@needs_tasks
def test_an_out_folder_takes_no_other_settings_and_no_second_run(tmp_path, monkeypatch):
    out = tmp_path / "out"
    cfg = config("humaneval", tmp_path, [("HumanEval/0", "    pass\n")])
    row = benchmarks.main(cfg)
    assert (row["version"], row["settings"]["protocol"]) == (benchmarks.VERSION, "ours/humaneval")
    assert row["settings"]["tasks_sha256"] == benchmarks.sha256(FILES["humaneval"])
    with monkeypatch.context() as patch:  # a finished run starts no sandbox
        patch.setattr(benchmarks.sandbox, "run_tests", None)
        assert benchmarks.main(cfg) == row
    before = (out / "results.jsonl").read_bytes()
    settings = out / "config.json"
    settings.write_text(settings.read_text().replace(benchmarks.VERSION, "before"))
    assert benchmarks.main(cfg) == row  # verdicts of another scorer are kept aside, and made anew
    assert (out / "results_before.jsonl").read_bytes() == before
    assert len(results(out)) == 1
    before = (out / "results.jsonl").read_bytes()
    other = dataclasses.replace(cfg, sandbox=benchmarks.SandboxFlags(timeout_s=1.0))
    refused(other, "holds results with timeout_s=20.0", "another --out")
    refused(config("humaneval", tmp_path, [("HumanEval/1", "    pass\n")]), "samples_sha256")
    cfg = config("humaneval", tmp_path, [("HumanEval/0", "    pass\n")])
    with open(out / "results.jsonl", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(cfg, "another process is writing")
    assert (out / "results.jsonl").read_bytes() == before
    (out / "results.jsonl").write_bytes(b"nonsense\n" + before)
    refused(cfg, "results.jsonl: line 1 is not a JSON object")
    (out / "results.jsonl").write_bytes(b"\xff\n" + before)
    refused(cfg, "results.jsonl: line 1 is not a JSON object", "remove it")
    settings.write_text("{")
    refused(cfg, "config.json is damaged")


def test_results_beside_a_model_are_no_part_of_it(tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    before = benchmarks.fingerprint(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").write_text("{}\n")
    assert benchmarks.fingerprint(tmp_path) == before
    (tmp_path / "out" / "results.jsonl").rename(tmp_path / "out" / "params")
    assert benchmarks.fingerprint(tmp_path) != before


def command_of(cfg):
    """The command line of a Config."""
    flags = []
    for group in (cfg, cfg.sandbox):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if value != field.default and not dataclasses.is_dataclass(value):
                flags.append(f"--{field.name}={value}")
    return command("benchmarks.py", *flags)


@needs_tasks
def test_the_command_prints_the_report(tmp_path):
    samples = [("HumanEval/0", "    return None\n"), official("humaneval")[0]]
    cfg = config("humaneval", tmp_path, samples)
    done = subprocess.run(command_of(cfg), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("humaneval: 2 samples of 1 of 164 problems; ")
    spread = "50.0 % (5.5 to 94.5: 95 %, Wilson, over 1 problems)"
    assert f"pass@1: {spread}\npass@2: 100.0 %" in done.stdout
    assert "best of n: 100.0 %" in done.stdout
    says(run("benchmarks.py", "--repair=3"), "--repair is gone: python extra/repair.py")


HANG = "    import time\n    time.sleep(1000)\n"


@pytest.mark.slow
@needs_tasks
def test_ctrl_c_keeps_what_is_done_leaves_no_process_and_the_same_command_goes_on(tmp_path):
    solutions = official("humaneval")[:8]
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
    assert sorted(r["task_id"] for r in results(out)) == sorted(dict(solutions[:4]))
    # what a kill in the middle of a line leaves
    (out / "results.jsonl").write_text(kept + kept.splitlines()[0][:40])
    row = benchmarks.main(cfg)
    assert row["results"] == {"passed": 8, "timeout": 2}
    assert (out / "results.jsonl").read_text().startswith(kept)


@pytest.mark.slow
@needs_tasks
def test_a_failure_of_the_sandbox_is_named_not_counted_and_scored_again(tmp_path):
    samples = [*official("humaneval")[:2], ("HumanEval/10", HANG)]
    cfg = config("humaneval", tmp_path, samples, timeout_s=3.0, workers=1)
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
    cfg = config("humaneval", tmp_path, [("HumanEval/0", "    pass\n")], tasks_file="")
    monkeypatch.chdir(tmp_path)
    for kind, part in (("gone", "404"), ("cut", "IncompleteRead"), ("portal", "line 1")):
        monkeypatch.setitem(tasks.TASKS, "humaneval", f"{address}/{kind}/HumanEval.jsonl.gz")
        refused(cfg, "cannot be downloaded", part, "--tasks_file")
        assert not Path("data").exists()
    monkeypatch.setitem(tasks.TASKS, "humaneval", f"{address}/HumanEval.jsonl.gz")
    assert benchmarks.main(cfg)["results"] == {"fail": 1}
    assert Path("data/tasks/HumanEval.jsonl.gz").read_bytes() == data
    server.shutdown()
    server.server_close()
    assert len(asked) == 4
    assert benchmarks.main(cfg)["results"] == {"fail": 1}
    Path("data").rename("elsewhere")
    refused(cfg, "Connection refused")


@needs_tasks
def test_programs_run_through_a_router_to_e2b(cloud, tmp_path):  # noqa: F811
    samples = [official("humaneval")[0], ("HumanEval/1", "    return []\n")]
    state = cloud()
    router = {"runner": state.url.removeprefix("http://")}
    cfg = config("humaneval", tmp_path, samples, **router)
    state.works = False
    refused(cfg, "2 samples could not be run", "no sandbox", "run the same command again")
    state.works = True
    assert benchmarks.main(cfg)["results"] == {"passed": 1, "fail": 1}
    assert len(state.scripts) == 4


# ---- models

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def new_tokenizer(path, special):
    """Train a byte-level BPE of 400 tokens on a few modules and save it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    settings = {"vocab_size": 400, "special_tokens": special}
    settings["initial_alphabet"] = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(**settings)
    tokenizer.train([str(LIBRARY / f"{name}.py") for name in ("ast", "calendar", "csv")], trainer)
    path.write_text(tokenizer.to_str())
    return path


@pytest.fixture(scope="module")
def pythoncoder(tmp_path_factory):
    """A run folder of train_tpu.py with a small PythonCoder that nobody trained."""
    folder = tmp_path_factory.mktemp("pythoncoder")
    names = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    new_tokenizer(folder / "tokenizer.json", names)
    cfg = model_pythoncoder.Config(512, 32, 1, 4, 2, head_size=8, ffn=48, positions=512)
    store = checkpoints.Checkpoints(folder)
    params = model_pythoncoder.new_params(cfg, 0)
    store.save(4, {"params": params}, {"model": dataclasses.asdict(cfg), "step": 4})
    store.close()
    return folder


@pytest.fixture(scope="module")
def dream(tmp_path_factory):
    """A small Dream that nobody trained, as convert_weights.py writes it, and a tokenizer."""
    folder = tmp_path_factory.mktemp("dream")
    names = ["<pad>", "<bos>", "<|endoftext|>", "<unk>", "<|mask|>"]
    new_tokenizer(folder / "tokenizer.json", names)
    ids = {"mask_id": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2}
    cfg = model_dream.DreamConfig(512, 32, 1, 2, 1, 16, 64, positions=1024, **ids)
    files = [folder / "tokenizer.json"]
    checkpoints.save(model_dream, folder / "model", model_dream.Dream(cfg, nnx.Rngs(0)), files)
    return folder / "model"


def texts_of(out):
    return [json.loads(line) for line in (Path(out) / "samples.jsonl").read_text().splitlines()]


@needs_tasks
@pytest.mark.parametrize(
    "family", ["pythoncoder", "dream", pytest.param("blocks", marks=pytest.mark.slow)]
)
def test_a_model_writes_programs_and_resuming_equals_not_stopping(
    family, request, tmp_path, capsys
):
    # one problem: the canvases of two would be two programs to compile
    settings = {"model": family, "max_new": 8, "problems": 1, "n": 6, "batch_size": 2}
    folder = request.getfixturevalue("pythoncoder" if family == "pythoncoder" else "dream")
    if family != "pythoncoder":
        settings |= {"model": "dream", "threshold": 0.5, "int4": family == "dream"}
    if family == "blocks":  # behind its exact cache
        folder = shutil.copytree(folder, tmp_path / "blocks")
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved | {"bd_size": 4}))
    cfg = config("humaneval", tmp_path, ckpt=str(folder), **settings)
    row = benchmarks.main(cfg)
    assert (row["n"], row["samples"], row["problems"]) == (6, 6, 1)
    assert {"pass@1", "pass@6", "best of n"} <= set(row)
    path = tmp_path / "out" / "samples.jsonl"
    uninterrupted = path.read_bytes()
    rows = texts_of(cfg.out)
    assert len({r["completion"] + r.get("written", "") for r in rows}) >= 4
    assert all(r["fits"] for r in rows)
    scored = results(cfg.out)
    assert [r["completion"] for r in rows] == [r["completion"] for r in scored]
    lines = uninterrupted.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:30])
    kept = "".join(json.dumps(r) + "\n" for r in scored[:3])
    (tmp_path / "out" / "results.jsonl").write_text(kept + '{"task')
    capsys.readouterr()
    assert benchmarks.main(cfg) == row
    # the first of three batches was there
    assert capsys.readouterr().err.count("of 6 samples, batch ") == 2
    assert path.read_bytes() == uninterrupted
    assert results(cfg.out) == scored
    waits = iter([False, False, True])  # one that takes long says so
    benchmarks.tick(1, types.SimpleNamespace(wait=lambda seconds: next(waits)))
    assert capsys.readouterr().err.endswith("batch 2: 10 s\nbatch 2: 20 s\n")
    refused(dataclasses.replace(cfg, temperature=0.5), "holds results with temperature=0.8")
    if family == "dream":
        # reaches the sampler, which wants blocks for it
        flags = benchmarks.DreamFlags(cache="dual")
        cached = dataclasses.replace(cfg, out=str(tmp_path / "cache"), dream=flags)
        refused(cached, "set block_length")
        flags = dataclasses.replace(cfg.dream, steps=4)
        refused(dataclasses.replace(cfg, dream=flags), "holds results with steps=0")
    if family == "pythoncoder":
        refused(dataclasses.replace(cfg, step=99), "holds no checkpoint of step 99; it has [")
        long = dataclasses.replace(cfg, max_new=5000, out=str(tmp_path / "long"))
        assert benchmarks.main(long)["results"] == {"does not fit": 6}


def test_a_prompt_ends_where_a_token_of_the_whole_program_ends():
    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "weights/pythoncoder/tokenizer.json"))
    prompt = 'def f(x):\n    """Double x."""\n'
    protocol = tasks.Ours(benchmarks.Config())
    model = types.SimpleNamespace(tokenizer=tokenizer)
    ids = protocol.ids(tasks.Problem("a/0", "f", prompt), model)
    whole = tokenizer.encode(prompt + "    return 2 * x\n", add_special_tokens=False).ids
    assert ids == whole[: len(ids)]
    assert tokenizer.decode(ids) == prompt


def test_the_end_token_of_a_model_ends_a_text_whatever_its_name(dream, tmp_path):
    folder = shutil.copytree(dream, tmp_path / "dream")
    new_tokenizer(folder / "tokenizer.json", ["<pad>", "<bos>", "</s>", "<unk>", "<|mask|>"])
    cfg = benchmarks.settle(benchmarks.Config(model="dream"))
    assert cfg.out == "out/humaneval-dream"
    assert benchmarks.Dream(cfg, tasks.Ours(cfg), folder, 0).rule.eos_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert benchmarks.Dream(cfg, tasks.Ours(cfg), folder, 0).rule.eos_ids == (2, 7, 9)
    assert benchmarks.until([7, 4, 2, 8], (2,)) == [7, 4]
    assert benchmarks.until([7, 4], (2,)) == [7, 4]


@pytest.mark.slow
@needs_tasks
def test_batches_of_dream_are_on_all_devices_and_few_programs(dream, tmp_path, capsys):
    cfg = config("humaneval", tmp_path, model="dream", ckpt=str(dream), max_new=2, batch_size=2)
    cfg = benchmarks.settle(cfg)
    problems = sorted(tasks.read_problems(cfg).values(), key=lambda p: len(p.prompt))
    protocol = tasks.Ours(cfg)
    model = benchmarks.Dream(cfg, protocol, dream, 0)
    assert "8 x cpu; mesh data 2" in capsys.readouterr().err
    ids = [protocol.ids(problem, model) for problem in problems]
    lengths = sorted(len(prompt) + 2 for prompt in ids)
    before, widths = sample_dream.fill_block._cache_size(), set()
    for first in range(0, len(problems), 20):
        prompts = ids[first : first + 2]
        widths.add(sample_dream.canvas_width(max(map(len, prompts)) + 2, 1024))
        key = jax.random.key(0)
        assert all(map(len, model.write(prompts, key, lengths, None)))
    assert len(widths) > 5
    assert sample_dream.fill_block._cache_size() - before <= 3


# ---- holes, in the form of OpenAI's human-eval-infilling


SPLITS = {"single-line": "Single", "multi-line": "Multi", "random-span": "Random"}
HOLES = {split: [] for split in SPLITS}
for line in (ROOT / "tests/programs/holes.jsonl").open():
    for split, name in SPLITS.items():
        if json.loads(line)["task_id"].startswith(name):
            HOLES[split].append(json.loads(line))


def holes_config(split, tmp_path, samples=None, **settings):
    settings |= {"tasks_file": write(tmp_path / f"{split}.jsonl", HOLES[split]), "split": split}
    return config("humaneval_infilling", tmp_path, samples, **settings)


def openai_verdict(row, completion):
    """As check_correctness of human-eval-infilling decides, whose program this is."""
    program = row["prompt"] + completion + row["suffix"]
    with contextlib.suppress(BaseException):
        exec(f"{program}\n{row['test']}\ncheck({row['entry_point']})", {})
        return True
    return False


@pytest.mark.parametrize("split", HOLES)
def test_a_hole_is_filled_between_prompt_and_suffix_and_judged_as_openai_judges_it(split, tmp_path):
    texts = ["    return 0\n", "", "    pass\n", "```python\n    return a + b\n```", "urn (n) /",
             "  return a+b", "retur"]  # fmt: skip
    samples, want = [], []
    for row in HOLES[split]:
        for text in [row["canonical_solution"], *texts]:
            samples.append((row["task_id"], text))
            want.append((row["task_id"], text, openai_verdict(row, text)))
    cfg = holes_config(split, tmp_path, samples)
    row = benchmarks.main(cfg)
    found = [(r["task_id"], r["completion"], r["passed"]) for r in results(cfg.out)]
    assert sorted(found) == sorted(want)
    assert row["split"] == split
    assert row["pass@1"][0] == pytest.approx(np.mean([passed for _, _, passed in want]))
    assert "best of n" not in row  # there is nothing to choose by


@pytest.mark.parametrize("family", ["pythoncoder", "dream"])
def test_models_fill_holes(family, request, tmp_path):
    folder = request.getfixturevalue(family)
    settings = {"model": family, "ckpt": str(folder), "batch_size": 2, "max_new": 8}
    cfg = holes_config("single-line", tmp_path, **settings)
    assert benchmarks.main(cfg)["samples"] == 2
    given = {row["task_id"]: row for row in HOLES["single-line"]}
    for row in texts_of(cfg.out):
        problem = given[row["task_id"]]
        assert row["solution"] == problem["prompt"] + row["completion"] + problem["suffix"]


def test_pythoncoder_gets_a_hole_in_its_fill_in_the_middle_form(pythoncoder):
    model = types.SimpleNamespace(tokenizer=runs.read_tokenizer(pythoncoder))
    model.hole = functools.partial(benchmarks.PythonCoder.hole, model)
    ours = tasks.Ours(benchmarks.Config("humaneval_infilling", split="single-line"))
    prompt, suffix = "def add(a, b):\n", "    return c\n"
    ids = ours.ids(tasks.Problem(prompt=prompt, suffix=suffix), model)
    text = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == f"<|fim_prefix|>{prompt}<|fim_suffix|>{suffix}<|fim_middle|>"
    ids = ours.ids(tasks.Problem(prompt=prompt), model)
    assert model.tokenizer.decode(ids) == prompt  # nothing follows
    model.tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(ValueError, match=r"needs <\|fim_prefix\|>"):
        model.hole([1], [2])


@pytest.mark.slow
def test_model_and_tasks_can_be_in_a_bucket(pythoncoder, bucket, tmp_path):
    env = os.environ | AS_A_USER | bucket
    row = {"task_id": "x/0", "prompt": 'def f(x):\n    """Return x."""\n', "entry_point": "f"}
    row["test"] = "def check(candidate):\n    assert candidate(1) == 1\n"
    write(tmp_path / "tasks.jsonl", [row])
    copy_in_bucket(bucket, "put", f"{pythoncoder}/", "bucket/coder/")
    copy_in_bucket(bucket, "put", str(tmp_path / "tasks.jsonl"), "bucket/tasks.jsonl")
    flags = ["--tasks_file=gs://bucket/tasks.jsonl", f"--out={tmp_path / 'out'}", "--max_new=16"]
    for _ in range(2):  # the second reads the model's files alone, to see that they are the same
        done = run("benchmarks.py", "--ckpt=gs://bucket/coder", *flags, env=env)
        assert done.returncode == 0, done.stderr
        assert "1 samples of 1 of 1 problems" in done.stdout
    done = run("benchmarks.py", "--ckpt=gs://bucket/none", *flags, env=env)
    says(done, "gs://bucket/none holds no checkpoint")
