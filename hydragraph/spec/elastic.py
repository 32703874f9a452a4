"""Settings for lost ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.spec.argument_types import check_types


@dataclass(frozen=True)
class Elastic:
    """How a launch handles lost ranks.

    Attributes:
        min_ranks: the run ends if fewer ranks are left.
        spares: number of standby processes that can replace a lost rank.
        rejoin: whether to start a new process for a lost rank.
        grace_s: seconds in which a rank must send its state to others after SIGTERM.
        progress_s: seconds in which a process must join the rendezvous after a loss; otherwise, the launcher ends it.
            New processes may take three times as long.
    """

    min_ranks: int = 1
    spares: int = 0
    rejoin: bool = True
    grace_s: float = 30.0
    # Longer than any instruction takes
    progress_s: float = 600.0

    def __post_init__(self) -> None:
        check_types("", vars(self), Elastic)
        for name, least in (("min_ranks", 1), ("spares", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name!r} is {value!r}: give a whole number of at least {least}")
        for name in ("grace_s", "progress_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name!r} is {getattr(self, name)!r}: give seconds above 0")
