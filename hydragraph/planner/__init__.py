"""What to run next: which strategy, and which pipeline computes which sequences in which micro-batch.

No module here imports torch.distributed or the runtime; numba compiles the search when it is first used, once per
installation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydragraph.planner.assigning import PlannedAssignment, assign
    from hydragraph.planner.choosing import Choice, Verdict, choose, compare
    from hydragraph.planner.dispatching import Dispatch, dispatch
    from hydragraph.planner.packing import Packing, pack
    from hydragraph.planner.proposing import propose
    from hydragraph.planner.refining import homogeneous, refine

# name -> module: imported when first used, so that a rank that does not plan needs neither numba nor scipy
_WHERE = {
    "Choice": "choosing",
    "Dispatch": "dispatching",
    "Packing": "packing",
    "PlannedAssignment": "assigning",
    "Verdict": "choosing",
    "assign": "assigning",
    "choose": "choosing",
    "compare": "choosing",
    "dispatch": "dispatching",
    "homogeneous": "refining",
    "pack": "packing",
    "propose": "proposing",
    "refine": "refining",
}
__all__ = [
    "Choice",
    "Dispatch",
    "Packing",
    "PlannedAssignment",
    "Verdict",
    "assign",
    "choose",
    "compare",
    "dispatch",
    "homogeneous",
    "pack",
    "propose",
    "refine",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
