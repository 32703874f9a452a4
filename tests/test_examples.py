"""The examples run, and the files in them are what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
