"""Movement of weights and optimizer state from one home to another.

`ir.link.move` links each bucket's old and new layout. The state, in bucket order, is divided into windows of at most
CHUNK bytes; for each window, a rank sends one message to every other rank. The old state stays unchanged until the new
state is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cluster.message_in_flight import Message
from hydragraph.ir.layout import Ints, Layout
from hydragraph.ir.link import move
from hydragraph.ir.parameter import Bucket
from hydragraph.runtime.home_state import HomeState, parameters_within

# Bytes per window
CHUNK = 128 << 20
AHEAD = 2

_WEIGHT = ""

# Dtypes of each parameter's weight (named "") and optimizer states
Columns = Mapping[str, Mapping[str, torch.dtype]]
Intervals = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class OwnedState:
    """One rank's weights and optimizer state.

    Attributes:
        states: by parameter and state name, a 1-D tensor of this rank's part, or another value.
    """

    home: HomeState
    states: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(home: HomeState, optimizer: torch.optim.Optimizer | None) -> OwnedState:
        if optimizer is None:
            return OwnedState(home, {})
        return OwnedState(home, {name: optimizer.state.get(p, {}) for name, p in home.parameters.items()})

    @staticmethod
    def empty(home: HomeState, columns: Columns, kept: OwnedState | None = None) -> OwnedState:
        """Allocate a tensor per bucket and state in `columns`; share other parameters' tensors with `kept`."""
        kinds = {(home.pieces[name].bucket, *column) for name, those in columns.items() for column in those.items()}
        room = {
            (bucket, state): torch.empty(len(home.weights[bucket]), dtype=dtype, device=home.weights[bucket].device)
            for bucket, state, dtype in kinds
            if state != _WEIGHT
        }
        states = {
            name: {s: piece.of({piece.bucket: room[piece.bucket, s]}) for s in columns.get(name, ()) if s != _WEIGHT}
            for name, piece in home.pieces.items()
        }
        if kept is not None:
            states |= {name: kept.tensors(name) for name in kept.states if name not in columns}
        return OwnedState(home, states)

    def tensors(self, parameter: str) -> dict[str, Tensor]:
        states = self.states.get(parameter, {})
        return {name: value for name, value in states.items() if isinstance(value, Tensor) and value.dim()}

    @property
    def columns(self) -> dict[str, dict[str, torch.dtype]]:
        columns = {}
        for name, parameter in self.home.parameters.items():
            if parameter.numel():
                states = {state: tensor.dtype for state, tensor in self.tensors(name).items()}
                columns[name] = {_WEIGHT: parameter.dtype, **states}
        return columns

    def column(self, parameter: str, state: str) -> Tensor:
        if state == _WEIGHT:
            return self.home.parameters[parameter].detach()
        column: Tensor = self.states[parameter][state]
        return column


def named(columns: Columns) -> dict[str, dict[str, str]]:
    return {name: {c: str(d).removeprefix("torch.") for c, d in kinds.items()} for name, kinds in columns.items()}


def dtypes(kinds: Mapping[str, str]) -> dict[str, torch.dtype]:
    return {column: getattr(torch, name) for column, name in kinds.items()}


def agreed_columns(ranks: Sequence[Columns]) -> Columns:
    """Merge the columns that ranks report for their parameters; raise a ValueError if ranks disagree."""
    columns: dict[str, Mapping[str, torch.dtype]] = {}
    for rank, rank_columns in enumerate(ranks):
        for name, there in rank_columns.items():
            if columns.setdefault(name, there) != there:
                raise ValueError(
                    f"move: for parameter {name}, rank {rank}'s optimizer has {sorted(there)[1:]}, but"
                    f" an earlier rank has {sorted(columns[name])[1:]}: step the optimizer on all ranks"
                )
    return columns


@dataclass(frozen=True)
class MovedPart:
    """Elements of a parameter that move between ranks or stay, with offsets in the shards."""

    src: int
    dst: int
    parameter: str
    src_at: int
    dst_at: int
    size: int

    def views(self, state: OwnedState, at: int, columns: Columns) -> list[Tensor]:
        first = at - state.home.pieces[self.parameter].at
        tensors = (state.column(self.parameter, column) for column in columns[self.parameter])
        return [column[first : first + self.size] for column in tensors]


@dataclass(frozen=True, eq=False)
class Route:
    """Route of state from one home to another, equal on all ranks.

    Attributes:
        source: current owners of each bucket, in this world's numbers.
    """

    buckets: Sequence[Bucket]
    source: Mapping[str, Layout]
    target: Mapping[str, Layout]
    columns: Columns

    @cached_property
    def lost(self) -> dict[str, Intervals]:
        gaps = {bucket.name: self.source[bucket.name].missing for bucket in self.buckets}
        return {name: list(zip(lo.tolist(), hi.tolist(), strict=True)) for name, (lo, hi) in gaps.items() if len(lo)}

    def width(self, parameter: str) -> int:
        return sum(dtype.itemsize for dtype in self.columns.get(parameter, {}).values())

    def windows(self, chunk: int) -> Iterator[dict[str, tuple[int, int]]]:
        """Yield windows of at most `chunk` bytes, as intervals by bucket."""
        window: dict[str, tuple[int, int]] = {}
        room = chunk
        for bucket in self.buckets:
            lo = 0
            for parameter in bucket.parameters:
                width = self.width(parameter.name)
                end = lo + parameter.size
                while lo < end:
                    # A window has at least one element, even one wider than `chunk`.
                    if room < width:
                        yield window
                        window = {}
                        room = max(chunk, width)
                    hi = min(end, lo + room // width) if width else end
                    window[bucket.name] = (window.get(bucket.name, (lo, hi))[0], hi)
                    room -= (hi - lo) * width
                    lo = hi
        if window:
            yield window

    def parts(self, window: Mapping[str, tuple[int, int]], rank: int) -> Iterator[MovedPart]:
        """Yield the parts of a window that a rank sends, receives or keeps; order is equal on sender and receiver."""
        for bucket in self.buckets:
            if bucket.name not in window:
                continue
            source = self.source[bucket.name]
            target = self.target[bucket.name].within(*_held(source, *window[bucket.name]))
            slices = move(source, target, rank)
            columns = (slices.src, slices.dst, slices.lo, slices.hi, slices.src_at, slices.dst_at)
            for src, dst, lo, hi, src_at, dst_at in zip(*(column.tolist() for column in columns), strict=True):
                for name, low, high, _ in parameters_within(bucket, lo, hi):
                    yield MovedPart(src, dst, name, src_at + low - lo, dst_at + low - lo, high - low)


def _held(source: Layout, lo: int, hi: int) -> tuple[Ints, Ints]:
    # Intervals between lost ones: from 0 to the first, and so on to the end.
    begin, end = source.missing
    starts = np.concatenate((np.zeros(1, np.int64), end)).clip(lo, hi)
    ends = np.append(begin, source.size).clip(lo, hi)
    return starts, ends


@dataclass(frozen=True, eq=False)
class _UnderWay:
    arriving: Sequence[MovedPart]
    incoming: Tensor
    message: Message | None


@dataclass(eq=False)
class StateTransfer:
    """Transfer of columns to new owners; all ranks transfer the same windows in order, and must finish.

    Args:
        old: this rank's state, unchanged until the transfer is finished.
    """

    route: Route
    old: OwnedState | None
    new: OwnedState
    groups: Groups
    channel: Channel = Channel.PULL
    chunk: int = CHUNK
    received: int = 0

    def __post_init__(self) -> None:
        self._windows = self.route.windows(self.chunk)
        self._under_way: deque[_UnderWay] = deque()

    def go_on(self) -> None:
        """Store arrived windows and send more windows, without waiting."""
        while self._under_way and (self._under_way[0].message is None or self._under_way[0].message.done):
            self._land()
        self._fill()

    def finish(self) -> int:
        """Wait until everything has arrived; return the bytes received."""
        self._fill()
        while self._under_way:
            self._land()
            self._fill()
        return self.received

    def _fill(self) -> None:
        while len(self._under_way) < AHEAD and (window := next(self._windows, None)) is not None:
            self._under_way.append(self._sent(window))

    def _sent(self, window: Mapping[str, tuple[int, int]]) -> _UnderWay:
        route, world = self.route, self.groups.world
        rank, columns, old = world.rank, route.columns, self.old
        parts = list(route.parts(window, rank))
        # Messages are ordered by peer. Both ends have a peer's parts in the order of `parts`, because
        # sorting is stable.
        leaving = sorted((p for p in parts if p.src == rank != p.dst), key=lambda part: part.dst)
        arriving = sorted((p for p in parts if p.dst == rank != p.src), key=lambda part: part.src)
        sent, received = [0] * world.ranks, [0] * world.ranks
        for part in leaving:
            sent[part.dst] += part.size * route.width(part.parameter)
        for part in arriving:
            received[part.src] += part.size * route.width(part.parameter)
        outgoing = torch.empty(sum(sent), dtype=torch.uint8, device=world.device)
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=world.device)
        if old is not None:
            _lay([view for part in leaving for view in part.views(old, part.src_at, columns)], outgoing, out=True)
        message = self.groups.all_to_all(self.channel, incoming, outgoing, received, sent)
        for part in parts:
            if part.src == part.dst and old is not None:
                stay = part.views(old, part.src_at, columns)
                for there, here in zip(part.views(self.new, part.dst_at, columns), stay, strict=True):
                    there.copy_(here)
        return _UnderWay(arriving, incoming, message)

    def _land(self) -> None:
        first = self._under_way.popleft()
        self.groups.wait(first.message)
        columns = self.route.columns
        views = [view for part in first.arriving for view in part.views(self.new, part.dst_at, columns)]
        _lay(views, first.incoming, out=False)
        self.received += len(first.incoming)


def carry(route: Route, old: OwnedState | None, new: OwnedState, groups: Groups, chunk: int = CHUNK) -> int:
    return StateTransfer(route, old, new, groups, chunk=chunk).finish()


def _lay(views: Sequence[Tensor], message: Tensor, out: bool) -> None:
    at = 0
    for view in views:
        bytes_of = view.view(torch.uint8)
        there = message[at : at + len(bytes_of)]
        (there.copy_(bytes_of) if out else bytes_of.copy_(there))
        at += len(bytes_of)
