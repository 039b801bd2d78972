"""The house: what each script carries along, who may import whom, and how long functions and lists
of settings get.

Read from the source by `ast`; nothing is imported. Imports at the top of a file, and those inside
functions, are told
apart: a script needs the former beside itself to run at all.
"""

import ast
import functools
import re

import pytest
from conftest import ROOT

CODE = {path.stem: ast.parse(path.read_text()) for path in sorted(ROOT.glob("*.py"))}
# script: files that it carries, with itself, and lines of all of them. What is added has to go
# elsewhere
CEILINGS = {
    "benchmarks": (6, 3445),
    "convert_weights": (7, 4287),
    "coupled_grpo": (10, 5430),
    "data_prep": (3, 1682),
    "diff_attention": (1, 655),
    "diffusion": (1, 501),
    "export_jetson": (5, 2259),
    "generate": (3, 1480),
    "inference_jetson": (3, 1571),
    "model_dream": (3, 1762),
    "model_mdlm": (2, 875),
    "model_pythoncoder": (3, 1917),
    "rl_tasks": (2, 653),
    "runs": (1, 391),
    "sandbox": (2, 1185),
    "train_dream": (8, 4076),
    "train_gpu": (5, 2027),
    "train_tpu": (7, 3529),
    "batching": (11, 5755),
    "serve": (12, 6135),
}
LEAF = {"benchmarks", "problems", "protocols", "writers"}  # one program in four files
TRAINERS = ("train_tpu", "train_dream", "train_gpu", "coupled_grpo")
# A stage is a program. Another one gets its work as files, or by running it: see runs.script.
STAGES = {*TRAINERS, "data_prep", "fetch_pypi", "rl_tasks", "generate", "serve", "convert_weights"}
STAGES |= {"export_jetson", "inference_jetson"}
# What trainers share: mathematics, models, samplers, the formats of runs, checkpoints and rows, the
# sandbox.
GROUND = {
    "canvas",
    "diffusion",
    "diff_attention",
    "grpo",
    "runs",
    "checkpoints",
    "rows",
    "sandbox",
    "sandbox_inside",
    "sandbox_wire",
}
GROUND |= {name for name in CODE if name.startswith(("model_", "sample_"))}


def modules(node):
    """The modules that a statement imports, without what is inside a package."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {node.module.partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


@functools.cache
def imports(name, inside=False):
    """The modules that a file imports at its top, also under if and try; with `inside` those of
    functions too.
    """
    found, waiting = set(), [CODE[name]]
    while waiting:
        node = waiting.pop()
        found |= modules(node)
        if inside or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


def carried(name, inside=False):
    """The files of ours that a file needs, with itself."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports(name, inside) & CODE.keys()
    return found


def lines(name):
    return len((ROOT / f"{name}.py").read_text().splitlines())


@pytest.mark.parametrize("script", CEILINGS)
def test_a_script_carries_no_more_than_its_ceiling(script):
    files, length = CEILINGS[script]
    found = {name: lines(name) for name in carried(script)}
    assert len(found) <= files, found
    assert sum(found.values()) <= length, found


def test_no_stage_imports_a_stage():
    allowed = {("export_jetson", "inference_jetson")}  # the export runs what it wrote
    arrows = {(name, other) for name in CODE for other in imports(name, inside=True) & CODE.keys()}
    assert {arrow for arrow in arrows if arrow[1] in STAGES} <= allowed
    assert {(name, other) for name, other in arrows if other in LEAF and name not in LEAF} == set()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_imports_the_ground_alone(trainer):
    assert carried(trainer, inside=True) - {trainer} <= GROUND


@pytest.mark.parametrize(
    "name",
    [
        "runs",
        "rows",
        "sandbox",
        "sandbox_inside",
        "sandbox_wire",
        "data_prep",
        "corpus",
        "rl_tasks",
    ],
)
def test_what_needs_no_model_imports_neither_jax_nor_pytorch(name):
    for file in carried(name, inside=True):
        assert not imports(file, inside=True) & {"jax", "flax", "optax", "orbax", "torch"}, file


@pytest.mark.parametrize("name", ["inference_jetson", "model_mdlm"])
def test_what_runs_on_a_jetson_needs_no_command_line_library(name):
    for file in carried(name, inside=True):
        assert not imports(file, inside=True) & {"tyro", "runs", "jax"}, file


def defined(name, kinds):
    return [node for node in ast.walk(CODE[name]) if isinstance(node, kinds)]


@pytest.mark.parametrize("name", CODE)
def test_functions_fit_a_screen_and_settings_a_page(name):
    over = []
    for node in defined(name, ast.FunctionDef | ast.AsyncFunctionDef):
        length, parameters = (
            node.end_lineno - node.lineno + 1,
            len(node.args.args) + len(node.args.kwonlyargs),
        )
        if length > 80 or parameters > 9:
            over.append(f"{node.name}: {length} lines, {parameters} parameters")
    for node in defined(name, ast.ClassDef):
        settings = sum(isinstance(line, ast.AnnAssign) for line in node.body)
        if re.search("(Config|Flags|Sampling)$", node.name) and settings > 40:
            over.append(f"{node.name}: {settings} settings")
    assert not over
