"""Cost of a stage shared by several pipelines for each of them, so that pipelines can be planned one by one.

A shared stage serves its pipelines in turn. To a pipeline that gets the fraction x of its micro-batches, the stage
appears 1 / x times as slow. Work is assigned to pipelines by their pace: with seconds s_p of the slowest stage of
pipeline p alone,

    x_p = (1 / s_p) / sum over the stage's pipelines q of (1 / s_q)

The busiest of the pipelines is thus priced no lower than the stage's load: for works w_q on it,
sum w_q = sum x_q (w_q / x_q) <= max w_q / x_q. An iteration with a known assignment is simulated (`Costs.seconds`).

Example: two pipelines with a slow and a fast stage of their own, 3 s and 1 s, before a shared one of 1 s. They get 1/4
and 3/4 of it, so it counts as 4 s for the slow pipeline, and as 4/3 s for the fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.spec.strategy import Strategy


def turns(strategy: Strategy, seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return, by pipeline and stage, the slowdown 1 / x of a stage for a pipeline.

    Args:
        seconds: of every pipeline, the time of its slowest stage for a micro-batch, alone; above 0.
    """
    paces: dict[int, float] = {}  # micro-batches per second of a stage, by its first device
    for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True):
        for stage in pipeline.stages:
            paces[stage.devices[0]] = paces.get(stage.devices[0], 0.0) + 1 / slowest
    return tuple(
        tuple(paces[stage.devices[0]] * slowest for stage in pipeline.stages)
        for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True)
    )
