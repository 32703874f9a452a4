"""Connections of this process are listed and ended, while listeners and what was closed are left alone."""

from __future__ import annotations

import socket
import sys

import pytest

from hydragraph.cluster.failure.open_sockets import open_sockets, shut_down

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems list no sockets")


def test_a_connection_is_listed_and_ended_for_both_sides() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    before = open_sockets()
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    opened = open_sockets() - before
    assert {descriptor for descriptor, _ in opened} == {client.fileno(), server.fileno()}
    shut_down(client.fileno())
    assert client.recv(1) == server.recv(1) == b""
    assert client.fileno() >= 0, "the descriptor stays its owner's"
    for each in (client, server):
        each.close()
    assert not open_sockets() & opened


def test_listeners_and_closed_descriptors_are_left_alone() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    shut_down(listener.fileno())
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    descriptor = client.fileno()
    client.close()
    shut_down(descriptor)
    server.close()
    listener.close()
