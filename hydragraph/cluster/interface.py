"""gloo's network interface: by default, that of the host name's address (127.0.1.1 on Debian)."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from hydragraph.cluster.processes.rendezvous_stores import is_loopback, resolved

# Addresses for documentation (RFC 5737, RFC 3849); packets to them would use the default route
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_SIOCGIFADDR = 0x8915


def interface_for(address: str) -> str | None:
    """Return gloo's interface, or None if its default works or none is found."""
    if sys.platform != "linux" or not all(map(is_loopback, resolved(socket.gethostname()))):
        return None
    if address == "localhost" or (address in resolved(address) and is_loopback(address)):
        return None
    for target in (*resolved(address), *_ANYWHERE):
        source = _source(target)
        if source is not None and not is_loopback(source):
            return _name(source)
    return None


def own_address(targets: Iterable[str]) -> str:
    """Return this machine's address on gloo's interface, or on the route to a target."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    chosen = address_of(name) if name else None
    sources = (_source(address) for target in targets for address in resolved(target))
    every = [chosen, *sources]
    return next((s for s in every if s is not None and not is_loopback(s)), next(filter(None, every), "127.0.0.1"))


def _source(target: str) -> str | None:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _name(source: str) -> str | None:
    if ":" in source:
        packed = socket.inet_pton(socket.AF_INET6, source.partition("%")[0]).hex()
        lines = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
        return next((fields[-1] for fields in lines if fields[0] == packed), None)
    return next((name for _, name in socket.if_nameindex() if address_of(name) == source), None)


def address_of(name: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
