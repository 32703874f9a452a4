from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydragraph.planner.metis import Measurement, Profile

SIZES = {"hidden": 8, "sequence": 4, "vocabulary": 100}


def own_file(folder: Path, kind: str, tp: int, size: int, layers: int = 4) -> None:
    record = {
        "model": {"parameters": {"parameters_per_layer_bytes": [100, *[50] * (layers - 2), 120]}},
        "execution_time": {
            "forward_backward_time_ms": size * (layers + 1.0) / tp,
            "optimizer_time_ms": 10.0 / tp,
            "batch_generator_time_ms": 0.5 * size,
            "layer_compute_total_ms": [size / tp] * layers,
        },
        "execution_memory": {"layer_memory_total_mb": [20 * size] * layers},
    }
    (folder / f"DeviceType.{kind}_tp{tp}_bs{size}.json").write_text(json.dumps(record))


def test_metis_own_folder(tmp_path: Path) -> None:
    for kind in ("fast", "slow"):
        for tp in (1, 2):
            for size in (1, 2, 8):
                own_file(tmp_path, kind, tp, size)
    (tmp_path / "other.json").write_text("{}")
    profile = Profile.load(tmp_path, **SIZES)
    assert profile.types == ("fast", "slow")
    assert profile.layers == 4
    assert len(profile.measurements) == 12
    assert profile.measurements["slow", 2, 8] == Measurement((4.0,) * 4, 20.0, (160,) * 4)
    assert profile.measurements["slow", 2, 8].sync_ms == 4.0
    assert profile.parameters_bytes == (100, 50, 120)
    # These are of the first type, at the largest degree and size up to 4.
    assert (profile.optimizer_ms, profile.batch_generator_ms) == (5.0, 1.0)
    assert (profile.hidden, profile.sequence, profile.vocabulary) == (8, 4, 100)


def one_type(kind: str) -> dict[str, Any]:
    rows = {}
    for layers in (3, 5):
        keys = {"tp1_bs1": 1.0, "tp1_bs2": 2.0}
        rows[str(layers)] = {
            key: [f, 4 * f, 2 * f, f * (4 * layers - 4), f, 6.0 * layers, 0.25] for key, f in keys.items()
        }
    return {
        "device": kind,
        "layer_memory_mb": {"first": 5, "mid": 7, "last": 9},
        "parameters_bytes": {"first": 10, "mid": 20, "last": 30},
        "by_num_layers": rows,
    }


def test_files_by_number_of_layers(tmp_path: Path) -> None:
    files = [tmp_path / "b.json", tmp_path / "a.json"]
    for file, kind in zip(files, ("b", "a"), strict=True):
        file.write_text(json.dumps(one_type(kind)))
    profile = Profile.load(files, layers=5, **SIZES)
    assert profile.types == ("b", "a")
    assert profile.measurements["a", 1, 2] == Measurement((2, 8, 8, 8, 4), 32, (5, 7, 7, 7, 9))
    assert profile.optimizer_ms == 30.0
    least = Profile.load(files, **SIZES)
    assert least.layers == 3
    assert least.stretched(5) == Profile.load(files, layers=5, **SIZES)


def test_a_file_of_samples_says_sizes_itself(tmp_path: Path) -> None:
    sample = {
        "forward_backward_time_ms": 7.0,
        "optimizer_time_ms": 3.0,
        "batch_generator_time_ms": 0.1,
        "layer_compute_total_ms": [1.0, 2.0, 3.0],
        "layer_memory_total_mb": [4, 5, 6],
    }
    model = {"hidden": 16, "seq": 32, "vocab": 64, "parameters_per_layer_bytes": [1, 2, 3]}
    record = {"device": "one", "model": model, "samples": {"tp1_bs1": sample, "tp4_bs2": sample}}
    (tmp_path / "one.json").write_text(json.dumps(record))
    profile = Profile.load(tmp_path / "one.json")
    assert set(profile.measurements) == {("one", 1, 1), ("one", 4, 2)}
    assert (profile.hidden, profile.sequence, profile.vocabulary) == (16, 32, 64)


def test_what_is_no_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no files named like"):
        Profile.load(tmp_path, **SIZES)
    own_file(tmp_path, "fast", 1, 1)
    with pytest.raises(ValueError, match="does not contain hidden: give hidden="):
        Profile.load(tmp_path)
    (tmp_path / "odd.json").write_text('{"by_num_layers": {"3": {"tp1": []}}}')
    with pytest.raises(ValueError, match=r"odd\.json is not a profile of Metis"):
        Profile.load(tmp_path / "odd.json", **SIZES)
    own_file(tmp_path, "fast", 2, 1, layers=7)
    with pytest.raises(ValueError, match=r"measurements have \[4, 7\] layers"):
        Profile.load(tmp_path, **SIZES)


def test_only_equal_middle_layers_are_stretched() -> None:
    different = {("a", 1, 1): Measurement((1.0, 2.0, 3.0, 4.0), 11.0, (1, 1, 1, 1))}
    profile = Profile(different, (1, 1, 1), 4.0, 0.0, 1, 1, 1)
    assert profile.stretched(4) is profile
    with pytest.raises(ValueError, match="the profile has 4 layers, but the plan has 8"):
        profile.stretched(8)
    equal = {("a", 1, 1): Measurement((1.0, 2.0, 2.0, 4.0), 10.0, (1, 5, 5, 2))}
    stretched = Profile(equal, (1, 1, 1), 4.0, 0.0, 1, 1, 1).stretched(6)
    assert stretched.measurements["a", 1, 1] == Measurement((1, 2, 2, 2, 2, 4), 14, (1, 5, 5, 5, 5, 2))
    assert stretched.optimizer_ms == 6.0


def test_measurements_are_numbers() -> None:
    with pytest.raises(ValueError, match="2 layers have times, but 1 have memory"):
        Measurement((1.0, 2.0), 3.0, (1.0,))
    with pytest.raises(ValueError, match="finite"):
        Measurement((1.0, float("nan")), 3.0, (1.0, 1.0))
