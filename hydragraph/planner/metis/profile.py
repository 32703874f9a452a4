"""Metis's measurements of a model.

They come from a folder with one file each, as in Metis (`DeviceType.A100_tp2_bs4.json`), or from one file per device
type, with all layers under `samples`, or the first, middle and last under `by_num_layers`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

_NAME = re.compile(r"DeviceType\.(\w+?)_tp(\d+)_bs(\d+)\.json")
_KEY = re.compile(r"tp(\d+)_bs(\d+)")

# The optimizer's and generator's times are read at the largest measured degree and size up to this.
_MEASURED = 4


@dataclass(frozen=True)
class Measurement:
    """Measurement of one device type at one tensor-parallel degree and micro-batch size.

    Attributes:
        layers_ms: each layer's forward and backward for a micro-batch.
        forward_backward_ms: all layers and the work between them; the excess over `layers_ms` is Metis's `fb_sync`.
    """

    layers_ms: tuple[float, ...]
    forward_backward_ms: float
    memory_mb: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.layers_ms) != len(self.memory_mb):
            raise ValueError(
                f"{len(self.layers_ms)} layers have times, but {len(self.memory_mb)} have memory: give each layer both"
            )
        numbers = (*self.layers_ms, *self.memory_mb, self.forward_backward_ms)
        if not all(math.isfinite(x) and x >= 0 for x in numbers) or not sum(self.layers_ms) > 0:
            raise ValueError(
                "times and memory of layers must be finite and at least 0, and at least one layer must take more than "
                "0 ms"
            )

    @property
    def sync_ms(self) -> float:
        return self.forward_backward_ms - sum(self.layers_ms)

    def stretched(self, layers: int) -> Measurement:
        """Return the measurement for another number of layers, whose inner layers equal the second."""
        first, middle, last = self.layers_ms[0], self.layers_ms[1], self.layers_ms[-1]
        times = (first, *[middle] * (layers - 2), last)
        memory = (self.memory_mb[0], *[self.memory_mb[1]] * (layers - 2), self.memory_mb[-1])
        return Measurement(times, self.sync_ms + sum(times), memory)


@dataclass(frozen=True)
class MetisProfile:
    """Measurements of a model by (device type, tensor-parallel degree, sequences of a micro-batch).

    Attributes:
        measurements: the first key's device type determines how layers are balanced.
        parameters_bytes: bytes of the first, middle and last layer.
        optimizer_ms: optimizer step of the whole model.
        hidden, vocabulary: numbers that a layer sends, and the last layer outputs, per token.
    """

    measurements: Mapping[tuple[str, int, int], Measurement]
    parameters_bytes: tuple[float, float, float]
    optimizer_ms: float
    batch_generator_ms: float
    hidden: int
    sequence: int
    vocabulary: int

    def __post_init__(self) -> None:
        depths = {len(measurement.layers_ms) for measurement in self.measurements.values()}
        if len(depths) != 1:
            raise ValueError(
                f"measurements have {sorted(depths)} layers: give at least one, all with the same number of layers"
            )

    @cached_property
    def layers(self) -> int:
        return len(next(iter(self.measurements.values())).layers_ms)

    @cached_property
    def types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind for kind, _, _ in self.measurements))

    def stretched(self, layers: int) -> MetisProfile:
        """Return the profile for another number of layers, if inner layers are equal (improved paper, section 4.1)."""
        if layers == self.layers:
            return self
        equal = all(len(set(measurement.layers_ms[1:-1])) == 1 for measurement in self.measurements.values())
        if self.layers < 3 or layers < 2 or not equal:
            raise ValueError(
                f"the profile has {self.layers} layers, but the plan has {layers}: profile the model with {layers}; "
                "only a profile of 3 or more layers with equal middle layers can be stretched, to 2 or more layers"
            )
        return replace(
            self,
            measurements={key: measurement.stretched(layers) for key, measurement in self.measurements.items()},
            optimizer_ms=self.optimizer_ms / self.layers * layers,
        )

    @staticmethod
    def load(
        paths: str | Path | Sequence[str | Path],
        *,
        layers: int | None = None,
        hidden: int | None = None,
        sequence: int | None = None,
        vocabulary: int | None = None,
    ) -> MetisProfile:
        """Read measurements from files, or from a folder's files with names as in Metis.

        Args:
            layers: number of layers of the model to read if a file has several; default: the smallest.
            hidden, sequence, vocabulary: required if no file contains them, as in Metis's own.

        Raises:
            ValueError: a file is not a profile, or something is missing.
        """
        files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
        if len(files) == 1 and files[0].is_dir():
            files = sorted(path for path in files[0].iterdir() if _NAME.fullmatch(path.name))
        if not files:
            raise ValueError(f"{paths} has no files named like DeviceType.A100_tp1_bs1.json")
        entries = [entry for file in files for entry in _entries(file, layers)]
        kind = entries[0].key[0]
        said: dict[str, int] = {}
        for name, value in (("hidden", hidden), ("sequence", sequence), ("vocabulary", vocabulary)):
            numbers = [value] if value is not None else [e.sizes[name] for e in entries if name in e.sizes]
            if not numbers:
                raise ValueError(f"{files[0]} does not contain {name}: give {name}=...")
            said[name] = int(numbers[0])
        # Metis reads the first listed file, which was this one in the published runs.
        measured = [e for e in entries if e.key[0] == kind and max(e.key[1:]) <= _MEASURED]
        model = max(measured or entries[:1], key=lambda e: e.key[1:])
        return MetisProfile(
            {e.key: e.measurement for e in entries},
            model.parameters_bytes,
            model.optimizer_ms,
            model.batch_generator_ms,
            **said,
        )


@dataclass(frozen=True)
class _Entry:
    # As in `MetisProfile.measurements`
    key: tuple[str, int, int]
    measurement: Measurement
    parameters_bytes: tuple[float, float, float]
    optimizer_ms: float
    batch_generator_ms: float
    sizes: Mapping[str, int]


def _entries(file: Path, layers: int | None) -> Iterator[_Entry]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if "by_num_layers" in record:
            yield from _by_number_of_layers(record, layers)
        elif "samples" in record:
            yield from _samples(record)
        else:
            yield _own(file.name, record)
    except (KeyError, IndexError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a profile of Metis: {type(error).__name__} {error}") from error


def _own(name: str, record: Mapping[str, Any]) -> _Entry:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name}: rename this file to a form like DeviceType.A100_tp1_bs1.json")
    parameters = record["model"]["parameters"]["parameters_per_layer_bytes"]
    memory = record["execution_memory"]["layer_memory_total_mb"]
    key = (match[1], int(match[2]), int(match[3]))
    return _entry(key, record["execution_time"], memory, parameters, {})


def _samples(record: Mapping[str, Any]) -> Iterator[_Entry]:
    model = record["model"]
    sizes = {"hidden": model["hidden"], "sequence": model["seq"], "vocabulary": model["vocab"]}
    parameters = model["parameters_per_layer_bytes"]
    for key, sample in record["samples"].items():
        memory = sample.get("layer_memory_total_mb") or sample["layer_memory_total_mb_samsung"]
        yield _entry((record["device"], *_degree_and_size(key)), sample, memory, parameters, sizes)


def _entry(
    key: tuple[str, int, int],
    times: Mapping[str, Any],
    memory: Sequence[float],
    parameters: Sequence[float],
    sizes: Mapping[str, int],
) -> _Entry:
    layers_ms = tuple(times["layer_compute_total_ms"])
    measurement = Measurement(layers_ms, times["forward_backward_time_ms"], tuple(memory))
    ends = (float(parameters[0]), float(parameters[1]), float(parameters[-1]))
    return _Entry(key, measurement, ends, times["optimizer_time_ms"], times["batch_generator_time_ms"], sizes)


def _by_number_of_layers(record: Mapping[str, Any], layers: int | None) -> Iterator[_Entry]:
    depths = sorted(map(int, record["by_num_layers"]))
    depth = depths[0] if layers is None or layers not in depths else layers
    memory, parameters = (
        tuple(record[what][end] for end in ("first", "mid", "last")) for what in ("layer_memory_mb", "parameters_bytes")
    )
    for key, row in record["by_num_layers"][str(depth)].items():
        first, middle, last, forward_backward, _, optimizer, generator = row
        measurement = Measurement(
            (first, *[middle] * (depth - 2), last),
            forward_backward,
            (memory[0], *[memory[1]] * (depth - 2), memory[2]),
        )
        where = (record["device"], *_degree_and_size(key))
        yield _Entry(where, measurement, parameters, optimizer, generator, {})


def _degree_and_size(key: str) -> tuple[int, int]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise KeyError(f"{key!r} must have the form tp2_bs4")
    return int(match[1]), int(match[2])


Profile = MetisProfile
