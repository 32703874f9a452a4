"""The training loop with a plain executor: what it writes, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hydragraph as hg
from hydragraph.checkpoint.piece_sources import StorageTier
from hydragraph.checkpoint.standalone_reader import read_weights
from hydragraph.cluster.launch import apart
from hydragraph.cluster.processes.rank_process import KEPT
from hydragraph.cluster.processes.stop_requests import Stopping
from hydragraph.data import tokenizer
from hydragraph.data.chat import CHATML_TOKENS
from hydragraph.errors import Stopped
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.record import from_record
from hydragraph.train import loop, run_saving, step_reporting
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import evaluation_batches, mini_batches, open_tokens, prepare
from hydragraph.train.loop import train
from hydragraph.train.progress_line import evaluation_text
from hydragraph.train.run_folder import Checkpoint, RunFolder
from hydragraph.train.step_metrics import Metrics, read_metrics
from hydragraph.train.stragglers import expected_seconds
from tests.thorough import first, thorough
from tests.train.plain import PlainExecutor, PlainReport, Watched, compile_plain, settings


def config(folder: Path, **changes: object) -> TrainConfig:
    return from_record(TrainConfig, {**settings(folder), **changes})


def curve(history: tuple[Metrics, ...] | list[Metrics]) -> list[Metrics]:
    return [replace(m, seconds=0.0, tokens_per_s=0.0, peak_memory_bytes=0, time="") for m in history]


@pytest.mark.usefixtures("drawn")
def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    watched = Watched()
    outcome = train(config(tmp_path), "new", compile_plain, watched)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    written = {"config.yaml", "data", "metrics.jsonl", "tensorboard", "loss.png", "checkpoints", "model"}
    assert names == written | {"owner.json", "ranks.json", "events.jsonl", "tokenizer"}
    history = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert history == list(outcome.history) == watched.steps
    assert [m.step for m in history] == [1, 2, 3, 4, 5, 6]
    assert [m.eval_loss is not None for m in history] == [False, False, True, False, False, True]
    assert history[-1].loss < history[0].loss
    assert history[0].processed == round(history[0].tokens_per_s * 0.5) == history[0].tokens + history[0].sequences
    assert watched.done == 0
    assert watched.notes == []
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]


def test_a_rank_that_joins_reads_the_data_as_it_was_when_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(tmp_path)
    (tmp_path / "kept").mkdir(0o700)
    monkeypatch.setenv(KEPT, str(tmp_path / "kept"))
    began = loop.shared_tokens(given, apart("cpu"), Watched())
    (Path(given.data.paths[0]) / "more.txt").write_text("text that was added during the run")
    assert prepare(given) != began.directory
    nothing: Any = None
    with mock.patch.object(loop._RunInputs, "of", side_effect=TimeoutError) as of, pytest.raises(TimeoutError):
        loop._join_run(given, loop._Launched(nothing, nothing, nothing, RunFolder(tmp_path / "run"), nothing))
    assert of.call_args.args[1].fingerprint == began.fingerprint


def test_a_spare_reads_the_folder_after_the_run_has_begun_and_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts with the first ranks, which may still replace an earlier run and score answers."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a b", "chosen": " c", "rejected": " d"}\n' * 24)
    data = {**settings(tmp_path)["data"], "paths": [str(tmp_path / "pairs.jsonl")], "heldout": None}
    given = config(
        tmp_path, data=data, objective="dpo", checkpoint={"pieces": {"peers": False, "local": str(tmp_path / "local")}}
    )
    stored = {"user": {"mini_batches": {"heldout": 0.0}}}  # of an earlier run without evaluations
    monkeypatch.setattr(loop, "read_extra", lambda _: stored)
    (tmp_path / "run/checkpoints/step-00000006").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000006/complete.json").write_text("{}")
    nothing: Any = None
    world, folder = apart("cpu"), RunFolder(tmp_path / "run")
    with mock.patch.object(loop, "_follow") as follow:
        loop._join_run(given, launched := loop._Launched(compile_plain, nothing, world, folder, Stopping(30)))
    run, state, *_ = follow.call_args.args

    folder.begin(given, "overwrite")
    stored["user"]["mini_batches"]["heldout"] = 0.25
    folder.place(0).mkdir(parents=True)
    (folder.place(0) / "complete.json").write_text("{}")
    tokens = open_tokens(given, prepare(given))
    began = replace(given, data=replace(given.data, heldout=0.25))
    first = loop._RunInputs.of(began, tokens, loop._model(began, tokens), 1, launched, joins=False)
    assert first.reference is not None
    for scores in first.reference.of.values():
        scores[:] = -2.0
    first.reference._write(world)

    joined = run.joined()
    assert joined.config.held_out == 0.25
    assert [group["weight_decay"] for group in joined.settings] == [given.optimizer.weight_decay, 0.0]
    assert joined.pieces.shelves[StorageTier.DISK].root == tmp_path / "local" / folder.identity[0]
    drawn = [*next(state.batches), *next(state.anew()), *joined.evaluation["heldout"][0]]
    assert {float(answer["reference"]) for answer in drawn} == {-2.0}
    assert run.joined() is joined, "the ranks may have to meet once more"


class Expecting(PlainExecutor):
    """Takes a quarter more than it expects."""

    def step(self, sequences: Sequence[torch.Tensor], strategy: hg.Strategy | None = None) -> PlainReport:
        return replace(super().step(sequences, strategy), expected_s=0.4)


def compile_expecting(model: Any, strategy: Any, *, optimizer: Any, **_: object) -> Expecting:
    return Expecting(model, optimizer)


def test_expected_seconds_are_told_beside_measured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_seconds, "STEPS", 5)
    monkeypatch.setattr(expected_seconds, "LEAST", 3)
    watched = Watched()
    history = train(config(tmp_path), "new", compile_expecting, watched).history
    sentence = "expected 0.4 s per step, measured 0.5 s (25% more; median of 3 steps)"
    assert watched.notes == [f"step 5: {sentence}"]  # without a controller there is no replanning
    assert [m.comparison for m in history] == ["", "", "", "", sentence, ""]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == list(history)


def test_strategies_take_turns(tmp_path: Path) -> None:
    given: list[Any] = []

    def compiled(model: Any, strategy: Any, **named: Any) -> PlainExecutor:
        given.extend(strategy)
        return compile_plain(model, strategy, **named)

    history = train(config(tmp_path), "new", compiled, Watched()).history
    names = [m.strategy for m in history]
    assert list(map(str, given)) == names[:2], "owners are chosen for both"
    assert len(set(names)) == 2
    assert names[0::2] == [names[0]] * 3
    assert names[1::2] == [names[1]] * 3
    assert "gpipe" in names[1]


@thorough
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
        train(config(tmp_path, checkpoint_every=0), "new", fail, Watched())
    sentence = str(caught.value)
    assert sentence.startswith("step 3: the loss is inf; ")
    assert "the last checkpoint is " in sentence
    assert "step-00000002: continue with --resume" in sentence
    resumed = train(config(tmp_path), "resume", compile_plain, Watched())
    (tmp_path / "whole").mkdir()
    whole = replace(config(tmp_path), output=str(tmp_path / "whole"))
    assert curve(resumed.history) == curve(train(whole, "new", compile_plain, Watched()).history)
    with pytest.raises(FloatingPointError, match=r"--resume, or from an earlier one with --resume-from step-1$"):
        train(config(tmp_path, checkpoint_every=1), "overwrite", fail, Watched())


def test_transformers_loads_the_final_model(tmp_path: Path) -> None:
    outcome = train(config(tmp_path), "new", compile_plain, Watched())
    run = config(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(outcome.folder.model)
    batches = evaluation_batches(run, open_tokens(run, prepare(run)))["heldout"]
    total = tokens = 0.0
    for ids in (ids for batch in batches for ids in batch):
        total += model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1)
        tokens += len(ids) - 1
    assert total / tokens == pytest.approx(outcome.history[-1].eval_loss, rel=1e-5)
    encoder: Any = AutoTokenizer.from_pretrained(outcome.folder.model)
    assert encoder.decode(encoder("a0 b1 c2")["input_ids"]) == "a0 b1 c2"
    assert encoder.eos_token_id == model.config.eos_token_id


def test_an_exported_model_stops_after_answers_of_its_chat_template(tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train_bpe(["a b"], 300, ("<|endoftext|>", *CHATML_TOKENS)), tmp_path / "chat")
    data = {**settings(tmp_path)["data"], "tokenizer": str(tmp_path / "chat"), "chat_template": "chatml"}
    model = train(config(tmp_path, steps=1, data=data), "new", compile_plain, Watched()).folder.model
    ends: Any = GenerationConfig.from_pretrained(model).eos_token_id
    assert AutoTokenizer.from_pretrained(model).convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]


def test_training_continues_from_an_exported_model(tmp_path: Path) -> None:
    first = train(config(tmp_path), "new", compile_plain, Watched())
    record = {**settings(tmp_path), "model": {"path": str(first.folder.model)}, "output": str(tmp_path / "more")}
    second = train(from_record(TrainConfig, record), "new", compile_plain, Watched())
    assert second.history[0].loss < first.history[0].loss


def test_says_what_a_missing_package_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reporting, "tensorboard_installed", lambda: False)
    for module in (run_saving, step_reporting):
        monkeypatch.setattr(module, "matplotlib_installed", lambda: False)
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
        (
            {"strategies": ["<tp1,pp1>", "<tp2,pp1>"]},
            "strategies[1]: pipeline 0, stage 0: there is no rank 1, only rank 0",
        ),
        ({"strategies": ["none.yaml"]}, "strategies[0]: "),
    ],
)
def test_refuses_strategies_before_it_touches_the_folder(tmp_path: Path, changes: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match="strategies") as caught:
        train(config(tmp_path, **changes), "new", compile_plain, Watched())
    assert sentence in str(caught.value)
    assert not list((tmp_path / "run").iterdir()), "data was prepared for a run that cannot be"


def test_a_planned_cluster_has_the_ranks_of_the_launcher(tmp_path: Path) -> None:
    """The config's ranks have no effect if a launcher such as torchrun starts them."""
    cluster = tmp_path / "cluster.yaml"
    default_cluster(1).save(cluster)
    compile = mock.Mock(side_effect=TimeoutError)
    with pytest.raises(TimeoutError):
        train(config(tmp_path, ranks=2, plan={"choose": True, "cluster": str(cluster)}), "new", compile, Watched())
    assert compile.call_args.kwargs["profile"] == default_cluster(1)


def test_refuses_a_damaged_corpus_before_it_touches_the_folder(tmp_path: Path) -> None:
    file = prepare(config(tmp_path)) / "tokens.bin"
    data = bytearray(file.read_bytes())
    data[130] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"tokens\.bin is truncated or corrupt: the sha256 of its content .*delete it and rerun"
    ):
        train(config(tmp_path), "new", compile_plain, Watched())
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"data"}


def test_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    train(config(tmp_path), "new", compile_plain, Watched())
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        train(config(tmp_path), "new", compile_plain, Watched())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    train(config(tmp_path), "overwrite", compile_plain, Watched())


class StoppingAfter(Watched):
    """A watcher at whose terminal somebody asks the run to stop."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.stopping = step, Stopping(30)

    def stepped(self, metrics: Metrics) -> None:
        super().stepped(metrics)
        if metrics.step == self.step:
            self.stopping.signal = 15


@pytest.mark.parametrize("step", first([3], [3, 4]), ids=["between checkpoints", "after one"])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_as_if_it_had_not(step: int, tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = train(config(tmp_path / "whole"), "new", compile_plain, Watched())
    cut = replace(config(tmp_path / "cut"), data=config(tmp_path / "whole").data)
    watched = StoppingAfter(step)
    outcome = train(cut, "new", compile_plain, watched, stopping=watched.stopping)
    assert outcome.stopped == 15
    assert [m.step for m in outcome.history] == list(range(1, step + 1))
    assert outcome.folder.last() == Checkpoint(outcome.folder.place(step), step)
    assert not outcome.folder.model.exists()
    resumed = train(cut, "resume", compile_plain, Watched())
    assert resumed.stopped == 0
    assert curve(resumed.history) == curve(whole.history)


def test_a_run_that_is_asked_to_stop_during_an_evaluation_skips_it_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = Stopping(30)

    def evaluate(*_: object) -> PlainReport:
        stopping.signal = 15
        raise Stopped(15)

    monkeypatch.setattr(PlainExecutor, "evaluate", evaluate)
    run = config(tmp_path, evaluate_every=3, checkpoint_every=0)
    outcome = train(run, "new", compile_plain, Watched(), stopping=stopping)
    assert outcome.stopped == 15
    assert [(m.step, m.eval_loss) for m in outcome.history] == [(1, None), (2, None), (3, None)]
    assert saved(tmp_path) == ["3"]


def test_a_run_that_is_asked_to_stop_before_its_first_step_saves_nothing(tmp_path: Path) -> None:
    stopping = Stopping(30)
    stopping.signal = 2
    outcome = train(config(tmp_path), "new", compile_plain, Watched(), stopping=stopping)
    assert outcome.stopped == 2
    assert outcome.folder.last() is None


def test_resuming_says_where_and_what_the_config_changes(tmp_path: Path) -> None:
    train(config(tmp_path), "new", compile_plain, Watched())
    watched = Watched()
    optimizer = {"lr": 0.02, "weight_decay": 0.0}
    train(config(tmp_path, steps=7, optimizer=optimizer, max_grad_norm=None), "resume", compile_plain, watched)
    assert watched.notes == [
        f"continuing after step 6 of 7, from {tmp_path / 'run' / 'checkpoints' / 'step-00000006'}; changed settings: "
        "steps 6 -> 7, optimizer.lr 0.01 -> 0.02, max_grad_norm 1.0 -> none"
    ]
    watched = Watched()
    train(config(tmp_path, steps=7, optimizer=optimizer, max_grad_norm=None), "resume", compile_plain, watched)
    assert watched.notes[0].endswith("step-00000007")


def test_a_resumed_run_holds_out_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "read_extra", lambda path: {"user": torch.load(path / "state.pt")[2]})
    train(config(tmp_path, evaluate_every=0), "new", compile_plain, Watched())
    unset = {**settings(tmp_path)["data"], "heldout": None}
    watched = Watched()
    outcome = train(config(tmp_path, steps=7, evaluate_every=0, data=unset), "resume", compile_plain, watched)
    assert outcome.history[-1].step == 7
    assert TrainConfig.load(outcome.folder.config).data.heldout == 0.2
    assert watched.notes[-1].endswith("changed settings: steps 6 -> 7")


def test_a_resumed_run_evaluates_only_if_documents_were_held_out_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "read_extra", lambda path: {"user": torch.load(path / "state.pt")[2]})
    unset = {**settings(tmp_path)["data"], "heldout": None}
    train(config(tmp_path, evaluate_every=0, data=unset), "new", compile_plain, Watched())
    with pytest.raises(ValueError, match=r"held out no documents, .*: set data\.evaluation, or start a new run"):
        train(config(tmp_path, steps=7, evaluate_every=1, data=unset), "resume", compile_plain, Watched())
    named = {**unset, "evaluation": {"texts": {"paths": unset["paths"]}}}
    outcome = train(config(tmp_path, steps=7, evaluate_every=1, data=named), "resume", compile_plain, Watched())
    assert outcome.history[-1].eval_losses.keys() == {"texts"}


def test_a_resume_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    whole = train(config(tmp_path, keep=3), "new", compile_plain, Watched())
    (whole.folder.tokenizer / "tokenizer.json").write_text("of this run")

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in whole.folder.path.rglob("*") if path.is_file()}

    before = contents()
    changed = config(tmp_path, keep=3, data={**settings(tmp_path)["data"], "tokens_per_step": 128})
    with pytest.raises(ValueError, match=r"tokens is 96, .* is 128: resume with the same data\.tokens_per_step"):
        train(changed, "resume", compile_plain, Watched(), step=4)
    assert contents() == before
    changed = config(tmp_path, keep=3, data={**settings(tmp_path)["data"], "max_samples": 9})
    with pytest.raises(ValueError, match="resume with the same data"):
        train(changed, "resume", compile_plain, Watched(), step=4)
    assert contents() == before


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(tmp_path: Path) -> None:
    whole = train(config(tmp_path, keep=3), "new", compile_plain, Watched())
    places = [whole.folder.place(step) for step in (2, 4, 6)]
    for place in places[1:]:
        (place / "damaged").touch()
    watched = Watched()
    resumed = train(config(tmp_path, keep=1), "resume", compile_plain, watched)
    assert watched.notes[0] == (
        f"a DAMAGED checkpoint was renamed: checkpoint {places[2]}: state.pt is corrupt; trying {places[1]}"
    )
    assert watched.notes[2].startswith(f"continuing after step 2 of 6, from {places[0]}")
    assert curve(resumed.history) == curve(whole.history)
    names = sorted(path.name.split("-")[1] for path in whole.folder.checkpoints.iterdir())
    assert names == ["00000004.damaged", "00000006", "00000006.damaged"]


def test_where_every_checkpoint_is_damaged_all_stay_where_they_are(tmp_path: Path) -> None:
    whole = train(config(tmp_path, keep=1), "new", compile_plain, Watched())
    (whole.folder.place(6) / "damaged").touch()
    with pytest.raises(ValueError, match=r"step-00000006: state\.pt is corrupt"):
        train(config(tmp_path), "resume", compile_plain, Watched())
    assert whole.folder.place(6).is_dir()


def test_resuming_from_an_earlier_step_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    whole = train(config(tmp_path, keep=3), "new", compile_plain, Watched())
    with pytest.raises(ValueError, match=r"of step 3 \(complete: step-2, step-4, step-6\)"):
        train(config(tmp_path), "resume", compile_plain, Watched(), step=3)
    (whole.folder.place(4) / "damaged").touch()
    with pytest.raises(ValueError, match="corrupt"):  # it was asked for, so no other will do
        train(config(tmp_path, keep=3), "resume", compile_plain, Watched(), step=4)
    (whole.folder.place(4) / "damaged").unlink()
    watched = StoppingAfter(5)
    train(config(tmp_path, keep=1), "resume", compile_plain, watched, step=4, stopping=watched.stopping)
    assert [m.step for m in watched.steps] == [5]
    assert whole.folder.last() == Checkpoint(whole.folder.place(5), 5)
    resumed = train(config(tmp_path), "resume", compile_plain, Watched())
    assert curve(resumed.history) == curve(whole.history)
    assert sorted(p.name.split("-")[1] for p in whole.folder.checkpoints.iterdir()) == [
        "00000005",
        "00000006",
        "00000006.later",
    ]


def test_a_folder_that_vanishes_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    class Removing(Watched):
        def stepped(self, metrics: Metrics) -> None:
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(OSError, match=r"No such file.*metrics\.jsonl.*run was deleted, with its checkpoints"):
        train(config(tmp_path, checkpoint_every=0), "new", compile_plain, Removing())
    assert not (tmp_path / "run").exists()


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a read-only file system; root may write anywhere else
    with pytest.raises(OSError, match=r"run cannot be written \(.* is read-only here\): choose another output"):
        train(config(tmp_path), "new", compile_plain, Watched())
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_trains_with_the_optimizer_settings_of_its_config(tmp_path: Path) -> None:
    def settings_after(changes: dict[str, Any]) -> dict[str, Any]:
        first = config(tmp_path, steps=2, checkpoint_every=2)
        train(first, "new", compile_plain, Watched())
        seen: list[torch.optim.Optimizer] = []

        def compile_seen(*given: Any, **options: Any) -> Any:
            executor = compile_plain(*given, **options)
            seen.append(executor.optimizer)
            return executor

        resumed = replace(first, steps=3, optimizer=replace(first.optimizer, **changes))
        train(resumed, "resume", compile_seen, Watched())
        shutil.rmtree(tmp_path / "run")
        return dict(seen[0].param_groups[0])

    assert settings_after({"weight_decay": 0.5})["weight_decay"] == 0.5
    assert settings_after({"betas": (0.5, 0.6), "eps": 1e-3})["betas"] == (0.5, 0.6)


class Losses(PlainExecutor):
    """An executor whose evaluations return the given losses, by step."""

    def __init__(self, model: Any, optimizer: Any, losses: dict[int, float], done: int = 0) -> None:
        super().__init__(model, optimizer)
        self.losses, self.steps = losses, done

    def evaluate(self, sequences: Any, strategy: Any = None) -> Any:
        if math.isnan(self.losses[self.steps]):
            raise FloatingPointError("loss nan")
        return replace(super().evaluate(sequences, strategy), loss=self.losses[self.steps])


def compile_losses(losses: dict[int, float], done: int = 0) -> Any:
    return lambda model, strategy, *, optimizer, **_: Losses(model, optimizer, losses, done)


def saved(folder: Path) -> list[str]:
    names = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    return [name.removeprefix("step-").lstrip("0") for name in names]


def test_a_run_evaluates_and_saves_a_number_of_times_per_epoch(tmp_path: Path) -> None:
    run = config(tmp_path, steps=0, epochs=2, evaluate_every=0, evaluate_per_epoch=2, checkpoint_every=0)
    run = replace(run, checkpoint_per_epoch=1, keep=9)
    outcome = train(run, "new", compile_plain, Watched())
    file = open_tokens(run, prepare(run))
    stream = mini_batches(run, file)
    drawn = [sum(stream.skip()) for _ in outcome.history]
    halves = [sum(drawn[: i + 1]) * 2 // stream.tokens for i in range(len(drawn))]
    evaluated = {i + 1 for i, n in enumerate(halves) if n > (halves[i - 1] if i else 0)}
    assert {m.step for m in outcome.history if m.eval_loss is not None} == evaluated | {len(drawn)}
    assert len(evaluated) == 4
    first_pass = next(i + 1 for i, n in enumerate(halves) if n >= 2)
    assert [int(name) for name in saved(tmp_path)] == [first_pass, len(drawn)]


def test_a_run_without_a_lower_evaluation_loss_ends_and_so_does_a_resumed_one(tmp_path: Path) -> None:
    run = config(tmp_path, steps=9, evaluate_every=1, checkpoint_every=0, patience=3, min_improvement=0.1)
    losses = {1: 3.0, 2: 2.0, 3: 1.95, 4: 2.5, 5: 1.9, 6: 1.0, 7: 0.5, 8: 0.4, 9: 0.3}
    watched = Watched()
    outcome = train(run, "new", compile_losses(losses), watched)
    assert outcome.stopped == 0
    assert [m.step for m in outcome.history] == [1, 2, 3, 4, 5]
    assert saved(tmp_path) == ["5"]
    assert outcome.folder.model.is_dir()
    assert watched.notes[-1] == (
        "ending after step 5 of 9: the evaluation loss has not fallen by more than 0.1 in 3 evaluations (patience); "
        "the lowest loss was after step 5"
    )
    ended = train(run, "resume", compile_losses(losses, 5), Watched())
    assert [m.step for m in ended.history] == [1, 2, 3, 4, 5]
    longer = train(replace(run, patience=4), "resume", compile_losses(losses, 5), Watched())
    assert [m.step for m in longer.history] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_patience_counts_on_in_a_resumed_run(tmp_path: Path) -> None:
    run = config(tmp_path, steps=9, evaluate_every=1, checkpoint_every=1, patience=3)
    losses = {1: 2.0, 2: 3.0, 3: 3.0, 4: 3.0, 5: 1.0}
    watched = StoppingAfter(3)
    train(run, "new", compile_losses(losses), watched, stopping=watched.stopping)
    resumed = train(run, "resume", compile_losses(losses, 3), Watched())
    assert [m.step for m in resumed.history] == [1, 2, 3, 4]


def test_a_smoothed_loss_has_no_perplexity(tmp_path: Path) -> None:
    last = train(config(tmp_path, steps=3, label_smoothing=0.1), "new", compile_plain, Watched()).history[-1]
    assert last.perplexities == {}
    assert evaluation_text(last) == f"held out {last.eval_loss:.4f}"


def test_training_continues_after_an_evaluation_that_is_not_finite(tmp_path: Path) -> None:
    run = config(tmp_path, steps=3, evaluate_every=1)
    watched = Watched()
    history = train(run, "new", compile_losses({1: 1.0, 2: math.nan, 3: 2.0}), watched).history
    assert [evaluation_text(m).split()[2] for m in history] == ["1.0000", "nan", "2.0000"]
    assert watched.notes == ["step 2: the loss on heldout is not finite; training continues"]
    assert math.isnan(read_metrics(tmp_path / "run" / "metrics.jsonl")[1].eval_losses["heldout"])


def test_the_best_checkpoint_stays_beside_the_newest_ones(tmp_path: Path) -> None:
    run = config(tmp_path, steps=6, evaluate_every=1, checkpoint_every=0, keep=1, keep_best=True)
    losses = {1: 3.0, 2: 1.5, 3: 2.0, 4: 1.0, 5: 1.2, 6: 2.5}
    watched = StoppingAfter(3)
    train(run, "new", compile_losses(losses), watched, stopping=watched.stopping)
    assert saved(tmp_path) == ["2", "3"]
    watched = StoppingAfter(5)
    train(run, "resume", compile_losses(losses, 3), watched, stopping=watched.stopping)
    assert saved(tmp_path) == ["4", "5"]


def test_a_resumed_run_saves_the_best_step_since_if_no_better_one_was_saved(tmp_path: Path) -> None:
    run = config(tmp_path, steps=7, evaluate_every=1, checkpoint_every=3, keep=1)
    losses = {1: 1.0, 2: 2.0, 3: 2.1, 4: 1.9, 5: 1.5, 6: 1.6, 7: 1.7}
    watched = StoppingAfter(3)
    train(run, "new", compile_losses(losses), watched, stopping=watched.stopping)
    watched = StoppingAfter(6)
    train(replace(run, keep_best=True), "resume", compile_losses(losses, 3), watched, stopping=watched.stopping)
    assert saved(tmp_path) == ["5", "6"]


def test_the_final_model_is_that_of_the_best_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([2.0, 1.0, 1.5])
    monkeypatch.setattr(step_reporting, "_evaluate", lambda *_: ({"heldout": next(losses)}, {}))
    run = config(tmp_path, strategies=["<tp1,pp1>"], steps=3, evaluate_every=1, checkpoint_every=0, keep=1, check="off")
    watched = Watched()
    outcome = train(replace(run, keep_best=True), "new", hg.compile, watched)
    assert saved(tmp_path) == ["2", "3"]
    weights = {step: read_weights(outcome.folder.place(step)) for step in (2, 3)}
    model: Any = AutoModelForCausalLM.from_pretrained(outcome.folder.model)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], weights[2][name])
    assert not torch.equal(weights[2][name], weights[3][name])
    assert watched.notes[-1].endswith("is the model after step 2, which has the lowest evaluation loss")
