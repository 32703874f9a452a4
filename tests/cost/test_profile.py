"""The published formulas, and what a profile refuses."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

import hydragraph as hg
from hydragraph.cost.profile import Profile
from tests.planner.examples import ENTRY, PROFILE


def test_seconds_are_quadratic_in_the_length() -> None:
    row = next(r for r in ENTRY["schemes"] if (r["tp"], r["pp"]) == (2, 2))
    expected = (row["a_ms_per_token2"] * 3000**2 + row["b_ms_per_token"] * 3000 + row["c_ms"]) / 1e3
    assert PROFILE.seconds((2, 2), 3000) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(PROFILE.seconds((2, 2), np.array([0, 3000])), [row["c_ms"] / 1e3, expected], rtol=1e-12)


def test_a_micro_batch_pays_its_constant_once() -> None:
    pipeline = PROFILE.pipeline((4, 1), 8)
    single = PROFILE.seconds((4, 1), 700)
    both = pipeline.micro_batch_seconds([700, 700])
    assert both == pytest.approx(2 * single - PROFILE.constants((4, 1)).c, rel=1e-12)


@pytest.mark.parametrize(("scheme", "devices"), [((2, 1), 8), ((2, 4), 64), ((8, 2), 1024)])
def test_max_len_is_where_memory_ends(scheme: tuple[int, int], devices: int) -> None:
    tp, pp = scheme
    model, memory = ENTRY["model"], ENTRY["memory"]
    hidden, layers, vocab = model["hidden"], model["layers"], model["vocab"]

    def used(tokens: int) -> float:
        activations = layers * (tokens * hidden / tp) * memory["activation_A"][str(tp)]
        states = (layers * hidden**2 / devices) * 210 * 0.75 + (layers / pp) * (hidden**2 / tp) * 210 * 0.25
        e = 32 if pp == 1 else 16
        embeddings = hidden * vocab / devices * e * 0.75 + hidden * vocab / tp * e * 0.25
        return activations + states + embeddings + 5e9 + 6e9

    longest = PROFILE.max_len(scheme, devices)
    assert used(longest) <= 85e9 < used(longest + 1)


def test_more_devices_never_shorten_a_micro_batch() -> None:
    found = [PROFILE.max_len((2, 2), n) for n in (4, 8, 64, 1024)]
    assert found == sorted(found)


def test_where_nothing_fits_max_len_is_zero() -> None:
    entry = copy.deepcopy(ENTRY)
    entry["memory"]["device_bytes"] = 1e9
    assert Profile.from_constants(entry).max_len((1, 1), 1) == 0


def test_what_was_not_measured_is_refused_by_name() -> None:
    with pytest.raises(hg.Unsupported, match=r"<tp3,pp1>: it was not measured; use a measured scheme \(<tp1,pp1>"):
        PROFILE.seconds((3, 1), 100)
    with pytest.raises(hg.Unsupported, match=r"<tp16,pp1>: its fit failed \(a = 0"):
        PROFILE.max_len((16, 1), 16)
    assert set(PROFILE.failed) == {(16, 1)}


def test_a_degree_without_constants_is_refused() -> None:
    entry = copy.deepcopy(ENTRY)
    del entry["memory"]["activation_A"]["8"], entry["util_len_tokens"]["8"]
    profile = Profile.from_constants(entry)
    with pytest.raises(hg.Unsupported, match="degree 8 has no activation constant"):
        profile.max_len((8, 1), 8)
    with pytest.raises(hg.Unsupported, match="degree 8 has no utilisation length"):
        profile.util_len((8, 1))


def test_a_profile_without_memory_needs_limits() -> None:
    entry = copy.deepcopy(ENTRY)
    profile = Profile.from_constants(entry)
    bare = Profile("bare", profile.schemes, profile.util, limits={(1, 1): 123})
    assert bare.max_len((1, 1), 4) == 123
    with pytest.raises(hg.Unsupported, match="neither a measured limit nor a memory model"):
        bare.max_len((2, 1), 4)


def test_a_saved_profile_is_the_same(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"p\.json: no profile"):
        Profile.load(tmp_path / "p.json")
