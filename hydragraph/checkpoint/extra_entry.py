"""A checkpoint's non-tensor entry: the caller's `extra` data and the optimizer's unsharded state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hydragraph.checkpoint.optimizer_state import UnshardedState, merged


def packed(extra: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    for name, value in extra.items():
        encoded(f"extra[{name!r}]", value)
    states = [UnshardedState(**fields) for part in parts if (fields := decoded(part)) is not None]
    return encoded("extra", {"extra": dict(extra), "optimizer": vars(merged(states)) if states else None})


def encoded(what: str, value: object) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        decoded(buffer.getvalue())
    except Exception as error:
        raise ValueError(
            f"checkpoint: {what} is not plain data ({type(error).__name__}): use numbers, strings, tensors, and lists,"
            " tuples or dictionaries of these; convert NumPy arrays to tensors"
        ) from error
    return buffer.getvalue()


def decoded(data: bytes) -> Any:
    """Deserialize the result of `encoded` without running code from it."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
