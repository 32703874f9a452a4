"""Find where tensor parallelism may cut a template, by following cut values through its forward graph.

A product with a weight may give each rank some columns of its result (*column-parallel*); everything computed from it
stays cut along the same units until a second product adds the parts up (*row-parallel*). This analysis starts with
every product on a replicated input as a candidate, follows the cut dimension operator by operator, and drops a
candidate as soon as an operator needs its whole dimension. What remains is the model's tensor-parallel plan: no list
of module names, any model. It does not depend on the degree.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from hydragraph.ir.parameter import ShardRule

aten = torch.ops.aten
varlen = torch.ops.hydragraph.varlen_attention.default

NARROWEST = 16  # a dimension of fewer units than this is not worth cutting (heads are)


@dataclass(frozen=True)
class Cut:
    """A value of which each rank holds some units along one dimension.

    Attributes:
        dim: the dimension.
        scale: elements of the origin's dimension per element of this one (1 for columns, D for heads).
        start, length: the range of the origin's dimension that this value covers.
        lead: the product whose dimension `scale`, `start` and `length` speak of.
        origins: all products it comes from; the others are cut alike, or (keys and values) head by head.
    """

    dim: int
    scale: int
    start: int
    length: int
    lead: fx.Node
    origins: frozenset[fx.Node]


@dataclass
class Origin:
    """What is learnt of one column-parallel product: its units, its fused segments, whether units are heads."""

    unit: int = 1
    bounds: set[int] = field(default_factory=set)
    heads: bool = False


@dataclass
class Cuts:
    """The result: a cut for every cut value, and what products do.

    Attributes:
        cut: node -> Cut; nodes that are absent are replicated.
        columns: column-parallel products and vocabulary-parallel embeddings.
        rows: row-parallel products, with the cut of their input.
        origins: by column-parallel node.
    """

    cut: dict[fx.Node, Cut] = field(default_factory=dict)
    columns: set[fx.Node] = field(default_factory=set)
    rows: dict[fx.Node, Cut] = field(default_factory=dict)
    origins: dict[fx.Node, Origin] = field(default_factory=dict)

    def unit(self, cut: Cut) -> int:
        """Return the origin elements of one indivisible unit of a cut value."""
        return max((self.origins[o].unit for o in cut.origins), default=1)


class _Conflict(Exception):  # noqa: N818
    """Candidates whose whole dimension some operator needs."""

    def __init__(self, origins: frozenset[fx.Node]) -> None:
        self.origins = origins


def shape(node: fx.Node) -> list[Any]:
    """Return the traced sizes of a node's value."""
    return list(node.meta["val"].shape)


def product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, int] | None:
    """Take a product with a weight apart: input, weight, bias, and the weight's input dimension; None: no product."""
    if node.target is aten.linear.default:
        x, weight, *bias = node.args
        return x, weight, bias[0] if bias else None, 1  # type: ignore[return-value]
    if node.target is aten.addmm.default:
        bias, x, weight = node.args[:3]
        return x, weight, bias, 0  # type: ignore[return-value]
    if node.target is aten.mm.default:
        x, weight = node.args
        return x, weight, None, 0  # type: ignore[return-value]
    return None


def find_cuts(graph: fx.Graph, parameters: set[fx.Node], tokens: fx.Node | None, excluded: set[str]) -> Cuts:
    """Analyse a forward graph.

    Args:
        parameters: placeholders that are trainable tensors.
        tokens: the placeholder of token ids, whose embedding may be cut along the vocabulary.
        excluded: names of parameters that must stay whole.
    """
    banned: set[fx.Node] = set()
    origins: dict[fx.Node, Origin] = {}
    while True:
        before = {n: (o.unit, len(o.bounds), o.heads) for n, o in origins.items()}
        try:
            found = _Walk(parameters, tokens, excluded, banned, origins).run(graph)
        except _Conflict as conflict:
            banned |= conflict.origins
            origins.clear()
            continue
        stray = _unfinished(found)
        if stray:
            banned |= stray
            origins.clear()
        elif before == {n: (o.unit, len(o.bounds), o.heads) for n, o in origins.items()}:
            return found


def _unfinished(found: Cuts) -> set[fx.Node]:
    """Return column products that no row product or loss uses, and those too narrow to cut."""
    used = {o for cut in found.rows.values() for o in cut.origins}
    return {
        node
        for node in found.columns
        if node not in used or (not found.origins[node].heads and _width(node) // found.origins[node].unit < NARROWEST)
    }


def _width(node: fx.Node) -> int:
    return int(shape(node.args[0])[0] if node.target is aten.embedding.default else shape(node)[-1])  # type: ignore[arg-type]


class _Walk:
    """One pass over the graph with a fixed set of candidates."""

    def __init__(
        self,
        parameters: set[fx.Node],
        tokens: fx.Node | None,
        excluded: set[str],
        banned: set[fx.Node],
        origins: dict[fx.Node, Origin],
    ) -> None:
        self.parameters, self.tokens, self.excluded, self.banned = parameters, tokens, excluded, banned
        self.found = Cuts(origins=origins)

    def run(self, graph: fx.Graph) -> Cuts:
        for node in graph.nodes:
            if node.op == "output":
                self._need_whole(node)
            elif node.op == "call_function":
                cut = self._visit(node)
                if cut is not None:
                    self.found.cut[node] = cut
        return self.found

    def _cut(self, node: Any) -> Cut | None:
        return self.found.cut.get(node) if isinstance(node, fx.Node) else None

    def _need_whole(self, node: fx.Node) -> None:
        origins = [c.origins for n in node.all_input_nodes if (c := self._cut(n))]
        if origins:
            raise _Conflict(frozenset().union(*origins))

    def _visit(self, node: fx.Node) -> Cut | None:
        if product(node) is not None:
            return self._product(node)
        if node.target is aten.embedding.default:
            return self._embedding(node)
        if not any(self._cut(n) for n in node.all_input_nodes):
            return None
        if node.target is aten.cross_entropy_loss.default:
            return self._loss(node)
        rule = RULES.get(node.target)  # type: ignore[arg-type]
        if rule is None and isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
            rule = _pointwise
        if rule is None:
            self._need_whole(node)
            return None
        cut = rule(self, node)
        if cut is None:
            self._need_whole(node)
        return cut

    def _may_cut(self, weight: fx.Node, node: fx.Node) -> bool:
        return weight in self.parameters and weight.name not in self.excluded and node not in self.banned

    def _product(self, node: fx.Node) -> Cut | None:
        x, weight, bias, inner = product(node)  # type: ignore[misc]
        cut, last = self._cut(x), len(shape(x)) - 1
        whole_bias = bias is None or bias in self.parameters
        if cut is not None and cut.dim == last and whole_bias and self._may_cut(weight, node):
            self.found.rows[node] = cut
            return None
        if cut is not None and cut.dim != last and self._cut(weight) is None:
            return cut  # the same product for every unit, as in per-head projections
        self._need_whole(node)
        if not whole_bias or not self._may_cut(weight, node):
            return None
        self.found.columns.add(node)
        self.found.origins.setdefault(node, Origin())
        return Cut(len(shape(node)) - 1, 1, 0, int(shape(weight)[1 - inner]), node, frozenset({node}))

    def _embedding(self, node: fx.Node) -> None:
        weight, ids = node.args[:2]
        if ids is self.tokens and self._may_cut(weight, node):  # type: ignore[arg-type]
            self.found.origins.setdefault(node, Origin())
            self.found.columns.add(node)
            rows = int(shape(weight)[0])  # type: ignore[arg-type]
            self.found.rows[node] = Cut(0, 1, 0, rows, node, frozenset({node}))

    def _loss(self, node: fx.Node) -> None:
        logits, _, weight = (*node.args, None)[:3]
        cut = self._cut(logits)
        reduction = node.args[3] if len(node.args) > 3 else 1
        if cut is None or cut.dim != 1 or weight is not None or cut.scale != 1 or reduction == 0:
            self._need_whole(node)
        else:
            self.found.rows[node] = cut

    def refine(self, cut: Cut, unit: int) -> None:
        """Note that a cut value's origins must not be cut finer than `unit` of their elements."""
        for origin in cut.origins:
            self.found.origins[origin].unit = max(self.found.origins[origin].unit, unit)


Rule = Callable[[_Walk, fx.Node], "Cut | None"]


def _pointwise(walk: _Walk, node: fx.Node) -> Cut | None:
    out: Cut | None = None
    rank = len(shape(node))
    for operand in node.all_input_nodes:
        cut = walk._cut(operand)
        if cut is None:
            continue
        cut = replace(cut, dim=cut.dim + rank - len(shape(operand)))
        if out is not None:
            if (cut.dim, cut.scale, cut.length) != (out.dim, out.scale, out.length):
                return None
            cut = replace(cut, origins=cut.origins | out.origins)
        out = cut
    assert out is not None
    for operand in node.all_input_nodes:  # a replicated operand must be the same for every unit
        if walk._cut(operand) is None and isinstance(operand.meta.get("val"), torch.Tensor):
            dim = out.dim - (rank - len(shape(operand)))
            if dim >= 0 and shape(operand)[dim] != 1:
                return None
    walk.refine(out, walk.found.unit(out))
    return out


def _reduction(walk: _Walk, node: fx.Node) -> Cut | None:
    x, dims, *rest = node.args
    cut, rank = walk._cut(x), len(shape(x))  # type: ignore[arg-type]
    reduced = {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}  # type: ignore[union-attr]
    if cut is None or cut.dim in reduced:
        return None
    keep = bool(rest[0]) if rest else bool(node.kwargs.get("keepdim", False))
    return cut if keep else replace(cut, dim=cut.dim - sum(d < cut.dim for d in reduced))


def _softmax(walk: _Walk, node: fx.Node) -> Cut | None:
    x, dim = node.args[:2]
    cut = walk._cut(x)
    return None if cut is None or dim % len(shape(x)) == cut.dim else cut  # type: ignore[operator, arg-type]


def _norm(walk: _Walk, node: fx.Node) -> Cut | None:
    x, normalized = node.args[:2]
    cut = walk._cut(x)
    if cut is None or cut.dim >= len(shape(x)) - len(normalized):  # type: ignore[arg-type]
        return None
    return cut


def _transpose(walk: _Walk, node: fx.Node) -> Cut | None:
    x, a, b = node.args
    cut, rank = walk._cut(x), len(shape(x))  # type: ignore[arg-type]
    swapped = {a % rank: b % rank, b % rank: a % rank}  # type: ignore[operator]
    return cut and replace(cut, dim=swapped.get(cut.dim, cut.dim))


def _permute(walk: _Walk, node: fx.Node) -> Cut | None:
    x, dims = node.args
    cut, rank = walk._cut(x), len(shape(x))  # type: ignore[arg-type]
    return cut and replace(cut, dim=[d % rank for d in dims].index(cut.dim))  # type: ignore[union-attr, operator]


def _unsqueeze(walk: _Walk, node: fx.Node) -> Cut | None:
    cut = walk._cut(node.args[0])
    return cut and replace(cut, dim=cut.dim + (node.args[1] % len(shape(node)) <= cut.dim))  # type: ignore[operator]


def _squeeze(walk: _Walk, node: fx.Node) -> Cut | None:
    x, dim = node.args
    cut = walk._cut(x)
    dim %= len(shape(x))  # type: ignore[operator, arg-type, assignment]
    return None if cut is None or dim == cut.dim else replace(cut, dim=cut.dim - (dim < cut.dim))  # type: ignore[operator]


def _expand(walk: _Walk, node: fx.Node) -> Cut | None:
    x = node.args[0]
    cut, added = walk._cut(x), len(shape(node)) - len(shape(x))  # type: ignore[arg-type]
    return cut and replace(cut, dim=cut.dim + added)


def _cat(walk: _Walk, node: fx.Node) -> Cut | None:
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    cuts = [walk._cut(p) for p in parts]  # type: ignore[union-attr]
    first = cuts[0]
    if first is None or any(
        c is None or (c.dim, c.scale, c.length) != (first.dim, first.scale, first.length) for c in cuts
    ):
        return None
    if dim % len(shape(node)) == first.dim:  # type: ignore[operator]
        return None
    return replace(first, origins=frozenset().union(*(c.origins for c in cuts if c)))


def _view(walk: _Walk, node: fx.Node) -> Cut | None:
    x = node.args[0]
    cut = walk._cut(x)
    if cut is None:
        return None
    dim = carried(shape(x), shape(node), cut.dim)  # type: ignore[arg-type]
    if dim is None:
        return None
    before, after = shape(x)[cut.dim], shape(node)[dim]  # type: ignore[arg-type]
    if after <= before:  # split: each element of the new dimension is a unit of `scale` origin elements
        scale = cut.scale * (before // after)
        walk.refine(cut, scale)
    else:  # merged with what stands behind it
        scale = cut.scale // (after // before)
        if scale == 0:
            return None
    return replace(cut, dim=dim, scale=scale)


def carried(before: list[Any], after: list[Any], dim: int) -> int | None:
    """Return the dimension of a view that has dimension `dim` of the viewed value as its outermost factor, or None."""
    i = j = 0
    while i < len(before) and j < len(after):
        first_i, first_j = i, j
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while not _same(a, b):
            if _hint(a) < _hint(b):
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        if first_i <= dim < i:
            outer_is_one = all(_hint(s) == 1 and not isinstance(s, torch.SymInt) for s in before[first_i:dim])
            return first_j if outer_is_one else None  # of [T, H] as [T, 1, H], the one head
    return None


def _same(a: Any, b: Any) -> bool:
    return str(a) == str(b)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _split(walk: _Walk, node: fx.Node) -> Cut | None:
    x, sizes = node.args[:2]
    cut, rank = walk._cut(x), len(shape(x))  # type: ignore[arg-type]
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % rank  # type: ignore[operator]
    if cut is None or dim != cut.dim:
        return cut
    at = cut.start
    for size in split_sizes(node)[:-1]:
        at += size * cut.scale
        for origin in cut.origins:
            walk.found.origins[origin].bounds.add(at)
    return cut


def split_sizes(node: fx.Node) -> list[int]:
    """Return the sizes of the parts that a split makes."""
    x, sizes = node.args[:2]
    if not isinstance(sizes, int):
        return list(sizes)  # type: ignore[arg-type]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    whole = int(shape(x)[dim])  # type: ignore[arg-type, index]
    return [min(sizes, whole - a) for a in range(0, whole, sizes)]


def _getitem(walk: _Walk, node: fx.Node) -> Cut | None:
    source, index = node.args
    cut = walk._cut(source)
    if cut is None or source.target is varlen:  # type: ignore[union-attr]
        return cut
    dim = (source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)) % len(shape(node))  # type: ignore
    if dim != cut.dim:
        return cut
    sizes = split_sizes(source)  # type: ignore[arg-type]
    start = cut.start + sum(sizes[:index]) * cut.scale  # type: ignore[misc]
    return replace(cut, start=start, length=sizes[index] * cut.scale)  # type: ignore[index]


def _slice(walk: _Walk, node: fx.Node) -> Cut | None:
    x, dim, start, stop, *step = (*node.args, *((0, 0, 2**63 - 1)[len(node.args) - 1 :]))
    cut = walk._cut(x)
    if cut is None or dim % len(shape(x)) != cut.dim:  # type: ignore[operator, arg-type]
        return cut
    size = int(shape(x)[cut.dim])  # type: ignore[arg-type]
    a, b = (min(max(p + size if p < 0 else p, 0), size) for p in (start or 0, size if stop is None else stop))  # type: ignore
    if step and step[0] != 1:
        return None
    for bound in (cut.start + a * cut.scale, cut.start + b * cut.scale):
        for origin in cut.origins:
            if 0 < bound < int(_width(origin)):
                walk.found.origins[origin].bounds.add(bound)
    return replace(cut, start=cut.start + a * cut.scale, length=(b - a) * cut.scale)


def _attention(walk: _Walk, node: fx.Node) -> Cut | None:
    cuts = [walk._cut(n) for n in node.args[:3]]
    if any(c is None or c.dim != 1 for c in cuts) or any(walk._cut(n) for n in node.args[3:]):
        return None
    for cut in cuts:
        for origin in cut.origins:  # type: ignore[union-attr]
            walk.found.origins[origin].heads = True
    q = cuts[0]
    assert q is not None
    return replace(q, origins=frozenset().union(*(c.origins for c in cuts if c)))


RULES: dict[Any, Rule] = {
    aten._to_copy.default: _pointwise,
    aten.clone.default: _pointwise,
    aten.detach.default: _pointwise,
    aten.mean.dim: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.amax.default: _reduction,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.expand.default: _expand,
    aten.cat.default: _cat,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    operator.getitem: _getitem,
    varlen: _attention,
}


def rules(found: Cuts) -> dict[fx.Node, ShardRule]:
    """Return the shard rule of every parameter that is cut, by placeholder; those wanted in two ways are left out."""
    wanted: dict[fx.Node, set[ShardRule]] = {}
    for node in found.columns:
        origin = found.origins[node]
        bounds = [0, *sorted(origin.bounds), _width(node)]
        segments = tuple((b - a) // origin.unit for a, b in zip(bounds, bounds[1:], strict=False))
        if node.target is aten.embedding.default:
            wanted.setdefault(node.args[0], set()).add(ShardRule(0, segments))  # type: ignore[arg-type]
            continue
        _, weight, bias, inner = product(node)  # type: ignore[misc]
        wanted.setdefault(weight, set()).add(ShardRule(1 - inner, segments, origin.unit, origin.heads))
        if bias is not None:
            wanted.setdefault(bias, set()).add(ShardRule(0, segments, origin.unit, origin.heads))
    for node, cut in found.rows.items():
        if product(node) is not None:
            _, weight, _, inner = product(node)  # type: ignore[misc]
            unit = found.unit(cut)
            heads = any(found.origins[o].heads for o in cut.origins)
            wanted.setdefault(weight, set()).add(ShardRule(inner, (cut.length // unit,), unit, heads))
    return {weight: next(iter(found)) for weight, found in wanted.items() if len(found) == 1}


def head_counts(found: Cuts) -> tuple[int, ...]:
    """Return the query head counts of a template's attention operators."""
    counts = {int(shape(n.args[0])[1]) for n in found.cut if n.target is varlen}  # type: ignore[arg-type]
    return tuple(sorted(counts))


def uncut_heads(graph: fx.Graph) -> int:
    """Return the greatest common divisor of all query head counts in a graph; 0 where it has no attention."""
    return math.gcd(*(int(shape(n.args[0])[1]) for n in graph.nodes if n.target is varlen))  # type: ignore[arg-type]
