"""Three nodes with an etcd member each: the leading one is killed, cut off or stopped, and the others continue.

`tests/cluster/supervision/test_leadership.py` proves that two never lead; this is the whole run.
"""

from __future__ import annotations

import os
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


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[ThreeNodes]:
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd on PATH: apt-get install etcd-server")
    pytest.importorskip("etcd3gw")
    if (why := refusal()) is not None:
        pytest.skip(why)
    with ThreeNodes(tmp_path / "nodes") as three:
        cluster = ",".join(f"node{node.number}=http://{node.address}:2380" for node in three)
        for node in three:
            clients, peers = f"http://{node.address}:2379", f"http://{node.address}:2380"
            command = ["etcd", "--name", f"node{node.number}", "--data-dir", str(tmp_path / f"etcd{node.number}")]
            command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
            command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
            node.start([*command, "--initial-cluster", cluster], tmp_path / f"etcd{node.number}.log")
        yield three


def start(nodes: ThreeNodes, config: Path) -> Job:
    """Start a supervisor on each node, without a launcher."""
    store = "etcd://" + ",".join(node.address for node in nodes)
    command = [sys.executable, "-m", "hydragraph.cli", "train", str(config), "--store", store, "--log-level", "info"]
    started = []
    for node in nodes:
        log, rank = config.parent / f"{node.number}.log", str(node.number)
        started.append(node.start(command, log, RANK=rank, WORLD_SIZE="3", OMP_NUM_THREADS="1"))
    return Job(config.parent, started)


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
    changes = {"deterministic": True, "elastic": {"copies": 2}}
    job = start(nodes, configured(tmp_path, STRATEGIES, STEPS, ranks=3, **changes))
    job.until_step(20)
    said = [job.said(number) for number in range(3)]
    leader = next(number for number in range(3) if "leads (term" in said[number])
    strike(nodes[leader], nodes)
    began = time.time()
    done = len(job.curve())
    while len(job.curve()) < done + 2:
        assert time.time() - began < 4 * CONTINUES_S * patience(), "\n".join(job.said(n)[-4000:] for n in range(3))
        time.sleep(0.02)
    seconds = time.time() - began
    print(f"{strike.__name__}: node {leader} led; the others continued after {seconds:.1f} s")
    if strike is stopped:
        time.sleep(max(0.0, STOPPED_S - (time.time() - began)))
        _send(nodes[leader], signal.SIGCONT)
    others = [number for number in range(3) if number != leader]
    assert [job.ended(number, LIMIT_S) for number in others] == [0, 0], "\n".join(map(job.said, others))
    events = read_events(tmp_path / "run" / "events.jsonl")
    print([(event.event, event.ranks, event.why) for event in events if event.event != "saved"])
    undisturbed = local_curve(tmp_path / "local", STRATEGIES, STEPS, ranks=3, **changes)
    assert [losses(entry) for entry in job.curve()] == [losses(entry) for entry in undisturbed], "bit for bit"
    assert seconds < CONTINUES_S * patience()
