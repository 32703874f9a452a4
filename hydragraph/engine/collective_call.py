"""Rules for methods of an executable that all ranks must call together."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from hydragraph.cluster.failure.rank_watch import RankWatch
from hydragraph.engine.state_transfer import parts
from hydragraph.engine.step_agreement import AgreedStep
from hydragraph.private.torch_modes import own_modes

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="CollectiveCalls")

ENDS = ("close", "leave")


@dataclass(frozen=True)
class Restriction:
    """Calls allowed inside an executable's loop or context, and why others are refused."""

    calls: tuple[str, ...]
    why: str


class CollectiveCalls:
    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch
        self._lock = threading.RLock()
        self._innermost = ""
        self._closed = False
        self._restricted: Restriction | None = None
        # Next step, if the ranks have agreed on it
        self._promised: AgreedStep | None = None

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ValueError(f"{what}: another thread is in {self._innermost}; make one call at a time")
        before, self._innermost = self._innermost, what
        try:
            yield
        finally:
            self._innermost = before
            self._lock.release()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ValueError(f"{what}: this executable is closed; call {what} before close(), or compile again")

    def _admit(self, what: str) -> None:
        self._check_open(what)
        if self._promised is not None and what not in ("step", "move"):
            raise ValueError(f"{what}: the ranks agreed on the step given to `promise`; call `step` first")
        if self._restricted is not None and what not in self._restricted.calls:
            raise ValueError(f"{what}: {self._restricted.why}")


def collective(what: str) -> Callable[[Callable[Concatenate[C, P], T]], Callable[Concatenate[C, P], T]]:
    """Make a method a collective call that ignores torch modes and fails after `close`.

    Wrong arguments raise an error, but do not count as a rank's failure.
    """

    def wrap(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
        signature = inspect.signature(method)

        def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                # Check arguments before entering the watch: a typing mistake must not
                # count as this rank's failure.
                arguments = signature.bind(self, *args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{what}: {error}") from None
            if what == "load":
                parts(arguments["path"])
            for name in ("path", "directory"):
                if name in arguments and what != "load" and not isinstance(arguments[name], (str, os.PathLike)):
                    raise TypeError(
                        f"{what}: {name!r} is {arguments[name]!r}; give a path, as a string or a pathlib.Path"
                    )
            if not isinstance(arguments.get("extra") or {}, dict):
                raise TypeError(f"{what}: 'extra' is {arguments['extra']!r}; give a dictionary")
            with self._alone(what):
                self._admit(what)
                with own_modes(what), self._watch.calling(what):
                    return method(self, *args, **kwargs)

        functools.update_wrapper(call, method)
        return call

    return wrap
