"""State that follows its ranks' speed: where it pays, a slow rank comes to own less; on the rank that leads.

    rates change -> a home that pays within the steps that are left (`rehoming`) -> its parts, each beside a step

A part is as much as a rank receives within BESIDE of a step, on links that others use, too: so it is there when the
step ends, and what training waits for are its gradients (`Executable.rehome`). A decision is kept for a while, since
rates are noisy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hydragraph.cost.costs import Costs
from hydragraph.elastic.events import Event
from hydragraph.elastic.rehoming import Rehoming, StateCosts, received, rehoming, stages
from hydragraph.ir.parameter import Bucket
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home

BESIDE = 0.5  # of a step, in which a part is to come
COOLDOWN = 6  # steps between two decisions


def state_costs(costs: Costs) -> StateCosts:
    """Return what state costs by a profile and a cluster: updates as measured, moves by the slowest link.

    Memory is taken to be enough: a slow rank's share, spread over the others, is little for each.
    """
    ranks = range(costs.ranks)
    updates = [costs.piece_profile(rank).update for rank in ranks]
    elements = sum(bucket.size for bucket in costs.buckets)
    per_element = max((update[1] for update in updates if update is not None), default=0.0)
    links = [costs.cluster.link(a, b).bytes_per_s for a in ranks for b in ranks if a != b]
    return StateCosts(per_element * elements, costs.state_bytes, min(links, default=1.0))


class Following:
    """Decides where state lives, and says in which parts it goes there.

    Args:
        home: who owns the state now, with nodes where it has copies.
        ranks: how many there are.
        buckets: of the model.
        costs: what having and moving state costs.
        steps: of the whole run.
        dry_run: decide and tell, but move nothing.

    Attributes:
        home: who owns the state now.
    """

    def __init__(
        self, home: Home, ranks: int, buckets: Sequence[Bucket], costs: StateCosts, steps: int, dry_run: bool = False
    ) -> None:
        self.home = home
        self._ranks = ranks
        self._buckets = buckets
        self._costs = costs
        self._steps = steps
        self._dry_run = dry_run
        self._decided_for = Health()
        self._decided_at: int | None = None
        self._parts: deque[Home] = deque()
        self._under_way = False

    @property
    def next(self) -> Home | None:
        """The home to which state is to go beside the next step; None: it stays, or is on its way."""
        return self._parts[0] if self._parts and not self._under_way else None

    def begun(self) -> None:
        """Take down that state goes to `next` beside the next step."""
        self._under_way = True

    def stepped(self, step: int, health: Health, seconds: float) -> tuple[Event, ...]:
        """Decide after a step, by how fast ranks are known to be; return the decision, if there is one.

        Args:
            step: its number.
            health: what is known.
            seconds: that it took.
        """
        if self._under_way:
            self.home, self._under_way = self._parts.popleft(), False
        early = self._decided_at is not None and step - self._decided_at < COOLDOWN
        if self._parts or early or health == self._decided_for or health.lost:
            return ()
        self._decided_for = health
        better = rehoming(self.home, self._ranks, self._buckets, health, self._costs, self._steps - step)
        if better is None:
            return ()
        self._decided_at = step
        return (self._move(step, health, better, seconds),)

    def _move(self, step: int, health: Health, better: Rehoming, seconds: float) -> Event:
        at_once = max(1, int(BESIDE * seconds * self._costs.bytes_per_s / self._costs.bytes_per_element))
        home = replace(better.home, nodes=self.home.nodes)
        parts = list(stages(self.home, home, self._ranks, self._buckets, at_once))
        went = sum(received(self.home, home, self._ranks, self._buckets))
        why = f"state goes to shares {home} in {len(parts)} parts beside steps: {better.why}"
        if self._dry_run:
            why = f"dry run, not done: {why}"
        else:
            self._parts.extend(parts)
        return Event(
            step,
            "migrate",
            tuple(sorted(health.rates)),
            better.moving_s,
            why,
            dict(health.rates),
            better.before_s,
            better.after_s,
            not self._dry_run,
            moved_bytes=0 if self._dry_run else int(went * self._costs.bytes_per_element),
        )
