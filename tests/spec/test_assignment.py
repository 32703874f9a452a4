"""An assignment counts and measures its micro-batches, and says when it does not know how long sequences are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.spec.assignment import Assignment


def test_tokens_and_counts_follow_the_indices() -> None:
    assignment = Assignment((((2, 0), (1,)), ()), lengths=(5, 7, 9))
    assert assignment.counts == (2, 0)
    assert assignment.tokens == (((9, 5), (7,)), ())


@pytest.mark.parametrize("lengths", [(), (5, 7)])
def test_a_sequence_without_a_length_is_named(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"uses sequence index 2, but has {len(lengths)} lengths"):
        Assignment((((2, 0),),), lengths).tokens  # noqa: B018


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=4))
def test_even_micro_batches_have_each_sequence_once_and_its_pipelines_tokens(pipelines: list[tuple[int, int]]) -> None:
    counts, tokens = [count for count, _ in pipelines], [length for _, length in pipelines]
    assignment = Assignment.even(counts, tokens)
    assert assignment.counts == tuple(counts)
    assert sorted(i for p in assignment.micro_batches for m in p for i in m) == list(range(sum(counts)))
    assert assignment.tokens == tuple(((n,),) * count for count, n in pipelines)
    assert Assignment.even(counts, 3).lengths == (3,) * sum(counts)
    paired = Assignment.even(counts, tokens, sequences=2)
    assert [[len(m) for m in p] for p in paired.micro_batches] == [[2] * count for count in counts]
    assert paired.tokens == tuple(((n, n),) * count for count, n in zip(counts, tokens, strict=True))


def test_one_by_one_keeps_pipelines_and_order() -> None:
    assignment = Assignment((((3, 0), (2,)), (), ((1, 4),)), (5, 6, 7, 8, 9))
    assert assignment.one_by_one == Assignment((((3,), (0,), (2,)), (), ((1,), (4,))), assignment.lengths)
