"""prove_sizes: a number of tokens that is baked into a graph is found, however it got there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.passes.prove_sizes import EXAMPLES, _recalls, prove_sizes
from hydragraph.private import tracing
from hydragraph.private.tracing import TensorSpec, trace_joint
from tests.models import llama
from tests.thorough import only, thorough

T = EXAMPLES[0]["T"]


def hint(x: Tensor) -> int:
    """Read a size without the trace noticing."""
    size = x.shape[0]
    return tracing.hint_of(size)


BAKED: dict[str, Callable[[Tensor], Tensor]] = {
    "a size turned into a number": lambda x: x.view(int(x.shape[0]), 2, 2).flatten(1),
    "the length in Python": lambda x: x * torch.ones(len(x), 1),
    "a decision on a size": lambda x: x * 2 if x.shape[0] > 100 else x,
    "a size read without the trace noticing": lambda x: x + torch.zeros(hint(x), 1),
    "a mean over the example's tokens": lambda x: x / hint(x),
    "one token less": lambda x: x * (hint(x) - 1),
    "the inverse of a size": lambda x: x * (1.0 / hint(x)),
    "the root of a size": lambda x: x * hint(x) ** -0.5,
    "twice the size": lambda x: x + 2 * hint(x),
}
FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "its own size": lambda x: x.view(x.shape[0], 2, 2).flatten(1),
    "a mean over the tokens": lambda x: x / x.shape[0],
    "numbers of the model": lambda x: (x * 0.125 + 1e-6 + 4096.0).clamp(min=-3.4e38),
    "a part of the tokens": lambda x: x[1:].sum() + x,
}


def traced(function: Callable[[Tensor], Tensor]) -> torch.fx.GraphModule:
    """Trace a function of x [T, 4] that keeps its shape, and its gradient."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"),)),))
    spec = TensorSpec(("T", 4), torch.float32, True)
    return trace_joint(torch.fx.GraphModule({}, graph), [spec], [spec], {"T": T})[0]


@pytest.mark.parametrize("what", BAKED)
def test_what_is_baked_is_refused(what: str) -> None:
    with pytest.raises(Unsupported, match=r"here: .*; compute sizes from tensors' shapes[^\n]*\Z"):
        prove_sizes(traced(BAKED[what]), "here")


@pytest.mark.parametrize("what", FREE)
def test_what_is_free_is_not(what: str) -> None:
    prove_sizes(traced(FREE[what]), "here")


@torch.library.custom_op("hydragraph_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Double; its backward takes the example's number of tokens for any."""
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: (gradient * 2).view(1, int(gradient.shape[1]), -1))


class Own(nn.Module):
    """A model whose forward holds for any size, and whose backward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(doubled(hidden))


def test_a_backward_that_bakes_a_size_is_refused_by_name() -> None:
    with mock.patch("hydragraph.frontend.capture.refuse_unproven"):  # which knows of no such operator
        program = hg.capture(Own())
    with pytest.raises(Unsupported, match=r"head, with its gradient: the trace assumed .* = 227"):
        hg.precompile(program, [hg.Strategy.parse("<tp1,pp1>", layers=1)])


@thorough
def test_operators_taken_apart_by_cpp_are_refused_where_it_reads_sizes_as_numbers() -> None:
    """As PyTorch 2.11 and 2.12 do in `matmul`, unless Python takes it apart; later versions may read symbols."""
    program = hg.capture(llama(layers=1))
    strategies = [hg.Strategy.parse("<tp1,pp1>", layers=1)]
    with mock.patch.object(tracing, "enable_python_dispatcher", contextlib.nullcontext):
        if torch.__version__.startswith(("2.11", "2.12")):
            with pytest.raises(Unsupported, match="assuming"):
                hg.precompile(program, strategies)
        else:
            hg.precompile(program, strategies)


@pytest.mark.parametrize("sizes", EXAMPLES)
def test_the_sizes_of_examples_are_primes_that_have_no_small_neighbours(sizes: dict[str, int]) -> None:
    for size in sizes.values():
        assert all(size % d for d in range(2, size))
        assert all(size // 2 % d for d in range(2, size // 2))


class Numbered(Own):
    """A model with numbers of its own: in its code, and as dimensions."""

    def __init__(self, number: float, width: int) -> None:
        super().__init__()
        self.number = number
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))])

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden * self.number)


@only("106.0")
@pytest.mark.parametrize("number", [3.0 * T, 1 / T, float(EXAMPLES[0]["N+1"] - 1)])
def test_a_number_of_the_models_own_is_no_size(number: float) -> None:
    program = hg.capture(Numbered(number, 2 * T))
    hg.precompile(program, [hg.Strategy.parse("<tp1,pp1>", layers=1)])


@given(st.integers(1, 4000), st.sampled_from([T, T - 1]))
def test_multiples_of_a_size_and_their_inverses_recall_it(times: int, size: int) -> None:
    assert _recalls(times * size, T)
    assert _recalls(1 / (times * size), T)
    assert _recalls((times * size) ** -0.5, T)


@given(st.integers(1, 1 << 20))
def test_other_numbers_do_not(number: int) -> None:
    if number % T and number % (T - 1) and number**2 % T and number**2 % (T - 1):
        assert not _recalls(number, T)
        assert not _recalls(1 / number, T)


@thorough
@pytest.mark.parametrize("tp", [2, 3, 5])
def test_an_example_that_is_longer_for_sequence_parallelism_is_recalled_by_no_other_number(tp: int) -> None:
    """Of 3 * 107 bounds one less is 320, which divides the inverse of the norms' 1e-6."""
    program = hg.capture(llama(layers=1, heads=2 * tp if tp < 5 else 5, kv=tp))
    hg.precompile(program, [hg.Strategy.parse(f"<{list(range(tp))}x1s>".replace(" ", ""), layers=1)])
