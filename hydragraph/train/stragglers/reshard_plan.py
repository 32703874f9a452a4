"""Choice of the state's home by ranks' speed and memory, and division of moves into stages.

Each owner sums its share's gradients and updates the share after the last push. A step ends with the slowest owner:

    seconds(shares) = max over ranks of  slowdown x share x (seconds that a healthy device takes for the whole state)

The maximum is smallest if shares are proportional to 1 / slowdown, as far as memory allows. A very slow rank should own
no state, because each owner exchanges messages for every bucket. A move costs the time to send gradients to the rank
that receives the most elements (`hydragraph.engine.live_reshard`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hydragraph.cost.home_choice import HomeQuestion, choose_home, expected_s
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.link import move
from hydragraph.ir.parameter import Bucket
from hydragraph.planner.state_shares import EXACT, filled
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home

# Minimum ratio of a move's gain to its cost
GAIN = 1.2
GRADIENT_BYTES = 4
# Shares are rounded to 1/100 of the largest, so that noise does not change them
ROUNDED = 100
# Rounded shares may need this multiple of exact shares' memory
TIGHT = 1.01


@dataclass(frozen=True)
class StateCosts:
    """Costs of storing, updating and moving state.

    Attributes:
        update_s: seconds for a healthy device to update the whole state.
        bytes_per_element: bytes of weight and optimizer state that a move sends (12 with Adam).
        free_bytes: memory for state on each rank; None: unlimited.
        held_bytes: an owner's memory per element, with gradient and messages; None: `bytes_per_element`.
        messages_s: seconds of a step's messages for a healthy owner.
    """

    update_s: float
    bytes_per_element: float
    bytes_per_s: float
    free_bytes: Sequence[float] | None = None
    held_bytes: float | None = None
    messages_s: float = 0.0

    def free(self, ranks: int) -> list[float]:
        return [math.inf] * ranks if self.free_bytes is None else list(self.free_bytes)

    @property
    def held_per_element(self) -> float:
        return self.bytes_per_element if self.held_bytes is None else self.held_bytes


@dataclass(frozen=True)
class Rehoming:
    """Move of state to a new home.

    Attributes:
        before_s, after_s: the slowest owner's seconds per step before and after the move.
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
    question: HomeQuestion | None = None,
    given: Home | None = None,
) -> Rehoming | None:
    """Return a home to move to; None if the running home fits in memory and no move pays off within `steps`.

    Args:
        running: current home; `nodes` must be set if there are copies.
        given: the user's home, restored once no rank is slow, even if this does not pay off.
        buckets: without `question`, all buckets get the same shares.
        question: if given, `choose_home`'s result is also a candidate, and times include exchanges of state.

    Raises:
        ValueError: a rank is lost, or the ranks do not have enough memory.
    """
    if any(rank < ranks for rank in health.lost):
        raise ValueError(f"rehoming: ranks {list(health.lost)} are lost: first continue the run without these ranks")
    # Take the fastest candidate that fits in memory.
    homes = _homes(running, ranks, buckets, health, _with_way(running, ranks, buckets, costs))
    if question is not None:
        homes.append(replace(choose_home(question), nodes=running.nodes))
    restored = False
    if given is not None and not health.rates and _fits(given, ranks, buckets, costs):
        restored = True
        homes = [given]

    def seconds(home: Home) -> float:
        exchanged = 0.0 if question is None else expected_s(question, home)
        return _seconds(home, ranks, buckets, health, costs) + exchanged

    fitting = [home for home in homes if _fits(home, ranks, buckets, costs)]
    home = min(fitting or homes, key=seconds)
    before = seconds(running)
    after = seconds(home)
    # Training waits only until the rank that receives most has its gradients.
    moving = max(received(running, home, ranks, buckets)) * GRADIENT_BYTES / costs.bytes_per_s
    fits = _fits(running, ranks, buckets, costs)
    pays = moving > 0 if restored else (before - after) * steps > GAIN * moving
    if fits and not (fitting and pays):
        return None
    slow = ", ".join(f"rank {rank} ({rate:.2f}x)" for rank, rate in health.rates.items())
    waited = f"owners wait for {slow or 'the owner with the largest share'}"
    if question is not None and not slow:
        waited = "the state is placed for strategies that no longer run"
    if restored:
        waited = "no rank is slow"
    cause = waited if fits else "a rank has too little memory for its share"
    why = (
        f"{cause}: the slowest owner will take {after:.4f} s instead of {before:.4f} s per step in {steps} remaining "
        f"steps, and the move takes {moving:.2f} s"
    )
    return Rehoming(home, before, after, moving, why)


def _with_way(running: Home, ranks: int, buckets: Sequence[Bucket], costs: StateCosts) -> StateCosts:
    """Reduce the free memory, so that a bucket's old and new shards fit."""
    if costs.free_bytes is None:
        return costs
    whole = sum(bucket.size for bucket in buckets)
    # During a move, a rank also has the old shard of one bucket, at most the largest.
    beside = (1 + max(bucket.size for bucket in buckets) / whole) * TIGHT
    owned = [size * costs.held_per_element for size in owned_by(running, ranks, buckets)]
    free = [max(most / beside, min(own, most)) for own, most in zip(owned, costs.free_bytes, strict=True)]
    enough = sum(free) >= whole * running.copies * costs.held_per_element
    return replace(costs, free_bytes=free) if enough else costs


def _homes(running: Home, ranks: int, buckets: Sequence[Bucket], health: Health, costs: StateCosts) -> list[Home]:
    """Return homes owned by all ranks, all except the slowest, all except the two slowest, ..."""
    elements = sum(b.size for b in buckets) * running.copies
    slowest = sorted((rank for rank in health if rank < ranks), key=health.rate, reverse=True)
    nodes = running.nodes or range(ranks)
    homes: list[Home] = []
    for count in range(len(slowest) + 1):
        without = slowest[:count]
        # Copies must be on different nodes, so as many nodes must own state.
        if len({node for rank, node in enumerate(nodes) if rank not in without}) < running.copies:
            break
        try:
            # Exact shares may fit where rounded ones do not
            for rounded in (True, False):
                shares = best_shares(ranks, health, costs, elements, without, rounded)
                homes.append(Home(shares, running.copies, nodes=running.nodes))
        except ValueError:
            if not count:
                raise
            break
    return homes


def best_shares(
    ranks: int,
    health: Health,
    costs: StateCosts,
    elements: float,
    without: Collection[int] = (),
    rounded: bool = True,
) -> tuple[float, ...]:
    """Return shares proportional to speed as far as memory allows; the largest is 1.

    Args:
        elements: number of elements in the state, including copies.

    Raises:
        ValueError: the ranks have too little memory.
    """
    rates = np.array([health.rate(rank) for rank in range(ranks)])
    # room[rank]: largest fraction of all elements that fits in its memory.
    room = np.array(costs.free(ranks)) / (costs.held_per_element * elements)
    room[list(without)] = 0.0
    share = filled(rates, room)
    if share is None:
        need = elements * costs.held_per_element
        raise ValueError(
            f"rehoming: the state takes {need / 1e9:.2f} GB, but the ranks have {room.sum() * need / 1e9:.2f} GB: "
            "use more ranks, or fewer copies"
        )
    relative = share / share.max()
    if not rounded:
        return tuple(relative.tolist())
    # Rounding up could exceed memory
    if costs.free_bytes is not None:
        return tuple((np.floor(relative * ROUNDED * 100 + EXACT) / (ROUNDED * 100)).tolist())
    return tuple((np.rint(relative * ROUNDED) / ROUNDED).tolist())


def received(old: Home, new: Home, ranks: int, buckets: Sequence[Bucket]) -> list[int]:
    before = HomeLayouts(old, ranks)
    after = HomeLayouts(new, ranks)
    total = np.zeros(ranks, np.int64)
    for bucket in buckets:
        # total[dst] += elements that rank `dst` receives.
        slices = move(before.of(bucket), after.of(bucket)).travelling
        np.add.at(total, slices.dst, slices.hi - slices.lo)
    return [int(elements) for elements in total]


def stages(old: Home, new: Home, ranks: int, buckets: Sequence[Bucket], elements: int) -> Iterator[Home]:
    """Yield the home after each stage of a move; a stage sends each rank at most `elements` elements or one bucket.

    A change of copies or nodes takes a single stage.
    """
    if (old.copies, old.nodes) != (new.copies, new.nodes):
        yield new
        return
    # moved: bucket -> shares after this stage. ahead: whether the stage moves anything.
    # waiting[rank]: elements that the rank receives in this stage.
    moved: dict[str, Sequence[float]] = {bucket.name: _shares(old, bucket.name, ranks) for bucket in buckets}
    waiting = np.zeros(ranks, np.int64)
    ahead = False
    for bucket in buckets:
        coming = np.array(received(old, new, ranks, [bucket]))
        if ahead and (waiting + coming).max() > elements:
            yield replace(old, shares=None, buckets=dict(moved))
            waiting = np.zeros(ranks, np.int64)
            ahead = False
        moved[bucket.name] = _shares(new, bucket.name, ranks)
        waiting = waiting + coming
        ahead = ahead or bool(coming.any())
    yield new


def passes(way: Sequence[Home], ranks: int, buckets: Sequence[Bucket], costs: StateCosts) -> bool:
    """Return whether ranks have memory for old and new shards in every stage."""
    for old, new in pairwise(way):
        before = HomeLayouts(old, ranks)
        after = HomeLayouts(new, ranks)
        moved = [b for b in buckets if _shares(old, b.name, ranks) != _shares(new, b.name, ranks)]
        for rank, free in enumerate(costs.free(ranks)):
            size = sum(before.of(b).local_size(rank) for b in buckets)
            size += sum(after.of(b).local_size(rank) for b in moved)
            if size * costs.held_per_element > free:
                return False
    return True


def owned_by(home: Home, ranks: int, buckets: Sequence[Bucket]) -> list[int]:
    layouts = HomeLayouts(home, ranks)
    return [sum(layouts.of(bucket).local_size(rank) for bucket in buckets) for rank in range(ranks)]


def _shares(home: Home, bucket: str, ranks: int) -> Sequence[float]:
    return home.shares_of(bucket) or (1.0,) * ranks


def _seconds(home: Home, ranks: int, buckets: Sequence[Bucket], health: Health, costs: StateCosts) -> float:
    whole = sum(bucket.size for bucket in buckets)
    owned = enumerate(owned_by(home, ranks, buckets))
    return max(health.rate(r) * (size / whole * costs.update_s + bool(size) * costs.messages_s) for r, size in owned)


def _fits(home: Home, ranks: int, buckets: Sequence[Bucket], costs: StateCosts) -> bool:
    sizes = zip(owned_by(home, ranks, buckets), costs.free(ranks), strict=True)
    return all(size * costs.held_per_element <= free for size, free in sizes)
