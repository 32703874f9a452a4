"""Supervisor of a machine that does not lead: it starts and ends processes as ordered, and reports their outcomes."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hydragraph import log
from hydragraph.cluster.processes.launched_ranks import (
    Context,
    RankHandle,
    Stops,
    dismiss,
    forget,
    start,
    wait_for_outcomes,
)
from hydragraph.cluster.processes.rank_process import Returned, run_member
from hydragraph.cluster.processes.restart_cache import KEPT
from hydragraph.cluster.supervision.coordinator import (
    BEAT_S,
    Back,
    Ended,
    Kill,
    Leaving,
    Link,
    Nodes,
    Over,
    Peers,
    ProbeAddress,
    Start,
    Stop,
    Unheard,
    host_of,
    reach,
)
from hydragraph.cluster.supervision.link_probe import LinkProbe
from hydragraph.errors import EndedElsewhere

_LOG = logging.getLogger(__name__)

ARRIVAL_S = 1800.0  # for the first node to start
BACK_S = 300.0  # for reconnecting to it
_TRY_S = 0.5  # between two attempts to reach it
_TOGETHER_S = 1.0  # a stop request to all machines reaches the leader within this time


@dataclass(eq=False)
class Deputy:
    """Starts, watches and ends the processes of one machine."""

    _context: Context
    _nodes: Nodes
    _say: Callable[[str], None]
    _asked_at: float | None = None
    _told: bool = False
    _stopping: bool = False
    _back: bool = False
    _crew: dict[int, RankHandle] = field(default_factory=dict)
    _probe: LinkProbe | None = None

    def run(self, arrival_s: float = ARRIVAL_S, back_s: float = BACK_S) -> None:
        """Serve until the run ends or this machine is taken away.

        Args:
            arrival_s, back_s: seconds to wait for the leader at first, and after the connection is lost.

        Raises:
            EndedElsewhere: the run has failed.
            ConnectionError: the leader cannot be reached.
        """
        before = self._listen()
        try:
            patience_s = arrival_s
            while (link := self._reach(patience_s)) is not None:
                over = self._serve(link)
                if over is not None and over.error:
                    raise EndedElsewhere(f"the first node has ended the run: {over.error}")
                if over is not None and not over.again:
                    return
                patience_s = back_s
                if over is None:
                    self._say(
                        f"hydragraph: the first node ({self._nodes.address}) is lost: {link.down}; this node's ranks "
                        f"are ended, as others may go on without them; waiting {back_s:g} s for it"
                    )
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _listen(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        handlers = {signal.SIGTERM: self._asked, signal.SIGINT: self._asked, signal.SIGUSR1: self._repaired}
        return {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def _repaired(self, number: int, frame: object) -> None:
        self._back = True

    def _asked(self, number: int, frame: object) -> None:
        self._asked_at = self._asked_at or time.monotonic()

    def _reach(self, patience_s: float) -> Link | None:
        """Return the link to the leader; None: this machine was taken away meanwhile."""
        end = time.monotonic() + patience_s
        while self._asked_at is None:
            try:
                return reach(self._nodes)
            except (OSError, RuntimeError) as error:
                if time.monotonic() > end:
                    raise ConnectionError(
                        f"the first node ({self._nodes.address}) could not be reached for {patience_s:g} s ({error}): "
                        "start the same command again on it and here, with --resume"
                    ) from None
                time.sleep(_TRY_S)
        return None

    def _serve(self, link: Link) -> Over | None:
        """Follow the leader's orders until the run ends; None: the link is down, or this machine was taken away."""
        stops = Stops()
        self._probe = self._probing(link)
        with tempfile.TemporaryDirectory(prefix="hydragraph-", ignore_cleanup_errors=True) as kept:  # of mode 0700
            try:
                while not link.down:
                    over = self._obey(link, kept)
                    if over is not None:
                        return over
                    self._look(link, stops)
                    if self._back:
                        self._back = False
                        link.send(Back())
                    if self._drained(link):
                        link.close("it was taken away")
                        return Over()
                return None
            finally:
                dismiss(list(self._crew.values()))
                self._crew.clear()
                link.close("")
                if self._probe is not None:
                    self._probe.close()

    def _probing(self, link: Link) -> LinkProbe | None:
        """Probe the links to other machines that do not lead, if there are any."""
        if self._nodes.count < 3:
            return None

        def tell(nodes: tuple[int, ...]) -> None:
            names = ", ".join(map(str, nodes))
            _LOG.warning("nodes that do not reach this one: %s", names or "none any more")
            link.send(Unheard(nodes))

        probe = LinkProbe(self._nodes.number, host_of(link), tell)
        link.send(ProbeAddress(probe.address))
        return probe

    def _obey(self, link: Link, kept: str) -> Over | None:
        """Handle one order if it arrives within a moment."""
        signs = [link.connection, *(s for m in self._live() for s in (m.connection, m.process.sentinel))]
        multiprocessing.connection.wait(signs, BEAT_S / 4)
        message = link.hear(0.0)
        if isinstance(message, Start):
            environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")},
                KEPT: kept,
                "GROUP_RANK": str(self._nodes.number),
            }
            seat = replace(message.seat, environment=environment, log_level=log.shown())
            arguments = (seat, message.number, message.late, message.grace_s, message.work, None)
            self._crew[message.number] = start(self._context, message.number, run_member, *arguments)
        elif isinstance(message, Kill) and message.number in self._crew:
            forget(self._crew.pop(message.number))
        elif isinstance(message, Stop):
            self._stopping = True
        elif isinstance(message, Peers) and self._probe is not None:
            self._probe.aim(message.addresses, message.tag)
        return message if isinstance(message, Over) else None

    def _live(self) -> list[RankHandle]:
        return [member for member in self._crew.values() if member.outcome is None]

    def _look(self, link: Link, stops: Stops) -> None:
        """Record how processes ended, and report it."""
        for member in wait_for_outcomes(self._live(), stops, 0, others_run=True):
            assert member.outcome is not None
            link.send(Ended(member.rank, member.outcome))
            if not isinstance(member.outcome, Returned):  # a process that returned stays until all have
                forget(self._crew.pop(member.rank))

    def _drained(self, link: Link) -> bool:
        """Forward a notice that this machine is taken away to its ranks; return whether all have left.

        A stop of the whole run (such as a cancelled job) reaches all machines: then the leader's ranks decide.
        """
        if self._asked_at is None or self._stopping or time.monotonic() - self._asked_at < _TOGETHER_S:
            return False
        if not self._told:
            self._told = True
            self._say("this node is asked to end: its ranks hand over what only they have")
            link.send(Leaving())
            for member in self._live():
                member.process.terminate()
        return not self._live()
