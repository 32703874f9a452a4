"""Register in etcd: the leader's lease, and the record that the next leader continues from."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol

_PORT = 2379
_ASK_S = 1.0
_SCHEME = "etcd://"


class Register(Protocol):
    """Two texts that survive the loss of any machine; methods raise a ConnectionError if no answer arrives."""

    def read(self) -> tuple[str, str]:
        """Return the lease and the record, each "" if never written."""

    def swap(self, expected: str, lease: str, record: str | None = None) -> bool:
        """If the lease equals `expected`, replace it (and the record, if given) and return True; else return False."""


class EtcdRegister:
    """Register over etcd's HTTP gateway; `endpoints` are the members' hosts and ports."""

    def __init__(self, endpoints: Sequence[tuple[str, int]], run: str) -> None:
        try:
            import requests
            from etcd3gw import Etcd3Client
            from etcd3gw.exceptions import Etcd3Exception
        except ImportError as error:
            raise ImportError(f"--store needs an etcd client ({error}): pip install 'hydragraph[etcd]'") from None
        self.endpoints = tuple(endpoints)
        self._errors = (Etcd3Exception, requests.RequestException)
        self._clients: list[Any] = []
        for host, port in endpoints:
            session = requests.Session()
            # No web proxies
            session.trust_env = False
            self._clients.append(Etcd3Client(host, port, timeout=_ASK_S, session=session))
        self._asking = threading.Lock()
        name = hashlib.sha256(run.encode()).hexdigest()[:16]
        self._lease = _coded(f"/hydragraph/{name}/lease")
        self._record = _coded(f"/hydragraph/{name}/record")

    def read(self) -> tuple[str, str]:
        keys = (self._lease, self._record)
        answer = self._ask({"compare": [], "success": [{"request_range": {"key": key}} for key in keys], "failure": []})
        lease, record = (_value(response["response_range"]) for response in answer["responses"])
        return lease, record

    def swap(self, expected: str, lease: str, record: str | None = None) -> bool:
        # In etcd, version 0 means never written.
        condition: dict[str, Any] = {"key": self._lease, "result": "EQUAL", "target": "VERSION", "version": 0}
        if expected:
            condition = {"key": self._lease, "result": "EQUAL", "target": "VALUE", "value": _coded(expected)}
        values = {self._lease: lease} | ({} if record is None else {self._record: record})
        puts = [{"request_put": {"key": key, "value": _coded(value)}} for key, value in values.items()]
        return bool(self._ask({"compare": [condition], "success": puts, "failure": []}).get("succeeded", False))

    def _ask(self, transaction: dict[str, Any]) -> dict[str, Any]:
        failures = []
        with self._asking:
            for client in list(self._clients):
                try:
                    answer: dict[str, Any] = client.transaction(transaction)
                except self._errors as error:
                    failures.append(f"{client.host}:{client.port}: {type(error).__name__}")
                    # Ask this member last from now on, because requests wait for it.
                    self._clients.append(self._clients.pop(0))
                else:
                    return answer
        raise ConnectionError(
            f"etcd does not answer (tried {'; '.join(failures)}): start a majority of its members, and check the "
            "addresses of --store"
        )


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _value(answer: dict[str, Any]) -> str:
    return base64.b64decode(answer["kvs"][0].get("value", "")).decode() if answer.get("kvs") else ""


def register_of(url: str, run: str, first: int = 0) -> EtcdRegister:
    """Return the register of a run.

    Args:
        url: `etcd://` and the members' addresses, separated by commas.
        first: index of the member to ask first.
    """
    addresses = url.removeprefix(_SCHEME).rstrip("/").split(",")
    if not url.startswith(_SCHEME) or not all(addresses) or "/" in "".join(addresses):
        raise ValueError(
            f"--store {url}: write the addresses of etcd's members, as in etcd://10.0.0.1,10.0.0.2,10.0.0.3"
        )
    first %= len(addresses)
    return EtcdRegister([_endpoint(address, url) for address in [*addresses[first:], *addresses[:first]]], run)


def _endpoint(address: str, url: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":") if not address.endswith("]") else (address, "", "")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = address, str(_PORT)
    if not port.isdecimal():
        raise ValueError(f"--store {url}: the port of {address} is not a number: write one, such as 2379")
    return host.strip("[]"), int(port)
