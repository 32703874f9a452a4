"""Which test file tests which source file: the one at the mirrored path, or the one that is named here.

`hydragraph/x/y.py` is tested by `tests/x/test_y.py`. Where another file tests it, because it is a part of what that one
is about, ELSEWHERE says which one and what it sees of it. An entry that is no longer needed or true fails, with what to
do. (A test file that mirrors no source is about something that several of them do together; its first line says what.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.import_statements import import_statements

ROOT = Path(__file__).parents[1]

# Source file -> (test file, what it sees of it), sorted.
ELSEWHERE = {
    "__main__.py": ("test_cli.py", "`python -m hydragraph --version` in a process of its own"),
    "cluster/agreement.py": ("checkpoint/test_save_and_load.py", "an error on one rank is one on all"),
    "cluster/collectives.py": ("cluster/test_communicators.py", "collectives of a stage over gloo"),
    "cluster/failure/newest_watch.py": ("runtime/test_calls.py", "a new watch after a failure"),
    "cluster/failure/stack_dump.py": ("cluster/failure/test_rank_watch.py", "what standing ranks write"),
    "cluster/message_in_flight.py": ("cluster/test_communicators.py", "messages of every kind"),
    "cluster/processes/launched_ranks.py": ("cluster/test_launch.py", "ranks from outside"),
    "cluster/processes/rank_process.py": ("cluster/test_launch.py", "ranks from inside"),
    "cluster/rendezvous/member.py": ("engine/test_recovery.py", "ranks that meet again, leave and come"),
    "cluster/rendezvous/store_registers.py": ("engine/test_recovery.py", "what ranks and their supervisor say"),
    "commands/bench/bench_options.py": ("commands/bench/test_command.py", "what is asked for is written"),
    "commands/bench/bench_picture.py": ("commands/bench/test_bench_table.py", "a report as a picture"),
    "commands/bench/eager_baselines.py": ("commands/bench/test_step_bench.py", "each side trains as hydragraph does"),
    "commands/bench/kernel_cases.py": (
        "commands/bench/test_kernel_bench.py",
        "every case runs, and its sides compute the same",
    ),
    "commands/bench/link_report.py": ("commands/bench/test_command.py", "what `bench link` prints"),
    "commands/captured_model.py": ("commands/test_check.py", "models that are checked without weights"),
    "commands/chaos.py": ("test_elastic_run.py", "a run with faults, compared with an undisturbed one"),
    "commands/compile_ahead.py": ("commands/test_compile.py", "what is compiled, and proven"),
    "commands/compile_files.py": ("commands/test_compile.py", "the folder that the verb writes"),
    "commands/export.py": ("test_finetuning.py", "runs of adapters, and of all weights, exported"),
    "commands/launch_process.py": ("commands/test_train.py", "ranks of a launcher, and restarts"),
    "commands/plan_costs.py": ("commands/test_plan.py", "the graphs that say how much memory stages need"),
    "commands/plan_devices.py": ("commands/test_plan.py", "--cluster"),
    "commands/plan_options.py": ("commands/test_plan.py", "options that contradict each other, and the workload"),
    "commands/show_diff.py": ("commands/test_show_folder.py", "--diff"),
    "commands/show_memory.py": ("commands/test_show_folder.py", "--memory"),
    "commands/show_parameter.py": ("commands/test_show_folder.py", "--parameter"),
    "commands/show_passes.py": ("commands/test_show.py", "--passes"),
    "commands/show_schedule.py": ("commands/test_show_folder.py", "--schedule, its text and its picture"),
    "commands/show_traffic.py": ("commands/test_show_folder.py", "--traffic"),
    "commands/text_table.py": ("commands/test_simulate.py", "tables that verbs print"),
    "cost/actors.py": ("cost/test_timeline.py", "who acts in a simulation"),
    "cost/collective_bytes.py": ("commands/test_show_folder.py", "what sums of tensor-parallel ranks send"),
    "cost/compiled_blocks.py": ("cost/test_rank_memory.py", "a captured model's ranks"),
    "cost/costed_work.py": ("cost/test_costs.py", "instructions of an iteration"),
    "cost/event_simulation.py": ("cost/test_timeline.py", "when what acts"),
    "cost/footprint.py": ("cost/test_graph_footprint.py", "what is measured in graphs"),
    "cost/home_candidates.py": ("cost/test_home_choice.py", "owners that are looked at"),
    "cost/home_room.py": ("cost/test_home_choice.py", "owners within tight memory"),
    "cost/instruction_work.py": ("cost/test_timeline.py", "instructions and their seconds"),
    "cost/memory_curves.py": ("cost/test_rank_memory.py", "memory in a simulation"),
    "cost/model_sizes.py": ("cost/test_profile_record.py", "sizes of a model in a profile"),
    "cost/pricing.py": ("cost/test_costs.py", "stages and state on a cluster"),
    "cost/profile_blocks.py": ("cost/test_costs.py", "memory from a profile's lines"),
    "cost/stage_costs.py": ("cost/test_costs.py", "pipelines take what is simulated"),
    "cost/traffic.py": ("cost/test_costs.py", "pull and push"),
    "cost/what_if.py": ("cost/test_costs.py", "one number changed"),
    "data/json_object.py": ("data/test_tokenizer.py", "files of a tokenizer that are not what they should be"),
    "engine/collective_call.py": ("engine/test_api.py", "calls in a wrong order, and their arguments"),
    "engine/compiled_model.py": ("runtime/test_deterministic_sums.py", "what runs of one degree have in common"),
    "engine/executable.py": (
        "engine/test_api.py",
        "all its calls; test_parity.py and runtime/test_calls.py over ranks",
    ),
    "engine/iterations.py": ("engine/test_state_transfer.py", "steps around moves; also test_step_agreement.py"),
    "engine/membership.py": ("engine/test_state_transfer.py", "moves, and failures during them"),
    "engine/planning_worker.py": ("engine/test_planning_service.py", "worker processes, and their deaths"),
    "engine/state_transition.py": (
        "engine/test_state_transfer.py",
        "state of ranks after moves, including interrupted ones",
    ),
    "engine/step_planner.py": ("engine/test_planning_service.py", "plans made ahead, now, or late"),
    "engine/step_report.py": ("engine/test_api.py", "reports of steps"),
    "engine/strategy_selector.py": ("engine/test_candidate_strategies.py", "choices that ranks follow"),
    "engine/weight_export.py": ("engine/test_api.py", "state dicts and weights by bucket"),
    "frontend/buckets.py": ("frontend/test_capture.py", "buckets of tied, frozen and unused parameters"),
    "frontend/check/eager_and_captured.py": ("frontend/check/test_numeric_check.py", "both sides of a comparison"),
    "frontend/check/passed_checks.py": (
        "frontend/check/test_check_once.py",
        "checks that are remembered, and checks that are not",
    ),
    "frontend/check/probe_sequences.py": ("frontend/check/test_probe_lengths.py", "drawn sequences and their lengths"),
    "frontend/check/reduced_model.py": (
        "frontend/check/test_numeric_check.py",
        "models are checked with few of their blocks",
    ),
    "frontend/check/wide_dtype.py": ("frontend/check/test_stage_check.py", "stages in double precision"),
    "frontend/model_description.py": (
        "frontend/compiled_folder/test_model_record.py",
        "features that distinguish models",
    ),
    "frontend/parameter_shards.py": ("frontend/test_capture.py", "how parameters are cut across blocks"),
    "frontend/peft_adapters.py": ("test_peft.py", "models with adapters"),
    "frontend/rebound_functions.py": (
        "frontend/test_repeated_blocks.py",
        "functions that were copied with their module",
    ),
    "frontend/token_mixing.py": ("frontend/test_capture.py", "what mixes tokens is refused"),
    "ir/hidden_state.py": ("runtime/test_hidden_dtype.py", "the dtype of hidden states between stages"),
    "ir/instruction.py": ("ir/test_instruction_text.py", "every instruction, printed and parsed"),
    "ir/placeholders.py": ("passes/test_annotate.py", "where they stand in a layer"),
    "ir/rank_program.py": ("ir/test_instruction_text.py", "whole programs, printed and parsed"),
    "kernels/attention_tilings.py": ("kernels/test_compile_for_gpu.py", "every tiling compiles and fits"),
    "kernels/new_tensors.py": ("kernels/test_varlen_attention.py", "results of kernels"),
    "passes/collective_operators.py": ("passes/test_shard.py", "collectives and their backwards"),
    "passes/variant_spec.py": ("passes/test_graph_passes.py", "which passes apply"),
    "planner/assign_schemes.py": ("planner/assignment/test_assign_mini_batch.py", "schemes as pipelines, both methods"),
    "planner/assignment/problem.py": ("benchmarks/test_dispatching.py", "a mini-batch as arrays"),
    "planner/assignment/spread_search.py": ("benchmarks/test_dispatching.py", "the search against the bound"),
    "planner/bisection.py": ("planner/assignment/test_bounds.py", "bounds that are found by it"),
    "planner/deadline.py": ("planner/test_finalists.py", "searches that are late take one plan that fits"),
    "planner/exact/autohet_grouping.py": ("benchmarks/test_most_power.py", "equation 3 as published, and our optimum"),
    "planner/exact/integer_programs.py": ("benchmarks/test_dispatching.py", "it is the oracle there"),
    "planner/policy.py": ("engine/test_planning_service.py", "one strategy stays, or one is chosen every step"),
    "planner/request.py": ("engine/test_planning_service.py", "what planning processes are sent"),
    "private/argument_trees.py": ("frontend/test_capture.py", "nested arguments of blocks"),
    "private/graph_values.py": ("ir/test_graph_data.py", "values of graphs, there and back"),
    "private/hooks_and_overrides.py": ("frontend/test_untraceable.py", "hooks and backwards that no trace sees"),
    "private/optimizers.py": ("runtime/test_supported_optimizers.py", "hooks that are refused until they are removed"),
    "private/tracing.py": ("passes/test_prove_sizes.py", "symbolic sizes; every capture traces"),
    "report/candidate_comparison_text.py": ("report/test_candidate_comparison.py", "the report as text and JSON"),
    "report/facts.py": ("report/test_page.py", "what a page is made from"),
    "report/plan_picture.py": ("commands/test_plan.py", "--picture"),
    "report/sections.py": ("report/test_page.py", "whole pages; report/test_browser.py clicks through them"),
    "report/simulation_picture.py": ("commands/test_simulate.py", "--picture"),
    "report/simulation_price.py": ("commands/test_simulate.py", "prices of strategies"),
    "report/time_series.py": ("report/test_page.py", "the data of a timeline are its bars"),
    "runtime/pending_work.py": ("runtime/test_streams.py", "a device that records says what was not waited for"),
    "runtime/shard_boxes.py": ("checkpoint/test_dcp_planners.py", "boxes of parameters"),
    "spec/pipeline.py": ("spec/test_strategy.py", "stages and pipelines"),
    "spec/schedule_names.py": ("ir/schedules/test_schedule_kinds.py", "every name has a schedule"),
    "train/config_overrides.py": ("train/test_config.py", "overrides, and what differs from an earlier config"),
    "train/run_saving.py": ("train/test_loop.py", "checkpoints, and what a missing package costs"),
    "train/step_reporting.py": ("train/test_loop.py", "what is logged, and what a missing package costs"),
    "train/stragglers/replanning_worker.py": (
        "train/stragglers/test_background_replanning.py",
        "the process that plans again",
    ),
    "train/stragglers/straggler_state.py": (
        "train/test_straggler_file.py",
        "what is known of slow ranks, written and read",
    ),
    "train/train_state.py": ("train/test_run_recovery.py", "a run and how far it is, as values"),
    "train/watcher.py": ("train/test_loop.py", "a watcher that records what it receives"),
}

STARTED = (
    "__main__.py",
    "train/stragglers/replanning_worker.py",
    "engine/planning_worker.py",
)  # by their names, in processes of their own


def sources() -> list[str]:
    """Return the source files with code in them, below hydragraph/."""
    package = ROOT / "hydragraph"
    paths = (p for p in package.rglob("*.py") if p.name != "__init__.py")
    return sorted(str(p.relative_to(package)) for p in paths)


def mirror(source: str) -> Path:
    path = Path(source)
    return path.with_name(f"test_{path.name}")


@cache
def modules() -> dict[str, Path]:
    paths = (p for folder in ("hydragraph", "tests") for p in (ROOT / folder).rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


@cache
def imported(module: str) -> frozenset[str]:
    """Return the modules that one imports; of a package whose names come when they are used, those of its stub."""
    path, stub = modules()[module], modules()[module].with_suffix(".pyi")

    def names() -> Iterator[str]:
        for node in import_statements(stub if stub.exists() else path):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif node.module:
                yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))

    return frozenset(name for name in names() if name in modules())


def sees(test: str, source: str) -> bool:
    """Say whether a test imports a module, by helpers of tests too, or one that is at most two imports from it."""
    now = {"tests." + ".".join(Path(test).with_suffix("").parts)}
    wanted = "hydragraph." + ".".join(Path(source).with_suffix("").parts)
    while more := {name for m in now if m.startswith("tests") for name in imported(m)} - now:
        now |= more
    for _ in range(2):
        now |= {name for module in now for name in imported(module)}
    return wanted in now


def test_every_source_file_has_its_test() -> None:
    missing = [
        source for source in sources() if source not in ELSEWHERE and not (ROOT / "tests" / mirror(source)).exists()
    ]
    assert not missing, f"no test of {missing}: write tests/{mirror(missing[0])}, or say in ELSEWHERE what tests it"


@pytest.mark.parametrize("source", ELSEWHERE)
def test_what_is_tested_elsewhere_is(source: str) -> None:
    assert not (ROOT / "tests" / mirror(source)).exists(), (
        f"tests/{mirror(source)} exists: delete {source} from ELSEWHERE"
    )
    test, why = ELSEWHERE[source]
    assert why
    assert (ROOT / "tests" / test).exists(), f"tests/{test} is gone: name in ELSEWHERE what tests {source} now"
    if source not in STARTED:
        assert sees(test, source), f"tests/{test} does not get to {source}: name another in ELSEWHERE"


def test_nothing_is_listed_that_is_gone() -> None:
    gone = sorted(ELSEWHERE.keys() - set(sources()))
    assert not gone, f"delete from ELSEWHERE, or rename: {', '.join(gone)}"
    assert list(ELSEWHERE) == sorted(ELSEWHERE)
