"""Where time went: a trace and a simulation of the same course have the same accounts, and every second is in one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.accounts import TimeKind, measured_accounts, predicted_accounts
from hydragraph.cost.trace_file import TraceEvent
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Interconnect
from tests.cost.priced import cluster, costs
from tests.cost.traced import traced
from tests.thorough import thorough

TEXTS = ("4*<tp1,pp1>", "<tp2,pp2>", "<[0,1]x1,[2]x3> + <[3]x4>", "<[0]x1,[1]x2,[2]x1>", "2*<tp1,pp2>", "<[2]x4>")


@thorough
@given(
    text=st.sampled_from(TEXTS),
    lengths=st.lists(st.integers(50, 2000), min_size=4, max_size=9),
    elements=st.sampled_from([1000, 1_000_000]),
)
@settings(max_examples=40, deadline=None)
def test_a_trace_of_what_was_simulated_has_the_simulations_accounts(
    text: str, lengths: list[int], elements: int
) -> None:
    strategy = hg.Strategy.parse(text, layers=4)
    count = len(strategy.pipelines)
    batches = tuple(tuple((i,) for i in range(p, len(lengths), count)) for p in range(count))
    assignment = Assignment(batches, tuple(lengths))
    priced = costs(4, cluster(4, outer=Interconnect(1e9, 1e-4)), elements=elements)
    timeline = priced.simulate(strategy, assignment)
    predicted = predicted_accounts(timeline)
    measured = measured_accounts(traced(priced, strategy, assignment).of(1))
    for rank in range(4):
        for kind in TimeKind:
            assert measured[rank].seconds[kind] == pytest.approx(predicted[rank].seconds[kind], abs=1e-9), (rank, kind)
        assert all(
            predicted[rank].transfers[name] == pytest.approx(seconds, abs=1e-9)
            for name, seconds in measured[rank].transfers.items()
            if ">" not in name
        )
    assert max(account.total for account in predicted) == pytest.approx(timeline.seconds)


def test_a_wait_is_the_other_ranks_until_it_sends() -> None:
    """The module's example: rank 0 sends at 5 s what rank 1 waits for from 3 to 6 s."""
    first = [
        TraceEvent(1, "compute", "compute  h1.0, s.embed.0 = forward embed [0]", 0.0, 5.0),
        TraceEvent(1, "p2p", "h1.0>1", 5.0, 6.0),
    ]
    second = [
        TraceEvent(1, "compute", "update", 0.0, 3.0),
        TraceEvent(1, "compute", "wait h1.0", 3.0, 6.0),
        TraceEvent(1, "p2p", "h1.0", 0.0, 6.0),
    ]
    second[0] = TraceEvent(1, "compute", "compute  update", 0.0, 3.0)
    ahead, behind = measured_accounts([first, second])
    assert ahead.seconds[TimeKind.FORWARD] == 5.0
    assert behind.seconds[TimeKind.LATE] == 2.0
    assert behind.seconds[TimeKind.P2P] == 1.0
    assert behind.transfers == {"h1.0": 1.0}
    assert behind.total == 6.0


def test_what_lies_between_instructions_is_told() -> None:
    events = [
        TraceEvent(1, "compute", "compute  update", 1.0, 2.0),
        TraceEvent(1, "compute", "compute  free h1.0", 2.5, 2.75),
        TraceEvent(1, "compute", "pull     W.head = link home -> here", 2.75, 3.0),
    ]
    (account,) = measured_accounts([events])
    assert account.seconds[TimeKind.OTHER] == pytest.approx(0.75)
    assert account.seconds[TimeKind.PULL] == pytest.approx(0.25)
    assert account.total == pytest.approx(2.0)


def test_a_name_that_is_no_instruction_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a stream"):
        measured_accounts([[TraceEvent(1, "compute", "nonsense", 0.0, 1.0)]])


def test_ranks_that_traced_nothing_have_nothing() -> None:
    assert [account.total for account in measured_accounts([[], []])] == [0.0, 0.0]
