"""Factors from samples: robust against disturbed steps, bounded, and silent until there are enough."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.corrections import BOUND, LEAST, WINDOW, Corrections, corrected
from hydragraph.spec.stage_kind import StageKind
from tests.cost.priced import profile

RANKS = ("",) * 4


def learned(ratios: dict[tuple[TimeKind, int], float], steps: int, types: tuple[str, ...] = RANKS) -> Corrections:
    found = Corrections(types)
    for _ in range(steps):
        found = found.with_step(ratios)
    return found


@given(
    factor=st.floats(0.4, 2.5),
    noise=st.floats(0.0, 0.1),
    disturbed=st.floats(0.0, 0.25),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_a_factor_is_recovered_from_noise_and_disturbed_steps(
    factor: float, noise: float, disturbed: float, seed: int
) -> None:
    draw = random.Random(seed)
    found = Corrections(RANKS)
    steps = 40
    bad = set(draw.sample(range(steps), round(disturbed * steps)))  # another program had the machine
    for step in range(steps):
        spoilt = 10.0 if step in bad else 1.0
        found = found.with_step(
            {(TimeKind.BACKWARD, rank): spoilt * factor * math.exp(draw.gauss(0, noise)) for rank in range(4)}
        )
    # With a quarter of the samples far above, the median of the others moves by 0.43 standard deviations.
    assert abs(math.log(found.factor(TimeKind.BACKWARD) / factor)) <= noise + 1e-9
    assert found.health == hg.Health()


def test_too_few_samples_say_nothing() -> None:
    ratios = {(TimeKind.FORWARD, rank): 2.0 for rank in range(4)}
    assert learned(ratios, LEAST - 1).factor(TimeKind.FORWARD) == 1.0
    assert str(learned(ratios, LEAST - 1)) == "nothing is corrected"
    assert learned(ratios, LEAST).factor(TimeKind.FORWARD) == pytest.approx(2.0)
    assert learned(ratios, LEAST).factor(TimeKind.BACKWARD) == 1.0


def test_factors_are_bounded_and_old_samples_are_forgotten() -> None:
    assert learned({(TimeKind.COMMIT, 0): 1000.0}, 9).factor(TimeKind.COMMIT) == BOUND
    assert learned({(TimeKind.COMMIT, 0): 0.001}, 9).factor(TimeKind.COMMIT) == 1 / BOUND
    found = learned({(TimeKind.UPDATE, 0): 2.0}, WINDOW)
    for _ in range(WINDOW):
        found = found.with_step({(TimeKind.UPDATE, 0): 1.25})
    assert found.factor(TimeKind.UPDATE) == pytest.approx(1.25)
    assert found.steps(TimeKind.UPDATE) == WINDOW


@given(rate=st.floats(1.2, 3.0), rank=st.integers(0, 2), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_straggler_is_named_and_the_others_decide_the_factor(rate: float, rank: int, seed: int) -> None:
    draw = random.Random(seed)
    found = Corrections(RANKS[:3])
    for _ in range(30):
        found = found.with_step(
            {
                (kind, r): 1.1 * (rate if r == rank else 1.0) * math.exp(draw.gauss(0, 0.02))
                for kind in (TimeKind.FORWARD, TimeKind.BACKWARD)
                for r in range(3)
            }
        )
    assert found.health.rates == {rank: pytest.approx(rate, rel=0.03)}
    assert found.factor(TimeKind.BACKWARD) == pytest.approx(1.1, rel=0.02)


def test_two_ranks_apart_by_noise_alone_are_both_healthy() -> None:
    found = Corrections(RANKS[:2])
    draw = random.Random(1)
    for _ in range(20):
        found = found.with_step({(TimeKind.BACKWARD, r): math.exp(draw.gauss(0, 0.4)) for r in range(2)})
    assert found.health == hg.Health()


def test_it_says_what_it_changes() -> None:
    found = learned({(TimeKind.BACKWARD, rank): 1.12 for rank in range(4)}, 14)
    assert str(found) == "backward x1.12 from 14 steps"
    by_type = learned({(TimeKind.BACKWARD, 0): 1.12, (TimeKind.BACKWARD, 1): 2.0}, 6, ("a", "b"))
    assert str(by_type) == "backward on a x1.12 from 6 steps, backward on b x2 from 6 steps"


def test_a_file_is_read_back_as_its_equal(tmp_path: Path) -> None:
    found = learned({(TimeKind.BACKWARD, 0): 1.12, (TimeKind.PULL, 1): 0.5}, 3, ("a", "b"))
    found.save(tmp_path / "c.json")
    again = Corrections.load(tmp_path / "c.json")
    assert again == found
    assert hash(again) == hash(found)
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(ValueError, match=r"c\.json: not a corrections file"):
        Corrections.load(tmp_path / "c.json")


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan])
def test_a_sample_that_is_no_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="samples must be finite and above 0"):
        Corrections(RANKS).with_step({(TimeKind.UPDATE, 0): ratio})
    with pytest.raises(ValueError, match="the ranks are 0 to 3"):
        Corrections(RANKS).with_step({(TimeKind.UPDATE, 4): 1.0})


def test_a_profile_is_corrected_by_kind() -> None:
    before = profile(2)
    known = {TimeKind.FORWARD: 1.5, TimeKind.BACKWARD: 0.5, TimeKind.UPDATE: 2.0, TimeKind.COMMIT: 3.0}
    after = corrected(before, learned({(kind, 0): factor for kind, factor in known.items()}, LEAST))
    assert corrected(before, Corrections()) is before
    for kind in (StageKind(1), StageKind(2, False, True)):
        for name, piece in before.pieces[kind].items():
            found = after.pieces[kind][name]
            assert found.forward.seconds([100, 7]) == pytest.approx(1.5 * piece.forward.seconds([100, 7]))
            assert found.backward.seconds([100, 7]) == pytest.approx(0.5 * piece.backward.seconds([100, 7]))
    assert after.update == (2e-5, 2e-9)
    assert after.commit_s == pytest.approx(1.5e-4)


def test_products_beside_sums_are_corrected_too() -> None:
    given = profile(4)
    kind = StageKind(2)
    piece = replace(given.pieces[kind]["layer"], reduced=(1, 1), during_sums=(2.0,), before_sums=(3.0, 5.0))
    given = replace(given, pieces={kind: {**given.pieces[kind], "layer": piece}})
    ratios = {(TimeKind.FORWARD, rank): 2.0 for rank in range(4)} | {
        (TimeKind.BACKWARD, rank): 4.0 for rank in range(4)
    }
    found = corrected(given, learned(ratios, WINDOW), "").pieces[kind]["layer"]
    assert found.before_sums == pytest.approx((6.0, 20.0))
    assert found.during_sums == pytest.approx((8.0,))
