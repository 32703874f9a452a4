"""Ranks enter the roll in any order, and each sees those of its machine."""

from __future__ import annotations

import torch.distributed as dist

from hydragraph.cluster.failure.process_liveness import WatchedProcess
from hydragraph.cluster.failure.rank_registry import RankEntry, RankRegistry


def test_ranks_of_two_machines() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    here, there = RankRegistry(store, "ns", "machine|1"), RankRegistry(store, "ns", "machine|2")
    assert here.members() == here.machines() == ()
    members = [RankEntry(rank, f"host{rank}", WatchedProcess(100 + rank, rank)) for rank in range(4)]
    assert here.enter(members[2])
    assert not here.enter(members[0])
    assert there.enter(members[3])
    assert here.members() == (members[2], members[0])
    assert not there.enter(members[1])
    assert there.members() == (members[3], members[1])
    assert here.members() == (members[2], members[0])
    assert here.machines() == there.machines() == ("machine|1", "machine|2")
    assert RankRegistry(store, "another", "machine|1").members() == ()


def test_the_first_makes_the_board_and_the_others_open_it() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    roll = RankRegistry(store, "ns", "machine")
    first, second = roll.board(2), roll.board(2)
    assert first.address == second.address
    first.place(1, 4, 2)
    assert second.read(1).step == 4
    other = RankRegistry(store, "ns", "other").board(2)
    assert other.address != first.address
    for board in (first, second, other):
        board.close()
