"""Functions that FX nodes call where a strategy inserts operations (Hydraulis, section 5.3)."""

from __future__ import annotations

from typing import Any, NoReturn

# Inputs of templates with dropout.
DROPOUT_KEYS = "dropout_keys"
DROPOUT_BLOCK = "dropout_block"


def _unfilled(name: str) -> NoReturn:
    raise AssertionError(f"{name} is a placeholder; lower the program for a strategy before running it")


def pull(bucket: str) -> Any:
    """Pull a bucket's weights (Pull-Parameter)."""
    _unfilled("pull")


def push(bucket: str, *uses: Any) -> Any:
    """Push a bucket's gradients to their owners (Push-Gradient)."""
    _unfilled("push")


def communicate(value: Any, where: str) -> Any:
    """Mark an activation that a strategy may communicate (Communicate-Activation).

    Args:
        where: "stage" between blocks; "enter" before a product that tensor parallelism may shard; "exit" after a
            product whose partial results are summed over ranks.
    """
    _unfilled("communicate")


def compute(template: str, *values: Any) -> Any:
    _unfilled("compute")
