"""Convert checkpoints: Hugging Face safetensors to Orbax, and back; the bytes of every tensor stay what they are.

    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder         # a folder from the Hub
    python convert_weights.py --source=apple/DiffuCoder-7B-Instruct --out=out/diffucoder   # downloads it first
    python convert_weights.py --source=out/diffucoder --out=out/diffucoder_hf              # and back again
    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder --verify    # compares both
    python convert_weights.py --source=out/train_tpu --out=out/my_model --push=me/my_model     # a run, published
    python convert_weights.py --source=out/train_tpu --out=out/export --dtype=bfloat16         # a run's weights alone
    python convert_weights.py --source=Qwen/Qwen2.5-Coder-0.5B --to=dream --out=out/start      # to train as a Dream

Reads a folder, or a repository of the Hub (token from HF_TOKEN, or what `hf auth login` stored). The files in it say
which form it is in, and it is converted to the other; of a run of train_tpu.py the newest step is taken. With --dtype
it becomes Orbax, whatever it was. Writes --out under another name and renames it when it is complete:

    Orbax:       config.json, tokenizer files, meta.json, params/ (Zarr in chunks: a device reads its part)
    safetensors: config.json, tokenizer files, model-0000i-of-0000n.safetensors, model.safetensors.index.json

Both have the name of what they were made of in config.json, as "source", and the *.py files that came with it, which
transformers runs and we do not.

--to=dream makes the start of a Dream from an autoregressive Qwen2, in Orbax, or loads what others made of one:
Fast-dLLM v2 and dllm's a2d-qwen2. Where the tokenizer has no MASK, it gets one behind its last token, and the tables
get the mean of their rows there. The model then has blocks of one token, as an autoregressive one has, if the
checkpoint or --block_length does not say more: train_tpu.py --init=out/start --block_length=32 --block_warmup=... goes
on from there.

Conversion streams. Orbax is handed views of the mapped files, and no tensor is copied. On the way back, and to verify,
two blocks of 32 MB are in memory; files that Orbax wrote elsewhere may hold an array as a single block. For --dtype a
file without a name, beside --out and of its size, stands in for memory.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import shutil
import struct
import tempfile
import threading
import time
import typing
from pathlib import Path

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import tensorstore
import tokenizers
from flax import nnx
from orbax.checkpoint import type_handlers
from tqdm import tqdm

import checkpoints
import model_dream as dream
import model_pythoncoder as pc
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    source: str = ""  # folder with a checkpoint in either form, or a repository of the Hub as OWNER/NAME
    out: str = ""  # folder to write
    revision: str = "main"  # branch, tag or commit of a repository of the Hub
    step: int = 0  # checkpoint of a run folder; 0 takes the newest
    to: typing.Literal["", "dream"] = ""  # make a Dream of a Qwen2; "" keeps what it is
    block_length: int = 0  # with --to: blocks that the checkpoint was trained with; 0: as it says, or 1
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # write Orbax in this dtype; "" keeps every byte
    shard_gb: float = 5.0  # largest safetensors file, in GB
    verify: bool = False  # read --source and --out again and compare every tensor
    push: str = ""  # verify, and upload --out to this repository of the Hub, OWNER/NAME


CHUNK_BYTES = 32 << 20  # of the Zarr arrays, and of the blocks read from them


# ---- the Hub's form ------------------------------------------------------------------------------------------------

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("float16"), "F32": np.dtype("float32")}
TABLES = {"embed_tokens", "lm_head"}  # have a row for each token
# parameter of Dream -> its name on the Hub; shapes and layout are the same
HF_NAMES = {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def hf_name(name):
    """layers.3.q_bias -> model.layers.3.self_attn.q_proj.bias"""
    if not name.startswith("layers."):
        return HF_NAMES[name]
    _, layer, part = name.split(".")
    if part.endswith("layernorm"):
        return f"model.layers.{layer}.{part}.weight"
    matrix, kind = part.split("_")  # q_proj is a matrix, q_bias the bias that belongs to it
    where = "self_attn" if matrix in ("q", "k", "v", "o") else "mlp"
    return f"model.layers.{layer}.{where}.{matrix}_proj.{'weight' if kind == 'proj' else 'bias'}"


def map_file(path):
    """{name: array in the mapped file, read-only} of a safetensors file; ValueError if it is damaged."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            views = {name: file.get_slice(name) for name in file.offset_keys()}  # in the order of the file
            layout = {name: (DTYPES[view.get_dtype()], tuple(view.get_shape())) for name, view in views.items()}
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as safetensors of {', '.join(DTYPES)}: {error}") from None
    # The library copies the tensors that it returns. It has checked that they lie one behind the other up to the end of
    # the file, without a gap; so their places follow from their sizes, and the file can be mapped.
    data, arrays = np.memmap(path, np.uint8, "r"), {}
    start = data.size - sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())
    for name, (dtype, shape) in layout.items():
        end = start + dtype.itemsize * math.prod(shape)
        arrays[name] = data[start:end].view(dtype).reshape(shape)
        start = end
    return arrays


def map_files(folder):
    """{name: mapped array} of all safetensors files of a folder; an index names them where there are several."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return map_file(folder / "model.safetensors")
    file_of = runs.read_json(index, "weight_map")["weight_map"]
    files = {file_name: map_file(folder / file_name) for file_name in sorted({*file_of.values()})}
    found = {name: file_name for file_name, tensors in files.items() for name in tensors}
    if found != file_of:
        differ = sorted({name for name, _ in found.items() ^ file_of.items()})
        raise ValueError(f"{index} and the files beside it disagree about {', '.join(differ[:5])}")
    return {name: files[file_name][name] for name, file_name in found.items()}


def from_hf(folder, dtype=None, run=None):
    """A folder in the Hub's form as a Dream in `dtype`, None keeps the stored one: for tests and comparisons.

    Raises ValueError or FileNotFoundError.
    """
    cfg = dream.config_from_hf(folder)
    arrays, stored = open_safetensors(Checkpoint(Path(folder), DREAM, cfg, {}), dtype)
    params = {name: jax.numpy.array(array, dtype or stored) for name, array in arrays.items()}
    run = run or dream.Run(dtype=jax.numpy.dtype(dtype or stored))
    return nnx.merge(dream.graph_of(cfg, run), checkpoints.unflatten(params))


# ---- which checkpoint a folder holds -------------------------------------------------------------------------------


def order_on_the_hub(name):
    """Sorts the names of Dream's parameters: embedding, layers by number, norm, head."""
    top, *rest = name.split(".")
    return {"embed_tokens": 0, "layers": 1, "norm": 2, "lm_head": 3}[top], int(rest[0]) if rest else 0, name


class Family(typing.NamedTuple):
    """What differs between Dream and PythonCoder; all else in this file is the same for both."""

    name: str
    what: str  # for people who find it on the Hub
    model: typing.Any  # module with read_config and param_shapes
    to_hub: typing.Callable  # (architecture, dtype) -> the keys of a config.json beside safetensors
    file_name: typing.Callable = str  # name of a parameter -> its name in a safetensors file
    order: typing.Callable = str  # sorts the parameters in the files


def pythoncoder_to_hub(cfg, dtype):
    return {"model_type": "pythoncoder", **dataclasses.asdict(cfg), "torch_dtype": dtype}


FOR_DREAM = "A masked-diffusion language model of the Dream family"
FOR_CODER = "A code model with differential attention and multi-token prediction"
DREAM = Family("dream", FOR_DREAM, dream, dream.config_to_hf, hf_name, order_on_the_hub)
PYTHONCODER = Family("pythoncoder", FOR_CODER, pc, pythoncoder_to_hub)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `find` saw in a folder."""

    folder: Path  # holds the tokenizer
    family: Family
    cfg: typing.Any  # architecture
    keys: dict  # of the config.json beside safetensors
    params: Path | None = None  # folder of Orbax; None: safetensors
    sums: dict | None = None  # {name of a parameter: word_sum}, Orbax only
    step: int = 0  # of a run
    origin: str = ""  # name of the model, OWNER/NAME for one of the Hub
    table_rows: int = 0  # rows of the tables in the files, into which MASK's is still to be written; 0: it is there

    def shapes(self):
        """{name of a parameter: shape}, as the architecture says."""
        tree = self.family.model.param_shapes(self.cfg)
        shapes = {name: leaf.shape for name, leaf in checkpoints.flatten(tree).items()}
        tables = {name: (self.table_rows, *shapes[name][1:]) for name in TABLES & shapes.keys() if self.table_rows}
        return shapes | tables


def find(folder, step=0, repository=""):
    """The checkpoint in a folder: a run of train_tpu.py, or safetensors or Orbax as this file and the Hub lay them out.

    repository is what it was downloaded from. Raises ValueError or FileNotFoundError.
    """
    where, config = folder, folder / "config.json"
    if step or runs.saved_steps(folder):
        step, where = runs.newest(folder, step)
    # What it was made of: what an earlier conversion noted, or else where it is from.
    origin = runs.read_json(config).get("source", repository) if config.is_file() else repository
    # A run of train_tpu.py.
    if where.parent.name == "checkpoints":
        where, meta, step = checkpoints.find_weights(folder, step)
        family = DREAM if "mask_id" in meta["model"] else PYTHONCODER
        cfg = family.model.read_config(where, meta)
        keys = family.to_hub(cfg, "float32") | {"step": step}
        # the checksums of the optimizer's state are left out with that state
        sums = {name.removeprefix("params."): x for name, x in meta["sums"].items() if name.startswith("params.")}
        return Checkpoint(folder, family, cfg, keys, where / "params", sums, step, origin)
    # A folder with a config.json: what does it say?
    keys = runs.read_json(where / "config.json")
    if keys.get("model_type") == "mdlm":
        raise ValueError(f"{where} is an MDLM, in safetensors as it is; publish it with: hf upload OWNER/NAME {where}")
    step = int(keys.get("step", 0))
    if keys.get("model_type") == "pythoncoder":  # written by this file
        fields = {field.name for field in dataclasses.fields(pc.Config)}
        keys = runs.read_json(where / "config.json", *fields - {"init_std"})  # of which older ones say nothing
        family, cfg = PYTHONCODER, pc.Config(**{name: keys[name] for name in fields & keys.keys()})
    else:
        if keys.get("model_type") in dream.QWEN2:
            raise ValueError(f"{where} is a {keys['model_type']}; --to=dream makes a Dream of it")
        family, cfg = DREAM, dream.config_from_hf(where)
    if not (where / "meta.json").is_file():  # safetensors
        return Checkpoint(folder, family, cfg, keys, step=step, origin=origin or folder.resolve().name)
    sums = runs.read_json(where / "meta.json", "sums")["sums"]
    return Checkpoint(folder, family, cfg, keys, where / "params", sums, step, origin)


MASKS = "<|mask|>", "|<MASK>|", "<mask>"  # of dllm and Dream, of Fast-dLLM v2, of others


def find_qwen2(folder, block_length=0, repository=""):
    """The checkpoint in a folder of an autoregressive Qwen2, or a diffusion model made of one, as a Dream.

    What its config.json does not say: MASK is a token of the tokenizer, or the id behind its last one; without a
    tokenizer the tables are taken to be full. PAD is the tokenizer's, or the end. Of several ends the first counts.
    """
    path, keys = folder / "config.json", runs.read_json(folder / "config.json", "vocab_size")
    if keys.get("model_type") not in dream.QWEN2:
        known = ", ".join(dream.QWEN2)
        raise ValueError(f"{path}: --to=dream takes a model_type of {known}, not {keys.get('model_type')!r}")
    ids, rows = {}, keys["vocab_size"]
    if (folder / "tokenizer.json").is_file():
        ids = runs.read_tokenizer(folder).get_vocab()
    elif (folder / "vocab.json").is_file():
        ids = from_merges(folder).get_vocab()
    mask_id = next((ids[name] for name in MASKS if name in ids), None)
    table_rows = rows if mask_id is None else 0
    if mask_id is None:
        mask_id = max(ids.values()) + 1 if ids else rows
    ends = keys.get("eos_token_id")
    eos_id = ends[0] if isinstance(ends, list) else ends
    settings = folder / "tokenizer_config.json"
    pad = runs.read_json(settings).get("pad_token") if settings.is_file() else None
    pad_id = ids.get(pad["content"] if isinstance(pad, dict) else pad, eos_id)
    given = {"mask_id": mask_id, "eos_id": eos_id, "pad_id": pad_id, "vocab": max(rows, mask_id + 1)}
    given |= {"block_length": block_length} if block_length else {}
    cfg = dream.config_from_hf(folder, given)
    origin = repository or folder.resolve().name
    return Checkpoint(folder, DREAM, cfg, dream.config_to_hf(cfg), table_rows=table_rows, origin=origin)


# ---- tensors -------------------------------------------------------------------------------------------------------


def as_integers(array):
    """The array's bits as whole numbers of its item size, one axis, not copied."""
    return array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")


def word_sum(array):
    """Sum of an array's words modulo 2^32, as checkpoints.bit_sums; changes with any one bit."""
    return int(as_integers(array).sum(dtype=np.uint32))


def byte_count(array):
    """Bytes of an array of tensorstore."""
    return array.dtype.numpy_dtype.itemsize * math.prod(array.shape)


def common_dtype(dtypes, where, wanted=None):
    """The dtype that all have; several are refused, unless one is wanted of all."""
    counts = collections.Counter(map(str, dtypes))
    if len(counts) > 1 and not wanted:
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        advice = "--dtype=float32 keeps every value, --dtype=bfloat16 rounds them"
        raise ValueError(f"{where} holds tensors of several dtypes: {listed}; make them one: {advice}")
    return np.dtype(wanted or next(iter(counts)))


def open_safetensors(checkpoint, wanted=None):
    """{our name: mapped array} of a checkpoint in safetensors, and their dtype, or the one that is wanted of them."""
    arrays, family, shapes = map_files(checkpoint.folder), checkpoint.family, checkpoint.shapes()
    want = {family.file_name(name): shape for name, shape in shapes.items()}
    runs.check_tensors({name: array.shape for name, array in arrays.items()}, want, checkpoint.folder)
    dtype = common_dtype((array.dtype for array in arrays.values()), checkpoint.folder, wanted)
    return {name: arrays[family.file_name(name)] for name in shapes}, dtype


def with_mask_row(table_VD, mask_id):
    """The table with the mean of the rows before MASK's, taken in float64, as MASK's: a spare row or a new last one."""
    blocks = (table_VD[i : min(i + 8192, mask_id)] for i in range(0, mask_id, 8192))  # float64 of all would be large
    mean_D = sum(block.astype(np.float64).sum(0) for block in blocks) / mask_id
    rows = max(len(table_VD), mask_id + 1)
    new_VD = np.empty((rows, table_VD.shape[1]), table_VD.dtype)
    new_VD[: len(table_VD)] = table_VD
    new_VD[mask_id] = mean_D.astype(np.float32).astype(table_VD.dtype)
    return new_VD


def open_orbax(checkpoint):
    """{our name: array of tensorstore} of a checkpoint in Orbax, and their dtype.

    Orbax itself restores whole arrays only, and a 7B model's largest is a gigabyte; tensorstore, which it stores them
    with, reads any part. _METADATA says how they are stored: a folder each, or all in the files of an OCDBT database.
    """
    params, family, shapes = checkpoint.params, checkpoint.family, checkpoint.shapes()
    form = runs.read_json(params / "_METADATA", "tree_metadata")
    store = {"driver": "file", "path": f"{params.absolute()}/"}
    if form.get("use_ocdbt"):
        store = {"driver": "ocdbt", "base": store, "path": ""}
    driver = "zarr3" if form.get("use_zarr3") else "zarr"
    context = tensorstore.Context({"file_io_mode": {"mode": "memmap"}})  # half the processor time of reading
    # all are opened at once, and then waited for
    opening = {}
    for leaf in form["tree_metadata"].values():
        name = ".".join(key["key"] for key in leaf["key_metadata"])
        spec = {"driver": driver, "kvstore": store | {"path": f"{store['path']}{name}/"}}
        opening[name] = tensorstore.open(spec, context=context, open=True, read=True)
    arrays = {name: future.result() for name, future in opening.items()}
    runs.check_tensors({name: array.shape for name, array in arrays.items()}, shapes, params)
    dtype = common_dtype((array.dtype.numpy_dtype for array in arrays.values()), params)
    return {name: arrays[name] for name in sorted(shapes, key=family.order)}, dtype


def read_blocks(arrays):
    """(name, rows of it as a NumPy array) of tensorstore's arrays in order; the next block is read meanwhile.

    A block is as many chunks as CHUNK_BYTES hold, at least one.
    """

    def reads():
        for name, array in arrays.items():
            chunk, length = array.chunk_layout.read_chunk.shape[0], array.shape[0]
            rows = chunk * max(1, CHUNK_BYTES * length // (chunk * byte_count(array)))
            for i in range(0, length, rows):
                yield name, array[i : min(i + rows, length)].read(order="C")

    # pairwise starts the next read before it gives the one before
    for (name, block), _ in itertools.pairwise(itertools.chain(reads(), [None])):
        yield name, block.result()


def checked_blocks(source, arrays):
    """read_blocks of an Orbax checkpoint; ValueError behind the last block of an array whose checksum is another."""
    for name, blocks in itertools.groupby(read_blocks(arrays), lambda block: block[0]):
        total = 0
        for _, rows in blocks:
            total += word_sum(rows)
            yield name, rows
        if total % 2**32 != source.sums.get(name):
            raise ValueError(f"{source.folder} is corrupted: {name} is not what was saved")


def cast(source, arrays, dtype, folder):
    """{name: array in dtype} of a checkpoint's arrays, mapped from a file without a name, which ends with them."""
    blocks = checked_blocks(source, arrays) if source.params else arrays.items()
    size = dtype.itemsize * sum(math.prod(array.shape) for array in arrays.values())
    with tempfile.TemporaryFile(dir=folder) as file:
        with progress("converting", size, file.tell):
            for _, rows in blocks:
                file.write(as_integers(rows.astype(dtype)))
        file.flush()
        flat = np.memmap(file, dtype, "r")
    ends = np.cumsum([math.prod(array.shape) for array in arrays.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}


# ---- progress and the folder that is written -----------------------------------------------------------------------


def bytes_in(folder):
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            size += path.stat().st_size
    return size


@contextlib.contextmanager
def progress(label, total, done_bytes):
    """A bar of bytes that are done, as done_bytes() says from time to time: Orbax itself tells nothing."""
    ended = threading.Event()

    def watch():
        while not ended.wait(1):
            bar.update(done_bytes() - bar.n)

    with tqdm(desc=label, total=total, unit="B", unit_scale=True, disable=None) as bar:
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def refuse_existing(out):
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another --out")


def check_room(sizes, advice=""):
    """OSError if {folder: bytes to write} has no room; folders on one disk share it."""
    needed = collections.Counter()
    for folder, size in sizes.items():
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        disk, free = there.stat().st_dev, shutil.disk_usage(there).free
        needed[disk] += size
        if free < needed[disk] * 1.01:
            raise OSError(f"{there} has {free / 1e9:.1f} GB left, {needed[disk] / 1e9:.1f} are needed{advice}")


@contextlib.contextmanager
def output_folder(out, size):
    """A folder for `size` bytes, which is named `out` when all went well; what an interrupted run left is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f"{out.name}.lock")
    with runs.lock(lock):
        try:
            refuse_existing(out)
            check_room({out.parent: size})
            with runs.new_folder(out) as partial:
                yield partial
        finally:
            lock.unlink()


# ---- the files beside the weights ----------------------------------------------------------------------------------

DREAM_CODE = "Dream-org/Dream-v0-Instruct-7B"  # repository of the Hub that holds configuration_dream.py and the rest
# what Dream adds to Qwen2.5's tokenizer, which ends at 151,664
DREAM_TOKENS = {"<|beginoftext|>": 151_665, "<|mask|>": 151_666, "<|dlm_pad|>": 151_667}
# where Qwen2.5's tokenizer splits a text before byte-pair encoding
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def files_beside(checkpoint):
    """{name: bytes} of the tokenizer's files and of the model's code. The tokenizer of a Dream must have its MASK, or
    gets Dream's tokens; and it is made of vocab.json and merges.txt where a repository holds no tokenizer.json.
    ValueError if it does not fit.
    """
    folder = checkpoint.folder
    files = checkpoints.companions(folder)
    made = "tokenizer.json" not in files and {"vocab.json", "merges.txt"} <= files.keys()
    if checkpoint.family is DREAM and (made or "tokenizer.json" in files):
        tokenizer = from_merges(folder) if made else runs.read_tokenizer(folder)
        path = folder / ("vocab.json" if made else "tokenizer.json")
        changed = add_dream_tokens(tokenizer, checkpoint.cfg, path, bool(checkpoint.table_rows))
        if made or changed:
            files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
            print(f"tokenizer.json: {'made of vocab.json and merges.txt, ' * made}{'with Dream tokens' * changed}")
    if "tokenizer.json" not in files:
        print(f"{folder} has no tokenizer; generate.py will want a tokenizer.json beside the weights")
    return files


def with_code(config, files, origin):
    """A config.json, or tokenizer_config.json, whose auto_map names code that transformers finds: the file beside it,
    or else OWNER/NAME--file.Class, of the repository that the model came from.
    """
    repository = origin if origin.count("/") == 1 else DREAM_CODE

    def place(name):
        there = "--" in name or f"{name.split('.')[0]}.py" in files
        return name if there else f"{repository}--{name}"

    return config | {"auto_map": jax.tree.map(place, config["auto_map"])} if "auto_map" in config else config


def config_to_write(source, dtype):
    """The content of config.json: the keys of the source, its name, and the dtype that it gets."""
    name = "dtype" if "dtype" in source.keys else "torch_dtype"  # since transformers 5, and before
    return source.keys | {name: str(dtype)} | ({"source": source.origin} if source.origin else {})


def from_merges(folder):
    """The tokenizer of a folder that holds Qwen2.5's as vocab.json, merges.txt and added tokens, as Dream's does."""

    def read(name):
        return runs.read_json(folder / name) if (folder / name).is_file() else {}

    added = {int(i): token for i, token in read("tokenizer_config.json").get("added_tokens_decoder", {}).items()}
    added = {i: {"content": name} for name, i in read("added_tokens.json").items()} | added
    try:
        model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{folder}/vocab.json and merges.txt are no tokenizer: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # numbered from the end of the vocabulary, so they go in by their ids
    defaults = {"normalized": False, "special": True}
    tokenizer.add_tokens([tokenizers.AddedToken(**defaults | added[i]) for i in sorted(added)])
    return tokenizer


def add_dream_tokens(tokenizer, cfg, where, is_new=False):
    """Add Dream's tokens to Qwen2.5's tokenizer: True; False if it has a token at MASK's id. ValueError if it cannot be
    the model's: the library numbers added tokens from the end of the vocabulary, whatever ids a file claims. Where MASK
    is_new, it alone is added.
    """
    ids = tokenizer.get_vocab()
    largest = max(ids.values(), default=-1)
    if largest >= cfg.vocab:
        raise ValueError(f"{where} does not fit: its ids reach {largest}, the model has {cfg.vocab}")
    if ids.get("<|mask|>", cfg.mask_id) != cfg.mask_id:
        raise ValueError(f"{where} does not fit: its <|mask|> is {ids['<|mask|>']}, the model's {cfg.mask_id}")
    if cfg.mask_id in tokenizer.get_added_tokens_decoder():
        return False
    if is_new:
        tokenizer.add_special_tokens([MASKS[0]])
        if tokenizer.token_to_id(MASKS[0]) != cfg.mask_id:
            raise ValueError(f"{where} has gaps in its ids, so {MASKS[0]} does not become {cfg.mask_id}")
        return True
    # It may be Qwen2.5's own, which ends where Dream's three tokens begin. Any other has no MASK, and none is invented.
    if cfg.mask_id != DREAM_TOKENS["<|mask|>"] or largest < min(DREAM_TOKENS.values()) - 1:
        raise ValueError(f"{where} does not fit: it has no special token at {cfg.mask_id}, the model's MASK")
    tokenizer.add_special_tokens([*DREAM_TOKENS])
    got = {name: tokenizer.token_to_id(name) for name in DREAM_TOKENS}
    if got != DREAM_TOKENS:
        raise ValueError(f"{where} does not fit: it would number Dream's tokens {got}, not {DREAM_TOKENS}")
    return True


# ---- the two ways --------------------------------------------------------------------------------------------------


def save_params(folder, arrays):
    """Write arrays {name: array} with Orbax, a folder for each, not compressed: bfloat16 weights shrink little."""
    handlers = type_handlers.create_type_handler_registry(
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False))  # no copies of mapped files
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=handlers)
    # Orbax cuts the longest axis. Where that is the last, a chunk would have to be gathered from all rows and scattered
    # again, with copies in memory: such an array stays one chunk, unless it is very large.
    chunks = {}
    for name, array in arrays.items():
        wide = array.ndim > 1 and array.shape[-1] > array.shape[0] and array.nbytes <= 8 * CHUNK_BYTES
        chunks[name] = ocp.SaveArgs(chunk_byte_size=None if wide else CHUNK_BYTES)
    arguments = ocp.args.PyTreeSave(checkpoints.unflatten(arrays), save_args=checkpoints.unflatten(chunks))
    total = sum(array.nbytes for array in arrays.values())
    try:
        with progress("writing", total, lambda: bytes_in(folder.parent)), ocp.Checkpointer(handler) as orbax:
            orbax.save(folder, args=arguments)
    except (OSError, ValueError) as error:
        raise OSError(f"the checkpoint was not written: {runs.first_line(error)}") from None


def to_orbax(source, out, wanted=""):
    """Write the Orbax form of a checkpoint in safetensors, or of any in the dtype that is wanted."""
    files = files_beside(source)
    arrays, dtype = open_orbax(source) if source.params else open_safetensors(source, wanted)
    if source.table_rows:
        row = "a spare row" if source.cfg.mask_id < source.table_rows else "a new one"
        print(f"MASK is {source.cfg.mask_id}, {row} of the tables, and gets the mean of the rows before it")
        tables = {name: with_mask_row(arrays[name], source.cfg.mask_id) for name in TABLES & arrays.keys()}
        arrays = {name: tables.get(name, array) for name, array in arrays.items()}
    dtype = np.dtype(wanted or dtype)
    to_cast = bool(source.params) or any(array.dtype != dtype for array in arrays.values())
    count = sum(math.prod(array.shape) for array in arrays.values())
    print(f"{len(arrays)} tensors, {count:,} parameters in {dtype}", flush=True)
    size = count * dtype.itemsize * (1 + to_cast)
    with output_folder(out, size) as partial, concurrent.futures.ThreadPoolExecutor(1) as thread:
        if to_cast:
            arrays = cast(source, arrays, dtype, out.parent)
        # The checksums are made of the files that we read, while Orbax writes its own.
        summing = thread.submit(lambda: {name: word_sum(array) for name, array in arrays.items()})
        save_params(partial / "params", arrays)
        meta = {"dtype": str(dtype), "parameters": count, "source": source.origin, "step": source.step}
        if source.family is PYTHONCODER:
            meta["model"] = dataclasses.asdict(source.cfg)
        runs.write(partial / "meta.json", meta | {"sums": summing.result()})
        runs.write(partial / "config.json", config_to_write(source, dtype))
        for name, data in files.items():
            runs.write(partial / name, data)


def write_safetensors(path, arrays, source):
    """Write tensorstore's arrays as a safetensors file, a block at a time; ValueError where a checksum is another.

    The file is 8 bytes of header length, the header as JSON, then the data; offsets count from there. The library
    writes what is in memory, and a file of 5 GB shall not be.
    """
    labels = {dtype: label for label, dtype in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        start, end = end, end + byte_count(array)
        place = {"dtype": labels[array.dtype.numpy_dtype], "shape": [*array.shape], "data_offsets": [start, end]}
        header[source.family.file_name(name)] = place
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, rows in checked_blocks(source, arrays):
            file.write(as_integers(rows))


def to_safetensors(source, out, shard_gb):
    """Write the safetensors form of a checkpoint in Orbax."""
    files, (arrays, dtype) = files_beside(source), open_orbax(source)
    if dtype not in DTYPES.values():
        raise ValueError(f"{source.params} is in {dtype}, not one of {', '.join(map(str, DTYPES.values()))}")
    split = huggingface_hub.split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=byte_count,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(shard_gb * 1e9),
    )
    total = split.metadata["total_size"]
    number = len(split.filename_to_tensors)
    print(f"{len(arrays)} tensors, {total // dtype.itemsize:,} parameters in {dtype}, {number} files", flush=True)
    with output_folder(out, total) as partial, progress("writing", total, lambda: bytes_in(partial)):
        for file_name, names in split.filename_to_tensors.items():
            write_safetensors(partial / file_name, {name: arrays[name] for name in names}, source)
        if split.is_sharded:
            file_of = {source.family.file_name(name): file for name, file in split.tensor_to_filename.items()}
            index = {"metadata": split.metadata, "weight_map": dict(sorted(file_of.items()))}
            runs.write(partial / "model.safetensors.index.json", index)
        runs.write(partial / "config.json", with_code(config_to_write(source, dtype), files, source.origin))
        for name, data in files.items():
            if name == "tokenizer_config.json":
                data = with_code(runs.read_json(source.folder / name), files, source.origin)
            runs.write(partial / name, data)


def verify(source, out):
    """Compare names, shapes, dtypes and all bytes of a checkpoint in either form; ValueError naming what differs."""
    if (source.params is None) == (out.params is None):
        form = "Orbax" if source.params else "safetensors"
        raise ValueError(f"{source.folder} and {out.folder} are both {form}; --verify compares one form with the other")
    if source.cfg != out.cfg:
        raise ValueError(f"the config.json of {source.folder} and {out.folder} describe different models")
    # safetensors are mapped and Orbax is read block by block, so that neither is in memory as a whole
    hub, orbax = (out, source) if source.params else (source, out)
    (theirs, hub_dtype), (ours, dtype) = open_safetensors(hub), open_orbax(orbax)
    if hub_dtype != dtype:
        raise ValueError(f"{hub.folder} is in {hub_dtype}, {orbax.folder} in {dtype}")
    wrong, done, total = [], 0, sum(array.size for array in theirs.values())
    with progress("comparing", total * dtype.itemsize, lambda: done * dtype.itemsize):
        for name, blocks in itertools.groupby(read_blocks(ours), lambda block: block[0]):
            want, at, checksum, equal = as_integers(theirs[name]), 0, 0, True
            for _, rows in blocks:
                equal &= np.array_equal(as_integers(rows), want[at : at + rows.size])
                checksum += word_sum(rows)
                at += rows.size
            done += at
            wrong += [name] * (not equal) + [f"{name} (checksum)"] * (checksum % 2**32 != orbax.sums.get(name))
    if wrong:
        raise ValueError(f"{source.folder} and {out.folder} differ: {', '.join(wrong)}")
    print(f"verified: {len(theirs)} tensors, {done:,} parameters, every byte equal", flush=True)


# ---- the Hub -------------------------------------------------------------------------------------------------------

# It names no licence: that is the publisher's to say.
CARD = """---
tags: [unmask, {kind}, {form}]
{base}---

# {name}

{what}, {parameters:,} parameters in {dtype}, as {form}, written by `convert_weights.py` of Unmask.

Get the other form with: `python convert_weights.py --source={repository} --out=model`.
"""
TRAINED = """
## Training

{model} on `{data}`: {steps:,} steps of {batch_size} rows of {seq_len} tokens, {optimizer}, peak learning rate {lr:.3g},
seed {seed}{log}. All settings are those of config.json in the run's folder.
"""


def trained(run, step):
    """The part of a card that says how step `step` of a run of train_tpu.py came about; else that of its own card."""
    config, card = ((run / name).read_text() if (run / name).is_file() else "" for name in ("config.json", "README.md"))
    settings = json.loads(config or "{}").get("train", {})
    if "seq_len" not in settings:  # nor is it one of coupled_grpo.py
        return card[card.index("\n## Training") :] if "\n## Training" in card else ""
    lines = (run / "log.jsonl").read_text().splitlines(True) if (run / "log.jsonl").is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}\n")]  # a kill may have cut the last one
    rows, said = [row for row in rows if row["step"] <= step], ""
    # a row of losses stands for the steps since the one before it
    losses = [row for row in rows if "tok_per_s" in row]
    since = [row["step"] - before["step"] for before, row in itertools.pairwise([{"step": 0}, *losses])]
    tokens = settings["batch_size"] * settings["seq_len"]
    seconds = sum(count * tokens / row["tok_per_s"] for count, row in zip(since, losses, strict=True))
    said += f"; {seconds / 3600:.2g} hours of steps" * bool(losses)
    for row in [row for row in rows if "bits_per_byte" in row][-1:]:
        said += f"; held-out text: {row['bits_per_byte']:.3f} bits per byte at step {row['step']:,}"
    older = {"optimizer": "adamw"}  # runs that do not say so had it
    return TRAINED.format(**older | settings | {"steps": step, "log": said})


def write_card(checkpoint, repository, training=""):
    """README.md of a folder that has none."""
    path, base = checkpoint.folder / "README.md", checkpoint.origin
    if path.exists():
        return
    arrays, dtype = open_orbax(checkpoint) if checkpoint.params else open_safetensors(checkpoint)
    text = CARD.format(
        kind=checkpoint.family.name,
        form="orbax" if checkpoint.params else "safetensors",
        base=f"base_model: {base}\n" if base.count("/") == 1 else "",
        name=Path(repository).name,
        what=checkpoint.family.what,
        parameters=sum(math.prod(array.shape) for array in arrays.values()),
        dtype=dtype,
        repository=repository,
    )
    path.write_text(text + training)


def push(checkpoint, repository):
    """Upload a folder to the Hub; what a broken upload left there is not sent again."""
    out = checkpoint.folder
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=out, commit_message=f"{checkpoint.family.name} weights")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a file failed, and the cause says why
        problem = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise OSError(f"{out} was not uploaded to {repository}: {problem}; run again to go on") from None
    print(f"uploaded {out} to {repository}")


def fetch(repository, revision, out):
    """Download a repository of the Hub into its cache, if that and `out` have room; its folder."""
    patterns = ["*.safetensors", "*.json", "merges.txt", "*.jinja", "*.py", "params/*", "checkpoints/*"]
    wanted = {"allow_patterns": patterns, "ignore_patterns": "*/opt/*"}  # without the optimizer's state
    download = functools.partial(huggingface_hub.snapshot_download, repository, revision=revision, **wanted)
    try:
        with contextlib.suppress(huggingface_hub.errors.DryRunError):  # offline: what is in the cache may be enough
            files, cache = download(dry_run=True), Path(huggingface_hub.constants.HF_HUB_CACHE)
            size = sum(file.file_size or 0 for file in files)
            missing = sum(file.file_size or 0 for file in files if file.will_download)
            if missing:
                print(f"downloading {missing / 1e9:.1f} GB into {cache}, a second copy beside {out}", flush=True)
                print(f"which stays there; delete it with: hf cache rm model/{repository}", flush=True)
            advice = f" for the download and for {out}; HF_HOME=FOLDER puts the download elsewhere"
            check_room({cache: missing, out: size}, advice)
        return Path(download())
    except OSError as error:
        problem = " ".join(str(error).split())
        raise OSError(f"{repository} is no folder here and cannot be downloaded: {problem}") from None


def main(cfg):
    if not cfg.source or not cfg.out:
        raise ValueError("name both: --source=FOLDER_OR_REPOSITORY --out=FOLDER")
    if cfg.push and cfg.push.count("/") != 1:
        raise ValueError(f"--push={cfg.push} is no repository of the Hub (OWNER/NAME)")
    compare = cfg.verify or bool(cfg.push)
    if (cfg.to and compare) or (cfg.block_length and not cfg.to):
        raise ValueError("--to=dream adds a row, so --verify and --push do not go with it; --block_length does")
    if cfg.dtype and compare:
        raise ValueError("--verify and --push compare bytes, which --dtype changes; convert --out again with them")
    checkpoints.quiet()
    started, folder, out, repository = time.time(), Path(cfg.source), Path(cfg.out), ""
    if not compare:
        refuse_existing(out)
    if not folder.exists():
        if cfg.source.count("/") != 1 or cfg.source.startswith((".", "/")):
            raise FileNotFoundError(f"{folder} does not exist, and is no repository of the Hub (OWNER/NAME)")
        folder, repository = fetch(cfg.source, cfg.revision, out), cfg.source
    if cfg.to:
        source = find_qwen2(folder, cfg.block_length, repository)
    else:
        source = find(folder, cfg.step, repository)
    # Convert; a folder that is there already can still be compared and published.
    if out.exists():
        print(f"{out} exists and is not written again")
    else:
        if source.params and not cfg.dtype:
            to_safetensors(source, out, cfg.shard_gb)
        else:
            to_orbax(source, out, cfg.dtype)
        size, seconds = bytes_in(out), time.time() - started
        print(f"wrote {out}: {size / 1e9:.2f} GB in {seconds:.0f} s, {size / 1e9 / seconds:.2f} GB/s")
    written = find(out)
    # Compare what was written, as it lies on the disk, with where it came from; always before it goes to the Hub.
    if compare:
        verify(source, written)
    write_card(written, cfg.push or cfg.out, trained(source.folder, source.step))
    if cfg.push:
        push(written, cfg.push)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
