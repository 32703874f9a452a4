"""The names of the package; at run time each is imported when first used."""

from hydragraph.api import RankPrograms as RankPrograms
from hydragraph.api import capture as capture
from hydragraph.api import compile as compile
from hydragraph.api import lower as lower
from hydragraph.api import precompile as precompile
from hydragraph.api import simulate as simulate
from hydragraph.cost.costs import Costs as Costs
from hydragraph.cost.profile import Profile as Profile
from hydragraph.errors import RankFailure as RankFailure
from hydragraph.errors import Unsupported as Unsupported
from hydragraph.executable import Executable as Executable
from hydragraph.executable import StepReport as StepReport
from hydragraph.ir.program import Program as Program
from hydragraph.kernels.adamw import AdamW as AdamW
from hydragraph.kernels.attention_backends import attention_backend as attention_backend
from hydragraph.kernels.varlen_attention import varlen_attention as varlen_attention
from hydragraph.planner.policy import Policy as Policy
from hydragraph.runtime.launch import launch as launch
from hydragraph.spec.assignment import Assignment as Assignment
from hydragraph.spec.cluster import Cluster as Cluster
from hydragraph.spec.health import Health as Health
from hydragraph.spec.home import Home as Home
from hydragraph.spec.strategy import Pipeline as Pipeline
from hydragraph.spec.strategy import Stage as Stage
from hydragraph.spec.strategy import Strategy as Strategy
from hydragraph.version import __version__ as __version__
