"""Order of a pipeline's micro-batches, by hand."""

from __future__ import annotations

import numpy as np

from hydragraph.cost.micro_batch_order import largest_in_middle


def test_the_largest_micro_batch_is_in_the_middle() -> None:
    order = np.argsort(largest_in_middle(np.array([5.0, 1.0, 4.0, 2.0, 3.0])))
    assert order.tolist() == [1, 4, 0, 2, 3]
