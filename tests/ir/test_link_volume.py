"""Volume between each pair of ranks, compared with the slices of the link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir import link
from hydragraph.ir.layout import Ints, whole
from hydragraph.ir.link import Slices
from hydragraph.ir.link_volume import copied, handed_on, reduced
from tests.ir.test_link import Case, cases, homes

RANKS = 30


def counted(slices: Slices) -> Ints:
    sent = np.zeros((RANKS, RANKS), np.int64)
    there = slices.travelling
    np.add.at(sent, (there.src, there.dst), there.hi - there.lo)
    return sent


@given(st.data(), cases())
def test_as_many_elements_travel_as_in_the_slices(data: st.DataObject, case: Case) -> None:
    owners = data.draw(homes(case.bucket.size))
    if data.draw(st.booleans()):  # where nodes are known, of some ranks at least, the nearest is one of the same
        width = data.draw(st.integers(1, 6))
        owners = replace(owners, nodes=np.arange(data.draw(st.integers(25, 28)), dtype=np.int64) // width)
    np.testing.assert_array_equal(copied(owners, case.layout, RANKS), counted(link.copy(owners, case.layout)))
    np.testing.assert_array_equal(reduced(case.layout, owners, RANKS), counted(link.reduce(case.layout, owners)))
    np.testing.assert_array_equal(handed_on(owners, RANKS), counted(link.hand_on(owners)))
    # From one layout of many copies to another, as weights are handed from strategy to strategy.
    np.testing.assert_array_equal(copied(case.layout, owners, RANKS), counted(link.copy(case.layout, owners)))


@given(st.data(), cases())
def test_what_no_rank_has_is_refused_in_the_words_of_the_link(data: st.DataObject, case: Case) -> None:
    owners = data.draw(homes(case.bucket.size, copies=1))
    left = owners.without([owners.ranks[0]])
    with pytest.raises(ValueError, match="missing from the source layout"):
        copied(left, case.layout, RANKS)


def test_layouts_of_two_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="use one bucket's layouts"):
        copied(whole(8, 0), whole(9, 1), 2)
