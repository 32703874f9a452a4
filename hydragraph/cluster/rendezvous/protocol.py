"""Generations (rendezvous rounds) as a pure state machine.

A member is a process with a number that is never reused, and has a rank in each generation. One coordinator reads the
members' registers and writes orders. All of them poll, and each register has one writer.

1. A member leaves its generation if another rank fails or the coordinator calls it, and announces this (`after`).
2. After all live members have left, the coordinator proposes the next generation: these members in rank order, then new
   ones up to the target size.
3. Each proposed member agrees. If one dies before, the coordinator proposes a generation with the next number.
4. After all have agreed, the coordinator confirms the proposal, and its members enter the generation.

Two generations are never active at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

ALL_LEAVE = "every rank was asked to leave"


@dataclass(frozen=True)
class MemberRegister:
    """Values that a member announces.

    Attributes:
        after: last generation that the member has left permanently.
        ready: whether the member waits for a generation.
        agreed, entered: last proposal that it agreed to, and last generation that it began to enter.
        holds: generation whose layout the member's state has, or 0.
        accuses: failed members of the generation that it left.
        leaving: whether the member was asked to end, and wants to hand over its state.
        left: whether the member no longer needs others.
        done: whether the member left after all work.
    """

    after: int = 0
    ready: bool = False
    agreed: int = 0
    entered: int = 0
    holds: int = 0
    accuses: tuple[int, ...] = ()
    leaving: bool = False
    left: bool = False
    done: bool = False


@dataclass(frozen=True)
class Generation:
    """A numbered set of ranks.

    Attributes:
        number: counted from 1.
        members: member number of each rank.
        leaving: members that hand over their state and end.
        before: each member's rank in the newest generation whose state any member holds, or None without that state.
        ending: why the generation only saves and ends, or "".
    """

    number: int = 0
    members: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    before: tuple[int | None, ...] = ()
    lost: tuple[int, ...] = ()
    ending: str = ""


@dataclass(frozen=True)
class CoordinatorRegister:
    """The coordinator's orders to members.

    Attributes:
        proposal: the newest proposal, confirmed or not.
        confirmed: number of the newest confirmed generation.
        call: number of a generation; members of earlier generations must meet between two iterations.
        out: members that the coordinator has given up.
        over: why no further generation forms, or "".
    """

    proposal: Generation = Generation()
    confirmed: int = 0
    call: int = 0
    out: tuple[int, ...] = ()
    stop: bool = False
    over: str = ""


@dataclass(frozen=True)
class RankLimits:
    size: int
    least: int = 1


@dataclass(frozen=True)
class CoordinatorState:
    """The coordinator's state.

    Attributes:
        formed: members in rank order, for the current generation and for each generation whose layout some member's
            state has.
    """

    orders: CoordinatorRegister = CoordinatorRegister()
    formed: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})

    @property
    def current(self) -> tuple[int, ...]:
        return self.formed[self.orders.confirmed]


def decide(
    record: CoordinatorState, said: Mapping[int, MemberRegister], rules: RankLimits, coming: int = 0
) -> CoordinatorState:
    """Return the coordinator's next state.

    Args:
        said: registers of members whose process is alive.
        coming: number of processes about to start.
    """
    orders = record.orders
    if orders.over:
        return record
    # First, give up accused members. Only the current generation's accusations count: after the next
    # is confirmed, its members' old registers are stale.
    accused = {member for one in said.values() if one.after == orders.confirmed for member in one.accuses}
    out = tuple(sorted({*orders.out, *(accused & set(record.current))}))
    if out != orders.out:
        orders = replace(orders, out=out)
        record = replace(record, orders=orders)
    # there: registers of members that are alive, not given up, and take part
    there = {m: one for m, one in sorted(said.items()) if m not in out and not one.left}
    proposal = orders.proposal
    # Second, a proposal whose members all live waits for their agreement. If one has died, `_meet`
    # proposes again, with the next number, to which none has agreed.
    if proposal.number > orders.confirmed and all(m in there for m in proposal.members):
        if not all(there[m].agreed == proposal.number for m in proposal.members):
            return record
        # `_before` needs the ranks of generations whose layout a member's state has.
        kept = {n: members for n, members in record.formed.items() if any(one.holds == n for one in there.values())}
        return CoordinatorState(replace(orders, confirmed=proposal.number), {**kept, proposal.number: proposal.members})
    if any(one.done for one in said.values()):
        # Failures after the last step do not repeat the work.
        waiting = any(one.after >= orders.confirmed for m, one in there.items() if m in record.current)
        return replace(record, orders=replace(orders, over="done")) if waiting else record
    # Third, call the members together and propose the next generation.
    return _meet(record, there, rules, coming)


def awaited(record: CoordinatorState, said: Mapping[int, MemberRegister]) -> tuple[int, ...]:
    """Return the members for which others wait."""
    orders = record.orders
    there = {m: one for m, one in said.items() if m not in orders.out and not one.left}
    proposal = orders.proposal
    if proposal.number > orders.confirmed:
        return tuple(m for m in proposal.members if m in there and there[m].agreed != proposal.number)
    old = [m for m in record.current if m in there]
    # Members are late only after another has left: until then, all compute.
    missing = tuple(m for m in old if there[m].after < orders.confirmed)
    if len(missing) < len(old):
        return missing
    # Likewise, members enter late only after another has entered.
    outside = tuple(m for m in old if there[m].entered < orders.confirmed)
    return outside if len(outside) < len(old) else ()


def _meet(
    record: CoordinatorState, there: Mapping[int, MemberRegister], rules: RankLimits, coming: int
) -> CoordinatorState:
    orders = record.orders
    # old: live current members in rank order; back: those that left the generation
    # new: members that can become ranks; starting: processes not ready yet
    old = [m for m in record.current if m in there]
    back = [m for m in old if there[m].after >= orders.confirmed]
    new = [m for m, one in there.items() if m not in record.current and one.ready]
    starting = [m for m, one in there.items() if m not in record.current and not one.ready]
    leaving = [m for m in old if there[m].leaving]
    # Leaving members need no seat in the target size, but hand over their state.
    # size 4, members 0-3, 3 leaves, 4 is new: room = 4 - (4 - 1) = 1, members = (0, 1, 2, 3, 4)
    room = max(0, rules.size - (len(old) - len(leaving)))
    # Some members still train. Call them if another waits, can join, or was lost, and propose when
    # all are back: generations never overlap.
    if len(back) < len(old):
        generation_due = back or (new and room) or len(old) < len(record.current)
        call = orders.confirmed + 1
        return replace(record, orders=replace(orders, call=call)) if generation_due and orders.call < call else record
    members = (*old, *new[:room])
    if (starting or coming) and len(members) < rules.size and not any(one.holds for one in there.values()):
        return record  # training has not begun, and strategies need all ranks
    # stay: ranks that train after leaving members are gone
    stay = len(members) - len(leaving)
    if stay < rules.least and (starting or coming) and not (leaving and not stay):
        return record
    if not members:
        over = "all ranks are lost" if record.current or orders.out else ""
        return replace(record, orders=replace(orders, over=over)) if over else record
    ending = ""
    if stay < rules.least:
        few = f"{stay} {'rank is' if stay == 1 else 'ranks are'} left, fewer than min_ranks ({rules.least})"
        ending = ALL_LEAVE if leaving and not stay else few
    number = max(orders.proposal.number, orders.confirmed) + 1
    end = () if ending else tuple(leaving)
    lost = tuple(m for m in record.current if m not in members)
    proposed = Generation(number, members, end, _before(members, there, record.formed), lost, ending)
    return replace(record, orders=replace(orders, proposal=proposed))


def _before(
    members: Sequence[int], there: Mapping[int, MemberRegister], formed: Mapping[int, tuple[int, ...]]
) -> tuple[int | None, ...]:
    """Return `Generation.before`; members hold a generation's state only after all of them have received it."""
    # ranks: member -> rank in the newest generation whose state is held
    holds = max((there[m].holds for m in members), default=0)
    ranks = {m: rank for rank, m in enumerate(formed.get(holds, ()))}
    return tuple(ranks.get(m) if there[m].holds else None for m in members)


def attend(member: int, said: MemberRegister, orders: CoordinatorRegister) -> MemberRegister | Generation | None:
    """Return a waiting member's new register or the generation to enter, or None to keep waiting."""
    proposal = orders.proposal
    if orders.over or member in orders.out or member not in proposal.members or proposal.number <= said.after:
        return None
    # Agree first; the generation is valid only once confirmed.
    if said.agreed != proposal.number:
        return replace(said, agreed=proposal.number)
    return proposal if orders.confirmed == proposal.number else None
