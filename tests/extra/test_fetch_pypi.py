"""fetch_pypi.py on packages built here, behind a simple index on 127.0.0.1: licences, killed runs,
hostile archives.
"""

import functools
import hashlib
import http.server
import io
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from email.parser import HeaderParser
from pathlib import Path

import fetch_pypi
import pytest
from conftest import command
from test_corpus import module

import data_prep

pytest.importorskip("pypi_simple", reason="needs: pip install pypi-simple")
MIT = "License-Expression: MIT\n"
CLASSIFIED = "Classifier: License :: OSI Approved :: {}\n"


def archive(name, version, files, metadata=MIT):
    """(file name, bytes) of a source distribution."""
    top, data = f"{name}-{version}", io.BytesIO()
    info = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{metadata}\nText.\n"
    entries = {"PKG-INFO": info} | files
    with tarfile.open(fileobj=data, mode="w:gz") as file:
        for path, text in reversed(entries.items()):  # PKG-INFO last, as some tools have it
            info = tarfile.TarInfo(path[1:] if path.startswith("!") else f"{top}/{path}")
            info.size = len(text.encode())
            file.addfile(info, io.BytesIO(text.encode()))
        link = tarfile.TarInfo(f"{top}/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    return f"{top}.tar.gz", data.getvalue()


def write_index(folder, projects):
    """A simple index of PEP 503; {project: [(file, bytes, attributes of its anchor)]}."""
    (folder / "files").mkdir(parents=True)
    for project, files in projects.items():
        page = folder / "simple" / project / "index.html"
        page.parent.mkdir(parents=True)
        anchors = ""
        for name, data, *more in files:
            (folder / "files" / name).write_bytes(data)
            address = f"../../files/{name}#sha256={hashlib.sha256(data).hexdigest()}"
            anchors += f'<a href="{address}" {" ".join(more)}>{name}</a><br>'
        page.write_text(f"<html><body>{anchors}</body></html>")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def texts(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in Path(folder).rglob("*.py")}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """(URL of an index, its folder, the .py files that it should give)."""
    a, b, c, d = (module(i) for i in range(4))
    folder = tmp_path_factory.mktemp("index")
    noise = {
        "src/a/tests/data/case.py": module(10),
        "a/_vendor/six.py": module(11),
        "data.txt": "x",
    }
    setup = "import sys\nsys.exit('this must never run')\n"
    first = {"setup.py": setup, "a.py": a, "tests/test_a.py": b}
    gpl = CLASSIFIED.format("GNU General Public License (GPL)")
    projects = {
        "alpha": [
            archive("alpha", "1.0", {"a.py": module(20)}),
            archive("alpha", "1.10", first | noise | {"LICENSE.txt": "MIT"}),
            archive("alpha", "1.9", {"a.py": module(21)}),
            archive("alpha", "2.0rc1", {"a.py": module(22)}),
            (*archive("alpha", "3.0", {"a.py": module(23)}), 'data-yanked="broken"'),
        ],
        "bee-two": [archive("bee_two", "1", {"b.py": c})],
        "wheel": [("wheel-1-py3-none-any.whl", b"PK")],
        "broken": [("broken-1.tar.gz", archive("broken", "1", {"b.py": module(32)})[1][:200])],
    }
    for name, files, *metadata in (
        ("classic", {"c.py": d}, CLASSIFIED.format("BSD License")),
        ("viral", {"v.py": module(30)}, gpl),
        ("silent", {"s.py": module(31)}, ""),
        ("up", {"!up-1/../../out.py": module(33)}),
        ("root", {f"!{folder}/out.py": module(34)}),
        ("twice", {f"!twice-1/{folder}/out.py": module(34)}),
        ("clash", {"x.py/y.py": "y = 1", "x.py": "x = 1"}),
        ("bomb", {"b.py": "#" * 5_000_000}),
    ):
        projects[name] = [archive(name, "1", files, *metadata)]
    write_index(folder, projects)
    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kept = {f"alpha-1.10/{name}": text for name, text in first.items()}
    kept |= {"bee-two-1/b.py": c, "classic-1/c.py": d}
    yield f"http://127.0.0.1:{server.server_port}/simple", folder, kept
    server.shutdown()
    server.server_close()


EVERYTHING = "Alpha,bee.two,classic,viral,silent,wheel,broken,nowhere,up,root,twice,clash,bomb"


def config(tmp_path, index, packages=EVERYTHING, **changes):
    settings = {"packages": packages, "out": str(tmp_path / "src"), "index": index[0]}
    return fetch_pypi.Config(**settings | changes)


def test_packages_are_kept_by_licence_and_a_manifest_says_what_became_of_each(
    tmp_path, index, monkeypatch, capsys
):
    monkeypatch.setattr(fetch_pypi, "UNPACKED_BYTES", 4_000_000)
    cfg = config(tmp_path, index)
    fetch_pypi.main(cfg)
    assert texts(cfg.out) == index[2]
    assert (tmp_path / "src" / "alpha-1.10" / "LICENSE.txt").read_text() == "MIT"
    manifest = json.loads((tmp_path / "src" / "manifest.json").read_text())
    became = {}
    for name, entry in manifest.items():
        kept = entry.get("version"), entry.get("files"), entry.get("licence")
        became[name] = entry.get("left_out") or kept
    bad = dict.fromkeys(("broken", "up", "root", "twice", "clash", "bomb"), "damaged or unsafe")
    assert became == bad | {
        "Alpha": ("1.10", 3, "MIT"), "bee.two": ("1", 1, "MIT"), "classic": ("1", 1, "BSD License"),
        "viral": "no permissive licence", "silent": "no permissive licence",
        "wheel": "no source distribution", "nowhere": "unknown to the index",
    }  # fmt: skip
    assert "5 files of 3 packages; 10 left out" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.tmp"))
    assert not [*tmp_path.rglob("out.py"), *index[1].rglob("out.py")]
    # data_prep.py takes the folder, and keeps the problems of benchmarks out of it.
    monkeypatch.setattr("corpus.BENCHMARKS", ())
    rows = tmp_path / "rows"
    data_prep.main(data_prep.Python(roots=(cfg.out,), out=str(rows), vocab_size=300, workers=1))
    meta = json.loads((rows / "meta.json").read_text())
    assert meta["splits"]["train"]["documents"] == 4


def test_a_killed_run_goes_on_and_what_is_there_is_not_fetched_again(tmp_path, index):
    packages = "Alpha,bee.two,classic"
    flags = [packages, f"--index={index[0]}", f"--out={tmp_path / 'src'}"]
    process = subprocess.Popen(command("extra/fetch_pypi.py", *flags), stdout=subprocess.DEVNULL)
    while not (tmp_path / "src" / "manifest.json").exists():
        assert process.poll() is None
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    fetch_pypi.main(config(tmp_path, index, packages))
    assert texts(tmp_path / "src") == index[2]
    before = os.stat(tmp_path / "src" / "alpha-1.10" / "a.py").st_mtime_ns
    fetch_pypi.main(config(tmp_path, index, "Alpha"))
    assert os.stat(tmp_path / "src" / "alpha-1.10" / "a.py").st_mtime_ns == before


def test_another_hash_and_a_dead_index_are_one_line_and_leave_nothing(tmp_path, index):
    page = index[1] / "simple" / "classic" / "index.html"
    good = page.read_text()
    page.write_text(good.replace("sha256=", "sha256=0"))
    try:
        said = r"classic cannot be fetched \(.*\); see to that .* goes on from here"
        with pytest.raises(OSError, match=said):
            fetch_pypi.main(config(tmp_path, index, "classic"))
    finally:
        page.write_text(good)
    assert not list((tmp_path / "src").rglob("*.py"))
    with pytest.raises(OSError, match=r"classic cannot be fetched .*refused"):
        fetch_pypi.main(config(tmp_path, ("http://127.0.0.1:9/simple",), "classic"))
    fetch_pypi.main(config(tmp_path, index, "classic==1"))
    assert list(texts(tmp_path / "src")) == ["classic-1/c.py"]


def test_what_packages_may_be_named_by(tmp_path):
    path = tmp_path / "requirements.txt"
    lines = (
        "-r more.txt",
        "# text",
        "NumPy>=2 # why",
        "foo.bar[x]==1.0 \\",
        "    --hash=sha256:00",
        "",
    )
    path.write_text("\n".join([*lines, "win; sys_platform=='x'", ""]))

    def asked(packages):
        return {each.name: str(each.specifier) for each in fetch_pypi.requirements(packages)}

    assert asked(str(path)) == {"NumPy": ">=2", "foo.bar": "==1.0"}
    assert [*asked("a_b, c")] == ["a_b", "c"]
    top = [*asked("top:300")]
    assert len(top) == 300
    assert {"requests", "numpy", "boto3"} < {*top}
    for spec in ("top:0", "top:x", "not a name", "", "#"):
        with pytest.raises(ValueError, match=r"names no package|write names, or NAME==VERSION"):
            fetch_pypi.requirements(spec)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fetch_pypi, "pypi_simple", None)
    with pytest.raises(ValueError, match="pip install pypi-simple"):
        fetch_pypi.main(fetch_pypi.Config(packages="six"))


def test_the_licence_of_a_package_is_what_its_metadata_agree_on():
    def licence(text):
        return fetch_pypi.package_licence(HeaderParser().parsestr(text))

    osi = "Classifier: License :: OSI Approved"
    assert licence("License: GPL\nLicense-Expression: MIT\n") == ("MIT", True)
    assert licence(f"License: UNKNOWN\n{osi} :: MIT License\n{osi}\n") == ("MIT License", True)
    assert licence(f"License: Dual\n{osi} :: BSD License\n{osi} :: Apache Software License\n")[1]
    assert not licence(f"License: MIT\n{osi} :: GNU Lesser General Public License v3 (LGPLv3)\n")[1]
    assert not licence("License: see the file\n")[1]
    text = "Copyright 2020 X\n        .\n        Permission is hereby granted, free of charge, to\n"
    assert licence(f"License: {text}")[1]
