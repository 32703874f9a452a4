"""The config of `hydragraph train`: the one that is named, or one that is written for data and a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from hydragraph.commands.config_or_data import _is_config, config_of
from hydragraph.train.config import TrainConfig
from tests.commands.tiny import run, write

SMALL = ("hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "num_attention_heads=2")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    turns = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "it is a test of tests"}]
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 60)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    LlamaConfig(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_data_without_a_config_train_and_the_config_is_kept(data: Path, tmp_path: Path) -> None:
    to = tmp_path / "first.yaml"
    sets = [f"--set=model.config.{each}" for each in (*SMALL, "num_key_value_heads=2")]
    sets += ["--set=data.vocab_size=300", "--set=steps=2", f"--set=output={tmp_path / 'run'}", "--set=device=cpu"]
    sets += ["--set=strategies=<tp1,pp1>", "--set=ranks=1"]
    trained = run("train", data, "--to", to, *sets)
    assert trained.exit_code == 0, trained.output
    assert "wrote the config of this run (no model was given" in trained.stderr
    assert "in 2 steps; all results are in" in trained.stderr
    assert TrainConfig.load(to).automatic
    again = run("train", data, "--to", to, *sets)  # the config is there, and so is the run
    assert again.exit_code == 2
    assert "already holds a run: continue it with --resume" in again.stderr


def test_the_model_is_in_the_config_and_the_launcher_sets_the_ranks(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    to = tmp_path / "first.yaml"
    follower = config_of([data, model], to, ["steps=7"])
    assert not to.exists()  # written by rank 0
    monkeypatch.setenv("RANK", "0")
    assert config_of([model, data], to, ["steps=7"]) == follower
    assert (follower.ranks, follower.steps, follower.automatic) == (3, 7, True)
    assert follower.model.path == str(model)
    assert TrainConfig.load(to, ["steps=7"]) == follower


def test_a_process_per_machine_trains_on_all_gpus_and_the_config_is_for_any_number(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of another size, or a job that starts again on other machines, finds the config that it would write."""
    to = tmp_path / "first.yaml"
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for gpus in (8, 4):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert config_of([data], to).ranks == 2 * gpus


def test_a_config_of_somebody_else_is_not_replaced(data: Path, tmp_path: Path) -> None:
    to = tmp_path / "first.yaml"
    to.write_text("mine")
    with pytest.raises(ValueError, match=rf"{to} exists and differs.*hydragraph train {to}, or choose another"):
        config_of([data], to)
    assert to.read_text() == "mine"
    with pytest.raises(ValueError, match=r"in the folder .*none, which does not exist"):
        config_of([data], tmp_path / "none" / "first.yaml")


def test_a_named_config_is_read(data: Path, tmp_path: Path) -> None:
    config = write(tmp_path)
    assert config_of([config], tmp_path / "unused.yaml") == TrainConfig.load(config)
    assert not (tmp_path / "unused.yaml").exists()
    with pytest.raises(ValueError, match=r"is a config: pass only this config"):
        config_of([config, data], tmp_path / "unused.yaml")


@pytest.mark.parametrize("name", ["run.cfg", "run.yaml.bak", "run.json"])
def test_a_config_is_not_trained_on_as_text_whatever_its_name(name: str, tmp_path: Path) -> None:
    config = write(tmp_path).rename(tmp_path / name)
    if name == "run.json":
        config.write_text(json.dumps(yaml.safe_load(config.read_text())))
    assert config_of([config], tmp_path / "unused.yaml") == TrainConfig.load(config)


@pytest.mark.parametrize("text", ["the model: and the data", "model: 1\ndata: 2\n", "[" * 5_000 + "model data"])
def test_text_about_models_and_data_is_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "essay.txt").write_text(text)
    assert not _is_config(tmp_path / "essay.txt")


def test_a_config_is_read_from_a_redirected_file(tmp_path: Path) -> None:
    with write(tmp_path).open() as file:
        config = config_of([Path(f"/dev/fd/{file.fileno()}")], tmp_path / "unused.yaml")
    assert config == TrainConfig.load(tmp_path / "config.yaml")
    assert not _is_config(Path("/dev/shm"))


def test_a_model_alone_and_names_of_the_hub_are_refused_with_a_remedy(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model is a model: also pass the files or folders of data"):
        config_of([model], tmp_path / "a.yaml")
    with pytest.raises(ValueError, match=r"hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"):
        config_of([data, Path("Qwen/Qwen2.5-0.5B")], tmp_path / "a.yaml")
    with pytest.raises(ValueError, match=r"nowhere.jsonl does not exist: name a file or folder of data"):
        config_of([Path("nowhere.jsonl")], tmp_path / "a.yaml")
    with pytest.raises(FileNotFoundError, match=r"run.yaml"):
        config_of([Path("run.yaml")], tmp_path / "a.yaml")
