"""How many threads a rank computes with, and how they wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hydragraph.runtime.threads import spinning, threads_of


@pytest.mark.parametrize(
    ("asked", "threads"), [("3", 3), (" 2,1", 2), ("0", None), ("many", None), ("-1", None), ("", None)]
)
def test_ranks_compute_with_as_many_threads_as_openmp_is_told(
    asked: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_of(2) == (threads or max(1, len(os.sched_getaffinity(0)) // 2))


def test_threads_spin_briefly_unless_somebody_says_how_they_wait() -> None:
    assert spinning({"OMP_NUM_THREADS": "4"}) == {"GOMP_SPINCOUNT": "1000"}
    assert spinning({"OMP_WAIT_POLICY": "active"}) == spinning({"GOMP_SPINCOUNT": "infinity"}) == {}


def test_the_command_line_spins_briefly() -> None:
    code = "import os, hydragraph.cli as c; c.app = lambda: print(os.environ['GOMP_SPINCOUNT']); c.main()"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "1000\n"
