"""Construction of a strategy for the current ranks if no known strategy fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from hydragraph.errors import Unsupported
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.strategy_text import regular_pipeline

Fits = Callable[[Strategy], bool]


def refit(known: Sequence[Strategy], ranks: int, layers: int, fits: Fits) -> tuple[Strategy, ...]:
    """Return the known strategies that fit or, if none does, one like the first for `ranks` ranks.

    If possible, its pipelines have at least as many devices as the first strategy's smallest pipeline, and keep the
    tensor-parallel degree.
    """
    if kept := tuple(strategy for strategy in known if fits(strategy)):
        return kept
    for strategy in _shapes(known[0], ranks, layers):
        if fits(strategy):
            return (strategy,)
    raise Unsupported(
        f"no strategy like {known[0]} fits",
        where=f"{ranks} ranks",
        remedy="add a strategy that runs on fewer ranks",
    )


def _shapes(model: Strategy, ranks: int, layers: int) -> Iterator[Strategy]:
    stages = [stage for pipeline in model.pipelines for stage in pipeline.stages]
    degrees = list(dict.fromkeys(stage.tp for stage in stages))
    smallest = min(len(pipeline.devices) for pipeline in model.pipelines)
    like = stages[0]
    few = -(-2 * ranks // 3)
    nearly_all = [(used, degrees) for used in range(ranks, few - 1, -1)]
    for used, allowed_degrees in [*nearly_all, *((used, [1, 2, 4, 8]) for used in range(ranks, 0, -1))]:
        for count in range(max(1, used // smallest), 0, -1):
            sizes = [used // count + (i < used % count) for i in range(count)]
            for degree in allowed_degrees:
                cut = [_depth(size, degree, layers) for size in sizes]
                if all(cut):
                    yield _built(sizes, degree, layers, like, model.schedule)


def _depth(devices: int, degree: int, layers: int) -> int:
    depth, left = divmod(devices, degree)
    return depth if not left and depth <= layers else 0


def _built(sizes: Sequence[int], degree: int, layers: int, like: Stage, schedule: str) -> Strategy:
    alike = replace(like, sequence_parallel=like.sequence_parallel and degree > 1)
    pipelines = []
    for size, first in zip(sizes, accumulate(sizes, initial=0), strict=False):
        regular = regular_pipeline(degree, size // degree, layers, first).stages
        pipelines.append(Pipeline(tuple(replace(alike, devices=s.devices, layers=s.layers) for s in regular)))
    return Strategy(tuple(pipelines), schedule)
