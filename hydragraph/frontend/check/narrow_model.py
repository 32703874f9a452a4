"""Narrow copies of library models, whose numeric check stands for the model's own.

A copy is built from the model's config with smaller widths, so that both run the same library code. Their captures must
have the same text, except for numbers that differ by powers of one factor. The cost of a check then does not grow with
the model.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.frontend.peft_adapters import base_model, with_adapters_of
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Program, Template

_LOG = logging.getLogger(__name__)

FACTORS = (16, 8, 4)
# Settings that are numbers of features, or of rows of an embedding.
_WIDTH = re.compile(
    r"(hidden|intermediate|embedding|ffn|vocab)_size|(_|^)(dim|rank)$|^d_(model|ff|kv)$|^n_(embd|inner)$"
)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
# Minimum number of features: rotary tables pair the halves of a head.
_LEAST = 4
# A number in a graph's text that is not part of a name.
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w])")
_SYMBOL = re.compile(r"\bs\d+\b")


@dataclass(frozen=True)
class NarrowModel:
    """A copy on the meta device.

    Attributes:
        factor: the model's widths divided by the copy's.
        tokens: special tokens outside the copy's vocabulary, each with the one that replaces it.
    """

    model: nn.Module
    factor: int
    tokens: frozenset[tuple[int, int]]

    def captured_alike(self, program: Program, narrow: Program) -> bool:
        """Return whether the programs of the model and of this copy differ in widths only."""
        texts = _text(program), _text(narrow)
        rest, narrow_rest = map(_NUMBER.split, texts)
        return rest == narrow_rest and all(map(self._scaled, *map(_NUMBER.findall, texts)))

    def _scaled(self, number: str, narrow: str) -> bool:
        if number == narrow:
            return True
        value, of_narrow = float(number), float(narrow)
        if (value, of_narrow) in self.tokens:
            return True
        if value * of_narrow <= 0:
            return False
        exponent = math.log(value / of_narrow, self.factor)
        if number.isdecimal() and narrow.isdecimal():
            return abs(exponent - 1) < 1e-9 or abs(exponent - 2) < 1e-9
        # Constants such as 1 / sqrt(features).
        return abs(exponent) <= 2 and abs(2 * exponent - round(2 * exponent)) < 1e-9


def narrow_copy(model: nn.Module, factor: int) -> NarrowModel | None:
    """Build a transformers model, with its adapters, at widths divided by a factor; None if its config forbids that."""
    base = base_model(model)
    config: Any = copy.deepcopy(base.config)
    tokens = _divide(config, factor)
    if tokens is None:
        return None
    try:
        with torch.device("meta"):
            narrow = with_adapters_of(model, type(base)(config))
    except Exception as error:  # sizes that depend on each other
        _LOG.info("no copy at 1/%d of the widths: %s", factor, error)
        return None
    tensors = dict([*narrow.named_parameters(), *narrow.named_buffers()])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in tensors:
            return None
        tensors[name].data = tensors[name].data.to(tensor.dtype)
        tensors[name].requires_grad_(tensor.requires_grad)
    return NarrowModel(narrow.train(model.training), factor, tokens)


def _divide(config: Any, factor: int) -> frozenset[tuple[int, int]] | None:
    """Divide a config's widths; return the special tokens that change, or None if a head would be too narrow."""
    values = vars(config)
    if values.get("head_dim") is None:
        hidden, heads = (next((values[n] for n in names if n in values), None) for names in (_HIDDEN, _HEADS))
        if not hidden or not heads or hidden % (heads * factor) or hidden < heads * factor * _LEAST:
            return None
    widths = {name: value for name, value in values.items() if type(value) is int and _WIDTH.search(name)}
    values.update({n: v // factor for n, v in widths.items() if v % factor == 0 and v >= factor * _LEAST})
    last = values.get("vocab_size", math.inf) - 1
    outside = {n: v for n, v in values.items() if n.endswith("token_id") and type(v) is int and v > last}
    values.update(dict.fromkeys(outside, last))
    return frozenset((value, last) for value in outside.values())


def _text(program: Program) -> str:
    kinds = [program.aux.template, *program.kinds]
    blocks = [(b.name, kinds.index(b.template), b.parameters, b.buffers, b.aux) for b in (program.aux, *program.blocks)]
    parameters = [(p.name, p.shape, p.aliases, p.trainable) for p in program.parameters.values()]
    graphs = [_graph_text(program.templates[kind]) for kind in kinds]
    return "\n".join(map(str, (program.causal, program.positions, blocks, parameters, *graphs)))


def _graph_text(template: Template) -> str:
    values = [(node.name, value_of(node)) for node in template.graph.graph.nodes]
    shapes = str([(name, str(tuple(v.shape)), str(v.dtype)) for name, v in values if isinstance(v, Tensor)])
    names: dict[str, str] = {}  # of symbols, which differ between a trace and a program read from a file
    shapes = _SYMBOL.sub(lambda match: names.setdefault(match[0], f"size_{len(names)}"), shapes)
    return f"{template.parameters} {template.buffers} {template.inputs} {template.graph.code} {shapes}"
