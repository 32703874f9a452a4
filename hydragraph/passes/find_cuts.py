"""Search for the dimensions that tensor parallelism may shard: a walk follows sharded values through a forward graph.

In a *column-parallel* product with a weight, each rank computes some columns of the result. Values computed from them
stay sharded until a *row-parallel* product, whose results are summed over the ranks. Every product of a replicated
value with a weight is a candidate for column parallelism, unless a later operator needs the whole dimension. A
parameter is sharded only if all its readers need the same shards.

In a Llama with 4 heads of size 16 (H = 64), the walk from the query's product finds the cuts (dim, scale):

    q = linear(x, Wq)           [1, T, 64]      (2, 1)    a candidate: one element of q is one row of Wq
    view, transpose             [1, 4, T, 16]   (1, 16)   a head is 16 rows of Wq, so its unit becomes 16
    q * cos                     [1, 4, T, 16]   (1, 16)   cos [1, 1, T, 16] is the same for every head
    varlen_attention(q, k, v)   [T, 4, 16]      (1, 16)   the units of q, k and v are heads from now on
    linear(y, Wo)               [1, T, 64]      -         the parts are summed here
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.parameter import ShardRule
from hydragraph.kernels import token_entropy as _entropy  # noqa: F401  registers hydragraph::token_entropy
from hydragraph.passes.graph_node import (
    ATTENDING,
    causal_convolution,
    chosen_rows,
    known_product,
    operands,
    product,
    shape,
    sink,
    varlen,
)
from hydragraph.passes.operator_rules import RULES, VIEWS, is_pointwise, pointwise
from hydragraph.passes.tensor_cut import Cut, Cuts, Origin, width
from hydragraph.private.operator_schemas import has_tag

aten = torch.ops.aten

# Minimum units (except heads) for which sharding is worth its communication.
NARROWEST = 16


class _Conflict(Exception):  # noqa: N818
    """Raised if an operator needs a whole value that `origins` would shard."""

    def __init__(self, origins: frozenset[fx.Node], unknown: fx.Node | None) -> None:
        self.origins = origins
        self.unknown = unknown


def find_cuts(graph: fx.Graph, parameters: set[fx.Node], tokens: fx.Node | None, excluded: set[str]) -> Cuts:
    """Find the cuts of a forward graph. Parameters named in `excluded` stay whole."""
    excluded = excluded | {p.name for p in parameters if not all(_cuts(user, p) for user in p.users)}
    # banned: products that stay replicated. origins: product -> units found so far, kept from walk
    # to walk, because late operators may enlarge the units of earlier values.
    banned: set[fx.Node] = set()
    origins: dict[fx.Node, Origin] = {}
    unknown: dict[fx.Node, fx.Node] = {}
    while True:
        before = _known(origins)
        try:
            cuts = _Walk(parameters, tokens, excluded, banned, Cuts(origins=origins)).run(graph)
        except _Conflict as conflict:
            banned |= conflict.origins
            # In graph order, all ranks report the same problem.
            unknown |= {
                n: conflict.unknown for n in graph.nodes if n in conflict.origins and conflict.unknown is not None
            }
            origins.clear()
            continue
        stray = _unfinished(cuts)
        # The loop ends: each iteration bans a product, excludes a parameter or refines a unit.
        if stray:
            # Other values are now sharded, so find all units again.
            banned |= stray
            origins.clear()
        elif before == _known(origins):
            disputed = {p.name for p, choices in _wanted(cuts).items() if len(choices) > 1}
            if not disputed:
                cuts.unknown = unknown
                return cuts
            # A parameter whose readers need different shards stays whole. Products banned before
            # get another chance.
            excluded = excluded | disputed
            banned.clear()
            origins.clear()


def _known(origins: Mapping[fx.Node, Origin]) -> dict[fx.Node, tuple[int, int, bool]]:
    return {node: (origin.unit, len(origin.bounds), origin.heads) for node, origin in origins.items()}


def _cuts(user: fx.Node, parameter: fx.Node) -> bool:
    if user.target is varlen:
        return sink(user) is parameter and operands(user).count(parameter) == 1
    if user.target is aten.embedding.default:
        return operands(user)[0] is parameter
    if chosen_rows(user) is parameter:
        return len(user.users) == 1
    if user.target is aten.squeeze.dim:
        return all(reader.target is causal_convolution for reader in user.users)
    if user.target is causal_convolution or is_pointwise(user):
        return True
    # Each product must read the parameter (or its transpose) once, as weight or bias.
    readers = [user] if product(user) is not None else list(user.users)
    every = [product(reader) for reader in readers]
    return bool(every) and all(
        parts is not None
        and user in (reader, parts.given)
        and [parts.x, parts.weight, parts.bias].count(parameter) == 1
        and parts.x is not parameter
        for reader, parts in zip(readers, every, strict=True)
    )


def _unfinished(cuts: Cuts) -> set[fx.Node]:
    # Stray products: no row-parallel product sums their values, they have too few units, or a
    # segment ends inside a unit.
    used = {o for cut in cuts.rows.values() for o in cut.origins}
    return {
        node
        for node in cuts.columns
        if node not in used
        or (not cuts.origins[node].heads and width(node) // cuts.origins[node].unit < NARROWEST)
        or any(bound % cuts.origins[node].unit for bound in (*cuts.origins[node].bounds, width(node)))
    }


@dataclass
class _Walk:
    parameters: set[fx.Node]
    tokens: fx.Node | None
    excluded: set[str]
    banned: set[fx.Node]
    cuts: Cuts

    def run(self, graph: fx.Graph) -> Cuts:
        for node in graph.nodes:
            if node.op == "output":
                self._need_whole(node)
            elif node.op == "call_function":
                cut = self._visit(node)
                if cut is not None:
                    self.cuts.cut[node] = cut
        return self.cuts

    def _need_whole(self, node: fx.Node, unknown: bool = False) -> None:
        origins = [c.origins for n in node.all_input_nodes if (c := self.cuts.of(n))]
        if origins:
            raise _Conflict(frozenset().union(*origins), node if unknown else None)

    def _visit(self, node: fx.Node) -> Cut | None:
        if product(node) is not None:
            return self._product(node)
        if node.target is aten.embedding.default:
            self._embedding(node)
            return None
        # type_as reads only its second operand's dtype.
        read = operands(node)[:1] if node.target is aten.type_as.default else node.all_input_nodes
        if not any(self.cuts.of(n) for n in read):
            return None
        if node.target in (aten.cross_entropy_loss.default, torch.ops.hydragraph.token_entropy.default):
            self._loss(node)
            return None
        sinks = sink(node)
        if sinks is not None and not self._may_cut(sinks, node):
            self._need_whole(node)
            return None
        rule = RULES.get(node.target)
        if rule is None and has_tag(node.target, torch.Tag.pointwise):
            rule = pointwise
        if rule is None:
            self._need_whole(node, unknown=True)
            return None
        # A parameter that meets a sharded value, such as a bias, is sharded like it.
        if rule is pointwise or node.target is causal_convolution:
            self._cut_partners(node)
        cut = rule(self.cuts, node)
        if cut is None:
            self._prefer_wider(node)
            self._need_whole(node)
        return cut

    def _cut_partners(self, node: fx.Node) -> None:
        first = next(n for n in node.all_input_nodes if self.cuts.of(n) is not None)
        cut = self.cuts.cut[first]
        # A segment of a fused product has other units than the whole.
        if cut.outer or not (cut.pieces or (cut.start, cut.length) == (0, width(cut.lead))):
            return
        for operand in node.all_input_nodes:
            if operand in self.cuts.cut or not isinstance(value_of(operand), torch.Tensor):
                continue
            # Dimensions correspond from the right: 2 of [1, T, 64] is 0 of a bias [64]. A
            # convolution's taps are [channels, width].
            taps = node.target is causal_convolution
            dim = 0 if taps else cut.dim - (len(shape(node)) - len(shape(operand)))
            if 0 <= dim < len(shape(operand)) and shape(operand)[dim] == shape(first)[cut.dim]:
                self.cuts.cut.update({value: replace(cut, dim=at) for value, at in self._from_parameter(operand, dim)})

    def _from_parameter(self, node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
        chain = [(node, dim)]
        while len(node.users) == 1:
            if node.op == "placeholder":
                return chain if self._may_cut(node, chain[0][0]) else []
            inputs = node.all_input_nodes
            rows = chosen_rows(node)
            # 1 if indices of shape [1, T] select the rows.
            added = 0 if rows is None else len(shape(node)) - len(shape(rows))
            if rows is not None and min(dim, dim - added) > 0:
                node = rows
                dim -= added
            elif node.target is aten.squeeze.dim and len(shape(node)) < len(shape(inputs[0])):
                # Dimension 1 of [64, 4] is dimension 2 of [64, 1, 4] before squeeze(1).
                node, squeezed = operands(node)
                dim += dim >= squeezed % len(shape(node))
            elif len(inputs) == 1 and is_pointwise(node):
                node = inputs[0]
            else:
                break
            chain.append((node, dim))
        return []

    def _prefer_wider(self, node: fx.Node) -> None:
        # Do not shard a narrow LoRA adapter whose summed result is added to a sharded value.
        cut = next(c for n in node.all_input_nodes if (c := self.cuts.of(n)))
        for operand in node.all_input_nodes:
            while operand not in self.cuts.rows and len(operand.all_input_nodes) == 1 and product(operand) is None:
                operand = operand.all_input_nodes[0]
            row = self.cuts.rows.get(operand)
            if row is not None and sum(map(width, row.origins)) < sum(map(width, cut.origins)):
                raise _Conflict(row.origins, None)

    def _may_cut(self, weight: fx.Node, node: fx.Node) -> bool:
        return weight in self.parameters and weight.name not in self.excluded and node not in self.banned

    def _product(self, node: fx.Node) -> Cut | None:
        x, weight, bias, _, outer, _ = known_product(node)
        # The product ends a region (row-parallel), is inside one, or starts one (column-parallel).
        cut = self.cuts.of(x)
        last = len(shape(x)) - 1
        known_bias = bias is None or bias in self.parameters
        # Row-parallel: the product sums over the sharded dimension.
        if cut is not None and cut.dim == last and cut.plain and known_bias and self._may_cut(weight, node):
            self.cuts.rows[node] = cut
            return None
        # Inside a region: entries of the sharded dimension are treated alike (except with a weight
        # per expert, bmm), so the result is sharded like x.
        by_expert = node.target is aten.bmm.default and cut is not None and cut.dim == 0
        if cut is not None and cut.dim != last and self.cuts.of(weight) is None and not by_expert:
            return cut
        # Column-parallel: x must be whole.
        self._need_whole(node)
        if not self._may_cut(weight, node) or not (bias is None or self._may_cut(bias, node)):
            return None
        self.cuts.columns.add(node)
        self.cuts.origins.setdefault(node, Origin())
        return Cut(len(shape(node)) - 1, 1, 0, int(shape(weight)[outer]), node, frozenset({node}))

    def _embedding(self, node: fx.Node) -> None:
        weight, ids = operands(node)[:2]
        while ids.target in VIEWS:
            ids = operands(ids)[0]
        if ids is self.tokens and self._may_cut(weight, node):
            self.cuts.origins.setdefault(node, Origin())
            self.cuts.columns.add(node)
            # The lookup starts and ends a region: each rank finds some tokens, and a sum follows.
            rows = int(shape(weight)[0])
            self.cuts.rows[node] = Cut(0, 1, 0, rows, node, frozenset({node}))

    def _loss(self, node: fx.Node) -> None:
        logits, labels, weight = (*operands(node), None)[:3]
        cut = self.cuts.of(logits)
        if node.target is torch.ops.hydragraph.token_entropy.default:
            weight = None
        # A vocabulary-parallel loss needs labels [T], single classes as units (scale 1), no class
        # weights.
        if cut is None or cut.dim != 1 or weight is not None or cut.scale != 1 or len(shape(labels)) != 1:
            self._need_whole(node)
        else:
            self.cuts.rows[node] = cut


def rules(cuts: Cuts) -> dict[fx.Node, ShardRule]:
    settled = {parameter: choices.pop() for parameter, choices in _wanted(cuts).items()}
    return {parameter: rule for parameter, rule in settled.items() if rule is not None}


def _wanted(cuts: Cuts) -> dict[fx.Node, set[ShardRule | None]]:
    rule_of_reader: dict[fx.Node, dict[fx.Node, ShardRule]] = {}
    # Column-parallel products shard the weight's output dimension, and the bias.
    for node in cuts.columns:
        if node.target is aten.embedding.default:
            rule_of_reader.setdefault(operands(node)[0], {})[node] = ShardRule(0, _segments(cuts, node))
            continue
        parts = known_product(node)
        rule = _column_rule(cuts, node, parts.outer)
        rule_of_reader.setdefault(parts.weight, {})[_reader(node)] = rule
        if parts.bias is not None:
            rule_of_reader.setdefault(parts.bias, {})[node] = replace(rule, dim=0)
    for node, cut in cuts.rows.items():
        if product(node) is not None:
            parts = known_product(node)
            # Row-parallel products: bounds and `unit` count elements of the lead, `cut.scale` per
            # entry of the weight's input dimension.
            unit = cuts.unit(cut)
            heads = any(cuts.origins[o].heads for o in cut.origins)
            bounds = [cut.start, *cuts.inner_bounds(cut), cut.start + cut.length]
            segments = tuple((b - a) // unit for a, b in pairwise(bounds))
            rule = ShardRule(parts.inner, segments, unit // cut.scale, heads)
            rule_of_reader.setdefault(parts.weight, {})[_reader(node)] = rule
    # Attention sinks, and parameters that met a sharded value (`_cut_partners`).
    for node, cut in cuts.cut.items():
        sinks = sink(node)
        if sinks is not None:
            rule_of_reader.setdefault(sinks, {})[node] = ShardRule(0, (int(shape(sinks)[0]),), 1, heads=True)
        if node.op == "placeholder":
            rule_of_reader.setdefault(node, {}).update(dict.fromkeys(node.users, _met_rule(cuts, cut)))
    # A reader that is not in `by` needs all of it (None).
    return {parameter: {by.get(user) for user in parameter.users} for parameter, by in rule_of_reader.items()}


def _segments(cuts: Cuts, column: fx.Node) -> tuple[int, ...]:
    origin = cuts.origins[column]
    bounds = [0, *sorted(origin.bounds), width(column)]
    return tuple((b - a) // origin.unit for a, b in pairwise(bounds))


def _column_rule(cuts: Cuts, column: fx.Node, dim: int) -> ShardRule:
    origin = cuts.origins[column]
    return ShardRule(dim, _segments(cuts, column), origin.unit, origin.heads)


def _met_rule(cuts: Cuts, cut: Cut) -> ShardRule:
    if not cut.pieces:
        rule = _column_rule(cuts, cut.lead, cut.dim)
        return replace(rule, unit=int(rule.unit / cut.scale))
    units = [int(cuts.unit(piece) / piece.scale) for piece in cut.pieces]
    unit = math.gcd(*units)
    return ShardRule(cut.dim, tuple(piece.entries // unit for piece in cut.pieces), unit, heads=True)


def _reader(node: fx.Node) -> fx.Node:
    parts = known_product(node)
    return node if parts.given is parts.weight else parts.given


def uncut_heads(graph: fx.Graph) -> int:
    return math.gcd(*(int(shape(operands(n)[0])[1]) for n in graph.nodes if n.target in ATTENDING))
