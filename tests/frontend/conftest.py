"""Tests of tracing trace: no program comes from the cache, except where a test asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_kept_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.parent == Path(__file__).parent:
        monkeypatch.setattr("hydragraph.frontend.capture.path_of", lambda *_: None)
