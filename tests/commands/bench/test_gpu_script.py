"""`benchmarks/gpu.sh`: without a GPU it stops before it does anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.thorough import thorough

SCRIPT = Path(__file__).parents[3] / "benchmarks/gpu.sh"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder / "results"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


@thorough
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "gpu.sh: PyTorch finds no GPU here; --cpu runs everything at small sizes on the CPU\n"
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "--gpu")
    assert (found.returncode, found.stderr) == (2, "gpu.sh: unknown option '--gpu': use --cpu, --rehearse, or none\n")


def test_a_rehearsal_begins_with_the_step_and_every_part_has_a_limit(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in *kernels*) exit 1;; esac\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stand_in), "OUT": str(tmp_path / "results")}
    found = subprocess.run(["bash", str(SCRIPT), "--rehearse"], capture_output=True, text=True, env=environment)
    parts = re.findall(r"^== (\S+) \(at most (\d+) s\)$", found.stderr, re.MULTILINE)
    assert [part for part, _ in parts] == ["smoke", "step", "correctness", "kernels"]
    assert all(int(limit) >= 30 for _, limit in parts)
    assert calls.read_text().startswith("benchmarks/smoke.py")
    assert found.returncode == 1
    assert "gpu.sh: failed: kernels" in found.stderr
