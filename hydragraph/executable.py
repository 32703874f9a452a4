"""A compiled model on one rank: what a training script calls, and how ranks agree before each iteration."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from hydragraph.candidates import Choices, candidates_of, planner_of
from hydragraph.check.stages import StageCheck
from hydragraph.cost.profile import Profile
from hydragraph.errors import Stopped, Unsupported
from hydragraph.frontend.adapters import is_peft
from hydragraph.frontend.initialise import initial_buffers, initial_parameters, is_meta
from hydragraph.frontend.packed import own_fields
from hydragraph.ir.home import HomeLayouts
from hydragraph.ir.layout import whole
from hydragraph.ir.outline import Mode
from hydragraph.ir.program import Program
from hydragraph.ir.text import instruction_text
from hydragraph.mini_batch import MiniBatch, Planned, Work, digest, packed
from hydragraph.modes import own_modes
from hydragraph.passes.compiled import choose_backend
from hydragraph.passes.fit import check_strategy
from hydragraph.passes.limits import limits_of
from hydragraph.planner.iteration import IterationPlan, IterationPlanner
from hydragraph.planner.longest_first import assign
from hydragraph.planner.policy import Policy
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.checkpoint import store
from hydragraph.runtime.checkpoint.saving import Saver
from hydragraph.runtime.exchange import pull_exchange, start_pull
from hydragraph.runtime.executor import Executor, Outcome
from hydragraph.runtime.failure.agreement import together
from hydragraph.runtime.failure.watch import CLOSED
from hydragraph.runtime.groups import Groups, Role
from hydragraph.runtime.launch import World
from hydragraph.runtime.prepared import Preparer
from hydragraph.runtime.rounded import rounded
from hydragraph.runtime.state import HomeState, OptimizerFactory, make_optimizer
from hydragraph.runtime.trace import Exposed, Span, Timing
from hydragraph.runtime.variants import Variants
from hydragraph.runtime.weights import pretrained
from hydragraph.runtime.weights.directory import Shell
from hydragraph.runtime.weights.directory import check as check_shell
from hydragraph.spec.home import Home
from hydragraph.spec.padded import Batches
from hydragraph.spec.strategy import Strategy
from hydragraph.version import __version__

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # of one communication; a failed rank is noticed long before


@dataclass(frozen=True)
class Planning:
    """What choosing strategies goes by.

    Attributes:
        profile: measured costs; None: rough ones.
        lengths: sequence lengths of sample mini-batches.
        policy: how iterations are planned.
    """

    profile: Profile | None = None
    lengths: Sequence[Sequence[int]] | None = None
    policy: Policy = field(default_factory=Policy)


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
        planning_s: seconds this step waited for a choice of which pipeline computes what.
        planning_hidden_s: seconds of planning that it did not wait for.
        expected_s: seconds that the plan expected, traffic and update included, by the profile; 0 without one.
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
    planning_hidden_s: float
    expected_s: float
    exposed: Exposed


def _call(what: str) -> Callable[[Callable[Concatenate[Executable, P], T]], Callable[Concatenate[Executable, P], T]]:
    """Make a method a call that all ranks make: in no mode of the caller's, and watched."""

    def wrap(method: Callable[Concatenate[Executable, P], T]) -> Callable[Concatenate[Executable, P], T]:
        def call(self: Executable, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with own_modes(what), self._watch.calling(what):
                return method(self, *args, **kwargs)

        functools.update_wrapper(call, method)
        return call

    return wrap


class Executable:
    """A model compiled for a strategy, ready to train; made by `compile`, on every rank alike.

    Attributes:
        program, strategies, optimizer, rank, ranks: what it was made of.
        decision: on rank 0, a sentence on whether one strategy stays or one is chosen every step; "" where nothing
            was decided.
        spans: set it to a list and every following step adds the times of its instructions (`runtime.trace`).
        stopping: set it on any rank, to a number above 0, and the next `step` does nothing and raises `Stopped` on all.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        given: Choices,
        optimizer: OptimizerFactory | None,
        max_grad_norm: float | None,
        world: World,
        blocks: str | None = None,
        planning: Planning | None = None,
        backend: str | None = None,
        check: str = "off",
        home: Home | None = None,
    ) -> None:
        self.program, self._max_grad_norm = program, max_grad_norm
        self.world, plans = world, planning or Planning()
        backend = choose_backend(backend, self.world.device)
        self.strategies = candidates_of(given, program, self.world.ranks, plans.profile, plans.lengths)
        self._model_tensors = tensor_names(model)
        self._fields, self._limits = own_fields(program), limits_of(program)
        self._names = pretrained.Names.of(model, self._model_tensors)
        self._shell, self._adapted = Shell.of(model), is_peft(model)
        self._several = "cu_seqlens" in program.templates[program.blocks[-1].template].inputs
        self._watch = world.watch
        self._watch.rest("")
        self.groups = Groups(world, TIMEOUT, watch=world.watch)
        self._saver = Saver(self.world, TIMEOUT)
        self._agree("version of hydragraph or torch", f"hydragraph {__version__}, torch {torch.__version__}")
        self._agree("program", program.fingerprint)
        self._agree("strategies", str(list(map(str, self.strategies))))
        owners = self._placed(home or Home())
        buffers = initial_buffers(model)
        self._buffers = {n: b.to(self.world.device) for n, b in buffers.items()}
        inductor = backend == "inductor"
        self._check = StageCheck(program, buffers, inductor) if check != "off" and not self.world.local_rank else None
        self.home = HomeState.allocate(program, owners.by_name(program.buckets), self.world.rank, self.world.device)
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
            program,
            Variants(program, backend=backend, device=self.world.device, fused_head=inductor, added=True),
            self._buffers,
            self.home.layouts,
            self.world.rank,
            self.world.ranks,
            device=self.world.device,
        )
        self._executor = Executor(
            program,
            self.home,
            self.groups,
            self._watch,
            self.world.device,
            rounded=rounded(self.home, program.dtype, self.optimizer),
        )
        self._steps, self._communications = 0, 0
        self.stopping = 0
        self.spans: list[Span] | None = None
        self._running: tuple[Strategy, tuple[int, ...], Mode] | None = None
        self._agreed: set[tuple[Strategy, Mode]] = set()  # what every rank has prepared
        self._measured = plans.profile is not None
        self._planned = self._measured or len(self.strategies) > 1
        self._planner: IterationPlanner | None = None
        self.decision = ""
        if self._planned and self.world.rank == 0:
            self._planner, self.decision = planner_of(
                self.strategies, plans.profile, self.world.ranks, plans.policy, plans.lengths, owners.home
            )

    # What a training script calls.

    @_call("step")
    def step(self, sequences: Batches, strategy: Strategy | None = None) -> StepReport:
        """Train on one global mini-batch, the same on every rank.

        Args:
            sequences: 1-D tensors of integers, or mappings with input_ids, labels (-100 where a token does not count;
                causal models shift them) or shift_labels (which already stand where they are predicted), and [L, ...]
                for each field of your own that compile's example= named. A mapping may also be a batch [B, L] that an
                attention_mask says to be padded on the right, as tokenizers make it.
            strategy: for this step; default: the one given to `compile`, or the best of those. Another one costs no
                re-tracing of what is compiled already, and moves no optimizer state.

        Raises:
            Unsupported: no optimizer was given, or the strategy cannot cut the model.
            FloatingPointError: the loss or a gradient is not finite; nothing was updated.
            RankFailure: another rank failed; nothing was updated.
            Stopped: a rank has set `stopping`.
        """
        if self.optimizer is None:
            raise Unsupported("it was compiled without an optimizer", where="step", remedy="pass optimizer= to compile")
        report = self._iterate(sequences, strategy, "train", self._update)
        self._steps += 1
        return report

    def announce(self, sequences: Batches) -> None:
        """Tell what a later step will bring, so that it is planned while earlier ones run; any rank may call it.

        Nothing has to be announced; a mini-batch that was not is planned when its step begins.
        """
        if self._planner is not None:
            self._planner.announce(MiniBatch.of(sequences, self.program.causal, self._fields, self._limits).lengths)

    @_call("evaluate")
    def evaluate(self, sequences: Batches, strategy: Strategy | None = None) -> StepReport:
        """Return the loss of a mini-batch without changing anything."""
        return self._iterate(sequences, strategy, "evaluate", None)

    @_call("gradients")
    def gradients(self, sequences: Batches, strategy: Strategy | None = None) -> dict[str, Tensor]:
        """Return the full fp32 gradients by parameter name on rank 0 ({} elsewhere), updating nothing.

        A parameter that is frozen, or that the loss does not reach, has none.
        """
        self._iterate(sequences, strategy, "train", None)
        return self._gather(self.home.gradients)

    @_call("full_state_dict")
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return every key of `model.state_dict()` (tied aliases, persistent buffers) as full CPU tensors on rank 0.

        Parameters are the fp32 master weights. Other ranks take part and get {}.
        """
        self._begin()
        return self._state(frozenset(self._model_tensors))

    @_call("save_pretrained")
    def save_pretrained(self, directory: str | Path, merged: bool = False) -> None:
        """Write a Hugging Face directory on rank 0, in fp32; all ranks call it.

        Of a peft model that is its adapters alone, in peft's format, for `peft.PeftModel.from_pretrained`.

        Args:
            directory: made if missing; only rank 0 needs to see it.
            merged: of a peft model, write the base model with its active adapters added to its weights instead.

        Raises:
            Unsupported: the model is none of transformers', or has no adapters to merge.
        """
        self._begin()
        shell = check_shell(self._shell, merged)
        keys = shell.keys(merged)
        state, what = self._state(frozenset(self._model_tensors) if keys is None else keys), f"write {directory}"
        write = lambda: shell.write(state, Path(directory), merged) if self.world.rank == 0 else None  # noqa: E731
        together(self.groups, what, write)

    @_call("save")
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
        self._saver.wait()
        save = self._saver.start if asynchronous else store.save
        save(Path(path), self.home, self.optimizer, {"steps": self._steps, "user": extra or {}}, self.groups)

    @_call("wait_saved")
    def wait_saved(self) -> None:
        """Return once what an asynchronous `save` is writing is in its place; raise its error, on every rank."""
        self._saver.wait()

    @_call("load")
    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint that `save` wrote; return what was saved as `extra`."""
        self._saver.wait()
        extra = store.load(Path(path), self.home, self.optimizer, self.groups)
        self._start = None
        self._steps = int(extra["steps"])
        return dict(extra["user"])

    @_call("load_pretrained")
    def load_pretrained(self, path: str | Path) -> None:
        """Read the weights of a Hugging Face directory of safetensors, every rank only its own; not the optimizer.

        Raises:
            Unsupported: the model has adapters.
        """
        if self._adapted:
            raise Unsupported(
                "a model with adapters, whose weights have other names than those of its base",
                where="load_pretrained",
                remedy="load the base model with from_pretrained, or peft's from_pretrained, before you compile it",
            )
        pretrained.load(Path(path), self.home, self._buffers, self._names, self.groups)
        self._start = None

    def close(self) -> None:
        """Wait for what is being saved, and drop the communicators; all ranks call it, also after a failure."""
        try:
            if self._planner is not None:
                self._planner.close()
            with nullcontext() if self._watch.broken else self._watch.calling("close"):
                self._saver.close()
        finally:
            self._watch.rest(f"{CLOSED} after step {self._steps}")
            self.groups.close()

    @property
    def strategy(self) -> Strategy:
        """The one that `compile` was given, or the first of them."""
        return self.strategies[0]

    @property
    def rank(self) -> int:
        """This process."""
        return self.world.rank

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return self.world.ranks

    # How it is done.

    def _placed(self, home: Home) -> HomeLayouts:
        """Return where state lives, with every rank's node; all ranks call it.

        Raises:
            ValueError: on every rank: it differs between ranks, or fits neither the ranks nor the model.
        """
        self._agree("home", str(home))
        home.check(self.world.ranks, [bucket.name for bucket in self.program.buckets])
        if home.copies > 1:
            nodes = self.groups.gather_objects(self.world.node)
            home = home.on([nodes.index(node) for node in nodes])
        return HomeLayouts(home, self.world.ranks)

    def _begin(self) -> None:
        """Give a model that was built on the meta device its initial weights, unless some were loaded."""
        start, self._start = self._start, None
        for tensors in start() if start is not None else ():
            self.home.fill(tensors)

    def _iterate(
        self,
        sequences: Batches,
        strategy: Strategy | None,
        mode: Mode,
        update: Callable[[float], None] | None,
    ) -> StepReport:
        self._begin()
        began = time.perf_counter()
        self._communications += 1
        batch, refused = self._checked(sequences, strategy)
        asked = repr(refused) if refused else repr((str(strategy), mode, update is not None))
        mark, work, outcome = digest(asked, batch), None, None
        # What all ranks refuse together must not count as a failure: that is raised outside.
        with self._watch.step(self._communications, self._describe):
            same, unsaved, stopping = self._compare(mark, self.stopping if update is not None else 0)
            if same and not unsaved and not stopping and batch is not None:
                work, refused = self._work(batch, strategy)
            if work is not None:
                refused = self._prepare(work, mode)
            if batch is not None and work is not None and refused is None:
                outcome = self._execute(work, batch.tokens, mode, update)
        if unsaved:
            self._saver.wait()
            raise AssertionError("a save in the background fails on all ranks, so waiting for it raises")
        if same and refused is not None:
            raise refused
        if same and stopping:
            raise Stopped(stopping)
        if batch is None or work is None or outcome is None:
            self._agree("mini-batch, strategy or call", f"{mark:016x}")
            raise refused or AssertionError("digests differ, so the agreement fails")
        if not outcome.finite:
            raise FloatingPointError(
                f"loss {outcome.loss:.4g}, gradient norm {outcome.grad_norm:.4g}: not finite, so nothing was updated; "
                "lower the learning rate or clip gradients (max_grad_norm), and look at this mini-batch"
            )
        return StepReport(
            self._steps + (update is not None),
            outcome.loss,
            batch.tokens,
            outcome.grad_norm,
            str(work.strategy),
            len(batch.sequences),
            work.assignment.counts,
            time.perf_counter() - began,
            work.padding,
            work.planning.exposed_s,
            work.planning.hidden_s,
            work.planning.expected_s,
            outcome.exposed,
        )

    def _checked(self, sequences: Batches, strategy: Strategy | None) -> tuple[MiniBatch | None, ValueError | None]:
        """Return the mini-batch, or what is wrong with it or the strategy."""
        try:
            if strategy is not None:
                check_strategy(self.program, strategy, self.world.ranks)
            return MiniBatch.of(sequences, self.program.causal, self._fields, self._limits), None
        except ValueError as error:
            return None, error

    def _work(self, batch: MiniBatch, strategy: Strategy | None) -> tuple[Work | None, ValueError | None]:
        """Assign a mini-batch that all ranks have, and pack this rank's part of it."""
        began = time.perf_counter()
        if strategy is None and self._planned:
            plan = self._plan(batch.lengths)
            if isinstance(plan, ValueError):
                return None, plan
            strategy, assignment = self.strategies[plan.candidate], plan.assignment
            expected = plan.seconds if self._measured else 0.0
            planning = Planned(time.perf_counter() - began, plan.hidden_s, expected)
        else:
            strategy = strategy or self.strategies[0]
            assignment = assign(strategy, batch.lengths)
            planning = Planned(time.perf_counter() - began)
        world, unplaced = self.world, self.program.unplaced
        work = packed(batch, strategy, assignment, world.rank, world.device, self._several, planning, unplaced)
        return work, None

    def _plan(self, lengths: tuple[int, ...]) -> IterationPlan | ValueError:
        """Return rank 0's plan, or why there is none, on every rank."""
        plan: IterationPlan | ValueError | None = None
        if self._planner is not None:
            try:
                plan = self._planner.plan(lengths)
            except ValueError as error:
                plan = error
        plan = self.groups.gather_objects(plan)[0]
        assert plan is not None, "rank 0 plans"
        return plan

    def _prepare(self, work: Work, mode: Mode) -> ValueError | None:
        """Build what this rank runs; return, on every rank alike, why some rank cannot: nothing has been sent yet."""
        found: ValueError | None = None
        self._running = (work.strategy, work.assignment.counts, mode)
        try:
            self._preparer.get(*self._running)
            if self._check is not None and (work.strategy, mode) not in self._agreed:
                self._check.check(work.strategy)
        except Exception as error:  # whatever a trace or a compiler raises
            if (work.strategy, mode) in self._agreed:
                raise
            found = error if isinstance(error, ValueError) else _failed(error, str(work.strategy))
        if (work.strategy, mode) in self._agreed:
            return None
        told = found if isinstance(found, Unsupported) or found is None else _failed(found, str(work.strategy))
        first = next((each for each in self.groups.gather_objects(told) if each is not None), None)
        if first is None:
            self._agreed.add((work.strategy, mode))
        return found or first

    def _execute(self, work: Work, tokens: int, mode: Mode, update: Callable[[float], None] | None) -> Outcome:
        prepared = self._preparer.get(work.strategy, work.assignment.counts, mode)
        batches = work.batches[prepared.pipeline] if prepared.pipeline is not None else ()
        spans = self.spans if update is not None else None
        timing = Timing(self._steps + 1, spans, self._executor.lanes.clock())
        return self._executor.run(prepared, batches, tokens, update, self._buffers, timing)

    def _update(self, norm: float) -> None:
        if self._max_grad_norm is not None and norm > self._max_grad_norm:
            for gradient in self.home.gradients.values():
                gradient.mul_(self._max_grad_norm / norm)
        assert self.optimizer is not None
        self.home.attach_gradients()
        self.optimizer.step()

    def _state(self, keys: frozenset[str]) -> dict[str, Tensor]:
        """Return some keys of the model's state dict as full CPU tensors on rank 0, {} elsewhere."""
        sources = {key: source for key, source in self._model_tensors.items() if key in keys}
        found = self._gather(self.home.weights, frozenset(sources.values()))
        if self.world.rank:
            return {}
        held = {**{n: b.detach().cpu() for n, b in self._buffers.items()}, **found}
        return {key: held[source] for key, source in sources.items()}

    def _gather(self, shards: Any, names: frozenset[str] | None = None) -> dict[str, Tensor]:
        """Return full natural tensors by parameter name, all or those of some names, on rank 0, {} elsewhere."""
        found: dict[str, Tensor] = {}
        for bucket in (b for b in self.program.buckets if b.name in shards):
            wanted = [p for p in bucket.parameters if names is None or p.name in names]
            if not wanted:
                continue
            exchange = pull_exchange(
                self.home.layouts[bucket.name],
                whole(bucket.size, 0),
                self.world.rank,
                self.world.ranks,
                self.world.device,
            )
            shard = shards[bucket.name]
            full = start_pull(exchange, shard, shard.dtype, self.groups, Buffers(self.world.device))()
            if self.world.rank == 0:
                for parameter in wanted:
                    at = bucket.offsets()[parameter.name]
                    tensor = parameter.natural(full[at : at + parameter.size])
                    found[parameter.name] = tensor.detach().contiguous().cpu().clone()
        return found

    def _agree(self, what: str, text: str) -> None:
        if self.world.ranks > 1:
            self.groups.same_everywhere(what, text)

    def _compare(self, digest: int, stopping: int) -> tuple[bool, bool, int]:
        """Say whether all ranks are about to do the same, whether a save has failed, and whether a rank is to stop.

        One small all-reduce.
        """
        if self.world.ranks == 1:
            return True, self._saver.failed, stopping
        most = torch.tensor([digest, -digest, int(self._saver.failed), stopping], device=self.world.device)
        self.groups.all_reduce(Role.COMMIT, most, ReduceOp.MAX)
        return bool(most[0] == -most[1]), bool(most[2]), int(most[3])

    def _describe(self, rank: int, index: int) -> str:
        if self._running is None:
            return ""
        return instruction_text(self._preparer.describe(*self._running, rank).instructions[index])


def _failed(error: Exception, strategy: str) -> Unsupported:
    """Say that a strategy cannot be prepared, in words that every rank can be told."""
    told = (str(error).splitlines() or [""])[0]
    found = Unsupported(
        f"it cannot be compiled ({type(error).__name__}: {told})",
        where=f"strategy {strategy}",
        remedy="choose another strategy; the cause is above on the rank that failed",
    )
    found.__cause__ = error
    return found


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
