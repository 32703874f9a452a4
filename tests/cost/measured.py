"""A small measured profile, and pipelines that it can price."""

from __future__ import annotations

from dataclasses import replace

import hydragraph as hg
from hydragraph.cost.block_pieces import BlockPiece, Constants, PricedDevice
from hydragraph.cost.measured_profile import Profile
from hydragraph.spec.stage_kind import StageKind

PIECES = {
    "embed": BlockPiece(Constants(0.0, 1e-7, 1e-4), 1000, 40.0, 10.0),
    "layer": BlockPiece(Constants(1e-9, 2e-6, 3e-4), 500, 100.0, 30.0),
    "head": BlockPiece(Constants(0.0, 4e-6, 2e-4), 1000, 20.0, 400.0),
}


def measured(**changes: object) -> Profile:
    half = {name: replace(p, seconds=Constants(p.seconds.a / 2, p.seconds.b / 2, 1e-3)) for name, p in PIECES.items()}
    base = Profile(
        "here",
        {(1, 1): Constants(1.0, 1.0, 1.0)},
        {1: 1000, 2: 1500},
        blocks=("embed", "layer", "layer", "layer", "layer", "head"),
        pieces={StageKind(1): PIECES, StageKind(2): half},
        device=PricedDevice("toy", 1e7, 4000, 4),
        limits={(1, 1): 77},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def pipeline(*stages: tuple[int, int], **flags: bool) -> hg.Pipeline:
    first, found = 0, []
    for tp, layers in stages:
        found.append(hg.Stage(devices=tuple(range(first, first + tp)), layers=layers, **flags))
        first += tp
    return hg.Pipeline(stages=tuple(found))
