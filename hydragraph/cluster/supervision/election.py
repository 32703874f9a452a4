"""A machine's part in the election of a run's leader."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace

from hydragraph.cluster.supervision.etcd_register import Register
from hydragraph.cluster.supervision.leadership import Lease, LeaseView, asking, learned, wanted

_LOG = logging.getLogger(__name__)

# Between two requests
_ASK_S = 0.4
_FENCE_S = 0.05
_FIRST_S = 30.0


class LeadershipLost(ConnectionError):  # noqa: N818 reads as a sentence
    """This machine no longer leads, and its ranks have been ended."""


class Election:
    """Election of the leader, as seen by machine `node`; threads renew or watch the lease, and apply `guard`.

    Args:
        before: `Lease.before` as read from the output folder.
    """

    def __init__(self, register: Register, node: int, before: float = 0.0) -> None:
        self._register = register
        self._own = Lease(node=node, holder=uuid.uuid4().hex, before=before)
        self.standing = LeaseView()
        self.record = ""
        self._text = ""
        self._fence: tuple[Callable[[LeaseView, float], bool], Callable[[], None]] | None = None
        # Why the register does not answer, or ""
        self.silent = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        deadline = time.monotonic() + _FIRST_S
        while not self._read():
            if time.monotonic() > deadline:
                self._register.read()
            time.sleep(_ASK_S)
        for name, task, interval_s in (("lease", self._take_part, _ASK_S), ("fence", self._guard, _FENCE_S)):
            arguments = (task, interval_s)
            threading.Thread(target=self._repeat, args=arguments, name=f"hydragraph-{name}", daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.standing.leads(time.monotonic())

    @property
    def before(self) -> float:
        return self._own.before

    def join(self) -> None:
        self._own = replace(self._own, before=self.standing.lease.before)

    def guard(self, may_live: Callable[[LeaseView, float], bool], end_ranks: Callable[[], None]) -> None:
        """Call `end_ranks` whenever `may_live(lease view, time)` is false."""
        self._fence = (may_live, end_ranks)

    def write(self, *, place: str | None = None, record: str | None = None, over: str | None = None) -> None:
        """Write the lease and the record; raise LeadershipLost unless this machine leads."""
        while True:
            self.check()
            with self._lock:
                lease = self.standing.lease
                place = lease.place if place is None else place
                # Every write renews the lease: its new count shows that the
                # leader lives.
                lease = replace(lease, beat=lease.beat + 1, place=place, over=over)
                if self.leads and self._swap(lease, record):
                    return
            self._read()

    def check(self) -> None:
        if not self.leads:
            why = f": {self.silent}" if self.silent else ""
            raise LeadershipLost(
                f"machine {self._own.node} could not renew its lease in time, and no longer leads{why}"
            )

    def resign(self) -> None:
        with self._lock:
            self.standing = replace(self.standing, term=0, asked=None)

    def end(self, why: str = "") -> None:
        with suppress(LeadershipLost):
            self.write(over=why)
        self._closed.set()

    def _repeat(self, task: Callable[[], None], interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            try:
                task()
            except Exception:
                _LOG.exception("a step of the leader's election failed, and will be repeated")

    def _guard(self) -> None:
        if self._fence is None:
            return
        may_live, end_ranks = self._fence
        if not may_live(self.standing, time.monotonic()):
            end_ranks()

    def _take_part(self) -> None:
        with self._lock:
            # If the swap fails, the read shows what another machine wrote.
            lease = wanted(self.standing, self._own, time.monotonic())
            if lease is not None and self._swap(lease):
                return
        self._read()

    def _read(self) -> bool:
        with self._lock:
            sent = time.monotonic()
            try:
                text, record = self._register.read()
            except ConnectionError as error:
                if not self.silent:
                    _LOG.warning("%s", error)
                self.silent = str(error)
                return False
            self.silent = ""
            self._learn(text, sent)
            self.record = record
            return True

    def _swap(self, lease: Lease, record: str | None = None) -> bool:
        # Note the request before sending it: if its answer is lost, a later read of this lease proves
        # its acceptance (`learned`).
        text = json.dumps(asdict(lease))
        sent = time.monotonic()
        self.standing = asking(self.standing, lease, sent)
        try:
            accepted = self._register.swap(self._text, text, record)
        except ConnectionError:
            return False
        if accepted:
            self._learn(text, sent)
            self.record = self.record if record is None else record
        return accepted

    def _learn(self, text: str, sent: float) -> None:
        before = self.standing
        lease = Lease(**json.loads(text)) if text else Lease()
        self._text = text
        self.standing = learned(before, lease, sent, time.monotonic())
        if self.standing.lease.term != before.lease.term:
            _LOG.info("term %d: machine %d leads", lease.term, lease.node)
