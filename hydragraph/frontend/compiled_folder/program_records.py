"""Conversion of programs and variants to plain data and back, checking every field.

program_data(program)     -> program.json
program_of(data)          -> the same Program; the templates' graphs are built, their values only on request
variant_data(variant)     -> graphs/NAME.json
variant_of(data, spec)    -> the same Variant, which must match the spec
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from hydragraph.frontend.compiled_folder import record_schema
from hydragraph.frontend.compiled_folder.record_schema import Malformed
from hydragraph.ir.graph_data import decode, encode
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule
from hydragraph.ir.program import Block, Program, Template
from hydragraph.passes.differentiate import COLLECTIVES, Variant, saved_names, start_of
from hydragraph.passes.graph_passes import VariantSpec

Data = dict[str, Any]

# --- a program --------------------------------------------------------------------------------------------------------


def program_data(program: Program) -> Data:
    """Convert a program to data.

    Raises:
        ValueError: a template's graph cannot be represented as data.
    """
    return {
        "model": program.model,
        "dtype": str(program.dtype).removeprefix("torch."),
        "causal": program.causal,
        "heads": list(program.heads),
        "unplaced": program.unplaced,
        "positions": list(program.positions) if program.positions is not None else None,
        "origin": program.origin,
        "fingerprint": program.fingerprint,
        "blocks": [_block_data(block) for block in program.blocks],
        "aux": _block_data(program.aux),
        "parameters": [_parameter_data(parameter) for parameter in program.parameters.values()],
        "buckets": [_bucket_data(bucket) for bucket in program.buckets],
        "templates": [_template_data(template) for template in program.templates.values()],
    }


def program_of(value: object) -> Program:
    """Build a program from data.

    Raises:
        Malformed: names the field that is wrong.
    """
    where = "program"
    names = "model dtype causal heads unplaced positions origin fingerprint blocks aux parameters buckets templates"
    data = record_schema.fields(value, names.split(), where)
    templates = [_template_of(each) for each in record_schema.listed(data["templates"], f"{where}: templates")]
    parameters = [_parameter_of(each) for each in record_schema.listed(data["parameters"], f"{where}: parameters")]
    by_name = {parameter.name: parameter for parameter in parameters}
    program = Program(
        model=record_schema.text(data["model"], f"{where}: model"),
        dtype=record_schema.dtype(data["dtype"], f"{where}: dtype"),
        causal=record_schema.flag(data["causal"], f"{where}: causal"),
        blocks=tuple(_block_of(each) for each in record_schema.listed(data["blocks"], f"{where}: blocks")),
        aux=_block_of(data["aux"]),
        templates={template.name: template for template in templates},
        parameters=by_name,
        buckets=tuple(_bucket_of(each, by_name) for each in record_schema.listed(data["buckets"], f"{where}: buckets")),
        heads=record_schema.wholes(data["heads"], f"{where}: heads", 1),
        unplaced=None if data["unplaced"] is None else record_schema.whole(data["unplaced"], f"{where}: unplaced"),
        positions=_positions_of(data["positions"]),
        origin=record_schema.text(data["origin"], f"{where}: origin"),
    )
    _check_program(program)
    if program.fingerprint != data["fingerprint"]:
        raise Malformed(f"{where}: its fingerprint is {program.fingerprint}, and it says {data['fingerprint']!r:.80}")
    return program


def _check_program(program: Program) -> None:
    """Reject blocks that do not match their templates, and parameters that are not in exactly one bucket."""
    for block in (*program.blocks, program.aux):
        where = f"program: block {block.name}"
        template = program.templates.get(block.template)
        if template is None:
            raise Malformed(f"{where}: there is no template {block.template:.80}")
        others = sum(name.startswith("other.") for name in template.inputs)
        counts = [(block.parameters, template.parameters), (block.buffers, template.buffers)]
        if any(len(given) != len(wanted) for given, wanted in counts) or len(block.aux) != others:
            raise Malformed(f"{where}: its names are not as many as its template takes")
        unknown = set(block.parameters) - program.parameters.keys()
        if unknown:
            raise Malformed(f"{where}: there is no parameter {min(unknown)}")
    made = len(_output_of(program.templates[program.aux.template].graph))
    if any(index >= made for block in program.blocks for index in block.aux):
        raise Malformed("program: a block takes a value that the aux graph does not make")
    held = [parameter.name for bucket in program.buckets for parameter in bucket.parameters]
    if sorted(held) != sorted(program.parameters):
        raise Malformed("program: its buckets do not hold every parameter once")
    program.outline  # noqa: B018  it checks names of blocks and buckets


def _block_data(block: Block) -> Data:
    return {
        "name": block.name,
        "template": block.template,
        "parameters": list(block.parameters),
        "buffers": list(block.buffers),
        "aux": list(block.aux),
    }


def _block_of(value: object) -> Block:
    where = "program: a block"
    data = record_schema.fields(value, ("name", "template", "parameters", "buffers", "aux"), where)
    return Block(
        record_schema.text(data["name"], where),
        record_schema.text(data["template"], where),
        record_schema.texts(data["parameters"], where),
        record_schema.texts(data["buffers"], where),
        record_schema.wholes(data["aux"], where),
    )


def _parameter_data(parameter: Parameter) -> Data:
    rule = parameter.rule
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "aliases": list(parameter.aliases),
        "trainable": parameter.trainable,
        "cut": None
        if rule is None
        else {"dim": rule.dim, "segments": list(rule.segments), "unit": rule.unit, "heads": rule.heads},
    }


def _parameter_of(value: object) -> Parameter:
    where = "program: a parameter"
    data = record_schema.fields(value, ("name", "shape", "aliases", "trainable", "cut"), where)
    rule = None
    if data["cut"] is not None:
        cut = record_schema.fields(data["cut"], ("dim", "segments", "unit", "heads"), f"{where}: cut")
        rule = ShardRule(
            record_schema.whole(cut["dim"], where),
            record_schema.wholes(cut["segments"], where, 1),
            record_schema.whole(cut["unit"], where, 1),
            record_schema.flag(cut["heads"], where),
        )
    return Parameter(
        record_schema.text(data["name"], where),
        record_schema.wholes(data["shape"], where, 1),
        record_schema.texts(data["aliases"], where),
        rule,
        record_schema.flag(data["trainable"], where),
    )


def _bucket_data(bucket: Bucket) -> Data:
    names = [parameter.name for parameter in bucket.parameters]
    return {"name": bucket.name, "parameters": names, "blocks": list(bucket.blocks), "learns": bucket.learns}


def _bucket_of(value: object, parameters: Mapping[str, Parameter]) -> Bucket:
    where = "program: a bucket"
    data = record_schema.fields(value, ("name", "parameters", "blocks", "learns"), where)
    names = record_schema.texts(data["parameters"], where)
    unknown = set(names) - parameters.keys()
    if unknown:
        raise Malformed(f"{where}: there is no parameter {min(unknown)}")
    return Bucket(
        record_schema.text(data["name"], where),
        tuple(parameters[name] for name in names),
        record_schema.texts(data["blocks"], where),
        record_schema.flag(data["learns"], where),
    )


def _positions_of(value: object) -> tuple[int, str] | None:
    if value is None:
        return None
    where = "program: positions"
    limit, setting = (*record_schema.listed(value, where), None, None)[:2]
    return record_schema.whole(limit, where), record_schema.text(setting, where)


def _template_data(template: Template) -> Data:
    content: Any = template.content
    return {
        "name": template.name,
        "digest": content[0],
        "traced": list(content[-1]),
        "parameters": list(template.parameters),
        "buffers": list(template.buffers),
        "inputs": list(template.inputs),
        "graph": encode(template.graph),
    }


def _template_of(value: object) -> Template:
    where = "program: a template"
    data = record_schema.fields(value, ("name", "digest", "traced", "parameters", "buffers", "inputs", "graph"), where)
    name = record_schema.text(data["name"], where)
    where = f"program: template {name[:6]}"
    (graph,) = _built(record_schema.check_graphs(data["graph"], 1, where), where)
    template = Template(
        name,
        graph,
        record_schema.texts(data["parameters"], where),
        record_schema.texts(data["buffers"], where),
        record_schema.texts(data["inputs"], where),
    )
    takes = len(template.parameters) + len(template.buffers) + len(template.inputs)
    if len(_placeholders(graph)) != takes:
        raise Malformed(f"{where}: its graph has {len(_placeholders(graph))} placeholders for {takes} names")
    # The content it was captured with: the rebuilt graph's text names size symbols differently.
    digest = record_schema.text(data["digest"], where)
    traced = record_schema.wholes(data["traced"], where)
    vars(template)["content"] = (digest, template.parameters, template.buffers, template.inputs, traced)
    return template


# --- a variant --------------------------------------------------------------------------------------------------------


def variant_data(variant: Variant) -> Data:
    """Convert a variant to data.

    Raises:
        ValueError: its graphs cannot be represented as data.
    """
    return {
        "inputs": list(variant.inputs),
        "outputs": variant.outputs,
        "needs": list(variant.needs),
        "gradients": list(variant.gradients),
        "added": list(variant.added),
        "kinds": {name: kind.value for name, kind in variant.kinds.items()},
        "vocabulary": list(variant.vocabulary),
        "graphs": encode(variant.forward, variant.backward),
    }


def variant_of(value: object, spec: VariantSpec, where: str) -> Variant:
    """Build a variant from data.

    Args:
        spec: the spec that the variant must match.
        where: description of the variant, for errors.

    Raises:
        Malformed: names the field that is wrong.
    """
    names = ("inputs", "outputs", "needs", "gradients", "added", "kinds", "vocabulary", "graphs")
    data = record_schema.fields(value, names, where)
    graphs = record_schema.check_graphs(data["graphs"], 2, where)
    kinds = record_schema.fields(data["kinds"], spec.template.parameters, f"{where}: kinds")
    forward, backward = _built(graphs, where)
    variant = Variant(
        forward,
        backward,
        record_schema.texts(data["inputs"], where),
        record_schema.whole(data["outputs"], where, 1),
        record_schema.texts(data["needs"], where),
        record_schema.texts(data["gradients"], where),
        {name: _kind_of(kinds[name], where) for name in spec.template.parameters},
        record_schema.texts(data["vocabulary"], where),
        record_schema.texts(data["added"], where),
    )
    _check_variant(variant, spec, where)
    _check_shapes(graphs["graphs"][0], spec, where)
    return variant


def _kind_of(value: object, where: str) -> GradientKind:
    try:
        return GradientKind(value)
    except ValueError as error:
        raise Malformed(f"{where}: {error}") from None


def _check_variant(variant: Variant, spec: VariantSpec, where: str) -> None:
    """Reject names that do not belong to the template, and graphs with the wrong number of inputs or outputs."""
    template = spec.template
    starts = [start_of(name) for name in variant.vocabulary]
    plain = [*template.parameters, *template.buffers, *template.inputs, *starts]
    if not set(variant.vocabulary) <= set(template.parameters) or variant.inputs not in (
        tuple(plain),
        (*plain, COLLECTIVES),
    ):
        raise Malformed(f"{where}: its inputs are not those of the template")
    saved = saved_names(len(_output_of(variant.forward)) - variant.outputs)
    if len(_placeholders(variant.forward)) != len(variant.inputs) or variant.outputs != 1:
        raise Malformed(f"{where}: its forward takes or returns another number of values than it says")
    takes = {*saved, *template.parameters, "tangent", COLLECTIVES}
    if not set(variant.needs) <= takes or len(set(variant.needs)) != len(variant.needs):
        raise Malformed(f"{where}: its backward needs {', '.join(set(variant.needs) - takes) or 'something twice'}")
    learned = [*variant.gradients, *variant.added]
    if not set(learned) <= spec.learning or len(set(learned)) != len(learned):
        raise Malformed(f"{where}: it has gradients of what does not learn, or two of one parameter")
    if "hidden" in variant.added:
        raise Malformed(f"{where}: the hidden state's gradient is added up")
    if len(_placeholders(variant.backward)) != len(variant.needs) + 2 * len(variant.added):
        raise Malformed(f"{where}: its backward takes another number of values than it says")
    if len(_output_of(variant.backward)) != len(variant.gradients):
        raise Malformed(f"{where}: its backward returns another number of gradients than it says")


def _check_shapes(forward: Sequence[Any], spec: VariantSpec, where: str) -> None:
    """Reject a forward whose parameters do not have the shapes of a rank's shards."""
    dtype = str(spec.dtype).removeprefix("torch.")
    inputs = [node for node in forward if node[1] == "placeholder"]
    for node, (name, parameter) in zip(inputs, spec.parameters.items(), strict=False):
        shape = parameter.local_shape(spec.part.tp, spec.part.index)
        value = node[5]
        if not isinstance(value, list) or value[:2] != ["tensor", dtype] or value[3] != list(shape):
            raise Malformed(f"{where}: {name} is {value!r:.60}, and a rank's shard of it {dtype} {list(shape)}")


# --- graphs that were checked -----------------------------------------------------------------------------------------


def _built(data: Mapping[str, Any], where: str) -> list[fx.GraphModule]:
    try:
        return decode(data)
    except Exception as error:  # raised by FX for a graph that it cannot print
        first = (str(error).splitlines() or [""])[0]
        raise Malformed(f"{where}: no graph can be built of it ({type(error).__name__}: {first:.200})") from error


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _output_of(graph: fx.GraphModule) -> Sequence[Any]:
    outputs: Any = next(node for node in reversed(graph.graph.nodes) if node.op == "output").args[0]
    return tuple(outputs)
