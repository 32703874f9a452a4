"""Reports of simulations: the best first, and a loser's words name what it has more of."""

from __future__ import annotations

import pytest

from hydragraph.report.simulation_report import simulation_report, why_lost
from tests.report.made import TEXTS, four, report, simulated


def test_the_best_comes_first_and_others_say_why_they_lost() -> None:
    found = report()
    rates = [row.tokens_per_s or 0.0 for row in found.contenders]
    assert rates == sorted(rates, reverse=True)
    assert [bool(row.why) for row in found.contenders] == [False, True, True]
    assert [panel.name for panel in found.panels] == [row.name for row in found.contenders]
    assert {fact.label for fact in found.facts} >= {"best strategy", "iteration", "tokens/s", "most memory"}
    for row, panel in zip(found.contenders, found.panels, strict=True):
        assert row.seconds == panel.courses[0].seconds
        assert all(0 <= part <= 1 for _, part in row.shares)


def test_why_a_strategy_lost() -> None:
    """Twice the micro-batches of one stage take longer by computing; the same again is as good."""
    on = four()
    best = simulated(on, "4*<tp1,pp1>", [2, 2, 2, 2])
    loser = simulated(on, "<[0]x4>", [8])
    words = why_lost(loser, best)
    assert words.startswith("takes ")
    assert "computing" in words
    longer = loser.timeline.seconds / best.timeline.seconds
    assert (f"{longer:.2g} ×" if longer >= 2 else f"{longer - 1:.1%}") in words
    assert why_lost(best, simulated(on, "4*<tp1,pp1>", [2, 2, 2, 2])) == "as good as the best"


@pytest.mark.parametrize("text", [text for text, _ in TEXTS])
def test_one_strategy_is_enough(text: str) -> None:
    on = four()
    counts = dict(TEXTS)[text]
    (row,) = simulation_report("one", on, [simulated(on, text, counts)]).contenders
    assert row.why == ""
