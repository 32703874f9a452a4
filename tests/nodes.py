"""Several machines on one, for tests: network namespaces joined by a link that can be cut and slowed down.

    node 0 (10.77.N.1) --veth-- node 1 (10.77.N.2)        three nodes are joined by a bridge instead

A node has its own network, host name, process ids, /dev/shm and directory for temporary files; it sees the files of
this machine, except for the directories that are given as its own. Servers on one node's loopback are not reachable
from the other. Needs root and `ip` (iproute2); `refusal()` says what is missing.

    with TwoNodes(folder) as nodes:
        processes = [node.start(["hostname"], folder / f"{node.number}.log") for node in nodes]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

MARK = "HYDRAGRAPH_TEST_NODE"  # in the environment of everything that runs on a node
_NOBODY = "02:00:00:00:00:fe"  # a link address that no node has
BURST_BYTES = 32 * 1024  # what passes a shaped link at once: small, so that short messages feel the rate too

# A node's first process: it takes leave of processes that have lost their parents, and all end when it does.
# Arguments: the host name, and the file of host names.
_INIT = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && echo ready
while :; do sleep 1000 & wait; done
"""
# A command on a node. Arguments: the directories of its own (ended by --), and the command.
_COMMAND = """
while [ "$1" != -- ]; do mount -t tmpfs tmpfs "$1"; shift; done
shift
exec "$@"
"""


def refusal() -> str | None:
    """Say in a sentence why this machine cannot pretend to be two; None where it can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"two nodes need {', '.join(missing)}"
    name = _fresh()
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "unshare", "--mount", "--uts", "--pid", "--fork", "hostname", name)
        _ip("-n", name, "link", "add", "end0", "type", "veth", "peer", "name", "end1")
    except RuntimeError as error:
        return f"two nodes need network namespaces, which are not permitted here: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


def shaping_refusal() -> str | None:
    """Say in a sentence why a link cannot be made slow here; None where it can."""
    if (why := refusal()) is not None:
        return why
    if shutil.which("tc") is None:
        return "a slow link needs tc (iproute2)"
    name = _fresh()
    try:
        _ip("netns", "add", name)
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *limited(1e6))
    except RuntimeError as error:
        return f"a slow link needs the kernel's tbf queue, which is not here: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@dataclass(frozen=True)
class Node:
    """One of the two.

    Attributes:
        number: 0 or 1.
        namespace: of its network.
        interface: its end of the link.
        address: of that end.
        hostname: also resolvable from the other node.
        folder: for its temporary files.
        mark: value of the environment variable `MARK` of its processes.
        init: its first process, as seen from outside.
    """

    number: int
    namespace: str
    interface: str
    address: str
    hostname: str
    folder: Path
    mark: str
    init: int = 0

    def start(
        self, command: Sequence[str], log: Path, *, own: Sequence[Path] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a process on this node; what it and its descendants print goes to a file.

        Args:
            command: program and arguments.
            log: the file, appended to.
            own: directories that are empty here from now on, and not the other node's.
            environment: beside this process's own.

        Returns:
            The process; its exit code is the command's. Its descendants may outlive it, as on any machine.
        """
        surroundings = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "TMPDIR": str(self.folder), MARK: self.mark}
        where = ["nsenter", "--target", str(self.init), "--net", "--mount", "--uts", "--pid", f"--wd={os.getcwd()}"]
        with log.open("ab") as file:
            return subprocess.Popen(
                [*where, "sh", "-c", _COMMAND, "sh", *map(str, own), "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**surroundings, **environment},
                start_new_session=True,
            )

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the environments of this node's processes, by process id as seen from outside."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                environment = _environment(entry)
                if environment.get(MARK) == self.mark:
                    found[int(entry.name)] = environment
        return found

    def ranks(self) -> dict[int, int]:
        """Return the process id, as seen from outside, of each rank that a launcher has started here."""
        running = {pid: e for pid, e in self.processes().items() if "RANK" in e and _state(pid) not in ("Z", "")}
        # Processes started by a rank also have its environment.
        return {int(e["RANK"]): pid for pid, e in running.items() if b"runtime.failure" not in _command(pid)}


class TwoNodes:
    """Makes two nodes, and removes them with everything that runs on them.

    Args:
        folder: for host names and temporary files; the nodes' folders in it are removed at the end.
    """

    count = 2

    def __init__(self, folder: Path) -> None:
        mark, network = uuid.uuid4().hex[:8], 1 + os.getpid() % 250
        self.nodes = tuple(
            Node(
                number,
                f"hydragraph-{mark}-{number}",
                f"link{number}",
                f"10.77.{network}.{number + 1}",
                f"node{number}",
                folder / f"node{number}",
                f"{mark}-{number}",
            )
            for number in range(self.count)
        )
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        names = [f"{node.address} {node.hostname}\n" for node in self.nodes]
        (self._folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        try:
            for node in self.nodes:
                node.folder.mkdir(exist_ok=True)
                _ip("netns", "add", node.namespace)
            self._join()
            for node in self.nodes:
                _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", node.interface)
                for interface in ("lo", node.interface):
                    _ip("-n", node.namespace, "link", "set", interface, "up")
            self.nodes = tuple(replace(node, init=self._begun(node)) for node in self.nodes)
        except BaseException:
            self.close()
            raise
        return self

    def _join(self) -> None:
        first, second = self.nodes
        _ip("link", "add", first.interface, "netns", first.namespace, "type", "veth",
            "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip

    def _begun(self, node: Node) -> int:
        """Start a node's first process, and return it."""
        isolated = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = ["sh", "-c", _INIT, "sh", node.hostname, str(self._folder / "hosts")]
        process = subprocess.Popen(
            ["ip", "netns", "exec", node.namespace, *isolated, *inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, MARK: node.mark},
            start_new_session=True,
        )
        assert process.stdout is not None
        self._processes.append(process)
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{node.hostname} did not start")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return int(children.split()[0])

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def down(self) -> None:
        """Pull the cable: what is under way is lost, and neither end hears of it."""
        _ip("-n", self.nodes[1].namespace, "link", "set", self.nodes[1].interface, "down")

    def up(self) -> None:
        """Plug it in again."""
        _ip("-n", self.nodes[1].namespace, "link", "set", self.nodes[1].interface, "up")

    def shape(self, bits_per_s: float, senders: Sequence[Node] | None = None) -> None:
        """Let the link carry no more than so much from each of these nodes; None: in both directions."""
        for node in self.nodes if senders is None else senders:
            _run("tc", "-n", node.namespace, "qdisc", "replace", "dev", node.interface, "root", *limited(bits_per_s))

    def sent_bytes(self) -> tuple[int, int]:
        """Return what each node has sent over the link since it was made, headers included."""
        found = []
        for node in self.nodes:
            told = json.loads(_ip("-n", node.namespace, "-s", "-j", "link", "show", "dev", node.interface))
            found.append(int(told[0]["stats64"]["tx"]["bytes"]))
        return found[0], found[1]

    def close(self) -> None:
        """End what runs on the nodes, and remove them."""
        deadline = time.monotonic() + 10
        while left := [pid for node in self.nodes for pid in node.processes()]:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for node in self.nodes:
            subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True, check=False)
            shutil.rmtree(node.folder, ignore_errors=True)


class ThreeNodes(TwoNodes):
    """Makes three nodes, joined by a bridge; arguments as for `TwoNodes`."""

    count = 3

    def _join(self) -> None:
        """Join all nodes by a bridge in a namespace of its own."""
        self._bridge = self.nodes[0].namespace.removesuffix("-0") + "-bridge"
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for node in self.nodes:
            port = f"port{node.number}"
            _ip("link", "add", node.interface, "netns", node.namespace, "type", "veth",
                "peer", "name", port, "netns", self._bridge)  # fmt: skip
            _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")

    def cut(self, one: int, other: int) -> None:
        """Lose all frames between two nodes, silently and in both directions."""
        for here, there in ((one, other), (other, one)):
            neighbour = self._neighbour(here, there)
            _ip(
                "-n",
                self.nodes[here].namespace,
                "neighbour",
                "replace",
                *neighbour,
                "lladdr",
                _NOBODY,
                "nud",
                "permanent",
            )

    def heal(self, one: int, other: int) -> None:
        """Undo `cut`."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.nodes[here].namespace, "neighbour", "del", *self._neighbour(here, there))

    def _neighbour(self, here: int, there: int) -> tuple[str, str, str]:
        return self.nodes[there].address, "dev", self.nodes[here].interface

    def close(self) -> None:
        """End what runs on the nodes, and remove them with their bridge."""
        super().close()
        subprocess.run(["ip", "netns", "del", self._bridge], capture_output=True, check=False)


def torchrun(node: Node, nodes: TwoNodes, per_node: int, *, rendezvous: str = "static", restarts: int = 0) -> list[str]:
    """Return the command, without the program, that starts a node's ranks.

    Args:
        node: whose.
        nodes: all.
        per_node: ranks of each.
        rendezvous: "static": node 0 keeps the store, and each node gets its number; "c10d": they find theirs.
        restarts: how many times torchrun starts all ranks anew.
    """
    first, port = nodes[0].address, "29511"
    common = ["--nnodes", str(nodes.count), "--nproc-per-node", str(per_node), "--max-restarts", str(restarts)]
    if rendezvous == "static":
        where = ["--node-rank", str(node.number), "--master-addr", first, "--master-port", port]
    else:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{port}", "--rdzv-id", "test"]
        where += ["--local-addr", node.address]
    return [sys.executable, "-m", "torch.distributed.run", *common, *where]


def limited(bits_per_s: float) -> list[str]:
    """Return tc's words for a queue that lets no more than so much through."""
    burst = max(BURST_BYTES, int(bits_per_s / 8 / 250))  # at least what a kernel of 250 ticks lets through in one
    return ["tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(burst), "latency", "100ms"]


def _fresh() -> str:
    return f"hydragraph-try-{uuid.uuid4().hex[:8]}"


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _environment(process: Path) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it has ended or belongs to another user."""
    try:
        data = (process / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _state(pid: int) -> str:
    """Return a process's state, such as R, S, T or Z; "" where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
