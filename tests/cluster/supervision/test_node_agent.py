"""The supervisor of a machine that does not lead, with one that does in the same test: real processes, no training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hydragraph.cluster.launch import starting
from hydragraph.cluster.processes.rendezvous_stores import hosted
from hydragraph.cluster.supervision.coordinator import Nodes
from hydragraph.cluster.supervision.election import Election
from hydragraph.cluster.supervision.node_agent import Deputy
from tests.registers import StoreRegister
from tests.thorough import first, thorough

ROOT = Path(__file__).parents[3]
LIMIT_S = 240  # against a hang

# Two machines, 3 ranks: prints what each rank is; the second time that they meet, who is left.
SCRIPT = """
import os, sys
import hydragraph as hg
from hydragraph.errors import RankFailure
from hydragraph.cluster.launch import follow
from hydragraph.cluster.rendezvous.member import here
from hydragraph.cluster.supervision.coordinator import Nodes


def work(kill):
    member = here()
    environment = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    first = (member.rank, *environment, os.getpid())
    if kill and os.environ["GROUP_RANK"] == "1":
        os.kill(int(os.environ["SUPERVISOR"]), 9)
    if kill:
        member.meet(None)
    return first, len(member.generation.members), os.getpid()


if __name__ == "__main__":
    number, port, kill, devices = map(int, sys.argv[1:])
    os.environ["SUPERVISOR"] = str(os.getpid())
    nodes = Nodes(number, 2, "127.0.0.1", port, devices=devices, fills=not kill)
    if number:
        follow(nodes, print)
    else:
        print(hg.launch(work, 3 if kill else 2, bool(kill), elastic=hg.Elastic(rejoin=False), nodes=nodes))
"""


# Three machines, of which the leading one is killed while its rank and the others work: prints who is left.
ELECTED = """
import os, sys, time
import hydragraph as hg
from hydragraph.cluster.launch import follow
from hydragraph.cluster.rendezvous.member import here
from hydragraph.cluster.supervision.coordinator import Nodes
from hydragraph.cluster.supervision.election import Election
from hydragraph.errors import RankFailure
from tests.registers import StoreRegister


def work():
    member = here()
    first = (os.environ["GROUP_RANK"], os.getpid(), member.generation.number)
    member.hold()
    if first[0] == os.environ["VICTIM"]:
        time.sleep(0.5)
        os.kill(int(os.environ["SUPERVISOR"]), 9)
    while len(member.generation.members) == 3:
        member.meet(RankFailure(member.rank, "", "as if a call had failed"))
    return first, member.rank, len(member.generation.members), os.getpid()


if __name__ == "__main__":
    number, port, victim = map(int, sys.argv[1:])
    os.environ |= {"SUPERVISOR": str(os.getpid()), "VICTIM": str(victim)}
    nodes = Nodes(number, 3, "127.0.0.1", 0, election=Election(StoreRegister.at(port), number))
    leading = follow(nodes, print)
    if leading is not None:
        print(hg.launch(work, 3, elastic=hg.Elastic(rejoin=False), nodes=leading))
        nodes.election.end()
"""


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def machines(folder: Path, kill: bool, devices: tuple[int, int]) -> list[tuple[int, str]]:
    """Run the script on two machines with these numbers of devices; return each one's exit code and output."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    port = free()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(number), str(port), str(int(kill)), str(devices[number])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in (0, 1)
    ]
    return [(process.wait(LIMIT_S), process.communicate()[0]) for process in started]


def test_ranks_on_two_machines_with_unequal_devices_know_their_places(tmp_path: Path) -> None:
    (code, said), (other, theirs) = machines(tmp_path, kill=False, devices=(1, 2))
    assert code == other == 0, said + theirs
    ranks = eval(said.splitlines()[-1])
    assert [first[:4] for first, _, _ in ranks] == [(0, "0", "1", "0"), (1, "0", "2", "1"), (2, "1", "2", "1")]


@thorough
def test_ranks_go_on_where_the_supervisor_of_another_machine_is_killed_and_its_ranks_end(tmp_path: Path) -> None:
    (code, said), (other, _) = machines(tmp_path, kill=True, devices=(1, 1))
    assert code == 0, said
    assert other == -signal.SIGKILL
    ranks = eval(said.splitlines()[-1])
    assert [(first[0], count) for first, count, _ in ranks] == [(0, 2), (1, 2)]
    assert all(first[4] == now for first, _, now in ranks), "they are the same processes"


@pytest.mark.parametrize("victim", first([0], [0, 1]))
def test_ranks_go_on_under_another_machine_where_that_of_the_leader_is_killed(victim: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ELECTED)
    server = hosted("127.0.0.1", 0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(number), str(server.port), str(victim)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in range(3)
    ]
    ended = [(process.wait(LIMIT_S), process.communicate()[0]) for process in started]
    codes = [0, 0, 0]
    codes[victim] = -signal.SIGKILL
    assert [code for code, _ in ended] == codes, "".join(said for _, said in ended)
    (result,) = (line for _, said in ended for line in said.splitlines() if line.startswith("[(("))
    ranks = eval(result)
    assert [(rank, count) for _, rank, count, _ in ranks] == [(0, 2), (1, 2)]
    assert [first[0] for first, *_ in ranks] == [str(number) for number in range(3) if number != victim]
    assert all(first[1] == now for first, _, _, now in ranks), "they are the same processes"


def test_a_first_machine_that_never_comes_is_named() -> None:
    said: list[str] = []
    with pytest.raises(
        ConnectionError, match=r"could not connect within 0.2 s to the first machine at .*start the same command again"
    ):
        Deputy(starting(), Nodes(1, 2, "127.0.0.1", free()), said.append).run(arrival_s=0.2)
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
        Deputy(starting(), Nodes(1, 2, "127.0.0.1", 0, election=election), print).run(back_s=1.0)
    election._closed.set()


def test_a_machine_that_is_taken_away_before_the_first_one_comes_ends_at_once() -> None:
    began = time.monotonic()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    Deputy(starting(), Nodes(1, 2, "127.0.0.1", free()), print).run(arrival_s=LIMIT_S)
    assert time.monotonic() - began < LIMIT_S
