"""Probes of three machines, which are three sockets of this one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from hydragraph.cluster.supervision import link_probe
from hydragraph.cluster.supervision.link_probe import Address, LinkProbe

TAG = b"run"


class Machine:
    """A probe, and what it has reported."""

    def __init__(self, number: int) -> None:
        self.told: list[tuple[int, ...]] = []
        self.probe = LinkProbe(number, "127.0.0.1", self.told.append)

    def tells(self, nodes: tuple[int, ...]) -> None:
        end = time.monotonic() + 20
        while self.told[-1:] != [nodes]:
            assert time.monotonic() < end, self.told
            time.sleep(0.01)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Machine]]:
    monkeypatch.setattr(link_probe, "UNHEARD_S", 0.4)
    monkeypatch.setattr(link_probe, "_SEND_S", 0.05)
    monkeypatch.setattr(link_probe, "_WAIT_S", 0.02)
    made = {number: Machine(number) for number in (1, 2, 3)}
    yield made
    for machine in made.values():
        machine.probe.close()


def addresses(machines: dict[int, Machine]) -> dict[int, Address]:
    return {number: machine.probe.address for number, machine in machines.items()}


@pytest.fixture
def nowhere() -> Iterator[Address]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        yield silent.getsockname()


def test_a_machine_that_is_no_longer_heard_is_reported_and_so_is_its_return(
    machines: dict[int, Machine], nowhere: Address
) -> None:
    there = addresses(machines)
    for machine in machines.values():
        machine.probe.aim(there, TAG)
    time.sleep(0.2)
    machines[3].probe.aim(there | {2: nowhere}, TAG)
    machines[2].tells((3,))
    machines[3].probe.aim(there, TAG)
    machines[2].tells(())
    assert machines[1].told == machines[3].told == []


def test_machines_that_were_never_heard_and_strangers_are_not_judged(
    machines: dict[int, Machine], nowhere: Address
) -> None:
    there = addresses(machines)
    machines[1].probe.aim({2: nowhere, 3: nowhere}, TAG)
    machines[2].probe.aim(there, b"another")
    machines[3].probe.aim({}, TAG)
    time.sleep(0.7)
    assert machines[1].told == [], "a firewall may stop datagrams"
