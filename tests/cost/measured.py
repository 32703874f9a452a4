"""A small measured profile, and pipelines that it can price."""

from __future__ import annotations

from dataclasses import replace

import hydragraph as hg
from hydragraph.cost.block_pieces import BlockPiece, Constants, MemoryLines, PricedDevice
from hydragraph.cost.measured_profile import Profile
from hydragraph.spec.stage_kind import StageKind


def piece(seconds: Constants, parameters: int, kept: float, working: float) -> BlockPiece:
    """Return a block whose forward takes a third of these seconds, from the bytes that each token needs."""
    held = MemoryLines(saved=(0.0, kept), forward=(0.0, kept + working), backward=(0.0, working))
    return BlockPiece(seconds.times(1 / 3), seconds.times(1 - 1 / 3), parameters, held=held)


PIECES = {
    "embed": piece(Constants(0.0, 1e-7, 1e-4), 1000, 40.0, 10.0),
    "layer": piece(Constants(1e-9, 2e-6, 3e-4), 500, 100.0, 30.0),
    "head": piece(Constants(0.0, 4e-6, 2e-4), 1000, 20.0, 400.0),
}
HALVES = {
    "embed": piece(Constants(0.0, 1e-7 / 2, 1e-3), 1000, 40.0, 10.0),
    "layer": piece(Constants(1e-9 / 2, 2e-6 / 2, 1e-3), 500, 100.0, 30.0),
    "head": piece(Constants(0.0, 4e-6 / 2, 1e-3), 1000, 20.0, 400.0),
}


def measured(**changes: object) -> Profile:
    base = Profile(
        "here",
        {(1, 1): Constants(1.0, 1.0, 1.0)},
        {1: 1000, 2: 1500},
        blocks=("embed", "layer", "layer", "layer", "layer", "head"),
        pieces={StageKind(1): PIECES, StageKind(2): HALVES},
        device=PricedDevice("toy", 1e7, 4),
        limits={(1, 1): 77},
    )
    return replace(base, **changes)  # pyrefly: ignore[bad-argument-type]


def pipeline(*stages: tuple[int, int], **flags: bool) -> hg.Pipeline:
    first, found = 0, []
    for tp, layers in stages:
        found.append(hg.Stage(devices=tuple(range(first, first + tp)), layers=layers, **flags))
        first += tp
    return hg.Pipeline(stages=tuple(found))
