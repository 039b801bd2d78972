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
from conftest import as_on_the_hub, command, from_hf, says
from conftest import run as run_script
from flax import nnx

import checkpoints
import convert_weights as convert
import model_dream as dream
import model_pythoncoder as pc
import runs

ROOT = Path(__file__).resolve().parent.parent
SMALL = dream.DreamConfig(
    300, 64, 3, 4, 2, 16, 96, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=64
)


def tokenizer_of(special, words=("a", "b")):
    """A tokenizer.json of a few words and special tokens {name: id}."""
    vocab = {
        word: max(special.values(), default=-1) + 1 + i for i, word in enumerate(words)
    } | special
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added = [{"id": number, "content": name, **flags} for name, number in special.items()]
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model}).encode()


def write_hub_folder(folder, cfg=SMALL, dtype=ml_dtypes.bfloat16, shards=3, change=None):
    """Random weights in the Hub's layout, one file without an index or several; change(tensors) may
    spoil them.
    """
    folder.mkdir(parents=True)
    rng, weight_map = np.random.default_rng(0), {}
    tensors = {
        convert.hf_name(name): rng.standard_normal(leaf.shape).astype(dtype)
        for name, leaf in checkpoints.flatten(dream.param_shapes(cfg)).items()
    }
    if change:
        change(tensors)
    names = sorted(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        safetensors.numpy.save_file(
            {name: tensors[name] for name in names[i::shards]}, folder / file
        )
        weight_map |= dict.fromkeys(names[i::shards], file)
    if shards > 1:
        index = {
            "metadata": {"total_size": sum(x.nbytes for x in tensors.values())},
            "weight_map": weight_map,
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(
        json.dumps(dream.config_to_hf(cfg) | {"use_mrope": False, "note": "kept"})
    )
    (folder / "tokenizer.json").write_bytes(
        tokenizer_of({"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": cfg.mask_id})
    )
    return tensors


def run(source, out, *more, **options):
    return run_script("convert_weights.py", f"--source={source}", f"--out={out}", *more, **options)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def all_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert same(a[name], b[name]), name


def params_of(model):
    """{name: NumPy array} of a model."""
    return {
        name: np.asarray(x)
        for name, x in checkpoints.flatten(nnx.to_pure_dict(nnx.state(model))).items()
    }


def random_params(family, cfg):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), family.param_shapes(cfg)
    )


@pytest.mark.parametrize(
    ("dtype", "tie"),
    [
        (ml_dtypes.bfloat16, False),
        (np.float32, True),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((ml_dtypes.bfloat16, True), (np.float16, False))
        ),
    ],
)
def test_there_and_back_every_byte_is_equal(tmp_path, dtype, tie):
    # as in a run, which this is not
    cfg, tmp_path = dataclasses.replace(SMALL, tie=tie), tmp_path / "checkpoints"
    tmp_path.mkdir()
    tensors = write_hub_folder(tmp_path / "hub", cfg, dtype)
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax"), verify=True))
    back = tmp_path / "back"
    convert.main(convert.Config(str(tmp_path / "orbax"), str(back), shard_gb=5e-5, verify=True))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    for name, file in index["weight_map"].items():
        # the library's own reader
        assert same(safetensors.numpy.load_file(back / file)[name], tensors[name])
    assert json.loads((back / "config.json").read_text())["note"] == "kept"
    assert (back / "tokenizer.json").read_bytes() == (
        tmp_path / "hub" / "tokenizer.json"
    ).read_bytes()
    for model in (checkpoints.load(dream, tmp_path / "orbax")[0], from_hf(back)):
        assert model.compute.dtype == dtype
        for name, array in params_of(model).items():
            assert same(array, tensors[convert.hf_name(name)])


def test_one_file_loads_without_an_index_and_in_another_dtype(tmp_path):
    tensors = write_hub_folder(tmp_path / "hub", shards=1)
    model = from_hf(tmp_path / "hub", np.float32)
    assert model.compute.dtype == np.float32
    all_same(
        params_of(model),
        {name: tensors[convert.hf_name(name)].astype(np.float32) for name in params_of(model)},
    )


def test_every_parameter_of_7b_has_a_name_of_its_own_on_the_hub():
    names = set(map(convert.hf_name, checkpoints.flatten(dream.param_shapes(dream.CONFIGS["7b"]))))
    assert len(names) == 339
    assert {"model.layers.27.self_attn.v_proj.bias", "model.layers.0.mlp.down_proj.weight"} < names


@pytest.mark.golden
def test_the_golden_checkpoint_converts_both_ways(golden_dir, tmp_path):
    convert.main(convert.Config(str(golden_dir("dream")), str(tmp_path / "orbax"), verify=True))
    convert.main(convert.Config(str(tmp_path / "orbax"), str(tmp_path / "back"), verify=True))
    theirs, ours = (
        convert.map_files(folder) for folder in (golden_dir("dream"), tmp_path / "back")
    )
    assert theirs.keys() == ours.keys()
    all_same(theirs, ours)


def test_a_sum_changes_with_any_one_bit_and_is_the_models_own():
    array = np.random.default_rng(0).standard_normal(1000).astype(ml_dtypes.bfloat16)
    want = checkpoints.bit_sum(array)
    assert checkpoints.bit_sums({"x": jnp.asarray(array)}) == {"x": want}
    assert jax.jit(checkpoints.bit_sum)(jnp.asarray(array)) == want
    for bit in range(16):
        array.view(np.uint16)[77] ^= 1 << bit
        assert checkpoints.bit_sum(array) != want
        array.view(np.uint16)[77] ^= 1 << bit


def test_an_index_cannot_name_files_of_other_folders(tmp_path):
    write_hub_folder(tmp_path / "hub")
    write_hub_folder(tmp_path / "other")
    path = tmp_path / "hub" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in (
        "../other/model-00001-of-00003.safetensors",
        str(tmp_path / "other/model-00001-of-00003.safetensors"),
    ):
        files = {
            tensor: name if "00001" in file else file
            for tensor, file in index["weight_map"].items()
        }
        path.write_text(json.dumps({"weight_map": files}))
        with pytest.raises(
            ValueError,
            match=r"index\.json names .*other/model-00001.*, which is no file in its folder",
        ):
            convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out")))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), ml_dtypes.bfloat16)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:7]

    write_hub_folder(tmp_path / "hub", change=change)
    problem = r"lm_head\.weight has shape \(7, 64\).* missing model\.norm\.weight; unexpected model\.layers\.9"
    with pytest.raises(ValueError, match=problem):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out")))
    (tmp_path / "hub" / "config.json").write_text(
        json.dumps(dream.config_to_hf(dataclasses.replace(SMALL, tie=True)))
    )
    with pytest.raises(ValueError, match=r"unexpected lm_head\.weight"):
        from_hf(tmp_path / "hub")
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_source_is_one_line_and_leaves_nothing(tmp_path):
    hub, out = tmp_path / "hub", tmp_path / "out"
    write_hub_folder(hub)
    shard, index_path = (
        hub / "model-00002-of-00003.safetensors",
        hub / "model.safetensors.index.json",
    )
    good, index = shard.read_bytes(), index_path.read_text()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    lies = {
        name: entry | {"shape": [1, *entry["shape"]]}
        for name, entry in header.items()
        if "data_offsets" in entry
    }
    lies[next(iter(lies))]["shape"] = [3]
    lies = json.dumps(lies).encode()

    def fails(error, *parts):
        with pytest.raises(error) as caught:
            convert.main(convert.Config(str(hub), str(out)))
        assert "\n" not in str(caught.value)
        for part in parts:
            assert part in str(caught.value)

    for data, *parts in (  # the last part is the library's word
        (good[:-100], shard.name, "incomplete metadata"),
        (good[:40], shard.name, "header"),
        (struct.pack("<Q", 1 << 60) + good[8:], shard.name, "header too large"),
        (struct.pack("<Q", len(lies)) + lies + good[8 + length :], shard.name, "nvalid"),
        (good.replace(b'"BF16"', b'"I16" '), shard.name, "BF16, F16, F32: 'I16'"),
        (b"\0" * 100, shard.name),
        (b"", shard.name),
    ):
        shard.write_bytes(data)
        fails(ValueError, "cannot be read", *parts)
    shard.unlink()
    fails(FileNotFoundError, "No such file", shard.name)
    shard.write_bytes(good)
    index_path.write_text("[]")
    fails(ValueError, "not a JSON object")
    index_path.write_text(index.replace("00003-of", "00001-of"))  # so one file is not read
    fails(ValueError, "missing model.")
    index_path.write_text(index)
    (hub / "config.json").write_text('{"model_type": "llama"}')
    fails(ValueError, "does not describe a Dream model")
    hub = tmp_path / "none"
    fails(FileNotFoundError, "does not exist")
    assert not list(tmp_path.glob("out*"))


def test_verify_and_the_way_back_find_a_byte_that_changed(tmp_path):
    write_hub_folder(tmp_path / "hub")
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax")))
    chunk = max((tmp_path / "orbax" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ValueError, match="is not what was saved"):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax"), verify=True))
    with pytest.raises(ValueError, match="is not what was saved"):
        convert.main(convert.Config(str(tmp_path / "orbax"), str(tmp_path / "back")))
    assert not list(tmp_path.glob("back*"))
    shutil.rmtree(tmp_path / "orbax")
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax")))
    shard = tmp_path / "hub" / "model-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"hub and .*orbax differ: \w+"):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax"), verify=True))


def test_one_flipped_bit_in_safetensors_that_we_wrote_is_noticed(tmp_path):
    write_hub_folder(tmp_path / "hub")
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax")))
    convert.main(convert.Config(str(tmp_path / "orbax"), str(tmp_path / "back"), shard_gb=5e-5))
    for shard in sorted((tmp_path / "back").glob("*.safetensors")):
        whole = shard.read_bytes()
        # the last byte, and the first of the data
        for place in (-1, 8 + struct.unpack("<Q", whole[:8])[0]):
            data = bytearray(whole)
            data[place] ^= 1
            shard.write_bytes(data)
            with pytest.raises(
                ValueError, match=rf"{shard.name} is damaged: \S+ is not what was saved"
            ):
                convert.main(convert.Config(str(tmp_path / "back"), str(tmp_path / "again")))
            assert not list(tmp_path.glob("again*"))
        shard.write_bytes(whole.replace(b'"sums":"{', b'"sums":"z'))
        with pytest.raises(ValueError, match="cannot be read as safetensors"):
            convert.main(convert.Config(str(tmp_path / "back"), str(tmp_path / "again")))
        shard.write_bytes(whole)
    convert.main(convert.Config(str(tmp_path / "back"), str(tmp_path / "again"), verify=True))


def test_an_orbax_folder_with_damaged_papers_is_one_line(tmp_path):
    write_hub_folder(tmp_path / "hub")
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax")))
    meta, form = tmp_path / "orbax" / "meta.json", tmp_path / "orbax" / "params" / "_METADATA"
    good = form.read_text()
    renamed = good.replace('"norm"', '"gnorm"')
    for path, text, problem in (
        (form, renamed, "missing norm; unexpected gnorm|NOT_FOUND"),
        (form, "[]", "_METADATA is damaged"),
        (form, good, None),
        (meta, "{", "meta.json is damaged"),
        (meta, "[]", "meta.json is damaged"),
        (meta, '{"sums": {}}', "is not what was saved"),
    ):
        path.write_text(text)
        if problem:
            with pytest.raises(ValueError, match=problem):
                convert.to_safetensors(convert.find(tmp_path / "orbax"), tmp_path / "out", 5.0)
    assert not list(tmp_path.glob("out*"))


def test_an_existing_folder_and_a_full_disk_are_refused(tmp_path):
    write_hub_folder(tmp_path / "hub")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="exists"):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "mine")))
    assert (tmp_path / "mine" / "thesis.tex").exists()

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # a write beyond it fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    says(
        run(tmp_path / "hub", tmp_path / "out", preexec_fn=small_files),
        "File too large",
        str(tmp_path / "out"),
    )
    assert not list(tmp_path.glob("out*"))


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path, capsys):
    big = dataclasses.replace(SMALL, vocab=30_000, width=512, ffn=4096, head_size=128)
    write_hub_folder(tmp_path / "hub", big)
    first = command("convert_weights.py", f"--source={tmp_path}/hub", f"--out={tmp_path}/out")
    process = subprocess.Popen(first, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "out.tmp").exists():
        assert process.poll() is None
        time.sleep(0.005)
    with pytest.raises(OSError, match=f"{tmp_path}/out exists|another process is writing"):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out")))
    process.kill()
    process.wait()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out.tmp").mkdir(exist_ok=True)  # what a kill leaves
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out"), verify=True))
    assert "every byte equal" in capsys.readouterr().out
    assert not (tmp_path / "out.tmp").exists()
    assert os.listdir(tmp_path / "out")


# ---- other models, other ways to have been stored ------------------------------------------------------------------


def arrays_of(folder):
    """{our name: array in memory} of either form."""
    checkpoint = convert.find(folder)
    if checkpoint.params is None:
        return {
            name: np.array(array) for name, array in convert.open_safetensors(checkpoint)[0].items()
        }
    parts = {}
    for name, part in convert.read_blocks(convert.open_orbax(checkpoint)[0]):
        parts.setdefault(name, []).append(part)
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def test_a_model_that_the_library_saved_goes_to_the_hub_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "CHUNK_BYTES", 5000)  # every matrix comes in several blocks
    model = nnx.merge(dream.graph_of(SMALL, dream.Compute()), random_params(dream, SMALL))
    want = params_of(model)
    # all arrays in the files of one database, compressed
    checkpoints.save(dream, tmp_path / "orbax", model)
    convert.main(convert.Config(str(tmp_path / "orbax"), str(tmp_path / "hub"), verify=True))
    all_same(arrays_of(tmp_path / "hub"), want)
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "again"), verify=True))
    chunks = [
        path
        for path in (tmp_path / "again" / "params" / "lm_head").iterdir()
        if not path.name.startswith(".")
    ]
    assert len(chunks) > 2
    all_same(arrays_of(tmp_path / "again"), want)


def write_run(folder, model, params, steps):
    """A run folder as train_tpu.py leaves it, with the same optimizer state in all steps."""
    store = checkpoints.Checkpoints(folder, keep=9)
    for step in steps:
        params = jax.tree.map(lambda x: x + 1, params)
        state = {"params": params, "opt": {"mu": params}}
        store.save(step, state, {"model": dataclasses.asdict(model), "step": step})
    store.close()
    (folder / "config.json").write_text(
        json.dumps({"model": dataclasses.asdict(model), "train": {}, "data": ""})
    )
    (folder / "tokenizer.json").write_bytes(tokenizer_of({"<|endoftext|>": 0}))
    return {name: np.asarray(x) for name, x in checkpoints.flatten(params).items()}


def test_a_run_of_pythoncoder_goes_to_safetensors_and_back(tmp_path):
    cfg = pc.Config(64, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=48, positions=64)
    want = write_run(tmp_path / "run", cfg, random_params(pc, cfg), [10, 20])
    convert.main(convert.Config(str(tmp_path / "run"), str(tmp_path / "hub"), verify=True))
    count = sum(array.size for array in want.values())
    assert (
        f"{count:,} parameters in float32, converted by"
        in (tmp_path / "hub" / "README.md").read_text()
    )
    all_same(safetensors.numpy.load_file(tmp_path / "hub" / "model.safetensors"), want)  # step 20
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "back"), verify=True))
    model, _ = checkpoints.load(pc, tmp_path / "back")
    assert (model.cfg, runs.read_json(tmp_path / "back" / "meta.json")["step"]) == (cfg, 20)
    all_same(params_of(model), want)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        tmp_path / "run" / "tokenizer.json"
    ).read_bytes()
    convert.main(convert.Config(str(tmp_path / "run"), str(tmp_path / "older"), step=10))
    older = arrays_of(tmp_path / "older")
    assert all(np.array_equal(older[name] + 1, want[name]) for name in want)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 15; it has \[10, 20\]"):
        convert.find(tmp_path / "run", 15)
    (tmp_path / "run" / "checkpoints" / "20" / "adapters").mkdir()  # as coupled_grpo.py leaves it
    with pytest.raises(
        ValueError, match=r"20 holds what LoRA learnt; the whole model is in .*/run/merged when"
    ):
        convert.find(tmp_path / "run")


def test_a_run_of_dream_goes_to_the_hubs_layout(tmp_path):
    want = write_run(tmp_path / "run", SMALL, random_params(dream, SMALL), [7])
    (tmp_path / "run" / "tokenizer.json").write_bytes(tokenizer_of({"<mask>": SMALL.mask_id}))
    convert.main(convert.Config(str(tmp_path / "run"), str(tmp_path / "hub"), verify=True))
    model = from_hf(tmp_path / "hub")
    assert model.cfg == SMALL
    all_same(params_of(model), want)


def test_a_run_is_exported_in_bfloat16_without_its_optimizer(tmp_path):
    cfg = pc.Config(64, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=48, positions=64)
    for family, model_cfg in ((pc, cfg), (dream, SMALL)):
        folder = tmp_path / family.__name__
        want = write_run(folder / "run", model_cfg, random_params(family, model_cfg), [10, 20])
        if family is dream:
            (folder / "run" / "tokenizer.json").write_bytes(tokenizer_of({"<mask>": SMALL.mask_id}))
        convert.main(convert.Config(str(folder / "run"), str(folder / "export"), dtype="bfloat16"))
        model, _ = checkpoints.load(family, folder / "export")
        assert model.cfg == model_cfg
        all_same(
            params_of(model),
            {name: array.astype(ml_dtypes.bfloat16) for name, array in want.items()},
        )
        assert (folder / "export" / "tokenizer.json").exists()
        # and from there to the Hub, to be published in half the bytes
        convert.main(convert.Config(str(folder / "export"), str(folder / "hub"), verify=True))
        assert runs.read_json(folder / "hub" / "config.json")["torch_dtype"] == "bfloat16"
        assert not [path for path in folder.iterdir() if path.name not in ("run", "export", "hub")]
    with pytest.raises(ValueError, match="compare bytes, which --dtype and --to change"):
        convert.main(
            convert.Config(str(tmp_path), str(tmp_path / "out"), dtype="bfloat16", verify=True)
        )


def test_tensors_of_several_dtypes_are_made_one_by_a_flag(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) + np.float32(
            1e-4
        )

    tensors = write_hub_folder(tmp_path / "hub", change=change)
    problem = r"of several dtypes: bfloat16 \(\d+\), float32 \(1\); make them one: --dtype=float32 keeps every value"
    with pytest.raises(ValueError, match=problem):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out")))
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out"), dtype="float32"))
    found = params_of(checkpoints.load(dream, tmp_path / "out")[0])
    all_same(found, {name: tensors[convert.hf_name(name)].astype(np.float32) for name in found})


def test_an_mdlm_needs_no_conversion_and_is_told_how_it_is_published(tmp_path):
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "config.json").write_text('{"model_type": "mdlm"}')
    with pytest.raises(
        ValueError, match=r"in safetensors as it is; publish it with: hf upload OWNER/NAME .*step_5"
    ):
        convert.find(tmp_path)


@pytest.mark.parametrize(
    ("kind", "mask", "keys", "block_length", "want"),
    [
        (
            "qwen2",
            "",
            {"eos_token_id": [2, 1]},
            0,
            {"mask_id": 5, "block_length": 1, "shift": True},
        ),
        (
            "Fast_dLLM_Qwen",
            "|<MASK>|",
            {"bd_size": 32},
            0,
            {"mask_id": 3, "block_length": 32, "shift": True},
        ),
        ("a2d-qwen2", "<|mask|>", {}, 8, {"mask_id": 3, "block_length": 8, "shift": False}),
    ],
)
def test_a_qwen2_becomes_a_dream_and_goes_back_as_one(
    tmp_path, kind, mask, keys, block_length, want
):
    source, out, back = (tmp_path / name for name in ("hub", "dream", "back"))
    tensors = write_hub_folder(source, dataclasses.replace(SMALL, tie=True), shards=1)
    config = json.loads((source / "config.json").read_text()) | {"model_type": kind} | keys
    for name in ("mask_token_id", "pad_token_id"):
        config.pop(name)
    (source / "config.json").write_text(json.dumps(config))
    special = {"<pad>": 0, "<s>": 1, "</s>": 2} | ({mask: 3} if mask else {})
    (source / "tokenizer.json").write_bytes(tokenizer_of(special))
    (source / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    with pytest.raises(ValueError, match="--to=dream"):
        convert.find(source)
    convert.main(convert.Config(str(source), str(out), to="dream", block_length=block_length))
    model, _ = checkpoints.load(dream, out)
    assert model.cfg == dataclasses.replace(SMALL, tie=True, **want)  # with its ends and padding
    table = np.asarray(model.embed_tokens[...])
    same = np.arange(SMALL.vocab) != (-1 if mask else want["mask_id"])
    np.testing.assert_array_equal(table[same], tensors["model.embed_tokens.weight"][same])
    mean = tensors["model.embed_tokens.weight"][: want["mask_id"]].astype(np.float32).mean(0)
    assert np.allclose(table[want["mask_id"]].astype(np.float32), mean, atol=0.01) == (not mask)
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.id_to_token(want["mask_id"]) == (mask or "<|mask|>")
    convert.main(convert.Config(str(out), str(back)))
    assert dream.config_from_hf(back) == model.cfg


def test_what_is_no_qwen2_becomes_no_dream(tmp_path):
    write_hub_folder(tmp_path / "hub")
    with pytest.raises(
        ValueError,
        match="takes a model_type of qwen2, Fast_dLLM_Qwen, a2d-qwen2, qwen3, not 'Dream'",
    ):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out"), to="dream"))
    with pytest.raises(ValueError, match="--block_length goes with --to=dream"):
        convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "out"), block_length=4))


def test_a_qwen3_with_sliding_windows_or_experts_is_refused_in_one_line(tmp_path):
    keys = {"model_type": "qwen3", "vocab_size": 64, "eos_token_id": 2, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ValueError, match="use_sliding_window is True, not False"):
        convert.main(convert.Config(str(tmp_path), str(tmp_path / "out"), to="dream"))
    (tmp_path / "config.json").write_text(
        json.dumps(keys | {"model_type": "qwen3_moe", "num_experts": 8})
    )
    with pytest.raises(ValueError, match=r"takes a model_type of .*qwen3, not 'qwen3_moe'"):
        convert.main(convert.Config(str(tmp_path), str(tmp_path / "out"), to="dream"))
    (tmp_path / "config.json").write_text(json.dumps(keys | {"use_sliding_window": False}))
    with pytest.raises(ValueError, match="--to=dream makes a Dream of it"):
        convert.main(convert.Config(str(tmp_path), str(tmp_path / "out")))


def test_two_checkpoints_of_one_form_and_of_two_models_are_not_compared(tmp_path):
    write_hub_folder(tmp_path / "one")
    write_hub_folder(tmp_path / "two", dataclasses.replace(SMALL, theta=1e4))
    first, second = (convert.find(tmp_path / name) for name in ("one", "two"))
    with pytest.raises(ValueError, match="both safetensors"):
        convert.verify(first, second)
    convert.main(convert.Config(str(tmp_path / "two"), str(tmp_path / "orbax")))
    with pytest.raises(ValueError, match="describe different models"):
        convert.verify(first, convert.find(tmp_path / "orbax"))


# ---- tokenizers ----------------------------------------------------------------------------------------------------

BIG = dataclasses.replace(
    SMALL, vocab=152_064, mask_id=151_666, pad_id=151_643, bos_id=151_643, eos_id=151_643
)
QWEN = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data")) / "qwen2.5_tokenizer"


@pytest.mark.slow
def test_qwens_tokenizer_gets_dreams_tokens_and_dreams_own_stays():
    data = tokenizer_of({f"<|{i}|>": i for i in range(22)}, [f"w{i}" for i in range(151_643)])
    tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    assert convert.add_dream_tokens(tokenizer, BIG, "tokenizer.json")
    for name, number in {
        "<|beginoftext|>": 151_665,
        "<|mask|>": 151_666,
        "<|dlm_pad|>": 151_667,
    }.items():
        assert tokenizer.token_to_id(name) == number
    assert tokenizer.encode("<|mask|>").ids == [151_666]
    assert not convert.add_dream_tokens(tokenizer, BIG, "tokenizer.json")


@pytest.mark.parametrize(
    ("special", "words", "cfg", "says"),
    [
        (("<pad>",), 9, SMALL, "no special token at 4, the model's MASK"),
        (("a", "<|mask|>"), 9, SMALL, "no special token at 4, the model's MASK"),
        (("a", "b", "c", "d", "<mask>"), 300, SMALL, "its ids reach 304"),
        # not Qwen's: it ends long before
        (("<|endoftext|>",), 9, BIG, "no special token at 151666"),
        # it ends one id after Qwen's
        (("<|endoftext|>",), 151_665, BIG, "no special token at 151666"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(special, words, cfg, says):
    data = tokenizer_of(
        {name: i for i, name in enumerate(special)}, [f"w{i}" for i in range(words)]
    )
    with pytest.raises(ValueError, match="does not fit") as error:
        convert.add_dream_tokens(
            tokenizers.Tokenizer.from_str(data.decode()), cfg, "tokenizer.json"
        )
    assert says in str(error.value)


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


def test_a_damaged_tokenizer_is_one_line_and_nothing_is_written(tmp_path):
    write_hub_folder(tmp_path / "hub")
    for data in (
        b"{",
        b"[]",
        b'{"added_tokens": []}',
        b'{"added_tokens": [{}], "model": {"vocab": {}}}',
    ):
        (tmp_path / "hub" / "tokenizer.json").write_bytes(data)
        with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
            convert.to_orbax(convert.find(tmp_path / "hub"), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_is_made_of_vocab_and_merges(tmp_path):
    """Dream's repositories hold no tokenizer.json."""
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.normalizer = tokenizers.normalizers.NFC()
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(convert.QWEN_WORDS), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    theirs.decoder = tokenizers.decoders.ByteLevel()
    text = "def f(x):\n    return x + 1  # it's 42\n\n" * 3
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(
        [text], tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    end = theirs.get_vocab_size()
    write_hub_folder(tmp_path / "hub", dataclasses.replace(SMALL, mask_id=end + 1))
    (tmp_path / "hub" / "tokenizer.json").unlink()
    theirs.model.save(str(tmp_path / "hub"))
    decoder = {
        end + 1: {"content": "<|mask|>", "special": True},
        end: {"content": "<|x|>", "special": False},
    }
    (tmp_path / "hub" / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder})
    )
    files = convert.files_beside(convert.find(tmp_path / "hub"))
    ours = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for sample in (text, "caf\u0065\u0301 na\u00efve 12345\tx\r\n", "I'LL don't  "):
        assert ours.encode(sample).ids == theirs.encode(sample).ids
    assert ours.decode(ours.encode(text).ids) == text
    assert ours.encode("<|mask|><|x|>").ids == [end + 1, end]


# ---- the names and the code that go along --------------------------------------------------------------------------

LOAD_WITH_TRANSFORMERS = """
import sys
from transformers import AutoConfig, AutoTokenizer
config, tokenizer = (auto.from_pretrained(sys.argv[1], trust_remote_code=True) for auto in (AutoConfig, AutoTokenizer))
print(type(config).__name__, config.mask_token_id, type(tokenizer).__name__, tokenizer.convert_tokens_to_ids("<mask>"))
"""


def write_code(folder):
    """The code of a Dream on the Hub, as short as transformers takes it, and the configs that name
    it.
    """
    config, tokenizer = "configuration_dream.DreamConfig", "tokenization_dream.DreamTokenizer"
    for name, base in ((config, "PretrainedConfig"), (tokenizer, "PreTrainedTokenizerFast")):
        module, kind = name.split(".")
        (folder / f"{module}.py").write_text(
            f"from transformers import {base}\n\nclass {kind}({base}):\n    model_type = 'Dream'\n"
        )
    keys = {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": [tokenizer, None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    keys = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoConfig": config}}
    (folder / "config.json").write_text(json.dumps(keys))


@pytest.mark.slow
def test_what_comes_back_from_orbax_is_loaded_by_transformers_offline(tmp_path):
    write_hub_folder(tmp_path / "hub")
    write_code(tmp_path / "hub")
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax")))
    convert.main(convert.Config(str(tmp_path / "orbax"), str(tmp_path / "back")))
    for name in ("configuration_dream.py", "tokenization_dream.py"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    load = [sys.executable, "-c", LOAD_WITH_TRANSFORMERS, str(tmp_path / "back")]
    done = subprocess.run(load, capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout.split() == ["DreamConfig", "4", "DreamTokenizer", "4"], done.stderr


def test_without_its_code_auto_map_names_the_repository_that_the_model_came_from(tmp_path):
    folder = tmp_path / "hub"
    write_hub_folder(folder)
    write_code(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    keys = json.loads((folder / "config.json").read_text())
    for source, repository in (
        ("apple/DiffuCoder-7B-Instruct", None),
        ("my_model", convert.CODE["Dream"][0]),
    ):
        (folder / "config.json").write_text(json.dumps(keys | {"source": source}))
        orbax, back = tmp_path / "orbax" / source, tmp_path / "back" / source
        convert.main(convert.Config(str(folder), str(orbax)))
        convert.main(convert.Config(str(orbax), str(back)))
        auto_map = runs.read_json(back / "config.json")["auto_map"]
        assert auto_map == {
            "AutoConfig": f"{repository or source}--configuration_dream.DreamConfig"
        }
        auto_map = runs.read_json(back / "tokenizer_config.json")["auto_map"]
        assert auto_map == {
            "AutoTokenizer": [f"{repository or source}--tokenization_dream.DreamTokenizer", None]
        }


def test_what_was_made_or_trained_here_names_the_code_of_its_kind(tmp_path):
    folder, orbax, back = (tmp_path / name for name in ("Qwen", "orbax", "back"))
    write_hub_folder(folder)
    keys = json.loads((folder / "config.json").read_text())
    # as of --to=dream
    (folder / "config.json").write_text(json.dumps(keys | {"source": "Qwen/Qwen2.5-Coder-7B"}))
    convert.main(convert.Config(str(folder), str(orbax)))
    convert.main(convert.Config(str(orbax), str(back)))
    auto_map = runs.read_json(back / "config.json")["auto_map"]
    assert auto_map["AutoModel"] == "Dream-org/Dream-v0-Instruct-7B--modeling_dream.DreamModel"
    assert (
        auto_map["AutoConfig"] == "Dream-org/Dream-v0-Instruct-7B--configuration_dream.DreamConfig"
    )


@pytest.mark.golden
@pytest.mark.parametrize("area", ["llada", "sdar", "nemotron", "nemotron/stable_diffcoder"])
def test_a_config_of_ours_names_the_classes_that_the_hub_names(golden_dir, area, tmp_path):
    folder = as_on_the_hub(golden_dir(area), tmp_path / "hub")
    theirs = runs.read_json(folder / "config.json")
    ours = convert.with_code(dream.config_to_hf(dream.config_from_hf(folder)), {}, "out/my_run")[
        "auto_map"
    ]
    assert len(ours) == min(2, len(theirs["auto_map"]))
    for key, name in ours.items():
        assert name == f"{convert.CODE[theirs['model_type']][0]}--{theirs['auto_map'][key]}"


def test_the_sources_name_stays_in_what_is_made_of_it(tmp_path):
    folder = tmp_path / "DiffuCoder-7B-Instruct"
    write_hub_folder(folder)
    assert (
        convert.find(folder, repository="apple/DiffuCoder-7B-Instruct").origin
        == "apple/DiffuCoder-7B-Instruct"
    )
    convert.main(convert.Config(str(folder), str(tmp_path / "orbax")))
    convert.main(convert.Config(str(tmp_path / "orbax"), str(tmp_path / "back")))
    convert.main(convert.Config(str(tmp_path / "back"), str(tmp_path / "again")))
    for path in ("orbax/meta.json", "orbax/config.json", "back/config.json", "again/meta.json"):
        assert runs.read_json(tmp_path / path)["source"] == "DiffuCoder-7B-Instruct"


# ---- the Hub -------------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """The few calls of the Hub that an upload and a download make; files above 2,000 bytes are
    large.
    """

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
            return self.answer(
                {"commitUrl": f"{hub.url}/me/model/commit/{hub.sha}", "commitOid": hub.sha}
            )
        if path.startswith("/api/models/me/model/tree/"):
            sizes = {name: len(data) for name, data in hub.files.items()}
            return self.answer(
                [{"type": "file", "path": n, "size": k, "oid": n[:40]} for n, k in sizes.items()]
            )
        if path.startswith("/api/models/me/model"):
            return self.answer(
                {
                    "id": "me/model",
                    "sha": hub.sha,
                    "siblings": [{"rfilename": n} for n in hub.files],
                }
            )
        name = path.removeprefix(f"/me/model/resolve/{hub.sha}/")
        if name in hub.files:
            data = hub.files[name]
            tag = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": hub.sha,
                "Accept-Ranges": "bytes",
            }
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


def test_a_repository_that_cannot_be_downloaded_is_one_line_in_a_fresh_process(tmp_path):
    """Where no upload has loaded the parts of huggingface_hub."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = run_script(
        "convert_weights.py", "--source=me/model", f"--out={tmp_path / 'out'}", env=env
    )
    says(done, "me/model is no folder and cannot be downloaded: ")
    assert f"into {tmp_path}/hf/hub (HF_HOME moves it)" in done.stdout


# huggingface_hub reads where the Hub is when it is imported: one process converts all of these
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
    tensors = write_hub_folder(tmp_path / "hub")
    upload = {"source": str(tmp_path / "hub"), "out": str(tmp_path / "orbax"), "push": "me/model"}
    down = {"source": "me/model", "out": str(tmp_path / "down"), "verify": True}
    other = {"source": "me/other", "out": str(tmp_path / "out")}
    configs = json.dumps([upload, upload, down, other])
    environment = {"cwd": ROOT, "env": hub.env | {"JAX_PLATFORMS": "cpu"}, "timeout": 300}
    done = subprocess.run(
        [sys.executable, "-c", CONVERT_ALL, configs], capture_output=True, text=True, **environment
    )
    broken, missing = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    for part in ("was not uploaded", "/lfs/", "run again"):
        assert part in broken, done.stderr
    assert "me/other is no folder and cannot be downloaded" in missing
    assert "/me/other/" in missing  # the address, which the Hub's error names in a later line
    assert not list(tmp_path.glob("out*"))
    # three files had arrived, and none is in the repository before all are
    assert hub.began == [(0, 0), (3, 0)]
    assert len(hub.sent) == len(set(hub.sent)) > 3  # nothing went twice
    here = {
        str(path.relative_to(tmp_path / "orbax")): path for path in (tmp_path / "orbax").rglob("*")
    }
    assert hub.files == {name: path.read_bytes() for name, path in here.items() if path.is_file()}
    card = hub.files["README.md"].decode()
    assert card.startswith("---\ntags: [unmask, dream]\n---\n\n# model\n")
    assert f"{sum(x.size for x in tensors.values()):,} parameters in bfloat16, converted by" in card
    assert done.stdout.count("every byte equal") == 3
    assert (
        f"into {tmp_path}/hf/hub (HF_HOME moves it), a second copy beside {tmp_path}/down"
        in done.stdout
    )
    # what the first conversion noted
    assert runs.read_json(tmp_path / "down" / "config.json")["source"] == "hub"
    found = arrays_of(tmp_path / "down")
    all_same(found, {name: tensors[convert.hf_name(name)] for name in found})
    assert "Bearer hf_secret" in hub.tokens
    for path in tmp_path.rglob("*"):  # the token is written nowhere
        assert not path.is_file() or b"hf_secret" not in path.read_bytes()


# ---- Dream's kin ---------------------------------------------------------------------------------------------------

KIN = (
    "llada",
    "sdar",
    "nemotron",
    "nemotron/stable_diffcoder",
    "kin/dreamon",
    "kin/fast_dllm_v2",
    "kin/open_dcoder",
)


@pytest.mark.golden
@pytest.mark.parametrize("area", KIN)
def test_every_family_goes_to_orbax_and_back_byte_for_byte_with_its_files(
    golden_dir, tmp_path, area
):
    top, _, below = area.partition("/")
    source, orbax, back = (
        as_on_the_hub(golden_dir(top) / below, tmp_path / "hub"),
        tmp_path / "orbax",
        tmp_path / "back",
    )
    convert.main(convert.Config(str(source), str(orbax), verify=True))
    convert.main(convert.Config(str(orbax), str(back), verify=True))
    theirs, ours = (convert.map_files(folder) for folder in (source, back))
    assert theirs.keys() == ours.keys()
    all_same(theirs, ours)
    for name, data in checkpoints.companions(source).items():
        assert (back / name).read_bytes() == data, name
    keys = runs.read_json(back / "config.json")
    want = runs.read_json(source / "config.json")
    assert {key: x for key, x in keys.items() if key not in ("source", "auto_map")} == {
        key: x for key, x in want.items() if key != "auto_map"
    }
    model, _ = checkpoints.load(dream, orbax)
    assert model.cfg == dream.config_from_hf(source)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text(json.dumps(dream.config_to_hf(model.cfg)))
    if (source / "added_tokens.json").exists():
        shutil.copy(source / "added_tokens.json", tmp_path / "made")
    # what a trained model says of itself
    assert dream.config_from_hf(tmp_path / "made") == model.cfg


@pytest.mark.golden
@pytest.mark.parametrize(
    ("area", "changes", "says"),
    [
        (
            "llada",
            {"model_type": "llada_moe", "architectures": ["LLaDAMoEModelLM"]},
            "it is a llada_moe LLaDAMoEModelLM",
        ),
        ("llada", {"alibi": True}, "alibi is True, not False"),
        ("llada", {"block_group_size": 4}, "block_group_size is 4, not 1"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias is True, not False"),
        (
            "sdar",
            {"model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"]},
            "it is a sdar_moe",
        ),
        ("sdar", {"num_experts": 128}, "num_experts asks for another model"),
        ("sdar", {"attention_bias": True}, "attention_bias is True, not False"),
        ("sdar", {"sliding_window": 4096}, "sliding_window is 4096, not None"),
        ("nemotron", {"vision_config": {"depth": 3}}, "vision_config asks for another model"),
        (
            "nemotron",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
            "rope_scaling is ",
        ),
        (
            "nemotron/stable_diffcoder",
            {"architectures": ["LlamaForCausalLM"], "auto_map": None},
            "it is a llama Llama",
        ),
    ],
)
def test_another_model_of_a_family_is_refused_in_one_line(
    golden_dir, tmp_path, area, changes, says
):
    top, _, below = area.partition("/")
    keys = runs.read_json(golden_dir(top) / below / "config.json") | changes
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ValueError, match="does not describe a Dream model") as error:
        convert.main(convert.Config(str(tmp_path), str(tmp_path / "out")))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.golden
def test_a_key_that_llada_needs_and_a_tokenizer_of_another_family_are_named(golden_dir, tmp_path):
    source = golden_dir("llada")
    keys = runs.read_json(source / "config.json")
    (tmp_path / "config.json").write_text(
        json.dumps({key: x for key, x in keys.items() if key != "rope"})
    )
    with pytest.raises(ValueError, match="rope is missing"):
        convert.find(tmp_path)
    folder = as_on_the_hub(source, tmp_path / "hub")
    (folder / "tokenizer.json").write_bytes(
        tokenizer_of({"<|mask|>": keys["mask_token_id"]}, ("<|mask|>",))
    )
    with pytest.raises(ValueError, match=r"is of another model: <\|mdm_mask\|> is not its id"):
        convert.main(convert.Config(str(folder), str(tmp_path / "out")))
