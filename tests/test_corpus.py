"""corpus.py on rows of files and on data sets in folders; licences and benchmarks."""

import dataclasses
import gzip
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
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
    rng, functions = random.Random(seed), []
    words = iter(["".join(rng.choices("abcdefghijklmnop", k=8)) for _ in range(30)])
    for a, b, c in zip(words, words, words, strict=True):
        functions.append(f"def {a}({b}, {c}):\n    return {b} + {c} * {rng.randint(0, 999)}\n")
    return "\n".join(functions)


MODULES = [module(i) for i in range(12)]


def texts_of(out):
    """All documents of a folder, sorted."""
    tokenizer, texts = Tokenizer.from_file(str(Path(out) / "tokenizer.json")), []
    for rows in open_data(out)[:2]:
        if rows.total:
            token_RL, segment_RL, _ = rows.read(np.arange(rows.total))
            stream = token_RL[segment_RL > 0]
            ends = np.flatnonzero(stream == rows.meta["eos_id"]) + 1
            texts += [tokenizer.decode(part[:-1]) for part in np.split(stream, ends)[:-1]]
    return sorted(texts)


def tree(out):
    """{path: content} of all that a run wrote, but for its manifest."""
    paths = [path for path in Path(out).rglob("*") if path.is_file() and path.name[0] not in ".m"]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def config(tmp_path, **changes):
    settings = {"out": str(tmp_path / "out"), "heldout": 0.2, "workers": 1}
    return dp.Python(**settings | {"seq_len": 64, "vocab_size": 300} | changes)


def stops(match, cfg, **changes):
    with pytest.raises(ValueError, match=match):
        dp.main(dataclasses.replace(cfg, **changes))


LICENCES = """
MIT | yes
Apache-2.0 OR GPL-3.0-or-later | yes
MIT AND LGPL-2.1-only | no
(MIT OR GPL-2.0) AND (BSD-3-Clause AND ISC) | yes
(MIT AND GPL-2.0) OR MPL-2.0 | no
Apache-2.0 WITH LLVM-exception | yes
Apache License (2.0) | yes
MIT License (MIT) | yes
new BSD | yes
Apache-2.0 AND CNRI-Python | yes
Mozilla Public License 2.0 (MPL 2.0) | no
BUSL-1.1 | no
Proprietary | no
see LICENSE | no
CC-BY-NC-4.0 | no
 | no
"""


def test_licences():
    for line in LICENCES.strip("\n").splitlines():
        statement, allowed = line.split(" | ") if line[0] != " " else ("", "no")
        assert cp.permits(statement) == (allowed == "yes"), statement


# ---- rows of files and data sets


def write_rows(folder, texts, **columns):
    """Half of the rows in a Parquet file, half in JSON lines."""
    folder.mkdir()
    table, half = pa.table({"code": texts} | columns), len(texts) // 2
    pq.write_table(table[:half], folder / "a.parquet")
    write_lines(folder / "b.jsonl", table[half:].to_pylist())


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def dropped_for_licence(cfg):
    return Rows(cfg.out, "train").meta["dropped"]["licence"]


def test_the_column_of_text_is_found_and_rows_of_other_licences_are_dropped(tmp_path):
    rows, lists = tmp_path / "rows", tmp_path / "lists"
    write_rows(rows, MODULES[:8], license=["mit", "gpl-3.0", None, ""] * 2)
    cfg = config(tmp_path, roots=(str(rows),))
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted(MODULES[i] for i in (0, 2, 3, 4, 6, 7))
    assert dropped_for_licence(cfg) == 2
    every = dataclasses.replace(cfg, licences="any", out=str(tmp_path / "any"))
    dp.main(every)
    assert len(texts_of(every.out)) == 8
    licences = [["MIT"], ["MIT", "AGPL-3.0"], [], ["BSD-2-Clause"]] * 2
    write_rows(lists, MODULES[:8], max_stars_repo_licenses=licences)
    of_lists = dataclasses.replace(cfg, roots=(str(lists),), out=str(tmp_path / "out2"))
    dp.main(of_lists)
    assert dropped_for_licence(of_lists) == 2
    mixed = (str(lists / "b.jsonl"), str(Path(__file__).parent))
    said = r"b.jsonl holds rows, other --roots hold .py files"
    stops(said, cfg, roots=mixed, out=str(tmp_path / "mixed"))
    pq.write_table(pa.table({"number": [1]}), rows / "c.parquet")
    said = r"c.parquet has no text in a column content or text or code .it has number"
    stops(said, cfg, out=str(tmp_path / "new"))


def test_of_merged_data_sets_a_value_that_is_missing_hides_no_other(tmp_path):
    a, b, c, d, e, f, g = MODULES[:7]
    forms = [{"content": text, "license": None, "licenses": ["GPL-3.0"]} for text in (a, b)]
    forms.append({"content": None, "text": c, "license": float("nan")})
    for text, key in (d, "MIT"), (e, "GPL-3.0"):
        forms.append({"content": text, "license": {"key": key, "spdx_id": key}})
    write_lines(tmp_path / "f.jsonl", [*forms, {"content": g, "license": True}, {"content": f}])
    cfg = config(tmp_path, roots=(str(tmp_path / "f.jsonl"),))
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted((c, d, f))


def test_a_run_that_was_stopped_does_not_read_its_inputs_again(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", MODULES[:8])
    path, read, documents_of = tmp_path / "rows" / "b.jsonl", [], cp.documents_of
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),))
    stops(r"b.jsonl, line 4, cannot be read", cfg)
    path.write_bytes(whole)

    def spy(item, rules):
        read.append(Path(item.path).name)
        return documents_of(item, rules)

    monkeypatch.setattr(cp, "documents_of", spy)
    dp.main(cfg)
    assert read == ["b.jsonl"]
    assert len(texts_of(cfg.out)) == 8


def test_a_folder_that_was_moved_goes_on(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", MODULES[:8])
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


@pytest.mark.slow
def test_a_data_set_streams_into_the_rows_of_its_files(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set" / "python").mkdir(parents=True)
    for number in range(3):
        rows = {"content": MODULES[4 * number :][:4], "license": ["mit", "mit", "mit", "gpl"]}
        table = pa.table(rows | {"stars": [1, 2, 3, 4]})
        pq.write_table(table, tmp_path / "set" / "python" / f"train-{number}.parquet")
    cfg = config(tmp_path, hf=f"{tmp_path / 'set'}:python")
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted(text for i, text in enumerate(MODULES) if i % 4 < 3)
    assert dropped_for_licence(cfg) == 3
    said = r"has no text in a column nothing .it has license 'mit'"
    stops(said, cfg, column="nothing", out=str(tmp_path / "other"))
    said = r"nowhere cannot be downloaded .*name its files with --roots"
    stops(said, cfg, hf=str(tmp_path / "nowhere"), out=str(tmp_path / "third"))


class Killer:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_what_ends_a_worker_is_one_line(tmp_path):
    write_rows(tmp_path / "rows", MODULES[:4])
    with open(tmp_path / "rows" / "b.jsonl", "a") as file:
        file.write("[")
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),), workers=2)
    with pytest.raises(ValueError, match=r"b.jsonl, line 3, cannot be read .*; put that") as error:
        dp.main(cfg)
    assert error.traceback[-1].path.name == "corpus.py"  # no bug of a library
    with pytest.raises(RuntimeError, match="fewer --workers"):
        cp.examine_all([(Killer(),)] * 2, 2)


@pytest.mark.slow
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
    groups, _ = dp.gather(dp.find(cfg)[0], cfg)
    for group in groups["train"]:
        assert {item.name[:2] for item in group} == {"a.", "b."}


NAMES = "HumanEval.jsonl.gz", "sanitized-mbpp.json"


@pytest.mark.skipif(not (SHARED / NAMES[0]).is_file(), reason="no HumanEval; set SHARED_DATA")
def test_rows_and_packages_are_cleaned_of_humaneval_and_mbpp_unless_these_cannot_be_had(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cp, "BENCHMARKS", [(SHARED / name).as_uri() for name in NAMES])
    humaneval, mbpp = (cp.read_problems((SHARED / name).read_bytes(), name) for name in NAMES)
    solved = humaneval[0]["prompt"] + humaneval[0]["canonical_solution"]
    clean = sorted(MODULES[:6])
    texts = [*clean, f"# copied\n{solved}", mbpp[-1]["code"] + "\nprint(1)\n"]
    write_rows(tmp_path / "rows", texts)
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),))
    dp.main(cfg)
    assert "2 benchmark" in capsys.readouterr().out
    assert texts_of(cfg.out) == clean
    kept = sorted(path.name for path in (tmp_path / "data" / "tasks").iterdir())
    assert kept == [*NAMES]
    # So are .py files beside the manifest of fetch_pypi.py, and no others.
    (tmp_path / "src").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "src" / f"{number}.py").write_text(text)
    ours = dataclasses.replace(cfg, roots=(str(tmp_path / "src"),), out=str(tmp_path / "ours"))
    dp.main(ours)
    assert len(texts_of(ours.out)) == 8
    (tmp_path / "src" / "manifest.json").write_text("{}")
    theirs = dataclasses.replace(ours, out=str(tmp_path / "theirs"))
    dp.main(theirs)
    assert texts_of(theirs.out) == clean
    for word in ("none", ""):
        off = dataclasses.replace(cfg, benchmarks=(word,), out=str(tmp_path / f"off{word}"))
        dp.main(off)
        assert len(texts_of(off.out)) == 8
    monkeypatch.setattr(cp, "TASKS", str(tmp_path / "tasks"))
    dead = "http://127.0.0.1:9/HumanEval.jsonl.gz"
    monkeypatch.setattr(cp, "BENCHMARKS", [dead, cp.BENCHMARKS[1]])
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


# ---- which files are read


OTHERS = {
    "b.jsonl.gz": gzip.compress,
    "B.JSONL": bytes,
    "b.ndjson": bytes,
    "b.NDJSON.GZ": gzip.compress,
    "gzip.jsonl": gzip.compress,
    "bom.jsonl": b"\xef\xbb\xbf".__add__,
    "blank.jsonl": lambda lines: b"\n" + lines.replace(b"\n", b"\r\n\n"),
    "list.jsonl": lambda lines: json.dumps([*map(json.loads, lines.splitlines())]).encode(),
    "indented.jsonl": lambda lines: json.dumps(
        [*map(json.loads, lines.splitlines())], indent=2
    ).encode(),
    "objects.jsonl": lambda lines: b"\n".join(
        json.dumps(json.loads(line), indent=2).encode() for line in lines.splitlines()
    ),
}


def lines_of(texts):
    return "".join(json.dumps({"code": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("name", OTHERS)
def test_rows_in_any_form_are_read(tmp_path, name):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / name).write_bytes(OTHERS[name](lines_of(MODULES[6:])))
    (tmp_path / "rows/a.jsonl").write_bytes(lines_of(MODULES[:6]))
    for column in ("", "code"):
        cfg = config(tmp_path, roots=(str(tmp_path / "rows"),), column=column)
        cfg = dataclasses.replace(cfg, out=str(tmp_path / f"out_{column}"))
        dp.main(cfg)
        assert texts_of(cfg.out) == sorted(MODULES)
    # the same in a file that is named .json
    path = tmp_path / "b.json"
    path.write_bytes((tmp_path / "rows" / name).read_bytes())
    cfg = config(tmp_path, roots=(str(path), str(tmp_path / "rows/a.jsonl")))
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted(MODULES)


def test_files_that_are_not_read_are_counted_and_linked_folders_are_read_once(tmp_path, capsys):
    root, elsewhere = tmp_path / "src", tmp_path / "elsewhere"
    root.mkdir()
    (elsewhere / "deep").mkdir(parents=True)
    for folder, texts in ((root, MODULES[:4]), (elsewhere, MODULES[4:8])):
        for i, text in enumerate(texts):
            (folder / f"m{i}.{'Py' if i % 2 else 'py'}").write_text(text)
    (elsewhere / "deep/m.PY").write_text(MODULES[8])
    (tmp_path / "above.py").write_text(MODULES[9])
    links = {"more": elsewhere, "again": elsewhere, "deeper": elsewhere / "deep", "loop": root}
    links["up"] = tmp_path
    for name, target in links.items():
        (root / name).symlink_to(target)
    (elsewhere / "back").symlink_to(root)
    others = ["a.py.gz", "a.csv", "b.CSV", "a.json", "README", "x.20240101", "bad.\udcff"]
    for name in others:
        (root / name).write_text("text")
    cfg = config(tmp_path, roots=(str(root),))
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted(MODULES[:9])
    dropped = {name: n for name, n in Rows(cfg.out, "train").meta["dropped"].items() if n}
    assert dropped == {".gz": 1, ".csv": 2, ".json": 1, "other": 3}
    said = capsys.readouterr().out
    assert all(f"{n} {name}" in said for name, n in dropped.items())
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "a.json").write_bytes(lines_of(MODULES[:4]))
    stops(r"no \.py, .* files below .*lists \(there: \.json\)", cfg, roots=(str(lists),))


CRYPTIC = "dictionary update|Expecting|0x8b|invalid start byte"
CUT_SHORT = gzip.compress(b'{"code": "x = 1"}\n' * 999, mtime=0)[:-20]
NO_TEXT = "has no text in a column code"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", "line 1, cannot be read .*unpack what is packed"),
        ("a.csv", b"code\nx = 1\n", "line 1, cannot be read .*no JSON object"),
        ("a.jsonl", b"[1, 2]", "line 1, cannot be read .*no JSON object"),
        ("a.jsonl", b'{"code": "x = 1"}\n\n"text"\n', "line 3, cannot be read .*no JSON object"),
        ("a.json", b'[\n {"code": "x = 1"},\n {"text": 2}\n]', f"line 3, {NO_TEXT}"),
        ("a.json", b'[\n {"code": "x = 1"},\n {"code": ', "line 3, cannot be read"),
        ("a.json", b'{\n "data": [{"code": "x = 1"}]\n}', f"line 1, {NO_TEXT}"),
        ("a.jsonl.gz", CUT_SHORT, "cannot be read"),
    ],
)
def test_what_holds_no_rows_is_named_with_its_line(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    cfg = config(tmp_path, roots=(str(tmp_path / name),), column="code")
    with pytest.raises(ValueError, match=rf"{name}, {said}|{name}, line \d+, {said}") as error:
        dp.main(cfg)
    assert not re.search(CRYPTIC, str(error.value))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_problems_to_decontaminate_from_are_read_in_any_form(tmp_path, name):
    words = "take the list of numbers and return those whose sum with both neighbours is even"
    row = {"task_id": 1, "prompt": f"{words}\u2028\x85\x0c\x1e {words}"}
    line = json.dumps(row, ensure_ascii=False).encode()
    forms = [line, b"\xef\xbb\xbf" + line + b"\r\n\n", b"\n" + line + b"\n" + line]
    forms += [json.dumps([row] * 2, indent=indent).encode() for indent in (None, 1, "\t")]
    forms += [b"\xef\xbb\xbf\n" + forms[-1], json.dumps({"prompt": None, "text": words}).encode()]
    for data in forms:
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        rows = cp.read_problems(path.read_bytes(), str(path))
        assert rows[0].get("prompt") in (row["prompt"], None)
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src/a.py").write_text(f"# {words}\nx = 1\n")
        (tmp_path / "src/b.py").write_text(MODULES[0])
        cfg = config(tmp_path, roots=(str(tmp_path / "src"),), benchmarks=(str(path),), heldout=0)
        shutil.rmtree(cfg.out, ignore_errors=True)
        dp.main(cfg)
        assert texts_of(cfg.out) == [MODULES[0]]
    for data in (forms[1][:-8], b'{"prompt": "x"}\n{"prompt": ', line + b"\n[1]"):
        with pytest.raises(ValueError, match="holds no problems"):
            cp.read_problems(data, "x")
