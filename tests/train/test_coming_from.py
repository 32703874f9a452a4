"""Fields of other frameworks' config files are answered with what is written here instead, as the page says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hydragraph.train.coming_from import TABLES, remedies
from hydragraph.train.config import TrainConfig
from tests.train.config_schema import _sections
from tests.train.test_config import write

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"


def test_the_page_has_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(TABLES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("field", ["gradient_checkpointing", "per_device_train_batch_size", "sample_packing"])
def test_a_field_of_another_framework_is_answered(field: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"the config: unknown field '{field}': (use|write|leave it out).*\(docs/coming_from\.md\)"
    ):
        TrainConfig.load(write(tmp_path, {field: 1}))
    with pytest.raises(ValueError, match=rf"^override '{field}=1': the config: unknown field '{field}': "):
        TrainConfig.load(write(tmp_path, {}), [f"{field}=1"])


def test_fields_in_sections_are_answered_too(tmp_path: Path) -> None:
    for field, answer in (("data.nosuch", "known fields"), ("optimizer.lr_decay_style", r"schedule\.decay")):
        with pytest.raises(ValueError, match=answer):
            TrainConfig.load(write(tmp_path, {field: 1}))


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"adapter": "qlora"}, r"it is 'qlora': use adapter: \{lora: \{\}\}; quantized base weights \(QLoRA\) are not"),
        ({"optimizer": "adamw_torch"}, r"it is 'adamw_torch': use optimizer\.name, a class of torch\.optim"),
        ({"model": "meta-llama/Llama-3.1-8B"}, r"use model: \{path: DIRECTORY\}, a local directory"),
        ({"lr": 1e-4}, r"unknown field 'lr': write optimizer\.lr"),
        ({"max_length": 8}, r"unknown field 'max_length': write data\.max_length"),
        ({"data.batch_size": 8}, r"data: unknown field 'batch_size': use data\.tokens_per_step"),
        ({"torch_dtype": "bfloat16"}, r"use dtype: bfloat16"),
    ],
)
def test_names_for_sections_and_fields_of_other_sections_are_answered(
    fields: dict[str, Any], answer: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=answer):
        TrainConfig.load(write(tmp_path, fields))


def test_what_is_written_instead_exists() -> None:
    """A sentence that begins with a name in backticks begins with a field of the config, or a file of the run."""
    known = {f"{path}.{field.name}".lstrip(".") for path, cls in _sections("", TrainConfig) for field in fields(cls)}
    sentences = re.findall(r"^\| `.+? \| (.+) \|$", TABLES.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(remedies()) > len(sentences) > 100
    for sentence in sentences:
        place = sentence.split("`")[1].split(":")[0] if sentence.startswith("`") else ""
        assert not place or place in known | {"metrics.jsonl"} or place.startswith("hydragraph "), sentence
