"""Constants come back from synthetic measurements, and what they do not show is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.block_pieces import AUX, BlockPiece, Constants, MemoryLines, PricedDevice
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import ZERO
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.reach import WHOLE, AttentionReach
from hydragraph.runtime.profile_fitting import (
    MeasuredTemplate,
    Measurements,
    fit_link,
    fit_profile,
    fit_work,
    micro_batches,
    token_counts,
    util_len,
)
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind

ROWS = micro_batches(token_counts(8192, 16))
constants = st.tuples(st.floats(-10, -8), st.floats(-7, -5), st.floats(-4, -3))  # exponents of 10


def seconds(a: float, b: float, c: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    generator = np.random.default_rng(seed)
    exact = [sum(a * n * n + b * n for n in row) + c for row in ROWS]
    return [t * (1 + noise * float(generator.uniform(-1, 1))) for t in exact]


def test_the_example_of_the_module() -> None:
    found = fit_work([(4,), (2, 2), (8,)], [14.0, 10.0, 42.0])
    assert (found.constants.a, found.constants.b, found.constants.c) == pytest.approx((0.5, 1.0, 2.0))


@settings(deadline=None, max_examples=50)
@given(constants)
def test_exact_measurements_give_the_constants_back(exponents: tuple[float, float, float]) -> None:
    a, b, c = (10.0**e for e in exponents)
    found = fit_work(ROWS, seconds(a, b, c))
    assert (found.constants.a, found.constants.b, found.constants.c) == pytest.approx((a, b, c), rel=1e-4)
    assert found.residual < 1e-6
    assert found.failure is None


@settings(deadline=None, max_examples=50)
@given(constants, st.integers(0, 1000))
def test_noise_moves_predictions_no_further_than_it_is(exponents: tuple[float, float, float], seed: int) -> None:
    a, b, c = (10.0**e for e in exponents)
    found = fit_work(ROWS, seconds(a, b, c, noise=0.1, seed=seed))
    assert found.residual <= 0.1
    held_out = [(300,), (3000,), (5000, 200, 200)]
    for row in held_out:
        true = sum(a * n * n + b * n for n in row) + c
        assert found.constants.seconds(row) == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize("reach", [AttentionReach(512), AttentionReach(chunk=1024), AttentionReach(100_000)])
def test_a_windows_coefficient_is_fitted_and_prices_sequences_beyond_the_measured_ones(reach: AttentionReach) -> None:
    true = Constants(0.0, 1e-6, 1e-4, ((reach, 1e-9),))
    fit = fit_work(ROWS, [true.seconds(row) for row in ROWS], [reach])
    assert fit.failure is None
    assert fit.constants.a == 0
    assert fit.constants.seconds([200_000]) == pytest.approx(true.seconds([200_000]), rel=1e-3)


def test_windows_beside_whole_attention_have_their_own_coefficient() -> None:
    true = Constants(2e-10, 1e-6, 1e-4, ((AttentionReach(512), 1e-9),))
    fit = fit_work(ROWS, [true.seconds(row) for row in ROWS], [WHOLE, AttentionReach(512)])
    assert (fit.constants.a, fit.constants.b) == pytest.approx((true.a, true.b), rel=1e-3)
    assert dict(fit.constants.near)[AttentionReach(512)] == pytest.approx(1e-9, rel=1e-3)
    assert fit.quadratic == pytest.approx(1 - (true.b * 8192 + true.c) / true.seconds([8192]), rel=1e-3)


def test_a_model_with_windows_is_fitted_block_by_block() -> None:
    near = Constants(0.0, 2e-6, 3e-4, ((AttentionReach(256), 1e-9),))
    plain = measurements(1.0)
    nothing = plain.times["layer"].piece
    times = tuple(near.seconds(row) for row in ROWS)
    layer = MeasuredTemplate(nothing, times, tuple(t / 3 for t in times), frozenset({AttentionReach(256)}))
    kinds = {StageKind(1): Measurements(ROWS, {**plain.times, "layer": layer})}
    profile = fit_profile("windows", BLOCKS, [(1, 1)], PricedDevice("toy", 1e9, 4), kinds, [])
    assert not profile.failed
    assert not profile.unfit
    pieces = profile.pieces[StageKind(1)]
    assert pieces["layer"].forward.seconds([60_000]) == pytest.approx(near.seconds([60_000]) / 3)
    assert pieces["layer"].backward.seconds([60_000]) == pytest.approx(near.seconds([60_000]) * 2 / 3)
    assert pieces["head"].forward.near == pieces["head"].backward.near == ()
    assert dict(profile.schemes[1, 1].near)[AttentionReach(256)] == pytest.approx(4e-9)


def test_coefficients_are_never_negative() -> None:
    falling = [t * (1.3 - 0.1 * i) for i, t in enumerate(seconds(1e-12, 1e-6, 1e-4)[:8])]
    found = fit_work(ROWS[:8], falling)
    assert min(found.constants.a, found.constants.b, found.constants.c) >= 0
    assert found.constants.a == 0
    assert "quadratic part is below the noise: measure longer sequences" in (found.failure or "")


def test_a_bad_residual_is_a_failure() -> None:
    found = fit_work(ROWS, seconds(1e-9, 1e-6, 1e-4, noise=0.9, seed=3))
    assert "differ from the cost model" in (found.failure or "")


def test_a_quadratic_part_within_the_noise_is_doubted() -> None:
    clear = fit_work(ROWS, seconds(1e-9, 1e-6, 1e-4, noise=0.05))
    assert clear.doubt is None
    assert "`a` is uncertain" in (fit_work(ROWS, seconds(4e-12, 1e-6, 1e-4, noise=0.05)).doubt or "")


def test_pieces_without_attention_have_no_quadratic_part() -> None:
    found = fit_work(ROWS, seconds(1e-9, 1e-6, 1e-4), reaches=())
    assert found.constants.a == 0 == found.quadratic
    assert found.constants.b > 1e-6


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="2 measurements for 3 constants"):
        fit_work(ROWS[:2], [1.0, 2.0])
    with pytest.raises(ValueError, match="above 0"):
        fit_work(ROWS[:3], [1.0, 0.0, 2.0])


@pytest.mark.parametrize("a", [0.0, 1e-9])
def test_util_len_is_where_the_speed_reaches_the_plateau(a: float) -> None:
    b, c = 1e-6, 1e-3  # T / (b T + c) is 85 % of its value at 8192 tokens from about 3100 tokens on
    taken = seconds(a, b, c)
    expected = next(n for n in range(1, 8193) if n / (b * n + c) >= 0.85 * 8192 / (b * 8192 + c))
    assert util_len(ROWS, taken, fit_work(ROWS, taken).constants) == pytest.approx(expected, rel=0.1)


def test_what_is_fast_at_once_has_the_shortest_util_len() -> None:
    taken = seconds(1e-9, 1e-6, 1e-9)
    assert util_len(ROWS, taken, fit_work(ROWS, taken).constants) == sum(ROWS[0])


def test_a_link_comes_back() -> None:
    sizes = [4**i for i in range(4, 12)]
    found = fit_link(sizes, [2e-5 + n / 1e9 for n in sizes])
    assert found is not None
    assert found.link.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert found.link.latency_s == pytest.approx(2e-5, rel=1e-3)
    assert found.residual < 1e-6
    assert fit_link([1, 10, 100], [1.0, 1.0, 0.5]) is None


@given(st.integers(2, 100_000), st.integers(1, 64))
def test_token_counts_are_multiples_up_to_the_longest(longest: int, multiple: int) -> None:
    found = token_counts(longest, multiple)
    assert all(n % multiple == 0 and n > 0 for n in found)
    assert list(found) == sorted(set(found))
    assert abs(found[-1] - max(longest, multiple)) <= multiple


# A whole profile, from times that known constants give.

TRUE = {
    "embed": (0.0, 1e-7, 1e-4),
    "layer": (1e-9, 2e-6, 3e-4),
    "head": (0.0, 4e-6, 2e-4),
    AUX: (0.0, 1e-7, 1e-5),
}
BLOCKS = ["embed", *["layer"] * 4, "head"]
SCHEMES = [(1, 1), (1, 2), (2, 1)]


def measurements(scale: float, rows: tuple[tuple[int, ...], ...] = ROWS, flat: bool = False) -> Measurements:
    def taken(a: float, b: float, c: float) -> tuple[float, ...]:
        exact = [sum(a * n * n * (not flat) + b * n for n in row) + c for row in rows]
        return tuple(scale * t for t in exact)

    nothing = BlockPiece(ZERO, ZERO, 10, held=MemoryLines(saved=(0.0, 20.0)))
    reaches = {"layer": frozenset({WHOLE})}
    times = {t: taken(*k) for t, k in TRUE.items()}
    return Measurements(
        rows,
        {
            t: MeasuredTemplate(
                nothing, seconds, seconds if t == AUX else tuple(s / 3 for s in seconds), reaches.get(t, frozenset())
            )
            for t, seconds in times.items()
        },
    )


def fitted(**changes: Measurements) -> Profile:
    found = {StageKind(1): changes.get("one", measurements(1.0)), StageKind(2): changes.get("two", measurements(0.6))}
    messages = [(4**n, 1e-5 + 4**n / 1e9) for n in range(5, 12)]
    return fit_profile("made up", BLOCKS, SCHEMES, PricedDevice("toy", 1e9, 4), found, messages)


def test_schemes_have_the_constants_of_their_slowest_stage() -> None:
    found = fitted()
    assert found.failed == {} == found.unfit
    assert found.notes == ()
    whole, last = found.constants((1, 1)), found.constants((1, 2))
    assert (whole.a, whole.b, whole.c) == pytest.approx((4e-9, 12.2e-6, 15.1e-4), rel=1e-3)
    assert (last.a, last.b, last.c) == pytest.approx((2e-9, 8.1e-6, 8.1e-4), rel=1e-3)  # two layers and the head
    assert found.link is not None
    assert found.link.bytes_per_s == pytest.approx(1e9, rel=1e-3)


def test_any_pipeline_is_priced_from_the_pieces() -> None:
    pipeline = Pipeline(stages=(Stage(devices=(0, 1), layers=3), Stage(devices=(2,), layers=1)))
    found = fitted()
    cost = Costs(found, found.cluster(3)).pipeline(pipeline)
    assert (cost.a, cost.b, cost.c) == pytest.approx((1e-9, 6.1e-6, 5.1e-4), rel=1e-3)  # one layer and the head
    assert cost.stages == 2


def test_what_cannot_be_fitted_has_failed_and_why() -> None:
    flat = fitted(two=measurements(0.6, flat=True))
    assert set(flat.schemes) == {(1, 1), (1, 2)}
    assert "the quadratic part is below the noise" in flat.failed[2, 1]
    assert "the quadratic part is below the noise" in flat.unfit[StageKind(2)]
    assert set(flat.pieces) == {StageKind(1)}
    # Noise of the head looks like attention, and the layers' is hidden: every stage has layers.
    times = dict(measurements(0.6).times)
    concave = tuple(sum(2e-6 * n - 1e-11 * n * n for n in row) + 3e-4 for row in ROWS)
    for name, seconds in (("head", tuple(5 * t for t in times["layer"].seconds)), ("layer", concave)):
        times[name] = replace(times[name], seconds=seconds, forward=tuple(t / 3 for t in seconds))
    hidden = fitted(two=Measurements(ROWS, times))
    assert "the fit of layer failed" in hidden.unfit[StageKind(2)]
    assert set(hidden.pieces) == {StageKind(1)}
    little = fitted(two=measurements(0.6, ROWS[:2]))
    assert "the device's memory is too small" in little.failed[2, 1]
    assert set(little.util) == {1}


def test_profiles_say_what_is_doubtful() -> None:
    one = fit_profile("alone", BLOCKS, [(1, 1)], PricedDevice("toy", 1e9, 4), {StageKind(1): measurements(1.0)}, [])
    assert one.notes == ("no message was measured, because a single rank has no links",)
    odd = [(4**n, (1 + n % 2) * (1e-5 + 4**n / 1e9)) for n in range(5, 12)]
    two = fit_profile("odd", BLOCKS, [(1, 1)], PricedDevice("toy", 1e9, 4), {StageKind(1): measurements(1.0)}, odd)
    assert "differ from latency + bytes / bandwidth" in two.notes[0]


def test_long_micro_batches_count_by_their_seconds() -> None:
    """Short ones that start up slowly do not spoil the constants of long ones, nor the residual."""
    rows = micro_batches(token_counts(4096, 4))
    exact = [sum(1e-9 * n * n + 1e-6 * n for n in row) + 1e-5 for row in rows]
    odd = [seconds * (2.0 if sum(row) < 100 else 1.0) for row, seconds in zip(rows, exact, strict=True)]
    fit = fit_work(rows, odd)
    assert fit.failure is None
    for row, seconds in zip(rows, exact, strict=True):
        if sum(row) > 1000:
            assert fit.constants.seconds(row) == pytest.approx(seconds, rel=0.03)
