"""recipe.sh from its first line to its last on a CPU, and once more after it ended."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from conftest import AS_A_USER, ROOT
from test_benchmarks import FILES, needs_tasks


@pytest.mark.slow
@needs_tasks
def test_the_recipe_makes_a_scored_model_with_a_card_and_does_nothing_twice(tmp_path):
    for path in (*ROOT.glob("*.py"), ROOT / "recipe.sh"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "data" / "tasks").mkdir(parents=True)
    problems = gzip.decompress(FILES["humaneval"].read_bytes()).splitlines(keepends=True)[:3]
    (tmp_path / "data" / "tasks" / "HumanEval.jsonl.gz").write_bytes(
        gzip.compress(b"".join(problems))
    )
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = os.environ | AS_A_USER | {"OUT": "out/a run", "PATH": path}

    def bash(*arguments):
        settings = {
            "capture_output": True,
            "text": True,
            "cwd": tmp_path,
            "env": env,
            "timeout": 900,
        }
        return subprocess.run(["bash", "recipe.sh", *arguments], **settings)

    first = bash("cpu", "--steps=3", "--eval_rows=4", "--compile_cache=cache")
    assert first.returncode == 0, first.stderr
    run = tmp_path / "out" / "a run"
    assert "parameters in bfloat16, converted" in (run / "weights_3" / "README.md").read_text()
    assert json.loads((run / "humaneval_3" / "summary.json").read_text())["problems"] == 3
    log = (run / "log.jsonl").read_bytes()
    again = bash("cpu", "--steps=3", "--eval_rows=4", "--compile_cache=cache")
    assert again.returncode == 0, again.stderr
    assert "has all of its 3 steps" in again.stdout  # nor are rows prepared again
    assert (run / "log.jsonl").read_bytes() == log

    # It goes on to more steps, and scores these.
    more = bash("cpu", "--steps=5", "--eval_rows=4", "--compile_cache=cache")
    assert more.returncode == 0, more.stderr
    assert json.loads((run / "humaneval_5" / "summary.json").read_text())["problems"] == 3

    env["OUT"] = "out/none"
    nothing = bash("score")
    assert nothing.returncode != 0
    assert "out/none/config.json does not exist" in nothing.stderr.splitlines()[-1]
    wrong = bash("abacus")
    assert wrong.returncode == 1
    assert wrong.stderr == "recipe.sh abacus: not one of cpu, t4, v5e, v6e, v6e-16, score, smollm\n"
