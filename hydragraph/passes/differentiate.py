"""Pass `differentiate`: split a sharded forward graph into a forward and a backward graph with explicit saved values.

For y = linear(x, W), with W [8, 4] and the hidden state x [1, T, 4], the partitioner "min_cut" splits the joint graph
as follows:

    joint      (W, x, dy) -> (y, dW = dy^t x, dx = dy W)      placeholders primals_1, primals_2, tangents_1
    forward    (W, x) -> (y, x as [T, 4], W again, T)         `outputs` 1; the others are saved.0, .1 and .2
    backward   (T, x as [T, 4], W again, dy) -> (dW, dx)      `needs` saved.2, saved.0, saved.1, tangent

The backward gets parameters from its caller (`needs`), so micro-batches in flight do not keep them in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from hydragraph.ir.graph_data import decode, encode, placeholders_of, results_of
from hydragraph.ir.layout import GradientKind
from hydragraph.passes.clean import remove_dead_code
from hydragraph.passes.collective_operators import IDENTITY, METHODS
from hydragraph.passes.joint import joint_of
from hydragraph.passes.memory_budget import within_budget
from hydragraph.passes.shard import ShardedTemplate
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.private.operator_schemas import arguments_of
from hydragraph.private.tracing import (
    code_when_called,
    one_pass,
    partition,
    recompute,
)

COLLECTIVES = "collectives"
_GRAPHS = ("forward", "backward")
_DECODING = threading.RLock()


@dataclass(frozen=True, eq=False)
class Variant:
    """A template's graphs for one rank of a stage.

    Attributes:
        forward: graph from `inputs` to the outputs and saved values.
        backward: graph from `needs` to `gradients`. For each parameter in `added`, it also takes a 2-D buffer for the
            gradient, and beta: 0 to overwrite the buffer, else 1.
        inputs: names of parameters, buffers and template inputs, `start_of(name)` for each name in `vocabulary`, and
            "collectives" if the forward communicates.
        needs: "saved.{i}", names of parameters, "tangent" (the output's gradient), or "collectives".
        gradients: names of parameters, or "hidden", whose gradients the backward returns.
        vocabulary: parameters sharded along the vocabulary.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: int
    needs: tuple[str, ...]
    gradients: tuple[str, ...]
    kinds: Mapping[str, GradientKind]
    vocabulary: tuple[str, ...]
    added: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        data = vars(self)["_data"] if "_data" in vars(self) else encode(self.forward, self.backward)
        fields = {name: value for name, value in vars(self).items() if name != "_data"}
        return {**fields, "forward": None, "backward": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A rank runs only some variants, so graphs are decoded on first use.
        vars(self).update(
            {name: value for name, value in state.items() if name not in _GRAPHS}, _data=state["backward"]
        )

    def __getattr__(self, name: str) -> Any:
        if name in _GRAPHS:
            # Several threads may request graphs simultaneously
            with _DECODING:
                if "_data" in vars(self):
                    vars(self).update(zip(_GRAPHS, decode(vars(self)["_data"]), strict=True))
                    del vars(self)["_data"]
            # Another thread may have decoded them while this one waited.
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def saved_names(count: int) -> tuple[str, ...]:
    return tuple(f"saved.{i}" for i in range(count))


@one_pass()
@code_when_called()
def differentiate(spec: VariantSpec, sharded: ShardedTemplate) -> Variant:
    """Trace a sharded template's forward and backward as one graph, and split the graph.

    Raises:
        Unsupported: the graphs would be valid only for some numbers of tokens.
    """
    template = spec.template
    budget = spec.part.recompute
    # The placeholder primals_{i + 1} is the input names[i].
    names = [*template.parameters, *template.buffers, *template.inputs]
    names += [start_of(table) for table in sharded.vocabulary]
    joint, values, outputs = joint_of(spec, sharded)
    # The partitioner cannot split graphs without trainable parameters.
    if budget is True or not any(results_of(joint)[outputs:]):
        forward, backward = recompute(joint, outputs)
    elif budget:
        # The budget is a fraction of what min_cut saves, so partition once to find that.
        forward, _ = partition(joint, values, outputs)
        most = {node.name for node in results_of(forward)[outputs:]}
        forward, backward = recompute(joint, outputs, within_budget(joint, outputs, most, budget))
    else:
        forward, backward = partition(joint, values, outputs, spec.partitioner)
    by_primal = {f"primals_{i + 1}": name for i, name in enumerate(names)}
    # Do not save parameters, which the backward gets from its caller.
    saved = [n.name for n in results_of(forward)[outputs:]]
    kept = [s for s in saved if by_primal.get(s) not in template.parameters]
    _output(forward, results_of(forward)[:outputs] + [n for n in results_of(forward)[outputs:] if n.name in kept])
    # The backward has one result per name: None without a gradient.
    computed = results_of(backward)
    learnt = [(names[i], node) for i, node in enumerate(computed) if node is not None]
    _output(backward, [node for _, node in learnt])
    # Name the backward's inputs in the partitioner's order.
    needs = []
    for node in placeholders_of(backward):
        if node.name in kept:
            needs.append(f"saved.{kept.index(node.name)}")
        else:
            needs.append("tangent" if node.name.startswith("tangents") else by_primal[node.name])
    # Bind collectives last: their input has no name in `by_primal`.
    inputs = list(names)
    if _bind(forward):
        inputs.append(COLLECTIVES)
    if _bind(backward):
        needs.append(COLLECTIVES)
    gradients = tuple(name for name, _ in learnt)
    return Variant(
        forward, backward, tuple(inputs), outputs, tuple(needs), gradients, sharded.kinds, sharded.vocabulary
    )


def start_of(table: str) -> str:
    """Return the name of the input that gives the first row of a rank's vocabulary shard (0-d int64)."""
    return f"vocabulary_start.{table}"


def _output(graph: fx.GraphModule, values: list[fx.Node]) -> None:
    graph.graph.output_node().args = (tuple(values),)
    remove_dead_code(graph.graph)


def _bind(module: fx.GraphModule) -> bool:
    graph = module.graph
    # "enter" has no effect here: a separate operator sums gradients.
    for node in [n for n in graph.nodes if n.target is IDENTITY]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    collectives = [n for n in graph.nodes if n.target in METHODS]
    if collectives:
        with graph.inserting_after(placeholders_of(module)[-1]):
            group = graph.placeholder(COLLECTIVES)
        for node in collectives:
            # The runtime's collectives know `ranks`.
            given = [argument.value for argument in arguments_of(node) if argument.name != "ranks"]
            with graph.inserting_before(node):
                called = graph.call_method(METHODS[node.target], (group, *given))
            called.meta = dict(node.meta)
            node.replace_all_uses_with(called)
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return bool(collectives)
