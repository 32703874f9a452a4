"""Choosing every step in a real run under a budget: a tiny one on two ranks, and what is printed of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import hydragraph as hg
from benchmarks.dynamic import (
    DYNAMIC,
    KINDS,
    Held,
    Row,
    Run,
    Sizes,
    Taken,
    candidates,
    candidates_table,
    memory_lines,
    on_ranks,
    steps_table,
    summary,
    usable,
    watched,
    within,
)
from hydragraph.cost.block_pieces import BlockPiece, Constants, MemoryLines, PricedDevice
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.spec.stage_kind import StageKind
from tests.thorough import thorough

SIZES = Sizes(hidden=64, layers=2, vocabulary=64, context=160, tokens=128)
ELEMENTS = 100_000


def made_up(sizes: ModelSizes, blocks: tuple[str, ...]) -> Profile:
    """Return a profile in which dividing and recomputing cost time and save memory."""

    def pieces(kind: StageKind) -> dict[str, BlockPiece]:
        seconds = Constants(1e-8, 1e-5, 1e-4 * kind.tp).times((1.3 if kind.recompute else 1.0) / kind.tp**0.5)
        kept = (400.0 if kind.recompute else 4000.0) / kind.tp
        held = MemoryLines(saved=(0.0, kept), forward=(0.0, kept))
        part = 1 / 4 if kind.recompute else 1 / 3
        piece = BlockPiece(seconds.times(part), seconds.times(1 - part), ELEMENTS // 4 // kind.tp, held=held)
        return dict.fromkeys(blocks, piece)

    return Profile(
        "made up",
        {},
        {1: 16, 2: 16},
        blocks=blocks,
        pieces={kind: pieces(kind) for kind in KINDS},
        device=PricedDevice("made up", 1e9, 4),
        sizes=sizes,
    )


def profile() -> Profile:
    program = hg.capture(SIZES.model(), check="off")
    return made_up(ModelSizes.of(program), tuple(block.template for block in program.blocks))


def test_candidates_are_all_strategies_of_two_ranks() -> None:
    texts = [str(s).partition("@")[0] for s in candidates(4)]
    assert len(set(texts)) == len(texts) == 3 + 4 + 4
    assert all(s.pipelines[0].layers == 4 for s in candidates(4))


@thorough
def test_the_budget_decides_what_fits() -> None:
    every = candidates(SIZES.layers)
    whole = profile()
    roomy, _ = usable(every, within(whole, 1e9))
    assert len(roomy) == len(every)
    tight, left_out = usable(every, within(whole, 6e6))
    assert all(tight[s] < roomy[s] for s in tight)
    replicas, divided = every[0], every[6]
    assert tight[divided] > tight[replicas]
    _, nothing = usable(every, within(whole, 1e5))
    assert not left_out
    assert set(nothing.values()) == {"its weights alone are beyond the budget"}


def test_lengths_have_a_long_tail() -> None:
    batches = Sizes().lengths(24)
    flat = sorted(n for batch in batches for n in batch)
    assert all(sum(batch) >= Sizes().tokens for batch in batches)
    assert flat[0] >= 40
    assert flat[-1] <= Sizes().context
    assert flat[-1] > 10 * flat[len(flat) // 2]
    assert batches == Sizes().lengths(24)


@thorough
def test_all_sides_train_alike() -> None:
    batches = [[20, 30, 40, 40], [150, 10]]
    given = within(profile(), 3.2e6)
    reach, _ = usable(candidates(SIZES.layers), given)
    assert min(reach.values()) < 150 <= max(reach.values())
    run = hg.launch(on_ranks, 2, SIZES, batches, given)[0]
    assert run.sides[0] == DYNAMIC
    assert len(run.sides) > 1
    for row in run.rows:
        assert row.difference <= 1e-5
        assert all(t.seconds > 0 and t.expected_s > 0 for t in row.taken.values())
        assert all(row.taken[DYNAMIC].expected_s <= t.expected_s * (1 + 1e-9) for t in row.taken.values())
    assert len({row.taken[DYNAMIC].strategy for row in run.rows}) == 2
    held = hg.launch(watched, 2, SIZES, batches, given, list(run.reach))
    assert all(len(each.steps) == 2 and each.replicas > 0 for each in held)


def test_the_summary_is_arithmetic() -> None:
    sides = {DYNAMIC: (1.5, 1.0), "slow": (4.0, 2.0), "quick": (3.0, 2.0)}
    taken = {name: Taken(2.0, seconds, expected, "s") for name, (seconds, expected) in sides.items()}
    run = Run((Row((5, 9), taken),) * 3, {"s": 5, "slow": 9, "quick": 9}, {})
    assert run.sides == [DYNAMIC, "quick", "slow"]
    lines = summary(run)
    assert lines[0].startswith("best static strategy (quick) / choosing every step: 2.00 measured, 2.00 expected")
    assert "quick: measured / expected 1.50 in the median (1.50 to 1.50)" in lines
    console = Console(width=170, file=io.StringIO(), record=True)
    console.print(steps_table(run), candidates_table(run))
    printed = console.export_text()
    assert "3.000 / 2.000" in printed
    assert "12.000" in printed
    wrong = Row((5,), {**taken, "slow": Taken(2.2, 1.0, 1.0, "s")})
    assert wrong.difference == pytest.approx(0.1)
    alone = Run((Row((5,), {DYNAMIC: taken[DYNAMIC]}),), {"s": 5}, {})
    assert "no static rival" in summary(alone)[0]


def test_a_peak_beyond_the_budget_is_wrong() -> None:
    held = [Held((("s", 10_000_000), ("t", 30_000_000)), 90_000_000), Held((("s", 20_000_000),), 80_000_000)]
    first, *others = memory_lines(held, 25e6)
    assert "90.0 of 25.0 MB" in first
    assert others == [
        "live tensor bytes at most, s: 20.0 of 25.0 MB",
        "live tensor bytes at most, t: 30.0 of 25.0 MB, WRONG: beyond the budget",
    ]
