"""Rejection of features that a trace would omit or turn into constants."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Number
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.state_readers import (
    MODULE_ATTRIBUTES,
    UserFunctions,
    attributes_of,
    globals_of,
    is_installed,
    library_of,
    referent,
    variables_of,
)
from hydragraph.private.hooks_and_overrides import (
    global_hooks,
    hooks_of,
    hooks_of_tensor,
    is_wrapper,
    memory_of,
    noticing,
    own_backward_of,
    own_backward_refused,
    own_functions_of,
    shares_elements_with_itself,
)
from hydragraph.private.module_internals import BATCH_NORMS

# Reason and remedy for modules that compute over the packed row.
_UNPACKED: Mapping[type[nn.Module], tuple[str, str]] = {
    nn.RNNBase: (
        "passes a state from each token of a packed row to the next, across sequences",
        "use hydragraph.varlen_attention to mix tokens, or an nn.GRUCell to gate each token",
    ),
    nn.EmbeddingBag: (
        "finds bags by offsets in the packed row",
        "use nn.Embedding on indices [T, bag size], and sum or average the result over dimension 1",
    ),
}


# An attribute of loaded weights
_OF_TRANSFORMERS = "_is_hf_initialized"
# Maximum elements; larger arrays are not compared
_LARGEST = 1 << 16
_MOST = 256


def refuse_unseen(model: nn.Module) -> None:
    for kind, hook in global_hooks():
        raise _hook(kind, hook, "every module (torch.nn.modules.module)")
    for name, module in model.named_modules():
        where = name or type(model).__name__
        for kind, hook in hooks_of(module):
            raise _hook(kind, hook, where)
        _refuse_module(module, where)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for kind, hook in hooks_of_tensor(tensor):
            raise _hook(kind, hook, name)
        own = own_functions_of(tensor)
        if own is not None:
            what = f"the tensor's class {own} overrides operators"
            remedy = "use an nn.Parameter or a plain buffer, and move the computation of the class into forward"
            raise Unsupported(what, where=name, remedy=remedy)
    _refuse_attributes(model)
    _refuse_common_memory(model)


def _refuse_attributes(model: nn.Module) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    attributes = [(n, attribute) for n, tensor in named for attribute in vars(tensor) if attribute != _OF_TRANSFORMERS]
    read = UserFunctions(model, None).names if attributes else set()
    for name, attribute in attributes:
        if attribute in read:
            what = f"forward may read the tensor's attribute {attribute!r}, which tensors in a trace do not have"
            remedy = "make it an attribute of the module that has the tensor"
            raise Unsupported(what, where=name, remedy=remedy)


def _refuse_common_memory(model: nn.Module) -> None:
    parameters = list(model.named_parameters())
    learnt = dict(parameters)
    for name, parameter in parameters:
        if shares_elements_with_itself(parameter):
            raise _in_common(name, "itself: it was expanded, so several elements share memory")
    places = [(*place, n) for n, t in [*parameters, *model.named_buffers()] if (place := memory_of(t)) is not None]
    # In order of addresses, a tensor that overlaps earlier ones overlaps the one that ends last.
    end, furthest = 0, ""
    for first, after, name in sorted(places):
        if first < end and (name in learnt or furthest in learnt):
            raise _in_common(name, f"{furthest!r}: an update of one tensor would change the other")
        if after > end:
            end, furthest = after, name


def _in_common(name: str, whose: str) -> Unsupported:
    remedy = "tie parameters by assigning the same nn.Parameter, or give this tensor its own memory (.clone())"
    return Unsupported(f"the tensor shares memory with {whose}", where=name, remedy=remedy)


def _refuse_module(module: nn.Module, where: str) -> None:
    if is_wrapper(module):
        remedy = "pass the wrapped module (`_orig_mod` of a compiled module, `module` of a parallel module)"
        raise Unsupported(f"{type(module).__name__} wraps another module", where=where, remedy=remedy)
    if "_hf_hook" in vars(module):
        what = f"accelerate's {type(module._hf_hook).__name__} wraps forward"
        remedy = "call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        raise Unsupported(what, where=where, remedy=remedy)
    for kind, (why, remedy) in _UNPACKED.items():
        if isinstance(module, kind):
            raise Unsupported(f"{type(module).__name__} {why}", where=where, remedy=remedy)
    if isinstance(module, nn.Embedding):
        for option in ("scale_grad_by_freq", "max_norm", "sparse"):
            if getattr(module, option):
                dense = "makes the gradient a sparse tensor"
                why = dense if option == "sparse" else "makes the result depend on all tokens of a batch"
                remedy = f"build the embedding without {option}"
                raise Unsupported(f"{option}={getattr(module, option)} {why}", where=where, remedy=remedy)
    if isinstance(module, BATCH_NORMS) and (module.training or not module.track_running_stats):
        what = f"{type(module).__name__} computes statistics over the tokens of a batch and changes buffers"
        remedy = "use a norm over features (nn.LayerNorm, nn.RMSNorm), or freeze its statistics with .eval()"
        raise Unsupported(what, where=where, remedy=remedy)


def _hook(kind: str, hook: Any, where: str) -> Unsupported:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    remedy = "remove the hook with the handle that its registration returned, or move its computation into forward"
    what = f"a {kind} ({name}) is registered, but a captured graph does not run it"
    return Unsupported(what, where=where, remedy=remedy)


def refuse_own_backward(result: Tensor, where: str) -> None:
    name = own_backward_of(result)
    if name is not None:
        what, remedy = own_backward_refused(name)
        raise Unsupported(what, where=where, remedy=remedy)


@contextlib.contextmanager
def watched(where: str, module: nn.Module) -> Iterator[None]:
    """Raise Unsupported if a forward has custom backwards or hooks, draws Python random numbers, or changes state."""
    # Compare numbers, other state and random generators with those after the forward.
    random_before = _random_state()
    numbers = _numbers(module)
    places = _places_of(module)
    state = _kept_state(places)
    with noticing(lambda what, remedy: Unsupported(what, where=where, remedy=remedy)):
        yield
    for name, number in _numbers(module).items():
        owner = module.get_submodule(name.rpartition(".")[0])
        # Library modules may add attributes
        users = library_of(type(owner)) is None
        if numbers.get(name, None if users else number) != number:
            change = f"from {numbers.get(name, 'nothing')} to {number}"
            what = f"forward changes {name!r} {change}, but a captured graph uses one fixed value"
            remedy = "compute only from the arguments: keep no state in attributes"
            raise Unsupported(what, where=where, remedy=remedy)
    changed = [name for name, text in _kept_state(places).items() if state.get(name, text) != text]
    if changed:
        what = f"forward or loss changes {changed[0]!r}, but a captured graph would not"
        remedy = "compute only from the arguments: keep no counters, iterators or generators"
        raise Unsupported(what, where=where, remedy=remedy)
    if _random_state() != random_before:
        what = "forward draws random numbers from Python or NumPy, which would be constants in a captured graph"
        raise Unsupported(what, where=where, remedy="remove these random numbers")


def _numbers(module: nn.Module) -> dict[str, float]:
    return {
        f"{prefix}.{name}".removeprefix("."): value
        for prefix, child in module.named_modules()
        for name, value in vars(child).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value  # excludes NaN
    }


_Place = tuple[str, Callable[[], object]]


def _kept_state(places: Sequence[_Place]) -> dict[str, str]:
    state: dict[str, str] = {}
    seen: dict[int, object] = {}
    for place, read in places:
        state |= _state_in(place, read(), seen)
    return state


def _places_of(module: nn.Module) -> list[_Place]:
    loss = vars(module).get("_loss")
    readers = UserFunctions(module, loss)
    owners = {prefix: child for prefix, child in module.named_modules() if library_of(type(child)) is None}
    places: list[_Place] = [(prefix, partial(_attributes_of, child)) for prefix, child in owners.items()]
    places += [("loss", partial(attributes_of, loss))]
    for function in readers.functions.values():
        name = function.__qualname__
        places += [(name, partial(vars, function))]
        places += [(f"{name}'s {n}", partial(_variable, function, n)) for n in variables_of(function)]
        places += [(f"the global {n}", partial(function.__globals__.get, n)) for n in globals_of(function)]
    return [*places, *((kind.__name__, partial(vars, kind)) for kind in readers.classes)]


def _variable(function: FunctionType, name: str) -> object:
    return variables_of(function).get(name)


def _attributes_of(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}


def _state_in(place: str, value: object, seen: dict[int, object], depth: int = 4) -> Iterator[tuple[str, str]]:
    value = referent(value)
    if isinstance(value, bool | Tensor | nn.Module | FunctionType | ModuleType) or id(value) in seen:
        return
    if isinstance(value, str | bytes | bytearray | Number | np.generic):
        yield place, repr(value)
        return
    # The reference prevents the reuse of the id.
    seen[id(value)] = value
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, np.ndarray):
        yield place, str(hash(value.tobytes())) if value.size <= _LARGEST else ""
    elif isinstance(value, random.Random):
        yield place, str(hash(value.getstate()))
    elif isinstance(value, np.random.Generator):
        yield place, str(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        yield place, str([str(part) for part in value.get_state()])
    elif isinstance(value, (list, tuple, set, collections.deque)):
        yield f"the length of {place}", str(len(value))
        for i, part in enumerate([] if isinstance(value, set) or not depth else list(value)[:_MOST]):
            yield from _state_in(f"{place}[{i}]", part, seen, depth - 1)
    elif depth and (isinstance(value, (Mapping, SimpleNamespace)) or not is_installed(kind)):
        parts = value if isinstance(value, Mapping) else attributes_of(value)
        for name, part in list(parts.items())[:_MOST]:
            yield from _state_in(f"{place}.{name}".removeprefix("."), part, seen, depth - 1)


def _random_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
