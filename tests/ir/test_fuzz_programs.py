"""Rank programs broken in one place: `ir.verify` and `ir.deadlock` catch them all, and name the instruction.

A drawn set of programs (layers, tied and frozen weights, pipelines, degrees, schedules, micro-batches, modes) is edited
once. Some edits have no visible effect: freeing later, pulling earlier. `replayed` finds the effect of an edit: it runs
programs on symbols and shares no rule with the verifier. Programs that pass the verifier must replay to the same
results. (Programs do not say where state lives: an exchange names its bucket, whatever the home.) `make thorough` draws
a thousand of each kind.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import Value, ValueKind, parse_value
from hydragraph.ir.verify import VerificationError, verify
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import returning
from tests.thorough import thorough

Programs = tuple[RankProgram, ...]


@dataclass(frozen=True)
class Iteration:
    """Valid programs, and what they were made from."""

    outline: Outline
    mode: Mode
    programs: Programs


@st.composite
def iterations(draw: st.DrawFn) -> Iteration:
    """Draw one iteration of up to three pipelines, with work for at least one rank."""
    layers = draw(st.integers(1, 3))
    blocks = ("embed", *(f"layer.{i}" for i in range(layers)), "head")
    tied = draw(st.booleans())
    ends = (("word", ("embed", "head")),) if tied else (("embed", ("embed",)), ("head", ("head",)))
    buckets = (*ends, *((block, (block,)) for block in blocks[1:-1]))
    frozen = draw(st.sets(st.sampled_from([name for name, _ in buckets]), max_size=2))
    pipelines = []
    ranks = 0
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else set()
        stages = []
        for a, b in pairwise([0, *sorted(cuts), layers]):
            tp = draw(st.integers(1, 2))
            stages.append(Stage(tuple(range(ranks, ranks + tp)), b - a))
            ranks += tp
        pipelines.append(Pipeline(draw(returning(stages))))
    counts = [draw(st.integers(0, 3)) for _ in pipelines]
    assume(any(counts))
    strategy = Strategy(tuple(pipelines), draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])))
    elements = tuple(draw(st.integers(1, 3)) for _ in buckets)
    outline = Outline(blocks, buckets, tuple(sorted(frozen)), elements, draw(st.none() | st.integers(0, 4)))
    mode: Mode = draw(st.sampled_from(["train", "gradients", "evaluate"]))
    return Iteration(
        outline, mode, rank_programs(outline, strategy, counts, mode, ranks=ranks + draw(st.integers(0, 1)))
    )


# --- edits: each breaks one place, or returns None where there is none ------------------------------------------------


def _body(programs: Programs, rank: int, body: Sequence[Instruction]) -> Programs:
    return (*programs[:rank], replace(programs[rank], instructions=tuple(body)), *programs[rank + 1 :])


def _places(programs: Programs, *ops: Op) -> list[tuple[int, int]]:
    return [(p.rank, i) for p in programs for i, each in enumerate(p.instructions) if not ops or each.op in ops]


def _edited(programs: Programs, place: tuple[int, int], *instead: Instruction) -> Programs:
    rank, i = place
    body = programs[rank].instructions
    return _body(programs, rank, (*body[:i], *instead, *body[i + 1 :]))


def _at(programs: Programs, place: tuple[int, int]) -> Instruction:
    return programs[place[0]].instructions[place[1]]


def _drop(*ops: Op) -> Callable[[Random, Programs], Programs | None]:
    def edit(random: Random, programs: Programs) -> Programs | None:
        places = _places(programs, *ops)
        return _edited(programs, random.choice(places)) if places else None

    return edit


def _drop_send(random: Random, programs: Programs) -> Programs | None:
    """Drop a send, and its message wherever it is freed: the sender's own values are still in order."""
    places = _places(programs, Op.SEND)
    if not places:
        return None
    rank, i = random.choice(places)
    (gone,) = programs[rank].instructions[i].writes
    body = []
    for each in (*programs[rank].instructions[:i], *programs[rank].instructions[i + 1 :]):
        without = replace(
            each, reads=tuple(v for v in each.reads if v != gone), after=tuple(v for v in each.after if v != gone)
        )
        if each.op is not Op.FREE or without.reads:
            body.append(without)
    return _body(programs, rank, body)


def _duplicate(random: Random, programs: Programs) -> Programs:
    place = random.choice(_places(programs))
    return _edited(programs, place, _at(programs, place), _at(programs, place))


def _swap(random: Random, programs: Programs) -> Programs | None:
    rank = random.randrange(len(programs))
    body = list(programs[rank].instructions)
    i, j = random.randrange(len(body)), random.randrange(len(body))
    body[i], body[j] = body[j], body[i]
    return _body(programs, rank, body)


def _move(random: Random, programs: Programs) -> Programs | None:
    rank = random.randrange(len(programs))
    body = list(programs[rank].instructions)
    body.insert(random.randrange(len(body)), body.pop(random.randrange(len(body))))
    return _body(programs, rank, body)


def _cycle(random: Random, programs: Programs) -> Programs | None:
    """Ask for a gradient before the hidden state that it is made from is sent."""
    places = [
        place for place in _places(programs, Op.SEND) if _at(programs, place).reads[0].kind is ValueKind.ACTIVATION
    ]
    random.shuffle(places)
    for rank, i in places:
        body = list(programs[rank].instructions)
        sent = body[i].reads[0]
        for j, each in enumerate(body):
            back = each.writes[0] if each.op is Op.RECEIVE else None
            if back is not None and back.kind is ValueKind.ACTIVATION_GRADIENT and back.micro_batch == sent.micro_batch:
                body.insert(i, body.pop(j))
                return _body(programs, rank, body)
    return None


def _renamed(value: Value, random: Random, known: Sequence[Value]) -> Value:
    others = [other for other in known if other.kind is value.kind and other != value]
    if others and random.random() < 0.7:
        return random.choice(others)
    # A number more in its text: another micro-batch, block or rank; of weights, another bucket.
    return parse_value(re.sub(r"\d+$", lambda n: str(int(n[0]) + 1), value) if value[-1].isdigit() else value + "x")


def _rename(random: Random, programs: Programs) -> Programs | None:
    field = random.choice(("reads", "writes"))
    places = [place for place in _places(programs) if getattr(_at(programs, place), field)]
    if not places:
        return None
    place = random.choice(places)
    instruction = _at(programs, place)
    values = list(getattr(instruction, field))
    at = random.randrange(len(values))
    known = [v for each in programs[place[0]].instructions for v in (*each.reads, *each.writes)]
    old, values[at] = values[at], _renamed(values[at], random, known)
    changed = tuple(values)
    if field == "writes":
        return _edited(programs, place, replace(instruction, writes=changed))
    after = tuple(values[at] if v == old else v for v in instruction.after)
    return _edited(programs, place, replace(instruction, reads=changed, after=after))


def _wrong_peer(random: Random, programs: Programs) -> Programs | None:
    places = _places(programs, Op.SEND, Op.RECEIVE)
    if not places:
        return None
    place = random.choice(places)
    others = [None, *(r for r in range(len(programs) + 1) if r != _at(programs, place).peer)]
    return _edited(programs, place, replace(_at(programs, place), peer=random.choice(others)))


def _wrong_target(random: Random, programs: Programs) -> Programs | None:
    """Change the block, bucket or micro-batch of an instruction."""
    place = random.choice(_places(programs, Op.PULL, Op.FORWARD, Op.BACKWARD, Op.PUSH, Op.COMMIT))
    instruction = _at(programs, place)
    if instruction.op is Op.COMMIT:
        return None
    if instruction.micro_batch is not None and random.random() < 0.5:
        return _edited(
            programs, place, replace(instruction, micro_batch=instruction.micro_batch + random.choice((-1, 1)))
        )
    targets = {each.target for p in programs for each in p.instructions if each.op is instruction.op}
    others = sorted(targets - {instruction.target}) or ["stranger"]
    return _edited(programs, place, replace(instruction, target=random.choice(others)))


def _wait_less(random: Random, programs: Programs) -> Programs | None:
    places = [place for place in _places(programs) if _at(programs, place).after]
    if not places:
        return None
    place = random.choice(places)
    after = list(_at(programs, place).after)
    after.pop(random.randrange(len(after)))
    return _edited(programs, place, replace(_at(programs, place), after=tuple(after)))


# Edits that always break a set of programs, and edits that may leave it equivalent.
BREAKS: dict[str, Callable[[Random, Programs], Programs | None]] = {
    "a dropped receive": _drop(Op.RECEIVE),
    "a dropped send": _drop_send,
    "a send dropped, its message still freed": _drop(Op.SEND),
    "a dropped free": _drop(Op.FREE),
    "a dropped computation": _drop(Op.FORWARD, Op.BACKWARD),
    "a dropped exchange": _drop(Op.PULL, Op.PUSH, Op.COMMIT, Op.UPDATE),
    "a duplicate": _duplicate,
    "a cycle": _cycle,
    "a renamed value": _rename,
    "a wrong peer": _wrong_peer,
    "a wrong block, bucket or micro-batch": _wrong_target,
    "a wait left out": _wait_less,
}
MAY_BREAK: dict[str, Callable[[Random, Programs], Programs | None]] = {"two swapped": _swap, "one moved": _move}


# --- what programs come to, by running them on symbols ----------------------------------------------------------------


class BrokenError(Exception):
    """Programs that do not run to their end, or leave something behind."""


class Replay:
    """All ranks of an iteration, whose values are numbers for the terms that they stand for.

    Args:
        programs: of all ranks.
        numbers: of terms; given to two replays, equal terms have equal numbers.
    """

    def __init__(self, programs: Programs, numbers: dict[object, int]) -> None:
        self.programs = programs
        self.numbers = numbers
        self.at = [0] * len(programs)
        self.alive: list[dict[Value, Any]] = [{} for _ in programs]
        self.made_on: list[dict[Value, Stream]] = [{} for _ in programs]
        self.wires: dict[tuple[int, int], deque[tuple[Value, Any]]] = defaultdict(deque)
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self.turn: dict[tuple[int, Value], int] = {}
        self.exchanges: list[list[tuple[Op, str]]] = [[] for _ in programs]
        self.results: list[dict[object, Any]] = [{} for _ in programs]

    def run(self) -> list[dict[object, Any]]:
        """Return each rank's results: what it pulled, pushed, committed and updated with.

        Raises:
            BrokenError: they do not end, or not properly.
        """
        while any(self._step(rank) for rank in range(len(self.programs))):
            pass
        for rank, program in enumerate(self.programs):
            if self.at[rank] < len(program.instructions) or self.alive[rank]:
                raise BrokenError("stuck, or something is left")
        for op in (Op.PULL, Op.PUSH):
            if len({tuple(each for each in mine if each[0] is op) for mine in self.exchanges}) > 1:
                raise BrokenError("an exchange in two orders")
        if any(self.wires.values()):
            raise BrokenError("a message without a receiver")
        return self.results

    def _now(self, rank: int) -> Instruction | None:
        body = self.programs[rank].instructions
        return body[self.at[rank]] if self.at[rank] < len(body) else None

    def _step(self, rank: int) -> bool:
        """Run one instruction, if it need not wait; of a computation and the commit, on all ranks that join it."""
        instruction = self._now(rank)
        if instruction is None:
            return False
        joined: Sequence[int] = (rank,)
        if instruction.op is Op.COMMIT:
            joined = range(len(self.programs))
        elif instruction.op in (Op.FORWARD, Op.BACKWARD):
            joined = self.programs[rank].tp
        key = (instruction.op, instruction.target, instruction.micro_batch)
        for other in joined:
            now = self._now(other)
            if now is None or (now.op, now.target, now.micro_batch) != key or not self._ready(other, now):
                return False
        # Tensor-parallel ranks add their parts up, so what one of them reads is in the results of all.
        entered = {other: self._now(other) for other in joined}
        terms = tuple(self._terms(other, now) for other, now in entered.items() if now is not None)
        for other, now in entered.items():
            assert now is not None
            self._do(other, now, terms)
            self.at[other] += 1
        return True

    def _ready(self, rank: int, instruction: Instruction) -> bool:
        if instruction.op is Op.RECEIVE:
            return bool(self.wires[self._peer(instruction), rank])
        pulled = {value.bucket for value in instruction.reads if value.kind is ValueKind.WEIGHTS}
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            return all((Op.PULL, bucket) in mine for bucket in pulled for mine in self.exchanges)
        if instruction.op in (Op.PULL, Op.PUSH):
            return all((instruction.op, v.bucket) in mine for v in _room(instruction) for mine in self.exchanges)
        if instruction.op is Op.FREE:
            messages = [value for value in instruction.reads if value.kind is ValueKind.MESSAGE]
            return all(self.received[rank, v.peer] >= self.turn.get((rank, v), 0) for v in messages)
        return True

    def _peer(self, instruction: Instruction) -> int:
        if instruction.peer is None or instruction.peer >= len(self.programs):
            raise BrokenError("no such peer")
        return instruction.peer

    def _terms(self, rank: int, instruction: Instruction) -> tuple[tuple[str, int], ...]:
        alive = self.alive[rank]
        if any(value not in alive for value in instruction.reads) or len({*instruction.reads}) < len(instruction.reads):
            raise BrokenError("a value that is not there, or is named twice")
        return tuple(sorted((str(value), self._read(rank, value)) for value in instruction.reads))

    def _do(self, rank: int, instruction: Instruction, terms: object) -> None:
        self._check_waits(rank, instruction)
        self._check_order(rank, instruction)
        alive = self.alive[rank]
        op = instruction.op
        if op is Op.FREE:
            for value in instruction.reads:
                del alive[value]
            return
        if op is Op.RECEIVE:
            peer = self._peer(instruction)
            name, term = self.wires[peer, rank].popleft()
            self.received[peer, rank] += 1
            if instruction.writes != (name,):
                raise BrokenError("another value than was sent")
            self._make(rank, instruction, name, term)
            return
        if op is Op.SEND:
            peer = self._peer(instruction)
            (value,) = instruction.reads
            self.wires[rank, peer].append((value, alive[value]))
            self.sent[rank, peer] += 1
            for message in instruction.writes:
                if message != f"{value}>{peer}":
                    raise BrokenError("another message")
                self.turn[rank, message] = self.sent[rank, peer]
        elif op in (Op.PULL, Op.PUSH):
            self.exchanges[rank].append((op, instruction.target))
        # Other waits for room leave other numbers of bytes in flight.
        term = (op, instruction.target, instruction.micro_batch, terms, _room(instruction))
        if op not in (Op.FORWARD, Op.BACKWARD, Op.SEND):
            if (op, instruction.target) in self.results[rank]:
                raise BrokenError("done twice")
            self.results[rank][op, instruction.target] = self._number(term)
        for value in instruction.writes:
            self._make(rank, instruction, value, (term, str(value)))

    def _make(self, rank: int, instruction: Instruction, value: Value, term: object) -> None:
        alive = self.alive[rank]
        if value.kind is ValueKind.GRADIENTS:  # a sum, in whatever order
            alive[value] = (*alive.get(value, ()), self._number(term))
        elif value in alive:
            raise BrokenError("made twice")
        else:
            alive[value] = self._number(term)
        self.made_on[rank][value] = instruction.stream

    def _check_waits(self, rank: int, instruction: Instruction) -> None:
        """Another stream may not have made a value yet, unless it is waited for; a free waits for messages only."""
        for value in instruction.reads:
            elsewhere = self.made_on[rank][value] is not instruction.stream
            needed = elsewhere and (instruction.op is not Op.FREE or value.kind is ValueKind.MESSAGE)
            if needed and value not in instruction.after:
                raise BrokenError("a value that may not be there yet")

    def _check_order(self, rank: int, instruction: Instruction) -> None:
        done = self.results[rank]
        if (Op.COMMIT, "") in done and instruction.op not in (Op.UPDATE, Op.FREE):
            raise BrokenError("work after the commit")
        if instruction.op is Op.UPDATE and (Op.COMMIT, "") not in done:
            raise BrokenError("an update before the commit")
        if instruction.op is Op.COMMIT and any(value.kind is ValueKind.MESSAGE for value in self.alive[rank]):
            raise BrokenError("a message on its way at the commit")

    def _read(self, rank: int, value: Value) -> int:
        term = self.alive[rank][value]
        return self._number(tuple(sorted(term)) if value.kind is ValueKind.GRADIENTS else term)

    def _number(self, term: object) -> int:
        return self.numbers.setdefault(term, len(self.numbers))


def _room(instruction: Instruction) -> tuple[Value, ...]:
    """Return the earlier exchanges that a pull or a push waits for."""
    exchanged = instruction.op in (Op.PULL, Op.PUSH)
    return tuple(value for value in instruction.after if value not in instruction.reads) if exchanged else ()


def equal(one: Programs, other: Programs) -> bool:
    """Say whether programs come to the same results."""
    numbers: dict[object, int] = {}
    try:
        return Replay(one, numbers).run() == Replay(other, numbers).run()
    except BrokenError:
        return False


# --- the tests --------------------------------------------------------------------------------------------------------


# A missing instruction, or a wrong number of them, has no index; the message names it.
MISSING = re.compile(
    r"(forward|backward) \S+ \[\d+\] is missing|the pu(ll|sh) of \S+ is missing|\d+ commits .* and \d+ updates"
)


def refusal(case: Iteration, edited: Programs) -> VerificationError | None:
    """Return why the verifier refuses programs."""
    try:
        verify(edited, case.outline, case.mode)
    except VerificationError as error:
        return error
    return None


def caught(case: Iteration, edited: Programs) -> bool:
    """Say whether the verifier refuses programs, having checked that it names an instruction."""
    error = refusal(case, edited)
    if error is not None and error.index is not None:
        named = " ".join(instruction_text(edited[error.rank].instructions[error.index]).split())
        assert f"instruction {error.index} `{named}`" in str(error)
    elif error is not None:
        assert MISSING.search(str(error))
    return error is not None


@given(iterations())
def test_whole_programs_pass_and_replay(case: Iteration) -> None:
    verify(case.programs, case.outline, case.mode)
    assert equal(case.programs, case.programs)


def check_broken(kind: str, case: Iteration, random: Random) -> None:
    edited = BREAKS[kind](random, case.programs)
    assume(edited is not None and edited != case.programs)
    assert edited is not None
    assert not equal(case.programs, edited)
    assert caught(case, edited)


@thorough
@given(iterations(), st.sampled_from(sorted(BREAKS)), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_what_breaks_programs_is_caught(case: Iteration, kind: str, random: Random) -> None:
    check_broken(kind, case, random)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BREAKS)
@given(case=iterations(), random=st.randoms(use_true_random=False))
def test_what_breaks_programs_is_caught_kind_by_kind(kind: str, case: Iteration, random: Random) -> None:
    check_broken(kind, case, random)


@pytest.mark.parametrize("kind", MAY_BREAK)
@given(case=iterations(), random=st.randoms(use_true_random=False))
def test_another_order_is_caught_or_comes_to_the_same(kind: str, case: Iteration, random: Random) -> None:
    edited = MAY_BREAK[kind](random, case.programs)
    assume(edited is not None and edited != case.programs)
    assert edited is not None
    assert caught(case, edited) or equal(case.programs, edited)


def test_most_other_orders_break_something() -> None:
    """At least half of a hundred moves in an ordinary iteration break it; equivalent orders do not."""
    outline = Outline(
        ("embed", "layer.0", "layer.1", "head"), (("word", ("embed", "head")), ("l", ("layer.0", "layer.1")))
    )
    strategy = Strategy((Pipeline((Stage((0, 1), 1), Stage((2,), 1))), Pipeline((Stage((3,), 2),))))
    case = Iteration(outline, "train", rank_programs(outline, strategy, [2, 1], ranks=5))
    moved = [_move(Random(seed), case.programs) for seed in range(100)]
    kinds = Counter(
        (equal(case.programs, each), caught(case, each)) for each in moved if each is not None and each != case.programs
    )
    assert kinds[False, False] == 0
    assert kinds[False, True] >= 50
    assert kinds[True, False] > 0
