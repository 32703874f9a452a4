"""Ranks that kill themselves at any call of a step, a move, a save, a recovery, a meeting: to the same bits."""

from __future__ import annotations

from pathlib import Path

import hydragraph.runtime
from tests.moments import NEVER, RANKS, WINDOWS, Plan, Strike, drawn, ready, run, wrong
from tests.thorough import thorough

# Calls of functions within a step: sums are sent to second owners and put there, and the step is committed.
HANDING = [("_handed", 1), ("_handed", 3), ("put", 1), ("put", 2), ("go_on", 2), ("_commit", 1)]


def test_strikes_come_from_the_seed() -> None:
    calls = dict.fromkeys(WINDOWS, 100)
    strikes = drawn(60, 1, calls, WINDOWS, ["kill", "stop"])
    assert strikes == drawn(60, 1, calls, WINDOWS, ["kill", "stop"]) != drawn(60, 2, calls, WINDOWS, ["kill", "stop"])
    assert {strike.window: sum(s.window == strike.window for s in strikes) for strike in strikes} == dict.fromkeys(
        WINDOWS, 10
    )
    assert {strike.rank for strike in strikes} == set(range(RANKS))


def test_ranks_are_killed_in_functions_that_exist() -> None:
    text = "".join(path.read_text() for path in Path(hydragraph.runtime.__path__[0]).glob("*.py"))
    assert [at for at, _ in HANDING if f"def {at}(" not in text] == []


@thorough
def test_a_rank_is_killed_while_state_moves_and_another_while_the_rest_recovers_from_that(tmp_path: Path) -> None:
    prepared, struck, calm = ready(), tmp_path / "struck", tmp_path / "calm"
    strikes = (Strike("move", 2000, 2), Strike("recover", 9000, 1))
    for folder in (struck, calm):
        folder.mkdir()
    plan = Plan(strikes, struck)
    came = run(prepared, plan)
    assert came.hits[0][2] != "its end"
    assert not wrong(plan, came, run(prepared, Plan((), calm, steps=max(came.losses))))


@thorough
def test_at_many_moments(tmp_path: Path) -> None:
    prepared, struck, calm = ready(), tmp_path / "struck", tmp_path / "calm"
    for folder in (struck, calm):
        folder.mkdir()
    ends = [Strike(window, NEVER, 1, "stop" if window == "move" else "kill") for window in WINDOWS]
    calls = {"step": 2_500, "move": 2_500, "save": 2_500, "recover": 17_000, "room": 20_000, "join": 35_000}
    plan = Plan((*ends, *drawn(18, 5, calls, WINDOWS, ["kill", "kill", "hang"])), struck)  # pyrefly: ignore[bad-argument-type]
    came = run(prepared, plan)
    assert not wrong(plan, came, run(prepared, Plan((), calm, steps=max(came.losses))))
    within = [hit for number, hit in came.hits.items() if number >= len(ends) and hit[2] != "its end"]
    assert len(within) > 18 * 3 / 4, "calls that a window does not have"


@thorough
def test_who_hangs_at_any_moment_of_a_meeting_is_given_up(tmp_path: Path) -> None:
    prepared, struck, calm = ready(), tmp_path / "struck", tmp_path / "calm"
    for folder in (struck, calm):
        folder.mkdir()
    # Before it announces itself, while it waits, after agreeing, while connecting, while moving state.
    calls = [(window, call) for window in ("recover", "room") for call in (5, 40, 150, 600, 2000)]
    plan = Plan(tuple(Strike(*each, number % 4, "hang") for number, each in enumerate(calls)), struck)
    came = run(prepared, plan)
    assert not wrong(plan, came, run(prepared, Plan((), calm, steps=max(came.losses))))


@thorough
def test_sums_that_are_being_handed_on_to_second_owners_are_lost_with_one_owner_or_with_both(tmp_path: Path) -> None:
    prepared, struck, calm = ready(), tmp_path / "struck", tmp_path / "calm"
    for folder in (struck, calm):
        folder.mkdir()
    strikes = [
        Strike("step", call, number % 4, at=at, also=also)
        for also in (False, True)
        for number, (at, call) in enumerate(HANDING)
    ]
    plan = Plan(tuple(strikes), struck)
    came = run(prepared, plan)
    assert not wrong(plan, came, run(prepared, Plan((), calm, steps=max(came.losses))))
    within = [came.hits[number][2] for number, strike in enumerate(strikes) if came.hits[number][2] != "its end"]
    assert len(within) > len(strikes) / 2
    assert {where.split()[-1] for where in within} == {at for at, _ in HANDING}
    assert len(list(struck.glob("restored-*"))) == sum(strike.also for strike in strikes), "one owner is enough"
    assert all((struck / f"also-{number}").exists() for number, strike in enumerate(strikes) if strike.also)
