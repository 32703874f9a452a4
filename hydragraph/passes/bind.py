"""Pass `bind`: move a graph's constants to a device, and let the graph create tensors there."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from hydragraph.passes.clean import copy_of, count_integers, on_device

aten = torch.ops.aten

if TYPE_CHECKING:
    from hydragraph.passes.differentiate import Variant


def bind(variant: Variant, device: torch.device) -> Variant:
    if device.type == "cpu":
        return variant
    return replace(variant, forward=bind_graph(variant.forward, device), backward=bind_graph(variant.backward, device))


def bind_graph(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    if device.type == "cpu":
        return module
    graph = copy_of(module)
    constants: dict[str, Any] = {}
    for node in graph.nodes:
        on_device(node, device)
        if node.target is aten.histc.default:
            count_integers(node)
        if node.op == "get_attr":
            constant = operator.attrgetter(str(node.target))(module)
            constants[str(node.target)] = constant.to(device) if isinstance(constant, Tensor) else constant
    return fx.GraphModule(constants, graph)
