"""Config of checkpoint pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hydragraph.train.field_checks import check_fields, check_text


def _check_unexpanded(name: str, value: object) -> None:
    # `~` is expanded on each machine
    check_text(name, value)


@dataclass(frozen=True)
class PiecesConfig:
    """Places near the ranks where the state is saved in pieces, in addition to checkpoints in the run folder.

    After a rank is lost, each rank reads the pieces it needs from the nearest place that has them: its own memory, its
    machine's disk, another machine, or the shared directory (AutoHet, "accelerated recovery").

    Attributes:
        local: a directory on each machine's own disk, or null. `~` and environment variables, as in
            $SLURM_TMPDIR/pieces, are expanded on each machine.
        peers: store the pieces in each rank's host memory; with AdamW, this takes 24 bytes per owned parameter, and up
            to 48 while a checkpoint is taken.
        shared: a directory that all machines share, a URL such as s3://bucket/pieces (s3:// needs s3fs, and gs:// needs
            gcsfs), or null.
    """

    local: Annotated[str, _check_unexpanded] | None = None
    peers: bool = True
    shared: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.local is None and self.shared is None and not self.peers:
            raise ValueError("'peers' is false, and 'local' and 'shared' are not set: set one, or omit 'pieces'")
