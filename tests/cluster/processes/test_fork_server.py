"""A fork server cleans up when its launcher is killed, and signals to its whole group do not reach ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydragraph.cluster.processes.fork_server import own_folder
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems start ranks without a fork server")

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import hydragraph as hg

def live(folder):
    from tqdm import tqdm
    tqdm(disable=True).close()  # as torch.fx does; it would make a semaphore
    kept = [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)]
    signal.signal(signal.SIGTERM, lambda *_: Path(folder, f"asked-{os.getpid()}").touch())
    Path(folder, f"rank-{os.getpid()}").write_text(json.dumps(kept))
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hg.launch(live, 2, sys.argv[1])
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory whose name is short: that of a socket in it may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="hg-", dir="/tmp") as path:
        yield Path(path)


def launcher(folder: Path, temporary: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py"), str(folder)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(folder.glob("rank-*"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@thorough
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGHUP], ids=["kill", "hang up"])
def test_nothing_is_left_behind_by_a_launcher_that_is_killed(
    sign: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    process = launcher(tmp_path, temporary)
    noted = [path for path in tmp_path.glob("rank-*") if path.stat().st_size]
    pids = [int(path.name.removeprefix("rank-")) for path in noted]
    try:
        assert len(noted) == 2
        assert all(json.loads(path.read_text()) == [True, True] for path in noted)
        # A terminal hangs up on its whole group; SIGTERM to the group must not have ended ranks before that.
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("asked-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(list(tmp_path.glob("asked-*"))) == 2
        (os.kill if sign == signal.SIGKILL else os.killpg)(process.pid, sign)
        _, errors = process.communicate(timeout=30)  # all that hold its stderr have ended
    finally:
        process.kill()
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert "leaked" not in errors
    deadline = time.monotonic() + 10
    while any(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(temporary.iterdir()) == []


FAILING = """
import multiprocessing, os, sys
from multiprocessing import forkserver, util

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["failing"])
    forkserver.ensure_running()
    first, third = (context.Process(target=os.system, args=("sleep 0.2",)) for _ in range(2))
    first.start()
    try:
        context.Process(target=os.getpid).start()
    except (BrokenPipeError, EOFError):  # by whether the server drops the request before it is written or after
        print("not started")
    third.start()
    for process in (first, third):
        process.join(60)
    print(first.exitcode, third.exitcode)
"""

SECOND_FAILS = """
import os
from hydragraph.cluster.processes.fork_server import outlive_failed_forks

fork, calls = os.fork, []

def second_fails():
    calls.append(0)
    if len(calls) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = second_fails
outlive_failed_forks()
"""


def test_a_fork_that_fails_costs_one_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    (tmp_path / "failing.py").write_text(SECOND_FAILS)
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
    command = [sys.executable, str(tmp_path / "script.py")]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert out.stdout.split("\n")[:2] == ["not started", "0 0"], out.stderr


def test_a_launcher_in_a_child_process_leaves_its_parents_folder_alone() -> None:
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(own_folder) == ""
    assert os.path.isdir(own_folder())
