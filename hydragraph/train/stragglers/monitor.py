"""Straggler monitor, which computes ranks' rates (slowdowns) from measured times.

On a shared CPU, a rate is the product of two factors, computed from the times that threads ran and were queued for a
core (`runtime.thread_times`):

    wall / predicted = (wall / (ran + queued)) x (ran / predicted)  x  (ran + queued) / ran
                       slowdown of the device (stopped, throttled)     contention for its core

The factors are estimated separately, because contention is noisy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from hydragraph.cost.corrections import COMPUTING, Corrections
from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.ir.instruction import Op
from hydragraph.passes.place import place
from hydragraph.runtime.instruction_trace import RankTimes
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from hydragraph.train.stragglers.rate_estimator import Change, Estimator, Kind, Sensitivity
from hydragraph.train.stragglers.straggler_state import SlowRank

# Threshold for contention, in standard deviations; high, because it comes in bursts
CROWDED = 4.0


@dataclass(frozen=True)
class KindOfWork:
    """Work with the same ratio of measured to predicted time on all healthy ranks."""

    type: str
    template: str
    stage: str


Predicted = dict[int, dict[KindOfWork, float]]


class Monitor:
    """Estimator of all ranks' slowdowns, on one rank.

    Args:
        costs: costs of healthy ranks.

    Attributes:
        corrections: ratio of measured to predicted block times, for each rank.
    """

    def __init__(
        self, costs: Costs, sensitivity: Sensitivity | None = None, slow: Mapping[int, SlowRank] | None = None
    ) -> None:
        slow_ranks = (slow or {}).items()
        self._costs = costs.changed(health=Health())
        self._templates = tuple(dict.fromkeys(costs.profile.blocks))
        self._device = Estimator(
            sensitivity, held={rank: straggler.device for rank, straggler in slow_ranks if straggler.device > 1}
        )
        self._core = Estimator(
            sensitivity, CROWDED, {rank: straggler.core for rank, straggler in slow_ranks if straggler.core > 1}
        )
        self._ran: set[Strategy] = set()
        self._probed: dict[int, float] = {}
        self.corrections = Corrections(tuple(costs.cluster.type_of(rank) for rank in range(costs.ranks)))

    def among(self, costs: Costs, numbers: Mapping[int, int]) -> Monitor:
        monitor = Monitor(costs)
        monitor._device, monitor._core = self._device.among(numbers), self._core.among(numbers)
        monitor._probed = {numbers[rank]: probe for rank, probe in self._probed.items() if rank in numbers}
        return monitor

    @property
    def slow(self) -> Mapping[int, SlowRank]:
        device = self._device.rates
        core = self._core.rates
        return {rank: SlowRank(device.get(rank, 1.0), core.get(rank, 1.0)) for rank in sorted({*device, *core})}

    @property
    def health(self) -> Health:
        return Health({rank: straggler.rate for rank, straggler in self.slow.items()})

    def observe(self, strategy: Strategy, assignment: Assignment, ranks: Sequence[RankTimes]) -> tuple[Change, ...]:
        """Record one iteration; return the changed rates.

        Raises:
            Unsupported: the costs are for another model.
        """
        first_time = strategy not in self._ran
        self._ran.add(strategy)
        if any(len(times.own) != len(self._templates) for times in ranks):
            raise Unsupported(
                f"the profile has {len(self._templates)} kinds of blocks, but the model has {len(ranks[0].own)}",
                where=f"profile {self._costs.profile.name}",
                remedy="measure this model with hydragraph profile",
            )
        if first_time:
            # A strategy's first step compiles graphs and allocates memory
            return ()
        before = self.health
        work: dict[int, dict[Kind, tuple[float, float]]] = {}
        # crowded[rank]: slowdown by other processes on the rank's core.
        crowded = {rank: (times.ran + times.queued) / times.ran for rank, times in enumerate(ranks) if times.ran > 0}
        for rank, kinds in predict(self._costs, strategy, assignment).items():
            # own: measured seconds by kind. alone: the same without contention.
            own = {kind: ranks[rank].own[self._templates.index(kind.template)] for kind in kinds}
            alone = {kind: seconds / crowded.get(rank, 1.0) for kind, seconds in own.items()}
            work[rank] = {kind: (alone[kind], seconds) for kind, seconds in kinds.items() if alone[kind] > 0}
            whole = sum(own.values()) / sum(kinds.values()) if kinds else 0.0
            # Forward and backward passes are timed together
            if whole > 0:
                self.corrections = self.corrections.with_step({(part, rank): whole for part in COMPUTING})
        # Idle ranks are included: old rates must not remain.
        crowd: dict[int, dict[Kind, tuple[float, float]]] = {r: {"core": (ratio, 1.0)} for r, ratio in crowded.items()}
        changed = self._device.observe({rank: by_kind for rank, by_kind in work.items() if by_kind}, self._idle(ranks))
        changed += self._core.observe(crowd)
        named = sorted({change.rank for change in changed})
        return tuple(Change(rank, before.rate(rank), self.health.rate(rank)) for rank in named)

    def baseline(self, ranks: Sequence[RankTimes]) -> None:
        """Record ranks' first speed measurements (`runtime.speed_probe`)."""
        for rank, times in enumerate(ranks):
            if times.probe > 0:
                self._probed.setdefault(rank, times.probe)

    def _idle(self, ranks: Sequence[RankTimes]) -> dict[int, float]:
        slowdowns = {}
        for rank, times in enumerate(ranks):
            type_ = self._costs.cluster.type_of(rank)
            peers = [p for r, p in self._probed.items() if self._costs.cluster.type_of(r) == type_]
            if times.probe > 0 and peers:
                # Probes measure speed (work per second): a slower rank has a smaller value.
                slowdowns[rank] = median_high(peers) / times.probe
        return slowdowns


def predict(costs: Costs, strategy: Strategy, assignment: Assignment) -> Predicted:
    work = costs.work(strategy, assignment)
    outline = costs.outline
    predicted: Predicted = {}
    for stage in place(outline, strategy, assignment.counts).stages:
        # Blocks of a template take the same time.
        learning: dict[tuple[str, bool], int] = {}
        first: dict[tuple[str, bool], str] = {}
        for position in stage.positions:
            key = (costs.profile.blocks[position], position >= outline.lowest)
            learning[key] = learning.get(key, 0) + 1
            first.setdefault(key, outline.blocks[position])
        for rank in stage.ranks:
            kinds: dict[KindOfWork, float] = {}
            for (template, learns), count in learning.items():
                kind = KindOfWork(costs.cluster.type_of(rank), template, stage.kind.text)
                for op in (Op.FORWARD, Op.BACKWARD) if learns else (Op.FORWARD,):
                    seconds = sum(work.computing(op, first[template, learns], stage.ranks, stage.micro_batches))
                    kinds[kind] = kinds.get(kind, 0.0) + count * seconds
            predicted[rank] = {kind: seconds for kind, seconds in kinds.items() if seconds > 0}
    return predicted
