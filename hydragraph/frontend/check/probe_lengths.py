"""Sequence lengths for the numeric check, beyond the model's windows and chunks if possible."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Program
from hydragraph.passes.graph_node import aten, operands
from hydragraph.private.tracing import ancestors_of

# Names of settings for a length beyond which attention may change.
_LIMITS = re.compile(r"window|chunk|cap|block_size|original_max|floor_scale")
_POSITIONS = re.compile(r"^(max_position_embeddings|n_positions|max_seq_len|max_sequence_length)$")
LONGEST = 512
_WORK = 4e11  # approximate maximum number of operations to compute one sequence
# Default lengths: all different, no powers of two.
_SHORT = (5, 11, 3)
_FEW = (3, 7)
_BEYOND = 3
LARGE = 100_000_000


@dataclass(frozen=True)
class ProbeLengths:
    """Sequence lengths, and the model's length limits that none of them exceeds."""

    tokens: tuple[int, ...]
    untouched: tuple[tuple[str, int], ...]


def lengths_of(model: nn.Module, program: Program, parameters: int) -> ProbeLengths:
    """Choose lengths, which are short for many `parameters`; the second exceeds as many limits as possible."""
    settings = set(_settings(model))
    places = _places(settings, program)
    most = min([LONGEST, max(48, int(_WORK / (12 * max(parameters, 1)))), *places])
    limits = {(name, value) for name, value in settings if _LIMITS.search(name) and value > 1}
    reached = [value for _, value in limits if value + _BEYOND <= most]
    # beyond: limits above the longest affordable sequence, but within the positions.
    beyond = sorted((n, v) for n, v in limits if most < v + _BEYOND <= min([v + _BEYOND, *places]))
    first, second, *others = _FEW if parameters > LARGE else _SHORT
    long = min(max([second, *(value + _BEYOND for value in reached)]), most)
    return ProbeLengths((min(first, most), long, *(min(n, most) for n in others)), tuple(beyond))


def _settings(model: nn.Module) -> Iterator[tuple[str, int]]:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        yield from _whole(config.to_dict())
    for module in model.modules():
        yield from _whole({n: v for n, v in vars(module).items() if type(v) is int})


def _whole(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if type(value) is int:
            yield str(name), value
        elif isinstance(value, Mapping):
            yield from _whole(value)


def _places(settings: set[tuple[str, int]], program: Program) -> list[int]:
    named = [value for name, value in settings if _POSITIONS.match(name) and value > 1]
    tables = [rows for rows, read in embeddings(program) if read == {"position_ids"}]
    short = [] if program.positions is None else [program.positions[0]]
    return [*short, *(n - 4 if n > 16 else max(2, n // 2) for n in (*named, *tables))]


def embeddings(program: Program) -> list[tuple[int, set[str]]]:
    """Return the rows of each embedding table before the blocks, and the fields that index it."""
    graph = program.templates[program.blocks[0].template].graph.graph
    nodes = [n for n in graph.nodes if n.target is aten.embedding.default]
    return [(int(value_of(operands(n)[0]).shape[0]), _read(operands(n)[1])) for n in nodes]


def _read(node: fx.Node) -> set[str]:
    tensors = ancestors_of([node], lambda n: isinstance(value_of(n), Tensor))
    return {n.name for n in tensors if n.op == "placeholder"}
