"""Text descriptions of a model's parts, equal in every process."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from hydragraph.errors import type_text
from hydragraph.frontend.state_readers import MODULE_ATTRIBUTES, PLAIN, file_of

_KNOWN = ("torch", "transformers")
_HOOKS = tuple(name for name in MODULE_ATTRIBUTES if name.endswith("_hooks"))
# Omitted attributes: tensors, modules, hooks, and a method for text generation.
_HELD = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS}
    | {"base_model_prepare_inputs_for_generation"}
)


class Indescribable(Exception):  # noqa: N818
    """An object that text cannot describe."""


def attributes(name: str, module: nn.Module) -> list[tuple[str, str]]:
    """Return a module's attributes except `_HELD` as sorted (name, text) pairs, or raise Indescribable."""
    attribute_texts = []
    for attribute, value in vars(module).items():
        if attribute in _HOOKS and value:
            raise Indescribable(f"{name or type(module).__name__} has hooks ({attribute})")
        if attribute not in _HELD:
            try:
                attribute_texts.append((attribute, _value(value)))
            except Indescribable as error:
                raise Indescribable(f"{name or type(module).__name__}.{attribute}: {error}") from None
    return sorted(attribute_texts)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _value(value: object) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}{sorted(map(_value, value))}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{[*map(_value, value)]}"
    if isinstance(value, dict):
        # Peft records devices
        return repr([(_value(k), _value(v)) for k, v in value.items() if k != "device_map"])
    if isinstance(value, FunctionType):
        return described_function(value)
    if isinstance(value, functools.partial):
        return f"partial{_value((value.func, value.args, value.keywords))}"
    if type(value).__module__.startswith("peft.") and not isinstance(value, type):
        # An adapter's config
        return f"{type(value).__module__}.{type(value).__qualname__}{_value(vars(value))}"
    if isinstance(value, MethodType):
        return f"{described_function(value.__func__)} of {type(value.__self__).__qualname__}"
    if isinstance(value, type) or _is_known(type(value).__module__):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value).__module__ == "builtins" and callable(value) and "0x" not in repr(value):
        return repr(value)
    raise Indescribable(f"{type_text(value)} has no unique description")


def described_function(function: Callable[..., Any]) -> str:
    """Describe a library's function by name, and others also by source; raise Indescribable for closures."""
    if isinstance(function, functools.partial):
        return _value(function)
    if not isinstance(function, FunctionType):
        raise Indescribable(f"{type_text(function)} has no unique description")
    if function.__closure__:
        raise Indescribable(f"the function {function.__qualname__} closes over values")
    name = f"{function.__module__}.{function.__qualname__}"
    covered = _is_known(function.__module__) or function.__module__.partition(".")[0] == "hydragraph"
    if covered and not hasattr(function, "__wrapped__"):
        return name
    # functools.wraps copies the name of another function
    code = function.__code__
    return f"{name} {_digest(code.co_filename)}:{code.co_firstlineno}"


def source_digest(thing: Any) -> str:
    file = file_of(thing)
    if not file:
        raise Indescribable(f"{thing.__module__}.{thing.__qualname__} has no source file")
    return _digest(file)


@functools.cache
def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise Indescribable(f"{file} cannot be read") from error
