"""`manifest.json`: contents, origin and numeric check of a compiled folder."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch

import hydragraph
from hydragraph.frontend.compiled_folder import record_schema
from hydragraph.frontend.compiled_folder.model_record import PARTS, ModelRecord
from hydragraph.frontend.compiled_folder.record_schema import MalformedRecord
from hydragraph.version import __version__

FORMAT = 1
NAME = "manifest.json"
LARGEST_FILE = 1 << 30  # bytes
ALWAYS = ("hydragraph", "python", "torch")
_LIBRARIES = ("transformers", "peft")
# Key in `versions` of folders compiled for a GPU
GPU = "the GPU architecture"
# hydragraph's folders that determine graphs
_MAKERS = ("frontend", "ir", "kernels", "passes", "private")


class Refused(ValueError):  # noqa: N818
    """Raised if a run cannot start from a compiled folder."""

    def __init__(self, folder: Path | str, what: str, remedy: str = "") -> None:
        self.folder = str(folder)
        self.what = what
        self.remedy = remedy or f"write the folder again: hydragraph compile CONFIG --output {folder}"
        super().__init__(f"compiled folder {folder}: {what}; {self.remedy}")

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str, str]]:
        return Refused, (self.folder, self.what, self.remedy)


@dataclass(frozen=True)
class VariantEntry:
    """File of a variant; `blocks` and `kind` inform human readers."""

    file: str
    blocks: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class ExpectedFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Check:
    """Results of the numeric check.

    Attributes:
        model: one-line result of the comparison with the model, or "" if not compared.
        stages: key and description of each comparison that `StageCheck` passed.
    """

    mode: str = "off"
    model: str = ""
    stages: Mapping[str, str] = field(default_factory=dict)

    def covers(self, mode: str) -> bool:
        return mode == "off" or (mode == "auto" and self.model != "")


@dataclass(frozen=True)
class FolderManifest:
    """Contents of `manifest.json`, except the format number and the file's own SHA-256.

    Attributes:
        code: SHA-256 of hydragraph's files that generate graphs.
    """

    versions: Mapping[str, str]
    code: str
    ranks: int | None
    model: ModelRecord
    check: Check
    variants: Mapping[str, VariantEntry]
    files: Mapping[str, ExpectedFile]

    def text(self) -> str:
        content = {"format": FORMAT, **asdict(self)}
        body = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        # The last entry is the digest of the text before it.
        digest = hashlib.sha256(body.encode()).hexdigest()
        return body.removesuffix("\n}") + f',\n "sha256": "{digest}"\n}}\n'


def read_manifest(folder: Path) -> FolderManifest:
    """Read the manifest; raise Refused if it is missing, changed, or in another format."""
    try:
        # A link may lead out of the folder; reading a pipe may block.
        if (folder / NAME).is_symlink() or ((folder / NAME).exists() and not (folder / NAME).is_file()):
            raise Refused(folder, f"its {NAME} is a link or not a plain file")
        written = (folder / NAME).read_bytes()
    except OSError as error:
        raise Refused(folder, f"its {NAME} cannot be read ({error.strerror or error})") from None
    try:
        data = read_json(written, NAME)
        if isinstance(data, dict) and data.get("format") != FORMAT:
            what = f"its format is {data.get('format')!r:.40}, but this version of hydragraph reads format {FORMAT}"
            raise Refused(folder, what)
        names = [field.name for field in fields(FolderManifest)]
        data = record_schema.fields(data, ["format", *names, "sha256"], NAME)
        manifest = record_schema.record(FolderManifest, {name: data[name] for name in names}, NAME)
        record_schema.fields(manifest.model, PARTS, f"{NAME}: model")
    except MalformedRecord as error:
        raise Refused(folder, f"{NAME} is damaged: {error}") from None
    # The parsed manifest must give the same bytes.
    if manifest.text().encode() != written:
        raise Refused(folder, f"{NAME} was changed after it was written")
    return manifest


def files_of(folder: Path) -> dict[str, ExpectedFile]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)
    return {path.relative_to(folder).as_posix(): _expected(path.read_bytes()) for path in paths}


def _expected(content: bytes) -> ExpectedFile:
    return ExpectedFile(len(content), hashlib.sha256(content).hexdigest())


def read_file(folder: Path, path: str, files: Mapping[str, ExpectedFile]) -> bytes:
    """Return a file's content; raise Refused if it is changed or outside the folder."""
    expected = files.get(path)
    if expected is None:
        raise Refused(folder, f"{NAME} does not list {path:.200}")
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\\" in path or "\0" in path or {"..", "."} & set(path.split("/")):
        raise Refused(folder, f"{NAME} lists {path!r:.200}, which is not a file of the folder")
    place = folder.joinpath(*parts)
    try:
        if place.is_symlink() or not place.resolve(strict=True).is_relative_to(folder.resolve()) or not place.is_file():
            raise Refused(folder, f"{path} is a link, leads out of the folder, or is not a plain file")
        # Compare sizes before reading a file into memory.
        if expected.bytes > LARGEST_FILE or os.stat(place).st_size != expected.bytes:
            raise Refused(folder, f"{path} has {os.stat(place).st_size} bytes, but {NAME} lists {expected.bytes}")
        content = place.read_bytes()
    except OSError as error:
        raise Refused(folder, f"{path} cannot be read ({error.strerror or error})") from None
    if _expected(content) != expected:
        raise Refused(folder, f"{path} was changed after it was written: its SHA-256 differs")
    return content


def read_json(content: bytes, where: str) -> Any:
    """Parse JSON without NaN, infinities or duplicate names, or raise MalformedRecord."""
    try:
        return json.loads(content.decode(), parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord(f"{where}: {str(error)[:200]}") from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    return members


def versions(arch: str | None = None) -> dict[str, str]:
    """Return the versions of packages that graphs depend on; `arch` is the kernels' GPU architecture."""
    names = [*ALWAYS, *(name for name in _LIBRARIES if name in sys.modules)]
    kernels = {} if arch is None else {GPU: arch, "triton": version_of("triton")}
    return {name: version_of(name) for name in names} | kernels


def version_of(name: str) -> str:
    """Return a package's version, or this machine's GPU architecture for `GPU`; "" if missing."""
    if name == GPU:
        return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""
    if name == "python":
        return platform.python_version().rpartition(".")[0]
    if name == "hydragraph":
        return __version__
    try:
        return str(getattr(sys.modules.get(name), "__version__", None) or metadata.version(name))
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def own_code() -> str:
    root = Path(str(hydragraph.__file__)).parent
    digest = hashlib.sha256()
    for path in sorted(path for name in _MAKERS for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
