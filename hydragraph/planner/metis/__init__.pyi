"""The names of the package; at run time each is imported when first used."""

from hydragraph.planner.metis.cluster import Cluster as Cluster
from hydragraph.planner.metis.cluster import DeviceType as DeviceType
from hydragraph.planner.metis.pricing import cost as cost
from hydragraph.planner.metis.pricing import parts as parts
from hydragraph.planner.metis.problem import Plan as Plan
from hydragraph.planner.metis.problem import Problem as Problem
from hydragraph.planner.metis.profile import Measurement as Measurement
from hydragraph.planner.metis.profile import Profile as Profile
from hydragraph.planner.metis.searching import Found as Found
from hydragraph.planner.metis.searching import Order as Order
from hydragraph.planner.metis.searching import search as search
