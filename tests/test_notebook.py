"""The notebook runs from its first cell to its last, on the CPU preset and a small folder of source."""

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient


@pytest.mark.slow
def test_the_colab_notebook_trains_writes_code_and_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_OUT", str(tmp_path / "run"))
    monkeypatch.setenv("UNMASK_STEPS", "10")
    monkeypatch.setenv("UNMASK_TRAIN", "--batch_size=4 --compile_cache=")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    notebook = nbformat.read(ROOT / "notebooks" / "colab.ipynb", as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    for part in ("1,075,150,848 parameters", "model tiny", "step 10", "tokens per forward pass", "xz_bits_per_byte"):
        assert part in text, text
    assert any("image/png" in output.get("data", {}) for output in outputs)
