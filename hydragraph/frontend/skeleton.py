"""Capture of a model's graph with opaque blocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.block_keywords import keywords_of_block
from hydragraph.frontend.functional_graph import changes, export
from hydragraph.frontend.module_digest import outline, structure
from hydragraph.frontend.packed_inputs import Loss
from hydragraph.frontend.repeated_blocks import BlockList, entries
from hydragraph.frontend.untraceable import watched
from hydragraph.private.argument_trees import TreeSpec, tree_flatten, tree_unflatten
from hydragraph.private.module_internals import empty_tables, table_of
from hydragraph.private.tracing import TensorSpec, untraced


@torch.library.custom_op("hydragraph::block", mutates_args=())
def block_op(hidden: Tensor, others: Sequence[Tensor], name: str) -> Tensor:
    """Placeholder for one block; it never runs."""
    raise AssertionError("hydragraph::block is a placeholder")


@block_op.register_fake
def _(hidden: Tensor, others: Sequence[Tensor], name: str) -> Tensor:
    return torch.empty_like(hidden)


@dataclass
class BlockCall:
    name: str
    module: nn.Module
    spec: TreeSpec
    # Flattened arguments; None replaces tensors
    leaves: list[Any]
    # Positions of tensors; the first is the hidden state
    tensors: list[int]
    # Their fake values; the hidden state is [1, T, H]
    inputs: list[Tensor] = field(repr=False)
    # Whether the model passes the hidden state as [T, H]
    flat_tokens: bool
    own: Callable[..., Any] | None = field(repr=False)
    # Expected structure of the output, from a similar block
    form: str
    # Indices of this block's inputs in the fused node
    feeds: tuple[int, ...] | None = None

    def called(self) -> str:
        """Return a digest of the arguments, with only the shape and dtype of tensors."""
        inputs = [(tuple(map(str, t.shape)), str(t.dtype)) for t in self.inputs]
        return structure((self.leaves, str(self.spec), self.tensors, inputs, self.flat_tokens))


class FlatBlock(nn.Module):
    """Block wrapper that takes only tensors and returns only the hidden state."""

    def __init__(self, call: BlockCall) -> None:
        super().__init__()
        self.block = call.module
        self._call = call

    def forward(self, *tensors: Tensor) -> Tensor:
        call = self._call
        leaves = list(call.leaves)
        for position, tensor in zip(call.tensors, tensors, strict=True):
            leaves[position] = tensor
        if call.flat_tokens:
            leaves[call.tensors[0]] = tensors[0].squeeze(0)
        arguments, keywords = tree_unflatten(leaves, call.spec)
        # `call.module.forward` may be the opaque replacement, so call the class's.
        forward = call.own or functools.partial(type(call.module).forward, call.module)
        with keywords_of_block(keywords):
            output = forward(*arguments, **keywords)
        hidden = hidden_output(output, call.name)[0]
        if call.form != form_of(output):
            what = "the output has another structure than that of a block with the same submodules and attributes"
            raise Unsupported(what, where=call.name, remedy="let all blocks return their hidden state in the same way")
        return hidden.unsqueeze(0) if call.flat_tokens else hidden


def hidden_output(output: Any, where: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the only tensor in a block's output, and a function that replaces it."""
    leaves, spec = tree_flatten(output)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensors) != 1:
        form = f"{len(tensors)} tensors" if tensors else "no tensor"
        what = f"the block returns {form} ({_outline(output)}), but only its hidden state is passed from block to block"
        remedy = (
            "return only the hidden state; disable router logits and caches, and concatenate other tensors to the "
            "hidden state"
        )
        raise Unsupported(what, where=where, remedy=remedy)
    (position,) = tensors

    def rebuild(hidden: Tensor) -> Any:
        return tree_unflatten([*leaves[:position], hidden, *leaves[position + 1 :]], spec)

    return leaves[position], rebuild


def _outline(output: Any) -> str:
    if isinstance(output, Tensor):
        return "a tensor" if output.is_floating_point() else f"a tensor of {output.dtype}"
    if isinstance(output, Mapping):
        return f"{{{', '.join(f'{k!r}: {_outline(v)}' for k, v in output.items())}}}"
    if isinstance(output, (list, tuple)):
        return f"({', '.join(map(_outline, output))})"
    return "None" if output is None else type(output).__name__


def form_of(output: Any) -> str:
    leaves, spec = tree_flatten(output)
    return repr(["a tensor" if isinstance(leaf, Tensor) else leaf for leaf in leaves]) + str(spec)


class TracedModel(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[..., Any], loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = self._call(self.model, batch)
        try:
            loss = self._loss(outputs, batch)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            why = f"{_outline(outputs)} ({type(error).__name__}: {error})"
            what = f"the loss fails on the model's outputs, {why}"
            remedy = "pass loss=, a function of these outputs and of the packed batch (a dict)"
            raise Unsupported(what, where=type(self.model).__name__, remedy=remedy) from error
        return _summed(loss, type(self.model).__name__)


def _summed(loss: Any, where: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.is_floating_point() and all(type(n) is int and n == 1 for n in loss.shape):
        return loss.reshape(())
    returned = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise Unsupported(f"the loss is {returned}", where=where, remedy="return one number, the sum over all targets")


def meta_batch(example: Mapping[str, int], fields: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    shapes = {name: [example[s] if isinstance(s, str) else s for s in field.shape] for name, field in fields.items()}
    return {name: torch.zeros(shape, dtype=fields[name].dtype, device="meta") for name, shape in shapes.items()}


def capture_skeleton(
    traced: TracedModel, listed: BlockList, example: Mapping[str, int], fields: Mapping[str, TensorSpec]
) -> tuple[torch.export.ExportedProgram, list[BlockCall]]:
    """Trace a model and its loss with opaque blocks.

    Args:
        traced: a meta copy, which tracing may change.
        listed: blocks in call order; blocks with equal outlines must return equal output structures.
    """
    # torch.export treats sizes 0 and 1 as constants, so graphs take at least 2 tokens and 2
    # sequences.
    sizes = {"T": torch.export.Dim("T", min=2, max=1 << 24), "N+1": torch.export.Dim("N", min=3, max=1 << 24)}
    dynamic = {n: {d: sizes[s] for d, s in enumerate(f.shape) if isinstance(s, str)} for n, f in fields.items()}
    where = type(traced.model).__name__
    trace = functools.partial(export, traced, (meta_batch(example, fields),), (dynamic,), where)
    # One node for all blocks is fastest, but fails if the model uses values between blocks.
    light = list[BlockCall]()
    with contextlib.suppress(Exception), opaque_blocks(listed, light):
        exported = trace()
        # A lifted constant may be an untraced hidden state, read between blocks.
        if not exported.graph_signature.inputs_to_lifted_tensor_constants:
            return _in_order(exported, light, listed, where)
    calls = list[BlockCall]()
    forms = _Forms()
    for name, block in _named(listed):
        block.forward = _opaque(name, block, forms, calls)
    return _in_order(trace(), calls, listed, where)


def _named(listed: BlockList) -> list[tuple[str, nn.Module]]:
    return [(f"layer.{i}", block) for i, block in enumerate(entries(listed))]


def _in_order(
    exported: torch.export.ExportedProgram, calls: list[BlockCall], listed: BlockList, where: str
) -> tuple[torch.export.ExportedProgram, list[BlockCall]]:
    called = [call.name for call in calls]
    if called != [n for n, _ in _named(listed)]:
        what = f"the model calls its blocks in the order {called[:4]}..., but must call each block once, in list order"
        remedy = (
            "list the blocks in the order of their calls (a block may occur several times), or pass "
            "blocks='path.to.list', the nn.ModuleList that the model iterates over"
        )
        raise Unsupported(what, where=where, remedy=remedy)
    return exported, calls


@contextlib.contextmanager
def opaque_blocks(listed: BlockList, calls: list[BlockCall]) -> Iterator[None]:
    """Replace blocks with opaque ones; append calls to `calls`."""
    own = dict(table_of(listed))
    forms = _Forms()
    fused = _FusedBlocks("layer.0", f"layer.{len(listed) - 1}")
    try:
        for (name, block), place in zip(_named(listed), own, strict=True):
            table_of(listed)[place] = _light(block, _opaque(name, block, forms, calls, fused))
        # Writes to a replacement's attributes would not reach the block.
        before = [dict(vars(light)) for light in entries(listed)]
        yield
        if any(vars(light) != attributes for light, attributes in zip(entries(listed), before, strict=True)):
            raise ValueError("forward sets attributes of blocks")
    finally:
        table_of(listed).update(own)


def _light(block: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    kind = type(block)
    # The replacement has the block's class and attributes, but no tensors, which torch.export would
    # process. Reads of submodules and tensors still reach the block.
    members = {"__getattr__": lambda _, name: getattr(block, name), "__module__": kind.__module__}
    light: nn.Module = object.__new__(type(kind.__name__, (kind,), members))
    vars(light).update(vars(block), forward=forward, **empty_tables())
    return light


@dataclass
class _Forms:
    """Structures of blocks' outputs, recorded during tracing.

    Attributes:
        of: for each block's outline, a function that rebuilds the output, and the output's structure.
        wide: by the id of a block's result [T, H], this result as [1, T, H].
    """

    of: dict[str, tuple[Callable[[Tensor], Any], str]] = field(default_factory=dict)
    wide: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _FusedBlocks:
    """State for tracing all blocks as one node, which the last block creates.

    Attributes:
        given: hidden state passed to the first block, [1, T, H].
        others: the blocks' other tensor arguments, by id.
    """

    first: str
    last: str
    given: Tensor | None = None
    passed: Tensor | None = None
    others: dict[int, Tensor] = field(default_factory=dict)

    def enter(self, name: str, hidden: Tensor, others: Sequence[Tensor]) -> tuple[int, ...]:
        if name == self.first:
            self.given = hidden.unsqueeze(0) if hidden.dim() == 2 else hidden
            self.others = {}
        elif hidden is not self.passed:
            raise ValueError(f"the input of {name} is not the previous block's output")
        self.others |= {id(other): other for other in others}
        # The fused node's inputs, in the order of their first use.
        places = list(self.others)
        return tuple(places.index(id(other)) for other in others)

    def leave(self, name: str, hidden: Tensor) -> Tensor:
        if name == self.last:
            result: Tensor = torch.ops.hydragraph.block(self.given, list(self.others.values()), name)
            self.passed = result.squeeze(0) if hidden.dim() == 2 else result
        else:
            # Between fused blocks, the hidden state has no node; only its identity matters to
            # `enter`.
            with untraced():
                self.passed = torch.empty_like(hidden)
        return self.passed


def _opaque(
    name: str, block: nn.Module, forms: _Forms, calls: list[BlockCall], fused: _FusedBlocks | None = None
) -> Callable[..., Any]:
    key = outline(block)
    instance = vars(block).get("forward")
    own = block.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        leaves, spec = tree_flatten((arguments, keywords))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = sorted(positions, key=lambda i: not leaves[i].is_floating_point())
        inputs = [leaves[i] for i in tensors]
        constants = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
        # Run one block of each outline, untraced, to learn its output's structure.
        if key not in forms.of:
            with untraced(), watched(name, block), _unchanged(block, name), keywords_of_block(keywords):
                output = own(*arguments, **keywords)
            hidden, rebuild = hidden_output(output, name)
            forms.of[key] = rebuild, form_of(output)
            _refuse_other_hidden(hidden, inputs, name)
        rebuild, form = forms.of[key]
        hidden, *others = inputs
        if not torch.is_grad_enabled() and (hidden.requires_grad or any(p.requires_grad for p in block.parameters())):
            what = "the model runs this block under torch.no_grad(), but parameters in or before it are trainable"
            remedy = "freeze these parameters with requires_grad_(False), and run the block without no_grad()"
            raise Unsupported(what, where=name, remedy=remedy)
        flat = hidden.dim() == 2
        feeds = None if fused is None else fused.enter(name, hidden, others)
        if fused is not None:
            assert fused.given is not None
            wide = fused.given
        else:
            # `forms.wide` saves a reshape between blocks
            wide = forms.wide.get(id(hidden), hidden.unsqueeze(0)) if flat else hidden
        calls.append(BlockCall(name, block, spec, constants, tensors, [wide, *others], flat, instance, form, feeds))
        if fused is not None:
            return rebuild(fused.leave(name, hidden))
        result = batched = torch.ops.hydragraph.block(wide, others, name)
        if flat:
            result = batched.squeeze(0)
            forms.wide[id(result)] = batched
        return rebuild(result)

    return forward


@contextlib.contextmanager
def _unchanged(block: nn.Module, where: str) -> Iterator[None]:
    before = dict(block.named_buffers())
    yield
    for name, buffer in block.named_buffers():
        if before.get(name) is not buffer:
            raise changes(name, where)


def _refuse_other_hidden(result: Tensor, inputs: Sequence[Tensor], where: str) -> None:
    hidden = inputs[0] if inputs else None
    if hidden is None or (result.shape, result.dtype) != (hidden.shape, hidden.dtype):
        kinds = ("", "") if hidden is None or hidden.dtype == result.dtype else (f" {hidden.dtype}", f" {result.dtype}")
        sizes = [] if hidden is None else list(hidden.shape)
        what = f"the block turns a hidden state of {sizes}{kinds[0]} into {list(result.shape)}{kinds[1]}"
        remedy = "keep the shape and dtype of the hidden state, which is the first floating-point argument"
        raise Unsupported(what, where=where, remedy=remedy)
    sizes = list(hidden.shape)
    row = len(sizes) == 2 or (len(sizes) == 3 and isinstance(sizes[0], int) and sizes[0] == 1)
    if not row or not isinstance(sizes[-1], int):
        what = f"the hidden state has the shape {sizes}"
        raise Unsupported(what, where=where, remedy="pass the hidden state as [1, T, H] or [T, H]")


def node_inputs(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    arguments: tuple[Any, ...] = node.args
    hidden, others, _ = arguments
    assert isinstance(hidden, fx.Node)
    return hidden, list(others)
