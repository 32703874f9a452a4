"""Plans made ahead are those made now; dead workers are replaced; a full queue refuses; late plans are quick ones."""

from __future__ import annotations

import logging
import os
import signal
from unittest import mock

import pytest

import hydragraph as hg
from hydragraph.engine.planning_service import PlanService
from hydragraph.engine.step_planner import IterationPlanner
from hydragraph.planner.policy import Policy, static_or_dynamic
from hydragraph.planner.request import PlanRequest, answer
from tests.planner.examples import MIXED, PROFILE, lengths
from tests.thorough import thorough

CANDIDATES = [[(8, 1)] * 3, MIXED]
SETTING = PlanRequest(tuple(PROFILE.pipelines(c) for c in CANDIDATES), (0.0, 0.0))
BATCHES = [tuple(lengths(40, seed, 3000)) for seed in range(3)]
PATIENCE_S = 300.0  # against hangs only


def pids_of(service: PlanService) -> list[int]:
    """Return the ids of the planning processes that are alive."""
    processes = [worker.process for worker in service._workers if worker is not None]
    return [process.pid for process in processes if process.poll() is None]


@thorough
def test_plans_made_ahead_are_those_made_now(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hydragraph")
    planner = IterationPlanner(SETTING, Policy(patience_s=PATIENCE_S))
    now = IterationPlanner(SETTING, Policy(workers=0))
    try:
        for batch in BATCHES:
            planner.announce(batch)
        for batch in reversed(BATCHES):  # in any order: a plan is found by its mini-batch
            ahead, inline = planner.plan(batch), now.plan(batch)
            assert (ahead.candidate, ahead.assignment) == (inline.candidate, inline.assignment)
            assert not ahead.late
            told = f"planned {ahead.assignment.counts} micro-batches of strategy {ahead.candidate}, waited "
            assert sum(message.startswith(told) for message in caplog.messages) == 2
            caplog.clear()
    finally:
        planner.close()


@thorough
def test_a_request_that_changes_changes_plans_that_were_made_already() -> None:
    service = PlanService(SETTING, workers=1, ahead=2)
    changed = SETTING.only(0)
    try:
        first, second = BATCHES[:2]
        assert service.submit(first)
        assert service.submit(second)
        assert service.take(first, PATIENCE_S) is not None
        assert service.submit(first)
        service.change(changed)
        for batch in (first, second):
            found = service.take(batch, PATIENCE_S)
            assert found is not None
            assert found.choice == answer(changed, batch).choice
    finally:
        service.close()


def test_a_dead_worker_is_replaced_and_its_mini_batch_planned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hydragraph")
    service = PlanService(SETTING, workers=1, ahead=3)
    try:
        assert service.submit(BATCHES[0])
        assert service.take(BATCHES[0], PATIENCE_S) is not None
        (pid,) = pids_of(service)
        os.kill(pid, signal.SIGKILL)
        assert service.submit(BATCHES[1])
        found = service.take(BATCHES[1], PATIENCE_S)
        assert found is not None
        assert found.choice == answer(SETTING, BATCHES[1]).choice
        assert "planning process 0 died; another process plans its mini-batch" in caplog.messages
        assert pids_of(service) != [pid]
    finally:
        service.close()
    assert pids_of(service) == []


@thorough
def test_signals_to_the_whole_process_group_leave_workers_to_their_service() -> None:
    service = PlanService(SETTING, workers=1, ahead=3)
    try:
        assert service.submit(BATCHES[0])
        assert service.take(BATCHES[0], PATIENCE_S) is not None
        (pid,) = pids_of(service)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert service.submit(BATCHES[1])
        assert service.take(BATCHES[1], PATIENCE_S) is not None
        assert pids_of(service) == [pid]
    finally:
        service.close()
    assert pids_of(service) == []


def test_the_queue_is_bounded_and_unknown_mini_batches_are_not_waited_for() -> None:
    service = PlanService(SETTING, workers=1, ahead=1)
    try:
        assert service.submit(BATCHES[0])
        assert service.submit(BATCHES[0])  # the same one takes no second place
        assert not service.submit(BATCHES[1])
        assert service.take(BATCHES[1], 0.0) is None
    finally:
        service.close()


def test_a_late_plan_gives_the_quick_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hydragraph")
    planner = IterationPlanner(SETTING, Policy(patience_s=0.0))
    try:
        planner.announce(BATCHES[0])
        plan = planner.plan(BATCHES[0])
        assert plan.late
        told = f" s: strategy {plan.candidate} is used, with the sequences assigned longest first"
        assert any(m.startswith("the plan was not ready after ") and m.endswith(told) for m in caplog.messages)
        flat = [i for p in plan.assignment.micro_batches for m in p for i in m]
        assert sorted(flat) == [i for i, n in enumerate(BATCHES[0]) if n]
        for pipeline, p in zip(SETTING.candidates[plan.candidate], plan.assignment.micro_batches, strict=True):
            assert all(sum(BATCHES[0][i] for i in m) <= pipeline.max_len for m in p)
    finally:
        planner.close()


def test_equal_lengths_in_succession_are_planned_once_until_the_request_changes() -> None:
    """As a step on pairs scores its mini-batch before it trains."""
    planner = IterationPlanner(SETTING, Policy(workers=0))
    with mock.patch("hydragraph.engine.step_planner.answer", side_effect=answer) as planned:
        first = planner.plan(BATCHES[0])
        planner._service = service = mock.Mock()
        again = planner.plan(BATCHES[0])
        assert (again.candidate, again.assignment, again.seconds) == (first.candidate, first.assignment, first.seconds)
        service.submit.assert_not_called()
        service.take.assert_called_once_with(BATCHES[0], 0.0)  # a plan that was announced holds up no other
        planner._service = None
        planner.change(SETTING.only(0), None)
        planner.plan(BATCHES[0])
        planner.plan(BATCHES[1])
        planner.plan(BATCHES[0])
    assert [call.args[1] for call in planned.call_args_list] == [BATCHES[i] for i in (0, 0, 1, 0)]


def test_another_planner_takes_over_the_processes_and_forgets_what_they_were_told() -> None:
    policy = Policy(patience_s=PATIENCE_S, ahead=2)
    before, after = IterationPlanner(SETTING, policy), IterationPlanner(SETTING.only(0), policy)
    try:
        before.announce(BATCHES[0])
        assert not before.plan(BATCHES[0]).late
        assert before._service is not None
        pids = pids_of(before._service)
        for batch in BATCHES[:2]:
            before.announce(batch)  # as many as allowed, and never taken
        after.take_over(before)
        before.close()
        assert after._service is not None
        assert after._service.submit(BATCHES[2])
        found = after._service.take(BATCHES[2], PATIENCE_S)
        assert found is not None
        assert found.choice == answer(SETTING.only(0), BATCHES[2]).choice
        assert not after.plan(BATCHES[0]).late
        assert pids_of(after._service) == pids
    finally:
        before.close()
        after.close()


def test_a_planner_that_takes_over_from_another_rank_does_not_wait_for_a_process_to_start() -> None:
    planner = IterationPlanner(SETTING, Policy(patience_s=PATIENCE_S))
    planner.take_over(None)
    try:
        planner.announce(BATCHES[0])
        assert planner.plan(BATCHES[0]).late
        assert planner._service is not None
        planner.announce(BATCHES[1])
        assert planner._service.take(BATCHES[1], PATIENCE_S) is not None
        assert not planner.plan(BATCHES[2]).late, "it has started"
    finally:
        planner.close()


@thorough
def test_what_a_worker_refuses_is_refused_here() -> None:
    planner = IterationPlanner(SETTING, Policy(patience_s=PATIENCE_S))
    try:
        planner.announce((10_000_000,))
        with pytest.raises(hg.Unsupported, match="10000000 tokens, more than any pipeline can hold"):
            planner.plan((10_000_000,))
    finally:
        planner.close()


def test_a_small_gain_keeps_the_best_static_strategy() -> None:
    policy = Policy(gain=0.9)
    decision = static_or_dynamic(SETTING.candidates, SETTING.charges, BATCHES, policy)
    assert not decision.dynamic
    assert decision.static == min(range(2), key=lambda i: decision.seconds[i])
    assert decision.seconds[-1] <= min(decision.seconds)
    assert "stays B" in decision.sentence(["A", "B"] if decision.static else ["B", "A"], 0.9)
    planner = IterationPlanner(SETTING, Policy(workers=0), decision.static)
    assert {planner.plan(batch).candidate for batch in BATCHES} == {decision.static}


def test_a_sequence_that_the_static_strategy_cannot_take_still_runs() -> None:
    short = min(range(2), key=SETTING.reach)
    longest = SETTING.reach(1 - short)
    assert longest > SETTING.reach(short)
    planner = IterationPlanner(SETTING, Policy(workers=0), short)
    assert planner.plan((longest, 5)).candidate == 1 - short
    assert planner.plan(BATCHES[0]).candidate == short


def test_rough_costs_give_way_to_a_long_sequence() -> None:
    guessed = PlanRequest(SETTING.candidates, SETTING.charges, guessed=True)
    assert answer(guessed, (10_000_000, 3)).choice is not None


def test_a_policy_checks_its_fields() -> None:
    with pytest.raises(ValueError, match="'ahead' is 0"):
        Policy(ahead=0)
