"""Public functions, which combine capture, passes, planner and runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hydragraph.cluster.agreement import raise_together
from hydragraph.cluster.failure.time_limits import PROGRESS_S
from hydragraph.cluster.launch import World, apart, join
from hydragraph.cluster.once_per_node import once_per_machine
from hydragraph.cluster.processes.restart_cache import kept
from hydragraph.cluster.rendezvous.member import comes_late, here
from hydragraph.cost.actors import stage_actors
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.timeline import Timeline, run
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.engine.automatic_plan import PlanningSubject, plan_automatically, state_bytes_of
from hydragraph.engine.candidate_strategies import Choices, Planning, candidates_of, strategy_for
from hydragraph.engine.compiled_model import ExecutableOptions
from hydragraph.engine.executable import Executable
from hydragraph.engine.recovery import begin_with_fewer, home_for, seats_of_fewer, survive
from hydragraph.frontend import capture as frontend
from hydragraph.frontend.check.check_once import check_here, check_on_hosts, mode_of
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.compiled_folder.load import CompiledFolder, load
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.frontend.loss_module import check_loss_of, loss_buffers
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.frontend.module_digest import read_by
from hydragraph.frontend.packed_inputs import Loss, token_cross_entropy
from hydragraph.ir.program import Program
from hydragraph.ir.program_outline import Mode
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.shared_programs import SharedPrograms
from hydragraph.kernels.attention_backends import check_gpu
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.passes.compile_with_inductor import choose_backend
from hydragraph.passes.graph_node import varlen
from hydragraph.passes.pipeline import shared_programs
from hydragraph.passes.variants import Variants
from hydragraph.planner.policy import Policy
from hydragraph.planner.request import get_ready
from hydragraph.private.torch_modes import own_modes
from hydragraph.runtime.deterministic_sums import Deterministic
from hydragraph.runtime.home_state import check_factory
from hydragraph.runtime.supported_optimizers import OptimizerFactory
from hydragraph.spec.argument_types import typed
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.home import AUTO, Home, home_of
from hydragraph.spec.strategy import Strategy

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Source:
    model: nn.Module
    dtype: torch.dtype
    example: Mapping[str, Tensor] | None
    loss: Loss | None
    blocks: str | None
    check: str | bool

    @property
    def buffers(self) -> dict[str, Tensor]:
        return initial_buffers(self.model) | loss_buffers(self.loss)

    def subject(self, program: Program) -> CheckedModel:
        loss = self.loss or token_cross_entropy
        return CheckedModel(self.model, program, loss=loss, blocks=self.blocks, example=self.example)

    def captured(self) -> Program:
        program = frontend.capture(self.model, self.dtype, self.example, self.loss, self.blocks)
        check_here(self.subject(program), self.check)
        return program

    def loaded(self, folder: str | Path, ranks: int | None = 1, trust: bool = False) -> CompiledFolder:
        record = model_record(self.model, self.loss, self.example, self.blocks)
        return load(folder, record, self.dtype, ranks, trust)

    def key(self, strategy: Choices, backend: str | None) -> str:
        example = [(name, getattr(t, "dtype", t), getattr(t, "shape", ())) for name, t in (self.example or {}).items()]
        arguments = (strategy, self.dtype, backend, mode_of(self.check), example, self.blocks)
        texts = (frontend.origin(self.model), read_by(self.model, self.loss), repr(arguments))
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@own_modes("capture")
@typed("example", "compiled")
def capture(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    example: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    blocks: str | None = None,
    check: str | bool = "auto",
    compiled: str | Path | None = None,
) -> Program:
    """Trace a model into blocks with placeholders for communication, and check the captured graphs numerically.

    For the other arguments, see `hydragraph.frontend.capture.capture`.

    Args:
        check: "auto" checks at least one block of each structure: the captured graph, on packed sequences, must return
            the same loss and gradients as the model on single sequences. "full" checks all blocks, "off" none.
        compiled: folder, written by `hydragraph compile`, from which to read the program.

    Raises:
        Unsupported: the model cannot be captured, or the captured graphs differ from the model.
        Refused (a ValueError): the folder is damaged, stale or for another model.
    """
    source = _Source(model, dtype, example, loss, blocks, check)
    if compiled is None:
        return source.captured()
    library = source.loaded(compiled)
    if not library.checked(mode_of(check)):
        check_here(source.subject(library.program), check)
    return replace(library.program, reads=read_by(model, loss), loss=loss)


@own_modes("compile")
@typed("example", "profile", "lengths", "policy", "program", "progress_s", "compiled", "window")
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
    profile: Profile | Costs | Cluster | None = None,
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
    """Compile a model for training; all ranks must call this function with the same arguments.

    The function joins the launcher's process group, uses an existing group, or runs as a single process.

    Args:
        model: a Hugging Face model or your own module, the same on every rank, on the CPU or the meta device (weights
            come from `load` or the initializer). Steps do not change it: `Executable.full_state_dict` has the result.
        strategy: a Strategy, its text ("<tp2,pp1> + <tp1,pp1>"), a list to choose from at each step, or "auto" to plan.
        optimizer: function that makes a torch.optim optimizer from (name, 1-D fp32 tensor) pairs in model order, or
            None for no training. Each tensor is a parameter's shard, or empty; do not edit its `.data`.
        max_grad_norm: global norm to which gradients are clipped, or None.
        dtype: compute dtype; master weights and optimizer state are fp32.
        device: this rank's device; by default a GPU if available.
        loss: function that maps the model's outputs and the packed batch to the loss, summed over targets.
        profile: measured `Profile`, `Costs`, or a `Cluster` with datasheets. If None, strategy "auto" measures costs.
        lengths, policy: sequence lengths of sample mini-batches, and settings of the planner.
        backend: "inductor" or "eager"; None chooses Inductor on CUDA and eager elsewhere.
        program: result of `capture` for an equal model; it replaces `example` and, by default, `loss`.
        example, blocks, check: see `capture`; each strategy is also checked before its first step.
        progress_s: if no rank makes progress for this many seconds, all ranks print stack traces and raise an error.
        home: each rank's share of the state, as a `Home` or text ("3,1 copies=2", "equal", "stages"); default: "auto".
        compiled: folder written by `hydragraph compile`; missing graphs are compiled.
        trust: whether to load Inductor code from the `compiled` folder; this code runs with your permissions.
        joining: whether this rank joins running ranks later (`Executable.move`); its model must be a meta model.
        deterministic: whether results are bitwise equal for all strategies, ranks and homes (docs/deterministic.md).
        window: maximum bytes of fp32 weights, and of fp32 gradients, in flight; default: twice the largest block.
        push_dtype: dtype in which gradients are sent to their owners, which sum them in fp32.
        seed: dropout seed, the same on every rank; dropout masks do not depend on the strategy.

    Raises:
        TypeError, ValueError: an argument is wrong, or does not fit the model or the ranks.
        Refused: the `compiled` folder is damaged, stale or for another model.
        Unsupported: the model cannot be trained.
        RankFailure: another rank failed during the call.
    """
    apart_now = joining or comes_late()
    backend = "eager" if deterministic and backend is None else backend
    loss = program.loss if loss is None and isinstance(program, Program) else loss
    source = _Source(model, dtype, example, loss, blocks, check)
    options = ExecutableOptions(backend, deterministic, loss, seed, max_grad_norm, progress_s, blocks)
    automatic = isinstance(strategy, str) and strategy == "auto"
    world = apart(device) if apart_now else join(device)
    world.watch.progress_s = progress_s
    fewer = () if apart_now else seats_of_fewer(world)
    with world.watch.calling("compile"):
        owners = _on_all(world, lambda: _checked(source, optimizer, options, window, push_dtype, home))
        if compiled is not None or program is not None:
            program, library, variants = _given(source, program, compiled, world, trust, apart_now)
        else:
            program, library, variants = _captured(source, strategy, world, backend, apart_now, profile is not None)
        program = _for_gpus(_with_limits(program, window, push_dtype), world)
        costs = _priced(profile, program, automatic, backend, world, optimizer)
        planning = Planning(costs, lengths, policy or Policy())
        if profile is None and automatic and not apart_now:
            on = _backend(backend, world.device, deterministic)
            wanted = home_for(owners or AUTO, fewer) if fewer else owners or AUTO
            subject = PlanningSubject.of(program, source.buffers, on, wanted, optimizer)
            planning = plan_automatically(subject, world, planning, preplanned=not deterministic)
        options = replace(options, check=mode_of(check), library=library, variants=variants)
        given = (model, program, strategy, optimizer, world, options)
        executable = Executable(*given, planning=planning, home=owners, joining=bool(apart_now or fewer))
        if fewer:
            begin_with_fewer(executable, model, world, fewer)
    return _held(executable, joining)


def _priced(
    profile: Profile | Costs | Cluster | None,
    program: Program,
    automatic: bool,
    backend: str | None,
    world: World,
    optimizer: OptimizerFactory | None,
) -> Profile | Costs | None:
    if isinstance(profile, Costs) and optimizer is not None:
        element = state_bytes_of(program, optimizer)
        return profile if element == profile.state_bytes else profile.changed(state_bytes=element)
    if not isinstance(profile, Cluster):
        return profile
    most = max(profile.node(device.node).devices for device in profile.devices)
    # Planned tensor-parallel groups do not span nodes; given ones may.
    sheet = datasheet(program, profile, None, range(1, most + 1) if automatic else None)
    inductor = choose_backend(backend, world.device) == "inductor"
    variants = Variants(program, fused_head=inductor, added=not inductor, cache=VariantCache())
    blocks = CompiledBlocks(program, variants.get)
    element = state_bytes_of(program, optimizer)
    return Costs(sheet, profile, blocks=blocks, push_itemsize=program.push_dtype.itemsize, state_bytes=element)


def _for_gpus(program: Program, world: World) -> Program:
    if any(node.target is varlen for t in program.templates.values() for node in t.graph.graph.nodes):
        _on_all(world, lambda: check_gpu(world.device))
    return program


def _backend(asked: str | None, device: torch.device, deterministic: bool) -> str:
    backend = choose_backend(asked, device)
    if deterministic:
        # Before cuBLAS starts
        Deterministic.begin(device, backend)
    return backend


def _held(executable: Executable, joining: bool) -> Executable:
    if (member := here()) is not None and not comes_late():
        member.hold()
        executable.joined = member.holds
    elif comes_late() and not joining:
        survive(executable)
    return executable


def _checked(
    source: _Source,
    optimizer: OptimizerFactory | None,
    options: ExecutableOptions,
    window: int | None,
    push_dtype: torch.dtype,
    home: Home | str | None,
) -> Home | None:
    frontend.check_model(source.model, "compile")
    check_factory(optimizer)
    mode_of(source.check)
    if window is not None and window < 0:
        raise ValueError(f"compile: 'window' is {window}: give a number of bytes, or None for the default")
    if not options.progress_s > 0:
        raise ValueError(f"compile: 'progress_s' is {options.progress_s}: give seconds above 0")
    if push_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"compile: push_dtype is {push_dtype}: give torch.float32 or torch.bfloat16")
    if options.deterministic and push_dtype != torch.float32:
        raise ValueError(
            f"compile: push_dtype {push_dtype} rounds each rank's sum, so results depend on the number of ranks: "
            "omit push_dtype or 'deterministic'"
        )
    if type(options.seed) is not int:
        raise ValueError(f"compile: 'seed' is {options.seed!r}: give an integer")
    norm = options.max_grad_norm
    if norm is not None and not (isinstance(norm, Real) and norm > 0):
        raise ValueError(f"compile: max_grad_norm is {norm!r}: give a number above 0, or None for no clipping")
    return home_of(home)


_Captured = tuple[Program, CompiledFolder | None, Variants | None]


def _given(
    source: _Source, program: Program | None, folder: str | Path | None, world: World, trust: bool, apart_now: bool
) -> _Captured:
    if program is not None:
        _on_all(world, partial(_check_program, program, folder, source))
        return program, None, None
    assert folder is not None, "compile has a program or a folder"
    # An elastic run may change its number of ranks
    ranks = None if apart_now or here() is not None else world.ranks
    library = _on_all(world, partial(source.loaded, folder, ranks, trust))
    if not library.checked(mode_of(source.check)):
        check_on_hosts(source.subject(library.program), source.check, world)
    return library.program, library, None


def _captured(
    source: _Source, strategy: Choices, world: World, backend: str | None, apart_now: bool, priced: bool
) -> _Captured:
    def make() -> tuple[Program, Variants | None]:
        program = source.captured()
        return program, _compiled_for_all(program, strategy, world, backend)

    key = source.key(strategy, backend)
    if apart_now:
        program, variants = kept("capture", key, make)
    else:
        plans = priced or strategy == "auto" or not isinstance(strategy, Strategy | str)
        meanwhile = get_ready if plans and world.rank == 0 else None
        program, variants = once_per_machine(world, "capture", key, make, meanwhile)
    return program, None, variants


def _with_limits(program: Program, window: int | None, push_dtype: torch.dtype) -> Program:
    limit = None if window is None else window // GRADIENT_BYTES
    if (program.window, program.push_dtype) == (limit, push_dtype):
        return program
    return replace(program, window=limit, push_dtype=push_dtype)


def _compiled_for_all(program: Program, given: Choices, world: World, backend: str | None) -> Variants | None:
    """Compile the given strategies' graphs for all ranks of a machine.

    Return None for a single rank, for Inductor, or if a strategy does not fit the model or the ranks.
    """
    if world.ranks == 1 or choose_backend(backend, world.device) == "inductor":
        return None
    variants = Variants(program, device=world.device, added=True, cache=VariantCache())
    if given == "auto":
        return variants
    try:
        for strategy in candidates_of(given, program, world.ranks, Planning()):
            variants.compile([strategy])
    except ValueError:
        return None
    return variants


def _on_all(world: World, make: Callable[[], T]) -> T:
    """Call a function on every rank; raise any rank's ValueError or TypeError on all ranks."""
    returned: list[T] = []
    error: ValueError | TypeError | None = None
    try:
        returned.append(make())
    except (ValueError, TypeError) as refused:
        error = refused
    raise_together(world, error, error)
    return returned[0]


def _check_program(program: Program, folder: str | Path | None, source: _Source) -> None:
    if folder is not None:
        raise ValueError("compile: program= and compiled= were both given: pass only one of them")
    check_loss_of(program, source.loss)
    if program.origin != frontend.origin(source.model):
        name = type(source.model).__name__
        raise ValueError(
            f"compile: 'program' was captured from a model other than this {name}; pass this model to `capture`"
        )
    if source.example is not None or source.dtype not in (torch.float32, program.dtype):
        raise ValueError(
            f"compile: 'program' determines 'dtype' ({program.dtype}) and 'example'; pass these only to `capture`"
        )
    if program.reads not in ("", read_by(source.model, source.loss)):
        raise ValueError(
            "compile: 'program' was captured with another loss=, or a value that the loss or model reads has changed; "
            "pass that loss, or no loss=, to `compile`; after such a change, call `capture` again"
        )


@own_modes("precompile")
@typed("program")
def precompile(program: Program, strategies: Iterable[Strategy | str]) -> Variants:
    """Compile a program's templates for strategies on the eager backend. Inductor caches code on disk.

    While a process keeps the result, its executables and those of forked ranks (`launch`) reuse the graphs.
    """
    variants = Variants(program, added=True, cache=VariantCache())
    several = [strategies] if isinstance(strategies, Strategy | str) else strategies
    variants.compile([strategy_for(strategy, program) for strategy in several])
    return variants


@dataclass(frozen=True)
class RankPrograms(Sequence[RankProgram]):
    """Programs of all ranks for one iteration."""

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
        """Estimate the programs' times with an event simulation of every rank's streams.

        Args:
            cluster: Costs, or a Cluster, whose costs are estimated from datasheets.
            tokens: number of tokens in each micro-batch, which is one sequence; either one number for all pipelines or
                one per pipeline.
            efficiency: fraction of the datasheet's FLOP/s that computation reaches; None uses the roofline model of
                `cost.datasheet`.
            home: owners of the state, as for `compile`; ignored for Costs, which include owners.
        """
        costs = cluster
        if isinstance(costs, Cluster):
            costs = Costs(datasheet(self.program, costs, efficiency), costs, home=home_of(home))
        # busy: pipeline -> number of micro-batches, which all its ranks share
        busy = {role.pipeline: len(role.micro_batches) for p in self.programs.headers for role in p.roles}
        counts = [busy.get(i, 0) for i in range(len(self.strategy.pipelines))]
        if costs.ranks != len(self):
            raise ValueError(f"{len(self)} rank programs on {costs.ranks} devices: give one device per rank")
        work = costs.work(self.strategy, Assignment.even(counts, tokens))
        return run(stage_actors(self.program.outline, self.strategy, counts, len(self), self.mode), costs.cluster, work)


@typed("program", "micro_batches", "ranks")
def lower(
    program: Program,
    strategy: Strategy | str,
    micro_batches: Sequence[int],
    ranks: int | None = None,
    mode: Mode = "train",
) -> RankPrograms:
    """Lower a program for a strategy and a number of micro-batches per pipeline.

    Args:
        ranks: world size; by default, the strategy's highest device number plus 1.
    """
    strategy = strategy_for(strategy, program)
    world = ranks if ranks is not None else max(strategy.devices) + 1
    check_strategy(program, strategy, world)
    return RankPrograms(
        shared_programs(program.outline, strategy, micro_batches, mode, ranks=world), program, strategy, mode
    )


@typed("costs", "strategy", "assignment")
def simulate(costs: Costs, strategy: Strategy, assignment: Assignment) -> Timeline:
    """Simulate one iteration of a strategy, and return every rank's instruction times and memory.

    Raises:
        ValueError: the arguments do not fit together.
        Unsupported: a needed measurement is missing, or a rank is lost.
    """
    return costs.simulate(strategy, assignment)
