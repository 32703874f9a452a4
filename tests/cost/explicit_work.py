"""Costs of instructions one by one, and pair by pair, for small programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydragraph.cost.costed_work import CostedWork
from hydragraph.cost.instruction_work import NOTHING
from hydragraph.cost.traffic import Pair, Transfers
from hydragraph.ir.instruction import Op


@dataclass(frozen=True)
class ExplicitWork:
    """Explicit costs; absent entries have zero cost.

    Attributes:
        seconds: (operation, block or "", rank) -> seconds of one forward or backward of every micro-batch, or of the
            update; (operation, block, rank, micro-batch) for a single one, which takes precedence.
        pull_bytes, push_bytes, handed_bytes: bucket -> (sending rank, receiving rank) -> bytes; local movements are
            left out.
        activation_bytes: pipeline -> bytes of one micro-batch's hidden state.
        commit: seconds.
        rates: factor on the latency of a rank's messages; default 1.
    """

    seconds: Mapping[tuple[Op, str, int] | tuple[Op, str, int, int], float]
    pull_bytes: Mapping[str, Mapping[Pair, float]] = field(default_factory=dict)
    push_bytes: Mapping[str, Mapping[Pair, float]] = field(default_factory=dict)
    activation_bytes: Mapping[int, float] = field(default_factory=dict)
    commit: float = 0.0
    rates: Mapping[int, float] = field(default_factory=dict)
    handed_bytes: Mapping[str, Mapping[Pair, float]] = field(default_factory=dict)

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """See `Priced`."""

        def of(rank: int, m: int) -> float:
            own = self.seconds.get((op, block, rank, m))
            return self.seconds.get((op, block, rank), 0.0) if own is None else own

        return [max(of(rank, m) for rank in ranks) for m in micro_batches]

    def copying(self, block: str, ranks: Sequence[int], micro_batch: int) -> float:
        """See `Priced`."""
        return max(self.seconds.get((Op.OFFLOAD, block, rank), 0.0) for rank in ranks)

    def moved(self, op: Op, bucket: str) -> Transfers:
        """See `Priced`."""
        pairs = (self.pull_bytes if op is Op.PULL else self.push_bytes).get(bucket)
        return Transfers.of(pairs) if pairs else NOTHING

    def handed_on(self, bucket: str) -> Transfers:
        """See `Priced`."""
        pairs = self.handed_bytes.get(bucket)
        return Transfers.of(pairs) if pairs else NOTHING

    def message_bytes(self, pipeline: int, micro_batch: int) -> float:
        """See `Priced`."""
        return self.activation_bytes.get(pipeline, 0.0)

    def update_s(self, rank: int) -> float:
        """See `Priced`."""
        return self.seconds.get((Op.UPDATE, "", rank), 0.0)

    def commit_s(self) -> float:
        """See `Priced`."""
        return self.commit

    def handling(self, rank: int) -> float:
        """See `Priced`."""
        return self.rates.get(rank, 1.0)


def explicit(work: CostedWork) -> ExplicitWork:
    """Return the work of a small program in explicit form."""
    costs = work._costs
    ranks = range(costs.ranks)
    seconds: dict[tuple[Op, str, int] | tuple[Op, str, int, int], float] = {}
    for stage in work.placement.stages:
        for position in stage.positions:
            block = costs.outline.blocks[position]
            for op in (Op.FORWARD, Op.BACKWARD):
                took = work.computing(op, block, stage.ranks, stage.micro_batches)
                for m, each in zip(stage.micro_batches, took, strict=True):
                    seconds |= {(op, block, rank, m): each for rank in stage.ranks}
    seconds |= {(Op.UPDATE, "", rank): work.update_s(rank) for rank in ranks}
    pulls, pushes = (
        {name: dict(work.moved(op, name).pairs) for other, name in work.users if other is op}
        for op in (Op.PULL, Op.PUSH)
    )
    handed = {name: dict(work.handed_on(name).pairs) for name in pushes}
    rates = {rank: work.handling(rank) for rank in ranks}
    return ExplicitWork(seconds, pulls, pushes, {}, work.commit_s(), rates, handed)
