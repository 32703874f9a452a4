"""What to run next: which strategy, and which pipeline computes which sequences in which micro-batch.

No module here imports torch.distributed or the runtime.
"""

from hydragraph.planner.assigning import PlannedAssignment, assign
from hydragraph.planner.choosing import Choice, Verdict, choose, compare
from hydragraph.planner.dispatching import Dispatch, dispatch
from hydragraph.planner.packing import Packing, pack
from hydragraph.planner.proposing import propose

__all__ = [
    "Choice", "Dispatch", "Packing", "PlannedAssignment", "Verdict",
    "assign", "choose", "compare", "dispatch", "pack", "propose",
]  # fmt: skip
