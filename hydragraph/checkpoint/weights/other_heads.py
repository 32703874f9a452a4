"""Detection of stored heads that only other classes of the model's family have; they are not loaded.

An example is the pooler of `BertForPreTraining`, which `BertForMaskedLM` does not have.
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
class ModelFamily:
    """The module classes that use a model's config class."""

    kinds: tuple[type[nn.Module], ...] = ()
    config: Any = None

    @staticmethod
    def of(model: nn.Module) -> ModelFamily:
        places = [vars(sys.modules[base.__module__]).values() for base in type(model).__mro__]
        modules = {
            value for place in places for value in place if isinstance(value, type) and issubclass(value, nn.Module)
        }
        kinds = [module for module in modules if getattr(module, "config_class", None) is type(model.config)]
        return ModelFamily(tuple(sorted(kinds, key=lambda kind: kind.__qualname__)), copy.deepcopy(model.config))

    def heads(self, names: frozenset[str]) -> frozenset[str]:
        recognised: set[str] = set()
        for own in self._names():
            recognised |= names & own
            if recognised == names:
                break
        return frozenset(recognised)

    def _names(self) -> Iterator[frozenset[str]]:
        for kind in self.kinds:
            try:
                with torch.device("meta"):
                    model = kind(copy.deepcopy(self.config))
            except Exception:
                continue
            yield frozenset(model.state_dict())
