"""One process without a process group, and a checkpoint that it saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from hydragraph.checkpoint import save_and_load
from hydragraph.cluster.communicators import Groups
from tests.runtime.homes import ALONE, groups_of, trained


@pytest.fixture
def groups() -> Groups:
    assert not dist.is_initialized()
    return groups_of(ALONE)


@pytest.fixture
def made(tmp_path: Path, groups: Groups) -> Path:
    """A checkpoint of AdamW after two steps."""
    home, optimizer = trained(ALONE, "adamw")
    save_and_load.save(tmp_path / "step-7", home, optimizer, {"step": 7}, groups)
    return tmp_path / "step-7"
