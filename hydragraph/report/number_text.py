"""Numbers and tables as text."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Columns in files
_WIDTH = 140


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'<' if i in left else '>'}{width}}}" for i, width in enumerate(widths)]
    return ["  ".join(form.format(cell) for form, cell in zip(forms, row, strict=True)).rstrip() for row in rows]


def counts_text(counts: Sequence[int], times: str = "*", comma: str = ",") -> str:
    """Format micro-batches: "4,2", "8*16"."""
    groups = ((count, len(list(group))) for count, group in groupby(counts))
    return comma.join(f"{n}{times}{count}" if n > 2 else comma.join([str(count)] * n) for count, n in groups)


def seconds_text(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{1e6 * seconds:.3g} us" if seconds else "0"


def bytes_text(count: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}B"
    return f"{count:.3g} B" if count else "0"
