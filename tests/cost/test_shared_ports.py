"""Flows that share a resource: all arrive, each takes at least as long as alone, and a full resource stays full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.shared_ports import Flow, Flows, Used

ENTIRE: Used = ((0, 1.0),)  # all of resource 0


def ends(flows: list[tuple[float, float, Used]]) -> list[float]:
    """Return when each flow (begins, seconds alone, used) ends."""
    running = Flows()
    for i, (begin, seconds, used) in enumerate(flows):
        running.begin(begin, Flow(i, 0, seconds, used))
    found = {flow.actor: now for now, flow in running.ended()}
    return [found[i] for i in range(len(flows))]


def test_two_on_one_resource_take_turns_and_the_one_that_remains_has_it_to_itself() -> None:
    # Until 2 both go at half of their speed; the first has done its second then, the other two of its three.
    assert ends([(0.0, 1.0, ENTIRE), (0.0, 2.0, ENTIRE)]) == [2.0, 3.0]


def test_halves_that_come_to_one_do_not_slow_each_other() -> None:
    half: Used = ((0, 0.5),)
    assert ends([(0.0, 1.0, half), (0.5, 1.0, half)]) == [1.0, 1.5]
    # A third one makes 1.5 of 1 resource: all three go at 2/3 while it lasts.
    assert ends([(0.0, 1.0, half), (0.0, 1.0, half), (0.0, 1.0, half)]) == pytest.approx([1.5, 1.5, 1.5])


def test_a_flow_is_as_fast_as_its_slowest_resource() -> None:
    assert ends([(0.0, 1.0, ((0, 1.0), (1, 1.0))), (0.0, 1.0, ((1, 1.0),)), (0.0, 1.0, ((2, 1.0),))]) == [2.0, 2.0, 1.0]


Times = st.floats(0, 10, allow_subnormal=False)


@given(st.lists(st.tuples(Times, st.floats(0.01, 5), st.booleans()), min_size=1, max_size=8))
def test_a_full_resource_is_busy_until_all_its_work_is_done(drawn: list[tuple[float, float, bool]]) -> None:
    flows = [(begin, seconds, ENTIRE if shared else ()) for begin, seconds, shared in drawn]
    found = ends(flows)
    busy = 0.0
    for begin, seconds, used in sorted(flows, key=lambda flow: flow[0]):
        busy = max(busy, begin) + seconds if used else busy
    for (begin, seconds, used), end in zip(flows, found, strict=True):
        assert end >= begin + seconds - 1e-9
        if not used:
            assert end == begin + seconds
    shared_ends = [end for (_, _, used), end in zip(flows, found, strict=True) if used]
    assert max(shared_ends, default=0.0) == pytest.approx(busy)


def test_the_example_of_the_module() -> None:
    card = 0
    assert ends([(0.0, 1.0, ((card, 0.8),)), (0.0, 0.4, ((card, 0.8),))]) == pytest.approx([1.24, 0.64])
