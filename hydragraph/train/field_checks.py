"""Checks of config fields; a ValueError names the field and the remedy."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


def check_text(name: str, value: object) -> str:
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name!r} is {value!r}: give a non-empty string")
    return os.path.expanduser(value)


def check_texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) and value.strip():
        raise ValueError(f"{name!r} is {value!r}: give a list, as in {name}: [{value}]")
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"{name!r} is {value!r}: give a list of at least one string")
    return tuple(check_text(name, item) for item in value)


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name!r} is {value!r}: give true or false")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name!r} is {value!r}: use {' or '.join(map(repr, choices))}")


def check_device(name: str, value: object) -> None:
    check_text(name, value)
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(value)):
        raise ValueError(f"{name} {value!r}: use 'cpu', or 'cuda', which gives each rank its own GPU")


def check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name!r} is {value!r}: give a whole number of at least {least}")


def check_number(name: str, value: object, least: float = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError(f"{name!r} is {value!r}: give a number of at least {least:g}")


def check_fraction(name: str, value: object, one: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 <= value < 1 or (one and value == 1)):
        raise ValueError(f"{name!r} is {value!r}: give a number of at least 0 and {'at most' if one else 'below'} 1")


def similar(name: str, known: Iterable[str], otherwise: str) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


Texts = Annotated[tuple[str, ...], check_texts]
Count = Annotated[int, partial(check_whole, least=0)]
Positive = Annotated[int, partial(check_whole, least=1)]
Number = Annotated[float, check_number]
Fraction = Annotated[float, check_fraction]
Part = Annotated[float, partial(check_fraction, one=True)]


def check_fields(record: object, *skipped: str) -> None:
    """Check a dataclass's `bool`, `str` and `Annotated` fields; optional fields may be None."""
    cls: Any = type(record)
    for name, hint in _hints(cls).items():
        value = getattr(record, name)
        check = check_of(hint)
        if check is not None and name not in skipped and not (value is None and type(None) in get_args(hint)):
            converted = check(name, value)
            if converted is not None:
                object.__setattr__(record, name, converted)


class CheckedFields:
    def __post_init__(self) -> None:
        check_fields(self)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def check_of(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        hints = [part for part in get_args(hint) if part is not type(None)]
        return check_of(hints[0]) if len(hints) == 1 else None
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    return {bool: check_flag, str: check_text}.get(hint)
