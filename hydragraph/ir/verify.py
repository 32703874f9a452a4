"""Static proof that the ranks' programs are complete and consistent, and cannot deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hydragraph.ir.deadlock import find_deadlock
from hydragraph.ir.instruction import EXCHANGED, RULES, Instruction, Op, waits
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram, Role
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.shared_programs import SharedPrograms
from hydragraph.ir.value import (
    Value,
    ValueKind,
    activation,
    activation_gradient,
    aux,
    copying,
    fetched,
    gradients,
    loss,
    message,
    offloaded,
    postponed,
    saved,
    weights,
)


class VerificationError(ValueError):
    def __init__(self, what: str, rank: int, index: int | None = None, instruction: str = "") -> None:
        at = "" if index is None else f", instruction {index} `{instruction}`"
        super().__init__(f"rank {rank}{at}: {what}")
        self.rank = rank
        self.index = index


@dataclass(frozen=True)
class _Site:
    """Blocks and neighbors of a rank, from the programs' headers.

    Attributes:
        blocks: block positions of each interleaved stage.
        neighbours: ranks of the previous and next stage, by (micro-batch, index in `blocks`).
    """

    blocks: tuple[range, ...]
    neighbours: Mapping[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]]


def verify(programs: Sequence[RankProgram], outline: Outline, mode: Mode = "train") -> None:
    """Check all ranks' programs for one iteration.

    Raises:
        VerificationError: names the rank, the instruction and the broken rule.
    """
    shared = SharedPrograms.of(programs)
    sites = _sites(shared.headers, outline)
    # One rank per kind suffices: others differ only in peers, which only checks of messages read.
    firsts = {_alike(shared, rank): rank for rank in reversed(range(len(shared)))}
    ones = [(shared[rank], sites[rank]) for rank in sorted(firsts.values())]
    for program, site in ones:
        _check_work(program, site, outline, mode)
        _check_values(program)
    _check_exchanges(ones, outline, mode)
    whole = tuple(shared)
    _check_messages(whole, sites)
    _check_end_of_all(whole)


def _alike(shared: SharedPrograms, rank: int) -> Hashable:
    return shared.kinds[rank], shared.headers[rank].layers, shared.headers[rank].micro_batches


def _fail(program: RankProgram, index: int, what: str) -> VerificationError:
    return VerificationError(what, program.rank, index, _line(program.instructions[index]))


def _of(program: RankProgram, *ops: Op) -> list[tuple[int, Instruction]]:
    return [(i, instruction) for i, instruction in enumerate(program.instructions) if instruction.op in ops]


def _line(instruction: Instruction) -> str:
    return " ".join(instruction_text(instruction).split())


def _sites(programs: Sequence[RankProgram], outline: Outline) -> tuple[_Site, ...]:
    # pipelines[pipeline][stage]: program of the stage's first rank.
    pipelines: dict[int, dict[int, RankProgram]] = defaultdict(dict)
    for rank, program in enumerate(programs):
        visits = Counter(role.pipeline for role in program.roles)
        if len(program.layers) != max(visits.values(), default=0):
            raise VerificationError(f"the header has {len(program.layers)} layer ranges, not one per stage", rank)
        if (program.rank, program.ranks) != (rank, len(programs)):
            raise VerificationError(
                f"the header says rank {program.rank} of {program.ranks}; give all programs in rank order", rank
            )
        if program.strategy != programs[0].strategy:
            raise VerificationError(f"the strategy is {program.strategy}, but rank 0 has {programs[0].strategy}", rank)
        for role in program.roles:
            first = pipelines[role.pipeline].setdefault(role.stage, program)
            if rank not in program.tp or _place(program) != _place(first):
                raise VerificationError(
                    f"the roles, ranks and layers {_place(program)} omit this rank, or differ from "
                    f"rank {first.rank}'s: {_place(first)}",
                    rank,
                )
    for pipeline, stages in pipelines.items():
        _check_pipeline(pipeline, stages, programs, outline)
    return tuple(_site(program, pipelines, outline) for program in programs)


def _place(program: RankProgram) -> tuple[object, ...]:
    return program.roles, program.tp, program.layers


def _check_pipeline(
    pipeline: int, stages: Mapping[int, RankProgram], programs: Sequence[RankProgram], outline: Outline
) -> None:
    # layer: first layer not covered so far.
    layer = 0
    stage, program = next(iter(stages.items()))
    runs = _role(program, pipeline, stage).micro_batches
    for i, (stage, program) in enumerate(sorted(stages.items())):
        role = _role(program, pipeline, stage)
        first, end = program.span_of(role)
        if stage != i or first != layer:
            raise VerificationError(
                f"stage {stage} starts at layer {first}, but stage {i} must start at {layer}", program.rank
            )
        if not runs or role.micro_batches != runs:
            raise VerificationError("the pipeline's stages have different micro-batches, or none", program.rank)
        others = {m for other in program.roles if other.pipeline != pipeline for m in other.micro_batches}
        if not others.isdisjoint(runs):
            raise VerificationError("two pipelines that share this stage use the same micro-batch number", program.rank)
        for rank in program.tp:
            if rank >= len(programs) or _place(programs[rank]) != _place(program):
                raise VerificationError(f"tensor-parallel peer {rank} has other roles or layers", program.rank)
        layer = end
    if layer != outline.layers:
        raise VerificationError(f"the pipeline ends at layer {layer} of {outline.layers}", program.rank)


def _role(program: RankProgram, pipeline: int, stage: int) -> Role:
    return next(role for role in program.roles if (role.pipeline, role.stage) == (pipeline, stage))


def _site(program: RankProgram, pipelines: Mapping[int, Mapping[int, RankProgram]], outline: Outline) -> _Site:
    if not program.roles:
        return _Site((), {})
    blocks = tuple(range(*outline.span(*span)) for span in program.layers)
    neighbours: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for role in program.roles:
        before, behind = (pipelines[role.pipeline].get(role.stage + step) for step in (-1, 1))
        around = (before.tp if before else (), behind.tp if behind else ())
        visit = program.layers.index(program.span_of(role))
        neighbours.update({(m, visit): around for m in role.micro_batches})
    return _Site(blocks, neighbours)


def _check_work(program: RankProgram, site: _Site, outline: Outline, mode: Mode) -> None:
    # halved: blocks and micro-batches whose backward has two halves. missing: work that no
    # instruction has done yet -> values to read and write.
    halved = {
        (backward.target, backward.micro_batch)
        for _, backward in _of(program, Op.BACKWARD)
        if backward.work is not Work.BACKWARD
    }
    missing = {
        key: values
        for m in program.micro_batches
        for key, values in _work([k for span in site.blocks for k in span], m, outline, mode, halved)
    }
    for index, instruction in enumerate(program.instructions):
        rule = RULES[instruction.op]
        strangers = [value for value in instruction.reads if value.kind not in rule.reads]
        strangers += [value for value in instruction.writes if value.kind not in rule.writes]
        if strangers:
            raise _fail(program, index, f"{instruction.op.value} may not use {', '.join(strangers)}")
        if instruction.op in (Op.OFFLOAD, Op.FETCH):
            _check_copy(program, index)
        if instruction.op not in (Op.FORWARD, Op.BACKWARD):
            continue
        values = missing.pop((instruction.work, instruction.target, instruction.micro_batch), None)
        if values is None:
            raise _fail(program, index, "this rank should not run this instruction, or has already run it")
        if values != (_of_buckets(instruction.reads), _of_buckets(instruction.writes)):
            reads, writes = (", ".join(sorted(names)) for names in values)
            raise _fail(program, index, f"this instruction should read ({reads}) and write ({writes})")
    for work, target, m in missing:
        raise VerificationError(f"{_DESCRIBED[work]} {target} [{m}] is missing", program.rank)


def _check_copy(program: RankProgram, index: int) -> None:
    instruction = program.instructions[index]
    of = (instruction.target, instruction.batch)
    out = instruction.op is Op.OFFLOAD
    reads, writes = ((saved,), (offloaded, copying)) if out else ((offloaded,), (fetched,))
    if (instruction.reads, instruction.writes) != tuple(tuple(make(*of) for make in made) for made in (reads, writes)):
        raise _fail(program, index, f"this instruction should {instruction.op.value} only its block's saved values")


def _of_buckets(values: Sequence[Value]) -> frozenset[Value]:
    return frozenset(_PLAIN[value.kind](value) if value.kind in _PLAIN else value for value in values)


_PLAIN: Mapping[ValueKind, Callable[[Value], Value]] = {
    ValueKind.WEIGHTS: lambda value: weights(value.bucket),
    ValueKind.GRADIENTS: lambda value: gradients(value.bucket),
    ValueKind.FETCHED: lambda value: saved(value.block, value.micro_batch),
}
_DESCRIBED = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT_GRADIENT: "the input half of backward",
    Work.WEIGHT_GRADIENT: "the weight half of backward",
}
_Key = tuple[Work, str, int | None]
_Values = tuple[frozenset[Value], frozenset[Value]]


def _work(
    blocks: Sequence[int], m: int, outline: Outline, mode: Mode, halved: Container[tuple[str, int | None]]
) -> Iterator[tuple[_Key, _Values]]:
    if blocks:
        yield (Work.FORWARD, "aux", m), (frozenset(), frozenset({aux(m)}))
    for k in blocks:
        block = outline.blocks[k]
        final = len(outline.blocks) - 1
        pulled = {weights(bucket) for bucket in outline.weights[block]}
        summed = {gradients(bucket) for bucket in outline.gradients[block]}
        learns = mode != "evaluate" and k >= outline.lowest
        kept = {saved(block, m)} if learns else set()
        below = {activation(k - 1, m)} if k > 0 else set()
        output = {activation(k, m) if k < final else loss(m)}
        yield (Work.FORWARD, block, m), (frozenset(pulled | below | {aux(m)}), frozenset(output | kept))
        if learns:
            gradient = {activation_gradient(k, m)} if k < final else set()
            passed = {activation_gradient(k - 1, m)} if k > outline.lowest else set()
            read = frozenset(kept | gradient | pulled)
            if (block, m) in halved:
                later = {postponed(block, m)}
                yield (Work.INPUT_GRADIENT, block, m), (read, frozenset(passed | later))
                yield (Work.WEIGHT_GRADIENT, block, m), (frozenset(later | pulled), frozenset(summed))
            else:
                yield (Work.BACKWARD, block, m), (read, frozenset(passed | summed))


def _check_values(program: RankProgram) -> None:
    """Check that values are complete before use, awaited across streams, and freed after last use."""
    # alive: value -> instruction that wrote it. pushed, freed, last: value -> index of its push,
    # free and last use.
    pushed: dict[Value, int] = {}
    alive: dict[Value, Instruction] = {}
    freed: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for index, instruction in enumerate(program.instructions):
        for values in (instruction.reads, instruction.writes):
            if len(set(values)) < len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise _fail(program, index, f"this instruction names {twice} twice")
        for value in instruction.reads:
            if value not in alive:
                why = f"instruction {freed[value]} freed it" if value in freed else "no earlier instruction makes it"
                raise _fail(program, index, f"{value} is {'freed' if instruction.op is Op.FREE else 'read'}, but {why}")
            last[value] = index
        needed = waits(instruction, {value: alive[value].stream for value in instruction.reads})
        # Pulls and pushes may also wait for earlier exchanges (`_check_window`).
        after = [value for value in instruction.after if value in needed or instruction.op not in (Op.PULL, Op.PUSH)]
        if set(after) != set(needed) or len(after) != len(needed):
            expected = ", ".join(sorted(needed)) or "nothing"
            what = f"this instruction should wait for the values that it reads from other streams: {expected}"
            raise _fail(program, index, what)
        if instruction.op is Op.FREE:
            freed.update(dict.fromkeys(instruction.reads, index))
            for value in instruction.reads:
                del alive[value]
        if instruction.op is Op.PUSH:
            pushed.update(dict.fromkeys(instruction.reads, index))
        # Only gradients are accumulated.
        for value in instruction.writes:
            if value in pushed:
                raise _fail(program, pushed[value], f"{value} is pushed before instruction {index} adds to it")
            if value in freed or (
                value in alive and not (instruction.op is Op.BACKWARD and value.kind is ValueKind.GRADIENTS)
            ):
                raise _fail(program, index, f"{value} is written a second time")
            alive[value] = instruction
            last[value] = index
    for value in alive:
        raise _fail(program, last[value], f"{value} is last used here, but is never freed")


def _check_exchanges(ones: Sequence[tuple[RankProgram, _Site]], outline: Outline, mode: Mode) -> None:
    for op, kind in ((Op.PULL, ValueKind.WEIGHTS), (Op.PUSH, ValueKind.GRADIENTS)):
        # mine: exchanges whose values a rank's computations use. used: of all ranks.
        mine = [_named(program, kind) for program, _ in ones]
        used = frozenset().union(*mine)
        for (program, _), own in zip(ones, mine, strict=True):
            _check_exchange(program, own, op, used)
            _check_window(program, outline, op)
    for program, _ in ones:
        _check_end(program, mode)
    # Communicators match pulls, and pushes, by order, so it must be equal on all ranks.
    for op in (Op.PULL, Op.PUSH):
        expected = [instruction.target for _, instruction in _of(ones[0][0], op)]
        for program, _ in ones[1:]:
            for bucket, (index, entered) in zip(expected, _of(program, op), strict=True):
                if bucket != entered.target:
                    raise _fail(program, index, f"rank 0 runs the {op.value} of {bucket} here; use rank 0's order")


def _named(program: RankProgram, kind: ValueKind) -> frozenset[str]:
    return frozenset(
        value.exchange
        for _, instruction in _of(program, Op.FORWARD, Op.BACKWARD)
        for value in (instruction.reads if kind is ValueKind.WEIGHTS else instruction.writes)
        if value.kind is kind
    )


def _check_exchange(program: RankProgram, own: frozenset[str], op: Op, exchanges: frozenset[str]) -> None:
    missing = set(exchanges)
    for index, instruction in _of(program, op):
        if instruction.target not in missing:
            raise _fail(program, index, f"the {op.value} of {instruction.target} is repeated, or no rank needs it")
        missing.remove(instruction.target)
        mine = instruction.target in own
        reads = (gradients(instruction.target),) if op is Op.PUSH and mine else ()
        writes = (weights(instruction.target),) if op is Op.PULL and mine else ()
        if (instruction.reads, instruction.writes) != (reads, writes):
            raise _fail(
                program,
                index,
                f"this rank {'needs' if mine else 'does not need'} {instruction.target}: "
                f"{'name' if mine else 'omit'} its values",
            )
    for exchange in sorted(missing):
        raise VerificationError(f"the {op.value} of {exchange} is missing; every rank must take part", program.rank)


def _check_window(program: RankProgram, outline: Outline, op: Op) -> None:
    exchanges = _of(program, op)
    awaited = outline.awaited([instruction.target for _, instruction in exchanges])
    for (index, instruction), names in zip(exchanges, awaited, strict=True):
        over = [EXCHANGED[op](name) for name in names]
        if [value for value in instruction.after if value not in instruction.reads] != over:
            expected = f"these earlier exchanges: {', '.join(over)}" if over else "no earlier exchange"
            raise _fail(program, index, f"this instruction should wait for {expected}")


def _check_end(program: RankProgram, mode: Mode) -> None:
    ops = [instruction.op for instruction in program.instructions]
    update = 1 if mode == "train" else 0
    if ops.count(Op.COMMIT) != 1 or ops.count(Op.UPDATE) != update:
        raise VerificationError(
            f"the program has {ops.count(Op.COMMIT)} commits (mode {mode} requires 1) and {ops.count(Op.UPDATE)} "
            f"updates (mode {mode} requires {update})",
            program.rank,
        )
    commit = ops.index(Op.COMMIT)
    for index, op in enumerate(ops):
        if index > commit and op not in (Op.FREE, Op.UPDATE):
            raise _fail(
                program, commit, f"instruction {index} `{_line(program.instructions[index])}` must precede the commit"
            )
        if index > commit and any(value.kind is ValueKind.MESSAGE for value in program.instructions[index].reads):
            raise _fail(program, index, "every message must be freed before the commit")
        if index < commit and op is Op.UPDATE:
            raise _fail(program, index, "the update must follow the commit")
    results = {
        value
        for instruction in program.instructions
        for value in instruction.writes
        if value.kind in RULES[Op.COMMIT].reads
    }
    if set(program.instructions[commit].reads) != results:
        raise _fail(program, commit, f"the commit should read ({', '.join(sorted(results))})")


def _check_messages(programs: Sequence[RankProgram], sites: Sequence[_Site]) -> None:
    """Check that only neighbors exchange messages, with equal values and order on both ends."""
    # (sender, receiver) -> (instruction index, value), in program order. Messages between two ranks
    # arrive in order: the n-th send must match the n-th receive.
    sends: dict[tuple[int, int], list[tuple[int, Value]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Value]]] = defaultdict(list)
    for program, site in zip(programs, sites, strict=True):
        for index, instruction in _of(program, Op.SEND, Op.RECEIVE):
            value = _checked_value(program, index, site)
            if instruction.op is Op.SEND:
                sends[program.rank, instruction.partner].append((index, value))
            else:
                receives[instruction.partner, program.rank].append((index, value))
    for source, target in sorted({*sends, *receives}):
        for sent, received in zip_longest(sends[source, target], receives[source, target]):
            if received is None:
                raise _fail(programs[source], sent[0], f"rank {target} has no matching receive")
            if sent is None:
                raise _fail(programs[target], received[0], f"rank {source} has no matching send")
            if sent[1] != received[1]:
                what = f"rank {source} sends {sent[1]} instead (in instruction {sent[0]}); use the same order"
                raise _fail(programs[target], received[0], what)


def _checked_value(program: RankProgram, index: int, site: _Site) -> Value:
    instruction = program.instructions[index]
    values = instruction.reads if instruction.op is Op.SEND else instruction.writes
    if len(values) != 1 or (instruction.op is Op.RECEIVE and instruction.reads):
        raise _fail(program, index, f"a {instruction.op.value} must have exactly one value")
    (value,) = values
    # A stage receives activations before its first block and sends them after its last; gradients
    # move in reverse.
    peers: tuple[int, ...] = ()
    for visit, blocks in enumerate(site.blocks):
        before, last = blocks.start - 1, blocks.stop - 1
        previous, following = site.neighbours.get((value.micro_batch, visit), ((), ()))
        routes = {
            (Op.RECEIVE, ValueKind.ACTIVATION, before): previous,
            (Op.SEND, ValueKind.ACTIVATION, last): following,
            (Op.RECEIVE, ValueKind.ACTIVATION_GRADIENT, last): following,
            (Op.SEND, ValueKind.ACTIVATION_GRADIENT, before): previous,
        }
        peers += routes.get((instruction.op, value.kind, value.position), ())
    if instruction.peer is None or instruction.peer not in peers:
        allowed = f"ranks {peers}" if peers else "no rank"
        raise _fail(program, index, f"rank {instruction.peer} is the wrong peer: exchange the value with {allowed}")
    if instruction.op is Op.SEND and instruction.writes != (message(value, instruction.peer),):
        raise _fail(program, index, f"the send should write only {message(value, instruction.peer)}")
    return value


def _check_end_of_all(programs: Sequence[RankProgram]) -> None:
    deadlock = find_deadlock(programs)
    if deadlock is None:
        return
    stuck = "; ".join(
        f"rank {rank} at instruction {deadlock.at[rank]} `{_line(programs[rank].instructions[deadlock.at[rank]])}` "
        f"waits for {', '.join(f'rank {r}' for r in blockers)}"
        for rank, blockers in deadlock.waits.items()
    )
    ended = ", which has ended" if deadlock.chain[-1] not in deadlock.waits else ""
    chain = " -> ".join(f"rank {rank}" for rank in deadlock.chain) + ended
    first = deadlock.chain[0]
    raise _fail(programs[first], deadlock.at[first], f"deadlock: {chain}. All waiting ranks: {stuck}")
