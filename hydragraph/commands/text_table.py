"""Tables for terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.markup import escape
from rich.table import Table


def new_table(title: str, headings: Sequence[str], left: Collection[str] = ("strategy",)) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for heading in headings:
        table.add_column(escape(heading), justify="left" if heading in left else "right", overflow="fold")
    return table
