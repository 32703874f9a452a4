"""Placeholders that a strategy fills in (Hydraulis, section 5.3): targets of FX nodes that never run."""

from __future__ import annotations

from typing import Any, NoReturn

# Inputs of templates with dropout.
DROPOUT_KEYS = "dropout_keys"
DROPOUT_BLOCK = "dropout_block"


def _unfilled(name: str) -> NoReturn:
    raise AssertionError(f"{name} is a placeholder; lower the program for a strategy before running it")


def pull(bucket: str) -> Any:
    """Pull-Parameter: weights enter."""
    _unfilled("pull")


def push(bucket: str, *uses: Any) -> Any:
    """Push-Gradient: gradients leave for their owners."""
    _unfilled("push")


def communicate(value: Any, where: str) -> Any:
    """Communicate-Activation: a strategy may communicate an activation here.

    Args:
        where: "stage" between blocks, a possible pipeline cut; "enter" before a product that tensor parallelism may
            shard, "exit" after one that sums the ranks' parts.
    """
    _unfilled("communicate")


def compute(template: str, *values: Any) -> Any:
    """Run one block's template."""
    _unfilled("compute")
