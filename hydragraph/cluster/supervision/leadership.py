"""Leadership of a run: a lease in a replicated register. Decisions are pure functions of a machine's view and clock.

The register holds one lease, with a term, a holder, and a count that the holder increments to renew it. A machine that
has read the same lease for `TTL_S` takes over with the next term. The register accepts a lease only if it still holds
the one that the machine has read, so a term has one holder. The holder stops leading `TTL_S - MARGIN_S` after it *sent*
its last successful renewal, before another machine can have waited for `TTL_S`. So two machines never lead together if
their clocks run equally fast.

A machine that does not lead keeps its ranks while its link to the leader is up. While the link is down, it keeps them
for the next leader (which waits for `GATHER_S`) only if the old leader has certainly ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TTL_S = 5.0
# Safety margin for processes' ends and different clocks
MARGIN_S = 0.5
# Additional wait, times the machine's index
STAGGER_S = 0.3
# Wait before taking a free lease, times the machine's index
FIRST_S = 2.0
REACH_S = 3.0
# Time that a new leader waits for machines; exceeds TTL_S, REACH_S, and the rest of `UNREACHABLE_S` at a lease's end
GATHER_S = 7.0
# Time limit to check whether a silent leader has ended
DOUBT_S = 1.0
# Time after which a leader gives up a disconnected machine's ranks; exceeds DOUBT_S
GRACE_S = 2.0


@dataclass(frozen=True)
class Lease:
    """Lease of the leader, as stored in the register.

    Attributes:
        term: counted from 1; 0 before any machine leads.
        holder: random word of the leading machine's process.
        beat: number of changes in `term`.
        prior: machine that held the previous term, or None if the run began with `term`.
        place: address of the leader's supervisor, as JSON; "" if unknown.
        over: why the run has ended ("" after success), or None while it continues.
        before: start time of an earlier run in the output folder, or 0.
    """

    term: int = 0
    node: int = 0
    holder: str = ""
    beat: int = 0
    prior: int | None = None
    place: str = ""
    over: str | None = None
    before: float = 0.0

    @property
    def free(self) -> bool:
        return not self.term or self.over is not None


@dataclass(frozen=True)
class LeaseView:
    """A machine's view of the lease; times are in seconds of its own clock.

    Attributes:
        lease, since: newest lease that the machine read or wrote, and when it first did.
        placed: time when the machine learned of the lease's term or place.
        answered: time of the last request that the register answered.
        asked, asked_at: lease that the machine last asked for, and time of its first request.
        term: term in which this machine leads, or 0.
        until: time when the machine stops leading without a renewal.
        joined: whether the machine has read the lease of a run in progress.
    """

    lease: Lease = Lease()
    since: float = 0.0
    placed: float = 0.0
    answered: float = float("-inf")
    asked: Lease | None = None
    asked_at: float = 0.0
    term: int = 0
    until: float = 0.0
    joined: bool = False

    @property
    def expired(self) -> bool:
        return self.answered - self.since >= TTL_S

    def leads(self, now: float) -> bool:
        return self.term > 0 and now < self.until


def asking(standing: LeaseView, lease: Lease, now: float) -> LeaseView:
    return replace(standing, asked=lease, asked_at=standing.asked_at if lease == standing.asked else now)


def learned(standing: LeaseView, lease: Lease, sent: float, now: float) -> LeaseView:
    """Return the view after the register answers `lease` to a request sent at time `sent`.

    If the machine asked for `lease`, the request was accepted, even if it seemed to fail.
    """
    # Leadership counts from the request, because its answer may take any time.
    before = standing.lease
    first = standing.answered == float("-inf")
    accepted = lease == standing.asked
    return replace(
        standing,
        lease=lease,
        since=now if first or lease != before else standing.since,
        placed=now if first or (lease.term, lease.place) != (before.term, before.place) else standing.placed,
        answered=max(sent, standing.answered),
        term=lease.term if accepted else standing.term if lease.term == standing.term else 0,
        until=standing.asked_at + TTL_S - MARGIN_S if accepted else standing.until,
        joined=standing.joined or not lease.free,
    )


def wanted(standing: LeaseView, own: Lease, now: float) -> Lease | None:
    """Return the lease to ask for, or None if another machine leads or the run has ended."""
    lease = standing.lease
    # Every call renews the leader's lease, long before it ends.
    if standing.leads(now):
        return replace(lease, beat=lease.beat + 1)
    # Machines wait in turn: machine 2 takes a free lease after 4 s, an unrenewed one after 5.6 s. A
    # silent register gives no turn, because `answered` stays the same.
    turn = own.node * FIRST_S if lease.free else TTL_S + own.node * STAGGER_S
    if standing.answered - standing.since < turn or (lease.free and standing.joined):
        return None
    if lease.free:
        return replace(own, term=lease.term + 1)
    return replace(own, term=lease.term + 1, prior=lease.node)


def keeps(standing: LeaseView, term: int, since: float, refused: bool, now: float) -> bool:
    """Return whether a machine without a leader keeps its ranks for the next one.

    Args:
        term: the former leader's term.
        since: time when the machine noticed that the link was down.
        refused: whether the newest leader's machine refuses connections, because its supervisor has ended.
    """
    if now - standing.answered > TTL_S:
        return False  # the register is unreachable, so other machines may continue without this one
    # The old leader has certainly ended: this machine leads, its
    # supervisor is gone, or its lease ran out.
    if standing.leads(now) or refused or standing.expired:
        return True
    # A new leader's address or connection may take a moment.
    if standing.lease.term != term:
        return not standing.lease.place or now - standing.placed < REACH_S
    return now - since < DOUBT_S
