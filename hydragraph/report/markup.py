"""HTML from nested calls, which escape all content except `Markup`.

tag("p", "a < b", tag("b", "!"), class_="note")  ->  <p class="note">a &lt; b<b>!</b></p>
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from html import escape
from typing import Any, TypeAlias


class Markup(str):
    """HTML text, which is not escaped again."""

    __slots__ = ()


Content: TypeAlias = "Markup | str | int | float | Iterable[Content] | None"


def tag(name: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Args:
        content: contents of the element; lists are joined, and None is omitted.
        attributes: None and False omit an attribute. A name's trailing underscore (`class_`) is removed; other
            underscores become hyphens.
    """
    attribute_text = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{attribute_text}>{join(*content)}</{name}>")


def join(*content: Content) -> Markup:
    return Markup("".join(map(_text, content)))


def section(name: str, title: str, intro: str, *content: Content) -> Markup:
    return tag("section", tag("h2", title), tag("p", intro, class_="intro"), *content, id=name)


def table(heads: Sequence[str], rows: Content, left: Container[str] = (), style: str | None = None) -> Markup:
    """Return a table that scrolls if it is too wide.

    Args:
        rows: <tr> elements.
        style: CSS class; None for a table inside another element.
    """
    head = tag("tr", [tag("th", name, scope="col", class_="left" if name in left else None) for name in heads])
    element = tag("table", tag("thead", head), tag("tbody", rows), class_=style)
    return tag("div", element, class_="scroll", tabindex=None if style is None else 0)


def row(*cells: Content, left: Container[int] = (), class_: str | None = None) -> Markup:
    """Return a row; `left` contains the indices of left-aligned cells."""
    shown = [tag("td", cell, class_="left" if i in left else None) for i, cell in enumerate(cells)]
    return tag("tr", shown, class_=class_)


def script_data(record: Any) -> Markup:
    """Return JSON that cannot end a <script> element."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _text(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str | int | float):
        return escape(str(content), quote=True)
    return join(*content)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value), quote=True)}"'
