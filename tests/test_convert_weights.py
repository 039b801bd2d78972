"""Conversion: every byte arrives, both ways; interrupted, damaged and ill-fitting checkpoints are one line."""

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import convert_weights as convert
import model_dream as dream

ROOT = Path(__file__).resolve().parent.parent
SMALL = dream.DreamConfig(300, 64, 3, 4, 2, 16, 96, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=64)


def tokenizer_of(special, words=("a", "b")):
    """A tokenizer.json of a few words and special tokens {name: id}."""
    vocab = {word: max(special.values(), default=-1) + 1 + i for i, word in enumerate(words)} | special
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": name, **flags} for name, number in special.items()]
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model}).encode()


def write_hub_folder(folder, cfg=SMALL, dtype=ml_dtypes.bfloat16, shards=3, change=None):
    """Random weights in the Hub's layout; change(tensors) may spoil them."""
    folder.mkdir(parents=True)
    rng, weight_map = np.random.default_rng(0), {}
    tensors = {
        dream.hf_name(name): rng.standard_normal(leaf.shape).astype(dtype)
        for name, leaf in dream.flatten(dream.param_shapes(cfg)).items()
    }
    if change:
        change(tensors)
    names = sorted(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(dream.config_to_hf(cfg) | {"use_mrope": False, "note": "kept"}))
    (folder / "tokenizer.json").write_bytes(tokenizer_of({"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": cfg.mask_id}))
    return tensors


def run(source, out, *more, **options):
    command = [sys.executable, str(ROOT / "convert_weights.py"), f"--source={source}", f"--out={out}", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def says(result, *parts):
    """One clear line on standard error and a failing exit status."""
    assert result.returncode not in (0, None), result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    line = result.stderr.strip().splitlines()[-1]
    for part in parts:
        assert part in line, line


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16])
@pytest.mark.parametrize("tie", [False, True])
def test_there_and_back_every_byte_is_equal(tmp_path, dtype, tie):
    cfg = dream.dataclasses.replace(SMALL, tie=tie)
    tensors = write_hub_folder(tmp_path / "hub", cfg, dtype)
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax"), verify=True))
    back = tmp_path / "back"
    convert.main(convert.Config(str(tmp_path / "orbax"), str(back), shard_gb=5e-5, verify=True))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    for name, file in index["weight_map"].items():
        assert same(safetensors.numpy.load_file(back / file)[name], tensors[name])  # the library's own reader
    assert json.loads((back / "config.json").read_text())["note"] == "kept"
    assert (back / "tokenizer.json").read_bytes() == (tmp_path / "hub" / "tokenizer.json").read_bytes()
    for model in (dream.load(tmp_path / "orbax"), dream.from_hf(back)):
        for name, array in dream.flatten(dream.nnx.to_pure_dict(dream.nnx.state(model))).items():
            assert same(np.asarray(array), tensors[dream.hf_name(name)])


@pytest.mark.golden
def test_the_golden_checkpoint_converts_both_ways(golden_dir, tmp_path):
    convert.main(convert.Config(str(golden_dir("dream")), str(tmp_path / "orbax"), verify=True))
    convert.main(convert.Config(str(tmp_path / "orbax"), str(tmp_path / "back"), verify=True))
    theirs, ours = (dream.open_hf(folder) for folder in (golden_dir("dream"), tmp_path / "back"))
    assert theirs.keys() == ours.keys()
    assert all(same(theirs[name], ours[name]) for name in ours)


def test_a_sum_changes_with_any_one_bit_and_is_the_models_own():
    words = np.random.default_rng(0).standard_normal(1000).astype(ml_dtypes.bfloat16)
    want = convert.word_sum(words)
    assert dream.bit_sums({"x": jax.numpy.asarray(words)}) == {"x": want}
    for bit in range(16):
        words.view(np.uint16)[77] ^= 1 << bit
        assert convert.word_sum(words) != want
        words.view(np.uint16)[77] ^= 1 << bit


def test_tensors_that_do_not_fit_are_named(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), ml_dtypes.bfloat16)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:7]

    write_hub_folder(tmp_path / "hub", change=change)
    says(run(tmp_path / "hub", tmp_path / "out"), "missing model.norm.weight", "unexpected model.layers.9", "lm_head")
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_source_is_one_line_and_leaves_nothing(tmp_path):
    hub, out = tmp_path / "hub", tmp_path / "out"
    write_hub_folder(hub)
    shard = hub / "model-00002-of-00003.safetensors"
    good, index = shard.read_bytes(), (hub / "model.safetensors.index.json").read_text()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    lies = {name: entry | {"shape": [1, *entry["shape"]]} for name, entry in header.items() if "data_offsets" in entry}
    lies[next(iter(lies))]["shape"] = [3]
    lies = json.dumps(lies).encode()
    for data, *parts in (
        (good[:-100], shard.name, "cut short"),
        (good[:40], shard.name, "header claims"),
        (struct.pack("<Q", 1 << 60) + good[8:], shard.name, "header claims"),
        (struct.pack("<Q", len(lies)) + lies + good[8 + length :], shard.name, "lies about"),
        (good.replace(b'"BF16"', b'"I16" '), shard.name, "I16"),
        (b"\0" * 100, shard.name),
    ):
        shard.write_bytes(data)
        says(run(hub, out), *parts)
    shard.unlink()
    says(run(hub, out), "does not exist", "index.json names it")
    shard.write_bytes(good)
    (hub / "model.safetensors.index.json").write_text("[]")
    says(run(hub, out), "no weight_map")
    (hub / "model.safetensors.index.json").write_text(index.replace("model.norm.weight", "model.norm.wait"))
    says(run(hub, out), "model.norm.weight")
    (hub / "model.safetensors.index.json").write_text(index)
    (hub / "config.json").write_text('{"model_type": "llama"}')
    says(run(hub, out), "does not describe a Dream model")
    says(run(tmp_path / "none", out), "does not exist")
    assert not list(tmp_path.glob("out*"))


def test_verify_and_the_way_back_find_a_byte_that_changed(tmp_path):
    write_hub_folder(tmp_path / "hub")
    convert.main(convert.Config(str(tmp_path / "hub"), str(tmp_path / "orbax")))
    chunk = max((tmp_path / "orbax" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    says(run(tmp_path / "hub", tmp_path / "orbax", "--verify=True"), "differ", "checksum")
    says(run(tmp_path / "orbax", tmp_path / "back"), "is not what was saved")
    assert not list(tmp_path.glob("back*"))


def test_an_existing_folder_and_a_full_disk_are_refused(tmp_path):
    write_hub_folder(tmp_path / "hub")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    says(run(tmp_path / "hub", tmp_path / "mine"), "exists")
    assert (tmp_path / "mine" / "thesis.tex").exists()

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a write beyond it fails, as on a full disk

    says(run(tmp_path / "hub", tmp_path / "out", preexec_fn=small_files), "File too large")
    assert not list(tmp_path.glob("out*"))


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path):
    big = dream.dataclasses.replace(SMALL, vocab=60_000, width=512, ffn=4096, head_size=128)
    write_hub_folder(tmp_path / "hub", big)
    command = [sys.executable, str(ROOT / "convert_weights.py"), f"--source={tmp_path}/hub", f"--out={tmp_path}/out"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (tmp_path / "out.partial").exists():
        assert process.poll() is None
        time.sleep(0.005)
    second = run(tmp_path / "hub", tmp_path / "out")
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists() or second.returncode != 0
    says(second, "exists" if (tmp_path / "out").exists() else "another run is writing")
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out.partial").mkdir(exist_ok=True)  # what a kill leaves
    result = run(tmp_path / "hub", tmp_path / "out", "--verify=True")
    assert result.returncode == 0, result.stderr
    assert "left by an interrupted run; starting over" in result.stdout
    assert "every byte equal" in result.stdout
    assert not (tmp_path / "out.partial").exists()
    assert os.listdir(tmp_path / "out")
