"""Supervisor on a machine that does not lead; it starts and ends processes on the leader's orders."""

from __future__ import annotations

import logging
import multiprocessing.connection
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory

from hydragraph.cluster.failure.time_limits import UNREACHABLE_S
from hydragraph.cluster.moving_store import write_address
from hydragraph.cluster.processes.launched_ranks import (
    Context,
    RankHandle,
    StoppedProcesses,
    dismiss,
    forget,
    kill_here,
    private_folder,
    start,
    wait_for_outcomes,
)
from hydragraph.cluster.processes.rank_process import Returned, Start, member_environment, run_member
from hydragraph.cluster.processes.stop_requests import handling
from hydragraph.cluster.supervision.coordinator import (
    BEAT_S,
    DevicesAvailable,
    Ended,
    InheritedMembers,
    Kill,
    Leaving,
    Link,
    ProbeAddress,
    ProbedMachines,
    RunMachines,
    RunOver,
    Seated,
    Stop,
    UnheardMachines,
    Welcome,
    host_of,
    reach,
)
from hydragraph.cluster.supervision.election import Election
from hydragraph.cluster.supervision.leadership import LeaseView, keeps
from hydragraph.cluster.supervision.link_probe import LinkProbe
from hydragraph.cluster.unreachable import TOLD_S, first_host
from hydragraph.errors import EndedElsewhere

_LOG = logging.getLogger(__name__)

ARRIVAL_S = 1800.0
BACK_S = 300.0
_TRY_S = 0.5
_TRY_ELECTED_S = 0.1
# Time for the leader to report that all machines are being stopped
_TOGETHER_S = 1.0


@dataclass(frozen=True)
class LeaderlessState:
    """State while the link to an elected leader is down (see `keeps`).

    Attributes:
        refused: address of the leader that last refused a connection.
    """

    term: int
    since: float
    refused: str = ""


@dataclass(eq=False)
class NodeAgent:
    _context: Context
    _nodes: RunMachines
    _say: Callable[[str], None]
    _asked_at: float | None = None
    _told: bool = False
    _stopping: bool = False
    _back: bool = False
    _crew: dict[int, RankHandle] = field(default_factory=dict)
    _seats: dict[int, Seated] = field(default_factory=dict)
    _alone: LeaderlessState | None = None
    _kept: TemporaryDirectory[str] | None = None
    _probe: LinkProbe | None = None

    def run(self, arrival_s: float = ARRIVAL_S, back_s: float = BACK_S) -> InheritedMembers | None:
        """Serve until the run ends, or this machine is preempted or elected; if elected, return all processes."""
        before = handling({signal.SIGTERM: self._asked, signal.SIGINT: self._asked, signal.SIGUSR1: self._repaired})
        handed = None
        if self._election is not None:
            self._election.guard(self._may_live, lambda: kill_here(list(self._crew.values())))
        try:
            patience_s = back_s if self._election is not None and self._election.standing.joined else arrival_s
            while (link := self._reach(patience_s)) is not None:
                over = self._serve(link)
                if over is not None and over.error:
                    what = "this process" if over.here else "the run"
                    raise EndedElsewhere(f"{self._leader} has ended {what}: {over.error}")
                if over is not None and not over.again:
                    return None
                patience_s = back_s
                if over is None:
                    self._say(f"hydragraph: {self._lost(link, back_s)}")
            if self._election is not None and self._election.leads:
                handed = InheritedMembers(tuple(self._crew.values()), self._seats, self._kept or private_folder())
            return handed
        finally:
            if handed is None:
                self._dismiss()
            before.close()

    @property
    def _election(self) -> Election | None:
        return self._nodes.election

    @property
    def _leader(self) -> str:
        return "the first machine" if self._election is None else f"machine {self._election.standing.lease.node}"

    def _may_live(self, standing: LeaseView, now: float) -> bool:
        alone = self._alone
        if alone is None:
            return True
        return keeps(standing, alone.term, alone.since, alone.refused == standing.lease.place != "", now)

    def _lost(self, link: Link, back_s: float) -> str:
        if self._election is not None:
            wait = "this machine's ranks wait for the next leader"
            if self._election.silent:
                wait = f"this machine ends its ranks, and waits {back_s:g} s, because {self._election.silent}"
            return f"the leading machine is lost: {link.down}; {wait}"
        return (
            f"the first machine ({self._nodes.address}) is lost: {link.down}; this machine ends its ranks, because "
            f"other machines may continue without them, and waits {back_s:g} s for the first machine"
        )

    def _repaired(self, number: int, frame: object) -> None:
        self._back = True

    def _asked(self, number: int, frame: object) -> None:
        self._asked_at = self._asked_at or time.monotonic()

    def _reach(self, patience_s: float) -> Link | None:
        began = time.monotonic()
        told = self._election is not None
        while self._asked_at is None and not (self._election is not None and self._election.leads):
            standing = LeaseView() if self._election is None else self._election.standing
            lease = standing.lease
            if standing.joined and lease.over is not None:
                if lease.over:
                    raise EndedElsewhere(f"{self._leader} has ended the run: {lease.over}")
                return None
            try:
                return reach(self._nodes, self._seats)
            except (OSError, RuntimeError) as error:
                if self._alone is not None:
                    refused = lease.place if isinstance(error, ConnectionRefusedError) else ""
                    self._alone = replace(self._alone, refused=refused)
                waited_s = time.monotonic() - began
                if waited_s > patience_s:
                    raise ConnectionError(self._unreachable(patience_s, error)) from None
                if not told and waited_s > TOLD_S:
                    told = True
                    self._say(f"hydragraph: waiting for {first_host(error, self._nodes.address, self._nodes.port)}")
                time.sleep(_TRY_S if self._election is None else _TRY_ELECTED_S)
        return None

    def _unreachable(self, patience_s: float, error: Exception) -> str:
        again = "start the same command again, with --resume, on"
        if self._election is not None:
            why = self._election.silent or str(error)
            return f"no leading machine could be reached within {patience_s:g} s: {why}; then {again} all machines"
        where = first_host(error, self._nodes.address, self._nodes.port)
        return f"this machine could not connect within {patience_s:g} s to {where}; then {again} both machines"

    def _serve(self, link: Link) -> RunOver | None:
        stops = StoppedProcesses()
        if self._election is not None:
            self._election.join()
        self._probe = self._probing(link)
        self._alone = None
        self._kept = self._kept or private_folder()
        over = None
        try:
            while not link.down:
                over = self._obey(link, self._kept.name)
                if over is not None:
                    break
                self._look(link, stops)
                if self._back:
                    self._back = False
                    link.send(DevicesAvailable())
                if self._drained(link):
                    link.close("its machine was asked to leave")
                    over = RunOver()
                if self._election is not None and self._election.standing.lease.term != link.term:
                    link.close("another machine leads")
            return over
        finally:
            # Without an election, others may continue without this machine, so
            # end its ranks now.
            if self._election is None or over is not None:
                self._dismiss()
            else:
                # After a long silence, do not wait for `DOUBT_S`: the leader may soon continue alone.
                self._alone = LeaderlessState(link.term, time.monotonic() if link.silent_s < UNREACHABLE_S else 0.0)
            link.close("")
            if self._probe is not None:
                self._probe.close()

    def _probing(self, link: Link) -> LinkProbe | None:
        if self._nodes.count < 3:
            return None

        def tell(nodes: tuple[int, ...]) -> None:
            names = ", ".join(map(str, nodes))
            _LOG.warning("machines that cannot reach this machine: %s", names or "none")
            link.send(UnheardMachines(nodes))

        probe = LinkProbe(self._nodes.number, host_of(link), tell)
        link.send(ProbeAddress(probe.address))
        return probe

    def _obey(self, link: Link, kept: str) -> RunOver | None:
        signs = [link.connection, *(s for m in self._live() for s in (m.connection, m.process.sentinel))]
        multiprocessing.connection.wait(signs, BEAT_S / 4)
        message = link.hear(0.0)
        if isinstance(message, Start):
            self._seats[message.number] = Seated(message.seat.rank, message.late)
            environment = member_environment(kept, self._nodes.number)
            process = start(self._context, message.number, run_member, message, variables=environment)
            self._crew[message.number] = process
        elif isinstance(message, Kill) and message.number in self._crew:
            self._forget(message.number)
        elif isinstance(message, Welcome):
            self._continue_under(link, message, kept)
        elif isinstance(message, Stop):
            self._stopping = True
        elif isinstance(message, ProbedMachines) and self._probe is not None:
            self._probe.aim(message.addresses, message.tag)
        return message if isinstance(message, RunOver) else None

    def _continue_under(self, link: Link, leader: Welcome, kept: str) -> None:
        write_address(kept, leader.host, leader.port)
        for member in list(self._crew.values()):
            if not leader.kept:
                self._forget(member.rank)
            # The earlier leader may not have saved this outcome: report it again.
            elif member.outcome is not None:
                link.send(Ended(member.rank, member.outcome))

    def _dismiss(self) -> None:
        dismiss(list(self._crew.values()))
        self._crew.clear()
        self._seats.clear()
        if self._kept is not None:
            self._kept.cleanup()
            self._kept = None

    def _forget(self, member: int) -> None:
        forget(self._crew.pop(member))
        del self._seats[member]

    def _live(self) -> list[RankHandle]:
        return [member for member in self._crew.values() if member.outcome is None]

    def _look(self, link: Link, stops: StoppedProcesses) -> None:
        for member in wait_for_outcomes(self._live(), stops, 0, others_run=True):
            assert member.outcome is not None
            link.send(Ended(member.rank, member.outcome))
            # Returned processes stay alive until all have returned.
            if not isinstance(member.outcome, Returned):
                self._forget(member.rank)

    def _drained(self, link: Link) -> bool:
        """Forward a preemption notice to this machine's ranks; return whether all of them have ended.

        If the whole run is being stopped, do nothing: ranks follow the leader's orders.
        """
        if self._asked_at is None or self._stopping or time.monotonic() - self._asked_at < _TOGETHER_S:
            return False
        if not self._told:
            self._told = True
            self._say("this machine was asked to leave: its ranks hand over the state that only they hold")
            link.send(Leaving())
            for member in self._live():
                member.process.terminate()
        return not self._live()
