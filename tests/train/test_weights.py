"""Runs that start from a directory: each rank reads its own part into a model without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hydragraph as hg
from hydragraph.spec.record import from_record
from hydragraph.train.config import ModelConfig, TrainConfig
from hydragraph.train.loop import train
from hydragraph.train.model import build_model
from hydragraph.train.run_folder import Begin
from hydragraph.train.step_metrics import Metrics
from tests.thorough import thorough
from tests.train.plain import Watched, compile_plain, settings


def config(folder: Path, model: dict[str, Any], name: str, **changes: object) -> TrainConfig:
    record = {**settings(folder), "model": model, "strategies": ["<tp1,pp1>"], "output": str(folder / name)}
    return from_record(TrainConfig, {**record, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which "run/model" holds a trained model with tied embeddings and its tokenizer."""
    folder = tmp_path_factory.mktemp("weights")
    given = settings(folder)["model"]
    given["config"]["tie_word_embeddings"] = True
    train(config(folder, given, "run", steps=2, evaluate_every=0), "new", compile_plain, Watched())
    return folder


Curve = list[tuple[float, float, float | None]]


def curve(history: tuple[Metrics, ...]) -> Curve:
    return [(m.loss, m.grad_norm, m.eval_loss) for m in history]


def trained(folder: Path, model: dict[str, Any], name: str) -> tuple[Curve, set[str], Path]:
    """Run three steps; return the curve, where the model was, and where the new one is."""
    devices: set[str] = set()

    def compile(model: nn.Module, *arguments: Any, **options: Any) -> hg.Executable:
        devices.update(p.device.type for p in model.parameters())
        return hg.compile(model, *arguments, **options)

    outcome = train(config(folder, model, name, steps=3), "new", compile, Watched())
    return curve(outcome.history), devices, outcome.folder.model


@thorough
def test_weights_start_the_run_that_path_starts_without_a_whole_model(folder: Path) -> None:
    start = str(folder / "run" / "model")
    described = json.loads((folder / "run" / "model" / "config.json").read_text())
    new = settings(folder)["model"]
    new["config"] |= {"tie_word_embeddings": True, "vocab_size": described["vocab_size"]}
    whole, devices, expected = trained(folder, {"path": start}, "whole")
    assert devices == {"cpu"}
    for name, model in {"alone": {"weights": start}, "described": {**new, "weights": start}}.items():
        found, devices, made = trained(folder, model, name)
        assert devices == {"meta"}
        assert found == whole
        states = [AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (expected, made)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
        settings_of = [json.loads((each / "config.json").read_text()) for each in (expected, made)]
        assert settings_of[0] == settings_of[1]


@thorough
def test_a_resumed_run_keeps_what_it_learned(folder: Path) -> None:
    model, steady = {"weights": str(folder / "run" / "model")}, {"warmup": 0, "decay": "constant"}

    def go(name: str, steps: int, begin: Begin) -> Curve:
        given = config(folder, model, name, steps=steps, schedule=steady, evaluate_every=0)
        return curve(train(given, begin, hg.compile, Watched()).history)

    straight = go("straight", 4, "new")
    assert go("resumed", 2, "new") == straight[:2]
    assert go("resumed", 4, "resume") == straight


def test_weights_of_another_model_leave_the_run_that_they_would_replace(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run" / "model", tmp_path / "other")
    wide = AutoConfig.from_pretrained(tmp_path / "other", hidden_size=32)
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "other")
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    given = config(folder, {**settings(folder)["model"], "weights": str(tmp_path / "other")}, "run")
    with pytest.raises(ValueError, match=r"pretrained .*missing in the files: lm_head.weight; of another shape: "):
        train(given, "overwrite", hg.compile, Watched())
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before
    assert (folder / "run" / "checkpoints").is_dir()


def test_a_whole_model_can_still_be_built(folder: Path) -> None:
    start = str(folder / "run" / "model")
    whole, parts = (build_model(ModelConfig(**{field: start}), 50, 7, 0) for field in ("path", "weights"))  # pyrefly: ignore[bad-argument-type]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    assert {p.device.type for p in parts.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"weights": "a", "path": "b"}, "model: give 'architecture'"),
        ({}, "model: give 'architecture'"),
        ({"weights": "a", "config": {}}, "model: 'config' cannot change a model from 'weights'"),
        ({"weights": 3}, "model: 'weights' is 3"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="model") as caught:
        config(tmp_path, model, "run")
    assert sentence in str(caught.value)


def test_a_directory_without_a_tokenizer_or_a_config_is_refused(tmp_path: Path) -> None:
    given = config(tmp_path, {"weights": str(tmp_path / "nowhere")}, "run")
    with pytest.raises(ValueError, match=r"model.weights .*nowhere is not a directory"):
        train(given, "new", hg.compile, Watched())
    with pytest.raises(ValueError, match=r"model.weights .*nowhere is not a directory: name a directory"):
        build_model(given.model, 50, 7, 0)


def test_asynchronous_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint: 'asynchronous' is 'yes': give true or false"):
        config(tmp_path, {"weights": "a"}, "run", checkpoint={"asynchronous": "yes"})
