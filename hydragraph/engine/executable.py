"""Compiled model on one rank: the object that a training script calls, and how ranks agree before each iteration."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from hydragraph import log
from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.checkpoint.weights import pretrained
from hydragraph.checkpoint.weights.pretrained_directory import Shell, fp32_keys, published_keys, published_names
from hydragraph.checkpoint.weights.pretrained_directory import check as check_shell
from hydragraph.cluster.agreement import together
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.heartbeat_board import PROGRESS_S
from hydragraph.cluster.failure.rank_watch import CLOSED, agreed
from hydragraph.cluster.launch import World
from hydragraph.cluster.rendezvous.member import CALLED, here
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine.background_compile import Readying
from hydragraph.engine.candidate_strategies import (
    Choices,
    Chooser,
    Planning,
    candidates_among,
    candidates_of,
    home_among,
    request_of,
    strategy_for,
)
from hydragraph.engine.session import Session, agree, first_of
from hydragraph.engine.state_transfer import Moved, Restore, bring, keep, parts, read
from hydragraph.engine.state_transition import Holding
from hydragraph.engine.step_agreement import Call, Promise
from hydragraph.engine.strategy_history import Past
from hydragraph.errors import RankFailure, Stopped, Unsupported
from hydragraph.frontend.check.stage_check import StageCheck
from hydragraph.frontend.compiled_folder.load import CompiledFolder
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.frontend.compiled_state import CompiledState
from hydragraph.frontend.loss_module import loss_buffers
from hydragraph.frontend.meta_initialiser import initial_buffers, initial_parameters, is_meta
from hydragraph.frontend.mini_batch import AssignedBatch, DivideBy, MiniBatch, digest, packed
from hydragraph.frontend.packed_batch import Draws
from hydragraph.frontend.packed_inputs import Loss, own_fields
from hydragraph.frontend.peft_adapters import is_peft, switchable_parameters
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.program import Program
from hydragraph.ir.program_outline import Purpose, mode_of
from hydragraph.kernels.philox import key_of
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.passes.compile_with_inductor import choose_backend, refuse_halves
from hydragraph.passes.field_limits import limits_of
from hydragraph.passes.variants import Variants
from hydragraph.planner.request import PlanRequest
from hydragraph.private.torch_modes import own_modes
from hydragraph.runtime.deterministic_sums import Deterministic
from hydragraph.runtime.elementwise import OptimizerFactory, check_hooks
from hydragraph.runtime.executor import IterationOutcome
from hydragraph.runtime.home_state import HomeState, settings_of, zeroed
from hydragraph.runtime.instruction_trace import Exposed, RankTimes, Span, mean_exposed
from hydragraph.runtime.speed_probe import MOST_S, SpeedProbe
from hydragraph.runtime.state_agreement import ProgressLog, StateProgress, meet
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.home import AUTO, Home, home_of
from hydragraph.spec.home_text import owners_text
from hydragraph.spec.limits import Limit
from hydragraph.spec.padded import Batches
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.workload import Field
from hydragraph.version import __version__

_LOG = logging.getLogger(__name__)

PROBED_EVERY = 4  # steps
RECENT = 4  # strategies

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class StepReport:
    """Metrics of one step; identical on every rank except `seconds`.

    Attributes:
        step: counted from 1.
        loss: sum of losses of the global mini-batch, divided by `divide_by`; by default the mean over target tokens.
        tokens: number of target tokens.
        grad_norm: norm of all gradients, before clipping; 0 for an evaluation.
        strategy: text of the strategy in use.
        chosen: the strategy as an object.
        sequences: number of sequences in the mini-batch.
        micro_batches: number of micro-batches of each pipeline.
        seconds: wall time on this rank.
        padding: tokens added to micro-batches to make them divisible for sequence parallelism.
        planning_s: seconds that this step waited for a strategy and an assignment.
        planning_hidden_s: seconds of planning that overlapped with training.
        preparing_s: seconds spent compiling new graphs and building programs.
        expected_s: step time predicted by the profile, including communication and the update; 0 without a profile.
        ranks: by rank, its time and the time that it waited for communication.
        assignment: which pipeline computed which sequences in which micro-batch.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    strategy: str
    chosen: Strategy
    sequences: int
    micro_batches: tuple[int, ...]
    seconds: float
    padding: int
    planning_s: float
    planning_hidden_s: float
    preparing_s: float
    expected_s: float
    ranks: tuple[RankTimes, ...]
    assignment: Assignment

    @property
    def exposed(self) -> Exposed:
        """Seconds that ranks waited for communication, on average."""
        return mean_exposed(self.ranks)


@dataclass(frozen=True, eq=False)
class _Ran:
    """One iteration: its mini-batch, how it was assigned, its outcome, and the seconds spent preparing programs."""

    batch: MiniBatch
    work: AssignedBatch
    outcome: IterationOutcome
    preparing_s: float


def _call(what: str) -> Callable[[Callable[Concatenate[Executable, P], T]], Callable[Concatenate[Executable, P], T]]:
    """Make a method a collective call: watched, outside the caller's torch modes, and rejected after `close`.

    Errors in the arguments are raised before the call begins, so they do not count as a failure of this rank.
    """

    def wrap(method: Callable[Concatenate[Executable, P], T]) -> Callable[Concatenate[Executable, P], T]:
        signature = inspect.signature(method)

        def call(self: Executable, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(self, *args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{what}: {error}") from None
            if what == "load":
                parts(given["path"])
            for name in ("path", "directory"):
                if name in given and what != "load" and not isinstance(given[name], str | os.PathLike):
                    raise TypeError(f"{what}: {name} is {given[name]!r}; give a path, as a text or a pathlib.Path")
            if self._closed:
                raise ValueError(f"{what}: this executable is closed; call it before close(), or compile again")
            if self._promised is not None and what != "step":
                raise ValueError(
                    f"{what}: all ranks have promised that a step comes first; train it, or promise none before this"
                )
            if self._limited is not None and what not in self._limited.calls:
                raise ValueError(f"{what}: {self._limited.why}")
            with own_modes(what), self._watch.calling(what):
                return method(self, *args, **kwargs)

        functools.update_wrapper(call, method)
        return call

    return wrap


@dataclass(frozen=True)
class _Limited:
    """Restriction on calls while a loop or a context of an executable is open.

    Attributes:
        calls: the calls that are allowed.
        why: why others are refused, and what to do.
    """

    calls: tuple[str, ...]
    why: str


_ENDS = ("close", "leave")


class Executable:
    """A model compiled for a strategy, ready to train. `compile` creates one on every rank.

    Attributes:
        program, strategies: the captured program, and the strategies that steps choose from.
        seed: seed of dropout.
        given, wanted_home, device: the strategies and the home passed to `compile`, and the device it computes on.
        spans: set it to a list, and every following step appends the times of its instructions
            (`runtime.instruction_trace`).
        past: strategies that ran on earlier sets of ranks (`engine.recovery`).
        watched: set it on all ranks to let idle ranks probe their device now and then.
        stopping: set it to a positive number on any rank, and the next `step` raises `Stopped` on all ranks without
            training.
        listens: called whenever ranks agree on a step; a positive result acts like `stopping`, even during a step.
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
        library: CompiledFolder | None = None,
        variants: Variants | None = None,
        joining: bool = False,
        deterministic: bool = False,
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        plans = planning or Planning()
        backend = choose_backend(backend, world.device)
        self._inductor = inductor = backend == "inductor"
        self._sums = Deterministic.begin(world.device, backend) if deterministic else None
        self.program = program
        self._max_grad_norm = max_grad_norm
        self.seed = seed
        self._model_tensors = tensor_names(model)
        self._fields = own_fields(program)
        self._limits = limits_of(program)
        self._shell = Shell.of(model)
        self._adapted = is_peft(model)
        self._epilogue = program.templates[program.blocks[-1].template]
        self._several = "cu_seqlens" in self._epilogue.inputs
        buffers = initial_buffers(model) | loss_buffers(loss)
        self._check = None
        if check == "full" and not world.local_rank:
            self._check = StageCheck(program, buffers, inductor, added=not inductor, library=library)
        elif check != "off" and not world.local_rank:
            passed = library.manifest.check.stages if library is not None else None
            self._check = StageCheck(program, buffers, inductor, passed=passed)
        self._library = library
        if variants is None:
            variants = Variants(
                program,
                backend=backend,
                device=world.device,
                fused_head=inductor,
                added=True,
                library=library,
                cache=VariantCache(),
            )
        # Another process of this machine may have compiled these for its own GPU.
        self._variants = variants.on(world.device) if variants.portable else variants
        self._optimizer = optimizer
        self._planning = plans
        self._first_profile = plans.profile
        self.given = given
        self.wanted_home = AUTO if home is None else home
        self.device = world.device
        self.progress_s = PROGRESS_S
        # Copies, since `load` writes to them and the model stays as it was.
        self._buffers = {name: buffer.to(world.device, copy=True) for name, buffer in buffers.items()}
        self._compiled_state = CompiledState(model, loss, self._buffers)
        seed = torch.initial_seed()
        self._holding = Holding((lambda: initial_parameters(model, seed, blocks)) if is_meta(model) else None)

        def fill(groups: Groups, state: HomeState) -> None:
            if is_meta(model):
                agree(groups, "random seed (torch.manual_seed)", str(seed))
            else:
                agree(groups, "weights", _weights_hash(model))
                state.fill(dict(model.named_parameters()))

        self._closed = False
        self._limited: _Limited | None = None
        self._choosing: Chooser | None = None
        self._communications = 0
        self._next: Promise | None = None  # to follow the next step
        self._promised: Promise | None = None  # agreed by all ranks for the next step
        self.stopping = 0
        self.listens: Callable[[], int] | None = None
        self.watched = False
        self._probe = SpeedProbe(world.device)
        self._lasted: float | None = None  # seconds of the last step
        self.spans: list[Span] | None = None
        self._watch = world.watch
        self.strategies: tuple[Strategy, ...] = ()
        self.past = Past()
        self._recent: tuple[Strategy, ...] = ()
        self._running: tuple[Strategy, tuple[int, ...], Purpose] | None = None
        self._ran: dict[int, tuple[Strategy, tuple[int, ...], Purpose]] = {}  # by the iteration's number, the last two
        if joining and given != "auto":
            several = [given] if isinstance(given, Strategy | str) else given
            self._check_strategies([strategy_for(each, program) for each in several])
        if not joining:
            known, wanted, streaming = self._variants.strategies, self.wanted_home, self.may_stream

            def among(profile: Profile | Costs | None) -> tuple[Strategy, ...]:
                how = (program, world.ranks, profile, plans.lengths, wanted, known, streaming)
                return candidates_among(world, given, *how)

            alike = self._sums is not None and given == "auto"
            if given == "auto" and plans.strategies:
                self.strategies = plans.strategies
            else:
                self.strategies = (
                    _of_least_cut(plans.profile, among) if alike and plans.profile else among(plans.profile)
                )
            self._check_strategies(self.strategies)
            self._planning = replace(plans, profile=self.given_profile)
            chosen = home_among(world, program, wanted, self.strategies, self._planning)
            self._holding.held = self._begin_session(world, chosen, fill)
            self._choose()

    # The interface of a training script.

    @_call("step")
    def step(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> StepReport:
        """Train on one global mini-batch, which must be identical on every rank.

        Args:
            sequences: 1-D tensors or lists of integers; or mappings with input_ids, labels (-100 where a token does not
                count; causal models shift them) or shift_labels (already aligned with the predictions), and [L, ...]
                for each custom field named by compile's example=. A mapping may also be a batch [B, L] whose
                attention_mask marks padding on the right, as tokenizers produce it.
            strategy: strategy or its text for this step; default: the one given to `compile`, or the best of those.
                Another one re-uses compiled graphs and moves no optimizer state.
            divide_by: what the sum of losses is divided by: the "targets" or the "sequences" of the whole mini-batch,
                or a number, such as the tokens of several mini-batches or 1 for a sum.

        Raises:
            Unsupported: no optimizer was given, or the strategy cannot cut the model.
            FloatingPointError: the loss or a gradient is not finite; weights are unchanged.
            RankFailure: another rank failed; weights are unchanged.
            Stopped: a rank has set `stopping`.
            ValueError: the mini-batch is malformed, differs between ranks, or is not the promised one.
        """
        if self.optimizer is None:
            raise Unsupported("it was compiled without an optimizer", where="step", remedy="pass optimizer= to compile")
        return self._iterate(sequences, strategy, "train", divide_by)

    def announce(self, sequences: Batches) -> None:
        """Announce the mini-batch of a later step so that it is planned while earlier steps run; any rank may call it.

        Announcing is optional: a mini-batch that was not announced is planned when its step begins.
        """
        if self._chooser.plans:
            self._chooser.announce(MiniBatch.of(sequences, self.program.causal, self._fields, self._limits).lengths)

    def promise(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> None:
        """Promise the step that follows the next one; all ranks must make the same promise.

        Ranks agree on the promised step while the gradients of the step before it are in flight, so it begins without a
        separate synchronisation (`hydragraph.engine.step_agreement`). Promising is optional. A promise applies to the
        next call of `step` only, even if that call is rejected. Once all ranks have agreed, every call except `close`,
        `leave` and `move` is rejected until the promised step is trained, and a request to stop takes effect one step
        later.

        Args:
            sequences: the same object that `step` will receive; it must be iterable twice, and its tensors must not
                change.
            strategy, divide_by: arguments of that step.
        """
        self._next = Promise(sequences, strategy, divide_by) if self.world.ranks > 1 else None

    def choose_from(
        self,
        strategies: Sequence[Strategy],
        request: PlanRequest,
        static: int | None = None,
        ready_first: bool = False,
    ) -> None:
        """Choose from other strategies from the next step on. Only rank 0 calls it; all ranks follow in the same step.

        No state moves. Graphs that a strategy needs are compiled in the first step that runs it, or earlier
        (`ready_first`).

        Args:
            strategies: the new candidates.
            request: costs of their pipelines, in the same order.
            static: index of the candidate to keep; None: choose the best for every step.
            ready_first: keep the current strategies until the new ones are compiled in the background, and checked
                where compiled graphs are checked; see `changing` and `change_refused`. Not yet supported with Inductor.

        Raises:
            Unsupported: a strategy does not fit the model or the ranks, this rank does not plan, or the previous
                request has just become ready.
        """
        if not self._chooser.plans:
            raise Unsupported(
                "this rank does not plan",
                where="choose_from",
                remedy="call it on rank 0, of what was compiled with a profile or with several strategies",
            )
        for strategy in strategies:
            self.check(strategy, self.world.ranks)
        self._chooser.change(tuple(strategies), request, static, ready_first)

    @property
    def changing(self) -> bool:
        """On rank 0: whether steps do not yet choose from the strategies last passed to `choose_from`."""
        return self._chooser.changing

    @property
    def change_refused(self) -> str:
        """On rank 0: why the strategies last passed to `choose_from` cannot run; "" if no reason is known."""
        return self._chooser.refused

    def check(self, strategy: Strategy, ranks: int) -> None:
        """Check that a strategy fits the model, the number of ranks and the deterministic mode; every rank calls it
        alike.

        Raises:
            ValueError: it does not fit; `Unsupported` (a ValueError) if it needs an unsupported feature.
        """
        check_strategy(self.program, strategy, ranks)
        self._check_strategies([strategy])

    @property
    def measured(self) -> tuple[Profile, Cluster] | None:
        """What was measured for "auto" on the first ranks: costs of blocks by type of device, and the cluster."""
        first = self._first_profile
        return (first.profile, first.cluster) if self._planning.explanation and isinstance(first, Costs) else None

    def adopt(self, measured: tuple[Profile, Cluster] | None) -> None:
        """Take over what other ranks have measured, unless this rank has costs of its own."""
        if self._first_profile is None and measured is not None:
            self._first_profile = Costs(*measured, home=self.wanted_home)

    @property
    def explanation(self) -> tuple[str, ...]:
        """For the strategy "auto" without a profile: lines on the devices, the plan, and why others lose; else none."""
        return self._planning.explanation

    @property
    def request(self) -> PlanRequest:
        """Costs of the current strategies, by the profile that was given."""
        return request_of(
            self.strategies,
            self._planning.profile,
            self.world.ranks,
            self._planning.policy.seed,
            self._session.owners.home,
        )

    @_call("evaluate")
    def evaluate(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> StepReport:
        """Return the loss of a mini-batch without changing anything; arguments as for `step`."""
        return self._iterate(sequences, strategy, "evaluate", divide_by)

    @overload
    def score(
        self, sequences: Batches, entropy: Literal[False] = False, strategy: Strategy | str | None = None
    ) -> Tensor: ...

    @overload
    def score(
        self, sequences: Batches, entropy: Literal[True], strategy: Strategy | str | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @_call("score")  # type: ignore[misc]  # the decorator's call takes self by position only
    def score(
        self, sequences: Batches, entropy: bool = False, strategy: Strategy | str | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the log-probability of each sequence's targets given what precedes them, without changing anything.

        Args:
            sequences: as for `step`, but without the fields that only the loss reads. Positions whose label is -100,
                such as a prompt's, do not count.
            entropy: also return the summed entropies, in nats, of the distributions that targets are drawn from. This
                materialises the logits of a micro-batch.
            strategy: as for `step`.

        Returns:
            fp32 [L] on the CPU, in the order of the sequences, on every rank; 0 for a sequence without a target. With
            entropy, the pair of both.

        Raises:
            Unsupported: the loss has no log-probability per token.
        """
        scores = self._run(sequences, strategy, "score_entropy" if entropy else "score").outcome.scores.float()
        return (scores[:, 0], scores[:, 1]) if entropy else scores[:, 0]

    @_call("gradients")
    def gradients(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> dict[str, Tensor]:
        """Return the full fp32 gradients by parameter name on rank 0 ({} elsewhere); weights do not change.

        A parameter that is frozen, or that the loss does not reach, has none. Arguments as for `step`.
        """
        self._iterate(sequences, strategy, "gradients", divide_by)
        return self._session.gather(self.home.gradients)

    @_call("full_state_dict")
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return every key of `model.state_dict()` (tied aliases, persistent buffers) as full CPU tensors on rank 0.

        Parameters are the fp32 master weights. Other ranks must call it too and get {}.
        """
        self._holding.begin()
        return self._state(frozenset(self._model_tensors))

    @_call("weights")
    def weights(self, dtype: torch.dtype = torch.float32, to: Sequence[int] = (0,)) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights as a server such as vLLM loads them, with one block in memory at a time.

        All ranks call it, and the ranks of `to` finish the loop before any rank makes another call::

            for name, tensor in exe.weights(dtype=torch.bfloat16):
                ...

        Args:
            dtype: dtype of floating-point tensors, except those that the model's classes keep in fp32.
            to: ranks that get the weights; for the others the loop is empty.

        Returns:
            Names and tensors as `save_pretrained` writes them, on this rank's device; a tied weight comes once, and
            persistent buffers come last. For a peft model, those of its adapter.

        Raises:
            ValueError: `to` names a rank that does not exist or names one twice, or `dtype` is not a floating dtype.
            Unsupported: a peft model has several adapters.
        """
        if not dtype.is_floating_point:
            raise ValueError(f"weights: dtype {dtype} is not a floating dtype; give torch.bfloat16 or torch.float32")
        if not to or len(set(to)) < len(to) or not set(to) <= set(range(self.ranks)):
            raise ValueError(f"weights: to={tuple(to)} must name ranks from 0 to {self.ranks - 1}, each once")
        agree(self.groups, "dtype and ranks of weights()", f"{dtype} {sorted(to)}")
        keys = None if self._shell is None else published_keys(self._shell)
        self._holding.begin()
        pieces = self._weights(frozenset(self._model_tensors) if keys is None else keys, dtype, to)
        if self.rank not in to:
            return iter(list(pieces))  # takes part at once, whether or not the caller loops
        self._limited = _Limited(_ENDS, "a loop over weights() has not ended; finish it, or leave it with break, first")
        return pieces

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Compute `score` and `evaluate` without the adapters of a peft model, as its `disable_adapter` does.

        The base model is then the reference of DPO or of a KL penalty, without a second copy of its weights. All ranks
        enter it together::

            with exe.adapter_off():
                reference = exe.score(sequences)

        Raises:
            Unsupported: the model has no adapters, or training changes more than LoRA's matrices.
        """
        with zeroed(self._switchable()):
            self._limited = _Limited(
                ("score", "evaluate", *_ENDS), "adapters are off; leave `with exe.adapter_off()` before other calls"
            )
            try:
                yield
            finally:
                self._limited = None

    @_call("adapter_off")
    def _switchable(self) -> list[Tensor]:
        """Return this rank's part of the parameters that switch adapters off where they are zero."""
        names = switchable_parameters(None if self._shell is None else self._shell.model)
        self._holding.begin()
        self._stop_handover()
        return [self.home.parameters[name] for name in names]

    @_call("save_pretrained")
    def save_pretrained(self, directory: str | Path, merged: bool = False) -> None:
        """Write a Hugging Face directory on rank 0, in fp32; all ranks call it.

        For a peft model, write only its adapters, in the format of `peft.PeftModel.from_pretrained`.

        Args:
            directory: created if missing; only rank 0 needs access to it.
            merged: for a peft model, write the base model with its active adapters merged into its weights instead.

        Raises:
            Unsupported: the model is not a transformers model, or has no adapters to merge.
        """
        self._holding.begin()
        shell = check_shell(self._shell, merged)
        keys = shell.keys(merged)
        state = self._state(frozenset(self._model_tensors) if keys is None else keys)

        def write() -> None:
            if self.world.rank == 0:
                shell.write(state, Path(directory), merged)

        together(self.groups, f"write {directory}", write)

    @_call("save")
    def save(self, path: str | Path, extra: dict[str, Any] | None = None, asynchronous: bool = False) -> None:
        """Write weights and optimizer state as a checkpoint that any strategy and any number of ranks can load.

        Args:
            path: a directory visible to all ranks.
            extra: plain data of the caller, returned by `load`.
            asynchronous: return once this rank's shards are copied to CPU memory, and write in the background. The next
                `save`, `load`, `wait_saved`, `close` and the end of the process wait for it. The first of these calls,
                or the next step, raises its error on every rank.
        """
        self._holding.begin()
        changed = self._compiled_state.changed_weights()
        if changed:
            _LOG.warning("save: %s; the checkpoint has what was trained, without this change", changed)
        self._session.saver.wait()
        save = self._session.saver.start if asynchronous else save_and_load.save
        entry = {"steps": self._steps, "user": extra or {}, save_and_load.BUFFERS: self._persistent_buffers()}
        save(Path(path), self.home, self.optimizer, entry, self.groups)

    @_call("keep")
    def keep(self, pieces: Pieces, extra: dict[str, Any] | None = None) -> tuple[str, ...]:
        """Keep a checkpoint in pieces, which `move` and `load` can restore; all ranks call it.

        Training waits only until the state is copied to CPU memory; its pieces are written during the next steps. A
        place to which an earlier checkpoint is still being written is left out this time.

        Args:
            pieces: where this rank keeps them; all ranks use the same places.
            extra: plain data of the caller, returned after a restore.

        Returns:
            Errors of writing earlier checkpoints, of all ranks, the same on each; these checkpoints are incomplete.
        """
        self._holding.begin()
        return keep(self._session, pieces, extra or {}, self._persistent_buffers())

    @_call("wait_saved")
    def wait_saved(self) -> None:
        """Wait until an asynchronous `save` has completed; raise its error on every rank."""
        self._session.saver.wait()

    @_call("load")
    def load(self, path: Restore) -> dict[str, Any]:
        """Read a checkpoint, and return its `extra`; all ranks call it.

        Args:
            path: a directory that `save` wrote, the pieces of `keep`, or the pair (pieces, directory); the newer one
                is read.
        """
        self._session.saver.wait()
        self._stop_handover()
        found = read(self._session, path)
        self._holding.loaded()
        for name, buffer in found.buffers.items():
            self._session.buffers[name].copy_(buffer)
        return dict(found.extra)

    @_call("load_pretrained")
    def load_pretrained(self, path: str | Path) -> None:
        """Read the weights of a Hugging Face directory of safetensors files; each rank reads only the parts it owns.

        The optimizer state does not change.

        Raises:
            Unsupported: the model has adapters.
        """
        if self._adapted:
            raise Unsupported(
                "a model with adapters, whose weights have other names than those of its base",
                where="load_pretrained",
                remedy="load the base model with from_pretrained, or peft's from_pretrained, before you compile it",
            )
        self._stop_handover()
        names = pretrained.Names.of(None if self._shell is None else self._shell.model, self._model_tensors)
        pretrained.load(Path(path), self.home, self._session.buffers, names, self.groups)
        self._holding.loaded()

    def close(self) -> None:
        """Wait for running saves and close the communicators; all ranks call it, even after a failure."""
        self._closed = True
        if self._holding.held is None:
            return
        try:
            self._chooser.close()
            with self._calling("close"):
                self._stop_handover()
                self._session.saver.close()
        finally:
            self._watch.rest(f"{CLOSED} after step {self._steps}")
            self.groups.close()

    # Ranks that join and leave.

    def leave(self) -> None:
        """Close the communicators, which a failure may have broken, and keep the state, before ranks meet again.

        This is a local call: it waits for no other rank, unless a save is being written. `move` also calls it. Call it
        before destroying the process group that these communicators belong to.
        """
        if self._holding.held is not None:
            try:
                self._holding.held.saver.close()
            except Exception as error:
                _LOG.warning("a save was not completed: %s", error)
            try:
                with self._calling("leave"):
                    self._stop_handover()
            except RankFailure as failure:
                _LOG.info("state did not come beside the steps: %s", failure)
        for groups in self._holding.groups:
            groups.close()

    def move(
        self,
        world: World,
        home: Home | str | None,
        before: Sequence[int | None],
        restore: Restore | None = None,
        strategy: Choices | None = None,
        profile: Profile | Costs | None = None,
    ) -> Moved:
        """Continue in another world or under another home with the state that ranks have; all ranks of the new world
        call it.

        Call it after a failure or between two steps. Survivors use their executable, newcomers one compiled with
        `joining=True`. Weights, optimizer state and hyperparameters come from survivors, wherever these parts live now.
        If only some ranks have finished a step, all finish it (`runtime.state_agreement`). Every rank keeps its old
        state until the new state has arrived on all ranks: if the move fails, meet again and move again.

        Args:
            world: this process's new place, with an initialised process group. If it is the current world, only the
                home changes.
            home: new owners of the state, as an object or its text; with a rule ("auto"), owners are chosen for the
                strategies. None: as in `compile`.
            before: for each rank of the new world, its rank in the old one; None for a newcomer, whose state is
                ignored. Old ranks that are not named are lost.
            restore: read if a part of the state is lost with them; all ranks then go back to it. A checkpoint of
                `save`, the pieces of `keep`, each read from the nearest place, or the pair (pieces, checkpoint);
                the newer one is read. Newcomers pass theirs too.
            strategy: strategies to choose from, as in `compile`; None: the current ones, which must fit the ranks.
            profile: new costs of strategies; None: unchanged.

        Raises:
            ValueError: on all ranks: `before` does not fit, the state is lost, or a strategy or the home does not fit.
            RankFailure: another rank failed meanwhile; the state is unchanged.
        """
        if self._closed:
            raise ValueError("move: this executable is closed; compile again")
        began = time.perf_counter()
        given = home_of(home)
        home = self.wanted_home if given is None else given
        holding = self._holding
        self._next = self._promised = None
        stays = holding.held is not None and world is holding.held.world and not world.watch.broken
        stays = stays and list(before) == list(range(world.ranks))
        chosen = stays and strategy is None and profile is None
        self._stop_handover() if stays else self.leave()
        self._watch = world.watch
        with own_modes("move"), world.watch.calling("move"):
            told = world.gather((holding.standing(world.rank), self.strategies, self._communications))
            meeting = meet([standing for standing, _, _ in told], before)
            self._communications = max(number for _, _, number in told)
            finished = holding.agree(meeting, world.rank, self._max_grad_norm)
            known = told[meeting.leader or 0][1]
            self._planning = replace(self._planning, profile=self._alike(profile or self._planning.profile))
            plans = self._planning
            self.strategies = candidates_of(
                known if strategy is None else strategy,
                self.program,
                world.ranks,
                plans.profile,
                plans.lengths,
                home,
                streaming=self.may_stream,
            )
            self._check_strategies(self.strategies)
            self._planning = replace(self._planning, profile=self._alike(self._planning.profile))
            home = home_among(world, self.program, home, self.strategies, self._planning)
            counts = meeting.before[world.rank] is not None
            log = ProgressLog(StateProgress(meeting.updates, meeting.norm))
            ending = holding.held if stays else None
            session = self._begin_session(world, home, lambda groups, state: None, log, ending)
            holding.expect(session)
            brought = bring(session, holding.held if counts else None, meeting, restore)
            holding.arrived(meeting.generation + 1)
            session.groups.gather_objects(None)  # all ranks have their state: none needs another after this
            holding.take()
            self._choose(chosen)
        step = self._steps
        seconds = time.perf_counter() - began
        _LOG.info("moved to rank %d of %d at step %d in %.2f s", world.rank, world.ranks, step, seconds)
        restored = step if brought.restored else None
        return Moved(step, finished, restored, brought.extra, brought.received, seconds, brought.read)

    @_call("rehome")
    def rehome(self, home: Home | str) -> None:
        """Move state to the owners of another home during the next step; all ranks call it.

        The step computes the same results, and everything after it uses the new home, bit for bit as if `move` had been
        called after the step. Training waits only while gradients of the moving parts are sent to the new owners. Until
        that step, `evaluate`, `save` and all other calls use the current home. If a rank is lost, or state is loaded or
        moved otherwise, the handover is discarded.

        Args:
            home: new owners; with a rule ("auto"), owners are chosen for the strategies.

        Raises:
            ValueError: on all ranks: the home does not fit, or another handover is in progress.
        """
        if self._holding.handover is not None:
            on_its_way = self._holding.handover.arriving.owners.home
            raise agreed(ValueError(f"rehome: state is on its way to {on_its_way}: train a step first"))
        self._holding.begin()
        held = self._session
        given = home_of(home) or self.wanted_home
        chosen = home_among(held.world, self.program, given, self.strategies, self._planning)
        arriving = self._begin_session(
            held.world, chosen, lambda groups, state: None, ProgressLog(held.log.progress), held, agreed_before=True
        )
        self._holding.hand_over(arriving)

    def _stop_handover(self) -> None:
        self._holding.stop_handover(self._watch.broken)

    def _update(self, norm: float) -> None:
        """Update the parameters that this rank owns, after taking over new owners."""
        self._holding.go_over()
        self._session.update(norm, self._max_grad_norm)

    def _calling(self, what: str) -> AbstractContextManager[object]:
        """Watch other ranks during a call, unless a failure has broken the world."""
        return nullcontext() if self._watch.broken else self._watch.calling(what)

    @property
    def strategy(self) -> Strategy:
        """The strategy given to `compile`, or the first of several."""
        return self.strategies[0]

    @property
    def recent(self) -> tuple[Strategy, ...]:
        """Strategies that these ranks have trained with, most recent first."""
        return self._recent

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def ranks(self) -> int:
        """World size."""
        return self.world.ranks

    @property
    def steps(self) -> int:
        """Number of updates that the state has had."""
        return self._steps

    @property
    def given_profile(self) -> Profile | Costs | None:
        """Costs given to `compile`, restricted to strategies that may run."""
        return self._alike(self._first_profile)

    @property
    def planning(self) -> Planning:
        """Inputs of the choice of strategies."""
        return self._planning

    @property
    def profile(self) -> Profile | Costs | None:
        """Costs of strategies; None without measurements."""
        return self._planning.profile

    @property
    def world(self) -> World:
        """This process's place among the ranks."""
        return self._session.world

    @property
    def groups(self) -> Groups:
        """The communicators of this process."""
        return self._session.groups

    @property
    def home(self) -> HomeState:
        """This rank's share of the fp32 weights and gradients."""
        return self._session.home

    @property
    def owners(self) -> Home:
        """Home that currently owns the state."""
        return self._session.owners.home

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer of this rank's share; None if compiled without one."""
        return self._session.optimizer

    @property
    def decision(self) -> str:
        """On rank 0: a sentence on whether one strategy is kept or one is chosen for every step; "" if undecided."""
        return self._chooser.decision

    # Implementation.

    @property
    def _chooser(self) -> Chooser:
        if self._choosing is None:
            raise ValueError("this executable has joined no ranks yet: call move first")
        return self._choosing

    @property
    def _session(self) -> Session:
        return self._holding.session

    @property
    def _steps(self) -> int:
        """Number of updates that the state has had."""
        return self._session.log.progress.updates

    def _begin_session(
        self,
        world: World,
        home: Home,
        fill: Callable[[Groups, HomeState], None],
        log: ProgressLog | None = None,
        ending: Session | None = None,
        agreed_before: bool = False,
    ) -> Session:
        """Begin a session in a world, as the first one or in place of `ending`; arguments as for `Session.begin`."""
        alike = (
            {}
            if agreed_before
            else {
                "version of hydragraph or torch": f"hydragraph {__version__}, torch {torch.__version__}",
                "program": self.program.fingerprint,
                "compiled folder": self._library.digest if self._library is not None else "",
                "strategies": str(list(map(str, self.strategies))),
                "deterministic": "" if self._sums is None else str(self._sums),
                "max_grad_norm": str(self._max_grad_norm),
                "seed": str(self.seed),
                "window and push_dtype": f"{self.program.window}, {self.program.push_dtype}",
                "loss": hashlib.blake2b(str(self._epilogue.graph).encode(), digest_size=8).hexdigest(),
            }
        )
        variants, buffers, optimizer = self._variants, self._buffers, self._optimizer
        session = Session.begin(
            self.program,
            variants,
            buffers,
            world,
            home,
            optimizer,
            fill,
            alike,
            log,
            ending,
            deterministic=self._sums is not None,
        )
        names = [bucket.name for bucket in self.program.buckets]
        _LOG.info("state: %s", owners_text(session.owners.home, names, world.ranks))
        if self._sums is not None and session.optimizer is not None:
            self._sums.check_optimizer(session.optimizer)
        return session

    def _choose(self, as_before: bool = False) -> None:
        """Create the chooser for the current strategies and session, or keep the existing one."""
        self._running = None
        self._recent = ()
        self._agreed: set[tuple[Strategy, Purpose]] = set()  # what every rank has prepared
        session = self._session
        if not as_before:
            before, planning = self._choosing, self._planning
            readying = Readying(self._variants, self._check, session.world.local_rank == 0)
            self._choosing = Chooser.of(
                self.strategies, session.groups, planning, session.owners.home, readying, before
            )

    @property
    def may_stream(self) -> bool:
        """Whether stages may stream: sums of deterministic runs may not."""
        return self._sums is None

    def _check_strategies(self, strategies: Sequence[Strategy]) -> None:
        """Check that the backend runs all strategies, and that deterministic ones give the same sums as the first."""
        if self._inductor:
            for strategy in strategies:
                refuse_halves(strategy)
        if self._sums is not None:
            self._sums.check(strategies)

    def _alike(self, profile: Profile | Costs | None) -> Profile | Costs | None:
        """Return costs restricted to strategies that give the same sums in deterministic mode, else the costs
        unchanged.
        """
        if self._sums is None or profile is None:
            return profile
        if isinstance(profile, Costs):
            return profile.changed(profile=self._sums.alike(profile.profile))
        return self._sums.alike(profile)

    def _iterate(
        self, sequences: Batches, given: Strategy | str | None, purpose: Purpose, divide_by: DivideBy
    ) -> StepReport:
        """Run one iteration on every rank and report on it.

        Raises:
            FloatingPointError: the loss or a gradient is not finite.
        """
        began = time.perf_counter()
        ran = self._run(sequences, given, purpose, divide_by)
        batch, work, outcome = ran.batch, ran.work, ran.outcome
        if not outcome.finite:
            raise FloatingPointError(
                f"loss {outcome.loss:.4g}, gradient norm {outcome.grad_norm:.4g}: not finite, so nothing was updated; "
                "lower the learning rate or clip gradients (max_grad_norm), and look at this mini-batch"
            )
        return StepReport(
            step=self._steps,
            loss=outcome.loss,
            tokens=batch.tokens,
            grad_norm=outcome.grad_norm,
            strategy=str(work.strategy),
            chosen=work.strategy,
            sequences=len(batch.sequences),
            micro_batches=work.assignment.counts,
            seconds=time.perf_counter() - began,
            padding=work.padding,
            planning_s=work.planning.exposed_s,
            planning_hidden_s=work.planning.hidden_s,
            preparing_s=ran.preparing_s,
            expected_s=work.planning.expected_s,
            ranks=outcome.ranks,
            assignment=work.assignment,
        )

    def _run(
        self, sequences: Batches, given: Strategy | str | None, purpose: Purpose, divide_by: DivideBy = "targets"
    ) -> _Ran:
        """Run one iteration on every rank; an error that all ranks raise together is agreed, and not a rank failure."""
        self._holding.begin()
        log.at_step(self._steps + (purpose == "train"))
        began = time.perf_counter()
        self._communications += 1
        trains = purpose == "train"
        coming: Promise | None = None
        if trains:  # even if this step is rejected: the promise is consumed, and the caller must renew it
            coming, self._next = self._next, None
        with self._watch.step(self._communications, self._describe):
            batch, strategy = self._meet(sequences, given, purpose, divide_by)
            work = self._work(batch, strategy, purpose)
            assigned = time.perf_counter()
            self._prepare(work, purpose)
            preparing_s = time.perf_counter() - assigned
            self._session.executor.probe = self._probe if self._probes(purpose) else None
            self._session.executor.beside = self._holding.handover if trains else None
            spans = self.spans if trains else None
            says = functools.partial(self._says, coming)
            divisor, count = batch.divisor(divide_by), len(batch.sequences)
            outcome = self._session.execute(work, purpose, divisor, count, self._update, self._steps + 1, spans, says)
            self._holding.go_over()  # even without an update, after a loss or gradient that is not finite
        if trains:
            self._lasted = time.perf_counter() - began
            if coming is not None and coming.heard(outcome.said) and outcome.finite:
                self._promised = coming
        return _Ran(batch, work, outcome, preparing_s)

    def _probes(self, purpose: Purpose) -> bool:
        """Return whether this rank probes its device: in the first step for a baseline, then regularly when idle."""
        if not self.watched or purpose != "train":
            return False
        assert self._running is not None
        first = self._lasted is None
        idle = not self._session.preparer.get(*self._running).program.roles
        self._probe.most_s = MOST_S if self._lasted is None else min(MOST_S, self._lasted / 2)
        return first or (idle and self._steps % PROBED_EVERY == 0)

    def _meet(
        self, sequences: Batches, given: Strategy | str | None, purpose: Purpose, divide_by: DivideBy
    ) -> tuple[MiniBatch, Strategy | None]:
        """Return the checked mini-batch and strategy once all ranks are about to run the same.

        Raises an agreed error on all ranks if the call is invalid, a background save failed, or ranks differ; also
        `Stopped`.
        """
        promised = self._promised
        if promised is not None:
            if not promised.is_of(sequences, given, divide_by):
                raise ValueError("step: all ranks have promised another mini-batch or strategy; call it with that one")
            self._promised = None
            call, ranks = promised.agreed
        else:
            call = self._checked(sequences, given, purpose, divide_by)
            ranks = self._session.compare(call.mark, self._asked() if purpose == "train" else 0)
        if ranks.unsaved:
            try:
                self._session.saver.wait()
            except Exception as error:
                agreed(error)
                raise
            raise AssertionError("a save in the background fails on all ranks, so waiting for it raises")
        if not ranks.same:
            try:
                self._session.agree("optimizer's settings, such as the learning rate", self._update_settings(purpose))
                own = f"{call.mark:016x}" if call.refused is None else f"refused: {call.refused}"
                self._session.agree("mini-batch, strategy or call", own)
            except ValueError as error:
                raise agreed(error) from call.refused
            raise AssertionError("digests differ, so the agreement fails")
        if call.refused is not None:
            raise agreed(call.refused)
        if ranks.stopping:
            _LOG.info("a rank is asked to stop (%d): the step is not begun", ranks.stopping)
            raise agreed(Stopped(ranks.stopping))
        assert call.batch is not None
        return call.batch, call.strategy

    def _checked(self, sequences: Batches, given: Strategy | str | None, purpose: Purpose, divide_by: DivideBy) -> Call:
        """Check what this rank is about to run; an error becomes part of what ranks compare."""
        batch: MiniBatch | None = None
        strategy: Strategy | None = None
        refused: Exception | None = None
        try:
            if given is not None:
                strategy = strategy_for(given, self.program)
                self.check(strategy, self.world.ranks)
            fields, limits = (self._fields, self._limits) if mode_of(purpose) == purpose else self._read_by_scores
            batch = MiniBatch.of(sequences, self.program.causal, fields, limits)
            batch.divisor(divide_by)
            if self._sums is not None:
                self._sums.check_count(len(batch.sequences))
            if purpose == "train" and self.optimizer is not None:
                check_hooks(self.optimizer)
            self._compiled_state.check()
        except Exception as error:  # of the user's own iterable, too
            refused = error
        # Errors are compared like mini-batches: if all ranks reject the call in the same way, they stay in step.
        text = (
            repr(refused)
            if refused is not None
            else repr((str(strategy), purpose, divide_by, self._update_settings(purpose), self._limited))
        )
        return Call(batch, strategy, refused, digest(text, batch))

    @functools.cached_property
    def _read_by_scores(self) -> tuple[Mapping[str, Field], tuple[Limit, ...]]:
        """The fields that scoring reads, and the limits on their values; without those that only the loss reads."""
        program = self._variants.scoring().program
        return own_fields(program), limits_of(program)

    def _update_settings(self, purpose: Purpose) -> str:
        """Return the hyperparameters of this rank's optimizer if the iteration updates, else ""."""
        return settings_of(self.optimizer) if purpose == "train" else ""

    def _says(self, coming: Promise | None) -> tuple[int, ...]:
        """Return this rank's data about the next step, sent at the commit of the current one."""
        if coming is None:
            return self._session.saying(-1, 0)
        coming.call = self._checked(coming.sequences, coming.strategy, "train", coming.divide_by)
        return self._session.saying(coming.call.mark, self._asked())

    def _asked(self) -> int:
        """Return this rank's reason not to begin the next step (to stop, or to meet other ranks first); 0 if there is
        none.
        """
        member = here()
        called = CALLED if member is not None and member.called else 0
        return max(self.stopping, self.listens() if self.listens is not None else 0, called)

    def _work(self, batch: MiniBatch, strategy: Strategy | None, purpose: Purpose) -> AssignedBatch:
        """Assign a mini-batch that all ranks have agreed on, and pack this rank's part of it."""
        choice = self._chooser.choose(batch.lengths, strategy)
        self.strategies = self._chooser.strategies  # `choose_from` may have changed them on rank 0
        world = self.world
        return packed(
            batch,
            choice.strategy,
            choice.assignment if self._sums is None else choice.assignment.one_by_one,
            world.rank,
            world.device,
            self._several,
            choice.planned,
            self.program.unplaced,
            self._draws(len(batch.sequences), purpose) if self.program.drops else None,
        )

    def _draws(self, count: int, purpose: Purpose) -> Draws:
        """Return the numbers of a mini-batch's sequences, which select the next update's masks."""
        numbers = [-1] * count if mode_of(purpose) == "evaluate" else range(count)
        return Draws(key_of(self.seed, self._steps + 1), numbers)

    def _prepare(self, work: AssignedBatch, purpose: Purpose) -> None:
        """Build this rank's program. If a rank cannot, all raise an agreed error; at this point no message has been
        sent.
        """
        self._running = (work.strategy, work.assignment.counts, purpose)
        self._ran = {number: ran for number, ran in self._ran.items() if number == self._communications - 1}
        self._ran[self._communications] = self._running
        if purpose == "train":
            others = (strategy for strategy in self._recent if strategy != work.strategy)
            self._recent = (work.strategy, *others)[:RECENT]
        first_time = (work.strategy, purpose) not in self._agreed
        if not first_time:
            self._session.preparer.get(*self._running)
            return
        own: ValueError | None = None
        try:
            self._session.preparer.get(*self._running)
            if self._check is not None:
                program = self._variants.for_purpose(purpose).program
                check = self._check if program is self.program else self._check.of(program)
                check.check(work.strategy)
        except Exception as error:  # any error of tracing or compilation
            own = error if isinstance(error, ValueError) else _failed(error, str(work.strategy))
        in_words = own if isinstance(own, Unsupported) or own is None else _failed(own, str(work.strategy))
        first = first_of(self.groups, in_words)
        if first is not None:
            raise agreed(own or first)
        self._agreed.add((work.strategy, purpose))
        _LOG.info("prepared strategy %s (%s) for the first time, on all ranks", work.strategy, purpose)

    def _state(self, keys: frozenset[str]) -> dict[str, Tensor]:
        """Return some keys of the model's state dict as full CPU tensors on rank 0, {} elsewhere."""
        sources = {key: source for key, source in self._model_tensors.items() if key in keys}
        parameters = self._session.gather(self.home.weights, frozenset(sources.values()))
        if self.world.rank:
            return {}
        buffers = {name: buffer.detach().cpu() for name, buffer in self._session.buffers.items()}
        tensors = {**buffers, **parameters}
        state = {key: tensors[source] for key, source in sources.items()}
        self._compiled_state.hand_out(state)
        return state

    def _weights(self, keys: frozenset[str], dtype: torch.dtype, to: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Gather and yield one bucket after another; if the caller leaves its loop, still gather the others."""
        exact = frozenset[str]() if self._shell is None else fp32_keys(self._shell.model)
        first: dict[str, str] = {}  # canonical name -> the first of its keys
        for key, source in self._model_tensors.items():
            if key in keys:
                first.setdefault(source, key)

        def kind(key: str) -> torch.dtype:
            return torch.float32 if key in exact else dtype

        def travels(names: Iterable[str]) -> torch.dtype:
            return torch.float32 if any(first[name] in exact for name in names) else dtype

        def named(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            state = {first[n]: t.to(kind(first[n])) if t.is_floating_point() else t for n, t in tensors.items()}
            yield from published_names(self._shell, state).items()

        groups = self.groups
        buckets = self._session.gather_by_bucket(self.home.weights, frozenset(first), to, travels)
        try:
            while True:
                with own_modes("weights"), self._watch.calling("weights"):
                    tensors = next(buckets, None)
                if tensors is None:
                    break
                yield from named(tensors)
            if self.rank in to:
                yield from named(
                    {name: b.detach().clone() for name, b in self._session.buffers.items() if name in first}
                )
        finally:
            if not groups.closed:
                with own_modes("weights"), self._watch.calling("weights"):
                    for _ in buckets:
                        pass
                self._limited = None

    def _persistent_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that belong to the model's state dict, on the CPU."""
        stored = set(self._model_tensors.values())
        return {name: b.detach().cpu().clone() for name, b in self._session.buffers.items() if name in stored}

    def _describe(self, rank: int, index: int, number: int) -> str:
        """Return the text of an instruction; another rank may be one iteration earlier or later."""
        if self._running is None:
            return ""
        if number > self._communications:
            return f"instruction {index} of the next step"  # which this rank does not know yet
        running = self._ran.get(number, self._running)
        return instruction_text(self._session.preparer.describe(*running, rank).instructions[index])


def _of_least_cut(
    profile: Profile | Costs, among: Callable[[Profile | Costs], tuple[Strategy, ...]]
) -> tuple[Strategy, ...]:
    """Return strategies whose stages are all cut alike, by the least degree that fits, as it also fits fewer ranks.

    Args:
        profile: measurements of all cuts.
        among: returns the best strategies for given measurements, or raises `Unsupported`.
    """
    measured = profile.profile if isinstance(profile, Costs) else profile
    refused: Unsupported | None = None
    for cut in measured.cuts:
        alike = measured.of_cut(*cut)
        try:
            return among(profile.changed(profile=alike) if isinstance(profile, Costs) else alike)
        except Unsupported as error:
            refused = refused or error
    raise refused or Unsupported("nothing was measured", where="compile", remedy="measure: hydragraph profile")


def _failed(error: Exception, strategy: str) -> Unsupported:
    """Return an error, with a message short enough to send to every rank, for a strategy that cannot be prepared."""
    sentence = (str(error).splitlines() or [""])[0]
    refusal = Unsupported(
        f"it cannot be compiled ({type(error).__name__}: {sentence})",
        where=f"strategy {strategy}",
        remedy="choose another strategy; the cause is above on the rank that failed",
    )
    refusal.__cause__ = error
    return refusal


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Map every key of the model's state dict to the canonical parameter or buffer that holds its value."""
    first = {id(p): n for n, p in model.named_parameters()}
    names = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    return {key: names.get(key, key) for key in model.state_dict()}


def _weights_hash(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.named_parameters():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.detach().float().numpy()).data)
    return digest.hexdigest()
