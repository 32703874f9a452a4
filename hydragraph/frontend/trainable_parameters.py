"""Parameters that get a gradient: those that are trainable and contribute to the loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Block, Template

_LOG = logging.getLogger(__name__)
# Maximum number of parameters listed in a warning.
_NAMED = 10

aten = torch.ops.aten

# The dtypes that an fp32 master weight can represent.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Operators whose results do not depend on the values of their operands, from autograd's point of view.
CONSTANT = frozenset(
    {
        aten.detach.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
    }
)


def refuse_other_dtypes(model: nn.Module) -> None:
    """Raise Unsupported for parameters that are not floating-point (master weights are) or that have no shape yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise Unsupported(
                "a tensor that waits for a first input to have a shape",
                where=name,
                remedy="call the model once before, or build its layers with their sizes (nn.Linear for nn.LazyLinear)",
            )
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.numel() == 0:
            raise Unsupported("a parameter without elements", where=name, remedy="remove it from the model")
        if parameter.dtype not in FLOATS:
            raise Unsupported(
                f"a parameter of {parameter.dtype}, where master weights are fp32",
                where=name,
                remedy="make it a buffer (register_buffer) if it is a constant, or dequantise the model",
            )


def reached(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the placeholders of a forward graph that receive a gradient from its results."""
    # Backwards from the results, stopping at operators that autograd treats as constant.
    pending: list[Any] = list(next(n for n in graph.graph.nodes if n.op == "output").args[0])
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen and node.target not in CONSTANT and _differentiable(value_of(node)):
            seen.add(node)
            pending += node.all_input_nodes
    return {node for node in seen if node.op == "placeholder"}


def _differentiable(value: Any) -> bool:
    """Return whether a node's value, or one of its values, can have a gradient."""
    several = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in several)


def learning(
    blocks: Sequence[Block], templates: Mapping[str, Template], parameters: Mapping[str, Parameter]
) -> set[str]:
    """Return the names of the parameters that get a gradient, and warn about trainable parameters that do not.

    Args:
        blocks: in order; the loss is the result of the last.
        templates: by name, at least those of these blocks.
        parameters: all parameters of the model, by canonical name.
    """
    flows = {name: reached(templates[name].graph) for name in {block.template for block in blocks}}
    names: set[str] = set()
    for block in reversed(blocks):
        template = templates[block.template]
        flow = flows[block.template]
        nodes = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
        names.update(name for name, node in zip(block.parameters, nodes, strict=False) if node in flow)
        inputs = dict(zip(template.inputs, nodes[len(nodes) - len(template.inputs) :], strict=True))
        if inputs.get("hidden") not in flow:
            # The loss does not depend on this block's hidden state, so no earlier block contributes to it.
            break
    used = {name for block in blocks for name in block.parameters}
    _warn("no block uses", (name for name in parameters if name not in used))
    _warn("the loss does not reach", (n for n, p in parameters.items() if p.trainable and n in used and n not in names))
    return {name for name in names if parameters[name].trainable}


def _warn(why: str, names: Iterable[str]) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        _LOG.warning("parameters that %s stay as they are: %s%s", why, ", ".join(listed[:_NAMED]), more)
