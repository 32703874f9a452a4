"""Cost of a shared stage for each of its pipelines.

To a pipeline that has the fraction x of its micro-batches, a shared stage appears 1 / x times as slow. Pipelines get
work by their pace: with seconds s_p of the slowest stage of pipeline p alone,

    x_p = (1 / s_p) / sum over the stage's pipelines q of (1 / s_q)

The busiest pipeline is priced no lower than the stage's load: for works w_q on it, sum w_q = sum x_q (w_q / x_q) <= max
w_q / x_q. Known assignments are simulated (`Costs.seconds`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.spec.strategy import Strategy


def turns(strategy: Strategy, seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return the slowdown 1 / x by pipeline and stage.

    Args:
        seconds: s_p of each pipeline, above 0.
    """
    paces: dict[int, float] = {}  # micro-batches per second of a stage, by its first device
    for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True):
        for stage in pipeline.stages:
            paces[stage.devices[0]] = paces.get(stage.devices[0], 0.0) + 1 / slowest
    return tuple(
        tuple(paces[stage.devices[0]] * slowest for stage in pipeline.stages)
        for pipeline, slowest in zip(strategy.pipelines, seconds, strict=True)
    )
