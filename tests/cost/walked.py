"""A rank's peak memory by one walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.rank_memory import Memory, MemoryWalk
from hydragraph.cost.traffic_bytes import HomeTraffic
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

if TYPE_CHECKING:
    from hydragraph.cost.rank_memory import Blocks


def rank_memory(
    blocks: Blocks,
    strategy: Strategy,
    micro_batches: Sequence[Sequence[MicroBatch]],
    rank: int,
    ranks: int,
    messages: bool = True,
    home: Home | None = None,
    over: Mapping[int, Sequence[str]] | None = None,
) -> Memory:
    """Return a rank's peak in one training iteration; for the arguments, see `MemoryWalk`."""
    traffic = HomeTraffic(blocks.buckets, HomeLayouts(home or Home(), ranks).of)
    return MemoryWalk(
        blocks, strategy, micro_batches, rank, ranks, messages=messages, traffic=traffic, over=over
    ).peak()
