"""Measured constants: what a micro-batch costs under each scheme, and what fits into memory (Hydraulis, section 6)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hydragraph.errors import Unsupported
from hydragraph.spec.cluster import Link
from hydragraph.spec.strategy import Pipeline
from hydragraph.spec.strategy_text import regular_pipeline

Scheme = tuple[int, int]  # (tp, pp): how one pipeline is deployed, on tp * pp devices

FUSED_EMBEDDING_BYTES = 32  # per element of an embedding, where one stage holds the embedding and the head
EMBEDDING_BYTES = 16  # where it holds one of them: fp32 weight and moments, 16-bit weight and gradient

AUX = "aux"
HOME_BYTES = 16  # per element of a home shard: weight, gradient and AdamW's two moments in fp32
GRADIENT_BYTES = 4  # per element of a stage's gradients, which are added up in fp32


@dataclass(frozen=True)
class Constants:
    """What one stage of a scheme takes for one micro-batch, forward and backward: a l^2 + b l per sequence, plus c.

    Attributes:
        a, b, c: s / token^2, s / token and s.
    """

    a: float
    b: float
    c: float

    @property
    def failed(self) -> bool:
        """Say whether the fit failed: no real attention has a = 0, and no real stage b = 0."""
        return not (self.a > 0 and self.b > 0 and self.c >= 0)


class Kind(NamedTuple):
    """How the ranks of a stage compute their blocks: what one measurement of a block holds for."""

    tp: int
    sequence_parallel: bool = False
    recompute: bool = False

    @property
    def text(self) -> str:
        """A short name, as a strategy's text marks stages: tp2, tp2s, tp2sr."""
        return f"tp{self.tp}{'s' * self.sequence_parallel}{'r' * self.recompute}"

    @classmethod
    def parse(cls, text: str) -> Kind:
        """Read what `text` gives."""
        flags = text.removeprefix("tp").lstrip("0123456789")
        return cls(int(text.removeprefix("tp").removesuffix(flags)), "s" in flags, "r" in flags)


@dataclass(frozen=True)
class Piece:
    """What one block costs on a rank of a stage of some kind, and what it holds there.

    Attributes:
        seconds: of its forward and backward for one micro-batch; a may be 0 (an embedding has no attention).
        parameters: elements of its weights on the rank.
        kept: bytes per token of a micro-batch, from its forward to its backward.
        working: bytes per token that its graphs make and drop again.
        fixed: bytes that they make and drop again whatever the tokens.
    """

    seconds: Constants
    parameters: int = 0
    kept: float = 0.0
    working: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class Device:
    """Where pieces were measured.

    Attributes:
        name: what it calls itself.
        memory: bytes that a rank may use; the margin is already left out.
        elements: of the whole model's parameters.
        itemsize: bytes of an element in the dtype that the model computes in.
    """

    name: str
    memory: float
    elements: int
    itemsize: int


@dataclass(frozen=True)
class Memory:
    """The memory model: bytes on a device of the first stage, the fullest one.

    Attributes:
        hidden, layers, vocab: sizes of the model.
        activation: bytes that backward keeps per element of a layer's hidden state [l, hidden], by tensor-parallel
            degree.
        states: bytes per element of a layer's hidden^2, over master weights, optimizer state, weights and gradients.
        sharded: the part of them that is sharded over all devices (alpha), 0 to 1.
        gap: bytes that the allocator and the communicators lose, by number of devices up to which it holds.
        margin: bytes to leave free.
        device: capacity in bytes.
    """

    hidden: int
    layers: int
    vocab: int
    activation: Mapping[int, float]
    states: float
    sharded: float
    gap: tuple[tuple[int, float], ...]
    margin: float
    device: float

    def states_bytes(self, scheme: Scheme, devices: int) -> float:
        """Return the bytes of weights, gradients and optimizer state on one device of the first stage."""
        tp, pp = scheme
        layer, alpha = self.layers * self.hidden**2 * self.states, self.sharded
        embedding = self.hidden * self.vocab * (FUSED_EMBEDDING_BYTES if pp == 1 else EMBEDDING_BYTES)
        return layer * (alpha / devices + (1 - alpha) / (pp * tp)) + embedding * (alpha / devices + (1 - alpha) / tp)

    def token_bytes(self, scheme: Scheme) -> float:
        """Return the activation bytes per token of a micro-batch; PP of them are in flight on the first stage."""
        tp, _ = scheme
        return self.layers * self.hidden / tp * self.activation[tp]

    def gap_bytes(self, scheme: Scheme) -> float:
        """Return what the allocator and the communicators of a pipeline take."""
        used = scheme[0] * scheme[1]
        return next((lost for upto, lost in self.gap if used <= upto), self.gap[-1][1])


@dataclass(frozen=True)
class PipelineCost:
    """What the planner knows of one pipeline.

    Attributes:
        a, b, c: seconds of its slowest stage for a micro-batch: sum of a l^2 + b l over its sequences, plus c once.
        stages: its depth PP.
        max_len: tokens that a micro-batch may have.
        util_len: tokens from which a micro-batch uses the device well.
        devices: how many it occupies.
    """

    a: float
    b: float
    c: float
    stages: int
    max_len: int
    util_len: int
    devices: int

    def work(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Return a l^2 + b l [s] of each sequence."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return np.asarray((self.a * tokens + self.b) * tokens, dtype=np.float64)

    def micro_batch_seconds(self, lengths: ArrayLike) -> float:
        """Return the seconds of one stage for one micro-batch of these sequences."""
        return float(self.work(lengths).sum() + self.c)


@dataclass(frozen=True)
class Profile:
    """Measured constants of one model on one kind of device.

    Attributes:
        name: of the measurement.
        schemes: the constants of each measured scheme; those whose fit failed are in `failed`, not here.
        util: tokens at which a micro-batch reaches 85 % of its plateau of tokens/s, by tensor-parallel degree.
        memory: the memory model; None: only `limits` bound a micro-batch.
        limits: MaxLen by scheme where it was measured rather than modelled.
        hetero_sync_s: what an iteration pays where its pipelines are not all alike.
        failed: schemes whose fit failed, and why.
        blocks: the template of every block of the model, in order; the first is the prologue, the last the epilogue.
        pieces: what each template costs in each kind of stage; any pipeline can be priced from them. AUX stands for
            what every stage computes once per micro-batch, such as rotary tables.
        unfit: kinds of stage whose fit failed, and why.
        device: where the pieces were measured.
        link: between two ranks, fitted to `messages`.
        messages: bytes of a message between two ranks, and the seconds it took.
        residuals: root mean square relative error of each scheme's constants over what was measured.
        notes: what else a reader of these numbers has to know.
    """

    name: str
    schemes: Mapping[Scheme, Constants]
    util: Mapping[int, int]
    memory: Memory | None = None
    limits: Mapping[Scheme, int] = field(default_factory=dict)
    hetero_sync_s: float = 0.0
    failed: Mapping[Scheme, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    pieces: Mapping[Kind, Mapping[str, Piece]] = field(default_factory=dict)
    unfit: Mapping[Kind, str] = field(default_factory=dict)
    device: Device | None = None
    link: Link | None = None
    messages: tuple[tuple[int, float], ...] = ()
    residuals: Mapping[Scheme, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def from_constants(cls, entry: Mapping[str, Any]) -> Profile:
        """Read one entry of a table of published constants (milliseconds; see docs/planner.md for its fields)."""
        schemes: dict[Scheme, Constants] = {}
        failed: dict[Scheme, str] = {}
        for row in entry["schemes"]:
            scheme = (int(row["tp"]), int(row["pp"]))
            found = Constants(row["a_ms_per_token2"] / 1e3, row["b_ms_per_token"] / 1e3, row["c_ms"] / 1e3)
            if found.failed:
                failed[scheme] = f"its fit failed (a = {found.a:g}, b = {found.b:g}, c = {found.c:g})"
            else:
                schemes[scheme] = found
        model, memory = entry["model"], entry["memory"]
        return cls(
            name=str(entry["name"]),
            schemes=schemes,
            util={int(tp): int(tokens) for tp, tokens in entry["util_len_tokens"].items()},
            memory=Memory(
                model["hidden"],
                model["layers"],
                model["vocab"],
                {int(tp): float(value) for tp, value in memory["activation_A"].items()},
                memory["states_B"],
                memory["alpha"],
                _gaps(memory["gap_bytes"], entry.get("gpus_per_node", 8)),
                memory["safety_margin_bytes"],
                memory["device_bytes"],
            ),
            hetero_sync_s=entry.get("hetero_sync_ms", 0) / 1e3,
            failed=failed,
        )

    @property
    def layers(self) -> int | None:
        """The number of layers of the model that was measured; None where the profile does not say."""
        if self.blocks:
            return len(self.blocks) - 2
        return self.memory.layers if self.memory is not None else None

    def constants(self, scheme: Scheme) -> Constants:
        """Return the constants of a scheme.

        Raises:
            Unsupported: it was not measured, or its fit failed; nothing is extrapolated.
        """
        if scheme in self.schemes:
            return self.schemes[scheme]
        why = self.failed.get(scheme, "it was not measured")
        known = ", ".join(f"<tp{tp},pp{pp}>" for tp, pp in sorted(self.schemes))
        raise Unsupported(
            f"scheme <tp{scheme[0]},pp{scheme[1]}>: {why}",
            where=f"profile {self.name}",
            remedy=f"use a measured scheme ({known}), or measure it: hydragraph profile --schemes "
            f"tp{scheme[0]}pp{scheme[1]}",
        )

    @overload
    def seconds(self, scheme: Scheme, length: float) -> float: ...
    @overload
    def seconds(self, scheme: Scheme, length: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]: ...
    def seconds(self, scheme: Scheme, length: Any) -> Any:
        """Return T(l) = a l^2 + b l + c [s]: one stage, forward and backward, for a micro-batch of one sequence.

        Args:
            length: tokens, or an array of them (one micro-batch each).
        """
        k = self.constants(scheme)
        tokens = np.asarray(length, dtype=np.float64)
        result = (k.a * tokens + k.b) * tokens + k.c
        return float(result) if np.ndim(length) == 0 else result

    def max_len(self, scheme: Scheme, devices: int) -> int:
        """Return MaxLen: how many tokens a micro-batch may have, 0 where none fits; `devices` share the state."""
        self.constants(scheme)
        if scheme in self.limits:
            return int(self.limits[scheme])
        if self.memory is None and self.device is not None and self.blocks:
            return self._max_len(self._stages(_regular(scheme, len(self.blocks) - 2)), devices)
        if self.memory is None:
            raise Unsupported(
                f"scheme <tp{scheme[0]},pp{scheme[1]}> has neither a measured limit nor a memory model",
                where=f"profile {self.name}",
                remedy="measure again with hydragraph profile, or add it to the profile's limits",
            )
        m = self.memory
        if scheme[0] not in m.activation:
            raise Unsupported(
                f"tensor-parallel degree {scheme[0]} has no activation constant",
                where=f"profile {self.name}",
                remedy=f"use one of {sorted(m.activation)}",
            )
        free = m.device - m.margin - m.gap_bytes(scheme) - m.states_bytes(scheme, devices)
        return max(0, math.floor(free / m.token_bytes(scheme)))

    def util_len(self, scheme: Scheme) -> int:
        """Return UtilLen: tokens from which a micro-batch uses the device well."""
        self.constants(scheme)
        if scheme[0] not in self.util:
            raise Unsupported(
                f"tensor-parallel degree {scheme[0]} has no utilisation length",
                where=f"profile {self.name}",
                remedy=f"use one of {sorted(self.util)}",
            )
        return self.util[scheme[0]]

    def pipeline(self, scheme: Scheme, devices: int) -> PipelineCost:
        """Return what the planner needs of a pipeline of this scheme among `devices` devices."""
        k = self.constants(scheme)
        limit, useful = self.max_len(scheme, devices), self.util_len(scheme)
        return PipelineCost(k.a, k.b, k.c, scheme[1], limit, min(useful, max(limit, 1)), scheme[0] * scheme[1])

    def pipeline_of(self, pipeline: Pipeline, devices: int) -> PipelineCost:
        """Return what the planner needs of any pipeline of a strategy: uneven layers, another degree in each stage.

        A regular pipeline of plain stages whose scheme was measured has that scheme's constants. Any other is added up
        from the measured pieces of its stages; the one that is slowest for a sequence of UtilLen tokens counts.

        Args:
            pipeline: of a strategy for the model of this profile.
            devices: how many share the optimizer state: those of the whole strategy.

        Raises:
            Unsupported: a stage is of a kind that was not measured, or a fit failed.
            ValueError: it has another number of layers than the model.
        """
        if self.layers is not None and pipeline.layers != self.layers:
            raise ValueError(
                f"profile {self.name}: a pipeline of {pipeline.layers} layers, but it was measured on a model of "
                f"{self.layers}: measure this model with hydragraph profile"
            )
        scheme = _scheme_of(pipeline)
        if scheme in self.schemes or scheme in self.failed:
            assert scheme is not None
            return self.pipeline(scheme, devices)
        stages = self._stages([(Kind(s.tp, s.sequence_parallel, s.recompute), s.layers) for s in pipeline.stages])
        for stage in stages:
            if stage.kind.tp not in self.util:
                raise self._unmeasured(f"tensor-parallel degree {stage.kind.tp} has no utilisation length", stage.kind)
        useful = max(self.util[stage.kind.tp] for stage in stages)
        slowest = max((stage.seconds for stage in stages), key=lambda k: (k.a * useful + k.b) * useful + k.c)
        if slowest.failed:
            k = slowest
            raise self._unmeasured(f"a stage's fit failed (a = {k.a:g}, b = {k.b:g}, c = {k.c:g})", stages[0].kind)
        limit = self._max_len(stages, devices)
        return PipelineCost(
            slowest.a, slowest.b, slowest.c, len(stages), limit, min(useful, max(limit, 1)), len(pipeline.devices)
        )

    def _stages(self, given: Sequence[tuple[Kind, int]]) -> tuple[_PricedStage, ...]:
        """Add up the pieces of every stage of a pipeline."""
        if not self.blocks:
            raise self._unmeasured("it has constants of whole schemes only, not of blocks", given[0][0])
        found, first = [], 1
        for i, (kind, count) in enumerate(given):
            if kind not in self.pieces:
                why = self.unfit.get(kind, "they were not measured")
                raise self._unmeasured(f"stage {i}: stages of kind {kind.text}: {why}", kind)
            last = first + count
            span = self.blocks[(0 if i == 0 else first) : (last + 1 if i == len(given) - 1 else last)]
            known = self.pieces[kind]
            pieces = tuple(known[t] for t in (*span, *([AUX] if AUX in known else [])))
            found.append(_PricedStage(kind, pieces, len(given) - i))
            first = last
        return tuple(found)

    def _max_len(self, stages: Sequence[_PricedStage], devices: int) -> int:
        """Return how many tokens a micro-batch of this pipeline may have under 1F1B."""
        if self.device is None:
            raise self._unmeasured("the memory of its device is not known", stages[0].kind)
        return min(stage.max_len(self.device, devices) for stage in stages)

    def _unmeasured(self, what: str, kind: Kind) -> Unsupported:
        flags = " --sequence-parallel" * kind.sequence_parallel + " --recompute" * kind.recompute
        return Unsupported(
            what,
            where=f"profile {self.name}",
            remedy=f"measure it: hydragraph profile --schemes tp{kind.tp}pp1{flags}",
        )

    def pipelines(self, schemes: Sequence[Scheme]) -> tuple[PipelineCost, ...]:
        """Return them for a strategy's schemes, in their order; its devices are their sum."""
        devices = sum(tp * pp for tp, pp in schemes)
        known = {scheme: self.pipeline(scheme, devices) for scheme in dict.fromkeys(schemes)}
        return tuple(known[scheme] for scheme in schemes)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote."""
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        try:
            memory = data["memory"] and Memory(
                **{
                    **data["memory"],
                    "activation": {int(tp): a for tp, a in data["memory"]["activation"].items()},
                    "gap": tuple((int(n), float(g)) for n, g in data["memory"]["gap"]),
                }
            )
            return cls(
                data["name"],
                {_scheme(s): Constants(**k) for s, k in data["schemes"].items()},
                {int(tp): int(tokens) for tp, tokens in data["util"].items()},
                memory,
                {_scheme(s): int(tokens) for s, tokens in data["limits"].items()},
                data["hetero_sync_s"],
                {_scheme(s): why for s, why in data["failed"].items()},
                **_measured(data),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: no profile ({error!r}); write one with hydragraph profile") from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        known = [*self.schemes, *self.limits, *self.failed, *self.residuals]
        text = {scheme: f"tp{scheme[0]}pp{scheme[1]}" for scheme in known}
        data = {
            "name": self.name,
            "schemes": {text[s]: asdict(k) for s, k in self.schemes.items()},
            "util": dict(self.util),
            "memory": asdict(self.memory) if self.memory else None,
            "limits": {text[s]: tokens for s, tokens in self.limits.items()},
            "hetero_sync_s": self.hetero_sync_s,
            "failed": {text[s]: why for s, why in self.failed.items()},
            "blocks": list(self.blocks),
            "pieces": {k.text: {t: asdict(piece) for t, piece in each.items()} for k, each in self.pieces.items()},
            "unfit": {kind.text: why for kind, why in self.unfit.items()},
            "device": asdict(self.device) if self.device else None,
            "link": asdict(self.link) if self.link else None,
            "messages": [list(row) for row in self.messages],
            "residuals": {text[s]: value for s, value in self.residuals.items()},
            "notes": list(self.notes),
        }
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _PricedStage:
    """A stage as its pieces.

    Attributes:
        kind: how it computes.
        pieces: of its blocks.
        in_flight: micro-batches that it holds at once under 1F1B.
    """

    kind: Kind
    pieces: tuple[Piece, ...]
    in_flight: int

    @property
    def seconds(self) -> Constants:
        """The sum of its pieces'."""
        each = [piece.seconds for piece in self.pieces]
        return Constants(sum(k.a for k in each), sum(k.b for k in each), sum(k.c for k in each))

    def max_len(self, device: Device, devices: int) -> int:
        """Return the tokens for which its rank's memory suffices."""
        local = sum(piece.parameters for piece in self.pieces)
        alone = devices == 1  # then gradients are added up at home, and fp32 weights used there
        weights = 0 if alone and device.itemsize == 4 else local * device.itemsize
        held = HOME_BYTES * device.elements / devices + weights + (0 if alone else local * GRADIENT_BYTES)
        held += max(piece.fixed for piece in self.pieces)
        per_token = self.in_flight * sum(p.kept for p in self.pieces) + max(p.working for p in self.pieces)
        return max(0, math.floor((device.memory - held) / per_token)) if per_token > 0 else 0


def _regular(scheme: Scheme, layers: int) -> list[tuple[Kind, int]]:
    """Return the stages of a scheme's pipeline: as even as they can be, remainders to the last stages."""
    return [(Kind(len(s.devices)), s.layers) for s in regular_pipeline(*scheme, layers, 0)]


def _scheme_of(pipeline: Pipeline) -> Scheme | None:
    """Return the scheme of a regular pipeline of plain stages; None for any other."""
    scheme = pipeline.stages[0].tp, len(pipeline.stages)
    given = [(Kind(s.tp, s.sequence_parallel, s.recompute), s.layers) for s in pipeline.stages]
    return scheme if given == _regular(scheme, pipeline.layers) else None


def _measured(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that only measured profiles have."""
    device, link = data.get("device"), data.get("link")
    return {
        "blocks": tuple(data.get("blocks", ())),
        "pieces": {
            Kind.parse(kind): {t: Piece(**{**p, "seconds": Constants(**p["seconds"])}) for t, p in each.items()}
            for kind, each in data.get("pieces", {}).items()
        },
        "unfit": {Kind.parse(kind): why for kind, why in data.get("unfit", {}).items()},
        "device": device and Device(**device),
        "link": link and Link(**link),
        "messages": tuple((int(size), float(seconds)) for size, seconds in data.get("messages", ())),
        "residuals": {_scheme(s): float(value) for s, value in data.get("residuals", {}).items()},
        "notes": tuple(data.get("notes", ())),
    }


def _scheme(text: str) -> Scheme:
    tp, _, pp = text.removeprefix("tp").partition("pp")
    return int(tp), int(pp)


def _gaps(given: Mapping[str, float], per_node: int) -> tuple[tuple[int, float], ...]:
    """Return (up to so many devices, bytes), ascending; "node" is any number of devices from a node's on."""
    sizes = {per_node if name == "node" else int(name.removeprefix("gpu")): float(v) for name, v in given.items()}
    return tuple(sorted(sizes.items()))
