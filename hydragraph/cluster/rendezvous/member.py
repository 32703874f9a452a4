"""A rank's side of the rendezvous."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hydragraph.cluster.failure.newest_watch import newest_watch, watch_of
from hydragraph.cluster.failure.time_limits import PROGRESS_S
from hydragraph.cluster.interface import interface_for
from hydragraph.cluster.moving_store import MovingStore
from hydragraph.cluster.rendezvous.protocol import CoordinatorRegister, Generation, MemberRegister, attend
from hydragraph.cluster.rendezvous.store_registers import MemberDescription, Registers, prefix
from hydragraph.cluster.unreachable import explained, write_addresses
from hydragraph.errors import RankFailure
from hydragraph.private.process_groups import drop_all

_LOG = logging.getLogger(__name__)

# Seconds between polls while waiting for a generation
_POLL_S = 0.01
# Seconds between polls while working
_EAR_S = 0.05

# Value of `Executable.stopping` if the coordinator calls this member; above all signal numbers
CALLED = 1000


class MemberDismissed(BaseException):
    """Raised when this process leaves the ranks without an error."""


class Member:
    """This process as a member of an elastic launch.

    Args:
        connect: returns a new client of the store, because the old one may still be waiting.
        grace_s: seconds after SIGTERM until this process ends, even if it still holds state.
        folder: private folder of the supervisor, if the store moves.
        ranks: number of ranks that the launch asks for.
    """

    def __init__(
        self, number: int, connect: Callable[[], Store], grace_s: float, folder: str | None, ranks: int, gpu: int
    ) -> None:
        self.number = number
        self.gpu = gpu
        self.ranks = ranks
        self.generation = Generation()
        self.holds = 0
        self.leaving = False
        self.progress_s = PROGRESS_S
        self._grace_s = grace_s
        self._moving = MovingStore(folder, self._moved) if folder is not None else None
        self._connect = connect if self._moving is None else self._moving.connect
        line = connect if self._moving is None else self._moving.line
        self._place = Registers(line())
        self._heard = Registers(line())
        self._orders = CoordinatorRegister()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="hydragraph-ear", daemon=True).start()

    def introduce(self, peer: MemberDescription) -> None:
        self._place.introduce(peer)
        if self._moving is not None:
            # If the store moves, this process repeats the register there.
            self._place.say(self.number, self._place.said(self.number))

    @property
    def called(self) -> bool:
        """Whether this member should meet the others before its next iteration."""
        return self._orders.call > self.generation.number or (self.leaving and self.generation.number > 0)

    @property
    def fenced(self) -> bool:
        """Whether a disconnected machine ends its ranks before others continue without it."""
        return self._moving is not None

    @property
    def told_to_stop(self) -> bool:
        return self._orders.stop

    @property
    def rank(self) -> int:
        return self.generation.members.index(self.number)

    @property
    def peers(self) -> tuple[MemberDescription, ...]:
        """Descriptions of this generation's members; raises RankFailure if the store is lost."""
        return tuple(map(self._peer, self.generation.members))

    def _peer(self, member: int) -> MemberDescription:
        peer = self._place.peer(member)
        if peer is None:
            raise RankFailure(self.rank, "join", f"the rendezvous store has moved, and does not know member {member}")
        return peer

    def meet(self, failure: BaseException | None = None) -> Generation:
        """Leave the current generation, and enter the next one with an initialized process group.

        Args:
            failure: error that names the rank at fault; None for a new or called member.
        """
        while True:
            accuses = self._accused(failure)
            after = self.generation.number
            leaving = self.leaving and after > 0
            # If the new generation cannot connect, `_enter` has set `self.generation`, so the next
            # round announces that this member has left it as well.
            generation = self._wait(MemberRegister(after, True, holds=self.holds, accuses=accuses, leaving=leaving))
            try:
                self._enter(generation)
            except RankFailure as again:
                failure = again
                continue
            return generation

    def hold(self) -> None:
        """Announce that this member holds its generation's state."""
        self.holds = self.generation.number
        self._place.say(self.number, replace(self._place.said(self.number), holds=self.holds))

    def leave(self, done: bool = False) -> None:
        self._closed.set()
        self._place.say(self.number, MemberRegister(self.generation.number, holds=self.holds, left=True, done=done))

    def listen_to_signals(self) -> None:
        """On SIGTERM, hand over the state and exit; ignore Ctrl-C and SIGUSR1."""
        signal.signal(signal.SIGTERM, self._asked)
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if not self.leaving:
            self.leaving = True
            end = threading.Timer(self._grace_s, os._exit, (128 + number,))
            end.daemon = True
            end.start()

    def _accused(self, failure: BaseException | None) -> tuple[int, ...]:
        if not isinstance(failure, RankFailure) or not 0 <= failure.rank < len(self.generation.members):
            return ()
        accused = self.generation.members[failure.rank]
        return () if accused == self.number else (accused,)

    def _wait(self, said: MemberRegister) -> Generation:
        self._place.say(self.number, said)
        while True:
            orders = self._place.orders()
            if orders.over or self.number in orders.out:
                raise MemberDismissed(orders.over or "other ranks have continued without this rank")
            # SIGTERM arrived during the wait. The proposal lists leaving members, so announce it before
            # agreeing.
            if self.leaving and said.after and not said.leaving and not said.agreed:
                said = replace(said, leaving=True)
                self._place.say(self.number, said)
            answer = attend(self.number, said, orders)
            if isinstance(answer, Generation):
                return answer
            if answer is not None:
                said = answer
                self._place.say(self.number, said)
            else:
                time.sleep(_POLL_S)

    def _enter(self, generation: Generation) -> None:
        self.generation = generation
        # Announce first: members that then do not follow are given up (`awaited`).
        self._place.say(self.number, replace(self._place.said(self.number), entered=generation.number))
        # Free the previous watch and groups: a process has one default group.
        last = newest_watch()
        if last is not None and not last.closed:
            last.close()
        drop_all()
        rank = self.rank
        ranks = len(generation.members)
        nodes = {peer.member: peer.node for peer in self.peers}
        # here: this node's members in rank order; nodes: member -> node
        here = [member for member in generation.members if nodes[member] == nodes[self.number]]
        os.environ |= {"LOCAL_RANK": str(here.index(self.number)), "LOCAL_WORLD_SIZE": str(len(here))}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        # Without RANK, `launch.join` makes a world of one rank, without a group.
        if ranks == 1:
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
        _LOG.info("generation %d: rank %d of %d", generation.number, rank, ranks)
        if ranks > 1:
            try:
                store = dist.PrefixStore(prefix(generation.number), self._connect())
                meet("gloo", store, rank, ranks, prefix(generation.number), self.progress_s)
            except (OSError, dist.DistError) as error:
                if self._moving is None:
                    raise
                raise RankFailure(rank, "join", f"the rendezvous store is lost ({error})") from error

    def _moved(self) -> None:
        watch = newest_watch()
        if watch is not None:
            watch.lose_store()

    def _listen(self) -> None:
        while not self._closed.wait(_EAR_S):
            try:
                self._orders = self._heard.orders()
            except RuntimeError:
                return


def meet(
    backend: str, store: Store, rank: int, ranks: int, generation: str = "", progress_s: float = PROGRESS_S
) -> None:
    """Create the default process group, watched from the start."""
    _choose_interface()

    def make() -> None:
        if _on_several_machines():
            write_addresses(store, rank)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        except RuntimeError as error:
            raise explained(error, store, rank, ranks) from error

    # Before the group, because ranks can be lost while they connect.
    watch = watch_of(None, lambda: store, rank, ranks, generation)
    watch.progress_s = progress_s
    # Outside of elastic launches, the user owns the default group.
    cut = watch.guarding() if elastic() else nullcontext()
    with watch.calling("join"), cut:
        watch.call(make)


def _choose_interface() -> None:
    here = [name for _, name in socket.if_nameindex()]
    for given in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if given not in here:
            raise ValueError(f"GLOO_SOCKET_IFNAME is {given}: no such interface here; use {', '.join(here)}")
    if _on_several_machines() and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_for(os.environ.get("MASTER_ADDR", "localhost"))
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _on_several_machines() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")


class _Here:
    member: Member | None = None


def here() -> Member | None:
    """Return this process as a member, or None without an elastic launch."""
    return _Here.member


def be(member: Member) -> None:
    _Here.member = member


def elastic() -> bool:
    return _Here.member is not None


def comes_late() -> bool:
    return _Here.member is not None and not _Here.member.generation.number


class LauncherRequests:
    @property
    def signal(self) -> int:
        return int(signal.SIGTERM) if _Here.member is not None and _Here.member.told_to_stop else 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Do nothing: a member only records requests."""
        yield
