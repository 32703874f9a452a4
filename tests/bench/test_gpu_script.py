"""`benchmarks/gpu.sh`: it refuses where there is no GPU, before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.sh"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder / "results"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "gpu.sh: PyTorch finds no GPU here; --cpu runs everything at small sizes on the CPU\n"
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "--gpu")
    assert (found.returncode, found.stderr) == (2, "gpu.sh: unknown option '--gpu': use --cpu, or none\n")
