"""Copy of thousands of ranges between two flat buffers in one kernel launch, with casts and sums.

Ranges are divided into tiles, one per program; aligned tiles use 16-byte accesses. Ranges with the same target are
summed in table order, so results are bitwise reproducible.
"""

# Triton compiles functions without annotations.
# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return]
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels.triton_jit import Inlined, KernelVariant, kernel, require_one_device, use_kernel

if TYPE_CHECKING:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Elements in a 16-byte access
UNIT = 8
# Elements in an aligned tile; large enough to hide memory latency
WIDE = 4096
# Elements in other tiles
NARROW = 512
_SIZES = {"UNIT": UNIT, "WIDE": WIDE, "NARROW": NARROW}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}

RUN = 2**17
# Minimum number of ranges for which a Python loop is too slow
MANY = 256
_MEMORY = {2: np.uint16, 4: np.uint32, 8: np.uint64}

Offsets = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CopyBatch:
    """Ranges with ascending targets.

    Attributes:
        origins, places: source and target offsets, [R] int64, in elements.
        beside: offset of each range in a buffer without gaps.
    """

    origins: Offsets
    places: Offsets
    lengths: Offsets
    beside: Offsets
    elements: int

    @property
    def whole(self) -> slice | None:
        """Slice of the target that the ranges fill; None with gaps."""
        first = int(self.places[0])
        end = int(self.places[-1] + self.lengths[-1])
        return slice(first, end) if end - first == self.elements else None


@Inlined
def _write(
    source, target, origins, to, first, count, within, inside,
    UNIT: tl.constexpr, ACCUMULATE: tl.constexpr, SUMS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    element = target.dtype.element_ty
    if SUMS:
        value = tl.load(to, mask=inside)
        for i in range(first, first + count):
            value += tl.load(source + tl.load(origins + i) * UNIT + within, mask=inside).to(element)
    else:
        value = tl.load(source + tl.load(origins + first) * UNIT + within, mask=inside).to(element)
        if ACCUMULATE:
            value = tl.load(to, mask=inside) + value
    tl.store(to, value, mask=inside)


@kernel("aligned")
def _slice_copy(
    source, target, tiles, origins, aligned,
    ACCUMULATE: tl.constexpr, SUMS: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # One program per tile of a `SliceTable`.
    tile = tl.program_id(0).to(tl.int64)
    at = tl.load(tiles + 4 * tile)
    length = tl.load(tiles + 4 * tile + 1)
    first = tl.load(tiles + 4 * tile + 2)
    count = tl.load(tiles + 4 * tile + 3)
    if tile < aligned:
        wide = tl.arange(0, WIDE)
        to = target + at * UNIT + wide
        _write(source, target, origins, to, first, count, wide, wide < length * UNIT, UNIT, ACCUMULATE, SUMS)
    else:
        narrow = tl.arange(0, NARROW)
        to_any = target + at + narrow
        _write(source, target, origins, to_any, first, count, narrow, narrow < length, 1, ACCUMULATE, SUMS)


@dataclass(frozen=True, eq=False)
class SliceTable:
    """Reusable table of the ranges copied from one flat buffer to another.

    Attributes:
        ranges: [3, R] int64 on the CPU: source offset, target offset and length of each range, in elements.
        tiles: [tiles, 4] int64: target offset, length, index of the first origin, number of origins.
        origins: [O] int64: source offsets, in the order of the ranges within a tile.
        aligned: number of aligned tiles, which come first, with offsets in units of 8 elements.
        source_end, target_end: minimum sizes of the buffers.
    """

    ranges: Tensor
    tiles: Tensor
    origins: Tensor
    aligned: int
    source_end: int
    target_end: int
    elements: int
    sums: bool

    @cached_property
    def ordered(self) -> tuple[Offsets, Offsets, Offsets]:
        """Source offsets, target offsets and lengths, sorted by target unless targets overlap."""
        rows: Offsets = self.ranges.numpy()
        rows = rows[:, rows[2] > 0]
        if not self.sums:
            rows = rows[:, np.argsort(rows[1], kind="stable")]
        origins, places, lengths = map(np.ascontiguousarray, rows)
        return origins, places, lengths

    @cached_property
    def batches(self) -> tuple[CopyBatch, ...]:
        origins, places, lengths = self.ordered
        before = np.cumsum(lengths) - lengths
        # A batch's targets must ascend without overlaps.
        back = np.flatnonzero(places[1:] < (places + lengths)[:-1]) + 1
        batches: list[CopyBatch] = []
        for low, high in pairwise([0, *back.tolist(), len(places)]):
            while low < high:
                end = max(
                    low + 1, int(np.searchsorted(before[:high] + lengths[:high], before[low] + RUN, side="right"))
                )
                part = slice(low, end)
                total = int(lengths[part].sum())
                batches.append(CopyBatch(origins[part], places[part], lengths[part], before[part] - before[low], total))
                low = end
        return tuple(batches)

    @staticmethod
    def make(
        source: Tensor, target: Tensor, length: Tensor, *, sums: bool = False, device: torch.device | None = None
    ) -> SliceTable:
        """Return the table of R ranges.

        Args:
            source, target, length: [R] int64 on the CPU, in elements; ranges may be empty.
            sums: whether targets may overlap; `slice_copy` then needs accumulate=True.

        Raises:
            Unsupported: a tensor has another dtype or shape, a number is negative, or targets overlap without `sums`.
        """
        ranges = _checked(source, target, length)
        origins, targets, lengths, order = _disjoint(ranges[:, ranges[2] > 0])
        counts = np.diff(order)
        overlap = bool((counts > 1).any())
        if overlap and not sums:
            first = int(targets[int(np.argmax(counts > 1))])
            raise _refused(
                f"two ranges write target element {first}",
                "make target ranges disjoint, or pass sums=True here and accumulate=True to slice_copy",
            )
        tiles, tile_origins, aligned = _tiles(origins, targets, lengths, order)
        return SliceTable(
            ranges=torch.from_numpy(ranges),
            tiles=torch.from_numpy(tiles).to(device),
            origins=torch.from_numpy(tile_origins).to(device),
            aligned=aligned,
            source_end=int((ranges[0] + ranges[2]).max(initial=0)),
            target_end=int((ranges[1] + ranges[2]).max(initial=0)),
            elements=int(lengths.sum()),
            sums=overlap,
        )


def slice_copy(source: Tensor, target: Tensor, table: SliceTable, *, accumulate: bool = False) -> None:
    """Copy ranges of `source` to `target`, or add them, with rounding to nearest even.

    Args:
        source, target: 1-D contiguous, bf16, fp16, fp32 or fp64, not overlapping in memory.
        accumulate: add to the target (fp32 or fp64), in table order.

    Raises:
        Unsupported: a buffer is too short, has another dtype or shape, or ranges overlap without `accumulate`.
    """
    _check(source, target, table, accumulate)
    if not len(table.tiles):
        return
    if use_kernel(source.device, "slice_copy"):
        launch(source, target, table, accumulate)
    else:
        move(source, target, table, accumulate)


def reference(source: Tensor, target: Tensor, table: SliceTable, accumulate: bool) -> None:
    for a, b, n in table.ranges.T.tolist():
        part = target[b : b + n]
        value = source[a : a + n].to(target.dtype)
        if accumulate:
            part += value
        else:
            part.copy_(value)


def move(source: Tensor, target: Tensor, table: SliceTable, accumulate: bool) -> None:
    """Copy or add ranges on a CPU, bitwise equal to `reference`."""
    source = source.detach()
    target = target.detach()
    copy = _copy_few
    if table.ranges.shape[1] >= MANY:
        from hydragraph.kernels.memory_ranges import copy_ranges  # imports numba

        copy = copy_ranges
    if not accumulate and source.dtype == target.dtype:
        copy(source, target, table.ordered)
        return
    # With a cast or a sum, each batch is gathered, converted or added, and scattered while in the
    # cache. One range needs no gather, and ranges without gaps no scatter.
    gathered = (batch.elements for batch in table.batches if len(batch.lengths) > 1)
    scattered = (batch.elements for batch in table.batches if batch.whole is None)
    gather_buffer = source.new_empty(max(gathered, default=0))
    scatter_buffer = target.new_empty(max(scattered, default=0))
    for batch in table.batches:
        if len(batch.lengths) == 1:
            values = source[int(batch.origins[0]) :][: batch.elements]
        else:
            values = gather_buffer[: batch.elements]
            copy(source, values, (batch.origins, batch.beside, batch.lengths))
        whole = batch.whole
        results = scatter_buffer[: batch.elements] if whole is None else target[whole]
        if not accumulate:
            results.copy_(values)
        else:
            if whole is None:
                copy(target, results, (batch.places, batch.beside, batch.lengths))
            results.add_(values)
        if whole is None:
            copy(results, target, (batch.beside, batch.places, batch.lengths))


def _copy_few(source: Tensor, target: Tensor, offsets: tuple[Offsets, ...]) -> None:
    reads = _memory(source)
    writes = _memory(target)
    for origin, place, length in zip(*(column.tolist() for column in offsets), strict=True):
        if length <= RUN:
            writes[place : place + length] = reads[origin : origin + length]
        else:
            target[place : place + length].copy_(source[origin : origin + length])


def _memory(buffer: Tensor) -> Any:
    array: Any = buffer.view(torch.uint8).numpy()
    return memoryview(array.view(_MEMORY[buffer.dtype.itemsize]))


def launch(source: Tensor, target: Tensor, table: SliceTable, accumulate: bool) -> None:
    constants = {"ACCUMULATE": accumulate, "SUMS": table.sums, **_SIZES}
    tensors = (source, target, table.tiles, table.origins)
    _slice_copy[(len(table.tiles),)](*tensors, table.aligned, **constants, **_OPTIONS)


def variants() -> Iterator[KernelVariant]:
    cases = [("fp32", "bf16", False, False), ("bf16", "bf16", False, False), ("fp32", "fp32", False, False)]
    cases += [("bf16", "fp32", True, sums) for sums in (False, True)]
    for source, target, accumulate, sums in cases:
        yield KernelVariant(
            f"slice_copy {source}->{target}{' add' * accumulate}{' sums' * sums}",
            _slice_copy,
            {"source": f"*{source}", "target": f"*{target}", "tiles": "*i64", "origins": "*i64", "aligned": "i32"},
            {"ACCUMULATE": accumulate, "SUMS": sums, **_SIZES},
            _OPTIONS,
        )


def _refused(what: str, remedy: str, where: str = "slice_copy") -> Unsupported:
    return Unsupported(what, where=where, remedy=remedy)


def _checked(source: Tensor, target: Tensor, length: Tensor) -> Offsets:
    for name, tensor in {"source": source, "target": target, "length": length}.items():
        if tensor.dim() != 1 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
            raise _refused(
                f"{name} offsets of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}",
                "pass 1-D int64 tensors on the CPU",
                "slice_copy table",
            )
    sizes = [len(source), len(target), len(length)]
    if len(set(sizes)) > 1:
        raise _refused(
            f"{sizes[0]} source offsets, {sizes[1]} target offsets, {sizes[2]} lengths",
            "pass one of each for every range",
            "slice_copy table",
        )
    ranges: Offsets = torch.stack([source, target, length]).numpy()
    if (ranges < 0).any():
        bad = int(np.argmax((ranges < 0).any(0)))
        raise _refused(
            f"range {bad} is (source, target, length) = {tuple(ranges[:, bad].tolist())}",
            "pass offsets and lengths of at least 0",
            "slice_copy table",
        )
    return ranges


def _disjoint(ranges: Offsets) -> tuple[Offsets, Offsets, Offsets, Offsets]:
    """Split [3, R] ranges into pieces whose target intervals are equal or disjoint.

    Returns:
        Source offset of each piece, sorted by interval; target offset and length of each interval; each interval's
            first piece, [I + 1].
    """
    source, target, length = ranges
    # Targets [0, 4) and [2, 6) have bounds 0, 2, 4, 6: range 0 covers intervals 0 and 1, and
    # range 1 covers 1 and 2, so interval 1 has two pieces.
    bounds = np.unique(np.concatenate([target, target + length]))
    low = np.searchsorted(bounds, target)
    high = np.searchsorted(bounds, target + length)
    index = np.repeat(np.arange(len(target)), high - low)
    interval = np.arange(len(index)) - np.repeat(np.cumsum(high - low) - high, high - low)
    # A stable sort keeps table order, in which pieces are summed.
    by_interval = np.argsort(interval, kind="stable")
    index = index[by_interval]
    interval = interval[by_interval]
    used, counts = np.unique(interval, return_counts=True)
    origins = source[index] + bounds[interval] - target[index]
    return origins, bounds[used], bounds[used + 1] - bounds[used], np.concatenate([[0], np.cumsum(counts)])


def _tiles(origins: Offsets, targets: Offsets, lengths: Offsets, order: Offsets) -> tuple[Offsets, Offsets, int]:
    counts = np.diff(order)
    # matched: all sources have the target's remainder modulo UNIT, so both sides can be
    # aligned.
    shift = (origins - np.repeat(targets, counts)) % UNIT
    matched = np.add.reduceat(shift, order[:-1]) == 0 if len(targets) else np.zeros(0, dtype=bool)
    head = np.where(matched, np.minimum(-targets % UNIT, lengths), lengths)
    body = np.where(matched, (lengths - head) // UNIT * UNIT, 0)
    # (start, size, block, unit) before, in and after the aligned body.
    parts = (
        (np.zeros_like(lengths), head, NARROW, 1),
        (head, body, WIDE, UNIT),
        (head + body, lengths - head - body, NARROW, 1),
    )
    before, wide, after = (_cut(origins, targets, order, *part) for part in parts)
    rows = []
    origins_of = []
    done = 0
    for tiles, tile_origins in (wide, before, after):
        # All tiles share one list of origins.
        tiles[:, 2] += done
        done += len(tile_origins)
        rows.append(tiles)
        origins_of.append(tile_origins)
    return np.concatenate(rows), np.concatenate(origins_of), len(wide[0])


def _cut(
    origins: Offsets, targets: Offsets, order: Offsets, start: Offsets, size: Offsets, block: int, unit: int
) -> tuple[Offsets, Offsets]:
    """Cut [start, start + size) of each interval into tiles of at most `block` elements; return tiles and origins."""
    # number: tiles of each interval. interval, nth: each tile's interval, and place in it.
    # inside: the tile's start in its interval.
    number = -(-size // block)
    interval = np.repeat(np.arange(len(targets)), number)
    nth = np.arange(len(interval)) - np.repeat(np.cumsum(number) - number, number)
    inside = start[interval] + nth * block
    length = np.minimum(block, size[interval] - nth * block)
    # counts: pieces of each tile. first: index of its first origin. piece: index of each origin.
    counts = np.diff(order)[interval]
    first = np.cumsum(counts) - counts
    piece = np.repeat(order[interval] - first, counts) + np.arange(counts.sum())
    tiles = np.stack([(targets[interval] + inside) // unit, length // unit, first, counts], axis=1)
    return tiles, (origins[piece] + np.repeat(inside, counts)) // unit


def _check(source: Tensor, target: Tensor, table: SliceTable, accumulate: bool) -> None:
    for name, buffer, end in (("source", source, table.source_end), ("target", target, table.target_end)):
        if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.dtype not in DTYPES:
            raise _refused(
                f"{name} of shape {tuple(buffer.shape)}, strides {buffer.stride()}, {buffer.dtype}",
                "pass 1-D contiguous buffers of bf16, fp16, fp32 or fp64",
            )
        if buffer.numel() < end:
            raise _refused(
                f"the table needs {end} elements of {name}, but the buffer has {buffer.numel()}",
                f"pass the {name} buffer that the table was made for",
            )
    require_one_device("slice_copy", {"source": source, "target": target, "table": table.tiles})
    if accumulate and target.dtype not in (torch.float32, torch.float64):
        raise _refused(f"sums in {target.dtype}", "accumulate into fp32, and cast the result once")
    if table.sums and not accumulate:
        raise _refused("the table's target ranges overlap", "pass accumulate=True to sum overlaps")
