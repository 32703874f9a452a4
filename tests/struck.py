"""The rank that a fault strikes, seen from inside: it waits for its moment, says so, and does what only it can do.

`order` travels in the environment of a run. The launcher's process runs `train_rank` of this module in the place of
the command's own; every rank except the target continues with that.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hydragraph.commands import train
from hydragraph.engine import api
from hydragraph.engine.executable import Executable
from hydragraph.train import run_saving, step_reporting
from tests.faults import Moment

ORDER = "HYDRAGRAPH_TEST_ORDER"
COMPUTES_S = 12.0
# Where errors are raised. Not in the frontend, which tries another way where one fails.
_RAISING = (
    "hydragraph.runtime.",
    "hydragraph.cluster.",
    "hydragraph.checkpoint.",
    "hydragraph.train.",
    "hydragraph.engine.",
    "hydragraph.data.",
)

_genuine = train.train_rank  # what ranks run; in the launcher's process this module's own takes its place


class Struck(RuntimeError):  # noqa: N818
    """Error that a struck rank raises."""


@dataclass(frozen=True)
class Order:
    """When and how a rank is struck.

    Attributes:
        rank: which.
        moment: by the value of a `Moment`.
        occurrence: of that moment, from 1.
        delay_s: after it began.
        act: a key of `ACTS`; "": somebody else acts once the notice is there.
        notice: a file that appears when the moment has come; the rank is struck only once, restarted or not.
    """

    rank: int
    moment: str
    occurrence: int
    delay_s: float
    act: str
    notice: str

    def text(self) -> str:
        """Write it as the environment has it."""
        return json.dumps(asdict(self))

    def announce(self) -> None:
        """Say that the moment has come, and to whom."""
        partial = Path(f"{self.notice}.partial")
        partial.write_text(str(os.getpid()))
        Path(f"{self.notice}.stack").write_text("".join(traceback.format_stack()))
        partial.rename(self.notice)


def train_rank(*arguments: Any) -> Any:
    """Train on this rank, and be struck if it is meant; without the optional packages that take a run's seconds."""
    run_saving.matplotlib_installed = step_reporting.matplotlib_installed = lambda: False
    step_reporting.tensorboard_installed = lambda: False
    text = os.environ.get(ORDER)
    order = None if text is None else Order(**json.loads(text))
    if order is not None and int(os.environ.get("RANK", "0")) == order.rank and not Path(order.notice).exists():
        _arm(order)
    return _genuine(*arguments)


def _arm(order: Order) -> None:
    """Have the rank struck when its moment comes."""
    moment, left = Moment(order.moment), itertools.count(order.occurrence - 1, -1)
    if moment is Moment.STARTING:
        _strike_later(order)
        return
    where: dict[Moment, tuple[Any, str]] = {
        Moment.COMPILING: (api, "compile"),
        Moment.STEPPING: (Executable, "step"),
        Moment.SAVING: (Executable, "save"),
        Moment.EVALUATING: (Executable, "evaluate"),
        Moment.CLOSING: (Executable, "full_state_dict"),
    }
    owner, name = where[moment]
    genuine = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        if next(left) == 0:
            _strike_later(order)
        return genuine(*arguments, **named)

    setattr(owner, name, watched)


def _strike_later(order: Order) -> None:
    act = ACTS[order.act]
    main = threading.main_thread()

    def wait() -> None:
        time.sleep(order.delay_s)
        if main.is_alive():
            order.announce()
            act()

    if act in (_raise, _interrupt):
        _Raiser(order, Struck("by a test") if act is _raise else KeyboardInterrupt()).begin()
    else:
        threading.Thread(target=wait, name="fault", daemon=True).start()


class _Raiser:
    """Raises an error in the main thread at a call of one of hydragraph's own functions, once a delay is over."""

    def __init__(self, order: Order, error: BaseException) -> None:
        self._order, self._error, self._due = order, error, time.monotonic() + order.delay_s
        self._skip = random.Random(order.delay_s).randrange(20)  # calls, so that it is not always the same function

    def begin(self) -> None:
        """Watch the calls of this thread from now on."""
        sys.setprofile(self._call)

    def _call(self, frame: FrameType, event: str, _: object) -> None:
        # Not where a context manager or an iterator is only resumed, or an object is finalised: errors end there.
        code = frame.f_code
        if event != "call" or time.monotonic() < self._due:
            return
        if not frame.f_globals.get("__name__", "").startswith(_RAISING):
            return
        if code.co_name.startswith("__") or code.co_flags & 0x20:  # CO_GENERATOR
            return
        if self._skip:
            self._skip -= 1
            return
        sys.setprofile(None)
        self._order.announce()
        raise self._error


def _nothing() -> None:
    pass


def _exit() -> None:
    os._exit(3)


def _raise() -> None:
    raise AssertionError("raised in the main thread")


def _interrupt() -> None:
    raise AssertionError("raised in the main thread")


def _compute() -> None:
    """Compute in one call of C, which keeps the interpreter to itself."""
    count = 10_000_000
    began = time.monotonic()
    sum(itertools.repeat(1, count))
    sum(itertools.repeat(1, int(count * COMPUTES_S / (time.monotonic() - began))))


ACTS: dict[str, Callable[[], None]] = {
    "": _nothing,
    "exits": _exit,
    "raises": _raise,
    "interrupted": _interrupt,
    "computes": _compute,
}
