"""Execution of a model and its captured graphs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.frontend import custom_modules, huggingface
from hydragraph.frontend.check import scratch_pages
from hydragraph.frontend.check.wide_dtype import computing, default_dtype, runner
from hydragraph.frontend.packed_inputs import Loss
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import DROPOUT_BLOCK
from hydragraph.ir.program import Block, Program
from hydragraph.passes.differentiate import Variant, saved_names

# Factors for the head's parameters and for hidden states
_SCALES = ((1, 1e2), (1, 1e4), (1e2, 1e4))


def caller(model: nn.Module, fields: Iterable[str]) -> Callable[[nn.Module, dict[str, Tensor]], Any]:
    if not huggingface.is_huggingface(model):
        return custom_modules.caller(model, list(fields))
    return lambda model, batch: model(input_ids=batch["input_ids"], use_cache=False)


def run_alone(
    model: nn.Module,
    loss: Loss,
    batch: dict[str, Tensor],
    times: int,
    wide: torch.dtype | None,
    done: Callable[[str, Tensor], None],
) -> Tensor:
    """Multiply one sequence's loss by `times`, compute the product's gradients, and return the product.

    Args:
        done: called with each parameter's name and complete gradient.
    """
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), computing(wide):
        fields = _widened(batch, wide)
        value = loss(caller(model, fields)(model, fields), fields) * times
    if value.requires_grad:
        with _taken(model, done):
            value.backward()
    return value.detach()


@contextmanager
def _taken(model: nn.Module, done: Callable[[str, Tensor], None]) -> Iterator[None]:
    def take(name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            done(name, gradient)

    with ExitStack() as hooks:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(functools.partial(take, name))
                hooks.callback(hook.remove)
        yield


def _widened(batch: Mapping[str, Tensor], wide: torch.dtype | None) -> dict[str, Tensor]:
    return {n: v.to(wide) if wide is not None and v.is_floating_point() else v for n, v in batch.items()}


@dataclass(frozen=True)
class CapturedBatch:
    """Packed batch, and a program's parameters and buffers, as inputs of its graphs."""

    program: Program
    tensors: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    wide: torch.dtype | None

    @cached_property
    def _fields(self) -> dict[str, Tensor]:
        return _widened(self.batch, self.wide)

    @cached_property
    def _aux(self) -> Sequence[Tensor]:
        aux = self.program.aux
        template = self.program.templates[aux.template]
        arguments = [self.tensors[b] for b in aux.buffers] + [self._fields[i] for i in template.inputs]
        outputs: Sequence[Tensor] = runner(template.graph, self.wide)(*arguments)
        return outputs

    def inputs(self, block: Block) -> dict[str, Any]:
        others = [n for n in self.program.templates[block.template].inputs if n.startswith("other.")]
        fed = {n: self._aux[i] for n, i in zip(others, block.aux, strict=True)}
        own = {n: self.tensors[c] for n, c in _local(self.program, block).items() if c in self.tensors}
        return {**self._fields, DROPOUT_BLOCK: torch.tensor(self.program.number_of(block)), **fed, **own}


def add_captured(batch: CapturedBatch, ran: Sequence[tuple[Block, Variant]], sums: dict[str, Tensor]) -> Tensor:
    """Run forwards and backwards of blocks; return the summed loss.

    Args:
        ran: the first block, some middle blocks and the last block, each with its variant.
        sums: gradient sums by parameter, modified in place.
    """
    with torch.no_grad(), default_dtype(batch.wide):
        # saved[i]: values that block i's forward saves for its backward.
        saved: list[list[Any]] = []
        hidden: Any = None
        for block, variant in ran:
            values = batch.inputs(block) | {"hidden": hidden}
            hidden, *kept = runner(variant.forward, batch.wide)(*(values[n] for n in variant.inputs))
            saved.append(kept)
        # The last block is the head, whose result is the loss.
        loss: Tensor = hidden
        tangent = torch.ones_like(loss)
        for block, variant in reversed(ran):
            local = _local(batch.program, block)
            before = backward(local, variant, saved.pop(), tangent, batch.tensors, sums, batch.wide)
            if before is None:
                # No earlier block has trainable parameters
                break
            tangent = before
        return loss


def depends_on_padding(batch: CapturedBatch, head: tuple[Block, Variant], tolerance: float) -> bool:
    """Return whether large values in the padding, the last sequence, affect the loss."""
    block, variant = head
    wide = batch.wide
    template = batch.program.templates[block.template]
    # Tokens from `real` on are padding, the last sequence.
    tokens, real = (int(end) for end in batch.batch["cu_seqlens"][[-1, -2]])
    (like,) = (value_of(n) for n in template.graph.graph.nodes if n.name == "hidden")
    sizes = [s if isinstance(s, int) else tokens for s in like.shape]
    hidden = torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=wide or like.dtype)
    with torch.no_grad(), default_dtype(wide):
        inputs = batch.inputs(block)
        for weight, size in _SCALES:
            values = inputs | {name: inputs[name] * weight for name in template.parameters}
            losses = []
            # The loss must not depend on padding: opposite values must give equal losses, and their
            # gradient must be zero.
            for factor in (size, -size):
                values["hidden"] = torch.cat([hidden[:, :real], hidden[:, real:] * factor], 1)
                loss, *saved = runner(variant.forward, wide)(*(values[n] for n in variant.inputs))
                same = {name: name for name in values}
                gradient = backward(same, variant, saved, torch.ones_like(loss), values, {}, wide)
                losses.append(float(loss))
                if gradient is not None and bool((gradient[:, real:].nan_to_num(0, 0, 0) != 0).any()):
                    return True
            if abs(losses[0] - losses[1]) > tolerance * abs(losses[0]):
                return True
    return False


def _local(program: Program, block: Block) -> dict[str, str]:
    template = program.templates[block.template]
    names = (*block.parameters, *block.buffers)
    return dict(zip((*template.parameters, *template.buffers), names, strict=True))


def backward(
    local: Mapping[str, str],
    variant: Variant,
    saved: Sequence[Any],
    tangent: Tensor,
    tensors: Mapping[str, Tensor],
    sums: dict[str, Tensor],
    wide: torch.dtype | None,
) -> Tensor | None:
    """Run a block's backward and add gradients to `sums`; return the hidden state's gradient.

    Args:
        local: maps template names to names in `tensors` and `sums`.
    """
    kept = dict(zip(saved_names(len(saved)), saved, strict=True)) | {"tangent": tangent}
    arguments: list[Any] = [kept[n] if n in kept else tensors[local[n]] for n in variant.needs]
    for name in variant.added:
        counts = float(local[name] in sums)
        if not counts:
            like = tensors[local[name]]
            sums[local[name]] = scratch_pages.zeros(like.shape, like.dtype)
        arguments += [sums[local[name]], counts]
    before = None
    gradients = runner(variant.backward, wide)(*arguments)
    # A gradient sum must not share memory with saved values or gradients.
    holders = Counter(map(_place, [*gradients, *(argument for argument in arguments if isinstance(argument, Tensor))]))
    for name, gradient in zip(variant.gradients, gradients, strict=True):
        if name == "hidden":
            before = gradient
        elif local[name] in sums:
            sums[local[name]].add_(gradient)
        else:
            alone = holders[_place(gradient)] == 1 and gradient.untyped_storage().nbytes() == gradient.nbytes
            sums[local[name]] = gradient if alone else gradient.clone(memory_format=torch.contiguous_format)
    return before


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
