"""Attention patterns that a Hugging Face model requests through its mask: windows, chunks and custom patterns.

transformers builds masks from functions of a query's and a key's position. Our mask function is called for the mask of
packed sequences instead of building a tensor [T, T], and classifies these functions: it returns None for plain
attention, which needs no mask here, and otherwise a marker, which the model passes to the layers concerned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.private.tracing import constant_of

_PLAIN = frozenset({"causal_mask_function", "bidirectional_mask_function"})
# Patterns that keep packed sequences separate, as our attention does anyway.
_PACKED = frozenset({"packed_sequence_mask_function"})
_COMBINED = frozenset({"and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function"})
_LEAST_WINDOW = 256  # tokens: longer than any sequence used by the numeric check
_WINDOW = (
    "set sliding_window to None in the config (or use_sliding_window to False), or to "
    f"{_LEAST_WINDOW} or more tokens, which bound the sequences"
)
_CHUNKS = "choose a model whose layers attend to all that came before"
_OTHER = "choose a model whose layers attend to all that came before, or to all"

Pattern = Callable[..., Any]


@dataclass(frozen=True)
class Marker:
    """Stand-in for a mask that packed attention does not support; a model may pass it on but not use it.

    Attributes:
        kind: description of the mask.
        remedy: what to change.
        both_ways: the mask makes attention bidirectional, which changes nothing for attention that is already
            bidirectional.
    """

    kind: str
    remedy: str
    both_ways: bool = False

    def refuse(self, where: str) -> NoReturn:
        """Raise Unsupported for a layer that received this mask."""
        raise Unsupported(f"{self.kind}, which its mask asks for", where=where, remedy=self.remedy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f"a mask's .{name}")

    def __getitem__(self, index: object) -> Any:
        self.refuse("a part of a mask")


def window(config: Any) -> int | None:
    """Return the sliding window that bounds a model's sequences; None: it has none, or one that is rejected.

    If no sequence is longer than the window, attention within it is plain attention.
    """
    tokens = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    used = types is None or any("sliding" in str(kind) for kind in types)
    return tokens if used and type(tokens) is int and tokens >= _LEAST_WINDOW else None


def mask(
    *_: Any, mask_function: Pattern, attention_mask: Tensor | None = None, config: Any = None, **__: Any
) -> Marker | None:
    """Classify a mask; called through transformers' mask interface. Return None for plain attention.

    Args:
        mask_function: maps indices of batch, head, query and key to whether the query sees the key.
        attention_mask: marks the tokens that count, [B, T]; we pass none, so it is the model's own. A mask of ones
            hides nothing.
        config: config of the model that the mask is for.
    """
    if attention_mask is not None and not constant_of(attention_mask):
        return Marker("a padding mask", "choose a model that makes no mask of its own")
    # transformers combines functions into a mask; the name and the closure of each tell what it hides.
    kinds = [_described(part, window(config)) for part in _parts(mask_function)]
    others = [kind for kind in kinds if kind is not None]
    if others:
        return Marker(*others[0])
    both_ways = any(_name(part) == "bidirectional_mask_function" for part in _parts(mask_function))
    if both_ways and getattr(config, "is_causal", True) is False:
        return Marker("attention in both directions", "leave is_causal out of the config", both_ways=True)
    return None


def _parts(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the functions that must all let a key through, except those that keep packed sequences separate."""
    name = _name(pattern)
    if name in _PACKED:
        return
    if name == "or_masks":
        either = [part for part in inspect.getclosurevars(pattern).nonlocals["mask_functions"] if not _is_empty(part)]
        if len(either) == 1:
            yield from _parts(either[0])
            return
    if name not in _COMBINED:
        yield pattern
        return
    captured = inspect.getclosurevars(pattern).nonlocals
    for part in captured.get("mask_functions", (captured.get("mask_function"),)):
        yield from _parts(part)


def _is_empty(pattern: Pattern) -> bool:
    """Return whether a pattern lets nothing through: a blockwise overlay without blocks."""
    if _name(pattern) != "blockwise_overlay":
        return False
    number = constant_of(inspect.getclosurevars(pattern).nonlocals["block_sequence_ids"])
    return number is not None and number < 0


def _name(pattern: Pattern) -> str:
    """Return the name of a function, or of the function that made it."""
    return str(getattr(pattern, "__qualname__", type(pattern).__name__)).partition(".")[0]


def _described(pattern: Pattern, longest: int | None = None) -> tuple[str, str] | None:
    """Return the kind of a pattern and the remedy, or None if it has no effect within `longest` tokens."""
    name = _name(pattern)
    if name in _PLAIN:
        return None
    captured = inspect.getclosurevars(pattern).nonlocals if inspect.isfunction(pattern) else {}
    if "sliding_window" in captured:
        if longest is not None and captured["sliding_window"] >= longest:
            return None
        return f"a sliding window of {captured['sliding_window']}", _WINDOW
    if "chunk_size" in captured:
        return f"chunks of {captured['chunk_size']}", _CHUNKS
    return f"a pattern of its own ({name})", _OTHER
