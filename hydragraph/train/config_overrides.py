"""Overrides of config fields, such as "optimizer.lr=1e-3", and differences between two configs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from hydragraph.spec.record import from_record, parse_yaml, section_record
from hydragraph.train.coming_from import remedies

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)

_PAIRS = (
    ("steps", "epochs"),
    ("schedule.warmup", "schedule.warmup_ratio"),
    ("evaluate_every", "evaluate_per_epoch"),
    ("checkpoint_every", "checkpoint_per_epoch"),
)
_ALTERNATIVES = dict([*_PAIRS, *((second, first) for first, second in _PAIRS)])


def differences(before: Config, after: Config) -> list[str]:
    """Return every field that differs, such as "optimizer.lr 0.001 -> 0.01"."""
    return list(_differences("", plain(asdict(before)), plain(asdict(after))))


def given_plan(config: Any) -> Any:
    """Return a config's `plan`; if `strategies: auto` set its `choose`, reset `choose` to false."""
    return replace(config.plan, choose=False) if config.automatic and config.plan.cluster is None else config.plan


def underived(config: Any) -> dict[str, Any]:
    """Return a config's fields, with derived values reset to defaults, so that loading derives them again."""
    data: dict[str, Any] = plain(asdict(config))
    data["plan"] = plain(asdict(given_plan(config)))
    data["ranks"] = int(config.ranks)
    if config.elastic.copies > 1:
        data["home"]["copies"] = 1
    if config.objective is not None:
        for source in (data["data"], *data["data"]["mixture"], *data["data"]["evaluation"].values()):
            source["format"] = "auto"
    return data


def _differences(place: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            yield from _differences(f"{place}.{name}" if place else name, old.get(name), new.get(name))
    elif isinstance(new, Mapping) and old is None:
        yield f"{place} added"
    elif isinstance(old, Mapping) and new is None:
        yield f"{place} removed"
    elif old != new:
        yield f"{place} {_short(old)} -> {_short(new)}"


def _short(value: object) -> str:
    return "none" if value is None else json.dumps(value)


def overridden(config: Config, given: Any, texts: Sequence[str]) -> Config:
    """Return the config with every "section.field=value" applied; values are YAML.

    Overrides are set in `given`, the mapping that was read, so that derived settings are computed again. The two fields
    of each pair in `_PAIRS` exclude each other: overriding one removes the other.
    """
    data = dict(given)
    # Apply all overrides before reporting an error: one may be valid only with a later one.
    names = {text.partition("=")[0].strip() for text in texts}
    failures: list[str] = []
    for text in texts:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"override {text!r}: write section.field=value, such as optimizer.lr=1e-3")
        read = _value(text, value)
        if read and (other := _ALTERNATIVES.get(".".join(keys))) and other not in names:
            _remove(data, other.split("."))
        if _put(data, keys, read):
            # The section may have a short form, such as a string.
            with suppress(ValueError, KeyError):
                data[keys[0]] = section_record(type(config), keys[0], data[keys[0]])
            if hurdle := _put(data, keys, read):
                raise ValueError(f"override {text!r}: {hurdle}, which has no fields")
        try:
            config = from_record(type(config), data, name="the config", hints=remedies())
            failures.append("")
        except ValueError as error:
            failures.append(str(error))
    if failures and failures[-1]:
        guilty = texts[failures.index(failures[-1])]
        raise ValueError(f"override {guilty!r}: {failures[-1]}")
    return config


def _remove(data: dict[str, Any], keys: Sequence[str]) -> None:
    at: Any = data
    for key in keys[:-1]:
        at = at.get(key)
        if not isinstance(at, dict):
            return
    at.pop(keys[-1], None)


def _put(data: dict[str, Any], keys: Sequence[str], value: object) -> str:
    """Set data[keys[0]][keys[1]]...; return "", or the reason if this is impossible, such as "steps is 6"."""
    at = data
    for i, key in enumerate(keys[:-1]):
        inner = at.get(key)
        if not isinstance(inner, (Mapping, NoneType)):
            return f"{'.'.join(keys[: i + 1])} is {inner!r}"
        at[key] = dict(inner or {})
        at = at[key]
    at[keys[-1]] = value
    return ""


def _value(text: str, value: str) -> object:
    try:
        return parse_yaml(value)
    except ValueError as error:
        raise ValueError(f"override {text!r}: the value is {error}") from None


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value
