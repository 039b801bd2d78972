"""data_prep.py acecode: AceCode's rows made into tasks, and what is refused."""

import dataclasses
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

import corpus
import data_prep

DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
QWEN = DATA / "qwen2.5_tokenizer" / "tokenizer.json"
MODELS = ("qwen_coder_2.5", "llama3_instruct", "qwen_coder_2.5", "another")


def rows_of_acecode(count):
    """Rows in AceCode's schema; the pass rates of row i are about i / count, nearer to the end."""
    rng = random.Random(0)
    rows = []
    for i in range(count):
        inferences = []
        for k, name in enumerate(MODELS):
            rate = i / count + rng.uniform(-0.2, 0.2) * (1.1 - i / count)
            answer = {"model_name": name, "completion_id": k, "pass_rate": min(1.0, max(0.0, rate))}
            inferences.append(answer | {"completion": f"def f{i}(a):\n    return a + {i}\n"})
        question = f"Add {i} to the number a."
        row = {"id": f"row_{i}", "source": "oss", "question": question, "inferences": inferences}
        row["test_cases"] = [f"assert f{i}({k}) == {k + i}" for k in range(3)]
        rows.append(row | {"context_messages": [{"content": question, "role": "user"}]})
    return rows


def acecode(tmp_path, rows, **changes):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"roots": (str(path),), "out": str(tmp_path / "tasks"), "heldout": 0.0}
    return data_prep.AceCode(**settings | {"difficulty": "all"} | changes)


def tasks_of(out, split="train"):
    return [json.loads(line) for line in (Path(out) / f"{split}.jsonl").read_text().splitlines()]


def meta_of(out):
    return json.loads((Path(out) / "meta.json").read_text())


def refused(cfg):
    """The one line that main() raises; nothing is left in --out."""
    with pytest.raises((ValueError, OSError)) as error:
        data_prep.main(cfg)
    assert "\n" not in str(error.value)
    return str(error.value)


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
    data_prep.main(cfg)
    tasks = tasks_of(cfg.out)
    assert [task["id"] for task in tasks] == [f"row_{i}" for i in (0, 0, 1, 1, 5, 6, 7, 7)]
    assert tasks[2]["test_cases"] == ["assert f1(0) == 1", "assert f1(2) == 3"]
    dropped = {"without_rates": 0, "difficulty": 0, "unparsable_tests": 8, "without_tests": 4}
    assert meta_of(cfg.out)["dropped"] == dropped | {"duplicates": 1, "long_prompts": 0}
    assert meta_of(cfg.out)["tasks"] == {"train": 8, "heldout": 0}
    Path(cfg.out).rename(tmp_path / "moved")
    cfg = dataclasses.replace(cfg, out=str(tmp_path / "moved"))
    data_prep.main(cfg)
    assert "complete, nothing to do" in capsys.readouterr().out
    assert "not empty; delete it" in refused(dataclasses.replace(cfg, seed=1))
    with data_prep.runs.lock(tmp_path / ".lock_moved"):
        assert "another process is writing" in refused(cfg)
    Path(cfg.roots[0]).write_text(json.dumps(rows[0]))
    assert "not empty; delete it" in refused(cfg)
    assert tasks_of(cfg.out) == tasks
    acecode(tmp_path, rows)  # the file as it was, but half of the tasks are gone
    (tmp_path / "moved" / "heldout.jsonl").unlink()
    assert "not empty; delete it" in refused(cfg)


def test_hard_tasks_are_percentiles_of_the_rows_with_rates(tmp_path):
    rows = rows_of_acecode(40)
    for row in rows[::10]:
        for answer in row["inferences"]:
            answer["model_name"] = "another"
    known = [row for i, row in enumerate(rows) if i % 10]
    rates = [[answer["pass_rate"] for answer in row["inferences"][:3]] for row in known]
    mean, std = np.mean(rates, 1), np.std(rates, 1)
    hard = (mean <= np.percentile(mean, 20)) & (std >= np.percentile(std, 40))
    cfg = acecode(tmp_path, rows, difficulty="hard")
    data_prep.main(cfg)
    ids = [row["id"] for row, kept in zip(known, hard, strict=True) if kept]
    assert 0 < len(ids) < 36
    assert [task["id"] for task in tasks_of(cfg.out)[::2]] == ids
    dropped = meta_of(cfg.out)["dropped"]
    assert (dropped["without_rates"], dropped["difficulty"]) == (4, 36 - len(ids))


@pytest.mark.skipif(not QWEN.is_file(), reason=f"no {QWEN}; set SHARED_DATA")
def test_prompts_that_are_too_long_are_dropped(tmp_path):
    rows = rows_of_acecode(6)
    rows[3]["question"] += " Slowly, slowly." * 40
    cfg = acecode(tmp_path, rows, tokenizer=str(QWEN), max_prompt=60)
    data_prep.main(cfg)
    encoder = tokenizers.Tokenizer.from_file(cfg.tokenizer)

    def length(task):
        turns = {"system": "You are a helpful assistant.", "user": corpus.question_of(task)}
        turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns.items()]
        return len(encoder.encode("".join([*turns, "<|im_start|>assistant\n"])))

    every = [task for row in rows for task in corpus.with_twin(row)]
    assert tasks_of(cfg.out) == [task for task in every if length(task) <= 60]
    dropped = meta_of(cfg.out)["dropped"]["long_prompts"]
    assert dropped == sum(length(task) > 60 for task in every) > 0


def test_held_out_tasks_are_drawn_with_their_twins(tmp_path):
    cfg = acecode(tmp_path, rows_of_acecode(100), heldout=0.3)
    data_prep.main(cfg)
    train = {task["id"] for task in tasks_of(cfg.out)}
    heldout = {task["id"] for task in tasks_of(cfg.out, "heldout")}
    assert not train & heldout
    assert 15 < len(heldout) < 45  # 30 +- 3 standard deviations
    assert meta_of(cfg.out)["tasks"] == {"train": 2 * len(train), "heldout": 2 * len(heldout)}
    data_prep.main(dataclasses.replace(cfg, seed=1, out=str(tmp_path / "other")))
    assert {task["id"] for task in tasks_of(tmp_path / "other", "heldout")} != heldout


def test_acecode_comes_through_datasets(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs: pip install datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = rows_of_acecode(10)
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub" / "train-00000.parquet")
    monkeypatch.setattr(corpus, "ACECODE", str(tmp_path / "hub"))
    local = acecode(tmp_path, rows)
    data_prep.main(local)
    data_prep.main(dataclasses.replace(local, roots=(), out=str(tmp_path / "hub_tasks")))
    assert tasks_of(tmp_path / "hub_tasks") == tasks_of(local.out)
    monkeypatch.setattr(corpus, "ACECODE", str(tmp_path / "nowhere"))
    message = refused(dataclasses.replace(local, roots=(), out=str(tmp_path / "new")))
    assert "cannot be downloaded" in message
    assert "--roots" in message


ROW = rows_of_acecode(1)[0]
NO_ROWS = ["{", '["id", "question"]', '{"id": "a", "question": "b"}']
NO_ROWS += [json.dumps(ROW | {"test_cases": tests}) for tests in ([1], "assert f(1)")]
NO_ROWS += [json.dumps(ROW | {"inferences": [{"pass_rate": 1}]})]
NO_ROWS += [json.dumps(ROW | {"question": "half \ud800"})]
NO_ROWS += [json.dumps({key: ROW[key] for key in ROW if key != "context_messages"})]


@pytest.mark.parametrize("line", NO_ROWS)
def test_what_is_no_row_of_acecode_is_refused(tmp_path, line):
    cfg = acecode(tmp_path, rows_of_acecode(2))
    with open(cfg.roots[0], "a") as file:
        file.write(line + "\n")
    message = refused(cfg)
    assert "line 3 is no row of AceCode" in message
    assert "inferences in JSON" in message
    assert not Path(cfg.out).exists()


def test_what_leads_to_no_tasks_is_refused(tmp_path):
    rows = rows_of_acecode(2)
    assert "nowhere.json" in refused(acecode(tmp_path, rows, tokenizer="nowhere.json"))
    assert "nowhere" in refused(acecode(tmp_path, rows, roots=("nowhere",)))
    message = refused(acecode(tmp_path, rows, heldout=0.999999))
    assert "no task is left" in message
    assert "--heldout" in message


def test_the_command_writes_tasks(tmp_path):
    cfg = acecode(tmp_path, rows_of_acecode(3))
    flags = "--roots", cfg.roots[0], "--difficulty=all", "--heldout=0"
    done = run("data_prep.py", "acecode", *flags, f"--out={cfg.out}")
    assert done.returncode == 0, done.stderr
    assert len(tasks_of(cfg.out)) == 6
