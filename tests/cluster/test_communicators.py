"""Groups over real processes: every kind of traffic against its definition, and collectives to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hydragraph.cluster import communicators
from hydragraph.cluster.collectives import AnyCollectives, Collectives, StagedCollectives
from hydragraph.cluster.communicators import Channel, Groups, in_rounds
from hydragraph.cluster.launch import World, join, launch
from hydragraph.cluster.message_in_flight import Message, Staging
from hydragraph.errors import RankFailure
from hydragraph.kernels.linear_cross_entropy import reference
from tests.thorough import first, only, thorough

TIMEOUT = timedelta(seconds=60)
ALONE = World(0, 1, 0, torch.device("cpu"), "gloo")


def value(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank `rank`'s tensor, which all ranks can make."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def all_kinds(staged: bool) -> list[Tensor]:
    world = join("cpu")
    groups = Groups(world, TIMEOUT)
    if staged:  # as tensors of a GPU are
        groups._staging = Staging(world.device)
    rank, ranks = world.rank, world.ranks
    # Rank i sends i + j elements of value 10 i + j to rank j.
    inp = torch.cat([torch.full((rank + j,), 10.0 * rank + j) for j in range(ranks)])
    exchanged = torch.empty(sum(i + rank for i in range(ranks)))
    splits = [i + rank for i in range(ranks)], [rank + j for j in range(ranks)]
    groups.wait(groups.all_to_all(Channel.PULL, exchanged, inp, *splits))
    gathered, scattered = torch.empty(ranks, 3), torch.empty(2)
    groups.wait(groups.all_gather(Channel.PULL, gathered.view(-1), value(rank, 3)))
    groups.wait(groups.reduce_scatter(Channel.PUSH, scattered, value(rank, 2 * ranks)))
    summed = value(rank, 5)
    groups.all_reduce(Channel.COMMIT, summed)
    for largest in (
        groups.reduce_to_host(Channel.COMMIT, torch.tensor([rank, -rank]), dist.ReduceOp.MAX) for _ in "ab"
    ):
        assert largest.tolist() == [ranks - 1, 0]
    assert torch.equal(groups.reduce_to_host(Channel.COMMIT, torch.ones(2, 2)), torch.full((2, 2), float(ranks)))
    # Every pair both ways, tags posted in opposite orders.
    received = torch.empty(2, ranks)
    works = []
    for peer in (peer for peer in range(ranks) if peer != rank):
        works += [groups.receive(received[tag, peer : peer + 1], peer, tag) for tag in (1, 0)]
        works += [groups.send(torch.tensor([100.0 * tag + 10 * rank + peer]), peer, tag) for tag in (0, 1)]
    for message in works:
        groups.wait(message)
    assert groups.gather(("x", rank)) == [("x", other) for other in range(ranks)]
    for long in (10, 10**5, 10):  # in one message, and in two
        assert groups.tell(("x" * long, rank) if not rank else None) == ("x" * long, 0)
    groups.close()
    return [exchanged, gathered, scattered, summed, received]


@only("3-True")
@pytest.mark.parametrize(("ranks", "staged"), first([(3, False), (3, True)], [(2, False), (3, False), (3, True)]))
def test_every_kind_of_traffic(ranks: int, staged: bool) -> None:
    total = torch.stack([value(i, 2 * ranks) for i in range(ranks)]).sum(0)
    results = launch(all_kinds, ranks, staged)
    for j, (exchanged, gathered, scattered, summed, received) in enumerate(results):
        assert torch.equal(exchanged, torch.cat([torch.full((i + j,), 10.0 * i + j) for i in range(ranks)]))
        assert torch.equal(gathered, torch.stack([value(i, 3) for i in range(ranks)]))
        torch.testing.assert_close(scattered, total[2 * j : 2 * j + 2])
        torch.testing.assert_close(summed, torch.stack([value(i, 5) for i in range(ranks)]).sum(0))
        assert torch.equal(summed, results[0][3])
        for peer in (peer for peer in range(ranks) if peer != j):
            assert received[:, peer].tolist() == [10 * peer + j, 100 + 10 * peer + j]


def rounds(grouped: int) -> Tensor:
    """Exchange (i + j) % 3 elements of value 10 i + j between every ranks i and j."""
    world = join("cpu")
    groups, rank, ranks = Groups(world, TIMEOUT), world.rank, world.ranks
    sent = [(rank + j) % 3 for j in range(ranks)]
    inp = torch.cat([torch.full((n,), 10.0 * rank + j) for j, n in enumerate(sent)])
    out = torch.empty(sum(sent))
    vars(communicators)["_GROUPED"] = grouped
    works = in_rounds(out, inp, sent, sent, groups._channels[Channel.PULL])
    groups.wait(Message(works))
    assert works.is_completed()
    groups.close()
    return out


@only("1")
@pytest.mark.parametrize("grouped", first([2], [1, 2, 9]))
def test_rounds_bring_every_message_and_none_that_is_empty(grouped: int) -> None:
    for j, found in enumerate(launch(rounds, 4, grouped)):
        wanted = [torch.full(((i + j) % 3,), 10.0 * i + j) for i in range(4)]
        assert torch.equal(found, torch.cat(wanted))


def differ() -> str:
    groups = Groups(join("cpu"), TIMEOUT)
    groups.same_everywhere("program", "abc")
    try:
        groups.same_everywhere("program", "other" if dist.get_rank() == 1 else "abc")
    except ValueError as error:
        return str(error)
    return ""


def test_names_the_ranks_that_differ() -> None:
    (message,) = set(launch(differ, 3))
    assert message.startswith("ranks differ in program: 'abc' on ranks [0, 2]; 'other' on ranks [1];")


# Around both thresholds, in elements of fp32: 64 KiB and 256 KiB.
SIZES = [1, 1000, 64 * 256 - 4, 64 * 256, 64 * 256 + 4, 256 * 256 - 4, 256 * 256, 256 * 256 + 4, 2**20]
HEAD = ("loss", "gradient of hidden", "gradient of rows")
ROWS = 5  # of the head on every rank
Results = dict[str, Tensor]


def labels(ranks: int) -> Tensor:
    return torch.tensor([0, ROWS * ranks - 1, 4, -100, ROWS * ranks // 2, 3])


def tensor_parallel(
    rank_sets: list[tuple[int, ...]], sizes: list[int], staged: bool = False
) -> dict[tuple[int, ...], Results]:
    groups = Groups(join("cpu"), TIMEOUT)
    if staged:
        groups._staging = Staging(groups.world.device)
    out = {}
    for ranks, collectives in groups.tensor_parallel(rank_sets).items():
        out[ranks] = collect(collectives, sizes)
    groups.close()
    return out


def collect(collectives: AnyCollectives, sizes: list[int]) -> Results:
    host = collectives._host if isinstance(collectives, StagedCollectives) else collectives
    rank, out = host.rank, {}
    for size in sizes:
        x = value(rank, 4, size // 4) if size % 4 == 0 else value(rank, size)
        out[f"sum {size}"] = collectives.all_reduce(x)
        out[f"max {size}"] = collectives.all_reduce_max(x)
        rows = x.reshape(-1, 1)
        out[f"products {size}"] = collectives.start_all_reduce_product([rows, rows], [torch.ones(1, 2)] * 2).result()
        out[f"gather {size}"] = collectives.all_gather(x, x.dim() - 1)
    for size in (12, 12 * 6000):
        out[f"scatter {size}"] = collectives.reduce_scatter(value(rank, 2, size), 1)
    out["half"] = collectives.all_reduce(value(rank, 64, dtype=torch.bfloat16))
    hidden, rows, start = value(0, 6, 8), value(rank, ROWS, 8), torch.tensor(ROWS * host.index)
    for what, found in zip(
        HEAD, collectives.head_loss(hidden, rows, labels(host.size), start, -100, ROWS), strict=True
    ):
        out[what] = found
    out["token losses"], _ = collectives.head_token_losses(hidden, rows, labels(host.size), start, -100, ROWS)
    out["strided"] = collectives.all_reduce(value(rank, 6, 4).t())
    out["no rows"] = collectives.start_all_reduce_product([torch.empty(0, 3)], [torch.ones(3, 2)]).result()
    return out


def check_collectives(ranks: tuple[int, ...], results: list[Results], sizes: list[int]) -> None:
    """Against single-process arithmetic; reductions equal to the bit between ranks."""

    def values(make: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([make(rank) for rank in ranks])

    for size in sizes:
        shape = (4, size // 4) if size % 4 == 0 else (size,)
        inputs = values(lambda rank, shape=shape: value(rank, *shape))
        for result in results:
            torch.testing.assert_close(result[f"sum {size}"], inputs.sum(0))
            assert torch.equal(result[f"sum {size}"], results[0][f"sum {size}"])
            assert torch.equal(result[f"max {size}"], inputs.amax(0))
            assert torch.equal(result[f"gather {size}"], torch.cat(list(inputs), -1))
            products = inputs.sum(0).reshape(-1, 1).expand(-1, 2)
            torch.testing.assert_close(result[f"products {size}"], 2 * products)
            assert torch.equal(result[f"products {size}"], results[0][f"products {size}"])
    for size in (12, 12 * 6000):
        total = values(lambda rank, size=size: value(rank, 2, size)).sum(0)
        scattered = torch.cat([result[f"scatter {size}"] for result in results], 1)
        torch.testing.assert_close(scattered, total)
    check_head(ranks, results)
    exact = values(lambda rank: value(rank, 64, dtype=torch.bfloat16)).float().sum(0)
    for result in results:
        assert result["no rows"].shape == (0, 2)
        torch.testing.assert_close(result["half"], exact.bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(result["strided"], values(lambda rank: value(rank, 6, 4).t()).sum(0))


def check_head(ranks: tuple[int, ...], results: list[Results]) -> None:
    """A head whose rows are cut over the ranks, in the stage's order."""
    hidden, head = value(0, 6, 8), torch.cat([value(rank, ROWS, 8) for rank in ranks])
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    loss = reference(hidden, head, labels(len(ranks)))
    loss.backward()
    for result in results:
        torch.testing.assert_close(result["loss"], loss.detach())
        torch.testing.assert_close(result["token losses"].sum(), loss.detach())
        assert torch.equal(result["token losses"], results[0]["token losses"])
    torch.testing.assert_close(sum(result["gradient of hidden"] for result in results), hidden.grad)
    torch.testing.assert_close(torch.cat([result["gradient of rows"] for result in results]), head.grad)


@pytest.mark.parametrize(
    "ranks", [pytest.param((0, 1), marks=thorough), (2, 0, 1), pytest.param((3, 1, 0, 2), marks=thorough)]
)
def test_collectives_at_every_size_and_in_the_stages_order(ranks: tuple[int, ...]) -> None:
    results = launch(tensor_parallel, len(ranks), [ranks], SIZES)
    check_collectives(ranks, [results[rank][ranks] for rank in ranks], SIZES)


def test_collectives_by_way_of_host_memory() -> None:
    ranks = (1, 0)
    results = launch(tensor_parallel, 2, [ranks], [8, 1000], True)
    check_collectives(ranks, [results[rank][ranks] for rank in ranks], [8, 1000])


def test_irregular_and_overlapping_rank_sets() -> None:
    rank_sets = [(0, 1), (2,), (3, 2), (1, 2, 3), (0, 3)]
    results = launch(tensor_parallel, 4, rank_sets, [8])
    for rank in range(4):
        assert list(results[rank]) == [ranks for ranks in rank_sets if rank in ranks]
    for ranks in rank_sets:
        check_collectives(ranks, [results[rank][ranks] for rank in ranks], [8])


def keep_few() -> list[int]:
    groups = Groups(join("cpu"), TIMEOUT, capacity=2)
    counts = []
    for ranks in [(0, 1), (1, 2), (1, 0), (0, 2), (0, 1), (1, 2)]:
        for collectives in groups.tensor_parallel([ranks]).values():
            assert collectives.all_reduce(torch.ones(1)).item() == 2
        counts.append(len(groups._tensor_parallel))
    return counts


def test_keeps_a_bounded_number_of_groups() -> None:
    assert launch(keep_few, 3) == [[1, 2, 2, 2, 2, 2]] * 3


def test_alone_everything_is_a_copy() -> None:
    groups = Groups(ALONE, TIMEOUT)
    inp = torch.arange(4.0)
    for start in (
        lambda out: groups.all_to_all(Channel.PULL, out, inp, [4], [4]),
        lambda out: groups.all_gather(Channel.PULL, out, inp),
        lambda out: groups.reduce_scatter(Channel.PUSH, out, inp),
    ):
        out = torch.empty(4)
        assert start(out) is None
        assert torch.equal(out, inp)
    groups.all_reduce(Channel.COMMIT, inp)
    assert groups.reduce_to_host(Channel.COMMIT, inp).tolist() == inp.tolist() == [0, 1, 2, 3]
    assert groups.gather("x") == ["x"]
    groups.same_everywhere("program", "x")
    (collectives,) = groups.tensor_parallel([(0,)]).values()
    assert isinstance(collectives, Collectives)
    assert (collectives.size, collectives.index) == (1, 0)
    check_collectives((0,), [collect(collectives, [8])], [8])
    for made in (collectives.all_reduce(inp), collectives.all_gather(inp, 0), collectives.reduce_scatter(inp, 0)):
        assert made.data_ptr() != inp.data_ptr()
    groups.close()


def test_refuses_parts_that_are_unequal() -> None:
    with pytest.raises(ValueError, match="dimension 1 of"):
        Collectives((0, 1), 0).reduce_scatter(torch.ones(2, 3), 1)


class Watched:
    """A failure watch whose fault becomes known while the host waits, as it does when it aborts a communicator."""

    communicating = staticmethod(nullcontext)

    def __init__(self, fails: bool) -> None:
        self.failed, self.fails = False, fails

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.failed = self.fails
        yield

    def check(self) -> None:
        if self.failed:
            raise RankFailure(1, "commit", "killed", "host")

    def waiter(self) -> None:
        """Return None: this group never waits."""


class Queueing(Groups):
    """One of two ranks whose reductions are only queued, as NCCL's are; an abort leaves what memory held."""

    def all_reduce(self, role: Channel, tensor: Tensor, operation: Any = None) -> None:
        """Leave the tensor as it is."""


@pytest.mark.parametrize("known", [True, False])
def test_numbers_of_an_aborted_reduction_are_never_returned(known: bool) -> None:
    groups = Queueing(replace(ALONE, watch=cast(Any, Watched(fails=known))), TIMEOUT)
    groups.world = replace(ALONE, ranks=2)
    error, match = (RankFailure, "killed") if known else (RuntimeError, "before every rank took part")
    with pytest.raises(error, match=match):
        groups.reduce_to_host(Channel.COMMIT, torch.zeros(3))
