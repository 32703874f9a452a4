"""Detection of blocks that run the same operators on the meta device."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.block_keywords import keywords_of_block
from hydragraph.frontend.functional_graph import changes
from hydragraph.frontend.module_digest import LAYER_INDEX
from hydragraph.frontend.skeleton import BlockCall, FlatBlock
from hydragraph.frontend.untraceable import refuse_own_backward, watched
from hydragraph.private.argument_trees import TorchDispatchMode, tree_flatten, tree_unflatten
from hydragraph.private.tracing import meta_as_cpu, symbol_name

# Maximum elements; larger constants are not compared
_LARGEST = 1 << 20


def kind_of(call: BlockCall, hints: dict[str, int]) -> str | None:
    """Return a digest of the operators that a block runs, or None if they are unknown."""
    notes = _noted(call, hints)
    return None if notes is None else hashlib.sha256("\n".join(notes).encode()).hexdigest()


def is_without_index(call: BlockCall, hints: dict[str, int]) -> bool:
    plain = _noted(call, hints)
    with ExitStack() as indices:
        # With an index that raises an error when used, the operators must stay the same.
        for attributes in map(vars, call.module.modules()):
            unusable = {name: _Nowhere() for name in LAYER_INDEX if name in attributes}
            indices.enter_context(mock.patch.dict(attributes, unusable))
        try:
            return plain is not None and _noted(call, hints) == plain
        except Unsupported:
            return False


class _Nowhere:
    def _used(self, *_: object) -> Any:
        raise TypeError("a layer's index is used")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __hash__ = __bool__ = __int__ = __index__ = __float__ = __str__ = __repr__ = __format__ = _used


def refuse_state(call: BlockCall, hints: dict[str, int]) -> None:
    _refuse_difference(_noted(call, hints), _noted(call, hints), call.name)


def refuse_state_around(
    module: nn.Module, opaque: AbstractContextManager[None], batch: Mapping[str, Tensor], where: str
) -> None:
    """Raise Unsupported if two runs of the model differ.

    Args:
        opaque: replaces the blocks, which is faster but may fail.
    """
    # Try the fast run; if the opaque blocks make it fail, run the real blocks.
    for context in (opaque, nullcontext()):
        notes = []
        replaced: list[str] = []
        try:
            with meta_as_cpu(), context:
                # A first call may create state
                module(batch)
                before = _tensors_of(module)
                for _ in range(2):
                    noted = _Notes(module, list(batch.values()))
                    with noted:
                        result = module(batch)
                    notes.append(noted.all(result))
                replaced = [name for name, tensor in _tensors_of(module).items() if before.get(name) is not tensor]
        except Unsupported:
            return
        # `opaque` or the model failed; a model's failure recurs in the trace.
        except Exception:
            continue
        if replaced:
            raise changes(replaced[0].removeprefix("model."), where)
        refuse_own_backward(result, where)
        _refuse_difference(notes[0], notes[1], where)
        return


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def refuse_state_between(module: nn.Module, blocks: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> None:
    """Raise Unsupported if a block reads a value that the model changes between blocks.

    A block is traced after the model has run, so its graph would contain the final value.
    """
    calls: list[tuple[int, list[str] | None, Callable[[], tuple[Any, list[str] | None]]]] = []

    def noting(number: int, block: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **keywords: Any) -> Any:
            again = functools.partial(_called_with_notes, block, own, arguments, keywords)
            result, lines = again()
            calls.append((number, lines, again))
            return result

        return forward

    try:
        with meta_as_cpu(), ExitStack() as replaced:
            # A first call may create state
            module(batch)
            for number, block in enumerate(blocks):
                forward = {"forward": noting(number, block, block.forward)}
                replaced.enter_context(mock.patch.dict(vars(block), forward))
            module(batch)
        with meta_as_cpu():
            repeated = [(again()[1], again()[1]) for _, _, again in calls]
    except Exception:
        return
    for (number, before, _), (after, later) in zip(calls, repeated, strict=True):
        # The block repeats itself after the model has run (after == later), but differed within the
        # model (before): the model changed a value that the block reads.
        if None not in (before, after) and before != after == later:
            what = "the block reads a value that the model changes between blocks, but is traced with the final value"
            raise Unsupported(what, where=f"layer.{number}", remedy="pass this value to the block as an argument")


def _called_with_notes(
    block: nn.Module, forward: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, list[str] | None]:
    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        return torch.empty_like(value, requires_grad=value.requires_grad)

    leaves, spec = tree_flatten((arguments, keywords))
    leaves = list(map(fresh, leaves))
    arguments, keywords = tree_unflatten(leaves, spec)
    notes = _Notes(block, [leaf for leaf in leaves if isinstance(leaf, Tensor)], detaches=False)
    with notes, keywords_of_block(keywords):
        result = forward(*arguments, **keywords)
    return result, notes.all(tree_flatten(result)[0])


def _refuse_difference(first: list[str] | None, second: list[str] | None, where: str) -> None:
    if first is None or second is None or first == second:
        return
    differing = next((b for a, b in zip(first, second, strict=False) if a != b), "the calls run different operators")
    what = f"forward differs between calls ({differing[:120]}), but a captured graph repeats the traced call"
    remedy = "compute only from the arguments: remove counters, clocks and Python's random numbers"
    raise Unsupported(what, where=where, remedy=remedy)


def _noted(call: BlockCall, hints: dict[str, int]) -> list[str] | None:
    arguments: list[Tensor] = []
    for tensor in call.inputs:
        # Sizes of the example; sizes computed from T or N + 1 have no hint.
        sizes = [hints.get(name) if (name := symbol_name(s)) else int(s) for s in tensor.shape]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        grad = tensor.is_floating_point()
        arguments.append(torch.empty(known, dtype=tensor.dtype, device="meta", requires_grad=grad))
    notes = _Notes(call.module, arguments)
    try:
        with watched(call.name, call.module), notes:
            result = FlatBlock(call)(*arguments)
    except Unsupported:
        raise
    except Exception:
        return None
    refuse_own_backward(result, call.name)
    return notes.all(result)


class _Notes(TorchDispatchMode):
    """Mode that records a block's operators.

    Args:
        detaches: whether to record `detach`, which autograd also calls for tensors saved by a checkpoint.
    """

    def __init__(self, block: nn.Module, inputs: list[Tensor], detaches: bool = True) -> None:
        super().__init__()
        self._detaches = detaches
        self.lines: list[str] = []
        # Whether a tensor has an unknown origin and values that cannot be compared
        self.unknown = False
        self._names: dict[int, str] = {}
        # References prevent the reuse of ids
        self._kept: list[Tensor] = []
        self._numbered = 0
        # _names: id of a tensor -> name of its parameter or buffer, "input 0", or "%1" for a
        # result.
        tensors = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            first_name = self._names.setdefault(id(tensor), name)
            self.lines.append(f"{name} {first_name} {list(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")
        for i, tensor in enumerate(inputs):
            self._names[id(tensor)] = f"input {i}"
            self.lines.append(f"input {i} {list(tensor.shape)} {tensor.dtype}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before `func`, which may overwrite operands
        operands = f"{self.text(args)} {self.text(kwargs or {})}"
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.detach.default and not self._detaches:
            self._names[id(result)] = self.text(args[0])
            self._kept.append(result)
            return result
        self._name(result)
        self.lines.append(f"{func} {operands} {torch.is_grad_enabled()} {_form(result)}")
        return result

    def all(self, result: Any) -> list[str] | None:
        return None if self.unknown else [*self.lines, self.text(result)]

    def _name(self, result: Any) -> None:
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                self._numbered += 1
                self._names[id(tensor)] = f"%{self._numbered}"
                self._kept.append(tensor)

    def text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._names.get(id(value)) or self._constant(value)
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {self.text(v)}' for k, v in value.items())}}}"
        return f"{type(value).__name__} {value!r}"

    def _constant(self, tensor: Tensor) -> str:
        self._kept.append(tensor)
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() > _LARGEST:
            self.unknown = True
            return "?"
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{_form(tensor)} {hashlib.sha256(content).hexdigest()}"


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} {value.device}"
    return f"[{', '.join(map(_form, value))}]" if isinstance(value, (tuple, list)) else type(value).__name__
