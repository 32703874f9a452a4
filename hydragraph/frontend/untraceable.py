"""Rejection of features that a trace would omit or turn into constants."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.state_readers import cells_of, library_of
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

# Modules that compute with the whole packed row -> reason and remedy.
_UNPACKED: Mapping[type[nn.Module], tuple[str, str]] = {
    nn.RNNBase: (
        "passes a state from each token of a packed row to the next, across sequences",
        "use hydragraph.varlen_attention to mix tokens, or an nn.GRUCell to gate each token",
    ),
    nn.EmbeddingBag: (
        "finds its bags by their offsets in the packed row",
        "use nn.Embedding, and sum or average the result over the bag's dimension",
    ),
}


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
    _refuse_common_memory(model)


def _refuse_common_memory(model: nn.Module) -> None:
    parameters = list(model.named_parameters())
    learnt = dict(parameters)
    for name, parameter in parameters:
        if shares_elements_with_itself(parameter):
            raise _in_common(name, "itself: it was expanded, so its elements have the same memory")
    places = [(*place, n) for n, t in [*parameters, *model.named_buffers()] if (place := memory_of(t)) is not None]
    # In address order, a tensor overlaps earlier tensors only if it overlaps the one that ends last.
    end, furthest = 0, ""
    for first, after, name in sorted(places):
        if first < end and (name in learnt or furthest in learnt):
            raise _in_common(name, f"{furthest!r}: an update of one tensor would change the other")
        if after > end:
            end, furthest = after, name


def _in_common(name: str, whose: str) -> Unsupported:
    remedy = "tie parameters by assigning the same nn.Parameter, or give this tensor its own memory (.clone())"
    return Unsupported(f"it shares memory with {whose}", where=name, remedy=remedy)


def _refuse_module(module: nn.Module, where: str) -> None:
    if is_wrapper(module):
        remedy = "pass the wrapped module (`_orig_mod` of a compiled module, `module` of a parallel module)"
        raise Unsupported(f"{type(module).__name__} wraps another module", where=where, remedy=remedy)
    if "_hf_hook" in vars(module):
        what = f"accelerate's {type(module._hf_hook).__name__} wraps its forward"
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
    return Unsupported(
        f"a {kind} ({name}) is registered, but a captured graph does not run it", where=where, remedy=remedy
    )


def refuse_own_backward(result: Tensor, where: str) -> None:
    name = own_backward_of(result)
    if name is not None:
        what, remedy = own_backward_refused(name)
        raise Unsupported(what, where=where, remedy=remedy)


@contextlib.contextmanager
def watched(where: str, module: nn.Module) -> Iterator[None]:
    """Raise Unsupported if a forward has custom backwards or hooks, draws Python random numbers, or changes state."""
    random_before = _random_state()
    numbers = _numbers(module)
    state = _kept_state(module)
    with noticing(lambda what, remedy: Unsupported(what, where=where, remedy=remedy)):
        yield
    for name, number in _numbers(module).items():
        owner = module.get_submodule(name.rpartition(".")[0])
        users = library_of(type(owner)) is None  # library modules may add attributes
        if numbers.get(name, None if users else number) != number:
            change = f"from {numbers.get(name, 'nothing')} to {number}"
            what = f"forward changes {name!r} {change}, but a captured graph uses one fixed value"
            remedy = "compute only from the arguments: keep no state in attributes"
            raise Unsupported(what, where=where, remedy=remedy)
    changed = [name for name, text in _kept_state(module).items() if state.get(name, text) != text]
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


def _kept_state(module: nn.Module) -> dict[str, str]:
    state = {}
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if not name.startswith("_") and library_of(type(child)) is None:
                state[f"{prefix}.{name}".removeprefix(".")] = _state_of(value)
    loss = vars(module).get("_loss")
    for name, value in getattr(loss, "__dict__", {}).items():
        state[f"loss.{name}"] = _state_of(value)
    function = getattr(loss, "__func__", loss)
    if isinstance(function, FunctionType):
        state |= {f"loss's {name}": _state_of(cell.cell_contents) for name, cell in cells_of(function).items()}
        names = function.__code__.co_names
        state |= {f"the global {name}": _state_of(function.__globals__.get(name)) for name in names}
    return state


def _state_of(value: object) -> str:
    if isinstance(value, dict):
        return str([(str(key), _state_of(part)) for key, part in value.items()])
    if isinstance(value, list | tuple | collections.deque):
        return str([_state_of(part) for part in value])
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str([str(part) for part in value.get_state()])
    if isinstance(value, int | float | str | itertools.count):
        return repr(value)
    return ""


def _random_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
