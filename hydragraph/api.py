"""The public functions: the only module that puts capture, passes, planner and runtime together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.candidates import Choices, Planning
from hydragraph.check.check import CheckedModel
from hydragraph.check.run import check_here, check_on_hosts, mode_of
from hydragraph.cost.costs import Costs
from hydragraph.cost.profile import Profile
from hydragraph.cost.simulate import Timeline
from hydragraph.cost.simulate import simulate as simulate_programs
from hydragraph.executable import Executable
from hydragraph.frontend import capture as frontend
from hydragraph.frontend.packed import Loss, token_cross_entropy
from hydragraph.ir.outline import Mode
from hydragraph.ir.program import Program
from hydragraph.ir.rank_program import RankProgram
from hydragraph.modes import own_modes
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.passes.pipeline import rank_programs
from hydragraph.planner.policy import Policy
from hydragraph.runtime.failure.board import PROGRESS_S
from hydragraph.runtime.launch import join
from hydragraph.runtime.state import OptimizerFactory
from hydragraph.runtime.variants import Variants
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy


@own_modes("capture")
def capture(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    example: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    blocks: str | None = None,
    check: str | bool = "auto",
) -> Program:
    """Trace a model once into blocks with pull, push and communicate placeholders, and check the result by numbers.

    Args:
        model, dtype, example, loss, blocks: see `hydragraph.frontend.capture.capture`.
        check: "auto" compares packed sequences in the captured graphs with the model on each sequence alone, loss and
            every gradient: each structurally distinct block once; "full": every block; "off": nothing.

    Raises:
        Unsupported: what cannot be captured, or what differs from the model.
    """
    program = frontend.capture(model, dtype, example, loss, blocks)
    check_here(CheckedModel(model, program, loss or token_cross_entropy, blocks, example), check)
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
    profile: Profile | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
    policy: Policy | None = None,
    backend: str | None = None,
    program: Program | None = None,
    check: str | bool = "auto",
    progress_s: float = PROGRESS_S,
    home: Home | None = None,
) -> Executable:
    """Compile a model for training under a strategy that every step may change.

    Args:
        model: an unmodified Hugging Face model, or a module of your own, with weights on the CPU, the same on every
            rank. Built on the meta device it takes no memory: weights come from `load`, or, at the first step, from
            its own initialiser, block by block and seeded by `torch.manual_seed`.
        strategy: which devices compute what; or several, of which every step runs the one that is expected to finish
            first; or "auto", which proposes them for the data (it needs a profile and lengths).
        optimizer: called once on every rank with one (name, 1-D fp32 tensor) pair per parameter in model order, the
            tensor having 0 elements where this rank owns nothing; returns a torch.optim optimizer. None: no training.
        max_grad_norm: clip gradients to this global norm.
        dtype: what the model computes in; master weights and optimizer state are fp32.
        device: "cpu" or "cuda"; default: a GPU where there is one.
        loss: takes the model's outputs and the packed batch, returns the loss summed over targets (the positions
            whose label is not -100); a step divides it by the targets of the global mini-batch.
        example, blocks: for modules and fields of your own; see `hydragraph.capture`.
        profile: what `hydragraph profile` measured here; without one, candidates are compared by rough costs.
        lengths: sequence lengths of sample mini-batches: what "auto" proposes for, and by which it is decided whether
            choosing every step is worth it (`Executable.decision`).
        policy: how iterations are planned.
        backend: "inductor" compiles the graphs between communications, "eager" runs them operator by operator; None:
            Inductor on CUDA, eager elsewhere.
        program: what `capture` gave for this model, or for an equal one, before: it is not captured again. Then
            `example` and `loss` were capture's, and so were `dtype` and the check against the model.
        check: of what is captured here, by one rank of each host; see `hydragraph.capture`. Unless "off", what ranks
            run under a strategy (cut, split by tokens, recomputed) is compared with whole blocks before its first step.
        progress_s: after so many seconds in which no rank has moved on while some wait for others, all raise, and write
            what they are doing to stderr; give more than any one instruction, or what you do between steps, takes.
        home: which rank owns how much of the weights and the optimizer's state, and whether a second one owns it too;
            None: equal shares of all ranks.

    Raises:
        ValueError: `program` is that of another model, or `home` does not fit the ranks or the model.
        Unsupported: what cannot be captured or trained.
        RankFailure: another rank failed meanwhile.

    Joins the process group from the launcher's environment, uses the one there is, or stays alone.
    """
    mode, world = mode_of(check), join(device)
    world.watch.progress_s = progress_s
    with world.watch.calling("compile"):
        if program is None:
            program = frontend.capture(model, dtype, example, loss, blocks)
            check_on_hosts(CheckedModel(model, program, loss or token_cross_entropy, blocks, example), check, world)
        else:
            _check_origin(program, model, dtype, given=example is not None or loss is not None)
        planning = Planning(profile, lengths, policy or Policy())
        return Executable(
            model, program, strategy, optimizer, max_grad_norm, world, blocks, planning, backend, mode, home
        )


def _check_origin(program: Program, model: nn.Module, dtype: torch.dtype, given: bool) -> None:
    name = type(model).__name__
    if program.origin != frontend.origin(model):
        raise ValueError(f"program: it was captured from another model than this {name}: capture this one")
    if given or dtype not in (torch.float32, program.dtype):
        raise ValueError(f"program: it computes in {program.dtype}; give dtype, example and loss to `capture` alone")


@own_modes("precompile")
def precompile(program: Program, strategies: Iterable[Strategy]) -> Variants:
    """Compile a program's templates for strategies; without Inductor, which keeps its own code on disk.

    While the result is kept, no executable of this process, or of ranks that are forked from it (`launch`), compiles
    them again.
    """
    variants = Variants(program, added=True)
    variants.compile(strategies)
    return variants


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

    def simulate(
        self,
        cluster: Cluster | Costs,
        tokens: int | Sequence[int] = 2048,
        efficiency: float | None = None,
        home: Home | None = None,
    ) -> Timeline:
        """Price the programs: an event simulation of every stream of every rank.

        Args:
            cluster: devices and links, priced from their datasheet; or costs.
            tokens: of one micro-batch, one sequence, the same for all pipelines or one number for each.
            efficiency: of the datasheet, the part of its FLOP/s that computation reaches; default:
                `cost.datasheet.EFFICIENCY`.
            home: of a cluster: who owns state; None: equal shares of all ranks. Costs have their own.
        """
        from hydragraph.cost.datasheet import EFFICIENCY, datasheet

        costs = cluster
        if isinstance(costs, Cluster):
            costs = Costs(datasheet(self.program, costs, efficiency or EFFICIENCY), costs, home=home)
        busy = {role.pipeline: len(role.micro_batches) for p in self.programs for role in p.roles}
        counts = [busy.get(i, 0) for i in range(len(self.strategy.pipelines))]
        work = costs.work(self.strategy, Assignment.even(counts, tokens))
        return simulate_programs(self.programs, costs.cluster, work)


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
    return RankPrograms(
        rank_programs(program.outline, strategy, micro_batches, mode, ranks=world), program, strategy, mode
    )


def simulate(costs: Costs, strategy: Strategy, assignment: Assignment) -> Timeline:
    """Simulate one iteration of a strategy: when every rank runs what, and holds how much.

    Args:
        costs: of the model on a cluster.
        strategy: on ranks that the cluster has.
        assignment: which pipeline computes which sequences in which micro-batch; with their lengths.

    Raises:
        ValueError: these do not fit one another.
        Unsupported: something was not measured, or a rank is lost.
    """
    return costs.simulate(strategy, assignment)
