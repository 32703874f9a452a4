"""The interface for gloo: this host's own one where its name leads to 127.0.1.1, and gloo's own choice elsewhere."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from hydragraph.cluster import interface
from hydragraph.cluster.interface import interface_for, own_address
from hydragraph.cluster.rendezvous import member

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo chooses")
NAMES = {"own": ["127.0.1.1"], "first": ["10.0.0.1"]}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set up a host called `own`; return the addresses that it sends from, by target."""
    routes = {"10.0.0.1": "10.0.0.2", "127.0.1.1": "127.0.0.1", "192.0.2.1": "10.0.0.3"}
    interfaces = {"10.0.0.2": "eth1", "10.0.0.3": "eth0"}
    monkeypatch.setattr(socket, "gethostname", lambda: "own")
    monkeypatch.setattr(interface, "resolved", lambda name: NAMES.get(name, [name]))
    monkeypatch.setattr(interface, "_source", routes.get)
    monkeypatch.setattr(interface, "_name", interfaces.get)
    return routes


def test_the_interface_towards_the_first_machine(host: dict[str, str]) -> None:
    assert interface_for("first") == interface_for("10.0.0.1") == "eth1"


def test_the_first_machine_itself_uses_the_default_route(host: dict[str, str]) -> None:
    assert interface_for("own") == "eth0"
    del host["192.0.2.1"]
    assert interface_for("own") is None, "it has no route to anywhere"


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_ranks_of_one_machine_need_none(host: dict[str, str], address: str) -> None:
    assert interface_for(address) is None


def test_gloo_chooses_where_the_own_name_is_good(host: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "own", ["10.0.0.2"])
    assert interface_for("first") is None


def test_an_interface_is_found_by_its_address() -> None:
    assert interface._source("127.0.0.1") == "127.0.0.1"
    assert interface._name("127.0.0.1") == "lo"
    assert interface._name("192.0.2.77") is None


@pytest.mark.parametrize(
    ("ranks_here", "chosen", "used"), [("1", None, "eth1"), ("2", None, None), ("1", "wlan0", "wlan0")]
)
def test_ranks_of_several_machines_tell_gloo(
    host: dict[str, str], ranks_here: str, chosen: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"MASTER_ADDR": "first", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": ranks_here}
    if chosen is not None:
        environment["GLOO_SOCKET_IFNAME"] = chosen
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "wlan0")])
    member._choose_interface()
    assert environment.get("GLOO_SOCKET_IFNAME") == used


def test_an_interface_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME is eth99: no such interface here; use .*lo"):
        member._choose_interface()


def test_the_address_of_this_host_is_the_one_that_others_reach(
    host: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_address(["127.0.1.1", "first"]) == "10.0.0.2"
    assert own_address(["127.0.1.1"]) == "127.0.0.1"
    assert own_address(["nowhere"]) == "127.0.0.1"
    monkeypatch.setattr(interface, "address_of", {"eth7": "10.0.0.7"}.get)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert own_address(["first"]) == "10.0.0.7"
