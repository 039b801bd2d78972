"""The notebook runs from its first cell to its last, on the CPU preset and a small folder of source."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_colab_notebook_trains_writes_code_and_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_OUT", str(tmp_path / "run"))
    monkeypatch.setenv("UNMASK_STEPS", "10")
    monkeypatch.setenv("UNMASK_TRAIN", "--batch_size=4 --compile_cache=")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    notebook = nbformat.read(ROOT / "notebooks" / "colab.ipynb", as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
    text = "".join(
        "".join(o.get("text", "") for o in cell.get("outputs", []))
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    for part in ("1,075,150,848 parameters", "model tiny", "step 10", "tokens per forward pass", "xz_bits_per_byte"):
        assert part in text, text
    plots = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert plots
