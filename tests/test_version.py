"""One version, wherever it is asked for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import hydragraph
from hydragraph.version import __version__


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert hydragraph.__version__ == __version__ == project["version"]
