"""Version of this package, which pyproject.toml reads."""

from __future__ import annotations

__version__ = "0.2.0"
