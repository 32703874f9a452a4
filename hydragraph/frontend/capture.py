"""Capture of a model as a strategy-independent Program."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ExportGraphSignature

from hydragraph import log
from hydragraph.errors import Unsupported
from hydragraph.frontend import custom_modules, huggingface
from hydragraph.frontend.added_inputs import ADDED
from hydragraph.frontend.block_equivalence import (
    is_without_index,
    kind_of,
    refuse_state,
    refuse_state_around,
    refuse_state_between,
)
from hydragraph.frontend.buckets import buckets_of
from hydragraph.frontend.compiled_folder.program_cache import keep_program, path_of, read_program
from hydragraph.frontend.counted_positions import use_position_ids
from hydragraph.frontend.dropout_calls import INPUTS
from hydragraph.frontend.functional_graph import functional_graph
from hydragraph.frontend.loss_module import meta_loss, name_in_program, refuse_trained
from hydragraph.frontend.loss_reduction import refuse_mean, refuse_unsummed
from hydragraph.frontend.mixed_dtypes import refuse_mixed_dtypes
from hydragraph.frontend.module_digest import read_by, structure
from hydragraph.frontend.packed_inputs import Loss, fields_of, token_cross_entropy
from hydragraph.frontend.parameter_shards import agree, annotated_template, excluded
from hydragraph.frontend.peft_adapters import refuse_untried
from hydragraph.frontend.recurrent_layers import packed_recurrences
from hydragraph.frontend.repeated_blocks import block_list, entries, meta_copy, separate_repeated
from hydragraph.frontend.skeleton import (
    BlockCall,
    TracedModel,
    capture_skeleton,
    meta_batch,
    node_inputs,
    opaque_blocks,
)
from hydragraph.frontend.skeleton_parts import extract, identifier, template_of
from hydragraph.frontend.templates import capture_template
from hydragraph.frontend.token_mixing import field_of, refuse_mixing, refuse_other_bounds, refuse_unproven
from hydragraph.frontend.trainable_parameters import learning, refuse_other_dtypes
from hydragraph.frontend.untraceable import refuse_unseen
from hydragraph.ir.graph_data import placeholders_of, results_of, value_of
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Block, Program, Template
from hydragraph.passes.clean import read_sizes_of_values
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
    """Trace a model once into a Program, in which placeholders mark where a strategy may communicate.

    Args:
        model: a Hugging Face model, or any module with a list of repeated blocks, on the meta device or the CPU. A
            custom module is called with the batch fields that its forward names; if it names none and requires one
            parameter, such as `batch`, it gets the dict of all fields. Each block takes the hidden state, [1, T, H] or
            [T, H], as its first argument and returns the new one. Tokens may interact only in
            `hydragraph.varlen_attention`.
        example: a packed batch of any size. The standard fields are optional: input_ids, position_ids and labels
            [1, T] int64, cu_seqlens [N + 1] int32, and max_length, 0-d int64. Any other entry, [1, T, ...], is a custom
            field, which every sequence must provide as a tensor [L, ...].
        loss: function of the model's outputs and the packed batch (a dict) that returns the loss summed over targets,
            i.e. positions whose label is not -100. A step divides it by the number of targets. A loss module may have
            constant buffers but no parameters. Default: cross-entropy of the logits.
        blocks: path of the nn.ModuleList of repeated blocks, if it is not the largest list.

    Raises:
        Unsupported: the model cannot be captured; the error names the module, the operator and a remedy.
    """
    check_torch()
    check_model(model, "capture")
    where = type(model).__name__
    if dtype not in DTYPES:
        raise Unsupported(f"dtype {dtype}", where=where, remedy=f"use one of {', '.join(map(str, DTYPES))}")
    # Checks of this model, even if the program comes from the cache.
    refuse_untried(model)
    refuse_other_dtypes(model)
    refuse_unseen(model)
    huggingface.refuse_unsupported(model, loss)
    refuse_trained(loss)
    tensor_names = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    fields = fields_of(example, tensor_names, where)
    began = time.perf_counter()
    kept = path_of(model, dtype, example, loss, blocks)
    cached_program = None if kept is None else read_program(kept)
    if cached_program is not None:
        _LOG.info("read the captured %s from %s in %.2f s", where, kept, time.perf_counter() - began)
        return replace(cached_program, origin=origin(model), reads=read_by(model, loss), loss=loss)
    log.doing(f"capturing {where}")
    reads = read_by(model, loss)
    program = with_an_example(lambda sizes: _captured(model, dtype, fields, loss, blocks, sizes))
    if kept is not None:
        keep_program(kept, program)
    seconds = time.perf_counter() - began
    _LOG.info("captured %s, %d layers, %d templates, in %.2f s", where, program.layers, len(program.templates), seconds)
    return replace(program, reads=reads, loss=loss)


def _captured(
    model: nn.Module,
    dtype: torch.dtype,
    fields: Mapping[str, TensorSpec],
    loss: Loss | None,
    blocks: str | None,
    sizes: Mapping[str, int],
) -> Program:
    where = type(model).__name__
    # The following steps change a meta copy, not the user's model.
    copied = meta_copy(model, dtype)
    is_huggingface = huggingface.is_huggingface(model)
    if is_huggingface:
        make_traceable()
        huggingface.use_packed_attention(copied)
    path, layers = block_list(copied, blocks)
    separate_repeated(layers)
    # keys[id(block)]: digest of the block's structure without its index, computed before tracing,
    # which may replace the blocks' forwards.
    keys = {id(block): structure(block, index=False, constants=True) for block in entries(layers)}
    call = huggingface.caller(copied) if is_huggingface else custom_modules.caller(copied, fields)
    traced = TracedModel(copied, call, meta_loss(loss or token_cross_entropy))
    # Only transformers' and peft's code is trusted to keep no state between calls.
    if loss is not None or not is_huggingface or not huggingface.is_library_class(model):
        refuse_state_around(traced, opaque_blocks(layers, []), meta_batch(sizes, fields), where)
    if not is_huggingface or not huggingface.is_library_class(model):
        refuse_state_between(traced, list(entries(layers)), meta_batch(sizes, fields))
    with packed_recurrences(copied) if is_huggingface else nullcontext():
        # Trace the model around its blocks, and each distinct block.
        exported, calls = capture_skeleton(traced, layers, sizes, fields)
        skeleton = _Skeleton(*functional_graph(exported, where), where, tuple(fields), sizes)
        pieces = _slice_skeleton(skeleton, calls)
        templates = _capture_layers(calls, keys, pieces.sizes, where)
        # A rewritten block may read batch fields that the model does not pass. They follow the
        # block's own arguments: split the skeleton again with them.
        if any(i >= len(pieces.feeds[block]) for block, template in templates.items() for i, _ in _others(template)):
            pieces = _slice_skeleton(skeleton, calls, added=True)
        pieces = replace(pieces, layers=templates)
    # Check each distinct graph.
    for name, template in pieces.unique.items():
        refuse_mixed_dtypes(template, name, dtype)
        prove_sizes(template.graph, name, exported=True)
    if is_huggingface:
        # If the embedding counts positions with `arange`, this error is clearer than that of
        # `_refuse_leaks`.
        if any(n.target is torch.ops.aten.arange.default for n in pieces.embed.graph.graph.nodes):
            huggingface.refuse_own_positions(where, pieces.used_fields())
        huggingface.refuse_own_mixing(copied, pieces.layers)
    _refuse_leaks(pieces, own_loss=loss is not None)
    if is_huggingface:
        huggingface.refuse_own_positions(where, pieces.used_fields())
    return _assemble(model, dtype, path, pieces)


def check_model(model: object, call: str) -> None:
    if isinstance(model, nn.Module):
        return
    name = isinstance(model, str)
    remedy = f"pass transformers.AutoModelForCausalLM.from_pretrained({model!r})" if name else "pass a torch.nn.Module"
    raise TypeError(f"{call}: 'model' is {type(model).__name__}{f' {model!r}' if name else ''}; {remedy}")


@dataclass(frozen=True)
class _Pieces:
    """Model split into templates; `aux` computes the inputs that blocks share.

    Attributes:
        feeds: for each block, the indices of the `aux` outputs that it takes.
        sizes: the example's token count and length of cu_seqlens, by symbol.
    """

    model: str
    embed: Template
    aux: Template
    head: Template
    feeds: dict[str, list[int]]
    sizes: dict[str, int]
    layers: Mapping[str, Template] = field(default_factory=dict)

    @property
    def around(self) -> dict[str, Template]:
        return {
            f"{self.model} before its first block": self.embed,
            f"{self.model} in the inputs that its blocks share": self.aux,
            f"{self.model} after its last block": self.head,
        }

    @property
    def unique(self) -> dict[str, Template]:
        first: dict[str, str] = {}
        for name, template in self.layers.items():
            first.setdefault(template.name, name)
        return self.around | {name: self.layers[name] for name in first.values()}

    def fed(self, block: str) -> dict[str, fx.Node]:
        outputs = results_of(self.aux.graph)
        return {name: outputs[self.feeds[block][i]] for i, name in _others(self.layers[block])}

    def used_fields(self) -> set[str]:
        used = {node: None for block in self.layers for node in self.fed(block).values()}
        aux = extract(self.aux.graph, list(used), {})
        return {*self.embed.inputs, *(n.name for n in placeholders_of(aux))}


def _others(template: Template) -> list[tuple[int, str]]:
    return [(int(name.removeprefix("other.")), name) for name in template.inputs if name.startswith("other.")]


@dataclass(frozen=True)
class _Skeleton:
    """Exported graph of a model with opaque blocks.

    Attributes:
        example: sizes of "T" and "N+1" in the traced batch.
    """

    graph: fx.GraphModule
    signature: ExportGraphSignature
    model: str
    fields: tuple[str, ...]
    example: Mapping[str, int]

    @property
    def inputs(self) -> dict[str, str]:
        names: Any = self.signature.user_inputs
        return dict(zip(names, self.fields, strict=True))

    def field(self, name: str) -> fx.Node:
        return next(node for node in placeholders_of(self.graph) if self.inputs.get(node.name) == name)


def _slice_skeleton(skeleton: _Skeleton, calls: Sequence[BlockCall], added: bool = False) -> _Pieces:
    """Split the parts outside a model's blocks into templates; if `added`, blocks also take the `ADDED` fields."""
    model, signature = skeleton.model, skeleton.signature
    nodes = [n for n in skeleton.graph.graph.nodes if n.target is torch.ops.hydragraph.block.default]
    # Every stage computes `aux`, so it may depend only on the batch and buffers. `outputs` are its
    # distinct results. feeds["layer.0"] = [0, 2]: the block takes results 0 and 2 after its
    # hidden state.
    outputs: list[fx.Node] = []
    feeds: dict[str, list[int]] = {}
    previous: fx.Node | None = None
    for node in nodes:
        hidden, others = node_inputs(node)
        if previous is not None and hidden is not previous:
            remedy = (
                "move the computation between the blocks into one of them, or choose other blocks with "
                "blocks='path.to.list'"
            )
            what = "this block's input is not the previous block's output"
            raise Unsupported(what, where=str(node.args[2]), remedy=remedy)
        outputs += [o for o in others if o not in outputs]
        feeds[str(node.args[2])] = [outputs.index(o) for o in others]
        previous = node
    if previous is None:
        remedy = "compute the loss from the model's outputs"
        raise Unsupported("the loss does not depend on the blocks", where=model, remedy=remedy)
    # One node may stand for all blocks (`_FusedBlocks`). It takes all their inputs; each call
    # lists its own.
    if len(nodes) == 1:
        places = feeds[str(previous.args[2])]
        feeds = {c.name: places if c.feeds is None else [places[i] for i in c.feeds] for c in calls}
    if added:
        more = [skeleton.field(name) for name in ADDED.values()]
        outputs += [node for node in more if node not in outputs]
        feeds = {name: [*places, *map(outputs.index, more)] for name, places in feeds.items()}
    # torch.export's symbols for the sizes T and N + 1.
    tokens = symbol_name(value_of(skeleton.field("input_ids")).shape[1])
    bounds = symbol_name(value_of(skeleton.field("cu_seqlens")).shape[0])
    assert tokens is not None
    assert bounds is not None
    # placeholder -> name in the model; `TracedModel` has the attributes model and loss.
    parameters = {k: v.removeprefix("model.") for k, v in signature.inputs_to_parameters.items()}
    buffers = {k: name_in_program("_loss", v).removeprefix("model.") for k, v in signature.inputs_to_buffers.items()}
    inputs = skeleton.inputs | {**INPUTS, **ADDED, "hidden": "hidden"}

    def piece(results: Sequence[fx.Node], renamed: Mapping[fx.Node, str], where: str) -> Template:
        part = extract(skeleton.graph, results, renamed)
        # A loss may use the number of tokens
        if not renamed:
            given = (n for n in placeholders_of(part) if inputs.get(n.name) == "position_ids")
            use_position_ids(part.graph, tokens, next(given, None))
        read_sizes_of_values(part.graph)
        return template_of(part, (parameters, buffers, inputs), where)

    embed = piece([node_inputs(nodes[0])[0]], {}, "the model before its first block")
    aux = piece(outputs, {}, "the blocks' inputs besides the hidden state")
    head = piece(results_of(skeleton.graph)[:1], {previous: "hidden"}, "the model after its last block")
    if INPUTS.keys() & set(aux.inputs):
        remedy = "set that dropout probability to 0, or apply dropout inside the blocks"
        raise Unsupported("dropout is applied to a value that blocks share", where=model, remedy=remedy)
    # The head receives the last block's output as a placeholder; a block's node in the head means
    # that it also reads an earlier block.
    placed = [n.target for part in (aux, head) for n in part.graph.graph.nodes]
    if aux.parameters or torch.ops.hydragraph.block.default in placed:
        what = "blocks share a value that depends on parameters or blocks, so stages cannot compute it from the batch"
        if not aux.parameters and torch.ops.hydragraph.block.default not in placed[: len(aux.graph.graph.nodes)]:
            what = "after its last block, the model reads the output of an earlier block"
        remedy = (
            "compute the value in each block, from parameters and fields such as input_ids; or concatenate it to the "
            "hidden state on the last dimension, and let every block split it off and concatenate it again"
        )
        raise Unsupported(what, where=model, remedy=remedy)
    return _Pieces(model, embed, aux, head, feeds, {tokens: skeleton.example["T"], bounds: skeleton.example["N+1"]})


def _capture_layers(
    calls: Sequence[BlockCall], keys: Mapping[int, str], hints: dict[str, int], model: str
) -> dict[str, Template]:
    # template_of["built", digest of the module and its arguments], template_of["does", digest of
    # the operators that it runs]: the block's graph.
    template_of: dict[tuple[str, str], Template] = {}
    templates: dict[str, Template] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for number, call in enumerate(calls, start=1):
        log.doing(f"capturing {model}", number, len(calls))
        built = ("built", keys[id(call.module)] + call.called())
        if built in template_of:
            templates[call.name] = template_of[built]
            continue
        kind = kind_of(call, hints)
        does = ("does", kind or call.name)
        if does not in template_of:
            if kind is not None:
                refuse_state(call, hints)
            template = capture_template(call, hints)
            # Blocks with unknown or different operators may have equal graphs.
            template_of[does] = next((t for t in templates.values() if t.content == template.content), template)
        templates[call.name] = template_of[does]
        seen[built] += 1
        # `keys` omit a layer's index, on which operators may depend. The second block of a
        # structure shows whether they do; if not, later blocks are neither run nor traced.
        if seen[built] == 2 and is_without_index(call, hints):
            template_of[built] = template_of[does]
    return templates


def _refuse_leaks(pieces: _Pieces, own_loss: bool) -> None:
    tokens = next(iter(pieces.sizes))
    around = pieces.around
    for where, template in pieces.unique.items():
        # symbol: this graph's token count; torch.export names it anew for each block.
        symbol: str | None = tokens
        if where in around:
            batch_fields: dict[str, str | None] = {name: name for name in template.inputs}
        else:
            # placeholder -> batch field, or None if `aux` computes another value.
            batch_fields = {identifier(name): field_of(node) for name, node in pieces.fed(where).items()}
            hidden = next((n for n in placeholders_of(template.graph) if n.name == "hidden"), None)
            symbol = symbol_name(value_of(hidden).shape[1]) if hidden else None
        refuse_other_bounds(template, where, batch_fields)
        # A custom loss may combine a sequence's tokens, so it has its own proof (`terms`).
        if template is pieces.head and own_loss:
            refuse_mixing(template.graph, None, where)
            refuse_mean(template, where)
            refuse_unsummed(template, where)
        elif symbol is None:
            refuse_mixing(template.graph, None, where)
        else:
            refuse_unproven(template, symbol, where)


def _assemble(model: nn.Module, dtype: torch.dtype, path: str, pieces: _Pieces) -> Program:
    # first: id of a parameter -> its first name.
    # canonical: any name of a tied parameter -> its first name.
    first = {id(p): n for n, p in model.named_parameters()}
    canonical = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    raw = {"embed": pieces.embed, **pieces.layers, "head": pieces.head}
    blocks = []
    for name, template in raw.items():
        # In a layer's graph, names are relative to the layer; elsewhere, to the model.
        prefix = f"{path}.{name.removeprefix('layer.')}." if name.startswith("layer.") else ""
        names = tuple(canonical[prefix + parameter] for parameter in template.parameters)
        buffers = tuple(prefix + buffer for buffer in template.buffers)
        fed = tuple(pieces.feeds[name][i] for i, _ in _others(template))
        blocks.append(Block(name, template.name, names, buffers, fed))
    templates = {t.name: t for t in raw.values()}
    aliases: dict[str, list[str]] = {n: [] for n in first.values()}
    for alias, name in canonical.items():
        if alias != name:
            aliases[name].append(alias)
    shard = agree(blocks, templates)
    parameters = {
        n: Parameter(n, tuple(p.shape), tuple(aliases[n]), shard.get(n), p.requires_grad)
        for n, p in model.named_parameters()
    }
    whole = {n for n in parameters if n not in shard}
    annotated = {n: annotated_template(t, excluded(t, blocks, whole)) for n, t in templates.items()}
    heads = {uncut_heads(t.graph.graph) for t in templates.values()} - {0}
    is_huggingface = huggingface.is_huggingface(model)
    return Program(
        model=type(model).__name__,
        dtype=dtype,
        causal=_is_causal(model, pieces.layers),
        blocks=tuple(blocks),
        aux=Block("aux", pieces.aux.name, (), pieces.aux.buffers),
        templates={**annotated, pieces.aux.name: pieces.aux},
        parameters=parameters,
        buckets=buckets_of(blocks, parameters, learning(blocks, templates, parameters)),
        heads=tuple(sorted(heads)),
        unplaced=huggingface.unplaced_id(model) if is_huggingface else None,
        positions=huggingface.positions(model) if is_huggingface else None,
        origin=origin(model),
    )


def origin(model: nn.Module) -> str:
    """Return 12 hex digits that identify a model regardless of its weights."""
    config: Any = getattr(model, "config", None)
    settings = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return hashlib.sha256(f"{structure(model)}\n{settings}\n{frozen}".encode()).hexdigest()[:12]


def _is_causal(model: nn.Module, layers: Mapping[str, Template]) -> bool:
    if huggingface.is_huggingface(model):
        return huggingface.is_causal(model)
    calls = (n for t in layers.values() for n in t.graph.graph.nodes if n.target in ATTENDING)
    return all(operands(n)[5] for n in calls)
