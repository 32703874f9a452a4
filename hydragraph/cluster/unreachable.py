"""Errors of hosts that cannot reach each other, with gloo's addresses from the store."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import Any

from hydragraph.cluster.interface import address_of
from hydragraph.cluster.processes.rendezvous_stores import resolved
from hydragraph.errors import Unreachable

_KEY = "hydragraph/listening"
_MOST = 4  # hosts that an error lists
TOLD_S = 10.0  # a process that waits for the first host says so after this time
_FAILED = re.compile(r"connectFullMesh failed.*?: (?P<why>[^:]*), remote=\[(?P<address>[^\]]*)\]", re.DOTALL)


def write_addresses(store: Any, rank: int) -> None:
    """Write where this rank can be reached."""
    store.set(f"{_KEY}/{rank}", json.dumps([socket.gethostname(), listening_at()]))


def listening_at() -> str:
    """Return gloo's listening addresses on this host, in words."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        return f"{address_of(name) or 'no address'} on interface {name}"
    host = socket.gethostname()
    return f"{', '.join(resolved(host)) or 'no address'} by the name {host}"


def explained(error: RuntimeError, store: Any, rank: int, ranks: int) -> RuntimeError:
    """Explain a rank's connection error; return others unchanged."""
    failed = _FAILED.search(str(error))
    if failed is None:
        return error
    hosts: dict[tuple[str, str], int] = {}
    for other in range(ranks):
        key = f"{_KEY}/{other}"
        if store.check([key]):
            host, where = json.loads(store.get(key))
            hosts.setdefault((host, where), other)
    listed = [f"rank {first} on {host} listens at {where}" for (host, where), first in hosts.items()]
    more = [f"{len(listed) - _MOST} more hosts"] if len(listed) > _MOST else []
    return Unreachable(
        f"rank {rank} on {socket.gethostname()} could not connect to another rank at {failed['address']}: "
        f"{failed['why']} ({'; '.join([*listed[:_MOST], *more])}). On every host, set GLOO_SOCKET_IFNAME to the "
        "interface that leads to the others (ip -brief address lists them), and let its firewall accept them"
    )


def no_store(error: Exception, address: str, port: int, rank: int) -> str:
    """Return the message "could not connect to the first host", with the reason and what to do."""
    return f"rank {rank} on {socket.gethostname()} could not connect to {first_host(error, address, port)}"


def first_host(error: Exception, address: str, port: int) -> str:
    """Return why a process does not reach the first host, and what to do."""
    tried = resolved(address)
    where = f"tried {', '.join(tried)}" if tried else "the name has no address here"
    reason = " ".join(str(error).split())
    return (
        f"the first host at {address}, port {port} ({where}): {reason[:200]}; let MASTER_ADDR be an address of that "
        "host that this one reaches (ping it), start the job there too, and let its firewall accept the port"
    )
