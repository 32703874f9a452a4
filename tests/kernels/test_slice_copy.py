"""Ranges between flat buffers: the reference against a loop over elements, the kernel against the reference."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels import slice_copy as module
from hydragraph.kernels.slice_copy import SliceTable, slice_copy
from tests.kernels.interpreter import interpreted

SIZE = 96
Range = tuple[int, int, int]


def table(ranges: list[Range], sums: bool = False) -> SliceTable:
    rows = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3)
    return SliceTable.make(rows[:, 0], rows[:, 1], rows[:, 2], sums=sums)


def buffers(source: torch.dtype, target: torch.dtype, size: int = SIZE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, size, generator=generator) * torch.tensor([1e-3, 1.0, 1e3, 1e-8])[torch.arange(size) % 4]
    return values[0].to(source), values[1].to(target)


def element_by_element(source: Tensor, target: Tensor, ranges: list[Range], accumulate: bool) -> Tensor:
    out = target.clone()
    for a, b, n in ranges:
        for i in range(n):
            value = source[a + i].to(target.dtype)
            out[b + i] = out[b + i] + value if accumulate else value
    return out


@st.composite
def disjoint(draw: st.DrawFn) -> list[Range]:
    """Ranges in any order whose targets do not meet, at offsets that often agree modulo 8."""
    bounds = sorted(draw(st.lists(st.integers(0, SIZE), min_size=2, max_size=12)))
    found = []
    for low, high in pairwise(bounds):
        length = draw(st.integers(0, high - low))
        start = draw(st.integers(0, SIZE - length))
        congruent = start - (start - low) % 8
        found.append((congruent if draw(st.booleans()) and congruent >= 0 else start, low, length))
    return draw(st.permutations(found))


@st.composite
def any_ranges(draw: st.DrawFn) -> list[Range]:
    found = []
    for _ in range(draw(st.integers(0, 6))):
        length = draw(st.integers(0, 40))
        step = draw(st.sampled_from([1, 8]))
        offset = st.integers(0, (SIZE - length) // step)
        found.append((draw(offset) * step, draw(offset) * step, length))
    return found


def tiled(found: SliceTable, accumulate: bool, source: Tensor, target: Tensor) -> Tensor:
    """Do what the kernel does, tile by tile, and check that no two tiles write the same element."""
    out, written = target.clone(), torch.zeros(len(target), dtype=torch.int64)
    for i, (at, length, first, count) in enumerate(found.tiles.tolist()):
        unit, block = (8, module.WIDE) if i < found.aligned else (1, module.NARROW)
        assert 0 < length * unit <= block
        span = slice(at * unit, (at + length) * unit)
        written[span] += 1
        total = out[span] if accumulate else torch.zeros(length * unit, dtype=target.dtype)
        for origin in found.origins[first : first + count].tolist():
            total = total + source[origin * unit : (origin + length) * unit].to(target.dtype)
        out[span] = total
    assert int(written.max()) <= 1
    assert int(written.sum()) == found.elements
    return out


@given(disjoint())
def test_tiles_and_the_reference_copy_what_a_loop_copies(ranges: list[Range]) -> None:
    source, target = buffers(torch.float32, torch.bfloat16)
    expected = element_by_element(source, target, ranges, False)
    assert torch.equal(tiled(table(ranges), False, source, target), expected)
    slice_copy(source, target, table(ranges))
    assert torch.equal(target, expected)


@given(any_ranges())
def test_tiles_and_the_reference_add_in_the_order_of_the_table(ranges: list[Range]) -> None:
    source, target = buffers(torch.bfloat16, torch.float32)
    expected = element_by_element(source, target, ranges, True)
    found = table(ranges, sums=True)
    assert torch.equal(tiled(found, True, source, target), expected)
    slice_copy(source, target, found, accumulate=True)
    assert torch.equal(target, expected)


FLOATS = list(module.DTYPES)


@given(
    disjoint(),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from([0, 1, 5]),
    st.booleans(),
    st.sampled_from([0, module.MANY]),
)
def test_memory_is_moved_as_the_reference_copies(
    ranges: list[Range], kind: torch.dtype, to: torch.dtype, offset: int, small: bool, many: int
) -> None:
    source, target = (buffer[offset:] for buffer in buffers(kind, to, SIZE + offset))
    source[::7] = float("inf")
    expected = target.clone()
    with mock.patch.object(module, "RUN", 7 if small else module.RUN), mock.patch.object(module, "MANY", many):
        found = table(ranges)
        module.reference(source, expected, found, False)
        slice_copy(source, target, found)
    assert torch.equal(target, expected)


@given(
    any_ranges(),
    st.sampled_from(FLOATS),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.sampled_from([0, module.MANY]),
)
def test_memory_is_added_as_the_reference_adds(
    ranges: list[Range], kind: torch.dtype, to: torch.dtype, small: bool, many: int
) -> None:
    source, target = buffers(kind, to)
    source[::5] = -0.0
    target[::5] = -0.0
    expected = target.clone()
    with mock.patch.object(module, "RUN", 7 if small else module.RUN), mock.patch.object(module, "MANY", many):
        found = table(ranges, sums=True)
        module.reference(source, expected, found, True)
        slice_copy(source, target, found, accumulate=True)
    assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_cast_of_a_few_far_ranges_touches_nothing_between_them(accumulate: bool) -> None:
    ranges = [(90_000, 3, 20), (5, 40, 7), (50_001, 30, 1), (50_000, 90, 3)]
    source, target = buffers(torch.bfloat16, torch.float32, 100_000)
    expected = target.clone()
    found = table(ranges)
    module.reference(source, expected, found, accumulate)
    slice_copy(source, target, found, accumulate=accumulate)
    assert torch.equal(target, expected)


def test_ranges_of_a_batch_do_not_meet_and_have_room_in_a_cache() -> None:
    found = table([(0, 8, 4), (4, 0, 8), (12, 8, 4), (16, 20, 4), (20, 22, 1)], sums=True)
    places = [(batch.places.tolist(), batch.beside.tolist(), batch.whole) for batch in found.batches]
    assert places == [([8], [0], slice(8, 12)), ([0, 8, 20], [0, 8, 12], None), ([22], [0], slice(22, 23))]
    with mock.patch.object(module, "RUN", 8):
        ranges = [(at, 96 - at, 3) for at in range(0, 30, 3)]
        assert [batch.elements for batch in table(ranges).batches] == [6] * 5
        assert [batch.elements for batch in table([(0, 0, 20), (20, 20, 9)]).batches] == [20, 9]


def test_large_ranges_are_cut_and_aligned_ones_go_wide() -> None:
    found = table([(8, 16, 10_000), (3, 20_003, 9_000), (1, 40_002, 1_000)])
    assert found.aligned == 3 + 3
    source, target = buffers(torch.float32, torch.float32, 42_000)
    expected = target.clone()
    for a, b, n in [(8, 16, 10_000), (3, 20_003, 9_000), (1, 40_002, 1_000)]:
        expected[b : b + n] = source[a : a + n]
    assert torch.equal(tiled(found, False, source, target), expected)


def test_offsets_beyond_32_bits_stay_whole() -> None:
    far = 2**40 + 8
    found = table([(far, far + 8, 5000), (far + 1, 3, 5)])
    assert (found.source_end, found.target_end) == (far + 5000, far + 8 + 5000)
    assert found.tiles[0].tolist() == [(far + 8) // 8, 512, 0, 1]
    assert found.origins[0].item() == far // 8


@interpreted
@settings(max_examples=5)
@given(disjoint(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans())
def test_the_kernel_copies(ranges: list[Range], dtype: torch.dtype, narrow: bool) -> None:
    source, target = buffers(torch.float32 if narrow else dtype, dtype if narrow else torch.float32)
    expected = target.clone()
    found = table(ranges)
    module.reference(source, expected, found, False)
    slice_copy(source, target, found)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


@interpreted
@settings(max_examples=5)
@given(any_ranges(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_the_kernel_adds_in_the_order_of_the_table(ranges: list[Range], dtype: torch.dtype) -> None:
    source, target = buffers(dtype, torch.float32)
    expected = target.clone()
    found = table(ranges, sums=True)
    module.reference(source, expected, found, True)
    slice_copy(source, target, found, accumulate=True)
    assert torch.equal(target, expected)


@interpreted
def test_the_kernel_takes_ranges_of_many_tiles() -> None:
    ranges = [(8, 16, 10_000), (3, 20_003, 5_000), (1, 40_002, 1_000)]
    source, target = buffers(torch.float32, torch.bfloat16, 42_000)
    expected = target.clone()
    module.reference(source, expected, table(ranges), False)
    slice_copy(source, target, table(ranges))
    assert torch.equal(target, expected)


@interpreted
def test_the_cast_rounds_to_nearest_even() -> None:
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x7F800000], dtype=torch.int32)
    source = torch.cat([ties.view(torch.float32), torch.full((2,), float("nan"))])
    target = torch.empty(8, dtype=torch.bfloat16)
    slice_copy(source, target, table([(0, 0, 8)]))
    assert target[:3].view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F81]
    assert torch.equal(target[:6], source[:6].bfloat16())
    assert bool(target[6:].isnan().all())


def test_nothing_to_do() -> None:
    _, target = buffers(torch.float32, torch.float32)
    before = target.clone()
    slice_copy(target.clone(), target, table([]))
    slice_copy(target.clone(), target, table([(3, 5, 0)]))
    assert torch.equal(target, before)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 0, 4), (0, 3, 4)], "two ranges write target element 3; make target ranges disjoint, or pass sums=True"),
        ([(0, 0, 4), (0, -3, 4)], r"range 1 is \(source, target, length\) = \(0, -3, 4\)"),
    ],
)
def test_tables_that_are_refused(ranges: list[Range], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        table(ranges)


def test_offsets_that_are_no_int64_vectors_are_refused() -> None:
    good = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(Unsupported, match=r"target offsets of shape \(2,\), torch.int32 on cpu; pass 1-D int64"):
        SliceTable.make(good, good.int(), good)
    with pytest.raises(Unsupported, match="2 source offsets, 2 target offsets, 1 lengths"):
        SliceTable.make(good, good, good[:1])


def test_buffers_that_are_refused() -> None:
    source, target = buffers(torch.bfloat16, torch.float32)
    with pytest.raises(
        Unsupported, match="needs 100 elements of source, but the buffer has 96; pass the source buffer"
    ):
        slice_copy(source, target, table([(90, 0, 10)]))
    with pytest.raises(Unsupported, match=r"target of shape \(48,\), strides \(2,\)"):
        slice_copy(source, target[::2], table([(0, 0, 4)]))
    with pytest.raises(Unsupported, match=r"sums in torch.bfloat16; accumulate into fp32"):
        slice_copy(target, source, table([(0, 0, 4)]), accumulate=True)
    with pytest.raises(Unsupported, match="overlap; pass accumulate=True"):
        slice_copy(source, target, table([(0, 0, 4), (8, 2, 4)], sums=True))
