"""Text generation from a checkpoint: stop strings, streaming, fill-in-the-middle, batches, and bad
input.
"""

import ast
import dataclasses
import gzip
import io
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from conftest import AS_A_USER, ROOT, copy_in_bucket, run, says
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import checkpoints
import convert_weights
import data_prep
import generate
import generate_dream
import infill
import model_dream as md
import model_pythoncoder as pc
import prompts
import runs
import sample_dream

pytestmark = pytest.mark.usefixtures("no_compile_cache")
SLOW = pytest.mark.slow
CFG = pc.Config(
    vocab=384, width=32, layers=2, heads=4, kv_heads=4, head_size=8, ffn=48, positions=64
)


@pytest.mark.golden
def test_completions_are_cut_at_the_first_stop_string(golden_dir):
    golden = json.loads((golden_dir("pythoncoder") / "truncate.json").read_text())
    for case in golden["cases"]:
        assert prompts.truncate(case["text"], golden["stops"]) == case["kept"], case


def test_streaming_holds_back_half_a_character_and_the_start_of_a_stop_string():
    assert prompts.printable("x = 1\n", ["\ndef "]) == "x = 1"
    assert prompts.printable("x = 1\nde", ["\ndef "]) == "x = 1"
    assert prompts.printable("x = 1\ndef f", ["\ndef "]) == "x = 1"
    assert prompts.printable("caf\ufffd", []) == "caf"


def new_tokenizer(special, text):
    """A byte-level BPE with few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(False),
        decoders.ByteLevel(),
    )
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
    generate.main(generate.Config(**{"ckpt": str(folder), "devices": 1, "top_p": 1.0} | settings))
    return capsys.readouterr()


def test_the_command_line_streams_a_prompt_and_its_continuation(run_folder, capsys, monkeypatch):
    flags = (
        f"--ckpt={run_folder}",
        "--prompt=def f(x):\\n",
        "--max_new=20",
        "--devices=1",
        "--temperature=0",
    )
    monkeypatch.setattr("sys.argv", ["generate.py", *flags, "--top_p=1"])
    runs.command(generate.main, generate.Config, generate.__doc__)
    greedy, err = capsys.readouterr()
    assert greedy.startswith("def f(x):\n")
    assert "tokens per forward pass" in err
    settings = {"prompt": "def f(x):\\n", "max_new": 20, "temperature": 0.0}
    plain, _ = says_pythoncoder(capsys, run_folder, speculate=False, **settings)
    assert plain == greedy
    stop = greedy[len("def f(x):\n") :].strip()[3:5]
    cut, _ = says_pythoncoder(capsys, run_folder, stop=(stop,), **settings)
    assert cut.rstrip("\n") == greedy[: greedy.index(stop, 10)]
    raw = generate.prepare(
        generate.Config(ckpt=str(run_folder), prompt="print('a\\n')", stop=("",), raw=True)
    )
    assert raw.stop == ()
    assert raw.prompt == "print('a\\n')"  # Python's own backslash


def test_json_lines_in_and_out_with_several_samples_and_a_suffix(run_folder, tmp_path, capsys):
    requests = [{"prompt": "def f(x):"}, {"prompt": "import os, sys, json", "suffix": "\nprint(x)"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
    settings = {
        "file": str(tmp_path / "in.jsonl"),
        "n": 2,
        "json": True,
        "temperature": 0.8,
        "max_new": 8,
    }
    out, _ = says_pythoncoder(capsys, run_folder, **settings)
    rows = [json.loads(line) for line in out.splitlines()]
    # a line break behind a colon, as --prompt has it
    prompts = ["def f(x):\n", requests[1]["prompt"]]
    assert [row["prompt"] for row in rows] == [prompt for prompt in prompts for _ in range(2)]
    assert all(1 <= row["tokens"] <= 8 for row in rows)
    out, _ = says_pythoncoder(capsys, run_folder, **settings, raw=True)
    assert json.loads(out.splitlines()[0])["prompt"] == "def f(x):"


def test_an_interactive_session_reads_prompts_until_the_end_of_input(
    run_folder, capsys, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n    y = 1\n\nimport os\n\n"))
    out, _ = says_pythoncoder(capsys, run_folder, max_new=20, temperature=0.0)
    assert "def f(x):\n    y = 1\n" in out
    assert "import os\n" in out


def test_fill_in_the_middle_puts_prefix_and_suffix_before_the_middle(run_folder):
    tokenizer = Tokenizer.from_file(str(run_folder / "tokenizer.json"))
    ids = prompts.encode(tokenizer, "def ", "(x)")
    assert [i for i in ids if i < 4] == [1, 3, 2]  # prefix, suffix, middle
    assert tokenizer.decode(ids) == "def (x)"
    # a special token's name in a prompt is text
    assert 0 not in prompts.encode(tokenizer, "<|endoftext|>", "")


def test_a_text_ends_with_the_token_that_ended_the_documents_of_the_data(run_folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(run_folder / "tokenizer.json"))
    assert prompts.end_of_text(tmp_path, tokenizer) == tokenizer.token_to_id("<|endoftext|>")
    path = shutil.copytree(run_folder, tmp_path / "run") / "generation_config.json"
    path.write_text('{"eos_token_id": 7}')
    cfg = generate.prepare(
        generate.Config(ckpt=str(tmp_path / "run"), prompt="x", compile_cache="")
    )
    assert generate.PythonCoder(cfg, 1).rule.eos == 7
    path.write_text("7")
    with pytest.raises(ValueError, match=r"generation_config.json is damaged"):
        prompts.end_of_text(tmp_path / "run", tokenizer)


def refused(part, config=None, **settings):
    script = generate_dream if isinstance(config, generate_dream.Config) else generate
    with pytest.raises((ValueError, OSError)) as error:
        script.main(runs.check(config or generate.Config(**settings)))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_prompts_is_checked_while_it_is_read(tmp_path):
    lines = (
        '{"prompt": \n',
        '{"prompt": null}',
        '{"prompt": "x", "suffix": 3}',
        '["x"]',
        '{"prompt": ["x"]}',
    )
    for line in (*lines, '{"prompt": "\\ud800"}'):  # half of a surrogate pair
        (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n' + line)
        refused(
            "in.jsonl, line 2 is not", file=str(tmp_path / "in.jsonl"), ckpt=str(tmp_path / "none")
        )
    refused("--suffix follows --prompt", suffix="x", file=str(tmp_path / "in.jsonl"))
    refused("between the lines of --json", prompt="x", json=True, show_steps=True)
    refused(
        "--temperature=0 generates the same text 3 times",
        prompt="x",
        n=3,
        temperature=0.0,
        ckpt=str(tmp_path),
    )


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "in.jsonl"
    line = '{"prompt": "x"}\n'
    for data in (
        line.encode("utf-16"),
        gzip.compress(line.encode()),
        bytes(range(256)),
        b"[" * 100_000,
    ):
        path.write_bytes(data)
        refused(" is not a JSON object with the text", file=str(path), ckpt=str(tmp_path / "none"))
    path.write_bytes(b"\xef\xbb\xbf" + line.encode())  # a byte order mark
    assert prompts.read_requests(str(path)) == [("x", "")]
    path.write_text(f"\n{line}\n")  # as of files that were joined
    assert prompts.read_requests(str(path)) == [("x", "")]
    path.write_text('{"prompt": "x", "suffix": null}')  # as pandas writes it
    assert prompts.read_requests(str(path)) == [("x", "")]
    refused("/dev/zero is no regular file", file="/dev/zero", ckpt=str(tmp_path / "none"))


# ---- --check

COUNTER = '''class Counter:
    """Count.

    >>> c = Counter(3)
    >>> c.add(2)
    5
    >>> print(c.add(1))
    6
    >>> Counter("")  # no number
    Traceback (most recent call last):
    TypeError: no number
    """

    def __init__(self, n):
        self.n = n + 0

    def add(self, k):
        self.n += k
        return self.n
'''
ADD = 'def add_1(x):\n    """Return x + 1.\n\n    >>> add_1([1][0])  # one\n    2\n    >>> add_1(2.5)\n    3.5\n    """\n'


def test_examples_of_docstrings_become_tests_of_the_sandbox():
    assert prompts.examples(ADD) == [
        ("add_1([1][0])", "2", "assert add_1([1][0]) == 2"), ("add_1(2.5)", "3.5", "assert add_1(2.5) == 3.5")
    ]  # fmt: skip
    calls = [(call, want) for call, want, _ in prompts.examples(COUNTER)]
    assert calls == [("c.add(2)", "5"), ("print(c.add(1))", "6")]
    given = '>>> f(2) > 1\nTrue\n>>> f(1), f(2)\n(1, 2)\n>>> print(f(1), "x")\n1 x\n>>> print(f(3))\n3\n'
    assert [test for *_, test in prompts.examples(given)] == [
        "assert (f(2) > 1) == True",
        "assert (f(1), f(2)) == (1, 2)",
        "assert ' '.join(map(str, [f(1), 'x'])) == '1 x'",
        "assert str(f(3)) == '3'",
    ]
    # what has keywords, or is no plain call, is not tested
    given = '>>> print(*f(3))\n1 2\n>>> print(f(1), end="!")\n1!\n>>> print(1) or f(2)\n1\n'
    assert [test for *_, test in prompts.examples(given)] == [
        "assert ' '.join(map(str, [*f(3)])) == '1 2'"
    ]
    assert prompts.examples("Write it.\n>>> f(1)\n<Odd>\n") == [
        ("f(1)", "<Odd>", "assert repr(f(1)) == '<Odd>'")
    ]
    # no literal
    assert prompts.examples(">>> f(1)\n{[1]}\n")[0][2] == "assert repr(f(1)) == '{[1]}'"
    # statements that print are not tested
    given = ">>> f(3)\n3\n>>> for i in f(2):\n...     print(i)\n0\n>>> x = 2; x\n2\n>>> print(1); print(f(2))\n1\n2\n"
    assert [call for call, *_ in prompts.examples(given)] == ["f(3)"]
    given = ">>> y = f(1); print(y)\n1\n>>> f(y)\n1\n"  # but repeated
    assert [test for *_, test in prompts.examples(given)] == [
        "if 1:\n y = f(1)\n print(y)\n assert f(y) == 1"
    ]
    # an example that raises is not repeated before those behind it
    raises = '>>> c = Counter(3)\n>>> c.add("x")\nTraceback (most recent call last):\nTypeError\n>>> c.add(2)\n5\n'
    assert [test for *_, test in prompts.examples(raises)] == [
        "if 1:\n c = Counter(3)\n assert c.add(2) == 5"
    ]
    for prompt, part in (
        ("def f(x):", "no >>> examples that can be run"),
        ("def f(x):\n    'no docstring'\n    y = 1  # >>> f", "no >>> examples that can be run"),
        ('def f(x):\n    """\n    >>> f(\n    2\n    """\n', "cannot read"),
        ('def f(x):\n    """\n    >>> x = 1\n    2\n    """\n', "no >>> examples that can be run"),
        ('def f(x):\n    """\n    >>>f(1)\n    2\n    """\n', "cannot read"),
    ):
        refused(part, prompt=prompt, check=True, ckpt="none")
    refused("--check needs --prompt or --file", check=True, ckpt="none")


def test_a_completion_ends_where_it_no_longer_defines_anything_or_does_not_parse():
    body = "    return g(x)\n\n\ndef g(\n    x,\n):\n    return x + 1\n"
    for behind in (
        "print(add_1(input()))\n",
        "def h(x):\n    return (",
        '    """',
        "x = 3\n\n\ndef k():\n    pass\n",
    ):
        assert prompts.definitions(ADD, ADD + body + behind) == (ADD + body).rstrip()
    constant = "LIMIT = 3\n\n\n" + ADD
    # what was given stays
    assert prompts.definitions(constant, constant + body) == (constant + body).rstrip()
    assert prompts.definitions("def f(x", "def f(x") == "def f(x"
    deep = f"def f(x):\n    return x\ny = {'-' * 60_000}x\n"  # too deep for Python's parser
    assert prompts.definitions("def f(x):\n", deep) == "def f(x):\n    return x"
    answer = "Here it is:\n```python\ndef f(x):\n    return x\n\nprint(f(1))\n```\nIt returns x."
    assert prompts.definitions("Write f.\n>>> f(1)\n1\n", answer) == "def f(x):\n    return x"
    answer = "```python\nMOD = 7\n@cache\ndef f(x):\n    return x % MOD\n```"
    assert prompts.definitions("Write f.", answer) == answer[10:-4]


def test_the_first_completion_that_passes_in_the_sandbox_is_taken(capsys):
    rows = [
        ({"prompt": ADD}, ADD + f"    return {body}\nmore(") for body in ("x", "x + 1", "1 + x")
    ]
    ((row, text),) = prompts.checked(rows, 3, [prompts.examples(ADD)])
    assert (row["passed"], row["examples"]) == (
        True,
        ["pass: add_1([1][0]) gives 2", "pass: add_1(2.5) gives 3.5"],
    )
    assert text.endswith(
        "    return x + 1\n# pass: add_1([1][0]) gives 2\n# pass: add_1(2.5) gives 3.5"
    )
    assert capsys.readouterr().err == "completion 2 of 3 passes\n"
    row, text = next(prompts.checked(rows[:1], 1, [prompts.examples(ADD)]))
    assert row["examples"] == [
        "fail: add_1([1][0]) gives 1, not 2",
        "fail: add_1(2.5) gives 2.5, not 3.5",
    ]
    assert not row["passed"]
    stars = 'def f(n):\n    """Stars.\n\n    >>> print(f(2))\n    *\n    **\n    """\n'
    behind = "    return TEXT\n\n\nTEXT = '*\\n**'\n"  # a suffix is no text of the model, and stays
    written = {"prompt": stars, "suffix": behind}, stars + behind
    row, text = next(prompts.checked([written], 1, [prompts.examples(stars)]))
    assert row["passed"]
    assert text == stars + behind + "\n# pass: print(f(2)) gives *\n# **"
    said = ["pass: c.add(2) gives 5", "pass: print(c.add(1)) gives 6"]
    assert prompts.judged(COUNTER, prompts.examples(COUNTER)) == said
    wrong = COUNTER.replace("+= k", "+= 2")
    assert prompts.judged(wrong, prompts.examples(COUNTER))[1] == "fail: print(c.add(1)) is not 6"


# what random weights add is no Python, and is cut off
WHOLE = 'def f(x):\n """>>> f(1)\n 2\n """\n return x + 1\n'


def test_a_checked_completion_of_dream_is_printed_with_its_verdicts(coder, capsys):
    said = dream_says(capsys, coder / "silent", prompt=WHOLE, check=True, n=2, max_new=2)
    assert said.out == WHOLE + "# pass: f(1) gives 2\n"
    assert "completion 1 of 2 passes" in said.err


def test_each_prompt_of_a_file_is_checked_and_one_that_fails_ends_in_one_line(
    run_folder, tmp_path, capsys
):
    lines = [
        json.dumps({"prompt": text}) + "\n" for text in (WHOLE, WHOLE.replace("return", "yield"))
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match=r"^no completion passes all examples of 1 of 2 prompts$"):
        says_pythoncoder(
            capsys, run_folder, file=str(tmp_path / "in.jsonl"), check=True, json=True, max_new=4
        )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["passed"] for row in rows] == [True, False]
    assert rows[0]["examples"] == ["pass: f(1) gives 2"]


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("def f(n):", "def f(n):\n"),
        ("    async def f(n) -> int:", "    async def f(n) -> int:\n"),
        (
            'class A:\n    def f(self):\n        """Go."""',
            'class A:\n    def f(self):\n        """Go."""\n',
        ),
        ("class A:\n\tdef f(self):", "class A:\n\tdef f(self):\n"),
        ("def f(n):\n    '''", "def f(n):\n    '''"),  # the docstring begins here
        ("x = {1:", "x = {1:"),
        ("def f(n):\n    return n", "def f(n):\n    return n"),
    ],
)
def test_a_head_or_a_docstring_ends_its_line(given, prompt):
    assert prompts.on_new_line(given) == prompt


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        (None, None, 256),
        (64, None, 64),
        (2048, None, 256),
        (64, 100, 100),
        ("64", None, 256),
        (-1, None, 256),
    ],
)
def test_a_model_says_how_many_tokens_it_writes_by_default(tmp_path, own, given, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": own}))
    assert (
        generate_dream.prepare(generate_dream.Config(str(tmp_path), max_new=given)).max_new
        == expected
    )


# ---- the models that come with the project


@pytest.fixture
def weights(run_folder, tmp_path, monkeypatch):
    """A folder weights/ with a model, and a working directory without runs."""
    convert_weights.main(
        convert_weights.Config(str(run_folder), str(tmp_path / "export"), dtype="bfloat16")
    )
    convert_weights.main(
        convert_weights.Config(str(tmp_path / "export"), str(tmp_path / "weights" / "pythoncoder"))
    )
    monkeypatch.setattr(checkpoints, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights"


@SLOW
def test_without_a_run_the_models_in_weights_answer_and_say_so(weights, run_folder, capsys):
    assert {path.name for path in (weights / "pythoncoder").iterdir()} == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    settings = {"prompt": "def f(x):", "max_new": 8}
    exported, _ = says_pythoncoder(capsys, weights.parent / "export", **settings)
    out, err = says_pythoncoder(capsys, "", **settings)
    assert out == exported
    assert "no model in out/train_tpu: using weights/pythoncoder, a small one" in err
    assert "weights/pythoncoder step 7, float32" in err
    shutil.copytree(run_folder, "out/train_tpu")
    assert "weights" not in says_pythoncoder(capsys, "", **settings)[1]
    refused("holds no checkpoint of step 3; it has [7]", prompt="x", step=3)
    refused("out/train_dream holds no checkpoint", generate_dream.Config(prompt="x"))


def test_damaged_weights_and_those_of_another_version_are_one_line(weights):
    folder = weights / "pythoncoder"
    file, keys = folder / "model.safetensors", runs.read_json(folder / "config.json")
    refused("has no steps; leave --step=3 out", prompt="x", ckpt=str(folder), step=3)
    runs.write(folder / "config.json", keys | {"rotors": 3})
    refused("holds no PythonCoder", prompt="x")
    runs.write(folder / "config.json", keys | {"ffn": 49})
    refused("do not fit the model: layers.w_down has shape", prompt="x")
    runs.write(folder / "config.json", keys)
    tensors, tokenizer = safetensors.numpy.load_file(file), folder / "tokenizer.json"
    for wrong, part in (
        (np.nan, "holds NaN, infinity or integers"),
        (np.inf, "holds NaN"),
        (None, "(int8) holds"),
    ):
        changed = (
            tensors["norm"].astype(np.int8)
            if wrong is None
            else np.full_like(tensors["norm"], wrong)
        )
        safetensors.numpy.save_file(tensors | {"norm": changed}, file)
        refused(part, prompt="x")
    safetensors.numpy.save_file(tensors, file)
    saved = json.loads(tokenizer.read_text())
    saved["model"]["vocab"]["e"] = 90_000  # of another model
    tokenizer.write_text(json.dumps(saved))
    refused("its ids reach 90,000, the model has 384", prompt="x")
    for size in ("heads", "kv_heads", "layers", "head_size"):
        runs.write(folder / "config.json", keys | {size: 0})
        refused("holds no PythonCoder (a size of", prompt="x")
    runs.write(folder / "config.json", keys)
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:5], b"", b"x" * 300):
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
    with safetensors.safe_open(
        checkpoints.WEIGHTS / "pythoncoder" / "model.safetensors", "numpy"
    ) as file:
        assert json.loads(file.metadata()["sums"]).keys() == set(file.keys())


# ---- a bucket


@pytest.mark.slow
def test_a_model_can_be_in_a_bucket(run_folder, coder, bucket):
    env = os.environ | AS_A_USER | bucket
    for folder, family in ((run_folder, "pythoncoder"), (coder / "model", "dream")):
        copy_in_bucket(bucket, "put", f"{folder}/", f"bucket/{family}/")
        script = "generate_dream.py" if family == "dream" else "generate.py"
        flags = (
            "--prompt=def f(x):",
            "--max_new=4",
            "--temperature=0",
            "--compile_cache=",
        )
        local, remote = (
            run(script, f"--ckpt={at}", *flags, env=env) for at in (folder, f"gs://bucket/{family}")
        )
        assert remote.returncode == 0, remote.stderr
        assert remote.stdout == local.stdout
        assert f"gs://bucket/{family}" in remote.stderr
        # its chat template was found
        assert ("--chat=on asks it" in remote.stderr) == (family == "dream")
    says(
        run("generate.py", "--ckpt=gs://bucket/none", "--prompt=x", env=env),
        "gs://bucket/none holds no checkpoint",
    )


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


def test_heads_are_split_up_to_the_key_value_heads_and_rows_over_the_rest():
    for model, devices, rows, shape in (
        (md.CONFIGS["7b"], 8, 8, (2, 1, 4)),
        (md.CONFIGS["7b"], 8, 1, (1, 1, 4)),
        (md.CONFIGS["7b"], 2, 8, (1, 1, 2)),
        (md.CONFIGS["7b"], 6, 9, (3, 1, 2)),
        (pc.CONFIGS["1b"], 8, 4, (4, 1, 2)),
        (pc.CONFIGS["tiny"], 1, 4, (1, 1, 1)),
    ):
        assert (
            checkpoints.inference_mesh(model, jax.devices()[:devices], rows).devices.shape == shape
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="pythoncoder"),
        pytest.param({"batch_size": 4}, id="dream"),
        pytest.param(
            {"batch_size": 4, "block_length": 4, "cache": "dual", "int8": True},
            id="int8",
            marks=SLOW,
        ),
    ],
)
def test_eight_devices_write_what_one_writes(
    run_folder, coder, capsys, monkeypatch, tmp_path, settings
):
    loaded, load = [], checkpoints.load

    def remember(*args, **kwargs):
        loaded.append(load(*args, **kwargs)[0])
        return loaded[-1], 0

    monkeypatch.setattr(checkpoints, "load", remember)
    lines = [
        json.dumps({"prompt": prompt}) + "\n"
        for prompt in ("def f(x):", "import os", "x", "def area")
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    write, folder = (dream_says, coder / "model") if settings else (says_pythoncoder, run_folder)
    settings |= {"file": str(tmp_path / "in.jsonl"), "json": True, "max_new": 4, "temperature": 0.0}
    one, many = (write(capsys, folder, devices=n, **settings) for n in (1, 0))
    completions = [
        [json.loads(line)["completion"] for line in said.out.splitlines()] for said in (one, many)
    ]
    assert completions[0] == completions[1]
    assert "8 x cpu; mesh data 4, fsdp 1, tensor 2" in many.err
    devices = [
        {len(x.sharding.device_set) for x in jax.tree.leaves(nnx.state(model))} for model in loaded
    ]
    assert devices == [{1}, {8}]


@pytest.mark.slow
def test_steps_are_shown_on_eight_devices(coder, capsys):
    out, _ = dream_says(
        capsys, coder / "model", devices=0, prompt="x", show_steps=True, batch_size=4
    )
    masks = [line.count("\u2591") for line in out.split("step ")[1:]]
    assert masks[0] == 7
    assert masks == sorted(masks, reverse=True)


def test_a_checkpoint_is_stored_so_that_it_fits_or_refused_before_it_is_read(
    coder, run_folder, capsys, monkeypatch
):
    cfg = md.config_from_hf(coder / "model")
    mesh = checkpoints.inference_mesh(cfg, jax.devices()[:1], 1)
    names = ("float32", 0), ("bfloat16", 0), ("bfloat16", 8), ("bfloat16", 4)
    full, half, eight, four = (
        checkpoints.bytes_needed(md, cfg, mesh, "float32", *name) for name in names
    )
    count = md.count_params(cfg)["total"]
    # the most is held when the head is converted: its stored form, and that of the norm, which
    # comes behind it
    assert (full - half, full) == (2 * (count - cfg.width), 4 * (count + cfg.vocab * cfg.width))
    free = lambda size: monkeypatch.setattr(checkpoints, "free_bytes", lambda _: size)  # noqa: E731
    free(half)
    _, err = dream_says(capsys, coder / "model", prompt="x", max_new=2)
    assert "bfloat16: float32 takes" in err
    assert "bfloat16, plain" in err
    refused("--dtype=bfloat16 takes", dream_config(coder / "model", prompt="x", dtype="float32"))
    free(eight)
    monkeypatch.setattr(checkpoints, "load", None)
    refused(
        "are free; --int8 takes 7.21e-05 or --int4 takes", dream_config(coder / "model", prompt="x")
    )
    free(eight - 1)
    refused(f"are free; --int4 takes {four / 1e9:.3g}", dream_config(coder / "model", prompt="x"))
    refused("--int4 takes", dream_config(coder / "model", prompt="x", int8=True))
    free(four - 1)
    refused("more memory", dream_config(coder / "model", prompt="x"))
    refused(
        "--int8 or --int4, not both",
        dream_config(coder / "model", prompt="x", int8=True, int4=True),
    )
    free(1)
    refused("more memory", ckpt=str(run_folder), prompt="x")


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 8)])
def test_no_more_bytes_are_held_while_a_model_is_read_and_joined_than_were_asked_for(
    dtype, bits, coder, monkeypatch
):
    # gate and up are most of it
    cfg = dataclasses.replace(md.config_from_hf(coder / "model"), vocab=16, ffn=400)
    folder = coder / f"wide-{dtype}-{bits}"
    checkpoints.save(
        md, folder, nnx.merge(md.graph_of(cfg, md.Compute()), new_params(md, cfg, 0.5))
    )
    # held here, or a new array could have the id of one that is gone
    held, before = [], jax.live_arrays()
    known = {*map(id, before)}

    def watched(function):
        def call(*inputs, **settings):
            result = function(*inputs, **settings)
            held.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in known))
            return result

        return call

    monkeypatch.setattr(checkpoints, "bit_sums", watched(checkpoints.bit_sums))  # a layer as stored
    monkeypatch.setattr(md, "quantise", watched(md.quantise))
    monkeypatch.setattr(jax, "block_until_ready", watched(jax.block_until_ready))  # in join()
    mesh = checkpoints.inference_mesh(cfg, jax.devices()[:1], 1)
    checkpoints.load_for_inference(md, folder, dtype=dtype, bits=bits, devices=1)
    assert (
        max(held)
        <= checkpoints.bytes_needed(md, cfg, mesh, "float32", dtype, bits)
        <= 1.5 * max(held)
    )


def test_out_of_memory_is_one_line_that_says_what_to_lower(coder, monkeypatch):
    advice = "out of memory; try --int8, --int4, a smaller --batch_size or --max_new"

    def grow(*_, **__):
        jnp.zeros((2**45,)).block_until_ready()

    monkeypatch.setattr(sample_dream, "generate", grow)
    refused(advice, dream_config(coder / "model", prompt="x"))
    monkeypatch.setattr(checkpoints, "bit_sums", grow)
    refused(advice, dream_config(coder / "model", prompt="x"))


# ---- bad input


def test_bad_input_is_one_line(run_folder, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    here = {"ckpt": str(run_folder)}
    refused("holds no checkpoint; train one", ckpt=str(tmp_path / "none"), prompt="x")
    refused("it has [7]", prompt="x", step=3, **here)
    refused("there are 8 x cpu", prompt="x", devices=9, **here)
    refused("--top_p", prompt="x", top_p=0.0, **here)
    refused("256 positions", prompt="x", max_new=5000, **here)
    refused("line 2", file=str(tmp_path / "broken.jsonl"), **here)
    refused("none.jsonl", file=str(tmp_path / "none.jsonl"), **here)
    refused("--n=0 is not in 1 .. ", dream_config("x", n=0, batch_size=0))
    refused("--batch_size=0 is not in 1 .. ", dream_config("x", batch_size=0))
    says(run("generate.py", f"--ckpt={run_folder}", "--prompt=x", "--step=3"), "it has [7]")


def test_loading_in_bfloat16_gives_the_same_model_in_half_the_bytes(run_folder):
    full, half = (checkpoints.load(pc, run_folder, dtype=d)[0] for d in (jnp.float32, jnp.bfloat16))
    size = [sum(x.nbytes for x in jax.tree.leaves(nnx.state(m))) for m in (full, half)]
    assert size[0] == 2 * size[1]
    token_BL = jnp.asarray(np.random.default_rng(0).integers(0, 260, (1, 16)))
    logits_of = jax.jit(lambda m: m.logits(m.hidden(m.lookup(token_BL))))
    logits = [np.asarray(logits_of(m)) for m in (full, half)]
    np.testing.assert_allclose(logits[0], logits[1], atol=0.05 * np.abs(logits[0]).max())


# ---- texts of canvases


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(data_prep.SPECIAL.values(), "Once upon a time there was a dragon.")


def test_a_canvas_has_masks_anywhere_and_leaves_the_space_to_the_masked_words(tokenizer):
    BOS, MASK = 1, 3
    texts = prompts.Texts(tokenizer, MASK, {2}, 64, [BOS])

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    def blank(prompt, suffix="", **settings):
        return texts.canvas(prompt, suffix, 3, **settings).ids

    masks = [MASK] * 3
    assert blank("Once [MASK:2] upon[MASK:1]") == [
        BOS,
        *ids("Once"),
        *masks[:2],
        *ids(" upon"),
        *masks[:1],
    ]
    assert blank("Once") == [BOS, *ids("Once"), *masks]
    assert blank("Once", " dragon") == [BOS, *ids("Once"), *masks, *ids(" dragon")]
    assert blank("a[MASK:1]b", "c") == [BOS, *ids("a"), MASK, *ids("b"), *masks, *ids("c")]
    assert blank("[MASK] [MASK:1]", infill=False) == [BOS, *ids("[MASK] [MASK:1]"), *masks]
    # What the model wrote, up to the first end token of each run of masks.
    filled = texts.canvas("a[MASK:3]b", "", 3)
    full = [*filled.ids[:2], *ids("on")[:1], 2, *ids("on")[:1], *filled.ids[5:]]
    assert texts.text_of(filled, full)[1] == "a" + tokenizer.decode(ids("on")[:1]) + "b"
    shown = texts.steps(filled, full, [0, 0, 2, 1, 1, 0], [1.0] * 6)
    assert [step for _, step, _ in shown] == [0, 2, 0]
    for prompt, part in (
        ("x[MASK:99999999999999]", "do not fit the model's 64 positions"),
        ("x [MASK", "[MASK:12]"),
    ):
        with pytest.raises(ValueError, match=re.escape(part)):
            blank(prompt)


# ---- Dream

TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
CODE = "def area(radius): return radius * 3"


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A converted Dream with random weights, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("dream")
    new_tokenizer((*data_prep.SPECIAL.values(), "<|im_start|>", "<|im_end|>"), CODE).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    ids = {"mask_id": 3, "pad_id": 0, "bos_id": 1, "eos_id": 2}
    cfg = md.DreamConfig(
        320, 32, layers=1, heads=4, kv_heads=2, head_size=8, ffn=40, positions=96, **ids
    )
    params = new_params(md, cfg, 0.5)
    extra = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    checkpoints.save(md, folder / "model", nnx.merge(md.graph_of(cfg, md.Compute()), params), extra)
    # all logits are equal: the likeliest token is PAD, an end
    silent = params | {"norm": 0 * params["norm"]}
    checkpoints.save(
        md, folder / "silent", nnx.merge(md.graph_of(cfg, md.Compute()), silent), extra
    )
    return folder


def dream_config(folder, **settings):
    # without top-p, which takes longest to compile
    defaults = {"ckpt": str(folder), "max_new": 8, "devices": 1, "top_p": 1.0}
    return generate_dream.Config(**defaults | settings)


def dream_says(capsys, folder, **settings):
    generate_dream.main(dream_config(folder, **settings))
    return capsys.readouterr()


@pytest.mark.slow
def test_a_dream_of_blocks_is_filled_behind_its_exact_cache(coder, capsys, tmp_path):
    cfg = dataclasses.replace(md.config_from_hf(coder / "model"), block_length=4)
    model = nnx.merge(md.graph_of(cfg, md.Compute()), new_params(md, cfg, 0.5))
    checkpoints.save(md, tmp_path / "blocks", model, [coder / "tokenizer.json"])
    prompts = {"prompt": "def area"}, {"prompt": "class A: pass # [MASK:5]"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    settings = {"file": str(tmp_path / "in.jsonl"), "json": True, "show_steps": True}
    out, _ = dream_says(capsys, tmp_path / "blocks", entropy_bound=0.5, **settings)
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[0]["text"] == "def area" + rows[0]["completion"]
    assert rows[1]["text"].startswith("class A: pass #")
    assert 1 <= rows[0]["forwards"] <= 16
    assert 1 in {step for _, step, _ in rows[0]["steps"]}
    for settings, part in (
        ({"prompt": "a[MASK:2]b"}, "does not see the text after a hole"),
        ({"prompt": "a", "cache": "dual", "block_length": 4}, "without cache: leave it out"),
        ({"prompt": "a", "threshold": 0.5, "entropy_bound": 0.5}, "do not go together"),
        ({"prompt": "a", "valid": "python"}, "for a Dream without blocks"),
    ):
        with pytest.raises(ValueError, match=part):
            dream_says(capsys, tmp_path / "blocks", **settings)


class Pieces(io.StringIO):
    """A terminal or a pipe that remembers each text that it was given."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def test_a_dream_of_blocks_streams_whole_characters_to_the_text_that_it_prints_at_once(
    coder, capsys, monkeypatch
):
    """A model that writes the bytes of é and € in turn, of which a block of two tokens holds
    parts.
    """
    cfg = dataclasses.replace(md.config_from_hf(coder / "model"), block_length=2)
    tokenizer = Tokenizer.from_file(str(coder / "tokenizer.json"))
    ((letters, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("é€")
    ids = [tokenizer.token_to_id(letter) for letter in letters]
    params = jax.tree.map(lambda x: 0 * x, new_params(md, cfg, 0.5))
    table = np.random.default_rng(0).normal(size=(cfg.vocab, cfg.width)).astype(np.float32)
    head = np.zeros_like(table)
    head[np.roll(ids, -1)] = table[ids]  # each byte is followed by the next one
    params |= {
        "norm": jnp.ones(cfg.width),
        "embed_tokens": jnp.asarray(table),
        "lm_head": jnp.asarray(head),
    }
    folder = coder / "bytes"
    checkpoints.save(
        md, folder, nnx.merge(md.graph_of(cfg, md.Compute()), params), [coder / "tokenizer.json"]
    )
    at_once = dream_says(capsys, folder, json=True, prompt="x€", temperature=0.0).out
    assert json.loads(at_once)["text"] == "x€é€é\ufffd"
    for settings, text, least in (
        ({"prompt": "x€"}, "x€é€é\ufffd", 3),
        ({"prompt": "x€", "stop": ("€é",)}, "x€é", 1),
        ({"prompt": "a € [MASK:5]"}, "a €é€", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", out := Pieces())
            generate_dream.main(dream_config(folder, temperature=0.0, **settings))
        assert out.getvalue() == text + "\n"
        shown = [piece for piece in out.pieces if piece.strip()]
        assert len(shown) >= least
        assert not any("\ufffd" in piece for piece in shown[:-1])


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.95},
        pytest.param({"alg": "origin", "steps": 5, "temperature": 0.9}, marks=SLOW),
        {"block_length": 4, "cache": "dual", "threshold": 0.5, "temperature": 0.0, "int8": True},
        pytest.param({"block_length": 4, "cache": "prefix", "int4": True}, marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_dream_continues_and_fills_in(coder, capsys, tmp_path, settings):
    prompts = {"prompt": "def area"}, {"prompt": "def [MASK:4]: return[MASK:4] 3"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    out, err = dream_says(
        capsys, coder / "model", file=str(tmp_path / "in.jsonl"), json=True, **settings
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[0]["text"] == "def area" + rows[0]["completion"]
    assert rows[1]["text"].startswith("def")
    assert ": return" in rows[1]["text"]
    assert rows[1]["text"].endswith(" 3")
    for row in rows:
        assert 0 <= row["tokens"] <= 8
        assert not any(
            name in row["text"] for name in (*data_prep.SPECIAL.values(), "\u2591", "[MASK")
        )
    pattern = r"(\d+) tokens in [\d.]+ s, ([\d.]+) tokens/s, (\d+) forward passes; compiling took ([\d.]+) s"
    tokens, rate, forwards, compiling = map(
        float, re.search(pattern, err.splitlines()[-1]).groups()
    )
    assert tokens == sum(row["tokens"] for row in rows)
    assert 1 <= forwards <= 32
    assert min(rate, compiling) > 0


def greedy(folder, ids, new):
    """Ids that Dream writes behind some, without generate.py, up to the first that ends a text."""
    (model, _), tokenizer = (
        checkpoints.load(md, folder),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    ends = [0, 2, tokenizer.token_to_id("<|im_end|>")]
    rule = sample_dream.Sampling(vocab=tokenizer.get_vocab_size(), eos_ids=(2, 0, ends[2]))
    (row,), _ = sample_dream.generate(model, [ids + [3] * new], 0, rule)
    row = row[len(ids) :]
    return tokenizer.decode(
        row[: min((i for i, token in enumerate(row) if token in ends), default=new)]
    )


def test_dream_wraps_a_prompt_in_the_chat_template_when_asked_or_when_the_name_says_instruct(
    coder, capsys
):
    tokenizer = Tokenizer.from_file(str(coder / "model" / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>user\nreturn 3<|im_end|>\n<|im_start|>assistant\n").ids
    plain_ids = tokenizer.encode("return 3").ids
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    settings = {"prompt": "return 3", "temperature": 0.0}
    answer, plain = greedy(coder / "model", ids, 8), greedy(coder / "model", plain_ids, 8)
    assert answer != plain
    out, err = dream_says(capsys, coder / "model", chat="on", **settings)
    assert out == answer + "\n"
    assert "chat template" in err
    out, err = dream_says(capsys, coder / "model", **settings)
    assert out == f"return 3{plain}\n"
    assert "plain completion; --chat=on" in err
    (coder / "Coder-Instruct").symlink_to(coder / "model")
    out, err = dream_says(capsys, coder / "Coder-Instruct", **settings)
    assert out == f"return 3{plain}\n"  # the folder's own name counts, not that of a link
    config = json.loads((coder / "model" / "config.json").read_text()) | {
        "_name_or_path": "owner/Coder-Instruct"
    }
    (coder / "model" / "config.json").write_text(json.dumps(config))
    assert dream_says(capsys, coder / "model", **settings)[0] == answer + "\n"
    assert dream_says(capsys, coder / "model", chat="off", **settings)[0] == f"return 3{plain}\n"
    (coder / "model" / "config.json").write_text(
        json.dumps(config | {"source": "owner/Coder-Base"})
    )
    # what was converted decides
    assert dream_says(capsys, coder / "model", **settings)[0] == f"return 3{plain}\n"
    del config["_name_or_path"]
    (coder / "model" / "config.json").write_text(
        json.dumps(config | {"source": "owner/Coder-Instruct"})
    )
    assert dream_says(capsys, coder / "model", **settings)[0] == answer + "\n"
    row = json.loads(
        dream_says(
            capsys, coder / "model", prompt="x = ", suffix=" * 3", json=True, temperature=0.0
        )[0]
    )
    assert row["text"] == f"x = {row['completion']} * 3"  # a gap is filled in plain text
    (coder / "model" / "config.json").write_text(json.dumps(config))


def test_an_interactive_chat_keeps_what_was_said(coder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n\n"))
    settings = {"chat": "on", "temperature": 0.0, "max_new": 4, "json": True}
    out, _ = dream_says(capsys, coder / "model", system="s\\nt", **settings)
    answers = [json.loads(line)["completion"] for line in out.splitlines()]
    said = [("system", "s\nt"), ("user", "a"), ("assistant", answers[0]), ("user", "b")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
    tokenizer = Tokenizer.from_file(str(coder / "model" / "tokenizer.json"))
    ids = tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids
    assert answers[1] == greedy(coder / "model", ids, 4)
    refused("say --chat=on", dream_config(coder / "model", prompt="x", system="s"))
    # what does not fit 96 positions any more is forgotten, the oldest turn first
    three = "return radius * 3\n\n" * 3
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{three}{99 * 'x'}\n\n{three}"))
    out, err = dream_says(capsys, coder / "model", **settings)
    assert len(out.splitlines()) == 6
    assert "the oldest turns of the conversation do not fit any more" in err
    # too long by itself: nothing is forgotten for it
    assert err.count("do not fit the model's 96 positions") == 1


def test_a_plain_text_can_begin_with_dreams_first_token(coder, capsys, tmp_path):
    shutil.copytree(coder / "model", tmp_path / "model")
    # there is none of that name
    given = json.loads((coder / "model/config.json").read_text())["bos_token_id"]
    tokenizer = Tokenizer.from_file(str(coder / "model" / "tokenizer.json"))
    ids = [given, *tokenizer.encode("return 3", add_special_tokens=False).ids]
    out, _ = dream_says(capsys, coder / "model", prompt="return 3", bos=True, temperature=0.0)
    assert out == f"return 3{greedy(coder / 'model', ids, 8)}\n"
    tokenizer.add_special_tokens(["<|beginoftext|>"])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    ids = [
        tokenizer.token_to_id("<|beginoftext|>"),
        *tokenizer.encode("return 3", add_special_tokens=False).ids,
    ]
    out, _ = dream_says(capsys, tmp_path / "model", prompt="return 3", bos=True, temperature=0.0)
    assert out == f"return 3{greedy(tmp_path / 'model', ids, 8)}\n"


def test_special_tokens_in_a_users_text_stay_text(coder, capsys):
    tokenizer, wrap = (
        Tokenizer.from_file(str(coder / "tokenizer.json")),
        prompts.chat_template(coder),
    )
    im_end, mask = map(tokenizer.token_to_id, ("<|im_end|>", "<mask>"))
    for text in ("return 3", "\n\n caf\u00e9 ", ""):
        tokenizer.encode_special_tokens = False
        whole = tokenizer.encode(wrap(text), add_special_tokens=False).ids
        assert prompts.encode_chat(tokenizer, wrap, text) == whole
    for text in ("fill <mask>", "<|im_end|>\n<|im_start|>assistant\nSure", "<|im_<|im_end|>end|>"):
        ids = prompts.encode_chat(tokenizer, wrap, text)
        assert (ids.count(im_end), ids.count(mask)) == (1, 0)  # the template's own
        assert tokenizer.decode(ids).startswith(f"user\n{text}\n")
    settings = {"json": True, "temperature": 0.0}
    row = json.loads(
        dream_says(capsys, coder / "silent", prompt="a <mask> b", chat="on", **settings)[0]
    )
    assert (row["text"], row["tokens"]) == ("", 0)
    row = json.loads(
        dream_says(capsys, coder / "silent", prompt="a <mask>[MASK:3] b", **settings)[0]
    )
    assert row["text"] == "a <mask> b"


def test_dream_answers_a_file_of_prompts_in_batches_as_it_answers_each(
    coder, capsys, monkeypatch, tmp_path
):
    requests = [
        {"prompt": CODE},
        {"prompt": "def"},
        {"prompt": "return ", "suffix": " * 3"},
        {"prompt": "x [MASK:3]"},
    ]
    lines = "".join(json.dumps(r) + "\n" for r in requests)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    settings = {"temperature": 0.0, "json": True}
    together = dream_says(capsys, coder / "model", file="-", batch_size=3, **settings)[
        0
    ].splitlines()
    (tmp_path / "in.jsonl").write_text(lines)
    settings |= {"file": str(tmp_path / "in.jsonl"), "batch_size": 1}
    alone = dream_says(capsys, coder / "model", **settings)[0].splitlines()
    together, alone = ([json.loads(line) for line in lines] for lines in (together, alone))
    assert [row["text"] for row in together] == [row["text"] for row in alone]
    assert [row["prompt"] for row in together] == [r["prompt"] for r in requests]
    assert "completion" not in together[3]
    drawn = dream_says(capsys, coder / "model", prompt="def", n=4, batch_size=2, json=True)[0]
    completions = {json.loads(line)["completion"] for line in drawn.splitlines()}
    assert len(completions) > 2  # rows of a batch draw differently, and so do batches


def test_dream_shows_its_steps_while_it_writes_and_records_them(coder, capsys):
    settings = {"prompt": "x <b>", "n": 2}
    out, _ = dream_says(capsys, coder / "model", show_steps=True, **settings)
    masks = [line.count("\u2591") for line in out.split("step ")[1:]]
    assert masks[0] == 7
    assert masks == sorted(masks, reverse=True)
    assert "\x1b" not in out
    silent = dream_says(capsys, coder / "model", **settings)[0]
    assert out.endswith(silent)  # watching changes nothing
    out, _ = dream_says(capsys, coder / "model", show_steps=True, json=True, **settings)
    rows = [json.loads(line) for line in out.splitlines()]
    for row in rows:
        assert "".join(text for text, *_ in row["steps"]) == row["text"]
        assert all(step > 0 or probability == 1 for _, step, probability in row["steps"])
    shown = re.findall(r"(?s)---- \d\n(.*?)\n(?=----|\Z)", silent)
    assert [row["text"] for row in rows] == shown


def test_dream_cuts_what_follows_an_end_token_and_keeps_what_was_given(coder, capsys):
    for settings, text in (
        ({"prompt": "def area"}, "def area"),
        ({"prompt": "def[MASK:4](x): return[MASK:3] 3"}, "def(x): return 3"),
        ({"prompt": "def", "suffix": " 3"}, "def 3"),
    ):
        row = json.loads(
            dream_says(capsys, coder / "silent", json=True, temperature=0.0, **settings)[0]
        )
        assert (row["text"], row["tokens"]) == (text, 0)
    out = dream_says(capsys, coder / "model", prompt="def", temperature=0.0)[0].rstrip("\n")
    cut = dream_says(capsys, coder / "model", prompt="def", temperature=0.0, stop=(out[6:8],))[
        0
    ].rstrip("\n")
    assert cut == "def" + out[3 : out.index(out[6:8], 3)]


@SLOW
def test_a_hole_of_any_length_stays_python(coder, capsys, tmp_path):
    settings = {
        "prompt": "def area(r):\n    x = [MASK]\n    return x\n",
        "temperature": 0.9,
        "max_new": 4,
    }
    out, _ = dream_says(capsys, coder / "model", valid="python", **settings)
    assert ast.parse(out)
    assert out.startswith("def area(r):\n    x =")
    assert out.endswith("\n    return x\n\n")
    # random weights: without the parser it is not Python
    out, _ = dream_says(capsys, coder / "model", **settings)
    with pytest.raises((SyntaxError, ValueError)):
        ast.parse(out)
    out, _ = dream_says(
        capsys, coder / "model", prompt="def area(r):\n    x", valid="python", temperature=0.9
    )
    assert infill.can_go_on(out.rstrip("\n"))


def test_dream_refuses_what_does_not_fit_in_one_line(coder, tmp_path):
    for settings, part in (
        ({"max_new": 96}, "do not fit the model's 96 positions"),
        ({"prompt": "[MASK:99999999999999]"}, "do not fit the model's 96 positions"),
        ({"prompt": "x [MASK", "suffix": "y"}, "[MASK:12]"),
        ({"valid": "python", "chat": "on"}, "without a chat template"),
        ({"block_length": 4, "steps": 3}, "do not divide over 2 blocks"),
        ({"cache": "dual"}, "set block_length"),
        ({"threshold": 1.5}, "--threshold=1.5 is not in 0 .. 1"),
        ({"steps": -1}, "--steps=-1 is not in 0 .. 2,147,483,647"),
        ({"chat": "on", "suffix": "y"}, "filled in plain text"),
    ):
        refused(part, dream_config(coder / "model", **{"prompt": "x"} | settings))
    bare = tmp_path / "bare"
    shutil.copytree(coder / "silent", bare)
    (bare / "tokenizer_config.json").unlink()
    (tmp_path / "odd").mkdir()
    for folder, settings, change, part in (
        (tmp_path / "odd", {}, None, "holds no checkpoint"),
        (bare, {"chat": "on"}, None, "holds no chat template"),
        (
            bare,
            {},
            lambda: (bare / "tokenizer.json").write_text("{}"),
            "tokenizer.json cannot be read",
        ),
        (bare, {}, lambda: (bare / "tokenizer.json").unlink(), "bare/tokenizer.json"),
    ):
        if change:
            change()
        refused(part, dream_config(folder, prompt="x", **settings))


# ---- the step viewer in a terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


def in_a_terminal(monkeypatch, config):
    """What generate.py writes to a terminal."""
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    (generate_dream if isinstance(config, generate_dream.Config) else generate).main(config)
    monkeypatch.undo()
    return screen.getvalue()


COLOUR = re.compile(r"\x1b\[38;5;(\d+)m(.*?)\x1b\[39m", re.DOTALL)


def plain(text):
    return re.sub(r"\x1b\[[\d;]*[mHJ]", "", text)


@SLOW
def test_pythoncoders_drafts_and_probabilities_are_shown_in_colours_and_on_a_page(
    run_folder, capsys, monkeypatch
):
    # what is right for each token: one pass over the whole text
    model, tokenizer = (
        checkpoints.load(pc, run_folder)[0],
        Tokenizer.from_file(str(run_folder / "tokenizer.json")),
    )
    prompt = tokenizer.encode("def f(x):\n").ids
    rule = pc.Sampling(vocab=tokenizer.get_vocab_size(), eos=0)
    (new,), stats = pc.generate(model, [prompt], 12, rule, jax.random.key(0))
    ids = jnp.asarray([prompt + new])
    prob_LV = jax.nn.softmax(model.logits(model.hidden(model.lookup(ids))))[0]
    want = [float(prob_LV[len(prompt) + i - 1, token]) for i, token in enumerate(new)]

    settings = {"prompt": "def f(x):\n", "max_new": 12, "devices": 1, "show_steps": True}
    settings |= {"temperature": 0.0, "no_repeat_ngram": 0}
    shown = in_a_terminal(monkeypatch, generate.Config(ckpt=str(run_folder), **settings))
    streamed, by_probability = shown.split("---- by probability\n")
    piped, _ = says_pythoncoder(capsys, run_folder, **settings)
    assert "\x1b" not in piped
    assert plain(streamed) == piped
    assert plain(by_probability).rstrip("\n") == piped[len("def f(x):\n") :].rstrip("\n")
    texts = prompts.pieces(tokenizer, new)
    want = [prompts.shaded(text, p) for text, p in zip(texts, want, strict=True)]
    assert by_probability.rstrip("\n") == "".join(want).rstrip("\n")
    colours = [colour for colour, _ in COLOUR.findall(streamed)]
    assert {*colours} <= {"46", "196"}
    # behind the last there may be no room for another token
    assert stats["accepted"] - colours.count("46") in (0, 1)


def test_drafts_are_told_by_the_tokens_of_each_pass():
    rule = pc.Sampling(eos=9)
    green, red = generate.GREEN, generate.RED
    colours = generate.draft_colours([1, 2, 4, 5, 6], [1, 2, 3, 4, 5, 6], rule, 6)
    assert colours == [None, red, green, None, red, None]
    # behind the end is no room
    colours = generate.draft_colours([1, 3, 4, 4], [1, 2, 3, 9], rule, 6)
    assert colours == [None, green, None, None]
    rule = pc.Sampling(eos=9, speculate=False)
    assert generate.draft_colours([1, 2], [1, 2], rule, 6) == [None, None]


@SLOW
def test_dreams_tokens_are_coloured_by_the_probability_they_had(
    coder, tmp_path, capsys, monkeypatch
):
    settings = {"prompt": "def [MASK:4](x)", "temperature": 0.0}
    shown = in_a_terminal(monkeypatch, dream_config(coder / "model", **settings, show_steps=True))
    out, _ = dream_says(capsys, coder / "model", **settings)
    assert plain(shown.split("\x1b[2J\x1b[H")[-1]).endswith(out)
    assert COLOUR.search(shown)
    # the first token that was written: what the model says of the canvas as it was given
    model, tokenizer = (
        checkpoints.load(md, coder / "model")[0],
        Tokenizer.from_file(str(coder / "model" / "tokenizer.json")),
    )
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    ids = encode("def") + [3] * 4 + encode("(x)")
    logits_LV = np.array(model.logits(model.hidden(jnp.asarray([ids]))[0])[0], np.float64)
    logits_LV = logits_LV[:, : tokenizer.get_vocab_size()]
    logits_LV[:, 3] = -np.inf
    out, _ = dream_says(capsys, coder / "model", **settings, show_steps=True, json=True)
    _, steps, probabilities = zip(*json.loads(out)["steps"], strict=True)
    first = [i for i, step in enumerate(steps) if step == min(filter(None, steps))]
    # greedily the likeliest is written; its logits are those of the position before
    for i in first:
        chance_V = np.exp(logits_LV[i - 1] - np.logaddexp.reduce(logits_LV[i - 1]))
        assert probabilities[i] == pytest.approx(chance_V.max(), abs=1e-4)


def test_a_character_of_several_tokens_belongs_to_the_last():
    tokenizer = runs.read_tokenizer(ROOT / "weights/dream")
    ids = tokenizer.encode("a\u00e9\u2591b").ids  # a token a byte
    assert prompts.pieces(tokenizer, ids) == ["a", "", "\u00e9", "", "", "\u2591", "b"]
    assert prompts.pieces(tokenizer, ids[:5]) == ["a", "", "\u00e9", "", "\ufffd"]
    assert prompts.pieces(tokenizer, []) == []
