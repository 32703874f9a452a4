"""Conversion of programs and variants to data and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_type_hints

from torch import fx

from hydragraph.frontend.compiled_folder import record_schema
from hydragraph.frontend.compiled_folder.record_schema import MalformedRecord, built, built_fields, refuse
from hydragraph.ir.graph_data import decode, encode, placeholders_of, results_of
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Program, Template
from hydragraph.passes.differentiate import COLLECTIVES, Variant, saved_names, start_of
from hydragraph.passes.variant_spec import VariantSpec

Data = dict[str, Any]
_PLACEHOLDERS = ("parameters", "buffers", "inputs")


def program_data(program: Program) -> Data:
    plain = ("model", "dtype", "causal", "heads", "unplaced", "positions", "origin", "fingerprint")
    return {
        **{name: getattr(program, name) for name in plain},
        "dtype": str(program.dtype).removeprefix("torch."),
        "blocks": [asdict(block) for block in program.blocks],
        "aux": asdict(program.aux),
        "parameters": [asdict(parameter) for parameter in program.parameters.values()],
        "buckets": [asdict(b) | {"parameters": [p.name for p in b.parameters]} for b in program.buckets],
        "templates": [_template_data(template) for template in program.templates.values()],
    }


def program_of(value: object) -> Program:
    """Build a program from data; raise MalformedRecord for invalid fields."""
    plain = ("model", "dtype", "causal", "heads", "unplaced", "positions", "origin", "blocks", "aux")
    data = record_schema.fields(value, (*plain, "fingerprint", "parameters", "buckets", "templates"), "program")
    parts = built_fields(Program, data, plain, "program")
    templates = [_template_of(record) for record in record_schema.listed(data["templates"], "program: templates")]
    listed: tuple[Parameter, ...] = built(tuple[Parameter, ...], data["parameters"], "program: a parameter")
    parameters = {parameter.name: parameter for parameter in listed}
    buckets = [_bucket_of(record, parameters) for record in record_schema.listed(data["buckets"], "program: buckets")]
    by_name = {template.name: template for template in templates}
    program = Program(templates=by_name, parameters=parameters, buckets=tuple(buckets), **parts)
    _check_program(program)
    if program.fingerprint != data["fingerprint"]:
        refuse("program", f"the fingerprint is {program.fingerprint}, but the file states {data['fingerprint']!r:.80}")
    return program


def _check_program(program: Program) -> None:
    for block in (*program.blocks, program.aux):
        where = f"program: block {block.name}"
        template = program.templates.get(block.template)
        if template is None:
            refuse(where, f"the template {block.template:.80} is missing")
        others = sum(name.startswith("other.") for name in template.inputs)
        counts = [(block.parameters, template.parameters), (block.buffers, template.buffers)]
        if any(len(names) != len(template_names) for names, template_names in counts) or len(block.aux) != others:
            refuse(where, "the number of parameters, buffers or inputs differs from the template's")
        unknown = set(block.parameters) - program.parameters.keys()
        if unknown:
            refuse(where, f"the parameter {min(unknown)} is missing")
    aux_count = len(results_of(program.templates[program.aux.template].graph))
    if any(index >= aux_count for block in program.blocks for index in block.aux):
        refuse("program", "a block takes a value that the aux graph does not compute")
    bucketed_names = [parameter.name for bucket in program.buckets for parameter in bucket.parameters]
    if sorted(bucketed_names) != sorted(program.parameters):
        refuse("program", "the buckets do not contain every parameter exactly once")
    if 0 in program.heads:
        refuse("program", "every number of heads must be at least 1")
    program.outline  # noqa: B018  checks the names of blocks and buckets


def _bucket_of(value: object, parameters: Mapping[str, Parameter]) -> Bucket:
    where = "program: a bucket"
    kinds = get_type_hints(Bucket) | {"parameters": tuple[str, ...]}
    parts = {name: built(kinds[name], part, where) for name, part in record_schema.fields(value, kinds, where).items()}
    unknown = set(parts["parameters"]) - parameters.keys()
    if unknown:
        refuse(where, f"the parameter {min(unknown)} is missing")
    return Bucket(**parts | {"parameters": tuple(parameters[name] for name in parts["parameters"])})


def _template_data(template: Template) -> Data:
    content: Any = template.content
    return {
        "name": template.name,
        "digest": content[0],
        "traced": content[-1],
        **{name: getattr(template, name) for name in _PLACEHOLDERS},
        "graph": encode(template.graph),
    }


def _template_of(value: object) -> Template:
    where = "program: a template"
    data = record_schema.fields(value, ("name", "digest", "traced", *_PLACEHOLDERS, "graph"), where)
    name = record_schema.text(data["name"], where)
    where = f"program: template {name[:6]}"
    (graph,) = _built(record_schema.check_graphs(data["graph"], 1, where), where)
    template = Template(name=name, graph=graph, **built_fields(Template, data, _PLACEHOLDERS, where))
    takes = len(template.parameters) + len(template.buffers) + len(template.inputs)
    if len(placeholders_of(graph)) != takes:
        refuse(where, f"the graph has {len(placeholders_of(graph))} placeholders, but the file names {takes}")
    # Rebuilding renames symbols, which changes the digest.
    digest = record_schema.text(data["digest"], where)
    traced = record_schema.wholes(data["traced"], where)
    vars(template)["content"] = (digest, template.parameters, template.buffers, template.inputs, traced)
    return template


def variant_data(variant: Variant) -> Data:
    names = ("inputs", "outputs", "needs", "gradients", "added", "vocabulary")
    return {
        **{name: getattr(variant, name) for name in names},
        "kinds": {name: kind.value for name, kind in variant.kinds.items()},
        "graphs": encode(variant.forward, variant.backward),
    }


def variant_of(value: object, spec: VariantSpec, where: str) -> Variant:
    plain = ("inputs", "outputs", "needs", "gradients", "added", "vocabulary", "kinds")
    data = record_schema.fields(value, (*plain, "graphs"), where)
    graphs = record_schema.check_graphs(data["graphs"], 2, where)
    record_schema.fields(data["kinds"], spec.template.parameters, f"{where}: kinds")
    parts = built_fields(Variant, data, plain, where)
    forward, backward = _built(graphs, where)
    variant = Variant(forward=forward, backward=backward, **parts)
    _check_variant(variant, spec, where)
    _check_shapes(graphs["graphs"][0], spec, where)
    return variant


def _check_variant(variant: Variant, spec: VariantSpec, where: str) -> None:
    template = spec.template
    starts = [start_of(name) for name in variant.vocabulary]
    plain = [*template.parameters, *template.buffers, *template.inputs, *starts]
    vocabulary_fits = set(variant.vocabulary) <= set(template.parameters)
    if not vocabulary_fits or variant.inputs not in (tuple(plain), (*plain, COLLECTIVES)):
        refuse(where, "the inputs differ from the template's")
    saved = saved_names(len(results_of(variant.forward)) - variant.outputs)
    if len(placeholders_of(variant.forward)) != len(variant.inputs) or variant.outputs != 1:
        refuse(where, "the forward takes or returns a different number of values than the file states")
    takes = {*saved, *template.parameters, "tangent", COLLECTIVES}
    if not set(variant.needs) <= takes or len(set(variant.needs)) != len(variant.needs):
        refuse(where, f"the backward must not take {', '.join(set(variant.needs) - takes) or 'a value twice'}")
    learned = [*variant.gradients, *variant.added]
    if not set(learned) <= spec.learning or len(set(learned)) != len(learned):
        refuse(where, "the backward computes an untrained value's gradient, or one parameter's gradient twice")
    if "hidden" in variant.added:
        refuse(where, "the gradient of the hidden state is accumulated")
    # An added gradient takes two values: the sum, and whether it is set.
    if len(placeholders_of(variant.backward)) != len(variant.needs) + 2 * len(variant.added):
        refuse(where, "the backward takes a different number of values than the file states")
    if len(results_of(variant.backward)) != len(variant.gradients):
        refuse(where, "the backward returns a different number of gradients than the file states")


def _check_shapes(forward: Sequence[Any], spec: VariantSpec, where: str) -> None:
    dtype = str(spec.dtype).removeprefix("torch.")
    inputs = [node for node in forward if node[1] == "placeholder"]
    for node, (name, parameter) in zip(inputs, spec.parameters.items(), strict=False):
        shape = parameter.local_shape(spec.part.tp, spec.part.index)
        value = node[5]
        if not isinstance(value, list) or value[:2] != ["tensor", dtype] or value[3] != list(shape):
            refuse(where, f"{name} is {value!r:.60}, but a rank's shard is {dtype} {list(shape)}")


def _built(data: Mapping[str, Any], where: str) -> list[fx.GraphModule]:
    try:
        return decode(data)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise MalformedRecord(
            f"{where}: cannot build a graph from this data ({type(error).__name__}: {first:.200})"
        ) from error
