"""The config as a JSON schema for editors, and as a reference page."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import hydragraph
from hydragraph.spec.home import Home
from hydragraph.train.config import TrainConfig
from hydragraph.train.field_checks import check_of

SCHEMA = Path(hydragraph.__file__).parent / "train" / "config.schema.json"

_SCALARS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
_ANY = {"type": ["string", "number", "boolean", "object", "array", "null"]}
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)
_ENTRY = re.compile(r"^    ([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)$")


def field_docs(cls: type) -> dict[str, str]:
    """Return the description of each field from a dataclass's docstring, as one line."""
    inherited: dict[str, str] = {}
    for base in reversed(cls.__bases__):
        inherited.update(field_docs(base) if is_dataclass(base) else {})
    parts = _SECTION.split(inspect.cleandoc(cls.__doc__ or ""))
    at = next((i for i, part in enumerate(parts) if part in ("Attributes", "Args")), None)
    if at is None:
        return inherited
    said: dict[str, list[str]] = {}
    current: list[str] = []
    for line in parts[at + 1].splitlines():
        entry = _ENTRY.match(line)
        if entry is not None:
            current = [entry[2]]
            said.update(dict.fromkeys(entry[1].split(", "), current))
        elif line.strip():
            current.append(line.strip())
    return {**inherited, **{name: " ".join(lines) for name, lines in said.items()}}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7) of a run's YAML file."""
    definitions: dict[str, Any] = {}
    root = _object(TrainConfig, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "hydragraph train",
        **root,
        "definitions": definitions,
    }


def schema_text() -> str:
    """Return the schema as the text of the shipped file."""
    return json.dumps(json_schema(), indent=1) + "\n"


def reference() -> str:
    """Return the config's fields as a page of Markdown."""
    lines = [
        "# The config of a run",
        "",
        "This page lists every field of the YAML file that hydragraph's commands read. "
        "`hydragraph init` writes such a file. `--set section.field=value` replaces a field, and a run saves the "
        "resolved config as `config.yaml`. This page and the JSON schema `hydragraph/train/config.schema.json` are "
        "generated from the dataclasses in `hydragraph/train/config.py`. Editors use the schema to complete and check "
        "a config (`# yaml-language-server: $schema=...` in the first line).",
    ]
    for path, cls in _sections("", TrainConfig):
        lines += ["", f"## {f'`{path}`' if path else 'The file'}", "", _summary(cls), ""]
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        docs = field_docs(cls)
        hints = get_type_hints(cls)
        for field in fields(cls):
            kind = _type_text(cls, field.name, hints[field.name])
            # HTML would interpret a strategy's <tp2,pp1>, and a bar ends a cell.
            said = _said(hints[field.name], docs.get(field.name, "")).replace("<", "&lt;").replace("|", "\\|")
            lines.append(f"| `{field.name}` | {kind} | {_default_text(field)} | {said} |")
    return "\n".join(lines) + "\n"


def _sections(path: str, cls: type) -> Iterator[tuple[str, type]]:
    yield path, cls
    hints = get_type_hints(cls)
    for field in fields(cls):
        if (inner := _record_in(hints[field.name])) is not None and inner is not Home:
            form = get_origin(_present(hints[field.name]))
            suffix = "[]" if form is tuple else ".NAME" if form is Mapping else ""
            yield from _sections(f"{path}.{field.name}{suffix}".lstrip("."), inner)


def _said(hint: Any, doc: str) -> str:
    """Return a field's description; "see their classes" stands for the class's summary."""
    inner = _record_in(hint)
    return _summary(inner) if inner is not None and doc.startswith("see their classes") else doc


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def _present(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [a for a in get_args(hint) if a is not type(None)]
        return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007 - of a list  # pyrefly: ignore[invalid-annotation]
    return hint


def _record_in(hint: Any) -> type | None:
    hint = _present(hint)
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    elif get_origin(hint) is Mapping:
        hint = get_args(hint)[1]
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    docs = field_docs(cls)
    hints = get_type_hints(cls)
    own = fields(cls)
    properties: dict[str, Any] = {}
    for field in own:
        said = _value(cls, field.name, hints[field.name], definitions)
        said = {**said, "description": _said(hints[field.name], docs.get(field.name, ""))}
        properties[field.name] = said
    required = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": required} if required else schema


def _value(cls: type, name: str, hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if (cls, name) == (TrainConfig, "strategies"):
        one = {"type": ["string", "object"]}
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}
    optional = hint is not _present(hint)
    if choices := _choices(cls, name):
        off = [False] if "off" in choices else []  # YAML reads off as false
        return {"enum": [*choices, *off, *([None] if optional else [])]}
    schema = _type(_present(hint), definitions)
    if not optional:
        return schema
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if get_origin(hint) in (Union, types.UnionType):
        return {"anyOf": [_type(part, definitions) for part in get_args(hint)]}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _type(get_args(hint)[0], definitions)}
    if get_origin(hint) is Mapping:
        return {"type": "object", "additionalProperties": _type(get_args(hint)[1], definitions)}
    if isinstance(hint, type) and is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # set first, as its fields may refer to it
            definitions[hint.__name__] = _object(hint, definitions)
        place = {"$ref": f"#/definitions/{hint.__name__}"}
        return {"anyOf": [{"type": "string"}, place]} if hasattr(hint, "parse") else place
    return dict(_ANY)


def _type_text(cls: type, name: str, hint: Any) -> str:
    if (cls, name) == (TrainConfig, "strategies"):
        return "text, YAML, or a list of them"
    if choices := _choices(cls, name):
        return " or ".join(f'"{choice}"' for choice in choices)
    return _words(_present(hint))


def _choices(cls: type, name: str) -> tuple[str, ...]:
    check = check_of(get_type_hints(cls, include_extras=True)[name])
    return tuple(getattr(check, "keywords", {}).get("choices", ()))


def _words(hint: Any) -> str:
    words = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    if hint in words:
        return words[hint]
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {_words(get_args(hint)[0])}"
    if get_origin(hint) is Mapping:
        inner = get_args(hint)[1]
        return "mapping" if inner is Any else f"mapping of names to {_words(inner)}"
    if isinstance(hint, type) and is_dataclass(hint):
        return "text or mapping" if hasattr(hint, "parse") else "mapping"
    return "anything"


def _default_text(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required" if field.default_factory is MISSING else ""
    if field.default is None:
        return "none"
    if is_dataclass(field.default):
        return ""
    if isinstance(field.default, tuple):
        return f"`{json.dumps(list(field.default))}`"
    return f"`{json.dumps(field.default)}`"
