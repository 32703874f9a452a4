"""Detection of changes to a model's Python state that its compiled graphs would ignore.

Changes through `.data` are detected only in a sample of a large tensor's bytes.
"""

from __future__ import annotations

import array
import enum
import functools
import numbers
import types
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.state_readers import (
    ATOMS,
    MODULE_ATTRIBUTES,
    PLAIN,
    SEQUENCES,
    UserFunctions,
    attributes_of,
    base_library_of,
    defaults_of,
    globals_of,
    has_state,
    is_installed,
    library_of,
    mentions,
    parts_of,
    rates_of,
    referent,
    variables_of,
)
from hydragraph.private.hooks_and_overrides import (
    global_hooks,
    hooks_of,
    number_of_hooks,
    number_of_tensor_hooks,
    version_of,
)
from hydragraph.private.module_internals import tables_of

_REMEDY = (
    "call hg.compile again after such a change, or pass values that change at every step as batch fields (example=)"
)

_PLAIN: tuple[type, ...] = (*PLAIN, range, slice, enum.Enum)
_NUMBERS = (numbers.Number, np.generic, bytearray, array.array)
_MISSING = object()
# Maximum bytes of a completely compared tensor; bytes of a larger tensor's sample.
_WHOLE, _SAMPLED = 1 << 14, 1 << 9
# Attributes that do not affect graphs.
_NOTES = frozenset({"_is_hf_initialized", "gradient_checkpointing", "generation_config", "warnings_issued"}) | {
    *("name_or_path", "architectures", "transformers_version", "dtype", "loss_type"),
    *("use_cache", "return_dict", "output_hidden_states", "output_attentions"),
    *("id2label", "label2id", "problem_type", "pad_token_id", "bos_token_id", "eos_token_id"),
}


@dataclass(slots=True)
class _Names:
    """Attributes or variables of an owner, such as a module or function, at compilation.

    Attributes:
        owner: returns the owner, or None if it no longer exists.
        plain: values that are compared directly.
        others: values of other types, converted by `_frozen`.
        known: all names, or None to ignore added names.
        kind: class of the owner; attributes added later are ignored unless this class mentions their names.
    """

    where: str
    owner: Callable[[], Any]
    read: Callable[[Any], Mapping[str, Any]]
    plain: dict[str, Any]
    others: dict[str, Any]
    known: frozenset[str] | None
    kind: type

    def check(self) -> None:
        owner = self.owner()
        if owner is None:
            return
        names = self.read(owner)
        for name, before in self.plain.items():
            value = names.get(name, _MISSING)
            # Identity accepts NaN; types separate 1, 1.0 and True.
            if value is not before and not (type(value) is type(before) and value == before):
                raise _changed(self.where, name, f"from {_shown(before)} to {_shown(value)}")
        for name, before in self.others.items():
            value = names.get(name, _MISSING)
            if _frozen(value) != before:
                raise _changed(self.where, name, f"and is {_shown(value)} now")
        if self.known is not None and names.keys() != self.known:
            for name in names:
                if name not in self.known and name not in _NOTES and mentions(self.kind, name):
                    raise _changed(self.where, name, f"from nothing to {_shown(names[name])}")


class _Tensor:
    def __init__(self, prefix: str, local: str, tensor: Tensor) -> None:
        self.name = f"{prefix}.{local}".removeprefix(".")
        self.local = local
        self.tensor = weakref.ref(tensor)
        self.learns = tensor.requires_grad
        self.state = _state(tensor)
        self.hooks = number_of_tensor_hooks(tensor)
        self.meta = tensor.is_meta


class _Module:
    """A module's tensors, children and hooks at compilation.

    Args:
        depends: whether results depend on the flag `training`.
        drops: whether `training` affects only dropout.
    """

    def __init__(self, name: str, module: nn.Module, depends: bool, drops: bool) -> None:
        parameters, buffers, children = tables_of(module)
        tables = (parameters, buffers)
        self.where = name or type(module).__name__
        self.module = weakref.ref(module)
        self.counts = (len(parameters), len(buffers), list(children))
        self.forward = (type(module), type(module).forward)
        self.children = [(n, None if child is None else weakref.ref(child)) for n, child in children.items()]
        self.tensors = [_Tensor(name, n, t) for table in tables for n, t in table.items() if t is not None]
        self.hooks = number_of_hooks(module)
        self.training = module.training if depends else None
        self.drops = drops

    def check(self, trains: bool) -> None:
        module = self.module()
        if module is None:
            return
        if (type(module), type(module).forward) != self.forward:
            raise _refused(self.where, "the module's class or the class's forward was replaced after hg.compile")
        if number_of_hooks(module) != self.hooks:
            for kind, hook in hooks_of(module):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise _refused(self.where, f"a {kind} ({name}) was registered after hg.compile")
        compared = self.training is not None and (trains or not self.drops)
        if compared and module.training is not self.training:
            what = f"the output of {type(module).__name__} depends on `training`"
            raise _refused(self.where, f"{what}, which was {self.training} at hg.compile and is {module.training} now")
        for part in self.tensors:
            tensor = part.tensor()
            if tensor is None:
                continue
            if tensor.requires_grad is not part.learns:
                what = f"requires_grad was {part.learns} at hg.compile and is {tensor.requires_grad} now"
                raise _refused(part.name, what)
            if number_of_tensor_hooks(tensor) != part.hooks:
                raise _refused(part.name, "a gradient hook was registered or removed after hg.compile")

    def check_parts(self, is_trained: Callable[[_Tensor, Tensor], bool]) -> None:
        """Raise Unsupported if a child or tensor was added, removed, replaced or edited, except by training."""
        module = self.module()
        if module is None:
            return
        parameters, buffers, children = tables_of(module)
        if self.counts != (len(parameters), len(buffers), list(children)):
            raise _refused(self.where, "a parameter, buffer or module was added, removed or moved after hg.compile")
        for name, child in self.children:
            if children.get(name, _MISSING) is not (None if child is None else child()):
                raise _refused(self.where, f"the module {name!r} was replaced after hg.compile")
        for part in self.tensors:
            tensor: Tensor | None = parameters.get(part.local, buffers.get(part.local))
            if tensor is None:
                raise _refused(part.name, "the tensor was removed after hg.compile")
            # Usually: the same object, version, address and bytes.
            if tensor is part.tensor() and _state(tensor) == part.state:
                continue
            # Weights may be freed, or replaced by trained values that hydragraph returned.
            freed = tensor.is_meta or not tensor.numel()
            if not (part.meta or freed or is_trained(part, tensor)):
                what = (
                    "the tensor was replaced or edited after hg.compile; only values of full_state_dict() may be loaded"
                )
                raise _refused(part.name, what)
            # The next check compares with the accepted tensor.
            part.tensor, part.state = weakref.ref(tensor), _state(tensor)


class CompiledState:
    """Python state that a step's results depend on, recorded at compilation.

    Args:
        buffers: buffers that steps compute with, by name.
    """

    def __init__(self, model: nn.Module, loss: Any, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = buffers
        self._handed_out: dict[str, int] = {}
        self._names: list[_Names] = []
        self._seen: set[int] = set()
        self._containers: dict[int, Any] = {}
        self._hooks = list(global_hooks())
        readers = UserFunctions(model, loss)
        named = list(model.named_modules())
        if isinstance(loss, nn.Module):
            named += [(f"loss.{name}".rstrip("."), module) for name, module in loss.named_modules()]
        self._reads_training = model.training and readers.depends_on_training_without_dropout
        own = readers.depends_on_training([m for _, m in named if library_of(type(m)) is None])
        own_drops = not readers.depends_on_training_without_dropout
        self._modules = [
            _Module(name, module, _depends_on_training(module, own), own_drops and _drops(module, own))
            for name, module in named
        ]
        for name, module in named:
            self._add_attributes(name or type(module).__name__, module, readers)
        self._add_reached("loss", loss, readers)
        self._add_code(readers)
        self._containers.clear()

    def refuse_evaluation(self) -> None:
        if self._reads_training:
            what = "the code of the model or loss reads `training`, but compiled graphs compute as in training"
            remedy = "compute the same in both modes, or evaluate the model outside hydragraph"
            raise Unsupported(what, where="evaluate", remedy=remedy)

    def check(self, trains: bool = True) -> None:
        if list(global_hooks()) != self._hooks:
            raise _refused("every module (torch.nn.modules.module)", "global hooks were changed after hg.compile")
        for module in self._modules:
            module.check_parts(self._is_trained)
            module.check(trains)
        for names in self._names:
            names.check()

    def changed_weights(self) -> str:
        try:
            for module in self._modules:
                module.check_parts(self._is_trained)
        except Unsupported as error:
            return f"{error.where}: {error.what}"
        return ""

    def digests(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        return {
            part.name: _digest(state[part.name].to(tensor.dtype))
            for module in self._modules
            for part in (module.tensors if module.module() is not None else ())
            if part.name in state and (tensor := part.tensor()) is not None
        }

    def hand_out(self, digests: Mapping[str, int]) -> None:
        """Record digests of trained values, which the user may load into the model."""
        self._handed_out.update(digests)

    def _is_trained(self, part: _Tensor, tensor: Tensor) -> bool:
        ours = self._buffers.get(part.name)
        if ours is not None and ours.shape == tensor.shape and torch.equal(ours.to(tensor), tensor):
            return True
        return part.name in self._handed_out and self._handed_out[part.name] == _digest(tensor)

    def _add_attributes(self, where: str, owner: Any, readers: UserFunctions) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        # A library's code may read any attribute, so all are recorded except notes; the user's code
        # is known (`readers`), so only what it may read.
        whole = isinstance(owner, nn.Module) or not is_installed(type(owner)) or type(owner).__name__.endswith("Config")
        library = base_library_of(type(owner)) if whole else None
        values = {}
        for name, value in attributes_of(owner).items():
            note = name in _NOTES or (library == "transformers" and name.startswith("_") and name != "_loss_function")
            if name not in MODULE_ATTRIBUTES and (readers.reads(name) if library is None else not note):
                values[name] = value
        self._add(where, owner, attributes_of, values, readers, frozenset(attributes_of(owner)))

    def _add(
        self,
        where: str,
        owner: Any,
        read: Callable[[Any], Mapping[str, Any]],
        values: Mapping[str, Any],
        readers: UserFunctions,
        known: frozenset[str] | None = None,
    ) -> None:
        """Record `values`, a part of `read(owner)`, and the objects that they refer to."""
        # Functions and partials support weak references without `__weakref__`.
        weak = hasattr(owner, "__weakref__") or isinstance(owner, (types.FunctionType, functools.partial))
        reference: Callable[[], Any] = weakref.ref(owner) if weak else lambda: owner
        plain = {n: v for n, v in values.items() if isinstance(v, _PLAIN)}
        others = {n: _frozen(v) for n, v in values.items() if n not in plain}
        if plain or others or known is not None:
            self._names.append(_Names(where, reference, read, plain, others, known, type(owner)))
        for name, value in values.items():
            self._add_reached(f"{where}.{name}", value, readers)

    def _add_reached(self, where: str, value: Any, readers: UserFunctions) -> None:
        value = referent(value)
        if parts := parts_of(value):
            if id(value) in self._containers:
                return
            self._containers[id(value)] = value
            for key, part in parts.items():
                self._add_reached(f"{where}[{key!r}]", part, readers)
        while isinstance(value, functools.partial):
            self._add(where, value, _arguments, _arguments(value), readers)
            value = value.func
        owner = value.__self__ if isinstance(value, types.MethodType) else value
        if isinstance(owner, nn.Module):
            for name, module in owner.named_modules():
                place = f"{where}.{name}".rstrip(".")
                if id(module) not in self._seen:
                    made = _Module(place, module, mentions(type(module), "training"), drops=False)
                    made.tensors = [tensor for tensor in made.tensors if not tensor.learns]
                    self._modules.append(made)
                self._add_attributes(place, module, readers)
        elif has_state(owner) or (isinstance(owner, Tensor) and not isinstance(owner, nn.Parameter)):
            self._add_attributes(where, owner, readers)

    def _add_code(self, readers: UserFunctions) -> None:
        for kind in readers.classes:
            read = {n for k in kind.__mro__ if k in readers.classes for n in vars(k) if readers.reads(n)}
            # `_MISSING`: the class does not define the name itself, so defining it is a change.
            values = {n: vars(kind).get(n, _MISSING) for n in read if not n.startswith("__")}
            self._add(f"class {kind.__name__}", kind, attributes_of, values, readers)
        for module, names in readers.modules.items():
            values = {n: v for n, v in vars(module).items() if n in names and not isinstance(v, types.ModuleType)}
            self._add(f"module {module.__name__}", module, vars, values, readers)
        for function in readers.functions.values():
            name = function.__qualname__.replace(".<locals>", "")
            values = {n: v for n, v in vars(function).items() if readers.reads(n)}
            self._add(f"attributes of {name}", function, attributes_of, values, readers)
            self._add(f"defaults of {name}", function, _defaults, _defaults(function), readers)
            self._add(f"variables of {name}", function, _variables, _variables(function), readers)
            globals_read = {n: v for n, v in globals_of(function).items() if not isinstance(v, types.ModuleType)}
            self._add(f"globals of {name}", function.__globals__, lambda scope: scope, globals_read, readers)


def _depends_on_training(module: nn.Module, own: bool) -> bool:
    library = base_library_of(type(module))
    rates = rates_of(module)
    if library_of(type(module)) is None and (own or library is None):
        return own or any(rates.values())
    if rates or library != "torch":
        return any(rates.values())
    return mentions(type(module), "training")


def _drops(module: nn.Module, own: bool) -> bool:
    return any(rates_of(module).values()) or (own and library_of(type(module)) is None)


def _state(tensor: Tensor) -> tuple[int, int, int]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return version_of(tensor), 0, 0
    # Writes through `.data` do not change the version: CPU tensors also get a checksum.
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    if tensor.device.type != "cpu" or lazy or not tensor.is_contiguous():
        return version_of(tensor), tensor.data_ptr(), 0
    values = tensor.detach().view(-1).view(torch.uint8)
    # An odd step samples every byte of an element in turn: for 1 MiB, 1048576 // 512 | 1 = 2049.
    step = 1 if values.numel() <= _WHOLE else values.numel() // _SAMPLED | 1
    return version_of(tensor), tensor.data_ptr(), zlib.crc32(values[::step].numpy().tobytes())


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _frozen(value: Any, inside: frozenset[int] = frozenset()) -> Any:
    value = referent(value)
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, Tensor):
        return id(value), *_state(value)
    if isinstance(value, np.ndarray):
        return id(value), zlib.crc32(value.tobytes())
    if isinstance(value, _NUMBERS):
        return kind, repr(value)
    # Objects count by identity, as do recursive containers.
    if not isinstance(value, (Mapping, *SEQUENCES)) or id(value) in inside:
        return id(value)
    parts = list(value)
    inside |= {id(value)}
    if isinstance(value, Mapping):
        return kind, _frozen(parts, inside), _frozen(list(value.values()), inside)
    collect = frozenset if isinstance(value, (set, frozenset)) else tuple
    # The types separate 1, 1.0 and True, which are equal.
    kinds = collect(map(type, parts))
    if ATOMS.issuperset(kinds):
        return kind, kinds, collect(parts)
    return kind, collect(_frozen(part, inside) for part in parts)


def _arguments(call: functools.partial[Any]) -> Mapping[str, Any]:
    return {**call.keywords, **{f"argument {i}": value for i, value in enumerate(call.args)}}


def _defaults(function: types.FunctionType) -> Mapping[str, Any]:
    return {**defaults_of(function), "__code__": function.__code__}


def _variables(function: types.FunctionType) -> Mapping[str, Any]:
    return {name: value for name, value in variables_of(function).items() if not isinstance(value, nn.Parameter)}


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    text = repr(value)
    if isinstance(value, (*_PLAIN, *SEQUENCES, dict)) and "0x" not in text and len(text) < 80:
        return text
    return str(getattr(value, "__qualname__", None) or f"another {type(value).__name__}")


def _refused(where: str, what: str) -> Unsupported:
    return Unsupported(what, where=where, remedy=_REMEDY)


def _changed(where: str, name: str, how: str) -> Unsupported:
    return _refused(where, f"{name!r} was changed after hg.compile {how}, but compiled graphs still use the old value")
