"""The exact end of a pipeline with unequal stages and messages that take time.

`stage_ends` is for messages that travel during computation, `exchanged_end` for blocking ones.
"""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[float]]  # [stages, micro-batches]


def pipeline_end(early: Rows, forward: Rows, backward: Rows, ahead: Rows, back: Rows, schedule: str = "1f1b") -> float:
    """Return when the last backward ends; arguments as for `stage_ends`."""
    return max(stage_ends(early, forward, backward, ahead, back, schedule), default=0.0)


def stage_ends(
    early: Rows, forward: Rows, backward: Rows, ahead: Rows, back: Rows, schedule: str = "1f1b"
) -> list[float]:
    """Return when the last backward of each stage ends.

    A stage s of S runs min(S - 1 - s, V) forwards, then a forward and a backward in turn, then the remaining backwards;
    under GPipe all forwards come first. A forward waits for its own on the stage before, a backward for its own on the
    stage after, and both for the message from there.

    Args:
        early: seconds of what a stage computes before a forward without waiting for its message [S][V].
        forward, backward: seconds of each micro-batch on each stage, in the order in which they run [S][V].
        ahead: seconds of a hidden state from each stage to the next [S - 1][V].
        back: seconds of its gradient, from stage s + 1 to s [S - 1][V].
        schedule: "1f1b" or "gpipe".
    """
    stages = len(forward)
    count = len(forward[0]) if forward else 0
    if not count:
        return [0.0] * stages
    ends_f: list[list[float]] = [[] for _ in range(stages)]
    ends_b: list[list[float]] = [[] for _ in range(stages)]
    clock = [0.0] * stages
    left = 2 * stages * count
    # As in `planner.one_f_one_b`: each stage continues until it waits for a neighbour, round after round.
    while left:
        for s in range(stages):
            # GPipe is 1F1B that may be any number of forwards ahead.
            most = count if schedule == "gpipe" else min(stages - s, count)
            mine_f = ends_f[s]
            mine_b = ends_b[s]
            now = clock[s]
            while len(mine_b) < count:
                m = len(mine_f)
                if m < count and m - len(mine_b) < most:
                    if s and len(ends_f[s - 1]) <= m:
                        break
                    # Auxiliary values need no message, so they are computed while it is still in flight.
                    now += early[s][m]
                    if s:
                        now = max(now, ends_f[s - 1][m] + ahead[s - 1][m])
                    now += forward[s][m]
                    mine_f.append(now)
                else:
                    m = len(mine_b)
                    if s < stages - 1:
                        if len(ends_b[s + 1]) <= m:
                            break
                        now = max(now, ends_b[s + 1][m] + back[s][m])
                    now += backward[s][m]
                    mine_b.append(now)
                left -= 1
            clock[s] = now
    return clock


def exchanged_end(
    forward: Rows, backward: Rows, ahead: Rows, back: Rows, buffered: Sequence[Sequence[tuple[bool, bool]]]
) -> float:
    """Return when the last backward ends of a 1F1B pipeline whose neighbours exchange between computations.

    Stage s of S computes the forward of micro-batch m in slot 2 m + s, and its backward in slot 2 m + 2 S - 1 - s, so
    the neighbour of a stage in a forward is in a backward. Before its forward, stage s + 1 sends the last gradient
    back, then receives the next hidden state (DeepSpeed, TrainSchedule). Both ends are occupied from a message's begin
    to its end, except that the sender of a buffered message continues immediately.

    Example, S = 2, V = 1, forward 1, backward 2, messages 3: 1 + 3 + (1 + 2) + 3 + 2 = 12.

    Args:
        forward, backward: seconds of each micro-batch on each stage, in the order in which they run [S][V].
        ahead: seconds of a hidden state from each stage to the next [S - 1][V].
        back: seconds of its gradient, from stage s + 1 to s [S - 1][V].
        buffered: whether hidden state and gradient are buffered [S - 1][V].
    """
    stages = len(forward)
    count = len(forward[0]) if forward else 0
    clock = [0.0] * stages

    def give(sender: int, receiver: int, seconds: float, on: bool) -> None:
        end = max(clock[sender], clock[receiver]) + seconds
        clock[receiver] = end
        if not on:
            clock[sender] = end

    for slot in range(2 * (count + stages - 1)):
        for s in range(stages - 1):
            came, odd = divmod(slot - s - 1, 2)
            if odd:
                continue
            gone = (slot + s + 1) // 2 - stages
            if 0 <= gone < count:
                give(s + 1, s, back[s][gone], buffered[s][gone][1])
            if 0 <= came < count:
                give(s, s + 1, ahead[s][came], buffered[s][came][0])
        for s in range(stages):
            m, odd = divmod(slot - s, 2)
            if not odd and 0 <= m < count:
                clock[s] += forward[s][m]
            m, odd = divmod(slot + s + 1, 2)
            if not odd and 0 <= m - stages < count:
                clock[s] += backward[s][m - stages]
    return max(clock, default=0.0)
