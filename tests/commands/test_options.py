"""What several verbs are given: counts of micro-batches, and strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydragraph.commands.check import CheckOptions
from hydragraph.commands.compile import CompileOptions
from hydragraph.commands.options import (
    check_read,
    check_written,
    chosen_strategies,
    on_planned_devices,
    read_counts,
    with_strategies,
)
from hydragraph.train.config import TrainConfig
from tests.commands.tiny import run, write


@pytest.mark.parametrize(
    ("text", "pipelines", "counts"), [("4", 1, [4]), ("4", 3, [4, 4, 4]), ("4, 2", 2, [4, 2]), ("0,3", 2, [0, 3])]
)
def test_one_number_is_for_all_pipelines(text: str, pipelines: int, counts: list[int]) -> None:
    assert read_counts(text, pipelines) == counts


@pytest.mark.parametrize("text", ["", "4,", "-1", "1.5", "4,2,1", "many"])
def test_other_counts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"give one number(, or one for each pipeline, such as 4,2| for all pipelines, or one for each)",
    ):
        read_counts(text, 2)


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(ValueError, match="--micro-batches '0': no pipeline would compute: give at least one"):
        read_counts("0", 2)


def test_what_is_given_replaces_the_configs_strategies_and_auto_needs_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chosen_strategies(["<tp2>"], ["<tp1>"]) == ("<tp2>",)
    assert chosen_strategies(None, ["<tp1>"]) == ("<tp1>",)
    with pytest.raises(ValueError, match="pass strategies with --strategy"):
        chosen_strategies(None, ["auto"])
    with pytest.raises(ValueError, match="pass strategies with --strategy"):
        chosen_strategies(["auto"], ["<tp1>"], 2)
    assert chosen_strategies(None, ["auto"], 2) == ("2*<tp1,pp1>",)
    assert "this command uses plain data parallelism instead" in capsys.readouterr().err


@pytest.mark.parametrize("elastic", [{"replan": True}, {"dry_run": True}])
def test_strategies_replace_auto_in_a_config_that_replans(tmp_path: Path, elastic: dict[str, bool]) -> None:
    path = write(tmp_path, strategies="auto", ranks=2, elastic=elastic)
    assert with_strategies(TrainConfig.load(path), None, 2).strategies == ("2*<tp1,pp1>",)
    assert not with_strategies(TrainConfig.load(path), ["2*<tp1,pp1>"]).plan.choose
    options = CompileOptions(config=path, strategies=["<tp1>"], output=tmp_path / "compiled")
    assert options.load().strategies == ("<tp1>",)


def test_where_a_file_cannot_be_written_is_told_before_it_is_filled(tmp_path: Path) -> None:
    check_written("--output", None)
    check_written("--output", tmp_path / "new.html")
    with pytest.raises(ValueError, match=r"--output .*new.html is in the folder .*none, which does not exist"):
        check_written("--output", tmp_path / "none" / "new.html")
    with pytest.raises(ValueError, match=r"--output .* is a directory: name the file to write"):
        check_written("--output", tmp_path)


@pytest.mark.parametrize(
    "given", [{"config": "./run.yaml"}, {"model": Path("run.yaml")}, {"profile": ["a", "run.yaml"]}]
)
@pytest.mark.parametrize("option", ["output", "trace"])
def test_a_command_does_not_replace_what_it_reads(
    given: dict[str, Any], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "plan-cluster.yaml"):
        Path(name).write_text("mine")
    check_read({**given, option: Path("new.yaml")})
    with pytest.raises(ValueError, match=rf"--{option} run.yaml would replace a file that the command reads"):
        check_read({**given, option: tmp_path.relative_to(tmp_path) / "run.yaml"})
    told = run("simulate", "run.yaml", "--trace", "run.yaml")
    assert told.exit_code == 2
    rented = ("--budget", "9", "--price", "h200=3")
    told = run("plan", "--cluster", "plan-cluster.yaml", "--model", "run.yaml", "--output", "plan.yaml", *rented)
    assert "plan-cluster.yaml would replace a file that the command reads" in " ".join(told.output.split())
    assert Path("run.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "cluster", "profile"),
    [
        ({}, "c.yaml", "p.json"),
        ({"efficiency": 0.5}, "c.yaml", None),
        ({"profile": "own.json"}, "c.yaml", "own.json"),
        ({"cluster": Path("own.yaml")}, "own.yaml", None),
        ({"devices": 4}, None, None),
        ({"arch": "sm_90"}, None, None),
        ({"memory": 8e9}, None, None),
    ],
)
def test_devices_are_those_of_the_plan_unless_the_command_line_names_others(
    options: dict[str, Any], cluster: str | None, profile: str | None, tmp_path: Path
) -> None:
    run = TrainConfig.load(write(tmp_path), ["plan={choose: true, cluster: c.yaml, profile: p.json}"])
    found = on_planned_devices(CheckOptions(config=tmp_path, **options), run)
    assert (found.cluster and str(found.cluster), found.profile) == (cluster, profile)
    alone = TrainConfig.load(write(tmp_path), ["plan={choose: true, profile: p.json}"])  # may not be of H200s
    assert on_planned_devices(CheckOptions(config=tmp_path), alone).profile == alone.plan.profile


def test_a_file_that_may_not_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_written("--output", tmp_path / "plan.yaml")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"--output .*plan.yaml: you do not have permission to write this file"):
        check_written("--output", tmp_path / "plan.yaml")
