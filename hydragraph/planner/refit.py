"""A strategy for the ranks that there are now, where none that was given fits them: of the shape of one that did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hydragraph.errors import Unsupported
from hydragraph.spec.strategy import Pipeline, Stage, Strategy

Fits = Callable[[Strategy], bool]


def refit(known: Sequence[Strategy], ranks: int, layers: int, fits: Fits) -> tuple[Strategy, ...]:
    """Return those strategies that fit, or else one of the first one's shape on so many ranks.

    A pipeline never gets fewer devices than the first one's smallest has, unless there are fewer at all: the model need
    not fit on less. Its degree of tensor parallelism stays as far as it can, because then nothing new is compiled.

    Args:
        known: at least one.
        ranks: how many there are.
        layers: of the model.
        fits: whether a strategy fits model and ranks.

    Raises:
        Unsupported: nothing fits, not even one device.
    """
    kept = tuple(strategy for strategy in known if fits(strategy))
    return kept or (_first(known[0], ranks, layers, fits),)


def _first(model: Strategy, ranks: int, layers: int, fits: Fits) -> Strategy:
    for strategy in _shapes(model, ranks, layers):
        if fits(strategy):
            return strategy
    raise Unsupported(
        f"no strategy like {model} fits",
        where=f"{ranks} ranks",
        remedy="give one among the strategies that fits fewer ranks",
    )


def _shapes(model: Strategy, ranks: int, layers: int) -> Iterator[Strategy]:
    """Yield strategies on the first ranks: of the degrees there were, if few ranks are left over, else of any.

    Those that use most ranks come first, then those with most pipelines.
    """
    stages = [stage for pipeline in model.pipelines for stage in pipeline.stages]
    degrees = list(dict.fromkeys(stage.tp for stage in stages))
    smallest = min(sum(stage.tp for stage in pipeline.stages) for pipeline in model.pipelines)
    like = stages[0]
    few = -(-2 * ranks // 3)
    nearly_all = [(used, degrees) for used in range(ranks, few - 1, -1)]
    for used, known in [*nearly_all, *((used, [1, 2, 4, 8]) for used in range(ranks, 0, -1))]:
        for count in range(max(1, used // smallest), 0, -1):
            sizes = [used // count + (i < used % count) for i in range(count)]
            for degree in known:
                cut = [_depth(size, degree, layers) for size in sizes]
                if all(cut):
                    yield _built(sizes, degree, layers, like, model.schedule)


def _depth(devices: int, degree: int, layers: int) -> int:
    """Return into how many stages of a degree a pipeline of so many devices is cut; 0: it cannot be."""
    depth, left = divmod(devices, degree)
    return depth if not left and depth <= layers else 0


def _built(sizes: Sequence[int], degree: int, layers: int, like: Stage, schedule: str) -> Strategy:
    pipelines = []
    first = 0
    for size in sizes:
        depth = size // degree
        # Remainders go to the last stages, as where a strategy is written as a text.
        shares = [layers // depth + (i >= depth - layers % depth) for i in range(depth)]
        stages = []
        for share in shares:
            devices = tuple(range(first, first + degree))
            stages.append(Stage(devices, share, like.sequence_parallel and degree > 1, like.recompute))
            first += degree
        pipelines.append(Pipeline(tuple(stages)))
    return Strategy(tuple(pipelines), schedule)
