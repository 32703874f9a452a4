"""How ranks notice that one of them failed, agree on which and where, and stop waiting for it.

The protocol, per process:

1. A thread beats a heartbeat on a board that the ranks of one host share, and polls one key of the store: the fault.
   The executor writes on the board which instruction it is at.
2. The rank that raises writes the fault if nobody has yet. For a rank that was killed, its peers do: the launcher
   tells them, or its heartbeat has stopped, and the board says where it was.
3. Whoever learns of a fault cuts the sockets of its communicators (NCCL: aborts them), because gloo has no other way
   to end a wait on a rank that is alive but will never answer. The cut comes a little later than the news, so that
   waits on the failed rank itself end by themselves, and before any communicator is dropped, because dropping one
   with operations pending can block.
4. Waits that even the cut does not end are left behind: gloo forgets a receive whose connection broke amid its
   payload, so that it ends with the communicator's timeout only. Hence no wait happens on the executor's own thread.
5. Every rank but the failed one raises RankFailure(rank, instruction, error) of the one agreed fault.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store  # type: ignore[attr-defined]

from hydragraph.errors import RankFailure
from hydragraph.runtime.message import Work

_REMEDY = "restart all ranks and load the last checkpoint"
_POLL = timedelta(seconds=0.1)  # a poll of the store costs 30-95 us
_HEAD_START = timedelta(seconds=0.3)  # waits on a closed peer fail within 0.1 s; those messages are the better ones
_STOPPED = timedelta(seconds=1.5)  # once communication has failed: a heartbeat that is missing for so long has stopped
_PATIENCE = timedelta(seconds=2.5)  # to learn who is at fault; longer than _STOPPED, so that a stopped rank is found
_LAST_CHANCE = timedelta(seconds=0.5)  # for waits to end by the cut; it takes effect within 0.1 s where it does
_SILENCE = timedelta(seconds=10)  # with no other sign of a failure; a long call that holds the GIL also stops the beat
_DEATH = "hydragraph/death"
_NAMESPACE = "hydragraph/watch"


@dataclass(frozen=True)
class Fault:
    """The one failure that all ranks agree on: who, at which step and instruction, and what it raised."""

    rank: int
    step: int
    instruction: str
    error: str


class _Ledger:
    """The fault's place in a store: written once, read by everybody.

    A store that cannot be reached (its host died) reads as "no fault" from then on; heartbeats have to do.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        self._store, self._key = store, f"{namespace}/fault"
        self._lost = False

    def read(self) -> Fault | None:
        """The fault, if one was written."""
        text = self._get(self._key)
        return None if text is None else Fault(**json.loads(text))

    def write(self, fault: Fault) -> Fault:
        """Writes the fault unless there is one; returns the one that stands."""
        text = self._ask(lambda: self._store.compare_set(self._key, "", json.dumps(asdict(fault))))
        return fault if text is None else Fault(**json.loads(text))

    def death(self) -> tuple[int, str] | None:
        """The rank that the launcher saw die, and how."""
        text = self._get(_DEATH)
        if text is None:
            return None
        rank, how = json.loads(text)
        return int(rank), str(how)

    def _get(self, key: str) -> bytes | None:
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _ask(self, question: Callable[[], bytes | None]) -> bytes | None:
        # A client never reconnects, and PyTorch logs every try: one is enough.
        if self._lost:
            return None
        try:
            return question()
        except RuntimeError:
            self._lost = True
            return None


def announce_death(store: Store, rank: int, how: str) -> None:
    """Tells the watches of a launch that a rank died; only the first death counts, others may follow from it."""
    store.compare_set(_DEATH, "", json.dumps([rank, how]))


def last_fault(store: Store) -> Fault | None:
    """The fault of the newest watch over a store, for the launcher that hosts it; None where nothing failed."""
    if not store.check([_NAMESPACE]):
        return None
    return _Ledger(store, store.get(_NAMESPACE).decode()).read()


@dataclass(frozen=True)
class Progress:
    """One rank's line of the board.

    Attributes:
        beats: heartbeats so far; 0 where the rank does not write on this board.
        step: the step it is in, or was in last.
        instruction: the index of the instruction it is at; None outside a step.
    """

    beats: int
    step: int
    instruction: int | None


class Board:
    """A small file in memory, shared by the ranks of one host, where each writes what it is doing.

    Args:
        path: the file; made where it does not exist.
        ranks: how many lines it has.
    """

    _BEATS = struct.Struct("q")
    _PLACE = struct.Struct("qq")  # the step, and the instruction's index + 1
    _LINE = 64  # bytes: a cache line, so that ranks do not disturb each other

    def __init__(self, path: Path, ranks: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, ranks * self._LINE)
            self._memory = mmap.mmap(descriptor, ranks * self._LINE)
        finally:
            os.close(descriptor)

    def beat(self, rank: int) -> None:
        """Adds one to a rank's heartbeat; only that rank may call it."""
        (beats,) = self._BEATS.unpack_from(self._memory, rank * self._LINE)
        self._BEATS.pack_into(self._memory, rank * self._LINE, beats + 1)

    def place(self, rank: int, step: int, instruction: int | None) -> None:
        """Notes where a rank is; takes less than a microsecond."""
        index = 0 if instruction is None else instruction + 1
        self._PLACE.pack_into(self._memory, rank * self._LINE + self._BEATS.size, step, index)

    def read(self, rank: int) -> Progress:
        """What a rank has written."""
        (beats,) = self._BEATS.unpack_from(self._memory, rank * self._LINE)
        step, index = self._PLACE.unpack_from(self._memory, rank * self._LINE + self._BEATS.size)
        return Progress(beats, step, index - 1 if index else None)

    def close(self) -> None:
        """Unmaps the file."""
        self._memory.close()


class _Pulse:
    """For how long each rank of this host has not beaten, counted in this process's own polls.

    Own polls and not the clock: when the whole job is suspended and resumed, nobody has missed a beat.
    """

    def __init__(self, board: Board, ranks: tuple[int, ...]) -> None:
        self._board = board
        self._beats = dict.fromkeys(ranks, 0)
        self._missed = dict.fromkeys(ranks, 0)

    def poll(self) -> None:
        for rank, before in self._beats.items():
            beats = self._board.read(rank).beats
            # A rank that never beat writes on another board (or has none yet): nothing is known of it.
            self._missed[rank] = self._missed[rank] + 1 if beats == before and beats > 0 else 0
            self._beats[rank] = beats

    def stopped(self, duration: timedelta) -> int | None:
        """The rank that has been silent longest, if for so long at least."""
        rank = max(self._missed, key=self._missed.__getitem__, default=None)
        return rank if rank is not None and self._missed[rank] * _POLL >= duration else None


class _Waiter:
    """Waits for works on a thread of its own, so that a wait can be left behind."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[Work, SimpleQueue[Exception | None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="hydragraph-waiter", daemon=True).start()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            work, answer = request
            try:
                work.wait()
                answer.put(None)
            except Exception as error:
                answer.put(error)
            del request, work, answer  # a buffer must not live until the next wait

    def wait(self, work: Work, abandoned: Callable[[], bool]) -> None:
        """Waits until the work is done or `abandoned()`; raises the work's error, or RuntimeError."""
        answer: SimpleQueue[Exception | None] = SimpleQueue()
        self._requests.put((work, answer))
        while True:
            try:
                error = answer.get(timeout=_POLL.total_seconds())
            except Empty:
                if abandoned():
                    raise RuntimeError("communication was ended, but one operation did not end with it") from None
                continue
            if error is not None:
                raise error
            return

    def close(self) -> None:
        """Ends the thread, once it waits for nothing."""
        self._requests.put(None)


class _Disconnected(RuntimeError):  # noqa: N818
    """Marks an error of communication, whose origin may be another rank; its cause is the error itself."""


def _sockets() -> frozenset[tuple[int, str]]:
    """The open sockets of this process as (descriptor, inode); empty where the system does not list them."""
    found: set[tuple[int, str]] = set()
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    for descriptor in descriptors:
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if name.startswith("socket:"):
            found.add((int(descriptor), name))
    return frozenset(found)


def _shut_down(descriptor: int) -> None:
    """Ends a connection for both sides, leaving the descriptor to its owner."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            # Shutting a listener makes gloo's accept fail, which it treats as fatal for the process.
            listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not listening:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it closed meanwhile


class Watch:
    """Watches over one executable's steps on this rank; every rank makes one at the same time.

    Args:
        rank, ranks: of the default process group; a process that is alone (ranks=1) needs no group and no thread.
        describe: the text of the instruction at (rank, index); also called from the watching thread.
        silence: after how long without a heartbeat a rank of this host counts as failed though no communication did.
    """

    def __init__(
        self, rank: int, ranks: int, describe: Callable[[int, int], str], *, silence: timedelta = _SILENCE
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._describe, self._silence = describe, silence
        self._fault: Fault | None = None
        self._step, self._stepping = 0, False
        self._guarded: set[tuple[int, str]] = set()
        self._aborts: list[Callable[[], None]] = []
        self._cutting = threading.Lock()
        self._cut_at: float | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if ranks > 1:
            self._meet()

    def _meet(self) -> None:
        """Agrees with all ranks on a board and a place for the fault, and starts the thread."""
        hosts: list[tuple[str, str]] = [("", "")] * self.ranks
        dist.all_gather_object(hosts, (socket.gethostname(), uuid.uuid4().hex))
        name = hosts[0][1]
        path = Path(tempfile.gettempdir()) / f"hydragraph-{name}"
        self._board = Board(path, self.ranks)
        self._board.beat(self.rank)
        dist.all_gather_object([None] * self.ranks, None)  # all have opened it: nobody needs its name any more
        path.unlink(missing_ok=True)
        self._local = tuple(r for r, (host, _) in enumerate(hosts) if host == hosts[self.rank][0] and r != self.rank)
        self._pulse = _Pulse(self._board, self._local)
        store = _own_client()
        if self.rank == 0:
            store.set(_NAMESPACE, f"hydragraph/{name}")
        self._ledger = _Ledger(store, f"hydragraph/{name}")
        self._waiter = _Waiter()
        self._thread = threading.Thread(target=self._run, name="hydragraph-watch", daemon=True)
        self._thread.start()

    # What the executor calls.

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Makes the connections opened inside the ones to cut after a fault: create communicators inside."""
        before = _sockets()
        yield
        self._guarded |= _sockets() - before

    def also_abort(self, abort: Callable[[], None]) -> None:
        """Calls `abort` after a fault too, from any thread; it ends operations that no socket of ours carries."""
        self._aborts.append(abort)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Runs one step inside.

        Raises:
            RankFailure: another rank failed in it, or any rank in an earlier one.
        """
        self.check()
        self._step, self._stepping = number, True
        self._place(None)
        try:
            yield
        except _Disconnected as error:
            failure = self.explain(error)
            if failure.rank == self.rank and error.__cause__ is not None:
                raise error.__cause__ from None  # nobody else failed: the error is our own
            raise failure from error.__cause__
        except BaseException as error:
            self.report(error)
            raise
        finally:
            self._stepping = False
            self._place(None)

    def at(self, index: int) -> None:
        """Notes that this rank is at an instruction; about a microsecond."""
        self._place(index)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Marks RuntimeErrors from inside as errors of communication, which another rank may have caused.

        Outside of a step it does nothing: nobody would explain them.
        """
        try:
            yield
        except (_Disconnected, RankFailure, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if not self._stepping:
                raise
            raise _Disconnected(str(error)) from error

    def wait(self, work: Work) -> None:
        """Waits for an operation of gloo's, or until communication has been ended; call it from one thread only."""
        with self.communicating():
            if self.ranks == 1 or work.is_completed():
                work.wait()
            else:
                self._waiter.wait(work, self._abandoned)

    def _abandoned(self) -> bool:
        return self._cut_at is not None and time.monotonic() - self._cut_at > _LAST_CHANCE.total_seconds()

    def check(self) -> None:
        """Raises the RankFailure of a fault that is known; call it where a device may have been freed by an abort."""
        if self._fault is not None:
            raise _failure(self._fault)

    @property
    def broken(self) -> bool:
        """Whether a fault is known; no step runs any more."""
        return self._fault is not None

    def report(self, error: BaseException) -> None:
        """Writes this rank's own error as the fault (unless there is one) and ends its communication."""
        if self.ranks > 1:
            self._agree(Fault(self.rank, self._step, self._instruction(self.rank), _text(error)))
            self._cut()

    def explain(self, error: BaseException) -> RankFailure:
        """Finds which rank caused an error of communication; takes seconds at most.

        Returns:
            The failure that all ranks agree on. Where no rank is known to have failed it names this one.
        """
        cause = error.__cause__ if isinstance(error, _Disconnected) and error.__cause__ else error
        own = Fault(self.rank, self._step, "", _text(cause))
        if self.ranks == 1:
            return _failure(own)
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while not self._look(_STOPPED) and time.monotonic() < deadline:
            time.sleep(_POLL.total_seconds() / 2)
        fault = self._fault or self._agree(Fault(own.rank, own.step, self._instruction(self.rank), own.error))
        self._cut()
        return _failure(fault)

    def close(self) -> None:
        """Stops watching."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._waiter.close()
            self._board.close()

    # What the thread does.

    def _run(self) -> None:
        while not self._stopped.wait(_POLL.total_seconds()):
            self._board.beat(self.rank)
            self._pulse.poll()
            if self._look(self._silence if self._stepping else None):
                if not self._stopped.wait(_HEAD_START.total_seconds()):
                    self._cut()
                return

    def _look(self, silence: timedelta | None) -> bool:
        """Whether there is a fault: one written, a death that the launcher saw, or a heartbeat that stopped."""
        if self._fault is None:
            self._fault = self._ledger.read()
        if self._fault is None and (death := self._ledger.death()) is not None:
            self._accuse(*death)
        if self._fault is None and silence is not None and (rank := self._pulse.stopped(silence)) is not None:
            self._accuse(rank, f"its heartbeat has stopped for {silence.total_seconds():g} s")
        return self._fault is not None

    def _accuse(self, rank: int, error: str) -> None:
        self._agree(Fault(rank, self._board.read(rank).step, self._instruction(rank), error))

    def _agree(self, fault: Fault) -> Fault:
        self._fault = self._ledger.write(fault)
        return self._fault

    def _cut(self) -> None:
        """Ends all communication of the guarded connections; later calls find nothing left to do."""
        with self._cutting:
            for abort in self._aborts:
                abort()
            # Descriptors are reused: only those that are still the same socket.
            for descriptor, _ in self._guarded & _sockets():
                _shut_down(descriptor)
            self._aborts, self._guarded = [], set()
            self._cut_at = self._cut_at or time.monotonic()

    # Where ranks are.

    def _place(self, index: int | None) -> None:
        if self.ranks > 1:
            self._board.place(self.rank, self._step, index)

    def _instruction(self, rank: int) -> str:
        """The instruction that a rank is at, or "" where nothing is known of it."""
        index = self._board.read(rank).instruction
        if index is None:
            return ""
        try:
            return self._describe(rank, index)
        except Exception:  # a bad description must not hide the fault
            return f"instruction {index}"


def _own_client() -> Store:
    """A connection of our own to the store that the default process group met at.

    The store beneath all prefixes: the launcher that hosts it knows no prefix of torch's.
    """
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.clone()  # type: ignore[attr-defined, no-any-return]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _failure(fault: Fault) -> RankFailure:
    return RankFailure(fault.rank, fault.instruction, f"{fault.error}; {_REMEDY}")
