"""The board keeps ranks apart, and silence is counted in one's own polls."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from hydragraph.runtime.failure.board import Board, Progress, Pulse


def test_board_keeps_ranks_apart(tmp_path: Path) -> None:
    board, other = Board(tmp_path / "board", 3), Board(tmp_path / "board", 3)
    assert other.read(1) == Progress(0, 0, None)
    board.beat(1)
    board.place(1, 7, 0)
    board.beat(1)
    assert other.read(1) == Progress(2, 7, 0)
    board.place(1, 8, None)
    assert other.read(1) == Progress(2, 8, None)
    assert other.read(0) == other.read(2) == Progress(0, 0, None)
    board.close()
    other.close()


def test_a_rank_that_stops_beating_is_found_by_counting_polls(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 3)
    pulse, second = Pulse(board, (1, 2), timedelta(seconds=0.5)), timedelta(seconds=1)
    board.beat(1)
    for _ in range(5):
        pulse.poll()  # rank 2 has never beaten: it may write on another board
    assert pulse.stopped(2 * second) == 1
    board.beat(1)
    board.beat(2)
    pulse.poll()
    assert pulse.stopped(timedelta(seconds=0.1)) is None
    for _ in range(2):
        board.beat(1)
        pulse.poll()
    assert pulse.stopped(second) == 2
    assert pulse.stopped(1.1 * second) is None
    assert Pulse(board, (), second).stopped(timedelta(0)) is None
    board.close()
