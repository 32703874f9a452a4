"""Internal attributes of modules, and private base classes; unchanged in releases 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

from torch import nn

# The base classes of all batch norms and of all instance norms.
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def table_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's children itself: it can be written to, and it includes duplicates."""
    return module._modules


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the tables of a module's parameters, buffers and children themselves."""
    own = module.__dict__
    return own["_parameters"], own["_buffers"], own["_modules"]


def empty_tables() -> dict[str, Any]:
    """Return the attributes that hold a module's tensors and submodules, all empty."""
    return {"_parameters": {}, "_buffers": {}, "_modules": {}, "_non_persistent_buffers_set": set()}
