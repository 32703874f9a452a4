"""An outline orders buckets by their first use, finds where backward ends, and refuses names that would not print."""

from __future__ import annotations

from typing import Any

import pytest

from hydragraph.ir.program_outline import Outline

BLOCKS = ("embed", "layer.0", "layer.1", "head")
BUCKETS = (("head", ("head",)), ("layer.1", ("layer.1",)), ("table", ("embed", "head")), ("layer.0", ("layer.0",)))


def test_buckets_are_pulled_in_the_order_of_their_first_use() -> None:
    outline = Outline(BLOCKS, BUCKETS)
    assert outline.layers == 2
    assert outline.pull_order == ("table", "layer.0", "layer.1", "head")
    assert outline.weights["head"] == ("table", "head")  # a tied weight stands where it is used first


@pytest.mark.parametrize(
    ("frozen", "lowest"),
    [
        ((), 0),
        (("table",), 1),
        (("table", "layer.0"), 2),
        (("table", "layer.0", "layer.1", "head"), 4),
    ],
)
def test_backward_ends_at_the_first_block_that_learns(frozen: tuple[str, ...], lowest: int) -> None:
    outline = Outline(BLOCKS, BUCKETS, frozen)
    assert outline.lowest == lowest
    assert all(not set(names) & set(frozen) for names in outline.gradients.values())


def test_stages_take_the_ends_with_the_first_and_the_last_layer() -> None:
    outline = Outline(BLOCKS, BUCKETS)
    assert [outline.span(0, 1), outline.span(1, 2), outline.span(0, 2)] == [(0, 2), (2, 4), (0, 4)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"blocks": ("embed",)}, "name at least two blocks"),
        ({"blocks": ("embed", "aux", "head")}, "the name is taken"),
        ({"blocks": ("embed", "layer 0", "head")}, r"'layer 0': use letters"),
        ({"blocks": ("embed", "embed", "head")}, "occurs more than once"),
        ({"buckets": (("x", ()),)}, "name at least one block"),
        ({"buckets": (("x", ("nowhere",)),)}, "name at least one block"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Outline(**(dict[str, Any](blocks=BLOCKS, buckets=BUCKETS) | changes))
