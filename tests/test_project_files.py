"""What stands beside the code is true: one version, a citation that can be read, hooks that run what make lint runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from hydragraph.version import __version__

ROOT = Path(__file__).parents[1]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_version_stands_in_one_place_of_the_code_and_the_citation_agrees() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hydragraph.version.__version__"}
    quoted = re.compile(rf"[\"']{re.escape(__version__)}[\"']")
    found = {p.relative_to(ROOT) for p in (ROOT / "hydragraph").rglob("*.py") if quoted.search(p.read_text())}
    assert found == {Path("hydragraph/version.py")}
    assert read("CITATION.cff")["version"] == __version__
    assert f"## {__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert {"message", "title", "authors", "type"} <= citation.keys()
    notes = [reference["notes"].split(":")[0].split(",")[0] for reference in citation["references"]]
    assert notes == ["Hydraulis", "Malleus", "AutoHet", "Metis"]
    for reference in citation["references"]:
        assert reference["type"] == "article"
        assert all(person.keys() == {"family-names", "given-names"} for person in reference["authors"])


def test_hooks_run_what_make_lint_runs() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    hooks = {hook["entry"].removesuffix(" --force-exclude") for hook in local["hooks"]}
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    commands = {line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in lint[1].splitlines()}
    assert hooks == commands


def test_issue_forms_ask_for_something() -> None:
    for form in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")):
        if form.name != "config.yml":
            content = read(str(form.relative_to(ROOT)))
            assert {"name", "description", "body"} <= content.keys(), form
            ids = [part["id"] for part in content["body"] if part["type"] != "markdown"]
            assert len(ids) == len(set(ids)) > 0, form


def test_the_glossary_explains_each_word_once() -> None:
    page = (ROOT / "docs/glossary.md").read_text()
    rows = re.findall(r"^\| ([^|\n]+) \| ([^|\n]+) \|[^|\n]*\|$", page, re.MULTILINE)
    words = [word.strip() for row in rows if row[0] not in ("word", "---") for word in row[0].split(",")]
    assert len(words) >= 90
    assert not sorted({word for word in words if words.count(word) > 1})


def test_what_a_run_says_is_in_its_page() -> None:
    """Each module of whose events the page speaks says something, at the level that it names."""
    page = (ROOT / "docs/logging.md").read_text()
    rows = re.findall(r"^\| .+ \| (`.+`) \| (info|debug) \|$", page, re.MULTILINE)
    assert len(rows) >= 12
    for names, level in rows:
        for name in re.findall(r"`([\w.]+)`", names):
            path = ROOT / "hydragraph" / Path(*name.split("."))
            texts = [p.read_text() for p in (path.with_suffix(".py"), *sorted(path.glob("*.py"))) if p.exists()]
            assert re.search(rf"(?i)\blog\.{level}\(|_log\.{level}\(", "\n".join(texts)), (name, level)


def test_benchmarks_find_their_imports_however_they_are_run() -> None:
    """`python benchmarks/x.py` puts only its folder on the path; one that imports its neighbours says where."""
    folder = "sys.path.insert(0, str(Path(__file__).parents[1]))"
    neighbours = re.compile(r"^ *(?:from|import) (?:tests|benchmarks)\b", re.MULTILINE)
    scripts = {p: p.read_text() for p in sorted((ROOT / "benchmarks").glob("*.py"))}
    importing = {path.name: found.start() for path, text in scripts.items() if (found := neighbours.search(text))}
    assert "elastic.py" in importing
    for name, place in importing.items():
        text = scripts[ROOT / "benchmarks" / name]
        told = text.find(folder)
        inside = text[place] == " "  # in a function that main() calls after it has said so
        assert told >= 0, name
        assert inside or told < place, f"benchmarks/{name} imports a neighbour before it says where"
