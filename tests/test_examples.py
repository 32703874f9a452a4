"""The examples run, and the files in them are what they say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import hydragraph as hg
from hydragraph.train.config import TrainConfig
from tests.nodes import refusal
from tests.thorough import thorough
from tests.train.plain import settings

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


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
