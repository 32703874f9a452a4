"""Memory check of a strategy, with advice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hydragraph.cost.costs import Costs
from hydragraph.cost.rank_memory import Memory, MemoryCurve
from hydragraph.errors import Unsupported
from hydragraph.ir.schedules.schedule_kinds import WHOLE_BACKWARD
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.pipeline import GRADIENTS, Pipeline, Stage
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE
from hydragraph.spec.stage_kind import BUDGETS
from hydragraph.spec.strategy import Strategy

WORDS = {
    "home_weights": "home weights",
    "optimizer_state": "optimizer state",
    "home_gradients": "home gradients",
    "weights": "weights of the stage",
    "gradients": "gradients of the stage",
    "activations": "activations",
    "working": "temporary tensors of a block",
    "messages": "messages in flight",
    "host": "offloaded to host memory",
}
SHORTER = 0.8


@dataclass(frozen=True)
class MemoryFit:
    """A strategy's seconds per iteration, and the ranks' memory curves and limits in bytes."""

    strategy: Strategy
    curves: Sequence[MemoryCurve]
    limits: tuple[float, ...]
    seconds: float

    @property
    def memory(self) -> tuple[Memory, ...]:
        return tuple(curve.peak for curve in self.curves)

    @property
    def tightest(self) -> int:
        return max(range(len(self.curves)), key=lambda rank: self.curves[rank].peak.total / self.limits[rank])

    @property
    def fits(self) -> bool:
        return all(c.peak.total <= limit for c, limit in zip(self.curves, self.limits, strict=True))

    @property
    def largest(self) -> str:
        parts = vars(self.curves[self.tightest].peak)
        return WORDS[max((name for name in parts if name != "host"), key=lambda name: parts[name])]

    def as_dict(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name,
            "fits": self.fits,
            "seconds": self.seconds,
            "tightest": self.tightest,
            "ranks": [
                {
                    "rank": rank,
                    "peak_bytes": memory.total,
                    "limit_bytes": limit,
                    # Keys of earlier versions
                    "state": memory.home_weights + memory.optimizer_state,
                    "shard": memory.home_gradients,
                    **asdict(memory),
                }
                for rank, (memory, limit) in enumerate(zip(self.memory, self.limits, strict=True))
            ],
        }


def fit(costs: Costs, strategy: Strategy, assignment: Assignment) -> MemoryFit:
    timeline = costs.simulate(strategy, assignment)
    limits = tuple(float(device.memory_bytes) for device in costs.cluster.devices)
    return MemoryFit(strategy, timeline.memory, limits, timeline.seconds)


def advice(costs: Costs, found: MemoryFit, assignment: Assignment, may_stream: bool = True) -> str:
    """Return the smallest change that makes a strategy fit, and offloading if it helps; "" if it fits."""
    if found.fits:
        return ""
    offloading = _offloading(costs, found, assignment)
    first = _smallest_change(costs, found, assignment, may_stream)
    return f"{first}; or {offloading}" if offloading else first


def _offloading(costs: Costs, found: MemoryFit, assignment: Assignment) -> str:
    offloaded = _whole(found.strategy).with_stages(lambda stage: replace(stage, offload=True))
    for strategy, more in ((offloaded, ""), (recomputing(offloaded), " and recompute")):
        tried = fit(costs, strategy, assignment)
        if tried.fits:
            return f"offload activations{more}: {strategy.name} fits, {_takes(tried, found)}"
    return ""


def _takes(tried: MemoryFit, found: MemoryFit) -> str:
    return f"a step takes {tried.seconds:.3g} s instead of {found.seconds:.3g} s"


def _smallest_change(costs: Costs, found: MemoryFit, assignment: Assignment, may_stream: bool) -> str:
    # First try changes that cost only time; take the fastest that fits.
    again = recomputing(found.strategy)
    streamed = tuple(streaming_more(found.strategy)) if may_stream else (again,)
    light = [fit(costs, strategy, assignment) for strategy in (again, *streamed)]
    # Partial recomputation may fit
    if light[0].fits:
        light += [fit(costs, recomputing(found.strategy, budget), assignment) for budget in BUDGETS]
    fastest = next((tried for tried in sorted(light, key=lambda tried: tried.seconds) if tried.fits), None)
    if fastest is not None:
        return _lighter(fastest, found)
    # Then shorten micro-batches, then sequences; least change of the strategy first.
    choices = (
        (found.strategy, ""),
        (again, f" and recomputation, {again.name}"),
        (streamed[-1], f", recomputation and streaming, {streamed[-1].name}"),
    )[: 3 if may_stream else 2]
    for strategy, words in choices:
        shorter = _most_tokens(costs, strategy, assignment)
        if shorter is not None:
            return f"micro-batches of at most {shorter:,} tokens{words}"
    for strategy, words in choices[1:]:
        length = _longest(costs, strategy, assignment)
        if length is not None:
            return f"sequences of at most {length:,} tokens (data.max_length), one per micro-batch{words}"
    # Last, merge pipelines, so that more devices work on a layer.
    for sequence_parallel in (True, False):
        # The profile may not contain these stages
        with suppress(Unsupported):
            for wide, merged in wider(costs, found.strategy, assignment, sequence_parallel):
                for strategy in (wide, recomputing(wide), *(streaming_more(wide) if may_stream else ())):
                    tried = fit(costs, strategy, merged)
                    if tried.fits:
                        return _widened(tried, found)
    return _more(found)


def _widened(tried: MemoryFit, found: MemoryFit) -> str:
    stages = tried.strategy.stages
    more = ", recomputation" * any(stage.recompute for stage in stages)
    more += ", streaming" * any(bool(stage.stream) for stage in stages)
    return f"a higher tensor-parallel degree{more}: {tried.strategy.name} fits, {_takes(tried, found)}"


def _lighter(tried: MemoryFit, found: MemoryFit) -> str:
    stages = tried.strategy.stages
    before = found.strategy.stages
    ways = []
    streams = [stage.stream for stage, other in zip(stages, before, strict=True) if stage.stream != other.stream]
    if streams:
        which = "all stages" if len(streams) == len(stages) else f"{len(streams)} stages"
        ways.append(f"stream the {'gradients' if {*streams} == {GRADIENTS} else 'weights and gradients'} of {which}")
    again = {stage.recompute for stage, other in zip(stages, before, strict=True) if stage.recompute != other.recompute}
    if again:
        ways.append("recompute" if True in again else "recompute in part")
    return f"{' and '.join(ways)}: {tried.strategy.name} fits, {_takes(tried, found)}"


def _more(found: MemoryFit) -> str:
    memory = found.curves[found.tightest].peak
    # Divide the state of `len(curves)` ranks among more ranks, until each part fits with a
    # stage's weights and gradients.
    room = found.limits[found.tightest] - memory.weights - memory.gradients
    if room <= 0 or memory.home <= memory.weights + memory.gradients:
        return "a higher tensor-parallel degree or more stages: a stage's weights and gradients alone do not fit"
    ranks = math.ceil(memory.home * len(found.curves) / room) + 1
    return f"more ranks to share the state (at least {ranks}): the state alone does not fit"


def _most_tokens(costs: Costs, strategy: Strategy, assignment: Assignment) -> int | None:
    longest = max((n for n in assignment.lengths if n), default=0)
    now = max((sum(m) for p in assignment.tokens for m in p), default=0)
    for tokens in _shorter(now):
        shorter = packed_in(assignment, max(tokens, longest))
        if fit(costs, strategy, shorter).fits:
            return max(sum(m) for p in shorter.tokens for m in p)
        if tokens <= longest:
            return None
    return None


def _longest(costs: Costs, strategy: Strategy, assignment: Assignment) -> int | None:
    for length in _shorter(max(assignment.lengths, default=0)):
        cut = replace(assignment, lengths=tuple(min(n, length) for n in assignment.lengths))
        if fit(costs, strategy, packed_in(cut, length)).fits:
            return length
    return None


def _shorter(tokens: int) -> Iterator[int]:
    while tokens > 1:
        tokens = int(tokens * SHORTER)
        # 300 -> 192, 128, 64, 51, 40, ...
        tokens = tokens // 64 * 64 if tokens >= 64 else tokens
        if tokens:
            yield tokens


def packed_in(assignment: Assignment, tokens: int) -> Assignment:
    """Pack each pipeline's sequences, in order, into micro-batches of at most `tokens` tokens."""
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


def recomputing(strategy: Strategy, how: bool | float = True) -> Strategy:
    """Return the strategy with `recompute` set to `how`, except in stages that recompute in full."""
    return strategy.with_stages(lambda stage: replace(stage, recompute=stage.recompute is True or how))


def _whole(strategy: Strategy) -> Strategy:
    """Return the strategy with a schedule of unsplit backwards, for streaming and offloading."""
    return strategy if strategy.schedule in WHOLE_BACKWARD else replace(strategy, schedule=DEFAULT_SCHEDULE)


def streaming_more(strategy: Strategy) -> Iterator[Strategy]:
    """Yield variants that stream gradients, or gradients and weights, without and then with recomputation."""

    def changed(stage: Stage, stream: bool | str, recompute: bool) -> Stage:
        streamed = True if stage.stream is True else stream
        return replace(stage, stream=streamed, recompute=stage.recompute or recompute)

    for recompute in (False, True):
        for stream in (GRADIENTS, True):
            yield _whole(strategy).with_stages(partial(changed, stream=stream, recompute=recompute))


def wider(
    costs: Costs, strategy: Strategy, assignment: Assignment, sequence_parallel: bool
) -> Iterator[tuple[Strategy, Assignment]]:
    """Yield strategies in which pairs of pipelines are merged, which doubles tensor-parallel degrees within nodes."""
    nodes = [device.node for device in costs.cluster.devices]
    while len(strategy.pipelines) % 2 == 0 and not strategy.shares:
        # Pipelines merge if their stages have equal layers; a stage then has the devices of both.
        pairs = list(zip(strategy.pipelines[::2], strategy.pipelines[1::2], strict=True))
        if any([s.layers for s in one.stages] != [s.layers for s in other.stages] for one, other in pairs):
            return
        pipelines = tuple(
            Pipeline(
                tuple(
                    replace(
                        s,
                        devices=(*s.devices, *t.devices),
                        sequence_parallel=sequence_parallel,
                        sums_in_pieces=s.sums_in_pieces and not sequence_parallel,
                    )
                    for s, t in zip(one.stages, other.stages, strict=True)
                )
            )
            for one, other in pairs
        )
        strategy = replace(strategy, pipelines=pipelines)
        if any(len({nodes[d] for d in s.devices}) > 1 or not costs.sizes.allows(s.tp) for s in strategy.stages):
            return
        batches = assignment.micro_batches
        merged = tuple((*one, *other) for one, other in zip(batches[::2], batches[1::2], strict=True))
        assignment = replace(assignment, micro_batches=merged)
        yield strategy, assignment
