"""A run continues without lost ranks: its new leader, its reports, and the measurements of ranks that stay."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hydragraph.cluster.launch import apart
from hydragraph.cluster.rendezvous.store_registers import MemberDescription
from hydragraph.engine.recovery import Survived
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.record import from_record
from hydragraph.train import run_recovery, step_reporting
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches, open_tokens, prepare
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.run_recovery import (
    _known_rates,
    _write_down,
    changes_of,
    go_on,
    lead,
    paused,
    resumed,
    trace_anew,
)
from hydragraph.train.run_saving import forget_unsaved
from hydragraph.train.step_metrics import Metrics, read_metrics
from hydragraph.train.step_reporting import open_log
from hydragraph.train.straggler_file import write_slow
from hydragraph.train.straggler_setup import controller_of
from hydragraph.train.stragglers.run_events import STATE_LOST
from hydragraph.train.stragglers.straggler_state import LearnedSlowdown, SlowRank
from hydragraph.train.train_state import Run, TrainState
from tests.cost import priced
from tests.train.plain import Watched, settings


def config(folder: Path, **changes: object) -> TrainConfig:
    return from_record(TrainConfig, {**settings(folder), **changes})


def begun(given: TrainConfig, folder: Path) -> RunFolder:
    """Return the folder of a run that a lost leader began."""
    run = RunFolder(folder / "run")
    run.begin(given, "new")
    return run


def test_a_takeover_that_was_broken_off_is_tried_again(tmp_path: Path) -> None:
    """Another rank may be lost while this one takes the run's folder over from a lost leader."""
    folder = begun(config(tmp_path), tmp_path)
    nothing: Any = None
    run = Run(config(tmp_path), nothing, folder, nothing, (), {}, None, None, None)
    state = TrainState(Watched(), nothing, nothing, nothing, 3, 0, {})
    survived = Survived(2, 3, (0,), (), (), (), (), None, 0, 0.5, "rank 0 is lost")
    with ExitStack() as owned:
        assert lead(run, state, survived, owned, None).log is not None
        again = lead(run, state, survived, owned, None)  # what the first call returned is lost with the failure
        assert again.log is not None
        with pytest.raises(ValueError, match="is in use by another run"):
            folder.refuse_shared()
    folder.refuse_shared()


def test_a_return_to_a_checkpoint_that_was_broken_off_is_tried_again(tmp_path: Path) -> None:
    """Another rank is lost after this one has opened the log anew; the next meeting finds that no state is lost."""
    folder = begun(config(tmp_path), tmp_path)
    nothing: Any = None
    with ExitStack() as owned:
        log = owned.enter_context(open_log(folder, 0, Watched()))
        run = Run(config(tmp_path), nothing, folder, nothing, (), {}, Watched(), log, None)
        state = TrainState(Watched(), nothing, nothing, nothing, 3, 0, {}, owns=True)
        survived = Survived(2, 0, (1,), (), (), (), (), 0, 0, 0.5, "rank 1 is lost")
        lead(run, state, survived, owned, None)
        again = lead(run, state, replace(survived, restored=None), owned, None).log
        assert again is not None
        again.write(Metrics(1, 2.0, 1.0, 1e-3, 100, 1000.0, 0.1, "<tp1,pp1>", 4, (1,)))
    assert [metrics.step for metrics in read_metrics(folder.metrics)] == [1]


class Began:
    """A callback that must start before it gets a step."""

    seen: list[str] = []  # noqa: RUF012 - of all instances

    def on_start(self, config: TrainConfig) -> None:
        self.seen.append(f"start {config.steps}")

    def on_end(self) -> None:
        self.seen.append("end")


def test_callbacks_of_a_rank_that_comes_to_lead_begin_once_and_end_once(tmp_path: Path) -> None:
    Began.seen.clear()
    nothing: Any = None
    given = config(tmp_path, callbacks=[f"{__name__}:Began"])
    run = Run(given, nothing, begun(given, tmp_path), nothing, (), {}, None, None, None)
    state = TrainState(Watched(), nothing, nothing, nothing, 3, 0, {})
    survived = Survived(2, 3, (0,), (), (), (), (), None, 0, 0.5, "rank 0 is lost")
    with ExitStack() as owned:
        first = lead(run, state, survived, owned, None)
        again = lead(run, state, survived, owned, None)  # the first was broken off
        assert again.callbacks is first.callbacks
        assert Began.seen == [f"start {given.steps}"]
    assert Began.seen == [f"start {given.steps}", "end"]


@pytest.mark.parametrize("done", [3, -1])
def test_after_a_loss_the_peak_is_that_of_the_ranks_that_stay_and_settings_those_of_the_config(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all ranks are lost, those that join know the settings too."""
    given = config(tmp_path)
    world = apart("cpu")
    nothing: Any = None
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    executor: Any = SimpleNamespace(world=world, optimizer=optimizer, spans=None)
    run = Run(given, world, begun(given, tmp_path), executor, (), {}, peak_flops_per_s=2e12)
    batches = mini_batches(given, open_tokens(given, prepare(given)))
    state = TrainState(Watched(), batches, lambda: batches, nothing, done, 0, {3: dict(batches.state_dict())})
    survived = Survived(2, 3, (1,), (), (), (), (), 3, 0, 0.5, "rank 1 is lost")
    own = ({"weight_decay": 0.3},)
    joined = mock.Mock(return_value=replace(run, pieces=nothing, evaluate_at=frozenset([5]), settings=own))
    run = replace(run, joined=joined)

    def meet_again(*given: Any) -> Survived:
        joined.assert_not_called()  # the folder is complete only after the ranks meet
        assert given[2].pieces() is nothing
        joined.assert_called()
        optimizer.param_groups[0]["weight_decay"] = 0.0  # as in the checkpoint
        return survived

    monkeypatch.setattr(run_recovery, "meet_again", meet_again)
    monkeypatch.setattr(run_recovery, "follows", lambda *_: False)
    monkeypatch.setattr(run_recovery, "ahead_of", lambda *_: nothing)
    monkeypatch.setattr(step_reporting, "peak_flops_per_s", lambda *_: 1e12)
    with ExitStack() as owned:
        continued, _ = go_on(run, state, None, owned)
    assert continued.peak_flops_per_s == 1e12
    assert continued.evaluate_at == {5}
    assert continued.joined is None
    assert optimizer.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(("others", "now"), [(True, []), (False, None)])
def test_a_rank_that_joins_a_traced_run_traces_the_same_steps_as_the_others(
    tmp_path: Path, others: bool, now: object
) -> None:
    """The trace begins anew, because its earlier steps had other ranks."""
    nothing: Any = None
    world: Any = SimpleNamespace(gather=lambda traces: [traces, others])
    executor: Any = SimpleNamespace(spans=None)
    run = Run(config(tmp_path), world, nothing, executor, (), {}, traced=[nothing])
    trace_anew(run)
    assert executor.spans == now
    assert len(run.traced) == (0 if others else 1)


def test_a_checkpoint_that_was_lost_with_a_rank_is_no_more_expected(tmp_path: Path) -> None:
    """Otherwise callbacks would get a folder that does not exist, after the next save."""
    nothing: Any = None
    folder = RunFolder(tmp_path / "run")
    run = Run(config(tmp_path), nothing, folder, nothing, (), {}, None, None, None)
    for step in (2, 4):
        folder.place(step).mkdir(parents=True)
        run.saving.append((step, folder.place(step)))
    (folder.place(2) / "complete.json").write_text("{}")
    forget_unsaved(run)
    assert run.saving == [(2, folder.place(2))], "it is complete: callbacks must still get it"


def test_who_was_lost_is_told_though_the_ranks_met_twice() -> None:
    first = Survived(2, 3, (0,), (), (), (1, 2), (), None, 0, 0.5, "rank 0 is lost")  # pyrefly: ignore[bad-argument-type]
    second = Survived(3, 3, (1,), (), (1,), (1, 2), (), None, 0, 0.25, "rank 1 is lost")  # pyrefly: ignore[bad-argument-type]
    told = [(first, 3), (second, 2)]
    assert [(e.event, e.ranks) for e in changes_of(told)] == [("fault", (0,)), ("fault", (1,)), ("join", (1,))]
    assert [paused(told, rank) for rank in (0, 1)] == [0.75, 0.5], "who came in the second meeting only waited"
    on = resumed(told, 2, None, 10**6, 0.75, {})
    assert (on.seconds, on.moved_bytes, on.ranks) == (0.75, 10**6, (0, 1))
    assert STATE_LOST not in on.why, "`hydragraph chaos` would count it as a loss of state"
    back = resumed([(replace(second, restored=1), 2)], 2, 3, 0, 0.0, {})
    assert back.lost_steps == 2
    assert "all ranks returned to the checkpoint after step 1, 2 steps earlier" in back.why


def test_ranks_that_stay_are_known_by_their_new_numbers(tmp_path: Path) -> None:
    given = config(tmp_path, elastic={"monitor": True})
    executor: Any = SimpleNamespace(
        profile=priced.costs(2, priced.mixed()), owners=Home(), may_stream=True, static=None
    )
    world: Any = SimpleNamespace(ranks=4)
    watching = controller_of(given, world, executor)
    watching.monitor._device._held = {1: 2.57, 3: 5.42}
    remaining = priced.costs(2, priced.mixed()).of_ranks([0, 2, 3], Home())
    left: Any = SimpleNamespace(profile=remaining, owners=Home(), may_stream=True, static=None)
    nothing: Any = None
    run = Run(given, SimpleNamespace(ranks=3), begun(given, tmp_path), left, (), {}, None, None, watching)  # pyrefly: ignore[bad-argument-type]
    run = replace(run, watched=(0, 1, 5, 7))
    state = TrainState(Watched(), nothing, nothing, nothing, 3, 0, {})
    peers = tuple(MemberDescription(member, seat, 0, "") for member, seat in ((7, 3), (0, 0), (9, 1)))
    survived = Survived(2, 3, (), (), (), peers, (), None, 0, 0.5, "")
    with ExitStack() as owned:
        now = lead(run, state, survived, owned, watching)
        assert now.controller is not None
        assert now.controller.monitor.health.rates == {0: 5.42}, "member 7 is rank 0 now, member 1 is lost"
        assert now.watched == (7, 0, 9)
    assert watching.monitor.health.rates == {1: 2.57, 3: 5.42}, "the ranks may have to meet once more"


def test_who_leads_after_a_lost_one_knows_what_that_one_knew(tmp_path: Path) -> None:
    given = config(tmp_path, elastic={"replan": True}, plan={"choose": True, "profile": "measured.json"})
    folder = RunFolder(tmp_path / "run")
    folder.begin(given, "new")
    slow = {
        5: SlowRank(device=2.57),
        7: SlowRank(device=5.42, core=1.5, learned=LearnedSlowdown(8.13, 16.0)),
        9: SlowRank(core=2.0),
    }
    write_slow(folder, slow)
    left: Any = SimpleNamespace(
        profile=priced.costs(2, priced.mixed()).of_ranks([0, 2, 3], Home()),
        owners=Home(),
        program=SimpleNamespace(buckets=()),
        strategies=(),
        request=None,
        planning=SimpleNamespace(lengths=()),
        may_stream=True,
        static=None,
    )
    nothing: Any = None
    world: Any = SimpleNamespace(ranks=3, rank=0)
    run = Run(given, world, folder, left, (), {}, None, None, None)
    state = TrainState(Watched(), nothing, nothing, nothing, 3, 0, {})
    state.began = folder.began
    assert _known_rates(run, state) == {5: 2.57, 7: 16.0, 9: 2.0}, "others were seen to wait for member 7"
    peers = tuple(MemberDescription(member, seat, 0, "") for member, seat in ((7, 3), (11, 0), (9, 1)))
    survived = Survived(2, 3, (0,), (), (1,), peers, (), None, 0, 0.5, "rank 0 is lost")
    with ExitStack() as owned:
        now = lead(run, state, survived, owned, None)
        assert now.controller is not None
        assert now.controller.slow == {0: slow[7], 2: slow[9]}, "members 7 and 9 are ranks 0 and 2 now"
        assert now.controller.health == Health({0: 16.0, 2: 2.0})
    state.began = folder.began - 1.0
    assert _known_rates(run, state) == {}, "another run's"


def test_a_step_that_a_lost_leader_did_not_write_down_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was of the ranks there were, which had other numbers."""
    nothing: Any = None
    world: Any = SimpleNamespace(gather=lambda mine: [mine])
    log: Any = SimpleNamespace(history=[])
    knowing: Any = object()
    run = Run(config(tmp_path), world, RunFolder(tmp_path / "run"), nothing, (), {}, None, log, knowing)
    state = TrainState(Watched(), nothing, nothing, nothing, 3, 0, {})
    report: Any = object()
    state.last = (3, report)
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run_recovery, "log_step", lambda *given: written.append(given))
    _write_down(run, state)
    ((by, step, what),) = written
    assert (step, what) == (3, report)
    assert by.controller is None
    assert by.log is log
