"""Checks of a config's fields, one per kind of value; each raises a ValueError that names the field and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_text(name: str, value: object, optional: bool = False) -> None:
    """Check that a value is a text that is not blank."""
    if not (optional and value is None) and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name} is {value!r}: give a text")


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """Return a list of at least one text as a tuple."""
    if isinstance(value, str) and value.strip():
        raise ValueError(f"{name} is {value!r}: give a list, as in {name}: [{value}]")
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"{name} is {value!r}: give a list of at least one text")
    for item in value:
        check_text(name, item)
    return tuple(value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that a value is one of a few texts."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: use {' or '.join(map(repr, choices))}")


def check_whole(name: str, value: object, least: int) -> None:
    """Check that a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")


def check_number(name: str, value: object, least: float = 0) -> None:
    """Check that a value is a finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError(f"{name} is {value!r}: give a number of at least {least:g}")


def check_fraction(name: str, value: object, one: bool = False) -> None:
    """Check that a value is a number of at least 0, and below 1 or, where `one` is allowed, at most 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 <= value < 1 or (one and value == 1)):  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}: give a number of at least 0 and {'at most' if one else 'below'} 1")
