"""The register in etcd; with a server where one is installed."""

from __future__ import annotations

import builtins
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydragraph.cluster.supervision.etcd_register import EtcdRegister, register_of


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[int]:
    """Yield the port of a member."""
    pytest.importorskip("etcd3gw")
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd on PATH: apt-get install etcd-server")
    port, peers = free(), f"http://127.0.0.1:{free()}"
    clients = f"http://127.0.0.1:{port}"
    command = ["etcd", "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", clients]
    command += ["--advertise-client-urls", clients, "--listen-peer-urls", peers]
    command += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                register_of(f"etcd://127.0.0.1:{port}", "ready").read()
            except ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                break
        yield port
    finally:
        server.kill()
        server.wait()


def test_a_lease_is_replaced_only_if_it_is_the_expected_one(etcd: int) -> None:
    url = f"etcd://127.0.0.1:{free()},127.0.0.1:{etcd}"  # the first member is lost
    one, other, stranger = register_of(url, "run"), register_of(url, "run"), register_of(url, "another run")
    assert one.read() == ("", "")
    assert one.swap("", "lease 1")
    assert not other.swap("", "lease of another")
    assert other.swap("lease 1", "lease 2", "record")
    assert one.read() == ("lease 2", "record")
    assert one.swap("lease 2", "lease 3")
    assert other.read() == ("lease 3", "record")
    assert stranger.read() == ("", "")


def test_members_that_do_not_answer_are_named() -> None:
    pytest.importorskip("etcd3gw")
    one, other = free(), free()
    register = register_of(f"etcd://127.0.0.1:{one},127.0.0.1:{other}", "run", first=1)
    with pytest.raises(
        ConnectionError,
        match=rf"etcd does not answer \(tried 127.0.0.1:{other}: .*; 127.0.0.1:{one}: .*start a majority",
    ):
        register.read()


def test_addresses_are_names_or_numbers_with_or_without_a_port() -> None:
    pytest.importorskip("etcd3gw")
    register = register_of("etcd://a,10.0.0.1:23790,[::1]:5,[fe80::1]/", "run")
    assert register.endpoints == (("a", 2379), ("10.0.0.1", 23790), ("::1", 5), ("fe80::1", 2379))


@pytest.mark.parametrize("url", ["a,b", "etcd://", "etcd://a,,b", "redis://a", "etcd://a/b", "etcd://a:x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"--store .*: "):
        register_of(url, "run")


def test_a_missing_client_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "etcd3gw":
            raise ImportError("No module named 'etcd3gw'")
        return load(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'hydragraph\[etcd\]'"):
        EtcdRegister([("a", 1)], "run")
