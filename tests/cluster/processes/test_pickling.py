"""Ranks run what no module holds: what is defined in a notebook, at a prompt, with `-c`, in a closure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydragraph.cluster.launch import launch
from tests.thorough import thorough

ROOT = Path(__file__).parents[3]

# An interactive session: functions, a model and a result's class of `__main__`, and a global that a function reads.
TYPED = """
import torch
from torch import nn
import hydragraph as hg
from tests.own_models import Own, Small

class Result:
    def __init__(self, losses):
        self.losses = losses

class Mine(Own):
    def __init__(self):
        super().__init__(layers=0)
        self.stack = nn.ModuleList([Small()])

def prepare():
    torch.manual_seed(0)
    model = Mine()
    program = hg.capture(model, check="off")
    return model, hg.precompile(program, [hg.Strategy.parse("<tp1,pp1>", 1)]).program

steps = 2

def train(prepared):
    model, program = prepared
    exe = hg.compile(model, "<tp1,pp1> + <tp1,pp1>", torch.optim.AdamW, program=program)
    losses = [exe.step([[1, 2, 3, 4], [5, 6, 7]]).loss for _ in range(steps)]
    exe.close()
    return Result(losses)

one, other = hg.launch(train, 2, prepare=prepare)
assert isinstance(one, Result) and one.losses == other.losses and len(one.losses) == steps
print("typed", hg.launch(lambda: steps, 1))
"""

# As TYPED, without a program.
TYPED_ALONE = """
from torch import nn
import hydragraph as hg

class Result:
    def __init__(self, size):
        self.size = size

class Mine(nn.Linear):
    pass

steps = 2

def train(model):
    assert isinstance(model, Mine)
    return Result(model.out_features * steps)

one, other = hg.launch(train, 2, prepare=lambda: Mine(1, 3))
assert isinstance(one, Result) and one.size == other.size == 6
print("typed", hg.launch(lambda: steps, 1))
"""

UNGUARDED = """
import hydragraph as hg

def train():
    return 1

hg.launch(train, 2)
"""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param("stdin", TYPED_ALONE, id="alone"),
        *(pytest.param(how, TYPED, marks=thorough, id=how) for how in ("-c", "stdin", "-i")),
    ],
)
def test_what_is_typed_runs_on_ranks(how: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    arguments = {"-c": ["-c", text], "stdin": ["-"], "-i": ["-i", str(script)]}[how]
    typed = text if how == "stdin" else ""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=typed,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "typed [2]" in done.stdout, done.stderr[-2000:]


@thorough
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert 'call launch under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def test_closures_and_their_results_travel() -> None:
    offset = 3
    (add,) = launch(lambda: lambda n: n + offset, 1)
    assert add(4) == 7
