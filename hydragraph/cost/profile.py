"""Measured constants: what a micro-batch costs under each scheme, and what fits into memory (Hydraulis, section 6)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hydragraph.errors import Unsupported

Scheme = tuple[int, int]  # (tp, pp): how one pipeline is deployed, on tp * pp devices

FUSED_EMBEDDING_BYTES = 32  # per element of an embedding, where one stage holds the embedding and the head
EMBEDDING_BYTES = 16  # where it holds one of them: fp32 weight and moments, 16-bit weight and gradient


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
    """

    name: str
    schemes: Mapping[Scheme, Constants]
    util: Mapping[int, int]
    memory: Memory | None = None
    limits: Mapping[Scheme, int] = field(default_factory=dict)
    hetero_sync_s: float = 0.0
    failed: Mapping[Scheme, str] = field(default_factory=dict)

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
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: no profile ({error!r}); write one with hydragraph profile") from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        text = {scheme: f"tp{scheme[0]}pp{scheme[1]}" for scheme in [*self.schemes, *self.limits, *self.failed]}
        data = {
            "name": self.name,
            "schemes": {text[s]: asdict(k) for s, k in self.schemes.items()},
            "util": dict(self.util),
            "memory": asdict(self.memory) if self.memory else None,
            "limits": {text[s]: tokens for s, tokens in self.limits.items()},
            "hetero_sync_s": self.hetero_sync_s,
            "failed": {text[s]: why for s, why in self.failed.items()},
        }
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _scheme(text: str) -> Scheme:
    tp, _, pp = text.removeprefix("tp").partition("pp")
    return int(tp), int(pp)


def _gaps(given: Mapping[str, float], per_node: int) -> tuple[tuple[int, float], ...]:
    """Return (up to so many devices, bytes), ascending; "node" is any number of devices from a node's on."""
    sizes = {per_node if name == "node" else int(name.removeprefix("gpu")): float(v) for name, v in given.items()}
    return tuple(sorted(sizes.items()))
