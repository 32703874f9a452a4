"""Markup: what a text says never becomes part of the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from hydragraph.report.markup import Markup, join, script_data, tag


class Reader(HTMLParser):
    """The page as a browser parses it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_elements_and_attributes() -> None:
    made = tag("p", "a < b", tag("b", 3), None, ["x", "y"], class_="note", data_kind="p2p", hidden=True, id=None)
    assert made == '<p class="note" data-kind="p2p" hidden>a &lt; b<b>3</b>xy</p>'
    assert join("&", Markup("&amp;")) == "&amp;&amp;"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # hypothesis takes seconds for those of a codec


@given(TEXTS, TEXTS)
def test_texts_stay_texts(text: str, value: str) -> None:
    read = Reader(tag("p", text, title=value))
    assert [name for name, _ in read.tags] == ["p"]
    clean = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" not in text + value:
        assert read.text.replace("\r\n", "\n").replace("\r", "\n") == clean
        assert read.tags[0][1] == {"title": value}


@given(st.recursive(TEXTS | st.integers() | st.booleans(), st.lists))
def test_data_cannot_end_its_script(record: object) -> None:
    made = script_data(record)
    assert not set("<>&\u2028\u2029") & set(made)
    assert json.loads(made) == record
