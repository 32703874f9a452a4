"""Internal attributes of modules, and private base classes; unchanged in releases 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

from torch import nn

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def table_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own, writable table of children, including duplicates."""
    return module._modules


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's own parameters, buffers and children."""
    own = module.__dict__
    return own["_parameters"], own["_buffers"], own["_modules"]


def empty_tables() -> dict[str, Any]:
    """Return empty tables, by attribute."""
    return {"_parameters": {}, "_buffers": {}, "_modules": {}, "_non_persistent_buffers_set": set()}
