"""Rates from ranks' reports at the commit: lengths count, and waits and shared cores do not look like slow devices."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.errors import Unsupported
from hydragraph.runtime.instruction_trace import ExposedSeconds, RankTimes
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.health import Health
from hydragraph.train.stragglers.monitor import Monitor, predict
from hydragraph.train.stragglers.rate_estimator import Change
from hydragraph.train.stragglers.straggler_state import SlowRank
from tests.models import captured

LAYERS = 2
STRATEGY = hg.Strategy.parse("<[0]x1,[1]x1> + <[2]x2>", layers=LAYERS)


@functools.cache
def costs(ranks: int = 4) -> Costs:
    cluster = default_cluster(ranks)
    return Costs(datasheet(captured("llama")[0], cluster), cluster)


def assignment(step: int) -> Assignment:
    """Return sequences of other lengths in every step, and far longer ones now and then."""
    lengths = (40 + step % 7, 300 if step % 5 == 0 else 30, 80, 64 - step % 3)
    return Assignment((((0,), (1,)), ((2, 3),)), lengths)


def times(step: int, slow: dict[int, float], crowd: dict[int, float] | None = None) -> list[RankTimes]:
    """Return what ranks would report: rank 3 is idle and probes, cores may be crowded."""
    predicted = predict(costs(), STRATEGY, assignment(step))
    templates = tuple(dict.fromkeys(captured("llama")[0].kinds))
    found = []
    for rank in range(4):
        kinds = {kind.template: seconds for kind, seconds in predicted.get(rank, {}).items()}
        wrong = {template: 3.0 + i for i, template in enumerate(templates)}
        ran = sum(wrong[t] * s for t, s in kinds.items()) or 0.1
        crowded = (crowd or {}).get(rank, 1.0)
        rate = slow.get(rank, 1.0)
        own = tuple(rate * crowded * wrong[t] * kinds.get(t, 0.0) for t in templates)
        probe = 1000.0 / rate if rank == 3 or step == 0 else 0.0
        found.append(RankTimes(sum(own), ExposedSeconds(), own, ran, ran * (crowded - 1), probe))
    return found


def observed(
    monitor: Monitor, steps: range, slow: dict[int, float], crowd: dict[int, float] | None = None
) -> list[int]:
    named = []
    for step in steps:
        reported = times(step, slow, crowd)
        if step == 0:
            monitor.baseline(reported)
        named += [change.rank for change in monitor.observe(STRATEGY, assignment(step), reported)]
    return named


def test_a_long_sequence_is_no_straggler_and_a_stopped_device_is_one() -> None:
    monitor = Monitor(costs())
    assert observed(monitor, range(20), {}) == []
    assert observed(monitor, range(20, 23), {1: 2.57}) == [1]
    assert monitor.health.rates == {1: pytest.approx(2.57, rel=1e-6)}
    assert observed(monitor, range(23, 27), {}) == [1]
    assert monitor.health.rates == {}


def test_ranks_are_observed_while_strategies_alternate() -> None:
    monitor = Monitor(costs())
    other = hg.Strategy.parse("<[0]x2> + <[2]x2>", layers=LAYERS)
    named: list[Change] = []
    for step in range(46):
        reported = times(step, {2: 2.57} if step >= 40 else {})
        named += monitor.observe(other if step % 2 else STRATEGY, assignment(step), reported)
    assert [change.rank for change in named] == [2]


def test_blocks_that_take_other_times_than_predicted_correct_the_costs() -> None:
    monitor = Monitor(costs())
    observed(monitor, range(20), {1: 2.0})
    corrections = monitor.corrections
    assert corrections.types == ("",) * 4
    factor = corrections.factor(TimeKind.FORWARD)
    assert factor == corrections.factor(TimeKind.BACKWARD)
    assert 3.0 <= factor <= 3.0 + len(set(captured("llama")[0].kinds))  # as `times` has it, without the slow rank
    assert set(corrections.health) == {1}


def test_a_crowded_core_is_found_too_and_rates_multiply() -> None:
    monitor = Monitor(costs())
    observed(monitor, range(20), {})
    assert set(observed(monitor, range(20, 24), {0: 2.0}, {0: 1.5})) == {0}
    assert monitor.health.rates == {0: pytest.approx(3.0, rel=1e-6)}


def test_an_idle_rank_is_known_by_its_probes() -> None:
    monitor = Monitor(costs())
    assert observed(monitor, range(12), {}) == []
    assert observed(monitor, range(12, 15), {3: 5.42}) == [3]
    assert monitor.health.rates == {3: pytest.approx(5.42, rel=1e-6)}
    assert observed(monitor, range(15, 19), {}) == [3]


def test_an_idle_rank_that_was_slow_at_its_first_probe_has_not_recovered() -> None:
    monitor = Monitor(costs(), slow={3: SlowRank(5.42)})
    reported = times(0, {})
    healthy, slow = reported[0], replace(reported[3], probe=1000 / 5.42)
    monitor.baseline([healthy, healthy, slow, slow])
    changed: list[Change] = []
    for step in range(24):
        changed += monitor.observe(STRATEGY, assignment(step), [*times(step, {})[:3], slow])
    assert changed == []


def test_the_core_of_an_idle_rank_is_known_by_its_probes_too() -> None:
    """Else a rank that was left with nothing to do would keep the rate that its core had when it computed."""
    monitor = Monitor(costs())
    observed(monitor, range(20), {})
    assert set(observed(monitor, range(20, 24), {3: 5.0}, {3: 2.0})) == {3}
    assert monitor.health.rates == {3: pytest.approx(10.0, rel=1e-6)}
    assert set(observed(monitor, range(24, 28), {3: 5.0})) == {3}
    assert monitor.health.rates == {3: pytest.approx(5.0, rel=1e-6)}


def test_of_ranks_that_stay_rates_and_probes_are_known() -> None:
    before = Monitor(costs())
    observed(before, range(20), {})
    observed(before, range(20, 23), {1: 2.57})
    after = before.among(costs(), {0: 1, 1: 0, 3: 3})
    assert after.health.rates == {0: pytest.approx(2.57, rel=1e-6)}
    assert before.health.rates == {1: pytest.approx(2.57, rel=1e-6)}
    assert observed(after, range(23, 28), {0: 2.57, 3: 5.42}) == [3], "an idle rank, by the probe of its first step"


def test_a_slow_rank_is_compared_with_the_first_probes() -> None:
    monitor = Monitor(costs())
    observed(monitor, range(20), {})
    observed(monitor, range(20, 23), {3: 5.42})
    after = monitor.among(costs(), {0: 0, 2: 1, 3: 3})
    slow = dict.fromkeys(range(4), 5.42)
    after.baseline(times(0, slow))
    assert observed(after, range(1, 12), {3: 5.42}) == []


def test_costs_of_another_model_are_refused() -> None:
    monitor = Monitor(costs())
    short = [RankTimes(1.0, ExposedSeconds(), (1.0,)) for _ in range(4)]  # of a model with one kind of block
    with pytest.raises(Unsupported, match="measure this model"):
        monitor.observe(STRATEGY, assignment(0), short)


def test_what_another_knew_of_slow_ranks_is_no_news() -> None:
    before = Monitor(costs())
    observed(before, range(20), {})
    observed(before, range(20, 23), {1: 2.57}, {2: 2.0})
    after = Monitor(costs(), slow=before.slow)
    assert after.health == before.health != Health()
    assert observed(after, range(12), {1: 2.57}, {2: 2.0}) == []
    assert observed(after, range(12, 16), {}) == [1, 2], "they have recovered"
    assert after.slow == {}
