"""Nested arguments as flat lists and back, and the dispatch mode, which have no public name in PyTorch 2.15."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["TorchDispatchMode", "TreeSpec", "tree_flatten", "tree_leaves", "tree_unflatten"]
