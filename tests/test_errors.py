"""Errors say where, what and the fix, and survive the way from one process to another."""

from __future__ import annotations

import pickle
import socket

import pytest

from hydragraph.errors import RankFailure, Stopped, Unsupported, listed


def test_a_refusal_reads_as_where_what_and_the_remedy() -> None:
    error = Unsupported("dropout 0.1", where="layer.3", remedy="set it to 0")
    assert str(error) == "layer.3: dropout 0.1; set it to 0"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("host", "instruction", "sentence"),
    [
        ("", "", "rank 2 failed: OSError: no"),
        ("elsewhere", "", "rank 2 on elsewhere failed: OSError: no"),
        (socket.gethostname(), "forward layer.1 [0]", "rank 2 failed at `forward layer.1 [0]`: OSError: no"),
    ],
)
def test_a_failure_names_the_host_only_where_it_is_another(host: str, instruction: str, sentence: str) -> None:
    assert str(RankFailure(2, instruction, "OSError: no", host)) == sentence


@pytest.mark.parametrize(
    "error",
    [
        Unsupported("a", where="b", remedy="c"),
        RankFailure(3, "send h1.0", "killed", "elsewhere"),
        Stopped(15),
    ],
)
def test_errors_travel_between_processes_with_all_that_they_know(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 more"), (9, "0, 1, 2 and 6 more")]
)
def test_a_sentence_names_a_few_and_counts_the_others(count: int, text: str) -> None:
    assert listed([str(i) for i in range(count)]) == text
