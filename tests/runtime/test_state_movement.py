"""Any home to any other, over changing ranks, with any optimizer: what is left is where it is to be, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hydragraph.cluster.communicators import Channel, Groups
from hydragraph.cluster.launch import World
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Program
from hydragraph.runtime.home_state import HomeState, make_optimizer
from hydragraph.runtime.state_movement import OwnedState, Route, agreed_columns, carry
from hydragraph.spec.home import Home
from tests.runtime import homes
from tests.runtime.homes import MODEL, Model
from tests.thorough import thorough

FROZEN = Bucket("layer.0/frozen", (Parameter("layer.0.base", (9, 3), trainable=False),), ("layer.0",), learns=False)
WHOLE = Model((*MODEL.buckets, FROZEN))
CPU = torch.device("cpu")


def momentum_of_some(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer of two groups, only one of them with state per element."""
    first, second = named[::2], named[1::2]
    return torch.optim.SGD([{"params": first, "momentum": 0.9}, {"params": second}], lr=0.1)


def half(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer for `narrow`, which keeps a state in 16 bits; messages then have odd offsets."""
    return torch.optim.AdamW(named, lr=0.1)


def narrow(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has stepped a state in 16 bits."""
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16().float()
        state["seen"] = state["exp_avg"].to(torch.bfloat16)


FACTORIES: list[Callable[..., torch.optim.Optimizer]] = [
    homes.adamw,
    homes.sgd,
    homes.unstepped,
    momentum_of_some,
    half,
    lambda named: torch.optim.SGD(named, lr=0.1),
    lambda named: torch.optim.Adagrad(named),
    lambda named: torch.optim.NAdam(named),
    lambda named: torch.optim.Rprop(named),
]


class Exchanges:
    """All-to-alls between threads, which stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sent: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.most = 0  # bytes that a rank has received at once, or sent to each of two owners
        self.meeting = threading.Barrier(ranks, timeout=30)

    def of(self, rank: int) -> Groups:
        return cast(Groups, RankGroups(self, World(rank, self.ranks, rank, CPU, "gloo")))


class RankGroups:
    """One rank's view of the exchanges."""

    def __init__(self, exchanges: Exchanges, world: World) -> None:
        self.exchanges = exchanges
        self.world = world

    def all_to_all(self, role: Channel, out: Tensor, inp: Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        exchanges, rank = self.exchanges, self.world.rank
        assert in_splits[rank] == out_splits[rank] == 0, "a rank does not send to itself"
        exchanges.sent[rank] = list(inp.split(in_splits))
        exchanges.meeting.wait()
        out.copy_(torch.cat([exchanges.sent[peer][rank] for peer in range(exchanges.ranks)]))
        assert [len(exchanges.sent[peer][rank]) for peer in range(exchanges.ranks)] == out_splits
        exchanges.meeting.wait()
        exchanges.most = max(exchanges.most, len(out), len(inp) // 2)

    def wait(self, message: None) -> None:
        pass


def trained(owners: Home, ranks: int, factory: Callable[..., torch.optim.Optimizer]) -> list[OwnedState]:
    """Return what each rank owns after two steps."""
    found = []
    layouts = HomeLayouts(owners, ranks).by_name(WHOLE.buckets)
    for rank in range(ranks):
        home = HomeState.allocate(cast(Program, WHOLE), layouts, rank)
        home.fill(homes.tensors(0, WHOLE))
        optimizer = make_optimizer(factory, home)
        gradients = homes.tensors(1, WHOLE)
        for _ in () if factory is homes.unstepped else (1, 2):
            for name, piece in home.pieces.items():
                if piece.parameter.trainable:
                    whole = piece.parameter.canonical(gradients[name])
                    owned = [whole[lo:hi] for lo, hi in piece.intervals]
                    home.parameters[name].grad = torch.cat(owned) if owned else None
            optimizer.step()
            if factory is half:
                narrow(optimizer)
        found.append(OwnedState.of(home, optimizer))
    return found


def gathered(states: Sequence[OwnedState | None]) -> dict[tuple[str, str], Tensor]:
    """Assemble columns in canonical order, nan for missing elements; all owners of an element have the same bits."""
    found: dict[tuple[str, str], Tensor] = {}
    for state in states:
        for name, columns in state.columns.items() if state else ():
            assert state is not None
            piece = state.home.pieces[name]
            for column in columns:
                flat = state.column(name, column)
                whole = found.setdefault(
                    (name, column), torch.full((piece.parameter.size,), torch.nan, dtype=flat.dtype)
                )
                for (lo, hi), part in piece.cut(flat):
                    assert (whole[lo:hi].isnan() | (whole[lo:hi] == part)).all()
                    whole[lo:hi] = part
    return found


@st.composite
def moves(draw: st.DrawFn) -> tuple[Home, int, Home, list[int | None]]:
    def owners(ranks: int) -> Home:
        shares = st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.5, 7.0]), min_size=ranks, max_size=ranks)
        whole = draw(shares.filter(lambda each: sum(map(bool, each)) > 1) if ranks > 1 else st.just([1.0]))
        copies = draw(st.integers(1, 2)) if ranks > 1 else 1
        own = {"layer.0": draw(shares.filter(any))} if draw(st.booleans()) and copies == 1 else {}
        nodes = range(ranks) if copies == 2 else None
        return Home(whole, copies, own, nodes)

    old, new = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    left = draw(st.lists(st.sampled_from([*range(old), *[None] * new]), min_size=new, max_size=new))
    before = [each if each is None or each not in left[:at] else None for at, each in enumerate(left)]
    return owners(old), old, owners(new), before


@thorough
@given(moves(), st.sampled_from(FACTORIES), st.sampled_from([1, 40, 1 << 10, 1 << 20]), st.booleans())
def test_whatever_is_left_is_where_it_is_to_be_and_nothing_else_has_changed(
    move: tuple[Home, int, Home, list[int | None]],
    factory: Callable[..., torch.optim.Optimizer],
    chunk: int,
    hosts: bool,
) -> None:
    owners, ranks, wanted, before = move
    olds = trained(owners, ranks, factory)
    mine = [None if old is None else olds[old] for old in before]
    columns = agreed_columns([state.columns if state else {} for state in mine])
    nodes = [rank // 2 for rank in range(len(before))] if hosts else None
    there = HomeLayouts(owners, ranks).by_name(WHOLE.buckets)
    target = HomeLayouts(wanted, len(before)).by_name(WHOLE.buckets)
    source = {name: layout.renamed(before, nodes) for name, layout in there.items()}
    route = Route(WHOLE.buckets, source, target, columns)
    news = [
        OwnedState.empty(HomeState.allocate(cast(Program, WHOLE), target, rank), columns) for rank in range(len(before))
    ]
    for state in news:
        for shard in state.home.weights.values():
            shard.fill_(torch.nan)
        for columns_of in state.states.values():
            for column in columns_of.values():
                column.fill_(torch.nan)
    kept = gathered(mine)
    exchanges = Exchanges(len(before))
    with ThreadPoolExecutor(len(before)) as threads:
        received = list(
            threads.map(
                lambda rank: carry(route, mine[rank], news[rank], exchanges.of(rank), chunk), range(len(before))
            )
        )
    assert exchanges.most <= max(chunk, 20), "no rank gets more than a chunk, or one element's columns"
    found = gathered(news)
    for key, values in kept.items():
        assert torch.equal(found[key].nan_to_num(7e7), values.nan_to_num(7e7)), key
    lost = {name: sum(hi - lo for lo, hi in intervals) for name, intervals in route.lost.items()}
    for bucket in WHOLE.buckets:
        weights = [kept.get((p.name, ""), torch.full((p.size,), torch.nan)) for p in bucket.parameters]
        assert int(torch.cat(weights).isnan().sum()) == lost.get(bucket.name, 0)
    if before == list(range(ranks)) and wanted == owners:
        assert received == [0] * ranks, "elements that a rank already has are not sent to it"


def test_ranks_that_stepped_differently_are_told() -> None:
    with pytest.raises(
        ValueError, match=r"for parameter w, rank 1's optimizer has \[\], but an earlier rank has \['m'\]"
    ):
        agreed_columns([{"w": {"": torch.float32, "m": torch.float32}}, {"w": {"": torch.float32}}])
