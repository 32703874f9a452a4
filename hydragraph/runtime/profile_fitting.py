"""Fits of the cost models' constants by non-negative least squares.

The fit minimizes micro-batches' relative errors, weighted by time. Each number of tokens is measured as one sequence
and as several, whose times differ only in the quadratic part. Each attention window or chunk size adds a column with
the number of token pairs (`AttentionReach.pairs`).

Formulas of Hydraulis -> functions:

    Appendix B.2, T(l) = a l^2 + b l + c by profiling   `fit_work`, and `_slowest` for a stage
    section 6.1, UtilLen: 85 % of the plateau of tokens/s  `util_len`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.block_pieces import AUX, BlockPiece, Constants, PricedDevice
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.cost.reach import WHOLE, AttentionReach, ordered
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy_text import regular_pipeline

# Lengths of sequences
Lengths = tuple[int, ...]

TOO_SMALL = "the device's memory is too small for micro-batches with enough tokens for a fit"
WORST_RESIDUAL = 0.25
# Minimum quadratic fraction of the longest micro-batch's time
LEAST_QUADRATIC = 1e-3
# Columns of the fit: sum of l^2 (a), sum of l (b), 1 (c)
QUADRATIC = 0
LINEAR = 1
ONCE = 2
FIRST_NEAR = 3
# UtilLen (Hydraulis, section 6)
PLATEAU = 0.85


@dataclass(frozen=True)
class CurveFit:
    """Fitted time of micro-batches.

    Attributes:
        constants: fitted constants; 0 if not measurable.
        residual: root mean square relative error, weighted by time.
        quadratic: attention's fraction of the longest micro-batch's time.
    """

    constants: Constants
    residual: float
    quadratic: float

    @property
    def failure(self) -> str | None:
        k = self.constants
        numbers = f"(a = {k.a:.3g}, b = {k.b:.3g}, c = {k.c:.3g}, residual {self.residual:.1%})"
        # The fit may count short windows' cost as linear.
        if not k.near and (k.a <= 0 or self.quadratic < LEAST_QUADRATIC):
            return f"the quadratic part is below the noise: measure longer sequences {numbers}"
        if k.b <= 0 and not any(constant > 0 for _, constant in k.near):
            return f"the time per token is below the noise: measure more token counts {numbers}"
        if not self.residual <= WORST_RESIDUAL:
            return (
                f"measurements differ from the cost model by {self.residual:.0%}: measure on a quieter machine "
                f"{numbers}"
            )
        return None

    @property
    def doubt(self) -> str | None:
        if self.constants.near or self.quadratic >= 2 * self.residual:
            return None
        return (
            f"the quadratic part takes {self.quadratic:.1%} of the longest micro-batch's time, with a residual of "
            f"{self.residual:.1%}, so `a` is uncertain: measure longer sequences"
        )


def fit_work(
    micro_batches: Sequence[Sequence[int]], seconds: Sequence[float], reaches: Collection[AttentionReach] = (WHOLE,)
) -> CurveFit:
    """Fit the cost of micro-batches.

    Args:
        reaches: reach of each attention call; if empty, the cost has no quadratic part.

    Raises:
        ValueError: measurements are fewer than constants, or a time is not above 0.
    """
    limited = sorted({*reaches} - {WHOLE}, key=lambda each: each.order)
    # rows [micro-batches, constants]: sum of l^2, sum of l, 1, token pairs per limited reach.
    rows = _features(micro_batches, limited)
    measured = _positive(seconds, 2 + len({*reaches}))
    # Unused columns' constants stay 0.
    used = [*([QUADRATIC] if WHOLE in reaches else []), LINEAR, ONCE, *range(FIRST_NEAR, rows.shape[1])]
    constants = np.zeros(rows.shape[1])
    constants[used] = _nnls(rows[:, used], measured, measured)
    predicted = rows @ constants
    longest = int(np.argmax(rows[:, QUADRATIC]))
    attention = constants[QUADRATIC] * rows[longest, QUADRATIC]
    attention += constants[FIRST_NEAR:] @ rows[longest, FIRST_NEAR:]
    part = attention / predicted[longest] if predicted[longest] > 0 else 0.0
    a, b, c, *near_constants = constants.tolist()
    fitted = Constants(a, b, c, ordered(dict(zip(limited, near_constants, strict=True))))
    return CurveFit(fitted, _residual(predicted, measured, measured), float(part))


@dataclass(frozen=True)
class LinkFit:
    link: Interconnect
    residual: float


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit | None:
    """Fit latency and bandwidth to sizes (bytes) and times; return None if times do not grow."""
    measured = _positive(seconds, 2)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=np.float64)], axis=1)
    # Short and long messages count equally
    alike = np.ones(len(measured))
    latency, per_byte = _nnls(rows, measured, alike)
    if per_byte <= 0:
        return None
    link = Interconnect(bytes_per_s=float(1 / per_byte), latency_s=float(latency))
    return LinkFit(link, _residual(rows @ np.array([latency, per_byte]), measured, alike))


def util_len(micro_batches: Sequence[Sequence[int]], seconds: Sequence[float], fitted: Constants) -> int:
    """Return UtilLen: the tokens at which a micro-batch reaches 85 % of the plateau of tokens/s.

    Attention's time, which depends on sequence lengths, is subtracted first.
    """
    rows = _features(micro_batches)
    measured = _positive(seconds, 1)
    attention = fitted.a * rows[:, QUADRATIC]
    for reach, constant in fitted.near:
        attention = attention + constant * np.array([float(sum(map(reach.pairs, m))) for m in micro_batches])
    linear = np.maximum(measured - attention, 1e-3 * measured)
    tokens = np.unique(rows[:, LINEAR])
    speed = np.array([t / linear[rows[:, LINEAR] == t].mean() for t in tokens])
    useful = PLATEAU * speed.max()
    first = int(np.argmax(speed >= useful))
    if first == 0:
        return int(tokens[0])
    return int(np.ceil(np.interp(useful, speed[first - 1 : first + 1], tokens[first - 1 : first + 1])))


def token_counts(longest: int, multiple: int, points: int = 6, span: int = 64) -> tuple[int, ...]:
    """Return a geometric series of token counts from longest / span to longest, in multiples of `multiple`."""
    exact = np.geomspace(max(longest / span, multiple), max(longest, multiple), points)
    return tuple(sorted({max(1, round(n / multiple)) * multiple for n in exact.tolist()}))


def micro_batches(counts: Sequence[int], parts: int = 4) -> tuple[tuple[int, ...], ...]:
    whole = [(n,) for n in counts]
    split = [(n // parts,) * parts for n in counts if n % parts == 0 and n >= 2 * parts]
    return tuple(sorted([*whole, *split], key=lambda lengths: (sum(lengths), -len(lengths))))


@dataclass(frozen=True)
class MeasuredTemplate:
    """Measurement of a template; `forward` is part of `seconds`."""

    piece: BlockPiece
    seconds: tuple[float, ...]
    forward: tuple[float, ...]
    reaches: frozenset[AttentionReach]


@dataclass(frozen=True)
class Measurements:
    rows: tuple[Lengths, ...]
    times: dict[str, MeasuredTemplate]

    def total(self, templates: Sequence[str]) -> list[float]:
        columns = zip(*(self.times[t].seconds for t in [*templates, AUX]), strict=True)
        return [sum(column) for column in columns]

    def fit(self, templates: Sequence[str]) -> CurveFit:
        limited = {reach for t in templates for reach in self.times[t].reaches} - {WHOLE}
        whole = not limited or any(WHOLE in self.times[t].reaches for t in templates)
        return fit_work(self.rows, self.total(templates), [*limited, *([WHOLE] if whole else [])])

    @property
    def constants(self) -> int:
        return 2 + max(1, len({reach for measured in self.times.values() for reach in measured.reaches}))


def fit_profile(
    name: str,
    blocks: Sequence[str],
    schemes: Sequence[Scheme],
    device: PricedDevice,
    found: Mapping[StageKind, Measurements],
    messages: Sequence[tuple[int, float]],
    **more: Any,
) -> Profile:
    """Fit a profile to measurements, and record failed fits.

    Args:
        blocks: templates of the model's blocks, in order.
        found: measurements, including `StageKind(tp)` for each scheme's degree.
        messages: (bytes, seconds) of messages; empty for one rank.
    """
    unfit = {}
    util = {}
    pieces = {}
    for kind, measured in found.items():
        if len(measured.rows) < measured.constants:
            unfit[kind] = TOO_SMALL
            continue
        whole = measured.total(blocks)
        fit = measured.fit(blocks)
        fitted = {template: _fitted(m, measured.rows) for template, m in measured.times.items()}
        # `Costs` rejects layers whose attention takes no time.
        noisy = [t for t, m in measured.times.items() if m.reaches and not _attends(fitted[t])]
        if fit.failure is not None:
            unfit[kind] = f"the fit failed: {fit.failure}"
        elif noisy:
            unfit[kind] = f"the fit of {noisy[0]} failed: noise hides the cost of attention"
        else:
            pieces[kind] = fitted
        # Kinds of equal degree share UtilLen.
        if kind == StageKind(kind.tp):
            util[kind.tp] = util_len(measured.rows, whole, fit.constants)
    fits = {s: _slowest(blocks, s, found[StageKind(s[0])], util[s[0]]) for s in schemes if StageKind(s[0]) in pieces}
    failed = {s: unfit[StageKind(s[0])] for s in schemes if s not in fits}
    failed |= {s: f"its fit failed: {fit.failure}" for s, fit in fits.items() if fit.failure}
    link = fit_link([size for size, _ in messages], [seconds for _, seconds in messages]) if messages else None
    return Profile(
        name=name,
        schemes={s: fit.constants for s, fit in fits.items() if s not in failed},
        util=util,
        failed=failed,
        blocks=tuple(blocks),
        pieces=pieces,
        unfit=unfit,
        device=device,
        link=link.link if link else None,
        messages=tuple(messages),
        residuals={s: fit.residual for s, fit in fits.items()},
        notes=tuple(_notes({s: fit for s, fit in fits.items() if s not in failed}, messages, link)),
        **more,
    )


def _attends(piece: BlockPiece) -> bool:
    return any(curve.a or curve.near for curve in (piece.forward, piece.backward))


def _fitted(measured: MeasuredTemplate, rows: Sequence[Lengths]) -> BlockPiece:
    # Noise may make the backward's time negative.
    rest = [max(whole - part, 1e-9) for whole, part in zip(measured.seconds, measured.forward, strict=True)]
    forward, backward = (fit_work(rows, seconds, measured.reaches).constants for seconds in (measured.forward, rest))
    return replace(measured.piece, forward=forward, backward=backward)


def _slowest(blocks: Sequence[str], scheme: Scheme, measured: Measurements, useful: int) -> CurveFit:
    layers = len(blocks) - 2
    stages = regular_pipeline(*scheme, layers, 0).stages
    fits = []
    for first, last in pairwise(accumulate((stage.layers for stage in stages), initial=0)):
        # The first stage has the embedding, the last the head.
        span = slice(first + 1 if first else 0, last + 1 if last < layers else None)
        fits.append(measured.fit(blocks[span]))
    return max(fits, key=lambda fit: float(fit.constants.work(useful)) + fit.constants.c)


def _notes(fits: Mapping[Scheme, CurveFit], messages: Sequence[tuple[int, float]], link: LinkFit | None) -> list[str]:
    notes = [f"<tp{tp},pp{pp}>: {fit.doubt}" for (tp, pp), fit in fits.items() if fit.doubt]
    if not messages:
        return [*notes, "no message was measured, because a single rank has no links"]
    if link is None:
        return [*notes, "message times do not grow with message sizes, so no bandwidth could be fitted"]
    if link.residual > WORST_RESIDUAL:
        notes.append(
            f"measured message times differ from latency + bytes / bandwidth by {link.residual:.0%}: see `messages` in "
            "the profile"
        )
    return notes


def _features(micro_batches: Sequence[Sequence[int]], limited: Sequence[AttentionReach] = ()) -> NDArray[np.float64]:
    rows = [
        [sum(n * n for n in m), sum(m), 1.0, *(sum(map(reach.pairs, m)) for reach in limited)] for m in micro_batches
    ]
    return np.array(rows, dtype=np.float64)


def _positive(seconds: Sequence[float], least: int) -> NDArray[np.float64]:
    measured = np.asarray(seconds, dtype=np.float64)
    if len(measured) < least or not bool((measured > 0).all()):
        raise ValueError(
            f"{len(measured)} measurements for {least} constants: give at least one per constant, each above 0 s"
        )
    return measured


def _nnls(rows: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Minimize weighted squared relative errors; columns are scaled, because they differ by up to 10^10."""
    # Imported here, because few ranks compute fits
    from scipy.optimize import nnls

    # Minimize the sum of w (row x / seconds - 1)^2 = (row sqrt(w) / seconds x - sqrt(w))^2.
    root = np.sqrt(weights)
    weighed = rows * (root / seconds)[:, None]
    scale = np.linalg.norm(weighed, axis=0)
    scale[scale == 0] = 1.0
    scaled, _ = nnls(weighed / scale, root)
    return np.asarray(scaled / scale, dtype=np.float64)


def _residual(predicted: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.average((predicted / seconds - 1) ** 2, weights=weights)))
