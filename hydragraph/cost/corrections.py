"""Measured errors of the cost model, by kind of instruction, device type and rank.

A sample is a rank's measured time for one kind of work in one step, divided by the predicted time. Medians are computed
on the logarithms of the latest samples.

    base of a type     lower median of its ranks' medians, each over forwards and backwards
    straggler          rank whose median exceeds the base by more than a tenth and more than four standard errors
    factor of a kind   median of the samples of a type's ranks except stragglers, limited to 1/4 to 4
    rate of a rank     straggler's median divided by the base

Stragglers within a tensor-parallel stage are not identified.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

from hydragraph.cost.accounts import CAUSES, TimeKind
from hydragraph.cost.block_pieces import BlockPiece
from hydragraph.cost.measured_profile import Profile
from hydragraph.spec.health import Health

LEAST = 5
WINDOW = 64
# Maximum factor; larger errors have other causes
BOUND = 4.0
# Minimum slowdown of a straggler
BEHIND = 1.1
# Minimum excess of a straggler's median over the base, in standard errors
CERTAIN = 4.0
COMPUTING = (TimeKind.FORWARD, TimeKind.BACKWARD)
CORRECTED = tuple(kind for kind in CAUSES if kind is not TimeKind.OTHER)

Samples = Mapping[tuple[TimeKind, int], tuple[float, ...]]


@dataclass(frozen=True)
class Corrections:
    """Correction factors from the samples of past steps.

    Attributes:
        types: ranks' device types; empty without measurements.
        samples: measured time divided by predicted time, by kind and rank, newest last.
    """

    types: tuple[str, ...] = ()
    samples: Samples = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (kind, rank), ratios in self.samples.items():
            if not 0 <= rank < len(self.types):
                raise ValueError(f"'samples' has rank {rank}, but the ranks are 0 to {len(self.types) - 1}")
            if not all(0 < ratio < math.inf for ratio in ratios):
                raise ValueError(f"{kind.value!r} on rank {rank}: samples must be finite and above 0")

    def __hash__(self) -> int:
        return hash((self.types, tuple(sorted((kind.value, rank, s) for (kind, rank), s in self.samples.items()))))

    def with_step(self, ratios: Mapping[tuple[TimeKind, int], float]) -> Corrections:
        grown = {key: (*self.samples.get(key, ()), ratio)[-WINDOW:] for key, ratio in ratios.items()}
        return replace(self, samples={**self.samples, **grown})

    def factor(self, kind: TimeKind, type_: str | None = None) -> float:
        """Return a kind's correction factor, computed without stragglers; 1 if unknown."""
        slow = self.health
        logs = [
            math.log(ratio)
            for rank in range(len(self.types))
            if type_ in (None, self.types[rank]) and slow.rate(rank) == 1
            for ratio in self._enough(kind, rank)
        ]
        return min(max(math.exp(median(logs)), 1 / BOUND), BOUND) if logs else 1.0

    def steps(self, kind: TimeKind, type_: str | None = None) -> int:
        ranks = (rank for rank in range(len(self.types)) if type_ in (None, self.types[rank]))
        return max((len(self._enough(kind, rank)) for rank in ranks), default=0)

    @property
    def health(self) -> Health:
        rates = {}
        for type_ in dict.fromkeys(self.types):
            logs = {r: self._computing(r) for r, own in enumerate(self.types) if own == type_ and self._computing(r)}
            if not logs:
                continue
            base = median_low([median(samples) for samples in logs.values()])
            for rank, samples in logs.items():
                behind = median(samples) - base
                # A normal distribution's standard deviation is 1.4826 median absolute deviations.
                scatter = 1.4826 * median(abs(x - median(samples)) for x in samples) / math.sqrt(len(samples))
                if behind > max(math.log(BEHIND), CERTAIN * scatter):
                    rates[rank] = math.exp(behind)
        return Health(rates)

    def _computing(self, rank: int) -> list[float]:
        return [math.log(ratio) for kind in COMPUTING for ratio in self._enough(kind, rank)]

    def _enough(self, kind: TimeKind, rank: int) -> tuple[float, ...]:
        ratios = self.samples.get((kind, rank), ())
        return ratios if len(ratios) >= LEAST else ()

    def __str__(self) -> str:
        types = tuple(dict.fromkeys(self.types))
        parts = []
        for kind in CORRECTED:
            for type_ in types:
                count = self.steps(kind, type_)
                if count:
                    where = f" on {type_}" if len(types) > 1 else ""
                    parts.append(f"{kind.value}{where} x{self.factor(kind, type_):.3g} from {count} steps")
        slow = [f"rank {rank} takes {rate:.3g}x as long" for rank, rate in self.health.rates.items()]
        return "; ".join(filter(None, (", ".join(parts), ", ".join(slow)))) or "nothing is corrected"

    def save(self, path: str | Path) -> None:
        samples = [[kind.value, rank, list(ratios)] for (kind, rank), ratios in self.samples.items()]
        record = {"types": list(self.types), "samples": samples, "says": str(self)}
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Corrections:
        """Read a file written by `save`; raise a ValueError if it does not contain corrections."""
        try:
            record: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            samples = {
                (TimeKind(kind), int(rank)): tuple(map(float, ratios)) for kind, rank, ratios in record["samples"]
            }
            return cls(tuple(map(str, record["types"])), samples)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: not a corrections file ({type(error).__name__}: {error}): write one with hydragraph compare"
            ) from error


def corrected(profile: Profile, corrections: Corrections, type_: str | None = None) -> Profile:
    """Return a profile with corrected times of computation, update and commit for a device type; None: all types."""
    factors = {kind: corrections.factor(kind, type_) for kind in (*COMPUTING, TimeKind.UPDATE, TimeKind.COMMIT)}
    if all(factor == 1 for factor in factors.values()):
        return profile
    ahead = factors[TimeKind.FORWARD]
    back = factors[TimeKind.BACKWARD]
    pieces = {
        kind: {name: _corrected(piece, ahead, back) for name, piece in of_kind.items()}
        for kind, of_kind in profile.pieces.items()
    }
    update = profile.update
    if update is not None:
        update = update[0] * factors[TimeKind.UPDATE], update[1] * factors[TimeKind.UPDATE]
    together = (ahead + 2 * back) / 3
    schemes = {scheme: constants.times(together) for scheme, constants in profile.schemes.items()}
    commit = factors[TimeKind.COMMIT]
    return replace(
        profile,
        pieces=pieces,
        schemes=schemes,
        update=update,
        commit_s=profile.commit_s * commit,
        norm_s=profile.norm_s * commit,
    )


def _corrected(piece: BlockPiece, ahead: float, back: float) -> BlockPiece:
    sums = piece.reduced[0]
    before = (*(ahead * s for s in piece.before_sums[:sums]), *(back * s for s in piece.before_sums[sums:]))
    return replace(
        piece,
        forward=piece.forward.times(ahead),
        backward=piece.backward.times(back),
        before_sums=before,
        during_sums=tuple(back * s for s in piece.during_sums),
    )
