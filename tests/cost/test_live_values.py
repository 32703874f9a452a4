"""Storages are counted once, and for as long as one of their values lives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.live_values import LiveValues

NAMES = "abcdef"


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES)))))
def test_sums_are_those_of_what_is_still_kept(events: list[tuple[str, set[str]]]) -> None:
    """A name that is alive ends; one that is not begins, and shares the storages of others."""
    alive = LiveValues()
    kept: dict[str, set[tuple[str, int]]] = {}
    for number, (name, shared) in enumerate(events):
        if name in kept:
            alive.drop(name)
            del kept[name]
        else:
            if any(owner == name for each in kept.values() for owner, _ in each):
                continue  # its storage lives on in another value, and an iteration gives no name twice
            alive.add(name, f"part {number % 2}", number + 1, *sorted(shared))
            kept[name] = {(name, number + 1)} | {s for other in shared for s in kept.get(other, set())}
        storages = set().union(*kept.values()) if kept else set()
        assert sum(alive.sums.values()) == sum(size for _, size in storages)
        assert all(alive.sums[f"part {i}"] == sum(z for _, z in storages if (z - 1) % 2 == i) for i in (0, 1))
        assert all((each in alive) == (each in kept) for each in NAMES)


def test_a_shared_storage_goes_with_its_last_value() -> None:
    alive = LiveValues()
    alive.add("h", "activations", 100)
    alive.add("s", "activations", 7, "h", "unknown")
    alive.drop("h")
    assert alive.sums == {"activations": 107}
    alive.drop("s", "s", "unknown")
    assert alive.sums == {"activations": 0}


def test_of_other_values_it_keeps_the_named_storages() -> None:
    alive = LiveValues()
    alive.add("h", "activations", 3)
    alive.add("s", "activations", 20, "h")
    alive.add("t", "activations", 100, "s", named={"h"})
    alive.drop("h", "s")
    assert alive.total == 103
    alive.drop("t")
    assert alive.total == 0


def test_bytes_that_another_value_holds_from_now_on_count_once() -> None:
    alive = LiveValues()
    alive.add("s", "activations", 20)
    alive.shrink("s", "activations", 5)
    alive.add("o", "activations", 5, "s", named=())
    assert alive.total == 20
    alive.drop("s")
    assert alive.total == alive.sums["activations"] == 5
