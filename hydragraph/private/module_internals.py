"""Internal attributes and classes of modules."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module that generates code when it is read or first called."""
    return _LazyGraphModule(root, graph)


def table_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    own = module.__dict__
    return own["_parameters"], own["_buffers"], own["_modules"]


def empty_tables() -> dict[str, Any]:
    return {"_parameters": {}, "_buffers": {}, "_modules": {}, "_non_persistent_buffers_set": set()}
