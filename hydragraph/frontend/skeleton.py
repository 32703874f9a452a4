"""Capture the model around its blocks: prologue, what every block needs besides the hidden state, and epilogue.

During the trace each block is one opaque node, so the cost does not grow with depth; the blocks themselves are traced
once per unique structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.functional import export
from hydragraph.frontend.packed import FIELDS, Loss
from hydragraph.frontend.private import TensorSpec, untraced

EXAMPLE = {"T": 64, "N+1": 5}  # sizes of the example batch; both are symbolic in the graph


@torch.library.custom_op("hydragraph::block", mutates_args=())
def block_op(hidden: Tensor, others: Sequence[Tensor], name: str) -> Tensor:
    """Stand for one block during capture; it never runs."""
    raise AssertionError("hydragraph::block is a placeholder")


@block_op.register_fake
def _(hidden: Tensor, others: Sequence[Tensor], name: str) -> Tensor:
    return torch.empty_like(hidden)


@dataclass
class Site:
    """One block as the model called it: flat arguments, which of them are tensors, and how to rebuild both ways."""

    name: str
    module: nn.Module
    spec: pytree.TreeSpec
    leaves: list[Any]  # the flat arguments, None where a tensor stands
    tensors: list[int]  # where the tensors stand; the first is the hidden state
    inputs: list[Tensor] = field(repr=False)  # their fake values; the hidden state as [1, T, H]
    flat_tokens: bool = False  # the model passes the hidden state as [T, H]

    def flat(self) -> FlatBlock:
        """Return the block as a module of flat tensor arguments with one tensor as its result."""
        return FlatBlock(self)

    def constants(self) -> str:
        """Describe the arguments that are no tensors."""
        return repr((self.leaves, str(self.spec)))


class FlatBlock(nn.Module):
    """A block called with its tensor arguments only."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.block, self._site = site.module, site

    def forward(self, *tensors: Tensor) -> Tensor:
        """Rebuild the arguments that the model passed, call the block's own forward, and return its hidden state."""
        leaves = list(self._site.leaves)
        for position, tensor in zip(self._site.tensors, tensors, strict=True):
            leaves[position] = tensor
        if self._site.flat_tokens:
            leaves[self._site.tensors[0]] = tensors[0].squeeze(0)
        arguments, keywords = pytree.tree_unflatten(leaves, self._site.spec)
        hidden = hidden_output(type(self.block).forward(self.block, *arguments, **keywords), self._site.name)[0]
        return hidden.unsqueeze(0) if self._site.flat_tokens else hidden


def hidden_output(output: Any, where: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the one tensor among a block's outputs, and how to put another in its place."""
    leaves, spec = pytree.tree_flatten(output)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensors) != 1:
        raise Unsupported(
            f"a block with {len(tensors)} output tensors",
            where=where,
            remedy="switch off extra outputs (router logits, attentions, caches) in the config",
        )
    position = tensors[0]

    def rebuild(hidden: Tensor) -> Any:
        return pytree.tree_unflatten([*leaves[:position], hidden, *leaves[position + 1 :]], spec)

    return leaves[position], rebuild


class _Traced(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[..., Any], loss: Loss) -> None:
        super().__init__()
        self.model, self._call, self._loss = model, call, loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self._loss(self._call(self.model, batch), batch)


def capture_skeleton(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    alike: Callable[[nn.Module], str],
    call: Callable[..., Any],
    loss: Loss,
    fields: Mapping[str, TensorSpec] = FIELDS,
) -> tuple[torch.export.ExportedProgram, list[Site]]:
    """Trace `loss(call(model, batch))` with each block opaque.

    Args:
        model: our meta copy; its blocks' forwards are overridden for good.
        blocks: names and modules in the order in which the model must call them.
        alike: the structure key of a block; blocks that share it return outputs of the same form.
        fields: what a packed batch has.
    """
    sites: list[Site] = []
    forms: dict[str, Callable[[Tensor], Any]] = {}
    wide: dict[int, Tensor] = {}
    for name, block in blocks:
        block.forward = _opaque(name, block, alike(block), forms, sites, wide)  # type: ignore[method-assign]
    sizes = {"T": torch.export.Dim("T", min=2, max=1 << 24), "N+1": torch.export.Dim("N", min=3, max=1 << 24)}
    batch = {
        name: torch.zeros([EXAMPLE[s] if isinstance(s, str) else s for s in f.shape], dtype=f.dtype, device="meta")
        for name, f in fields.items()
    }
    dynamic = {n: {d: sizes[s] for d, s in enumerate(f.shape) if isinstance(s, str)} for n, f in fields.items()}
    exported = export(_Traced(model, call, loss), (batch,), (dynamic,), type(model).__name__)
    called = [s.name for s in sites]
    if called != [n for n, _ in blocks]:
        raise Unsupported(
            f"blocks run in the order {called[:4]}..., not once each in the order of their list",
            where=type(model).__name__,
            remedy="name the nn.ModuleList that the model iterates over with blocks='path.to.list'",
        )
    return exported, sites


def _opaque(
    name: str,
    block: nn.Module,
    key: str,
    forms: dict[str, Callable[[Tensor], Any]],
    sites: list[Site],
    wide: dict[int, Tensor],  # id of a hidden state [T, H] that a block returned -> it as [1, T, H]
) -> Callable[..., Any]:
    def forward(*arguments: Any, **keywords: Any) -> Any:
        leaves, spec = pytree.tree_flatten((arguments, keywords))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[i] for i in tensors]
        constants = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
        if key not in forms:  # run one block of each kind to learn what it returns
            with untraced():
                hidden, forms[key] = hidden_output(type(block).forward(block, *arguments, **keywords), name)
            _refuse_other_hidden(hidden, inputs, name)
        flat = inputs[0].dim() == 2
        if flat:
            inputs[0] = wide.get(id(inputs[0]), inputs[0].unsqueeze(0))
        sites.append(Site(name, block, spec, constants, tensors, inputs, flat))
        result = torch.ops.hydragraph.block(inputs[0], inputs[1:], name)
        if flat:
            made, result = result, result.squeeze(0)
            wide[id(result)] = made
        return forms[key](result)

    return forward


def _refuse_other_hidden(made: Tensor, inputs: Sequence[Tensor], where: str) -> None:
    given = list(inputs[0].shape) if inputs else []
    if not inputs or made.shape != inputs[0].shape or made.dtype != inputs[0].dtype:
        raise Unsupported(
            f"the block turns a hidden state of {given} into {list(made.shape)}",
            where=where,
            remedy="blocks must keep shape and dtype of the hidden state, which must be their first tensor argument",
        )
    if len(given) not in (2, 3) or not isinstance(given[-1], int):
        raise Unsupported(
            f"a hidden state of {given}", where=where, remedy="pass the hidden state as [1, T, H] or [T, H]"
        )


def node_inputs(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the hidden state and the other inputs of a block's node in the skeleton."""
    hidden, others, _ = node.args
    assert isinstance(hidden, fx.Node)
    return hidden, list(others)  # type: ignore[arg-type]
