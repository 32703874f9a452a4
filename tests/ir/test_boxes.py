"""boxes: against the elements themselves, for every shape and interval that hypothesis finds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.boxes import Box, boxes
from hydragraph.ir.parameter import Parameter, ShardRule

Case = tuple[tuple[int, ...], int, int]


@st.composite
def intervals(draw: st.DrawFn, dims: int = 0) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=dims, max_size=4)))
    size = math.prod(shape)
    lo = draw(st.integers(0, size))
    return shape, lo, draw(st.integers(lo, size))


def test_the_example_of_the_module() -> None:
    assert boxes(3, 11, (3, 4)) == (Box((0, 3), (1, 1), 0), Box((1, 0), (1, 4), 1), Box((2, 0), (1, 3), 5))


def inside(box: Box, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


@given(intervals())
def test_boxes_hold_the_interval_in_order(case: Case) -> None:
    shape, lo, hi = case
    elements = torch.arange(math.prod(shape)).reshape(shape)
    found = boxes(lo, hi, shape)
    for box in found:
        assert inside(box, elements).flatten().tolist() == list(range(lo + box.at, lo + box.at + box.size))
    assert [i for box in found for i in inside(box, elements).flatten().tolist()] == list(range(lo, hi))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(intervals(dims=1), st.data())
def test_moved_boxes_are_the_canonical_interval_in_the_natural_tensor(case: Case, data: st.DataObject) -> None:
    canonical, lo, hi = case
    dim = data.draw(st.integers(0, len(canonical) - 1))
    natural = torch.arange(math.prod(canonical)).reshape(canonical).movedim(0, dim).contiguous()
    parameter = Parameter("w", tuple(natural.shape), (), ShardRule(dim, (canonical[0],)))
    flat = parameter.canonical(natural)[lo:hi]
    for box in boxes(lo, hi, canonical):
        mine = flat[box.at : box.at + box.size].view(box.sizes).movedim(0, dim)
        assert torch.equal(mine, inside(box.moved(dim), natural))


def test_whole_rows_are_one_box_and_ragged_ends_are_their_own() -> None:
    assert boxes(0, 24, (4, 6)) == (Box((0, 0), (4, 6), 0),)
    assert boxes(6, 18, (4, 6)) == (Box((1, 0), (2, 6), 0),)
    assert boxes(4, 20, (4, 6)) == (Box((0, 4), (1, 2), 0), Box((1, 0), (2, 6), 2), Box((3, 0), (1, 2), 14))
    assert boxes(7, 9, (4, 6)) == (Box((1, 1), (1, 2), 0),)
    assert boxes(3, 3, (4, 6)) == boxes(0, 0, (0, 6)) == ()
    assert boxes(0, 1, ()) == (Box((), (), 0),)
    assert len(boxes(1, 3 * 4 * 5 * 6 - 1, (3, 4, 5, 6))) == 7


def test_an_interval_outside_of_the_tensor_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\[3, 7\) is not inside"):
        boxes(3, 7, (2, 3))
