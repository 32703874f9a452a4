"""What the documentation says can be done: blocks run or are read, commands have their options, links lead on."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hydragraph.cli import app
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.record import from_record
from hydragraph.spec.strategy import Strategy
from hydragraph.train.config import TrainConfig
from tests.documented import PAGES, ROOT, Block, blocks, commands, follow
from tests.thorough import thorough

LANGUAGES = ("", "bash", "json", "python", "text", "yaml")
ALL = [block for page in PAGES for block in blocks(page)]
# The shortest config: what a page shows a part of is read with it.
LEAST = {
    "model": {"architecture": "LlamaForCausalLM"},
    "data": {"paths": ["python-stdlib"]},
    "strategies": ["<tp1,pp1>"],
    "steps": 1,
}
RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in ALL if block.language in languages]


def test_a_block_says_what_it_is() -> None:
    wrong = [block.place for block in ALL if block.language not in LANGUAGES]
    assert not wrong, f"{', '.join(wrong)}: use one of {', '.join(LANGUAGES)}"


@pytest.mark.parametrize("block", of("python"))
def test_python_is_python(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", of("json"))
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_what_hydragraph_reads(block: Block, tmp_path: Path) -> None:
    """A config or a part of one, a strategy, a cluster: with existing fields and valid values."""
    content = yaml.safe_load(block.text)
    assert isinstance(content, Mapping)
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    if "pipelines" in content:
        Strategy.load(str(path))
    elif {"nodes", "types", "devices"} & content.keys():
        Cluster.load(path)
    else:
        from_record(TrainConfig, {**LEAST, **content})


@pytest.mark.parametrize("block", of("bash"))
def test_commands_have_these_options(block: Block) -> None:
    for line in commands(block):
        for words in simple_commands(line):
            verb = next((i for i, word in enumerate(words) if word in ("hydragraph", "hydragraph.cli")), None)
            if verb is not None and words[0] in ("hydragraph", "torchrun"):
                check_options(block, words[verb + 1 :])


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line, which `&&`, `;` and `|` part."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("&;|<>"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def check_options(block: Block, arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = typer.Context(command)
    while arguments and hasattr(command, "commands") and not arguments[0].startswith("-"):
        assert arguments[0] in command.commands, f"{block.place}: there is no `hydragraph {arguments[0]}`"
        command = command.commands[arguments.pop(0)]
        context = typer.Context(command, parent=context)
    command.make_parser(context).parse_args(args=arguments)  # raises NoSuchOption


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: there is no {target}"


@thorough
@pytest.mark.parametrize("page", [page for page in RUNNING if page != "README.md"])
def test_a_page_can_be_followed(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path)


def test_every_page_is_in_the_sites_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    missing = [page for page in PAGES if page.startswith("docs/") and f" {page.removeprefix('docs/')}\n" not in text]
    assert not missing, f"name {', '.join(missing)} in mkdocs.yml"


def test_troubleshooting_quotes_what_errors_say() -> None:
    """Each heading below a part of the page is found in the source, so that a search for an error's text finds it."""
    code = "".join(p.read_text() for p in (ROOT / "hydragraph").rglob("*.py"))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", code)  # a sentence over several lines
    quoted = re.findall(r"^### (.+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 15
    assert not [text for text in quoted if text not in joined]


def test_links_of_the_site_are_relative_to_their_page() -> None:
    pytest.importorskip("mkdocs")
    site_links = runpy.run_path(str(ROOT / "docs" / "site.py"))["site_links"]
    for source, link, on_site in (
        ("docs/design/planner.md", "../measurements/planner.md#plans", "../measurements/planner.md#plans"),
        ("docs/design/planner.md", "../../README.md", "../index.md"),
        ("docs/measurements/elastic.md", "../pictures/everything.png", "../pictures/everything.png"),
        ("docs/costs.md", "design/planner.md", "design/planner.md"),
        ("README.md", "docs/choose.md#one-gpu", "choose.md#one-gpu"),
    ):
        assert site_links(f"see [it]({link})", source) == f"see [it]({on_site})"
    assert site_links("[it](../examples/demo.yaml)", "docs/costs.md") == "`examples/demo.yaml`"
