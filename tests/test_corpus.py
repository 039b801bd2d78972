"""corpus.py on rows of files and on data sets in folders; licences and benchmarks."""

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import corpus as cp
import data_prep as dp
from rows import Rows, open_data

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    """HumanEval and MBPP are only looked for where a test says so."""
    monkeypatch.setattr(cp, "BENCHMARKS", ())


def module(seed):
    """A Python file of 600 bytes, near no other."""
    rng = random.Random(seed)
    words = iter(["".join(rng.choices("abcdefghijklmnop", k=8)) for _ in range(30)])
    functions = zip(words, words, words, strict=True)
    return "\n".join(
        f"def {a}({b}, {c}):\n    return {b} + {c} * {rng.randint(0, 999)}\n"
        for a, b, c in functions
    )


def texts_of(out):
    """All documents of a folder, sorted."""
    tokenizer, texts = Tokenizer.from_file(str(Path(out) / "tokenizer.json")), []
    for rows in open_data(out)[:2]:
        token_RL, segment_RL, _ = (
            rows.read(dp.np.arange(rows.total)) if rows.total else dp.np.zeros((3, 0, 1), int)
        )
        stream = token_RL[segment_RL > 0]
        ends = dp.np.flatnonzero(stream == rows.meta["eos_id"]) + 1
        texts += [tokenizer.decode(part[:-1]) for part in dp.np.split(stream, ends)[:-1]]
    return sorted(texts)


def tree(out):
    """{path: content} of all that a run wrote, but for its manifest."""
    paths = [path for path in Path(out).rglob("*") if path.is_file() and path.name[0] not in ".m"]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def config(tmp_path, **changes):
    settings = {"out": str(tmp_path / "out"), "heldout": 0.2, "workers": 1}
    return dp.Python(**settings | {"seq_len": 64, "vocab_size": 300} | changes)


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-or-later", True),
        ("MIT AND LGPL-2.1-only", False),
        ("(MIT OR GPL-2.0) AND (BSD-3-Clause AND ISC)", True),
        ("(MIT AND GPL-2.0) OR MPL-2.0", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache License (2.0)", True),
        ("MIT License (MIT)", True),
        ("new BSD", True),
        ("Apache-2.0 AND CNRI-Python", True),
        ("Mozilla Public License 2.0 (MPL 2.0)", False),
        ("BUSL-1.1", False),
        ("Proprietary", False),
        ("see LICENSE", False),
        ("CC-BY-NC-4.0", False),
        ("", False),
    ],
)
def test_licences(statement, allowed):
    assert cp.permits(statement) == allowed


# ---- rows of files and data sets


def write_rows(folder, texts, **columns):
    """Half of the rows in a Parquet file, half in JSON lines."""
    folder.mkdir()
    rows = [
        dict(zip(["code", *columns], values, strict=True))
        for values in zip(texts, *columns.values(), strict=True)
    ]
    half = len(rows) // 2
    pq.write_table(pa.Table.from_pylist(rows[:half]), folder / "a.parquet")
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[half:]))


def test_the_column_of_text_is_found_and_rows_of_other_licences_are_dropped(tmp_path):
    texts = [module(i) for i in range(8)]
    licences = ["mit", "gpl-3.0", None, ""] * 2
    write_rows(tmp_path / "rows", texts, license=licences)
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),))
    dp.main(cfg)
    meta = Rows(cfg.out, "train").meta
    assert texts_of(cfg.out) == sorted(
        text for text, licence in zip(texts, licences, strict=True) if licence != "gpl-3.0"
    )
    assert meta["dropped"]["licence"] == 2
    other = dataclasses.replace(cfg, licences="any", out=str(tmp_path / "any"))
    dp.main(other)
    assert len(texts_of(other.out)) == 8
    write_rows(
        tmp_path / "lists",
        texts,
        max_stars_repo_licenses=[["MIT"], ["MIT", "AGPL-3.0"], [], ["BSD-2-Clause"]] * 2,
    )
    cfg = config(tmp_path, roots=(str(tmp_path / "lists"),), out=str(tmp_path / "out2"))
    dp.main(cfg)
    assert Rows(cfg.out, "train").meta["dropped"]["licence"] == 2
    # of merged data sets: a value that is missing hides no other
    forms = ({"content": text, "license": None, "licenses": ["GPL-3.0"]} for text in texts[:2])
    forms = [*forms, {"content": None, "text": texts[2], "license": float("nan")}]
    forms += [
        {"content": texts[i], "license": {"key": key, "spdx_id": key}}
        for i, key in ((3, "MIT"), (4, "GPL-3.0"))
    ]
    forms += [{"content": texts[6], "license": True}]
    (tmp_path / "forms.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (*forms, {"content": texts[5]}))
    )
    cfg = config(tmp_path, roots=(str(tmp_path / "forms.jsonl"),), out=str(tmp_path / "out3"))
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted((texts[2], texts[3], texts[5]))
    with pytest.raises(ValueError, match=r"--roots name files of rows, and others hold \.py files"):
        dp.main(
            dataclasses.replace(
                cfg, roots=(*cfg.roots, str(Path(__file__).parent)), out=str(tmp_path / "out4")
            )
        )
    pq.write_table(pa.table({"number": [1]}), tmp_path / "rows" / "c.parquet")
    with pytest.raises(
        ValueError,
        match=r"c.parquet has no text in a column content or text or code .it has number",
    ):
        dp.main(config(tmp_path, roots=(str(tmp_path / "rows"),), out=str(tmp_path / "new")))


def test_a_run_that_was_stopped_does_not_read_its_inputs_again(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", [module(i) for i in range(8)])
    whole = (tmp_path / "rows" / "b.jsonl").read_bytes()
    (tmp_path / "rows" / "b.jsonl").write_bytes(whole[:-20])
    cfg, read = config(tmp_path, roots=(str(tmp_path / "rows"),)), []
    with pytest.raises(ValueError, match=r"b.jsonl, line 4, cannot be read"):
        dp.main(cfg)
    (tmp_path / "rows" / "b.jsonl").write_bytes(whole)
    documents_of = cp.documents_of
    monkeypatch.setattr(
        cp,
        "documents_of",
        lambda item, rules: read.append(Path(item.path).name) or documents_of(item, rules),
    )
    dp.main(cfg)
    assert read == ["b.jsonl"]
    assert len(texts_of(cfg.out)) == 8


def test_a_folder_that_was_moved_goes_on(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", [module(i) for i in range(8)])
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),))

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(cp, "near_duplicates", full)
    with pytest.raises(OSError, match="no space left"):
        dp.main(cfg)
    monkeypatch.undo()
    shutil.move(cfg.out, tmp_path / "larger disk")
    cfg = dataclasses.replace(cfg, out=str(tmp_path / "larger disk"))
    dp.main(cfg)
    assert len(texts_of(cfg.out)) == 8


def test_a_data_set_streams_into_the_rows_of_its_files(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = [module(i) for i in range(12)]
    (tmp_path / "set" / "python").mkdir(parents=True)
    for number in range(3):
        rows = {
            "content": texts[4 * number :][:4],
            "license": ["mit", "mit", "mit", "gpl"],
            "stars": [1, 2, 3, 4],
        }
        pq.write_table(pa.table(rows), tmp_path / "set" / "python" / f"train-{number}.parquet")
    cfg = config(tmp_path, hf=f"{tmp_path / 'set'}:python")
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted(text for i, text in enumerate(texts) if i % 4 < 3)
    assert Rows(cfg.out, "train").meta["dropped"]["licence"] == 3
    with pytest.raises(ValueError, match=r"has no text in a column nothing .it has license 'mit'"):
        dp.main(dataclasses.replace(cfg, column="nothing", out=str(tmp_path / "other")))
    with pytest.raises(
        ValueError, match=r"nowhere cannot be downloaded .*name its files with --roots"
    ):
        dp.main(dataclasses.replace(cfg, hf=str(tmp_path / "nowhere"), out=str(tmp_path / "third")))


def test_a_data_set_that_was_saved_to_disk_is_read(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = [module(i) for i in range(12)]
    rows = datasets.Dataset.from_dict(
        {"content": texts, "license": ["mit", "mit", "mit", "gpl"] * 3}
    )
    rows.save_to_disk(tmp_path / "rows", num_shards=3)
    other = datasets.Dataset.from_dict({"content": ["no = 1\n"], "license": ["mit"]})
    datasets.DatasetDict({"train": rows, "test": other}).save_to_disk(tmp_path / "splits")
    for folder, shards in ("rows", 3), ("splits", 1):
        cfg = config(tmp_path, hf=str(tmp_path / folder), out=str(tmp_path / f"out-{folder}"))
        dp.main(cfg)
        assert texts_of(cfg.out) == sorted(text for i, text in enumerate(texts) if i % 4 < 3)
        assert cp.stream(cfg.hf).num_shards == shards


def test_a_shard_has_rows_of_all_files_and_two_processes_write_the_bytes_of_one(tmp_path):
    texts = [module(i) for i in range(40)] + [module(3) + "END = 1\n", module(4)]
    write_rows(tmp_path / "rows", texts)
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),), shard_bytes=5_000)
    dp.main(cfg)
    dp.main(dataclasses.replace(cfg, out=str(tmp_path / "two"), workers=2))
    assert tree(tmp_path / "two") == tree(cfg.out)
    assert len(Rows(cfg.out, "train").shards) == 4
    assert not (tmp_path / "out" / ".rows").exists()
    cfg = dataclasses.replace(cfg, out=str(tmp_path / "new"), column="code")
    groups, _ = dp.gather(dp.find(cfg), cfg)
    for group in groups["train"]:
        assert {item.name[:2] for item in group} == {"a.", "b."}


@pytest.mark.skipif(
    not (SHARED / "HumanEval.jsonl.gz").is_file(),
    reason=f"no HumanEval in {SHARED}; set SHARED_DATA",
)
def test_rows_and_packages_are_cleaned_of_humaneval_and_mbpp_unless_these_cannot_be_had(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        cp,
        "BENCHMARKS",
        [(SHARED / name).as_uri() for name in ("HumanEval.jsonl.gz", "sanitized-mbpp.json")],
    )
    names = "HumanEval.jsonl.gz", "sanitized-mbpp.json"
    humaneval, mbpp = (cp.read_problems((SHARED / name).read_bytes(), name) for name in names)
    solved = humaneval[0]["prompt"] + humaneval[0]["canonical_solution"]
    texts = [module(i) for i in range(6)]
    texts += [f"# copied\n{solved}", mbpp[-1]["code"] + "\nprint(1)\n"]
    write_rows(tmp_path / "rows", texts)
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),))
    dp.main(cfg)
    assert "2 benchmark" in capsys.readouterr().out
    assert texts_of(cfg.out) == sorted(module(i) for i in range(6))
    kept = sorted(path.name for path in (tmp_path / "data" / "tasks").iterdir())
    assert kept == ["HumanEval.jsonl.gz", "sanitized-mbpp.json"]
    # So are .py files beside the manifest of fetch_pypi.py, and no others.
    for number, text in enumerate(texts):
        path = tmp_path / "src" / "package-1" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ours = dataclasses.replace(cfg, roots=(str(tmp_path / "src"),), out=str(tmp_path / "ours"))
    dp.main(ours)
    assert len(texts_of(ours.out)) == 8
    (tmp_path / "src" / "manifest.json").write_text("{}")
    theirs = dataclasses.replace(ours, out=str(tmp_path / "theirs"))
    dp.main(theirs)
    assert texts_of(theirs.out) == sorted(module(i) for i in range(6))
    for word in ("none", ""):
        off = dataclasses.replace(cfg, benchmarks=(word,), out=str(tmp_path / f"off{word}"))
        dp.main(off)
        assert len(texts_of(off.out)) == 8
    monkeypatch.setattr(cp, "TASKS", str(tmp_path / "tasks"))
    monkeypatch.setattr(
        cp, "BENCHMARKS", ["http://127.0.0.1:9/HumanEval.jsonl.gz", cp.BENCHMARKS[1]]
    )
    capsys.readouterr()
    cfg = dataclasses.replace(cfg, out=str(tmp_path / "one"))
    dp.main(cfg)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "documents that hold problems of HumanEval.jsonl.gz stay in: " in errors
    assert "fetch http://127.0.0.1:9/HumanEval.jsonl.gz by hand" in errors
    assert len(texts_of(cfg.out)) == 7
    # The page of a portal is not kept as a file of problems.
    page = tmp_path / "portal" / "HumanEval.jsonl.gz"
    page.parent.mkdir()
    page.write_text("<html>Sign in</html>")
    monkeypatch.setattr(cp, "BENCHMARKS", [page.as_uri(), cp.BENCHMARKS[1]])
    dp.main(dataclasses.replace(cfg, out=str(tmp_path / "two")))
    assert "documents that hold problems of HumanEval.jsonl.gz stay in: " in capsys.readouterr().err
    assert [path.name for path in Path(cp.TASKS).iterdir()] == ["sanitized-mbpp.json"]
