"""The comparisons in benchmarks/everything.py, and how its rival divides sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.everything import Done, Ran, Story, differences, read_steps, slower
from benchmarks.sharded import micro_batches, shares
from tests.cost import priced


def test_every_step_but_the_first_belongs_to_one_part_of_the_story() -> None:
    story = Story(3, 2, 4, 1)
    assert [step for part in story.parts.values() for step in part] == list(range(2, story.steps + 1))
    ends = [part[-1] for part in story.parts.values()]
    assert ends == [story.slow_at, story.kill_at, story.back_at, story.steps]


def test_a_step_that_was_undone_counts_once_and_one_that_is_being_written_not(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": at, "tokens": 5, "time": f"2026-01-01T00:00:{at:02}+00:00"} for step, at in
             ((1, 1), (2, 2), (3, 3), (2, 7), (3, 9))]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    found = read_steps(file)
    assert {step: done.loss for step, done in found.items()} == {1: 1, 2: 7, 3: 9}
    assert found[3].at - found[1].at == 8
    assert read_steps(tmp_path / "nothing") == {}


def test_goodput_is_by_what_the_side_itself_does_while_all_is_well() -> None:
    story = Story(4, 2, 2, 2)
    at = [0, 1, 2, 3, 7, 11, 20, 21, 22, 23]  # after the fourth step two take four seconds each, the next one nine
    ran = Ran({i: Done(1.0, 10, float(t)) for i, t in enumerate(at, start=1)}, 5.0, ())
    assert ran.total_s == 23
    assert ran.seconds(story.parts["straggler"]) == 8
    assert ran.goodput(story.parts["healthy"]) == pytest.approx(9 / 23)
    other = Ran({i: Done(1.0 + (i == 3) * 1e-4, 10, 0.0) for i in ran.steps}, 5.0, ())
    assert differences({"one": [ran], "other": [other]}) == pytest.approx(1e-4)


def test_a_slower_kind_of_device_takes_so_many_times_as_long_and_holds_as_much() -> None:
    fast = priced.profile(4)
    slow = slower(fast, 2.5, "slow")
    assert slow.type == "slow"
    for kind, pieces in fast.pieces.items():
        for name, piece in pieces.items():
            other = slow.pieces[kind][name]
            assert other.forward.seconds([64]) == pytest.approx(2.5 * piece.forward.seconds([64]))
            assert other.backward.seconds([64]) == pytest.approx(2.5 * piece.backward.seconds([64]))
            assert (other.held, other.parameters) == (piece.held, piece.parameters)


@given(st.lists(st.integers(2, 1024), min_size=1, max_size=60), st.lists(st.sampled_from([0.4, 0.8, 2]), min_size=1))
def test_the_rival_gives_every_sequence_to_one_rank_and_no_micro_batch_too_much(
    lengths: list[int], speeds: list[float]
) -> None:
    given = shares(lengths, speeds)
    assert sorted(i for each in given for i in each) == list(range(len(lengths)))
    for mine in given:
        packed = micro_batches(mine, lengths, 1024)
        assert sorted(i for each in packed for i in each) == sorted(mine)
        assert all(sum(lengths[i] for i in each) <= 1024 for each in packed)


def test_the_rival_gives_faster_ranks_more() -> None:
    counts = [len(each) for each in shares([100] * 30, [2, 2, 1, 1])]
    assert counts == [10, 10, 5, 5]
