"""Token rows, as the trainers read them from a folder of data_prep.py. Reads the disk.

    train, heldout, tokenizer_json = open_data("data/mine")
    token_BL, segment_BL, position_BL = train.batch(seed=0, step=7, size=16)

Packed rows (PythonCoder, Dream) hold documents one after the other, each ended by EOS. Padded rows
(MDLM) hold one document each: BOS, tokens, EOS, PAD. Rows of pairs hold whole pairs of prompt and
response, and have a fourth column, fixed: 1 where a token belongs to no response.

A folder holds train/00000.parquet, heldout/00000.parquet, ... (COLUMNS: int32 lists of seq_len),
tokenizer.json, and meta.json, which lists the shards with their rows and SHA-256 and is written
last. This file makes no rows: data_prep.py does.

Axes: R rows, L row length, V vocabulary.
"""

import collections
import concurrent.futures
import functools
import hashlib
import re
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import runs

PROBE = "A b  c_1\n\n\t\u00e9\u00df \u4e2d\u6587 \U0001f600\n    d"  # a text of 1 to 4 bytes a character
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
MARK = re.compile(r"<.*>|\[.*\]")  # an added token of this form is no text, special or not
COLUMNS = ["input_ids", "segments", "positions", "fixed"]  # of a shard; the last of pairs only


class Rows:
    """The rows of one split ("train" or "heldout") of a folder; their order is a function of (seed,
    epoch).

    FileNotFoundError or ValueError if the folder is not finished, or a file of it is damaged.
    """

    def __init__(self, folder, split):
        self.folder = runs.as_path(folder)
        path = self.folder / "meta.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no finished data (no meta.json); write it with data_prep.py"
            )
        try:
            self.meta = runs.read_json(
                path, "splits", "seq_len", "tokenizer_sha256", "vocab_size", "vocab_padded"
            )
            self.shards = self.meta["splits"][split]["shards"]
            self.tokens = self.meta["splits"][split]["tokens"]
            # first row number of each shard
            self.first = np.cumsum([0] + [shard["rows"] for shard in self.shards])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path} is damaged; delete the folder and write it again with data_prep.py"
            ) from None
        self.total = int(self.first[-1])
        self.columns = COLUMNS if self.meta.get("source") == "pairs" else COLUMNS[:3]
        self.order = functools.lru_cache(2)(self.order)  # of this epoch and the next
        # held-out rows are read again
        self.shard = functools.lru_cache(3 if split == "train" else 32)(self.shard)

    def order(self, seed, epoch):
        """All row numbers in the order of this epoch.

        Shards are permuted, then the rows of each: a step reads one or two shards, whatever the
        size of the data.
        """
        rng = np.random.default_rng([seed, epoch])
        shards = rng.permutation(len(self.shards))
        return np.concatenate(
            [self.first[i] + rng.permutation(self.shards[i]["rows"]) for i in shards]
        )

    def shard(self, i):
        """Shard i as int32 [columns, R, L], when its bytes are those that were written."""
        path = self.folder / self.shards[i]["file"]
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.shards[i]["sha256"]:
            raise ValueError(
                f"{path} is corrupted (its SHA-256 is another); "
                "delete it and run data_prep.py again"
            )
        table = pq.read_table(pa.BufferReader(data), columns=self.columns)
        flat = [table[name].combine_chunks().values.to_numpy() for name in self.columns]
        shard = np.stack(flat, dtype=np.int32).reshape(len(flat), len(table), -1)
        largest = shard[0].max()
        if shard[0].min() < 0 or largest >= self.meta["vocab_size"]:
            raise ValueError(
                f"{path} holds ids that its tokenizer has not, up to {largest}; write it again"
            )
        return shard

    def read(self, row_ids):
        """int32 [columns, ..., L] for an array of row numbers; -1 gives a row of zeros."""
        flat = row_ids.ravel()
        shards = np.searchsorted(self.first, flat, side="right") - 1  # shard of each row
        out = np.zeros((len(self.columns), len(flat), self.meta["seq_len"]), np.int32)
        for i in np.unique(shards[shards >= 0]):
            here = shards == i
            out[:, here] = self.shard(int(i))[:, flat[here] - self.first[i]]
        return out.reshape(len(self.columns), *row_ids.shape, -1)

    def spread(self, count):
        """Numbers of `count` rows, or of all where there are no more, that lie evenly over the
        split.
        """
        count = min(count, self.total)
        return np.arange(count) * self.total // max(1, count)

    def padded(self, count, size):
        """Row numbers [batches, 1, size] of `count` rows from all parts of the split; -1, an empty
        row, fills up.
        """
        ids = self.spread(count)
        return np.pad(ids, (0, -len(ids) % size), constant_values=-1).reshape(-1, 1, size)

    def batch(self, seed, step, size):
        """The rows of optimizer step 0, 1, ..., as read() gives them; a step may run over the end
        of an epoch.
        """
        epoch, start = divmod(step * size, self.total)
        ids = self.order(seed, epoch)[start:]
        while len(ids) < size:
            epoch += 1
            ids = np.concatenate([ids, self.order(seed, epoch)])
        return self.read(ids[:size])


def open_data(folder, seq_len=0, packed=False):
    """(training Rows, held-out Rows, content of tokenizer.json) of a folder; seq_len 0 takes rows
    of any length. ValueError where packed ones are needed, and these are padded.
    """
    train = Rows(folder, "train")
    path = train.folder / "tokenizer.json"
    content = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(content).hexdigest() != train.meta["tokenizer_sha256"]:
        raise ValueError(
            f"{path} is missing, or not the one that made the shards; prepare the data again"
        )
    if packed and "mask_id" in train.meta:
        raise ValueError(
            f"{folder} holds padded rows, for train_gpu.py; prepare it again with --rows=packed"
        )
    found = train.meta["seq_len"]
    if seq_len not in (0, found):
        raise ValueError(
            f"{folder} has rows of {found} tokens, the run wants {seq_len}; "
            f"prepare it again with data_prep.py --seq_len={seq_len} and another --out"
        )
    heldout = Rows(folder, "heldout")
    if heldout.total:
        token_bytes(runs.read_tokenizer(folder), train.meta["vocab_size"])  # fails here, not later
    return train, heldout, content


def standard_library(hosts, seq_len, name, *flags):
    """open_data() of the standard library of the running Python, which is prepared first.

    ValueError on several hosts: each would prepare its own.
    """
    folder = f"data/python-{seq_len}-{name}"
    if not runs.as_path(f"{folder}/meta.json").exists():
        if hosts:
            raise ValueError(
                "several hosts need the same data: write it with data_prep.py and pass --data"
            )
        print(f"no --data: preparing the Python standard library in {folder}", flush=True)
        flags = (f"--out={folder}", f"--seq_len={seq_len}", *flags)
        runs.script("data_prep.py", "python", *flags)
    return open_data(folder, seq_len)


def held_out(folder, data=""):
    """(held-out Rows of `data`, or else of the model's training data; tokenizer) to score the model
    in a folder.

    ValueError if no rows are held out, or if the model has other token ids.
    """
    data = data or runs.read_json(runs.as_path(folder) / "config.json").get("data")
    if not data:
        raise ValueError(
            f"{folder}/config.json does not say what the model was trained on; pass --data"
        )
    heldout = Rows(data, "heldout")
    tokenizer = runs.read_tokenizer(folder)
    # The model's tokenizer may have one token more, MASK.
    if not runs.read_tokenizer(data).get_vocab().items() <= tokenizer.get_vocab().items():
        raise ValueError(
            f"{data} was written with another tokenizer than that of {folder}; "
            "pass --data of its own"
        )
    if not heldout.total:
        raise ValueError(f"{data} holds no held-out rows; write it again with a larger --heldout")
    return heldout, tokenizer


def prefetch(make, first, last):
    """Yield (step, make(step), seconds waited); a thread makes the next ones meanwhile. Its errors
    are raised here.
    """
    ahead = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        for step in range(first, last):
            while len(ahead) < min(4, last - step):
                ahead.append(thread.submit(make, step + len(ahead)))
            started = time.perf_counter()
            batch = ahead.popleft().result()
            yield step, batch, time.perf_counter() - started


def token_bytes(tokenizer, vocab):
    """Bytes of text that each token stands for, float32 [V]; a special token has none.

    In a byte-level BPE each character of a token is a byte; elsewhere a token is its text, in which
    U+2581 is a space, or <0x41>, a byte. The space that some put before a text counts. ValueError
    if neither gives the bytes of PROBE: the tokenizer changes texts, or leaves something out.
    """
    added = tokenizer.get_added_tokens_decoder()
    characters_V = np.zeros(vocab, np.float32)
    text_V = np.zeros(vocab, np.float32)
    for name, id in tokenizer.get_vocab().items():
        size = len(name.replace("\u2581", " ").encode())
        if BYTE.fullmatch(name):
            size = 1
        elif id in added and (added[id].special or MARK.fullmatch(name)):
            size = 0
        if id < vocab:
            characters_V[id] = size if id in added else len(name)
            text_V[id] = size
    ids = tokenizer.encode(PROBE, add_special_tokens=False).ids
    for bytes_V in (characters_V, text_V):
        if bytes_V[ids].sum() - len(PROBE.encode()) in (0, 1):  # 1: a space before the text
            return bytes_V
    raise ValueError(
        "bits per byte cannot be told, as this tokenizer does not keep all of a text; "
        "take a byte-level one, one with byte fallback, or rows of data_prep.py --heldout=0"
    )
