"""Models that are captured, and compiled for some strategies, once for all ranks: see `hydragraph.launch`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hydragraph as hg
from hydragraph.engine.candidate_strategies import Choices
from hydragraph.passes.variants import Variants
from hydragraph.runtime.supported_optimizers import OptimizerFactory
from tests.models import llama


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

    def with_scores(self, *entropies: bool) -> Ready:
        """Compile also what computes scores, without (False) or with (True) entropies, for the same strategies."""
        for entropy in entropies:
            self.variants.scoring(entropy).compile(tuple(self.variants.strategies))
        return self

    def executable(self, given: Choices, optimizer: OptimizerFactory | None = None, **options: Any) -> hg.Executable:
        """Compile without capturing anew."""
        return hg.compile(self.model, given, optimizer, device="cpu", program=self.variants.program, **options)


@functools.cache
def small_llama() -> Ready:
    """Return what most tests of the runtime need: two layers, compiled for the strategies that they run."""
    return Ready.of(llama(layers=2), ["<[0,1]x1s,[2]x1>", "<[0,1]x1,[2]x1>", "<[2]x1,[1,0]x1>"])
