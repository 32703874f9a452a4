"""A newcomer follows README and getting started, to the letter: a copy of the checkout, a fresh environment, no extras.

`make newcomer` runs it: it installs PyTorch and all else anew, which takes minutes. HYDRAGRAPH_TORCH, such as
torch==2.13.0, says which; the commands on the pages stay as they are.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hydragraph.train.step_metrics import read_metrics
from tests.documented import ROOT, Block, blocks, follow
from tests.thorough import thorough


def checked_out(directory: Path) -> Path:
    """Copy what git has of this checkout, changes that are not committed included."""
    copy = directory / "hydragraph"
    copy.mkdir()
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", str(copy)], cwd=ROOT, input=files, check=True)
    return copy


def installing(page: str) -> Block:
    """Return the block of a page that installs."""
    return next(block for block in blocks(page) if block.language == "bash" and "pip install ." in block.text)


@thorough
def test_a_newcomer_gets_through_the_first_hour(tmp_path: Path) -> None:
    checkout = checked_out(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if version := environment.get("HYDRAGRAPH_TORCH"):
        (tmp_path / "constraints.txt").write_text(f"{version}\n")
        environment["PIP_CONSTRAINT"] = str(tmp_path / "constraints.txt")
    block = installing("docs/getting_started.md")
    done = subprocess.run(["bash", "-euc", block.text], cwd=checkout, env=environment, check=False)
    assert done.returncode == 0, f"{block.place} failed"
    python = checkout / "env" / "bin" / "python"
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "hydragraph" in listed
    assert not [name for name in ("tensorboard", "matplotlib", "pytest") if name in listed], "no extras"

    work = tmp_path / "work"
    work.mkdir()
    assert "[" in follow("README.md", work, str(python)), "the example prints its losses"
    said = follow("docs/getting_started.md", work, str(python))
    assert "continuing after step 30 of 40" in said
    history = read_metrics(work / "runs" / "chat" / "metrics.jsonl")
    assert [metrics.step for metrics in history] == list(range(1, 41))
    assert history[-1].loss < 0.5 * history[0].loss
    assert "<|assistant|>" in said, "the trained model answered"
