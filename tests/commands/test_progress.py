"""Without a terminal, each activity of a command is shown when it begins, and repeated while it lasts."""

from __future__ import annotations

import time

import pytest

from hydragraph.commands import progress as module
from hydragraph.commands.progress import progress


def test_an_activity_is_shown_once_and_the_previous_one_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading") as say:
        assert say("compiling <[0]x2>") == "reading"
        assert say("reading") == "compiling <[0]x2>"
        assert say("compiling <[0]x2>") == "reading"
    assert capsys.readouterr().err == "reading\ncompiling <[0]x2>\n"


def test_a_long_activity_is_repeated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.01)
    lines: list[str] = []
    with progress("reading") as say:
        say("searching")
        while not any(line.startswith("searching (") for line in lines):
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
    assert lines[:2] == ["reading", "searching"]
    assert lines[-1].endswith(" s)")
