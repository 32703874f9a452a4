"""What must not make a plan slower: another order of nodes and devices, a node more, a faster link, memory, health.

    python -m tests.planner.metamorphic                  # 200 clusters: how often each breaks
    python -m tests.planner.metamorphic --drawn 20 --first 40 --method mixed

A situation follows from its number alone, so that two versions of the planner can be compared.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.plan import Method
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from tests.cost import priced

SLOWER = {"fast": 1.0, "slow": 2.5, "odd": 20.0}
BANDWIDTHS = (1e6, 1e7, 1e8, 1e9, 1e10, 5e10)
# Slowdown of a plan that counts as noise of the search.
SAME = 0.01


@dataclass(frozen=True)
class Machine:
    """A node, and the rates of its devices."""

    node: Node
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Situation:
    """Machines, a model and work.

    Attributes:
        machines: in the order of their ranks.
        memory: bytes of a device, by type.
        layers, elements: of the model; elements of a layer.
        work: of an iteration.
    """

    machines: tuple[Machine, ...]
    memory: dict[str, int]
    layers: int
    elements: int
    work: hg.Workload

    @property
    def costs(self) -> Costs:
        """Costs for pricing its plans."""
        types = {name: DeviceType(1e15, memory, 1e12) for name, memory in self.memory.items()}
        rates = [rate for machine in self.machines for rate in machine.rates]
        names = {machine.node.type for machine in self.machines}
        cluster = Cluster.of({n: t for n, t in types.items() if n in names}, tuple(m.node for m in self.machines))
        profiles = [priced.profile(self.layers, name, SLOWER[name], self.elements) for name in cluster.types]
        return Costs(Profile.merge(profiles), cluster, hg.Health(dict(enumerate(rates))))

    def seconds(self, method: Method = "auto") -> float:
        """Return the seconds of its plan, or infinity if no plan fits."""
        try:
            return hg.plan(self.costs, self.work, method).seconds
        except hg.Unsupported:
            return math.inf


def drawn(number: int) -> Situation:
    """Return the situation of a number: 2 to 12 nodes, 4 to 32 devices; it depends on nothing else."""
    random = np.random.default_rng([7, number])
    names = list(SLOWER)[: random.integers(1, 4)]
    outer = [float(b) for b in random.choice(BANDWIDTHS, random.integers(1, 4))]
    machines: list[Machine] = []
    devices = int(random.integers(4, 33))
    kinds = [
        Node(
            str(random.choice(names)),
            int(random.choice([1, 2, 3, 4, 8])),
            Interconnect(float(random.choice([1e10, 1e12])), 1e-6),
            Interconnect(float(random.choice(outer)), 1e-5),
        )
        for _ in range(random.integers(1, 5))
    ]
    slow = random.choice([0.0, 0.1, 0.3])
    while len(machines) < 2 or (sum(len(m.rates) for m in machines) < devices and len(machines) < 12):
        kind = kinds[random.integers(len(kinds))]
        cards = int(random.choice([1, kind.devices]))
        rate = lambda: float(random.choice([1.2, 2.57, 12.0])) if random.random() < slow else 1.0  # noqa: E731
        rates = [rate() for _ in range(kind.devices)]
        machines.append(Machine(replace(kind, cards=cards), tuple(rates)))
    layers = int(random.choice([2, 6, 13, 24]))
    elements = int(random.choice([1_000, 100_000, 10_000_000]))
    whole = 20 * elements * (layers + 8)  # bytes of the state
    memory = {n: int(1e8 + whole * float(random.choice([0.3, 1.0, 4.0]))) for n in names}
    work = hg.Workload(sequences=int(random.choice([1, 4, 32, 100])), length=int(random.choice([100, 1000, 4000])))
    return Situation(tuple(machines), memory, layers, elements, work)


def reversed_nodes(s: Situation) -> Situation:
    """Return the nodes in the opposite order."""
    return replace(s, machines=s.machines[::-1])


def shuffled_nodes(s: Situation) -> Situation:
    """Return the nodes in some order."""
    order = np.random.default_rng(0).permutation(len(s.machines))
    return replace(s, machines=tuple(s.machines[i] for i in order))


def reversed_devices(s: Situation) -> Situation:
    """Return the devices of each node in the opposite order."""
    return replace(s, machines=tuple(replace(m, rates=m.rates[::-1]) for m in s.machines))


def without_the_last(s: Situation) -> Situation:
    """Return it without its last node: to add that must not hurt."""
    return replace(s, machines=s.machines[:-1])


def without_the_first(s: Situation) -> Situation:
    """Return it without its first node."""
    return replace(s, machines=s.machines[1:])


def links(factor: float, some: slice = slice(None)) -> Callable[[Situation], Situation]:
    """Return a change that multiplies the speed of links between some nodes by `factor`."""

    def changed(s: Situation) -> Situation:
        machines = list(s.machines)
        for i in range(len(machines))[some]:
            node = machines[i].node
            machines[i] = replace(machines[i], node=replace(node, outer=node.outer.times(factor)))
        return replace(s, machines=tuple(machines))

    return changed


def memory(factor: float) -> Callable[[Situation], Situation]:
    """Return a change that multiplies the memory of all devices by `factor`."""
    return lambda s: replace(s, memory={name: int(factor * each) for name, each in s.memory.items()})


def healthy(s: Situation) -> Situation:
    """Return it with all devices healthy."""
    return replace(s, machines=tuple(replace(m, rates=(1.0,) * len(m.rates)) for m in s.machines))


def healthier(s: Situation) -> Situation:
    """Return it with its slowest devices as fast as the next slower ones."""
    every = sorted({rate for m in s.machines for rate in m.rates})
    less = dict(zip(every[1:], every, strict=False))
    worst = every[-1]
    fewer = lambda rate: less.get(rate, 1.0) if rate == worst else rate  # noqa: E731
    return replace(s, machines=tuple(replace(m, rates=tuple(map(fewer, m.rates))) for m in s.machines))


# Changes that keep the seconds, changes that must not increase them, and changes that must not decrease them.
SAME_SECONDS = (reversed_nodes, shuffled_nodes, reversed_devices)
BETTER = {
    "links x2": links(2),
    "links x100": links(100),
    "first link x10": links(10, slice(0, 1)),
    "memory x1.5": memory(1.5),
    "memory x4": memory(4),
    "healthier": healthier,
    "healthy": healthy,
}
WORSE = (without_the_first, without_the_last)


def broken(s: Situation, method: Method) -> dict[str, float]:
    """Return by what part each property breaks: 0.02 is 2 % more seconds than it may have; 0 or less: it holds."""
    now = s.seconds(method)
    found = {}
    for change in SAME_SECONDS:
        other = changed if (changed := change(s)) != s else None
        if other is not None:
            seconds = other.seconds(method)
            found[change.__name__] = _more(max(now, seconds), min(now, seconds))
    for name, better in BETTER.items():
        if (other := better(s)) != s:
            found[name] = _more(other.seconds(method), now)
    for worse in WORSE:
        found[worse.__name__] = _more(now, worse(s).seconds(method))
    return found


def _more(seconds: float, than: float) -> float:
    return 0.0 if seconds == than else seconds / than - 1


def main() -> None:
    """Print how often each property breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=200, help="look at so many situations")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--method", default="auto")
    chosen = parser.parse_args()
    began = time.process_time()
    found: dict[str, list[tuple[float, int]]] = {}
    for number in range(chosen.first, chosen.first + chosen.drawn):
        for name, more in broken(drawn(number), chosen.method).items():
            found.setdefault(name, []).append((more, number))
    for name, each in found.items():
        print(f"{name:20} {_told(each)}")
    print(f"{chosen.drawn} situations, {time.process_time() - began:.0f} s CPU")


def _told(each: Sequence[tuple[float, int]]) -> str:
    worse = sorted((one for one in each if one[0] > SAME), reverse=True)
    where = ", ".join(f"{number}: {more:.1%}" for more, number in worse[:8])
    return f"{len(worse)} of {len(each)} break it{f' ({where})' if worse else ''}"


if __name__ == "__main__":
    main()
