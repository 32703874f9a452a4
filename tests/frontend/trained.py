"""What becomes of every family when it is trained, not only captured: the second table in docs/support.md.

`python -m tests.frontend.trained [FAMILY ...]` runs these families (default: all, which takes hours) over two
gloo processes and renews their rows. Every family is compiled for one rank, tensor and sequence parallelism over two
and a pipeline of two; what ranks run is compared with whole blocks, and gradients with the model's own at several token
counts; and once more as its default config has it, with windows, chunks, caps and router losses, on sequences that are
longer than the windows.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

import hydragraph as hg
from hydragraph.frontend.check.stage_check import StageCheck
from hydragraph.frontend.check.wide_dtype import computing
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.passes.check_strategy import refuse_uncut
from tests import reference
from tests.frontend.families import DOCS, NAMES, build, shrink  # pyrefly: ignore[implicit-reexport]
from tests.models import sequences
from tests.ready import Ready

BEGIN, END = "<!-- trained: begin (transformers {}) -->", "<!-- trained: end -->"
FORMS = ("one rank", "tensor parallel", "sequence parallel", "pipeline")
LENGTHS = ([5, 3, 9], [37, 23, 6])
RANKS = 2


def strategy_of(form: str, layers: int) -> hg.Strategy:
    """Return the strategy that a column stands for."""
    texts = {
        "one rank": f"<[0]x{layers}>",
        "tensor parallel": f"<[0,1]x{layers}>",
        "sequence parallel": f"<[0,1]x{layers}s>",
        "pipeline": f"<[0]x{layers // 2},[1]x{layers - layers // 2}>",
    }
    return hg.Strategy.parse(texts[form], layers)


@dataclass(frozen=True)
class Prepared:
    """A family that was captured: what its ranks get, and the columns that need not run: form -> why not."""

    ready: Ready
    refused: dict[str, str]


def prepare(family: str, plain: bool) -> Prepared | str:
    """Capture a family and compile it for every form; return why it cannot be had, where it cannot."""
    try:
        model = build(family, plain)[0]
    except Exception as error:  # a config's own checks may raise anything
        return _why("not built", error)
    try:
        program = hg.capture(model)
    except hg.Unsupported as error:
        return _why("no", error)
    refused, chosen = {}, []
    for form in FORMS if plain else FORMS[:1]:
        try:
            strategy = strategy_of(form, program.layers)
            refuse_uncut(program, strategy)
            hg.precompile(program, [strategy])
            StageCheck(program, initial_buffers(model), fused_head=False).check(strategy)
            chosen.append(strategy)
        except hg.Unsupported as error:
            refused[form] = _why("no", error)
        except Exception as error:  # which is what the table is to show
            refused[form] = _why("CRASH", error)
    return Prepared(Ready(model, hg.precompile(program, chosen)), refused)


def train(prepared: Prepared | str) -> dict[str, str]:
    """On every rank: run each form; return form -> what became of it."""
    if isinstance(prepared, str):
        return {"captured": prepared}
    model, found = prepared.ready.model, dict(prepared.refused)
    layers = prepared.ready.variants.program.layers
    exe = prepared.ready.executable(strategy_of(FORMS[0], layers))
    for form in FORMS:
        if form not in found and (form in FORMS[:1] or len(prepared.refused) < len(FORMS)):
            gradients = [exe.gradients(_batch(n), strategy=strategy_of(form, layers)) for n in LENGTHS]
            found[form] = _compared(model, gradients) if exe.world.rank == 0 else ""
    exe.close()
    return found


def _batch(lengths: Sequence[int]) -> list[Tensor]:
    return sequences(list(lengths), seed=len(lengths) + lengths[0])


def _compared(model: nn.Module, found: Sequence[dict[str, Tensor]]) -> str:
    """Compare with the model alone."""
    for lengths, gradients in zip(LENGTHS, found, strict=True):
        expected = {n: g for n, g in _alone(model, _batch(lengths)).items() if n in gradients}
        worst, ratio = reference.worst(gradients, expected)
        if not ratio <= 1 and not _as_exact(model, _batch(lengths), gradients, expected):
            return f"WRONG: the gradient of {worst} at {sum(lengths)} tokens, {ratio:.1f} times the tolerance"
    return "yes"


def _as_exact(model: nn.Module, batch: Sequence[Tensor], found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Return whether gradients are at most four times as far from those in float64 as the model's own are.

    Gradients in which large terms cancel have no five right digits in anyone's float32.
    """
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):  # their grouped product has no float64
        exact.set_experts_implementation("eager")
    with computing(torch.float64):
        wanted = _alone(exact, batch)
    least = 1e-7 * float(torch.stack([g.norm() for g in wanted.values()]).norm())
    errors = {n: [float((g[n] - wanted[n]).norm()) for g in (found, expected)] for n in expected}
    return all(ours <= max(4 * own, least) for ours, own in errors.values())


def _alone(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a mini-batch, one sequence at a time, on one device."""
    model.zero_grad()
    logits = [model(input_ids=s[None], use_cache=False).logits[0] for s in batch]
    sums = [F.cross_entropy(one[:-1], s[1:], reduction="sum") for one, s in zip(logits, batch, strict=True)]
    (torch.stack(sums).sum() / sum(len(s) - 1 for s in batch)).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def row(family: str) -> str:
    """Run a family; return its line of the table."""
    plain = _run(family, True)
    cells = [plain.get("captured", plain.get(form, "")) for form in FORMS]
    if "captured" in plain:
        cells = [plain["captured"], *[""] * (len(FORMS) - 1)]
    given = cells[0]
    if not _is_plain(family):
        found = _run(family, False)
        given = found.get("captured", found.get(FORMS[0], ""))
    return f"| {family} | {' | '.join(cells)} | {given} |"


def _is_plain(family: str) -> bool:
    """Say whether a family's default config has no windows, chunks, caps and router losses to begin with."""
    try:
        plain, given = (shrink(CONFIG_MAPPING[family], kind)[0].to_dict() for kind in (True, False))
    except Exception:  # a config's own checks may raise anything
        return False
    return bool(plain == given)


def _run(family: str, plain: bool) -> dict[str, str]:
    try:
        run = train if plain else _first
        return hg.launch(run, RANKS, prepare=functools.partial(prepare, family, plain))[0]
    except Exception as error:  # whatever a rank died of
        return {"captured": _why("CRASH", error)}


def _first(prepared: Prepared | str) -> dict[str, str]:
    """Train on one rank only."""
    if isinstance(prepared, str):
        return {"captured": prepared}
    if FORMS[0] in prepared.refused:
        return prepared.refused
    return train(Prepared(prepared.ready, dict.fromkeys(FORMS[1:], "")))


def _why(kind: str, error: Exception) -> str:
    told = str(error) if isinstance(error, hg.Unsupported) else f"{type(error).__name__}: {error}"
    line = " ".join(told.split()).replace("|", "/")
    return f"{kind}: {line[:117]}{'...' if len(line) > 117 else ''}"


def documented() -> tuple[str, dict[str, str]]:
    """Return the transformers version of the table in docs/support.md, and its rows by family."""
    start, end = BEGIN.split("{}")
    version, _, rest = DOCS.read_text().partition(start)[2].partition(end)
    lines = [x for x in rest.partition(END)[0].splitlines() if x.startswith("| ") and not x.startswith("| family")]
    return version, {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def write(rows: dict[str, str]) -> None:
    """Put rows into the table of docs/support.md."""
    text = DOCS.read_text()
    before, _, rest = text.partition(BEGIN.split("{}")[0])
    columns = ["family", *FORMS, "as its default config has it"]
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    table = "\n".join([BEGIN.format(transformers.__version__), "", *head, *(rows[n] for n in sorted(rows)), "", END])
    DOCS.write_text(before.rstrip("\n") + "\n\n" + table + (rest.partition(END)[2] if rest else "\n"))


def main(given: Iterable[str]) -> int:
    """Renew rows; return 1 where one is wrong or crashes."""
    version, rows = documented()
    rows = rows if version == transformers.__version__ else {}
    for family in given:
        rows[family] = row(family)
        print(rows[family], flush=True)
        write(rows)
    return int(any("WRONG" in line or "CRASH" in line for line in rows.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="of transformers' causal language models")
    sys.exit(main(parser.parse_args().families or list(NAMES)))
