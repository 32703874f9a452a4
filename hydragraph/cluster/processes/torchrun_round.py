"""Rendezvous round under torchrun, whose store still has the values of earlier attempts.

1. Rank r writes a new random word at `joining/r`.
2. Rank 0 proposes a name with all ranks' words. If a word changes, its rank was restarted, and rank 0 proposes a new
   name.
3. Rank r writes `agreed/NAME/r` if the proposal contains its word and so is not from an earlier attempt.
4. After all ranks have agreed, rank 0 confirms the name.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_POLL_S = 0.02


def generation(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    word = uuid.uuid4().hex
    store.set(f"joining/{rank}", word)
    limit = _Limit(timeout)
    return _propose(store, ranks, limit) if rank == 0 else _follow(store, rank, word, limit)


class _Limit:
    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout.total_seconds()

    def wait(self, missed: str) -> None:
        if time.monotonic() > self._end:
            after = f"after {self._timeout.total_seconds():g} s"
            raise TimeoutError(f"join: {missed} {after}: read the ranks' output, and start all ranks again")
        time.sleep(_POLL_S)


def _propose(store: Store, ranks: int, limit: _Limit) -> str:
    name = ""
    words = [""]
    while True:
        # current, words: each rank's word now and in the newest proposal; "" if
        #   absent
        current = [_get(store, f"joining/{rank}") for rank in range(ranks)]
        if current != words:
            name = uuid.uuid4().hex
            words = current
            if all(words):
                store.set("proposal", json.dumps([name, words]))
        missing = [rank for rank in range(1, ranks) if not store.check([f"agreed/{name}/{rank}"])]
        if not missing and all(words):
            store.set("confirmed", name)
            return name
        limit.wait(f"ranks {missing} have not arrived")


def _follow(store: Store, rank: int, word: str, limit: _Limit) -> str:
    agreed = ""
    while True:
        name, words = json.loads(_get(store, "proposal") or '["", []]')
        if name != agreed and rank < len(words) and words[rank] == word:
            agreed = name
            store.set(f"agreed/{name}/{rank}", "")
        if agreed and (confirmed := _get(store, "confirmed")) == agreed:
            return confirmed
        limit.wait("rank 0 has not confirmed that all ranks have arrived" if agreed else "rank 0 has not arrived")


def _get(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
