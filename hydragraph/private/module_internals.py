"""Internal attributes and internal base classes of modules."""

from __future__ import annotations

from typing import Any

from torch import nn

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def table_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's writable table of children."""
    return module._modules


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's tables of parameters, buffers and children."""
    own = module.__dict__
    return own["_parameters"], own["_buffers"], own["_modules"]


def empty_tables() -> dict[str, Any]:
    return {"_parameters": {}, "_buffers": {}, "_modules": {}, "_non_persistent_buffers_set": set()}
