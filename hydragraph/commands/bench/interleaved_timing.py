"""Timing of functions in turn, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Side = Callable[[int], object]
"""Function to time, called with the round index."""

WARM_UP = 2  # rounds
MOST_REPEATS = 200


def alternate(
    sides: Mapping[str, Side], device: torch.device, rounds: int, warm_up: int = WARM_UP, at_least_s: float = 0.0
) -> dict[str, float]:
    """Return functions' median seconds per call; each round begins with a different function.

    Args:
        at_least_s: approximate seconds per function and round; 0: one call.
    """
    repeats = dict.fromkeys(sides, 1)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds_of_turn = timed(sides[name], turn, device, repeats[name])
            if turn >= warm_up:
                seconds[name].append(seconds_of_turn)
            else:
                # The last warm-up round determines repeats
                repeats[name] = max(1, min(MOST_REPEATS, round(at_least_s / max(seconds_of_turn, 1e-9))))
    return {name: statistics.median(turns) for name, turns in seconds.items()}


def timed(side: Side, turn: int, device: torch.device, repeats: int = 1) -> float:
    """Return the mean seconds per call, from CUDA events or the wall clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            side(turn)
        return (time.perf_counter() - began) / repeats
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        side(turn)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Return a call's peak allocated bytes; NaN on the CPU."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return float(torch.cuda.max_memory_allocated(device) - before)
