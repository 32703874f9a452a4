"""Metis's planning problem as arrays, and its plans.

T  types of devices, in the order of the cluster's nodes
D  tensor-parallel degrees 2^d
M  measured micro-batch sizes, ascending; `size_at[mbs]` is an index, -1 if not measured
L  layers

upto[t, d, m, l]    [T, D, M, L + 1]  milliseconds of the first l layers, forward and backward
sync[t, d, m]       [T, D, M]         milliseconds outside the layers
memory[t, d, m, l]  [T, D, M, L]      MB of layer l
known[t, d, m]      [T, D, M]         whether this configuration was measured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hydragraph.planner.metis.cluster import MetisCluster
from hydragraph.planner.metis.profile import MetisProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Metis's factor for the measured memory of layers.
MEMORY_FACTOR = 5.0


class Tables(NamedTuple):
    upto: Floats
    sync: Floats
    memory: Floats
    known: Bools
    size_at: Ints  # [largest size + 1]
    # [L]: layers' fractions of time on the profile's first device type, at degree 1 and micro-batch
    # size 1; 1 / L if not measured
    share: Floats
    # [T], in 2^20 bytes per millisecond
    bandwidth: Floats
    # [T], MB of one device
    capacity: Floats
    # [3]: bytes of the first, middle and last layer
    parameters: Floats
    # Milliseconds on one device, twice the profile's value
    optimizer: float
    # Milliseconds of one micro-batch
    generator: float
    # Numbers that a layer sends, per sequence
    activation: float
    # Numbers that the second-to-last layer sends, per sequence (as in Metis)
    logits: float
    batch: int
    factor: float
    per_rank: bool


@dataclass(frozen=True, eq=False)
class MetisProblem:
    """Inputs of Metis's planning.

    Attributes:
        per_rank: whether, unlike in Metis, a stage must fit into each device's memory, and a replica into a node.
    """

    profile: MetisProfile
    cluster: MetisCluster
    batch: int
    max_tp: int
    per_rank: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_tp < 1:
            raise ValueError(f"'batch' is {self.batch}, max_tp is {self.max_tp}: both must be at least 1")
        for kind in self.cluster.counts:
            if kind not in self.profile.types:
                profiled = ", ".join(self.profile.types)
                raise ValueError(
                    f"no profile of device type {kind!r}, only of {profiled}: profile the model on this type"
                )

    @property
    def layers(self) -> int:
        return self.profile.layers

    @cached_property
    def types(self) -> tuple[str, ...]:
        return tuple(self.cluster.counts)

    def kinds(self, types: Sequence[str]) -> Ints:
        if sorted(types) != sorted(self.types):
            raise ValueError(f"'types' is {list(types)}: name each of {list(self.types)} once")
        at = [self.types.index(kind) for kind in types]
        return np.repeat(np.array(at, dtype=np.int64), [self.cluster.counts[kind] for kind in types])

    def places(self, types: Sequence[str]) -> Ints:
        """Return each rank's label [N], which a replica's ranks must share: its type or, if `per_rank`, its node."""
        if not self.per_rank:
            return self.kinds(types)
        ordered = [(n, devices) for kind in types for n, (of, devices) in enumerate(self.cluster.nodes) if of == kind]
        return np.repeat(np.array([n for n, _ in ordered], dtype=np.int64), [devices for _, devices in ordered])

    @cached_property
    def tables(self) -> Tables:
        profile = self.profile
        measured = profile.measurements
        powers = {1 << i for i in range(self.max_tp.bit_length())}
        degrees = sorted(powers.intersection(tp for kind, tp, _ in measured if kind in self.types))
        sizes = sorted({size for kind, _, size in measured if kind in self.types})
        shape = (len(self.types), max((tp.bit_length() for tp in degrees), default=1), len(sizes))
        upto = np.zeros((*shape, self.layers + 1))
        memory = np.zeros((*shape, self.layers))
        sync = np.zeros(shape)
        is_measured = np.zeros(shape, dtype=np.bool_)
        for t, kind in enumerate(self.types):
            for tp in degrees:
                for m, size in enumerate(sizes):
                    entry = measured.get((kind, tp, size))
                    if entry is None:
                        continue
                    at = (t, tp.bit_length() - 1, m)
                    # The last bit decides ties in Metis's search, so add times in Metis's order.
                    np.cumsum(entry.layers_ms, out=upto[at][1:])
                    memory[at] = entry.memory_mb
                    sync[at] = entry.forward_backward_ms - upto[at][-1]
                    is_measured[at] = True
        size_at = np.full(sizes[-1] + 1, -1, dtype=np.int64)
        size_at[sizes] = np.arange(len(sizes))
        types = [self.cluster.types[kind] for kind in self.types]
        return Tables(
            upto,
            sync,
            memory,
            is_measured,
            size_at,
            self._share(),
            np.array([kind.bandwidth for kind in types], dtype=np.float64),
            np.array([kind.memory_gb * 1024 for kind in types], dtype=np.float64),
            np.array(profile.parameters_bytes, dtype=np.float64),
            2.0 * profile.optimizer_ms,
            float(profile.batch_generator_ms),
            float(profile.sequence * profile.hidden),
            float(profile.sequence * profile.vocabulary),
            self.batch,
            1.0 if self.per_rank else MEMORY_FACTOR,
            self.per_rank,
        )

    def _share(self) -> Floats:
        first = self.profile.measurements.get((self.profile.types[0], 1, 1))
        if first is None:
            return np.full(self.layers, 1.0 / self.layers)
        times = np.array(first.layers_ms, dtype=np.float64)
        return np.asarray(times / np.cumsum(times)[-1])


@dataclass(frozen=True)
class StagePlan:
    """Stages of consecutive ranks, which are sorted by type.

    Attributes:
        types: order of device types (Metis's node sequence).
        groups: number of ranks of each stage.
        degrees: (dp, tp) of each stage, which has dp * tp ranks.
    """

    types: tuple[str, ...]
    groups: tuple[int, ...]
    degrees: tuple[tuple[int, int], ...]
    batches: int
    layers: tuple[int, ...]
    problem: MetisProblem = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.groups) == len(self.degrees) == len(self.layers) or not self.groups:
            raise ValueError(f"{self}: give equally many groups, degrees and layers, at least one of each")
        if any(dp * tp != group or tp & (tp - 1) for (dp, tp), group in zip(self.degrees, self.groups, strict=True)):
            raise ValueError(
                f"{self}: dp * tp of each stage must equal its number of ranks, and tp must be a power of two"
            )
        devices = self.problem.cluster.devices
        if sum(self.groups) > devices:
            raise ValueError(f"{self}: use at most the cluster's {devices} ranks, not {sum(self.groups)}")
        if sum(self.layers) > self.problem.layers or min(self.layers) < 0:
            raise ValueError(
                f"{self}: give the stages at most the model's {self.problem.layers} layers in total, and each stage at "
                "least 0"
            )
        if self.batches < 1:
            raise ValueError(f"{self}: give at least one micro-batch")

    @property
    def partition(self) -> tuple[int, ...]:
        """First layer of each stage, and the end."""
        return tuple(int(end) for end in np.cumsum((0, *self.layers)))

    @property
    def lost_sequences(self) -> int:
        """Most sequences that a stage omits, because Metis rounds batch // dp // B down."""
        batch = self.problem.batch
        return batch - min(batch // dp // self.batches * dp * self.batches for dp, _ in self.degrees)


Plan = StagePlan
Problem = MetisProblem
