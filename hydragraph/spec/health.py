"""Health of devices. In the YAML `{3: 2.57, 5: inf}`, rank 3 takes 2.57 times as long as normal, and rank 5 is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydragraph.spec.record import flow_yaml, load_yaml


@dataclass(frozen=True)
class Health:
    """Straggling rates of ranks (Malleus): a rank's time divided by a healthy rank's time for the same work.

    Attributes:
        rates: slowdown by rank, at least 1, infinite for lost ranks. Other ranks are healthy.
    """

    rates: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, rate in self.rates.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
                raise ValueError(f"'rates' has rank {rank!r}: ranks are integers from 0")
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate >= 1:
                raise ValueError(f"rates: rank {rank} has {rate!r}: give a rate of at least 1, or inf for a lost rank")
        object.__setattr__(self, "rates", {r: float(x) for r, x in sorted(self.rates.items()) if x != 1})

    def __hash__(self) -> int:
        return hash(tuple(self.rates.items()))

    def __iter__(self) -> Iterator[int]:
        return iter(self.rates)

    def rate(self, rank: int) -> float:
        return self.rates.get(rank, 1.0)

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(rank for rank, rate in self.rates.items() if math.isinf(rate))

    def of_ranks(self, ranks: Sequence[int]) -> Health:
        """Return the health of some ranks, renumbered from 0 in the given order."""
        return Health({new: self.rate(old) for new, old in enumerate(ranks)})

    @classmethod
    def load(cls, path: str | Path) -> Health:
        """Read a YAML file of rates by rank."""
        data = load_yaml(path)
        if not isinstance(data, dict):
            raise ValueError(
                f"{path} contains {data!r:.80}: give rates by rank, such as {{3: 2.57, 5: inf}}, or {{}} if all are "
                "healthy"
            )
        # In YAML, "inf" is a string; infinity is ".inf".
        rates = {rank: math.inf if rate == "inf" else rate for rank, rate in data.items()}
        try:
            return cls(rates)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write a YAML file for `load`."""
        Path(path).write_text(flow_yaml(dict(self.rates)) + "\n", encoding="utf-8")
