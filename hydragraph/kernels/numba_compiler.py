"""numba's compiler with a disk cache that tolerates damaged files and read-only folders.

numba's own cache fails if no folder is writable, raises pickle errors for truncated files, runs corrupted code, misses
changes to imported functions, and recompiles in each environment.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import __version__ as numba_version
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.types import unliteral

from hydragraph.errors import StillCompiling

_LOG = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size
# Filled by `setup.py`
_INSTALLED = Path(__file__).parent / "compiled"
_MOST = 3000

# Logged warnings, and folders for which compilation was announced.
_said: list[str] = []
_announced: list[str] = []


_others: list[Callable[[], bool]] = []
_POLL_S = 0.05


def compiled(function: Callable[..., Any], quick: bool = False, shared: bool = False) -> Any:
    """Decorate a function that numba compiles on its first call and caches on disk.

    Args:
        quick: whether compilation takes at most a second and is not announced.
        shared: whether both Python and compiled functions call the function. Otherwise, compiled callers get a version
            without Python wrapper, which compiles faster.
    """
    # Division by zero returns infinity.
    jit: Any = partial(njit, error_model="numpy", no_cfunc_wrapper=True)
    dispatcher = jit()(function)
    inner = dispatcher if shared else jit(no_cpython_wrapper=True)(function)
    called = inner.get_call_template

    def without_constants(given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return called(
            tuple(map(unliteral, given)), {name: unliteral(argument_type) for name, argument_type in named.items()}
        )

    # With literal types, numba would compile a version for each combination of constants.
    dispatcher.get_call_template = without_constants
    dispatcher.get_overload = inner.get_overload
    try:
        dispatcher._cache = _Cache(function, quick)
    except (RuntimeError, OSError):
        _say("numba cannot find a folder for compiled code, so every process compiles again: set NUMBA_CACHE_DIR")
    return dispatcher


def is_compiled(function: Any) -> bool:
    cache = getattr(function, "_cache", None)
    try:
        return isinstance(cache, _Cache) and any(files._load_index() for files in (cache.installed, cache.own))
    except Exception:
        # A damaged index
        return False


@contextmanager
def compiled_elsewhere(ended: Callable[[], bool]) -> Iterator[None]:
    """Make calls of uncompiled functions wait for another process to compile them.

    If `ended` returns True, this process compiles. `ended` may raise `StillCompiling`.
    """
    _others.append(ended)
    try:
        yield
    finally:
        _others.remove(ended)


class _Files(IndexDataCacheFile):
    def _data_name(self, number: int) -> str:
        # numba uses one name in processes that compile for different types at once.
        return f"{super()._data_name(number).removesuffix('.nbc')}.{uuid.uuid4().hex}.nbc"

    def _dump(self, obj: Any) -> bytes:
        # pickle, and so numba, ignores the appended hash.
        data: bytes = super()._dump(obj)
        return data + hashlib.sha256(data).digest()

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
            raise ValueError(f"{name} has changed since it was written")
        return super()._load_data(name)


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any], quick: bool) -> None:
        super().__init__(function)
        self._quick = quick
        self._cache_path = _folder() or self._cache_path
        self.stamp = _stamp(function, _digest(function.__code__.co_filename))
        # Each version has its own files: installations can share a folder.
        name = f"{self._impl.filename_base}-{numba_version}-{self.stamp[:16]}"
        self.installed = _Files(str(_INSTALLED), name, self.stamp)
        self.own = _Files(self._cache_path, name, self.stamp)
        self._cache_file: IndexDataCacheFile = self.own

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Code compiled at installation; any failure falls back to this user's cache.
        with suppress(Exception):
            self._cache_file = self.installed
            overload = super().load_overload(sig, target_context)
            if overload is not None:
                return overload
        self._cache_file = self.own
        try:
            overload = super().load_overload(sig, target_context)
            if overload is None and not self._quick:
                _announce(self.cache_path)
                over = False
                # Another process may be compiling: wait for its file until it ends.
                while overload is None and not over:
                    over = all(ended() for ended in _others)
                    time.sleep(0.0 if over else _POLL_S)
                    overload = super().load_overload(sig, target_context)
            return overload
        except StillCompiling:
            raise
        except Exception as error:
            _say(f"numba's cache in {self.cache_path} is damaged ({type(error).__name__}: {error}): compiling again")
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
            _evict(Path(self._cache_path))
        except Exception as error:
            _say(f"numba's cache in {self.cache_path} cannot be written ({error}), so every process compiles again")


def _folder() -> str | None:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(base, "hydragraph", "compiled"))
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(folder) if os.access(folder, os.W_OK) else None


def _evict(folder: Path) -> None:
    files = [*folder.glob("*.nb?")]
    if len(files) > _MOST:
        ages = {}
        for path in files:
            with suppress(FileNotFoundError):
                ages[path] = path.stat().st_mtime
        for path in sorted(ages, key=ages.__getitem__)[: len(files) // 4]:
            path.unlink(missing_ok=True)


@cache
def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _stamp(function: Callable[..., Any], source: object) -> str:
    # Compiled code contains its callees and the constants that it reads, so a change of these must
    # change the file's name.
    values = dict(function.__globals__)
    for name, module in function.__globals__.items():
        if isinstance(module, ModuleType) and module.__name__.startswith("hydragraph."):
            values |= {f"{name}.{inside}": value for inside, value in vars(module).items()}
    caches = (getattr(value, "_cache", None) for value in values.values())
    functions = sorted({cache.stamp for cache in caches if isinstance(cache, _Cache)})
    constants = sorted(f"{name} {value!r}" for name, value in values.items() if _is_constant(value))
    # Compiled code reads the fields of named tuples by position.
    tuples = sorted(f"{name} {value._fields}" for name, value in values.items() if _is_named_tuple(value))
    return hashlib.sha256(repr((source, functions, constants, tuples)).encode()).hexdigest()


def _is_constant(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")


def _say(sentence: str) -> None:
    if not _said:
        _LOG.warning("%s", sentence)
    _said.append(sentence)


def _announce(folder: str) -> None:
    if not _announced:
        _LOG.warning(
            "compiling the planner's search once, which takes up to a minute on one core; it is cached in %s", folder
        )
    _announced.append(folder)
