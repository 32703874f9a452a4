"""Models that are captured, and compiled for some strategies, before ranks are forked: see `hydragraph.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hydragraph as hg
from hydragraph.candidates import Choices
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
        return Ready(model, hg.precompile(program, [hg.Strategy.parse(text, program.layers) for text in strategies]))

    def executable(self, given: Choices, optimizer: OptimizerFactory | None = None, **options: Any) -> hg.Executable:
        """Compile without capturing anew."""
        return hg.compile(self.model, given, optimizer, device="cpu", program=self.variants.program, **options)
