"""Narrow copies of library models, for a cheaper numeric check.

The graphs of a copy and its model must have the same text, except for width-dependent numbers.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from hydragraph.frontend.capture import capture
from hydragraph.frontend.check.probe_lengths import LARGE
from hydragraph.frontend.compiled_folder.program_cache import path_of
from hydragraph.frontend.packed_inputs import Loss, token_cross_entropy
from hydragraph.frontend.peft_adapters import Adapters, base_model
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Program
from hydragraph.passes.differentiate import Variant

_LOG = logging.getLogger(__name__)

FACTORS = (16, 8, 4)
# Settings that count features or embedding rows.
_WIDTH = re.compile(
    r"(hidden|intermediate|embedding|ffn|vocab)_size|(_|^)(dim|rank)$|^d_(model|ff|kv)$|^n_(embd|inner)$"
)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_LEAST = 4  # minimum head size; rotary embeddings pair a head's halves
# A number that is not part of a name.
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w])")
_SYMBOL = re.compile(r"\bs\d+\b")


@dataclass(frozen=True)
class CheckedModel:
    model: nn.Module
    program: Program
    loss: Loss = token_cross_entropy
    blocks: str | None = None
    example: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Widths:
    """Differences between a model and its narrow copy.

    Attributes:
        factor: ratio of the model's widths to the copy's.
        tokens: (old, new) ids of renumbered special tokens.
    """

    factor: int
    tokens: frozenset[tuple[int, int]]

    def equal(self, text: str, narrow: str) -> bool:
        rest, narrow_rest = map(_NUMBER.split, (text, narrow))
        return rest == narrow_rest and all(map(self._explain, *map(_NUMBER.findall, (text, narrow))))

    def _explain(self, number: str, narrow: str) -> bool:
        if number == narrow:
            return True
        value, of_narrow = float(number), float(narrow)
        if (value, of_narrow) in self.tokens:
            return True
        if value * of_narrow <= 0:
            return False
        # Sizes scale by the factor or its square (products of two widths); other numbers by powers
        # of its root, as head_dim ** -0.5.
        exponent = math.log(value / of_narrow, self.factor)
        if number.isdecimal() and narrow.isdecimal():
            return abs(exponent - 1) < 1e-9 or abs(exponent - 2) < 1e-9
        return abs(exponent) <= 2 and abs(2 * exponent - round(2 * exponent)) < 1e-9


@dataclass(frozen=True)
class NarrowModel:
    model: nn.Module
    program: Program
    widths: Widths


@dataclass(frozen=True)
class LibraryModel:
    """Everything that a library model's graphs depend on.

    Attributes:
        tensors: name, dtype and requires_grad of each parameter and buffer.
        arguments: dtype, example, loss and blocks, as in `capture`.
    """

    kind: type[nn.Module]
    config: Any
    adapters: Adapters | None
    tensors: tuple[tuple[str, torch.dtype, bool], ...]
    training: bool
    arguments: tuple[torch.dtype, Mapping[str, Tensor] | None, Loss | None, str | None]

    @classmethod
    def of(cls, subject: CheckedModel) -> LibraryModel | None:
        """Describe a model, or return None if it runs code from outside its libraries."""
        model = subject.model
        loss = None if subject.loss is token_cross_entropy else subject.loss
        arguments = (subject.program.dtype, subject.example, loss, subject.blocks)
        if path_of(model, *arguments) is None:
            return None
        base = base_model(model)
        named = [*model.named_parameters(), *model.named_buffers()]
        tensors = tuple((name, tensor.dtype, tensor.requires_grad) for name, tensor in named)
        return cls(type(base), copy.deepcopy(base.config), Adapters.of(model), tensors, model.training, arguments)

    def narrowed(self, program: Program) -> NarrowModel | None:
        """Return a copy whose program differs only in widths, or None if no factor works."""
        for factor in FACTORS:
            try:
                built = self.at(factor)
                narrow = None if built is None else capture(built[0], *self.arguments)
            except Exception as error:
                _LOG.info("cannot check a copy at 1/%d of the widths: %s", factor, error)
                continue
            if built is not None and narrow is not None:
                model, widths = built
                if widths.equal(program_text(program), program_text(narrow)):
                    return NarrowModel(model, narrow, widths)
        return None

    def at(self, factor: int) -> tuple[nn.Module, Widths] | None:
        """Build a copy with widths divided by `factor`; return None if this fails."""
        config = copy.deepcopy(self.config)
        tokens = _divide(config, factor)
        if tokens is None:
            return None
        with torch.device("meta"):
            base = self.kind(config)
            model = base if self.adapters is None else self.adapters.on(base)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        if any(name not in tensors for name, _, _ in self.tensors):
            return None
        for name, dtype, requires_grad in self.tensors:
            tensors[name].data = tensors[name].data.to(dtype)
            tensors[name].requires_grad_(requires_grad)
        return model.train(self.training), Widths(factor, tokens)


def _divide(config: Any, factor: int) -> frozenset[tuple[int, int]] | None:
    """Divide a config's widths; return changed token ids, or None if heads would be too narrow."""
    values = vars(config)
    # Without head_dim, models divide the hidden size by the heads; the result must be whole.
    if values.get("head_dim") is None:
        hidden, heads = (next((values[n] for n in names if n in values), None) for names in (_HIDDEN, _HEADS))
        if not hidden or not heads or hidden % (heads * factor) or hidden < heads * factor * _LEAST:
            return None
    widths = {name: value for name, value in values.items() if type(value) is int and _WIDTH.search(name)}
    values.update({n: v // factor for n, v in widths.items() if v % factor == 0 and v >= factor * _LEAST})
    # Special tokens beyond the vocabulary become its last token.
    last = values.get("vocab_size", math.inf) - 1
    outside = {n: v for n, v in values.items() if n.endswith("token_id") and type(v) is int and v > last}
    values.update(dict.fromkeys(outside, last))
    return frozenset((value, last) for value in outside.values())


def has_large_blocks(program: Program) -> bool:
    sizes = (sum(program.parameters[name].size for name in block.parameters) for block in program.blocks)
    return max(sizes) > LARGE


def program_text(program: Program) -> str:
    kinds = [program.aux.template, *program.kinds]
    blocks = [(b.name, kinds.index(b.template), b.parameters, b.buffers, b.aux) for b in (program.aux, *program.blocks)]
    parameters = [(p.name, p.shape, p.aliases, p.trainable) for p in program.parameters.values()]
    templates = [program.templates[kind] for kind in kinds]
    graphs = [(t.parameters, t.buffers, t.inputs, _graph_text(t.graph)) for t in templates]
    return "\n".join(map(str, (program.causal, program.positions, blocks, parameters, *graphs)))


def variant_text(variant: Variant) -> str:
    rest = (variant.inputs, variant.needs, variant.gradients, variant.kinds, variant.vocabulary, variant.added)
    return f"{rest} {_graph_text(variant.forward)} {_graph_text(variant.backward)}"


def _graph_text(graph: fx.GraphModule) -> str:
    values = [(node.name, value_of(node)) for node in graph.graph.nodes]
    shapes = str([(name, str(tuple(v.shape)), str(v.dtype)) for name, v in values if isinstance(v, Tensor)])
    # Symbols differ in a program read from a file
    names: dict[str, str] = {}
    return graph.code + _SYMBOL.sub(lambda match: names.setdefault(match[0], f"size_{len(names)}"), shapes)
