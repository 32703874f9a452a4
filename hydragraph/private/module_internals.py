"""What a module keeps its parts in, and the classes behind its public ones; alike in all releases from 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

from torch import nn

# The classes that all batch norms, and all instance norms, have in common.
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def table_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's children itself: to write to, and with those that stand twice in it."""
    return module._modules


def empty_tables() -> dict[str, Any]:
    """Return the attributes in which a module keeps its parts, for one that has none."""
    return {"_parameters": {}, "_buffers": {}, "_modules": {}, "_non_persistent_buffers_set": set()}
