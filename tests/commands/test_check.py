"""`hydragraph check`: what fits, what does not and why, and mistakes in sentences."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from hydragraph.commands.captured_model import run_assignment, step_lengths
from hydragraph.cost.published_errors import FLAT, MEMORY
from hydragraph.data import tokenizer
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy
from hydragraph.train.config import TrainConfig
from tests.commands.tiny import LOPSIDED, run, write
from tests.thorough import thorough


@thorough
def test_a_run_that_fits(tmp_path: Path) -> None:
    result = run("check", write(tmp_path, strategies=LOPSIDED, ranks=2))
    assert result.exit_code == 0, result.output
    assert "fits" in result.stdout
    assert "DOES NOT" not in result.stdout
    assert "with 'device: cpu', the step time on this machine is unknown" in result.stdout
    assert "unknown" in result.stdout
    asked = run("check", write(tmp_path, strategies=LOPSIDED, ranks=2), "--devices", 2)
    assert "computation is not measured: datasheet of the devices at up to 62%" in asked.stdout
    assert f"; {MEMORY}\n" in asked.stdout
    assert "for 2 H200s, not for this machine (device: cpu), because --cluster is not given" in asked.stdout


def test_a_run_that_does_not_fit_says_what_to_change(tmp_path: Path) -> None:
    config = write(tmp_path, strategies=["<tp1,pp1>"])
    enough = run("check", config, "--memory", "1e9", "--json")
    assert enough.exit_code == 0, enough.output
    (record,) = json.loads(enough.stdout)["strategies"]
    assert record["seconds"] is record["mfu"] is None  # the config's device is a CPU
    chosen = run("check", config, "--memory", "1e9", "--efficiency", "0.25")
    assert "datasheet of the devices at 25%" in chosen.stdout
    assert f"; {FLAT}; {MEMORY}\n" in chosen.stdout
    (record,) = json.loads(run("check", config, "--memory", "1e9", "--efficiency", "0.25", "--json").stdout)[
        "strategies"
    ]
    assert 0.01 < record["mfu"] < 0.25  # attention and products take their operations at a quarter of the peak
    little = run("check", config, "--memory", "2e5")
    assert little.exit_code == 1, little.output
    assert "DOES NOT FIT" in little.stdout
    assert "more ranks" in " ".join(little.stdout.split()) or "more" in little.stdout


def test_a_deterministic_run_is_checked_as_it_trains(tmp_path: Path) -> None:
    """It runs operator by operator, and each sequence by itself."""
    config = TrainConfig.load(write(tmp_path, deterministic=True, device="cuda"))
    assert config.backend == "eager"
    strategy = Strategy.parse("<tp1,pp1>", 2)
    with mock.patch("hydragraph.planner.quick_plan.assign", return_value=Assignment((((0, 1),),), (8, 9))):
        assert run_assignment(config, mock.Mock(), strategy, [8, 9], known=False).counts == (2,)


def test_a_step_has_no_more_tokens_than_a_mini_batch(tmp_path: Path) -> None:
    config = TrainConfig.load(write(tmp_path), ["data.tokens_per_step=90", "data.max_length=32"])
    lengths = step_lengths(config, None)
    step = run_assignment(config, mock.Mock(), Strategy.parse("<tp1,pp1>", 2), lengths, known=False)
    assert step.lengths == (32, 32, 26)


def test_gpus_of_an_architecture_are_predicted_without_one(tmp_path: Path) -> None:
    config = write(tmp_path, strategies=["<tp1,pp1>"])
    result = run("check", config, "--arch", "sm_90", "--devices", "1")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "85.9 GB" in text  # 80 GiB
    assert "kernel launches are predicted to take 9" in text  # a tiny model hardly computes
    assert "more than half for fewer than about" in text
    (record,) = json.loads(run("check", config, "--arch", "sm_80", "--json").stdout)["strategies"]
    assert 0.9 < record["launches"] < 1
    at_one_rate = run("check", config, "--arch", "sm_80", "--efficiency", "0.4")
    assert "launches" not in at_one_rate.stdout
    both = run("check", config, "--arch", "sm_80", "--profile", "p.json")
    assert "--profile uses measured seconds and --arch uses a datasheet" in " ".join(both.stderr.split())
    unknown = run("check", config, "--arch", "sm_70")
    assert unknown.exit_code == 2
    assert "--arch sm_70: use sm_80, sm_90, sm_100" in " ".join(unknown.stderr.split())


def test_what_training_would_refuse_is_refused_and_data_that_are_elsewhere_are_named(tmp_path: Path) -> None:
    refused = run("check", write(tmp_path), "--set", "callbacks=[nowhere:x]")
    assert refused.exit_code == 2
    assert "callbacks: 'nowhere:x' cannot be loaded" in refused.stderr
    elsewhere = run("check", write(tmp_path), "--set", "data.paths=[/nowhere]")
    assert elsewhere.exit_code == 1, elsewhere.output
    assert "data: training on this machine would fail: " in elsewhere.stderr
    assert "/nowhere" in elsewhere.stderr
    pairs = run("check", write(tmp_path), "--set", "data.paths=[/nowhere]", "--set", "objective=simpo")
    assert pairs.exit_code == 1, pairs.output
    assert "each step begins with a forward pass that scores the answers" in pairs.stdout


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train_bpe(["zzzz"], 260), tmp_path / "tokenizer")
    config = write(tmp_path)
    given = ("--set", f"data.tokenizer={tmp_path / 'tokenizer'}", "--set")
    refused = run("check", config, *given, "model.config.vocab_size=200")
    size = tokenizer.load(tmp_path / "tokenizer").get_vocab_size()
    assert refused.exit_code == 2, refused.output
    assert f"model.config.vocab_size is 200, but the tokenizer's ids need {size}" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--cluster", "c.yaml", "--memory", "5e9"), "give one of them"),
        (("--strategy", "<tp1"), "strategies[0]: strategy text"),
        (("--lengths", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = run("check", write(tmp_path), *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_of_auto_plain_data_parallelism_is_checked(tmp_path: Path) -> None:
    done = run("check", write(tmp_path, strategies="auto", ranks=2, elastic={"replan": True}))
    assert done.exit_code == 0, done.output
    assert "'strategies: auto' is resolved only when training starts" in done.stderr
    assert "2*<tp1,pp1>" in done.stdout
