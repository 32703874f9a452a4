"""Bytes that a rank needs for a bucket's pull or push, in addition to weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.ir.layout import Ints, Layout
from hydragraph.ir.link import Slices, copy, hand_on, is_all_gather, reduce, stays, sums_stay

WEIGHT_BYTES = 4  # home weights are fp32
GRADIENT_BYTES = 4  # gradients are accumulated and pushed in fp32


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of a bucket's exchange on one rank: copies for sending, and received data.

    Attributes:
        outgoing, incoming: bytes of pulled weights, or of gradients sent to first owners.
        handed: outgoing and incoming bytes of gradients sent from first to second owners.
    """

    outgoing: int
    incoming: int
    handed: int = 0


def pulled(owners: Layout, users: Layout, rank: int, ranks: int, itemsize: int) -> MessageBytes:
    """Return the bytes of messages for pulling weights.

    Args:
        owners, users: layouts at home and on the stages.
        itemsize: bytes of an element in transit.
    """
    incoming = pulled_bytes(owners, users, rank, itemsize)
    shard = owners.local_size(rank)
    if not incoming and stays(owners, users):
        return MessageBytes(0, 0)
    if is_all_gather(owners, users) and len(owners.ranks) == ranks > 1:
        return MessageBytes(0 if itemsize == WEIGHT_BYTES else shard * itemsize, incoming)
    sends, receives = copy(owners, users, rank).of(rank)
    as_it_is = itemsize == WEIGHT_BYTES and _in_order(sends.src_at, sends.hi - sends.lo, shard)
    staged = not _in_order(receives.dst_at, receives.hi - receives.lo, users.local_size(rank))
    if not staged and stays(owners, users):
        return MessageBytes(0, incoming)  # the local values, concatenated or cast, are the weights
    copied = (0 if as_it_is else sends.elements) + (receives.elements if staged else 0)
    return MessageBytes(copied * itemsize, incoming)


def pulled_bytes(owners: Layout, users: Layout, rank: int, itemsize: int) -> int:
    """Return the bytes of pulled weights outside the home shard; see `pulled`."""
    if itemsize == WEIGHT_BYTES and stays(owners, users):
        sends, receives = copy(owners, users, rank).of(rank)
        if _same(sends, owners.local_size(rank), receives, users.local_size(rank)):
            return 0  # the home shard itself
    return users.local_size(rank) * itemsize


def sums_at_home(owners: Layout, users: Layout, rank: int) -> bool:
    """Return whether a rank accumulates gradients directly in its home shard; see `pulled`."""
    if not sums_stay(users, owners):
        return False
    sends, receives = reduce(users, owners, rank).of(rank)
    return _same(sends, users.local_size(rank), receives, owners.local_size(rank))


def added_bytes(owners: Layout, users: Layout, rank: int) -> int:
    """Return the bytes of sums that are added to those of earlier pushes; see `pulled`."""
    if sums_at_home(owners, users, rank):
        return 0
    return GRADIENT_BYTES * owners.first.local_size(rank)


def pushed(owners: Layout, users: Layout, rank: int, itemsize: int = GRADIENT_BYTES) -> MessageBytes:
    """Return the bytes of messages for pushing gradients; see `pulled`."""
    if sums_stay(users, owners) and not len(owners.second.rank):
        return MessageBytes(0, 0)
    sends, receives = reduce(users, owners, rank).of(rank)
    rounded = itemsize != GRADIENT_BYTES
    as_it_is = not rounded and _in_order(sends.src_at, sends.hi - sends.lo, users.local_size(rank))
    leaving, arriving = hand_on(owners, rank).of(rank)
    handed = _copied(leaving, leaving.src_at) + _copied(arriving, arriving.dst_at)
    return MessageBytes(
        0 if as_it_is else sends.elements * itemsize,
        (receives.elements if rounded else _copied(receives, receives.dst_at)) * itemsize,
        handed * GRADIENT_BYTES,
    )


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
    """Return whether slices at `at`, in order, fill a buffer of `size` elements."""
    return bool((at == length.cumsum() - length).all()) and int(length.sum()) == size
