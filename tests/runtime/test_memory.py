"""A rank holds in memory what it should: live tensor bytes over real gloo processes, from a meta model."""

from __future__ import annotations

import functools
from datetime import timedelta
from unittest import mock

import pytest
import torch

import hydragraph as hg
from benchmarks import memory
from benchmarks.memory import LiveBytes, Measured, Sizes, measure
from tests.thorough import only, thorough

LIMIT = timedelta(seconds=120)
# Activations outweigh messages, whose end depends on other ranks.
SMALL = Sizes(hidden=64, layers=2, vocabulary=257, lengths=(300, 240, 120, 60))


@functools.cache
def program() -> hg.Program:
    return hg.capture(SMALL.model(), check="off")


def measured(prepared: tuple[hg.Program, object], texts: list[str], homes: list[hg.Home]) -> list[Measured]:
    with mock.patch.object(memory, "STEPS", 2):  # the first, and one whose state is there before
        return [measure(prepared, SMALL, text, home) for text, home in zip(texts, homes, strict=True)]


@only("3-['<[0]x1o,[1]x1w> + <[2]x2g>', '<[0,1]x1sr,[2]x1> zb-h1']-stages equal")
@pytest.mark.parametrize(
    ("ranks", "texts", "home"),
    [
        (1, ["<tp1,pp1>", "<tp1,pp1>o"], hg.Home()),
        pytest.param(2, ["<tp1,pp2>o", "<[1,0]x2sr0.5o>"], hg.Home(), marks=thorough),
        pytest.param(2, ["2*<tp1,pp1>w", "2*<tp1,pp1>g", "<[0]x2w> + <[1]x2>"], hg.Home(), marks=thorough),
        pytest.param(2, ["2*<tp1,pp1>", "<tp2,pp1>", "<[1,0]x2s>", "<tp1,pp2>"], hg.Home(), marks=thorough),
        pytest.param(3, ["<[0,1]x1s,[2]x1>", "<[1,2]x2s> + <[0]x2r>"], hg.Home(), marks=thorough),
        (3, ["<[1,2]x2s> + <[0]x2r>"], hg.Home([3, 0, 1])),
        (2, ["<tp1,pp2> zb-h1"], hg.Home()),
        pytest.param(3, ["<[0]x1,[1,2]x1s> zb-h1", "<[0]x1,[1]x1r> zb-h1"], hg.Home(), marks=thorough),
        pytest.param(3, ["<[0,1]x1s,[2]x1>"], hg.Home([3, 0, 1]), marks=thorough),
        pytest.param(3, ["<[0,1]x1s,[2]x1>", "3*<tp1,pp1>"], hg.Home(copies=2), marks=thorough),
        (3, ["<[0]x1o,[1]x1w> + <[2]x2g>", "<[0,1]x1sr,[2]x1> zb-h1"], (hg.Home.parse("stages"), hg.Home())),
        (3, ["<[0]x1o,[1]x1r> + <[2]x2g>", "<[0,1]x1sw,[2]x1>"], hg.Home.parse("stages")),
        pytest.param(3, ["<[0]x1wr,[1]x1> + <[2]x2r0.5>", "<[0]x2w>"], hg.Home.parse("stages"), marks=thorough),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_measured_is_expected(ranks: int, texts: list[str], home: hg.Home | tuple[hg.Home, ...]) -> None:
    homes = [*home] if isinstance(home, tuple) else [home] * len(texts)
    prepared = program(), hg.precompile(program(), [hg.Strategy.parse(text, SMALL.layers) for text in texts])
    for rank, found in enumerate(hg.launch(measured, ranks, prepared, texts, homes, timeout=LIMIT)):
        for text, owners, one in zip(texts, homes, found, strict=True):
            if rank not in hg.Strategy.parse(text, SMALL.layers).devices:
                continue  # its peak is the optimizer's update, which the walk leaves out
            least, most = (one.expected, one.at_most) if owners.copies > 1 else (one.walked, one.walked)
            assert 0.99 * least.total <= one.peak <= 1.01 * most.total, f"{text}, rank {rank}: {one}"
            assert one.at_most.total >= one.checked.total >= one.expected.total
            assert abs(one.difference) <= 0.1, f"{text}, rank {rank}: {one}"


@thorough
def test_live_bytes_count_storages_once_and_while_they_live() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        start = live.live
        assert start >= before.untyped_storage().nbytes()
        made = torch.ones(100)
        view = made[10:].view(9, 10)
        assert live.live == start + 400
        del made
        assert live.live == start + 400
        del view
        assert live.live == start
        total = (torch.ones(150) + 1).sum()
        assert live.live == start + 4
        assert live.peak == start + 1200
        del total
