"""Copy of the user's model with only a few computing blocks: the others pass the hidden state on.

It remains the user's model: the same modules, attributes, hooks and config, and the same number of blocks, so that code
that depends on a block's index still works. Only the weights differ, and blocks that do not compute have none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.frontend.check.probe_weights import DrawnWeights
from hydragraph.frontend.check.wide_dtype import widened
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.frontend.rebound_functions import rebind
from hydragraph.frontend.repeated_blocks import block_list, computed, entries, separate_repeated
from hydragraph.frontend.skeleton import hidden_output
from hydragraph.private.argument_trees import tree_leaves

# transformers attention functions that run on any CPU in any dtype.
_ANYWHERE = ("eager", "sdpa")


class Forms:
    """Form of a block's output, learned from a block that ran."""

    def __init__(self) -> None:
        self._rebuild: Callable[[Tensor], Any] | None = None

    def learn(self, _module: nn.Module, _given: Any, output: Any) -> None:
        """Record the form of a block's output (a forward hook)."""
        self._rebuild = hidden_output(output, "block")[1]

    def pass_on(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the hidden state that was passed to a block, in the form of a block's output."""
        leaves = tree_leaves((arguments, keywords))
        hidden = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
        return hidden if self._rebuild is None else self._rebuild(hidden)


def reduced(
    model: nn.Module,
    blocks: str | None,
    kept: Collection[int],
    forms: Forms,
    weights: DrawnWeights,
) -> nn.Module:
    """Copy a model, with new weights for some of its blocks and for everything outside its blocks.

    Args:
        blocks: path of its list of blocks; None: as `capture` finds it.
        kept: indices of the blocks that compute.
        forms: form of blocks' outputs; learned from the first block that computes.
        weights: source of the parameters' replacements.

    Raises:
        Unsupported: names a buffer on the meta device that no initialiser sets.
    """
    path, layers = block_list(model, blocks)
    left_out = {f"{path}.{i}." for i in range(len(layers)) if i not in kept}
    names = {f"{path}.{i}." for i in range(len(layers))}
    # A parameter that blocks share has several names: it is left out only if all of its blocks are.
    users: dict[int, set[str | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).add(_prefix(name, names))
    used = {key for key, prefixes in users.items() if not prefixes <= left_out}
    memo = _tensors(model, lambda name, tensor: _prefix(name, names) in left_out and id(tensor) not in used, weights)
    computing = {id(memo[key]) for key in used}
    memo |= computed(model)
    model_copy = copy.deepcopy(model, memo)
    rebind(model_copy, memo)
    copied_layers = block_list(model_copy, path)[1]
    separate_repeated(copied_layers)
    for i, block in enumerate(entries(copied_layers)):
        if i in kept:
            block.register_forward_hook(forms.learn)
        else:
            _leave_out(block, forms, computing)
    _use_attention_of_any_cpu(model_copy)
    return model_copy


def _prefix(name: str, prefixes: Collection[str]) -> str | None:
    return next((p for p in prefixes if name.startswith(p)), None)


def _tensors(model: nn.Module, left_out: Callable[[str, Tensor], bool], weights: DrawnWeights) -> dict[int, Any]:
    """Return the replacement of each parameter and buffer, as a memo for `copy.deepcopy`."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if left_out(name, parameter):
            value = torch.empty_like(parameter, device="meta")
        else:
            value = weights.drawn(parameter, name)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for hook in (parameter._backward_hooks or {}).values():
            memo[id(parameter)].register_hook(hook)
    values: Mapping[str, Tensor] = initial_buffers(model) if _some_meta(model) else dict(model.named_buffers())
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = buffer if left_out(name, buffer) else widened(values[name], weights.wide)
    return memo


def _some_meta(model: nn.Module) -> bool:
    return any(buffer.is_meta for buffer in model.buffers())


def _leave_out(block: nn.Module, forms: Forms, used: Collection[int]) -> None:
    """Make a block pass its hidden state on, and freeze its parameters except those that other blocks use."""
    block.forward = forms.pass_on  # type: ignore[method-assign]
    block._forward_hooks.clear()
    block._forward_pre_hooks.clear()
    for parameter in block.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def _use_attention_of_any_cpu(model: nn.Module) -> None:
    """Keep the attention that the user selected, unless it needs a GPU or a compiler."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, *_ANYWHERE):
            config._attn_implementation = "eager"
