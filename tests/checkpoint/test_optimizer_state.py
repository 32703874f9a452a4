"""Optimizers of several kinds resume; states that no checkpoint could hold are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydragraph.checkpoint import save_and_load
from hydragraph.cluster.communicators import Groups
from hydragraph.errors import Unsupported
from tests.runtime.homes import ALONE, Named, Snapshot, make, step, trained


def nadam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.NAdam(named, lr=0.1)


def adagrad(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(named, lr=0.1)


@pytest.mark.parametrize("factory", [nadam, adagrad])
def test_optimizers_with_other_states(factory: Any, tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE, factory)
    step(home, optimizer, 1)
    save_and_load.save(tmp_path / "c", home, optimizer, {}, groups)
    resumed = make(ALONE, factory, seed=2)
    save_and_load.load(tmp_path / "c", *resumed, groups)
    for each in ((home, optimizer), resumed):
        step(*each, 2)
    straight, found = Snapshot.of(home, optimizer), Snapshot.of(*resumed)
    assert {key.split(".")[0] for key in straight.scalars} >= {"step"}
    assert found.scalars == straight.scalars
    assert all(torch.equal(flat, found.shards[key][1]) for key, (_, flat) in straight.shards.items())


def test_without_an_optimizer_only_weights_are_kept(made: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE, seed=5)
    save_and_load.load(made, home, None, groups)
    assert torch.equal(home.parameters["tiny"], trained(ALONE, "adamw")[0].parameters["tiny"])
    save_and_load.save(made, home, None, {}, groups)
    assert save_and_load.load(made, home, None, groups) == {}
    with pytest.raises(ValueError, match="saved with no optimizer, not AdamW"):
        save_and_load.load(made, home, optimizer, groups)


def test_a_state_of_another_shape_is_refused(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    optimizer.state[home.parameters["tiny"]]["row"] = torch.zeros(3)
    with pytest.raises(Unsupported, match=r"AdamW, parameter tiny: state row has shape \(3,\)"):
        save_and_load.save(tmp_path / "c", home, optimizer, {}, groups)
