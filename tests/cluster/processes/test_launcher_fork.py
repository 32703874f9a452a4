"""That ranks of a forked launcher find what those of a new interpreter find, and when a launcher is not forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hydragraph.cluster.processes import launcher_fork
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info >= (3, 14), reason="this system's launchers are not forked"
)

SCRIPT = """
import json, logging, os, random, signal, sys, threading, time, warnings
import numpy, torch
import hydragraph as hg
from hydragraph.cluster.processes import launcher_fork

LEVEL = {"of the module": 1}

def look(number, path):
    descriptors = [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
    warnings.warn("rank's own")
    print("a rank says", flush=True)
    return {
        "draw": torch.rand(2).tolist(),
        "numpy": float(numpy.random.rand()),
        "python": random.random(),
        "level": LEVEL,
        "handlers": len(logging.root.handlers),
        "user signal": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "open": any(os.path.realpath(f"/proc/self/fd/{n}") == path for n in descriptors),
        "traced": sys.gettrace() is not None,
        "torch": torch.__dict__.get("marked"),
    }

if __name__ == "__main__":
    kind, path = sys.argv[1:]
    LEVEL["of the module"] = 2  # ranks import the script anew
    torch.marked = "by the launcher"  # a module's state is seen
    torch.manual_seed(7), numpy.random.seed(7), random.seed(7)
    logging.basicConfig()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    warnings.filterwarnings("error", message="rank")
    held = open(path, "w")
    print("the launcher says", end=" ")
    if kind == "threads":
        stop = threading.Event()
        threading.Thread(target=stop.wait, daemon=True).start()
    if kind == "hidden threads":
        torch.set_num_threads(2)
        torch.rand(400, 400) @ torch.rand(400, 400)
    if kind == "modes":
        torch.set_grad_enabled(False)
    found = hg.launch(look, 2, 5, os.path.realpath(path))
    if kind == "forked":  # the second fork is from what the launcher is then
        torch.marked = "later"
        found += hg.launch(look, 1, 5, os.path.realpath(path))
    print(json.dumps([bool(launcher_fork._forks), found]))
"""


def launched(kind: str, folder: Path) -> tuple[str, bool, list[dict[str, object]], str]:
    """Return what a launcher printed before its last line, whether it was forked, what ranks found, and its stderr."""
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), kind, str(folder / "held")],
        env={**os.environ, "OMP_NUM_THREADS": "2" if kind == "hidden threads" else "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    said, _, last = done.stdout.rstrip().rpartition("\n")
    forked, found = json.loads(last)
    return said, forked, found, done.stderr


@thorough
def test_ranks_of_a_forked_launcher_find_what_a_new_process_finds(tmp_path: Path) -> None:
    said, forked, found, errors = launched("forked", tmp_path)
    assert forked
    assert said.count("a rank says") == 3
    assert said.count("the launcher says") == 1  # what was not flushed yet is not said by ranks again
    assert errors.count("UserWarning: rank's own") == 3  # a warning, not the error that the launcher makes of it
    first, second, later = found
    assert first["draw"] == second["draw"] == torch.rand(2, generator=torch.Generator()).tolist()
    assert first["numpy"] != later["numpy"]
    assert first["python"] != second["python"]
    for rank in found:
        assert rank["level"] == {"of the module": 1}
        assert rank["handlers"] == 0
        assert rank["user signal"]
        assert rank["interrupt"]
        assert not rank["open"]
        assert not rank["traced"]
    assert [rank["torch"] for rank in found] == ["by the launcher", "by the launcher", "later"]


@thorough
@pytest.mark.parametrize("kind", ["modes", "threads", "hidden threads"])
def test_a_launcher_with_threads_or_modes_is_not_forked(kind: str, tmp_path: Path) -> None:
    _, forked, found, _ = launched(kind, tmp_path)
    assert not forked
    assert [rank["torch"] for rank in found] == [None, None]


def test_only_a_single_thread_without_modes_or_another_server_may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_fork, "_GPUS", ())
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(threading, "current_thread", threading.main_thread)
    monkeypatch.setattr("multiprocessing.forkserver._forkserver._forkserver_pid", None)
    assert launcher_fork._can_fork()
    with torch.no_grad():
        assert not launcher_fork.ensure_forked([])
    monkeypatch.setattr(launcher_fork, "_GPUS", (sys.executable,))
    assert not launcher_fork.ensure_forked([])
    monkeypatch.setattr(launcher_fork, "_GPUS", ())
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert not launcher_fork.ensure_forked([])
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr("multiprocessing.forkserver._forkserver._forkserver_pid", os.getpid())
    assert not launcher_fork.ensure_forked([])
