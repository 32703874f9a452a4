"""Ranks that meet again in the same processes: a world of those that are left, or that have come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from hydragraph.cluster.launch import World, join
from hydragraph.cluster.processes.rank_process import HOST
from hydragraph.cluster.rendezvous.member import meet


def regroup(number: int, members: Sequence[int]) -> World | None:
    """Meet in a world of some of the launched ranks, in this order; None for one that is not among them.

    Args:
        number: of the world, from 1: a name of its own in the launcher's store.
        members: ranks of the launcher, by rank of the new world.
    """
    own = int(os.environ["RANK"])
    if dist.is_initialized():
        dist.destroy_process_group()
    if own not in members:
        return None
    store = dist.TCPStore(HOST, int(os.environ["MASTER_PORT"]), None, False, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=60))
    meet("gloo", dist.PrefixStore(f"world-{number}", store), members.index(own), len(members))
    return join("cpu")
