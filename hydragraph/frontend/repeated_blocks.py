"""Meta copies of models, and search for repeated blocks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.rebound_functions import rebind
from hydragraph.private.module_internals import table_of

BlockList = nn.ModuleList | nn.ModuleDict


def meta_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model to the meta device with parameters in `dtype`; buffers keep theirs."""
    # memo: id of an original tensor -> its replacement.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, device="meta", dtype=kind)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    memo |= {key: value.to("meta") for key, value in computed(model).items()}
    copied = copy.deepcopy(model, memo)
    rebind(copied, memo)
    return copied


def computed(model: nn.Module) -> dict[int, Any]:
    """Return attributes computed from parameters (as in legacy weight norm), as a memo for `copy.deepcopy`."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    return {id(v): v.detach() for v in attributes if isinstance(v, Tensor) and v.grad_fn is not None}


def block_list(model: nn.Module, path: str | None = None) -> tuple[str, BlockList]:
    """Return the path and container of repeated blocks, by default the container with the most parameters."""
    containers = {name: module for name, module in model.named_modules() if _numbers_its_blocks(module)}
    if path is None:
        sizes = {
            n: sum(p.numel() for p in m.parameters())
            for n, m in containers.items()
            if not any(n.startswith(f"{outer}.") for outer in containers)
        }
        path = max(sizes, key=lambda n: sizes[n], default=None)
    if path is None or path not in containers or not any(True for _ in containers[path].parameters()):
        what = "no repeated blocks were found" if path is None else f"`{path}` is not an nn.ModuleList with parameters"
        remedy = "pass blocks='path.to.list', the path of an nn.ModuleList (or nn.ModuleDict of '0', '1', ...)"
        raise Unsupported(what, where=type(model).__name__, remedy=remedy)
    chosen = containers[path]
    assert isinstance(chosen, BlockList)
    return path, chosen


def _numbers_its_blocks(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and list(module) == [str(i) for i in range(len(module))]
    return isinstance(module, nn.ModuleList) and len(module) > 0


def entries(listed: BlockList) -> list[nn.Module]:
    """Return the blocks in order, including repetitions."""
    return [block for block in table_of(listed).values() if block is not None]


def separate_repeated(listed: BlockList) -> None:
    """Replace later occurrences of a block with copies that share tensors."""
    seen = set[int]()
    for place, block in table_of(listed).items():
        if id(block) in seen and block is not None:
            tensors = (*block.parameters(), *block.buffers())
            table_of(listed)[place] = copy.deepcopy(block, {id(t): t for t in tensors} | computed(block))
        seen.add(id(block))
