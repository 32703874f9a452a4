"""What every rank of a test starts with: imported by the process that ranks are forked from.

The first tracing and differentiation fill tables inside PyTorch for seconds. Here they do so once, without computing
anything: a process that computes has threads, and must not be forked.
"""

from __future__ import annotations

import threading

from tqdm import tqdm

from hydragraph.frontend.capture import capture
from hydragraph.passes.shard import Degree
from hydragraph.runtime.variants import Variants
from tests.models import llama

tqdm.monitor_interval = 0  # `torch.fx.Interpreter` makes a bar that nobody sees, and that would start a thread

_program = capture(llama())
_variants = Variants(_program)
for _block in _program.blocks:
    _variants.get(_block, Degree(2, 0, sequence_parallel=True))

assert threading.active_count() == 1, f"ranks would be forked from a process with threads: {threading.enumerate()}"
