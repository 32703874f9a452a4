"""Graphs as Python: the text runs, and computes what the graphs compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.cluster.collectives import StartsAtOnce
from hydragraph.commands.readable_graphs import backward_code, forward_code
from hydragraph.ir.program import Program
from hydragraph.passes import variants
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.train.config import ModelConfig
from hydragraph.train.model import skeleton
from tests.thorough import first, only

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


class Collectives(StartsAtOnce):
    """Two ranks with the same values."""

    def all_gather(self, value: Tensor, dim: int) -> Tensor:
        return torch.cat([value, value], dim)

    def reduce_scatter(self, value: Tensor, dim: int) -> Tensor:
        return 2 * value.chunk(2, dim)[0]

    def all_reduce(self, value: Tensor) -> Tensor:
        return 2 * value

    def all_reduce_max(self, value: Tensor) -> Tensor:
        return value


@pytest.fixture(scope="module")
def program() -> Program:
    return hg.capture(skeleton(ModelConfig("LlamaForCausalLM", SIZES), 32))


def inputs(variant: Variant) -> list[Any]:
    """Make inputs of the sizes that the graph was traced with."""
    generator = torch.Generator().manual_seed(0)
    held: list[Any] = []
    values = [node.meta.get("val") for node in variant.forward.graph.find_nodes(op="placeholder")]
    shapes = [
        None if v is None else [getattr(s.node, "hint", s) if hasattr(s, "node") else s for s in v.shape]
        for v in values
    ]
    tokens = max(shape[1] for shape in shapes if shape and len(shape) in (2, 3) and shape[0] == 1)
    for name, value, shape in zip(variant.inputs, values, shapes, strict=True):
        if value is None:
            held.append(Collectives())
        elif name.startswith("vocabulary_start."):
            held.append(torch.tensor(0))
        elif value.dtype is torch.int32:  # where sequences begin and end
            held.append(torch.linspace(0, tokens, shape[0]).int())
        elif value.dtype is torch.int64:
            held.append(torch.randint(0, 16, shape, generator=generator) if shape else torch.tensor(tokens))
        else:
            held.append(torch.randn(shape, generator=generator))  # pyrefly: ignore[no-matching-overload]
    return held


def defined(text: str, name: str) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(text, name, "exec"), scope)
    return scope[name]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, Tensor) else one == other


@only("tp1-True-layer", "tp2-True-embed", "tp2s-True-embed")
@pytest.mark.parametrize("block", [0, 1, 2], ids=["embed", "layer", "head"])
@pytest.mark.parametrize("recompute", first([True], [False, True]))
@pytest.mark.parametrize(
    "part", [StagePart(), StagePart(StageKind(2), 0), StagePart(StageKind(2, True), 1)], ids=["tp1", "tp2", "tp2s"]
)
def test_the_text_computes_what_the_graphs_do(
    program: Program, block: int, part: StagePart, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "_shared", {})  # graphs that were read from a file have no example values
    part = replace(part, kind=part.kind._replace(recompute=recompute))
    variant = Variants(program, added=True).get(program.blocks[block], part)
    arguments = inputs(variant)
    results = variant.forward(*arguments)
    found = defined(forward_code(variant, "Title."), "forward")(*arguments)
    assert len(found) == len(results)
    assert all(same(a, b) for a, b in zip(found, results, strict=True))
    saved = {f"saved.{i}": value for i, value in enumerate(results[variant.outputs :])}
    tangent = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
    held = {**dict(zip(variant.inputs, arguments, strict=True)), **saved, "tangent": tangent}
    first, second = ([torch.ones_like(held[name]) for name in variant.added] for _ in range(2))

    def run(backward: Any, totals: list[Tensor]) -> list[Tensor]:
        return [*backward(*(held[need] for need in variant.needs), *(x for t in totals for x in (t, 1.0))), *totals]

    gradients = run(variant.backward, first)
    found = run(defined(backward_code(variant, "Title."), "backward"), second)
    assert any(g.abs().max() > 0 for g in gradients)
    assert all(same(a, b) for a, b in zip(found, gradients, strict=True))


def test_names_and_sizes_are_the_models(program: Program) -> None:
    variant = Variants(program, added=True).get(program.blocks[1], StagePart(StageKind(2, True), 0))
    text = forward_code(variant, "One layer.")
    assert text.startswith('"""One layer.\n')
    assert 'self_attn_q_proj_weight: "float32[8, 16]",  # self_attn.q_proj.weight' in text
    assert 'hidden: "float32[1, T, 16]",\n' in text
    assert "collectives.start_all_gather(" in text
    assert '"float32[1, 2*T, 16]"' in text
    assert ",  # the output" in text
    back = backward_code(variant, "One layer.")
    assert ",  # total of self_attn.q_proj.weight" in back
    assert ",  # beta of self_attn.q_proj.weight" in back
    assert ",  # the gradient of input_layernorm.weight" in back
    assert ",  # the gradient of hidden" in back
    assert 'tangent: "float32[1, T, 16]",' in back
    shared = [line.strip().split(":")[0] for line in back.splitlines() if "# saved." in line]
    assert shared
    assert all(f"        {name},  # saved." in text for name in shared), "a saved value has one name in both"
