"""Strategies in docstrings, such as <tp2,pp1>, are text and no HTML: an extension of griffe, which reads docstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_TAG = re.compile(r"<(?=[a-z\[\d])")


class Literal(griffe.Extension):
    """Escapes angle brackets outside of code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Escape those of one docstring."""
        if getattr(obj, "docstring", None) is not None:
            parts = obj.docstring.value.split("`")
            parts[::2] = [_TAG.sub("&lt;", part) for part in parts[::2]]
            obj.docstring.value = "`".join(parts)
