"""Measured constants of a model: micro-batch times and memory limits (Hydraulis, section 6).

T(l, P): seconds of l tokens in scheme P  `Profile.constants`
T of a packed micro-batch                 `PipelineCost.micro_batch_seconds`
MaxLen(P): most tokens (Appendix B.1)     `Profile.max_len`
UtilLen(P): fewest useful tokens          `Profile.util_len`
seconds of a pipeline                     `PipelineCost.seconds`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hydragraph.cost import profile_record
from hydragraph.cost.block_pieces import HOME_BYTES, BlockPiece, Constants, PricedDevice
from hydragraph.cost.block_pieces import Scheme as Scheme
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.published_memory import MemoryModel
from hydragraph.cost.reach import Near
from hydragraph.cost.stage_costs import StageCost, stages_end
from hydragraph.errors import Unsupported, type_text
from hydragraph.spec.cluster import Cluster, Interconnect
from hydragraph.spec.cluster import Device as SpecDevice
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy_text import regular_pipeline

INSTANT = Interconnect(1e300, 0.0)


@dataclass(frozen=True)
class PipelineCost:
    """Cost of one pipeline.

    Attributes:
        a, b, c: constants of the slowest stage, which takes c + the sum of a l^2 + b l over sequences of l tokens.
        near: as in `Constants`.
        parts: costs of stages; empty: equal stages.
        rows: rows of interleaved stages (`Pipeline.rows`).
    """

    a: float
    b: float
    c: float
    stages: int
    max_len: int
    util_len: int
    devices: int
    parts: tuple[StageCost, ...] = ()
    schedule: str = DEFAULT_SCHEDULE
    near: Near = ()
    rows: tuple[int, ...] = ()

    @property
    def envelope(self) -> Constants:
        return Constants(self.a, self.b, self.c, self.near)

    def seconds(self, micro_batches: Sequence[Sequence[int]]) -> float:
        """Return the exact seconds of a sequence of micro-batches."""
        return stages_end(self.stage_costs, micro_batches, self.schedule, self.rows)

    @property
    def stage_costs(self) -> tuple[StageCost, ...]:
        return self.parts or (_alike(self.envelope),) * self.stages

    def work(self, lengths: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(self.envelope.work(np.asarray(lengths, dtype=np.float64)), dtype=np.float64)

    def micro_batch_seconds(self, lengths: ArrayLike) -> float:
        return float(self.work(lengths).sum() + self.c)


@dataclass(frozen=True)
class Profile:
    """Measured constants of one model on one kind of device.

    Attributes:
        util: tokens of a micro-batch at 85 % of the maximum tokens/s, by tensor-parallel degree.
        memory: memory model; None: only `limits` bounds micro-batches.
        limits: measured maximum tokens of a micro-batch, by scheme.
        hetero_sync_s: additional seconds of an iteration whose pipelines have different schemes.
        failed: reason for each failed fit, by scheme.
        blocks: template of every block, in order.
        pieces: costs of AUX and of each template, by kind of stage.
        unfit: reason for each failed fit, by kind of stage.
        link: link between two ranks, fitted to `messages`.
        messages: measured (bytes, seconds) pairs.
        residuals: root mean square relative errors of the fits.
        type: device type, as named by clusters; "": any.
        sizes: model sizes; None: derived from the pieces (`model_sizes`).
        update: (seconds, seconds per element of the home shard) of an optimizer step.
        commit_s: seconds of the commit before the optimizer step.
        norm_s: seconds per element of the home shard to compute the gradient norm.
        efficiency: assumed fraction of a datasheet's FLOP/s; None: measured.
        roofline: whether `efficiency` applies only to large products.
        others: profiles of other device types.
    """

    name: str
    schemes: Mapping[Scheme, Constants]
    util: Mapping[int, int]
    memory: MemoryModel | None = None
    limits: Mapping[Scheme, int] = field(default_factory=dict)
    hetero_sync_s: float = 0.0
    failed: Mapping[Scheme, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    pieces: Mapping[StageKind, Mapping[str, BlockPiece]] = field(default_factory=dict)
    unfit: Mapping[StageKind, str] = field(default_factory=dict)
    device: PricedDevice | None = None
    link: Interconnect | None = None
    messages: tuple[tuple[int, float], ...] = ()
    residuals: Mapping[Scheme, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    type: str = ""
    sizes: ModelSizes | None = None
    update: tuple[float, float] | None = None
    commit_s: float = 0.0
    norm_s: float = 0.0
    efficiency: float | None = None
    roofline: bool = False
    others: tuple[Profile, ...] = ()

    @classmethod
    def merge(cls, profiles: Sequence[Profile]) -> Profile:
        """Return one profile for several device types, with the first's link and notes.

        Raises:
            ValueError: the models differ, or two profiles have the same type.
        """
        every = [replace(profile, others=()) for p in profiles for profile in (p, *p.others)]
        if not every:
            raise ValueError("no profiles: give at least one to merge")
        first = every[0]
        for other in every[1:]:
            if other.blocks != first.blocks:
                raise ValueError(
                    f"profiles {first.name} and {other.name} are of different models (their {len(first.blocks)} and "
                    f"{len(other.blocks)} blocks differ): measure the same model on every type of device"
                )
        types = [profile.type for profile in every]
        for name in types:
            if types.count(name) > 1:
                raise ValueError(
                    f"two profiles of device type {name!r}: give each its own type (hydragraph profile --type)"
                )
        return replace(first, others=tuple(every[1:]))

    def of(self, type_: str) -> Profile:
        """Return a device type's profile; raise Unsupported if it was not measured."""
        for profile in (self, *self.others):
            if profile.type == type_:
                return profile
        if not self.others and not (self.type and type_):
            return self
        measured = ", ".join(repr(profile.type) for profile in (self, *self.others))
        more = f", or measure it with hydragraph profile --type {type_} and combine profiles" if type_ else ""
        raise self._unsupported(
            f"device type {type_!r} was not measured" if type_ else "the cluster's devices have no type",
            remedy=f"use a measured type ({measured}) in the cluster{more}",
        )

    @property
    def cuts(self) -> tuple[tuple[int, bool], ...]:
        """Measured pairs (tensor-parallel degree, sequence parallelism), ascending."""
        every = (self, *self.others)
        kinds = {(kind.tp, kind.sequence_parallel) for profile in every for kind in profile.pieces}
        return tuple(sorted(kinds or {(tp, False) for profile in every for tp, _ in profile.schemes}))

    def of_cut(self, tp: int, sequence_parallel: bool) -> Profile:
        """Return the profile with only the measurements of one pair in `cuts`."""
        cut = (tp, sequence_parallel, False)
        pieces = {k: v for k, v in self.pieces.items() if (k.tp, k.sequence_parallel, k.sums_in_pieces) == cut}
        schemes = {scheme: constants for scheme, constants in self.schemes.items() if scheme[0] == tp}
        others = tuple(other.of_cut(tp, sequence_parallel) for other in self.others)
        return replace(self, pieces=pieces, schemes=schemes, others=others)

    def cluster(self, ranks: int) -> Cluster:
        """Return a cluster of one node with `ranks` measured devices and the measured link.

        Raises:
            Unsupported: the device's memory is unknown.
        """
        if self.device is None:
            raise self._unsupported(
                "the device's memory is not known",
                remedy="measure the model with hydragraph profile, or give a cluster",
            )
        device = SpecDevice(1.0, max(1, int(self.device.memory)), 1.0, type=self.type)
        return Cluster.homogeneous(ranks, device=device, within_node=self.link or INSTANT)

    @property
    def model_sizes(self) -> ModelSizes | None:
        """Model sizes; approximate if only each block's number of elements is known."""
        if self.sizes is not None:
            return self.sizes
        if self.blocks and self.pieces and self.device is not None:
            kind = min(self.pieces)
            of_blocks = tuple(self.pieces[kind][t].parameters * kind.tp for t in self.blocks)
            return ModelSizes.rough(of_blocks, 0, self.device.itemsize)
        if self.memory is not None:
            # Published `states` are bytes per element of H^2.
            hidden = self.memory.hidden
            layer = round(hidden**2 * self.memory.states / HOME_BYTES)
            sizes = (hidden * self.memory.vocab, *[layer] * self.memory.layers, hidden * self.memory.vocab)
            return ModelSizes.rough(sizes, 2 * hidden, 2)
        return None

    @classmethod
    def from_constants(cls, entry: Mapping[str, Any]) -> Profile:
        """Read published constants in milliseconds; see docs/planner.md."""
        return cls(**profile_record.published(entry))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file written by `save`; raise a ValueError if it is not a profile."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise TypeError(f"{type_text(data)}, not an object")
            profile: Profile = profile_record.loaded(cls, data)
            return profile
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} does not exist; write a profile with hydragraph profile") from None
        except (IsADirectoryError, UnicodeDecodeError):
            raise ValueError(
                f"{path} is not a text file, but a profile is a JSON file: write one with hydragraph profile"
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a profile ({error!r}): write one with hydragraph profile") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(profile_record.saved(self), indent=1) + "\n", encoding="utf-8")

    @property
    def layers(self) -> int | None:
        if self.blocks:
            return len(self.blocks) - 2
        return self.memory.layers if self.memory is not None else None

    def check_layers(self, pipeline: Pipeline) -> None:
        """Raise a ValueError if the pipeline and the model differ in their number of layers."""
        if self.layers is not None and pipeline.layers != self.layers:
            raise ValueError(
                f"profile {self.name} was measured on a model of {self.layers} layers, but the pipeline has "
                f"{pipeline.layers}: measure this model with hydragraph profile"
            )

    def constants(self, scheme: Scheme) -> Constants:
        """Return a scheme's constants.

        Raises:
            Unsupported: the scheme was not measured, or its fit failed.
        """
        if scheme in self.schemes:
            return self.schemes[scheme]
        why = self.failed.get(scheme, "it was not measured")
        measured = ", ".join(f"<tp{tp},pp{pp}>" for tp, pp in sorted(self.schemes))
        raise self._unsupported(
            f"scheme <tp{scheme[0]},pp{scheme[1]}>: {why}",
            remedy=f"use a measured scheme ({measured}), or measure this one: hydragraph profile --schemes "
            f"tp{scheme[0]}pp{scheme[1]}",
        )

    def max_len(self, scheme: Scheme, devices: int) -> int:
        """Return MaxLen, the most tokens of a micro-batch if `devices` devices share the state; 0 if none fits."""
        self.constants(scheme)
        # Measured limits include memory that the allocator wastes.
        if scheme in self.limits:
            return int(self.limits[scheme])
        if self.memory is None:
            raise self._unsupported(
                f"scheme <tp{scheme[0]},pp{scheme[1]}> has neither a measured limit nor a memory model",
                remedy="if the profile has blocks, use hg.Costs(profile, cluster); if not, add a limit to the profile",
            )
        if scheme[0] not in self.memory.activation:
            raise self._unsupported(
                f"no activation memory is known for tensor-parallel degree {scheme[0]}",
                remedy=f"use one of {sorted(self.memory.activation)}",
            )
        return self.memory.max_len(scheme, devices)

    def util_len(self, scheme: Scheme) -> int:
        """Return UtilLen, the fewest tokens of a micro-batch that use the device well."""
        self.constants(scheme)
        if scheme[0] not in self.util:
            raise self._unsupported(
                f"no UtilLen (fewest useful tokens) is known for tensor-parallel degree {scheme[0]}",
                remedy=f"use one of {sorted(self.util)}",
            )
        return self.util[scheme[0]]

    def pipeline(self, scheme: Scheme, devices: int) -> PipelineCost:
        """Return the cost of a scheme's pipeline if `devices` devices share the state."""
        k = self.constants(scheme)
        limit = self.max_len(scheme, devices)
        useful = self.util_len(scheme)
        util = min(useful, max(limit, 1))
        return PipelineCost(k.a, k.b, k.c, scheme[1], limit, util, scheme[0] * scheme[1], near=k.near)

    def pipeline_of(self, pipeline: Pipeline, devices: int) -> PipelineCost:
        """Return the cost of a pipeline of equal stages if `devices` devices share the state.

        For unequal stages, see `Costs`.

        Raises:
            Unsupported: the stages are not equal, the scheme was not measured, or a fit failed.
            ValueError: the pipeline and the model differ in their number of layers.
        """
        self.check_layers(pipeline)
        scheme = pipeline.stages[0].tp, len(pipeline.stages)
        regular = regular_pipeline(*scheme, pipeline.layers, 0)
        one, other = ([(s.kind, s.layers) for s in each.stages] for each in (pipeline, regular))
        if one != other or pipeline.interleaved:
            raise self._unsupported(
                "the profile has constants for whole schemes (tp, pp), not for blocks",
                remedy="use regular pipelines (<tp2,pp4>), or measure the model with hydragraph profile",
            )
        return self.pipeline(scheme, devices)

    def pipelines(self, schemes: Sequence[Scheme]) -> tuple[PipelineCost, ...]:
        devices = sum(tp * pp for tp, pp in schemes)
        by_scheme = {scheme: self.pipeline(scheme, devices) for scheme in dict.fromkeys(schemes)}
        return tuple(by_scheme[scheme] for scheme in schemes)

    def charge(self, schemes: Sequence[Scheme]) -> float:
        return self.hetero_sync_s if len(set(schemes)) > 1 else 0.0

    def charge_in_search(self, schemes: Sequence[Scheme]) -> float:
        return self.charge(schemes)

    def only(self, schemes: Sequence[Scheme]) -> Profile:
        return replace(self, schemes={scheme: self.schemes[scheme] for scheme in schemes}, failed={})

    def _unsupported(self, what: str, remedy: str) -> Unsupported:
        return Unsupported(what, where=f"profile {self.name}", remedy=remedy)


def _alike(k: Constants) -> StageCost:
    return StageCost((((1 / 3, k),),), (((2 / 3, k),),))
