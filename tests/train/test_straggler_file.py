"""Measurements of slow ranks outlive the rank that kept them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.train.run_folder import RunFolder
from hydragraph.train.straggler_file import read_slow, write_slow
from hydragraph.train.stragglers.straggler_state import SlowRank

RATES = st.floats(1.0, 1e6)
SLOW = st.builds(SlowRank, RATES, RATES, st.none() | st.tuples(RATES, RATES))

NULL = '{"began": 5.0, "members": {"1": {"device": null, "core": 1.0, "learned": null}}}'
SHORT = '{"began": 5.0, "members": {"1": {"device": 2.0, "core": 1.0, "learned": [2.0]}}}'


def begun(path: Path, began: float) -> RunFolder:
    path.mkdir(exist_ok=True)
    (path / "owner.json").write_text(json.dumps({"began": began}))
    return RunFolder(path)


@given(st.dictionaries(st.integers(0, 99), SLOW))
def test_what_is_written_is_read_by_the_same_run_only(
    tmp_path_factory: pytest.TempPathFactory, slow: dict[int, SlowRank]
) -> None:
    folder = begun(tmp_path_factory.mktemp("run"), 5.0)
    write_slow(folder, slow)
    assert read_slow(folder, folder.began) == slow
    assert read_slow(folder, None) == {}, "this process was not one of its ranks"
    assert read_slow(begun(folder.path, 6.0), 6.0) == {}, "it was resumed, with other members"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"began": 5.0}', '{"began": 5.0, "members": {"a": {}}}', NULL, SHORT]
)
def test_a_file_that_says_nothing_stops_nobody(tmp_path: Path, text: str) -> None:
    folder = begun(tmp_path, 5.0)
    assert read_slow(folder, 5.0) == {}
    folder.slow.write_text(text)
    assert read_slow(folder, 5.0) == {}
