"""Convert checkpoints between Hugging Face safetensors and Orbax. Reads the disk.

    # downloads it first; then back again, and every byte compared
    python convert_weights.py --source=apple/DiffuCoder-7B-Instruct --out=out/diffucoder
    python convert_weights.py --source=out/diffucoder --out=out/diffucoder_hf --verify
    # publishes a run
    python convert_weights.py --source=out/train_tpu --out=out/my_model --push=me/my_model
    # a run's weights alone
    python convert_weights.py --source=out/train_tpu --out=out/export --dtype=bfloat16
    # to train as a Dream
    python convert_weights.py --source=Qwen/Qwen2.5-Coder-0.5B --to=dream --out=out/start
    python convert_weights.py --source=SmolLM2-135M-Instruct.Q4_1.gguf --to=dream --out=out/smollm

Reads a folder, or a repository of the Hub (token from HF_TOKEN, or from `hf auth login`), and
writes the other form; of a run it takes the newest step. With --dtype the result is Orbax. --out
gets its name when it is complete:

    Orbax:       config.json, tokenizer files, meta.json, params/ (Zarr in chunks)
    safetensors: config.json, tokenizer files, model-0000i-of-0000n.safetensors and their index

The bytes of every tensor stay the same. Both forms keep the name of their source in config.json,
and the source's *.py files for transformers. Their checksums are compared on reading. The Hub's own
safetensors hold none: a flipped bit in them is not noticed, a file cut short is.

--to=dream turns a Qwen2, a Llama (SmolLM2, TinyLlama), Fast-dLLM v2 or dllm's a2d-qwen2 into a
Dream to train, in Orbax; Llama has no biases, they are zeros. A Qwen3 becomes an SDAR, which SGLang
serves (blocks of 4, MASK 151669), dllm's a2d-qwen3 an SDAR without blocks. A tokenizer without a
mask token gets one after its last token, whose row of embedding and head is the mean of the rows
before it. The block length is --block_length, or that of config.json, or 1, an autoregressive
model; a Qwen3's is 4, an a2d model has none. Go on with: python train_dream.py --init=out/start

A GGUF file of one of these is read whole, in float32, by transformers with torch, gguf and
accelerate. Otherwise one tensor at a time is in memory. Writing safetensors, or with --dtype, takes
a temporary file of the size of --out. Adapters are not merged: a run with LoRA has its whole model
in merged/.
"""

import contextlib
import dataclasses
import json
import math
import tempfile
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
from safetensors.numpy import save_file

import checkpoints
import model_dream as dream
import model_pythoncoder as pc
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    source: str = ""  # folder in either form, OWNER/NAME on the Hub, or with --to a GGUF file
    out: str = ""  # folder to write
    revision: str = "main"  # branch, tag or commit of a repository of the Hub
    step: runs.Natural = 0  # checkpoint of a run; 0 takes the newest
    # "dream": make a Dream of a Qwen2 or a Llama, an SDAR of a Qwen3; "" keeps the model
    to: typing.Literal["", "dream"] = ""
    block_length: runs.Natural = 0  # with --to=dream; 0 takes that of config.json, else 1
    # write Orbax in this dtype; "" keeps every byte
    dtype: typing.Literal["", "bfloat16", "float32"] = ""
    verify: bool = False  # compare every tensor of --source and --out
    push: str = ""  # verify, and upload --out to this repository of the Hub, OWNER/NAME


CHUNK_BYTES = 32 << 20  # size of the chunks of Zarr arrays
SHARD_BYTES = 5_000_000_000  # largest safetensors file of a Dream


# ---- the Hub's form ----------------------------------------------------------------------------
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
SHARDS = "*-of-*.safetensors"  # which it names
# What is downloaded: the model in the root of a repository, or a run of ours. * matches / too.
FILES = f"config.json meta.json adapter_config.json *.py params/* checkpoints/* {ONE_FILE} {INDEX}"
COPIES = "consolidated* model.*-of-* */*.safetensors */*.bin */*.py */opt/*"  # not read
TABLES = {"embed_tokens", "lm_head"}  # have a row per token
# ends of names of buffers that older transformers saved; config.json says what they hold
BUFFERS = "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"
LLADA = {  # our names of parameters: LLaDA's, where they differ
    "embed_tokens": "wte", "norm": "ln_f", "lm_head": "ff_out", "input_layernorm": "attn_norm",
    "o_proj": "attn_out", "post_attention_layernorm": "ff_norm", "gate_proj": "ff_proj",
    "down_proj": "ff_out",
}  # fmt: skip


def hf_name(name, family="dream"):
    """layers.3.q_bias -> model.layers.3.self_attn.q_proj.bias; shapes and layouts are the same."""
    layer, dot, part = name.rpartition(".")
    if family == "llada":
        layer = layer.replace("layers", "blocks")
        return f"model.transformer.{layer}{dot}{LLADA.get(part, part)}.weight"
    if part == "lm_head":
        return "diffusion_head.weight" if family == "nemotron" else "lm_head.weight"
    top = "encoder." if family == "nemotron" else "model."
    # q_proj is the matrix, q_bias its bias, q_norm scales what it gives
    matrix, _, kind = part.partition("_")
    block = ""
    if matrix in "qkvo":
        block = "self_attn."
    elif kind == "proj":
        block = "mlp."
    leaf = f"{matrix}_proj.bias" if kind == "bias" else f"{part}.weight"
    return f"{top}{layer}{dot}{block}{leaf}"


def map_files(folder):
    """{name: read-only array in a mapped file} of model.safetensors, or, as in transformers only
    without that, of the files that an index names. ValueError if one is damaged.
    """
    index = folder / INDEX
    names = [ONE_FILE]
    if not (folder / ONE_FILE).is_file():
        if not index.is_file():
            runs.refuse_other_forms(folder)
            raise FileNotFoundError(f"{folder} has no {ONE_FILE}; save_pretrained writes it")
        names = runs.read_json(index, "weight_map")["weight_map"].values()
    arrays = {}
    for name in sorted(set(names)):
        if name != Path(name).name:
            raise ValueError(f"{index} names {name}, which is no file in its folder")
        arrays |= map_file(folder / name)
    return arrays


def map_file(path):
    """{name: read-only array in the mapped file}, where the library would copy."""
    layout = {}  # in the order of the file
    try:
        with safetensors.safe_open(path, "numpy") as file:
            sums = json.loads((file.metadata() or {}).get("sums", "{}"))
            for name in file.offset_keys():
                view = file.get_slice(name)
                layout[name] = np.dtype(DTYPES[view.get_dtype()]), view.get_shape()
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as safetensors of {', '.join(DTYPES)}: {error}"
        ) from None
    # The library checked that tensors follow each other without a gap up to the end of the file.
    data = np.memmap(path, np.uint8, "r")
    end = data.size
    arrays = {}
    for name, (dtype, shape) in reversed(layout.items()):
        start = end - dtype.itemsize * math.prod(shape)
        arrays[name] = data[start:end].view(dtype).reshape(shape)
        end = start
        if name in sums and checkpoints.bit_sum(arrays[name]) != sums[name]:
            raise ValueError(f"{path} is damaged: {name} is not what was saved")
    return arrays


# ---- which checkpoint a folder holds -----------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `find` found in a folder."""

    folder: Path  # holds the tokenizer
    family: typing.Any  # module: model_dream or model_pythoncoder
    cfg: typing.Any  # architecture
    keys: dict  # of the config.json beside safetensors
    step: int = 0  # of a run
    origin: str = ""  # name of the source, OWNER/NAME for one of the Hub
    params: Path | None = None  # folder of Orbax; None: safetensors
    sums: dict | None = None  # {name of a parameter: checksum}, Orbax only
    table_rows: int = 0  # rows of the stored tables, which still lack MASK's; 0: nothing is lacking
    lacks_biases: bool = False  # of queries, keys and values, which are zeros then

    def shapes(self):
        """{name of a parameter: shape}."""
        tree = checkpoints.flatten(self.family.param_shapes(self.cfg))
        shapes = {name: x.shape for name, x in tree.items()}
        if self.table_rows:
            for name in TABLES & shapes.keys():
                shapes[name] = (self.table_rows, self.cfg.width)
        return shapes

    def file_name(self, name):
        """The name of a parameter in safetensors."""
        return hf_name(name, self.cfg.family) if self.family is dream else name


def find(folder, step=0, repository=""):
    """The checkpoint in a folder, downloaded from `repository`: a run, or one of the two forms.
    ValueError or FileNotFoundError.
    """
    is_run = step or runs.saved_steps(folder)
    if is_run:
        keys = runs.read_about(folder, "config.json")
    else:
        keys = runs.read_json(folder / "config.json")
    kind = keys.get("model_type")
    if kind in QWEN2 and not dream.family_of(folder, keys):
        raise ValueError(f"{folder} is a {kind}; --to=dream makes a Dream of it")
    if kind == "mdlm" or any(folder.glob("step_*")):
        raise ValueError(
            f"{folder} is of train_gpu.py, in safetensors as it is; "
            "publish a step with: hf upload OWNER/NAME FOLDER"
        )
    where = folder
    meta = {}
    if is_run or (folder / "meta.json").is_file() or kind == "pythoncoder":
        where, meta, step = checkpoints.find_weights(folder, step)
    family = dream
    if "model" in meta and "mask_id" not in meta["model"]:
        family = pc
    cfg = family.read_config(folder, meta)
    origin = keys.get("source", repository)
    if is_run:
        keys = {"model_type": "pythoncoder"} | vars(cfg)
        if family is dream:
            keys = dream.config_to_hf(cfg)
        keys["step"] = step
    step = keys.get("step", 0)
    if "sums" not in meta:
        return Checkpoint(folder, family, cfg, keys, step, origin or folder.resolve().name)
    sums = {name.removeprefix("params."): total for name, total in meta["sums"].items()}
    return Checkpoint(folder, family, cfg, keys, step, origin, where / "params", sums)


# of dllm and Dream, of Fast-dLLM v2, of SDAR, of others
MASKS = "<|mask|>", "|<MASK>|", "<|MASK|>", "<mask>"
# model_type of models with Qwen2's layers: what config.json leaves out; bd_size 1: autoregressive
SDAR = {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "sliding_window": None}
QWEN2 = {
    "qwen2": {"bd_size": 1},
    "Fast_dLLM_Qwen": {},
    "a2d-qwen2": {"shift": False},
    "llama": {"bd_size": 1, "attention_bias": True},
    "qwen3": SDAR,
    "a2d-qwen3": SDAR | {"bd_size": 0},
}


def find_qwen2(folder, block_length=0, repository=""):
    """The checkpoint in a folder of an autoregressive Qwen or Llama, or of a diffusion model made
    of a Qwen, as a Dream or SDAR. Llama's biases are zeros.

    MASK is a token of the tokenizer, or the id after its last one; without a tokenizer, after the
    last row. PAD is the tokenizer's, or EOS.
    """
    keys = runs.read_json(folder / "config.json", "vocab_size")
    kind = keys.get("model_type")
    if dream.family_of(folder, keys) == "stable_diffcoder":
        kind = "stable_diffcoder"  # whose model_type is llama
    if kind not in QWEN2:
        raise ValueError(
            f"{folder}: --to=dream takes a model_type of {', '.join(QWEN2)}, not {kind!r}"
        )
    tokenizer, _ = open_tokenizer(folder)
    ids = tokenizer.get_vocab() if tokenizer else {}
    rows = keys["vocab_size"]
    table_rows = 0
    mask_id = next((ids[name] for name in MASKS if name in ids), None)
    if mask_id is None:
        mask_id = max(ids.values(), default=rows - 1) + 1
        table_rows = rows
        if abs(rows - mask_id) > 1024 + rows // 20:  # padding is less
            raise ValueError(f"{folder} has another model's tokenizer: {mask_id} ids, not {rows}")
    eos_id, *_ = runs.end_ids(keys, runs.read_about(folder, "generation_config.json")) or [None]
    roles, *_ = runs.named_tokens(folder)
    pad = roles["pad_token"].content if "pad_token" in roles else None
    changes = {
        "model_type": "Dream",
        "vocab_size": max(rows, mask_id + 1),
        "mask_token_id": mask_id,
        "pad_token_id": ids.get(pad, eos_id),
    } | QWEN2[kind]
    if block_length:
        changes["bd_size"] = block_length
    cfg = dream.config_from_hf(folder, changes)
    return Checkpoint(
        folder,
        dream,
        cfg,
        dream.config_to_hf(cfg),
        origin=repository or folder.resolve().name,
        table_rows=table_rows,
        lacks_biases=kind == "llama",
    )


def untied(checkpoint):
    """A tied checkpoint in safetensors, no longer tied if its files hold a head that is not the
    embedding: transformers keeps such a head, too.
    """
    arrays = map_files(checkpoint.folder)
    head = arrays.get(checkpoint.file_name("lm_head"))
    table = arrays.get(checkpoint.file_name("embed_tokens"), head)
    if head is None or np.array_equal(head, table):
        return checkpoint
    print("the head is not the embedding: it is kept, though config.json ties them")
    cfg = dataclasses.replace(checkpoint.cfg, tie=False)
    ties = {"tie_word_embeddings", "weight_tying"}.intersection(checkpoint.keys)
    keys = checkpoint.keys | dict.fromkeys(ties, False)
    return dataclasses.replace(checkpoint, cfg=cfg, keys=keys)


# ---- tensors -----------------------------------------------------------------------------------
def as_integers(array):
    """The array's bits as integers of its item size [n], not copied."""
    return array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")


def open_safetensors(checkpoint, wanted=""):
    """{our name: mapped array} of a checkpoint in safetensors, and their dtype, or `wanted`."""
    arrays = map_files(checkpoint.folder)
    arrays = {name: array for name, array in arrays.items() if not name.endswith(BUFFERS)}
    shapes = checkpoint.shapes()
    head = checkpoint.file_name("lm_head")
    if "lm_head" not in shapes and head in arrays:  # tied, and stored twice, or by this name
        arrays.setdefault(checkpoint.file_name("embed_tokens"), arrays.pop(head))
    want = {checkpoint.file_name(name): shape for name, shape in shapes.items()}
    if checkpoint.lacks_biases and arrays:
        dtype = next(iter(arrays.values())).dtype
        for name, shape in want.items():
            if name.endswith("bias"):
                arrays.setdefault(name, np.zeros(shape, dtype))
    runs.check_tensors({name: x.shape for name, x in arrays.items()}, want, checkpoint.folder)
    dtypes = sorted({str(array.dtype) for array in arrays.values()})
    if len(dtypes) > 1 and not wanted:
        raise ValueError(
            f"{checkpoint.folder} holds tensors of several dtypes: {', '.join(dtypes)}; make them "
            "one: --dtype=float32 keeps every value, --dtype=bfloat16 rounds them"
        )
    dtype = np.dtype(wanted or dtypes[0])
    return {name: arrays[checkpoint.file_name(name)] for name in shapes}, dtype


def with_mask_row(table_VD, mask_id):
    """The table with the mean of rows 0 .. mask_id - 1, in float64, as row mask_id: a spare row, or
    a new last one.
    """
    new_VD = np.pad(table_VD, ((0, max(0, mask_id + 1 - len(table_VD))), (0, 0)))
    mean_D = table_VD[:mask_id].mean(0, dtype=np.float64)
    new_VD[mask_id] = mean_D.astype(np.float32).astype(table_VD.dtype)
    return new_VD


def open_orbax(checkpoint):
    """{our name: array of tensorstore} of a checkpoint in Orbax, and their dtype.

    Orbax restores all arrays at once; tensorstore, on which it builds, one at a time. _METADATA
    says how they are stored: in a folder each, or together in an OCDBT database.
    """
    params = checkpoint.params
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
    shapes = checkpoint.shapes()
    runs.check_tensors({name: array.shape for name, array in arrays.items()}, shapes, params)
    (dtype,) = {array.dtype.numpy_dtype for array in arrays.values()}
    return {name: arrays[name] for name in shapes}, dtype


def read_arrays(source, arrays):
    """(name, NumPy array) of an Orbax checkpoint's arrays. ValueError at a wrong checksum."""
    for name, stored in arrays.items():
        array = stored.read().result()
        if checkpoints.bit_sum(array) != source.sums.get(name):
            raise ValueError(f"{source.folder} is corrupted: {name} is not what was saved")
        yield name, array


def cast(source, arrays, dtype, folder):
    """{name: array in dtype}, mapped from a temporary file, which is deleted with the arrays."""
    found = read_arrays(source, arrays) if source.params else arrays.items()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _, array in found:
            file.write(as_integers(array.astype(dtype)))
        file.flush()
        flat = np.memmap(file, dtype, "r")
    views = {}
    start = 0
    for name, array in arrays.items():
        end = start + array.size
        views[name] = flat[start:end].reshape(array.shape)
        start = end
    return views


def refuse_existing(out):
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another --out")


@contextlib.contextmanager
def output_folder(out, files):
    """A folder, with `files`, that is renamed to `out` when complete; a killed run's is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f"{out.name}.lock")
    with runs.lock(lock):
        try:
            refuse_existing(out)  # another run may have finished meanwhile
            with runs.new_folder(out) as partial:
                yield partial
                for name, data in files.items():
                    runs.write(partial / name, data)
        finally:
            lock.unlink()
    print(f"wrote {out}")


# ---- the files beside the weights --------------------------------------------------------------
# model_type: the repository of the Hub with its code, X and Y of configurationXConfig, modelingXY
CODE = {
    "Dream": "Dream-org/Dream-v0-Instruct-7B _dream.Dream Model",
    "llada": "GSAI-ML/LLaDA-8B-Instruct _llada.LLaDA ModelLM",
    "sdar": "JetLM/SDAR-4B-Chat _sdar.SDAR ForCausalLM",
    "Fast_dLLM_Qwen": "Efficient-Large-Model/Fast_dLLM_v2_7B .Fast_dLLM_Qwen ForCausalLM",
    "nemotron_labs_diffusion": "nvidia/Nemotron-Labs-Diffusion-8B "
    "_nemotron_labs_diffusion.NemotronLabsDiffusion Model",
    "llama": "ByteDance-Seed/Stable-DiffCoder-8B-Instruct "
    "_stable_diffcoder.StableDiffcoder ForCausalLM",
}
# after Qwen2.5's tokens
DREAM_TOKENS = {"<|beginoftext|>": 151_665, "<|mask|>": 151_666, "<|dlm_pad|>": 151_667}
# where Qwen2.5's tokenizer splits a text before byte-pair encoding
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def files_beside(checkpoint):
    """{name: bytes} of the tokenizer's files and of the model's code. A Dream's tokenizer.json gets
    Dream's tokens if it lacks MASK, or is made of merges.txt. ValueError if it does not fit.
    """
    folder = checkpoint.folder
    files = checkpoints.companions(folder)
    tokenizer, path = open_tokenizer(folder, checkpoint.cfg.vocab)
    if checkpoint.family is dream and tokenizer:
        added = add_dream_tokens(tokenizer, checkpoint.cfg, path, checkpoint.table_rows > 0)
        if added or path.name != "tokenizer.json":
            files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
            print(f"tokenizer.json is made of {path.name}, with MASK")
    if "tokenizer.json" not in files:
        print(f"{folder} has no tokenizer; generating needs a tokenizer.json beside the weights")
    return files


def with_code(config, files, origin):
    """The config with an auto_map that transformers resolves: file.Class of a file beside it, else
    with a prefix OWNER/NAME-- for the repository that the model came from. What has no auto_map, or
    no such name, gets CODE's.
    """
    kind = config.get("model_type")
    repository, name, model = CODE.get(kind, CODE["Dream"]).split()
    auto_map = config.get("auto_map")
    if auto_map:
        if origin.count("/") == 1:
            repository = origin
    elif kind in CODE:
        auto = "AutoModelForCausalLM" if model == "ForCausalLM" else "AutoModel"
        auto_map = {auto: f"modeling{name}{model}"}
        if kind != "llama":  # Stable-DiffCoder has Llama's config
            auto_map["AutoConfig"] = f"configuration{name}Config"
    else:
        return config

    def locate(name):
        is_here = "--" in name or f"{name.split('.')[0]}.py" in files
        return name if is_here else f"{repository}--{name}"

    return config | {"auto_map": jax.tree.map(locate, auto_map)}


def config_to_write(source, dtype):
    """The content of config.json: the keys of the source, with its name and the dtype."""
    name = "dtype" if "dtype" in source.keys else "torch_dtype"  # since transformers 5, and before
    keys = source.keys | {name: str(dtype)}
    if source.origin:
        keys["source"] = source.origin
    return keys


def open_tokenizer(folder, vocab=2**31):
    """(tokenizer of a folder, the file that it was read from); (None, None) without one."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return runs.read_tokenizer(folder, vocab), path
    path = folder / "vocab.json"
    if path.is_file():
        return from_merges(folder), path
    return None, None


def from_merges(folder):
    """The tokenizer of Qwen2.5's vocab.json, merges.txt and added tokens, as in Dream's folder."""
    added = {i: {"content": name} for name, i in dream.special_ids(folder).items()}
    config = runs.read_about(folder, "tokenizer_config.json")
    for i, token in config.get("added_tokens_decoder", {}).items():
        added[int(i)] = token
    vocab = folder / "vocab.json"
    try:
        model = tokenizers.models.BPE.from_file(str(vocab), str(folder / "merges.txt"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{vocab} and merges.txt are no tokenizer: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # in the order of their ids, as the library numbers them from the end of the vocabulary
    defaults = {"normalized": False, "special": True}
    tokenizer.add_tokens([tokenizers.AddedToken(**defaults | added[i]) for i in sorted(added)])
    runs.add_named_tokens(tokenizer, folder)
    return tokenizer


def add_dream_tokens(tokenizer, cfg, path, mask_alone=False):
    """Add Dream's tokens, or MASK alone, to Qwen2.5's tokenizer: True; False if it has a special
    token at MASK's id. ValueError if it cannot be the model's.
    """
    known = tokenizer.get_added_tokens_decoder()
    mask = dream.FAMILIES[cfg.family].mask
    # lower case: an SDAR made of an a2d-qwen3 has <|mask|>
    if cfg.mask_id in known and mask.lower() in ("", known[cfg.mask_id].content.lower()):
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


# ---- the two ways ------------------------------------------------------------------------------
def save_params(folder, arrays):
    """Write {name: array} with Orbax, a folder for each, uncompressed: bfloat16 shrinks little."""
    mapped = type_handlers.NumpyHandler(deepcopy_host_arrays=False)  # no copies of mapped files
    handlers = type_handlers.create_type_handler_registry((np.ndarray, mapped))
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=handlers
    )
    # Orbax cuts the longest axis. Along the last one that takes copies in memory: such an array
    # stays one chunk.
    chunks = {}
    for name, array in arrays.items():
        size = CHUNK_BYTES
        if array.nbytes <= 8 * CHUNK_BYTES and array.ndim > 1 and array.shape[-1] > len(array):
            size = None
        chunks[name] = ocp.SaveArgs(chunk_byte_size=size)
    args = ocp.args.PyTreeSave(checkpoints.unflatten(arrays), checkpoints.unflatten(chunks))
    try:
        with ocp.Checkpointer(handler) as orbax:
            orbax.save(folder, args=args)
    except (OSError, ValueError) as error:
        raise OSError(f"the checkpoint was not written: {runs.first_line(error)}") from None


def to_orbax(source, out, wanted=""):
    """Write the Orbax form of a checkpoint in safetensors, or of any in the wanted dtype."""
    files = files_beside(source)
    arrays, dtype = open_orbax(source) if source.params else open_safetensors(source, wanted)
    if source.table_rows:
        print(f"MASK is {source.cfg.mask_id}; its row is the mean of the rows before it")
        for name in TABLES & arrays.keys():
            arrays[name] = with_mask_row(arrays[name], source.cfg.mask_id)
    dtype = np.dtype(wanted or dtype)
    count = sum(array.size for array in arrays.values())
    print(f"writing {len(arrays)} tensors, {count:,} parameters in {dtype}", flush=True)
    meta = {"dtype": str(dtype), "parameters": count, "source": source.origin, "step": source.step}
    if source.family is pc:
        meta["model"] = dataclasses.asdict(source.cfg)
    with output_folder(out, files) as partial:
        if source.params or any(array.dtype != dtype for array in arrays.values()):
            arrays = cast(source, arrays, dtype, out.parent)
        save_params(partial / "params", arrays)
        meta["sums"] = checkpoints.bit_sums(arrays)  # of what was read, not of what was written
        files["meta.json"] = meta
        files["config.json"] = config_to_write(source, dtype)


def write_safetensors(path, arrays, source):
    """Write {our name: array} as safetensors, with the checksums of Orbax. OSError."""
    sums = {source.file_name(name): source.sums[name] for name in arrays}
    tensors = {source.file_name(name): array for name, array in arrays.items()}
    try:
        save_file(tensors, path, {"format": "pt", "sums": json.dumps(sums)})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} was not written: {error}") from None


def to_safetensors(source, out):
    """Write the safetensors form of a checkpoint in Orbax."""
    files = files_beside(source)
    arrays, dtype = open_orbax(source)
    split = huggingface_hub.split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=lambda array: array.size * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES if source.family is dream else 10**15,  # a PythonCoder: one file
    )
    print(f"writing {len(arrays)} tensors, {split.metadata['total_size']:,} bytes", flush=True)
    with output_folder(out, files) as partial:
        arrays = cast(source, arrays, dtype, out.parent)
        weight_map = {}
        for file_name, names in split.filename_to_tensors.items():
            write_safetensors(partial / file_name, {name: arrays[name] for name in names}, source)
            weight_map |= dict.fromkeys(map(source.file_name, names), file_name)
        if split.is_sharded:
            weight_map = dict(sorted(weight_map.items()))
            files[INDEX] = {"metadata": split.metadata, "weight_map": weight_map}
        files["config.json"] = with_code(config_to_write(source, dtype), files, source.origin)
        if "tokenizer_config.json" in files:
            settings = runs.read_about(source.folder, "tokenizer_config.json")
            files["tokenizer_config.json"] = with_code(settings, files, source.origin)


def verify(source, out):
    """Compare names, shapes, dtypes and bytes of a checkpoint in both forms. ValueError."""
    both = f"{source.folder} and {out.folder}"
    hub, orbax = (out, source) if source.params else (source, out)
    if hub.params or not orbax.params:
        raise ValueError(f"{both} are of one form; --verify compares safetensors with Orbax")
    if source.cfg != out.cfg:
        raise ValueError(f"config.json of {both} describe different models; convert again")
    theirs, hub_dtype = open_safetensors(hub)
    ours, dtype = open_orbax(orbax)
    if hub_dtype != dtype:
        raise ValueError(
            f"{hub.folder} is in {hub_dtype}, {orbax.folder} in {dtype}; "
            "convert again, without --dtype"
        )
    wrong = set()
    for name, array in read_arrays(orbax, ours):
        if not np.array_equal(as_integers(array), as_integers(theirs[name])):
            wrong.add(name)
    if wrong:
        raise ValueError(f"{both} differ: {', '.join(sorted(wrong))}")
    count = sum(array.size for array in theirs.values())
    print(f"verified: {len(theirs)} tensors, {count:,} parameters, every byte equal")


# ---- the Hub -----------------------------------------------------------------------------------
def write_card(checkpoint):
    """README.md of a folder that has none."""
    path = checkpoint.folder / "README.md"
    if path.exists():
        return
    about = "tags: [unmask]"
    source = checkpoint.origin or "a training run"
    if "auto_map" in checkpoint.keys:
        about += "\nlibrary_name: transformers"
    if "/" in source:  # of the Hub
        about += f"\nbase_model: {source}"
        source += ", whose licence holds for them"
    count = sum(map(math.prod, checkpoint.shapes().values()))
    dtype = checkpoint.keys.get("dtype") or checkpoint.keys["torch_dtype"]
    path.write_text(
        f"---\n{about}\n---\n\n# {path.parent.name}\n\n{count:,} parameters in {dtype}, "
        f"converted by `convert_weights.py` of Unmask from {source}.\n"
    )


def push(folder, repository):
    """Upload a folder to the Hub; what an earlier upload sent is not sent again."""
    try:
        huggingface_hub.create_repo(repository, exist_ok=True)
        huggingface_hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="weights"
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of a file, with the cause
        problem = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise OSError(
            f"{folder} was not uploaded to {repository}; run again to go on: {problem}"
        ) from None
    print(f"uploaded {folder} to {repository}")


def fetch(repository, revision, out):
    """Download a repository of the Hub into its cache; its folder there. OSError."""
    print(
        f"downloading into {huggingface_hub.constants.HF_HUB_CACHE} (HF_HOME moves it), a second "
        f"copy beside {out}; delete it with: hf cache rm model/{repository}",
        flush=True,
    )
    wanted = [*FILES.split(), *checkpoints.COMPANIONS.split(), SHARDS]
    with contextlib.suppress(Exception):  # without a connection all may be in the cache
        files = huggingface_hub.model_info(repository, revision=revision).siblings
        if ONE_FILE in {file.rfilename for file in files}:
            wanted.remove(SHARDS)
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=wanted, ignore_patterns=COPIES.split()
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of hf_xet, on a full disk
        problem = " ".join(str(error).split())
        raise OSError(f"{repository} is no folder and cannot be downloaded: {problem}") from None
    return Path(folder)


def from_gguf(path, folder):
    """The Hub's form, in a folder, of a GGUF file: in float32, by transformers. ValueError."""
    folder = Path(folder) / path.stem
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        import gguf
        import transformers

        if any(tensor.name == "rope_freqs.weight" for tensor in gguf.GGUFReader(path).tensors):
            raise ValueError("the rotary scaling of a Llama 3 is not read; take its safetensors")
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        del model.hf_quantizer, model.config.quantization_config  # it is float32 now
        model.save_pretrained(folder)
    except Exception as error:  # they raise nothing narrower
        raise ValueError(
            "transformers, with torch, gguf and accelerate, does not read "
            f"{path}: {runs.first_line(error)}"
        ) from None
    return folder


def main(cfg):
    if not cfg.source or not cfg.out:
        raise ValueError("name both: --source=FOLDER_OR_REPOSITORY --out=FOLDER")
    compare = cfg.verify or cfg.push
    if compare and (cfg.dtype or cfg.to):
        said = "--verify and --push compare bytes, which --dtype and --to change"
        raise ValueError(f"{said}; convert --out with them")
    if cfg.push and cfg.push.count("/") != 1:
        raise ValueError(f"--push={cfg.push} is no repository of the Hub (OWNER/NAME)")
    if cfg.block_length and not cfg.to:
        raise ValueError("--block_length goes with --to=dream")
    folder = Path(cfg.source)
    repository = ""
    if not folder.exists():
        repository = cfg.source
        if repository.count("/") != 1 or repository.startswith((".", "/")):
            raise FileNotFoundError(f"{cfg.source} does not exist, and is no OWNER/NAME of the Hub")
    checkpoints.orbax()  # it logs no errors from here on
    out = Path(cfg.out)
    if not compare:
        refuse_existing(out)
    if cfg.to and folder.suffix == ".gguf":
        with tempfile.TemporaryDirectory() as scratch:
            return main(dataclasses.replace(cfg, source=from_gguf(folder, scratch)))
    if repository:
        folder = fetch(repository, cfg.revision, out)
    elif cfg.revision != Config.revision:
        raise ValueError(f"--revision is for a repository of the Hub, and {folder} is a folder")
    if cfg.to:
        source = find_qwen2(folder, cfg.block_length, repository)
    else:
        source = find(folder, cfg.step, repository)
    if not source.params and getattr(source.cfg, "tie", False):
        source = untied(source)
    existed = out.exists()
    if existed:  # with --verify or --push
        print(f"{out} exists and is not written again")
    elif source.params and not cfg.dtype:
        to_safetensors(source, out)
    else:
        to_orbax(source, out, cfg.dtype)
    written = find(out)
    if compare:
        verify(source, written)
    if cfg.push or not existed:
        write_card(written)
    if cfg.push:
        push(out, cfg.push)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
