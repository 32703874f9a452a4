"""Elements of a bucket that each rank holds; blocks that share a parameter must agree on its gradient."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.program import Block, Program
from hydragraph.passes.variants import Variants
from hydragraph.passes.weight_layouts import bucket_kinds, layouts
from hydragraph.spec.home import EQUAL
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy
from tests.models import llama
from tests.thorough import only


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(llama(layers=2, heads=4, kv=2, tied=True))


@only("part1", "part2")
@pytest.mark.parametrize(
    "part", [StagePart(), StagePart(StageKind(2)), StagePart(StageKind(4, sequence_parallel=True), 1)]
)
def test_kinds_are_those_of_the_blocks(program: Program, part: StagePart) -> None:
    kinds_of = Variants(program).kinds
    for bucket in program.buckets:
        kinds = bucket_kinds(program, bucket, part, kinds_of)
        assert list(kinds) == [p.name for p in bucket.parameters]
        for block in program.blocks:
            local = dict(zip(block.parameters, program.templates[block.template].parameters, strict=True))
            for name in kinds.keys() & local.keys():
                assert kinds[name] is kinds_of(block, part)[local[name]]


def test_blocks_that_share_a_parameter_must_agree_on_its_gradient(program: Program) -> None:
    shared = next(b for b in program.buckets if len(b.blocks) > 1)

    def kinds_of(block: Block, part: StagePart) -> Mapping[str, GradientKind]:
        kind = GradientKind.PARTIAL if block is program.blocks[0] else GradientKind.REPLICA
        return dict.fromkeys(program.templates[block.template].parameters, kind)

    with pytest.raises(Unsupported, match="full gradient from one block and a partial gradient from another at tp 2"):
        bucket_kinds(program, shared, StagePart(StageKind(2)), kinds_of)


@pytest.mark.parametrize("text", ["<tp1,pp1>", "<tp2,pp2>", "<[0,1]x1s,[2]x1> + <[3]x2>"])
def test_every_element_has_one_owner_and_is_used(program: Program, text: str) -> None:
    for placed in layouts(
        program, Strategy.parse(text, program.layers), HomeLayouts(EQUAL, 4).by_name(program.buckets)
    ):
        owned = sorted((int(lo), int(hi)) for lo, hi in zip(placed.home.lo, placed.home.hi, strict=True))
        assert [lo for lo, _ in owned] == [0, *(hi for _, hi in owned[:-1])]
        assert owned[-1][1] == placed.bucket.size
        used = {(int(lo), int(hi)) for lo, hi in zip(placed.used.lo, placed.used.hi, strict=True)}
        assert sum(hi - lo for lo, hi in used) >= placed.bucket.size
