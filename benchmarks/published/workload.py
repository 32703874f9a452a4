"""Mini-batches of drawn lengths, and how systems with fixed-length packing compute them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from hydragraph.cost import compiled_replay
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.schedule_replay import replayed

Lengths = list[int]
FORWARD = 1 / 3  # part of a micro-batch's seconds


def rollouts(median: float = 2_048, sigma: float = 1.2) -> list[float]:
    """Return quantiles of assumed lengths of answers with their prompts: lognormal, so that a few reach any limit."""
    normal = statistics.NormalDist(math.log(median), sigma)
    return [math.exp(normal.inv_cdf((i + 0.5) / 1001)) for i in range(1001)]


def draw(quantiles: Sequence[float], context: int, random: np.random.Generator, count: int) -> Lengths:
    """Draw lengths by the inverse of their distribution, cut at the context length."""
    drawn = np.interp(random.random(count), np.linspace(0, 1, len(quantiles)), quantiles)
    return [int(n) for n in np.minimum(drawn, context)]


def mini_batch(quantiles: Sequence[float], context: int, tokens: int, random: np.random.Generator) -> Lengths:
    """Draw one iteration; its last sequence is cut so that the tokens are exact."""
    found: Lengths = []
    left = tokens
    while left > 0:
        found.append(min(left, *draw(quantiles, context, random, 1)))
        left -= found[-1]
    return found


def fixed_length(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Pack first-fit decreasing into packed sequences of at most `context` tokens."""
    packed: list[list[int]] = []
    room: list[int] = []
    for n in sorted(lengths, reverse=True):
        at = next((i for i, free in enumerate(room) if free >= n), len(room))
        if at == len(room):
            packed.append([])
            room.append(context)
        packed[at].append(n)
        room[at] -= n
    return packed


def in_turn(pipelines: Sequence[PipelineCost], packed: Sequence[Sequence[int]]) -> list[float]:
    """Return when each pipeline finishes where packed sequences are dealt in turn, one per micro-batch."""
    count = len(pipelines)
    costs = [[p.micro_batch_seconds(m) for m in packed[i::count]] for i, p in enumerate(pipelines)]
    return [pipeline_seconds(row, p.stages) for row, p in zip(costs, pipelines, strict=True)]


def pipeline_seconds(costs: Sequence[float], stages: int) -> float:
    """Return the seconds that a sequence of micro-batches takes on equal stages.

    Args:
        costs: each micro-batch's seconds on one stage.
    """
    if not costs:
        return 0.0
    rows = np.zeros((len(costs), stages, compiled_replay.PARTS))
    rows[:, :, compiled_replay.FORWARD] = FORWARD * np.array(costs)[:, None]
    rows[:, :, compiled_replay.BACKWARD] = (1.0 - FORWARD) * np.array(costs)[:, None]
    return float(replayed(rows).max())
