"""What schemes cost: by `Costs` where a profile has blocks, as they are where it has published constants."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.cost.block_pieces import Constants
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.schemes import CostedSchemes, schemes_of
from hydragraph.report.candidate_comparison import explain
from hydragraph.spec.strategy import Strategy
from tests.cost.priced import profile
from tests.planner.examples import PROFILE

SCHEMES = ((1, 1), (1, 2), (2, 1), (2, 2))
LENGTHS = [100, 900, 300, 2500, 40, 700, 1200, 60] * 4


def measured(elements: int = 1000) -> Profile:
    """Return a profile with blocks; its constants of whole schemes are wrong, so a result that used them would show."""
    return replace(profile(4, elements=elements), schemes=dict.fromkeys(SCHEMES, Constants(1.0, 1.0, 1.0)))


def costs(each: Profile, ranks: int, home: hg.Home | None = None) -> Costs:
    return Costs(each, each.cluster(ranks), home=home)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_schemes_pipeline_is_what_costs_say(scheme: tuple[int, int]) -> None:
    each = measured()
    found = schemes_of(each, 8)
    assert isinstance(found, CostedSchemes)
    alone = Strategy.parse(f"<tp{scheme[0]},pp{scheme[1]}>", 4).pipelines[0]
    assert found.pipeline(scheme, 8) == costs(each, 8).pipeline(alone)
    assert found.max_len(scheme, 8) == found.pipeline(scheme, 8).max_len
    assert found.util_len(scheme) == {1: 1000, 2: 1500}[scheme[0]]


def test_a_strategy_is_charged_what_is_fixed() -> None:
    each = measured(elements=10**6)
    found = schemes_of(each, 4)
    strategy = Strategy.parse("<tp2,pp1> + 2*<tp1,pp1>", 4)
    schemes = ((2, 1), (1, 1), (1, 1))
    assert found.charge(schemes) == costs(each, 4).fixed(strategy) > 0
    assert found.pipelines(schemes) == tuple(costs(each, 4).pipeline(p) for p in strategy.pipelines)


def test_what_fits_goes_by_the_home() -> None:
    """Searches place a scheme where most of the state is; a whole strategy is placed as it runs."""
    each = measured(elements=10**6)
    uneven = schemes_of(each, 4, hg.Home(shares=[1, 1, 0, 0]))
    even = schemes_of(each, 4)
    assert uneven.max_len((1, 1), 4) < even.max_len((1, 1), 4)
    limits = [p.max_len for p in uneven.pipelines(((1, 1),) * 4)]
    assert limits[0] == limits[1] == uneven.max_len((1, 1), 4)
    assert limits[2] == limits[3] > even.max_len((1, 1), 4)


def test_published_constants_are_read_as_they_are() -> None:
    assert schemes_of(PROFILE, 8) is PROFILE
    few = schemes_of(PROFILE, 8, schemes=[(2, 1)])
    assert list(few.schemes) == [(2, 1)]
    assert PROFILE.charge(((2, 1), (4, 1))) == PROFILE.hetero_sync_s
    assert PROFILE.charge(((2, 1), (2, 1))) == 0


def test_a_plan_of_a_profile_with_blocks_is_priced_by_costs() -> None:
    each = measured(elements=10**5)
    report = explain(each, LENGTHS, 4, 2500, 20_000, iterations=2)
    found = costs(each, 4)
    best = report.best
    placed = Strategy.parse(_text(best.strategy), 4)
    assert best.parts is not None
    assert best.parts.sync == pytest.approx(found.fixed(placed))
    assert report.sync >= best.parts.sync > 0
    assert report.example.pipelines == tuple(
        found.pipeline(p) for p in Strategy.parse(_text(report.example.strategy), 4).pipelines
    )


def _text(schemes: tuple[tuple[int, int], ...]) -> str:
    return " + ".join(f"<tp{tp},pp{pp}>" for tp, pp in schemes)
