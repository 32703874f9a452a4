"""The executor's use of a device's queues, on one that records: every rank alone, with random strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar, cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.frontend.packed_batch import pack
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.instruction import Stream
from hydragraph.passes import offload
from hydragraph.passes.variants import Variants
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.executor import Executor
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.instruction_trace import Timing
from hydragraph.runtime.prepared_programs import Preparer
from hydragraph.spec import workload
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from tests.fuzz import RANKS, ModelCase, draw_case
from tests.models import llama, sequences
from tests.runtime.recorder import RaceError, Recorder, RecordingGroups, RecordingStreams, Times, Unwatched
from tests.thorough import first

LAYERS = 2  # of the captured model
KIND = ModelCase("llama", LAYERS, 4, 2, False, 102, 101, torch.float32)
MODEL = llama(LAYERS)
BUFFERS = dict(MODEL.named_buffers())


@functools.cache
def variants_of(dtype: torch.dtype) -> Variants:
    return Variants(hg.capture(MODEL, dtype=dtype))


def run(
    strategy: Strategy, rank: int, seed: int, streams: type[RecordingStreams] = RecordingStreams, steps: int = 2
) -> int:
    """Run steps of one rank that hears only zeros; return how many accesses were ordered."""
    variants = variants_of(torch.bfloat16 if seed % 2 else torch.float32)
    program = variants.program
    home = HomeState.allocate(
        program, HomeLayouts(Home(copies=1 + seed // 2 % 2), RANKS).by_name(program.buckets), rank
    )
    for weights in home.weights.values():
        weights.zero_()
    preparer = Preparer(program, variants, BUFFERS, home.layouts, rank, RANKS)
    recorder = Recorder()
    groups, watch = cast(Any, RecordingGroups(recorder, rank, RANKS)), cast(Any, Unwatched())
    executor = Executor(program, home, groups, watch, torch.device("cpu"), streams(recorder, seed))
    counts = tuple((seed + i) % 4 for i in range(len(strategy.pipelines)))
    prepared = preparer.get(strategy, counts if sum(counts) else (1, *counts[1:]), "train")
    multiple = max(s.tp for p in strategy.pipelines for s in p.stages)
    batches = [pack([sequence(n, seed)], multiple) for n in (9, 14, 5, 11)]

    def update(norm: float) -> None:
        for name, weights in home.weights.items():
            weights.sub_(home.gradients[name], alpha=0.1)

    with recorder:
        for _ in range(steps):
            executor.run(
                prepared, dict(enumerate(batches)), 30, update, BUFFERS, Timing(clock=executor.streams.clock())
            )
        recorder.operate("the end", [], [])
    return recorder.accesses


def sequence(tokens: int, seed: int) -> workload.Sequence:
    """Return a sequence whose labels are itself."""
    ids = sequences([tokens], seed=seed)[0]
    return workload.Sequence(ids, ids)


@settings(max_examples=settings().max_examples // 20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, RANKS - 1))
def test_nothing_is_read_too_early_or_overwritten_too_soon(seed: int, rank: int) -> None:
    strategy = Strategy.parse(draw_case(seed, KIND).strategy, LAYERS)
    assert run(strategy, rank, seed) > 0


class SlowDevice(RecordingStreams):
    """A device that never catches up unless the host waits for it."""

    waits = 0

    def passed(self, mark: Times) -> bool:
        return False

    def reach(self, mark: Times) -> None:
        type(self).waits += 1


def test_the_host_waits_before_it_receives_far_ahead_of_the_device() -> None:
    assert run(Strategy.parse("<tp1,pp2>", LAYERS), 1, 3, SlowDevice, steps=1) > 0
    assert SlowDevice.waits == 1, "two of three received values may still be read"


OFFLOADED = ["<tp1,pp1>o", "<tp2,pp1>swo", "<tp1,pp2>ro gpipe", "<[0]x1wo,[1,2]x1sr> + <[3]x2r0.5o>"]


@pytest.mark.parametrize("text", first([OFFLOADED[0], OFFLOADED[2]], OFFLOADED))
def test_offloaded_values_are_copied_and_reused_in_order(text: str) -> None:
    strategy = Strategy.parse(text, LAYERS)
    with mock.patch.object(offload, "SMALL_BYTES", 0):
        for rank in strategy.devices[:2]:
            assert run(strategy, rank, seed=1) > 0


@pytest.mark.parametrize("waiting", [Stream.COMPUTE, Stream.OFFLOAD])
def test_a_wait_that_is_left_out_of_an_offload_is_noticed(waiting: Stream) -> None:
    class ForgetsCopies(RecordingStreams):
        def wait(self, mark: Times) -> None:
            """Forget copies on the computing queue, or computations on that of copies."""
            if self.recorder.current == waiting.value:
                forgotten = Stream.OFFLOAD if waiting is Stream.COMPUTE else Stream.COMPUTE
                mark = {queue: at for queue, at in mark.items() if queue != forgotten.value}
            super().wait(mark)

    with mock.patch.object(offload, "SMALL_BYTES", 0), pytest.raises(RaceError, match=r"offload|compute"):
        run(Strategy.parse("<tp1,pp1>o", LAYERS), 0, 0, ForgetsCopies)


class NeverWaits(RecordingStreams):
    def wait(self, mark: object) -> None:
        """Forget it."""


class NeverHolds(RecordingStreams):
    def hold(self, tensor: object) -> None:
        """Forget it."""


class OneMarkTooEarly(RecordingStreams):
    """Marks where a queue was when the last one was made."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        super().__init__(recorder, seed)
        self._last: dict[str, dict[str, int]] = {}

    def mark(self) -> dict[str, int]:
        before = self._last.get(self.recorder.current, {})
        self._last[self.recorder.current] = super().mark()
        return before


@pytest.mark.parametrize("broken", [NeverWaits, NeverHolds, OneMarkTooEarly])
def test_the_recorder_notices_what_is_left_out(broken: type[RecordingStreams]) -> None:
    for seed, rank in product(range(6), range(RANKS)):
        strategy = Strategy.parse(draw_case(seed, KIND).strategy, LAYERS)
        try:
            run(strategy, rank, seed, broken)
        except RaceError:
            return
    pytest.fail(f"{broken.__name__} was not noticed")


def test_a_buffer_is_reused_behind_its_mark_only() -> None:
    recorder = Recorder()
    streams = RecordingStreams(recorder, seed=0)
    buffers = Buffers(torch.device("cpu"), streams)
    with recorder:
        for _ in range(12):
            with streams.on(Stream.PULL):
                taken = buffers.take(8)
                taken.zero_()
                made = streams.mark()
            streams.wait(made)
            streams.hold(taken)
            taken.sum()
            buffers.give(taken)
    assert recorder.accesses >= 24


class WaitsOfComputation(RecordingStreams):
    """Notes when the compute queue waits outside the instructions that end a step, and what for."""

    reason = ""
    unasked: ClassVar[list[str]] = []

    def wait(self, mark: Times) -> None:
        if self.recorder.current == Stream.COMPUTE.value and not self.reason:
            self.unasked.append(str(mark))
        super().wait(mark)


def asked_for(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, streams_of: Callable[[Any], Any]) -> None:
    """Let waits inside a method have a reason."""
    called = getattr(owner, method)

    def wrapped(self: Any, *arguments: Any) -> Any:
        streams = streams_of(self)
        before, streams.reason = streams.reason, method
        try:
            return called(self, *arguments)
        finally:
            streams.reason = before

    monkeypatch.setattr(owner, method, wrapped)


def test_computation_never_waits_for_what_it_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # The values that an instruction reads, a buffer that it takes, and the commit, which needs all streams.
    asked_for(monkeypatch, Executor, "_arrive", lambda executor: executor.streams)
    asked_for(monkeypatch, Executor, "_commit", lambda executor: executor.streams)
    asked_for(monkeypatch, Buffers, "take", lambda buffers: buffers._streams)
    asked_for(monkeypatch, RecordingGroups, "all_reduce", lambda groups: WaitsOfComputation)
    WaitsOfComputation.unasked.clear()
    # Each rank serves the other's layer; or gradients are pushed while others are computed.
    for text in ("<[0]x1,[1]x1>", "<[0]x2> + <[1]x2>"):
        for seed in (0, 1):
            run(Strategy.parse(text, LAYERS), 0, seed, WaitsOfComputation)
    assert WaitsOfComputation.unasked == []
