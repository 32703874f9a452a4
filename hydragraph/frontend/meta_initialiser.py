"""Block-by-block initialization of a model on the meta device, with its own initializer."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.huggingface import is_huggingface
from hydragraph.frontend.peft_adapters import is_peft
from hydragraph.frontend.repeated_blocks import block_list, entries

_UNSET = -(2**31)


def is_meta(model: nn.Module) -> bool:
    """Return whether a model is on the meta device; raise Unsupported if only a part is, or if it has adapters."""
    without = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if without and len(without) < sum(1 for _ in model.parameters()):
        what = f"{len(without)} parameters are on the meta device, such as {without[0]}, but others are not"
        remedy = "build the whole model under torch.device('meta'), or the whole model on the CPU"
        raise Unsupported(what, where=type(model).__name__, remedy=remedy)
    if without and is_peft(model):
        what = "a peft model on the meta device would get a random base model and wrongly initialized adapters"
        remedy = "load the base model on the CPU (from_pretrained) before peft.get_peft_model"
        raise Unsupported(what, where=type(model).__name__, remedy=remedy)
    return bool(without)


def initial_parameters(model: nn.Module, seed: int, blocks: str | None = None) -> Iterator[dict[str, Tensor]]:
    """Yield a meta model's initial parameters, by canonical name, in fp32 on the CPU.

    The first dict has the parameters outside the repeated blocks; one dict per block follows.

    Raises:
        Unsupported: the initializer does not set a parameter.
    """
    path, modules = block_list(model, blocks)
    canonical = {name for name, _ in model.named_parameters()}
    # Copy the model without blocks, and initialize one block at a time to save memory.
    around = copy.deepcopy(model, {id(modules): type(modules)()})
    units = [("", around), *((f"{path}.{i}.", block) for i, block in enumerate(entries(modules)))]
    for prefix, unit in units:
        unit_tensors = _initialised(model, unit if unit is around else copy.deepcopy(unit), prefix, seed)
        named = {prefix + name: parameter.detach() for name, parameter in unit_tensors.named_parameters()}
        _check_set(named)
        yield {name: parameter for name, parameter in named.items() if name in canonical}


def initial_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's buffers by name; initialize those on the meta device."""
    buffers: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_buffers(prefix, recurse=False, remove_duplicate=False))
        if any(buffer.is_meta for buffer in own.values()):
            initialised = _initialised(model, copy.deepcopy(module), prefix, 0)
            own = dict(initialised.named_buffers(prefix, recurse=False, remove_duplicate=False))
            _check_set(own)
        buffers |= {name: buffer.detach() for name, buffer in own.items()}
    return buffers


def _initialised(model: nn.Module, unit: nn.Module, name: str, seed: int) -> nn.Module:
    for parameter in unit.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    unit.to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for tensor in (*unit.parameters(), *unit.buffers()):
            # Initializers never set NaN or `_UNSET`, so `_check_set` finds omitted tensors.
            tensor.fill_(float("nan") if tensor.is_floating_point() else _UNSET if tensor.dtype != torch.bool else 0)
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        torch.manual_seed(int.from_bytes(digest))
        # Inner modules first, as in `apply`: outer modules may override them.
        transformer: Any = model
        modules: list[Any] = list(unit.modules())
        for module in reversed(modules):
            if is_huggingface(model):
                transformer._init_weights(module)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return unit


def _check_set(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        unset = tensor.isnan() if tensor.is_floating_point() else tensor == _UNSET
        if tensor.dtype == torch.bool or bool(unset.any()):
            what = "the model is on the meta device, and its initializer does not set this tensor"
            remedy = "build the model on the CPU, or set the tensor in its module's reset_parameters()"
            if tensor.dtype == torch.bool:
                what = "hydragraph cannot tell whether the initializer of a meta model sets a bool tensor"
                remedy = "build the model on the CPU"
            raise Unsupported(what, where=name, remedy=remedy)
