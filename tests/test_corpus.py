"""corpus.py on packages built here behind a real index, on data sets in folders, and on several hosts."""

import base64
import dataclasses
import functools
import hashlib
import http.server
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
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
MIT = "License-Expression: MIT\n"


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    """HumanEval and MBPP are only looked for where a test says so."""
    monkeypatch.setattr(cp, "BENCHMARKS", ())


def module(seed):
    """A Python file of 600 bytes, near no other."""
    rng = random.Random(seed)
    words = iter(["".join(rng.choices("abcdefghijklmnop", k=8)) for _ in range(30)])
    functions = zip(words, words, words, strict=True)
    return "\n".join(f"def {a}({b}, {c}):\n    return {b} + {c} * {rng.randint(0, 999)}\n" for a, b, c in functions)


def texts_of(out):
    """All documents of a folder, sorted."""
    tokenizer, texts = Tokenizer.from_file(str(Path(out) / "tokenizer.json")), []
    for rows in open_data(out)[:2]:
        token_RL, segment_RL, _ = rows.read(dp.np.arange(rows.total)) if rows.total else dp.np.zeros((3, 0, 1), int)
        stream = token_RL[segment_RL > 0]
        ends = dp.np.flatnonzero(stream == rows.meta["eos_id"]) + 1
        texts += [tokenizer.decode(part[:-1]) for part in dp.np.split(stream, ends)[:-1]]
    return sorted(texts)


def tree(out):
    """{path: content} of all that a run wrote, but for its manifest."""
    paths = [path for path in Path(out).rglob("*") if path.is_file() and path.name[0] not in ".m"]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


# ---- packages


def archive(name, version, files, metadata=MIT, kind="tar.gz"):
    """(file name, bytes) of a source distribution."""
    top, data = f"{name}-{version}", io.BytesIO()
    entries = {"PKG-INFO": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{metadata}\nText.\n"} | files
    if kind == "zip":
        with zipfile.ZipFile(data, "w") as file:
            for path, text in entries.items():
                file.writestr(f"{top}/{path}", text)
    else:
        with tarfile.open(fileobj=data, mode="w:gz") as file:
            for path, text in reversed(entries.items()):  # PKG-INFO last, as some tools have it
                info = tarfile.TarInfo(f"{top}/{path}")
                info.size = len(text.encode())
                file.addfile(info, io.BytesIO(text.encode()))
            link = tarfile.TarInfo(f"{top}/link.py")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            file.addfile(link)
    return f"{top}.{kind}", data.getvalue()


def write_index(folder, projects):
    """A simple index of PEP 503 in a folder; {project: [(file name, bytes, further attributes of its anchor)]}."""
    (folder / "files").mkdir(parents=True)
    for project, files in projects.items():
        (folder / "simple" / project).mkdir(parents=True)
        anchors = []
        for name, data, *more in files:
            (folder / "files" / name).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            anchors.append(f'<a href="../../files/{name}#sha256={digest}" {" ".join(more)}>{name}</a><br>')
        (folder / "simple" / project / "index.html").write_text(f"<html><body>{''.join(anchors)}</body></html>")
    return (folder / "simple").as_uri()


CLASSIFIED = "Classifier: License :: OSI Approved :: {}\n"


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """(URL of an index, the modules that a corpus of it keeps)."""
    a, b, c, d = (module(i) for i in range(4))
    noise = {"src/a/tests/data/case.py": module(10), "a/_vendor/six.py": module(11), "data.txt": "no Python"}
    first = {"setup.py": "import sys\nsys.exit('this must never run')\n", "a.py": a, "tests/test_a.py": b}
    projects = {
        "alpha": [
            archive("alpha", "1.0", {"a.py": module(20)}),
            archive("alpha", "1.10", first | noise),
            archive("alpha", "1.9", {"a.py": module(21)}),
            archive("alpha", "2.0rc1", {"a.py": module(22)}),
            (*archive("alpha", "3.0", {"a.py": module(23)}), 'data-yanked="broken"'),
        ],
        "bee-two": [archive("bee_two", "1", {"b.py": c, "copy.py": a, "near.py": a + "END = 1\n"}, kind="zip")],
        "classic": [archive("classic", "1", {"c.py": d}, CLASSIFIED.format("BSD License"))],
        "viral": [archive("viral", "1", {"v.py": module(30)}, CLASSIFIED.format("GNU General Public License (GPL)"))],
        "silent": [archive("silent", "1", {"s.py": module(31)}, "")],
        "wheel": [("wheel-1-py3-none-any.whl", b"PK")],
        "broken": [("broken-1.tar.gz", archive("broken", "1", {"b.py": module(32)})[1][:200])],
    }
    kept = [first["setup.py"], a, b, c, d]
    return write_index(tmp_path_factory.mktemp("index"), projects), kept


@pytest.fixture
def pip(index, monkeypatch):
    """pip asks this index, and no other."""

    def configure(url):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_CERT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setattr(cp, "pip_settings", functools.cache(cp.pip_settings.__wrapped__))

    configure(index[0])
    return configure


def config(tmp_path, **changes):
    settings = {"out": str(tmp_path / "out"), "archives": str(tmp_path / "archives"), "heldout": 0.2, "workers": 1}
    return dp.Python(**settings | {"seq_len": 64, "vocab_size": 300} | changes)


EVERYTHING = "Alpha,bee.two,classic,viral,silent,wheel,broken,nowhere"


def test_packages_are_kept_by_licence_and_a_manifest_says_what_became_of_each(
    tmp_path, pip, index, capsys, monkeypatch
):
    cfg = config(tmp_path, pypi=EVERYTHING)
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted(index[1])
    dropped = {reason: count for reason, count in Rows(cfg.out, "train").meta["dropped"].items() if count}
    want = {"exact_duplicate": 1, "near_duplicate": 1, "vendored": 1, "tests_data": 1, "package_licence": 2}
    assert dropped == want | dict.fromkeys(("package_damaged", "package_unknown", "package_without_source"), 1)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["left_out"] == {"wheel": "package_without_source", "nowhere": "package_unknown"}
    listed = {package["name"]: package for package in manifest["packages"]}
    assert {name: (entry["version"], entry["files"], entry.get("licence")) for name, entry in listed.items()} == {
        "alpha": ("1.10", 3, "MIT"),
        "bee-two": ("1", 1, "MIT"),
        "classic": ("1", 1, "BSD License"),
        "viral": ("1", 0, "GNU General Public License (GPL)"),
        "silent": ("1", 0, ""),
        "broken": ("1", 0, None),
    }
    assert sum(package["bytes"] for package in listed.values()) == sum(map(len, index[1]))
    for package in listed.values():
        data = (tmp_path / "archives" / package["filename"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == package["sha256"]
    capsys.readouterr()
    pip("http://127.0.0.1:9/nothing/here")
    dp.main(cfg)
    assert "is complete, nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"holds data of other settings .pypi 'Alpha,bee.two"):
        dp.main(dataclasses.replace(cfg, pypi="alpha"))


def test_without_a_permissive_package_or_a_source_distribution_it_is_one_line(tmp_path, pip):
    with pytest.raises(ValueError, match=r"no document to train on \(left out: 2 package_licence\)"):
        dp.main(config(tmp_path, pypi="viral,silent"))
    with pytest.raises(ValueError, match=r"no package has a source distribution to take \(1 package_without_source, 1"):
        dp.main(config(tmp_path, pypi="wheel,nowhere", out=str(tmp_path / "other")))
    cfg = config(tmp_path, pypi="viral,silent", out=str(tmp_path / "any"), licences="any", heldout=0)
    dp.main(cfg)
    assert len(texts_of(cfg.out)) == 2


class Index(http.server.BaseHTTPRequestHandler):
    """PEP 691's JSON for those who say the password; `files` is {name: bytes}."""

    def do_GET(self):
        if self.headers["Authorization"] != "Basic " + base64.b64encode(b"me:p@ss").decode():
            self.send_error(401, "who are you")
        elif self.path.startswith("/files/"):
            self.reply(self.server.files[self.path.removeprefix("/files/")], "application/octet-stream")
        elif (name := self.path.split("/")[2]) not in {file.split("-")[0] for file in self.server.files}:
            self.send_error(404)
        else:
            files = [
                {"filename": file, "url": f"/files/{file}", "hashes": {"sha256": sha256}, "size": 1, "yanked": False}
                for file, sha256 in self.server.listed.items()
                if file.startswith(f"{name}-")
            ]
            self.reply(json.dumps({"files": files}).encode(), "application/vnd.pypi.simple.v1+json")

    def reply(self, data, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(pip):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.files = dict(archive("one", "1", {"a.py": module(1), "b.py": module(2)}) for _ in range(1))
    server.listed = {name: hashlib.sha256(data).hexdigest() for name, data in server.files.items()}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pip(f"http://me:p%40ss@127.0.0.1:{server.server_port}/simple")
    yield server
    server.shutdown()
    server.server_close()


def test_an_index_of_json_with_a_password_and_its_failures(tmp_path, server, pip, monkeypatch):
    monkeypatch.setattr(cp.time, "sleep", lambda _: None)
    cfg = config(tmp_path, pypi="one,two")
    sha256, server.listed["one-1.tar.gz"] = server.listed["one-1.tar.gz"], "0" * 64
    with pytest.raises(
        RuntimeError, match=r"one-1.tar.gz cannot be fetched \(what came is not .* SHA-256\); see to the"
    ):
        dp.main(cfg)
    assert not list((tmp_path / "archives").glob("one*"))
    (tmp_path / "out" / "manifest.json").unlink()
    server.listed["one-1.tar.gz"] = sha256
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted([module(1), module(2)])
    assert "p@ss" not in (tmp_path / "out" / "manifest.json").read_text()
    other = dataclasses.replace(cfg, out=str(tmp_path / "other"), archives=str(tmp_path / "none"))
    pip(f"http://127.0.0.1:{server.server_port}/simple")
    with pytest.raises(
        RuntimeError, match=r"^http://127.0.0.1:\d+/simple/one/ cannot be fetched \(who are you\); see to"
    ):
        dp.main(other)
    server.shutdown()
    server.server_close()
    with pytest.raises(RuntimeError, match=r"Connection refused\); see to the network, or to pip's index .pip config"):
        dp.main(other)
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [".lock"]


def test_killed_while_it_fetches_or_reads_the_next_run_ends_with_the_same_bytes(tmp_path, index, pip):
    cfg = config(tmp_path, pypi=EVERYTHING)
    dp.main(dataclasses.replace(cfg, out=str(tmp_path / "whole")))
    cfg = dataclasses.replace(cfg, archives=str(tmp_path / "new"))
    flags = ["--heldout=0.2", "--workers=1", "--seq_len=64", "--vocab_size=300", f"--pypi={EVERYTHING}"]
    flags += [f"--out={cfg.out}", f"--archives={cfg.archives}", "--benchmarks=none"]
    run = subprocess.Popen([sys.executable, str(ROOT / "data_prep.py"), "python", *flags], stdout=subprocess.DEVNULL)
    while not list((tmp_path / "out").glob(".rows/*.npz")):
        assert run.poll() is None
        time.sleep(0.0005)
    run.send_signal(signal.SIGKILL)
    run.wait()
    done = len(list((tmp_path / "out").glob(".rows/*.npz")))
    assert done
    dp.main(cfg)
    assert tree(cfg.out) == tree(tmp_path / "whole")
    assert not (tmp_path / "out" / ".rows").exists()


@pytest.mark.parametrize("bytes_a_file", [900, 300])  # the manifest takes 1,200, an archive 400
def test_a_full_disk_leaves_no_half_archive(tmp_path, pip, bytes_a_file):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    cfg = config(tmp_path, pypi="alpha,classic,viral")
    if bytes_a_file == 300:
        (tmp_path / "out").mkdir()
        cp.fetch_packages(cfg)
        shutil.rmtree(cfg.archives)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, hard))
        with pytest.raises(OSError, match=r"out: File too large; .*the same command to go on"):
            dp.main(cfg)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == ["manifest.json"] * (bytes_a_file == 300)


def test_a_cached_archive_that_is_damaged_is_fetched_again(tmp_path, pip, index):
    cfg = config(tmp_path, pypi="classic,bee-two", heldout=0)
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives" / "classic-1.tar.gz").write_bytes(b"half")
    dp.main(cfg)
    assert len(texts_of(cfg.out)) == 3


def test_what_packages_may_be_named_by(tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text(
        "-r more.txt\n# text\nNumPy>=2 # why\nfoo.bar[x]==1.0 \\\n    --hash=sha256:00\n\nwin; sys_platform=='x'\n"
    )
    assert {name: str(asked.specifier) for name, asked in cp.requirements(str(path)).items()} == {
        "numpy": ">=2",
        "foo-bar": "==1.0",
    }
    assert list(cp.requirements("a_b, c,A-B")) == ["a-b", "c"]
    top = list(cp.requirements("top:300"))
    assert len(top) == 300
    assert {"requests", "numpy", "boto3"} < {*top}
    for spec in ("top:0", "top:x", "top:999999", "not a name", "", "#"):
        with pytest.raises(ValueError, match=r"--pypi="):
            cp.requirements(spec)


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


def test_the_licence_of_a_package_is_what_its_metadata_agree_on():
    def licence(text):
        return cp.package_licence(cp.BytesHeaderParser().parsebytes(text.encode()))

    osi = "Classifier: License :: OSI Approved"
    assert licence("License: GPL\nLicense-Expression: MIT\n") == ("MIT", True)
    assert licence(f"License: UNKNOWN\n{osi} :: MIT License\n{osi}\n") == ("MIT License", True)
    assert licence(f"License: Dual\n{osi} :: BSD License\n{osi} :: Apache Software License\n")[1]
    assert not licence(f"License: MIT\n{osi} :: GNU Lesser General Public License v3 (LGPLv3)\n")[1]
    assert not licence("License: see the file\n")[1]
    assert licence("License: Copyright 2020 X\n        .\n        Permission is hereby granted, free of charge, to\n")[
        1
    ]


def test_the_index_that_pip_is_configured_for_has_packages(tmp_path):
    cp.pip_settings.cache_clear()
    try:
        package = cp.find_package("idna", cp.Requirement("idna==3.10"), cp.tqdm(disable=True))
    except RuntimeError as error:
        pytest.skip(f"no index: {error}")
    if isinstance(package, str):
        pytest.skip(f"the index has no source distribution of idna 3.10: {package}")
    cp.fetch(package, tmp_path / package["filename"], cp.tqdm(disable=True))
    about = {}
    rows = list(cp.package_rows(str(tmp_path / package["filename"]), about, "permissive", package["sha256"]))
    assert about["licence"] == "BSD License"
    assert any(b"def encode(" in data for data, reason in rows if not reason)


# ---- rows of files and data sets


def write_rows(folder, texts, **columns):
    """Half of the rows in a Parquet file, half in JSON lines."""
    folder.mkdir()
    rows = [dict(zip(["code", *columns], values, strict=True)) for values in zip(texts, *columns.values(), strict=True)]
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
        tmp_path / "lists", texts, max_stars_repo_licenses=[["MIT"], ["MIT", "AGPL-3.0"], [], ["BSD-2-Clause"]] * 2
    )
    cfg = config(tmp_path, roots=(str(tmp_path / "lists"),), out=str(tmp_path / "out2"))
    dp.main(cfg)
    assert Rows(cfg.out, "train").meta["dropped"]["licence"] == 2
    pq.write_table(pa.table({"number": [1]}), tmp_path / "rows" / "c.parquet")
    with pytest.raises(
        ValueError, match=r"c.parquet has no column content or text or code of text .it has number int64."
    ):
        dp.main(config(tmp_path, roots=(str(tmp_path / "rows"),), out=str(tmp_path / "new")))


def test_a_run_that_was_stopped_does_not_read_its_inputs_again(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", [module(i) for i in range(8)])
    whole = (tmp_path / "rows" / "b.jsonl").read_bytes()
    (tmp_path / "rows" / "b.jsonl").write_bytes(whole[:-20])
    cfg, read = config(tmp_path, roots=(str(tmp_path / "rows"),)), []
    with pytest.raises(ValueError, match=r'b.jsonl has no {"code": TEXT} in line 4'):
        dp.main(cfg)
    (tmp_path / "rows" / "b.jsonl").write_bytes(whole)
    examine = cp.examine_rows
    monkeypatch.setattr(
        cp, "examine_rows", lambda source, *args: read.append(Path(source[1]).name) or examine(source, *args)
    )
    dp.main(cfg)
    assert read == ["b.jsonl"]
    assert len(texts_of(cfg.out)) == 8


def test_a_data_set_streams_into_the_rows_of_its_files(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = [module(i) for i in range(12)]
    (tmp_path / "set" / "python").mkdir(parents=True)
    for number in range(3):
        rows = {"content": texts[4 * number :][:4], "license": ["mit", "mit", "mit", "gpl"], "stars": [1, 2, 3, 4]}
        pq.write_table(pa.table(rows), tmp_path / "set" / "python" / f"train-{number}.parquet")
    cfg = config(tmp_path, hf=f"{tmp_path / 'set'}:python")
    dp.main(cfg)
    assert texts_of(cfg.out) == sorted(text for i, text in enumerate(texts) if i % 4 < 3)
    assert Rows(cfg.out, "train").meta["dropped"]["licence"] == 3
    with pytest.raises(ValueError, match=r"has no column nothing of text .it has content, license, stars"):
        dp.main(dataclasses.replace(cfg, column="nothing", out=str(tmp_path / "other")))
    with pytest.raises(ValueError, match=r"nowhere cannot be downloaded .*name its files with --roots"):
        dp.main(dataclasses.replace(cfg, hf=str(tmp_path / "nowhere"), out=str(tmp_path / "third")))


@pytest.mark.parametrize("shard_bytes", [5_000, 1_000_000])
def test_two_hosts_write_the_bytes_of_one_and_a_shard_has_rows_of_all_files(tmp_path, capsys, shard_bytes):
    texts = [module(i) for i in range(40)] + [module(3) + "END = 1\n", module(4)]
    write_rows(tmp_path / "rows", texts)
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),), shard_bytes=shard_bytes, out=str(tmp_path / "whole"))
    dp.main(dataclasses.replace(cfg, out=str(tmp_path / "first")))
    cfg = dataclasses.replace(cfg, tokenizer=str(tmp_path / "first" / "tokenizer.json"))
    dp.main(cfg)
    hosts = [dataclasses.replace(cfg, out=str(tmp_path / "out"), hosts=2, host=host) for host in (0, 1)]
    other = threading.Thread(target=dp.main, args=(hosts[1],))
    other.start()
    while "waiting for other hosts: 1 of 2 inputs" not in capsys.readouterr().out:
        assert other.is_alive()
    dp.main(hosts[0])
    other.join()
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert len(Rows(tmp_path / "out", "train").shards) == {5_000: 4, 1_000_000: 1}[shard_bytes]
    assert not (tmp_path / "out" / ".rows").exists()
    groups, _ = cp.gather(dp.find(cp.settled(cfg)), cp.settled(cfg))
    for group in groups["train"]:
        assert {item.name[:2] for item in group} == {"a.", "b."}
    for changes, part in (({"host": 2}, "--host=2 must be in"), ({"tokenizer": ""}, "same tokenizer")):
        with pytest.raises(ValueError, match=part):
            dp.main(dataclasses.replace(hosts[0], **changes))


@pytest.mark.skipif(not (SHARED / "HumanEval.jsonl.gz").is_file(), reason=f"no HumanEval in {SHARED}; set SHARED_DATA")
def test_rows_are_cleaned_of_humaneval_and_mbpp_unless_these_cannot_be_had(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cp, "pip_settings", dict)
    monkeypatch.setattr(cp, "BENCHMARKS", ("humaneval", "mbpp"))
    for task, name in (("humaneval", "HumanEval.jsonl.gz"), ("mbpp", "sanitized-mbpp.json")):
        monkeypatch.setitem(cp.problems.TASKS, task, (SHARED / name).as_uri())
    humaneval = cp.read_problems(str(SHARED / "HumanEval.jsonl.gz"))
    mbpp = cp.read_problems(str(SHARED / "sanitized-mbpp.json"))
    leaked = [f"# copied\n{humaneval[0]}{humaneval[1]}", mbpp[-1] + "\nprint(1)\n"]
    write_rows(tmp_path / "rows", [*(module(i) for i in range(6)), *leaked])
    cfg = config(tmp_path, roots=(str(tmp_path / "rows"),))
    dp.main(cfg)
    assert "2 benchmark" in capsys.readouterr().out
    assert texts_of(cfg.out) == sorted(module(i) for i in range(6))
    kept = sorted(path.name for path in (tmp_path / "data" / "tasks").iterdir())
    assert kept == ["HumanEval.jsonl.gz", "sanitized-mbpp.json"]
    off = dataclasses.replace(cfg, benchmarks=("none",), out=str(tmp_path / "off"))
    dp.main(off)
    assert len(texts_of(off.out)) == 8
    monkeypatch.setattr(cp, "TASKS", str(tmp_path / "tasks"))
    monkeypatch.setitem(cp.problems.TASKS, "humaneval", "http://127.0.0.1:9/HumanEval.jsonl.gz")
    capsys.readouterr()
    cfg = dataclasses.replace(cfg, out=str(tmp_path / "one"))
    dp.main(cfg)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "documents that hold problems of HumanEval.jsonl.gz stay in: http://127.0.0.1:9/" in errors
    assert len(texts_of(cfg.out)) == 7
