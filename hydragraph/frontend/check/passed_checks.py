"""Cache of passed checks."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import torch

import hydragraph
from hydragraph.errors import Unsupported
from hydragraph.frontend import user_cache
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.compiled_folder.manifest import versions
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.version import __version__

CHECKS = "checks"
MOST = 4096  # files


def fingerprint(subject: CheckedModel, mode: str) -> str | None:
    """Return a check's key in the cache; None for a model or loss with hooks or closures."""
    try:
        record = model_record(subject.model, subject.loss, subject.example, subject.blocks)
    except Unsupported:
        return None
    # Names of meta parameters matter: the check gives them other weights.
    on_meta = [name for name, parameter in subject.model.named_parameters() if parameter.is_meta]
    program = subject.program
    contents = [template.content for template in program.templates.values()]
    return key_of(repr((mode, program.fingerprint, program.origin, record, versions(), on_meta, contents)))


def key_of(content: str) -> str:
    return repr((content, torch.__version__, __version__, _own_source()))


@functools.cache
def _own_source() -> str:
    root = Path(str(hydragraph.__file__)).parent
    stats = ((p.relative_to(root).as_posix(), p.stat()) for p in sorted(root.rglob("*.py")))
    return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()


def recall(key: str) -> str | None:
    return user_cache.read_packed(user_cache.packed_path(CHECKS, key), lambda content: str(json.loads(content)))


def remember(key: str, line: str) -> None:
    user_cache.write_packed(user_cache.packed_path(CHECKS, key), lambda: line, MOST)
