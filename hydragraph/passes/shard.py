"""Pass `shard`: fill a template's Communicate-Activation placeholders in for one tensor-parallel rank.

Parameters become this rank's shards, sizes along cut dimensions become local, "enter" and "exit" become collectives,
and the embedding and the loss become vocabulary-parallel. The result is still a forward graph; its collectives know
their backward, so `differentiate` needs no rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Template
from hydragraph.passes import collectives as _collectives  # noqa: F401  registers hydragraph::tp_*
from hydragraph.passes.cut import Cut, Cuts, known_product, operands, product, shape
from hydragraph.passes.cut_rules import SIZED_VIEWS, SPLITS, VIEWS, split_dim, split_sizes
from hydragraph.passes.cuts import find_cuts
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


@dataclass(frozen=True)
class Sharded:
    """A template instantiated for one rank of a stage.

    Attributes:
        graph: the forward graph over local shards; placeholders as in the template, then perhaps `vocabulary_start`.
        kinds: local parameter name -> what its gradient is.
        vocabulary: local name of the parameter cut along the vocabulary; the graph then takes "vocabulary_start", the
            first row that this rank holds of it (0-d int64). None: there is none.
    """

    graph: fx.GraphModule
    kinds: Mapping[str, GradientKind]
    vocabulary: str | None


def shard(template: Template, parameters: Mapping[str, Parameter], degree: Degree) -> Sharded:
    """Instantiate a template.

    Args:
        parameters: the template's local parameter names -> any block's parameters (blocks of a template are alike).
        degree: which rank of which stage.

    Raises:
        Unsupported: naming the block's parameter or operator, for a degree that cannot cut it.
    """
    found, described = _analyse(template, parameters)
    kinds = gradient_kinds(template, parameters, degree.tp)
    if degree.tp == 1:
        return Sharded(_without_placeholders(template.graph), kinds, None)
    rewrite = _Rewrite(found, described, degree)
    graph = rewrite.run(template.graph)
    names = dict(zip(described, template.parameters, strict=True))
    return Sharded(graph, kinds, names[rewrite.vocabulary] if rewrite.vocabulary else None)


def gradient_kinds(template: Template, parameters: Mapping[str, Parameter], tp: int) -> dict[str, GradientKind]:
    """Say, for a stage of `tp` ranks, whether each parameter's gradient is whole on every rank, or a part."""
    if tp == 1:
        return dict.fromkeys(template.parameters, GradientKind.PARTIAL)
    found, described = _analyse(template, parameters)
    return {
        name: _kind(node, found, described[node]) for name, node in zip(template.parameters, described, strict=True)
    }


def _kind(node: fx.Node, found: Cuts, parameter: Parameter) -> GradientKind:
    whole_users = parameter.rule is None and not any(u in found.cut and u not in found.columns for u in node.users)
    return GradientKind.REPLICA if whole_users else GradientKind.PARTIAL


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
    """One walk over an annotated template that writes the local graph."""

    def __init__(self, found: Cuts, parameters: Mapping[fx.Node, Parameter], degree: Degree) -> None:
        self.found, self.parameters, self.degree = found, parameters, degree
        self.graph = fx.Graph()
        self.copied: dict[fx.Node, fx.Node] = {}
        self.start: fx.Node | None = None
        self.vocabulary: fx.Node | None = None

    def run(self, source: fx.GraphModule) -> fx.GraphModule:
        placeholders = [n for n in source.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self.copied[node] = self.graph.node_copy(node)
        self.vocabulary = next((w for n in self.found.rows if (w := self._table(n)) is not None), None)
        if self.vocabulary is not None:
            self.start = self.graph.placeholder("vocabulary_start")
        for node in source.graph.nodes:
            if node.op == "output":
                self.graph.output(self._local(operands(node)[0]))
            elif node.op != "placeholder":
                self.copied[node] = self._write(node)
        self.graph.lint()
        return fx.GraphModule(source, self.graph)

    def _table(self, row: fx.Node) -> fx.Node | None:
        """Return the weight that a vocabulary-parallel embedding or loss works on."""
        if row.target not in VOCABULARY:
            return None
        return _weight(self.found.rows[row].lead)

    def _local(self, value: Any) -> Any:
        return fx.node.map_arg(value, lambda n: self.copied[n])

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Write one operator call."""
        return self.graph.call_function(target, args)

    def _write(self, node: fx.Node) -> fx.Node:
        if node.target is communicate:
            return self._communicate(node)
        if node in self.found.rows:
            return self._row(node)
        cut = self.found.cut.get(node)
        if cut is not None and node.target in VIEWS - SIZED_VIEWS:
            sizes = [-1 if isinstance(s, torch.SymInt) else int(s) for s in shape(node)]  # one size is symbolic: T
            sizes[cut.dim] = self.local_size(cut)
            return self.call(aten.reshape.default, self._local(operands(node)[0]), sizes)
        if cut is not None and node.target in SIZED_VIEWS:
            sizes = list(self._local(operands(node)[1]))
            sizes[cut.dim] = self.local_size(cut)
            return self.call(node.target, self._local(operands(node)[0]), sizes)
        if cut is not None and node.target is aten.expand.default:
            sizes = list(self._local(operands(node)[1]))
            sizes[cut.dim] = -1
            return self.call(node.target, self._local(operands(node)[0]), sizes)
        if node.target in SPLITS or node.target is aten.slice.Tensor:
            return self._part(node)
        return self.graph.node_copy(node, lambda n: self.copied[n])

    def _communicate(self, node: fx.Node) -> fx.Node:
        value, where = operands(node)
        local = self.copied[value]
        if where == "enter":
            return self.call(tp_ops.tp_enter.default, local)
        reduced = self.call(tp_ops.tp_sum.default, local)
        taken = product(value)
        if taken is not None and taken[2] is not None:  # the bias is added once, after the sum
            return self.call(aten.add.Tensor, reduced, self.copied[taken[2]])
        return reduced

    def _row(self, node: fx.Node) -> fx.Node:
        if node.target in VOCABULARY:
            assert self.start is not None
            held = self.local_size(self.found.rows[node])
            return VOCABULARY[node.target](self.graph, self._local(operands(node)), self.start, held)
        x, weight, _, inner = known_product(node)
        target = aten.linear.default if inner == 1 else aten.mm.default
        return self.call(target, self.copied[x], self.copied[weight])

    def _part(self, node: fx.Node) -> fx.Node:
        """Write a split or slice along a cut dimension with local bounds."""
        source = operands(node)[0]
        cut = self.found.cut.get(source)
        is_slice = node.target is aten.slice.Tensor
        dim = operands(node)[1] % len(shape(source)) if is_slice else split_dim(node)
        if cut is None or dim != cut.dim:
            return self.graph.node_copy(node, lambda n: self.copied[n])
        if is_slice:
            part = self.found.cut[node]
            before = Cut(cut.dim, cut.scale, cut.start, part.start - cut.start, cut.lead, cut.origins)
            first = self.local_size(before) if before.length else 0
            return self.call(node.target, self.copied[source], dim, first, first + self.local_size(part))
        sizes, at = [], cut.start
        for size in split_sizes(node):
            sizes.append(self.local_size(Cut(cut.dim, cut.scale, at, size * cut.scale, cut.lead, cut.origins)))
            at += size * cut.scale
        return self.call(aten.split_with_sizes.default, self.copied[source], sizes, dim)

    def local_size(self, cut: Cut) -> int:
        """Return this rank's elements along the dimension of a cut value."""
        parameter = self.parameters[_weight(cut.lead)]
        rule, at, held = parameter.rule, 0, 0
        assert rule is not None
        for segment, units in enumerate(rule.segments):
            if cut.start <= at < cut.start + cut.length:
                try:
                    a, b = rule.units(segment, self.degree.tp, self.degree.index)
                except Unsupported as error:
                    raise Unsupported(error.what, where=parameter.name, remedy=error.remedy) from None
                held += (b - a) * rule.unit
            at += units * rule.unit
        return held // cut.scale
