"""The choice of a home against brute force over all homes of a small world, with and without tight memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.home_candidates import subsets
from hydragraph.cost.home_choice import HomeQuestion, choose_home, expected_s, numbers
from hydragraph.cost.traffic import RankLinks
from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import home as home_layout
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.home import AUTO, Home
from hydragraph.spec.strategy import Strategy
from tests.cost.priced import cluster, costs
from tests.thorough import thorough

LAYERS, RANKS = 2, 4
BYTES = Interconnect(1e6, 0.0)  # on which latency does not decide
CUT = 8 / 1000  # of the smallest bucket: cuts are rounded to 8 elements


def world(per_node: int = 4, elements: int = 1000) -> Costs:
    return costs(LAYERS, cluster(RANKS, per_node, outer=BYTES), elements=elements)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Draw pipelines over shuffled ranks: degrees 1 and 2, one or two stages, idle ranks."""
    ranks = draw(st.permutations(range(RANKS)))[: draw(st.integers(1, RANKS))]
    pipelines: list[str] = []
    while ranks:
        stages = []
        for layers in draw(st.sampled_from([(2,), (1, 1)])):
            tp = draw(st.sampled_from([1, 2] if len(ranks) > 1 else [1])) if ranks else 0
            if tp:
                stages.append((list(ranks[:tp]), layers))
                ranks = ranks[tp:]
        if sum(layers for _, layers in stages) < LAYERS:
            stages = [(stages[0][0], LAYERS)]
        pipelines.append("<" + ",".join(f"{devices}x{n}".replace(" ", "") for devices, n in stages) + ">")
    return " + ".join(pipelines)


def exchanged_s(owned: Costs, strategy: Strategy) -> dict[str, float]:
    """Return the seconds of the slowest rank for every bucket's exchanges, by what the simulation moves."""
    work = owned.work(strategy, Assignment.even([1] * len(strategy.pipelines), 64))
    roads = RankLinks(owned.cluster, np.arange(owned.ranks))
    return {
        bucket.name: sum(
            roads.slowest_s(moved)
            for moved in (
                work.moved(Op.PULL, bucket.name),
                work.moved(Op.PUSH, bucket.name),
                work.handed_on(bucket.name),
            )
        )
        for bucket in owned.buckets
    }


def brute_force(priced: Costs, strategies: list[Strategy], weights: list[float], room: list[float] | None) -> float:
    """Return the least expected seconds of any home that gives each bucket to a set of ranks in equal parts."""
    every = subsets(priced.ranks)
    table = []
    for parts in every:
        owned = priced.changed(home=Home(tuple(parts)))
        rows = [exchanged_s(owned, strategy) for strategy in strategies]
        table.append([sum(w * row[b.name] for w, row in zip(weights, rows, strict=True)) for b in priced.buckets])
    seconds = np.array(table)
    if room is None:
        return float(seconds.min(axis=0).sum())
    owning = np.array([parts / parts.sum() for parts in every])
    choices = np.array(list(product(range(len(every)), repeat=len(priced.buckets))))
    total = sum(seconds[choices[:, b], b] for b in range(len(priced.buckets)))
    owned = sum(owning[choices[:, b]] * bucket.size for b, bucket in enumerate(priced.buckets))
    return float(np.min(total, where=(owned <= np.array(room)).all(axis=1), initial=np.inf))


def expected(priced: Costs, home: Home, strategies: list[Strategy], weights: list[float]) -> float:
    owned = priced.changed(home=home)
    return sum(w * sum(exchanged_s(owned, s).values()) for w, s in zip(weights, strategies, strict=True))


def asked(priced: Costs, strategies: list[Strategy], home: Home = AUTO, **more: object) -> HomeQuestion:
    given = (priced.outline, priced.buckets, tuple(strategies), priced.cluster, home, priced.sizes.itemsize)
    return HomeQuestion(*given, **more)  # pyrefly: ignore[bad-argument-type]


@settings(max_examples=max(6, settings.default.max_examples // 80), deadline=None, derandomize=True)
@given(st.lists(texts(), min_size=1, max_size=3, unique=True), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_no_home_is_expected_to_exchange_less(drawn: list[str], per_node: int, often: int) -> None:
    priced = world(per_node)
    strategies = [Strategy.parse(text, LAYERS) for text in drawn]
    weights = [float(often), *[1.0] * (len(drawn) - 1)]
    weights = [w / sum(weights) for w in weights]
    question = asked(priced, strategies, weights=tuple(weights))
    home = choose_home(question)
    found = expected(priced, home, strategies, weights)
    assert found == pytest.approx(expected_s(question, home))
    assert found <= brute_force(priced, strategies, weights, None) * (1 + CUT), home


def every_strategy(most: int = 0, left: int = RANKS) -> Iterator[tuple[int, ...]]:
    """Yield pipelines on at most `left` ranks, each as the index of its form in `FORMS`."""
    yield ()
    for form in range(most, len(FORMS)):
        if (size := sum(FORMS[form])) <= left:
            yield from ((form, *others) for others in every_strategy(form, left - size))


FORMS = ((1,), (2,), (4,), (1, 1), (1, 2), (2, 1), (2, 2))  # degrees of stages


def text_of(forms: tuple[int, ...]) -> str:
    ranks = iter(range(RANKS))
    return " + ".join(
        "<" + ",".join(f"{[next(ranks) for _ in range(tp)]}x{LAYERS // len(FORMS[f])}" for tp in FORMS[f]) + ">"
        for f in forms
    ).replace(", ", ",")


@thorough
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_of_no_strategy_on_four_ranks_another_home_exchanges_less(per_node: int) -> None:
    priced = world(per_node, elements=10**8)  # within a node, latency decides on small buckets
    found = [Strategy.parse(text_of(forms), LAYERS) for forms in every_strategy() if forms]
    assert len(found) == 19
    for strategy in found:
        home = choose_home(asked(priced, [strategy]))
        least = brute_force(priced, [strategy], [1.0], None)
        assert expected(priced, home, [strategy], [1.0]) <= least * (1 + CUT) + 1e-12, strategy


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(texts(), min_size=1, max_size=2, unique=True), st.permutations([0.11, 0.21, 0.31, 0.56]))
def test_within_tight_memory_neither(drawn: list[str], rooms: list[float]) -> None:
    priced = world(per_node=1)  # by bytes alone: latency is not linear in parts
    strategies = [Strategy.parse(text, LAYERS) for text in drawn]
    weights = [1 / len(drawn)] * len(drawn)
    elements = sum(bucket.size for bucket in priced.buckets)
    room = [elements * part for part in rooms]
    home = choose_home(asked(priced, strategies, room=tuple(room)))
    owned = priced.changed(home=home)
    for rank, most in enumerate(room):
        assert owned.owned(rank) <= most + 8 * len(priced.buckets), f"rank {rank} under {home}"
    # Mixed parts are priced by the layouts they have; cuts at other elements than candidates' differ by a little.
    assert expected(priced, home, strategies, weights) <= brute_force(priced, strategies, weights, room) * 1.05 + 1e-9


def test_by_hand() -> None:
    def chosen(*strategies: str, ranks: int = 4, home: Home = AUTO) -> Home:
        priced = costs(4, cluster(ranks, outer=BYTES))
        return choose_home(asked(priced, [Strategy.parse(text, 4) for text in strategies], home))

    halves = {"embed": (1, 0), "layer.0": (1, 0), "layer.1": (1, 0)}
    halves |= {"layer.2": (0, 1), "layer.3": (0, 1), "head": (0, 1)}
    assert chosen("<[0]x2,[1]x2>", ranks=2) == Home(buckets=halves)
    assert chosen("<[0]x2,[1]x2> + <[2]x2,[3]x2>") == Home(buckets={name: two * 2 for name, two in halves.items()})
    assert chosen("4*<tp1,pp1>") == Home()
    assert chosen("<[0]x4>") == Home([1, 0, 0, 0])  # idle ranks do not own state
    # Shares divide the state among owners; buckets given by the user stay.
    assert chosen("4*<tp1,pp1>", home=Home([1, 2, 3, 4], rule="auto")) == Home([1, 2, 3, 4])
    assert chosen("2*<tp1,pp1>", home=Home(buckets={"embed": [0, 0, 0, 1]}, rule="stages")) == Home(
        buckets={"embed": [0, 0, 0, 1]}
        | {n: [1, 1, 0, 0] for n in ("layer.0", "layer.1", "layer.2", "layer.3", "head")}
    )
    assert chosen("<tp1,pp4>", home=Home([3, 1, 1, 1])) == Home([3, 1, 1, 1])  # chosen by the user


@settings(max_examples=10, deadline=None, derandomize=True)
@given(texts(), st.sampled_from([1, 2]))
def test_a_second_owner_is_on_another_node(text: str, per_node: int) -> None:
    priced = world(per_node)
    home = choose_home(asked(priced, [Strategy.parse(text, LAYERS)], Home(copies=2, rule="auto")))
    nodes = [rank // per_node for rank in range(RANKS)]
    placed = home.on(nodes)
    for bucket in priced.buckets:
        layout = home_layout(bucket.size, range(RANKS), placed.shares_of(bucket.name), 2, nodes=placed.nodes)
        owners = np.zeros((2, bucket.size), int)
        for rank, lo, hi, copy in zip(layout.rank, layout.lo, layout.hi, layout.copy, strict=True):
            owners[copy, lo:hi] = nodes[rank]
        assert (owners[0] != owners[1]).all(), bucket.name
    # A stage within one node has a copy on that node, so it does not pull.
    strategy = Strategy.parse(text, LAYERS)
    if len(strategy.pipelines) == 1 and all(stage.tp == 1 for stage in strategy.pipelines[0].stages):
        work = priced.changed(home=placed).work(strategy, Assignment.even([1], 64))
        assert all(work.moved(Op.PULL, bucket.name).total == 0 for bucket in priced.buckets)


def test_shares_read_as_whole_numbers_where_they_are() -> None:
    assert numbers(np.array([0.25, 0.5, 0.25])) == (1, 2, 1)
    assert numbers(np.array([0.3, 0.7, 0.0])) == pytest.approx((0.3 / 0.7, 1, 0))


def test_a_slow_rank_owns_less_and_a_lost_one_nothing() -> None:
    priced = world()
    strategies = [Strategy.parse("2*<tp1,pp1>", LAYERS)]
    assert choose_home(asked(priced, strategies, health=hg.Health({1: 2.0}))) == Home([2, 1, 0, 0])
    assert choose_home(asked(priced, strategies, health=hg.Health({0: float("inf")}))) == Home([0, 1, 0, 0])
