"""What some ranks do is known to all: values by rank, and an error on one of them on every one."""

from __future__ import annotations

from typing import Any

import pytest

from hydragraph.cluster.agreement import Failure
from hydragraph.cluster.shared_outcome import together


class Pair:
    """A rank beside another, whose outcome is given."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self.other]


def test_every_rank_gets_what_each_has_made() -> None:
    world: Any = Pair("theirs")
    assert together(world, "making", True, lambda: "mine") == ["mine", "theirs"]
    idle = together(world, "making", False, lambda: "mine")
    assert idle == [None, "theirs"], "a rank that does not act does not call the function"


def test_an_error_of_another_rank_is_raised_here() -> None:
    world: Any = Pair(Failure.of(ValueError("data: no such file")))
    with pytest.raises(ValueError, match=r"data: no such file"):
        together(world, "reading the data", True, lambda: "mine")


def test_an_own_error_is_raised_as_it_is() -> None:
    world: Any = Pair("theirs")
    error = FileNotFoundError("gone")

    def fails() -> str:
        raise error

    with pytest.raises(FileNotFoundError) as raised:
        together(world, "reading the data", True, fails)
    assert raised.value is error
