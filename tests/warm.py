"""What every rank of a test starts with: imported by the process that ranks are forked from.

The first tracing and differentiation fill tables inside PyTorch for seconds, and most tests of the runtime need one
small Llama. Here both happen once, without computing anything: a process that computes has threads, and must not be
forked.
"""

from __future__ import annotations

import threading

from tqdm import tqdm

from tests.models import llama
from tests.ready import Ready

tqdm.monitor_interval = 0  # `torch.fx.Interpreter` makes a bar that nobody sees, and that would start a thread

LLAMA = Ready.of(llama(layers=2), ["<[0,1]x1s,[2]x1>", "<[2]x1,[1,0]x1>"])

assert threading.active_count() == 1, f"ranks would be forked from a process with threads: {threading.enumerate()}"
