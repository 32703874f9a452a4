"""Will it fit: what ranks hold when they hold most, of what, and what to change first where it is too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.cost.costs import Costs
from hydragraph.cost.memory import Memory
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Pipeline, Strategy

_WORDS = {
    "state": "home weights and optimizer state",
    "shard": "home gradients",
    "weights": "weights of the stage",
    "gradients": "gradients of the stage",
    "activations": "activations",
    "working": "what a block makes and drops again",
    "messages": "messages under way",
}


@dataclass(frozen=True)
class MemoryFit:
    """One strategy.

    Attributes:
        strategy: the one that was walked.
        memory: of every rank, when it holds most.
        limits: bytes that each rank may use.
        seconds: of the iteration that was asked about.
    """

    strategy: Strategy
    memory: tuple[Memory, ...]
    limits: tuple[float, ...]
    seconds: float

    @property
    def tightest(self) -> int:
        """The rank that has the least room left, as a part of its memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total / self.limits[rank])

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return all(m.total <= limit for m, limit in zip(self.memory, self.limits, strict=True))

    @property
    def largest(self) -> str:
        """What takes most on the tightest rank, in words."""
        parts = vars(self.memory[self.tightest])
        return _WORDS[max(parts, key=lambda name: parts[name])]


def fit(costs: Costs, strategy: Strategy, assignment: Assignment) -> MemoryFit:
    """Walk every rank's program of an iteration."""
    memory = costs.memory(strategy, assignment)
    limits = tuple(float(device.memory_bytes) for device in costs.cluster.devices)
    return MemoryFit(strategy, memory, limits, costs.simulate(strategy, assignment).seconds)


def advice(costs: Costs, found: MemoryFit, assignment: Assignment) -> str:
    """Say what to change first; "" where it fits.

    What is advised was walked too: recomputation if that is enough, else shorter micro-batches, else more ranks.
    """
    if found.fits:
        return ""
    # What changes least first: recomputation keeps the strategy, shorter micro-batches keep its shape.
    again = recomputing(found.strategy)
    if again != found.strategy and fit_only(costs, again, assignment):
        return f"recompute: {again.name} fits"
    rank = found.tightest
    place = found.strategy.place(rank)
    if place is not None:
        tokens = costs.max_len(found.strategy.pipelines[place.pipeline], found.strategy)
        if tokens > 0:
            return f"shorter micro-batches: at most {tokens:,} tokens fit pipeline {place.pipeline}"
    memory = found.memory[rank]
    if memory.state + memory.shard > memory.total / 2:
        return "more ranks, which share the state: what is held at home alone takes more than half"
    return "a higher tensor-parallel degree or more stages: the stage's own weights and gradients are too much"


def recomputing(strategy: Strategy) -> Strategy:
    """Return a strategy whose stages all recompute."""
    # Recomputation changes what stages keep, not which rank holds what: the strategy stays otherwise the same.
    pipelines = (Pipeline(tuple(replace(s, recompute=True) for s in p.stages)) for p in strategy.pipelines)
    return replace(strategy, pipelines=tuple(pipelines))


def fit_only(costs: Costs, strategy: Strategy, assignment: Assignment) -> bool:
    """Say whether every rank has room."""
    devices: Sequence[float] = [device.memory_bytes for device in costs.cluster.devices]
    return all(m.total <= limit for m, limit in zip(costs.memory(strategy, assignment), devices, strict=True))
