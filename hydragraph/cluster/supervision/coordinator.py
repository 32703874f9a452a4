"""Coordination of several machines: the first machine's supervisor leads, and the others run a `NodeAgent`.

A launcher (torchrun, srun) starts one process per machine. Machine 0's process hosts the rendezvous store and alone
decides the membership, so two halves of a partitioned network never both continue.

    leader -> agent   Welcome, Start, Kill, Stop, RunOver, ProbedMachines, Heartbeat
    agent -> leader   Hello, Ended, Leaving, DevicesAvailable, ProbeAddress, UnheardMachines, Heartbeat

With an etcd register (`election`), any machine may lead, and other machines' processes continue under the next leader.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from hydragraph.cluster.failure.failure_detector import Stopwatch
from hydragraph.cluster.failure.time_limits import SILENT_S, UNREACHABLE_S
from hydragraph.cluster.processes.launched_ranks import AbsentProcess, RankHandle
from hydragraph.cluster.processes.rank_process import Died, Outcome, Raised, Seat, Start
from hydragraph.cluster.processes.rendezvous_stores import client, hosted, listening
from hydragraph.cluster.supervision.broken_links import MachineLinks, look
from hydragraph.cluster.supervision.election import Election
from hydragraph.cluster.supervision.leadership import GRACE_S
from hydragraph.cluster.supervision.link_probe import Address
from hydragraph.cluster.unreachable import TOLD_S

_LOG = logging.getLogger(__name__)

BEAT_S = 0.25
# A machine that sent a message this recently is neither lost nor paused
_FRESH_S = 1.0
_ASK_S = 5.0
# Time limit to reach an elected leader; below `DOUBT_S`
_ELECTED_S = 0.8


@dataclass(frozen=True)
class RunMachines:
    """Machines of a run, with one launched process each.

    Attributes:
        address: address of the launcher's store, on machine 0.
        shared: whether the launcher, not machine 0's process, hosts the store.
        again: types of errors after which the leader restarts the run.
        devices: number of this machine's devices.
        fills: whether every device gets a rank.
        ranks, placed: number of ranks and each machine's devices, once ranks are placed.
        election: None if machine 0 leads.
        handed: on a leader, processes that this machine started for an earlier leader.
    """

    number: int
    count: int
    address: str
    port: int
    shared: bool = False
    again: tuple[type[Exception], ...] = ()
    devices: int = 1
    fills: bool = False
    ranks: int = 0
    placed: tuple[int, ...] = ()
    election: Election | None = field(default=None, compare=False)
    handed: InheritedMembers | None = field(default=None, compare=False)

    def of(self, seat: int, ranks: int) -> int:
        """Return a seat's machine: ranks are placed in order, spares round-robin."""
        if seat >= ranks:
            return (seat - ranks) % self.count
        return seats_by_machine(ranks, self.placed or (1,) * self.count)[seat]

    def seat(self, seat: int, port: int) -> Seat:
        """Return a process's `Seat`; on each machine, spares follow ranks."""
        node = self.of(seat, self.ranks)
        local = sum(self.of(earlier, self.ranks) == node for earlier in range(seat))
        return Seat(seat, self.ranks, port, self.address, node, self.here(node, self.ranks), local)

    def here(self, number: int, ranks: int) -> int:
        return sum(self.of(seat, ranks) == number for seat in range(ranks))

    def place(self, ranks: int, devices: Sequence[int]) -> RunMachines:
        """Return these machines with ranks placed; raise a ValueError if unequal machines have too few devices."""
        total = sum(devices)
        ranks = total if self.fills else ranks
        if len(set(devices)) > 1 and ranks > total:
            each = ", ".join(f"machine {node} has {count}" for node, count in enumerate(devices))
            raise ValueError(f"ranks is {ranks}, but there are {total} devices ({each}): set ranks to at most {total}")
        return replace(self, ranks=ranks, placed=tuple(devices))

    def refusal(self, number: int, devices: int) -> str:
        needed = min(self.placed[number], self.here(number, self.ranks)) if self.placed else 0
        if devices >= needed:
            return ""
        return (
            f"machine {number} has {devices} devices, but its ranks need {needed}: add devices, or restart all "
            "machines with --resume"
        )


@cache
def seats_by_machine(ranks: int, devices: tuple[int, ...]) -> tuple[int, ...]:
    """Return each rank's machine; machines get ranks in proportion to their devices."""
    count = len(devices)
    if len(set(devices)) == 1:
        return tuple(rank * count // ranks for rank in range(ranks))
    # shares[node]: ranks of a machine; each rank goes where ranks per device are lowest
    # 6 ranks on machines with 4 and 2 devices: shares = [4, 2], result (0, 0, 0, 0, 1, 1)
    shares = [1] * count
    for _ in range(ranks - count):
        shares[min(range(count), key=lambda node: (shares[node] + 0.5) / devices[node])] += 1
    return tuple(node for node, share in enumerate(shares) for _ in range(share))


def nodes_of(environment: Mapping[str, str], elected: bool = False) -> RunMachines | None:
    """Return a run's machines if a launcher started one process per machine, else None."""
    needed = {"RANK", "WORLD_SIZE", *(() if elected else ("MASTER_ADDR", "MASTER_PORT"))}
    if not needed <= environment.keys() or environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        return None
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    number = int(environment["RANK"])
    count = int(environment["WORLD_SIZE"])
    address = "" if elected else environment["MASTER_ADDR"]
    return RunMachines(number, count, address, int(environment.get("MASTER_PORT", "0")), shared)


@dataclass(frozen=True)
class Seated:
    """Seat of a member; `late` is true if others were already running."""

    seat: int
    late: bool


@dataclass(frozen=True, eq=False)
class InheritedMembers:
    """Members that this machine runs from an earlier leader."""

    crew: tuple[RankHandle, ...]
    seats: Mapping[int, Seated]
    kept: TemporaryDirectory[str]


@dataclass(frozen=True)
class Hello:
    """A machine has connected; `members` are its processes from an earlier leader."""

    node: int
    members: Mapping[int, Seated] = field(default_factory=dict)
    devices: int = 1


@dataclass(frozen=True)
class Welcome:
    """The leader has accepted a machine, whose members continue if `kept`."""

    kept: bool
    host: str
    port: int


@dataclass(frozen=True)
class Kill:
    number: int


@dataclass(frozen=True)
class Ended:
    number: int
    outcome: Outcome


@dataclass(frozen=True)
class Leaving:
    """This machine is preempted: it starts no more processes."""


@dataclass(frozen=True)
class DevicesAvailable:
    """This machine's devices are available again."""


@dataclass(frozen=True)
class Stop:
    """The whole run is being stopped."""


@dataclass(frozen=True)
class RunOver:
    """The run has ended.

    Attributes:
        error: reason why the run ended; "" after success.
        again: whether the run restarts.
        here: whether only this machine ends.
    """

    error: str = ""
    again: bool = False
    here: bool = False


@dataclass(frozen=True)
class ProbeAddress:
    address: Address


@dataclass(frozen=True)
class ProbedMachines:
    """Order to probe machines; `tag` marks this run's probes."""

    addresses: Mapping[int, Address]
    tag: bytes


@dataclass(frozen=True)
class UnheardMachines:
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Heartbeat:
    """The sender is alive."""


class Link:
    """One end of a connection between leader and `NodeAgent`.

    Attributes:
        term: the elected leader's term, if any.
        down: reason why the link was given up, or "".
        silent_s: seconds since the other end's last message.
    """

    def __init__(self, connection: Connection, patience_s: float, term: int = 0) -> None:
        self.connection = connection
        self.term = term
        self.down = ""
        self.silent_s = 0.0
        self._patience_s = patience_s
        self._sending = threading.Lock()
        self._stopwatch = Stopwatch()
        self._sent = time.monotonic()

    def send(self, message: object) -> None:
        with self._sending:
            try:
                self.connection.send(message)
                self._sent = time.monotonic()
            except OSError as error:
                self.down = self.down or f"the connection broke ({error})"

    def hear(self, wait_s: float) -> Any:
        """Return the next message or None; send a due heartbeat."""
        message = None
        try:
            if self.connection.poll(wait_s):
                message = self.connection.recv()
        except (OSError, EOFError):
            self.down = self.down or "its supervisor has ended, or the connection broke"
            return None
        # After a pause of this process, messages may be waiting.
        elapsed = self._stopwatch.elapsed()
        self.silent_s = 0.0 if message is not None else self.silent_s + elapsed
        if self.silent_s >= self._patience_s:
            self.down = f"it has been silent for {self._patience_s:g} s"
        if time.monotonic() - self._sent >= BEAT_S:
            self.send(Heartbeat())
        return message

    def close(self, why: str) -> None:
        self.down = self.down or why
        with contextlib.suppress(OSError):
            self.connection.close()


class RemoteProcess(AbsentProcess):
    def __init__(self, link: Link, number: int) -> None:
        super().__init__()
        self.connection, self._told = multiprocessing.Pipe()
        self._link = link
        self._number = number

    def ended(self, outcome: Outcome) -> None:
        if self.is_alive():
            with contextlib.suppress(OSError):
                self._told.send(outcome)
            self._told.close()
            self.end()

    def kill(self) -> None:
        self._link.send(Kill(self._number))


@dataclass
class _Post:
    link: Link
    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    leaving: bool = False
    address: Address | None = None
    unheard: tuple[int, ...] = ()


class AgentLinks:
    """The leader's links to other machines; `port` is its store's port."""

    def __init__(self, nodes: RunMachines, port: int = 0) -> None:
        self.nodes = nodes
        self._port = port
        self._adopting = nodes.handed is not None
        self._adopted: list[RankHandle] = []
        self._seats: dict[int, Seated] = {}
        self._posts: dict[int, _Post] = {}
        self._devices = {nodes.number: nodes.devices}
        self._news: set[int] = set()
        self._links = MachineLinks()
        self._stopwatch = Stopwatch()
        self._lock = threading.Lock()
        self._closed = False
        self._over: RunOver | None = None
        self._key = uuid.uuid4().hex.encode()
        self._listening = listening(nodes.address, 0, backlog=nodes.count)
        threading.Thread(target=self._accept, name="hydragraph-hub", daemon=True).start()
        port = self._listening.getsockname()[1]
        place = json.dumps({"address": nodes.address, "port": port, "key": self._key.decode()})
        if nodes.election is None:
            _book(nodes).set("leader", place)
        else:
            nodes.election.write(place=place)

    def gather(self, patience: timedelta, enough: Callable[[float], bool] = lambda waited_s: False) -> None:
        """Wait until all machines have connected, or `enough(seconds waited)`."""
        began = time.monotonic()
        told = False
        while missing := [n for n in range(self.nodes.count) if not self.present(n)]:
            if self.nodes.election is not None:
                self.nodes.election.check()
            waited_s = time.monotonic() - began
            if enough(waited_s):
                break
            if not told and waited_s > TOLD_S:
                told = True
                _LOG.warning("waiting for machines %s of %d: start the same command there", missing, self.nodes.count)
            if waited_s > patience.total_seconds():
                raise TimeoutError(
                    f"machines {missing} of {self.nodes.count} have not arrived after {patience.total_seconds():g} s: "
                    "start the same command there"
                )
            time.sleep(0.02)
        self.arrived()

    def place(self, ranks: int) -> RunMachines:
        with self._lock:
            self.nodes = self.placed(ranks)
        return self.nodes

    def placed(self, ranks: int) -> RunMachines:
        own = self.nodes.devices
        return self.nodes.place(ranks, [self._devices.get(node, own) for node in range(self.nodes.count)])

    def adopt(self, nodes: Collection[int], patience_s: float) -> tuple[list[RankHandle], dict[int, Seated]]:
        """Wait up to `patience_s` seconds for `nodes`; return the members that they run, with seats."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end and not all(map(self.present, nodes)):
            time.sleep(0.02)
        self.arrived()
        with self._lock:
            self._adopting = False
            return self._adopted, self._seats

    def present(self, node: int) -> bool:
        with self._lock:
            post = self._posts.get(node)
            there = post is not None and not post.link.down and not post.leaving
            return node == self.nodes.number or (there and node not in self._links.dropped)

    def arrived(self) -> tuple[int, ...]:
        with self._lock:
            news = self._news
            self._news = set()
        return tuple(sorted(news))

    def drop_unreachable(self) -> None:
        """End the processes of machines that cannot reach others; call this often."""
        elapsed = self._stopwatch.elapsed()
        with self._lock:
            # For a machine that the leader does not hear, only its link to the leader counts.
            heard = {n: post for n, post in self._posts.items() if not post.link.down and post.link.silent_s < _FRESH_S}
            # broken: pairs (lower, higher) that do not hear each other; ranks:
            #   machine -> its live processes
            broken = {(min(n, m), max(n, m)) for n, post in heard.items() for m in post.unheard if m in heard}
            ranks = {n: sum(remote.is_alive() for remote in post.processes.values()) for n, post in heard.items()}
            before = self._links
            self._links = look(self._links, elapsed, broken, ranks)
            self._news |= before.dropped.keys() - self._links.dropped.keys()
            dropped = {n: m for n, m in self._links.dropped.items() if n not in before.dropped}
            ended = {n: list(self._posts[n].processes.values()) for n in dropped}
        # Sends may block, so they happen without the lock.
        for node, processes in ended.items():
            both = f"both reach machine {self.nodes.number}"
            how = f"machine {node} is dropped: it and machine {dropped[node]} cannot reach each other, but {both}"
            _LOG.warning("%s", how)
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.ended(Died(time.monotonic(), how))

    def start(self, node: int, order: Start) -> RankHandle:
        with self._lock:
            post = self._posts[node]
            process = RemoteProcess(post.link, order.number)
            post.processes[order.number] = process
        post.link.send(order)
        if post.link.down:
            process.ended(Died(time.monotonic(), _lost(node, post.link)))
        return RankHandle(order.number, process, process.connection)

    def stop(self) -> None:
        for post in self._all():
            post.link.send(Stop())

    def close(self, over: RunOver | None) -> None:
        """Close all links; if `over` is None, machines continue under another leader."""
        with self._lock:
            self._over = over
            self._closed = True
        self._listening.close()
        for post in self._all():
            self._end(post.link)

    def _end(self, link: Link) -> None:
        if self._over is not None:
            link.send(self._over)
        link.close("it is over")

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
        _watched(accepted, SILENT_S)
        connection = Connection(accepted.detach())
        try:
            # Both ends prove that they know the key, in the reverse order of `reach`.
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = connection.recv()
        except (OSError, EOFError, multiprocessing.AuthenticationError):
            connection.close()
            return
        link = Link(connection, SILENT_S)
        post = _Post(link)
        with self._lock:
            # A blocked `accept` accepts one more
            closed = self._closed
            refusal = self.nodes.refusal(hello.node, hello.devices)
            before = None if closed or refusal else self._register(hello, post)
        if closed:
            self._end(link)
            return
        if refusal:
            _LOG.warning("%s", refusal)
            link.send(RunOver(refusal, here=True))
            link.close("it is refused")
            return
        # A machine's newest process wins: an older one with an open link ends.
        if before is not None and not before.link.down:
            why = f"a second process was started for machine {hello.node}, and replaces this process"
            before.link.send(RunOver(why, here=True))
            before.link.close("it was started again")
        _LOG.info("machine %d has arrived", hello.node)
        # Serve the link until it is down; a `RemoteProcess`'s pipe brings
        # outcomes to the supervisor.
        while not link.down:
            message = link.hear(BEAT_S)
            if isinstance(message, Ended):
                outcome = message.outcome
                # Clocks differ between machines
                if isinstance(outcome, Raised | Died):
                    outcome = replace(outcome, when=time.monotonic())
                # The process may belong to an earlier link
                if message.number in post.processes:
                    post.processes[message.number].ended(outcome)
            elif isinstance(message, Leaving):
                post.leaving = True
            elif isinstance(message, ProbeAddress):
                post.address = message.address
                self._introduce()
            elif isinstance(message, UnheardMachines):
                post.unheard = message.nodes
            elif isinstance(message, DevicesAvailable):
                with self._lock:
                    self._news.add(hello.node)
        link.close("")
        if not self._closed:
            _LOG.warning("%s", _lost(hello.node, link))
        if self.nodes.election is not None and not self._closed and link.silent_s < SILENT_S:
            # The machine may first check whether this leader has ended
            time.sleep(GRACE_S)
        with self._lock:
            processes = list(post.processes.values())
        for process in processes:
            process.ended(Died(time.monotonic(), _lost(hello.node, link)))

    def _register(self, hello: Hello, post: _Post) -> _Post | None:
        link = post.link
        # The members continue under this leader. A `RemoteProcess` represents each that does not run
        # here; its outcome is a message (`Ended`).
        if self._adopting:
            post.processes = {number: RemoteProcess(link, number) for number in hello.members}
            self._adopted += [RankHandle(n, process, process.connection) for n, process in post.processes.items()]
            self._seats |= hello.members
        if self.nodes.election is not None:
            link.send(Welcome(self._adopting, self.nodes.address, self._port))
        before = self._posts.get(hello.node)
        self._devices[hello.node] = hello.devices
        self._posts[hello.node] = post
        self._news.add(hello.node)
        return before

    def _introduce(self) -> None:
        posts = self._all()
        with self._lock:
            addresses = {n: post.address for n, post in self._posts.items() if post.address and not post.link.down}
        tag = hashlib.sha256(b"probe" + self._key).hexdigest()[:16].encode()
        for post in posts:
            post.link.send(ProbedMachines(addresses, tag))


def _lost(node: int, link: Link) -> str:
    return f"machine {node} is lost: {link.down}"


def reach(nodes: RunMachines, members: Mapping[int, Seated] | None = None) -> Link:
    """Return this machine's link to the leader.

    Args:
        members: this machine's members, which continue under a new leader.

    Raises:
        OSError, RuntimeError: the leader, or the store with its address, is not available.
    """
    if nodes.election is not None:
        standing = nodes.election.standing
        term = standing.lease.term
        text = "" if standing.lease.free or standing.expired else standing.lease.place
    else:
        book = _book(nodes)
        term = 0
        text = book.get("leader") if book.check(["leader"]) else ""
    if not text:
        raise ConnectionError(f"the {'leading' if term else 'first'} machine's supervisor has not started")
    place = json.loads(text)
    patience_s = _ASK_S if nodes.election is None else _ELECTED_S
    try:
        reached = socket.create_connection((place["address"], place["port"]), timeout=patience_s)
    except OSError as error:
        raise type(error)(f"the supervisor at {place['address']}, port {place['port']}: {error}") from None
    reached.settimeout(None)
    _watched(reached, UNREACHABLE_S)
    connection = Connection(reached.detach())
    key = place["key"].encode()
    try:
        if nodes.election is not None and not connection.poll(patience_s):
            raise ConnectionError(f"the supervisor of {place['address']} does not answer")
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (EOFError, multiprocessing.AuthenticationError) as error:
        raise ConnectionError(f"the leading machine's supervisor has been replaced ({error})") from None
    link = Link(connection, UNREACHABLE_S, term)
    link.send(Hello(nodes.number, members or {}, nodes.devices))
    return link


def host_of(link: Link) -> str:
    with socket.socket(fileno=os.dup(link.connection.fileno())) as connected:
        return str(connected.getsockname()[0])


def _watched(connected: socket.socket, patience_s: float) -> None:
    """Let the operating system drop connections with silent peers."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": int(patience_s)}
    options["TCP_USER_TIMEOUT"] = int(1000 * patience_s)
    for name, value in options.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _book(nodes: RunMachines) -> Any:
    if nodes.number == 0 and not nodes.shared:
        store = _kept(nodes.address, nodes.port)
    else:
        socket.create_connection((nodes.address, nodes.port), timeout=_ASK_S).close()  # fails fast
        store = client(nodes.address, nodes.port, timedelta(seconds=_ASK_S))
    return dist.PrefixStore("hydragraph/nodes", store)


@cache
def _kept(address: str, port: int) -> Any:
    return hosted(address, port)
