"""The examples run, and the files in them are what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hydragraph as hg
from hydragraph.train.config import TrainConfig

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
