"""Recovery from a checkpoint in pieces; each piece is read from the nearest place that has it.

Each rank's threads read the pieces that only this rank needs. Meanwhile, ranks exchange shared pieces, a bounded number
of bytes at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hydragraph.checkpoint.extra_entry import decoded
from hydragraph.checkpoint.manifest import check_buffers, check_model
from hydragraph.checkpoint.piece_sources import PiecePlace, PieceRead, StatePiece, StorageTier, fetch_plan
from hydragraph.checkpoint.save_and_load import BUFFERS, MODEL, shapes_of
from hydragraph.checkpoint.state_pieces import Pieces, StoredCheckpoint
from hydragraph.cluster.agreement import together, together_own
from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.ir.parameter import Bucket
from hydragraph.runtime.home_state import HomeState, parameters_within
from hydragraph.runtime.state_movement import CHUNK, Columns, OwnedState, dtypes

_LOG = logging.getLogger(__name__)

_WHAT = "read checkpoint pieces"
# Number of windows (lists of reads) read in advance
_AHEAD = 3
_READERS = 4


@dataclass(frozen=True, eq=False)
class RecoveryResult:
    """Result of a recovery on one rank; `read` has the bytes read from each tier."""

    kept: StoredCheckpoint
    state: OwnedState
    common: Mapping[str, Any]
    read: Mapping[StorageTier, int]
    received: int


@dataclass(frozen=True, eq=False)
class _Found:
    kept: StoredCheckpoint
    places: Mapping[PiecePlace, Sequence[StatePiece]]
    plan: Sequence[PieceRead]


@dataclass(frozen=True, eq=False)
class Recovery:
    """Reader of the newest complete checkpoint whose pieces can be read.

    A checkpoint of the series that a rank last wrote or read is preferred to a newer checkpoint of another series.

    Attributes:
        chunk: bytes that all ranks together read in advance or exchange at a time.
        least: earliest step to accept; if all complete checkpoints are older, `run` returns None.
        buffers: as for `save_and_load.load`.
        optimizer: name of the optimizer's class; None accepts any.
    """

    pieces: Pieces
    buckets: Sequence[Bucket]
    home: HomeState
    groups: Groups
    chunk: int = CHUNK
    least: int | None = None
    buffers: Mapping[str, Tensor] | None = None
    optimizer: str | None = None

    def run(self) -> RecoveryResult | None:
        """Complete pending writes and read pieces (collective call).

        Raises:
            ValueError: on all ranks, if the newest checkpoint is of another model or optimizer, or if no checkpoint is
                complete and `least` is None.
        """
        pieces = self.pieces
        pieces.join()
        while True:
            # An unreadable piece is remembered, so the next round uses another copy or an earlier
            # checkpoint. An error without a new one would recur, so it is raised.
            unreadable_before = len(pieces.unreadable)
            try:
                newest = self._newest()
                if newest is None:
                    return None
                common = self._common(newest)
                where = f"checkpoint pieces of step {newest.kept.step}"
                together(self.groups, _WHAT, partial(self._check, where, common))
                recovered = self._read(newest, common)
                pieces.series = recovered.kept.series
                return recovered
            except ValueError as error:
                if not any(self.groups.gather(len(pieces.unreadable) > unreadable_before)):
                    raise
                if len(pieces.unreadable) > unreadable_before:
                    _LOG.warning("%s; reading another copy or an earlier checkpoint", error)

    def _newest(self) -> _Found | None:
        nodes, there = self._survey()
        if not there and self.least is None:
            raise ValueError(
                f"{_WHAT}: no memory, disk or store holds a piece: write pieces with Executable.keep, or load a "
                "checkpoint"
            )
        current = set(self.groups.gather(self.pieces.series))
        refusals = []
        # Current series come first, because another run may have written newer pieces here.
        for kept in sorted(there, key=lambda kept: (kept.series in current, kept), reverse=True):
            if self.least is not None and kept.step < self.least:
                return None
            try:
                return _Found(kept, there[kept], fetch_plan(there[kept], nodes, self.home.layouts))
            except ValueError as error:
                refusals.append(f"{_WHAT}: step {kept.step}: {error}")
        if self.least is None:
            raise ValueError(refusals[0])
        return None

    def _check(self, where: str, common: Mapping[str, Any]) -> None:
        # Earlier versions did not record the model
        if MODEL in common:
            parameters, saved = common[MODEL]
            check_model(where, parameters, saved, shapes_of(self.home), self.optimizer)
        if self.buffers is not None:
            check_buffers(where, common[BUFFERS], self.buffers)

    def _read(self, found: _Found, common: Mapping[str, Any]) -> RecoveryResult:
        began = time.perf_counter()
        groups = self.groups
        rank = groups.world.rank
        columns: Columns = {name: dtypes(kinds) for name, kinds in common["columns"].items()}
        state = OwnedState.empty(self.home, columns)
        buckets = {bucket.name: bucket for bucket in self.buckets}
        reading = _PieceReader(self.pieces, found.kept, buckets, columns, state)
        # mine: reads whose only receiver is the reader; threads finish them without messages
        mine = [fetch for fetch in found.plan if fetch.receivers == (fetch.reader,)]
        shared = [fetch for fetch in found.plan if fetch.receivers != (fetch.reader,)]
        with ThreadPoolExecutor(len(StorageTier) * _READERS, thread_name_prefix="hydragraph-read") as threads:
            own = {
                tier: [fetch for fetch in mine if fetch.reader == rank and fetch.tier is tier] for tier in StorageTier
            }
            jobs: list[Future[None]] = [
                threads.submit(reading.keep, own[tier][first::_READERS])
                for tier in StorageTier
                for first in range(_READERS)
            ]
            received = 0
            windows = [*_windows(reading, shared, self.chunk // (_AHEAD + 1))]
            # All ranks exchange the same windows in order. Some are read ahead, so that reading and
            # sending overlap within `chunk` bytes.
            begun = [_begin(reading, window, rank, threads) for window in windows[:_AHEAD]]
            for number, window in enumerate(windows):
                data = together_own(groups, _WHAT, partial(_results, begun.pop(0)))
                if number + _AHEAD < len(windows):
                    begun.append(_begin(reading, windows[number + _AHEAD], rank, threads))
                received += _exchange(reading, window, data, groups)
            together(groups, _WHAT, lambda: [job.result() for job in jobs] and None)
        read = [fetch for fetch in found.plan if fetch.reader == rank]
        sizes = {tier: sum(reading.bytes_of(fetch) for fetch in read if fetch.tier is tier) for tier in StorageTier}
        _LOG.info(
            "read pieces of step %d in %.2f s: %s; %.1f MB came from other ranks",
            found.kept.step,
            time.perf_counter() - began,
            ", ".join(f"{size / 1e6:.1f} MB from {tier.name.lower()}" for tier, size in sizes.items()),
            received / 1e6,
        )
        return RecoveryResult(found.kept, state, common, sizes, received)

    def _survey(self) -> tuple[list[int], dict[StoredCheckpoint, dict[PiecePlace, list[StatePiece]]]]:
        pieces = self.pieces
        rank = self.groups.world.rank
        hosts = self.groups.gather((self.groups.world.node, [*pieces.shelves], pieces.unreadable))
        names = [host for host, _, _ in hosts]
        nodes = [names.index(name) for name in names]
        # reach: tier -> ranks that share this rank's place: itself, its
        #   node, or all ranks with a store
        reach = {
            StorageTier.MEMORY: [rank],
            StorageTier.DISK: [
                r for r, (_, has, _) in enumerate(hosts) if nodes[r] == nodes[rank] and StorageTier.DISK in has
            ],
            StorageTier.STORE: [r for r, (_, has, _) in enumerate(hosts) if StorageTier.STORE in has],
        }

        def listed() -> dict[StoredCheckpoint, dict[PiecePlace, list[StatePiece]]]:
            by_checkpoint: dict[StoredCheckpoint, dict[PiecePlace, list[StatePiece]]] = {}
            for tier, ranks in reach.items():
                # The lowest rank that reaches the place lists its pieces.
                if tier in pieces.shelves and min(ranks) == rank:
                    # Pieces that any of these ranks could not read are left out.
                    without = set().union(*(hosts[sharer][2] for sharer in ranks))
                    try:
                        held = pieces.held(tier)
                    except Exception as error:
                        # fsspec's drivers raise their own types
                        _LOG.warning("%s: cannot list the pieces in %s: %s", _WHAT, tier.name.lower(), error)
                        continue
                    for kept, shelf_pieces in held.items():
                        readable = [piece for piece in shelf_pieces if (tier, kept, piece) not in without]
                        if (tier, kept, None) not in without:
                            by_checkpoint.setdefault(kept, {})[PiecePlace(tier, tuple(ranks))] = readable
            return by_checkpoint

        everything: dict[StoredCheckpoint, dict[PiecePlace, list[StatePiece]]] = {}
        for listing in together(self.groups, _WHAT, listed):
            for kept, places in listing.items():
                everything.setdefault(kept, {}).update(places)
        return nodes, everything

    def _common(self, found: _Found) -> Mapping[str, Any]:
        place = min(found.places, key=lambda each: (each.tier, each.ranks))
        leader = place.ranks[0]

        def read() -> bytes:
            if self.groups.world.rank != leader:
                return b""
            try:
                data = self.pieces.common(place.tier, found.kept)
                decoded(data)
            except Exception as error:
                # Torch raises many types of errors for damaged files
                self.pieces.unreadable.add((place.tier, found.kept, None))
                where = place.tier.name.lower()
                raise ValueError(f"{_WHAT}: common.pt of step {found.kept.step}, from {where}: {error}") from error
            return data

        return cast(Mapping[str, Any], decoded(together(self.groups, _WHAT, read)[leader]))


@dataclass(frozen=True, eq=False)
class _PieceReader:
    pieces: Pieces
    kept: StoredCheckpoint
    buckets: Mapping[str, Bucket]
    columns: Columns
    state: OwnedState

    def keep(self, fetches: Sequence[PieceRead]) -> None:
        for fetch in fetches:
            self.fill(fetch, self.read(fetch))

    def spans(self, fetch: PieceRead) -> Iterator[tuple[str, int, int, str, torch.dtype]]:
        """Yield (parameter, lo, hi, column, dtype) for each interval of a fetch, in sending order."""
        bucket = self.buckets[fetch.piece.bucket]
        for name, low, high, start in parameters_within(bucket, fetch.lo, fetch.hi):
            for column, dtype in self.columns[name].items():
                yield name, low - start, high - start, column, dtype

    def bytes_of(self, fetch: PieceRead) -> int:
        return sum((hi - lo) * dtype.itemsize for _, lo, hi, _, dtype in self.spans(fetch))

    def read(self, fetch: PieceRead) -> Tensor:
        piece = fetch.piece
        whole = (fetch.lo, fetch.hi) == (piece.lo, piece.hi)
        try:
            file = self.pieces.reader(fetch.tier, self.kept, piece, whole)
            parts = [file.read(name, column, lo, hi, dtype) for name, lo, hi, column, dtype in self.spans(fetch)]
        except Exception as error:
            # fsspec's drivers raise their own types
            self.pieces.unreadable.add((fetch.tier, self.kept, piece))
            raise ValueError(
                f"{_WHAT}: elements [{piece.lo}, {piece.hi}) of {piece.bucket} after step {self.kept.step}, from "
                f"{fetch.tier.name.lower()}: {error}"
            ) from error
        return torch.cat([part.view(torch.uint8) for part in parts])

    def fill(self, fetch: PieceRead, data: Tensor) -> None:
        home = self.state.home
        rows = home.layouts[fetch.piece.bucket].of(home.rank)
        row = int(((rows.lo <= fetch.lo) & (fetch.lo < rows.hi)).argmax())
        # Position of the fetch's first element in the shard
        at = int(rows.at[row]) + fetch.lo - int(rows.lo[row])
        offsets = self.buckets[fetch.piece.bucket].offsets()
        begin = 0
        for name, lo, hi, column, dtype in self.spans(fetch):
            there = at + offsets[name] + lo - fetch.lo - home.pieces[name].at
            view = self.state.column(name, column)[there : there + hi - lo].view(torch.uint8)
            view.copy_(data[begin : begin + len(view)])
            begin += (hi - lo) * dtype.itemsize


def _windows(reading: _PieceReader, fetches: Sequence[PieceRead], chunk: int) -> Iterator[list[PieceRead]]:
    window: list[PieceRead] = []
    size = 0
    for fetch in fetches:
        window.append(fetch)
        size += reading.bytes_of(fetch) * len(fetch.receivers)
        if size >= chunk:
            yield window
            window = []
            size = 0
    if window:
        yield window


def _results(jobs: Mapping[PieceRead, Future[Tensor]]) -> dict[PieceRead, Tensor]:
    return {fetch: job.result() for fetch, job in jobs.items()}


def _begin(
    reading: _PieceReader, window: Sequence[PieceRead], rank: int, threads: ThreadPoolExecutor
) -> dict[PieceRead, Future[Tensor]]:
    return {fetch: threads.submit(reading.read, fetch) for fetch in window if fetch.reader == rank}


def _exchange(
    reading: _PieceReader, window: Sequence[PieceRead], data: Mapping[PieceRead, Tensor], groups: Groups
) -> int:
    rank, ranks, device = groups.world.rank, groups.world.ranks, groups.world.device
    # leaving[peer]: bytes of reads for a peer; arriving[peer]: reads from it; both in the
    #   window's order, so that sizes match
    leaving = [
        [data[f] for f in window if f.reader == rank and peer in f.receivers and peer != rank] for peer in range(ranks)
    ]
    arriving = [[f for f in window if f.reader == peer != rank and rank in f.receivers] for peer in range(ranks)]
    sent = [sum(map(len, parts)) for parts in leaving]
    received = [sum(map(reading.bytes_of, fetches)) for fetches in arriving]
    nothing = torch.empty(0, dtype=torch.uint8)
    outgoing = torch.cat([nothing, *(part for parts in leaving for part in parts)]).to(device)
    incoming = torch.empty(sum(received), dtype=torch.uint8, device=device)
    groups.wait(groups.all_to_all(Channel.PULL, incoming, outgoing, received, sent))
    at = 0
    for fetch in (fetch for fetches in arriving for fetch in fetches):
        size = reading.bytes_of(fetch)
        reading.fill(fetch, incoming[at : at + size])
        at += size
    for fetch, part in data.items():
        if rank in fetch.receivers:
            reading.fill(fetch, part)
    return len(incoming)
