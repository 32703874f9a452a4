"""Stores that processes meet at: kept by this one, or by another."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def hosted(address: str, port: int) -> Any:
    """Return a store that this process keeps, and that listens at one address; TCPStore by itself listens at all.

    Args:
        address: a name or address of this host, at which the others find it.
        port: where to listen; 0: at any port that is free.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(where[:2], family=family)
    except OSError:  # the address is one that others know this host by
        return dist.TCPStore(address, port, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def client(address: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> Any:
    """Return a client of a store that another process keeps.

    Args:
        timeout: for the connection, and for values that are not there yet.
    """
    return dist.TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
