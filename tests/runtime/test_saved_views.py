"""Views of weights survive a free and another pull of the weights."""

from __future__ import annotations

import torch

from hydragraph.runtime.saved_views import let_go, restored


def test_views_show_the_weights_pulled_again() -> None:
    flat = torch.arange(30.0)[6:]  # a home shard may begin further in
    weight = flat[2:14].view(3, 4)
    own = torch.ones(3)
    kept = let_go([weight.t(), own, 7], {"layer.0": flat})
    expected = weight.t().clone()
    again = flat.clone()
    flat.zero_()
    view, same, number = restored(kept, {"layer.0": again})
    assert torch.equal(view, expected)
    assert view.data_ptr() == again[2:].data_ptr()
    assert same is own
    assert number == 7


def test_other_tensors_are_kept_as_they_are() -> None:
    values = [torch.ones(2), torch.empty(0)]
    kept = let_go(values, {"frozen": torch.empty(0)})
    assert all(one is other for one, other in zip(kept, values, strict=True))
    assert all(one is other for one, other in zip(restored(kept, {}), values, strict=True))
