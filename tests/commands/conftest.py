"""A run that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import Result

from tests.commands.tiny import LOPSIDED, run, write


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder with a config and the run of it on two ranks, with checkpoints after steps 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    config = write(folder, ranks=2, strategies=LOPSIDED, steps=6)
    return folder, run("train", config, "--trace")
