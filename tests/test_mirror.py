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

ROOT = Path(__file__).parents[1]

# Source file -> (test file, what it sees of it), sorted.
ELSEWHERE = {
    "__main__.py": ("test_cli.py", "`python -m hydragraph --version` in a process of its own"),
    "bench/baselines.py": ("bench/test_step.py", "each side trains as hydragraph does"),
    "bench/kernel_cases.py": ("bench/test_kernels.py", "every case runs, and its sides compute the same"),
    "bench/link_report.py": ("bench/test_command.py", "what `bench link` prints"),
    "bench/picture.py": ("bench/test_report.py", "a report as a picture"),
    "check/copies.py": ("check/test_check.py", "models are checked with few of their blocks"),
    "check/memory.py": ("check/test_run.py", "what is remembered, and of what nothing is"),
    "check/sequences.py": ("check/test_lengths.py", "what is drawn, of which lengths"),
    "check/sides.py": ("check/test_check.py", "both sides of a comparison"),
    "check/wide.py": ("check/test_stages.py", "stages in double precision"),
    "commands/captured.py": ("commands/test_check.py", "models that are checked without weights"),
    "commands/chaos.py": ("test_elastic_run.py", "a run that is struck, beside one that nobody disturbs"),
    "commands/compile_data.py": ("commands/test_show_folder.py", "what a folder knows of a model"),
    "commands/compile_files.py": ("commands/test_compile.py", "the folder that the verb writes"),
    "commands/compile_result.py": ("commands/test_compile.py", "what is compiled, and proven"),
    "commands/export.py": ("test_finetuning.py", "runs of adapters, and of all weights, exported"),
    "commands/plan_devices.py": ("commands/test_plan.py", "--cluster"),
    "commands/process.py": ("commands/test_train.py", "ranks of a launcher, and restarts"),
    "commands/show_diff.py": ("commands/test_show_folder.py", "--diff"),
    "commands/show_memory.py": ("commands/test_show_folder.py", "--memory"),
    "commands/show_parameter.py": ("commands/test_show_folder.py", "--parameter"),
    "commands/show_passes.py": ("commands/test_show.py", "--passes"),
    "commands/show_schedule.py": ("commands/test_show_folder.py", "--schedule, its text and its picture"),
    "commands/show_traffic.py": ("commands/test_show_folder.py", "--traffic"),
    "commands/simulate_picture.py": ("commands/test_simulate.py", "--picture"),
    "commands/simulate_price.py": ("commands/test_simulate.py", "prices of strategies"),
    "cost/actors.py": ("cost/test_simulate.py", "who acts in a simulation"),
    "cost/chosen_home.py": ("commands/test_check.py", "state that ranks have memory for"),
    "cost/collective_bytes.py": ("commands/test_show_folder.py", "what sums of tensor-parallel ranks send"),
    "cost/engine.py": ("cost/test_simulate.py", "when what acts"),
    "cost/exchanges.py": ("cost/test_home_choice.py", "what exchanges of a bucket move"),
    "cost/home_candidates.py": ("cost/test_home_choice.py", "owners that are looked at"),
    "cost/home_room.py": ("cost/test_home_choice.py", "owners within tight memory"),
    "cost/model.py": ("cost/test_profile_record.py", "sizes of a model in a profile"),
    "cost/stack.py": ("cost/test_costs.py", "another runtime priced by hand"),
    "cost/stages.py": ("cost/test_costs.py", "pipelines take what is simulated"),
    "cost/traffic.py": ("cost/test_costs.py", "pull and push"),
    "cost/what_if.py": ("cost/test_costs.py", "one number changed"),
    "cost/work.py": ("cost/test_simulate.py", "instructions and their seconds"),
    "elastic/slow.py": ("train/test_slow_file.py", "what is known of slow ranks, written and read"),
    "elastic/worker.py": ("elastic/test_replanning.py", "the process that plans again"),
    "executable.py": ("test_api.py", "all its calls; test_parity.py and runtime/test_calls.py over ranks"),
    "frontend/adapters.py": ("test_peft.py", "models with adapters"),
    "frontend/described.py": ("ahead/test_model_record.py", "what of a model can be told from another"),
    "frontend/mixing.py": ("frontend/test_capture.py", "what mixes tokens is refused"),
    "frontend/packed.py": ("frontend/test_capture.py", "packed batches and the loss"),
    "frontend/rebound.py": ("frontend/test_blocks.py", "functions that were copied with their module"),
    "frontend/shards.py": ("frontend/test_capture.py", "how parameters are cut across blocks"),
    "holding.py": ("test_migration.py", "what ranks have after moves, also those that are cut off"),
    "ir/instruction.py": ("ir/test_text.py", "every instruction, printed and parsed"),
    "ir/placeholders.py": ("ir/test_program.py", "where they stand in a program"),
    "ir/rank_program.py": ("ir/test_text.py", "whole programs, printed and parsed"),
    "kernels/attention_tilings.py": ("kernels/test_compile_for_gpu.py", "every tiling compiles and fits"),
    "passes/collectives.py": ("passes/test_shard.py", "collectives and their backwards"),
    "planner/dispatch_search.py": ("planner/test_dispatching.py", "the search against the bound"),
    "planner/exact.py": ("planner/test_dispatching.py", "it is the oracle there"),
    "planner/explain_text.py": ("planner/test_explain.py", "the report as text and JSON"),
    "planner/iteration.py": ("planner/test_service.py", "plans made ahead, now, or late"),
    "planner/policy.py": ("planner/test_service.py", "one strategy stays, or one is chosen every step"),
    "planner/problem.py": ("planner/test_dispatching.py", "a mini-batch as arrays"),
    "planner/request.py": ("planner/test_service.py", "what planning processes are sent"),
    "planner/uneven/explaining.py": ("planner/uneven/test_planning.py", "what a plan says of itself"),
    "planner/worker.py": ("planner/test_service.py", "worker processes, and their deaths"),
    "private/optimizers.py": ("runtime/test_elementwise.py", "hooks that are refused until they are removed"),
    "private/process_groups.py": ("test_survival.py", "groups of ranks of which some are lost"),
    "private/tracing.py": ("passes/test_sizes.py", "symbolic sizes; every capture traces"),
    "private/trees.py": ("frontend/test_capture.py", "nested arguments of blocks"),
    "private/unseen.py": ("frontend/test_unseen.py", "hooks and backwards that no trace sees"),
    "private/values.py": ("ir/test_graph_data.py", "values of graphs, there and back"),
    "report/courses.py": ("report/test_page.py", "the data of a timeline are its bars"),
    "report/facts.py": ("report/test_page.py", "what a page is made from"),
    "report/sections.py": ("report/test_page.py", "whole pages; report/test_browser.py clicks through them"),
    "runtime/collectives.py": ("runtime/test_groups.py", "collectives of a stage over gloo"),
    "runtime/crew.py": ("runtime/test_launch.py", "ranks from outside"),
    "runtime/failure/agreement.py": ("runtime/checkpoint/test_store.py", "an error on one rank is one on all"),
    "runtime/failure/newest.py": ("runtime/test_calls.py", "a new watch after a failure"),
    "runtime/failure/stacks.py": ("runtime/failure/test_watch.py", "what standing ranks write"),
    "runtime/meeting/member.py": ("test_survival.py", "ranks that meet again, leave and come"),
    "runtime/meeting/place.py": ("test_survival.py", "what ranks and their supervisor say"),
    "runtime/message.py": ("runtime/test_groups.py", "messages of every kind"),
    "runtime/pending.py": ("runtime/test_streams.py", "a device that records says what was not waited for"),
    "runtime/rank_process.py": ("runtime/test_launch.py", "ranks from inside"),
    "runtime/sharded.py": ("runtime/checkpoint/test_planners.py", "boxes of parameters"),
    "train/course.py": ("train/test_going_on.py", "a run and how far it is, as values"),
    "train/export.py": ("train/test_loop.py", "the final model"),
    "train/plan_picture.py": ("commands/test_plan.py", "--picture"),
    "train/ranks_file.py": ("test_elastic_run.py", "the processes of a run, by rank"),
    "train/saving.py": ("train/test_loop.py", "checkpoints, and what a missing package costs"),
    "train/telling.py": ("train/test_loop.py", "what is logged, and what a missing package costs"),
    "train/trainable.py": ("train/test_loop.py", "a plain executor that is no more than this"),
}

STARTED = ("__main__.py", "elastic/worker.py", "planner/worker.py")  # by their names, in processes of their own


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
        for node in ast.walk(ast.parse((stub if stub.exists() else path).read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
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


@pytest.mark.parametrize("source", sources())
def test_every_source_file_has_its_test(source: str) -> None:
    here = (ROOT / "tests" / mirror(source)).exists()
    if source not in ELSEWHERE:
        assert here, f"nothing tests hydragraph/{source}: write tests/{mirror(source)}, or say in ELSEWHERE what does"
        return
    assert not here, f"tests/{mirror(source)} exists: delete {source} from ELSEWHERE"
    test, why = ELSEWHERE[source]
    assert why
    assert (ROOT / "tests" / test).exists(), f"tests/{test} is gone: name in ELSEWHERE what tests {source} now"
    if source not in STARTED:
        assert sees(test, source), f"tests/{test} does not get to {source}: name another in ELSEWHERE"


def test_nothing_is_listed_that_is_gone() -> None:
    gone = sorted(ELSEWHERE.keys() - set(sources()))
    assert not gone, f"delete from ELSEWHERE, or rename: {', '.join(gone)}"
    assert list(ELSEWHERE) == sorted(ELSEWHERE)
