"""Losses that are modules; their buffers are constants of the program."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.check.wide_dtype import widened
from hydragraph.frontend.packed_inputs import Loss
from hydragraph.ir.program import Program

# Prefix of a loss's buffers in a program
_PREFIX = "_hydragraph_loss."


def refuse_trained(loss: Loss | None) -> None:
    for name, _ in loss.named_parameters() if isinstance(loss, nn.Module) else ():
        what = f"the loss has the parameter {name!r}, but only the model's parameters are trained and saved"
        remedy = (
            "move the parameter into the model, and return it from forward, with the logits; if a frozen module "
            "holds the parameter, move the module, and return its output"
        )
        raise Unsupported(what, where=f"loss {type(loss).__name__}", remedy=remedy)


def loss_buffers(loss: Loss | None) -> dict[str, Tensor]:
    """Return a loss module's buffers on the CPU, by their names in a program."""
    if not isinstance(loss, nn.Module):
        return {}
    buffers = {}
    for name, buffer in loss.named_buffers(remove_duplicate=False):
        if buffer.is_meta:
            what = f"buffer {name!r} is on the meta device, so it has no values"
            raise Unsupported(what, where=f"loss {type(loss).__name__}", remedy="build the loss on the CPU")
        buffers[_PREFIX + name] = buffer.detach().to("cpu")
    return buffers


def check_loss_of(program: Program, loss: Loss | None) -> None:
    needed = {name for block in program.blocks for name in block.buffers if name.startswith(_PREFIX)}
    missing = sorted(needed - loss_buffers(loss).keys())
    if missing:
        what = f"a block reads the loss's buffer {missing[0].removeprefix(_PREFIX)!r}, which loss= does not have"
        raise ValueError(f"program: {what}; pass the loss module that the program was captured with")


def name_in_program(attribute: str, name: str) -> str:
    """Return a buffer's name in a program; buffers of the loss, which `attribute` holds, get a prefix."""
    return _PREFIX + name.removeprefix(f"{attribute}.") if name.startswith(f"{attribute}.") else name


def meta_loss(loss: Loss) -> Loss:
    return _with_buffers(loss, lambda buffer: torch.empty_like(buffer, device="meta"))


def wide_loss(loss: Loss, wide: torch.dtype | None) -> Loss:
    return loss if wide is None else _with_buffers(loss, lambda buffer: widened(buffer, wide))


def _with_buffers(loss: Loss, replaced: Any) -> Loss:
    if not isinstance(loss, nn.Module) or not any(True for _ in loss.buffers()):
        return loss
    copied: Loss = copy.deepcopy(loss, {id(buffer): replaced(buffer) for buffer in loss.buffers()})
    return copied
