"""Time of a micro-batch on a stage's slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.curves import Constants, LengthSums
from hydragraph.cost.schedule_replay import replayed
from hydragraph.ir.schedules.schedule_kinds import WHOLE_BACKWARD
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE

Parts = tuple[tuple[float, Constants], ...]  # (count, curve)


@dataclass(frozen=True)
class Ring:
    """Tensor-parallel sums, each of which sends 2 (t - 1) messages along a ring.

    Attributes:
        ranks: ring size t.
        times: number of hidden states summed per micro-batch.
        link: the slowest link of the ring.
        hidden: seconds per token that overlap with weight gradients; latencies do not overlap.
        pieces: number of pieces that the tokens are split into, summed one after another.
        beside: (number of sums, seconds per token of the matrix product before each). A piece is summed while the
            product of the next piece is computed.
    """

    ranks: int
    times: float
    token_bytes: int
    link: Interconnect
    hidden: float = 0.0
    pieces: int = 1
    beside: tuple[tuple[float, float], ...] = ()

    @property
    def exposed(self) -> Ring:
        return replace(self, hidden=0.0)

    def slower(self, factor: float) -> Ring:
        beside = tuple((factor * times, product_s) for times, product_s in self.beside)
        return replace(self, times=factor * self.times, hidden=factor * self.hidden, beside=beside)

    @property
    def messages(self) -> int:
        return 2 * (self.ranks - 1)

    def sent_bytes(self, tokens: int) -> float:
        return self.times * self.messages * tokens * self.token_bytes / self.ranks

    @property
    def latency_s(self) -> float:
        """Total latency of the sums' last pieces, in seconds."""
        return self.times * self.messages * self.link.latency_s

    def seconds(self, tokens: int) -> float:
        if not self.times:
            return 0.0
        each = self.messages * self.link.seconds(tokens * self.token_bytes / self.ranks / self.pieces)
        sent = self.times * self.pieces * each - self._beside_products(each, tokens)
        return max(self.latency_s, sent - tokens * self.hidden)

    def token_seconds(self, per_byte: float) -> float:
        """Return the exposed seconds per token, without latencies, for `per_byte` seconds per byte."""
        each = self.messages * self.token_bytes / self.ranks * per_byte
        return max(0.0, self.times * each - self._beside_products(each / self.pieces, 1) - self.hidden)

    def _beside_products(self, each: float, tokens: int) -> float:
        further = self.pieces - 1
        return sum(times * further * min(each, tokens * product_s / self.pieces) for times, product_s in self.beside)


@dataclass(frozen=True)
class NeighborMessages:
    """Messages that a stage's ranks send to a neighboring stage simultaneously.

    Attributes:
        links: links of the slowest rank's consecutive messages.
        sharing: largest number of messages through one card.
        part: correction factor of the message bytes (`Corrections`).
    """

    links: tuple[Interconnect, ...]
    token_bytes: int
    sharing: int = 1
    part: float = 1.0

    def seconds(self, tokens: float) -> float:
        size = tokens * self.token_bytes * self.part
        total = 0.0
        for link in self.links:
            # Messages share a card's bandwidth.
            together = link.latency_s + self.sharing * size / max(link.bytes_per_s, link.bandwidth(size))
            total += max(link.seconds(size), together)
        return total


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage.

    Attributes:
        forward, backward: curves of each kind of rank (device type, rate).
        aux: curves of computation that precedes the forward and does not wait for the forward's message.
        ahead, back: messages to and from the next stage, if any.
    """

    forward: tuple[Parts, ...]
    backward: tuple[Parts, ...]
    aux: tuple[Parts, ...] = ()
    rings: tuple[Ring, Ring] | None = None
    ahead: NeighborMessages | None = None
    back: NeighborMessages | None = None

    def slower(self, factor: float) -> StageCost:
        forward, backward, aux = (
            tuple(tuple((factor * n, curve) for n, curve in parts) for parts in every)
            for every in (self.forward, self.backward, self.aux)
        )
        rings = self.rings and (self.rings[0].slower(factor), self.rings[1].slower(factor))
        return replace(self, forward=forward, backward=backward, aux=aux, rings=rings)

    def under(self, schedule: str) -> StageCost:
        """Return the cost under a schedule. Sums overlap with weight gradients only in whole backwards."""
        if self.rings is None or schedule in WHOLE_BACKWARD:
            return self
        return replace(self, rings=(self.rings[0], self.rings[1].exposed))

    def seconds(self, lengths: Sequence[int]) -> tuple[float, float]:
        early, one, two = self.apart(lengths)
        return early + one, two

    def apart(self, lengths: Sequence[int]) -> tuple[float, float, float]:
        load = LengthSums(lengths)
        early, one, two = (
            max((sum(n * curve.at(load) for n, curve in parts) for parts in every), default=0.0)
            for every in (self.aux, self.forward, self.backward)
        )
        if self.rings is None:
            return early, one, two
        return early, one + self.rings[0].seconds(load.tokens), two + self.rings[1].seconds(load.tokens)

    def row(self, lengths: Sequence[int]) -> list[float]:
        """Return the seconds of aux, forward, backward, and messages to and from the next stage."""
        tokens = sum(lengths)
        return [*self.apart(lengths), *(hop.seconds(tokens) if hop else 0.0 for hop in (self.ahead, self.back))]

    @property
    def constants(self) -> Constants:
        """Approximate constants of forward and backward together."""
        by_rank_kind = []
        for i, (one, two) in enumerate(zip(self.forward, self.backward, strict=True)):
            parts = (*one, *two, *(self.aux[i] if self.aux else ()))
            whole = Constants.sum(parts)
            b = whole.b
            c = whole.c
            for ring in self.rings or ():
                b += ring.token_seconds(1 / ring.link.bytes_per_s)
                c += ring.latency_s
            by_rank_kind.append(replace(whole, b=b, c=c))
        return max(by_rank_kind, key=lambda k: (k.b, k.a, k.c))


def stage_rows(stages: Sequence[StageCost], micro_batches: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the seconds of micro-batches [M, S, 5], for `compiled_replay`."""
    rows = {m: np.array([stage.row(m) for stage in stages]) for m in dict.fromkeys(map(tuple, micro_batches))}
    return np.array([rows[tuple(m)] for m in micro_batches])


def stages_end(
    stages: Sequence[StageCost],
    micro_batches: Sequence[Sequence[int]],
    schedule: str = DEFAULT_SCHEDULE,
    rows: tuple[int, ...] = (),
) -> float:
    """Return the seconds of a sequence of micro-batches.

    Args:
        rows: row of each stage (`Pipeline.rows`); empty: one row per stage.
    """
    if not micro_batches:
        return 0.0
    return float(replayed(stage_rows([stage.under(schedule) for stage in stages], micro_batches), schedule, rows).max())
