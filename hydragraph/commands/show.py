"""`hydragraph show`: a model's program, the ranks' programs and passes, and the contents of a compiled folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydragraph.commands.launch_process import quieten
from hydragraph.commands.options import Debug, Set, check_counts, read_counts
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from hydragraph.commands.show_folder import ShownFolder, ShownStrategy
    from hydragraph.ir.program import Program

EXAMPLE = (
    "Example: hydragraph compile examples/demo.yaml --output compiled, then hydragraph show compiled --memory, "
    "hydragraph show compiled --parameter model.norm.weight, hydragraph show compiled --strategy 2 --rank 3, "
    "hydragraph show compiled --strategy 1 --diff 2, hydragraph show compiled --schedule --output schedule.svg."
)


def show_command(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG|DIR]",
            help="The run's YAML file, such as examples/demo.yaml, or a folder that hydragraph compile wrote.",
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", help="A text or a YAML file; for a folder, also the strategy's number in it. Default: all."
        ),
    ] = None,
    micro_batches: Annotated[
        str, typer.Option(help="Micro-batches of each pipeline, such as 4,2; one number for all.")
    ] = "2",
    rank: Annotated[int | None, typer.Option(help="Show only this rank, in the views below as well.")] = None,
    parameter: Annotated[
        str | None, typer.Option(help="Owners and users of a parameter, such as lm_head.weight.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory of each rank, by kind.")] = False,
    limit: Annotated[
        float | None, typer.Option("--limit", help="Memory of a device in bytes, such as 80e9: mark what exceeds it.")
    ] = None,
    traffic: Annotated[bool, typer.Option("--traffic", help="The bytes between ranks and nodes, by kind.")] = False,
    node: Annotated[int, typer.Option(min=1, help="Ranks of a node, for --traffic.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, for --memory and --traffic.")] = 2048,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="Registers, spills, bytes and least time of each kernel of a folder compiled with --arch."
        ),
    ] = False,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Forwards and backwards of each stage over time.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="With --schedule: a picture of it, .svg or .png.")] = None,
    diff: Annotated[
        str | None, typer.Option(help="Differences from another folder, or from another strategy of this one.")
    ] = None,
    passes: Annotated[
        bool,
        typer.Option("--passes", help="List the passes; with a config, what each makes of blocks and ranks."),
    ] = False,
    overrides: Set = None,
    debug: Debug = False,
) -> None:
    """Print a model's program, every rank's verified program (--strategy), or what a compiled folder holds.

    A folder is read without tracing. A config is compiled first for --parameter, --memory, --traffic, --schedule and
    --diff.
    """
    chosen = tuple(strategies or ())
    check_counts(micro_batches)
    looks = parameter is not None or memory or traffic or kernels or schedule or diff is not None
    if output is not None and not schedule:
        raise ValueError("--output is for the picture of --schedule: give both")
    if output is not None:
        from hydragraph.commands.show_schedule import check_drawn

        check_drawn(output)
    if source is None and passes:
        from hydragraph.commands.show_passes import list_passes

        print(*list_passes(), sep="\n")
        return
    if source is None:
        raise ValueError("show needs the YAML file of a run, a folder of hydragraph compile, or --passes")
    if kernels and not source.is_dir():
        raise ValueError("--kernels needs a folder: hydragraph compile CONFIG --device cuda --arch sm_90 --output DIR")
    if source.is_dir() and passes:
        raise ValueError("--passes needs the YAML file of a run: a folder holds what the passes have made")

    def look(path: Path, named: Sequence[str]) -> None:
        from hydragraph.commands.show_folder import ShownFolder, wrapped

        folder = ShownFolder.open(path)
        folder.check_rank(rank)
        found = folder.chosen(named)
        if not looks and rank is not None:
            print(*_rank_programs(found, rank), sep="\n")
        elif not looks:
            print(*wrapped(_plain(folder, found if named else ())), sep="\n")
        if parameter is not None:
            from hydragraph.commands.show_parameter import parameter_lines

            print(*wrapped(parameter_lines(folder, found, parameter, rank)), sep="\n")
        if memory:
            from hydragraph.commands.show_memory import memory_lines

            print(*wrapped(memory_lines(folder, found, rank, tokens, limit)), sep="\n")
        if traffic:
            from hydragraph.commands.show_traffic import traffic_lines

            print(*wrapped(traffic_lines(folder, found, rank, tokens, node)), sep="\n")
        if kernels:
            from hydragraph.commands.show_kernels import kernel_lines

            print(*wrapped(kernel_lines(folder)), sep="\n")
        if schedule:
            from hydragraph.commands.show_schedule import schedule_lines, write_schedule

            print(*wrapped(schedule_lines(found, folder.data.outline, rank)), sep="\n")
            if output is not None:
                write_schedule(found, folder.data.outline, output, rank)
                print(output)
        if diff is not None:
            print(*wrapped(_differences(folder, found, diff)), sep="\n")

    if source.is_dir():
        if overrides:
            raise ValueError("--set changes a config: compile it again, and show that folder")
        look(source, chosen)
    elif looks:
        config = TrainConfig.load(source, overrides or ())
        if chosen:
            config = replace(config, strategies=chosen)
        if diff is not None and not Path(diff).is_dir() and diff not in config.strategies:
            config = replace(config, strategies=(*config.strategies, diff))
        with tempfile.TemporaryDirectory() as folder:
            _compile_to(Path(folder), config, micro_batches)
            look(Path(folder), chosen)
    elif passes:
        _show_passes(TrainConfig.load(source, overrides or ()), chosen, rank)
    elif rank is not None and not chosen:
        raise ValueError(f"--rank {rank} needs a strategy to show a rank's program: also give --strategy")
    else:
        _show(TrainConfig.load(source, overrides or ()), chosen, micro_batches, rank)


def _rank_programs(found: Sequence[ShownStrategy], rank: int) -> Iterator[str]:
    """Yield a rank's full program under each strategy."""
    from hydragraph.ir.rank_program import to_text

    return (to_text(each.program(rank)) for each in found)


def _plain(folder: ShownFolder, found: Sequence[ShownStrategy]) -> Iterator[str]:
    """Yield what a folder holds; of strategies, the kinds of program."""
    from hydragraph.commands.show_folder import overview, ranks_text, shortened

    if not found:
        yield from overview(folder)
    for each in found:
        yield f"{each.name}: {folder.summary.ranks} ranks run {len(each.programs.bodies)} kinds of program"
        lines = []
        for kind, body in enumerate(each.programs.bodies):
            named = ranks_text(each.programs.of_kind(kind))
            lines.append(f"  program_{kind}.txt: {len(body):,} instructions, {named}")
        yield from shortened(lines)


def _differences(folder: ShownFolder, found: Sequence[ShownStrategy], other: str) -> Iterator[str]:
    from hydragraph.commands.show_diff import folder_diff, strategy_diff
    from hydragraph.commands.show_folder import ShownFolder

    if Path(other).is_dir():
        return folder_diff(folder, ShownFolder.open(Path(other)))
    if not found:
        raise ValueError(f"{folder.path}: none of its strategies fits, so none can be compared")
    return strategy_diff(found[0], folder.strategy(other))


def _compile_to(folder: Path, config: TrainConfig, micro_batches: str) -> None:
    """Compile a config into a folder; a strategy that does not fit is an error."""
    from hydragraph.commands.compile import compile_quietly

    config.home.check(config.ranks)
    for record in compile_quietly(replace(config, backend="eager"), micro_batches, folder).strategies:
        if record.problem:
            raise ValueError(f"{record.strategy}: {record.problem}")


def _show(config: TrainConfig, strategies: Sequence[str], micro_batches: str, rank: int | None) -> None:
    """Print a program, or those of the ranks."""
    from hydragraph.engine import api
    from hydragraph.ir.rank_program import to_text
    from hydragraph.train.config_checks import read_strategies

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
    from hydragraph.passes.variants import Variants
    from hydragraph.train.config_checks import read_strategies

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
    from hydragraph.train.model import captured_loss, skeleton

    quieten()
    model = skeleton(config.model, config.data.vocab_size)
    return model, capture(model, dtype=getattr(torch, config.dtype), **captured_loss(config))
