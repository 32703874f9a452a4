"""The home that costs imply for strategies: inputs of the choice (`home_choice.Question`), and memory for state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hydragraph.cost.deepspeed_stack import Stack
from hydragraph.cost.home_choice import Question
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.program_outline import Outline
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Pipeline, Strategy

SHORTEST = 256  # minimum tokens of a useful micro-batch
BLOCKS = 2  # of the largest size, whose messages are in flight at the same time


class Known(Protocol):
    """The part of `Costs` used here."""

    outline: Outline
    buckets: tuple[Bucket, ...]
    cluster: Cluster
    home: Home
    health: Health
    sizes: ModelSizes
    state_bytes: int
    stack: Stack

    @property
    def ranks(self) -> int: ...
    def piece_profile(self, rank: int) -> Profile: ...
    def memory_of(self, rank: int) -> float: ...
    def beside(self, strategy: Strategy, tokens: Sequence[int]) -> list[float]: ...


def question_of(
    costs: Known,
    strategies: Sequence[Strategy],
    home: Home | None = None,
    tokens: int | None = None,
    weights: Sequence[float] | None = None,
) -> Question:
    """Return the inputs of a choice on a cluster with known memory.

    Args:
        costs: of the model.
        strategies: that run.
        home: whose owners are chosen; default: that of the costs.
        tokens: of the largest micro-batch, limited to what fits; default: as many as use a device well.
        weights: frequencies of the strategies.
    """
    return Question(
        costs.outline,
        costs.buckets,
        tuple(strategies),
        costs.cluster,
        costs.home if home is None else home,
        costs.sizes.itemsize,
        None if weights is None else tuple(weights),
        costs.health,
        room_of(costs, strategies, tokens),
    )


def room_of(costs: Known, strategies: Sequence[Strategy], tokens: int | None = None) -> tuple[float, ...] | None:
    """Return the elements of state that fit each rank in addition to its stages; None: their memory is not known.

    Args:
        costs, strategies, tokens: as for `question_of`.
    """
    if not costs.stack.own:
        return None
    largest = max((bucket.size for bucket in costs.buckets), default=0)
    messages = BLOCKS * largest * (costs.sizes.itemsize + GRADIENT_BYTES)
    beside = [0.0] * costs.ranks
    for strategy in strategies:
        most = [tokens or _useful(costs, pipeline) for pipeline in strategy.pipelines]
        beside = list(map(max, beside, costs.beside(strategy, most)))
    held = costs.state_bytes + GRADIENT_BYTES
    return tuple((costs.memory_of(rank) - need - messages) / held for rank, need in enumerate(beside))


def _useful(costs: Known, pipeline: Pipeline) -> int:
    lengths = [costs.piece_profile(rank).util.get(s.tp, 1) for s in pipeline.stages for rank in s.devices]
    return max(SHORTEST, *lengths)
