"""The job file for Slurm, run by Debian's slurmctld and two slurmd on nodes that are network namespaces.

A run with `strategies: auto` trains on both nodes. A job of higher priority takes one of them: the run is preempted,
requeued, and trains the rest of its steps.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.nodes import TwoNodes, refusal
from tests.thorough import thorough
from tests.train.plain import settings

ROOT = Path(__file__).parent.parent
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
STEPS = 400
# Jobs get whole nodes. A requeued job waits as long as its credential lasts. No plugin needs munge, cgroups or PMIx.
CONF = """
ClusterName=hydragraph
SlurmctldHost=node0({first})
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster of two nodes."""

    nodes: TwoNodes
    folder: Path

    def start(self) -> None:
        """Start the controller and a daemon on each node, and wait until both nodes are idle."""
        first = self.nodes[0]
        each = [f"NodeName={node.hostname} NodeAddr={node.address} CPUs=2" for node in self.nodes]
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(
            CONF.format(first=first.address, folder=self.folder, nodes="\n".join(each))
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is looked for, and none is used
        first.start(["slurmctld", "-D"], self.folder / "slurmctld.log", **self._environment)
        for node in self.nodes:
            command = ["slurmd", "-D", "-N", node.hostname]
            node.start(command, self.folder / f"slurmd-{node.hostname}.log", **self._environment)
        wait_until(
            lambda: self.output("sinfo", "--noheader", "--partition=spot", "--format=%D %T") == "2 idle", 60, self
        )

    def output(self, *command: str) -> str:
        """Return the output of a command on the first node."""
        answer = self.folder / "answer"
        answer.unlink(missing_ok=True)
        self.nodes[0].start(["env", "-u", "GLOO_SOCKET_IFNAME", *command], answer, **self._environment).wait(60)
        return answer.read_text().strip()

    def logs(self) -> str:
        """Return the ends of all logs."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    @property
    def _environment(self) -> dict[str, Any]:
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        return {**own, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def wait_until(ready: Callable[[], bool], seconds: float, slurm: Slurm) -> None:
    """Wait until a condition holds; fail with all logs after `seconds`."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client")
    if (why := refusal()) is not None:
        pytest.skip(why)
    with TwoNodes(tmp_path / "nodes") as nodes:
        cluster = Slurm(nodes, tmp_path)
        cluster.start()
        yield cluster


@thorough
def test_a_preempted_job_is_requeued_and_trains_the_rest(tmp_path: Path, slurm: Slurm) -> None:
    config = {**settings(tmp_path), "strategies": "auto", "ranks": 2, "steps": STEPS, "check": "off"}
    config |= {"checkpoint_every": STEPS, "evaluate_every": 0, "grace_s": 30}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    metrics = tmp_path / "run" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    file = [str(ROOT / "examples/launch/slurm.sbatch"), str(tmp_path / "config.yaml")]
    submitted = slurm.output("sbatch", "--nodes=2", f"--output={tmp_path}/job.out", f"--chdir={ROOT}", *file)
    job = submitted.removeprefix("Submitted batch job ")
    wait_until(lambda: steps() >= 3, 180, slurm)
    urgent = ["--partition=urgent", "--nodelist=node1", f"--output={tmp_path}/urgent.out", "--wrap", "sleep 1"]
    assert slurm.output("sbatch", *urgent).startswith("Submitted"), slurm.logs()
    wait_until(lambda: (tmp_path / "urgent.out").exists(), 90, slurm)
    before = steps()
    assert 3 <= before < STEPS, slurm.logs()
    wait_until(lambda: steps() == STEPS, 240, slurm)
    wait_until(lambda: "COMPLETED" in slurm.output("scontrol", "show", "job", job), 60, slurm)
    assert "Restarts=1" in slurm.output("scontrol", "show", "job", job)
    assert f"continuing after step {before} of {STEPS}" in (tmp_path / "job.out").read_text()
