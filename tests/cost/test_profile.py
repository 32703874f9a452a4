"""The published formulas, and what a profile refuses."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

import hydragraph as hg
from hydragraph.cost.profile import Profile
from hydragraph.errors import Unsupported
from hydragraph.spec.stage_kind import StageKind
from tests.cost.measured import PIECES, measured, pipeline
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


# Any pipeline, from measured pieces.


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
        measured(unfit={StageKind(4): "too noisy"}).pipeline_of(pipeline((2, 1), (4, 3)), 6)
    failed = measured(schemes={}, failed={(1, 1): "noise"})
    with pytest.raises(hg.Unsupported, match="noise"):
        failed.pipeline_of(pipeline((1, 4)), 1)


def test_published_constants_price_regular_pipelines() -> None:
    assert PROFILE.pipeline_of(pipeline(*[(2, 8)] * 4), 64) == PROFILE.pipeline((2, 4), 64)


def test_pieces_whose_fit_failed_are_refused() -> None:
    flat = {name: replace(p, seconds=replace(p.seconds, a=0.0)) for name, p in PIECES.items()}
    with pytest.raises(hg.Unsupported, match="a stage's fit failed"):
        measured(pieces={StageKind(1): flat}).pipeline_of(pipeline((1, 1), (1, 3)), 2)


def test_profiles_of_several_types_merge() -> None:
    fast, slow = measured(type="fast"), measured(type="slow", name="there")
    both = Profile.merge([fast, slow])
    assert both.of("slow") == slow
    assert both.of("fast").pieces == fast.pieces
    assert Profile.merge([both, measured(type="third")]).of("third").type == "third"
    with pytest.raises(Unsupported, match="device type 'l4' was not measured"):
        both.of("l4")
    with pytest.raises(Unsupported, match="device type 'l4' was not measured"):
        fast.of("l4")
    assert measured().of("l4") == measured()  # a file from before types


def test_profiles_of_other_models_or_of_one_type_do_not_merge() -> None:
    with pytest.raises(ValueError, match="are of different models"):
        Profile.merge([measured(type="a"), measured(type="b", blocks=("embed", "layer", "head"))])
    with pytest.raises(ValueError, match="two profiles of device type 'a'"):
        Profile.merge([measured(type="a"), measured(type="a")])
    with pytest.raises(ValueError, match="no profiles"):
        Profile.merge([])
