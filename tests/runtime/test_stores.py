"""Stores that processes meet at."""

from __future__ import annotations

from datetime import timedelta

from hydragraph.runtime.stores import client, hosted


def test_a_client_reads_what_the_host_of_a_store_writes() -> None:
    kept = hosted("127.0.0.1", 0)
    kept.set("key", "value")
    reader = client("127.0.0.1", kept.port, timedelta(seconds=5))
    assert reader.get("key") == b"value"
    reader.set("other", "word")
    assert kept.get("other") == b"word"
