"""Callbacks that rank 0 calls, such as loggers."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from hydragraph.errors import CallbackFailure
from hydragraph.train.config import TrainConfig
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import Metrics

EVENTS = ("on_start", "on_step", "on_evaluate", "on_checkpoint", "on_end")

_BUILT_IN = {"wandb": "hydragraph.train.callbacks:WeightsAndBiases"}


class Callbacks:
    """Objects with any of the methods in `EVENTS`: on_start(config), on_step(metrics), on_evaluate(metrics),
    on_checkpoint(step, path) and on_end().
    """

    def __init__(self, objects: Sequence[object] = ()) -> None:
        self._objects = tuple(objects)

    @staticmethod
    def load(names: Sequence[str]) -> Callbacks:
        return Callbacks([load_callback(name) for name in names])

    @contextmanager
    def started(self, config: TrainConfig) -> Iterator[None]:
        with ExitStack() as ends:
            for callback in self._objects:
                _call(callback, "on_start", config)
                ends.push(partial(_end, callback))
            yield

    def call(self, event: str, *arguments: object) -> None:
        for callback in self._objects:
            _call(callback, event, *arguments)


def _call(callback: object, event: str, *arguments: object) -> None:
    method = getattr(callback, event, None)
    if method is None:
        return
    try:
        method(*arguments)
    except Exception as error:
        what = f"{type(callback).__name__}.{event} raises {type(error).__name__}: {error}"
        failure = CallbackFailure(f"callbacks: {what}: correct the callback, or remove it from callbacks")
        failure.add_note("".join(traceback.format_exception(error)))
        raise failure from error


def _end(callback: object, kind: type[BaseException] | None, *_: object) -> None:
    try:
        _call(callback, "on_end")
    except CallbackFailure:
        if kind is None:
            raise


def load_callback(name: str) -> object:
    """Return the object "module:name", or an instance if it is a class; raise ValueError if it has no callbacks."""
    module, colon, attribute = _BUILT_IN.get(name, name).partition(":")
    if not colon or not module or not attribute:
        raise ValueError(
            f"callbacks: {name!r} is not an import path: write module:name, such as my_callbacks:Printer, or 'wandb'"
        )
    # Callbacks may be in the working directory, from which scripts do not import.
    path = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        callback: Any = importlib.import_module(module)
        for part in attribute.split("."):
            callback = getattr(callback, part)
        callback = callback() if isinstance(callback, type) else callback
    except Exception as error:
        if name in _BUILT_IN:
            raise
        called = isinstance(error, TypeError)
        remedy = "give every argument of __init__ a default" if called else "correct the name or the module"
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"callbacks: {name!r} cannot be loaded ({why}): {remedy}") from error
    finally:
        sys.path[:] = path
    if not any(callable(getattr(callback, event, None)) for event in EVENTS):
        raise ValueError(f"callbacks: {name!r} has none of the methods {', '.join(EVENTS)}: define one of them")
    for method in dir(callback):
        meant = get_close_matches(method, EVENTS, n=1) if method.startswith("on_") else []
        # A method such as on_steps would never run.
        if meant and method not in EVENTS:
            raise ValueError(f"callbacks: {name!r} has {method}, which is never called: did you mean {meant[0]}?")
    return callback


class WeightsAndBiases:
    """Logger for Weights & Biases, configured by environment variables."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("wandb is not installed: pip install wandb") from error
        self._wandb: Any = wandb
        self._run: Any = None

    def on_start(self, config: TrainConfig) -> None:
        folder = RunFolder(Path(config.output))
        name = folder.path.name
        self._run = self._wandb.init(name=name, id=folder.tracked, resume="allow", config=asdict(config))
        # Unlike wandb's own step, `step` may decrease
        self._run.define_metric("*", step_metric="step")

    def on_step(self, metrics: Metrics) -> None:
        numbers = {name: value for name, value in asdict(metrics).items() if type(value) in (int, float)}
        self._run.log({**numbers, **metrics.by_set})

    def on_end(self) -> None:
        self._run.finish()
