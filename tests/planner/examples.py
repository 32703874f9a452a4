"""Profiles and mini-batches of the planner's tests: made up, in the proportions of real ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from hydragraph.cost.profile import PipelineCost, Profile, Scheme

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


BATCHES = st.lists(st.integers(0, 2000), min_size=1, max_size=12)
