"""Three nodes elect a leader through etcd: the leading one is killed, cut off or stopped, and the others continue.

`tests/cluster/supervision/test_leadership.py` proves that two never lead; this is the whole run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hydragraph.train.stragglers.run_events import read_events
from tests.faults import patience
from tests.nodes import Node, ThreeNodes, refusal
from tests.test_two_nodes import LIMIT_S, Job, configured, local_curve
from tests.thorough import thorough

STRATEGIES = ["3*<tp1,pp1>"]
CONTINUES_S = 15.0
STOPPED_S = 20.0
STEPS = 250
LATER_STEPS = 600  # so that a node that is started again joins before the end
CHANGES = {"deterministic": True, "elastic": {"copies": 2}}
MEMBERS = (2379, 2389, 2399)  # etcd's ports on a node that does not train


class FourNodes(ThreeNodes):
    """Makes four nodes; the last one does not train."""

    count = 4


def skip_without_etcd() -> None:
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd on PATH: apt-get install etcd-server")
    pytest.importorskip("etcd3gw")
    if (why := refusal()) is not None:
        pytest.skip(why)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[ThreeNodes]:
    skip_without_etcd()
    with ThreeNodes(tmp_path / "nodes") as three:
        cluster = ",".join(f"node{node.number}=http://{node.address}:2380" for node in three)
        for node in three:
            clients, peers = f"http://{node.address}:2379", f"http://{node.address}:2380"
            command = ["etcd", "--name", f"node{node.number}", "--data-dir", str(tmp_path / f"etcd{node.number}")]
            command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
            command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
            node.start([*command, "--initial-cluster", cluster], tmp_path / f"etcd{node.number}.log")
        yield three


class Etcd:
    """Three members of etcd on one node."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._node, self._folder = node, folder
        self.store = "etcd://" + ",".join(f"{node.address}:{port}" for port in MEMBERS)
        self._members = [self._start(port) for port in MEMBERS]

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        address = f"http://{self._node.address}"
        command = ["etcd", "--name", f"m{port}", "--data-dir", str(self._folder / f"etcd{port}")]
        command += ["--listen-client-urls", f"{address}:{port}", "--advertise-client-urls", f"{address}:{port}"]
        peers = f"{address}:{port + 1}"
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        cluster = ",".join(f"m{each}={address}:{each + 1}" for each in MEMBERS)
        return self._node.start([*command, "--initial-cluster", cluster], self._folder / f"etcd{port}.log")

    def lose_the_majority(self) -> None:
        for process in self._members[1:]:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def restore_the_majority(self) -> None:
        self._members[1:] = [self._start(port) for port in MEMBERS[1:]]


@pytest.fixture
def four(tmp_path: Path) -> Iterator[FourNodes]:
    skip_without_etcd()
    with FourNodes(tmp_path / "nodes") as nodes:
        yield nodes


def start(nodes: ThreeNodes, config: Path, store: str = "") -> Job:
    """Start a supervisor on each of three nodes, without a launcher."""
    store = store or "etcd://" + ",".join(node.address for node in nodes)
    return Job(config.parent, [supervisor(nodes[number], config, store) for number in range(3)])


def supervisor(node: Node, config: Path, store: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hydragraph.cli", "train", str(config), "--store", store, "--log-level", "info"]
    log = config.parent / f"{node.number}.log"
    return node.start(command, log, RANK=str(node.number), WORLD_SIZE="3", OMP_NUM_THREADS="1")


def leader(job: Job) -> int:
    """Return the node that led last."""
    terms = [(int(term), n) for n in range(3) for term in re.findall(r"leads \(term (\d+)\)", job.said(n))]
    return max(terms)[1]


def until(holds: Callable[[], bool], job: Job, seconds: float) -> float:
    """Wait until a condition holds, and return for how long."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds * patience(), "\n".join(job.said(n)[-4000:] for n in range(3))
        time.sleep(0.02)
    return time.monotonic() - began


def continued(job: Job, seconds: float) -> float:
    done = len(job.curve())
    return until(lambda: len(job.curve()) >= done + 2, job, seconds)


def trains(node: Node) -> list[int]:
    """Return the processes of the supervisor and the ranks of a node."""
    return [pid for pid, environment in node.processes().items() if "WORLD_SIZE" in environment]


def lose(node: Node) -> None:
    """Kill all processes that train on a node; the node can be used again."""
    for pid in trains(node):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def losses(metrics: dict[str, Any]) -> tuple[int, float, float]:
    """Return what does not depend on the number of ranks."""
    return metrics["step"], metrics["loss"], metrics["grad_norm"]


def killed(node: Node, nodes: ThreeNodes) -> None:
    _send(node, signal.SIGKILL)


def cut_off(node: Node, nodes: ThreeNodes) -> None:
    subprocess.run(["ip", "-n", node.namespace, "link", "set", node.interface, "down"], check=True)


def stopped(node: Node, nodes: ThreeNodes) -> None:
    _send(node, signal.SIGSTOP)


def _send(node: Node, number: signal.Signals) -> None:
    for pid in node.processes():
        with suppress(ProcessLookupError):  # all end with the first one
            os.kill(pid, number)


@thorough
@pytest.mark.parametrize("strike", [killed, cut_off, stopped])
def test_the_others_continue_with_equal_losses(
    strike: Callable[[Node, ThreeNodes], None], nodes: ThreeNodes, tmp_path: Path
) -> None:
    job = start(nodes, configured(tmp_path, STRATEGIES, STEPS, ranks=3, **CHANGES))
    job.until_step(20)
    said = [job.said(number) for number in range(3)]
    leading = next(number for number in range(3) if "leads (term" in said[number])
    strike(nodes[leading], nodes)
    began = time.time()
    done = len(job.curve())
    while len(job.curve()) < done + 2:
        assert time.time() - began < 4 * CONTINUES_S * patience(), "\n".join(job.said(n)[-4000:] for n in range(3))
        time.sleep(0.02)
    seconds = time.time() - began
    print(f"{strike.__name__}: node {leading} led; the others continued after {seconds:.1f} s")
    if strike is stopped:
        time.sleep(max(0.0, STOPPED_S - (time.time() - began)))
        _send(nodes[leading], signal.SIGCONT)
    others = [number for number in range(3) if number != leading]
    assert [job.ended(number, LIMIT_S) for number in others] == [0, 0], "\n".join(map(job.said, others))
    events = read_events(tmp_path / "run" / "events.jsonl")
    print([(event.event, event.ranks, event.why) for event in events if event.event != "saved"])
    same(job, STEPS, tmp_path)
    assert seconds < CONTINUES_S * patience()


def same(job: Job, steps: int, folder: Path) -> None:
    undisturbed = local_curve(folder / "local", STRATEGIES, steps, ranks=3, **CHANGES)
    assert [losses(entry) for entry in job.curve()] == [losses(entry) for entry in undisturbed], "bit for bit"


@thorough
def test_a_lost_leader_returns_the_next_one_is_lost_and_then_etcd(four: FourNodes, tmp_path: Path) -> None:
    etcd = Etcd(four[3], tmp_path)
    config = configured(tmp_path, STRATEGIES, LATER_STEPS, ranks=3, **CHANGES)
    job = start(four, config, etcd.store)
    job.until_step(10)
    first = leader(job)
    lose(four[first])
    job.processes[first] = supervisor(four[first], config, etcd.store)
    print(f"continued after {continued(job, 2 * CONTINUES_S):.1f} s")
    second = leader(job)
    assert second != first
    events = tmp_path / "run" / "events.jsonl"
    seconds = until(lambda: any(event.event == "join" for event in read_events(events)), job, 6 * CONTINUES_S)
    print(f"joined after {seconds:.1f} s")
    assert leader(job) == second
    lose(four[second])
    print(f"continued after {continued(job, 2 * CONTINUES_S):.1f} s")
    others = [number for number in range(3) if number != second]
    etcd.lose_the_majority()
    supervisors = 4  # nsenter, the command, and its two servers
    ended = until(lambda: all(len(trains(four[n])) <= supervisors for n in others), job, CONTINUES_S)
    print(f"all ranks ended after {ended:.1f} s")
    until(lambda: all("start a majority of its members" in job.said(n) for n in others), job, CONTINUES_S)
    etcd.restore_the_majority()
    print(f"continued after {continued(job, 8 * CONTINUES_S):.1f} s")
    assert [job.ended(number, LIMIT_S) for number in others] == [0, 0], "\n".join(map(job.said, others))
    same(job, LATER_STEPS, tmp_path)


@thorough
@pytest.mark.parametrize("sign", ["machine 0 leads (term 1)", "generation 1: rank"])
def test_the_leader_is_lost_before_the_first_step(sign: str, four: FourNodes, tmp_path: Path) -> None:
    etcd = Etcd(four[3], tmp_path)
    job = start(four, configured(tmp_path, STRATEGIES, STEPS, ranks=3, **CHANGES), etcd.store)
    until(lambda: any(sign in job.said(number) for number in range(3)), job, 4 * CONTINUES_S)
    first = leader(job)
    lose(four[first])
    others = [number for number in range(3) if number != first]
    assert [job.ended(number, LIMIT_S) for number in others] == [0, 0], "\n".join(map(job.said, others))
    assert leader(job) != first
    same(job, STEPS, tmp_path)
