"""One version, wherever it is asked for."""

from __future__ import annotations

from importlib.metadata import version

import hydragraph
from hydragraph.version import __version__


def test_the_version_is_the_packages() -> None:
    assert hydragraph.__version__ == __version__ == version("hydragraph")
