"""numba's compiler, and its cache on disk, which may be damaged or refuse to be written without anything going wrong.

numba by itself fails to import a module where nothing can be cached, raises pickle's errors for a truncated file, and
runs machine code of which a bit has changed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

_LOG = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size

# What this process has warned of, and whether it has said that it compiles.
_said: list[str] = []
_announced: list[str] = []


def compiled(function: Callable[..., Any], quick: bool = False) -> Any:
    """Have numba compile a function when it is first called, once per installation; a decorator.

    Args:
        quick: it takes a second at most: nothing is said before.
    """
    # numpy's error model: a division by zero is infinite, as in the formulas, and no check is compiled into the loops.
    dispatcher: Any = njit(error_model="numpy")(function)
    try:
        dispatcher._cache = _Cache(function, quick)  # what njit(cache=True) sets, with a class of ours
    except (RuntimeError, OSError):
        _say("numba finds no place to keep what it compiles: every process compiles again (set NUMBA_CACHE_DIR)")
    return dispatcher


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """What was written is followed by its hash, which pickle does not read."""

    def _dump(self, value: Any) -> bytes:
        # pickle stops at the end of its own data, so a file with a hash behind it stays readable by numba itself.
        data: bytes = super()._dump(value)
        return data + hashlib.sha256(data).digest()

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
            raise ValueError(f"{name} is not what was written")
        return super()._load_data(name)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Forgets what it cannot read, and does without what it cannot write."""

    def __init__(self, function: Callable[..., Any], quick: bool) -> None:
        super().__init__(function)
        self._quick = quick
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def load_overload(self, *arguments: Any) -> Any:
        """Return what was compiled for a signature; None where it has to be compiled."""
        try:
            found = super().load_overload(*arguments)
            if found is None and not self._quick:
                _announce(self.cache_path)
            return found
        except Exception as error:  # a damaged pickle may raise anything
            _say(f"numba's cache in {self.cache_path} is damaged ({type(error).__name__}: {error}): compiling again")
            # Without its index, what is damaged is not looked at again by the next process.
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, *arguments: Any) -> None:
        """Keep what was compiled, if that is possible."""
        try:
            super().save_overload(*arguments)
        except Exception as error:
            _say(f"numba's cache in {self.cache_path} cannot be written ({error}): every process compiles again")


def _say(sentence: str) -> None:
    """Write the first sentence of a process; what else goes wrong follows from the same."""
    if not _said:
        _LOG.warning("%s", sentence)
    _said.append(sentence)


def _announce(folder: str) -> None:
    """Say before a process first waits for numba what it waits for; all there is to compile takes up to a minute."""
    if not _announced:
        _LOG.warning("compiling the planner's search, once: up to a minute of one core; it is kept in %s", folder)
    _announced.append(folder)
