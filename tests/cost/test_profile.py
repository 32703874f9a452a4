"""The published formulas, and what a profile refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hydragraph as hg
from hydragraph.cost.profile import Constants, Device, Kind, Piece, Profile
from hydragraph.spec.cluster import Link
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


# Any pipeline, from measured pieces.

PIECES = {
    "embed": Piece(Constants(0.0, 1e-7, 1e-4), 1000, 40.0, 10.0),
    "layer": Piece(Constants(1e-9, 2e-6, 3e-4), 500, 100.0, 30.0),
    "head": Piece(Constants(0.0, 4e-6, 2e-4), 1000, 20.0, 400.0),
}


def measured(**changes: object) -> Profile:
    half = {name: replace(p, seconds=Constants(p.seconds.a / 2, p.seconds.b / 2, 1e-3)) for name, p in PIECES.items()}
    base = Profile(
        "here",
        {(1, 1): Constants(1.0, 1.0, 1.0)},
        {1: 1000, 2: 1500},
        blocks=("embed", "layer", "layer", "layer", "layer", "head"),
        pieces={Kind(1): PIECES, Kind(2): half},
        device=Device("toy", 1e7, 4000, 4),
        limits={(1, 1): 77},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def pipeline(*stages: tuple[int, int], **flags: bool) -> hg.Pipeline:
    first, found = 0, []
    for tp, layers in stages:
        found.append(hg.Stage(devices=tuple(range(first, first + tp)), layers=layers, **flags))
        first += tp
    return hg.Pipeline(stages=tuple(found))


def test_a_measured_scheme_keeps_its_constants() -> None:
    found = measured().pipeline_of(pipeline((1, 4)), 8)
    assert (found.a, found.b, found.c, found.stages, found.max_len) == (1.0, 1.0, 1.0, 1, 77)


def test_an_uneven_pipeline_costs_what_its_slowest_stage_does() -> None:
    found = measured().pipeline_of(pipeline((2, 1), (1, 3)), 4)
    # stage 1: three layers and the head on one device
    assert (found.a, found.b, found.c) == pytest.approx((3e-9, 10e-6, 11e-4))
    assert (found.stages, found.devices, found.util_len) == (2, 3, 1500)
    other = measured().pipeline_of(pipeline((1, 3), (2, 1)), 4)
    assert (other.a, other.b, other.c) == pytest.approx((3e-9, 6.1e-6, 10e-4))


def test_the_fullest_stage_limits_the_micro_batch() -> None:
    found = measured().pipeline_of(pipeline((2, 1), (1, 3)), 4)
    first = (1e7 - 16 * 1000 - 8 * 1500) / (2 * 140 + 30)
    last = (1e7 - 16 * 1000 - 8 * 2500) / (320 + 400)
    assert found.max_len == int(min(first, last)) == int(last)
    alone = measured(limits={}).max_len((1, 1), 1)
    assert alone == int((1e7 - 16 * 4000) / (460 + 400))


def test_a_kind_that_was_not_measured_is_refused() -> None:
    with pytest.raises(
        hg.Unsupported, match=r"stage 0: stages of kind tp2s: they were not measured.*--sequence-parallel"
    ):
        measured().pipeline_of(pipeline((2, 4), sequence_parallel=True), 2)
    with pytest.raises(hg.Unsupported, match="constants of whole schemes only"):
        PROFILE.pipeline_of(pipeline((1, 1), (1, 31)), 2)
    with pytest.raises(ValueError, match="a pipeline of 5 layers, but it was measured on a model of 4"):
        measured().pipeline_of(pipeline((2, 5)), 2)
    with pytest.raises(ValueError, match="a pipeline of 4 layers, but it was measured on a model of 32"):
        PROFILE.pipeline_of(pipeline((1, 4)), 1)
    with pytest.raises(hg.Unsupported, match="stage 1: stages of kind tp4: too noisy"):
        measured(unfit={Kind(4): "too noisy"}).pipeline_of(pipeline((2, 1), (4, 3)), 6)
    failed = measured(schemes={}, failed={(1, 1): "noise"})
    with pytest.raises(hg.Unsupported, match="noise"):
        failed.pipeline_of(pipeline((1, 4)), 1)


def test_published_constants_price_regular_pipelines() -> None:
    assert PROFILE.pipeline_of(pipeline(*[(2, 8)] * 4), 64) == PROFILE.pipeline((2, 4), 64)


def test_pieces_whose_fit_failed_are_refused() -> None:
    flat = {name: replace(p, seconds=replace(p.seconds, a=0.0)) for name, p in PIECES.items()}
    with pytest.raises(hg.Unsupported, match="a stage's fit failed"):
        measured(pieces={Kind(1): flat}).pipeline_of(pipeline((1, 1), (1, 3)), 2)


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
