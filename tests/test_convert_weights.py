"""Conversion: every byte arrives, both ways; interrupted, damaged and ill-fitting checkpoints are
one line.
"""

import base64
import dataclasses
import hashlib
import http.server
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from conftest import as_on_the_hub, command, from_hf
from flax import nnx

import checkpoints
import convert_weights as convert
import model_dream as dream
import model_pythoncoder as pc
import runs
import sample_dream

ROOT = Path(__file__).resolve().parent.parent
IDS = {"mask_id": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2}
SMALL = dream.DreamConfig(300, 64, 3, 4, 2, 16, 96, **IDS, positions=64)
CODER = pc.Config(64, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=48, positions=64)


def tokenizer_of(special, words=("a", "b")):
    """A tokenizer.json of a few words and special tokens {name: id}."""
    first = max(special.values(), default=-1) + 1
    vocab = {word: first + i for i, word in enumerate(words)} | special
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags["special"] = True
    added = [{"id": number, "content": name, **flags} for name, number in special.items()]
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model}).encode()


def write_hub_folder(folder, cfg=SMALL, dtype=ml_dtypes.bfloat16, shards=3, change=None):
    """Random weights in the Hub's layout, in one file or several; change(tensors) may spoil them."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, leaf in checkpoints.flatten(dream.param_shapes(cfg)).items():
        tensors[convert.hf_name(name)] = rng.standard_normal(leaf.shape).astype(dtype)
    if change:
        change(tensors)
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        size = {"total_size": sum(x.nbytes for x in tensors.values())}
        index = {"metadata": size, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(folder, dream.config_to_hf(cfg) | {"use_mrope": False, "note": "kept"})
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": cfg.mask_id}
    (folder / "tokenizer.json").write_bytes(tokenizer_of(special))
    return tensors


def write_config(folder, keys):
    (folder / "config.json").write_text(json.dumps(keys))


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def do(source, out, **settings):
    convert.main(convert.Config(str(source), str(out), **settings))


def refuses(said, source, out, **settings):
    """The conversion ends with one line, which matches, and leaves nothing."""
    with pytest.raises((ValueError, OSError), match=said) as error:
        do(source, out, **settings)
    assert "\n" not in str(error.value)
    assert not list(out.parent.glob(f"{out.name}*"))


def flip(path, place):
    """Change a bit of a byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def all_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert same(a[name], b[name]), name


def params_of(model):
    """{name: NumPy array} of a model."""
    flat = checkpoints.flatten(nnx.to_pure_dict(nnx.state(model)))
    return {name: np.asarray(x) for name, x in flat.items()}


def random_params(family, cfg):
    rng = np.random.default_rng(0)
    shapes = family.param_shapes(cfg)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), shapes)


def arrays_of(folder):
    """{our name: array in memory} of either form."""
    checkpoint = convert.find(folder)
    if checkpoint.params is None:
        arrays, _ = convert.open_safetensors(checkpoint)
        return {name: np.array(array) for name, array in arrays.items()}
    return dict(convert.read_arrays(checkpoint, convert.open_orbax(checkpoint)[0]))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    top = tmp_path_factory.mktemp("converted")
    write_hub_folder(top / "hub")
    do(top / "hub", top / "orbax")
    return top


@pytest.fixture
def forms(converted, tmp_path):
    """(hub, orbax): copies of a small Dream in both forms."""
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    return tmp_path / "hub", tmp_path / "orbax"


# ---- there and back ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "tie"),
    [
        (ml_dtypes.bfloat16, False),
        (np.float32, True),
        pytest.param(ml_dtypes.bfloat16, True, marks=pytest.mark.slow),
        pytest.param(np.float16, False, marks=pytest.mark.slow),
    ],
)
def test_there_and_back_every_byte_is_equal(tmp_path, dtype, tie, monkeypatch):
    # as in a run, which this is not
    cfg, tmp_path = dataclasses.replace(SMALL, tie=tie), tmp_path / "checkpoints"
    monkeypatch.setattr(convert, "SHARD_BYTES", 50_000)
    hub, orbax, back = (tmp_path / name for name in ("DiffuCoder", "orbax", "back"))
    tensors = write_hub_folder(hub, cfg, dtype)
    do(hub, orbax, verify=True)
    do(orbax, back, verify=True)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    for name, file in index["weight_map"].items():
        # the library's own reader
        assert same(safetensors.numpy.load_file(back / file)[name], tensors[name])
    assert read_config(back)["note"] == "kept"
    assert (back / "tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()
    for model in (checkpoints.load(dream, orbax)[0], from_hf(back)):
        assert model.compute.dtype == dtype
        for name, array in params_of(model).items():
            assert same(array, tensors[convert.hf_name(name)])
    # the source's name stays in what is made of it
    do(back, tmp_path / "again")
    for path in ("orbax/meta.json", "orbax/config.json", "back/config.json", "again/meta.json"):
        assert runs.read_json(tmp_path / path)["source"] == "DiffuCoder"


KIN = "dream llada sdar nemotron nemotron/stable_diffcoder kin/dreamon kin/fast_dllm_v2 kin/open_dcoder"


@pytest.mark.golden
@pytest.mark.parametrize("area", KIN.split())
def test_every_family_goes_to_orbax_and_back_byte_for_byte_with_files(golden_dir, tmp_path, area):
    top, _, below = area.partition("/")
    source = as_on_the_hub(golden_dir(top) / below, tmp_path / "hub")
    orbax, back = tmp_path / "orbax", tmp_path / "back"
    do(source, orbax, verify=True)
    do(orbax, back, verify=True)
    all_same(convert.map_files(source), convert.map_files(back))
    for name, data in checkpoints.companions(source).items():
        assert (back / name).read_bytes() == data, name
    keys, want = read_config(back), read_config(source)
    del keys["source"]
    for each in (keys, want):
        each.pop("auto_map", None)
    assert keys == want
    model, _ = checkpoints.load(dream, orbax)
    assert model.cfg == dream.config_from_hf(source)
    (tmp_path / "made").mkdir()
    write_config(tmp_path / "made", dream.config_to_hf(model.cfg))
    if (source / "added_tokens.json").exists():
        shutil.copy(source / "added_tokens.json", tmp_path / "made")
    assert dream.config_from_hf(tmp_path / "made") == model.cfg  # what a trained model says


def test_a_sum_changes_with_any_one_bit_and_is_the_models_own():
    array = np.random.default_rng(0).standard_normal(1000).astype(ml_dtypes.bfloat16)
    want = checkpoints.bit_sum(array)
    assert checkpoints.bit_sums({"x": jnp.asarray(array)}) == {"x": want}
    assert jax.jit(checkpoints.bit_sum)(jnp.asarray(array)) == want
    for bit in range(16):
        array.view(np.uint16)[77] ^= 1 << bit
        assert checkpoints.bit_sum(array) != want
        array.view(np.uint16)[77] ^= 1 << bit


def test_a_model_that_the_library_saved_goes_to_the_hub_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "CHUNK_BYTES", 5000)  # every matrix has several chunks
    model = nnx.merge(dream.graph_of(SMALL, dream.Compute()), random_params(dream, SMALL))
    want = params_of(model)
    # all arrays in the files of one database, compressed
    checkpoints.save(dream, tmp_path / "orbax", model)
    do(tmp_path / "orbax", tmp_path / "hub", verify=True)
    all_same(arrays_of(tmp_path / "hub"), want)
    do(tmp_path / "hub", tmp_path / "again", verify=True)
    chunks = (tmp_path / "again" / "params" / "lm_head").iterdir()
    assert len([path for path in chunks if not path.name.startswith(".")]) > 2
    all_same(arrays_of(tmp_path / "again"), want)


# ---- runs --------------------------------------------------------------------------------------
def write_run(folder, model, params, steps):
    """A run folder as a trainer leaves it, with the same optimizer state in all steps."""
    store = checkpoints.Checkpoints(folder, keep=9)
    keys = dataclasses.asdict(model)
    for step in steps:
        params = jax.tree.map(lambda x: x + 1, params)
        state = {"params": params, "opt": {"mu": params}}
        store.save(step, state, {"model": keys, "step": step})
    store.close()
    write_config(folder, {"model": keys, "train": {}, "data": ""})
    special = {"<mask>": SMALL.mask_id} if isinstance(model, dream.DreamConfig) else {"<|end|>": 0}
    (folder / "tokenizer.json").write_bytes(tokenizer_of(special))
    return {name: np.asarray(x) for name, x in checkpoints.flatten(params).items()}


def test_a_run_of_pythoncoder_goes_to_safetensors_and_back(tmp_path):
    run, hub, back, older = (tmp_path / name for name in ("run", "hub", "back", "older"))
    want = write_run(run, CODER, random_params(pc, CODER), [10, 20])
    do(run, hub, verify=True)
    count = sum(array.size for array in want.values())
    assert f"{count:,} parameters in float32, converted by" in (hub / "README.md").read_text()
    all_same(safetensors.numpy.load_file(hub / "model.safetensors"), want)  # step 20
    do(hub, back, verify=True)
    model, _ = checkpoints.load(pc, back)
    assert (model.cfg, runs.read_json(back / "meta.json")["step"]) == (CODER, 20)
    all_same(params_of(model), want)
    assert (back / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    do(run, older, step=10)
    assert all(np.array_equal(x + 1, want[name]) for name, x in arrays_of(older).items())
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 15; it has \[10, 20\]"):
        convert.find(run, 15)
    (run / "checkpoints" / "20" / "adapters").mkdir()  # as coupled_grpo.py leaves it
    said = r"20 holds what LoRA learnt; the whole model is in .*/run/merged when"
    with pytest.raises(ValueError, match=said):
        convert.find(run)


@pytest.mark.parametrize(("family", "cfg"), [(pc, CODER), (dream, SMALL)])
def test_a_run_is_exported_in_bfloat16_without_its_optimizer(tmp_path, family, cfg):
    want = write_run(tmp_path / "run", cfg, random_params(family, cfg), [20])
    do(tmp_path / "run", tmp_path / "export", dtype="bfloat16")
    model, _ = checkpoints.load(family, tmp_path / "export")
    assert model.cfg == cfg
    want = {name: array.astype(ml_dtypes.bfloat16) for name, array in want.items()}
    all_same(params_of(model), want)
    assert (tmp_path / "export" / "tokenizer.json").exists()
    # and from there to the Hub, to be published in half the bytes
    do(tmp_path / "export", tmp_path / "hub", verify=True)
    assert read_config(tmp_path / "hub")["torch_dtype"] == "bfloat16"
    assert sorted(os.listdir(tmp_path)) == ["export", "hub", "run"]
    if family is dream:  # the whole run in the Hub's layout
        do(tmp_path / "run", tmp_path / "whole", verify=True)
        assert from_hf(tmp_path / "whole").cfg == SMALL


def test_tensors_of_several_dtypes_are_made_one_by_a_flag(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) + 1e-4

    tensors = write_hub_folder(tmp_path / "hub", change=change, shards=1)
    said = "several dtypes: bfloat16, float32; make them one: --dtype=float32 keeps every value"
    refuses(said, tmp_path / "hub", tmp_path / "out")
    do(tmp_path / "hub", tmp_path / "out", dtype="float32")
    found = params_of(checkpoints.load(dream, tmp_path / "out")[0])
    all_same(found, {name: tensors[convert.hf_name(name)].astype(np.float32) for name in found})


@pytest.mark.parametrize("shards_stay", [True, False])
def test_one_file_is_read_although_an_index_of_older_shards_is_beside_it(tmp_path, shards_stay):
    hub = tmp_path / "hub"
    tensors = write_hub_folder(hub)
    new = {name: x + np.ones((), x.dtype) for name, x in tensors.items()}
    safetensors.numpy.save_file(new, hub / "model.safetensors")
    for path in hub.glob("model-*"):
        if not shards_stay:
            path.unlink()
    do(hub, tmp_path / "out", verify=True)
    all_same(arrays_of(tmp_path / "out"), {n: new[convert.hf_name(n)] for n in arrays_of(hub)})


def test_a_tied_head_and_rotary_buffers_may_be_stored_too(tmp_path):
    cfg = dataclasses.replace(SMALL, tie=True)
    table = "model.embed_tokens.weight"

    def with_head(tensors):
        tensors["lm_head.weight"] = tensors[table].copy()

    def in_float32(tensors):
        tensors["lm_head.weight"] = tensors[table].astype(np.float32)

    def by_the_heads_name(tensors):
        tensors["lm_head.weight"] = tensors.pop(table)

    def with_buffers(tensors):
        tensors["model.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        for i in range(cfg.layers):
            tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    def other(tensors):
        tensors["lm_head.weight"] = tensors[table] + np.ones((), ml_dtypes.bfloat16)

    write_hub_folder(tmp_path / "plain", cfg)
    want = arrays_of(tmp_path / "plain")
    for change in (with_head, in_float32, by_the_heads_name, with_buffers):
        hub, out = tmp_path / change.__name__, tmp_path / f"{change.__name__}_out"
        write_hub_folder(hub, cfg, change=change)
        do(hub, out, verify=True)
        all_same(arrays_of(out), want)
    # transformers, too, keeps a head that is not the embedding
    write_hub_folder(tmp_path / "other", cfg, change=other)
    out = tmp_path / "out"
    do(tmp_path / "other", out, verify=True)
    do(tmp_path / "other", out, verify=True)  # of a folder that is there
    table = want["embed_tokens"]
    all_same(arrays_of(out), want | {"lm_head": table + np.ones((), table.dtype)})
    assert convert.find(out).cfg == dataclasses.replace(cfg, tie=False)
    assert read_config(out)["tie_word_embeddings"] is False


# ---- what is damaged, or does not fit ----------------------------------------------------------
def test_tensors_that_do_not_fit_are_named(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), ml_dtypes.bfloat16)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:7]

    write_hub_folder(tmp_path / "hub", change=change)
    said = r"lm_head\.weight has shape \(7, 64\).* missing model\.norm\.weight; unexpected model"
    refuses(said, tmp_path / "hub", tmp_path / "out")
    write_config(tmp_path / "hub", dream.config_to_hf(dataclasses.replace(SMALL, tie=True)))
    refuses(r"lm_head\.weight has shape \(7, 64\)", tmp_path / "hub", tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    said = r"gguf and accelerate, does not read .*model\.gguf: "
    refuses(said, tmp_path / "model.gguf", tmp_path / "out", to="dream")


OTHER_FORMS = [  # files in a folder, what the line says; where none is read, and nothing is written
    (["adapter_config.json", "adapter_model.safetensors"], "of an adapter: merge it with peft"),
    (["config.json", "adapter_config.json"], "of an adapter: merge it with peft"),
    (["config.json", "pytorch_model.bin"], "save the model in that form, with save_pretrained"),
    (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"], "with save_pretrained"),
    (["config.json", "model.Q4_K_M.gguf"], "save the model in that form, with save_pretrained"),
    (["params.pkl"], "convert the Hub's files again: python convert_weights.py --source="),
    (["config.json", "params.pkl"], "convert the Hub's files again"),
    (["config.json", "params/_METADATA"], "without the meta.json .* convert the Hub's files again"),
    (["_CHECKPOINT_METADATA", "default/manifest.ocdbt"], "convert the Hub's files again"),
    (["100/default/_METADATA"], "convert the Hub's files again"),
    (["config.json", "checkpoints/100/default/_METADATA"], "100 has no meta/metadata: .* again"),
    (["meta/metadata", "params/_METADATA"], "a checkpoint of a run: name the folder of the run"),
]


@pytest.mark.parametrize(("files", "said"), OTHER_FORMS)
def test_weights_in_a_form_that_is_not_read_are_one_line_with_advice(tmp_path, files, said):
    for name in files:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("{}")
    if "config.json" in files:
        write_config(tmp_path / "in", dream.config_to_hf(SMALL))
    refuses(said, tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError, match=said):  # --ckpt
        checkpoints.load_for_inference(dream, tmp_path / "in")
    if files == ["params.pkl"]:  # the file itself
        refuses("again|does not exist", tmp_path / "in" / files[0], tmp_path / "out")


def test_a_damaged_source_is_one_line_and_leaves_nothing(forms, tmp_path, capsys):
    hub, _ = forms
    out = tmp_path / "out"
    shutil.copytree(hub, tmp_path / "other")
    shard = hub / "model-00002-of-00003.safetensors"
    index_path = hub / "model.safetensors.index.json"
    good, index = shard.read_bytes(), index_path.read_text()
    for data, word in (  # the library's word
        (good[:-100], "incomplete metadata"),
        (struct.pack("<Q", 1 << 60) + good[8:], "header too large"),
        (good.replace(b'"BF16"', b'"I16" '), "BF16, F16, F32: 'I16'"),
        (b"", ""),
    ):
        shard.write_bytes(data)
        refuses(f"{shard.name} cannot be read.*{word}", hub, out)
    shard.unlink()
    refuses(f"No such file.*{shard.name}", hub, out)
    shard.write_bytes(good)
    for text, said in (
        ("[]", "not a JSON object"),
        (index.replace("00003-of", "00001-of"), r"missing model\."),  # so one file is not read
        (index.replace("model-00001", "../other/model-00001"), "no file in its folder"),
        (index.replace("model-00001", f"{tmp_path}/other/model-00001"), "no file in its folder"),
    ):
        index_path.write_text(text)
        refuses(said, hub, out)
    index_path.write_text(index)
    for data in (b"{", b'{"added_tokens": [{}], "model": {"vocab": {}}}'):
        (hub / "tokenizer.json").write_bytes(data)
        refuses(r"tokenizer\.json cannot be read", hub, out)
    (hub / "tokenizer.json").write_bytes(tokenizer_of({"<mask>": 304}))
    refuses("its ids reach 306, the model has 300", hub, out)
    (hub / "tokenizer.json").unlink()
    do(hub, tmp_path / "bare")  # a model without a tokenizer is converted, and a line says so
    said = capsys.readouterr().out
    assert f"{hub} has no tokenizer; generating needs" in said
    assert f"wrote {tmp_path}/bare\n" in said
    write_config(hub, {"model_type": "gemma"})
    refuses("does not describe a Dream model", hub, out)
    refuses("does not exist", tmp_path / "none", out)


def test_verify_and_the_way_back_find_a_byte_that_changed(forms, tmp_path):
    hub, orbax = forms
    shard = hub / "model-00002-of-00003.safetensors"
    flip(shard, -1)
    with pytest.raises(ValueError, match=r"hub and .*orbax differ: \w+"):
        do(hub, orbax, verify=True)
    flip(shard, -1)
    flip(max((orbax / "params").rglob("*"), key=lambda path: path.stat().st_size), 100)
    with pytest.raises(ValueError, match="is not what was saved"):
        do(hub, orbax, verify=True)
    refuses("is not what was saved", orbax, tmp_path / "back")


def test_one_flipped_bit_in_safetensors_that_we_wrote_is_noticed(forms, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 50_000)
    back = tmp_path / "back"
    do(forms[1], back)
    for shard in sorted(back.glob("*.safetensors"))[:3]:
        # the last byte, and the first of the data
        for place in (-1, 8 + struct.unpack("<Q", shard.read_bytes()[:8])[0]):
            flip(shard, place)
            refuses(rf"{shard.name} is damaged: \S+ is not what was saved", back, tmp_path / "out")
            flip(shard, place)
    whole = shard.read_bytes()
    shard.write_bytes(whole.replace(b'"sums":"{', b'"sums":"z'))
    refuses("cannot be read as safetensors", back, tmp_path / "out")
    shard.write_bytes(whole)
    do(back, tmp_path / "out", verify=True)


def test_an_orbax_folder_with_damaged_papers_is_one_line(forms, tmp_path):
    _, orbax = forms
    meta, form = orbax / "meta.json", orbax / "params" / "_METADATA"
    good = form.read_text()
    for path, text, said in (
        (form, good.replace('"norm"', '"gnorm"'), "missing norm; unexpected gnorm|NOT_FOUND"),
        (form, "[]", "_METADATA is damaged"),
        (form, good, ""),
        (meta, "{", "meta.json is damaged"),
        (meta, '{"sums": {}}', "is not what was saved"),
    ):
        path.write_text(text)
        if said:
            with pytest.raises(ValueError, match=said):
                convert.to_safetensors(convert.find(orbax), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_an_existing_folder_and_a_full_disk_are_refused(forms, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="exists"):
        do(tmp_path / "hub", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # a write beyond it fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(OSError, match="File too large"):
            do(tmp_path / "hub", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path, capsys):
    big = dataclasses.replace(SMALL, vocab=30_000, width=512, ffn=4096, head_size=128)
    write_hub_folder(tmp_path / "hub", big)
    first = command("convert_weights.py", f"--source={tmp_path}/hub", f"--out={tmp_path}/out")
    process = subprocess.Popen(first, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "out.tmp").exists():
        assert process.poll() is None
        time.sleep(0.005)
    with pytest.raises(OSError, match=f"{tmp_path}/out exists|another process is writing"):
        do(tmp_path / "hub", tmp_path / "out")
    process.kill()
    process.wait()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out.tmp").mkdir(exist_ok=True)  # what a kill leaves
    do(tmp_path / "hub", tmp_path / "out", verify=True)
    assert "every byte equal" in capsys.readouterr().out
    assert not (tmp_path / "out.tmp").exists()
    assert os.listdir(tmp_path / "out")


def test_what_does_not_go_together_is_one_line(forms, tmp_path):
    hub, orbax = forms
    with pytest.raises(ValueError, match="are of one form"):
        do(hub, hub, verify=True)
    write_config(hub, read_config(hub) | {"rope_theta": 1e4})
    with pytest.raises(ValueError, match="describe different models"):
        do(hub, orbax, verify=True)
    out = tmp_path / "out"
    said = "compare bytes, which --dtype and --to change"
    refuses(said, hub, out, dtype="bfloat16", verify=True)
    refuses("--block_length goes with --to=dream", hub, out, block_length=4)
    refuses("is no repository of the Hub", hub, out, push="model")
    refuses("--revision is for a repository of the Hub", hub, out, revision="v1")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/meta.json").write_text("{}")
    refuses("config.json does not exist; is .* the folder that", tmp_path / "tasks", out)
    (tmp_path / "mdlm" / "step_5").mkdir(parents=True)
    refuses("in safetensors as it is; publish a step with: hf upload", tmp_path / "mdlm", out)


YARN = {"rope_type": "yarn", "rope_theta": 1e6}
OTHERS = [  # a family, keys of another model of it, what the line says
    ("llada", {"model_type": "llada_moe", "architectures": ["LLaDAMoEModelLM"]}, "a llada_moe"),
    ("llada", {"alibi": True}, "alibi is True, not False"),
    ("llada", {"block_group_size": 4}, "block_group_size is 4, not 1"),
    ("llada", {"include_qkv_bias": True}, "include_qkv_bias is True, not False"),
    ("llada", {"rope": "left out"}, "rope is missing"),
    ("sdar", {"model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"]}, "a sdar_moe"),
    ("sdar", {"num_experts": 128}, "num_experts asks for another model"),
    ("sdar", {"attention_bias": True}, "attention_bias is True, not False"),
    ("sdar", {"sliding_window": 4096}, "sliding_window is 4096, not None"),
    ("nemotron", {"vision_config": {"depth": 3}}, "vision_config asks for another model"),
    ("nemotron", {"rope_parameters": YARN}, "rope_scaling is "),
]


@pytest.mark.golden
@pytest.mark.parametrize(("area", "changes", "said"), OTHERS)
def test_another_model_of_a_family_is_refused(golden_dir, tmp_path, area, changes, said):
    top, _, below = area.partition("/")
    keys = read_config(golden_dir(top) / below) | changes
    write_config(tmp_path, {key: x for key, x in keys.items() if x != "left out"})
    refuses(f"does not describe a Dream model: .*{said}", tmp_path, tmp_path / "out")


@pytest.mark.golden
def test_a_tokenizer_of_another_family_is_refused(golden_dir, tmp_path):
    hub = as_on_the_hub(golden_dir("llada"), tmp_path / "hub")
    special = {"<|mask|>": read_config(hub)["mask_token_id"]}
    (hub / "tokenizer.json").write_bytes(tokenizer_of(special, ("<|mask|>",)))
    refuses(r"is of another model: <\|mdm_mask\|> is not its id", hub, tmp_path / "out")


# ---- --to=dream --------------------------------------------------------------------------------
def write_source(folder, kind, cfg, mask, change=None, **keys):
    """A model for --to=dream, in one file. Its config.json has no ids of MASK and padding."""
    tensors = write_hub_folder(folder, cfg, shards=1, change=change)
    config = read_config(folder) | {"model_type": kind} | keys
    for name in ("mask_token_id", "pad_token_id"):
        config.pop(name)
    write_config(folder, config)
    special = {"<pad>": 0, "<s>": 1, "</s>": 2} | ({mask: 3} if mask else {})
    (folder / "tokenizer.json").write_bytes(tokenizer_of(special))
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    return tensors


ENDS = {"eos_token_id": [2, 1]}
SDAR = {"family": "sdar", "shift": False, "bias": False, "qk_norm": True, "block_length": 0}


@pytest.mark.parametrize(
    ("kind", "mask", "keys", "block_length", "want"),
    [
        ("qwen2", "", ENDS, 0, {"mask_id": 5, "block_length": 1, "ends": (1,), "shift": True}),
        ("Fast_dLLM_Qwen", "|<MASK>|", {"bd_size": 32}, 0, {"mask_id": 3, "block_length": 32}),
        ("a2d-qwen2", "<|mask|>", {}, 8, {"mask_id": 3, "block_length": 8, "shift": False}),
        ("a2d-qwen3", "<|mask|>", {"attention_bias": False}, 0, {"mask_id": 3} | SDAR),
        ("a2d-qwen3", "", {"attention_bias": False}, 0, {"mask_id": 5} | SDAR),
    ],
)
def test_a_qwen_becomes_a_dream_or_an_sdar_and_goes_back_as_one(
    tmp_path, kind, mask, keys, block_length, want
):
    source, out, back = (tmp_path / name for name in ("hub", "dream", "back"))
    cfg = dataclasses.replace(SMALL, tie=True, **want)
    given_VD = write_source(source, kind, cfg, mask, **keys)["model.embed_tokens.weight"]
    refuses("--to=dream", source, tmp_path / "out")
    do(source, out, to="dream", block_length=block_length)
    model, _ = checkpoints.load(dream, out)
    assert model.cfg == cfg  # with its ends and padding
    table_VD = np.asarray(model.embed_tokens[...])
    kept_V = np.arange(SMALL.vocab) != (-1 if mask else cfg.mask_id)
    np.testing.assert_array_equal(table_VD[kept_V], given_VD[kept_V])
    mean_D = given_VD[: cfg.mask_id].astype(np.float32).mean(0)
    row_D = table_VD[cfg.mask_id].astype(np.float32)
    assert np.allclose(row_D, mean_D, atol=0.01) == (not mask)
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    names = {"sdar": "<|MASK|>"}
    assert tokenizer.id_to_token(cfg.mask_id) == (mask or names.get(cfg.family, "<|mask|>"))
    do(out, back)
    assert dream.config_from_hf(back) == model.cfg
    if cfg.family == "sdar":
        (row,), _ = sample_dream.generate(model, [[6, 7, 8]], 8)
        assert row[:3] == [6, 7, 8]
        assert len(row) == 11
        assert cfg.mask_id not in row


@pytest.mark.parametrize("tie", [False, True])
def test_a_llama_becomes_a_dream_whose_biases_are_zeros(tmp_path, tie):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("bias")]:
            tensors[name] = np.zeros_like(tensors[name])
            if kind == "llama":
                del tensors[name]

    keys = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}
    cfg = dataclasses.replace(SMALL, tie=tie, mask_id=3, block_length=1)
    logits = []
    for kind, own in (("qwen2", {}), ("llama", keys | {"pretraining_tp": 1})):
        tensors = write_source(tmp_path / kind, kind, cfg, "<mask>", change, **own)
        do(tmp_path / kind, tmp_path / f"{kind}_dream", to="dream")
        model, _ = checkpoints.load(dream, tmp_path / f"{kind}_dream")
        assert model.cfg == cfg
        logits.append(model(jnp.arange(5, 25)[None]))
    np.testing.assert_array_equal(*logits)
    got = params_of(model)
    biases = {name: got.pop(name) for name in [*got] if name.endswith("bias")}
    assert len(biases) == 3 * cfg.layers
    assert not any(map(np.any, biases.values()))
    all_same({convert.hf_name(name): x for name, x in got.items()}, tensors)


def test_what_is_no_qwen_or_llama_or_scales_its_angles_becomes_no_dream(tmp_path):
    out = tmp_path / "out"
    keys = {"model_type": "qwen3", "vocab_size": 64, "eos_token_id": 2, "use_sliding_window": False}
    takes = "takes a model_type of qwen2, Fast_dLLM_Qwen, a2d-qwen2, llama, qwen3, a2d-qwen3, not"
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    llama3 = {"rope_type": "llama3", "factor": 8.0}
    diffcoder = llama | {"architectures": ["StableDiffcoderForCausalLM"]}
    for to, changes, said in (
        ("dream", {"model_type": "Dream"}, f"{takes} 'Dream'"),
        ("dream", {"model_type": "qwen3_moe", "num_experts": 8}, f"{takes} 'qwen3_moe'"),
        ("dream", {"use_sliding_window": True}, "use_sliding_window is True, not False"),
        ("dream", llama | {"rope_scaling": llama3}, "rope_scaling is .*llama3.*, not None"),
        ("dream", llama | {"rope_parameters": llama3}, "rope_scaling is .*llama3.*, not None"),
        ("dream", diffcoder, f"{takes} 'stable_diffcoder'"),
        ("dream", llama | {"vocab_size": 1500}, "has another model's tokenizer: 5 ids, not 1500"),
        ("dream", llama | {"vocab_size": 1100}, "has another model's tokenizer: 5 ids, not 1100"),
        ("", llama, "is a llama; --to=dream makes a Dream of it"),
        ("", {}, "--to=dream makes a Dream of it"),
    ):
        write_config(tmp_path, keys | changes)
        (tmp_path / "tokenizer.json").write_bytes(tokenizer_of({"<pad>": 0, "<s>": 1, "</s>": 2}))
        refuses(said, tmp_path, out, to=to)


# ---- tokenizers --------------------------------------------------------------------------------
BIG = dataclasses.replace(
    SMALL, vocab=152_064, mask_id=151_666, pad_id=151_643, bos_id=151_643, eos_id=151_643
)
QWEN = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data")) / "qwen2.5_tokenizer"


@pytest.mark.slow
def test_qwens_tokenizer_gets_dreams_tokens_and_dreams_own_stays():
    data = tokenizer_of({f"<|{i}|>": i for i in range(22)}, [f"w{i}" for i in range(151_643)])
    tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    assert convert.add_dream_tokens(tokenizer, BIG, "tokenizer.json")
    for name, number in convert.DREAM_TOKENS.items():
        assert tokenizer.token_to_id(name) == number
    assert tokenizer.encode("<|mask|>").ids == [151_666]
    assert not convert.add_dream_tokens(tokenizer, BIG, "tokenizer.json")


@pytest.mark.parametrize(
    ("special", "words", "cfg", "said"),
    [
        (("<pad>",), 9, SMALL, "no special token at 4, the model's MASK"),
        (("a", "<|mask|>"), 9, SMALL, "no special token at 4, the model's MASK"),
        (("<|endoftext|>",), 9, BIG, "no special token at 151666"),  # ends long before Qwen's
        (("<|endoftext|>",), 151_665, BIG, "no special token at 151666"),  # one id after Qwen's
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(special, words, cfg, said):
    named = {name: i for i, name in enumerate(special)}
    data = tokenizer_of(named, [f"w{i}" for i in range(words)]).decode()
    tokenizer = tokenizers.Tokenizer.from_str(data)
    with pytest.raises(ValueError, match=f"does not fit: it has {said}"):
        convert.add_dream_tokens(tokenizer, cfg, "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<|mask|>"}}}),
        ("added_tokens.json", {"<|mask|>": 5}),
        ("special_tokens_map.json", {"mask_token": "<|mask|>"}),
    ],
)
def test_mask_may_be_named_beside_tokenizer_json(name, content, tmp_path):
    cfg = dataclasses.replace(SMALL, mask_id=5)
    write_hub_folder(tmp_path / "hub", cfg)
    special = {"<pad>": 0, "<b>": 1, "<e>": 2}
    (tmp_path / "hub" / "tokenizer.json").write_bytes(tokenizer_of(special))
    (tmp_path / "hub" / name).write_text(json.dumps(content))
    for source, out in (("hub", "orbax"), ("orbax", "back")):
        convert.main(convert.Config(str(tmp_path / source), str(tmp_path / out)))
        tokenizer = sample_dream.load_tokenizer(tmp_path / out, cfg)
        assert tokenizer.encode("<|mask|>").ids == [5]


@pytest.mark.skipif(not QWEN.is_dir(), reason=f"no Qwen2.5 tokenizer in {QWEN}; set SHARED_DATA")
def test_the_real_tokenizer_made_of_its_vocab_and_merges_gives_its_ids(tmp_path):
    data = json.loads((QWEN / "tokenizer.json").read_bytes())
    config = {"added_tokens_decoder": {token.pop("id"): token for token in data["added_tokens"]}}
    (tmp_path / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *data["model"]["merges"], ""]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = convert.from_merges(tmp_path)
    golden = json.loads((QWEN / "golden_ids.json").read_text())
    assert len(golden) > 10
    for case in golden:
        assert tokenizer.encode(case["text"]).ids == case["ids"]
    assert convert.add_dream_tokens(tokenizer, dream.CONFIGS["7b"], "vocab.json")
    assert tokenizer.encode("x<|mask|>").ids[1:] == [151_666]


def test_a_tokenizer_is_made_of_vocab_and_merges(tmp_path):
    """Dream's repositories hold no tokenizer.json."""
    pre = tokenizers.pre_tokenizers
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.normalizer = tokenizers.normalizers.NFC()
    split = pre.Split(tokenizers.Regex(convert.QWEN_WORDS), "isolated")
    to_bytes = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre.Sequence([split, to_bytes])
    theirs.decoder = tokenizers.decoders.ByteLevel()
    text = "def f(x):\n    return x + 1  # it's 42\n\n" * 3
    alphabet = pre.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    theirs.train_from_iterator([text], trainer)
    end = theirs.get_vocab_size()
    hub = tmp_path / "hub"
    write_hub_folder(hub, dataclasses.replace(SMALL, mask_id=end + 1))
    (hub / "tokenizer.json").unlink()
    theirs.model.save(str(hub))
    mask, other = {"content": "<|mask|>", "special": True}, {"content": "<|x|>", "special": False}
    decoder = {"added_tokens_decoder": {end + 1: mask, end: other}}
    (hub / "tokenizer_config.json").write_text(json.dumps(decoder))
    files = convert.files_beside(convert.find(hub))
    ours = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for sample in (text, "caf\u0065\u0301 na\u00efve 12345\tx\r\n", "I'LL don't  "):
        assert ours.encode(sample).ids == theirs.encode(sample).ids
    assert ours.decode(ours.encode(text).ids) == text
    assert ours.encode("<|mask|><|x|>").ids == [end + 1, end]


# ---- the code that goes along ------------------------------------------------------------------
LOAD_WITH_TRANSFORMERS = """
import sys
from transformers import AutoConfig, AutoTokenizer
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(config).__name__, config.mask_token_id)
print(type(tokenizer).__name__, tokenizer.convert_tokens_to_ids("<mask>"))
"""


def write_code(folder):
    """The code of a Dream on the Hub, as short as transformers takes it, and configs that name it."""
    config, tokenizer = "configuration_dream.DreamConfig", "tokenization_dream.DreamTokenizer"
    for name, base in ((config, "PretrainedConfig"), (tokenizer, "PreTrainedTokenizerFast")):
        module, kind = name.split(".")
        code = f"from transformers import {base}\n\nclass {kind}({base}):\n  model_type = 'Dream'\n"
        (folder / f"{module}.py").write_text(code)
    keys = {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": [tokenizer, None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    write_config(folder, read_config(folder) | {"auto_map": {"AutoConfig": config}})


@pytest.mark.slow
def test_what_comes_back_from_orbax_is_loaded_by_transformers_offline(tmp_path):
    write_hub_folder(tmp_path / "hub")
    write_code(tmp_path / "hub")
    do(tmp_path / "hub", tmp_path / "orbax")
    do(tmp_path / "orbax", tmp_path / "back")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    load = [sys.executable, "-c", LOAD_WITH_TRANSFORMERS, str(tmp_path / "back")]
    done = subprocess.run(load, capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout.split() == ["DreamConfig", "4", "DreamTokenizer", "4"], done.stderr


def test_auto_map_names_the_code_where_it_lies():
    """Beside the weights, in the repository that the model came from, or in that of its kind."""
    config, tokenizer = "configuration_dream.DreamConfig", "tokenization_dream.DreamTokenizer"
    ours = convert.CODE["Dream"].split()[0]
    keys = {"model_type": "Dream", "auto_map": {"AutoConfig": config}}
    settings = {"auto_map": {"AutoTokenizer": [tokenizer, None]}}
    for origin, where in (("apple/DiffuCoder", "apple/DiffuCoder--"), ("mine", f"{ours}--")):
        assert convert.with_code(keys, {}, origin)["auto_map"] == {"AutoConfig": where + config}
        found = convert.with_code(settings, {}, origin)["auto_map"]
        assert found == {"AutoTokenizer": [where + tokenizer, None]}
    beside = {"configuration_dream.py": b""}
    assert convert.with_code(keys, beside, "apple/DiffuCoder") == keys
    # as of --to=dream
    found = convert.with_code({"model_type": "Dream"}, {}, "Qwen/Qwen2.5-Coder-7B")["auto_map"]
    assert found["AutoModel"] == f"{ours}--modeling_dream.DreamModel"
    assert found["AutoConfig"] == f"{ours}--configuration_dream.DreamConfig"
    assert convert.with_code({"model_type": "pythoncoder"}, {}, "") == {"model_type": "pythoncoder"}


@pytest.mark.golden
@pytest.mark.parametrize("area", ["llada", "sdar", "nemotron", "nemotron/stable_diffcoder"])
def test_a_config_of_ours_names_the_classes_that_the_hub_names(golden_dir, area, tmp_path):
    folder = as_on_the_hub(golden_dir(area), tmp_path / "hub")
    theirs = read_config(folder)
    keys = dream.config_to_hf(dream.config_from_hf(folder))
    ours = convert.with_code(keys, {}, "out/my_run")["auto_map"]
    assert len(ours) == min(2, len(theirs["auto_map"]))
    for key, name in ours.items():
        assert name == f"{convert.CODE[theirs['model_type']].split()[0]}--{theirs['auto_map'][key]}"


# ---- the Hub -----------------------------------------------------------------------------------
class Hub(http.server.BaseHTTPRequestHandler):
    """The Hub's answers to an upload and a download; files above 2,000 bytes are large."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, data, status=200, headers=()):
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_any(self):
        hub, path = self.server, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            hub.began.append((len(hub.sent), len(hub.files)))
            return self.answer({"url": f"{hub.url}/me/model"})
        if path == "/api/validate-yaml":  # of the model card
            return self.answer({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            modes = [("lfs" if file["size"] > 2000 else "regular", file["path"]) for file in asked]
            files = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False} for mode, name in modes
            ]
            return self.answer({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                if item["oid"] not in hub.objects:
                    item["actions"] = {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}
            return self.answer({"objects": objects, "transfer": "basic"})
        if path.startswith("/lfs/"):
            with hub.lock:
                if len(hub.objects) >= 3 and len(hub.began) == 1:  # the first upload breaks off
                    return self.answer({"error": "no more room"}, 403)
                assert hashlib.sha256(body).hexdigest() == path[5:]
                hub.objects[path[5:]] = body
                hub.sent.append(path[5:])
            return self.answer({})
        if "/commit/main" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            url = f"{hub.url}/me/model/commit/{hub.sha}"
            return self.answer({"commitUrl": url, "commitOid": hub.sha})
        if path.startswith("/api/models/me/model/tree/"):
            sizes = {name: len(data) for name, data in hub.files.items()}
            return self.answer(
                [{"type": "file", "path": n, "size": k, "oid": n[:40]} for n, k in sizes.items()]
            )
        if path.startswith("/api/models/me/model"):
            siblings = [{"rfilename": name} for name in hub.files]
            return self.answer({"id": "me/model", "sha": hub.sha, "siblings": siblings})
        name = path.removeprefix(f"/me/model/resolve/{hub.sha}/")
        if name in hub.files:
            data = hub.files[name]
            digest = hashlib.sha256(data).hexdigest()
            tag = {"ETag": f'"{digest}"', "X-Repo-Commit": hub.sha, "Accept-Ranges": "bytes"}
            return self.answer(data, 200, tag.items())
        self.answer({"error": "not found"}, 404, [("X-Error-Code", "RepoNotFound")])

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@pytest.fixture
def hub(tmp_path):
    """A server on this machine; hub.env makes huggingface_hub talk to it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.sha = f"http://127.0.0.1:{server.server_port}", "a" * 40
    server.files, server.objects, server.sent, server.tokens, server.began = {}, {}, [], set(), []
    server.env = os.environ | {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_secret",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    server.lock = threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


# huggingface_hub reads where the Hub is when it is imported: one process converts all of these, and
# begins with a download that fails, where nothing has loaded the parts of huggingface_hub
CONVERT_ALL = """
import json, sys
import convert_weights
for settings in json.loads(sys.argv[1]):
    try:
        convert_weights.main(convert_weights.Config(**settings))
    except OSError as error:
        print("refused:", error)
"""


def test_an_upload_resumes_and_what_it_left_downloads_byte_for_byte(tmp_path, hub):
    source, orbax, down = (tmp_path / name for name in ("hub", "orbax", "down"))
    tensors = write_hub_folder(source)
    other = {"source": "me/other", "out": str(tmp_path / "out")}
    upload = {"source": str(source), "out": str(orbax), "push": "me/model"}
    download = {"source": "me/model", "out": str(down), "verify": True}
    configs = json.dumps([other, upload, upload, download])
    line = [sys.executable, "-c", CONVERT_ALL, configs]
    env = hub.env | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    missing, broken = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    for part in ("was not uploaded", "/lfs/", "run again"):
        assert part in broken, done.stderr
    assert "me/other is no folder and cannot be downloaded" in missing
    assert "/me/other/" in missing  # the address, which the Hub's error names in a later line
    assert not list(tmp_path.glob("out*"))
    # three files had arrived, and none is in the repository before all are
    assert hub.began == [(0, 0), (3, 0)]
    assert len(hub.sent) == len(set(hub.sent)) > 3  # nothing went twice
    here = {str(path.relative_to(orbax)): path for path in orbax.rglob("*") if path.is_file()}
    assert hub.files == {name: path.read_bytes() for name, path in here.items()}
    card = hub.files["README.md"].decode()
    assert card.startswith("---\ntags: [unmask]\n---\n\n# orbax\n")
    assert f"{sum(x.size for x in tensors.values()):,} parameters in bfloat16, converted by" in card
    assert done.stdout.count("every byte equal") == 3
    assert f"into {tmp_path}/hf/hub (HF_HOME moves it), a second copy beside {down}" in done.stdout
    # what the first conversion noted
    assert read_config(down)["source"] == "hub"
    found = arrays_of(down)
    all_same(found, {name: tensors[convert.hf_name(name)] for name in found})


@pytest.mark.parametrize("one_file", [False, True])
def test_of_a_repository_the_roots_own_weights_are_downloaded_once(tmp_path, hub, one_file):
    source = tmp_path / "hub"
    write_hub_folder(source)
    copies = """consolidated.safetensors original/model.safetensors original/consolidated.00.pth
        checkpoint-500/model.safetensors checkpoint-500/config.json model-8bit/model.safetensors
        8bit/model-00001-of-00002.safetensors 8bit/config.json model.fp16-00001-of-00002.safetensors
        onnx/model.onnx model.gguf pytorch_model.bin checkpoints/9/pytorch_model.bin eval/run.py"""
    wanted = {path.name for path in source.iterdir()}
    if one_file:  # beside older shards
        data = safetensors.numpy.save(convert.map_files(source))
        (source / "model.safetensors").write_bytes(data)
        wanted = {name for name in wanted if "-of-" not in name} | {"model.safetensors"}
    for path in source.iterdir():
        hub.files[path.name] = path.read_bytes()
    hub.files |= dict.fromkeys(copies.split(), b"{}")
    configs = json.dumps([{"source": "me/model", "out": str(tmp_path / "out"), "verify": True}])
    line = [sys.executable, "-c", CONVERT_ALL, configs]
    env = hub.env | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert "every byte equal" in done.stdout, done.stderr
    snapshot = tmp_path / f"hf/hub/models--me--model/snapshots/{hub.sha}"
    found = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    assert found == wanted
