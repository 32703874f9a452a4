"""Outline of a model, the input for building rank programs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hydragraph.ir.parameter import Bucket
from hydragraph.ir.value import bucket_of

# "gradients" is "train" without the update; "evaluate" runs only forwards.
Mode = Literal["train", "evaluate", "gradients"]

# "score" computes log-probabilities.
Purpose = Literal["train", "evaluate", "gradients", "score", "score_entropy"]


def mode_of(purpose: Purpose) -> Mode:
    return "evaluate" if purpose == "score" or purpose == "score_entropy" else purpose


# Names must not contain separators of values in program texts.
_NAME = re.compile(r"[\w.\-/:]+")


@dataclass(frozen=True)
class Outline:
    """Model as a chain of named blocks, each with its buckets of weights.

    Attributes:
        blocks: "embed", "layer.0", ..., "head".
        buckets: pairs (bucket, blocks that use it).
        elements: number of elements of each bucket; if empty, every bucket counts as one element.
        window: maximum number of elements in flight, for pulls and for pushes; None: see `awaited`.

    Raises:
        ValueError: fewer than two blocks, an invalid or repeated name, or a bucket without blocks or with an unknown
            block.
    """

    blocks: tuple[str, ...]
    buckets: tuple[tuple[str, tuple[str, ...]], ...]
    frozen: tuple[str, ...] = ()
    elements: tuple[int, ...] = ()
    window: int | None = None

    @classmethod
    def of(cls, blocks: tuple[str, ...], buckets: Sequence[Bucket], window: int | None = None) -> Outline:
        # Buckets without blocks are never pulled or pushed.
        used = [bucket for bucket in buckets if bucket.blocks]
        return cls(
            blocks,
            tuple((bucket.name, bucket.blocks) for bucket in used),
            tuple(bucket.name for bucket in used if not bucket.learns),
            tuple(bucket.size for bucket in used),
            window,
        )

    def __post_init__(self) -> None:
        if len(self.blocks) < 2:
            raise ValueError(f"'blocks' is {self.blocks}: name at least two blocks, a first and a last")
        if "aux" in self.blocks:
            raise ValueError('block "aux": the name is taken by a micro-batch\'s auxiliary values; rename the block')
        for kind, names in (("block", self.blocks), ("bucket", tuple(name for name, _ in self.buckets))):
            for name in names:
                if not _NAME.fullmatch(name):
                    raise ValueError(f"{kind} {name!r}: use letters, digits and any of _ . - / :")
                if names.count(name) > 1:
                    raise ValueError(f"{kind} {name!r} occurs more than once: make the names unique")
        for name, blocks in self.buckets:
            if not blocks or not set(blocks) <= set(self.blocks):
                raise ValueError(
                    f"bucket {name!r} is used by {blocks}: name at least one block, all from {self.blocks}"
                )

    @property
    def layers(self) -> int:
        return len(self.blocks) - 2

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position k of each block, whose output is `h{k}`."""
        return {block: k for k, block in enumerate(self.blocks)}

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        elements = self.elements or (1,) * len(self.buckets)
        return {name: size for (name, _), size in zip(self.buckets, elements, strict=True)}

    @cached_property
    def _largest(self) -> int:
        return max(sum(self.sizes[name] for name in names) for names in self.weights.values())

    def awaited(self, exchanges: Sequence[str]) -> list[list[str]]:
        """Return the earlier exchanges that must end before each exchange (pull or push) starts.

        At most `window` elements, but at least one bucket, are in flight. By default, the limit is the largest block's
        size, doubled unless an exchange is streamed.
        """
        room = self.window
        if room is None:
            room = self._largest * (1 if any(bucket_of(name) != name for name in exchanges) else 2)
        result = []
        # Room for 6: of three exchanges of 3 elements, the third waits for the first.
        under_way: deque[str] = deque()
        size = 0
        for exchange in exchanges:
            size += self.sizes[bucket_of(exchange)]
            over = []
            while under_way and size > room:
                over.append(under_way.popleft())
                size -= self.sizes[bucket_of(over[-1])]
            under_way.append(exchange)
            result.append(over)
        return result

    @cached_property
    def pull_order(self) -> tuple[str, ...]:
        """Buckets, ordered by the first block that uses them."""
        first = {name: min(self.index[block] for block in blocks) for name, blocks in self.buckets}
        return tuple(sorted(first, key=first.__getitem__))

    @cached_property
    def weights(self) -> Mapping[str, tuple[str, ...]]:
        """Each block's buckets, in pull order."""
        users = dict(self.buckets)
        return {block: tuple(name for name in self.pull_order if block in users[name]) for block in self.blocks}

    @cached_property
    def gradients(self) -> Mapping[str, tuple[str, ...]]:
        """Each block's buckets with a gradient, in pull order."""
        return {block: tuple(n for n in names if n not in self.frozen) for block, names in self.weights.items()}

    @cached_property
    def lowest(self) -> int:
        """Position of the first trainable block, or the number of blocks if no block is trainable."""
        return next((k for k, block in enumerate(self.blocks) if self.gradients[block]), len(self.blocks))

    def span(self, first_layer: int, last_layer: int) -> tuple[int, int]:
        """Return the positions [first, last) of a stage's blocks."""
        # Layer i is block i + 1.
        first = 0 if first_layer == 0 else first_layer + 1
        last = len(self.blocks) if last_layer == self.layers else last_layer + 1
        return first, last
