"""Python versions of compiled functions, because compiling a function that only a test calls takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock


@contextmanager
def uncompiled(*modules: ModuleType) -> Iterator[None]:
    """Replace all compiled functions of these modules by their Python versions, including in calls among them."""
    with ExitStack() as patches:
        for module in modules:
            functions = {name: value.py_func for name, value in vars(module).items() if hasattr(value, "py_func")}
            patches.enter_context(mock.patch.multiple(module, **functions))
        yield
