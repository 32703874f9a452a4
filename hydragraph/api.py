"""The public functions: the only module that puts capture, passes, planner and runtime together."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from hydragraph.cost.simulate import Timeline, simulate
from hydragraph.cost.work import work_of
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.initialise import initial_buffers, initial_parameters, is_meta
from hydragraph.frontend.packed import Loss, own_fields
from hydragraph.ir.instruction import RankProgram
from hydragraph.ir.layout import whole
from hydragraph.ir.outline import Mode
from hydragraph.ir.program import Program
from hydragraph.ir.text import instruction_text
from hydragraph.passes.pipeline import rank_programs
from hydragraph.passes.uncut import refuse_uncut
from hydragraph.planner.longest_first import assign
from hydragraph.runtime import checkpoint, pretrained
from hydragraph.runtime.batch import pack, padding
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.exchange import pull_exchange, start_pull
from hydragraph.runtime.executor import Executor, Outcome
from hydragraph.runtime.fault import Watch
from hydragraph.runtime.groups import Groups, Role
from hydragraph.runtime.launch import join
from hydragraph.runtime.prepared import Preparer
from hydragraph.runtime.saving import Saver
from hydragraph.runtime.state import HomeState, OptimizerFactory, make_optimizer
from hydragraph.runtime.trace import Exposed, Span, Timing
from hydragraph.runtime.variants import Variants
from hydragraph.spec import workload
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.strategy import Pipeline, Strategy
from hydragraph.spec.workload import Assignment, sequence_of

Given = Tensor | dict[str, Tensor]

TIMEOUT = timedelta(minutes=30)  # of one communication; a failed rank is noticed long before


@dataclass(frozen=True)
class StepReport:
    """One step, equal on every rank but for `seconds`.

    Attributes:
        step: counted from 1.
        loss: mean over the target tokens of the global mini-batch.
        tokens: those target tokens.
        grad_norm: of all gradients, before clipping; 0 for an evaluation.
        strategy: in use.
        sequences, micro_batches: how many, and per pipeline.
        seconds: wall time on this rank.
        padding: tokens added to micro-batches, so that they divide for sequence parallelism.
        planning_s: seconds spent on choosing which pipeline computes what.
        exposed: seconds that ranks waited for communication, on average.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    strategy: str
    sequences: int
    micro_batches: tuple[int, ...]
    seconds: float
    padding: int
    planning_s: float
    exposed: Exposed


@dataclass(frozen=True, eq=False)
class _Work:
    """A mini-batch, checked, assigned and packed for this rank's pipeline."""

    strategy: Strategy
    assignment: Assignment
    batches: tuple[tuple[dict[str, Tensor], ...], ...]
    tokens: int
    sequences: tuple[workload.Sequence, ...]
    padding: int
    planning_s: float


class Executable:
    """A model compiled for a strategy, ready to train; made by `compile`, on every rank alike.

    Attributes:
        program, strategy, optimizer, rank, ranks: what it was made of.
        spans: set it to a list and every following step adds the times of its instructions (`runtime.trace`).
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        strategy: Strategy,
        optimizer: OptimizerFactory | None,
        max_grad_norm: float | None,
        device: torch.device | str | None,
        blocks: str | None = None,
    ) -> None:
        self.program, self.strategy, self._max_grad_norm = program, strategy, max_grad_norm
        self.world = join(device)
        self._model_tensors, self._fields = tensor_names(model), own_fields(program)
        self._names = pretrained.Names.of(model, self._model_tensors)
        self._several = "cu_seqlens" in program.templates[program.blocks[-1].template].inputs
        check_strategy(program, strategy, self.world.ranks)
        refuse_uncut(program, strategy)
        self._watch = Watch(self.world.rank, self.world.ranks, self._describe)
        with self._watch.guarding():
            self.groups = Groups(self.world, TIMEOUT, watch=self._watch)
        self._watch.also_abort(self.groups.abort)
        self._saver = Saver(self.world, TIMEOUT)
        self._agree("program", program.fingerprint)
        self._buffers = {n: b.to(self.world.device) for n, b in initial_buffers(model).items()}
        self.home = HomeState.allocate(program, self.world.ranks, self.world.rank, self.world.device)
        seed = torch.initial_seed()
        self._start: Callable[[], Iterable[Mapping[str, Tensor]]] | None = None
        if is_meta(model):
            self._agree("random seed (torch.manual_seed)", str(seed))
            self._start = lambda: initial_parameters(model, seed, blocks)
        else:
            self._agree("weights", _weights_hash(model))
            self.home.fill(dict(model.named_parameters()))
        self.optimizer = make_optimizer(optimizer, self.home) if optimizer else None
        self._preparer = Preparer(
            program, Variants(program), self._buffers, self.home.layouts, self.world.rank, self.world.ranks
        )
        self._executor = Executor(program, self.home, self.groups, self._watch, self.world.device)
        self._steps, self._communications = 0, 0
        self.spans: list[Span] | None = None
        self._running: tuple[Strategy, tuple[int, ...], Mode] | None = None

    # What a training script calls.

    def step(self, sequences: Sequence[Given], strategy: Strategy | None = None) -> StepReport:
        """Train on one global mini-batch, the same on every rank.

        Args:
            sequences: 1-D int64 tensors, or dicts with input_ids, labels (-100 where a token does not count; causal
                models shift them) or shift_labels (which already stand where they are predicted), and [L, ...] for
                each field of your own that compile's example= named.
            strategy: for this step; default: the one given to `compile`. It costs no re-tracing of what is compiled
                already, and moves no optimizer state.

        Raises:
            Unsupported: no optimizer was given, or the strategy cannot cut the model.
            FloatingPointError: the loss or a gradient is not finite; nothing was updated.
            RankFailure: another rank failed; nothing was updated.
        """
        if self.optimizer is None:
            raise Unsupported("it was compiled without an optimizer", where="step", remedy="pass optimizer= to compile")
        report = self._iterate(sequences, strategy, "train", self._update)
        self._steps += 1
        return report

    def evaluate(self, sequences: Sequence[Given], strategy: Strategy | None = None) -> StepReport:
        """Return the loss of a mini-batch without changing anything."""
        return self._iterate(sequences, strategy, "evaluate", None)

    def gradients(self, sequences: Sequence[Given], strategy: Strategy | None = None) -> dict[str, Tensor]:
        """Return the full fp32 gradients by parameter name on rank 0 ({} elsewhere), updating nothing."""
        self._iterate(sequences, strategy, "train", None)
        return self._gather(self.home.gradients)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return every key of `model.state_dict()` (tied aliases, persistent buffers) as full CPU tensors on rank 0.

        Parameters are the fp32 master weights. Other ranks take part and get {}.
        """
        self._begin()
        found = self._gather(self.home.weights)
        if not found:
            return {}
        held = {**{n: b.detach().cpu() for n, b in self._buffers.items()}, **found}
        return {name: held[source] for name, source in self._model_tensors.items()}

    def save(self, path: str | Path, extra: dict[str, Any] | None = None, asynchronous: bool = False) -> None:
        """Write weights and optimizer state as a checkpoint that any strategy and any number of ranks can load.

        Args:
            path: a directory that all ranks see.
            extra: plain data of yours, which `load` returns.
            asynchronous: return as soon as this rank's shards are copied to CPU memory, and write beside training.
                The next `save`, `load`, `wait_saved`, `close` and the end of the process wait for it; an error is
                raised by the first of these or by the next step, on every rank.
        """
        self._begin()
        self.wait_saved()
        save = self._saver.start if asynchronous else checkpoint.save
        save(Path(path), self.home, self.optimizer, {"steps": self._steps, "user": extra or {}}, self.groups)

    def wait_saved(self) -> None:
        """Return once what an asynchronous `save` is writing is in its place; raise its error, on every rank."""
        self._saver.wait()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint that `save` wrote; return what was saved as `extra`."""
        self.wait_saved()
        extra = checkpoint.load(Path(path), self.home, self.optimizer, self.groups)
        self._start = None
        self._steps = int(extra["steps"])
        return dict(extra["user"])

    def load_pretrained(self, path: str | Path) -> None:
        """Read the weights of a Hugging Face directory of safetensors, every rank only its own; not the optimizer."""
        pretrained.load(Path(path), self.home, self._buffers, self._names, self.groups)
        self._start = None

    def close(self) -> None:
        """Wait for what is being saved, stop watching and drop the communicators; all ranks call it."""
        try:
            self._saver.close()
        finally:
            self._watch.close()
            self.groups.close()

    @property
    def rank(self) -> int:
        """This process."""
        return self.world.rank

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return self.world.ranks

    # How it is done.

    def _begin(self) -> None:
        """Give a model that was built on the meta device its initial weights, unless some were loaded."""
        start, self._start = self._start, None
        for tensors in start() if start is not None else ():
            self.home.fill(tensors)

    def _iterate(
        self, sequences: Sequence[Given], strategy: Strategy | None, mode: Mode, update: Callable[[float], None] | None
    ) -> StepReport:
        self._begin()
        began = time.perf_counter()
        self._communications += 1
        try:
            work, refused = self._work(sequences, strategy or self.strategy), None
        except ValueError as error:
            work, refused = None, error
        digest = _digest(repr(refused) if work is None else _work_text(work, mode, update is not None), work)
        with self._watch.step(self._communications):  # what all ranks refuse together must not count as a failure
            same, unsaved = self._compare(digest)
            outcome = self._execute(work, mode, update) if same and not unsaved and work is not None else None
        if unsaved:
            self.wait_saved()
            raise AssertionError("a save in the background fails on all ranks, so waiting for it raises")
        if refused is not None:
            raise refused
        if outcome is None or work is None:
            self._agree("mini-batch, strategy or call", f"{digest:016x}")
            raise AssertionError("digests differ, so the agreement fails")
        if not outcome.finite:
            raise FloatingPointError(
                f"loss {outcome.loss:.4g}, gradient norm {outcome.grad_norm:.4g}: not finite, so nothing was updated; "
                "lower the learning rate or clip gradients (max_grad_norm), and look at this mini-batch"
            )
        return StepReport(
            self._steps + (update is not None),
            outcome.loss,
            work.tokens,
            outcome.grad_norm,
            str(work.strategy),
            len(work.sequences),
            work.assignment.counts,
            time.perf_counter() - began,
            work.padding,
            work.planning_s,
            outcome.exposed,
        )

    def _work(self, sequences: Sequence[Given], strategy: Strategy) -> _Work:
        check_strategy(self.program, strategy, self.world.ranks)
        refuse_uncut(self.program, strategy)
        checked = [sequence_of(s, i, self.program.causal, self._fields) for i, s in enumerate(sequences)]
        tokens = sum(s.targets for s in checked)
        if not tokens:
            raise ValueError("the mini-batch has no target token: give at least one sequence of two tokens")
        lengths = [len(s) if s.targets else 0 for s in checked]  # what has no target counts for nothing
        began = time.perf_counter()
        assignment = assign(strategy, lengths)
        planned = time.perf_counter() - began
        place = strategy.place(self.world.rank)
        multiples = [token_multiple(pipeline) for pipeline in strategy.pipelines]
        blanks = sum(
            padding([lengths[i] for i in m], multiples[p], self._several)
            for p, pipeline in enumerate(assignment.micro_batches)
            for m in pipeline
        )
        batches = tuple(
            tuple(pack([checked[i] for i in m], multiples[p], self.world.device, self._several) for m in pipeline)
            if place is not None and place.pipeline == p
            else ()
            for p, pipeline in enumerate(assignment.micro_batches)
        )
        return _Work(strategy, assignment, batches, tokens, tuple(checked), blanks, planned)

    def _execute(self, work: _Work, mode: Mode, update: Callable[[float], None] | None) -> Outcome:
        self._running = (work.strategy, work.assignment.counts, mode)
        prepared = self._preparer.get(*self._running)
        batches = work.batches[prepared.pipeline] if prepared.pipeline is not None else ()
        timing = Timing(self._steps + 1, self.spans if update is not None else None)
        return self._executor.run(prepared, batches, work.tokens, update, self._buffers, timing)

    def _update(self, norm: float) -> None:
        if self._max_grad_norm is not None and norm > self._max_grad_norm:
            for gradient in self.home.gradients.values():
                gradient.mul_(self._max_grad_norm / norm)
        assert self.optimizer is not None
        self.home.attach_gradients()
        self.optimizer.step()

    def _gather(self, shards: Any) -> dict[str, Tensor]:
        """Return full natural tensors by parameter name on rank 0, {} elsewhere."""
        found: dict[str, Tensor] = {}
        for bucket in self.program.buckets:
            exchange = pull_exchange(
                self.home.layouts[bucket.name], whole(bucket.size, 0), self.world.rank, self.world.ranks
            )
            shard = shards[bucket.name]
            full = start_pull(exchange, shard, shard.dtype, self.groups, Buffers(self.world.device))()
            if self.world.rank == 0:
                for parameter in bucket.parameters:
                    at = bucket.offsets()[parameter.name]
                    tensor = parameter.natural(full[at : at + parameter.size])
                    found[parameter.name] = tensor.detach().contiguous().cpu().clone()
        return found

    def _agree(self, what: str, text: str) -> None:
        if self.world.ranks > 1:
            self.groups.same_everywhere(what, text)

    def _compare(self, digest: int) -> tuple[bool, bool]:
        """Say whether all ranks are about to do the same, and whether a save has failed; one small all-reduce."""
        if self.world.ranks == 1:
            return True, self._saver.failed
        most = torch.tensor([digest, -digest, int(self._saver.failed)], device=self.world.device)
        self.groups.all_reduce(Role.COMMIT, most, ReduceOp.MAX)
        return bool(most[0] == -most[1]), bool(most[2])

    def _describe(self, rank: int, index: int) -> str:
        if self._running is None:
            return ""
        return instruction_text(self._preparer.describe(*self._running, rank).instructions[index])


def compile(
    model: nn.Module,
    strategy: Strategy,
    optimizer: OptimizerFactory | None = None,
    max_grad_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    loss: Loss | None = None,
    example: Mapping[str, Tensor] | None = None,
    blocks: str | None = None,
) -> Executable:
    """Compile a model for training under a strategy that every step may change.

    Args:
        model: an unmodified Hugging Face model, or a module of your own, with weights on the CPU, the same on every
            rank. Built on the meta device it takes no memory: weights come from `load`, or, at the first step, from
            its own initialiser, block by block and seeded by `torch.manual_seed`.
        strategy: which devices compute what.
        optimizer: called once on every rank with one (name, 1-D fp32 tensor) pair per parameter in model order, the
            tensor having 0 elements where this rank owns nothing; returns a torch.optim optimizer. None: no training.
        max_grad_norm: clip gradients to this global norm.
        dtype: what the model computes in; master weights and optimizer state are fp32.
        device: "cpu" or "cuda"; default: a GPU where there is one.
        loss: takes the model's outputs and the packed batch, returns the loss summed over targets (the positions
            whose label is not -100); a step divides it by the targets of the global mini-batch.
        example, blocks: for modules and fields of your own; see `hydragraph.capture`.

    Joins the process group from the launcher's environment, uses the one there is, or stays alone.
    """
    if not isinstance(strategy, Strategy):
        raise Unsupported(
            f"strategy is a {type(strategy).__name__}",
            where="compile",
            remedy="pass one Strategy here and others to step(sequences, strategy=...)",
        )
    program = capture(model, dtype=dtype, example=example, loss=loss, blocks=blocks)
    return Executable(model, program, strategy, optimizer, max_grad_norm, device, blocks)


@dataclass(frozen=True)
class RankPrograms(Sequence[RankProgram]):
    """The programs of all ranks for one iteration: print them, verify them, price them, run them."""

    programs: tuple[RankProgram, ...]
    program: Program
    strategy: Strategy
    mode: Mode

    def __getitem__(self, rank: Any) -> Any:
        return self.programs[rank]

    def __len__(self) -> int:
        return len(self.programs)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.programs))

    def verify(self) -> None:
        """Prove that no rank can hang, read what is not there, or miss a gradient; see `hydragraph.ir.verify`."""
        from hydragraph.ir.verify import verify

        verify(self.programs, self.program.outline, self.mode)

    def simulate(self, cluster: Cluster, tokens: int | Sequence[int] = 2048) -> Timeline:
        """Price the programs: an event simulation of every stream of every rank.

        Args:
            cluster: devices and links.
            tokens: of one micro-batch, the same for all pipelines or one number for each.
        """
        each = [tokens] * len(self.strategy.pipelines) if isinstance(tokens, int) else list(tokens)
        busy = {p.pipeline for p in self.programs}
        each = [n if i in busy else 0 for i, n in enumerate(each)]
        return simulate(self.programs, cluster, work_of(self.program, self.strategy, each, cluster))


def lower(
    program: Program,
    strategy: Strategy,
    micro_batches: Sequence[int],
    ranks: int | None = None,
    mode: Mode = "train",
) -> RankPrograms:
    """Lower a program for a strategy.

    Args:
        micro_batches: how many each pipeline runs.
        ranks: the world size; default: as many as the strategy names.
    """
    world = ranks if ranks is not None else max(strategy.devices) + 1
    check_strategy(program, strategy, world)
    refuse_uncut(program, strategy)
    return RankPrograms(
        rank_programs(program.outline, strategy, micro_batches, mode, ranks=world), program, strategy, mode
    )


def check_strategy(program: Program, strategy: Strategy, ranks: int) -> None:
    """Check that a strategy fits a model and a world, on every rank alike.

    Raises:
        ValueError: wrong layers, unknown ranks, heads that do not divide.
        Unsupported: a parameter that a stage's degree cannot cut.
    """
    strategy.check(program.layers, ranks, program.heads)
    for tp in {stage.tp for pipeline in strategy.pipelines for stage in pipeline.stages} - {1}:
        for parameter in program.parameters.values():
            parameter.intervals(tp, 0)


def token_multiple(pipeline: Pipeline) -> int:
    """Return what the token count of a pipeline's micro-batches must be a multiple of, for sequence parallelism."""
    return math.lcm(*(stage.tp for stage in pipeline.stages if stage.sequence_parallel))


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Return every key of the model's state dict -> the canonical parameter or buffer that holds its value."""
    first = {id(p): n for n, p in model.named_parameters()}
    names = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    return {key: names.get(key, key) for key in model.state_dict()}


def _weights_hash(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.named_parameters():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.detach().float().numpy()).data)
    return digest.hexdigest()


def _work_text(work: _Work, mode: Mode, update: bool) -> str:
    return repr((str(work.strategy), work.assignment, work.tokens, mode, update))


def _digest(text: str, work: _Work | None) -> int:
    """Return 62 bits over what ranks must agree on before they run an iteration."""
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for sequence in work.sequences if work else ():
        digest.update(sequence.ids.numpy().data)
        digest.update(sequence.labels.numpy().data)
        for value in sequence.extra.values():
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()) >> 2
