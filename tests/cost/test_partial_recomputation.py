"""Stages that recompute within a memory budget cost what their graphs repeat, and hold what they save."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.block_pieces import BlockPiece, MemoryLines
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import Constants
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.partial_recomputation import within_budget
from hydragraph.passes.variants import Variants
from hydragraph.spec.assignment import Assignment
from tests.cost import priced
from tests.models import captured

ASSIGNMENT = Assignment.even([3], [1024])


@functools.cache
def costs_of(graphs: bool) -> Costs:
    """Return costs of a Llama of four layers, from its graphs or from a made-up profile."""
    if not graphs:
        return Costs(priced.that_saves(priced.profile(4, "fast")), priced.cluster(2))
    program, _ = captured("llama")
    cluster = priced.cluster(2)
    return Costs(datasheet(program, cluster), cluster, blocks=CompiledBlocks(program, Variants(program).get))


@pytest.mark.parametrize("graphs", [True, False])
def test_a_smaller_budget_takes_longer_and_holds_less(graphs: bool) -> None:
    costs = costs_of(graphs)
    layers = costs.outline.layers
    flags = ["", "r0.1", "r"] if graphs else ["", "r0.6", "r0.1", "r"]
    strategies = [hg.Strategy.parse(f"<tp1,pp2>{flag}", layers) for flag in flags]
    seconds = [costs.seconds(strategy, ASSIGNMENT) for strategy in strategies]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-2] < seconds[-1]
    # The first stage holds two micro-batches, so what is saved decides its peak.
    held = [costs.memory(strategy, ASSIGNMENT)[0].total for strategy in strategies]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-2]


def test_a_step_that_recomputes_in_part_is_simulated_as_it_is_estimated() -> None:
    costs = costs_of(True)
    strategy = hg.Strategy.parse("<tp1,pp1>r0.1", costs.outline.layers)
    plain, full = (hg.Strategy.parse(f"<tp1,pp1>{flag}", costs.outline.layers) for flag in ("", "r"))
    simulated = [costs.simulate(each, ASSIGNMENT).seconds for each in (plain, strategy, full)]
    assert simulated == sorted(simulated)
    assert simulated[0] < simulated[1]


coefficients = st.floats(1e-9, 1.0)


@given(coefficients, coefficients, coefficients, st.floats(0.01, 0.99), st.floats(0, 1))
def test_the_backward_lies_between_and_never_repeats_attention(
    a: float, b: float, c: float, budget: float, share: float
) -> None:
    forward = Constants(a, b, c)
    plain, full = (
        BlockPiece(forward, forward.times(times), held=MemoryLines(saved=(1.0, kept)))
        for times, kept in ((2, 10.0), (3, 0.0))
    )
    found = within_budget({"layer": plain}, {"layer": full}, budget, {"layer": share})["layer"]
    two = found.backward
    assert found.forward == forward
    assert two.a == 2 * a
    assert two.b == pytest.approx((2 + share) * b)
    assert two.c == pytest.approx((2 + share) * c)
    assert found.held is not None
    assert found.held.saved == pytest.approx((budget, 10 * budget))
