"""The Llama layer whose graph the tests of the graph passes compare with golden texts."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import fx

from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Template
from hydragraph.passes.differentiate import Variant, differentiate
from hydragraph.passes.graph_text import graph_text
from hydragraph.passes.shard import shard
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.spec.stage_kind import StagePart
from tests.models import captured

GOLDEN = Path(__file__).parent / "golden"


def llama_layer() -> tuple[Template, Mapping[str, Parameter]]:
    """Return the template of a Llama layer, annotated, and its parameters by local name."""
    program, _ = captured("llama")
    block = program.blocks[1]
    template = program.templates[block.template]
    return template, {n: program.parameters[c] for n, c in zip(template.parameters, block.parameters, strict=True)}


@functools.cache
def layer(part: StagePart, partitioner: str = "min_cut") -> Variant:
    template, parameters = llama_layer()
    learning = frozenset((*template.parameters, "hidden"))
    spec = VariantSpec(template, parameters, part, torch.float32, learning, partitioner)
    return differentiate(spec, shard(template, parameters, part))


def check_golden(name: str, graph: fx.GraphModule) -> None:
    """Compare a graph's text with tests/passes/golden/{name}.txt; HYDRAGRAPH_UPDATE_GOLDEN=1 rewrites it first."""
    check_golden_text(name, graph_text(graph))


def check_golden_text(name: str, text: str) -> None:
    """Compare a text with tests/passes/golden/{name}.txt; HYDRAGRAPH_UPDATE_GOLDEN=1 rewrites it first."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HYDRAGRAPH_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; if meant, run with HYDRAGRAPH_UPDATE_GOLDEN=1"
