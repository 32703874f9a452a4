"""Reader of JSON objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydragraph.errors import type_text


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}): {remedy}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: {type_text(data)}, not an object: {remedy}")
    return data
