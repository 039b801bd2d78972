"""Speed of data_prep.py's tokenising against tokenizers' encode_batch alone, and its peak memory:
one run, one machine.

    python bench/data_prep_speed.py                      # the standard library as text; three minutes
    python bench/data_prep_speed.py --text=stories.txt   # documents with <|endoftext|> between them
    python bench/data_prep_speed.py --roots=data/pypi_src    # processor minutes and memory of packages of fetch_pypi.py

The documents are shuffled and repeated to 20 MB. Ours is the time from the tokenizer to the last
shard on disk: reading, held-out draw, tokenising, rows, compression. encode_batch gets the same
texts from memory, all at once and in batches of 4 MB, as ours does; the faster counts. Each run is
a process of its own: a tokenizer that has met the text has its words in a cache. Memory is the peak
of a process that prepares 20 MB of text and of one that prepares 200 MB. Writes cpu.json.

With --roots one run of data_prep.py python is measured instead: processor time of it and its
workers until the documents are chosen, and to the last shard.
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

import corpus
import data_prep
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    text: str = ""  # text file to repeat; "" joins the .py files of the standard library
    repeats: int = 5  # timed runs of data_prep.py and of encode_batch alone, in turn
    roots: str = ""  # folder of .py files to prepare instead of a text


def write_text(path, documents, megabytes):
    """Shuffled documents, over and over, each time through in another order."""
    rng, size = random.Random(0), 0
    with open(path, "w", encoding="utf-8", newline="") as file:
        while size < megabytes * 1e6:
            rng.shuffle(documents)
            for document in documents:
                size += file.write(f"{document}\n{corpus.SEPARATOR}\n")
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
import corpus
texts = Path(sys.argv[1]).read_text(encoding="utf-8").split(corpus.SEPARATOR)
texts = filter(None, map(str.strip, texts))
batches = list(corpus.batched(texts, float(sys.argv[2]), lambda text: len(text.encode())))
tokenizer = Tokenizer.from_file(sys.argv[3])
started = time.perf_counter()
for batch in batches:
    tokenizer.encode_batch(batch, add_special_tokens=False)
print(time.perf_counter() - started)
"""


# Prints processor seconds and MiB of the parent and of its largest worker: when documents are
# chosen, and at the end.
CORPUS = """
import resource, sys
import corpus, data_prep
def usage():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used), *(part.ru_maxrss / 1024 for part in used)
def gather(*args):
    groups = corpus.gather(*args)
    chosen.extend(usage())
    return groups
chosen, (_, *readers) = [], data_prep.SOURCES[data_prep.Python]
data_prep.SOURCES[data_prep.Python] = gather, *readers
data_prep.main(data_prep.Python(roots=(sys.argv[1],), out=sys.argv[2]))
print(*chosen, *usage())
"""


def measure_corpus(cfg):
    """One run on a folder of .py files."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        numbers = measured(CORPUS, Path(cfg.roots).absolute(), out)
        meta = json.loads((out / "meta.json").read_text())
    total = {
        key: sum(split[key] for split in meta["splits"].values())
        for key in ("documents", "bytes", "tokens")
    }
    for moment, (cpu_s, *peak_mib) in {
        "documents are chosen": numbers[:3],
        "shards are written": numbers[3:],
    }.items():
        record(
            "cpu",
            f"data_prep --roots={Path(cfg.roots).name}: processor time until its {moment}",
            cpu_s / 60,
            "minutes",
            source_bytes=sum(path.stat().st_size for path in Path(cfg.roots).rglob("*.py")),
            peak_mib=dict(zip(("parent", "largest worker"), peak_mib, strict=True)),
            dropped=meta["dropped"],
            load=os.getloadavg()[0],
            **total,
        )


def measured(code, *args):
    """The numbers that a process of its own prints last."""
    command = [sys.executable, "-c", code, *map(str, args)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return list(map(float, printed.splitlines()[-1].split()))


def main(cfg):
    if cfg.roots:
        measure_corpus(cfg)
        return
    if cfg.text:
        documents = [
            text.strip()
            for text in Path(cfg.text).read_text(encoding="utf-8").split(corpus.SEPARATOR)
        ]
    else:
        paths = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
        paths = sorted(path for path in paths if not corpus.NOT_THE_LIBRARY & {*path.parts})
        documents = [
            path.read_text(encoding="utf-8", errors="replace").replace("\0", "").strip()
            for path in paths
        ]
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
            for name, limit in (
                ("encode_batch", "inf"),
                ("encode_batch, 4 MB at a time", data_prep.BATCH_BYTES),
            ):
                seconds[name] += measured(ENCODE, source, limit, tokenizer)
        tokens = json.loads((folder / "run0" / "meta.json").read_text())["splits"]["train"][
            "tokens"
        ]
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
