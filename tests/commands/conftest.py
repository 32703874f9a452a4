"""A run that several tests look at."""

from __future__ import annotations

import fcntl
import os
import pickle
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from tests.commands.tiny import DRAWN, LOPSIDED, run, write


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder with a config and the run of it on two ranks, with checkpoints after steps 4 and 6.

    All workers of pytest-xdist share it: no test changes the run.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _trained(tmp_path_factory.mktemp("trained"))
    folder = tmp_path_factory.getbasetemp().parent / "trained"  # the workers' folders are beside it
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        file = folder / "result.pickle"
        if not file.exists():
            _, result = _trained(folder)
            said = (result.stdout_bytes, result.stderr_bytes, result.output_bytes, result.exit_code)
            file.write_bytes(pickle.dumps(said))
    stdout, stderr, output, code = pickle.loads(file.read_bytes())
    return folder, Result(CliRunner(), stdout, stderr, output, None, code, None, None)


def _trained(folder: Path) -> tuple[Path, Result]:
    config = write(folder, ranks=2, strategies=LOPSIDED, steps=6)
    with mock.patch.dict(os.environ, {DRAWN: "1"}):
        return folder, run("train", config, "--trace")
