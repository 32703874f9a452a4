"""Names of the package for type checkers."""

import collections.abc
import typing

from hydragraph.checkpoint.state_pieces import Pieces as Pieces
from hydragraph.cluster.launch import launch as launch
from hydragraph.cost.corrections import Corrections as Corrections
from hydragraph.cost.costs import Costs as Costs
from hydragraph.cost.measured_profile import Profile as Profile
from hydragraph.engine.api import RankPrograms as RankPrograms
from hydragraph.engine.api import capture as capture
from hydragraph.engine.api import compile as compile
from hydragraph.engine.api import lower as lower
from hydragraph.engine.api import precompile as precompile
from hydragraph.engine.api import simulate as simulate
from hydragraph.engine.executable import Executable as Executable
from hydragraph.engine.recovery import Survived as Survived
from hydragraph.engine.recovery import survive as survive
from hydragraph.engine.state_transfer import Moved as Moved
from hydragraph.engine.step_report import StepReport as StepReport
from hydragraph.errors import RankFailure as RankFailure
from hydragraph.errors import Stopped as Stopped
from hydragraph.errors import TooFewRanks as TooFewRanks
from hydragraph.errors import Unsupported as Unsupported
from hydragraph.frontend.packed_inputs import token_logprobs as token_logprobs
from hydragraph.ir.program import Program as Program
from hydragraph.kernels.adamw import AdamW as AdamW
from hydragraph.kernels.attention_backends import attention_backend as attention_backend
from hydragraph.kernels.varlen_attention import varlen_attention as varlen_attention
from hydragraph.planner.plan import Plan as Plan
from hydragraph.planner.plan import plan as plan
from hydragraph.planner.policy import Policy as Policy
from hydragraph.report.measured_beside_predicted import compare as compare
from hydragraph.spec.assignment import Assignment as Assignment
from hydragraph.spec.cluster import Cluster as Cluster
from hydragraph.spec.elastic import Elastic as Elastic
from hydragraph.spec.health import Health as Health
from hydragraph.spec.home import Home as Home
from hydragraph.spec.pipeline import Pipeline as Pipeline
from hydragraph.spec.pipeline import Stage as Stage
from hydragraph.spec.strategy import Strategy as Strategy
from hydragraph.spec.training_workload import Workload as Workload
from hydragraph.version import __version__ as __version__

def attributes(package: str, where: collections.abc.Mapping[str, str]) -> tuple[list[str], typing.Any, typing.Any]: ...
