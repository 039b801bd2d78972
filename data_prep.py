"""Turn text into a tokenizer and token shards, which the trainers read.

    python data_prep.py                                             # this Python's standard library: 12 MB, 10 s
    python data_prep.py text stories.txt --out=data/stories         # documents with <|endoftext|> between them
    python data_prep.py tinystories                                 # a download; needs: pip install datasets
    python data_prep.py python --roots ~/src data/pypi_src --out=data/mine    # .py files, own and of fetch_pypi.py
    python data_prep.py python --tokenizer=qwen/tokenizer.json --fim_rate=0.5 --out=data/fim
    python data_prep.py python --roots shards --column=content --benchmarks HumanEval.jsonl.gz --out=data/rows
    python data_prep.py python --hf=NAME:python --out=data/hf       # a data set of Hugging Face, as it streams
    python data_prep.py pairs pairs.jsonl --eos_to=64 --out=data/pairs    # prompts and responses, for Dream
    python data_prep.py pairs holes.jsonl --edit_rate=0.5 --out=data/holes    # with a "suffix": holes of any length
    python data_prep.py pairs pairs.jsonl --chat --tokenizer=out/diffucoder/tokenizer.json --out=data/chat
    python data_prep.py parquet --roots shards --tokenizer=qwen/tokenizer.json --seq_len=4096 --out=data/long

python reads .py files, or the rows of a text column in .parquet and .jsonl files or a data set. It drops generated,
minified, huge, non-UTF-8 and unparsable files and exact and near duplicates. Rows must be under a
permissive licence where they name one. Rows and packages that share ten words in a row with a
problem of HumanEval or MBPP are dropped.

text splits files of any size at <|endoftext|>. pairs reads lines {"prompt": TEXT, "response":
TEXT}; a "suffix" follows the response and is given to the model as the prompt is; a pair longer
than a row is left out. parquet packs the column input_ids of Parquet files; a document ends with
EOS and may run over row borders.

Packed rows, for PythonCoder and Dream, hold documents one after the other, each ended by EOS.
Padded rows, for MDLM, hold one document each: BOS, tokens, EOS, PAD; a long one goes on in the next
row.

Writes --out: tokenizer.json, shards (see rows.py) and, last of all, meta.json: special ids, counts,
shards with their hashes; with --chat also the model's chat template. The same command goes on with
a run that was stopped or killed, and ends with the same bytes.

Axes: N documents, T tokens, R rows, L row length, V vocabulary.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
import typing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

import corpus
import runs
from corpus import batched, sha256, text_bytes
from runs import Count, Natural, Share

VocabSize = typing.Annotated[int, (261, 1_000_000)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    out: str = "data/python"  # folder to write
    tokenizer: str = ""  # tokenizer.json to use; "" trains one on the training documents
    eos: str = "<|endoftext|>"  # token that ends a document in packed rows; padded rows have <eos>
    # tokens in a row; 0: 2048 for packed rows, 256 for padded ones
    seq_len: typing.Annotated[int, (0, 2**20)] = 0
    heldout: Share = 0.02  # fraction of the documents that is held out for evaluation
    shard_bytes: Count = 16_000_000  # bytes of text in a shard; 16 MB are about 5 M tokens
    # processes that read files, and threads that tokenise; 0: all cores
    workers: typing.Annotated[int, (0, 1024)] = 0
    # random seed of the held-out split, the order of documents and the fill-in-the-middle cuts
    seed: Natural = 0

    # Values for sources without such a flag; meta.json records them.
    rows: typing.ClassVar[str] = "packed"
    vocab_size: typing.ClassVar[int] = 8192
    fim_rate: typing.ClassVar[float] = 0.0
    max_bytes: typing.ClassVar[int] = 1_000_000
    chat: typing.ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents(Shards):
    # size of the tokenizer that is trained; at least 261: 256 bytes, 5 special tokens
    vocab_size: VocabSize = 8192
    # packed for PythonCoder and Dream, padded for MDLM
    rows: typing.Literal["packed", "padded"] = "padded"
    # fraction of the training documents rearranged for fill-in-the-middle, in packed rows
    fim_rate: Share = 0.0
    # fraction of the rearranged documents in the order suffix-prefix-middle (SPM), not PSM
    spm_rate: Share = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Python(Documents):
    """Python files, rows of a column or a data set; by default this Python's standard library."""

    # folders that are searched for .py files, or files; none is the standard library
    roots: tuple[str, ...] = ()
    # packed for PythonCoder and Dream, padded for MDLM
    rows: typing.Literal["packed", "padded"] = "packed"
    max_bytes: Count = 1_000_000  # larger files are dropped
    # text column of .parquet and .jsonl files or --hf; "" looks for content, text, code
    column: str = ""
    # data set on Hugging Face, read as it streams: NAME, NAME:FOLDER of it, or a folder on this
    # machine
    hf: str = ""
    # of rows that name a licence; others stay
    licences: typing.Literal["permissive", "any"] = "permissive"
    # problems to decontaminate from; "" none; rows, packages: HumanEval, MBPP
    benchmarks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Documents):
    """A text file with <|endoftext|> between documents, or a folder of text files."""

    # file, or folder that is searched for .txt, .text, .md and .py files
    source: tyro.conf.Positional[str]
    out: str = "data/text"  # folder to write


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyStories(Documents):
    """TinyStories, 2.1 M short stories, downloaded with the library datasets."""

    out: str = "data/tinystories"  # folder to write; the download is kept in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Shards):
    """Pairs of prompt and response, for Dream, which learns the responses alone."""

    source: tyro.conf.Positional[str]  # file of shuffled lines {"prompt": TEXT, "response": TEXT}
    out: str = "data/pairs"  # folder to write
    # size of the tokenizer that is trained; at least 261: 256 bytes, 5 special tokens
    vocab_size: VocabSize = 8192
    # EOS pads a response to a multiple of this; before a suffix, by a random number below it
    eos_to: Count = 1
    # with a suffix: share of holes with masks to expand, and share with masks to delete
    edit_rate: Share = 0.0
    chat: bool = False  # write pairs as turns of a chat, by the template beside --tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(Shards):
    """Token ids that others have written: the column input_ids of Parquet files."""

    roots: tuple[str, ...]  # folders that are searched for .parquet files, or files
    tokenizer: str = dataclasses.field()  # tokenizer.json that the ids come from, a byte-level BPE
    out: str = "data/parquet"  # folder to write


AnySource = (
    Python
    | Text
    | typing.Annotated[TinyStories, tyro.conf.subcommand("tinystories")]
    | Pairs
    | Parquet
)


@dataclasses.dataclass(frozen=True)
class Config:
    source: AnySource = Python()  # what is read, each with flags of its own


# Qwen2.5's names; its ids are 151659-151661
FIM = {role: f"<|fim_{role}|>" for role in ("prefix", "middle", "suffix")}
# of padded rows, in order
SPECIAL = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "mask": "<mask>", "unk": "<unk>"}
# one of them holds a model's chat template
CHAT_FILES = "tokenizer_config.json", "chat_template.jinja"
# Qwen2.5's: single digits, runs of indentation together, line ends with the punctuation before them
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
COLUMNS = ["input_ids", "segments", "positions", "fixed"]  # of a shard; the last of pairs only
BLOCK_TOKENS = 1 << 21  # tokens packed at a time, one row group of a shard
BATCH_BYTES = 4_000_000  # text tokenised at a time: the results take about 40 times its memory
TRAIN_BYTES = 200_000_000  # text that a new tokenizer is trained on
MOST_DELETED = 64  # masks at the end of a hole that stand for no token
PARQUET = {
    "compression": "zstd",
    "use_dictionary": False,
    "use_byte_stream_split": True,
    "write_statistics": False,
}


class Vocabulary(typing.NamedTuple):
    data: bytes  # content of tokenizer.json
    encoder: Tokenizer
    size: int  # largest id + 1
    # ids of "eos" and "pad", which are one in packed rows, and in padded ones of all SPECIAL
    special: dict
    fim: dict | None  # ids of FIM, None where the tokenizer lacks one


# ---- from files to a folder of shards ------------------------------------------------------------------------------


def main(cfg):
    """Prepare one source, for example main(Python(out="data/mine")), or what is missing of it in
    its folder.
    """
    cfg = dataclasses.replace(cfg, seq_len=cfg.seq_len or {"packed": 2048, "padded": 256}[cfg.rows])
    if cfg.seq_len < 2:
        raise ValueError(f"--seq_len={cfg.seq_len}: at least 2")
    if cfg.fim_rate and cfg.rows == "padded":
        raise ValueError("--fim_rate goes with --rows=packed only")
    if cfg.chat and not cfg.tokenizer:
        raise ValueError(
            "--chat takes the template of a model: name its tokenizer, --tokenizer=FOLDER/tokenizer.json"
        )
    if isinstance(cfg, Python) and cfg.roots and cfg.hf:
        raise ValueError("--roots and --hf are two sources; give one")
    if cfg.workers:
        os.environ["RAYON_NUM_THREADS"] = str(cfg.workers)  # threads of the library tokenizers
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / ".lock"):
        try:
            prepare(cfg, out)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            raise
        except OSError as error:  # a full disk, an input file that is gone
            problem = f"{error.filename or out}: {error.strerror or error}"
            raise OSError(f"{problem}; put that right and run the same command to go on") from None


def prepare(cfg, out):
    """Files -> tokenizer -> shards -> meta.json; a shard (write_shard): documents -> ids -> rows ->
    file.

    A run may be killed at any moment: each file gets its name when it is whole, and meta.json comes
    last.
    """
    started = time.time()
    found = find(cfg)
    inputs = sha256(json.dumps([(item.name, item.sha256) for item in found]).encode())
    if isinstance(cfg, Python):  # what its flags leave open
        if cfg.hf or found[0].path.endswith(corpus.ROWS):
            cfg = dataclasses.replace(cfg, column=cfg.column or corpus.TEXT_COLUMNS)
        cfg = dataclasses.replace(cfg, benchmarks=corpus.benchmark_files(cfg))
    vocabulary = (
        load_vocabulary(runs.as_path(cfg.tokenizer).read_bytes(), cfg) if cfg.tokenizer else None
    )
    if cfg.chat:
        next(chat_turns([], cfg, vocabulary), None)  # fails here where it fails at all
    settings = settings_of(cfg, vocabulary)
    if is_complete(out, settings, inputs):
        # of a run that was killed in its last second
        shutil.rmtree(out / ".rows", ignore_errors=True)
        print(f"{out} is complete, nothing to do")
        return

    # Files: all are read through once, so that what is bad is known before anything is written.
    groups, dropped = SOURCES[type(cfg)][0](found, cfg, vocabulary)
    reasons = (
        ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count) or "nothing"
    )
    if not groups["train"]:
        raise ValueError(
            f"no document to train on (left out: {reasons}); lower --heldout or name more to read"
        )
    print(f"shards of training documents: {len(groups['train']):,}; left out: {reasons}")
    vocabulary = vocabulary or new_vocabulary(cfg, groups["train"])

    # The bytes of the shards follow from the settings, the documents and the tokenizer. Shards of
    # an earlier run that carry the fingerprint of all three stay. Rows of a column count as one
    # document per shard: there may be millions.
    shards = [*itertools.chain(*groups.values())]
    if getattr(cfg, "column", ""):
        keys = {
            ("", sha256(b"".join(bytes.fromhex(item.sha256) for item in items))) for items in shards
        }
    else:
        keys = {(item.name, item.sha256) for items in shards for item in items}
    fingerprint = sha256(json.dumps([1, settings, sorted(keys)]).encode() + vocabulary.data)
    for path in (*out.glob("train/[0-9]*.parquet*"), *out.glob("heldout/[0-9]*.parquet*")):
        if counts_of(path, fingerprint) is None:
            path.unlink()
    noted = {"settings": settings, "inputs": inputs, "fingerprint": fingerprint}
    runs.write(out / "progress.json", noted)
    for name, content in {"tokenizer.json": vocabulary.data, **chat_files(cfg)}.items():
        runs.write(out / name, content)

    splits = {
        split: write_split(out, split, groups[split], cfg, vocabulary, fingerprint)
        for split in groups
    }
    meta = {
        "format": 1,
        "source": type(cfg).__name__.lower(),
        "seq_len": cfg.seq_len,
        "vocab_size": vocabulary.size,
    }
    meta["vocab_padded"] = -(-vocabulary.size // 256) * 256  # a size that matrix units like
    meta |= {f"{role}_id": id for role, id in vocabulary.special.items()}
    meta |= {
        "fim": vocabulary.fim,
        "tokenizer_sha256": sha256(vocabulary.data),
        "splits": splits,
        "dropped": dropped,
    }
    meta |= noted
    runs.write(out / "progress.json", meta)
    (out / "progress.json").rename(out / "meta.json")
    shutil.rmtree(out / ".rows", ignore_errors=True)
    ids = f"tokenizer of {vocabulary.size:,} ids, for models with {meta['vocab_padded']:,}"
    print(f"wrote {out} in {time.time() - started:.0f} s; {ids}")


def settings_of(cfg, vocabulary):
    """What decides, beside the input files, which bytes are written; an earlier run must have had
    the same.
    """
    names = "vocab_size eos seq_len heldout fim_rate eos_to max_bytes shard_bytes seed".split()
    names += ["rows"] if cfg.rows == "padded" else []  # these are noted where they matter
    names += ["spm_rate"] if cfg.fim_rate else []
    names += ["edit_rate"] if getattr(cfg, "edit_rate", 0) else []
    names += ["column", "hf", "licences"] if getattr(cfg, "column", "") else []
    settings = {
        "source": type(cfg).__name__.lower(),
        "tokenizer": sha256(vocabulary.data) if vocabulary else "",
    }
    settings |= {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}
    if cfg.chat:
        settings["chat"] = sha256(b"".join(chat_files(cfg).values()))
    if getattr(cfg, "benchmarks", ()):
        settings["benchmarks"] = sha256(
            b"".join(runs.as_path(path).read_bytes() for path in cfg.benchmarks)
        )
    return settings


def is_complete(out, settings, inputs):
    """Whether an earlier run has written everything. ValueError if it had other settings or
    files.
    """
    path = next(
        (out / name for name in ("meta.json", "progress.json") if (out / name).exists()), None
    )
    if path is None:
        if any((out / name).exists() for name in ("tokenizer.json", "train", "heldout")):
            raise ValueError(
                f"{out} holds files that data_prep.py did not write; choose another --out"
            )
        return False
    earlier = runs.read_json(path, "settings", "inputs")
    before = earlier["settings"]
    if other := [key for key in {**before, **settings} if before.get(key) != settings.get(key)]:
        listed = "; ".join(
            f"{key} {before.get(key, 'unset')}, now {settings.get(key, 'unset')}" for key in other
        )
        raise ValueError(
            f"{out} holds data of other settings ({listed}); choose another --out or delete it"
        )
    if path.name == "meta.json":
        if earlier["inputs"] != inputs:
            raise ValueError(
                f"{out} holds data of other files, or these have changed; choose another --out"
            )
        shards = [
            shard["file"] for split in earlier["splits"].values() for shard in split["shards"]
        ]
        if all((out / name).exists() for name in ("tokenizer.json", *shards)):
            return True
    print(f"{out} is not complete, writing what is missing", flush=True)
    return False


def write_split(out, split, groups, cfg, vocabulary, fingerprint):
    """Write the shards of one split that are not there yet, one for each group; returns their
    counts and hashes.
    """
    (out / split).mkdir(exist_ok=True)
    total = {"documents": 0, "tokens": 0, "bytes": 0, "rows": 0} | (
        {"too_long": 0} if isinstance(cfg, Pairs) else {}
    )
    shards = []
    for number, items in enumerate(groups):
        path = out / split / f"{number:05}.parquet"
        counts = counts_of(path, fingerprint) or write_shard(
            path, items, cfg, vocabulary, fingerprint
        )
        if not counts["rows"]:  # all its documents are of the other split
            path.unlink()
            continue
        for key in total:
            total[key] += counts[key]
        digest = sha256(path.read_bytes())
        shards.append({"file": f"{split}/{path.name}", "rows": counts["rows"], "sha256": digest})
        print(
            f"{split} | shard {number + 1:,} of {len(groups):,} | {total['tokens']:,} tokens",
            flush=True,
        )
    if split == "train" and not total["rows"]:
        raise ValueError(
            "no document is left to train on; lower --heldout, raise --seq_len, or give more to read"
        )
    if split == "heldout" and cfg.heldout and not total["rows"]:
        print(
            f"nothing is held out: the documents are few for --heldout={cfg.heldout}",
            file=sys.stderr,
        )
    print(" | ".join([split, *(f"{key} {count:,}" for key, count in total.items())]))
    return total | {"shards": shards}


def write_shard(path, items, cfg, vocabulary, fingerprint):
    """Documents -> ids -> rows -> a Parquet file; returns its counts, which it carries too.

    All steps are generators: a few MB are in memory at a time. A block is a list of columns
    int32_RL with about BLOCK_TOKENS tokens.
    """
    split, eos = path.parent.name, vocabulary.special["eos"]
    counts = {"documents": 0, "bytes": 0, "tokens": 0, "rows": 0}
    _, _, ids = SOURCES[type(cfg)]
    progress = {
        "desc": f"{split} {path.stem}",
        "unit": " documents",
        "disable": None,
        "leave": False,
    }
    documents = counted(tqdm(ids(items, split, cfg, vocabulary), **progress), counts, cfg)
    columns = COLUMNS if isinstance(cfg, Pairs) else COLUMNS[:3]
    if isinstance(cfg, Pairs):
        counts["too_long"] = 0
        batches = batched(documents, BLOCK_TOKENS, lambda pair: len(pair[0]))
        blocks = (pair_rows(batch, cfg.seq_len, eos) for batch in batches)
    elif cfg.rows == "padded":
        batches = batched(documents, BLOCK_TOKENS, lambda ids: len(ids) + cfg.seq_len)
        blocks = (pad_rows(batch, cfg.seq_len, vocabulary.special) for batch in batches)
    else:
        blocks = packed_blocks(documents, cfg.seq_len, eos)

    schema = pa.schema([(name, pa.list_(pa.int32(), cfg.seq_len)) for name in columns])
    with runs.writing(path) as file, pq.ParquetWriter(file, schema, **PARQUET) as writer:
        for block in blocks:  # one row group each
            counts["tokens"] += int((block[1] > 0).sum())  # segment 0 is padding
            counts["rows"] += len(block[1])
            arrays = [
                pa.FixedSizeListArray.from_arrays(array_RL.ravel(), cfg.seq_len)
                for array_RL in block
            ]
            writer.write_table(pa.table(arrays, schema=schema))
        writer.add_key_value_metadata(
            {"data_prep": json.dumps({"of": fingerprint, "counts": counts})}
        )
    return counts


def counts_of(path, fingerprint):
    """The counts that a shard of this fingerprint carries; None of any other file."""
    # never written, or cut short by a power failure
    with contextlib.suppress(FileNotFoundError, pa.ArrowInvalid):
        note = json.loads(pq.read_metadata(path).metadata.get(b"data_prep", b"{}"))
        return note["counts"] if note.get("of") == fingerprint else None


def counted(documents, counts, cfg):
    """The ids of (ids, bytes), or the (ids, fixed) of a pair; a pair that is too long for a row is
    left out.
    """
    for ids, size in documents:
        if isinstance(cfg, Pairs) and len(ids[0]) + 1 > cfg.seq_len:
            counts["too_long"] += 1
            continue
        counts["documents"] += 1
        counts["bytes"] += size
        yield ids


def find(cfg):
    """Items of the input files, sorted; a data set of Hugging Face has none."""
    if isinstance(cfg, Parquet):
        return corpus.files_below(cfg.roots, (".parquet",), cfg.out)
    if not isinstance(cfg, Python):
        source = corpus.tinystories(cfg.out) if isinstance(cfg, TinyStories) else cfg.source
        return corpus.files_below((source,), (".txt", ".text", ".md", ".py"), cfg.out)
    if cfg.hf:
        return []
    found = corpus.files_below(
        cfg.roots, corpus.ROWS if cfg.column else (".py", *corpus.ROWS), cfg.out
    )
    code = [item for item in found if not item.path.endswith(corpus.ROWS)]
    if (
        (named := [root for root in cfg.roots if root.endswith(corpus.ROWS)])
        and code
        and not cfg.column
    ):
        raise ValueError(
            f"{named[0]} holds rows, other --roots hold .py files: prepare each in an --out of its own"
        )
    if cfg.column or not code:  # rows where there are no .py files
        return found
    if len(code) < len(found):
        print(
            f"left out: {len(found) - len(code):,} files of rows; --column=NAME reads them",
            file=sys.stderr,
        )
    return code


# ---- documents to ids ----------------------------------------------------------------------------------------------


def new_vocabulary(cfg, groups):
    """Train a tokenizer on the first TRAIN_BYTES of the training documents: a byte-level BPE,
    lossless on any text.
    """
    items = next(batched(itertools.chain(*groups), TRAIN_BYTES))
    megabytes = sum(item.size for item in items) / 1e6
    print(
        f"training a tokenizer on {megabytes:,.1f} MB, about {5 + megabytes / 3:.0f} s", flush=True
    )
    tokenizer = Tokenizer(models.BPE())
    # after SPLIT, on each piece
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        # 0 reaches vocab_size on 2 MB of stories too
        min_frequency=0 if cfg.rows == "padded" else 2,
        special_tokens=[*SPECIAL.values()]
        if cfg.rows == "padded"
        else [cfg.eos, *FIM.values(), "<|fim_pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    _, texts, _ = SOURCES[type(cfg)]
    tokenizer.train_from_iterator(map("".join, texts(items, "train", cfg)), trainer)
    return load_vocabulary(tokenizer.to_str().encode(), cfg)


def load_vocabulary(data, cfg):
    """Vocabulary of a tokenizer.json whose encoder takes "<|endoftext|>" and its like in a document
    for plain text.
    """
    try:
        description = json.loads(data)
        # a chat's keep their marks, as in inference
        for token in () if cfg.chat else description["added_tokens"]:
            # runs of spaces, as GPT-NeoX has them, stay tokens
            token["special"] = not token["content"].isspace()
        encoder = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # tokenizers raises no narrower class
        problem = f"is no tokenizer.json of the library tokenizers ({runs.first_line(error)})"
        raise ValueError(f"--tokenizer={cfg.tokenizer} {problem}; name another") from None
    encoder.encode_special_tokens = True  # as plain text
    encoder.no_truncation()
    encoder.no_padding()

    # In a byte-level BPE each character of a token is one byte.
    if isinstance(cfg, Parquet):
        added, alphabet = encoder.get_added_tokens_decoder(), {*pre_tokenizers.ByteLevel.alphabet()}
        if any(
            id not in added and not alphabet.issuperset(token)
            for token, id in encoder.get_vocab().items()
        ):
            raise ValueError(
                f"--tokenizer={cfg.tokenizer} is no byte-level BPE: bytes cannot be counted; name another"
            )

    # The tokens that rows need: the five of padded rows; packed rows have EOS as PAD, whose segment
    # is 0.
    roles = SPECIAL if cfg.rows == "padded" else {"eos": cfg.eos, "pad": cfg.eos}
    special = {role: encoder.token_to_id(token) for role, token in roles.items()}
    fim = {role: encoder.token_to_id(token) for role, token in FIM.items()}
    needed = [*roles.values(), *(FIM.values() if cfg.fim_rate else ())]
    if lacking := dict.fromkeys(token for token in needed if encoder.token_to_id(token) is None):
        advice = "name another, --rows=packed, the --eos that it has, or --fim_rate=0"
        raise ValueError(f"--tokenizer={cfg.tokenizer} has no token {', '.join(lacking)}; {advice}")
    size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
    return Vocabulary(data, encoder, size, special, None if None in fim.values() else fim)


def encoded(documents, vocabulary):
    """([ids of each text], bytes) of each document, a tuple of texts, by all cores."""
    encode = vocabulary.encoder.encode_batch_fast
    # tokenises the next batch while this one is written
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        batch, encodings = [], thread.submit(list)
        for following in itertools.chain(batched(documents, BATCH_BYTES, text_bytes), [[]]):
            ahead = thread.submit(encode, [*itertools.chain(*following)], add_special_tokens=False)
            ids = (encoding.ids for encoding in encodings.result())
            for texts in batch:
                yield list(itertools.islice(ids, len(texts))), text_bytes(texts)
            batch, encodings = following, ahead
            del ids  # frees the results of this batch, 40 times its text, before the next ones come


def text_ids(items, split, cfg, vocabulary):
    """(ids, bytes) of each document of this split."""
    _, texts, _ = SOURCES[type(cfg)]
    documents, fim = texts(items, split, cfg), vocabulary.fim
    if cfg.fim_rate and split == "train":
        documents = (corpus.cut_for_fim(text, cfg) for (text,) in documents)
    for ids, size in encoded(documents, vocabulary):
        if len(ids) == 3:  # prefix, suffix, middle: each follows its token
            ids = [fim["prefix"]], ids[0], [fim["suffix"]], ids[1], [fim["middle"]], ids[2]
        yield np.fromiter(itertools.chain.from_iterable(ids), np.int32), size


def chat_files(cfg):
    """{name: bytes} of the files beside --tokenizer that hold a chat template, for --chat."""
    paths = [Path(cfg.tokenizer).with_name(name) for name in CHAT_FILES] if cfg.chat else []
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def chat_turns(documents, cfg, vocabulary):
    """([ids of prompt, ids of response], bytes) of pairs as turns of a chat, by the template beside
    --tokenizer.

    ValueError if there is no template, or no token that ends a turn.
    """
    import prompts

    encoder, folder = vocabulary.encoder, Path(cfg.tokenizer).parent
    wrap, turn_end = prompts.chat_template(folder), prompts.turn_end(encoder)
    if turn_end is None:
        raise ValueError(f"--chat: {cfg.tokenizer} has no token {' or '.join(prompts.TURN_ENDS)}")
    if wrap is None:
        raise ValueError(f"--chat: {folder} holds no chat template ({' or '.join(CHAT_FILES)})")
    for prompt, response in documents:
        answer = [*encoder.encode(response, add_special_tokens=False).ids, turn_end]
        yield [prompts.encode_chat(encoder, wrap, prompt), answer], text_bytes((prompt, response))


def pair_ids(items, split, cfg, vocabulary):
    """((int32 ids, int32 fixed), bytes) of each pair of this split, without its last EOS; see
    pair_rows.
    """
    eos, numbers = vocabulary.special["eos"], itertools.count()
    documents = corpus.pair_documents(items, split, cfg)
    pairs = chat_turns(documents, cfg, vocabulary) if cfg.chat else encoded(documents, vocabulary)
    for texts, size in pairs:
        prompt, response, suffix = texts if len(texts) == 3 else (*texts, [])
        fixed = [0] * len(response)
        if suffix and cfg.edit_rate and split == "train":
            response, fixed = edit(prompt, response, suffix, eos, next(numbers), cfg)
        # EOS fills the canvas: to a multiple of eos_to, with the one that pack() adds; a hole by
        # fewer than eos_to.
        fill = -(len(response) + 1) % cfg.eos_to
        if suffix:
            fill = (
                0
                if cfg.edit_rate
                else np.random.default_rng([cfg.seed, next(numbers)]).integers(cfg.eos_to)
            )
        # as far as the row goes
        fill = min(fill, max(0, cfg.seq_len - 1 - len(prompt) - len(response) - len(suffix)))
        ids = [*prompt, *response, *[eos] * fill, *suffix]
        fixed = [*[1] * len(prompt), *fixed, *[0] * fill, *[1] * len(suffix)]
        yield (np.array(ids, np.int32), np.array(fixed, np.int32)), size


def edit(before, hole, after, eos, number, cfg):
    """(ids, fixed) of a hole with masks to expand or to delete (fixed 2), which teach a model to
    find its length.

    To grow, adjacent tokens become one mask, which the model learns to expand; its id is the first
    of them. To shrink, up to MOST_DELETED masks follow, which the model learns to delete; their id
    is EOS. The ids and the number of the hole in its shard seed these draws. Ref: DreamOn
    (hkunlp.github.io/blog/2025/dreamon).
    """
    content = np.array([*before, *hole, *after], np.int32).tobytes()
    rng = np.random.default_rng([cfg.seed, number, *hashlib.sha256(content).digest()])
    grows, shrinks = rng.random(2) < cfg.edit_rate
    joined = grows & (rng.random(len(hole)) < rng.uniform(0, 0.95))  # with the token after it
    joined[-1:] = False
    starts = np.append(True, ~joined[:-1])[: len(hole)]
    most = min(MOST_DELETED, cfg.seq_len - 1 - len(before) - len(hole) - len(after))
    deleted = rng.integers(most + 1) if shrinks and most > 0 else 0
    ids = [*np.array(hole, np.int32)[starts].tolist(), *[eos] * deleted]
    return ids, [*np.where(joined, 2, 0)[starts].tolist(), *[2] * deleted]


def parquet_ids(items, split, cfg, vocabulary):
    """(ids, bytes) of each document of this split."""
    from rows import token_bytes

    bytes_V = token_bytes(vocabulary.encoder, vocabulary.size)
    for item in items:
        for ids in corpus.eos_documents(item.path, vocabulary.special["eos"]):
            ids = ids.astype(np.int32)
            if len(ids) and corpus.belongs(ids, split, cfg):
                yield ids, int(bytes_V[ids].sum(dtype=np.int64))


# What reads a source: gather(found, cfg, vocabulary) gives {split: [Items of each shard]} and
# {reason: how many were dropped}, texts(items, split, cfg) the documents of this split as tuples of
# texts, and ids(..., vocabulary) as ids.
SOURCES = {
    Python: (
        corpus.gather,
        lambda items, split, cfg: ((corpus.read_text(item),) for item in items),
        text_ids,
    ),
    Text: (corpus.gather_text, corpus.text_documents, text_ids),
    TinyStories: (corpus.gather_text, corpus.text_documents, text_ids),
    Pairs: (corpus.gather_pairs, corpus.pair_documents, pair_ids),
    Parquet: (corpus.gather_parquet, None, parquet_ids),
}


# ---- ids to rows ---------------------------------------------------------------------------------------------------


def pack(documents, seq_len, eos, pad):
    """Cut documents, each followed by `eos`, into rows of `seq_len`: int32 tokens_RL, segments_RL,
    positions_RL.

    Segments count the documents of a row from 1, positions the tokens of a document from 0; both
    start anew in every row. The last row is filled up with `pad`, segment 0, position 0. No
    documents give no rows.
    """
    end_N = np.cumsum([0] + [len(document) + 1 for document in documents])
    total, end = end_N[-1], np.int32([eos])
    tokens_RL = np.full((-(-total // seq_len), seq_len), pad, np.int32)
    parts = [part for document in documents for part in (document, end)]
    tokens_RL.reshape(-1)[:total] = np.concatenate([end[:0], *parts])
    # A document starts where a row does, and after each EOS.
    starts_RL = np.zeros(tokens_RL.shape, bool)
    starts_RL[:, 0] = True
    starts_RL.reshape(-1)[end_N[:-1]] = True
    segments_RL = np.cumsum(starts_RL, axis=1, dtype=np.int32)
    # A position counts from the last start before it: the largest start up to its column.
    column_L = np.arange(seq_len, dtype=np.int32)
    positions_RL = column_L - np.maximum.accumulate(np.where(starts_RL, column_L, 0), axis=1)
    segments_RL.reshape(-1)[total:] = 0
    positions_RL.reshape(-1)[total:] = 0
    return tokens_RL, segments_RL, positions_RL


def packed_blocks(documents, seq_len, eos):
    """The rows that pack() gives for all documents, in blocks of about BLOCK_TOKENS tokens."""
    block, waiting = [], 0  # documents, and how many tokens they have with EOS
    for ids in documents:
        block.append(ids)
        waiting += len(ids) + 1
        if waiting >= max(BLOCK_TOKENS, seq_len):
            # Full rows go out now.
            rows = pack(block, seq_len, eos, eos)
            full, waiting = divmod(waiting, seq_len)
            yield [array_RL[:full] for array_RL in rows]
            # All in the unfinished row ends with EOS: packing that again gives the same.
            token_L, segment_L, _ = (array_RL[-1] for array_RL in rows)
            segments = range(1, segment_L.max() + 1) if waiting else ()
            block = [token_L[segment_L == segment][:-1] for segment in segments]
    if block:
        yield pack(block, seq_len, eos, eos)


def pad_rows(documents, seq_len, special):
    """Each document in rows of its own, BOS first, then EOS, then PAD: int32 tokens_RL,
    segments_RL, positions_RL.

    A document longer than a row goes on in the next. Segments are 1, positions count the tokens of
    a row from 0; both are 0 at PAD.
    """
    bos, eos = [special["bos"]], [special["eos"]]
    texts = [np.concatenate([bos, ids, eos]) for ids in documents]
    rows = [
        text[start : start + seq_len] for text in texts for start in range(0, len(text), seq_len)
    ]
    tokens_RL = np.full((len(rows), seq_len), special["pad"], np.int32)
    segments_RL = np.zeros(tokens_RL.shape, np.int32)
    for r, row in enumerate(rows):
        tokens_RL[r, : len(row)] = row
        segments_RL[r, : len(row)] = 1
    return tokens_RL, segments_RL, segments_RL * np.arange(seq_len, dtype=np.int32)


def pair_rows(pairs, seq_len, eos):
    """Whole pairs in rows, each where it still fits the last row: int32 tokens, segments, positions
    and fixed, all _RL.

    A pair is (int32 ids, int32 fixed) of equal length; both without the EOS that ends it. Segments
    and positions are those of pack(); fixed is 0 at EOS and at padding.
    """
    rows, room = [], 0
    for pair in pairs:
        size = len(pair[0]) + 1
        if size > room:
            rows.append([])
            room = seq_len
        rows[-1].append(pair)
        room -= size
    packed = []
    for row in rows:
        ids, fixed = zip(*row, strict=True)
        packed.append([*pack(ids, seq_len, eos, eos), pack(fixed, seq_len, 0, 0)[0]])
    return [np.concatenate(column) for column in zip(*packed, strict=True)]


if __name__ == "__main__":
    runs.command(lambda config: main(config.source), Config, __doc__)
