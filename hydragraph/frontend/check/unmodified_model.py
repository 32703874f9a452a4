"""Comparison of a model itself, with its own weights and all blocks, with its captured graphs.

The numeric check and capture use copies of a model. Only this comparison detects code that depends on a module's
identity (`id`, a global set of modules).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend import huggingface
from hydragraph.frontend.check.eager_and_captured import CapturedBatch, caller
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.check.probe_lengths import ProbeLengths
from hydragraph.frontend.check.probe_sequences import draw_sequences, ids_of
from hydragraph.frontend.check.wide_dtype import computing, default_dtype, runner
from hydragraph.frontend.loss_module import loss_buffers
from hydragraph.frontend.packed_batch import DropoutNumbers, pack
from hydragraph.frontend.packed_inputs import token_cross_entropy
from hydragraph.frontend.same_masks import same_masks
from hydragraph.kernels.philox import keys_of
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart
from hydragraph.spec.workload import IGNORED

LARGEST = 1 << 28  # maximum number of parameters; larger models are not compared
# Number of compared sequences; rounding may change the chosen expert in one, but not in all.
_SEQUENCES = 3
# Of the loss
_ERROR = 1e-4
_WIDE = torch.float32

_REMEDY = (
    "let forward depend only on its arguments and on attributes of its modules: use no id() and no global containers "
    "of modules or parameters"
)
_OWN_LOSS = "pass the model's own loss as loss=, summed over targets; or let the model return cross-entropy, or no loss"


def refuse_other_results(subject: CheckedModel, variants: Variants, lengths: ProbeLengths) -> None:
    """Raise Unsupported if a user's model computes or returns another loss than its captured graphs."""
    model, program = subject.model, subject.program
    parameters = list(model.parameters())
    if (
        huggingface.is_library_class(model)
        or any(p.dtype is not _WIDE or p.device.type != "cpu" for p in parameters)
        or sum(p.numel() for p in parameters) > LARGEST
        or program.dtype is torch.float64
    ):
        return
    sequences = draw_sequences(lengths, ids_of(model, program), program, subject.example, seed=0)[:_SEQUENCES]
    tensors = dict([*model.named_parameters(), *model.named_buffers(remove_duplicate=False)])
    tensors |= loss_buffers(subject.loss)
    differing: list[tuple[float, float]] = []
    for i, sequence in enumerate(sequences):
        batch = pack([sequence])
        with same_masks(model, program, keys_of(0, [len(sequence)], [i]), subject.blocks):
            outputs, expected = _of_model(subject, batch)
        if subject.loss is token_cross_entropy and math.isfinite(expected) and not program.drops:
            _refuse_own_loss(model, outputs, batch, expected, program.causal)
        draws = DropoutNumbers(0, [i]) if program.drops else None
        packed = pack([sequence], several=True, draws=draws)
        captured = _of_graphs(CapturedBatch(program, tensors, packed, _WIDE), variants)
        if not math.isfinite(captured) or not math.isfinite(expected):
            continue
        # One equal sequence suffices: rounding may change another's experts.
        if abs(captured - expected) <= _ERROR * max(abs(expected), 1e-3):
            return
        differing.append((captured, expected))
    if differing:
        captured, expected = differing[0]
        what = f"the model computes the loss {expected:.6g} for a sequence, but a copy of the model {captured:.6g}"
        raise Unsupported(what, where=type(model).__name__, remedy=_REMEDY)


def _of_model(subject: CheckedModel, batch: dict[str, Tensor]) -> tuple[Any, float]:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), computing(_WIDE):
        outputs = caller(subject.model, batch)(subject.model, batch)
        return outputs, float(subject.loss(outputs, batch).detach())


def _of_graphs(batch: CapturedBatch, variants: Variants) -> float:
    hidden: Any = None
    with torch.no_grad(), default_dtype(_WIDE):
        for block in batch.program.blocks:
            variant = variants.get(block, StagePart())
            values = batch.inputs(block) | {"hidden": hidden}
            hidden = runner(variant.forward, _WIDE)(*(values[name] for name in variant.inputs))[0]
    return float(hidden)


def _refuse_own_loss(
    model: nn.Module, outputs: Any, batch: Mapping[str, Tensor], expected: float, causal: bool
) -> None:
    labels = batch["labels"]
    # These models shift labels, and return no loss without them
    if huggingface.is_huggingface(model):
        try:
            with torch.random.fork_rng(devices=[]), computing(_WIDE):
                outputs = model(input_ids=batch["input_ids"], labels=batch["input_ids"] if causal else labels)
        except Exception:
            return
    own = _named(outputs, "loss")
    logits = _named(outputs, "logits")
    if not isinstance(own, Tensor) or own.numel() != 1 or not isinstance(logits, Tensor):
        return
    returned = float(own.detach())
    # usual: sum and mean over targets, of the given and the shifted labels.
    later = labels[0, 1:]
    shifted = F.cross_entropy(logits.float().flatten(0, -2)[:-1], later, ignore_index=IGNORED, reduction="sum")
    # A model may shift labels a second time
    sums = [(expected, labels), (float(shifted.detach()), later)]
    usual = [n for total, targets in sums for n in (total, total / max(1, int((targets != IGNORED).sum())))]
    if not any(math.isclose(returned, n, rel_tol=_ERROR, abs_tol=_ERROR) for n in usual):
        what = f"the model returns the loss {returned:.6g}, but without loss= it is trained with cross-entropy"
        what += f", {usual[1]:.6g} per target"
        raise Unsupported(what, where=type(model).__name__, remedy=_OWN_LOSS)


def _named(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
