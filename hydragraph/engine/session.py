"""Part of an executable that depends on ranks and owners; it is recreated when ranks or owners change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hydragraph.checkpoint.background_save import Saver
from hydragraph.cluster.agreement import raise_together
from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cluster.launch import World
from hydragraph.cost.trace_file import TraceEvent
from hydragraph.engine.compiled_model import CompiledModel
from hydragraph.errors import Unsupported
from hydragraph.frontend.mini_batch import AssignedBatch, DivideBy, MiniBatch
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.layout import Layout, whole
from hydragraph.ir.program import Program
from hydragraph.ir.program_outline import Purpose
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.exchange import Transfer, pull_exchange
from hydragraph.runtime.executor import Executor, IterationOutcome
from hydragraph.runtime.home_state import HomeState, left_out, make_optimizer, settings_of
from hydragraph.runtime.instruction_trace import Timing
from hydragraph.runtime.prepared_programs import Preparer
from hydragraph.runtime.rounded_weights import rounded
from hydragraph.runtime.sequence_sums import ScoredSequences
from hydragraph.runtime.state_agreement import ProgressLog
from hydragraph.runtime.supported_optimizers import OptimizerFactory
from hydragraph.spec.home import Home
from hydragraph.spec.home_text import owners_text

_LOG = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, eq=False)
class Session:
    """One rank's communicators and share of the state.

    Attributes:
        optimized: parameters' names by id, or None if the ranks' optimizers have different parameters.
    """

    program: Program
    buffers: Mapping[str, Tensor]
    world: World
    groups: Groups
    saver: Saver
    owners: HomeLayouts
    home: HomeState
    optimizer: torch.optim.Optimizer | None
    preparer: Preparer
    executor: Executor
    log: ProgressLog
    max_grad_norm: float | None = None
    optimized: Mapping[int, str] | None = None

    @staticmethod
    def begin(
        model: CompiledModel,
        world: World,
        home: Home,
        optimizer: OptimizerFactory | None,
        alike: Mapping[str, str],
        fill: Callable[[Groups, HomeState], None] = lambda groups, state: None,
        log: ProgressLog | None = None,
        ending: Session | None = None,
    ) -> Session:
        """Connect a world's ranks and give each its share of the state; all ranks must call this.

        Args:
            alike: named texts that must be identical on all ranks.
            log: progress log of the state that `fill` provides, or None for new state.
            ending: earlier session of this world, whose communicators and unmoved state are reused.

        Raises:
            ValueError: inputs of ranks differ, or the home does not fit; raised on every rank.
            Unsupported: the optimizer cannot work on some rank's shards; raised on every rank.
        """
        world.watch.rest("")
        # First connect ranks and compare what must be equal, before messages depend on it.
        groups = ending.groups if ending else Groups(world, TIMEOUT)
        log = log or ProgressLog()
        program = model.program
        device = world.device
        for what, text in {**alike, "home": str(home)}.items():
            groups.same_everywhere(what, text)
        names = [bucket.name for bucket in program.buckets]
        home.check(world.ranks, names)
        if home.copies > 1:
            nodes = groups.gather(world.node)
            home = home.on([nodes.index(node) for node in nodes])
        # layouts: bucket name -> its intervals and their owners
        owners = HomeLayouts(home, world.ranks)
        layouts = owners.by_name(program.buckets)
        if ending:
            # Unchanged layouts stay the same objects: moves skip a bucket whose
            # layout `is` the earlier one.
            layouts = {name: _same(ending.home.layouts[name], layout) for name, layout in layouts.items()}
        state = HomeState.allocate(program, layouts, world.rank, device, ending.home if ending else None)
        fill(groups, state)
        trained_by, trained_names = _optimizer(optimizer, state, groups)
        if model.sums is not None and trained_by is not None:
            model.sums.check_optimizer(trained_by)
        preparer = Preparer(program, model.variants, model.buffers, layouts, world.rank, world.ranks, device=device)
        copies = rounded(state, program.dtype, trained_by)
        exact = model.sums is not None
        executor = Executor(program, state, groups, world.watch, device, rounded=copies, log=log, deterministic=exact)
        # A save in progress has its own communicators, and continues under the new session.
        saver = ending.saver if ending else Saver(world, TIMEOUT)
        _LOG.info("state: %s", owners_text(home, names, world.ranks))
        ready = (owners, state, trained_by, preparer, executor, log, model.max_grad_norm, trained_names)
        return Session(program, model.buffers, world, groups, saver, *ready)

    @property
    def settings(self) -> str:
        """Text of the next update's settings, which must be equal on all ranks."""
        return settings_of(self.optimizer, self.optimized)

    def compare(self, digest: int, stopping: int) -> RanksCompared:
        if self.world.ranks == 1:
            return RanksCompared(True, self.saver.failed, stopping)
        # The maximum of -digest is the negated minimum: for digests 5 and 7,
        # max 7 and min 5 differ.
        most = torch.tensor([digest, -digest, int(self.saver.failed), stopping], device=self.world.device)
        most = self.groups.reduce_to_host(Channel.COMMIT, most, ReduceOp.MAX)
        return RanksCompared(bool(most[0] == -most[1]), bool(most[2]), int(most[3]))

    def saying(self, digest: int, stopping: int, update: int = 0) -> tuple[int, ...]:
        """Return `compare`'s inputs as integers for the commit and `RanksCompared.of`.

        Args:
            digest: 62-bit digest of the next call, or -1 if unknown.
            update: digest of this update's settings, or -1 to refuse it.
        """
        # Commits send float64, exact below 2**53, so a 62-bit digest takes two numbers. An unknown
        # call, -1, has high = -1, which `RanksCompared.of` rejects.
        high, low = divmod(digest, 1 << 31)
        return high, low, int(self.saver.failed), stopping, update

    def execute(
        self,
        work: AssignedBatch,
        purpose: Purpose,
        batch: MiniBatch,
        divide_by: DivideBy,
        update: Callable[[float], None],
        spans: list[TraceEvent] | None,
        says: Callable[[], tuple[int, ...]],
    ) -> IterationOutcome:
        """Run an iteration; `says` returns `saying`'s result after the computation."""
        prepared = self.preparer.get(work.strategy, work.assignment.counts, purpose)
        # batches: micro-batch -> packed tensors, for this rank's pipelines
        # places: micro-batch -> its sequences' positions in the mini-batch, for scores
        batches: dict[int, Mapping[str, Tensor]] = {}
        places: dict[int, Sequence[int]] = {}
        for role in prepared.program.roles:
            batches.update(zip(role.micro_batches, work.batches[role.pipeline], strict=True))
            places.update(zip(role.micro_batches, work.assignment.micro_batches[role.pipeline], strict=True))
        values = {"score": 1, "score_entropy": 2}.get(purpose)
        scored = None if values is None else ScoredSequences(len(batch.sequences), values, places)
        timing = Timing(self.log.progress.updates + 1, spans, self.executor.streams.clock())
        divisor = batch.divisor(divide_by)
        return self.executor.run(prepared, batches, divisor, update, self.buffers, timing, says, scored)

    def gather(self, shards: Mapping[str, Tensor], names: frozenset[str] | None = None) -> dict[str, Tensor]:
        """Return full CPU tensors by name on rank 0 ({} elsewhere); all ranks must call this.

        Args:
            shards: this rank's weights or gradients, by bucket name.
        """
        buckets = self.gather_by_bucket(shards, names)
        return {name: tensor.cpu() for bucket in buckets for name, tensor in bucket.items()}

    def gather_by_bucket(
        self,
        shards: Mapping[str, Tensor],
        names: frozenset[str] | None = None,
        to: Sequence[int] = (0,),
        dtype: Callable[[Iterable[str]], torch.dtype] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield full tensors by name, per bucket; all ranks must exhaust the iterator.

        Args:
            shards, names: as for `gather`; buckets without parameters in `names` are skipped.
            to: ranks that receive the tensors on their devices; others get {}.
            dtype: function from parameter names to the dtype to send; default: the shards' dtype.
        """
        world = self.world
        for bucket in (b for b in self.program.buckets if b.name in shards):
            parameters = [p for p in bucket.parameters if names is None or p.name in names]
            if not parameters:
                continue
            layout, shard = self.home.layouts[bucket.name], shards[bucket.name]
            # Gather the bucket like a pull of weights to the ranks `to`.
            exchange = pull_exchange(layout, whole(bucket.size, *to), world.rank, world.ranks, world.device)
            chosen = shard.dtype if dtype is None else dtype(p.name for p in parameters)
            full = Transfer(exchange, self.groups, Buffers(world.device)).pull(shard, chosen)()
            tensors: dict[str, Tensor] = {}
            for parameter in parameters if world.rank in to else ():
                at = bucket.offsets()[parameter.name]
                natural = parameter.natural(full[at : at + parameter.size]).detach()
                # `full` may share memory with `shard`, which must not change.
                tensors[parameter.name] = natural.clone(memory_format=torch.contiguous_format)
            yield tensors

    def update(self, norm: float) -> None:
        """Clip gradients by the global norm, and update this rank's weights."""
        # Between `updating` and `updated`, state is neither old nor new: an interruption leaves it
        # `torn`, and this rank must load its state or get it from others.
        self.log.updating()
        if self.max_grad_norm is not None:
            self.home.clip_gradients(norm, self.max_grad_norm)
        assert self.optimizer is not None, "only a program compiled with an optimizer can update"
        with self.home.attached_gradients():
            self.optimizer.step()
        self.log.updated(norm)


@dataclass(frozen=True)
class RanksCompared:
    """Comparison of next calls; `stopping` is the largest stop request, or 0."""

    same: bool
    unsaved: bool
    stopping: int

    @staticmethod
    def of(said: Sequence[tuple[int, ...]]) -> RanksCompared:
        high, _, unsaved, stopping, _ = (max(numbers) for numbers in zip(*said, strict=True))
        same = high >= 0 and len({message[:2] for message in said}) == 1
        return RanksCompared(same, bool(unsaved), stopping)


def _same(old: Layout, new: Layout) -> Layout:
    columns = ((old.rank, new.rank), (old.lo, new.lo), (old.hi, new.hi), (old.copy, new.copy))
    return old if all(np.array_equal(before, after) for before, after in columns) else new


def _optimizer(
    factory: OptimizerFactory | None, state: HomeState, groups: Groups
) -> tuple[torch.optim.Optimizer | None, Mapping[int, str] | None]:
    """Create the optimizer and `Session.optimized`; if a rank fails or settings differ, all ranks raise an error."""
    optimizer: torch.optim.Optimizer | None = None
    refused: Exception | None = None
    try:
        optimizer = make_optimizer(factory, state) if factory else None
    except Exception as error:
        refused = error
    sent = refused
    if refused is not None and not isinstance(refused, Unsupported) and groups.world.ranks > 1:
        sentence = f"rank {groups.world.rank} cannot make the optimizer ({type(refused).__name__}: {refused})"
        sent = Unsupported(sentence, where="optimizer", remedy="correct the function passed as optimizer=")
        sent.__cause__ = refused
    raise_together(groups, sent, sent)
    # names: id of each parameter of this rank -> name; missing: left-out names, by rank
    names = {id(parameter): name for name, parameter in state.named()}
    # The user's function may leave out empty shards.
    missing = groups.gather(left_out(optimizer, names))
    optimized = names if all(left == missing[0] for left in missing) else None
    groups.same_everywhere("optimizer and its settings", settings_of(optimizer, optimized))
    return optimizer, optimized
