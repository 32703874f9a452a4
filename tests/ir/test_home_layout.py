"""From a `Home` to layouts: one per bucket and shares, over all ranks."""

from __future__ import annotations

import numpy as np
import pytest

import hydragraph as hg
from hydragraph.ir import layout
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.parameter import Bucket, Parameter

EMBED = Bucket("embed", (Parameter("e", (40,)),), ("embed",))
LAYERS = [Bucket(f"layer.{i}", (Parameter(f"w{i}", (60,)),), (f"layer.{i}",)) for i in range(3)]


def test_equal_shares_are_the_layout_that_native_collectives_need() -> None:
    owners, expected = HomeLayouts(hg.Home(), 4).of(EMBED), layout.home(40, range(4))
    assert np.array_equal(owners.lo, expected.lo)
    assert owners.lo.tolist() == [0, 10, 20, 30]
    assert np.array_equal(HomeLayouts(hg.Home([2, 2, 2, 2]), 4).of(EMBED).lo, expected.lo)


def test_a_bucket_may_have_shares_of_its_own_and_equal_ones_share_a_layout() -> None:
    owners = HomeLayouts(hg.Home([1, 1, 0], buckets={"embed": [0, 0, 1], "layer.2": [0, 1, 1]}), 3)
    found = owners.by_name([EMBED, *LAYERS])
    assert found["embed"].ranks == (2,)
    assert found["layer.2"].ranks == (1, 2)
    assert found["layer.0"].ranks == (0, 1)
    assert found["layer.0"] is found["layer.1"] is owners.of(LAYERS[0])
    with pytest.raises(ValueError, match="the run has 4 ranks"):
        HomeLayouts(hg.Home([1, 1, 0]), 4)


def test_copies_are_on_the_nodes_of_the_home() -> None:
    home = hg.Home([2, 1, 1], copies=2).on([0, 1, 1])
    found = HomeLayouts(home, 3).of(LAYERS[0])
    assert [found.local_size(rank) for rank in range(3)] == [60, 32, 28]
    assert found.without([1, 2]).local_size(0) == 60
