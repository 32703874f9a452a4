"""Models with linear attention and short convolutions: packed sequences train as each alone, on one rank and on two."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cost.datasheet import operations
from hydragraph.frontend.recurrent_layers import packed_recurrences
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.passes.graph_node import ALONG_SEQUENCES
from tests import reference
from tests.frontend.execute import batch, loss
from tests.models import randomised, sequences
from tests.ready import Ready
from tests.thorough import thorough

LENGTHS = [20, 2, 71, 1, 5]
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "use_cache": False,
}


def model() -> nn.Module:
    """Return a Qwen3.5 of one layer with linear attention and one with attention."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config = transformers.Qwen3_5TextConfig(**copy.deepcopy(SIZES))
    torch.manual_seed(0)
    made: nn.Module = transformers.Qwen3_5ForCausalLM(config)
    return randomised(made)


@cache
def program() -> hg.Program:
    return hg.capture(model())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def compare(gradients: dict[str, Tensor], losses: list[float]) -> None:
    wanted = reference.train(model(), [sequences(LENGTHS)], sgd)
    name, ratio = reference.worst(gradients, wanted.gradients[0])
    assert ratio <= 1, name
    assert losses == pytest.approx(wanted.losses, rel=1e-5)


def test_packed_sequences_have_the_gradients_of_each_alone() -> None:
    made, given = model(), batch(LENGTHS)
    wanted = reference.train(made, [list(given["input_ids"][0].split(LENGTHS))], sgd)
    found = loss(program(), made, given) / sum(n - 1 for n in LENGTHS)
    named = dict(made.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(found, list(named.values()), materialize_grads=True), strict=True))
    name, ratio = reference.worst(gradients, wanted.gradients[0])
    assert ratio <= 1, name
    assert float(found) == pytest.approx(wanted.losses[0], rel=1e-5)


@thorough
def test_packed_sequences_train_as_each_alone() -> None:
    exe = hg.compile(model(), "<tp1,pp1>", sgd, program=program())
    gradients = exe.gradients(sequences(LENGTHS))
    compare(gradients, [exe.step(sequences(LENGTHS)).loss])
    exe.close()


def test_linear_attention_costs_as_much_per_token_at_any_length() -> None:
    captured = program()
    linear, full = (operations(captured, block, 1) for block in captured.blocks[1:3])
    assert not linear.attention
    assert full.attention
    assert (3.0 * 4, 8, 8) in linear.products
    check_strategy(captured, hg.Strategy.parse("<tp2,pp1>", captured.layers), 2)
    # Two ranks have half of the value heads each.
    assert (3.0 * 2, 8, 8) in operations(captured, captured.blocks[1], 2).products


def test_functions_of_transformers_are_theirs_again_afterwards() -> None:
    made = model()
    names = vars(__import__("sys").modules[type(made).__module__])
    before = names["torch_chunk_gated_delta_rule"], names["causal_conv1d_fn"]
    with packed_recurrences(made):
        assert names["causal_conv1d_fn"] is not before[1]
    assert (names["torch_chunk_gated_delta_rule"], names["causal_conv1d_fn"]) == before


def trained(prepared: Ready, text: str) -> tuple[dict[str, Tensor], list[float]]:
    exe = prepared.executable(text, sgd)
    gradients = exe.gradients(sequences(LENGTHS))
    losses = [exe.step(sequences(LENGTHS)).loss]
    exe.close()
    return gradients, losses


@thorough
@pytest.mark.parametrize("text", ["<[1]x1r,[0]x1>", "2*<tp1,pp1>w"])
def test_ranks_train_as_one_device(text: str) -> None:
    found = hg.launch(trained, 2, text, prepare=partial(ready, text))
    compare(*found[0])


def ready(text: str) -> Ready:
    return Ready.of(model(), [text])


@thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numeric_check_passes(dtype: torch.dtype) -> None:
    checked = hg.capture(model(), dtype=dtype, check="auto")
    called = {n.target for t in checked.templates.values() for n in t.graph.graph.nodes}
    assert len(called & ALONG_SEQUENCES) == 3
