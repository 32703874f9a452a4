"""The proposal equals the exhaustive recurrence of the paper, and its roundings fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph import planner
from hydragraph.planner.generators.hydraulis import PIPELINE_STEPS, Histogram, histogram, least, proposals, roundings
from tests.planner.examples import PROFILE, lengths


def exhaustive(data: Histogram, devices: int) -> float:
    """Return t[N][L] as the recurrence is written: over n, l, schemes, d in steps of 0.1 pipeline, and l'."""
    budget, last = devices * PIPELINE_STEPS, data.work.shape[1] - 1
    t = np.full((budget + 1, last + 1), np.inf)
    t[:, 0] = 0.0
    for n in range(1, budget + 1):
        for upto in range(1, last + 1):
            best = t[n - 1, upto]
            for k, size in enumerate(data.devices.tolist()):
                if upto > data.levels[k]:
                    continue
                for steps in range(1, n // size + 1):
                    for above in range(upto):
                        mine = (data.work[k, upto] - data.work[k, above]) * PIPELINE_STEPS / steps
                        best = min(best, max(t[n - steps * size, above], mine))
            t[n, upto] = best
    return float(t[budget, last])


def test_the_example_of_the_module() -> None:
    work = np.array([[0.0, 4.0, 4.0], [0.0, 2.5, 5.5]])
    proposal = least(Histogram(((1, 1), (2, 1)), np.array([1, 2]), np.array([1, 2]), work), 5)
    assert proposal.seconds == pytest.approx(2.0)
    assert [(s.scheme, s.pipelines) for s in proposal.shares] == [((1, 1), 2.0), ((2, 1), 1.5)]


@st.composite
def histograms(draw: st.DrawFn) -> Histogram:
    kinds, last = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    rows = [[0.0, *np.cumsum(draw(st.lists(st.floats(0.5, 9), min_size=last, max_size=last)))] for _ in range(kinds)]
    reach = [last, *(draw(st.integers(1, last)) for _ in range(kinds - 1))]
    sizes = [draw(st.integers(1, 3)) for _ in range(kinds)]
    return Histogram(tuple((n, 1) for n in range(1, kinds + 1)), np.array(sizes), np.array(reach), np.array(rows))


@given(histograms(), st.integers(3, 4))
@settings(max_examples=25)
def test_bisection_equals_the_exhaustive_recurrence(data: Histogram, devices: int) -> None:
    found = least(data, devices)
    assert found.seconds == pytest.approx(exhaustive(data, devices), rel=1e-9)
    assert found.shares[0].above == 0
    assert all(a.upto == b.above for a, b in zip(found.shares, found.shares[1:], strict=False))
    size = dict(zip(data.schemes, data.devices.tolist(), strict=True))
    assert sum(s.pipelines * size[s.scheme] for s in found.shares) <= devices + 1e-9


def test_candidates_fit_devices_and_context() -> None:
    sizes = lengths(3000, 0, 12000)
    found = planner.propose(PROFILE, sizes, 16, 12000)
    assert found
    assert len({tuple(sorted(s)) for s in found}) == len(found)
    for strategy in found:
        assert sum(tp * pp for tp, pp in strategy) <= 16
    assert any(PROFILE.max_len(s, sum(a * b for a, b in found[0])) >= 12000 for s in found[0])
    assert found == planner.propose(PROFILE, sizes, 16, 12000)


def test_roundings_are_neighbours_that_leave_no_room() -> None:
    data = histogram(PROFILE, lengths(3000, 1, 12000), 16, 12000)
    for proposal in proposals(data, 16)[:5]:
        wanted: dict[tuple[int, int], float] = {}
        for share in proposal.shares:
            wanted[share.scheme] = wanted.get(share.scheme, 0.0) + share.pipelines
        for strategy in roundings(proposal, PROFILE, 16, 12000):
            free = 16 - sum(tp * pp for tp, pp in strategy)
            assert free >= 0
            for scheme, d in wanted.items():
                count = strategy.count(scheme)
                assert abs(count - d) < 1
                assert count >= d or scheme[0] * scheme[1] > free


def test_a_context_below_one_level_is_proposed_for() -> None:
    short = replace(PROFILE, limits={(1, 1): 60, (2, 1): 100})
    few = replace(short, schemes={s: PROFILE.schemes[s] for s in short.limits})
    assert planner.propose(few, [10, 40, 60], 4, 60)
    found = planner.propose(few, [10, 40, 90], 4, 90)
    assert found
    assert all((2, 1) in strategy for strategy in found)


def test_what_no_scheme_takes_is_refused() -> None:
    with pytest.raises(hg.Unsupported, match="no measured scheme fits 500000 tokens on 8 devices"):
        planner.propose(PROFILE, [100, 500_000], 8, 500_000)
    with pytest.raises(ValueError, match="each must be at least 1"):
        planner.propose(PROFILE, [0], 8, 100)
