"""Memory of a block's compiled graphs for a micro-batch, with each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from hydragraph.cost.block_pieces import MemoryLines
from hydragraph.cost.footprint import Footprint, HalvesFootprint, MicroBatch
from hydragraph.ir.graph_data import storages_of, value_of
from hydragraph.ir.program import Program
from hydragraph.kernels.linear_cross_entropy import working_bytes
from hydragraph.passes.collective_operators import METHODS
from hydragraph.passes.differentiate import Variant, saved_names
from hydragraph.passes.offload import moves
from hydragraph.passes.split_backward import split_backward
from hydragraph.private.graph_values import TensorForm
from hydragraph.private.tracing import hint_of, symbol_name, symbols_in
from hydragraph.spec.stage_kind import StagePart

# (c, t, b): c * `TracedSizes.factor`^t * `TracedSizes.bounds`^b bytes
Terms = tuple[float, int, int]


def halves_footprint(variant: Variant, part: StagePart, micro_batch: MicroBatch) -> HalvesFootprint:
    sizes = TracedSizes.of(variant, part, micro_batch)
    first, second = split_backward(variant)
    saved = dict(zip(saved_names(len(variant.needs)), _results(variant.forward)[variant.outputs :], strict=False))
    origins = _origins(variant)
    input_by_storage = {
        key: name
        for name, node in zip(first.needs, _nodes(first.backward, "placeholder"), strict=True)
        for key in sizes.storages(node)
    }
    own: dict[object, int] = {}
    keeps = set()
    for node in _results(first.backward)[len(first.gradients) :]:
        for key, size in sizes.storages(node).items():
            name = input_by_storage.get(key)
            if name is None:
                own[key] = size
            elif name == "tangent":
                keeps.add(name)
            elif name in saved:
                for storage, whole in sizes.storages(saved[name]).items():
                    origin = origins.get(storage)
                    if origin is None:
                        own["saved", storage] = whole
                    else:
                        keeps.add(origin)
    return HalvesFootprint(
        most_alive(first.backward, sizes),
        most_alive(second.backward, sizes),
        sum(own.values()),
        frozenset(keeps - {""}),
    )


def _origins(variant: Variant) -> dict[int, str]:
    """Return, by storage of the inputs and the output, a name in `Footprint.keeps`, or "" for weights and buffers."""
    inputs = zip(variant.inputs, _nodes(variant.forward, "placeholder"), strict=True)
    kinds = {name: "hidden" if name == "hidden" else "aux" if name[:6] == "other." else "" for name in variant.inputs}
    origins = {key: kinds[name] for name, node in inputs for key, _ in storages_of(node)}
    return {key: "output" for key, _ in storages_of(_results(variant.forward)[0])} | origins


def footprint(variant: Variant, part: StagePart, micro_batch: MicroBatch) -> Footprint:
    sizes = TracedSizes.of(variant, part, micro_batch)
    results = _results_of(variant, sizes.tokens)
    saved = list(map(sizes.bytes_of, results.saved))
    return Footprint(
        sum(map(sizes.bytes_of, results.output)),
        sum(saved),
        results.keeps,
        most_alive(variant.forward, sizes),
        most_alive(variant.backward, sizes),
        sum(map(sizes.bytes_of, results.gradients)),
        sum(size for size in saved if not moves(size)),
    )


def held_by(variant: Variant, part: StagePart) -> MemoryLines:
    """Return linear functions through the footprints at 1,024 and 2,048 tokens per rank."""
    small = 1024 * part.tp
    large = 2048 * part.tp
    one, two = (footprint(variant, part, MicroBatch(tokens, 1)) for tokens in (small, large))

    def line(first: int, second: int) -> tuple[float, float]:
        slope = (second - first) / (large - small)
        return first - slope * small, slope

    sizes = attrgetter("output", "saved", "forward", "backward")
    output, saved, forward, backward = map(line, sizes(one), sizes(two))
    return MemoryLines(output, saved, forward, backward, tuple(sorted(one.keeps)), bool(variant.added))


def aux_lines(program: Program) -> MemoryLines:
    """Return the memory of values that all blocks share, such as rotary tables."""
    graph = program.templates[program.aux.template].graph
    return MemoryLines(output=(0.0, made_bytes(graph, MicroBatch(1024, 1)) / 1024))


def made_bytes(graph: fx.GraphModule, micro_batch: MicroBatch) -> int:
    sizes = TracedSizes.of_inputs(_nodes(graph, "placeholder"), micro_batch)
    inputs = {key for node in _nodes(graph, "placeholder") for key in sizes.storages(node)}
    results = {key: size for node in _results(graph) for key, size in sizes.storages(node).items()}
    return sum(size for key, size in results.items() if key not in inputs)


def token_bytes(graph: fx.GraphModule) -> int:
    hidden = value_of(_results(graph)[0])
    return int(hidden.shape[-1]) * int(hidden.dtype.itemsize)


@dataclass(frozen=True)
class TracedSizes:
    """Conversion of a trace's sizes to a micro-batch's sizes.

    Attributes:
        tokens: symbol of the token count.
        factor: tokens of the micro-batch, divided by tokens of the trace.
        bounds: length of cu_seqlens.
    """

    tokens: str
    factor: float
    bounds: int

    @staticmethod
    def of(variant: Variant, part: StagePart, micro_batch: MicroBatch) -> TracedSizes:
        return _count_of(variant, part.tp if part.sequence_parallel else 1).sizes(micro_batch)

    @staticmethod
    def of_inputs(nodes: Sequence[fx.Node], micro_batch: MicroBatch) -> TracedSizes:
        """Derive the sizes from inputs [1, tokens, ...]."""
        return _TokenCount.of(nodes).sizes(micro_batch)

    def storages(self, node: Any) -> dict[int, int]:
        return {key: self.bytes_of(_terms(form, self.tokens)) for key, form in storages_of(node)}

    def within(self, node: fx.Node) -> int:
        operands = head_operands(node)
        if operands is None:
            return 0
        hidden, weight = (value_of(n) for n in operands)
        tokens, size = (round(self.number(n)) for n in hidden.shape)
        return working_bytes(tokens, size, int(weight.shape[0]), hidden.dtype)

    def bytes_of(self, terms: Terms) -> int:
        constant, tokens, bounds = terms
        return round(constant * self.factor**tokens * self.bounds**bounds)

    def number(self, size: int | torch.SymInt) -> float:
        if not isinstance(size, torch.SymInt) or symbol_name(size) is None:
            return int(size)
        return hint_of(size) * self.factor if self.tokens in _symbols(size) else self.bounds


@dataclass(frozen=True)
class _TokenCount:
    """A trace's tokens on all ranks; `symbol` is "" if sizes do not depend on them."""

    symbol: str
    traced: int

    @staticmethod
    def of(nodes: Sequence[fx.Node], parts: int = 1) -> _TokenCount:
        """Read inputs [1, tokens / parts, ...]."""
        size = next((size for n in nodes for size in _shape(n)[1:2] if symbol_name(size) is not None), None)
        return _TokenCount("", 1) if size is None else _TokenCount(_symbols(size).pop(), hint_of(size) * parts)

    def sizes(self, micro_batch: MicroBatch) -> TracedSizes:
        factor = micro_batch.tokens / self.traced if self.symbol else 1.0
        return TracedSizes(self.symbol, factor, 1 + micro_batch.sequences)


_COUNTS: WeakKeyDictionary[Variant, dict[int, _TokenCount]] = WeakKeyDictionary()


def _count_of(variant: Variant, parts: int) -> _TokenCount:
    counts = _COUNTS.setdefault(variant, {})
    if parts not in counts:
        nodes = dict(zip(variant.inputs, _nodes(variant.forward, "placeholder"), strict=True))
        hidden = nodes.get("hidden")
        counts[parts] = _TokenCount.of(list(nodes.values())) if hidden is None else _TokenCount.of([hidden], parts)
    return counts[parts]


@dataclass(frozen=True)
class _Results:
    output: tuple[Terms, ...]
    saved: tuple[Terms, ...]
    gradients: tuple[Terms, ...]
    keeps: frozenset[str]

    @staticmethod
    def of(variant: Variant, tokens: str) -> _Results:
        def terms_of(nodes: Iterable[Any]) -> dict[int, Terms]:
            return {key: _terms(form, tokens) for node in nodes for key, form in storages_of(node)}

        outputs = _results(variant.forward)
        saved = terms_of(outputs[variant.outputs :])
        origins = _origins(variant)
        gradients = zip(variant.gradients, _results(variant.backward), strict=True)
        return _Results(
            tuple(terms_of(outputs[:1]).values()),
            tuple(terms for key, terms in saved.items() if key not in origins),
            tuple(terms for name, node in gradients if name != "hidden" for terms in terms_of([node]).values()),
            frozenset({origins[key] for key in saved.keys() & origins.keys()} - {""}),
        )


_RESULTS: WeakKeyDictionary[Variant, dict[str, _Results]] = WeakKeyDictionary()


def _results_of(variant: Variant, tokens: str) -> _Results:
    results = _RESULTS.setdefault(variant, {})
    if tokens not in results:
        results[tokens] = _Results.of(variant, tokens)
    return results[tokens]


def most_alive(graph: fx.GraphModule, sizes: TracedSizes) -> int:
    lives = _lives_of(graph, sizes.tokens)
    value_bytes = np.rint(lives.constant * sizes.factor**lives.tokens * float(sizes.bounds) ** lives.bounds)
    begun, ended = (np.bincount(at, value_bytes, lives.nodes + 1) for at in (lives.begin, lives.end + 1))
    alive = np.cumsum(begun - ended)
    if lives.heads:
        nodes = list(graph.graph.nodes)
        for i in lives.heads:
            alive[i] += sizes.within(nodes[i])
    return int(alive.max())


@dataclass(frozen=True)
class _Lives:
    """Lifetimes of storages of constant * `sizes.factor`^tokens * `sizes.bounds`^bounds bytes (`TracedSizes`)."""

    nodes: int
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    constant: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    bounds: npt.NDArray[np.float64]
    heads: tuple[int, ...]

    @staticmethod
    def of(graph: fx.GraphModule, tokens: str) -> _Lives:
        nodes = list(graph.graph.nodes)
        order = {node: i for i, node in enumerate(nodes)}
        begin: dict[int, int] = {}
        end: dict[int, int] = {}
        terms_by_storage: dict[int, Terms] = {}
        foreign: set[int] = set()
        for i, node in enumerate(nodes):
            for key, form in storages_of(node):
                begin.setdefault(key, i)
                end[key] = max([end.get(key, 0), i, *(order[user] for user in node.users)])
                if key not in terms_by_storage:
                    terms_by_storage[key] = _terms(form, tokens)
                if node.op in ("placeholder", "get_attr"):
                    foreign.add(key)
        own = [key for key in begin if key not in foreign]
        terms = np.array([terms_by_storage[key] for key in own], np.float64).reshape(-1, 3)
        heads = tuple(i for i, node in enumerate(nodes) if head_operands(node) is not None)
        first, last = (np.array([of[key] for key in own], np.int64) for of in (begin, end))
        return _Lives(len(nodes), first, last, terms[:, 0], terms[:, 1], terms[:, 2], heads)


_KNOWN: WeakKeyDictionary[fx.GraphModule, dict[tuple[str, int], _Lives]] = WeakKeyDictionary()


def _lives_of(graph: fx.GraphModule, tokens: str) -> _Lives:
    lives_by_key = _KNOWN.setdefault(graph, {})
    key = (tokens, len(graph.graph.nodes))
    if key not in lives_by_key:
        lives_by_key[key] = _Lives.of(graph, tokens)
    return lives_by_key[key]


def _terms(form: TensorForm, tokens: str) -> Terms:
    constant = float(form.dtype.itemsize)
    of_tokens = of_bounds = 0
    for size in form.sizes:
        symbols = _symbols(size)
        if not symbols:
            constant *= int(size)
        elif tokens in symbols:
            constant *= hint_of(size)
            of_tokens += 1
        else:
            of_bounds += 1
    return constant, of_tokens, of_bounds


def head_operands(node: fx.Node) -> Sequence[fx.Node] | None:
    ops = torch.ops.hydragraph
    operands: tuple[Any, ...] = node.args
    called = {METHODS[ops.tp_head_loss.default], METHODS[ops.tp_head_token_losses.default]}
    if node.op == "call_method" and node.target in called:
        return operands[1:3]
    fused = (ops.head_loss.default, ops.head_token_losses.default, ops.head_token_gradients.default)
    return operands[:2] if node.target in fused else None


def _symbols(size: int | torch.SymInt) -> set[str]:
    return symbols_in(size) if isinstance(size, torch.SymInt) else set()


def _shape(node: fx.Node) -> Sequence[Any]:
    forms = [form for _, form in storages_of(node)]
    return forms[0].sizes if forms else ()


def _nodes(graph: fx.GraphModule, op: str) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == op]


def _results(graph: fx.GraphModule) -> list[Any]:
    results: Any = _nodes(graph, "output")[0].args[0]
    return list(results)
