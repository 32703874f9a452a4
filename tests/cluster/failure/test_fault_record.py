"""All readers get the first fault."""

from __future__ import annotations

import json
from dataclasses import replace

import torch.distributed as dist

from hydragraph.cluster.failure.fault_record import Fault, FaultRecord, announce_death, last_fault, root


def test_the_first_fault_stands() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert last_fault(store) is None
    store.set("hydragraph/watch", "hydragraph/test")
    assert last_fault(store) is None
    announce_death(store, 2, "killed")
    announce_death(store, 1, "killed later")
    assert json.loads(store.get("hydragraph/death")) == [2, "killed"]
    fault = Fault(2, 5, "push", "killed", "a-host", stalled=True, index=3)
    ledger = FaultRecord(store, "hydragraph/test")
    assert ledger.read() is None
    assert ledger.write(fault) == fault
    assert ledger.write(replace(fault, rank=1)) == fault
    assert last_fault(store) == ledger.read() == fault
    assert ledger.death() == (2, "killed")


def test_the_store_beneath_all_prefixes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    prefixed = dist.PrefixStore("b", dist.PrefixStore("a", store))
    root(prefixed).set("key", "value")
    assert store.get("key") == b"value"
