"""Text generation from a checkpoint: stop strings, streaming, fill-in-the-middle, batches, and bad input."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import data_prep
import generate
import model_mdlm as mdlm
import model_pythoncoder as pc

ROOT = Path(__file__).resolve().parent.parent
CFG = pc.Config(vocab=384, width=32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=48, positions=64)


@pytest.mark.golden
def test_completions_are_cut_at_the_first_stop_string(golden_dir):
    golden = json.loads((golden_dir("pythoncoder") / "truncate.json").read_text())
    for case in golden["cases"]:
        assert generate.truncate(case["text"], golden["stops"]) == case["kept"], case


def test_streaming_holds_back_half_a_character_and_the_start_of_a_stop_string():
    assert generate.printable("x = 1\n", ["\ndef "], ended=False) == "x = 1"
    assert generate.printable("x = 1\nde", ["\ndef "], ended=False) == "x = 1"
    assert generate.printable("x = 1\nde", ["\ndef "], ended=True) == "x = 1\nde"
    assert generate.printable("x = 1\ndef f", ["\ndef "], ended=False) == "x = 1"
    assert generate.printable("caf\ufffd", [], ended=False) == "caf"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder as train_tpu.py leaves it, with random weights."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["def f(x):"], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    tokenizer.save(str(folder / "tokenizer.json"))
    params = jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, pc.new_params(CFG, 0))
    step = folder / "checkpoints" / "7"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(step / "params", params)
    (step / "meta").mkdir()
    meta = {"model": dataclasses.asdict(CFG), "step": 7, "sums": pc.bit_sums({"params": params})}
    (step / "meta" / "metadata").write_text(json.dumps(meta))
    return folder


def command(*args, stdin=None):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    args = [sys.executable, str(ROOT / "generate.py"), *map(str, args)]
    return subprocess.run(args, capture_output=True, text=True, env=env, timeout=300, input=stdin)


def test_the_command_line_streams_a_prompt_and_its_continuation(run_folder):
    greedy = command(f"--ckpt={run_folder}", "--prompt=def f(x):\\n", "--max_new=24")
    assert greedy.returncode == 0, greedy.stderr
    assert greedy.stdout.startswith("def f(x):\n")
    assert "tokens per forward pass" in greedy.stderr
    plain = command(f"--ckpt={run_folder}", "--prompt=def f(x):\\n", "--max_new=24", "--speculate=False")
    assert plain.stdout == greedy.stdout
    stop = greedy.stdout[len("def f(x):\n") :].strip()[3:5]
    cut = command(f"--ckpt={run_folder}", "--prompt=def f(x):\\n", "--max_new=24", "--stop", stop)
    assert cut.stdout.rstrip("\n") == greedy.stdout[: greedy.stdout.index(stop, 10)]


def test_json_lines_in_and_out_with_several_samples_and_a_suffix(run_folder, tmp_path):
    requests = [{"prompt": "def f(x):"}, {"prompt": "import os, sys, json", "suffix": "\nprint(x)"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
    result = command(
        f"--ckpt={run_folder}",
        f"--file={tmp_path}/in.jsonl",
        "--n=2",
        "--json=True",
        "--temperature=0.8",
        "--max_new=8",
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == [r["prompt"] for r in requests for _ in range(2)]
    assert all(1 <= row["tokens"] <= 8 for row in rows)


def test_an_interactive_session_reads_prompts_until_the_end_of_input(run_folder):
    result = command(f"--ckpt={run_folder}", "--max_new=4", stdin="def f(x):\n    y = 1\n\nimport os\n\n")
    assert result.returncode == 0, result.stderr
    assert "def f(x):\n    y = 1\n" in result.stdout
    assert "import os\n" in result.stdout


def test_fill_in_the_middle_puts_prefix_and_suffix_before_the_middle(run_folder):
    tokenizer = Tokenizer.from_file(str(run_folder / "tokenizer.json"))
    ids = generate.encode(tokenizer, "def ", "(x)")
    assert [i for i in ids if i < 4] == [1, 3, 2]  # prefix, suffix, middle
    assert tokenizer.decode(ids) == "def (x)"
    assert 0 not in generate.encode(tokenizer, "<|endoftext|>", "")  # a special token's name in a prompt is text


def test_bad_input_is_one_line(run_folder, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    cases = [
        ([f"--ckpt={tmp_path}/none", "--prompt=x"], "python train_tpu.py"),
        ([f"--ckpt={run_folder}", "--prompt=x", "--step=3"], "it has [7]"),
        ([f"--ckpt={run_folder}", "--prompt=x", "--top_p=0"], "--top_p"),
        ([f"--ckpt={run_folder}", "--prompt=x", "--max_new=5000"], "256 positions"),
        ([f"--ckpt={run_folder}", f"--file={tmp_path}/broken.jsonl"], "line 2"),
        ([f"--ckpt={run_folder}", f"--file={tmp_path}/none.jsonl"], "cannot be read"),
    ]
    for args, part in cases:
        result = command(*args)
        assert result.returncode not in (0, None)
        assert "Traceback" not in result.stderr
        assert part in result.stderr.strip().splitlines()[-1], result.stderr


def test_loading_in_bfloat16_gives_the_same_model_in_half_the_bytes(run_folder):
    full, half = (pc.load(run_folder, dtype=d)[0] for d in (jnp.float32, jnp.bfloat16))
    size = [sum(x.nbytes for x in jax.tree.leaves(nnx.state(m))) for m in (full, half)]
    assert size[0] == 2 * size[1]
    token_BL = jnp.asarray(np.random.default_rng(0).integers(0, 260, (1, 16)))
    logits = [np.asarray(m.logits(m.hidden(m.lookup(token_BL)))) for m in (full, half)]
    np.testing.assert_allclose(logits[0], logits[1], atol=0.05 * np.abs(logits[0]).max())


# ---- MDLM


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A run folder with an untrained MDLM and a tokenizer."""
    folder = tmp_path_factory.mktemp("mdlm")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*data_prep.SPECIAL.values()], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["Once upon a time there was a dragon."] * 5, trainer)
    torch.manual_seed(0)
    model = mdlm.MDLM(mdlm.Config(vocab=320, width=32, layers=1, heads=2, ffn=64, positions=64))
    mdlm.save(model, folder / "step_5", tokenizer.to_str().encode())
    return folder


def mdlm_says(capsys, folder, **settings):
    generate.main(generate.Config(model="mdlm", ckpt=str(folder), **settings))
    return capsys.readouterr()


@pytest.mark.parametrize("sampler", ["ancestral", "max_prob", "margin", "entropy"])
def test_mdlm_continues_and_fills_in_with_every_sampler(stories, capsys, sampler):
    out, err = mdlm_says(capsys, stories, prompt="Once upon", max_new=12, steps=6, sampler=sampler)
    assert out.startswith("Once upon")
    assert "12 tokens" in err
    rows = mdlm_says(capsys, stories, prompt="Once [MASK:3] dragon.", n=3, steps=3, sampler=sampler, json=True)[0]
    texts = [json.loads(row)["text"] for row in rows.splitlines()]
    assert len(texts) == 3
    for text in texts:
        assert text.startswith("Once")
        assert text.endswith(" dragon.") or len(text) < 60  # EOS may be drawn inside
        assert not any(name in text for name in (*data_prep.SPECIAL.values(), "\u2591"))
    with_suffix = mdlm_says(capsys, stories, prompt="Once", suffix=" dragon.", max_new=3, steps=2, seed=1)[0]
    assert with_suffix.startswith("Once")


def test_mdlm_canvas_masks_anywhere_and_leaves_the_space_to_the_masked_words(stories):
    tokenizer = Tokenizer.from_file(str(stories / "step_5" / "tokenizer.json"))
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    canvas = generate.canvas_of(tokenizer, "Once [MASK:2] upon[MASK:1]", 9, 64)
    assert canvas == [mdlm.BOS, *ids("Once"), mdlm.MASK, mdlm.MASK, *ids(" upon"), mdlm.MASK, mdlm.EOS]
    assert generate.canvas_of(tokenizer, "Once", 3, 64) == [mdlm.BOS, *ids("Once"), *[mdlm.MASK] * 3]


def test_mdlm_shows_its_steps_in_the_terminal_and_as_a_page(stories, capsys, tmp_path):
    page = tmp_path / "steps.html"
    out, _ = mdlm_says(capsys, stories, prompt="A <b>", max_new=10, steps=5, show_steps=True, html=str(page), n=2)
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert 1 <= len(steps) <= 5
    masks = [line.count("\u2591") for line in steps]
    assert masks == sorted(masks, reverse=True)
    assert "\x1b" not in out
    text = page.read_text()
    assert text.count("<p>") == 2
    assert "<b>" not in text
    assert 'title="given"' in text
    assert re.search(r"title=.step \d of \d", text)


def test_mdlm_refuses_what_does_not_fit_and_a_folder_without_a_model(stories, tmp_path):
    for settings, part in (
        ({"prompt": "x", "max_new": 64}, "do not fit the model's 64 positions"),
        ({"prompt": "x", "step": 7}, "holds no config.json"),
        ({"prompt": "x", "steps": 0}, "--steps at least 1"),
        ({"prompt": "x[MASK:99999999999999999999]"}, "do not fit the model's 64 positions"),
        ({"prompt": "x [MASK] y"}, "[MASK:12]"),
        ({"prompt": "x", "stop": (".",)}, "--stop"),
        ({"prompt": "x", "html": str(tmp_path / "none" / "a.html")}, "there is no folder"),
    ):
        with pytest.raises(SystemExit) as end:
            generate.main(generate.Config(model="mdlm", ckpt=str(stories), **settings))
        assert part in str(end.value)
    with pytest.raises(SystemExit) as end:
        generate.main(generate.Config(model="mdlm", ckpt=str(tmp_path), prompt="x"))
    assert "train_gpu.py" in str(end.value)
