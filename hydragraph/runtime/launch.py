"""Starts ranks as local processes, and joins the process group that a launcher prepared.

Only this module reads the launcher's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.errors import RankFailure
from hydragraph.runtime.failure.ledger import Fault, announce_death, last_fault

T = TypeVar("T")

_HOST = "127.0.0.1"
# What ranks import; "torch._dynamo" is what the first capture would.
PRELOAD = ["torch.distributed", "torch._dynamo", "hydragraph.runtime.launch", "hydragraph.api", "__main__"]
_GRACE_S = 8.0  # for peers to fail by themselves; to agree on a fault takes them up to 3 s, twice that on a busy host
_CULPRIT_S = 2.0  # for the rank at fault to tell its own error, once all others have told theirs; it may hang
_EXIT_S = 5.0  # for a rank that is done to end its process


@dataclass(frozen=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank, ranks: which of how many; 0 of 1 without any process group.
        local_rank: which of the ranks of this host.
        device: what it computes on.
        backend: "nccl" where every rank of the host has a GPU of its own, else "gloo".
    """

    rank: int
    ranks: int
    local_rank: int
    device: torch.device
    backend: str


def join(device: torch.device | str | None = None) -> World:
    """Joins the ranks: the process group there is, or the one that the launcher's environment describes, or none.

    Args:
        device: what to compute on; a GPU without an index means this rank's. None: a GPU where there is one.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus if device.index is None else device.index)
        torch.cuda.set_device(device)
    backend = _backend(device)
    if not dist.is_initialized() and launched:
        # Objects (hashes, host names) travel as CPU tensors, also where weights do not.
        kind = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if attempt and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_attempt(attempt)
            dist.init_process_group(
                kind, store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        else:
            dist.init_process_group(kind)
    if not dist.is_initialized():
        return World(0, 1, 0, device, backend)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, backend)


def _store_of_attempt(attempt: int) -> Store:
    """The store that torchrun's agent keeps, with keys of our own: gloo would meet the addresses of ranks that died."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"hydragraph/attempt-{attempt}", store)  # type: ignore[attr-defined, no-any-return]


def _backend(device: torch.device) -> str:
    """NCCL refuses two ranks on one GPU; gloo does not."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return "gloo"
    return "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count() else "gloo"


def launch(function: Callable[..., T], ranks: int, *args: object, timeout: timedelta | None = None) -> list[T]:
    """Runs `function(*args)` on ranks that are processes of this host, joined over gloo on the CPU.

    The function learns its rank from `torch.distributed`. It, its arguments and its result are pickled, tensors by
    value. No rank's process ends before all are done or one has failed, and none outlives the call.

    Args:
        function: importable: defined at the top of a module.
        ranks: how many.
        timeout: for the whole run; None: no limit.

    Returns:
        What each rank returned, by rank.

    Raises:
        ValueError: the function or an argument cannot be pickled, or `ranks` is not positive.
        RankFailure: a rank died; it names the instruction where a step was running.
        TimeoutError: the run took too long.
        Any other error: what the rank that failed first raised, with its traceback as a note.
    """
    if ranks < 1:
        raise ValueError(f"launch: ranks={ranks}: give a positive number of ranks")
    work = _pickled(function, args)
    store = dist.TCPStore(_HOST, 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    crew: list[_Member] = []
    try:
        for rank in range(ranks):
            crew.append(_start(_Seat(rank, ranks, store.port, dict(os.environ)), work))
        _collect(crew, store, timeout)
        _raise_failure(crew, last_fault(store), timeout)
        return [pickle.loads(member.outcome.value) for member in crew if isinstance(member.outcome, _Returned)]
    finally:
        _dismiss(crew)


def _pickled(function: Callable[..., object], args: Sequence[object]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"launch: `{name}` or its arguments cannot be sent to another process ({error}): "
            "define the function at the top of an importable module and pass data, not closures"
        ) from error


# The ranks as their launcher sees them.


@dataclass(frozen=True)
class _Seat:
    """Where one rank belongs: its number, the store's port, and the environment to run in."""

    rank: int
    ranks: int
    port: int
    environment: dict[str, str]


@dataclass(frozen=True)
class _Returned:
    """A rank's pickled result."""

    value: bytes


@dataclass(frozen=True)
class _Raised:
    """What a rank raised: pickled where it can be, and as text; `when` is the host's monotonic clock in seconds."""

    when: float
    error: bytes | None
    summary: str
    traceback: str


@dataclass(frozen=True)
class _Died:
    """How a rank's process ended before it had an outcome to tell, and when that was seen."""

    when: float
    how: str


@dataclass
class _Member:
    """One rank's process and, once there is one, its outcome."""

    rank: int
    process: ForkServerProcess
    connection: Connection
    outcome: _Returned | _Raised | _Died | None = None


def _start(seat: _Seat, work: bytes) -> _Member:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # importing torch takes seconds; forking a process that has it, 10 ms
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_rank, args=(theirs, seat, work), name=f"rank {seat.rank}")
    process.start()
    theirs.close()  # so that only the rank holds its end, and its death shows
    return _Member(seat.rank, process, ours)


def _collect(crew: Sequence[_Member], store: Store, timeout: timedelta | None) -> None:
    """Waits for every rank's outcome; after a failure only as long as peers may need to fail by themselves."""
    deadline = time.monotonic() + timeout.total_seconds() if timeout is not None else float("inf")
    failed = False
    while waiting := [member for member in crew if member.outcome is None]:
        fault = last_fault(store) if failed else None
        if fault is not None and [member.rank for member in waiting] == [fault.rank]:
            deadline = min(deadline, time.monotonic() + _CULPRIT_S)
        left = deadline - time.monotonic()
        if left <= 0:
            return
        signs = [sign for member in waiting for sign in (member.connection, member.process.sentinel)]
        ready = set(multiprocessing.connection.wait(signs, None if left == float("inf") else left))
        for member in waiting:
            if not ready.isdisjoint((member.connection, member.process.sentinel)):
                member.outcome = _outcome(member)
            if isinstance(member.outcome, _Died):
                announce_death(store, member.rank, member.outcome.how)
            if isinstance(member.outcome, _Died | _Raised) and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)


def _outcome(member: _Member) -> _Returned | _Raised | _Died:
    try:
        if member.connection.poll():
            outcome: _Returned | _Raised = member.connection.recv()
            return outcome
    except (EOFError, OSError):
        pass  # it died, perhaps while it was sending
    when = time.monotonic()
    member.process.join(_EXIT_S)
    code = member.process.exitcode
    if code is None:
        return _Died(when, "closed the connection to its launcher")
    if code < 0:
        return _Died(when, f"killed by signal {-code} ({signal.Signals(-code).name})")
    return _Died(when, f"exited with code {code} before it returned")


def _raise_failure(crew: Sequence[_Member], fault: Fault | None, timeout: timedelta | None) -> None:
    """Raises the error of the rank that failed first, if any did."""
    failed = [member for member in crew if isinstance(member.outcome, _Raised | _Died)]
    missing = [member.rank for member in crew if member.outcome is None]
    if not failed and missing:
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        raise TimeoutError(f"launch: ranks {missing} had not returned after {seconds:g} s")
    if not failed:
        return
    if fault is not None and fault.rank in missing:  # it hangs: no process of its own to tell
        raise RankFailure(fault.rank, fault.instruction, fault.error)
    culprit = min(failed, key=lambda member: _precedence(member, fault))
    if isinstance(culprit.outcome, _Died):
        at = fault.instruction if fault is not None and fault.rank == culprit.rank else ""
        raise RankFailure(culprit.rank, at, culprit.outcome.how)
    assert isinstance(culprit.outcome, _Raised)
    raise _rebuilt(culprit.rank, culprit.outcome)


def _precedence(member: _Member, fault: Fault | None) -> tuple[bool, int, float]:
    """Lowest for the first cause: the rank the peers agreed on, else one whose error no peer can cause, else the first.

    A peer that lost its connection raises RuntimeError, or RankFailure where a watch explained it.
    """
    outcome = member.outcome
    assert isinstance(outcome, _Raised | _Died)
    consequence = 0
    if isinstance(outcome, _Raised):
        error = _rebuilt(member.rank, outcome)
        consequence = 2 if isinstance(error, RankFailure) else int(type(error) in (RuntimeError, dist.DistBackendError))
    agreed = fault is not None and fault.rank == member.rank and consequence < 2
    return not agreed, consequence, outcome.when


def _rebuilt(rank: int, raised: _Raised) -> BaseException:
    """The error a rank raised, as the same type where it can be sent, with the rank's traceback as a note."""
    error: BaseException
    if raised.error is not None:
        error = _unpickled_error(raised.error)
    else:
        error = RuntimeError(f"rank {rank} raised {raised.summary}")
    error.add_note(f"On rank {rank}:\n{raised.traceback}")
    return error


def _dismiss(crew: Sequence[_Member]) -> None:
    """Ends all processes: ranks that are done by themselves, others at once."""
    for member in crew:
        if not isinstance(member.outcome, _Returned) and member.process.is_alive():
            member.process.kill()
        member.connection.close()  # a rank that returned waits for this
    deadline = time.monotonic() + _EXIT_S
    for member in crew:
        member.process.join(max(0.0, deadline - time.monotonic()))
        if member.process.is_alive():
            member.process.kill()
            member.process.join()
        member.process.close()


# What runs in a rank's process.


def _run_rank(connection: Connection, seat: _Seat, work: bytes) -> None:
    """A rank's whole life."""
    _die_with_launcher()
    try:
        _take(seat)
        function, args = pickle.loads(work)
        store = dist.TCPStore(_HOST, seat.port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.ranks)
        outcome: _Returned | _Raised = _Returned(pickle.dumps(function(*args)))
    except BaseException as error:
        outcome = _raised(error)
    with contextlib.suppress(OSError):
        connection.send(outcome)
    if isinstance(outcome, _Raised):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once, so that peers see the connections close; dropping communicators could block
    with contextlib.suppress(OSError, KeyboardInterrupt):
        connection.poll(None)  # a rank that left now could break those that are still connecting


def _take(seat: _Seat) -> None:
    os.environ.clear()
    os.environ.update(seat.environment)
    os.environ.update(
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.ranks),
        LOCAL_RANK=str(seat.rank),
        LOCAL_WORLD_SIZE=str(seat.ranks),
        MASTER_ADDR=_HOST,
        MASTER_PORT=str(seat.port),
    )
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # else gloo resolves the host's name, which may lead outside or nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // seat.ranks))


def _die_with_launcher() -> None:
    """Makes sure that this process ends with its launcher, also when that is killed."""
    if sys.platform == "linux":  # works even while this process is stopped; the fork server ends with the launcher
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def outlive() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=outlive, name="hydragraph-launcher", daemon=True).start()


def _raised(error: BaseException) -> _Raised:
    when = time.monotonic()
    text = "".join(traceback.format_exception(error))
    return _Raised(when, _pickled_error(error), f"{type(error).__name__}: {error}", text)


def _pickled_error(error: BaseException) -> bytes | None:
    """The error as bytes that surely can be read back; None where its type cannot."""
    for value in (error, (type(error), error.args, error.__dict__)):
        with contextlib.suppress(Exception):
            data = pickle.dumps(value)
            if isinstance(_unpickled_error(data), type(error)):
                return data
    return None


def _unpickled_error(data: bytes) -> BaseException:
    value = pickle.loads(data)
    if isinstance(value, BaseException):
        return value
    # Pickle would call the type with `args`, which a type with keyword arguments refuses.
    kind, args, attributes = value
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error
