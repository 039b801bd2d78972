"""Bad input to all scripts: one line on standard error that names it, an exit status that is not 0,
nothing written.

A process for each script imports it once, and forks for each case: what runs is the script, as from
a shell.
"""

import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import typing

import numpy as np
import pytest
import safetensors.numpy
from conftest import AS_A_USER, ROOT
from test_convert_weights import tokenizer_of, write_hub_folder

import convert_weights
import data_prep

pytestmark = pytest.mark.slow
DRIVER = """
import importlib, json, os, runpy, signal, sys
path = sys.argv[1]
sys.path.insert(0, os.path.dirname(path))
importlib.import_module(os.path.basename(path)[:-3])
for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(120)
        os.chdir(case["cwd"])
        for number, name in enumerate(("/dev/null", "../stdout", "../stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin, sys.argv = open(0), [path, *case["flags"]]
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# lines that are no error
ANNOUNCED = re.compile(r"\d+ x |--task=humaneval: |sandbox: |.* step \d+, float32$")


class Case(typing.NamedTuple):
    script: str
    flags: str  # {name} is a path of `inputs`, {bad} a damaged copy of it
    part: str  # of the line
    source: str = ""  # input that is damaged
    damage: typing.Callable | None = None  # of a copy


def table(heading):
    """The rows of a section of bad_input.txt, three columns each."""
    text = (ROOT / "tests" / "bad_input.txt").read_text()
    section = text.partition(f"# {heading}")[2].partition("\n\n#")[0]
    lines = section.partition("\n\n")[2].splitlines()
    return [[part.strip() for part in line.split(" | ", 2)] for line in lines]


def numbers():
    for script, names, values in table("Numbers"):
        before = "python " if script == "data_prep.py" else ""
        for name, value in itertools.product(names.split(), values.split()):
            between = " " if name in ("k", "reward_weights") else "="
            flags = f"{before}--{name}{between}{value}"
            yield Case(script, flags, f"--{name}={value.removesuffix('.0')}")


# ---- files that are no text ----------------------------------------------------------------------------------------

KINDS = {
    "utf16": '{"prompt": "x"}\n'.encode("utf-16"),
    "gzip": gzip.compress(b"hello"),
    "binary": bytes(range(256)) * 9,
    "deep": b"[" * 100_000,
    "nul": b"\0" * 5000,
}
PATHS = {"fifo": "{files}/fifo.txt", "zero": "/dev/zero", "gone": "{files}/gone.txt"}


def files():
    for script, flags, fine in table("Files"):
        for kind in sorted({*KINDS, *PATHS} - {*fine.split()}):
            path = PATHS.get(kind, f"{{files}}/{kind}.txt")
            part = path.rpartition("/")[2]
            if flags.startswith("text") and kind in KINDS:
                part = "1 binary"  # among others it would be left out
            if script != "extra/fetch_pypi.py" or kind != "zero":  # no name of a file there
                yield Case(script, flags.replace("{file}", path), part)


# ---- damaged folders -----------------------------------------------------------------------------------------------


def put(name, data):
    return lambda folder: (folder / name).write_bytes(
        data if isinstance(data, bytes) else json.dumps(data).encode()
    )


def keys(name, **changes):
    def damage(folder):
        found = json.loads((folder / name).read_bytes()) | changes
        (folder / name).write_text(
            json.dumps({key: value for key, value in found.items() if value is not None})
        )

    return damage


def cut(name, size=-100):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def without(name):
    return lambda folder: (folder / name).unlink()


def fifo(name):
    def damage(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def weights(change):
    """Other tensors in model.safetensors, or in the first of its shards."""

    def damage(folder):
        path = sorted(folder.glob("model*.safetensors"))[0]
        safetensors.numpy.save_file(
            {name: change(x) for name, x in safetensors.numpy.load_file(path).items()}, path
        )

    return damage


def of_all(damage):
    """Damage to each shard of the training rows."""

    def damage_all(folder):
        for path in (folder / "train").iterdir():
            damage(path.name)(path.parent)

    return damage_all


def far_id(folder):
    """A tokenizer whose last token has the id 90,000."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocab = saved["model"]["vocab"]
    vocab[next(name for name, i in vocab.items() if i == max(vocab.values()))] = 90_000
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def far_rows(folder):
    """Rows with an id past the vocabulary, whose hash is right."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    meta = json.loads((folder / "meta.json").read_text())
    for split in meta["splits"].values():
        for shard in split["shards"]:
            table = pq.read_table(folder / shard["file"])
            rows = np.array(table["input_ids"].to_pylist(), np.int32)
            rows[0, 3] = 90_000
            column = pa.FixedSizeListArray.from_arrays(rows.ravel(), rows.shape[1])
            pq.write_table(table.set_column(0, "input_ids", column), folder / shard["file"])
            shard["sha256"] = data_prep.sha256((folder / shard["file"]).read_bytes())
    (folder / "meta.json").write_text(json.dumps(meta))


def outside(folder):
    """An index that names a file of another folder."""
    shutil.copytree(folder, folder.parent / "other")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = min(index["weight_map"].values())
    index["weight_map"] = {
        name: f"../other/{file}" if file == first else file
        for name, file in index["weight_map"].items()
    }
    path.write_text(json.dumps(index))


def of_another(folder):
    (folder / "tokenizer.json").write_bytes(tokenizer_of({}, [f"word{i}" for i in range(5000)]))


nan = weights(lambda x: np.full_like(x, np.nan))
one_nan = weights(
    lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, np.nan, x).astype(x.dtype)
)
integers = weights(lambda x: np.ones(x.shape, np.int8))
ANY = "--ckpt={bad} --prompt=x --max_new=4"
MODELS = [  # script, flags, source, [(damage, part)]
    (
        "generate.py", ANY, "pythoncoder", [
            (of_another, "its ids reach 4,999, the model has 1,024"), (far_id, "its ids reach 90,000"),
            (nan, "holds NaN"), (one_nan, "holds NaN"),
            (integers, "int8"), (cut("model.safetensors"), "cannot be read"),
            (put("tokenizer.json", b"{"), "tokenizer.json cannot be read"),
            (without("tokenizer.json"), "put the tokenizer.json of the model there"),
            (fifo("tokenizer.json"), "is no regular file"), (without("config.json"), "/bad"),
            (keys("config.json", heads=0), "/bad"), (keys("config.json", kv_heads=0), "/bad"),
            (keys("config.json", width=0), "/bad"), (keys("config.json", layers=0), "/bad"),
            (keys("config.json", head_size=0), "/bad"), (keys("config.json", ffn=-1), "/bad"),
            (keys("config.json", vocab=0), "/bad"), (keys("config.json", positions=0), "/bad"),
            (keys("config.json", heads="four"), "/bad"), (keys("config.json", rotors=1), "holds no PythonCoder"),
            (put("config.json", b"[" * 100_000), "config.json is damaged"),
            (put("config.json", "x".encode("utf-16")), "config.json is damaged"),
            (fifo("config.json"), "/bad"),
        ],
    ),
    (
        "generate_dream.py", ANY, "dream", [
            (of_another, "its ids reach 4,999, the model has 300"), (far_id, "its ids reach 90,000"),
            (keys("config.json", num_attention_heads=0), "config.json"),
            (keys("config.json", num_key_value_heads=0), "config.json"),
            (keys("config.json", hidden_size=0), "config.json"),
            (keys("config.json", num_hidden_layers=0), "config.json"),
            (keys("config.json", vocab_size=0), "config.json"),
            (keys("config.json", num_attention_heads="four"), "config.json"),
            (put("meta.json", b"{"), "meta.json is damaged"), (keys("meta.json", sums={}), "cannot be read"),
            (put("tokenizer.json", b"\xff\xfe"), "tokenizer.json cannot be read"), (fifo("meta.json"), "/bad"),
        ],
    ),
    ("generate_dream.py", ANY, "dream_nan", [(lambda folder: None, "holds NaN")]),
    (
        "inference_jetson.py", "--bundle={bad} --prompt=x --max_new=4 --steps=2", "mdlm", [
            (of_another, "ids up to 4999"), (far_id, "ids up to 90000"), (nan, "NaN"), (integers, "scale"),
            (cut("model.safetensors"), "/bad"), (keys("config.json", heads=0), "0 heads"),
            (keys("config.json", heads=7), "7 heads"), (keys("config.json", width=64), "problems"),
            (keys("config.json", layers=9), "problems"), (put("config.json", b"[]"), "/bad"),
            (without("tokenizer.json"), "no tokenizer.json"),
        ],
    ),
    (
        "convert_weights.py", "--source={bad} --out=out", "hub", [
            (outside, "../other/model-00001-of-00003.safetensors"), (integers, "cannot be read"),
            (cut("model-00001-of-00003.safetensors"), "cannot be read"),
            (keys("config.json", num_attention_heads=0), "num_attention_heads is 0"),
            (keys("config.json", hidden_size=32), "do not fit the model"),
            (keys("config.json", vocab_size=None), "missing"),
            (put("model.safetensors.index.json", b"[1]"), "model.safetensors.index.json is damaged"),
            (put("model.safetensors.index.json", {}), "has no weight_map"), (far_id, "its ids reach 90,000"),
            (put("config.json", b"\xff"), "config.json is damaged"), (without("config.json"), "config.json"),
        ],
    ),
    ("export_jetson.py", "--ckpt={bad} --out=out", "mdlm", [
        (nan, "NaN"), (cut("model.safetensors"), "/bad"), (keys("config.json", heads=0), "0 heads"),
        (without("model.safetensors"), "model.safetensors"), (keys("config.json", width=64), "problems"),
        (without("tokenizer.json"), "holds no tokenizer.json; copy it again"),
    ]),
    *(
        (script, flags, source, [
            (far_rows, "holds ids that its tokenizer has not, up to 90000"),
            (of_all(cut), "corrupted"), (of_all(without), ".parquet"),
            (put("tokenizer.json", b"{}"), "tokenizer.json"), (put("meta.json", b"{"), "meta.json is damaged"),
            (without("tokenizer.json"), "prepare the data again"),
            (keys("meta.json", vocab_size=None), "meta.json is damaged"), (keys("meta.json", splits=[]), "damaged"),
            (without("meta.json"), "meta.json"), (fifo("meta.json"), "/bad"),
        ])
        for script, flags, source in (
            ("train_tpu.py", "--data={bad} --out=out --steps=1 --batch_size=2 --compile_cache=", "rows"),
            ("train_dream.py", "--data={bad} --out=out --steps=1 --batch_size=2 --compile_cache=", "rows"),
            ("train_gpu.py", "--data={bad} --out=out --steps=1 --batch_size=2 --no-compile", "padded"),
        )
    ),
]  # fmt: skip
CASES = [*numbers(), *files(), *itertools.starmap(Case, table("Settings"))]
CASES += [
    Case(script, flags, part, source, damage)
    for script, flags, source, table in MODELS
    for damage, part in table
]


# ---- good input, to be damaged -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, code_rows):
    """{name: path} of what the scripts read, all of it good but for `files`."""
    top = tmp_path_factory.mktemp("inputs")
    folder = top / "files"
    folder.mkdir()
    for name, data in KINDS.items():
        (folder / f"{name}.txt").write_bytes(data)
    os.mkfifo(folder / "fifo.txt")
    pairs = [{"prompt": f"add {i} and {i}: ", "response": f"{i + i}\n"} for i in range(300)]
    lines = {
        "pairs": pairs, "empty": [], "hollow": [{"prompt": "", "response": ""}] * 9,
        "tasks": [{"prompt": "def f(x):\n", "test_cases": ["assert f(1) == 1"]}],
        "samples": [{"task_id": "HumanEval/0", "completion": "    return x\n"}],
        "humaneval": [{"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Same."""\n', "entry_point": "f",
                       "canonical_solution": "    return x\n", "test": "def check(c):\n    assert c(1) == 1\n"}],
        "acecode": [{"id": str(i), "source": "x", "question": f"Add {i}.", "test_cases": ["assert f(1) == 1"],
                     "context_messages": [], "inferences": []} for i in range(200)],
    }  # fmt: skip
    found = {"files": folder, "rows": code_rows, "code": ROOT / "rows.py"}
    for name, rows in lines.items():
        found[name] = top / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("pythoncoder", "mdlm"):
        found[name] = ROOT / "weights" / name
    (top / "stories.txt").write_text(
        "<|endoftext|>".join(f"Once upon a time there were {i} dragons." for i in range(500))
    )
    settings = {"vocab_size": 300, "seq_len": 64, "heldout": 0.1, "workers": 1}
    data_prep.main(
        data_prep.Text(source=str(top / "stories.txt"), out=str(top / "padded"), **settings)
    )
    data_prep.main(
        data_prep.Pairs(source=str(found["pairs"]), out=str(top / "pairs_rows"), **settings)
    )
    write_hub_folder(top / "hub")
    convert_weights.main(convert_weights.Config(str(top / "hub"), str(top / "dream")))

    def spoil(tensors):
        tensors["model.norm.weight"][3] = np.nan

    write_hub_folder(top / "hub_nan", change=spoil)
    convert_weights.main(convert_weights.Config(str(top / "hub_nan"), str(top / "dream_nan")))
    return found | {
        name: top / name for name in ("padded", "pairs_rows", "hub", "dream", "dream_nan")
    }


@pytest.fixture(scope="module")
def drivers():
    """run(script, flags, cwd) -> exit status, in a child of a process that has imported the
    script.
    """
    processes, env = (
        {},
        os.environ | AS_A_USER | {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}

    def run(script, flags, cwd):
        if script not in processes:
            processes[script] = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(ROOT / script)], **pipes
            )
        process = processes[script]
        print(json.dumps({"flags": flags, "cwd": str(cwd)}), file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield run
    for process in processes.values():
        process.stdin.close()
        process.wait()


def test_there_are_hundreds_of_cases_and_all_scripts_are_among_them():
    assert len(CASES) >= 300
    scripts = {path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text()}
    scripts = {name for name in scripts if not name.startswith(("sandbox", "setup"))}
    assert {case.script for case in CASES if not case.script.startswith("extra/")} == scripts


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.script[:-3]} {case.flags} {case.part}"
)
def test_bad_input_is_one_line(case, inputs, drivers, tmp_path):
    cwd, bad = tmp_path / "cwd", tmp_path / "bad"
    cwd.mkdir()
    if case.source:
        shutil.copytree(inputs[case.source], bad)
        case.damage(bad)
    flags = [flag.format(bad=bad, **inputs) for flag in case.flags.split()]
    status = drivers(case.script, flags, cwd)
    said = (tmp_path / "stderr").read_text()
    assert status in (1, 2), (status, said, (tmp_path / "stdout").read_text())
    assert "Traceback" not in said, said
    assert case.part in said
    if status == 1:  # 2: tyro says it in a box, argparse after the usage
        lines = [line for line in said.splitlines() if not ANNOUNCED.match(line)]
        assert len(lines) == 1, said
    left = {
        path.name for path in cwd.rglob("*") if path.is_file() and not path.name.startswith(".lock")
    }
    # a trainer opens a shard where a step reads it: then its folder is there, without a checkpoint
    begun = {"config.json", "tokenizer.json", "generation_config.json"}
    assert left <= (begun if ".parquet" in said else set())
