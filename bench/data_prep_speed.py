"""Speed of data_prep.py's tokenising against tokenizers' encode_batch alone, and its peak memory: one run, one machine.

    python bench/data_prep_speed.py                              # the standard library as text; three minutes
    python bench/data_prep_speed.py --text=stories.txt                  # documents with <|endoftext|> between them

The documents are shuffled and repeated to 20 MB. Ours is the time from the tokenizer to the last shard on disk:
reading, held-out draw, tokenising, rows, compression. encode_batch gets the same texts from memory, all at once
and in batches of 4 MB, as ours does; the faster counts. Memory is the peak of a process that prepares 20 MB of text and
of one that prepares 200 MB. Writes cpu.json.
"""

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import tyro
from record import record
from tokenizers import Tokenizer

import data_prep


@dataclasses.dataclass(frozen=True)
class Config:
    text: str = ""  # text file to repeat; "" joins the standard library's .py files
    repeats: int = 3  # timed runs of each, in turn


MEASURE = """
import resource, sys
import data_prep
data_prep.main(data_prep.Config(source=sys.argv[1], out=sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


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


def prepared(source, out):
    """Seconds from the tokenizer on, for a folder that has one; nothing of it but the tokenizer is kept."""
    cfg = data_prep.Config(source=str(source), out=str(out), tokenizer=str(out.parent / "tokenizer.json"))
    with contextlib.redirect_stdout(None):
        started = time.perf_counter()
        data_prep.main(cfg)
        return time.perf_counter() - started


def main(cfg):
    if cfg.text:
        documents = [text.strip() for text in Path(cfg.text).read_text(encoding="utf-8").split(data_prep.SEPARATOR)]
    else:
        paths = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
        paths = sorted(path for path in paths if not data_prep.NOT_THE_LIBRARY & {*path.parts})
        documents = [path.read_text(encoding="utf-8", errors="replace").replace("\0", "").strip() for path in paths]
    documents = [document for document in documents if document]
    name = "stories" if cfg.text else "Python source"
    with tempfile.TemporaryDirectory() as folder:
        folder, peak_mib = Path(folder), {}
        for megabytes in (20, 200):
            source = folder / f"{megabytes}.txt"
            write_text(source, documents, megabytes)
            command = [sys.executable, "-c", MEASURE, str(source), str(folder / f"memory{megabytes}")]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            peak_mib[megabytes] = float(done.stdout.split()[-1])
        (folder / "tokenizer.json").write_bytes((folder / "memory20" / "tokenizer.json").read_bytes())
        texts = [text.strip() for text in (folder / "20.txt").read_text(encoding="utf-8").split(data_prep.SEPARATOR)]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        batches, size = [[]], 0
        for text in filter(None, texts):
            if size >= data_prep.BATCH_BYTES:
                batches, size = [*batches, []], 0
            batches[-1].append(text)
            size += len(text.encode())
        seconds = {"ours": [], "encode_batch": [], "encode_batch, 4 MB at a time": []}
        for repeat in range(cfg.repeats):
            seconds["ours"].append(prepared(folder / "20.txt", folder / f"run{repeat}"))
            started = time.perf_counter()
            tokenizer.encode_batch([text for batch in batches for text in batch], add_special_tokens=False)
            seconds["encode_batch"].append(time.perf_counter() - started)
            started = time.perf_counter()
            for batch in batches:
                tokenizer.encode_batch(batch, add_special_tokens=False)
            seconds["encode_batch, 4 MB at a time"].append(time.perf_counter() - started)
        tokens = json.loads((folder / "run0" / "meta.json").read_text())["splits"]["train"]["tokens"]
    best_s = min(np.median(seconds[key]) for key in seconds if key != "ours")
    record(
        "cpu",
        f"data_prep {name}: its tokenising speed / that of encode_batch alone",
        best_s / np.median(seconds["ours"]),
        "ratio",
        spread=np.quantile(best_s / np.array(seconds["ours"]), [0.1, 0.9]).tolist(),
        seconds=seconds,
        tokens=tokens,
        load=os.getloadavg()[0],
    )
    record(
        "cpu",
        f"data_prep {name}: peak memory of 200 MB of text less that of 20 MB",
        peak_mib[200] - peak_mib[20],
        "MiB",
        peak_mib=peak_mib,
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
