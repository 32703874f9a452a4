"""Compiled templates: each (template, tensor-parallel degree, local shapes) is compiled once and kept.

The programs of one process share what they have in common: a second executable of the same model compiles nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Block, Program, Template
from hydragraph.passes.accumulate import accumulate
from hydragraph.passes.compiled import compile_variant
from hydragraph.passes.differentiate import RECOMPUTE, Variant, differentiate, start_of
from hydragraph.passes.fuse_head import fuse_head
from hydragraph.passes.place import place
from hydragraph.passes.shard import Degree, gradient_kinds, shard
from hydragraph.runtime.recent import Recent
from hydragraph.spec.strategy import Strategy

CPU = torch.device("cpu")
CAPACITY = 64  # variants kept: a model has about three templates, and a strategy few degrees

_shared: WeakValueDictionary[Hashable, Variant] = WeakValueDictionary()  # what any program of this process keeps


class Variants:
    """The variants of one program that this process has compiled and not forgotten.

    Args:
        program: the captured model.
        partitioner: "min_cut" or "default" (functorch's).
        backend: "eager", or "inductor", which compiles their graphs for `device`.
        device: what they run on.
        capacity: how many are kept, the most recently used; whoever holds another keeps it alive.
        fused_head: make the head and the loss one operator.
        added: let products add gradients up where they can; not under Inductor, and in fp32 only, as the sums are.
    """

    def __init__(
        self,
        program: Program,
        partitioner: str = "min_cut",
        backend: str = "eager",
        device: torch.device = CPU,
        capacity: int = CAPACITY,
        fused_head: bool = False,
        added: bool = False,
    ) -> None:
        self.program, self._partitioner, self._backend = program, partitioner, backend
        self._device, self._fused_head = device, fused_head
        self._added = added and backend == "eager" and program.dtype is torch.float32
        self._how = (partitioner, backend, device, fused_head, self._added, program.dtype)
        self._known = Recent[Hashable, Variant](capacity)
        self._kinds: dict[tuple[str, Degree], Mapping[str, GradientKind]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _shared.update(self._known.items())  # as if they had been compiled in this process

    def __len__(self) -> int:
        return len(self._known)

    def get(self, block: Block, degree: Degree, recompute: bool = False) -> Variant:
        """Return the variant of a block for one rank of a stage, compiling it once while it is kept.

        Args:
            recompute: save the block's inputs only.
        """
        template = self.program.templates[block.template]
        parameters = local_parameters(self.program, block, template)
        held = tuple((p.rule, p.local_shape(degree.tp, degree.index)) for p in parameters.values())
        learns = self._learning(block)
        key = (template.content, held, degree.tp, degree.sequence_parallel, recompute, learns, self._how)

        def make() -> Variant:
            found = _shared.get(key)
            if found is None:
                found = _shared[key] = self._compile(block, parameters, degree, recompute)
            return found

        return self._known.get(key, make)

    def compile(self, strategies: Iterable[Strategy]) -> None:
        """Compile what every rank of some strategies runs."""
        for strategy in strategies:
            placement = place(self.program.outline, strategy, [1] * len(strategy.pipelines))
            for rank, stage in placement.stage_of.items():
                degree = Degree.of(stage, rank)
                for block in self.program.blocks[slice(*stage.blocks)]:
                    self.get(block, degree, stage.recompute)
                    self.kinds(block, degree)

    def _compile(self, block: Block, parameters: Mapping[str, Parameter], degree: Degree, recompute: bool) -> Variant:
        template = self.program.templates[block.template]
        sharded = shard(template, parameters, degree, self._fused_head)
        if self._fused_head and degree.tp == 1:
            sharded = replace(sharded, graph=fuse_head(sharded.graph))
        partitioner = RECOMPUTE if recompute else self._partitioner
        variant = differentiate(
            template, sharded, parameters, degree, self.program.dtype, partitioner, block.name, self._learning(block)
        )
        if self._backend == "eager":
            return accumulate(variant) if self._added else variant
        strides = {name: shard_strides(p, degree) for name, p in parameters.items()}
        return compile_variant(variant, strides, self._device, where=block.name)

    def _learning(self, block: Block) -> frozenset[str]:
        """Return what a block computes gradients of: its parameters that learn, and the hidden state if others do."""
        local = self.program.templates[block.template].parameters
        names = {n for n, name in zip(local, block.parameters, strict=True) if name in self.program.learning}
        outline = self.program.outline
        return frozenset(names | ({"hidden"} if outline.index[block.name] > outline.lowest else set()))

    def kinds(self, block: Block, degree: Degree) -> Mapping[str, GradientKind]:
        """Return what the gradient of each of a block's parameters is in a rank's stage, by local name."""
        key = (block.template, replace(degree, index=0))
        if key not in self._kinds:
            template = self.program.templates[block.template]
            parameters = local_parameters(self.program, block, template)
            self._kinds[key] = gradient_kinds(template, parameters, degree)
        return self._kinds[key]


def local_parameters(program: Program, block: Block, template: Template) -> Mapping[str, Parameter]:
    """Return a template's own parameter names -> the parameters of one block that fill them."""
    return {n: program.parameters[c] for n, c in zip(template.parameters, block.parameters, strict=True)}


def shard_strides(parameter: Parameter, degree: Degree) -> tuple[int, ...]:
    """Return the strides of a rank's shard as the executor hands it over: a view of a flat buffer."""
    held = sum(hi - lo for lo, hi in parameter.intervals(degree.tp, degree.index))
    flat = torch.empty(held, device="meta")
    return tuple(parameter.natural(flat, degree.tp, degree.index).stride())


def vocabulary_starts(variant: Variant, parameters: Mapping[str, Parameter], degree: Degree) -> dict[str, Tensor]:
    """Return a variant's inputs that say which rows a rank holds of what is cut along the vocabulary (0-d int64)."""
    rules = {name: parameters[name].rule for name in variant.vocabulary}
    firsts = {name: rule.units(0, degree.tp, degree.index)[0] * rule.unit for name, rule in rules.items() if rule}
    return {start_of(name): torch.tensor(first) for name, first in firsts.items()}
