"""UDP probes between machines that do not lead."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping

from hydragraph.cluster.failure.failure_detector import Stopwatch
from hydragraph.cluster.failure.time_limits import UNHEARD_S

_SEND_S = 0.25
_WAIT_S = 0.1

# Host and port
Address = tuple[str, int]


class LinkProbe:
    """Thread that exchanges datagrams with other machines.

    Args:
        tell: called with the machines silent for `UNHEARD_S`, whenever the set changes.
    """

    def __init__(self, number: int, host: str, tell: Callable[[tuple[int, ...]], None]) -> None:
        self._number = number
        self._tell = tell
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._socket.settimeout(_WAIT_S)
        self.address: Address = self._socket.getsockname()[:2]
        self._peers: Mapping[int, Address] = {}
        self._tag = b""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hydragraph-probe", daemon=True)
        self._thread.start()

    def aim(self, peers: Mapping[int, Address], tag: bytes) -> None:
        self._tag = tag
        self._peers = {node: address for node, address in peers.items() if node != self._number}

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        # By machine that has sent a probe before
        silent_s: dict[int, float] = {}
        unheard: tuple[int, ...] = ()
        stopwatch = Stopwatch()
        sent = 0.0
        while not self._closed.is_set():
            heard = self._heard()
            # After a pause of this process, datagrams wait or were dropped.
            elapsed = stopwatch.elapsed()
            silent_s = {node: seconds + elapsed for node, seconds in silent_s.items()} | dict.fromkeys(heard, 0.0)
            silent_nodes = tuple(sorted(node for node, seconds in silent_s.items() if seconds >= UNHEARD_S))
            if silent_nodes != unheard:
                unheard = silent_nodes
                self._tell(unheard)
            if time.monotonic() - sent >= _SEND_S:
                sent = time.monotonic()
                for address in list(self._peers.values()):
                    with contextlib.suppress(OSError):  # no route
                        self._socket.sendto(self._tag + str(self._number).encode(), address)

    def _heard(self) -> set[int]:
        heard = set()
        with contextlib.suppress(OSError):
            data = self._socket.recv(256)
            self._socket.setblocking(False)
            while True:
                node = data.removeprefix(self._tag)
                if self._tag and data.startswith(self._tag) and node.isdigit() and int(node) in self._peers:
                    heard.add(int(node))
                data = self._socket.recv(256)
        self._socket.settimeout(_WAIT_S)
        return heard
