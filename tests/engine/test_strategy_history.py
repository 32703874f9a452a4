"""The history of strategies names seats, so it does not depend on the present numbers of ranks."""

from __future__ import annotations

import hydragraph as hg
from hydragraph.engine.strategy_history import KEPT, StrategyHistory

FOUR = hg.Strategy.parse("<tp1,pp2> + <tp1,pp2>", 4)
SLOW = hg.Strategy.parse("<[0]x1,[1]x3> + <tp1,pp2>", 4)
THREE = hg.Strategy.parse("<[0]x4> + <[1]x4> + <[2]x4>", 4)


def test_of_what_ran_with_a_lost_rank_that_one_gets_a_number_beyond() -> None:
    past = StrategyHistory().ended([SLOW, FOUR], 4)
    cut, also = past.among([0, 2, 3])  # rank 1 is lost
    assert cut == hg.Strategy.parse("<[0]x1,[3]x3> + <[1]x2,[2]x2>", 4)
    assert also == hg.Strategy.parse("<[0]x2,[3]x2> + <[1]x2,[2]x2>", 4)


def test_what_ran_in_the_same_seats_comes_first_again_whoever_sits_there() -> None:
    past = StrategyHistory((0, 2, 3), StrategyHistory().ended([FOUR], 4).periods).ended([THREE], 3)
    assert past.among([0, 2, 3, 1]) == (
        hg.Strategy.parse("<[0]x2,[3]x2> + <[1]x2,[2]x2>", 4),
        hg.Strategy.parse("<[0]x4> + <[1]x4> + <[2]x4>", 4),
    )
    assert past.among([0, 2, 3])[0] == THREE
    again = StrategyHistory((0, 2, 3, 1), past.periods).ended([FOUR], 4)  # now on other seats: 0 and 2, 3 and 1
    assert again.among([0, 1, 2, 3]) == (
        hg.Strategy.parse("<[0]x2,[2]x2> + <[3]x2,[1]x2>", 4),
        FOUR,
        hg.Strategy.parse("<[0]x4> + <[2]x4> + <[3]x4>", 4),
    )


def test_ranks_that_never_trained_remember_nothing_and_nobody_remembers_everything() -> None:
    assert StrategyHistory().ended([], 4) == StrategyHistory()
    past = StrategyHistory()
    for seat in range(2 * KEPT):
        past = StrategyHistory((seat,), past.periods).ended([hg.Strategy.parse("<tp1,pp1>", 4)], 1)
    assert len(past.periods) == KEPT
    assert past.among([2 * KEPT - 1])[0] == hg.Strategy.parse("<tp1,pp1>", 4)
