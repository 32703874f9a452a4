"""`hydragraph show`: the model's program, the programs of the ranks, and the passes that make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydragraph.commands.options import Debug, Set, Strategies, read_counts
from hydragraph.commands.process import quieten
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from hydragraph.ir.program import Program


def show_command(
    config: Annotated[Path | None, typer.Argument(help="The run's YAML file, such as examples/demo.yaml.")] = None,
    strategies: Strategies = None,
    micro_batches: Annotated[str, typer.Option(help="Of each pipeline, as in 4,2; one number is for all.")] = "2",
    rank: Annotated[int | None, typer.Option(help="Show this rank's program only.")] = None,
    passes: Annotated[
        bool,
        typer.Option("--passes", help="List the passes; with a config, what each makes of blocks and ranks."),
    ] = False,
    overrides: Set = None,
    debug: Debug = False,
) -> None:
    """Print the model's program and, with --strategy, the verified program of every rank."""
    if config is None and passes:
        from hydragraph.commands.show_passes import list_passes

        print(*list_passes(), sep="\n")
    elif config is not None and passes:
        _show_passes(TrainConfig.load(config, overrides or ()), tuple(strategies or ()), rank)
    elif config is not None:
        _show(TrainConfig.load(config, overrides or ()), tuple(strategies or ()), micro_batches, rank)
    else:
        raise ValueError("show needs the YAML file of a run, or --passes")


def _show(config: TrainConfig, strategies: Sequence[str], micro_batches: str, rank: int | None) -> None:
    """Print a program, or those of the ranks."""
    from hydragraph import api
    from hydragraph.ir.rank_program import to_text
    from hydragraph.train.loop import read_strategies

    model, program = _captured(config)
    if not strategies:
        print(program)
        return
    for strategy in read_strategies(strategies, model, config.ranks):
        counts = read_counts(micro_batches, len(strategy.pipelines))
        programs = api.lower(program, strategy, micro_batches=counts, ranks=config.ranks)
        programs.verify()
        if rank is not None and not 0 <= rank < len(programs):
            raise ValueError(f"--rank {rank}: there are ranks 0 to {len(programs) - 1}")
        for i, rank_program in enumerate(programs):
            if rank in (None, i):
                print(to_text(rank_program), end="\n\n")
        print(f"# {strategy}: the programs of {len(programs)} ranks are complete, agree and come to their end")


def _show_passes(config: TrainConfig, strategies: Sequence[str], rank: int | None) -> None:
    """Print what the passes make of each block and of a rank under each strategy; without one, on a single device."""
    from hydragraph.commands.show_passes import dump_passes, dump_program_passes
    from hydragraph.runtime.variants import Variants
    from hydragraph.train.loop import read_strategies

    model, program = _captured(config)
    inductor = config.backend == "inductor"  # whose own code has no text; what it is given has
    variants = Variants(program, fused_head=inductor, added=not inductor)
    for strategy in read_strategies(strategies or ("<tp1,pp1>",), model, config.ranks):
        print(*dump_passes(program, variants, strategy, rank), sep="\n")
        ranks = max(config.ranks, max(strategy.devices) + 1)
        print(*dump_program_passes(program, strategy, ranks, rank), sep="\n")


def _captured(config: TrainConfig) -> tuple[nn.Module, Program]:
    """Return a run's model, without weights, and its program."""
    import torch

    from hydragraph.frontend.capture import capture
    from hydragraph.train.model import skeleton

    quieten()
    model = skeleton(config.model, config.data.vocab_size)
    return model, capture(model, dtype=getattr(torch, config.dtype))
