"""The product of experts: its backward beside autograd's, and in the place of one that no trace can follow."""

from __future__ import annotations

import pytest
import torch

from hydragraph.private import experts

ENDS = [0, 3, 3, 7]  # two experts without rows


def test_the_operator_equals_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight, gradient = (torch.randn(s, generator=generator) for s in ((7, 5), (4, 5, 6), (7, 6)))
    wanted = [rows.requires_grad_(), weight.requires_grad_()]
    parts = [rows[a:b] @ w for a, b, w in zip([0, *ENDS], ENDS, weight, strict=False)]
    expected = torch.autograd.grad(torch.cat(parts), wanted, gradient)
    with torch.no_grad():
        found = torch.ops.hydragraph.grouped_mm_backward(rows, weight, torch.tensor(ENDS), gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_only_an_operator_without_a_backward_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.library, "register_autograd", lambda name, *_, **__: given.append(name))
    for names, expected in (
        ((), []),
        (("grouped_mm_fallback", "grouped_mm_fallback_backward"), []),
        (("grouped_mm_fallback",), ["transformers::grouped_mm_fallback"]),
    ):
        monkeypatch.setattr(torch.ops, "transformers", type("Ops", (), dict.fromkeys(names)), raising=False)
        experts.make_traceable()
        assert given == expected
