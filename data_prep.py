"""Turn text into a tokenizer and token rows, which the trainers read. Reads the disk.

    python data_prep.py                                          # the standard library, in 10 s
    python data_prep.py text stories.txt --out=data/stories
    python data_prep.py tinystories                              # pip install datasets
    python data_prep.py python --roots ~/src --out=data/mine     # .py files
    python data_prep.py python --roots shards --column=content --out=data/rows
    python data_prep.py python --hf=NAME:python --out=data/hf    # a streamed data set
    python data_prep.py pairs pairs.jsonl --eos_to=64 --out=data/pairs
    python data_prep.py pairs chat.jsonl --chat --tokenizer=MODEL/tokenizer.json --out=data/chat
    python data_prep.py acecode --tokenizer=MODEL/tokenizer.json --out=data/acecode

python reads .py files, or the rows of a text column in .parquet, .jsonl and .ndjson files, packed
by gzip or not, in a .json file that is named, or in a data set; see corpus.py for what it drops.
Linked folders are entered; files of other endings are counted as left out. text splits files of any
size at <|endoftext|>. pairs reads lines {"prompt": TEXT, "response": TEXT}; a "suffix" follows the
response and is given to the model, as the prompt is; with --chat a "system" is the system turn,
instead of the template's own. acecode writes tasks with tests for coupled_grpo.py: questions of
AceCode-87K, or of files in its form.

Packed rows (PythonCoder, Dream) hold documents one after the other, each ended by EOS. Padded rows
(MDLM) hold one document each: BOS, tokens, EOS, PAD. A long document goes on in the next row; a
pair that is longer than a row is left out.

Writes --out: tokenizer.json, shards (see rows.py) and last of all meta.json: special ids, counts,
hashes. The same command continues a run that was stopped or killed, and ends with the same bytes.
It trains no model and knows none.

Axes: N documents, R rows, L row length, V vocabulary.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import typing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

import corpus
import prompts
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
    seed: Natural = 0  # of the held-out split, the order of documents and fill-in-the-middle

    # Values of sources without such a flag.
    rows: typing.ClassVar[str] = "packed"
    vocab_size: typing.ClassVar[int] = 8192
    fim_rate: typing.ClassVar[float] = 0.0
    max_bytes: typing.ClassVar[int] = 1_000_000
    column: typing.ClassVar[str] = ""
    benchmarks: typing.ClassVar[tuple] = ()
    chat: typing.ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents(Shards):
    # ---- rows
    vocab_size: VocabSize = 8192  # size of a new tokenizer: 256 bytes, 5 special tokens, merges
    rows: typing.Literal["packed", "padded"] = "padded"  # for PythonCoder and Dream | for MDLM
    # fraction of the training documents rearranged for fill-in-the-middle, in packed rows
    fim_rate: Share = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Python(Documents):
    """Python files, rows of a column or a data set; by default this Python's standard library."""

    # ---- sources
    roots: tuple[str, ...] = ()  # folders that are searched for .py files, or files
    rows: typing.Literal["packed", "padded"] = "packed"  # for PythonCoder and Dream | for MDLM
    max_bytes: Count = 1_000_000  # larger files are dropped
    # text column of files of rows or --hf; "" looks for content, text, code
    column: str = ""
    # data set on Hugging Face, which is streamed: NAME, NAME:FOLDER of it, or a local folder
    hf: str = ""
    # licences of rows that name one; others stay
    licences: typing.Literal["permissive", "any"] = "permissive"
    # files of problems to decontaminate from, or none; default for rows, packages: HumanEval, MBPP
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
    vocab_size: VocabSize = 8192  # size of a new tokenizer: 256 bytes, 5 special tokens, merges
    # EOS pads a response to a multiple of this; before a suffix, by a random number below it
    eos_to: Count = 1
    chat: bool = False  # write pairs as turns of a chat, by the template beside --tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class AceCode:
    """Programming questions with tests, as tasks for coupled_grpo.py."""

    # JSONL files in AceCode's form, or folders of them; none downloads AceCode-87K
    roots: tuple[str, ...] = ()
    out: str = "data/acecode"  # folder to write
    difficulty: typing.Literal["hard", "all"] = "hard"  # by the pass rates of AceCode's models
    # tokenizer.json of the model to be trained; "" keeps prompts of any length
    tokenizer: str = ""
    max_prompt: Count = 200  # tokens of the longest prompt, with Qwen's chat template
    heldout: Share = 0.02  # fraction of the questions held out
    seed: Natural = 0  # of the held-out draw


AnySource = (
    Python
    | Text
    | typing.Annotated[TinyStories, tyro.conf.subcommand("tinystories")]
    | Pairs
    | typing.Annotated[AceCode, tyro.conf.subcommand("acecode")]
)


@dataclasses.dataclass(frozen=True)
class Config:
    source: AnySource = Python()  # what is read, each with flags of its own


# Qwen2.5's names; its ids are 151659-151661
FIM = {role: f"<|fim_{role}|>" for role in ("prefix", "middle", "suffix")}
# of padded rows, in order
SPECIAL = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "mask": "<mask>", "unk": "<unk>"}
CHAT_FILES = "tokenizer_config.json", "chat_template.jinja"  # one of them holds a chat template
# Qwen2.5's: single digits, runs of indentation together, line ends with the punctuation before them
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
COLUMNS = ["input_ids", "segments", "positions", "fixed"]  # of a shard; the last of pairs alone
BLOCK_TOKENS = 1 << 21  # tokens packed at a time, one row group of a shard
BATCH_BYTES = 4_000_000  # text tokenised at a time: the results take about 40 times its memory
TRAIN_BYTES = 200_000_000  # text that a new tokenizer is trained on
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
    special: dict  # ids of "eos" and "pad", one id in packed rows; of all SPECIAL in padded rows
    fim: dict | None  # ids of FIM, None where the tokenizer lacks one


# ---- from files to a folder of shards ------------------------------------------------------------


def main(cfg):
    """Prepare a source, for example main(Python(out="data/mine")), or what its folder lacks."""
    if isinstance(cfg, AceCode):
        write_acecode(cfg)
        return
    if not cfg.seq_len:
        cfg = dataclasses.replace(cfg, seq_len=2048 if cfg.rows == "packed" else 256)
    if cfg.seq_len < 2:
        raise ValueError(f"--seq_len={cfg.seq_len}: at least 2")
    if cfg.fim_rate and cfg.rows == "padded":
        raise ValueError("--fim_rate goes with --rows=packed only")
    if cfg.chat and not cfg.tokenizer:
        raise ValueError("--chat takes a model's template: --tokenizer=FOLDER/tokenizer.json")
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
            raise OSError(
                f"{error.filename or out}: {error.strerror or error}; "
                "put that right and run the same command to go on"
            ) from None


def prepare(cfg, out):
    """Files -> tokenizer -> shards -> meta.json.

    A run may be killed at any moment: a file gets its name when it is whole, and meta.json is the
    last one.
    """
    found, others = find(cfg)
    inputs = sha256(json.dumps([(item.name, item.sha256) for item in found]).encode())
    if isinstance(cfg, Python):  # what its flags leave open
        if not cfg.column and (cfg.hf or corpus.ROWS_NAME.search(found[0].path)):
            cfg = dataclasses.replace(cfg, column=corpus.TEXT_COLUMNS)
        cfg = dataclasses.replace(cfg, benchmarks=corpus.benchmark_files(cfg))
    vocabulary = None
    if cfg.tokenizer:
        vocabulary = load_vocabulary(tokenizer_json(cfg.tokenizer), cfg)
    if cfg.chat:
        next(chat_turns([], cfg, vocabulary), None)  # fails here where it fails at all
    settings = settings_of(cfg, vocabulary)
    if is_complete(out, settings, inputs):
        shutil.rmtree(out / ".rows", ignore_errors=True)  # of a run killed in its last second
        print(f"{out} is complete, nothing to do")
        return

    # All files are read through once, so that what is bad is known before anything is written.
    groups, dropped = gather(found, cfg)
    dropped |= others
    left_out = [f"{count:,} {reason}" for reason, count in dropped.items() if count]
    reasons = ", ".join(left_out) or "nothing"
    if not groups["train"]:
        where = f"{found[0].path}: " if len(found) == 1 else ""
        raise ValueError(
            f"{where}no document to train on (left out: {reasons}); "
            "lower --heldout or name more to read, neither JSON nor packed"
        )
    print(f"shards of training documents: {len(groups['train']):,}; left out: {reasons}")
    vocabulary = vocabulary or new_vocabulary(cfg, groups["train"])

    # Settings, documents and tokenizer decide the bytes of the shards. Shards of an earlier run
    # that carry the fingerprint of all three stay. Rows of a column count as one document per
    # shard: there may be millions.
    shards = [*itertools.chain(*groups.values())]
    if cfg.column:
        digests = [b"".join(bytes.fromhex(item.sha256) for item in items) for items in shards]
        keys = {("", sha256(digest)) for digest in digests}
    else:
        keys = {(item.name, item.sha256) for items in shards for item in items}
    fingerprint = sha256(json.dumps([1, settings, sorted(keys)]).encode() + vocabulary.data)
    for path in (*out.glob("train/[0-9]*.parquet*"), *out.glob("heldout/[0-9]*.parquet*")):
        if counts_of(path, fingerprint) is None:
            path.unlink()
    noted = {"settings": settings, "inputs": inputs, "fingerprint": fingerprint}
    runs.write(out / "progress.json", noted)
    runs.write(out / "tokenizer.json", vocabulary.data)
    for name, content in chat_files(cfg).items():
        runs.write(out / name, content)

    splits = {}
    for split, shards in groups.items():
        splits[split] = write_split(out, split, shards, cfg, vocabulary, fingerprint)
    meta = {
        "format": 1,
        "source": type(cfg).__name__.lower(),
        "seq_len": cfg.seq_len,
        "vocab_size": vocabulary.size,
        "vocab_padded": -(-vocabulary.size // 256) * 256,  # a size that matrix units like
    }
    meta |= {f"{role}_id": id for role, id in vocabulary.special.items()}
    meta |= {"fim": vocabulary.fim, "tokenizer_sha256": sha256(vocabulary.data)}
    meta |= {"splits": splits, "dropped": dropped}
    runs.write(out / "progress.json", meta | noted)
    (out / "progress.json").rename(out / "meta.json")
    shutil.rmtree(out / ".rows", ignore_errors=True)
    print(f"wrote {out}; its tokenizer has {vocabulary.size:,} ids")


def settings_of(cfg, vocabulary):
    """What decides, beside the input files, which bytes are written. The order of keys counts."""
    settings = {"source": type(cfg).__name__.lower(), "tokenizer": ""}
    if vocabulary:
        settings["tokenizer"] = sha256(vocabulary.data)
    names = "vocab_size eos seq_len heldout fim_rate eos_to max_bytes shard_bytes seed".split()
    if cfg.rows == "padded":
        names.append("rows")
    settings |= {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}
    if cfg.fim_rate:
        settings["spm_rate"] = corpus.SPM_RATE
    if cfg.column:
        settings |= {"column": cfg.column, "hf": cfg.hf, "licences": cfg.licences}
    if cfg.chat:
        settings["chat"] = sha256(b"".join(chat_files(cfg).values()))
    if cfg.benchmarks:
        files = [runs.as_path(path).read_bytes() for path in cfg.benchmarks]
        settings["benchmarks"] = sha256(b"".join(files))
    return settings


def is_complete(out, settings, inputs):
    """Whether an earlier run has written everything. ValueError if its settings or files differ."""
    noted = [out / name for name in ("meta.json", "progress.json") if (out / name).exists()]
    if not noted:
        if any((out / name).exists() for name in ("tokenizer.json", "train", "heldout")):
            raise ValueError(f"{out} holds files of somebody else; choose another --out")
        return False
    earlier = runs.read_json(noted[0], "settings", "inputs")
    before = earlier["settings"]
    changed = []
    for key in {**before, **settings}:
        if before.get(key) != settings.get(key):
            now = settings.get(key, "unset")
            changed.append(f"{key} {before.get(key, 'unset')}, now {now}")
    if changed:
        listed = "; ".join(changed)
        raise ValueError(f"{out} holds data of other settings ({listed}); choose another --out")
    if noted[0].name == "meta.json":
        if earlier["inputs"] != inputs:
            raise ValueError(
                f"{out} holds data of other files, or these have changed; choose another --out"
            )
        names = ["tokenizer.json"]
        for split in earlier["splits"].values():
            names += [shard["file"] for shard in split["shards"]]
        if all((out / name).exists() for name in names):
            return True
    print(f"{out} is not complete, writing what is missing", flush=True)
    return False


def write_split(out, split, groups, cfg, vocabulary, fingerprint):
    """Write the missing shards of a split, one for each group; returns their counts and hashes."""
    (out / split).mkdir(exist_ok=True)
    total = {"documents": 0, "tokens": 0, "bytes": 0, "rows": 0}
    if isinstance(cfg, Pairs):
        total["too_long"] = 0
    shards = []
    for number, items in enumerate(groups):
        path = out / split / f"{number:05}.parquet"
        counts = counts_of(path, fingerprint)
        if counts is None:
            counts = write_shard(path, items, cfg, vocabulary, fingerprint)
        if not counts["rows"]:  # all its documents are of the other split
            path.unlink()
            continue
        for key in total:
            total[key] += counts[key]
        digest = sha256(path.read_bytes())
        shards.append({"file": f"{split}/{path.name}", "rows": counts["rows"], "sha256": digest})
        done = f"shard {number + 1:,} of {len(groups):,}"
        print(f"{split} | {done} | {total['tokens']:,} tokens", flush=True)
    if split == "train" and not total["rows"]:
        raise ValueError("no document to train on; lower --heldout or raise --seq_len")
    if split == "heldout" and cfg.heldout and not total["rows"]:
        few = f"too few documents for --heldout={cfg.heldout}"
        print(f"nothing is held out: {few}", file=sys.stderr)
    return total | {"shards": shards}


def write_shard(path, items, cfg, vocabulary, fingerprint):
    """Documents -> ids -> rows -> a Parquet file; returns its counts, which it carries too.

    All steps are generators: a few MB are in memory at a time. A block is a list of columns
    int32_RL with about BLOCK_TOKENS tokens.
    """
    split = path.parent.name
    eos = vocabulary.special["eos"]
    counts = {"documents": 0, "bytes": 0, "tokens": 0, "rows": 0}
    columns = COLUMNS[:3]
    if isinstance(cfg, Pairs):
        counts["too_long"] = 0
        columns = COLUMNS
        documents = counted(pair_ids(items, split, cfg, vocabulary), counts, path, cfg)
        batches = batched(documents, BLOCK_TOKENS, lambda pair: len(pair[0]))
        blocks = (pair_rows(batch, cfg.seq_len, eos) for batch in batches)
    else:
        documents = counted(text_ids(items, split, cfg, vocabulary), counts, path, cfg)
        if cfg.rows == "padded":
            batches = batched(documents, BLOCK_TOKENS, lambda ids: len(ids) + cfg.seq_len)
            blocks = (pad_rows(batch, cfg.seq_len, vocabulary.special) for batch in batches)
        else:
            blocks = packed_blocks(documents, cfg.seq_len, eos)

    schema = pa.schema([(name, pa.list_(pa.int32(), cfg.seq_len)) for name in columns])
    with runs.writing(path) as file, pq.ParquetWriter(file, schema, **PARQUET) as writer:
        for block in blocks:  # one row group each
            counts["tokens"] += int((block[1] > 0).sum())  # segment 0 is padding
            counts["rows"] += len(block[1])
            arrays = []
            for array_RL in block:
                flat = array_RL.ravel()
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, cfg.seq_len))
            writer.write_table(pa.table(arrays, schema=schema))
        note = json.dumps({"of": fingerprint, "counts": counts})
        writer.add_key_value_metadata({"data_prep": note})
    return counts


def counts_of(path, fingerprint):
    """The counts that a shard of this fingerprint carries; None of any other file."""
    # never written, or cut short by a power failure
    with contextlib.suppress(FileNotFoundError, pa.ArrowInvalid):
        note = json.loads(pq.read_metadata(path).metadata.get(b"data_prep", b"{}"))
        if note.get("of") == fingerprint:
            return note["counts"]
    return None


def counted(documents, counts, path, cfg):
    """The documents of (document, bytes), counted; a pair that is longer than a row is left out."""
    title = f"{path.parent.name} {path.stem}"
    for ids, size in tqdm(documents, title, unit=" documents", disable=None, leave=False):
        if isinstance(cfg, Pairs) and len(ids[0]) + 1 > cfg.seq_len:
            counts["too_long"] += 1
            continue
        counts["documents"] += 1
        counts["bytes"] += size
        yield ids


def find(cfg):
    """(Items of the input files, sorted, {suffix: number of other files}); --hf has none."""
    if isinstance(cfg, TinyStories):
        return corpus.files_below((tinystories(cfg.out),), (".txt",), cfg.out)
    if not isinstance(cfg, Python):
        return corpus.files_below((cfg.source,), (".txt", ".text", ".md", ".py"), cfg.out)
    if cfg.hf:
        return [], {}
    if cfg.column:
        return corpus.files_below(cfg.roots, corpus.ROWS, cfg.out)
    found, others = corpus.files_below(cfg.roots, (".py", *corpus.ROWS), cfg.out)
    code = [item for item in found if not corpus.ROWS_NAME.search(item.path)]
    if not code:  # rows where there are no .py files
        return found, others
    for root in cfg.roots:
        if corpus.ROWS_NAME.search(root):
            problem = "holds rows, other --roots hold .py files"
            raise ValueError(f"{root} {problem}: prepare each in an --out of its own")
    if len(code) < len(found):
        rows = f"{len(found) - len(code):,} files of rows"
        print(f"left out: {rows}; --column=NAME reads them", file=sys.stderr)
    return code, others


def tinystories(out):
    """The file of all stories in the folder --out, downloaded if it is not there."""
    path = os.path.join(out, "tinystories.txt")
    if not os.path.exists(path):
        stories = corpus.download(
            corpus.TINYSTORIES, "prepare a text file with: python data_prep.py text FILE"
        )
        with runs.writing(path) as file:
            for story in tqdm(stories, "writing", unit=" stories", disable=None):
                file.write(f"{story['text'].strip()}\n{corpus.SEPARATOR}\n".encode())
    return path


def gather(found, cfg):
    """({split: [Items of each shard]}, {reason: number of documents that were dropped})."""
    if isinstance(cfg, Python):
        return corpus.gather_python(found, cfg)
    if isinstance(cfg, Pairs):
        return corpus.gather_pairs(found, cfg)
    return corpus.gather_text(found, cfg)


def documents_of(items, split, cfg):
    """The documents of this split, tuples of texts: one text, or prompt, response and suffix."""
    if isinstance(cfg, Python):  # whose splits are of files
        return ((corpus.read_text(item),) for item in items)
    if isinstance(cfg, Pairs):
        return corpus.pair_documents(items, split, cfg)
    return corpus.text_documents(items, split, cfg)


# ---- documents to ids ----------------------------------------------------------------------------


def new_vocabulary(cfg, groups):
    """Train a byte-level BPE, lossless on any text, on the first TRAIN_BYTES of the documents."""
    items = next(batched(itertools.chain(*groups), TRAIN_BYTES))
    megabytes = sum(item.size for item in items) / 1e6
    print(f"training a tokenizer on {megabytes:,.1f} MB, 3 MB a second")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [cfg.eos, *FIM.values(), "<|fim_pad|>"]
    least = 2
    if cfg.rows == "padded":
        special = [*SPECIAL.values()]
        least = 0  # reaches vocab_size on 2 MB of stories too
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        min_frequency=least,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    texts = map("".join, documents_of(items, "train", cfg))
    tokenizer.train_from_iterator(texts, trainer)
    return load_vocabulary(tokenizer.to_str().encode(), cfg)


def load_vocabulary(data, cfg):
    """The Vocabulary of a tokenizer.json. Names of special tokens in a document are plain text."""
    encoder = Tokenizer.from_buffer(data)
    if not cfg.chat:  # those of a chat keep their marks, as in inference
        description = json.loads(data)
        for token in description.get("added_tokens", []):
            # runs of spaces, as GPT-NeoX has them, stay tokens
            token["special"] = not token["content"].isspace()
        encoder = Tokenizer.from_str(json.dumps(description))
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True  # as plain text

    # Packed rows have EOS as PAD, whose segment is 0; padded rows need five special tokens.
    roles = {"eos": cfg.eos, "pad": cfg.eos}
    if cfg.rows == "padded":
        roles = SPECIAL
    special = {role: encoder.token_to_id(token) for role, token in roles.items()}
    fim = {role: encoder.token_to_id(token) for role, token in FIM.items()}
    lacking = [token for role, token in roles.items() if special[role] is None]
    if cfg.fim_rate:
        lacking += [token for role, token in FIM.items() if fim[role] is None]
    if lacking:
        names = ", ".join(dict.fromkeys(lacking))
        raise ValueError(
            f"--tokenizer={cfg.tokenizer} has no token {names}; "
            "name another, --rows=packed, the --eos that it has, or --fim_rate=0"
        )
    size = max(encoder.get_vocab().values()) + 1
    return Vocabulary(data, encoder, size, special, None if None in fim.values() else fim)


def tokenizer_json(path):
    """Bytes of a tokenizer.json with the tokens of files beside it. ValueError for another file."""
    path = runs.as_path(path)
    named = runs.read_tokenizer(path)
    data = path.read_bytes()
    if runs.add_named_tokens(Tokenizer.from_buffer(data), path.parent):
        return named.to_str().encode()
    return data


def encoded(documents, vocabulary):
    """([ids of each text], bytes) of each document, a tuple of texts, by all cores."""
    encode = vocabulary.encoder.encode_batch_fast
    # A thread tokenises the next batch while this one is written.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        batch = []
        encodings = thread.submit(list)
        for following in itertools.chain(batched(documents, BATCH_BYTES, text_bytes), [[]]):
            ahead = thread.submit(encode, [*itertools.chain(*following)], add_special_tokens=False)
            ids = (encoding.ids for encoding in encodings.result())
            for texts in batch:
                yield list(itertools.islice(ids, len(texts))), text_bytes(texts)
            batch = following
            encodings = ahead
            del ids  # frees the results of this batch, 40 times its text, before the next ones come


def text_ids(items, split, cfg, vocabulary):
    """(ids, bytes) of each document of this split."""
    documents = documents_of(items, split, cfg)
    if cfg.fim_rate and split == "train":
        documents = (corpus.cut_for_fim(text, cfg) for (text,) in documents)
    fim = vocabulary.fim
    for texts, size in encoded(documents, vocabulary):
        if len(texts) == 3:  # each follows its token
            prefix, suffix, middle = texts
            texts = [fim["prefix"]], prefix, [fim["suffix"]], suffix, [fim["middle"]], middle
        yield np.fromiter(itertools.chain.from_iterable(texts), np.int32), size


def chat_files(cfg):
    """{name: bytes} of the files beside --tokenizer that a chat template needs, for --chat."""
    found = {}
    for name in (*CHAT_FILES, "special_tokens_map.json"):
        path = Path(cfg.tokenizer).parent / name
        if cfg.chat and path.is_file():
            found[name] = path.read_bytes()
    return found


def chat_turns(documents, cfg, vocabulary):
    """([ids of prompt, ids of response], bytes) of pairs as turns of a chat.

    ValueError if there is no template beside --tokenizer, or no token that ends a turn.
    """
    encoder = vocabulary.encoder
    folder = Path(cfg.tokenizer).parent
    wrap = prompts.chat_template(folder)
    if prompts.turn_end(encoder) is None:
        raise ValueError(f"--chat: {cfg.tokenizer} has no token {' or '.join(prompts.TURN_ENDS)}")
    if wrap is None:
        raise ValueError(f"--chat: {folder} holds no chat template ({' or '.join(CHAT_FILES)})")
    for prompt, response, *system in documents:
        ids = prompts.encode_chat(encoder, wrap, prompt, *system)
        answer = prompts.encode_answer(encoder, ids, response)
        yield [ids, answer], text_bytes((prompt, response, *system))


def pair_ids(items, split, cfg, vocabulary):
    """((int32 ids, int32 fixed), bytes) of each pair of this split, without its last EOS."""
    eos = vocabulary.special["eos"]
    holes = itertools.count()
    documents = documents_of(items, split, cfg)
    encode = chat_turns(documents, cfg, vocabulary) if cfg.chat else encoded(documents, vocabulary)
    for texts, size in encode:
        prompt, response, *rest = texts
        suffix = rest[0] if rest else []
        # EOS fills the canvas: to a multiple of eos_to, with the one that pack() adds; a hole by
        # fewer than eos_to; as far as the row goes.
        fill = -(len(response) + 1) % cfg.eos_to
        if suffix:
            fill = int(np.random.default_rng([cfg.seed, next(holes)]).integers(cfg.eos_to))
        room = cfg.seq_len - 1 - len(prompt) - len(response) - len(suffix)
        fill = min(fill, max(0, room))
        ids = [*prompt, *response, *[eos] * fill, *suffix]
        fixed = [1] * len(prompt) + [0] * (len(response) + fill) + [1] * len(suffix)
        yield (np.array(ids, np.int32), np.array(fixed, np.int32)), size


# ---- ids to rows ---------------------------------------------------------------------------------


def pack(documents, seq_len, eos, pad):
    """Cut documents, each followed by `eos`, into rows: int32 tokens, segments, positions, all _RL.

    Segments count the documents of a row from 1, positions the tokens of a document from 0; both
    start anew in every row. The last row is filled up with `pad`, segment 0, position 0. No
    documents give no rows.
    """
    end_N = np.cumsum([0] + [len(document) + 1 for document in documents])
    total = end_N[-1]
    end = np.int32([eos])
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
    block = []
    waiting = 0  # tokens of the documents in block, with EOS
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
    """Each document in rows of its own: BOS, ids, EOS, PAD: int32 tokens, segments, positions.

    A document longer than a row goes on in the next. Segments are 1, positions count the tokens of
    a row from 0; both are 0 at PAD.
    """
    rows = []
    for ids in documents:
        text = np.concatenate([[special["bos"]], ids, [special["eos"]]])
        rows += [text[start : start + seq_len] for start in range(0, len(text), seq_len)]
    tokens_RL = np.full((len(rows), seq_len), special["pad"], np.int32)
    segments_RL = np.zeros(tokens_RL.shape, np.int32)
    for r, row in enumerate(rows):
        tokens_RL[r, : len(row)] = row
        segments_RL[r, : len(row)] = 1
    return tokens_RL, segments_RL, segments_RL * np.arange(seq_len, dtype=np.int32)


def pair_rows(pairs, seq_len, eos):
    """Whole pairs in rows, as many as fit: int32 tokens, segments, positions and fixed, all _RL.

    A pair is (int32 ids, int32 fixed) of equal length; both without the EOS that ends it. Segments
    and positions are those of pack(); fixed is 0 at EOS and at padding.
    """
    rows = []
    room = 0
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


# ---- tasks of AceCode ----------------------------------------------------------------------------


def write_acecode(cfg):
    """Write train.jsonl, heldout.jsonl and meta.json, all or none of them, in an empty folder."""
    out = Path(cfg.out)
    items = []
    dropped = {}
    if cfg.roots:
        items, dropped = corpus.files_below(cfg.roots, corpus.JSON_LINES, out)
    # The same inputs give the same bytes, wherever they are.
    settings = vars(cfg) | {"roots": [item.sha256 for item in items], "out": ""}
    tokenizer = None
    if cfg.tokenizer:
        tokenizer = runs.read_tokenizer(cfg.tokenizer)
        settings["tokenizer"] = sha256(tokenizer_json(cfg.tokenizer))
    out.parent.mkdir(parents=True, exist_ok=True)
    with runs.lock(out.absolute().with_name(f".lock_{out.name}")):
        names = "train.jsonl", "heldout.jsonl", "meta.json"
        whole = all((out / name).is_file() for name in names)
        if whole and runs.read_json(out / "meta.json").get("settings") == settings:
            print(f"{out} is complete, nothing to do")
            return
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} is not empty; delete it, or choose another --out")
        write_tasks(cfg, out, items, settings, tokenizer, dropped)


def write_tasks(cfg, out, items, settings, tokenizer, dropped):
    """Write the tasks of AceCode, or of the files in `items`, into a new folder."""
    with runs.new_folder(out) as folder:
        splits = {"train": [], "heldout": []}
        for task in corpus.acecode_tasks(cfg, items, tokenizer, dropped):
            # Whether a question is held out depends on the seed and its id alone.
            where = "heldout" if corpus.draw(cfg.seed, task["id"]) < cfg.heldout else "train"
            splits[where].append(task)
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        if not splits["train"]:
            advice = "take --difficulty=all, or lower --heldout"
            raise ValueError(f"no task is left (dropped: {reasons}); {advice}")
        counts = {}
        for split, tasks in splits.items():
            counts[split] = len(tasks)
            lines = [json.dumps(task) + "\n" for task in tasks]
            runs.write(folder / f"{split}.jsonl", "".join(lines).encode())
        meta = {"settings": settings, "tasks": counts, "dropped": dropped}
        runs.write(folder / "meta.json", meta)
    print(f"dropped: {reasons}")
    print(f"wrote {out}: {counts['train']:,} tasks, {counts['heldout']:,} held out")


MOVED = {
    "edit_rate": "DreamOn's growing holes are generated by extra/demos.py, no longer trained",
    "spm_rate": "half of the documents rearranged by --fim_rate are in the order SPM",
}

if __name__ == "__main__":
    runs.command(lambda cfg: main(cfg.source), Config, __doc__, moved=MOVED)
