"""Bounds of packed sequences that a block received, for layers that its model does not hand them to."""

from __future__ import annotations

import pytest
import torch

from hydragraph.errors import Unsupported
from hydragraph.frontend.block_keywords import keywords_of_block, sequence_bounds


def test_layers_get_the_bounds_of_their_block_and_of_no_other() -> None:
    bounds, longest = torch.tensor([0, 3, 5]), torch.tensor(3)
    with keywords_of_block({"cu_seq_lens_q": bounds, "max_length_q": longest}):
        assert sequence_bounds("layer") == (bounds, longest)
        with keywords_of_block({}), pytest.raises(Unsupported, match=r"^layer: it was called without cu_seq_lens_q"):
            sequence_bounds("layer", "it")
    with pytest.raises(Unsupported, match=r"^layer: attention was called without"):
        sequence_bounds("layer")
