"""Checkpoints: bit for bit between any numbers of ranks, in natural order on disk, whole or not at all."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from hydragraph.errors import RankFailure, Unsupported
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule
from hydragraph.ir.program import Program
from hydragraph.runtime import checkpoint
from hydragraph.runtime.groups import Groups
from hydragraph.runtime.launch import World, join, launch
from hydragraph.runtime.state import HomeState, make_optimizer

COUNTS = [1, 2, 3, 4]
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Model:
    """As much of a Program as a home state needs."""

    buckets: tuple[Bucket, ...]

    @property
    def parameters(self) -> dict[str, Parameter]:
        return {p.name: p for bucket in self.buckets for p in bucket.parameters}


TIED = Parameter("embed.weight", (11, 6), ("head.weight",), ShardRule(0, (11,)))
FUSED = Parameter("layer.0.qkv", (5, 18), (), ShardRule(1, (2, 2, 2), unit=3, heads=True))  # transposed, as in GPT-2
CUBE = Parameter("layer.0.cube", (3, 4, 5), (), ShardRule(1, (4,)))
NORM, SCALE, TINY = Parameter("layer.0.norm", (7,)), Parameter("layer.0.scale", ()), Parameter("tiny", (2,))
MODEL = Model(
    (
        Bucket("embed.weight", (TIED,), ("embed", "head")),
        Bucket("layer.0", (FUSED, NORM, CUBE, SCALE), ("layer.0",)),
        Bucket("tiny", (TINY,), ("head",)),  # shards are multiples of 8 elements: one rank owns it all
    )
)


def adamw(named: Named) -> torch.optim.Optimizer:
    decayed, plain = [p for p in named if "norm" not in p[0]], [p for p in named if "norm" in p[0]]
    return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=0.1, amsgrad=True)


def unstepped(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam(named)


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.1, momentum=0.9)


def nadam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.NAdam(named, lr=0.1)


def adagrad(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(named, lr=0.1)


KINDS = {f.__name__: f for f in (adamw, unstepped, sgd)}


def tensors(seed: int, model: Model = MODEL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.parameters.items()}


def make(
    world: World, factory: Callable[[Named], torch.optim.Optimizer] = adamw, model: Model = MODEL, seed: int = 0
) -> tuple[HomeState, torch.optim.Optimizer]:
    home = HomeState.allocate(cast(Program, model), world.ranks, world.rank)
    home.fill(tensors(seed, model))
    return home, make_optimizer(factory, home)


def step(home: HomeState, optimizer: torch.optim.Optimizer, seed: int) -> None:
    gradients = tensors(seed)
    for name, piece in home.pieces.items():
        whole = piece.parameter.canonical(gradients[name])
        # A rank without elements has no gradient either, so the optimizer has no state there.
        home.parameters[name].grad = whole[piece.lo : piece.hi].clone() if piece.hi > piece.lo else None
    optimizer.step()


def trained(world: World, kind: str) -> tuple[HomeState, torch.optim.Optimizer]:
    home, optimizer = make(world, KINDS[kind])
    for seed in () if kind == "unstepped" else (1, 2):
        step(home, optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.05  # as a scheduler would
    return home, optimizer


@dataclass(frozen=True)
class Snapshot:
    """What one rank holds: key -> (start in canonical order, elements), and what is not sharded."""

    shards: dict[str, tuple[int, Tensor]]
    scalars: dict[str, Any]
    groups: list[dict[str, Any]]

    @staticmethod
    def of(home: HomeState, optimizer: torch.optim.Optimizer) -> Snapshot:
        shards, scalars = {}, {}
        for name, parameter in home.parameters.items():
            shards[name] = (home.pieces[name].lo, parameter.detach().clone())
            for state, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    shards[f"optimizer.{state}.{name}"] = (home.pieces[name].lo, value.clone())
                else:
                    scalars[f"{state}.{name}"] = float(value)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return Snapshot(shards, scalars, groups)


def whole(snapshots: list[Snapshot]) -> dict[str, Tensor]:
    """Put the ranks' shards together, as natural tensors."""
    found = {}
    for key in sorted({key for s in snapshots for key in s.shards}):
        name = next(name for name in MODEL.parameters if key == name or key.endswith(f".{name}"))
        shards = sorted((s.shards[key] for s in snapshots if key in s.shards), key=lambda shard: shard[0])
        found[key] = MODEL.parameters[name].natural(torch.cat([flat for _, flat in shards]))
    return found


def groups_of(world: World) -> Groups:
    return Groups(world, timedelta(seconds=60))


def save_all(folder: Path) -> list[tuple[Snapshot, Snapshot]]:
    """Save one checkpoint of each kind; return what was saved, and what one more step makes of it."""
    world = join("cpu")
    groups, results = groups_of(world), []
    for kind in KINDS:
        home, optimizer = trained(world, kind)
        before = Snapshot.of(home, optimizer)
        checkpoint.save(folder / kind, home, optimizer, {"step": 2, "rank": world.rank}, groups)
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
        extra = checkpoint.load(folder / kind, home, optimizer, groups)
        before = Snapshot.of(home, optimizer)
        step(home, optimizer, 3)
        results.append((before, Snapshot.of(home, optimizer), extra))
    return results


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def fail_together(folder: Path) -> list[tuple[str, str]]:
    world = join("cpu")
    groups = groups_of(world)
    home, optimizer = trained(world, "adamw")
    path, outcomes = folder / "c", []
    checkpoint.save(path, home, optimizer, {"step": 1}, groups)
    full = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError("disk full"))
    with full if world.rank == 1 else nullcontext():
        outcomes.append(outcome(lambda: checkpoint.save(path, home, optimizer, {"step": 2}, groups)))
    no_space = mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=OSError("no space"))
    with no_space if world.rank == 0 else nullcontext():
        outcomes.append(outcome(lambda: checkpoint.save(path, home, optimizer, {"step": 2}, groups)))
    outcomes.append(outcome(lambda: checkpoint.save(path, home, optimizer, {"step": os}, groups)))
    assert checkpoint.load(path, home, optimizer, groups) == {"step": 1}
    assert [p.name for p in folder.iterdir()] == ["c"]
    other = sgd if world.rank == 2 else adamw
    outcomes.append(outcome(lambda: checkpoint.load(path, *make(world, other), groups)))
    groups.gather_objects(None)
    if world.rank == 0:
        (path / "__2_0.distcp").unlink()
    outcomes.append(outcome(lambda: checkpoint.load(path, home, optimizer, groups)))
    if world.rank == 1:
        optimizer.state[home.parameters["embed.weight"]]["step"] += 1
    outcomes.append(outcome(lambda: checkpoint.save(path, home, optimizer, {}, groups)))
    return outcomes


def save_and_load_all(root: Path) -> tuple[dict[int, Any], dict[tuple[int, int], Any], list[tuple[str, str]]]:
    """Save with 1, 2, 3 and 4 ranks, load each with 1, 2, 3 and 4, and fail with 4.

    All in the same processes, with one process group after another, because starting them anew takes seconds each.
    """
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    written, read = {}, {}
    for saving in (True, False):
        for ranks in COUNTS:
            dist.barrier()
            dist.destroy_process_group()
            if rank < ranks:
                prefix = dist.PrefixStore(f"{ranks} {saving}", store)
                dist.init_process_group("gloo", store=prefix, rank=rank, world_size=ranks)
                if saving:
                    written[ranks] = save_all(root / str(ranks))
                for n in () if saving else COUNTS:
                    read[n, ranks] = load_all(root / str(n))
                dist.destroy_process_group()
            prefix = dist.PrefixStore(f"after {ranks} {saving}", store)
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=COUNTS[-1])
    return written, read, fail_together(root / "errors")


@dataclass(frozen=True)
class Results:
    """What ranks saved and loaded.

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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("saved")
    by_rank = launch(save_and_load_all, COUNTS[-1], root)
    written = {n: [written[n] for written, _, _ in by_rank[:n]] for n in COUNTS}
    read = {(n, m): [read[n, m] for _, read, _ in by_rank[:m]] for n in COUNTS for m in COUNTS}
    return Results(root, written, read, [errors for _, _, errors in by_rank])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("n", COUNTS)
def test_any_number_of_ranks_loads_what_any_other_saved(n: int, m: int, kind: str, results: Results) -> None:
    saved = results.saved(n, kind)
    read = [by_kind[list(KINDS).index(kind)] for by_kind in results.read[n, m]]
    expected, found = whole(saved), whole([before for before, _, _ in read])
    assert expected.keys() == found.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key
    owners = [(s, name) for s in saved for name in MODEL.parameters if s.shards[name][1].numel()]
    scalars = {k: v for s, name in owners for k, v in s.scalars.items() if k.split(".", 1)[1] == name}
    assert all(before.scalars == scalars for before, _, _ in read)  # also where nothing is owned
    assert all(before.groups == saved[0].groups for before, _, _ in read)
    assert all(extra == {"step": 2, "rank": 0} for _, _, extra in read)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", COUNTS)
def test_the_same_ranks_resume_bit_for_bit(ranks: int, kind: str, results: Results) -> None:
    index = list(KINDS).index(kind)
    for written, read in zip(results.written[ranks], results.read[ranks, ranks], strict=True):
        straight, resumed = written[index][1], read[index][1]
        assert all(torch.equal(flat, resumed.shards[key][1]) for key, (_, flat) in straight.shards.items())


def test_the_cases_are_what_they_claim(results: Results) -> None:
    adam = results.saved(4, "adamw")
    assert [snapshot.shards["tiny"][1].numel() for snapshot in adam].count(0) == 3
    assert ["step.tiny" in snapshot.scalars for snapshot in adam].count(False) == 3
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
    folder, expected = results.root / str(ranks) / "adamw", whole(results.saved(ranks, "adamw"))
    found = {key: torch.zeros(tensor.shape) for key, tensor in expected.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "head.weight" not in stored  # tied: once, under its first name
    assert tuple(cast(Any, stored["layer.0.qkv"]).size) == (5, 18)


# One process, no process group.


ALONE = World(0, 1, 0, torch.device("cpu"), "gloo")


@pytest.fixture
def groups() -> Groups:
    assert not dist.is_initialized()
    return groups_of(ALONE)


@pytest.fixture
def made(tmp_path: Path, groups: Groups) -> Path:
    """A checkpoint of AdamW after two steps."""
    home, optimizer = trained(ALONE, "adamw")
    checkpoint.save(tmp_path / "step-7", home, optimizer, {"step": 7}, groups)
    return tmp_path / "step-7"


@pytest.mark.parametrize("factory", [nadam, adagrad])
def test_optimizers_with_other_states(factory: Any, tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE, factory)
    step(home, optimizer, 1)
    checkpoint.save(tmp_path / "c", home, optimizer, {}, groups)
    resumed = make(ALONE, factory, seed=2)
    checkpoint.load(tmp_path / "c", *resumed, groups)
    for each in ((home, optimizer), resumed):
        step(*each, 2)
    straight, found = Snapshot.of(home, optimizer), Snapshot.of(*resumed)
    assert {key.split(".")[0] for key in straight.scalars} >= {"step"}
    assert found.scalars == straight.scalars
    assert all(torch.equal(flat, found.shards[key][1]) for key, (_, flat) in straight.shards.items())


def test_hyperparameters_that_could_not_be_read_back_are_refused(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    optimizer.param_groups[0]["schedule"] = lambda: 0
    with pytest.raises(ValueError, match="the optimizer is not plain data"):
        checkpoint.save(tmp_path / "c", home, optimizer, {}, groups)


def test_extra_is_any_plain_data(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    extra = {"random": random.getstate(), "torch": torch.get_rng_state(), "data": {"position": (3, [1, None, b"x"])}}
    checkpoint.save(tmp_path / "c", home, optimizer, extra, groups)
    found = checkpoint.load(tmp_path / "c", home, optimizer, groups)
    assert torch.equal(found.pop("torch"), extra.pop("torch"))
    assert found == extra


def test_extra_that_could_not_be_read_back_is_refused_before_writing(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    for value in (ALONE, lambda: 0):
        with pytest.raises(ValueError, match=r"extra\['bad'\] is not plain data"):
            checkpoint.save(tmp_path / "c", home, optimizer, {"good": 1, "bad": value}, groups)
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_byte_is_found_in_every_file(made: Path, groups: Groups) -> None:
    manifest = json.loads((made / "complete.json").read_text())
    assert set(manifest["files"]) == {path.name for path in made.iterdir()} - {"complete.json"}
    assert set(manifest["versions"]) == {"torch", "hydragraph"}
    home, optimizer = make(ALONE)
    for name, expected in manifest["files"].items():
        content = (made / name).read_bytes()
        broken = bytearray(content)
        broken[len(broken) // 2] ^= 1
        (made / name).write_bytes(broken)
        with pytest.raises(ValueError, match=f"{name} is corrupt: SHA-256 .*expected {expected['sha256']}: restore"):
            checkpoint.load(made, home, optimizer, groups)
        (made / name).write_bytes(content[:-1])
        with pytest.raises(ValueError, match=f"{name} has {len(content) - 1} bytes, expected {len(content)}"):
            checkpoint.load(made, home, optimizer, groups)
        (made / name).unlink()
        with pytest.raises(ValueError, match=f"{name} is missing, expected"):
            checkpoint.load(made, home, optimizer, groups)
        (made / name).write_bytes(content)
    assert all(torch.equal(home.parameters[n], make(ALONE)[0].parameters[n]) for n in home.parameters)  # untouched
    assert checkpoint.load(made, home, optimizer, groups) == {"step": 7}


def test_an_incomplete_checkpoint_is_refused(made: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    with pytest.raises(ValueError, match=r"no-such: there is no complete.json"):
        checkpoint.load(made.parent / "no-such", home, optimizer, groups)
    (made / "complete.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"complete.json is damaged"):
        checkpoint.load(made, home, optimizer, groups)
    (made / "complete.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"format 99, but this version reads 1"):
        checkpoint.load(made, home, optimizer, groups)


def test_another_model_or_optimizer_is_refused(made: Path, groups: Groups) -> None:
    wider = Model((*MODEL.buckets[:2], Bucket("tiny", (Parameter("tiny", (3,)),), ("head",))))
    with pytest.raises(ValueError, match=r"tiny is \[2\] in the checkpoint and \[3\] in the model"):
        checkpoint.load(made, *make(ALONE, model=wider), groups)
    renamed = Model((*MODEL.buckets[:2], Bucket("tiny", (Parameter("small", (2,)),), ("head",))))
    with pytest.raises(ValueError, match=r"tiny is \[2\] .*missing in the model; small is missing in the checkpoint"):
        checkpoint.load(made, *make(ALONE, model=renamed), groups)
    with pytest.raises(ValueError, match="holds the state of AdamW, not of SGD"):
        checkpoint.load(made, *make(ALONE, sgd), groups)
    with pytest.raises(ValueError, match=r"has 2 parameter groups, this one 1, which differ in \['layer.0.norm'\]"):
        checkpoint.load(made, *make(ALONE, torch.optim.AdamW), groups)


def test_without_an_optimizer_only_weights_are_kept(made: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE, seed=5)
    checkpoint.load(made, home, None, groups)
    assert torch.equal(home.parameters["tiny"], trained(ALONE, "adamw")[0].parameters["tiny"])
    checkpoint.save(made, home, None, {}, groups)
    assert checkpoint.load(made, home, None, groups) == {}
    with pytest.raises(ValueError, match="holds the state of no optimizer, not of AdamW"):
        checkpoint.load(made, home, optimizer, groups)


def test_a_state_of_another_shape_is_refused(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    optimizer.state[home.parameters["tiny"]]["row"] = torch.zeros(3)
    with pytest.raises(Unsupported, match=r"AdamW, parameter tiny: its state row has shape \(3,\)"):
        checkpoint.save(tmp_path / "c", home, optimizer, {}, groups)


def test_only_a_checkpoint_is_replaced(tmp_path: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="notes: something else is there"):
        checkpoint.save(tmp_path / "notes", home, optimizer, {}, groups)
    assert (tmp_path / "notes" / "thesis.txt").exists()
    for number in (1, 2):
        checkpoint.save(tmp_path / "deep" / "c", home, optimizer, {"number": number}, groups)
    assert checkpoint.load(tmp_path / "deep" / "c", home, optimizer, groups) == {"number": 2}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c"]


def test_a_replacement_that_fails_to_move_in_is_undone(made: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if ".tmp-" in path.name:
            raise OSError("no rename today")
        return rename(path, target)

    with mock.patch.object(Path, "rename", refuse), pytest.raises(OSError, match="no rename today"):
        checkpoint.save(made, home, optimizer, {"step": 8}, groups)
    assert checkpoint.load(made, home, optimizer, groups) == {"step": 7}
    assert [path.name for path in made.parent.iterdir()] == ["step-7"]
    made.rename(made.with_name("step-7.old-01234567"))  # as if it had died in between
    with pytest.raises(ValueError, match=r"rename .*step-7.old-01234567, which a crashed save moved aside"):
        checkpoint.load(made, home, optimizer, groups)


def test_latest_and_prune(tmp_path: Path, groups: Groups) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None
    checkpoint.prune(tmp_path, 1)
    home, optimizer = make(ALONE)
    for number in (2, 9, 10):
        checkpoint.save(tmp_path / f"step-{number}", home, optimizer, {}, groups)
    others = ["step-11", "step-10.tmp-00000000", "step-9.old-ffffffff", "step-11.tmp-00000000", "step-1-mine"]
    for name in others:
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    checkpoint.prune(tmp_path, 2)
    kept = {"step-9", "step-10", "step-11", "step-11.tmp-00000000", "step-1-mine"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.prune(tmp_path, 0)


# Errors on one of several ranks.


def test_an_error_on_one_rank_is_an_error_on_all(results: Results) -> None:
    writer, coordinator, extra, other, missing, diverged = zip(*results.errors, strict=True)
    assert [kind for kind, _ in writer] == ["RankFailure", "OSError", "RankFailure", "RankFailure"]
    assert all("disk full" in text for _, text in writer)
    assert "rank 1 failed at `save checkpoint" in writer[0][1]
    assert [kind for kind, _ in coordinator] == ["OSError", "RankFailure", "RankFailure", "RankFailure"]
    for outcomes, said in (
        (extra, "extra['step'] is not plain data"),
        (other, "holds the state of AdamW, not of SGD"),
        (missing, "__2_0.distcp is missing"),
        (diverged, "parameter embed.weight:"),
    ):
        assert len(set(outcomes)) == 1
        assert outcomes[0][0] == "ValueError"
        assert said in outcomes[0][1]


def die_while_saving(path: Path) -> None:
    world = join("cpu")
    groups = groups_of(world)
    home, optimizer = trained(world, "sgd")
    checkpoint.save(path, home, optimizer, {"step": 1}, groups)
    write = dcp.FileSystemWriter.write_data

    def die(*arguments: Any) -> object:
        write(*arguments)
        os._exit(3)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", die) if world.rank == 1 else nullcontext():
        checkpoint.save(path, home, optimizer, {"step": 2}, groups)


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint_whole(tmp_path: Path, groups: Groups) -> None:
    with pytest.raises((RankFailure, RuntimeError)):
        launch(die_while_saving, 2, tmp_path / "c")
    home, optimizer = make(ALONE, sgd, seed=4)
    assert checkpoint.load(tmp_path / "c", home, optimizer, groups) == {"step": 1}
    assert torch.equal(home.parameters["tiny"], trained(ALONE, "sgd")[0].parameters["tiny"])
