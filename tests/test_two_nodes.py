"""Training on two nodes with separate networks equals one machine's, and faults of link and nodes are reported.

`make thorough` runs all of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hydragraph.train.stragglers.run_events import read_events
from tests.commands.tiny import computed, run
from tests.faults import END_S, LINK_BACK, LINK_FAULTS, RANK_KILLED, LinkFault, Outcome, patience
from tests.nodes import TwoNodes, refusal, shaping_refusal, torchrun
from tests.thorough import thorough
from tests.train.plain import settings

LIMIT_S = 240  # against a hang
TEARDOWN_S = 60  # torchrun waits 30 s for a stopped process, and for the other node's torchrun
BEYOND = 100_000  # steps of a run that is ended before


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    if (why := refusal()) is not None:
        pytest.skip(why)
    with TwoNodes(tmp_path / "nodes") as two:
        yield two


def configured(folder: Path, strategies: Sequence[str], steps: int, **changes: Any) -> Path:
    """Write the config of a tiny run."""
    tiny = {**settings(folder), "strategies": list(strategies), "steps": steps, "check": "off"}
    tiny |= {"checkpoint_every": 10, "evaluate_every": 0, "ranks": 4, **changes}
    (folder / "config.yaml").write_text(yaml.safe_dump(tiny))
    return folder / "config.yaml"


@dataclass
class Job:
    """A training on both nodes.

    Attributes:
        folder: with the config; logs are written to it.
        processes: torchrun of each node.
    """

    folder: Path
    processes: list[subprocess.Popen[bytes]]

    @staticmethod
    def start(
        nodes: TwoNodes,
        config: Path,
        per_node: int,
        rendezvous: str = "static",
        own: Sequence[Path] = (),
        restarts: int = 0,
    ) -> Job:
        """Start it; arguments as for `torchrun` and `Node.start`."""
        started = []
        for node in nodes:
            command = torchrun(node, nodes, per_node, rendezvous=rendezvous, restarts=restarts)
            command += ["-m", "hydragraph.cli", "train", str(config), "--max-restarts", str(restarts)]
            started.append(node.start(command, config.parent / f"{node.number}.log", own=own, OMP_NUM_THREADS="1"))
        return Job(config.parent, started)

    def curve(self) -> list[dict[str, Any]]:
        """Return what has been trained so far."""
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [computed(json.loads(line)) for line in lines if line.endswith("\n")]

    def said(self, number: int) -> str:
        """Return what a node's ranks and its torchrun have printed."""
        return (self.folder / f"{number}.log").read_text(errors="replace")

    def until_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        """Wait until `step` steps are done."""
        deadline = time.monotonic() + limit_s
        while len(self.curve()) < step:
            codes = [process.poll() for process in self.processes]
            assert not any(code is not None for code in codes), f"ended: {codes}\n{self.said(0)}\n{self.said(1)}"
            assert time.monotonic() < deadline, f"no step {step} after {limit_s:g} s\n{self.said(0)}\n{self.said(1)}"
            time.sleep(0.02)

    def ended(self, number: int, limit_s: float) -> int:
        """Wait for a node's torchrun and return its exit code."""
        try:
            return self.processes[number].wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"node {number} still runs\n{self.said(number)}") from None


def local_curve(folder: Path, strategies: Sequence[str], steps: int, ranks: int, **changes: Any) -> list[Any]:
    """Return the curve of the same run on local ranks."""
    folder.mkdir()
    result = run("train", configured(folder, strategies, steps, ranks=ranks, **changes))
    assert result.exit_code == 0, result.output
    return [computed(json.loads(line)) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def strike(fault: LinkFault, nodes: TwoNodes, job: Job) -> None:
    """Strike a job with a fault, and check that all surviving ranks report it in time, or continue."""
    began = time.monotonic()
    struck = fault.strike(nodes)
    if fault.outcome is Outcome.GOES_ON:
        time.sleep(END_S / 2)  # so that none of the steps counted is from before
        job.until_step(len(job.curve()) + 10, limit_s=END_S * patience())
        return
    while left := [
        f"rank {rank} of node {number}"
        for number in fault.spares
        for rank, pid in nodes[number].ranks().items()
        if pid not in struck and not re.search(rf"hydragraph: rank {rank}: ", job.said(number))
    ]:
        assert time.monotonic() - began < 4 * END_S * patience(), f"{left} still run\n{job.said(0)}\n{job.said(1)}"
        time.sleep(0.02)
    seconds = time.monotonic() - began
    for number in fault.spares:
        told = re.search(rf"hydragraph: rank \d: .*{fault.cause}", job.said(number))
        assert told, f"node {number} after {seconds:.1f} s:\n{job.said(number)[-3000:]}"
    print(f"{fault.name}: told after {seconds:.1f} s, with a load of {os.getloadavg()[0]:.0f}")
    assert seconds < END_S * patience(), f"it took {seconds:.1f} s"
    assert all(job.ended(number, TEARDOWN_S * patience()) != 0 for number in fault.spares)


@thorough
def test_a_link_that_comes_back_is_no_failure_and_a_killed_rank_is_named_on_the_other_node(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    job = Job.start(nodes, configured(tmp_path, ["<[0]x1,[1]x1>"], BEYOND), per_node=1, rendezvous="c10d")
    job.until_step(5)
    strike(LINK_BACK, nodes, job)
    strike(RANK_KILLED, nodes, job)


@thorough
@pytest.mark.parametrize("fault", LINK_FAULTS, ids=[fault.name for fault in LINK_FAULTS])
def test_what_befalls_a_link_or_a_node_is_told_on_both(fault: LinkFault, nodes: TwoNodes, tmp_path: Path) -> None:
    job = Job.start(nodes, configured(tmp_path, ["<[0,2]x1,[1,3]x1>", "<tp1,pp2> + <tp2,pp1>"], BEYOND), per_node=2)
    job.until_step(5)
    strike(fault, nodes, job)


@thorough
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_nodes_train_as_one_machine_does(rendezvous: str, nodes: TwoNodes, tmp_path: Path) -> None:
    strategies, beside = ["<[0,2]x1,[1,3]x1>", "<tp1,pp2> + <tp2,pp1>"], {"checkpoint": {"asynchronous": True}}
    job = Job.start(nodes, configured(tmp_path, strategies, 30, **beside), per_node=2, rendezvous=rendezvous)
    assert [job.ended(number, LIMIT_S) for number in (0, 1)] == [0, 0], job.said(0) + job.said(1)
    assert job.curve() == local_curve(tmp_path / "local", strategies, 30, ranks=4, **beside)


@thorough
def test_a_killed_rank_is_restarted_on_both_nodes_and_the_curve_is_the_same(nodes: TwoNodes, tmp_path: Path) -> None:
    strategies = ["<[0]x1,[1]x1>"]
    config = configured(tmp_path, strategies, 120)
    job = Job.start(nodes, config, per_node=1, rendezvous="c10d", restarts=1)
    job.until_step(25)
    RANK_KILLED.strike(nodes)
    assert [job.ended(number, LIMIT_S) for number in (0, 1)] == [0, 0], job.said(0) + job.said(1)
    assert job.curve() == local_curve(tmp_path / "local", strategies, 120, ranks=2)


@thorough
def test_a_slow_link_changes_nothing_but_the_time(tmp_path: Path) -> None:
    if (why := shaping_refusal()) is not None:
        pytest.skip(why)
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = {"architecture": "LlamaForCausalLM", "config": {**wide, "max_position_embeddings": 64}}
    with TwoNodes(tmp_path / "nodes") as nodes:
        nodes.shape(100e6)
        config = configured(tmp_path, ["2*<tp1,pp1>"], 6, model=model)
        job = Job.start(nodes, config, per_node=1)
        assert [job.ended(number, LIMIT_S) for number in (0, 1)] == [0, 0], job.said(0) + job.said(1)
        assert min(nodes.sent_bytes()) > 10e6
    assert job.curve() == local_curve(tmp_path / "local", ["2*<tp1,pp1>"], 6, ranks=2, model=model)


@thorough
def test_nodes_with_folders_of_their_own_are_refused_before_training(nodes: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    config = configured(tmp_path, ["<[0]x1,[1]x1>"], 30)
    job = Job.start(nodes, config, per_node=1, own=[tmp_path / "run"])
    assert [job.ended(number, LIMIT_S) for number in (0, 1)] == [1, 1]
    sentence = f"output {tmp_path / 'run'}: rank 1 on node1 does not see what rank 0 writes there"
    assert all(sentence in job.said(number) for number in (0, 1)), job.said(0) + job.said(1)
    assert "step 1/" not in job.said(0)


@thorough
def test_a_run_that_plans_for_itself_survives_a_lost_rank_on_another_node(nodes: TwoNodes, tmp_path: Path) -> None:
    """By default, if torchrun starts one process for each machine."""
    steps = 300
    job = Job.start(nodes, configured(tmp_path, ["auto"], steps, ranks=2), per_node=1)
    job.until_step(5)
    ranks = json.loads((tmp_path / "run" / "ranks.json").read_text())
    assert [place["host"] for place in ranks] == ["node0", "node1"]
    nodes[1].start(["kill", "-KILL", str(ranks[1]["pid"])], tmp_path / "kill.log").wait()
    assert [job.ended(number, LIMIT_S) for number in (0, 1)] == [0, 0], job.said(0) + job.said(1)
    assert [line["step"] for line in job.curve()] == list(range(1, steps + 1))
    assert {"fault", "resumed"} <= {event.event for event in read_events(tmp_path / "run" / "events.jsonl")}
