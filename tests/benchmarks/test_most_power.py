"""AutoHet's grouping: equal to brute force and to its published formulation, below its bound, on any kinds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.most_power import most_power, power_bound
from hydragraph.errors import Unsupported
from hydragraph.planner.exact.autohet_grouping import (
    EntityKind,
    Grouping,
    effective_power,
    most_power_by_scip,
    value_of,
)
from tests.thorough import thorough

GB = 1e9


def partitions(entities: list[int], groups: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yield every way to put entities into groups."""
    if not entities:
        yield [list(group) for group in groups]
        return
    first, rest = entities[0], entities[1:]
    for group in groups:
        group.append(first)
        yield from partitions(rest, groups)
        group.pop()
    yield from partitions(rest, [*groups, [first]])


def by_brute_force(kinds: list[EntityKind], micro_batches: int, least_memory: float) -> float:
    best = 0.0
    entities = [k for k, kind in enumerate(kinds) for _ in range(kind.count)]
    for groups in partitions(entities, []):
        counts = [tuple(group.count(k) for k in range(len(kinds))) for group in groups]
        held = [sum(kind.memory * n for kind, n in zip(kinds, group, strict=True)) for group in counts]
        if len(groups) <= micro_batches and min(held) >= least_memory:
            best = max(best, value_of(kinds, counts, micro_batches))
    return best


def sound(kinds: list[EntityKind], found: Grouping, least_memory: float) -> None:
    used = [sum(column) for column in zip(*found.groups, strict=True)]
    assert used == [kind.count for kind in kinds]
    for group in found.groups:
        assert sum(group) > 0
        assert sum(k.memory * n for k, n in zip(kinds, group, strict=True)) >= least_memory * (1 - 1e-9)


kinds_of = st.lists(
    st.builds(
        EntityKind,
        st.sampled_from([1.0, 1.7, 2.0, 3.3]),
        st.sampled_from([24 * GB, 80 * GB, 96 * GB]),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=3,
)


def test_the_bubble_takes_its_part_of_the_power() -> None:
    kinds = [EntityKind(1, 80 * GB, 4), EntityKind(2, 80 * GB, 2)]
    assert effective_power(kinds, (1, 1), 2) == pytest.approx(3 * 2 / 3)
    assert effective_power(kinds, (4, 2), 8) == pytest.approx(8 * 8 / 13)
    assert power_bound(kinds, 6, 8) == 8


def test_the_example_of_the_module() -> None:
    kinds = [EntityKind(1, 80 * GB, 4), EntityKind(2, 80 * GB, 2)]
    found = most_power(kinds, 8, 1 * GB)
    assert found.value == pytest.approx(by_brute_force(kinds, 8, 1 * GB)) == pytest.approx(6)
    # Where one device does not hold the model, three pairs waste more than two triples: one pair has no quick device.
    fewer = most_power(kinds, 8, 100 * GB)
    assert fewer.groups == ((2, 1), (2, 1))
    assert fewer.value == pytest.approx(by_brute_force(kinds, 8, 100 * GB)) == pytest.approx(16 / 3)


@settings(deadline=None, max_examples=40)
@given(kinds_of.filter(lambda kinds: sum(k.count for k in kinds) <= 6), st.integers(1, 12), st.integers(0, 200))
def test_nothing_is_better(kinds: list[EntityKind], micro_batches: int, least_gb: int) -> None:
    least = least_gb * GB
    if sum(k.memory * k.count for k in kinds) < least:
        with pytest.raises(Unsupported, match="all devices together"):
            most_power(kinds, micro_batches, least)
        return
    found = most_power(kinds, micro_batches, least)
    sound(kinds, found, least)
    assert found.value == pytest.approx(by_brute_force(kinds, micro_batches, least))


def test_64_entities_of_two_kinds_are_within_the_bound() -> None:
    kinds = [EntityKind(1, 80 * GB, 40), EntityKind(2, 80 * GB, 24)]
    found = most_power(kinds, 512, 120 * GB)
    sound(kinds, found, 120 * GB)
    assert found.value >= 0.99 * power_bound(kinds, len(found.groups), 512)


@pytest.mark.parametrize(
    ("kinds", "micro_batches", "least"),
    [
        ([EntityKind(1, 80 * GB, 3), EntityKind(2, 80 * GB, 2)], 16, 0.0),
        pytest.param([EntityKind(1, 80 * GB, 4), EntityKind(2.1, 80 * GB, 2)], 64, 120 * GB, marks=thorough),
        pytest.param([EntityKind(1, 80 * GB, 2), EntityKind(0.47, 96 * GB, 4)], 32, 90 * GB, marks=thorough),
    ],
)
def test_the_published_formulation_has_the_same_optimum(
    kinds: list[EntityKind], micro_batches: int, least: float
) -> None:
    pytest.importorskip("cvxpy")
    pytest.importorskip("pyscipopt")
    found = most_power(kinds, micro_batches, least)
    published = most_power_by_scip(kinds, micro_batches, least)
    sound(kinds, published, least)
    assert found.value == pytest.approx(published.value, rel=1e-5)


def test_the_published_formulation_ends_at_a_deadline() -> None:
    pytest.importorskip("cvxpy")
    pytest.importorskip("pyscipopt")
    kinds = [EntityKind(1, 80 * GB, 8), EntityKind(2.1, 70 * GB, 8)]
    began = time.monotonic()
    sound(kinds, most_power_by_scip(kinds, 64, 120 * GB, began + 2), 120 * GB)
    assert time.monotonic() - began < 60


@thorough
@pytest.mark.parametrize("entities", [12, 16])
def test_the_published_formulation_of_more_entities(entities: int) -> None:
    pytest.importorskip("cvxpy")
    pytest.importorskip("pyscipopt")
    kinds = [EntityKind(1, 80 * GB, entities // 2), EntityKind(2, 80 * GB, entities // 2)]
    assert most_power(kinds, 64, 120 * GB).value == pytest.approx(
        most_power_by_scip(kinds, 64, 120 * GB).value, rel=1e-5
    )


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(ValueError, match="at least one"):
        most_power([], 8, GB)
    with pytest.raises(ValueError, match="positive power"):
        most_power([EntityKind(0, GB, 1)], 8, GB)
    with pytest.raises(ValueError, match="micro_batches"):
        most_power([EntityKind(1, GB, 1)], 0, GB)
    with pytest.raises(Unsupported, match="add devices"):
        most_power([EntityKind(1, GB, 2)], 8, 3 * GB)
    with pytest.raises(Unsupported, match="tensor-parallel degree"):
        most_power([EntityKind(i + 1, GB, 300) for i in range(3)], 8, GB)
