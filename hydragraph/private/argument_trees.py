"""PyTorch's functions that flatten nested arguments, and `TorchDispatchMode`."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["TorchDispatchMode", "TreeSpec", "tree_flatten", "tree_leaves", "tree_unflatten"]
