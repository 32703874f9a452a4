"""`hydragraph init` writes a config that trains, and never overwrites a file."""

from __future__ import annotations

import json
from pathlib import Path

from hydragraph.train.config import TrainConfig
from tests.commands.tiny import run


def test_what_it_writes_trains(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "it is a test of tests"}]
    data = tmp_path / "chats.jsonl"
    data.write_text((json.dumps({"messages": turns}) + "\n") * 60)
    done = run("init", data, "--to", tmp_path / "first.yaml")
    assert done.exit_code == 0, done.output
    assert (
        "first.yaml is for 1 process, which uses all cores; this machine has no GPU; hydragraph train measures"
        in done.stdout
    )
    assert "hydragraph check" in done.stdout
    config = TrainConfig.load(tmp_path / "first.yaml")
    assert (config.data.format, config.data.train_on, config.epochs) == ("auto", "assistant", 3)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2}
    sets = [f"--set=model.config.{name}={value}" for name, value in small.items()]
    sets += ["--set=data.vocab_size=300", "--set=epochs=1", f"--set=output={tmp_path / 'run'}", "--set=device=cpu"]
    sets += ["--set=strategies=<tp1,pp1>", "--set=ranks=1"]
    trained = run("train", tmp_path / "first.yaml", *sets)
    assert trained.exit_code == 0, trained.output
    assert "steps; all results are in" in trained.stderr


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    refused = run("init", "--to", tmp_path / "there.yaml")
    assert (refused.exit_code, (tmp_path / "there.yaml").read_text()) == (2, "mine")
    assert "there.yaml already exists: replace it with --overwrite, or name another file with --to" in refused.stderr
    assert run("init", "--to", tmp_path / "there.yaml", "--overwrite").exit_code == 0
    assert "name a file with --to" in run("init", "--to", tmp_path, "--overwrite").stderr
    assert "create it, or name another" in run("init", "--to", tmp_path / "none" / "a.yaml").stderr
    assert "does not exist" in run("init", tmp_path / "none.txt", "--to", tmp_path / "b.yaml").stderr
