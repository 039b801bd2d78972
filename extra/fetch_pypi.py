"""Fetch the Python source of packages from a package index, with their licences: a folder for
data_prep.py --roots.

    # the most downloaded packages, 560 MB of archives; needs: pip install pypi-simple
    python extra/fetch_pypi.py top:300
    # a mirror, as pip is set up
    python extra/fetch_pypi.py requirements.txt --index=$(pip config get global.index-url)

Copies .py files and licence texts of the newest source distribution with a permissive licence,
without vendored packages and test data. Writes --out: a folder NAME-VERSION for each package, which
appears whole, and manifest.json: version, licence and number of files, or why it was left out. The
same command goes on with a run that was stopped.
"""

import contextlib
import dataclasses
import gzip
import re
import sys
import tarfile
import tempfile
import zlib
from email.parser import BytesHeaderParser
from pathlib import Path

import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import corpus
import runs

try:
    import pypi_simple
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version
    from requests.adapters import HTTPAdapter, Retry
except ImportError:
    pypi_simple = None

ARCHIVE_BYTES = 100_000_000  # larger archives hold data or other languages
UNPACKED_BYTES = 4_000_000_000  # an archive that unpacks to more is a trap
FILE_BYTES = 1 << 24  # larger files hold data
# Folders of other people's code, and of tests, below which only the tests themselves stay.
SKIPPED = r"/(_?vendor[-\w]*|third_?party|3rd_?party|_?extern(al)?s?|site-packages|node_modules)/"
SKIPPED += r"|/(tests?|test_?data|idle_test)/(?!(.*/)?(test_\w*|\w*_tests?|tests?|conftest)\.py$)"
# names that leave a folder, or are too long
OUTSIDE = r"/|(.*/)?(/|\.\.(/|$)|[^/]{250})|.{1000}"


@dataclasses.dataclass(frozen=True)
class Config:
    # top:N, names or NAME==VERSION with commas, or a requirements file (.txt)
    packages: tyro.conf.Positional[str] = ""
    out: str = "data/pypi_src"  # folder to write
    index: str = "https://pypi.org/simple"  # package index with the simple API


def main(cfg):
    if not pypi_simple:
        raise ValueError(
            "fetch_pypi.py needs the library pypi-simple; install it: pip install pypi-simple"
        )
    wanted = requirements(cfg.packages)
    out = Path(cfg.out)
    manifest = out / "manifest.json"
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / ".lock"), pypi_simple.PyPISimple(cfg.index) as client:
        client.s.mount("https://", HTTPAdapter(max_retries=Retry(3, backoff_factor=1)))
        entries = runs.read_json(manifest) if manifest.exists() else {}
        for requirement in tqdm(wanted, "fetching", unit=" packages", disable=None):
            if "files" not in entries.get(str(requirement), {}):  # what was left out is tried again
                entries[str(requirement)] = fetch(client, requirement, out)
                runs.write(manifest, entries)
    files = [entry["files"] for entry in entries.values() if "files" in entry]
    print(
        f"{cfg.out}: {sum(files):,} files of {len(files):,} packages; "
        f"{len(entries) - len(files)} left out"
    )


def requirements(packages):
    """[Requirement] of what the command line names."""
    lines = packages.split(",")
    if packages.endswith(".txt"):
        lines = runs.as_path(packages).read_text("utf-8-sig", errors="replace").splitlines()
    if packages.startswith("top:"):
        # after two lines of comments
        ranking = Path(__file__).with_name("pypi_top.txt").read_text().splitlines()[2:]
        lines = ranking[: int(packages[4:])] if packages[4:].isdigit() else []
    lines = [re.sub(r"(^|\s)#.*|\s--hash.*|\\", "", line).strip() for line in lines]
    try:
        # -r, --hash and the like
        wanted = [Requirement(line) for line in lines if line and not line.startswith("-")]
    except ValueError as error:
        raise ValueError(
            f"{packages}: {runs.first_line(error)}; write names, or NAME==VERSION"
        ) from None
    if not wanted:
        raise ValueError(
            f"{packages!r} names no package; "
            "write top:1 to top:2000, numpy,requests or requirements.txt"
        )
    return [each for each in wanted if not each.marker or each.marker.evaluate()]


def fetch(client, requirement, out):
    """What the manifest says of a package: version, licence and files, or why it is left out."""
    name = canonicalize_name(requirement.name)
    found = {}
    try:
        for package in client.get_project_page(name, timeout=60).packages:
            if (
                package.filename.endswith(".tar.gz")
                and package.package_type == "sdist"
                and not package.is_yanked
            ):
                with contextlib.suppress(InvalidVersion):
                    found[Version(package.version)] = package
        if not (version := max(requirement.specifier.filter(found), default=None)):
            return {"left_out": "no source distribution"}
        package = found[version]
        entry = {"version": str(version), "archive": package.filename, "digests": package.digests}
        size = package.size
        if not size:
            answer = client.s.head(package.url, timeout=60, allow_redirects=True)
            size = int(answer.headers.get("Content-Length", 0))
        if size > ARCHIVE_BYTES:
            return entry | {"left_out": "huge"}
        with tempfile.TemporaryDirectory() as temporary:
            archive = Path(temporary) / "archive"
            client.download_package(package, archive, timeout=60)  # and checks its hash
            return entry | copy(archive, out / f"{name}-{version}")
    except pypi_simple.NoSuchProjectError:
        return {"left_out": "unknown to the index"}
    except (OSError, ValueError) as error:  # of the network, a hash, the disk
        raise OSError(
            f"{name} cannot be fetched ({runs.first_line(error)}); "
            "see to that or name another --index; the same command goes on from here"
        ) from None


def copy(archive, folder):
    """Copy the code and licence texts of an archive to a folder: {"licence", "files"}, or why it is
    left out.
    """
    members = {}
    total = 0
    try:
        with tarfile.open(archive, "r:gz") as file:
            for member in file:
                total += member.size
                if total > UNPACKED_BYTES or re.match(OUTSIDE, member.name):
                    raise ValueError(
                        f"it unpacks to {total:,} bytes or more, "
                        f"one of its files is {member.name!r:.99}"
                    )
                if member.isreg() and "/" in member.name and member.size <= FILE_BYTES:
                    members[member.name] = member
            info = next((name for name in members if re.fullmatch("[^/]+/PKG-INFO", name)), None)
            text = file.extractfile(members[info]).read() if info else b""
            licence, permissive = package_licence(BytesHeaderParser().parsebytes(text))
            if not permissive:
                return {"licence": licence, "left_out": "no permissive licence"}
            code = {
                name for name in members if name.endswith(".py") and not re.search(SKIPPED, name)
            }
            with runs.new_folder(folder) as partial:
                for name, member in members.items():
                    if name in code or re.search("(?i)/(licen[cs]e|copying|notice)[^/]*$", name):
                        target = partial / name.partition("/")[2]  # without the folder NAME-VERSION
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(file.extractfile(member).read())
        return {"licence": licence, "files": len(code)}
    except (
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        ValueError,
        # a file of the archive has the name of a folder
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
    ) as error:
        return {"left_out": "damaged or unsafe", "why": runs.first_line(error)}


def package_licence(metadata):
    """(what PKG-INFO says of the licence, whether that is permissive)."""
    if expression := metadata.get("License-Expression"):
        return expression, corpus.permits(expression)
    # some put the text of a licence here
    names = [" ".join(str(metadata.get("License", "")).split())[:300]]
    names += [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier", [])
        if text.startswith("License :")
    ]
    names = [
        name for name in dict.fromkeys(names) if name.lower() not in ("", "unknown", "osi approved")
    ]
    text = "; ".join(names)
    return text[:100], any(map(corpus.permits, names)) and not corpus.RESTRICTED.search(
        text.lower()
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
