"""Generations: every order of events of small worlds, with kills at any of them, also of the leading supervisor.

A supervisor writes its record before it shows the orders in it, and its successor begins with that record, a store
without orders, and the registers that members had when they started, until they write theirs again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from hydragraph.cluster.rendezvous.protocol import (
    CoordinatorRegister,
    CoordinatorState,
    Generation,
    MemberRegister,
    RankLimits,
    attend,
    awaited,
    decide,
)
from tests.thorough import thorough


@dataclass(frozen=True)
class Member:
    """A member: what it has said, the generation it works in (None: it waits), whether it lives."""

    said: MemberRegister
    at: int | None = None
    lives: bool = True
    asked: bool = False  # to leave

    @property
    def works(self) -> bool:
        return self.lives and self.at is not None


@dataclass(frozen=True)
class World:
    """Everything there is: the coordinator's record, members by number, and how much may yet go wrong.

    Attributes:
        losses: how many leading supervisors may be lost.
        shown: orders that members can read.
        silent: members whose register the store does not have, as it is new.
    """

    orders: CoordinatorRegister
    formed: tuple[tuple[int, tuple[int, ...]], ...]
    members: tuple[Member, ...]
    kills: int
    leaves: int
    losses: int = 0
    shown: CoordinatorRegister = field(default_factory=CoordinatorRegister)
    silent: frozenset[int] = frozenset()

    @property
    def record(self) -> CoordinatorState:
        return CoordinatorState(self.orders, dict(self.formed))

    def put(self, member: int, changed: Member) -> World:
        members = (*self.members[:member], changed, *self.members[member + 1 :])
        said = changed.said != self.members[member].said
        return replace(self, members=members, silent=self.silent - {member} if said else self.silent)


def events(world: World, rules: RankLimits) -> Iterator[tuple[str, World]]:
    """Yield everything that may happen next, by name; kills and requests to leave do not count as progress."""
    said = {m: member.said for m, member in enumerate(world.members) if member.lives}
    known = said | {m: MemberRegister(ready=m < rules.size) for m in world.silent & said.keys()}
    record = decide(world.record, known, rules)
    if world.shown != world.orders:
        yield "show", replace(world, shown=world.orders)
    elif record != world.record:
        yield "decide", replace(world, orders=record.orders, formed=tuple(sorted(record.formed.items())))
    if world.losses:
        lost = replace(world, losses=world.losses - 1, shown=CoordinatorRegister(), silent=frozenset(said))
        yield "lose", lost
    for m in world.silent & said.keys():
        yield "repeat", replace(world, silent=world.silent - {m})
    formed = dict(world.formed)
    for m, member in enumerate(world.members):
        if not member.lives:
            continue
        if world.kills:
            yield "kill", replace(world.put(m, replace(member, lives=False)), kills=world.kills - 1)
        if m in world.shown.out:
            yield "end", world.put(m, replace(member, lives=False))  # as its supervisor sees to it
        elif member.at is None:
            if not member.said.ready and not member.said.after and not member.said.left:
                yield "ready", world.put(m, replace(member, said=MemberRegister(ready=True)))
            if member.said.left:
                continue
            answer = attend(m, member.said, world.shown) if member.said.ready or member.said.after else None
            if isinstance(answer, MemberRegister):
                yield "agree", world.put(m, replace(member, said=answer))
            elif isinstance(answer, Generation):
                # Its state is moved when all have entered; here at once, as whoever fails before holds the older one.
                yield "enter", world.put(m, replace(member, said=answer_of(member, answer), at=answer.number))
        else:
            if world.leaves and not member.asked:
                yield "ask", replace(world.put(m, replace(member, asked=True)), leaves=world.leaves - 1)
            for said_now in comes(world, m, formed):
                yield "come", world.put(m, replace(member, said=said_now, at=None))


def answer_of(member: Member, generation: Generation) -> MemberRegister:
    return replace(member.said, ready=False, leaving=False)


def comes(world: World, m: int, formed: dict[int, tuple[int, ...]]) -> Iterator[MemberRegister]:
    """Yield what a working member may say when it leaves its generation, or no value if it has no reason to leave."""
    member = world.members[m]
    number = member.at
    assert number is not None
    others = {o: world.members[o] for o in formed[number] if o != m}
    dead = tuple(o for o, other in others.items() if not other.lives)
    departed = [o for o, other in others.items() if other.said.after >= number or other.said.left]
    arrived = all(other.at == number or other.said.holds == number for other in others.values())
    generation = world.shown.proposal
    handed_over = generation.number == number and generation.leaving and arrived and not dead
    holds = number if arrived else member.said.holds
    come = replace(member.said, after=number, holds=holds, accuses=(), leaving=member.asked)
    if generation.number == number and generation.ending:
        yield replace(come, left=True)  # it saves and ends
    elif handed_over:
        yield replace(come, left=m in generation.leaving, leaving=False)
    elif dead or departed or world.shown.call > number or (member.asked and m not in generation.leaving):
        yield come
        for each in dead:
            yield replace(come, accuses=(each,))


def explore(first: World, rules: RankLimits) -> dict[World, list[World]]:
    """Return every world that can be reached, with the worlds that follow it by progress."""
    after: dict[World, list[World]] = {}
    waiting = [first]
    while waiting:
        world = waiting.pop()
        if world in after:
            continue
        check(world)
        following = list(events(world, rules))
        after[world] = [w for name, w in following if name not in ("kill", "ask", "lose")]
        waiting += [w for _, w in following]
    return after


def check(world: World) -> None:
    """Check what must hold in every world."""
    formed = dict(world.formed)
    at_work: dict[int, set[int]] = defaultdict(set)
    for m, member in enumerate(world.members):
        if member.at is not None and member.lives:
            at_work[member.at].add(m)
            assert member.at <= world.orders.confirmed, "a member believes what is not confirmed"
            assert member.said.after < member.at, "a member goes back to a generation that it has left"
            if member.at in formed:
                assert m in formed[member.at], "a member is where it does not belong"
    complete = [number for number, there in at_work.items() if number in formed and there == set(formed[number])]
    assert len(complete) <= 1, "two generations are at work"


def settled(world: World, size: int) -> bool:
    """Return whether this is a good end: the required number works in one generation, or no meeting is needed."""
    alive = {m for m, member in enumerate(world.members) if member.lives and not member.said.left}
    if world.orders.over or not alive:
        return True
    inside = set(dict(world.formed)[world.orders.confirmed])
    at_work = {m for m in alive if world.members[m].at == world.orders.confirmed}
    return at_work == inside and len(inside) >= min(size, len(alive))


def prove(size: int, newcomers: int, kills: int, leaves: int = 0, losses: int = 0) -> int:
    """Explore a world; return how many states it has."""
    ready = tuple(Member(MemberRegister(ready=True)) for _ in range(size))
    late = tuple(Member(MemberRegister()) for _ in range(newcomers))
    first = World(CoordinatorRegister(), ((0, ()),), (*ready, *late), kills, leaves, losses)
    after = explore(first, RankLimits(size))
    stuck = [world for world, following in after.items() if not following and not settled(world, size) and ends(world)]
    assert not stuck, stuck[0]
    # From everywhere, without anything more going wrong, a good end is reached.
    before: dict[World, list[World]] = defaultdict(list)
    for world, following in after.items():
        for each in following:
            before[each].append(world)
    good = [world for world in after if settled(world, size)]
    reached = set(good)
    while good:
        for world in before[good.pop()]:
            if world not in reached:
                reached.add(world)
                good.append(world)
    assert len(reached) == len(after), next(world for world in after if world not in reached)
    return len(after)


def ends(world: World) -> bool:
    """Return whether some member is alive and should continue."""
    return any(member.lives and not member.said.left for member in world.members)


def test_while_nobody_has_begun_all_are_waited_for() -> None:
    """Process 1 of three was lost before there was any state: its replacement is waited for."""
    rules = RankLimits(3)
    met = CoordinatorState(CoordinatorRegister(Generation(1, (0, 1, 2)), confirmed=1), {0: (), 1: (0, 1, 2)})
    left = {m: MemberRegister(after=1, ready=True) for m in (0, 2)}
    for record, said in ((CoordinatorState(), {m: MemberRegister(ready=True) for m in (0, 2)}), (met, left)):
        assert decide(record, said, rules, coming=1) == record
        assert decide(record, said, rules).orders.proposal.members == (0, 2)
        whole = decide(record, {**said, 3: MemberRegister(ready=True)}, rules).orders.proposal
        assert whole.members == (0, 2, 3)
        assert whole.before == (None, None, None)
    holding = {m: replace(each, holds=1) for m, each in left.items()}
    assert decide(met, holding, rules, coming=1).orders.proposal.members == (0, 2), "they continue alone"


def test_two_members_and_one_newcomer_with_a_kill_at_any_moment() -> None:
    assert prove(2, 1, 1) > 200


def test_two_members_of_which_both_may_die() -> None:
    assert prove(2, 0, 2) > 50


def test_a_member_leaves_while_another_may_die() -> None:
    assert prove(2, 0, 1, leaves=1) > 50


def test_the_leading_supervisor_is_lost_at_any_moment() -> None:
    assert prove(2, 0, 1, losses=1) > 200
    assert prove(2, 0, 0, losses=2) > 100
    assert prove(2, 1, 0, losses=1) > 200


@thorough
@pytest.mark.parametrize("world", [(2, 1, 1, 0, 1), (2, 0, 1, 1, 1), (2, 0, 1, 0, 2), (3, 0, 1, 0, 1)], ids=str)
def test_larger_worlds_whose_leading_supervisor_is_lost(world: tuple[int, int, int, int, int]) -> None:
    assert prove(*world) > 1000


@thorough
@pytest.mark.parametrize("world", [(3, 0, 2, 0), (3, 0, 1, 1), (2, 1, 2, 0), (2, 1, 1, 1), (3, 1, 1, 0)], ids=str)
def test_larger_worlds(world: tuple[int, int, int, int]) -> None:
    assert prove(*world) > 1000


def test_who_is_waited_for_is_known() -> None:
    working = CoordinatorState(CoordinatorRegister(Generation(1, (0, 1, 2)), confirmed=1), {1: (0, 1, 2)})
    train, back, new = (
        MemberRegister(agreed=1, entered=1),
        MemberRegister(after=1, agreed=1, entered=1),
        MemberRegister(ready=True),
    )
    assert awaited(working, {0: train, 1: train, 2: train, 3: new}) == ()  # none waits yet: all are called
    assert awaited(working, {0: back, 1: train, 2: back, 3: new}) == (1,)
    assert awaited(working, {0: back, 2: back, 3: new}) == ()  # lost members are not awaited
    assert awaited(working, {0: train, 1: MemberRegister(agreed=1), 2: train}) == (
        1,
    )  # the others cannot connect to it
    proposed = decide(working, {0: back, 1: back, 2: back}, RankLimits(3))
    assert proposed.orders.proposal.number == 2
    assert awaited(proposed, {0: replace(back, agreed=2), 1: back, 2: replace(back, agreed=2)}) == (1,)
    out = replace(proposed, orders=replace(proposed.orders, out=(1,)))
    assert awaited(out, {0: replace(back, agreed=2), 1: back, 2: replace(back, agreed=2)}) == ()
