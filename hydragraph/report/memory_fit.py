"""Will it fit: what ranks hold when they hold most, of what, and what to change first where it is too much."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hydragraph.cost.costs import Costs
from hydragraph.cost.rank_memory import Memory
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Pipeline, Strategy

WORDS = {
    "state": "home weights and optimizer state",
    "shard": "home gradients",
    "weights": "weights of the stage",
    "gradients": "gradients of the stage",
    "activations": "activations",
    "working": "what a block makes and drops again",
    "messages": "messages under way",
}
SHORTER = 0.8  # of the length tried before, when shorter micro-batches are looked for


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
        return WORDS[max(parts, key=lambda name: parts[name])]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "strategy": self.strategy.name,
            "fits": self.fits,
            "seconds": self.seconds,
            "tightest": self.tightest,
            "ranks": [
                {"rank": rank, "peak_bytes": memory.total, "limit_bytes": limit, **asdict(memory)}
                for rank, (memory, limit) in enumerate(zip(self.memory, self.limits, strict=True))
            ],
        }


def fit(costs: Costs, strategy: Strategy, assignment: Assignment) -> MemoryFit:
    """Simulate an iteration and walk every rank's program, so that it is known when messages are over."""
    timeline = costs.simulate(strategy, assignment)
    memory = tuple(timeline.memory[rank].peak for rank in range(costs.ranks))
    limits = tuple(float(device.memory_bytes) for device in costs.cluster.devices)
    return MemoryFit(strategy, memory, limits, timeline.seconds)


def advice(costs: Costs, found: MemoryFit, assignment: Assignment) -> str:
    """Say what to change first; "" where it fits.

    What changes least comes first: recomputation keeps the strategy, shorter micro-batches keep its shape, shorter
    sequences keep the ranks. Each of these was walked, so that it fits if it is advised.
    """
    if found.fits:
        return ""
    again = recomputing(found.strategy)
    if fit_only(costs, again, assignment):
        return f"recompute: {again.name} fits"
    for strategy, words in ((found.strategy, ""), (again, f" and recomputation, {again.name}")):
        shorter = _most_tokens(costs, strategy, assignment)
        if shorter is not None:
            return f"micro-batches of at most {shorter:,} tokens{words}"
    length = _longest(costs, again, assignment)
    if length is not None:
        return f"sequences of at most {length:,} tokens (data.max_length), one by one, and recomputation, {again.name}"
    return _more(found)


def _more(found: MemoryFit) -> str:
    """Say what to do where even a short sequence does not fit: more ranks, which share the state, or smaller stages."""
    memory = found.memory[found.tightest]
    home = memory.state + memory.shard
    room = found.limits[found.tightest] - memory.weights - memory.gradients
    if room <= 0 or home <= memory.weights + memory.gradients:
        return "a higher tensor-parallel degree or more stages: the stage's own weights and gradients are too much"
    ranks = math.ceil(home * len(found.memory) / room) + 1
    return f"more ranks, at least {ranks}, which share the state: what is held at home alone is too much"


def _most_tokens(costs: Costs, strategy: Strategy, assignment: Assignment) -> int | None:
    """Return how many tokens micro-batches may have; None where the longest sequence alone is too much already."""
    longest = max((n for n in assignment.lengths if n), default=0)
    now = max((sum(m) for p in assignment.tokens for m in p), default=0)
    for tokens in _shorter(now):
        shorter = packed_in(assignment, max(tokens, longest))
        if fit_only(costs, strategy, shorter):
            return max(sum(m) for p in shorter.tokens for m in p)
        if tokens <= longest:
            return None
    return None


def _longest(costs: Costs, strategy: Strategy, assignment: Assignment) -> int | None:
    """Return how long sequences may be, each a micro-batch of its own; None where none fits."""
    for length in _shorter(max(assignment.lengths, default=0)):
        cut = replace(assignment, lengths=tuple(min(n, length) for n in assignment.lengths))
        if fit_only(costs, strategy, packed_in(cut, length)):
            return length
    return None


def _shorter(tokens: int) -> Iterator[int]:
    """Yield ever smaller numbers of tokens, in steps of 64, or to 1 where there are fewer."""
    while tokens > 1:
        tokens = int(tokens * SHORTER)
        tokens = tokens // 64 * 64 if tokens >= 64 else tokens
        if tokens:
            yield tokens


def packed_in(assignment: Assignment, tokens: int) -> Assignment:
    """Return each pipeline's sequences, in the order that they have, in micro-batches of at most so many tokens."""
    pipelines = []
    for pipeline in assignment.micro_batches:
        batches: list[list[int]] = []
        size = 0
        for i in (i for micro_batch in pipeline for i in micro_batch):
            if not batches or size + assignment.lengths[i] > tokens:
                batches.append([])
                size = 0
            batches[-1].append(i)
            size += assignment.lengths[i]
        pipelines.append(tuple(map(tuple, batches)))
    return replace(assignment, micro_batches=tuple(pipelines))


def recomputing(strategy: Strategy) -> Strategy:
    """Return a strategy whose stages all recompute."""
    # Recomputation changes what stages keep, not which rank holds what: the strategy stays otherwise the same.
    pipelines = (Pipeline(tuple(replace(s, recompute=True) for s in p.stages)) for p in strategy.pipelines)
    return replace(strategy, pipelines=tuple(pipelines))


def fit_only(costs: Costs, strategy: Strategy, assignment: Assignment) -> bool:
    """Say whether every rank has room."""
    memory = costs.simulate(strategy, assignment).memory
    # Rank by rank: one that has no room is enough to know.
    return all(memory[rank].peak.total <= device.memory_bytes for rank, device in enumerate(costs.cluster.devices))
