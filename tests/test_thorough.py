"""Cases that `make test` leaves to `make thorough`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CASES = """
import pytest
from tests.thorough import only

@only(NAMES)
@pytest.mark.parametrize("number", [1, 2, 3], ids=["one", "two", "three"])
def test_numbers(number):
    assert number != 3
"""
CONFTEST = """
from tests.thorough import mark_others

def pytest_collection_modifyitems(items):
    mark_others(items, whole=True)
"""


def run(folder: Path, names: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -m 'not thorough'\nmarkers =\n    thorough: x\n    only: x\n"
    )
    (folder / "test_numbers.py").write_text(CASES.replace("NAMES", names))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    return done.stdout + done.stderr


def test_only_the_named_cases_run_and_a_name_without_a_case_is_an_error(tmp_path: Path) -> None:
    assert "1 passed, 2 deselected" in run(tmp_path, '"one"')
    assert "test_numbers: no case has the id 'four', which @only names" in run(tmp_path, '"one", "four"')
