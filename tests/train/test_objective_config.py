"""Objectives are written as a name or as a mapping, and what does not go with them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.objective_config import DpoConfig, ObjectiveConfig, OrpoConfig, SimpoConfig
from tests.train.plain import settings


def config(folder: Path, data: dict[str, Any] | None = None, **changes: object) -> TrainConfig:
    plain = settings(folder)
    given = {**plain["data"], "tokens_per_step": 512, "max_length": 64, **(data or {})}
    return from_record(TrainConfig, {**plain, "objective": "dpo", **changes, "data": given})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("dpo", DpoConfig()),
        ({"dpo": {}}, DpoConfig()),
        ({"dpo": {"beta": 0.3, "label_smoothing": 0.1}}, DpoConfig(0.3, 0.1)),
        ({"simpo": {"gamma": 0.5}}, SimpoConfig(gamma=0.5)),
        ("orpo", OrpoConfig()),
    ],
)
def test_an_objective_is_a_name_or_a_mapping(written: object, meant: object, tmp_path: Path) -> None:
    read = config(tmp_path, objective=written)
    assert read.objective is not None
    assert read.objective.loss == meant
    assert read.objective.needs_reference == isinstance(meant, DpoConfig)
    read.save(tmp_path / "resolved.yaml")
    assert TrainConfig.load(tmp_path / "resolved.yaml") == read
    assert TrainConfig.load(tmp_path / "resolved.yaml", ["objective={orpo: {weight: 2}}"]).objective == ObjectiveConfig(
        orpo=OrpoConfig(2)
    )


def test_every_corpus_is_read_as_pairs(tmp_path: Path) -> None:
    read = config(tmp_path, {"evaluation": {"other": {"paths": ["x.jsonl"]}}})
    assert read.data.format == read.data.evaluation["other"].format == "preference"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"objective": {}}, "'objective' is empty: give one of dpo, simpo and orpo"),
        ({"objective": {"dpo": {}, "orpo": {}}}, "'objective' has dpo and orpo: give one"),
        ({"objective": "ppo"}, "'objective' is 'ppo': use dpo or simpo or orpo"),
        ({"objective": {"dpo": {"beta": -1}}}, r"objective.dpo: 'beta' is -1: give a number of at least 0"),
        ({"objective": {"simpo": {"beta": 0}}}, r"objective.simpo: 'beta' is 0, which makes every gradient zero"),
        ({"objective": {"dpo": {"beat": 1}}}, r"objective.dpo: unknown field 'beat': did you mean 'beta'"),
        ({"label_smoothing": 0.1}, r"label_smoothing has no effect with an objective.*objective.dpo.label_smoothing"),
        (
            {"data": {"format": "chat"}},
            "data.format is chat, but the objective compares two answers: leave data.format out",
        ),
        ({"data": {"max_length": 512}}, "both answers of a pair must fit.*tokens_per_step to at least 1024"),
    ],
)
def test_what_does_not_go_with_an_objective_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(tmp_path, **changes)
