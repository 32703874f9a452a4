"""`hydragraph plan`: what it reads, prints and draws, and that a mistake is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hydragraph import cli
from hydragraph.data.token_file import write_tokens
from hydragraph.data.tokenizer import train_bpe
from hydragraph.train.plan_input import read_candidates, read_lengths
from tests.planner.examples import ENTRY, PROFILE, lengths

SIZES = lengths(400, 0, 6000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "constants.json").write_text(json.dumps({"profiles": [ENTRY]}))
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, SIZES)) + "\n")
    PROFILE.save(tmp_path / "profile.json")
    return tmp_path


def plan(folder: Path, *more: object, profile: str = "profile.json", data: str = "lengths.txt") -> Result:
    given = ["--profile", str(folder / profile), "--lengths", str(folder / data), "--devices", "8", "--context", "6000"]
    return CliRunner().invoke(cli.app, ["plan", *given, "--tokens", "20000", "--iterations", "1", *map(str, more)])


def test_text_json_and_picture_agree(folder: Path) -> None:
    text = plan(folder)
    assert text.exit_code == 0, text.output
    assert "best for all mini-batches: " in text.stdout
    found = plan(folder, "--json", "--picture", folder / "plan.png")
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert f"best for all mini-batches: {record['candidates'][0]['text']}, " in text.stdout
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.partial"))


def test_an_entry_of_constants_is_the_same_profile(folder: Path) -> None:
    assert plan(folder, profile="constants.json#made up").stdout == plan(folder).stdout


def test_explain_shows_all_candidates(folder: Path) -> None:
    shown = plan(folder, "--explain").stdout
    assert "seconds go to" in shown
    assert "left out <tp16,pp1>: its fit failed" in shown
    for candidate in json.loads(plan(folder, "--json").stdout)["candidates"]:
        assert candidate["text"] in shown


def test_own_strategies(folder: Path) -> None:
    record = json.loads(plan(folder, "--strategy", "<tp4,pp2>", "--strategy", "2*<tp4,pp1>", "--json").stdout)
    assert sorted(c["text"] for c in record["candidates"]) == ["2*<tp4,pp1>", "<tp4,pp2>"]
    assert read_candidates(["<tp4,pp1> + 2*<tp1,pp2>"]) == [[(4, 1), (1, 2), (1, 2)]]


def test_lengths_come_from_text_or_from_a_token_file(folder: Path) -> None:
    assert read_lengths(folder / "lengths.txt") == SIZES
    texts = ["one", "one two three", "one two"]
    file = write_tokens(folder / "tokens.bin", texts, train_bpe(texts, 300))
    assert read_lengths(folder / "tokens.bin") == file.lengths.tolist()
    (folder / "tokens.bin").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_lengths(folder / "tokens.bin")


@pytest.mark.parametrize(
    ("options", "changed", "sentence"),
    [
        ((), {"profile": "constants.json"}, "constants.json#made up"),
        ((), {"profile": "lengths.txt"}, "no JSON"),
        ((), {"profile": "nowhere.json"}, "nowhere.json"),
        ((), {"data": "constants.json"}, "is no number of tokens; write one length per line"),
        (("--strategy", "<tp4"), {}, "--strategy 0:"),
        (("--strategy", "<[0,1]x4,[2]x4>"), {}, "write pipelines as <tp4,pp2>"),
        (("--strategy", "<tp3,pp1>"), {}, "scheme <tp3,pp1>: it was not measured"),
        (("--strategy", "4*<tp4,pp1>"), {}, "has 16 devices, and there are 8"),
        (("--context", "900000"), {}, "no measured scheme takes 900000 tokens on 8 devices"),
    ],
)
def test_a_mistake_is_a_sentence(
    folder: Path, options: tuple[str, ...], changed: dict[str, str], sentence: str
) -> None:
    result = plan(folder, *options, **changed)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_help_teaches_with_an_example() -> None:
    shown = " ".join(CliRunner().invoke(cli.app, ["plan", "--help"]).stdout.split())
    assert "hydragraph plan --profile profile.json" in shown
