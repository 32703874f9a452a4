"""This process's open sockets."""

from __future__ import annotations

import os
import socket


def open_sockets() -> frozenset[tuple[int, str]]:
    """Return (descriptor, inode) of each open socket, if known."""
    sockets: set[tuple[int, str]] = set()
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    for descriptor in descriptors:
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if name.startswith("socket:"):
            sockets.add((int(descriptor), name))
    return frozenset(sockets)


def shut_down(descriptor: int) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            # Shutting down a listener would make gloo's accept fail and end the process.
            listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not listening:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
