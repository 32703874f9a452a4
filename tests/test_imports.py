"""Imports go one way: up the table of docs/map.md, never in a circle, whether of folders or of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.import_statements import import_statements

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hydragraph"
MAP = (ROOT / "docs" / "map.md").read_text()


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports, wherever in the file that stands."""
    names = {name_of(path): path for path in PACKAGE.rglob("*.py")}

    def imported(module: str) -> Iterator[str]:
        for node in import_statements(names[module]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in names)
            elif node.module in names:
                inside = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from (each if each in names else str(node.module) for each in inside)

    return {module: set(imported(module)) - {module} for module in names}


def rows() -> list[list[str]]:
    """Return what each row of the table names: folders ("ir/") and files ("errors")."""
    table = MAP.partition("## The folders")[2].partition("\n## ")[0]
    return [re.findall(r"`([\w/]+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]


def house(module: str) -> str:
    """Return what the table calls the place of a module: its folder, or a file of its own."""
    parts = module.split(".")
    if len(parts) == 1:
        return "__init__"
    return f"{parts[1]}/" if len(parts) > 2 or (PACKAGE / parts[1]).is_dir() else parts[1]


def test_every_module_stands_in_the_table_once() -> None:
    named = [name for row in rows() for name in row]
    assert sorted(named) == sorted({house(module) for module in imports()})


def test_no_import_goes_down_the_table() -> None:
    level = {name: i for i, row in enumerate(rows()) for name in row}
    wrong = [
        f"{module} imports {other}: move what it needs to a row above `{house(module)}` in docs/map.md, or the row"
        for module, others in sorted(imports().items())
        for other in sorted(others)
        if house(other) != "__init__" and level.get(house(other), 0) > level.get(house(module), len(level))
    ]
    assert not wrong, "\n".join(wrong)


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other() -> None:
    assert not (found := circle(imports())), " -> ".join(found)


def test_no_folders_import_each_other() -> None:
    """Also folders of folders: `checkpoint/weights` and its like."""
    graph: dict[str, set[str]] = {}
    for module, others in imports().items():
        here = str(Path(*module.split(".")).parent)
        graph.setdefault(here, set())
        for other in others - {"hydragraph"}:  # whose `__init__` imports no folder
            there = str(Path(*other.split(".")).parent)
            # A folder and those below it are one house.
            if not (there.startswith(here) or here.startswith(there)):
                graph[here].add(there)
    assert not (found := circle(graph)), " -> ".join(found)


def test_every_file_that_the_map_names_exists() -> None:
    named = set(re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|pyi|md))`", MAP))
    missing = [name for name in named if not any((base / name).exists() for base in (PACKAGE, ROOT))]
    assert not missing, f"docs/map.md names what does not exist: {', '.join(sorted(missing))}"
    assert len(named) > 50


@pytest.mark.parametrize(
    ("house_", "never", "why"),
    [
        ("spec", "torch.distributed", "it is plain data"),
        ("ir", "torch.distributed", "it is plain data"),
        ("planner", "torch.distributed", "a plan is made without a process group"),
        ("data", "hydragraph.runtime", "it knows files and tokens only"),
    ],
)
def test_some_houses_never_see_some_modules(house_: str, never: str, why: str) -> None:
    for path in (PACKAGE / house_).rglob("*.py"):
        names = {n.module or "" for n in import_statements(path) if isinstance(n, ast.ImportFrom)}
        names |= {a.name for n in import_statements(path) if isinstance(n, ast.Import) for a in n.names}
        assert not any(f"{name}.".startswith(f"{never}.") for name in names), f"{path} imports {never}: {why}"
