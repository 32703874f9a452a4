"""Runs of these tests draw no picture of their losses unless asked to: drawing takes longer than a tiny run's steps."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from hydragraph.train import run_saving
from hydragraph.train.loss_picture import write_picture


@pytest.fixture(scope="module", autouse=True)
def undrawn() -> Iterator[None]:
    with mock.patch.object(run_saving, "write_picture"):
        yield


@pytest.fixture
def drawn() -> Iterator[None]:
    """Draw the picture after all."""
    with mock.patch.object(run_saving, "write_picture", write_picture):
        yield
