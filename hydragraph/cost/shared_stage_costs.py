"""Cost of a shared stage for each of its pipelines.

For a pipeline with the fraction x of its micro-batches, a shared stage takes 1 / x times as long. If the slowest stage
of pipeline p takes s_p seconds without sharing,

    x_p = (1 / s_p) / sum over the stage's pipelines q of (1 / s_q)
"""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.spec.strategy import Strategy


def turns(strategy: Strategy, seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return the slowdown 1 / x by pipeline and stage, if `seconds` are each pipeline's s_p, above 0."""
    paces: dict[int, float] = {}
    for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True):
        for stage in pipeline.stages:
            paces[stage.devices[0]] = paces.get(stage.devices[0], 0.0) + 1 / slowest
    return tuple(
        tuple(paces[stage.devices[0]] * slowest for stage in pipeline.stages)
        for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True)
    )
