"""Every strategy trains as one device does: loss, gradients and weights over real gloo processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hydragraph as hg
from hydragraph.passes import offload as offloading
from tests import reference
from tests.models import gpt2, llama, llama4, sequences
from tests.ready import Ready
from tests.thorough import first, only, thorough

LAYERS = 4
LENGTHS = [20, 7, 33, 1, 12, 5]  # one of them has no target
MODELS = {
    "small tied llama": lambda: llama(layers=LAYERS, tied=True),
    "llama": lambda: llama(layers=LAYERS, heads=12, kv=2),
    "tied llama": lambda: llama(layers=LAYERS, heads=12, kv=6, tied=True),
    "gpt2": lambda: gpt2(layers=LAYERS, heads=12),
    "llama4": lambda: llama4(layers=LAYERS, heads=12, kv=6),
}
LOPSIDED = [
    "<[0,1]x3,[2]x1> + <[3]x4>",  # different degrees and depths
    "<[3]x1,[0]x1,[2]x1,[1]x1>",  # four stages in odd order
    "<[1]x4>",  # three idle ranks
    "4*<tp1,pp1>",  # lowers to all-gather and reduce-scatter where shards are equal
    "<[3]x1,[0,1]x2,[2]x1> gpipe",
    "<[0,1]x3sr0.5,[2]x1r> + <[3]x4>",  # sequence parallelism and recomputation in part, full recomputation
    "<[2,0]x2sr,[1,3]x2s>",
    "2*<tp1,pp2>",
    "<[3]x1,[0,1]x2s,[2]x1r> zb-h1",
    "<[0,2]x2p,[3,1]x2r0.5p> zb-h1",  # sums in pieces
]


EVERY_FEATURE = [
    "3*<tp1,pp1>",  # equal shards
    "<[2]x1,[0]x3> gpipe",  # odd order, an idle rank
    "<[1]x1,[2]x3r> + <[0]x4>",  # unequal depths, recomputation
    "<[0,1]x4s> + <[2]x4>",  # unequal degrees, sequence parallelism
    "<[2]x1,[1,0]x3r0.5p> zb-h1",  # sums in pieces, recomputation in part
]

homes = pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {}),
        ("tied llama", {"home": hg.Home([3, 0, 1, 2]), "window": 0}),
        ("gpt2", {"home": hg.Home(copies=2)}),
    ],
)


@dataclass
class Run:
    """What rank 0 saw: losses of training, the gradients of each mini-batch at the starting weights, final weights."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def batches(count: int) -> list[list[Tensor]]:
    return [sequences(LENGTHS, seed=i) for i in range(count)]


def ready(model: str, strategies: list[str]) -> Ready:
    return Ready.of(MODELS[model](), strategies)


def train(prepared: Ready, strategies: list[str], steps: int, options: dict[str, Any]) -> Run:
    """On every rank: gradients under each strategy first (without updates), then training across all of them."""
    chosen = [hg.Strategy.parse(s, layers=LAYERS) for s in strategies]
    exe = prepared.executable(chosen[0], lambda named: torch.optim.SGD(named, lr=0.05), **options)
    data = batches(steps)
    gradients = [exe.gradients(data[0], strategy=s) for s in chosen]
    losses = [exe.step(data[i], strategy=chosen[i % len(chosen)]).loss for i in range(steps)]
    weights = exe.full_state_dict()
    exe.close()
    return Run(losses, gradients, weights)


def check(model: str, strategies: list[str], ranks: int = 4, **options: Any) -> None:
    steps = len(strategies)
    runs = hg.launch(train, ranks, strategies, steps, options, prepare=partial(ready, model, strategies))
    wanted = reference.train(MODELS[model](), batches(steps), optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    assert all(run.losses == runs[0].losses for run in runs), "ranks disagree"
    for found, loss in zip(runs[0].losses, wanted.losses, strict=True):
        assert found == pytest.approx(loss, rel=1e-5)
    for strategy, gradients in zip(strategies, runs[0].gradients, strict=True):
        name, ratio = reference.worst(gradients, wanted.gradients[0])
        assert ratio <= 1, f"{strategy}: gradient of {name} is {ratio:.2f} times the tolerance off"
    assert runs[0].weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(runs[0].weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    assert all(not run.weights and not any(run.gradients) for run in runs[1:])


INTERLEAVED = [
    "<tp1,pp2,v2>",  # each rank is both before and after the other
    "<[1]x1r,[0]x1,[1]x1r,[0]x1> zb-h1",
    "<[0]x1w,[1]x2,[0]x1w>",
]


@thorough
@homes
def test_interleaving_with_every_feature_equals_one_device(model: str, options: dict[str, Any]) -> None:
    strategies = [
        "2*<tp1,pp2,v2>r0.5",
        "<tp2,pp2,v2>s gpipe",
        "<[0,1]x1sr,[2]x1,[3]x1,[0,1]x1sr>",
        "<[3]x1,[1]x1w,[3]x1,[1]x1w> + <[0,2]x4>",
        "<[0]x1,[1,2]x1s,[0]x1,[3]x1> zb-h1",
        "<[0]x1g,[1]x1,[0]x1g,[1]x1> + <[2]x4>",
    ]
    check(model, strategies, **options)


FEW_OFFLOADED = ["<[1]x1r0.5o,[0]x2wo,[1]x1r0.5o>"]  # as the next, without tensor parallelism
OFFLOADED = [
    "<[0,1]x1sr0.5o,[2]x2wo,[0,1]x1sr0.5o>",  # interleaved, with sequence parallelism, recomputation and streaming
    "<[0,1]x3sro,[2]x1wo> + <[3]x4r0.5o>",  # uneven, with sequence parallelism, streaming and recomputation in part
    "<[1]x1o,[0]x1,[1]x1o,[0]x1>",
    "<[0,2]x1op,[1]x3o> + <[3]x1,[1]x3o> gpipe",  # a shared stage, and sums in pieces
]


def kept(strategies: list[str]) -> list[str]:
    return [text.replace("o", "") for text in strategies]


def offload(prepared: Ready, strategies: list[str]) -> list[tuple[float, dict[str, Tensor]]]:
    """On every rank: the loss and gradients of each strategy, with every saved value offloaded, then of none."""
    exe = prepared.executable(hg.Strategy.parse(strategies[0], layers=LAYERS))
    found = []
    with mock.patch.object(offloading, "SMALL_BYTES", 0):
        for text in [*strategies, *kept(strategies)]:
            strategy = hg.Strategy.parse(text, layers=LAYERS)
            found.append((exe.evaluate(batches(1)[0], strategy).loss, exe.gradients(batches(1)[0], strategy)))
    exe.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "texts"), first([(2, FEW_OFFLOADED)], [(2, FEW_OFFLOADED), (3, OFFLOADED[:1]), (4, OFFLOADED[1:])])
)
def test_stages_that_offload_equal_to_the_bit_those_that_do_not(ranks: int, texts: list[str]) -> None:
    found = hg.launch(offload, ranks, texts, prepare=partial(ready, "small tied llama", [*texts, *kept(texts)]))[0]
    wanted = reference.train(MODELS["small tied llama"](), batches(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    for text, (loss, gradients), (plain_loss, plain) in zip(texts, found, found[len(texts) :], strict=False):
        assert loss == plain_loss == pytest.approx(wanted.losses[0], rel=1e-5), text
        assert reference.worst(gradients, wanted.gradients[0])[1] <= 1, text
        assert all(torch.equal(gradients[name], plain[name]) for name in plain), text


@thorough
@homes
def test_offloading_with_every_feature_equals_one_device(model: str, options: dict[str, Any]) -> None:
    check(model, ["2*<tp1,pp1>o", *OFFLOADED], **options)


STREAMED = [
    "2*<tp1,pp1>w",  # pipelines share every exchange
    "<[0]x4w> + <[1]x4>",  # one of two pipelines
    "<[1]x2g,[0]x2w>",
]


def test_strategies_with_every_feature_equal_one_device() -> None:
    check("small tied llama", [*EVERY_FEATURE, *INTERLEAVED, *STREAMED], ranks=3)


@thorough
@homes
def test_streaming_with_every_feature_equals_one_device(model: str, options: dict[str, Any]) -> None:
    strategies = [
        "<[0,1]x3wp,[2]x1> + <[3]x4w>",
        "<[3]x1w,[0]x1,[2]x1w,[1]x1g>",
        "4*<tp1,pp1>w",
        "<[3]x1w,[0,1]x2w,[2]x1w> gpipe",
        "<[0,1]x3sw,[2]x1rw> + <[3]x4g>",
        "<[0]x2w,[3]x2w> + <[1]x2w,[3]x2w>",  # a shared stage
        "<[2,0]x4srw> + <[1,3]x4w>",
        "<[2]x4w>",
    ]
    check(model, strategies, **options)


@thorough
@pytest.mark.parametrize("model", [name for name in MODELS if "small" not in name])
def test_lopsided_strategies_in_turn_equal_one_device(model: str) -> None:
    more = {"llama": ["<tp4,pp1>", "<[3,1,0,2]x4sr>"], "gpt2": ["<[2,0,1]x4s>"]}
    if model == "tied llama":  # what ties change is where the table is: together, apart, cut, or in several places
        check(model, [*LOPSIDED[:4], "<[2,0,1]x4s>", "<[2,0]x2sr,[1,3]x2s>"])
    else:
        check(model, LOPSIDED + more.get(model, []))


@st.composite
def any_strategy(draw: st.DrawFn) -> str:
    """Draw pipelines over shuffled ranks: degrees 1 to 3, any depth, split and flags, idle ranks, a schedule."""
    ranks = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    pipelines: list[list[list[int]]] = [[]]
    while ranks:
        tp = draw(st.integers(1, min(3, len(ranks))))
        if len(pipelines[-1]) == LAYERS or (pipelines[-1] and draw(st.booleans())):
            pipelines.append([])
        pipelines[-1].append(list(ranks[:tp]))
        ranks = ranks[tp:]
    text = []
    for stages in pipelines:
        cuts = sorted(
            draw(st.lists(st.integers(1, LAYERS - 1), min_size=len(stages) - 1, max_size=len(stages) - 1, unique=True))
        )
        layers = [b - a for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True)]
        flags = [draw(st.sampled_from(["", "s", "r", "sr0.5", "w", "sr0.25w", "g", "rp"])) for _ in stages]
        parts = (f"{s}x{n}{f}".replace(" ", "") for s, n, f in zip(stages, layers, flags, strict=True))
        text.append("<" + ",".join(parts) + ">")
    return " + ".join(text) + draw(st.sampled_from(["", " gpipe"]))


@thorough  # `tests/test_fuzz.py` draws strategies in every run
@pytest.mark.parametrize("model", ["gpt2", "llama4"])
@settings(
    max_examples=1,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(any_strategy(), min_size=5, max_size=5, unique=True), st.sampled_from([0, 100_000]))
def test_random_strategies_equal_one_device(model: str, strategies: list[str], window: int) -> None:
    check(model, strategies, window=window)


def gradients_in(prepared: Ready, strategies: list[str], home: hg.Home) -> list[list[dict[str, Tensor]]]:
    """On every rank: the gradients under each strategy, pushed in fp32 and in bf16."""
    both = []
    for dtype in (torch.float32, torch.bfloat16):
        exe = prepared.executable(strategies[0], None, home=home, push_dtype=dtype, check="off")
        both.append([exe.gradients(batches(1)[0], strategy=hg.Strategy.parse(s, LAYERS)) for s in strategies])
        exe.close()
    return both


FOUR = ["4*<tp1,pp1>", "<[0,1]x3s,[2]x1r> + <[3]x4>"]


@only("2-2*<tp1,pp1>-equal copies=2")
@pytest.mark.parametrize(
    ("ranks", "strategies", "home"),
    [
        (2, ["2*<tp1,pp1>"], hg.Home(copies=2)),
        (4, FOUR, hg.Home([3, 0, 1, 2])),
        (4, FOUR, hg.Home(copies=2)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_gradients_pushed_in_16_bits_are_off_by_their_rounding_only(
    ranks: int, strategies: list[str], home: hg.Home
) -> None:
    prepare = partial(ready, "small tied llama", strategies)
    exact, rounded = hg.launch(gradients_in, ranks, strategies, home, prepare=prepare)[0]
    for one, other in zip(exact, rounded, strict=True):
        assert any(not torch.equal(one[name], other[name]) for name in one)
        for name, gradient in one.items():
            # Each of up to four terms is off by 2**-9 of itself, and terms may cancel out.
            assert (other[name] - gradient).norm() <= 2**-7 * gradient.norm(), name


@thorough
def test_a_gradient_that_stays_on_its_rank_is_not_rounded() -> None:
    strategies = ["<[1]x4>"]
    home = hg.Home([0, 1])
    exact, rounded = hg.launch(gradients_in, 2, strategies, home, prepare=partial(ready, "llama", strategies))[0]
    assert all(torch.equal(one, rounded[0][name]) for name, one in exact[0].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_dtype": torch.float16}, "push_dtype is torch.float16"),
        ({"push_dtype": torch.bfloat16, "deterministic": True}, "omit push_dtype or 'deterministic'"),
        ({"window": -1}, "'window' is -1"),
    ],
)
def test_how_gradients_cannot_travel(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hg.compile(MODELS["llama"](), "<tp1,pp1>", device="cpu", **options)
