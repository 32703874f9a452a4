"""Whether a strategy fits a program and a world; asked before anything is lowered."""

from __future__ import annotations

from hydragraph.ir.program import Program
from hydragraph.passes.uncut import refuse_uncut
from hydragraph.spec.strategy import Strategy


def check_strategy(program: Program, strategy: Strategy, ranks: int) -> None:
    """Check that a strategy fits a model and a world, on every rank alike.

    Raises:
        ValueError: wrong layers, unknown ranks, heads that do not divide.
        Unsupported: a stage's degree cannot cut a parameter, or cuts nothing.
    """
    strategy.check(program.layers, ranks, program.heads)
    for tp in {stage.tp for pipeline in strategy.pipelines for stage in pipeline.stages} - {1}:
        for parameter in program.parameters.values():
            parameter.intervals(tp, 0)
    refuse_uncut(program, strategy)
