"""The names of the package; at run time each is imported when first used."""

from hydragraph.planner.assigning import PlannedAssignment as PlannedAssignment
from hydragraph.planner.assigning import assign as assign
from hydragraph.planner.choosing import Choice as Choice
from hydragraph.planner.choosing import Verdict as Verdict
from hydragraph.planner.choosing import choose as choose
from hydragraph.planner.choosing import compare as compare
from hydragraph.planner.dispatching import Dispatch as Dispatch
from hydragraph.planner.dispatching import dispatch as dispatch
from hydragraph.planner.packing import Packing as Packing
from hydragraph.planner.packing import pack as pack
from hydragraph.planner.proposing import propose as propose
from hydragraph.planner.refining import homogeneous as homogeneous
from hydragraph.planner.refining import refine as refine
