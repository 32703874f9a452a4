"""`hydragraph plan --cluster`: plan for devices that differ."""

from __future__ import annotations

import gc
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydragraph.commands.options import stated_size
from hydragraph.commands.plan_costs import (
    PlanInputs,
    compile_graphs,
    compiled_by_two,
    costs_of_plan,
    excluded_text,
)
from hydragraph.commands.plan_options import PlanOptions
from hydragraph.commands.progress import Say, progress
from hydragraph.planner.uncollected import uncollected
from hydragraph.spec.health import Health
from hydragraph.spec.record import attributes_of, flow_yaml
from hydragraph.spec.schedule_names import planned_schedules
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.planner.plan import Plan
    from hydragraph.planner.rental_budget import RentalOffer
    from hydragraph.planner.rental_price import RentalPrices
    from hydragraph.spec.strategy import Strategy
    from hydragraph.spec.training_workload import Workload

began: float | None = None
# Maximum fraction of the deadline for compiling graphs
COMPILING = 0.6
# Maximum ratio of explaining time to planning time
EXPLAINING = 1.0
# Maximum printed rental offers
OFFERED = 4


@uncollected()
def plan_devices(asked: PlanOptions) -> None:
    from hydragraph.planner.rental_price import RentalPrices
    from hydragraph.planner.request import check_nodes, check_question

    # The deadline includes imports, so it counts from the process's start.
    start = time.monotonic() if began is None else began
    check_question(asked.method or "auto", asked.deadline, asked.solver)
    inputs = PlanInputs.read(asked)
    check_nodes(inputs.cluster, inputs.health or Health())
    prices = RentalPrices.parse(asked.prices, inputs.cluster) if asked.prices else None
    if asked.budget is not None and prices is not None:
        prices.check_budget(asked.budget, () if inputs.health is None else inputs.health.lost)
    layers = None if inputs.config is None else stated_size(inputs.config.model, "num_hidden_layers")
    # Reject a wrong strategy now; without a config, the layers are known only later.
    if asked.running is not None and layers is not None:
        _running(asked.running, layers, len(inputs.cluster.devices))
    workload = asked.workload(inputs.config)

    def left(part: float = 1.0) -> float | None:
        return None if asked.deadline is None else max(0.0, part * asked.deadline - (time.monotonic() - start))

    with compiled_by_two(asked) as helped, progress("importing the planner") as say:
        from hydragraph.planner.first_compilation import first_compilation

        # numba compiles the search once per machine, which may take much of the deadline.
        with first_compilation(bool(workload.lengths), left(COMPILING)) as compiling:
            if compiling:
                say("compiling the planner's search once")
            planned = _planned(asked, inputs, prices, workload, left, say, helped)
    _show(asked, planned, workload)
    # The process ends: do not collect what `uncollected` left
    if began is not None:
        gc.freeze()


@dataclass(frozen=True)
class DevicePlan:
    costs: Costs
    source: str
    plan: Plan
    prices: RentalPrices | None
    rented: Sequence[RentalOffer]


def _planned(
    asked: PlanOptions,
    inputs: PlanInputs,
    prices: RentalPrices | None,
    workload: Workload,
    left: Callable[..., float | None],
    say: Say,
    helped: Callable[[], bool],
) -> DevicePlan:
    from hydragraph.planner.brief_explanation import with_causes
    from hydragraph.planner.plan import plan
    from hydragraph.planner.rental_budget import offers

    method: Any = asked.method or "auto"
    solver: Any = asked.solver
    config = inputs.config
    costs, source, ready = costs_of_plan(asked, inputs, say)
    running = None if asked.running is None else _running(asked.running, costs.outline.layers, costs.ranks)
    if config is not None:
        say("compiling graphs")
        compiled = compile_graphs(costs, left(COMPILING), ready, helped)
        source += excluded_text(costs, compiled)
        costs = compiled
    say("searching")
    schedules = planned_schedules(_backend(config))
    deterministic = config is not None and config.deterministic

    # best: (seconds, text) of the best plan so far, which Ctrl-C prints.
    best: list[tuple[float, str]] = []

    def improved(*found: Any) -> None:
        best[:] = [min([*best, found])]
        say(f"searching; best so far: {best[0][0]:.4g} s an iteration")

    def planned(some: Costs) -> Plan:
        return plan(
            some, workload, method, running, left(), solver, schedules, improved=improved, deterministic=deterministic
        )

    rented: list[RentalOffer] = []
    if asked.budget is None or prices is None:
        try:
            chosen_plan = planned(costs)
        except KeyboardInterrupt:
            for seconds, text in best:
                print(f"best plan so far: {text}, {seconds:.4g} s an iteration")
            raise
    else:
        # Renting also chooses devices: costs and prices become the best offer's.
        rented = offers(costs, workload, prices, asked.budget, planned)
        costs = rented[0].costs
        chosen_plan = rented[0].plan
        prices = rented[0].prices
    # A deadline leaves no time to simulate other plans.
    if asked.deadline is None:
        say("simulating the rivals")
        chosen_plan = with_causes(costs, workload, chosen_plan, max(2.0, EXPLAINING * chosen_plan.took_s))
    return DevicePlan(costs, source, chosen_plan, prices, rented)


def _show(asked: PlanOptions, planned: DevicePlan, workload: Workload) -> None:
    from hydragraph.planner.rental_price import per_million_tokens
    from hydragraph.planner.state_shares import needed_ranks
    from hydragraph.report.device_picture import write_device_picture

    costs = planned.costs
    source = planned.source
    chosen_plan = planned.plan
    prices = planned.prices
    written = [] if asked.output is None else [_write(chosen_plan, asked.output, asked, costs)]
    if asked.picture is not None:
        write_device_picture(chosen_plan, costs, asked.picture)
        written.append(f"{asked.picture}: nodes and their devices, by pipeline")
    if asked.report is not None:
        written.append(_write_report(chosen_plan, costs, source, asked.report))
    if asked.as_json:
        record = _record(chosen_plan, costs, source)
        if prices is not None:
            per_hour = prices.hour(needed_ranks(costs, chosen_plan.strategy, chosen_plan.home))
            token = per_million_tokens(per_hour, chosen_plan.seconds, workload)
            record["price"] = {"per_hour": per_hour, "per_million_tokens": token}
        if planned.rented:
            record["rented"] = [
                {"devices": offer.devices, "per_hour": offer.per_hour, "seconds": offer.plan.seconds}
                for offer in planned.rented
            ]
        print(json.dumps(record, indent=1))
        return
    priced = [] if prices is None else prices.sentences(costs, chosen_plan, workload)
    priced += [f"{'or' if i else 'rent'}: {one.sentence(workload)}" for i, one in enumerate(planned.rented[:OFFERED])]
    print("\n".join([source, chosen_plan.explain(), *priced, *written]))


def _backend(config: TrainConfig | None) -> str:
    if config is not None and config.backend is not None:
        return config.backend
    return "eager" if config is not None and config.device == "cpu" else "inductor"


def _running(text: str, layers: int, ranks: int) -> Strategy:
    from hydragraph.spec.strategy import Strategy

    try:
        strategy = Strategy.read(text, layers)
        if (last := max(strategy.devices)) >= ranks:
            raise ValueError(
                f"the strategy uses rank {last}, but the cluster file has {ranks} devices: list all devices of "
                "the strategy in the cluster file, and set lost devices to .inf in --health"
            )
        strategy.check(layers, ranks)
    except ValueError as error:
        raise ValueError(f"--running: {error}") from None
    return strategy


def _write(plan: Plan, path: Path, asked: PlanOptions, costs: Costs) -> str:
    # plan.yaml, plan-2.yaml, ...: one file per strategy.
    names = [path.with_stem(f"{path.stem}-{i}") if i > 1 else path for i in range(1, len(plan.strategies) + 1)]
    for name, strategy in zip(names, plan.strategies, strict=True):
        strategy.save(name)
    # With these, the run assigns sequences as planned.
    priced = {"choose": "true", "cluster": str(asked.cluster)}
    if asked.budget is not None:
        priced["cluster"] = str(path.with_name(f"{path.stem}-cluster.yaml"))
        costs.cluster.save(priced["cluster"])
    if asked.profile:
        profile = asked.profile[0]
        # The config takes one profile, so write several as one.
        if len(asked.profile) > 1:
            profile = str(path.with_name(f"{path.stem}-profile.json"))
            costs.profile.save(profile)
        priced["profile"] = profile
        if asked.health is not None:
            priced["health"] = str(asked.health)
            if asked.budget is not None:
                priced["health"] = str(path.with_name(f"{path.stem}-health.yaml"))
                costs.health.save(priced["health"])
    unknown = "; without a profile, --health has no effect on the run" if asked.health and not asked.profile else ""
    strategies = list(map(str, names))
    run = {
        "strategies": strategies,
        "home": str(plan.home),
        "ranks": len(plan.memory),
        "plan": {**priced, "choose": True},
    }
    settings = " ".join(f"--set plan.{name}={shlex.quote(value)}" for name, value in priced.items())
    return (
        f"{', '.join(strategies)}: to train, set {flow_yaml(run)[1:-1]} in the run's config, or run hydragraph train "
        f"config.yaml --set {shlex.quote(f'strategies={json.dumps(strategies, ensure_ascii=False)}')} "
        f"--set 'home={plan.home}' --set ranks={len(plan.memory)} {settings}{unknown}"
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
    return f"{path}: the plan, its rivals and its timeline (open it in a browser)"


def _record(plan: Plan, costs: Costs, source: str) -> dict[str, Any]:
    ranks = range(costs.ranks)
    return {
        "strategy": plan.strategy.name,
        "home": str(plan.home),
        "strategies": [strategy.name for strategy in plan.strategies],
        "micro_batches": list(plan.assignment.counts),
        "seconds": _finite(plan.seconds),
        "gap": _finite(plan.gap),
        **attributes_of(plan, "simulated", "bound", "memory", "limits", "moved_bytes", "origin", "took_s"),
        "rivals": [
            {
                "strategy": rival.strategy.name,
                "pipelines": rival.strategy.to_dict(),
                "seconds": _finite(rival.seconds),
                **attributes_of(rival, "origin", "why"),
            }
            for rival in plan.rivals
        ],
        "source": source,
        "pipelines": plan.strategy.to_dict(),
        "nodes": [costs.cluster.node_of(rank) for rank in ranks],
        "types": [costs.cluster.type_of(rank) for rank in ranks],
        "rates": [_finite(costs.health.rate(rank)) for rank in ranks],
        "text": plan.explain(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
