"""Whatever stands at whatever key of a config: it is taken, or refused in a sentence that names the key."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from tests.thorough import first
from tests.train.config_schema import _sections
from tests.train.plain import settings

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 10**30, -0.5, 1.5, math.nan, math.inf, -math.inf),
    *("", "ünï 🦎", "12", "\x00", " ", [], [[]], [None], [1, "a"], ["a", "a"], {}, {"a": 1}, {1: 2}, {"a": {"b": []}}),
]
KEYS = [(path, field.name) for path, cls in _sections("", TrainConfig) for field in fields(cls)]


def placed(folder: Path, path: str, name: str, value: Any) -> dict[str, Any]:
    data = settings(folder)
    at: Any = data
    for part in path.split(".") if path else ():
        if part.endswith("[]"):
            at.pop("paths", None)
            at = at.setdefault(part[:-2], [{"paths": ["texts"]}])[0]
        else:
            at = at.setdefault(part, {"paths": ["texts"]} if part == "NAME" else {})
    at[name] = value
    return data


# Every fifth key always: some of every section.
@pytest.mark.parametrize(("path", "name"), first(KEYS[::5], KEYS), ids=[f"{p}.{n}".lstrip(".") for p, n in KEYS])
def test_any_value_is_taken_or_refused_by_name(path: str, name: str, tmp_path: Path) -> None:
    section = path.replace("[]", "").replace("NAME", "").strip(".").rpartition(".")[2] or name
    for value in VALUES:
        sentence, config = outcome(placed(tmp_path, path, name, value))
        assert config is not None or name in sentence or section in sentence, f"{value!r}: {sentence}"
        assert "\n" not in sentence, f"{value!r} is refused in one line"
        if config is not None:
            config.save(tmp_path / "saved.yaml")
            assert TrainConfig.load(tmp_path / "saved.yaml") == config, f"{value!r} is saved and read back"


def outcome(data: dict[str, Any]) -> tuple[str, TrainConfig | None]:
    """Return what is refused, or the config."""
    try:
        return "", from_record(TrainConfig, data)
    except ValueError as error:
        return str(error), None
