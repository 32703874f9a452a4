"""Error messages for machines that cannot reach each other."""

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
_MOST = 4
# Time until a process logs that it waits for the first machine
TOLD_S = 10.0
_FAILED = re.compile(r"connectFullMesh failed.*?: (?P<why>[^:]*), remote=\[(?P<address>[^\]]*)\]", re.DOTALL)


def write_addresses(store: Any, rank: int) -> None:
    store.set(f"{_KEY}/{rank}", json.dumps([socket.gethostname(), listening_at()]))


def listening_at() -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        return f"{address_of(name) or 'no address'} on interface {name}"
    host = socket.gethostname()
    return f"{', '.join(resolved(host)) or 'no address'} for the name {host}"


def explained(error: RuntimeError, store: Any, rank: int, ranks: int) -> RuntimeError:
    failed = _FAILED.search(str(error))
    if failed is None:
        return error
    # hosts: (host, listening address) -> lowest rank there
    hosts: dict[tuple[str, str], int] = {}
    for other in range(ranks):
        key = f"{_KEY}/{other}"
        if store.check([key]):
            host, where = json.loads(store.get(key))
            hosts.setdefault((host, where), other)
    listed = [f"rank {first} on {host} listens at {where}" for (host, where), first in hosts.items()]
    more = [f"{len(listed) - _MOST} more machines"] if len(listed) > _MOST else []
    return Unreachable(
        f"rank {rank} on {socket.gethostname()} could not connect to another rank at {failed['address']}: "
        f"{failed['why']} ({'; '.join([*listed[:_MOST], *more])}). On every machine, set GLOO_SOCKET_IFNAME to "
        "the interface that reaches the other machines (ip -brief address lists the interfaces), and open the "
        "firewall to them"
    )


def no_store(error: Exception, address: str, port: int, rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()} could not connect to {first_host(error, address, port)}"


def first_host(error: Exception, address: str, port: int) -> str:
    tried = resolved(address)
    where = f"tried {', '.join(tried)}" if tried else "this machine cannot resolve the name"
    reason = " ".join(str(error).split())
    return (
        f"the first machine at {address}, port {port} ({where}): {reason[:200]}; set MASTER_ADDR to an address of the "
        "first machine that this machine can ping, start the job there too, and open the port in its firewall"
    )
