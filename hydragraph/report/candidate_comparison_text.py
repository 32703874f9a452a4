"""Text and JSON of compared candidates."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from hydragraph.report.candidate_comparison import ComparedCandidate, MemoryUse, PlanReport, scheme_counts
from hydragraph.report.number_text import aligned
from hydragraph.spec.record import attributes_of

ROWS = 8
MEANING = {
    "work": "device time of the sequences, divided evenly over all devices",
    "waiting": "work of the slowest pipeline beyond an even share; negative if only its bubble makes it the slowest",
    "fixed": "constant cost of the slowest pipeline's micro-batches, independent of their tokens",
    "bubble": "time in which the slowest pipeline's stages fill, drain, and wait for each other",
    "sync": "pull, push, commit and update",
}


def to_text(report: PlanReport, explain: bool = False) -> str:
    lines = [
        f"{report.profile}: {report.devices} devices, context {report.context:,}, {report.iterations} mini-batches of "
        f"{report.tokens:,} tokens",
        *_verdict(report),
        "",
        *_table(report, explain),
        "",
        *_memory(report),
    ]
    if explain:
        lines += ["", *_parts(report)]
        lines += [f"excluded <tp{tp},pp{pp}>: {why}" for (tp, pp), why in report.left_out]
    if report.cut:
        lines.append(f"sequences truncated to {report.context:,} tokens: {report.cut:,}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def to_record(report: PlanReport) -> dict[str, Any]:
    """Return a report as JSON data, with None for infinite numbers."""
    example = report.example
    return {
        **attributes_of(report, "profile", "devices", "context", "tokens", "iterations"),
        "dynamic_seconds": report.dynamic,
        "hetero_sync_seconds": report.sync,
        "sequences_cut": report.cut,
        "candidates": [_record(c) for c in report.candidates],
        "left_out": [{"scheme": list(scheme), "why": why} for scheme, why in report.left_out],
        "example": {
            "strategy": [list(s) for s in example.strategy],
            "lengths": list(example.lengths),
            "micro_batches": [[list(m) for m in p] for p in example.assignment.micro_batches],
            "seconds": example.assignment.seconds,
            "bound": example.assignment.bound,
        },
    }


def _record(candidate: ComparedCandidate) -> dict[str, Any]:
    return {
        "text": scheme_counts(candidate.strategy),
        "strategy": [list(s) for s in candidate.strategy],
        **attributes_of(candidate, "homogeneous", "devices", "fits", "wins", "why"),
        "seconds": candidate.seconds if math.isfinite(candidate.seconds) and candidate.assigned else None,
        "bound": candidate.bound if math.isfinite(candidate.bound) else None,
        "longest_alone": candidate.alone if math.isfinite(candidate.alone) else None,
        "parts": candidate.parts and asdict(candidate.parts),
        "memory": [{**asdict(use), "scheme": list(use.scheme)} for use in candidate.memory],
    }


def _verdict(report: PlanReport) -> list[str]:
    best = report.best
    alike = report.homogeneous
    if best.max_len < report.context or not math.isfinite(best.seconds):
        return [
            f"no candidate fits {report.context:,} tokens; with the best candidate for each mini-batch: "
            f"{report.dynamic:.3f} s per iteration"
        ]
    lines = [f"best for all mini-batches: {scheme_counts(best.strategy)}, {best.seconds:.3f} s per iteration"]
    if alike is not None and alike is not best:
        gain = alike.seconds / best.seconds
        lines.append(f"best homogeneous: {scheme_counts(alike.strategy)}, {alike.seconds:.3f} s ({gain:.2f}x the best)")
    gain = best.seconds / report.dynamic
    lines.append(f"with the best for each mini-batch: {report.dynamic:.3f} s per iteration ({gain:.2f}x as fast)")
    return lines


def _table(report: PlanReport, explain: bool) -> list[str]:
    alike = report.homogeneous
    shown = list(report.candidates) if explain else _few(report)
    rows = [("candidate", "devices", " seconds", " alone", "vs homog.", " MaxLen", "wins", "why not")]
    for c in shown:
        seconds = "-" if not math.isfinite(c.seconds) else f"{'' if c.assigned else '>='}{c.seconds:.3f}"
        alone = f"{c.alone:.3f}" if math.isfinite(c.alone) else "-"
        ratio = f"{c.seconds / alike.seconds:.2f}x" if alike and c.assigned else "-"
        numbers = (str(c.devices), seconds, alone, ratio, str(c.max_len), str(c.wins))
        rows.append((scheme_counts(c.strategy), *numbers, c.why))
    hidden = len(report.candidates) - len(shown)
    return [
        *aligned(rows, left=(0, 7)),
        *([f"and {hidden} more; --explain shows all"] if hidden else []),
        "alone: mean seconds if only each mini-batch's longest sequence runs, a lower bound for the iteration",
    ]


def _few(report: PlanReport) -> list[ComparedCandidate]:
    return [c for i, c in enumerate(report.candidates) if i < ROWS or c.wins or c is report.homogeneous]


def _memory(report: PlanReport) -> list[str]:
    by_scheme: dict[tuple[int, int], MemoryUse] = {}
    for candidate in _few(report):
        for use in candidate.memory:
            by_scheme.setdefault(use.scheme, use)
    rows = [("scheme      ", " MaxLen", "UtilLen", "memory of the fullest device, at MaxLen")]
    for (tp, pp), use in sorted(by_scheme.items(), reverse=True):
        rows.append((f"<tp{tp},pp{pp}>", str(use.max_len), str(use.util_len), _bytes(use)))
    return aligned(rows, left=(0, 3))


def _bytes(use: MemoryUse) -> str:
    if use.states is None or use.per_token is None or use.reserved is None or use.device is None:
        return "measured limit"
    activations = use.max_len * use.per_token
    return (
        f"{use.states / 1e9:.1f} GB state + {activations / 1e9:.1f} GB activations + {use.reserved / 1e9:.1f} GB kept "
        f"free, of {use.device / 1e9:.1f} GB in total"
    )


def _parts(report: PlanReport) -> list[str]:
    rows = [("seconds go to", *(f"{name:>7}" for name in MEANING))]
    for c in report.candidates:
        if c.parts is not None:
            numbers = (round(getattr(c.parts, name), 3) + 0.0 for name in MEANING)  # no -0.000
            rows.append((scheme_counts(c.strategy), *(f"{n:.3f}" for n in numbers)))
    return [*aligned(rows), *(f"  {name}: {meaning}" for name, meaning in MEANING.items())]
