"""Layout and timing of a pipeline of groups (compiled).

Stage s of S has min(S - s, m) of the pipeline's m micro-batches in flight, as in the default schedule. Owners of state
also store messages (`LayerPrices.held`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.generators.pipeline_layers import spread
from hydragraph.spec.stage_kind import StageKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Option(NamedTuple):
    """Price of one kind of stage on a group, for one micro-batch.

    Attributes:
        aux_s: seconds for aux (values such as rotary tables).
        layer_s: seconds in a layer, forward and backward.
        state_bytes: weights and gradients of a layer; `first_bytes` and `last_bytes`: of the first and last block.
        kept_bytes: activations per layer and micro-batch in flight.
        own_bytes: working memory and hidden states.
    """

    kind: StageKind
    aux_s: float
    layer_s: float
    first_s: float
    last_s: float
    state_bytes: float
    first_bytes: float
    last_bytes: float
    kept_bytes: float
    own_bytes: float


NUMBERS = Option._fields[1:]
_AUX, _LAYER, _FIRST, _LAST, _STATE, _FIRST_BYTES, _LAST_BYTES, _KEPT, _OWN = range(9)
# Columns of a form: slowdown, bytes without the share of the state, and seconds of pull and push
# per byte of weights and gradients.
_RATE, _MEMORY, _PASSING = range(3)
# Fraction of a micro-batch's time in the forward, and of traffic for weights (16 bits; gradients:
# 32).
FORWARD = 1 / 3
PULLED = 1 / 3


@partial(compiled, shared=True)
def most_layers(option: Floats, memory: float, first: bool, last: bool, held: Floats, flying: int, layers: int) -> int:
    """Return the most layers that fit with `flying` micro-batches in flight (`held` as in `LayerPrices.held`)."""
    outer = first * option[_FIRST_BYTES] + last * option[_LAST_BYTES]
    most = layers
    for line in range(2):
        layer_bytes = held[line] * option[_STATE] + (flying * option[_KEPT] if line == 0 else 0.0)
        free = memory - option[_OWN] - held[line] * outer
        if layer_bytes > 0:
            most = min(most, max(0, int(np.floor(free / layer_bytes))))
    return most


@compiled
def spread_over(
    order: Ints, layers: int, count: int, options: Floats, forms: Floats, held: Floats
) -> tuple[Ints, Ints]:
    """Spread layers over groups, in the given order.

    Args:
        order: form of each stage [S].
        options: `NUMBERS` of each form and option [F, O, 9].
        forms: rate, memory, and pull and push seconds per byte [F, 3].
        held: `LayerPrices.held_by_flight`.

    Returns:
        Layers [S] and options [S]; empty if there is too little memory.
    """
    stages = len(order)
    width = options.shape[1]
    layer = np.full((stages, width), np.inf)
    extra = np.zeros((stages, width))
    cap = np.zeros((stages, width), np.int64)
    for s in range(stages):
        form = order[s]
        rate = forms[form, _RATE]
        first, last = s == 0, s == stages - 1
        flying = min(stages - s, count)
        for o in range(width):
            option = options[form, o]
            if option[_LAYER] < np.inf:
                layer[s, o] = rate * option[_LAYER]
                extra[s, o] = rate * (option[_AUX] + first * option[_FIRST] + last * option[_LAST])
                line = held[flying, int(not first)]
                cap[s, o] = most_layers(option, forms[form, _MEMORY], first, last, line, flying, layers)
    sum_s, stage_layers, chosen = spread(layers, count, layer, extra, cap)
    return (stage_layers, chosen) if sum_s < np.inf else (stage_layers[:0], chosen[:0])


@compiled
def timed(
    order: Ints, taken: Ints, chosen: Ints, options: Floats, forms: Floats
) -> tuple[float, float, float, float, Floats, Floats]:
    """Return fields of `PipelineLayout` for layers `taken` [S] and options `chosen` [S].

    Returns:
        first_s, each_s, exposed_s, traffic_s, stages_s [S] and passing_s [L].
    """
    stages = len(order)
    seconds = np.empty(stages)
    passing = np.empty(stages)
    of_layer = np.empty(taken.sum())
    done = 0
    total = slowest = slowest_passing = 0.0
    for s in range(stages):
        form = order[s]
        option = options[form, chosen[s]]
        first, last = s == 0, s == stages - 1
        alone = option[_AUX] + first * option[_FIRST] + last * option[_LAST] + option[_LAYER] * taken[s]
        seconds[s] = forms[form, _RATE] * alone
        total += seconds[s]
        slowest = max(slowest, seconds[s])
        size = taken[s] * option[_STATE] + first * option[_FIRST_BYTES] + last * option[_LAST_BYTES]
        passing[s] = size * forms[form, _PASSING]
        slowest_passing = max(slowest_passing, passing[s])
        of_layer[done : done + taken[s]] = passing[s] / taken[s]
        done += taken[s]
    waited = exposed(seconds, passing)
    waited += options[order[0], chosen[0], _FIRST_BYTES] * forms[order[0], _PASSING]
    return total + waited, slowest, waited, slowest_passing, seconds, of_layer


@compiled
def exposed(seconds: Floats, passing: Floats) -> float:
    """Return the time of pull and push (`passing` [S]) that computation (`seconds` [S]) does not hide.

    Stage s pulls during the first forward of stages 0 to s, and pushes during their last backward.
    """
    pull = push = before = 0.0
    for s in range(len(seconds)):
        before += seconds[s]
        pull = max(pull, PULLED * passing[s] - FORWARD * before)
        push = max(push, (1 - PULLED) * passing[s] - (1 - FORWARD) * before)
    return pull + push


@compiled
def awaited(seconds: Floats, taken: Ints, of_layer: Floats, slowest: Floats) -> float:
    """Return how much longer a pipeline waits if each layer's pull and push take `slowest` instead of `of_layer`
    seconds [L].
    """
    stages = len(seconds)
    alone = np.zeros(stages)
    together = np.zeros(stages)
    at = 0
    for s in range(stages):
        for _ in range(taken[s]):
            alone[s] += of_layer[at]
            together[s] += slowest[at]
            at += 1
    return float(exposed(seconds, together) - exposed(seconds, alone))
