"""Plans for devices that differ, trained: every way of planning gives what one device does, on real gloo processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.engine.candidate_strategies import Planning, candidates_of
from hydragraph.planner.policy import Policy
from tests import reference
from tests.cost import priced
from tests.models import llama, sequences
from tests.ready import Ready
from tests.thorough import thorough

RANKS, LAYERS = 4, 4
LENGTHS = ([20, 7, 33, 1, 12, 5], [9, 14], [150, 3, 40, 40, 8, 17, 25, 30])
TYPES = hg.Workload(12, 24)
SLOW = hg.Health({1: 5.42})


def costs(health: hg.Health | None = None, alike: bool = False) -> hg.Costs:
    """Return costs of two fast and two slow devices, or of four fast ones."""
    return priced.costs(LAYERS, priced.cluster(RANKS) if alike else priced.mixed(), health)


def planned() -> dict[str, tuple[hg.Costs, hg.Plan]]:
    """Return a plan of each kind."""
    lost = costs(hg.Health({0: 2.57, 3: math.inf}))
    return {
        "types": (costs(), hg.plan(costs(), TYPES, "mixed")),
        "stages": (costs(), hg.plan(costs(), TYPES, "search")),
        "one slow": (costs(SLOW, alike=True), hg.plan(costs(SLOW, alike=True), TYPES, "straggler")),
        "all at once, one lost": (lost, hg.plan(lost, hg.Workload(lengths=LENGTHS))),
    }


@dataclass
class Trained:
    """Losses of three steps, the gradients at the starting weights, and how many sequences each pipeline had."""

    losses: list[float]
    gradients: dict[str, Tensor]
    sequences: tuple[int, ...]


def ready(strategies: Sequence[hg.Strategy] = ()) -> Ready:
    return Ready.of(llama(layers=LAYERS), list(map(str, strategies)))


def batches() -> list[list[Tensor]]:
    return [sequences(lengths, seed=i) for i, lengths in enumerate(LENGTHS)]


def train(prepared: Ready, plans: dict[str, tuple[hg.Costs, Sequence[hg.Strategy], hg.Home]]) -> dict[str, Trained]:
    """On every rank: train by each plan from the same weights."""
    found = {}
    for name, (known, strategies, home) in plans.items():
        exe = prepared.executable(
            list(strategies),
            lambda named: torch.optim.SGD(named, lr=0.05),
            home=home,
            profile=known,
            policy=Policy(workers=0, gain=0.0),
        )
        gradients = exe.gradients(batches()[0])
        reports = [exe.step(batch) for batch in batches()]
        exe.close()
        counts = tuple(sum(map(len, pipeline)) for pipeline in reports[0].assignment.micro_batches)
        found[name] = Trained([report.loss for report in reports], gradients, counts)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Trained]]:
    plans = {name: (known, plan.strategies, plan.home) for name, (known, plan) in planned().items()}
    strategies = [strategy for _, candidates, _ in plans.values() for strategy in candidates]
    return hg.launch(train, RANKS, plans, prepare=partial(ready, strategies))


@thorough
def test_every_kind_of_plan_trains_as_one_device_does(ranks: list[dict[str, Trained]]) -> None:
    wanted = reference.train(llama(layers=LAYERS), batches(), lambda p: torch.optim.SGD(p, lr=0.05))
    for name, trained in ranks[0].items():
        assert all(rank[name].losses == trained.losses for rank in ranks), name
        assert trained.losses == pytest.approx(wanted.losses, rel=1e-5), name
        worst, ratio = reference.worst(trained.gradients, wanted.gradients[0])
        assert ratio <= 1, f"{name}: gradient of {worst} is {ratio:.2f} times the tolerance off"


def run(profile: hg.Costs, given: hg.Strategy) -> tuple[list[hg.Strategy], tuple[int, ...]]:
    """On every rank: one step; and what "auto" chooses from by the same costs."""
    prepared = ready()
    exe = prepared.executable(given, None, profile=profile, policy=Policy(workers=0))
    report = exe.evaluate(sequences([24] * 12))
    exe.close()
    planned = prepared.executable("auto", None, profile=profile, lengths=[[24] * 12], policy=Policy(workers=0))
    planned.close()
    return list(planned.strategies), tuple(sum(map(len, pipeline)) for pipeline in report.assignment.micro_batches)


@thorough
def test_pipelines_get_sequences_by_their_speed_and_auto_plans_for_devices_that_differ() -> None:
    replicas = hg.Strategy.parse("2*<tp1,pp1>", LAYERS)
    known = priced.costs(LAYERS, priced.cluster(2), hg.Health({1: 3.0}))
    (planned, counts), (others, _) = hg.launch(run, 2, known, replicas)
    assert counts[0] >= 3 * counts[1] > 0
    assert planned == others
    assert planned[0] == hg.plan(known, hg.Workload(lengths=[[24] * 12])).strategy


def test_costs_of_other_ranks_are_refused() -> None:
    with pytest.raises(hg.Unsupported, match="the costs are for 4 devices, but there are 1 ranks"):
        ready().executable(hg.Strategy.parse("<tp1,pp1>", LAYERS), None, profile=costs())


@pytest.mark.parametrize(
    ("layers", "lengths", "why"),
    [
        (6, [[24] * 12], "the costs are for a model of 6 layers, but this model has 4; measure this model"),
        (LAYERS, [[], [0, 0]], "the mini-batches of lengths= have none; pass lengths="),
        (LAYERS, [[10**9]], "nothing fits"),
    ],
)
def test_auto_by_costs_that_cannot_plan_is_refused(layers: int, lengths: list[list[int]], why: str) -> None:
    program = hg.capture(llama(layers=LAYERS), check="off")
    with pytest.raises(hg.Unsupported, match=why):
        candidates_of("auto", program, RANKS, Planning(priced.costs(layers, priced.mixed()), lengths))


@thorough
def test_auto_by_costs_names_no_device_that_is_lost() -> None:
    program = hg.capture(llama(layers=LAYERS), check="off")
    left = costs(hg.Health({0: math.inf, 1: math.inf, 2: math.inf}))
    (only,) = candidates_of("auto", program, RANKS, Planning(left, [[24] * 12, [], [3, 90, 7]]))
    assert only.devices == (3,)
