"""Recovery from a checkpoint in pieces: each part is read from the nearest place, from all places in parallel.

Threads, a few per tier, read what a rank needs only for itself. Meanwhile all ranks exchange what some read for others,
in windows of bounded size. So a recovery takes as long as the slowest tier, not as long as all together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hydragraph.checkpoint.extra_entry import decoded
from hydragraph.checkpoint.piece_sources import Fetch, Holdings, Piece, Place, Tier, fetch_plan
from hydragraph.checkpoint.state_pieces import PieceFile, Pieces
from hydragraph.cluster.agreement import together, together_own
from hydragraph.cluster.communicators import Groups, Role
from hydragraph.ir.parameter import Bucket
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.state_movement import CHUNK, Columns, OwnedState, dtypes

_LOG = logging.getLogger(__name__)

_WHAT = "read checkpoint pieces"
_AHEAD = 3  # windows read ahead of their exchange, because disks have different shares of each
_READERS = 4  # threads per tier: while one copies what it has read, others read


@dataclass(frozen=True, eq=False)
class Recovered:
    """Result of a recovery, on one rank.

    Attributes:
        step: step of the checkpoint.
        state: what this rank owns, filled.
        common: data shared by all ranks.
        read: bytes that this rank has read, by tier.
        received: bytes received from other ranks.
    """

    step: int
    state: OwnedState
    common: Mapping[str, Any]
    read: Mapping[Tier, int]
    received: int


def recover(
    pieces: Pieces, buckets: Sequence[Bucket], home: HomeState, groups: Groups, chunk: int = CHUNK
) -> Recovered:
    """Read the newest checkpoint that is still complete; all ranks call it.

    Args:
        pieces: where this rank keeps them; may be empty.
        buckets: of the model.
        home: what this rank will own; its weights are filled.
        groups: communicators of all ranks.
        chunk: bytes, over all ranks, that are read and exchanged for others at a time.

    Raises:
        ValueError: on all ranks: no place has a checkpoint, or parts of the newest are missing.
    """
    began = time.perf_counter()
    nodes, steps = _survey(pieces, groups)
    if not steps:
        raise ValueError(
            f"{_WHAT}: no place that is left holds any: keep some with Executable.keep, or load a checkpoint"
        )
    refusals = {}
    for step in sorted(steps, reverse=True):
        try:
            plan = fetch_plan(Holdings.of(steps[step]), nodes, home.layouts)
            break
        except ValueError as error:
            refusals[step] = error
    else:
        raise ValueError(f"{_WHAT}: step {max(steps)}: {refusals[max(steps)]}")
    common = _common(pieces, step, steps[step], groups)
    columns: Columns = {name: dtypes(kinds) for name, kinds in common["columns"].items()}
    state = OwnedState.empty(home, columns)
    reading = _Reading(pieces, step, buckets, columns, state)
    mine = [fetch for fetch in plan if fetch.receivers == (fetch.reader,)]
    shared = [fetch for fetch in plan if fetch.receivers != (fetch.reader,)]
    rank = groups.world.rank
    with ThreadPoolExecutor(len(Tier) * _READERS, thread_name_prefix="hydragraph-read") as threads:
        own = {tier: [fetch for fetch in mine if fetch.reader == rank and fetch.tier is tier] for tier in Tier}
        jobs: list[Future[None]] = [
            threads.submit(reading.keep, own[tier][first::_READERS]) for tier in Tier for first in range(_READERS)
        ]
        received = 0
        windows = [*_windows(reading, shared, chunk // (_AHEAD + 1))]
        begun = [_begin(reading, window, rank, threads) for window in windows[:_AHEAD]]
        for number, window in enumerate(windows):
            data = together_own(groups, _WHAT, partial(_results, begun.pop(0)))
            if number + _AHEAD < len(windows):  # read while this window is exchanged
                begun.append(_begin(reading, windows[number + _AHEAD], rank, threads))
            received += _exchange(reading, window, data, groups)
        together(groups, _WHAT, lambda: [job.result() for job in jobs] and None)
    sizes = {tier: sum(reading.bytes_of(f) for f in plan if f.reader == rank and f.tier is tier) for tier in Tier}
    seconds = time.perf_counter() - began
    told = ", ".join(f"{size / 1e6:.1f} MB of {tier.name.lower()}" for tier, size in sizes.items())
    _LOG.info(
        "read pieces of step %d in %.2f s: %s; %.1f MB came from other ranks", step, seconds, told, received / 1e6
    )
    return Recovered(step, state, common, sizes, received)


def _survey(pieces: Pieces, groups: Groups) -> tuple[list[int], dict[int, dict[Place, list[Piece]]]]:
    """Return the node of each rank and, by step, the pieces in every remaining place."""
    rank = groups.world.rank
    hosts = groups.gather_objects((groups.world.node, {tier: str(tier) for tier in pieces.shelves}))
    names = [host for host, _ in hosts]
    nodes = [names.index(name) for name in names]
    reach = {
        Tier.MEMORY: [rank],
        Tier.DISK: [r for r, (_, has) in enumerate(hosts) if nodes[r] == nodes[rank] and Tier.DISK in has],
        Tier.STORE: [r for r, (_, has) in enumerate(hosts) if Tier.STORE in has],
    }

    def listed() -> dict[int, dict[Place, list[Piece]]]:
        found: dict[int, dict[Place, list[Piece]]] = {}
        for tier, ranks in reach.items():
            if tier in pieces.shelves and min(ranks) == rank:  # only one of the ranks that share a place lists it
                for step, held in pieces.held(tier).items():
                    found.setdefault(step, {})[Place(tier, tuple(ranks))] = held
        return found

    steps: dict[int, dict[Place, list[Piece]]] = {}
    for found in together(groups, _WHAT, listed):
        for step, places in found.items():
            steps.setdefault(step, {}).update(places)
    return nodes, steps


def _common(pieces: Pieces, step: int, places: Mapping[Place, Sequence[Piece]], groups: Groups) -> Mapping[str, Any]:
    """Return the data shared by all ranks, read by one of them."""
    place = min(places, key=lambda each: (each.tier, each.ranks))
    leader = place.ranks[0]
    data = together(groups, _WHAT, lambda: pieces.common(place.tier, step) if groups.world.rank == leader else b"")
    found: Mapping[str, Any] = decoded(data[leader])
    return found


class _Reading:
    """Reads of one rank.

    Args:
        pieces, step: what to read.
        buckets, columns: description of the state.
        state: destination.
    """

    def __init__(
        self, pieces: Pieces, step: int, buckets: Sequence[Bucket], columns: Columns, state: OwnedState
    ) -> None:
        self._pieces = pieces
        self._step = step
        self._buckets = {bucket.name: bucket for bucket in buckets}
        self._columns = columns
        self._state = state

    def keep(self, fetches: Sequence[Fetch]) -> None:
        """Read parts that this rank needs itself."""
        for fetch in fetches:
            self.fill(fetch, self.read(fetch))

    def spans(self, fetch: Fetch) -> Iterator[tuple[str, int, int, str, torch.dtype]]:
        """Yield (parameter, lo, hi, column, dtype) of the parts of a fetch, in the order in which they are sent."""
        start = 0
        for parameter in self._buckets[fetch.piece.bucket].parameters:
            low, high = max(fetch.lo, start), min(fetch.hi, start + parameter.size)
            if low < high:
                for column, dtype in self._columns[parameter.name].items():
                    yield parameter.name, low - start, high - start, column, dtype
            start += parameter.size

    def bytes_of(self, fetch: Fetch) -> int:
        """Return the size of a fetch in bytes."""
        return sum((hi - lo) * dtype.itemsize for _, lo, hi, _, dtype in self.spans(fetch))

    def read(self, fetch: Fetch) -> Tensor:
        """Return the data of a fetch as bytes, 1-D, on the CPU."""
        piece = fetch.piece
        file: PieceFile = self._pieces.reader(
            fetch.tier, self._step, piece, (fetch.lo, fetch.hi) == (piece.lo, piece.hi)
        )
        parts = [file.read(name, column, lo, hi, dtype) for name, lo, hi, column, dtype in self.spans(fetch)]
        return torch.cat([part.view(torch.uint8) for part in parts])

    def fill(self, fetch: Fetch, data: Tensor) -> None:
        """Copy the data of a fetch to its place in this rank's state."""
        home = self._state.home
        rows = home.layouts[fetch.piece.bucket].of(home.rank)
        row = int(((rows.lo <= fetch.lo) & (fetch.lo < rows.hi)).argmax())
        at = (
            int(rows.at[row]) + fetch.lo - int(rows.lo[row])
        )  # position of the first element in the shard; rows are contiguous
        offsets = self._buckets[fetch.piece.bucket].offsets()
        begin = 0
        for name, lo, hi, column, dtype in self.spans(fetch):
            there = at + offsets[name] + lo - fetch.lo - home.pieces[name].at
            view = self._state.column(name, column)[there : there + hi - lo].view(torch.uint8)
            view.copy_(data[begin : begin + len(view)])
            begin += (hi - lo) * dtype.itemsize


def _windows(reading: _Reading, fetches: Sequence[Fetch], chunk: int) -> Iterator[list[Fetch]]:
    """Split reads for others into lists of about `chunk` bytes, identical on all ranks."""
    window: list[Fetch] = []
    size = 0
    for fetch in fetches:
        window.append(fetch)
        size += reading.bytes_of(fetch) * len(fetch.receivers)
        if size >= chunk:
            yield window
            window, size = [], 0
    if window:
        yield window


def _results(jobs: Mapping[Fetch, Future[Tensor]]) -> dict[Fetch, Tensor]:
    """Wait for pending reads."""
    return {fetch: job.result() for fetch, job in jobs.items()}


def _begin(
    reading: _Reading, window: Sequence[Fetch], rank: int, threads: ThreadPoolExecutor
) -> dict[Fetch, Future[Tensor]]:
    """Start reading what this rank reads for others."""
    return {fetch: threads.submit(reading.read, fetch) for fetch in window if fetch.reader == rank}


def _exchange(reading: _Reading, window: Sequence[Fetch], data: Mapping[Fetch, Tensor], groups: Groups) -> int:
    """Send what others need and receive what they have read; return the number of bytes received."""
    rank, ranks, device = groups.world.rank, groups.world.ranks, groups.world.device

    leaving = [
        [data[f] for f in window if f.reader == rank and peer in f.receivers and peer != rank] for peer in range(ranks)
    ]
    arriving = [[f for f in window if f.reader == peer != rank and rank in f.receivers] for peer in range(ranks)]
    sent = [sum(map(len, parts)) for parts in leaving]
    received = [sum(map(reading.bytes_of, fetches)) for fetches in arriving]
    nothing = torch.empty(0, dtype=torch.uint8)
    outgoing = torch.cat([nothing, *(part for parts in leaving for part in parts)]).to(device)
    incoming = torch.empty(sum(received), dtype=torch.uint8, device=device)
    groups.wait(groups.all_to_all(Role.PULL, incoming, outgoing, received, sent))
    at = 0
    for fetch in (fetch for fetches in arriving for fetch in fetches):
        size = reading.bytes_of(fetch)
        reading.fill(fetch, incoming[at : at + size])
        at += size
    for fetch, part in data.items():
        if rank in fetch.receivers:
            reading.fill(fetch, part)
    return len(incoming)
