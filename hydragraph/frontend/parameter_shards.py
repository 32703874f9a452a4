"""Choice of one sharding rule per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from hydragraph.ir.graph_data import placeholders_of
from hydragraph.ir.parameter import ShardRule
from hydragraph.ir.program import Block, Template
from hydragraph.passes.annotate import annotate
from hydragraph.passes.find_cuts import find_cuts, rules
from hydragraph.passes.tensor_cut import Cuts


def analyse(template: Template, whole: set[str]) -> tuple[Cuts, list[fx.Node]]:
    """Return a template's shardable dimensions and parameter placeholders; those in `whole` stay unsharded."""
    nodes = {n.name: n for n in placeholders_of(template.graph)}
    parameters = list(nodes.values())[: len(template.parameters)]
    return find_cuts(template.graph.graph, set(parameters), nodes.get("input_ids"), whole), parameters


def excluded(template: Template, blocks: Sequence[Block], whole: set[str]) -> set[str]:
    """Return the placeholders to which any block passes a parameter in `whole`."""
    # FX lowercases names: match placeholders by order.
    placeholders = placeholders_of(template.graph)
    used_as = [block.parameters for block in blocks if block.template == template.name]
    return {n.name for names in used_as for n, name in zip(placeholders, names, strict=False) if name in whole}


def agree(blocks: Sequence[Block], templates: Mapping[str, Template]) -> dict[str, ShardRule]:
    """Return the sharding rule of every sharded parameter.

    A parameter that blocks would shard differently stays unsharded, which may force others to stay unsharded.
    """
    whole: set[str] = set()
    # A whole parameter may force others to stay whole: repeat until the set stops growing.
    while True:
        choices_of: dict[str, set[ShardRule | None]] = {}
        analysed: dict[str, list[ShardRule | None]] = {}
        for block in blocks:
            template = templates[block.template]
            if template.name not in analysed:
                cuts, nodes = analyse(template, excluded(template, blocks, whole))
                by_node = rules(cuts)
                analysed[template.name] = [by_node.get(n) for n in nodes]
            for name, choice in zip(block.parameters, analysed[template.name], strict=True):
                choices_of.setdefault(name, set()).add(choice)
        uncut = {name for name, choices in choices_of.items() if len(choices) > 1 or None in choices}
        if uncut == whole:
            return {n: rule for n, choices in choices_of.items() for rule in choices if rule is not None}
        whole |= uncut


def annotated_template(template: Template, whole: set[str]) -> Template:
    cuts, parameters = analyse(template, whole)
    hidden = next((n for n in placeholders_of(template.graph) if n.name == "hidden"), None)
    return replace(template, graph=annotate(template.graph, cuts, set(parameters), hidden))
