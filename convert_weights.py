"""Convert checkpoints: Hugging Face safetensors to Orbax, and back; the bytes of every tensor stay what they are.

    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder         # a folder from the Hub
    python convert_weights.py --source=apple/DiffuCoder-7B-Instruct --out=out/diffucoder   # downloads it first
    python convert_weights.py --source=out/diffucoder --out=out/diffucoder_hf              # and back again
    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder --verify=True    # compares both
    python convert_weights.py --source=out/train_tpu --out=out/my_model --push=me/my_model          # a run, published

Reads a folder, or a repository of the Hub (token from HF_TOKEN, or what `hf auth login` stored). What it is, and so
which way to go, is seen from the folder; a run of train_tpu.py or train_gpu.py gives its newest step. Writes --out
under another name and renames it when it is whole:

    Dream, MDLM in Orbax: config.json, tokenizer files, meta.json, params/ (Zarr in chunks: a device reads its own part)
    PythonCoder in Orbax: a run folder as train_tpu.py writes it, without the optimizer
    safetensors:          config.json, tokenizer files, model-0000i-of-0000n.safetensors, model.safetensors.index.json

Tensors are not copied on their way to Orbax: it is handed views of the mapped files. On the way back, and to verify,
two pieces are in memory, of 32 MB or one chunk; files that Orbax wrote elsewhere may have a whole array in a chunk.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import io
import itertools
import json
import logging
import math
import os
import shutil
import struct
import sys
import threading
import time
import typing
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
import tokenizers
import tyro
import safetensors
from flax import nnx
from orbax.checkpoint import type_handlers

import model_dream as dream
import model_pythoncoder as pc
import runs as run_folders


@dataclasses.dataclass(frozen=True)
class Config:
    source: str = ""  # folder with a checkpoint in either form, or a repository of the Hub as OWNER/NAME
    out: str = ""  # folder to write
    revision: str = "main"  # of a repository
    step: int = 0  # of a run folder; 0 takes the newest
    shard_gb: float = 5.0  # largest safetensors file
    verify: bool = False  # read --source and --out again and compare every tensor
    reference: bool = False  # verify, and compare a forward pass of transformers' Qwen2 with ours
    push: str = ""  # verify, and upload --out to this repository of the Hub, OWNER/NAME


CHUNK_BYTES = 32 << 20  # of the Zarr arrays, and of the pieces read from them


# ---- the Hub's form ------------------------------------------------------------------------------------------------

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("float16"), "F32": np.dtype("float32")}
# name of a parameter of Dream -> its name on the Hub; shapes and layout are the same
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


def mapped(path):
    """{name: mapped array, read-only} of a safetensors file. The library checks the file, and copies what it returns;
    as it has made sure that the tensors fill the file to its end without a gap, their places are known and can be mapped.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            views = {name: file.get_slice(name) for name in file.offset_keys()}  # in the order of the file
            layout = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    unknown = [f"{name} is {dtype}" for name, (dtype, _) in layout.items() if dtype not in DTYPES]
    if unknown:
        raise ValueError(f"{path} cannot be read: {unknown[0]}, not one of {', '.join(DTYPES)}")
    sizes = {name: DTYPES[dtype].itemsize * math.prod(shape) for name, (dtype, shape) in layout.items()}
    data = np.memmap(path, np.uint8, "r")
    start, arrays = data.size - sum(sizes.values()), {}
    for name, (dtype, shape) in layout.items():
        arrays[name] = data[start : start + sizes[name]].view(DTYPES[dtype]).reshape(shape)
        start += sizes[name]
    return arrays


def open_hub(folder):
    """{name: mapped array} of all safetensors files of a folder, which an index names where there are several."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return mapped(folder / "model.safetensors")
    weight_map = run_folders.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is damaged: it has no weight_map")
    arrays, holder = {}, {}
    for file_name in sorted({*weight_map.values()}):
        if not (folder / file_name).is_file():
            raise FileNotFoundError(f"{folder / file_name} does not exist, but {index.name} names it")
        tensors = mapped(folder / file_name)
        arrays |= tensors
        holder |= dict.fromkeys(tensors, file_name)
    if holder != weight_map:
        wrong = sorted(name for name, _ in holder.items() ^ weight_map.items())
        raise ValueError(f"{index} and the files beside it disagree about {', '.join(dict.fromkeys(wrong[:5]))}")
    return arrays


def from_hf(folder, dtype=None, run=None):
    """A folder in the Hub's form as a Dream in `dtype`, None keeps the file's: for tests and comparisons.

    Raises ValueError or FileNotFoundError with one line on what is wrong.
    """
    folder = Path(folder)
    cfg, arrays = dream.config_from_hf(folder), open_hub(folder)
    shapes = {name: leaf.shape for name, leaf in run_folders.flatten(dream.param_shapes(cfg)).items()}
    want = {hf_name(name): shape for name, shape in shapes.items()}
    run_folders.check_tensors({name: array.shape for name, array in arrays.items()}, want, folder)
    dtype = jax.numpy.dtype(dtype or arrays[hf_name("embed_tokens")].dtype)
    params = {name: jax.numpy.array(arrays[hf_name(name)], dtype) for name in shapes}
    return nnx.merge(dream.graph_of(cfg, run or dream.Run(dtype=dtype)), run_folders.unflatten(params))


# ---- kinds of models -----------------------------------------------------------------------------------------------


class Family(typing.NamedTuple):
    """What differs between the kinds of models; all the rest below is the same for all."""

    config: typing.Callable  # the keys of a config.json -> architecture; ValueError or TypeError if they do not fit
    to_hub: typing.Callable  # (architecture, dtype) -> the keys of a config.json beside safetensors
    shapes: typing.Callable  # architecture -> {our name: shape}
    file_name: typing.Callable = str  # our name -> name in a safetensors file
    order: typing.Callable | None = None  # sorts our names in the files


def fields_of(config_class, keys):
    return config_class(**{field.name: keys[field.name] for field in dataclasses.fields(config_class)})


def flat_shapes(module, cfg):
    return {name: leaf.shape for name, leaf in module.flatten(module.param_shapes(cfg)).items()}


def mdlm_config(keys):
    import model_mdlm

    return fields_of(model_mdlm.Config, keys)


def mdlm_shapes(cfg):
    import torch

    import model_mdlm

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in model_mdlm.MDLM(cfg).state_dict().items()}


def hub_order(name):
    """Embedding, layers by number, norm, head."""
    parts = name.split(".")
    first = {"embed_tokens": 0, "layers": 1, "norm": 2, "lm_head": 3}[parts[0]]
    return first, int(parts[1]) if first == 1 else 0, name


def keys_of(kind):
    return lambda cfg, dtype: {"model_type": kind, **dataclasses.asdict(cfg), "torch_dtype": dtype}


FAMILIES = {
    "dream": Family(
        functools.partial(fields_of, dream.DreamConfig),
        dream.config_to_hf,
        functools.partial(flat_shapes, dream),
        dream.hf_name,
        hub_order,
    ),
    "pythoncoder": Family(
        functools.partial(fields_of, pc.Config), keys_of("pythoncoder"), functools.partial(flat_shapes, pc)
    ),
    "mdlm": Family(mdlm_config, keys_of("mdlm"), mdlm_shapes),
}


class Checkpoint(typing.NamedTuple):
    """What `find` saw in a folder."""

    folder: Path  # holds the tokenizer
    kind: str  # key of FAMILIES
    cfg: typing.Any  # architecture
    keys: dict  # of the config.json beside safetensors
    params: Path | None  # Orbax; None: safetensors
    sums: dict | None  # {our name: word_sum}, Orbax only
    step: int = 0  # of a run

    @property
    def family(self):
        return FAMILIES[self.kind]


def read_json(path, *needed):
    """A JSON object; `needed` are keys that hold objects too. Raises ValueError, FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; name a folder that holds a model")
    try:
        keys = json.loads(path.read_text())
        missing = [name for name in needed if not isinstance(keys[name], dict)] if keys.keys() >= {*needed} else needed
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is damaged: it is not a JSON object") from None
    if missing:
        raise ValueError(f"{path} is damaged: it has no {' and no '.join(missing)}")
    return keys


def find(folder, step=0):
    """The checkpoint in a folder. Raises ValueError or FileNotFoundError with one line."""
    runs = {int(path.name): path for path in folder.glob("checkpoints/*") if path.name.isdigit()}
    steps = {int(path.name[5:]): path for path in folder.glob("step_*") if path.name[5:].isdigit()}
    found = runs or steps
    if (step or found) and (step or max(found)) not in found:
        raise FileNotFoundError(f"{folder} holds no step {step}" + (f"; it has {sorted(found)}" if found else ""))
    step = (step or max(found)) if found else 0
    if runs:
        record = read_json(runs[step] / "meta" / "metadata", "model", "sums")
        kind, where = "dream" if "mask_id" in record["model"] else "pythoncoder", runs[step]
        sums = {name[7:]: value for name, value in record["sums"].items() if name.startswith("params.")}
        keys, params = record["model"], runs[step] / "params"
    else:
        where = folder = steps.get(step, folder)
        keys = read_json(folder / "config.json")
        kind = keys["model_type"] if keys.get("model_type") in ("mdlm", "pythoncoder") else "dream"
        params = sums = None
        if (folder / "meta.json").is_file():
            params, sums = folder / "params", read_json(folder / "meta.json", "sums")["sums"]
    try:
        cfg = dream.config_from_hf(folder) if kind == "dream" and not runs else FAMILIES[kind].config(keys)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} does not describe a {kind} model: {error}") from None
    if runs:
        keys = FAMILIES[kind].to_hub(cfg, "float32") | {"step": step}
    return Checkpoint(folder, kind, cfg, keys, params, sums, step or int(keys.get("step", 0)))


# ---- tensors -------------------------------------------------------------------------------------------------------


def words(array):
    """The array's bits as whole numbers of its item size, one axis, not copied."""
    return array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")


def word_sum(array):
    """Sum of an array's words modulo 2^32, as model_dream.bit_sums; changes with any one bit."""
    return int(words(array).sum(dtype=np.uint32))


def check_tensors(found, want, where):
    """Raise ValueError naming each missing, extra or misshapen tensor of found, {name: shape}."""
    wrong = [f"missing {name}" for name in want.keys() - found.keys()]
    wrong += [f"unexpected {name}" for name in found.keys() - want.keys()]
    for name in want.keys() & found.keys():
        if tuple(found[name]) != tuple(want[name]):
            wrong.append(f"{name} has shape {tuple(found[name])}, not {tuple(want[name])}")
    if wrong:
        more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(f"the tensors of {where} do not fit the model: " + "; ".join(sorted(wrong)[:20]) + more)


def one_dtype(arrays, where):
    dtypes = sorted({str(array.dtype) for array in arrays.values()})
    if len(dtypes) != 1:
        raise ValueError(f"{where} holds tensors of several dtypes: {', '.join(dtypes)}")
    return np.dtype(dtypes[0])


def open_safetensors(checkpoint):
    """{our name: mapped array} of a checkpoint in safetensors, and their dtype."""
    arrays, family = dream.open_hf(checkpoint.folder), checkpoint.family
    shapes = family.shapes(checkpoint.cfg)
    want = {family.file_name(name): shape for name, shape in shapes.items()}
    check_tensors({name: array.shape for name, array in arrays.items()}, want, checkpoint.folder)
    return {name: arrays[family.file_name(name)] for name in shapes}, one_dtype(arrays, checkpoint.folder)


def open_orbax(checkpoint):
    """{our name: array of tensorstore} of a checkpoint in Orbax, and their dtype.

    Orbax itself restores whole arrays only, and a 7B model's largest is a gigabyte; tensorstore, which it stores them
    with, reads any part. _METADATA says how they are stored: one folder each, or all in the files of an OCDBT.
    """
    params, family = checkpoint.params, checkpoint.family
    form = read_json(params / "_METADATA", "tree_metadata")
    store = {"driver": "file", "path": f"{params.absolute()}/"}
    store = {"driver": "ocdbt", "base": store, "path": ""} if form.get("use_ocdbt") else store
    found = [".".join(key["key"] for key in leaf["key_metadata"]) for leaf in form["tree_metadata"].values()]
    driver = "zarr3" if form.get("use_zarr3") else "zarr"
    context = tensorstore.Context({"file_io_mode": {"mode": "memmap"}})  # half the processor time of reading
    arrays = {}
    for name in found:
        spec = {"driver": driver, "kvstore": store | {"path": f"{store['path']}{name}/"}}
        arrays[name] = tensorstore.open(spec, context=context, open=True, read=True)
    arrays = {name: array.result() for name, array in arrays.items()}
    shapes = family.shapes(checkpoint.cfg)
    check_tensors({name: array.shape for name, array in arrays.items()}, shapes, params)
    order = sorted(shapes, key=family.order) if family.order else shapes
    kinds = {name: np.empty(0, array.dtype.numpy_dtype) for name, array in arrays.items()}
    return {name: arrays[name] for name in order}, one_dtype(kinds, params)


def pieces(arrays):
    """(name, some rows of it as a NumPy array) of tensorstore's arrays in order; the next is read meanwhile.

    A piece is whole chunks, as many as CHUNK_BYTES hold, at least one.
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
        future = view.read(order="C")
        if waiting:
            yield waiting[0], waiting[1].result()
        waiting = name, future
    yield waiting[0], waiting[1].result()


# ---- progress and whole folders ------------------------------------------------------------------------------------


def bytes_in(folder):
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            size += path.stat().st_size
    return size


@contextlib.contextmanager
def progress(done_bytes, total):
    """Print how many bytes are done, as done_bytes() says, and when all are at this pace, every few seconds."""
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


def small_files(checkpoint):
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
    theirs = ids.get("<|mask|>", cfg.mask_id)
    if theirs != cfg.mask_id:
        raise ValueError(f"{where} does not fit: its <|mask|> is {theirs}, the model's {cfg.mask_id}")
    if cfg.mask_id in added:
        return data
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
    """Orbax, told not to copy, not to compress (bfloat16 weights hardly do), and to write plain files."""
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


def to_orbax(source, out):
    """Write the Orbax form of a checkpoint in safetensors."""
    files, (arrays, dtype) = small_files(source), open_safetensors(source)
    if source.kind == "pythoncoder" and dtype != np.float32:
        raise ValueError(f"{source.folder} is in {dtype}; a run folder, which this becomes, holds float32")
    total, count = (sum(getattr(array, key) for array in arrays.values()) for key in ("nbytes", "size"))
    print(f"{len(arrays)} tensors, {count:,} parameters in {dtype}", flush=True)
    with whole(out, total) as partial, concurrent.futures.ThreadPoolExecutor(1) as thread:
        sums = thread.submit(lambda: {name: word_sum(array) for name, array in arrays.items()})
        run = partial / "checkpoints" / str(source.step) if source.kind == "pythoncoder" else partial
        save_args = dream.unflatten(
            {name: ocp.SaveArgs(chunk_byte_size=chunk_bytes(array)) for name, array in arrays.items()}
        )
        with progress(lambda: bytes_in(partial), total), checkpointer() as orbax:
            orbax.save(run / "params", args=ocp.args.PyTreeSave(dream.unflatten(arrays), save_args=save_args))
        if source.kind == "pythoncoder":
            model = dataclasses.asdict(source.cfg)
            sums = {f"params.{name}": value for name, value in sums.result().items()}
            (run / "meta").mkdir()
            (run / "meta" / "metadata").write_text(json.dumps({"model": model, "step": source.step, "sums": sums}))
            (partial / "config.json").write_text(json.dumps({"model": model}, indent=2) + "\n")
        else:
            meta = {"dtype": str(dtype), "parameters": count, "sums": sums.result()}
            (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
            (partial / "config.json").write_text(json.dumps(source.keys, indent=2) + "\n")
        for name, data in files.items():
            (partial / name).write_bytes(data)


def to_hub(source, out, shard_gb):
    """Write the safetensors form of a checkpoint in Orbax."""
    files, (arrays, dtype) = small_files(source), open_orbax(source)
    label = next((name for name, known in dream.DTYPES.items() if known == dtype), None)
    if not label:
        raise ValueError(f"{source.params} is in {dtype}, not one of {', '.join(map(str, dream.DTYPES.values()))}")
    sizes = {name: dtype.itemsize * math.prod(array.shape) for name, array in arrays.items()}
    shards, room = [], 0
    for name in arrays:
        if not shards or sizes[name] > room:
            shards, room = [*shards, []], math.inf if source.kind == "mdlm" else shard_gb * 1e9  # MDLM reads one file
        shards[-1].append(name)
        room -= sizes[name]
    total, weight_map, file_name = sum(sizes.values()), {}, source.family.file_name
    print(f"{len(arrays)} tensors, {total // dtype.itemsize:,} parameters in {dtype}, {len(shards)} files", flush=True)
    with whole(out, total) as partial, progress(lambda: bytes_in(partial), total):
        for i, names in enumerate(shards, 1):
            one = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            header, start = {"__metadata__": {"format": "pt"}}, 0
            for name in names:
                offsets = [start, start := start + sizes[name]]
                header[file_name(name)] = {"dtype": label, "shape": list(arrays[name].shape), "data_offsets": offsets}
            head = json.dumps(header, separators=(",", ":")).encode()
            head += b" " * (-len(head) % 8)
            with open(partial / one, "wb") as file:
                file.write(struct.pack("<Q", len(head)) + head)
                for name, parts in itertools.groupby(pieces({n: arrays[n] for n in names}), lambda piece: piece[0]):
                    total_sum = 0
                    for _, part in parts:
                        total_sum += word_sum(part)
                        file.write(words(part))
                    if total_sum % 2**32 != source.sums.get(name):
                        raise ValueError(f"{source.folder} is corrupted: {name} is not what was saved")
            weight_map |= {file_name(name): one for name in names}
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        (partial / "config.json").write_text(json.dumps(source.keys | {"torch_dtype": str(dtype)}, indent=2) + "\n")
        for name, data in files.items():
            (partial / name).write_bytes(data)


def verify(source, out):
    """Compare names, shapes, dtypes and all words of a checkpoint in either form; ValueError naming what differs."""
    if (source.params is None) == (out.params is None):
        form = "Orbax" if source.params else "safetensors"
        raise ValueError(f"{source.folder} and {out.folder} are both {form}; --verify compares one form with the other")
    if source.cfg != out.cfg:
        raise ValueError(f"the config.json of {source.folder} and {out.folder} describe different models")
    hub, orbax = (out, source) if source.params else (source, out)
    (theirs, hub_dtype), (ours, dtype) = open_safetensors(hub), open_orbax(orbax)
    if hub_dtype != dtype:
        raise ValueError(f"{hub.folder} is in {hub_dtype}, {orbax.folder} in {dtype}")
    wrong, count, total = [], 0, sum(array.size for array in theirs.values())
    with progress(lambda: count * dtype.itemsize, total * dtype.itemsize):
        for name, parts in itertools.groupby(pieces(ours), lambda piece: piece[0]):
            want, at, total_sum, equal = words(theirs[name]), 0, 0, True
            for _, part in parts:
                equal &= np.array_equal(words(part), want[at : at + part.size])
                at, count, total_sum = at + part.size, count + part.size, total_sum + word_sum(part)
            if not equal:
                wrong.append(name)
            if total_sum % 2**32 != orbax.sums.get(name):
                wrong.append(f"{name} (checksum)")
    if wrong or count != total:
        raise ValueError(f"{source.folder} and {out.folder} differ: {', '.join(wrong) or 'number of parameters'}")
    print(f"verified: {len(theirs)} tensors, {count:,} parameters, every byte equal", flush=True)


def reference(source, out, length=24, float32_below=1e9):
    """Run transformers' Qwen2 without its causal mask and our model on the same tokens; ValueError if they differ.

    The same maths, written by others. Their weights are the safetensors, ours what model_dream.load makes of the Orbax
    form. In float32 for models of fewer than float32_below parameters, else in the checkpoint's dtype.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(
            f"--reference needs PyTorch and transformers ({error}): pip install torch transformers"
        ) from None
    hub, orbax = (out, source) if source.params else (source, out)
    cfg, (arrays, dtype) = hub.cfg, open_safetensors(hub)
    if sum(array.size for array in arrays.values()) < float32_below:
        dtype = np.dtype("float32")
    hf = {key: getattr(cfg, name) for name, key in dream.HF_KEYS.items() if not name.endswith("_id")}
    with torch.device("meta"):
        config = transformers.Qwen2Config(**hf, attn_implementation="eager", use_sliding_window=False)
        model = transformers.Qwen2ForCausalLM(config).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its table is in no checkpoint
    stored = {np.dtype(np.float32): torch.float32, np.dtype(np.float16): torch.float16}
    tensors = {}
    for name, array in arrays.items():
        bits = torch.from_numpy(words(array).view(f"int{8 * array.dtype.itemsize}")).reshape(array.shape)
        tensor = bits.view(stored.get(array.dtype, torch.bfloat16))
        tensors[dream.hf_name(name)] = tensor.to(stored.get(dtype, torch.bfloat16))
    if cfg.tie:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    token_BL = np.random.default_rng(0).integers(0, cfg.vocab, (2, length))
    token_BL[1, :-1] = token_BL[0, :-1]  # the rows differ in the last token alone
    with torch.inference_mode():  # an additive mask of zeros: eager attention then sees both sides
        theirs_BLV = model(torch.from_numpy(token_BL), attention_mask=torch.zeros(2, 1, length, length)).logits
        theirs_BLV = theirs_BLV.float().numpy()
    del model, tensors
    with jax.default_matmul_precision("highest"):
        ours_BLV = np.asarray(dream.load(orbax.folder, dtype, step=orbax.step or None)(token_BL))
    scale = np.abs(theirs_BLV).max()
    error = np.abs(ours_BLV - theirs_BLV).max() / scale
    reach = min(np.abs(logits[0, 0] - logits[1, 0]).max() for logits in (theirs_BLV, ours_BLV)) / scale
    bound = 1e-4 if dtype == np.float32 else 0.15
    print(
        f"reference: transformers {transformers.__version__} Qwen2 in {dtype}, largest logit {scale:.4g}, largest "
        f"difference {error:.2g} of it (bound {bound:g}); the last token moves the first logits by {reach:.2g} of it"
    )
    if not error <= bound or not reach:
        raise ValueError(f"{hub.folder} and transformers differ by {error:.2g} of the largest logit, above {bound:g}")


# ---- the Hub -------------------------------------------------------------------------------------------------------

CARD = """---
tags: [{tags}]
{base}---

# {name}

{what}, {parameters:,} parameters in {dtype}, {form}. Every byte of every tensor was compared with what it was converted
from by `convert_weights.py` of Unmask.

{use}
"""


def model_card(checkpoint, repository, source):
    """README.md of a repository of the Hub. It names no licence: that is the publisher's to say."""
    arrays, dtype = open_orbax(checkpoint) if checkpoint.params else open_safetensors(checkpoint)
    count = sum(math.prod(array.shape) for array in arrays.values())
    named = source.count("/") == 1 and not source.startswith((".", "/")) and not Path(source).exists()
    what = {
        "dream": "A masked-diffusion language model of the Dream family",
        "pythoncoder": "A code model with differential attention and multi-token prediction",
        "mdlm": "A masked-diffusion language model",
    }[checkpoint.kind]
    use = f"Get the other form with: `python convert_weights.py --source={repository} --out=model`."
    return CARD.format(
        tags=f"unmask, {checkpoint.kind}, {'orbax' if checkpoint.params else 'safetensors'}",
        base=f"base_model: {source}\n" if named else "",
        name=repository.split("/")[1],
        what=what,
        parameters=count,
        dtype=dtype,
        form="an Orbax checkpoint for JAX" if checkpoint.params else "safetensors",
        use=use,
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
        sys.exit(f"{out} was not uploaded to {repository}: {problem}; run again to go on")
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
        sys.exit(f"{repository} cannot be downloaded: {' '.join(str(error).split())}")


def main(cfg):
    if not cfg.source or not cfg.out:
        sys.exit("name both: --source=FOLDER_OR_REPOSITORY --out=FOLDER")
    if cfg.push and cfg.push.count("/") != 1:
        sys.exit(f"--push={cfg.push} is no repository of the Hub (OWNER/NAME)")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    source, out = Path(cfg.source), Path(cfg.out)
    if not source.exists():
        if cfg.source.count("/") != 1 or cfg.source.startswith((".", "/")):
            sys.exit(f"{source} does not exist, and is no repository of the Hub (OWNER/NAME)")
        source = fetch(cfg.source, cfg.revision)
    started = time.time()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            source = find(source, cfg.step)
            if out.exists() and (cfg.verify or cfg.reference or cfg.push):
                print(f"{out} exists and is not written again")
            else:
                if source.params:
                    to_hub(source, out, cfg.shard_gb)
                else:
                    to_orbax(source, out)
                size, seconds = bytes_in(out), time.time() - started
                print(f"wrote {out}: {size / 1e9:.2f} GB in {seconds:.0f} s, {size / 1e9 / seconds:.2f} GB/s")
            if cfg.verify or cfg.reference or cfg.push:  # what goes to the Hub was compared
                written = find(out)
                verify(source, written)
            if cfg.reference:
                if source.kind != "dream":
                    raise ValueError(f"--reference knows Dream models; {source.folder} is {source.kind}")
                reference(source, written)
        except Exception as error:  # Orbax raises nothing narrower for a full disk or a file that was cut short
            print((str(error) or repr(error)).splitlines()[0], file=sys.__stderr__, flush=True)
            os._exit(1)  # threads of a failed Orbax call print tracebacks until the process ends
    if cfg.push:
        push(written, out, cfg.push, cfg.source)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # a computation under way may crash while the interpreter closes
