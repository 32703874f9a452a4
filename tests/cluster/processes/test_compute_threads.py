"""How many threads a rank computes with, and how they wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hydragraph.cluster.processes.compute_threads import spinning, threads_of


@pytest.mark.parametrize(
    ("asked", "threads"), [("3", 3), (" 2,1", 2), ("0", None), ("many", None), ("-1", None), ("", None)]
)
def test_ranks_compute_with_as_many_threads_as_openmp_is_told(
    asked: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_of(2) == (threads or max(1, len(os.sched_getaffinity(0)) // 2))


def test_threads_spin_briefly_where_others_are_busy_unless_somebody_says_how_they_wait() -> None:
    assert spinning({"OMP_NUM_THREADS": "4"}, busy=2.5) == {"GOMP_SPINCOUNT": "1000"}
    assert spinning({"OMP_NUM_THREADS": "4"}, busy=0.2) == {}
    assert spinning({"OMP_WAIT_POLICY": "active"}, busy=4) == spinning({"GOMP_SPINCOUNT": "infinity"}, busy=4) == {}


@pytest.mark.parametrize(("load", "told"), [(3.0, "1000"), (0.0, "None")])
def test_the_command_line_looks_before_pytorch_is_loaded(load: float, told: str) -> None:
    code = (
        f"import os; os.getloadavg = lambda: ({load}, 0.0, 0.0)\n"
        "import sys, hydragraph.cli as c\n"
        "c.app = lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "c.main()"
    )
    ways = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in ways}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == f"{told} False\n"
