"""Profiles come back from their files as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydragraph.cost.pieces import Kind
from hydragraph.cost.profile import Profile
from hydragraph.spec.cluster import Link
from tests.cost.measured import PIECES, measured
from tests.planner.examples import PROFILE


def test_a_saved_profile_is_the_same(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"p\.json: no profile"):
        Profile.load(tmp_path / "p.json")


def test_a_measured_profile_is_saved_whole(tmp_path: Path) -> None:
    every = measured(
        pieces={Kind(1): PIECES, Kind(2, True): PIECES, Kind(4, True, True): PIECES},
        link=Link(1e9, 1e-5),
        messages=((1024, 1e-5), (1 << 20, 1e-3)),
        residuals={(1, 1): 0.02},
        failed={(4, 1): "noise"},
        unfit={Kind(4): "noise"},
        notes=("two words",),
    )
    every.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == every
