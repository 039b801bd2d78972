"""rl_tasks.py: AceCode's rows made into tasks, what is refused."""

import dataclasses
import gzip
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from conftest import ROOT, run

import rl_tasks
import sandbox

DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
HUMANEVAL, QWEN = DATA / "HumanEval.jsonl.gz", DATA / "qwen2.5_tokenizer"
needs_qwen = pytest.mark.skipif(
    not QWEN.is_dir(), reason=f"no Qwen2.5 tokenizer in {QWEN}; set SHARED_DATA"
)


def refused(cfg):
    """The one line that main() raises."""
    with pytest.raises((ValueError, FileNotFoundError, RuntimeError)) as error:
        rl_tasks.main(cfg)
    assert "\n" not in str(error.value)
    return str(error.value)


def meta_of(out):
    return json.loads((Path(out) / "meta.json").read_text())


def tree(out):
    """{path: content} of all that a run wrote."""
    paths = [path for path in Path(out).rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


# ---- AceCode


def rows_of_acecode(count, seed=0):
    """`count` made-up rows in AceCode's schema; the pass rates of row i are about i / count, and
    nearer to the end.
    """
    rng, rows = random.Random(seed), []
    for i in range(count):
        rates = [
            min(1.0, max(0.0, i / count + rng.uniform(-0.2, 0.2) * (1.1 - i / count)))
            for _ in range(4)
        ]
        names = ("qwen_coder_2.5", "llama3_instruct", "qwen_coder_2.5", "another")
        solution = f"def f{i}(a):\n    return a + {i}\n"
        inferences = [
            {"model_name": name, "completion_id": k, "completion": solution, "pass_rate": rate}
            for k, (name, rate) in enumerate(zip(names, rates, strict=True))
        ]
        question, tests = (
            f"Add {i} to the number a.",
            [f"assert f{i}({k}) == {k + i}" for k in range(3)],
        )
        row = {
            "id": f"row_{i}",
            "source": "oss",
            "question": question,
            "test_cases": tests,
            "inferences": inferences,
        }
        rows.append(row | {"context_messages": [{"content": question, "role": "user"}]})
    return rows


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tasks_of(out, split="train"):
    return [json.loads(line) for line in (Path(out) / f"{split}.jsonl").read_text().splitlines()]


def acecode(tmp_path, lines, **changes):
    path = write_rows(tmp_path / "rows.jsonl", lines)
    settings = {
        "roots": (str(path),),
        "out": str(tmp_path / "tasks"),
        "heldout": 0.0,
        "difficulty": "all",
    }
    return rl_tasks.Config(**settings | changes)


def test_tasks_are_cleaned_and_what_is_dropped_is_counted(tmp_path, capsys):
    rows = rows_of_acecode(8)
    rows[1]["test_cases"][1] = "assert f1(1 == 2"  # goes alone
    rows[2]["test_cases"] = ["assert (", "\0", "def"]  # nothing is left
    rows[3]["test_cases"] = []
    rows[4]["question"] = rows[0]["question"].replace(" ", "  ")
    rows[4]["inferences"] = []  # no solution, so no twin
    rows[5]["inferences"][0]["completion"] = "import os\n"
    rows[5]["inferences"][0]["pass_rate"] = 2.0  # the best one begins with no function
    rows[6]["question"] = "Can you add six?"
    cfg = acecode(tmp_path, rows)
    rl_tasks.main(cfg)
    tasks, meta = tasks_of(cfg.out), meta_of(cfg.out)
    assert [task["id"] for task in tasks] == [f"row_{i}" for i in (0, 0, 1, 1, 5, 6, 7, 7)]
    assert tasks[2]["test_cases"] == ["assert f1(0) == 1", "assert f1(2) == 3"]
    assert meta["dropped"] == {
        "without_rates": 0, "difficulty": 0, "unparsable_tests": 8, "without_tests": 4, "duplicates": 1,
        "long_prompts": 0,
    }  # fmt: skip
    assert meta["rows"] == 8
    assert meta["tasks"] == {"train": 8, "heldout": 0}
    assert "not measured" in capsys.readouterr().out
    before = tree(cfg.out)
    rl_tasks.main(cfg)
    assert "nothing to do" in capsys.readouterr().out
    assert tree(cfg.out) == before
    (Path(cfg.out) / "train.jsonl").unlink()
    rl_tasks.main(cfg)
    assert tree(cfg.out) == before


def test_difficulties_are_percentiles_of_the_rows_with_rates(tmp_path):
    rows = rows_of_acecode(40)
    for row in rows[::10]:
        for answer in row["inferences"]:
            answer["model_name"] = "another"
    known = [row for i, row in enumerate(rows) if i % 10]
    rates = [[answer["pass_rate"] for answer in row["inferences"][:3]] for row in known]
    mean, std = np.mean(rates, 1), np.std(rates, 1)
    want = {
        "hard": (mean <= np.percentile(mean, 20)) & (std >= np.percentile(std, 40)),
        "medium": (mean >= np.percentile(mean, 25)) & (mean <= np.percentile(mean, 75)),
        "easy": mean >= np.percentile(mean, 75),
    }
    for difficulty, keep in want.items():
        cfg = acecode(tmp_path, rows, difficulty=difficulty, out=str(tmp_path / difficulty))
        rl_tasks.main(cfg)
        assert keep.any()
        assert not keep.all()
        ids = [row["id"] for row, kept in zip(known, keep, strict=True) if kept]
        assert [task["id"] for task in tasks_of(cfg.out)[::2]] == ids
        dropped = meta_of(cfg.out)["dropped"]
        assert dropped["without_rates"] == 4
        assert dropped["difficulty"] == 36 - len(ids)


@needs_qwen
def test_prompts_that_are_too_long_are_dropped(tmp_path):
    rows = rows_of_acecode(6)
    rows[3]["question"] += " Slowly, slowly." * 40
    cfg = acecode(tmp_path, rows, tokenizer=str(QWEN / "tokenizer.json"), max_prompt=60)
    rl_tasks.main(cfg)
    encoder = tokenizers.Tokenizer.from_file(cfg.tokenizer)

    def length(task):
        turns = {"system": rl_tasks.SYSTEM, "user": rl_tasks.question_of(task)}
        text = "".join(
            f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns.items()
        )
        return len(encoder.encode(text + "<|im_start|>assistant\n"))

    every = [task for row in rows for task in rl_tasks.with_twin(row)]
    assert tasks_of(cfg.out) == [task for task in every if length(task) <= 60]
    dropped = meta_of(cfg.out)["dropped"]["long_prompts"]
    assert dropped == sum(length(task) > 60 for task in every) > 0


def test_held_out_tasks_are_drawn_with_their_twins(tmp_path):
    cfg = acecode(tmp_path, rows_of_acecode(100), heldout=0.3)
    rl_tasks.main(cfg)
    train, heldout = (
        {task["id"] for task in tasks_of(cfg.out, split)} for split in ("train", "heldout")
    )
    assert not train & heldout
    assert 15 < len(heldout) < 45  # 30 +- 3 standard deviations
    assert meta_of(cfg.out)["tasks"] == {"train": 2 * len(train), "heldout": 2 * len(heldout)}
    rl_tasks.main(dataclasses.replace(cfg, seed=1, out=str(tmp_path / "other")))
    assert {task["id"] for task in tasks_of(tmp_path / "other", "heldout")} != heldout


def test_acecode_comes_through_datasets(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs: pip install datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = rows_of_acecode(10)
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub" / "train-00000.parquet")
    monkeypatch.setattr(rl_tasks, "ACECODE", str(tmp_path / "hub"))
    local = acecode(tmp_path, rows)
    rl_tasks.main(local)
    rl_tasks.main(dataclasses.replace(local, roots=(), out=str(tmp_path / "hub_tasks")))
    assert tasks_of(tmp_path / "hub_tasks") == tasks_of(local.out)
    monkeypatch.setattr(rl_tasks, "ACECODE", str(tmp_path / "nowhere"))
    message = refused(dataclasses.replace(local, roots=(), out=str(tmp_path / "new")))
    assert "cannot be downloaded" in message
    assert "--roots" in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 3", "AceCode"]),
        ('{"id": "a", "question": "b"}', ["line 3", "inferences"]),
        ('["id", "question"]', ["line 3"]),
        (json.dumps(rows_of_acecode(1)[0] | {"test_cases": [1]}), ["line 3"]),
        (json.dumps(rows_of_acecode(1)[0] | {"test_cases": "assert f(1)"}), ["line 3"]),
        (json.dumps(rows_of_acecode(1)[0] | {"inferences": [{"pass_rate": 1}]}), ["line 3"]),
        (json.dumps(rows_of_acecode(1)[0] | {"question": "half \ud800"}), ["line 3"]),
    ],
)
def test_what_is_no_row_of_acecode_is_refused(tmp_path, capsys, line, words):
    cfg = acecode(tmp_path, rows_of_acecode(2))
    with open(cfg.roots[0], "a") as file:
        file.write(line + "\n")
    message = refused(cfg)
    assert all(word in message for word in words)
    assert not [
        path for path in Path(cfg.out).rglob("*") if path.is_file() and path.name != ".lock"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": "nowhere.json"}, ["nowhere.json"]),
        ({"roots": ("nowhere",)}, ["No such file", "nowhere"]),
        ({"heldout": 0.999999}, ["no task is left", "--heldout"]),
    ],
)
def test_what_leads_to_no_tasks_is_refused(tmp_path, capsys, changes, words):
    message = refused(acecode(tmp_path, rows_of_acecode(2), **changes))
    assert all(word in message for word in words), message


def test_a_folder_of_other_tasks_is_refused(tmp_path):
    cfg = acecode(tmp_path, rows_of_acecode(3))
    rl_tasks.main(cfg)
    before = tree(cfg.out)
    assert "other settings" in refused(dataclasses.replace(cfg, difficulty="easy"))
    write_rows(Path(cfg.roots[0]), rows_of_acecode(4))
    assert "other settings or files" in refused(cfg)
    assert tree(cfg.out) == before
    held = Path(cfg.out) / ".lock"
    with (
        rl_tasks.runs.lock(held),
        pytest.raises(BlockingIOError, match="another process is writing"),
    ):
        rl_tasks.main(cfg)


def test_the_rows_that_are_read_are_not_written_over(tmp_path):
    cfg = acecode(tmp_path, rows_of_acecode(3))
    own = Path(cfg.roots[0]).rename(tmp_path / "train.jsonl")
    before = own.read_bytes()
    assert "would be written over" in refused(
        dataclasses.replace(cfg, roots=(str(own),), out=str(tmp_path))
    )
    assert own.read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "heldout.jsonl").write_text("{}")
    assert "would be written over" in refused(
        acecode(tmp_path, rows_of_acecode(3), out=str(tmp_path / "mine"))
    )


@pytest.mark.skipif(not HUMANEVAL.is_file(), reason=f"no {HUMANEVAL}; set SHARED_DATA")
def test_humaneval_is_written_as_tasks_that_its_solutions_pass(tmp_path):
    cfg = acecode(tmp_path, rows_of_acecode(2), humaneval=str(HUMANEVAL))
    rl_tasks.main(cfg)
    tasks = tasks_of(cfg.out, "humaneval")
    rows = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]
    assert [task["id"] for task in tasks] == [row["task_id"] for row in rows]
    picked = [0, 32, 38]  # of them two whose tests call a helper of the prompt
    assert all(rows[i]["prompt"] in tasks[i]["question"] for i in picked)
    right = [rows[i]["prompt"] + rows[i]["canonical_solution"] for i in picked]
    results = sandbox.run_tests(
        [*right, rows[0]["prompt"]], [tasks[i]["test_cases"] for i in [*picked, 0]]
    )
    assert [result.rate for result in results] == [1, 1, 1, 0]
    assert "not the official file" in refused(
        dataclasses.replace(cfg, humaneval=cfg.roots[0], out=cfg.out + "2")
    )


def test_the_command_writes_tasks_and_says_in_a_line_what_is_wrong(tmp_path):
    cfg = acecode(tmp_path, rows_of_acecode(3))
    flags = "--roots", cfg.roots[0], "--difficulty=all", "--heldout=0"
    done = run("rl_tasks.py", *flags, f"--out={cfg.out}")
    assert done.returncode == 0, done.stderr
    assert len(tasks_of(cfg.out)) == 6
    message = refused(dataclasses.replace(cfg, seed=1))
    assert "other settings or files; choose another --out" in message
