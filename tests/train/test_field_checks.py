"""A field's error names the field, the value and what to give instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from hydragraph.train.config import TrainConfig
from hydragraph.train.field_checks import (
    check_choice,
    check_fraction,
    check_number,
    check_text,
    check_texts,
    check_whole,
)
from hydragraph.train.pieces_config import PiecesConfig


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: check_text("f", " "), "'f' is ' ': give a non-empty string"),
        (lambda: check_text("f", None), "'f' is None: give a non-empty string"),
        (lambda: check_texts("f", "a"), "'f' is 'a': give a list, as in f: [a]"),
        (lambda: check_texts("f", []), "'f' is []: give a list of at least one string"),
        (lambda: check_texts("f", ["a", 3]), "'f' is 3: give a non-empty string"),
        (lambda: check_choice("f", "c", ("a", "b")), "'f' is 'c': use 'a' or 'b'"),
        (lambda: check_whole("f", True, 1), "'f' is True: give a whole number of at least 1"),
        (lambda: check_whole("f", 2.0, 1), "'f' is 2.0: give a whole number of at least 1"),
        (lambda: check_number("f", float("inf")), "'f' is inf: give a number of at least 0"),
        (lambda: check_number("f", -0.5), "'f' is -0.5: give a number of at least 0"),
        (lambda: check_fraction("f", 1), "'f' is 1: give a number of at least 0 and below 1"),
        (lambda: check_fraction("f", 1.5, one=True), "'f' is 1.5: give a number of at least 0 and at most 1"),
    ],
)
def test_what_is_refused(check: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check()


def test_home_directories_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    assert check_text("f", "~/runs") == "/home/a/runs"
    assert check_texts("f", ["~/d", "d/~"]) == ("/home/a/d", "d/~")
    text = "{model: {path: ~/m}, data: {paths: [~/d], cache: ~/c}, strategies: [~/s.yaml], steps: 1, output: ~/o}"
    config = TrainConfig.parse(text)
    found = (config.model.path, config.data.paths[0], config.data.cache, config.strategies[0], config.output)
    assert found == tuple(f"/home/a/{name}" for name in ("m", "d", "c", "s.yaml", "o"))
    assert PiecesConfig(local="~/p").local == "~/p"


def test_what_passes() -> None:
    assert check_texts("f", ["a", "b"]) == ("a", "b")
    check_choice("f", "b", ("a", "b"))
    check_whole("f", 1, 1)
    check_number("f", 2.5, least=2)
    check_fraction("f", 1, one=True)
