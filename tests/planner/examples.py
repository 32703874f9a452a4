"""Profiles and mini-batches of the planner's tests: made up, in the proportions of real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hydragraph.cost.curves import Constants
from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.cost.stage_costs import NeighborMessages, Ring, StageCost
from hydragraph.spec.cluster import Interconnect

SCHEMES: list[Scheme] = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1), (8, 2)]
ENTRY: dict[str, Any] = {
    "name": "made up",
    "model": {"hidden": 4096, "layers": 32, "vocab": 32000},
    "schemes": [
        {
            "tp": tp,
            "pp": pp,
            "a_ms_per_token2": 4e-6 / (tp**0.9 * pp),
            "b_ms_per_token": 0.19 / (tp**0.85 * pp),
            "c_ms": 30.0 / pp + 2 * tp,
        }
        for tp, pp in SCHEMES
    ]
    + [{"tp": 16, "pp": 1, "a_ms_per_token2": 0, "b_ms_per_token": 0.02, "c_ms": 60.0}],
    "util_len_tokens": {"1": 384, "2": 512, "4": 768, "8": 1024, "16": 1280},
    "memory": {
        "activation_A": {"1": 38, "2": 39, "4": 42, "8": 48, "16": 61},
        "states_B": 210,
        "alpha": 0.75,
        "gap_bytes": {"node": 5e9},
        "safety_margin_bytes": 6e9,
        "device_bytes": 85e9,
    },
    "gpus_per_node": 8,
    "hetero_sync_ms": 300,
}
PROFILE = Profile.from_constants(ENTRY)
MIXED: list[Scheme] = [(8, 1), (4, 2), (4, 1), (2, 2), (2, 2), (2, 1), (1, 2)]


def lengths(count: int, seed: int, longest: int = 16000) -> list[int]:
    """Return a log-normal mini-batch."""
    drawn = np.random.default_rng(seed).lognormal(np.log(400), 1.2, count)
    return np.clip(drawn, 1, longest).astype(int).tolist()


@st.composite
def pipelines(draw: st.DrawFn, most: int = 5) -> tuple[PipelineCost, ...]:
    """Draw pipelines of any kind; the first takes 2,000 tokens."""
    kinds = draw(st.integers(1, 3))
    drawn = []
    for k in range(kinds):
        limit = 2000 if k == 0 else draw(st.integers(50, 2000))
        drawn.append(
            PipelineCost(
                a=draw(st.floats(1e-7, 1e-3)),
                b=draw(st.floats(1e-4, 1e-1)),
                c=draw(st.sampled_from([0.0, 0.1, 5.0])),
                stages=draw(st.integers(1, 4)),
                max_len=limit,
                util_len=draw(st.integers(1, limit)),
                devices=1,
            )
        )
    return (drawn[0], *(draw(st.sampled_from(drawn)) for _ in range(draw(st.integers(0, most - 1)))))


@st.composite
def uneven(draw: st.DrawFn, regular: st.SearchStrategy[tuple[PipelineCost, ...]]) -> tuple[PipelineCost, ...]:
    """Draw pipelines of which some have stages of their own: uneven, of several kinds of ranks, with links."""
    drawn = draw(regular)
    kinds = {kind: draw(st.one_of(st.just(kind), with_stages(kind))) for kind in dict.fromkeys(drawn)}
    return tuple(kinds[kind] for kind in drawn)


@st.composite
def with_stages(draw: st.DrawFn, kind: PipelineCost) -> PipelineCost:
    """Draw the stages of a pipeline; its constants are those of the slowest, or near them."""

    def part(share: float) -> tuple[tuple[float, Constants], ...]:
        times = share * draw(st.floats(0.2, 1.0))
        return ((times, kind.envelope),)

    def link() -> Interconnect:
        points = draw(st.sampled_from([(), (), ((1e5, 1e8), (1e7, 1e9))]))
        return Interconnect(1e9, draw(st.sampled_from([0.0, 1e-3])), points)

    stages = []
    for s in range(kind.stages):
        ranks = draw(st.integers(1, 2))
        last = s == kind.stages - 1
        stages.append(
            StageCost(
                tuple(part(1 / 3) for _ in range(ranks)),
                tuple(part(2 / 3) for _ in range(ranks)),
                tuple(((1.0, Constants(0.0, 1e-6, 1e-3)),) for _ in range(ranks)) if draw(st.booleans()) else (),
                (Ring(2, 1, 4096, link()), Ring(2, 2, 4096, link())) if draw(st.booleans()) else None,
                None if last else NeighborMessages(tuple(link() for _ in range(ranks)), 4096, draw(st.integers(1, 2))),
                None if last else NeighborMessages((link(),), 4096),
            )
        )
    return replace(kind, parts=tuple(stages), schedule=draw(st.sampled_from(["1f1b", "1f1b", "gpipe", "zb-h1"])))
