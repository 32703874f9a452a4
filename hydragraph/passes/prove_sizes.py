"""Pass `prove_sizes`: prove that no constant in a traced graph is the example's token or sequence count.

The graph must be valid for every batch. Each of three proofs covers cases that the others miss:

1. The trace must not contain any assumption about sizes.
2. The graph runs again on the meta device with other sizes. Each value must have the shape that symbolic sizes predict.
3. The example's sizes are primes that divide no dimension of the graph. If a number is a multiple of such a
   prime, or the inverse or root of a multiple, it comes from the example (`SizeFromExample`) or matches by chance. The
   model is then captured again with other primes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.private.operator_schemas import has_tag
from hydragraph.private.tracing import assumptions, hint_of, size_at, symbol_name

# Tokens and sequence bounds of examples: primes p for which (p - 1) / 2 is also prime. Small primes
# keep unrolled loops over tokens short.
EXAMPLES = ({"T": 227, "N+1": 107}, {"T": 263, "N+1": 167}, {"T": 347, "N+1": 83})
_PRIMES = frozenset(size for sizes in EXAMPLES for size in sizes.values())
# Proof 2 uses this multiple of the sizes, plus one, so that old and new sizes share no factor.
_ELSEWHERE = 3
# Larger numbers mean "no end" or -infinity.
_LARGEST = 1 << 31
T = TypeVar("T")
_REMEDY = "compute sizes from tensors' shapes during the forward, without int(), len() or .item()"


class SizeFromExample(Unsupported):
    """Raised for a number in a graph that matches a size of the traced example."""


def with_an_example(capture: Callable[[Mapping[str, int]], T]) -> T:
    """Capture a model, and again with other example sizes if a number in the graph matches one.

    Raises:
        SizeFromExample: a number matches a size in every example.
    """
    for sizes in EXAMPLES[:-1]:
        with contextlib.suppress(SizeFromExample):
            return capture(sizes)
    return capture(EXAMPLES[-1])


def prove_sizes(graph: fx.GraphModule, where: str, exported: bool = False) -> None:
    """Raise Unsupported if a traced graph is valid only for some sizes.

    Args:
        exported: whether `torch.export` traced dynamic sizes, which implies proof 1.
    """
    placeholders = placeholders_of(graph)
    # Proof 1.
    for what in [] if exported else assumptions(value_of(n) for n in placeholders):
        raise Unsupported(f"the trace assumed {what}, which not all batches satisfy", where=where, remedy=_REMEDY)
    # Proof 3. Numbers may also come from the model's dimensions.
    hints = {symbol: size for n in placeholders for symbol, size in _symbols(value_of(n))}
    dims = {s for n in graph.graph.nodes for s in getattr(value_of(n), "shape", ()) if isinstance(s, int)}
    # Under sequence parallelism, sizes are multiples of the primes.
    primes = {p for p in _PRIMES for s in hints.values() if s % p == 0}
    # Skip primes p if a dimension is a multiple of p (it explains numbers like p) or of (p - 1) / 2
    # (numbers like p - 1).
    unlike = [p for p in primes if not any(dim and dim % q == 0 for dim in dims for q in (p, p // 2))]
    for node in graph.graph.nodes:
        for number in _numbers([node.args, node.kwargs]) if node.op.startswith("call") else ():
            if any(_recalls(number, size) for size in unlike):
                what = f"{node.target} takes {number}, which may be derived from the example's token or sequence count"
                raise SizeFromExample(what, where=where, remedy=_REMEDY)
    # Proof 2.
    if hints:
        _Elsewhere(graph, {symbol: size * _ELSEWHERE + 1 for symbol, size in hints.items()}, where).check()


def _symbols(value: Any) -> Iterator[tuple[str, int]]:
    for size in value.shape if isinstance(value, Tensor) else [value]:
        name = symbol_name(size) if isinstance(size, torch.SymInt) else None
        if name is not None and name.isidentifier():
            yield name, hint_of(size)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _numbers(part)


def _recalls(number: float, size: int) -> bool:
    if not 0 < abs(number) < _LARGEST or not math.isfinite(number):
        return False
    # Means divide by n, variances by n - 1, attention by a root.
    candidates = (abs(number), 1 / abs(number), number * number, 1 / abs(number) / abs(number))
    return any(_multiple(c, n) for c in candidates if c < _LARGEST for n in (size, size - 1))


def _multiple(number: float, of: int) -> bool:
    times = number / of
    return times > 0.5 and math.isclose(times, round(times), rel_tol=1e-12)


def _on_meta(argument: Any) -> Any:
    return torch.device("meta") if isinstance(argument, torch.device) else argument


class _Elsewhere(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, sizes: Mapping[str, int], where: str) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._nodes = graph.graph.nodes
        self._sizes = sizes
        self._where = where
        self._unknown: set[fx.Node] = set()
        self._known: dict[str, int] = {}

    def check(self) -> None:
        inputs = [self._empty(value_of(n)) for n in self._nodes if n.op == "placeholder"]
        with torch.no_grad():
            self.run(*inputs, enable_io_processing=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, tuple(map(_on_meta, args)), {k: _on_meta(v) for k, v in kwargs.items()})

    def run_node(self, n: fx.Node) -> Any:
        needs_values = has_tag(n.target, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        if needs_values or not self._unknown.isdisjoint(n.all_input_nodes):
            # Sizes that depend on values are unknown on the meta device.
            self._unknown.add(n)
            return self._empty(value_of(n))
        try:
            result = super().run_node(n)
        except NotImplementedError:
            # The operator cannot run on the meta device
            return self._empty(value_of(n))
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise self._refusal(n, f"fails at {self._sizes_text()} ({first_line})") from error
        if n.op != "output":
            self._compare(n, result, value_of(n))
        return result

    def _compare(self, n: fx.Node, result: Any, value: Any) -> None:
        if isinstance(result, Tensor) and isinstance(value, Tensor):
            expected = list(map(self._size, value.shape))
            # PyTorch may record wrong numbers of dimensions (as for a loss without reduction).
            if result.dim() == value.dim() and list(result.shape) != expected:
                raise self._refusal(n, f"yields {list(result.shape)}, not {expected}, at {self._sizes_text()}")
        elif isinstance(result, (tuple, list)) and isinstance(value, (tuple, list)):
            for one, other in zip(result, value, strict=True):
                self._compare(n, one, other)

    def _refusal(self, n: fx.Node, what: str) -> Unsupported:
        remedy = "pass output_size=, such as the number of tokens" if "without output_size" in what else _REMEDY
        return Unsupported(
            f"the graph is valid only for the example: {n.target} {what}", where=self._where, remedy=remedy
        )

    def _sizes_text(self) -> str:
        return " and ".join(f"{name} = {size}" for name, size in self._sizes.items())

    def _empty(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(list(map(self._size, value.shape)), dtype=value.dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._empty, value))
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _size(self, size: int | torch.SymInt) -> int:
        if not isinstance(size, torch.SymInt):
            return size
        text = str(size)
        if text not in self._known:
            self._known[text] = size_at(size, self._sizes)
        return self._known[text]
