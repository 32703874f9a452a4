"""Models that are captured, and compiled for some strategies, before ranks are forked: see `hydragraph.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hydragraph as hg
from hydragraph.candidates import Choices
from hydragraph.executable import Planning
from hydragraph.runtime.state import OptimizerFactory
from hydragraph.runtime.variants import Variants


@dataclass(frozen=True)
class Ready:
    """A model and the variants of its program."""

    model: nn.Module
    variants: Variants

    @staticmethod
    def of(model: nn.Module, strategies: Sequence[str], dtype: torch.dtype = torch.float32, **capturing: Any) -> Ready:
        """Capture a model and compile it for strategies."""
        program = hg.capture(model, dtype=dtype, **capturing)
        variants = Variants(program, added=True)
        variants.compile([hg.Strategy.parse(text, program.layers) for text in strategies])
        return Ready(model, variants)

    def executable(
        self,
        given: Choices,
        optimizer: OptimizerFactory | None = None,
        max_grad_norm: float | None = None,
        planning: Planning | None = None,
    ) -> hg.Executable:
        """Do what `hydragraph.compile` does, without capturing anew."""
        program = self.variants.program
        return hg.Executable(self.model, program, given, optimizer, max_grad_norm, "cpu", planning=planning)
