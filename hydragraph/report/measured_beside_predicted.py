"""Comparison of measured iterations with the cost model's predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from hydragraph.cost.accounts import CAUSES, TRANSFERS, TimeAccount, TimeKind, measured_accounts, predicted_accounts
from hydragraph.cost.corrections import CORRECTED, Corrections
from hydragraph.cost.costs import Costs
from hydragraph.cost.trace_file import Trace, TracedStep, TraceEvent, read_trace
from hydragraph.spec.record import attributes_of
from hydragraph.spec.strategy import Strategy

# `sentence` names a rank with more than this fraction of a kind's difference.
MOSTLY = 0.6


@dataclass(frozen=True)
class ComparedStep:
    """Measured and predicted times of an iteration.

    Attributes:
        seconds: measured time, including work outside instructions.
    """

    step: int
    strategy: str
    seconds: float
    measured: tuple[TimeAccount, ...]
    predicted: tuple[TimeAccount, ...]

    @property
    def measured_s(self) -> float:
        return max(account.total for account in self.measured)

    @property
    def predicted_s(self) -> float:
        return max(account.total for account in self.predicted)

    def ratios(self) -> dict[tuple[TimeKind, int], float]:
        """Return measured / predicted time, by kind and rank, where both times are positive.

        For transfers, compare durations, because waits depend on overlap with computation.
        """
        ratios: dict[tuple[TimeKind, int], float] = {}
        for rank, (measured, predicted) in enumerate(zip(self.measured, self.predicted, strict=True)):
            sums: dict[TimeKind, tuple[float, float]] = {}
            for kind in CORRECTED:
                sums[kind] = measured.seconds[kind], predicted.seconds[kind]
            # letters: first letters of values (`ir.value`): weights, gradients, hidden states and
            # their gradients
            for kind, letters in ((TimeKind.PULL, "W"), (TimeKind.PUSH, "G"), (TimeKind.P2P, "hd")):
                seen = [v for v in measured.transfers if v[0] in letters and predicted.transfers.get(v, 0.0) > 0]
                whole = sum(measured.transfers[v] for v in seen)
                sums[kind] = whole, sum(predicted.transfers[v] for v in seen)
            ratios |= {(kind, rank): one / two for kind, (one, two) in sums.items() if one > 0 and two > 0}
        return ratios


@dataclass(frozen=True)
class ComparedSeconds:
    kind: TimeKind
    rank: int | None
    measured: float
    predicted: float

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.predicted > 0 else None

    @property
    def difference(self) -> float:
        return self.measured - self.predicted


@dataclass(frozen=True)
class RunComparison:
    """Measured iterations and their simulation.

    Attributes:
        before: corrections that the costs already include.
        warming: excluded first steps of strategies that ran several steps.
    """

    source: str
    types: tuple[str, ...]
    steps: tuple[ComparedStep, ...]
    before: Corrections = field(default_factory=Corrections)
    warming: tuple[int, ...] = ()

    @property
    def corrections(self) -> Corrections:
        """Corrections of predictions, from `steps` and `before`."""
        corrections = self.before if self.before.types == self.types else Corrections(self.types)
        health = self.before.health
        for step in self.steps:
            # Predictions include earlier corrections.
            ratios = {}
            for (kind, rank), ratio in step.ratios().items():
                # The ratio is relative to the corrected prediction: multiply earlier corrections
                # and the rank's slowdown back.
                rate = 1.0 if kind in (*TRANSFERS, TimeKind.COMMIT) else health.rate(rank)
                type_ = None if kind in TRANSFERS else self.types[rank]
                ratios[kind, rank] = ratio * self.before.factor(kind, type_) * rate
            corrections = corrections.with_step(ratios)
        return corrections

    @property
    def ranks(self) -> int:
        return len(self.types)

    @cached_property
    def rows(self) -> tuple[ComparedSeconds, ...]:
        return tuple(self._row(kind, rank) for kind in TimeKind for rank in range(self.ranks))

    def _row(self, kind: TimeKind, rank: int) -> ComparedSeconds:
        measured = sum(step.measured[rank].seconds[kind] for step in self.steps)
        return ComparedSeconds(kind, rank, measured, sum(step.predicted[rank].seconds[kind] for step in self.steps))

    @cached_property
    def kinds(self) -> tuple[ComparedSeconds, ...]:
        """One row per kind, summed over all ranks."""
        return tuple(_together(kind, [row for row in self.rows if row.kind is kind]) for kind in TimeKind)

    @cached_property
    def strategies(self) -> tuple[tuple[str, int, float, float], ...]:
        """(text, number of steps, median measured seconds, median predicted seconds) of every strategy."""
        summaries = []
        for strategy in dict.fromkeys(step.strategy for step in self.steps):
            of_it = [step for step in self.steps if step.strategy == strategy]
            middle = (median(step.measured_s for step in of_it), median(step.predicted_s for step in of_it))
            summaries.append((strategy, len(of_it), *middle))
        return tuple(summaries)

    @property
    def sentence(self) -> str:
        """Sentence on the cost model's largest error, not counting waits for other ranks."""
        causes = [row for row in self.rows if row.kind in CAUSES]
        whole = sum(abs(row.difference) for row in causes)
        if whole == 0:
            return "measured and predicted times are equal"
        by_kind = {kind: sum(abs(row.difference) for row in causes if row.kind is kind) for kind in CAUSES}
        kind = max(by_kind, key=lambda each: by_kind[each])
        of_kind = [row for row in causes if row.kind is kind]
        worst = max(of_kind, key=lambda row: abs(row.difference))
        alone = self.ranks > 1 and abs(worst.difference) > MOSTLY * by_kind[kind]
        row = worst if alone else _together(kind, of_kind)
        where = f" on rank {row.rank}" if alone else " on all ranks" if self.ranks > 1 else ""
        share = abs(worst.difference) / whole if alone else by_kind[kind] / whole
        return f"{kind.value}{where}: {_times(row)}, {share:.0%} of the whole difference"

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "sentence": self.sentence,
            "corrections": str(self.corrections),
            "left_out": list(self.warming),
            "strategies": [
                {"strategy": text, "steps": count, "measured_s": measured, "predicted_s": predicted}
                for text, count, measured, predicted in self.strategies
            ],
            "kinds": [
                {
                    "kind": row.kind.value,
                    "rank": row.rank,
                    "measured_s": row.measured,
                    "predicted_s": row.predicted,
                    "ratio": row.ratio,
                }
                for row in (*self.kinds, *self.rows)
            ],
            "steps": [
                attributes_of(step, "step", "strategy", "seconds", "measured_s", "predicted_s") for step in self.steps
            ],
        }


def _together(kind: TimeKind, rows: Iterable[ComparedSeconds]) -> ComparedSeconds:
    rows = tuple(rows)
    return ComparedSeconds(kind, None, sum(row.measured for row in rows), sum(row.predicted for row in rows))


def _times(row: ComparedSeconds) -> str:
    if row.ratio is None:
        return f"measured {row.measured:.3g} s, without a prediction"
    # Two digits, without an exponent
    ratio = f"{row.ratio:.2g}" if row.ratio < 99.5 else f"{row.ratio:,.0f}"
    return f"measured {ratio}x the prediction"


def compare(costs: Costs, trace: Trace | str | Path) -> RunComparison:
    """Compare a run's trace, or its trace.json, with the simulation of the same iterations.

    Raises:
        ValueError: the trace and the costs have different numbers of ranks.
    """
    if not isinstance(trace, Trace):
        trace = read_trace(Path(trace))
    if len(trace.ranks) != costs.ranks:
        raise ValueError(
            f"the trace has {len(trace.ranks)} ranks, but the costs have {costs.ranks}: pass costs for as many ranks"
        )
    kept, warming = _warm(trace.steps)
    compared = tuple(compared_step(costs, step, trace.of(step.step)) for step in kept)
    types = tuple(costs.cluster.type_of(rank) for rank in range(costs.ranks))
    return RunComparison(costs.source_of(), types, compared, costs.corrections, warming)


def compared_step(costs: Costs, step: TracedStep, ranks: Sequence[Sequence[TraceEvent]]) -> ComparedStep:
    strategy = Strategy.parse(step.strategy, costs.outline.layers)
    predicted = predicted_accounts(costs.simulate(strategy, step.assignment))
    return ComparedStep(step.step, step.strategy, step.seconds, measured_accounts(ranks), predicted)


def _warm(steps: Sequence[TracedStep]) -> tuple[list[TracedStep], tuple[int, ...]]:
    kept = []
    warming = []
    seen: set[str] = set()
    counts = [step.strategy for step in steps]
    for step in steps:
        # Omit a strategy's first step, which includes compilation, unless it is the only one.
        first = step.strategy not in seen
        seen.add(step.strategy)
        if first and counts.count(step.strategy) > 1:
            warming.append(step.step)
        else:
            kept.append(step)
    return kept, tuple(warming)
