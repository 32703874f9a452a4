"""The quick plan, in plain Python: each sequence, longest first, joins the pipeline that finishes it first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.shared_stage_costs import turns
from hydragraph.errors import Unsupported
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.strategy import Strategy

# Assumptions for unmeasured models. With this many tokens, attention's quadratic cost equals the
# linear.
QUADRATIC_FROM = 4096
# Fixed cost of a micro-batch, in tokens.
OVERHEAD_TOKENS = 32
# Maximum tokens in a micro-batch, unless one sequence is longer.
MICRO_BATCH_TOKENS = 8192
# Assumed least tokens of a micro-batch that uses a device well.
USEFUL_TOKENS = 256
# Minimum micro-batches per stage, which limits the bubble to a third.
MICRO_BATCHES_PER_STAGE = 2


def rough_cost(pipeline: Pipeline, longest: int = 0) -> PipelineCost:
    """Return a pipeline's assumed costs (unit: a token's time in one layer), such that `longest` tokens fit."""
    slowest = max(stage.layers / stage.tp for stage in pipeline.stages)
    return PipelineCost(
        slowest / QUADRATIC_FROM,
        slowest,
        slowest * OVERHEAD_TOKENS,
        len(pipeline.stages),
        max(MICRO_BATCH_TOKENS, longest),
        USEFUL_TOKENS,
        len(pipeline.devices),
    )


def rough_costs(strategy: Strategy, longest: int = 0) -> tuple[PipelineCost, ...]:
    alone = [rough_cost(p, longest) for p in strategy.pipelines]
    pipeline_costs = []
    for pipeline, cost, factors in zip(strategy.pipelines, alone, turns(strategy, [p.b for p in alone]), strict=True):
        times = max(f * s.layers / s.tp for f, s in zip(factors, pipeline.stages, strict=True)) / cost.b
        pipeline_costs.append(replace(cost, a=times * cost.a, b=times * cost.b, c=times * cost.c))
    return tuple(pipeline_costs)


def assign(strategy: Strategy, lengths: Sequence[int]) -> Assignment:
    """Assign every non-empty sequence by rough costs, deterministically."""
    longest = max(lengths, default=0)
    return assign_pipelines(rough_costs(strategy, longest), lengths)


def too_long(sequence: int, tokens: int, most: int) -> Unsupported:
    if most < 1:
        return Unsupported(
            "the state fills the memory of every pipeline, so no sequence fits",
            where="planner",
            remedy="add pipelines, which share the state, or give more devices to a pipeline",
        )
    return Unsupported(
        f"sequence {sequence} has {tokens} tokens, more than any pipeline can hold (at most {most})",
        where="planner",
        remedy="truncate it (max_length in the data), or give more devices to a pipeline",
    )


def assign_pipelines(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> Assignment:
    # All ranks must break ties alike.
    loads = [0.0] * len(pipelines)
    shares: list[list[int]] = [[] for _ in pipelines]
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        fitting = [p for p, pipeline in enumerate(pipelines) if lengths[i] <= pipeline.max_len]
        if not fitting:
            raise too_long(i, lengths[i], max(p.max_len for p in pipelines))
        best = min(fitting, key=lambda p: (loads[p] + _work(pipelines[p], lengths[i]), loads[p], p))
        loads[best] += _work(pipelines[best], lengths[i])
        shares[best].append(i)
    micro_batches = tuple(_micro_batches(p, s, lengths) for p, s in zip(pipelines, shares, strict=True))
    return Assignment(micro_batches, tuple(map(int, lengths)))


def _work(pipeline: PipelineCost, length: int) -> float:
    return float(pipeline.envelope.work(length))


def _micro_batches(pipeline: PipelineCost, share: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    if not share:
        return ()
    total = sum(lengths[i] for i in share)
    count = min(len(share), max(_best_count(pipeline, total), math.ceil(total / pipeline.max_len)))
    batches: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    loads = [0.0] * count
    for i in share:
        fitting = [b for b in range(len(batches)) if tokens[b] + lengths[i] <= pipeline.max_len]
        if not fitting:
            batches.append([])
            tokens.append(0)
            loads.append(0.0)
        best = min(fitting or [len(batches) - 1], key=lambda b: (loads[b], b))
        batches[best].append(i)
        tokens[best] += lengths[i]
        loads[best] += _work(pipeline, lengths[i])
    return tuple(tuple(b) for b in batches if b)


def _best_count(pipeline: PipelineCost, tokens: int) -> int:
    """Return the best number m of micro-batches, which take (m + P - 1)(b tokens / m + c) in P stages."""
    if pipeline.stages == 1:
        return 1
    best = math.sqrt((pipeline.stages - 1) * pipeline.b * tokens / pipeline.c) if pipeline.c > 0 else math.inf
    useful = tokens // max(1, pipeline.util_len)
    return max(MICRO_BATCHES_PER_STAGE * pipeline.stages, round(min(best, useful)))
