"""Copy of a model in which few blocks compute."""

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
from hydragraph.private.argument_trees import tree_flatten, tree_leaves, tree_unflatten

# transformers' attention that runs on any CPU in any dtype.
_ANYWHERE = ("eager", "sdpa")


class OutputStructure:
    _rebuild: Callable[[Tensor], Any] = staticmethod(lambda hidden: hidden)

    def learn(self, _module: nn.Module, _given: Any, output: Any) -> None:
        """Record an output's structure, as a forward hook; its first tensor is the hidden state."""
        leaves, spec = tree_flatten(output)
        first = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._rebuild = lambda hidden: tree_unflatten([*others[:first], hidden, *others[first + 1 :]], spec)

    def pass_on(self, *arguments: Any, **keywords: Any) -> Any:
        leaves = tree_leaves((arguments, keywords))
        return self._rebuild(next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()))


def reduced(
    model: nn.Module, blocks: str | None, kept: Collection[int], forms: OutputStructure, weights: DrawnWeights
) -> nn.Module:
    """Copy a model with new weights; blocks outside `kept` get no weights and return their input."""
    path, layers = block_list(model, blocks)
    left_out = tuple(f"{path}.{i}." for i in range(len(layers)) if i not in kept)
    # Parameters that are also used outside the omitted blocks get weights.
    names = model.named_parameters(remove_duplicate=False)
    used = {id(parameter) for name, parameter in names if not name.startswith(left_out)}
    memo = _tensors(model, lambda name, tensor: name.startswith(left_out) and id(tensor) not in used, weights)
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


def _tensors(model: nn.Module, left_out: Callable[[str, Tensor], bool], weights: DrawnWeights) -> dict[int, Any]:
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        apart = left_out(name, parameter)
        value = torch.empty_like(parameter, device="meta") if apart else weights.drawn(parameter, name)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        vars(memo[id(parameter)]).update(vars(parameter))
        for hook in (parameter._backward_hooks or {}).values():
            memo[id(parameter)].register_hook(hook)
    some_meta = any(buffer.is_meta for buffer in model.buffers())
    values: Mapping[str, Tensor] = initial_buffers(model) if some_meta else dict(model.named_buffers())
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = buffer if left_out(name, buffer) else widened(values[name], weights.wide)
        vars(memo[id(buffer)]).update(vars(buffer))
    return memo


def _leave_out(block: nn.Module, forms: OutputStructure, used: Collection[int]) -> None:
    block.forward = forms.pass_on
    block._forward_hooks.clear()
    block._forward_pre_hooks.clear()
    for parameter in block.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def _use_attention_of_any_cpu(model: nn.Module) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, *_ANYWHERE):
            config._attn_implementation = "eager"
