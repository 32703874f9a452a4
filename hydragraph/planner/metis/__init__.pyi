"""The names of the package; at run time each is imported when first used."""

from hydragraph.planner.metis.cluster import Cluster as Cluster
from hydragraph.planner.metis.cluster import DeviceType as DeviceType
from hydragraph.planner.metis.metis_cost import cost as cost
from hydragraph.planner.metis.metis_cost import parts as parts
from hydragraph.planner.metis.metis_search import Found as Found
from hydragraph.planner.metis.metis_search import Order as Order
from hydragraph.planner.metis.metis_search import search as search
from hydragraph.planner.metis.problem import Plan as Plan
from hydragraph.planner.metis.problem import Problem as Problem
from hydragraph.planner.metis.profile import Measurement as Measurement
from hydragraph.planner.metis.profile import Profile as Profile
