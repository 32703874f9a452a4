"""Where the state is to live, by how fast ranks are and what memory they have; and the way there in bounded steps.

Every owner adds up the gradients of its share and updates it after the last push; a step ends with the last owner:

    seconds(shares) = max over ranks r of  rate_r x share_r x U      U: a healthy device's seconds for the whole state

It is least where shares go as 1 / rate, as far as memory allows: what a full rank cannot take, the others share in the
same proportion. An owner also begins and ends the messages of every bucket, however little it owns, and its rate scales
that, too: a very slow rank had better own nothing. A home is worth moving to where what it gains over the steps to come
exceeds what moving costs: state comes beside the steps (`hydragraph.engine.live_reshard`), and the rank that receives
most waits for the gradients of what comes.

Where owners are chosen for the strategies (`cost.home_choice`), what these exchange under a home is added to its
seconds, and the home that the choice gives for them is among those that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hydragraph.cost.home_choice import Question, choose_home, expected_s
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.link import move
from hydragraph.ir.parameter import Bucket
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home

GAIN = 1.2  # times its cost, that moving must bring
GRADIENT_BYTES = 4  # of an element, as it is handed on
ROUNDED = 100  # shares are rounded to such parts of the largest, so that noise in rates moves nothing
TIGHT = 1.01  # times what shares need, that there must be: they are rounded


@dataclass(frozen=True)
class StateCosts:
    """What having state, updating and moving it costs.

    Attributes:
        update_s: seconds in which a healthy device would add up gradients of and update the whole state.
        bytes_per_element: of all that moves: weights and what the optimizer keeps (12 with Adam).
        bytes_per_s: at which a rank receives.
        free_bytes: by rank, the memory that there is for state; None: enough.
        held_bytes: that an element takes of it, with its gradient and messages; None: what moves.
        messages_s: in which a healthy owner begins and ends its messages of a step.
    """

    update_s: float
    bytes_per_element: float
    bytes_per_s: float
    free_bytes: Sequence[float] | None = None
    held_bytes: float | None = None
    messages_s: float = 0.0

    @property
    def held_per_element(self) -> float:
        """Bytes of an owner's memory for an element."""
        return self.bytes_per_element if self.held_bytes is None else self.held_bytes


@dataclass(frozen=True)
class Rehoming:
    """A home that pays.

    Attributes:
        home: where state is to live.
        before_s, after_s: seconds of a step that its owners take, now and then.
        moving_s: that training waits for what moves.
        why: the reason, as a sentence.
    """

    home: Home
    before_s: float
    after_s: float
    moving_s: float
    why: str


def rehoming(
    running: Home,
    ranks: int,
    buckets: Sequence[Bucket],
    health: Health,
    costs: StateCosts,
    steps: int,
    question: Question | None = None,
) -> Rehoming | None:
    """Return a home that pays within so many steps to come; None: state stays. A pure function.

    Args:
        running: who owns what now, with nodes where it has copies.
        ranks: how many there are; none of them is lost.
        buckets: of the model; those with shares of their own lose them, unless the choice gives them others.
        health: how slow ranks are.
        costs: what state costs.
        steps: to come.
        question: what the choice of owners goes by: the strategies that run, how often, and how slow ranks are; None:
            owners are not chosen for strategies.

    Raises:
        ValueError: a rank is lost, or there is not memory enough for the state anywhere.
    """
    if any(rank < ranks for rank in health.lost):
        raise ValueError(f"rehoming: ranks {list(health.lost)} are lost: move the others to a world without them")
    homes = _homes(running, ranks, buckets, health, _with_way(running, ranks, buckets, costs))
    if question is not None:
        homes.append(replace(choose_home(question), nodes=running.nodes))

    def seconds(home: Home) -> float:
        exchanged = 0.0 if question is None else expected_s(question, home)
        return _seconds(home, ranks, buckets, health, costs) + exchanged

    held = [home for home in homes if _fits(home, ranks, buckets, costs)]
    home = min(held or homes, key=seconds)
    before, after = seconds(running), seconds(home)
    moving = max(received(running, home, ranks, buckets)) * GRADIENT_BYTES / costs.bytes_per_s
    fits = _fits(running, ranks, buckets, costs)
    if fits and (not held or (before - after) * steps <= GAIN * moving):
        return None
    slow = ", ".join(f"rank {rank} {rate:.2f}x" for rank, rate in health.rates.items())
    waited = f"owners wait for {slow or 'the one with most'}"
    if question is not None and not slow:
        waited = "other strategies run than the state lies for"
    cause = waited if fits else "a rank has no memory for what it owns"
    why = f"{cause}: {before:.4f} s of a step become {after:.4f} s for {moving:.2f} s of moving, {steps} steps to come"
    return Rehoming(home, before, after, moving, why)


def _with_way(running: Home, ranks: int, buckets: Sequence[Bucket], costs: StateCosts) -> StateCosts:
    """Return costs that leave room for the way: an owner's new part of a bucket lives beside the one before."""
    if costs.free_bytes is None:
        return costs
    whole = sum(bucket.size for bucket in buckets)
    beside = (1 + max(bucket.size for bucket in buckets) / whole) * TIGHT
    owned = [size * costs.held_per_element for size in owned_by(running, ranks, buckets)]
    free = [max(most / beside, min(own, most)) for own, most in zip(owned, costs.free_bytes, strict=True)]
    enough = sum(free) >= whole * running.copies * costs.held_per_element
    return replace(costs, free_bytes=free) if enough else costs


def _homes(running: Home, ranks: int, buckets: Sequence[Bucket], health: Health, costs: StateCosts) -> list[Home]:
    """Return homes that go by speed and memory: of all ranks, then without the slowest, the two slowest and so on."""
    elements = sum(b.size for b in buckets) * running.copies
    slowest = sorted((rank for rank in health if rank < ranks), key=health.rate, reverse=True)
    nodes = running.nodes or range(ranks)
    found: list[Home] = []
    for count in range(len(slowest) + 1):
        without = slowest[:count]
        if len({node for rank, node in enumerate(nodes) if rank not in without}) < running.copies:
            break
        try:
            for rounded in (True, False):  # where room is tight, what each has is told in full
                shares = best_shares(ranks, health, costs, elements, without, rounded)
                found.append(Home(shares, running.copies, nodes=running.nodes))
        except ValueError:
            if not count:
                raise
            break
    return found


def best_shares(
    ranks: int,
    health: Health,
    costs: StateCosts,
    elements: float,
    without: Collection[int] = (),
    rounded: bool = True,
) -> tuple[float, ...]:
    """Return the share of each rank, the largest 1: as its speed, as far as its memory goes.

    Args:
        ranks, health, costs: as of `rehoming`.
        elements: of the whole state, all copies together.
        without: ranks that are to own nothing.
        rounded: to few digits, so that noise in rates moves nothing.

    Raises:
        ValueError: there is not memory enough.
    """
    speed = np.array([1 / health.rate(rank) for rank in range(ranks)])
    room = np.full(ranks, math.inf)
    if costs.free_bytes is not None:
        room = np.array(costs.free_bytes, float) / (costs.held_per_element * elements)
    room[list(without)] = 0.0
    if room.sum() < 1:
        need = elements * costs.held_per_element
        raise ValueError(
            f"rehoming: the state takes {need / 1e9:.2f} GB, and ranks have {room.sum() * need / 1e9:.2f} GB in all: "
            "use more ranks, or fewer copies"
        )
    share = np.zeros(ranks)
    full = room <= 0
    while not np.isclose(share.sum(), 1):  # each turn fills at least one rank, or ends
        wanted = np.where(full, share, (1 - share[full].sum()) * speed / speed[~full].sum())
        over = ~full & (wanted > room)
        share = np.where(over, room, np.where(full, share, 0 if over.any() else wanted))
        full |= over
    if not rounded:
        return tuple((share / share.max()).tolist())
    if costs.free_bytes is not None:  # rounding up could be more than there is room for
        return tuple((np.floor(share / share.max() * ROUNDED * 100) / (ROUNDED * 100)).tolist())
    return tuple((np.rint(share / share.max() * ROUNDED) / ROUNDED).tolist())


def received(old: Home, new: Home, ranks: int, buckets: Sequence[Bucket]) -> list[int]:
    """Return the elements that each rank receives from others when state moves, by the links that move it."""
    before, after = HomeLayouts(old, ranks), HomeLayouts(new, ranks)
    total = np.zeros(ranks, np.int64)
    for bucket in buckets:
        slices = move(before.of(bucket), after.of(bucket)).travelling
        np.add.at(total, slices.dst, slices.hi - slices.lo)
    return [int(elements) for elements in total]


def stages(old: Home, new: Home, ranks: int, buckets: Sequence[Bucket], elements: int) -> Iterator[Home]:
    """Yield homes from one to another, of which each moves a few buckets: as many elements at most, or one bucket.

    Each is to be moved to beside a step, which ends with it: so no step waits for more than its part.

    Args:
        old, new: of the same copies and nodes; where these differ, the only home is the new one.
        ranks: how many there are.
        buckets: of the model, in the order in which they move.
        elements: that one rank receives at most at a time.
    """
    if (old.copies, old.nodes) != (new.copies, new.nodes):
        yield new
        return
    moved: dict[str, Sequence[float]] = {bucket.name: _shares(old, bucket.name, ranks) for bucket in buckets}
    waiting = np.zeros(ranks, np.int64)
    ahead = False
    for bucket in buckets:
        coming = np.array(received(old, new, ranks, [bucket]))
        if ahead and (waiting + coming).max() > elements:
            yield replace(old, shares=None, buckets=dict(moved))
            waiting, ahead = np.zeros(ranks, np.int64), False
        moved[bucket.name] = _shares(new, bucket.name, ranks)
        waiting, ahead = waiting + coming, ahead or bool(coming.any())
    yield new


def passes(way: Sequence[Home], ranks: int, buckets: Sequence[Bucket], costs: StateCosts) -> bool:
    """Say whether ranks have memory for each step of a way: what they own before it, and what is to live anew.

    Args:
        way: homes, the running one first.
    """
    if costs.free_bytes is None:
        return True
    for old, new in pairwise(way):
        before, after = HomeLayouts(old, ranks), HomeLayouts(new, ranks)
        moved = [b for b in buckets if _shares(old, b.name, ranks) != _shares(new, b.name, ranks)]
        for rank, free in enumerate(costs.free_bytes):
            size = sum(before.of(b).local_size(rank) for b in buckets) + sum(
                after.of(b).local_size(rank) for b in moved
            )
            if size * costs.held_per_element > free:
                return False
    return True


def owned_by(home: Home, ranks: int, buckets: Sequence[Bucket]) -> list[int]:
    """Return the elements that each rank owns."""
    layouts = HomeLayouts(home, ranks)
    return [sum(layouts.of(bucket).local_size(rank) for bucket in buckets) for rank in range(ranks)]


def _shares(home: Home, bucket: str, ranks: int) -> Sequence[float]:
    return home.shares_of(bucket) or (1.0,) * ranks


def _seconds(home: Home, ranks: int, buckets: Sequence[Bucket], health: Health, costs: StateCosts) -> float:
    whole = sum(bucket.size for bucket in buckets)
    owned = enumerate(owned_by(home, ranks, buckets))
    return max(health.rate(r) * (size / whole * costs.update_s + bool(size) * costs.messages_s) for r, size in owned)


def _fits(home: Home, ranks: int, buckets: Sequence[Bucket], costs: StateCosts) -> bool:
    if costs.free_bytes is None:
        return True
    sizes = owned_by(home, ranks, buckets)
    return all(size * costs.held_per_element <= free for size, free in zip(sizes, costs.free_bytes, strict=True))
