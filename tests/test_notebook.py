"""The example notebook runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.thorough import thorough

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


@thorough
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    kernel = tmp_path / "kernels" / "here"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="here", resources={"metadata": {"path": ROOT}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result"]
    first, last = (json.loads(shown[i]) for i in (0, -1))
    assert first == pytest.approx(last, rel=1e-4)
    assert first[-1] < first[0]


def test_the_notebook_is_kept_without_results() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert len(cells) >= 6
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
