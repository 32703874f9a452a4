"""Keyword arguments of the block being traced, for its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from hydragraph.errors import Unsupported

_KEYWORDS: ContextVar[Mapping[str, Any]] = ContextVar("keywords of the block", default={})  # noqa: B039  never modified


@contextmanager
def keywords_of_block(keywords: Mapping[str, Any]) -> Iterator[None]:
    token = _KEYWORDS.set(keywords)
    try:
        yield
    finally:
        _KEYWORDS.reset(token)


def sequence_bounds(where: str, what: str = "attention") -> tuple[Tensor, Tensor | None]:
    """Return the traced block's cu_seqlens and max_length; raise Unsupported if cu_seqlens is missing."""
    bounds, longest = (_KEYWORDS.get().get(name) for name in ("cu_seq_lens_q", "max_length_q"))
    if bounds is None:
        problem = f"{what} was called without cu_seq_lens_q, so it would mix packed sequences"
        remedy = "use a model that forwards its keyword arguments to its layers"
        raise Unsupported(problem, where=where, remedy=remedy)
    return bounds, longest
