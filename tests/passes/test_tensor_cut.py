"""The example of the module's legend: cuts of a fused product of q, k and v, and what an origin learns of it."""

from __future__ import annotations

import pytest

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.parameter import ShardRule
from hydragraph.passes.find_cuts import find_cuts, rules
from hydragraph.passes.tensor_cut import Cut, Cuts, width
from tests.models import captured


@pytest.fixture(scope="module")
def cuts() -> Cuts:
    """Return those of a GPT-2 layer with 4 heads of 16, whose q, k and v are one product."""
    program, _ = captured("gpt2")
    template = program.templates[program.blocks[1].template]
    placeholders = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
    return find_cuts(template.graph.graph, set(placeholders[: len(template.parameters)]), None, set())


def test_a_fused_product_has_three_segments_of_heads(cuts: Cuts) -> None:
    fused = next(node for node in cuts.columns if width(node) == 192)
    origin = cuts.origins[fused]
    assert (origin.unit, sorted(origin.bounds), origin.heads) == (16, [64, 128], True)
    assert cuts.cut[fused] == Cut(len(value_of(fused).shape) - 1, 1, 0, 192, fused, frozenset({fused}))
    assert ShardRule(1, (4, 4, 4), 16, heads=True) in rules(cuts).values()


def test_parts_and_heads_say_which_elements_they_stand_for(cuts: Cuts) -> None:
    fused = next(node for node in cuts.columns if width(node) == 192)
    of_fused = {node: cut for node, cut in cuts.cut.items() if cut.lead is fused}
    keys = [cut for cut in of_fused.values() if (cut.start, cut.length) == (64, 64)]
    assert {cut.scale for cut in keys} == {1, 16}
    for node, cut in of_fused.items():
        value = value_of(node)
        if not isinstance(value, (list, tuple)):
            assert value.shape[cut.dim] * cut.scale == cut.length


def test_the_coarsest_unit_counts_and_ends_part_nothing(cuts: Cuts) -> None:
    fused = next(node for node in cuts.columns if width(node) == 192)
    own = Cuts(origins={fused: type(cuts.origins[fused])()})
    cut = cuts.cut[fused]
    for unit in (4, 16, 8):
        own.refine(cut, unit)
    for at in (0, 64, 192):
        own.bound(cut, at)
    assert own.unit(cut) == 16
    assert own.origins[fused].bounds == {64}
