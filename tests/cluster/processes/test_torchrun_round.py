"""Ranks that start together agree on a name, whatever earlier attempts left in their store."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hydragraph.cluster.processes.torchrun_round import generation
from tests.thorough import first

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.1)


def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class Rank(threading.Thread):
    """A rank that joins, some time after it was started."""

    def __init__(
        self, store: dist.TCPStore, rank: int, ranks: int, after_s: float = 0.0, limit: timedelta = LONG
    ) -> None:
        super().__init__()
        self.client = dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        self.rank, self.ranks, self.after_s, self.limit = rank, ranks, after_s, limit
        self.name_found, self.error = "", ""
        self.start()

    def run(self) -> None:
        time.sleep(self.after_s)
        try:
            self.name_found = generation(self.client, self.rank, self.ranks, self.limit)
        except TimeoutError as error:
            self.error = str(error)


def together(store: dist.TCPStore, ranks: int, seed: int) -> str:
    draw = random.Random(seed)
    started = [Rank(store, rank, ranks, draw.random() / 30) for rank in range(ranks)]
    for each in started:
        each.join()
    (name,) = {each.name_found for each in started}
    assert name, [each.error for each in started]
    return name


@pytest.mark.parametrize("ranks", first([1, 5], [1, 2, 5]))
def test_every_attempt_has_a_name_of_its_own(ranks: int) -> None:
    store = server()
    assert len({together(store, ranks, seed) for seed in range(4)}) == 4


@pytest.mark.parametrize("arrived", first([{0, 2}, {1, 2}], [{0}, {1}, {0, 2}, {1, 2}]))
def test_an_attempt_that_failed_while_it_started_confuses_nobody(arrived: set[int]) -> None:
    store = server()
    together(store, 3, 0)
    failed = [Rank(store, rank, 3, limit=SHORT) for rank in arrived]
    for each in failed:
        each.join()
        assert "start all ranks again" in each.error
    assert together(store, 3, 1)


def test_a_rank_that_is_started_again_while_the_others_wait() -> None:
    store = server()
    others = [Rank(store, rank, 3) for rank in (0, 2)]
    died = Rank(store, 1, 3, limit=timedelta(0))  # it registers once and then stops
    died.join()
    time.sleep(0.2)
    again = Rank(store, 1, 3)
    for each in (*others, again):
        each.join()
    assert {each.name_found for each in others} == {again.name_found}


def test_who_is_missing_is_named() -> None:
    store = server()
    one, other = Rank(store, 0, 3, limit=SHORT), Rank(store, 2, 3, limit=SHORT)
    one.join()
    other.join()
    assert "ranks [1, 2] have not arrived" in one.error
    assert "rank 0 has not arrived" in other.error
