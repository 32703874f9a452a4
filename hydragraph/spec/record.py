"""Conversion between YAML and frozen dataclasses; errors name the field's path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)


def read_text(path: str | Path, remedy: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the file is not UTF-8 text: {remedy}") from None


def load_yaml(path: str | Path) -> object:
    text = read_text(path, "give a YAML file")
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_yaml(text: str) -> object:
    try:
        data: object = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not readable as YAML: {_mistake(error)}") from None
    return data


# PyYAML's messages, with replacements. FOUND stands for the character at the error.
_MISTAKES = {
    "while parsing a flow sequence": "its '[' is not closed: add ']', or a comma",
    "while parsing a flow mapping": "its '{' is not closed: add '}', or a comma",
    "while scanning a quoted scalar": "its quote is not closed: add another at the end of the text",
    r"found character '\\t'": "the line is indented by a tab: use spaces",
    "found character|found undefined alias|constructor for the tag": "a text begins with FOUND: put it in quotes",
    "unknown escape": "a text in double quotes has a '\\' in it: use single quotes",
    "mapping values": (
        "a ':' is not allowed here: indent all fields of a section equally, or put a text with ': ' in quotes"
    ),
    "expected <block end>": "the indentation differs from the lines before it: indent all fields of a section equally",
    "expected the node content": "FOUND is where a value is expected: write the value before it, or null",
    "another document": "a second document begins: keep one document per file",
    "unhashable": "a field's name is a list or a mapping: use a text as its name",
}


def _mistake(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"the text has the character {chr(error.character)!r}: remove it"
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return str(error)
    said = f"{error.context}, {error.problem}"
    remedy = next((text for pattern, text in _MISTAKES.items() if re.search(pattern, said)), f"{error.problem}")
    # PyYAML reports the end of the text; the opening bracket or quote helps more.
    if remedy.startswith("its ") and error.context_mark is not None:
        mark = error.context_mark
    found = (mark.buffer or "")[mark.pointer : mark.pointer + 1]
    # PyYAML's end of a text
    if found == "\0" and "FOUND" in remedy:
        remedy = "the text ends here, but a bracket is not closed: add the missing ']' or '}'"
    return f"line {mark.line + 1}, column {mark.column + 1}: {remedy.replace('FOUND', repr(found))}"


def load_record(cls: type[Record], path: str | Path) -> Record:
    return checked_record(cls, load_yaml(path), path, "", {})


def checked_record(cls: type[Record], data: object, path: str | Path, name: str, hints: Mapping[str, str]) -> Record:
    if data is None:
        raise ValueError(f"{path}: the file is empty: write {_example(cls)}")
    try:
        return from_record(cls, data, name=name, hints=hints)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_record(
    cls: type[Record], data: object, path: str = "", name: str = "", hints: Mapping[str, str] = MappingProxyType({})
) -> Record:
    """Build a dataclass, including nested ones, from mappings and lists.

    Args:
        path: path of `data` in the file, such as "pipelines[0].stages[1]".
        name: name of the top-level value in messages; default: the class.
        hints: remedies for unknown fields, by name; default: the most similar field.
    """
    where = path or name or cls.__name__.lower()
    names = [field.name for field in fields(cls)]
    if not isinstance(data, dict):
        remedy = hints.get(path) or f"give {_example(cls)}"
        raise ValueError(f"{where}: expected a mapping with {', '.join(names)}, but it is {data!r:.80}: {remedy}")
    # Unknown fields first: a misspelled required field is also missing.
    for name in data:
        if name not in names:
            raise ValueError(f"{where}: unknown field {name!r}: {hints.get(str(name)) or _meant(cls, str(name))}")
    for field in fields(cls):
        if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}: missing field {field.name!r}: give {_example(cls)}")
    types = get_type_hints(cls)
    prefix = f"{path}." if path else ""
    values = {name: _from_value(types[name], value, prefix + name, hints) for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from None


def _meant(cls: type[Any], name: str) -> str:
    names = [field.name for field in fields(cls)]
    places = [f"{part}.{name}" for part, section in _sections(cls) if name in {field.name for field in fields(section)}]
    if places:
        return f"write {' or '.join(places)}"
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known fields are {', '.join(names)}"


def _sections(cls: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    for name, hint in get_type_hints(cls).items():
        for part in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
            if is_dataclass(part) and isinstance(part, type):
                yield name, part


def _from_value(hint: Any, value: object, path: str, hints: Mapping[str, str]) -> object:
    if get_origin(hint) in (Union, UnionType) and value is not None:
        records = [part for part in get_args(hint) if is_dataclass(part)]
        # A union's first type is that of an optional section.
        hint = records[0] if len(records) == 1 else hint
    if is_dataclass(hint) and isinstance(hint, type):
        # Given as text
        if isinstance(value, str) and hasattr(hint, "parse"):
            record: object = hint.parse(value)
            return record
        return from_record(hint, value, path, hints=hints)
    # A mapping of names to sections.
    if get_origin(hint) is Mapping and is_dataclass(item := get_args(hint)[1]) and isinstance(item, type):
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}: expected a mapping of names, but it is {value!r:.80}: give {{NAME: {_example(item)}}}"
            )
        return {str(key): from_record(item, entry, f"{path}.{key}", hints=hints) for key, entry in value.items()}
    # A list of sections, which check all other types.
    item = get_args(hint)[0] if get_origin(hint) is tuple else None
    if not (is_dataclass(item) and isinstance(item, type)):
        return value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{path}: expected a list, but it is {value!r}")
    return tuple(from_record(item, entry, f"{path}[{i}]", hints=hints) for i, entry in enumerate(value))


def _example(cls: type[Any]) -> str:
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    names = required or [field.name for field in fields(cls)][:1]
    return f"{{{', '.join(f'{name}: ...' for name in names)}}}"


def section_record(cls: type[Any], name: str, value: object) -> Any:
    return to_record(_from_value(get_type_hints(cls)[name], value, name, {}))


def to_record(value: Any) -> Any:
    """Return a dataclass as dicts, lists and scalars, without default values."""
    if is_dataclass(value):
        own = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: to_record(entry) for field, entry in own if entry != field.default}
    if isinstance(value, Mapping):
        return {name: to_record(entry) for name, entry in value.items()}
    return [to_record(entry) for entry in value] if isinstance(value, tuple) else value


def attributes_of(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def flow_yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=2**31).strip()


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the types of YAML 1.2: 1e9 is a number, but 010, 1:00 and dates are text.

    Repeated fields are errors.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        # implicit is (True, False) for unquoted text, whose type PyYAML chooses.
        old = tag.endswith(":timestamp") or (tag.endswith((":int", ":float")) and _OLD.match(value))
        return self.DEFAULT_SCALAR_TAG if old and implicit == (True, False) else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"field {key.value!r} is given twice: keep one", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return node


# Numbers in base 8 and base 60
_OLD = re.compile(r"[-+]?0[0-7_]+$|.*:")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
