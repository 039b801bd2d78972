"""data_prep.py on made-up Python files: packing, reference values, round trips, killed runs."""

import dataclasses
import functools
import gzip
import itertools
import json
import keyword
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro
from test_sandbox import alive
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import NFC

import corpus as cp
import data_prep as dp
import prompts
import runs
from data_prep import pack, packed_blocks, pad_rows
from rows import Rows, open_data, token_bytes

ROOT = Path(__file__).resolve().parent.parent
QWEN = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data")) / "qwen2.5_tokenizer"
needs_qwen = pytest.mark.skipif(
    not QWEN.is_dir(), reason=f"no Qwen2.5 tokenizer in {QWEN}; set SHARED_DATA"
)
SPECIAL_TOKENS = "<pad> <bos> <eos> <mask> <unk>".split()
SPECIAL = 'TEXT = "<|endoftext|> and <|fim_prefix|> <|fim_middle|> <|im_start|>"\n'
ODD = {
    "bom.py": b"\xef\xbb\xbfx = 'a byte order mark'\n",
    "crlf.py": b"def g(a):\r\n\treturn a  # tab and CRLF\r\n",
    "unicode.py": "s = 'caf\u00e9, \u4e2d\u6587, \U0001f600, e\u0301, \u00a0'\n".encode(),
    "special.py": SPECIAL.encode(),
    "one.py": b"x=1",
}
FUNCTION = """def {}({a}, {b}={}):
    \"\"\"{c} of {a}.\"\"\"
    if {a} > {b}:
        {c} = {a} + {b} * 2
        return {c}
    return {a}
"""


def corpus(folder, count, seed=0):
    """`count` Python files of about 1.5 kB, none near another, in three folders."""
    rng, files = random.Random(seed), {}
    for number in range(count):
        words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(4, 9))) for _ in range(60)]
        functions = []
        for word in words[:10]:
            a, b, c = (f"{name}_" for name in rng.sample(words, 3))
            functions.append(FUNCTION.format(word + "_", rng.randint(0, 999), a=a, b=b, c=c))
        files[f"{'abc'[number % 3]}/m{number}.py"] = "\n".join(functions).encode()
    return save(folder, files)


def save(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return files


def config(tmp_path, kind=dp.Python, **changes):
    settings = {"out": str(tmp_path / "out"), "seq_len": 64, "heldout": 0.2, "workers": 1}
    settings["vocab_size"] = 400
    if kind is dp.Python:
        settings["roots"] = (str(tmp_path / "src"),)
    return kind(**settings | changes)


def text_config(tmp_path, source="stories.txt", **changes):
    return config(tmp_path, dp.Text, source=str(tmp_path / source), **changes)


def pair_config(tmp_path, **changes):
    settings = {"seq_len": 128, "eos_to": 16, "vocab_size": 300}
    source = {"source": str(tmp_path / "pairs.jsonl")}
    return config(tmp_path, dp.Pairs, **source | settings | changes)


def command(cfg):
    """The command line of a source."""
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    arguments = [values.pop("source")] if "source" in values else []
    for name, value in values.items():
        if not isinstance(value, tuple):
            arguments.append(f"--{name}={value}")
        elif value:
            arguments += [f"--{name}", *value]
    return [sys.executable, str(ROOT / "data_prep.py"), type(cfg).__name__.lower(), *arguments]


def start(cfg, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # ignored in background jobs
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen(command(cfg), start_new_session=True, **pipes, **options)


def wait(run, path):
    """Until the file is there. Fails if the run ends before."""
    while not path.exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.0005)


def refused(cfg):
    """The message of main()'s error, which the command line prints."""
    with pytest.raises((ValueError, OSError)) as error:
        dp.main(runs.check(cfg))
    assert "\n" not in str(error.value)
    return str(error.value)


def refuses(make_config, cases):
    """Each case, (settings, part of the message), is refused with that message."""
    for changes, part in cases:
        assert re.search(part, refused(make_config(**changes)))


def meta_of(out):
    return json.loads((Path(out) / "meta.json").read_text())


def rows_of(out, split):
    """Columns of all shards of a split, as arrays [rows, seq_len]."""
    meta = meta_of(out)
    tables = [pq.read_table(Path(out) / shard["file"]) for shard in meta["splits"][split]["shards"]]
    table = pa.concat_tables(tables).combine_chunks()
    columns = [table[name].chunk(0) for name in ("input_ids", "segments", "positions")]
    return [column.flatten().to_numpy().reshape(-1, meta["seq_len"]) for column in columns]


def ids_of(out, split):
    """The documents of a split, as id arrays without EOS."""
    tokens_RL, segments_RL, _ = rows_of(out, split)
    stream = tokens_RL[segments_RL > 0]
    ends = np.flatnonzero(stream == meta_of(out)["eos_id"]) + 1
    return [part[:-1] for part in np.split(stream, ends)[:-1]]


def texts_of(out, split):
    tokenizer = Tokenizer.from_file(str(Path(out) / "tokenizer.json"))
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in ids_of(out, split)]


def both(read, out):
    """What read(out, split) gives for both splits, sorted."""
    return sorted([*read(out, "train"), *read(out, "heldout")])


def holds(out, files, read=texts_of):
    """The rows of a folder decode to these files, {name: content}, and nothing else."""
    return [text.encode() for text in both(read, out)] == sorted(files.values())


def tree(out):
    """{path: content} of all that a run wrote."""
    paths = [path for path in Path(out).rglob("*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    """HumanEval and MBPP are only looked for where a test names them."""
    monkeypatch.setattr(cp, "BENCHMARKS", ())


@pytest.fixture(scope="module")
def python_run(tmp_path_factory):
    """(folder of packed rows of 75 Python files, {name: content} of these); read only."""
    folder = tmp_path_factory.mktemp("python")
    files = corpus(folder / "src", 70) | save(folder / "src", ODD)
    dp.main(config(folder, shard_bytes=20_000))
    return folder / "out", files


@pytest.mark.golden
def test_packing_equals_the_reference_values(golden_dir):
    for case in json.loads((golden_dir("pythoncoder") / "packing.json").read_text())["cases"]:
        rows = pack(case["docs"], case["seq_len"], case["eos"], case["pad"])
        for name, array_RL in zip(("tokens", "segments", "positions"), rows, strict=True):
            assert array_RL.dtype == np.int32
            assert array_RL.tolist() == [row[name] for row in case["rows"]]


def test_packing_equals_a_loop_over_tokens():
    assert [array_RL.shape for array_RL in pack([], 8, 1, 0)] == [(0, 8)] * 3
    rng = np.random.default_rng(0)
    for seq_len in (2, 3, 7, 16):
        documents = [rng.integers(2, 50, n) for n in rng.integers(0, 3 * seq_len, 40)]
        want, row = [], []
        for document in documents:
            segment, position = (row[-1][1] + 1 if row else 1), 0
            for token in [*document.tolist(), 1]:
                row.append((token, segment, position))
                position += 1
                if len(row) == seq_len:
                    want.append(row)
                    row, segment, position = [], 1, 0
        if row:
            want.append(row + [(0, 0, 0)] * (seq_len - len(row)))
        np.testing.assert_array_equal(np.stack(pack(documents, seq_len, 1, 0), axis=-1), want)


def test_packing_in_blocks_equals_packing_at_once(monkeypatch):
    rng = np.random.default_rng(1)
    documents = [rng.integers(2, 50, n).astype(np.int32) for n in rng.integers(0, 40, 200)]
    for block in (1, 10, 64, 65, 1000):
        monkeypatch.setattr("data_prep.BLOCK_TOKENS", block)
        blocks = list(packed_blocks(iter(documents), 16, 1))
        want = pack(documents, 16, 1, 1)
        for i in range(3):
            np.testing.assert_array_equal(np.concatenate([rows[i] for rows in blocks]), want[i])


def test_rows_decode_to_the_files_and_meta_describes_them(python_run):
    out, files = python_run
    meta = meta_of(out)
    texts = {split: texts_of(out, split) for split in ("train", "heldout")}
    assert holds(out, files)
    assert len(meta["splits"]["train"]["shards"]) > 3
    assert 5 < len(texts["heldout"]) < 30
    for split, total in meta["splits"].items():
        tokens_RL, segments_RL, positions_RL = rows_of(out, split)
        assert total["documents"] == len(texts[split])
        assert total["bytes"] == sum(len(text.encode()) for text in texts[split])
        assert total["tokens"] == (segments_RL > 0).sum()
        assert total["rows"] == len(tokens_RL) == sum(shard["rows"] for shard in total["shards"])
        assert (tokens_RL[segments_RL == 0] == meta["pad_id"]).all()
        assert positions_RL.max() < meta["seq_len"]
        for number, shard in enumerate(total["shards"]):
            assert shard["file"] == f"{split}/{number:05}.parquet"
            assert pq.read_metadata(out / shard["file"]).num_rows == shard["rows"]
            assert dp.sha256((out / shard["file"]).read_bytes()) == shard["sha256"]
            for field in pq.read_schema(out / shard["file"]):
                assert field.type == pa.list_(pa.int32(), 64)
    names = "format source seq_len vocab_size vocab_padded".split()
    assert [meta[name] for name in names] == [1, "python", 64, 400, 512]
    assert meta["eos_id"] == meta["pad_id"] == 0
    assert meta["fim"] == {"prefix": 1, "middle": 2, "suffix": 3}
    assert meta["tokenizer_sha256"] == dp.sha256((out / "tokenizer.json").read_bytes())
    assert not (out / "progress.json").exists()
    assert not any(meta["dropped"].values())


def test_special_tokens_in_a_file_are_plain_text(python_run):
    out, _ = python_run
    vocabulary = dp.load_vocabulary((out / "tokenizer.json").read_bytes(), dp.Python())
    ids = vocabulary.encoder.encode_batch_fast([SPECIAL], add_special_tokens=False)[0].ids
    assert min(ids) > 4
    assert vocabulary.encoder.decode(ids) == SPECIAL


def test_trained_tokenizer_is_lossless_and_splits_digits(python_run):
    tokenizer = Tokenizer.from_file(str(python_run[0] / "tokenizer.json"))
    rng = random.Random(0)
    unicode = ["".join(map(chr, rng.sample(range(0xD000), 50))) for _ in range(20)]
    for text in ["", " ", "\r\n\t  x\n\n\n", "12345", *unicode]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("12345").tokens == list("12345")
    # seven spaces of indentation, the eighth goes with the word
    assert "\u0120" * 7 in tokenizer.get_vocab()


def test_each_reason_to_drop_is_counted(tmp_path):
    lines = "".join(f"value_{i} = {i}\n" for i in range(400))
    bad = {
        "huge": {"huge.py": lines.encode() * 40},
        "non_utf8": {"latin.py": "# -*- coding: latin-1 -*-\ns = 'é'\n".encode("latin-1")},
        "empty": {"empty.py": b"", "blank.py": b"\n \n"},
        "generated": {
            "pb2.py": b"# Generated by the protocol buffer compiler.  DO NOT EDIT!\nx = 1\n",
            "migration.py": b"# Generated by Django 4.2\nx = 2\n",
            "at.py": b"# @generated\nx = 3\n",
            "auto.py": b'"""This module was automatically generated."""\nx = 4\n',
        },
        "minified": {
            "long.py": ("data = '" + "abc " * 300 + "'\n" + "x = 5\n" * 100).encode(),
            "wide.py": b"".join(b"y%d = '%s'\n" % (i, b"w" * 110) for i in range(9)),
            "signs.py": b"x = [" + b"-(-(+1)),\n" * 50 + b"]\n",
        },
        "json": {
            "list.py": json.dumps([{"content": "x = 1"}] * 9, indent=1).encode(),
            "object.py": b'\xef\xbb\xbf\n{\n "data": ["x = 1"]\n}\n',
            "lines.py": b'{"content": "x = 1"}\n' * 3,
            "texts.py": b'[\n "x = 1",\n "y = 2"\n]\n',
            "nested.py": b'[\n ["x = 1", 1],\n ["y = 2", 2]\n]\n',
        },
        "unparsable": {
            "two.py": b"print 'Python 2'\n",
            "nul.py": b"x = 1\x00\n",
            "deep.py": b"x = (\n" + b"not\n" * 20_000 + b"abcd)\n",
        },
    }
    for files in bad.values():
        save(tmp_path / "src", files)
    fine = b'"""Walk over trees, which can be generated by passing a flag."""\nfrom x import y, z\n'
    # a dictionary and a list of Python, and code after a list
    code = {"fine.py": fine, "code.py": b'["b", "a"].sort()\n'}
    code["odoo.py"] = b'{"name": "Sales", "installable": True}\n'
    kept = corpus(tmp_path / "src", 4) | save(tmp_path / "src", code)
    first = kept["a/m0.py"]
    copies = {"z/copy.py": first, "z/copy2.py": first, "z/near.py": first + b"END = True\n"}
    save(tmp_path / "src", copies)
    (tmp_path / "src" / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(tmp_path / "src" / "pipe.py")
    (tmp_path / "src" / "folder.py").mkdir()
    (tmp_path / "src" / "notes.txt").write_text("not Python")
    dp.main(config(tmp_path, max_bytes=100_000))
    want = {reason: len(files) for reason, files in bad.items()}
    want |= {"unreadable": 2, "exact_duplicate": 2, "near_duplicate": 1, ".txt": 1}
    assert meta_of(tmp_path / "out")["dropped"] == want
    assert holds(tmp_path / "out", kept)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_of_a_column_pass_the_filters_of_files_and_decode(tmp_path, workers):
    texts, rows = [data.decode() for data in corpus(tmp_path / "x", 40).values()], tmp_path / "rows"
    bad = ["print 'Python 2'\n", "", None, "# @generated\nx = 3\n", "\ud800 = 1\n", texts[0]]
    bad.append(texts[1] + "END = True\n")
    rows.mkdir()
    table = pa.table({"code": texts[:20], "stars": list(range(20))})
    pq.write_table(table, rows / "a.parquet")
    (rows / "b.jsonl").write_text("\n\n".join(json.dumps({"code": t}) for t in texts[20:] + bad))
    settings = {"column": "code", "workers": workers, "shard_bytes": 20_000}
    cfg = config(tmp_path, roots=(str(rows),), **settings)
    dp.main(cfg)
    assert both(texts_of, cfg.out) == sorted(texts)
    reasons = ("unparsable", "generated", "non_utf8", "exact_duplicate", "near_duplicate")
    dropped = {reason: count for reason, count in meta_of(cfg.out)["dropped"].items() if count}
    assert dropped == dict.fromkeys(reasons, 1) | {"empty": 2}
    assert not (tmp_path / "out" / ".rows").exists()
    before = tree(cfg.out)
    # goes on, though the copies of the rows are gone
    (tmp_path / "out" / "train" / "00000.parquet").unlink()
    dp.main(cfg)
    assert tree(cfg.out) == before


def test_a_column_that_is_not_there_is_one_line(tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    cfg = config(tmp_path, roots=(str(rows),), column="content")
    for each in (cfg, dataclasses.replace(cfg, roots=())):
        assert "no .parquet, .jsonl, .ndjson, .jsonl.gz, .ndjson.gz files below" in refused(each)
    form = " has no text in a column content (it has {}; name"
    of_text, of_number = form.format("text 'x = 1'"), form.format("content 1")
    for columns, said in (({"text": ["x = 1"]}, of_text), ({"content": [1]}, of_number)):
        pq.write_table(pa.table(columns), rows / "a.parquet")
        assert f"a.parquet{said}" in refused(cfg)
    (rows / "a.parquet").write_bytes(b"PAR1")
    assert "a.parquet cannot be read (" in refused(cfg)
    (rows / "a.parquet").unlink()
    cases = [('{"text": "x = 1"}', of_text), ('{"content": 1}', of_number)]
    unread = "[1]", "x = 1", '{"content": ' + "[" * 9999, '"text"'
    said = " cannot be read (no JSON object in UTF-8; unpack what is packed)"
    for line, part in (*cases, *((line, said) for line in unread)):
        (rows / "b.jsonl").write_text(f'{{"content": "x = 1"}}\n{line}\n')
        assert f"b.jsonl, line 2,{part}" in refused(cfg)


def test_documents_that_hold_problems_of_benchmarks_are_dropped_and_counted(tmp_path, capsys):
    words = "the list of numbers and return those whose sum with their two neighbours is even"
    prompt = f'def f(x):\n    """Take {words}."""\n'
    code = "def g(a, b, c, d, e):\n    h = min(a, b)\n    return max(c, d, e, h)\n"
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": prompt, "canonical_solution": "    return x\n"}) + "\n")
    (tmp_path / "mbpp.json").write_text(json.dumps([{"text": "Write a function.", "code": code}]))
    nine = " ".join(words.split()[:9])  # one word less than counts
    fine = {"fine.py": f"# {nine}, 1 2 3 4 5 6 7 8 9 10 11 12\ny = 2\n".encode()}
    kept = corpus(tmp_path / "src", 10) | save(tmp_path / "src", fine)
    bad = {"h.py": f"# {words}\nz = 3\n".encode(), "m.py": f"q = 1\n{code}".encode()}
    save(tmp_path / "src", bad)
    benchmarks = (str(tmp_path / "HumanEval.jsonl.gz"), str(tmp_path / "mbpp.json"))
    dp.main(config(tmp_path, benchmarks=benchmarks))
    assert "left out: 2 benchmark\n" in capsys.readouterr().out
    assert holds(tmp_path / "out", kept)
    assert ", now unset)" in refused(config(tmp_path))
    for data in (b"{}", b"text", b"[1]", b"\xff", b""):
        (tmp_path / "mbpp.json").write_bytes(data)
        cfg = config(tmp_path, benchmarks=benchmarks, out=str(tmp_path / "new"))
        assert "mbpp.json holds no problems; HumanEval.jsonl.gz and" in refused(cfg)


def test_minhash_estimates_the_jaccard_index():
    rng = random.Random(0)
    words = [f"w{i}" for i in range(3000)]
    for changes in (0, 20, 60, 200):
        other = list(words)
        for i in rng.sample(range(3000), changes):
            other[i] = "changed"
        runs = [{tuple(text[i : i + 5]) for i in range(2996)} for text in (words, other)]
        index = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
        a_P, b_P = (cp.signature(" ".join(text).encode()) for text in (words, other))
        assert abs((a_P == b_P).mean() - index) < 0.12  # three standard errors of 128 draws at .3


def test_near_duplicates_keep_the_first_and_only_drop_what_is_near():
    rng = np.random.default_rng(0)
    signature_NP = rng.integers(0, 1 << 16, (50, 128)).astype(np.uint16)
    signature_NP[[30, 40, 20]] = signature_NP[[10, 10, 7]]
    signature_NP[30, :12] += 1  # .906
    signature_NP[40, 40:52] += 1
    signature_NP[20, :40] += 1  # .69
    assert np.flatnonzero(cp.near_duplicates(signature_NP)).tolist() == [30, 40]
    assert cp.near_duplicates(signature_NP[:0]).tolist() == []


def test_split_is_by_file_disjoint_and_independent_of_what_else_is_there(tmp_path):
    def names(folder, **changes):
        cfg = config(tmp_path, roots=(str(folder),), heldout=0.3, **changes)
        groups, _ = dp.gather(dp.find(cfg)[0], cfg)
        return {split: {item.name for group in groups[split] for item in group} for split in groups}

    files = corpus(tmp_path / "src", 40)
    save(tmp_path / "other", dict(reversed(files.items())))
    corpus(tmp_path / "other" / "more", 20, seed=5)
    a, b = names(tmp_path / "src"), names(tmp_path / "other")
    assert not a["train"] & a["heldout"]
    assert a["train"] | a["heldout"] == set(files)
    assert 5 < len(a["heldout"]) < 20
    assert a["heldout"] == b["heldout"] & set(files)
    assert a["heldout"] != names(tmp_path / "src", seed=1)["heldout"]


@pytest.mark.slow
def test_many_workers_give_the_bytes_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(cp, "EXAMINED_BYTES", 20_000)
    corpus(tmp_path / "src", 40)
    dp.main(config(tmp_path, workers=1))
    dp.main(config(tmp_path, workers=2, out=str(tmp_path / "out2")))
    assert tree(tmp_path / "out") == tree(tmp_path / "out2")


def test_fim_pieces_make_up_the_text_and_stay_out_of_the_heldout(tmp_path):
    files = corpus(tmp_path / "src", 60) | save(tmp_path / "src", ODD)
    dp.main(config(tmp_path, fim_rate=0.5))
    out, fim = tmp_path / "out", meta_of(tmp_path / "out")["fim"]
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    cut, texts = 0, []
    for ids in map(np.ndarray.tolist, ids_of(out, "train")):
        if fim["prefix"] in ids:
            at = [ids.index(fim[part]) for part in ("prefix", "suffix", "middle")]
            assert at[0] == 0
            assert at == sorted(at)
            prefix, suffix, middle = ids[1 : at[1]], ids[at[1] + 1 : at[2]], ids[at[2] + 1 :]
            ids, cut = prefix + middle + suffix, cut + 1
        assert not set(ids) & set(fim.values())
        texts.append(tokenizer.decode(ids, skip_special_tokens=False).encode() if ids else b"")
    heldout = [text.encode() for text in texts_of(out, "heldout")]
    # a cut inside a character's bytes: none
    whole = [text for text in texts + heldout if b"\xef\xbf\xbd" not in text]
    assert sorted(whole) == sorted(files.values())
    assert 0.25 < cut / len(texts) < 0.75
    assert not {*fim.values()} & {*np.concatenate(ids_of(out, "heldout")).tolist()}


def test_fim_cut_is_prefix_suffix_middle_or_the_suffix_first(monkeypatch):
    first = 0
    for seed in range(200):
        cfg = dp.Python(fim_rate=1.0, seed=seed)
        drawn = cp.cut_for_fim(SPECIAL, cfg)
        with monkeypatch.context() as patch:
            patch.setattr(cp, "SPM_RATE", 0.0)
            prefix, suffix, middle = cp.cut_for_fim(SPECIAL, cfg)
            assert prefix + middle + suffix == SPECIAL
            patch.setattr(cp, "SPM_RATE", 1.0)
            assert cp.cut_for_fim(SPECIAL, cfg) == ("", suffix, prefix + middle)
        first += drawn == ("", suffix, prefix + middle)
    assert 70 < first < 130
    assert cp.cut_for_fim(SPECIAL, dp.Python()) == (SPECIAL,)


@needs_qwen
def test_qwen_tokenizer_gives_its_ids_and_padded_vocabulary(tmp_path, monkeypatch):
    # takes a second
    monkeypatch.setattr(dp, "load_vocabulary", functools.lru_cache(dp.load_vocabulary))
    corpus(tmp_path / "src", 8)
    save(tmp_path / "src", ODD)
    cfg = config(tmp_path, tokenizer=str(QWEN / "tokenizer.json"), fim_rate=1.0, heldout=0.5)
    dp.main(cfg)
    meta = meta_of(tmp_path / "out")
    assert (meta["vocab_size"], meta["vocab_padded"], meta["eos_id"]) == (151_665, 151_808, 151_643)
    assert meta["fim"] == {"prefix": 151_659, "middle": 151_660, "suffix": 151_661}
    data = (QWEN / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == data
    assert all(ids[0] == 151_659 for ids in ids_of(tmp_path / "out", "train"))
    vocabulary = dp.load_vocabulary(data, cfg)

    def encode(text):
        return vocabulary.encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    pairs = json.loads((QWEN / "golden_ids.json").read_text())
    pairs = [pair for pair in pairs if "<|" not in pair["text"]]
    assert len(pairs) > 30
    for pair in pairs:
        assert encode(pair["text"]) == pair["ids"]
    ids = encode(SPECIAL)
    assert max(ids) < 151_643
    assert vocabulary.encoder.decode(ids) == SPECIAL


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dp.Python, dp.Text])
def test_killed_at_any_moment_the_next_run_ends_with_the_same_bytes(tmp_path, kind):
    corpus(tmp_path / "src", 150)
    write_stories(tmp_path / "stories.txt", stories(800))
    make_config = config if kind is dp.Python else text_config
    cfg = make_config(tmp_path, shard_bytes=15_000)
    dp.main(dataclasses.replace(cfg, out=str(tmp_path / "whole")))
    printed = []
    for moment in ("progress.json", "train/00000.parquet", "heldout"):
        run = start(cfg)
        wait(run, tmp_path / "out" / moment)
        os.killpg(run.pid, signal.SIGKILL)
        printed.append(run.communicate()[0])
    dp.main(cfg)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert any("is not complete, writing what is missing" in text for text in printed)


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    corpus(tmp_path / "src", 2000)
    run = start(config(tmp_path, workers=2))
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    if not children.exists():
        run.kill()
        pytest.skip("no /proc/<pid>/children here")
    while len(workers := children.read_text().split()) < 2:
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    time.sleep(0.5)
    run.kill()
    # nor do they complain; multiprocessing's tracker of semaphores does, once
    assert "Traceback" not in run.communicate()[1]
    deadline = time.time() + 5
    while any(map(alive, workers)):
        assert time.time() < deadline, "workers outlive their parent"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "moment", [".lock", pytest.param("train/00003.parquet", marks=pytest.mark.slow)]
)
def test_ctrl_c_exits_130_with_one_line_and_the_next_run_goes_on(tmp_path, moment):
    corpus(tmp_path / "src", 200)
    cfg = config(tmp_path, shard_bytes=6_000, workers=2)
    run = start(cfg)
    wait(run, tmp_path / "out" / moment)
    time.sleep(0.2 * (moment == ".lock"))  # while the files are read
    os.killpg(run.pid, signal.SIGINT)
    err = run.communicate()[1]
    assert (run.returncode, err) == (130, "stopped; the same command goes on from here\n")
    assert not list((tmp_path / "out").rglob("*.tmp"))
    dp.main(cfg)
    assert meta_of(tmp_path / "out")["splits"]["train"]["documents"] > 120


def test_a_folder_is_left_alone_or_mended_or_started_over(tmp_path, capsys):
    corpus(tmp_path / "src", 20)
    cfg, out = config(tmp_path, shard_bytes=7_000), tmp_path / "out"
    dp.main(cfg)
    before = tree(out)
    dp.main(cfg)
    assert "complete, nothing to do" in capsys.readouterr().out
    assert tree(out) == before
    (out / "train" / "00001.parquet").unlink()  # lost
    dp.main(cfg)
    assert tree(out) == before
    (out / "meta.json").rename(out / "progress.json")  # cut short by a power failure
    (out / "train" / "00001.parquet").write_bytes(before["train/00001.parquet"][:-50])
    dp.main(cfg)
    assert tree(out) == before
    # a run that was stopped, and a file more than it had
    (out / "meta.json").rename(out / "progress.json")
    save(tmp_path / "src", {"new.py": b"def new(a, b):\n    return a\n"})
    dp.main(cfg)
    assert "is not complete, writing what is missing" in capsys.readouterr().out
    dp.main(dataclasses.replace(cfg, out=str(tmp_path / "whole")))
    assert tree(out) == tree(tmp_path / "whole")


def test_a_second_run_compares_the_content_of_the_files_and_nothing_else(
    tmp_path, monkeypatch, capsys
):
    corpus(tmp_path / "src", 20)
    write_stories(tmp_path / "stories.txt", stories(60))
    write_pairs(tmp_path / "pairs.jsonl", 60)
    configs = {"src/a/m0.py": config, "stories.txt": text_config, "pairs.jsonl": pair_config}
    for number, (name, make_config) in enumerate(configs.items()):
        cfg = make_config(tmp_path, out=str(tmp_path / f"out{number}"))
        dp.main(cfg)
        before = tree(cfg.out)
        (Path(cfg.out) / ".rows").mkdir()  # as of a run that was killed in its last second
        with monkeypatch.context() as patch:
            patch.setattr(dp, "gather", None)  # nobody examines anything
            os.utime(tmp_path / name, (1, 1))
            capsys.readouterr()
            dp.main(cfg)
            assert capsys.readouterr().out == f"{cfg.out} is complete, nothing to do\n"
        assert not (Path(cfg.out) / ".rows").exists()
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        assert "holds data of other files, or these have changed" in refused(cfg)
        assert tree(cfg.out) == before


def test_folder_of_another_run_or_other_settings_files_or_owners_is_refused_untouched(tmp_path):
    corpus(tmp_path / "src", 20)
    (tmp_path / "out").mkdir()
    with runs.lock(tmp_path / "out" / ".lock"):
        assert "another process is writing" in refused(config(tmp_path))
    dp.main(config(tmp_path))
    before = tree(tmp_path / "out")
    message = refused(config(tmp_path, seq_len=128, seed=3))
    assert "other settings (seq_len 64, now 128; seed 0, now 3)" in message
    message = refused(config(tmp_path, rows="padded"))
    assert "other settings (rows unset, now padded)" in message
    corpus(tmp_path / "src" / "more", 3, seed=9)
    assert "other files" in refused(config(tmp_path))
    assert tree(tmp_path / "out") == before
    for name, part in (("tokenizer.json", "somebody else"), ("meta.json", "is damaged")):
        save(tmp_path / f"of {name}", {name: b"{"})
        assert part in refused(config(tmp_path, out=str(tmp_path / f"of {name}")))
        assert tree(tmp_path / f"of {name}") == {name: b"{"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dp.Python, dp.Text])
def test_full_disk_gives_one_line_and_leaves_nothing_that_looks_complete(tmp_path, kind):
    if kind is dp.Python:  # the copy of its texts takes 100 kB
        corpus(tmp_path / "src", 70)
        cfg, left = config(tmp_path, shard_bytes=60_000), []
    else:  # the tokenizer takes 13 kB, a shard 40 kB
        write_stories(tmp_path / "stories.txt", stories(800))
        cfg, left = text_config(tmp_path, shard_bytes=100_000), ["progress.json", "tokenizer.json"]
    limit = 20_000  # bytes per file

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    run = start(cfg, preexec_fn=small_disk)
    err = run.communicate()[1]
    assert run.returncode == 1
    said = rf"{tmp_path}/out[^\s]*: File too large; [^\n]+ the same command to go on\n"
    assert re.fullmatch(said, err)
    assert sorted(tree(tmp_path / "out")) == left
    dp.main(cfg)
    dp.main(dataclasses.replace(cfg, out=str(tmp_path / "whole")))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


BAD_INPUT = r"""
roots | nowhere | nowhere: No such file .*run the same command
roots | none | no .py, .parquet, .jsonl, .* files below .* \(there: .txt\); name other folders
roots | bad | no document to train on \(left out: .*1 unparsable.*name more
roots | one | no document to train on
tokenizer | nowhere.json | nowhere.json cannot be read \(.*No such file
tokenizer | broken.json | broken.json cannot be read \(
tokenizer | src/a/m0.py | m0.py cannot be read \(
tokenizer | no_end.json | no token <\|endoftext\|>; .*--eos
tokenizer | no_fim.json | no token <\|fim_middle\|>; .*--fim_rate=0
out | file | File exists: .*file
"""


def test_bad_input_is_one_line_that_says_what_to_do(python_run, tmp_path):
    corpus(tmp_path / "src", 5)
    save(tmp_path / "none", {"notes.txt": b"no Python here"})
    save(tmp_path / "bad", {"a.py": b"print 1", "b.py": b""})
    save(tmp_path / "one", {"a.py": b"print(1)"})
    save(tmp_path, {"broken.json": b"{}", "file": b"", "a.parquet": b""})
    tokenizer = json.loads((python_run[0] / "tokenizer.json").read_text())
    for name in ("<|endoftext|>", "<|fim_middle|>"):
        tokens = [token for token in tokenizer["added_tokens"] if token["content"] != name]
        vocab = {token: id for token, id in tokenizer["model"]["vocab"].items() if token != name}
        part = tokenizer | {"added_tokens": tokens, "model": tokenizer["model"] | {"vocab": vocab}}
        (tmp_path / f"no_{name[2:5]}.json").write_text(json.dumps(part))
    cases = [
        ({"seq_len": 1}, "--seq_len=1: at least 2"),
        ({"heldout": 1.0}, "no document to train on .*lower --heldout"),
        ({"fim_rate": 1.5}, "--fim_rate=1.5.* 0 .. 1"),
        ({"vocab_size": 100}, "--vocab_size=100.* 261"),
        ({"fim_rate": 0.5, "rows": "padded"}, "--fim_rate goes with --rows=packed"),
    ]
    for line in BAD_INPUT.strip().splitlines():
        flag, name, part = line.split(" | ")
        path = str(tmp_path / name)
        changes = {flag: (path,) if flag == "roots" else path}
        if "fim_rate" in part:
            changes["fim_rate"] = 0.5
        cases.append((changes, part))
    refuses(functools.partial(config, tmp_path), cases)
    dp.main(config(tmp_path, tokenizer=str(tmp_path / "no_fim.json")))
    assert meta_of(tmp_path / "out")["fim"] is None


def test_each_source_is_a_subcommand_and_none_of_them_is_the_standard_library():
    def parse(*arguments):
        return tyro.cli(dp.Config, args=arguments, config=(tyro.conf.OmitArgPrefixes,)).source

    assert parse() == parse("python") == dp.Python()
    two = dp.Python(roots=("a", "b"), fim_rate=0.5)
    assert parse("python", "--roots", "a", "b", "--fim_rate=0.5") == two
    assert parse("text", "a.txt", "--rows=packed") == dp.Text(source="a.txt", rows="packed")
    assert parse("tinystories", "--out=x") == dp.TinyStories(out="x")
    assert parse("pairs", "a.jsonl", "--eos_to=64") == dp.Pairs(source="a.jsonl", eos_to=64)
    assert parse("acecode", "--roots", "a", "--out=t") == dp.AceCode(roots=("a",), out="t")
    for wrong in (("text",), ("text", "a", "--eos_to=2"), ("pairs", "a", "--rows=padded")):
        with pytest.raises(SystemExit):
            parse(*wrong)


MEASURE = """
import resource, sys
import data_prep
data_prep.main(data_prep.Python(out=sys.argv[2], roots=(sys.argv[1],), heldout=0.02))
who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
kib = [resource.getrusage(each).ru_maxrss for each in who]
print(sum(kib) / 1024)
"""


@pytest.mark.slow  # 4 minutes on 2 cores
def test_memory_does_not_grow_with_the_text(tmp_path):
    library, word = Path(sysconfig.get_paths()["stdlib"]), re.compile(rb"\b[a-z_]{4,}\b")
    skipped = {"site-packages", "test"}
    paths = sorted(
        p for p in library.rglob("*.py") if not skipped & {*p.relative_to(library).parts}
    )
    hard = {name.encode() for name in keyword.kwlist}
    peaks = []
    for megabytes in (20, 200):
        source, size, copy = tmp_path / f"src{megabytes}", 0, 0
        while size < megabytes * 1e6:  # the library over and over, each time with other names
            for number, path in enumerate(paths):
                rename = lambda m, n=copy: m[0] if m[0] in hard or not n else b"%s_%d" % (m[0], n)  # noqa: E731
                data = word.sub(rename, path.read_bytes())
                if size < megabytes * 1e6:
                    save(source, {f"{copy}/{number}.py": data})
                    size += len(data)
            copy += 1
        run = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / f"out{megabytes}")]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
        splits = meta_of(tmp_path / f"out{megabytes}")["splits"]
        assert sum(split["bytes"] for split in splits.values()) > 0.6 * size
        peaks.append(float(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 300, f"peak MiB of 20 and 200 MB: {peaks}"


# ---- text sources and padded rows

STORIES = QWEN.parent / "tinystories_sample.txt"


def stories(count, seed=0, low=3, high=60):
    """`count` different documents of made-up words, of `low` to `high` words each."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(300)]
    line = ["Caf\u00e9 {}.", "{}, she said;", "\u201c{}!\u201d\n", "\U0001f600 {}\n\n  And"]
    texts = []
    for number in range(count):
        chosen = rng.choices(words, k=rng.randint(low, high))
        text = " ".join(rng.choice(line).format(word) for word in chosen)
        texts.append(f"{text} The end of {number}.")
    return texts


def write_stories(path, texts, last="\n<|endoftext|>\n"):
    path.write_text("\n<|endoftext|>\n".join(texts) + last, encoding="utf-8", newline="")
    return texts


def padded_texts(out, split):
    """The documents of padded rows, decoded; BOS, EOS, PAD, segments and positions are checked."""
    tokens_RL, segments_RL, positions_RL = rows_of(out, split)
    used_RL, column_L = segments_RL == 1, np.arange(tokens_RL.shape[1])
    assert ((tokens_RL == 0) == ~used_RL).all()
    assert (segments_RL[~used_RL] == 0).all()
    np.testing.assert_array_equal(used_RL, column_L < used_RL.sum(1, keepdims=True))
    np.testing.assert_array_equal(positions_RL, np.where(used_RL, column_L, 0))
    assert not ((tokens_RL == 1) & (column_L > 0)).any()
    stream = tokens_RL[used_RL]
    documents = np.split(stream, np.flatnonzero(stream == 2) + 1)[:-1]
    # a row without EOS is full and goes on in the next one
    ended_R = (tokens_RL == 2).any(1)
    np.testing.assert_array_equal(np.append(tokens_RL[1:, 0], 1) == 1, ended_R)
    assert (ended_R | (tokens_RL[:, -1] != 0)).all()
    tokenizer = Tokenizer.from_file(str(Path(out) / "tokenizer.json"))
    for ids in documents:
        assert (ids[0], ids[-1]) == (1, 2)
        assert ids[1:-1].min() > 4
    return [tokenizer.decode(ids[1:-1], skip_special_tokens=False) for ids in documents]


def test_padded_rows_equal_a_loop_over_documents():
    rng, special = np.random.default_rng(0), {"pad": 9, "bos": 7, "eos": 8}
    for seq_len in (2, 3, 8, 17):
        documents = [rng.integers(20, 50, n) for n in rng.integers(1, 3 * seq_len, 40)]
        tokens, segments, positions = [], [], []
        for document in documents:
            rest = [7, *document.tolist(), 8]
            while rest:
                row, rest = rest[:seq_len], rest[seq_len:]
                empty = [0] * (seq_len - len(row))
                tokens.append(row + [9] * len(empty))
                segments.append([1] * len(row) + empty)
                positions.append([*range(len(row)), *empty])
        rows = pad_rows(documents, seq_len, special)
        for got_RL, want in zip(rows, (tokens, segments, positions), strict=True):
            assert got_RL.dtype == np.int32
            assert got_RL.tolist() == want


ROLES = "pad_id bos_id eos_id mask_id unk_id".split()


@pytest.mark.parametrize("last", ["", "\n<|endoftext|>\n", "<|endoftext|>"])
def test_text_file_is_split_at_separators_and_padded_rows_decode_to_the_documents(
    tmp_path, monkeypatch, last
):
    texts = stories(150)
    texts[7] = "<pad> <bos> <mask>\u00a0<eos> <unk> <|fim_prefix|> are plain text <|endoftext"
    monkeypatch.setattr(dp, "BLOCK_TOKENS", 2000)
    write_stories(tmp_path / "stories.txt", [*texts, "", " \r\n "], last)
    dp.main(text_config(tmp_path, shard_bytes=10_000))
    out, meta = tmp_path / "out", meta_of(tmp_path / "out")
    got = {split: padded_texts(out, split) for split in ("train", "heldout")}
    assert sorted(got["train"] + got["heldout"]) == sorted(texts)
    assert 15 < len(got["heldout"]) < 45
    assert [text for text in texts if text in {*got["train"]}] == got["train"]
    assert len(meta["splits"]["train"]["shards"]) > 3
    for split, total in meta["splits"].items():
        tokens_RL, segments_RL, _ = rows_of(out, split)
        assert total["documents"] == len(got[split])
        assert total["bytes"] == sum(len(text.encode()) for text in got[split])
        assert (total["tokens"], total["rows"]) == (segments_RL.sum(), len(tokens_RL))
    assert [meta[name] for name in ROLES] == [0, 1, 2, 3, 4]
    names = "source seq_len vocab_size vocab_padded".split()
    assert [meta[name] for name in names] == ["text", 64, 400, 512]
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert [tokenizer.id_to_token(id) for id in range(5)] == SPECIAL_TOKENS
    assert tokenizer.get_vocab_size() == 400


def test_defaults_are_padded_rows_of_256_for_text_and_packed_rows_of_2048_for_python(tmp_path):
    write_stories(tmp_path / "stories.txt", stories(60))
    corpus(tmp_path / "src", 5)
    dp.main(dp.Text(source=str(tmp_path / "stories.txt"), out=str(tmp_path / "a"), vocab_size=300))
    dp.main(dp.Python(roots=(str(tmp_path / "src"),), out=str(tmp_path / "b"), vocab_size=300))
    a, b = meta_of(tmp_path / "a"), meta_of(tmp_path / "b")
    assert (a["seq_len"], a["bos_id"], a["settings"]["rows"]) == (256, 1, "padded")
    assert (b["seq_len"], b["eos_id"], "bos_id" in b) == (2048, 0, False)
    padded_texts(tmp_path / "a", "train")


def test_python_source_with_padded_rows_and_text_with_packed_rows(tmp_path):
    files = corpus(tmp_path / "src", 30) | save(tmp_path / "src", ODD)
    dp.main(config(tmp_path, rows="padded"))
    assert holds(tmp_path / "out", files, padded_texts)
    want = write_stories(tmp_path / "stories.txt", stories(100))
    dp.main(text_config(tmp_path, rows="packed", out=str(tmp_path / "packed")))
    assert both(texts_of, tmp_path / "packed") == sorted(want)
    assert meta_of(tmp_path / "packed")["fim"] == {"prefix": 1, "middle": 2, "suffix": 3}


def test_folder_gives_a_document_per_file_and_leaves_out_what_is_no_text(tmp_path):
    texts, source = stories(40), tmp_path / "src"
    whole = {}
    for i in range(30):
        whole[f"{'ab'[i % 2]}/{i}{'.txt .py .md .text'.split()[i % 4]}"] = f"  {texts[i]}\r\n"
    save(source, {name: text.encode() for name, text in whole.items()})
    write_stories(source / "more.txt", texts[30:])
    binary = {"utf16.txt": "\ufeffx".encode("utf-16"), "cut.txt": b"caf\xc3", "nul.md": b"a\0b"}
    empty = {"empty.py": b"", "blank.txt": b" \n<|endoftext|>\n", "photo.jpg": b"no text"}
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    listed = json.dumps([{"text": text} for text in texts], indent=2).encode()
    save(source, binary | empty | {"rows.txt": rows, "list.md": listed, "rows.jsonl": rows})
    os.mkfifo(source / "pipe.txt")
    (source / "gone.txt").symlink_to("nowhere")
    cfg = text_config(tmp_path, "src", out=str(source / "out"), shard_bytes=5_000)
    dp.main(cfg)
    assert both(padded_texts, cfg.out) == sorted([*whole.values(), *texts[30:]])
    dropped = {"unreadable": 2, "binary": 3, "empty": 2, "json": 2, ".jpg": 1, ".jsonl": 1}
    assert meta_of(cfg.out)["dropped"] == dropped
    before = tree(cfg.out)
    dp.main(cfg)
    assert tree(cfg.out) == before


def test_heldout_is_drawn_by_seed_and_content_alone(tmp_path):
    def heldout(name, texts, **changes):
        write_stories(tmp_path / f"{name}.txt", texts)
        dp.main(text_config(tmp_path, f"{name}.txt", out=str(tmp_path / name), **changes))
        train, held = ({*padded_texts(tmp_path / name, split)} for split in ("train", "heldout"))
        assert not train & held
        return held

    texts = stories(150)
    first = heldout("first", texts)
    more = [*stories(50, seed=8), *reversed(texts)]
    assert heldout("other", more, shard_bytes=3_000) & {*texts} == first
    assert heldout("seeded", texts, seed=1) != first


def test_ranges_end_with_documents_and_long_documents_are_split_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(cp, "LONG_BYTES", 3_000)

    def ranges(data, limit=1_000):
        (tmp_path / "x.txt").write_bytes(data)
        items = cp.text_ranges(cp.Item("x.txt", str(tmp_path / "x.txt"), "", 0), limit)
        parts = [data[item.start : item.start + item.size] for item in items]
        assert [dp.sha256(part) for part in parts] == [item.sha256 for item in items]
        return parts

    data = "<|endoftext|>".join(stories(100)).encode()
    parts = ranges(data)
    assert b"".join(parts) == data
    assert all(part.endswith(b"<|endoftext|>") for part in parts[:-1])
    assert min(map(len, parts[:-1])) >= 1_000
    lines = "".join(f"line {i} of caf\u00e9\n" for i in range(200_000)).encode()  # several blocks
    parts = ranges(lines)
    assert b"".join(parts) == lines
    assert len(parts) > 1
    assert all(part.endswith(b"\n") for part in parts)
    unbroken = ("\u4e2d" * 500_000).encode()
    for data in (unbroken, b"a<|endoftext|>\n" + unbroken):
        parts = [part.decode() for part in ranges(data)]
        assert "".join(parts) == data.decode()
        assert len(parts) > 1
    # nor is a short document before a long one cut, or a separator at the end of what was read
    long = b"a" * (4 * 2**20 - 7)
    for data in (b"one\ntwo<|endoftext|>" + long + long, long + b"<|endoftext|>next"):
        parts = ranges(data)
        assert b"".join(parts) == data
        assert sum(part.count(b"<|endoftext|>") for part in parts) == 1
        assert not any(part.endswith(b"one\n") for part in parts)


def test_bad_text_input_is_one_line_that_says_what_to_do(python_run, tmp_path):
    (tmp_path / "nothing").mkdir()
    save(tmp_path, {"empty.txt": b"", "blank.txt": b"\n<|endoftext|>\n \n", "photos/a.jpg": b"x"})
    save(tmp_path, {"nul.bin": b"ab\0c", "latin.txt": b"\xe9"})
    save(tmp_path, {"binary/a.txt": b"\0", "binary/b.md": b"\xff"})
    os.mkfifo(tmp_path / "pipe")
    write_stories(tmp_path / "stories.txt", stories(20))
    tokenizer = str(python_run[0] / "tokenizer.json")
    cases = [
        ({"source": "nowhere.txt"}, "nowhere.txt: No such file.* run the same command"),
        ({"source": "empty.txt"}, r"no document to train on \(left out: 1 empty\).*name more"),
        ({"source": "blank.txt"}, "left out: 1 empty"),
        ({"source": "nul.bin"}, "left out: 1 binary"),
        ({"source": "latin.txt"}, "left out: 1 binary"),
        ({"source": "pipe"}, "pipe is no regular file"),
        ({"source": "binary"}, "left out: 2 binary"),
        ({"source": "nothing"}, "no .txt, .text, .md, .py files below.*name other folders"),
        ({"source": "photos"}, "no .txt"),
        ({"fim_rate": 0.5}, "--fim_rate goes with --rows=packed"),
        ({"tokenizer": tokenizer}, "no token <pad>, <bos>, <eos>, <mask>, <unk>;.*--rows"),
    ]
    refuses(functools.partial(text_config, tmp_path), cases)
    assert not (tmp_path / "out" / "train").exists()


def test_padded_rows_take_a_tokenizer_that_has_the_five_tokens_at_any_ids(python_run, tmp_path):
    texts = write_stories(tmp_path / "stories.txt", stories(60))
    tokenizer = Tokenizer.from_file(str(python_run[0] / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(tmp_path / "five.json"))
    dp.main(text_config(tmp_path, tokenizer=str(tmp_path / "five.json")))
    meta = meta_of(tmp_path / "out")
    assert [meta[name] for name in ROLES] == [400, 401, 402, 403, 404]
    tokens_RL, segments_RL, _ = rows_of(tmp_path / "out", "train")
    assert (tokens_RL[segments_RL == 0] == 400).all()
    documents = meta["splits"]["train"]["documents"]
    assert (tokens_RL == 401).sum() == (tokens_RL == 402).sum() == documents < len(texts)


def test_one_document_is_trained_on_and_said_to_leave_nothing_held_out(tmp_path, capsys):
    save(tmp_path, {"book.txt": "\n\n".join(stories(30)).encode()})
    dp.main(text_config(tmp_path, "book.txt", heldout=0.02))
    said = capsys.readouterr().err
    assert "nothing is held out" in said
    assert "book.txt: no <|endoftext|> in the first" in said
    meta = meta_of(tmp_path / "out")
    assert meta["splits"]["train"]["documents"] == 1
    assert meta["splits"]["heldout"]["rows"] == 0
    (text,) = padded_texts(tmp_path / "out", "train")
    assert text.encode() == (tmp_path / "book.txt").read_bytes()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.JSON", "a.txt"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_no_prose(tmp_path, name, indent):
    data = json.dumps([{"text": text} for text in stories(9)], indent=indent).encode()
    for part in (data, data[:-1].replace(b"[", b"", 1).replace(b"}, {", b"}\n{")):
        (tmp_path / name).write_bytes(part)
        said = rf"{name}: no document to train on \(left out: 1 json\).*neither JSON nor packed"
        refuses(functools.partial(text_config, tmp_path), [({"source": name}, said)])


@pytest.mark.slow
def test_tinystories_come_through_datasets_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets", reason="needs: pip install datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = stories(80)
    (tmp_path / "hub").mkdir()
    splits = {"train": [f"{text}\n" for text in texts], "validation": stories(9, seed=3)}
    for split, rows in splits.items():
        pq.write_table(pa.table({"text": rows}), tmp_path / f"hub/{split}-00000.parquet")
    monkeypatch.setattr(cp, "TINYSTORIES", str(tmp_path / "hub"))
    cfg = config(tmp_path, dp.TinyStories)
    dp.main(cfg)
    assert both(padded_texts, cfg.out) == sorted(texts)
    assert meta_of(cfg.out)["source"] == "tinystories"
    capsys.readouterr()
    # the file that is there is used
    monkeypatch.setattr(cp, "TINYSTORIES", str(tmp_path / "nowhere"))
    dp.main(cfg)
    assert "nothing to do" in capsys.readouterr().out
    assert "cannot be downloaded" in refused(dataclasses.replace(cfg, out=str(tmp_path / "new")))
    assert not (tmp_path / "new" / "tinystories.txt").exists()


def test_tinystories_without_datasets_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refused(config(tmp_path, dp.TinyStories))


@pytest.mark.skipif(not STORIES.is_file(), reason=f"no {STORIES}; set SHARED_DATA")
def test_real_stories_come_back_from_the_shards(tmp_path):
    dp.main(dp.Text(source=str(STORIES), out=str(tmp_path / "out"), workers=1))
    want = [text.strip() for text in STORIES.read_text(encoding="utf-8").split("<|endoftext|>")]
    assert both(padded_texts, tmp_path / "out") == sorted(filter(None, want))
    assert meta_of(tmp_path / "out")["vocab_size"] == 8192


# ---- pairs of prompt and response


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_pairs(pairs):
    return [{"prompt": prompt, "response": response} for prompt, response in pairs.items()]


def write_pairs(path, count, seed=0):
    """`count` pairs of lists and the same in order; {prompt: response}."""
    rng, pairs = random.Random(seed), {}
    while len(pairs) < count:
        numbers = [rng.randint(0, 9) for _ in range(rng.randint(3, 9))]
        pairs[f"sorted({numbers}) -> caf\u00e9 "] = str(sorted(numbers))
    write_lines(path, as_pairs(pairs))
    # a byte order mark and an empty line are nothing
    path.write_text(f"\ufeff{path.read_text()}\n")
    return pairs


def segments_of(out, split):
    """(ids, positions, fixed) of each pair of a split."""
    rows = Rows(out, split)
    if not rows.total:
        return
    columns = rows.read(np.arange(rows.total))
    for token_L, segment_L, position_L, fixed_L in zip(*columns, strict=True):
        assert (np.diff(segment_L[segment_L > 0]) >= 0).all()
        assert not fixed_L[segment_L == 0].any()
        for segment in range(1, segment_L.max() + 1):
            here_L = segment_L == segment
            yield token_L[here_L], position_L[here_L], fixed_L[here_L]


def tokenizer_of(out):
    return Tokenizer.from_file(str(Path(out) / "tokenizer.json"))


def pairs_of(out, split):
    """[(prompt, response, tokens of EOS, tokens of the response)] of a split, checked."""
    tokenizer, eos, found = tokenizer_of(out), meta_of(out)["eos_id"], []
    for token_T, position_T, fixed_T in segments_of(out, split):
        assert (position_T == np.arange(len(token_T))).all()
        assert (np.diff(fixed_T) <= 0).all()  # the prompt comes first
        ends_T = token_T == eos
        assert (np.diff(ends_T.astype(int)) >= 0).all()
        parts = (token_T[fixed_T == 1], token_T[(fixed_T == 0) & ~ends_T])
        prompt, response = (tokenizer.decode(part.tolist()) for part in parts)
        found.append((prompt, response, int(ends_T.sum()), len(token_T) - int(fixed_T.sum())))
    return found


def texts_in(pairs):
    return {prompt: response for prompt, response, _, _ in pairs}


def test_rows_of_pairs_hold_each_pair_whole_with_its_prompt_fixed_and_eos_behind(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 300)
    dp.main(pair_config(tmp_path))
    found = {split: pairs_of(tmp_path / "out", split) for split in ("train", "heldout")}
    everything = found["train"] + found["heldout"]
    assert texts_in(everything) == pairs
    assert len(everything) == 300
    assert 20 < len(found["heldout"]) < 120
    for _, _, ends, size in everything:
        assert 1 <= ends <= 16
        assert size % 16 == 0
    meta = meta_of(tmp_path / "out")
    assert meta["source"] == "pairs"
    assert meta["splits"]["train"]["too_long"] == 0
    train, _, _ = open_data(tmp_path / "out")
    token_RL, segment_RL, position_RL, fixed_RL = train.read(np.arange(train.total))
    assert train.columns[-1] == "fixed"
    assert {*np.unique(fixed_RL)} == {0, 1}
    assert (position_RL[fixed_RL == 1] < 128).all()
    assert not token_RL[segment_RL == 0].any()


def test_rows_with_ids_past_the_vocabulary_are_refused(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", 50)
    dp.main(pair_config(tmp_path, heldout=0.0))
    meta, rows = meta_of(tmp_path / "out"), Rows(tmp_path / "out", "train")
    largest = rows.read(np.arange(rows.total))[0].max()
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta | {"vocab_size": int(largest)}))
    rows = Rows(tmp_path / "out", "train")
    said = rf"00000\.parquet holds ids that its tokenizer has not, up to {largest};"
    with pytest.raises(ValueError, match=said):
        rows.read(np.arange(1))


PARTS = "prompt", "response", "suffix"


def test_a_hole_before_a_suffix_ends_with_any_number_of_eos_below_eos_to(tmp_path):
    texts = [(f"def f{i}(x):\n    ", f"return {i} * x", "\n\nf(3)\n") for i in range(100)]
    write_lines(tmp_path / "pairs.jsonl", [dict(zip(PARTS, text, strict=True)) for text in texts])
    dp.main(pair_config(tmp_path, eos_to=8))
    tokenizer, filled = tokenizer_of(tmp_path / "out"), set()
    for token_T, _, fixed_T in segments_of(tmp_path / "out", "train"):
        # the last EOS ends the row
        hole_T = (fixed_T == 0) & (np.arange(len(token_T)) < len(token_T) - 1)
        assert re.fullmatch(r"return \d+ \* x", tokenizer.decode(token_T[hole_T].tolist()))
        behind = token_T[np.flatnonzero(hole_T)[-1] + 1 :].tolist()
        assert tokenizer.decode(behind) == "\n\nf(3)\n"
        filled.add(int((token_T[hole_T] == 0).sum()))
    assert filled == {*range(8)}


def test_without_eos_to_a_response_ends_with_one_eos_and_a_longer_pair_is_counted(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 200)
    dp.main(pair_config(tmp_path, eos_to=1, seq_len=40, shard_bytes=3000))
    splits = meta_of(tmp_path / "out")["splits"]
    assert len(splits["train"]["shards"]) > 1
    everything = both(pairs_of, tmp_path / "out")
    assert {ends for _, _, ends, _ in everything} == {1}
    too_long = sum(splits[split]["too_long"] for split in ("train", "heldout"))
    assert 0 < too_long < 200
    assert len(everything) == 200 - too_long
    encode = tokenizer_of(tmp_path / "out").encode
    fits = {p for p, r in pairs.items() if len(encode(p).ids) + len(encode(r).ids) + 1 <= 40}
    assert {*texts_in(everything)} == fits


def test_a_suffix_follows_the_response_and_is_fixed_as_the_prompt_is(tmp_path):
    source, texts = tmp_path / "pairs.jsonl", ("x = (", " y + 1", ")\n    return x")
    whole = dict(zip(PARTS, texts, strict=True))
    write_lines(source, [whole, {"prompt": "a", "response": " b"}] * 3)
    dp.main(pair_config(tmp_path, eos_to=16, heldout=0.0))
    assert meta_of(tmp_path / "out")["splits"]["train"]["rows"] == 1
    ids = [tokenizer_of(tmp_path / "out").encode(text).ids for text in texts]
    eos = meta_of(tmp_path / "out")["eos_id"]
    first, second, *_ = segments_of(tmp_path / "out", "train")
    filled = first[0].tolist().count(eos) - 1
    assert 0 <= filled < 16
    ids[1] += [eos] * filled  # ends the hole
    assert first[0].tolist() == [*itertools.chain(*ids), eos]
    given = [1] * len(ids[0]), [0] * len(ids[1]), [1] * len(ids[2]), [0]  # the EOS behind a pair
    assert first[2].tolist() == [*itertools.chain(*given)]
    assert (second[2] == 0).sum() == 16  # has no suffix: EOS fills it
    for suffix in (3, ["a"], "\ud800"):
        write_lines(source, [whole | {"suffix": suffix}])
        assert "line 1: not" in refused(pair_config(tmp_path, out=str(tmp_path / "bad")))


def test_a_held_out_prompt_is_in_no_training_pair(tmp_path):
    rng = random.Random(0)
    rows = [{"prompt": f"prompt {rng.randint(0, 60)}: ", "response": str(i)} for i in range(300)]
    write_lines(tmp_path / "pairs.jsonl", rows)
    dp.main(pair_config(tmp_path))
    train, heldout = ({*texts_in(pairs_of(tmp_path / "out", s))} for s in ("train", "heldout"))
    assert train
    assert heldout
    assert not train & heldout


def test_bad_lines_of_pairs_are_named_by_number(tmp_path):
    good, path = b'{"prompt": "a", "response": "b"}\n', tmp_path / "pairs.jsonl"
    bad = rb"""
{"prompt": 1, "response": "b"}
prompt,response
["a", "b"]
{"prompt": "\ud800"}
{"prompt": "\ud800", "response": ""}
"""
    said = 'pairs.jsonl, line 3: not {"prompt": TEXT, "response": TEXT} in UTF-8; one a line, unp'
    for line in (*bad.strip().splitlines(), b"\xff\xfe"):
        path.write_bytes(good + b"\n" + line + b"\n" + good)
        assert said in refused(pair_config(tmp_path))
    for data in (b"[" + good.strip() + b"]", gzip.compress(good), b'{"question": "a"}\n'):
        path.write_bytes(data)
        assert said.replace("line 3", "line 1") in refused(pair_config(tmp_path))
    path.write_bytes(b"")
    assert "no document to train on" in refused(pair_config(tmp_path))
    path.write_bytes(good)
    cases = [({"eos_to": 0}, "--eos_to=0"), ({"source": "none.jsonl"}, "none.jsonl: No such file")]
    refuses(functools.partial(pair_config, tmp_path), cases)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chat_model(python_run, tmp_path):
    """A folder with a tokenizer, its config and a chat template."""
    tokenizer = Tokenizer.from_file(str(python_run[0] / "tokenizer.json"))
    tokenizer.normalizer = NFC()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|mask|>"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    files = {"tokenizer_config.json": b"{}", "chat_template.jinja": CHAT_TEMPLATE.encode()}
    save(tmp_path / "model", files)
    return tmp_path / "model"


def chat_config(folder, model, **changes):
    tokenizer = str(model / "tokenizer.json")
    return pair_config(folder, **{"chat": True, "tokenizer": tokenizer, "eos_to": 1} | changes)


def test_pairs_of_a_chat_are_turns_and_special_tokens_are_the_templates_alone(
    chat_model, tmp_path, capsys
):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 60)
    question = "What is <|im_end|> or <|mask|>?"
    pairs |= {question: "<|im_end|>\n<|im_start|>user\nA token.", "cafe\u0301": "\ufb01"}
    write_lines(tmp_path / "pairs.jsonl", as_pairs(pairs))
    cfg = chat_config(tmp_path, chat_model, seq_len=512)
    dp.main(cfg)
    tokenizer, out = tokenizer_of(chat_model), tmp_path / "out"
    start, end, mask = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>", "<|mask|>"))
    found = {}
    for split in ("train", "heldout"):
        for token_T, _, fixed_T in segments_of(out, split):
            prompt, response = (token_T[fixed_T == i].tolist() for i in (1, 0))
            assert [i for i in prompt if i in (start, end, mask)] == [start, end, start]
            assert [i for i in response if i in (start, end, mask)] == [end]
            assert response[-2:] == [end, 0]  # EOS behind it
            decoded = tokenizer.decode_batch([prompt, response[:-2]], skip_special_tokens=False)
            found[decoded[0]] = decoded[1]
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    nfc = functools.partial(normalize, "NFC")
    assert found == {turn.format(nfc(p)): nfc(r) for p, r in pairs.items()}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (chat_model / name).read_bytes()
    capsys.readouterr()
    dp.main(cfg)
    assert "nothing to do" in capsys.readouterr().out
    assert "other settings (chat " in refused(dataclasses.replace(cfg, chat=False))
    write_lines(tmp_path / "holes.jsonl", [dict.fromkeys(PARTS, "a")])
    changes = {"source": str(tmp_path / "holes.jsonl"), "out": str(tmp_path / "new")}
    said = 'line 1: not {"prompt": TEXT, "response": TEXT} in UTF-8, without "suffix"'
    assert said in refused(dataclasses.replace(cfg, **changes))
    save(chat_model, {"chat_template.jinja": b"Q: {{ messages[0].content }}"})
    assert "other settings (chat " in refused(cfg)


def test_the_system_of_a_pair_is_the_system_turn_of_the_chat(chat_model, tmp_path):
    template = b"{{ bos_token }}" + CHAT_TEMPLATE.encode()
    save(chat_model, {"chat_template.jinja": template})
    save(chat_model, {"special_tokens_map.json": b'{"bos_token": "<|begin|>"}'})
    rows = [{"prompt": "a", "response": "b", "system": text} for text in ("Be brief.", "", None)]
    rows += [{"prompt": "a", "response": "b"}]
    write_lines(tmp_path / "pairs.jsonl", rows)
    cfg = chat_config(tmp_path, chat_model, seq_len=128, heldout=0.0)
    dp.main(cfg)
    tokenizer = tokenizer_of(tmp_path / "out")  # with the token that is named beside it
    texts = []
    for token_T, _, fixed_T in segments_of(tmp_path / "out", "train"):
        texts.append(tokenizer.decode(token_T[fixed_T == 1].tolist(), skip_special_tokens=False))
        assert token_T[0] == tokenizer.token_to_id("<|begin|>")
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert texts == [f"<|begin|>{text}{turns}" for text in (system, "", "", "")]
    assert prompts.chat_template(tmp_path / "out")("a") == f"<|begin|>{turns}"
    write_lines(tmp_path / "pairs.jsonl", rows[1:])
    without = {"chat": False, "tokenizer": "", "out": str(tmp_path / "new")}
    dp.main(dataclasses.replace(cfg, **without, eos_to=8, vocab_size=300))
    write_lines(tmp_path / "pairs.jsonl", rows)
    said = 'line 1: not {"prompt": TEXT, "response": TEXT} in UTF-8, without "system" as --chat'
    assert said in refused(dataclasses.replace(cfg, **without | {"out": str(tmp_path / "other")}))


def test_a_response_ends_with_lladas_token_where_the_tokenizer_has_that(chat_model):
    path = chat_model / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|eot_id|>"))
    cfg = chat_config(chat_model, chat_model)
    vocabulary = dp.load_vocabulary(path.read_bytes(), cfg)
    (((_, response), size),) = dp.chat_turns([("a", "b")], cfg, vocabulary)
    text = vocabulary.encoder.decode(response, skip_special_tokens=False)
    assert (text, size) == ("b<|eot_id|>", 2)


def test_eos_fills_a_row_as_far_as_it_goes(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", 60)

    def counts(eos_to, *names):
        cfg = pair_config(tmp_path, eos_to=eos_to, heldout=0.0, out=str(tmp_path / f"{eos_to}"))
        dp.main(cfg)
        return [meta_of(cfg.out)["splits"]["train"][name] for name in names]

    assert counts(1, "documents", "too_long") == [60, 0]
    assert counts(2048, "documents", "rows", "tokens") == [60, 60, 60 * 128]


def test_a_chat_needs_a_template_and_a_token_that_ends_a_turn(chat_model, python_run, tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", 9)
    template = "--chat takes a model's template: --tokenizer=FOLDER/tokenizer.json"
    assert template in refused(pair_config(tmp_path, chat=True))
    assert "has no token <|im_end|>" in refused(chat_config(tmp_path, python_run[0]))
    (chat_model / "chat_template.jinja").unlink()
    said = "holds no chat template (tokenizer_config.json or chat_template.jinja)"
    assert said in refused(chat_config(tmp_path, chat_model))
    assert not (tmp_path / "out" / "train").exists()


# ---- The reader


@pytest.fixture(scope="module")
def rows_of_text(tmp_path_factory):
    """A folder of padded rows in several shards; tests copy it before they damage it."""
    folder = tmp_path_factory.mktemp("reader")
    write_stories(folder / "stories.txt", stories(200))
    dp.main(text_config(folder, shard_bytes=8_000))
    return folder / "out"


def test_the_reader_gives_the_rows_that_were_written(rows_of_text):
    train, heldout, tokenizer = open_data(rows_of_text, seq_len=64)
    assert tokenizer == (rows_of_text / "tokenizer.json").read_bytes()
    assert train.columns == ["input_ids", "segments", "positions"]
    for rows, split in ((train, "train"), (heldout, "heldout")):
        want_3RL = np.stack(rows_of(rows_of_text, split))
        assert rows.total == want_3RL.shape[1]
        ids = np.random.default_rng(0).permutation(rows.total)
        got_3RL = rows.read(ids)
        assert got_3RL.dtype == np.int32
        np.testing.assert_array_equal(got_3RL, want_3RL[:, ids])
    pair = train.read(np.array([[3, -1]]))[:, 0]
    np.testing.assert_array_equal(pair[:, 0], train.read(np.array([3]))[:, 0])
    assert not pair[:, 1].any()


def test_an_epoch_has_each_row_once_and_a_batch_may_run_over_its_end(rows_of_text):
    rows = Rows(rows_of_text, "train")
    assert len(rows.shards) > 3
    first, second = rows.order(5, 0), rows.order(5, 1)
    assert sorted(first) == sorted(second) == list(range(rows.total))
    assert first.tolist() != second.tolist() != rows.order(6, 1).tolist()
    stream, size = np.concatenate([rows.order(5, epoch) for epoch in range(4)]), rows.total // 2 + 3
    for step in range(5):
        want = rows.read(stream[step * size :][:size])
        np.testing.assert_array_equal(rows.batch(5, step, size), want)
    two = 2 * rows.total + 1
    np.testing.assert_array_equal(rows.batch(5, 0, two), rows.read(stream[:two]))


def test_some_rows_stand_for_all(rows_of_text):
    """The first rows may be of one long document; a sample has rows of every part."""
    rows = Rows(rows_of_text, "train")
    for count in (rows.total, 10 * rows.total):
        assert rows.spread(count).tolist() == list(range(rows.total))
    for count in (1, 7, rows.total // 2, rows.total - 1):
        ids = rows.spread(count)
        assert len(ids) == count
        assert 0 <= ids[0] < ids[-1] + 1 <= rows.total
        # each holds at least one
        for part in np.array_split(np.arange(rows.total), max(1, count // 2)):
            assert {*part} & {*ids.tolist()}


def test_a_damaged_folder_is_one_line_that_says_what_to_do(rows_of_text, tmp_path):
    def damaged(name, data):
        """A copy in which a file has other content."""
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(rows_of_text, tmp_path / "copy")
        (tmp_path / "copy" / name).write_bytes(data)
        return tmp_path / "copy"

    def stops(error, match, read, *arguments, **settings):
        with pytest.raises(error, match=match):
            read(*arguments, **settings)

    said = r"holds no finished data .*write it with data_prep.py"
    stops(FileNotFoundError, said, open_data, tmp_path / "nowhere")
    said = "rows of 64 tokens, the run wants 128; prepare it again"
    stops(ValueError, said, open_data, rows_of_text, seq_len=128)
    said = "meta.json is damaged; delete the folder and write it again"
    for data in (b"{", b"[]", b"{}", b'{"splits": {}, "seq_len": 64, "tokenizer_sha256": ""}'):
        stops(ValueError, said, open_data, damaged("meta.json", data))
    said = "tokenizer.json is missing, or not the one that made the shards"
    stops(ValueError, said, open_data, damaged("tokenizer.json", b"{}"))
    shard = (rows_of_text / "train" / "00000.parquet").read_bytes()
    train, _, _ = open_data(damaged("train/00000.parquet", shard[:-1]))
    said = r"00000.parquet is corrupted .its SHA-256 .* run data_prep.py again"
    stops(ValueError, said, train.read, np.arange(1))
    (tmp_path / "copy" / "train" / "00000.parquet").unlink()
    said = r"No such file or directory: .*00000.parquet"
    stops(FileNotFoundError, said, train.read, np.arange(1))


def test_bytes_of_the_tokens_of_a_text_are_its_bytes(rows_of_text):
    tokenizer = Tokenizer.from_file(str(rows_of_text / "tokenizer.json"))
    bytes_V = token_bytes(tokenizer, 512)
    assert (bytes_V.dtype, bytes_V.shape) == (np.float32, (512,))
    assert not bytes_V[:5].any()
    assert not bytes_V[400:].any()
    for text in stories(20, seed=4):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert bytes_V[ids].sum() == len(text.encode())
    # as the tokenizers of GPT-NeoX, of Gemma and of Qwen have them
    tokenizer.add_tokens(["    ", "\u2581\u2581", "\u65e5\u672c", "<tool_call>"])
    assert token_bytes(tokenizer, 512)[400:404].tolist() == [4, 2, 6, 0]


HARD = """A caf\u00e9, \u00a35 \u2014 \u201cna\u00efve\u201d  twice.
\tdef f(x):
        return '\u4e2d\u6587\u5b57 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441'

\U0001f600\U0001f468\u200d\U0001f469 <0x41> </s>
"""


def sentencepiece(kind, bytes_are_special):
    """(a tokenizer as Llama has it, the bytes that it puts before a text)."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {name: id for id, name in enumerate(["<unk>", "<s>", "</s>", *byte_tokens])}
    pairs = "\u2581 d", "\u2581d e", "\u2581 \u2581", "c a", "\u4e2d \u6587"
    merges = [tuple(pair.split(" ")) for pair in pairs]
    for name in [*"\u2581decafxturn\u4e2d\u6587\u00a3", *map("".join, merges)]:
        vocab.setdefault(name, len(vocab))
    model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    if kind == "prepended":
        spaces = normalizers.Replace(" ", "\u2581")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *byte_tokens * bytes_are_special])
    tokenizer.encode_special_tokens = True  # as data_prep.py has it
    return tokenizer, int(kind != "never")


@pytest.mark.parametrize("kind", ["prepended", "first", "never"])
@pytest.mark.parametrize("bytes_are_special", [False, True])
def test_bytes_of_a_tokenizer_with_byte_fallback_are_those_of_the_text(kind, bytes_are_special):
    tokenizer, before = sentencepiece(kind, bytes_are_special)
    bytes_V = token_bytes(tokenizer, 320)
    ids = [tokenizer.token_to_id(name) for name in ("<0x41>", "\u2581", "</s>")]
    assert bytes_V[ids].tolist() == [1, 1, 0]
    for text in (HARD, *HARD.split("\n"), *stories(5, seed=4)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        put = before and (kind == "prepended" or not text.startswith(" ")) and bool(text)
        assert bytes_V[ids].sum() == len(text.encode()) + put


def test_a_tokenizer_that_loses_text_is_refused_before_a_run(rows_of_text, tmp_path):
    lossy = Tokenizer.from_file(str(rows_of_text / "tokenizer.json"))
    lossy.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    letters, _ = sentencepiece("first", True)
    letters.model = models.BPE({"<unk>": 0, "A": 1}, [], unk_token="<unk>")
    for tokenizer in (Tokenizer.from_str(lossy.to_str()), words, letters):
        with pytest.raises(ValueError, match=r"bits per byte cannot be told.*byte-level one"):
            token_bytes(tokenizer, 512)
    shutil.copytree(rows_of_text, tmp_path / "rows")
    words.save(str(tmp_path / "rows/tokenizer.json"))
    meta = meta_of(tmp_path / "rows")
    meta["tokenizer_sha256"] = cp.sha256((tmp_path / "rows/tokenizer.json").read_bytes())
    runs.write(tmp_path / "rows/meta.json", meta)
    with pytest.raises(ValueError, match="bits per byte cannot be told"):
        open_data(tmp_path / "rows")
    meta["splits"]["heldout"]["shards"] = []  # nothing is scored
    runs.write(tmp_path / "rows/meta.json", meta)
    assert open_data(tmp_path / "rows")[0].total
