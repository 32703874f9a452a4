"""Guards plain English: documentation, docstrings, comments and messages contain few stilted constructions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.thorough import only

ROOT = Path(__file__).parents[1]
MOST = 1.5  # constructions per 1,000 words; the documentation of equinox, torchft and accelerate has 0 to 1
SHORTEST = 4  # words: shorter texts are names and labels

# What to avoid -> its pattern. A sentence can match and be fine, so a few matches are allowed; better reword it.
_OPENING = r"(?:^|(?<=[.:;!?] ))"
_QUESTION = r"(?! (?:is|are|was|if|does|do|can|happens|to|should)\b[^.]*\?)"
STILTED = {
    "a clause first ('What it holds is ...')": rf"{_OPENING}(?:What|Who|Which)(?:ever)?\b{_QUESTION}[^.?]{{3,}}",
    "a prepositional phrase first ('Of a plan, ...')": (
        rf"{_OPENING}(?:Of|Behind|Beside|(?:By|In|From) what) "
        r"(?:an?|the|what|those|these|several|all|two|such|one|its|each|every|data)\b"
    ),
    "'is no file' (write 'is not a file')": (
        r"\b(?:is|are|was|were) no (?!longer|more|less|matter|need|such|way|one|other|point|guarantee|good|exception|"
        r"different|better)\w+"
    ),
    "'nothing' or 'nobody' that acts": r"\b[Nn](?:othing|obody|one(?= (?:is|are|was|that)\b))\b(?! (?:else|to do))",
    "'that there is'": r"\bthat there (?:is|are|was|were|will)\b|\bas there (?:is|are)\b",
    "'is told', 'says of'": r"\b(?:is|are|was|were|be) told\b|\b(?:tells?|says?) of\b|\btold (?:from|of|apart)\b",
    "'goes by', 'goes on' (write 'uses', 'continues')": r"\b(?:go|goes) (?:by|on)\b|\b(?:going|went) on\b",
    "'behind' or 'beside' (write 'after', 'during')": (
        r"\b(?:behind|beside) (?:a|the|every|each|it|training|computation|them|one|steps?)\b"
    ),
    "'by which'": r"\b(?:by|of|from|with|under|behind|beside|after|before|at|over|through) which\b",
    "'who' or 'one's own' of anything": (
        r"\b[Ww]ho(?:ever)? (?:has|have|gets?|got|cannot|can|wants?|asks?|needs?|owns?|holds?)\b"
        r"|\bone's own\b|\bof one's\b"
    ),
    "'what is there'": r"\b(?:that|what|it|which) is there\b|\bis there already\b|\bare there\b(?=[.,;)])",
    "'so many steps'": (
        r"\bso (?:many|much) (?:times|tokens|seconds|bytes|devices|ranks|steps|sequences|updates|micro)"
    ),
    "', too' or ', also where'": r"\w, too[.,;:)]|, also (?:where|when|if|of|in|amid|those|with)\b",
    "idioms ('for good', 'amid')": r"\b(?:in peace|of the day|thought better|for good|as it stands|amid)\b",
    "old words ('hence', 'lacks')": r"\b(?:lacks?|surely|thereby|wherein|hence|thereof)\b",
}
PATTERNS = {construction: re.compile(pattern) for construction, pattern in STILTED.items()}


def in_markdown(source: str) -> Iterator[str]:
    """Yield the paragraphs, list items and table cells of a Markdown text, without code."""
    source = re.sub(r"```.*?```|<!--.*?-->", "", source, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.|#+|>|\|)\s)", source):
        text = re.sub(r"^\s*(?:[-*+]|\d+\.|#+|>)\s+", "", block)
        yield from text.strip().strip("|").split("|") if text.lstrip().startswith("|") else [text]


def in_python(source: str) -> Iterator[str]:
    """Yield the paragraphs of docstrings, the other strings and the comments of a Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for paragraph in re.split(r"\n\s*\n|\n(?=\s+\w+: )", node.value):
                yield re.sub(r"^\s*\w[\w, ]*: ", "", paragraph)
    yield from re.findall(r"(?:^|\s)# (.+)$", source, re.MULTILINE)


def prose(path: Path) -> Iterator[str]:
    """Yield the texts of a file that have at least SHORTEST words, each on one line, with code shown as X."""
    source = path.read_text()
    for text in in_markdown(source) if path.suffix == ".md" else in_python(source):
        words = re.sub(r"`[^`]*`", "X", text).split()
        if len(words) >= SHORTEST:
            yield " ".join(words)


def stilted(text: str) -> list[str]:
    """Return the constructions of a text that are to be avoided, in the order of `STILTED`."""
    return [construction for construction, pattern in PATTERNS.items() for _ in pattern.finditer(text)]


@pytest.mark.parametrize(
    "text", ["What it holds is a list.", "The path is no directory.", "Of a plan, the first rank."]
)
def test_a_stilted_sentence_is_found(text: str) -> None:
    assert len(stilted(text)) == 1


@pytest.mark.parametrize("text", ["It holds a list.", "What is a strategy?", "There is no need to wait."])
def test_a_plain_sentence_passes(text: str) -> None:
    assert stilted(text) == []


def test_code_is_not_prose(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("Text of `is no code` here.\n\n```\nThe path is no directory.\n```\n")
    (tmp_path / "module.py").write_text(
        '"""The first line."""\n\nnothing = f"the {nothing} is no file"  # Also a comment here\n'
    )
    assert list(prose(tmp_path / "page.md")) == ["Text of X here."]
    assert list(prose(tmp_path / "module.py")) == ["the X is no file", "Also a comment here"]


@only("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "hydragraph")
@pytest.mark.parametrize(
    "area", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "hydragraph", "tests", "benchmarks"]
)
def test_prose_is_plain_english(area: str) -> None:
    root = ROOT / area
    paths = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".md")) if root.is_dir() else [root]
    texts = [
        (path, text)
        for path in paths
        if "results" not in path.parts and path.name != "test_prose.py"
        for text in prose(path)
    ]
    found = [f"{path.relative_to(ROOT)}: {text[:100]!r}: {c}" for path, text in texts for c in stilted(text)]
    words = sum(len(text.split()) for _, text in texts)
    assert words > 500
    rate = 1000 * len(found) / words
    assert rate <= MOST, f"{rate:.1f} stilted constructions per 1,000 words; reword some of these:\n" + "\n".join(
        found[-40:]
    )
