"""Maximum tokens of a micro-batch that fits in every rank's memory.

The search skips an inner stage if an earlier stage of the same kind runs at least the same blocks with at most the same
free memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.peak_memory import PeakMemory
from hydragraph.cost.pricing import Pricing
from hydragraph.cost.rank_memory import micro_batches_until_peak
from hydragraph.ir.schedules.schedule_kinds import ALL_IN_FLIGHT
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy

# Maximum cached peaks, of about a megabyte each.
PEAKS = 256


class LongestMicroBatch:
    """Search for the longest micro-batches that fit in the memory of a cluster's ranks.

    Args:
        other: instance for the same profile, types and number of ranks, whose cached peaks are reused.
    """

    def __init__(self, costs: Pricing, other: LongestMicroBatch | None = None) -> None:
        self._costs = costs
        self._peaks: dict[object, PeakMemory] = {} if other is None else other._peaks

    def max_len(self, pipeline: Pipeline, strategy: Strategy | None = None, beside: float = 0.0) -> int:
        limits = [self._alone(pipeline, beside, strategy)]
        for stage in pipeline.stages:
            sharing: list[Pipeline] = [] if strategy is None else [p for p in strategy.pipelines if stage in p.stages]
            if len(sharing) > 1:
                for rank in self._unlike(stage):
                    limits.append(self._shared_peak(stage, sharing, rank).most(self._left(rank) - beside))
        return min(limits)

    def beside(self, strategy: Strategy, tokens: Sequence[int]) -> list[float]:
        bytes_by_rank = [0.0] * self._costs.ranks
        for pipeline, most in zip(strategy.pipelines, tokens, strict=True):
            for at, stage in enumerate(pipeline.stages):
                sharing = [p for p in strategy.pipelines if stage in p.stages]
                for rank in stage.devices:
                    peaks = [self._stage_peak(pipeline, at, rank, strategy)]
                    if len(sharing) > 1:
                        peaks.append(self._shared_peak(stage, sharing, rank))
                    bytes_by_rank[rank] = max(bytes_by_rank[rank], *(peak.needs(most) for peak in peaks))
        return bytes_by_rank

    def _alone(self, pipeline: Pipeline, beside: float, strategy: Strategy | None) -> int:
        profile = self._costs.piece_profile(pipeline.devices[0])
        measured = profile.limits.get((pipeline.stages[0].tp, len(pipeline.stages)))
        kind = StageKind(pipeline.stages[0].tp)
        plain = all(s.kind == kind and not s.stream and not s.offload for s in pipeline.stages)
        if measured is not None and plain and not pipeline.interleaved:
            return int(measured)
        most: int | None = None
        for at, rank in self._deciding(pipeline):
            peak = self._stage_peak(pipeline, at, rank, strategy)
            left = self._left(rank) - beside
            if most is None:
                most = peak.most(left)
            elif peak.needs(most) > left:
                most = min(most, peak.most(left))
        assert most is not None, "every pipeline must have a stage, and every stage a rank"
        return most

    def _deciding(self, pipeline: Pipeline) -> Iterator[tuple[int, int]]:
        """Yield the (stage position, rank) pairs that decide whether a micro-batch fits on all ranks."""
        spans = self._costs.spans(pipeline)
        contents = [self._contents(*span) for span in spans]
        looked: list[tuple[object, Counter[object], float]] = []
        for at, stage in enumerate(pipeline.stages):
            between = 0 < at < len(pipeline.stages) - 1 and not pipeline.interleaved
            alike = (stage.kind, stage.stream, stage.offload, frozenset(self._own_shares(stage, spans[at])))
            for rank in self._unlike(stage):
                left = self._left(rank)
                if between and any(
                    kind == alike and contents[at] <= earlier_contents and room <= left
                    for kind, earlier_contents, room in looked
                ):
                    continue
                if between:
                    looked.append((alike, contents[at], left))
                yield at, rank

    def _contents(self, first: int, end: int) -> Counter[object]:
        outline = self._costs.outline
        names = {name for block in outline.blocks[first:end] for name in outline.weights[block]}
        templates = self._costs.profile.blocks
        blocks = [(templates[at], at >= outline.lowest) for at in range(first, end)]
        return Counter([*blocks, *(self._kinds[name] for name in names)])

    @cached_property
    def _kinds(self) -> dict[str, int]:
        numbers: dict[object, int] = {}
        kinds = {bucket.name: (bucket.form, bucket.learns) for bucket in self._costs.buckets}
        return {name: numbers.setdefault(kind, len(numbers)) for name, kind in kinds.items()}

    def _unlike(self, stage: Stage) -> list[int]:
        costs = self._costs
        kinds = {(costs.cluster.type_of(rank), self._left(rank)): rank for rank in reversed(stage.devices)}
        return list(kinds.values())

    def _own_shares(self, stage: Stage, span: tuple[int, int]) -> tuple[object, ...]:
        """Return the home of each bucket that only the stage's ranks own, None for others."""
        outline = self._costs.outline
        home = self._costs.home
        shares = []
        for name in (name for block in outline.blocks[slice(*span)] for name in outline.weights[block]):
            of = home.shares_of(name) or (1.0,) * self._costs.ranks
            inside = all(rank in stage.devices for rank, share in enumerate(of) if share)
            shares.append((*(of[rank] for rank in stage.devices), home.copies) if inside else None)
        return tuple(shares)

    def _stage_peak(self, pipeline: Pipeline, at: int, rank: int, strategy: Strategy | None = None) -> PeakMemory:
        count = micro_batches_until_peak(DEFAULT_SCHEDULE, pipeline.rows, at)
        assert count is not None, "the default schedule must limit the micro-batches in flight"
        form: tuple[object, ...] = (pipeline.shape, pipeline.rows[at] if pipeline.interleaved else at)
        stage = pipeline.stages[at]
        together: tuple[Pipeline, ...] = (pipeline,)
        if any(shares := self._own_shares(stage, self._costs.spans(pipeline)[at])):
            # Weights and gradients need no more memory on owners, unless other stages push to them.
            if strategy is not None:
                together += tuple(p for p in strategy.pipelines if stage not in p.stages)
            form = (*form, shares, stage.devices.index(rank), tuple(p.shape for p in together[1:]))
        return self._peak(form, Strategy(together), [count], rank)

    def _shared_peak(self, stage: Stage, sharing: Sequence[Pipeline], rank: int) -> PeakMemory:
        """Return the peak of one rank in a shared stage.

        For any order of micro-batches, stage s of S stores at most S - s micro-batches of each pipeline, and the last
        stage stores one in total.
        """
        left = [len(p.stages) - p.stages.index(stage) for p in sharing]
        last = left[0] == 1
        flying = Strategy(tuple(sharing), DEFAULT_SCHEDULE if last else ALL_IN_FLIGHT)
        counts = left if last else [left[0] + 1, *left[1:]]
        return self._peak((tuple(p.stages for p in sharing), stage), flying, counts, rank)

    def _peak(self, form: object, strategy: Strategy, counts: Sequence[int], rank: int) -> PeakMemory:
        if form not in self._peaks:
            if len(self._peaks) >= PEAKS:
                self._peaks.pop(next(iter(self._peaks)))
            every = [[MicroBatch(1, 1)] * count for count in counts]
            every += [[MicroBatch(1, 1)]] * (len(strategy.pipelines) - len(counts))
            walk = self._costs.walk(strategy, every, rank, messages=False)
            owned = self._costs.owned_bytes(rank)

            def bytes_at(tokens: int) -> float:
                batches = [[MicroBatch(tokens, 1)] * count for count in counts] + every[len(counts) :]
                return walk.again(batches).peak().total - owned

            self._peaks[form] = PeakMemory(bytes_at, step=64 * max(s.tp for p in strategy.pipelines for s in p.stages))
        return self._peaks[form]

    def _left(self, rank: int) -> float:
        return self._costs.memory_of(rank) - self._costs.owned_bytes(rank)
