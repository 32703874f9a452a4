"""Real iterations beside their simulation, on recorded traces whose errors are known."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.corrections import Corrections
from hydragraph.cost.costs import Costs
from hydragraph.cost.trace_file import Trace
from hydragraph.report.measured_beside_predicted import ComparedSeconds, _times, compare
from hydragraph.spec.assignment import Assignment
from tests.cost.priced import cluster, costs, mixed
from tests.cost.traced import traced
from tests.thorough import thorough

STRATEGY = hg.Strategy.parse("2*<tp1,pp2>", layers=4)
ASSIGNMENT = Assignment.even([4, 3], [900, 700])


def truth(priced: Costs, ratios: dict[TimeKind, float], health: hg.Health | None = None, types: bool = False) -> Costs:
    """Return costs that multiply the time of each kind by its ratio, on every rank or on those of the slow type."""
    names = tuple(priced.cluster.type_of(rank) for rank in range(priced.ranks))
    known = Corrections(names)
    for _ in range(5):
        known = known.with_step(
            {(k, r): x for k, x in ratios.items() for r, name in enumerate(names) if not types or name == "slow"}
        )
    return Costs(priced.profile, priced.cluster, health or hg.Health(), corrections=known)


def joined(*traces: Trace) -> Trace:
    ranks = zip(*(trace.ranks for trace in traces), strict=True)
    return Trace(
        tuple(s for trace in traces for s in trace.steps),
        tuple(tuple(e for part in parts for e in part) for parts in ranks),
    )


def test_a_perfect_model_has_nothing_to_correct() -> None:
    priced = costs(4, cluster(4))
    found = compare(priced, traced(priced, STRATEGY, ASSIGNMENT, steps=6))
    assert [step.step for step in found.steps] == [2, 3, 4, 5, 6]
    assert found.warming == (1,)
    for row in found.rows:
        assert row.measured == pytest.approx(row.predicted, abs=1e-9)
    ((text, count, measured, predicted),) = found.strategies
    assert (text, count) == (str(STRATEGY), 5)
    assert measured == pytest.approx(predicted)
    assert all(found.corrections.factor(kind) == pytest.approx(1, abs=1e-6) for kind in TimeKind)
    assert found.corrections.health == hg.Health()


def test_the_sentence_names_the_kind_and_the_rank() -> None:
    priced = costs(4, cluster(4))
    slow = compare(priced, traced(truth(priced, {}, hg.Health({2: 1.4})), STRATEGY, ASSIGNMENT))
    assert slow.sentence.startswith("backward on rank 2: measured 1.4x the prediction, 6")
    assert slow.sentence.endswith(" % of the whole difference".replace(" %", "%"))
    everywhere = compare(priced, traced(truth(priced, {TimeKind.FORWARD: 1.5}), STRATEGY, ASSIGNMENT))
    assert everywhere.sentence == "forward on all ranks: measured 1.5x the prediction, 100% of the whole difference"
    assert _times(ComparedSeconds(TimeKind.FORWARD, None, 150.0, 0.1)) == "measured 1,500x the prediction"
    exact = compare(priced, traced(priced, STRATEGY, ASSIGNMENT))
    assert exact.sentence == "measured and predicted times are equal" or "measured 1x the prediction" in exact.sentence


FACTORS = st.floats(0.5, 2.0)


@thorough
@given(forward=FACTORS, backward=FACTORS, update=FACTORS, commit=FACTORS)
@settings(max_examples=15, deadline=None)
def test_known_factors_are_recovered_and_correct_what_is_predicted(
    forward: float, backward: float, update: float, commit: float
) -> None:
    ratios = {TimeKind.FORWARD: forward, TimeKind.BACKWARD: backward, TimeKind.UPDATE: update, TimeKind.COMMIT: commit}
    priced = costs(4, cluster(4))
    real = truth(priced, ratios)
    found = compare(priced, traced(real, STRATEGY, ASSIGNMENT, steps=6)).corrections
    for kind, factor in ratios.items():
        assert found.factor(kind) == pytest.approx(factor, rel=1e-3)
    better = Costs(priced.profile, priced.cluster, corrections=found)
    assert better.simulate(STRATEGY, ASSIGNMENT).seconds == pytest.approx(
        real.simulate(STRATEGY, ASSIGNMENT).seconds, rel=1e-3
    )
    assert better.seconds(STRATEGY, ASSIGNMENT) == pytest.approx(real.seconds(STRATEGY, ASSIGNMENT), rel=1e-3)


def test_factors_of_transfers_come_from_those_that_were_waited_for() -> None:
    priced = costs(4, cluster(4), elements=30_000_000)
    real = truth(priced, {TimeKind.PULL: 1.8, TimeKind.PUSH: 0.6})
    found = compare(priced, traced(real, STRATEGY, ASSIGNMENT, steps=6)).corrections
    assert found.factor(TimeKind.PULL) == pytest.approx(1.8, rel=0.02)
    assert found.factor(TimeKind.PUSH) == pytest.approx(0.6, rel=0.05)
    better = Costs(priced.profile, priced.cluster, corrections=found)
    assert better.simulate(STRATEGY, ASSIGNMENT).seconds == pytest.approx(
        real.simulate(STRATEGY, ASSIGNMENT).seconds, rel=0.02
    )


def test_types_and_ranks_are_told_apart() -> None:
    priced = costs(4, mixed())
    strategy = hg.Strategy.parse("4*<tp1,pp1>", layers=4)
    assignment = Assignment.even([2] * 4, 800)
    real = truth(priced, {TimeKind.BACKWARD: 1.3}, hg.Health({1: 1.6}), types=True)
    found = compare(priced, traced(real, strategy, assignment, steps=7)).corrections
    assert found.factor(TimeKind.BACKWARD, "fast") == pytest.approx(1, rel=1e-3)
    assert found.factor(TimeKind.BACKWARD, "slow") == pytest.approx(1.3, rel=1e-3)
    assert found.health.rates == {1: pytest.approx(1.6, rel=1e-3)}
    assert "backward on slow x1.3 from 6 steps" in str(found)
    assert str(found).endswith("; rank 1 takes 1.6x as long")
    better = Costs(priced.profile, priced.cluster, corrections=found)
    assert better.simulate(strategy, assignment).seconds == pytest.approx(
        real.simulate(strategy, assignment).seconds, rel=1e-3
    )


def test_corrected_costs_learn_on_from_what_they_know() -> None:
    priced = costs(4, cluster(4))
    real = truth(priced, {TimeKind.BACKWARD: 1.5})
    first = compare(priced, traced(real, STRATEGY, ASSIGNMENT, steps=6)).corrections
    again = Costs(priced.profile, priced.cluster, corrections=first)
    second = compare(again, traced(real, STRATEGY, ASSIGNMENT, steps=6))
    assert second.kinds[[*TimeKind].index(TimeKind.BACKWARD)].ratio == pytest.approx(1, rel=1e-3)
    assert second.corrections.factor(TimeKind.BACKWARD) == pytest.approx(1.5, rel=1e-3)
    assert second.corrections.steps(TimeKind.BACKWARD) == 10


def test_every_strategy_has_its_own_line_and_a_single_step_stays() -> None:
    priced = costs(4, cluster(4))
    other = hg.Strategy.parse("4*<tp1,pp1>", layers=4)
    trace = joined(
        traced(priced, STRATEGY, ASSIGNMENT, steps=3),
        traced(priced, other, Assignment.even([1] * 4, 500), first=4),
    )
    found = compare(priced, trace)
    assert found.warming == (1,)
    assert [(text, count) for text, count, _, _ in found.strategies] == [(str(STRATEGY), 2), (str(other), 1)]
    record = json.loads(json.dumps(found.as_dict()))
    assert len(record["kinds"]) == len(TimeKind) * 5
    assert record["left_out"] == [1]
    assert record["steps"][0]["measured_s"] == pytest.approx(record["steps"][0]["predicted_s"])


def test_another_number_of_ranks_is_refused() -> None:
    trace = traced(costs(4, cluster(4)), STRATEGY, ASSIGNMENT)
    with pytest.raises(ValueError, match="the trace has 4 ranks, but the costs have 2"):
        compare(costs(4, cluster(2)), trace)
