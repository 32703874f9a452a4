"""Ranks started by `launch`, as seen by the launcher."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hydragraph import log
from hydragraph.cluster.failure.failure_detector import Accusation, FailureDetector, Stopwatch, seen_of
from hydragraph.cluster.failure.fault_record import Fault, announce_death, last_fault
from hydragraph.cluster.failure.heartbeat_board import RankProgress
from hydragraph.cluster.failure.process_liveness import ProcessState, WatchedProcess
from hydragraph.cluster.failure.time_limits import STOPPED_S
from hydragraph.cluster.processes.fork_server import environment
from hydragraph.cluster.processes.pickling import nothing_else_imported
from hydragraph.cluster.processes.rank_process import (
    HOST,
    Departed,
    Died,
    Outcome,
    Raised,
    Readable,
    Returned,
    Seat,
    begin,
    rebuilt,
    run_rank,
)
from hydragraph.cluster.processes.rendezvous_stores import client
from hydragraph.cluster.processes.stop_requests import Relay
from hydragraph.errors import RankFailure

# Time for other ranks to fail on their own
_GRACE_S = 8.0
# Time for the rank at fault to report its error
_CULPRIT_S = 2.0
_EXIT_S = 5.0
_STOPPED_LOOK_S = 0.05
_LOOK_S = 0.5

GUARD = 'call launch under `if __name__ == "__main__":`'

_LOG = logging.getLogger(__name__)

Context = ForkServerContext | SpawnContext


class AbsentProcess:
    """A process on another machine, with multiprocessing's interface."""

    pid: int | None = None
    exitcode: int | None = None

    def __init__(self) -> None:
        self._sign, self._end = multiprocessing.connection.Pipe(duplex=False)

    @property
    def sentinel(self) -> int:
        return self._sign.fileno()

    def is_alive(self) -> bool:
        return not self._end.closed

    def end(self) -> None:
        self._end.close()

    def terminate(self) -> None:
        """Do nothing: the process's machine ends it."""

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def close(self) -> None:
        self._sign.close()


class NotStarted(AbsentProcess):
    """A process that could not be started, handled like one that died at once."""

    def __init__(self, error: OSError | EOFError) -> None:
        super().__init__()
        server = "the process that ranks are forked from has ended"
        ended = isinstance(error, EOFError | BrokenPipeError)
        self.how = f"could not be started: {server if ended else error}"
        self.end()


@dataclass
class RankHandle:
    rank: int
    process: BaseProcess | AbsentProcess
    connection: Connection
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Job:
    """Settings of a launch; `work` is the pickled function and arguments."""

    context: Context
    ranks: int
    port: int
    work: bytes
    timeout_s: float
    relay: Relay
    prepared: Readable | None = None


def run_crew(job: Job) -> list[bytes]:
    crew: list[RankHandle] = []
    try:
        for rank in range(job.ranks):
            crew.append(start(job.context, rank, run_rank, Seat(rank, job.ranks, job.port), job.work, job.prepared))
        store = client(HOST, job.port)
        with job.relay.to([member.process for member in crew]):
            _collect(crew, store, job.timeout_s)
        raise_failure(crew, last_fault(store), job.timeout_s)
        return [member.outcome.value for member in crew if isinstance(member.outcome, Returned)]
    finally:
        dismiss(crew)


def start(
    context: Context, rank: int, run: Callable[..., Outcome], *args: object, variables: Mapping[str, str] = os.environ
) -> RankHandle:
    answering_server()
    ours, theirs = context.Pipe()
    arguments = (theirs, dict(variables), log.shown(), run, *args)
    new = context.Process(target=begin, args=arguments, name=f"rank {rank}")
    process: BaseProcess | AbsentProcess = new
    try:
        # multiprocessing starts interpreters with `-c`, which import from the current directory first.
        with environment({"PYTHONSAFEPATH": "1"}), nothing_else_imported():
            new.start()
    except (OSError, EOFError) as error:
        process = NotStarted(error)
    theirs.close()
    return RankHandle(rank, process, ours)


def forget(member: RankHandle) -> None:
    answering_server()
    if member.process.is_alive():
        member.process.kill()
    member.connection.close()
    _close(member)


def _close(member: RankHandle) -> None:
    member.process.join(_EXIT_S)
    # A process in a system call ignores signals
    if member.process.is_alive():
        _LOG.warning("process %s was killed but has not ended", member.process.pid)
    else:
        member.process.close()


def answering_server(patience_s: float = STOPPED_S) -> None:
    """Wait while the fork server is stopped; after `patience_s` seconds, kill it and its ranks."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is None:
        return
    server = WatchedProcess(pid)
    deadline = time.monotonic() + patience_s
    while server.state() is ProcessState.STOPPED:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(_STOPPED_LOOK_S)


def _collect(crew: Sequence[RankHandle], store: Store, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    failed = False
    stops = StoppedProcesses()
    while waiting := [member for member in crew if member.outcome is None]:
        # After the first failure, other ranks get `_GRACE_S` to fail with the same fault. If only the
        # rank at fault is missing, it gets `_CULPRIT_S`.
        fault = last_fault(store) if failed else None
        if fault is not None and [member.rank for member in waiting] == [fault.rank]:
            deadline = min(deadline, time.monotonic() + _CULPRIT_S)
        left = deadline - time.monotonic()
        if left <= 0:
            return
        # Returned ranks' processes stay alive.
        done = [WatchedProcess(member.process.pid or 0) for member in crew if isinstance(member.outcome, Returned)]
        others_run = any(process.state() is ProcessState.RUNNING for process in done)
        for member in wait_for_outcomes(waiting, stops, min(left, _LOOK_S), others_run=others_run):
            if isinstance(member.outcome, Died):
                announce_death(store, member.rank, member.outcome.how)
            if isinstance(member.outcome, Died | Raised) and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_S)


class StoppedProcesses:
    def __init__(self) -> None:
        self._judge = FailureDetector()
        self._watch = Stopwatch()

    def look(self, waiting: Sequence[RankHandle], *, others_run: bool = False) -> Accusation | None:
        """Return an accusation of a rank stopped too long while others ran."""
        nothing = RankProgress(0, 0, None, "", waiting=False, left=False)
        processes = {member.rank: member.process.pid for member in waiting}
        every = {rank: seen_of(WatchedProcess(pid), nothing) for rank, pid in processes.items() if pid is not None}
        seen = {rank: sighting for rank, sighting in every.items() if sighting.state is not ProcessState.ENDED}
        return self._judge.look(self._watch.elapsed(), seen, others_run=others_run)


def wait_for_outcomes(
    waiting: Sequence[RankHandle], stops: StoppedProcesses, wait_s: float, *, others_run: bool = False
) -> Iterator[RankHandle]:
    """Wait up to `wait_s` seconds; yield processes that have an outcome."""
    signs: list[Any] = [sign for member in waiting for sign in (member.connection, member.process.sentinel)]
    ready = set(multiprocessing.connection.wait(signs, wait_s))
    stopped = stops.look(waiting, others_run=others_run)
    for member in waiting:
        if not ready.isdisjoint((member.connection, member.process.sentinel)):
            member.outcome = outcome_of(member)
        elif stopped is not None and stopped.rank == member.rank:
            member.outcome = Died(time.monotonic(), stopped.error)
        if member.outcome is not None:
            yield member


def outcome_of(member: RankHandle) -> Outcome:
    try:
        if member.connection.poll():
            outcome: Returned | Raised | Departed = member.connection.recv()
            return outcome
    except (EOFError, OSError):
        # The process died
        pass
    when = time.monotonic()
    if isinstance(member.process, NotStarted):
        return Died(when, member.process.how)
    answering_server()
    member.process.join(_EXIT_S)
    code = member.process.exitcode
    if code is None:
        return Died(when, "closed the connection to its launcher")
    if code < 0:
        why = ", often because the host is out of memory" * (code == -signal.SIGKILL)
        return Died(when, f"killed by signal {-code} ({signal.Signals(-code).name}){why}")
    # A rank that has begun reports its errors itself
    if code == 1:
        return Died(when, f"exited with code 1 while it started; if it could not import this script, {GUARD}")
    return Died(when, f"exited with code {code} before it returned")


def raise_failure(crew: Sequence[RankHandle], fault: Fault | None, timeout_s: float) -> None:
    failed = [member for member in crew if isinstance(member.outcome, Raised | Died)]
    missing = [member.rank for member in crew if member.outcome is None]
    if not failed and not missing:
        return
    if fault is not None and (not failed or fault.rank in missing):
        raise RankFailure(fault.rank, fault.instruction, fault.error, fault.host)
    if not failed:
        raise TimeoutError(f"launch: ranks {missing} had not returned after {timeout_s:g} s")
    # Most failures are consequences, so the first need not be the cause.
    culprit = min(failed, key=lambda member: _precedence(member, fault))
    at = fault.instruction if fault is not None and fault.rank == culprit.rank else ""
    if isinstance(culprit.outcome, Died):
        raise RankFailure(culprit.rank, at, culprit.outcome.how)
    assert isinstance(culprit.outcome, Raised)
    error = rebuilt(culprit.rank, culprit.outcome)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise RankFailure(culprit.rank, at, culprit.outcome.summary) from error
    raise error


def _precedence(member: RankHandle, fault: Fault | None) -> tuple[bool, int, float]:
    """Return a failure's sort key; the root cause has the lowest key.

    The rank that others blame comes first, then errors that no other rank can cause, then the earliest error.
    """
    outcome = member.outcome
    assert isinstance(outcome, Raised | Died)
    # 0: the rank's own error; 1: perhaps a broken connection; 2: it blames another rank
    consequence = 0
    if isinstance(outcome, Raised):
        error = rebuilt(member.rank, outcome)
        consequence = 2 if isinstance(error, RankFailure) else int(type(error) in (RuntimeError, dist.DistBackendError))
    agreed = fault is not None and fault.rank == member.rank and consequence < 2
    return not agreed, consequence, outcome.when


def private_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="hydragraph-", ignore_cleanup_errors=True)


def kill_here(crew: Sequence[RankHandle]) -> None:
    """Kill this machine's processes without waiting, from any thread."""
    for member in crew:
        with suppress(ValueError):
            if member.process.pid and member.process.is_alive():
                member.process.kill()


def dismiss(crew: Sequence[RankHandle]) -> None:
    for member in crew:
        if not isinstance(member.outcome, Returned) and member.process.is_alive():
            member.process.kill()
        member.connection.close()
    answering_server()
    deadline = time.monotonic() + _EXIT_S
    for member in crew:
        member.process.join(max(0.0, deadline - time.monotonic()))
        if member.process.is_alive():
            member.process.kill()
        _close(member)
