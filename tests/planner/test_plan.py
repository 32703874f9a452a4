import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule
from hydragraph.planner import plan as planning
from hydragraph.planner.generators.metis_stages import staged
from hydragraph.planner.plan import Method, moved_bytes
from hydragraph.planner.price_candidate import PricedPlan, Shortage, owners, settle, share_out, simulated
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.stage_kind import StageKind
from tests.cost import priced
from tests.planner.exhaustive import best_seconds
from tests.planner.promises import LENGTH, METHODS, keeps_every_promise, profile_of, situations
from tests.thorough import only, thorough


@settings(max_examples=max(4, settings.default.max_examples // 125))
@given(situations(), st.sampled_from(METHODS))
def test_a_plan_keeps_every_promise(situation: tuple[Costs, hg.Workload], method: str) -> None:
    keeps_every_promise(situation, method)


@only("24")
@pytest.mark.parametrize("ranks", [24, 64])
@settings(max_examples=2)
@given(data=st.data())
def test_a_plan_of_many_devices_keeps_every_promise(ranks: int, data: st.DataObject) -> None:
    keeps_every_promise(data.draw(situations(ranks)), data.draw(st.sampled_from(METHODS)), alone=True)


@only("6-1-2")
@pytest.mark.parametrize(("devices", "layers", "sequences"), [(6, 1, 2), (8, 2, 1), (5, 3, 1)])
def test_devices_that_there_is_no_work_for_are_idle(devices: int, layers: int, sequences: int) -> None:
    costs = priced.costs(layers, priced.cluster(devices, 1))
    work = hg.Workload(sequences=sequences, length=LENGTH)
    plans = [hg.plan(costs, work, method, streaming=False) for method in ("auto", "mixed", "straggler")]
    assert all(len(plan.strategy.devices) <= layers * sequences for plan in plans)
    assert max(plan.seconds for plan in plans) <= plans[0].seconds * 1.01


@pytest.mark.parametrize(("memory_bytes", "fits"), [(180_000_000, False), (210_000_000, True), (400_000_000, True)])
def test_stages_of_all_layers_hold_no_messages_when_activations_are_most(memory_bytes: int, fits: bool) -> None:
    nodes = (Node("fast", 4, priced.FAST, priced.SLOW, cards=4),)
    costs = priced.costs(6, Cluster.of({"fast": DeviceType(1e15, memory_bytes, 1e12)}, nodes), elements=1_000_000)
    strategy = hg.Strategy.parse("4*<tp1,pp1>", 6)
    assignment, _ = share_out(costs, strategy, [LENGTH] * 16, 1)
    found = owners(costs, strategy, assignment)
    assert isinstance(found, Shortage) is not fits
    if not isinstance(found, Shortage):
        held = [each.total for each in costs.changed(home=found[0]).memory(strategy, assignment)]
        assert max(held) <= memory_bytes
        assert found[1][0] == pytest.approx(held[0], rel=0.01)


def test_devices_too_small_for_a_layer_are_idle() -> None:
    nodes = tuple(Node(name, 2, priced.FAST, priced.SLOW, cards=2) for name in ("fast", "slow"))
    types = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 500_000, 1e12)}
    plan = hg.plan(priced.costs(6, Cluster.of(types, nodes)), hg.Workload(sequences=8, length=LENGTH), streaming=False)
    assert set(plan.strategy.devices) == {0, 1}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_plan_however_late_it_is(method: str) -> None:
    costs = priced.costs(24, priced.cluster(16, 4), hg.Health({3: 2.57}))
    hurried = hg.plan(costs, hg.Workload(sequences=64, length=LENGTH), method, deadline_s=0.0)  # pyrefly: ignore[bad-argument-type]
    hurried.strategy.check(24, 16)
    assert "was not simulated" in hurried.explain() or len(hurried.rivals) == 0 or not hurried.simulated


def strategies(costs: Costs) -> Iterator[hg.Strategy]:
    """Yield every strategy on all devices or fewer: groups in nodes, any pipelines, any order, any layers."""
    for pipelines in _pipelines(costs, tuple(range(costs.ranks))):
        if not pipelines:
            continue
        choices = [list(_layered(order, costs.outline.layers)) for order in pipelines]
        for each in itertools.product(*choices):
            yield hg.Strategy(each)


def _pipelines(costs: Costs, ranks: tuple[int, ...]) -> Iterator[tuple[tuple[tuple[int, ...], ...], ...]]:
    """Yield sets of pipelines on some of these ranks; each is a tuple of groups in order."""
    if not ranks:
        yield ()
        return
    yield from _pipelines(costs, ranks[1:])  # the first rank idles
    first, rest = ranks[0], ranks[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            members = (first, *others)
            left = tuple(r for r in rest if r not in others)
            for groups in _groups(costs, members):
                for order in itertools.permutations(groups):
                    for following in _pipelines(costs, left):
                        yield (order, *following)


def _groups(costs: Costs, ranks: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not ranks:
        yield ()
        return
    for size in (1, 2):
        for others in itertools.combinations(ranks[1:], size - 1):
            group = (ranks[0], *others)
            if len({costs.cluster.node_of(r) for r in group}) == 1:
                for rest in _groups(costs, tuple(r for r in ranks if r not in group)):
                    yield (group, *rest)


def _layered(order: Sequence[tuple[int, ...]], layers: int) -> Iterator[hg.Pipeline]:
    for cuts in itertools.combinations(range(1, layers), len(order) - 1):
        counts = [b - a for a, b in itertools.pairwise((0, *cuts, layers))]
        yield hg.Pipeline(tuple(hg.Stage(group, n) for group, n in zip(order, counts, strict=True)))


@pytest.mark.parametrize(("rates", "sequences"), [({}, 5), ({0: 2.57, 3: math.inf}, 4)])
def test_the_best_of_all_pipelines_is_the_best_of_all_strategies(rates: dict[int, float], sequences: int) -> None:
    costs = priced.costs(3, priced.mixed(), hg.Health(rates))
    every = (each for each in strategies(costs) if not set(costs.health.lost) & set(each.devices))
    best = min(share_out(costs, strategy, [LENGTH] * sequences, 1)[1] for strategy in every)
    assert best_seconds(costs, sequences) == pytest.approx(best)


@only("rates5-1")
@pytest.mark.parametrize(
    ("rates", "sequences"),
    [({}, 8), ({0: 2.57}, 8), ({2: 12.53}, 5), ({1: math.inf}, 9), ({0: 5.42, 2: 2.57}, 12), ({}, 1)],
)
def test_plans_are_near_the_best_of_all_strategies(rates: dict[int, float], sequences: int) -> None:
    costs = priced.costs(4, priced.mixed(), hg.Health(rates))
    plan = hg.plan(costs, hg.Workload(sequences=sequences, length=LENGTH), streaming=False)
    found = costs.pipelines_end(plan.strategy, plan.assignment)
    assert found <= 1.02 * best_seconds(costs, sequences)


def test_what_runs_goes_on_where_plans_are_nearly_equal() -> None:
    costs = priced.costs(4, priced.cluster(4), hg.Health({1: 1.5}))
    workload = hg.Workload(sequences=16, length=LENGTH)
    before = hg.plan(priced.costs(4, priced.cluster(4)), workload, streaming=False)
    after = hg.plan(costs, workload, "straggler", running=before)
    free = hg.plan(costs, workload, "straggler")
    assert after.moved_bytes <= moved_bytes(costs, before.home, free.home)
    assert after.seconds <= free.seconds * 1.021


@pytest.mark.parametrize("rate", [2.57, math.inf])
def test_owners_under_a_running_strategy_do_not_depend_on_todays_health(rate: float) -> None:
    costs = priced.costs(4, priced.cluster(4), hg.Health({1: rate}), home=hg.Home(rule="auto"))
    found = hg.plan(costs, hg.Workload(sequences=16, length=LENGTH), running="4*<tp1,pp1>", deadline_s=0.0)
    assert found.moved_bytes == moved_bytes(costs, hg.Home(), found.home) > 0


def test_moved_bytes_are_counted_for_each_bucket() -> None:
    costs = priced.costs(4, priced.cluster(2))
    before, layers = hg.Home((1, 0)), [bucket for bucket in costs.buckets if bucket.size == 1000]
    for moved in ([layers[0]], layers[1:], layers):
        after = hg.Home((1, 0), buckets={bucket.name: (0.0, 1.0) for bucket in moved})
        assert moved_bytes(costs, before, after) == 12 * 1000 * len(moved)
    sgd = Costs(costs.profile, costs.cluster, state_bytes=4)
    assert moved_bytes(sgd, before, hg.Home((0, 1))) == 4 * sum(bucket.size for bucket in costs.buckets)


def test_varying_lengths_get_candidates_that_take_the_longest() -> None:
    costs = priced.costs(3, priced.cluster(2, 1), hg.Health({1: 2.0}))
    workload = hg.Workload(lengths=[[3000, *[200] * 5], [400] * 8])
    plan = hg.plan(costs, workload, streaming=False)
    assert plan.strategy == plan.strategies[0]
    limits = [costs.changed(home=plan.home).pipeline(p).max_len for p in plan.strategy.pipelines]
    assert max(limits) >= 3000
    assert sorted(i for p in plan.assignment.micro_batches for m in p for i in m) == list(range(6))
    assert plan.bound <= plan.seconds


def test_a_plan_explains_itself() -> None:
    costs = priced.costs(4, priced.mixed(), hg.Health({3: math.inf}))
    text = hg.plan(costs, hg.Workload(sequences=8, length=LENGTH)).explain()
    for words in ("8 sequences of 700 tokens on 4 devices", "above the bound", "idle: 3 (1 lost)", "memory:", "state:"):
        assert words in text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: priced.costs(4, priced.cluster(2), hg.Health({0: math.inf, 1: math.inf})), "all devices are lost"),
        (lambda: priced.costs(4, priced.cluster(2), elements=10**9), "nothing fits"),
        (
            lambda: priced.costs(4, priced.mixed(), hg.Health({2: math.inf, 3: math.inf})).changed(
                home=hg.Home(copies=2)
            ),
            "2 copies of the state need different nodes, but only node 0 is running",
        ),
        (
            lambda: priced.costs(4, priced.cluster(2), hg.Health({1: math.inf}), home=hg.Home(copies=2)),
            "2 copies of the state need different ranks, but only rank 0 is running",
        ),
        (
            lambda: priced.costs(
                4, priced.mixed(), hg.Health({1: math.inf}), home=hg.Home(copies=2, nodes=(0, 1, 0, 0))
            ),
            "2 copies of the state need different nodes, but only node 0 is running",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(make: object, words: str) -> None:
    with pytest.raises(hg.Unsupported, match=words):
        hg.plan(make(), hg.Workload(sequences=4, length=LENGTH))


@pytest.mark.parametrize("lengths", [None, [[900, 200, 40], [300, 300, 300]]])
def test_better_plans_are_reported_during_the_search(lengths: list[list[int]] | None) -> None:
    told: list[tuple[float, str]] = []
    work = hg.Workload(8, LENGTH) if lengths is None else hg.Workload(lengths=lengths)
    costs = priced.costs(4, priced.cluster(2, 1), hg.Health({1: 1.5}))
    plan = hg.plan(costs, work, improved=lambda seconds, origin: told.append((seconds, origin)), streaming=False)
    seconds = [found for found, _ in told]
    assert seconds == sorted(set(seconds), reverse=True)
    assert seconds[-1] == pytest.approx(plan.seconds, rel=0.01)
    assert all(hg.Strategy.parse(text, 4) for _, text in told)


def test_an_unknown_method_is_refused() -> None:
    costs = priced.costs(4, priced.cluster(2))
    with pytest.raises(ValueError, match="use 'auto', 'metis', 'mixed', 'search', 'straggler'"):
        hg.plan(costs, hg.Workload(sequences=4, length=LENGTH), "best")  # pyrefly: ignore[bad-argument-type]


def test_a_pipeline_across_a_slow_link_is_taken_where_stages_own_what_they_use() -> None:
    """With equal owners, pull and push would take longer than the slow devices help; with these they cross no link."""
    link = Interconnect(1e8, 1e-5)
    types = {"fast": DeviceType(2e15, int(8e9), 1e12), "slow": DeviceType(1e15, int(8e9), 1e12)}
    cluster = Cluster.of(types, tuple(Node(name, 2, priced.FAST, link) for name in types))
    costs = priced.costs(6, cluster, elements=1_000_000)
    found = hg.plan(costs, hg.Workload(sequences=16, length=LENGTH), streaming=False)
    assert found.strategy == hg.Strategy.parse("<[0]x5,[2]x1> + <[1]x5,[3]x1>", 6)
    bubbles = hg.plan(costs, hg.Workload(sequences=16, length=LENGTH), schedules=("1f1b", "zb-h1"), streaming=False)
    assert bubbles.seconds <= found.seconds
    assert bubbles.strategy.schedule == "zb-h1"
    assert found.home.buckets["layer.5"] == (0, 0, 1, 1)


@pytest.mark.parametrize("method", ["auto", "mixed"])
def test_a_pipeline_that_fits_only_if_stages_own_what_they_use_is_found(method: Method) -> None:
    """If all ranks shared the state, weights and gradients on their way would need more memory."""
    node = Node("fast", 2, priced.FAST, Interconnect(1e8, 1e-5), count=2)
    cluster = Cluster.of({"fast": DeviceType(1e15, 80_000_000, 1e12)}, (node,))
    costs = priced.costs(8, cluster, elements=1_000_000)
    strategy = hg.Strategy.parse("<tp2,pp2>", 8)
    assignment, _ = share_out(costs, strategy, [LENGTH] * 16, 1)
    by_hand = settle(costs, strategy, assignment, "", 0.0)
    assert isinstance(by_hand, PricedPlan)
    found = hg.plan(costs, hg.Workload(sequences=16, length=LENGTH), method, streaming=False)
    assert found.seconds <= simulated(costs, by_hand).seconds * (1 + 1e-9)


def test_such_a_pipeline_is_found_for_sequences_of_varying_lengths() -> None:
    node = Node("fast", 2, priced.FAST, Interconnect(1e8, 1e-5), count=2)
    cluster = Cluster.of({"fast": DeviceType(1e15, 80_000_000, 1e12)}, (node,))
    costs = priced.costs(8, cluster, elements=1_000_000)
    workload = hg.Workload(lengths=[[200] * 12 + [300] * 4])
    by_hand = MiniBatchPrices(costs, workload.batches).settle(hg.Strategy.parse("<tp2,pp2>", 8), "")
    assert isinstance(by_hand, PricedPlan)
    assert by_hand.home.buckets
    found = hg.plan(costs, workload, "mixed", streaming=False)
    assert found.seconds <= by_hand.seconds
    owned = costs.changed(home=found.home)
    walked = [each.total for each in owned.memory(found.strategy, found.assignment)]
    assert all(size <= costs.memory_of(rank) for rank, size in enumerate(walked))


def test_metis_walks_its_space_in_the_memory_aware_order() -> None:
    costs = priced.costs(6, priced.mixed())
    walked = staged(costs, 8, LENGTH, "memory")
    found = hg.plan(costs, hg.Workload(sequences=8, length=LENGTH), "metis")
    assert found.strategy in [each.strategy for each in walked]


@thorough
def test_types_may_be_measured_with_different_kinds_of_stages() -> None:
    profiles = [profile_of(5, "fast", (1,), False, 1.0), profile_of(5, "slow", (1, 2), True, 1.0)]
    costs = Costs(hg.Profile.merge(profiles), priced.mixed())
    for workload in (hg.Workload(sequences=8, length=LENGTH), hg.Workload(lengths=[[3000, *[LENGTH] * 8]])):
        plan = hg.plan(costs, workload)
        assert all(stage.tp == 1 for p in plan.strategy.pipelines for stage in p.stages if 0 in stage.devices)


def test_what_is_no_deadline_and_no_strategy_is_refused() -> None:
    costs = priced.costs(4, priced.cluster(2))
    workload = hg.Workload(sequences=4, length=LENGTH)
    for deadline in (-1.0, math.nan, "1"):
        with pytest.raises(ValueError, match="give at least 0 seconds"):
            hg.plan(costs, workload, deadline_s=deadline)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="no rank"):
        hg.plan(costs, workload, running="3*<tp1,pp1>")
    with pytest.raises(ValueError, match="give a plan, a strategy or its text"):
        hg.plan(costs, workload, running=7)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="strategy text:"):
        hg.plan(costs, workload, running="abc")
    running = "2*<tp1,pp1>"
    assert (
        hg.plan(costs, workload, running=running, deadline_s=0.0).strategy
        == hg.plan(costs, workload, running=hg.Strategy.parse(running, 4), deadline_s=0.0).strategy
    )


def test_the_published_grouping_plans_too_and_ours_is_no_worse() -> None:
    pytest.importorskip("cvxpy")
    pytest.importorskip("pyscipopt")
    costs = priced.costs(4, priced.mixed())
    workload = hg.Workload(sequences=8, length=LENGTH)
    published = hg.plan(costs, workload, "mixed", solver="scip")
    assert {published.origin, *(rival.origin for rival in published.rivals)} == {"scip"}
    assert hg.plan(costs, workload, "mixed").seconds <= published.seconds * 1.003


def test_a_solver_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    costs = priced.costs(4, priced.mixed())
    with pytest.raises(hg.Unsupported, match=r"(?s)SCIP is required, but not installed.*hydragraph\[exact\]"):
        hg.plan(costs, hg.Workload(sequences=8, length=LENGTH), "mixed", solver="scip")


def test_a_solver_is_for_mixed_types() -> None:
    costs = priced.costs(4, priced.mixed())
    with pytest.raises(ValueError, match="use it with method=\"mixed\", not 'auto'"):
        hg.plan(costs, hg.Workload(sequences=8, length=LENGTH), solver="scip")


def test_no_simple_plan_is_better() -> None:
    costs = priced.costs(6, priced.mixed(), elements=300_000)
    plan = hg.plan(costs, hg.Workload(sequences=8, length=LENGTH), "mixed")
    for text in ("<[0]x6> + <[1]x6> + <[2]x6> + <[3]x6>", "<[0,1]x6> + <[2,3]x6>", "<[0]x3,[2]x3> + <[1]x3,[3]x3>"):
        strategy = hg.Strategy.parse(text, 6)
        for together in (1, 2, 4):
            assignment, _ = share_out(costs, strategy, [LENGTH] * 8, together)
            assert plan.seconds <= costs.simulate(strategy, assignment).seconds * 1.003


@pytest.mark.parametrize("deadline_s", [None, 0.0])
def test_degrees_that_cut_the_query_heads_but_not_those_of_keys_are_left_out(deadline_s: float | None) -> None:
    cut = ShardRule(0, (8,), 125, heads=True)  # 8 key/value heads of 24 query heads
    layers = tuple(Bucket(f"layer.{i}", (Parameter(f"k.{i}", (1000,), rule=cut),), (f"layer.{i}",)) for i in range(4))
    ends = tuple(Bucket(name, (Parameter(name, (4000,)),), (name,)) for name in ("embed", "head"))
    sizes = ModelSizes(
        ("embed", *(w.name for w in layers), "head"), (ends[0], *layers, ends[1]), priced.HIDDEN, 4, (24,)
    )
    assert [tp for tp in range(1, 25) if sizes.allows(tp)] == [1, 2, 4, 8, 24]
    measured = priced.profile(4, "fast")
    pieces = {**measured.pieces, StageKind(3): measured.pieces[StageKind(2)]}
    costs = Costs(replace(measured, pieces=pieces, sizes=sizes), priced.cluster(6, 3))
    plan = hg.plan(costs, hg.Workload(sequences=12, length=LENGTH), deadline_s=deadline_s)
    every = [plan.strategy, *(rival.strategy for rival in plan.rivals)]
    assert all(stage.tp != 3 for s in every for pipeline in s.pipelines for stage in pipeline.stages)


def test_a_search_without_time_has_a_plan_like_a_simple_one() -> None:
    costs = priced.costs(6, priced.mixed())
    workload = hg.Workload(sequences=8, length=LENGTH)
    hurried = hg.plan(costs, workload, deadline_s=0.0)
    simulated = costs.changed(home=hurried.home).simulate(hurried.strategy, hurried.assignment).seconds
    assert hurried.seconds == pytest.approx(simulated, rel=0.05)
    _, last = share_out(costs, hg.Strategy.parse("<[0]x6> + <[1]x6> + <[2]x6> + <[3]x6>", 6), [LENGTH] * 8, 1)
    assert costs.pipelines_end(hurried.strategy, hurried.assignment) <= last * (1 + 1e-9)


@only("rates0-96548938")
@pytest.mark.parametrize(("rates", "memory"), [({0: 5.42}, 96_548_938), ({0: 5.42, 4: 5.42}, 141_261_725)])
def test_plans_that_fit_only_where_first_stages_own_less_are_found(
    rates: dict[int, float], memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = priced.cluster(8, 4)
    small = replace(cluster, devices=tuple(replace(device, memory_bytes=memory) for device in cluster.devices))
    costs = priced.costs(12, small, hg.Health(rates), elements=1_000_000)
    work = hg.Workload(sequences=8, length=2000)
    found = hg.plan(costs, work, method="straggler").seconds
    monkeypatch.setattr(planning, "TIGHT", math.inf)
    assert found < 0.95 * hg.plan(costs, work, method="straggler").seconds


@pytest.mark.parametrize("work", [hg.Workload(sequences=24, length=32), hg.Workload(lengths=[[32] * 20 + [64, 16]])])
def test_a_deterministic_plan_computes_one_sequence_at_a_time_under_one_degree(work: hg.Workload) -> None:
    nodes = tuple(Node("fast", devices, priced.FAST, priced.SLOW) for devices in (1, 2))
    costs = priced.costs(4, Cluster.of({"fast": DeviceType(1e15, 10**9, 1e12)}, nodes))
    found = hg.plan(costs, work, deadline_s=0.0, deterministic=True)
    assert {len(m) for p in found.assignment.micro_batches for m in p} == {1}
    assert len({stage.tp for p in found.strategy.pipelines for stage in p.stages}) == 1
    run = costs.changed(home=found.home).simulate(found.strategy, found.assignment).seconds
    assert found.seconds == pytest.approx(run)
    assert found.seconds > 1.05 * hg.plan(costs, work, deadline_s=0.0).seconds
    shown = [rival.settled for rival in found.rivals if rival.settled is not None and math.isfinite(rival.seconds)]
    assert all(len(m) == 1 for each in shown for p in each.assignments[0].micro_batches for m in p)


def test_plans_of_varying_lengths_are_compared_under_the_given_rank_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (Node("slow", 2, priced.FAST, priced.SLOW), Node("fast", 2, priced.FAST, priced.SLOW))
    costs = priced.costs(4, Cluster.of(dict(priced.mixed().types), nodes))

    def otherwise(_: Costs, each: PricedPlan) -> PricedPlan:
        return replace(each, by_batch=tuple(1 / seconds for seconds in each.by_batch))

    monkeypatch.setattr(planning, "AGAIN", math.inf, raising=False)
    monkeypatch.setattr(planning, "simulated", otherwise)
    found = hg.plan(costs, hg.Workload(lengths=[[16, LENGTH]]), "mixed", streaming=False)
    assert found.rivals
    assert all(found.seconds <= rival.seconds for rival in found.rivals if rival.settled is not None)
    assert "less time" not in found.explain()
