"""Parameters, their sharding rules, and an order of elements in which shards are intervals.

A parameter's *canonical order* has the sharded dimension first, so a tensor-parallel shard is one interval per fused
segment (such as q, k and v).

Example: w [3, 4] fuses two segments of 2 columns each. With two ranks:

    rank 0   has columns 0 and 2: elements [0, 3) and [6, 9)
    rank 1   has columns 1 and 3: elements [3, 6) and [9, 12), which `natural` views as a tensor of shape [3, 2]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hydragraph.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor


def shares_heads(heads: int, tp: int) -> bool:
    return heads % tp == 0 if heads >= tp else tp % heads == 0


@dataclass(frozen=True)
class ShardRule:
    """Rule for sharding a parameter along one dimension.

    Attributes:
        segments: number of units of each fused segment, such as `(8, 8, 8)` for q, k and v of eight heads.
        unit: number of elements along `dim` that stay together, such as the head size.
        heads: whether units are heads. Ranks that share a head sum its gradients.

    Raises:
        ValueError: the dimension is negative, or a segment or unit is empty.
    """

    dim: int
    segments: tuple[int, ...]
    unit: int = 1
    heads: bool = False

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"'dim' is {self.dim}: use a dimension of at least 0")
        if not self.segments or min(self.segments) < 1 or self.unit < 1:
            raise ValueError(f"'segments' is {self.segments}, 'unit' is {self.unit}: give positive numbers")

    def units(self, segment: int, tp: int, index: int) -> tuple[int, int]:
        """Return the range [a, b) of a segment's units on rank `index` of `tp`."""
        n = self.segments[segment]
        if self.heads and not shares_heads(n, tp):
            what = f"{n} key/value heads cannot be shared evenly by" if n < tp else f"{n} heads are not divisible by"
            remedy = "use a degree that divides the head count" + " or is a multiple of it" * (n < tp)
            raise Unsupported(f"{what} tensor-parallel degree {tp}", where=f"tp {tp}", remedy=remedy)
        # tp / n consecutive ranks share a head.
        if self.heads and n < tp:
            return index * n // tp, index * n // tp + 1
        return index * n // tp, (index + 1) * n // tp

    def allows(self, tp: int) -> bool:
        return not self.heads or all(shares_heads(segment, tp) for segment in self.segments)

    def leaves_one_head(self, tp: int) -> bool:
        """Return whether a rank stores a single head of some segment."""
        return self.heads and min(self.segments) <= tp


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model.

    Attributes:
        name: its first name in `model.named_parameters()`.
        rule: sharding rule, or None if every rank of a stage has the whole parameter.

    Raises:
        ValueError: the parameter has no elements, or the rule does not match its shape.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    rule: ShardRule | None = None
    trainable: bool = True

    def __post_init__(self) -> None:
        if 0 in self.shape:
            raise ValueError(f"parameter {self.name} has no elements: shape {self.shape}; remove it from the model")
        if self.rule is not None:
            self._check_rule(self.rule)

    def _check_rule(self, rule: ShardRule) -> None:
        if rule.dim >= len(self.shape):
            raise ValueError(
                f"parameter {self.name}: the rule shards dimension {rule.dim}, but the shape is {self.shape}; give a "
                "dimension of the shape"
            )
        if sum(rule.segments) * rule.unit != self.shape[rule.dim]:
            raise ValueError(
                f"parameter {self.name}: segments {rule.segments} with units of {rule.unit} have "
                f"{sum(rule.segments) * rule.unit} elements, but dimension {rule.dim} of {self.shape} has "
                f"{self.shape[rule.dim]}; give the number of units of each segment"
            )

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def _row(self) -> int:
        return self.size // self.shape[self.rule.dim] if self.rule else self.size

    def intervals(self, tp: int, index: int) -> tuple[tuple[int, int], ...]:
        """Return the canonical intervals [lo, hi) of rank `index` of `tp`.

        Raises:
            Unsupported: `tp` splits a head.
        """
        if self.rule is None or tp == 1:
            return ((0, self.size),)
        intervals = []
        # start: the segment's first element. row: elements per entry of the sharded dimension.
        start = 0
        row = self._row
        for segment, n in enumerate(self.rule.segments):
            a, b = self.units(segment, tp, index)
            step = self.rule.unit * row
            intervals.append((start + a * step, start + b * step))
            start += n * step
        return tuple(intervals)

    def units(self, segment: int, tp: int, index: int) -> tuple[int, int]:
        """Return the range of `ShardRule.units`; raises like `intervals`."""
        assert self.rule is not None
        try:
            return self.rule.units(segment, tp, index)
        except Unsupported as error:
            raise Unsupported(error.what, where=self.name, remedy=error.remedy) from None

    def local_shape(self, tp: int, index: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard; raises like `intervals`."""
        if self.rule is None or tp == 1:
            return self.shape
        length = sum(hi - lo for lo, hi in self.intervals(tp, index)) // self._row
        return (*self.shape[: self.rule.dim], length, *self.shape[self.rule.dim + 1 :])

    def canonical(self, tensor: Tensor) -> Tensor:
        """Flatten a tensor or shard in canonical order, without a copy if possible."""
        return (tensor.movedim(self.rule.dim, 0) if self.rule else tensor).reshape(-1)

    def natural(self, flat: Tensor, tp: int = 1, index: int = 0) -> Tensor:
        """View a shard in canonical order as a tensor of shape `local_shape`."""
        shape = self.local_shape(tp, index)
        if self.rule is None:
            return flat.view(shape)
        dim = self.rule.dim
        return flat.view(shape[dim], *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)


@dataclass(frozen=True)
class Bucket:
    """Parameters whose state is one flat vector, which two ranks exchange in one message.

    A block's own parameters form a bucket. Tied parameters and parameters without a gradient have other buckets.

    Attributes:
        blocks: blocks that use the bucket; may be empty.
        learns: whether the parameters are trainable and contribute to the loss.
    """

    name: str
    parameters: tuple[Parameter, ...]
    blocks: tuple[str, ...]
    learns: bool = True

    def __post_init__(self) -> None:
        names = [p.name for p in self.parameters]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"bucket {self.name}: {', '.join(repeated)} occurs more than once; list it once")

    @cached_property
    def size(self) -> int:
        return sum(p.size for p in self.parameters)

    @cached_property
    def form(self) -> tuple[tuple[tuple[int, ...], ShardRule | None], ...]:
        """Shape and rule of each parameter, which determine the bucket's layouts."""
        return tuple((p.shape, p.rule) for p in self.parameters)

    def offsets(self) -> dict[str, int]:
        starts = {}
        at = 0
        for parameter in self.parameters:
            starts[parameter.name] = at
            at += parameter.size
        return starts
