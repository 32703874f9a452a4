"""What was checked before, in a folder of the user's: a right program need not be checked again.

Only that something passed is remembered, under a fingerprint of all that the outcome depends on. Where that cannot be
known (code without source, hooks, functions that close over values) nothing is remembered.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

import hydragraph
from hydragraph.check.check import CheckedModel
from hydragraph.version import __version__

# Libraries whose version says what their modules do; of all others, the source is read.
_KNOWN = ("torch", "transformers")
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_HELD = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS})


class _Unknown(Exception):  # noqa: N818
    """Something that no fingerprint can be taken of."""


def folder() -> Path:
    """Return where outcomes are kept: `$XDG_CACHE_HOME/hydragraph/checks`, or that of `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hydragraph" / "checks"


def fingerprint(subject: CheckedModel, mode: str) -> str | None:
    """Return 32 hex digits over what a check's outcome depends on; None: it cannot be told."""
    program = subject.program
    digest = hashlib.sha256()
    try:
        for part in (
            *(mode, subject.blocks, program.fingerprint, program.origin, torch.__version__, __version__, _own_source()),
            getattr(sys.modules.get("transformers"), "__version__", ""),
            *(template.content for template in program.templates.values()),
            *(f"{n} {tuple(p.shape)} {p.requires_grad} {p.is_meta}" for n, p in subject.model.named_parameters()),
            *_described(subject.model),
            _of_function(subject.loss),
            sorted((n, str(t.dtype), tuple(t.shape)) for n, t in (subject.example or {}).items()),
        ):
            digest.update(f"{part!r}\n".encode())
    except _Unknown:
        return None
    return digest.hexdigest()[:32]


def key_of(content: str) -> str:
    """Return 32 hex digits over a text that says what was compared, and the versions that compared it."""
    versions = torch.__version__, __version__, _own_source()
    return hashlib.sha256(repr((content, versions)).encode()).hexdigest()[:32]


def _described(model: nn.Module) -> Iterator[str]:
    """Yield what each module is: its class, the source of classes that no version covers, and its attributes."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        yield config.to_json_string(use_diff=False)
        yield str(getattr(config, "_attn_implementation", ""))
    seen: set[type] = set()
    for name, module in model.named_modules():
        attributes = vars(module)
        if any(attributes.get(hooks) for hooks in _HOOKS):
            raise _Unknown
        yield f"{name} {type(module).__module__}.{type(module).__qualname__}"
        yield repr(sorted((n, _value(v)) for n, v in attributes.items() if n not in _HELD))
        for kind in (k for k in type(module).__mro__ if k not in seen and not _is_known(k.__module__)):
            seen.add(kind)
            yield "" if kind is object else _source(kind)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _value(value: object) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return (
            f"{type(value).__name__}{sorted(map(_value, value)) if isinstance(value, set) else [*map(_value, value)]}"
        )
    if isinstance(value, dict):
        return repr([(_value(k), _value(v)) for k, v in value.items()])
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, type) or _is_known(type(value).__module__):
        return f"{type(value).__module__}.{type(value).__qualname__}"  # a config or a library's helper
    if type(value).__module__ == "builtins" and callable(value):
        return repr(value)
    raise _Unknown


def _of_function(function: Callable[..., Any]) -> str:
    """Return what a function is; one of a library or of hydragraph by its name, another by its source."""
    if not isinstance(function, FunctionType) or function.__closure__:
        raise _Unknown
    name = f"{function.__module__}.{function.__qualname__}"
    covered = _is_known(function.__module__) or function.__module__.partition(".")[0] == "hydragraph"
    return name if covered else f"{name} {_source(function)}"


def _source(thing: Any) -> str:
    """Return the text of the whole module that something is defined in."""
    module = inspect.getmodule(thing)
    file = getattr(module, "__file__", None)
    if not file:
        raise _Unknown
    return _text_digest(file)


@functools.cache
def _text_digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise _Unknown from error


@functools.cache
def _own_source() -> str:
    """Return a digest over hydragraph's files, by size and time: a version number does not change as one works."""
    root = Path(str(hydragraph.__file__)).parent
    stats = ((p.relative_to(root).as_posix(), p.stat()) for p in sorted(root.rglob("*.py")))
    return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()


def recall(key: str) -> str | None:
    """Return the line about what passed under a fingerprint before; None: nothing did."""
    try:
        record = json.loads((folder() / f"{key}.json").read_text(encoding="utf-8"))
        return str(record["line"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(key: str, line: str) -> None:
    """Note that something passed; where that cannot be written, it is checked again next time."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), delete=False, encoding="utf-8") as file:
            json.dump({"line": line}, file)
        os.replace(file.name, folder() / f"{key}.json")
    except OSError:
        return
