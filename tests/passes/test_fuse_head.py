"""The fused head computes what the head and the loss compute, and is left out where it would not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hydragraph as hg
from hydragraph.frontend.packed_inputs import Loss, token_cross_entropy
from hydragraph.ir.program import Block, Program
from hydragraph.kernels import linear_cross_entropy
from hydragraph.kernels.linear_cross_entropy import head_loss
from hydragraph.passes.fuse_head import find_head, fuse_head
from hydragraph.passes.shard import ShardedTemplate, shard
from hydragraph.passes.variants import Variants, local_parameters
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import bert, gpt2, llama, randomised
from tests.own_models import Headed
from tests.passes.golden_template import check_golden
from tests.passes.test_shard import check
from tests.thorough import first, only, thorough


def own(tied: bool = False) -> nn.Module:
    return randomised(Headed(tied))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": functools.partial(llama, 1),
    "tied": functools.partial(own, tied=True),
    "gpt2": functools.partial(gpt2, 1),
    "bert": bert,  # its head has a bias
    "weighed": own,
    "smoothed": own,
}


def weighed(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss whose tokens have different factors, known only in the backward."""
    logp = hg.token_logprobs(outputs, batch)
    return (torch.minimum(logp.exp(), 0.9 + 0.1 * logp) * (batch["labels"][0] != -100)).sum()


LOSSES: dict[str, Loss] = {
    "weighed": weighed,
    "smoothed": functools.partial(token_cross_entropy, label_smoothing=0.1),
}


@functools.cache
def captured(name: str, dtype: torch.dtype) -> tuple[Program, nn.Module]:
    model = MODELS[name]()
    return hg.capture(model, dtype=dtype, loss=LOSSES.get(name)), model


def head(program: Program) -> tuple[Block, ShardedTemplate]:
    block = program.blocks[-1]
    template = program.templates[block.template]
    return block, shard(template, local_parameters(program, block, template), StagePart())


def run(program: Program, model: nn.Module, fused: bool, recompute: bool, tokens: int) -> list[Tensor]:
    """Return the loss and all gradients of the last block, for the same input."""
    block, _ = head(program)
    template = program.templates[block.template]
    variant = Variants(program, fused_head=fused).get(block, StagePart(StageKind(recompute=recompute)))
    assert any("head_" in str(n.target) for n in variant.forward.graph.nodes if n.op != "placeholder") == fused
    generator = torch.Generator().manual_seed(tokens)
    width = program.parameters[block.parameters[-1]].shape[-1]
    hidden = torch.randn(1, tokens, width, generator=generator).to(program.dtype)
    labels = torch.randint(0, 101, (1, tokens), generator=generator)
    labels[0, ::3] = -100
    named = dict(model.named_parameters())
    names = zip(template.parameters, block.parameters, strict=True)
    given = {local: named[name].detach().to(program.dtype) for local, name in names}
    given |= {"hidden": hidden, "labels": labels, "input_ids": labels.clamp(min=0)}
    with torch.no_grad():
        loss, *saved = variant.forward(*(given[n] for n in variant.inputs))
        needed = {**given, "tangent": torch.tensor(1 / 7, dtype=loss.dtype)}
        needed |= {f"saved.{i}": value for i, value in enumerate(saved)}
        return [loss, *variant.backward(*(needed[n] for n in variant.needs))]


CASES = list(product(["llama", "tied", "gpt2", "weighed", "smoothed"], [torch.float32, torch.bfloat16], [False, True]))


# Every fifth case: among them is each name, type and choice.
@only("weighed-dtype15-True")
@pytest.mark.parametrize(("name", "dtype", "recompute"), first(CASES[::5], CASES))
def test_loss_and_gradients_are_those_of_head_and_loss(name: str, dtype: torch.dtype, recompute: bool) -> None:
    program, model = captured(name, dtype)
    for tokens in (2, 300):  # 300 tokens take several chunks
        found = run(program, model, True, recompute, tokens)
        wanted = run(program, model, False, recompute, tokens)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype
            error = torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double())
            assert error <= (1e-5 if dtype == torch.float32 else 2e-2)


def test_the_logits_are_gone() -> None:
    program, _ = captured("llama", torch.float32)
    _, sharded = head(program)
    fused = fuse_head(sharded.graph)
    check_golden("llama_fuse_head", fused)
    assert not any(n.target is torch.ops.aten.linear.default for n in fused.graph.nodes)
    vocabulary = program.parameters["lm_head.weight"].shape[0]
    shapes = [s.shape for n in fused.graph.nodes if isinstance(s := n.meta.get("val"), Tensor)]
    assert shapes
    assert all(vocabulary not in shape for shape in shapes[len(program.blocks[-1].parameters) :])


@only("tied-2-False", "tied-3-True")
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (3, True), (4, True)])
@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "weighed", "smoothed"])
def test_ranks_with_parts_of_the_vocabulary_compute_the_same(
    name: str, tp: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 12 tokens, several chunks. 101 rows are cut unevenly, and yet all ranks must have the same chunks.
    monkeypatch.setattr(linear_cross_entropy, "chunk_tokens", lambda tokens, hidden, rows: rows % 7 + 2)
    program, model = captured(name, torch.float32)
    check(program, model, program.blocks[-1], tp, sequence_parallel, fused_head=True)


@pytest.mark.parametrize("name", first(["llama", "weighed"], ["llama", "weighed", "smoothed"]))
def test_a_rank_with_a_part_of_the_vocabulary_has_no_logits_either(name: str) -> None:
    program, _ = captured(name, torch.float32)
    block = program.blocks[-1]
    template = program.templates[block.template]
    fused = shard(template, local_parameters(program, block, template), StagePart(StageKind(2)), fused_head=True)
    if name == "llama":
        check_golden("llama_fuse_head_tp2_rank0", fused.graph)
    variant = Variants(program, fused_head=True).get(block, StagePart(StageKind(2)))
    for graph in (variant.forward.graph, variant.backward.graph):
        shapes = [s.shape for n in graph.nodes if n.op != "placeholder" and isinstance(s := n.meta.get("val"), Tensor)]
        assert not any(shape[-1:] == (51,) for shape in shapes)  # this rank's columns


@thorough
def test_a_bias_is_left_alone() -> None:
    program, _ = captured("bert", torch.float32)
    block, sharded = head(program)
    assert fuse_head(sharded.graph) is sharded.graph
    template = program.templates[block.template]
    parts = shard(template, local_parameters(program, block, template), StagePart(StageKind(2)), fused_head=True)
    assert not any(n.target is torch.ops.hydragraph.tp_head_loss.default for n in parts.graph.graph.nodes)


def test_probabilities_are_left_alone() -> None:
    def taught(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = outputs[0].float()
        return F.cross_entropy(logits, F.one_hot(batch["input_ids"][0], 101).float(), reduction="sum")

    _, sharded = head(hg.capture(own(), loss=taught))
    assert fuse_head(sharded.graph) is sharded.graph


def test_classes_that_a_view_changes_are_left_alone() -> None:
    def graph_of(classes: int) -> fx.Graph:
        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            logits = F.linear(hidden, weight).view(-1, classes)
            return F.cross_entropy(logits, labels, reduction="sum")

        labels = torch.zeros(5 * 40 // classes, dtype=torch.int64)
        return make_fx(loss, tracing_mode="fake", pre_dispatch=True)(
            torch.zeros(1, 5, 8), torch.zeros(40, 8), labels
        ).graph

    found = {classes: any(find_head(n) for n in graph_of(classes).nodes) for classes in (20, 40)}
    assert found == {20: False, 40: True}


def test_variants_fuse_where_they_are_told_to() -> None:
    program, _ = captured("llama", torch.float32)
    block, _ = head(program)
    for fused in (False, True):
        graph = Variants(program, fused_head=fused).get(block, StagePart()).forward.graph
        assert any(n.target is head_loss._opoverload for n in graph.nodes) == fused
