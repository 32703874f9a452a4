"""Calls to models that are not Hugging Face models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from hydragraph.errors import Unsupported

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def caller(model: nn.Module, fields: Collection[str]) -> Callable[[nn.Module, dict[str, Tensor]], Any]:
    """Return a function that passes a module the batch fields that its forward names, or a dict of all fields."""
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in _NAMED]
    names = [p.name for p in parameters if p.name in fields]
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in fields]
    if not names and len(missing) == 1:
        return lambda module, batch: module(batch)
    if missing or not names:
        what = (
            f"forward requires {missing[0]!r}, which is not a batch field"
            if missing
            else "forward takes none of the batch's fields"
        )
        remedy = f"name its parameters after the fields ({', '.join(fields)}), or pass custom fields with example="
        raise Unsupported(what, where=type(model).__name__, remedy=remedy)
    return lambda module, batch: module(**{name: batch[name] for name in names})
