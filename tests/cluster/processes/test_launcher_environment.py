"""A launcher's variables that are wrong are named, with what to set."""

from __future__ import annotations

import pytest

from hydragraph.cluster.launch import join
from hydragraph.cluster.processes.launcher_environment import check_environment
from hydragraph.cluster.processes.rendezvous_stores import listening
from tests.commands.tiny import run


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc': set it to a whole number of at least 0, or unset it"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is '': set it"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999: set it to a port below 65536"),
        ({"RANK": "x"}, "RANK is 'x': set it"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1': set it"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0': set it to a whole number of at least 1"),
        ({"RANK": "5"}, "RANK is 5, but WORLD_SIZE is 2: number the processes from 0 to 1"),
        ({}, "MASTER_ADDR is not set: set it to the address of rank 0's machine"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        join("cpu")
    if variables:
        told = run("train", "none.yaml")
        assert (told.exit_code, sentence in told.stderr) == (2, True), told.stderr


def test_a_single_rank_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    check_environment({})
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (join("cpu").rank, join("cpu").ranks) == (0, 1)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            ValueError, match=f"port {port} is in use on this machine.*: set MASTER_PORT to a free port"
        ):
            join("cpu")


def test_an_address_that_cannot_be_resolved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29700"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'nowhere.invalid', which this machine cannot resolve"):
        join("cpu")
