"""When an iteration ends, pull and push included, without a simulation: pipelines by their recurrence, traffic in line.

All owners take part in every exchange of a bucket, so exchanges go through the cluster one after another: the pulls in
the order of the blocks, the pushes in reverse. With p_b and q_b the seconds of the slowest rank in them,

    a bucket is there at      P_b = p_0 + ... + p_b, before which no pipeline's first forward gets beyond it
    its gradient is complete  C_b = when the last of the pipelines has run its last backward of the blocks that use it
    and has arrived at        Q_b = max(Q_(b + 1), C_b) + q_b

and the iteration ends at max(Q_0, pipelines' ends), the commit and the slowest update later. What the simulation knows
besides: ports that transfers and messages between stages share, and owners that meet with some partners earlier.

Example: two blocks, one stage, forwards of 1 s, backwards of 2 s, p = q = 1.5 s. Pulls end at 1.5 and 3, forwards at
2.5 and 4, backwards at 6 and 8; pushes at 7.5 and 9.5.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hydragraph.cost.costs import Costs
from hydragraph.cost.schedule import stage_ends
from hydragraph.cost.stages import StageCost
from hydragraph.cost.traffic import Roads
from hydragraph.ir.instruction import Op
from hydragraph.planner.uneven.settle import form_of
from hydragraph.planner.uneven.shares import fraction_of
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Pipeline, Strategy


def iteration_s(costs: Costs, strategy: Strategy, assignment: Assignment) -> float:
    """Return about the seconds of an iteration.

    Args:
        costs: whose home is that of the plan.
        strategy: without shared stages.
        assignment: of equal micro-batches to each pipeline.
    """
    pulled, pushed = _passing(costs, strategy, assignment)
    names = [name for name in costs.outline.pull_order if name in pulled]
    there = dict(zip(names, np.cumsum([pulled[name] for name in names]).tolist(), strict=True))
    complete = dict.fromkeys(names, 0.0)
    last = 0.0
    known: dict[object, list[float]] = {}
    for pipeline, batches in zip(strategy.pipelines, assignment.tokens, strict=True):
        if not batches:
            continue
        key = (form_of(costs, pipeline), tuple(map(tuple, batches)))
        if key not in known:
            known[key] = _completed(costs, pipeline, batches, strategy.schedule, there)
        ends = known[key]
        last = max(last, *ends)
        for block, end in zip(costs.outline.blocks, ends, strict=True):
            for name in costs.outline.gradients[block]:
                complete[name] = max(complete[name], end)
    arrived = 0.0
    for name in reversed(names):
        arrived = max(arrived, complete[name]) + pushed[name]
    return max(last, arrived) + _ending(costs)


def _ending(costs: Costs) -> float:
    """Return what the commit and the slowest update take."""
    learning = sum(bucket.size for bucket in costs.buckets if bucket.learns)
    commit = 0.0
    norm = 0.0
    update = 0.0
    for rank in range(costs.ranks):
        profile = costs.piece_profile(rank)
        rate = costs.health.rate(rank)
        if math.isfinite(rate):
            owned = fraction_of(costs.home, rank, costs.ranks) * learning
            commit = max(commit, rate * profile.commit_s)
            norm = max(norm, rate * profile.norm_s * owned)
            each = profile.update or (0.0, 0.0)
            update = max(update, rate * (each[0] + each[1] * owned))
    return commit + norm + update


def _passing(costs: Costs, strategy: Strategy, assignment: Assignment) -> tuple[dict[str, float], dict[str, float]]:
    """Return what the slowest rank takes for the pull and for the push of every bucket."""
    work = costs.work(strategy, assignment)
    group = np.full(costs.ranks, -1, dtype=np.int64)
    for number, stage in enumerate(dict.fromkeys(s.devices for p in strategy.pipelines for s in p.stages)):
        group[list(stage)] = number
    idle = np.flatnonzero(group < 0)
    group[idle] = int(group.max(initial=-1)) + 1 + np.arange(len(idle))
    roads = Roads(costs.cluster, group, np.array([work.handling(rank) for rank in range(costs.ranks)]))
    # Equal buckets of blocks between which no pipeline is cut have the same transfers.
    cuts = sorted({end for p in strategy.pipelines for _, end in _spans(costs, p)})
    users = dict(costs.outline.buckets)
    known: dict[object, tuple[float, float]] = {}
    found: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for bucket in costs.buckets:
        places = tuple(bisect(cuts, costs.outline.index[block]) for block in users[bucket.name])
        key = (bucket.form, bucket.learns, places)
        if key not in known:
            moved = (work.moved(op, bucket.name) for op in (Op.PULL, Op.PUSH))
            pull, push = (float(roads.passage(each).seconds.max(initial=0.0)) for each in moved)
            known[key] = pull, push
        for seconds, each in zip(found, known[key], strict=True):
            seconds[bucket.name] = each
    return found


def _completed(
    costs: Costs, pipeline: Pipeline, batches: Sequence[Sequence[int]], schedule: str, there: dict[str, float]
) -> list[float]:
    """Return when a pipeline has run the last backward of every block, if weights are there at these times."""
    stages = costs.stages(pipeline)
    spans = _spans(costs, pipeline)
    rows = _rows(stages, batches)
    blocks = [_blocks(costs, pipeline, s, span, batches) for s, span in enumerate(spans)]
    early, forward, backward, ahead, back = rows
    # What the first forward waits for weights, on every stage.
    now = 0.0
    for s, (span, (forwards, _)) in enumerate(zip(spans, blocks, strict=True)):
        now = max(now, early[s][0])
        arrived = now
        for block, seconds in zip(costs.outline.blocks[slice(*span)], forwards, strict=True):
            now = max(now, *(there[name] for name in costs.outline.weights[block]), 0.0) + seconds
        forward[s][0] += max(0.0, now - arrived - sum(forwards))
        if s < len(stages) - 1:
            now += ahead[s][0]
    ends = stage_ends(early, forward, backward, ahead, back, schedule)
    found = []
    for end, (_, backwards) in zip(ends, blocks, strict=True):
        # The last block's backward comes first: those of the blocks below it follow.
        below = np.concatenate(([0.0], np.cumsum(backwards)[:-1]))
        found += (end - below).tolist()
    return found


def _spans(costs: Costs, pipeline: Pipeline) -> list[tuple[int, int]]:
    firsts = np.concatenate(([0], np.cumsum([stage.layers for stage in pipeline.stages]))).tolist()
    return [costs.outline.span(a, b) for a, b in pairwise(firsts)]


def _rows(stages: Sequence[StageCost], batches: Sequence[Sequence[int]]) -> list[list[list[float]]]:
    """Return what `stage_ends` asks for: seconds of each micro-batch on each stage."""
    rows: list[list[list[float]]] = [[], [], [], [], []]
    for stage in stages:
        priced = {m: stage.apart(m) for m in dict.fromkeys(map(tuple, batches))}
        for part in range(3):
            rows[part].append([priced[tuple(m)][part] for m in batches])
        for row, hop in zip(rows[3:], (stage.ahead, stage.back), strict=True):
            row.append([hop.seconds(sum(m)) if hop is not None else 0.0 for m in batches])
    return rows


def _blocks(
    costs: Costs, pipeline: Pipeline, s: int, span: tuple[int, int], batches: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Return the seconds of forward and of backward of each block, of the first and of the last micro-batch."""
    alike: dict[str, tuple[float, float]] = {}
    forwards = []
    backwards = []
    for at in range(*span):
        template = costs.profile.blocks[at]
        if template not in alike:
            alone = costs.stage(pipeline.stages[s], (at, at + 1))
            alike[template] = alone.apart(batches[0])[1], alone.apart(batches[-1])[2]
        forwards.append(alike[template][0])
        backwards.append(alike[template][1])
    return forwards, backwards
