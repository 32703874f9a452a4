"""The executor, the head's loss, clipping and AdamW on fake tensors of a GPU, with streams that record their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.cluster.launch import World
from hydragraph.engine.session import Session
from hydragraph.frontend.packed_batch import pack
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Program
from hydragraph.passes import offload
from hydragraph.passes.variants import Variants
from hydragraph.runtime.executor import Executor
from hydragraph.runtime.home_state import HomeState, make_optimizer
from hydragraph.runtime.instruction_trace import Timing
from hydragraph.runtime.prepared_programs import Preparer
from hydragraph.runtime.rounded_weights import rounded
from hydragraph.runtime.state_agreement import ProgressLog
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from tests.fake_gpu import GPU, fake_gpu
from tests.fuzz import RANKS
from tests.models import MODELS
from tests.runtime.recorder import Recorder, RecordingGroups, RecordingStreams, Unwatched
from tests.runtime.test_streams import sequence, variants_of
from tests.thorough import first, thorough


class Groups(RecordingGroups):
    """Recording communicators of a rank with a GPU."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        super().__init__(recorder, rank, RANKS)
        self.world = World(rank, RANKS, rank, GPU, "nccl")


@dataclass(frozen=True)
class Case:
    """Training of one rank."""

    model: str
    dtype: torch.dtype
    strategy: str
    rank: int
    copies: int = 1
    deterministic: bool = False


def train(case: Case, steps: int = 2) -> tuple[list[int], int]:
    """Run steps of one rank; return the sizes of what was copied to the host, and the number of updates."""
    model = MODELS[case.model]()
    program = captured(case.model, case.dtype)
    strategy = Strategy.parse(case.strategy, program.layers)
    variants = Variants(program, device=GPU, fused_head=not case.deterministic)
    variants.compile([strategy])  # outside of the fake mode, as a process without a GPU does
    batches = [pack([sequence(n, 0)], 2) for n in (9, 14, 5, 11)]
    recorder = Recorder()
    with fake_gpu() as seen:
        buffers = {n: torch.empty(b.shape, dtype=b.dtype, device=GPU) for n, b in model.named_buffers()}
        session = begin(case, program, variants, buffers, recorder)
        prepared = session.preparer.get(strategy, (2,) * len(strategy.pipelines), "train")
        numbered = {number: placed(batch) for number, batch in enumerate(batches)}
        with recorder:
            for _ in range(steps):
                timing = Timing(clock=session.executor.streams.clock())
                session.executor.run(prepared, numbered, 30, session.update, buffers, timing)
            recorder.operate("the end", [], [])
        assert session.optimizer is not None
        for state in session.optimizer.state.values():
            assert {state["exp_avg"].device, state["exp_avg_sq"].device} == {GPU}
    assert recorder.accesses > 0
    return seen.to_host, session.log.progress.updates


def captured(model: str, dtype: torch.dtype) -> Program:
    if model == "llama":
        return variants_of(dtype).program
    return hg.capture(MODELS[model](), dtype=dtype, check="off")


def begin(
    case: Case, program: Program, variants: Variants, buffers: Mapping[str, Tensor], recorder: Recorder
) -> Session:
    """Return the session of one rank that hears only zeros."""
    rank, log, owners = case.rank, ProgressLog(), HomeLayouts(Home(copies=case.copies), RANKS)
    home = HomeState.allocate(program, owners.by_name(program.buckets), rank, GPU)
    for weights in home.weights.values():
        weights.zero_()
    optimizer = make_optimizer(lambda named: hg.AdamW(named, lr=1e-3), home)
    groups: Any = Groups(recorder, rank)
    copies = rounded(home, program.dtype, optimizer)
    streams = RecordingStreams(recorder, seed=0)
    watch = cast(Any, Unwatched())
    executor = Executor(program, home, groups, watch, GPU, streams, copies, log, case.deterministic)
    preparer = Preparer(program, variants, buffers, home.layouts, rank, RANKS, device=GPU)
    saver = cast(Any, None)
    return Session(program, buffers, groups.world, groups, saver, owners, home, optimizer, preparer, executor, log, 0.5)


def placed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a packed batch on the GPU; the longest sequence stays a number of the host."""
    return {n: v if n == "max_length" else torch.empty_like(v, device=GPU) for n, v in batch.items()}


BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    Case("llama", BF16, "<[0]x1,[1,2]x1s>", 1),
    Case("llama", BF16, "<[0]x2> + <[1]x2>", 1, copies=2),
    Case("llama", FP32, "<[0]x1,[1]x1>", 0, deterministic=True),
    Case("llama", FP32, "<[0,1]x2s>", 3),
    Case("qwen3", BF16, "<[0]x1,[1]x1>", 0),
    Case("mixtral", BF16, "<[0]x1,[1]x1>", 1),
    Case("gpt2", BF16, "<[0,1]x1,[2]x1> + <[3]x2>", 2),
]


@thorough
@pytest.mark.parametrize("case", first(CASES[:1], CASES), ids=str)
def test_a_step_stays_on_the_gpu(case: Case) -> None:
    to_host, updates = train(case)
    assert updates == 2
    assert len(to_host) == 2 * (1 + case.deterministic), "only what ranks agree on at the commit goes to the host"


def test_offloaded_activations_are_copied_to_the_host_and_back() -> None:
    with mock.patch.object(offload, "SMALL_BYTES", 0):
        to_host, updates = train(Case("llama", BF16, "<[0]x2o>", 0), steps=1)
    assert updates == 1
    assert len(to_host) > 20, "at least ten values of two micro-batches"
