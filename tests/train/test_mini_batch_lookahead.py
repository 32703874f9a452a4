"""Reading ahead changes neither the mini-batches nor the position where a resumed run continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hydragraph.data.mini_batches import Drawn
from hydragraph.train.mini_batch_lookahead import MiniBatchLookahead


class Counting:
    def __init__(self, start: int = 0) -> None:
        self.at = start

    def __next__(self) -> list[Drawn]:
        self.at += 1
        return [torch.tensor([self.at])]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}


def number(batch: Sequence[Drawn]) -> int:
    (drawn,) = batch
    assert isinstance(drawn, Tensor)
    return int(drawn)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_mini_batches_and_positions_are_those_without_it(count: int) -> None:
    announced: list[int] = []
    source: Any = Counting()
    coming = MiniBatchLookahead(source, count, lambda batch: announced.append(number(batch)))
    assert coming.position == {"at": 0}
    for step in range(1, 6):
        assert number(coming.take(left=6 - step)) == step
        assert coming.position == {"at": step}
        assert (number(coming.following) == step + 1) if coming.following else step == 5
        assert announced == list(range(1, min(step + count, 5) + 1)) if count else not announced
    assert source.at == 5  # it never reads more than steps need
