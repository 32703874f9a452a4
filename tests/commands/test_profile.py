"""The command `profile`: its file loads, its table shows every scheme, and mistakes are sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner, Result

import hydragraph as hg
from hydragraph import cli
from hydragraph.commands import profile as command
from hydragraph.cost.block_pieces import Constants
from hydragraph.cost.measured_profile import Profile
from hydragraph.runtime import profile_measurement
from hydragraph.runtime.deterministic_sums import Deterministic
from hydragraph.runtime.profile_measurement import MeasuredModel, MeasureSettings
from hydragraph.spec.stage_kind import StageKind
from tests.train.plain import settings


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["profile", *(str(argument) for argument in arguments)])


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**settings(folder), **changes}))
    return file


def test_help_teaches_with_an_example() -> None:
    shown = " ".join(run("--help").stdout.split())
    assert "hydragraph profile examples/demo.yaml --schemes" in shown


def test_a_model_is_measured_and_its_strategies_can_be_priced(tmp_path: Path) -> None:
    config = write(tmp_path, strategies=["<tp1,pp1>", "<[0]x2r>"])
    out = tmp_path / "p.json"
    result = run(config, "--out", out, "--schemes", "tp1pp1,tp1pp2", "--repeats", 2, "--longest", 256)
    assert result.exit_code in (0, 1), result.output  # 1: this machine is so busy that no fit is any good
    profile = hg.Profile.load(out)
    assert {*profile.schemes, *profile.failed} == {(1, 1), (1, 2)}
    assert {*profile.pieces, *profile.unfit} == {StageKind(1), StageKind(1, False, True)}
    assert all(f"<tp1,pp{pp}>" in result.stdout for pp in (1, 2))
    assert "note: no message was measured, because a single rank has no links" in result.stdout
    assert result.exit_code == int(not profile.schemes)


def test_the_blocks_of_adapters_are_measured_and_automatic_strategies_are_left_to_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[MeasureSettings, bool]] = []

    def measure(subject: MeasuredModel, settings: MeasureSettings, *_: object) -> Profile:
        measured.append((settings, all(p.trainable for p in subject.program.parameters.values())))
        return Profile(
            "here", {(1, 1): Constants(2e-9, 3e-6, 4e-3)}, {1: 96}, limits={(1, 1): 9}, residuals={(1, 1): 0.05}
        )

    monkeypatch.setattr(profile_measurement, "measure", measure)
    result = run(write(tmp_path, strategies="auto", adapter={"lora": {}}), "--out", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    assert [(settings.every_kind, full) for settings, full in measured] == [((StageKind(1),), False)]


def test_a_deterministic_config_is_measured_as_it_trains(tmp_path: Path) -> None:
    seen = []
    with mock.patch.object(Deterministic, "begin") as begins:

        def measured(subject: MeasuredModel, *_: object) -> Profile:
            seen.append((subject.backend, begins.call_count))
            return Profile("none", {}, {})

        with mock.patch.object(profile_measurement, "measure", measured):
            run(write(tmp_path, deterministic=True), "--out", tmp_path / "p.json")
    assert seen == [("eager", 1)]


def test_what_failed_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Profile("here", {(1, 1): Constants(2e-9, 3e-6, 4e-3)}, {1: 96}, limits={(1, 1): 12345}, notes=("a hint",))
    found = replace(good, failed={(2, 1): "all noise"}, residuals={(1, 1): 0.05}, unfit={StageKind(2, True): "no"})
    monkeypatch.setattr(command, "profile_rank", lambda *_: (found, 1))
    result = run(write(tmp_path), "--out", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.replace("│", " ").split())
    assert "<tp1,pp1> 2 3 4 5.0% 12,345 96" in shown
    assert "FAILED <tp2,pp1>: all noise" in shown
    assert "FAILED stages of kind tp2s: no" in shown
    assert "note: a hint" in shown
    assert Profile.load(tmp_path / "p.json") == found
    monkeypatch.setattr(command, "profile_rank", lambda *_: (Profile("none", {}, {}, failed={(1, 1): "x"}), 1))
    assert run(write(tmp_path), "--out", tmp_path / "p.json").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--schemes", "tp1"), "--schemes 'tp1': write schemes like tp1pp1,tp2pp4"),
        (("--schemes", "tp0pp1"), "--schemes 'tp0pp1'"),
        (("--schemes", "tp4pp1"), "scheme tp4pp1 needs 4 ranks for one stage, but there are 1"),
        (("--out", "nowhere/p.json"), "in the folder nowhere, which does not exist"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = run(write(tmp_path), *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""
