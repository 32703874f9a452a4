"""Cache of passed checks in the user's cache folder: a correct program need not be checked again.

Only the fact that something passed is stored, under a fingerprint of everything the outcome depends on. If that cannot
be determined (code without source, hooks, closures), nothing is stored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from pathlib import Path

import torch

import hydragraph
from hydragraph.frontend import user_cache
from hydragraph.frontend.check.numeric_check import CheckedModel
from hydragraph.frontend.model_description import Unknown, described, described_function
from hydragraph.version import __version__


def folder() -> Path:
    """Return the folder of the cache."""
    return user_cache.folder("checks")


def fingerprint(subject: CheckedModel, mode: str) -> str | None:
    """Return 32 hex digits that cover everything a check's outcome depends on, or None if that cannot be determined."""
    program = subject.program
    digest = hashlib.sha256()
    try:
        for part in (
            *(mode, subject.blocks, program.fingerprint, program.origin, torch.__version__, __version__, _own_source()),
            getattr(sys.modules.get("transformers"), "__version__", ""),
            *(template.content for template in program.templates.values()),
            *(f"{n} {tuple(p.shape)} {p.requires_grad} {p.is_meta}" for n, p in subject.model.named_parameters()),
            *described(subject.model),
            described_function(subject.loss),
            sorted((n, str(t.dtype), tuple(t.shape)) for n, t in (subject.example or {}).items()),
        ):
            digest.update(f"{part!r}\n".encode())
    except Unknown:
        return None
    return digest.hexdigest()[:32]


def key_of(content: str) -> str:
    """Return 32 hex digits that cover a text describing a comparison, and the versions that made it."""
    versions = torch.__version__, __version__, _own_source()
    return hashlib.sha256(repr((content, versions)).encode()).hexdigest()[:32]


@functools.cache
def _own_source() -> str:
    """Return a digest of hydragraph's files, by size and time: during development the version number stays the same."""
    root = Path(str(hydragraph.__file__)).parent
    stats = ((p.relative_to(root).as_posix(), p.stat()) for p in sorted(root.rglob("*.py")))
    return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()


def recall(key: str) -> str | None:
    """Return the line stored for a fingerprint that passed before, or None."""
    try:
        return str(json.loads(user_cache.read(folder() / f"{key}.json") or b"")["line"])
    except (ValueError, KeyError, TypeError):
        return None


def remember(key: str, line: str) -> None:
    """Store that something passed; if it cannot be written, the check is repeated next time."""
    user_cache.write(folder() / f"{key}.json", json.dumps({"line": line}).encode())
