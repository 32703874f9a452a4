"""The supervisor of a machine that does not lead, with one that does in the same test: real processes, no training."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import hydragraph as hg
from hydragraph.cluster.launch import follow, starting
from hydragraph.cluster.processes.rendezvous_stores import hosted
from hydragraph.cluster.rendezvous.member import here
from hydragraph.cluster.supervision import leadership
from hydragraph.cluster.supervision.coordinator import RunMachines
from hydragraph.cluster.supervision.election import Election
from hydragraph.cluster.supervision.node_agent import NodeAgent
from hydragraph.errors import RankFailure
from tests.registers import StoreRegister
from tests.thorough import first, thorough

LIMIT_S = 240  # against a hang
SAID: list[str] = []
Seen = tuple[tuple[Any, ...], int, int, int]


def machine(number: int, port: int, kill: bool, devices: int, result: Path) -> None:
    """Run one of two machines with 3 ranks; the first one writes what each rank saw."""
    os.environ["SUPERVISOR"] = str(os.getpid())
    nodes = RunMachines(number, 2, "127.0.0.1", port, devices=devices, fills=not kill)
    if number:
        follow(nodes, SAID.append)
    else:
        found = hg.launch(work, 3 if kill else 2, kill, elastic=hg.Elastic(rejoin=False), nodes=nodes)
        result.write_bytes(pickle.dumps(found))


def work(kill: bool) -> Seen:
    """Return what this rank is; the second time that ranks meet, also who is left."""
    member = here()
    assert member is not None
    environment = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    first = (member.rank, *environment, os.getpid())
    if kill and os.environ["GROUP_RANK"] == "1":
        os.kill(int(os.environ["SUPERVISOR"]), signal.SIGKILL)
    if kill:
        member.meet(None)
    return first, member.rank, len(member.generation.members), os.getpid()


def elected(number: int, port: int, victim: int, result: Path) -> None:
    """Run one of three machines; `victim` is killed while its rank and the other machines work."""
    os.environ |= {"SUPERVISOR": str(os.getpid()), "VICTIM": str(victim)}
    leadership.TTL_S = 2.5
    starting()  # before there are threads
    election = Election(StoreRegister.at(port), number)
    leading = follow(RunMachines(number, 3, "127.0.0.1", 0, election=election), SAID.append)
    if leading is not None:
        found = hg.launch(work_under_another, 3, elastic=hg.Elastic(rejoin=False), nodes=leading)
        result.write_bytes(pickle.dumps(found))
        election.end()


def work_under_another() -> Seen:
    member = here()
    assert member is not None
    first = (os.environ["GROUP_RANK"], os.getpid(), member.generation.number)
    member.hold()
    if first[0] == os.environ["VICTIM"]:
        time.sleep(0.5)
        os.kill(int(os.environ["SUPERVISOR"]), signal.SIGKILL)
    while len(member.generation.members) == 3:
        member.meet(RankFailure(member.rank, "", "as if a call had failed"))
    return first, member.rank, len(member.generation.members), os.getpid()


def alone(target: Callable[..., None], *arguments: Any) -> None:
    """Call a function with a folder of its own for sockets: it removes that folder in the end."""
    config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    config.pop("tempdir", None)
    target(*arguments)


def run(target: Callable[..., None], machines: Sequence[tuple[Any, ...]], folder: Path) -> tuple[list[int], list[Seen]]:
    """Run machines as processes that have imported everything; return their exit codes, and what ranks returned."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=alone, args=(target, *machine, folder / "result")) for machine in machines]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # one that hangs
    assert None not in codes
    return cast("list[int]", codes), pickle.loads((folder / "result").read_bytes())


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ranks_on_two_machines_with_unequal_devices_know_their_places(tmp_path: Path) -> None:
    port = free()
    codes, ranks = run(machine, [(number, port, False, 1 + number) for number in (0, 1)], tmp_path)
    assert codes == [0, 0]
    assert [first[:4] for first, *_ in ranks] == [(0, "0", "1", "0"), (1, "0", "2", "1"), (2, "1", "2", "1")]


@thorough
def test_ranks_go_on_where_the_supervisor_of_another_machine_is_killed_and_its_ranks_end(tmp_path: Path) -> None:
    port = free()
    codes, ranks = run(machine, [(number, port, True, 1) for number in (0, 1)], tmp_path)
    assert codes == [0, -signal.SIGKILL]
    assert [(first[0], count) for first, _, count, _ in ranks] == [(0, 2), (1, 2)]
    assert all(first[4] == now for first, *_, now in ranks), "they are the same processes"


@pytest.mark.parametrize("victim", first([0], [0, 1]))
def test_ranks_go_on_under_another_machine_where_that_of_the_leader_is_killed(victim: int, tmp_path: Path) -> None:
    server = hosted("127.0.0.1", 0)
    codes, ranks = run(elected, [(number, server.port, victim) for number in range(3)], tmp_path)
    assert codes == [-signal.SIGKILL if number == victim else 0 for number in range(3)]
    assert [(rank, count) for _, rank, count, _ in ranks] == [(0, 2), (1, 2)]
    assert [first[0] for first, *_ in ranks] == [str(number) for number in range(3) if number != victim]
    assert all(first[1] == now for first, *_, now in ranks), "they are the same processes"


def test_a_first_machine_that_never_comes_is_named() -> None:
    said: list[str] = []
    with pytest.raises(
        ConnectionError, match=r"could not connect within 0.2 s to the first machine at .*start the same command again"
    ):
        NodeAgent(starting(), RunMachines(1, 2, "127.0.0.1", free()), said.append).run(arrival_s=0.2)
    assert not said


def test_a_machine_that_reaches_neither_leader_nor_register_ends_with_the_remedy() -> None:
    server = hosted("127.0.0.1", 0)
    first, register = Election(StoreRegister.at(server.port), 0), StoreRegister.at(server.port)
    while not first.leads:
        time.sleep(0.01)
    election = Election(register, 1)
    assert election.standing.joined
    first._closed.set()
    register.answers = False
    again = (
        "no leading machine could be reached within 1 s: the register does not answer; then .*, with --resume, on all"
    )
    with pytest.raises(ConnectionError, match=again):
        NodeAgent(starting(), RunMachines(1, 2, "127.0.0.1", 0, election=election), print).run(back_s=1.0)
    election._closed.set()


def test_a_machine_that_is_taken_away_before_the_first_one_comes_ends_at_once() -> None:
    began = time.monotonic()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    NodeAgent(starting(), RunMachines(1, 2, "127.0.0.1", free()), print).run(arrival_s=LIMIT_S)
    assert time.monotonic() - began < LIMIT_S
