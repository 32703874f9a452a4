# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return, bad-argument-type]
import re
from dataclasses import replace

import pytest

from hydragraph.ir.instruction import Op
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.rank_program import Role
from hydragraph.ir.value import activation, aux, weights
from hydragraph.ir.verify import VerificationError, verify
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy

BLOCKS = ("embed", "layer.0", "layer.1", "head")
MODEL = Outline(BLOCKS, (("word", ("embed", "head")), *((block, (block,)) for block in BLOCKS[1:])))
# Two tensor-parallel ranks feed rank 2; rank 3 is a pipeline of its own; rank 4 is idle.
STRATEGY = Strategy((Pipeline((Stage((0, 1), 1), Stage((2,), 1))), Pipeline((Stage((3,), 2),))))


def programs(strategy=STRATEGY, counts=(3, 2), mode="train", ranks=5):
    return rank_programs(MODEL, strategy, counts, mode, ranks=ranks)


def find(program, text):
    """Return the index of the only instruction whose line has `text` in it; messages count where `text` names one."""
    lines = map(instruction_text, program.instructions)
    (index,) = (i for i, line in enumerate(lines) if text in line and (">" in line) <= (">" in text or "->" in line))
    return index


def edited(all_programs, rank, edit):
    """Return the programs with one rank's list of instructions changed in place by `edit(list, find)`."""
    program = all_programs[rank]
    body = list(program.instructions)
    edit(body, lambda text: find(program, text))
    changed = replace(program, instructions=tuple(body))
    return tuple(changed if each is program else each for each in all_programs)


def refused(tampered, message, mode="train"):
    with pytest.raises(VerificationError, match=message) as caught:
        verify(tampered, MODEL, mode)
    error = caught.value
    if error.index is not None:
        shown = " ".join(instruction_text(tampered[error.rank].instructions[error.index]).split())
        assert str(error).startswith(f"rank {error.rank}, instruction {error.index} `{shown}`: ")
    return error


def dropped(text):
    return lambda body, at: body.pop(at(text))


def unsent(message):
    """Drop a send, and the free of its message."""

    def edit(body, at):
        del body[at(f"free {message}")]
        value, _, peer = message.partition(">")
        del body[at(f"send {value} -> rank {peer}")]

    return edit


def moved(text, before):
    def edit(body, at):
        source, target = at(text), at(before)
        body.insert(target - (source < target), body.pop(source))

    return edit


def swapped(one, other):
    def edit(body, at):
        i, j = at(one), at(other)
        body[i], body[j] = body[j], body[i]

    return edit


def changed(text, **fields):
    def edit(body, at):
        body[at(text)] = replace(body[at(text)], **fields)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            dropped("backward layer.1 [1] (t."),
            r"t\.layer\.1\.1 is last used here|the weight half of backward layer.1 \[1\]",
        ),
        (dropped("backward layer.1 [1] (s."), r"the input half of backward layer.1 \[1\] is missing"),
        (
            moved("G.head += backward head [0]", "t.head.0 += backward"),
            r"t\.head\.0 is read, but no earlier instruction makes",
        ),
        (
            changed("backward layer.1 [0] (t.", micro_batch=1),
            r"this rank should not run this instruction|instruction should read",
        ),
    ],
)
def test_halves_of_backwards_verify_and_belong_together(edit, message):
    strategy = Strategy((Pipeline((Stage((0,), 1), Stage((1,), 1))),), "zb-h1")
    verify(programs(strategy, [2], ranks=2), MODEL)
    refused(edited(programs(strategy, [2], ranks=2), 1, edit), message)


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_untouched_programs_verify(mode):
    verify(programs(mode=mode), MODEL, mode)


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        # Messages.
        (0, unsent("h1.2>2"), r"rank 2, .*`p2p h1.2 = receive <- rank 0`: rank 0 has no matching send"),
        (0, unsent("h1.1>2"), r"rank 2, .*`p2p h1.1 = receive <- rank 0`: rank 0 sends h1.2 instead"),
        (0, swapped("h1.0 -> rank", "h1.1 -> rank"), r"rank 0, .*h1\.1"),
        (0, swapped("d1.1 = receive", "d1.2 = receive"), r"rank 0, .*`compute .*backward layer.0 \[1\].*d1.1 is read"),
        (2, swapped("h1.0 = receive", "h1.1 = receive"), r"rank 2, .*`compute .*forward layer.1 \[0\].*h1.0 is read"),
        (
            2,
            moved("h1.1 = receive", "h1.0 = receive"),
            r"rank 2, .*`p2p h1.1 = receive <- rank 0`: rank 0 sends h1.0 instead",
        ),
        (1, changed("d1.0 = receive", peer=0), r"rank 1, .*`p2p d1.0 = receive <- rank 0`: rank 0 is the wrong peer"),
        (0, changed("send h1.0", peer=3), r"rank 0, .*`p2p send h1.0 -> rank 3 after h1.0`: rank 3 is the wrong peer"),
        (0, changed("send h1.0", peer=None), r"rank 0, .*wrong peer"),
        # Values.
        (
            0,
            dropped("free h1.0"),
            r"rank 0, .*`p2p send h1.0 -> rank 2 after h1.0`: h1.0 is last used here, but is never",
        ),
        (0, moved("free h1.0", "send h1.0"), r"rank 0, .*`p2p send h1.0 .*`: h1.0 is read, but instruction \d+ freed"),
        (
            0,
            changed("free h1.1", reads=(activation(1, 0),)),
            r"rank 0, .*`compute free h1.0`: h1.0 is freed, but",
        ),
        (
            0,
            changed("free h1.0", reads=(activation(1, 0),) * 2),
            r"rank 0, .*`compute free h1.0, h1.0`: this instruction names h1.0 tw",
        ),
        (0, moved("d1.0 = receive", "commit"), r"rank 0, .*backward layer.0 \[0\].*d1.0 is read, but no earlier"),
        (0, changed("send h1.0", after=()), r"rank 0, .*`p2p send h1.0 -> rank 2`: .*should wait .*: h1.0"),
        (
            0,
            changed("forward embed [0]", after=(weights("word"), aux(0))),
            r"rank 0, .*embed \[0\].*instruction should wait for the values that it reads from other streams: W.word",
        ),
        (
            0,
            changed("forward aux [1]", writes=(aux(0),)),
            r"rank 0, .*forward aux \[1\]`: this instruction should read \(\) and write",
        ),
        # Computation.
        (0, dropped("backward embed [1]"), r"rank 0: backward embed \[1\] is missing"),
        (3, dropped("forward layer.1 [1]"), r"rank 3: forward layer.1 \[1\] is missing"),
        (
            3,
            changed("forward aux [1]", micro_batch=0),
            r"rank 3, .*forward aux \[0\]`: this rank should not run this instruction, or",
        ),
        (0, changed("forward embed [0]", reads=(weights("head"), aux(0))), r"rank 0, .*should read \(W.word, a.0\)"),
        (0, changed("send h1.0", op=Op.PULL), r"rank 0, .*pull may not use h1.0, h1.0>2"),
        (0, dropped("free h1.0>2"), r"rank 0, .*send h1.0 .*h1.0>2 is last used here, but is never freed"),
        (2, moved("free d1.1>0", "update"), r"rank 2, .*free d1.1>0.*every message must be freed before the commit"),
        (2, moved("free d1.0>0", "send d1.0 -> rank 0"), r"rank 2, .*free d1.0>0.*d1.0>0 is freed, but no earlier"),
        (
            0,
            changed("free h1.0>2", after=()),
            r"rank 0, .*instruction should wait for the values that it reads from other streams: h1.0>2",
        ),
        # Exchanges.
        (
            4,
            swapped("G.head", "G.layer.1"),
            r"rank 4, .*`push link G.layer.1 others -> home`: rank 0 runs the push of",
        ),
        (
            4,
            swapped("W.head", "W.layer.1"),
            r"rank 4, .*`pull link W.head home -> others`: rank 0 runs the pull of la",
        ),
        (4, dropped("G.layer.0"), r"rank 4: the push of layer.0 is missing"),
        (3, dropped("link G.layer.0"), r"rank 3: the push of layer.0 is missing"),
        (4, changed("G.layer.0", target="layer.1"), r"rank 4, .*the push of layer.1 is repeated"),
        (3, changed("link G.layer.0", reads=(), after=()), r"rank 3, .*this rank needs layer.0"),
        (
            3,
            moved("link G.layer.0", "backward layer.0 [1]"),
            r"rank 3, .*`push link G.layer.0 .*G.layer.0 is pushed bef",
        ),
        (
            3,
            moved("commit", "link G.word"),
            r"rank 3, .*`compute commit .*: instruction \d+ `push link G.word -> home ",
        ),
        (3, moved("update", "commit"), r"rank 3, .*`compute update`: the update must follow the commit"),
        (4, dropped("commit"), r"rank 4: the program has 0 commits \(mode train requires 1\) and 1 updates"),
        (3, changed("commit", reads=()), r"rank 3, .*(last used here, but is never freed|the commit should read)"),
    ],
)
def test_tampered_programs_are_caught(rank, edit, message):
    error = refused(edited(programs(), rank, edit), message)
    assert isinstance(error, ValueError)


def task(body, m):
    """Return where the forward of micro-batch m starts and ends in a rank's instructions."""
    mine = [i for i, each in enumerate(body) if each.op is Op.FORWARD and each.micro_batch == m]
    return mine[0], mine[-1] + 2  # including the free that follows


def test_other_order_on_one_tensor_parallel_rank_is_a_deadlock():
    gpipe = Strategy((Pipeline((Stage((0, 1), 2),)),), "gpipe")

    def edit(body, at):
        (a, b), (c, d) = task(body, 0), task(body, 1)
        body[a:d] = body[c:d] + body[b:c] + body[a:b]

    error = refused(edited(programs(gpipe, [3], "evaluate", 2), 1, edit), "deadlock", "evaluate")
    assert re.search(r"rank 0 -> rank 1 -> rank 0\. All waiting ranks", str(error))
    assert "rank 0 at instruction 4 `compute a.0 = forward aux [0]` waits for rank 1" in str(error)
    assert "rank 1 at instruction 4 `compute a.1 = forward aux [1]` waits for rank 0" in str(error)


def test_neighbours_that_both_receive_first_are_a_deadlock():
    strategy = Strategy((Pipeline((Stage((0,), 1), Stage((1,), 1))),))
    untouched = programs(strategy, [2], ranks=2)
    verify(untouched, MODEL)
    # Rank 1 asks for h1.1 before it runs backward 0; rank 0 now asks for that backward's result before it sends h1.1.
    error = refused(edited(untouched, 0, moved("d1.0 = receive", "send h1.1")), "deadlock")
    assert "`p2p d1.0 = receive <- rank 1` waits for rank 1" in str(error)
    assert "`p2p h1.1 = receive <- rank 0` waits for rank 0" in str(error)


def test_pull_behind_a_receive_is_a_deadlock():
    strategy = Strategy((Pipeline((Stage((0,), 1), Stage((1,), 1))),))
    stuck = programs(strategy, [1], ranks=2)
    for pull in ("W.word = link", "link W.layer.0", "W.layer.1 = link", "W.head = link"):
        stuck = edited(stuck, 1, moved(pull, "forward aux [0]"))
    error = refused(stuck, r"deadlock: rank 0 -> rank 1 -> rank 0")
    assert "forward embed [0] (W.word, a.0) after W.word` waits for rank 1" in str(error)


@pytest.mark.parametrize(
    ("rank", "fields", "message"),
    [
        (1, {"rank": 0}, "rank 1: the header says rank 0 of 5"),
        (1, {"strategy": "other"}, "rank 1: the strategy is other, but rank 0 has"),
        (1, {"roles": (Role(0, 0, range(2)),)}, "rank 1: the roles, ranks and layers .* differ from rank 0's"),
        (1, {"roles": (), "tp": (), "layers": ()}, "rank 0: tensor-parallel peer 1 has other roles or layers"),
        (2, {"layers": ((0, 2),)}, "rank 2: stage 1 starts at layer 0, but stage 1 must start at 1"),
        (2, {"roles": (Role(0, 1, range(4)),)}, "rank 2: the pipeline's stages have different micro-batches"),
        (3, {"layers": ((0, 1),)}, "rank 3: the pipeline ends at layer 1 of 2"),
    ],
)
def test_places_that_do_not_fit_together_are_caught(rank, fields, message):
    refused(tuple(replace(p, **fields) if p.rank == rank else p for p in programs()), message)


def test_programs_of_the_other_mode_are_caught():
    refused(programs(mode="evaluate"), r"instruction should read")
    refused(programs(), r"instruction should read", "evaluate")


def test_a_missing_rank_is_caught():
    refused(programs()[:4], "rank 0 of 5; give all programs in rank order")


SHARING = Outline(("embed", "layer.0", "layer.1", "head"), tuple((b, (b,)) for b in ("embed", "layer.0", "layer.1")))


@pytest.mark.parametrize(
    ("rank", "roles", "message"),
    [
        (2, (Role(0, 1, range(2)),), "rank 1: the pipeline ends at layer 1 of 2"),
        (
            2,
            (Role(0, 1, range(2)), Role(1, 1, range(2, 4))),
            "rank 2: the pipeline's stages have different micro-batches",
        ),
        (2, (Role(0, 1, range(2)), Role(1, 1, range(1))), "rank 2: .* use the same micro-batch number"),
        (1, (Role(1, 0, range(4, 5)),), "rank 2: the pipeline's stages have different micro-batches"),
    ],
)
def test_roles_of_a_shared_stage_that_do_not_fit_are_caught(rank, roles, message):
    strategy = Strategy.parse("<[0]x1,[2]x1> + <[1]x1,[2]x1>", 2)
    made = rank_programs(SHARING, strategy, [2, 1], ranks=3)
    verify(made, SHARING)
    with pytest.raises(VerificationError, match=message):
        verify([replace(p, roles=roles) if p.rank == rank else p for p in made], SHARING)
