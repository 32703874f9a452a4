"""Config of checkpoints in pieces near the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.train.field_checks import check_fields


@dataclass(frozen=True)
class PiecesConfig:
    """Where the state is also kept close to the ranks, in pieces, besides the checkpoints in the run folder.

    After a loss each rank reads its part from the nearest place that has it: its memory, its machine's disk, another
    machine, then the shared place (AutoHet, "accelerated recovery").

    Attributes:
        local: a directory on each machine's own disk; `~` and environment variables, as in $SLURM_TMPDIR/pieces, are
            expanded on each machine. null: none.
        peers: also keep the pieces in the memory of each rank; takes 24 bytes of host memory per parameter that a rank
            owns (with AdamW).
        shared: a directory that all machines share, or a URL such as s3://bucket/pieces (needs s3fs, gs:// gcsfs);
            null: none.
    """

    local: str | None = None
    peers: bool = True
    shared: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.local is None and self.shared is None and not self.peers:
            raise ValueError("peers is false, and neither local nor shared is given: name a place, or leave pieces out")
