"""The cache of profiles, in a folder of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hydragraph.engine import profile_cache
from hydragraph.engine.profile_cache import (
    UNCHANGED,
    CachedProfile,
    equally_changed,
    profile_key,
    recall_profile,
    remember_profile,
)
from hydragraph.runtime.device_reports import DeviceReport
from tests.cost import priced

ONE = DeviceReport("n0", "host0", "a100", 40 * 10**9, 100.0, 1e12, 5e12, 1e12, 0, "", (("torch", "2"),))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hydragraph" / "profiles"


def test_a_device_of_the_same_speed_gets_what_was_measured() -> None:
    profile = priced.profile(2, "fast")
    remember_profile("key", ONE, profile)
    assert recall_profile("key", replace(ONE, products_per_s=93.0), "fast") == CachedProfile(profile, 0.93)
    assert recall_profile("key", ONE, "a100") == CachedProfile(replace(profile, type="a100"), 1.0)
    assert recall_profile("other", ONE, "fast") is None


def test_the_profile_of_the_closest_speed_is_recalled() -> None:
    profile = priced.profile(2, "fast")
    remember_profile("key", ONE, profile)
    slowed = replace(ONE, products_per_s=60.0)
    assert recall_profile("key", slowed, "fast") == CachedProfile(profile, 0.6)
    remember_profile("key", slowed, replace(profile, name="slowed"))
    found = recall_profile("key", replace(ONE, products_per_s=70.0), "fast")
    assert found is not None
    assert found.profile.name == "slowed"


def test_a_device_of_half_or_twice_the_speed_is_measured_again() -> None:
    remember_profile("key", ONE, priced.profile(2))
    for factor, recalled in ((0.9 * UNCHANGED, False), (UNCHANGED, True), (1 / UNCHANGED, True), (2.2, False)):
        device = recall_profile("key", replace(ONE, products_per_s=factor * ONE.products_per_s))
        assert (device is not None) == recalled


def test_only_relative_changes_of_speed_matter_among_several_devices() -> None:
    profile = priced.profile(2)

    def unchanged(*speedups: float) -> bool:
        return equally_changed([CachedProfile(profile, speedup) for speedup in speedups])

    assert unchanged(0.6)
    assert unchanged(1.25, 1.45)  # a busy host at the first start
    assert not unchanged(1.0, 0.6, 1.0)
    assert not unchanged(0.8, 1.1)


def test_a_file_that_is_not_readable_counts_as_none(folder: Path) -> None:
    remember_profile("key", ONE, priced.profile(2))
    (path,) = folder.glob("key-*.json")
    path.write_text("{}")
    assert recall_profile("key", ONE, "") is None


def test_a_folder_that_is_not_writable_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember_profile("key", ONE, priced.profile(2))
    assert recall_profile("key", ONE, "") is None
    assert profile_cache.folder().parts[-2:] == ("hydragraph", "profiles")


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, name="v100"),
        replace(ONE, memory_bytes=80 * 10**9),
        replace(ONE, threads=2),
        replace(ONE, versions=(("torch", "3"),)),
    ],
)
def test_everything_else_is_part_of_the_key(other: DeviceReport) -> None:
    key = profile_key(ONE, 2, ("llama", "float32"))
    assert key == profile_key(replace(ONE, products_per_s=7.0, host="elsewhere"), 2, ("llama", "float32"))
    assert len({key, profile_key(other, 2, ("llama", "float32")), profile_key(ONE, 4, ("llama", "float32"))}) == 3
    assert key != profile_key(ONE, 2, ("llama", "bfloat16"))
