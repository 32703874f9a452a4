"""Several machines: the supervisor of the first one leads, and has a deputy on each of the others.

A launcher (torchrun, srun) starts one process per machine. That of machine 0 keeps the store where ranks meet, and is
the only one that decides who is among them, so that two halves of a cut network never both go on. The others are
deputies (`deputy`): they start and end processes when they are told to, and tell how these ended. Between the leader
and each deputy there is one connection, over which each is heard four times a second; it breaks at once where a process
ends, and is given up where nothing is heard. A deputy gives up sooner than the leader does: when the leader goes on
without a machine, that one's ranks have been ended.

    leader -> deputy   Start, Kill, Stop, Over, Beat
    deputy -> leader   Hello, Ended, Leaving, Back, Beat
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch.distributed as dist

from hydragraph.cluster.failure.failure_detector import PAUSE_S
from hydragraph.cluster.failure.node_sentinel import SILENT_S
from hydragraph.cluster.failure.rank_watch import UNREACHABLE_S
from hydragraph.cluster.processes.launched_ranks import RankHandle
from hydragraph.cluster.processes.rank_process import Died, Left, Raised, Returned, Seat
from hydragraph.cluster.processes.rendezvous_stores import client, hosted, listening

_LOG = logging.getLogger(__name__)

BEAT_S = 0.25
_ASK_S = 5.0  # for one answer of the store, or one attempt to connect


@dataclass(frozen=True)
class Nodes:
    """This machine among several, as a launcher started one process on each.

    Attributes:
        number, count: which, from 0, of how many.
        address, port: where the launcher's store is; machine 0 has that address.
        shared: whether the launcher keeps the store; else machine 0's process does.
        again: errors after which the leader begins anew.
    """

    number: int
    count: int
    address: str
    port: int
    shared: bool = False
    again: tuple[type[Exception], ...] = ()

    def of(self, seat: int, ranks: int) -> int:
        """Return the machine of a seat: ranks are dealt in order, evenly; spares beyond them in turn."""
        return seat * self.count // ranks if seat < ranks else (seat - ranks) % self.count

    def here(self, number: int, ranks: int) -> int:
        """Return how many ranks a machine has."""
        return sum(self.of(seat, ranks) == number for seat in range(ranks))


def nodes_of(environment: Mapping[str, str]) -> Nodes | None:
    """Return where this process is, if a launcher has started one on each machine, as its environment says."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        return None
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    number, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return Nodes(number, count, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), shared)


@dataclass(frozen=True)
class Hello:
    """A deputy is there."""

    node: int


@dataclass(frozen=True)
class Start:
    """Start the process of a member; arguments as of `rank_process.run_member`."""

    number: int
    seat: Seat
    late: bool
    grace_s: float
    work: bytes


@dataclass(frozen=True)
class Kill:
    """End a member's process."""

    number: int


@dataclass(frozen=True)
class Ended:
    """How a member's process ended."""

    number: int
    outcome: Returned | Raised | Died | Left


@dataclass(frozen=True)
class Leaving:
    """This machine is taken away: it starts nothing more."""


@dataclass(frozen=True)
class Back:
    """Devices of this machine are back: processes are to be started in its empty seats."""


@dataclass(frozen=True)
class Stop:
    """The whole work is being stopped: ranks are told by their own way."""


@dataclass(frozen=True)
class Over:
    """Nothing more is to be done.

    Attributes:
        error: why; "": all is done.
        again: whether the leader is about to begin anew.
    """

    error: str = ""
    again: bool = False


@dataclass(frozen=True)
class Beat:
    """Somebody is there."""


class Link:
    """One end of the connection between the leader and a deputy.

    Args:
        connection: to the other.
        patience_s: without a word it is given up.

    Attributes:
        down: why it is given up; "": it is not.
    """

    def __init__(self, connection: Connection, patience_s: float) -> None:
        self.connection = connection
        self.down = ""
        self._patience_s = patience_s
        self._sending = threading.Lock()
        self._silent_s = 0.0
        self._before = self._sent = time.monotonic()

    def send(self, message: object) -> None:
        """Send a message; where that fails the link is down."""
        with self._sending:
            try:
                self.connection.send(message)
                self._sent = time.monotonic()
            except OSError as error:
                self.down = self.down or f"the connection broke ({error})"

    def hear(self, wait_s: float) -> Any:
        """Return the next message, None for none within the time; keep saying that this end is there."""
        message = None
        try:
            if self.connection.poll(wait_s):
                message = self.connection.recv()
        except (OSError, EOFError):
            self.down = self.down or "its supervisor has ended, or the connection broke"
            return None
        now = time.monotonic()
        # Of a pause (this process was stopped) little counts: the other's words may be waiting.
        self._silent_s = 0.0 if message is not None else self._silent_s + min(now - self._before, PAUSE_S)
        self._before = now
        if self._silent_s >= self._patience_s:
            self.down = f"nothing has been heard of it for {self._patience_s:g} s"
        if now - self._sent >= BEAT_S:
            self.send(Beat())
        return message

    def close(self, why: str) -> None:
        """Give it up."""
        self.down = self.down or why
        with contextlib.suppress(OSError):
            self.connection.close()


class RemoteProcess:
    """A process on another machine, as far as a supervisor needs one."""

    pid: int | None = None  # it is no process of this machine
    exitcode: int | None = None

    def __init__(self, link: Link, number: int) -> None:
        self.connection, self._told = multiprocessing.Pipe()
        self._sign, self._end = multiprocessing.Pipe(duplex=False)
        self._link = link
        self._number = number
        self._alive = True

    @property
    def sentinel(self) -> int:
        """What becomes readable when it has ended."""
        return self._sign.fileno()

    def ended(self, outcome: Returned | Raised | Died | Left) -> None:
        """Tell its supervisor how it ended."""
        if self._alive:
            self._alive = False
            with contextlib.suppress(OSError):
                self._told.send(outcome)
            self._told.close()
            self._end.close()

    def is_alive(self) -> bool:
        """Whether nothing has been heard of its end."""
        return self._alive

    def terminate(self) -> None:
        """Its deputy asks it, when its machine is taken away."""

    def kill(self) -> None:
        """Have it ended."""
        self._link.send(Kill(self._number))

    def join(self, timeout: float | None = None) -> None:
        """Its deputy does."""

    def close(self) -> None:
        """Let go of what tells of its end."""
        self._sign.close()


@dataclass
class _Post:
    """A machine that a deputy is on."""

    link: Link
    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    leaving: bool = False


class Hub:
    """The leader's end: who is on which machine, started, ended and heard of.

    Args:
        nodes: this machine among all; it is the first.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._posts: dict[int, _Post] = {}
        self._news: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._key = uuid.uuid4().hex.encode()
        self._listening = listening(nodes.address, 0, backlog=nodes.count)
        threading.Thread(target=self._accept, name="hydragraph-hub", daemon=True).start()
        place = {"port": self._listening.getsockname()[1], "key": self._key.decode()}
        _book(nodes).set("leader", json.dumps(place))

    def gather(self, patience: timedelta) -> None:
        """Wait until there is a deputy on every other machine.

        Raises:
            TimeoutError: on some there is none.
        """
        end = time.monotonic() + patience.total_seconds()
        while missing := [n for n in range(1, self.nodes.count) if not self.present(n)]:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"nodes {missing} of {self.nodes.count} have not arrived after {patience.total_seconds():g} s: "
                    "start the same command there"
                )
            time.sleep(0.02)
        self.arrived()

    def present(self, node: int) -> bool:
        """Say whether processes can be started on a machine."""
        with self._lock:
            post = self._posts.get(node)
            return node == 0 or (post is not None and not post.link.down and not post.leaving)

    def arrived(self) -> tuple[int, ...]:
        """Return the machines that have come since this was asked last."""
        with self._lock:
            news, self._news = self._news, set()
        return tuple(sorted(news))

    def start(self, node: int, order: Start) -> RankHandle:
        """Have a process started on a machine that is present, or was a moment ago."""
        with self._lock:
            post = self._posts[node]
            process = RemoteProcess(post.link, order.number)
            post.processes[order.number] = process
        post.link.send(order)
        if post.link.down:
            process.ended(Died(time.monotonic(), _lost(node, post.link)))
        return RankHandle(order.number, process, process.connection)

    def stop(self) -> None:
        """Tell deputies that the work is being stopped."""
        for post in self._all():
            post.link.send(Stop())

    def close(self, over: Over) -> None:
        """End: tell all deputies why."""
        self._closed = True
        self._listening.close()
        for post in self._all():
            post.link.send(over)
            post.link.close("it is over")

    def _all(self) -> list[_Post]:
        with self._lock:
            return list(self._posts.values())

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(accepted,), name="hydragraph-node", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        """Talk with one deputy, until it is heard no more."""
        _watched(accepted, SILENT_S)
        connection = Connection(accepted.detach())
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = connection.recv()
        except (OSError, EOFError, multiprocessing.AuthenticationError):
            connection.close()
            return
        link = Link(connection, SILENT_S)
        post = _Post(link)
        with self._lock:
            before = self._posts.get(hello.node)
            self._posts[hello.node] = post
            self._news.add(hello.node)
        if before is not None and not before.link.down:
            before.link.send(Over(f"node {hello.node} was started a second time, and that one goes on"))
            before.link.close("it was started anew")
        _LOG.info("node %d is there", hello.node)
        while not link.down:
            message = link.hear(BEAT_S)
            if isinstance(message, Ended):
                outcome = message.outcome
                if isinstance(outcome, Raised | Died):  # clocks of machines differ
                    outcome = replace(outcome, when=time.monotonic())
                post.processes[message.number].ended(outcome)
            elif isinstance(message, Leaving):
                post.leaving = True
            elif isinstance(message, Back):
                with self._lock:
                    self._news.add(hello.node)
        link.close("")
        if not self._closed:
            _LOG.warning("%s", _lost(hello.node, link))
        with self._lock:
            processes = list(post.processes.values())
        for process in processes:
            process.ended(Died(time.monotonic(), _lost(hello.node, link)))


def _lost(node: int, link: Link) -> str:
    return f"node {node} is lost: {link.down}"


def reach(nodes: Nodes) -> Link:
    """Return a deputy's link to the leader, wherever that is now.

    Raises:
        OSError, RuntimeError: it, or the launcher's store, is not there, or not yet.
    """
    book = _book(nodes)
    if not book.check(["leader"]):
        raise ConnectionError("the first node's supervisor has not begun")
    place = json.loads(book.get("leader"))
    reached = socket.create_connection((nodes.address, place["port"]), timeout=_ASK_S)
    reached.settimeout(None)
    _watched(reached, UNREACHABLE_S)
    connection = Connection(reached.detach())
    key = place["key"].encode()
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (EOFError, multiprocessing.AuthenticationError) as error:
        raise ConnectionError(f"the first node's supervisor is another by now ({error})") from None
    link = Link(connection, UNREACHABLE_S)
    link.send(Hello(nodes.number))
    return link


def _watched(connected: socket.socket, patience_s: float) -> None:
    """Have the system give a connection up whose other end does not answer."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", int(patience_s)),
        ("TCP_USER_TIMEOUT", int(1000 * patience_s)),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _book(nodes: Nodes) -> Any:
    """Return the store where the leader says where it is."""
    if nodes.number == 0 and not nodes.shared:
        store = _kept(nodes.address, nodes.port)
    else:
        socket.create_connection((nodes.address, nodes.port), timeout=_ASK_S).close()  # a store that is not there
        store = client(nodes.address, nodes.port, timedelta(seconds=_ASK_S))  # would be complained of at length
    return dist.PrefixStore("hydragraph/nodes", store)  # type: ignore[attr-defined]


@cache
def _kept(address: str, port: int) -> Any:
    return hosted(address, port)
