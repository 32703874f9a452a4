"""Hooks of optimizers and tensors."""

from __future__ import annotations

import torch
from torch.optim import optimizer as module


def step_hooks(optimizer: torch.optim.Optimizer) -> str:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everywhere = module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks
    return "a step hook" if own else "a global step hook of optimizers" if everywhere else ""


def tensor_hooks(tensor: torch.Tensor) -> str:
    if tensor._backward_hooks:
        return "a hook on a tensor's gradient"
    return "a hook on a tensor's accumulated gradient" if tensor._post_accumulate_grad_hooks else ""
