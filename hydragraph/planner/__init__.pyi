"""Names of the package, each imported at run time when first used."""

from hydragraph.planner.assign_schemes import assign as assign
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment as PlannedAssignment
from hydragraph.planner.assignment.best_candidate import Choice as Choice
from hydragraph.planner.assignment.best_candidate import Verdict as Verdict
from hydragraph.planner.assignment.best_candidate import compare as compare
from hydragraph.planner.generators.hydraulis import propose as propose
from hydragraph.planner.improve_schemes import homogeneous as homogeneous
from hydragraph.planner.improve_schemes import refine as refine
