"""State moves between worlds of real ranks: lost at any instruction, joined, under other homes; to the same curve."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.engine import executable, membership
from hydragraph.engine.state_transfer import Moved
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program import Program
from hydragraph.runtime.supported_optimizers import OptimizerFactory
from hydragraph.train.stragglers.reshard_plan import received, stages
from tests.checkpoint.test_standalone_reader import Scaled
from tests.generations import regroup
from tests.models import captured, randomised, sequences
from tests.own_models import small
from tests.ready import Ready
from tests.thorough import first, thorough

LAYERS, RANKS = 2, 4
WIDE, NARROW = "<[0,1]x1s,[2]x1> + <[3]x2>", "<[1]x1,[0,2]x1>"
TWICE = hg.Home(copies=2)
CLIP = 0.5  # a step that is finished later must be clipped by the same norm, whose last digits depend on the home
LIMIT = timedelta(seconds=120)


@pytest.fixture(scope="module")
def prepared() -> Ready:
    return Ready.of(partly_frozen(), [WIDE, NARROW, "<[0,1]x2>"])


def partly_frozen() -> nn.Module:
    model = randomised(small(LAYERS))
    model.out.weight = model.tokens.weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("stack.1.up" not in name)
    return model


def parsed(text: str) -> hg.Strategy:
    return hg.Strategy.parse(text, LAYERS)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    norms = [pair for pair in named if "norm" in pair[0]]
    others = [pair for pair in named if "norm" not in pair[0]]
    return torch.optim.AdamW([{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=1e-2)


def compiled(prepared: Ready, home: hg.Home = TWICE, clip: float | None = CLIP, joining: bool = False) -> hg.Executable:
    return prepared.executable(parsed(WIDE), adamw, home=home, max_grad_norm=clip, joining=joining)


def batch(number: int) -> list[Tensor]:
    return sequences([20, 7, 33, 1, 12, 5], seed=number)


def train(exe: hg.Executable, steps: Sequence[int]) -> list[float]:
    return [exe.step(batch(step)).loss for step in steps]


Run = tuple[float | None, Sequence[str], Sequence[float], Sequence[Sequence[str]]]


def plainly(prepared: Ready, runs: Sequence[Run]) -> list[list[float]]:
    """Train without any incident: runs, clipped or not, each step under a strategy and with a learning rate.

    A run has one or more ends, of steps at the last rate, each of them from the state that the steps before have left;
    there is a list of losses for each end.
    """
    return [
        losses
        for clip, texts, rates, ends in runs
        for losses in _one_run(compiled(prepared, clip=clip), texts, rates, ends)
    ]


def _one_run(
    exe: hg.Executable, texts: Sequence[str], rates: Sequence[float], ends: Sequence[Sequence[str]]
) -> Iterator[list[float]]:
    assert exe.optimizer is not None
    losses = []
    for number, (text, rate) in enumerate(zip(texts, rates, strict=True)):
        for group in exe.optimizer.param_groups:
            group["lr"] = rate
        losses.append(exe.step(batch(number), parsed(text)).loss)
    weights = {name: tensor.clone() for name, tensor in exe.home.weights.items()}
    state = copy.deepcopy(exe.optimizer.state_dict())
    for end in ends:
        for name, tensor in weights.items():
            exe.home.weights[name].copy_(tensor)
        exe.optimizer.load_state_dict(copy.deepcopy(state))
        yield losses + [
            exe.step(batch(number), parsed(text)).loss for number, text in enumerate(end, start=len(losses))
        ]
    exe.close()


TEXTS = [WIDE, NARROW, NARROW, "<[0,1]x2>", WIDE, WIDE]
RATES = [1e-2 / (1 + n) for n in (0, 0, 1, 1, 2, 3)]
LONG = 1 + len(Op) + 1  # steps of the test that loses a rank at each instruction


@pytest.fixture(scope="module")
def smooth(prepared: Ready) -> list[list[float]]:
    """Return the losses of runs without any incident, which the tests' must be to the last bit."""
    runs: list[Run] = [
        (CLIP, [WIDE] * 3 + [NARROW] * 2, [1e-2] * 5, [[]]),
        (None, TEXTS, RATES, [[WIDE], [NARROW, NARROW], [NARROW, "<[0,1]x2>"]]),
    ]
    return hg.launch(plainly, RANKS, prepared, runs, timeout=LIMIT)[0]


@pytest.fixture(scope="module")
def long(prepared: Ready) -> list[list[float]]:
    """Return the losses of long runs without any incident, clipped and not, of tests in `make thorough` alone."""
    runs: list[Run] = [(clip, [WIDE] * LONG, [1e-2] * LONG, [[]]) for clip in (CLIP, None)]
    return hg.launch(plainly, RANKS, prepared, runs, timeout=LIMIT)[0]


def strike(exe: hg.Executable, wanted: Op, act: Callable[[], None]) -> None:
    """Call `act` right before this rank's next instruction of a kind, once."""

    def hook(instruction: Instruction) -> None:
        if instruction.op is wanted:
            exe._session.executor.before = None
            act()

    exe._session.executor.before = hook


class StruckError(Exception):
    """Raised in a rank that is lost."""


def stop() -> None:
    raise StruckError


def update_and_break(optimizer: torch.optim.Optimizer, update: Callable[..., object], *args: Any, **more: Any) -> None:
    """Update; the third update breaks."""
    update(*args, **more)
    if optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 3:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.fill_(torch.nan)
        raise StruckError


def cut_off() -> None:
    raise hg.RankFailure(0, "commit", "the others have learned of a failure that this rank has not")


# At every instruction.


SOME = [Op.RECEIVE, Op.UPDATE]  # the others repeat the step, except after UPDATE
OCCURRING = [op for op in Op if op not in (Op.OFFLOAD, Op.FETCH)]  # no stage of WIDE offloads


def struck_everywhere(prepared: Ready, ops: Sequence[Op]) -> list[float]:
    """Lose another rank at each kind of instruction, and let it come back as a newcomer without anything."""
    exe = compiled(prepared)
    losses = train(exe, [0])
    for number, op in enumerate(ops, start=1):
        victim = number % RANKS
        own = exe.rank
        if own == victim:
            strike(exe, op, stop)
        try:
            losses.append(exe.step(batch(len(losses))).loss)  # ranks that have updated continue with the next step
            exe.step(batch(len(losses)))
        except (hg.RankFailure, StruckError):
            pass
        exe.leave()
        if own == victim:
            exe = compiled(prepared, joining=True)
        world = regroup(number, range(RANKS))
        assert world is not None
        moved = exe.move(world, TWICE, [None if rank == victim else rank for rank in range(RANKS)])
        del losses[moved.step :]  # what ranks learned of a step that none has finished
        losses += [float("nan")] * (moved.step - len(losses))  # what this rank did not learn of one that others had
    losses += train(exe, [len(losses)])
    exe.close()
    return losses


@thorough
@pytest.mark.parametrize("ops", first([SOME], [SOME, OCCURRING]), ids=["some", "all"])
def test_a_rank_lost_at_any_instruction_costs_the_step_under_way_and_no_bit_more(
    ops: list[Op], prepared: Ready, long: list[list[float]]
) -> None:
    found = hg.launch(struck_everywhere, RANKS, prepared, ops, timeout=LIMIT)
    expected = long[0][: len(found[0])]
    assert len(expected) > 2
    for losses in found:  # of a step that was lost with a rank, that rank has not learned the loss
        assert [a for a in losses if a == a] == [b for a, b in zip(losses, expected, strict=True) if a == a]
    assert all(any(losses[step] == loss for losses in found) for step, loss in enumerate(expected))


# Around the commit.


def at_the_commit(prepared: Ready) -> tuple[list[float], bool, bool]:
    """Rank 3 is lost when it has updated, rank 1 has not heard of the commit, and rank 2 breaks during its update."""
    exe = compiled(prepared)
    losses = train(exe, [0, 1])
    optimizer = exe.optimizer
    own = exe.rank
    if own == 1:
        strike(exe, Op.UPDATE, cut_off)
    if own == 2:
        assert exe.optimizer is not None
        functions: Any = import_module("torch.optim.adam")
        functions.adam = partial(update_and_break, exe.optimizer, functions.adam)
    try:
        exe.step(batch(2))
        exe.step(batch(3))
    except (hg.RankFailure, StruckError):
        pass
    exe.leave()
    world = regroup(1, [2, 0, 1])
    if world is None:
        return losses, False, False
    moved = exe.move(world, hg.Home(), [2, 0, 1], strategy=parsed(NARROW))
    assert moved.step == 3
    losses += train(exe, [3, 4])
    exe.close()
    return losses, moved.finished, exe.optimizer is optimizer


def test_a_step_that_some_have_finished_is_finished_by_all(prepared: Ready, smooth: list[list[float]]) -> None:
    (zero, finished_0, same), (one, finished_1, _), (two, finished_2, _), _ = hg.launch(
        at_the_commit, RANKS, prepared, timeout=LIMIT
    )
    assert zero == one == two
    assert zero[:2] == smooth[0][:2]
    assert zero[2:] == pytest.approx(smooth[0][3:], rel=1e-6)
    assert (finished_0, finished_1, finished_2) == (False, True, False)
    assert same


# Worlds and homes.


def through_worlds(prepared: Ready, folder: Path) -> tuple[list[float], list[Moved]]:
    """Four ranks, then three, then two, then four; under other homes between two steps; the last from a checkpoint."""
    plan: list[tuple[list[int], hg.Home, str, hg.Home | None]] = [
        ([3, 1, 0], hg.Home([1, 0, 2]), NARROW, hg.Home([1, 4, 2], copies=2)),
        ([0, 3], hg.Home([0, 1]), "<[0,1]x2>", None),
        ([3, 0, 2, 1], hg.Home([1, 2, 0, 1], buckets={"layer.0": [0, 0, 0, 1]}), WIDE, hg.Home()),
    ]
    exe = compiled(prepared, clip=None)
    losses = train(exe, [0])
    moves = []
    before = [0, 1, 2, 3]
    for number, (members, home, text, then) in enumerate(plan, start=1):
        exe.leave()
        world = regroup(number, members)
        olds = [before.index(member) if member in before else None for member in members]
        before = members
        if world is None:
            losses, exe = [], compiled(prepared, clip=None, joining=True)
            continue
        moves.append(exe.move(world, home, olds, strategy=parsed(text)))
        losses += train(exe, [moves[-1].step])
        for group in exe.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        if then is not None:
            moves.append(exe.move(world, then, range(len(members))))
            losses += train(exe, [moves[-1].step])
    exe.save(folder / "saved")
    losses += train(exe, [6])
    exe.leave()
    world = regroup(9, [3, 0, 2])
    if world is not None:
        with pytest.raises(ValueError, match=r"no remaining rank has elements \[\d+, \d+\) of bucket .*copies=2"):
            exe.move(world, hg.Home(), [0, 1, 2], strategy=parsed(NARROW))
        moves.append(exe.move(world, hg.Home(), [0, 1, 2], folder / "saved", strategy=parsed(NARROW)))
        losses += train(exe, [6])
        pieces = hg.Pieces(disk=folder / "pieces")
        exe.keep(pieces, {"seen": exe.rank // 3})
        pieces.wait()
        losses += train(exe, [7])
        exe.leave()
        world = regroup(10, [0, 3])
        if world is not None:
            moves.append(exe.move(world, hg.Home(), [1, 0], pieces, strategy=parsed("<[0,1]x2>")))
            losses += train(exe, [7])
            with pytest.raises(TypeError, match=r"5 is not a checkpoint: give a directory, hg\.Pieces, or the pair"):
                exe.load(5)  # pyrefly: ignore[bad-argument-type]
            assert exe.load((pieces, folder / "saved")) == {"seen": 0}
            losses += train(exe, [7])
            exe.keep(pieces)  # of step 8, but once more
            pieces.wait()
            exe.load((pieces, folder / "saved"))
            assert exe.steps == 8
            train(exe, [8])
            exe.save(folder / "newer")
            exe.load((pieces, folder / "newer"))
            assert exe.steps == 9
    return losses, moves


def test_worlds_shrink_and_grow_under_any_home(prepared: Ready, smooth: list[list[float]], tmp_path: Path) -> None:
    found = hg.launch(through_worlds, RANKS, prepared, tmp_path, timeout=LIMIT)
    assert found[0][0] == found[3][0]
    assert found[3][0] == [*smooth[1], *smooth[2][-2:], smooth[3][-1], smooth[3][-1]]
    assert found[1][0] == smooth[1][4:]
    assert [moved.step for moved in found[3][1]] == [1, 2, 3, 4, 5, 6, 7]
    assert [moved.restored for moved in found[3][1]] == [None] * 5 + [6, 7]
    assert found[0][1][-1].extra == {"seen": 0}
    assert found[3][1][0].received > 0


# Bit by bit.


def in_stages(prepared: Ready, way: list[hg.Home]) -> tuple[list[float], list[bool], list[int]]:
    """Train under one home after another, in one world; say what of the layers has stayed where it is, and came."""
    exe = compiled(prepared, home=hg.Home(), clip=None)
    losses = train(exe, [0, 1])
    stayed, came = [], []
    for home in way:
        groups, before = exe.groups, exe.home.weights
        moved = exe.move(exe.world, home, range(RANKS))
        assert exe.groups is groups
        stayed.append(exe.home.weights["layer.1"] is before["layer.1"])
        came.append(moved.received)
        losses += train(exe, [moved.step])
    exe.close()
    return losses, stayed, came


@thorough
def test_state_moves_a_part_between_every_two_steps(prepared: Ready, long: list[list[float]]) -> None:
    new = hg.Home([1, 0, 2, 5])
    way = [*stages(hg.Home(), new, RANKS, prepared.variants.program.buckets, 1_500)]
    assert len(way) >= 3
    found = hg.launch(in_stages, RANKS, prepared, way, timeout=LIMIT)
    for losses, stayed, _ in found:
        assert losses == long[1][: len(losses)]
        assert stayed.count(False) == 1, "a bucket moves once"
    whole = received(hg.Home(), new, RANKS, prepared.variants.program.buckets)
    frozen = sum(sum(each) for _, _, each in found) / sum(whole)
    assert 4 < frozen < 12, "weights and two moments, of what is frozen weights alone"


# Moves that are cut off.


def cut_moves(prepared: Ready) -> tuple[list[float], list[tuple[int, str]]]:
    """One rank fails during a move, before any rank has all state; then one rank misses the end of a move."""
    exe = compiled(prepared, clip=None)
    losses, outcomes = train(exe, [0]), []
    everybody: list[int | None] = [*range(RANKS)]
    for number, (victim, at) in enumerate([(2, "bring"), (1, "take")], start=1):
        exe.leave()
        world = regroup(2 * number - 1, range(RANKS))
        assert world is not None
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == victim and at == "bring":
                patch.setattr(membership, "bring", lambda *_: stop())
            elif world.rank == victim:
                patch.setattr(exe._transition, "take", stop)
            try:
                exe.move(world, hg.Home([1, 2, 3, 4], copies=2), everybody)
                exe.step(batch(number))  # ranks that have finished it cannot continue alone
            except (hg.RankFailure, StruckError) as error:
                outcomes.append((exe._transition.generation, type(error).__name__))
        exe.leave()
        world = regroup(2 * number, range(RANKS))
        assert world is not None
        moved = exe.move(world, TWICE, everybody)
        assert (moved.step, moved.restored) == (number, None)
        losses += train(exe, [number])
    exe.close()
    return losses, outcomes


@thorough
def test_a_move_that_is_cut_off_is_repeated(prepared: Ready, long: list[list[float]]) -> None:
    found = hg.launch(cut_moves, RANKS, prepared, timeout=LIMIT)
    assert [losses for losses, _ in found] == [long[1][:3]] * RANKS
    first = [outcomes[0] for _, outcomes in found]
    assert first == [(0, "RankFailure"), (0, "RankFailure"), (0, "StruckError"), (0, "RankFailure")]
    second = [outcomes[1] for _, outcomes in found]
    assert second == [(2, "RankFailure"), (1, "StruckError"), (2, "RankFailure"), (2, "RankFailure")]


def joined_with_another_buffer() -> float:
    def ready(scale: float, joining: bool) -> hg.Executable:
        return hg.compile(
            Scaled(scale), "2*<tp1,pp1>", home=TWICE, check="off", backend="eager", device="cpu", joining=joining
        )

    exe = ready(4.5, joining=False)
    rank = exe.rank
    exe.leave()
    if rank:
        exe = ready(0.0, joining=True)
    world = regroup(1, range(2))
    assert world is not None
    exe.move(world, TWICE, [0, None])
    exe.evaluate(batch(0))
    scale = float(exe._session.buffers["scale"])
    exe.close()
    return scale


def test_a_joining_rank_gets_persistent_buffers() -> None:
    assert hg.launch(joined_with_another_buffer, 2, timeout=LIMIT) == [4.5, 4.5]


def alone(model: nn.Module, optimizer: OptimizerFactory = adamw, **options: Any) -> hg.Executable:
    return hg.compile(model, "<tp1,pp1>", optimizer, device="cpu", check="off", backend="eager", **options)


@functools.cache
def small_program() -> Program:
    return hg.capture(small(), check="off")


def test_pieces_of_another_model_or_optimizer_are_refused(tmp_path: Path) -> None:
    pieces = hg.Pieces(memory=False, disk=tmp_path / "pieces")
    exe = alone(small(), program=small_program())
    exe.step(batch(0))
    exe.keep(pieces)
    pieces.wait()
    exe.save(tmp_path / "saved")
    model = small()
    model.out = nn.Linear(32, 100)
    narrower = alone(model)
    before = narrower.full_state_dict()
    plain = alone(small(), lambda named: torch.optim.SGD(named, lr=0.1), program=exe.program)
    for restore in (pieces, (pieces, tmp_path / "saved")):
        with pytest.raises(ValueError, match=r"is \[101, 32\] in the checkpoint and \[100, 32\] in the model"):
            narrower.load(restore)
        with pytest.raises(ValueError, match="saved with AdamW, not SGD"):
            plain.load(restore)
    assert all(torch.equal(before[name], tensor) for name, tensor in narrower.full_state_dict().items())


def test_adapters_are_not_lost_by_a_move_while_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executable, "switchable_parameters", lambda model: ["out.weight"])
    exe = alone(small(), program=small_program())
    before = exe.full_state_dict()
    with exe.adapter_off(), pytest.raises(ValueError, match="move: adapters are off; leave `with"):
        exe.move(exe.world, None, [0])
    exe.move(exe.world, None, [0])
    assert torch.equal(before["out.weight"], exe.full_state_dict()["out.weight"])


def test_a_handover_continues_after_adapters_were_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executable, "switchable_parameters", lambda model: ["out.weight"])
    exe = alone(small(), program=small_program())
    before = exe.full_state_dict()
    exe.rehome(hg.Home((2,)))
    with exe.adapter_off():
        exe.evaluate(batch(0))
    assert torch.equal(before["out.weight"], exe.full_state_dict()["out.weight"])
    exe.step(batch(0))
    assert exe.owners == hg.Home((2,))


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_executable_is_not_copied(attempt: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled or copied: call exe\.save"):
        attempt(hg.Executable.__new__(hg.Executable))


def test_ranks_are_probed_in_the_first_step_after_a_move() -> None:
    """A rank that leads from then on knows no earlier probes."""
    program, model = captured("llama")
    exe = hg.compile(model, "<tp1,pp1>", adamw, device="cpu", program=program, check="off")
    exe.watched = True
    probed = []
    for _ in range(2):
        probed += [exe.step(sequences([9, 14])).ranks[0].probe > 0 for _ in range(2)]
        exe.move(exe.world, hg.Home(), [0])
    exe.close()
    assert probed == [True, False] * 2
