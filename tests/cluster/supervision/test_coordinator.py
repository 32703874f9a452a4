"""The leader and the deputies of other machines: who may come, what they tell, and how a loss is noticed."""

from __future__ import annotations

import json
import multiprocessing.connection
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cluster.processes.launched_ranks import outcome_of, private_folder
from hydragraph.cluster.processes.rank_process import Died, Returned, Seat, Start
from hydragraph.cluster.processes.rendezvous_stores import hosted
from hydragraph.cluster.supervision import broken_links
from hydragraph.cluster.supervision import coordinator as module
from hydragraph.cluster.supervision.coordinator import (
    AgentLinks,
    DevicesAvailable,
    Ended,
    Heartbeat,
    InheritedMembers,
    Kill,
    Leaving,
    Link,
    ProbeAddress,
    ProbedMachines,
    RunMachines,
    RunOver,
    Seated,
    UnheardMachines,
    Welcome,
    nodes_of,
    reach,
)
from hydragraph.cluster.supervision.election import Election
from tests.registers import StoreRegister
from tests.thorough import only

PATIENCE_S = 20.0


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
    return found


def heard(link: Link, kind: type) -> Any:
    """Return the next message of a kind."""

    def next_one() -> Any:
        message = link.hear(0.01)
        assert message is not None or not link.down, link.down
        return message if isinstance(message, kind) else None

    return until(next_one)


def order(number: int) -> Start:
    return Start(number, Seat(number, 4, 1), late=False, grace_s=1.0, work=b"")


def at(address: str) -> RunMachines:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as free:
        return RunMachines(0, 2, address, free.getsockname()[1])


@pytest.fixture
def first() -> RunMachines:
    return at("127.0.0.1")


@pytest.fixture
def hub(first: RunMachines) -> Iterator[AgentLinks]:
    hub = AgentLinks(first)
    yield hub
    hub.close(RunOver())


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 9))
def test_ranks_are_dealt_to_machines_in_order_and_evenly(count: int, more: int, spares: int) -> None:
    ranks = count + more
    nodes = RunMachines(0, count, "", 0, ranks=ranks)
    dealt = [nodes.of(seat, ranks) for seat in range(ranks)]
    assert dealt == sorted(dealt)
    each = [nodes.here(node, ranks) for node in range(count)]
    assert sum(each) == ranks
    assert max(each) - min(each) <= 1
    assert all(nodes.of(ranks + spare, ranks) == spare % count for spare in range(spares))
    seats = range(ranks + spares)
    for node in range(count):
        local = [seat.local for seat in (nodes.seat(seat, 1) for seat in seats) if seat.node == node]
        assert local == list(range(len(local)))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 20))
def test_ranks_are_placed_in_proportion_to_devices_and_never_share_one(devices: list[int], fewer: int) -> None:
    nodes = RunMachines(0, len(devices), "", 0)
    full = replace(nodes, fills=True).place(1, devices)
    assert [full.here(node, full.ranks) for node in range(nodes.count)] == devices
    assert full.of(full.ranks, full.ranks) == 0, "spares are placed as without devices"
    ranks = max(nodes.count, sum(devices) - fewer)
    some = nodes.place(ranks, devices)
    each = [some.here(node, ranks) for node in range(nodes.count)]
    assert sum(each) == ranks == some.ranks
    assert all(1 <= share <= count for share, count in zip(each, devices, strict=True))
    assert [nodes.of(seat, ranks) for seat in range(ranks)] == [
        nodes.place(ranks, [2] * nodes.count).of(seat, ranks) for seat in range(ranks)
    ]


def test_ranks_are_placed_on_unequal_machines_or_refused() -> None:
    nodes = RunMachines(0, 3, "", 0)
    each = lambda ranks: [nodes.place(ranks, (8, 4, 1)).here(node, ranks) for node in range(3)]  # noqa: E731
    assert each(13) == [8, 4, 1]
    assert each(6) == [3, 2, 1]
    assert each(3) == [1, 1, 1]
    refused = r"ranks is 14, but there are 13 devices \(machine 0 has 8, machine 1 has 4, .*\): set ranks to at most 13"
    with pytest.raises(ValueError, match=refused):
        nodes.place(14, (8, 4, 1))
    shared = nodes.place(6, (1, 1, 1))
    assert shared.ranks == 6, "equal machines may share devices among ranks"
    assert not shared.refusal(1, 1)


def test_a_machine_that_returns_with_too_few_devices_is_refused(hub: AgentLinks, first: RunMachines) -> None:
    other = replace(first, number=1, devices=4)
    link = reach(other)
    hub.gather(timedelta(seconds=PATIENCE_S))
    assert hub.place(4) == replace(first, ranks=4, placed=(1, 4))
    assert [hub.nodes.here(node, 4) for node in (0, 1)] == [1, 3]
    link.close("")
    over = heard(reach(replace(other, devices=2)), RunOver)
    assert over.here
    assert over.error.startswith("machine 1 has 2 devices, but its ranks need 3: ")
    hub.arrived()
    reach(replace(other, devices=3))
    until(lambda: hub.arrived() == (1,))


def test_a_launcher_that_starts_several_processes_on_a_machine_starts_ranks() -> None:
    there = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5", "LOCAL_WORLD_SIZE": "1"}
    assert nodes_of(there) == RunMachines(1, 2, "a", 5)
    assert nodes_of(there | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == RunMachines(1, 2, "a", 5, shared=True)
    assert nodes_of(there | {"LOCAL_WORLD_SIZE": "2"}) is None
    assert nodes_of({"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert nodes_of({"RANK": "1", "WORLD_SIZE": "2"}, elected=True) == RunMachines(1, 2, "", 0)


def test_a_process_is_started_ended_and_heard_of_on_another_machine(hub: AgentLinks, first: RunMachines) -> None:
    link = reach(replace(first, number=1))
    hub.gather(timedelta(seconds=PATIENCE_S))
    assert hub.arrived() == ()
    member = hub.start(1, order(7))
    assert heard(link, Start) == order(7)
    member.process.kill()
    assert heard(link, Kill) == Kill(7)
    link.send(Ended(7, Returned(b"value")))
    until(member.connection.poll)
    assert outcome_of(member) == Returned(b"value")
    assert not member.process.is_alive()


def test_processes_of_a_machine_whose_supervisor_ends_have_died_and_it_may_come_again(
    hub: AgentLinks, first: RunMachines
) -> None:
    link = reach(replace(first, number=1))
    until(lambda: hub.present(1))
    members = [hub.start(1, order(number)) for number in (2, 3)]
    link.close("killed")
    for member in members:
        until(member.connection.poll)
        died = outcome_of(member)
        assert isinstance(died, Died)
        assert "machine 1 is lost" in died.how
    until(lambda: not hub.present(1))
    hub.arrived()
    back = reach(replace(first, number=1))
    assert until(hub.arrived) == (1,)
    hub.start(1, order(4))
    assert heard(back, Start).number == 4


def test_a_second_supervisor_of_a_machine_takes_the_place_of_the_first(hub: AgentLinks, first: RunMachines) -> None:
    link = reach(replace(first, number=1))
    until(lambda: hub.present(1))
    member = hub.start(1, order(2))
    second = reach(replace(first, number=1))
    assert "a second process was started" in heard(link, RunOver).error
    until(member.connection.poll)
    assert isinstance(outcome_of(member), Died)
    until(lambda: hub.present(1))
    hub.start(1, order(5))
    assert heard(second, Start).number == 5


def test_a_machine_that_is_taken_away_gets_no_new_ranks_but_keeps_its_own(hub: AgentLinks, first: RunMachines) -> None:
    link = reach(replace(first, number=1))
    until(lambda: hub.present(1))
    member = hub.start(1, order(2))
    link.send(Leaving())
    until(lambda: not hub.present(1))
    assert member.process.is_alive()


def test_a_machine_whose_devices_are_back_is_one_that_has_come(hub: AgentLinks, first: RunMachines) -> None:
    link = reach(replace(first, number=1))
    until(lambda: hub.present(1))
    hub.gather(timedelta(seconds=PATIENCE_S))
    assert hub.arrived() == ()
    link.send(DevicesAvailable())
    assert until(hub.arrived) == (1,)


@only("pair1", "pair2")
@pytest.mark.parametrize("pair", [(1, 2), (2, 1), (1, 3), (2, 3)])
def test_the_processes_of_one_machine_end_if_it_and_another_do_not_reach_each_other(
    hub: AgentLinks, first: RunMachines, pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken_links, "CUT_S", 0.3)
    monkeypatch.setattr(broken_links, "HEALED_S", 0.1)
    links = {number: reach(replace(first, number=number)) for number in (1, 2, 3)}
    for number, link in links.items():
        link.send(ProbeAddress(("127.0.0.1", number)))
    until(lambda: all(map(hub.present, links)))
    members = {number: hub.start(number, order(number)) for number in links}
    until(lambda: len(heard(links[1], ProbedMachines).addresses) == 3)
    hub.arrived()
    reporter, other = pair
    links[reporter].send(UnheardMachines((other,)))
    dropped = max(pair)

    def looked() -> bool:
        for link in links.values():
            link.hear(0.0) if link is not links[dropped] else link.send(Heartbeat())
        hub.drop_unreachable()
        return not hub.present(dropped)

    until(looked)
    assert heard(links[dropped], Kill) == Kill(dropped)
    died = outcome_of(members[dropped])
    assert isinstance(died, Died)
    assert f"machine {dropped} is dropped: it and machine {min(pair)} cannot reach each other" in died.how
    assert all(members[number].process.is_alive() == (number != dropped) for number in links)
    links[reporter].send(UnheardMachines(()))
    until(lambda: not looked())
    assert hub.arrived() == (dropped,)


def test_members_of_an_earlier_leader_continue_if_their_machine_comes_in_time(first: RunMachines) -> None:
    server = hosted("127.0.0.1", 0)
    election = Election(StoreRegister.at(server.port), 0)
    until(lambda: election.leads)
    handed = InheritedMembers((), {}, private_folder())
    hub = AgentLinks(replace(first, count=3, election=election, handed=handed), port=1234)
    in_time = reach(replace(hub.nodes, number=1), {5: Seated(1, late=True)})
    assert heard(in_time, Welcome) == Welcome(True, "127.0.0.1", 1234)
    crew, seats = hub.adopt([1, 2], patience_s=0.2)
    assert [member.rank for member in crew] == [5]
    assert seats == {5: Seated(1, late=True)}
    in_time.send(Ended(5, Returned(b"value")))
    until(crew[0].connection.poll)
    assert outcome_of(crew[0]) == Returned(b"value")
    too_late = reach(replace(hub.nodes, number=2), {6: Seated(2, late=False)})
    assert heard(too_late, Welcome) == Welcome(False, "127.0.0.1", 1234)
    hub.close(None)
    until(lambda: too_late.hear(0.02) is None and too_late.down)
    election.end()


def test_whoever_does_not_know_the_key_is_sent_away(hub: AgentLinks, first: RunMachines) -> None:
    book = module._book(first)
    place = json.loads(book.get("leader"))
    book.set("leader", json.dumps(place | {"key": "another"}))
    with pytest.raises(ConnectionError, match="has been replaced"):
        reach(replace(first, number=1))
    assert not hub.present(1)


def test_an_end_that_says_nothing_is_given_up() -> None:
    here, there = multiprocessing.Pipe()
    link = Link(here, patience_s=0.2)
    until(lambda: link.hear(0.02) is None and link.down)
    assert "it has been silent for 0.2 s" in link.down
    there.close()


def test_machines_that_never_come_are_named(hub: AgentLinks) -> None:
    with pytest.raises(TimeoutError, match=r"machines \[1\] of 2 have not arrived"):
        hub.gather(timedelta(seconds=0.05))


def test_a_machine_that_comes_while_the_run_ends_is_told(
    hub: AgentLinks, first: RunMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = multiprocessing.connection.answer_challenge

    def answer_after_the_end(*arguments: Any) -> None:
        if not hub._closed:
            hub.close(RunOver("a full disk"))
        answer(*arguments)

    monkeypatch.setattr(module, "answer_challenge", answer_after_the_end)
    with socket.create_connection(("127.0.0.1", first.port)):
        link = reach(replace(first, number=1))
    assert heard(link, RunOver) == RunOver("a full disk")
    until(lambda: link.hear(0.02) is None and link.down)


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_machines_that_have_only_ipv6_meet() -> None:
    nodes = at("::1")
    hub = AgentLinks(nodes)
    link = reach(replace(nodes, number=1))
    until(lambda: hub.present(1))
    link.close("")
    hub.close(RunOver())
