"""The notebook runs from its first cell to its last on a CPU, and what it installs on Colab goes
together.
"""

import importlib.metadata
import json
import pathlib
import subprocess
import venv

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_acecode import rows_of_acecode
from test_dream_path import write_hub

NOTEBOOK = ROOT / "notebooks" / "colab.ipynb"
RUNTIMES = {  # of Colab: its device, the extra of JAX for it, and what has to be of JAX's release
    "tpu": ("accel0", "tpu", {"jaxlib", "libtpu"}),
    "gpu": ("nvidia0", "cuda12", {"jaxlib", "jax-cuda12-plugin"}),
}
IMAGES = "2025.07", "2025.10", "2026.01", "2026.08"  # columns of colab_*.txt


@pytest.mark.slow
def test_the_colab_notebook_trains_writes_code_scores_and_learns(tmp_path, monkeypatch):
    write_hub(tmp_path / "DiffuCoder-7B-Instruct")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows_of_acecode(12))
    )
    small = "--rounds=2 --tasks=2 --group=2 --iterations=1 --micro_batch=2 --generation_batch=4 --max_new=16"
    settings = {
        "OUT": tmp_path / "my runs",  # as Drive names folders
        "STEPS": 10,
        "TRAIN": "--batch_size=4 --compile_cache=",
        "DREAM": tmp_path / "DiffuCoder-7B-Instruct",
        "TASKS": f"--roots {tmp_path}/rows.jsonl --difficulty=all --heldout=0.2",
        "GRPO": f"{small} --block_length=8 --eval_tasks=2 --eval_every=1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"UNMASK_{name}", str(value))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    import nbformat  # both take most of a second
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    for part in (
        "1,075,150,848 parameters",
        "model tiny",
        "step 10/",
        "tokens per forward pass",
        "xz_bits_per_byte",
    ):
        assert part in text, text
    for part in ("tensors,", "64 tokens in", "round 2/"):
        assert part in text, text
    assert (tmp_path / "my runs" / "grpo_7b" / "merged").is_dir()
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds


def chosen(device, folder):
    """The requirements that the notebook picks where /dev holds this device alone."""
    sources = ("".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"])
    (source,) = (source for source in sources if "%pip" in source)
    (folder / device).touch()
    scope = {"pathlib": pathlib}
    exec(
        source[source.index("requirements = ") : source.index("%pip")].replace("/dev", str(folder)),
        scope,
    )
    return ROOT / scope["requirements"]


def requirements(path):
    """The lines of a file of requirements, and of those that it includes."""
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            yield from requirements(path.with_name(line[3:]))
        elif line and not line.startswith("#"):
            yield Requirement(line)


def installed(runtime, image):
    """{name: version} of what Colab brings."""
    lines = (ROOT / "tests" / f"colab_{runtime}.txt").read_text().splitlines()
    head, *rows = (line.split() for line in lines if not line.startswith("#"))
    column = head.index(image)
    return {row[0]: row[column] for row in rows if row[column] != "-"}


def test_a_tpu_gets_hugepages_and_no_other_device():
    sources = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    (source,) = (source for source in sources if "transparent_hugepage/enabled" in source)
    before = source[: source.index("!sudo")].splitlines()
    assert before[-3] == 'if "tpu" in requirements:'  # set by the same cell


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_part_of_another_jax_can_stay_from_what_colab_brings(runtime, image, tmp_path):
    (device, extra, parts), brought = RUNTIMES[runtime], installed(runtime, image)
    asked = [r for r in requirements(chosen(device, tmp_path)) if r.name == "jax"]
    assert {extra} in [r.extras for r in asked]
    assert len({str(r.specifier) for r in asked}) == 1
    assert not any(brought["jax"] in r.specifier for r in asked)  # so JAX is replaced
    pins = {}
    # then the extra of the new one pins its parts
    for need in map(Requirement, importlib.metadata.requires("jax")):
        if need.marker and need.marker.evaluate({"extra": extra}):
            pins[need.name] = need.specifier
    for part in parts:
        assert brought[part] not in pins[part]


@pytest.mark.slow  # reads a package index
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_pip_leaves_a_colab_runtime_with_versions_that_go_together(runtime, image, tmp_path):
    device, _, parts = RUNTIMES[runtime]
    asked, after = chosen(device, tmp_path), installed(runtime, image)
    # An environment in which all of Colab's packages seem to be installed.
    venv.create(tmp_path / "colab", with_pip=True, upgrade_deps=True)
    (site,) = (tmp_path / "colab").glob("lib/python*/site-packages")
    for name, version in after.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    python, report = tmp_path / "colab" / "bin" / "python", tmp_path / "report.json"
    command = [python, "-m", "pip", "install", "-q", "--dry-run", f"--report={report}", "-r", asked]
    subprocess.run(command, check=True, timeout=600)
    # What pip would install fits itself and what stays.
    new = {
        canonicalize_name(item["metadata"]["name"]): item
        for item in json.loads(report.read_text())["install"]
    }
    assert parts < new.keys()
    after |= {name: item["metadata"]["version"] for name, item in new.items()}
    for item in new.values():
        for extra in ("", *item.get("requested_extras", [])):
            for need in map(Requirement, item["metadata"].get("requires_dist", [])):
                if not need.marker or need.marker.evaluate({"extra": extra}):
                    assert after[canonicalize_name(need.name)] in need.specifier, (
                        item["metadata"]["name"],
                        need,
                    )
