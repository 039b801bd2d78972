"""Convert checkpoints: Hugging Face safetensors to Orbax and back; the bytes of every tensor stay
the same.

    python convert_weights.py --source=apple/DiffuCoder-7B-Instruct --out=out/diffucoder   # downloads it first
    python convert_weights.py --source=out/diffucoder --out=out/diffucoder_hf              # and back again
    python convert_weights.py --source=DiffuCoder-7B-Instruct --out=out/diffucoder --verify    # a folder; compares both
    python convert_weights.py --source=out/train_tpu --out=out/my_model --push=me/my_model     # publishes a run
    python convert_weights.py --source=out/train_tpu --out=out/export --dtype=bfloat16         # a run's weights alone
    python convert_weights.py --source=Qwen/Qwen2.5-Coder-0.5B --to=dream --out=out/start      # to train as a Dream

Reads a folder, or a repository of the Hub (token from HF_TOKEN, or from `hf auth login`), and
writes the other form; of a run it takes the newest step. With --dtype the result is Orbax. --out
gets its name when it is complete:

    Orbax:       config.json, tokenizer files, meta.json, params/ (Zarr in chunks: a device reads
    its part)
    safetensors: config.json, tokenizer files, model-0000i-of-0000n.safetensors,
    model.safetensors.index.json

Both keep the name of their source in config.json, and the source's *.py files for transformers.
Their checksums are compared on reading. The Hub's own safetensors hold none: a flipped bit in them
is not noticed, a file cut short is.

--to=dream turns a Qwen2, Fast-dLLM v2 or dllm's a2d-qwen2 into a Dream to train, in Orbax, and a
Qwen3 into an SDAR, which SGLang serves (blocks of 4, MASK 151669). A tokenizer without a mask token
gets one after its last token, whose row of embedding and head is the mean of the rows before it.
The block length is --block_length, or that of config.json, or 1, an autoregressive model; an SDAR's
is 4, an a2d-qwen2 has none. Go on with: python train_dream.py --init=out/start

Conversion streams: Orbax reads from the mapped files, and no tensor is copied; the way back and
--verify hold two blocks of 32 MB, or of one chunk, in memory. --dtype needs a temporary file of the
size of --out beside it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import struct
import tempfile
import time
import typing
from pathlib import Path

import huggingface_hub.constants  # which the package alone does not load
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import tensorstore
import tokenizers
from orbax.checkpoint import type_handlers

import checkpoints
import model_dream as dream
import model_pythoncoder as pc
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    # folder with a checkpoint in either form, or a repository of the Hub as OWNER/NAME
    source: str = ""
    out: str = ""  # folder to write
    revision: str = "main"  # branch, tag or commit of a repository of the Hub
    step: runs.Natural = 0  # checkpoint of a run; 0 takes the newest
    # "dream": make a Dream of a Qwen2, an SDAR of a Qwen3; "" keeps the model
    to: typing.Literal["", "dream"] = ""
    # with --to=dream: block length of the checkpoint; 0: of config.json, else 1
    block_length: runs.Natural = 0
    # write Orbax in this dtype; "" keeps every byte
    dtype: typing.Literal["", "bfloat16", "float32"] = ""
    shard_gb: runs.Positive = 5.0  # largest safetensors file of a Dream, in GB
    verify: bool = False  # compare every tensor of --source and --out
    push: str = ""  # verify, and upload --out to this repository of the Hub, OWNER/NAME


CHUNK_BYTES = 32 << 20  # size of the chunks of Zarr arrays, and of the blocks read from them


# ---- the Hub's form ------------------------------------------------------------------------------------------------

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("float16"),
    "F32": np.dtype("float32"),
}
TABLES = {"embed_tokens", "lm_head"}  # have a row per token
LLADA = {  # our names of parameters: LLaDA's, where they differ
    "embed_tokens": "wte", "norm": "ln_f", "lm_head": "ff_out", "input_layernorm": "attn_norm", "o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm", "gate_proj": "ff_proj", "down_proj": "ff_out",
}  # fmt: skip


def hf_name(name, family="dream"):
    """layers.3.q_bias -> model.layers.3.self_attn.q_proj.bias; shapes and layouts are the same."""
    layer, dot, part = name.rpartition(".")
    if family == "llada":
        return f"model.transformer.{layer.replace('layers', 'blocks')}{dot}{LLADA.get(part, part)}.weight"
    # q_proj is the matrix, q_bias its bias, q_norm scales what it gives
    matrix, _, kind = part.partition("_")
    block = "self_attn." if matrix in ("q", "k", "v", "o") else "mlp." if kind == "proj" else ""
    leaf = f"{matrix}_proj.bias" if kind == "bias" else f"{part}.weight"
    top, head = ("encoder.", "diffusion_head") if family == "nemotron" else ("model.", "lm_head")
    return f"{head}.weight" if part == "lm_head" else f"{top}{layer}{dot}{block}{leaf}"


def map_files(folder):
    """{name: read-only array in a mapped file} of a folder's safetensors files; ValueError if one
    is damaged.

    The library would copy tensors. It checks that they follow each other without a gap up to the
    end of the file, so their offsets follow from their sizes.
    """
    index, arrays = folder / "model.safetensors.index.json", {}
    names = (
        runs.read_json(index, "weight_map")["weight_map"].values()
        if index.exists()
        else ["model.safetensors"]
    )
    if outside := [name for name in names if name != Path(name).name]:
        raise ValueError(f"{index} names {outside[0]}, which is no file in its folder")
    for path in sorted({folder / name for name in names}):
        try:
            with safetensors.safe_open(path, "numpy") as file:
                # in the order of the file
                views = {name: file.get_slice(name) for name in file.offset_keys()}
                layout = {
                    name: (DTYPES[view.get_dtype()], tuple(view.get_shape()))
                    for name, view in views.items()
                }
                sums = json.loads((file.metadata() or {}).get("sums", "{}"))
        except (safetensors.SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as safetensors of {', '.join(DTYPES)}: {error}"
            ) from None
        data = np.memmap(path, np.uint8, "r")
        start = data.size - sum(
            dtype.itemsize * math.prod(shape) for dtype, shape in layout.values()
        )
        for name, (dtype, shape) in layout.items():
            end = start + dtype.itemsize * math.prod(shape)
            arrays[name] = data[start:end].view(dtype).reshape(shape)
            start = end
            if name in sums and checkpoints.bit_sum(arrays[name]) != sums[name]:
                raise ValueError(f"{path} is damaged: {name} is not what was saved")
    return arrays


# ---- which checkpoint a folder holds -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `find` found in a folder."""

    folder: Path  # holds the tokenizer
    family: typing.Any  # module: model_dream or model_pythoncoder
    cfg: typing.Any  # architecture
    keys: dict  # of the config.json beside safetensors
    params: Path | None = None  # folder of Orbax; None: safetensors
    sums: dict | None = None  # {name of a parameter: checksum}, Orbax only
    step: int = 0  # of a run
    origin: str = ""  # name of the source, OWNER/NAME for one of the Hub
    table_rows: int = 0  # rows of the stored tables, which still lack MASK's; 0: nothing is lacking

    def shapes(self):
        """{name of a parameter: shape}."""
        shapes = {
            name: x.shape
            for name, x in checkpoints.flatten(self.family.param_shapes(self.cfg)).items()
        }
        tables = {
            name: (self.table_rows, *shapes[name][1:])
            for name in TABLES & shapes.keys()
            if self.table_rows
        }
        return shapes | tables

    def file_name(self, name):
        """The name of a parameter in safetensors."""
        return hf_name(name, self.cfg.family) if self.family is dream else name


def find(folder, step=0, repository=""):
    """The checkpoint in a folder: a run, or safetensors or Orbax as this file and the Hub lay them
    out.

    repository is where it was downloaded from. Raises ValueError or FileNotFoundError.
    """
    config, is_run = folder / "config.json", step or runs.saved_steps(folder)
    origin = runs.read_json(config).get("source", repository) if config.is_file() else repository
    where = runs.newest(folder, step)[1] if is_run else folder
    if where.parent == folder / "checkpoints":
        where, meta, step = checkpoints.find_weights(folder, step)
        family = dream if "mask_id" in meta["model"] else pc
        cfg = family.read_config(where, meta)
        keys = (
            dream.config_to_hf(cfg)
            if family is dream
            else {"model_type": "pythoncoder"} | vars(cfg)
        )
        # without the checksums of the optimizer's state
        sums = {
            name.removeprefix("params."): x
            for name, x in meta["sums"].items()
            if name.startswith("params.")
        }
        return Checkpoint(
            folder, family, cfg, keys | {"step": step}, where / "params", sums, step, origin
        )
    keys = runs.read_json(where / "config.json")
    kind = keys.get("model_type")
    if kind == "mdlm":
        raise ValueError(
            f"{where} is an MDLM, in safetensors as it is; publish it with: hf upload OWNER/NAME {where}"
        )
    if kind in QWEN2 and not dream.family_of(where, keys):
        raise ValueError(f"{where} is a {kind}; --to=dream makes a Dream of it")
    if kind == "pythoncoder":
        family, cfg = pc, pc.read_config(where, checkpoints.find_weights(where)[1])
    else:
        family, cfg = dream, dream.config_from_hf(where)
    params = sums = None
    if (where / "meta.json").is_file():
        params, sums = where / "params", runs.read_json(where / "meta.json", "sums")["sums"]
    elif not origin:
        origin = folder.resolve().name
    return Checkpoint(folder, family, cfg, keys, params, sums, int(keys.get("step", 0)), origin)


# of dllm and Dream, of Fast-dLLM v2, of SDAR, of others
MASKS = "<|mask|>", "|<MASK>|", "<|MASK|>", "<mask>"
# model_type of models with Qwen2's layers, and what their config.json leaves out; bd_size 1 is an
# autoregressive model
QWEN2 = {"qwen2": {"bd_size": 1}, "Fast_dLLM_Qwen": {}, "a2d-qwen2": {"shift": False}, "qwen3": {
    "model_type": "sdar", "architectures": ["SDARForCausalLM"], "sliding_window": None}}  # fmt: skip


def find_qwen2(folder, block_length=0, repository=""):
    """The checkpoint in a folder of an autoregressive Qwen, or of a diffusion model made of one, as
    a Dream or SDAR.

    MASK is a token of the tokenizer, or the id after its last one; without a tokenizer, after the
    last row. PAD is the tokenizer's, or EOS; EOS is the first that config.json lists.
    """
    keys = runs.read_json(folder / "config.json", "vocab_size")
    kind, rows = keys.get("model_type"), keys["vocab_size"]
    if kind not in QWEN2:
        raise ValueError(
            f"{folder}: --to=dream takes a model_type of {', '.join(QWEN2)}, not {kind!r}"
        )
    ids = {}
    if (folder / "tokenizer.json").is_file():
        ids = runs.read_tokenizer(folder).get_vocab()
    elif (folder / "vocab.json").is_file():
        ids = from_merges(folder).get_vocab()
    mask_id, table_rows = next((ids[name] for name in MASKS if name in ids), None), 0
    if mask_id is None:
        mask_id, table_rows = max(ids.values(), default=rows - 1) + 1, rows
    eos_id, *_ = np.ravel(keys.get("eos_token_id")).tolist()
    pad = tokenizer_config(folder).get("pad_token")
    pad_id = ids.get(pad["content"] if isinstance(pad, dict) else pad, eos_id)
    changes = {"model_type": "Dream", "vocab_size": max(rows, mask_id + 1)} | QWEN2[kind]
    changes |= {"mask_token_id": mask_id, "eos_token_id": eos_id, "pad_token_id": pad_id}
    changes |= {"bd_size": block_length} if block_length else {}
    cfg, origin = dream.config_from_hf(folder, changes), repository or folder.resolve().name
    return Checkpoint(
        folder, dream, cfg, dream.config_to_hf(cfg), table_rows=table_rows, origin=origin
    )


# ---- tensors -------------------------------------------------------------------------------------------------------


def as_integers(array):
    """The array's bits as integers of its item size [n], not copied."""
    return array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")


def byte_count(array):
    """Bytes of an array of tensorstore."""
    return array.dtype.numpy_dtype.itemsize * math.prod(array.shape)


def open_safetensors(checkpoint, wanted=""):
    """{our name: mapped array} of a checkpoint in safetensors, and their dtype, or the wanted
    one.
    """
    arrays, shapes = map_files(checkpoint.folder), checkpoint.shapes()
    want = {checkpoint.file_name(name): shape for name, shape in shapes.items()}
    runs.check_tensors(
        {name: array.shape for name, array in arrays.items()}, want, checkpoint.folder
    )
    counts = collections.Counter(str(array.dtype) for array in arrays.values())
    if len(counts) > 1 and not wanted:
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        advice = "--dtype=float32 keeps every value, --dtype=bfloat16 rounds them"
        raise ValueError(
            f"{checkpoint.folder} holds tensors of several dtypes: {listed}; make them one: {advice}"
        )
    return {name: arrays[checkpoint.file_name(name)] for name in shapes}, np.dtype(
        wanted or next(iter(counts))
    )


def with_mask_row(table_VD, mask_id):
    """The table with the mean of rows 0 .. mask_id - 1, in float64, as row mask_id: a spare row, or
    a new last one.
    """
    new_VD = np.pad(table_VD, ((0, max(0, mask_id + 1 - len(table_VD))), (0, 0)))
    new_VD[mask_id] = (
        table_VD[:mask_id].mean(0, dtype=np.float64).astype(np.float32).astype(table_VD.dtype)
    )
    return new_VD


def open_orbax(checkpoint):
    """{our name: array of tensorstore} of a checkpoint in Orbax, and their dtype.

    Orbax restores whole arrays, up to a gigabyte in a 7B model; tensorstore, on which it builds,
    reads any part of one. _METADATA says how they are stored: in a folder each, or together in an
    OCDBT database.
    """
    params, shapes = checkpoint.params, checkpoint.shapes()
    form = runs.read_json(params / "_METADATA", "tree_metadata")
    store = {"driver": "file", "path": f"{params.absolute()}/"}
    if form.get("use_ocdbt"):
        store = {"driver": "ocdbt", "base": store, "path": ""}
    driver = "zarr3" if form.get("use_zarr3") else "zarr"
    # half the processor time of reading
    context = tensorstore.Context({"file_io_mode": {"mode": "memmap"}})
    opening = {}
    for leaf in form["tree_metadata"].values():
        name = ".".join(key["key"] for key in leaf["key_metadata"])
        spec = {"driver": driver, "kvstore": store | {"path": f"{store['path']}{name}/"}}
        opening[name] = tensorstore.open(spec, context=context, open=True, read=True)
    arrays = {name: future.result() for name, future in opening.items()}
    runs.check_tensors({name: array.shape for name, array in arrays.items()}, shapes, params)
    (dtype,) = {array.dtype.numpy_dtype for array in arrays.values()}
    return {name: arrays[name] for name in shapes}, dtype


def read_blocks(arrays):
    """(name, rows as a NumPy array) of tensorstore's arrays, block by block; the next one is read
    meanwhile.
    """

    def reads():
        for name, array in arrays.items():
            chunk, length = array.chunk_layout.read_chunk.shape[0], array.shape[0]
            rows = chunk * max(1, CHUNK_BYTES * length // (chunk * byte_count(array)))
            for i in range(0, length, rows):
                yield name, array[i : min(i + rows, length)].read(order="C")

    # pairwise starts a read before it yields the block before
    for (name, block), _ in itertools.pairwise(itertools.chain(reads(), [None])):
        yield name, block.result()


def checked_blocks(source, arrays):
    """read_blocks of an Orbax checkpoint; ValueError after the last block of an array with a wrong
    checksum.
    """
    for name, blocks in itertools.groupby(read_blocks(arrays), lambda block: block[0]):
        total = 0
        for _, rows in blocks:
            total += int(checkpoints.bit_sum(rows))
            yield name, rows
        if total % 2**32 != source.sums.get(name):
            raise ValueError(f"{source.folder} is corrupted: {name} is not what was saved")


def cast(source, arrays, dtype, folder):
    """{name: array in dtype} of a checkpoint's arrays, mapped from a temporary file, which is
    deleted with them.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        for _, rows in checked_blocks(source, arrays) if source.params else arrays.items():
            file.write(as_integers(rows.astype(dtype)))
        file.flush()
        flat = np.memmap(file, dtype, "r")
    views = np.split(flat, np.cumsum([math.prod(array.shape) for array in arrays.values()])[:-1])
    return {
        name: view.reshape(array.shape)
        for (name, array), view in zip(arrays.items(), views, strict=True)
    }


def refuse_existing(out):
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another --out")


@contextlib.contextmanager
def output_folder(out):
    """A folder that is renamed to `out` when it is complete; what a killed run left is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f"{out.name}.lock")
    with runs.lock(lock):
        try:
            refuse_existing(out)  # another run may have finished meanwhile
            with runs.new_folder(out) as partial:
                yield partial
        finally:
            lock.unlink()


# ---- the files beside the weights ----------------------------------------------------------------------------------

CODE = {  # model_type: the repository of the Hub with its code, X and Y of configurationXConfig and modelingXY
    "Dream": ("Dream-org/Dream-v0-Instruct-7B", "_dream.Dream", "Model"),
    "llada": ("GSAI-ML/LLaDA-8B-Instruct", "_llada.LLaDA", "ModelLM"),
    "sdar": ("JetLM/SDAR-4B-Chat", "_sdar.SDAR", "ForCausalLM"),
    "Fast_dLLM_Qwen": ("Efficient-Large-Model/Fast_dLLM_v2_7B", ".Fast_dLLM_Qwen", "ForCausalLM"),
    "nemotron_labs_diffusion": (
        "nvidia/Nemotron-Labs-Diffusion-8B", "_nemotron_labs_diffusion.NemotronLabsDiffusion", "Model",
    ),
    "llama": ("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "_stable_diffcoder.StableDiffcoder", "ForCausalLM"),
}  # fmt: skip
# after Qwen2.5's tokens
DREAM_TOKENS = {"<|beginoftext|>": 151_665, "<|mask|>": 151_666, "<|dlm_pad|>": 151_667}
QWEN_WORDS = (  # where Qwen2.5's tokenizer splits a text before byte-pair encoding
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def files_beside(checkpoint):
    """{name: bytes} of the tokenizer's files and of the model's code; ValueError for a tokenizer
    that does not fit.

    The tokenizer.json of a Dream gets Dream's tokens if it lacks MASK; if there is none, merges.txt
    makes one.
    """
    folder = checkpoint.folder
    files = checkpoints.companions(folder)
    merges = "tokenizer.json" not in files and {"vocab.json", "merges.txt"} <= files.keys()
    if checkpoint.family is dream and (merges or "tokenizer.json" in files):
        tokenizer = from_merges(folder) if merges else runs.read_tokenizer(folder)
        path = folder / ("vocab.json" if merges else "tokenizer.json")
        added = add_dream_tokens(
            tokenizer, checkpoint.cfg, path, mask_alone=checkpoint.table_rows > 0
        )
        if merges or added:
            files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
            print(
                f"tokenizer.json: made of {path.name}, special tokens {'added' if added else 'kept'}"
            )
    if "tokenizer.json" not in files:
        print(f"{folder} has no tokenizer; generate.py needs a tokenizer.json beside the weights")
    return files


def with_code(config, files, origin):
    """The config with an auto_map that transformers resolves: file.Class of a file beside it, else
    with a prefix OWNER/NAME-- for the repository that the model came from. What has no auto_map, or
    no such name, gets CODE's.
    """
    kind = config.get("model_type")
    repository, name, model = CODE.get(kind, CODE["Dream"])
    if "auto_map" in config:
        repository = origin if origin.count("/") == 1 else repository
    elif kind in CODE:
        auto = "AutoModelForCausalLM" if model == "ForCausalLM" else "AutoModel"
        # Stable-DiffCoder has Llama's
        own = {} if kind == "llama" else {"AutoConfig": f"configuration{name}Config"}
        config = config | {"auto_map": own | {auto: f"modeling{name}{model}"}}

    def locate(name):
        is_here = "--" in name or f"{name.split('.')[0]}.py" in files
        return name if is_here else f"{repository}--{name}"

    return config | (
        {"auto_map": jax.tree.map(locate, config["auto_map"])} if "auto_map" in config else {}
    )


def config_to_write(source, dtype):
    """The content of config.json: the keys of the source, with its name and the dtype."""
    name = "dtype" if "dtype" in source.keys else "torch_dtype"  # since transformers 5, and before
    return source.keys | {name: str(dtype)} | ({"source": source.origin} if source.origin else {})


def tokenizer_config(folder):
    path = folder / "tokenizer_config.json"
    return runs.read_json(path) if path.is_file() else {}


def from_merges(folder):
    """The tokenizer of a folder that has Qwen2.5's vocab.json, merges.txt and added tokens, as
    Dream's has.
    """
    added, settings = (
        {i: {"content": name} for name, i in dream.special_ids(folder).items()},
        tokenizer_config(folder),
    )
    added |= {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
    try:
        model = tokenizers.models.BPE.from_file(
            str(folder / "vocab.json"), str(folder / "merges.txt")
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{folder}/vocab.json and merges.txt are no tokenizer: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # in the order of their ids, as the library numbers them from the end of the vocabulary
    defaults = {"normalized": False, "special": True}
    tokenizer.add_tokens([tokenizers.AddedToken(**defaults | added[i]) for i in sorted(added)])
    return tokenizer


def add_dream_tokens(tokenizer, cfg, path, mask_alone=False):
    """Add Dream's tokens, or MASK alone, to Qwen2.5's tokenizer: True; False if it has a special
    token at MASK's id.

    ValueError if it cannot be the model's.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= cfg.vocab:
        raise ValueError(f"{path} does not fit: its ids reach {largest}, the model has {cfg.vocab}")
    known, mask = tokenizer.get_added_tokens_decoder(), dream.FAMILIES[cfg.family].mask
    if cfg.mask_id in known and mask in ("", known[cfg.mask_id].content):
        return False
    if cfg.family != "dream" and not mask_alone:
        raise ValueError(
            f"{path} is of another model: {mask or 'a special token'} is not its id {cfg.mask_id}"
        )
    # The library numbers added tokens from the end of the vocabulary. Qwen2.5's ends where Dream's
    # tokens begin.
    wanted = {mask or MASKS[0]: cfg.mask_id} if mask_alone else DREAM_TOKENS
    tokenizer.add_special_tokens([*wanted])
    found = {name: tokenizer.token_to_id(name) for name in wanted}
    if found != wanted or tokenizer.id_to_token(cfg.mask_id) not in MASKS:
        raise ValueError(
            f"{path} does not fit: it has no special token at {cfg.mask_id}, the model's MASK"
        )
    return True


# ---- the two ways --------------------------------------------------------------------------------------------------


def save_params(folder, arrays):
    """Write arrays {name: array} with Orbax, a folder for each, uncompressed: bfloat16 weights
    shrink little.
    """
    mapped = type_handlers.NumpyHandler(deepcopy_host_arrays=False)  # no copies of mapped files
    handlers = type_handlers.create_type_handler_registry((np.ndarray, mapped))
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=handlers
    )
    # Orbax cuts the longest axis. Along the last one that takes copies in memory: such an array
    # stays one chunk.
    chunks = {}
    for name, array in arrays.items():
        wide = (
            array.ndim > 1 and array.shape[-1] > array.shape[0] and array.nbytes <= 8 * CHUNK_BYTES
        )
        chunks[name] = ocp.SaveArgs(chunk_byte_size=None if wide else CHUNK_BYTES)
    arguments = ocp.args.PyTreeSave(
        checkpoints.unflatten(arrays), save_args=checkpoints.unflatten(chunks)
    )
    try:
        with ocp.Checkpointer(handler) as orbax:
            orbax.save(folder, args=arguments)
    except (OSError, ValueError) as error:
        raise OSError(f"the checkpoint was not written: {runs.first_line(error)}") from None


def to_orbax(source, out, wanted=""):
    """Write the Orbax form of a checkpoint in safetensors, or of any in the wanted dtype."""
    files = files_beside(source)
    arrays, dtype = open_orbax(source) if source.params else open_safetensors(source, wanted)
    if source.table_rows:
        print(
            f"MASK is {source.cfg.mask_id}; its row of embedding and head is the mean of the rows before it"
        )
        arrays |= {
            name: with_mask_row(arrays[name], source.cfg.mask_id) for name in TABLES & arrays.keys()
        }
    dtype = np.dtype(wanted or dtype)
    count = sum(math.prod(array.shape) for array in arrays.values())
    print(f"writing {len(arrays)} tensors, {count:,} parameters in {dtype}", flush=True)
    with output_folder(out) as partial, concurrent.futures.ThreadPoolExecutor(1) as thread:
        if source.params or any(array.dtype != dtype for array in arrays.values()):
            arrays = cast(source, arrays, dtype, out.parent)
        # checksums of the arrays that we read, while Orbax writes its own files
        summing = thread.submit(checkpoints.bit_sums, arrays)
        save_params(partial / "params", arrays)
        meta = {
            "dtype": str(dtype),
            "parameters": count,
            "source": source.origin,
            "step": source.step,
        }
        meta |= {"model": dataclasses.asdict(source.cfg)} if source.family is pc else {}
        runs.write(partial / "meta.json", meta | {"sums": summing.result()})
        runs.write(partial / "config.json", config_to_write(source, dtype))
        for name, data in files.items():
            runs.write(partial / name, data)


def write_safetensors(path, arrays, source):
    """Write tensorstore's arrays as a safetensors file, a block at a time; ValueError for a wrong
    checksum.

    The file is 8 bytes of header length, the header as JSON, then the data, from which offsets
    count.
    """
    labels = {dtype: label for label, dtype in DTYPES.items()}
    sums = json.dumps({source.file_name(name): source.sums.get(name) for name in arrays})
    header, end = {"__metadata__": {"format": "pt", "sums": sums}}, 0
    for name, array in arrays.items():
        start, end = end, end + byte_count(array)
        entry = {
            "dtype": labels[array.dtype.numpy_dtype],
            "shape": [*array.shape],
            "data_offsets": [start, end],
        }
        header[source.file_name(name)] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, rows in checked_blocks(source, arrays):
            file.write(as_integers(rows))


def to_safetensors(source, out, shard_gb):
    """Write the safetensors form of a checkpoint in Orbax."""
    files, (arrays, dtype) = files_beside(source), open_orbax(source)
    files_of = {
        "filename_pattern": "model{suffix}.safetensors",
        "max_shard_size": int(shard_gb * 1e9),
    }
    split = huggingface_hub.split_state_dict_into_shards_factory(
        arrays, get_storage_size=byte_count, **files_of
    )
    count = split.metadata["total_size"] // dtype.itemsize
    print(f"writing {len(arrays)} tensors, {count:,} parameters in {dtype}", flush=True)
    with output_folder(out) as partial:
        for file_name, names in split.filename_to_tensors.items():
            write_safetensors(partial / file_name, {name: arrays[name] for name in names}, source)
        if split.is_sharded:
            file_of = {
                source.file_name(name): file for name, file in split.tensor_to_filename.items()
            }
            index = {"metadata": split.metadata, "weight_map": dict(sorted(file_of.items()))}
            runs.write(partial / "model.safetensors.index.json", index)
        runs.write(
            partial / "config.json", with_code(config_to_write(source, dtype), files, source.origin)
        )
        settings = with_code(tokenizer_config(source.folder), files, source.origin)
        for name, data in files.items():
            runs.write(partial / name, settings if name == "tokenizer_config.json" else data)


def verify(source, out):
    """Compare names, shapes, dtypes and all bytes of a checkpoint in both forms; ValueError with
    what differs.
    """
    if (source.params is None) == (out.params is None):
        form = "Orbax" if source.params else "safetensors"
        raise ValueError(
            f"{source.folder} and {out.folder} are both {form}; --verify compares one form with the other"
        )
    if source.cfg != out.cfg:
        raise ValueError(
            f"config.json of {source.folder} and {out.folder} describe different models; convert again"
        )
    hub, orbax = (out, source) if source.params else (source, out)
    (theirs, hub_dtype), (ours, dtype) = open_safetensors(hub), open_orbax(orbax)
    if hub_dtype != dtype:
        raise ValueError(
            f"{hub.folder} is in {hub_dtype}, {orbax.folder} in {dtype}; convert again, without --dtype"
        )
    wrong, done = set(), collections.Counter()
    for name, rows in checked_blocks(orbax, ours):
        want = as_integers(theirs[name])[done[name] : done[name] + rows.size]
        wrong |= set() if np.array_equal(as_integers(rows), want) else {name}
        done[name] += rows.size
    if wrong:
        raise ValueError(f"{source.folder} and {out.folder} differ: {', '.join(sorted(wrong))}")
    print(
        f"verified: {len(theirs)} tensors, {done.total():,} parameters, every byte equal",
        flush=True,
    )


# ---- the Hub -------------------------------------------------------------------------------------------------------


def write_card(checkpoint, name):
    """README.md of a folder that has none. It names no licence: that is for the publisher to
    choose.
    """
    path, origin, keys = checkpoint.folder / "README.md", checkpoint.origin, checkpoint.keys
    if path.exists():
        return
    kind = "dream" if checkpoint.family is dream else "pythoncoder"
    base = f"base_model: {origin}\n" if origin.count("/") == 1 else ""
    count, dtype = (
        sum(map(math.prod, checkpoint.shapes().values())),
        keys.get("dtype") or keys["torch_dtype"],
    )
    head = f"---\ntags: [unmask, {kind}]\n{base}---\n\n# {Path(name).name}\n\n"
    made = f"converted by `convert_weights.py` of Unmask from {origin or 'a training run'}"
    path.write_text(f"{head}{count:,} parameters in {dtype}, {made}.\n")


def push(checkpoint, repository):
    """Upload a folder to the Hub; what an earlier upload sent is not sent again."""
    out, api = checkpoint.folder, huggingface_hub.HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=out, commit_message="weights")
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: the upload of a file, with the cause
        problem = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise OSError(
            f"{out} was not uploaded to {repository}: {problem}; run again to go on"
        ) from None
    print(f"uploaded {out} to {repository}")


def fetch(repository, revision, out):
    """Download a repository of the Hub into its cache; its folder there. OSError."""
    patterns = [
        "*.safetensors",
        "*.json",
        "merges.txt",
        "*.jinja",
        "*.py",
        "params/*",
        "checkpoints/*",
    ]
    # without the optimizer's state
    wanted = {"allow_patterns": patterns, "ignore_patterns": "*/opt/*"}
    print(
        f"downloading into {huggingface_hub.constants.HF_HUB_CACHE} (HF_HOME moves it), a second copy beside {out}"
    )
    print(
        f"check it with: hf cache verify {repository}; delete it with: hf cache rm model/{repository}",
        flush=True,
    )
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, **wanted))
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: of hf_xet, when the disk is full
        raise OSError(
            f"{repository} is no folder and cannot be downloaded: {' '.join(str(error).split())}"
        ) from None


def main(cfg):
    if not cfg.source or not cfg.out:
        raise ValueError("name both: --source=FOLDER_OR_REPOSITORY --out=FOLDER")
    if cfg.push and cfg.push.count("/") != 1:
        raise ValueError(f"--push={cfg.push} is no repository of the Hub (OWNER/NAME)")
    compare = bool(cfg.verify or cfg.push)
    if compare and (cfg.dtype or cfg.to):
        raise ValueError(
            "--verify and --push compare bytes, which --dtype and --to change; convert --out with them"
        )
    if cfg.block_length and not cfg.to:
        raise ValueError("--block_length goes with --to=dream")
    checkpoints.orbax()  # it logs no errors from here on
    started, folder, out, repository = time.time(), Path(cfg.source), Path(cfg.out), ""
    if not compare:
        refuse_existing(out)
    if not folder.exists():
        if cfg.source.count("/") != 1 or cfg.source.startswith((".", "/")):
            raise FileNotFoundError(
                f"{folder} does not exist, and is no repository of the Hub (OWNER/NAME)"
            )
        folder, repository = fetch(cfg.source, cfg.revision, out), cfg.source
    elif cfg.revision != Config.revision:
        raise ValueError(
            f"--revision is for a repository of the Hub, and {folder} is a folder here"
        )
    source = (
        find_qwen2(folder, cfg.block_length, repository)
        if cfg.to
        else find(folder, cfg.step, repository)
    )
    if exists := out.exists():  # with --verify or --push
        print(f"{out} exists and is not written again")
    else:
        if source.params and not cfg.dtype:
            # a PythonCoder is one file
            to_safetensors(source, out, cfg.shard_gb if source.family is dream else 1e6)
        else:
            to_orbax(source, out, cfg.dtype)
        print(f"wrote {out} in {time.time() - started:.0f} s")
    written = find(out)
    if compare:
        verify(source, written)
    if cfg.push or not exists:
        write_card(written, cfg.push or cfg.out)
    if cfg.push:
        push(written, cfg.push)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
