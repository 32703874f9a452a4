"""Public functions; the only module that combines capture, passes, planner and runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hydragraph.cluster.failure.heartbeat_board import PROGRESS_S
from hydragraph.cluster.launch import World, apart, join
from hydragraph.cluster.once_per_node import once_per_machine
from hydragraph.cluster.processes.restart_cache import kept
from hydragraph.cluster.rendezvous.member import here
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.timeline import Timeline
from hydragraph.cost.timeline import simulate as simulate_programs
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.engine.automatic_plan import Subject, plan_automatically
from hydragraph.engine.candidate_strategies import Choices, Planning, candidates_of
from hydragraph.engine.executable import Executable
from hydragraph.engine.recovery import survive
from hydragraph.frontend import capture as frontend
from hydragraph.frontend.check.check_once import check_here, check_on_hosts, mode_of
from hydragraph.frontend.check.numeric_check import CheckedModel
from hydragraph.frontend.compiled_folder.load import load
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.frontend.loss_module import check_loss_of, loss_buffers
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.frontend.packed_inputs import Loss, token_cross_entropy
from hydragraph.ir.program import Program
from hydragraph.ir.program_outline import Mode
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.shared_programs import SharedPrograms
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.passes.compile_with_inductor import choose_backend
from hydragraph.passes.field_limits import limits_of
from hydragraph.passes.pipeline import shared_programs
from hydragraph.passes.variants import Variants
from hydragraph.planner.policy import Policy
from hydragraph.planner.request import get_ready
from hydragraph.private.torch_modes import own_modes
from hydragraph.runtime.elementwise import OptimizerFactory
from hydragraph.runtime.home_state import check_factory
from hydragraph.runtime.profile_measurement import MeasuredModel
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.home import AUTO, Home, home_of
from hydragraph.spec.strategy import Strategy

T = TypeVar("T")


@own_modes("capture")
def capture(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    example: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    blocks: str | None = None,
    check: str | bool = "auto",
    compiled: str | Path | None = None,
) -> Program:
    """Trace a model once into blocks with pull, push and communicate placeholders, and check the result by numbers.

    Args:
        model, dtype, example, loss, blocks: as for `hydragraph.frontend.capture.capture`.
        check: "auto" compares packed sequences in the captured graphs with the model on each sequence alone (loss and
            every gradient), for each structurally distinct block once; "full" checks every block; "off" skips the
            check.
        compiled: a folder written by `hydragraph compile`; the program is read from it instead of being traced.

    Raises:
        Unsupported: the model cannot be captured, or the captured graphs differ from it.
        Refused: the folder is damaged, stale, or belongs to another model (a ValueError).
    """
    subject = partial(CheckedModel, model, loss=loss or token_cross_entropy, blocks=blocks, example=example)
    if compiled is not None:
        library = load(compiled, model_record(model, loss, example, blocks), dtype)
        if not library.checked(mode_of(check)):
            check_here(subject(library.program), check)
        return library.program
    program = frontend.capture(model, dtype, example, loss, blocks)
    check_here(subject(program), check)
    return program


@own_modes("compile")
def compile(
    model: nn.Module,
    strategy: Choices,
    optimizer: OptimizerFactory | None = None,
    max_grad_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    loss: Loss | None = None,
    example: Mapping[str, Tensor] | None = None,
    blocks: str | None = None,
    profile: Profile | Costs | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
    policy: Policy | None = None,
    backend: str | None = None,
    program: Program | None = None,
    check: str | bool = "auto",
    progress_s: float = PROGRESS_S,
    home: Home | str | None = None,
    compiled: str | Path | None = None,
    trust: bool = False,
    joining: bool = False,
    deterministic: bool = False,
    window: int | None = None,
    push_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Executable:
    """Compile a model for training under a strategy that every step may change.

    Joins the process group described by the launcher's environment, uses an existing one, or runs as a single process.

    Args:
        model: an unmodified Hugging Face model, or your own module, with weights on the CPU, the same on every rank. A
            model on the meta device takes no memory: its weights come from `load`, or, at the first step, from its own
            initialiser, block by block and seeded by `torch.manual_seed`.
        strategy: which devices compute what, as a Strategy or its text ("<tp2,pp1> + 2*<tp1,pp1>"); a list of them,
            from which every step picks the one expected to finish first; or "auto", which proposes strategies for the
            data (it needs a profile and lengths).
        optimizer: called on every rank with one (name, 1-D fp32 tensor) pair per parameter in model order; the tensor
            has 0 elements if this rank owns no part of the parameter. Returns a torch.optim optimizer. It is called
            again when `Executable.move` moves state, and, if it makes parameter groups, with tensors of whole shapes,
            to check that it makes the same groups. None: no training.
        max_grad_norm: clip gradients to this global norm.
        dtype: compute dtype; master weights and optimizer state are fp32.
        device: "cpu" or "cuda"; default: a GPU if available.
        loss: takes the model's outputs and the packed batch, and returns the loss summed over targets (positions whose
            label is not -100); a step divides it by the number of targets of the global mini-batch.
        example, blocks: for custom modules and fields; see `hydragraph.capture`.
        profile: measurements of `hydragraph profile` on this hardware; or the costs that a plan was made with (`plan`),
            if devices differ by type or by their current speed: pipelines then get sequences by their speed. Without
            either, candidates are compared by rough costs.
        lengths: sequence lengths of sample mini-batches. "auto" proposes strategies for them, and they decide whether
            choosing a strategy every step is worthwhile (`Executable.decision`).
        policy: how iterations are planned.
        backend: "inductor" compiles the graphs between communications, "eager" runs them operator by operator; None:
            Inductor on CUDA, eager elsewhere.
        program: an earlier result of `capture` for this model or an equal one; skips the capture. `example`, `loss`,
            `dtype` and the check against the model are then those of that capture.
        check: check of the captured graphs, made by one rank of each host for all its ranks; see `hydragraph.capture`.
            Unless "off", the graphs that ranks run under a strategy (cut, split by tokens, recomputed) are also
            compared with whole blocks before its first step.
        progress_s: after this many seconds in which no rank makes progress while some wait for others, all ranks raise
            and write their stacks to stderr. Choose more than the longest instruction, or the longest pause between
            steps, takes.
        home: which rank owns how much of the weights and optimizer state, and whether a second rank owns it too; an
            object or its text: "3,1 copies=2", "equal" shares of all ranks, "stages" for the ranks that compute a
            block, or "auto" for the owners that exchange least within the ranks' memory. None: "auto".
        compiled: a folder written by `hydragraph compile`, used instead of capturing; checks made when it was written
            are not repeated. Missing graphs are compiled here and logged.
        trust: also load Inductor's code from that folder. This is executable code: it can do anything that you may.
        joining: for a process that will join ranks that already train: it communicates with no other rank yet, has no
            weights, and joins through `Executable.move`. Pass all other arguments as those ranks did, and the model on
            the meta device. A process that a launch with `elastic=` starts later joins automatically, unless this is
            given.
        deterministic: losses, gradients and weights have the same bits for all pipelines, micro-batches, ranks and
            homes: sequences are computed one by one, and their gradients are summed exactly. Strategies then have one
            tensor-parallel degree for all stages; see docs/deterministic.md.
        window: maximum bytes of fp32 gradients that a rank may have in flight; also limits weights in flight to the
            same number of elements. One bucket always passes. Default: two of the largest blocks.
        push_dtype: dtype in which gradients travel to their owners; `torch.bfloat16` halves the bytes. Each rank rounds
            its sum over micro-batches once; owners sum and store in fp32. Cannot be combined with `deterministic`.
        seed: seed of dropout, the same on every rank. A mask depends on it, the number of the update, the call in the
            model, the number of the sequence in its mini-batch, position and feature, but not on the strategy.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `program` belongs to another model, or `home` does not fit the ranks or the model.
        Refused: the folder is damaged, stale, or belongs to another model (a ValueError).
        Unsupported: the model cannot be captured or trained.
        RankFailure: another rank failed meanwhile.
    """
    frontend.check_model(model, "compile")
    check_factory(optimizer)
    if window is not None and window < 0:
        raise ValueError(f"compile: window is {window}: give bytes, or None for two of the largest blocks")
    if push_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"compile: push_dtype is {push_dtype}: give torch.float32 or torch.bfloat16")
    if deterministic and push_dtype != torch.float32:
        raise ValueError(
            f"compile: push_dtype {push_dtype} rounds each rank's sum, which depends on the ranks there are: leave it "
            "out with deterministic"
        )
    if type(seed) is not int:
        raise ValueError(f"compile: seed is {seed!r}: give an integer")
    if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and max_grad_norm >= 0):
        raise ValueError(
            f"compile: max_grad_norm is {max_grad_norm!r}: give a number of at least 0, or None for no clipping"
        )
    owners = home_of(home)
    member = here()
    late = member is not None and not member.generation.number
    backend = "eager" if deterministic and backend is None else backend
    mode, world = mode_of(check), apart(device) if joining or late else join(device)
    world.watch.progress_s = progress_s
    subject = partial(CheckedModel, model, loss=loss or token_cross_entropy, blocks=blocks, example=example)
    library = None
    with world.watch.calling("compile"):
        variants: Variants | None = None
        if compiled is not None:
            if program is not None:
                raise ValueError("compile: a program and a compiled folder were given, and either stands for a capture")
            record = model_record(model, loss, example, blocks)
            library = _on_all(world, lambda: load(compiled, record, dtype, world.ranks, trust))
            program = library.program
            if not library.checked(mode):
                check_on_hosts(subject(program), check, world)
        elif program is None:

            def captured() -> tuple[Program, Variants | None]:
                made = frontend.capture(model, dtype, example, loss, blocks)
                check_here(subject(made), check)
                return made, _compiled_for_all(made, strategy, world, backend)

            key = _key(model, strategy, dtype, backend, mode, example, loss, blocks)
            # Rank 0 plans, so it captures only if it is alone on its machine.
            plans = world.rank == 0 and (
                profile is not None or strategy == "auto" or not isinstance(strategy, Strategy | str)
            )
            if joining or late:
                program, variants = kept("capture", key, captured)
            else:
                program, variants = once_per_machine(world, "capture", key, captured, get_ready if plans else None)
        else:
            check_loss_of(program, loss)
            _check_origin(
                program, model, dtype, given=example is not None or (loss is not None and not loss_buffers(loss))
            )
        limit = None if window is None else window // GRADIENT_BYTES
        if (program.window, program.push_dtype) != (limit, push_dtype):
            program = replace(program, window=limit, push_dtype=push_dtype)
        planning = Planning(profile, lengths, policy or Policy())
        if profile is None and isinstance(strategy, str) and strategy == "auto" and not (joining or late):
            planning = _measured_here(
                model, loss, program, backend, AUTO if owners is None else owners, world, planning, deterministic
            )
        executable = Executable(
            model,
            program,
            strategy,
            optimizer,
            max_grad_norm,
            world,
            blocks,
            planning,
            backend,
            mode,
            owners,
            library,
            variants,
            joining or late,
            deterministic,
            loss,
            seed,
        )
    executable.progress_s = progress_s
    if member is not None and not late:
        member.hold()
    elif late and not joining:
        survive(executable)
    return executable


def _measured_here(
    model: nn.Module,
    loss: Loss | None,
    program: Program,
    backend: str | None,
    home: Home,
    world: World,
    planning: Planning,
    deterministic: bool,
) -> Planning:
    """Measure this run's devices, and plan for them unless stages must be cut alike, which `Executable` sees to."""
    limits = limits_of(program)
    vocabulary = min((limit.high for limit in limits if limit.field in ("input_ids", "labels")), default=1)
    positions = min((limit.high for limit in limits if limit.field == "position_ids"), default=None)
    chosen = choose_backend(backend, world.device)
    measured = MeasuredModel(program, initial_buffers(model) | loss_buffers(loss), vocabulary, positions, chosen)
    subject = Subject(measured, home)
    return plan_automatically(subject, world, planning, preplanned=not deterministic)


def _compiled_for_all(program: Program, given: Choices, world: World, backend: str | None) -> Variants | None:
    """Compile the graphs of the known strategies for all ranks of a machine.

    Returns None for a single rank, under Inductor, which keeps its own code on disk, and if a strategy does not fit,
    which every rank then reports.
    """
    if world.ranks == 1 or choose_backend(backend, world.device) == "inductor":
        return None
    variants = Variants(program, device=world.device, added=True, cache=VariantCache())
    if given == "auto":
        return variants
    try:
        for strategy in candidates_of(given, program, world.ranks, None, None):
            variants.compile([strategy])
    except ValueError:
        return None
    return variants


def _key(model: nn.Module, *others: object) -> str:
    """Return the key under which ranks share a captured model: a hash of its origin and all arguments."""
    said = [frontend.origin(model), *map(_said, others)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _said(value: object) -> str:
    """Describe an argument of `compile` so that equal texts mean equal arguments on ranks that run one script."""
    match value:
        case Tensor():
            return f"{value.dtype} {tuple(value.shape)}"
        case Mapping():
            return str({name: _said(part) for name, part in value.items()})
        case str() | Strategy() | torch.dtype() | None:
            return str(value)
        case Sequence():
            return str([_said(part) for part in value])
        case _:
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _on_all(world: World, make: Callable[[], T]) -> T:
    """Call a function on every rank; if it raises ValueError on some rank, all ranks raise."""
    made: T | None = None
    error: ValueError | None = None
    try:
        made = make()
    except ValueError as refused:
        error = refused
    first = next((other for other in world.gather(error) if other is not None), None)
    if error is not None or first is not None:
        raise error or first  # type: ignore[misc]
    assert made is not None
    return made


def _check_origin(program: Program, model: nn.Module, dtype: torch.dtype, given: bool) -> None:
    name = type(model).__name__
    if program.origin != frontend.origin(model):
        raise ValueError(f"program: it was captured from another model than this {name}: capture this one")
    if given or dtype not in (torch.float32, program.dtype):
        raise ValueError(f"program: it computes in {program.dtype}; give dtype, example and loss to `capture` alone")


@own_modes("precompile")
def precompile(program: Program, strategies: Iterable[Strategy]) -> Variants:
    """Compile a program's templates for strategies, without Inductor, which keeps its own code on disk.

    While the result is alive, executables of this process, and of ranks forked from it (`launch`), re-use its graphs.
    """
    variants = Variants(program, added=True, cache=VariantCache())
    variants.compile(strategies)
    return variants


@dataclass(frozen=True)
class RankPrograms(Sequence[RankProgram]):
    """Programs of all ranks for one iteration; they can be printed, verified, priced and run."""

    programs: SharedPrograms
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
        """Prove that no rank can hang, read missing data, or miss a gradient; see `hydragraph.ir.verify`."""
        from hydragraph.ir.verify import verify

        verify(self.programs, self.program.outline, self.mode)

    def simulate(
        self,
        cluster: Cluster | Costs,
        tokens: int | Sequence[int] = 2048,
        efficiency: float | None = None,
        home: Home | str | None = None,
    ) -> Timeline:
        """Price the programs by an event simulation of every stream of every rank.

        Args:
            cluster: devices and links, priced from their datasheet; or costs.
            tokens: length of the single sequence of each micro-batch, one number for all pipelines or one for each.
            efficiency: fraction of the datasheet's FLOP/s that computation reaches; None: as the roofline of
                `cost.datasheet` says.
            home: owners of state, for a cluster; None: as `compile` chooses for the strategy. Costs have their own
                home.
        """
        from hydragraph.cost.datasheet import datasheet

        costs = cluster
        if isinstance(costs, Cluster):
            costs = Costs(datasheet(self.program, costs, efficiency), costs, home=home_of(home))
        busy = {role.pipeline: len(role.micro_batches) for p in self.programs.headers for role in p.roles}
        counts = [busy.get(i, 0) for i in range(len(self.strategy.pipelines))]
        work = costs.work(self.strategy, Assignment.even(counts, tokens))
        return simulate_programs(tuple(self.programs), costs.cluster, work)


def lower(
    program: Program,
    strategy: Strategy,
    micro_batches: Sequence[int],
    ranks: int | None = None,
    mode: Mode = "train",
) -> RankPrograms:
    """Lower a program for a strategy.

    Args:
        micro_batches: number of micro-batches of each pipeline.
        ranks: world size; default: the ranks that the strategy names.
    """
    world = ranks if ranks is not None else max(strategy.devices) + 1
    check_strategy(program, strategy, world)
    return RankPrograms(
        shared_programs(program.outline, strategy, micro_batches, mode, ranks=world), program, strategy, mode
    )


def simulate(costs: Costs, strategy: Strategy, assignment: Assignment) -> Timeline:
    """Simulate one iteration of a strategy: when every rank runs each instruction, and how much memory it holds.

    Args:
        costs: of the model on a cluster.
        strategy: uses ranks of the cluster.
        assignment: which pipeline computes which sequences in which micro-batch, with their lengths.

    Raises:
        ValueError: the arguments do not fit one another.
        Unsupported: a needed measurement is missing, or a rank is lost.
    """
    return costs.simulate(strategy, assignment)
