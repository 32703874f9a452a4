"""What goes to another process of this host, pickled: by name where that process can import it, else by value.

A rank is a process of its own, which imports the module of a function that it is given. It cannot where somebody works
in a notebook, at `python -i`, with `-c` or from stdin: there `__main__` is no file. What is defined there is sent by
value, by cloudpickle, and so are closures and lambdas wherever they are.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle  # type: ignore[import-untyped]


def sent(value: object) -> bytes:
    """Return a value as bytes that `pickle.loads` reads in a process that was started from this one.

    Raises:
        Exception: whatever pickle raises for what lives in one process only, such as an open file or a lock.
    """
    if _can_be_imported(sys.modules["__main__"]):
        # By name where that is possible: a class that came by value would be another one than that of its module.
        with contextlib.suppress(Exception):
            return pickle.dumps(value)
    return bytes(cloudpickle.dumps(value))


def _can_be_imported(main: ModuleType) -> bool:
    """Say whether a new process can import all of `__main__`: it is a file, and nothing is added to it by hand."""
    named = getattr(main, "__spec__", None) is not None  # python -m
    path = getattr(main, "__file__", None)
    is_file = path is not None and Path(path).is_file()  # stdin's is "<stdin>"
    return (named or is_file) and not sys.flags.interactive


@contextlib.contextmanager
def nothing_else_imported() -> Iterator[None]:
    """Let processes that start now leave this one's `__main__` alone where what is defined in it goes by value."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or _can_be_imported(main):
        yield
        return
    del main.__file__  # by which multiprocessing would have them run it
    try:
        yield
    finally:
        main.__file__ = path
