"""Classification of Hugging Face models' attention masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.private.tracing import constant_of

_PLAIN = frozenset({"causal_mask_function", "bidirectional_mask_function"})
# Masks that only separate sequences are omitted: packed attention does this.
_PACKED = frozenset({"packed_sequence_mask_function"})
_COMBINED = frozenset({"and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function"})
_WINDOWS = {"sliding_window_overlay": 0, "sliding_window_bidirectional_overlay": 1}
DIRECTION = "choose a model whose masks and attention layers agree on the direction (is_causal)"
# Attribute added to the meta copy's config
_DIRECTIONS = "_hydragraph_directions"
_OTHER = "choose a model whose layers attend to all earlier tokens, or to all tokens"

Pattern = Callable[..., Any]


@dataclass(frozen=True)
class MaskPlaceholder:
    """Placeholder for a mask, which layers may pass on but not read.

    Attributes:
        both_ways: whether queries also attend to later keys.
        window: queries attend only to keys at a distance of fewer than this many tokens.
        chunk: queries attend only to keys in the same chunk of this many tokens.
    """

    kind: str
    remedy: str
    both_ways: bool = False
    window: int | None = None
    chunk: int | None = None

    def supported(self, causal: bool) -> bool:
        limited = self.window is not None or self.chunk is not None
        return self.both_ways is not causal and (limited or self.both_ways)

    def refuse(self, where: str) -> NoReturn:
        raise Unsupported(f"packed attention does not support the mask: {self.kind}", where=where, remedy=self.remedy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f"a layer that reads mask.{name}")

    def __getitem__(self, index: object) -> Any:
        self.refuse("a layer that indexes the mask")


def mask(
    *_: Any, mask_function: Pattern, attention_mask: Tensor | None = None, config: Any = None, **__: Any
) -> MaskPlaceholder | None:
    """Classify a mask for transformers' mask interface; return None for plain attention.

    Args:
        mask_function: returns whether a query attends to a key, for (batch, head, query, key).
        attention_mask: [B, T], true except for padding.
    """
    if attention_mask is not None and not constant_of(attention_mask):
        return MaskPlaceholder("a padding mask", "choose a model that does not make its own padding mask")
    parts = list(_parts(mask_function))
    limits = [_limit(part) for part in parts if _name(part) not in _PLAIN]
    other = next((limit for limit in limits if isinstance(limit, str)), None)
    if other is not None:
        return MaskPlaceholder(other, _OTHER)
    both_ways = not any(_name(part) == "causal_mask_function" for part in parts)
    if config is not None:
        vars(config).setdefault(_DIRECTIONS, set()).add("both" if both_ways else "causal")
    if limits:
        return _local([limit for limit in limits if not isinstance(limit, str)], both_ways)
    if both_ways and getattr(config, "is_causal", True) is False:
        return MaskPlaceholder("attention in both directions", "remove is_causal from the config", both_ways=True)
    return None


def is_causal(module: nn.Module) -> bool:
    """Return whether a layer without a `MaskPlaceholder` is causal; raise Unsupported if this is ambiguous."""
    if getattr(module, "is_causal", True):
        return True
    made = directions(module)
    if len(made) > 1:
        what = "the model makes causal and other masks, but the layer is marked as not causal"
        raise Unsupported(what, where=type(module).__name__, remedy=DIRECTION)
    return "causal" in made


def directions(module: nn.Module) -> set[str]:
    return set(getattr(getattr(module, "config", None), _DIRECTIONS, ()))


def _local(limits: Sequence[tuple[str, int]], both_ways: bool) -> MaskPlaceholder:
    smallest_limits = {name: min(tokens for other, tokens in limits if other == name) for name, _ in limits}
    named = {"window": "a sliding window", "chunk": "chunks"}
    kind = " and ".join(f"{named[name]} of {tokens}" for name, tokens in smallest_limits.items())
    ways = "in both directions, but the layer's attention is causal" if both_ways else "that looks back only"
    return MaskPlaceholder(f"{kind} {ways}", DIRECTION, both_ways, **smallest_limits)


def _parts(pattern: Pattern) -> Iterator[Pattern]:
    name = _name(pattern)
    if name in _PACKED:
        return
    if name == "or_masks":
        # Blockwise masks without blocks (all ids negative) add nothing.
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
    if _name(pattern) != "blockwise_overlay":
        return False
    number = constant_of(inspect.getclosurevars(pattern).nonlocals["block_sequence_ids"])
    return number is not None and number < 0


def _name(pattern: Pattern) -> str:
    return str(getattr(pattern, "__qualname__", type(pattern).__name__)).partition(".")[0]


def _limit(pattern: Pattern) -> tuple[str, int] | str:
    captured = inspect.getclosurevars(pattern).nonlocals if inspect.isfunction(pattern) else {}
    name = _name(pattern)
    # transformers' bidirectional window includes keys at exactly the distance.
    if name in _WINDOWS and isinstance(captured.get("sliding_window"), int):
        return "window", captured["sliding_window"] + _WINDOWS[name]
    # Without padding, chunks start at the first token.
    if name == "chunked_overlay" and isinstance(captured.get("chunk_size"), int):
        return "chunk", captured["chunk_size"]
    return f"a custom pattern ({name})"
