"""Placeholder that a strategy fills in: Communicate-Activation of Hydraulis (section 5.3), in a template's graph.

It is the target of FX nodes, which `hydragraph.passes.shard` replaces. Pulls and pushes follow from buckets.
"""

from __future__ import annotations

from typing import Any

DROPOUT_KEYS = "dropout_keys"
DROPOUT_BLOCK = "dropout_block"


def communicate(value: Any, where: str) -> Any:
    """Communicate-Activation: a point where a strategy may communicate an activation.

    Args:
        where: "enter" before a product that tensor parallelism may shard, "exit" after one that sums the ranks' parts.
    """
    raise AssertionError("communicate is a placeholder; lower the program for a strategy before running it")
