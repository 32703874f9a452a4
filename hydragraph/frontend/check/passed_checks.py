"""Cache of passed checks in the user's cache folder, by everything that the outcome depends on."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import torch

import hydragraph
from hydragraph.errors import Unsupported
from hydragraph.frontend import user_cache
from hydragraph.frontend.check.numeric_check import CheckedModel
from hydragraph.frontend.compiled_folder.manifest import versions
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.version import __version__


def fingerprint(subject: CheckedModel, mode: str) -> str | None:
    """Return the key of a check, or None if its outcome depends on unknown parts (hooks, closures)."""
    program = subject.program
    try:
        record = model_record(subject.model, subject.loss, subject.example, subject.blocks)
    except Unsupported:
        return None
    on_meta = [name for name, parameter in subject.model.named_parameters() if parameter.is_meta]
    contents = [template.content for template in program.templates.values()]
    return key_of(repr((mode, program.fingerprint, program.origin, record, versions(), on_meta, contents)))


def key_of(content: str) -> str:
    """Return 32 hex digits of a comparison's description and the versions that made it."""
    versions = torch.__version__, __version__, _own_source()
    return hashlib.sha256(repr((content, versions)).encode()).hexdigest()[:32]


@functools.cache
def _own_source() -> str:
    """Digest hydragraph's files, because the version number stays the same during development."""
    root = Path(str(hydragraph.__file__)).parent
    stats = ((p.relative_to(root).as_posix(), p.stat()) for p in sorted(root.rglob("*.py")))
    return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()


def recall(key: str) -> str | None:
    """Return the line of a passed check, or None."""
    try:
        return str(json.loads(user_cache.read(_path(key)) or b"")["line"])
    except (ValueError, KeyError, TypeError):
        return None


def remember(key: str, line: str) -> None:
    """Store that a check passed, if the file can be written."""
    user_cache.write(_path(key), json.dumps({"line": line}).encode())


def _path(key: str) -> Path:
    return user_cache.folder("checks") / f"{key}.json"
