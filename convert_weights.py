"""Convert Dream checkpoints: Hugging Face safetensors to Orbax, and back; the bytes of every tensor stay what they are.

    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder         # a folder from the Hub
    python convert_weights.py --source=apple/DiffuCoder-7B-Instruct --out=out/diffucoder   # downloads it first
    python convert_weights.py --source=out/diffucoder --out=out/diffucoder_hf              # and back again
    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder --verify=True    # compares both

Reads a folder, or a repository of the Hub (token from HF_TOKEN, or what `hf auth login` stored). Which way it goes
follows from what the source is. Writes --out under another name and renames it when it is whole:

    Orbax: config.json, tokenizer files, meta.json, params/ (Zarr in chunks, so that each device reads its own part)
    Hub:   config.json, tokenizer files, model-0000i-of-0000n.safetensors, model.safetensors.index.json

Tensors are not copied on their way to Orbax: it is handed views of the mapped files. On the way back, and to verify, a
quarter of a gigabyte, or one tensor, is read at a time.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import io
import json
import logging
import os
import shutil
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import tyro
from orbax.checkpoint import type_handlers

import model_dream as dream


@dataclasses.dataclass(frozen=True)
class Config:
    source: str = ""  # folder in the Hub's layout, folder of this script, or a repository of the Hub as OWNER/NAME
    out: str = ""  # folder to write
    revision: str = "main"  # of a repository
    shard_gb: float = 5.0  # largest safetensors file
    verify: bool = False  # read --source and --out again and compare every tensor


CHUNK_BYTES = 64 << 20  # of the Zarr arrays
READ_BYTES = 256 << 20  # read from them at a time
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


# ---- tensors -------------------------------------------------------------------------------------------------------


def one_dtype(arrays, where):
    dtypes = sorted({str(array.dtype) for array in arrays.values()})
    if len(dtypes) != 1:
        raise ValueError(f"{where} holds tensors of several dtypes: {', '.join(dtypes)}")
    return dtypes[0]


def word_sum(array):
    """Sum of an array's words modulo 2^32, as model_dream.bit_sums; changes with any one bit."""
    words = array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    return int(sum(int(words[i : i + (1 << 22)].sum(dtype=np.uint64)) for i in range(0, words.size, 1 << 22)) % 2**32)


# ---- progress and whole folders ------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(folder, total):
    """Print how many bytes lie in a folder, and when the total is reached at this pace, every few seconds."""
    done, started = threading.Event(), time.time()

    def watch():
        while not done.wait(5):
            size = 0
            for path in folder.rglob("*"):
                with contextlib.suppress(OSError):  # renamed meanwhile
                    size += path.stat().st_size
            seconds = time.time() - started
            left = seconds * max(0, total - size) / max(1, size)
            print(f"{size / 1e9:.1f} of {total / 1e9:.1f} GB | {size / 1e9 / seconds:.2f} GB/s | {left:.0f} s left")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def whole(out, size):
    """A folder to write in, which gets its name when all went well; what an interrupted run left is removed."""
    if out.exists():
        sys.exit(f"{out} exists; delete it or choose another --out")
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run is writing {out}; wait for it or choose another --out")
        print(f"{partial} was left by an interrupted run; starting over", flush=True)
        shutil.rmtree(partial)
        os.close(lock)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < size * 1.01:
        sys.exit(f"{out.parent} has {free / 1e9:.1f} GB left, {out.name} needs {size / 1e9:.1f}")
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield partial
    except BaseException:
        for _ in range(50):  # threads of a failed Orbax save still write
            shutil.rmtree(partial, ignore_errors=True)
            if not partial.exists():
                break
            time.sleep(0.1)
        raise
    for path in [*partial.rglob("*"), partial]:  # on disk before the name says that it is whole
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    os.rename(partial, out)
    os.close(lock)


def copy_small_files(source, out, config):
    """config.json and the files of the tokenizer."""
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


# ---- the two ways --------------------------------------------------------------------------------------------------


def checkpointer():
    """Orbax, told not to copy, not to compress (bfloat16 weights hardly do), and to write plain files."""
    no_copies = type_handlers.create_type_handler_registry(
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False))
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=no_copies)
    return ocp.Checkpointer(handler)


def to_orbax(source, out):
    """Write the Orbax form of a folder in the Hub's layout."""
    cfg, arrays = dream.config_from_hf(source), dream.open_hf(source)
    dream.check_shapes({name: array.shape for name, array in arrays.items()}, cfg, source)
    dtype, total = one_dtype(arrays, source), sum(array.nbytes for array in arrays.values())
    flat = {ours: arrays[dream.hf_name(ours)] for ours in dream.flatten(dream.param_shapes(cfg))}
    print(f"{len(flat)} tensors, {sum(array.size for array in flat.values()):,} parameters in {dtype}", flush=True)
    with whole(out, total) as partial, concurrent.futures.ThreadPoolExecutor(1) as thread:
        sums = thread.submit(lambda: {name: word_sum(array) for name, array in flat.items()})
        save_args = dream.unflatten({name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in flat})
        with progress(partial, total), checkpointer() as orbax:
            orbax.save(partial / "params", args=ocp.args.PyTreeSave(dream.unflatten(flat), save_args=save_args))
        meta = {"dtype": dtype, "parameters": sum(array.size for array in flat.values()), "sums": sums.result()}
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        copy_small_files(source, partial, json.loads((source / "config.json").read_text()))


def read_tensors(source, sizes):
    """(name, array) of an Orbax folder in the order of sizes, {name: bytes}: READ_BYTES, or one tensor, at a time."""
    batch, waiting, last = [], 0, [*sizes][-1]
    for name in sizes:
        batch.append(name)
        waiting += sizes[name]
        if waiting < READ_BYTES and name != last:
            continue
        restore_args = dream.unflatten({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in batch})
        with checkpointer() as orbax:
            item = dream.unflatten(dict.fromkeys(batch, 0))
            arguments = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            arrays = dream.flatten(orbax.restore((source / "params").absolute(), args=arguments))
        yield from ((name, arrays.pop(name)) for name in batch)
        batch, waiting = [], 0


def to_hub(source, out, shard_gb):
    """Write the Hub's layout of an Orbax folder."""
    cfg, meta = dream.config_from_hf(source), read_meta(source)
    dtype = next((name for name, known in dream.DTYPES.items() if str(known) == meta["dtype"]), None)
    if not dtype:
        sys.exit(f"{source} is in {meta['dtype']}, not one of {', '.join(map(str, dream.DTYPES.values()))}")
    shapes = {name: leaf.shape for name, leaf in dream.flatten(dream.param_shapes(cfg)).items()}
    sizes = {name: dream.DTYPES[dtype].itemsize * int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
    shards, room = [], 0
    for name in sorted(shapes, key=hub_order):
        if not shards or sizes[name] > room:
            shards, room = [*shards, []], shard_gb * 1e9
        shards[-1].append(name)
        room -= sizes[name]
    total, weight_map = sum(sizes.values()), {}
    print(
        f"{len(shapes)} tensors, {meta['parameters']:,} parameters in {meta['dtype']}, {len(shards)} files", flush=True
    )
    with whole(out, total) as partial, progress(partial, total):
        for i, names in enumerate(shards, 1):
            one = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            header, start = {"__metadata__": {"format": "pt"}}, 0
            for name in names:
                offsets = [start, start := start + sizes[name]]
                header[dream.hf_name(name)] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": offsets}
            head = json.dumps(header, separators=(",", ":")).encode()
            head += b" " * (-len(head) % 8)
            with open(partial / one, "wb") as file:
                file.write(struct.pack("<Q", len(head)) + head)
                for name, array in read_tensors(source, {name: sizes[name] for name in names}):
                    if word_sum(array) != meta["sums"].get(name) or array.shape != shapes[name]:
                        raise ValueError(f"{source} is corrupted: {name} is not what was saved")
                    array.reshape(-1).view(np.uint8).tofile(file)
            weight_map |= {dream.hf_name(name): one for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        copy_small_files(source, partial, json.loads((source / "config.json").read_text()))


def hub_order(name):
    """Embedding, layers by number, norm, head."""
    parts = name.split(".")
    first = {"embed_tokens": 0, "layers": 1, "norm": 2, "lm_head": 3}[parts[0]]
    return first, int(parts[1]) if first == 1 else 0, name


def read_meta(folder):
    try:
        meta = json.loads((folder / "meta.json").read_text())
        return {key: meta[key] for key in ("dtype", "parameters", "sums")}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder}/meta.json is damaged; convert the checkpoint again") from None


def verify(source, out):
    """Compare names, shapes, dtypes and all words of two folders, one of each kind; ValueError naming what differs."""
    hub, orbax = (out, source) if is_orbax(source) else (source, out)
    arrays, meta, wrong = dream.open_hf(hub), read_meta(orbax), []
    cfg = dream.config_from_hf(hub)
    if cfg != dream.config_from_hf(orbax):
        raise ValueError(f"the config.json of {hub} and {orbax} describe different models")
    dream.check_shapes({name: array.shape for name, array in arrays.items()}, cfg, hub)
    count, sizes = 0, {name: arrays[dream.hf_name(name)].nbytes for name in dream.flatten(dream.param_shapes(cfg))}
    for name, ours in read_tensors(orbax, sizes):
        theirs = arrays[dream.hf_name(name)]
        words = [x.reshape(-1).view(np.uint8) for x in (theirs, ours)]
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape or not np.array_equal(*words):
            wrong.append(name)
        if word_sum(ours) != meta["sums"].get(name):
            wrong.append(f"{name} (checksum)")
        count += ours.size
    if wrong or count != meta["parameters"]:
        raise ValueError(f"{source} and {out} differ: {', '.join(wrong) or 'number of parameters'}")
    print(f"verified: {len(arrays)} tensors, {count:,} parameters, every byte equal")


def is_orbax(folder):
    return (folder / "meta.json").is_file() and (folder / "params").is_dir()


def fetch(repository, revision):
    """Download a repository of the Hub into its cache; its folder."""
    import huggingface_hub

    patterns = ["*.safetensors", "*.json", "merges.txt", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError, OSError) as error:
        sys.exit(f"{repository} cannot be downloaded: {str(error).splitlines()[0]}")


def main(cfg):
    if not cfg.source or not cfg.out:
        sys.exit("name both: --source=FOLDER_OR_REPOSITORY --out=FOLDER")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    source, out = Path(cfg.source), Path(cfg.out)
    if not source.exists():
        if cfg.source.count("/") != 1 or cfg.source.startswith((".", "/")):
            sys.exit(f"{source} does not exist, and is no repository of the Hub (OWNER/NAME)")
        source = fetch(cfg.source, cfg.revision)
    started = time.time()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            if not (cfg.verify and out.exists()):
                if is_orbax(source):
                    to_hub(source, out, cfg.shard_gb)
                else:
                    to_orbax(source, out)
                seconds = time.time() - started
                size = sum(path.stat().st_size for path in out.rglob("*"))
                print(f"wrote {out}: {size / 1e9:.2f} GB in {seconds:.0f} s, {size / 1e9 / seconds:.2f} GB/s")
            if cfg.verify:
                verify(source, out)
        except Exception as error:  # Orbax raises nothing narrower for a full disk or a file that was cut short
            print(str(error).splitlines()[0], file=sys.__stderr__, flush=True)
            os._exit(1)  # threads of a failed Orbax call print tracebacks until the process ends


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
    except KeyboardInterrupt:
        sys.exit(130)
