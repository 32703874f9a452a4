"""State moves to where it pays, as far as memory allows, and in steps that no rank waits long for."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.train.stragglers.reshard_plan import StateCosts, best_shares, received, rehoming, stages

BUCKETS = [Bucket(f"layer.{i}", (Parameter(f"layer.{i}.w", (size,)),), ()) for i, size in enumerate((4000, 4000, 800))]
WHOLE = sum(bucket.size for bucket in BUCKETS)
COSTS = StateCosts(update_s=0.4, bytes_per_element=12, bytes_per_s=1e6)


@given(st.lists(st.sampled_from([1.0, 1.0, 2.57, 5.42, 12.53]), min_size=1, max_size=5), st.data())
def test_no_other_shares_end_sooner(rates: list[float], data: st.DataObject) -> None:
    """Against brute force: any share in tenths that fits takes at least as long, but for rounding."""
    ranks = len(rates)
    room = st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=ranks, max_size=ranks)
    free = data.draw(st.none() | room.filter(lambda each: sum(each) >= 1))
    health = Health(dict(enumerate(rates)))
    costs = StateCosts(0.4, 12, 1e6, None if free is None else [each * 12 * 1e6 for each in free])
    shares = best_shares(ranks, health, costs, 1e6)
    parts = [share / sum(shares) for share in shares]
    assert max(shares) == 1
    assert all(part <= most * 1.001 + 1e-9 for part, most in zip(parts, free or [1.0] * ranks, strict=True))
    ours = max(rate * part for rate, part in zip(rates, parts, strict=True))
    for tenths in itertools.product(range(11), repeat=ranks):
        if sum(tenths) == 10 and all(n / 10 <= most for n, most in zip(tenths, free or [1.0] * ranks, strict=True)):
            assert ours <= max(rate * n / 10 for rate, n in zip(rates, tenths, strict=True)) * 1.03 + 1e-9


def test_a_slow_rank_owns_less_where_steps_enough_are_to_come() -> None:
    health = Health({1: 5.0})
    found = rehoming(Home(), 4, BUCKETS, health, COSTS, steps=1000)
    assert found is not None
    assert found.home.shares == (1.0, 0.2, 1.0, 1.0)
    assert found.before_s == pytest.approx(0.4 / 4 * 5)
    assert found.after_s == pytest.approx(0.4 / 3.2, rel=0.01)
    assert found.moving_s == pytest.approx(max(received(Home(), found.home, 4, BUCKETS)) * 4e-6)
    assert "rank 1 (5.00x)" in found.why
    assert rehoming(Home(), 4, BUCKETS, health, COSTS, steps=0) is None
    assert rehoming(found.home, 4, BUCKETS, health, COSTS, steps=1000) is None, "the state is already there"
    assert rehoming(Home(), 4, BUCKETS, Health(), COSTS, steps=1000) is None, "nobody is slow"
    back = rehoming(found.home, 4, BUCKETS, Health(), COSTS, steps=1000)
    assert back is not None
    assert back.home.shares == (1.0,) * 4


@pytest.mark.parametrize(("rate", "shares"), [(2.57, (1.0, 0.39)), (5.42, (1.0, 0.18)), (12.53, (1.0, 0.0))])
def test_a_very_slow_rank_owns_nothing_rather_than_little(rate: float, shares: tuple[float, ...]) -> None:
    """Each bucket's messages wait for it, whatever it owns; but two copies have two owners."""
    costs = StateCosts(0.4, 12, 1e6, messages_s=0.01)
    found = rehoming(Home(), 2, BUCKETS, Health({1: rate}), costs, 1000)
    assert found is not None
    assert found.home.shares == shares
    twice = Home(copies=2, nodes=(0, 1))
    both = rehoming(twice, 2, BUCKETS, Health({1: rate}), costs, 1000)
    assert both is None or min(both.home.shares or (1,)) > 0


def test_memory_counts_before_speed() -> None:
    """A rank that has no room must give state away, however few steps are to come; two copies stay two."""
    home = Home(copies=2, nodes=(0, 1, 2))
    costs = StateCosts(0.4, 12, 1e6, free_bytes=[WHOLE * 12, WHOLE * 12, WHOLE * 12 * 0.25])
    found = rehoming(home, 3, BUCKETS, Health(), costs, steps=0)
    assert found is not None
    assert (found.home.copies, found.home.nodes) == (2, (0, 1, 2))
    layouts = HomeLayouts(found.home, 3)
    assert sum(layouts.of(bucket).local_size(2) for bucket in BUCKETS) <= WHOLE * 0.25 + 8 * len(BUCKETS)
    with pytest.raises(ValueError, match=r"the state takes .* GB, but the ranks have .* GB"):
        rehoming(home, 3, BUCKETS, Health(), StateCosts(0.4, 12, 1e6, [1e4] * 3), 100)
    with pytest.raises(ValueError, match=r"ranks \[2\] are lost"):
        rehoming(home, 3, BUCKETS, Health({2: math.inf}), COSTS, 100)


@given(st.data(), st.integers(2, 4), st.integers(1, 2), st.sampled_from([1, 500, 3000, 10**6]))
def test_the_way_is_in_bounded_steps(data: st.DataObject, ranks: int, copies: int, elements: int) -> None:
    share = st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=ranks, max_size=ranks)
    nodes = tuple(range(ranks)) if copies == 2 else None
    old, new = (Home(data.draw(share), copies, nodes=nodes) for _ in range(2))
    assume(received(old, new, ranks, BUCKETS) != [0] * ranks)
    way = [old, *stages(old, new, ranks, BUCKETS, elements)]
    assert way[-1] == new
    largest = max(max(received(old, new, ranks, [bucket])) for bucket in BUCKETS)
    for before, after in itertools.pairwise(way):
        assert max(received(before, after, ranks, BUCKETS)) <= max(elements, largest)
    if elements >= WHOLE:
        assert len(way) == 2


def test_other_copies_are_one_step() -> None:
    assert list(stages(Home(), Home(copies=2), 3, BUCKETS, 1)) == [Home(copies=2)]
