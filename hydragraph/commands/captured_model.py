"""Tracing of a run's model without weights, and its cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hydragraph.commands.launch_process import quieten
from hydragraph.commands.progress import Say
from hydragraph.errors import Unsupported
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from hydragraph.cost.corrections import Corrections
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.ir.program import Program
    from hydragraph.passes.variants import Variants
    from hydragraph.spec.assignment import Assignment
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.strategy import Strategy
    from hydragraph.train.plan_input import CostFiles


def meta_model(config: TrainConfig) -> nn.Module:
    from hydragraph.train.model import adapted, skeleton

    quieten()
    return adapted(skeleton(config.model, config.data.vocab_size), config.adapter, config.seed)


def program_of(config: TrainConfig, model: nn.Module) -> Program:
    import torch

    from hydragraph.frontend.capture import capture
    from hydragraph.train.model import captured_loss

    return capture(model, dtype=getattr(torch, config.dtype), **captured_loss(config))


def captured(config: TrainConfig) -> tuple[nn.Module, Program, Variants]:
    """Return a config's model on the meta device, its traced program, and a compiler of its graphs.

    Raises:
        Unsupported: the model cannot be captured.
        ValueError: model fields are invalid, or the vocabulary is too small for the tokenizer.
    """
    import torch

    from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
    from hydragraph.passes.compile_with_inductor import choose_backend
    from hydragraph.passes.variants import Variants
    from hydragraph.train.config_checks import check_model
    from hydragraph.train.data import known_vocabulary
    from hydragraph.train.model import adapted, check_vocabulary, skeleton

    quieten()
    data_vocabulary = None
    # Training may run on another machine, which has the data
    with suppress(ValueError, OSError):
        data_vocabulary = known_vocabulary(config)
    vocabulary, end_of_text = data_vocabulary or (config.data.vocab_size, 0)
    bare = skeleton(config.model, vocabulary, end_of_text)
    check_model(config, bare)
    if data_vocabulary is not None:
        check_vocabulary(config.model, bare, vocabulary)
    model = adapted(bare, config.adapter, config.seed)
    program = replace(program_of(config, model), push_dtype=getattr(torch, config.push_dtype))
    inductor = choose_backend(config.backend, torch.device(config.device or "cuda")) == "inductor"
    return model, program, Variants(program, fused_head=inductor, added=not inductor, cache=VariantCache())


def costs_of_run(
    config: TrainConfig, profile: Profile, cluster: Cluster, corrections: Corrections | None, **graphs: Any
) -> Costs:
    import torch

    from hydragraph.cost.costs import Costs
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.health import Health
    from hydragraph.train.optimizer import state_bytes

    dtype, pushed = (getattr(torch, name) for name in (config.dtype, config.push_dtype))
    element = state_bytes(config.optimizer, dtype, torch.device(config.device or "cuda"))
    plan = config.plan
    health = None
    if plan.cluster is not None and plan.health is not None and Cluster.load(plan.cluster) == cluster:
        health = Health.load(plan.health)
    return Costs(
        profile,
        cluster,
        health,
        home=config.home,
        corrections=corrections,
        push_itemsize=pushed.itemsize,
        state_bytes=element,
        **graphs,
    )


def strategies_and_costs(
    config: TrainConfig, cluster: Cluster, files: CostFiles, efficiency: float | None, say: Say, doubled: bool = False
) -> tuple[tuple[Strategy, ...], Costs, Program]:
    """Capture a config's model; return its strategies, costs and program.

    Args:
        doubled: whether datasheet costs also cover tensor-parallel degrees times 2, 4, ..., for advice.
    """
    from hydragraph.cost.compiled_blocks import CompiledBlocks
    from hydragraph.cost.datasheet import datasheet
    from hydragraph.train.config_checks import read_strategies

    say("capturing the model")
    model, program, variants = captured(config)
    strategies = read_strategies(config.strategies, model, len(cluster.devices))
    profile = files.profile
    if profile is None:
        degrees = {stage.tp for strategy in strategies for stage in strategy.stages}
        # degrees (1, 3) on nodes of 8 devices: 1, 2, 4, 8, 3 and 6.
        if doubled:
            most = max(Counter(device.node for device in cluster.devices).values())
            further = {tp << k for tp in degrees for k in range(most.bit_length()) if tp << k <= most}
            degrees |= set(filter(program.allows, further))
        profile = datasheet(program, cluster, efficiency, sorted(degrees))
    blocks = CompiledBlocks(program, variants.get)
    return strategies, costs_of_run(config, profile, cluster, files.corrections, blocks=blocks), program


def step_lengths(config: TrainConfig, drawn: Sequence[int] | None) -> list[int]:
    """Return a mini-batch's lengths, drawn from `drawn`; None: all are the maximum length."""
    from hydragraph.report.candidate_comparison import mini_batches
    from hydragraph.spec.training_workload import full_lengths

    if drawn is None:
        return full_lengths(config.data.tokens_per_step, config.data.max_length)
    data = [min(n, config.data.max_length) for n in drawn]
    return mini_batches(data, config.data.tokens_per_step, 1, 0)[0]


def run_assignment(
    config: TrainConfig, costs: Costs, strategy: Strategy, lengths: Sequence[int], known: bool
) -> Assignment:
    """Assign sequences to pipelines and micro-batches as a run does.

    Args:
        known: whether the run plans with `costs`; if not, or if no plan fits in memory, use `quick_plan`.
    """
    from hydragraph.planner.assignment.best_candidate import compare_pipelines
    from hydragraph.planner.quick_plan import assign

    # Fallback of runs without costs, or if no plan fits in memory.
    assignment = assign(strategy, lengths)
    with suppress(Unsupported):
        if known:
            assignment = compare_pipelines([costs.pipelines(strategy)], lengths).assignment
    return assignment.one_by_one if config.deterministic else assignment
