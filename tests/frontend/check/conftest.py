"""No test of the check reads or writes what the user's own runs remember; some share the graphs that they compile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def shared_graphs() -> Iterator[None]:
    """Keep what one test of a file compiles for the others: graphs are found by their content, so no wrong one is."""
    with mock.patch("hydragraph.passes.variants._shared", {}):
        yield
