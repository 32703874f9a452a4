"""Memory that a rank needs for a bucket's pull or push, besides weights and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from hydragraph.cost.block_pieces import GRADIENT_BYTES as GRADIENT_BYTES
from hydragraph.ir.layout import GradientKind, Ints, Layout, propagation
from hydragraph.ir.link import Slices, copy, hand_on, is_all_gather, reduce, stays, sums_stay
from hydragraph.ir.parameter import Bucket

# Home weights are fp32
WEIGHT_BYTES = 4

HomeOf = Callable[[Bucket], Layout]


@dataclass(frozen=True)
class MessageBytes:
    """Bytes that a bucket's pull or push needs on one rank.

    Attributes:
        outgoing: copies for sending.
        handed: copies and received data of sums that first owners send to second owners.
    """

    outgoing: int
    incoming: int
    handed: int = 0


class BucketTraffic:
    def __init__(self, owners: Layout, users: Layout) -> None:
        self.owners = owners
        self.users = users

    @cached_property
    def _weights_stay(self) -> bool:
        return stays(self.owners, self.users)

    @cached_property
    def _sums_stay(self) -> bool:
        return sums_stay(self.users, self.owners)

    def pulled(self, rank: int, ranks: int, itemsize: int) -> MessageBytes:
        owners, users = self.owners, self.users
        incoming = self.pulled_bytes(rank, itemsize)
        shard = owners.local_size(rank)
        if not incoming and self._weights_stay:
            return MessageBytes(0, 0)
        if is_all_gather(owners, users) and len(owners.ranks) == ranks > 1:
            return MessageBytes(0 if itemsize == WEIGHT_BYTES else shard * itemsize, incoming)
        sends, receives = copy(owners, users, rank).of(rank)
        as_it_is = itemsize == WEIGHT_BYTES and _in_order(sends.src_at, sends.hi - sends.lo, shard)
        staged = not _in_order(receives.dst_at, receives.hi - receives.lo, users.local_size(rank))
        if not staged and self._weights_stay:
            # The concatenated or cast home shard provides the weights
            return MessageBytes(0, incoming)
        copied = (0 if as_it_is else sends.elements) + (receives.elements if staged else 0)
        return MessageBytes(copied * itemsize, incoming)

    def pulled_bytes(self, rank: int, itemsize: int) -> int:
        """Return the bytes of pulled weights outside the home shard."""
        size = self.users.local_size(rank)
        if itemsize == WEIGHT_BYTES and self._weights_stay:
            sends, receives = copy(self.owners, self.users, rank).of(rank)
            if _same(sends, self.owners.local_size(rank), receives, size):
                return 0
        return size * itemsize

    def sums_at_home(self, rank: int) -> bool:
        if not self._sums_stay:
            return False
        sends, receives = reduce(self.users, self.owners, rank).of(rank)
        return _same(sends, self.users.local_size(rank), receives, self.owners.local_size(rank))

    def pushed(self, rank: int, itemsize: int = GRADIENT_BYTES) -> MessageBytes:
        if self._sums_stay and not len(self.owners.second.rank):
            return MessageBytes(0, 0)
        sends, receives = reduce(self.users, self.owners, rank).of(rank)
        rounded = itemsize != GRADIENT_BYTES
        as_it_is = not rounded and _in_order(sends.src_at, sends.hi - sends.lo, self.users.local_size(rank))
        leaving, arriving = hand_on(self.owners, rank).of(rank)
        handed = _copied(leaving, leaving.src_at) + _copied(arriving, arriving.dst_at)
        return MessageBytes(
            0 if as_it_is else sends.elements * itemsize,
            (receives.elements if rounded else _copied(receives, receives.dst_at)) * itemsize,
            handed * GRADIENT_BYTES,
        )


class HomeTraffic:
    """Traffic of all buckets under one home.

    Args:
        home_of: returns a bucket's owners, one object for equal owners.
    """

    def __init__(self, buckets: Sequence[Bucket], home_of: HomeOf) -> None:
        self.home_of = home_of
        self._known: dict[object, BucketTraffic] = {}
        self._buckets = buckets
        self.owned = cache(self._owned)

    def of(self, bucket: Bucket, stages: Sequence[tuple[int, ...]], kinds: Sequence[GradientKind]) -> BucketTraffic:
        owners = self.home_of(bucket)
        key = (bucket.form, tuple(stages), tuple(kinds), id(owners))
        if key not in self._known:
            kinds_by_stage = [{parameter.name: kind for parameter in bucket.parameters} for kind in kinds]
            self._known[key] = BucketTraffic(owners, propagation(bucket, stages, kinds_by_stage))
        return self._known[key]

    def _owned(self, rank: int, learning: bool | None = None) -> int:
        layouts = (row for row in self._layouts.items() if learning in (None, row[0][1]))
        return sum(count * owners.local_size(rank) for (owners, _), count in layouts)

    @cached_property
    def _layouts(self) -> Counter[tuple[Layout, bool]]:
        return Counter((self.home_of(bucket), bucket.learns) for bucket in self._buckets)


def _copied(slices: Slices, at: Ints) -> int:
    if not len(slices):
        return 0
    straight = _in_order(at - at[0], slices.hi - slices.lo, slices.elements)
    return 0 if straight else slices.elements


def _same(sends: Slices, source: int, receives: Slices, target: int) -> bool:
    lengths = sends.hi - sends.lo, receives.hi - receives.lo
    return (
        source == target
        and _in_order(sends.src_at, lengths[0], source)
        and _in_order(receives.dst_at, lengths[1], target)
    )


def _in_order(at: Ints, length: Ints, size: int) -> bool:
    return bool((at == length.cumsum() - length).all()) and int(length.sum()) == size
