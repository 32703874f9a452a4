"""Supervisor of an elastic launch: it starts, watches and replaces processes."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from hydragraph.cluster.failure.failure_detector import Stopwatch
from hydragraph.cluster.failure.fault_record import announce_death, last_fault
from hydragraph.cluster.failure.time_limits import RETURN_S
from hydragraph.cluster.moving_store import write_address
from hydragraph.cluster.processes.launched_ranks import (
    Job,
    RankHandle,
    StoppedProcesses,
    dismiss,
    forget,
    kill_here,
    private_folder,
    raise_failure,
    start,
    wait_for_outcomes,
)
from hydragraph.cluster.processes.rank_process import (
    HOST,
    Departed,
    Died,
    Raised,
    Returned,
    Seat,
    Start,
    member_environment,
    rebuilt,
    run_member,
)
from hydragraph.cluster.processes.rendezvous_stores import client
from hydragraph.cluster.processes.stop_requests import handling
from hydragraph.cluster.rendezvous.protocol import (
    CoordinatorRegister,
    CoordinatorState,
    MemberRegister,
    RankLimits,
    awaited,
    decide,
)
from hydragraph.cluster.rendezvous.store_registers import MemberDescription, Registers, prefix, record_of, record_text
from hydragraph.cluster.supervision.coordinator import AgentLinks, InheritedMembers, RunMachines, RunOver, Seated
from hydragraph.cluster.supervision.election import Election, LeadershipLost
from hydragraph.cluster.supervision.leadership import GATHER_S, LeaseView
from hydragraph.errors import RankFailure, TooFewRanks
from hydragraph.spec.elastic import Elastic

_LOG = logging.getLogger(__name__)

_ARRIVAL = timedelta(minutes=30)
_LOOK_S = 0.02
# Time for members to report after an error that would recur
_GRACE_S = 8.0
# Delay before replacing a lost process; doubled for each short-lived replacement
_REJOIN_S = 0.5
_REJOIN_MOST_S = 60.0
# Ranks with shorter lifetimes are short-lived
_SHORT_S = 5.0
# Maximum processes in a seat that end before they are ready
_STARTS = 3
# Time limit for a new member to be ready, in multiples of `Elastic.progress_s`
_READYING = 3

# Errors that would recur after a restart
AGAIN = (ValueError, TypeError, OSError, ImportError, FloatingPointError)


def run_members(elastic: Elastic, nodes: RunMachines | None, job: Job) -> list[bytes]:
    ranks = job.ranks
    handed = None if nodes is None else nodes.handed
    kept = private_folder() if handed is None else handed.kept
    if nodes is not None and nodes.election is not None and handed is not None and (text := nodes.election.record):
        # A machine elected during a run continues with the earlier leader's
        # ranks and placement.
        saved = json.loads(text)
        ranks = saved["ranks"]
        nodes = replace(nodes, ranks=ranks, placed=tuple(saved["devices"]))
        if refusal := nodes.refusal(nodes.number, nodes.devices):
            raise ValueError(refusal)

    def started(number: int, seat: int, late: bool) -> RankHandle:
        place = Seat(seat, ranks, job.port) if hub is None else hub.nodes.seat(seat, job.port)
        order = Start(number, place, late, elastic.grace_s, job.work, job.prepared)
        if hub is not None and place.node != hub.nodes.number:
            return hub.start(place.node, replace(order, prepared=None))
        environment = member_environment(kept.name, None if hub is None else place.node)
        return start(job.context, number, run_member, order, variables=environment)

    store = client(HOST if nodes is None else nodes.address, job.port)
    hub: AgentLinks | None = None
    supervisor = Supervisor(started, store, ranks, elastic, crew=[] if handed is None else list(handed.crew))
    over: RunOver | None = RunOver()
    try:
        # Lead before others connect: from now on, a lost lease ends this
        # machine's ranks.
        if nodes is not None and nodes.election is not None:
            supervisor.lead(nodes.election)
        if nodes is not None:
            hub = supervisor.hub = AgentLinks(nodes, job.port)
            write_address(kept.name, nodes.address, job.port)
        if handed is not None:
            supervisor.adopt(handed)
        elif hub is not None:
            hub.gather(_ARRIVAL, supervisor.enough)
            supervisor.place()
        with job.relay.to([supervisor]), handling({signal.SIGUSR1: supervisor.refill}):
            supervisor.run(job.timeout_s)
        return supervisor.results()
    except LeadershipLost:
        # Other machines' processes continue under the next leader.
        supervisor.crew = [member for member in supervisor.crew if member.process.pid]
        over = None
        raise
    except BaseException as error:
        again = nodes is not None and isinstance(error, nodes.again) and not isinstance(error, (*AGAIN, TooFewRanks))
        over = RunOver("" if again else f"{type(error).__name__}: {error}", again)
        raise
    finally:
        dismiss(supervisor.crew)
        if hub is not None:
            hub.close(over)
        kept.cleanup()


@dataclass(eq=False)
class Supervisor:
    """Supervisor of one launch's members.

    Args:
        started: starts a member's process; its arguments are the member's number, seat, and `Seated.late`.
    """

    _started: Callable[[int, int, bool], RankHandle]
    _store: Any
    _ranks: int
    _elastic: Elastic
    hub: AgentLinks | None = None
    _election: Election | None = None
    crew: list[RankHandle] = field(default_factory=list)
    _record: CoordinatorState = field(default_factory=CoordinatorState)
    _seats: dict[int, Seated] = field(default_factory=dict)  # by member
    _since: dict[int, float] = field(default_factory=dict)
    # Time to refill each seat
    _waiting: dict[int, float] = field(default_factory=dict)
    # Consecutive short-lived processes, by seat
    _short: dict[int, int] = field(default_factory=dict)
    # Processes that ended unready, by seat
    _unready: dict[int, int] = field(default_factory=dict)
    _lost: list[RankHandle] = field(default_factory=list)
    # Seats that stay empty until their devices are back
    _empty: set[int] = field(default_factory=set)
    # Seconds that others have waited for a member
    _waited: dict[int, float] = field(default_factory=dict)
    # Seconds that a late member has prepared
    _readying: dict[int, float] = field(default_factory=dict)
    _stops: StoppedProcesses = field(default_factory=StoppedProcesses)
    _stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _fatal_at: float | None = None
    _stop: bool = False
    _told_stop: bool = False
    _back: bool = False
    _held: bool = False
    _next: int = 0

    def __post_init__(self) -> None:
        self._place = Registers(self._store)
        self._rules = RankLimits(self._ranks, self._elastic.min_ranks)

    def run(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not self.crew:
            self._place.order(self._record.orders)
            for seat in self._every_seat:
                if self._there(seat):
                    self._start(seat, late=seat >= self._ranks)
                else:
                    self._empty.add(seat)
        while (self._live() or self._may_come_back()) and time.monotonic() < min(deadline, self._fatal_at or deadline):
            if self._finished():
                return
            if self._election is not None:
                self._election.check()
            for member in wait_for_outcomes(self._live(), self._stops, _LOOK_S):
                self._ended(member)
            if self._fatal_at is None:
                self._coordinate()
                self._replace()
        if self._fatal_at is None and time.monotonic() >= deadline:
            members = [member.rank for member in self._live()]
            raise TimeoutError(f"launch: processes {members} had not returned after {timeout_s:g} s")

    def lead(self, election: Election) -> None:
        """Lead until this machine's lease ends; a thread then kills its ranks."""
        self._election = election
        election.guard(LeaseView.leads, lambda: kill_here(list(self.crew)))

    def adopt(self, handed: InheritedMembers) -> None:
        """Continue with an earlier leader's members; raise RankFailure if all have ended."""
        assert self.hub is not None
        assert self._election is not None
        text = self._election.record
        nodes: set[int] = set()
        if text:
            saved = json.loads(text)
            self._record = record_of(saved["record"])
            self._next = saved["next"]
            self._empty = set(saved["empty"])
            nodes = set(saved["nodes"])
        self._stop = self._record.orders.stop
        # The previous leader's ranks have ended.
        # crew: processes of all machines that came in time; seats: member -> Seated
        crew, seats = self.hub.adopt(nodes - {self._election.standing.lease.prior}, GATHER_S)
        self.crew += crew
        if not self.crew:
            raise RankFailure(0, "", "no rank is left: the leading machine was lost, and other machines had no ranks")
        self._seats = {**handed.seats, **seats}
        # The new store is empty. Members also repeat their registers: do not
        # overwrite them.
        for member, seated in self._seats.items():
            peer = MemberDescription(member, seated.seat, 0, "", node=self._node(seated.seat))
            self._place.adopt(peer, MemberRegister(ready=not seated.late))
        self._place.order(self._record.orders)
        # Refill the seats of members that did not come along.
        vacant = set(self._every_seat) - {self._seats[member.rank].seat for member in self.crew} - self._empty
        if self._elastic.rejoin:
            self._waiting = dict.fromkeys(vacant, time.monotonic() + _REJOIN_S)
        else:
            self._empty |= vacant

    def enough(self, waited_s: float) -> bool:
        """Return whether to start now, without machines that may have been lost with an earlier leader."""
        lost = self._election is not None and self._election.standing.lease.prior is not None
        if not lost or waited_s <= RETURN_S or self.hub is None:
            return False
        nodes = self.hub.placed(self._ranks)
        there = sum(self.hub.present(nodes.of(seat, nodes.ranks)) for seat in range(nodes.ranks))
        return there >= self._elastic.min_ranks

    def place(self) -> None:
        assert self.hub is not None
        nodes = self.hub.place(self._ranks)
        least = self._elastic.min_ranks
        if least > nodes.ranks:
            raise ValueError(f"min_ranks is {least}, but ranks is {nodes.ranks}: lower min_ranks")
        self._ranks = nodes.ranks
        self._rules = RankLimits(nodes.ranks, least)
        if len(set(nodes.placed)) > 1:
            here = [nodes.here(node, nodes.ranks) for node in range(nodes.count)]
            _LOG.warning("machines with %s devices run %s ranks", list(nodes.placed), here)

    @property
    def _every_seat(self) -> range:
        return range(self._ranks + self._elastic.spares)

    def _save(self) -> None:
        """Save the state for the next leader, before any member acts on it."""
        if self._election is not None:
            members = {self._next - 1, *(member.rank for member in self._live())}
            # Members lost with the previous leader have no known seat.
            nodes = {self._node(self._seats[member].seat) for member in members if member in self._seats}
            saved = {"record": record_text(self._record), "next": self._next}
            saved |= {"empty": sorted(self._empty), "nodes": sorted(nodes), "ranks": self._ranks}
            saved |= {"devices": () if self.hub is None else self.hub.nodes.placed}
            self._election.write(record=json.dumps(saved))

    def terminate(self) -> None:
        self._stop = True

    def refill(self, *_: object) -> None:
        self._back = True

    def results(self) -> list[bytes]:
        """Return the last generation's results by rank, or raise the error that ended the work."""
        returned = {member.rank: member.outcome for member in self.crew if isinstance(member.outcome, Returned)}
        order = [*self._record.current, *sorted(returned)]
        if returned and self._fatal_at is None:
            return [returned[member].value for member in dict.fromkeys(order) if member in returned]
        at_fault = [m for m in self.crew if isinstance(m.outcome, Raised)] if self._fatal_at else []
        raise_failure(at_fault or self._lost, last_fault(self._store), math.inf)
        left = [member.outcome.why for member in self.crew if isinstance(member.outcome, Departed)]
        raise RankFailure(0, "", f"no rank is left: {left[0] if left else self._record.orders.over or 'all were lost'}")

    def _start(self, seat: int, late: bool) -> None:
        number = self._next
        self._next += 1
        self._seats[number] = Seated(seat, late)
        # Save the number before using it: no leader may use a member's number again.
        self._save()
        self._place.say(number, MemberRegister(ready=not late))
        self._place.introduce(MemberDescription(number, seat, 0, "", node=self._node(seat)))
        self.crew.append(self._started(number, seat, late))

    def _node(self, seat: int) -> int:
        return 0 if self.hub is None else self.hub.nodes.of(seat, self._ranks)

    def _there(self, seat: int) -> bool:
        return self.hub is None or self.hub.present(self._node(seat))

    def _live(self) -> list[RankHandle]:
        return [member for member in self.crew if member.outcome is None]

    def _may_come_back(self) -> bool:
        coming = bool(self._waiting) and not self._record.orders.over
        return coming and self._fatal_at is None and not self._stop

    def _finished(self) -> bool:
        returned = any(isinstance(member.outcome, Returned) for member in self.crew)
        current = set(self._record.current)
        return returned and not any(member.rank in current for member in self._live())

    def _ended(self, member: RankHandle) -> None:
        outcome = member.outcome
        if isinstance(outcome, Returned | Departed):
            if isinstance(outcome, Departed):
                self._empty.add(self._seats[member.rank].seat)
                self._forget(member)
            return
        assert outcome is not None
        how = outcome.how if isinstance(outcome, Died) else outcome.summary
        # First tell the ranks that wait for this one. Watches know ranks, not members.
        current = self._record.current
        if member.rank in current:
            generation = prefix(self._record.orders.confirmed)
            announce_death(self._store, current.index(member.rank), how, generation)
        again = isinstance(outcome, Raised) and self._would_come_again(member, outcome)
        # An error that would recur ends the launch. Once state exists, it only costs a newcomer
        # its seat.
        if again and (member.rank in current or not self._held):
            self._fatal_at = time.monotonic() + _GRACE_S
            return
        seat = self._seats[member.rank].seat
        _LOG.warning("process %d, in seat %d, is lost: %s", member.rank, seat, how)
        self._lost = [*(other for other in self._lost if other.rank != member.rank), member]
        self._forget(member)
        if again:
            self._empty.add(seat)
        else:
            self._plan_replacement(member)

    def _would_come_again(self, member: RankHandle, outcome: Raised) -> bool:
        if isinstance(rebuilt(member.rank, outcome), AGAIN):
            return True
        same = [o for o in self._lost if isinstance(o.outcome, Raised) and o.outcome.summary == outcome.summary]
        return bool(same) and "RankFailure" not in outcome.summary

    def _forget(self, member: RankHandle) -> None:
        self.crew.remove(member)
        forget(member)

    def _plan_replacement(self, member: RankHandle) -> None:
        seat = self._seats[member.rank].seat
        ready = self._held and (member.rank in self._record.current or self._place.said(member.rank).ready)
        self._unready[seat] = 0 if ready else self._unready.get(seat, 0) + 1
        if not self._elastic.rejoin or self._unready[seat] >= _STARTS:
            self._empty.add(seat)
            return
        # wait for 1, 2, 3, ... short lives in a row: 0.5, 1, 2, ... s, at most 60 s
        short = time.monotonic() - self._since.get(member.rank, time.monotonic()) < _SHORT_S
        self._short[seat] = self._short.get(seat, 0) + 1 if short else 0
        wait_s = min(_REJOIN_MOST_S, _REJOIN_S * 2 ** min(10, max(0, self._short[seat] - 1)))
        self._waiting[seat] = time.monotonic() + wait_s

    def _replace(self) -> None:
        if self._record.orders.over:
            return
        if self._back:
            self._refill_seats(self._empty)
            self._back = False
        for node in () if self.hub is None else self.hub.arrived():
            occupied = {self._seats[member.rank].seat for member in self._live()}
            self._refill_seats({seat for seat in self._every_seat if self._node(seat) == node} - occupied)
        for seat, when in list(self._waiting.items()):
            if time.monotonic() >= when and self._there(seat):
                del self._waiting[seat]
                self._start(seat, late=self._held or seat >= self._ranks)

    def _refill_seats(self, seats: AbstractSet[int]) -> None:
        self._waiting |= dict.fromkeys(seats, time.monotonic())
        for seat in seats:
            self._short.pop(seat, None)
            self._unready.pop(seat, None)
        self._empty = self._empty - seats

    def _coordinate(self) -> None:
        if self.hub is not None:
            self.hub.drop_unreachable()
        said = self._said()
        self._give_up(said)
        if self._stop and not self._told_stop and self.hub is not None:
            self._told_stop = True
            self.hub.stop()
        record = decide(self._record, said, self._rules, coming=sum(map(self._there, self._waiting)))
        record = replace(record, orders=replace(record.orders, stop=self._stop))
        if record.orders == self._record.orders:
            return
        # Save before members can read orders: a next leader must know all
        # obeyed orders.
        before, self._record = self._record.orders, record
        self._save()
        self._place.order(record.orders)
        self._since |= {m: time.monotonic() for m in record.current if m not in self._since}
        _told(before, record.orders)
        for member in self._live():
            if member.rank in record.orders.out and member.rank not in before.out:
                member.outcome = Died(time.monotonic(), "was given up by the other ranks, and killed")
                self._ended(member)

    def _give_up(self, said: Mapping[int, MemberRegister]) -> None:
        elapsed = self._stopwatch.elapsed()
        # Until state exists, all members begin together
        late = awaited(self._record, said) if self._held else ()
        self._waited = {member: self._waited.get(member, 0.0) + elapsed for member in late}
        coming = [member for member, one in said.items() if self._held and self._seats[member].late and not one.ready]
        self._readying = {member: self._readying.get(member, 0.0) + elapsed for member in coming}
        limit = self._elastic.progress_s
        for member in self._live():
            how = ""
            if self._waited.get(member.rank, 0.0) >= limit:
                how = f"did not join the rendezvous within {limit:g} s (progress_s), and was killed"
            elif self._readying.get(member.rank, 0.0) >= _READYING * limit:
                how = f"was not ready after {_READYING * limit:g} s ({_READYING} times progress_s), and was killed"
            if how:
                member.outcome = Died(time.monotonic(), how)
                self._ended(member)

    def _said(self) -> Mapping[int, MemberRegister]:
        # Returned members count: `MemberRegister.done` ends the rendezvous.
        done = [member for member in self.crew if isinstance(member.outcome, Returned)]
        said = {member.rank: self._place.said(member.rank) for member in [*self._live(), *done]}
        self._held = self._held or any(one.holds for one in said.values())
        # Until state exists, late members cannot join.
        return said if self._held else {member: one for member, one in said.items() if not self._seats[member].late}


def _told(before: CoordinatorRegister, after: CoordinatorRegister) -> None:
    if after.confirmed != before.confirmed:
        new = after.proposal
        _LOG.info("generation %d has processes %s and has lost %s", new.number, new.members, new.lost)
    if after.over and not before.over:
        _LOG.info("no further rendezvous: %s", after.over)
