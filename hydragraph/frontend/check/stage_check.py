"""Numeric check of a stage's sharded graphs against the unsharded block's."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.frontend.check.eager_and_captured import CapturedBatch, backward
from hydragraph.frontend.check.emulated_stage import EmulatedCollectives, generate_code, run_ranks
from hydragraph.frontend.check.loss_comparison import Difference, compare
from hydragraph.frontend.check.narrow_model import LibraryModel, Widths, variant_text
from hydragraph.frontend.check.numeric_check import Attempt, log
from hydragraph.frontend.check.passed_checks import key_of, recall, remember
from hydragraph.frontend.check.probe_lengths import LARGE, ProbeLengths
from hydragraph.frontend.check.probe_sequences import draw_sequences, ids_read
from hydragraph.frontend.check.probe_weights import DrawnWeights
from hydragraph.frontend.check.wide_dtype import default_dtype, runner
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.frontend.packed_batch import DropoutNumbers, pack
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Block, Program
from hydragraph.passes.differentiate import COLLECTIVES, Variant
from hydragraph.passes.place import place
from hydragraph.passes.variants import Library, Variants, local_parameters, vocabulary_starts
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy

# Maximum parameters; larger blocks are not compared
LARGEST = 1 << 28
_LENGTHS = ProbeLengths((5, 11, 3), ())
_OUT = "its output"

REMEDY = (
    "report this as a bug, with the model's config. Until it is fixed, use another tensor-parallel degree, or disable "
    "sequence parallelism and recomputation; check='off' trains with these graphs despite the difference"
)
_ANEW = "write the folder again with hydragraph compile, and find out why its files changed"


class StageCheck:
    """Numeric comparison of each stage's graphs with the program's unsharded blocks.

    Args:
        fused_head: whether one operator computes head and loss, as with Inductor.
        library: untrusted source of graphs, such as a compiled folder.
        model: the program's model; large blocks are compared in a narrow copy.
    """

    def __init__(
        self,
        program: Program,
        buffers: Mapping[str, Tensor],
        fused_head: bool,
        passed: Mapping[str, str] | None = None,
        library: Library | None = None,
        model: LibraryModel | None = None,
    ) -> None:
        self.passed = dict(passed or {})
        self._library = library
        self._program = program
        self._fused_head = fused_head
        self._buffers = {name: value.detach().cpu() for name, value in buffers.items()}
        added = not fused_head
        self._whole = Variants(program, added=added, cache=VariantCache())
        self._cut = Variants(program, fused_head=fused_head, added=added, library=library, cache=VariantCache())
        self._passed: set[Hashable] = set()
        self._model = model

    def of(self, program: Program) -> StageCheck:
        other = copy.copy(self)
        other._program = program
        other._whole, other._cut = self._whole.of(program), self._cut.of(program)
        return other

    def check(self, strategy: Strategy) -> None:
        """Check a strategy's stages; raise Unsupported if a graph differs from the unsharded block."""
        began = time.perf_counter()
        forms = set[StageKind]()
        errors = [0.0]
        left = dict[str, str]()
        for block, form in self._work(strategy):
            # key: all that graphs depend on. lasting: its digest, which compiled folders store.
            key = self._key(block, form)
            lasting = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
            if key in self._passed or lasting in self.passed:
                continue
            stored = key_of(repr(key))
            if (line := recall(stored)) is not None:
                self.passed[lasting] = line
                self._passed.add(key)
                continue
            # Compare a large block at smaller widths, if possible.
            size = sum(self._program.parameters[name].size for name in block.parameters)
            error = self._compare_narrow(block, form) if size > LARGE else None
            if error is None and size > LARGEST:
                left[block.name] = f"{size / 1e6:.3g} M parameters, above {LARGEST / 1e6:.3g} M"
            elif (error := self._compare(block, form) if error is None else error) is None:
                left[block.name] = "outputs or gradients are not finite with any weights tried"
            else:
                errors.append(error)
                forms.add(form)
                self.passed[lasting] = f"{block.name} under <{form.text}>"
                remember(stored, self.passed[lasting])
            # Blocks that cannot be compared are not tried again.
            self._passed.add(key)
        if left:
            named = "; ".join(f"{name} ({why})" for name, why in left.items())
            log.warning("did not check the graphs of some blocks: %s", named)
        if forms:
            names = " and ".join(f"<{form.text}>" for form in sorted(forms))
            result = f"worst error {max(errors):.1e}, took {time.perf_counter() - began:.1f} s"
            log.info("checked the graphs of stages of kind %s: %s", names, result)

    def _work(self, strategy: Strategy) -> Iterator[tuple[Block, StageKind]]:
        """Yield the blocks to compare, with their stage's kind.

        Without a library, omit blocks that the model's numeric check covers.
        """
        for stage in place(self._program.outline, strategy, [1] * len(strategy.pipelines)).stages:
            form = stage.kind
            for position in stage.positions:
                block = self._program.blocks[position]
                if form.tp > 1 or form.recompute or self._is_fused(block) or self._library is not None:
                    yield block, form

    def _is_fused(self, block: Block) -> bool:
        return self._fused_head and block is self._program.blocks[-1]

    def _key(self, block: Block, form: StageKind) -> Hashable:
        program = self._program
        cut_shapes = tuple((p.shape, p.rule) for p in (program.parameters[n] for n in block.parameters))
        learns = tuple(n in program.learning for n in block.parameters)
        content = program.templates[block.template].content
        fused = self._is_fused(block)
        passes_on = program.outline.index[block.name] > program.outline.lowest
        key = (content, cut_shapes, learns, passes_on, form, fused, self._fused_head, str(program.dtype))
        if self._library is None:
            return key
        return *key, tuple(self._library.source(self._cut.spec(block, part)) for part in form.parts())

    @cached_property
    def _narrow(self) -> tuple[StageCheck, Widths] | None:
        narrow = None if self._model is None else self._model.narrowed(self._program)
        if narrow is None:
            return None
        return StageCheck(narrow.program, initial_buffers(narrow.model), self._fused_head), narrow.widths

    def _compare_narrow(self, block: Block, form: StageKind) -> float | None:
        if self._narrow is None:
            return None
        other, widths = self._narrow
        of_copy = other._program.blocks[self._program.outline.index[block.name]]
        for part in form.parts():
            # The narrow result counts only if every rank's graphs differ only in widths.
            texts = (variant_text(v) for v in (self._cut.get(block, part), other._cut.get(of_copy, part)))
            if not widths.equal(*texts):
                return None
        try:
            return other._compare(of_copy, form)
        except Unsupported as error:
            log.info("the check at 1/%d of the widths failed: %s", widths.factor, error)
            return None

    def _compare(self, block: Block, form: StageKind) -> float | None:
        failed: list[tuple[Difference | Exception, Attempt]] = []
        if self._library is not None:
            for part in form.parts():
                self._cut.get(block, part)
        for attempt in _attempts(self._program.dtype):
            try:
                difference = self._attempt(block, form, attempt)
            except Exception as error:
                failed.append((error, attempt))
                if attempt.widened:
                    continue
                # Training would fail too
                break
            if difference is not None and difference.ratio <= 1:
                return difference.ratio * attempt.bound.own
            if difference is not None:
                failed.append((difference, attempt))
        if not failed:
            return None
        raise _refusal(block, form, *failed[-1], self._library)

    def _attempt(self, block: Block, form: StageKind, attempt: Attempt) -> Difference | None:
        wide = attempt.wide
        parameters = local_parameters(self._program, block, self._program.templates[block.template])
        whole = self._whole.get(block, StagePart())
        variants = [self._cut.get(block, part) for part in form.parts()]
        generate_code(variants)
        with torch.no_grad(), default_dtype(wide):
            values = self._values(block, form, attempt)
            tangent = _tangent(runner(whole.forward, wide)(*(values[n] for n in whole.inputs))[0], attempt.seed)
            of_block = _run(whole, values, tangent, wide)
            stage = _Stage(form, parameters, variants, values, wide)
            ranks = run_ranks(form.tp, lambda collectives: stage.run(collectives, tangent))
        computed: dict[str, Tensor] = {}
        expected: dict[str, Tensor] = {}
        for name, value in of_block.items():
            for i, part in enumerate(stage.whole(name, value, [rank[name] for rank in ranks])):
                key = f"{name} on rank {i}" if i else name
                computed[key] = part
                expected[key] = value
        return compare(computed, expected, attempt.bound, (_tokens_of(values),))

    def _values(self, block: Block, form: StageKind, attempt: Attempt) -> dict[str, Any]:
        program, wide = self._program, attempt.wide
        template = program.templates[block.template]
        sequences = draw_sequences(_LENGTHS, ids_read(program), program, None, attempt.seed)
        draws = DropoutNumbers(attempt.seed, range(len(sequences))) if program.drops else None
        batch = pack(sequences, form.tp, several=True, draws=draws)
        values = CapturedBatch(program, self._buffers, batch, wide).inputs(block)
        tokens = _tokens_of(batch)
        generator = torch.Generator().manual_seed(attempt.seed + 1)
        if "hidden" in template.inputs:
            (like,) = (value_of(n) for n in template.graph.graph.nodes if n.name == "hidden")
            sizes = [s if isinstance(s, int) else tokens for s in like.shape]
            values["hidden"] = torch.randn(sizes, generator=generator, dtype=wide or like.dtype)
        weights = DrawnWeights(attempt.seed, wide or program.dtype, copied=False)
        for local, parameter in local_parameters(program, block, template).items():
            values[local] = weights.drawn(torch.empty(parameter.shape, device="meta"), parameter.name)
        return values


def _tokens_of(batch: Mapping[str, Tensor]) -> int:
    return int(batch["cu_seqlens"][-1])


def _attempts(dtype: torch.dtype) -> Iterator[Attempt]:
    if dtype is not torch.float64:
        yield Attempt(torch.float32, copied=False, widened=dtype is not torch.float32, seed=0)
    yield Attempt(torch.float64, copied=False, widened=True, seed=1)


def _tangent(out: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=generator, dtype=out.dtype) if out.dim() else torch.ones_like(out)


def _run(variant: Variant, inputs: Mapping[str, Any], tangent: Tensor, wide: torch.dtype | None) -> dict[str, Tensor]:
    out, *saved = runner(variant.forward, wide)(*(inputs[n] for n in variant.inputs))
    sums: dict[str, Tensor] = {}
    before = backward({name: name for name in inputs}, variant, saved, tangent, inputs, sums, wide)
    return {_OUT: out, **sums, **({} if before is None else {"hidden": before})}


@dataclass(frozen=True)
class _Stage:
    """One block on a stage's ranks; `parameters` and `inputs` are unsharded."""

    form: StageKind
    parameters: Mapping[str, Parameter]
    variants: Sequence[Variant]
    inputs: Mapping[str, Any]
    wide: torch.dtype | None

    def run(self, collectives: EmulatedCollectives, tangent: Tensor) -> dict[str, Tensor]:
        index = collectives.index
        tp = self.form.tp
        own: dict[str, Any] = {**self.inputs, COLLECTIVES: collectives}
        for name, parameter in self.parameters.items():
            # Cut this rank's intervals out of the flat parameter, and restore the shard's shape.
            flat = parameter.canonical(self.inputs[name])
            own[name] = parameter.natural(torch.cat([flat[a:b] for a, b in parameter.intervals(tp, index)]), tp, index)
        own |= vocabulary_starts(self.variants[index], self.parameters, StagePart(StageKind(tp), index))
        if self.form.sequence_parallel:
            own |= {"hidden": collectives.split(own["hidden"], 1)} if "hidden" in own else {}
            tangent = collectives.split(tangent, 1) if tangent.dim() else tangent
        with torch.no_grad():
            return _run(self.variants[index], own, tangent, self.wide)

    def whole(self, name: str, like: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Combine the ranks' values of `name`; each result must equal the unsharded block's."""
        if name in (_OUT, "hidden"):
            split = self.form.sequence_parallel and like.dim() > 0
            return [torch.cat(list(parts), 1)] if split else parts
        if self.variants[0].kinds[name] is GradientKind.REPLICA:
            return parts
        parameter = self.parameters[name]
        total = torch.zeros_like(parameter.canonical(like))
        # Every rank has a shard or a partial sum
        for index, part in enumerate(parts):
            expected = parameter.local_shape(self.form.tp, index)
            if part.shape != expected:
                shapes = f"shape {tuple(part.shape)}, but the shard has {tuple(expected)}"
                raise ValueError(f"the gradient of {name} has {shapes}")
            intervals = parameter.intervals(self.form.tp, index)
            pieces = parameter.canonical(part).split([b - a for a, b in intervals])
            for (a, b), piece in zip(intervals, pieces, strict=True):
                total[a:b] += piece
        return [parameter.natural(total)]


def _refusal(
    block: Block, form: StageKind, difference: Difference | Exception, attempt: Attempt, library: Library | None
) -> Unsupported:
    where = f"{block.name} in stages of kind <{form.text}>" + (f" in {library}" if library is not None else "")
    remedy = REMEDY if library is None else _ANEW
    if isinstance(difference, Exception):
        why = f"{type(difference).__name__}: {(str(difference).splitlines() or [''])[0][:200]}"
        return Unsupported(f"the graphs fail to run ({why})", where=where, remedy=remedy)
    what = difference.parameter if difference.parameter.startswith(_OUT) else f"the gradient of {difference.parameter}"
    off = f"differs by {difference.relative:.2g} times its norm from the unsharded block's (in {attempt.kind})"
    return Unsupported(f"{what} {off}", where=where, remedy=remedy)
