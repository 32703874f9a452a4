"""A run's callbacks: calls and their arguments, and errors for callbacks that cannot be called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hydragraph.errors import CallbackFailure
from hydragraph.spec.record import from_record
from hydragraph.train.callbacks import Callbacks, WeightsAndBiases, load_callback
from hydragraph.train.config import TrainConfig
from hydragraph.train.loop import train
from tests.commands.tiny import run
from tests.train.plain import Watched, compile_plain, settings


class Remembering:
    """Remembers what it was called with."""

    seen: list[tuple[str, Any]] = []  # noqa: RUF012 - of all instances

    def on_start(self, config: TrainConfig) -> None:
        self.seen.append(("start", config.steps))

    def on_step(self, metrics: Any) -> None:
        self.seen.append(("step", metrics.step))

    def on_evaluate(self, metrics: Any) -> None:
        self.seen.append(("evaluate", metrics.eval_losses))

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert path.is_dir(), "it is whole"
        self.seen.append(("checkpoint", step))

    def on_end(self) -> None:
        self.seen.append(("end", None))


class Failing:
    def on_step(self, metrics: Any) -> None:
        raise KeyError("unknown")


class Refused:
    """Fails at its start, as a tracker without credentials does, and at its end, because it has not started."""

    def on_start(self, config: TrainConfig) -> None:
        raise ConnectionError("no key")

    def on_end(self) -> None:
        raise AttributeError("no run")


class Endless(Remembering):
    def on_end(self) -> None:
        super().on_end()
        raise AttributeError("no run")


class Broken:
    def __init__(self) -> None:
        raise KeyError("home")


class Needy:
    def __init__(self, where: str) -> None:
        self.where = where


class Nothing:
    pass


class Misspelt(Failing):
    def on_evaluation(self, metrics: Any) -> None: ...


def test_a_run_calls_them(tmp_path: Path) -> None:
    Remembering.seen.clear()
    record = {**settings(tmp_path), "callbacks": [f"{__name__}:Remembering"]}
    train(from_record(TrainConfig, record), "new", compile_plain, Watched())
    names = [name for name, _ in Remembering.seen]
    assert (names[0], names[-1]) == ("start", "end")
    assert [value for name, value in Remembering.seen if name == "step"] == [1, 2, 3, 4, 5, 6]
    assert [value for name, value in Remembering.seen if name == "checkpoint"] == [2, 4, 6]
    assert [set(value) for name, value in Remembering.seen if name == "evaluate"] == [{"heldout"}] * 2


def test_one_that_raises_is_named(tmp_path: Path) -> None:
    record = {**settings(tmp_path), "callbacks": [f"{__name__}:Failing"]}
    with pytest.raises(
        CallbackFailure, match=r"callbacks: Failing.on_step raises KeyError: 'unknown': correct"
    ) as told:
        train(from_record(TrainConfig, record), "new", compile_plain, Watched())
    assert 'raise KeyError("unknown")' in told.value.__notes__[0]


def test_only_those_that_started_end_and_an_earlier_error_is_the_one_that_is_told(tmp_path: Path) -> None:
    Remembering.seen.clear()
    config = from_record(TrainConfig, settings(tmp_path))
    with pytest.raises(CallbackFailure, match=r"Refused.on_start raises ConnectionError: no key"):  # noqa: SIM117
        with Callbacks([Remembering(), Refused(), Remembering()]).started(config):
            pass
    assert [name for name, _ in Remembering.seen] == ["start", "end"]
    with pytest.raises(ZeroDivisionError), Callbacks([Endless(), Endless()]).started(config):
        raise ZeroDivisionError
    with pytest.raises(CallbackFailure, match=r"Endless.on_end raises"), Callbacks([Endless()]).started(config):
        pass
    assert [name for name, _ in Remembering.seen].count("end") == 4


def test_the_command_line_shows_the_traceback_of_one_that_raises(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**settings(tmp_path), "callbacks": [f"{__name__}:Refused"]}))
    result = run("train", tmp_path / "config.yaml")
    assert result.exit_code == 1
    assert 'raise ConnectionError("no key")' in result.stderr
    sentence = "Refused.on_start raises ConnectionError: no key: correct the callback, or remove it from callbacks"
    assert result.stderr.endswith(f"hydragraph: callbacks: {sentence}\n")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("printer", "callbacks: 'printer' is not an import path: write module:name, such as"),
        (":x", "write module:name"),
        ("no_such_module:x", r"'no_such_module:x' cannot be loaded \(ModuleNotFoundError: No module named"),
        (f"{__name__}:Missing", "cannot be loaded .*has no attribute 'Missing'"),
        (f"{__name__}:Needy", r"cannot be loaded \(TypeError: .*\): give every argument of __init__ a default"),
        ("wandb", "^wandb is not installed: pip install wandb$"),
        (f"{__name__}:Broken", r"cannot be loaded \(KeyError: 'home'\)"),
        (f"{__name__}:Nothing", "has none of the methods on_start, on_step, .*: define one of them"),
        (f"{__name__}:Misspelt", "has on_evaluation, which is never called: did you mean on_evaluate?"),
    ],
)
def test_what_cannot_be_loaded_is_told(name: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises((ValueError, ImportError), match=sentence):
        load_callback(name)


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, numbers: dict[str, Any]) -> None:
        self.logged.append(numbers)

    def finish(self) -> None:
        self.finished = True


class FakeWandb:
    def __init__(self) -> None:
        self.run = FakeRun()
        self.given: dict[str, Any] = {}

    def init(self, **given: Any) -> FakeRun:
        self.given = given
        return self.run


def test_weights_and_biases_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = FakeWandb()
    config = from_record(TrainConfig, settings(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    callbacks = Callbacks([WeightsAndBiases()])
    outcome = train(config, "new", compile_plain, Watched())
    with callbacks.started(config):
        for metrics in outcome.history:
            callbacks.call("on_step", metrics)
    assert (wandb.given["name"], wandb.given["config"]["steps"]) == ("run", 6)
    assert wandb.given["id"] == outcome.folder.tracked != ""
    assert wandb.run.axes == {"*": "step"}
    assert [numbers["step"] for numbers in wandb.run.logged] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "lr", "eval/heldout", "perplexity/heldout"} <= set(wandb.run.logged[2])
    assert wandb.run.finished
