"""A run uses every GPU that it is given, whoever starts its processes, unless its config says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydragraph.train.available_devices import AvailableDevices, RanksIfEqual, devices_here
from hydragraph.train.config import TrainConfig
from tests.commands.tiny import write


def launched(patch: pytest.MonkeyPatch, gpus: int, processes: int = 0, here: int = 1) -> None:
    """Pretend that this machine has GPUs, and that a launcher started this process."""
    patch.setattr("torch.cuda.device_count", lambda: gpus)
    if processes:
        environment = {"RANK": 1, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": here}
        for name, value in environment.items():
            patch.setenv(name, str(value))


def test_there_is_a_rank_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 4)
    assert devices_here() == AvailableDevices(4, True, "4 GPUs of this machine")
    launched(monkeypatch, 1)
    assert devices_here() == AvailableDevices(1, True, "1 GPU of this machine")
    launched(monkeypatch, 0)
    assert devices_here().ranks == 1
    launched(monkeypatch, 0, processes=3, here=3)
    assert devices_here() == AvailableDevices(3, False, "3 ranks of the launcher")


@pytest.mark.parametrize(
    ("gpus", "processes", "here", "expected"),
    [(8, 0, 0, 8), (0, 0, 0, 1), (8, 2, 1, 16), (8, 1, 1, 8), (0, 2, 1, 2), (8, 16, 8, 16), (1, 2, 1, 2)],
)
def test_ranks_default_to_every_gpu_of_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int, here: int, expected: int
) -> None:
    launched(monkeypatch, gpus, processes, here)
    file = write(tmp_path, strategies="auto", ranks=None, device=None)
    config = TrainConfig.load(file)
    assert config.ranks == expected
    assert isinstance(config.ranks, RanksIfEqual) == (here == 1)
    given = TrainConfig.load(file, ["ranks=2"])
    assert given.ranks == 2
    assert not isinstance(given.ranks, RanksIfEqual)
    config.save(tmp_path / "saved.yaml")
    launched(monkeypatch, 3)
    assert TrainConfig.load(tmp_path / "saved.yaml") == config, "a run keeps its number of ranks"


def test_a_machine_with_few_gpus_leaves_the_least_number_of_ranks_to_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, strategies="auto", ranks=None, device=None, elastic={"min_ranks": 5})
    launched(monkeypatch, 2, processes=2)
    assert TrainConfig.load(file).ranks == 4
    with pytest.raises(ValueError, match="min_ranks is 5, but 'ranks' is 4: lower min_ranks"):
        TrainConfig.load(file, ["ranks=4"])


@pytest.mark.parametrize(
    ("changes", "alone", "launcher"),
    [
        ({"strategies": "<tp1,pp1>"}, 1, 1),
        ({"device": "cpu"}, 1, 2),
        ({"elastic": {"min_ranks": 0}}, 8, 2),
        ({"elastic": {"copies": 2}, "plan": {"profile": "profile.json"}}, 8, 16),
        ({"plan": {"profile": "profile.json"}}, 8, 2),
    ],
)
def test_other_settings_change_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], alone: int, launcher: int
) -> None:
    """Without a supervisor, a process that a launcher starts is a rank."""
    file = write(tmp_path, **{"strategies": "auto", "ranks": None, "device": None} | changes)
    launched(monkeypatch, 8)
    assert TrainConfig.load(file).ranks == alone
    launched(monkeypatch, 8, processes=2)
    assert TrainConfig.load(file).ranks == launcher
