"""`hydragraph plan`: propose strategies for data or for devices that differ."""

from __future__ import annotations

import json

from hydragraph.commands.options import verb
from hydragraph.commands.plan_devices import plan_devices
from hydragraph.commands.plan_options import TOKENS, PlanOptions
from hydragraph.commands.progress import progress


@verb
def plan_command(options: PlanOptions) -> None:
    """Propose strategies for your data or devices, and predict their step times.

    For equal devices (--devices), candidates are chosen for the sequence lengths and compared on mini-batches drawn
    from them. A table compares their seconds with the best homogeneous strategy's, and explains why they are slower.

    For devices that differ in type, memory or current speed (--cluster), the plan divides devices into pipelines and
    stages, and divides layers, data and state among them. The command prints the plan, a lower bound on its time, and
    rival plans. First write the cluster file and, for measured speeds, measure a profile on each type of device.

    Examples. Devices that differ: hydragraph plan --cluster cluster.yaml --model run.yaml --picture plan.png --output
    plan.yaml (see docs/planner.md). With measurements: --profile h100.json --profile l4.json, each from hydragraph
    profile --type NAME. Slow and lost ranks: --health health.yaml with {3: 2.57, 5: inf}. Equal devices: hydragraph
    plan --profile profile.json --lengths lengths.txt --devices 64 --context 32768 --explain --picture plan.png, with
    one number per line of lengths.txt. To try your own strategy: --strategy '<tp8,pp2> + 6*<tp8,pp1>'.
    """
    options.check()
    if options.cluster is None:
        plan_equal(options)
    else:
        plan_devices(options)


def plan_equal(options: PlanOptions) -> None:
    from hydragraph.cost.corrections import corrected
    from hydragraph.train.plan_input import CostFiles, read_candidates

    reason = "PlanOptions.check requires this option"
    assert options.profile, reason
    assert options.devices, reason
    assert options.context, reason
    strategies = read_candidates(options.strategies or ())
    files = CostFiles.read(options.profile[0], options.corrections, options.lengths)
    assert files.profile, reason
    assert files.lengths, reason
    constants = files.profile if files.corrections is None else corrected(files.profile, files.corrections)

    with progress("importing the planner") as say:
        # Imports numba, scipy
        from hydragraph.report.candidate_comparison import explain
        from hydragraph.report.candidate_comparison_text import to_record, to_text
        from hydragraph.report.plan_picture import write_plan_picture

        say("searching")
        report = explain(
            constants,
            files.lengths,
            options.devices,
            options.context,
            options.tokens or TOKENS,
            strategies=strategies,
            iterations=options.iterations,
            seed=options.seed,
        )
    if options.as_json:
        print(json.dumps(to_record(report), indent=1))
    else:
        print(to_text(report, options.explain), end="")
    if options.picture is not None:
        write_plan_picture(report.example, options.picture)
