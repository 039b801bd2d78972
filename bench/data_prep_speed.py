"""Speed of data_prep.py's tokenising against tokenizers' encode_batch alone, and its peak memory: one run, one machine.

    python bench/data_prep_speed.py                      # the standard library as text; three minutes
    python bench/data_prep_speed.py --text=stories.txt   # documents with <|endoftext|> between them
    python bench/data_prep_speed.py --pypi=top:300       # processor minutes and memory of a corpus of packages

The documents are shuffled and repeated to 20 MB. Ours is the time from the tokenizer to the last shard on disk:
reading, held-out draw, tokenising, rows, compression. encode_batch gets the same texts from memory, all at once and in
batches of 4 MB, as ours does; the faster counts. Each run is a process of its own: a tokenizer that has met the text
has its words in a cache. Memory is the peak of a process that prepares 20 MB of text and of one that prepares 200 MB.
Writes cpu.json.

With --pypi one run of data_prep.py python is measured instead: processor time of it and its workers, from the archives
(which --archives may hold already) until the documents are chosen, and to the last shard.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from record import record

import data_prep
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    text: str = ""  # text file to repeat; "" joins the .py files of the standard library
    repeats: int = 5  # timed runs of data_prep.py and of encode_batch alone, in turn
    pypi: str = ""  # packages to prepare instead of a text, as data_prep.py python --pypi takes them
    archives: str = "data/archives"  # folder that keeps their source distributions


def write_text(path, documents, megabytes):
    """Shuffled documents, over and over, each time through in another order."""
    rng, size = random.Random(0), 0
    with open(path, "w", encoding="utf-8", newline="") as file:
        while size < megabytes * 1e6:
            rng.shuffle(documents)
            for document in documents:
                size += file.write(f"{document}\n{data_prep.SEPARATOR}\n")
                if size >= megabytes * 1e6:
                    break


# Prints seconds and the peak of memory in MiB; without a tokenizer one is trained.
PREPARE = """
import contextlib, resource, sys, time
import data_prep
cfg = data_prep.Text(source=sys.argv[1], out=sys.argv[2], tokenizer=sys.argv[3])
with contextlib.redirect_stdout(None):
    started = time.perf_counter()
    data_prep.main(cfg)
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""

ENCODE = """
import sys, time
from pathlib import Path
from tokenizers import Tokenizer
import data_prep
texts = Path(sys.argv[1]).read_text(encoding="utf-8").split(data_prep.SEPARATOR)
texts = filter(None, map(str.strip, texts))
batches = list(data_prep.batched(texts, float(sys.argv[2]), lambda text: len(text.encode())))
tokenizer = Tokenizer.from_file(sys.argv[3])
started = time.perf_counter()
for batch in batches:
    tokenizer.encode_batch(batch, add_special_tokens=False)
print(time.perf_counter() - started)
"""


# Prints processor seconds and MiB of the parent and of its largest worker: when documents are chosen, and at the end.
PACKAGES = """
import resource, sys
import corpus, data_prep
def usage():
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts), *(part.ru_maxrss / 1024 for part in parts)
def gather(*args, gather=corpus.gather):
    groups = gather(*args)
    chosen.extend(usage())
    return groups
chosen, corpus.gather = [], gather
data_prep.main(data_prep.Python(pypi=sys.argv[1], archives=sys.argv[2], out=sys.argv[3]))
print(*chosen, *usage())
"""


def packages(cfg):
    """One run on packages, recorded with what it kept of them."""
    with tempfile.TemporaryDirectory(dir=Path(cfg.archives).parent) as folder:
        out = Path(folder) / "out"
        numbers = measured(PACKAGES, cfg.pypi, Path(cfg.archives).absolute(), out)
        record_packages(cfg, out, "its documents are chosen", *numbers[:3])
        meta = json.loads((out / "meta.json").read_text())
        tokens = {"tokens": sum(total["tokens"] for total in meta["splits"].values()), "dropped": meta["dropped"]}
        record_packages(cfg, out, "its shards are written", *numbers[3:], **tokens)


def record_packages(cfg, out, moment, cpu_s, parent_mib, worker_mib, **more):
    listed = json.loads((out / "manifest.json").read_text())["packages"]
    kept = [package for package in listed if package["files"]]
    record(
        "cpu",
        f"data_prep --pypi={cfg.pypi}: processor time until {moment}",
        cpu_s / 60,
        "minutes",
        packages=len(kept),
        archive_bytes=sum(package["size"] or 0 for package in listed),
        python_bytes=sum(package["python_bytes"] for package in kept),
        documents=sum(package["files"] for package in kept),
        bytes=sum(package["bytes"] for package in kept),
        peak_mib={"parent": parent_mib, "largest worker": worker_mib},
        load=os.getloadavg()[0],
        **more,
    )


def measured(code, *args):
    """The numbers that a process of its own prints last."""
    command = [sys.executable, "-c", code, *map(str, args)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return list(map(float, printed.splitlines()[-1].split()))


def main(cfg):
    if cfg.pypi:
        packages(cfg)
        return
    if cfg.text:
        documents = [text.strip() for text in Path(cfg.text).read_text(encoding="utf-8").split(data_prep.SEPARATOR)]
    else:
        paths = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
        paths = sorted(path for path in paths if not data_prep.NOT_THE_LIBRARY & {*path.parts})
        documents = [path.read_text(encoding="utf-8", errors="replace").replace("\0", "").strip() for path in paths]
    documents = [document for document in documents if document]
    with tempfile.TemporaryDirectory() as folder:
        folder, peak_mib = Path(folder), {}
        # Memory: a tokenizer is trained, as for a user who has none.
        for megabytes in (20, 200):
            source = folder / f"{megabytes}.txt"
            write_text(source, documents, megabytes)
            _, peak_mib[megabytes] = measured(PREPARE, source, folder / f"memory{megabytes}", "")
        # Speed: ours and the library alone in turn, for the machine may be busy at times.
        source, tokenizer = folder / "20.txt", folder / "memory20" / "tokenizer.json"
        seconds = {"ours": [], "encode_batch": [], "encode_batch, 4 MB at a time": []}
        for repeat in range(cfg.repeats):
            seconds["ours"].append(measured(PREPARE, source, folder / f"run{repeat}", tokenizer)[0])
            for name, limit in ("encode_batch", "inf"), ("encode_batch, 4 MB at a time", data_prep.BATCH_BYTES):
                seconds[name] += measured(ENCODE, source, limit, tokenizer)
        tokens = json.loads((folder / "run0" / "meta.json").read_text())["splits"]["train"]["tokens"]
    kind = "stories" if cfg.text else "Python source"
    best_s = min(np.median(seconds[key]) for key in seconds if key != "ours")
    record(
        "cpu",
        f"data_prep {kind}: its tokenising speed / that of encode_batch alone",
        best_s / np.median(seconds["ours"]),
        "ratio",
        spread=np.quantile(best_s / np.array(seconds["ours"]), [0.1, 0.9]).tolist(),
        seconds=seconds,
        tokens=tokens,
        load=os.getloadavg()[0],
    )
    name = f"data_prep {kind}: peak memory of 200 MB of text less that of 20 MB"
    record("cpu", name, peak_mib[200] - peak_mib[20], "MiB", peak_mib=peak_mib)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
