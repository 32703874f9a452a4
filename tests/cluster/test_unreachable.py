"""Errors of hosts that cannot reach each other, from made-up stores and from a closed port."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from hydragraph.cluster import launch
from hydragraph.cluster.unreachable import explained, listening_at, write_addresses
from hydragraph.errors import Unreachable

GLOO = (
    "Gloo connectFullMesh failed with [/pytorch/gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: "
    "Connection refused, remote=[127.0.1.1]:12192$1"
)


def test_a_rank_that_cannot_connect_names_addresses_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for rank in (0, 1):
        write_addresses(store, rank)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("hydragraph.cluster.unreachable.resolved", lambda name: ["127.0.1.1"])
    write_addresses(store, 2)
    error = explained(RuntimeError(GLOO), store, 2, 4)
    assert isinstance(error, Unreachable)
    assert str(error).startswith(
        "rank 2 on node1 could not connect to another rank at 127.0.1.1: Connection refused (rank 0 on node0 listens "
        "at 127.0.0.1 on interface lo; rank 2 on node1 listens at 127.0.1.1 for the name node1). On every machine, set "
        "GLOO_SOCKET_IFNAME"
    )


def test_other_errors_stay_as_they_are() -> None:
    error = RuntimeError("another")
    assert explained(error, dist.HashStore(), 0, 2) is error


def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert listening_at() == "no address on interface none0"


def test_the_first_rank_tells_which_rank_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    store.set("hydragraph/here/1", "")
    monkeypatch.setattr(launch, "TOLD_S", -1.0)
    monkeypatch.setattr("time.sleep", lambda seconds: store.set("hydragraph/here/2", ""))
    launch._wait_for_ranks(store, 3, "127.0.0.1:29616")
    (warning,) = caplog.records
    assert warning.getMessage() == "rank 0 waits at 127.0.0.1:29616 for 1 of 3 ranks, including rank 2"


def test_a_first_host_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(launch, "_REACHED_S", 0.3)
    monkeypatch.setattr(launch, "TOLD_S", 0.0)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConnectionError, match=rf"rank 1 on .* first machine at localhost, port {port} \(tried .*127\.0"
    ):
        launch.join("cpu")
    (warning,) = caplog.records
    assert warning.getMessage().startswith(f"rank 1 waits for the first machine at localhost, port {port} (tried ")
