"""Capture: turn an unmodified model into a strategy-independent Program."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from hydragraph import log
from hydragraph.errors import Unsupported
from hydragraph.frontend import custom_modules, huggingface
from hydragraph.frontend.block_equivalence import is_without_index, kind_of, refuse_state, refuse_state_around
from hydragraph.frontend.compiled_folder.program_cache import keep_program, path_of, read_program
from hydragraph.frontend.dropout_calls import INPUTS
from hydragraph.frontend.functional_graph import functional_graph
from hydragraph.frontend.loss_module import meta_loss, name_in_program, refuse_trained
from hydragraph.frontend.loss_reduction import refuse_mean, refuse_unsummed
from hydragraph.frontend.mixed_dtypes import refuse_mixed_dtypes
from hydragraph.frontend.module_digest import outline, structure
from hydragraph.frontend.packed_inputs import Loss, fields_of, token_cross_entropy
from hydragraph.frontend.parameter_shards import agree, annotated_template, excluded, placeholder
from hydragraph.frontend.peft_adapters import refuse_untried
from hydragraph.frontend.recurrent_layers import packed_recurrences
from hydragraph.frontend.repeated_blocks import block_list, entries, meta_copy, separate_repeated
from hydragraph.frontend.skeleton import Site, capture_skeleton, meta_batch, node_inputs, with_opaque_blocks
from hydragraph.frontend.skeleton_parts import extract, template_of
from hydragraph.frontend.templates import capture_template
from hydragraph.frontend.token_mixing import field_of, refuse_mixing, refuse_other_bounds, refuse_unproven
from hydragraph.frontend.trainable_parameters import learning, refuse_other_dtypes
from hydragraph.frontend.untraceable import refuse_unseen
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Block, Program, Template
from hydragraph.passes.find_cuts import uncut_heads
from hydragraph.passes.graph_node import ATTENDING, operands
from hydragraph.passes.prove_sizes import prove_sizes, with_an_example
from hydragraph.private.experts import make_traceable
from hydragraph.private.torch_modes import own_modes
from hydragraph.private.tracing import TensorSpec, one_pass, symbol_name
from hydragraph.private.versions import check_torch

_LOG = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@one_pass()
@own_modes("capture")
def capture(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    example: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    blocks: str | None = None,
) -> Program:
    """Trace a model once into blocks with pull, push and communicate placeholders.

    The programs of library models are kept in the user's cache folder (`compiled_folder.program_cache`).

    Args:
        model: a Hugging Face model built from its config, or any module with a list of repeated blocks, on meta or CPU;
            it is not changed. A custom module is called with the fields of the packed batch that its forward's
            parameters name, or with the whole dict if its only parameter is not a field (`batch`); its blocks take the
            hidden state, [1, T, H] or [T, H], first and return it, and tokens interact only in
            `hydragraph.varlen_attention`.
        dtype: compute dtype.
        example: a packed batch of any size. It has input_ids, position_ids and labels [1, T] int64, cu_seqlens [N + 1]
            int32 and max_length, 0-d int64, and all of these may be omitted; any additional entry, [1, T, ...], is a
            custom field for forward or loss, and each sequence then supplies it as a tensor [L, ...].
        loss: takes the model's outputs and the packed batch (a dict) and returns the loss summed over targets, i.e.
            over positions whose label is not -100. A step divides it by the number of targets in the global mini-batch.
            Positions with label -100 must not contribute: padding is a separate sequence with such labels. A module may
            have buffers, which steps never change, and no parameters. Default: cross-entropy of the logits.
        blocks: path of the nn.ModuleList of repeated blocks, if it is not the largest one.

    Raises:
        Unsupported: with the module, the operator and a remedy.
    """
    check_torch()
    check_model(model, "capture")
    where = type(model).__name__
    _refuse(model, dtype)
    refuse_trained(loss)
    tensor_names = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    fields = fields_of(example, tensor_names, where)
    began = time.perf_counter()
    kept = path_of(model, dtype, example, loss, blocks)
    known = None if kept is None else read_program(kept)
    if known is not None:
        _LOG.info("read the captured %s from %s in %.2f s", where, kept, time.perf_counter() - began)
        return replace(known, origin=origin(model))  # which may name objects of this process
    log.doing(f"capturing {where}")
    program = with_an_example(lambda sizes: _captured(model, dtype, fields, loss, blocks, sizes))
    if kept is not None:
        keep_program(kept, program)
    seconds = time.perf_counter() - began
    _LOG.info("captured %s, %d layers, %d templates, in %.2f s", where, program.layers, len(program.templates), seconds)
    return program


def _captured(
    model: nn.Module,
    dtype: torch.dtype,
    fields: Mapping[str, TensorSpec],
    loss: Loss | None,
    blocks: str | None,
    sizes: Mapping[str, int],
) -> Program:
    """Trace a model with example sizes; arguments as for `capture`."""
    where = type(model).__name__
    copied = meta_copy(model, dtype)
    is_huggingface = huggingface.is_huggingface(model)
    if is_huggingface:
        make_traceable()
        huggingface.use_packed_attention(copied)
    path, layers = block_list(copied, blocks)
    separate_repeated(layers)
    keys = {id(block): structure(block, index=False) for block in entries(layers)}
    call = huggingface.caller(copied) if is_huggingface else custom_modules.caller(copied, fields)
    chosen_loss = meta_loss(loss or token_cross_entropy)
    if loss is not None or not is_huggingface or not huggingface.is_library_class(model):
        opaque = with_opaque_blocks(copied, layers, outline, call, chosen_loss)
        refuse_state_around(opaque, meta_batch(sizes, fields), where)
    with packed_recurrences(copied) if is_huggingface else nullcontext():
        exported, sites = capture_skeleton(copied, layers, outline, call, chosen_loss, sizes, fields)
        pieces = _slice_skeleton(exported, sites, where, tuple(fields), sizes)
        templates = _capture_layers(sites, keys, pieces.sizes, where)
    _prove(pieces, templates, where, dtype)
    if is_huggingface and any(n.target is torch.ops.aten.arange.default for n in pieces.embed.graph.graph.nodes):
        # This names the cause in terms of the model (it counts positions itself), not just an arange that counts
        # through a row.
        huggingface.refuse_own_positions(where, _used_fields(pieces, templates))
    _refuse_leaks(pieces, templates, where, own_loss=loss is not None)
    if is_huggingface:
        huggingface.refuse_uncaptured(where, _used_fields(pieces, templates), templates)
    return _assemble(model, dtype, path, pieces, templates)


def check_model(model: object, call: str) -> None:
    """Check that the `model` argument is a module.

    Raises:
        TypeError: it is not a module; a name or a path has to be loaded first.
    """
    if isinstance(model, nn.Module):
        return
    name = isinstance(model, str)
    remedy = f"pass transformers.AutoModelForCausalLM.from_pretrained({model!r})" if name else "pass a torch.nn.Module"
    raise TypeError(f"{call}: model is {type(model).__name__}{f' {model!r}' if name else ''}; {remedy}")


def _refuse(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise Unsupported(
            f"dtype {dtype}",
            where=type(model).__name__,
            remedy=f"use one of {', '.join(map(str, DTYPES))}",
        )
    refuse_untried(model)
    refuse_other_dtypes(model)
    refuse_unseen(model)
    huggingface.refuse_unsupported(model)


@dataclass(frozen=True)
class _Pieces:
    """Skeleton split into templates, and the inputs of each block."""

    embed: Template
    aux: Template
    head: Template
    feeds: dict[str, list[int]]  # block -> index of the aux output for each of its other tensor inputs
    sizes: dict[str, int]  # symbols of the token count and the sequence count, with example values


def _slice_skeleton(
    exported: torch.export.ExportedProgram,
    sites: Sequence[Site],
    model: str,
    fields: Sequence[str],
    example: Mapping[str, int],
) -> _Pieces:
    skeleton, signature = functional_graph(exported, model)
    calls = [n for n in skeleton.graph.nodes if n.target is torch.ops.hydragraph.block.default]
    # Consecutive blocks are connected only by the hidden state; their other inputs are computed separately (`aux`),
    # once per micro-batch on every stage, so these may depend only on the batch and on buffers.
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
    if len(calls) == 1:  # one node for all blocks
        places = feeds[str(calls[0].args[2])]
        feeds = {
            site.name: [places[i] for i in (range(len(places)) if site.feeds is None else site.feeds)] for site in sites
        }
    if previous is None:
        raise Unsupported("its loss is computed without its blocks", where=model, remedy="return a loss of its outputs")
    names = _names(signature, fields)
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
    if INPUTS.keys() & set(aux.inputs):
        raise Unsupported(
            "dropout of a value that blocks share",
            where=model,
            remedy="set that dropout probability to 0, or apply it inside the blocks",
        )
    placed = [n.target for piece in (aux, head) for n in piece.graph.graph.nodes]
    if aux.parameters or torch.ops.hydragraph.block.default in placed:
        raise Unsupported(
            "blocks share a value that depends on parameters or on other blocks",
            where=model,
            remedy="carry it in the hidden state: torch.cat both on the last dimension before the first block, split "
            "it off in every block and return both, and drop it before the head",
        )
    return _Pieces(embed, aux, head, feeds, _sizes(skeleton, names[2], example))


def _names(signature: Any, fields: Sequence[str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the mappings from placeholder to name: of parameters, of buffers and of batch fields."""
    parameters = {k: v.removeprefix("model.") for k, v in signature.inputs_to_parameters.items()}
    buffers = {k: name_in_program("_loss", v).removeprefix("model.") for k, v in signature.inputs_to_buffers.items()}
    return parameters, buffers, dict(zip(signature.user_inputs, fields, strict=True)) | INPUTS


def _capture_layers(
    sites: Sequence[Site], keys: Mapping[int, str], hints: dict[str, int], model: str
) -> dict[str, Template]:
    """Trace each block that differs from those before it; return the template of every block.

    Args:
        keys: id of a block -> its structure without the index. Blocks with the same structure that are called alike and
            compute nothing with their index are equal. Other blocks are compared by what they compute.
        model: name of the model, for progress messages.
    """
    template_of: dict[tuple[str, str], Template] = {}
    templates: dict[str, Template] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for number, site in enumerate(sites, start=1):
        log.doing(f"capturing {model}", number, len(sites))
        # Three ways to recognise that two blocks share a template, cheapest first: structure, behaviour, equal graphs.
        built = ("built", keys[id(site.module)] + site.called())
        if built not in template_of:
            kind = kind_of(site, hints)
            does = ("does", kind or site.name)
            if does not in template_of:
                if kind is not None:
                    refuse_state(site, hints)
                template = capture_template(site, hints)
                # Equal graphs are one template, even if their blocks were distinguished before.
                template_of[does] = next((t for t in templates.values() if t.content == template.content), template)
            templates[site.name] = template_of[does]
            # Checked at the second block of a structure: a single block does not profit.
            seen[built] += 1
            if seen[built] == 2 and is_without_index(site, hints):
                template_of[built] = template_of[does]
        else:
            templates[site.name] = template_of[built]
    return templates


def _sizes(skeleton: fx.GraphModule, fields: Mapping[str, str], example: Mapping[str, int]) -> dict[str, int]:
    """Return the symbols of the token count and the sequence count, in this order, with example values."""
    shapes = {fields.get(n.name): value_of(n).shape for n in skeleton.graph.nodes if n.op == "placeholder"}
    tokens = symbol_name(shapes["input_ids"][1])
    bounds = symbol_name(shapes["cu_seqlens"][0])
    assert tokens is not None
    assert bounds is not None
    return {tokens: example["T"], bounds: example["N+1"]}


def _prove(pieces: _Pieces, layers: Mapping[str, Template], model: str, dtype: torch.dtype) -> None:
    """Check that each template runs with the dtypes it was traced with and for any number of tokens."""
    unique = {template.name: (template, name) for name, template in reversed(list(layers.items()))}
    around = [(pieces.embed, f"{model} before its first block"), (pieces.aux, f"{model} beside its blocks")]
    for template, where in [*around, *unique.values(), (pieces.head, f"{model} after its last block")]:
        refuse_mixed_dtypes(template, where, dtype)
        prove_sizes(template.graph, where, exported=True)


def _refuse_leaks(pieces: _Pieces, layers: Mapping[str, Template], model: str, own_loss: bool) -> None:
    """Check that packed sequences cannot interact: every operator must be known to keep tokens apart.

    Args:
        own_loss: the loss is custom; `refuse_unsummed` checks how it sums over tokens.
    """
    tokens = next(iter(pieces.sizes))
    checked = set()
    behind = f"{model} after its last block"
    refuse_other_bounds(pieces.embed, f"{model} before its first block", {name: name for name in pieces.embed.inputs})
    refuse_other_bounds(pieces.head, behind, {name: name for name in pieces.head.inputs})
    refuse_unproven(pieces.embed, tokens, f"{model} before its first block")
    refuse_unproven(pieces.aux, tokens, f"{model} beside its blocks")
    if own_loss:
        refuse_mixing(pieces.head.graph, None, behind)
        refuse_mean(pieces.head, behind)
        refuse_unsummed(pieces.head, tokens, behind)
    else:
        refuse_unproven(pieces.head, tokens, behind)
    for name, template in layers.items():
        if template.name not in checked:
            refuse_other_bounds(template, name, _given_fields(pieces, name, template))
            hidden = next((n for n in template.graph.graph.nodes if n.op == "placeholder" and n.name == "hidden"), None)
            symbol = symbol_name(value_of(hidden).shape[1]) if hidden else None
            if symbol is None:
                refuse_mixing(template.graph, None, name)
            else:
                refuse_unproven(template, symbol, name)
            checked.add(template.name)


def _given_fields(pieces: _Pieces, block: str, template: Template) -> dict[str, str]:
    """Return placeholder -> field for the inputs of a block that are unmodified fields of the packed batch."""
    outputs = next(n for n in pieces.aux.graph.graph.nodes if n.op == "output").args[0]
    others = [name for name in template.inputs if name.startswith("other.")]
    fed = {name: field_of(outputs[pieces.feeds[block][int(name.removeprefix("other."))]]) for name in others}
    return {placeholder(name): field for name, field in fed.items() if field is not None}


def _assemble(
    model: nn.Module,
    dtype: torch.dtype,
    path: str,
    pieces: _Pieces,
    layers: Mapping[str, Template],
) -> Program:
    # So far names were relative to a block; from here on they are the model's, with the first name for tied parameters.
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
    # All blocks that use a parameter must shard it alike; only then can the placeholders be inserted.
    shard = agree(blocks, templates)
    described = {
        n: Parameter(n, tuple(p.shape), tuple(aliases[n]), shard.get(n), p.requires_grad) for n, p in parameters.items()
    }
    whole = {n for n in described if n not in shard}
    annotated = {n: annotated_template(t, excluded(t, blocks, whole)) for n, t in templates.items()}
    heads = {uncut_heads(t.graph.graph) for t in templates.values()} - {0}
    return Program(
        model=type(model).__name__,
        dtype=dtype,
        causal=_is_causal(model, layers),
        blocks=tuple(blocks),
        aux=Block("aux", pieces.aux.name, (), pieces.aux.buffers),
        templates={**annotated, pieces.aux.name: pieces.aux},
        parameters=described,
        buckets=_buckets(blocks, described, learning(blocks, templates, described)),
        heads=tuple(sorted(heads)),
        unplaced=huggingface.unplaced_id(model) if huggingface.is_huggingface(model) else None,
        positions=huggingface.positions(model) if huggingface.is_huggingface(model) else None,
        origin=origin(model),
    )


def origin(model: nn.Module) -> str:
    """Return 12 hex digits that identify a model without its weights: modules, attributes, config and frozen parts."""
    config: Any = getattr(model, "config", None)
    settings = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return hashlib.sha256(f"{structure(model)}\n{settings}\n{frozen}".encode()).hexdigest()[:12]


def _used_fields(pieces: _Pieces, layers: Mapping[str, Template]) -> set[str]:
    """Return the fields of the packed batch that the model reads before its head."""
    outputs = next(n for n in pieces.aux.graph.graph.nodes if n.op == "output").args[0]
    used = {
        outputs[pieces.feeds[name][int(i.removeprefix("other."))]]
        for name, template in layers.items()
        for i in template.inputs
        if i.startswith("other.")
    }
    aux = extract(pieces.aux.graph, list(used), {})
    return {*pieces.embed.inputs, *(n.name for n in aux.graph.nodes if n.op == "placeholder")}


def _is_causal(model: nn.Module, layers: Mapping[str, Template]) -> bool:
    """Return whether labels are the next tokens: attention is causal, except for some classes of transformers."""
    if huggingface.is_huggingface(model):
        return huggingface.is_causal(model)
    calls = (n for t in layers.values() for n in t.graph.graph.nodes if n.target in ATTENDING)
    return all(operands(n)[5] for n in calls)


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Return every parameter name, including tied aliases -> its first name."""
    first = {id(p): n for n, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


def _buckets(
    blocks: Sequence[Block], parameters: Mapping[str, Parameter], learns: Collection[str]
) -> tuple[Bucket, ...]:
    """Group parameters into buckets, in block order: those used by one block together, each tied parameter by itself.

    Parameters without a gradient (not in `learns`) get separate buckets, so that these are never pushed; parameters
    used by no block come last.
    """
    users: dict[str, list[str]] = {}
    for block in blocks:
        for name in dict.fromkeys(block.parameters):
            users.setdefault(name, []).append(block.name)
    buckets = []
    for block in blocks:
        names = list(dict.fromkeys(block.parameters))
        tied = [n for n in names if len(users[n]) > 1 and users[n][0] == block.name]
        own = [n for n in names if len(users[n]) == 1]
        buckets += [Bucket(n, (parameters[n],), tuple(users[n]), n in learns) for n in tied]
        buckets += _by_learning(block.name, [parameters[n] for n in own], (block.name,), learns)
    unused = [p for n, p in parameters.items() if n not in users]
    return (*buckets, *_by_learning("unused", unused, (), learns))


def _by_learning(
    name: str, parameters: Sequence[Parameter], blocks: tuple[str, ...], learns: Collection[str]
) -> Iterator[Bucket]:
    """Yield one bucket of the parameters that get a gradient and one of the others, if there are any."""
    for suffix, kind in (("", True), ("/frozen", False)):
        chosen = tuple(p for p in parameters if (p.name in learns) is kind)
        if chosen:
            yield Bucket(name + suffix, chosen, blocks, kind)
