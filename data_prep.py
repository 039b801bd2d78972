"""Turn text into a tokenizer and token shards, which the trainers read.

    python data_prep.py                                             # this Python's standard library: 12 MB, 10 s
    python data_prep.py text stories.txt --out=data/stories         # documents with <|endoftext|> between them
    python data_prep.py tinystories                                 # a download; needs: pip install datasets
    python data_prep.py python --roots ~/src ~/work --out=data/mine    # all .py files below these folders
    python data_prep.py python --tokenizer=qwen/tokenizer.json --fim_rate=0.5 --out=data/fim
    python data_prep.py python --roots shards --column=content --benchmarks HumanEval.jsonl.gz --out=data/rows
    python data_prep.py python --pypi=top:300 --out=data/pypi       # source of 300 packages: a download of 560 MB
    python data_prep.py python --hf=NAME:python --out=data/hf       # a data set of Hugging Face, as it streams
    python data_prep.py pairs pairs.jsonl --eos_to=64 --out=data/pairs    # prompts and responses, for Dream
    python data_prep.py pairs holes.jsonl --edit_rate=0.5 --out=data/holes    # with a "suffix": holes of any length
    python data_prep.py pairs pairs.jsonl --chat --tokenizer=out/diffucoder/tokenizer.json --out=data/chat
    python data_prep.py parquet --roots shards --tokenizer=qwen/tokenizer.json --seq_len=4096 --out=data/long

python drops generated, minified, huge, non-UTF-8 and unparsable files, exact and near duplicates, and holds some files
out. Its documents are .py files, the rows of a column of .parquet and .jsonl files or of a data set, or the source of
packages. Of the last three it drops, too, what is not under a permissive licence, and what shares ten words in a row
with a problem of HumanEval or MBPP; corpus.py, which does all this, says more. What is kept of them stands in
--out/.rows until the run ends, and --out/manifest.json names the packages.

text splits files of any size at <|endoftext|>. pairs reads lines {"prompt": TEXT, "response": TEXT}; a "suffix" that
follows the response is given as the prompt is, so that a Dream learns to fill holes, and with --edit_rate to say how
long they are. parquet packs the column input_ids of Parquet files (rows of any length; documents end with EOS and may
run over row borders), one training shard for each input file. Without --tokenizer a byte-level BPE is trained on the
training documents.

Packed rows, for PythonCoder and Dream, are filled with documents that follow each other, each ended by EOS. Padded
rows, for MDLM, start each document in a row of its own: BOS, tokens, EOS, then PAD; a long one goes on in the next
rows. Rows of pairs hold whole pairs, and a pair longer than a row is left out.

Writes --out: tokenizer.json, train/00000.parquet, heldout/00000.parquet and so on (columns input_ids, segments and
positions, of pairs also fixed, 1 where a token is of no response, 2 where only MASK is ever seen, see edit: int32 lists
of seq_len) and, last of all, meta.json (special ids, counts, shards and their hashes, for padded rows how many
documents have which length): its presence means that all is there. The same command goes on with a run that was stopped
or killed, and ends with the same bytes as a run that was not. With --chat the model's tokenizer_config.json and
chat_template.jinja go along. rows.py reads such a folder.

Axes: N documents, T tokens, R rows, L row length, P hash functions, V vocabulary.
"""

import bisect
import codecs
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import sys
import sysconfig
import time
import typing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

import corpus
import runs
from corpus import Item, batched, draw
from rows import BLOCK_TOKENS, COLUMNS, EDIT, packed_blocks, pad_rows, pair_rows, token_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    out: str = "data/python"  # folder to write
    tokenizer: str = ""  # tokenizer.json to use; "" trains one on the training documents
    eos: str = "<|endoftext|>"  # the tokenizer's token that ends a document in packed rows; padded rows have <eos>
    seq_len: int = 0  # tokens in a row; 0 is 2048 for packed rows, 256 for padded ones
    heldout: float = 0.02  # fraction of the documents that is held out for evaluation
    shard_bytes: int = 16_000_000  # bytes of text that go into one shard; 16 MB are about 5 M tokens
    workers: int = 0  # processes that read files and threads that tokenise; 0 means all cores
    seed: int = 0  # draws which documents are held out, their order and the fill-in-the-middle cuts

    # No flags, but values for the sources that have no such flag: meta.json records most of them.
    rows, vocab_size, fim_rate, eos_to, edit_rate, max_bytes = "packed", 8192, 0.0, 1, 0.0, 1_000_000
    chat, column, benchmarks, hf, pypi, spm_rate, host, hosts = False, "", (), "", "", 0.0, 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents(Shards):
    vocab_size: int = 8192  # size of the tokenizer that is trained; at least 261, for 256 bytes and 5 special tokens
    rows: typing.Literal["packed", "padded"] = "padded"  # packed for PythonCoder and Dream, padded for MDLM
    fim_rate: float = 0.0  # fraction of the training documents rearranged for fill-in-the-middle, in packed rows
    spm_rate: float = 0.5  # fraction of the rearranged documents that begin with their suffix (SPM), not prefix (PSM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Python(Documents):
    """Python files, rows of a column, packages or a data set; by default this Python's standard library."""

    roots: tuple[str, ...] = ()  # folders that are searched for .py files, or files; none is the standard library
    rows: typing.Literal["packed", "padded"] = "packed"  # packed for PythonCoder and Dream, padded for MDLM
    max_bytes: int = 1_000_000  # larger files are dropped
    column: str = ""  # column of text in .parquet and .jsonl files or --hf; "" looks for content, text, code
    pypi: str = ""  # packages whose source distributions are fetched: top:300, names with commas, requirements.txt
    hf: str = ""  # data set on Hugging Face, read as it streams: NAME, NAME:FOLDER of it, or a folder on this machine
    licences: typing.Literal["permissive", "any"] = "permissive"  # which packages stay, and rows that name one
    benchmarks: tuple[str, ...] = ()  # files of problems to keep out, or none; unset: HumanEval, MBPP but for .py files
    archives: str = "data/archives"  # folder that keeps the source distributions of --pypi
    hosts: int = 1  # machines that share the work, and the disk of --out
    host: int = 0  # number of this machine, from 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Documents):
    """A text file with <|endoftext|> between documents, or a folder of text files."""

    source: tyro.conf.Positional[str]  # file, or folder that is searched for .txt, .text, .md and .py files
    out: str = "data/text"  # folder to write


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyStories(Documents):
    """TinyStories, 2.1 M short stories, downloaded with the library datasets."""

    out: str = "data/tinystories"  # folder to write; the download is kept in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Shards):
    """Pairs of prompt and response, for Dream, which learns the responses alone."""

    source: tyro.conf.Positional[str]  # file of lines {"prompt": TEXT, "response": TEXT}
    out: str = "data/pairs"  # folder to write
    vocab_size: int = 8192  # size of the tokenizer that is trained; at least 261, for 256 bytes and 5 special tokens
    eos_to: int = 1  # EOS fills each response to a multiple of so many tokens, as the end of a canvas to sample on
    edit_rate: float = 0.0  # of the training responses with a suffix so many learn to grow, and so many to shrink
    chat: bool = False  # write pairs as turns of a chat, by the template beside --tokenizer; <|im_end|> ends a response


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(Shards):
    """Token ids that others have written: the column input_ids of Parquet files."""

    roots: tuple[str, ...]  # folders that are searched for .parquet files, or files
    tokenizer: str = dataclasses.field()  # tokenizer.json that the ids come from, a byte-level BPE
    out: str = "data/parquet"  # folder to write


AnySource = Python | Text | typing.Annotated[TinyStories, tyro.conf.subcommand("tinystories")] | Pairs | Parquet


@dataclasses.dataclass(frozen=True)
class Config:
    source: AnySource = Python()  # what is read, each with flags of its own


# Folders of the standard library that are left out: packages, and its own tests, 60 % of the bytes.
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
FIM = {part: f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix")}  # Qwen2.5's names; its ids are 151659-151661
SPECIAL = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "mask": "<mask>", "unk": "<unk>"}  # of padded rows, in order
SEPARATOR = "<|endoftext|>"  # between the documents of a text file
TURN_END = "<|im_end|>"  # ends a turn of a chat, in Qwen2.5's template and Dream's
CHAT_FILES = "tokenizer_config.json", "chat_template.jinja"  # one of them holds a model's chat template
HIDDEN = "\ufdd0"  # breaks the names of special tokens in what people wrote; a noncharacter, which no text holds
TINYSTORIES = "roneneldan/TinyStories"  # the data set on Hugging Face, or a folder of the same
# Qwen2.5's split: single digits, runs of indentation together, line ends with the punctuation before them
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NO_DOCUMENT = re.compile(rb"(?:\s|%b)*" % re.escape(SEPARATOR.encode()))  # what a text range may hold instead of text
BATCH_BYTES = 4_000_000  # text tokenised at a time: the results take about 40 times its memory
LONG_BYTES = 4_000_000  # longer documents of a text file are split at a line end, for each is tokenised in one go
TRAIN_BYTES = 200_000_000  # text that a new tokenizer is trained on
LENGTHS = (*range(16, 257, 16), 512, 1024, 2048, 4096)  # steps of meta.json's histogram: tokens with BOS and EOS
PARQUET = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": True, "write_statistics": False}


class Vocabulary(typing.NamedTuple):
    data: bytes  # content of tokenizer.json
    encoder: Tokenizer
    size: int  # largest id + 1
    special: dict  # ids of "eos" and "pad", which are one in packed rows, and in padded ones of all SPECIAL
    fim: dict | None  # ids of FIM, None where the tokenizer lacks one


# ---- From files to a folder of shards ------------------------------------------------------------------------------


def main(cfg):
    """Prepare one source, for example main(Python(out="data/mine")), or what is missing of it in its folder."""
    cfg = dataclasses.replace(cfg, seq_len=cfg.seq_len or {"packed": 2048, "padded": 256}[cfg.rows])
    for name, least in {"seq_len": 2, "vocab_size": 261, "eos_to": 1}.items():  # 261: 256 bytes, 5 special tokens
        if getattr(cfg, name) < least:
            raise ValueError(f"--{name}={getattr(cfg, name)} must be at least {least}")
    if not (0 <= cfg.heldout < 1 and all(0 <= rate <= 1 for rate in (cfg.fim_rate, cfg.spm_rate, cfg.edit_rate))):
        rates = f"--fim_rate={cfg.fim_rate}, --spm_rate={cfg.spm_rate}, --edit_rate={cfg.edit_rate}"
        raise ValueError(f"--heldout={cfg.heldout} must be in [0, 1), {rates} in [0, 1]")
    if cfg.fim_rate and cfg.rows == "padded":
        raise ValueError("--fim_rate goes with --rows=packed only")
    if cfg.chat and not cfg.tokenizer:
        raise ValueError("--chat takes the template of a model: name its tokenizer, --tokenizer=FOLDER/tokenizer.json")
    cfg = corpus.settled(cfg) if isinstance(cfg, Python) else cfg
    if cfg.workers:
        os.environ["RAYON_NUM_THREADS"] = str(cfg.workers)  # threads of the library tokenizers
    vocabulary = load_vocabulary(Path(cfg.tokenizer).read_bytes(), cfg) if cfg.tokenizer else None
    if cfg.chat:
        chat_writer(cfg.tokenizer)  # fails here where it fails at all
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / f".lock{cfg.host or ''}"):
        try:
            prepare(cfg, out, vocabulary)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            raise
        except OSError as error:  # a full disk, an input file that is gone
            problem = f"{error.filename or out}: {error.strerror or error}"
            raise OSError(f"{problem}; put that right and run the same command to go on") from None


def prepare(cfg, out, vocabulary):
    """Files -> tokenizer -> shards -> meta.json; a shard (write_shard): documents -> ids -> rows -> file.

    A run may be killed at any moment: each file gets its name when it is whole, and meta.json comes last.
    """
    started, chat = time.time(), chat_files(cfg.tokenizer) if cfg.chat else {}
    settings = settings_of(cfg, vocabulary, chat)
    earlier, complete = read_earlier(out, settings)
    tokenizer, progress = out / "tokenizer.json", out / "progress.json"
    data = tokenizer.read_bytes() if tokenizer.exists() else b""
    shards = [out / shard["file"] for split in earlier.get("splits", {}).values() for shard in split["shards"]]
    all_there = complete and all(path.exists() for path in shards)

    if all_there and (cfg.pypi or cfg.hf):  # without asking the network again
        print(f"{out} is complete, nothing to do")
        return

    # A run that ended left a stamp of sizes and times: where it is the same, no file is read to find nothing to do.
    found, stamp = find(cfg), out / ".inputs"
    seen = [(name, path, *size_and_time(path)) for name, path in found]
    if all_there and stamp.exists() and stamp.read_bytes() == stamp_of(seen, earlier["fingerprint"], data):
        print(f"{out} is complete, nothing to do")
        return

    # Files: all are read through once, so that what is bad is known before anything is written.
    groups, dropped = SOURCES[type(cfg)].gather(found, cfg, vocabulary)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count) or "nothing"
    if not groups["train"]:
        raise ValueError(f"no document to train on (left out: {reasons}); lower --heldout or name more to read")
    print(f"shards of training documents: {len(groups['train']):,}; left out: {reasons}")

    # The bytes of the shards follow from the settings, the files and the tokenizer: a fingerprint of the three says
    # whether what an earlier run wrote can stay.
    items = {key for group in itertools.chain(*groups.values()) for key in keys_of(group)}
    listing = json.dumps([1, settings, sorted(items)]).encode()
    unchanged = earlier.get("fingerprint") == hashlib.sha256(listing + data).hexdigest()
    if complete and not unchanged:
        raise ValueError(f"{out} holds data of other files, or these have changed; choose another --out or delete it")
    if all_there:
        shutil.rmtree(out / ".rows", ignore_errors=True)
        runs.write(stamp, stamp_of(seen, earlier["fingerprint"], data))
        print(f"{out} is complete, nothing to do")
        return
    if unchanged:
        print(f"{out} is not complete, writing what is missing", flush=True)
    elif earlier:
        print(f"{out}: a run was stopped without a tokenizer, or its files have changed; starting over", flush=True)

    # Tokenizer: that of --tokenizer, of the run that was stopped, or a new one.
    vocabulary = vocabulary or (load_vocabulary(data, cfg) if unchanged else new_vocabulary(cfg, groups["train"]))
    fingerprint = hashlib.sha256(listing + vocabulary.data).hexdigest()
    begin(cfg, out, {"settings": settings, "fingerprint": fingerprint}, {"tokenizer.json": vocabulary.data, **chat})

    # Shards, then meta.json.
    splits = {split: write_split(out, split, groups[split], cfg, vocabulary, fingerprint) for split in groups}
    if cfg.host:
        (out / ".rows").mkdir(exist_ok=True)
        runs.write(out / f".rows/host{cfg.host}", b"")
        print(f"host {cfg.host} of {cfg.hosts} has written its shards; {out} is complete when host 0 says so")
        return
    meta = describe(cfg, vocabulary, settings, fingerprint, dropped, splits)
    runs.write(progress, json.dumps(meta, indent=2).encode())
    progress.rename(out / "meta.json")
    runs.write(stamp, stamp_of(seen, fingerprint, vocabulary.data))
    corpus.wait_for([out / f".rows/host{host}" for host in range(1, cfg.hosts)], "hosts")  # they may still read it
    shutil.rmtree(out / ".rows", ignore_errors=True)
    ids = f"tokenizer of {vocabulary.size:,} ids, for models with {meta['vocab_padded']:,}"
    print(f"wrote {out} in {time.time() - started:.0f} s; {ids}")


def begin(cfg, out, progress, files):
    """Note in the folder what it is going to hold, and remove what is of another fingerprint."""
    if cfg.host:
        corpus.wait_for([out / "tokenizer.json"], "tokenizers")
        return
    for path in out.glob("[th]*/[0-9]*.parquet" + "*" * (cfg.hosts == 1)):  # of train and heldout
        if counts_of(path, progress["fingerprint"]) is None:
            path.unlink()
    runs.write(out / "progress.json", progress)
    for name, content in files.items():
        runs.write(out / name, content)


def settings_of(cfg, vocabulary, chat):
    """What decides, beside the files, which bytes are written; an earlier run must have had the same."""
    names = "vocab_size eos seq_len heldout fim_rate eos_to max_bytes shard_bytes seed".split()
    given = hashlib.sha256(vocabulary.data).hexdigest() if vocabulary else ""
    settings = {"source": type(cfg).__name__.lower(), "tokenizer": given}
    settings |= {name: getattr(cfg, name) for name in names if name != "eos_to" or isinstance(cfg, Pairs)}
    settings |= {"rows": "padded"} if cfg.rows == "padded" else {}
    settings |= {"spm_rate": cfg.spm_rate} if cfg.fim_rate else {}
    settings |= {"edit_rate": cfg.edit_rate} if cfg.edit_rate else {}
    if corpus.from_rows(cfg):
        settings |= {"column": cfg.column, "hf": cfg.hf, "licences": cfg.licences}
        settings |= {"pypi": corpus.asked(cfg.pypi)} if cfg.pypi else {}
    contents = {"chat": chat.values(), "benchmarks": [Path(path).read_bytes() for path in cfg.benchmarks]}
    return settings | {key: hashlib.sha256(b"".join(files)).hexdigest() for key, files in contents.items() if files}


def size_and_time(path):
    """(bytes, nanoseconds since 1970 of the last change) of a file; (0, 0) where it is gone."""
    try:
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    except OSError:
        return 0, 0


def stamp_of(seen, fingerprint, tokenizer):
    """What says that files which were `seen` so became the data of this fingerprint, without a file being read."""
    return hashlib.sha256(json.dumps([seen, fingerprint]).encode() + tokenizer).hexdigest().encode()


def read_earlier(out, settings):
    """(what an earlier run noted in this folder, whether it ended); ValueError if its settings were others."""
    path = next((out / name for name in ("meta.json", "progress.json") if (out / name).exists()), None)
    if path is None:
        if any((out / name).exists() for name in ("tokenizer.json", "train", "heldout")):
            raise ValueError(f"{out} holds files that data_prep.py did not write; choose another --out")
        return {}, False
    earlier = runs.read_json(path, "settings", "fingerprint")
    # These are noted where they are set.
    unset = {"rows": "packed", "spm_rate": 0.0, "edit_rate": 0.0, "licences": "any"}
    unset |= dict.fromkeys(("chat", "column", "hf", "pypi", "benchmarks"), "")
    before, now = (unset | kept for kept in (earlier["settings"], settings))
    other = [f"{key} {before.get(key)!r}, now {now[key]!r}" for key in now if before.get(key) != now[key]]
    if other:
        raise ValueError(f"{out} holds data of other settings ({'; '.join(other)}); choose another --out or delete it")
    return earlier, path.name == "meta.json"


def keys_of(group):
    """What the fingerprint of a folder has of the documents of a shard: of very many one hash."""
    return group.keys() if isinstance(group, corpus.Group) else [(item.name, item.sha256) for item in group]


def write_split(out, split, groups, cfg, vocabulary, fingerprint):
    """Write the shards of one split that are not there yet, one for each group; returns their counts and hashes."""
    (out / split).mkdir(exist_ok=True)
    total = dict.fromkeys(("documents", "tokens", "bytes", "rows"), 0)
    total |= {"too_long": 0} if isinstance(cfg, Pairs) else {}
    total |= {"shards": [], "lengths": np.zeros(len(LENGTHS) + 1, np.int64)}
    for number, items in enumerate(groups):
        path = out / split / f"{number:05}.parquet"
        if number % cfg.hosts != cfg.host:
            if cfg.host:
                continue
            corpus.wait_for([path], "shards")
        counts = write_shard(path, items, cfg, vocabulary, fingerprint)
        if not counts["rows"]:  # all its documents are of the other split
            path.unlink()
            continue
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        total |= {key: count + total[key] for key, count in counts.items()}
        total["shards"].append({"file": f"{split}/{path.name}", "rows": counts["rows"], "sha256": sha256})
        print(f"{split} | shard {number + 1:,} of {len(groups):,} | {total['tokens']:,} tokens", flush=True)
    if split == "train" and not total["rows"] and not cfg.host:
        raise ValueError("no document is left to train on; lower --heldout or give more to read")
    if split == "heldout" and cfg.heldout and not total["rows"] and not cfg.host:
        print(f"nothing is held out: the documents are few for --heldout={cfg.heldout}", file=sys.stderr)
    print(" | ".join([split, *(f"{key} {count:,}" for key, count in total.items() if isinstance(count, int))]))
    return total


def write_shard(path, items, cfg, vocabulary, fingerprint):
    """Documents -> ids -> rows -> a Parquet file, unless it is there; returns its counts, which it carries too."""
    if (counts := counts_of(path, fingerprint)) is not None:
        return counts
    split, eos = path.parent.name, vocabulary.special["eos"]
    counts = dict.fromkeys(("documents", "bytes", "tokens", "rows"), 0)
    counts |= {"lengths": [0] * (len(LENGTHS) + 1)} if cfg.rows == "padded" else {}
    counts |= {"too_long": 0} if isinstance(cfg, Pairs) else {}

    # Documents of this split -> ids. All steps are generators, so that only some MB are in memory at a time.
    if isinstance(cfg, Parquet):
        documents = parquet_documents(items, split, cfg, vocabulary)
    else:
        documents = tokenised(SOURCES[type(cfg)].documents(items, split, cfg), split, cfg, vocabulary)
    documents = tqdm(documents, f"{split} {path.stem}", unit=" documents", disable=None, leave=False)
    documents = counted(documents, counts, eos, cfg)

    # Ids -> rows, in blocks of about BLOCK_TOKENS tokens, each a list of columns int32_RL.
    if isinstance(cfg, Pairs):
        blocks = (pair_rows(batch, cfg.seq_len, eos) for batch in batched(documents, BLOCK_TOKENS, len))
    elif cfg.rows == "padded":
        batches = batched(documents, BLOCK_TOKENS, lambda ids: len(ids) + cfg.seq_len)
        blocks = (pad_rows(batch, cfg.seq_len, vocabulary.special) for batch in batches)
    else:
        blocks = packed_blocks(documents, cfg.seq_len, eos)

    # Rows -> file, one row group a block.
    kind = pa.list_(pa.int32(), cfg.seq_len)
    schema = pa.schema([(name, kind) for name in COLUMNS[: 3 + isinstance(cfg, Pairs)]])
    with runs.writing(path) as file, pq.ParquetWriter(file, schema, **PARQUET) as writer:
        for columns in blocks:
            counts["tokens"] += int((columns[1] > 0).sum())  # segment 0 is padding
            counts["rows"] += len(columns[1])
            arrays = [pa.FixedSizeListArray.from_arrays(array_RL.reshape(-1), type=kind) for array_RL in columns]
            writer.write_table(pa.table(arrays, schema=schema))
        writer.add_key_value_metadata({"data_prep": json.dumps({"of": fingerprint, "counts": counts})})
    return counts


def counts_of(path, fingerprint):
    """The counts that a shard of this fingerprint carries; None of any other file."""
    with contextlib.suppress(FileNotFoundError, pa.ArrowInvalid):  # never written, or cut short by a power failure
        note = json.loads(pq.read_metadata(path).metadata.get(b"data_prep", b"{}"))
        return note["counts"] if note.get("of") == fingerprint else None


def counted(documents, counts, eos, cfg):
    """The ids of (ids, bytes), counted. A pair gets its EOS, or is left out because it is too long for a row."""
    for ids, size in documents:
        if isinstance(cfg, Pairs):
            # EOS fills a response at the end, ids that are not negative, to a multiple of eos_to. pack() adds the last.
            written = np.count_nonzero(ids >= 0)
            fill = 0 if written and ids[-1] < 0 else -(written + 1) % cfg.eos_to
            ids = np.append(ids, np.full(fill, eos, np.int32))
            if len(ids) + 1 > cfg.seq_len:
                counts["too_long"] += 1
                continue
        elif cfg.rows == "padded":
            counts["lengths"][bisect.bisect_left(LENGTHS, len(ids) + 2)] += 1  # with BOS and EOS
        counts["documents"] += 1
        counts["bytes"] += size
        yield ids


def describe(cfg, vocabulary, settings, fingerprint, dropped, splits):
    """The content of meta.json."""
    lengths = sum(total.pop("lengths") for total in splits.values()).tolist()
    meta = {"format": 1, "source": settings["source"], "seq_len": cfg.seq_len, "vocab_size": vocabulary.size}
    meta["vocab_padded"] = -(-vocabulary.size // 256) * 256  # a size that matrix units like
    meta |= {f"{role}_id": id for role, id in vocabulary.special.items()}
    meta |= {"fim": vocabulary.fim, "fingerprint": fingerprint}
    meta |= {"tokenizer_sha256": hashlib.sha256(vocabulary.data).hexdigest(), "dropped": dropped}
    meta |= {"settings": settings, "splits": splits}
    return meta | ({"lengths": {"up_to": [*LENGTHS, None], "documents": lengths}} if cfg.rows == "padded" else {})


# ---- Files ---------------------------------------------------------------------------------------------------------


def find(cfg):
    """(name, path) of all that a source is to read, sorted but for packages."""
    if cfg.pypi or cfg.hf:
        return corpus.inputs(cfg)
    if isinstance(cfg, TinyStories):
        roots = (tinystories(cfg.out),)
    else:
        roots = cfg.roots if isinstance(cfg, Python | Parquet) else (cfg.source,)
    return files_below(roots, (".parquet", ".jsonl") if cfg.column else SOURCES[type(cfg)].suffixes, cfg.out)


def files_below(roots, suffixes, out):
    """(name, path) of all files with these suffixes below the roots, sorted; the folder `out` is not entered.

    A root that is a file is taken as it is. No roots are the standard library.
    """
    own, found = os.path.realpath(out), []
    skipped = set() if roots else NOT_THE_LIBRARY
    for root in roots or [sysconfig.get_paths()["stdlib"]]:
        os.stat(root)  # raises if it does not exist, where os.walk is silent
        if not os.path.isdir(root):
            found.append((os.path.basename(root), root))
            continue
        for folder, folders, files in os.walk(root, onerror=lambda error: print(f"left out: {error}", file=sys.stderr)):
            # os.walk goes on with what is left in this list
            folders[:] = [f for f in folders if f not in skipped and os.path.realpath(os.path.join(folder, f)) != own]
            paths = [os.path.join(folder, name) for name in files if name.endswith(suffixes)]
            found += [(os.path.relpath(path, root), path) for path in paths]
    if not found:
        raise ValueError(f"no {', '.join(suffixes)} files below {', '.join(roots) or root}; name other folders")
    return sorted(found)


def belongs(data, split, cfg):
    """Whether a document is in this split, which a hash of `data` (its text, prompt or ids) decides."""
    return (draw(cfg.seed, hashlib.sha256(data).hexdigest()) < cfg.heldout) == (split == "heldout")


def read_text(item):
    """The text of an Item. Raises ValueError if the file is not the one that was gathered."""
    with open(item.path, "rb") as file:
        file.seek(item.start)
        data = file.read(item.size)
    if hashlib.sha256(data).hexdigest() != item.sha256:
        raise ValueError(f"{item.path} has changed since it was examined; run the same command again")
    return data.decode()


# Each source has two functions. One gathers what was found: {"train" and "heldout": lists of Items, one list a shard},
# and how many files it dropped, by reason. The other reads the documents of such a list: (text,), or a pair.

# ---- Text files ----------------------------------------------------------------------------------------------------


def gather_text(found, cfg, vocabulary):
    """Ranges of the text files. Both splits have all: what of them is held out is drawn by a hash of each document."""
    items, dropped = [], dict.fromkeys(("unreadable", "binary", "empty"), 0)
    for name, path in found:
        try:
            ranges = text_ranges(name, path, cfg.shard_bytes)
            items += ranges
            dropped["empty"] += not ranges
        except OSError:
            dropped["unreadable"] += 1
        except ValueError:
            dropped["binary"] += 1
    # So much text holds about one shard of held-out documents.
    heldout = batched(items, cfg.shard_bytes / cfg.heldout) if cfg.heldout else []
    return {"train": list(batched(items, cfg.shard_bytes)), "heldout": list(heldout)}, dropped


def text_ranges(name, path, limit):
    """Items of the ranges of a file. Raises OSError if it cannot be read, ValueError if it is not UTF-8 or has NUL.

    A range ends with the separator that follows its first `limit` bytes, or within a document of over LONG_BYTES: at a
    line end, or between two characters if there is none. Ranges without a document are left out.
    """
    ranges, start, data, decoder = [], 0, bytearray(), codecs.getincrementaldecoder("utf-8")()
    separator = SEPARATOR.encode()
    if not os.path.isfile(path):  # reading a named pipe would never end
        raise OSError(f"{path} is no file")
    bar = {"total": os.path.getsize(path), "delay": 1, "leave": False, "disable": None}
    with open(path, "rb") as file, tqdm.wrapattr(file, "read", **bar) as reader:
        blocks = iter(lambda: reader.read(1 << 20), b"")
        for block in itertools.chain(blocks, [b""]):  # the empty block is the end of the file
            if "\0" in decoder.decode(block, final=not block):
                raise ValueError(f"{path} is binary")
            data += block
            while data:  # cut ranges off its beginning
                end = data.find(separator, max(0, limit - len(separator)))
                if end >= 0:
                    end += len(separator)
                elif len(data) - max(0, data.rfind(separator)) >= LONG_BYTES:
                    end = data.rfind(b"\n") + 1 or len(data) - len(decoder.getstate()[0])
                elif block:  # no end in sight: read on
                    break
                else:
                    end = len(data)
                if NO_DOCUMENT.match(data, 0, end).end() < end:
                    sha256 = hashlib.sha256(data[:end]).hexdigest()
                    ranges.append(Item(f"{name}@{start}", path, sha256, end, start))
                start += end
                del data[:end]
    return ranges


def text_documents(items, split, cfg):
    """The documents of this split. One that is a whole file stays as it is, others lose the whitespace around them."""
    for item in items:
        texts = read_text(item).split(SEPARATOR)
        if len(texts) > 1 or item.start:
            texts = map(str.strip, texts)
        for text in texts:
            if text.strip() and belongs(text.encode(), split, cfg):
                yield (text,)


def tinystories(out):
    """The file of all stories in the folder --out, downloaded if it is not there."""
    path = os.path.join(out, "tinystories.txt")
    if not os.path.exists(path):
        stories = corpus.download(TINYSTORIES, "prepare a text file with: python data_prep.py text FILE")
        with runs.writing(path) as file:
            for story in tqdm(stories, "writing", unit=" stories", disable=None):
                file.write(f"{story['text'].strip()}\n{SEPARATOR}\n".encode())
    return path


# ---- Pairs of prompt and response ----------------------------------------------------------------------------------


def gather_pairs(found, cfg, vocabulary):
    """Ranges of whole lines. Both splits have all: what of them is held out is drawn by a hash of each prompt."""
    bad, items, start, holes = [], [], 0, False
    with open(cfg.source, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                texts = read_pair(line)
                holes |= bool(texts) and len(texts) > 2
                if cfg.chat and texts and len(texts) > 2:
                    bad.append(str(number))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                bad.append(str(number))
    if bad:
        numbers = ", ".join(bad[:3]) + f" and {len(bad) - 3:,} more" * (len(bad) > 3)
        what = '{"prompt": TEXT, "response": TEXT} in UTF-8' + ', without "suffix" as --chat is set' * cfg.chat
        raise ValueError(f"{cfg.source}: not {what}: line {numbers}")
    if cfg.edit_rate and not holes:
        raise ValueError(f'--edit_rate={cfg.edit_rate} is for holes: no line of {cfg.source} has a "suffix"')
    with open(cfg.source, "rb") as file:
        for lines in batched(file, cfg.shard_bytes + 1, len):
            data = b"".join(lines)  # as many lines as make up a shard
            name = f"{os.path.basename(cfg.source)}@{start}"
            items.append(Item(name, cfg.source, hashlib.sha256(data).hexdigest(), len(data), start))
            start += len(data)
    return {"train": [[item] for item in items], "heldout": [items] if cfg.heldout else []}, {}


def read_pair(line):
    """[prompt, response(, suffix)] of a line, None of an empty one. What is wrong with it raises one of five errors."""
    if not line.strip():
        return None
    pair = json.loads(line)
    texts = [pair["prompt"], pair["response"], *filter(None, [pair.get("suffix")])]
    "".join(texts).encode()  # fails for numbers, lists, and half a surrogate pair
    return texts


def pair_documents(items, split, cfg):
    """The pairs of this split. A prompt that is held out is in no training pair."""
    write = chat_writer(cfg.tokenizer) if cfg.chat else lambda *pair: pair
    for item in items:
        for pair in map(read_pair, read_text(item).split("\n")):
            if pair and belongs(pair[0].encode(), split, cfg):
                yield write(*pair)


def chat_files(tokenizer):
    """{name: bytes} of the files beside a tokenizer.json that hold a chat template."""
    paths = [Path(tokenizer).with_name(name) for name in CHAT_FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


@functools.lru_cache(1)
def chat_writer(tokenizer):
    """A function: (prompt, response) -> the same as the turns of a chat, by the template beside a tokenizer.json.

    The special tokens of the template become tokens; their names in what people wrote are broken by HIDDEN, and stay
    text. Raises ValueError if there is no template.
    """

    folder = Path(tokenizer).parent
    wrap = runs.chat_template(folder)
    if wrap is None:
        raise ValueError(f"--chat: {folder} holds no chat template ({' or '.join(CHAT_FILES)})")
    names = [token["content"] for token in json.loads(Path(tokenizer).read_bytes())["added_tokens"]]
    special = re.compile("|".join(re.escape(name) for name in names if not name.isspace()))

    def plain(text):
        return special.sub(lambda name: name[0][0] + HIDDEN + name[0][1:], text)

    return lambda prompt, response: (wrap(plain(prompt)), plain(response) + TURN_END)


# ---- Parquet files of token ids ------------------------------------------------------------------------------------


def gather_parquet(found, cfg, vocabulary):
    """The input files, one training shard each. Both splits have all: a hash of its ids holds a document out."""
    items = []
    jobs = [(path, vocabulary.size, vocabulary.special["eos"]) for _, path in found]
    for (name, path), result in zip(found, corpus.parallel(examine_parquet, jobs, cfg, chunk=1), strict=True):
        if isinstance(result, str):
            raise ValueError(f"{path} {result}")
        items.append(Item(name, path, *result))
    # What is held out of so many files fills about one shard.
    heldout = batched(items, int(1 / cfg.heldout), lambda item: 1) if cfg.heldout else []
    return {"train": [[item] for item in items], "heldout": list(heldout)}, {}


def examine_parquet(path, size, eos):
    """What is wrong with a shard and what to do, or (SHA-256, bytes)."""
    try:
        for ids in eos_documents(path, eos):
            bad = ids[(ids < 0) | (ids >= size)]
            if len(bad):
                return f"holds id {bad[0]}, but --tokenizer has ids 0 to {size - 1}; give the one these ids come from"
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), os.path.getsize(path)
    except (pa.ArrowException, OSError) as error:
        return f"is corrupted or cannot be read ({runs.first_line(error)}); remove it or fetch it again"
    except ValueError as error:
        return str(error)


def eos_documents(path, eos):
    """The documents of a shard of tokens, without their EOS. Raises ValueError if it is no such shard."""
    with pq.ParquetFile(path, pre_buffer=False) as file:
        types = {field.name: field.type for field in file.schema_arrow}
        if not pa.types.is_integer(getattr(types.get("input_ids"), "value_type", pa.null())):
            listed = ", ".join(f"{name} {kind}" for name, kind in types.items())
            raise ValueError(f"has no column input_ids with lists of integers (it has {listed})")
        rest = []  # of a document that goes on in the next batch of 256 rows
        for batch in file.iter_batches(256, columns=["input_ids"]):
            ids = batch.column(0).flatten().to_numpy()  # null has no number: ArrowInvalid
            *parts, tail = np.split(ids, np.flatnonzero(ids == eos) + 1)  # each part ends with EOS
            for part in parts:
                yield np.concatenate([*rest, part[:-1]])
                rest = []
            rest.append(tail)
            if sum(map(len, rest)) > 1 << 24:
                raise ValueError(f"has {1 << 24:,} tokens without EOS ({eos}); give the right --tokenizer and --eos")
        yield np.concatenate([*rest, np.zeros(0, np.int32)])


def parquet_documents(items, split, cfg, vocabulary):
    """(ids, bytes) of each document of this split."""
    bytes_V = token_bytes(vocabulary.encoder, vocabulary.size)
    for item in items:
        for ids in eos_documents(item.path, vocabulary.special["eos"]):
            ids = ids.astype(np.int32)
            if len(ids) and belongs(ids, split, cfg):
                yield ids, int(bytes_V[ids].sum(dtype=np.int64))


class Source(typing.NamedTuple):
    suffixes: tuple  # of the files
    gather: typing.Callable
    documents: typing.Callable


def python_documents(items, split, cfg):
    return ((read_text(item),) for item in items)


SOURCES = {
    Python: Source((".py",), lambda found, cfg, vocabulary: corpus.gather(found, cfg), python_documents),
    Text: Source((".txt", ".text", ".md", ".py"), gather_text, text_documents),
    TinyStories: Source((".txt",), gather_text, text_documents),
    Pairs: Source((".jsonl",), gather_pairs, pair_documents),
    Parquet: Source((".parquet",), gather_parquet, parquet_documents),
}


# ---- Documents to ids ----------------------------------------------------------------------------------------------


def new_vocabulary(cfg, groups):
    """Train a tokenizer on the first TRAIN_BYTES of the training documents: a byte-level BPE, lossless on any text."""
    items = next(batched(itertools.chain(*groups), TRAIN_BYTES))
    megabytes = sum(item.size for item in items) / 1e6
    print(f"training a tokenizer on {megabytes:,.1f} MB, about {5 + megabytes / 3:.0f} s", flush=True)
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # after SPLIT, on each part
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        min_frequency=0 if cfg.rows == "padded" else 2,  # 0 reaches vocab_size on 2 MB of stories too
        special_tokens=[*SPECIAL.values()] if cfg.rows == "padded" else [cfg.eos, *FIM.values(), "<|fim_pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    documents = SOURCES[type(cfg)].documents(items, "train", cfg)
    tokenizer.train_from_iterator(map("".join, documents), trainer)
    return load_vocabulary(tokenizer.to_str().encode(), cfg)


def load_vocabulary(data, cfg):
    """Vocabulary of a tokenizer.json whose encoder takes "<|endoftext|>" and its like in a document for plain text."""
    try:
        description = json.loads(data)
        for token in description["added_tokens"]:  # only runs of spaces, as GPT-NeoX has them, stay what they are
            token["special"] = not token["content"].isspace()
            token["normalized"] &= not cfg.chat  # found before HIDDEN goes
        encoder = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # tokenizers raises no narrower class
        problem = f"is no tokenizer.json of the library tokenizers ({runs.first_line(error)})"
        raise ValueError(f"--tokenizer={cfg.tokenizer} {problem}; name another") from None
    encoder.encode_special_tokens = not cfg.chat  # True: as plain text
    if cfg.chat:
        parts = [encoder.normalizer] if encoder.normalizer else []
        encoder.normalizer = normalizers.Sequence([normalizers.Replace(HIDDEN, ""), *parts])
    encoder.no_truncation()
    encoder.no_padding()

    # In a byte-level BPE each character of a token is one byte.
    if isinstance(cfg, Parquet):
        added, alphabet = encoder.get_added_tokens_decoder(), {*pre_tokenizers.ByteLevel.alphabet()}
        if any(id not in added and not alphabet.issuperset(token) for token, id in encoder.get_vocab().items()):
            raise ValueError(f"--tokenizer={cfg.tokenizer} is no byte-level BPE: bytes cannot be counted; name another")

    # The tokens that rows need: the five of padded rows; packed rows have EOS as PAD, whose segment is 0.
    roles = SPECIAL if cfg.rows == "padded" else {"eos": cfg.eos, "pad": cfg.eos}
    special = {role: encoder.token_to_id(token) for role, token in roles.items()}
    fim = {part: encoder.token_to_id(token) for part, token in FIM.items()}
    needed = {**roles, **(FIM if cfg.fim_rate else {}), **({"turn": TURN_END} if cfg.chat else {})}
    lacking = dict.fromkeys(token for token in needed.values() if encoder.token_to_id(token) is None)
    if lacking:
        advice = "name another, --rows=packed, the --eos that it has, or --fim_rate=0"
        raise ValueError(f"--tokenizer={cfg.tokenizer} has no token {', '.join(lacking)}; {advice}")
    size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
    return Vocabulary(data, encoder, size, special, None if None in fim.values() else fim)


def cut_for_fim(text, cfg):
    """Cut a document at two random places for fill-in-the-middle, or leave it as (text,); its content draws which.

    The order is prefix, suffix, middle ("PSM"), that of Qwen2.5-Coder (arXiv:2409.12186), or SPM in the form that asks
    for the same tokens (arXiv:2207.14255, appendix D): no prefix, the suffix, then prefix and middle in one.
    """
    rng = random.Random(f"{cfg.seed} {hashlib.sha256(text.encode()).hexdigest()}")
    if rng.random() >= cfg.fim_rate:
        return (text,)
    i, j = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    if rng.random() < cfg.spm_rate:
        return "", text[j:], text[:j]
    return text[:i], text[j:], text[i:j]


def text_bytes(texts):
    return sum(len(text.encode()) for text in texts)


MOST_DELETED = 64  # masks of a hole that stand for nothing


def edit(parts, eos, number, cfg):
    """Ids of a hole with masks that stand for no single token, from [before, hole, after]: so a length can be found.

    Where the hole is to grow, tokens that follow each other become one: EDIT + the first of them, which a model learns
    to expand. Where it is to shrink, up to MOST_DELETED times EDIT + EOS follow, which it learns to delete. What stands
    there and its number in a shard draw how. Ref: DreamOn (hkunlp.github.io/blog/2025/dreamon).
    """
    content = np.fromiter(itertools.chain.from_iterable(parts), np.int32).tobytes()
    rng = np.random.default_rng([cfg.seed, number, *hashlib.sha256(content).digest()])
    grows, shrinks = rng.random(2) < cfg.edit_rate
    joined = rng.random(len(parts[1])) < grows * rng.uniform(0, 0.95)  # with the token after it
    joined[-1:] = False
    starts = np.append(True, ~joined[:-1])[: len(joined)]
    ids = np.where(joined, EDIT, 0)[starts] + np.int32(parts[1])[starts]
    most = min(MOST_DELETED, cfg.seq_len - 1 - sum(map(len, parts)))
    return [*ids.tolist(), *[EDIT + eos] * (rng.integers(most + 1) if shrinks and most > 0 else 0)]


def tokenised(documents, split, cfg, vocabulary):
    """(ids, bytes) of each document, tokenised by all cores. Ids around a response are ~id, which pair_rows undoes."""
    if cfg.fim_rate and split == "train":
        documents = (cut_for_fim(text, cfg) for (text,) in documents)
    fim, encode = vocabulary.fim, functools.partial(vocabulary.encoder.encode_batch_fast, add_special_tokens=False)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # tokenises the next batch while this one is written
        batch, encodings, numbers = [], thread.submit(list), itertools.count()
        for following in itertools.chain(batched(documents, BATCH_BYTES, text_bytes), [[]]):
            ahead = thread.submit(encode, list(itertools.chain.from_iterable(following)))
            parts = (encoding.ids for encoding in encodings.result())
            for texts in batch:
                ids = list(itertools.islice(parts, len(texts)))
                if isinstance(cfg, Pairs):  # prompt, response, suffix
                    if cfg.edit_rate and split == "train" and len(ids) == 3:
                        ids[1] = edit(ids, vocabulary.special["eos"], next(numbers), cfg)
                    ids[::2] = ([~id for id in part] for part in ids[::2])
                elif len(ids) == 3:  # prefix, suffix, middle: each follows its token
                    ids = [fim["prefix"]], ids[0], [fim["suffix"]], ids[1], [fim["middle"]], ids[2]
                yield np.fromiter(itertools.chain.from_iterable(ids), np.int32), text_bytes(texts)
            batch, encodings = following, ahead
            del parts  # frees the results of this batch, 40 times its text, before the next ones come


if __name__ == "__main__":
    runs.command(lambda config: main(config.source), Config, __doc__)
