"""Import statements of source files, read once per process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return the import statements of a file, wherever in the file they are."""
    return tuple(_below(ast.parse(path.read_text())))


def _below(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Search statements only: expressions, which are most of a tree, contain none."""
    for name in _STATEMENTS:
        for child in getattr(node, name, ()):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child
            else:
                yield from _below(child)
