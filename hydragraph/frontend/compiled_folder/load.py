"""Load a compiled folder: validated data, and code only if the folder is trusted."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hydragraph.frontend.compiled_folder.inductor_code import FILE, load_code
from hydragraph.frontend.compiled_folder.manifest import (
    ALWAYS,
    GPU,
    NAME,
    FolderManifest,
    Refused,
    own_code,
    read_file,
    read_json,
    read_manifest,
    version_of,
)
from hydragraph.frontend.compiled_folder.model_record import ModelRecord, differences
from hydragraph.frontend.compiled_folder.program_records import program_of, variant_of
from hydragraph.frontend.compiled_folder.record_schema import MalformedRecord
from hydragraph.frontend.compiled_folder.save import PROGRAM
from hydragraph.ir.program import Program
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variant_spec import VariantSpec

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CompiledFolder:
    """Contents of a compiled folder, as a `Library` of variants."""

    folder: Path
    manifest: FolderManifest
    program: Program
    _files: Mapping[str, bytes] = field(repr=False)

    def variant(self, spec: VariantSpec) -> Variant | None:
        """Return the variant of `spec`, or None if it is missing; raise Refused if it is invalid."""
        entry = self.manifest.variants.get(spec.key)
        if entry is None:
            return None
        try:
            return variant_of(read_json(self._files[entry.file], entry.file), spec, entry.file)
        except MalformedRecord as error:
            raise Refused(self.folder, str(error)) from None

    def source(self, spec: VariantSpec) -> str:
        entry = self.manifest.variants.get(spec.key)
        return "" if entry is None else self.manifest.files[entry.file].sha256

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.manifest.text().encode()).hexdigest()

    def checked(self, mode: str) -> bool:
        covered = self.manifest.check.covers(mode)
        if covered and mode != "off":
            _LOG.info("%s (when %s was compiled)", self.manifest.check.model, self.folder)
        return covered

    def __str__(self) -> str:
        return f"compiled folder {self.folder}"


def load(
    folder: Path | str,
    model: ModelRecord | None = None,
    dtype: torch.dtype | None = None,
    ranks: int | None = None,
    trust: bool = False,
) -> CompiledFolder:
    """Read a compiled folder.

    Args:
        trust: whether to pass the folder's code to Inductor; this code can do anything that the process can.

    Raises:
        Refused: the folder is stale, damaged, or for another model, dtype or number of ranks.
    """
    began = time.perf_counter()
    folder = Path(folder)
    manifest = read_manifest(folder)
    _refuse_stale(folder, manifest)
    if model is not None:
        _refuse_other_model(folder, manifest, model)
    if ranks is not None and manifest.ranks not in (None, ranks):
        again = f"hydragraph compile CONFIG --ranks {ranks} --output {folder}"
        remedy = f"start {manifest.ranks} ranks, or write the folder again: {again}"
        raise Refused(folder, f"the folder was compiled for {manifest.ranks} ranks, but this run has {ranks}", remedy)
    # Verify all files, including code, before using any.
    loaded, contents = _read(folder, manifest, manifest.files)
    program = loaded.program
    if dtype not in (None, program.dtype):
        remedy = f"pass dtype={program.dtype}, or write the folder again with the dtype that you need"
        raise Refused(folder, f"the program computes in {program.dtype}, but 'dtype' is {dtype}", remedy)
    _refuse_more(folder, manifest)
    if trust and FILE in contents:
        load_code(contents[FILE], folder, manifest.versions.get(GPU))
    elif FILE in contents:
        _LOG.info("did not load the code in %s: pass --trust or trust=True", folder / FILE)
    seconds = time.perf_counter() - began
    count = len(manifest.variants)
    _LOG.info("loaded %s from %s, %d variants, in %.2f s", program.model, folder, count, seconds)
    return loaded


def read_graphs(folder: Path) -> CompiledFolder:
    """Read the program and graphs, even if package versions differ; raise Refused if a file is missing or damaged."""
    return _read(folder, read_manifest(folder), ())[0]


def _read(folder: Path, manifest: FolderManifest, others: Iterable[str]) -> tuple[CompiledFolder, Mapping[str, bytes]]:
    graphs = {entry.file for entry in manifest.variants.values()}
    paths = dict.fromkeys([*others, *sorted({PROGRAM, *graphs})])
    contents = {path: read_file(folder, path, manifest.files) for path in paths}
    try:
        program = program_of(read_json(contents[PROGRAM], PROGRAM))
    except ValueError as error:
        raise Refused(folder, f"{PROGRAM}: {error}") from None
    return CompiledFolder(folder, manifest, program, {path: contents[path] for path in graphs}), contents


def _refuse_other_model(folder: Path, manifest: FolderManifest, model: ModelRecord) -> None:
    mismatches = differences(manifest.model, model)
    if mismatches:
        more = f", and {len(mismatches) - 3} more" if len(mismatches) > 3 else ""
        raise Refused(folder, f"the folder was compiled from another model: {'; '.join(mismatches[:3])}{more}")


def _refuse_more(folder: Path, manifest: FolderManifest) -> None:
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    there = {path.relative_to(folder).as_posix() for path in files}
    more = sorted(there - manifest.files.keys() - {NAME})
    if more:
        others = f" and {len(more) - 1} others" if len(more) > 1 else ""
        remedy = f"remove these files, or write the folder again: hydragraph compile CONFIG --output {folder}"
        raise Refused(folder, f"the folder contains {more[0]:.200}{others}, which {NAME} does not list", remedy)


def _refuse_stale(folder: Path, manifest: FolderManifest) -> None:
    for name in ALWAYS:
        if name not in manifest.versions:
            raise Refused(folder, f"{NAME} does not record the version of {name}")
    for name, version in manifest.versions.items():
        here = version_of(name)
        if here != version:
            raise Refused(folder, f"the folder needs {name} {version}, but this machine has {here or 'none'}")
    if manifest.code != own_code():
        raise Refused(folder, "hydragraph's files that generate graphs have changed since the folder was compiled")
