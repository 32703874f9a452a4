"""Checkpoints: bit for bit between any numbers of ranks, in natural order on disk, whole or not at all."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hydragraph.checkpoint import save_and_load
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join, launch
from hydragraph.errors import RankFailure
from tests.runtime.homes import (
    ALONE,
    KINDS,
    MODEL,
    Snapshot,
    adamw,
    groups_of,
    make,
    outcome,
    sgd,
    step,
    trained,
    whole,
)
from tests.thorough import thorough

COUNTS = [1, 3]
ALL_COUNTS = [1, 2, 3, 4]


def save_all(folder: Path) -> list[tuple[Snapshot, Snapshot]]:
    """Save one checkpoint of each kind; return what was saved, and what one more step makes of it."""
    world = join("cpu")
    groups, results = groups_of(world), []
    for kind in KINDS:
        home, optimizer = trained(world, kind)
        before = Snapshot.of(home, optimizer)
        save_and_load.save(folder / kind, home, optimizer, {"step": 2, "rank": world.rank}, groups)
        step(home, optimizer, 3)
        results.append((before, Snapshot.of(home, optimizer)))
    return results


def load_all(folder: Path) -> list[tuple[Snapshot, Snapshot, dict[str, Any]]]:
    """Load one checkpoint of each kind; return what was loaded, and what one more step makes of it."""
    world = join("cpu")
    groups, results = groups_of(world), []
    for kind, factory in KINDS.items():
        home, optimizer = make(world, factory, seed=9)
        step(home, optimizer, 8)  # loading replaces whatever there is
        extra = save_and_load.load(folder / kind, home, optimizer, groups)
        before = Snapshot.of(home, optimizer)
        step(home, optimizer, 3)
        results.append((before, Snapshot.of(home, optimizer), extra))
    return results


def fail_together(folder: Path) -> list[tuple[str, str]]:
    world = join("cpu")
    groups = groups_of(world)
    home, optimizer = trained(world, "adamw")
    path, outcomes = folder / "c", []
    save_and_load.save(path, home, optimizer, {"step": 1}, groups)
    full = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError("disk full"))
    with full if world.rank == 1 else nullcontext():
        outcomes.append(outcome(lambda: save_and_load.save(path, home, optimizer, {"step": 2}, groups)))
    no_space = mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=OSError("no space"))
    with no_space if world.rank == 0 else nullcontext():
        outcomes.append(outcome(lambda: save_and_load.save(path, home, optimizer, {"step": 2}, groups)))
    outcomes.append(outcome(lambda: save_and_load.save(path, home, optimizer, {"step": os}, groups)))
    assert save_and_load.load(path, home, optimizer, groups) == {"step": 1}
    assert [p.name for p in folder.iterdir()] == ["c"]
    other = sgd if world.rank == 2 else adamw
    outcomes.append(outcome(lambda: save_and_load.load(path, *make(world, other), groups)))
    groups.gather(None)
    if world.rank == 0:
        (path / "__2_0.distcp").unlink()
    outcomes.append(outcome(lambda: save_and_load.load(path, home, optimizer, groups)))
    if world.rank == 1:
        optimizer.state[home.parameters["embed.weight"]]["step"] += 1
    outcomes.append(outcome(lambda: save_and_load.save(path, home, optimizer, {}, groups)))
    return outcomes


def save_and_load_all(
    root: Path, counts: list[int]
) -> tuple[dict[int, Any], dict[tuple[int, int], Any], list[tuple[str, str]]]:
    """Save with some numbers of ranks, load each with each of these numbers, and fail with the largest.

    All in the same processes, with one process group after another, because starting them anew takes seconds each.
    """
    rank = dist.get_rank()
    meeting = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    written, read = {}, {}
    for saving in (True, False):
        for ranks in counts:
            dist.barrier()
            dist.destroy_process_group()
            if rank < ranks:
                prefix = dist.PrefixStore(f"{ranks} {saving}", meeting)
                dist.init_process_group("gloo", store=prefix, rank=rank, world_size=ranks)
                if saving:
                    written[ranks] = save_all(root / str(ranks))
                for n in () if saving else counts:
                    read[n, ranks] = load_all(root / str(n))
                dist.destroy_process_group()
            prefix = dist.PrefixStore(f"after {ranks} {saving}", meeting)
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=counts[-1])
    return written, read, fail_together(root / "errors")


@dataclass(frozen=True)
class Results:
    """States that ranks saved and loaded.

    Attributes:
        root: a folder per number of ranks, in it a checkpoint per kind.
        written: ranks -> by rank and kind: (saved, after another step).
        read: (ranks that saved, ranks that loaded) -> by rank and kind: (loaded, after another step, extra).
        errors: what `fail_together` met, by rank.
    """

    root: Path
    written: dict[int, list[list[tuple[Snapshot, Snapshot]]]]
    read: dict[tuple[int, int], list[list[tuple[Snapshot, Snapshot, dict[str, Any]]]]]
    errors: list[list[tuple[str, str]]]

    def saved(self, ranks: int, kind: str) -> list[Snapshot]:
        return [by_kind[list(KINDS).index(kind)][0] for by_kind in self.written[ranks]]


def results_of(root: Path, counts: list[int]) -> Results:
    by_rank = launch(save_and_load_all, counts[-1], root, counts)
    written = {n: [written[n] for written, _, _ in by_rank[:n]] for n in counts}
    read = {(n, m): [read[n, m] for _, read, _ in by_rank[:m]] for n in counts for m in counts}
    return Results(root, written, read, [errors for _, _, errors in by_rank])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(tmp_path_factory.mktemp("saved"), COUNTS)


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(tmp_path_factory.mktemp("all"), ALL_COUNTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("n", COUNTS)
def test_any_number_of_ranks_loads_what_any_other_saved(n: int, m: int, kind: str, results: Results) -> None:
    check_loaded(n, m, kind, results)


@thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), [pair for pair in product(ALL_COUNTS, ALL_COUNTS) if {2, 4} & {*pair}])
def test_two_and_four_ranks_load_what_any_number_saved_and_the_reverse(
    n: int, m: int, kind: str, all_results: Results
) -> None:
    check_loaded(n, m, kind, all_results)


def check_loaded(n: int, m: int, kind: str, results: Results) -> None:
    saved = results.saved(n, kind)
    read = [by_kind[list(KINDS).index(kind)] for by_kind in results.read[n, m]]
    expected, found = whole(saved), whole([before for before, _, _ in read])
    assert expected.keys() == found.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key
    owners = [(s, name) for s in saved for name in MODEL.parameters if s.shards[name][1].numel()]
    scalars = {k: v for s, name in owners for k, v in s.scalars.items() if k.split(".", 1)[1] == name}
    assert all(before.scalars == scalars for before, _, _ in read)  # also on ranks that own no elements
    assert all(before.groups == saved[0].groups for before, _, _ in read)
    assert all(extra == {"step": 2, "rank": 0} for _, _, extra in read)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", COUNTS)
def test_the_same_ranks_resume_bit_for_bit(ranks: int, kind: str, results: Results) -> None:
    check_resumed(ranks, kind, results)


@thorough
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_of_ranks_resume_bit_for_bit(kind: str, ranks: int, all_results: Results) -> None:
    check_resumed(ranks, kind, all_results)


def check_resumed(ranks: int, kind: str, results: Results) -> None:
    index = list(KINDS).index(kind)
    for written, read in zip(results.written[ranks], results.read[ranks, ranks], strict=True):
        straight, resumed = written[index][1], read[index][1]
        assert all(torch.equal(flat, resumed.shards[key][1]) for key, (_, flat) in straight.shards.items())


def test_the_cases_are_what_they_claim(results: Results) -> None:
    adam = results.saved(3, "adamw")
    assert [snapshot.shards["tiny"][1].numel() for snapshot in adam].count(0) == 2
    assert ["step.tiny" in snapshot.scalars for snapshot in adam].count(False) == 2
    assert {key.split(".")[1] for key in whole(adam) if key.startswith("optimizer.")} == {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    }
    assert adam[0].scalars["step.embed.weight"] == 2
    assert adam[0].groups[0]["lr"] == 0.05
    assert "optimizer.momentum_buffer.layer.0.qkv" in whole(results.saved(3, "sgd"))
    assert whole(results.saved(3, "unstepped")).keys() == MODEL.parameters.keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", COUNTS)
def test_plain_dcp_reads_natural_tensors(ranks: int, results: Results) -> None:
    check_plain(ranks, results)


@thorough
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [2, 4])
def test_plain_dcp_reads_natural_tensors_of_other_numbers_of_ranks(ranks: int, all_results: Results) -> None:
    check_plain(ranks, all_results)


def check_plain(ranks: int, results: Results) -> None:
    folder, expected = results.root / str(ranks) / "adamw", whole(results.saved(ranks, "adamw"))
    found = {key: torch.zeros(tensor.shape) for key, tensor in expected.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "head.weight" not in stored  # tied: once, under its first name
    assert tuple(cast(Any, stored["layer.0.qkv"]).size) == (5, 18)


# Errors on one of several ranks.


def test_an_error_on_one_rank_is_an_error_on_all(results: Results) -> None:
    writer, coordinator, extra, other, missing, diverged = zip(*results.errors, strict=True)
    assert [kind for kind, _ in writer] == ["RankFailure", "OSError", "RankFailure"]
    assert all("disk full" in text for _, text in writer)
    assert "rank 1 failed at `save checkpoint" in writer[0][1]
    assert [kind for kind, _ in coordinator] == ["OSError", "RankFailure", "RankFailure"]
    for outcomes, kind, said in (
        (extra, "ValueError", "extra['step'] is not plain data"),
        (other, "ValueError", "saved with AdamW, not SGD"),
        (missing, "Damaged", "__2_0.distcp is missing"),
        (diverged, "ValueError", "the optimizer state of embed.weight"),
    ):
        assert len(set(outcomes)) == 1
        assert outcomes[0][0] == kind
        assert said in outcomes[0][1]


def die_while_saving(path: Path) -> None:
    world = join("cpu")
    groups = groups_of(world)
    home, optimizer = trained(world, "sgd")
    save_and_load.save(path, home, optimizer, {"step": 1}, groups)
    write = dcp.FileSystemWriter.write_data

    def die(*arguments: Any) -> object:
        write(*arguments)
        os._exit(3)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", die) if world.rank == 1 else nullcontext():
        save_and_load.save(path, home, optimizer, {"step": 2}, groups)


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint_whole(tmp_path: Path, groups: Groups) -> None:
    with pytest.raises((RankFailure, RuntimeError)):
        launch(die_while_saving, 2, tmp_path / "c")
    home, optimizer = make(ALONE, sgd, seed=4)
    assert save_and_load.load(tmp_path / "c", home, optimizer, groups) == {"step": 1}
    assert torch.equal(home.parameters["tiny"], trained(ALONE, "sgd")[0].parameters["tiny"])
