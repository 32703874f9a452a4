"""`ranks.json`: the processes of a run, by rank; replaced whenever they change.

[{"rank": 0, "pid": 4711, "host": "node-a", "device": "cuda:0"}, ...]
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydragraph.cluster.launch import World
from hydragraph.train.atomic_write import write_whole


@dataclass(frozen=True)
class RankPlace:
    """Process, host and device of a rank."""

    rank: int
    pid: int
    host: str
    device: str


def ranks_of(world: World) -> list[RankPlace]:
    """Return all ranks; every rank calls it."""
    return world.gather(RankPlace(world.rank, os.getpid(), socket.gethostname(), str(world.device)))


def write_ranks(path: Path, ranks: Sequence[RankPlace]) -> None:
    """Replace the file atomically."""
    write_whole(path, json.dumps([asdict(place) for place in ranks]) + "\n")
