"""Forward and backward graphs: golden texts, what is saved, and gradients against autograd."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import hydragraph.kernels.varlen_attention  # noqa: F401  registers the operator that templates hold
from hydragraph.ir.graph_data import decode, value_of
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Template
from hydragraph.passes import differentiate as module
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.shard import shard
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.passes.golden_template import check_golden, llama_layer
from tests.passes.golden_template import layer as compiled
from tests.thorough import only


def test_golden_texts() -> None:
    template, parameters = llama_layer()
    part = StagePart(StageKind(2), 0)
    sharded = shard(template, parameters, part)
    check_golden("llama_shard_tp2_rank0", sharded.graph)
    variant = compiled(part)
    check_golden("llama_forward_tp2_rank0", variant.forward)
    check_golden("llama_backward_tp2_rank0", variant.backward)


def test_threads_that_ask_at_once_get_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of a stage do, which the check runs as threads; graphs are decoded when they are first asked for."""
    variant: Variant = pickle.loads(pickle.dumps(compiled(StagePart(StageKind(1), 0))))
    backwards: list[object] = []
    other = threading.Thread(target=lambda: backwards.append(variant.backward))

    def slow(data: Mapping[str, Any]) -> object:
        other.start()
        other.join(0.1)  # in which it has come to the same place
        return decode(data)

    monkeypatch.setattr(module, "decode", slow)
    assert isinstance(variant.forward, fx.GraphModule)
    other.join()
    assert backwards == [variant.backward]


def inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


@only("default-1")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
def test_a_variant_describes_its_graphs(tp: int, partitioner: str) -> None:
    template, _ = llama_layer()
    variant = compiled(StagePart(StageKind(tp), tp - 1), partitioner)
    extra = ("collectives",) if tp > 1 else ()
    assert variant.inputs == (*template.parameters, *template.buffers, *template.inputs, *extra)
    assert len(inputs(variant.forward)) == len(variant.inputs)
    assert len(inputs(variant.backward)) == len(variant.needs)
    assert variant.outputs == 1
    assert set(variant.gradients) == {*template.parameters, "hidden"}
    assert variant.needs.count("tangent") == 1
    assert set(variant.kinds) == set(template.parameters)
    whole = GradientKind.PARTIAL if tp == 1 else GradientKind.REPLICA
    assert variant.kinds["input_layernorm.weight"] is whole
    assert variant.kinds["self_attn.q_proj.weight"] is GradientKind.PARTIAL
    calls = [n.target for g in (variant.forward, variant.backward) for n in g.graph.nodes if n.op == "call_method"]
    if partitioner == "min_cut":
        assert calls == ["all_reduce"] * (4 if tp > 1 else 0)


def fed(template: Template, parameters: dict[str, Parameter], tokens: int) -> dict[str, Tensor]:
    """Return random values of a layer's inputs."""
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(p.shape, generator=generator) / 8 for n, p in parameters.items()}
    for node, name in zip(inputs(template.graph)[-len(template.inputs) :], template.inputs, strict=True):
        value = value_of(node)
        sizes = [tokens if isinstance(s, torch.SymInt) else s for s in value.shape]
        values[name] = torch.randn(sizes, generator=generator) if value.is_floating_point() else torch.tensor(tokens)
        if value.dtype == torch.int32:
            values[name] = torch.tensor([0, 1, tokens], dtype=torch.int32)
    return values


@pytest.mark.parametrize("partitioner", ["min_cut", "default"])
@pytest.mark.parametrize("tokens", [2, 3, 200])
def test_gradients_equal_autograd_for_any_number_of_tokens(tokens: int, partitioner: str) -> None:
    template, parameters = llama_layer()
    variant = compiled(StagePart(), partitioner)
    values = fed(template, dict(parameters), tokens)
    leaves = {n: values[n].clone().requires_grad_() for n in variant.gradients}
    whole = shard(template, parameters, StagePart()).graph
    order = (*template.parameters, *template.buffers, *template.inputs)
    (expected,) = whole(*((values | leaves)[n] for n in order))
    tangent = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    gradients = torch.autograd.grad(expected, list(leaves.values()), tangent)
    with torch.no_grad():
        out, *saved = variant.forward(*(values[n] for n in variant.inputs))
        held = {f"saved.{i}": s for i, s in enumerate(saved)} | {"tangent": tangent} | values
        found = variant.backward(*(held[n] for n in variant.needs))
    torch.testing.assert_close(out, expected)
    for name, one, other in zip(variant.gradients, found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()), msg=name)


def saved(variant: Variant) -> list[fx.Node]:
    outputs = next(n for n in variant.forward.graph.nodes if n.op == "output").args[0]
    return list(outputs[variant.outputs :])


def test_attention_is_saved_and_not_run_again() -> None:
    attention = torch.ops.hydragraph.varlen_attention.default
    variant = compiled(StagePart())
    assert sum(n.target is attention for n in variant.forward.graph.nodes) == 1
    assert not any(n.target is attention for n in variant.backward.graph.nodes)
    assert {node.args[0].target for node in saved(variant) if node.name.startswith("getitem")} == {attention}


def test_weights_are_handed_over_again_and_not_saved() -> None:
    template, _ = llama_layer()
    names = [n.name for n in saved(compiled(StagePart())) if n.op == "placeholder"]
    assert names == [f"primals_{len(template.parameters) + 1 + i}" for i in range(len(template.inputs))]


def test_the_default_partitioner_saves_everything() -> None:
    backward = compiled(StagePart(), "default").backward
    assert not any(n.target is torch.ops.hydragraph.varlen_attention.default for n in backward.graph.nodes)
