"""The election of a leader among machines that share a register: real threads and clocks, no ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hydragraph.cluster.processes.rendezvous_stores import hosted
from hydragraph.cluster.supervision import election as module
from hydragraph.cluster.supervision import leadership
from hydragraph.cluster.supervision.election import Election, LeadershipLost
from hydragraph.cluster.supervision.leadership import LeaseView
from tests.registers import StoreRegister

PATIENCE_S = 30.0


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.fixture
def registers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StoreRegister]]:
    times = {"TTL_S": 1.1, "MARGIN_S": 0.15, "STAGGER_S": 0.05, "FIRST_S": 0.2}
    for name, value in times.items():
        monkeypatch.setattr(leadership, name, value)
    monkeypatch.setattr(module, "_ASK_S", 0.05)
    server = hosted("127.0.0.1", 0)
    yield [StoreRegister.at(server.port) for _ in range(2)]
    del server


@pytest.fixture
def machines(registers: list[StoreRegister]) -> Iterator[list[Election]]:
    elections = [Election(register, number, before=5.0 + number) for number, register in enumerate(registers)]
    yield elections
    for election in elections:
        election._closed.set()


def test_the_next_machine_leads_once_the_first_one_reaches_the_register_no_more(
    registers: list[StoreRegister], machines: list[Election]
) -> None:
    first, second = machines
    until(lambda: first.leads)
    assert not second.leads
    until(lambda: second.standing.lease.term)
    second.join()
    assert second.before == 5.0, "the run had begun"
    ended: list[float] = []
    first.guard(LeaseView.leads, lambda: ended.append(time.monotonic()))
    first.write(place="here", record="the run")
    until(lambda: second.standing.lease.place == "here")
    registers[0].answers = False
    until(lambda: second.leads)
    elected = time.monotonic()
    assert ended, "the first one has not ended its ranks"
    assert ended[0] < elected
    assert second.standing.lease.prior == 0
    assert not second.standing.lease.place
    assert second.record == "the run"
    assert second.standing.lease.before == 5.0
    with pytest.raises(LeadershipLost, match="no longer leads: the register does not answer"):
        first.check()
    registers[0].answers = True
    with pytest.raises(LeadershipLost, match="machine 0 could not renew its lease"):
        first.write(record="another run")
    with pytest.raises(LeadershipLost):
        first.check()
    until(lambda: first.standing.lease.term == 2)
    assert registers[1].read()[1] == "the run"


def test_a_machine_that_resigns_may_lead_again(machines: list[Election]) -> None:
    first, second = machines
    until(lambda: first.leads)
    second._closed.set()
    first.resign()
    assert not first.leads
    until(lambda: first.leads)
    assert (first.standing.lease.term, first.standing.lease.prior) == (2, 0)


def test_the_end_of_a_run_is_told_and_no_one_begins_it_again(machines: list[Election]) -> None:
    first, second = machines
    until(lambda: first.leads)
    until(lambda: second.standing.joined)
    first.end("a full disk")
    until(lambda: second.standing.lease.over == "a full disk")
    time.sleep(0.5)
    assert not second.leads


def test_a_register_that_never_answers_is_reported(
    registers: list[StoreRegister], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_S", 0.2)
    registers[0].answers = False
    with pytest.raises(ConnectionError, match="does not answer"):
        Election(registers[0], 0)


def test_a_machine_that_reaches_no_leader_decides_by_its_own_folder(registers: list[StoreRegister]) -> None:
    first = Election(registers[0], 0, before=5.0)
    until(lambda: first.leads)
    first._closed.set()
    other = Election(registers[1], 0, before=7.0)
    until(lambda: other.leads)
    assert other.standing.lease.before == 7.0
    other._closed.set()
