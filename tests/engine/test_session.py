"""A world under an executable, and one that takes its place."""

from __future__ import annotations

import gc
import re
import time
import weakref
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.ir.instruction import Instruction, Op
from tests.models import sequences
from tests.ready import Ready, small_llama
from tests.thorough import thorough

LAYERS = 2
STRATEGY = "<[0,1]x1,[2]x1>"


def batch(seed: int) -> list[Tensor]:
    return sequences([9, 14, 5, 11], seed=seed)


def trained(ready: Ready, folder: Path) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    """Train two steps, the second once in the old world and once in a new one, where state lives elsewhere."""
    exe = ready.executable(hg.Strategy.parse(STRATEGY, layers=LAYERS), lambda named: torch.optim.AdamW(named, lr=1e-2))
    exe.step(batch(0))
    exe.save(folder / "between")
    stayed = exe.step(batch(1)).loss
    as_it_was = exe.full_state_dict()
    compiled = len(exe._compiled.variants)
    exe.move(exe.world, hg.Home((3, 1, 0)), range(exe.ranks))
    exe.load(folder / "between")
    moved = exe.step(batch(1)).loss
    assert len(exe._compiled.variants) == compiled  # what is compiled does not depend on the world
    assert (exe.home.weights["layer.0"].numel() > 0) is (exe.rank < 2)
    return stayed, moved, as_it_was, exe.full_state_dict()


@thorough
def test_a_world_changes_under_an_executable(tmp_path: Path) -> None:
    stayed, moved, as_it_was, state = hg.launch(trained, 3, small_llama(), tmp_path)[0]
    assert moved == stayed
    for name, tensor in as_it_was.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-7)


def test_after_an_interrupted_update_only_a_checkpoint_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = small_llama().executable("<[0]x2>", lambda named: torch.optim.SGD(named, lr=0.1))
    exe.step(batch(0))
    exe.save(tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(import_module("torch.optim.sgd"), "sgd", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            exe.step(batch(1))
    for call in (lambda: exe.step(batch(1)), lambda: exe.evaluate(batch(1)), lambda: exe.save(tmp_path / "torn")):
        with pytest.raises(ValueError, match="an update was interrupted halfway; call load or move"):
            call()
    exe.load(tmp_path / "saved")
    assert exe.step(batch(1)).step == 2
    exe.close()


def test_state_that_has_moved_is_freed_without_garbage_collection() -> None:
    ready = small_llama()
    exe = ready.executable("<[0]x2>", lambda named: torch.optim.AdamW(named, lr=1e-2))
    exe.step(batch(0))
    freed = []
    gc.collect()
    gc.disable()
    try:
        for beside in (False, True):
            session = exe._session
            earlier = [weakref.ref(session), weakref.ref(session.executor), weakref.ref(session.preparer)]
            del session
            if beside:
                exe.rehome(hg.Home())
                exe.step(batch(1))
            else:
                exe.move(exe.world, hg.Home(), [0])
            freed.append([reference() is None for reference in earlier])
    finally:
        gc.enable()
    exe.close()
    assert freed == [[True] * 3] * 2


def slow_on_one(ready: Ready) -> hg.StepReport:
    exe = ready.executable(hg.Strategy.parse(STRATEGY, layers=LAYERS), lambda named: torch.optim.SGD(named, lr=1e-2))
    exe.step(batch(0))

    def sleep(instruction: Instruction) -> None:
        if instruction.op is Op.BACKWARD and exe.rank == 2:
            time.sleep(0.05)

    exe._session.executor.before = sleep
    return exe.step(batch(1))


@thorough
def test_every_rank_learns_at_the_commit_how_each_spent_its_time() -> None:
    first, *others = hg.launch(slow_on_one, 3, small_llama())
    assert [len(report.ranks) for report in (first, *others)] == [3, 3, 3]
    assert all(report.ranks == first.ranks for report in others)
    assert first.ranks[2].busy_s > 0.05 * 2  # at least a layer and the head, of one micro-batch
    assert first.ranks[0].exposed.p2p > 0.04  # it waits for the gradient that comes late
    assert first.exposed.p2p == sum(rank.exposed.p2p for rank in first.ranks) / 3


def differing(ready: Ready) -> list[str]:
    """Return the error for each difference between two ranks; in no case may one rank wait for the other."""
    rank = torch.distributed.get_rank()
    strategy = hg.Strategy.parse("<[0]x1,[1]x1>", layers=LAYERS)

    def by_size(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        if rank:
            raise KeyError("only here")
        return torch.optim.SGD(named, lr=0.1)

    def by_rank(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [[p for _, p in named[rank::2]], [p for _, p in named[1 - rank :: 2]]]
        return torch.optim.SGD([{"params": groups[0]}, {"params": groups[1], "lr": 0.01}], lr=0.1)

    said = []
    for factory, clip in (
        (lambda named: torch.optim.SGD(named, lr=0.1 * (1 + rank)), None),
        (lambda named: torch.optim.SGD(named, lr=0.1), 1.0 + rank),
        (None if rank else lambda named: torch.optim.SGD(named, lr=0.1), None),
        (by_size, None),
        (by_rank, None),
    ):
        try:
            ready.executable(strategy, factory, max_grad_norm=clip)
        except ValueError as error:
            said.append(str(error))
    for options in ({"dtype": torch.bfloat16}, {"window": -1}, {"home": "1,x"}, {"seed": "zero"}):
        try:
            ready.executable(strategy, None, **options if rank else {})
        except (ValueError, TypeError) as error:
            said.append(str(error))
    exe = ready.executable(strategy, lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.5))
    exe.step(batch(0))
    if rank == 0:  # as a scheduler does that one rank alone steps
        exe.optimizer.param_groups[0]["lr"] = 0.2
    for call in (exe.step, exe.evaluate if rank else exe.step):
        try:
            call(batch(1))
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_that_would_update_otherwise_are_told_on_all_ranks() -> None:
    for said in hg.launch(differing, 2, small_llama()):
        assert [text.removeprefix("ranks differ in ").split(":")[0] for text in said[:3]] == [
            "optimizer and its settings",
            "max_grad_norm",
            "optimizer and its settings",
        ]
        assert "'only here'" in said[3]
        assert re.search(r"ranks differ in optimizer and its settings: .*of \['\d+ parameters \(\w+\)', ", said.pop(4))
        starts = ("compile: 'program' determines", "compile: 'window' is -1", "home '1,x'", "compile: 'seed' is 'zero'")
        assert all(text.startswith(start) for text, start in zip(said[4:8], starts, strict=True)), said
        assert said[8].startswith("ranks differ in optimizer's settings, such as the learning rate: ")
        assert "'lr': 0.2" in said[8]
        assert said[9].startswith("ranks differ in call: 'train' on ranks [0]; 'evaluate' on ranks [1]")
        assert len(said) == 10
