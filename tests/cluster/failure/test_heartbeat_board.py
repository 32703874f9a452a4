"""The board keeps ranks apart, has no name, and is opened by nobody else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hydragraph.cluster.failure.heartbeat_board import HeartbeatBoard, RankProgress

NOTHING = RankProgress(0, 0, None, "", waiting=False, left=False)


def test_board_keeps_ranks_apart() -> None:
    board = HeartbeatBoard.make(3)
    other = HeartbeatBoard.open(board.address, 3)
    assert other.read(1) == NOTHING
    board.place(1, 7, 0)
    assert other.read(1) == RankProgress(1, 7, 0, "", waiting=False, left=False)
    board.call(1, "save")
    board.lines[1].waiting = True
    board.place(1, 8, None)
    board.lines[1].left = True
    board.lines[1].finished = True
    assert [other.lines[rank].finished for rank in range(3)] == [False, True, False]
    assert other.read(1) == RankProgress(2, 8, None, "save", waiting=True, left=True)
    board.call(1, "x" * 1000)
    assert set(other.read(1).call) == {"x"}
    board.lines[1].waiting = False
    assert not other.read(1).waiting
    assert other.read(0) == other.read(2) == NOTHING
    assert other.progress_s == 600.0
    board.progress_s = 12.5
    assert other.progress_s == 12.5
    board.close()
    assert other.read(1).left, "who opened it keeps it"
    other.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it has a name, in a private folder")
def test_a_board_is_in_no_folder_and_ends_with_its_maker(tmp_path: Path) -> None:
    board = HeartbeatBoard.make(2)
    assert "memfd" in os.readlink(board.address)
    board.close()
    with pytest.raises(OSError, match="No such file"):
        HeartbeatBoard.open(board.address, 2)


def test_what_is_no_board_is_not_opened(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"0" * 100)
    os.mkfifo(tmp_path / "pipe")
    for path in (other, tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match=r"not a progress board of this user|Is a directory"):
            HeartbeatBoard.open(str(path), 2)
