"""The table of trained families in docs/support.md says what happens: see `tests.frontend.trained`."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.frontend import trained
from tests.frontend.families import DOCS
from tests.thorough import only


@only("gemma4_text")
@pytest.mark.parametrize("family", ["gemma4_text", "llama"])
def test_a_family_is_trained_as_the_table_says(family: str) -> None:
    version, rows = trained.documented()
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, this is {transformers.__version__}")
    assert trained.row(family) == rows[family]


def test_nothing_in_the_table_is_wrong() -> None:
    _, rows = trained.documented()
    assert not [row for row in rows.values() if "WRONG" in row or "CRASH" in row]


def test_widely_used_families_are_listed_as_the_table_has_them() -> None:
    _, rows = trained.documented()
    section = DOCS.read_text().partition("## Widely used models")[2].partition("\n## ")[0]
    train, others = (set(re.findall(r"[a-z0-9_]+", part)) & rows.keys() for part in section.split("**Do not**"))
    assert (len(train), len(others)) == (28, 2)
    assert all(rows[family].endswith(" yes |") for family in train)
    assert not any(rows[family].endswith(" yes |") for family in others)
