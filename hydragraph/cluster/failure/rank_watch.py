"""Failure watch: a thread of each rank that detects failures (docs/architecture.md) from the rendezvous to the end.

After a failure:

1. Calls that wait for the failed rank can briefly fail with their own errors. Then each process shuts down its
   communicators' sockets (or aborts NCCL's communicators), because gloo never ends a wait on a live rank that does not
   answer.
2. Each process abandons waits that still do not end, such as gloo's receive of a message that broke off. Waits run
   on a separate thread, so that they can be abandoned.
3. Every rank except the failed one raises RankFailure for the agreed fault, in this and every later call.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hydragraph import log
from hydragraph.cluster.failure import stack_dump
from hydragraph.cluster.failure.abandonable_wait import Waiter
from hydragraph.cluster.failure.failure_detector import (
    ENDED,
    PAUSE_S,
    Accusation,
    FailureDetector,
    Stall,
    Stopwatch,
    seen_of,
)
from hydragraph.cluster.failure.fault_record import NAMESPACE, Fault, FaultRecord, root
from hydragraph.cluster.failure.node_sentinel import Sentinel, SentinelSettings
from hydragraph.cluster.failure.open_sockets import open_sockets, shut_down
from hydragraph.cluster.failure.process_liveness import WatchedProcess, machine
from hydragraph.cluster.failure.rank_registry import RankEntry, RankRegistry
from hydragraph.cluster.failure.store_client import StorePoller, StoreUnavailable
from hydragraph.cluster.failure.time_limits import PATIENCE_S, PROGRESS_S, SUSPECT_S, UNREACHABLE_S
from hydragraph.cluster.message_in_flight import Operation
from hydragraph.errors import RankFailure, Stopped

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# A rank's last call begins with this after it has closed its executable
CLOSED = "close"
_REMEDY = "restart all ranks and load the last checkpoint"
# A poll of the store costs 30-95 us
_POLL = timedelta(seconds=0.1)
# Average number of ranks per poll
_LOOKED_AT = 8
# Seconds between checks for new ranks
_ROLL_S = 1.0
# Time for waits on a closed connection to fail
_HEAD_START = timedelta(seconds=0.3)
# Time for waits to end after the shutdown
_LAST_CHANCE = timedelta(seconds=0.5)
_MEETING = timedelta(seconds=30)
_TOGETHER = (ValueError, FloatingPointError, Stopped)
_AGREED = "_hydragraph_agreed"


class _Disconnected(RuntimeError):  # noqa: N818
    """A communication error, perhaps caused by another rank."""


def agreed(error: BaseException) -> BaseException:
    """Mark an error that all ranks raise together, which is not a rank failure."""
    setattr(error, _AGREED, True)
    return error


class _Calls(threading.local):
    """A thread's calls in progress, outermost first."""

    def __init__(self) -> None:
        self.open: list[str] = []


class RankWatch:
    """Failure watch over the ranks of a store; every rank creates one without waiting.

    Args:
        store: the rendezvous store; None for a single process.
        number: index of this watch in the store, equal on all ranks.
        generation: name of the set of ranks within a launch.
    """

    def __init__(self, store: Store | None, rank: int, ranks: int, *, number: int = 0, generation: str = "") -> None:
        self.rank = rank
        self.ranks = ranks
        log.at_rank(rank, ranks)
        # The watch must not keep an executable alive.
        self._describe: Callable[[], Callable[[int, int, int], str] | None] = lambda: None
        self._fault: Fault | None = None
        self._step = 0
        self._inside = 0
        self._waits = 0
        self._calls = _Calls()
        self._main = threading.get_ident()
        # Texts of this rank's last action, and of the main and another thread's current call
        self._resting = self._shown = self._beside = ""
        self._guarded: set[tuple[int, str]] = set()
        self._aborts: list[Callable[[], Callable[[], None] | None]] = []
        self._cutting = threading.Lock()
        self._counting = threading.Lock()
        self._cut_at: float | None = None
        self._stopped = threading.Event()
        self._judge = FailureDetector()
        self._stall = Stall()
        self._members: tuple[RankEntry, ...] = ()
        self._unseen_s = 0.0
        self._explaining = False
        self._death: tuple[int, str] | None = None
        self._first = False
        self._sentinel: Sentinel | None = None
        self._waiter = Waiter(_POLL)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        if ranks > 1:
            assert store is not None, "a watch over several ranks needs a store"
            self._meet(store, number, generation)

    def _meet(self, store: Store, number: int, generation: str) -> None:
        proposed = f"hydragraph/{uuid.uuid4().hex}"
        # Every rank proposes a random name; all get the first.
        name = store.compare_set(f"hydragraph/watch/{number}", "", proposed).decode()
        self._host = socket.gethostname()
        client = root(store).clone()  # pyrefly: ignore[missing-attribute]  # PyTorch's stub lacks it
        self._ledger = FaultRecord(client, name, generation)
        roll = RankRegistry(client, name, machine())
        self._asked_roll = 0.0

        def meet() -> bool:
            if self.rank == 0:
                # The launcher finds the newest watch's fault here (`last_fault`).
                client.set(NAMESPACE, name)
            self._board = roll.board(self.ranks)
            return roll.enter(RankEntry(self.rank, self._host, WatchedProcess.own()))

        self._asker = StorePoller(lambda: self._ask(client, roll, name), _POLL)
        try:
            self._first = self._asker.ask(meet, _MEETING)
        except StoreUnavailable:
            raise RankFailure(self.rank, "join", "the rendezvous store does not answer", self._host) from None
        stack_dump.answer()
        atexit.register(self._end_of_process)
        self._thread = threading.Thread(target=self._run, name="hydragraph-watch", daemon=True)
        self._thread.start()

    @property
    def progress_s(self) -> float:
        return PROGRESS_S if self._thread is None else self._board.progress_s

    @progress_s.setter
    def progress_s(self, seconds: float) -> None:
        if self._thread is not None:
            self._board.progress_s = seconds

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """After a fault, shut down the connections opened in this context."""
        before = open_sockets()
        try:
            yield
        finally:
            self._guarded |= open_sockets() - before

    def also_abort(self, abort: Callable[[], None]) -> None:
        self._aborts = [*(kept for kept in self._aborts if kept() is not None), _weakly(abort)]

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Run a collective call, on any thread; raise RankFailure if another rank failed."""
        with self._entered(what):
            try:
                yield
            except (*_TOGETHER, RankFailure):
                raise
            except Exception as error:
                if isinstance(error, _Disconnected) or not getattr(error, _AGREED, False):
                    self._fail(error)
                raise
            except BaseException as error:
                # An interrupt, or this process's end
                self.report(error)
                raise

    @contextmanager
    def step(self, number: int, describe: Callable[[int, int, int], str] | None = None) -> Iterator[None]:
        """Run one step; errors not marked by `agreed` are failures of this rank.

        Args:
            describe: returns an instruction's text by rank, index and step, on any thread.
        """
        self._step = number
        if describe is not None:
            self._describe = _weakly(describe)
        with self._entered("step"):
            try:
                yield
            except RankFailure:
                raise
            except BaseException as error:
                if not getattr(error, _AGREED, False):
                    self._fail(error)
                raise
            finally:
                self.at(None)

    @contextmanager
    def _entered(self, what: str) -> Iterator[None]:
        self.check()
        calls = self._calls.open
        calls.append(what)
        # `_inside` counts all threads' calls, `_calls` names this thread's.
        with self._counting:
            self._inside += 1
        self._show(what)
        try:
            yield
        finally:
            calls.pop()
            with self._counting:
                self._inside -= 1
            beside = threading.get_ident() != self._main
            self._show(calls[-1] if calls else "" if beside else self._resting)

    def rest(self, after: str) -> None:
        """Record this rank's last action, for errors between calls."""
        self._resting = after
        if not self._calls.open:
            self._show(after)

    def _show(self, call: str) -> None:
        if threading.get_ident() != self._main:
            self._beside = call
        else:
            self._shown = call
            self.at(None)
        if self._thread is not None:
            self._board.call(self.rank, self._shown or self._beside)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, _Disconnected):
            if self._fault is None:
                self.report(error)
            return
        # Another rank usually causes a communication error: search for it.
        failure = self.explain(error)
        cause = error.__cause__
        ours = self._fault is None or (self._fault.rank, self._fault.error) == (self.rank, _text(cause or error))
        if failure.rank == self.rank and ours and cause is not None:
            raise cause from None
        raise failure from error.__cause__

    def at(self, index: int | None) -> None:
        """Record this rank's current instruction in about 1 us."""
        if self._thread is not None:
            self._board.place(self.rank, self._step, index)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """During a watched call, mark RuntimeErrors as communication errors."""
        try:
            yield
        except (_Disconnected, RankFailure, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if not self._calls.open:
                raise
            raise _Disconnected(str(error)) from error

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waited(1)
        try:
            yield
        finally:
            self._waited(-1)

    def _waited(self, change: int) -> None:
        with self._counting:
            self._waits += change
            if self._thread is not None:
                self._board.lines[self.rank].waiting = self._waits > 0

    def wait(self, work: Operation, waiter: Waiter | None = None) -> None:
        if self.ranks == 1 or work.is_completed():
            with self.communicating():
                work.wait()
        else:
            self.call(work.wait, waiter)

    def call(self, function: Callable[[], T], waiter: Waiter | None = None) -> T:
        """Return a function's result, or raise when communication is shut down."""
        with self.communicating():
            if self.ranks == 1:
                return function()
            with self.waiting():
                return (waiter or self._waiter).run(function, self._abandoned)

    def _abandoned(self) -> bool:
        return self._cut_at is not None and time.monotonic() - self._cut_at > _LAST_CHANCE.total_seconds()

    def waiter(self) -> Waiter:
        return Waiter(_POLL)

    def check(self) -> None:
        if self._fault is not None:
            raise self._failure(self._fault)

    @property
    def broken(self) -> bool:
        return self._fault is not None

    @property
    def closed(self) -> bool:
        return self._stopped.is_set()

    def report(self, error: BaseException) -> None:
        """Record this rank's error unless a fault is known; shut down communication."""
        if self._thread is not None:
            self._agree(Fault(self.rank, self._step, self._here(), _text(error), self._host))
            self._cut()

    def ended_by(self, error: BaseException) -> None:
        """Report the error that ends this process, or the rank that caused it."""
        if type(error) in (RuntimeError, dist.DistBackendError):
            self.explain(error)
        else:
            self.report(error)

    def lose_store(self) -> None:
        if self._thread is not None and self._fault is None and not self.closed:
            self._cut_off("is lost: another machine leads now")

    def explain(self, error: BaseException) -> RankFailure:
        """Search a few seconds for the rank that caused a communication error; if none is found, name this rank."""
        cause = error.__cause__ if isinstance(error, _Disconnected) and error.__cause__ else error
        if self._thread is None:
            return self._failure(Fault(self.rank, self._step, "", _text(cause)))
        deadline = time.monotonic() + PATIENCE_S
        self._explaining = True
        # The watch's thread may find the fault meanwhile. A rank that has just stopped or ended explains
        # the error, but `_look` does not accuse it yet.
        while self._fault is None and time.monotonic() < deadline:
            accused = self._judge.suspect(SUSPECT_S)
            if accused is not None and self._death is None:
                # The launcher should report first
                time.sleep(2 * _POLL.total_seconds())
                self._accuse(accused)
            time.sleep(_POLL.total_seconds() / 2)
        if self._fault is None:
            # Ranks that closed their executables also break connections.
            shown = {member.rank: self._board.read(member.rank).call for member in self._members}
            for rank in [rank for rank, call in shown.items() if call.startswith(CLOSED)][:1]:
                self._accuse(Accusation(rank, "it closed its executable too early: make the same calls on every rank"))
        own = Fault(self.rank, self._step, self._here(), _text(cause), self._host)
        fault = self._fault or self._agree(own)
        self._cut()
        return self._failure(fault)

    def close(self) -> None:
        if self._thread is None or self._pid != os.getpid():
            self._stopped.set()
            return
        if self._fault is None:
            self._board.lines[self.rank].left = True
        self._board.lines[self.rank].finished = True
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._thread = None
        self._waiter.close()
        # Otherwise `_asker` may still read the board
        if self._asker.close():
            self._board.close()
        atexit.unregister(self._end_of_process)

    def _end_of_process(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and self._fault is None and self._pid == os.getpid():
            self.ended_by(error)
        self.close()

    def _run(self) -> None:
        stopwatch = Stopwatch()
        while not self._stopped.wait(_POLL.total_seconds()):
            self._look(stopwatch.elapsed())
            if self._fault is not None:
                if self._fault.stalled:
                    # Write the stacks first: this process may end after the shutdown
                    self._write_stacks(self._fault)
                if not self._stopped.wait(_HEAD_START.total_seconds()):
                    self._cut()
                return

    def _ask(self, client: Store, roll: RankRegistry, name: str) -> None:
        fault = self._ledger.read()
        self._death = self._ledger.death()
        if fault is not None:
            self._fault = self._fault or fault
        now = time.monotonic()
        if len(self._members) < self.ranks and now - self._asked_roll > _ROLL_S:
            self._members = roll.members()
            self._asked_roll = now
            several = self._first and len(self._members) < self.ranks and len(roll.machines()) > 1
            reachable = isinstance(client, dist.TCPStore)
            if several and reachable and self._sentinel is None and self._fault is None:
                place = (client.host, client.port)
                self._sentinel = Sentinel(SentinelSettings(*place, name, roll.machine, self._board.address, self.ranks))
        if self._sentinel is not None and self._fault is None:
            self._sentinel.keep_up()

    def _look(self, elapsed: float) -> None:
        accused = self._looked_at_ranks(elapsed)
        self._asker.silent_s += elapsed
        if self._fault is not None:
            return
        # The most reliable evidence first. Outside of calls, only ended processes are accused.
        if self._death is not None:
            self._accuse(Accusation(*self._death))
        elif accused is not None and (self._inside or accused.error == ENDED):
            self._accuse(accused)
        elif self._inside and self._asker.gone:
            self._cut_off("has closed the connection: the store's process has ended")
        elif self._inside and self._asker.silent_s >= UNREACHABLE_S:
            self._cut_off(f"has not answered for {UNREACHABLE_S:g} s: its machine is lost, or the link to it is down")

    def _looked_at_ranks(self, elapsed: float) -> Accusation | None:
        self._unseen_s += elapsed
        # Look every 0.1 s for up to 8 ranks of this machine, every 0.2 s for 16, and at least every
        # PAUSE_S, the most that detectors count between looks.
        every = min(PAUSE_S, _POLL.total_seconds() * len(self._members) / _LOOKED_AT)
        if self._unseen_s < every and not self._explaining:
            return None
        unseen, self._unseen_s = self._unseen_s, 0.0
        seen = {m.rank: seen_of(m.process, self._board.read(m.rank)) for m in self._members}
        accused = self._judge.look(unseen, seen)
        # A stall needs all ranks' progress; with several machines, sentinels collect it.
        if accused is None and len(seen) == self.ranks:
            accused = self._stall.look(unseen, seen, self.progress_s)
        return accused

    def _cut_off(self, how: str) -> None:
        error = f"the rendezvous store {how}"
        self._fault = Fault(self.rank, self._step, self._instruction(self.rank), error, self._host)

    def _accuse(self, accused: Accusation) -> None:
        progress = self._board.read(accused.rank)
        host = next((m.host for m in self._members if m.rank == accused.rank), "")
        where = self._instruction(accused.rank)
        self._agree(Fault(accused.rank, progress.step, where, accused.error, host, accused.stalled))

    def _agree(self, fault: Fault) -> Fault:
        try:
            self._fault = self._asker.ask(lambda: self._ledger.write(fault), timedelta(seconds=2))
        except StoreUnavailable:
            self._fault = self._fault or fault
        return self._fault

    def _cut(self) -> None:
        with self._cutting:
            # NCCL's operations need an abort; gloo's end with their sockets.
            for kept in self._aborts:
                if (abort := kept()) is not None:
                    abort()
            # Descriptors are reused, so shut down only unchanged sockets.
            for descriptor, _ in self._guarded & open_sockets():
                shut_down(descriptor)
            self._aborts = []
            self._guarded = set()
            if self._cut_at is None and self._fault is not None:
                _LOG.info("shut down communication: %s", self._failure(self._fault))
            self._cut_at = self._cut_at or time.monotonic()

    def _write_stacks(self, fault: Fault) -> None:
        if fault.rank != self.rank:
            stack_dump.write(f"rank {self.rank} of {self.ranks} ({self._host}), which waits for rank {fault.rank}")
        others = [m.rank for m in self._members if m.rank != fault.rank]
        # _members: this machine's ranks; the lowest other one asks, so that
        #   stacks are written once
        if self.rank == min(others, default=fault.rank):
            for member in self._members:
                if member.rank == fault.rank:
                    who = f"rank {fault.rank} of {self.ranks} ({member.host}), which makes no progress"
                    stack_dump.ask(member.process.pid, who)

    def _instruction(self, rank: int) -> str:
        progress = self._board.read(rank)
        if progress.instruction is None:
            return progress.call
        return self._described(rank, progress.instruction, progress.step)

    def _here(self) -> str:
        beside = threading.get_ident() != self._main and self._calls.open
        return beside[-1] if beside else self._instruction(self.rank)

    def _described(self, rank: int, index: int, step: int) -> str:
        # A bad description must not hide the fault
        with suppress(Exception):
            if (describe := self._describe()) is not None:
                return describe(rank, index, step)
        return f"instruction {index}"

    def _failure(self, fault: Fault) -> RankFailure:
        where = fault.instruction
        if fault.index is not None:
            where = self._described(fault.rank, fault.index, fault.step)
        return RankFailure(fault.rank, where, f"{fault.error}; {_REMEDY}", fault.host)


def _weakly(function: F) -> Callable[[], F | None]:
    return weakref.WeakMethod(function) if hasattr(function, "__self__") else lambda: function


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
