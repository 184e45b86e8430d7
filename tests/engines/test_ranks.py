"""Ranks of one engine: they agree on what they found, and an order that fails ends one of them, and so the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from holdfast.core.tasks import beside
from holdfast.engines.ranks import follower
from holdfast.engines.ranks.frames import LeaderAgreement, RankAgreement
from holdfast.kv.adopt import QUARANTINED, REFUSED, YOURS, Survey
from holdfast.memory.client.calls import VaultRefused
from holdfast.testing.waiting import until

WAKE_S = 30.0
KEYS = [bytes([number]) * 16 for number in range(3)]


def survey(*verdicts: int, keys: list[bytes] = KEYS) -> Survey:
    return Survey("", 7, 0, bytes(verdicts), b"".join(keys))


@dataclass
class Group:
    leader: LeaderAgreement
    ranks: list[RankAgreement]
    theirs: list[socket.socket]
    fences: list[str]


@pytest.fixture
def group() -> Iterator[Group]:
    """A leader and two others."""
    pairs = [socket.socketpair() for _ in range(2)]
    for each in (each for pair in pairs for each in pair):
        each.setblocking(False)
    fences: list[str] = []

    async def fenced() -> None:
        fences.append("waited for")

    leader = LeaderAgreement([ours for ours, _ in pairs], WAKE_S, fenced)
    ranks = [RankAgreement(rank, theirs, WAKE_S) for rank, (_, theirs) in enumerate(pairs, 1)]
    yield Group(leader, ranks, [theirs for _, theirs in pairs], fences)
    for each in (each for pair in pairs for each in pair):
        each.close()


async def test_a_block_is_believed_where_every_rank_has_it(group: Group) -> None:
    """The same block under another key is nobody's; what one has in quarantine, all have."""
    first = survey(YOURS, YOURS, YOURS)
    second = survey(YOURS, YOURS, QUARANTINED)
    third = survey(YOURS, YOURS, YOURS, keys=[KEYS[0], KEYS[2], KEYS[2]])
    found = await asyncio.gather(group.leader.agree(first), group.ranks[0].agree(second), group.ranks[1].agree(third))
    assert [each.verdicts for each in found] == [bytes([YOURS, REFUSED, QUARANTINED])] * 3
    again = await asyncio.gather(*(each.agree(first) for each in (group.leader, *group.ranks)))
    assert [each.verdicts for each in again] == [bytes([YOURS] * 3)] * 3


async def test_a_rank_that_is_gone_is_an_error_at_once(group: Group) -> None:
    """Nobody believes anything of a pool that not everyone was asked about."""
    waiting = asyncio.ensure_future(group.leader.agree(survey(YOURS, YOURS, YOURS)))
    others = asyncio.ensure_future(group.ranks[0].agree(survey(YOURS, YOURS, YOURS)))
    group.theirs[1].close()
    with pytest.raises(ConnectionError):
        await waiting
    others.cancel()


async def test_the_leader_alone_waits_for_the_others_fences(group: Group) -> None:
    """It alone gives blocks to anybody."""
    await group.ranks[0].fenced()
    assert group.fences == []
    await group.leader.fenced()
    assert group.fences == ["waited for"]


@pytest.mark.parametrize(
    ("error", "told", "logged"),
    [
        (VaultRefused("WARM", "they are in host memory"), "wake failed: they are in host memory (WARM)", 0),
        (TimeoutError(), "wake failed: TimeoutError", 0),
        (KeyError("x"), "KeyError: 'x'", 1),
    ],
)
async def test_an_order_that_fails_ends_the_rank_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, told: str, logged: int
) -> None:
    """A traceback is for our own bugs."""
    ends: list[str] = []
    monkeypatch.setattr(follower, "end", ends.append)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    class Rank:
        async def wake(self, epoch: int) -> None:
            assert epoch == 7
            raise error

    with ours, caplog.at_level(logging.ERROR):
        orders = follower.LeaderLink(follower.Tether(theirs.detach(), 0))
        async with beside(orders.obey(Rank()), "rank"):
            ours.send(json.dumps([1, "wake", {"epoch": 7}]).encode())
            await until(lambda: bool(ends), "its end")
            await asyncio.sleep(0)
    assert (ends, len(caplog.records)) == ([told], logged)
