"""Sharing: what a stage that several pipelines share takes of each of them, for whoever plans pipelines one by one.

A shared stage serves its pipelines in turns. A pipeline that gets the part x of its micro-batches has it as if it were
1 / x times as slow. Work goes to pipelines by their pace: with seconds s_p of the slowest stage of pipeline p alone,

    x_p = (1 / s_p) / sum over the stage's pipelines q of (1 / s_q)

Whatever the pipelines then are given, the busiest of them is priced no lower than the stage's load: of works w_q on it,
sum w_q = sum x_q (w_q / x_q) <= max w_q / x_q. It is equal where work goes as the pace says; an iteration that is known
is simulated instead (`Costs.seconds`).

Example: pipelines of one slow and one fast stage of their own, 3 s and 1 s, before one that they share, of 1 s. They
get 1/4 and 3/4 of it, so it counts as 4 s for the slow pipeline, and as 4/3 s for the fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.spec.strategy import Strategy


def turns(strategy: Strategy, seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return, by pipeline and stage, how many times as slow a stage is for a pipeline as it is alone: 1 / x.

    Args:
        seconds: of every pipeline: what its slowest stage takes for a micro-batch, alone; above 0.
    """
    paces: dict[int, float] = {}  # of a stage, by its first device: how many micro-batches a second come to it
    for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True):
        for stage in pipeline.stages:
            paces[stage.devices[0]] = paces.get(stage.devices[0], 0.0) + 1 / slowest
    return tuple(
        tuple(paces[stage.devices[0]] * slowest for stage in pipeline.stages)
        for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True)
    )
