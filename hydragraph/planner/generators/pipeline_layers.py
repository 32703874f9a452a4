"""Distribution of layers over the stages of one pipeline.

For a micro-batch, stage j takes y_j seconds per layer, plus f_j for the first or last block, and holds at most cap_j
layers. With m micro-batches, and l_j of the L layers on stage j, a pipeline takes

    sum_j t_j + (m - 1) max_j t_j,   t_j = f_j + y_j l_j,   sum_j l_j = L,   1 <= l_j <= cap_j

(AutoHet's cost; Malleus's layer ILP minimizes the second term). A stage also chooses an option, such as recomputation.
Within time T, it can run room_j(T) = max over options of min(cap, (T - f) / y) layers. Adding layers one by one finds
the least T. A few larger T, which may have a smaller sum_j t_j, are also tried.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.micro_batch_order import longest_to_shortest
from hydragraph.kernels.numba_compiler import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Multiples of the least bound to try.
LOOSER = np.array([1.0, 1.03, 1.07, 1.15, 1.3, 1.6, 2.0, 3.0, 6.0, 1e9])
FORGIVEN = 1e-12


@compiled
def room(seconds: float, layer: Floats, extra: Floats, cap: Ints) -> int:
    most = 0
    for o in range(len(layer)):
        left = seconds - extra[o]
        fit = cap[o] if layer[o] <= 0 else min(float(cap[o]), np.floor(left / layer[o] * (1 + FORGIVEN) + FORGIVEN))
        if left >= 0 and fit > most:
            most = int(fit)
    return most


@partial(compiled, shared=True)
def spread(layers: int, count: int, layer: Floats, extra: Floats, cap: Ints) -> tuple[float, Ints, Ints]:
    """Spread layers over the stages of a pipeline.

    Args:
        count: number of micro-batches, at least 1.
        layer: seconds per layer [S, O] (O options).
        extra: seconds of other blocks [S, O].
        cap: maximum number of layers [S, O]; 0 excludes an option.

    Returns:
        Sum of the stages' seconds (infinite if layers do not fit), layers [S], and options [S].
    """
    stages, options = layer.shape
    best_layers = np.zeros(stages, np.int64)
    best_options = np.zeros(stages, np.int64)
    best = np.inf
    best_sum = np.inf
    least = least_bound(layers, layer, extra, cap)
    if not least < np.inf:
        return best_sum, best_layers, best_options
    top = 0.0
    seconds_below_zero = np.full(stages, -np.inf)
    for s in range(stages):
        for o in range(options):
            if cap[s, o] > 0:
                top = max(top, extra[s, o] + layer[s, o] * layers)
                seconds_below_zero[s] = max(seconds_below_zero[s], -layer[s, o])
    order = longest_to_shortest(seconds_below_zero)
    stage_layers = np.zeros(stages, np.int64)
    chosen = np.zeros(stages, np.int64)
    for looser in LOOSER:
        bound = min(least * looser, top)
        left = layers - stages
        changed = False
        for s in order:
            more = min(left, room(bound, layer[s], extra[s], cap[s]) - 1) if left else 0
            changed = changed or stage_layers[s] != 1 + more
            stage_layers[s] = 1 + more
            left -= more
        if changed:
            sum_s = 0.0
            max_s = 0.0
            for s in range(stages):
                mine = np.inf
                for o in range(options):
                    if cap[s, o] >= stage_layers[s] and extra[s, o] + layer[s, o] * stage_layers[s] < mine:
                        mine = extra[s, o] + layer[s, o] * stage_layers[s]
                        chosen[s] = o
                sum_s += mine
                max_s = max(max_s, mine)
            if sum_s + (count - 1) * max_s < best:
                best = sum_s + (count - 1) * max_s
                best_sum = sum_s
                best_layers = stage_layers.copy()
                best_options = chosen.copy()
        if bound >= top:
            break
    return best_sum, best_layers, best_options


@compiled
def least_bound(layers: int, layer: Floats, extra: Floats, cap: Ints) -> float:
    """Return the least T within which all layers fit, at least one per stage; infinite if memory does not suffice."""
    stages = len(layer)
    if stages > layers:
        return np.inf
    stage_layers = np.zeros(stages, np.int64)
    further = np.empty(stages)
    least = 0.0
    for s in range(stages):
        least = max(least, _with_one_more(0, layer[s], extra[s], cap[s]))
    if not least < np.inf:
        return np.inf
    left = layers
    for s in range(stages):
        stage_layers[s] = room(least, layer[s], extra[s], cap[s])
        further[s] = _with_one_more(stage_layers[s], layer[s], extra[s], cap[s])
        left -= stage_layers[s]
    while left > 0:
        s = np.argmin(further)
        if not further[s] < np.inf:
            return np.inf
        least = max(least, further[s])
        stage_layers[s] += 1
        further[s] = _with_one_more(stage_layers[s], layer[s], extra[s], cap[s])
        left -= 1
    return least


@compiled
def _with_one_more(taken: int, layer: Floats, extra: Floats, cap: Ints) -> float:
    seconds = np.inf
    for o in range(len(layer)):
        if cap[o] > taken:
            needed = (taken + 1 - FORGIVEN) / (1 + FORGIVEN)
            seconds = min(seconds, (extra[o] + layer[o] * needed) * (1 + 4e-15))
    return seconds
