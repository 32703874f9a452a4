"""`capture`: an unmodified model becomes a strategy-independent Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend import huggingface
from hydragraph.frontend.blocks import block_list, meta_copy, structure
from hydragraph.frontend.functional import functional_graph
from hydragraph.frontend.packed import FIELDS, Loss, token_cross_entropy
from hydragraph.frontend.private import one_pass, symbol_name
from hydragraph.frontend.shards import agree, annotated_template, excluded
from hydragraph.frontend.skeleton import EXAMPLE, Site, capture_skeleton, node_inputs
from hydragraph.frontend.slices import extract, template_of
from hydragraph.frontend.templates import capture_template
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Block, Program, Template
from hydragraph.passes.cuts import uncut_heads

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@one_pass()
def capture(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    example: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    blocks: str | None = None,
) -> Program:
    """Trace a model once into blocks with pull, push and communicate placeholders.

    Args:
        model: a Hugging Face model built from its config, on meta or CPU; it is not changed.
        dtype: what it will compute in.
        example: reserved for modules that are no Hugging Face models.
        loss: takes the model's outputs and the packed batch (see `capture.packed.FIELDS`), returns the summed loss;
            default: cross-entropy over labels that are not -100.
        blocks: the path of the nn.ModuleList of repeated blocks, where the largest one is not meant.

    Raises:
        Unsupported: with module, operator and remedy.
    """
    _refuse(model, dtype, example)
    copied = meta_copy(model, dtype)
    huggingface.use_packed_attention(copied)
    path, modules = block_list(copied, blocks)
    named = [(f"layer.{i}", block) for i, block in enumerate(modules)]
    identities: dict[int, int] = {}
    keys = {name: structure(block, identities) for name, block in named}
    by_module = {id(block): keys[name] for name, block in named}
    exported, sites = capture_skeleton(
        copied, named, lambda b: by_module[id(b)], huggingface.call, loss or token_cross_entropy
    )
    pieces = _slice_skeleton(exported, type(model).__name__)
    layers = _capture_layers(sites, keys)
    return _assemble(model, dtype, path, pieces, layers, sites)


def _refuse(model: nn.Module, dtype: torch.dtype, example: object) -> None:
    where = type(model).__name__
    if dtype not in DTYPES:
        raise Unsupported(
            f"dtype {dtype}",
            where=where,
            remedy=f"use one of {', '.join(map(str, DTYPES))}",
        )
    if not huggingface.is_huggingface(model) or example is not None:
        raise Unsupported(
            "a module that is no Hugging Face model", where=where, remedy="pass a transformers causal language model"
        )
    huggingface.refuse_unsupported(model)


@dataclass(frozen=True)
class _Pieces:
    """The skeleton cut up: templates, and what feeds each block."""

    embed: Template
    aux: Template
    head: Template
    feeds: dict[str, list[int]]  # block -> for each of its other tensor inputs, the aux output
    outputs: list[fx.Node]


def _slice_skeleton(exported: torch.export.ExportedProgram, model: str) -> _Pieces:
    skeleton, signature = functional_graph(exported, model)
    calls = [n for n in skeleton.graph.nodes if n.target is torch.ops.hydragraph.block.default]
    outputs: list[fx.Node] = []
    feeds: dict[str, list[int]] = {}
    previous: fx.Node | None = None
    for node in calls:
        hidden, others = node_inputs(node)
        if previous is not None and hidden is not previous:
            raise Unsupported(
                "something stands between two blocks",
                where=str(node.args[2]),
                remedy="move it into the block, or name another nn.ModuleList with blocks='path.to.list'",
            )
        outputs += [o for o in others if o not in outputs]
        feeds[str(node.args[2])] = [outputs.index(o) for o in others]
        previous = node
    assert previous is not None
    names = _names(signature)
    result = next(n for n in skeleton.graph.nodes if n.op == "output").args[0]
    first, _ = node_inputs(calls[0])
    embed = template_of(extract(skeleton, [first], {}), *names, "the model before its first block")
    aux = template_of(extract(skeleton, outputs, {}), *names, "what blocks need besides the hidden state")
    head = template_of(
        extract(skeleton, [result[0]], {previous: "hidden"}),
        names[0],
        names[1],
        {**names[2], "hidden": "hidden"},
        "the model after its last block",
    )
    placed = [n.target for piece in (aux, head) for n in piece.graph.graph.nodes]
    if aux.parameters or torch.ops.hydragraph.block.default in placed:
        raise Unsupported(
            "blocks share a value that depends on parameters or on other blocks",
            where=model,
            remedy="compute it inside the block",
        )
    return _Pieces(embed, aux, head, feeds, outputs)


def _names(signature: Any) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return placeholder -> name in the model (parameters, buffers) and in the batch."""
    parameters = {k: v.removeprefix("model.") for k, v in signature.inputs_to_parameters.items()}
    buffers = {k: v.removeprefix("model.") for k, v in signature.inputs_to_buffers.items()}
    return parameters, buffers, dict(zip(signature.user_inputs, FIELDS, strict=True))


def _capture_layers(sites: Sequence[Site], keys: Mapping[str, str]) -> dict[str, Template]:
    """Trace each structurally unique block once; return every block's template."""
    hints = _hints(sites)
    known: dict[str, Template] = {}
    found: dict[str, Template] = {}
    for site in sites:
        inputs = [(tuple(map(str, t.shape)), str(t.dtype)) for t in site.inputs]
        key = repr((keys[site.name], site.constants(), inputs))
        if key not in known:
            template, alone = capture_template(site, hints)
            if not alone:
                known[key] = template
            found[site.name] = template
        else:
            found[site.name] = known[key]
    return found


def _hints(sites: Sequence[Site]) -> dict[str, int]:
    """Return an example value for the token and the sequence symbol."""
    hints = {}
    for tensor in sites[0].inputs:
        for size in tensor.shape:
            symbol = symbol_name(size)
            if symbol is not None and symbol.isidentifier():
                hints[symbol] = EXAMPLE["T"] if tensor.dim() > 1 else EXAMPLE["N+1"]
    return hints


def _assemble(
    model: nn.Module,
    dtype: torch.dtype,
    path: str,
    pieces: _Pieces,
    layers: Mapping[str, Template],
    sites: Sequence[Site],
) -> Program:
    canonical = _canonical_names(model)
    raw = {"embed": pieces.embed, **layers, "head": pieces.head}
    blocks = []
    for name, template in raw.items():
        prefix = f"{path}.{name.removeprefix('layer.')}." if name.startswith("layer.") else ""
        used = [int(i.removeprefix("other.")) for i in template.inputs if i.startswith("other.")]
        blocks.append(
            Block(
                name,
                template.name,
                tuple(canonical[prefix + p] for p in template.parameters),
                tuple(prefix + b for b in template.buffers),
                tuple(pieces.feeds[name][i] for i in used) if used else (),
            )
        )
    templates = {t.name: t for t in raw.values()}
    parameters = dict(model.named_parameters())
    aliases: dict[str, list[str]] = {n: [] for n in parameters}
    for alias, name in canonical.items():
        if alias != name:
            aliases[name].append(alias)
    shard = agree(blocks, templates)
    described = {n: Parameter(n, tuple(p.shape), tuple(aliases[n]), shard.get(n)) for n, p in parameters.items()}
    whole = {n for n in described if n not in shard}
    annotated = {n: annotated_template(t, excluded(t, blocks, whole)) for n, t in templates.items()}
    heads = {uncut_heads(t.graph.graph) for t in templates.values()} - {0}
    return Program(
        model=type(model).__name__,
        dtype=dtype,
        causal=huggingface.is_causal(model),
        blocks=tuple(blocks),
        aux=Block("aux", pieces.aux.name, (), pieces.aux.buffers),
        templates={**annotated, pieces.aux.name: pieces.aux},
        parameters=described,
        buckets=_buckets(blocks, described),
        heads=tuple(sorted(heads)),
    )


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Return every parameter name (tied aliases too) -> its first name."""
    first = {id(p): n for n, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


def _buckets(blocks: Sequence[Block], parameters: Mapping[str, Parameter]) -> tuple[Bucket, ...]:
    """Group parameters: those of one block alone together, each tied one by itself, in block order."""
    users: dict[str, list[str]] = {}
    for block in blocks:
        for name in dict.fromkeys(block.parameters):
            users.setdefault(name, []).append(block.name)
    buckets = []
    for block in blocks:
        names = list(dict.fromkeys(block.parameters))
        tied = [n for n in names if len(users[n]) > 1 and users[n][0] == block.name]
        own = [n for n in names if len(users[n]) == 1]
        buckets += [Bucket(n, (parameters[n],), tuple(users[n])) for n in tied]
        if own:
            buckets.append(Bucket(block.name, tuple(parameters[n] for n in own), (block.name,)))
    return tuple(buckets)
