import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

import hydragraph as hg
from hydragraph.planner import finalists as module
from hydragraph.planner import price_mini_batches
from hydragraph.planner.finalists import (
    Exactly,
    Finalists,
    Moved,
    Proposal,
    TimeEstimates,
    finalists,
    proposals,
    unlike,
)
from hydragraph.planner.generators.malleus_autohet import TOGETHER, search
from hydragraph.planner.generators.symmetric import simple
from hydragraph.planner.micro_batch_sizes import cut
from hydragraph.planner.price_candidate import (
    Candidate,
    PricedPlan,
    Shortage,
    form_of,
    placed_candidates,
    settle,
    simulated,
)
from hydragraph.planner.request import PlanRequest
from hydragraph.planner.state_shares import fraction_of
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from tests.cost import priced
from tests.thorough import first, only

LENGTHS = [700] * 12
Known = dict[tuple[hg.Strategy, Assignment], PricedPlan | Shortage]


def selected(
    costs: hg.Costs,
    found: Sequence[Proposal],
    near: float = 0.0,
    until: float | None = None,
    known: Known | None = None,
    moved: Moved | None = None,
    exactly: Exactly | None = None,
    clock: TimeEstimates | None = None,
) -> Finalists:
    known = {} if known is None else known
    exactly = exactly or partial(simulated, costs)
    passed = finalists(costs, found, near, until, known, moved, exactly, clock or TimeEstimates(costs))
    return Finalists.of(known.values(), passed)


def test_the_best_is_simulated_and_what_was_passed_ends_later() -> None:
    costs = priced.costs(4, priced.mixed(), hg.Health({1: 2.57}))
    found = proposals(
        costs, LENGTHS, [*placed_candidates(search(costs, 12, 700, TOGETHER)), *simple(costs, 12, 700, [1, 2])]
    )
    last = selected(costs, found)
    best = min(each.seconds for each in last.settled)
    assert all(each.simulated for each in last.settled)
    for each in last.passed:
        assert costs.simulate(each.strategy, each.assignment).seconds >= best * 0.99
    assert {each.strategy for each in last.passed}.isdisjoint(each.strategy for each in last.settled)


@only("16-1.0-0")
@pytest.mark.parametrize("rank", first([0], range(4)))
@pytest.mark.parametrize(("sequences", "rate"), [(32, 1.6), (64, 3.0), (7, 12.0), (16, 1.0)])
def test_a_plan_is_as_quick_as_what_a_run_makes_of_its_strategy(rank: int, sequences: int, rate: float) -> None:
    """A run cuts mini-batches in micro-batches of its own; by those of one size, others' strategies looked quicker."""
    costs = priced.costs(6, priced.cluster(4), hg.Health({rank: rate}))
    lengths = (100,) * sequences
    found = hg.plan(costs, hg.Workload(sequences=sequences, length=100), streaming=False)
    owned = costs.changed(home=found.home)
    for strategy in (found.strategy, hg.Strategy.parse("4*<tp1,pp1>", 6)):
        choice = PlanRequest((owned.pipelines(strategy),), (0.0,)).choose(lengths)
        assert found.seconds <= owned.simulate(strategy, choice.assignment).seconds * 1.003


def test_micro_batches_are_formed_before_a_proposal_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydragraph.planner.finalists.CUT", 0)  # of no proposal in advance
    costs = priced.costs(6, priced.cluster(2))
    pipeline = hg.Strategy.parse("<tp1,pp2>", 6)
    found = proposals(costs, LENGTHS, [Candidate(pipeline, "simple", 1.0, len(LENGTHS))])
    (one,) = selected(costs, found).settled
    assert found[0].assignment.counts == (1,)
    assert one.assignments == (cut(costs, pipeline, LENGTHS)[0],)


def test_searches_share_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = priced.costs(6, priced.mixed())
    found = proposals(costs, LENGTHS, simple(costs, 12, 700, [1, 2]))
    clock = TimeEstimates(costs)
    known: Known = {}
    before = selected(costs, found, known=known, clock=clock)
    for each in (module, price_mini_batches):
        monkeypatch.setattr(each, "Iterations", None)
    assert selected(costs, found, known=known, clock=clock) == before


def test_a_plan_is_there_however_late_it_is() -> None:
    costs = priced.costs(6, priced.mixed())
    found = proposals(costs, LENGTHS, simple(costs, 12, 700, [1]))
    last = selected(costs, found, 0.0, time.monotonic() - 1)
    assert len(last.settled) == 1
    assert not last.settled[0].simulated


def test_of_equally_good_plans_the_one_that_moves_least_is_looked_at_first() -> None:
    costs = priced.costs(6, priced.cluster(4))
    some = [hg.Strategy.parse(text, 6) for text in ("<[0]x6> + <[1]x6>", "<[2]x6> + <[3]x6>", "<[0]x3,[1]x3>")]
    found = proposals(costs, LENGTHS, [Candidate(each, "simple", 1.0) for each in some])

    def first(near: float, moved: Moved | None) -> hg.Strategy:
        looked_at: dict[tuple[hg.Strategy, hg.Assignment], PricedPlan | Shortage] = {}
        selected(costs, found, near, None, looked_at, moved)
        return next(strategy for strategy, _ in looked_at)

    def of_first_rank(home: hg.Home) -> int:
        return round(1000 * fraction_of(home, 0, 4))

    assert first(0.0, None) == some[0]
    assert first(0.005, of_first_rank) == some[1]
    # A slower strategy is not chosen just because it moves no state.
    assert first(0.005, lambda home: 1 - int(home == hg.Home((1, 1, 0, 0)))) in some[:2]


def test_what_the_best_estimate_excluded_is_looked_at_if_its_plan_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that fit in memory can delay a plan, which its estimate does not know."""
    costs = priced.costs(6, priced.cluster(4))
    some = [hg.Strategy.parse(text, 6) for text in ("4*<tp1,pp1>", "<tp1,pp4>", "<[0]x6> + <[1]x6>")]
    found = proposals(costs, LENGTHS, [Candidate(each, "simple", 1.0) for each in some])
    names = [each.strategy for each in found]
    plain = selected(costs, found)
    assert [each.strategy for each in plain.settled] == names[:1]
    seconds = {each.strategy: each.expected_s for each in found}

    def delayed(each: PricedPlan) -> PricedPlan:
        exact = simulated(costs, each)
        later = 1.01 * max(seconds.values()) if each.strategy == names[0] else exact.seconds
        return replace(exact, by_batch=(later,))

    assert {each.strategy for each in selected(costs, found, exactly=delayed).settled} >= set(names[:2])


def test_what_cards_must_carry_is_expected() -> None:
    near = Node("fast", 2, priced.FAST, Interconnect(1e6, 1e-6))
    costs = priced.costs(6, Cluster.of({"fast": DeviceType(1e15, 10**9, 1e12)}, (near, near)), elements=100_000)
    some = [hg.Strategy.parse(text, 6) for text in ("4*<tp1,pp1>", "<[0]x6> + <[1]x6>")]
    found = proposals(costs, LENGTHS, [Candidate(each, "simple", 1.0) for each in some])
    assert [each.strategy for each in found] == some[::-1], "four devices compute in less time, and wait for cards"
    assert found[1].expected_s == found[1].least_s > found[1].last_s


def test_of_nodes_that_are_alike_one_is_tried_without() -> None:
    types = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 10**9, 1e12)}
    fast, slow = (Node(name, 2, priced.FAST, priced.SLOW, count=40) for name in types)
    costs = priced.costs(6, Cluster.of(types, (fast, slow)), hg.Health({4: 2.57}))
    pipelines = hg.Strategy.parse("160*<tp1,pp1>", 6).pipelines
    forms = [form_of(costs, pipeline) for pipeline in pipelines]
    nodes = [{costs.cluster.node_of(pipeline.devices[0])} for pipeline in pipelines]
    assert list(unlike(costs, forms, nodes)) == [0, 2, 40], "a healthy fast node, that of rank 4, a slow one"


def test_pipelines_that_run_nothing_are_left_out() -> None:
    costs = priced.costs(6, priced.cluster(4), hg.Health({3: 100.0}))
    one = Candidate(hg.Strategy.parse("4*<tp1,pp1>", 6), "simple", 1.0)
    (proposal,) = proposals(costs, LENGTHS[:6], [one])
    assert proposal.strategy == hg.Strategy.parse("3*<tp1,pp1>", 6)
    assert proposal.assignment.counts == (2, 2, 2)


def test_pipelines_behind_a_link_that_costs_more_than_they_save_are_left_out() -> None:
    types = {"fast": DeviceType(1e15, 10**9, 1e12)}
    near, far = (Node("fast", n, priced.FAST, Interconnect(1e6, 1e-6)) for n in (4, 1))
    costs = priced.costs(6, Cluster.of(types, (near, far)))
    found = proposals(costs, LENGTHS, [Candidate(hg.Strategy.parse("5*<tp1,pp1>", 6), "simple", 1.0)])
    last = selected(costs, found)
    best = min(last.settled, key=lambda each: each.seconds)
    assert best.strategy == hg.Strategy.parse("4*<tp1,pp1>", 6)
    assert best.seconds < 0.9 * costs.simulate(found[0].strategy, found[0].assignment).seconds


def test_a_group_of_unlike_rates_owns_alike_where_pieces_would_travel_over_slow_links() -> None:
    node = Node("fast", 4, Interconnect(1e6, 1e-6), priced.SLOW)
    cluster = Cluster.of({"fast": DeviceType(1e15, 10**9, 1e12)}, (node,))
    costs = priced.costs(2, cluster, hg.Health(dict.fromkeys((1, 2, 3), 2.57)), elements=100_000)
    found = proposals(costs, LENGTHS, [Candidate(hg.Strategy.parse("<tp4,pp1>", 2), "simple", 1.0)])
    (one,) = selected(costs, found).settled
    assert one.home == hg.Home()
    uneven = settle(costs, one.strategy, found[0].assignment, "", 1.0)
    assert isinstance(uneven, PricedPlan)
    assert one.seconds < simulated(costs, uneven).seconds
