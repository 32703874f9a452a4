"""The first fault stands, whoever asks, and a store that is gone reads as no fault."""

from __future__ import annotations

import json
from dataclasses import replace

import torch.distributed as dist

from hydragraph.runtime.failure.ledger import Fault, Ledger, announce_death, last_fault


def test_the_first_fault_stands() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert last_fault(store) is None
    store.set("hydragraph/watch", "hydragraph/test")
    assert last_fault(store) is None
    announce_death(store, 2, "killed")
    announce_death(store, 1, "killed later")
    assert json.loads(store.get("hydragraph/death")) == [2, "killed"]
    fault = Fault(2, 5, "push", "killed")
    ledger = Ledger(store, "hydragraph/test")
    assert ledger.write(fault) == fault
    assert ledger.write(replace(fault, rank=1)) == fault
    assert last_fault(store) == fault
    assert ledger.death() == (2, "killed")


class Gone:
    """A store whose host has died; counts how often it is asked."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        raise RuntimeError("Connection reset by peer")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise AssertionError("a store that is known to be gone is asked again")


def test_a_store_that_is_gone_is_asked_once() -> None:
    store, fault = Gone(), Fault(1, 2, "pull", "killed")
    ledger = Ledger(store, "hydragraph/test")  # type: ignore[arg-type]
    assert ledger.read() is None
    assert ledger.death() is None
    assert ledger.write(fault) == fault
    assert store.asked == 1
