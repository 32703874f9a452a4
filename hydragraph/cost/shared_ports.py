"""Flows that share ports and network cards: the part of a simulation that needs a clock.

A flow occupies a resource for a fraction of its time alone: a message of 1 GB over a card of 10 GB/s that takes 0.2 s
for other reasons occupies the card for a half. While the fractions on a resource sum to more than 1, its flows run at
1 / their sum of their speed; a flow runs at the speed of its slowest resource.

Example: A takes 1 s alone and B 0.4 s; both begin at 0 and fill 0.8 of one card, together 1.6.

    0 to 0.64     both run at 1 / 1.6 = 0.625 of their speed; then B's 0.4 s are done, and 0.4 of A's
    0.64 to 1.24  A's other 0.6 s, alone again: it ends at 1.24 and not at 1
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

# Fractions that exceed 1 only by rounding do not slow each other.
FULL = 1 + 1e-9

Used = tuple[tuple[int, float], ...]  # (resource, part)


class Flow:
    """One transfer in progress: `left` seconds alone, at `rate` of its speed since `since`."""

    __slots__ = ("actor", "index", "left", "rate", "since", "used", "version")

    def __init__(self, actor: int, index: int, seconds: float, used: Used) -> None:
        self.actor = actor
        self.index = index
        self.left = seconds
        self.used = used
        self.rate = 0.0
        self.since = 0.0
        self.version = 0  # grows whenever its rate changes, which invalidates the ends computed before


class Flows:
    """All flows, in the future and in progress."""

    def __init__(self) -> None:
        # A heap of begins and ends. An end whose flow's rate has changed since is outdated, and skipped when its time
        # comes. The turn settles ties in the order in which they were pushed.
        self._events: list[tuple[float, int, int, Flow]] = []  # when, turn, version (0: begins), which
        self._turn = 0
        self._load: dict[int, float] = {}
        self._users: dict[int, set[Flow]] = {}

    def begin(self, at: float, flow: Flow) -> None:
        """Start a flow at a time that has not passed."""
        self._push(at, 0, flow)

    def ended(self) -> Iterator[tuple[float, Flow]]:
        """Yield flows in the order in which they end; more may begin meanwhile, at that time or later."""
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
            # Exactly 0 without users, so that rounding errors do not accumulate over a long run.
            self._load[resource] = self._load[resource] - part if users else 0.0
        self._set_rates(now, freed)

    def _set_rates(self, now: float, flows: set[Flow]) -> None:
        # In a fixed order, so that ties of ends are settled alike in every run.
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
