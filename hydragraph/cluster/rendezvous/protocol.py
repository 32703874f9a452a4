"""Generations, as a pure state machine: who is among the ranks, with which numbers, from when on.

A member is a process, known by a number that is never used again; in each generation it has a rank. One coordinator (in
the supervisor's process) reads what the members have said and writes orders; members read orders and say more. Nobody
waits for an answer to a question: everybody looks again and again at what stands written, each register has one writer,
and what is read late is only late.

1. A member whose ranks have failed, or that is called, says that it has left its generation for good (`after`).
2. Once all that live of the current generation have said so, the coordinator proposes the next: them, in the order of
   their ranks, then newcomers as far as there is room.
3. A member that finds itself in a proposal agrees to it. If one of them dies meanwhile, the next number is proposed.
4. Once all have agreed, the coordinator confirms; a member that agreed to a confirmed proposal enters.

So a generation works only when every member of it has left all earlier ones for good: no two are ever at work at once.
`tests/cluster/rendezvous/test_protocol.py` explores every order of events of small worlds, with kills at any of them.

Example: members 0, 1, 2 form generation 1. Member 1 dies; 0 and 2 fail, and say after=1. Generation 2 is proposed to
(0, 2); 2 dies before it agrees, so generation 3 is proposed to (0,). It agrees, is confirmed, and goes on alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

ALL_LEAVE = "every rank was asked to leave"


@dataclass(frozen=True)
class Said:
    """What a member says of itself; only it writes that.

    Attributes:
        after: the generation that it has left for good; 0: none yet.
        ready: whether it is in no generation and waits for one.
        agreed: the proposal that it agreed to last.
        entered: the generation that it began to enter last.
        holds: the generation in whose layout it holds state; 0: it holds none.
        accuses: members of the generation it left that failed, as it was told.
        leaving: whether it was asked to end: it wants to hand over its state.
        left: whether it needs the others no more, and will do nothing more for them.
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
        number: from 1.
        members: by rank.
        leaving: those that hand over their state and go.
        holds: the generation in whose layout the state is; 0: there is none.
        before: by rank, the rank in that generation; None: it holds nothing of it.
        lost, joined: members of the generation before that are not in this one, and the other way round.
        ending: why this one only saves and ends; "": it goes on.
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
    """What the coordinator says; only it writes that.

    Attributes:
        proposal: the newest one, perhaps confirmed.
        confirmed: the number of the newest confirmed generation.
        call: whoever is in an earlier generation than this number is to come, between two iterations.
        out: members that must not go on: others have given them up.
        stop: whether the work is to be stopped: the step in hand is finished, and saved.
        over: why nobody meets any more; "": they do.
    """

    proposal: Generation = Generation()
    confirmed: int = 0
    call: int = 0
    out: tuple[int, ...] = ()
    stop: bool = False
    over: str = ""


@dataclass(frozen=True)
class Rules:
    """What the coordinator decides by.

    Attributes:
        size: how many ranks there are to be.
        least: fewer do not go on.
    """

    size: int
    least: int = 1


@dataclass(frozen=True)
class Record:
    """What the coordinator knows.

    Attributes:
        orders: as it has written them.
        formed: the members by rank of generations that were confirmed and still matter, by number.
    """

    orders: Orders = Orders()
    formed: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})

    @property
    def current(self) -> tuple[int, ...]:
        """The members of the newest generation."""
        return self.formed[self.orders.confirmed]


def decide(record: Record, said: Mapping[int, Said], rules: Rules, coming: int = 0) -> Record:
    """Return what the coordinator knows and orders after a look at what members say; the same if nothing is to be done.

    Args:
        record: what it knew.
        said: what each member says whose process lives.
        rules: what it decides by.
        coming: how many processes are about to be started, and have said nothing yet.
    """
    orders = record.orders
    if orders.over:
        return record
    accused = {each for one in said.values() if one.after == orders.confirmed for each in one.accuses}
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
        # The work is done; whoever failed at its very end need not do it again.
        waiting = any(one.after >= orders.confirmed for m, one in there.items() if m in record.current)
        return replace(record, orders=replace(orders, over="done")) if waiting else record
    return _meet(record, there, rules, coming)


def awaited(record: Record, said: Mapping[int, Said]) -> tuple[int, ...]:
    """Return the members that others wait for.

    They have not left their generation, or have not agreed to the next, or have agreed and do not enter it.

    Args:
        record: what the coordinator knows.
        said: what each member says whose process lives.
    """
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
    """Propose the next generation if it is time, or call those that are missing for it."""
    orders = record.orders
    old = [m for m in record.current if m in there]
    back = [m for m in old if there[m].after >= orders.confirmed]
    new = [m for m, one in there.items() if m not in record.current and one.ready]
    starting = [m for m, one in there.items() if m not in record.current and not one.ready]
    leaving = [m for m in old if there[m].leaving]
    room = max(0, rules.size - (len(old) - len(leaving)))
    if len(back) < len(old):
        wanted = back or (new and room) or len(old) < len(record.current)
        call = orders.confirmed + 1
        return replace(record, orders=replace(orders, call=call)) if wanted and orders.call < call else record
    members = (*old, *new[:room])
    if (starting or coming) and len(members) < rules.size and not any(one.holds for one in there.values()):
        return record  # nobody has begun who could be held up, and strategies are made for all ranks
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
    """Return the newest generation in whose layout any of them holds state, and their ranks there.

    Whoever holds state of a generation took it after all its members had received theirs: so the others have that
    state, too, even if they have not taken it yet.
    """
    holds = max((there[m].holds for m in members), default=0)
    ranks = {m: rank for rank, m in enumerate(formed.get(holds, ()))}
    return holds, tuple(ranks.get(m) if there[m].holds else None for m in members)


def attend(member: int, said: Said, orders: Orders) -> Said | Generation | None:
    """Return what a member that waits does after a look at the orders.

    Args:
        member: which.
        said: what it has said.
        orders: as they stand.

    Returns:
        What it says now; or the generation that it enters; None: it waits.
    """
    proposal = orders.proposal
    if orders.over or member in orders.out or member not in proposal.members or proposal.number <= said.after:
        return None
    if said.agreed != proposal.number:
        return replace(said, agreed=proposal.number)
    return proposal if orders.confirmed == proposal.number else None
