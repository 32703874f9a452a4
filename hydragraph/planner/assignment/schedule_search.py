"""Improvement of an assignment, judged by the exact duration of its schedule (compiled by numba).

Because simulating a pipeline's schedule (`compiled_replay.replay`) is expensive, the search changes only the pipeline
that ends last, and takes the first step that helps.

    n sequences by length, descending; P pipelines of K kinds: as in `local_search`
    M            maximum number of micro-batches, equal to n
    batch[i]     [n]        micro-batch of sequence i
    order[p, x]  [P, C]     micro-batch at position x of pipeline p, which has count[p] micro-batches
    rows[m]      [M, S, 5]  seconds of micro-batch m, as in `stage_arrays`
    ends[p]      [P]        end time of pipeline p

Example: two stages, c = 0, and sequences of 2, 2, 4 and 4 seconds.

    4 4 2 2  ends at 16
    2 4 4 2  ends at 14.67: the pipeline fills and drains with small micro-batches

Steps tried for the pipeline that ends last:

    order  swap two micro-batches
    leave  move a sequence to an existing or new micro-batch of another pipeline
    trade  exchange a sequence for a shorter one of another pipeline
    move   move a sequence to another or a new micro-batch of the same pipeline
    swap   swap two sequences between micro-batches of the same pipeline
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.compiled_replay import AHEAD, PARTS, ReplayBuffers, replay, scratch_of
from hydragraph.cost.stage_arrays import StageTerms, add_pairs, fill_row, pairs_of, table_at
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.assignment.local_search import LEAST_GAIN, NEAR, Floats, Ints

Bools = NDArray[np.bool_]

# Minimum relative gains of a step, tried in turn.
GAINS = (3e-3, LEAST_GAIN)
# Maximum forwards and backwards that a search simulates.
TASKS = 500_000
TRIAL = 20


class Sequences(NamedTuple):
    """Sequences to assign, and kinds of pipelines with their MaxLen [K]."""

    lengths: Floats
    kind_of: Ints
    max_len: Floats
    terms: StageTerms


class PartialAssignment(NamedTuple):
    """An assignment under construction.

    Attributes:
        members, squares, tokens: number of sequences, and sums of l^2 and l, per micro-batch [M].
        near: query-key pairs in each attention window [M + 2, W].
        rows: seconds [M + 2, S, 5]; as in `near`, the last two rows are for trials.
        busy: computing seconds [P, S].
        spent: number of simulated forwards and backwards [1].
        trial: two orders being tried [2, C + 1].
    """

    placed: Ints
    batch: Ints
    order: Ints
    counts: Ints
    members: Ints
    squares: Floats
    tokens: Floats
    near: Floats
    rows: Floats
    busy: Floats
    ends: Floats
    spent: Ints
    scratch: ReplayBuffers
    trial: Ints


@compiled
def plan_of(placed: Ints, batch: Ints, order: Ints, count: Ints, given: Sequences) -> PartialAssignment:
    n = len(placed)
    pipelines = len(given.kind_of)
    stages = given.terms.seconds.shape[1]
    plan = PartialAssignment(
        placed,
        batch,
        order,
        count,
        np.zeros(n, np.int64),
        np.zeros(n),
        np.zeros(n),
        np.zeros((n + 2, len(given.terms.reaches))),
        np.empty((n + 2, stages, PARTS)),
        np.zeros((pipelines, stages)),
        np.zeros(pipelines),
        np.zeros(1, np.int64),
        scratch_of(stages, order.shape[1] + 1),
        np.empty((2, order.shape[1] + 1), np.int64),
    )
    recount(plan, given, np.ones(pipelines, np.bool_))
    return plan


@compiled
def ends_of(placed: Ints, batch: Ints, order: Ints, count: Ints, given: Sequences) -> Floats:
    plan = plan_of(placed, batch, order, count, given)
    ends: Floats = plan.ends
    return ends


@compiled
def recount(plan: PartialAssignment, given: Sequences, changed: Bools) -> None:
    """Recompute changed pipelines from `placed`, `batch`, `order` and `counts`."""
    for p in np.flatnonzero(changed):
        for x in range(plan.counts[p]):
            m = plan.order[p, x]
            plan.members[m] = 0
            plan.squares[m] = 0.0
            plan.tokens[m] = 0.0
            plan.near[m] = 0.0
    # Sums are rebuilt: adding and subtracting single sequences would accumulate rounding errors.
    for i in range(len(plan.placed)):
        if changed[plan.placed[i]]:
            m = plan.batch[i]
            plan.members[m] += 1
            plan.squares[m] += given.lengths[i] * given.lengths[i]
            plan.tokens[m] += given.lengths[i]
            add_pairs(plan.near[m], given.terms.reaches, given.lengths[i], 1.0)
    for p in np.flatnonzero(changed):
        t = given.kind_of[p]
        stages = given.terms.stages[t]
        plan.busy[p] = 0.0
        for x in range(plan.counts[p]):
            m = plan.order[p, x]
            fill_row(plan.rows[m], given.terms.seconds[t], stages, plan.squares[m], plan.tokens[m], plan.near[m])
            for s in range(stages):
                for part in range(AHEAD):
                    plan.busy[p, s] += plan.rows[m, s, part]
        plan.ends[p] = end_with(p, plan.order[p], plan.counts[p], plan, given)
    changed[:] = False


@compiled
def end_with(p: int, order: Ints, count: int, plan: PartialAssignment, given: Sequences) -> float:
    t = given.kind_of[p]
    stages = given.terms.stages[t]
    # A forward and a backward per stage and micro-batch; TRIAL: a simulation's fixed cost.
    plan.spent[0] += 2 * stages * count + TRIAL
    return float(replay(table_at(given.terms, t), stages, plan.rows, order, count, plan.scratch))


@compiled
def changed_batch(m: int, at: int, p: int, less: int, more: int, plan: PartialAssignment, given: Sequences) -> bool:
    """Replace sequence `less` (-1: none) of pipeline p's micro-batch m (-1: empty) by `more` (-1: none) in trial row
    `at`; return whether the result fits.
    """
    t = given.kind_of[p]
    # Rows n and n + 1 are for trials, which thus do not overwrite the current assignment.
    near = plan.near[len(plan.placed) + at]
    near[:] = 0.0
    squares = 0.0
    tokens = 0.0
    if m >= 0:
        near[:] = plan.near[m]
        squares = plan.squares[m]
        tokens = plan.tokens[m]
    for i, sign in ((less, -1.0), (more, 1.0)):
        if i >= 0:
            squares += sign * given.lengths[i] * given.lengths[i]
            tokens += sign * given.lengths[i]
            add_pairs(near, given.terms.reaches, given.lengths[i], sign)
    if tokens > given.max_len[t]:
        return False
    fill_row(plan.rows[len(plan.placed) + at], given.terms.seconds[t], given.terms.stages[t], squares, tokens, near)
    return True


@compiled
def without(i: int, p: int, plan: PartialAssignment, given: Sequences) -> int:
    """Write pipeline p's order without sequence i to the first trial order; return its length."""
    order = plan.trial[0]
    m = plan.batch[i]
    count = 0
    for x in range(plan.counts[p]):
        other = plan.order[p, x]
        if other != m:
            order[count] = other
            count += 1
        # Trial row n is m without i. If i was alone, m leaves the order.
        elif plan.members[m] > 1:
            order[count] = len(plan.placed)
            count += 1
    if plan.members[m] > 1:
        changed_batch(m, 0, p, i, -1, plan, given)
    return count


@compiled
def try_places(i: int, q: int, order: Ints, count: int, best: float, plan: PartialAssignment, given: Sequences) -> bool:
    """Put sequence i into a micro-batch of pipeline q (`order`: q's, without i) if q then ends before `best`."""
    rest = len(plan.placed)
    with_it = rest + 1
    for x in range(count):
        m = order[x]
        # rest: the micro-batch that i leaves; putting i back has no effect.
        if m == rest or not changed_batch(m, 1, q, -1, i, plan, given):
            continue
        order[x] = with_it
        end = end_with(q, order, count, plan, given)
        order[x] = m
        if end < best:
            relocate(i, q, m, 0, plan)
            return True
    # No existing micro-batch helps: try a new one at every position.
    if count == plan.order.shape[1] or not changed_batch(-1, 1, q, -1, i, plan, given):
        return False
    own = plan.batch[i]
    for x in range(count + 1):
        # i is alone here already.
        if plan.members[own] == 1 and x < plan.counts[q] and plan.order[q, x] == own:
            continue
        opened(order, count, x, with_it)
        end = end_with(q, order, count + 1, plan, given)
        closed(order, count + 1, x)
        if end < best:
            relocate(i, q, -1, x, plan)
            return True
    return False


@compiled
def opened(order: Ints, count: int, x: int, m: int) -> None:
    for y in range(count, x, -1):
        order[y] = order[y - 1]
    order[x] = m


@compiled
def closed(order: Ints, count: int, x: int) -> None:
    for y in range(x, count - 1):
        order[y] = order[y + 1]


@compiled
def relocate(i: int, q: int, m: int, x: int, plan: PartialAssignment) -> None:
    """Put sequence i into micro-batch m of pipeline q or, if m = -1, into a new one at position x.

    Position x does not count a micro-batch that i leaves empty.
    """
    p = plan.placed[i]
    old = plan.batch[i]
    plan.members[old] -= 1
    if plan.members[old] == 0:
        for y in range(plan.counts[p]):
            if plan.order[p, y] == old:
                closed(plan.order[p], plan.counts[p], y)
                plan.counts[p] -= 1
                break
    if m < 0:
        # An empty one
        m = int(np.argmin(plan.members))
        opened(plan.order[q], plan.counts[q], x, m)
        plan.counts[q] += 1
    plan.members[m] += 1
    plan.placed[i] = q
    plan.batch[i] = m


@compiled
def try_orders(p: int, best: float, plan: PartialAssignment, given: Sequences) -> bool:
    order = plan.order[p]
    for x in range(plan.counts[p] - 1):
        for y in range(x + 1, plan.counts[p]):
            order[x], order[y] = order[y], order[x]
            end = end_with(p, order, plan.counts[p], plan, given)
            if end < best:
                plan.ends[p] = end
                return True
            order[x], order[y] = order[y], order[x]
    return False


@compiled
def try_swaps(i: int, p: int, best: float, plan: PartialAssignment, given: Sequences) -> bool:
    n = len(plan.placed)
    own = plan.batch[i]
    order = plan.trial[0]
    for k in range(i + 1, n):
        other = plan.batch[k]
        # Sequences are sorted: only k > i are shorter. Each pair is tried once.
        if plan.placed[k] != p or other == own or given.lengths[k] == given.lengths[i]:
            continue
        if not changed_batch(other, 1, p, k, i, plan, given):
            continue
        changed_batch(own, 0, p, i, k, plan, given)
        for x in range(plan.counts[p]):
            m = plan.order[p, x]
            order[x] = n if m == own else n + 1 if m == other else m
        if end_with(p, order, plan.counts[p], plan, given) < best:
            plan.batch[i] = other
            plan.batch[k] = own
            return True
    return False


@compiled
def least_with(i: int, k: int, q: int, plan: PartialAssignment, given: Sequences) -> float:
    """Return a lower bound on pipeline q's busiest stage with sequence i but without k (-1: none)."""
    seconds = given.terms.seconds[given.kind_of[q]]
    reaches = given.terms.reaches
    most = 0.0
    length = given.lengths[i]
    squares = length * length
    if k >= 0:
        length -= given.lengths[k]
        squares -= given.lengths[k] * given.lengths[k]
    # With several kinds of ranks, the slowest determines a stage's time, not differences of sums.
    if seconds.shape[1] > 1:
        return 0.0
    for s in range(given.terms.stages[given.kind_of[q]]):
        added = 0.0
        for part in range(AHEAD):
            added += seconds[s, 0, part, 0] * squares + seconds[s, 0, part, 1] * length
            for w in range(len(reaches)):
                pairs = pairs_of(reaches[w, 0], reaches[w, 1], given.lengths[i])
                if k >= 0:
                    pairs -= pairs_of(reaches[w, 0], reaches[w, 1], given.lengths[k])
                added += seconds[s, 0, part, 3 + w] * pairs
        most = max(most, plan.busy[q, s] + added)
    return most


@compiled
def try_leaving(i: int, p: int, best: float, horizon: float, plan: PartialAssignment, given: Sequences) -> bool:
    """Move sequence i from pipeline p to one that ends by `horizon`, if both then end before `best`."""
    count = without(i, p, plan, given)
    if end_with(p, plan.trial[0], count, plan, given) >= best:
        return False
    order = plan.trial[1]
    for q in range(len(plan.ends)):
        if q == p or plan.ends[q] > horizon or plan.ends[q] >= best:
            continue
        if given.lengths[i] > given.max_len[given.kind_of[q]] or least_with(i, -1, q, plan, given) >= best:
            continue
        order[: plan.counts[q]] = plan.order[q, : plan.counts[q]]
        if try_places(i, q, order, plan.counts[q], best, plan, given):
            return True
    return False


@compiled
def try_trades(i: int, p: int, best: float, horizon: float, plan: PartialAssignment, given: Sequences) -> bool:
    n = len(plan.placed)
    own = plan.batch[i]
    mine = plan.trial[0]
    for x in range(plan.counts[p]):
        mine[x] = n if plan.order[p, x] == own else plan.order[p, x]
    theirs = plan.trial[1]
    for k in range(i + 1, n):
        q = plan.placed[k]
        if q == p or plan.ends[q] > horizon or plan.ends[q] >= best or given.lengths[k] == given.lengths[i]:
            continue
        if least_with(i, k, q, plan, given) >= best:
            continue
        if not changed_batch(own, 0, p, i, k, plan, given) or not changed_batch(plan.batch[k], 1, q, k, i, plan, given):
            continue
        if end_with(p, mine, plan.counts[p], plan, given) >= best:
            continue
        for x in range(plan.counts[q]):
            theirs[x] = n + 1 if plan.order[q, x] == plan.batch[k] else plan.order[q, x]
        if end_with(q, theirs, plan.counts[q], plan, given) < best:
            plan.batch[i] = plan.batch[k]
            plan.batch[k] = own
            plan.placed[i] = q
            plan.placed[k] = p
            return True
    return False


@compiled
def improve_once(p: int, gain: float, plan: PartialAssignment, given: Sequences, tasks: int, changed: Bools) -> bool:
    """Take the first step that speeds up pipeline p; mark changed pipelines."""
    # Steps by number of simulations: reorder, leave, move, trade, swap.
    best = plan.ends[p] * (1.0 - gain)
    if try_orders(p, best, plan, given):
        return True
    n = len(plan.placed)
    # Only the first NEAR pipelines to end receive sequences; the others are nearly as late as p.
    horizon = np.sort(plan.ends)[NEAR - 1] if len(plan.ends) > NEAR else np.inf
    changed[p] = True
    for step in range(4):
        for i in range(n):
            if plan.placed[i] != p:
                continue
            if plan.spent[0] > tasks:
                changed[p] = False
                return False
            if step == 0:
                improved = try_leaving(i, p, best, horizon, plan, given)
            elif step == 1:
                improved = try_places(i, p, plan.trial[0], without(i, p, plan, given), best, plan, given)
            elif step == 2:
                improved = try_trades(i, p, best, horizon, plan, given)
            else:
                improved = try_swaps(i, p, best, plan, given)
            if improved:
                changed[plan.placed[i]] = True
                return True
    changed[p] = False
    return False


@compiled
def descend(plan: PartialAssignment, given: Sequences, tasks: int, enough: float) -> float:
    """Improve `plan` until no step helps, `tasks` actions are simulated, or the last pipeline ends by `enough`."""
    changed = np.zeros(len(plan.ends), np.bool_)
    # Large gains first: each saves many simulations of small ones.
    for gain in GAINS:
        while plan.spent[0] <= tasks:
            p = np.argmax(plan.ends)
            if plan.ends[p] <= enough or not improve_once(p, gain, plan, given, tasks, changed):
                break
            recount(plan, given, changed)
    return float(plan.ends.max())


@compiled
def throw(plan: PartialAssignment, given: Sequences, changed: Bools) -> None:
    """Move a random sequence, or swap two micro-batches; mark changed pipelines."""
    i = np.random.randint(len(plan.placed))
    # Half of the moves stay in the pipeline and change only its micro-batches.
    p = plan.placed[i] if np.random.random() < 0.5 else np.random.randint(len(plan.ends))
    if np.random.random() < 0.25 and plan.counts[p] > 1:
        x = np.random.randint(plan.counts[p])
        y = np.random.randint(plan.counts[p])
        plan.order[p, x], plan.order[p, y] = plan.order[p, y], plan.order[p, x]
        changed[p] = True
        return
    most = given.max_len[given.kind_of[p]]
    if given.lengths[i] > most:
        return
    old = plan.placed[i]
    own = plan.batch[i]
    alone = plan.members[own] == 1
    there = plan.counts[p] - (1 if alone and old == p else 0)
    # x < there: an existing micro-batch; else a new one at position x - there.
    x = np.random.randint(2 * there + 1)
    if x < there:
        m = plan.order[p, x]
        if m == own or given.lengths[plan.batch == m].sum() + given.lengths[i] > most:
            return
        relocate(i, p, m, 0, plan)
    elif there < plan.order.shape[1]:
        relocate(i, p, -1, x - there, plan)
    changed[old] = True
    changed[p] = True


@compiled
def improve(
    placed: Ints,
    batch: Ints,
    order: Ints,
    count: Ints,
    given: Sequences,
    kicks: int,
    tasks: int,
    enough: float,
    seed: int,
) -> float:
    """Improve an assignment in place by iterated local search; return the last pipeline's end time."""
    np.random.seed(seed)
    plan = plan_of(placed, batch, order, count, given)
    current = descend(plan, given, tasks, enough)
    best = current
    kept = copied(plan)
    best_assignment = kept
    changed = np.zeros(len(plan.ends), np.bool_)
    # A random move may be worse; it is kept only if the descent then ends no later.
    for _ in range(kicks):
        if best <= enough or plan.spent[0] > tasks:
            break
        for _ in range(2 + np.random.randint(4)):
            throw(plan, given, changed)
        recount(plan, given, changed)
        end = descend(plan, given, tasks, enough)
        if end <= current:
            current = end
            kept = copied(plan)
            if end < best:
                best = end
                best_assignment = kept
        else:
            restore(plan, kept)
            changed[:] = True
            recount(plan, given, changed)
    restore(plan, best_assignment)
    return float(best)


@compiled
def copied(plan: PartialAssignment) -> tuple[Ints, Ints, Ints, Ints]:
    return plan.placed.copy(), plan.batch.copy(), plan.order.copy(), plan.counts.copy()


@compiled
def restore(plan: PartialAssignment, kept: tuple[Ints, Ints, Ints, Ints]) -> None:
    """Copy `kept` into the plan; the caller must then call `recount`."""
    plan.placed[:] = kept[0]
    plan.batch[:] = kept[1]
    plan.order[:] = kept[2]
    plan.counts[:] = kept[3]
    plan.members[:] = 0
