"""The printed form of a Program: one line per block, with its placeholders, then the templates' operators."""

from __future__ import annotations

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.program import Block, Program, short


def program_text(program: Program) -> str:
    """Return the text: no rank, no device, no micro-batch; T stands for the token count."""
    size = sum(p.size for p in program.parameters.values())
    learned = sum(p.size for p in program.parameters.values() if p.trainable)
    dtype = str(program.dtype).removeprefix("torch.")
    trained = "" if learned == size else f", trainable={_count(learned)}"
    sizes = f"layers={program.layers}, parameters={_count(size)}{trained}"
    head = f"program {program.model} {{{sizes}, dtype={dtype}, tokens=T}}"
    width = max(len(b.name) for b in program.blocks)
    lines = [head, _line(program, program.aux, width, "")]
    for index, block in enumerate(program.blocks):
        last = index == len(program.blocks) - 1
        leaves = "loss" if last else f"communicate h{index} [T, {_hidden(program)}]"
        lines.append(_line(program, block, width, leaves))
    pushed = ", ".join(b.name for b in reversed(program.buckets) if b.learns)
    return "\n".join([*lines, f"  push {pushed}"])


def template_text(program: Program, name: str) -> str:
    """Return one template's graph as code, with its `communicate` placeholders."""
    return f"template {short(name)}\n{program.templates[name].graph.code.strip()}"


def _line(program: Program, block: Block, width: int, leaves: str) -> str:
    pulls = [_pull(b) for b in program.buckets if block.name in b.blocks]
    parts = [f"  block {block.name:<{width}} <- template {short(block.template)}", "  ".join(pulls), leaves]
    return "   ".join(p for p in parts if p)


def _pull(bucket: Bucket) -> str:
    if len(bucket.parameters) == 1:
        parameter = bucket.parameters[0]
        return f"pull {parameter.name} {list(parameter.shape)}"
    return f"pull {bucket.name}: {len(bucket.parameters)} parameters, {_count(bucket.size)}"


def _count(elements: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if elements >= unit:
            return f"{elements / unit:.1f} {name}"
    return str(elements)


def _hidden(program: Program) -> str:
    graph = program.templates[program.blocks[0].template].graph
    output = next(n for n in graph.graph.nodes if n.op == "output").args[0][0]
    return str(value_of(output).shape[-1])
