"""Copies without weights, and finding repeated blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.repeated_blocks import block_list, entries, meta_copy, separate_repeated
from tests.models import gpt2, llama


class Layer(nn.Module):
    def __init__(self, size: int = 4, options: object = None) -> None:
        super().__init__()
        self.linear, self.options = nn.Linear(size, size), options


class Stack(nn.Module):
    """Two lists of blocks, a small one followed by a large one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 2)])
        self.layers = nn.ModuleList(layers)


def test_meta_copy_has_no_weights_and_keeps_ties_dtypes_and_the_original() -> None:
    model = llama(layers=2, tied=True)
    copied = meta_copy(model, torch.bfloat16)
    assert {p.device.type for p in (*copied.parameters(), *copied.buffers())} == {"meta"}
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copied.buffers()} == {b.dtype for b in model.buffers()} == {torch.float32}
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert {n: p.shape for n, p in copied.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_the_list_with_most_parameters_is_found() -> None:
    assert block_list(Stack(Layer(), Layer()))[0] == "layers"
    assert block_list(Stack(Layer(), Layer()), "heads")[0] == "heads"
    assert block_list(gpt2(layers=1))[0] == "transformer.h"


def test_lists_inside_blocks_are_not_taken() -> None:
    inner = Stack(Layer(64), Layer(64))
    path, found = block_list(nn.Sequential(Stack(inner)))
    assert path == "0.layers"
    assert list(found) == [inner]


def test_models_without_blocks_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"Linear: no repeated blocks were found; pass blocks='path.to.list'"):
        block_list(nn.Linear(2, 2))
    with pytest.raises(Unsupported, match=r"`nowhere` is not an nn.ModuleList with parameters"):
        block_list(Stack(Layer()), "nowhere")
    with pytest.raises(Unsupported, match="no repeated blocks were found"):
        block_list(nn.ModuleDict({"first": Layer(), "second": Layer()}))  # named, so their order is not told


def test_blocks_may_be_in_a_numbered_dict() -> None:
    stack = Stack()
    stack.layers = nn.ModuleDict({"0": Layer(), "1": Layer()})  # pyrefly: ignore[bad-assignment]
    path, found = block_list(stack)
    assert path == "layers"
    assert entries(found) == list(stack.layers.values())


def test_each_occurrence_of_a_block_gets_a_module_with_the_same_parameters() -> None:
    layer, other = Layer(), Layer()
    layer.register_buffer("scale", torch.ones(2))
    stack = Stack(layer, other, layer)
    names = [name for name, _ in stack.named_parameters(remove_duplicate=False)]
    separate_repeated(stack.layers)
    first, second, third = entries(stack.layers)
    assert (first, second) == (layer, other)
    assert third is not layer
    assert third.linear.weight is layer.linear.weight
    assert third.scale is layer.scale
    assert [name for name, _ in stack.named_parameters(remove_duplicate=False)] == names
