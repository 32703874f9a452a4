"""Stores that processes meet at."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any

import pytest

from hydragraph.cluster.processes.rendezvous_stores import client, hosted, listening

V4, V6, SELF = "127.0.0.1", "::1", "127.0.1.1"


def names(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    """Let names have these addresses, as in a file of hosts."""
    known = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        return [entry for where in addresses.get(host, [host]) for entry in known(where, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def reached(listener: socket.socket) -> set[str]:
    """Return the addresses of this host that connect to a socket."""
    found = set()
    for address in (V4, V6, SELF):
        try:
            socket.create_connection((address, listener.getsockname()[1]), timeout=5).close()
            found.add(address)
        except OSError:
            pass
    return found


needs_v6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")


def test_a_client_reads_what_the_host_of_a_store_writes() -> None:
    kept = hosted("127.0.0.1", 0)
    kept.set("key", "value")
    reader = client("127.0.0.1", kept.port, timedelta(seconds=5))
    assert reader.get("key") == b"value"
    reader.set("other", "word")
    assert kept.get("other") == b"word"


@pytest.mark.parametrize("address", [V4, SELF, pytest.param(V6, marks=needs_v6)])
def test_an_address_is_listened_on_alone(address: str) -> None:
    with listening(address, 0) as listener:
        assert reached(listener) == {address}


@needs_v6
@pytest.mark.parametrize(
    "addresses",
    [
        pytest.param([SELF], id="Debian's own name"),
        pytest.param([V6], id="own name, IPv6"),
        pytest.param([V4, V6], id="several"),
        pytest.param(["192.0.2.1"], id="a gateway's"),
        pytest.param([], id="unknown here"),
    ],
)
def test_a_name_that_others_may_resolve_otherwise_is_listened_for_everywhere(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, first=addresses)
    with listening("first", 0, backlog=2) as listener:
        assert reached(listener) == {V4, V6, SELF}


def test_localhost_is_not_listened_for_everywhere() -> None:
    with listening("localhost", 0) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]).is_loopback


@needs_v6
def test_a_store_of_a_host_that_has_only_ipv6() -> None:
    kept = hosted(V6, 0)
    kept.set("key", "value")
    assert client(V6, kept.port, timedelta(seconds=5)).get("key") == b"value"
