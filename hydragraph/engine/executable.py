"""Compiled model on one rank: the object that a training script calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.checkpoint.weights import pretrained
from hydragraph.checkpoint.weights.pretrained_directory import check as check_shell
from hydragraph.cluster.agreement import together
from hydragraph.cluster.failure.rank_watch import CLOSED
from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine.automatic_plan import PlanningSubject, measure_newcomers, plan_automatically, state_bytes_of
from hydragraph.engine.candidate_strategies import request_of, strategy_for
from hydragraph.engine.collective_call import ENDS, Restriction, collective
from hydragraph.engine.membership import Membership
from hydragraph.engine.state_transfer import Restore, keep, read
from hydragraph.engine.step_agreement import AgreedStep, Inputs
from hydragraph.engine.step_report import StepReport
from hydragraph.engine.weight_export import PublishedWeights, persistent_buffers, state_dict
from hydragraph.errors import Unsupported
from hydragraph.frontend.mini_batch import DivideBy
from hydragraph.frontend.peft_adapters import switchable_parameters
from hydragraph.planner.request import PlanRequest
from hydragraph.private.torch_modes import own_modes
from hydragraph.runtime.home_state import zeroed
from hydragraph.spec.argument_types import typed
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.padded import Batches
from hydragraph.spec.strategy import Strategy

_LOG = logging.getLogger(__name__)

Measurements = tuple[Profile, Cluster, Sequence[int] | None, Sequence[Sequence[int]] | None]


class Executable(Membership):
    """Compiled model on one rank, created by `compile`.

    Attributes:
        strategies: strategies that a step may choose.
        given: argument `strategy` of `compile`.
        wanted_home: argument `home` of `compile`.
        measured_seats: seats (initial ranks) of devices in `given_profile`; default: 0, 1, ...
        spans: list that receives instructions' times, or None.
        watched: whether idle ranks measure their devices' speed; equal on all ranks.
        stopping: a positive number makes the next `step` raise `Stopped` on all ranks.
        listens: function called at each agreement; a positive result acts like `stopping`.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an executable cannot be pickled or copied: call exe.save")

    @collective("step")
    def step(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> StepReport:
        """Train on one global mini-batch, identical on every rank.

        Args:
            sequences: 1-D tensors or lists of token ids; or mappings with input_ids, labels or shift_labels, and a
                tensor [tokens, ...] per custom field of compile's example=. The loss ignores labels of -100. Causal
                models shift labels; shift_labels are already aligned with the predictions. A mapping may hold a
                right-padded batch [sequences, tokens] with attention_mask.
            strategy: strategy or its text; by default, the best of those given to `compile`. A change moves no
                optimizer state.
            divide_by: divisor of the summed losses: the number of "targets" or "sequences", or a given number.

        Raises:
            Unsupported: no optimizer was given, or the strategy does not fit the model.
            FloatingPointError: the loss or a gradient is not finite; weights are unchanged.
            RankFailure: another rank failed; weights are unchanged.
            Stopped: a rank has set `stopping`.
            ValueError: the mini-batch is malformed, differs between ranks, or is not the promised mini-batch.
        """
        if self.optimizer is None:
            raise Unsupported(
                "the executable was compiled without an optimizer", where="step", remedy="pass optimizer= to compile"
            )
        return self._iterate(Inputs(sequences, strategy, divide_by), "train")

    def announce(self, sequences: Batches) -> None:
        """Plan a later mini-batch while earlier steps run; optional, only on rank 0."""
        self._check_open("announce")
        if self._chooser.plans:
            self._chooser.announce(self._compiled.mini_batch(sequences).lengths)

    def promise(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> None:
        """Promise the arguments of the step after the next; optional, and equal on all ranks.

        Ranks agree on the promised step during the preceding step, which saves a synchronization. A rejected preceding
        step discards the promise. Once ranks agree, only `close`, `leave` and `move` may be called before the promised
        step, and a request to stop takes effect one step later.

        Args:
            sequences: the object that `step` will receive, unchanged and iterable twice.
        """
        self._check_open("promise")
        self._next = AgreedStep(Inputs(sequences, strategy, divide_by)) if self.world.ranks > 1 else None

    def choose_from(
        self, strategies: Sequence[Strategy], request: PlanRequest, static: int | None = None, ready_first: bool = False
    ) -> None:
        """Choose from other strategies, starting with the next step; call this only on rank 0.

        Args:
            request: costs of the strategies' pipelines, in the order of `strategies`.
            static: index of the only strategy to use, or None to choose at every step.
            ready_first: keep the current strategies until the new ones are compiled and checked in the background (see
                `changing`, `change_refused`). Otherwise, and always with Inductor, a strategy's first step compiles it.

        Raises:
            Unsupported: a strategy does not fit, this rank does not plan, or the previous call's strategies have just
                become ready.
        """
        if not self._chooser.plans:
            raise Unsupported(
                "this rank does not plan",
                where="choose_from",
                remedy="compile with a profile or several strategies, and call choose_from only on rank 0",
            )
        for strategy in strategies:
            self.check(strategy, self.world.ranks)
        self._chooser.change(tuple(strategies), request, static, ready_first)

    @property
    def changing(self) -> bool:
        """On rank 0, whether `choose_from`'s last strategies are not in use yet."""
        return self._chooser.changing

    @property
    def static(self) -> int | None:
        """On rank 0, the index of the only strategy, or None if each step chooses."""
        return self._chooser.static

    @property
    def change_refused(self) -> str:
        """On rank 0, the reason why `choose_from`'s last strategies cannot run, or ""."""
        return self._chooser.refused

    def check(self, strategy: Strategy | str, ranks: int) -> None:
        """Check that a strategy fits the model, the ranks and the deterministic mode.

        Raises:
            ValueError: the strategy does not fit (`Unsupported`: an unsupported feature).
        """
        self._compiled.check_strategy(strategy_for(strategy, self.program), ranks)

    @property
    def measured(self) -> Measurements | None:
        """Device measurements made for "auto", or None."""
        first = self._first_profile
        if not self._measures or not isinstance(first, Costs):
            return None
        return first.profile, first.cluster, self.measured_seats, self.planning.lengths

    def adopt(self, measured: Measurements | None) -> None:
        """Use the measurements of other ranks if this rank has no costs."""
        if self._first_profile is None and measured is not None:
            profile, cluster, self.measured_seats, lengths = measured
            self._measures = True
            element = state_bytes_of(self.program, self._optimizer)
            self._first_profile = Costs(profile, cluster, home=self.wanted_home, state_bytes=element)
            self.planning = replace(self.planning, lengths=self.planning.lengths or lengths)

    def measure(self, world: World, seats: Sequence[int]) -> None:
        """Measure all devices again; all ranks must call this."""
        planning = plan_automatically(self._subject, world, self.planning, preplanned=False)
        self._first_profile, self.measured_seats, self._measures = planning.profile, tuple(seats), True
        self.planning = replace(self.planning, lengths=planning.lengths)

    def measure_newcomers(self, world: World, seats: Sequence[int], newcomers: Sequence[int]) -> bool:
        """Measure devices again if a newcomer's type differs from the replaced device's.

        All ranks must call this. Return whether devices were measured.
        """
        # before: seats of `known`'s devices; types: their assumed types by
        #   rank, "" for unknown seats
        known = self._first_profile
        assert isinstance(known, Costs), "call `measure_newcomers` after `adopt`"
        before = list(self.measured_seats or range(known.ranks))
        types = [known.cluster.type_of(before.index(seat)) if seat in before else "" for seat in seats]
        costs = measure_newcomers(self._subject, world, self.planning, known, types, newcomers)
        if costs is not None:
            self._first_profile, self.measured_seats = costs, tuple(seats)
        return costs is not None

    @property
    def _subject(self) -> PlanningSubject:
        compiled = self._compiled
        return PlanningSubject.of(self.program, compiled.buffers, compiled.backend, self.wanted_home, self._optimizer)

    @property
    def explanation(self) -> tuple[str, ...]:
        """Description of devices, plan and alternatives, for "auto" without a profile."""
        return self.planning.explanation

    @property
    def request(self) -> PlanRequest:
        """Costs of the current strategies."""
        return request_of(self.strategies, self.planning, self.world.ranks, self.owners)

    @collective("evaluate")
    def evaluate(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> StepReport:
        """Report a mini-batch's loss without changing state; arguments are as for `step`."""
        return self._iterate(Inputs(sequences, strategy, divide_by), "evaluate")

    @overload
    def score(
        self, sequences: Batches, entropy: Literal[False] = False, strategy: Strategy | str | None = None
    ) -> Tensor: ...

    @overload
    def score(
        self, sequences: Batches, entropy: Literal[True], strategy: Strategy | str | None = None
    ) -> tuple[Tensor, Tensor]: ...

    # The decorated method accepts `self` only by position
    @collective("score")
    def score(
        self, sequences: Batches, entropy: bool = False, strategy: Strategy | str | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the log-probability of each sequence, summed over its targets, without changing state.

        Args:
            sequences: as for `step`, without fields that only the loss reads.
            entropy: also return the predictions' entropy in nats, summed over targets; this materializes a
                micro-batch's logits.

        Returns:
            One fp32 value per sequence, in order, on every rank's CPU; 0 without a target. With `entropy`, two tensors:
                log-probabilities and entropies.

        Raises:
            Unsupported: the loss has no log-probability per token.
        """
        _, _, outcome, _ = self._run(Inputs(sequences, strategy), "score_entropy" if entropy else "score")
        scores = outcome.scores.float()
        return (scores[:, 0], scores[:, 1]) if entropy else scores[:, 0]

    @collective("gradients")
    def gradients(
        self, sequences: Batches, strategy: Strategy | str | None = None, divide_by: DivideBy = "targets"
    ) -> dict[str, Tensor]:
        """Return full fp32 gradients by parameter name on rank 0 ({} elsewhere); arguments are as for `step`.

        Frozen and unused parameters have no gradient.
        """
        self._iterate(Inputs(sequences, strategy, divide_by), "gradients")
        return self._session.gather(self.home.gradients)

    @collective("full_state_dict")
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return `model.state_dict()` as full CPU tensors on rank 0 ({} elsewhere); all ranks must call this.

        It includes tied aliases and persistent buffers, but no extra state; weights are fp32.
        """
        self._transition.begin()
        return state_dict(self._compiled, self._session)

    @typed("to")
    @collective("weights")
    def weights(self, dtype: torch.dtype = torch.float32, to: Sequence[int] = (0,)) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights as servers such as vLLM load them, with one block in memory at a time.

        All ranks must call this method, and the ranks in `to` must finish the loop before any rank makes another call::

            for name, tensor in exe.weights(dtype=torch.bfloat16):
                ...

        Args:
            dtype: dtype of floating-point tensors that the model does not keep in fp32.
            to: ranks that get the weights; on other ranks, the loop is empty.

        Returns:
            Names and tensors as in `save_pretrained`, on this rank's device. A tied weight appears once; persistent
                buffers come last.

        Raises:
            ValueError: `to` has a repeated or unknown rank, or `dtype` is not floating.
            Unsupported: a peft model has several adapters.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"weights: dtype {dtype!r} is not a floating dtype; give torch.bfloat16 or torch.float32")
        if not to or len(set(to)) < len(to) or not set(to) <= set(range(self.ranks)):
            raise ValueError(f"weights: to={tuple(to)} must list different ranks from 0 to {self.ranks - 1}")
        self.groups.same_everywhere("call weights(dtype, to)", f"{dtype} {sorted(to)}")
        weights = PublishedWeights(self._compiled, self._session, dtype)
        self._transition.begin()
        pieces = self._weights(weights, to)
        # `finally` runs only if the generator has begun
        next(pieces)
        if self.rank not in to:
            return iter(list(pieces))
        # Buckets are gathered during the loop, so other calls are refused until it ends.
        self._restricted = Restriction(
            (*ENDS, "move"), "a loop over weights() has not ended; first finish this loop, or leave it with break"
        )
        return pieces

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Compute `score` and `evaluate` without a peft model's adapters, like `disable_adapter`.

        The result is a reference model for DPO or a KL penalty. All ranks must enter the context::

            with exe.adapter_off():
                reference = exe.score(sequences)

        Raises:
            Unsupported: the model has no adapters, or training changes more than LoRA's matrices.
        """
        with zeroed(self._switchable()):
            self._restricted = Restriction(
                ("score", "evaluate", *ENDS), "adapters are off; leave `with exe.adapter_off()` before other calls"
            )
            try:
                yield
            finally:
                self._restricted = None

    @collective("adapter_off")
    def _switchable(self) -> list[Tensor]:
        names = switchable_parameters(None if self._compiled.shell is None else self._compiled.shell.model)
        self._transition.begin()
        if self._transition.reshard is not None:
            self._transition.reshard.settle()
        return [self.home.parameters[name] for name in names]

    @collective("save_pretrained")
    def save_pretrained(self, directory: str | Path, merged: bool = False) -> None:
        """Write a Hugging Face directory on rank 0, in fp32; all ranks must call this.

        Args:
            directory: created if missing; only rank 0 accesses it.
            merged: write a peft model's base with merged adapters, not only the adapters.

        Raises:
            Unsupported: the model is not a transformers model, or has no adapters to merge.
        """
        self._transition.begin()
        shell = check_shell(self._compiled.shell, merged)
        state = state_dict(self._compiled, self._session, shell.keys(merged))

        def write() -> None:
            if self.world.rank == 0:
                shell.write(state, Path(directory), merged)

        together(self.groups, f"write {directory}", write)

    @collective("save")
    def save(self, path: str | Path, extra: dict[str, Any] | None = None, asynchronous: bool = False) -> None:
        """Write weights and optimizer state as a checkpoint for any strategy and number of ranks.

        Args:
            path: a directory visible to all ranks.
            extra: plain data that `load` returns.
            asynchronous: write in the background, after copying this rank's shards to CPU memory. The next `save`,
                `load`, `wait_saved` or `close`, and the end of the process, wait for the write. If the write fails, the
                first of these calls or the next step raises its error on every rank.
        """
        self._transition.begin()
        changed = self._compiled.state.changed_weights()
        if changed:
            _LOG.warning("save: %s; the checkpoint contains the trained state, but not this change", changed)
        self._session.saver.wait()
        save = self._session.saver.start if asynchronous else save_and_load.save
        buffers = persistent_buffers(self._compiled, self._session)
        entry = {"steps": self.steps, "user": extra or {}, save_and_load.BUFFERS: buffers}
        save(Path(path), self.home, self.optimizer, entry, self.groups)

    @typed("pieces")
    @collective("keep")
    def keep(self, pieces: Pieces, extra: dict[str, Any] | None = None) -> tuple[str, ...]:
        """Store a checkpoint in pieces for `move` and `load`; all ranks must call this.

        Training waits only for the copy to CPU memory. Locations still being written are skipped.

        Args:
            pieces: locations of this rank's pieces; the same on all ranks.
            extra: plain data returned after a restore.

        Returns:
            Errors of earlier writes, whose checkpoints are incomplete; the same on all ranks.
        """
        self._transition.begin()
        return keep(self._session, pieces, extra or {}, persistent_buffers(self._compiled, self._session))

    @collective("wait_saved")
    def wait_saved(self) -> None:
        """Wait until an asynchronous `save` has completed; raise its error on every rank."""
        self._session.saver.wait()

    @collective("load")
    def load(self, path: Restore) -> dict[str, Any]:
        """Read a checkpoint, and return its `extra`; all ranks must call this.

        Args:
            path: `save`'s directory, `keep`'s pieces, or a pair (pieces, directory) to read the newer.
        """
        self._session.saver.wait()
        self._stop_handover()
        brought = read(self._session, path, persistent_buffers(self._compiled, self._session))
        self._transition.loaded()
        self._take_buffers(brought)
        return dict(brought.extra)

    @collective("load_pretrained")
    def load_pretrained(self, path: str | Path) -> None:
        """Read weights, but no optimizer state, from a Hugging Face directory of safetensors files.

        Raises:
            Unsupported: the model has adapters.
        """
        if self._compiled.adapted:
            raise Unsupported(
                "the model has adapters, so its weights are named differently from the base model's",
                where="load_pretrained",
                remedy="load weights before you compile, with from_pretrained of the base model or of peft",
            )
        self._stop_handover()
        shell = self._compiled.shell
        names = pretrained.TensorNames.of(None if shell is None else shell.model, self._compiled.tensors)
        pretrained.load(Path(path), self.home, self._session.buffers, names, self.groups)
        self._transition.loaded()

    def close(self) -> None:
        """Wait for saves and close the communicators; all ranks must call this, even after a failure."""
        self._closed = True
        if self._transition.held is None:
            return
        try:
            self._chooser.close()
            with self._calling("close"):
                self._stop_handover()
                self._session.saver.close()
        finally:
            self._watch.rest(f"{CLOSED} after step {self.steps}")
            self.groups.close()

    @property
    def strategy(self) -> Strategy:
        """The first of `strategies`."""
        return self.strategies[0]

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.world.rank

    @property
    def ranks(self) -> int:
        """World size."""
        return self.world.ranks

    @property
    def decision(self) -> str:
        """On rank 0, a sentence on whether each step chooses a strategy; "" if undecided."""
        return self._chooser.decision

    def _weights(self, weights: PublishedWeights, to: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield an empty entry, then weights by bucket; gather all buckets even if the caller stops early."""
        groups = self.groups
        buckets = weights.buckets(to)
        try:
            yield "", torch.empty(0)
            while True:
                if groups.closed:
                    raise ValueError("weights: the executable was closed in this loop; leave the loop before close()")
                # Each bucket is its own collective call: the caller may take any time
                # between buckets.
                with own_modes("weights"), self._watch.calling("weights"):
                    tensors = next(buckets, None)
                if tensors is None:
                    break
                yield from weights.published(tensors).items()
            if self.rank in to:
                yield from weights.published(weights.buffers).items()
        finally:
            self._restricted = None
            if not groups.closed:
                with own_modes("weights"), self._watch.calling("weights"):
                    for _ in buckets:
                        pass
