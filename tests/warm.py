"""What every rank of a test starts with: imported by the process that ranks are forked from.

The first capture fills tables inside PyTorch and imports SymPy's for a second, and the first compiled function fills
numba's. Here it happens once, without computing anything, since a process that computes has threads, and without a
backward: a process that ran one must not be forked.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

from numba.core.registry import cpu_target
from tqdm import tqdm

import hydragraph as hg
from hydragraph.frontend.check import check_once
from hydragraph.train import run_saving
from hydragraph.train.loss_picture import write_picture
from tests.commands.tiny import DRAWN
from tests.models import llama

check_once.AUTO = "off"  # as in tests/in_each_worker.py


def _draw_if_asked(*given: Any) -> None:
    if DRAWN in os.environ:
        write_picture(*given)


mock.patch.object(run_saving, "write_picture", _draw_if_asked).start()
tqdm.monitor_interval = 0  # `torch.fx.Interpreter` makes an invisible progress bar, which would start a thread

_threads = threading.active_count()  # pytest-xdist has one

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
with mock.patch("hydragraph.frontend.capture.path_of", return_value=None):  # to read a cached program fills no tables
    hg.capture(llama(layers=2))

assert threading.active_count() == _threads, (
    f"ranks would be forked from a process with threads: {threading.enumerate()}"
)
