"""The training loop with a plain executor: what it writes, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hydragraph.spec.record import from_record
from hydragraph.train import loop
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import evaluation_batches, open_tokens, prepare
from hydragraph.train.loop import train
from hydragraph.train.metrics import Metrics, read_metrics
from tests.train.plain import PlainExecutor, Watched, compile_plain, settings


def config(folder: Path, **changes: object) -> TrainConfig:
    return from_record(TrainConfig, {**settings(folder), **changes})


def curve(history: tuple[Metrics, ...] | list[Metrics]) -> list[Metrics]:
    return [replace(m, seconds=0.0, tokens_per_s=0.0, peak_memory_bytes=0) for m in history]


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    watched = Watched()
    outcome = train(config(tmp_path), "new", compile_plain, watched)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    written = {"config.yaml", "data", "metrics.jsonl", "tensorboard", "loss.png", "checkpoints", "model"}
    assert names == written | {"owner.json"}
    history = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert history == list(outcome.history) == watched.steps
    assert [m.step for m in history] == [1, 2, 3, 4, 5, 6]
    assert [m.eval_loss is not None for m in history] == [False, False, True, False, False, True]
    assert history[-1].loss < history[0].loss
    assert watched.done == 0
    assert watched.notes == []
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]


def test_strategies_take_turns(tmp_path: Path) -> None:
    history = train(config(tmp_path), "new", compile_plain, Watched()).history
    names = [m.strategy for m in history]
    assert len(set(names)) == 2
    assert names[0::2] == [names[0]] * 3
    assert names[1::2] == [names[1]] * 3
    assert "gpipe" in names[1]


def test_a_resumed_run_continues_the_same_curve_bit_for_bit(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = train(config(tmp_path / "whole", steps=7), "new", compile_plain, Watched())

    def fail_at_six(model: Any, strategy: Any, *, optimizer: Any, **_: object) -> PlainExecutor:
        return PlainExecutor(model, optimizer, fail_at=6)

    cut = replace(config(tmp_path / "cut", steps=7), data=config(tmp_path / "whole").data)
    with pytest.raises(FloatingPointError):
        train(cut, "new", fail_at_six, Watched())
    assert len(read_metrics(tmp_path / "cut" / "run" / "metrics.jsonl")) == 5, "one more than the checkpoint"
    watched = Watched()
    resumed = train(cut, "resume", compile_plain, watched)
    assert watched.done == 4
    assert [m.step for m in watched.steps] == [5, 6, 7]
    assert curve(resumed.history) == curve(whole.history)
    assert curve(read_metrics(resumed.folder.metrics)) == curve(whole.history)
    states = [torch.load(o.folder.place(7) / "state.pt")[0] for o in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_loss_that_is_not_finite_stops_with_a_sentence(tmp_path: Path) -> None:
    def fail(model: Any, strategy: Any, *, optimizer: Any, **_: object) -> PlainExecutor:
        return PlainExecutor(model, optimizer, fail_at=3)

    with pytest.raises(FloatingPointError) as caught:
        train(config(tmp_path), "new", fail, Watched())
    sentence = str(caught.value)
    assert sentence.startswith("step 3: the loss is inf; ")
    assert "step-00000002 stays the last checkpoint" in sentence


def test_transformers_loads_the_final_model(tmp_path: Path) -> None:
    outcome = train(config(tmp_path), "new", compile_plain, Watched())
    run = config(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(outcome.folder.model)
    batches = evaluation_batches(run, open_tokens(prepare(run)).file)
    total = tokens = 0.0
    for ids in (ids for batch in batches for ids in batch):
        total += model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
        tokens += len(ids) - 1
    assert total / tokens == pytest.approx(outcome.history[-1].eval_loss, rel=1e-5)
    encoder: Any = AutoTokenizer.from_pretrained(outcome.folder.model)
    assert encoder.decode(encoder("a0 b1 c2")["input_ids"]) == "a0 b1 c2"
    assert encoder.eos_token_id == model.config.eos_token_id


def test_training_continues_from_an_exported_model(tmp_path: Path) -> None:
    first = train(config(tmp_path), "new", compile_plain, Watched())
    record = {**settings(tmp_path), "model": {"path": str(first.folder.model)}, "output": str(tmp_path / "more")}
    second = train(from_record(TrainConfig, record), "new", compile_plain, Watched())
    assert second.history[0].loss < first.history[0].loss


def test_says_what_a_missing_package_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "tensorboard_installed", lambda: False)
    monkeypatch.setattr(loop, "matplotlib_installed", lambda: False)
    watched = Watched()
    train(config(tmp_path), "new", compile_plain, watched)
    assert ["matplotlib is not installed" in watched.notes[0], "tensorboard is not installed" in watched.notes[1]]
    assert all("pip install 'hydragraph[train]'" in note for note in watched.notes)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not names & {"tensorboard", "loss.png"}
    assert "model" in names


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategies": ["<tp1,pp3>"]}, "strategies[0]: strategy text"),
        ({"strategies": ["<tp1,pp1>", "<tp2,pp1>"]}, "strategies[1]: pipeline 0, stage 0: unknown rank"),
        ({"strategies": ["none.yaml"]}, "strategies[0]: "),
    ],
)
def test_refuses_strategies_before_it_touches_the_folder(tmp_path: Path, changes: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match="strategies") as caught:
        train(config(tmp_path, **changes), "new", compile_plain, Watched())
    assert sentence in str(caught.value)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"data"}


def test_refuses_a_damaged_corpus_before_it_touches_the_folder(tmp_path: Path) -> None:
    file = prepare(config(tmp_path)) / "tokens.bin"
    data = bytearray(file.read_bytes())
    data[130] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"tokens\.bin is truncated or corrupt: its sha256 .*delete it and rerun"):
        train(config(tmp_path), "new", compile_plain, Watched())
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"data"}


def test_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    train(config(tmp_path), "new", compile_plain, Watched())
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        train(config(tmp_path), "new", compile_plain, Watched())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    train(config(tmp_path), "overwrite", compile_plain, Watched())
