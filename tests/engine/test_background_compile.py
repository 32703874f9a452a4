"""Upcoming strategies are compiled during training: on real ranks, which then need not compile, and with failures."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hydragraph as hg
from hydragraph.cluster.once_per_node import OfferedFile
from hydragraph.engine.background_compile import BackgroundCompile, StrategyPreparation, made
from hydragraph.engine.candidate_strategies import Planning, request_of
from hydragraph.errors import Unsupported
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.planner.policy import Policy
from hydragraph.spec.strategy import Strategy
from tests.models import sequences
from tests.own_models import small
from tests.ready import Ready
from tests.thorough import first, thorough

LAYERS = 1
RUNNING = hg.Strategy.parse("2*<tp1,pp1>", layers=LAYERS)
ONE = hg.Strategy.parse("<tp1,pp1>", layers=LAYERS)
OTHER = hg.Strategy.parse("<tp2,pp1>", layers=LAYERS)
STEPS = 600
AFTER = 3  # steps of the new strategy


def give_way(exe: hg.Executable) -> None:
    """Wait a second, or until the process that compiles for this rank has ended: it gives way to ranks."""
    making, end = exe._chooser._making, time.monotonic() + 1.0
    while making is not None and not making.settled and time.monotonic() < end:
        time.sleep(0.01)


def trained(prepared: Ready, refused: bool) -> list[str]:
    """Train until ranks have switched, perhaps after one refused switch; they must not compile upcoming variants."""
    exe = prepared.executable([RUNNING, ONE], lambda named: torch.optim.SGD(named, lr=1e-2), policy=Policy(workers=0))
    names: list[str] = []

    def step() -> str:
        names.append(exe.step(sequences([20, 13, 7], seed=len(names) % 5)).strategy)
        give_way(exe)
        assert len(names) < STEPS
        return names[-1]

    def ask() -> None:
        if exe.rank == 0:
            exe.choose_from([OTHER], request_of([OTHER], Planning(), exe.ranks), ready_first=True)
            assert exe.changing

    def together(value: object) -> Any:
        return exe.world.gather(value)[0]

    step()
    Variants._made = refuse  # pyrefly: ignore[bad-assignment, method-assign]
    take = StrategyPreparation.take
    if refused:
        StrategyPreparation.take = lambda *of: take(*of) or "it computes something else"  # pyrefly: ignore[bad-argument-type, bad-assignment, method-assign]
        ask()
        while together(exe.rank == 0 and exe.changing):
            step()
        assert len(names) > 3, "steps continue while it is compiled"
        assert exe.rank or exe.change_refused == "it computes something else"
        assert names.count(str(OTHER)) == 0
        StrategyPreparation.take = take  # pyrefly: ignore[method-assign]
    ask()
    while step() != str(OTHER):
        pass
    assert len(names) > 3, "steps continue while it is compiled"
    assert [step() for _ in range(AFTER)] == [str(OTHER)] * AFTER
    assert exe.rank or not (exe.changing or exe.change_refused)
    exe.close()
    return names


def refuse(*_: object) -> Any:
    raise AssertionError("a rank compiles while it trains")


@pytest.mark.parametrize("refused", first([False], [False, True]))
def test_ranks_switch_when_all_is_ready_and_to_nothing_that_cannot_be_run(refused: bool) -> None:
    prepared = Ready.of(small(LAYERS), [str(RUNNING), str(ONE)])
    one, other = hg.launch(trained, 2, prepared, refused)
    assert one == other


# One process.


class Refusing:
    """A check that finds something wrong."""

    passed: dict[str, str] = {}  # noqa: RUF012

    def check(self, _: Strategy) -> None:
        raise Unsupported("it computes something else", where="<tp2,pp1>", remedy="report it")


@functools.cache
def program() -> Program:
    return hg.capture(small(LAYERS), check="off")


def variants() -> Variants:
    return Variants(program())


def test_what_a_check_refuses_is_not_handed_on() -> None:
    check: Any = Refusing()
    found = made(variants(), check, [RUNNING])
    assert found.variants is None
    assert "computes something else" in found.refused


@thorough
def test_only_what_was_never_compiled_is_made_and_by_one_rank_of_a_machine() -> None:
    known = variants()
    known.compile([RUNNING])
    assert StrategyPreparation(known, None, makes=True).begin([RUNNING]) is None
    assert StrategyPreparation(known, None, makes=False).begin([OTHER]) is None


def test_a_process_that_dies_offers_nothing_and_is_waited_for_no_longer() -> None:
    making = BackgroundCompile(variants(), None, [OTHER])
    while making._process is None:
        time.sleep(0.01)
    making._process.kill()
    while not making.settled:
        time.sleep(0.01)
    assert making.offer is None
    folder = making._folder.name
    making.close()
    assert not Path(folder).exists()


@thorough
def test_a_process_whose_rank_is_gone_ends() -> None:
    making = BackgroundCompile(variants(), None, [OTHER])
    while making._process is None:
        time.sleep(0.01)
    assert making._process.stdin is not None
    making._process.stdin.close()  # as when this process ended
    assert making._process.wait(60) == 1
    making.close()


def test_what_cannot_be_read_is_made_by_ranks_themselves(tmp_path: Path) -> None:
    (tmp_path / "made").write_bytes(b"something else")
    tmp_path.chmod(0o700)
    assert StrategyPreparation(variants(), None, makes=False).take(OfferedFile(str(tmp_path / "made"), "0" * 64)) == ""
