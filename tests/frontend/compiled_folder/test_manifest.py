"""Every corruption of a compiled folder is refused: bytes, files, fields, and paths that lead elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hydragraph.frontend.compiled_folder.load import load
from hydragraph.frontend.compiled_folder.manifest import NAME, Refused, read_file, read_manifest
from tests.frontend.compiled_folder.folders import resign, written_for_one_rank
from tests.models import captured


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is whole, with a file that only people read."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "strategies").mkdir()
    (folder / "strategies" / "rank_0.txt").write_text("rank 0 of 1\n")
    written_for_one_rank(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@pytest.fixture
def folder(whole: Path, place: Path) -> Iterator[Path]:
    """A copy to damage."""
    copied = place / "folder"
    shutil.copytree(whole, copied)
    yield copied
    shutil.rmtree(copied)


FILES = [NAME, "program.json", "graphs/layer.0.tp1.json", "graphs/head.tp1.json", "strategies/rank_0.txt"]
WAYS = ("flip", "cut", "add", "remove", "rename", "empty")


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ({}, "does not record the version of hydragraph"),
        ([], r'versions: expected a mapping of names, but it is \[\]: give {"NAME": ...}'),
    ],
)
def test_a_manifest_without_versions_is_refused(versions: Any, why: str, whole: Path, tmp_path: Path) -> None:
    copied = tmp_path / "unversioned"
    shutil.copytree(whole, copied)

    def change(signed: Any) -> None:
        signed["versions"] = versions

    resign(copied, change)
    with pytest.raises(Refused, match=why):
        load(copied)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_byte_of_any_file_counts(whole: Path, place: Path, data: st.DataObject) -> None:
    copied = place / "drawn"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(whole, copied)
    file = copied / data.draw(st.sampled_from(FILES))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(WAYS)):
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:at])
        case "add":
            file.write_bytes(content[:at] + b" " + content[at:])
        case "remove":
            file.unlink()
        case "rename":
            file.rename(file.with_name("other"))
        case "empty":
            file.write_bytes(b"")
    with pytest.raises(Refused, match=r"compiled folder .*hydragraph compile"):
        load(copied)


def test_a_whole_folder_loads(folder: Path) -> None:
    (folder / "empty").mkdir()  # which says nothing
    assert load(folder).manifest.text() == (folder / NAME).read_text()


@pytest.mark.parametrize("name", ["notes.txt", "graphs/layer.0.tp9.json", ".hidden", "a/b/c"])
def test_a_file_that_the_manifest_does_not_name_is_refused(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("of mine")
    with pytest.raises(
        Refused, match=rf"folder contains {re.escape(name)}, which manifest.json does not list; remove these files, or"
    ):
        load(folder)


def _swap(folder: Path) -> None:
    first, second = folder / "graphs/layer.0.tp1.json", folder / "graphs/head.tp1.json"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _links_the_graphs(folder: Path) -> None:
    (folder / "graphs").rename(folder / "others")
    (folder / "graphs").symlink_to("others")


def _links_a_file(folder: Path) -> None:
    (folder / "program.json").rename(folder / "empty")
    (folder / "program.json").symlink_to("empty")


def _links_the_manifest(folder: Path) -> None:
    (folder / NAME).rename(folder / "empty")
    (folder / NAME).symlink_to("empty")


def _pipe_for_a_manifest(folder: Path) -> None:
    (folder / NAME).unlink()
    os.mkfifo(folder / NAME)


def _hangs_a_link(folder: Path) -> None:
    (folder / "graphs/more.json").symlink_to("/nowhere")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_swap, "SHA-256 differs|bytes, but manifest.json lists"),
        (_links_the_graphs, "the folder contains graphs and"),
        (_links_a_file, "program.json is a link"),
        (_links_the_manifest, "its manifest.json is a link"),
        (_pipe_for_a_manifest, "not a plain file"),
        (_hangs_a_link, "the folder contains graphs/more.json"),
    ],
)
def test_files_in_each_others_place_and_links_are_refused(folder: Path, change: Any, why: str) -> None:
    change(folder)
    with pytest.raises(Refused, match=why):
        load(folder)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/hostname", "graphs/../../secret", "./program.json", "", "a\\b", "a\0b"]
)
def test_no_path_leads_out_of_the_folder(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_text("x")
    entry = read_manifest(folder).files["strategies/rank_0.txt"]
    with pytest.raises(Refused):
        read_file(folder, path, {path: entry})

    def change(record: dict[str, Any]) -> None:
        record["files"][path] = {
            "bytes": 1,
            "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
        }

    resign(folder, change)
    with pytest.raises(Refused):
        load(folder)


def test_a_link_that_leads_out_and_a_pipe_are_refused(folder: Path) -> None:
    file = folder / "program.json"
    outside = folder.parent / "elsewhere.json"
    shutil.move(file, outside)
    file.symlink_to(outside)
    with pytest.raises(Refused, match="is a link, leads out"):
        load(folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(Refused, match="not a plain file"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "expected the fields"),
        ("{", "damaged"),
        ('{"format": 99}', "its format is 99"),
        ('{"format": 1, "format": 1}', "occurs twice"),
        ('{"format": NaN}', "is not a number"),
        ("[" * 100_000, "damaged"),
        ("\xff", "damaged"),
    ],
)
def test_a_manifest_that_is_none_is_refused(folder: Path, text: str, why: str) -> None:
    (folder / NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(Refused, match=why):
        load(folder)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"its manifest.json cannot be read .*hydragraph compile CONFIG --output"):
        load(tmp_path / "nowhere")


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [at, *(path for key, each in inside for path in paths(each, (*at, key)))]


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_field_that_was_changed_by_one_who_can_sign_is_refused_or_says_nothing_that_is_used(
    whole: Path, place: Path, data: st.DataObject
) -> None:
    copied = place / "signed"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(whole, copied)
    record = json.loads((copied / NAME).read_text())
    *way, last = data.draw(st.sampled_from([path for path in paths(record) if path and path != ("sha256",)]))
    value: Any = data.draw(st.none() | st.integers() | st.text("ab/é日", max_size=3) | st.just([]) | st.just({}))

    inner = record
    for key in way:
        inner = inner[key]
    assume(inner[last] != value)

    def change(signed: Any) -> None:
        for key in way:
            signed = signed[key]
        signed[last] = value

    resign(copied, change)
    try:
        compiled = load(copied)
    except Refused:
        return
    # Its facts about the model, the ranks and the check are compared when training starts from it.
    part = (*way, last)[0]
    assert part in ("model", "ranks", "check", "variants")
    assert compiled.program.fingerprint == captured("llama")[0].fingerprint
