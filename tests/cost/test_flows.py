"""Flows over shared resources: the example of their module, and that no resource carries more than it can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.flows import Flow, Flows

CARD = 0


def ends(flows: list[tuple[float, float, tuple[tuple[int, float], ...]]]) -> list[float]:
    """Return when each of (begin, seconds alone, what it occupies) ends."""
    engine = Flows()
    for i, (begin, seconds, used) in enumerate(flows):
        engine.begin(begin, Flow(i, 0, seconds, used))
    by_flow = {flow.actor: now for now, flow in engine.ended()}
    return [by_flow[i] for i in range(len(flows))]


def test_the_example_of_the_module() -> None:
    assert ends([(0.0, 1.0, ((CARD, 0.8),)), (0.0, 0.4, ((CARD, 0.8),))]) == pytest.approx([1.24, 0.64])


def test_who_meets_nobody_takes_what_it_takes_alone() -> None:
    assert ends([(0.1, 0.3, ((CARD, 1.0),)), (0.4, 0.7, ((CARD, 1.0),)), (0.2, 5.0, ((1, 1.0),))]) == [
        0.1 + 0.3,
        0.4 + 0.7,
        5.2,
    ]


FLOWS = st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 3), st.floats(0.05, 1)), min_size=1, max_size=6)


@given(FLOWS)
@settings(max_examples=60)
def test_a_card_carries_what_it_can_and_no_flow_is_faster_than_alone(flows: list[tuple[float, float, float]]) -> None:
    found = ends([(begin, seconds, ((CARD, part),)) for begin, seconds, part in flows])
    for (begin, seconds, _), end in zip(flows, found, strict=True):
        assert end >= begin + seconds * (1 - 1e-6)
    first = min(begin for begin, _, _ in flows)
    assert max(found) - first >= sum(seconds * part for _, seconds, part in flows) * (1 - 1e-6)
    assert max(found) <= max(begin for begin, _, _ in flows) + sum(seconds for _, seconds, _ in flows) * (1 + 1e-6)
