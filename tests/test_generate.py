"""PythonCoder's completions: streams, stop strings, fill-in-the-middle, batches; its weights; bad
input.
"""

import dataclasses
import io
import json
import os
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from conftest import AS_A_USER, copy_in_bucket, run, says
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import checkpoints
import convert_weights
import generate
import model_dream as md
import model_pythoncoder as pc
import prompts
import runs

pytestmark = pytest.mark.usefixtures("no_compile_cache")
CFG = pc.Config(
    vocab=384, width=32, layers=2, heads=4, kv_heads=4, head_size=8, ffn=48, positions=64
)


def new_tokenizer(special, text):
    """A byte-level BPE with few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*special], **settings)
    tokenizer.train_from_iterator([text] * 5, trainer)
    return tokenizer


def new_params(family, cfg, size):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, size, x.shape), jnp.float32), family.param_shapes(cfg)
    )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder as train_tpu.py leaves it, with random weights."""
    folder = tmp_path_factory.mktemp("run")
    special = "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"
    new_tokenizer(special, "def f(x):").save(str(folder / "tokenizer.json"))
    store = checkpoints.Checkpoints(folder)
    meta = {"model": dataclasses.asdict(CFG), "step": 7}
    store.save(7, {"params": new_params(pc, CFG, 0.3)}, meta)
    store.close()
    return folder


def says_pythoncoder(capsys, folder, **settings):
    # with these each test takes the same few programs
    defaults = {"ckpt": str(folder), "devices": 1, "top_p": 1.0, "max_new": 8, "temperature": 0.0}
    generate.main(generate.Config(**defaults | settings))
    return capsys.readouterr()


def refused(part, **settings):
    with pytest.raises((ValueError, OSError)) as error:
        generate.main(runs.check(generate.Config(**settings)))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_line_streams_a_prompt_and_its_continuation(run_folder, capsys, monkeypatch):
    flags = "--prompt=def f(x):\\n", "--max_new=8", "--devices=1", "--temperature=0", "--top_p=1"
    monkeypatch.setattr("sys.argv", ["generate.py", f"--ckpt={run_folder}", *flags])
    runs.command(generate.main, generate.Config, generate.__doc__)
    greedy, err = capsys.readouterr()
    assert greedy.startswith("def f(x):\n")
    assert "tokens per forward pass" in err
    stop = greedy[len("def f(x):\n") :].strip()[2:4]
    cut, _ = says_pythoncoder(capsys, run_folder, prompt="def f(x):\\n", stop=(stop,))
    assert cut.rstrip("\n") == greedy[: greedy.index(stop, 10)]
    # without drafts the text is the same
    plain, _ = says_pythoncoder(capsys, run_folder, prompt="def f(x):\\n", speculate=False)
    assert plain == greedy
    # prompts of the terminal
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n\nimport os\n\n"))
    out, _ = says_pythoncoder(capsys, run_folder)
    assert out.startswith(greedy)
    assert "import os\n" in out


def test_json_lines_in_and_out_with_several_samples_and_a_suffix(run_folder, tmp_path, capsys):
    asked = {"prompt": "import os, sys, json, re\n\n\ndef f(x):", "suffix": "\nprint(x)"}
    (tmp_path / "in.jsonl").write_text(json.dumps(asked) + "\n")
    settings = {"file": str(tmp_path / "in.jsonl"), "n": 2, "json": True, "temperature": 0.8}
    out, _ = says_pythoncoder(capsys, run_folder, **settings)
    rows = [json.loads(line) for line in out.splitlines()]
    # a line break behind a colon, as --prompt has it
    assert [row["prompt"] for row in rows] == [asked["prompt"] + "\n"] * 2
    assert all(1 <= row["tokens"] <= 8 for row in rows)
    assert rows[0]["completion"] != rows[1]["completion"]
    out, _ = says_pythoncoder(capsys, run_folder, **settings, raw=True)
    assert json.loads(out.splitlines()[0])["prompt"] == asked["prompt"]


def test_fill_in_the_middle_puts_prefix_and_suffix_before_the_middle(run_folder):
    tokenizer = Tokenizer.from_file(str(run_folder / "tokenizer.json"))
    ids = prompts.encode(tokenizer, "def ", "(x)")
    assert [i for i in ids if i < 4] == [1, 3, 2]  # prefix, suffix, middle
    assert tokenizer.decode(ids) == "def (x)"
    # a special token's name in a prompt is text
    assert 0 not in prompts.encode(tokenizer, "<|endoftext|>", "")


def test_a_text_ends_with_the_token_that_ended_the_documents_of_the_data(run_folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(run_folder / "tokenizer.json"))
    own = tokenizer.token_to_id("<|endoftext|>")
    assert runs.ends_of_text(tmp_path, tokenizer) == (own,)
    path = tmp_path / "generation_config.json"
    for token, expected in ((7, (7,)), ([5, 6, 5], (5, 6)), (None, ()), ([], ())):
        path.write_text(json.dumps({"eos_token_id": token}))
        assert runs.ends_of_text(tmp_path, tokenizer) == expected
    for text, said in (
        ("7", r"generation_config.json is damaged"),
        (
            '{"eos_token_id": "</s>"}',
            r"eos_token_id is \['</s>'\], neither an id nor a list of ids",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            runs.ends_of_text(tmp_path, tokenizer)


def test_each_prompt_of_a_file_is_checked_and_one_that_fails_ends_in_one_line(
    run_folder, tmp_path, capsys
):
    # what random weights add is no Python, and is cut off
    whole = 'def f(x):\n """>>> f(1)\n 2\n """\n return x + 1\n'
    lines = [json.dumps({"prompt": x}) for x in (whole, whole.replace("return", "yield"))]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    settings = {"file": str(tmp_path / "in.jsonl"), "check": True, "json": True}
    settings["temperature"] = 0.8  # the program of the test above
    with pytest.raises(ValueError, match=r"^no completion passes all examples of 1 of 2 prompts$"):
        says_pythoncoder(capsys, run_folder, **settings)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["passed"] for row in rows] == [True, False]
    assert rows[0]["examples"] == ["pass: f(1) gives 2"]


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [(None, None, 128), (64, None, 64), (2048, None, 128), (64, 100, 100), ("64", None, 128)],
)
def test_settings_are_settled_by_the_models_folder(own, given, expected):
    cfg = generate.Config(prompt="a\\n", stop=("\\n\\n", ""), max_new=given)
    settled = generate.settle(cfg, "x", own)
    assert (settled.max_new, settled.ckpt) == (expected, "x")
    assert (settled.prompt, settled.stop) == ("a\n", ("\n\n",))
    raw = generate.settle(dataclasses.replace(cfg, raw=True), "x", own)
    assert raw.prompt == "a\\n"  # Python's own backslash


# ---- its weights


@pytest.fixture
def weights(run_folder, tmp_path, monkeypatch):
    """A folder weights/ with a model, and a working directory without runs."""
    export = str(tmp_path / "export")
    convert_weights.main(convert_weights.Config(str(run_folder), export, dtype="bfloat16"))
    convert_weights.main(convert_weights.Config(export, str(tmp_path / "weights/pythoncoder")))
    monkeypatch.setattr(checkpoints, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights"


@pytest.mark.slow
def test_without_a_run_the_models_in_weights_answer_and_say_so(weights, run_folder, capsys):
    files = {path.name for path in (weights / "pythoncoder").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    exported, _ = says_pythoncoder(capsys, weights.parent / "export", prompt="def f(x):")
    out, err = says_pythoncoder(capsys, "", prompt="def f(x):")
    assert out == exported
    assert "no model in out/train_tpu: using weights/pythoncoder, a small one" in err
    assert "weights/pythoncoder step 7, float32" in err
    shutil.copytree(run_folder, "out/train_tpu")
    assert "weights" not in says_pythoncoder(capsys, "", prompt="def f(x):")[1]
    refused("holds no checkpoint of step 3; it has [7]", prompt="x", step=3)


def test_damaged_weights_and_those_of_another_version_are_one_line(weights):
    """Beside those of test_bad_input.py."""
    folder = weights / "pythoncoder"
    file = folder / "model.safetensors"
    keys = runs.read_json(folder / "config.json")
    refused("has no steps; leave --step=3 out", prompt="x", ckpt=str(folder), step=3)
    runs.write(folder / "config.json", keys | {"ffn": 49})
    refused("do not fit the model: layers.w_down has shape", prompt="x")
    runs.write(folder / "config.json", keys)
    whole = file.read_bytes()
    tensors = safetensors.numpy.load_file(file)
    infinite = tensors | {"norm": np.full_like(tensors["norm"], np.inf)}
    safetensors.numpy.save_file(infinite, file)
    refused("holds NaN", prompt="x")
    for damaged in (whole[:5], b"", b"x" * 300):
        file.write_bytes(damaged)
        refused("weights/pythoncoder/model.safetensors cannot be read", prompt="x")


def test_one_flipped_bit_in_the_models_of_weights_is_noticed(weights):
    file = weights / "pythoncoder" / "model.safetensors"
    whole = file.read_bytes()
    for place in (-1, len(whole) // 2):
        data = bytearray(whole)
        data[place] ^= 1
        file.write_bytes(data)
        refused("weights/pythoncoder/model.safetensors is damaged: ", prompt="x")


def test_the_models_that_come_with_the_project_hold_checksums():
    path = checkpoints.WEIGHTS / "pythoncoder" / "model.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        assert json.loads(file.metadata()["sums"]).keys() == set(file.keys())


def test_loading_in_bfloat16_rounds_the_same_weights(run_folder):
    full, half = (checkpoints.load(pc, run_folder, dtype=d)[0] for d in (jnp.float32, jnp.bfloat16))
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (full, half)), strict=True):
        assert (x.dtype, y.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(x.astype(jnp.bfloat16), y)


@pytest.mark.slow
def test_a_model_can_be_in_a_bucket(run_folder, bucket):
    env = os.environ | AS_A_USER | bucket
    copy_in_bucket(bucket, "put", f"{run_folder}/", "bucket/pythoncoder/")
    copy_in_bucket(bucket, "put", f"{checkpoints.WEIGHTS}/dream/", "bucket/dream/")
    for script, folder, name in (
        ("generate.py", run_folder, "pythoncoder"),
        ("generate_dream.py", checkpoints.WEIGHTS / "dream", "dream"),
    ):
        flags = "--prompt=def f(x):", "--max_new=4", "--temperature=0", "--compile_cache="
        remote = run(script, f"--ckpt=gs://bucket/{name}", *flags, env=env)
        assert remote.returncode == 0, remote.stderr
        assert remote.stdout == run(script, f"--ckpt={folder}", *flags, env=env).stdout
        assert f"gs://bucket/{name}" in remote.stderr
    nothing = run("generate.py", "--ckpt=gs://bucket/none", "--prompt=x", env=env)
    says(nothing, "gs://bucket/none holds no checkpoint")


# ---- the machine


def test_the_first_line_says_what_is_used_and_what_is_idle(monkeypatch, tmp_path):
    assert checkpoints.device_line() == "8 x cpu"
    monkeypatch.setattr(checkpoints, "ROOT", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert checkpoints.device_line() == "8 x cpu"  # whoever set JAX_PLATFORMS wants the CPU
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = "8 x cpu; an NVIDIA GPU is here, JAX has no CUDA: pip install -r requirements-cuda.txt"
    assert checkpoints.device_line() == line


@pytest.mark.parametrize(
    ("model", "devices", "rows", "shape"),
    [
        (md.CONFIGS["7b"], 8, 8, (2, 1, 4)),
        (md.CONFIGS["7b"], 8, 1, (1, 1, 4)),
        (md.CONFIGS["7b"], 2, 8, (1, 1, 2)),
        (md.CONFIGS["7b"], 6, 9, (3, 1, 2)),
        (pc.CONFIGS["1b"], 8, 4, (4, 1, 2)),
        (pc.CONFIGS["tiny"], 1, 4, (1, 1, 1)),
    ],
)
def test_heads_are_split_up_to_the_key_value_heads_and_rows_over_the_rest(
    model, devices, rows, shape
):
    mesh = checkpoints.inference_mesh(model, jax.devices()[:devices], rows)
    assert mesh.devices.shape == shape


@pytest.mark.slow
def test_eight_devices_write_what_one_writes(run_folder, capsys, monkeypatch, tmp_path):
    loaded = []
    load = checkpoints.load

    def remember(*args, **kwargs):
        loaded.append(load(*args, **kwargs)[0])
        return loaded[-1], 0

    monkeypatch.setattr(checkpoints, "load", remember)
    lines = [json.dumps({"prompt": x}) for x in ("def f(x):", "import os", "x", "def area")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    settings = {"file": str(tmp_path / "in.jsonl"), "max_new": 4}
    one = says_pythoncoder(capsys, run_folder, **settings)
    many = says_pythoncoder(capsys, run_folder, **settings, devices=0)
    assert one.out == many.out
    assert "8 x cpu; mesh data 4, fsdp 1, tensor 2" in many.err
    sets = [{len(x.sharding.device_set) for x in jax.tree.leaves(nnx.state(m))} for m in loaded]
    assert sets == [{1}, {8}]


# ---- bad input


def test_bad_input_is_one_line(run_folder, tmp_path):
    """Beside that of test_bad_input.py."""
    here = {"ckpt": str(run_folder), "prompt": "x"}
    refused("--show_steps writes between the lines of --json", **here, json=True, show_steps=True)
    refused("--temperature=0 generates the same text 3 times", **here, n=3, temperature=0.0)
    refused("--check needs --prompt or --file", check=True, ckpt=str(run_folder))
    refused("no >>> examples that can be run", **here, check=True)
    refused("--suffix follows --prompt", suffix="x", file="x.jsonl")
    refused("none.jsonl", file=str(tmp_path / "none.jsonl"))


# ---- drafts in a terminal

COLOUR = re.compile(r"\x1b\[38;5;(\d+)m(.*?)\x1b\[39m", re.DOTALL)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def in_a_terminal(monkeypatch, script, config):
    """What a script writes to a terminal."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Terminal())
        script.main(config)
        return sys.stdout.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[\d;]*[mHJ]", "", text)


@pytest.mark.slow
def test_drafts_and_probabilities_are_shown_in_colours(run_folder, capsys, monkeypatch):
    # what is right for each token: one pass over the whole text
    model, _ = checkpoints.load(pc, run_folder)
    tokenizer = Tokenizer.from_file(str(run_folder / "tokenizer.json"))
    prompt = tokenizer.encode("def f(x):\n").ids
    rule = pc.Sampling(vocab=tokenizer.get_vocab_size(), eos_ids=(0,))
    (new,), stats = pc.generate(model, [prompt], 12, rule, jax.random.key(0))
    ids = jnp.asarray([prompt + new])
    prob_LV = jax.nn.softmax(model.logits(model.hidden(model.lookup(ids))))[0]
    want = ""
    for i, (token, piece) in enumerate(zip(new, prompts.pieces(tokenizer, new), strict=True)):
        tenth = min(int(10 * prob_LV[len(prompt) + i - 1, token]), 9)
        want += generate.coloured(piece, generate.SHADES[tenth])

    settings = {"prompt": "def f(x):\n", "max_new": 12, "devices": 1, "show_steps": True}
    settings |= {"temperature": 0.0, "no_repeat_ngram": 0, "ckpt": str(run_folder)}
    shown = in_a_terminal(monkeypatch, generate, generate.Config(**settings))
    streamed, by_probability = shown.split("---- by probability\n")
    generate.main(generate.Config(**settings))
    piped = capsys.readouterr().out
    assert "\x1b" not in piped
    assert plain(streamed) == piped
    assert by_probability.rstrip("\n") == want.rstrip("\n")
    colours = [int(colour) for colour, _ in COLOUR.findall(streamed)]
    assert {*colours} <= {generate.GREEN, generate.RED}
    # behind the last there may be no room for another token
    assert stats["accepted"] - colours.count(generate.GREEN) in (0, 1)


def test_drafts_are_told_by_the_tokens_of_each_pass():
    rule = pc.Sampling(eos_ids=(9,))
    green, red = generate.GREEN, generate.RED
    colours = generate.draft_colours([1, 2, 4, 5, 6], [1, 2, 3, 4, 5, 6], rule, 6)
    assert colours == [None, red, green, None, red, None]
    # behind the end is no room
    colours = generate.draft_colours([1, 3, 4, 4], [1, 2, 3, 9], rule, 6)
    assert colours == [None, green, None, None]
    rule = pc.Sampling(eos_ids=(9,), speculate=False)
    assert generate.draft_colours([1, 2], [1, 2], rule, 6) == [None, None]


@pytest.mark.parametrize("script", ["generate.py", "generate_dream.py"])
def test_help_does_not_wait_for_jax(script, tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX is imported')")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "WORLD_SIZE": "2"}  # a cluster sets the second
    result = run(script, "--help", env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--max_new" in result.stdout
    assert "JAX is imported" in run(script, env=env).stderr  # after the flags the script goes on
