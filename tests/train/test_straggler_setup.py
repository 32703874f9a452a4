"""Creation of a run's straggler monitor from the costs of its devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hydragraph.engine.candidate_strategies import Planning
from hydragraph.spec.home import Home
from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.straggler_setup import controller_of, follows
from tests.cost import priced
from tests.train.plain import settings


def test_ranks_that_are_left_are_watched_by_the_costs_of_their_own_devices(tmp_path: Path) -> None:
    whole = priced.costs(4, priced.mixed())
    left = whole.of_ranks([0, 2, 3], Home())
    executor: Any = SimpleNamespace(profile=left, owners=Home(copies=2))
    world: Any = SimpleNamespace(ranks=3)
    given = from_record(TrainConfig, {**settings(tmp_path), "elastic": {"monitor": True}})
    controller = controller_of(given, world, executor)
    assert controller.monitor is not None
    costs = controller.monitor._costs
    assert [costs.cluster.type_of(rank) for rank in range(costs.ranks)] == ["fast", "slow", "slow"]
    assert costs.home.copies == 2


def test_a_deterministic_run_asks_for_plans_that_do_not_stream(tmp_path: Path) -> None:
    costs = priced.costs(4, priced.mixed())
    program: Any = SimpleNamespace(buckets=costs.buckets)
    executor: Any = SimpleNamespace(
        profile=costs,
        owners=Home(),
        program=program,
        strategies=(),
        request=None,
        may_stream=False,
        static=None,
        planning=Planning(),
    )
    given = from_record(TrainConfig, {**settings(tmp_path), "strategies": "auto"})
    with mock.patch("hydragraph.train.straggler_setup.Replanner") as planner:
        controller = controller_of(given, SimpleNamespace(ranks=4), executor)  # pyrefly: ignore[bad-argument-type]
    planner.return_value.start.assert_called_once()
    assert controller._replanning is not None
    assert not controller._question.streaming


def test_state_follows_chosen_strategies_by_measured_costs_without_a_monitor(tmp_path: Path) -> None:
    measured = priced.costs(4, priced.mixed())
    program: Any = SimpleNamespace(buckets=measured.buckets)
    executor: Any = SimpleNamespace(profile=measured, owners=Home(), program=program)
    plan = {"plan": {"choose": True, "profile": "measured.json"}}
    given = from_record(TrainConfig, settings(tmp_path) | plan)
    controller = controller_of(given, SimpleNamespace(ranks=4), executor)  # pyrefly: ignore[bad-argument-type]
    assert controller.following is not None
    assert controller.following.rule == "auto"
    assert controller.monitor is None
    assert (controller.health.rates, controller.slow, controller.correct()) == ({}, {}, False)
    for other in ({"home": "stages"}, {"home": "equal"}, {"plan": {"choose": False}}):
        assert not follows(from_record(TrainConfig, settings(tmp_path) | plan | other), executor)
    assert not follows(given, SimpleNamespace(profile=None))  # pyrefly: ignore[bad-argument-type]
