"""Pass `shard`: turn a template into the forward graph of one tensor-parallel rank.

Parameters become shards, sizes become local, and "enter" and "exit" become collectives. The embedding and the loss
become vocabulary-parallel. A value is in one of four states:

    R  replicated  every rank has the same value
    U  by units    a rank has some columns or heads     `cuts.cut`: node -> `Cut`
    P  partial     a rank has one summand of the value  after a product in `cuts.rows`, until its "exit"
    S  by tokens   a rank has its own tokens            `parts`: node -> token dimension (sequence parallelism)

Example: attention of a Llama with 4 heads of size 16 on rank 0 of 2:

    annotated                                rank 0                                   with sequence parallelism
    x1 = communicate(x, "enter")             tp_enter(x)                R             tp_gather(x, 1, 2)       S -> R
    q  = linear(x1, W [64, 64])              linear(x1, W [32, 64])     R -> U        the same
    h  = view(q, [1, T, 4, 16])              view(q, [1, -1, 2, 16])    U             the same
    y  = linear(a, O [64, 64])               linear(a, O [64, 32])      U -> P        the same
    y1 = communicate(y, "exit")              tp_sum(y)                  P -> R        tp_scatter(y, 1, 2)      P -> S
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Template
from hydragraph.kernels import token_entropy as _entropy  # noqa: F401  registers hydragraph::token_entropy
from hydragraph.passes import collective_operators as _collectives  # noqa: F401  registers hydragraph::tp_*
from hydragraph.passes.clean import copy_of, remove_dead_code
from hydragraph.passes.find_cuts import find_cuts
from hydragraph.passes.fuse_head import HeadNodes, find_head
from hydragraph.passes.graph_node import (
    DRAWN,
    causal_convolution,
    delta_rule,
    dropout,
    is_grouped,
    known_product,
    operands,
    product,
    shape,
)
from hydragraph.passes.operator_rules import SIZED_VIEWS, SPLITS, VIEWS, split_dim, split_sizes
from hydragraph.passes.sequence import aligned_dim, find_parts, learns_in_part, token_dim, token_symbol
from hydragraph.passes.tensor_cut import Cut, Cuts
from hydragraph.passes.vocabulary import SUM, embedding_part, entropy_of_parts, loss_of_parts
from hydragraph.private.module_internals import graph_module
from hydragraph.spec.stage_kind import StagePart

aten = torch.ops.aten
tp_ops = torch.ops.hydragraph

LOSS = aten.cross_entropy_loss.default
VOCABULARY = frozenset({aten.embedding.default, LOSS, tp_ops.token_entropy.default})


@dataclass(frozen=True)
class ShardedTemplate:
    """Template instantiated for one rank of a stage.

    Attributes:
        graph: forward graph over local shards, with the template's placeholders, then one per name in `vocabulary`.
        vocabulary: local names of parameters that are sharded along the vocabulary, or whose sharded product precedes a
            dropout. The placeholder is the rank's first row or column (0-d int64).
    """

    graph: fx.GraphModule
    kinds: Mapping[str, GradientKind]
    vocabulary: tuple[str, ...] = ()


def shard(
    template: Template, parameters: Mapping[str, Parameter], part: StagePart, fused_head: bool = False
) -> ShardedTemplate:
    """Instantiate a template for one rank of a stage.

    Args:
        parameters: by local name, the parameters of any block that uses the template.

    Raises:
        Unsupported: the degree cannot shard a parameter or operator.
    """
    cuts, described = _analyse(template, parameters)
    kinds = gradient_kinds(template, parameters, part)
    if part.tp == 1:
        return ShardedTemplate(_without_placeholders(template.graph), kinds)
    rewrite = _Rewrite(cuts, described, part, fused_head)
    graph = rewrite.run(template.graph)
    names = dict(zip(described, template.parameters, strict=True))
    return ShardedTemplate(graph, kinds, tuple(names[table] for table in rewrite.starts))


def gradient_kinds(template: Template, parameters: Mapping[str, Parameter], part: StagePart) -> dict[str, GradientKind]:
    if part.tp == 1:
        return dict.fromkeys(template.parameters, GradientKind.PARTIAL)
    cuts, described = _analyse(template, parameters)
    parts = find_parts(template.graph.graph, cuts) if part.sequence_parallel else {}
    return {
        name: _kind(node, cuts, parts, described[node])
        for name, node in zip(template.parameters, described, strict=True)
    }


def _kind(node: fx.Node, cuts: Cuts, parts: Mapping[fx.Node, int], parameter: Parameter) -> GradientKind:
    in_part, whole = learns_in_part(node, cuts, parts)
    return GradientKind.PARTIAL if parameter.rule is not None or (in_part and not whole) else GradientKind.REPLICA


def _analyse(template: Template, parameters: Mapping[str, Parameter]) -> tuple[Cuts, dict[fx.Node, Parameter]]:
    nodes = placeholders_of(template.graph)
    described = {node: parameters[name] for node, name in zip(nodes, template.parameters, strict=False)}
    whole = {node.name for node, parameter in described.items() if parameter.rule is None}
    tokens = next((n for n in nodes if n.name == "input_ids"), None)
    return find_cuts(template.graph.graph, set(described), tokens, whole), described


def _without_placeholders(graph: fx.GraphModule) -> fx.GraphModule:
    result = copy_of(graph)
    for node in result.find_nodes(op="call_function", target=communicate):
        node.replace_all_uses_with(operands(node)[0])
        result.erase_node(node)
    return graph_module(graph, result)


def _weight(column: fx.Node) -> fx.Node:
    weight = operands(column)[0] if column.target is aten.embedding.default else known_product(column).weight
    assert isinstance(weight, fx.Node)
    return weight


class _Rewrite:
    """Single pass over an annotated template that writes the local graph.

    Attributes:
        converted: result of each collective on each node of the template.
    """

    def __init__(self, cuts: Cuts, parameters: Mapping[fx.Node, Parameter], part: StagePart, fused_head: bool) -> None:
        self.cuts = cuts
        self.parameters = parameters
        self.part = part
        self.fused_head = fused_head
        self.graph = fx.Graph()
        self.copied: dict[fx.Node, fx.Node] = {}
        self.starts: dict[fx.Node, fx.Node] = {}
        self.parts: Mapping[fx.Node, int] = {}
        self.symbol: str | None = None
        self.converted: dict[tuple[Any, fx.Node], fx.Node] = {}

    def run(self, source: fx.GraphModule) -> fx.GraphModule:
        if self.part.sequence_parallel:
            self.parts = find_parts(source.graph, self.cuts)
            self.symbol = token_symbol(source.graph)
        # Inputs: the template's, then first rows or columns of `vocabulary`.
        placeholders = placeholders_of(source)
        for node in placeholders:
            self.copied[node] = self.graph.node_copy(node)
        for table in dict.fromkeys(map(self._counted, source.graph.nodes)):
            if table is not None:
                start = self.graph.placeholder("vocabulary_start")
                # Inputs are bound by target; FX makes only names unique.
                start.target = start.name
                self.starts[table] = start
        for node in source.graph.nodes:
            if node.op == "output":
                self.graph.output(tuple(self._result(n) for n in operands(node)[0]))
            elif node.op != "placeholder":
                self.copied[node] = self._write(node)
        if self.fused_head:
            remove_dead_code(self.graph)
        self.graph.lint()
        return graph_module(source, self.graph)

    def _counted(self, node: fx.Node) -> fx.Node | None:
        if node.target in DRAWN and node in self.cuts.cut:
            return _weight(self.cuts.cut[node].lead)
        return self._table(node) if node in self.cuts.rows else None

    def _table(self, row: fx.Node) -> fx.Node | None:
        if row.target not in VOCABULARY:
            return None
        return _weight(self.cuts.rows[row].lead)

    def _result(self, node: fx.Node) -> fx.Node:
        dim = token_dim(node, self.symbol)
        return self.copied[node] if dim is None or node in self.parts else self._convert(tp_ops.tp_split, node, dim)

    def _convert(self, op: Any, node: fx.Node, *where: int) -> fx.Node:
        if (op, node) not in self.converted:
            ranks = (self.part.tp,) if where else ()
            self.converted[op, node] = self.call(op.default, self.copied[node], *where, *ranks)
        return self.converted[op, node]

    def _operand(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """Return an operand with the tokens that its user needs. Collectives also convert the operand's gradient.

        operand             user      written     because the gradient of the operand
        S                   S         unchanged   belongs to this rank's tokens on both sides
        S                   R, U      tp_join     is whole, and each rank keeps its part
        R                   R, U      unchanged   is already whole, or passes an "enter"
        R parameter         S and R   tp_enter    is partial from one user, whole from another
        R, has tokens       S         tp_split    is needed whole where the operand is computed
        R, computed, float  S         tp_enter    is partial on each rank, as for 1 + weight
        R, other            S         unchanged   does not exist, or is the parameter's own, summed at the push
        """
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
        learns = computed and value_of(node).is_floating_point()
        return self._convert(tp_ops.tp_enter, node) if learns else self.copied[node]

    def _local(self, value: Any, user: fx.Node) -> Any:
        return fx.node.map_arg(value, lambda n: self._operand(n, user))

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def _write(self, node: fx.Node) -> fx.Node:
        # Other operators treat a shard like the whole value.
        if node.target is communicate:
            return self._communicate(node)
        if node in self.cuts.rows:
            return self._row(node)
        cut = self.cuts.cut.get(node)
        if node.target in VIEWS and (cut is not None or self.parts):
            return self._view(node, cut)
        if node.target is aten.expand.default and (cut is not None or node in self.parts):
            # -1 keeps the operand's size. A whole operand is expanded to this rank's heads.
            sizes = list(self._local(operands(node)[1], node))
            sizes[self.parts[node] if cut is None else cut.dim] = -1
            if cut is not None and self.cuts.of(operands(node)[0]) is None:
                sizes[cut.dim] = self.local_size(cut)
            return self.call(node.target, self._local(operands(node)[0], node), sizes)
        if node.target in SPLITS or node.target is aten.slice.Tensor:
            return self._part(node)
        if node.target in DRAWN and cut is not None:
            return self._draw(node, cut)
        if node.target is delta_rule and cut is not None:
            self._check_value_heads(node, cut)
        if node.target is causal_convolution and cut is not None:
            self._check_taps(node, cut)
        copied = self._copy(node)
        # The graph needs the token count of all ranks.
        if node.target is aten.sym_size.int and self.parts.get(operands(node)[0]) == operands(node)[1]:
            return self.call(operator.mul, copied, self.part.tp)
        return copied

    def _copy(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, lambda n: self._operand(n, node))

    def _view(self, node: fx.Node, cut: Cut | None) -> fx.Node:
        source = self._local(operands(node)[0], node)
        cut_dim = self.parts.get(node) if cut is None else cut.dim
        if sum(isinstance(s, torch.SymInt) for s in shape(node)) <= 1 and (
            self.parts or node.target not in SIZED_VIEWS
        ):
            # -1: the token count of all ranks or of this rank.
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
            sizes[cut_dim] = -1 if cut is None or cut.outer else self.local_size(cut)
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
        # Before the sum, a bias would count once per rank.
        parts = product(value)
        if parts is not None and parts.bias is not None:
            return self.call(aten.add.Tensor, reduced, self._operand(parts.bias, node))
        return reduced

    def _row(self, node: fx.Node) -> fx.Node:
        if node.target in VOCABULARY:
            table = self._table(node)
            assert table is not None
            head = find_head(node) if self.fused_head else None
            if head is not None:
                return self._fused(head, self.starts[table])
            cut = self.cuts.rows[node]
            arguments = (self.graph, self._local(operands(node), node), self.starts[table], self.local_size(cut))
            if node.target is LOSS:
                return loss_of_parts(*arguments, cut.length)
            return (embedding_part if node.target is aten.embedding.default else entropy_of_parts)(*arguments)
        if is_grouped(node):
            return self._copy(node)
        parts = known_product(node)
        target = aten.linear.default if parts.inner == 1 else aten.mm.default
        return self.call(target, self.copied[parts.x], self.copied[parts.weight])

    def _fused(self, head: HeadNodes, start: fx.Node) -> fx.Node:
        # Chunks must be equal, so all ranks use the last rank's number of rows.
        flat = self.call(aten.flatten.using_ints, self.copied[head.hidden], 0, -2)
        labels = self._operand(head.labels, head.loss)
        rule = self.parameters[head.weight].rule
        assert rule is not None
        first, end = rule.units(0, self.part.tp, self.part.tp - 1)
        arguments = (flat, self.copied[head.weight], labels, start, head.ignored, (end - first) * rule.unit)
        if head.reduction == SUM:
            smoothed = (head.smoothing, int(shape(head.weight)[0]))
            fused = self.call(tp_ops.tp_head_loss.default, *arguments, *smoothed)
        else:
            fused = self.call(tp_ops.tp_head_token_losses.default, *arguments)
        return self.call(operator.getitem, fused, 0)

    def _draw(self, node: fx.Node, cut: Cut) -> fx.Node:
        arguments = self._local(operands(node), node)
        start = self.starts[_weight(cut.lead)]
        # Masks depend on positions in the whole value, so pass the part's position.
        if node.target is dropout:
            whole = cut.length // cut.scale
            return self.call(node.target, *arguments[:3], start, *arguments[4:7], cut.dim, whole, cut.scale)
        return self.call(node.target, *arguments[:9], start, *arguments[10:12], cut.scale)

    def _check_value_heads(self, node: fx.Node, cut: Cut) -> None:
        """Reject ranks that share a value head of linear attention, whose result would count once per rank."""
        if self.local_size(cut) * self.part.tp != cut.entries:
            heads = int(shape(operands(node)[0])[1])
            raise Unsupported(
                f"{self.part.tp} ranks would share heads of linear attention ({heads} key, {cut.entries} value heads)",
                where=self.parameters[_weight(cut.lead)].name,
                remedy=f"use a tensor-parallel degree that divides {heads}",
            )

    def _check_taps(self, node: fx.Node, cut: Cut) -> None:
        taps: fx.Node = operands(node)[1]
        while taps not in self.parameters:
            (taps,) = taps.all_input_nodes
        parameter = self.parameters[taps]
        if parameter.local_shape(self.part.tp, self.part.index)[0] != self.local_size(cut):
            raise Unsupported(
                f"{self.part.tp} ranks would share keys of a convolution",
                where=parameter.name,
                remedy="use a tensor-parallel degree that divides the key heads of linear attention",
            )

    def _part(self, node: fx.Node) -> fx.Node:
        source = operands(node)[0]
        cut = self.cuts.cut.get(source)
        is_slice = node.target is aten.slice.Tensor
        dim = operands(node)[1] % len(shape(source)) if is_slice else split_dim(node)
        if cut is None or dim != cut.dim:
            return self._copy(node)
        if is_slice and len(operands(node)) > 4 and operands(node)[4] != 1:
            # A rank's part begins at a multiple of the step
            return self._copy(node)
        if is_slice:
            # The slice begins after this rank's earlier elements.
            part = self.cuts.cut[node]
            before = Cut(cut.dim, cut.scale, cut.start, part.start - cut.start, cut.lead, cut.origins)
            first = self.local_size(before) if before.length else 0
            return self.call(node.target, self.copied[source], dim, first, first + self.local_size(part))
        if cut.pieces:
            sizes = [self.local_size(piece) for piece in cut.pieces]
            return self.call(aten.split_with_sizes.default, self.copied[source], sizes, dim)
        assert isinstance(cut.scale, int)
        # Segments are divided separately, so local sizes may differ.
        sizes = []
        at = cut.start
        for size in split_sizes(node):
            sizes.append(self.local_size(Cut(cut.dim, cut.scale, at, size * cut.scale, cut.lead, cut.origins)))
            at += size * cut.scale
        return self.call(aten.split_with_sizes.default, self.copied[source], sizes, dim)

    def local_size(self, cut: Cut) -> int:
        """Return the size of a value's sharded dimension on this rank.

        A fused weight [3 * 64, 64] has three segments of 4 units of 16 elements. Rank 0 of 2 has 2 units of each: 32
        elements, or 2 heads (`scale` 16).
        """
        if cut.pieces:
            return sum(map(self.local_size, cut.pieces))
        parameter = self.parameters[_weight(cut.lead)]
        assert parameter.rule is not None
        at = 0
        elements = 0
        # `find_cuts` ensures that cuts are whole segments.
        for segment, units in enumerate(parameter.rule.segments):
            if cut.start <= at < cut.start + cut.length:
                a, b = parameter.units(segment, self.part.tp, self.part.index)
                elements += (b - a) * parameter.rule.unit
            at += units * parameter.rule.unit
        return int(elements / cut.scale)
