# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return, bad-argument-type]
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.rank_program import RankProgram, Role, parse, to_text
from hydragraph.ir.value import activation, activation_gradient, aux, gradients, loss, message, saved, weights

EXAMPLE = """\
rank 2 of 4  strategy <tp2,pp1> + <tp1,pp2>@7c1e00  pipeline 1, stage 0: layers 0-1, tp 1 (ranks 2), micro-batches 3
pull     W.layer.0 = link home -> here
pull     link W.head home -> others
compute  a.0 = forward aux [0]
compute  h1.0, s.layer.0.0 = forward layer.0 [0] (W.layer.0, h0.0, a.0)  after W.layer.0
p2p      send h2.0 -> rank 3                                  after h2.0
p2p      d2.0 = receive <- rank 3
compute  d1.0, G.layer.1 += backward layer.1 [0] (s.layer.1.0, d2.0, W.layer.1)  after d2.0, W.layer.1
push     link G.layer.1 -> home                               after G.layer.1
push     link G.head others -> home
compute  free s.layer.1.0, d2.0
compute  free h2.0>3                                          after h2.0>3
compute  commit (loss.0, G.layer.1)
compute  update
"""


def test_printed_form_is_stable():
    assert to_text(parse(EXAMPLE)) == EXAMPLE


def test_fields_of_a_parsed_program():
    program = parse(EXAMPLE)
    assert program == replace(
        RankProgram(2, 4, "<tp2,pp1> + <tp1,pp2>@7c1e00", (Role(1, 0, range(3)),), (2,), ((0, 2),), ()),
        instructions=program.instructions,
    )
    assert program.instructions[0] == Instruction(Op.PULL, "layer.0", writes=(weights("layer.0"),))
    assert program.instructions[4] == Instruction(
        Op.SEND, peer=3, reads=(activation(2, 0),), writes=(message(activation(2, 0), 3),), after=(activation(2, 0),)
    )
    assert program.instructions[6] == Instruction(
        Op.BACKWARD,
        "layer.1",
        0,
        reads=(saved("layer.1", 0), activation_gradient(2, 0), weights("layer.1")),
        writes=(activation_gradient(1, 0), gradients("layer.1")),
        after=(activation_gradient(2, 0), weights("layer.1")),
    )


def test_comments_and_spacing_are_ignored():
    program = parse(EXAMPLE)
    commented = to_text(program, {0: "12.5 MB: 9.4 from ranks 0 1 3", 4: "after 3 ms # or 4"})
    assert "here                        # 12.5 MB" in commented
    assert parse(commented) == program
    assert (
        parse("# made by hand\n\n" + EXAMPLE.replace("  after", "      after").replace("pull     ", "pull ")) == program
    )


names = st.text("abz09._-", min_size=1, max_size=6)
numbers = st.integers(0, 99)
ranges = st.tuples(numbers, numbers).map(lambda pair: range(pair[0], pair[0] + pair[1] + 1))
moved = st.builds(activation, numbers, numbers) | st.builds(activation_gradient, numbers, numbers)
value = (
    moved
    | st.builds(saved, names, numbers)
    | st.builds(aux, numbers)
    | st.builds(loss, numbers)
    | st.builds(weights, names)
    | st.builds(gradients, names)
    | st.builds(message, moved, numbers)
)
values = st.lists(value, max_size=3).map(tuple)


@st.composite
def instructions(draw):
    op = draw(st.sampled_from(Op))
    after = draw(values)
    target = draw(names)
    peer = draw(numbers)
    one = (draw(moved),)
    here = draw(st.booleans())
    fields = {
        Op.PULL: lambda: {"target": target, "writes": (weights(target),) if here else ()},
        Op.PUSH: lambda: {"target": target, "reads": (gradients(target),) if here else ()},
        Op.SEND: lambda: {"peer": peer, "reads": one, "writes": (message(one[0], peer),)},
        Op.RECEIVE: lambda: {"peer": peer, "writes": one},
        Op.FREE: lambda: {"reads": one + draw(values)},
        Op.COMMIT: lambda: {"reads": draw(values)},
        Op.UPDATE: dict,
    }.get(
        op,
        lambda: {"target": target, "micro_batch": draw(numbers), "reads": draw(values), "writes": draw(values)},
    )()
    return Instruction(op, after=after, **fields)


@st.composite
def programs(draw):
    strategy = draw(st.text("<tp2,1>+* [0]x@", min_size=1).map(str.strip))
    body = tuple(draw(st.lists(instructions(), max_size=6)))
    rank, ranks = draw(numbers), draw(numbers)
    if draw(st.booleans()):
        return RankProgram(rank, ranks, strategy, (), (), (), body)
    tp, first, count = draw(st.lists(numbers, min_size=1, max_size=3)), draw(numbers), draw(st.integers(1, 9))
    each = st.builds(Role, numbers, numbers, ranges)
    # Several in one pipeline have several ranges of layers.
    roles = draw(st.lists(each, min_size=1, max_size=3, unique_by=lambda role: role.pipeline).map(tuple))
    return RankProgram(rank, ranks, strategy, roles, tuple(tp), ((first, first + count),), body)


@given(programs(), st.dictionaries(st.integers(0, 5), st.text("ab #,()=+>-", max_size=9)))
def test_round_trip(program, comments):
    assert parse(to_text(program)) == program
    assert parse(to_text(program, comments)) == program


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rank 2 of 4", "rank two of 4", r"line 1: 'rank two.* is not a header: write 'rank R of N"),
        ("tp 1 (ranks 2)", "tp 2 (ranks 2)", r"line 1: expected 2 ranks following 'tp 2', found 1"),
        (
            "p2p      send",
            "net      send",
            r"line 6: expected a stream \(pull, compute, p2p, push, offload\), found 'net'",
        ),
        ("p2p      send", "push     send", r"line 6: expected stream p2p for send, found 'push'"),
        ("(s.layer.1.0, d2.0", "(s.layer.1.0, x2.0", r"line 8: 'x2.0' is not a value: write h2.0 or d2.0 \(block"),
        ("send h2.0 ->", "send h2.0 to", r"line 6: expected 'send VALUE -> rank RANK', found 'send h2.0 to rank 3'"),
        ("+= backward", "= backward", r"line 8: expected 'VALUES \+= backward BLOCK"),
        ("link W.head home ->", "link W.head ->", r"line 3: expected 'W.BUCKET = link home -> here' or 'link W"),
        ("  after h2.0", "  after (h2.0)", r"line 6: expected values following 'after'.* found '\(h2.0\)'"),
        ("compute  update", "compute  rest", r"line 14: expected .*'update', found 'rest'"),
        (EXAMPLE, "# nothing\n", r"line 2: expected a header .* found the end"),
    ],
)
def test_errors_name_the_line_and_what_was_expected(old, new, message):
    assert old in EXAMPLE
    with pytest.raises(ValueError, match=message):
        parse(EXAMPLE.replace(old, new))


def test_text_that_would_not_parse_back_is_refused():
    program = parse(EXAMPLE)
    with pytest.raises(ValueError, match="remove '#'"):
        to_text(replace(program, strategy="a#b"))
    with pytest.raises(ValueError, match="comment on instruction 1"):
        to_text(program, {1: "two\nlines"})


def test_instruction_text_never_fails():
    assert instruction_text(Instruction(Op.SEND)) == "p2p      send  -> rank None"
