"""First configs fit what they are written for: they load, keep to the schema, and pass all checks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph
from hydragraph.data import tokenizer
from hydragraph.spec.record import parse_yaml
from hydragraph.train.config import TrainConfig
from hydragraph.train.config_checks import check_settings
from hydragraph.train.data import prepare
from hydragraph.train.starter_config import look, starter
from tests.train.config_schema import json_schema

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
RECORDS = {
    "text": {"text": "some text"},
    "content": {"content": "some text"},
    "messages": {"messages": TURNS},
    "conversations": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    "completion": {"prompt": "what", "completion": "it"},
    "messages in parts": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "instruction": {"instruction": "what", "input": "", "output": "it"},
    "alpaca": {"instruction": "what", "input": "", "output": "it", "text": "all of it"},
    "preference": {"prompt": "what", "chosen": "it", "rejected": "that"},
    "question": {"question": "what", "chosen": "it is", "rejected": "it was", "source": "people"},
    "ultrafeedback": {
        "prompt": "hi",
        "messages": TURNS,
        "chosen": TURNS,
        "rejected": [TURNS[0], {**TURNS[1], "content": "no"}],
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, vocab_size=300, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(tokenizer.train_bpe(["some text"], 300), folder)
    return folder


def written(paths: list[Path]) -> TrainConfig:
    text = starter(look(paths), False, "runs/first")
    assert str(Path(hydragraph.__file__).parent) not in text, "others read it on other machines"
    assert all(len(line) <= 160 for line in text.splitlines())
    file = paths[0].parent / "written.yaml" if paths else Path("/tmp/written.yaml")
    jsonschema.validate(parse_yaml(text), json_schema())
    file.write_text(text)
    config = TrainConfig.load(file)
    file.unlink()
    return config


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("kind", RECORDS)
def test_records_are_recognised(kind: str, with_model: bool, tmp_path: Path, model: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps(RECORDS[kind]) + "\n") * 30)
    config = written([data, model] if with_model else [data])
    check_settings(config, 1)
    prepare(replace(config, output=str(tmp_path / "run")))
    assert (config.model.path == str(model)) is with_model
    assert (config.objective is not None) == ("rejected" in RECORDS[kind])
    if with_model:
        assert config.optimizer.lr == (1e-6 if "rejected" in RECORDS[kind] else 1e-5), "docs/preferences.md"
    assert (config.data.max_length, config.epochs) == (
        64 if with_model else 256,
        1 if kind in ("text", "content") else 3,
    )
    assert (config.data.format == "alpaca") is (kind == "alpaca"), "text is another form of the same"


def test_folders_models_alone_and_nothing_are_taken(tmp_path: Path, model: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("words " * 4000)
    config = written([tmp_path / "texts"])
    check_settings(config, 2)
    assert config.data.tokens_per_step < 6000 / 20 + 1
    assert written([model]).data.paths == ("your-data.jsonl",)
    assert written([]).data.paths == ("python-stdlib",)


def test_what_cannot_be_started_from_is_told(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist: name a file or folder of data"):
        look([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="are both models: name only one"):
        look([model, model])
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text(json.dumps(RECORDS["messages"]))
    with pytest.raises(ValueError, match="the data has the formats chat and text: name data of one format"):
        look([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    (tmp_path / "c.jsonl").write_text('{"ids": [1]}')
    with pytest.raises(ValueError, match=r"c.jsonl:1: 'ids' is a list, not text"):
        look([tmp_path / "c.jsonl"])


@pytest.mark.parametrize("turns", [1, 20])
def test_small_data_are_trained_on_in_several_steps(turns: int, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    lines = [json.dumps({"messages": TURNS * count}) for count in (*[1] * 60, turns)]
    data.write_text("\n".join(lines))
    found = replace(look([data]), model=Path("model"), positions=32768, templated=True)
    config = TrainConfig.parse(starter(found, False, "runs/first"))
    assert config.data.max_length == config.data.tokens_per_step == max(256, len(lines[-1]) // 2)
    assert config.schedule.warmup_of(20) == 2
