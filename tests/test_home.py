"""Training under any home: the bits of equal shares, and so one device's results; unequal, none, twice, by bucket."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from tests import reference
from tests.models import llama, sequences
from tests.ready import Ready
from tests.thorough import thorough

RANKS, LAYERS = 3, 2
STRATEGIES = ["<[0,1]x1s,[2]x1>", "<[2]x1,[0]x1> + <[1]x2>"]
HOMES = {
    "equal": hg.Home(),
    "uneven, by bucket": hg.Home([3, 0, 2], buckets={"layer.0": [0, 0, 1]}),
    "twice, one node with most shares": hg.Home([3, 1, 2], copies=2, nodes=[0, 0, 1]),
}
ONE_OWNER = {"one owner": hg.Home([0, 1, 0])}
BF16 = [STRATEGIES[0], "3*<tp1,pp1>", "<[2,0]x2>"]


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with tied embeddings, key/value heads that degrees share, and frozen parameters in one layer."""
    made = llama(layers=LAYERS, tied=dtype is torch.float32)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("layers.1.mlp.up" not in name)
    return made


def ready(dtype: torch.dtype = torch.float32, texts: Sequence[str] = STRATEGIES) -> Ready:
    return Ready.of(model(dtype), texts, dtype)


def batches(count: int) -> list[list[Tensor]]:
    return [sequences([20, 7, 33, 1, 12, 5], seed=i) for i in range(count)]


@dataclass
class Seen:
    """Observations of a rank under one home.

    Attributes:
        gradients: under each strategy, at the starting weights; on rank 0, under the first home.
        losses, norms: of each step, the strategies in turn.
        weights: after them, on rank 0.
        owned: parameter -> intervals, and its weight and states there.
        shard: bytes of this rank's weights at home.
        resumed: whether what another home had saved is, bit for bit, what it had; and the loss after it.
    """

    gradients: list[dict[str, Tensor]]
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    owned: dict[str, tuple[tuple[tuple[int, int], ...], list[Tensor]]]
    shard: int
    resumed: tuple[bool, float, float]


def train_all(
    prepared: Ready, names: list[str], folder: Path, texts: list[str], clip: float | None = None
) -> list[Seen]:
    """Train under every home; each then loads what the one before has saved."""
    found: list[Seen] = []
    bf16 = prepared.variants.program.dtype is torch.bfloat16
    factory = (lambda n: hg.AdamW(n, lr=0.01)) if bf16 else (lambda n: torch.optim.AdamW(n, lr=0.01))
    strategies = [hg.Strategy.parse(text, LAYERS) for text in texts]
    before: tuple[dict[str, Tensor], float] | None = None
    first, *others = batches(max(3, len(texts)))
    for i, name in enumerate(names):
        exe = prepared.executable(strategies[0], factory, home=(HOMES | ONE_OWNER)[name], max_grad_norm=clip)
        gradients = [exe.gradients(first, s) for s in strategies] if not bf16 and not i else []
        reports = [exe.step(batch, s) for batch, s in zip([first, *others], strategies, strict=False)]
        weights = exe.full_state_dict()
        assert exe.optimizer is not None
        states = {n: exe.optimizer.state.get(p, {}) for n, p in exe.home.parameters.items()}
        owned = {
            n: (piece.intervals, [exe.home.parameters[n].detach().clone(), *map(torch.clone, _elementwise(states[n]))])
            for n, piece in exe.home.pieces.items()
        }
        shard = sum(each.nbytes for each in exe.home.weights.values())
        exe.save(folder / str(i), asynchronous=bool(i % 2))
        exe.wait_saved()
        after = exe.step(others[0]).loss, exe.step(others[1], strategies[1]).loss
        resumed = (True, after[1], after[1])
        if before is not None:
            exe.load(folder / str(i - 1))
            loaded = exe.full_state_dict()
            exe.step(others[0])
            again = exe.step(others[1], strategies[1]).loss
            same = all(torch.equal(loaded[n], before[0][n]) for n in loaded)
            resumed = same, again, before[1]
        before = weights, after[1]
        exe.close()
        losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
        found.append(Seen(gradients, losses, norms, weights, owned, shard, resumed))
    return found


def train_and_refuse(prepared: Ready, folder: Path) -> tuple[list[Seen], list[str]]:
    return train_all(prepared, list(HOMES), folder, STRATEGIES), refused(prepared)


def refused(prepared: Ready) -> list[str]:
    """Compile with homes that do not fit three ranks on two nodes; return what each says."""
    rank, said = torch.distributed.get_rank(), []
    os.environ["GROUP_RANK"] = "01"[rank == 2]  # as torchrun tells the ranks of a node
    homes = [
        hg.Home([1, 1]),
        hg.Home([1, 1, 1] if rank else [1, 2, 1]),
        hg.Home(buckets={"layer.9": [1, 1, 1]}),
        hg.Home([1, 1, 0], copies=2),
    ]
    for home in homes:
        try:
            prepared.executable(hg.Strategy.parse("<tp1,pp2>", LAYERS), home=home).close()
        except ValueError as error:
            said.append(str(error))
    return said


def _elementwise(state: dict[str, Tensor]) -> list[Tensor]:
    return [state[key] for key in ("exp_avg", "exp_avg_sq") if key in state]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[Seen], list[str]]]:
    """Return what every rank saw under every home, and what was refused."""
    return hg.launch(train_and_refuse, RANKS, ready(), tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def seen(ranks: list[tuple[list[Seen], list[str]]]) -> list[list[Seen]]:
    return [found for found, _ in ranks]


def test_every_home_trains_as_one_device_does(seen: list[list[Seen]]) -> None:
    factory = lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)  # noqa: E731
    wanted = reference.train(model(), batches(len(STRATEGIES)), factory)
    for strategy, gradients in zip(STRATEGIES, seen[0][0].gradients, strict=True):
        parameter, ratio = reference.worst(gradients, wanted.gradients[0])
        assert ratio <= 1, f"strategy {strategy}: {parameter}"
    for name, found in zip(HOMES, seen[0], strict=True):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        norms = [torch.stack([g.norm() for g in each.values()]).norm().item() for each in wanted.gradients]
        assert found.norms == pytest.approx(norms, rel=1e-4), f"home {name}: elements with two owners count once"


def test_every_home_gives_the_bits_of_equal_shares(seen: list[list[Seen]]) -> None:
    equal, *others = seen[0]
    for name, found in zip(list(HOMES)[1:], others, strict=True):
        assert found.losses == equal.losses, name
        assert found.norms == pytest.approx(equal.norms, rel=1e-6)  # summed over ranks, which own different parts
        for key, weight in equal.weights.items():
            assert torch.equal(found.weights[key], weight), f"home {name}: {key}"


def test_two_owners_of_an_element_have_the_same_bits(seen: list[list[Seen]]) -> None:
    parameters = dict(model().named_parameters())
    for i, (name, home) in enumerate(HOMES.items()):
        for key, parameter in parameters.items():
            count = torch.zeros(parameter.numel())
            tensors: dict[int, Tensor] = {}
            for rank in range(RANKS):
                intervals, kept = seen[rank][i].owned[key]
                index = torch.cat([torch.arange(lo, hi) for lo, hi in intervals]) if intervals else torch.arange(0)
                count[index] += 1
                for j, tensor in enumerate(kept if len(index) else ()):
                    whole = tensors.setdefault(j, torch.full((parameter.numel(),), torch.nan))
                    assert ((whole[index] == tensor) | whole[index].isnan()).all(), f"home {name}: {key}"
                    whole[index] = tensor
            assert (count == home.copies).all()
            assert len(tensors) == (3 if parameter.requires_grad else 1)


def test_ranks_own_what_they_are_given(seen: list[list[Seen]]) -> None:
    sizes = {name: [seen[rank][i].shard for rank in range(RANKS)] for i, name in enumerate(HOMES)}
    total = sum(sizes["equal"])
    one = sum(p.nbytes for name, p in model().named_parameters() if "layers.0." in name)
    others = [size - one * (rank == 2) for rank, size in enumerate(sizes["uneven, by bucket"])]
    assert [size / (total - one) for size in others] == pytest.approx([3 / 5, 0, 2 / 5], abs=0.005)
    assert others[1] == 0
    # The node with most shares owns everything once, divided as its ranks' shares are; the other node the rest.
    parts = [size / total for size in sizes["twice, one node with most shares"]]
    assert parts == pytest.approx([0.75, 0.25, 1.0], abs=0.005)


def test_what_one_home_saved_another_loads_bit_for_bit(seen: list[list[Seen]]) -> None:
    for rank in range(RANKS):
        for name, found in zip(HOMES, seen[rank], strict=True):
            same, loss, wanted = found.resumed
            assert same, name
            assert loss == wanted, f"home {name}: must continue like the run that saved"


@thorough
def test_clipping_and_16_bits(tmp_path: Path) -> None:
    """A rank without a share has no 16-bit copies either; copies are pulled from the nearest owner."""
    names = ["equal", "one owner", "twice, one node with most shares"]
    prepare = partial(ready, torch.bfloat16, BF16)
    by_rank = hg.launch(train_all, RANKS, names, tmp_path, BF16, 0.5, prepare=prepare)
    equal, *others = by_rank[0]
    assert max(equal.norms) > 0.5  # so they were clipped
    for name, found in zip(names[1:], others, strict=True):
        assert found.losses == pytest.approx(equal.losses, rel=1e-4), name
        assert found.norms == pytest.approx(equal.norms, rel=1e-2), name
        assert found.resumed[0]
    twice = [seen[2].owned for seen in by_rank]
    for key, (intervals, kept) in twice[2].items():  # which owns everything
        for rank in range(2):
            at = 0
            for lo, hi in twice[rank][key][0]:
                for mine, other in zip(kept, twice[rank][key][1], strict=True):
                    assert intervals[0][0] == 0
                    assert all(a[1] == b[0] for a, b in pairwise(intervals))
                    assert torch.equal(mine[lo:hi], other[at : at + hi - lo])
                at += hi - lo


def test_homes_that_do_not_fit_are_refused_on_all_ranks(ranks: list[tuple[list[Seen], list[str]]]) -> None:
    said = [each for _, each in ranks]
    assert said == [said[0]] * RANKS
    count, differ, bucket, alone = said[0]
    assert "the run has 3 ranks" in count
    assert "ranks differ in home: '1,2,1' on ranks [0]; '1,1,1' on ranks [1, 2]" in differ
    assert "the model has no parameter bucket 'layer.9': use one of model.embed_tokens.weight, layer.0" in bucket
    assert "all owners are on node 0, but the second copy needs another node" in alone


@thorough
@pytest.mark.parametrize("kind", ["Adadelta", "Adagrad", "Adam", "NAdam", "RMSprop", "SGD"])
def test_an_update_does_not_depend_on_where_an_element_lies(kind: str) -> None:
    """The end of a tensor is computed with the same sums and products as its inside, so both owners get equal bits."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = (torch.randn(1000, generator=generator) for _ in range(2))

    def updated(lo: int, hi: int) -> Tensor:
        part = nn.Parameter(weights[lo:hi].clone())
        optimizer = getattr(torch.optim, kind)([part], lr=0.01)
        for scale in (1.0, 0.3, -2.0):
            part.grad = gradients[lo:hi] * scale
            optimizer.step()
        return part.detach()

    whole = updated(0, 1000)
    for lo, hi in ((0, 997), (3, 1000), (5, 6), (16, 24), (7, 500)):
        assert torch.equal(updated(lo, hi), whole[lo:hi])
