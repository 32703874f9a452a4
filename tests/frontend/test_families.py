"""The table of model families in docs/support.md says what happens.

`HYDRAGRAPH_UPDATE_SUPPORT=1 pytest tests/frontend/test_families.py` writes it anew, for all families (some minutes).
"""

from __future__ import annotations

import os

import pytest
import transformers

from tests.frontend import families
from tests.thorough import only

UPDATE = "HYDRAGRAPH_UPDATE_SUPPORT"


def test_the_table_is_written_anew() -> None:
    if not os.environ.get(UPDATE):
        pytest.skip(f"the table is only written with {UPDATE}=1")
    families.update()


@only("bart")
@pytest.mark.parametrize("family", list(families.documented()[1]))
def test_a_family_is_what_the_table_says(family: str) -> None:
    version, rows = families.documented()
    if version != transformers.__version__:
        pytest.skip(
            f"the table is of transformers {version}, this is {transformers.__version__}; set {UPDATE}=1 to renew it"
        )
    assert families.examine(family).row() == rows[family]


def test_nothing_in_the_table_is_wrong() -> None:
    version, rows = families.documented()
    if version == transformers.__version__:  # others have other families
        assert set(rows) == set(families.NAMES)
    assert not [row for row in rows.values() if "WRONG" in row]
