from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.planner.generators.malleus_autohet import STRAGGLER, search
from hydragraph.planner.generators.memory_pooling import Pool, Stages, pooled, roomiest
from hydragraph.planner.price_candidate import PricedPlan, placed_candidates, settle, share_out
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from tests.cost import priced
from tests.planner.promises import LENGTH
from tests.thorough import only

PULLED = 1 / 3
SEQUENCES = 16


@st.composite
def stages(draw: st.DrawFn) -> tuple[int, float, float, list[np.ndarray], np.ndarray, np.ndarray]:
    """Return layers, a bound, a price, seconds and bytes [S, O], ranks and limits [S]."""
    count = draw(st.integers(1, 3))
    shape = (count, draw(st.integers(1, 2)))
    table = lambda of: np.array([draw(of) for _ in range(shape[0] * shape[1])]).reshape(shape)  # noqa: E731
    tables = [table(st.floats(0.1, 3.0)) for _ in range(5)]
    ranks = np.array([draw(st.integers(1, 2)) for _ in range(count)])
    limits = np.array([draw(st.floats(1.0, 20.0)) for _ in range(count)])
    layers = draw(st.integers(count, 6))
    return layers, draw(st.floats(1.0, 12.0)), draw(st.sampled_from([0.0, 0.05, 0.5])), tables, ranks, limits


def room_of(
    layers: int,
    split: tuple[int, ...],
    ways: tuple[int, ...],
    tables: list[np.ndarray],
    ranks: np.ndarray,
    limits: np.ndarray,
) -> tuple[float, float, list[float]]:
    """Return the room that is left, the most bytes over the limit, and the seconds of stages."""
    layer, extra, fixed, each, gradients = tables
    state, whole, ends = 10.0, 0.7, 0.3
    room = 0.0
    over = -np.inf
    seconds = []
    behind = layers
    for s, (n, o) in enumerate(zip(split, ways, strict=True)):
        behind -= n
        seconds.append(extra[s, o] + n * layer[s, o])
        need = fixed[s, o] + n * each[s, o]
        over = max(over, need - limits[s])
        weights = PULLED * (whole * (layers - n) + ends)
        later = (1 - PULLED) * (whole * behind + ends) if s < len(split) - 1 else 0.0
        everything = (1 - PULLED) * (whole * layers + ends)
        one = (limits[s] - need) / (state + weights + later)
        two = (limits[s] - (1 - PULLED) * n * gradients[s, o]) / (state + weights + everything)
        room += ranks[s] * max(0.0, min(one, two))
    return room, over, seconds


@settings(max_examples=max(12, settings.default.max_examples // 4))
@given(stages())
def test_no_layers_leave_more_room_within_the_bound(
    drawn: tuple[int, float, float, list[np.ndarray], np.ndarray, np.ndarray],
) -> None:
    layers, bound, price, tables, ranks, limits = drawn
    pool = Pool(layers, 10.0, 0.7, 0.3, PULLED, 0.0)
    layer, extra, fixed, each, gradients = tables
    room, found, ways = roomiest(pool, Stages(layer, extra, fixed, each, gradients, ranks, limits), bound, price)
    best = -np.inf
    count = len(ranks)
    for split in product(range(1, layers + 1), repeat=count):
        if sum(split) == layers:
            for chosen in product(range(tables[0].shape[1]), repeat=count):
                left, over, seconds = room_of(layers, split, chosen, tables, ranks, limits)
                if over <= 0 and max(seconds) <= bound * (1 + 1e-9):
                    best = max(best, left - price * sum(seconds))
    if best == -np.inf:
        assert room == -np.inf
        return
    assert sum(found) == layers
    left, over, seconds = room_of(layers, tuple(found), tuple(ways), tables, ranks, limits)
    assert over <= 0
    assert max(seconds) <= bound * (1 + 1e-9)
    assert room == pytest.approx(left)
    assert left - price * sum(seconds) == pytest.approx(best)


@only("400000-157772181")
@pytest.mark.parametrize(
    ("elements", "memory"), [(40_000, 26_469_779), (40_000, 33_087_224), (400_000, 126_217_744), (400_000, 157_772_181)]
)
def test_where_owners_give_way_stages_are_quicker_and_fit(elements: int, memory: int) -> None:
    nodes = (Node("fast", 4, priced.FAST, priced.SLOW, cards=4),)
    costs = priced.costs(24, Cluster.of({"fast": DeviceType(1e15, memory, 1e12)}, nodes), elements=elements)
    gained = 0
    for found in search(costs, SEQUENCES, LENGTH, STRAGGLER):
        for better in pooled(costs, found, SEQUENCES * LENGTH):
            gained += better.seconds < found.seconds
            strategy = placed_candidates([better])[0].strategy
            assert all(sum(stage.layers for stage in pipeline.stages) == 24 for pipeline in strategy.pipelines)
            assignment, last = share_out(costs, strategy, [LENGTH] * SEQUENCES, better.together)
            one = settle(costs, strategy, assignment, "straggler", last)
            assert isinstance(one, PricedPlan)
            held = [each.total for each in costs.changed(home=one.home).memory(strategy, assignment)]
            assert max(held) <= memory
    assert gained


def test_where_memory_is_plenty_layers_stay_as_they_are() -> None:
    costs = priced.costs(6, priced.cluster(4))
    for each in search(costs, SEQUENCES, LENGTH, STRAGGLER):
        assert not list(pooled(costs, each, SEQUENCES * LENGTH))
