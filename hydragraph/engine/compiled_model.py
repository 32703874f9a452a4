"""Rank-independent part of an executable."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hydragraph.checkpoint.weights.pretrained_directory import MetaModel
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.time_limits import PROGRESS_S
from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.errors import Unsupported
from hydragraph.frontend.check.narrow_model import CheckedModel, LibraryModel, has_large_blocks
from hydragraph.frontend.check.stage_check import StageCheck
from hydragraph.frontend.compiled_folder.load import CompiledFolder
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.frontend.compiled_state import CompiledState
from hydragraph.frontend.loss_module import loss_buffers
from hydragraph.frontend.meta_initialiser import initial_buffers, initial_parameters, is_meta
from hydragraph.frontend.mini_batch import AssignedBatch, MiniBatch, PlanningTimes, packed
from hydragraph.frontend.packed_batch import DropoutNumbers
from hydragraph.frontend.packed_inputs import Loss, own_fields, token_cross_entropy
from hydragraph.frontend.peft_adapters import is_peft
from hydragraph.ir.program import Program
from hydragraph.ir.program_outline import Purpose, mode_of
from hydragraph.kernels.philox import key_of
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.passes.compile_with_inductor import choose_backend, refuse_halves
from hydragraph.passes.find_field_ranges import field_ranges_of
from hydragraph.passes.variants import Variants
from hydragraph.runtime.deterministic_sums import Deterministic
from hydragraph.runtime.home_state import HomeState
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.field_ranges import FieldRange
from hydragraph.spec.padded import Batches
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.workload import Field
from hydragraph.version import __version__


@dataclass(frozen=True, eq=False)
class ExecutableOptions:
    """Options documented by `compile`.

    Attributes:
        check: result of `frontend.check.check_once.mode_of`.
    """

    backend: str | None = None
    deterministic: bool = False
    loss: Loss | None = None
    seed: int = 0
    max_grad_norm: float | None = None
    progress_s: float = PROGRESS_S
    blocks: str | None = None
    check: str = "off"
    library: CompiledFolder | None = None
    variants: Variants | None = None


class CompiledModel:
    """Captured model in one process.

    Attributes:
        tensors: canonical name of each state-dict key.
        shell: the model without weights; None if not from transformers.
        check: checker of new strategies' graphs, or None if this rank checks none.
        state: detector of the user's later changes to the model.
    """

    def __init__(self, model: nn.Module, program: Program, world: World, options: ExecutableOptions) -> None:
        library, loss, check = options.library, options.loss, options.check
        backend = choose_backend(options.backend, world.device)
        inductor = backend == "inductor"
        self.sums = Deterministic.begin(world.device, backend) if options.deterministic else None
        self.program = program
        self.seed = options.seed
        self.max_grad_norm = options.max_grad_norm
        self.tensors = tensor_names(model)
        self.shell = MetaModel.of(model)
        self.adapted = is_peft(model)
        self.backend = backend
        self._library = library
        self._fields = own_fields(program)
        self._limits = field_ranges_of(program)
        self._head = program.templates[program.blocks[-1].template]
        buffers = initial_buffers(model) | loss_buffers(loss)
        self.check: StageCheck | None = None
        # One rank per machine checks graphs for all.
        if check == "full" and not world.local_rank:
            self.check = StageCheck(program, buffers, inductor, library=library)
        elif check != "off" and not world.local_rank:
            passed = library.manifest.check.stages if library is not None else None
            subject = CheckedModel(model, program, loss or token_cross_entropy, options.blocks)
            library_model = LibraryModel.of(subject) if has_large_blocks(program) else None
            self.check = StageCheck(program, buffers, inductor, passed=passed, model=library_model)
        variants = options.variants
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
        # Another process may have compiled variants for another GPU.
        self.variants = variants.on(world.device) if variants.portable else variants
        # Copied, because `load` writes to buffers.
        self.buffers = {name: buffer.to(world.device, copy=True) for name, buffer in buffers.items()}
        self.state = CompiledState(model, loss, self.buffers)
        self._torch_seed = torch.initial_seed()

    def initial(self, model: nn.Module, blocks: str | None) -> Callable[[], Iterable[Mapping[str, Tensor]]] | None:
        return functools.partial(initial_parameters, model, self._torch_seed, blocks) if is_meta(model) else None

    def fill(self, model: nn.Module, groups: Groups, home: HomeState) -> None:
        """Check that ranks have equal weights (for a meta model, equal seeds), and copy this rank's part to `home`."""
        # Equal seeds give equal weights, so compare seeds.
        if is_meta(model):
            groups.same_everywhere("random seed (torch.manual_seed)", str(self._torch_seed))
        else:
            groups.same_everywhere("weights", hash_of(dict(model.named_parameters())))
            groups.same_everywhere("buffers of the model or the loss", hash_of(self.buffers))
            home.fill(dict(model.named_parameters()))

    def identity(self, strategies: Sequence[Strategy]) -> dict[str, str]:
        return {
            "version of hydragraph or torch": f"hydragraph {__version__}, torch {torch.__version__}",
            "head or loss": hashlib.blake2b(str(self._head.graph).encode(), digest_size=8).hexdigest(),
            "program": self.program.fingerprint,
            "compiled folder": self._library.digest if self._library is not None else "",
            "strategies": str(list(map(str, strategies))),
            "deterministic": "" if self.sums is None else str(self.sums),
            "max_grad_norm": str(self.max_grad_norm),
            "seed": str(self.seed),
            "window and push_dtype": f"{self.program.window}, {self.program.push_dtype}",
        }

    def check_strategy(self, strategy: Strategy, ranks: int) -> None:
        check_strategy(self.program, strategy, ranks)
        self.check_modes([strategy])

    def check_modes(self, strategies: Sequence[Strategy]) -> None:
        check_modes(strategies, self.backend, self.sums)

    def priced(self, profile: Profile | Costs | None) -> Profile | Costs | None:
        if isinstance(profile, Costs):
            profile = profile.changed(push_itemsize=self.program.push_dtype.itemsize)
        if self.sums is None or profile is None:
            return profile
        if isinstance(profile, Costs):
            return profile.changed(profile=self.sums.alike(profile.profile))
        return self.sums.alike(profile)

    def mini_batch(self, sequences: Batches, purpose: Purpose = "train") -> MiniBatch:
        """Validate a mini-batch; scoring ignores fields that only the loss reads."""
        scores = mode_of(purpose) != purpose
        fields, limits = self._read_by_scores if scores else (self._fields, self._limits)
        return MiniBatch.of(sequences, self.program.causal, fields, limits, without_targets=scores)

    @functools.cached_property
    def _read_by_scores(self) -> tuple[Mapping[str, Field], tuple[FieldRange, ...]]:
        program = self.variants.scoring().program
        return own_fields(program), field_ranges_of(program)

    def packed(
        self,
        batch: MiniBatch,
        strategy: Strategy,
        assignment: Assignment,
        planned: PlanningTimes,
        world: World,
        purpose: Purpose,
        update: int,
    ) -> AssignedBatch:
        """Pack this rank's micro-batches; `update` selects dropout masks."""
        draws: DropoutNumbers | None = None
        if self.program.drops:
            count = len(batch.sequences)
            # Dropout masks depend on the sequence's place in the mini-batch, not its
            # rank; -1 means no dropout.
            numbers = [-1] * count if mode_of(purpose) == "evaluate" else range(count)
            draws = DropoutNumbers(key_of(self.seed, update), numbers)
        if self.sums is not None:
            assignment = assignment.one_by_one
        given = (batch, strategy, assignment, world.rank, world.device, "cu_seqlens" in self._head.inputs)
        return packed(*given, planned, self.program.unplaced, draws)


def check_modes(strategies: Sequence[Strategy], backend: str, sums: Deterministic | None) -> None:
    if backend == "inductor":
        for strategy in strategies:
            refuse_halves(strategy)
    if sums is not None:
        sums.check(strategies)


def of_least_cut(
    profile: Profile | Costs, among: Callable[[Profile | Costs], tuple[Strategy, ...]]
) -> tuple[Strategy, ...]:
    """Return strategies whose stages all have the same tensor-parallel degree and sequence parallelism.

    The degree is the smallest that works, because it needs the fewest ranks.
    """
    measured = profile.profile if isinstance(profile, Costs) else profile
    refused: Unsupported | None = None
    for cut in measured.cuts:
        alike = measured.of_cut(*cut)
        try:
            return among(profile.changed(profile=alike) if isinstance(profile, Costs) else alike)
        except Unsupported as error:
            refused = refused or error
    raise refused or Unsupported("the profile is empty", where="compile", remedy="run hydragraph profile")


def tensor_names(model: nn.Module) -> dict[str, str]:
    # first: parameter's id -> its first name; names: every name, also tied
    #   ones -> that name
    first = {id(p): n for n, p in model.named_parameters()}
    names = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    names |= {name: name for name, _ in model.named_buffers(remove_duplicate=False)}
    # Without extra state
    return {key: names[key] for key in model.state_dict() if key in names}


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
