"""The house in figures: how long, how dense and how connected the scripts are, and who may import whom.

Read from the source by `ast` and `tokenize`; nothing is imported. Imports inside functions count.
OVER holds what is above its budget today: a value there may fall, and no other may rise.
"""

import ast
import functools
import io
import re
import tokenize

import pytest
from conftest import ROOT

BUDGETS = {  # script: its own tokens, the files it carries with itself, the tokens of all of them
    "train_tpu": (5_200, 7, 29_000),
    "train_gpu": (5_200, 5, 15_000),
    "train_dream": (5_900, 8, 31_500),
    "coupled_grpo": (5_600, 10, 41_000),
    "generate": (2_600, 7, 27_500),
    "generate_dream": (3_300, 9, 33_000),
    "inference_jetson": (5_300, 3, 11_500),
    "export_jetson": (2_400, 5, 16_500),
    "convert_weights": (4_600, 7, 34_000),
    "data_prep": (5_200, 4, 15_500),
    "benchmarks": (6_000, 12, 52_000),
    "sandbox": (4_300, 1, 4_300),
    "sample_dream": (4_600, 4, 18_500),
    "model_dream": (7_600, 3, 14_000),
    "diffusion": (3_300, 1, 3_300),
}
HOUSE = {"scripts": 28, "tokens": 112_000, "arrows": 74}
FOLDERS = {"jail": 11_000, "extra": 30_000}  # tokens
LINES = {"tests": 18_000, "bench": 4_500}  # lines of Python
FIRST = "train_tpu train_gpu train_dream coupled_grpo generate generate_dream convert_weights"
DENSITY = dict.fromkeys([*FIRST.split(), "inference_jetson"], 9.5)  # tokens per line of code
ARRAYS = "diffusion diff_attention model_dream model_pythoncoder model_mdlm grpo sample_dream"
DENSITY |= dict.fromkeys([*ARRAYS.split(), "sample_block"], 12.5)  # one line is one formula
MARKS = 5.0  # per 100 lines of code
OVER = {
    "tokens": 121633,
    "model_dream, lines": 1009,
    "model_pythoncoder, lines": 839,
    "train_tpu, tokens carried": 30686,
    "train_gpu, tokens carried": 17153,
    "train_dream, tokens carried": 37081,
    "coupled_grpo, tokens carried": 46515,
    "generate, tokens carried": 29714,
    "generate_dream, tokens carried": 38593,
    "export_jetson, tokens carried": 18247,
    "convert_weights, tokens": 5006,
    "convert_weights, tokens carried": 37188,
    "data_prep, tokens": 5520,
    "data_prep, tokens carried": 19004,
    "benchmarks, tokens carried": 56891,
    "sandbox, tokens": 4403,
    "sandbox, tokens carried": 4403,
    "sample_dream, tokens": 5807,
    "sample_dream, tokens carried": 21474,
    "model_dream, tokens": 7968,
    "model_dream, tokens carried": 15667,
    "tests/, lines": 26784,
}

TEXT = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}
CODE = {name: ast.parse(text) for name, text in TEXT.items()}
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
F_STRING = [getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END")]  # Python 3.12


def docstrings(tree):
    """The first lines of docstrings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                found.add(node.body[0].lineno)
    return found


def count(text):
    """(tokens, lines of code) without comments, docstrings and line breaks; a string is a token."""
    skipped = docstrings(ast.parse(text))
    tokens = 0
    depth = 0
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == F_STRING[1]:
            depth -= 1
            continue
        starts = token.type == F_STRING[0]
        is_docstring = token.type == tokenize.STRING and token.start[0] in skipped
        if depth == 0 and (starts or token.type in COUNTED) and not is_docstring:
            tokens += 1
            lines.add(token.start[0])
        if starts:
            depth += 1
    return tokens, len(lines)


def marks(tree):
    """How many expressions make a reader stop: several targets at once, conditional expressions,
    lambdas, and products with a truth or a string.
    """
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp | ast.Lambda):
            found += 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if isinstance(node.value, ast.Tuple | ast.GeneratorExp):
                left = re.findall(r"\w+", ast.unparse(node.targets[0]))
                right = re.findall(r"\w+", ast.unparse(node.value))
                found += sorted(left) != sorted(right)  # a swap is free
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            found += any(is_truth(side) or is_text(side) for side in (node.left, node.right))
    return found


def is_truth(node):
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "bool"
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return negated or isinstance(node, ast.Compare)


def is_text(node):
    text = isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 1
    return text or isinstance(node, ast.JoinedStr)


def modules(tree):
    """All modules that a file imports, without what is inside a package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def imports(name):
    return modules(CODE[name]) & CODE.keys()


@functools.cache
def carried(name):
    """The scripts that a script needs, with itself."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports(name)
    return found


def measured():
    """{what: (value, budget)} of the whole house."""
    tokens = {name: count(text)[0] for name, text in TEXT.items()}
    found = {
        "scripts": (len(CODE), HOUSE["scripts"]),
        "tokens": (sum(tokens.values()), HOUSE["tokens"]),
        "arrows": (sum(len(imports(name)) for name in CODE), HOUSE["arrows"]),
    }
    for name, text in TEXT.items():
        lines = count(text)[1]
        found[f"{name}, lines"] = len(text.splitlines()), 800
        found[f"{name}, flags"] = flags(name), 32
        found[f"{name}, tokens a line"] = tokens[name] / lines, DENSITY.get(name, 11.0)
        found[f"{name}, marks"] = 100 * marks(CODE[name]) / lines, MARKS
    for name, (own, files, total) in BUDGETS.items():
        if name in CODE:
            found[f"{name}, tokens"] = tokens[name], own
            found[f"{name}, files carried"] = len(carried(name)), files
            found[f"{name}, tokens carried"] = sum(tokens[each] for each in carried(name)), total
    for folder, most in FOLDERS.items():
        paths = (ROOT / folder).rglob("*.py")
        found[f"{folder}/, tokens"] = sum(count(path.read_text())[0] for path in paths), most
    for folder, most in LINES.items():
        paths = (ROOT / folder).rglob("*.py")
        found[f"{folder}/, lines"] = sum(len(path.read_text().splitlines()) for path in paths), most
    return found


def flags(name):
    """Fields of dataclasses that are named Config or ...Flags."""
    groups = [node for node in CODE[name].body if isinstance(node, ast.ClassDef)]
    groups = [node for node in groups if node.name == "Config" or node.name.endswith("Flags")]
    return sum(isinstance(line, ast.AnnAssign) for node in groups for line in node.body)


def test_every_figure_is_within_its_budget():
    over = {}
    for what, (value, budget) in measured().items():
        if value > OVER.get(what, budget):
            over[what] = value, budget
    assert not over


def test_readme_fits_a_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= OVER.get("README, lines", 130)
    wide = [line for line in lines if len(line) > 100 and not line.startswith("|")]
    assert len(wide) <= OVER.get("README, wide lines", 0), wide


def defined(name, kinds):
    return [node for node in ast.walk(CODE[name]) if isinstance(node, kinds)]


@pytest.mark.parametrize("name", CODE)
def test_functions_fit_a_screen(name):
    for node in defined(name, ast.FunctionDef | ast.AsyncFunctionDef):
        assert node.end_lineno - node.lineno < 80, node.name
        assert len(node.args.args) + len(node.args.kwonlyargs) <= 9, node.name


# ---- who imports whom ----------------------------------------------------------------------------

TRAINERS = {"train_tpu", "train_dream", "train_gpu", "coupled_grpo"}
# A stage is a program. Another one gets its work as files, or by running it: see runs.script.
STAGES = TRAINERS | {"data_prep", "generate", "generate_dream", "convert_weights"}
STAGES |= {"export_jetson", "inference_jetson", "benchmarks"}
# What trainers share: mathematics, models, samplers, the formats of runs, checkpoints and rows.
GROUND = "prompts diffusion diff_attention grpo runs checkpoints rows sandbox"
GROUND = {*GROUND.split(), *(name for name in CODE if name.startswith(("model_", "sample_")))}


def test_no_stage_imports_a_stage():
    allowed = {("export_jetson", "inference_jetson")}  # the export runs what it wrote
    arrows = {(name, other) for name in CODE for other in imports(name)}
    assert {arrow for arrow in arrows if arrow[1] in STAGES} <= allowed


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_a_trainer_imports_the_ground_alone(trainer):
    assert carried(trainer) - {trainer} <= GROUND


def test_the_house_stands_without_its_shed():
    for name, text in TEXT.items():
        outside = {path.stem for path in ROOT.glob("extra/*.py")}
        assert not modules(CODE[name]) & {"extra", "bench", "jail", *outside}, name
        called = [line for line in text.splitlines() if re.search(r"script\([\"']extra/", line)]
        assert not called, name


@pytest.mark.parametrize("name", ["runs", "rows", "sandbox", "data_prep", "corpus"])
def test_what_needs_no_model_imports_neither_jax_nor_pytorch(name):
    for file in carried(name):
        assert not modules(CODE[file]) & {"jax", "flax", "optax", "orbax", "torch"}, file


@pytest.mark.parametrize("name", ["inference_jetson", "model_mdlm"])
def test_what_runs_on_a_jetson_needs_no_command_line_library(name):
    for file in carried(name):
        assert not modules(CODE[file]) & {"tyro", "runs", "jax"}, file


WORDS = "Pure.", "Prints.", "Reads the disk.", "Asks a model."
IMPURE = {"os", "pathlib", "subprocess", "shutil", "tempfile", "runs", "checkpoints"}


@pytest.mark.parametrize("name", CODE)
def test_the_first_sentence_says_what_a_script_touches(name):
    first_line = ast.get_docstring(CODE[name]).splitlines()[0]
    word = [word for word in WORDS if first_line.endswith(word)]
    assert word, first_line
    if word == ["Pure."]:
        called = {
            node.func.id for node in defined(name, ast.Call) if isinstance(node.func, ast.Name)
        }
        assert not modules(CODE[name]) & IMPURE
        assert not called & {"print", "open"}
