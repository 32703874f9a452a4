"""Generations (rendezvous rounds) as a pure state machine.

A member is a process, with a number that is never reused; in each generation it has a rank. One coordinator reads the
members' registers and writes orders. All sides poll, and each register has one writer.

1. A member whose ranks have failed, or that is called, announces that it has left its generation (`after`).
2. Once all live members of the current generation have done so, the coordinator proposes the next: these members in the
   order of their ranks, then newcomers if there is room.
3. A member that finds itself in a proposal agrees to it. If one of them dies meanwhile, the next number is proposed.
4. Once all have agreed, the coordinator confirms; a member that agreed to a confirmed proposal enters.

So no two generations are ever active at the same time.

Example: member 1 of (0, 1, 2) dies; 0 and 2 announce after=1. Generation 2 is proposed to (0, 2); 2 dies before it
agrees, so generation 3 is proposed to (0,).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

ALL_LEAVE = "every rank was asked to leave"


@dataclass(frozen=True)
class Said:
    """A member's register.

    Attributes:
        after: last generation that it has left permanently; 0: none.
        ready: whether it is in no generation and waits for one.
        agreed: last proposal that it agreed to.
        entered: last generation that it began to enter.
        holds: generation whose layout its state has; 0: it holds no state.
        accuses: failed members of the generation it left.
        leaving: whether it was asked to end, and wants to hand over its state.
        left: whether it no longer needs the others.
        done: whether it has left because all the work is done.
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
    """A set of ranks.

    Attributes:
        number: counted from 1.
        members: member of each rank.
        leaving: members that hand over their state and end.
        holds: generation whose layout the state has; 0: no state.
        before: each rank's number in generation `holds`; None: the rank holds no state of that generation.
        lost, joined: members of the previous generation that are not in this one, and vice versa.
        ending: why this generation only saves and ends; "": it continues.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    holds: int = 0
    before: tuple[int | None, ...] = ()
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    ending: str = ""


@dataclass(frozen=True)
class Orders:
    """The coordinator's register.

    Attributes:
        proposal: the newest proposal, perhaps confirmed.
        confirmed: number of the newest confirmed generation.
        call: members of generations before this number must meet, between two iterations.
        out: members that others have given up.
        stop: whether to stop the work after the current step.
        over: why no further generation forms; "": generations still form.
    """

    proposal: Generation = Generation()
    confirmed: int = 0
    call: int = 0
    out: tuple[int, ...] = ()
    stop: bool = False
    over: str = ""


@dataclass(frozen=True)
class Rules:
    """Target number of ranks, and the minimum to continue with."""

    size: int
    least: int = 1


@dataclass(frozen=True)
class Record:
    """State of the coordinator.

    Attributes:
        orders: as written.
        formed: members by rank of the confirmed generations that still matter, by number.
    """

    orders: Orders = Orders()
    formed: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})

    @property
    def current(self) -> tuple[int, ...]:
        """Members of the newest generation."""
        return self.formed[self.orders.confirmed]


def decide(record: Record, said: Mapping[int, Said], rules: Rules, coming: int = 0) -> Record:
    """Return the coordinator's next state after reading the members' registers.

    Args:
        said: registers of members whose process is alive.
        coming: number of processes about to start.
    """
    orders = record.orders
    if orders.over:
        return record
    accused = {member for one in said.values() if one.after == orders.confirmed for member in one.accuses}
    out = tuple(sorted({*orders.out, *(accused & set(record.current))}))
    if out != orders.out:
        orders = replace(orders, out=out)
        record = replace(record, orders=orders)
    there = {m: one for m, one in sorted(said.items()) if m not in out and not one.left}
    proposal = orders.proposal
    if proposal.number > orders.confirmed and all(m in there for m in proposal.members):
        if not all(there[m].agreed == proposal.number for m in proposal.members):
            return record
        kept = {n: members for n, members in record.formed.items() if any(one.holds == n for one in there.values())}
        return Record(replace(orders, confirmed=proposal.number), {**kept, proposal.number: proposal.members})
    if any(one.done for one in said.values()):
        # Members that failed at the very end need not repeat the work.
        waiting = any(one.after >= orders.confirmed for m, one in there.items() if m in record.current)
        return replace(record, orders=replace(orders, over="done")) if waiting else record
    return _meet(record, there, rules, coming)


def awaited(record: Record, said: Mapping[int, Said]) -> tuple[int, ...]:
    """Return the members that others wait for: to leave a generation, agree to the next, or enter it."""
    orders = record.orders
    there = {m: one for m, one in said.items() if m not in orders.out and not one.left}
    proposal = orders.proposal
    if proposal.number > orders.confirmed:
        return tuple(m for m in proposal.members if m in there and there[m].agreed != proposal.number)
    old = [m for m in record.current if m in there]
    missing = tuple(m for m in old if there[m].after < orders.confirmed)
    if len(missing) < len(old):
        return missing
    outside = tuple(m for m in old if there[m].entered < orders.confirmed)
    return outside if len(outside) < len(old) else ()


def _meet(record: Record, there: Mapping[int, Said], rules: Rules, coming: int) -> Record:
    """Propose the next generation if possible, or call the members that are missing for it."""
    orders = record.orders
    old = [m for m in record.current if m in there]
    back = [m for m in old if there[m].after >= orders.confirmed]
    new = [m for m, one in there.items() if m not in record.current and one.ready]
    starting = [m for m, one in there.items() if m not in record.current and not one.ready]
    leaving = [m for m in old if there[m].leaving]
    room = max(0, rules.size - (len(old) - len(leaving)))
    if len(back) < len(old):
        generation_due = back or (new and room) or len(old) < len(record.current)
        call = orders.confirmed + 1
        return replace(record, orders=replace(orders, call=call)) if generation_due and orders.call < call else record
    members = (*old, *new[:room])
    if (starting or coming) and len(members) < rules.size and not any(one.holds for one in there.values()):
        return record  # training has not begun, and strategies need all ranks
    stay = len(members) - len(leaving)
    if stay < rules.least and (starting or coming) and not (leaving and not stay):
        return record  # they will come
    if not members:
        over = "all ranks are lost" if record.current or orders.out else ""
        return replace(record, orders=replace(orders, over=over)) if over else record
    ending = ""
    if stay < rules.least:
        few = f"{stay} {'rank is' if stay == 1 else 'ranks are'} left, and min_ranks is {rules.least}"
        ending = ALL_LEAVE if leaving and not stay else few
    number = max(orders.proposal.number, orders.confirmed) + 1
    holds, before = _held(members, there, record.formed)
    proposed = Generation(
        number,
        members,
        () if ending else tuple(leaving),
        holds,
        before,
        tuple(m for m in record.current if m not in members),
        tuple(m for m in members if m not in record.current),
        ending,
    )
    return replace(record, orders=replace(orders, proposal=proposed))


def _held(
    members: Sequence[int], there: Mapping[int, Said], formed: Mapping[int, tuple[int, ...]]
) -> tuple[int, tuple[int | None, ...]]:
    """Return the newest generation in whose layout members hold state, and their ranks in it.

    A member holds state of a generation only after all its members had received theirs.
    """
    holds = max((there[m].holds for m in members), default=0)
    ranks = {m: rank for rank, m in enumerate(formed.get(holds, ()))}
    return holds, tuple(ranks.get(m) if there[m].holds else None for m in members)


def attend(member: int, said: Said, orders: Orders) -> Said | Generation | None:
    """Return a waiting member's new register, or the generation to enter; None: keep waiting."""
    proposal = orders.proposal
    if orders.over or member in orders.out or member not in proposal.members or proposal.number <= said.after:
        return None
    if said.agreed != proposal.number:
        return replace(said, agreed=proposal.number)
    return proposal if orders.confirmed == proposal.number else None
