"""Search for the trainable parameters that contribute to the loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import placeholders_of, results_of, value_of
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Block, Template
from hydragraph.private.operator_schemas import aten_operators
from hydragraph.private.tracing import ancestors_of

_LOG = logging.getLogger(__name__)
_NAMED = 10

# Dtypes that can have fp32 master weights.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Operators whose results autograd treats as constants.
_CONSTANT = aten_operators("detach zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")


def refuse_other_dtypes(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            remedy = (
                "call the model once before compiling it, or use layers with given sizes (nn.Linear, not nn.LazyLinear)"
            )
            raise Unsupported("the tensor has no shape before the first input", where=name, remedy=remedy)
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.numel() == 0:
            remedy = "remove this parameter from the model"
            raise Unsupported("the parameter has no elements", where=name, remedy=remedy)
        if parameter.dtype not in _FLOATS:
            what = f"the parameter is {parameter.dtype}, which fp32 master weights do not support"
            remedy = "register a constant as a buffer (register_buffer), or dequantize the model"
            raise Unsupported(what, where=name, remedy=remedy)


def reached(graph: fx.GraphModule) -> set[fx.Node]:
    """Return a forward graph's placeholders that receive a gradient."""

    def passes_on(node: fx.Node) -> bool:
        value = value_of(node)
        several = value if isinstance(value, (tuple, list)) else (value,)
        differentiable = any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in several)
        return differentiable and node.target not in _CONSTANT

    return {node for node in ancestors_of(results_of(graph), passes_on) if node.op == "placeholder"}


def learning(
    blocks: Sequence[Block], templates: Mapping[str, Template], parameters: Mapping[str, Parameter]
) -> set[str]:
    """Return the trainable parameters with a gradient; warn about parameters that the loss does not use."""
    flows = {name: reached(templates[name].graph) for name in {block.template for block in blocks}}
    names: set[str] = set()
    # A gradient reaches a block only through the next block's hidden input.
    for block in reversed(blocks):
        template = templates[block.template]
        flow = flows[block.template]
        nodes = placeholders_of(template.graph)
        names.update(name for name, node in zip(block.parameters, nodes, strict=False) if node in flow)
        inputs = dict(zip(template.inputs, nodes[len(nodes) - len(template.inputs) :], strict=True))
        if inputs.get("hidden") not in flow:
            # Earlier blocks do not contribute to the loss
            break
    used = {name for block in blocks for name in block.parameters}
    _warn("no block uses", (name for name in parameters if name not in used))
    _warn("the loss does not use", (n for n, p in parameters.items() if p.trainable and n in used and n not in names))
    return {name for name in names if parameters[name].trainable}


def _warn(why: str, names: Iterable[str]) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        _LOG.warning("training does not change the parameters that %s: %s%s", why, ", ".join(listed[:_NAMED]), more)
