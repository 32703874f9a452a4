"""File `slow.json`: slow ranks by member number (`cluster.rendezvous`), for a new leading rank.

{"began": 1795559384.0, "members": {"3": {"device": 12.5, "core": 1.0, "learned": [12.5, 22.8]}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hydragraph.data.atomic_write import write_whole
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.stragglers.straggler_state import LearnedSlowdown, SlowRank


def write_slow(folder: RunFolder, slow: Mapping[int, SlowRank]) -> None:
    members = {str(member): asdict(straggler) for member, straggler in sorted(slow.items())}
    write_whole(folder.slow, json.dumps({"began": folder.began, "members": members}) + "\n")


def read_slow(folder: RunFolder, began: float | None) -> dict[int, SlowRank]:
    """Return slow ranks by member number; empty if this run has no such file."""
    try:
        written = json.loads(folder.slow.read_text(encoding="utf-8"))
        if written["began"] != began:
            return {}
        return {int(member): _read(record) for member, record in written["members"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _read(each: Mapping[str, Any]) -> SlowRank:
    learned = each["learned"]
    if learned is not None:
        learned = LearnedSlowdown(*map(float, learned))
    return SlowRank(float(each["device"]), float(each["core"]), learned)
