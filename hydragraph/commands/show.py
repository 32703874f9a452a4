"""`hydragraph show`: print a program, ranks' programs, passes, or a compiled folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydragraph.commands.captured_model import meta_model, program_of
from hydragraph.commands.options import (
    CommonOptions,
    argument,
    check_counts,
    check_memory,
    check_strategies,
    flag,
    micro_batches_option,
    option,
    read_counts,
    set_option,
    verb,
    with_strategies,
)
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.commands.show_folder import ShownFolder, ShownStrategy


@dataclass(frozen=True, kw_only=True)
class ShowOptions(CommonOptions):
    source: Path | None = argument(
        "The run's YAML file, such as examples/demo.yaml, or a folder that hydragraph compile wrote.",
        default=None,
        metavar="[CONFIG|DIR]",
    )
    strategies: list[str] | None = option(
        "Strategy to show. For a config: a text, such as '<tp2,pp1>', or a YAML file. For a folder: a number "
        "or a text; default: all.",
        "--strategy",
    )
    micro_batches: str = micro_batches_option(default="2")
    rank: int | None = option("Show only this rank, including in the views below.")
    parameter: str | None = option("Owners and users of a parameter, such as lm_head.weight.")
    memory: bool = flag("Peak memory of each rank, by kind.")
    limit: float | None = option("Mark ranks that exceed this memory of a device in bytes, such as 80e9.")
    traffic: bool = flag("Bytes sent between ranks and nodes, by kind.")
    node: int = option("Number of ranks per node, for --traffic.", default=8, min=1)
    tokens: int = option("Tokens per micro-batch, for --memory and --traffic.", default=2048, min=1)
    kernels: bool = flag("Registers, spills, bytes and minimum time of each kernel.")
    schedule: bool = flag("Each stage's forwards and backwards over time.")
    output: Path | None = option("With --schedule: also draw the schedule to this .svg or .png file.")
    diff: str | None = option("Differences from another folder, or from another strategy of this folder.")
    passes: bool = flag("List the passes; with a config, also show the effect of each pass.")
    overrides: list[str] | None = set_option()

    @property
    def looks(self) -> bool:
        """Whether an option requests a view of a compiled folder."""
        views = (self.memory, self.traffic, self.kernels, self.schedule)
        return any(views) or self.parameter is not None or self.diff is not None

    def check(self) -> None:
        check_counts(self.micro_batches)
        check_memory("--limit", self.limit)
        folder = self.source is not None and self.source.is_dir()
        if self.output is not None:
            from hydragraph.commands.show_schedule import check_drawn

            if not self.schedule:
                raise ValueError("--output names the picture of --schedule: give both options")
            check_drawn(self.output)
        if self.source is None and not self.passes:
            raise ValueError("show needs the YAML file of a run, a folder that hydragraph compile wrote, or --passes")
        if self.kernels and not folder and not (self.source is None and self.passes):
            raise ValueError(
                "--kernels needs a folder: write one with hydragraph compile CONFIG --device cuda --arch sm_90 "
                "--output DIR"
            )
        if folder and self.passes:
            raise ValueError("--passes needs the YAML file of a run: a folder contains only the passes' results")
        if folder and self.overrides:
            raise ValueError("--set changes a config, not a folder: compile again with --set, and show the new folder")
        if not folder and not self.looks and not self.passes and self.rank is not None and not self.strategies:
            raise ValueError(f"--rank {self.rank} shows a rank's program under a strategy: also give --strategy")


@verb
def show_command(options: ShowOptions) -> None:
    """Print a model's program, every rank's verified program (--strategy), or the contents of a compiled folder.

    A config is compiled first for --parameter, --memory, --traffic, --schedule and --diff.

    Example: hydragraph compile examples/demo.yaml --output compiled, then hydragraph show compiled --memory, hydragraph
    show compiled --strategy 2 --rank 3, hydragraph show compiled --strategy 1 --diff 2.
    """
    options.check()
    source = options.source
    if source is None:
        from hydragraph.commands.show_passes import list_passes

        print(*list_passes(), sep="\n")
    elif source.is_dir():
        _show_folder(source, options)
    else:
        config = TrainConfig.load(source, options.overrides or ())
        if options.looks:
            _show_compiled(config, options)
            return
        check_strategies(options.strategies or (), config.model, config.ranks)
        if options.passes:
            _show_passes(config, options)
        else:
            _show_programs(config, options)


def _show_folder(path: Path, options: ShowOptions) -> None:
    from hydragraph.commands.show_folder import ShownFolder, wrapped
    from hydragraph.ir.rank_program import to_text

    folder = ShownFolder.open(path)
    rank = options.rank
    folder.check_rank(rank)
    strategies = folder.chosen(options.strategies or ())
    if not options.looks and rank is not None:
        print(*(to_text(strategy.programs[rank]) for strategy in strategies), sep="\n")
        return
    for lines in _views(folder, strategies, options):
        print(*wrapped(lines), sep="\n")
    if options.output is not None:
        from hydragraph.commands.show_schedule import write_schedule

        write_schedule(strategies, options.output, rank)
        print(options.output)


def _views(folder: ShownFolder, found: Sequence[ShownStrategy], options: ShowOptions) -> Iterator[Iterator[str]]:
    from hydragraph.commands.show_kernels import kernel_lines
    from hydragraph.commands.show_memory import memory_lines
    from hydragraph.commands.show_parameter import parameter_lines
    from hydragraph.commands.show_schedule import schedule_lines
    from hydragraph.commands.show_traffic import traffic_lines

    rank = options.rank
    if not options.looks:
        yield _plain(folder, found if options.strategies else ())
    if options.parameter is not None:
        yield parameter_lines(folder, found, options.parameter, rank)
    if options.memory:
        yield memory_lines(found, rank, options.tokens, options.limit)
    if options.traffic:
        yield traffic_lines(found, rank, options.tokens, options.node)
    if options.kernels:
        yield kernel_lines(folder)
    if options.schedule:
        yield schedule_lines(found, rank)
    if options.diff is not None:
        yield _differences(folder, found, options.diff)


def _plain(folder: ShownFolder, found: Sequence[ShownStrategy]) -> Iterator[str]:
    from hydragraph.commands.show_folder import overview, ranks_text, shortened

    if not found:
        yield from overview(folder)
    for strategy in found:
        kinds = len(strategy.programs.bodies)
        yield f"{strategy.name}: {folder.summary.ranks} ranks run {kinds} kind{'s' * (kinds > 1)} of program"
        lines = []
        for kind, body in enumerate(strategy.programs.bodies):
            named = ranks_text(strategy.programs.of_kind(kind))
            lines.append(f"  program_{kind}.txt: {len(body):,} instructions, {named}")
        yield from shortened(lines)


def _differences(folder: ShownFolder, found: Sequence[ShownStrategy], other: str) -> Iterator[str]:
    from hydragraph.commands.show_diff import folder_diff, strategy_diff
    from hydragraph.commands.show_folder import ShownFolder

    if Path(other).is_dir():
        return folder_diff(folder, ShownFolder.open(Path(other)))
    if not found:
        raise ValueError(f"{folder.path}: no strategy in this folder fits, so none can be compared")
    return strategy_diff(found[0], folder.strategy(other))


def _show_compiled(config: TrainConfig, options: ShowOptions) -> None:
    from hydragraph.commands.compile import compile_quietly

    diff = options.diff
    config = replace(with_strategies(config, options.strategies, config.ranks), backend="eager")
    # --diff may name another strategy, which is compiled too.
    if diff is not None and not Path(diff).is_dir() and diff not in config.strategies:
        config = replace(config, strategies=(*config.strategies, diff))
    config.home.check(config.ranks)
    # Views read folders, so compile a config to a temporary one.
    with tempfile.TemporaryDirectory() as name:
        for record in compile_quietly(config, options.micro_batches, Path(name)).strategies:
            if record.problem:
                raise ValueError(f"{record.strategy}: {record.problem}")
        _show_folder(Path(name), options)


def _show_programs(config: TrainConfig, options: ShowOptions) -> None:
    from hydragraph.engine import api
    from hydragraph.ir.rank_program import to_text
    from hydragraph.train.config_checks import read_strategies

    rank = options.rank
    model = meta_model(config)
    program = program_of(config, model)
    if not options.strategies:
        print(program)
        return
    for strategy in read_strategies(options.strategies, model, config.ranks):
        counts = read_counts(options.micro_batches, len(strategy.pipelines))
        programs = api.lower(program, strategy, micro_batches=counts, ranks=config.ranks)
        programs.verify()
        if rank is not None and not 0 <= rank < len(programs):
            raise ValueError(f"--rank {rank} does not exist: give a rank from 0 to {len(programs) - 1}")
        for i, rank_program in enumerate(programs):
            if rank in (None, i):
                print(to_text(rank_program), end="\n\n")
        print(f"# {strategy}: the programs of {len(programs)} ranks are complete, consistent and free of deadlocks")


def _show_passes(config: TrainConfig, options: ShowOptions) -> None:
    from hydragraph.commands.show_passes import dump_passes, dump_program_passes
    from hydragraph.passes.variants import Variants
    from hydragraph.train.config_checks import read_strategies

    model = meta_model(config)
    program = program_of(config, model)
    inductor = config.backend == "inductor"
    variants = Variants(program, fused_head=inductor, added=not inductor)
    for strategy in read_strategies(options.strategies or ("<tp1,pp1>",), model, config.ranks):
        print(*dump_passes(program, variants, strategy, options.rank), sep="\n")
        ranks = max(config.ranks, max(strategy.devices) + 1)
        print(*dump_program_passes(program, strategy, ranks, options.rank), sep="\n")
