"""Rules that derive the cut of an operator's result from the cuts of its operands (`passes.tensor_cut`).

A rule returns None if operands must be whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.passes.graph_node import (
    ATTENDING,
    CASTS,
    COPIES,
    attention_dropout,
    causal_convolution,
    delta_rule,
    dropout,
    operands,
    shape,
    varlen,
)
from hydragraph.passes.tensor_cut import Cut, Cuts, width
from hydragraph.private.operator_schemas import aten_operators, has_tag
from hydragraph.private.tracing import hint_of

aten = torch.ops.aten

SIZED_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
VIEWS = SIZED_VIEWS | {aten.flatten.using_ints, aten.unflatten.int}
MOVES = frozenset(
    {aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default}
)
NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})

REDUCTIONS = frozenset({aten.mean.dim, aten.sum.dim_IntList, aten.amax.default})
SOFTMAX = frozenset({aten.softmax.int, aten._softmax.default})

Rule = Callable[[Cuts, fx.Node], Cut | None]


def pointwise(cuts: Cuts, node: fx.Node) -> Cut | None:
    out: Cut | None = None
    ndim = len(shape(node))
    for operand in node.all_input_nodes:
        cut = cuts.of(operand)
        if cut is None:
            continue
        # As in broadcasting, dimensions correspond from the right.
        cut = replace(cut, dim=cut.dim + ndim - len(shape(operand)))
        if out is not None:
            # Corresponding units, such as an MLP's gate and up columns, must share a rank.
            if _size(cut) != _size(out) or cut.pieces or out.pieces:
                return None
            joined = cuts.join([cut, out])
            if joined is None:
                return None
            cut = joined
        out = cut
    assert out is not None
    # Unsharded operands must be equal for all units: cos [1, 1, T, 16] is, a bias [64] is not.
    for operand in node.all_input_nodes:
        if cuts.of(operand) is None and isinstance(value_of(operand), torch.Tensor):
            dim = out.dim - (ndim - len(shape(operand)))
            if dim >= 0 and shape(operand)[dim] != 1:
                return None
    if out.pieces:
        return out
    # Operands must have the same unit: a gate of heads is sharded by heads.
    leads = [cuts.origins[c.lead] for n in node.all_input_nodes if (c := cuts.of(n)) is not None]
    head = next((lead.head for lead in leads if lead.heads), 0)
    for lead in leads:
        if head and not lead.heads:
            lead.heads = True
            lead.head = head
    cuts.refine(out, cuts.unit(out))
    return out


def _size(cut: Cut) -> tuple[object, ...]:
    return cut.dim, cut.scale, cut.length, list(map(str, cut.outer))


def _reduction(cuts: Cuts, node: fx.Node) -> Cut | None:
    x, dims, *rest = operands(node)
    cut = cuts.of(x)
    ndim = len(shape(x))
    reduced = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}
    if cut is None or cut.dim in reduced:
        return None
    keep = bool(rest[0]) if rest else bool(node.kwargs.get("keepdim", False))
    return cut if keep else replace(cut, dim=cut.dim - sum(d < cut.dim for d in reduced))


def _needing(dims: Callable[[fx.Node, int], Collection[int]]) -> Rule:

    def rule(cuts: Cuts, node: fx.Node) -> Cut | None:
        x = operands(node)[0]
        cut = cuts.of(x)
        return None if cut is None or cut.dim in dims(node, len(shape(x))) else cut

    return rule


def _move(cuts: Cuts, node: fx.Node) -> Cut | None:
    x, *rest = operands(node)
    cut = cuts.of(x)
    ndim = len(shape(x))
    # Dimension of the result -> the operand's
    dims: list[int | None] = list(range(ndim))
    match node.target:
        case aten.transpose.int:
            dims[rest[0]], dims[rest[1]] = dims[rest[1]], dims[rest[0]]
        case aten.permute.default:
            dims = [d % ndim for d in rest[0]]
        case aten.unsqueeze.default:
            dims.insert(rest[0] % (ndim + 1), None)
        # squeeze keeps dimensions larger than 1.
        case aten.squeeze.dim | aten.select.int if len(shape(node)) < ndim:
            del dims[rest[0]]
        case aten.expand.default:
            dims = [*([None] * (len(shape(node)) - ndim)), *dims]
    return None if cut is None or cut.dim not in dims else replace(cut, dim=dims.index(cut.dim))


def join_dim(node: fx.Node) -> int:
    return int(operands(node)[1] if len(operands(node)) > 1 else 0) % len(shape(node))


def _origins(cuts: Iterable[Cut | None]) -> frozenset[fx.Node]:
    return frozenset().union(*(cut.origins for cut in cuts if cut is not None))


def _common(cuts: Cuts, values: Sequence[fx.Node], key: Callable[[Cut], object]) -> Cut | None:
    found = [cut for value in values if (cut := cuts.of(value)) is not None]
    return cuts.join(found) if len(found) == len(values) and len({key(cut) for cut in found}) == 1 else None


def _cat(cuts: Cuts, node: fx.Node) -> Cut | None:
    # A part that is expanded to all heads is expanded to each rank's own heads.
    parts = operands(node)[0]
    first_cut = next((c for p in parts if (c := cuts.of(p)) is not None), None)
    for part in parts:
        if first_cut is not None and cuts.of(part) is None and _is_expanded(part, first_cut.dim):
            cuts.cut[part] = first_cut
    part_cuts = [cuts.of(p) for p in parts]
    dim = join_dim(node)
    # Joined along the sharded dimension: one piece per part.
    pieces = [cut for cut in part_cuts if cut is not None and cut.dim == dim and cut.plain]
    if len(pieces) == len(parts):
        return replace(pieces[0], origins=_origins(pieces), pieces=tuple(pieces))
    # Joined along another dimension: parts must be sharded alike.
    common = _common(cuts, parts, lambda cut: (cut.dim, cut.scale, cut.length, bool(cut.pieces)))
    return None if common is None or common.pieces or common.dim == dim else common


def _is_expanded(node: fx.Node, dim: int) -> bool:
    if node.target is not aten.expand.default or len(node.users) > 1:
        return False
    before = shape(operands(node)[0])
    after = shape(node)
    at = dim - (len(after) - len(before))
    return at >= 0 and before[at] == 1 and after[dim] != 1


def _view(cuts: Cuts, node: fx.Node) -> Cut | None:
    x = operands(node)[0]
    cut = cuts.of(x)
    if cut is None:
        return None
    sizes = shape(x)
    # First undo an earlier merge: view [T * 4, 16] as [T, 4, 16].
    if cut.outer:
        sizes = [*sizes[: cut.dim], *cut.outer, cut.entries, *sizes[cut.dim + 1 :]]
        cut = replace(cut, dim=cut.dim + len(cut.outer), outer=())
    dim = carried(sizes, shape(node), cut.dim)
    if dim is None:
        return _merged(cuts, cut, sizes, shape(node))
    before = sizes[cut.dim]
    after = shape(node)[dim]
    if cut.pieces:
        return replace(cut, dim=dim) if _same(before, after) else None
    # [.., 64] -> [.., 4, 16]: each of the 4 entries is a unit of 16 elements.
    if after <= before:
        scale = cut.scale * (before // after)
        if not isinstance(scale, int):
            return None
        cuts.refine(cut, scale)
    # [.., 4, 16] -> [.., 64]: each of the 64 entries is an element.
    else:
        exact = Fraction(cut.scale) / (after // before)
        if exact.denominator != 1 and not cuts.origins[cut.lead].head:
            return None
        scale = int(exact) if exact.denominator == 1 else exact
    return replace(cut, dim=dim, scale=scale)


def carried(before: list[Any], after: list[Any], dim: int) -> int | None:
    """Return the dimension of a view whose outermost factor is dimension `dim` of the viewed value, or None.

    If [1, T, 4, 16] is viewed as [T, 64], dimension 2 becomes 1. Dimension 3 yields None, because each rank's part of
    the view would be scattered.
    """
    for source, target in _groups(before, after):
        if dim in source:
            outer_is_one = all(hint_of(s) == 1 and not isinstance(s, torch.SymInt) for s in before[source.start : dim])
            return target.start if outer_is_one else None
    return None


def _merged(cuts: Cuts, cut: Cut, before: list[Any], after: list[Any]) -> Cut | None:
    """Return the cut of a view that merges the cut dimension into earlier ones: [T, 64] as [T * 4, 16]."""
    for source, target in _groups(before, after):
        if cut.dim != source.stop - 1 or cut.pieces or len(target) > 2:
            continue
        inner = after[target.start + 1] if len(target) == 2 else 1
        if not isinstance(inner, int) or not isinstance(cut.scale, int) or cut.entries % inner:
            continue
        cuts.refine(cut, cut.scale * inner)
        outer = tuple(before[source.start : cut.dim])
        return replace(cut, dim=target.start, scale=cut.scale * inner, outer=outer)
    return None


def _groups(before: list[Any], after: list[Any]) -> Iterator[tuple[range, range]]:
    """Yield groups of equal size: for [1, T, 4, 16] as [T, 64], (1, T) and (T), then (4, 16) and (64)."""
    i = j = 0
    while i < len(before) and j < len(after):
        first_i = i
        first_j = j
        a = before[i]
        b = after[j]
        i += 1
        j += 1
        # Compare symbolic sizes by name; extend the group with the smaller hint.
        while not _same(a, b):
            if hint_of(a) < hint_of(b):
                a = a * before[i]
                i += 1
            else:
                b = b * after[j]
                j += 1
        yield range(first_i, i), range(first_j, j)


def _same(a: Any, b: Any) -> bool:
    return str(a) == str(b)


def _split(cuts: Cuts, node: fx.Node) -> Cut | None:
    x = operands(node)[0]
    cut = cuts.of(x)
    dim = split_dim(node)
    if cut is None or dim != cut.dim:
        return cut
    if cut.pieces:
        return cut if split_sizes(node) == [piece.entries for piece in cut.pieces] else None
    if not isinstance(cut.scale, int) or cut.outer:
        return None
    # Parts of a split become segments: each rank has some units of every part.
    at = cut.start
    for size in split_sizes(node)[:-1]:
        at += size * cut.scale
        if not cuts.bound(cut, at):
            return None
    return cut


def split_sizes(node: fx.Node) -> list[int]:
    x, sizes = operands(node)[:2]
    if not isinstance(sizes, int):
        return list(sizes)
    whole = int(shape(x)[split_dim(node)])
    if node.target is aten.chunk.default:
        sizes = -(-whole // sizes)
    return [min(sizes, whole - a) for a in range(0, whole, sizes)]


def split_dim(node: fx.Node) -> int:
    dim: Any = operands(node)[2] if len(operands(node)) > 2 else node.kwargs.get("dim", 0)
    return int(dim) % len(shape(operands(node)[0]))


def _getitem(cuts: Cuts, node: fx.Node) -> Cut | None:
    source, index = operands(node)
    cut = cuts.of(source)
    if cut is None or source.target in ATTENDING:
        return cut
    if split_dim(source) != cut.dim:
        return cut
    if cut.pieces:
        piece: Cut = cut.pieces[index]
        return replace(piece, dim=cut.dim)
    sizes = split_sizes(source)
    assert isinstance(cut.scale, int)
    start = cut.start + sum(sizes[:index]) * cut.scale
    return replace(cut, start=start, length=sizes[index] * cut.scale)


def _slice(cuts: Cuts, node: fx.Node) -> Cut | None:
    # Add defaults: dim 0, start 0, no end, step 1.
    given: tuple[Any, ...] = operands(node) + (0, 0, 2**63 - 1, 1)[len(operands(node)) - 1 :]
    x, dim, start, stop, step = given[:5]
    cut = cuts.of(x)
    if cut is None or dim % len(shape(x)) != cut.dim:
        return cut
    size = int(shape(x)[cut.dim])
    ends = (start or 0, size if stop is None else stop)
    a, b = [min(max(p + size if p < 0 else p, 0), size) for p in ends]
    if not isinstance(cut.scale, int) or not cut.plain:
        return None
    if step != 1:
        # `step` values (such as gate and up) are interleaved: `step` adjacent elements stay
        # together.
        if a >= step or b != size or size % step:
            return None
        cuts.refine(cut, cut.scale * step)
        return replace(cut, scale=cut.scale * step)
    if not all(cuts.bound(cut, cut.start + at * cut.scale) for at in (a, b)):
        return None
    return replace(cut, start=cut.start + a * cut.scale, length=(b - a) * cut.scale)


def _attention(cuts: Cuts, node: fx.Node) -> Cut | None:
    head_cuts = _by_heads(cuts, operands(node)[:3])
    if head_cuts is None or any(cuts.of(n) for n in operands(node)[3:]):
        return None
    if len({cut.length for cut in head_cuts}) == 1:
        return cuts.join(head_cuts)
    # The result has the query's heads, even with fewer key heads.
    return replace(head_cuts[0], origins=_origins(head_cuts))


def _by_heads(cuts: Cuts, values: Sequence[fx.Node]) -> list[Cut] | None:
    head_cuts = [c for n in values if (c := cuts.of(n)) is not None and c.dim == 1 and c.plain]
    if len(head_cuts) < len(values) or not all(isinstance(cut.scale, int) for cut in head_cuts):
        return None
    # Ranks may share key heads, so rules must know that units are heads.
    for cut in head_cuts:
        assert isinstance(cut.scale, int)
        for origin in cut.origins:
            cuts.origins[origin].heads = True
            cuts.origins[origin].head = cut.scale
    return head_cuts


def _delta_rule(cuts: Cuts, node: fx.Node) -> Cut | None:
    # q, k [T, key heads, D]; v [T, heads, D]; rates g, beta [T, heads].
    q, k, v, _, g, beta = operands(node)[:6]
    head_cuts = _by_heads(cuts, (q, k, v, g, beta))
    if head_cuts is None or cuts.of(operands(node)[3]):
        return None
    # In products with value heads, a key head must cover whole value heads.
    if any(cut.scale % cuts.origins[o].head for cut in head_cuts for o in cut.origins):
        return None
    return replace(head_cuts[2], origins=_origins(head_cuts))


def _convolution(cuts: Cuts, node: fx.Node) -> Cut | None:
    # Taps and bias must be sharded by channels, like x.
    x, taps, bias, bounds = operands(node)[:4]
    cut = cuts.of(x)
    others = [taps] if bias is None else [taps, bias]
    whole = cut is None or cut.dim != 1 or cut.outer or cuts.of(bounds)
    return None if whole or not all(cuts.of(other) for other in others) else cut


def _dropout(cuts: Cuts, node: fx.Node) -> Cut | None:
    cut = cuts.of(operands(node)[0])
    whole = cut is not None and isinstance(cut.scale, int) and _begins_like_first(cuts, cut)
    return cut if whole else None


def _attention_dropout(cuts: Cuts, node: fx.Node) -> Cut | None:
    cut = _attention(cuts, node)
    return cut if cut is not None and _begins_like_first(cuts, cut) else None


def _begins_like_first(cuts: Cuts, cut: Cut) -> bool:
    # A rank's masks begin at its first unit of the first segment (`vocabulary_starts`), so the
    # value must be a whole segment of that length.
    bounds = sorted({0, *cuts.origins[cut.lead].bounds, width(cut.lead)})
    segment = [b for b in bounds if cut.start <= b <= cut.start + cut.length]
    return segment == [cut.start, cut.start + cut.length] and bounds[1] == cut.length


def _stack(cuts: Cuts, node: fx.Node) -> Cut | None:
    common = _common(cuts, operands(node)[0], lambda cut: (cut.dim, cut.scale, cut.start, cut.length))
    return common and replace(common, dim=common.dim + (join_dim(node) <= common.dim))


def _padded(node: fx.Node, ndim: int) -> set[int]:
    return {ndim - 1 - i // 2 for i, amount in enumerate(operands(node)[1]) if amount}


# Pointwise operators without PyTorch's tag `pointwise`.
_UNTAGGED = aten_operators("""
    where.Scalar where.ScalarSelf where.ScalarOther rsub.Tensor masked_fill.Tensor log_sigmoid hardswish prelu isclose
    ldexp.Tensor floor_divide floor_divide.Scalar special_ndtr real imag conj _conj resolve_conj polar complex
    __or__.Tensor __and__.Tensor __xor__.Tensor __or__.Scalar __and__.Scalar __xor__.Scalar
""")

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_UNTAGGED, pointwise),
    **dict.fromkeys(CASTS | COPIES, pointwise),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(SOFTMAX, _needing(lambda n, ndim: {operands(n)[1] % ndim})),
    **dict.fromkeys(NORMS, _needing(lambda n, ndim: range(ndim - len(operands(n)[1]), ndim))),
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), _needing(lambda _, ndim: {ndim - 1})),
    **dict.fromkeys((aten.constant_pad_nd.default, aten.pad.default), _needing(_padded)),
    aten.type_as.default: _needing(lambda *_: ()),
    **dict.fromkeys((*MOVES, aten.select.int), _move),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    **dict.fromkeys((aten.topk.default, aten.sort.default, aten.argmax.default, aten.max.dim), lambda *_: None),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(SPLITS, _split),
    aten.slice.Tensor: _slice,
    operator.getitem: _getitem,
    varlen: _attention,
    attention_dropout: _attention_dropout,
    dropout: _dropout,
    delta_rule: _delta_rule,
    causal_convolution: _convolution,
}


def is_pointwise(node: fx.Node) -> bool:
    return has_tag(node.target, torch.Tag.pointwise) or RULES.get(node.target) is pointwise
