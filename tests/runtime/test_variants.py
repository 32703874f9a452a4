"""Which compiled templates are kept, and how shards lie in memory."""

from __future__ import annotations

import torch

from hydragraph.ir.parameter import Parameter, ShardRule
from hydragraph.passes.shard import Degree
from hydragraph.runtime.variants import Variants, shard_strides
from tests.models import captured


def test_equal_layers_share_a_variant_and_the_least_recently_used_is_forgotten() -> None:
    program, _ = captured("llama")
    variants = Variants(program, capacity=2)
    layer, head = program.blocks[1], program.blocks[-1]
    kept = variants.get(layer, Degree())
    assert variants.get(program.blocks[2], Degree()) is kept
    other = variants.get(head, Degree())
    assert variants.get(layer, Degree()) is kept  # now the head's is the older one
    variants.get(layer, Degree(2))
    assert len(variants) == 2
    assert variants.get(layer, Degree()) is kept
    assert variants.get(head, Degree()) is not other


def test_a_shard_that_is_cut_along_columns_is_a_transposed_view() -> None:
    rows, columns = (Parameter("w", (6, 4), rule=ShardRule(dim, (n,))) for dim, n in ((0, 6), (1, 4)))
    assert shard_strides(rows, Degree(2, 1)) == (4, 1)
    assert shard_strides(columns, Degree(2, 1)) == (1, 6)
    assert shard_strides(columns, Degree()) == columns.natural(torch.empty(24)).stride()
    assert shard_strides(Parameter("w", (6, 4)), Degree(2, 1)) == (4, 1)
