"""Time and memory of convert_weights.py on a checkpoint of a preset's exact shape, beside cp of the
same bytes.

    python bench/convert_speed.py --model=500m    # a try: a minute, 3 GB of disk
    python bench/convert_speed.py                 # DiffuCoder-7B's shape: a quarter of an hour, 46 GB of disk

Random bfloat16 words in the Hub's layout, four files. Each stage is a process of its own, from its
start to its end, and ends with its files on the disk (fsync); each starts with its source dropped
from the page cache. Before each way cp -r of the same source, with sync of each file, is timed.
RssAnon is memory that is the process's own, RSS also counts mapped files. Checks that every tensor
came back byte for byte. Deletes what it wrote. Writes cpu.json.
"""

import collections
import dataclasses
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from record import record

import checkpoints
import convert_weights
import model_dream as dream
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "7b"  # key of CONFIGS in model_dream.py
    repeats: int = 1  # how often all stages are run
    folder: str = ""  # folder on the disk to measure; "" is where temporary files go
    seed: int = 0  # of the random weights


def make(folder, cfg, seed, files=4):
    """A folder in the Hub's layout with random words; its bytes."""
    folder.mkdir()
    sizes = {
        convert_weights.hf_name(name): leaf.shape
        for name, leaf in checkpoints.flatten(dream.param_shapes(cfg)).items()
    }
    names = sorted(sizes)
    rng, weight_map, total = np.random.default_rng(seed), {}, 0
    for i in range(files):
        file_name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        header, start = {}, 0
        for name in names[i::files]:
            end = start + 2 * int(np.prod(sizes[name], dtype=np.int64))
            header[name] = {
                "dtype": "BF16",
                "shape": list(sizes[name]),
                "data_offsets": [start, end],
            }
            weight_map[name], start = file_name, end
        head = json.dumps(header).encode()
        with open(folder / file_name, "wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for done in range(0, start, 1 << 24):
                file.write(rng.bytes(min(1 << 24, start - done)))
        total += start
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(dream.config_to_hf(cfg)))
    return total


def forget(folder):
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(command):
    """Run a command: {"s", "cpu_s", "rss_anon_gb", "rss_gb"}, the last two its peaks, seen every 20
    ms.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started, peaks = time.perf_counter(), {"RssAnon": 0, "VmRSS": 0}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        for key, value in (line.split(":") for line in lines if line.startswith((*peaks,))):
            peaks[key] = max(peaks[key], int(value.split()[0]) * 1024)
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {process.stderr.read().strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "s": seconds,
        "cpu_s": cpu_s,
        "rss_anon_gb": peaks["RssAnon"] / 1e9,
        "rss_gb": peaks["VmRSS"] / 1e9,
    }


def copy(source, to):
    forget(source)
    result = timed(["sh", "-c", 'cp -r "$1" "$2" && find "$2" -exec sync {} +', "sh", source, to])
    shutil.rmtree(to)
    return result


def convert(source, to, *more):
    forget(source)
    if to.exists():
        forget(to)
    return timed(
        [sys.executable, ROOT / "convert_weights.py", f"--source={source}", f"--out={to}", *more]
    )


def check(first, second):
    """The tensors of two folders in the Hub's layout are equal, byte for byte."""
    first, second = convert_weights.map_files(first), convert_weights.map_files(second)
    assert first.keys() == second.keys()
    for name, array in first.items():
        other = second[name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        array, other = (x.reshape(-1).view(np.uint16) for x in (array, other))
        for i in range(0, array.size, 1 << 24):
            assert np.array_equal(array[i : i + (1 << 24)], other[i : i + (1 << 24)]), name


def main(cfg):
    folder = Path(tempfile.mkdtemp(prefix="convert_speed_", dir=cfg.folder or None))
    hub, orbax, back, copied = (folder / name for name in ("hub", "orbax", "back", "copy"))
    stages = collections.defaultdict(list)
    try:
        need = 1.02 * 6 * dream.count_params(dream.CONFIGS[cfg.model])["total"]
        free = shutil.disk_usage(folder).free
        if free < need:
            raise OSError(
                f"{folder.parent} has {free / 1e9:.3g} GB left, {need / 1e9:.3g} are needed; choose --folder"
            )
        size = make(hub, dream.CONFIGS[cfg.model], cfg.seed)
        for _ in range(cfg.repeats):
            for name, stage in (
                ("cp of safetensors", lambda: copy(hub, copied)),
                ("to Orbax", lambda: convert(hub, orbax)),
                ("verify", lambda: convert(hub, orbax, "--verify")),
                ("cp of Orbax", lambda: copy(orbax, copied)),
                ("to safetensors", lambda: convert(orbax, back)),
            ):
                stages[name].append(stage() | {"load": os.getloadavg()[0]})
                print(f"{name}: {json.dumps(stages[name][-1])}", flush=True)
            check(hub, back)
            shutil.rmtree(orbax)
            shutil.rmtree(back)
    finally:
        shutil.rmtree(folder)
    for name, beside in (
        ("to Orbax", "cp of safetensors"),
        ("to safetensors", "cp of Orbax"),
        ("verify", "cp of safetensors"),
    ):
        rates = [size / 1e9 / run["s"] for run in stages[name]]
        ratios = [cp["s"] / run["s"] for run, cp in zip(stages[name], stages[beside], strict=True)]
        record(
            "cpu",
            f"convert: {cfg.model}, {name}",
            float(np.median(rates)),
            "GB/s",
            spread=np.quantile(rates, [0.1, 0.9]).tolist() if cfg.repeats > 1 else None,
            gb=size / 1e9,
            seconds=[run["s"] for run in stages[name]],
            cpu_seconds=[run["cpu_s"] for run in stages[name]],
            cp_seconds=[run["s"] for run in stages[beside]],
            cp_cpu_seconds=[run["cpu_s"] for run in stages[beside]],
            speed_to_cp=float(np.median(ratios)),
            rss_anon_gb=max(run["rss_anon_gb"] for run in stages[name]),
            rss_gb=max(run["rss_gb"] for run in stages[name]),
            load=[run["load"] for run in stages[name]],
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
