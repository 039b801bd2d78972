"""Dream's kin, from a folder in the Hub's layout to a trained model and back, by the commands that
a user types.
"""

import json
import os
import shutil

import numpy as np
import pytest
from conftest import as_on_the_hub, losses, run

import checkpoints
import convert_weights as convert
import model_dream as md
import runs

KIN = (
    "llada",
    "sdar",
    "nemotron",
    "nemotron/stable_diffcoder",
    "kin/dreamon",
    "kin/fast_dllm_v2",
    "kin/open_dcoder",
)
WORDS = 24


def hub_folder(source, folder):
    """A copy of a folder of reference values with a tokenizer of words, w0 to w23, and the special
    tokens.
    """
    as_on_the_hub(source, folder)
    cfg = md.config_from_hf(folder)
    special = {"<|endoftext|>": cfg.eos_id, md.FAMILIES[cfg.family].mask or "<|mask|>": cfg.mask_id}
    special |= {} if cfg.pad_id == cfg.eos_id else {"<pad>": cfg.pad_id}
    free = [i for i in range(cfg.vocab) if i not in {*special.values(), cfg.expand_id}]
    assert len(free) > WORDS
    model = {
        "type": "WordLevel",
        "vocab": {f"w{i}": free[i] for i in range(WORDS)} | special,
        "unk_token": "w0",
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added = [{"id": i, "content": name, **flags} for name, i in special.items()]
    splits = {"type": "WhitespaceSplit"}
    text = json.dumps(
        {"version": "1.0", "added_tokens": added, "pre_tokenizer": splits, "model": model}
    )
    (folder / "tokenizer.json").write_text(text)
    return cfg


def works(script, *flags):
    """What a command printed, which must succeed; compiled as tests are, in half the time."""
    done = run(script, *flags, env=os.environ | {"XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("area", KIN)
def test_every_family_converts_generates_learns_and_goes_back(golden_dir, tmp_path, area):
    top, _, below = area.partition("/")
    hub, orbax, data = (tmp_path / name for name in ("hub", "orbax", "data"))
    cfg = hub_folder(golden_dir(top) / below, hub)

    # There and back, byte for byte.
    works("convert_weights.py", f"--source={hub}", f"--out={orbax}", "--verify")
    works("convert_weights.py", f"--source={orbax}", f"--out={tmp_path / 'back'}", "--verify")
    theirs, ours = convert.map_files(hub), convert.map_files(tmp_path / "back")
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].tobytes() == ours[name].tobytes() for name in theirs)

    said = works("generate_dream.py", f"--ckpt={orbax}", "--prompt=w1 w2", "--max_new=8", "--json")
    assert json.loads(said)["forwards"] > 0

    # Fine-tuning of all weights, and by LoRA.
    pairs = [
        {"prompt": f"w{n % 7} w{n % 5}", "response": f"w{n % 11} w{n % 3}"} for n in range(200)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = (
        f"--tokenizer={orbax / 'tokenizer.json'}",
        "--seq_len=32",
        "--heldout=0",  # its tokenizer drops spaces: bits per byte cannot be told
        "--workers=1",
    )
    works("data_prep.py", "pairs", tmp_path / "pairs.jsonl", *flags, f"--out={data}")
    flags = (
        f"--init={orbax}",
        f"--data={data}",
        "--steps=2",
        "--batch_size=2",
        "--lr=0.01",
        "--compile_cache=",
    )
    for name, more in (
        ("tuned", ()),
        ("lora", ("--lora_rank=2",)),
        ("lora4", ("--lora_rank=2", "--base_bits=4")),
    ):
        works("train_dream.py", *flags, f"--out={tmp_path / name}", *more)
        assert np.isfinite([*losses(tmp_path / name).values()]).all()

    # Two rounds of Coupled-GRPO with a reward of one's own.
    (tmp_path / "own.py").write_text(
        "def share(completions, rows, **_):\n    return [row['written'].count('w1') / 8 for row in rows]\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "w1 w2"}\n{"prompt": "w3"}\n')
    shutil.copy(tmp_path / "tasks.jsonl", tmp_path / "heldout.jsonl")
    sizes = (
        "--tasks=2",
        "--group=4",
        "--micro_batch=4",
        "--generation_batch=8",
        "--max_prompt=4",
        "--max_new=8",
    )
    blocks = () if cfg.block_length else ("--block_length=8",)
    flags = (
        f"--ckpt={orbax}",
        f"--prompts={tmp_path / 'tasks.jsonl'}",
        f"--rewards={tmp_path / 'own.py'}:share",
    )
    works("coupled_grpo.py", *flags, *sizes, *blocks, "--rounds=2", f"--out={tmp_path / 'grpo'}")
    assert json.loads((tmp_path / "grpo/log.jsonl").read_text().splitlines()[-1])["round"] == 2

    # What was trained goes back to the Hub's layout, too: other weights under the same names, the
    # same architecture.
    works(
        "convert_weights.py",
        f"--source={tmp_path / 'tuned'}",
        f"--out={tmp_path / 'published'}",
        "--dtype=float32",
    )
    works(
        "convert_weights.py", f"--source={tmp_path / 'published'}", f"--out={tmp_path / 'trained'}"
    )
    tuned = convert.map_files(tmp_path / "trained")
    assert {name: x.shape for name, x in tuned.items()} == {
        name: x.shape for name, x in theirs.items()
    }
    assert any(tuned[name].tobytes() != theirs[name].tobytes() for name in theirs)
    assert (
        md.config_from_hf(tmp_path / "trained")
        == cfg
        == checkpoints.load(md, tmp_path / "grpo")[0].cfg
    )
    assert (
        runs.read_json(tmp_path / "trained/config.json")["model_type"]
        == md.FAMILIES[cfg.family].kind
    )
