"""Pass `shard`: fill a template's Communicate-Activation placeholders in for one tensor-parallel rank.

Parameters become this rank's shards, sizes along cut dimensions become local, "enter" and "exit" become collectives,
and the embedding and the loss become vocabulary-parallel. The result is still a forward graph; its collectives know
their backward, so `differentiate` needs no rules.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Template
from hydragraph.passes import collectives as _collectives  # noqa: F401  registers hydragraph::tp_*
from hydragraph.passes.clean import remove_dead_code
from hydragraph.passes.cut import Cut, Cuts
from hydragraph.passes.find_cuts import find_cuts
from hydragraph.passes.fuse_head import Head, find_head
from hydragraph.passes.node import known_product, operands, product, shape
from hydragraph.passes.operator_rules import SIZED_VIEWS, SPLITS, VIEWS, split_dim, split_sizes
from hydragraph.passes.place import PlacedStage
from hydragraph.passes.sequence import aligned_dim, find_parts, learns_in_part, token_dim, token_symbol
from hydragraph.passes.vocabulary import embedding_part, loss_of_parts

aten = torch.ops.aten
tp_ops = torch.ops.hydragraph

VOCABULARY = {aten.embedding.default: embedding_part, aten.cross_entropy_loss.default: loss_of_parts}


@dataclass(frozen=True)
class Degree:
    """Which part of a stage a rank is: `index` of `tp`, with or without sequence parallelism."""

    tp: int = 1
    index: int = 0
    sequence_parallel: bool = False

    @staticmethod
    def of(stage: PlacedStage, rank: int) -> Degree:
        """Return a rank's place in its stage."""
        return Degree(len(stage.ranks), stage.ranks.index(rank), stage.sequence_parallel)


@dataclass(frozen=True)
class Sharded:
    """A template instantiated for one rank of a stage.

    Attributes:
        graph: the forward graph over local shards; placeholders as in the template, then one per name of `vocabulary`.
        kinds: local parameter name -> what its gradient is.
        vocabulary: local names of the parameters cut along the vocabulary; of each the graph takes the first row that
            this rank holds (0-d int64), because tables of other sizes begin elsewhere.
    """

    graph: fx.GraphModule
    kinds: Mapping[str, GradientKind]
    vocabulary: tuple[str, ...] = ()


def shard(template: Template, parameters: Mapping[str, Parameter], degree: Degree, fused_head: bool = False) -> Sharded:
    """Instantiate a template.

    Args:
        parameters: the template's local parameter names -> any block's parameters (blocks of a template are alike).
        degree: which rank of which stage.
        fused_head: make a head with a cut vocabulary and its loss one operator, so that a rank's logits never exist as
            a whole.

    Raises:
        Unsupported: naming the block's parameter or operator, for a degree that cannot cut it.
    """
    cuts, described = _analyse(template, parameters)
    kinds = gradient_kinds(template, parameters, degree)
    if degree.tp == 1:
        return Sharded(_without_placeholders(template.graph), kinds)
    rewrite = _Rewrite(cuts, described, degree, fused_head)
    graph = rewrite.run(template.graph)
    names = dict(zip(described, template.parameters, strict=True))
    return Sharded(graph, kinds, tuple(names[table] for table in rewrite.starts))


def gradient_kinds(template: Template, parameters: Mapping[str, Parameter], degree: Degree) -> dict[str, GradientKind]:
    """Say, for the stage of a rank, whether each parameter's gradient is whole on every rank, or a part."""
    if degree.tp == 1:
        return dict.fromkeys(template.parameters, GradientKind.PARTIAL)
    cuts, described = _analyse(template, parameters)
    parts = find_parts(template.graph.graph, cuts) if degree.sequence_parallel else {}
    return {
        name: _kind(node, cuts, parts, described[node])
        for name, node in zip(template.parameters, described, strict=True)
    }


def _kind(node: fx.Node, cuts: Cuts, parts: Mapping[fx.Node, int], parameter: Parameter) -> GradientKind:
    in_part, whole = learns_in_part(node, cuts, parts)
    return GradientKind.PARTIAL if parameter.rule is not None or (in_part and not whole) else GradientKind.REPLICA


def _analyse(template: Template, parameters: Mapping[str, Parameter]) -> tuple[Cuts, dict[fx.Node, Parameter]]:
    nodes = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
    described = {node: parameters[name] for node, name in zip(nodes, template.parameters, strict=False)}
    whole = {node.name for node, parameter in described.items() if parameter.rule is None}
    tokens = next((n for n in nodes if n.name == "input_ids"), None)
    return find_cuts(template.graph.graph, set(described), tokens, whole), described


def _without_placeholders(graph: fx.GraphModule) -> fx.GraphModule:
    result = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            result.output(fx.node.map_arg(operands(node)[0], lambda n: copied[n]))
        elif node.target is communicate:
            copied[node] = copied[operands(node)[0]]
        else:
            copied[node] = result.node_copy(node, lambda n: copied[n])
    return fx.GraphModule(graph, result)


def _weight(column: fx.Node) -> fx.Node:
    """Return the weight of a column-parallel product or embedding."""
    weight = operands(column)[0] if column.target is aten.embedding.default else known_product(column).weight
    assert isinstance(weight, fx.Node)
    return weight


class _Rewrite:
    """One walk over an annotated template that writes the local graph.

    Values are whole (R), cut along units (`cuts.cut`), parts of a sum (behind row-parallel products), or cut by
    tokens (`parts`, under sequence parallelism only).
    """

    def __init__(self, cuts: Cuts, parameters: Mapping[fx.Node, Parameter], degree: Degree, fused_head: bool) -> None:
        self.cuts = cuts
        self.parameters = parameters
        self.degree = degree
        self.fused_head = fused_head
        self.graph = fx.Graph()
        self.copied: dict[fx.Node, fx.Node] = {}
        self.starts: dict[fx.Node, fx.Node] = {}  # table -> its first row here
        self.parts: Mapping[fx.Node, int] = {}
        self.symbol: str | None = None
        self.converted: dict[tuple[Any, fx.Node], fx.Node] = {}

    def run(self, source: fx.GraphModule) -> fx.GraphModule:
        if self.degree.sequence_parallel:
            self.parts = find_parts(source.graph, self.cuts)
            self.symbol = token_symbol(source.graph)
        placeholders = [n for n in source.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self.copied[node] = self.graph.node_copy(node)
        for table in dict.fromkeys(self._table(n) for n in source.graph.nodes if n in self.cuts.rows):
            if table is not None:
                start = self.graph.placeholder("vocabulary_start")
                start.target = start.name  # which is unique
                self.starts[table] = start
        for node in source.graph.nodes:
            if node.op == "output":
                self.graph.output(tuple(self._result(n) for n in operands(node)[0]))
            elif node.op != "placeholder":
                self.copied[node] = self._write(node)
        if self.fused_head:
            remove_dead_code(self.graph)  # the product
        self.graph.lint()
        return fx.GraphModule(source, self.graph)

    def _table(self, row: fx.Node) -> fx.Node | None:
        """Return the weight that a vocabulary-parallel embedding or loss works on."""
        if row.target not in VOCABULARY:
            return None
        return _weight(self.cuts.rows[row].lead)

    def _result(self, node: fx.Node) -> fx.Node:
        """Return an output, which under sequence parallelism is cut by tokens if it has any."""
        dim = token_dim(node, self.symbol)
        return self.copied[node] if dim is None or node in self.parts else self._convert(tp_ops.tp_split, node, dim)

    def _convert(self, op: Any, node: fx.Node, *where: int) -> fx.Node:
        """Write a collective on a value, once."""
        if (op, node) not in self.converted:
            ranks = (self.degree.tp,) if where else ()
            self.converted[op, node] = self.call(op.default, self.copied[node], *where, *ranks)
        return self.converted[op, node]

    def _operand(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """Return an operand with the tokens that its user needs."""
        if not self.parts or user.target is aten.sym_size.int:
            return self.copied[node]
        if node in self.parts:
            return self.copied[node] if user in self.parts else self._convert(tp_ops.tp_join, node, self.parts[node])
        if user not in self.parts:
            return self.copied[node]
        if node in self.parameters and all(learns_in_part(node, self.cuts, self.parts)):
            return self._convert(tp_ops.tp_enter, node)
        dim = aligned_dim(user, node, self.parts, self.symbol)
        if dim is not None:
            return self._convert(tp_ops.tp_split, node, dim)
        computed = node.op == "call_function" and isinstance(value_of(node), torch.Tensor)
        learns = computed and value_of(node).is_floating_point()  # as 1 + weight: its gradient is one part per rank
        return self._convert(tp_ops.tp_enter, node) if learns else self.copied[node]

    def _local(self, value: Any, user: fx.Node) -> Any:
        return fx.node.map_arg(value, lambda n: self._operand(n, user))

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Write one operator call."""
        return self.graph.call_function(target, args)

    def _write(self, node: fx.Node) -> fx.Node:
        if node.target is communicate:
            return self._communicate(node)
        if node in self.cuts.rows:
            return self._row(node)
        cut = self.cuts.cut.get(node)
        if node.target in VIEWS and (cut is not None or self.parts):
            return self._view(node, cut)
        if node.target is aten.expand.default and (cut is not None or node in self.parts):
            sizes = list(self._local(operands(node)[1], node))
            sizes[self.parts[node] if cut is None else cut.dim] = -1
            return self.call(node.target, self._local(operands(node)[0], node), sizes)
        if node.target in SPLITS or node.target is aten.slice.Tensor:
            return self._part(node)
        copied = self._copy(node)
        if node.target is aten.sym_size.int and self.parts.get(operands(node)[0]) == operands(node)[1]:
            return self.call(operator.mul, copied, self.degree.tp)
        return copied

    def _copy(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, lambda n: self._operand(n, node))

    def _view(self, node: fx.Node, cut: Cut | None) -> fx.Node:
        """Write a view with local sizes; at most one of them is not known before the step, the token count's."""
        source = self._local(operands(node)[0], node)
        cut_dim = self.parts.get(node) if cut is None else cut.dim
        if sum(isinstance(s, torch.SymInt) for s in shape(node)) <= 1 and (
            self.parts or node.target not in SIZED_VIEWS
        ):
            sizes: list[Any] = [-1 if isinstance(s, torch.SymInt) else int(s) for s in shape(node)]
        elif node.target in SIZED_VIEWS:
            sizes = list(self._local(operands(node)[1], node))
        else:
            raise Unsupported(
                "a view with several sizes that are known only at run time",
                where=node.name,
                remedy="use tensor-parallel degree 1",
            )
        if cut_dim is not None:
            sizes[cut_dim] = -1 if cut is None else self.local_size(cut)
        return self.call(aten.reshape.default if node.target not in SIZED_VIEWS else node.target, source, sizes)

    def _communicate(self, node: fx.Node) -> fx.Node:
        value, where = operands(node)
        if where == "enter":
            if value in self.parts:
                return self._convert(tp_ops.tp_gather, value, self.parts[value])
            return self._convert(tp_ops.tp_enter, value)
        if node in self.parts:
            reduced = self._convert(tp_ops.tp_scatter, value, self.parts[node])
        else:
            reduced = self._convert(tp_ops.tp_sum, value)
        parts = product(value)
        if parts is not None and parts[2] is not None:  # the bias is added once, after the sum
            return self.call(aten.add.Tensor, reduced, self._operand(parts[2], node))
        return reduced

    def _row(self, node: fx.Node) -> fx.Node:
        if node.target in VOCABULARY:
            table = self._table(node)
            assert table is not None
            head = find_head(node) if self.fused_head else None
            if head is not None:
                return self._fused(head, self.starts[table])
            units = self.local_size(self.cuts.rows[node])
            return VOCABULARY[node.target](self.graph, self._local(operands(node), node), self.starts[table], units)
        x, weight, _, inner = known_product(node)
        target = aten.linear.default if inner == 1 else aten.mm.default
        return self.call(target, self.copied[x], self.copied[weight])

    def _fused(self, head: Head, start: fx.Node) -> fx.Node:
        flat = self.call(aten.flatten.using_ints, self.copied[head.hidden], 0, -2)
        labels = self._operand(head.labels, head.loss)
        rows = -(-int(shape(head.weight)[0]) // self.degree.tp)
        arguments = (flat, self.copied[head.weight], labels, start, head.ignored, rows)
        return self.call(operator.getitem, self.call(tp_ops.tp_head_loss.default, *arguments), 0)

    def _part(self, node: fx.Node) -> fx.Node:
        """Write a split or slice along a cut dimension with local bounds."""
        source = operands(node)[0]
        cut = self.cuts.cut.get(source)
        is_slice = node.target is aten.slice.Tensor
        dim = operands(node)[1] % len(shape(source)) if is_slice else split_dim(node)
        if cut is None or dim != cut.dim:
            return self._copy(node)
        if is_slice:
            part = self.cuts.cut[node]
            before = Cut(cut.dim, cut.scale, cut.start, part.start - cut.start, cut.lead, cut.origins)
            first = self.local_size(before) if before.length else 0
            return self.call(node.target, self.copied[source], dim, first, first + self.local_size(part))
        sizes = []
        at = cut.start
        for size in split_sizes(node):
            sizes.append(self.local_size(Cut(cut.dim, cut.scale, at, size * cut.scale, cut.lead, cut.origins)))
            at += size * cut.scale
        return self.call(aten.split_with_sizes.default, self.copied[source], sizes, dim)

    def local_size(self, cut: Cut) -> int:
        """Return this rank's elements along the dimension of a cut value."""
        parameter = self.parameters[_weight(cut.lead)]
        rule = parameter.rule
        at = 0
        elements = 0
        assert rule is not None
        for segment, units in enumerate(rule.segments):
            if cut.start <= at < cut.start + cut.length:
                try:
                    a, b = rule.units(segment, self.degree.tp, self.degree.index)
                except Unsupported as error:
                    raise Unsupported(error.what, where=parameter.name, remedy=error.remedy) from None
                elements += (b - a) * rule.unit
            at += units * rule.unit
        return elements // cut.scale
