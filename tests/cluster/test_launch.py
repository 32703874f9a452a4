"""launch: what ranks return and raise, what happens when they die, and that no process remains."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hydragraph.cluster.failure.newest_watch import newest_watch
from hydragraph.cluster.launch import _of_this_rank, join, launch
from hydragraph.cluster.processes.launched_ranks import StoppedProcesses, answering_server, forget, outcome_of, start
from hydragraph.cluster.processes.rank_process import Died
from hydragraph.cluster.processes.rendezvous_stores import hosted
from hydragraph.errors import RankFailure, Unsupported
from hydragraph.spec.elastic import Elastic
from tests.thorough import first, only, thorough

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False


def gone(pid: int, patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def note_pid(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.iterdir()]


def total(value: torch.Tensor) -> tuple[int, torch.Tensor, str]:
    value = value * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return dist.get_rank(), value, os.environ["RANK"] + "/" + os.environ["WORLD_SIZE"]


def test_returns_what_each_rank_returned() -> None:
    results = launch(total, 3, torch.arange(4.0))
    assert [(rank, where) for rank, _, where in results] == [(0, "0/3"), (1, "1/3"), (2, "2/3")]
    assert all(torch.equal(value, torch.arange(4.0) * 6) for _, value, _ in results)


def settings() -> tuple[int, str | None, str]:
    world = join("cpu")
    return torch.get_num_threads(), os.environ.get("HYDRAGRAPH_TEST"), f"{world.rank}/{world.ranks} {world.backend}"


def test_ranks_share_the_cores_and_have_the_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRAGRAPH_TEST", "now")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert launch(settings, 2) == [(threads, "now", "0/2 gloo"), (threads, "now", "1/2 gloo")]


def test_alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = join("cpu")
    assert (world.rank, world.ranks, world.backend) == (0, 1, "gloo")
    assert not dist.is_initialized()


@pytest.mark.parametrize(("gpu", "used"), [(None, 1), (3, 3), (9, 1)])
def test_a_member_keeps_its_seats_gpu_although_its_local_rank_changes(
    monkeypatch: pytest.MonkeyPatch, gpu: int | None, used: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("hydragraph.cluster.launch.here", lambda: gpu and SimpleNamespace(gpu=gpu))
    monkeypatch.setattr("hydragraph.cluster.launch.set_cuda_environment", lambda environment: None)
    assert _of_this_rank("cuda") == (torch.device("cuda", used), 1)
    assert _of_this_rank("cuda:5") == (torch.device("cuda", 5), 1)


def raise_on(culprit: int, kind: str) -> None:
    if dist.get_rank() == culprit:
        if kind == "unsupported":
            raise Unsupported("a loop", where="block 3", remedy="unroll it")
        if kind == "local":

            class LocalError(Exception):
                pass

            raise LocalError("never seen elsewhere")
        raise KeyError("boom")
    dist.all_reduce(torch.ones(1))  # fails because the culprit has left


@pytest.mark.parametrize("culprit", first([2], [0, 2]))
def test_raises_the_culprits_error_and_not_its_consequences(culprit: int) -> None:
    with pytest.raises(KeyError) as caught:
        launch(raise_on, 3, culprit, "key")
    assert caught.value.args == ("boom",)
    assert f"On rank {culprit}:" in caught.value.__notes__[-1]
    assert "in raise_on" in caught.value.__notes__[-1]


def test_rebuilds_errors_whose_constructor_pickle_cannot_call() -> None:
    with pytest.raises(Unsupported) as caught:
        launch(raise_on, 1, 0, "unsupported")
    assert str(caught.value) == "block 3: a loop; unroll it"
    assert caught.value.remedy == "unroll it"


def test_tells_of_errors_that_cannot_be_sent() -> None:
    with pytest.raises(RuntimeError, match="rank 0 raised LocalError: never seen elsewhere"):
        launch(raise_on, 1, 0, "local")


def die(culprit: int, how: str, folder: Path) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == culprit:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    dist.all_reduce(torch.ones(1))


@only("exit-exited with code 7")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("kill", r"killed by signal 9 \(SIGKILL\), often because the host is out of memory"),
        ("exit", "exited with code 7"),
    ],
)
def test_a_dead_rank_is_named_and_no_process_remains(how: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=text) as caught:
        launch(die, 3, 1, how, tmp_path)
    assert caught.value.rank == 1
    assert len(pids(tmp_path)) == 3
    assert all(gone(pid) for pid in pids(tmp_path))


def finish(folder: Path) -> None:
    note_pid(folder)


def test_no_process_remains_after_success(tmp_path: Path) -> None:
    launch(finish, 4, tmp_path)
    assert len(pids(tmp_path)) == 4
    assert all(gone(pid) for pid in pids(tmp_path))


def sleep_on(sleeper: int, folder: Path) -> None:
    note_pid(folder)
    if dist.get_rank() == sleeper:
        time.sleep(600)


def test_times_out(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] had not returned after 1 s"):
        launch(sleep_on, 1, 0, tmp_path, timeout=timedelta(seconds=1))
    assert all(gone(pid) for pid in pids(tmp_path))


def test_refuses_what_cannot_be_pickled_and_no_ranks() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"`.*lambda>`, its closure or its arguments cannot be sent"):
        launch(lambda: lock.locked(), 2)
    with pytest.raises(ValueError, match="'train' is not a function"):
        launch("train", 2)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="ranks=0"):
        launch(finish, 0)
    with pytest.raises(ValueError, match="2 ranks and 1000000 spares: use at most 1024 processes"):
        launch(print, 2, elastic=Elastic(spares=1000000))
    with pytest.raises(ValueError, match="ranks=100000 would exhaust this machine"):
        launch(sleep_on, 100_000, 0)


def unpicklable_result() -> object:
    return threading.Lock()


def test_refuses_a_time_limit_in_seconds() -> None:
    with pytest.raises(ValueError, match=r"launch: timeout=60: give a datetime\.timedelta"):
        launch(os.getpid, 1, timeout=60)  # pyrefly: ignore[bad-argument-type]


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle .*lock"):
        launch(unpicklable_result, 1)


def get_ready() -> int:
    return 0  # who sleeps


@thorough
@pytest.mark.parametrize(
    ("sign", "how"), [(signal.SIGKILL, "prepare=get_ready"), (signal.SIGINT, "prepare=None")], ids=["prepared", "plain"]
)
def test_ranks_end_with_their_launcher(sign: signal.Signals, how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    folder = tmp_path / "pids"
    folder.mkdir()
    script.write_text(
        textwrap.dedent(
            """
            import signal, sys, pathlib
            from hydragraph.cluster.launch import launch
            from tests.cluster.test_launch import get_ready, sleep_on
            if __name__ == "__main__":
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
                launch(sleep_on, 2, *WHO, pathlib.Path(sys.argv[1]), HOW)
            """
        )
        .replace("*WHO, ", "" if "ready" in how else "0, ")
        .replace("HOW", how)
    )
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen(
        [sys.executable, script, folder], env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        found = pids(folder)
        assert len(found) == 2
        launcher.send_signal(sign)
        assert launcher.wait(120) != 0  # a limit against a hang only
        assert all(gone(pid) for pid in found)
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net lists what is listened on")
def test_the_store_listens_on_this_host_alone() -> None:
    store = hosted("127.0.0.1", 0)
    lines = [x.split() for name in ("tcp", "tcp6") for x in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [fields[1] for fields in lines if fields[3] == "0A" and fields[1].endswith(f":{store.port:04X}")]
    assert listening == [f"0100007F:{store.port:04X}"]


def meet_a_stranger() -> float:
    if dist.get_rank() == 0:
        for said in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 4096):
            with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as connection:
                connection.sendall(said)
    dist.new_group([0, 1])  # gloo's addresses travel through the store
    found = torch.ones(1)
    dist.all_reduce(found)
    return float(found)


def test_a_stranger_that_speaks_another_protocol_to_the_store_disturbs_nothing() -> None:
    assert launch(meet_a_stranger, 2) == [2.0, 2.0]


SCRIPT = """
import hydragraph as hg
from hydragraph.engine.step_planner import IterationPlanner
from hydragraph.planner.policy import Policy
from hydragraph.planner.request import PlanRequest
from tests.planner.examples import MIXED, PROFILE, lengths

def rank():
    import pickle
    return pickle.__file__

if __name__ == "__main__":
    planner = IterationPlanner(PlanRequest((PROFILE.pipelines(MIXED),), (0.0,)), Policy(patience_s=300.0))
    planner.announce(tuple(lengths(40, 0, 3000)))
    print(planner.plan(tuple(lengths(40, 0, 3000))).late)
    planner.close()
    print(*hg.launch(rank, 2))
"""


@thorough
def test_nothing_is_imported_from_the_current_directory(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "current"
    script.write_text(SCRIPT)
    folder.mkdir()
    for name in ("pickle", "numpy", "socket"):
        (folder / f"{name}.py").write_text("import os; os._exit(77)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", f"{pickle.__file__} {pickle.__file__}"]


def ends_oddly(how: str) -> None:
    """Let rank 1 be interrupted, or stopped, when it has done its work and its watch closes."""
    if join("cpu").rank == 1:

        def close() -> None:
            if how == "interrupted":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGSTOP)

        watch = newest_watch()
        assert watch is not None
        watch.close = close  # pyrefly: ignore[method-assign]


@pytest.mark.parametrize(
    ("how", "cause"),
    [("interrupted", "KeyboardInterrupt"), pytest.param("stopped", "stopped for", marks=pytest.mark.thorough)],
)
def test_a_rank_that_does_not_get_to_its_end_has_failed(how: str, cause: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=rf"rank 1 failed.*{cause}"):
        launch(ends_oddly, 2, how)
    assert time.monotonic() - began < 20


def test_a_server_of_ranks_that_is_stopped_is_waited_for_and_ended_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    server = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(forkserver, "_forkserver", SimpleNamespace(_forkserver_pid=server.pid))
    answering_server(60.0)  # it is not stopped
    _stop(server.pid)
    threading.Timer(0.2, os.kill, (server.pid, signal.SIGCONT)).start()
    answering_server(60.0)
    assert server.poll() is None
    _stop(server.pid)
    answering_server(0.1)
    assert server.wait(10) == -signal.SIGKILL
    answering_server(60.0)  # it has ended: another is made where one is needed


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (BlockingIOError(11, "Resource temporarily unavailable"), "could not be started: .*Resource temporarily"),
        (EOFError("unexpected EOF"), "could not be started: the process that ranks are forked from has ended"),
    ],
)
def test_a_process_that_cannot_be_started_is_one_that_has_died(error: Exception, how: str) -> None:
    def fail() -> None:
        raise error

    context: Any = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **_: SimpleNamespace(start=fail))
    never: Any = note_pid
    member = start(context, 3, never, Path())
    signs: list[Any] = [member.connection, member.process.sentinel]
    assert set(multiprocessing.connection.wait(signs, 0)) == set(signs), "both signs say that it has ended"
    outcome = outcome_of(member)
    assert isinstance(outcome, Died)
    assert re.match(how, outcome.how)
    assert not StoppedProcesses().look([member])
    forget(member)
    member.process.close()
