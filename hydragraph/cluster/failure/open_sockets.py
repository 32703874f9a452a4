"""Open sockets of this process, and shutdown of connections."""

from __future__ import annotations

import os
import socket


def open_sockets() -> frozenset[tuple[int, str]]:
    """Return the open sockets as (descriptor, inode); empty if unknown."""
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
    """Shut down a connection without closing its descriptor."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            # Listeners are skipped: if a listener is shut down, gloo's accept fails and ends the process.
            listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not listening:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
