"""Convert checkpoints: Hugging Face safetensors to Orbax, and back; the bytes of every tensor stay what they are.

    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder         # a folder from the Hub
    python convert_weights.py --source=apple/DiffuCoder-7B-Instruct --out=out/diffucoder   # downloads it first
    python convert_weights.py --source=out/diffucoder --out=out/diffucoder_hf              # and back again
    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder --verify    # compares both
    python convert_weights.py --source=out/train_tpu --out=out/my_model --push=me/my_model     # a run, published

Reads a folder, or a repository of the Hub (token from HF_TOKEN, or what `hf auth login` stored). The files in it say
which form it is in, and it is converted to the other; of a run of train_tpu.py the newest step is taken. Writes --out
under another name and renames it when it is complete:

    Dream in Orbax:       config.json, tokenizer files, meta.json, params/ (Zarr in chunks: a device reads its part)
    PythonCoder in Orbax: a run folder as train_tpu.py writes it, without the optimizer
    safetensors:          config.json, tokenizer files, model-0000i-of-0000n.safetensors, model.safetensors.index.json

Conversion streams. Orbax is handed views of the mapped files, and no tensor is copied. On the way back, and to verify,
two blocks of 32 MB are in memory; files that Orbax wrote elsewhere may hold an array as a single block.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import struct
import threading
import time
import typing
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import tensorstore
import tokenizers
from flax import nnx
from orbax.checkpoint import type_handlers

import model_dream as dream
import model_pythoncoder as pc
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    source: str = ""  # folder with a checkpoint in either form, or a repository of the Hub as OWNER/NAME
    out: str = ""  # folder to write
    revision: str = "main"  # branch, tag or commit of a repository of the Hub
    step: int = 0  # checkpoint of a run folder; 0 takes the newest
    shard_gb: float = 5.0  # largest safetensors file, in GB
    verify: bool = False  # read --source and --out again and compare every tensor
    push: str = ""  # verify, and upload --out to this repository of the Hub, OWNER/NAME


CHUNK_BYTES = 32 << 20  # of the Zarr arrays, and of the blocks read from them


# ---- the Hub's form ------------------------------------------------------------------------------------------------

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("float16"), "F32": np.dtype("float32")}
# parameter of Dream -> its name on the Hub; shapes and layout are the same
HF_NAMES = {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
HF_LAYER_NAMES = {
    "input_layernorm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_proj": "self_attn.k_proj.weight",
    "k_bias": "self_attn.k_proj.bias",
    "v_proj": "self_attn.v_proj.weight",
    "v_bias": "self_attn.v_proj.bias",
    "o_proj": "self_attn.o_proj.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}


def hf_name(name):
    """layers.3.q_bias -> model.layers.3.self_attn.q_proj.bias"""
    if not name.startswith("layers."):
        return HF_NAMES[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{HF_LAYER_NAMES[part]}"


def map_file(path):
    """{name: array in the mapped file, read-only} of a safetensors file; ValueError if it is damaged."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            views = {name: file.get_slice(name) for name in file.offset_keys()}  # in the order of the file
            layout = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    unknown = [f"{name} is {dtype}" for name, (dtype, _) in layout.items() if dtype not in DTYPES]
    if unknown:
        raise ValueError(f"{path} cannot be read: {unknown[0]}, not one of {', '.join(DTYPES)}")
    # The library copies the tensors that it returns. It has checked that they lie one behind the other up to the end of
    # the file, without a gap; so their places follow from their sizes, and the file can be mapped.
    sizes = {name: DTYPES[dtype].itemsize * math.prod(shape) for name, (dtype, shape) in layout.items()}
    data = np.memmap(path, np.uint8, "r")
    start, arrays = data.size - sum(sizes.values()), {}
    for name, (dtype, shape) in layout.items():
        arrays[name] = data[start : start + sizes[name]].view(DTYPES[dtype]).reshape(shape)
        start += sizes[name]
    return arrays


def map_files(folder):
    """{name: mapped array} of all safetensors files of a folder; an index names them where there are several."""
    index = folder / "model.safetensors.index.json"
    file_of = runs.read_json(index, "weight_map")["weight_map"] if index.exists() else {}
    arrays, found = {}, {}
    for file_name in sorted({*file_of.values()}) or ["model.safetensors"]:
        if not (folder / file_name).is_file():
            named = f", but {index.name} names it" if file_of else ""
            raise FileNotFoundError(f"{folder / file_name} does not exist{named}")
        tensors = map_file(folder / file_name)
        arrays |= tensors
        found |= dict.fromkeys(tensors, file_name)
    if file_of and found != file_of:
        differ = sorted({name for name, _ in found.items() ^ file_of.items()})
        raise ValueError(f"{index} and the files beside it disagree about {', '.join(differ[:5])}")
    return arrays


def from_hf(folder, dtype=None, run=None):
    """A folder in the Hub's form as a Dream in `dtype`, None keeps the stored one: for tests and comparisons.

    Raises ValueError or FileNotFoundError with one line on what is wrong.
    """
    cfg = dream.config_from_hf(folder)
    arrays, stored = open_safetensors(Checkpoint(Path(folder), "dream", cfg, {}))
    params = {name: jax.numpy.array(array, dtype or stored) for name, array in arrays.items()}
    run = run or dream.Run(dtype=jax.numpy.dtype(dtype or stored))
    return nnx.merge(dream.graph_of(cfg, run), runs.unflatten(params))


# ---- which checkpoint a folder holds -------------------------------------------------------------------------------


def order_on_the_hub(name):
    """Sorts the names of Dream's parameters: embedding, layers by number, norm, head."""
    top, *rest = name.split(".")
    return {"embed_tokens": 0, "layers": 1, "norm": 2, "lm_head": 3}[top], int(rest[0]) if rest else 0, name


class Family(typing.NamedTuple):
    """What differs between Dream and PythonCoder; all else in this file is the same for both."""

    model: typing.Any  # module with read_config and param_shapes
    to_hub: typing.Callable  # (architecture, dtype) -> the keys of a config.json beside safetensors
    file_name: typing.Callable = str  # name of a parameter -> its name in a safetensors file
    order: typing.Callable = str  # sorts the parameters in the files


def pythoncoder_to_hub(cfg, dtype):
    return {"model_type": "pythoncoder", **dataclasses.asdict(cfg), "torch_dtype": dtype}


FAMILIES = {
    "dream": Family(dream, dream.config_to_hf, hf_name, order_on_the_hub),
    "pythoncoder": Family(pc, pythoncoder_to_hub),
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `find` saw in a folder."""

    folder: Path  # holds the tokenizer
    kind: str  # key of FAMILIES
    cfg: typing.Any  # architecture
    keys: dict  # of the config.json beside safetensors
    params: Path | None = None  # folder of Orbax; None: safetensors
    sums: dict | None = None  # {name of a parameter: word_sum}, Orbax only
    step: int = 0  # of a run

    @property
    def family(self):
        return FAMILIES[self.kind]

    def shapes(self):
        """{name of a parameter: shape}, as the architecture says."""
        tree = self.family.model.param_shapes(self.cfg)
        return {name: leaf.shape for name, leaf in runs.flatten(tree).items()}


def find(folder, step=0):
    """The checkpoint in a folder: a run of train_tpu.py, or safetensors or Orbax as this file and the Hub lay them out.

    Raises ValueError or FileNotFoundError with one line.
    """
    where = folder
    if step or runs.checkpoints(folder):
        step, where = runs.newest(folder, step)
    if where.parent.name == "checkpoints":  # a run of train_tpu.py
        meta = runs.read_json(where / "meta" / "metadata", "model", "sums")
        kind = "dream" if "mask_id" in meta["model"] else "pythoncoder"
        cfg = FAMILIES[kind].model.read_config(where, meta)
        keys = FAMILIES[kind].to_hub(cfg, "float32") | {"step": step}
        # the checksums of the optimizer's state are left out with that state
        sums = {name[7:]: value for name, value in meta["sums"].items() if name.startswith("params.")}
        return Checkpoint(folder, kind, cfg, keys, where / "params", sums, step)
    keys = runs.read_json(where / "config.json")
    if keys.get("model_type") == "mdlm":
        raise ValueError(f"{where} is an MDLM, in safetensors as it is; publish it with: hf upload OWNER/NAME {where}")
    if keys.get("model_type") == "pythoncoder":  # safetensors that this file wrote
        try:
            cfg = pc.Config(**{field.name: keys[field.name] for field in dataclasses.fields(pc.Config)})
        except KeyError as error:
            raise ValueError(f"{where} does not describe a PythonCoder: it has no {error}") from None
        return Checkpoint(folder, "pythoncoder", cfg, keys, step=int(keys.get("step", 0)))
    cfg = dream.config_from_hf(where)
    if not (where / "meta.json").is_file():  # safetensors in the Hub's layout
        return Checkpoint(folder, "dream", cfg, keys)
    sums = runs.read_json(where / "meta.json", "sums")["sums"]
    if not isinstance(sums, dict):
        raise ValueError(f"{where}/meta.json is damaged: it has no sums")
    return Checkpoint(folder, "dream", cfg, keys, where / "params", sums)


# ---- tensors -------------------------------------------------------------------------------------------------------


def as_integers(array):
    """The array's bits as whole numbers of its item size, one axis, not copied."""
    return array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")


def word_sum(array):
    """Sum of an array's words modulo 2^32, as runs.bit_sums; changes with any one bit."""
    return int(as_integers(array).sum(dtype=np.uint32))


def common_dtype(dtypes, where):
    names = sorted(set(map(str, dtypes)))
    if len(names) != 1:
        raise ValueError(f"{where} holds tensors of several dtypes: {', '.join(names)}")
    return np.dtype(names[0])


def open_safetensors(checkpoint):
    """{our name: mapped array} of a checkpoint in safetensors, and their dtype."""
    arrays, family, shapes = map_files(checkpoint.folder), checkpoint.family, checkpoint.shapes()
    want = {family.file_name(name): shape for name, shape in shapes.items()}
    runs.check_tensors({name: array.shape for name, array in arrays.items()}, want, checkpoint.folder)
    dtype = common_dtype((array.dtype for array in arrays.values()), checkpoint.folder)
    return {name: arrays[family.file_name(name)] for name in shapes}, dtype


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
    arrays = {}
    for leaf in form["tree_metadata"].values():
        name = ".".join(key["key"] for key in leaf["key_metadata"])
        spec = {"driver": driver, "kvstore": store | {"path": f"{store['path']}{name}/"}}
        arrays[name] = tensorstore.open(spec, context=context, open=True, read=True)
    arrays = {name: opening.result() for name, opening in arrays.items()}
    runs.check_tensors({name: array.shape for name, array in arrays.items()}, shapes, params)
    dtype = common_dtype((array.dtype.numpy_dtype for array in arrays.values()), params)
    return {name: arrays[name] for name in sorted(shapes, key=family.order)}, dtype


def read_blocks(arrays):
    """(name, some rows of it as a NumPy array) of tensorstore's arrays in order; the next is read meanwhile.

    A block is as many chunks as CHUNK_BYTES hold, at least one.
    """

    def views():
        for name, array in arrays.items():
            if not array.rank:
                yield name, array
                continue
            chunk, length = array.chunk_layout.read_chunk.shape[0], array.shape[0]
            row_bytes = array.dtype.numpy_dtype.itemsize * math.prod(array.shape[1:])
            rows = chunk * max(1, CHUNK_BYTES // (chunk * row_bytes))
            yield from ((name, array[i : min(i + rows, length)]) for i in range(0, length, rows))

    waiting = None
    for name, view in views():
        reading = view.read(order="C")
        if waiting:
            yield waiting[0], waiting[1].result()
        waiting = name, reading
    yield waiting[0], waiting[1].result()


# ---- progress and the folder that is written -----------------------------------------------------------------------


def bytes_in(folder):
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            size += path.stat().st_size
    return size


@contextlib.contextmanager
def progress(done_bytes, total):
    """Print every few seconds how many bytes are done, as done_bytes() says, and how long the rest takes."""
    done, started = threading.Event(), time.time()

    def watch():
        while not done.wait(5):
            size, seconds = done_bytes(), time.time() - started
            left = seconds * max(0, total - size) / max(1, size)
            pace = f"{size / 1e9 / seconds:.2f} GB/s | {left:.0f} s left"
            print(f"{size / 1e9:.1f} of {total / 1e9:.1f} GB | {pace}", flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def output_folder(out, size):
    """A folder for `size` bytes, which is named `out` when all went well; what an interrupted run left is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, lock = (out.with_name(f"{out.name}.{end}") for end in ("tmp", "lock"))
    with runs.lock(lock):
        try:
            if out.exists():
                raise FileExistsError(f"{out} exists; delete it or choose another --out")
            free = shutil.disk_usage(out.parent).free
            if free < size * 1.01:
                raise OSError(f"{out.parent} has {free / 1e9:.1f} GB left, {out.name} needs {size / 1e9:.1f}")
            if partial.exists():
                print(f"{partial} was left by an interrupted run; starting over", flush=True)
            with runs.new_folder(out):
                yield partial
        finally:
            lock.unlink()


# ---- tokenizers ----------------------------------------------------------------------------------------------------

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
# what Dream adds to Qwen2.5's tokenizer, which ends at 151,664
DREAM_TOKENS = {"<|beginoftext|>": 151_665, "<|mask|>": 151_666, "<|dlm_pad|>": 151_667}
# what Qwen2.5's tokenizer does beside its vocabulary and merges
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_files(checkpoint):
    """{name: bytes} of the tokenizer's files. That of a Dream model must have its MASK, or gets Dream's tokens; and it
    is made of vocab.json and merges.txt where a repository holds no tokenizer.json. ValueError if it does not fit.
    """
    paths = [checkpoint.folder / name for name in TOKENIZER_FILES]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    if checkpoint.kind == "dream":
        where = checkpoint.folder / "tokenizer.json"
        if where.name not in files and {"vocab.json", "merges.txt"} <= files.keys():
            where = checkpoint.folder / "vocab.json"
            files["tokenizer.json"] = from_merges(files, where)
            print(f"made tokenizer.json of {where} and merges.txt")
        if "tokenizer.json" in files:
            files["tokenizer.json"] = fitted(files["tokenizer.json"], checkpoint.cfg, where)
    if "tokenizer.json" not in files:
        print(f"{checkpoint.folder} has no tokenizer; generate.py will want a tokenizer.json beside the weights")
    return files


def from_merges(files, where):
    """The tokenizer.json of a repository that holds Qwen2.5's tokenizer as vocab.json, merges.txt and added tokens."""
    try:
        vocab, lines = json.loads(files["vocab.json"]), files["merges.txt"].decode().split("\n")
        decoder = json.loads(files.get("tokenizer_config.json", b"{}")).get("added_tokens_decoder", {})
        added = {int(number): {**SPECIAL, **token} for number, token in decoder.items()}
        for name, number in json.loads(files.get("added_tokens.json", b"{}")).items():
            added.setdefault(number, {"content": name, **SPECIAL})
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{where} and the files beside it are no tokenizer") from None
    split = {"type": "Split", "pattern": {"Regex": QWEN_WORDS}, "behavior": "Isolated", "invert": False}
    merges = [line for line in lines if line and not line.startswith("#version")]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, **added[number]} for number in sorted(added)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "post_processor": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return json.dumps(tokenizer, indent=1, ensure_ascii=False).encode()


def fitted(data, cfg, where):
    """A tokenizer.json with a token at MASK's id; Qwen2.5's own gets Dream's tokens. ValueError if it does not fit.

    The library is asked, not the file: it numbers added tokens from the end of the vocabulary, whatever ids they claim.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{where} is no tokenizer of the tokenizers library: {error}") from None
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    largest = max(ids.values(), default=-1)
    if largest >= cfg.vocab:
        raise ValueError(f"{where} does not fit: its ids reach {largest}, the model has {cfg.vocab}")
    mask_id = ids.get("<|mask|>", cfg.mask_id)
    if mask_id != cfg.mask_id:
        raise ValueError(f"{where} does not fit: its <|mask|> is {mask_id}, the model's {cfg.mask_id}")
    if cfg.mask_id in added:
        return data
    # It may be Qwen2.5's own, which ends where Dream's three tokens begin. Any other has no MASK, and none is invented.
    first = min(DREAM_TOKENS.values())
    if cfg.mask_id != DREAM_TOKENS["<|mask|>"] or largest < first - 1:
        raise ValueError(f"{where} does not fit: it has no special token at {cfg.mask_id}, the model's MASK")
    tokenizer.add_special_tokens([name for name in DREAM_TOKENS if name not in ids])
    got = {name: tokenizer.token_to_id(name) for name in DREAM_TOKENS}
    wrong = [f"{name} is {got[name]}, not {number}" for name, number in DREAM_TOKENS.items() if got[name] != number]
    if wrong:
        raise ValueError(f"{where} does not fit: with Dream's tokens {', '.join(wrong)}")
    print(f"added to the tokenizer: {', '.join(f'{name} {number}' for name, number in DREAM_TOKENS.items())}")
    return tokenizer.to_str(pretty=True).encode()


# ---- the two ways --------------------------------------------------------------------------------------------------


def checkpointer():
    """Orbax that neither copies nor compresses (bfloat16 weights shrink little), and writes a folder for each array."""
    no_copies = type_handlers.create_type_handler_registry(
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False))
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=no_copies)
    return ocp.Checkpointer(handler)


def chunk_bytes(array):
    """For Orbax, which cuts the longest axis. Where that is the last, a chunk would have to be gathered from all rows
    and scattered again, with copies in memory: such an array stays one chunk, unless it is very large.
    """
    wide = array.ndim > 1 and array.shape[-1] > array.shape[0]
    return None if wide and array.nbytes <= 8 * CHUNK_BYTES else CHUNK_BYTES


def save_params(folder, arrays, total):
    """Write arrays {name: array} with Orbax."""
    chunks = {name: ocp.SaveArgs(chunk_byte_size=chunk_bytes(array)) for name, array in arrays.items()}
    arguments = ocp.args.PyTreeSave(runs.unflatten(arrays), save_args=runs.unflatten(chunks))
    try:
        with progress(lambda: bytes_in(folder.parent), total), checkpointer() as orbax:
            orbax.save(folder, args=arguments)
    except (OSError, ValueError) as error:
        raise OSError(f"the checkpoint was not written: {runs.first_line(error)}") from None


def to_orbax(source, out):
    """Write the Orbax form of a checkpoint in safetensors."""
    files, (arrays, dtype) = tokenizer_files(source), open_safetensors(source)
    if source.kind == "pythoncoder" and dtype != np.float32:
        raise ValueError(f"{source.folder} is in {dtype}; a run folder, which this becomes, holds float32")
    total = sum(array.nbytes for array in arrays.values())
    count = sum(array.size for array in arrays.values())
    print(f"{len(arrays)} tensors, {count:,} parameters in {dtype}", flush=True)
    with output_folder(out, total) as partial, concurrent.futures.ThreadPoolExecutor(1) as thread:
        # the checksums are made of the files that we read, while Orbax writes its own
        summing = thread.submit(lambda: {name: word_sum(array) for name, array in arrays.items()})
        if source.kind == "pythoncoder":  # a run folder with one checkpoint
            model = dataclasses.asdict(source.cfg)
            folder = partial / "checkpoints" / str(source.step)
            save_params(folder / "params", arrays, total)
            sums = {f"params.{name}": value for name, value in summing.result().items()}
            (folder / "meta").mkdir()
            runs.write(folder / "meta" / "metadata", {"model": model, "step": source.step, "sums": sums})
            runs.write(partial / "config.json", {"model": model})
        else:
            save_params(partial / "params", arrays, total)
            runs.write(partial / "meta.json", {"dtype": str(dtype), "parameters": count, "sums": summing.result()})
            runs.write(partial / "config.json", source.keys)
        for name, data in files.items():
            runs.write(partial / name, data)


def write_safetensors(path, arrays, label, itemsize, source):
    """Write tensorstore's arrays as a safetensors file, a block at a time; ValueError where a checksum is another.

    The file is 8 bytes of header length, the header as JSON, then the data; offsets count from there.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        start, end = end, end + itemsize * math.prod(array.shape)
        place = {"dtype": label, "shape": list(array.shape), "data_offsets": [start, end]}
        header[source.family.file_name(name)] = place
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, blocks in itertools.groupby(read_blocks(arrays), lambda block: block[0]):
            total = 0
            for _, rows in blocks:
                total += word_sum(rows)
                file.write(as_integers(rows))
            if total % 2**32 != source.sums.get(name):
                raise ValueError(f"{source.folder} is corrupted: {name} is not what was saved")


def to_safetensors(source, out, shard_gb):
    """Write the safetensors form of a checkpoint in Orbax."""
    files, (arrays, dtype) = tokenizer_files(source), open_orbax(source)
    label = next((name for name, known in DTYPES.items() if known == dtype), None)
    if not label:
        raise ValueError(f"{source.params} is in {dtype}, not one of {', '.join(map(str, DTYPES.values()))}")
    # fill file after file with tensors, up to shard_gb each
    shards, room = [], 0
    for name, array in arrays.items():
        size = dtype.itemsize * math.prod(array.shape)
        if not shards or size > room:
            shards.append({})
            room = shard_gb * 1e9
        shards[-1][name] = array
        room -= size
    total = sum(dtype.itemsize * math.prod(array.shape) for array in arrays.values())
    print(f"{len(arrays)} tensors, {total // dtype.itemsize:,} parameters in {dtype}, {len(shards)} files", flush=True)
    file_of = {}
    with output_folder(out, total) as partial, progress(lambda: bytes_in(partial), total):
        for i, shard in enumerate(shards, 1):
            many = len(shards) > 1
            file_name = f"model-{i:05}-of-{len(shards):05}.safetensors" if many else "model.safetensors"
            write_safetensors(partial / file_name, shard, label, dtype.itemsize, source)
            file_of |= {source.family.file_name(name): file_name for name in shard}
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            runs.write(partial / "model.safetensors.index.json", index)
        runs.write(partial / "config.json", source.keys | {"torch_dtype": str(dtype)})
        for name, data in files.items():
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
    with progress(lambda: done * dtype.itemsize, total * dtype.itemsize):
        for name, blocks in itertools.groupby(read_blocks(ours), lambda block: block[0]):
            want, at, checksum, equal = as_integers(theirs[name]), 0, 0, True
            for _, rows in blocks:
                equal &= np.array_equal(as_integers(rows), want[at : at + rows.size])
                checksum += word_sum(rows)
                at += rows.size
            done += at
            if not equal:
                wrong.append(name)
            if checksum % 2**32 != orbax.sums.get(name):
                wrong.append(f"{name} (checksum)")
    if wrong or done != total:
        raise ValueError(f"{source.folder} and {out.folder} differ: {', '.join(wrong) or 'number of parameters'}")
    print(f"verified: {len(theirs)} tensors, {done:,} parameters, every byte equal", flush=True)


# ---- the Hub -------------------------------------------------------------------------------------------------------

CARD = """---
tags: [unmask, {kind}, {form}]
{base}---

# {name}

{what}, {parameters:,} parameters in {dtype}, as {form}. Every byte of every tensor was compared with what it was
converted from by `convert_weights.py` of Unmask.

Get the other form with: `python convert_weights.py --source={repository} --out=model`.
"""


def model_card(checkpoint, repository, source):
    """README.md of a repository of the Hub. It names no licence: that is the publisher's to say."""
    arrays, dtype = open_orbax(checkpoint) if checkpoint.params else open_safetensors(checkpoint)
    from_hub = source.count("/") == 1 and not source.startswith((".", "/")) and not Path(source).exists()
    what = {
        "dream": "A masked-diffusion language model of the Dream family",
        "pythoncoder": "A code model with differential attention and multi-token prediction",
    }
    return CARD.format(
        kind=checkpoint.kind,
        form="orbax" if checkpoint.params else "safetensors",
        base=f"base_model: {source}\n" if from_hub else "",
        name=repository.split("/")[1],
        what=what[checkpoint.kind],
        parameters=sum(math.prod(array.shape) for array in arrays.values()),
        dtype=dtype,
        repository=repository,
    )


def push(checkpoint, out, repository, source):
    """Upload a folder to the Hub; what a broken upload left there is not sent again."""
    import huggingface_hub

    card = out / "README.md"
    if not card.exists():
        card.write_text(model_card(checkpoint, repository, source))
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=out, commit_message=f"Upload {checkpoint.kind} weights")
    except (huggingface_hub.errors.HfHubHTTPError, ValueError, RuntimeError, OSError) as error:
        problem = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise OSError(f"{out} was not uploaded to {repository}: {problem}; run again to go on") from None
    print(f"uploaded {out} to {repository}")


def fetch(repository, revision):
    """Download a repository of the Hub into its cache; its folder."""
    import huggingface_hub

    patterns = ["*.safetensors", "*.json", "merges.txt", "*.jinja", "params/*", "checkpoints/*"]
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns="*/opt/*"
        )
        return Path(folder)
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError, OSError) as error:
        raise OSError(f"{repository} cannot be downloaded: {' '.join(str(error).split())}") from None


def main(cfg):
    if not cfg.source or not cfg.out:
        raise ValueError("name both: --source=FOLDER_OR_REPOSITORY --out=FOLDER")
    if cfg.push and cfg.push.count("/") != 1:
        raise ValueError(f"--push={cfg.push} is no repository of the Hub (OWNER/NAME)")
    runs.quiet()
    source, out = Path(cfg.source), Path(cfg.out)
    if not source.exists():
        if cfg.source.count("/") != 1 or cfg.source.startswith((".", "/")):
            raise FileNotFoundError(f"{source} does not exist, and is no repository of the Hub (OWNER/NAME)")
        source = fetch(cfg.source, cfg.revision)
    started = time.time()
    source = find(source, cfg.step)
    # convert; a folder that is there already can still be compared and published
    if out.exists() and (cfg.verify or cfg.push):
        print(f"{out} exists and is not written again")
    else:
        if source.params:
            to_safetensors(source, out, cfg.shard_gb)
        else:
            to_orbax(source, out)
        size, seconds = bytes_in(out), time.time() - started
        print(f"wrote {out}: {size / 1e9:.2f} GB in {seconds:.0f} s, {size / 1e9 / seconds:.2f} GB/s")
    # compare what was written, as it lies on the disk, with where it came from; always before it goes to the Hub
    if cfg.verify or cfg.push:
        written = find(out)
        verify(source, written)
    if cfg.push:
        push(written, out, cfg.push, cfg.source)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
