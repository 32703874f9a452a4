"""Costs of schemes (tp, pp), for searches that choose how many pipelines use each scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from hydragraph.cost.block_pieces import Constants
from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.spec.home import Home
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.strategy_text import regular_pipeline

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs


class CostedSchemes:
    """Costs of schemes from `Costs`.

    Args:
        schemes: schemes to choose from; default: the measured schemes.
    """

    def __init__(self, costs: Costs, schemes: Sequence[Scheme] | None = None) -> None:
        self._costs = costs
        profile = costs.profile
        chosen = profile.schemes if schemes is None else schemes
        self.name = profile.name
        self.schemes: Mapping[Scheme, Constants] = {scheme: profile.constants(scheme) for scheme in chosen}
        self.failed = profile.failed
        self._placed = cache(costs.pipeline)
        self._charge = cache(lambda schemes: costs.fixed(self._strategy(schemes)))

    @cached_property
    def _fullest(self) -> tuple[int, ...]:
        return tuple(sorted(range(self._costs.ranks), key=lambda rank: (-self._costs.owned(rank), rank)))

    def max_len(self, scheme: Scheme, devices: int) -> int:
        """Return MaxLen on the ranks that own the most state; `devices` is ignored."""
        return self.pipeline(scheme, devices).max_len

    def util_len(self, scheme: Scheme) -> int:
        return self._costs.profile.util_len(scheme)

    def pipeline(self, scheme: Scheme, devices: int) -> PipelineCost:
        """Return the cost of a pipeline on the ranks that own the most state."""
        stages = regular_pipeline(*scheme, self._costs.outline.layers, 0).stages
        placed = (replace(s, devices=tuple(self._fullest[d] for d in s.devices)) for s in stages)
        return self._placed(Pipeline(tuple(placed)))

    def pipelines(self, schemes: Sequence[Scheme]) -> tuple[PipelineCost, ...]:
        """Return the cost of each scheme's pipeline on consecutive ranks."""
        return tuple(map(self._placed, self._strategy(schemes).pipelines))

    def charge(self, schemes: Sequence[Scheme]) -> float:
        return self._charge(tuple(schemes))

    def charge_in_search(self, schemes: Sequence[Scheme]) -> float:
        """Return 0, because the simulation in `charge` is slow."""
        return 0.0

    def _strategy(self, schemes: Sequence[Scheme]) -> Strategy:
        layers = self._costs.outline.layers
        firsts = accumulate((tp * pp for tp, pp in schemes), initial=0)
        return Strategy(tuple(regular_pipeline(*s, layers, first) for s, first in zip(schemes, firsts, strict=False)))


Schemes = Profile | CostedSchemes


def schemes_of(
    profile: Profile, ranks: int, home: Home | None = None, schemes: Sequence[Scheme] | None = None
) -> Schemes:
    """Return the costs of schemes on `ranks` measured devices; `home` is ignored for published constants."""
    if profile.blocks and profile.device is not None:
        # Published constants do not need PyTorch
        from hydragraph.cost.costs import Costs

        return CostedSchemes(Costs(profile, profile.cluster(ranks), home=home), schemes)
    return profile if schemes is None else profile.only(schemes)
