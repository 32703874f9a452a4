"""Runs of these tests draw no picture of their losses unless asked to: drawing takes longer than a tiny run's steps.

Nor do they wait for a second of their own, which only TensorBoard needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from hydragraph.train import run_saving, step_metrics
from hydragraph.train.loss_picture import write_picture

AWAIT_LATER_NAME = step_metrics._await_later_name


@pytest.fixture(scope="module", autouse=True)
def undrawn() -> Iterator[None]:
    with mock.patch.object(run_saving, "write_picture"), mock.patch.object(step_metrics, "_await_later_name"):
        yield


@pytest.fixture
def drawn() -> Iterator[None]:
    """Draw the picture after all."""
    with mock.patch.object(run_saving, "write_picture", write_picture):
        yield
