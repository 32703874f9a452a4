"""Policy of the leading rank for moving state away from slow ranks.

State moves in parts, which arrive within the fraction BESIDE of a step's time, so that training waits only for their
gradients (`Executable.rehome`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.cost.costs import Costs
from hydragraph.cost.home_choice import HomeQuestion
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.ir.parameter import Bucket
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home, Rule
from hydragraph.spec.strategy import Strategy
from hydragraph.train.stragglers.reshard_plan import Rehoming, StateCosts, owned_by, passes, received, rehoming, stages
from hydragraph.train.stragglers.run_events import RunEvent

BESIDE = 0.5
COOLDOWN = 6
MIX = 16
# A new home is chosen after this fraction of the strategies' mix has changed
CHANGED = 0.25


def state_costs(costs: Costs) -> StateCosts:
    ranks = range(costs.ranks)
    updates = [costs.piece_profile(rank).update for rank in ranks]
    elements = sum(bucket.size for bucket in costs.buckets)
    per_element = max((update[1] for update in updates if update is not None), default=0.0)
    links = [costs.cluster.link(a, b) for a in ranks for b in ranks if a != b]
    slowest = min((link.bytes_per_s for link in links), default=1.0)
    # Pull and push
    messages = 2 * len(costs.buckets) * max((link.latency_s for link in links), default=0.0)
    return StateCosts(per_element * elements, costs.state_bytes, slowest, messages_s=messages)


def with_room(
    state: StateCosts, costs: Costs, strategies: Sequence[Strategy], tokens: int, owned: Sequence[int]
) -> StateCosts:
    """Return `state` with the memory that strategies and messages leave free.

    Args:
        tokens: number of tokens in the largest mini-batch.
        owned: number of elements that each rank owns, which are assumed to fit.
    """
    # beside[rank]: most memory that a strategy needs besides the state, in bytes.
    beside = [0.0] * costs.ranks
    for strategy in strategies:
        most = [min(costs.max_len(pipeline, strategy), tokens) for pipeline in strategy.pipelines]
        beside = list(map(max, beside, costs.beside(strategy, most)))
    replicas = max((len(strategy.pipelines) for strategy in strategies), default=0)
    held_bytes = costs.state_bytes + GRADIENT_BYTES + replicas * (costs.sizes.itemsize + GRADIENT_BYTES)
    free = [costs.memory_of(rank) - need for rank, need in enumerate(beside)]
    room = [max(left, float(size * held_bytes)) for left, size in zip(free, owned, strict=True)]
    return replace(state, free_bytes=room, held_bytes=held_bytes)


@dataclass(eq=False)
class ReshardPolicy:
    """Choice of the state's owners, and division of moves into parts.

    Attributes:
        memory: costs that include ranks' memory; None: unlimited memory.
        rule: how strategies determine the owners, if they do; requires `memory`.
    """

    home: Home
    ranks: int
    buckets: Sequence[Bucket]
    costs: StateCosts
    steps: int
    dry_run: bool = False
    memory: Costs | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        self._mix: deque[Strategy] = deque(maxlen=MIX)
        self._decided_mix: dict[Strategy, float] = {}
        self._decided_for = Health()
        self._decided_at: int | None = None
        # _parts: homes still to be reached; the first may be under way.
        self._parts: deque[Home] = deque()
        self._under_way = False
        self._given = self.home if self.rule is None else None

    @property
    def next(self) -> Home | None:
        """Home to move to in the next step, unless a part is moving."""
        return self._parts[0] if self._parts and not self._under_way else None

    @property
    def target(self) -> Home:
        return self._parts[-1] if self._parts else self.home

    @property
    def moving(self) -> bool:
        # `_under_way` counts as 1, the moving part.
        return len(self._parts) > self._under_way

    def begun(self) -> None:
        self._under_way = True

    def stepped(
        self, step: int, health: Health, seconds: float, strategies: Sequence[Strategy] = (), tokens: int = 0
    ) -> tuple[RunEvent, ...]:
        """Decide after a step whether to move state; return an event if so.

        Args:
            strategies: this step's strategy, then those that later steps may use.
        """
        self._mix.extend(strategies[:1])
        # The part that began before this step has arrived.
        if self._under_way:
            self.home = self._parts.popleft()
            self._under_way = False
        # Decide again only if rates or the mix of strategies changed, and no part is waiting.
        early = self._decided_at is not None and step - self._decided_at < COOLDOWN
        mix = self._changed_mix()
        if self._parts or early or (health == self._decided_for and mix is None) or health.lost:
            return ()
        self._decided_for = health
        self._decided_mix = mix or self._decided_mix
        costs = self.costs
        if self.memory is not None:
            owned = owned_by(self.home, self.ranks, self.buckets)
            costs = with_room(costs, self.memory.changed(home=self.home), strategies, tokens, owned)
        question = self._question(health, costs)
        better = rehoming(self.home, self.ranks, self.buckets, health, costs, self.steps - step, question, self._given)
        if better is None:
            return ()
        home = replace(better.home, nodes=self.home.nodes)
        # at_once: elements that the slowest link transfers in this part of a step.
        at_once = max(1, int(BESIDE * seconds * costs.bytes_per_s / costs.bytes_per_element))
        # Move one bucket at a time if large parts do not fit.
        for elements in (at_once, 1):
            parts = list(stages(self.home, home, self.ranks, self.buckets, elements))
            if passes([self.home, *parts], self.ranks, self.buckets, costs):
                self._decided_at = step
                return (self._move(step, health, better, home, parts),)
        return ()

    def _changed_mix(self) -> dict[Strategy, float] | None:
        if self.rule is None or len(self._mix) < MIX:
            return None
        mix = {strategy: count / MIX for strategy, count in Counter(self._mix).items()}
        before = self._decided_mix
        # From A to half A and half B: (0.5 + 0.5) / 2, so half of the steps changed.
        moved = sum(abs(mix.get(s, 0.0) - before.get(s, 0.0)) for s in {*mix, *before}) / 2
        return mix if moved >= CHANGED else None

    def _question(self, health: Health, costs: StateCosts) -> HomeQuestion | None:
        if self.rule is None or self.memory is None or not self._mix:
            return None
        mix = Counter(self._mix)
        room = None
        if costs.free_bytes is not None:
            room = tuple(free / costs.held_per_element for free in costs.free_bytes)
        home = Home(copies=self.home.copies, nodes=self.home.nodes, rule=self.rule)
        question = self.memory.question(tuple(mix), home, room)
        weights = tuple(map(float, mix.values()))
        return replace(question, buckets=tuple(self.buckets), weights=weights, health=health)

    def _move(self, step: int, health: Health, better: Rehoming, home: Home, parts: Sequence[Home]) -> RunEvent:
        went = sum(received(self.home, home, self.ranks, self.buckets))
        why = f"state moves to shares {home} in {len(parts)} parts while training continues: {better.why}"
        if self.dry_run:
            why = f"dry run, not done: {why}"
        else:
            self._parts.extend(parts)
        done = not self.dry_run
        rates = dict(health.rates)
        ranks = tuple(sorted(rates))
        times = (better.before_s, better.after_s)
        moved = int(went * self.costs.bytes_per_element) if done else 0
        return RunEvent(step, "migrate", ranks, better.moving_s, why, rates, *times, done, moved_bytes=moved)
