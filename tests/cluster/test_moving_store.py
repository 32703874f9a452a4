"""A store that moves: what a rank has written is in the next one, and a request to the lost one is repeated there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hydragraph.cluster.moving_store import MovingStore, follows, write_address
from hydragraph.cluster.processes.rendezvous_stores import client, hosted
from hydragraph.cluster.rendezvous.member import Member
from hydragraph.cluster.rendezvous.protocol import CoordinatorRegister, Generation, MemberRegister
from hydragraph.cluster.rendezvous.store_registers import MemberDescription, Registers
from hydragraph.errors import RankFailure

HOST = "127.0.0.1"
PATIENCE_S = 20.0


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_rank_follows_the_store_with_what_it_has_written(tmp_path: Path) -> None:
    assert not follows(None)
    assert not follows(str(tmp_path))
    first, second = hosted(HOST, 0), hosted(HOST, 0)
    write_address(str(tmp_path), HOST, first.port)
    assert follows(str(tmp_path))
    moves: list[float] = []
    moving = MovingStore(str(tmp_path), lambda: moves.append(time.monotonic()))
    line, heard = moving.line(), moving.line()
    line.set("mine", "1")
    line.set("mine", "2")
    client(HOST, first.port).set("theirs", "old")
    assert heard.get("theirs") == b"old"
    answers: list[bytes] = []
    # A request that the first store never answers, as if it were frozen.
    waiting = threading.Thread(target=lambda: answers.append(heard.get("later")), daemon=True)
    waiting.start()
    write_address(str(tmp_path), HOST, second.port)
    new = client(HOST, second.port, timedelta(seconds=PATIENCE_S))
    until(lambda: new.check(["mine"]))
    assert new.get("mine") == b"2"
    assert not new.check(["theirs"])
    assert len(moves) == 1
    new.set("later", "now")
    waiting.join(PATIENCE_S)
    assert answers == [b"now"]
    line.set("more", "3")
    assert new.get("more") == b"3"
    assert moving.connect().get("more") == b"3"


def test_a_member_does_not_wait_for_a_peer_that_the_next_store_does_not_know(tmp_path: Path) -> None:
    first, second = hosted(HOST, 0), hosted(HOST, 0)
    write_address(str(tmp_path), HOST, first.port)
    registers = Registers(client(HOST, first.port))
    registers.order(CoordinatorRegister())
    registers.say(1, MemberRegister())
    registers.introduce(MemberDescription(0, 0, 1, HOST))
    member = Member(1, lambda: client(HOST, first.port), 1.0, str(tmp_path), 2, 0)
    member.introduce(MemberDescription(1, 1, 1, HOST))
    member.generation = Generation(1, (0, 1))
    assert [peer.member for peer in member.peers] == [0, 1]
    write_address(str(tmp_path), HOST, second.port)
    until(lambda: client(HOST, second.port).check(["hydragraph/meeting/peer/1"]))
    with pytest.raises(RankFailure, match="does not know member 0"):
        _ = member.peers
    member.leave()


def test_a_store_that_is_lost_before_it_is_reached_is_passed_over(tmp_path: Path) -> None:
    first, last = hosted(HOST, 0), hosted(HOST, 0)
    write_address(str(tmp_path), HOST, first.port)
    line = MovingStore(str(tmp_path), lambda: None).line()
    line.set("mine", "1")
    lost = hosted(HOST, 0)
    port = lost.port
    del lost
    write_address(str(tmp_path), HOST, port)
    time.sleep(0.3)
    write_address(str(tmp_path), HOST, last.port)
    new = client(HOST, last.port, timedelta(seconds=PATIENCE_S))
    until(lambda: new.check(["mine"]))
