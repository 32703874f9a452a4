"""Random sequences for the numeric check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from hydragraph.frontend.check.probe_lengths import ProbeLengths, embeddings
from hydragraph.frontend.packed_batch import DropoutNumbers, pack
from hydragraph.frontend.packed_inputs import own_fields, shift
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Program
from hydragraph.passes.find_field_ranges import field_ranges_of
from hydragraph.passes.graph_node import aten, operands
from hydragraph.spec.workload import IGNORED, Field, Sequence

# The second batch's token count is padded to a multiple of one of these
_PADDED = (13, 17)
# Distance between targets if labels are not next tokens
_TARGETS = 3


@dataclass(frozen=True)
class ProbeIds:
    """Token ids to draw.

    Attributes:
        count: exclusive upper bound of ids.
        special: ids that are never drawn.
        labels: exclusive upper bound of labels.
    """

    count: int
    special: frozenset[int]
    labels: int

    def draw(self, length: int, generator: torch.Generator) -> Tensor:
        plain = torch.tensor([i for i in range(min(self.count, 4096)) if i not in self.special] or [0])
        ids = plain[torch.randint(0, len(plain), (length,), generator=generator)]
        # In a large vocabulary, draw half of the ids from 4096 on.
        if self.count > len(plain) + len(self.special):
            high = torch.randint(4096, self.count, (length,), generator=generator)
            ids = torch.where(torch.rand(length, generator=generator) < 0.5, ids, high)
            ids = torch.where(torch.isin(ids, torch.tensor([*self.special, -1])), plain[0], ids)
        return ids


def ids_read(program: Program, otherwise: int = 2) -> ProbeIds:
    limits = [limit for limit in field_ranges_of(program) if limit.field == "input_ids"]
    rows = [rows for rows, read in embeddings(program) if read == {"input_ids"}]
    count = min([limit.high for limit in limits] or rows or [otherwise])
    least = max([limit.low for limit in limits], default=0)
    return ProbeIds(count, frozenset(range(max(least, 0))), _classes(program) or count)


def ids_of(model: nn.Module, program: Program) -> ProbeIds:
    """Return the ids that a model accepts, without special tokens."""
    config: Any = getattr(model, "config", None)
    read = ids_read(program, int(getattr(config, "vocab_size", None) or 2))
    named = config.to_dict() if hasattr(config, "to_dict") else {}
    special = {v for n, v in named.items() if "token_id" in n and type(v) is int}
    special |= {p for m in model.modules() if type(p := getattr(m, "padding_idx", None)) is int}
    named_ones = special if len(special) < read.count // 2 else ()
    return replace(read, special=read.special.union(named_ones))


def _classes(program: Program) -> int | None:
    graph = program.templates[program.blocks[-1].template].graph.graph
    losses = [n for n in graph.nodes if n.target in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)]
    sizes = [value_of(first).shape[-1] for n in losses if isinstance(first := operands(n)[0], fx.Node)]
    return min((s for s in sizes if isinstance(s, int)), default=None)


def draw_sequences(
    lengths: ProbeLengths, ids: ProbeIds, program: Program, example: Mapping[str, Tensor] | None, seed: int
) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    fields = own_fields(program)
    sequences = []
    for length in lengths.tokens:
        tokens = ids.draw(length, generator)
        extra = {n: _field(f, length, (example or {}).get(n), generator) for n, f in fields.items()}
        padding = {name: field.padding for name, field in fields.items() if field.padding}
        sequences.append(Sequence(tokens, _labels(tokens, ids, program.causal, generator), extra, padding=padding))
    return sequences


def _labels(tokens: Tensor, ids: ProbeIds, causal: bool, generator: torch.Generator) -> Tensor:
    if causal and ids.labels >= ids.count:
        return shift(tokens)
    drawn = torch.randint(0, ids.labels, tokens.shape, generator=generator)
    counts = (torch.arange(len(tokens)) % _TARGETS == 0) | (torch.arange(len(tokens)) == len(tokens) - 1)
    return torch.where(counts, drawn, IGNORED)


def _field(field: Field, length: int, example: Tensor | None, generator: torch.Generator) -> Tensor:
    if example is not None and (not field.dtype.is_floating_point or bool(example.any())):
        return example[0, torch.randint(0, example.shape[1], (length,), generator=generator)]
    if field.dtype.is_floating_point:
        return torch.rand(length, *field.sizes, generator=generator).to(field.dtype) + 0.1
    return torch.zeros(length, *field.sizes, dtype=field.dtype)


def batches(sequences: list[Sequence], key: int | None = None) -> list[tuple[dict[str, Tensor], list[int]]]:
    """Return two packed batches, with their sequences' indices; `key` is the dropout key."""
    draws = None if key is None else DropoutNumbers(key, range(len(sequences)))
    tokens = sum(map(len, sequences))
    padded = next((n for n in _PADDED if tokens % n), tokens + 1)
    # orders: (indices of sequences, multiple of the token count). The second batch is padded and
    # reversed, so that sequences have other neighbors and offsets.
    orders = ((list(range(min(2, len(sequences)))), 1), (list(reversed(range(len(sequences)))), padded))
    return [
        (pack([sequences[i] for i in order], multiple, draws=draws and draws.of(order)), order)
        for order, multiple in orders
    ]
