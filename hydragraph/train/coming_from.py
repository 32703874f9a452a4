"""Replacements for other frameworks' config fields (`coming_from.md`)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

# docs/coming_from.md ends with a copy of TABLES
TABLES = Path(__file__).with_suffix(".md")


@cache
def remedies() -> dict[str, str]:
    by_field: dict[str, str] = {}
    for fields, sentence in re.findall(r"^\| (`.+?) \| (.+) \|$", TABLES.read_text(encoding="utf-8"), re.MULTILINE):
        use = "use " if sentence.startswith("`") else ""
        for name in re.findall(r"`(\w+)`", fields):
            by_field.setdefault(name, f"{use}{sentence.replace('`', '')} (docs/coming_from.md)")
    return by_field
