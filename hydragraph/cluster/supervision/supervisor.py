"""The processes of a launch that goes on when ranks are lost, seen from outside: started, watched, replaced, told."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hydragraph import log
from hydragraph.cluster.failure.failure_detector import PAUSE_S
from hydragraph.cluster.failure.fault_record import announce_death, last_fault
from hydragraph.cluster.processes.launched_ranks import (
    Context,
    RankHandle,
    Stops,
    dismiss,
    forget,
    outcome_of,
    raise_failure,
    start,
)
from hydragraph.cluster.processes.rank_process import (
    HOST,
    Died,
    Left,
    Raised,
    Readable,
    Returned,
    Seat,
    rebuilt,
    run_member,
)
from hydragraph.cluster.processes.rendezvous_stores import client
from hydragraph.cluster.processes.restart_cache import KEPT
from hydragraph.cluster.processes.stop_requests import Relay
from hydragraph.cluster.rendezvous.protocol import Orders, Record, Rules, Said, awaited, decide
from hydragraph.cluster.rendezvous.store_registers import Peer, Place, prefix
from hydragraph.cluster.supervision.coordinator import Hub, Nodes, Over, Start
from hydragraph.errors import RankFailure, TooFewRanks
from hydragraph.spec.elastic import Elastic

_LOG = logging.getLogger(__name__)

_ARRIVAL = timedelta(minutes=30)  # of all machines
_LOOK_S = 0.02  # between two looks at what members say
_GRACE_S = 8.0  # for members to tell their own errors, once one has that would come again
_REJOIN_S = 0.5  # before a lost process is replaced; twice as long each time that its replacement lives no longer
_REJOIN_MOST_S = 60.0
_SHORT_S = 5.0  # a life, from when it became a rank
_STARTS = 3  # of processes in one seat that end before they are ready
_READYING = 3  # times `Elastic.progress_s`: what a newcomer, for which nobody waits, has to get ready in

AGAIN = (ValueError, TypeError, OSError, ImportError, FloatingPointError)  # errors that would come again


def run_members(
    elastic: Elastic,
    nodes: Nodes | None,
    context: Context,
    ranks: int,
    port: int,
    work: bytes,
    timeout: timedelta | None,
    prepared: Readable | None = None,
    relay: Relay | None = None,
) -> list[bytes]:
    """Start ranks, and keep as many going as can be, until their work is done; leave none behind.

    Args:
        elastic: how few may go on, and how the lost are replaced.
        nodes: of several machines, this one: the first. None: all ranks are on this one.
        context, ranks, port, work, timeout, prepared, relay: as of `crew.run_crew`.

    Returns:
        What the ranks of the last generation returned, pickled, by rank.

    Raises:
        RankFailure, TimeoutError, any other error: as `launch`.
    """

    kept = tempfile.TemporaryDirectory(prefix="hydragraph-", ignore_cleanup_errors=True)  # of mode 0700

    def started(number: int, seat: int, late: bool) -> RankHandle:
        if nodes is None or hub is None:
            given = Seat(seat, ranks, port, {**os.environ, KEPT: kept.name}, log.shown())
            return start(context, number, run_member, given, number, late, elastic.grace_s, work, prepared)
        node = nodes.of(seat, ranks)
        given = Seat(seat, ranks, port, {}, None, nodes.address, node, nodes.here(node, ranks))
        if node:
            return hub.start(node, Start(number, given, late, elastic.grace_s, work))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        given = replace(given, environment={**environment, KEPT: kept.name, "GROUP_RANK": "0"}, log_level=log.shown())
        return start(context, number, run_member, given, number, late, elastic.grace_s, work, prepared)

    store = client(HOST if nodes is None else nodes.address, port)
    hub = None if nodes is None else Hub(nodes)
    supervisor = Supervisor(started, store, ranks, elastic, hub)
    over = Over()
    try:
        if hub is not None:
            hub.gather(_ARRIVAL)
        with (relay or Relay()).to([supervisor]):
            before = _on_return(supervisor.refill)
            try:
                supervisor.run(timeout)
            finally:
                before()
        return supervisor.results()
    except BaseException as error:
        again = nodes is not None and isinstance(error, nodes.again) and not isinstance(error, (*AGAIN, TooFewRanks))
        over = Over("" if again else f"{type(error).__name__}: {error}", again)
        raise
    finally:
        dismiss(supervisor.crew)
        if hub is not None:
            hub.close(over)
        kept.cleanup()


def _on_return(refill: Callable[[], None]) -> Callable[[], None]:
    """Call a function at SIGUSR1, by which a machine tells that devices are back; return what ends that."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGUSR1, lambda *_: refill())

    def end() -> None:
        signal.signal(signal.SIGUSR1, before)

    return end


class Supervisor:
    """Starts, watches and replaces the members of one launch.

    Args:
        started: starts the process of a member: its number, its seat, and whether the others are at work already.
        store: where members meet.
        ranks: how many there are to be.
        elastic: how few may go on, and how the lost are replaced.
        hub: of several machines, the way to the others.

    Attributes:
        crew: all processes that live or have told an outcome.
    """

    def __init__(
        self,
        started: Callable[[int, int, bool], RankHandle],
        store: Any,
        ranks: int,
        elastic: Elastic,
        hub: Hub | None = None,
    ) -> None:
        self._started = started
        self._store = store
        self._hub = hub
        self._place = Place(store)
        self._ranks = ranks
        self._elastic = elastic
        self._rules = Rules(ranks, elastic.min_ranks)
        self._record = Record()
        self._seats: dict[int, int] = {}  # by member
        self._since: dict[int, float] = {}  # when a member became a rank
        self._waiting: dict[int, float] = {}  # seats that are to be taken anew, and when
        self._short: dict[int, int] = {}  # how many processes in a row have lived a short life, by seat
        self._unready: dict[int, int] = {}  # how many have ended before they were ready
        self._lost: list[RankHandle] = []
        self._fatal_at: float | None = None
        self._stop = False
        self._told_stop = False
        self._back = False
        self._held = False  # whether any rank has ever held state; until then all begin together
        self._late: set[int] = set()  # members that get ready beside others, and join those that hold state
        self._empty: set[int] = set()  # seats that nobody takes until their devices are said to be back
        self._stops = Stops()
        self._waited: dict[int, float] = {}  # for how long others have waited for a member, in seconds
        self._readying: dict[int, float] = {}  # for how long a member has been getting ready beside others, in seconds
        self._before = time.monotonic()
        self.crew: list[RankHandle] = []
        self._next = 0

    def run(self, timeout: timedelta | None) -> None:
        """Go on until all have told their outcomes, or nobody can."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout is not None else float("inf")
        self._place.order(self._record.orders)
        for seat in range(self._ranks + self._elastic.spares):
            self._start(seat, late=seat >= self._ranks)
        while (self._live() or self._may_come_back()) and time.monotonic() < min(deadline, self._fatal_at or deadline):
            if self._finished():
                return
            self._hear()
            if self._fatal_at is None:
                self._coordinate()
                self._replace()
        if self._fatal_at is None and time.monotonic() >= deadline:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            members = [member.rank for member in self._live()]
            raise TimeoutError(f"launch: processes {members} had not returned after {seconds:g} s")

    def terminate(self) -> None:
        """Pass a request to stop on to all members: the work is stopped, not handed over (see `Relay`)."""
        self._stop = True  # a signal's handler calls this

    def refill(self) -> None:
        """Start processes in seats that stayed empty: the devices of those that left, or were lost, are back."""
        self._back = True

    def results(self) -> list[bytes]:
        """Return what the members of the last generation returned, by rank; raise what ended the work instead."""
        told = {member.rank: member.outcome for member in self.crew if isinstance(member.outcome, Returned)}
        order = [*self._record.current, *sorted(told)]
        if told and self._fatal_at is None:
            return [told[member].value for member in dict.fromkeys(order) if member in told]
        # What ended the work is an error of its own, where there is one, and not the ranks that were lost before.
        at_fault = [m for m in self.crew if isinstance(m.outcome, Raised)] if self._fatal_at else []
        raise_failure(at_fault or self._lost, last_fault(self._store), None)
        left = [member.outcome.why for member in self.crew if isinstance(member.outcome, Left)]
        raise RankFailure(0, "", f"no rank is left: {left[0] if left else self._record.orders.over or 'all were lost'}")

    def _start(self, seat: int, late: bool) -> None:
        number = self._next
        self._next += 1
        self._seats[number] = seat
        self._late |= {number} if late else set()
        self._place.say(number, Said(ready=not late))
        self._place.introduce(Peer(number, seat, 0, "", node=self._node(seat)))
        self.crew.append(self._started(number, seat, late))

    def _node(self, seat: int) -> int:
        return 0 if self._hub is None else self._hub.nodes.of(seat, self._ranks)

    def _there(self, seat: int) -> bool:
        """Say whether a process can be started in a seat."""
        return self._hub is None or self._hub.present(self._node(seat))

    def _live(self) -> list[RankHandle]:
        return [member for member in self.crew if member.outcome is None]

    def _may_come_back(self) -> bool:
        """Say whether processes are about to be started, though none lives: what was saved is not lost with them."""
        coming = bool(self._waiting) and not self._record.orders.over
        return coming and self._fatal_at is None and not self._stop

    def _finished(self) -> bool:
        """Say whether all that is left to wait for are members that were never needed."""
        returned = any(isinstance(member.outcome, Returned) for member in self.crew)
        current = set(self._record.current)
        return returned and not any(member.rank in current for member in self._live())

    def _hear(self) -> None:
        """Wait a moment for outcomes, and take them in."""
        waiting = self._live()
        signs: list[Any] = [sign for member in waiting for sign in (member.connection, member.process.sentinel)]
        ready = set(multiprocessing.connection.wait(signs, _LOOK_S))
        stopped = self._stops.look([member for member in waiting if member.process.pid])
        for member in waiting:
            if not ready.isdisjoint((member.connection, member.process.sentinel)):
                member.outcome = outcome_of(member)
            elif stopped is not None and stopped[0] == member.rank:
                member.outcome = Died(time.monotonic(), stopped[1])
            if member.outcome is not None:
                self._ended(member)

    def _ended(self, member: RankHandle) -> None:
        """Take in that a process has told its outcome, or has died."""
        outcome = member.outcome
        if isinstance(outcome, Returned | Left):
            if isinstance(outcome, Left):
                self._empty.add(self._seats[member.rank])
                self._forget(member)
            return
        assert outcome is not None
        how = outcome.how if isinstance(outcome, Died) else outcome.summary
        current = self._record.current
        if member.rank in current:
            generation = prefix(self._record.orders.confirmed)
            announce_death(self._store, current.index(member.rank), how, generation)
        if isinstance(outcome, Raised) and self._would_come_again(member, outcome):
            self._fatal_at = time.monotonic() + _GRACE_S
            return
        _LOG.warning("process %d, in seat %d, is lost: %s", member.rank, self._seats[member.rank], how)
        self._lost = [*(other for other in self._lost if other.rank != member.rank), member]
        self._forget(member)
        self._plan_replacement(member)

    def _would_come_again(self, member: RankHandle, outcome: Raised) -> bool:
        """Say whether an error is of the work and not of a device: by its kind, or as two members have raised it."""
        if isinstance(rebuilt(member.rank, outcome), AGAIN):
            return True
        same = [o for o in self._lost if isinstance(o.outcome, Raised) and o.outcome.summary == outcome.summary]
        return bool(same) and "RankFailure" not in outcome.summary

    def _forget(self, member: RankHandle) -> None:
        self.crew.remove(member)
        forget(member)

    def _plan_replacement(self, member: RankHandle) -> None:
        """Decide when another process takes a lost one's seat."""
        seat = self._seats[member.rank]
        ready = self._held and (member.rank in self._record.current or self._place.said(member.rank).ready)
        self._unready[seat] = 0 if ready else self._unready.get(seat, 0) + 1
        if not self._elastic.rejoin or self._unready[seat] >= _STARTS:
            self._empty.add(seat)
            return
        short = time.monotonic() - self._since.get(member.rank, time.monotonic()) < _SHORT_S
        self._short[seat] = self._short.get(seat, 0) + 1 if short else 0
        wait_s = min(_REJOIN_MOST_S, _REJOIN_S * 2 ** max(0, self._short[seat] - 1))
        self._waiting[seat] = time.monotonic() + wait_s

    def _replace(self) -> None:
        """Start processes in seats whose time has come."""
        if self._record.orders.over:
            return
        if self._back:
            self._waiting |= dict.fromkeys(self._empty, time.monotonic())
            for seat in self._empty:
                self._short.pop(seat, None)
                self._unready.pop(seat, None)
            self._empty.clear()
            self._back = False
        for node in () if self._hub is None else self._hub.arrived():
            self._welcome(node)
        for seat, when in list(self._waiting.items()):
            if time.monotonic() >= when and self._there(seat):
                del self._waiting[seat]
                self._start(seat, late=self._held or seat >= self._ranks)

    def _welcome(self, node: int) -> None:
        """Have processes started in the seats of a machine that has come back: its past counts no more."""
        taken = {self._seats[member.rank] for member in self._live()}
        seats = {seat for seat in self._seats.values() if self._node(seat) == node} - taken
        self._waiting |= dict.fromkeys(seats, time.monotonic())
        self._empty -= seats
        for seat in seats:
            self._short.pop(seat, None)
            self._unready.pop(seat, None)

    def _coordinate(self) -> None:
        """Look at what members say, and tell what follows."""
        said = self._said()
        self._give_up(said)
        if self._stop and not self._told_stop and self._hub is not None:
            self._told_stop = True
            self._hub.stop()
        record = decide(self._record, said, self._rules, coming=sum(map(self._there, self._waiting)))
        record = replace(record, orders=replace(record.orders, stop=self._stop))
        if record.orders == self._record.orders:
            return
        before, self._record = self._record.orders, record
        self._place.order(record.orders)
        self._since |= {m: time.monotonic() for m in record.current if m not in self._since}
        _told(before, record.orders)
        for member in self._live():
            if member.rank in record.orders.out and member.rank not in before.out:
                member.outcome = Died(time.monotonic(), "was given up by the other ranks, and ended")
                self._ended(member)

    def _give_up(self, said: Mapping[int, Said]) -> None:
        """Give up members that others have waited for too long, and newcomers that do not get ready: they hang."""
        now = time.monotonic()
        elapsed, self._before = min(now - self._before, PAUSE_S), now  # while this process was stopped nobody was late
        late = awaited(self._record, said) if self._held else ()  # until there is state all begin together
        self._waited = {member: self._waited.get(member, 0.0) + elapsed for member in late}
        coming = [member for member, one in said.items() if self._held and member in self._late and not one.ready]
        self._readying = {member: self._readying.get(member, 0.0) + elapsed for member in coming}
        limit = self._elastic.progress_s
        for member in self._live():
            how = ""
            if self._waited.get(member.rank, 0.0) >= limit:
                how = f"did not come to meet the others for {limit:g} s (progress_s), and was ended"
            elif self._readying.get(member.rank, 0.0) >= _READYING * limit:
                how = f"was not ready after {_READYING * limit:g} s ({_READYING} times progress_s), and was ended"
            if how:
                member.outcome = Died(now, how)
                self._ended(member)

    def _said(self) -> Mapping[int, Said]:
        done = [member for member in self.crew if isinstance(member.outcome, Returned)]
        said = {member.rank: self._place.said(member.rank) for member in [*self._live(), *done]}
        self._held = self._held or any(one.holds for one in said.values())
        # Whoever is to be brought in has nothing to begin with.
        return said if self._held else {member: one for member, one in said.items() if member not in self._late}


def _told(before: Orders, after: Orders) -> None:
    if after.confirmed != before.confirmed:
        generation = after.proposal
        _LOG.info("generation %d: processes %s, without %s", generation.number, generation.members, generation.lost)
    if after.over and not before.over:
        _LOG.info("nobody meets any more: %s", after.over)
