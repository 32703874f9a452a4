"""Compiled templates: each (template, tensor-parallel degree, local shapes) is compiled once and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Block, Program, Template
from hydragraph.passes.differentiate import RECOMPUTE, Variant, differentiate
from hydragraph.passes.shard import Degree, gradient_kinds, shard


class Variants:
    """The variants of one program that this process has compiled.

    Args:
        program: the captured model.
        partitioner: "min_cut" or "default" (functorch's).
    """

    def __init__(self, program: Program, partitioner: str = "min_cut") -> None:
        self._program, self._partitioner = program, partitioner
        self._known: dict[object, Variant] = {}
        self._kinds: dict[tuple[str, Degree], Mapping[str, GradientKind]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, block: Block, degree: Degree, recompute: bool = False) -> Variant:
        """Return the variant of a block for one rank of a stage, compiling it at most once.

        Args:
            recompute: save the block's inputs only.
        """
        template = self._program.templates[block.template]
        parameters = local_parameters(self._program, block, template)
        shapes = tuple(p.local_shape(degree.tp, degree.index) for p in parameters.values())
        key = (template.name, degree.tp, degree.sequence_parallel, shapes, recompute)
        if key not in self._known:
            sharded = shard(template, parameters, degree)
            dtype = self._program.dtype
            partitioner = RECOMPUTE if recompute else self._partitioner
            self._known[key] = differentiate(template, sharded, parameters, degree, dtype, partitioner)
        return self._known[key]

    def kinds(self, block: Block, degree: Degree) -> Mapping[str, GradientKind]:
        """Return what the gradient of each of a block's parameters is in a rank's stage, by local name."""
        key = (block.template, replace(degree, index=0))
        if key not in self._kinds:
            template = self._program.templates[block.template]
            parameters = local_parameters(self._program, block, template)
            self._kinds[key] = gradient_kinds(template, parameters, degree)
        return self._kinds[key]


def local_parameters(program: Program, block: Block, template: Template) -> Mapping[str, Parameter]:
    """Return a template's own parameter names -> the parameters of one block that fill them."""
    return {n: program.parameters[c] for n, c in zip(template.parameters, block.parameters, strict=True)}


def vocabulary_start(variant: Variant, parameters: Mapping[str, Parameter], degree: Degree) -> int:
    """Return the first row that a rank holds of the parameter that a variant cuts along the vocabulary; 0 for none."""
    rule = parameters[variant.vocabulary].rule if variant.vocabulary else None
    return rule.units(0, degree.tp, degree.index)[0] * rule.unit if rule else 0
