"""Joint forward and backward graph of a sharded template, traced once for all tensor-parallel degrees if possible.

Traces of two degrees differ only in sizes, so a template is traced with local sizes ("shares") that are multiples of a
large prime P. Replacing P by 1 / degree in the trace yields each degree's graph: 32 heads are 32 P in the trace, and 16
for degree 2. Under sequence parallelism, all ranks together have degree times as many tokens as one rank, so a second
prime Q stands for the degree.

The model's own numbers are smaller than P and Q, so multiples can be recognized (Kronecker's substitution). A degree
gets its own trace if a number is ambiguous, if the degree does not divide a share, or if a share becomes 1, on which
PyTorch specializes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import decode, encode, placeholders_of, results_of, value_of
from hydragraph.ir.parameter import Parameter, ShardRule
from hydragraph.ir.program import Template
from hydragraph.passes.prove_sizes import prove_sizes
from hydragraph.passes.recently_used import LRU
from hydragraph.passes.shard import ShardedTemplate, shard
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.private.tracing import TensorSpec, assumptions, hint_of, symbol_name, trace_joint
from hydragraph.spec.stage_kind import StageKind, StagePart

_LOG = logging.getLogger(__name__)

# Models' numbers are smaller than these primes, and P times a weight's size fits in 64 bits.
SHARE = 268_435_399  # P
RANKS = 134_217_689  # Q
_UNBOUNDED = frozenset({2**63 - 1, -(2**63)})
_KEPT = 16  # cached traces
# Stored as data, because later passes may change sizes
_traces: LRU[str, Mapping[str, Any] | None] = LRU(_KEPT)


class _NotProvenError(Exception):
    """Raised if one degree's graph cannot be derived from the trace for all degrees."""


@dataclass(frozen=True)
class _WideRule(ShardRule):
    """Shard rule that gives a rank P times the whole dimension."""

    def units(self, segment: int, tp: int, index: int) -> tuple[int, int]:
        return 0, self.segments[segment] * SHARE


def joint_of(spec: VariantSpec, sharded: ShardedTemplate) -> tuple[fx.GraphModule, list[torch.Tensor], int]:
    """Return a rank's joint graph, its placeholders' values, and the number of forward outputs.

    Raises:
        Unsupported: the graph would be valid only for some numbers of tokens.
    """
    proven = f"{spec.where}, with its gradient"
    outputs = len(results_of(sharded.graph))
    rules = [parameter.rule for parameter in spec.parameters.values() if parameter.rule is not None]
    # For a degree that leaves one head, the common trace would only be made in vain.
    if spec.part.tp > 1 and not any(rule.leaves_one_head(spec.part.tp) for rule in rules):
        # With local names, layers that share a template share the cached trace.
        local = tuple((name, replace(parameter, name=name)) for name, parameter in spec.parameters.items())
        template, part = spec.template, wide_part(spec.part.sequence_parallel)
        wide = _wide_trace(template, template.content, local, part, spec.dtype, spec.learning, spec.fused_head)
        if wide is not None:
            try:
                joint, values = _at(*wide, sharded, spec.part.tp)
                prove_sizes(joint, proven)
                return joint, values, outputs
            except (_NotProvenError, Unsupported) as error:
                _LOG.debug("%s gets its own trace for tp %d: %s", spec.where, spec.part.tp, error)
    # No common trace: trace this degree, or reuse one that differs only in recomputation.
    made: list[tuple[fx.GraphModule, list[torch.Tensor]]] = []

    def make() -> Mapping[str, Any] | None:
        made.append(_traced(spec, sharded))
        joint, values = made[0]
        prove_sizes(joint, proven)
        try:
            return None if assumptions(values) else encode(joint)
        except ValueError:
            # Graph data cannot represent the joint graph
            return None

    data = _traces.get(_plain(spec).key, make)
    # The cache had the key, so `make` did not run. None: the graph cannot be encoded.
    if not made:
        if data is None:
            make()
        else:
            made.append(_decoded(data))
    return (*made[0], outputs)


def wide_part(sequence_parallel: bool) -> StagePart:
    """Return the stage part to trace for all degrees."""
    # Without sequence parallelism, degrees above 1 have equal traces.
    return StagePart(StageKind(RANKS, True) if sequence_parallel else StageKind(2))


def _plain(spec: VariantSpec) -> VariantSpec:
    kind = StageKind(spec.part.tp, spec.part.sequence_parallel)
    return replace(spec, part=StagePart(kind, spec.part.index))


def _decoded(data: Mapping[str, Any]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    (joint,) = decode(data)
    for node in joint.graph.nodes:
        # This also stores the value where partitioners expect it
        value_of(node)
    return joint, [value_of(node) for node in placeholders_of(joint)]


@functools.lru_cache(maxsize=_KEPT)
def _wide_trace(
    template: Template,
    content: object,
    parameters: tuple[tuple[str, Parameter], ...],
    part: StagePart,
    dtype: torch.dtype,
    learning: frozenset[str],
    fused_head: bool,
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    wide = {name: _widened(parameter) for name, parameter in parameters}
    spec = VariantSpec(template, wide, part, dtype, learning, fused_head=fused_head)
    try:
        sharded = shard(template, wide, part, fused_head)
        joint, values = _traced(spec, sharded)
        # Graph data does not include assumptions
        if assumptions(values):
            return None
        return encode(sharded.graph), encode(joint)
    except Exception as error:
        # Wide sizes exceed any memory, so any error may occur.
        _LOG.debug("template %s has no trace that is valid for all degrees: %s", template.name, error)
        return None


def _widened(parameter: Parameter) -> Parameter:
    rule = parameter.rule
    if rule is None:
        return parameter
    return replace(parameter, rule=_WideRule(rule.dim, rule.segments, rule.unit, rule.heads))


def _at(
    forward: Mapping[str, Any], joint: Mapping[str, Any], sharded: ShardedTemplate, tp: int
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    # Shards may be uneven, so compare the converted forward with the degree's own.
    own = encode(sharded.graph)["graphs"][0]
    for narrowed, node in zip(_narrowed(forward["graphs"][0], tp), own, strict=True):
        # 1 to 4: kind, target, args, kwargs. Names and values may differ.
        if narrowed[1:5] != node[1:5]:
            raise _NotProvenError(f"{node[2]}{node[3]} is {narrowed[2]}{narrowed[3]} in the common trace")
    nodes = list(_narrowed(joint["graphs"][0], tp))
    hints = [_share(hint, tp) for hint in joint["hints"]]
    return _decoded({"graphs": [nodes], "hints": hints})


def _narrowed(nodes: list[list[Any]], tp: int) -> Iterator[list[Any]]:
    converted_sizes: dict[str, str] = {}
    for name, op, target, args, kwargs, value in nodes:
        arguments, named = (_narrow(inputs, tp) if op != "output" else inputs for inputs in (args, kwargs))
        yield [name, op, target, arguments, named, _narrow_value(value, tp, converted_sizes)]


def _narrow(argument: Any, tp: int) -> Any:
    if isinstance(argument, bool) or argument is None or isinstance(argument, str):
        return argument
    if isinstance(argument, int):
        return _share(argument, tp)
    if isinstance(argument, float):
        return _no_share(argument)
    if isinstance(argument, list):
        return [_narrow(part, tp) for part in argument]
    return {kind: content if kind == "node" else _narrow(content, tp) for kind, content in argument.items()}


def _narrow_value(value: Any, tp: int, known: dict[str, str]) -> Any:
    if isinstance(value, list) and value[0] == "list":
        return ["list", *(_narrow_value(part, tp, known) for part in value[1:])]
    if isinstance(value, list):
        kind, dtype, device, shape, strides, storage = value
        sizes = ([_narrow_size(size, tp, known) for size in dims] for dims in (shape, strides))
        return [kind, dtype, device, *sizes, storage]
    return value if value is None else _narrow_size(value, tp, known)


def _narrow_size(size: int | str, tp: int, known: dict[str, str]) -> int | str:
    if isinstance(size, int):
        return _share(size, tp)
    if size not in known:
        # "1073741596*s0" (4 P tokens) becomes "2*s0" for degree 2.
        known[size] = re.sub(r"(?<![\w.])\d+", lambda number: str(_share(int(number[0]), tp)), size)
    return known[size]


def _share(number: int, tp: int) -> int:
    if abs(number) < RANKS or number in _UNBOUNDED:
        return number
    # Divide by Q (the degree). The rest is a model's number or a multiple of P.
    degrees = 1
    while number % RANKS == 0:
        number, degrees = number // RANKS, degrees * tp
    if abs(number) < SHARE:
        return number * degrees
    # 32 P becomes 16 for degree 2, and 32 P Q becomes 32.
    times, rest = divmod(number, SHARE)
    if rest or abs(times) >= SHARE or times % tp:
        raise _NotProvenError(f"{number} cannot be divided among {tp} ranks")
    if abs(times) == tp:
        raise _NotProvenError(f"a share of {times} units becomes one unit, on which PyTorch specializes")
    return times // tp * degrees


def _no_share(number: float) -> float:
    # A float may be P's multiple, its inverse or root: attention scales by 1 / sqrt(D).
    size = abs(number)
    candidates = (size, 1 / size, size * size, 1 / size / size) if 1e-30 < size < 1e30 else ()
    for candidate, prime in itertools.product(candidates, (SHARE, RANKS)):
        times = candidate / prime
        if 0.5 < times < prime and math.isclose(times, round(times), rel_tol=1e-12):
            raise _NotProvenError(f"{number} may have been computed from a share or a degree")
    return number


def _traced(spec: VariantSpec, sharded: ShardedTemplate) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    # In sequence parallelism, only hidden states have T / tp tokens.
    template, part = spec.template, spec.part
    hints: dict[str, int] = {}
    shapes = {n: spec.parameters[n].local_shape(part.tp, part.index) for n in template.parameters}
    inputs = [TensorSpec(shape, spec.dtype, name in spec.learning) for name, shape in shapes.items()]
    nodes = placeholders_of(template.graph)[len(inputs) :]
    ranks = part.tp if part.sequence_parallel else 1
    for node, name in zip(nodes, [*template.buffers, *template.inputs], strict=True):
        hidden = name == "hidden"
        inputs.append(_spec(node, hints, ranks, in_part=hidden, differentiable=hidden and name in spec.learning))
    inputs += [TensorSpec((), torch.int64)] * len(sharded.vocabulary)
    outputs = [_spec(node, hints, ranks, in_part=True) for node in results_of(template.graph)]
    return trace_joint(sharded.graph, inputs, outputs, hints)


def _spec(
    node: fx.Node, hints: dict[str, int], ranks: int, in_part: bool = False, differentiable: bool = False
) -> TensorSpec:
    # The token count T is "s0"; each of two ranks has "s0/2".
    value = value_of(node)
    sizes: list[int | str] = []
    for size in value.shape:
        symbol = symbol_name(size)
        if symbol is not None:
            hint = hint_of(size)
            symbol, hint = (f"{symbol}/{ranks}", hint) if in_part and ranks > 1 else (symbol, hint * ranks)
            hints[symbol] = hint
        sizes.append(int(size) if symbol is None else symbol)
    return TensorSpec(tuple(sizes), value.dtype, differentiable)
