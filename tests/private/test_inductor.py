"""One graph through Inductor: sizes that stay symbolic, what it assumes of them, and its cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hydragraph.passes.compile_with_inductor import CODES, GraphPiece
from hydragraph.private.inductor import compile_graph, missing_compiler, sources, symbols_of
from hydragraph.private.tracing import TensorSpec, _fake_inputs
from tests.thorough import thorough

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(
    missing_compiler(torch.device("cpu")) is not None, reason="Inductor finds no C++ compiler here"
)


def fakes(*shapes: tuple[int | str, ...]) -> list[Tensor]:
    """Make fake inputs in which T is a run-time size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return _fake_inputs(mode, [TensorSpec(s, torch.float32) for s in shapes], {"T": 64})


def summing() -> tuple[fx.GraphModule, list[Tensor], list[Tensor]]:
    """Return exp(2 x) and its sum over [T]: Inductor adds up more than 4096 numbers in another way than fewer."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.exp.default, (graph.call_function(aten.mul.Tensor, (x, 2.0)),))
    graph.output((y, graph.call_function(aten.sum.default, (y,))))
    module, inputs = fx.GraphModule({}, graph), fakes(("T",))
    with inputs[0].fake_mode:
        return module, inputs, list(module(*inputs))


def looked_up() -> int:
    return sum(n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache"))


@thorough
@needs_compiler
def test_code_is_reused_while_what_inductor_assumed_holds_and_made_anew_where_not() -> None:
    piece = GraphPiece(*summing())
    before = looked_up()
    for tokens, codes in ((2, 1), (100, 1), (2048, 1), (5000, 2), (9, 2), (100000, 2)):
        x = torch.linspace(-1, 1, tokens)
        y, total = piece(tokens, x)
        torch.testing.assert_close(y, (2 * x).exp())
        torch.testing.assert_close(total, (2 * x).exp().sum(), rtol=1e-5, atol=0)
        assert len(piece.codes) == codes <= CODES
    assert looked_up() == before + 1


@needs_compiler
def test_sizes_that_no_symbol_may_have_run_the_graph_itself() -> None:
    piece = GraphPiece(*summing())
    for tokens in (0, 1):
        y, total = piece(tokens, torch.ones(tokens))
        assert (len(y), float(total)) == (tokens, pytest.approx(tokens * 7.389056))
    assert len(piece.codes) == 1


@thorough
@needs_compiler
def test_a_second_process_finds_the_code_on_disk(tmp_path: Path) -> None:
    script = (
        "from tests.private.test_inductor import GraphPiece, counters, summing\n"
        "GraphPiece(*summing())\n"
        "print(counters['inductor']['fxgraph_cache_hit'], counters['inductor']['fxgraph_cache_miss'])"
    )
    # Both are new processes, as tests before this one may have set what the cache's key covers.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
        for _ in range(2)
    )
    assert (first, second) == (["0", "1"], ["1", "0"])


@needs_compiler
def test_a_graph_whose_results_would_get_other_strides_is_left_alone() -> None:
    module, inputs, outputs = summing()
    hints = {symbols_of(inputs)[0]: 64}
    assert compile_graph(module, inputs, outputs, hints) is not None
    with inputs[0].fake_mode:
        spread = torch.empty_strided(inputs[0].shape, (2,))
    assert compile_graph(module, inputs, [spread, outputs[1]], hints) is None


def test_sizes_are_read_where_they_stand_alone_or_else_as_a_part() -> None:
    (whole,) = fakes((3, "T"))
    size = whole.shape[1]
    with whole.fake_mode:
        double = torch.empty(1, 2 * size)
    symbol = symbols_of([whole])[0]
    assert sources([double, whole]) == {symbol: (1, 1, 1)}
    assert sources([double, 7]) == {symbol: (0, 1, 2)}
    assert sources([double, size]) == {symbol: (1, None, 1)}
    assert sources([torch.ones(2), None]) == {}


def test_a_missing_compiler_is_named() -> None:
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert "no C++ compiler" in str(missing_compiler(torch.device("cpu")))


@thorough
def test_the_compiler_is_what_the_environment_names() -> None:
    script = "import torch, hydragraph.private.inductor as p; print(p.missing_compiler(torch.device('cpu')))"
    environment = {**os.environ, "CXX": "no-such-compiler"}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert "no C++ compiler" in found.stdout
