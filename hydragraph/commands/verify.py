"""`hydragraph verify`: compare strategies with one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from hydragraph.commands.launch_process import launched, on_ranks, quieten
from hydragraph.commands.options import ConfigOptions, StrategyOptions, check_strategies, verb
from hydragraph.commands.text_table import new_table
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.engine.single_device_parity import ParityRow


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ConfigOptions, StrategyOptions):
    def load(self) -> TrainConfig:
        config = super().load()
        return replace(self.apply(config, config.ranks), device="cpu", dtype="float32")


@verb
def verify_command(options: VerifyOptions) -> None:
    """Compare every strategy's loss and gradients with those of one device, on the CPU.

    The exit code is 1 if an error exceeds its tolerance.
    """
    config = options.load()
    if not launched():
        check_strategies(config.strategies, config.model, config.ranks)
        config.home.check(config.ranks)
    rows = on_ranks(config.ranks, verify_rank, config)
    if rows:
        _print_rows(rows)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def verify_rank(config: TrainConfig) -> list[ParityRow]:
    from hydragraph.cluster.launch import join
    from hydragraph.engine import api
    from hydragraph.engine.single_device_parity import reference, verify
    from hydragraph.frontend.same_masks import same_masks
    from hydragraph.kernels.philox import key_of, keys_of
    from hydragraph.train.config_checks import check_settings, read_strategies
    from hydragraph.train.data import mini_batches
    from hydragraph.train.loop import shared_tokens
    from hydragraph.train.model import adapted, build_model, captured_loss
    from hydragraph.train.optimizer import optimizer_factory
    from hydragraph.train.paired_steps import PairedSteps
    from hydragraph.train.progress_line import Screen

    quieten()
    with Screen(Console(stderr=True)) as screen:
        world = join("cpu")
        check_settings(config, world.ranks)
        tokens = shared_tokens(config, world, screen)
        model = build_model(config.model, tokens.vocabulary, tokens.end_of_text, config.seed)
        model = adapted(model, config.adapter, config.seed)
        strategies = read_strategies(config.strategies, model, world.ranks)
        factory = optimizer_factory(config.optimizer, model)
        # `verify` is stricter than the executor's own check.
        options: dict[str, Any] = {"device": "cpu", "check": "off", "home": config.home, "seed": config.seed}
        executor = api.compile(model, strategies[0], optimizer=factory, **captured_loss(config), **options)

        def masks(number: int, length: int) -> AbstractContextManager[None]:
            return same_masks(model, executor.program, keys_of(key_of(config.seed, 1), [length], [number]))

        batch: Any = next(mini_batches(config, tokens))
        if config.objective is not None:
            batch = PairedSteps(executor, config.objective.loss).weighted(batch)
        drawn = masks if executor.program.drops else None
        expected = reference(model, batch, drawn, config.label_smoothing) if world.rank == 0 else None
        rows = verify(executor, strategies, batch, expected)
        executor.close()
        return rows


def _print_rows(rows: Sequence[ParityRow]) -> None:
    headings = ("strategy", "loss", "relative error", "worst gradient", "error / tolerance", "")
    table = new_table(
        "compared with one device (gradient error / tolerance must be at most 1)", headings, left=headings
    )
    for row in rows:
        verdict = "ok" if row.passed else "WRONG"
        numbers = (f"{row.loss:.6f}", f"{row.loss_error:.1e}", row.parameter, f"{row.ratio:.3f}")
        table.add_row(escape(row.strategy), *numbers, verdict)
    Console().print(table)
