"""Parameters that a model keeps in several dtypes: they compute in one, or are refused by name before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from tests.models import randomised
from tests.own_models import Own, Small, small
from tests.thorough import only


class Casting(Small):
    """A block whose products stand in a dtype, and is given what a test makes of its input."""

    def __init__(self, cast: Callable[[Casting, Tensor], Tensor], kind: torch.dtype) -> None:
        super().__init__()
        self.cast, self.gate = cast, nn.Linear(32, 51)
        for part in (self.gate, self.up, self.down):
            part.to(kind)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        y = self.cast(self, x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)).to(x.dtype)


class HeadIn16Bits(Own):
    """Its head is given 16 bits, whatever it computes in."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.stack = small().stack

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, outputs]."""
        x = (self.tokens(input_ids) + self.places(position_ids))[0]
        for block in self.stack:
            x = block(x, cu_seqlens)
        return self.out(self.norm(x).to(torch.bfloat16))[None].float()


def model(cast: Callable[[Casting, Tensor], Tensor], kind: torch.dtype) -> Own:
    own = small()
    own.stack = nn.ModuleList([Casting(cast, kind)])
    return randomised(own)  # pyrefly: ignore[bad-return]


@only("kind0-dtype0-<lambda>")
@pytest.mark.parametrize(
    ("kind", "dtype", "cast"),
    [
        (torch.float64, torch.float32, lambda block, x: x.double()),
        (torch.float32, torch.bfloat16, lambda block, x: x.float()),
    ],
)
def test_casts_to_a_fixed_dtype_are_refused_with_the_parameter(
    kind: torch.dtype, dtype: torch.dtype, cast: Callable[[Casting, Tensor], Tensor]
) -> None:
    said = rf"^layer.0: aten.linear.default gets operands of {kind} \(\w+\) and {dtype} \(gate.weight\)"
    with pytest.raises(Unsupported, match=f"{said}.*cast the operands used with gate"):
        capture(model(cast, kind), dtype=dtype)


def test_a_head_in_16_bits_is_refused_with_its_weight() -> None:
    with pytest.raises(
        Unsupported, match=r"after its last block: .* torch.bfloat16 .*\(out.weight\).*operands used with out.weight"
    ):
        capture(HeadIn16Bits(), blocks="stack")


def test_attention_takes_one_dtype() -> None:
    def cast(block: Casting, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 8))
        return hg.varlen_attention(q.double(), q, q, torch.tensor([0, len(x)])).flatten(1)

    with pytest.raises(
        Unsupported, match=r"varlen_attention: q of torch.float64, k of torch.float32 .*; cast all three to one dtype"
    ):
        capture(model(cast, torch.float32))


@only("<lambda>0")
@pytest.mark.parametrize(
    "cast",
    [
        lambda block, x: x.to(block.gate.weight.dtype),
        # Sums are promoted, and a norm without weights takes what it gets.
        lambda block, x: F.layer_norm((x.double() * 2).float() + x.bfloat16(), (32,)),
    ],
)
def test_casts_to_a_weights_dtype_and_mixtures_that_operators_take_are_right(
    cast: Callable[[Casting, Tensor], Tensor],
) -> None:
    subject = model(cast, torch.float64)
    exe = hg.compile(subject, "<tp1,pp1>", device="cpu", check="full")
    data = [torch.randint(0, 101, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 4)]
    found = exe.evaluate(data).loss
    exe.close()
    whole = subject.float()
    total = torch.zeros(())
    for ids in data:
        bounds = torch.tensor([0, len(ids)])
        logits = whole(ids[None], torch.arange(len(ids))[None], bounds)[0]
        total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    assert found == pytest.approx(total.item() / 9, rel=1e-5)
