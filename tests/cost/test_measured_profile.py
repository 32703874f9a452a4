"""The published formulas, and what a profile refuses."""

from __future__ import annotations

import copy

import pytest

import hydragraph as hg
from hydragraph.cost.measured_profile import Profile
from hydragraph.errors import Unsupported
from tests.cost.measured import measured, pipeline
from tests.planner.examples import ENTRY, PROFILE


def test_seconds_are_quadratic_in_the_length() -> None:
    row = next(r for r in ENTRY["schemes"] if (r["tp"], r["pp"]) == (2, 2))
    expected = (row["a_ms_per_token2"] * 3000**2 + row["b_ms_per_token"] * 3000 + row["c_ms"]) / 1e3
    assert seconds((2, 2), 3000) == pytest.approx(expected, rel=1e-12)


def seconds(scheme: tuple[int, int], length: int) -> float:
    constants = PROFILE.constants(scheme)
    return float(constants.work(length) + constants.c)


def test_a_micro_batch_pays_its_constant_once() -> None:
    pipeline = PROFILE.pipeline((4, 1), 8)
    single = seconds((4, 1), 700)
    both = pipeline.micro_batch_seconds([700, 700])
    assert both == pytest.approx(2 * single - PROFILE.constants((4, 1)).c, rel=1e-12)


def test_what_was_not_measured_is_refused_by_name() -> None:
    with pytest.raises(hg.Unsupported, match=r"<tp3,pp1>: it was not measured; use a measured scheme \(<tp1,pp1>"):
        seconds((3, 1), 100)
    with pytest.raises(hg.Unsupported, match=r"<tp16,pp1>: its fit failed \(a = 0"):
        PROFILE.max_len((16, 1), 16)
    assert set(PROFILE.failed) == {(16, 1)}


def test_a_degree_without_constants_is_refused() -> None:
    entry = copy.deepcopy(ENTRY)
    del entry["memory"]["activation_A"]["8"], entry["util_len_tokens"]["8"]
    profile = Profile.from_constants(entry)
    with pytest.raises(hg.Unsupported, match="no activation memory is known for tensor-parallel degree 8"):
        profile.max_len((8, 1), 8)
    with pytest.raises(hg.Unsupported, match=r"no UtilLen .* degree 8"):
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


def test_a_pipeline_that_constants_do_not_cover_is_refused() -> None:
    with pytest.raises(hg.Unsupported, match="constants for whole schemes"):
        PROFILE.pipeline_of(pipeline((1, 1), (1, 31)), 2)
    with pytest.raises(ValueError, match="measured on a model of 4 layers, but the pipeline has 5"):
        measured().pipeline_of(pipeline((2, 5)), 2)
    with pytest.raises(ValueError, match="measured on a model of 32 layers, but the pipeline has 4"):
        PROFILE.pipeline_of(pipeline((1, 4)), 1)
    failed = measured(schemes={}, failed={(1, 1): "noise"})
    with pytest.raises(hg.Unsupported, match="noise"):
        failed.pipeline_of(pipeline((1, 4)), 1)
    with pytest.raises(hg.Unsupported, match=r"use hg.Costs\(profile, cluster\)"):
        measured(limits={}).max_len((1, 1), 1)


def test_published_constants_price_regular_pipelines() -> None:
    assert PROFILE.pipeline_of(pipeline(*[(2, 8)] * 4), 64) == PROFILE.pipeline((2, 4), 64)


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
