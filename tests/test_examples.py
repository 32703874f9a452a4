"""The examples run, and the files in them are what they say."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import hydragraph as hg
from hydragraph.train.config import TrainConfig
from tests.nodes import refusal
from tests.thorough import first, thorough
from tests.train.plain import settings

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
LAUNCH = EXAMPLES / "launch"


@thorough
def test_the_llama_example_trains() -> None:
    command = [sys.executable, str(EXAMPLES / "train_llama.py"), "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert len({line.split()[-1] for line in lines}) == 2, "two strategies take turns"


def dpo_losses(example: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train as DPO's paper has it: the loss of whole pairs, in plain PyTorch."""

    def log_probability(prompt: Tensor, answer: Tensor) -> Tensor:
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        return -F.cross_entropy(logits, answer, reduction="sum")

    def ratios() -> Tensor:
        pairs = example["drawn"](4)
        return torch.stack([log_probability(p.prompt, p.chosen) - log_probability(p.prompt, p.rejected) for p in pairs])

    reference = ratios().detach()
    losses = []
    for _ in range(steps):
        loss = -F.logsigmoid(example["BETA"] * (ratios() - reference)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@thorough
def test_preferences_are_learned_as_by_the_loss_of_pairs() -> None:
    example = runpy.run_path(str(EXAMPLES / "dpo.py"))
    plain = example["tiny"]()
    expected = dpo_losses(example, plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3)
    exe = hg.compile(
        example["tiny"](),
        "<tp1,pp1>",
        lambda named: torch.optim.SGD(named, lr=0.1),
        loss=example["weighted"],
        example={"weights": torch.ones(1, 8)},
    )
    pairs = example["drawn"](4)
    reference = example["log_ratios"](exe, pairs)
    losses = [example["preferred"](exe, pairs, reference) for _ in range(3)]
    assert losses[2] < losses[0]
    assert losses == pytest.approx(expected, abs=1e-5)
    weights = exe.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-5)


@thorough
def test_the_example_of_preferences_trains_on_two_ranks_that_split_pairs() -> None:
    command = [sys.executable, str(EXAMPLES / "dpo.py"), "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    example = runpy.run_path(str(EXAMPLES / "dpo.py"))
    plain = example["tiny"]()
    expected = dpo_losses(example, plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), 3)
    assert losses == pytest.approx(expected, abs=2e-4)


def test_the_hand_written_strategy_fits_its_model() -> None:
    strategy = hg.Strategy.load(str(EXAMPLES / "lopsided.yaml"))
    strategy.check(layers=8, ranks=4, heads=(4,))


def test_the_demo_configuration_is_valid() -> None:
    assert len(TrainConfig.load(EXAMPLES / "demo.yaml").strategies) >= 3


def two_nodes(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(EXAMPLES / "two_nodes.sh"), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_the_example_of_two_nodes_says_how_and_refuses_what_it_does_not_know() -> None:
    assert "--rate MBIT" in two_nodes("--help").stdout
    refused = two_nodes("--speed", "3")
    assert (refused.returncode, refused.stderr) == (2, "two_nodes.sh: unknown option --speed (--help)\n")


@thorough
def test_the_example_of_two_nodes_trains_and_clears_up(tmp_path: Path) -> None:
    if (why := refusal()) is not None:
        pytest.skip(why)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**settings(tmp_path), "strategies": ["<[0]x1,[1]x1>"], "steps": 3}))
    done = two_nodes("--per-node", "1", "--rate", "500", "--config", str(config), "--", "--max-restarts", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    assert "hydragraph0" not in left


def program(folder: Path, name: str, text: str) -> Path:
    """Write a program for PATH."""
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return file


def launched(name: str, *arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / name), *map(str, arguments)]
    variables = {**os.environ, "PYTHON": sys.executable, **{key: str(value) for key, value in environment.items()}}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=variables)


@pytest.mark.parametrize("name", ["local.sh", "torchrun.sh", "slurm.sbatch"])
def test_launch_scripts_are_bash_and_say_how_to_call_them(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(LAUNCH / name)], check=False).returncode == 0
    done = launched(name)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert "CONFIG | DATA MODEL" in done.stderr


def test_torchrun_is_told_the_machines(tmp_path: Path) -> None:
    said = program(tmp_path, "python", 'echo "$GLOO_SOCKET_IFNAME $*"')
    places = {"NODES": 2, "NODE_RANK": 1, "MASTER_ADDR": "192.168.7.1", "IFACE": "eth1"}
    for processes, changed in ((1, places), (8, {**places, "PER_MACHINE": 8})):
        assert launched("torchrun.sh", "config.yaml", PYTHON=said, **changed).stdout == (
            f"eth1 -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node {processes} "
            "--master-addr 192.168.7.1 --master-port 29500 --max-restarts 3 -m hydragraph train config.yaml "
            "--auto-resume --max-restarts 3\n"
        )


@thorough
@pytest.mark.parametrize(
    ("name", "arguments", "changed"),
    [("local.sh", [2], {}), ("torchrun.sh", [], {}), ("torchrun.sh", [], {"PER_MACHINE": 2})],
)
def test_a_launch_script_begins_a_run_and_then_continues_it(
    tmp_path: Path, name: str, arguments: list[object], changed: dict[str, object]
) -> None:
    config = tmp_path / "config.yaml"
    tiny = {**settings(tmp_path), "strategies": ["<[0]x1,[1]x1>"], "ranks": 2, "check": "off"}
    for steps in (2, 3):
        config.write_text(yaml.safe_dump({**tiny, "steps": steps}))
        done = launched(name, *arguments, config, **changed)
        assert done.returncode == 0, done.stderr[-3000:]
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == steps
    assert "continuing after step 2 of 3" in done.stderr


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job on two nodes; the programs of Slurm write what they were called with."""
    folder = tmp_path / "programs"
    folder.mkdir()
    program(folder, "scontrol", f'echo "$*" >> {tmp_path}/scontrol; [ "$1" = show ] && printf "node4\\nnode5\\n"')
    program(folder, "scancel", f'kill -TERM -- "-$(cat {tmp_path}/step)"')
    run = 'echo $$ > step; while [[ "$1" == --* ]]; do shift; done; SLURM_PROCID=1 SLURM_LOCALID=0 exec "$@"'
    program(folder, "srun", f'cd {tmp_path}; exec setsid bash -c {run!r} srun "$@"')
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[4-5]", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**environment, **job, "SLURM_CPUS_PER_TASK": "8", "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("code", "to"), [(0, None), (1, None), (0, "script"), (0, "ranks")])
def test_slurm_requeues_a_job_that_was_asked_to_stop_and_no_other(
    tmp_path: Path, slurm: dict[str, str], code: int, to: str | None
) -> None:
    """Near the time limit only the script gets SIGTERM; at a preemption only the processes of the ranks get it."""
    wait = 'stopped=; trap "stopped=yes" TERM; for _ in {1..500}; do [ "$stopped" ] && break; sleep 0.02; done'
    begun = f'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" > {tmp_path}/begun'
    python = program(tmp_path, "python", f"{begun}\n{wait if to else ''}\nexit {code}")
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "config.yaml"]
    job = subprocess.Popen(command, env={**slurm, "PYTHON": str(python)}, stdout=subprocess.DEVNULL)
    if to is not None:
        deadline = time.monotonic() + 20
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)  # its trap is set after it has said so
        if to == "script":
            job.terminate()
        else:
            os.killpg(int((tmp_path / "step").read_text()), signal.SIGTERM)
    assert job.wait(30) == (code if to is None else 75)
    assert (tmp_path / "begun").read_text() == "1 2 0 1 node4 20017 -m hydragraph train config.yaml --auto-resume\n"
    assert ("requeue 17" in (tmp_path / "scontrol").read_text()) == (to is not None)


@pytest.mark.parametrize(("per_node", "threads"), [("1", ""), ("8", "8")])
def test_slurm_gives_each_rank_its_own_cores(
    tmp_path: Path, slurm: dict[str, str], per_node: str, threads: str
) -> None:
    """The single task of a node divides the cores among the ranks that it starts."""
    python = program(tmp_path, "python", f'echo "$OMP_NUM_THREADS" > {tmp_path}/threads')
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "config.yaml"]
    environment = {**slurm, "PYTHON": str(python), "SLURM_NTASKS_PER_NODE": per_node}
    assert subprocess.run(command, env=environment, check=False, timeout=30).returncode == 0
    assert (tmp_path / "threads").read_text() == f"{threads}\n"


def test_slurm_may_requeue_the_job_and_warns_before_its_end() -> None:
    options = {line.removeprefix("#SBATCH ") for line in (LAUNCH / "slurm.sbatch").read_text().splitlines()}
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@120", "--ntasks-per-node=1"} <= options


def test_the_kubernetes_job_follows_the_schema_of_a_train_job() -> None:
    """The models are those that Kubeflow publishes; a field that they do not know, they leave out."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    read = models.TrainerV1alpha1TrainJob.from_dict
    assert read(job).to_dict() == job
    job["spec"]["trainer"]["processes"] = job["spec"]["trainer"].pop("numProcPerNode")
    assert read(job).to_dict() != job
    job["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        read(job)


def test_the_kubernetes_job_trains_on_all_gpus_and_mounts_its_volume() -> None:
    spec = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())["spec"]
    trainer = spec["trainer"]
    assert trainer["numProcPerNode"] == 1, "this process starts the ranks, and replaces those that are lost"
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    module = trainer["args"].index("-m")
    assert (trainer["command"], trainer["args"][:module]) == (["torchrun"], ["--max-restarts=3"])
    assert trainer["args"][module + 1 :] == [
        "hydragraph",
        "train",
        "/shared/config.yaml",
        "--auto-resume",
        "--max-restarts=3",
    ]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (node["name"], container["name"]) == ("node", "node")  # as the runtime torch-distributed names them
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]


def test_the_skypilot_task_uses_spot_machines_and_shared_storage() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}
    assert list(task["volumes"]) == ["/shared"]
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    for name in ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"):
        assert f"${name}" in task["run"]
    assert "torchrun.sh config.yaml" in task["run"]


def grpo_step(
    example: dict[str, Any], model: Any, given: list[dict[str, Any]], optimizer: torch.optim.Optimizer, by: str
) -> None:
    """Update a plain model by GRPO's clipped surrogate, averaged over all tokens or first over those of an answer."""
    sums, counts = [], []
    for each in given:
        targets = each["labels"][1:]
        chosen = targets != -100
        log_p = model(input_ids=each["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        ratios = (log_p.gather(1, each["input_ids"][1:, None])[:, 0] - each["old"][:-1])[chosen].exp()
        bounded = ratios.clamp(1 - example["CLIP"], 1 + example["CLIP"])
        sums.append(-torch.minimum(ratios * each["advantages"], bounded * each["advantages"]).sum())
        counts.append(int(chosen.sum()))
    optimizer.zero_grad()
    if by == "targets":
        loss = torch.stack(sums).sum() / sum(counts)
    else:
        loss = torch.stack([each / count for each, count in zip(sums, counts, strict=True)]).mean()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("by", first(["sequences"], ["targets", "sequences"]))
def test_rewards_are_learned_as_by_the_clipped_ratios_of_plain_pytorch(by: Literal["targets", "sequences"]) -> None:
    example = runpy.run_path(str(EXAMPLES / "grpo.py"))
    plain = example["tiny"]().eval()
    torch.manual_seed(1)
    groups = example["drawn"](plain)
    plainly, given = (example["mini_batch"](groups, each) for each in ("targets", by))
    assert len({len(each["input_ids"]) for each in given}) > 3
    exe = hg.compile(
        example["tiny"](),
        "<tp1,pp1>",
        lambda named: torch.optim.SGD(named, lr=1.0),
        loss=example["clipped"],
        example={"old": torch.zeros(1, 8), "advantages": torch.ones(1, 8)},
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for _ in range(3):  # the ratios of later updates differ from 1, and some of them are clipped
        exe.step(given, divide_by=by)
        grpo_step(example, plain, plainly, optimizer, by)
    for name, tensor in exe.weights():
        torch.testing.assert_close(tensor, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


@thorough
def test_rewards_rise_over_two_ranks() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "grpo.py"), "20"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    rewards = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("round ")]
    assert len(rewards) == 20, done.stderr[-2000:]
    assert sum(rewards[-5:]) > sum(rewards[:5]) * 1.3
