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

import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hydragraph.errors import RankFailure
from hydragraph.runtime.failure.board import Board, Pulse
from hydragraph.runtime.failure.ledger import NAMESPACE, Fault, Ledger, own_client
from hydragraph.runtime.failure.sockets import open_sockets, shut_down
from hydragraph.runtime.failure.waiter import Waiter
from hydragraph.runtime.message import Work

_REMEDY = "restart all ranks and load the last checkpoint"
_POLL = timedelta(seconds=0.1)  # a poll of the store costs 30-95 us
_HEAD_START = timedelta(seconds=0.3)  # waits on a closed peer fail within 0.1 s; those messages are the better ones
_STOPPED = timedelta(seconds=1.5)  # once communication has failed: a heartbeat that is missing for so long has stopped
_PATIENCE = timedelta(seconds=2.5)  # to learn who is at fault; longer than _STOPPED, so that a stopped rank is found
_LAST_CHANCE = timedelta(seconds=0.5)  # for waits to end by the cut; it takes effect within 0.1 s where it does
_SILENCE = timedelta(seconds=10)  # with no other sign of a failure; a long call that holds the GIL also stops the beat


class _Disconnected(RuntimeError):  # noqa: N818
    """Marks an error of communication, whose origin may be another rank; its cause is the error itself."""


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
        self._pulse = Pulse(self._board, self._local, _POLL)
        store = own_client()
        if self.rank == 0:
            store.set(NAMESPACE, f"hydragraph/{name}")
        self._ledger = Ledger(store, f"hydragraph/{name}")
        self._waiter = Waiter(_POLL)
        self._thread = threading.Thread(target=self._run, name="hydragraph-watch", daemon=True)
        self._thread.start()

    # What the executor calls.

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Makes the connections opened inside the ones to cut after a fault: create communicators inside."""
        before = open_sockets()
        yield
        self._guarded |= open_sockets() - before

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
            for descriptor, _ in self._guarded & open_sockets():
                shut_down(descriptor)
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


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _failure(fault: Fault) -> RankFailure:
    return RankFailure(fault.rank, fault.instruction, f"{fault.error}; {_REMEDY}")
