"""The strategy-independent Program: blocks, their templates, and buckets of parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.ir.graph_data import decode, encode, placeholders_of, results_of, value_of
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.placeholders import DROPOUT_KEYS, communicate, compute, pull, push
from hydragraph.ir.program_outline import Outline
from hydragraph.private.tracing import hint_of


@dataclass(frozen=True)
class Template:
    """Forward graph shared by structurally equal blocks.

    The graph's placeholders are `parameters`, `buffers` and `inputs`, in this order. It has functional operators, a
    symbolic token count, and `communicate` nodes around parts that tensor parallelism may shard.

    Attributes:
        name: SHA-256 of the graph, in hexadecimal.
        graph: graph that returns the hidden state, the summed loss ("head"), or auxiliary values ("aux").
        parameters: names within the block's module.
        inputs: "hidden", "other.i" (auxiliary values) and fields of the batch.
    """

    name: str
    graph: fx.GraphModule = field(repr=False, compare=False)
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "content": self.content, "graph": encode(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        (graph,) = decode(state["graph"])
        vars(self).update(state, graph=graph)

    @cached_property
    def content(self) -> Hashable:
        """Identity: the graph's digest, the placeholders' names, and the traced sizes."""
        # Traces may depend on sizes that are not in their texts.
        sizes: list[Any] = [size for value in _given(self.graph) for size in value.shape]
        traced = [hint_of(size) for size in sizes if isinstance(size, torch.SymInt)]
        return graph_digest(self.graph), self.parameters, self.buffers, self.inputs, tuple(traced)


def short(name: str) -> str:
    return name[:6]


def graph_digest(graph: fx.GraphModule) -> str:
    """Return the SHA-256 (hex) of a graph's text and its placeholders' forms."""
    signature = [(str(tuple(v.shape)), str(v.dtype)) for v in _given(graph)]
    return hashlib.sha256(graph.code.encode() + repr(signature).encode()).hexdigest()


def _given(graph: fx.GraphModule) -> list[Tensor]:
    return [value_of(node) for node in placeholders_of(graph)]


@dataclass(frozen=True)
class Block:
    """Part of the model: a template with parameters.

    Attributes:
        name: "embed", "layer.0", ..., "head".
        parameters: names within the model, in the template's order.
        aux: index of the aux block's output for each input "other.i".
    """

    name: str
    template: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    aux: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Program:
    """Captured model, independent of devices and strategies.

    Attributes:
        causal: whether labels are the next tokens. Otherwise, sequences provide labels.
        aux: block that computes positions, rotary tables and other parameter-free values on every stage.
        buckets: in block order, then buckets that no block uses.
        heads: numbers of query heads.
        unplaced: token id that gets position -1, such as RoBERTa's padding id.
        positions: maximum length of a sequence, and the config setting that limits it.
        origin: digest of the model's modules and config.
        reads: digest of the loss and of values that the loss or the model reads; "" if unknown.
        loss: the loss function, which is not pickled.
        window: maximum number of elements in flight, for pulls and for pushes; None: see `Outline.awaited`.
    """

    model: str
    dtype: torch.dtype
    causal: bool
    blocks: tuple[Block, ...]
    aux: Block
    templates: Mapping[str, Template] = field(repr=False)
    parameters: Mapping[str, Parameter] = field(repr=False)
    buckets: tuple[Bucket, ...] = field(repr=False)
    heads: tuple[int, ...] = ()
    unplaced: int | None = None
    positions: tuple[int, str] | None = None
    origin: str = ""
    reads: str = ""
    loss: Any = field(default=None, repr=False)
    push_dtype: torch.dtype = torch.float32
    window: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return state if self.loss is None else {**state, "loss": None, "reads": ""}

    @property
    def layers(self) -> int:
        return len(self.blocks) - 2

    def allows(self, tp: int) -> bool:
        """Return whether tensor-parallel degree `tp` can shard all heads."""
        return all(count % tp == 0 for count in self.heads) and all(
            parameter.rule is None or parameter.rule.allows(tp) for parameter in self.parameters.values()
        )

    @cached_property
    def drops(self) -> bool:
        """Whether training uses dropout, whose keys are in the batch."""
        return any(DROPOUT_KEYS in template.inputs for template in self.templates.values())

    def number_of(self, block: Block) -> int:
        """Return a block's number in dropout: 1, 2, ... for layers, 0 for other blocks."""
        return self.outline.index[block.name] % (len(self.blocks) - 1)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(block.template for block in self.blocks))

    @cached_property
    def outline(self) -> Outline:
        return Outline.of(tuple(b.name for b in self.blocks), self.buckets, self.window)

    @cached_property
    def learning(self) -> frozenset[str]:
        return frozenset(p.name for b in self.buckets if b.learns for p in b.parameters)

    @cached_property
    def fingerprint(self) -> str:
        """Hash (12 hex digits) of templates, blocks and parameters."""
        content = (self.model, str(self.dtype), self.blocks, self.aux, tuple(self.parameters.values()), self.buckets)
        return hashlib.sha256(repr((*content, self.unplaced)).encode()).hexdigest()[:12]

    @cached_property
    def graph(self) -> fx.Graph:
        """The whole model as a graph of placeholders (`ir.placeholders`)."""
        graph = fx.Graph()
        tokens = graph.placeholder("batch")
        aux = self._call(graph, compute, (self.aux.template, tokens), "aux")
        # A bucket of several blocks, such as a tied embedding, is pulled once.
        weights: dict[str, fx.Node] = {}
        hidden = tokens
        users = {bucket.name: [] for bucket in self.buckets}
        for block in self.blocks:
            used = [b.name for b in self.buckets if block.name in b.blocks]
            for name in used:
                if name not in weights:
                    weights[name] = self._call(graph, pull, (name,), f"W_{name}")
            operands = (*(weights[n] for n in used), hidden, aux)
            hidden = self._call(graph, compute, (block.template, *operands), f"h_{block.name}")
            for name in used:
                users[name].append(hidden)
            if block is not self.blocks[-1]:
                hidden = self._call(graph, communicate, (hidden, "stage"), f"c_{block.name}")
        # Gradients are complete, and thus pushed, in reverse block order.
        for bucket in (b for b in reversed(self.buckets) if b.learns):
            self._call(graph, push, (bucket.name, *users[bucket.name]), f"G_{bucket.name}")
        graph.output(hidden)
        return graph

    @staticmethod
    def _call(graph: fx.Graph, target: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> fx.Node:
        return graph.create_node("call_function", target, arguments, {}, name=name.replace(".", "_"))

    def __str__(self) -> str:
        return program_text(self)


def program_text(program: Program) -> str:
    """Return one line per block; T is the token count."""
    size = sum(p.size for p in program.parameters.values())
    learned = sum(p.size for p in program.parameters.values() if p.trainable)
    dtype = str(program.dtype).removeprefix("torch.")
    trained = "" if learned == size else f", trainable={_count(learned)}"
    sizes = f"layers={program.layers}, parameters={_count(size)}{trained}"
    head = f"program {program.model} {{{sizes}, dtype={dtype}, tokens=T}}"
    width = max(len(b.name) for b in program.blocks)
    lines = [head, _line(program, program.aux, width, "")]
    for index, block in enumerate(program.blocks):
        last = index == len(program.blocks) - 1
        leaves = "loss" if last else f"communicate h{index} [T, {_hidden(program)}]"
        lines.append(_line(program, block, width, leaves))
    pushed = ", ".join(b.name for b in reversed(program.buckets) if b.learns)
    return "\n".join([*lines, f"  push {pushed}"])


def template_text(program: Program, name: str) -> str:
    return f"template {short(name)}\n{program.templates[name].graph.code.strip()}"


def _line(program: Program, block: Block, width: int, leaves: str) -> str:
    pulls = [_pull(b) for b in program.buckets if block.name in b.blocks]
    parts = [f"  block {block.name:<{width}} <- template {short(block.template)}", "  ".join(pulls), leaves]
    return "   ".join(p for p in parts if p)


def _pull(bucket: Bucket) -> str:
    if len(bucket.parameters) == 1:
        parameter = bucket.parameters[0]
        return f"pull {parameter.name} {list(parameter.shape)}"
    return f"pull {bucket.name}: {len(bucket.parameters)} parameters, {_count(bucket.size)}"


def _count(elements: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if elements >= unit:
            return f"{elements / unit:.1f} {name}"
    return str(elements)


def _hidden(program: Program) -> str:
    graph = program.templates[program.blocks[0].template].graph
    return str(value_of(results_of(graph)[0]).shape[-1])
