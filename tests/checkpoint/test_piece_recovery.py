"""Pieces are read by other ranks than wrote them, from what is left: memory, disks, the store, and mixtures of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import pytest

import hydragraph as hg
from hydragraph.checkpoint.extra_entry import encoded
from hydragraph.checkpoint.piece_recovery import Recovery, RecoveryResult
from hydragraph.checkpoint.piece_sources import StorageTier
from hydragraph.checkpoint.state_pieces import MemoryStorage, Pieces, StoredCheckpoint
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import World, join
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Program
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.state_movement import OwnedState, named
from hydragraph.spec.home import EQUAL, Home
from tests.runtime.homes import ALONE, MODEL, groups_of, trained

RANKS = 3
SERIES = "-a1"


def kept(world: World, folder: Path, step: int) -> Pieces:
    """Keep what a trained rank owns; ranks 0 and 1 share a node's disk."""
    pieces = Pieces(disk=folder / f"disk {world.node}", store=f"file://{folder}/store")
    begin_keeping(world, pieces, step)
    pieces.wait()
    return pieces


def begin_keeping(world: World, pieces: Pieces, step: int, series: str = SERIES) -> None:
    own = OwnedState.of(*trained(world, "adamw"))
    whole = {name: dict(own.columns.get(name, next(iter(own.columns.values())))) for name in MODEL.parameters}
    common = {"columns": named(whole), "steps": step, "optimizer": None, "extra": {"seen": step}}
    pieces.put(StoredCheckpoint(step, series), own, MODEL.buckets, whole, partial(encoded, "extra", common))


def read(world: World, pieces: Pieces, groups: Groups, owners: Home) -> tuple[bool, RecoveryResult]:
    """Read it under another home; say whether every bit is as it would be there."""
    layouts = HomeLayouts(owners, world.ranks).by_name(MODEL.buckets)
    home = HomeState.allocate(cast(Program, MODEL), layouts, world.rank)
    found = Recovery(pieces, MODEL.buckets, home, groups, chunk=100).run()
    assert found is not None
    expected = OwnedState.of(*trained(world, "adamw", owners))
    same = all(
        bool((found.state.column(name, column) == expected.column(name, column)).all())
        for name, columns in expected.columns.items()
        for column in columns
    )
    return same, found


def recovered(folder: Path) -> list[tuple[bool, int, dict[str, int], int]]:
    world = join("cpu")
    world = replace(world, node=f"node {world.rank // 2}")
    groups = groups_of(world)
    lost: Sequence[tuple[Sequence[StorageTier], Sequence[int]]] = [
        ((), ()),
        ((StorageTier.MEMORY,), (0, 1, 2)),
        ((StorageTier.MEMORY,), (1,)),
        ((StorageTier.MEMORY, StorageTier.DISK), (2,)),
        ((StorageTier.MEMORY, StorageTier.DISK), (0, 1, 2)),
    ]
    seen = []
    for number, (tiers, ranks) in enumerate(lost):
        case = folder / str(number)
        pieces = kept(world, case, 4)
        groups.gather(None)  # ranks 0 and 1 share a disk: neither loses it while the other writes
        if world.rank in ranks:
            for tier in tiers:
                pieces.shelves[tier].drop(f"step-4.{SERIES}")
        groups.gather(None)
        same, found = read(world, pieces, groups, [EQUAL, Home([3, 1, 0])][number % 2])
        assert found.common["extra"] == {"seen": 4}
        seen.append((same, found.kept.step, {tier.name: size for tier, size in found.read.items()}, found.received))
    groups.gather(None)
    if world.rank == 0:
        shutil.rmtree(case / "store")
    groups.gather(None)
    with pytest.raises(ValueError, match="read checkpoint pieces: no memory, disk or store holds a piece"):
        read(world, pieces, groups, EQUAL)
    groups.close()
    return seen


def test_what_is_left_is_read_from_the_nearest_place(tmp_path: Path) -> None:
    found = hg.launch(recovered, RANKS, tmp_path, timeout=timedelta(seconds=60))
    assert all(same and step == 4 for ranks in found for same, step, _, _ in ranks)

    def total(case: int, tier: StorageTier) -> int:
        return sum(ranks[case][2][tier.name] for ranks in found)

    everything = sum(total(0, tier) for tier in StorageTier)
    assert [total(0, tier) for tier in StorageTier] == [everything, 0, 0], "each rank has what it needs in memory"
    assert total(1, StorageTier.MEMORY) == total(1, StorageTier.STORE) == 0
    assert 0 < total(2, StorageTier.DISK) < everything
    assert total(2, StorageTier.STORE) == 0
    assert 0 < total(3, StorageTier.STORE) < everything
    assert total(4, StorageTier.STORE) == everything


def mixed(folder: Path) -> tuple[bool, int]:
    """The newest step never reached the store and lost a rank; the one before is whole."""
    world = replace(join("cpu"), node=f"node {join('cpu').rank}")
    groups = groups_of(world)
    pieces = kept(world, folder, 4)
    own = OwnedState.of(*trained(world, "adamw"))
    if world.rank:
        pieces.shelves[StorageTier.MEMORY].put(
            f"step-6.{SERIES}/common.pt", pieces.common(StorageTier.MEMORY, StoredCheckpoint(4, SERIES))
        )
        for name in list(pieces.shelves[StorageTier.MEMORY].names()):
            if name.startswith("step-4."):
                data = pieces.shelves[StorageTier.MEMORY].get(name)
                pieces.shelves[StorageTier.MEMORY].put(name.replace("step-4", "step-6"), data)
    assert own.home.rank == world.rank
    same, found = read(world, pieces, groups, EQUAL)
    groups.close()
    return same, found.kept.step


def test_the_newest_step_that_is_whole_is_taken(tmp_path: Path) -> None:
    assert hg.launch(mixed, 2, tmp_path, timeout=timedelta(seconds=60)) == [(True, 4)] * 2


def damaged(folder: Path) -> list[tuple[bool, int, int]]:
    """Files of the newest step are damaged on disks, then in the store too."""
    world = replace(join("cpu"), node=f"node {join('cpu').rank}")
    groups = groups_of(world)
    kept(world, folder, 3)
    pieces = kept(world, folder, 4)
    seen = []
    for tier, step in ((StorageTier.DISK, 4), (StorageTier.STORE, 4)):
        groups.gather(None)
        place = pieces.shelves[tier]
        names = [name for name in place.names() if name.startswith(f"step-{step}.") and "layer.0" in name]
        for name in names:  # of both ranks in the store, of this one on its disk
            data = place.get(name)
            place.put(name, data[:-8] + bytes(8) if world.rank else data[:-20])
        again = Pieces(False, folder / f"disk {world.node}", f"file://{folder}/store")
        groups.gather(None)
        same, found = read(world, again, groups, EQUAL)
        seen.append((same, found.kept.step, found.read[StorageTier.STORE]))
    groups.close()
    return seen


def test_damaged_pieces_are_replaced_by_other_copies_or_an_earlier_step(tmp_path: Path) -> None:
    found = hg.launch(damaged, 2, tmp_path, timeout=timedelta(seconds=60))
    assert [[step for _, step, _ in ranks] for ranks in found] == [[4, 3]] * 2
    assert all(same for ranks in found for same, _, _ in ranks)
    assert all(ranks[0][2] > 0 for ranks in found), "what is damaged on the disk comes from the store"


class Slow(MemoryStorage):
    def put(self, name: str, data: bytes) -> None:
        time.sleep(0.02)
        super().put(name, data)


def test_a_checkpoint_that_this_process_is_still_writing_is_read() -> None:
    pieces = Pieces()
    pieces.shelves[StorageTier.MEMORY] = Slow()
    begin_keeping(ALONE, pieces, 4)
    same, found = read(ALONE, pieces, groups_of(ALONE), EQUAL)
    assert same
    assert found.kept.step == 4


def test_later_pieces_of_an_abandoned_series_are_not_read() -> None:
    pieces = Pieces()
    for step, series in ((5, "-ff"), (2, "-01")):
        begin_keeping(ALONE, pieces, step, series)
        pieces.join()
    pieces.last = None
    for _ in range(2):
        _, found = read(ALONE, pieces, groups_of(ALONE), EQUAL)
        assert found.kept == StoredCheckpoint(2, "-01")


class Unreachable(MemoryStorage):
    """Storage that cannot be reached; its driver raises an error that is not an OSError."""

    def names(self) -> Iterable[str]:
        raise LookupError("no route to host")


def without_one_place(folder: Path) -> list[tuple[bool, int, dict[StorageTier, int]]]:
    """The store cannot be reached; then the disks' common data is damaged; then the store's too."""
    world = replace(join("cpu"), node=f"node {join('cpu').rank}")
    groups = groups_of(world)
    for step in (3, 4):
        kept(world, folder, step)
    seen = []
    for damaged in (None, StorageTier.DISK, StorageTier.STORE):
        groups.gather(None)
        again = Pieces(False, folder / f"disk {world.node}", f"file://{folder}/store")
        if damaged is None:
            again.shelves[StorageTier.STORE] = Unreachable()
        elif damaged is StorageTier.DISK or world.rank == 0:
            again.shelves[damaged].put(f"step-4.{SERIES}/common.pt", b"PK torn")
        groups.gather(None)
        same, found = read(world, again, groups, EQUAL)
        seen.append((same, found.kept.step, dict(found.read)))
    groups.close()
    return seen


def test_an_unreachable_store_or_damaged_common_data_do_not_end_a_recovery(tmp_path: Path) -> None:
    for ranks in hg.launch(without_one_place, 2, tmp_path, timeout=timedelta(seconds=60)):
        assert [(same, step) for same, step, _ in ranks] == [(True, 4), (True, 4), (True, 3)]
        assert ranks[0][2][StorageTier.STORE] == 0 < ranks[0][2][StorageTier.DISK]
        assert ranks[1][2][StorageTier.STORE] > 0
