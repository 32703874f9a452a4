"""Code that runs in a rank's process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from hydragraph import log
from hydragraph.cluster.failure.newest_watch import newest_watch
from hydragraph.cluster.moving_store import follows
from hydragraph.cluster.processes.compute_threads import threads_of
from hydragraph.cluster.processes.cuda_environment import set_cuda_environment
from hydragraph.cluster.processes.pickling import sent
from hydragraph.cluster.processes.rendezvous_stores import client
from hydragraph.cluster.rendezvous.member import Member, MemberDismissed, be, meet
from hydragraph.cluster.rendezvous.store_registers import MemberDescription

HOST = "127.0.0.1"
KEPT = "HYDRAGRAPH_KEPT"


@dataclass(frozen=True)
class Seat:
    """Rank and rendezvous address of a process to start.

    Attributes:
        node: the machine's index.
        here: number of ranks on the machine; 0 means all.
        local: number within the machine; None means `rank`.
    """

    rank: int
    ranks: int
    port: int
    host: str = HOST
    node: int = 0
    here: int = 0
    local: int | None = None

    @property
    def local_rank(self) -> int:
        return self.rank if self.local is None else self.local


@dataclass(frozen=True)
class Returned:
    value: bytes


@dataclass(frozen=True)
class Departed:
    why: str


@dataclass(frozen=True)
class Raised:
    """An error, pickled if possible; `when` is the host's monotonic time in seconds."""

    when: float
    error: bytes | None
    summary: str
    traceback: str


@dataclass(frozen=True)
class Died:
    """When and how a process ended without an outcome."""

    when: float
    how: str


Outcome = Returned | Raised | Died | Departed


class Readable(Protocol):
    def read(self) -> Any: ...


@dataclass(frozen=True)
class Start:
    """Order to start a member; `late` is true if others already run."""

    number: int
    seat: Seat
    late: bool
    grace_s: float
    work: bytes
    prepared: Readable | None = None


def member_environment(kept: str, node: int | None) -> dict[str, str]:
    """Return a member's environment variables; `node` is None on one machine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return own | {KEPT: kept} | ({} if node is None else {"GROUP_RANK": str(node)})


def run_rank(seat: Seat, work: bytes, prepared: Readable | None) -> Outcome:
    _take(seat)
    function, args = _work(work, prepared)
    meet("gloo", client(seat.host, seat.port), seat.rank, seat.ranks)
    return Returned(sent(function(*args)))


def run_member(order: Start) -> Outcome:
    seat = order.seat
    _take(seat)
    _allow_many_files()
    kept = os.environ.get(KEPT)
    store = partial(client, seat.host, seat.port)
    folder = kept if follows(kept) else None
    member = Member(order.number, store, order.grace_s, folder, seat.ranks, seat.local_rank)
    member.listen_to_signals()
    member.introduce(MemberDescription(order.number, seat.rank, os.getpid(), socket.gethostname(), node=seat.node))
    be(member)
    try:
        function, args = _work(order.work, order.prepared)
        if order.late:
            for name in ("RANK", "WORLD_SIZE"):
                del os.environ[name]
        else:
            member.meet()
        outcome = Returned(sent(function(*args)))
        member.leave(done=True)
        return outcome
    except MemberDismissed as end:
        with contextlib.suppress(Exception):
            member.leave()
        return Departed(str(end))


def begin(
    connection: Connection, environment: Mapping[str, str], level: int | None, run: Callable[..., Outcome], *args: Any
) -> None:
    """Run a function, and send its outcome to the launcher; after a result, wait for the launcher."""
    _end_with_launcher()
    try:
        os.environ.clear()
        os.environ.update(environment)
        if level is not None:
            log.show(level)
        outcome = run(*args)
        watch = newest_watch()
        if watch is not None:
            watch.close()
    except BaseException as error:
        # Also an interrupt while the watch closes
        outcome = raised(error)
        _tell_the_others(error)
    # A partly sent outcome would look like this process's death.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with contextlib.suppress(OSError):
        connection.send(outcome)
    if not isinstance(outcome, Returned):
        sys.stdout.flush()
        sys.stderr.flush()
        # Destroying communicators could block
        os._exit(int(isinstance(outcome, Raised)))
    with contextlib.suppress(OSError, KeyboardInterrupt):
        connection.poll(None)


def _allow_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _work(work: bytes, prepared: Readable | None) -> tuple[Any, tuple[Any, ...]]:
    # Garbage collection would copy memory pages
    gc.freeze()
    function, args = pickle.loads(work)
    if prepared is not None:
        args = (prepared.read(), *args)
    gc.freeze()
    return function, args


def _tell_the_others(error: BaseException) -> None:
    watch = newest_watch()
    if watch is not None and not watch.broken and not watch.closed:
        with contextlib.suppress(Exception):
            watch.ended_by(error)


def _take(seat: Seat) -> None:
    os.environ.update(
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.ranks),
        LOCAL_RANK=str(seat.local_rank),
        LOCAL_WORLD_SIZE=str(seat.here or seat.ranks),
        MASTER_ADDR=seat.host,
        MASTER_PORT=str(seat.port),
    )
    if torch.backends.cuda.is_built():
        # Must happen before CUDA starts
        set_cuda_environment(os.environ)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    on_this_machine = seat.host.startswith("127.") or seat.host in ("localhost", "::1")
    # The host's name may have an external or invalid address.
    if loopback is not None and on_this_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(threads_of(seat.here or seat.ranks))


def _end_with_launcher() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def outlive() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=outlive, name="hydragraph-launcher", daemon=True).start()


def raised(error: BaseException) -> Raised:
    when = time.monotonic()
    text = "".join(traceback.format_exception(error))
    return Raised(when, _pickled_error(error), f"{type(error).__name__}: {error}", text)


def _pickled_error(error: BaseException) -> bytes | None:
    # Some errors can be pickled but not unpickled: try each form both ways.
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
    # Unpickling calls the type with `args`, which fails for keyword arguments.
    kind, args, attributes = value
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def rebuilt(rank: int, raised: Raised) -> BaseException:
    error = error_of(raised, f"rank {rank}")
    error.add_note(f"On rank {rank}:\n{raised.traceback}")
    return error


def error_of(raised: Raised, who: str = "launch") -> BaseException:
    return RuntimeError(f"{who} raised {raised.summary}") if raised.error is None else _unpickled_error(raised.error)
