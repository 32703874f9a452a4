"""The JSON schema and the page of reference are those of the dataclasses, and the schema says what the config says."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hydragraph.spec.record import from_record, parse_yaml
from hydragraph.train.config import TrainConfig
from tests.train.config_schema import SCHEMA, _choices, _sections, field_docs, json_schema, reference, schema_text
from tests.train.plain import settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"


def test_the_shipped_schema_and_the_page_are_up_to_date() -> None:
    if os.environ.get("HYDRAGRAPH_UPDATE_CONFIG"):
        SCHEMA.write_text(schema_text(), encoding="utf-8")
        PAGE.write_text(reference(), encoding="utf-8")
    renew = "run HYDRAGRAPH_UPDATE_CONFIG=1 pytest tests/train/test_config_schema.py"
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), renew
    assert PAGE.read_text(encoding="utf-8") == reference(), renew


def test_every_field_is_documented() -> None:
    for path, cls in _sections("", TrainConfig):
        names = [field.name for field in fields(cls)]
        assert [name for name in names if not field_docs(cls).get(name)] == [], path
        assert set(field_docs(cls)) <= set(names), path


def test_the_schema_is_one_and_takes_the_examples(tmp_path: Path) -> None:
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    TrainConfig.load(ROOT / "examples" / "demo.yaml").save(tmp_path / "resolved.yaml")
    files = [*sorted((ROOT / "examples").glob("*.yaml")), tmp_path / "resolved.yaml"]
    configs = [data for file in files if isinstance(data := parse_yaml(file.read_text()), dict) and "model" in data]
    assert len(configs) >= 2
    for data in [*configs, settings(tmp_path)]:
        jsonschema.validate(data, schema)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("stepz", 3),
        ("steps", "many"),
        ("optimizer.lrr", 1),
        ("optimizer.lr", "fast"),
        ("schedule.decay", "step"),
        ("data.paths", "texts"),
        ("home", 3),
        ("strategies", []),
        ("dtype", "float16"),
        ("plan.choose", "yes"),
    ],
)
def test_the_schema_refuses_what_the_config_refuses(place: str, value: object, tmp_path: Path) -> None:
    data = settings(tmp_path)
    at: Any = data
    *parents, name = place.split(".")
    for parent in parents:
        at = at.setdefault(parent, {})
    at[name] = value
    with pytest.raises(ValueError, match=name):
        from_record(TrainConfig, yaml.safe_load(yaml.safe_dump(data)))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(json.dumps(data)), json_schema())


def _place(data: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the section at a path, such as data.mixture[], made if missing."""
    at: Any = data
    for name in path.split(".") if path else ():
        if name.endswith("[]"):
            at.pop("paths", None)
            at = at.setdefault(name[:-2], [{"paths": ["texts"]}])[0]
        else:
            at = at.setdefault(name, {"paths": ["texts"]} if name == "NAME" else {})
    return at


def test_choices_are_those_that_the_config_takes(tmp_path: Path) -> None:
    """Each listed text is accepted there, and the refusal of another one lists them."""
    places = [(path, cls, field.name) for path, cls in _sections("", TrainConfig) for field in fields(cls)]
    listed = [(path, name, choices) for path, cls, name in places if (choices := _choices(cls, name))]
    assert {name for _, name, _ in listed} >= {"format", "overlong", "train_on", "decay", "dtype", "backend", "check"}
    for path, field, choices in listed:
        for choice in (*choices, "no such choice"):
            data = settings(tmp_path)
            at = _place(data, path)
            at[field] = choice
            if choice in choices:
                from_record(TrainConfig, data)
            else:
                with pytest.raises(ValueError, match=choices[0]):
                    from_record(TrainConfig, data)
