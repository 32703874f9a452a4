"""Repeated blocks: finding them, telling equal ones from others, and layer indices that notice their use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hydragraph.errors import Unsupported
from hydragraph.frontend.blocks import Position, block_list, meta_copy, positions, structure
from tests.models import gpt2, llama


def keys(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[str]:
    copied, identities = meta_copy(model, dtype), {}
    return [structure(block, identities) for block in block_list(copied)[1]]


class Layer(nn.Module):
    def __init__(self, size: int = 4, options: object = None) -> None:
        super().__init__()
        self.linear, self.options = nn.Linear(size, size), options


class Stack(nn.Module):
    """Two lists of blocks, the larger one behind the smaller one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 2)])
        self.layers = nn.ModuleList(layers)


@pytest.mark.parametrize("model", [llama, gpt2])
def test_equal_layers_share_a_key(model: type) -> None:
    assert len(set(keys(model(layers=3)))) == 1


def test_layers_scaled_by_their_depth_differ() -> None:
    config = GPT2Config(n_embd=64, n_head=4, vocab_size=101, n_layer=3, scale_attn_by_inverse_layer_idx=True)
    assert len(set(keys(GPT2LMHeadModel(config)))) == 3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Layer(4, "a"), Layer(4, "a"), True),
        (Layer(4, "a"), Layer(4, "b"), False),
        (Layer(4, [1, 2.0]), Layer(4, [1, 2.0]), True),
        (Layer(4, [1, 2.0]), Layer(4, (1, 2.0)), False),
        (Layer(4, torch.relu), Layer(4, torch.relu), True),
        (Layer(4, object()), Layer(4, object()), False),
        (Layer(4, torch.ones(1)), Layer(4, torch.ones(1)), False),
        (Layer(4), Layer(5), False),
        (Layer(4), Layer(4).double(), False),
        (Layer(4), Layer(4).requires_grad_(False), False),
        (Layer(4), nn.Sequential(Layer(4)), False),
    ],
)
def test_what_is_built_differently_has_another_key(one: nn.Module, other: nn.Module, same: bool) -> None:
    identities: dict[int, int] = {}
    assert (structure(one, identities) == structure(other, identities)) == same


def test_a_key_does_not_depend_on_the_layer_index() -> None:
    one, other = Layer(), Layer()
    one.layer_idx, other.layer_idx = 0, 1
    assert structure(one, {}) == structure(other, {})


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: 1 + p,
        lambda p: p - 1,
        lambda p: p * 2,
        lambda p: 2 * p,
        lambda p: p % 2,
        lambda p: p // 2,
        lambda p: p < 2,
        lambda p: p <= 2,
        lambda p: p > 2,
        lambda p: p >= 2,
        lambda p: p == 3,
        lambda p: {3: 1}.get(p),
        float,
        lambda p: p != 4,
        lambda p: 7 - p,
        lambda p: p / 2,
        lambda p: p**2,
        lambda p: -p,
        bool,
        pytest.param(
            lambda p: [0, 1, 2, 3][p],
            marks=pytest.mark.xfail(strict=True, reason="CPython indexes lists by an int subclass without asking it"),
        ),
    ],
)
def test_a_position_computes_as_its_number_and_notices(use: object) -> None:
    position = Position(3)
    assert not position.touched
    assert use(position) == use(3)  # type: ignore[operator]
    assert position.touched


def test_passing_a_position_on_is_no_use() -> None:
    position = Position(3)
    assert isinstance(position, int)
    assert copy.copy([position])[0] is position
    assert not position.touched


def test_meta_copy_has_no_weights_and_keeps_ties_dtypes_and_the_original() -> None:
    model = llama(layers=2, tied=True)
    copied = meta_copy(model, torch.bfloat16)
    assert {p.device.type for p in (*copied.parameters(), *copied.buffers())} == {"meta"}
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copied.buffers()} == {b.dtype for b in model.buffers()} == {torch.float32}
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert {n: p.shape for n, p in copied.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert [int(positions(block)[0]) for block in copied.model.layers] == [0, 1]
    assert positions(model.model.layers[0]) == []
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


def test_models_without_blocks_or_with_shared_ones_are_refused() -> None:
    layer = Layer()
    with pytest.raises(Unsupported, match=r"Linear: no repeated blocks were found; name the nn.ModuleList"):
        block_list(nn.Linear(2, 2))
    with pytest.raises(Unsupported, match=r"`nowhere` is no nn.ModuleList with parameters"):
        block_list(Stack(layer), "nowhere")
    with pytest.raises(Unsupported, match="layers: the same block occurs twice"):
        block_list(Stack(layer, layer))
