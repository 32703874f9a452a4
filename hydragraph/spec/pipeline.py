"""Stages and pipelines of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from hydragraph.spec.stage_kind import StageKind, is_budget

GRADIENTS = "gradients"  # a stage's `stream` if it streams only these


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one group of devices, tensor-parallel over all.

    Attributes:
        sequence_parallel: split the tokens over the devices between tensor-parallel regions.
        recompute: True: save only each layer's input and repeat its forward in the backward. A memory budget between 0
            and 1, in hundredths: save about this fraction, and always results of attention and collectives. False:
            save what the backward needs, except what is cheap to compute.
        stream: True: pull weights before each use of a block, free them after it, and push gradients after each
            backward; "gradients": only push gradients like this. False: once per iteration.
        offload: keep what forwards save in host memory until their backwards.
        sums_in_pieces: compute products that devices sum in `PIECES` pieces of the tokens, and sum each while the next
            is computed. Not with sequence_parallel.
    """

    devices: tuple[int, ...]
    layers: int
    sequence_parallel: bool = False
    recompute: bool | float = False
    stream: bool | str = False
    offload: bool = False
    sums_in_pieces: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", as_tuple("devices", self.devices))
        if not self.devices:
            raise ValueError("devices is empty: a stage needs at least one device")
        for device in self.devices:
            if not is_whole(device) or device < 0:
                raise ValueError(f"devices has {device!r}: devices are ranks, integers from 0")
            if self.devices.count(device) > 1:
                raise ValueError(f"devices has {device} more than once: list each device once")
        if not is_whole(self.layers) or self.layers < 1:
            raise ValueError(f"layers is {self.layers!r}: it counts layers, 1 or more; drop a stage that has none")
        for name in ("sequence_parallel", "offload", "sums_in_pieces"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: use true or false")
        if not isinstance(self.recompute, bool) and not is_budget(self.recompute):
            raise ValueError(
                f"recompute is {self.recompute!r}: use true (save only inputs), false, or a memory budget such as 0.5: "
                "hundredths between 0 and 1"
            )
        if not isinstance(self.stream, bool) and self.stream != GRADIENTS:
            raise ValueError(f"stream is {self.stream!r}: use true, false or {GRADIENTS}")
        if self.sums_in_pieces and self.sequence_parallel:
            raise ValueError("sums_in_pieces with sequence_parallel, whose sums are scattered: set one of them")

    @classmethod
    def of(cls, devices: tuple[int, ...], layers: int, kind: StageKind, stream: bool | str = False) -> Stage:
        """Return a stage of a kind."""
        return cls(devices, layers, *kind[1:3], stream=stream, sums_in_pieces=kind.sums_in_pieces)

    @property
    def kind(self) -> StageKind:
        """See `StageKind`."""
        several = self.tp > 1
        return StageKind(self.tp, self.sequence_parallel and several, self.recompute, self.sums_in_pieces and several)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.devices)


@dataclass(frozen=True)
class Pipeline:
    """One replica of the model: its stages, in the order of the layers."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", as_tuple("stages", self.stages))
        if not self.stages:
            raise ValueError("stages is empty: a pipeline needs at least one stage")
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise ValueError(f"stages has {stage!r}: use Stage(devices=..., layers=...)")

    @property
    def devices(self) -> tuple[int, ...]:
        """All its devices, each once."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Number of each stage's devices: 0, 1, 0, 1 if two groups take turns."""
        number: dict[tuple[int, ...], int] = {}
        return tuple(number.setdefault(stage.devices, len(number)) for stage in self.stages)

    @property
    def shape(self) -> tuple[tuple[int, StageKind, bool | str, bool, int], ...]:
        """Pipelines of one shape differ only in their devices."""
        stages = zip(self.stages, self.rows, strict=True)
        return tuple((s.layers, s.kind, s.stream, s.offload, row) for s, row in stages)

    @property
    def interleaved(self) -> bool:
        """Whether a group of devices runs several of its stages."""
        return len(set(self.rows)) < len(self.stages)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(stage.layers for stage in self.stages)

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The first layer of every stage."""
        return tuple(accumulate((stage.layers for stage in self.stages[:-1]), initial=0))


def is_whole(value: object) -> bool:
    """Return whether a value is an integer, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """Return a sequence as a tuple; a ValueError names the field otherwise."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} is {value!r}: give a list")
    return tuple(value)
