"""Profiles come back from their files as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydragraph.cost.block_pieces import BlockPiece, MemoryLines
from hydragraph.cost.curves import Constants
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.profile_record import saved
from hydragraph.cost.reach import AttentionReach
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.stage_kind import StageKind
from tests.cost.measured import PIECES, measured
from tests.models import captured
from tests.planner.examples import PROFILE

HELD = MemoryLines((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0), ("hidden",), True)


def test_a_saved_profile_is_the_same(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"p\.json: not a profile"):
        Profile.load(tmp_path / "p.json")


def test_a_file_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    record = json.loads(json.dumps(saved(measured())))
    for pieces in record["pieces"].values():
        for piece in pieces.values():
            piece["seconds"] = piece.pop("forward")
    (tmp_path / "p.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"p\.json: not a profile .*'forward'.*: write one with hydragraph profile"):
        Profile.load(tmp_path / "p.json")


def test_a_measured_profile_is_saved_whole(tmp_path: Path) -> None:
    every = measured(
        pieces={StageKind(1): PIECES, StageKind(2, True): PIECES, StageKind(4, True, True): PIECES},
        link=Interconnect(1e9, 1e-5),
        messages=((1024, 1e-5), (1 << 20, 1e-3)),
        residuals={(1, 1): 0.02},
        failed={(4, 1): "noise"},
        unfit={StageKind(4): "noise"},
        notes=("two words",),
    )
    every.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == every


def test_types_sizes_and_curves_are_saved_too(tmp_path: Path) -> None:
    piece = BlockPiece(
        Constants(2e-9, 0.0, 1e-3, ((AttentionReach(window=10), 1e-6), (AttentionReach(chunk=8), 2e-6))),
        Constants(1e-9, 1e-6, 1e-3),
        parameters=7,
        held=HELD,
        reduced=(2, 3),
        during_sums=(1e-6, 2e-6),
    )
    sizes = ModelSizes.of(captured("llama")[0])
    one = measured(
        type="a", pieces={StageKind(1): {**PIECES, "layer": piece}}, sizes=sizes, update=(1e-5, 1e-9), commit_s=1e-4
    )
    every = Profile.merge([one, measured(type="b", link=Interconnect(1e9, 1e-5, ((1e3, 1e8), (1e6, 1e9))))])
    every.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == every


def test_sizes_say_what_the_model_says() -> None:
    program = captured("llama")[0]
    sizes = ModelSizes.of(program)
    assert sizes.outline == program.outline
    assert [(b.name, b.form, b.blocks, b.learns) for b in sizes.buckets] == [
        (b.name, b.form, b.blocks, b.learns) for b in program.buckets
    ]
    assert (sizes.hidden_bytes, sizes.itemsize) == (64 * 4, 4)
