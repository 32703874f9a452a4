"""The list of graph passes: which apply, what each makes of a Llama layer, and that a variant is all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from hydragraph.ir.parameter import Parameter, ShardRule
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.graph_passes import (
    GRAPH_PASSES,
    PassResult,
    make_variant,
    modules_of,
    run_passes,
    shard_strides,
)
from hydragraph.passes.graph_text import changes, graph_text
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.passes.variants import Variants, pass_seconds
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import captured
from tests.passes.golden_template import check_golden_text
from tests.thorough import thorough


def spec(part: StagePart = StagePart(), name: str = "gpt2", **settings: object) -> VariantSpec:  # noqa: B008
    program, _ = captured(name)
    made = Variants(program, added=True).spec(program.blocks[1], part)
    return replace(made, **settings)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, ["shard", "differentiate", "accumulate"]),
        ({"added": False}, ["shard", "differentiate"]),
        ({"dtype": torch.bfloat16}, ["shard", "differentiate"]),
        ({"backend": "inductor"}, ["shard", "differentiate", "compile"]),
        ({"fused_head": True}, ["shard", "fuse_head", "differentiate", "accumulate"]),
        (
            {"fused_head": True, "part": StagePart(StageKind(2))},
            ["shard", "differentiate", "accumulate", "overlap_collectives"],
        ),
    ],
)
def test_a_spec_says_which_passes_apply(changed: dict[str, Any], names: list[str]) -> None:
    assert list(spec(**changed).passes) == names


def test_passes_have_names_of_their_own_and_say_what_they_do() -> None:
    names = [graph_pass.name for graph_pass in GRAPH_PASSES]
    assert len(set(names)) == len(names)
    assert all(graph_pass.when and graph_pass.meaning.endswith(".") for graph_pass in GRAPH_PASSES)


@thorough
def test_what_each_pass_changes_in_a_llama_layer() -> None:
    wanted = spec(StagePart(StageKind(2)), "llama")
    before: dict[str, fx.GraphModule] = {"forward": wanted.template.graph}
    lines = []
    for result in run_passes(wanted):
        after = modules_of(result.graphs)
        lines += [f"{result.name}, {name}: {changes(before.get(name), module)}" for name, module in after.items()]
        before = after
    check_golden_text("llama_graph_passes_tp2_rank0", "\n".join(lines) + "\n")


def test_passes_leave_what_they_take_as_it_is() -> None:
    wanted = spec(StagePart(StageKind(2)), fused_head=True)
    texts: list[list[str]] = [[graph_text(wanted.template.graph)]]
    results: list[PassResult] = list(run_passes(wanted))
    texts += [[graph_text(m) for m in modules_of(result.graphs).values()] for result in run_passes(wanted)]
    assert [graph_text(wanted.template.graph)] == texts[0]
    again = [[graph_text(m) for m in modules_of(result.graphs).values()] for result in results]
    assert again == texts[1:]


@thorough
def test_a_variant_is_what_the_last_pass_made_and_keeps_the_seconds_of_each() -> None:
    program, _ = captured("llama")
    variants = Variants(program, added=True)
    variant = variants.get(program.blocks[1], StagePart())
    last = list(run_passes(variants.spec(program.blocks[1], StagePart())))[-1].graphs
    assert isinstance(last, Variant)
    assert (graph_text(last.forward), graph_text(last.backward)) == (
        graph_text(variant.forward),
        graph_text(variant.backward),
    )
    seconds = pass_seconds(variant)
    assert list(seconds) == ["shard", "differentiate", "accumulate"]
    assert all(value > 0 for value in seconds.values())
    assert pass_seconds(last) == {}


def test_a_pass_that_does_not_apply_is_not_run() -> None:
    with mock.patch("hydragraph.passes.graph_passes.accumulate", side_effect=AssertionError):
        variant, seconds = make_variant(spec(added=False))
    assert variant.added == ()
    assert "accumulate" not in seconds


def test_a_shard_that_is_cut_along_columns_is_a_transposed_view() -> None:
    rows, columns = (Parameter("w", (6, 4), rule=ShardRule(dim, (n,))) for dim, n in ((0, 6), (1, 4)))
    assert shard_strides(rows, StagePart(StageKind(2), 1)) == (4, 1)
    assert shard_strides(columns, StagePart(StageKind(2), 1)) == (1, 6)
    assert shard_strides(columns, StagePart()) == columns.natural(torch.empty(24)).stride()
    assert shard_strides(Parameter("w", (6, 4)), StagePart(StageKind(2), 1)) == (4, 1)
