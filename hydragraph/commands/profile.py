"""`hydragraph profile`: measure micro-batches' times on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress

from hydragraph.commands.captured_model import meta_model, program_of
from hydragraph.commands.launch_process import launched, leads, on_ranks
from hydragraph.commands.options import ConfigOptions, check_strategies, check_written, flag, option, verb
from hydragraph.commands.text_table import new_table
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.measured_profile import Profile, Scheme
    from hydragraph.ir.program import Program
    from hydragraph.spec.stage_kind import StageKind
    from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ConfigOptions):
    schemes: str | None = option(
        "Schemes such as tp1pp1,tp2pp4; each is measured on as many ranks as its tp degree. Default: all "
        "schemes that fit the ranks."
    )
    out: Path = option("The JSON file to write.", "--output", "--out", default=Path("profile.json"))
    sequence_parallel: bool = flag("Also measure stages with sequence parallelism.")
    recompute: bool = flag("Also measure stages that recompute.")
    sums_in_pieces: bool = flag("Also measure stages with tensor-parallel sums in pieces.")
    longest: int | None = option(
        "Tokens in the longest micro-batch; more tokens measure attention more accurately.", min=64
    )
    repeats: int = option(
        "Maximum runs per measurement; fewer if their times agree. The median is used.", default=5, min=1
    )
    type_: str = option(
        "Name of this type of device in cluster files; default: the device's own name.", "--type", default=""
    )


@verb
def profile_command(options: ProfileOptions) -> None:
    """Measure micro-batches' times on this machine under each scheme, and write a file for planners.

    Each distinct block is timed per kind of stage and micro-batch size. A stage takes the sum of its blocks' times.

    Example: hydragraph profile examples/demo.yaml --schemes tp1pp1,tp2pp1,tp2pp2 --output profile.json, then
    hg.Profile.load('profile.json'). Under torchrun, the command measures on the ranks that torchrun started.
    """
    config = options.load()
    check_written("--output", options.out)
    schemes = None if options.schemes is None else _read_schemes(options.schemes)
    if not (launched() or config.automatic):
        check_strategies(config.strategies, config.model, config.ranks)
    profile, ranks = on_ranks(config.ranks, profile_rank, config, schemes, options)
    if leads():
        profile.save(options.out)
        _print_profile(profile, ranks, options.out)
    if not profile.schemes:
        raise typer.Exit(1)


def profile_rank(
    config: TrainConfig, schemes: tuple[Scheme, ...] | None, options: ProfileOptions
) -> tuple[Profile, int]:
    from datetime import timedelta

    from hydragraph.cluster.communicators import Groups
    from hydragraph.cluster.launch import join
    from hydragraph.frontend.meta_initialiser import initial_buffers
    from hydragraph.ir.hidden_state import hidden_size
    from hydragraph.runtime.deterministic_sums import Deterministic
    from hydragraph.runtime.profile_measurement import MeasuredModel, MeasureSettings, measure
    from hydragraph.train.config_checks import read_strategies

    world = join(config.device)
    model = meta_model(config)
    program = program_of(config, model)
    chosen = schemes or _every_scheme(program, world.ranks)
    strategies = () if config.automatic else read_strategies(config.strategies, model, world.ranks)
    kinds = _kinds(strategies, chosen, options)
    # Attention grows with T * T, the rest with T * hidden size: measure sequences for which both
    # matter.
    tokens = options.longest or max(config.data.max_length, 4 * hidden_size(program), 1024)
    settings = MeasureSettings(chosen, kinds, tokens, options.repeats)
    sizes: Any = model.config
    vocabulary = int(sizes.vocab_size)
    positions = getattr(sizes, "max_position_embeddings", None)
    backend = config.backend
    if config.deterministic:
        backend = "eager"
        Deterministic.begin(world.device, backend)
    subject = MeasuredModel(program, initial_buffers(model), vocabulary, positions, backend, options.type_)
    console = Console(stderr=True)
    with Progress(console=console, disable=world.rank != 0 or not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"measuring {what}")

        groups = Groups(world, timedelta(minutes=10))
        measured = measure(subject, settings, groups, tell)
        groups.close()
    return measured, world.ranks


def _read_schemes(text: str) -> tuple[Scheme, ...]:
    matches = [re.fullmatch(r"tp([1-9]\d*)pp([1-9]\d*)", part.strip()) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"--schemes {text!r}: write schemes like tp1pp1,tp2pp4")
    return tuple(dict.fromkeys((int(match[1]), int(match[2])) for match in matches if match))


def _every_scheme(program: Program, ranks: int) -> tuple[Scheme, ...]:
    degrees = list(filter(program.allows, range(1, ranks + 1)))
    return tuple((tp, pp) for tp in degrees for pp in range(1, min(ranks // tp, program.layers) + 1))


def _kinds(
    strategies: tuple[Strategy, ...], schemes: tuple[Scheme, ...], options: ProfileOptions
) -> tuple[StageKind, ...]:
    from hydragraph.spec.stage_kind import StageKind

    kinds = [stage.kind for strategy in strategies for stage in strategy.stages]
    again = [False, True] if options.recompute else [False]
    for tp in dict.fromkeys(tp for tp, _ in schemes):
        parallel = [False, True] if options.sequence_parallel and tp > 1 else [False]
        kinds += [StageKind(tp, split, recompute) for split in parallel for recompute in again]
        if options.sums_in_pieces and tp > 1:
            kinds += [StageKind(tp, False, recompute, sums_in_pieces=True) for recompute in again]
    return tuple(kinds)


def _print_profile(profile: Profile, ranks: int, path: Path) -> None:
    from hydragraph.cost.schemes import schemes_of

    windows = any(k.near for k in profile.schemes.values())
    near_heading = ["near ns/pair"] if windows else []
    headings = ("scheme", "a ns/tok\u00b2", "b \u00b5s/tok", "c ms", *near_heading, "residual", "MaxLen", "UtilLen")
    table = new_table(profile.name, headings, left=("scheme",))
    for scheme, k in profile.schemes.items():
        devices = max(ranks, scheme[0] * scheme[1])
        limit = schemes_of(profile, devices).max_len(scheme, devices)
        near = ", ".join(f"{1e9 * per_pair:.4g} ({reach})" for reach, per_pair in k.near)
        constants = (f"{1e9 * k.a:.4g}", f"{1e6 * k.b:.4g}", f"{1e3 * k.c:.4g}", *([near] if windows else []))
        numbers = (*constants, f"{profile.residuals[scheme]:.1%}")
        table.add_row(f"<tp{scheme[0]},pp{scheme[1]}>", *numbers, f"{limit:,}", f"{profile.util_len(scheme):,}")
    Console().print(table)
    for tp, pp in profile.failed:
        print(f"FAILED <tp{tp},pp{pp}>: {profile.failed[tp, pp]}")
    for kind, why in profile.unfit.items():
        print(f"FAILED stages of kind {kind.text}: {why}")
    if profile.link is not None:
        link = profile.link
        print(f"link between ranks 0 and 1: {link.bytes_per_s / 1e9:.3g} GB/s, latency {1e6 * link.latency_s:.3g} us")
    if profile.update is not None:
        constant, per_parameter = profile.update
        print(
            f"device type {profile.type}: an update takes {1e6 * constant:.3g} us + {1e9 * per_parameter:.3g} ns per "
            f"element of a rank's shard, and the commit (all-reduce and gradient norm) before it takes "
            f"{1e6 * profile.commit_s:.3g} us + {1e9 * profile.norm_s:.3g} ns per element"
        )
    for note in profile.notes:
        print(f"note: {note}")
    print(f"wrote {path}: load it with hg.Profile.load")
