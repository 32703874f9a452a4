"""Mini-batches cut for each pipeline: what is promised is near the best of all, and what is cut is what a run cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.block_pieces import BlockPiece, Constants
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.micro_batch_sizes import cut, promised
from hydragraph.planner.price_candidate import share_out
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.strategy import Strategy
from tests.cost import priced
from tests.thorough import thorough

STRATEGIES = ("4*<tp1,pp1>", "2*<tp1,pp1> + <tp2,pp1>", "<[0]x3,[1]x3> + <[2]x4,[3]x2>", "<tp1,pp1> + <tp1,pp3>")


def without_constants(profile: Profile) -> Profile:
    """Return a profile without fixed costs of micro-batches, like one from a datasheet."""

    def free(piece: BlockPiece) -> BlockPiece:
        assert isinstance(piece.forward, Constants)
        assert isinstance(piece.backward, Constants)
        return replace(piece, forward=replace(piece.forward, c=0.0), backward=replace(piece.backward, c=0.0))

    pieces = {kind: {name: free(piece) for name, piece in each.items()} for kind, each in profile.pieces.items()}
    return replace(profile, pieces=pieces)


def even(n: int, m: int) -> list[list[int]]:
    return [[100] * (n * (i + 1) // m - n * i // m) for i in range(m)]


@thorough
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(STRATEGIES), st.integers(1, 40), st.sampled_from((1.0, 1.6, 3.0, 12.0)), st.integers(0, 3))
def test_a_promise_runs_every_sequence_once_and_is_seldom_behind_the_best(
    text: str, sequences: int, rate: float, rank: int
) -> None:
    costs = priced.costs(6, priced.cluster(4), hg.Health({rank: rate}))
    strategy = Strategy.parse(text, 6)
    found = promised(costs, strategy, [100] * sequences)
    assert sorted(i for p in found.micro_batches for m in p for i in m) == list(range(sequences))
    assert all(m for p in found.micro_batches for m in p)
    # The best end of each pipeline by its sequences, in as many even micro-batches as suit it.
    ends = [
        [0.0, *(min(p.seconds(even(n, m)) for m in range(1, n + 1)) for n in range(1, sequences + 1))]
        for p in costs.pipelines(strategy)
    ]
    best = min(
        end
        for end in {end for each in ends for end in each}
        if sum(max(n for n, e in enumerate(each) if e <= end) for each in ends) >= sequences
    )
    # The promise uses the slowest stage, and counts the others as equally slow. Its unequal micro-batches may have
    # another order.
    assert best * 0.95 <= costs.pipelines_end(strategy, found) <= best * 1.35


def test_a_pipeline_of_one_stage_is_promised_one_micro_batch() -> None:
    """One stage has no bubble, and traffic overlaps best with a long micro-batch, even without fixed costs."""
    costs = priced.costs(6, priced.cluster(4))
    for profile in (costs.profile, without_constants(costs.profile)):
        found = promised(costs.changed(profile=profile), Strategy.parse("4*<tp1,pp1>", 6), [100] * 32)
        assert found.counts == (1, 1, 1, 1)
        assert [len(m) for p in found.micro_batches for m in p] == [8, 8, 8, 8]


@pytest.mark.parametrize(("text", "rank"), product(STRATEGIES, (0, 3)))
def test_what_is_cut_is_as_quick_as_in_a_run_and_than_micro_batches_of_one_size(text: str, rank: int) -> None:
    costs = priced.costs(6, priced.cluster(4), hg.Health({rank: 1.6}))
    strategy = Strategy.parse(text, 6)
    lengths = [100] * 32
    assignment, last = cut(costs, strategy, lengths)
    assert last == pytest.approx(costs.pipelines_end(strategy, assignment))
    run = PlanRequest((costs.pipelines(strategy),), (0.0,)).choose(tuple(lengths))
    assert run.assignment.micro_batches == assignment.micro_batches
    assert run.seconds == pytest.approx(last)
    assert last <= 1.02 * min(share_out(costs, strategy, lengths, together)[1] for together in range(1, 9))


def test_a_sequence_that_no_pipeline_takes_is_refused() -> None:
    costs = priced.costs(6, priced.cluster(4), elements=10**6)
    strategy = Strategy.parse("4*<tp1,pp1>", 6)
    longest = max(p.max_len for p in costs.pipelines(strategy))
    with pytest.raises(hg.Unsupported):
        cut(costs, strategy, [longest + 1])
