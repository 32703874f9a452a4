"""Choice of machines to drop if two machines reach the leader but not each other.

When a pair has been broken for `CUT_S`, the leader drops machines, preferably with few ranks, until no broken pair
remains. A dropped machine returns after reaching all machines in use for `HEALED_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hydragraph.cluster.failure.time_limits import CUT_S

HEALED_S = 2.0

# (lower, higher) machine
Pair = tuple[int, int]


@dataclass(frozen=True)
class MachineLinks:
    """State of the links between machines.

    Attributes:
        broken_s: seconds since each broken pair broke.
        dropped: machines not in use, each with a machine that it did not reach.
        healed_s: seconds for which each dropped machine has reached all machines in use.
    """

    broken_s: Mapping[Pair, float] = field(default_factory=dict)
    dropped: Mapping[int, int] = field(default_factory=dict)
    healed_s: Mapping[int, float] = field(default_factory=dict)


def look(links: MachineLinks, elapsed: float, broken: Collection[Pair], ranks: Mapping[int, int]) -> MachineLinks:
    """Return the links `elapsed` seconds later.

    Args:
        broken: pairs that do not hear each other although the leader hears both.
    """
    # A pair that is not broken is left out, and so starts again at 0.
    broken_s = {pair: links.broken_s.get(pair, 0.0) + elapsed for pair in broken}
    dropped = dict(links.dropped)
    healed_s = {}
    for node in sorted(dropped):
        # Only links to machines in use count: dropped machines need no link.
        apart = any(node in pair and not (set(pair) - {node}) & dropped.keys() for pair in broken)
        healed_s[node] = 0.0 if apart else links.healed_s.get(node, 0.0) + elapsed
        if healed_s[node] >= HEALED_S:
            del dropped[node], healed_s[node]
    in_use = {pair: seconds for pair, seconds in broken_s.items() if dropped.keys().isdisjoint(pair)}
    if any(seconds >= CUT_S for seconds in in_use.values()):
        # Pairs that break together are reported one by one, so recent ones count.
        dropped |= smaller_side([pair for pair, seconds in in_use.items() if seconds >= CUT_S / 2], ranks)
    return MachineLinks(broken_s, dropped, healed_s)


def smaller_side(broken: Collection[Pair], ranks: Mapping[int, int]) -> dict[int, int]:
    """Return the machines to drop, each with a machine in use that it does not reach.

    The machine with the fewest ranks per broken pair is dropped first; among equals, the one with the highest index.
    """
    # apart: machine -> machines that it does not reach; left: the same without
    #   dropped machines
    # broken pairs (1, 2) and (1, 3), equal ranks: without 1, no pair is broken,
    #   so the result is {1: 2}
    apart: dict[int, set[int]] = {}
    for one, other in broken:
        apart.setdefault(one, set()).add(other)
        apart.setdefault(other, set()).add(one)
    left = dict(apart)
    dropped = set[int]()
    while left:
        node = min(left, key=lambda each: (ranks.get(each, 0) / len(left[each]), -each))
        dropped.add(node)
        left = {machine: rest for machine in left if machine != node and (rest := left[machine] - {node})}
    # Greedy steps may drop too much: a machine can stay if all that it does not reach were
    # dropped later.
    for node in sorted(dropped, key=lambda each: (-ranks.get(each, 0), each)):
        if apart[node] <= dropped:
            dropped.remove(node)
    return {node: min(apart[node] - dropped) for node in sorted(dropped)}
