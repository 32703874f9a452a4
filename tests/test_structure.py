"""Limits that keep the package readable: short functions, files that fit one idea, one class for each name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hydragraph"
FUNCTION_LINES = 90
FILE_LINES = 700
PACKED = 0.01  # share of assignments of several values in one line
VAGUE = {"found", "given", "known", "wanted", "held", "taken", "made", "told", "each"}  # names that could hold anything
VAGUE_SHARE = 0.01  # of local names
COMMENTED = 0.03  # share of lines that are comments


@dataclass
class Contents:
    """What the modules of the package contain.

    Attributes:
        files, functions: lengths in lines.
        classes: name -> the files that define it.
        assigned: names that are assigned to.
        assignments: how many there are; packed: how many of them assign several values.
        comments: lines that hold only a comment.
    """

    files: dict[str, int] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    classes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    assigned: Counter[str] = field(default_factory=Counter)
    assignments: int = 0
    packed: int = 0
    comments: int = 0

    def add(self, path: str, node: ast.AST) -> None:
        match node:
            case ast.Name(ctx=ast.Store()):
                self.assigned[node.id] += 1
            case ast.Assign():
                self.assignments += 1
                self.packed += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[f"{path}:{node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
            case ast.ClassDef():
                self.classes[node.name].append(path)


@cache
def contents() -> Contents:
    """Read every module once, and keep none of the trees: they would slow down all that the process does later."""
    found = Contents()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, source = str(path.relative_to(PACKAGE)), path.read_text()
        found.files[name] = len(source.splitlines())
        found.comments += sum(line.lstrip().startswith("# ") for line in source.splitlines())
        for node in ast.walk(ast.parse(source)):
            found.add(name, node)
    return found


def test_functions_fit_a_screen() -> None:
    assert {name: length for name, length in contents().functions.items() if length > FUNCTION_LINES} == {}


def test_files_hold_one_idea() -> None:
    assert {path: length for path, length in contents().files.items() if length > FILE_LINES} == {}


def test_a_class_name_means_one_thing() -> None:
    assert {name: paths for name, paths in contents().classes.items() if len(paths) > 1} == {}


def test_assignments_are_not_packed() -> None:
    assert contents().packed <= PACKED * contents().assignments


def test_names_say_what_they_hold() -> None:
    names = contents().assigned
    assert sum(names[name] for name in VAGUE) <= VAGUE_SHARE * names.total()


def test_comments_explain_what_code_cannot_say() -> None:
    assert contents().comments >= COMMENTED * sum(contents().files.values())
