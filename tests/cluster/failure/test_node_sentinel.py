"""Sentinels of two machines, which are two names on this one: what each sees reaches the store."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch.distributed as dist

from hydragraph.cluster.failure.fault_record import Fault, FaultRecord
from hydragraph.cluster.failure.heartbeat_board import HeartbeatBoard
from hydragraph.cluster.failure.node_sentinel import IdleTime, Sentinel, SentinelSettings
from hydragraph.cluster.failure.process_liveness import WatchedProcess
from hydragraph.cluster.failure.rank_registry import RankEntry, RankRegistry
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process does")


@dataclass
class Machine:
    """One rank, and who speaks for it."""

    rank: int
    process: subprocess.Popen[bytes]
    board: HeartbeatBoard
    sentinel: Sentinel


@dataclass
class World:
    store: Any
    ledger: FaultRecord
    machines: list[Machine]

    def fault(self, within_s: float) -> Fault | None:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if (fault := self.ledger.read()) is not None:
                return fault
            time.sleep(0.05)
        return None

    def speaks(self, machine: Machine) -> bool:
        return bool(self.store.check([f"ns/beat/machine {machine.rank}"]))


@pytest.fixture
def world() -> Iterator[World]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    machines = []
    for rank in range(2):
        process = subprocess.Popen(["sleep", "600"])
        roll = RankRegistry(store, "ns", f"machine {rank}")
        board = roll.board(2)
        board.place(rank, 5, 3)
        roll.enter(RankEntry(rank, f"host{rank}", WatchedProcess.of(process.pid)))
        post = SentinelSettings(store.host, store.port, "ns", roll.machine, board.address, 2)
        machines.append(Machine(rank, process, board, Sentinel(post)))
    made = World(store, FaultRecord(store, "ns"), machines)
    end = time.monotonic() + 100
    while not all(map(made.speaks, machines)):
        assert time.monotonic() < end, "the sentinels have not started"
        time.sleep(0.05)
    yield made
    for machine in machines:
        machine.process.kill()
        machine.process.wait()
    for machine in machines:
        assert machine.sentinel._process is not None
        machine.sentinel._process.wait(30)  # it ends with its ranks


@pytest.mark.thorough  # the suite has two nodes, each with a sentinel
def test_a_rank_that_ends_is_named_with_its_host_and_where_it_was(world: World) -> None:
    machine = world.machines[1]
    machine.process.kill()
    assert world.fault(30.0) == Fault(1, 5, "", "its process has ended", "host1", index=3)


@pytest.mark.thorough
def test_a_rank_that_is_stopped_on_a_machine_of_its_own(world: World) -> None:
    began = time.monotonic()
    world.machines[0].board.call(0, "save")
    world.machines[0].process.send_signal(signal.SIGSTOP)
    fault = world.fault(60.0)
    assert fault is not None
    assert (fault.rank, fault.host, fault.instruction) == (0, "host0", "save")
    assert "has been stopped for 6." in fault.error
    assert time.monotonic() - began < 9.0


@pytest.mark.thorough
def test_a_machine_that_falls_silent_is_lost_and_a_pause_is_nothing(world: World) -> None:
    silent = world.machines[1].sentinel._process
    assert silent is not None
    silent.send_signal(signal.SIGSTOP)
    assert world.fault(4.0) is None
    silent.send_signal(signal.SIGCONT)
    assert world.fault(6.0) is None
    silent.send_signal(signal.SIGSTOP)
    fault = world.fault(60.0)
    silent.send_signal(signal.SIGCONT)
    assert fault is not None
    assert (fault.rank, fault.host) == (1, "host1")
    assert "its machine has been silent for 8 s" in fault.error


@pytest.mark.thorough
def test_ranks_that_stand_still_on_several_machines(world: World) -> None:
    world.machines[0].board.lines[0].waiting = True
    for machine in world.machines:
        machine.board.progress_s = 2.0
    fault = world.fault(30.0)
    assert fault is not None
    assert (fault.rank, fault.stalled, fault.step) == (1, True, 0)


@pytest.mark.thorough
def test_who_has_left_is_not_missed(world: World) -> None:
    for machine in world.machines:
        machine.board.lines[machine.rank].left = True
    time.sleep(0.5)
    world.machines[0].process.kill()
    assert world.fault(3.0) is None


def test_a_sentinel_is_idle_once_no_rank_is_watched_for_three_seconds() -> None:
    idle = IdleTime()
    assert not idle.look(100.0, [False, False]), "a pause of the sentinel itself counts half a second"
    assert not any(idle.look(0.5, [False, False]) for _ in range(4))
    assert not idle.look(0.5, [False, True])
    assert not any(idle.look(0.5, [False, False]) for _ in range(5))
    assert idle.look(0.5, [False, False])


@thorough
def test_a_sentinel_whose_store_does_not_answer_ends_with_the_rank_that_started_it() -> None:
    rank = subprocess.Popen(["sleep", "600"])
    board = HeartbeatBoard.make(2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts without answering, as when the link is cut
        post = SentinelSettings("127.0.0.1", silent.getsockname()[1], "ns", "here", board.address, 2)
        arguments = [json.dumps(asdict(post)), json.dumps(asdict(WatchedProcess.of(rank.pid)))]
        sentinel = subprocess.Popen([sys.executable, "-m", "hydragraph.cluster.failure.node_sentinel", *arguments])
        try:
            connection, _ = silent.accept()
            with connection:
                assert sentinel.poll() is None
                rank.kill()
                rank.wait()
                assert sentinel.wait(60) == 1
        finally:
            rank.kill()
            sentinel.kill()
            sentinel.wait()
            board.close()


def test_a_sentinel_ends_once_a_fault_is_in_the_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    roll = RankRegistry(store, "ns", "here")
    board = roll.board(2)
    roll.enter(RankEntry(0, "host", WatchedProcess.own()))
    post = SentinelSettings(store.host, store.port, "ns", roll.machine, board.address, 2)
    sentinel = Sentinel(post)
    assert sentinel._process is not None
    FaultRecord(store, "ns").write(Fault(1, 0, "step", "lost"))  # this process lives on and has not left
    assert sentinel._process.wait(100) == 0
    board.close()
