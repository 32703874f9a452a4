import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from hydragraph.ir import layout as layouts
from hydragraph.planner.state_shares import filled, filled_apart, fraction_of, home_of
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from tests.cost import priced

RANKS = st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 1.0)), min_size=1, max_size=6)


@given(RANKS)
def test_water_filling_is_the_linear_programs_optimum(ranks: list[tuple[float, float]]) -> None:
    seconds = np.array([k for k, _ in ranks])
    room = np.array([r for _, r in ranks])
    found = filled(seconds, room)
    if room.sum() < 1:
        assert found is None
        return
    count = len(ranks)
    limits = np.hstack([np.diag(seconds), -np.ones((count, 1))])
    solved = linprog(
        [*[0.0] * count, 1.0],
        limits,
        np.zeros(count),
        np.array([[*[1.0] * count, 0.0]]),
        [1.0],
        bounds=[*((0, r) for r in room), (0, None)],
    )
    assert found is not None
    assert found.sum() == pytest.approx(1)
    assert (found <= room + 1e-6).all()
    assert (found * seconds).max() == pytest.approx(solved.fun, rel=1e-6, abs=1e-9)


@given(RANKS.filter(lambda ranks: len(ranks) > 1), st.data())
def test_two_copies_fill_as_the_linear_program_in_which_no_node_has_more_than_half(
    ranks: list[tuple[float, float]], data: st.DataObject
) -> None:
    count = len(ranks)
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    seconds = np.array([k for k, _ in ranks])
    room = np.array([r for _, r in ranks])
    found = filled_apart(seconds, room, nodes)
    of_node = [[float(node == each) for each in nodes] for node in range(3)]
    solved = linprog(
        [*[0.0] * count, 1.0],
        np.vstack([np.hstack([np.diag(seconds), -np.ones((count, 1))]), [[*row, 0.0] for row in of_node]]),
        [*[0.0] * count, *[0.5] * 3],
        np.array([[*[1.0] * count, 0.0]]),
        [1.0],
        bounds=[*((0, r) for r in room), (0, None)],
    )
    if found is None:
        # To what a linear program's tolerance lets through.
        assert not solved.success or min(room.sum(), *(room @ (1 - np.array(row)) + 0.5 for row in of_node)) < 1 + 1e-6
        return
    assert found.sum() == pytest.approx(1)
    assert (found <= room + 1e-6).all()
    assert (np.array(of_node) @ found <= 0.5 + 1e-9).all()
    assert (found * seconds).max() == pytest.approx(solved.fun, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("count", [(4, 2), (1, 3), (5, 1)])
def test_what_two_copies_on_unequal_nodes_take_is_what_ranks_own(count: tuple[int, int]) -> None:
    """The node with less devices, behind a slow link, owns a whole copy all the same: a third node is missing."""
    types = {"fast": DeviceType(1e15, 10**9, 1e12)}
    slow = Interconnect(1e6, 1e-6)
    nodes = (Node("fast", count[0], priced.FAST, priced.SLOW), Node("fast", count[1], priced.FAST, slow))
    costs = priced.costs(4, Cluster.of(types, nodes), elements=100_000)
    ranks = sum(count)
    home = home_of(costs, Strategy.parse("<[0]x4>", 4), [1.0] * ranks, Home(copies=2))
    assert home is not None
    placed = home.on([device.node for device in costs.cluster.devices])
    layout = layouts.home(96_000, range(ranks), placed.shares, 2, nodes=placed.nodes)
    for rank in range(ranks):
        owned = sum(hi - lo for r, lo, hi in zip(layout.rank, layout.lo, layout.hi, strict=True) if r == rank)
        assert owned / 96_000 == pytest.approx(fraction_of(home, rank, ranks), abs=0.02)


def test_equal_ranks_own_equal_parts() -> None:
    costs = priced.costs(4, priced.cluster(4))
    strategy = Strategy.parse("4*<tp1,pp1>", layers=4)
    assert home_of(costs, strategy, [1.0] * 4, Home()) == Home()


def test_a_slow_rank_owns_less_and_a_lost_or_idle_one_nothing() -> None:
    costs = priced.costs(4, priced.cluster(4), Health({1: 5.0, 3: float("inf")}))
    strategy = Strategy.parse("<[0]x4> + <[1]x4>", layers=4)
    home = home_of(costs, strategy, [1.0] * 4, Home())
    assert home is not None
    owned = [fraction_of(home, rank, 4) for rank in range(4)]
    assert owned[0] > owned[1] > 0
    assert owned[2] == owned[3] == 0
    assert sum(owned) == pytest.approx(1)


def test_idle_ranks_own_what_others_have_no_room_for() -> None:
    costs = priced.costs(4, priced.cluster(2))
    strategy = Strategy.parse("<[0]x4>", layers=4)
    home = home_of(costs, strategy, [0.5, 1.0], Home())
    assert home is not None
    assert fraction_of(home, 1, 2) >= 0.5
    assert home_of(costs, strategy, [0.2, 0.3], Home()) is None


@given(st.lists(st.floats(0.02, 0.4), min_size=3, max_size=40), st.floats(1.0 + 1e-6, 1.2))
def test_shares_that_are_rounded_stay_within_rooms_that_just_suffice(rooms: list[float], more: float) -> None:
    costs = priced.costs(4, priced.cluster(len(rooms)))
    strategy = Strategy.parse("<[0]x4>", layers=4)
    room = [more * each / sum(rooms) for each in rooms]
    home = home_of(costs, strategy, room, Home())
    assert home is not None
    owned = [fraction_of(home, rank, len(rooms)) for rank in range(len(rooms))]
    assert sum(owned) == pytest.approx(1)
    assert all(part <= most * (1 + 1e-9) for part, most in zip(owned, room, strict=True))


def test_copies_have_owners_on_two_nodes_even_if_one_of_them_idles() -> None:
    costs = priced.costs(4, priced.mixed())
    strategy = Strategy.parse("<[0,1]x4>", 4)
    found = home_of(costs, strategy, [1.0] * 4, Home(copies=2))
    assert found is not None
    assert found.shares is None or (any(found.shares[:2]) and any(found.shares[2:]))
    alone = home_of(costs, strategy, [1.0] * 4, Home())
    assert alone is not None
    assert alone.shares == (1, 1, 0, 0)
    # Where the second node has no room for anything, there is no such home.
    assert home_of(costs, strategy, [1.0, 1.0, 0.0, 0.0], Home(copies=2)) is None
