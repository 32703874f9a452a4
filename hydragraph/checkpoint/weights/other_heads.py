"""Which tensors of a file are heads that other classes of a model's family have, and so may be left unread.

A directory of `BertForPreTraining` holds a pooler and a classifier of sentence pairs, which `BertForMaskedLM` has not.
transformers leaves every such tensor unread and says so; it cannot tell a head from a mistake. What can: the classes
beside the model's own, built with the model's own config. A head is a parameter of one of them; the layers of a deeper
model, or the weights of a model of another kind, are of none.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Family:
    """The classes that share a model's config.

    Attributes:
        kinds: the classes, the model's own included.
        config: the model's, with which each class is built to see the names of its tensors.
    """

    kinds: tuple[type[nn.Module], ...] = ()
    config: Any = None

    @staticmethod
    def of(model: nn.Module) -> Family:
        """Take the classes that are defined where a model of transformers' and its base classes are."""
        places = [vars(sys.modules[base.__module__]).values() for base in type(model).__mro__]
        modules = {
            value for place in places for value in place if isinstance(value, type) and issubclass(value, nn.Module)
        }
        kinds = [module for module in modules if getattr(module, "config_class", None) is type(model.config)]
        return Family(tuple(sorted(kinds, key=lambda kind: kind.__qualname__)), copy.deepcopy(model.config))

    def heads(self, names: frozenset[str]) -> frozenset[str]:
        """Return which names, as the model would call them, are tensors of another class of the family."""
        recognised: set[str] = set()
        for own in self._names():
            recognised |= names & own
            if recognised == names:
                break
        return frozenset(recognised)

    def _names(self) -> Iterator[frozenset[str]]:
        """Yield the names of each class's tensors; they are built without memory, and only as far as they are asked."""
        for kind in self.kinds:
            try:
                with torch.device("meta"):
                    model = kind(copy.deepcopy(self.config))
            except Exception:
                continue  # a class that this config does not suit has no head that a directory of it could hold
            yield frozenset(model.state_dict())
