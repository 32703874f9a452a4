"""Another process compiles the planner's search, if it has to be compiled, and always ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hydragraph.errors import StillCompiling
from hydragraph.kernels import numba_compiler
from hydragraph.planner import first_compilation
from hydragraph.planner.first_compilation import compile_devices, compile_lengths, compile_stages
from tests.test_newcomer import checked_out
from tests.thorough import thorough


def test_what_is_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for compile_part in (compile_stages, compile_devices, compile_lengths):
        compile_part()  # what neither the installation nor `make plans` compiled
    monkeypatch.setattr(subprocess, "Popen", None)
    with first_compilation.first_compilation(varying=True) as compiling:
        assert not compiling


def test_its_processes_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)

    monkeypatch.setattr(first_compilation, "is_compiled", lambda _: False)
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(RuntimeError, match="a mistake elsewhere"), first_compilation.first_compilation(varying=False):
        raise RuntimeError("a mistake elsewhere")
    assert len(begun) == 2
    assert all(process.poll() is not None for process in begun)


def test_a_deadline_ends_the_wait_but_not_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    processes = [Mock(**{"poll.return_value": None}) for _ in range(2)]
    monkeypatch.setattr(first_compilation, "is_compiled", lambda _: False)
    monkeypatch.setattr(first_compilation, "time", Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=processes))
    with first_compilation.first_compilation(varying=False, seconds=12.0):
        (ended,) = numba_compiler._others
        assert not ended()
        now[0] = 12.1
        with pytest.raises(StillCompiling, match="in the background: try again in a minute"):
            ended()
    assert not any(process.kill.called for process in processes)


PLANS = """
import sys
from numba.core import event
from hydragraph.planner import first_compilation
from hydragraph.planner.first_compilation import LENGTH, _made_up
from hydragraph.planner.plan import plan
from hydragraph.spec.training_workload import Workload
workloads = [Workload(8, LENGTH), Workload(lengths=[[LENGTH, *[LENGTH // 4] * 8]] * 2)]
first_compilation.subprocess = None  # there is nothing to compile
with first_compilation.first_compilation(varying=True):
    pass
with event.install_recorder("numba:compile") as recorder:
    for workload in workloads:
        plan(_made_up(), workload)
print("compiled here:", len(recorder.buffer))
"""


@thorough  # it compiles everything
def test_an_installed_package_compiles_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": ""}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, str(checked_out(tmp_path))], check=True, env=environment)
    environment["PYTHONPATH"] = str(tmp_path / "site")
    run = [sys.executable, "-c", PLANS]
    said = subprocess.run(run, check=True, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    assert said == "compiled here: 0\n"


def test_names_are_completed_and_plans_are_made_without_pytorch() -> None:
    """And so is the search compiled."""
    code = "import sys, hydragraph; print({'compile', 'launch', 'Strategy', '__version__'} <= set(dir(hydragraph)))"
    code += "; from hydragraph.planner import first_compilation as f; f.compile_stages(); f.compile_devices()"
    code += "; print('hydragraph.planner.plan' in sys.modules, 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.split() == ["True", "True", "False"]
