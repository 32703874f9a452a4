"""What a slow link costs: all sides compute the same, and what is printed of it is arithmetic."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import hydragraph as hg
from benchmarks.step import Sizes
from benchmarks.two_nodes import Found, Sides, Taken, hidden, table
from tests.thorough import thorough


def on_rank() -> Found:
    sides = Sides(Sizes(128, 4, 96))
    found = sides.alternate(rounds=1)
    sides.close()
    return found


@thorough
def test_all_sides_train_alike_and_send_something() -> None:
    found, other = hg.launch(on_rank, 2)
    assert found == other
    assert list(found) == ["FSDP2", "DDP", "data parallel", "lopsided", "pipeline"]
    for taken in found.values():
        (step,) = taken
        assert step.wall > 0
        assert step.sent > 0
    assert found["data parallel"][0].sent < found["FSDP2"][0].sent


def test_the_table_is_arithmetic() -> None:
    assert hidden(waited_s=1.0, busy_s=4.0) == pytest.approx(0.75)
    assert hidden(waited_s=5.0, busy_s=4.0) == 0.0
    plain = {"FSDP2": [Taken(8.0, 50e6)] * 3, "DDP": [Taken(4.0, 25e6)] * 3}
    console = Console(width=150, file=io.StringIO(), record=True)
    console.print(table("slow", 100e6, {**plain, "pipeline": [Taken(2.0, 12.5e6, 0.2, 0.05)] * 3}))
    row = [cell.strip() for cell in console.export_text().splitlines()[-2].strip("│").split("│")]
    assert row == ["pipeline", "2.00", "0.25", "0.50", "12.5", "1.00", "0.20", "0.05", "75%"]
