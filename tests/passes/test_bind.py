"""Graphs on a GPU that is not there: no node of any family's graphs names another device, interpreted or compiled."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.ir.program import Program
from hydragraph.passes.bind import bind
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.fake_gpu import GPU, compile_for_gpu, interpret, misplaced
from tests.models import MODELS
from tests.thorough import thorough

FORMS = (StageKind(), StageKind(recompute=True), StageKind(2), StageKind(2, True))
DTYPES = (torch.bfloat16, torch.float32)


@functools.cache
def program(name: str, dtype: torch.dtype) -> Program:
    return hg.capture(MODELS[name](), dtype=dtype, check="off")


def gate(captured: Program, form: StageKind, backend: str) -> int:
    """Put one block of every template through a form and a backend; return how many graphs were looked at."""
    inductor = backend == "inductor"
    variants = Variants(captured, fused_head=inductor, added=not inductor)
    looked = 0
    for block in {block.template: block for block in captured.blocks}.values():
        spec: VariantSpec = variants.spec(block, StagePart(form, 0))
        traced = variants.get(block, StagePart(form, 0))
        bound = bind(traced, GPU)
        interpret(bound, spec)
        if inductor:
            bound, _ = compile_for_gpu(traced, spec)
        for graph in (bound.forward, bound.backward):
            assert misplaced(graph) == [], f"{captured.model} {block.name} {form} {backend}"
            looked += 1
    return looked


# A few of what has pinned graphs so far; the other families and forms run in `make thorough`.
KEPT = {
    ("llama", torch.bfloat16, FORMS[3], "eager"),
    ("llama", torch.bfloat16, FORMS[0], "inductor"),
    ("gpt2", torch.bfloat16, FORMS[1], "eager"),
}
CASES = [
    pytest.param(*case, marks=() if case in KEPT else thorough)
    for case in product(MODELS, DTYPES, FORMS, ("eager", "inductor"))
]


@thorough
@pytest.mark.parametrize(("name", "dtype", "form", "backend"), CASES)
def test_graphs_run_on_a_gpu(name: str, dtype: torch.dtype, form: StageKind, backend: str) -> None:
    captured = program(name, dtype)
    try:
        assert gate(captured, form, backend) > 0
    except hg.Unsupported as refused:  # what cannot be cut in this form, on any device
        if "Inductor cannot compile" in str(refused):
            raise


class Layer(nn.Module):
    """Makes tensors in its forward, on the device of its input or on that which PyTorch chooses."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        device = hidden.device if self.named else None
        place = torch.arange(16, device=device)
        kinds = nn.functional.one_hot(place, 16)[3]
        scale = torch.ones(16, dtype=hidden.dtype, device=device).masked_fill(place > 7, 0.5)
        out: Tensor = hidden + self.linear(hidden) * scale + kinds + hidden.new_zeros(16)
        return out


class Custom(nn.Module):
    """A user's own model of such layers."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Layer(named) for _ in range(2)])
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@functools.cache
def custom() -> Program:
    return hg.capture(Custom(named=True), dtype=torch.bfloat16, check="off")


def test_tensors_that_a_forward_makes_are_on_the_gpu() -> None:
    captured = custom()
    assert any(misplaced(template.graph) for template in captured.templates.values())  # where they were traced
    assert gate(captured, StageKind(), "eager") > 0


def test_tensors_that_a_forward_makes_on_no_named_device_are_refused() -> None:
    with pytest.raises(hg.Unsupported, match="create the tensor in forward with device="):
        hg.capture(Custom(named=False), check="off")


def test_a_gpu_counts_tokens_of_experts_in_deterministic_mode() -> None:
    captured = program("mixtral", torch.float32)
    variants = Variants(captured)
    traced = variants.get(captured.blocks[1], StagePart())
    spec = variants.spec(captured.blocks[1], StagePart())
    torch.use_deterministic_algorithms(True)
    try:
        interpret(bind(traced, GPU), spec)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_cpu_runs_graphs_as_they_were_traced() -> None:
    captured = custom()
    variants = Variants(captured)
    traced = variants.get(captured.blocks[1], StagePart())
    assert bind(traced, torch.device("cpu")) is traced
    assert misplaced(traced.backward)  # what this file is for: casts that name the CPU
    there = variants.on(GPU)
    bound = there.get(captured.blocks[1], StagePart())
    assert misplaced(bound.backward) == []
    assert there.get(captured.blocks[1], StagePart()) is bound
    assert variants.get(captured.blocks[1], StagePart()) is traced
