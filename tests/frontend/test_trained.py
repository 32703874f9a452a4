"""The table of trained families in docs/support.md says what happens: see `tests.frontend.trained`."""

from __future__ import annotations

import pytest
import transformers

from tests.frontend import trained


@pytest.mark.parametrize("family", ["llama"])
def test_a_family_is_trained_as_the_table_says(family: str) -> None:
    version, rows = trained.documented()
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, this is {transformers.__version__}")
    assert trained.row(family) == rows[family]


def test_nothing_in_the_table_is_wrong() -> None:
    _, rows = trained.documented()
    assert not [row for row in rows.values() if "WRONG" in row or "CRASH" in row]
