"""Limits that keep the package readable: short functions, files that fit one idea, one class for each name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hydragraph"
FUNCTION_LINES = 90
FILE_LINES = 700
PACKED = 0.01  # share of assignments of several values in one line
VAGUE = {"found", "given", "known", "wanted", "held", "taken", "made", "told", "each"}  # names that could hold anything
VAGUE_SHARE = 0.01  # of local names


@cache
def trees() -> dict[str, ast.Module]:
    """Return every module of the package, by its path."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            yield path, node


def test_functions_fit_a_screen() -> None:
    lengths = {
        f"{path}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_files_hold_one_idea() -> None:
    lengths = {path: len((PACKAGE / path).read_text().splitlines()) for path in trees()}
    assert {path: length for path, length in lengths.items() if length > FILE_LINES} == {}


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_assignments_are_not_packed() -> None:
    targets = [(node.targets[0], node.value) for _, node in nodes() if isinstance(node, ast.Assign)]
    packed = [pair for pair in targets if all(isinstance(side, ast.Tuple) for side in pair)]
    assert len(packed) <= PACKED * len(targets)


def test_names_say_what_they_hold() -> None:
    names = [node.id for _, node in nodes() if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    assert sum(name in VAGUE for name in names) <= VAGUE_SHARE * len(names)
