"""A profile's fields as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import repeat
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydragraph.cost.block_pieces import Scheme
from hydragraph.cost.curves import Constants
from hydragraph.cost.published_memory import MemoryModel
from hydragraph.spec.stage_kind import StageKind

_hints_of = cache(get_type_hints)


def saved(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: saved(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_text(key): saved(entry) for key, entry in value.items()}
    return list(map(saved, value)) if isinstance(value, tuple) else value


def loaded(hint: Any, data: Any) -> Any:
    """Return a value of type `hint` from the JSON values of `saved`; older files have fewer fields."""
    parts = get_args(hint)
    origin = get_origin(hint)
    if data is None or not (parts or is_dataclass(hint)):
        return data
    if origin is UnionType:
        return loaded(parts[0], data)
    if origin is Mapping:
        read = _KEYS.get(parts[0], parts[0])
        return {read(key): loaded(parts[1], entry) for key, entry in data.items()}
    if origin is tuple:
        items = parts if parts[-1] is not Ellipsis else repeat(parts[0])
        return tuple(loaded(item, entry) for item, entry in zip(items, data, strict=False))
    types = _hints_of(hint)
    return hint(**{name: loaded(types[name], entry) for name, entry in data.items() if name in types})


def published(entry: Mapping[str, Any]) -> dict[str, Any]:
    schemes: dict[Scheme, Constants] = {}
    failed: dict[Scheme, str] = {}
    for row in entry["schemes"]:
        scheme = (int(row["tp"]), int(row["pp"]))
        k = Constants(row["a_ms_per_token2"] / 1e3, row["b_ms_per_token"] / 1e3, row["c_ms"] / 1e3)
        if k.failed:
            failed[scheme] = f"its fit failed (a = {k.a:g}, b = {k.b:g}, c = {k.c:g})"
        else:
            schemes[scheme] = k
    model = entry["model"]
    memory = entry["memory"]
    return {
        "name": str(entry["name"]),
        "schemes": schemes,
        "util": {int(tp): int(tokens) for tp, tokens in entry["util_len_tokens"].items()},
        "memory": MemoryModel(
            model["hidden"],
            model["layers"],
            model["vocab"],
            {int(tp): float(value) for tp, value in memory["activation_A"].items()},
            memory["states_B"],
            memory["alpha"],
            _gaps(memory["gap_bytes"], entry.get("gpus_per_node", 8)),
            memory["safety_margin_bytes"],
            memory["device_bytes"],
        ),
        "hetero_sync_s": entry.get("hetero_sync_ms", 0) / 1e3,
        "failed": failed,
    }


def _text(key: Any) -> Any:
    if isinstance(key, StageKind):
        return key.text
    return "tp{}pp{}".format(*key) if isinstance(key, tuple) else key


def _scheme(text: str) -> Scheme:
    tp, _, pp = text.removeprefix("tp").partition("pp")
    return int(tp), int(pp)


_KEYS = {Scheme: _scheme, StageKind: StageKind.parse}


def _gaps(by_name: Mapping[str, float], per_node: int) -> tuple[tuple[int, float], ...]:
    sizes = {per_node if name == "node" else int(name.removeprefix("gpu")): float(v) for name, v in by_name.items()}
    return tuple(sorted(sizes.items()))
