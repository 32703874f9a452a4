"""Estimate of the iteration time, including pull and push.

Exchanges run one after another: pulls in the order of blocks, pushes in reverse. If the slowest rank takes p_b seconds
to pull bucket b, and q_b to push it,

    a bucket arrives at       P_b = p_0 + ... + p_b, before any forward that uses it
    its gradient is complete  at C_b, after every pipeline's last backward that uses it
    its gradient arrives at   Q_b = max(Q_(b + 1), C_b) + q_b
    and at second owners at   H_b = max(H_(b + 1), Q_b) + h_b, with h_b the time of this transfer

The iteration ends at max(Q_0, H_0, pipelines' end times) plus the commit and the slowest update.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from hydragraph.cost.compiled_replay import AHEAD, EARLY, FORWARD
from hydragraph.cost.costed_work import CostedWork
from hydragraph.cost.costs import Costs
from hydragraph.cost.schedule_replay import replayed
from hydragraph.cost.stage_costs import stage_rows
from hydragraph.cost.traffic import RankLinks
from hydragraph.ir.instruction import Op
from hydragraph.planner.price_candidate import form_of
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.strategy import Strategy


class Iterations:
    """Approximate iteration times of a strategy without shared stages, under the home of `costs`."""

    def __init__(self, costs: Costs, strategy: Strategy) -> None:
        self._costs = costs
        self._strategy = strategy
        work = costs.work(strategy, Assignment.even([1] * len(strategy.pipelines), 1))
        pulled, self._pushed, self._handed = _passing(costs, strategy, work)
        self._names = [name for name in costs.outline.pull_order if name in pulled]
        arrivals = np.cumsum([pulled[name] for name in self._names]).tolist()
        self._there = dict(zip(self._names, arrivals, strict=True))
        self._forms = [form_of(costs, pipeline) for pipeline in strategy.pipelines]
        alike = dict(zip(self._forms, strategy.pipelines, strict=True))
        self._pipelines = {form: _Blocks(costs, pipeline) for form, pipeline in alike.items()}
        self._ending = work.commit_s() + max(map(work.update_s, range(costs.ranks)))

    def seconds(self, assignment: Assignment) -> float:
        outline = self._costs.outline
        complete = dict.fromkeys(self._names, 0.0)
        last = 0.0
        ends_by_form: dict[object, list[float]] = {}
        for form, batches in zip(self._forms, assignment.tokens, strict=True):
            if not batches:
                continue
            key = (form, tuple(map(tuple, batches)))
            if key not in ends_by_form:
                ends_by_form[key] = self._pipelines[form].completed(batches, self._strategy.schedule, self._there)
            ends = ends_by_form[key]
            last = max(last, *ends)
            for block, end in zip(outline.blocks, ends, strict=True):
                for name in outline.gradients[block]:
                    complete[name] = max(complete[name], end)
        arrived = handed = 0.0
        for name in reversed(self._names):
            arrived = max(arrived, complete[name]) + self._pushed[name]
            handed = max(handed, arrived) + self._handed[name]
        return max(last, handed) + self._ending


def _passing(
    costs: Costs, strategy: Strategy, work: CostedWork
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    group = np.full(costs.ranks, -1, dtype=np.int64)
    for number, stage in enumerate(dict.fromkeys(s.devices for p in strategy.pipelines for s in p.stages)):
        group[list(stage)] = number
    idle = np.flatnonzero(group < 0)
    group[idle] = int(group.max(initial=-1)) + 1 + np.arange(len(idle))
    roads = RankLinks(costs.cluster, group, np.array([work.handling(rank) for rank in range(costs.ranks)]))
    cuts = sorted({end for p in strategy.pipelines for _, end in costs.spans(p)})
    users = dict(costs.outline.buckets)
    slowest_by_form: dict[object, tuple[float, ...]] = {}
    exchange_seconds: tuple[dict[str, float], dict[str, float], dict[str, float]] = ({}, {}, {})
    for bucket in costs.buckets:
        places = tuple(bisect(cuts, costs.outline.index[block]) for block in users[bucket.name])
        key = (bucket.form, bucket.learns, costs.home_of(bucket), places)
        if key not in slowest_by_form:
            moved = (work.moved(op, bucket.name) for op in (Op.PULL, Op.PUSH))
            slowest_by_form[key] = tuple(map(roads.slowest_s, (*moved, work.handed_on(bucket.name))))
        for seconds, slowest_s in zip(exchange_seconds, slowest_by_form[key], strict=True):
            seconds[bucket.name] = slowest_s
    return exchange_seconds


class _Blocks:
    def __init__(self, costs: Costs, pipeline: Pipeline) -> None:
        self._outline = costs.outline
        self._stages = costs.stages(pipeline)
        self._devices = pipeline.rows
        self._spans = costs.spans(pipeline)
        self._templates = costs.profile.blocks
        places = [{costs.profile.blocks[at]: at for at in range(*span)} for span in self._spans]
        self._alone = [
            {template: costs.stage(stage, (at, at + 1)) for template, at in of.items()}
            for stage, of in zip(pipeline.stages, places, strict=True)
        ]

    def completed(self, batches: Sequence[Sequence[int]], schedule: str, there: dict[str, float]) -> list[float]:
        """Return when each block's last backward ends if weights arrive at the times in `there`."""
        stages = [stage.under(schedule) for stage in self._stages]
        rows = stage_rows(stages, batches)
        now = 0.0
        below = []
        for s, (span, alone) in enumerate(zip(self._spans, self._alone, strict=True)):
            costs = {template: cost.under(schedule) for template, cost in alone.items()}
            template_seconds = {t: (cost.apart(batches[0])[1], cost.apart(batches[-1])[2]) for t, cost in costs.items()}
            forwards, backwards = zip(
                *(template_seconds[template] for template in self._templates[slice(*span)]), strict=True
            )
            now = max(now, rows[0, s, EARLY])
            arrived = now
            for block, seconds in zip(self._outline.blocks[slice(*span)], forwards, strict=True):
                now = max(now, *(there[name] for name in self._outline.weights[block]), 0.0) + seconds
            rows[0, s, FORWARD] += max(0.0, now - arrived - sum(forwards))
            if s < len(stages) - 1:
                now += rows[0, s, AHEAD]
            below.append(np.concatenate(([0.0], np.cumsum(backwards)[:-1])))
        ends = replayed(rows, schedule, self._devices)
        return [end for last, less in zip(ends, below, strict=True) for end in (last - less).tolist()]
