"""Choice of machines to drop if two machines reach the leader but not each other.

When a pair has been broken for `CUT_S`, the leader drops machines, preferably those with few ranks, until no broken
pair remains. A dropped machine returns after reaching all machines in use continuously for `HEALED_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hydragraph.cluster.failure.time_limits import CUT_S

HEALED_S = 2.0

# The machine with the lower number comes first
Pair = tuple[int, int]


@dataclass(frozen=True)
class MachineLinks:
    """State of the links between machines.

    Attributes:
        broken_s: for each broken pair, seconds since it broke.
        dropped: machines not in use, each with a machine that it did not reach.
        healed_s: for each dropped machine, seconds since it began to reach all machines in use.
    """

    broken_s: Mapping[Pair, float] = field(default_factory=dict)
    dropped: Mapping[int, int] = field(default_factory=dict)
    healed_s: Mapping[int, float] = field(default_factory=dict)


def look(links: MachineLinks, elapsed: float, broken: Collection[Pair], ranks: Mapping[int, int]) -> MachineLinks:
    """Return the state of the links `elapsed` seconds later.

    Args:
        broken: pairs of machines that do not hear each other although the leader hears both.
    """
    # A pair that is not broken now starts again at 0, because it is missing from the new mapping.
    broken_s = {pair: links.broken_s.get(pair, 0.0) + elapsed for pair in broken}
    dropped = dict(links.dropped)
    healed_s = {}
    for node in sorted(dropped):
        # Only links to machines in use count: two dropped machines need not reach each other.
        apart = any(node in pair and not (set(pair) - {node}) & dropped.keys() for pair in broken)
        healed_s[node] = 0.0 if apart else links.healed_s.get(node, 0.0) + elapsed
        if healed_s[node] >= HEALED_S:
            del dropped[node], healed_s[node]
    in_use = {pair: seconds for pair, seconds in broken_s.items() if dropped.keys().isdisjoint(pair)}
    if any(seconds >= CUT_S for seconds in in_use.values()):
        # Pairs that break together are reported one by one, so recently broken pairs count too.
        dropped |= smaller_side([pair for pair, seconds in in_use.items() if seconds >= CUT_S / 2], ranks)
    return MachineLinks(broken_s, dropped, healed_s)


def smaller_side(broken: Collection[Pair], ranks: Mapping[int, int]) -> dict[int, int]:
    """Return the machines to drop, each with a machine in use that it does not reach.

    The machine with the fewest ranks per broken pair is dropped first; among equals, the one with the highest index.
    """
    # apart: machine -> machines that it does not reach; left: the same
    #   without machines dropped so far
    # broken pairs (1, 2) and (1, 3), equal ranks: dropping 1 leaves no broken
    #   pair, so the result is {1: 2}
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
    # Greedy steps may drop too much: a machine can stay if all machines that it does not
    # reach were dropped after it.
    for node in sorted(dropped, key=lambda each: (-ranks.get(each, 0), each)):
        if apart[node] <= dropped:
            dropped.remove(node)
    return {node: min(apart[node] - dropped) for node in sorted(dropped)}
