"""`hydragraph plan --cluster`: plan for devices that differ."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from hydragraph.commands.options import chosen_home
from hydragraph.commands.plan_options import PlanOptions
from hydragraph.spec.strategy_text import planned_schedules
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.compiled_blocks import VariantOf
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.planner.plan import Plan
    from hydragraph.planner.rental_budget import RentalOffer
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.home import Home
    from hydragraph.spec.stage_kind import StageKind
    from hydragraph.spec.strategy import Strategy
    from hydragraph.spec.training_workload import Workload

Say = Callable[[str], None]

COMPILING = 0.6  # fraction of the deadline
EXPLAINING = 1.0  # relative to the planning time
OFFERED = 4  # offers printed


def plan_devices(asked: PlanOptions) -> None:
    """Plan, print the plan, and write files; the deadline is measured from this call."""
    from hydragraph.spec.cluster import Cluster

    began = time.monotonic()
    assert asked.cluster is not None, "plan_command has checked it"
    # Mistakes are reported before the planner is imported.
    cluster = Cluster.load(asked.cluster)
    config = None if asked.model is None else TrainConfig.load(asked.model)
    workload = asked.workload(config)

    from hydragraph.planner.first_compilation import first_compilation

    limit = None if asked.deadline is None else COMPILING * asked.deadline
    with first_compilation(bool(workload.lengths), limit) as compiling:
        if compiling:
            Console(stderr=True).print("compiling the planner's search once, up to a minute on one core")
        _plan(asked, cluster, config, workload, began)


def _plan(asked: PlanOptions, cluster: Cluster, config: TrainConfig | None, workload: Workload, began: float) -> None:
    from hydragraph.planner.brief_explanation import with_causes
    from hydragraph.planner.plan import check_question, plan
    from hydragraph.planner.rental_budget import offers
    from hydragraph.planner.rental_price import RentalPrices
    from hydragraph.report.device_picture import write_device_picture

    method: Any = asked.method or "auto"
    solver: Any = asked.solver
    check_question(method, asked.deadline, solver)
    prices = RentalPrices.parse(asked.prices, cluster) if asked.prices else None

    def left(part: float = 1.0) -> float | None:
        return None if asked.deadline is None else max(0.0, part * asked.deadline - (time.monotonic() - began))

    console = Console(stderr=True)
    with console.status("reading") as status:
        said: set[str] = set()

        def say(what: str) -> None:
            status.update(escape(what))
            if what not in said and not console.is_terminal:
                console.print(what, markup=False, highlight=False, soft_wrap=True)
            said.add(what)

        costs, source = _costs(asked, cluster, config, say)
        running = None if asked.running is None else _running(asked.running, costs)
        if config is not None:
            costs = _compile_first(costs, left(COMPILING))
        say("searching")
        schedules = planned_schedules(_backend(config))
        streaming = config is None or not config.deterministic

        def planned(some: Costs) -> Plan:
            return plan(some, workload, method, running, left(), solver, schedules, streaming)

        rented: list[RentalOffer] = []
        if asked.budget is None or prices is None:
            chosen_plan = planned(costs)
        else:
            rented = offers(costs, workload, prices, asked.budget, planned)
            costs, chosen_plan, prices = rented[0].costs, rented[0].plan, rented[0].prices
        if asked.deadline is None:
            say("simulating the rivals")
            chosen_plan = with_causes(costs, workload, chosen_plan, max(2.0, EXPLAINING * chosen_plan.took_s))
    written = [] if asked.output is None else [_write(chosen_plan, asked.output)]
    if asked.picture is not None:
        write_device_picture(chosen_plan, costs, asked.picture)
        written.append(f"{asked.picture}: nodes and their devices, by pipeline")
    if asked.report is not None:
        written.append(_write_report(chosen_plan, costs, source, asked.report))
    if asked.as_json:
        record = _record(chosen_plan, costs, source)
        if prices is not None:
            token = prices.million_tokens(chosen_plan.strategy, chosen_plan.seconds, workload)
            record["price"] = {"per_hour": prices.hour(chosen_plan.strategy), "per_million_tokens": token}
        if rented:
            record["rented"] = [
                {"devices": offer.devices, "per_hour": offer.per_hour, "seconds": offer.plan.seconds}
                for offer in rented
            ]
        print(json.dumps(record, indent=1))
        return
    priced = [] if prices is None else prices.sentences(chosen_plan, workload)
    priced += [f"{'or' if i else 'rent'}: {offer.sentence(workload)}" for i, offer in enumerate(rented[:OFFERED])]
    print("\n".join([source, chosen_plan.explain(), *priced, *written]))


def _costs(asked: PlanOptions, cluster: Cluster, config: TrainConfig | None, say: Say) -> tuple[Costs, str]:
    """Return the costs, with exact memory if there is a config, and a sentence on their source.

    Raises:
        ValueError: profiles, cluster, health and model do not match.
    """
    from hydragraph.commands.captured_model import captured
    from hydragraph.cost.compiled_blocks import CompiledBlocks
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.datasheet import datasheet
    from hydragraph.spec.health import Health
    from hydragraph.train.plan_input import read_corrections

    corrections = read_corrections(asked.corrections)
    rates = None if asked.health is None else Health.load(asked.health)
    last = len(cluster.devices) - 1
    for rank in rates or ():
        if rank > last:
            raise ValueError(f"{asked.health}: rank {rank} is not in {asked.cluster}, which has ranks 0 to {last}")
    owners = chosen_home(asked.home, _home(config, asked.running is not None))
    measured = _merged(asked.profile, cluster) if asked.profile else None
    if config is None:
        assert measured is not None, "there is a profile or a model"
        costs = Costs(measured, cluster, rates, home=owners, corrections=corrections)
        return costs, f"{costs.source}; memory from the profile"
    say("capturing the model")
    _, program, variants = captured(config)
    if measured is None:
        # A tensor-parallel group stays within a node.
        most = max(cluster.node(device.node).devices for device in cluster.devices)
        measured = datasheet(program, cluster, asked.efficiency, range(1, most + 1))
    elif len(measured.blocks) != len(program.blocks):
        raise ValueError(
            f"profile {measured.name} describes a model of {len(measured.blocks)} blocks, but --model has "
            f"{len(program.blocks)}: measure this model with hydragraph profile"
        )
    blocks = CompiledBlocks(program, _told(variants.get, say))
    costs = Costs(measured, cluster, rates, home=owners, blocks=blocks, corrections=corrections)
    return costs, f"{costs.source}; memory from the sizes of compiled graphs"


def _backend(config: TrainConfig | None) -> str:
    if config is not None and config.backend is not None:
        return config.backend
    return "eager" if config is not None and config.device == "cpu" else "inductor"


def _compile_first(costs: Costs, seconds: float | None) -> Costs:
    """Compile graphs of all kinds of stages, plain kinds first; return costs without kinds not begun in `seconds`.

    Stages of one device are always compiled.
    """
    from hydragraph.spec.stage_kind import StagePart

    until = None if seconds is None else time.monotonic() + seconds
    working = [rank for rank in range(costs.ranks) if math.isfinite(costs.health.rate(rank))]
    ranks = Counter((costs.cluster.type_of(rank), costs.cluster.node_of(rank)) for rank in working)
    examples = dict(zip(costs.profile.blocks, costs.outline.blocks, strict=True))
    kinds: set[StageKind] = set()
    for name in costs.cluster.types:
        most = max((count for (of, _), count in ranks.items() if of == name), default=0)
        kinds |= {kind for kind in costs.profile.of(name).pieces if kind.tp <= most and costs.sizes.allows(kind.tp)}
    late: set[StageKind] = set()
    for kind in sorted(kinds, key=lambda kind: (kind.sequence_parallel + kind.recompute, kind)):
        if kind.tp > 1 and until is not None and time.monotonic() > until:
            late.add(kind)
            continue
        for block in examples.values():
            costs.blocks.adds(block, StagePart(kind, 0))
    return costs.changed(profile=_without(costs.profile, late)) if late else costs


def _without(profile: Profile, kinds: Collection[StageKind]) -> Profile:
    pieces = {kind: piece for kind, piece in profile.pieces.items() if kind not in kinds}
    return replace(profile, pieces=pieces, others=tuple(_without(other, kinds) for other in profile.others))


def _home(config: TrainConfig | None, running: bool) -> Home:
    from hydragraph.spec.home import Home

    if config is None:
        return Home()
    return config.home if running else Home(copies=config.home.copies)


def _told(compiled: VariantOf, say: Say) -> VariantOf:
    known: set[object] = set()

    def get(block: Any, part: Any) -> Any:
        if (block.template, part) not in known:
            known.add((block.template, part))
            say(f"compiling graphs to find their memory: tensor-parallel degree {part.kind.tp}")
            compiled(block, part)
            say("searching")
        return compiled(block, part)

    return get


def _merged(texts: Sequence[str], cluster: Cluster) -> Profile:
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.train.plan_input import read_profile

    names = ", ".join(cluster.types)
    several = len(cluster.types) > 1 or len(texts) > 1
    profiles = []
    for text in texts:
        profile = read_profile(text)
        if several and any(not part.type for part in (profile, *profile.others)):
            raise ValueError(
                f"--profile {text} does not name its type of device, and the cluster has {names}: measure on each type "
                "with hydragraph profile --type NAME"
            )
        profiles.append(profile)
    return Profile.merge(profiles)


def _running(text: str, costs: Costs) -> Strategy:
    from hydragraph.spec.strategy import Strategy

    try:
        strategy = Strategy.read(text, costs.outline.layers)
        strategy.check(costs.outline.layers, costs.ranks)
    except ValueError as error:
        raise ValueError(f"--running: {error}") from None
    return strategy


def _write(plan: Plan, path: Path) -> str:
    """Write strategies to numbered files; return how to train with them."""
    names = [path.with_stem(f"{path.stem}-{i}") if i > 1 else path for i in range(1, len(plan.strategies) + 1)]
    for name, strategy in zip(names, plan.strategies, strict=True):
        strategy.save(name)
    listed = ", ".join(map(str, names))
    quoted = json.dumps(list(map(str, names)), ensure_ascii=False)
    choose = " --set plan.choose=true" if len(names) > 1 else ""
    return (
        f"{listed}: to train, set strategies: [{listed}], home: {str(plan.home)!r}, ranks: {len(plan.memory)} in the "
        f"run's config, or run hydragraph train config.yaml --set 'strategies={quoted}' --set 'home={plan.home}' "
        f"--set ranks={len(plan.memory)}{choose}"
    )


def _write_report(plan: Plan, costs: Costs, source: str, path: Path) -> str:
    from hydragraph.report.page import write_report
    from hydragraph.report.plan_report import plan_report
    from hydragraph.report.simulation_price import PricedStrategy
    from hydragraph.report.simulation_report import panel

    owned = costs.changed(home=plan.home)
    timeline = owned.simulate(plan.strategy, plan.assignment)
    shown = panel(owned, PricedStrategy(plan.strategy, plan.assignment, timeline))
    write_report(plan_report(path.stem, _record(plan, costs, source), shown), path)
    return f"{path}: the plan, its rivals and its timeline, for a browser"


def _record(plan: Plan, costs: Costs, source: str) -> dict[str, Any]:
    ranks = range(costs.ranks)
    return {
        "strategy": plan.strategy.name,
        "home": str(plan.home),
        "strategies": [strategy.name for strategy in plan.strategies],
        "micro_batches": list(plan.assignment.counts),
        "seconds": _finite(plan.seconds),
        "simulated": plan.simulated,
        "bound": plan.bound,
        "gap": _finite(plan.gap),
        "memory": list(plan.memory),
        "limits": list(plan.limits),
        "moved_bytes": plan.moved_bytes,
        "origin": plan.origin,
        "rivals": [
            {
                "strategy": r.strategy.name,
                "pipelines": r.strategy.to_dict(),
                "seconds": _finite(r.seconds),
                "origin": r.origin,
                "why": r.why,
            }
            for r in plan.rivals
        ],
        "took_s": plan.took_s,
        "source": source,
        "pipelines": plan.strategy.to_dict(),
        "nodes": [costs.cluster.node_of(rank) for rank in ranks],
        "types": [costs.cluster.type_of(rank) for rank in ranks],
        "rates": [_finite(costs.health.rate(rank)) for rank in ranks],
        "text": plan.explain(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
