"""Records: frozen dataclasses from mappings and YAML, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.spec.record import flow_yaml, from_record, load_record, parse_yaml, to_record


@dataclass(frozen=True)
class Leaf:
    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int | float) or self.weight < 0:
            raise ValueError(f"weight is {self.weight!r}")


@dataclass(frozen=True)
class Tree:
    trunk: Leaf
    leaves: tuple[Leaf, ...] = ()
    label: str = "oak"


@dataclass(frozen=True)
class Garden:
    trees: Mapping[str, Tree]


leaves = st.builds(Leaf, st.text("ab: é日", max_size=5), st.floats(0, 1e9))
trees = st.builds(Tree, leaves, st.lists(leaves, max_size=3).map(tuple), st.sampled_from(["oak", "elm"]))


@given(trees)
def test_from_record_inverts_to_record(tree: Tree) -> None:
    assert from_record(Tree, to_record(tree)) == tree


def test_defaults_are_left_out() -> None:
    assert to_record(Tree(Leaf("a"), (Leaf("b", 2.0),))) == {
        "trunk": {"name": "a"},
        "leaves": [{"name": "b", "weight": 2.0}],
    }


def test_flow_yaml_is_one_line_however_long() -> None:
    assert flow_yaml([{"devices": [0, 1], "layers": 5}]) == "[{devices: [0, 1], layers: 5}]"
    assert "\n" not in flow_yaml(list(range(1000)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "tree: expected a mapping with trunk, leaves, label, but it is []: give {trunk: ...}"),
        ({"trunk": 3}, "trunk: expected a mapping with name, weight, but it is 3: give {name: ...}"),
        ({"trunk": {"name": "a"}, "labell": 1}, "tree: unknown field 'labell': did you mean 'label'?"),
        ({"trunk": {"name": "a"}, "zzz": 1}, "tree: unknown field 'zzz': known fields are trunk, leaves, label"),
        ({}, "tree: missing field 'trunk': give {trunk: ...}"),
        ({"trunk": {}}, "trunk: missing field 'name': give {name: ...}"),
        ({"trunk": {"name": "a"}, "leaves": 3}, "leaves: expected a list, but it is 3"),
        ({"trunk": {"name": "a"}, "leaves": [{"name": "b"}, {"name": "c", "weight": -1}]}, "leaves[1]: weight is -1"),
    ],
)
def test_errors_name_the_path(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_record(Tree, data)
    path = tmp_path / "tree.yaml"
    path.write_text(flow_yaml(data))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        load_record(Tree, path)


def test_a_mapping_of_names_is_shown_by_an_example() -> None:
    with pytest.raises(
        ValueError, match=r"^trees: expected a mapping of names, but it is 3: give {NAME: {trunk: ...}}$"
    ):
        from_record(Garden, {"trees": 3})


@pytest.mark.parametrize("number", ["1e3", "1E3", "+1.0e3", ".1e+4", "1.e3", "1000"])
def test_numbers_as_people_write_them(number: str, tmp_path: Path) -> None:
    path = tmp_path / "leaf.yaml"
    path.write_text(f"{{name: a, weight: {number}}}")
    assert load_record(Leaf, path) == Leaf("a", 1000.0)


@pytest.mark.parametrize("text", ["010", "1:00", "1:30.5", "2024-07-26", "2024-13-45"])
def test_dates_and_numbers_that_yaml_1_1_would_convert_are_text(text: str) -> None:
    assert parse_yaml(f"[{text}, 0, 10, 1_000, 0x10, 0.5]") == [text, 0, 10, 1000, 16, 0.5]
    assert parse_yaml(yaml.safe_dump({"text": text})) == {"text": text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: a, name: b}", "line 1, column 11: field 'name' is given twice: keep one"),
        ("name: a\nsize: [1\n", "not readable as YAML: line 2, column 7: its '[' is not closed: add ']', or a comma"),
        ("{name: a\n", "line 1, column 1: its '{' is not closed: add '}', or a comma"),
        ("name: 'a\n", "line 1, column 7: its quote is not closed: add another at the end of the text"),
        ("tree:\n\tname: a", "line 2, column 1: the line is indented by a tab: use spaces"),
        ("name: @a", "line 1, column 7: a text begins with '@': put it in quotes"),
        ("name: *a", "line 1, column 7: a text begins with '*': put it in quotes"),
        (
            "tree:\n  name: a\n size: 1",
            "line 3, column 2: the indentation differs from the lines before it: indent all fields",
        ),
        ("name: a: b", "line 1, column 8: a ':' is not allowed here: indent all fields of a section equally"),
        ("name: [", "line 1, column 8: the text ends here, but a bracket is not closed: add the missing ']' or '}'"),
        ("name: ]", "line 1, column 7: ']' is where a value is expected: write the value before it, or null"),
        ("name: a\n---\nname: b", "line 2, column 1: a second document begins: keep one document per file"),
        ("name: |x\n a", "line 1, column 8: expected chomping or indentation indicators, but found 'x'"),
        ("name: a\x00", "the text has the character '\\x00': remove it"),
    ],
)
def test_what_is_no_plain_mapping_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "leaf.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_record(Leaf, path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_merged_mapping_may_override_a_field(tmp_path: Path) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text("{trunk: &a {name: a, weight: 2}, leaves: [{<<: *a, weight: 3}]}")
    assert load_record(Tree, path) == Tree(Leaf("a", 2), (Leaf("a", 3),))
