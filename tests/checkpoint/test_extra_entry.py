"""What is no tensor: any plain data comes back, anything else is refused before writing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from hydragraph.checkpoint import save_and_load
from hydragraph.cluster.communicators import Groups
from tests.runtime.homes import ALONE, make


def test_extra_is_any_plain_data(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    extra = {"random": random.getstate(), "torch": torch.get_rng_state(), "data": {"position": (3, [1, None, b"x"])}}
    save_and_load.save(tmp_path / "c", home, optimizer, extra, groups)
    found = save_and_load.load(tmp_path / "c", home, optimizer, groups)
    assert torch.equal(found.pop("torch"), extra.pop("torch"))
    assert found == extra


def test_extra_that_could_not_be_read_back_is_refused_before_writing(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    for value in (ALONE, lambda: 0):
        with pytest.raises(ValueError, match=r"extra\['bad'\] is not plain data"):
            save_and_load.save(tmp_path / "c", home, optimizer, {"good": 1, "bad": value}, groups)
    assert list(tmp_path.iterdir()) == []


def test_hyperparameters_that_could_not_be_read_back_are_refused(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    optimizer.param_groups[0]["schedule"] = lambda: 0
    with pytest.raises(ValueError, match="the optimizer is not plain data"):
        save_and_load.save(tmp_path / "c", home, optimizer, {}, groups)
