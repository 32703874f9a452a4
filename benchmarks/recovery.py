"""How long ranks wait for their state when spot instances went or came: from the nearest places, or from the cloud.

    python benchmarks/recovery.py                    # about two minutes
    python benchmarks/recovery.py --slower 50        # places four times as fast: computing shows more

The scenarios are those of AutoHet (its figure 10), with its bandwidths, both divided by the same number: a cloud store
of 1200 MB/s that all nodes share, and a disk of 3500 MB/s in each. State in host memory is not used, as after a
restart. N0 has the first half of every layer on its disk, N1 the second; the cloud has all.

    A  half of the data-parallel groups went: N0 and N1 need what they have
    B  N0 went: N1 needs everything, and has half
    C  N2 and N3 came: they need what N0 and N1 have, and need, too

Nodes are processes; what limits a place is a clock on reads of real files, and the network between nodes is this
machine's, unlimited. `cloud only` reads what a node needs from the store, each byte once per node; the closed forms
divide bytes by bandwidths, S being the size of the state, c the cloud, d a disk:

    A  cloud only S/c     ours S/2d                C  cloud only 2S/c     ours S/2d
    B  cloud only S/c     ours max(S/2c, S/2d): both are read at the same time
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.checkpoint.extra_entry import encoded
from hydragraph.checkpoint.piece_recovery import Recovery
from hydragraph.checkpoint.piece_sources import StorageTier
from hydragraph.checkpoint.state_pieces import DiskStorage, Pieces, PieceStorage, StoredCheckpoint
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Program
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.state_movement import OwnedState, named

CLOUD, DISK = 1.2e9, 3.5e9  # bytes per second, of all nodes together, and of each
COLUMNS = {"": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
LIMIT = timedelta(minutes=5)


@dataclass(frozen=True)
class Model:
    """As much of a Program as a home state needs: layers."""

    buckets: tuple[Bucket, ...]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """By name."""
        return {p.name: p for bucket in self.buckets for p in bucket.parameters}

    @property
    def bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(bucket.size for bucket in self.buckets) * sum(dtype.itemsize for dtype in COLUMNS.values())


@dataclass(frozen=True)
class Scenario:
    """One of the paper's.

    Attributes:
        nodes: that need their state, by the names that they had or got.
        copies: how many of them need the same.
        published: how much faster than Varuna AutoHet was.
    """

    nodes: tuple[int, ...]
    copies: int
    published: float

    def cloud_s(self, size: float, cloud: float) -> float:
        """Return the closed form of reading everything from the cloud."""
        return size * self.copies / cloud

    def ours_s(self, size: float, cloud: float, disk: float) -> float:
        """Return the closed form of reading what is near from disks, and the rest from the cloud meanwhile."""
        there = [node for node in self.nodes if node < 2]
        return max(size / 2 / disk, size * (2 - len(there)) / 2 / cloud)


SCENARIOS = {"A": Scenario((0, 1), 1, 4.38), "B": Scenario((1,), 1, 1.49), "C": Scenario((0, 1, 2, 3), 2, 3.59)}


class Limited:
    """A place whose reads take at least as long as its bandwidth says.

    Args:
        shelf: the place.
        bytes_per_s: this node's part of its bandwidth.
    """

    def __init__(self, shelf: PieceStorage, bytes_per_s: float) -> None:
        self._shelf = shelf
        self._rate = bytes_per_s
        self._free = 0.0  # when what was asked for before is through
        self._one = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        self._shelf.put(name, data)

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of a file, when they are through."""
        data = self._shelf.get(name, begin, end)
        with self._one:
            self._free = max(self._free, time.monotonic()) + len(data) / self._rate
            through = self._free
        time.sleep(max(0.0, through - time.monotonic()))
        return data

    def names(self) -> Iterable[str]:
        """List all files."""
        return self._shelf.names()

    def folders(self) -> Iterable[str]:
        """List the directories of checkpoints."""
        return self._shelf.folders()

    def drop(self, folder: str) -> None:
        """Delete a directory of a checkpoint."""
        self._shelf.drop(folder)


def model(layers: int, elements: int) -> Model:
    """Return layers of so many elements."""
    return Model(tuple(Bucket(f"layer.{i}", (Parameter(f"layer.{i}.w", (elements,)),), ()) for i in range(layers)))


def write(of: Model, folder: Path) -> None:
    """Let N0 and N1 keep what they own, on their disks and in the cloud."""
    layouts = HomeLayouts(hg.Home(), 2).by_name(of.buckets)
    columns = dict.fromkeys(of.parameters, COLUMNS)
    common = {"columns": named(columns), "steps": 1, "optimizer": None, "extra": {}}
    for node in range(2):
        state = OwnedState.empty(HomeState.allocate(cast(Program, of), layouts, node), columns)
        for weights in state.home.weights.values():
            weights.normal_()
        pieces = Pieces(memory=False, disk=folder / f"N{node}", store=f"file://{folder}/cloud")
        pieces.put(StoredCheckpoint(1, "-1"), state, of.buckets, columns, partial(encoded, "extra", common))
        pieces.wait()


def read(of: Model, folder: Path, scenario: Scenario, near: bool, cloud: float, disk: float) -> float:
    """Return the seconds of one node's recovery."""
    world = join("cpu")
    node = scenario.nodes[world.rank]
    world = replace(world, node=f"N{node}")
    groups = Groups(world, timedelta(seconds=300), watch=world.watch)
    home = hg.Home(copies=scenario.copies, nodes=range(world.ranks) if scenario.copies > 1 else None)
    state = HomeState.allocate(cast(Program, of), HomeLayouts(home, world.ranks).by_name(of.buckets), world.rank)
    pieces = Pieces(memory=False, disk=folder / f"N{node}", store=f"file://{folder}/cloud")
    # All files lie on this machine, so places differ only in their simulated speeds.
    pieces.shelves[StorageTier.STORE] = Limited(DiskStorage(folder / "cloud"), cloud / world.ranks)
    pieces.shelves[StorageTier.DISK] = Limited(pieces.shelves[StorageTier.DISK], disk)
    if not near:
        del pieces.shelves[StorageTier.DISK]
    elif len(scenario.nodes) == 1:
        pieces.shelves[StorageTier.STORE] = Limited(DiskStorage(folder / "cloud"), cloud)
    groups.gather(None)
    began = time.perf_counter()
    Recovery(pieces, of.buckets, state, groups, chunk=8 << 20).run()
    groups.gather(None)
    seconds = time.perf_counter() - began
    groups.close()
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if ours is within a tenth of its closed form everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=200.0, help="by how much all bandwidths are divided")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--elements", type=int, default=1 << 18, help="of a layer")
    options = parser.parse_args(arguments)
    of = model(options.layers, options.elements)
    cloud, disk = CLOUD / options.slower, DISK / options.slower
    table = Table(title=f"{of.bytes / 1e6:.0f} MB of state; cloud {cloud / 1e6:.0f}, disks {disk / 1e6:.0f} MB/s")
    for name in ("", "cloud only s", "closed form", "ours s", "closed form", "x faster", "closed form", "published"):
        table.add_column(name, justify="right")
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(of, folder)
        for name, scenario in SCENARIOS.items():
            slow, quick = (
                max(hg.launch(read, len(scenario.nodes), of, folder, scenario, near, cloud, disk, timeout=LIMIT))
                for near in (False, True)
            )
            formed = scenario.cloud_s(of.bytes, cloud), scenario.ours_s(of.bytes, cloud, disk)
            worst = max(worst, abs(quick / formed[1] - 1))
            figures = (slow, formed[0], quick, formed[1], slow / quick, formed[0] / formed[1], scenario.published)
            table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    console = Console()
    console.print(table)
    console.print(f"ours and its closed form differ by {worst:.1%} at most")
    return int(worst > 0.1)


if __name__ == "__main__":
    raise SystemExit(main())
