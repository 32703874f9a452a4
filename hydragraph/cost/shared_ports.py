"""Transfers that share ports and network cards.

At full speed, a transfer (*flow*) uses each port and card on its way for some fraction of the time. If the fractions of
a resource's flows add up to s > 1, the resource limits these flows to 1 / s of full speed. A flow runs at the lowest
limit of its resources.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

# Tolerates rounding.
FULL = 1 + 1e-9

# (resource, fraction of the time in use)
Used = tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class Flow:
    """Transfer that, from time `since`, runs at `rate` times full speed and needs `left` seconds at full speed."""

    actor: int
    index: int
    left: float
    used: Used
    rate: float = 0.0
    since: float = 0.0
    # Number of changes of the rate; each invalidates the computed end
    version: int = 0


class Flows:
    def __init__(self) -> None:
        # (time, turn, version, flow); version 0: the flow begins
        self._events: list[tuple[float, int, int, Flow]] = []
        self._turn = 0
        self._load: dict[int, float] = {}
        self._users: dict[int, set[Flow]] = {}

    def begin(self, at: float, flow: Flow) -> None:
        self._push(at, 0, flow)

    def ended(self) -> Iterator[tuple[float, Flow]]:
        """Yield (end, flow) in order; the caller may begin flows between ends."""
        while self._events:
            now, _, version, flow = heapq.heappop(self._events)
            if version == 0:
                self._join(now, flow)
            elif version == flow.version:
                self._leave(now, flow)
                yield now, flow

    def _push(self, at: float, version: int, flow: Flow) -> None:
        self._turn += 1
        heapq.heappush(self._events, (at, self._turn, version, flow))

    def _join(self, now: float, flow: Flow) -> None:
        flow.since = now
        slowed = {flow}
        for resource, part in flow.used:
            users = self._users.setdefault(resource, set())
            users.add(flow)
            self._load[resource] = self._load.get(resource, 0.0) + part
            if self._load[resource] > FULL:
                slowed |= users
        self._set_rates(now, slowed)

    def _leave(self, now: float, flow: Flow) -> None:
        freed: set[Flow] = set()
        for resource, part in flow.used:
            users = self._users[resource]
            users.discard(flow)
            if self._load[resource] > FULL:
                freed |= users
            # Rounding errors must not accumulate.
            self._load[resource] = self._load[resource] - part if users else 0.0
        self._set_rates(now, freed)

    def _set_rates(self, now: float, flows: set[Flow]) -> None:
        # Resolve ties alike in every run.
        for flow in sorted(flows, key=lambda f: (f.actor, f.index)):
            most = max((self._load[resource] for resource, _ in flow.used), default=0.0)
            rate = 1.0 if most <= FULL else 1.0 / most
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - (now - flow.since) * flow.rate)
            flow.since = now
            flow.rate = rate
            flow.version += 1
            self._push(now + flow.left / rate, flow.version, flow)
