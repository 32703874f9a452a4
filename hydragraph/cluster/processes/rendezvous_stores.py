"""Rendezvous stores, hosted by this process or another."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def hosted(address: str, port: int) -> Any:
    listener = listening(address, port)
    place = (address, listener.getsockname()[1])
    return dist.TCPStore(*place, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def listening(address: str, port: int, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at the address that other processes use for this host.

    It listens on all addresses if others may resolve the name differently, because the name has several addresses, a
    loopback address (Debian maps a host's own name to 127.0.1.1), or a gateway's.

    Args:
        port: port number, or 0 for any free port.
    """
    addresses = resolved(address)
    one = len(addresses) == 1 and (address in addresses or not is_loopback(addresses[0]))
    if one or (addresses and address == "localhost"):
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        with suppress(OSError):
            return socket.create_server((addresses[0], port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        # Fails if the kernel's IPv6 is disabled
        with suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def resolved(address: str) -> list[str]:
    try:
        every = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(where[0]) for _, _, _, _, where in every))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def client(address: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> Any:
    """Return a client; `timeout` limits the wait for a connection, and for a missing value."""
    return dist.TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False)
