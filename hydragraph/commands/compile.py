"""`hydragraph compile`: compile a run's model ahead of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from hydragraph.commands.captured_model import program_of
from hydragraph.commands.launch_process import quieten
from hydragraph.commands.options import (
    ConfigOptions,
    StrategyOptions,
    check_counts,
    flag,
    micro_batches_option,
    option,
    read_counts,
    verb,
)
from hydragraph.commands.text_table import new_table
from hydragraph.report.number_text import bytes_text, console, counts_text, seconds_text
from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.commands.compile_ahead import CompiledStrategy, Compiler
    from hydragraph.commands.compile_files import Summary
    from hydragraph.private.absent_gpu import BuiltKernel
    from hydragraph.runtime.deterministic_sums import Deterministic


@dataclass(frozen=True, kw_only=True)
class CompileOptions(ConfigOptions, StrategyOptions):
    micro_batches: str = micro_batches_option(default="2")
    output: Path = option("Folder to write; an earlier compiled folder is replaced.", default=Path("compiled"))
    ranks: int | None = option("Number of ranks of the run; default: the config's.", min=1, max=MOST_DEVICES)
    backend: str | None = option(
        "inductor, which also fills Inductor's cache on this machine, or eager. Default: the config's."
    )
    device: str | None = option("Device that Inductor compiles for: cuda or cpu. Default: the config's.")
    arch: str | None = option(
        "With --device cuda: compile for sm_80, sm_90 or sm_100 without a GPU. See show --kernels."
    )
    trust: bool = flag("Also write Inductor's code for train --trust.")

    def load(self) -> TrainConfig:
        config = self.apply(super().load())
        return replace(
            config,
            ranks=self.ranks or config.ranks,
            backend=self.backend or config.backend,
            device=self.device or config.device,
        )


@verb
def compile_command(options: CompileOptions) -> None:
    """Compile a model for its strategies and verify all programs, without data, devices or weights.

    The output folder contains the program, ranks' instructions, graphs as Python code, and a summary. The exit code is
    1 if a strategy cannot be compiled.

    Example: hydragraph compile examples/demo.yaml --strategy '<tp4,pp1>' --strategy '<tp2,pp1> + <tp1,pp2>' --output
    compiled, then read compiled/graphs and compiled/strategies.
    """
    from hydragraph.commands.compile_files import check_folder
    from hydragraph.kernels.gpu_arch import arch_of

    output, arch = options.output, options.arch
    check_folder(output)
    config = options.load()
    if arch is not None and (config.device != "cuda" or config.backend == "eager"):
        raise ValueError(f"--arch {arch} compiles GPU code with Inductor: also pass --device cuda --backend inductor")
    if arch is not None:
        arch_of(arch)
    config.home.check(config.ranks)
    check_counts(options.micro_batches)
    summary = compile_quietly(config, options.micro_batches, output, options.trust, arch)
    _print_variants(summary)
    _print_strategies(summary)
    print(f"wrote program.txt, graphs, strategies and summary.json: train with hydragraph train --compiled {output}")
    problems = [compiled for compiled in summary.strategies if compiled.problem]
    for failed in problems:
        print(f"hydragraph: {failed.strategy}: {failed.problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)


def _tokens(config: TrainConfig) -> tuple[int, int]:
    """Return vocabulary size and end-of-text id; print a note if they are guesses."""
    from hydragraph.train.data import known_vocabulary

    # Training may run on another machine, which has the data
    with suppress(ValueError, OSError):
        data_vocabulary = known_vocabulary(config)
        if data_vocabulary is not None:
            return data_vocabulary
    if config.model.architecture is not None and "vocab_size" not in (config.model.config or {}):
        print(
            f"hydragraph: the tokenizer is not trained yet, so its vocabulary is assumed to have "
            f"{config.data.vocab_size} tokens (data.vocab_size). If the trained tokenizer has fewer, training "
            "rejects the folder: then compile again, or set model.config.vocab_size now",
            file=sys.stderr,
        )
    return config.data.vocab_size, 0


def compile_quietly(
    config: TrainConfig, micro_batches: str, output: Path, trust: bool = False, arch: str | None = None
) -> Summary:
    import torch

    from hydragraph.commands.compile_ahead import Compiler
    from hydragraph.commands.compile_files import summarise, write_folder
    from hydragraph.commands.compile_kernels import KernelsFile
    from hydragraph.engine.candidate_strategies import home_on
    from hydragraph.frontend.check.check_once import check_here, mode_of
    from hydragraph.frontend.check.narrow_model import CheckedModel, LibraryModel
    from hydragraph.frontend.check.stage_check import StageCheck
    from hydragraph.frontend.compiled_folder.inductor_code import write_code
    from hydragraph.frontend.compiled_folder.manifest import Check
    from hydragraph.frontend.compiled_folder.model_record import model_record
    from hydragraph.frontend.compiled_folder.save import named_variants, save
    from hydragraph.frontend.meta_initialiser import initial_buffers
    from hydragraph.frontend.packed_inputs import token_cross_entropy
    from hydragraph.ir.home_layout import HomeLayouts
    from hydragraph.kernels.gpu_arch import arch_of
    from hydragraph.passes.compile_with_inductor import TUNED, choose_backend
    from hydragraph.private.absent_gpu import absent_gpu
    from hydragraph.runtime.deterministic_sums import Deterministic
    from hydragraph.spec.strategy import Strategy
    from hydragraph.train.model import adapted, captured_loss, skeleton

    quieten()
    here = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cuda:0" if arch else here)
    chosen = choose_backend(config.backend, device)
    if device.type == "cuda" and chosen == "inductor" and not (arch or torch.cuda.is_available()):
        raise ValueError(f"device {here!r}: PyTorch finds no GPU here: also pass --arch, such as --arch sm_90")
    screen = Console(stderr=True)
    with Progress(console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task("capturing the model", total=None)
        model = adapted(skeleton(config.model, *_tokens(config)), config.adapter, config.seed)
        began = time.perf_counter()
        loss = captured_loss(config)
        program = program_of(config, model)
        checked = CheckedModel(model, program, loss=loss["loss"] or token_cross_entropy, example=loss["example"])
        line = check_here(checked, config.check)
        seconds = time.perf_counter() - began
        config.home.check(config.ranks, [bucket.name for bucket in program.buckets])
        usable = []
        for text in config.strategies:
            # Reported by `_compiled`
            with suppress(ValueError):
                usable.append(Strategy.read(text, program.layers))
        # All ranks count as one node: the run's machines are unknown.
        home = home_on(program, usable, config.home, [0] * config.ranks)
        owners = HomeLayouts(home.on([0] * config.ranks), config.ranks)
        built: dict[str, BuiltKernel] | None = None if arch is None else {}
        gpu: AbstractContextManager[None] = nullcontext()
        if arch is not None and built is not None:
            gpu = absent_gpu(arch_of(arch), built)
        tell = lambda what: bar.update(task, advance=1, description=escape(what))  # noqa: E731
        # `gpu` makes Inductor and Triton compile for an absent GPU.
        compiler = Compiler(program, owners, chosen, device, tell, built)
        bar.update(task, total=compiler.steps(usable))
        with _threads_of_a_rank(config.ranks), gpu:
            sums = Deterministic("") if config.deterministic else None
            compiled = [_compiled(compiler, text, program.layers, micro_batches, sums) for text in config.strategies]
        summary = summarise(program, compiler, compiled, str(owners.home), seconds)
        write_folder(output, program, summary, compiler, compiled)
        # Strategies that did not compile have no graphs.
        fitting = [result.programs.strategy for result in compiled if result.programs is not None]
        library_model = LibraryModel.of(checked)
        stages = StageCheck(program, initial_buffers(model), chosen == "inductor", model=library_model)
        if mode_of(config.check) != "off":
            for strategy in fitting:
                bar.update(task, description=escape(f"checking {strategy.name}"))
                stages.check(strategy)
        check = Check(mode_of(config.check), line, stages.passed)
        bar.update(task, description="writing")
        if trust and chosen == "inductor" and not write_code(output):
            print("hydragraph: --trust: Inductor produced no code to write", file=sys.stderr)
        if arch is not None and built is not None:
            KernelsFile(arch, TUNED, tuple(compiler.graphs)).save(output, built.values())
        record = model_record(model, **loss)
        save(output, program, named_variants(compiler.traced, fitting), record, check, config.ranks, arch)
    return summary


@contextmanager
def _threads_of_a_rank(ranks: int) -> Iterator[None]:
    """Use a rank's number of threads, which affects Inductor's CPU code."""
    import torch

    from hydragraph.cluster.processes.compute_threads import threads_of

    before = torch.get_num_threads()
    torch.set_num_threads(threads_of(ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compiled(
    compiler: Compiler, text: str, layers: int, micro_batches: str, sums: Deterministic | None
) -> CompiledStrategy:
    from hydragraph.commands.compile_ahead import CompiledStrategy, StrategyRecord
    from hydragraph.engine.compiled_model import check_modes
    from hydragraph.spec.strategy import Strategy

    # An unreadable strategy is named by its text.
    name = text
    try:
        strategy = Strategy.read(text, layers)
        name = strategy.name
        check_modes([strategy], compiler.backend, sums)
        return compiler.compile(strategy, read_counts(micro_batches, len(strategy.pipelines)))
    except ValueError as error:
        return CompiledStrategy(StrategyRecord(name, problem=str(error)))


def _print_variants(summary: Summary) -> None:
    count = summary.parameters
    size = f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
    captured = f"{size} parameters in {summary.dtype}, captured in {seconds_text(summary.capture_seconds)}"
    title = f"{summary.model}: {summary.layers} layers, {captured}; {summary.backend}"
    headings = ("template", "variant", "blocks", "forward", "backward", "saved", "bytes/token", "took")
    table = new_table(title, headings, left=("template", "variant"))
    for variant in summary.variants:
        counts = (len(variant.blocks), variant.forward_nodes, variant.backward_nodes, variant.saved_values)
        size = f"{variant.saved_bytes_per_token:,.0f}"
        table.add_row(variant.template, variant.name, *map(str, counts), size, seconds_text(variant.seconds))
    console().print(table)


def _print_strategies(summary: Summary) -> None:
    headings = ("strategy", "micro-batches", "instructions", "pulled", "pushed", "")
    table = new_table(f"on {summary.ranks} ranks", headings, left=("strategy", ""))
    for strategy in summary.strategies:
        if strategy.problem:
            table.add_row(escape(strategy.strategy), "", "", "", "", "DOES NOT FIT")
            continue
        moved = (bytes_text(strategy.pull_bytes), bytes_text(strategy.push_bytes))
        numbers = (counts_text(strategy.micro_batches), f"{strategy.instructions:,}", *moved)
        table.add_row(escape(strategy.strategy), *numbers, "verified")
    console().print(table)
