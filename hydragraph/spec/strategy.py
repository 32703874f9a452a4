"""Strategy: the parallelization of one iteration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

from hydragraph.spec.pipeline import Pipeline, Stage, as_tuple, is_whole
from hydragraph.spec.record import flow_yaml, from_record, load_record, parse_yaml, to_record
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE, SCHEDULES
from hydragraph.spec.strategy_text import format_strategy, parse_strategy


@dataclass(frozen=True)
class Place:
    """A rank's position `index` among the devices of a stage with layers [first_layer, last_layer)."""

    pipeline: int
    stage: int
    index: int
    first_layer: int
    last_layer: int


@dataclass(frozen=True)
class Strategy:
    """Pipelines that each hold the whole model and divide a mini-batch. Ranks in no pipeline are idle.

    Pipelines may share a stage if its devices (in order), layers and flags are equal in all of them. A shared stage
    stores weights and gradients once. In `<[0]x2,[4,5]x2> + <[1]x2,[4,5]x2>`, ranks 4 and 5 run the second half of the
    model for both pipelines.

    The same devices may run several stages of one pipeline, with the same flags (interleaved stages).

    Attributes:
        pipelines: pipelines with equal numbers of layers and, except for shared stages, different devices.
        schedule: one of `SCHEDULES`.
    """

    pipelines: tuple[Pipeline, ...]
    schedule: str = DEFAULT_SCHEDULE

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipelines", as_tuple("pipelines", self.pipelines))
        if not self.pipelines:
            raise ValueError("'pipelines' is empty: a strategy needs at least one pipeline")
        for pipeline in self.pipelines:
            if not isinstance(pipeline, Pipeline):
                raise ValueError(f"'pipelines' has {pipeline!r}: use Pipeline(stages=[...])")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"'schedule' is {self.schedule!r}: use {' or '.join(map(repr, SCHEDULES))}")
        self._check_devices()
        for i, pipeline in enumerate(self.pipelines):
            if pipeline.layers != self.layers:
                raise ValueError(
                    f"pipeline {i} has {_layer_sum(pipeline)} layers, but pipeline 0 has "
                    f"{_layer_sum(self.pipelines[0])}: every pipeline holds the whole model, so make the totals equal"
                )

    def _check_devices(self) -> None:
        earlier: dict[Pipeline, int] = {}
        for i, pipeline in enumerate(self.pipelines):
            if earlier.setdefault(pipeline, i) != i:
                raise ValueError(
                    f"pipeline {i}, stage 0: device {pipeline.devices[0]} is already in pipeline "
                    f"{earlier[pipeline]}, stage 0, and these two pipelines are equal; remove one "
                    "of them: the other can run its micro-batches too"
                )
        # device -> description of its stage, pipeline, and first layer with the stage
        owners: dict[int, tuple[str, int, tuple[int, Stage]]] = {}
        for i, j, first, stage in self._placed_stages():
            where = f"pipeline {i}, stage {j}"
            if j and self.pipelines[i].stages[j - 1].devices == stage.devices:
                raise ValueError(f"{where}: this stage follows one on the same devices; merge the two")
            for device in stage.devices:
                there, owner, other = owners.setdefault(device, (where, i, (first, stage)))
                if owner == i and replace(other[1], layers=stage.layers) == stage:
                    continue  # interleaved stages
                # Shared stages must be equal. Interleaved stages may differ in layers, which the
                # message then omits.
                if other != (first, stage):
                    counterpart = (first, replace(other[1], layers=stage.layers)) if owner == i else other
                    raise ValueError(
                        f"{where}: device {device} is already in {there}, and these two stages differ in "
                        f"{_difference((first, stage), counterpart)}; give every stage its own devices, share one "
                        "stage between pipelines, or interleave stages of one pipeline, which must have equal flags"
                    )
                if self.pipelines[i].interleaved or self.pipelines[owner].interleaved:
                    raise ValueError(
                        f"{where}: device {device} is already in {there}; a pipeline with interleaved stages "
                        "cannot share a stage with another pipeline: give them different devices"
                    )

    def _placed_stages(self) -> Iterator[tuple[int, int, int, Stage]]:
        for i, pipeline in enumerate(self.pipelines):
            for j, (first, stage) in enumerate(zip(pipeline.first_layers, pipeline.stages, strict=True)):
                yield i, j, first, stage

    @property
    def layers(self) -> int:
        return self.pipelines[0].layers

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of all pipelines."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, without duplicates."""
        return tuple(dict.fromkeys(device for pipeline in self.pipelines for device in pipeline.devices))

    @cached_property
    def joined(self) -> tuple[tuple[int, ...], ...]:
        """Groups of pipelines that share stages, directly or through others, such as ((0, 2), (1,))."""
        # groups: pipeline -> its group's list, one object for all members.
        # first_of: a stage's first device -> first pipeline with this stage.
        groups = {i: [i] for i in range(len(self.pipelines))}
        first_of: dict[int, int] = {}
        for i, pipeline in enumerate(self.pipelines):
            for stage in pipeline.stages:
                # Two stages have equal devices or no common device.
                one = groups[i]
                other = groups[first_of.setdefault(stage.devices[0], i)]
                if one is not other:
                    other += one
                    groups |= dict.fromkeys(one, other)
        return tuple(sorted({min(group): tuple(sorted(group)) for group in groups.values()}.values()))

    @property
    def shares(self) -> bool:
        return len(self.joined) < len(self.pipelines)

    @property
    def interleaved(self) -> bool:
        return any(pipeline.interleaved for pipeline in self.pipelines)

    @property
    def streams(self) -> bool:
        return any(stage.stream for stage in self.stages)

    @property
    def offloads(self) -> bool:
        return any(stage.offload for stage in self.stages)

    @property
    def name(self) -> str:
        """The strategy as text for `parse`."""
        return format_strategy(self.pipelines, self.schedule)

    @property
    def fingerprint(self) -> str:
        """Hash of six hexadecimal digits that covers all fields, even numbers of layers that the name omits."""
        content = json.dumps(asdict(self, dict_factory=_fingerprinted), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:6]

    def __str__(self) -> str:
        return f"{self.name}@{self.fingerprint}"

    def place(self, rank: int) -> Place | None:
        """Return a rank's first place, or None if it is idle."""
        return next(iter(self.places(rank)), None)

    def places(self, rank: int) -> tuple[Place, ...]:
        """Return a rank's places: several for shared or interleaved stages, none if idle."""
        return tuple(
            Place(i, j, stage.devices.index(rank), first, first + stage.layers)
            for i, j, first, stage in self._placed_stages()
            if rank in stage.devices
        )

    def with_stages(self, changed: Callable[[Stage], Stage]) -> Strategy:
        pipelines = (Pipeline(tuple(map(changed, pipeline.stages))) for pipeline in self.pipelines)
        return replace(self, pipelines=tuple(pipelines))

    def renumbered(self, devices: Mapping[int, int]) -> Strategy:
        return self.with_stages(lambda stage: replace(stage, devices=tuple(devices[d] for d in stage.devices)))

    def check(self, layers: int, ranks: int, heads: tuple[int, ...] = ()) -> None:
        """Raise a ValueError unless the strategy fits `layers` layers and `ranks` ranks.

        Args:
            heads: counts of query heads that tensor-parallel degrees must divide.
        """
        if self.layers != layers:
            fix = f"add {layers - self.layers}" if self.layers < layers else f"remove {self.layers - layers}"
            raise ValueError(
                f"pipeline 0: {_layer_sum(self.pipelines[0])} layers, but the model has {layers}; "
                f"{fix} in every pipeline"
            )
        for i, j, _, stage in self._placed_stages():
            where = f"pipeline {i}, stage {j}"
            for device in stage.devices:
                if device >= ranks:
                    there = "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
                    raise ValueError(
                        f"{where}: there is no rank {device}, only {there}: start {max(self.devices) + 1} processes, "
                        "or name other ranks"
                    )
            for count in heads:
                if count % stage.tp:
                    raise ValueError(
                        f"{where}: tensor-parallel degree {stage.tp} (its number of devices) does not divide {count} "
                        f"attention heads; use {_degrees(heads)} devices"
                    )

    @classmethod
    def parse(cls, text: str, layers: int) -> Strategy:
        """Parse text such as "<tp2,pp1> + 2*<tp1,pp2>" (`spec.strategy_text`), and check any fingerprint."""
        if not isinstance(text, str):
            raise ValueError(f'strategy text is {text!r}: give a string such as "<tp2,pp1> + 2*<tp1,pp2>"')
        if not is_whole(layers) or layers < 1:
            raise ValueError(f"'layers' is {layers!r}: give the model's number of layers, 1 or more")
        body, at, fingerprint = text.partition("@")
        pipelines, schedule = parse_strategy(body, layers)
        try:
            strategy = cls(pipelines, schedule)
        except ValueError as error:
            raise ValueError(f"strategy text {body!r}: {error}") from None
        if at and strategy.fingerprint != fingerprint.strip():
            raise ValueError(
                f"strategy text {text!r}: with {layers} layers, this text describes {strategy}, so the digits after "
                "'@' are not its own: give the number of layers for which it was written, or remove '@' and the digits"
            )
        return strategy

    @classmethod
    def read(cls, text: str, layers: int) -> Strategy:
        """Read a config's strategy: a YAML file's path, YAML on one line, or text for `parse`."""
        if isinstance(text, str) and text.endswith((".yaml", ".yml")):
            return cls.load(text)
        if isinstance(text, str) and text.startswith("{"):
            return from_record(cls, parse_yaml(text))
        if isinstance(text, str) and "<" not in text and Path(text).is_file():
            raise ValueError(f"{text} is a file, but not a strategy: write YAML in a file whose name ends in .yaml")
        return cls.parse(text, layers)

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a strategy from a YAML file."""
        return load_record(cls, path)

    def save(self, path: str | Path) -> None:
        """Write a YAML file for `load`, without default values."""
        data = self.to_dict()
        lines = ["pipelines:", *(f"  - stages: {flow_yaml(pipeline['stages'])}" for pipeline in data.pop("pipelines"))]
        lines += [f"{name}: {value}" for name, value in data.items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return the strategy as YAML data, without default values."""
        data: dict[str, Any] = to_record(self)
        return data

    @classmethod
    def from_dict(cls, data: object) -> Strategy:
        return from_record(cls, data)


def strategies_of(texts: Sequence[str], layers: int, ranks: int, heads: tuple[int, ...] = ()) -> tuple[Strategy, ...]:
    strategies: list[Strategy] = []
    for i, text in enumerate(texts):
        try:
            strategy = Strategy.read(text, layers)
            strategy.check(layers, ranks, heads)
        except FileNotFoundError:
            raise ValueError(f"strategies[{i}]: the file {text} does not exist: correct the path") from None
        except (ValueError, OSError) as error:
            raise ValueError(f"strategies[{i}]: {error}") from None
        strategies.append(strategy)
    return tuple(strategies)


def _fingerprinted(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a stage's fields without newer options that are off, so that old fingerprints remain valid."""
    newer = ("stream", "offload", "sums_in_pieces")
    return {name: value for name, value in items if name not in newer or value is not False}


def _difference(one: tuple[int, Stage], other: tuple[int, Stage]) -> str:
    ours, theirs = (_fields(first, stage) for first, stage in (one, other))
    return ", ".join(f"{name} ({value} and {theirs[name]})" for name, value in ours.items() if value != theirs[name])


def _fields(first: int, stage: Stage) -> dict[str, object]:
    layers = f"{first}-{first + stage.layers - 1}"
    return {**asdict(stage), "devices": list(stage.devices), "layers": layers}


def _layer_sum(pipeline: Pipeline) -> str:
    parts = " + ".join(str(stage.layers) for stage in pipeline.stages)
    return str(pipeline.layers) if len(pipeline.stages) == 1 else f"{parts} = {pipeline.layers}"


def _degrees(heads: tuple[int, ...]) -> str:
    common = gcd(*heads)
    *others, last = (str(degree) for degree in range(1, common + 1) if common % degree == 0)
    return f"{', '.join(others)} or {last}" if others else last
