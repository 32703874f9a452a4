"""Stages and pipelines of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.spec.stage_kind import StageKind, is_budget

GRADIENTS = "gradients"


@dataclass(frozen=True)
class Stage:
    """Consecutive layers, tensor-parallel over a group of devices.

    Attributes:
        sequence_parallel: outside of tensor-parallel regions, split the tokens over the devices.
        recompute: True: save only each layer's input and recompute its forward in the backward. A memory budget between
            0 and 1, in hundredths: save about this fraction of the activations, always including results of attention
            and collectives. False: save all activations that the backward needs, except those that are cheap to
            recompute.
        stream: True: pull a block's weights before each use, free them afterwards, and push gradients after each
            backward. "gradients": push gradients after each backward, but pull weights once per iteration. False: pull
            and push once per iteration.
        offload: keep activations in host memory between forward and backward.
        sums_in_pieces: split matrix products that need an all-reduce into `PIECES` pieces of tokens, and reduce each
            piece while the next is computed. Excludes `sequence_parallel`.
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
            raise ValueError("'devices' is empty: a stage needs at least one device")
        for device in self.devices:
            if not is_whole(device) or not 0 <= device < MOST_DEVICES:
                raise ValueError(f"'devices' has {device!r}: devices are ranks, integers from 0 to {MOST_DEVICES - 1}")
        if len(set(self.devices)) < len(self.devices):
            device = next(device for device in self.devices if self.devices.count(device) > 1)
            raise ValueError(f"'devices' has {device} more than once: list each device once")
        if not is_whole(self.layers) or self.layers < 1:
            raise ValueError(f"'layers' is {self.layers!r}: give a whole number of at least 1, or remove the stage")
        for name in ("sequence_parallel", "offload", "sums_in_pieces"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name!r} is {getattr(self, name)!r}: use true or false")
        if not isinstance(self.recompute, bool) and not is_budget(self.recompute):
            raise ValueError(
                f"'recompute' is {self.recompute!r}: use true (save only inputs), false, or the fraction of "
                "activations to save, from 0.01 to 0.99 with at most two decimals, such as 0.5"
            )
        if not isinstance(self.stream, bool) and self.stream != GRADIENTS:
            raise ValueError(f"'stream' is {self.stream!r}: use true, false or {GRADIENTS}")
        if self.sums_in_pieces and self.sequence_parallel:
            raise ValueError("sums_in_pieces and sequence_parallel are both set, but they exclude each other: set one")

    @classmethod
    def of(cls, devices: tuple[int, ...], layers: int, kind: StageKind, stream: bool | str = False) -> Stage:
        return cls(devices, layers, *kind[1:3], stream=stream, sums_in_pieces=kind.sums_in_pieces)

    @property
    def kind(self) -> StageKind:
        # On one device, these flags do not change the graphs.
        several = self.tp > 1
        return StageKind(self.tp, self.sequence_parallel and several, self.recompute, self.sums_in_pieces and several)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.devices)


@dataclass(frozen=True)
class Pipeline:
    """One replica of the model: stages in the order of the layers."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", as_tuple("stages", self.stages))
        if not self.stages:
            raise ValueError("'stages' is empty: a pipeline needs at least one stage")
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise ValueError(f"'stages' has {stage!r}: use Stage(devices=..., layers=...)")

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of all stages, without duplicates."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Index of each stage's device group, such as (0, 1, 0, 1) if two alternate."""
        number: dict[tuple[int, ...], int] = {}
        return tuple(number.setdefault(stage.devices, len(number)) for stage in self.stages)

    @property
    def shape(self) -> tuple[tuple[int, StageKind, bool | str, bool, int], ...]:
        """The stages without their devices."""
        stages = zip(self.stages, self.rows, strict=True)
        return tuple((s.layers, s.kind, s.stream, s.offload, row) for s, row in stages)

    @property
    def interleaved(self) -> bool:
        return len(set(self.rows)) < len(self.stages)

    @property
    def layers(self) -> int:
        return sum(stage.layers for stage in self.stages)

    @property
    def first_layers(self) -> tuple[int, ...]:
        return tuple(accumulate((stage.layers for stage in self.stages[:-1]), initial=0))


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name!r} is {value!r}: give a list")
    return tuple(value)
