"""Pickling of objects by name if other processes can import them, else by value.

Other processes cannot import the `__main__` of a notebook, `python -i` or `-c`, or stdin. Its definitions, and all
closures and lambdas, are sent by value with cloudpickle.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle


def sent(value: object) -> bytes:
    """Return bytes for `pickle.loads` in a process that this one starts."""
    if _can_be_imported(sys.modules["__main__"]):
        # A class sent by value would differ from its module's.
        with contextlib.suppress(Exception):
            return pickle.dumps(value)
    return bytes(cloudpickle.dumps(value))


def _can_be_imported(main: ModuleType) -> bool:
    named = getattr(main, "__spec__", None) is not None  # python -m
    path = getattr(main, "__file__", None)
    # stdin's is "<stdin>"
    is_file = path is not None and Path(path).is_file()
    return (named or is_file) and not sys.flags.interactive


@contextlib.contextmanager
def nothing_else_imported() -> Iterator[None]:
    """Keep new processes from importing a `__main__` whose definitions are sent by value."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or _can_be_imported(main):
        yield
        return
    # multiprocessing would run the file in the new process
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path
