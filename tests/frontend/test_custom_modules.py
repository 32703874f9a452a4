"""Custom modules: how they are called, what they compute when packed, and which of their habits are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.custom_modules import caller
from hydragraph.frontend.packed_inputs import FIELDS, token_cross_entropy
from hydragraph.ir.program import Program
from tests.frontend.execute import batch, loss
from tests.models import randomised
from tests.own_models import Layer, Own, Small, alone, classified, small
from tests.thorough import first, only


class Model(nn.Module):
    """Calls `forward` with whatever a test wants."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward


GIVEN = {name: torch.tensor(i) for i, name in enumerate(FIELDS)}


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda batch: batch, GIVEN),
        (lambda anything, flag=True: anything, GIVEN),
        (lambda input_ids: input_ids, GIVEN["input_ids"]),
        (lambda *, labels, cu_seqlens: (labels, cu_seqlens), (GIVEN["labels"], GIVEN["cu_seqlens"])),
        (lambda input_ids, labels=None, mask=None, **rest: (labels, mask, rest), (GIVEN["labels"], None, {})),
    ],
)  # fmt: skip
def test_a_forward_gets_the_fields_that_it_names(forward: Callable[..., Any], expected: object) -> None:
    model = Model(forward)
    assert caller(model, FIELDS)(model, GIVEN) == expected


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda input_ids, pixels: None,
            r"Model: forward requires 'pixels', which is not a batch field; name its parameters after .*input_ids",
        ),
        (lambda x, y: None, "forward requires 'x'"),
        (lambda: None, "takes none of the batch's fields"),
        (lambda **anything: None, "takes none of the batch's fields"),
    ],
)
def test_a_forward_that_wants_something_else_is_refused(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        caller(Model(forward), FIELDS)


@only("False")
@pytest.mark.parametrize("causal", [True, False])
def test_packed_loss_and_gradients_equal_the_modules_on_each_sequence_alone(causal: bool) -> None:
    model = randomised(Own(causal=causal))
    program = capture(model, blocks="stack")
    assert program.causal is causal
    assert program.blocks[1].template == program.blocks[2].template
    assert_as_alone(program, model)


def assert_as_alone(program: Program, model: nn.Module) -> None:
    """Compare the packed loss and gradients with those of the module on each sequence alone."""
    given, total = batch([5, 1, 3]), torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        labels = given["labels"][0, a:b]
        total = total + F.cross_entropy(alone(model, given["input_ids"][0, a:b]), labels, reduction="sum")
    found = loss(program, model, given)
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-4)
    parameters = list(model.parameters())
    expected, gradients = (torch.autograd.grad(x, parameters) for x in (total, found))
    scale = torch.stack([g.norm() for g in expected]).norm()
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6 * scale


class Dictionary(Own):
    """Its blocks are in a numbered nn.ModuleDict, as in torchtitan."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.stack = nn.ModuleDict({str(i): block for i, block in enumerate(small(layers=3).stack)})  # pyrefly: ignore[bad-assignment]

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, 101]."""
        x = (self.tokens(input_ids) + self.places(position_ids))[0]
        for block in self.stack.values():
            x = block(x, cu_seqlens)
        return self.out(self.norm(x))[None]


class RepeatingDictionary(Dictionary):
    """A numbered nn.ModuleDict in which a block occurs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.stack.update({"2": self.stack["0"]})


class Repeating(Own):
    """The same block occurs several times in its list."""

    def __init__(self, order: Sequence[int] = (0, 0, 1, 0)) -> None:
        super().__init__()
        self.stack = nn.ModuleList([self.stack[i] for i in order])


@pytest.mark.parametrize("kind", first([RepeatingDictionary], [RepeatingDictionary, Dictionary, Repeating]))
def test_blocks_in_a_numbered_dict_and_repeated_blocks_train(kind: type[Own]) -> None:
    model = randomised(kind())
    assert_as_alone(capture(model), model)


class Named(Own):
    """It returns its logits in what a test wants."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__(layers=0)
        self.stack, self.wrap = small(layers=2).stack, wrap

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Any:
        return self.wrap(super().forward(input_ids, position_ids, cu_seqlens))


def test_logits_are_found_in_a_dict_and_asked_for_elsewhere() -> None:
    named = randomised(Named(lambda logits: {"logits": logits, "other": None}))
    assert_as_alone(capture(named), randomised(small(layers=2)))
    refused = partial(
        pytest.raises, Unsupported, match=r"the loss: the model returns a .* without logits; return .* loss="
    )
    with refused():
        capture(Named(lambda logits: (logits, None)))
    for outputs in ({"scores": torch.zeros(1, 4, 101)}, None):
        with refused():
            token_cross_entropy(outputs, batch([4]))


def test_a_loss_over_whole_sequences() -> None:
    model = Own(layers=0, outputs=5)
    model.stack = small().stack
    program, given = capture(randomised(model), loss=classified), batch([5, 2, 3])
    given["labels"] = torch.full((1, 10), -100)
    given["labels"][0, [4, 9]] = torch.tensor([2, 0])
    ids = given["input_ids"][0]
    means = torch.stack([alone(model, ids[a:b]).mean(0) for a, b in ((0, 5), (7, 10))])
    expected = F.cross_entropy(means, torch.tensor([2, 0]), reduction="sum")
    torch.testing.assert_close(loss(program, model, given), expected, rtol=1e-5, atol=1e-5)


class Mixing(nn.Module):
    """A block that mixes tokens [1, T, 32] in a way of its own."""

    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(32, 32), mix
        self.convolution = nn.Conv1d(32, 32, 3, padding=1)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, 32] -> [1, T, 32]."""
        return x + self.mix(self, self.linear(x))


class Stacked(nn.Module):
    """Blocks without sequence bounds."""

    def __init__(self, block: nn.Module, embed: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList([block]), nn.Linear(32, 101)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [1, T, 101]."""
        return self.head(self.blocks[0](self.embed(input_ids)))


def stacked(block: nn.Module) -> nn.Module:
    return Stacked(block, nn.Embedding(101, 32))


def by_hand(block: nn.Module, x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


class OverFeatures(nn.Module):
    """A block that convolves the features of each token, and mixes their channels token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.channels = nn.Conv1d(1, 1, 3, padding=1), nn.Conv1d(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, 32] -> [1, T, 32]."""
        return self.channels((x + self.features(x.reshape(-1, 1, 32)).view_as(x)).transpose(1, 2)).transpose(1, 2)


def test_convolutions_within_a_token_are_captured_for_any_number_of_tokens() -> None:
    assert hg.capture(stacked(OverFeatures()), check="auto").layers == 1


@only("<lambda>-aten.mean.default may mix")
@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (lambda b, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), r"would attend .*scaled_dot"),
        (lambda b, x: b.attention(x, x, x)[0], r"layer.0: (packed|aten.bmm.default mixes)"),
        (by_hand, r"aten.matmul.default mixes tokens"),
        (lambda b, x: b.convolution(x.transpose(1, 2)).transpose(1, 2), r"aten.conv1d\S* may mix the tokens"),
        (lambda b, x: x.cumsum(1), r"aten.cumsum.default may mix"),
        (lambda b, x: x - x.mean(1, keepdim=True), r"aten.mean.dim may mix"),
        (lambda b, x: x.softmax(-2), r"aten.softmax.int may mix"),
        (lambda b, x: x.roll(1, 1), r"aten.roll.default may mix"),
        (lambda b, x: x.flip(1), r"aten.flip.default may mix"),
        (lambda b, x: F.pad(x, (0, 0, 1, 0))[:, :-1], r"mixes"),
        (lambda b, x: x - x.mean(), r"aten.mean.default may mix"),
    ],
)  # fmt: skip
def test_tokens_that_meet_elsewhere_are_refused(mix: Callable[..., Tensor], message: str) -> None:
    attends = any(part in message for part in ("dot", "bmm", "matmul", "softmax"))
    remedy = (
        "call hydragraph.varlen_attention"
        if attends
        else "(call hydragraph.*other result|compute every result) from one token only"
    )
    with pytest.raises(Unsupported, match=f"{message}.*; {remedy}"):
        capture(stacked(Mixing(mix)))


@only("<lambda>13", "<lambda>16", "<lambda>17", "<lambda>18")
@pytest.mark.parametrize(
    "mix",
    [
        lambda b, x: x / x.norm(),
        lambda b, x: F.normalize(x, dim=1),
        lambda b, x: x.sort(1)[0],
        lambda b, x: x + x.topk(1, dim=1)[0],
        lambda b, x: x + x[:, :1],
        lambda b, x: x.cummax(1)[0],
        lambda b, x: x + x.prod(1, keepdim=True),
        lambda b, x: x + x.median(1, keepdim=True)[0],
        lambda b, x: x + x.argmax(1, keepdim=True),
        lambda b, x: x * (x > 0).sum(),
        lambda b, x: x + F.adaptive_avg_pool1d(x.transpose(1, 2), 1).transpose(1, 2),
        lambda b, x: F.layer_norm(x.transpose(1, 2), x.transpose(1, 2).shape[-1:]).transpose(1, 2),
        lambda b, x: x + torch.einsum("bti,btj->bij", x, x).sum(-1)[:, None],
        lambda b, x: x * (1 / x.shape[1]),
        lambda b, x: x + torch.arange(1, x.shape[1] + 1, device=x.device)[None, :, None],
        lambda b, x: x + torch.ones_like(x).cumsum(1),
        lambda b, x: x + x.index_select(1, torch.zeros(1, dtype=torch.int64, device=x.device)),
        lambda b, x: x + x.std(),
        lambda b, x: x * x.max(),
        lambda b, x: x + torch.outer(x[0, :, 0], x[0, :, 0]).sum(1)[None, :, None],
    ],
)  # fmt: skip
def test_whatever_is_not_known_to_keep_tokens_apart_is_refused(mix: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with pytest.raises(Unsupported, match=r"layer.0: .*; .*from one token only, such as a mean over features"):
        capture(stacked(Mixing(mix)))


@only("<lambda>8")
@pytest.mark.parametrize(
    "mix",
    [
        lambda b, x: x.softmax(-1) + x.cumsum(-1) + x.roll(1, -1) + x.mean(-1, keepdim=True),
        lambda b, x: F.normalize(x, dim=-1) + x.amax(-1, keepdim=True) + x.sort(-1)[0],
        lambda b, x: x.unflatten(-1, (4, 8)).softmax(-2).flatten(-2),
        lambda b, x: (x.unflatten(-1, (4, 8)) @ x.unflatten(-1, (4, 8)).transpose(-1, -2)).flatten(-2).repeat(1, 1, 2),
        lambda b, x: torch.cat(x.chunk(2, -1)[::-1], -1) + torch.zeros_like(x),
        lambda b, x: F.rms_norm(x, (32,)) + F.layer_norm(x, (32,)) + x[..., :1] + x[..., 1:2],
        lambda b, x: torch.where(x > 0, x, x.exp()) + F.glu(torch.cat([x, x], -1)),
        lambda b, x: x @ b.linear.weight + x.gather(-1, x.argsort(-1)),
        lambda b, x: F.pad(x, (0, 1))[..., 1:],
        lambda b, x: x + torch.outer(x[0, :, 0], b.linear.bias) + torch.outer(b.linear.bias, x[0, :, 0]).t(),
    ],
)  # fmt: skip
def test_operators_along_other_dimensions_mix_nothing(mix: Callable[[nn.Module, Tensor], Tensor]) -> None:
    capture(stacked(Mixing(mix)))


class Attending(nn.Embedding):
    """An embedding whose tokens see each other."""

    def forward(self, ids: Tensor) -> Tensor:
        """[1, T] -> [1, T, H]."""
        x = super().forward(ids)
        return F.scaled_dot_product_attention(x, x, x)


def test_attention_before_the_blocks_is_refused_too() -> None:
    model = Stacked(Mixing(lambda b, x: x), Attending(101, 32))
    with pytest.raises(Unsupported, match="Stacked before its first block: packed sequences would attend"):
        capture(model)


class Deciding(Layer):
    """A block that looks at a value."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return x if x.sum() > 0 else -x


def test_what_cannot_be_traced_is_refused_with_its_cause() -> None:
    model = Own(layers=1)
    model.stack = nn.ModuleList([Deciding(32, 4, 2, True)])
    with pytest.raises(
        Unsupported, match=r"Own: a Python decision depends on a tensor's value .*; choose values with torch.where"
    ) as caught:
        capture(model)
    assert caught.value.__cause__ is not None


class Returning(Own):
    """A model that returns something else than logits."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__(layers=0)
        self.stack, self.form = small().stack, form

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Any:
        """Return a form of the logits."""
        return self.form(super().forward(input_ids, position_ids, cu_seqlens))


def test_a_model_with_a_loss_of_its_own_or_another_form_is_told_of_loss() -> None:
    with pytest.raises(Unsupported, match=r"returns a single number instead of logits; .* pass loss="):
        capture(Returning(lambda logits: logits.sum()))
    with pytest.raises(
        Unsupported, match=r"logits \[1, 101, \w+\], which do not match the labels \[1, \w+\]; return logits of shape"
    ):
        capture(Returning(lambda logits: logits.transpose(1, 2)))
    with pytest.raises(
        Unsupported, match=r"the loss fails on the model's outputs, \{'out': a tensor\} \(KeyError: 0\); pass loss="
    ):
        capture(Returning(lambda logits: {"out": logits}), loss=lambda outputs, batch: outputs[0].sum())


class Sharing(Own):
    """Hands the embedding to every block, as another argument or in the hidden state."""

    def __init__(self, carried: bool) -> None:
        super().__init__(layers=0)
        self.carried = carried
        self.stack = nn.ModuleList([Receiving(carried) for _ in range(2)])

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        first = (self.tokens(input_ids) + self.places(position_ids))[0]
        x = torch.cat([first, first], -1) if self.carried else first
        for block in self.stack:
            x = block(x, cu_seqlens) if self.carried else block(x, cu_seqlens, first)
        return self.out(self.norm(x.chunk(2, -1)[0] if self.carried else x))[None]


class Receiving(Small):
    """A block that adds the embedding to its hidden state."""

    def __init__(self, carried: bool) -> None:
        super().__init__()
        self.carried = carried

    def forward(self, x: Tensor, cu_seqlens: Tensor, first: Tensor | None = None) -> Tensor:
        if not self.carried:
            return super().forward(x + 0.1 * first, cu_seqlens)
        x, first = x.chunk(2, -1)
        return torch.cat([super().forward(x + 0.1 * first, cu_seqlens), first], -1)


class Deep(Own):
    """Its logits are computed from the outputs of all blocks."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.stack = small(layers=2).stack

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        first = self.stack[0]((self.tokens(input_ids) + self.places(position_ids))[0], cu_seqlens)
        return self.out(self.norm(first + self.stack[1](first, cu_seqlens)))[None]


def test_the_output_of_an_earlier_block_is_not_read_after_the_last() -> None:
    with pytest.raises(Unsupported, match=r"Deep: after its last block, the model reads the output of an earlier"):
        capture(Deep())


def test_a_value_for_all_blocks_is_carried_in_the_hidden_state_as_its_refusal_says() -> None:
    with pytest.raises(Unsupported, match=r"blocks share a value .* or concatenate it to the hidden state"):
        capture(Sharing(carried=False))
    shared, carried = randomised(Sharing(carried=False)), Sharing(carried=True)
    carried.load_state_dict(shared.state_dict())
    assert_as_alone(capture(carried), shared)
